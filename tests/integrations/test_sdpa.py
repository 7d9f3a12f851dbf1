"""flash_cute as PyTorch's flash attention: PyTorch's operators and functions run on our kernels.

The operators take CPU tensors, too; of PyTorch's functions above them, only varlen_attn uses them there.
"""

from __future__ import annotations

import re
from inspect import signature

import pytest
import torch
from support.caches import in_pages
from support.cases import (
    MASKS,
    Mask,
    Sequence,
    Shape,
    make_gradients,
    make_inputs,
    make_ragged,
    make_ragged_gradients,
)
from support.changed import Changed, next_seed
from support.tolerance import (
    assert_attention,
    assert_gradients,
    assert_ragged,
    assert_ragged_gradients,
    assert_within_rule,
)
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

import flash_cute
from flash_cute import reference
from flash_cute.integrations.sdpa import flash_forward, flash_forward_out

if not hasattr(attention, "restore_flash_attention_impl"):
    pytest.skip("torch 2.10 can't restore its own kernels", allow_module_level=True)

aten = torch.ops.aten
DTYPE = torch.bfloat16
FULL, CAUSAL = MASKS["full"], MASKS["causal"]
# Small: the kernels have tests of their own.
SHAPE = Shape(2, 4, 4, 97, 97, 64)
SHAPES = {
    "more_keys": Shape(2, 2, 2, 37, 71, 64),
    "more_queries": Shape(2, 2, 2, 71, 37, 64),
    "grouped_heads": Shape(2, 6, 2, 50, 70, 64),
    "single_query": Shape(3, 4, 4, 1, 90, 64),
}
BATCHES = {
    "unequal": (Sequence(1, 1), Sequence(30, 50), Sequence(40, 20), Sequence(3, 100)),
    "some empty": tuple(Sequence(*rows) for rows in ((0, 0), (20, 0), (0, 20), (33, 33), (0, 7))),
}
KEYS_USED = Sequence(60, 100, used_k=70), Sequence(9, 50, used_k=0), Sequence(130, 140, used_k=140)


@pytest.fixture(autouse=True)
def active():
    torch._dynamo.reset()
    attention.activate_flash_attention_impl("flash_cute")
    yield
    if attention.current_flash_attention_impl():
        attention.restore_flash_attention_impl()


def leaves(tensors) -> list[torch.Tensor]:
    return [x.detach().requires_grad_() for x in tensors]


def detached(*tensors) -> list[torch.Tensor]:
    return [x.detach() for x in tensors]


def heads_first(*tensors) -> list[torch.Tensor]:
    return [x.detach().transpose(1, 2) for x in tensors]


def window_arguments(mask: Mask) -> tuple[int, int]:
    limits = mask.window if isinstance(mask.window, tuple) else (mask.window, mask.window)
    return tuple(-1 if limit is None else limit for limit in limits)


def assert_out(out, inputs, mask: Mask = FULL, scale: float | None = None) -> None:
    """Where there is no LSE to check."""
    options = {"softmax_scale": scale, **mask.options}
    oracle, yardstick = (reference.forward(*inputs, dtype=t, **options)[0] for t in (torch.float64, DTYPE))
    assert_within_rule("out", out, yardstick, oracle)


def assert_differentiated(out, inputs, mask: Mask = FULL, scale: float | None = None) -> None:
    dout, _ = make_gradients(inputs[0].detach())
    gradients = torch.autograd.grad(out, inputs, dout)
    assert_gradients(gradients, *detached(*inputs), dout, None, mask, scale)


# PyTorch's registry


def test_activate_and_restore(device):
    q, k, v = make_inputs(SHAPE, DTYPE, device)
    assert "flash_cute" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() == "flash_cute"
    attention.activate_flash_attention_impl("flash_cute")  # again
    sentence = r"^flash_cute\.sdpa: return_debug_mask is True; False is accepted$"
    with pytest.raises(NotImplementedError, match=sentence):
        aten._scaled_dot_product_flash_attention(q, k, v, 0.5, return_debug_mask=True)
    attention.restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None
    if device.type == "cuda":
        assert aten._scaled_dot_product_flash_attention(q, k, v, 0.5)[0].shape == q.shape
    else:
        with pytest.raises(NotImplementedError, match="CPU"):
            aten._scaled_dot_product_flash_attention(q, k, v)


