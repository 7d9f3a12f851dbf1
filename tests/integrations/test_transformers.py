"""flash_cute under transformers: small models of random weights beside the same models with other attention.

The project's rule, for whole models: errors against SDPA in float64 are at most twice those of eager
attention in bfloat16. (In float64, that gives NaN where a query sees nothing.) Padding is not compared.
"""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
from inspect import signature
from types import SimpleNamespace

import pytest
import torch
from support.cases import ROOT
from support.tolerance import assert_within_rule
from torch._dynamo.testing import CompileCounter

transformers = pytest.importorskip("transformers", minversion="5", reason="needs transformers 5")

from support.transformers_models import (  # noqa: E402
    BATCH,
    BIASED,
    DTYPE,
    ENCODER,
    GROUPED,
    HOLES,
    LENGTH,
    MAKE,
    MODELS,
    NARROW,
    Trio,
    as_trio,
    assert_generated,
    assert_logits,
    build,
    padding,
    tokens,
)

import flash_cute  # noqa: E402
from flash_cute import dot_product_attention, lengths, masks, reference  # noqa: E402
from flash_cute.integrations import _transformers_masks  # noqa: E402
from flash_cute.integrations import transformers as face  # noqa: E402
from flash_cute.integrations.transformers import (  # noqa: E402
    CuteMask,
    cute_attention,
    cute_mask,
    expect_holes,
    ranges_mask,
)

DECODERS = [name for name in MODELS if name not in ("bert", "bart")]


@pytest.fixture(params=MODELS)
def trio(request, device) -> Trio:
    torch._dynamo.reset()
    return Trio(request.param, device)


# Logits, loss and gradients


@pytest.mark.parametrize("kind", ["none", "left", "right", "both"])
def test_logits(trio, device, kind):
    mask = padding(kind, device)
    inputs = {"input_ids": tokens(device), "attention_mask": mask}
    assert_logits(trio, inputs, None if mask is None else mask.bool())


@pytest.mark.parametrize("kind", ["none", "both"])
def test_losses_and_gradients(trio, device, kind):
    """The losses of the tokens one by one: their mean may be right by chance."""
    ids, mask = tokens(device), padding(kind, device)
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    losses, gradients = [], []
    for model in trio.all:
        result = model.train()(input_ids=ids, attention_mask=mask, labels=labels)
        result.loss.backward()
        each = torch.nn.functional.cross_entropy(result.logits.double().mT, labels, reduction="none")
        losses.append(each.detach())
        gradients.append(
            torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])
        )
    assert_within_rule("losses", *losses)
    assert_within_rule("gradients", *gradients)


def test_position_ids_that_restart(trio, device):
    """Several sequences in a row, told from their positions; encoders have no such thing."""
    if not trio.ours.config.model_type.startswith(("gpt2", "llama", "qwen", "mistral", "gemma")):
        pytest.skip("an encoder")
    positions = torch.stack([torch.cat([torch.arange(n) for n in rows]) for rows in ((9, 11), (1, 4, 15))])
    assert_logits(
        trio, {"input_ids": tokens(device, 2), "position_ids": positions.to(device), "use_cache": False}
    )


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_cu_seq_lens(device, name):
    """Of transformers' collator without padding, beside positions."""
    trio, ids = Trio(name, device), tokens(device, 1)
    offsets = torch.tensor([0, 9, 20], dtype=torch.int32, device=device)
    positions = torch.cat([torch.arange(9), torch.arange(11)])[None].to(device)
    inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    lens = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 11, "max_length_k": 11}
    ours = trio.ours(**inputs, **lens).logits
    yardstick, oracle = (model(**inputs).logits for model in (trio.yardstick, trio.oracle))
    assert_within_rule("logits", *(x.detach() for x in (ours, yardstick, oracle)))


def test_autocast(device):
    """Of a float32 model; the yardstick is eager attention under autocast, too."""
    model = build("llama", device).eval()
    ids, mask = tokens(device), padding("left", device)
    results = []
    for implementation in ("cute_attention", "eager"):
        model.set_attn_implementation(implementation)
        with torch.autocast(device.type, DTYPE):
            results.append(model(ids, attention_mask=mask).logits[mask.bool()].detach())
    model.set_attn_implementation("sdpa")
    oracle = model.double()(ids, attention_mask=mask).logits[mask.bool()].detach()
    assert_within_rule("logits", *results, oracle)


@pytest.mark.parametrize(
    "name", ["llama", "mistral", "sinks", "softcap", "bert", "bart", "T5", "Swin", "BEiT"]
)
@torch.no_grad()
def test_output_attentions(device, name):
    """Of queries that are no padding; the oracle is eager attention in float32, as SDPA has none."""
    trio = Trio(name, device)
    trio.oracle.float().set_attn_implementation("eager")
    mask = padding("both", device)
    if name in ("Swin", "BEiT"):
        mask, inputs = None, {"pixel_values": torch.randn(BATCH, 3, 32, 32, device=device)}
    else:
        inputs = {"input_ids": tokens(device), "attention_mask": mask}
    if name in ("bart", "T5"):
        inputs["decoder_input_ids"] = tokens(device, length=12)
    results = []
    for model in trio.all:
        given = {n: x.to(model.dtype) if n == "pixel_values" else x for n, x in inputs.items()}
        results.append(model(**given, output_attentions=True))
    found = [key for key in results[0] if "attentions" in key]
    assert len(found) == (3 if "decoder_input_ids" in inputs else 1)
    for key in found:
        for ours, yardstick, oracle in zip(*(result[key] for result in results), strict=True):
            assert ours.dtype == DTYPE
            assert ours.shape == yardstick.shape
            kept = ours, yardstick, oracle.double()
            if mask is not None and ours.shape[2] == LENGTH:
                kept = (x.transpose(1, 2)[mask.bool()] for x in kept)
            assert_within_rule(key, *kept)


@torch.no_grad()
def test_output_attentions_of_generate(device):
    """Of each step, those of all keys in the cache."""
    trio, steps = Trio("llama", device), []
    for model in trio.all[:2]:
        options = {"return_dict_in_generate": True, "output_attentions": True, "do_sample": False}
        steps.append(model.generate(tokens(device), max_new_tokens=3, **options).attentions)
    shapes = [[[layer.shape for layer in step] for step in found] for found in steps]
    assert shapes[0] == shapes[1]
    assert [step[0].shape[3] for step in steps[0]] == [LENGTH, LENGTH + 1, LENGTH + 2]


