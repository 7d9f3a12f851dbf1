"""Wrong calls: one clear sentence each, raised before anything runs, and the next call is as good as ever."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from support.wrong_calls import (
    WRONG_BIAS_GRADIENTS,
    WRONG_LOOKS,
    WRONG_MATMULS,
    WRONG_PACKED,
    WRONG_VALUES,
    WRONG_WEIGHTS,
    assert_one_sentence,
    inputs,
    packed,
)
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_cute
from flash_cute import softmax_op
from flash_cute._cpu import softmax as cpu_softmax
from flash_cute._cpu import windows
from flash_cute.compat.flash_attn import flash_attn_func, flash_attn_with_kvcache
from flash_cute.compat.flash_attn_interface import flash_attn_qkvpacked_func
from flash_cute.options import LENGTHS

# What is wrong -> what changes, given q, k and v, and words that the sentence must contain.
WRONG_TYPES = {
    "q is a list": (lambda t: {"q": [[1.0]]}, "q list"),
    "k is None": (lambda t: {"k": None}, "k None"),
    "v is a number": (lambda t: {"v": 3.0}, "v float"),
    "window of three": (lambda t: {"window": (1, 2, 3)}, "window (1, 2, 3)"),
    "window of a float": (lambda t: {"window": (1.5, None)}, "window 1.5"),
    "window of text": (lambda t: {"window": "wide"}, "window wide"),
    "window of a boolean tensor": (lambda t: {"window": torch.tensor(True)}, "window tensor(True)"),
    "window of an array": (lambda t: {"window": np.array([1, 2])}, "window array([1, 2])"),
    "a limit that is an array": (lambda t: {"window": (np.array([1, 2]), 0)}, "window array([1, 2])"),
    "window of a meta tensor": (lambda t: {"window": torch.tensor(3, device="meta")}, "window meta"),
    "window of a bool": (lambda t: {"window": True}, "window True"),
    "scale is text": (lambda t: {"softmax_scale": "half"}, "softmax_scale half"),
    "scale is a bool": (lambda t: {"softmax_scale": True}, "softmax_scale True"),
    "scale is a tensor": (lambda t: {"softmax_scale": torch.tensor(0.5)}, "softmax_scale a tensor"),
    "causal is text": (lambda t: {"causal": "yes"}, "causal yes True False"),
    "causal is a number": (lambda t: {"causal": 0.1}, "causal 0.1 True False"),
    "causal is None": (lambda t: {"causal": None}, "causal None True False"),
    "causal is a tensor": (lambda t: {"causal": torch.tensor(True)}, "causal tensor(True) True False"),
    "family is a number": (lambda t: {"family": 90}, "family"),
    "SDPA's is_causal": (lambda t: {"is_causal": True}, "is_causal did you mean causal?"),
    "SDPA's scale": (lambda t: {"scale": 1.0}, "scale did you mean softmax_scale?"),
    "flash_attn's window_size": (lambda t: {"window_size": (1, 1)}, "window_size did you mean window?"),
    "SDPA's attn_mask": (lambda t: {"attn_mask": None}, "attn_mask did you mean mask, True bias, scores?"),
    "FlexAttention's block_mask": (lambda t: {"block_mask": None}, "ranges flash_cute.masks.from_block_mask"),
    "FlexAttention's mask_mod": (lambda t: {"mask_mod": None}, "ranges, flash_cute.masks.from_mask_mod"),
    "a mask of padding": (lambda t: {"attention_mask": None}, "ranges flash_cute.masks.padding"),
    "FlashAttention-3's s_aux": (lambda t: {"s_aux": None}, "s_aux did you mean sinks?"),
    "FlashAttention-4's learnable_sink": (lambda t: {"learnable_sink": 0}, "did you mean sinks?"),
    "FlashAttention-3's page_table": (lambda t: {"page_table": 0}, "did you mean block_table?"),
    "flash_attn's cache_leftpad": (lambda t: {"cache_leftpad": 0}, "did you mean leftpad_k?"),
    "flash_attn's num_splits": (lambda t: {"num_splits": 1}, "did you mean batch_invariant, num_splits=1?"),
    "vLLM's logits_soft_cap": (lambda t: {"logits_soft_cap": 0.0}, "did you mean softcap?"),
    "xFormers' attn_bias": (lambda t: {"attn_bias": None}, "did you mean bias?"),
    "dropout": (lambda t: {"dropout": 0.0}, "did you mean dropout_p?"),
    "FlexAttention's score_mod": (lambda t: {"score_mod": None}, "no function of the scores; leave it out?"),
    "mask is a list": (lambda t: {"mask": [[True]]}, "mask list torch.Tensor"),
    "bias is a number": (lambda t: {"bias": 0.5}, "bias float torch.Tensor"),
    "alibi_slopes are a list": (lambda t: {"alibi_slopes": [0.5] * 6}, "alibi_slopes list torch.Tensor"),
    "dropout_seed is a number": (lambda t: {"dropout_p": 0.5, "dropout_seed": 7}, "dropout_seed int Tensor"),
    "an idle dropout_seed is a number": (lambda t: {"dropout_seed": 7}, "dropout_seed int torch.Tensor"),
    "softcap is text": (lambda t: {"softcap": "30"}, "softcap '30' a number"),
    "softcap is None": (lambda t: {"softcap": None}, "softcap None a number"),
    "softcap is a tensor": (lambda t: {"softcap": torch.tensor(30.0)}, "softcap a tensor a number"),
    "dropout_p is a bool": (lambda t: {"dropout_p": True}, "dropout_p True a number"),
    "dropout_p is None": (lambda t: {"dropout_p": None}, "dropout_p None a number"),
    "SDPA's enable_gqa": (lambda t: {"enable_gqa": True}, "enable_gqa none is needed, leave it out?"),
    "flash_attn's return_softmax_lse": (
        lambda t: {"return_softmax_lse": True},
        "did you mean flash_cute.forward, which returns (out, lse)?",
    ),
    "JAX's query": (lambda t: {"query": 0}, "query did you mean q?"),
    "a misspelt argument": (lambda t: {"softmax_scal": 1.0}, "softmax_scal did you mean softmax_scale?"),
    "seqused_q is a list": (lambda t: {"seqused_q": [3, 4]}, "seqused_q list torch.Tensor"),
    "leftpad_k is a number": (lambda t: {"leftpad_k": 3}, "leftpad_k int torch.Tensor"),
    "flash_attn's cache_seqlens": (lambda t: {"cache_seqlens": 3}, "cache_seqlens did you mean seqused_k?"),
    "flash_attn's max_seqlen_q": (
        lambda t: {"max_seqlen_q": 9},
        "max_seqlen_q none is needed, leave it out?",
    ),
    "window is a float in a tensor": (lambda t: {"window": torch.tensor(3.0)}, "window tensor(3.) int pair"),
    "window is a pair in a tensor": (lambda t: {"window": torch.tensor([3, 4])}, "window tensor([3, 4]) int"),
    "an unknown argument": (lambda t: {"xyz": 1.0}, "xyz softmax_scale window"),
}
WRONG_PACKED_TYPES = {
    "no offsets": (lambda t: {"cu_seqlens_q": None}, "cu_seqlens_q NoneType torch.Tensor"),
    "offsets are a list": (lambda t: {"cu_seqlens_k": [0, 150]}, "cu_seqlens_k list torch.Tensor"),
    "a number for causal": (lambda t: {"causal": 150}, "causal 150 True False"),
    "flash_attn's max_seqlen_k": (
        lambda t: {"max_seqlen_k": 9},
        "max_seqlen_k none is needed, leave it out?",
    ),
    "varlen_attn's max_q": (lambda t: {"max_q": 9}, "max_q none is needed, leave it out?"),
    "varlen_attn's cu_seq_k": (lambda t: {"cu_seq_k": 9}, "cu_seq_k did you mean cu_seqlens_k?"),
}


def cases(tables: dict[type[Exception], dict]) -> pytest.MarkDecorator:
    rows = [
        pytest.param(error, change, words, id=name)
        for error, table in tables.items()
        for name, (change, words) in table.items()
    ]
    return pytest.mark.parametrize(("error", "change", "words"), rows)


WRONG = {TypeError: WRONG_TYPES, ValueError: WRONG_VALUES}


def call(function, arguments: dict):
    arguments = dict(arguments)
    return function(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


@pytest.mark.parametrize("function", [flash_cute.forward, flash_cute.attention], ids=["forward", "attention"])
@cases(WRONG)
def test_wrong_calls(device, function, error, change, words):
    good = inputs(device)
    expected = call(flash_cute.forward, good)
    bad = {name: tensor.clone() for name, tensor in good.items()}
    with pytest.raises(error) as caught:
        call(function, bad | change(bad))
    assert type(caught.value) is error
    assert_one_sentence(str(caught.value), words, function.__name__)
    if device.type == "cuda":
        torch.cuda.synchronize()
    for result, unchanged in zip(call(flash_cute.forward, good), expected, strict=True):
        assert torch.equal(result, unchanged)


def test_nested_tensors_of_packed_calls_with_gradients(device):
    """They are refused for what they are, not as a cache, which has four dimensions, too."""
    x = torch.nested.nested_tensor([torch.randn(n, 2, 64) for n in (3, 5)], layout=torch.jagged).to(device)
    x = x.transpose(1, 2).detach().requires_grad_()
    offsets = torch.tensor([0, 3, 8], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"^flash_cute\.forward_varlen: q is nested; dense tensors are"):
        flash_cute.forward_varlen(x, x, x, offsets)


@pytest.mark.parametrize("function", ["forward_varlen", "attention_varlen"])
@cases({TypeError: WRONG_PACKED_TYPES, ValueError: WRONG_PACKED})
def test_wrong_packed_calls(device, function, error, change, words):
    good = packed(device)
    expected = call(flash_cute.forward_varlen, good)
    bad = {name: tensor.clone() for name, tensor in good.items()}
    bad |= change(bad)
    with pytest.raises(error) as caught:
        call(getattr(flash_cute, function), bad)
    assert type(caught.value) is error
    assert_one_sentence(str(caught.value), words, function)
    for result, unchanged in zip(call(flash_cute.forward_varlen, good), expected, strict=True):
        assert torch.equal(result, unchanged)


HINTS = {  # of functions with other arguments: what is brought, and what is to be said
    (flash_cute.merge, "s_aux"): "did you mean sinks?",
    (flash_cute.merge, "out"): "did you mean outs?",
    (flash_cute.merge, "attn_mask"): "there are outs, lses, sinks",
    (flash_cute.merge, "dropout_p"): "as there is no dropout; did you mean to leave it out?",
    (flash_cute.softmax, "softmax_scale"): "did you mean scale?",
    (flash_cute.softmax, "cache_leftpad"): "did you mean leftpad_k?",
    (flash_cute.softmax, "dropout_p"): "as there is no dropout; did you mean to leave it out?",
    (flash_cute.softmax, "dim"): "there are x, scale, causal, seqused_k, leftpad_k",
    (flash_cute.append_kv, "page_table"): "did you mean block_table?",
    (flash_cute.append_kv, "slot_mapping"): "did you mean slots?",
    (flash_cute.append_kv, "max_seqlen_k"): "none is needed, did you mean to leave it out?",
}


@pytest.mark.parametrize(("function", "name"), HINTS)
def test_names_that_other_functions_have_not(function, name):
    x = torch.ones(2, 3, 4, 8)
    arguments = {flash_cute.merge: ([x], [x[..., 0]]), flash_cute.append_kv: (x, x, x.clone(), x.clone())}
    with pytest.raises(TypeError) as caught:
        function(*arguments.get(function, (x,)), **{name: 1})
    face = f"flash_cute.{function.__name__}"
    hint = HINTS[function, name]
    separator = ", " if hint.startswith("as ") else "; "
    assert str(caught.value) == f"{face}: there is no argument {name}{separator}{hint}"


@pytest.mark.parametrize("function", [flash_cute.forward, flash_cute.softmax])
def test_hints_while_tracing(function):
    """Also of names that are only alike, for which a compiler can't trace the search."""

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x):
        return function(*[x] * (3 if function is flash_cute.forward else 1), caussal=True)

    with pytest.raises(Exception, match=r"there is no argument caussal; did you mean causal\?"):
        compiled(torch.ones(2, 3, 4, 8))


