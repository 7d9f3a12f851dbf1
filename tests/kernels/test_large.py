"""Tensors over 2^31 elements, by their size and by their strides: every offset must be 64 bits wide."""

from __future__ import annotations

import pytest
import torch
from support.cases import MASKS, Mask
from support.tolerance import assert_attention, assert_gradients

pytestmark = [pytest.mark.gpu, pytest.mark.big_memory(32)]

TOO_MANY = 2**31
DTYPE = torch.bfloat16
HEAD_DIM = 128


def random(*size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=DTYPE, device=device).normal_()


def part(result, *index):
    return tuple(tensor[index] for tensor in result)


def test_many_heads(kernel):
    """(3, 2^12 + 1, 1400, 128): the last batch entry and the last heads lie beyond 2^31 elements."""
    size = 3, 2**12 + 1, 1400, HEAD_DIM
    q, k, v = (random(*size, device=kernel.device) for _ in range(3))
    assert q.numel() > TOO_MANY
    result = kernel.forward(q, k, v, causal=True)
    assert not result[1].isnan().any()
    for batch, heads in ((0, slice(2)), (1, slice(2000, 2002)), (2, slice(-2, None))):
        index = slice(batch, batch + 1), heads
        assert_attention(part(result, *index), q[index], k[index], v[index], MASKS["causal"])