# The operators


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("name", SHAPES)
def test_sdpa_operator(device, name, mask):
    inputs = leaves(make_inputs(SHAPES[name], DTYPE, device))
    out, lse, *rest = aten._scaled_dot_product_flash_attention(*inputs, is_causal=mask == "causal")
    assert_attention((out.detach(), lse), *detached(*inputs), MASKS[mask])
    assert rest[:4] == [None, None, inputs[0].shape[2], inputs[1].shape[2]]
    assert not lse.requires_grad
    assert_differentiated(out, inputs, MASKS[mask])


@pytest.mark.parametrize("width", [24, 96])
def test_values_of_another_width(device, width):
    """scaled_dot_product_attention doesn't choose these operators for such values, but they take them."""
    inputs = leaves(make_inputs(Shape(2, 4, 4, 30, 30, 64, width), DTYPE, device))
    out, lse, *_ = aten._scaled_dot_product_flash_attention(*inputs, is_causal=True)
    tensors = detached(*inputs)
    assert_attention((out.detach(), lse), *tensors, MASKS["causal"])
    dout, _ = make_gradients(out.detach())
    assert_gradients(torch.autograd.grad(out, inputs, dout), *tensors, dout, None, MASKS["causal"])
    batch = make_ragged(BATCHES["unequal"], (4, 2), 64, DTYPE, device, packed=True, head_dim_v=width)
    inputs = leaves((batch.q, batch.k, batch.v))
    offsets = batch.lengths.values()
    out, lse, *_ = aten._flash_attention_forward(*inputs, *offsets, 0, 0, 0.0, True, False)
    assert_ragged((out.detach(), lse), batch, MASKS["causal"])
    dout, _ = make_ragged_gradients(batch)
    found = torch.autograd.grad(out, inputs, dout)
    assert_ragged_gradients(found, batch, dout, torch.zeros_like(lse), MASKS["causal"])


def test_scale(device):
    inputs = leaves(make_inputs(SHAPE, DTYPE, device))
    out, lse, *_ = aten._scaled_dot_product_flash_attention(*inputs, scale=0.3)
    assert_attention((out.detach(), lse), *detached(*inputs), softmax_scale=0.3)
    assert_differentiated(out, inputs, scale=0.3)


@pytest.mark.parametrize("mask", ["full", "causal", "window_symmetric", "window_left", "window_causal"])
def test_flash_operator(device, mask):
    mask = MASKS[mask]
    inputs = leaves(x.transpose(1, 2) for x in make_inputs(SHAPES["more_keys"], DTYPE, device))
    left, right = window_arguments(mask)
    lengths = None, None, 37, 71
    options = {"scale": 0.3, "window_size_left": left, "window_size_right": right}
    out, lse, *_ = aten._flash_attention_forward(*inputs, *lengths, 0.0, mask.causal, False, **options)
    results, tensors = (heads_first(out)[0], lse), heads_first(*inputs)
    assert_attention(results, *tensors, mask, 0.3)
    dout, _ = make_gradients(tensors[0])
    gradients = torch.autograd.grad(out, inputs, dout.transpose(1, 2))
    assert_gradients(heads_first(*gradients), *tensors, dout, None, mask, 0.3)


@pytest.mark.parametrize("mask", ["full", "causal", "window_symmetric"])
@pytest.mark.parametrize("name", ["unequal", "some empty"])
def test_packed_flash_operator(device, name, mask):
    mask = MASKS[mask]
    batch = make_ragged(BATCHES[name], (4, 2), 64, DTYPE, device, packed=True)
    inputs = leaves((batch.q, batch.k, batch.v))
    left, right = window_arguments(mask)
    options = {"window_size_left": left, "window_size_right": right}
    out, lse, *_ = aten._flash_attention_forward(
        *inputs, *batch.lengths.values(), 0, 0, 0.0, mask.causal, False, **options
    )
    assert_ragged((out.detach(), lse), batch, mask)
    dout, _ = make_ragged_gradients(batch)
    gradients = torch.autograd.grad(out, inputs, dout)
    assert_ragged_gradients(gradients, batch, dout, torch.zeros_like(lse), mask)