# Caches and generation


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_generate(device, name, cache):
    """Logits of each step beside those of the whole text at once; the tokens follow from them."""
    trio, mask = Trio(name, device), padding("left", device)
    ids, steps = tokens(device), 12
    options = {
        "max_new_tokens": steps,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    if cache:
        options |= {"cache_implementation": cache, "disable_compile": True}
    result = trio.ours.generate(ids, attention_mask=mask, **options)
    assert result.sequences.shape == (BATCH, LENGTH + steps)
    ours = torch.stack(result.logits, 1)
    assert torch.equal(ours.argmax(-1), result.sequences[:, LENGTH:])
    text = result.sequences[:, :-1]
    mask = torch.nn.functional.pad(mask, (0, steps - 1), value=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    yardstick, oracle = (
        model(text, attention_mask=mask, position_ids=positions).logits[:, LENGTH - 1 :]
        for model in (trio.yardstick, trio.oracle)
    )
    assert_within_rule("logits", ours, yardstick, oracle)


NAMES = ["cute_attention", *(["cute_flash_attention_3"] if face.VERSION >= (5, 23) else [])]


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
@torch.no_grad()
def test_generate_by_either_name(device, name, cache):
    model, ids, mask = Trio(name, device).ours, tokens(device), padding("left", device)
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    if cache:
        options |= {"cache_implementation": cache, "disable_compile": True}
    results = []
    for implementation in NAMES:
        model.set_attn_implementation(implementation)
        results.append(torch.stack(model.generate(ids, attention_mask=mask, **options).logits))
    assert torch.equal(results[0], results[-1])


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("name", NARROW)
def test_values_of_another_head_dim(device, name, implementation, monkeypatch):
    """Logits, gradients and generation; values reach the operator as wide as they are."""
    if not hasattr(transformers, NARROW[name][0]):
        pytest.skip("this transformers has no such model")
    trio, ids, widths = Trio(name, device), tokens(device), set()
    trio.ours.set_attn_implementation(implementation)
    attention = face.flash_cute.attention

    def observed(q, k, v, **options):
        widths.add((q.shape[-1], k.shape[-1], v.shape[-1]))
        return attention(q, k, v, **options)

    monkeypatch.setattr(face.flash_cute, "attention", observed)
    mask = padding("right", device)
    assert_logits(trio, {"input_ids": ids, "attention_mask": mask}, mask.bool())
    gradients = []
    for model in trio.all:
        model(input_ids=ids, labels=ids).loss.backward()
        named = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
        gradients.append(torch.cat([grad.flatten().double() for _, grad in named]))
    assert_within_rule("gradients", *gradients)
    with torch.no_grad():
        for cache in (None, "static"):
            assert_generated(trio, cache, input_ids=ids, attention_mask=padding("left", device))
    assert widths == {(24, 24, 16)}


@torch.no_grad()
def test_prompts_in_pieces(device):
    """Several queries at a time behind a cache."""
    trio, ids = Trio("mistral", device), tokens(device)
    cache = transformers.DynamicCache(config=trio.ours.config)
    pieces = [trio.ours(piece, past_key_values=cache).logits for piece in ids.split([9, 7, 4], 1)]
    yardstick, oracle = (model(ids).logits for model in (trio.yardstick, trio.oracle))
    assert_within_rule("logits", torch.cat(pieces, 1), yardstick, oracle)


# Under torch.compile, in Trainer, without waiting


@pytest.mark.parametrize("kind", ["none", "both"])
@pytest.mark.parametrize("name", ["llama", "mistral", "bert"])
def test_compiled(device, name, kind):
    trio, mask = Trio(name, device), padding(kind, device)
    torch._dynamo.reset()
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    inputs = {"input_ids": tokens(device), "attention_mask": mask, "use_cache": False}
    inputs = {key: value for key, value in inputs.items() if name != "bert" or key != "use_cache"}
    compiled = torch.compile(trio.ours, fullgraph=True, backend=backend)
    trio.all = compiled, trio.yardstick, trio.oracle
    assert_logits(trio, inputs, None if mask is None else mask.bool())


@pytest.mark.parametrize("kind", ["none", "both"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_one_graph_for_all_lengths(device, name, kind):
    model, counter = Trio(name, device).ours, CompileCounter()
    torch._dynamo.reset()
    run = torch.compile(model, dynamic=True, fullgraph=True, backend=counter)
    for length in (LENGTH, 9, 31):
        run(tokens(device, length=length), attention_mask=padding(kind, device, length))
    assert counter.frame_count == 1


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral"])
@torch.no_grad()
def test_export_with_a_dynamic_length(device, name, strict):
    model, inputs = Trio(name, device).ours, {"input_ids": tokens(device), "use_cache": False}
    shapes = {"input_ids": {1: torch.export.Dim("length", min=2, max=128)}, "use_cache": None}
    exported = torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=strict).module()
    for length in (5, 37):
        inputs["input_ids"] = tokens(device, length=length)
        assert torch.equal(exported(**inputs).logits, model(**inputs).logits)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", NAMES)
@torch.no_grad()
def test_compiled_generation(device, implementation):
    """As generate() compiles a model with a static cache by itself."""
    trio, ids, mask = Trio("llama", device), tokens(device), padding("left", device)
    trio.ours.set_attn_implementation(implementation)
    options = {
        "attention_mask": mask,
        "max_new_tokens": 6,
        "do_sample": False,
        "cache_implementation": "static",
    }
    expected = trio.ours.generate(ids, **options, disable_compile=True)
    assert torch.equal(trio.ours.generate(ids, **options), expected)


@pytest.mark.parametrize("packed", [False, True])
def test_trainer(device, tmp_path, packed):
    """A few steps on padded rows, and on rows that its collator packs."""
    pytest.importorskip("accelerate", reason="needs accelerate, for Trainer")
    model = build("llama", device)
    model.set_attn_implementation("cute_attention")
    rows = [{"input_ids": row, "labels": row} for row in tokens(device, 8).cpu()]
    if packed:
        rows = [
            {name: row[: 4 + 2 * i].tolist() for name, row in pair.items()} for i, pair in enumerate(rows)
        ]
        collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    else:
        collator = transformers.default_data_collator
        for index, row in enumerate(rows):
            row["attention_mask"] = (torch.arange(LENGTH) >= 5 * (index % 2)).long()
            row["labels"] = row["labels"].masked_fill(row["attention_mask"] == 0, -100)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=8,
        per_device_train_batch_size=8,
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        bf16=True,
        use_cpu=device.type == "cpu",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collator)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 8
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.gpu
def test_nothing_waits(device):
    """Without transformers' sliding cache, which does."""
    trio, ids, mask = Trio("mistral", device), tokens(device), padding("both", device)
    trio.ours(ids, attention_mask=mask, use_cache=False).logits.sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trio.ours(ids, attention_mask=mask, use_cache=False).logits.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Masks that a model is given


def given_masks(device) -> dict[str, torch.Tensor]:
    ids = torch.tensor([[0] * 5 + [1] * 9 + [2] * 6], device=device)
    return {
        "documents": masks.documents(ids),
        "prefix": masks.prefix(torch.tensor([4, 9, 1], device=device), LENGTH),
    }


@pytest.mark.parametrize("kind", ["documents", "prefix"])
def test_masks_that_a_model_is_given(device, kind):
    """Ranges, beside dense masks of four dimensions; forward and backward."""
    trio, ids, ranges = Trio("llama", device), tokens(device), given_masks(device)[kind]
    seen = reference.visible(LENGTH, LENGTH, ranges=ranges.cpu()).expand(BATCH, -1, -1, -1).to(device)
    added = torch.zeros(seen.shape, device=device).masked_fill(~seen, torch.finfo(DTYPE).min)
    given = ranges_mask(ranges), added.to(DTYPE), seen
    models = trio.all
    logits = [model(ids, attention_mask=mask).logits for model, mask in zip(models, given, strict=True)]
    assert_within_rule("logits", *(x.detach() for x in logits))
    weights = [model.get_input_embeddings().weight for model in models]
    for x in logits:
        (x.double().square().sum()).backward()
    assert_within_rule("gradients of embeddings", *(x.grad for x in weights))


def test_ranges_of_another_shape():
    with pytest.raises(
        ValueError, match=r"ranges must have shape \(batch or 1, 1, q_length, R, 2\), got \(3, 2\)"
    ):
        ranges_mask(torch.zeros(3, 2))
    trio, mask = Trio("llama", "cpu"), ranges_mask(masks.prefix(torch.tensor([3]), 5))
    with pytest.raises(ValueError, match="the mask is for 5 queries and 5 keys, and there are 20 and 20"):
        trio.ours(tokens("cpu"), attention_mask=mask)


# Holes


@pytest.mark.gpu
def test_padding_with_holes_gives_nan(device):
    trio = Trio("llama", device)
    logits = trio.ours(tokens(device, 3, 6), attention_mask=HOLES.to(device)).logits
    assert logits[0].isnan().all()
    assert logits[1:].isfinite().all()
    torch.cuda.synchronize()
    sentence = (
        r"^flash_cute\.transformers: padding of an earlier call has holes, so NaN; padding at the start"
    )
    with pytest.raises(NotImplementedError, match=sentence):
        trio.ours(tokens(device, 3, 6))


@pytest.mark.gpu
def test_padding_with_holes_is_found(device, monkeypatch):
    monkeypatch.setattr(lengths, "CHECKED", True)
    trio = Trio("llama", device)
    sentence = (
        r"^flash_cute\.transformers: the padding of sequence 0 has holes; padding at the start and at the end"
    )
    with pytest.raises(ValueError, match=sentence):
        trio.ours(tokens(device, 3, 6), attention_mask=HOLES.to(device))


@pytest.fixture(params=["looked at", "expected"])
def holes_are_accepted(request, device, monkeypatch):
    """As a GPU takes them, where nothing is read, and as the CPU does."""
    monkeypatch.setattr(_transformers_masks, "_holes_are_expected", True)
    if request.param == "expected":
        monkeypatch.setattr(_transformers_masks, "_is_looked_at", lambda mask: False)
        monkeypatch.setattr(_transformers_masks, "_may_have_holes", lambda mask, *_: mask is not None)
    elif device.type == "cuda":
        pytest.skip("a GPU does not look")


@pytest.mark.parametrize("name", ["llama", "mistral", "bert", "sinks"])
def test_padding_with_holes(device, name, holes_are_accepted):
    holes = padding("both", device)
    holes[0, 9:12], holes[1, 3], holes[1, 5:9] = 0, 0, 0
    assert_logits(Trio(name, device), {"input_ids": tokens(device), "attention_mask": holes}, holes.bool())


@torch.no_grad()
def test_a_turn_behind_right_padding(device, holes_are_accepted):
    """Generation behind a hole, by a cache."""
    trio, ids, mask = Trio("llama", device), tokens(device), padding("right", device)
    mask = torch.cat((mask, torch.ones(BATCH, 6, dtype=torch.long, device=device)), 1)
    ids = torch.cat((ids, tokens(device, length=6)), 1)
    cache = transformers.DynamicCache(config=trio.ours.config)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    steps = [
        trio.ours(
            ids[:, rows],
            attention_mask=mask[:, : rows.stop],
            position_ids=positions[:, rows],
            past_key_values=cache,
        ).logits
        for rows in (slice(0, LENGTH), slice(LENGTH, LENGTH + 5), slice(LENGTH + 5, LENGTH + 6))
    ]
    whole = [model(ids, attention_mask=mask, position_ids=positions).logits for model in trio.all[1:]]
    assert_within_rule("logits", *(x[mask.bool()] for x in (torch.cat(steps, 1), *whole)))


def test_holes_that_need_too_many_ranges(device, monkeypatch):
    """An error where they are looked at, else NaN from the query on that has them."""
    holes, trio = padding("left", device), Trio("llama", device)
    holes[0] = torch.tensor([1, 0] * (LENGTH // 2), device=device)
    monkeypatch.setattr(_transformers_masks, "_holes_are_expected", True)
    monkeypatch.setattr(lengths, "CHECKED", True)
    with pytest.raises(
        NotImplementedError,
        match="at most 4 ranges of keys for each query; sequence 0 has more for query 8",
    ):
        trio.ours(tokens(device), attention_mask=holes)
    monkeypatch.setattr(lengths, "CHECKED", False)
    monkeypatch.setattr(_transformers_masks, "_is_looked_at", lambda mask: False)
    monkeypatch.setattr(_transformers_masks, "_may_have_holes", lambda *_: True)
    logits = trio.ours(tokens(device), attention_mask=holes).logits
    assert logits[0, 8:].isnan().all()
    assert logits[1:].isfinite().all()


def test_holes_that_are_expected(monkeypatch):
    monkeypatch.setattr(_transformers_masks, "_holes_are_expected", False)
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    for expected in (True, False):
        expect_holes(expected)
        assert _transformers_masks._may_have_holes(on_gpu, 1, 0) is expected


@pytest.mark.gpu
def test_nothing_waits_for_holes(device, monkeypatch):
    monkeypatch.setattr(_transformers_masks, "_holes_are_expected", True)
    trio, ids, mask = Trio("llama", device), tokens(device, 3, 6), HOLES.to(device)
    trio.ours(ids, attention_mask=mask, use_cache=False).logits.sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trio.ours(ids, attention_mask=mask, use_cache=False).logits.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_positions_that_restart_beside_a_cache(device, monkeypatch):
    """Where transformers does not tell the texts apart."""
    monkeypatch.setattr(lengths, "CHECKED", True)
    model, ids = Trio("llama", device).ours, tokens(device, 2)
    positions = torch.cat([torch.arange(9), torch.arange(11)])[None].to(device)
    sentence = "position_ids must increase unless use_cache is False, got a restart after token 8 of row 0"
    with pytest.raises(ValueError, match=rf"^flash_cute\.transformers: {sentence}"):
        model(ids, position_ids=positions)
    model(ids, position_ids=positions, use_cache=False)
    model(ids, position_ids=positions, attention_mask=torch.ones_like(ids))
    model.generate(ids, max_new_tokens=2)


# Refusals


class Module(torch.nn.Module):
    is_causal = True


def qkv(device, **changes) -> dict:
    tensors = {
        name: torch.randn(2, 4, 10, 16, device=device, dtype=DTYPE) for name in ("query", "key", "value")
    }
    return {"module": Module(), "attention_mask": None, **tensors, **changes}


@pytest.mark.parametrize(
    ("sentence", "changes"),
    [
        ("alibi is Tensor; none is accepted", {"alibi": torch.zeros(4)}),
        ("head_mask is Tensor; none is accepted", {"head_mask": torch.zeros(4)}),
        ("block_indices is Tensor; none is accepted", {"block_indices": torch.zeros(4)}),
        ("indices is Tensor; none is accepted", {"indices": torch.zeros(4)}),
        ("sinks is Tensor; none is accepted", {"sinks": torch.zeros(4)}),
        ("cache is list; none is accepted", {"cache": ["paged"]}),
        (
            "output_attentions is given together with dropout; one of both",
            {"output_attentions": True, "dropout": 0.1},
        ),
        (
            "output_attentions is given where gradients are asked for; torch.no_grad() is accepted",
            {"output_attentions": True, "query": torch.ones(2, 4, 10, 16).requires_grad_()},
        ),
        (
            "output_attentions is given together with packed sequences; one of both",
            {"output_attentions": True, "cu_seq_lens_q": torch.zeros(2), "cu_seq_lens_k": torch.zeros(2)},
        ),
        (
            "attention_mask is a Tensor of shape (2, 1, 10, 10) and torch.int64; padding of two dimensions",
            {"attention_mask": torch.ones(2, 1, 10, 10).long()},
        ),
        (
            "attention_mask is a Tensor of shape (2, 10, 10) and torch.bool; padding of two dimensions, or",
            {"attention_mask": torch.ones(2, 10, 10).bool()},
        ),
        ("attention_mask is a list of shape (); padding of two", {"attention_mask": [1]}),
        (
            "cu_seq_lens_q is given together with a mask of four dimensions",
            {
                "cu_seq_lens_q": torch.zeros(2),
                "cu_seq_lens_k": torch.zeros(2),
                "attention_mask": torch.ones(2, 1, 10, 10).bool(),
            },
        ),
        ("only one of cu_seq_lens_q and cu_seq_lens_k is given; both", {"cu_seq_lens_q": torch.zeros(2)}),
        ("only one of cu_seq_lens_q and cu_seq_lens_k is given; both", {"cu_seq_lens_k": torch.zeros(2)}),
        ("sliding_window is given without a mask", {"sliding_window": 4, "is_causal": False}),
        (
            "cu_seq_lens_q is given together with padding",
            {
                "cu_seq_lens_q": torch.zeros(2),
                "cu_seq_lens_k": torch.zeros(2),
                "attention_mask": CuteMask((2, 10, 10), {}, {"leftpad_k": torch.zeros(2)}),
            },
        ),
    ],
)
def test_refused_options(device, sentence, changes):
    with pytest.raises(NotImplementedError) as raised:
        cute_attention(**qkv(device, **changes))
    assert str(raised.value).startswith(f"flash_cute.transformers: {sentence}")


def test_wrong_tensors(device):
    with pytest.raises(
        ValueError, match=r"^flash_cute\.transformers: the mask is for 5 queries and 10 keys, and there"
    ):
        cute_attention(**qkv(device, attention_mask=CuteMask((2, 5, 10), {})))
    with pytest.raises(
        ValueError, match=r"^flash_cute\.attention: q must have dtype .*, got torch\.float64$"
    ):
        cute_attention(
            **qkv(device, **{name: torch.randn(2, 4, 10, 16).double() for name in ("query", "key", "value")})
        )


def test_padding_that_ends_too_soon(device):
    """The mask of a step alone, where keys of steps before are in the cache."""
    trio = Trio("llama", device)
    first = trio.ours(tokens(device), attention_mask=padding("left", device), use_cache=True)
    with pytest.raises(
        ValueError, match=r"^flash_cute\.transformers: attention_mask has 1 positions; 21, those"
    ):
        trio.ours(
            tokens(device, length=1),
            attention_mask=torch.ones(BATCH, 1, device=device),
            past_key_values=first.past_key_values,
        )


@pytest.mark.parametrize("shape", [(BATCH, LENGTH, LENGTH), (2, LENGTH), (BATCH + 1, LENGTH)])
def test_padding_of_another_shape(device, shape):
    sentence = r"^flash_cute\.transformers: attention_mask must have shape \(3 or 1, positions\), or be "
    with pytest.raises(NotImplementedError, match=sentence):
        Trio("llama", device).ours(tokens(device), attention_mask=torch.ones(shape, device=device).bool())


@pytest.mark.parametrize("name", ["llama", "mistral", "bert"])
def test_padding_of_one_row_for_all(device, name):
    model, ids, row = Trio(name, device).ours, tokens(device), padding("left", device)[:1]
    expected = model(ids, attention_mask=row.expand(BATCH, -1)).logits
    assert torch.equal(model(ids, attention_mask=row).logits, expected)


def test_the_mask_of_the_last_queries(device):
    """As Gemma 4 takes it."""
    present = torch.arange(10, device=device) >= torch.tensor([[0], [4]], device=device)
    mask = cute_mask(2, 10, 10, attention_mask=present)
    arguments = qkv(device, attention_mask=mask)
    whole, _ = cute_attention(**arguments)
    last = {"query": arguments["query"][:, :, -3:], "attention_mask": mask[:, :, -3:, :]}
    rounding = {"atol": 2**-8, "rtol": 2**-7}  # of weights and outs below 1, and of outs
    torch.testing.assert_close(cute_attention(**arguments | last)[0], whole[:, -3:], **rounding)
    assert torch.equal(cute_attention(**arguments | {"attention_mask": mask[:, :, 0:, :]})[0], whole)
    with pytest.raises(NotImplementedError, match=r"the mask must be left to attention, got \(.*\) of it"):
        mask[:, 0, :, :]


def test_deterministic_is_passed_on(device, monkeypatch):
    seen = []
    monkeypatch.setattr(face.flash_cute, "attention", lambda q, *_, **options: seen.append(options) or q)
    cute_attention(**qkv(device, deterministic=True))
    assert seen[0]["deterministic"] is True


def test_a_mask_that_the_model_handles_itself():
    mask = CuteMask((2, 3, 3), {"causal": True})
    sentence = r"^flash_cute\.transformers: the mask must be left to attention, got %s by the model; load it "
    for name in ("repeat", "size"):
        with pytest.raises(AttributeError, match=sentence % rf"\.{name} of it"):
            getattr(mask, name)(1, 2)
    for use in (lambda x: x + mask, lambda x: mask + x, lambda x: x.masked_fill(mask, 0), torch.where):
        arguments = (torch.ones(3, 3),) if use is not torch.where else (mask, 1, 0)
        with pytest.raises(NotImplementedError, match=sentence % r"a call of \w+ with it"):
            use(*arguments)
    assert not hasattr(mask, "dtype")
    assert copy.deepcopy(mask) == mask


OWN_ATTENTION = {
    "BloomForCausalLM": ("BloomConfig", {"hidden_size": 64, "n_layer": 1, "n_head": 4}),
    "MptForCausalLM": ("MptConfig", {"d_model": 64, "n_layers": 1, "n_heads": 4, "max_seq_len": 64}),
    "MPNetModel": ("MPNetConfig", ENCODER),
    "XGLMForCausalLM": ("XGLMConfig", {"d_model": 64, "num_layers": 1, "attention_heads": 4, "ffn_dim": 64}),
}


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_models_that_compute_attention_themselves(device, name):
    """Loaded with our name they raise, and set_attn_implementation leaves them their own attention."""
    config_class, sizes = OWN_ATTENTION[name]
    config = getattr(transformers, config_class)(**{"vocab_size": 64, "pad_token_id": 0} | sizes)
    ids = tokens(device)
    model_class = getattr(transformers, name)
    loaded = model_class._from_config(copy.deepcopy(config), attn_implementation="cute_attention")
    sentence = (
        r'the mask must be left to attention, got .* model\.set_attn_implementation\("cute_attention"\)'
    )
    with pytest.raises((NotImplementedError, AttributeError), match=sentence):
        loaded.to(device).eval()(ids)
    model = model_class._from_config(config, attn_implementation="eager").to(device).eval()
    expected = model(ids)[0]
    model.set_attn_implementation("cute_attention")
    assert torch.equal(model(ids)[0], expected)


def test_the_mask_of_a_model_in_another(device):
    """PaliGemma makes its language model's, which takes it for padding where there is no cache."""
    text = GROUPED | {"model_type": "gemma", "head_dim": 16}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14, "projection_dim": 64}
    config = transformers.PaliGemmaConfig(text_config=text, vision_config=vision, projection_dim=64)
    torch.manual_seed(0)
    model_class = transformers.PaliGemmaForConditionalGeneration
    model = model_class._from_config(config, attn_implementation="eager").to(device, DTYPE).eval()
    mask = padding("left", device)
    inputs = {"input_ids": tokens(device), "attention_mask": mask, "use_cache": False}
    yardstick = model(**inputs).logits[mask.bool()].detach()
    oracle = copy.deepcopy(model).double()
    oracle.set_attn_implementation("sdpa")
    oracle = oracle(**inputs).logits[mask.bool()].detach()
    model.set_attn_implementation("cute_attention")
    ours = model(**inputs).logits[mask.bool()].detach()
    assert_within_rule("logits", ours, yardstick, oracle)
    model.train().gradient_checkpointing_enable()
    model(inputs["input_ids"], labels=inputs["input_ids"]).loss.backward()


def test_a_mask_moves_to_another_device():
    mask = cute_mask(2, 10, 10, attention_mask=torch.ones(2, 10, dtype=torch.bool)).to(
        "meta", non_blocking=True
    )
    assert all(x.is_meta for x in (*mask.lengths.values(), mask.factor))


def every_second(batch_idx, head_idx, q_idx, kv_idx):
    return kv_idx % 2 == 0


REFUSED = r"flash_cute\.transformers: the mask must be made of transformers' causal, .* packed ones, got "


def make_mask(kind: str, embeddings: torch.Tensor, compiled: bool = False, **options) -> CuteMask:
    """By a function of transformers, without padding and cache."""
    config = build("llama", "cpu").config
    config._attn_implementation = "cute_attention"
    config.sliding_window = config.attention_chunk_size = 3
    given = config, embeddings, None, *(() if kind.startswith("bidirectional") else (None,))
    make = getattr(MAKE, f"create_{kind}_mask")
    if compiled:
        torch._dynamo.reset()
        make = torch.compile(make, fullgraph=True, backend="eager")
    return make(*given, **options)


@pytest.mark.parametrize("compiled", [False, True])
def test_kinds_of_masks(device, compiled):
    def make(kind, **options):
        mask = make_mask(kind, torch.empty(2, 10, 0, device=device), compiled, **options)
        return mask.options, None if mask.offsets is None else mask.offsets.tolist()

    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]], device=device)
    begins = [0, 4, 10, 14, *[20] * 17]
    assert make("causal") == ({"causal": True}, None)
    assert make("causal", position_ids=positions) == ({"causal": True}, begins)
    assert make("causal", allow_is_causal_skip=False) == ({"causal": True}, None)
    assert make("sliding_window_causal") == ({"window": (2, 0)}, None)
    assert make("sliding_window_causal", position_ids=positions) == ({"window": (2, 0)}, begins)
    assert make("bidirectional") == ({"causal": False}, None)
    assert make("bidirectional_sliding_window") == ({"window": (3, 3)}, None)


