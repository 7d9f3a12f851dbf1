"""What the forward promises beside its values: nothing from outside, no NaN of its own, the same bits."""

from __future__ import annotations

import pytest
import torch
from support.cases import BUCKETS, DTYPES, EMPTY, MASKS, SHAPES, Mask, Shape, make_inputs, matrix
from support.tolerance import assert_attention, assert_within_rule

import flash_cute
from flash_cute import reference

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
garbage = pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf], ids=str)


@pytest.mark.gpu
def test_outputs_are_poisoned(kernel):
    """Elements that a kernel leaves out show as NaN in all these tests: out and LSE are filled beforehand."""
    q, k, v = make_inputs(SHAPES["one_tile"], torch.bfloat16, kernel.device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        kernel.forward(q, k, v)
    assert sum(event.count for event in profile.key_averages() if event.key == "aten::fill_") >= 2


@garbage
@dtypes
@pytest.mark.parametrize(
    "mask", [Mask(window=(5, 5)), Mask(causal=True, window=(60, None)), MASKS["window_diagonal"]]
)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 300), (70, 333), (130, 700)])
def test_unreachable_keys_may_hold_anything(kernel, seqlen_q, seqlen_k, mask, dtype, garbage):
    """Keys left of every query's window never reach the result, whatever K and V hold there."""
    q, k, v = make_inputs(Shape(2, 4, 2, seqlen_q, seqlen_k, 64), dtype, kernel.device)
    unreachable = ~mask.visible(seqlen_q, seqlen_k, kernel.device).any(0)
    assert unreachable.any()
    dirty_k, dirty_v = (tensor.clone() for tensor in (k, v))
    dirty_k[:, :, unreachable] = garbage
    dirty_v[:, :, unreachable] = garbage
    assert_attention(kernel.forward(q, dirty_k, dirty_v, **mask.options), q, k, v, mask)


@pytest.mark.gpu  # the CPU's mask is added to the scores, and NaN - inf is NaN
@garbage
def test_bad_keys_stay_with_the_rows_that_see_them(kernel, garbage):
    """A bad score is hidden like any other: rows above the diagonal keep their bits."""
    q, k, v = make_inputs(Shape(2, 4, 4, 200, 200, 64), torch.bfloat16, kernel.device)
    clean = kernel.forward(q, k, v, causal=True)
    bad = 77
    k[:, :, bad] = garbage
    for result, expected in zip(kernel.forward(q, k, v, causal=True), clean, strict=True):
        assert torch.equal(result[:, :, :bad], expected[:, :, :bad])
        if garbage != garbage:
            assert result[:, :, bad:].isnan().all()


def test_heads_and_batches_are_apart(kernel):
    """NaN in one head of one batch entry reaches the query heads of its group and no other."""
    q, k, v = make_inputs(Shape(3, 4, 2, 130, 150, 64), torch.bfloat16, kernel.device)
    clean = kernel.forward(q, k, v)
    v[1, 0] = torch.nan
    out, lse = kernel.forward(q, k, v)
    touched = torch.zeros(3, 4, dtype=torch.bool, device=kernel.device)
    touched[1, :2] = True
    assert out[touched].isnan().all()
    assert torch.equal(out[~touched], clean[0][~touched])
    assert torch.equal(lse, clean[1])


@garbage
@pytest.mark.parametrize("head_dim", BUCKETS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(100, 30), (300, 70)])
def test_rows_that_see_nothing_stay_zero_beside_bad_values(kernel, seqlen_q, seqlen_k, head_dim, garbage):
    """What a neighbouring row of the same tile sees is hidden from them, though it is not finite."""
    q, k, v = make_inputs(Shape(2, 2, 2, seqlen_q, seqlen_k, head_dim), torch.bfloat16, kernel.device)
    v[:] = garbage
    out, lse = kernel.forward(q, k, v, causal=True)
    blind = seqlen_q - seqlen_k
    assert (out[:, :, :blind] == 0).all()
    assert (lse[:, :, :blind] == -torch.inf).all()
    assert not out[:, :, blind:].isfinite().any()


@dtypes
@pytest.mark.parametrize("head_dim", [64, 100])
def test_overlapping_queries(kernel, head_dim, dtype):
    """Heads of one query that share memory, as unfold gives them; no output can lie like that."""
    q = torch.randn(3, 4, head_dim + 9, device=kernel.device).to(dtype).unfold(2, head_dim, 1)[:, :, :1]
    k, v = (torch.randn(3, 4, 17, head_dim, device=kernel.device).to(dtype) for _ in range(2))
    assert_attention(kernel.forward(q, k, v), q, k, v)