def test_seqused_k(device):
    """The backward is not told of it, so it is refused where a gradient is needed."""
    batch = make_ragged(KEYS_USED, (4, 2), 64, DTYPE, device, packed=True)
    seqused_k = batch.lengths.pop("seqused_k")
    inputs = batch.q, batch.k, batch.v
    lengths = *batch.lengths.values(), 0, 0, 0.0, True, False
    out, lse, *_ = aten._flash_attention_forward(*inputs, *lengths, seqused_k=seqused_k)
    assert_ragged((out, lse), batch, CAUSAL)
    with torch.no_grad():
        aten._flash_attention_forward(*leaves(inputs), *lengths, seqused_k=seqused_k)
    with pytest.raises(NotImplementedError, match=r"^flash_cute\.sdpa: seqused_k is given and gradients are"):
        aten._flash_attention_forward(*leaves(inputs), *lengths, seqused_k=seqused_k)


# Pages. torch 2.11 passes no block_table, so that there our functions are called directly.


@pytest.mark.parametrize("mask", ["full", "causal", "window_symmetric"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_packed_queries_and_pages(device, page_size, mask):
    """Lengths of keys are seqused_k or else the differences of cum_seq_k."""
    mask = MASKS[mask]
    batch = make_ragged(BATCHES["some empty"], (4, 2), 64, DTYPE, device, packed=True)
    *pages, lengths = in_pages(batch, page_size, "heads first")
    inputs = batch.q, *heads_first(*pages)
    left, right = window_arguments(mask)
    options = {"window_size_left": left, "window_size_right": right, "block_table": lengths["block_table"]}
    rest = 0, 0, 0.0, mask.causal, False
    cum_seq_q, seqused_k = lengths["cu_seqlens_q"], lengths["seqused_k"]
    out, lse, *_ = flash_forward(*inputs, cum_seq_q, None, *rest, seqused_k=seqused_k, **options)
    assert_ragged((out, lse), batch, mask)
    cum_seq_k = torch.nn.functional.pad(seqused_k.cumsum(0), (1, 0)).int()
    again, *_ = flash_forward(*inputs, cum_seq_q, cum_seq_k, *rest, **options)
    assert torch.equal(again, out)
    used = torch.full_like(batch.q.transpose(0, 1), torch.nan).transpose(0, 1)
    lse_again = flash_forward_out(used, *inputs, cum_seq_q, None, *rest, seqused_k=seqused_k, **options)
    assert torch.equal(used, out)
    assert torch.equal(lse_again, lse)


def test_padded_queries_and_pages(device):
    sequences = tuple(Sequence(4, keys) for keys in (90, 1, 700, 0, 129))
    batch = make_ragged(sequences, (4, 2), 64, DTYPE, device, packed=False)
    *pages, lengths = in_pages(batch, 16, "rows first")
    inputs = heads_first(batch.q, *pages)
    options = {"seqused_k": lengths["seqused_k"], "block_table": lengths["block_table"]}
    out, lse, *_ = flash_forward(*inputs, None, None, 0, 0, 0.0, True, False, **options)
    assert_ragged((out.transpose(1, 2), lse), batch, CAUSAL)
    into = torch.empty_like(out).fill_(torch.nan)
    assert torch.equal(flash_forward_out(into, *inputs, None, None, 0, 0, 0.0, True, False, **options), lse)
    assert torch.equal(into, out)


@pytest.mark.parametrize("paged", [False, True], ids=["packed keys", "pages"])
def test_one_split_is_the_same_in_any_batch(device, paged):
    sequences = (Sequence(2, 2500), Sequence(1, 1025), Sequence(70, 70), Sequence(3, 3))

    def run(batch, tensors, cum_seq_k, **options):
        arguments = cum_seq_k, 0, 0, 0.0, True, False
        return flash_forward(*tensors, batch.lengths["cu_seqlens_q"], *arguments, num_splits=1, **options)[:2]

    batch = make_ragged(sequences, (4, 2), 64, DTYPE, device, packed=True, margins=(0, 0))
    if paged:
        *pages, lengths = in_pages(batch, 64, "heads first")
        options = {name: lengths[name] for name in ("seqused_k", "block_table")}
        out, lse = run(batch, (batch.q, *heads_first(*pages)), None, **options)
    else:
        out, lse = run(batch, (batch.q, batch.k, batch.v), batch.lengths["cu_seqlens_k"])
    for sequence, (_, rows, keys) in zip(sequences, batch.places, strict=True):
        single = make_ragged((sequence,), (4, 2), 64, DTYPE, device, packed=True, margins=(0, 0))
        tensors = batch.q[rows], batch.k[keys], batch.v[keys]
        alone = run(single, tensors, single.lengths["cu_seqlens_k"])
        assert torch.equal(alone[0], out[rows])
        assert torch.equal(alone[1], lse[:, rows])


def test_refusals_of_pages(device):
    batch = make_ragged(BATCHES["unequal"], (4, 2), 64, DTYPE, device, packed=True)
    *pages, lengths = in_pages(batch, 16, "heads first")
    inputs = batch.q, *heads_first(*pages), lengths["cu_seqlens_q"], None, 0, 0, 0.0, True, False
    options = {"seqused_k": lengths["seqused_k"], "block_table": lengths["block_table"]}

    def refused(call, *tensors, **wrong):
        with pytest.raises((ValueError, NotImplementedError)) as raised:
            call(*tensors, *inputs, **options | wrong)
        return str(raised.value)

    sentence = refused(flash_forward, block_table=options["block_table"].long())
    assert sentence.startswith("flash_cute.sdpa: block_table has dtype torch.int64")
    for out in (batch.q.float(), batch.q[1:].clone()):
        assert refused(flash_forward_out, out).startswith("flash_cute.sdpa: out ")
    batch.q.requires_grad_()
    sentence = refused(flash_forward, seqused_k=None)
    assert sentence.startswith("flash_cute.sdpa: block_table is given and gradients are needed")


@pytest.mark.parametrize(
    ("sentence", "options"),
    [
        ("dropout_p is 1.5; a number from 0 to less than 1", {"dropout_p": 1.5}),
        ("return_debug_mask is True; False is accepted", {"return_debug_mask": True}),
        ("alibi_slopes is a tensor; None is accepted", {"alibi_slopes": torch.ones(4)}),
        ("only cum_seq_q is None; cum_seq_q and cum_seq_k, or neither", {"cum_seq_k": torch.ones(4)}),
        ("only cum_seq_k is None; cum_seq_q and cum_seq_k, or neither", {"cum_seq_q": torch.ones(4)}),
        ("query has 4 dimensions; 3, (total, heads, head_dim), are accepted with cum_seq_q",
         dict.fromkeys(("cum_seq_q", "cum_seq_k"), torch.ones(4, dtype=torch.int32))),
        ("window_size's left limit is -2", {"window_size_left": -2}),
        ("scale is", {"scale": -1.0}),
    ],
)  # fmt: skip
def test_refusals_of_the_flash_operator(device, sentence, options):
    arguments = {
        "cum_seq_q": None, "cum_seq_k": None, "max_q": 97, "max_k": 97,
        "dropout_p": 0.0, "is_causal": False, "return_debug_mask": False,
    }  # fmt: skip
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    inputs = [x.transpose(1, 2) for x in make_inputs(SHAPE, DTYPE, device)]
    with pytest.raises((ValueError, NotImplementedError)) as raised:
        aten._flash_attention_forward(*inputs, **arguments | options)
    assert str(raised.value).startswith(f"flash_cute.sdpa: {sentence}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("sentence", "change"),
    [
        ("query must have dtype torch.float16, ", lambda q, k, v: (q.double(), k.double(), v.double())),
        ("value has shape (2, 4, 90, 64) and key (2, 4, 97, 64)", lambda q, k, v: (q, k, v[:, :, :90])),
    ],
)
def test_refusals_of_the_sdpa_operator(device, sentence, change):
    with pytest.raises(ValueError, match="^" + re.escape(f"flash_cute.sdpa: {sentence}")):
        aten._scaled_dot_product_flash_attention(*change(*make_inputs(SHAPE, DTYPE, device)))


def test_deterministic_algorithms(device):
    inputs = leaves(make_inputs(SHAPES["more_queries"], DTYPE, device))
    out = aten._scaled_dot_product_flash_attention(*inputs)[0]
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (torch.autograd.grad(out.sum(), inputs, retain_graph=True) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_partial_results_of_a_ring(device):
    """context_parallel gives the backward an out and LSE of all keys and only some of the keys."""
    q, k, v = make_inputs(SHAPE, DTYPE, device)
    dout, _ = make_gradients(q)
    out, lse, *rest = aten._scaled_dot_product_flash_attention(q, k, v)
    parts = []
    for keys in (slice(0, 40), slice(40, None)):
        arguments = dout, q, k[:, :, keys], v[:, :, keys], out, lse, *rest[:4], 0.0, False, *rest[4:6]
        parts.append(aten._scaled_dot_product_flash_attention_backward(*arguments))
    dq = parts[0][0].float() + parts[1][0].float()
    dk, dv = (torch.cat([part[i] for part in parts], 2) for i in (1, 2))
    gradients = [torch.empty_like(x).copy_(dx) for x, dx in ((q, dq), (k, dk), (v, dv))]
    assert_gradients(gradients, q, k, v, dout, None)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_operator(device, dynamic):
    @torch.compile(
        fullgraph=True, dynamic=dynamic, backend="inductor" if device.type == "cuda" else "aot_eager"
    )
    def compiled(q, k, v):
        return aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)[0]

    inputs = leaves(make_inputs(SHAPE, DTYPE, device))
    out = compiled(*inputs)
    assert_out(out.detach(), detached(*inputs), CAUSAL)
    assert_differentiated(out, inputs, CAUSAL)


# Dropout


def seed_of(state: torch.Tensor) -> torch.Tensor:
    """flash_cute's dropout_seed, as PyTorch keeps it."""
    assert (state.dtype, state.shape) == (torch.uint64, (2,))
    return state.view(torch.int64)


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_dropout_of_the_sdpa_operator(device, mask):
    inputs = leaves(make_inputs(SHAPE, DTYPE, device))
    options = {"dropout_p": 0.3, "is_causal": mask == "causal"}
    out, lse, *rest = aten._scaled_dot_product_flash_attention(*inputs, **options)
    changed = Changed(**MASKS[mask].options, changes={"dropout_p": 0.3, "dropout_seed": seed_of(rest[4])})
    assert_attention((out.detach(), lse), *detached(*inputs), changed)
    assert_differentiated(out, inputs, changed)
    torch.manual_seed(1)
    first = aten._scaled_dot_product_flash_attention(*inputs, **options)
    torch.manual_seed(1)
    again, other = (aten._scaled_dot_product_flash_attention(*inputs, **options) for _ in range(2))
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])


