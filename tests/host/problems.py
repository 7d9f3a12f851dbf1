"""What the host tests draw, and its plans in C++; without hypothesis they are skipped."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from support.cases import Mask

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
from hypothesis import assume, given, settings  # noqa: E402, F401
from hypothesis import strategies as st  # noqa: E402

settings.register_profile("flash_cute", deadline=None, max_examples=200)
settings.load_profile("flash_cute")


UNLIMITED = 2**62
LONGEST = 2**28  # the longest sequence that validation lets through
FULL, CAUSAL = (None, None), (None, 0)  # windows
HOPPERS, FEW = 132, 4  # multiprocessors; so few that query heads of a group stay together
lengths = st.integers(1, 300)
limits = st.none() | st.integers(0, 330)
blocks = st.sampled_from([1, 16, 48, 64, 80, 128])
masks = st.tuples(lengths, lengths, limits, limits)
shapes = st.tuples(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), lengths, lengths, st.sampled_from([8, 64, 256])
)


def make_mask(host, seqlen_q, seqlen_k, left, right):
    return host.WindowMask(
        seqlen_q, seqlen_k, *(UNLIMITED if side is None else side for side in (left, right))
    )


def visible_pairs(seqlen_q, seqlen_k, left, right) -> torch.Tensor:
    return Mask(window=(left, right)).visible(seqlen_q, seqlen_k)


def within(value, low, high):
    return max(low, min(value, high))


@st.composite
def ragged_batches(draw, garbage=False):
    """(sizes, window, lengths in the order of LengthParams) of packed or padded sequences.

    garbage: of any values at all. Else offsets may have gaps before the first and behind the last row.
    """
    batch, heads_kv = draw(st.integers(1, 6)), draw(st.integers(1, 2))
    group = draw(st.sampled_from([1, 2, 3, 7, 17, 35]))  # the last are packed in parts that overlap
    window = draw(limits), draw(limits)
    packed, cross = draw(st.booleans()), draw(st.booleans())
    some = st.integers(-(2**31), 2**31 - 1) | st.integers(-5, 80)
    offsets, totals, rooms = [None, None], [draw(st.integers(1, 60)) for _ in range(2)], [None, None]
    for side in range(2):
        rooms[side] = [totals[side]] * batch
        if packed and garbage:
            offsets[side] = draw(st.lists(some, min_size=batch + 1, max_size=batch + 1))
        elif packed:
            rooms[side] = draw(st.lists(st.integers(0, 40), min_size=batch, max_size=batch))
            offsets[side] = list(accumulate(rooms[side], initial=draw(st.integers(0, 5))))
            totals[side] = max(1, offsets[side][-1] + draw(st.integers(0, 5)))
    if packed and not cross:  # keys lie where queries do
        offsets[1], totals[1], rooms[1] = offsets[0], totals[0], rooms[0]

    def counts(most):
        return [draw(some if garbage else st.integers(0, room)) for room in most]

    used = [counts(rooms[side]) if draw(st.booleans()) else None for side in range(2)]
    leftpad = counts(used[1] or rooms[1]) if draw(st.booleans()) else None
    sizes = batch, heads_kv * group, heads_kv, *totals, 64
    return sizes, window, (*offsets, *used, leftpad)


def all_lengths(lengths):
    """In the order of LengthParams; of those that are given, the last ones may be left out."""
    return [*(lengths or ()), *[None] * 5][:5]


def make_varlen_batch(host, sizes, window, lengths=None):
    return host.VarlenBatch(sizes, make_mask(host, *sizes[3:5], *window), all_lengths(lengths))


def rows_of_sequence(sizes, lengths, index):
    """Its rows of q, and of them and of k those that count, as ranges."""
    ranges, lengths = [], all_lengths(lengths)
    for side in range(2):
        size, offsets, used = sizes[3 + side], lengths[side], lengths[2 + side]
        begin, end = 0, size
        if offsets:
            begin = within(offsets[index], 0, size)
            end = within(offsets[index + 1], begin, size)
        count = within(used[index], 0, end - begin) if used else end - begin
        first = begin + within(lengths[4][index], 0, count) if side and lengths[4] else begin
        ranges.append((range(begin, end), range(first, begin + count)))
    (owned, queries), (_, keys) = ranges
    return owned, queries, keys


def plan_backward(
    host,
    head_dim,
    sizes,
    smem_bytes=232448,  # of a thread block on Hopper
    lengths=None,
    asked_for=(True, True, False),
    family="sm80",
    window=CAUSAL,
    multiprocessors=HOPPERS,
    **changes,
):
    batch = make_varlen_batch(host, sizes, window, lengths)
    plan = host.plan_backward(
        getattr(host.Family, family), head_dim, batch, smem_bytes, *asked_for, multiprocessors, changes
    )
    assert plan.is_listed
    return plan