BLOCKS = torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1, -1, -1], [0, 0, -1, -1, 1, 1, 1, 2, 2, 2]])
# Those that only ranges can say, as arguments of transformers' functions.
RANGED = {
    "blocks": {"block_sequence_ids": BLOCKS},
    "a window on both": {"or_mask_function": "blocks", "and_mask_function": MAKE.sliding_window_overlay(3)},
    "a wider window": {"or_mask_function": MAKE.sliding_window_bidirectional_overlay(2)},
    "chunks in it": {"and_mask_function": MAKE.chunked_overlay(4, torch.tensor([0, 1]))},
}
NEITHER = {"neither": {}, "positions": {"position_ids": True}, "padding": {"attention_mask": True}}


@pytest.mark.parametrize("other", NEITHER)
@pytest.mark.parametrize("name", [*RANGED, "chunks"])
@pytest.mark.parametrize("kind", ["causal", "sliding_window_causal", "chunked_causal", "bidirectional"])
def test_masks_that_are_ranges(kind, name, other):
    """As the booleans that transformers makes of the same function for SDPA."""
    function = getattr(MAKE, f"create_{kind}_mask")
    options = RANGED.get(name, {}) | NEITHER[other]
    if name == "chunks" and kind != "chunked_causal":
        pytest.skip("chunks are a mask of their own")
    if options.get("or_mask_function") == "blocks":
        if not hasattr(MAKE, "blockwise_overlay"):
            pytest.skip("this transformers has no blocks")
        options["or_mask_function"] = MAKE.blockwise_overlay(BLOCKS)
    if not options.keys() <= {*signature(function).parameters}:
        pytest.skip("this transformers has no such argument here")
    config = build("llama", "cpu").config
    config.sliding_window, config.attention_chunk_size = 5, 4
    given = {"inputs_embeds": torch.empty(2, 10, 0), "attention_mask": None}
    if options.pop("position_ids", False):
        given["position_ids"] = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4], [*range(8), 0, 1]])
    if options.pop("attention_mask", False):
        given["attention_mask"] = torch.tensor([[0] * 3 + [1] * 7, [1] * 8 + [0] * 2])
    if kind != "bidirectional":
        given[
            next(cache for cache in ("cache", "past_key_values") if cache in signature(function).parameters)
        ] = None
    config._attn_implementation = "sdpa"
    expected = function(config, **given, **options)
    config._attn_implementation = "cute_attention"
    try:
        mask = function(config, **given, **options)
    except NotImplementedError as refused:
        # Blocks, and chunks in packed sequences, are looked up by positions that restart.
        assert other == "positions", refused  # noqa: PT017
        return
    if mask.ranges is None:
        assert mask.offsets is not None or not options
        return
    pad, used = (mask.lengths.get(key) for key in ("leftpad_k", "seqused_k"))
    seen = reference.visible(10, 10, ranges=mask.ranges)
    keys = torch.arange(10)
    if pad is not None:
        seen = seen & ((keys >= pad[:, None]) & (keys < used[:, None]))[:, None, None]
    counts = torch.ones(2, 10) if given["attention_mask"] is None else given["attention_mask"]
    rows = counts.bool()[:, None].expand(-1, 1, -1)
    assert torch.equal(seen.expand(2, -1, -1, -1)[rows], expected.expand(2, 1, 10, 10)[rows])