def test_dropout_of_the_flash_operator(device):
    mask = MASKS["window_left"]
    inputs = leaves(x.transpose(1, 2) for x in make_inputs(SHAPES["more_keys"], DTYPE, device))
    left, right = window_arguments(mask)
    options = {"window_size_left": left, "window_size_right": right}
    out, lse, seed, *_ = aten._flash_attention_forward(
        *inputs, None, None, 37, 71, 0.5, False, False, **options
    )
    changed = Changed(**mask.options, changes={"dropout_p": 0.5, "dropout_seed": seed_of(seed)})
    results, tensors = (heads_first(out)[0], lse), heads_first(*inputs)
    assert_attention(results, *tensors, changed)
    dout, _ = make_gradients(tensors[0])
    gradients = torch.autograd.grad(out, inputs, dout.transpose(1, 2))
    assert_gradients(heads_first(*gradients), *tensors, dout, None, changed)


def test_dropout_of_packed_sequences(device):
    """The first sequence drops the pairs that it drops alone; the backward is told of the seed."""
    batch = make_ragged(BATCHES["unequal"], (4, 2), 64, DTYPE, device, packed=True, margins=(0, 0))
    inputs = leaves((batch.q, batch.k, batch.v))
    out, _, seed, *_ = aten._flash_attention_forward(*inputs, *batch.lengths.values(), 0, 0, 0.5, True, False)
    options = {"causal": True, "dropout_p": 0.5, "dropout_seed": seed_of(seed)}
    again = leaves((batch.q, batch.k, batch.v))
    expected = flash_cute.attention_varlen(*again, **batch.lengths, **options)
    assert torch.equal(out, expected)
    dout = torch.randn_like(out)
    gradients = (torch.autograd.grad(*x, dout) for x in ((out, inputs), (expected, again)))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-2)
    _, rows, keys = batch.places[0]
    alone = (x[part].transpose(0, 1).unsqueeze(0) for x, part in zip(again, (rows, keys, keys), strict=True))
    found = flash_cute.attention(*alone, **options)[0].transpose(0, 1)
    torch.testing.assert_close(found, out[rows], rtol=0, atol=1e-2)


