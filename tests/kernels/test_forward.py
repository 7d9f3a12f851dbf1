"""The forward against float64 over the table of cases, and what is special to numbers, tiles and scores."""

from __future__ import annotations

import pytest
import torch
from support.cases import (
    ALL_DTYPES,
    BUCKETS,
    DTYPES,
    FULL_AND_CAUSAL,
    MASKS,
    SHAPES,
    TWO_WIDTHS,
    Mask,
    Shape,
    make_inputs,
    with_head_dim,
)
from support.table import check_forward
from support.tolerance import assert_attention

import flash_cute

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
# In the largest products both types only where they are types of kernels: the CPU computes in float32 anyway.
kernel_dtypes = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.gpu)], ids=["bf16", "fp16"]
)
masks = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
full_and_causal = pytest.mark.parametrize("mask", FULL_AND_CAUSAL.values(), ids=FULL_AND_CAUSAL)


def check(kernel, shape, dtype, mask, layout="mixed", softmax_scale=None):
    q, k, v = make_inputs(shape, dtype, kernel.device, layout)
    result = kernel.forward(q, k, v, softmax_scale=softmax_scale, **mask.options)
    assert_attention(result, q, k, v, mask, softmax_scale)


def test_table(kernel, forward_case):
    check_forward(kernel, forward_case)