def test_refused_masks(device):
    """What is not made of transformers' own, and under torch.compile what takes ranges."""
    embeddings = torch.empty(1, 10, 0, device=device)
    for options, sentence in (
        ({"and_mask_function": every_second}, "causal_mask_function and the mask function every_second"),
        ({"or_mask_function": every_second}, r"\(causal_mask_function or the mask function every_second\)"),
    ):
        with pytest.raises(NotImplementedError, match=REFUSED + sentence):
            make_mask("causal", embeddings, **options)
        with pytest.raises(torch._dynamo.exc.Unsupported, match=f"{REFUSED}.* under torch.compile"):
            make_mask("causal", embeddings, compiled=True, **options)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"{REFUSED}.* under torch.compile"):
        make_mask("chunked_causal", embeddings, compiled=True)


def test_refused_functions_of_masks():
    positions, causal, remapped = torch.arange(10)[None], MAKE.causal_mask_function, []
    if hasattr(MAKE, "remap_positions_for_packed_sequence"):  # from transformers 5.23 on
        function = MAKE.remap_positions_for_packed_sequence(causal, positions)
        remapped = [(function, "packed causal_mask_function")]
    for function, sentence in (
        (every_second, "the mask function every_second"),
        (functools.partial(every_second), "the mask function partial"),
        (MAKE.and_masks(causal, every_second), "causal_mask_function and the mask function every_second"),
        *remapped,
        (MAKE.padding_mask_function(positions), "padding_mask_function"),
    ):
        with pytest.raises(NotImplementedError, match=REFUSED + sentence):
            cute_mask(1, 10, 10, mask_function=function, local_size=4)


