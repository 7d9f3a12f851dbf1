"""Gradients against float64 over the table of cases, and what they promise beside their values."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.cases import (
    BATCHES,
    BUCKETS,
    DTYPES,
    EMPTY,
    FULL_AND_CAUSAL,
    MASKS,
    PACKED,
    SHAPES,
    TWO_WIDTHS,
    Mask,
    Sequence,
    Shape,
    make_gradients,
    make_inputs,
    make_ragged,
    make_ragged_gradients,
    matrix,
    with_head_dim,
)
from support.lengths import WILD_LENGTHS, WILD_OFFSETS, clamped, int32
from support.table import check_gradients
from support.tolerance import (
    assert_gradients,
    assert_gradients_of_rounded_out,
    assert_ragged,
    assert_ragged_gradients,
    assert_within_rule,
)

import flash_cute
from flash_cute import reference

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
masks = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
full_and_causal = pytest.mark.parametrize("mask", FULL_AND_CAUSAL.values(), ids=FULL_AND_CAUSAL)
both = pytest.mark.parametrize("packed", PACKED.values(), ids=PACKED)
# The CPU has but one way.
repeats = pytest.mark.parametrize(
    "deterministic",
    [False, pytest.param(True, marks=pytest.mark.gpu)],
    ids=["free", "deterministic"],
)
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def check(kernel, shape, dtype, mask, layout="mixed", softmax_scale=None, **options):
    q, k, v = make_inputs(shape, dtype, kernel.device, layout)
    gradients = make_gradients(q)
    results = kernel.backward(q, k, v, *gradients, softmax_scale=softmax_scale, **mask.options, **options)
    assert_gradients(results, q, k, v, *gradients, mask, softmax_scale)


def test_table(kernel, gradient_case):
    check_gradients(kernel, gradient_case)


@pytest.mark.gpu  # where shapes fill tiles and grids
@dtypes
@masks
@shapes
def test_shapes_and_masks(kernel, shape, mask, dtype):
    check(kernel, shape, dtype, mask)


@pytest.mark.gpu  # where head dims choose kernels
@dtypes
@repeats
@full_and_causal
@pytest.mark.parametrize("head_dim", BUCKETS)
@shapes
def test_shapes_in_every_bucket(kernel, shape, head_dim, mask, deterministic, dtype):
    check(kernel, with_head_dim(shape, head_dim), dtype, mask, deterministic=deterministic)


@pytest.mark.gpu  # where halves of a thread block split the work
@masks
@pytest.mark.parametrize("head_dim", [192, 256])
@pytest.mark.parametrize(
    "shape", ["no_tile_divides", "more_keys", "more_queries", "grouped_heads", "one_kv_head"]
)
def test_masks_of_large_head_dims(kernel, shape, head_dim, mask):
    check(kernel, with_head_dim(SHAPES[shape], head_dim), torch.bfloat16, mask)


@pytest.mark.gpu  # where heads come one by one, and their LSE and delta are found beside products
@repeats
@pytest.mark.parametrize("window", [(700, 0), (600, 100), (0, 650)], ids=str)
@pytest.mark.parametrize("head_dim", BUCKETS)
@pytest.mark.parametrize("heads", [(3, 3), (4, 2)], ids=str)
def test_wide_windows(kernel, heads, head_dim, window, deterministic):
    shape = Shape(2, *heads, 1700, 1900, head_dim)
    check(kernel, shape, torch.bfloat16, Mask(window=window), deterministic=deterministic)


@pytest.mark.gpu
@full_and_causal
@pytest.mark.parametrize("head_dim", [192, 256])
def test_several_heads_in_a_tile(kernel, head_dim, mask):
    """More tiles than multiprocessors, so that groups stay whole."""
    check(kernel, Shape(3, 110, 55, 130, 70, head_dim), torch.bfloat16, mask)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [192, 256])
@pytest.mark.parametrize("heads", [(4, 4), (8, 4)], ids=str)
def test_dk_and_dv_repeat(kernel, heads, head_dim):
    """Each has one order of its sums, whatever that of dQ is, or is the sum of two parts of a group."""
    if kernel.family != "sm80":
        pytest.skip("of the Ampere family's halves of a thread block")
    shape = Shape(2, *heads, 333, 444, head_dim)
    q, k, v = make_inputs(shape, torch.bfloat16, kernel.device)
    gradients = make_gradients(q)
    _, *expected = kernel.backward(q, k, v, *gradients, causal=True)
    for _ in range(100):
        _, *found = kernel.backward(q, k, v, *gradients, causal=True)
        assert all(map(torch.equal, found, expected))


@pytest.mark.gpu  # where two thread blocks share a tile of 128 keys
@repeats
@full_and_causal
@pytest.mark.parametrize("head_dim", [192, 256])
@pytest.mark.parametrize("heads", [(3, 3), (300, 300), (6, 2)], ids=str)
@pytest.mark.parametrize(
    "seqlens", [(1, 1), (1, 1000), (64, 64), (64, 65), (30, 200), (65, 128), (300, 449), (449, 300)], ids=str
)
def test_tiles_of_two_blocks(kernel, seqlens, heads, head_dim, mask, deterministic):
    """One step a tile and more, the second block without keys, more tiles than clusters."""
    check(kernel, Shape(2, *heads, *seqlens, head_dim), torch.bfloat16, mask, deterministic=deterministic)


@matrix(head_dim=[64, 128], softmax_scale=[1e-35, 1.0, 2.0], mask=FULL_AND_CAUSAL, dtype=DTYPES)
def test_softmax_scale(kernel, head_dim, softmax_scale, mask, dtype):
    check(kernel, Shape(2, 4, 4, 75, 101, head_dim), dtype, mask, softmax_scale=softmax_scale)


@dtypes
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("queries", [1, 33])
@pytest.mark.parametrize("keys", [1, 2, 3, 4])
def test_rows_of_few_keys(kernel, keys, queries, head_dim, dtype):
    """Where PyTorch's path happens to be exact, and out, of which delta is made, is rounded."""
    q, k, v = make_inputs(Shape(8, 4, 2, queries, keys, head_dim), dtype, kernel.device)
    dout, _ = make_gradients(q)
    scale = 1.0 if keys > 1 else head_dim**-0.5
    out, _ = kernel.forward(q, k, v, softmax_scale=scale)
    gradients = kernel.backward(q, k, v, dout, None, softmax_scale=scale)
    assert_gradients_of_rounded_out(gradients, q, k, v, dout, out, scale)


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("head_dim", [192, 256])
@pytest.mark.parametrize("seqlen_k", [300, 40000])
def test_weights_that_pass_between_warpgroups(kernel, seqlen_k, head_dim, dtype):
    """In 16 or 24 bits, on Hopper, which must not show: neither where weights are many and small nor else.

    Rounded once more as dS is, they would make the errors of dq and dk 1.2 times as large in float16. (Where
    few weights are large, few roundings decide, and these differ by chance.)
    """
    q, k, v = make_inputs(Shape(1, 1, 1, 128, seqlen_k, head_dim), dtype, kernel.device)
    dout, _ = make_gradients(q)
    dq, dk, _ = kernel.backward(q, k, v, dout, None)
    of_q, of_k, _ = reference.backward(q, k, v, dout, None)

    # As with float32 weights.
    scale = head_dim**-0.5
    q32, k32, v32, dout32, out32 = (x[0, 0].float() for x in (q, k, v, dout, kernel.forward(q, k, v)[0]))
    weights = (q32 @ k32.T * scale).softmax(-1)
    ds = (weights * (dout32 @ v32.T - (dout32 * out32).sum(-1, keepdim=True))).to(dtype).float()
    for ours, exact, expected in ((dq, of_q, ds @ k32 * scale), (dk, of_k, ds.T @ q32 * scale)):
        error, allowed = ((x.double() - exact[0, 0]).norm() for x in (ours[0, 0], expected.to(dtype)))
        assert error < 1.03 * allowed


