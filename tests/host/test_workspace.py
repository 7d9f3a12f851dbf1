"""backward/workspace.hpp: what lies where in a backward's workspace, and in the memory of dQ."""

from __future__ import annotations

import math
from itertools import product

import pytest
from problems import CAUSAL, FULL, plan_backward
from support.cases import matrix


@pytest.mark.parametrize(
    ("sizes", "lengths", "in_dq"),
    [
        ((2, 4, 4, 4, 300, 64), None, True),  # 512 bytes a head for 64 queries
        ((2, 4, 4, 3, 300, 64), None, False),
        ((2, 4, 4, 4, 300, 64, 32), None, True),  # rows of dQ are not as V's
        ((2, 4, 4, 4, 300, 32, 64), None, False),
        ((2, 4, 4, 128, 300, 64), [0, 64, 128], True),  # a block more for each sequence
        ((64, 4, 4, 64, 300, 64), list(range(65)), False),
        ((64, 4, 4, 64, 64, 64), [64] * 64 + [128], False),
    ],
)
def test_statistics_of_queries_lie_in_dq_where_they_fit(host, sizes, lengths, in_dq):
    lengths = lengths and [lengths, lengths]
    plan = plan_backward(host, 64, sizes, lengths=lengths)
    assert plan.lse_delta_in_dq == in_dq
    assert plan.workspace_bytes >= 4 * plan.rows * (64 + 2 * (not in_dq))
    for family, asked_for in (("sm90", (True, True, False)), ("sm80", (True, True, True))):
        assert not plan_backward(
            host, 64, sizes, lengths=lengths, family=family, asked_for=asked_for
        ).lse_delta_in_dq


@pytest.mark.parametrize("lengths", [None, [0, 3, 3, 400]])
@pytest.mark.parametrize("head_dim", [8, 40, 96, 128, 256])
@pytest.mark.parametrize("asked_for", [(True, True, False), (False, True, False)], ids=["dq", "no dq"])
def test_terms_of_queries_lie_in_rows_of_dq(host, asked_for, head_dim, lengths):
    """On Hopper, 16 bytes of each query, where dQ is asked for; as many side by side as a row and a line of
    the L2 cache have room for, so that a short last block has rows enough."""
    bucket = next(size for size in (64, 96, 128, 192, 256) if head_dim <= size)
    sizes, bucketed = (3, 4, 4, 400, 400, head_dim), bucket in (96, 128)
    lengths = lengths and [lengths, lengths]
    plan = plan_backward(host, bucket, sizes, lengths=lengths, asked_for=asked_for, family="sm90")
    beside = bucket > 128 and not lengths  # LSE and delta as they are: a kernel behind makes rows
    assert plan.lse_delta_in_dq == (asked_for[0] and (bucketed or beside))
    if not bucketed:
        return
    (in_dq, first), row_stride, side_by_side = plan.terms
    assert (in_dq, first) == (plan.lse_delta_in_dq, 0)
    assert row_stride == (head_dim if in_dq else 4 * 8)
    assert side_by_side == (min(8, 2 ** int(math.log2(head_dim // 8))) if in_dq else 1)


WINDOWS = FULL, CAUSAL, (1000, 0)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_workspace_is_no_larger_than_flash_attention_3s(host, head_dim):
    """By its source: of each query two floats and sums of dQ, of each block of at most 128 a counter, and
    where query heads share K and V sums of dK and dV. But where these floats do not lie in dQ (head dim 64,
    below 1024 queries a key), there are more counters."""
    heads_of = (16, 16), (16, 8), (16, 2), (32, 1)
    for batch, seqlen, heads, window in product((1, 4), (128, 512, 1024, 4096, 16384), heads_of, WINDOWS):
        queries, keys = batch * seqlen * heads[0], batch * seqlen * heads[1] * (heads[0] != heads[1])
        sizes = (batch, *heads, seqlen, seqlen, head_dim)
        plan = plan_backward(host, head_dim, sizes, window=window, family="sm90")
        theirs = queries * 4 * (head_dim + 2) + 4 * queries // 128 + 2 * keys * 4 * head_dim
        assert plan.lse_delta_in_dq or head_dim == 64
        counted = 0 if plan.lse_delta_in_dq else queries // 4 + 64
        assert plan.workspace_bytes <= theirs + counted


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_workspace_is_no_larger_than_flash_attention_2s(host, head_dim):
    """By its source: sums of dQ and a float for each query, and a dK and dV for each query head."""
    heads_of = (16, 16), (16, 8), (16, 2), (28, 4), (32, 1), (71, 1), (6, 2)
    for batch, seqlen, heads, window in product((1, 4), (128, 1024, 4096, 16384), heads_of, WINDOWS):
        queries, keys = (batch * seqlen * number for number in (heads[0], heads[0] * (heads[0] != heads[1])))
        sizes = (batch, *heads, seqlen, seqlen, head_dim)
        plan = plan_backward(host, head_dim, sizes, window=window)
        assert plan.workspace_bytes <= queries * 4 * (head_dim + 1) + 2 * keys * 2 * head_dim


@matrix(
    family=["sm80", "sm90"],
    head_dim=[64, 128, 256],
    lengths={"dense": None, "packed": [0, 5, 900, 3000], "used": "used"},
    heads=[(4, 4), (6, 1), (32, 2)],
    asked_for=[(True, True, False), (True, True, True), (True, False, False)],
)
def test_parts_of_the_workspace_lie_side_by_side(host, family, head_dim, lengths, heads, asked_for):
    total = 1000 if lengths == "used" else 3000
    sizes = (3, *heads, total, total, head_dim)
    lengths = lengths and (
        [None, None, [5, 0, 1000], [1000] * 3] if lengths == "used" else [lengths, lengths]
    )
    plan = plan_backward(host, head_dim, sizes, lengths=lengths, family=family, asked_for=asked_for)
    zero_begin, zero_bytes = plan.zero_filled
    end = 0
    for name, begin, size, found in plan.regions:
        if size == 0:  # in dQ's memory
            assert name in {"lse", "delta", "terms"}
            assert plan.lse_delta_in_dq
            assert found >= 1 << 59
            continue
        assert found == begin
        assert 0 <= begin - end < 16
        assert begin % (16 if name in {"dq", "gqa"} else 4) == 0
        end = begin + size
        is_zero_filled = zero_begin <= begin and end <= zero_begin + zero_bytes
        counts = name in {"tile_counter", "dq_adds", "dq_blocks_taken", "dq_tiles_finished"}
        adds = name == "gqa" or (name == "dq" and family == "sm90" and plan.zero_fills_dq)
        assert is_zero_filled == (counts or adds)
    assert end <= plan.workspace_bytes < end + 16
    if plan.lse_delta_in_dq and not plan.tile.lse_delta_mma:
        entries = 1 if lengths and lengths[0] else 3
        assert 2 * plan.rows * 4 <= entries * heads[0] * total * head_dim * 2
    assert zero_begin % 16 == zero_bytes % 16 == 0