@pytest.mark.parametrize(
    ("name", "paged"), [("q", True), ("q", False), ("sinks", True), ("sinks", False), ("bias", False)]
)
def test_what_to_detach_is_named(name, paged):
    q = torch.ones(2, 4, 3, 8)
    tensors = {"q": q, "sinks": torch.zeros(4)} | ({} if paged else {"bias": torch.zeros(1, 1, 1, 1)})
    tensors[name].requires_grad_()
    options = (
        {"block_table": torch.zeros(2, 1, dtype=torch.int32)} if paged else {"out": torch.empty(q.shape)}
    )
    where = "through a cache" if paged else "with out"
    with pytest.raises(NotImplementedError) as caught:
        flash_cute.forward(tensors.pop("q"), q.detach(), q.detach(), **tensors, **options)
    assert str(caught.value) == f"flash_cute.forward: there are no gradients {where}; detach {name}"


BESIDE_CACHES = {  # what does not combine, and the sentence about it
    "a bias beside pages": ({"bias": (1, 1, 1, 8)}, True, False, "bias must be None with block_table, got"),
    "dropout beside pages": ({"dropout_p": 0.5}, True, False, "dropout_p must be 0 with block_table, got"),
    "a mask of packed queries beside pages": (
        {"mask": (1, 1, 1, 8)}, True, True, "mask must be None with cu_seqlens_q, got",
    ),
    "dropout of packed queries beside a padded cache": (
        {"dropout_p": 0.5}, False, True, "dropout_p must be 0 where k is a cache beside packed queries, got",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "paged", "packed", "sentence"), BESIDE_CACHES.values(), ids=BESIDE_CACHES)