@pytest.mark.gpu
@dtypes
@full_and_causal
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("factor", [1, 30], ids=["", "large scores"])
def test_many_queries(kernel, factor, head_dim, mask, dtype):
    """So many that at head dim 64 they add what they have of their own by a product, on Hopper."""
    q, k, v = make_inputs(Shape(1, 4, 2, 2049, 2100, head_dim), dtype, kernel.device)
    gradients = make_gradients(q)
    results = kernel.backward(q * factor, k, v, *gradients, **mask.options)
    assert_gradients(results, q * factor, k, v, *gradients, mask)


# On Hopper more tiles than thread blocks, which claim one after the other.
CROWDS = {
    "short": Shape(40, 32, 16, 130, 200, 64),
    "of a group": Shape(30, 32, 8, 300, 300, 64),
    "blind queries": Shape(60, 16, 16, 200, 130, 64),
    "few keys": Shape(24, 16, 16, 1500, 77, 64),
    "many keys": Shape(6, 8, 8, 100, 3000, 64),
    "of parts of groups": Shape(2, 24, 2, 1100, 1300, 64),
    "some known before": Shape(5, 8, 8, 1100, 1100, 64),
    "some known before, blind queries": Shape(3, 40, 40, 700, 577, 64),
}


@pytest.mark.gpu
@repeats
@pytest.mark.parametrize("mask", [MASKS["full"], MASKS["causal"], MASKS["window_causal"]])
@pytest.mark.parametrize("head_dim", BUCKETS)
@pytest.mark.parametrize("shape", CROWDS.values(), ids=CROWDS)
def test_more_heads_than_are_under_way(kernel, shape, head_dim, mask, deterministic):
    check(kernel, with_head_dim(shape, head_dim), torch.bfloat16, mask, deterministic=deterministic)