def test_dropout_in_a_compiled_operator(device):
    @torch.compile(fullgraph=True, backend="inductor" if device.type == "cuda" else "aot_eager")
    def compiled(q, k, v):
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.5, is_causal=True)[0]

    inputs = leaves(make_inputs(SHAPE, DTYPE, device))
    compiled(*inputs)
    changes = {"dropout_p": 0.5, "dropout_seed": next_seed(inputs[0])}
    out = compiled(*inputs)
    changed = Changed(causal=True, changes=changes)
    assert_out(out.detach(), detached(*inputs), changed)
    assert_differentiated(out, inputs, changed)


# varlen_attn


@pytest.mark.parametrize("window_size", [(-1, -1), (-1, 0), (40, 0), (17, 9)])
def test_varlen_attn(device, window_size):
    limits = tuple(None if limit == -1 else limit for limit in window_size)
    mask = Mask(window=limits)
    batch = make_ragged(BATCHES["unequal"], (4, 2), 64, DTYPE, device, packed=True)
    inputs = leaves((batch.q, batch.k, batch.v))
    arguments = *inputs, *batch.lengths.values(), 40, 100
    options = {"window_size": window_size, "scale": 0.2}
    if "enable_gqa" in signature(varlen_attn).parameters:  # from torch 2.14 on
        options["enable_gqa"] = True
    out, lse = varlen_attn(*arguments, return_aux=AuxRequest(lse=True), **options)
    assert_ragged((out.detach(), lse.detach()), batch, mask, 0.2)
    assert torch.equal(varlen_attn(*arguments, **options), out)
    dout, _ = make_ragged_gradients(batch)
    gradients = torch.autograd.grad(out, inputs, dout)
    assert_ragged_gradients(gradients, batch, dout, torch.zeros_like(lse), mask, 0.2)