def test_many_queries(kernel):
    """One head of 2^24 + 77 queries: the last rows of q and out lie beyond 2^31 elements."""
    seqlen = TOO_MANY // HEAD_DIM + 77
    q = random(1, 1, seqlen, HEAD_DIM, device=kernel.device)
    k, v = (random(1, 1, 90, HEAD_DIM, device=kernel.device) for _ in range(2))
    result = kernel.forward(q, k, v)
    for rows in (slice(100), slice(seqlen // 2, seqlen // 2 + 100), slice(-300, None)):
        index = slice(None), slice(None), rows
        assert_attention(part(result, *index), q[index], k, v)


def test_many_packed_rows(kernel):
    """Sequences before, around and beyond 2^31 elements of q and out."""
    total = TOO_MANY // HEAD_DIM + 377
    q = random(total, 1, HEAD_DIM, device=kernel.device)
    k, v = (random(270, 1, HEAD_DIM, device=kernel.device) for _ in range(2))
    ends_q, ends_k = [0, 100, total - 300, total], [0, 90, 180, 270]
    offsets_q, offsets_k = (
        torch.tensor(ends, dtype=torch.int32, device=kernel.device) for ends in (ends_q, ends_k)
    )
    out, lse = kernel.forward(q, k, v, cu_seqlens_q=offsets_q, cu_seqlens_k=offsets_k)
    for begin, end, entry in ((0, 100, 0), (total // 2, total // 2 + 100, 1), (total - 300, total, 2)):
        rows, keys = slice(begin, end), slice(ends_k[entry], ends_k[entry + 1])
        result = out[None, rows].transpose(1, 2), lse[None, :, rows].contiguous()
        assert_attention(result, *(x[None].transpose(1, 2) for x in (q[rows], k[keys], v[keys])))


def test_packed_keys_beyond(kernel):
    """The last sequence's keys lie beyond 2^31 elements."""
    total, queries = TOO_MANY // HEAD_DIM + 377, 150
    k, v = (random(total, 1, HEAD_DIM, device=kernel.device) for _ in range(2))
    q = random(queries, 1, HEAD_DIM, device=kernel.device)
    offsets_q, offsets_k = (
        torch.tensor(ends, dtype=torch.int32, device=kernel.device)
        for ends in ([0, 0, queries], [0, total - 200, total])
    )
    out, lse = kernel.forward(q, k, v, cu_seqlens_q=offsets_q, cu_seqlens_k=offsets_k, causal=True)
    tensors = (x[None].transpose(1, 2) for x in (q, k[-200:], v[-200:]))
    assert_attention((out[None].transpose(1, 2), lse[None]), *tensors, MASKS["causal"])


def test_many_keys(kernel):
    """One head of 2^24 + 77 keys, of which a window leaves those at the end, beyond 2^31 elements."""
    seqlen, queries, left = TOO_MANY // HEAD_DIM + 77, 150, 200
    k, v = (random(1, 1, seqlen, HEAD_DIM, device=kernel.device) for _ in range(2))
    q = random(1, 1, queries, HEAD_DIM, device=kernel.device)
    mask = Mask(causal=True, window=(left, None))
    seen = slice(-(queries + left), None)
    assert_attention(kernel.forward(q, k, v, **mask.options), q, k[:, :, seen], v[:, :, seen], mask)


@pytest.mark.parametrize("heads_kv", [1, 2])
def test_all_of_many_keys(kernel, heads_kv):
    """2^24 keys, all visible: all but the last thousands weigh nothing, so the oracle needs only these."""
    seqlen, near = TOO_MANY // HEAD_DIM // heads_kv + 77, 4000
    k = torch.zeros(1, heads_kv, seqlen, HEAD_DIM, dtype=DTYPE, device=kernel.device)
    v = random(1, heads_kv, seqlen, HEAD_DIM, device=kernel.device)
    q = random(1, 2, 3, HEAD_DIM, device=kernel.device).abs() + 1
    k[:, :, :-near] = -1  # scores near -200, whose exp() is nothing beside that of scores near 0
    k[:, :, -near:].normal_()
    seen = slice(-near, None)
    assert_attention(
        kernel.forward(q, k, v, softmax_scale=1.0), q, k[:, :, seen], v[:, :, seen], softmax_scale=1.0
    )


STRIDES = {  # (batch, heads, seqlen) of the tensors, and which stride is over 2^31 elements, or reaches there
    "batch": (2, 3, 130),
    "heads": (3, 2, 130),
    "rows": (2, 2, 33),
}


@pytest.mark.parametrize("far", STRIDES)
def test_large_strides(kernel, far):
    """q, k and v lie in one NaN-filled buffer of over 2^31 elements, with a stride that spans it."""
    batch, heads, seqlen = size = STRIDES[far]
    step = TOO_MANY // (seqlen - 2) // 8 * 8 if far == "rows" else TOO_MANY + 64
    strides = {
        "batch": (step, seqlen * HEAD_DIM, HEAD_DIM, 1),
        "heads": (seqlen * HEAD_DIM, step, HEAD_DIM, 1),
        "rows": (heads * HEAD_DIM, HEAD_DIM, step, 1),
    }[far]
    extent = sum((length - 1) * stride for length, stride in zip((*size, HEAD_DIM), strides, strict=True)) + 1
    apart = batch * heads * seqlen * HEAD_DIM
    buffer = torch.full((extent + 2 * apart,), torch.nan, dtype=DTYPE, device=kernel.device)
    tensors = [buffer.as_strided((*size, HEAD_DIM), strides, i * apart) for i in range(3)]
    for tensor in tensors:
        tensor.normal_()
    assert_attention(kernel.forward(*tensors, causal=True), *tensors, MASKS["causal"])


def test_expanded_over_the_limit(kernel):
    """K and V repeat one head for 2^17 sequences: over 2^31 elements, in 32 KB."""
    batch, heads, seqlen = 2**14, 8, 129
    k, v = (random(1, 1, seqlen, HEAD_DIM, device=kernel.device) for _ in range(2))
    q = random(batch, heads, 1, HEAD_DIM, device=kernel.device)
    wide = [tensor.expand(batch, heads, seqlen, HEAD_DIM) for tensor in (k, v)]
    assert wide[0].numel() > TOO_MANY
    result = kernel.forward(q, *wide)
    last = slice(-3, None)
    assert_attention(part(result, last), q[last], *(tensor[last] for tensor in wide))


@pytest.mark.big_memory(64)
def test_gradients_of_many_heads(kernel):
    """(3, 2^12 + 1, 1400, 128): gradients of the last batch entry and heads lie beyond 2^31 elements."""
    size = 3, 2**12 + 1, 1400, HEAD_DIM
    q, k, v, dout = (random(*size, device=kernel.device) for _ in range(4))
    out, lse = kernel.forward(q, k, v, causal=True)
    arguments = dout, None, q, k, v, out, lse, True
    gradients = torch.ops.flash_cute._backward(*arguments, family=kernel.family)
    for batch, heads in ((0, slice(2)), (1, slice(2000, 2002)), (2, slice(-2, None))):
        index = slice(batch, batch + 1), heads
        tensors = (x[index].clone(memory_format=torch.contiguous_format) for x in (*gradients, q, k, v, dout))
        dq, dk, dv, *inputs = tensors
        assert_gradients((dq, dk, dv), *inputs, None, MASKS["causal"])


@pytest.mark.big_memory(64)
def test_gradients_of_many_packed_rows(kernel):
    """Sequences before, around and beyond 2^31 elements of q, dout and dq."""
    total = TOO_MANY // HEAD_DIM + 377
    q, dout = (random(total, 1, HEAD_DIM, device=kernel.device) for _ in range(2))
    k, v = (random(270, 1, HEAD_DIM, device=kernel.device) for _ in range(2))
    ends_q, ends_k = [0, 100, total - 300, total], [0, 90, 180, 270]
    offsets = tuple(torch.tensor(ends, dtype=torch.int32, device=kernel.device) for ends in (ends_q, ends_k))
    out, lse = kernel.forward(q, k, v, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1])
    arguments = dout, None, q, k, v, out, lse, *offsets
    dq, dk, dv = torch.ops.flash_cute._backward_varlen(*arguments, family=kernel.family)
    for begin, end, entry in ((0, 100, 0), (total - 300, total, 2)):
        rows, keys = slice(begin, end), slice(ends_k[entry], ends_k[entry + 1])
        tensors = dq[rows], dk[keys], dv[keys], q[rows], k[keys], v[keys], dout[rows]
        *found, a, b, c, d = (
            x[None].transpose(1, 2).clone(memory_format=torch.contiguous_format) for x in tensors
        )
        assert_gradients(tuple(found), a, b, c, d, None)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_of_long_groups(kernel, head_dim):
    """Heads so long that on Hopper each of a group has tiles of its own, although there are tiles enough."""
    heads_kv, group, seqlen = 6, 3, 8320
    q, dout = (random(1, heads_kv * group, seqlen, head_dim, device=kernel.device) for _ in range(2))
    k, v = (random(1, heads_kv, seqlen, head_dim, device=kernel.device) for _ in range(2))
    out, lse = kernel.forward(q, k, v, causal=True)
    dq, dk, dv = torch.ops.flash_cute._backward(dout, None, q, k, v, out, lse, True, family=kernel.family)
    for head in (0, heads_kv - 1):
        heads, keys = slice(head * group, (head + 1) * group), slice(head, head + 1)
        gradients = dq[:, heads], dk[:, keys], dv[:, keys]
        tensors = q[:, heads], k[:, keys], v[:, keys], dout[:, heads]
        assert_gradients(gradients, *tensors, None, MASKS["causal"])