def test_what_does_not_combine_with_a_cache(device, given, paged, packed, sentence):
    """Whether it is computed, planned or traced."""
    dtypes = {"mask": torch.bool, "bias": torch.bfloat16}
    q = torch.ones(2, 4, 3, 8, dtype=torch.bfloat16, device=device)
    cache = torch.ones(2, 2, 8, 8, dtype=torch.bfloat16, device=device)
    options = {
        name: torch.ones(x, dtype=dtypes[name], device=device) if name in dtypes else x
        for name, x in given.items()
    }
    if paged:
        options["block_table"] = torch.tensor([[0], [1]], dtype=torch.int32, device=device)
    function = flash_cute.forward
    if packed:
        q, function = q.transpose(1, 2).flatten(0, 1), flash_cute.forward_varlen
        options["cu_seqlens_q"] = torch.tensor([0, 3, 6], dtype=torch.int32, device=device)
    for call in (function, flash_cute.explain, torch.compile(function, backend="eager", fullgraph=True)):
        with pytest.raises(Exception, match=sentence):
            call(q, cache, cache, **options)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"bias": [1, 1, 1, 8]}, "bias must be None with batch_invariant, got a tensor"),
        ({"dropout_seed": [2], "dropout_p": 0.5}, "dropout_p must be 0 with batch_invariant, got 0.5"),
        ({"mask": [1, 1, 1, 8], "alibi_slopes": [4], "softcap": 5.0}, None),
    ],
)
def test_what_does_not_combine_with_batch_invariance(given, sentence):
    """By the checks of a traced call, which need no GPU."""
    dtypes = {"mask": torch.bool, "bias": torch.bfloat16, "alibi_slopes": torch.float32}
    dtypes["dropout_seed"] = torch.int64
    of_tensors = [torch.bfloat16] * 3 + [dtypes[name] for name in given if name in dtypes]
    devices = [torch.device("cuda:0")] * len(of_tensors)
    shapes = [2, 4, 3, 8], [2, 2, 8, 8], [2, 2, 8, 8]
    expected = pytest.raises(RuntimeError, match=f"^flash_cute: {sentence}") if sentence else nullcontext()
    with expected:
        torch.ops.flash_cute._check(*shapes, of_tensors, devices, [], batch_invariant=True, **given)