TEXT = GROUPED | {"head_dim": 16}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}
GEMMA3 = TEXT | {"model_type": "gemma3_text", "sliding_window": 6, "num_hidden_layers": 3}
GEMMA3 |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
OF_IMAGES = {
    "PaliGemma": {
        "text_config": TEXT | {"model_type": "gemma"},
        "vision_config": VISION | {"projection_dim": 64},
    },
    "Gemma3": {"text_config": GEMMA3, "vision_config": VISION | {"model_type": "siglip_vision_model"}},
}


GEMMA4 = GEMMA3 | {"global_head_dim": 256, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8}
GEMMA4 |= {"num_kv_shared_layers": 0, "use_bidirectional_attention": "vision"}
GEMMA4 |= {
    "model_type": "gemma4_text",
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
OF_IMAGES["Gemma4"] = {
    "text_config": GEMMA4,
    "vision_config": VISION | {"model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 16},
    "image_token_id": 60,
    "video_token_id": 61,
    "audio_token_id": 62,
    "boi_token_id": 58,
    "eoi_token_id": 59,
}
TYPES = {"Gemma4": "mm_token_type_ids"}  # else token_type_ids
of_blocks = pytest.mark.skipif(face.VERSION < (5, 23), reason="an older transformers says blocks otherwise")


def of_images(name: str, device) -> Trio:
    config = getattr(transformers, f"{name}Config")(**copy.deepcopy(OF_IMAGES[name]))
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")
    return as_trio(model._from_config(config, attn_implementation="eager"), device)


@of_blocks
@pytest.mark.parametrize("kind", ["none", "both"])
@pytest.mark.parametrize("name", OF_IMAGES)
def test_images(device, name, kind):
    """Their tokens, and PaliGemma's prefix, see each other; logits and gradients."""
    trio, mask = of_images(name, device), padding(kind, device)
    types = torch.zeros(BATCH, LENGTH, dtype=torch.long, device=device)
    if name == "PaliGemma":
        types[:, 12:] = 1
    else:
        types[:, 8:12], types[1, 3:6] = 1, 1
    present = torch.ones_like(types).bool() if mask is None else mask.bool()
    ids = tokens(device) % 58
    types_name = TYPES.get(name, "token_type_ids")
    inputs = {"input_ids": ids, "attention_mask": mask, types_name: types, "use_cache": False}
    plain = trio.ours(**inputs | {types_name: None}).logits[present]
    assert_logits(trio, inputs, present)
    assert not torch.allclose(trio.ours(**inputs).logits[present], plain, atol=1e-3)
    gradients = []
    for model in trio.all:
        model(**inputs).logits[present].double().square().sum().backward()
        gradients.append(
            torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])
        )
    assert_within_rule("gradients", *gradients)