@matrix(
    seqlens=[(5, 5), (150, 70), (200, 300)],
    head_dim=BUCKETS,
    mask={name: MASKS[name] for name in ("full", "causal", "window_causal")},
    dtype=DTYPES,
)
def test_rows_that_see_scores_of_minus_infinity_alone(kernel, seqlens, head_dim, mask, dtype):
    """NaN, as from PyTorch: zeros are for rows that see no key, and that is for the mask to say."""
    seqlen_q, seqlen_k = seqlens
    q, k, v = make_inputs(Shape(2, 4, 2, seqlen_q, seqlen_k, head_dim), dtype, kernel.device)
    k.abs_().neg_().clamp_(max=-1e-3)
    infinite = torch.arange(seqlen_q, device=kernel.device) % 3 == 0
    out, lse = kernel.forward(q.where(~infinite[:, None], torch.inf), k, v, **mask.options)
    bad = infinite & mask.visible(seqlen_q, seqlen_k, kernel.device).any(1)
    assert out[:, :, bad].isnan().all()
    assert (lse[:, :, bad] == -torch.inf).all()
    oracle = reference.forward(q, k, v, **mask.options)
    yardstick = reference.forward(q, k, v, dtype=dtype, **mask.options)
    for name, *results in zip(("out", "lse"), (out, lse), yardstick, oracle, strict=True):
        assert_within_rule(name, *(result[:, :, ~bad] for result in results))


@dtypes
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("mask", [MASKS["full"], MASKS["causal"], MASKS["window_symmetric"]])
@pytest.mark.parametrize("shape", EMPTY.values(), ids=EMPTY)
def test_empty_inputs(kernel, shape, mask, layout, dtype):
    q, k, v = make_inputs(shape, dtype, kernel.device, layout)
    out, lse = kernel.forward(q, k, v, **mask.options)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:3]
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@matrix(
    mask={name: MASKS[name] for name in ("full", "causal", "window_left")}, head_dim=BUCKETS, dtype=DTYPES
)
def test_bitwise_repeatable(kernel, mask, head_dim, dtype):
    q, k, v = make_inputs(Shape(4, 8, 2, 333, 444, head_dim), dtype, kernel.device)
    first = kernel.forward(q, k, v, **mask.options)
    for _ in range(10 if kernel.family else 2):
        for result, expected in zip(kernel.forward(q, k, v, **mask.options), first, strict=True):
            assert torch.equal(result, expected)


@pytest.mark.parametrize("layout", ["mixed", "rows_not_16_bytes", "columns_of_rows"])
def test_inputs_are_left_alone(kernel, layout):
    inputs = make_inputs(SHAPES["grouped_heads"], torch.bfloat16, kernel.device, layout)
    before = [tensor.clone() for tensor in inputs]
    kernel.forward(*inputs, causal=True)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(inputs, before, strict=True))


@pytest.fixture
def default_dtype(request):
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


# What torch.empty and its kin make on the CPU by themselves, and many a program that loads a model changes.
@pytest.mark.parametrize(
    "default_dtype", [torch.bfloat16, torch.float16, torch.float64], indirect=True, ids=str
)
@pytest.mark.parametrize("seqused", [None, 50])
@pytest.mark.parametrize("mask", [MASKS["full"], MASKS["causal"], Mask(window=(5, 5))])
def test_the_default_dtype_changes_nothing(default_dtype, mask, seqused):
    inputs = [x.requires_grad_() for x in make_inputs(Shape(2, 4, 2, 60, 70, 64), torch.float16, "cpu")]
    used = None if seqused is None else torch.tensor([seqused, 3], dtype=torch.int32)

    def results():
        out, lse = flash_cute.forward(*inputs, seqused_k=used, **mask.options)
        gradients = torch.autograd.grad((out, lse), inputs, (torch.ones_like(out), torch.ones_like(lse)))
        return out, lse, *gradients

    found = results()
    torch.set_default_dtype(torch.float32)
    for ours, expected in zip(found, results(), strict=True):
        assert ours.dtype == expected.dtype
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("size", "strides"),
    [
        ((2, 4, 40, 64), (412, 103, 1, 1)),
        ((1, 6, 5, 8), (1, 1, 1, 1)),
        ((2, 3, 9, 64), (1, 1, 64, 1)),
        ((2, 3, 9, 1), (27, 9, 1, 1)),
    ],
    ids=str,
)
def test_queries_may_overlap(size, strides, causal):
    """PyTorch's own kernel for CPUs leaves out unwritten where rows go by steps of 1 as well."""
    memory = torch.randn(sum((n - 1) * step for n, step in zip(size, strides, strict=True)) + 1)
    q = memory.bfloat16().as_strided(size, strides)
    k, v = torch.randn(2, *size).bfloat16()
    out, lse = flash_cute.forward(q, k, v, causal)
    expected = flash_cute.forward(q.contiguous(), k, v, causal)
    assert out.stride() == torch.empty_like(q).stride()
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