def test_out_is_not_the_bias(device):
    """Which is read while out is written."""
    q = torch.ones(2, 4, 8, 8, dtype=torch.bfloat16, device=device)
    bias = torch.zeros(2, 4, 8, 8, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match=r"out is written, so it must not share memory with bias$"):
        flash_cute.forward(q, q, q, bias=bias, out=bias)


@pytest.mark.parametrize("name", ["mask", "bias", "alibi_slopes", "dropout_seed"])
def test_storages_that_are_too_small(device, name):
    q = torch.ones(2, 4, 8, 8, dtype=torch.bfloat16, device=device)
    tensors = {
        "mask": torch.ones(2, 4, 8, 8, dtype=torch.bool, device=device),
        "bias": torch.zeros_like(q),
        "alibi_slopes": torch.ones(4, device=device),
        "dropout_seed": torch.ones(2, dtype=torch.int64, device=device),
    }
    bytes_needed = tensors[name].numel() * tensors[name].element_size()
    tensors[name].untyped_storage().resize_(1)
    sentence = f"{name} must have a storage of at least {bytes_needed} bytes, got one of 1$"
    with pytest.raises(ValueError, match=sentence):
        flash_cute.forward(q, q, q, dropout_p=0.5, **tensors)


def test_the_storage_of_a_bias_that_is_rounded(device):
    """PyTorch's operators round it, before any check of csrc/: they would read what lies behind."""
    q = torch.ones(2, 4, 8, 8, dtype=torch.bfloat16, device=device)
    bias = torch.zeros(q.shape, device=device)
    bias.untyped_storage().resize_(1)
    sentence = "must have a storage of at least 2048 bytes, got one of 1$"
    for tensor in (bias, bias.detach().requires_grad_()):
        with pytest.raises(ValueError, match=rf"^flash_cute\.forward: bias {sentence}"):
            flash_cute.forward(q, q, q, bias=tensor)
        with (
            torch.autocast(device.type, torch.bfloat16),
            pytest.raises(ValueError, match=rf"^flash_cute\.softmax_matmul: x {sentence}"),
        ):
            flash_cute.softmax_matmul(tensor, q)


@pytest.mark.parametrize("name", ["forward", "attention"])
def test_offsets_belong_to_packed_sequences(device, name):
    with pytest.raises(TypeError) as caught:
        call(getattr(flash_cute, name), packed(device))
    assert_one_sentence(str(caught.value), f"cu_seqlens_q did you mean flash_cute.{name}_varlen?", name)
    offsets = packed(device)["cu_seqlens_k"]
    with pytest.raises(ValueError, match=r"explain: cu_seqlens_k is given without cu_seqlens_q"):
        call(flash_cute.explain, inputs(device) | {"cu_seqlens_k": offsets})


@cases(WRONG)
def test_explain_refuses_the_same(device, error, change, words):
    good = inputs(device)
    with pytest.raises(error) as caught:
        call(flash_cute.explain, good | change(good))
    assert type(caught.value) is error
    assert_one_sentence(str(caught.value), words, "explain")


class Wordy:
    def __repr__(self):
        return "one\ntwo\n" + "three" * 1000


LONG_VALUES = {
    "several lines": Wordy(),
    "text": "one\ntwo" * 1000,
    "a list": list(range(5000)),
    "a tensor": torch.zeros(30, 30),
    "an array": np.zeros((30, 30)),
    "an integer": 2**20000,  # which Python does not write in decimal digits
}


@pytest.mark.parametrize("value", LONG_VALUES.values(), ids=LONG_VALUES)
@pytest.mark.parametrize("argument", ["causal", "window", "family", "deterministic", "softmax_scale"])
def test_long_values_are_cut(argument, value):
    if argument == "softmax_scale" and isinstance(value, int):
        value = (value,)  # by itself it is a number
    with pytest.raises((TypeError, ValueError)) as caught:
        call(flash_cute.forward, inputs("cpu") | {argument: value})
    assert_one_sentence(str(caught.value), argument)