@of_blocks
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", OF_IMAGES)
@torch.no_grad()
def test_images_generate(device, name, cache):
    types = torch.zeros(BATCH, LENGTH, dtype=torch.long, device=device)
    types[:, 8:12] = name != "PaliGemma"
    inputs = {"attention_mask": padding("left", device), TYPES.get(name, "token_type_ids"): types}
    assert_generated(of_images(name, device), cache, input_ids=tokens(device) % 58, **inputs)


def llama4(device) -> Trio:
    sizes = GROUPED | {"head_dim": 16, "attention_chunk_size": 6, "intermediate_size_mlp": 96}
    sizes |= {"num_local_experts": 2, "num_experts_per_tok": 1, "interleave_moe_layer_step": 4}
    sizes |= {"num_hidden_layers": 3, "no_rope_layers": [1, 1, 0]}
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(**sizes)
    model = transformers.Llama4ForCausalLM._from_config(config, attn_implementation="eager")
    return as_trio(model, device)


@pytest.mark.parametrize("kind", ["none", "left", "right", "both"])
def test_chunks(device, kind):
    trio, mask = llama4(device), padding(kind, device)
    present = None if mask is None else mask.bool()
    assert_logits(trio, {"input_ids": tokens(device), "attention_mask": mask, "use_cache": False}, present)


@pytest.mark.parametrize("cache", [None, "static"])
@torch.no_grad()
def test_chunks_generate(device, cache):
    if cache == "static" and face.VERSION < (5, 23):
        pytest.skip("this transformers does not make a static cache's masks of chunks, and raises")
    inputs = {"input_ids": tokens(device), "attention_mask": padding("left", device)}
    assert_generated(llama4(device), cache, **inputs)


def test_packed_masks_of_older_versions(device):
    """Those of transformers before 5.23 tell sequences apart, and count places in the row."""
    packed = MAKE.packed_sequence_mask_function(torch.tensor([[0, 0, 0, 1, 1]], device=device))
    for plain in (MAKE.causal_mask_function, MAKE.sliding_window_causal_mask_function(2)):
        mask = cute_mask(1, 5, 5, mask_function=MAKE.and_masks(plain, packed), local_size=2, device=device)
        assert mask.offsets.tolist() == [0, 3, 5, 5, 5, 5]


def test_a_local_size_is_no_window():
    """DiffusionGemma hands one beside a function that has none."""
    function = MAKE.bidirectional_mask_function
    mask = cute_mask(2, 10, 14, mask_function=function, local_size=4, allow_is_bidirectional_skip=True)
    assert mask.options == {"causal": False}


def test_a_window_to_both_sides_of_unequal_lengths(device):
    embeddings, longer = (torch.empty(2, n, 0, device=device) for n in (10, 14))
    with pytest.raises(
        NotImplementedError, match="there are 10 queries and 14 keys in a window to both sides"
    ):
        make_mask("bidirectional_sliding_window", embeddings, encoder_hidden_states=longer)