@dtypes
@masks
@pytest.mark.gpu  # where shapes fill tiles and grids, and head dims choose kernels
@pytest.mark.parametrize("head_dim", BUCKETS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes_in_every_bucket(kernel, shape, head_dim, mask, dtype):
    check(kernel, with_head_dim(shape, head_dim), dtype, mask)


@dtypes
@full_and_causal
@pytest.mark.parametrize("softmax_scale", [1.0, 2.0])
def test_softmax_scale(kernel, softmax_scale, mask, dtype):
    check(kernel, Shape(2, 4, 4, 150, 201, 64), dtype, mask, softmax_scale=softmax_scale)


@dtypes
@pytest.mark.gpu
@pytest.mark.parametrize("seqlen", [2048, 4000])
def test_long_sequences(kernel, seqlen, dtype):
    check(kernel, Shape(1, 2, 1, seqlen, seqlen, 128), dtype, MASKS["causal"])


@dtypes
@pytest.mark.gpu
@pytest.mark.parametrize("mask", [MASKS["causal"], Mask(True, (4300, 0))], ids=["causal", "window"])
@pytest.mark.parametrize("head_dim", [*BUCKETS, 80])
def test_claimed_tiles(kernel, head_dim, mask, dtype):
    """More long tiles of unequal length than multiprocessors: see is_dynamic in forward/choose_tile.hpp."""
    check(kernel, Shape(1, 10, 5, 5000, 5100, head_dim), dtype, mask)


@pytest.mark.parametrize("dtype", ALL_DTYPES.values(), ids=ALL_DTYPES)
@full_and_causal
@pytest.mark.parametrize("widths", TWO_WIDTHS, ids=str)
def test_v_of_another_width(kernel, widths, mask, dtype):
    q, k, v = make_inputs(Shape(2, 6, 2, 150, 190, *widths), dtype, kernel.device)
    assert_attention(kernel.forward(q, k, v, **mask.options), q, k, v, mask)


@pytest.mark.parametrize("columns", [slice(0, 64), slice(64, 192), slice(0, 190)], ids=str)
def test_v_is_columns_of_k(kernel, columns):
    """As a latent that has the values among its own columns."""
    q, k, _ = make_inputs(Shape(2, 6, 1, 50, 90, 192), torch.bfloat16, kernel.device)
    v = k[..., columns]
    assert_attention(kernel.forward(q, k, v, causal=True), q, k, v, FULL_AND_CAUSAL["causal"])


def test_attention_is_forwards_output(kernel):
    q, k, v = make_inputs(SHAPES["no_tile_divides"], torch.bfloat16, kernel.device)
    out = flash_cute.attention(q, k, v, causal=True, family=kernel.family)
    assert torch.equal(out, kernel.forward(q, k, v, causal=True)[0])


@dtypes
def test_large_scores_do_not_overflow(kernel, dtype):
    """Scores of some thousands: exp() of them overflows, of their distance from the maximum it does not."""
    q, k, v = make_inputs(Shape(2, 2, 2, 150, 201, 64), dtype, kernel.device)
    q, k = q * 30, k * 30
    assert_attention(kernel.forward(q, k, v), q, k, v)


# How the scores drift over the keys, in units of the softmax, from the first key to the last.
DRIFTS = {
    "rising": lambda place: place,
    "falling": lambda place: 1 - place,
    "peak": lambda place: 1 - (2 * place - 1).abs(),
    "steps": lambda place: (place * 7).floor() * 3 % 7 / 7,
}


@kernel_dtypes
@full_and_causal
@pytest.mark.parametrize("height", [4, 12, 40, 400])
@pytest.mark.parametrize("drift", DRIFTS.values(), ids=DRIFTS)
def test_row_maximum_moves(kernel, drift, height, mask, dtype):
    """The running maximum grows, slowly or by leaps, from any side: rescaling must follow it everywhere."""
    shape = Shape(1, 2, 2, 150, 700, 64)
    q, k, v = make_inputs(shape, dtype, kernel.device)
    place = torch.linspace(0, 1, shape.seqlen_k, device=kernel.device)[:, None]
    q = (1 + 0.1 * q).to(dtype)
    k = (0.3 * k + height / shape.head_dim**0.5 * drift(place)).to(dtype)
    assert_attention(kernel.forward(q, k, v, **mask.options), q, k, v, mask)


@dtypes
@full_and_causal
@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sm80_errs_no_more_than_flash_attention_2(head_dim, mask, dtype):
    """Enough tiles that FlashAttention-2 does not split the keys, which changes its error by up to 3%."""
    inputs = make_inputs(Shape(16, 16, 16, 512, 512, head_dim), dtype, "cuda", "contiguous")
    exact = flash_cute.reference.forward(*inputs, causal=mask.causal)
    ours = flash_cute.forward(*inputs, causal=mask.causal, family="sm80")
    theirs = torch.ops.aten._scaled_dot_product_flash_attention(*inputs, 0.0, mask.causal)[:2]
    for name, oracle, *results in zip(("out", "lse"), exact, ours, theirs, strict=True):
        error, limit = ((result.double() - oracle).square().mean().sqrt().item() for result in results)
        assert error <= 1.01 * limit, f"RMS of {name}'s error: {error:.3e}, FlashAttention-2's {limit:.3e}"


def small_integers(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=generator).float()


def halves(shape: torch.Size, generator: torch.Generator, of_k: bool) -> torch.Tensor:
    """Rows of q and of k in spaces that are orthogonal to each other."""
    x = torch.randn(shape, generator=generator)
    x[..., : shape[-1] // 2] *= of_k
    x[..., shape[-1] // 2 :] *= not of_k
    return x


@kernel_dtypes
@full_and_causal
@pytest.mark.parametrize("scores", ["small integers", "zeros"])
def test_scores_that_nobody_rounds(kernel, scores, mask, dtype):
    """Plain PyTorch has no error in these scores that would excuse one in the LSE."""
    generator = torch.Generator().manual_seed(5)
    shape = torch.Size((2, 3, 300, 64))
    if scores == "zeros":
        q, k = (halves(shape, generator, of_k) for of_k in (False, True))
    else:
        q, k = (small_integers(shape, generator) for _ in range(2))
    inputs = [x.to(kernel.device, dtype) for x in (q, k, torch.randn(shape, generator=generator))]
    assert_attention(kernel.forward(*inputs, **mask.options), *inputs, mask)