@pytest.mark.parametrize("value", LONG_VALUES.values(), ids=LONG_VALUES)
@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, value: flash_cute.explain(x, x, x, backward=value),
        lambda x, value: flash_cute.softmax(x, causal=value),
        lambda x, value: flash_cute.softmax(x, scale=value),
        lambda x, value: flash_cute.reference.forward(x, x, x, window=(value, value, value)),
        lambda x, value: flash_attn_func(x, x, x, window_size=value),
        lambda x, value: flash_attn_func(x, x, x, softcap=value),
        lambda x, value: flash_attn_with_kvcache(x, x, x, cache_seqlens=value),
        lambda x, value: flash_attn_qkvpacked_func(x, num_heads_q=value),
    ],
)
def test_long_values_are_cut_everywhere(wrong, value):
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as caught:
        wrong(inputs("cpu")["q"], value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("name", "qkv")
def test_one_of_them_on_meta(device, name):
    """Whose kernel would give results that nothing has written."""
    tensors = inputs(device)
    tensors[name] = tensors[name].to("meta")
    with pytest.raises(ValueError, match="meta"):
        call(flash_cute.forward, tensors)
    with pytest.raises(NotImplementedError, match=f"{name} is on device meta"):
        call(flash_cute.explain, tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("name", "qkv")
def test_devices_mixed(kernel, name):
    tensors = inputs(kernel.device)
    tensors[name] = tensors[name].cpu()
    with pytest.raises(ValueError, match="device") as caught:
        call(flash_cute.forward, tensors)
    assert_one_sentence(str(caught.value), f"{name} device")
    torch.cuda.synchronize()
    call(flash_cute.forward, inputs(kernel.device))


def test_family_on_the_cpu():
    with pytest.raises(ValueError, match="family") as caught:
        call(flash_cute.forward, inputs("cpu") | {"family": "sm80"})
    assert_one_sentence(str(caught.value), "family sm80 CPU")


@pytest.mark.gpu
def test_family_of_another_gpu(device):
    if torch.cuda.get_device_capability(device) == (9, 0):
        pytest.skip("every family runs on this GPU")
    with pytest.raises(ValueError, match="sm90"):
        call(flash_cute.forward, inputs(device) | {"family": "sm90"})


def test_explain_of_a_meta_tensor():
    meta = {name: tensor.to("meta") for name, tensor in inputs("cpu").items()}
    with pytest.raises(NotImplementedError, match="meta") as caught:
        call(flash_cute.explain, meta)
    assert_one_sentence(str(caught.value), "q device meta cuda cpu", "explain")


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k"])
@pytest.mark.parametrize("other", ["meta", pytest.param("cpu", marks=pytest.mark.gpu)])
def test_lengths_on_another_device(device, name, other):
    good = packed(device) | {name: torch.ones(2, dtype=torch.int32) for name in ("seqused_q", "seqused_k")}
    good |= {"leftpad_k": torch.ones(2, dtype=torch.int32)}
    good = {name: tensor.to(device) for name, tensor in good.items()}
    call(flash_cute.forward_varlen, good)
    with pytest.raises(ValueError, match="device") as caught:
        call(flash_cute.forward_varlen, good | {name: good[name].to(other)})
    assert_one_sentence(str(caught.value), f"{name} device {other} q same", "forward_varlen")


def test_nested_keys_and_values_of_different_offsets(device):
    tensors = packed(device)
    offsets = tensors.pop("cu_seqlens_k").long().clamp(max=300)
    q, k, v = (
        torch.nested.nested_tensor_from_jagged(tensors[name][:300], offsets.clone()).transpose(1, 2)
        for name in "qkv"
    )
    with pytest.raises(ValueError, match="different offsets"):
        flash_cute.forward(q, k, v)


def backward_inputs(device, is_packed: bool) -> dict[str, torch.Tensor]:
    """The tensors of flash_cute::_backward, or of _backward_varlen."""
    tensors = packed(device) if is_packed else inputs(device)
    out, lse = call(flash_cute.forward_varlen if is_packed else flash_cute.forward, tensors)
    return tensors | {"out": out, "lse": lse, "dout": torch.ones_like(out), "dlse": torch.ones_like(lse)}


# Likewise, given the tensors of a backward.
WRONG_GRADIENTS = {
    "dout of another shape": (lambda t: {"dout": t["dout"][1:]}, "dout has shape as q"),
    "dout of another dtype": (lambda t: {"dout": t["dout"].float()}, "dout torch.float32 torch.bfloat16"),
    "dlse of another shape": (lambda t: {"dlse": t["dlse"][..., 1:]}, "dlse has shape as q"),
    "dlse of a 16-bit type": (lambda t: {"dlse": t["dlse"].bfloat16()}, "dlse torch.bfloat16 torch.float32"),
    "dlse with a head_dim": (lambda t: {"dlse": t["dout"].float()}, "dlse has shape as q"),
    "out of another shape": (lambda t: {"out": t["out"][..., :32]}, "out has shape as q"),
    "out of another dtype": (lambda t: {"out": t["out"].half()}, "out torch.float16 torch.bfloat16"),
    "lse of another shape": (lambda t: {"lse": t["lse"][:1]}, "lse has shape as q"),
    "lse of another dtype": (lambda t: {"lse": t["lse"].double()}, "lse torch.float64 torch.float32"),
    "no gradient": (lambda t: {"dout": None, "dlse": None}, "neither dout nor dlse"),
    "k of another head_dim": (lambda t: {n: t[n][..., :32] for n in "kv"}, "k head_dim 32 64"),
    "dout elsewhere": (lambda t: {"dout": t["dout"].to("meta")}, "dout meta q same"),
    "lse elsewhere": (lambda t: {"lse": t["lse"].to("meta")}, "lse meta q same"),
}


OPERATORS = {
    "_backward": WRONG_GRADIENTS,
    "_backward_varlen": WRONG_GRADIENTS,
    "_bias_gradient": WRONG_GRADIENTS | WRONG_BIAS_GRADIENTS,
    "_weights": WRONG_WEIGHTS,
}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        pytest.param(name, *wrong, id=f"{name}-{mistake}")
        for name, table in OPERATORS.items()
        for mistake, wrong in table.items()
    ],
)
def test_wrong_gradients(device, name, change, words, traced):
    """autograd sees to the gradients of its own calls: these are of the operators."""
    op = getattr(torch.ops.flash_cute, name)
    good = backward_inputs(device, name == "_backward_varlen")
    if name == "_bias_gradient":
        good["bias"] = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16, device=device)
    if name == "_weights":
        good = {argument: good[argument] for argument in ("q", "k", "v", "lse")}
    bad = good | change(good)
    with FakeTensorMode() if traced else nullcontext() as mode:
        if traced:
            tensors = {name: x for name, x in bad.items() if isinstance(x, torch.Tensor)}
            bad |= {name: mode.from_tensor(x) for name, x in tensors.items()}
        with pytest.raises(RuntimeError) as caught:
            op(**bad)
    assert_one_sentence(str(caught.value), words, function="")