@pytest.mark.skipif("block_table" not in signature(varlen_attn).parameters, reason="torch 2.11 has no pages")
@pytest.mark.parametrize("window_size", [(-1, -1), (-1, 0), (40, 0)])
@pytest.mark.parametrize("num_splits", [None, 0, 1])
def test_varlen_attn_in_pages(device, num_splits, window_size):
    from torch.nn.attention.varlen import varlen_attn_out

    mask = Mask(window=tuple(None if limit == -1 else limit for limit in window_size))
    batch = make_ragged(BATCHES["unequal"], (4, 2), 64, DTYPE, device, packed=True)
    *pages, lengths = in_pages(batch, 16, "heads first")
    inputs = batch.q, *heads_first(*pages), lengths["cu_seqlens_q"], None, 40, 100
    options = {"window_size": window_size, "scale": 0.2, "num_splits": num_splits, "enable_gqa": True}
    options |= {name: lengths[name] for name in ("seqused_k", "block_table")}
    compiled = torch.compile(varlen_attn, fullgraph=True, backend="aot_eager")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out, lse = varlen_attn(*inputs, return_aux=AuxRequest(lse=True), **options)
        assert_ragged((out, lse), batch, mask, 0.2)
        into = torch.full_like(out, torch.nan)
        assert varlen_attn_out(into, *inputs, **options) is into
        assert torch.equal(into, out)
        assert torch.equal(compiled(*inputs, **options), out)


# PyTorch's functions on a GPU