@dtypes
@pytest.mark.gpu
@repeats
@pytest.mark.parametrize(
    ("heads", "seqlen", "head_dim"),
    [(2, 2048, 128), (2, 4000, 128), *((32, 2100, head_dim) for head_dim in BUCKETS)],
)
def test_long_sequences(kernel, heads, seqlen, head_dim, deterministic, dtype):
    shape = Shape(1, heads, 1, seqlen, seqlen, head_dim)
    check(kernel, shape, dtype, MASKS["causal"], deterministic=deterministic)


def sums_over_rows(q, k, v, dout, out, lse) -> tuple[torch.Tensor, torch.Tensor]:
    """dK and dV of keys that all heads share, in float64, of results of the forward among more keys."""
    scale = q.shape[-1] ** -0.5
    dk, dv = (torch.zeros_like(tensor, dtype=torch.float64) for tensor in (k, v))
    for head in zip(*(tensor.flatten(0, 1) for tensor in (q, dout, out, lse)), strict=True):
        queries, of_out, rows, normalizer = (tensor.double() for tensor in head)
        weights = torch.exp(scale * queries @ k.double().T - normalizer[:, None])
        dv += weights.T @ of_out
        delta = (of_out * rows).sum(-1, keepdim=True)
        dk += scale * (weights * (of_out @ v.double().T - delta)).T @ queries
    return dk, dv


@pytest.mark.gpu
@pytest.mark.big_memory(16)
def test_sums_over_very_many_rows(kernel):
    """2^22 rows see each key: what tensor cores cut off when they add (docs/numerics.md) stays below half a
    unit of float16."""
    heads, queries, keys, some = 64, 2**16, 16896, 64
    make = partial(torch.randn, dtype=torch.float16, device=kernel.device)
    q, dout = make(1, heads, queries, 64), make(1, heads, queries, 64)
    k, v = make(1, 1, keys, 64), make(1, 1, keys, 64)
    out, lse = kernel.forward(q, k, v)
    _, *found, _ = torch.ops.flash_cute._backward(dout, None, q, k, v, out, lse, family=kernel.family)
    oracles = sums_over_rows(q, k[0, 0, :some], v[0, 0, :some], dout, out, lse)
    for gradient, oracle in zip(found, oracles, strict=True):
        share = (gradient[0, 0, :some].double() * oracle).sum() / oracle.square().sum()
        assert abs(share - 1) < 2**-11


@pytest.mark.gpu
@repeats
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_window_of_more_keys_than_are_under_way(kernel, head_dim, deterministic):
    """More tiles than Hopper's multiprocessors, but few for each query."""
    shape = Shape(1, 1, 1, 17_200, 17_200, head_dim)
    check(kernel, shape, torch.bfloat16, Mask(window=(1000, 0)), deterministic=deterministic)