@pytest.mark.parametrize(("change", "words"), WRONG_MATMULS.values(), ids=WRONG_MATMULS)
def test_wrong_softmax_matmuls(device, change, words):
    good = {"x": torch.ones(2, 6, 150, 190, device=device).bfloat16(), "v": inputs(device)["v"]}
    with pytest.raises((TypeError, ValueError)) as caught:
        flash_cute.softmax_matmul(**good | change(good))
    assert_one_sentence(str(caught.value), words, "softmax_matmul")
    assert "heads_q" not in str(caught.value)


@pytest.mark.parametrize(("change", "words"), WRONG_LOOKS.values(), ids=WRONG_LOOKS)
def test_wrong_attention_weights(device, change, words):
    good = {name: x for name, x in inputs(device).items() if name != "v"}
    with pytest.raises((TypeError, ValueError)) as caught:
        flash_cute.attention_weights(**good | change(good))
    assert_one_sentence(str(caught.value), words, "attention_weights")


def test_deterministic_is_a_bool(device):
    for function in (flash_cute.forward, flash_cute.attention, flash_cute.explain):
        with pytest.raises(TypeError, match=r"deterministic is 1; True or False is accepted"):
            call(function, inputs(device) | {"deterministic": 1})
    for name in ("backward", "internals"):
        with pytest.raises(TypeError, match=rf"^flash_cute\.explain: {name} is 1; True or False is accepted"):
            call(flash_cute.explain, inputs(device) | {name: 1})


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_an_operator_without_its_offsets(device, needs_gradient):
    """A None, which torch lets pass for a tensor, does not make packed sequences padded ones."""
    q, k, v = inputs(device).values()
    with pytest.raises(RuntimeError):
        torch.ops.flash_cute.forward_varlen(q.requires_grad_(needs_gradient), k, v, None)


def faces(device) -> dict[str, tuple]:
    """Of what reads tensors: the name in its errors, the function, and good tensors for it by their names."""
    counts = {name: torch.ones(2, dtype=torch.int32, device=device) for name in LENGTHS[2:5]}
    padded, varlen = inputs(device) | counts, packed(device) | counts
    gradients, floats = backward_inputs(device, False), {n: x.float() for n, x in inputs(device).items()}
    x, out, lse = padded["q"].squeeze(0), gradients["out"], gradients["lse"]
    columns = {"seqused_k": counts["seqused_k"], "leftpad_k": counts["leftpad_k"]}
    rows = [padded[name].transpose(1, 2) for name in "qkv"]
    cache = {
        "q": rows[0],
        "k_cache": rows[1],
        "v_cache": rows[2],
        "k": rows[1][:, :1] + 1,
        "v": rows[2][:, :1] + 1,
    }
    cache |= {"cache_seqlens": counts["seqused_k"], "cache_leftpad": counts["leftpad_k"]}
    ops = torch.ops.flash_cute

    return {
        "forward": ("forward", flash_cute.forward, padded),
        "forward_varlen": ("forward_varlen", flash_cute.forward_varlen, varlen),
        "explain": ("explain", flash_cute.explain, padded),
        "softmax_matmul": (
            "softmax_matmul",
            flash_cute.softmax_matmul,
            {"x": padded["q"], "v": padded["q"].mT.contiguous()} | counts,
        ),
        "attention_weights": (
            "attention_weights",
            flash_cute.attention_weights,
            {name: x for name, x in padded.items() if name != "v"},
        ),
        "autocast": ("forward", lambda q, k, v: under_autocast(q, k, v), floats),
        "backward": ("", ops._backward, gradients),
        "softmax": ("softmax", flash_cute.softmax, {"x": x} | columns),
        "softmax_backward": (
            "",
            lambda x, **gradients: ops._softmax_backward(kept=x, **gradients),
            {"x": x, "dprobabilities": x, "dlse": x[..., 0].float()},
        ),
        "merge": ("merge", lambda outs, lses: flash_cute.merge([outs], [lses]), {"outs": out, "lses": lse}),
        "kvcache": ("compat", flash_attn_with_kvcache, cache),
    }