def kernels_of(function) -> list[str]:
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        function()
        torch.cuda.synchronize()
    return [event.name for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def is_ours(names: list[str]) -> bool:
    return any("flash_cute" in name for name in names)


def is_pytorchs(names: list[str]) -> bool:
    return any(other in name for name in names for other in ("pytorch_flash", "fmha", "cudnn", "softmax"))


SDPA_OPTIONS = {
    "plain": ({}, FULL),
    "is_causal": ({"is_causal": True}, CAUSAL),
    "scale": ({"scale": 0.2}, FULL),
    "enable_gqa": ({"enable_gqa": True}, FULL),
    "no mask, no dropout": ({"attn_mask": None, "dropout_p": 0.0}, FULL),
}


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 60])
@pytest.mark.parametrize("name", SDPA_OPTIONS)
def test_sdpa(device, name, head_dim):
    """The profiler sees our kernels, and no other attention."""
    options, mask = SDPA_OPTIONS[name]
    heads = 2 if "enable_gqa" in options else 4
    inputs = leaves(make_inputs(Shape(2, 4, heads, 197, 197, head_dim), DTYPE, device))
    results = []

    def step():
        out = scaled_dot_product_attention(*inputs, **options)
        dout, _ = make_gradients(inputs[0].detach(), seed=1)
        results.extend([out, dout, torch.autograd.grad(out, inputs, dout)])

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        names = kernels_of(step)
    assert is_ours([name for name in names if "forward" in name])
    assert is_ours([name for name in names if "backward" in name])
    assert not is_pytorchs(names)
    out, dout, gradients = results
    scale = options.get("scale")
    assert_out(out.detach(), detached(*inputs), mask, scale)
    laid_out = [torch.empty_like(x).copy_(dx) for x, dx in zip(inputs, gradients, strict=True)]
    assert_gradients(detached(*laid_out), *detached(*inputs), dout, None, mask, scale)


@pytest.mark.gpu
def test_sdpa_on_hopper_without_a_choice(device):
    """With cuDNN switched off, PyTorch's next choice is ours; restored, its own kernel runs."""
    q, k, v = make_inputs(SHAPE, DTYPE, device)
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert is_ours(kernels_of(lambda: scaled_dot_product_attention(q, k, v)))
        attention.restore_flash_attention_impl()
        names = kernels_of(lambda: scaled_dot_product_attention(q, k, v))
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)
    assert is_pytorchs(names)
    assert not is_ours(names)


@pytest.mark.gpu
def test_what_pytorch_does_not_give_to_flash_attention(device):
    q, k, v = make_inputs(SHAPES["more_keys"], DTYPE, device)
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=device)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for refused in ({"is_causal": True}, {"attn_mask": mask}):
            with pytest.raises(RuntimeError, match="No available kernel"):
                scaled_dot_product_attention(q, k, v, **refused)
        with pytest.raises(RuntimeError, match="No available kernel"):
            scaled_dot_product_attention(q.float(), k.float(), v.float())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["more_keys", "more_queries"])
def test_causal_lower_right(device, name):
    q, k, v = make_inputs(SHAPES[name], DTYPE, device)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(q.shape[2], k.shape[2]))
    assert_out(out, (q, k, v), CAUSAL)