@pytest.mark.parametrize("kind", ["booleans", "added", "added in float32"])
@pytest.mark.parametrize("name", ["llama", "mistral", "bert"])
def test_masks_of_four_dimensions(device, name, kind):
    """All of the mask, as for eager attention and SDPA: causal or not; logits and gradients."""
    trio, ids = Trio(name, device), tokens(device)
    seen = torch.rand(BATCH, 1, LENGTH, LENGTH, device=device) < 0.7
    seen[..., torch.arange(LENGTH), torch.arange(LENGTH)] = True
    lowest = torch.finfo(DTYPE if kind == "added" else torch.float32).min
    added = torch.zeros(seen.shape, device=device).masked_fill(~seen, lowest)
    given = {"booleans": seen, "added": added.to(DTYPE), "added in float32": added}[kind]
    of_eager = torch.zeros_like(seen, dtype=DTYPE).masked_fill(~seen, torch.finfo(DTYPE).min)
    inputs = [{"input_ids": ids, "attention_mask": mask} for mask in (given, of_eager, seen)]
    logits = [model(**x).logits for model, x in zip(trio.all, inputs, strict=True)]
    assert_within_rule("logits", *(x.detach() for x in logits))
    for x in logits:
        x.double().square().sum().backward()
    weights = [model.get_input_embeddings().weight for model in trio.all]
    assert_within_rule("gradients of embeddings", *(x.grad for x in weights))


@pytest.mark.parametrize("kind", ["booleans", "added"])
def test_a_mask_and_a_bias(device, kind):
    arguments = qkv(device)
    tensors = [arguments[name] for name in ("query", "key", "value")]
    bias = torch.randn(1, 4, 10, 10, device=device, dtype=DTYPE)
    seen = (torch.rand(2, 1, 10, 10, device=device) < 0.7) | torch.eye(10, device=device).bool()
    mask = seen if kind == "booleans" else torch.zeros_like(seen, dtype=DTYPE).masked_fill(~seen, -torch.inf)
    out, _ = cute_attention(**arguments | {"attention_mask": mask, "position_bias": bias})
    oracle, yardstick = (
        reference.forward(*tensors, mask=seen, bias=bias, dtype=dtype)[0] for dtype in (torch.float64, DTYPE)
    )
    assert_within_rule("out", out.transpose(1, 2), yardstick, oracle)


# Biases of positions


def images(device) -> torch.Tensor:
    return torch.randn(4, 3, 32, 32, device=device)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", [name for name in BIASED if name != "T5"])
@torch.no_grad()
def test_models_of_images(device, name, compiled):
    trio, inputs = Trio(name, device), images(device)
    if compiled:
        torch._dynamo.reset()
        backend = "inductor" if device.type == "cuda" else "aot_eager"
        trio.all = torch.compile(trio.ours, backend=backend), *trio.all[1:]
    results = [model(inputs.to(DTYPE).to(model.dtype)).logits for model in (trio.ours, *trio.all[1:])]
    if compiled:
        results[0] = trio.all[0](inputs.to(DTYPE)).logits
    assert_within_rule("logits", *results)
    for parameter, value in trio.ours.named_parameters():
        if are_biases(parameter):
            value.zero_()
    without = trio.ours(inputs.to(DTYPE)).logits
    error, change = ((results[0].double() - x).abs().max() for x in (results[2], without))
    assert change > 5 * error


@pytest.mark.parametrize("kind", ["none", "left", "right", "both"])
@torch.no_grad()
def test_t5(device, kind):
    """Of the encoder a bias beside padding, of the decoder beside the causal mask, too."""
    trio, mask, of_decoder = Trio("T5", device), padding(kind, device), padding("right", device)
    inputs = {"input_ids": tokens(device), "attention_mask": mask, "use_cache": False}
    inputs |= {"decoder_input_ids": tokens(device), "decoder_attention_mask": of_decoder}
    assert_logits(trio, inputs, of_decoder.bool())


@pytest.mark.parametrize("cache", [None, "static"])
@torch.no_grad()
def test_t5_generates(device, cache):
    inputs = {"input_ids": tokens(device), "attention_mask": padding("left", device)}
    assert_generated(Trio("T5", device), cache, **inputs)


def are_biases(name: str) -> bool:
    return "position_bias_table" in name or "relative_attention_bias" in name


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", BIASED)
def test_gradients_beside_biases(device, name, frozen):
    """And those of the biases, if they train."""
    trio, gradients = Trio(name, device), {False: [], True: []}
    ids, pixels = tokens(device), images(device).to(DTYPE)
    of_t5 = {"input_ids": ids, "labels": ids, "attention_mask": padding("right", device)}
    for model in trio.all:
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_(not (frozen and are_biases(parameter_name)))
        loss = model(**of_t5).loss if name == "T5" else model(pixels.to(model.dtype)).logits.square().sum()
        loss.backward()
        named = [(are_biases(n), p.grad) for n, p in model.named_parameters() if p.grad is not None]
        for kind in (False, True) if not frozen else (False,):
            of_kind = [grad.flatten().double() for is_bias, grad in named if is_bias == kind]
            gradients[kind].append(torch.cat(of_kind))
    assert_within_rule("gradients", *gradients[False])
    assert frozen or gradients[True][0].any()
    if not frozen:
        # The largest are sums over all pairs of few entries, such as a class's: the maximum is chance.
        assert_within_rule("gradients of biases", *gradients[True], norms=["RMS"])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_t5_trains(device, checkpointing):
    """Step by step with the losses of eager attention, by the table of its biases, too."""
    ids, losses = tokens(device), []
    for implementation in ("eager", "cute_attention"):
        model = build("T5", device).train()
        model.set_attn_implementation(implementation)
        if checkpointing:
            model.gradient_checkpointing_enable()
        biases = [p for n, p in model.named_parameters() if are_biases(n)]
        before = [x.detach().clone() for x in biases]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([])
        for _ in range(6):
            loss = model(input_ids=ids, labels=ids, attention_mask=padding("right", device)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
        assert not any(torch.equal(x, y) for x, y in zip(before, biases, strict=True))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][-1] < losses[0][0]


def test_a_mask_with_a_bias(device):
    """A model may add it, as BEiT does; what else it does with a mask is refused."""
    mask, bias = CuteMask((2, 10, 10), {}), torch.randn(1, 4, 10, 10, device=device, dtype=DTYPE)
    arguments = qkv(device)
    expected, _ = cute_attention(**arguments | {"position_bias": 2 * bias, "is_causal": False})
    for added in (bias + mask + bias, mask + bias + bias, torch.add(bias, bias + mask)):
        assert torch.equal(cute_attention(**arguments | {"attention_mask": added})[0], expected)
    last = arguments | {"query": arguments["query"][:, :, -3:], "attention_mask": added[:, :, -3:, :]}
    rounding = {"atol": 2**-8, "rtol": 2**-7}
    torch.testing.assert_close(cute_attention(**last)[0], expected[:, -3:], **rounding)
    assert (bias + mask).to("meta").bias.is_meta
    for wrong in (bias[0], bias.long(), 1.0):
        with pytest.raises(NotImplementedError, match="got a call of add with it by the model"):
            mask + wrong