@both
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("asked", ["q", "k", "v", "qk", "kv"])
def test_gradients_that_are_asked_for(kernel, asked, head_dim, packed):
    """They are as if all were; nothing is computed of the others."""
    batch = make_ragged(BATCHES["unequal"], (4, 2), head_dim, torch.bfloat16, kernel.device, packed)
    tensors = dict(zip("qkv", (batch.q, batch.k, batch.v), strict=True))
    dout, dlse = make_ragged_gradients(batch)
    options = dict(batch.lengths, deterministic=True)
    expected = kernel.backward(*tensors.values(), dout, dlse, **options)
    leaves = {name: x.detach().requires_grad_(name in asked) for name, x in tensors.items()}
    function = flash_cute.forward_varlen if packed else flash_cute.forward
    results = function(*leaves.values(), family=kernel.family, **options)
    found = torch.autograd.grad(results, [leaves[name] for name in asked], (dout, dlse))
    for name, gradient in zip(asked, found, strict=True):
        assert torch.equal(gradient, expected["qkv".index(name)])


@pytest.mark.gpu
@both
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("asked", ["q", "k", "v", "qk", "kv"])
def test_some_gradients_of_many_keys(kernel, asked, head_dim, packed):
    batch = make_ragged(BATCHES["many keys"], (3, 3), head_dim, torch.bfloat16, kernel.device, packed)
    tensors = dict(zip("qkv", (batch.q, batch.k, batch.v), strict=True))
    given = make_ragged_gradients(batch)
    results = dict(zip("qkv", kernel.backward(*tensors.values(), *given, **batch.lengths), strict=True))
    leaves = {name: x.detach().requires_grad_(name in asked) for name, x in tensors.items()}
    function = flash_cute.forward_varlen if packed else flash_cute.forward
    outputs = function(*leaves.values(), family=kernel.family, **batch.lengths)
    found = torch.autograd.grad(outputs, [leaves[name] for name in asked], given)
    results |= dict(zip(asked, found, strict=True))
    assert_ragged_gradients(results.values(), batch, *given)


@pytest.mark.parametrize(("needs_dq", "needs_dkv"), [(True, False), (False, True), (False, False)])
def test_gradients_not_needed_come_back_empty(kernel, needs_dq, needs_dkv):
    q, k, v = make_inputs(SHAPES["grouped_heads"], torch.bfloat16, kernel.device)
    results = kernel.forward(q, k, v)
    options = {"needs_dq": needs_dq, "needs_dkv": needs_dkv, "family": kernel.family}
    gradients = torch.ops.flash_cute._backward(*make_gradients(q), q, k, v, *results, **options)
    asked = needs_dq, needs_dkv, needs_dkv, False  # the last of sinks
    for gradient, tensor, needed in zip(gradients, (q, k, v, q), asked, strict=True):
        assert gradient.shape == (tensor.shape if needed else (0,))


# What lies in rows that are not read


garbage = pytest.mark.parametrize("garbage", [torch.nan, torch.inf], ids=str)


@garbage
@repeats
@pytest.mark.parametrize(
    "mask", [Mask(window=(5, 5)), Mask(causal=True, window=(60, None)), MASKS["window_diagonal"]]
)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 300), (70, 333), (130, 700)])
def test_unreachable_keys_may_hold_anything(kernel, seqlen_q, seqlen_k, mask, deterministic, garbage):
    q, k, v = make_inputs(Shape(2, 4, 2, seqlen_q, seqlen_k, 64), torch.bfloat16, kernel.device)
    unreachable = ~mask.visible(seqlen_q, seqlen_k, kernel.device).any(0)
    k[:, :, unreachable] = v[:, :, unreachable] = garbage
    gradients = make_gradients(q)
    dq, dk, dv = kernel.backward(q, k, v, *gradients, deterministic=deterministic, **mask.options)
    assert (dk[:, :, unreachable] == 0).all()
    assert (dv[:, :, unreachable] == 0).all()
    assert_gradients((dq, dk, dv), q, k, v, *gradients, mask)


@repeats
@matrix(
    seqlens=[(100, 30), (300, 70), (400, 1)],
    mask={name: MASKS[name] for name in ("causal", "window_symmetric")},
    head_dim=[*BUCKETS, 100],
    garbage=[torch.nan, torch.inf],
)
def test_blind_queries_may_hold_anything(kernel, seqlens, mask, head_dim, deterministic, garbage):
    """Those that see no key, and what comes back to them."""
    seqlen_q, seqlen_k = seqlens
    batch = 2048 // head_dim if seqlen_k == 1 else 1  # few see a single key: numbers enough for the rule
    q, k, v = make_inputs(Shape(batch, 4, 2, seqlen_q, seqlen_k, head_dim), torch.bfloat16, kernel.device)
    blind = ~mask.visible(seqlen_q, seqlen_k, kernel.device).any(1)
    assert blind.any()
    dout, dlse = make_gradients(q)
    for tensor in (q, dout, dlse):
        tensor[:, :, blind] = garbage
    results = kernel.backward(q, k, v, dout, dlse, deterministic=deterministic, **mask.options)
    assert (results[0][:, :, blind] == 0).all()
    assert_gradients(results, q, k, v, dout, dlse, mask)