@pytest.mark.gpu
def test_sdpa_under_autocast_and_vmap(device):
    inputs = [torch.stack([x, x.flip(0)]) for x in make_inputs(SHAPE, DTYPE, device)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        with torch.autocast("cuda", DTYPE):
            out = scaled_dot_product_attention(*(x[0].float() for x in inputs))
        mapped = torch.vmap(scaled_dot_product_attention)(*inputs)
    assert out.dtype == DTYPE
    assert_out(out, [x[0] for x in inputs])
    for entry in range(2):
        assert_out(mapped[entry], [x[entry] for x in inputs])


@pytest.mark.gpu
def test_sdpa_in_a_cuda_graph_and_without_waiting(device):
    inputs = leaves(make_inputs(SHAPE, DTYPE, device))
    packed = make_ragged(BATCHES["unequal"], (4, 2), 64, DTYPE, device, packed=True)

    def step():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = scaled_dot_product_attention(*inputs, is_causal=True)
        varlen_attn(packed.q, packed.k, packed.v, *packed.lengths.values(), 40, 100)
        return out, torch.autograd.grad(out.float().sum(), inputs)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, gradients = step()
    with torch.no_grad():
        for x in inputs:
            x.copy_(torch.randn_like(x))
    graph.replay()
    assert_out(out.detach(), detached(*inputs), CAUSAL)
    ones = torch.ones_like(out).detach()
    assert_gradients(gradients, *detached(*inputs), ones, None, CAUSAL)


SEQUENCE = 150
HIDDEN = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
PADDING = torch.arange(SEQUENCE).expand(2, SEQUENCE) > 100
# Arguments of MultiheadAttention's forward, and whether PyTorch gives them to FlashAttention in training and
# in evaluation, whose fast path passes a mask on. Weights are of no backend.
MULTIHEAD = {
    "plain": ({"need_weights": False}, (True, True)),
    "is_causal": ({"need_weights": False, "is_causal": True, "attn_mask": HIDDEN}, (True, False)),
    "attn_mask": ({"need_weights": False, "attn_mask": HIDDEN}, (False, False)),
    "key_padding_mask": ({"need_weights": False, "key_padding_mask": PADDING}, (False, False)),
    "need_weights": ({"need_weights": True, "average_attn_weights": False}, (None, None)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("arguments", MULTIHEAD)
@pytest.mark.parametrize("training", [True, False])
def test_multihead_attention(device, training, arguments):
    arguments, (in_training, in_evaluation) = MULTIHEAD[arguments]
    is_for_flash = in_training if training else in_evaluation
    arguments = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    module = torch.nn.MultiheadAttention(256, 4, batch_first=True, device=device, dtype=DTYPE).train(training)
    exact = torch.nn.MultiheadAttention(256, 4, batch_first=True, device=device, dtype=torch.float64)
    exact.load_state_dict(module.state_dict())
    x = torch.randn(2, SEQUENCE, 256, device=device, dtype=DTYPE)
    results = []
    with torch.set_grad_enabled(training):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            if is_for_flash is False:
                with pytest.raises(RuntimeError, match="No available kernel"):
                    module(x, x, x, **arguments)
                return
            names = kernels_of(lambda: results.append(module(x, x, x, **arguments)[0]))
        with sdpa_kernel(SDPBackend.MATH):
            yardstick = module(x, x, x, **arguments)[0]
            oracle = exact(*(x.double() for _ in range(3)), **arguments)[0]
    assert is_ours(names) == bool(is_for_flash)
    assert_within_rule("out", *detached(results[0], yardstick, oracle))


@pytest.mark.gpu
def test_dropout_of_multihead_attention(device):
    module = torch.nn.MultiheadAttention(256, 4, 0.1, batch_first=True, device=device, dtype=DTYPE)
    x = torch.randn(2, SEQUENCE, 256, device=device, dtype=DTYPE)
    results = []
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            results.append(module(x, x, x, need_weights=False)[0])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors(device, layout, is_causal):
    lengths = 30, 1, 129
    parts = [[torch.randn(length, 4, 64, device=device, dtype=DTYPE) for length in lengths] for _ in "qkv"]
    nested = [torch.nested.nested_tensor(part, layout=layout).transpose(1, 2) for part in parts]
    results = []
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        names = kernels_of(lambda: results.append(scaled_dot_product_attention(*nested, is_causal=is_causal)))
    assert is_ours(names)
    for out, *sequence in zip(results[0].unbind(), *parts, strict=True):
        sequence = [x.transpose(0, 1).unsqueeze(0) for x in sequence]
        assert_out(out.unsqueeze(0), sequence, CAUSAL if is_causal else FULL)


@pytest.mark.gpu
def test_compiled_sdpa(device):
    @torch.compile(fullgraph=True)
    def compiled(q, k, v):
        return scaled_dot_product_attention(q * 1, k, v, is_causal=True) * 1

    inputs = leaves(make_inputs(SHAPE, DTYPE, device, "transposed"))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        names = kernels_of(lambda: compiled(*inputs))
        out = compiled(*inputs)
    assert is_ours(names)
    assert_out(out.detach(), detached(*inputs), CAUSAL)
    assert_differentiated(out, inputs, CAUSAL)