def freed(x: torch.Tensor, part: float) -> torch.Tensor:
    """A view, not at the begin, of a storage that was cut to a part."""
    whole = torch.stack([x, x])
    view = whole[1]
    whole.untyped_storage().resize_(int(part * whole.nbytes))
    return view


@pytest.mark.parametrize("part", [0, 0.75])
@pytest.mark.parametrize("face", faces("cpu"))
def test_memory_that_was_given_back(device, face, part):
    """By untyped_storage().resize_(), as sharded training does with weights: it is not read."""
    called, function, good = faces(device)[face]
    for name, tensor in good.items():
        with pytest.raises((ValueError, RuntimeError)) as caught:
            function(**good | {name: freed(tensor, part)})
        shown = f"{name}[0]" if face == "merge" else name
        assert_one_sentence(str(caught.value), f"{shown} storage {int(2 * tensor.nbytes * part)}", called)
    function(**good)


def test_freed_lengths_that_are_looked_at(device, monkeypatch):
    """With FLASH_CUTE_CHECK=1, and the offsets of nested tensors."""
    offsets = torch.tensor([0, 4, 9], device=device)
    x = torch.randn(9, 2, 64, dtype=torch.bfloat16, device=device)
    nested = torch.nested.nested_tensor_from_jagged(x, offsets.clone()).transpose(1, 2)
    nested.offsets().untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"^flash_cute\.forward: cu_seqlens_q must have a storage"):
        flash_cute.forward(nested, nested, nested)
    monkeypatch.setattr(flash_cute.lengths, "CHECKED", True)
    offsets = freed(offsets.int(), 0)
    with pytest.raises(ValueError, match=r"^flash_cute\.forward_varlen: cu_seqlens_q must have a storage"):
        flash_cute.forward_varlen(x, x, x, offsets)


def test_what_needs_no_storage_is_not_refused(device):
    """Tensors without elements, and those that transforms wrap."""
    q, k, v = inputs(device).values()
    results = flash_cute.forward(q, k, v)
    entries = (result.unsqueeze(1) for result in results)
    merged = torch.func.vmap(lambda out, lse: flash_cute.merge([out], [lse]))(*entries)
    assert all(torch.equal(mine.squeeze(1), whole) for mine, whole in zip(merged, results, strict=True))
    q.untyped_storage().resize_(0)
    flash_cute.forward(q[:, :, :0], k, v)


def under_autocast(*tensors):
    with torch.autocast(tensors[0].device.type, torch.bfloat16):
        return flash_cute.forward(*tensors)


def forward_varlen(*tensors):
    rows = min(x.shape[2] for x in tensors)
    offsets = torch.tensor([0, rows], dtype=torch.int32, device=tensors[0].device)
    return flash_cute.forward_varlen(*(x[0].transpose(0, 1) for x in tensors), offsets, window=3)


def backward(big, one):
    """Of no queries: the forward needs no memory, and all gradients are 0."""
    big = big.detach().requires_grad_()
    torch.autograd.grad(flash_cute.attention(one[:, :, :0], big, big).sum(), big)


def softmax_backward(big):
    """As autograd calls it; a forward of such a size would fail before."""
    softmax_op._Gradient.apply(big, None, big, 1.0, False, None, None)


# Calls for more memory than there is: of (1, 128, 2^28, 64) and (1, 128, 1, 64), or of (2^22, 2^20).
BEYOND_MEMORY = {
    "forward": lambda big, one: flash_cute.forward(big, one, one),
    "window": lambda big, one: flash_cute.forward(big, one, one, window=3),
    "varlen": lambda big, one: forward_varlen(big, one, one),
    "autocast": lambda big, one: under_autocast(big.float(), one.float(), one.float()),
    "backward": backward,
    "softmax": flash_cute.softmax,
    "softmax in float32": flash_cute.softmax,
    "softmax backward": softmax_backward,
}


@pytest.mark.parametrize("name", BEYOND_MEMORY)
def test_out_of_memory(device, name):
    """torch's exception of GPUs, on the CPU too, whose allocator raises a RuntimeError."""
    dtype = torch.float32 if name in ("softmax in float32", "autocast") else torch.bfloat16
    x = torch.full((1, 1, 1, 1), 1.1, dtype=dtype, device=device)
    one, row = x.repeat(1, 1, 1, 64).expand(1, 128, 1, 64), x.view(1, 1)
    big = row.expand(2**22, 2**20) if "softmax" in name else one.expand(1, 128, 2**28, 64)
    function = name.partition(" ")[0].replace("window", "forward").replace("varlen", "forward_varlen")
    sentence = "out of memory" if name == "autocast" else rf"^flash_cute\.{function}: out of memory: .* bytes"
    with pytest.raises(torch.OutOfMemoryError, match=sentence):
        BEYOND_MEMORY[name](*(big, one) if "softmax" not in name else (big,))
    call(flash_cute.forward, inputs(device))
    flash_cute.softmax(inputs(device)["q"])


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ((1, 2**40, 1, 1), r"\(batch, head\) pairs"),
        ((1, 1, 2**28 + 1, 1), "rows"),
        ((1, 1, 1, 2**28 + 1), "columns"),
    ],
)
def test_large_softmax_matmuls(monkeypatch, sizes, sentence):
    """Before the zeros that stand for queries and keys are made."""
    monkeypatch.delattr(torch, "zeros")
    one = torch.ones(1, 1, 1, 1)
    sentence = rf"^flash_cute\.softmax_matmul: x has {max(sizes)} {sentence}; at most 268435456 are accepted$"
    with pytest.raises(ValueError, match=sentence):
        flash_cute.softmax_matmul(one.expand(sizes), one.expand(1, 1, sizes[3], 1))