@repeats
@pytest.mark.parametrize("head_dim", BUCKETS)
@pytest.mark.parametrize("name", ["k", "v"])
def test_blind_queries_beside_keys_that_are_not_finite(kernel, name, head_dim, deterministic):
    """Such a key has a weight of 0 for them, and 0 x NaN must not come of it."""
    inputs = make_inputs(Shape(1, 4, 2, 100, 60, head_dim), torch.bfloat16, kernel.device)
    dict(zip("qkv", inputs, strict=True))[name][:, :, 5, 0] = torch.nan
    gradients = kernel.backward(*inputs, *make_gradients(inputs[0]), causal=True, deterministic=deterministic)
    assert (gradients[0][:, :, :40] == 0).all()
    assert gradients[0][:, :, 45:].isnan().all()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_heads_and_batches_are_apart(kernel, head_dim):
    """NaN in one head of K and V, or of dout, reaches the gradients of its group and no other."""
    q, k, v = make_inputs(Shape(3, 4, 2, 130, 150, head_dim), torch.bfloat16, kernel.device)
    dout, dlse = make_gradients(q)
    clean = kernel.backward(q, k, v, dout, dlse, deterministic=True)
    dout[1, 3] = torch.nan
    v[2, 0] = torch.nan
    dirty = kernel.backward(q, k, v, dout, dlse, deterministic=True)
    for ours, expected, heads in zip(dirty, clean, (([3], [0, 1]), ([1], [0]), ([1], [0])), strict=True):
        touched = torch.zeros(ours.shape[:2], dtype=torch.bool, device=kernel.device)
        touched[1, heads[0]] = touched[2, heads[1]] = True
        assert torch.equal(ours[~touched], expected[~touched])
    assert dirty[0][1, 3].isnan().all()
    assert dirty[2][1, 1].isnan().all()
    assert dirty[0][2, :2].isnan().all()


