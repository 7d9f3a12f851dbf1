"""Continuous batching of transformers through flash_cute: tokens and probabilities beside eager attention's.

Prompts of mixed lengths are prefilled in chunks beside running ones, in a cache that holds NaN at first.
"""

from __future__ import annotations

import copy

import pytest
import torch
from support.tolerance import assert_within_rule

transformers = pytest.importorskip("transformers", minversion="5.23", reason="needs transformers 5.23")

from support.transformers_models import GROUPED, MODELS, SIZES, build  # noqa: E402
from transformers.generation.continuous_batching import (  # noqa: E402
    PagedAttentionCache,
    cache_allocators,
    initialization,
    input_outputs,
    model_runner,
)

import flash_cute  # noqa: E402
from flash_cute.integrations import _transformers_paged as paged  # noqa: E402

NAME = "cute_flash_attention_3"
STEPS = 12
DTYPE = torch.float16  # whose rounding seldom makes another token the best one
LARGE_WEIGHTS = {"initializer_range": 0.1}  # so that attention is not nearly the mean of all values
NAMES = ["llama", "qwen", "mistral", "one layer of two with a window", "softcap"]
GEMMA = GROUPED | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6, "num_hidden_layers": 3}
GEMMA |= {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
BATCHED = {name: MODELS[name] for name in NAMES}
BATCHED["gemma"] = ("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA)


@pytest.fixture
def steps(monkeypatch) -> list[tuple[list[int], bool]]:
    """Of each step: the numbers of queries of its sequences, and whether it has a block table."""
    prepare, found = input_outputs.ContinuousBatchingIOs.prepare_batch_tensors, []

    def recorded(self, requests_in_batch, *arguments, **options):
        prepare(self, requests_in_batch, *arguments, **options)
        found.append(([request.query_length for request in requests_in_batch], self.use_block_table))

    monkeypatch.setattr(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors", recorded)
    return found


class Trio:
    """A model with our attention and with eager attention in float16, and with eager attention in float64."""

    def __init__(self, name: str, device):
        self.ours = build(name, device).to(DTYPE).eval()
        self.yardstick, self.oracle = copy.deepcopy(self.ours), copy.deepcopy(self.ours).double()
        self.ours.set_attn_implementation(NAME)


@pytest.fixture
def trio(request, device, monkeypatch) -> Trio:
    *classes, sizes = BATCHED[request.param]
    monkeypatch.setitem(MODELS, request.param, (*classes, sizes | LARGE_WEIGHTS))
    return Trio(request.param, device)


def poison_caches(monkeypatch) -> None:
    make = PagedAttentionCache.__init__

    def poisoned(self, *arguments, **options):
        make(self, *arguments, **options)
        self.cache_tensor.view(DTYPE).fill_(torch.nan)

    monkeypatch.setattr(PagedAttentionCache, "__init__", poisoned)


def pad_batches(monkeypatch) -> None:
    """As transformers does for CUDA graphs and torch.compile."""
    padded = property(lambda _: True, lambda *_: None)
    monkeypatch.setattr(model_runner.ModelRunner, "pad_inputs", padded, raising=False)


def prompts() -> list[list[int]]:
    """One needs several chunks, and one begins like it, so that they share pages."""
    rows = [torch.randint(1, SIZES["vocab_size"], (n,)).tolist() for n in (3, 17, 57, 9, 1, 25)]
    return [*rows, rows[2][:20] + rows[3]]


def batched(model: torch.nn.Module, texts: list[list[int]], **options) -> list:
    """What generate_batch returns for each of the texts."""
    given = {"page_size": 8, "num_blocks": 64, "max_batch_tokens": 24, "max_requests_per_batch": 4}
    generation = transformers.GenerationConfig(
        max_new_tokens=STEPS, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    config = transformers.ContinuousBatchingConfig(return_logprobs=True, **given | options)
    results = model.generate_batch(texts, generation_config=generation, continuous_batching_config=config)
    assert len(results) == len(texts)
    assert [result.error for result in results.values()] == [None] * len(texts)
    by_prompt = {tuple(result.prompt_ids): result for result in results.values()}
    return [by_prompt[tuple(text)] for text in texts]


@torch.no_grad()
def assert_texts(trio: Trio, texts: list[list[int]], results: list) -> None:
    """Probabilities within the rule; tokens are eager's where no such error could change the best one."""
    ours, yardstick, oracle, chosen = [], [], [], []
    for text, result in zip(texts, results, strict=True):
        tokens = torch.tensor(result.generated_tokens)
        assert len(tokens) == STEPS
        ids = torch.tensor([text + result.generated_tokens[:-1]], device=trio.ours.device)
        eager, exact = (
            model(ids).logits[0, len(text) - 1 :].double().log_softmax(-1).cpu()
            for model in (trio.yardstick, trio.oracle)
        )
        ours.append(torch.tensor(result.logprobs, dtype=torch.float64))
        yardstick.append(eager)
        oracle.append(exact)
        chosen.append(tokens)
    ours, yardstick, oracle, chosen = (torch.cat(x) for x in (ours, yardstick, oracle, chosen))
    of_chosen = [x.gather(1, chosen[:, None])[:, 0] for x in (yardstick, oracle)]
    assert_within_rule("logprobs", ours, *of_chosen)
    best = oracle.topk(2).values
    clear = best[:, 0] - best[:, 1] > 4 * (yardstick - oracle).abs().max()
    assert clear.float().mean() > 0.5
    assert torch.equal(chosen[clear], yardstick.argmax(-1)[clear])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("trio", BATCHED, indirect=True)
def test_continuous_batching(trio, steps, monkeypatch, padded):
    """Layers without a window are read from their pages: transformers gathers nothing of them."""
    poison_caches(monkeypatch)
    if padded:
        pad_batches(monkeypatch)
    gathered = cache_allocators.FullAttentionCacheAllocator.update

    def refused(self, *arguments):
        assert not self.supports_block_table
        return gathered(self, *arguments)

    monkeypatch.setattr(cache_allocators.FullAttentionCacheAllocator, "update", refused)
    texts = prompts()
    results = batched(trio.ours, texts)
    assert any(1 in lengths and max(lengths) > 1 for lengths, _ in steps)
    assert_texts(trio, texts, results)


@pytest.mark.parametrize("kind", ["as it is", "padded", pytest.param("compiled", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("trio", ["llama"], indirect=True)
def test_block_tables(trio, steps, monkeypatch, kind):
    """transformers makes them on GPUs, for batches of single queries."""
    poison_caches(monkeypatch)
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *_: None)
    options = {}
    if kind == "padded":
        pad_batches(monkeypatch)
    elif kind == "compiled":
        torch._dynamo.reset()
        options = {"decode_compile_config": transformers.CompileConfig(mode=None, dynamic=True)}
    texts = prompts()
    results = batched(trio.ours, texts, max_blocks_per_request=16, **options)
    assert {table for _, table in steps} == {False, True}
    assert_texts(trio, texts, results)


@pytest.mark.parametrize("trio", ["llama"], indirect=True)
def test_where_pages_are_not_read(trio, monkeypatch):
    """On GPUs other than Hopper transformers gathers, and makes no block tables."""
    monkeypatch.setattr(paged, "_reads_pages", lambda device: False)
    monkeypatch.setattr(paged.modeling_flash_attention_utils, "_loaded_implementation", None)
    monkeypatch.setattr(flash_cute, "append_kv", None)
    texts = prompts()
    assert_texts(trio, texts, batched(trio.ours, texts))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert paged._imports(NAME)[2] is None


@pytest.mark.parametrize(("capability", "expected"), [((8, 0), False), ((9, 0), True), ((10, 0), False)])
def test_which_gpus_read_pages(monkeypatch, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert paged._reads_pages(torch.device("cuda")) is expected
    assert paged._reads_pages(torch.device("cpu"))


@pytest.mark.parametrize("trio", ["llama"], indirect=True)
def test_other_names_are_left_alone(trio):
    """Those of transformers gather as before, although the class is changed."""
    texts = prompts()
    trio.ours.set_attn_implementation("paged|eager")
    assert_texts(trio, texts, batched(trio.ours, texts))