def test_zeros_of_softmax_matmul_beyond_memory(monkeypatch):
    one = torch.ones(1, 1, 1, 1)
    monkeypatch.setattr(torch, "zeros", lambda *size, **options: torch.empty(2**50, **options))
    with pytest.raises(torch.OutOfMemoryError, match=r"^flash_cute\.softmax_matmul: out of memory: .* bytes"):
        flash_cute.softmax_matmul(one, one)


# On the CPU: what calls Python's kernels, made of q, k and v that need gradients.
WINDOW = partial(flash_cute.attention, window=3)
COMPILED = torch.compile(WINDOW, backend="aot_eager")
CPU_CALLS = {
    "forward": lambda q, k, v: partial(WINDOW, q.detach(), k, v.detach()),
    "without gradients": lambda q, k, v: partial(torch.no_grad()(WINDOW), q, k, v),
    "varlen": lambda q, k, v: partial(forward_varlen, q, k, v),
    "vmap": lambda q, k, v: partial(torch.func.vmap(WINDOW), q[None], k[None], v[None]),
    "compiled": lambda q, k, v: partial(COMPILED, q, k, v),
    "backward": lambda q, k, v: WINDOW(q, k, v).sum().backward,
    "compiled backward": lambda q, k, v: COMPILED(q, k, v).sum().backward,
    "func.grad": lambda q, k, v: partial(torch.func.grad(lambda q: WINDOW(q, k, v).sum()), q),
    "softmax": lambda q, k, v: partial(flash_cute.softmax, q),
    "softmax backward": lambda q, k, v: flash_cute.softmax(q)[0].sum().backward,
}


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("name", CPU_CALLS)
def test_what_is_raised_on_the_cpu_comes_out(monkeypatch, name, error):
    """As it is: C++ between Python's kernels and the caller would make a RuntimeError of a Ctrl-C."""

    def interrupted(*args):
        raise error("raised inside")

    tensors = [x.requires_grad_() for x in inputs("cpu").values()]
    function = CPU_CALLS[name](*tensors)
    with monkeypatch.context() as patched:
        patched.setattr(windows.Window, "of", interrupted)
        patched.setattr(cpu_softmax, "hidden_columns", interrupted)
        with pytest.raises(error, match=r"^raised inside$") as caught:
            function()
    assert type(caught.value) is error
    CPU_CALLS[name](*tensors)()


@pytest.mark.parametrize("where", ["meta", None])
@pytest.mark.parametrize("is_packed", [False, True])
def test_more_rows_than_tiles_are_counted_for(device, is_packed, where):
    """2**35 over the batch and the heads of q, which only expanded tensors have; of k only in a backward."""
    device = where or device

    def of(heads: int, rows: int, last: int = 64, dtype=torch.bfloat16) -> torch.Tensor:
        size = (rows, heads, last) if is_packed else (1, heads, rows, last)
        return torch.ones((), dtype=dtype, device=device).expand(size)

    offsets = {"cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32, device=device)} if is_packed else {}
    function = flash_cute.forward_varlen if is_packed else flash_cute.forward
    most, one = 2**28, of(129, 1)
    words = f"must at most {2**35} rows batch heads got {129 * most}"
    with pytest.raises(ValueError, match="q must") as caught:
        function(of(129, most), one, one, **offsets)
    assert_one_sentence(str(caught.value), words, function.__name__)
    op = torch.ops.flash_cute._backward_varlen if is_packed else torch.ops.flash_cute._backward
    k, lse = of(129, most), of(129, 1, 1, torch.float32).squeeze(-1)
    lse = lse.transpose(0, 1) if is_packed else lse
    with pytest.raises(RuntimeError, match="k must") as caught:
        op(one, None, one, k, k, one, lse, **offsets, needs_dkv=False)
    assert_one_sentence(str(caught.value), words, function="")
    if where is None:
        with pytest.raises(ValueError, match="k must") as caught:
            flash_cute.explain(one, k, k, **offsets, backward=True)
        assert_one_sentence(str(caught.value), words, "explain")
        return
    function(one, k, k, **offsets)
    q, k, lse = of(128, 1), of(128, most), of(128, 1, 1, torch.float32).squeeze(-1)
    function(k, q, q, **offsets)
    lse = lse.transpose(0, 1) if is_packed else lse
    op(q, None, q, k, k, q, lse, **offsets, needs_dkv=False)