@dtypes
@pytest.mark.parametrize("mask", [MASKS["full"], MASKS["window_causal"]])
@pytest.mark.parametrize("infinity", [torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_queries_of_infinite_scores(kernel, head_dim, infinity, mask, dtype):
    """NaN in their own gradients, as from PyTorch, and in those of the keys that they see."""
    q, k, v = make_inputs(Shape(1, 4, 2, 70, 200, head_dim), dtype, kernel.device)
    k.abs_().clamp_(min=1e-3)
    q[:, :2, 60:] = infinity  # the first group; of its queries those before them see other keys, too
    gradients = make_gradients(q)
    results = kernel.backward(q, k, v, *gradients, **mask.options)
    oracle = reference.backward(q, k, v, *gradients, **mask.options)
    yardstick = reference.backward(q, k, v, *gradients, dtype=dtype, **mask.options)
    assert results[0][:, :2, 60:].isnan().all()
    seen = mask.visible(70, 200, kernel.device)[60:].any(0)
    for gradient in results[1:]:
        assert gradient[:, 0, seen].isnan().all()
    assert_within_rule("dq", *(dq[0][:, :2, :60] for dq in (results, yardstick, oracle)))
    for name, *parts in zip(("dq", "dk", "dv"), results, yardstick, oracle, strict=True):
        assert_within_rule(name, *(x[:, x.shape[1] // 2 :] for x in parts))


# Empty inputs, repeatability, and inputs that stay as they are


@dtypes
@repeats
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("mask", [MASKS["full"], MASKS["causal"], MASKS["window_symmetric"]])
@pytest.mark.parametrize("shape", EMPTY.values(), ids=EMPTY)
def test_empty_inputs(kernel, shape, mask, layout, deterministic, dtype):
    inputs = make_inputs(shape, dtype, kernel.device, layout)
    gradients = kernel.backward(
        *inputs, *make_gradients(inputs[0]), deterministic=deterministic, **mask.options
    )
    for gradient, tensor in zip(gradients, inputs, strict=True):
        assert (gradient.shape, gradient.dtype) == (tensor.shape, dtype)
        assert (gradient == 0).all()


@matrix(
    mask={name: MASKS[name] for name in ("full", "causal", "window_left")},
    head_dim=BUCKETS,
    heads=[(4, 4), (8, 2), (8, 1)],
    dtype=DTYPES,
)
def test_deterministic_gradients_repeat(kernel, mask, head_dim, heads, dtype):
    shape = Shape(2, *heads, 333, 444, head_dim) if kernel.family else Shape(1, *heads, 70, 80, head_dim)
    inputs = make_inputs(shape, dtype, kernel.device)
    gradients = make_gradients(inputs[0])
    first = kernel.backward(*inputs, *gradients, deterministic=True, **mask.options)
    for _ in range(200 if kernel.family else 1):
        results = kernel.backward(*inputs, *gradients, deterministic=True, **mask.options)
        assert all(torch.equal(*pair) for pair in zip(results, first, strict=True))


@both
@pytest.mark.parametrize("name", ["unequal", "used and left padding"])
@pytest.mark.parametrize("head_dim", [64, 100])
def test_deterministic_gradients_of_unequal_lengths_repeat(kernel, head_dim, name, packed):
    batch = make_ragged(BATCHES[name], (8, 2), head_dim, torch.bfloat16, kernel.device, packed)
    tensors = batch.q, batch.k, batch.v, *make_ragged_gradients(batch)
    options = dict(batch.lengths, deterministic=True, causal=True)
    first = kernel.backward(*tensors, **options)
    for _ in range(200 if kernel.family else 1):
        results = kernel.backward(*tensors, **options)
        assert all(torch.equal(*pair) for pair in zip(results, first, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", BUCKETS)
def test_deterministic_gradients_of_many_parts_of_a_group_repeat(kernel, head_dim):
    """Each part has sums of its own, or they add to one in turns."""
    inputs = make_inputs(Shape(1, 32, 1, 4096, 4096, head_dim), torch.bfloat16, kernel.device)
    gradients = make_gradients(inputs[0])
    first = kernel.backward(*inputs, *gradients, deterministic=True)
    for _ in range(20):
        results = kernel.backward(*inputs, *gradients, deterministic=True)
        assert all(torch.equal(*pair) for pair in zip(results, first, strict=True))


@pytest.mark.parametrize("layout", ["mixed", "rows_not_16_bytes", "columns_of_rows"])
def test_inputs_are_left_alone(kernel, layout):
    inputs = make_inputs(SHAPES["grouped_heads"], torch.bfloat16, kernel.device, layout)
    gradients = make_gradients(inputs[0])
    before = [tensor.clone() for tensor in (*inputs, *gradients)]
    kernel.backward(*inputs, *gradients, causal=True)
    assert all(torch.equal(*pair) for pair in zip((*inputs, *gradients), before, strict=True))


# Unequal lengths


def check_ragged(kernel, sequences, packed, mask, dtype=torch.bfloat16, heads=(4, 2), head_dim=64, **options):
    deterministic = options.pop("deterministic", False)
    batch = make_ragged(sequences, heads, head_dim, dtype, kernel.device, packed, **options)
    gradients = make_ragged_gradients(batch, options.get("seed"))
    results = kernel.backward(
        *(batch.q, batch.k, batch.v, *gradients),
        **batch.lengths,
        **mask.options,
        deterministic=deterministic,
    )
    assert_ragged_gradients(results, batch, *gradients, mask)


@pytest.mark.gpu
@full_and_causal
@repeats
@both
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("head_dim", BUCKETS)
def test_sequences_with_equally_many_blocks(kernel, head_dim, heads, packed, mask, deterministic):
    """Their lengths differ, and there are more than are under way at one time."""
    options = {"heads": heads, "head_dim": head_dim, "deterministic": deterministic}
    sequences = tuple(Sequence(130, 189, 100 + i % 20, 129 + i % 60, 0) for i in range(120))
    check_ragged(kernel, sequences, packed, mask, **options)


@pytest.mark.gpu
@both
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("given", ["dout", "dlse", "both"])
def test_long_sequences_of_unequal_lengths(kernel, given, head_dim, heads, packed):
    """So long in the mean that Hopper's kernel finds LSE and delta itself, at head dim 64 of half a block of
    queries at a time."""
    sequences = ((2500, 2500), (64, 64), (65, 100), (1900, 2000), (1, 1), (2049, 2049), (1200, 1300))
    batch = make_ragged(
        tuple(Sequence(*x) for x in sequences), heads, head_dim, torch.bfloat16, kernel.device, packed
    )
    dout, dlse = make_ragged_gradients(batch)
    absent = {"dout": dlse, "dlse": dout}.get(given)
    if absent is not None:
        absent.zero_()
    gradients = (None if x is absent else x for x in (dout, dlse))
    results = kernel.backward(batch.q, batch.k, batch.v, *gradients, **batch.lengths)
    assert_ragged_gradients(results, batch, dout, dlse)


@pytest.mark.gpu
@pytest.mark.parametrize("margins", [(0, 0), (700, 5)], ids=str)
@pytest.mark.parametrize("lengths", ["even", "long first", "short first", "odd"])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
def test_packed_sequences_of_which_few_are_long(kernel, head_dim, lengths, margins):
    """With keys enough to find LSE and delta beside products, and more tiles than are under way."""
    queries = {
        "even": [640] * 7,
        "long first": [6000, *[150] * 6],
        "short first": [1, 0, 64, 65, 1, *[800] * 4],
        "odd": [577, 639, 641, 100, 700, 63],
    }[lengths]
    sequences = tuple(Sequence(n, 600 + n % 7) for n in queries)
    check_ragged(kernel, sequences, True, MASKS["full"], heads=(40, 40), head_dim=head_dim, margins=margins)


@pytest.mark.gpu  # as test_wide_windows
@repeats
@both
@pytest.mark.parametrize("head_dim", BUCKETS)
@pytest.mark.parametrize("heads", [(3, 3), (4, 2)], ids=str)
def test_wide_windows_of_unequal_lengths(kernel, heads, head_dim, packed, deterministic):
    options = {"heads": heads, "head_dim": head_dim, "deterministic": deterministic}
    check_ragged(kernel, BATCHES["many keys"], packed, Mask(window=(600, 100)), **options)


@pytest.mark.gpu  # where LSE and delta are found beside products
@dtypes
@both
@pytest.mark.parametrize("head_dim", [*BUCKETS, 8, 40, 100, 33])
def test_many_keys_and_head_dims(kernel, head_dim, packed, dtype):
    options = {"heads": (3, 3), "head_dim": head_dim}
    check_ragged(kernel, BATCHES["many keys"], packed, MASKS["causal"], dtype, **options)


@repeats
@matrix(
    sizes=[(1, 2, True, 64), (7, 2, True, 64), (21, 4, False, 64), (21, 4, False, 128)],
    offsets=WILD_OFFSETS,
    sides=["qk", "q", "k"],
)
def test_wild_offsets_stay_inside(kernel, sizes, offsets, sides, deterministic):
    """What comes of them has no meaning, but the next call is as good as the one before."""
    hundreds, heads_kv, causal, head_dim = sizes
    hundreds = hundreds if kernel.family else min(hundreds, 7)
    rows = 100 * hundreds
    q, k, v = (
        x[0].transpose(0, 1)
        for x in make_inputs(Shape(1, 4, heads_kv, rows, rows, head_dim), torch.bfloat16, kernel.device)
    )
    dout, dlse = torch.randn_like(q), torch.randn(4, rows, device=kernel.device)
    wild_ones = [x * hundreds if abs(x) < 1 << 20 else x for x in offsets]
    good = {f"cu_seqlens_{side}": int32([0, 30, 30, rows], kernel.device) for side in "qk"}
    wild = good | {f"cu_seqlens_{side}": int32(wild_ones, kernel.device) for side in sides}
    options = {"causal": causal, "deterministic": True}
    expected = kernel.backward(q, k, v, dout, dlse, **good, **options)
    kernel.backward(q, k, v, dout, dlse, **wild, causal=causal, deterministic=deterministic)
    for result, same in zip(kernel.backward(q, k, v, dout, dlse, **good, **options), expected, strict=True):
        assert torch.equal(result, same)


@pytest.mark.gpu
@repeats
def test_queries_without_keys_of_wild_offsets(kernel, deterministic):
    """Nothing is added to their gradients, though rows are made of them on Hopper: not of the NaN that memory
    held before. Ten times, as it would be a race. The third sequence may have any: its offsets decrease."""
    total = 3072
    q, k, v = (
        x[0].transpose(0, 1)
        for x in make_inputs(Shape(1, 4, 4, total, total, 128), torch.bfloat16, kernel.device)
    )
    given = {"cu_seqlens_q": [0, 1024, 2048, total], "cu_seqlens_k": [0, 2000, 0, 1000]}
    lengths = {
        name: int32(x, kernel.device) for name, x in (given | {"seqused_k": [0, total, total]}).items()
    }
    dout, dlse = torch.randn_like(q), torch.randn(4, total, device=kernel.device)
    for _ in range(10):
        torch.cuda.empty_cache()
        torch.full((1 << 25,), torch.nan, device=kernel.device)  # given back at once, for the workspace
        dq, *_ = kernel.backward(q, k, v, dout, dlse, **lengths, deterministic=deterministic)
        assert (dq[:2048] == 0).all()


@both
@pytest.mark.parametrize("given", ["seqused_q", "seqused_k", "leftpad_k"])
@pytest.mark.parametrize("values", WILD_LENGTHS.values(), ids=WILD_LENGTHS)
def test_wild_lengths_stay_inside(kernel, values, given, packed):
    """They count as the nearest that make sense."""
    batch = make_ragged((Sequence(100, 100),) * 3, (4, 2), 64, torch.bfloat16, kernel.device, packed)
    tensors = batch.q, batch.k, batch.v, *make_ragged_gradients(batch)
    wild, tame = (
        kernel.backward(*tensors, **batch.lengths | {given: int32(x, kernel.device)}, deterministic=True)
        for x in (values, clamped(values, 0, 100))
    )
    assert all(torch.equal(*pair) for pair in zip(wild, tame, strict=True))


@dtypes
@full_and_causal
@pytest.mark.parametrize("widths", TWO_WIDTHS, ids=str)
def test_v_of_another_width(kernel, widths, mask, dtype):
    inputs = make_inputs(Shape(2, 6, 2, 70, 90, *widths), dtype, kernel.device)
    gradients = make_gradients(inputs[0].new_empty(2, 6, 70, widths[1]))
    found = kernel.backward(*inputs, *gradients, **mask.options)
    assert_gradients(found, *inputs, *gradients, mask)


@both
@pytest.mark.parametrize("widths", TWO_WIDTHS, ids=str)
def test_v_of_another_width_and_unequal_lengths(kernel, widths, packed):
    batch = make_ragged(
        BATCHES["used"], (4, 2), widths[0], torch.bfloat16, kernel.device, packed, head_dim_v=widths[1]
    )
    inputs, gradients = (batch.q, batch.k, batch.v), make_ragged_gradients(batch)
    found = kernel.backward(*inputs, *gradients, **batch.lengths, causal=True)
    assert_ragged_gradients(found, batch, *gradients, MASKS["causal"])
    assert_ragged(kernel.forward(*inputs, **batch.lengths, causal=True), batch, MASKS["causal"])


@pytest.mark.parametrize("head_dim_v", [64, 24, 96])
def test_nested(kernel, head_dim_v):
    """Gradients reach the values of jagged leaves; they are those of the packed sequences."""
    batch = make_ragged(
        BATCHES["used"], (4, 2), 64, torch.bfloat16, kernel.device, True, "transposed", (0, 0),
        head_dim_v=head_dim_v,
    )  # fmt: skip
    dout, dlse = make_ragged_gradients(batch)
    options = {"deterministic": True, "causal": True}
    expected = kernel.backward(batch.q, batch.k, batch.v, dout, dlse, **batch.lengths, **options)
    offsets = [batch.lengths[f"cu_seqlens_{side}"].long() for side in "qk"]
    counts = [batch.lengths.get(f"seqused_{side}") for side in "qk"]
    leaves = [
        torch.nested.nested_tensor_from_jagged(x, offsets[side], counts[side]).detach().requires_grad_()
        for x, side in ((batch.q, 0), (batch.k, 1), (batch.v, 1))
    ]
    out, lse = flash_cute.forward(*(x.transpose(1, 2) for x in leaves), family=kernel.family, **options)
    torch.autograd.backward((out.values(), lse.values()), (dout.transpose(0, 1), dlse))
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert leaf.grad.is_nested
        assert torch.equal(leaf.grad.values(), gradient)