def test_bloom_by_slopes(device):
    """BLOOM computes attention itself; its biases are those of slopes, but for a number of each query."""
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    batch, heads, length, head_dim = 2, 6, 30, 16  # no power of two, whose slopes are of two kinds
    q, k, v = (torch.randn(batch, heads, length, head_dim, device=device) for _ in "qkv")
    present = torch.ones(batch, length, device=device)
    alibi = bloom.build_alibi_tensor(present, heads, torch.float64).view(batch, heads, 1, length)
    slopes = alibi[0, :, 0, 1].float()
    out = flash_cute.attention(q, k, v, causal=True, alibi_slopes=slopes)
    hidden = ~torch.ones(length, length, dtype=torch.bool, device=device).tril()
    results = []
    for dtype in (torch.float32, torch.float64):
        scores = alibi.to(dtype) + q.to(dtype) @ k.to(dtype).mT / head_dim**0.5
        results.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v.to(dtype))
    assert_within_rule("out", out, *results)


# Dropout


def with_dropout_mask(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **options):
    """Eager attention that drops what flash_cute drops with the seeds of its calls, one after the other."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    weights = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = weights.softmax(-1)
    seed = next(module.seeds)
    assert dropout == 0.3
    weights = weights * flash_cute.dropout.dropout_mask(seed, *weights.shape, dropout)
    weights = weights * (4096 / round(4096 * (1 - dropout)))
    return (weights @ value).transpose(1, 2), None


DROPPING = {
    "gpt2": {"attn_pdrop": 0.3},
    "bert": {"attention_probs_dropout_prob": 0.3},
    "llama": {"attention_dropout": 0.3},
    "bart": {"attention_dropout": 0.3},
}


@pytest.fixture
def seeds(monkeypatch) -> list[torch.Tensor]:
    """Those that calls draw."""
    found, draw = [], dot_product_attention.drawn_seed

    def drawn(q):
        found.append(draw(q))
        return found[-1]

    monkeypatch.setattr(dot_product_attention, "drawn_seed", drawn)
    return found


@pytest.mark.parametrize("kind", ["none", "left", "right"])
@pytest.mark.parametrize("name", DROPPING)
def test_dropout_in_training(device, name, kind, seeds, monkeypatch):
    """The model's setting, in training; the losses of tokens, and gradients."""
    *classes, sizes = MODELS[name]
    monkeypatch.setitem(MODELS, name, (*classes, sizes | DROPPING[name]))
    trio, ids, mask = Trio(name, device), tokens(device), padding(kind, device)
    transformers.AttentionInterface.register("with_dropout_mask", with_dropout_mask)
    transformers.AttentionMaskInterface.register("with_dropout_mask", MAKE.eager_mask)
    for model in trio.all[1:]:
        model.set_attn_implementation("with_dropout_mask")
    labels = ids
    if mask is not None:  # a token behind padding is that of a query which sees nothing
        before = torch.nn.functional.pad(mask, (1, 0), value=1)[:, :-1]
        labels = ids.masked_fill(mask * before == 0, -100)
    losses, gradients = [], []
    for model in trio.all:
        left = iter(seeds)
        for module in model.modules():
            module.seeds = left
        result = model.train()(input_ids=ids, attention_mask=mask, labels=labels)
        result.loss.backward()
        each = torch.nn.functional.cross_entropy(result.logits.double().mT, labels, reduction="none")
        losses.append(each.detach())
        found = (p.grad.flatten().double() for p in model.parameters() if p.grad is not None)
        gradients.append(torch.cat(list(found)))
    assert seeds
    assert_within_rule("losses", *losses)
    assert_within_rule("gradients", *gradients)
    seeds.clear()
    trio.ours.eval()(input_ids=ids, attention_mask=mask)
    assert not seeds


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_of_checkpointed_layers(device, reentrant, monkeypatch):
    *classes, sizes = MODELS["gpt2"]
    monkeypatch.setitem(MODELS, "gpt2", (*classes, sizes | DROPPING["gpt2"]))
    ids, results = tokens(device), []
    for checkpointed in (False, True):
        model = Trio("gpt2", device).ours.train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(0)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        results.append([p.grad for p in model.parameters()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0 if device.type == "cpu" else 1e-2)


def test_dropout_of_packed_sequences(device, seeds, monkeypatch):
    """The first sequence drops what it drops alone."""
    *classes, sizes = MODELS["llama"]
    monkeypatch.setitem(MODELS, "llama", (*classes, sizes | DROPPING["llama"]))
    model, ids = Trio("llama", device).ours.train(), tokens(device, 1)
    positions = torch.cat([torch.arange(9), torch.arange(11)])[None].to(device)
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    drawn = iter([*seeds])
    monkeypatch.setattr(dot_product_attention, "drawn_seed", lambda q: next(drawn))
    alone = model(input_ids=ids[:, :9], use_cache=False).logits
    torch.testing.assert_close(packed[:, :9], alone, rtol=0, atol=1e-2)
    monkeypatch.undo()
    assert not torch.allclose(model(input_ids=ids[:, :9], use_cache=False).logits, alone, rtol=0, atol=1e-2)


def test_an_older_transformers():
    program = (
        "import transformers as t; t.__version__ = '4.57.1'; import flash_cute.integrations.transformers"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)])}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ran.stderr.rstrip().endswith(
        "flash_cute.transformers: transformers must be 5.4 or newer, got 4.57.1"
    )


# What no model here asks for


@pytest.mark.parametrize("window", [None, 3])
def test_without_a_mask(device, window):
    """As models call it that make none."""
    arguments = qkv(device, scaling=0.3, sliding_window=window)
    out, weights = cute_attention(**arguments)
    assert weights is None
    tensors = [arguments[name] for name in ("query", "key", "value")]
    options = {"causal": True, "softmax_scale": 0.3, "window": None if window is None else (window - 1, None)}
    assert torch.equal(out, face.flash_cute.attention(*tensors, **options).transpose(1, 2))
    out, _ = cute_attention(
        **qkv(device, **dict(zip(("query", "key", "value"), tensors, strict=True)), is_causal=False)
    )
    assert torch.equal(out, face.flash_cute.attention(*tensors).transpose(1, 2))


@pytest.mark.parametrize("kind", ["none", "both"])
def test_bidirectional_window(device, kind):
    """transformers' own function for it: who is at most so far away is seen."""
    config = build("mistral", "cpu").config
    config._attn_implementation = "cute_attention"
    embeddings = torch.empty(BATCH, LENGTH, 0, device=device)
    make = transformers.masking_utils.create_bidirectional_sliding_window_mask
    present = padding(kind, device)
    mask = make(config, embeddings, present)
    tensors = [torch.randn(BATCH, 4, LENGTH, 16, device=device, dtype=DTYPE) for _ in "qkv"]
    out, _ = cute_attention(Module(), *tensors, mask)
    config._attn_implementation = "sdpa"
    seen = make(config, embeddings, present, allow_is_bidirectional_skip=False)
    present = torch.ones(BATCH, LENGTH, device=device).bool() if present is None else present.bool()
    results = []
    for dtype in (DTYPE, torch.float64):
        q, k, v = (x.to(dtype) for x in tensors)
        weights = (q @ k.mT / 4).masked_fill(~seen, -torch.inf).softmax(-1)
        results.append((weights @ v).transpose(1, 2)[present])
    assert_within_rule("out", out[present], *results)
