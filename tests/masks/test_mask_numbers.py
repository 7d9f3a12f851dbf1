"""flash_cute.masks of any integers, against Python's: no number wraps around."""

from __future__ import annotations

import sys

import pytest
import torch

from flash_cute import masks

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

KEYS = [*range(9), 2**28, 2**31 - 2]  # those that calls may have, the last one included
EDGES = [2**28, 2**31 - 1, 2**31, 2**31 + 1, 2**32, 2**40, 2**62, sys.maxsize - 1, sys.maxsize]
held = st.integers(0, 8) | st.sampled_from(EDGES)  # by an int64 tensor
numbers = held | st.just(2**70)
signed = held | st.integers(-3, -1) | st.sampled_from([-(2**31), -(2**31) - 1, -(2**40), -sys.maxsize - 1])
places = st.lists(signed, min_size=1, max_size=3)
often = settings(deadline=None, max_examples=150)


def check(ranges: torch.Tensor, sees) -> None:
    """Does query i of one sequence see key j where sees(i, j) says so in Python's integers?"""
    assert ranges.dtype == torch.int32
    for i, row in enumerate(ranges.flatten(0, -3).tolist()):
        for j in KEYS:
            assert any(start <= j < end for start, end in row) == sees(i, j), (i, j, row)


@given(places, numbers, numbers)
@often
def test_any_sink_and_window(place, first, window):
    ranges = masks.sink_window(first, window, torch.tensor(place))
    check(ranges, lambda i, j: j <= place[i] and (j < first or j >= place[i] - window))
    check(masks.causal(torch.tensor(place)), lambda i, j: j <= place[i])


@given(places, numbers.filter(bool), held, st.booleans(), st.booleans())
@often
def test_any_chunks(place, size, padding, padded, causal):
    hypothesis.assume(size < 2**63 or sys.maxsize not in place)  # as a place of 2**63 - 1 begins a chunk
    first = padding if padded else 0
    leftpad = torch.tensor([padding]) if padded else None
    ranges = masks.chunks(size, torch.tensor([place]), causal=causal, leftpad=leftpad)
    assert ranges.dim() == 5

    def sees(i, j):
        return (
            first <= j and (j - first) // size == (place[i] - first) // size and (j <= place[i] or not causal)
        )

    check(ranges, sees)


@given(places, signed)
@often
def test_any_prefix(place, length):
    check(
        masks.prefix(torch.tensor([length]), torch.tensor([place])), lambda i, j: j <= place[i] or j < length
    )


@given(numbers, numbers.filter(bool), st.booleans())
@often
def test_any_window_of_images_and_block(window, size, window_images):
    ranges = masks.images(torch.tensor([[-1, 0, 0, 0, 1]]), window=window, window_images=window_images)

    def sees(i, j):
        near = j >= i - window
        return (j <= i and near) or (1 <= i <= 3 and 1 <= j <= 3 and (near or not window_images))

    check(ranges, sees)

    def in_block(i, j):
        if i < 4:
            return j // size == i // size if j < 4 else j < 8 and (j - 4) // size < i // size
        return 4 <= j < 8 and (j - 4) // size <= (i - 4) // size

    check(masks.block_diffusion(size, 4), in_block)


bounds = signed | st.sampled_from([2**70, -(2**70)])


@given(st.tuples(bounds, bounds), st.sampled_from(["full", "causal", "inverse causal", "both"]))
@often
def test_any_slice(keys, kind):
    first = "inverse" in kind or kind == "both"
    last = kind in ("causal", "both")
    check(
        masks.from_slices([(1, 4)], [keys], [kind], 5),
        lambda i, j: 1 <= i < 4 and keys[0] + (i - 1) * first <= j < keys[1] - (3 - i) * last,
    )


@given(st.lists(st.tuples(signed, signed), min_size=3, max_size=3), numbers, numbers)
@often
def test_any_ranges(pairs, first, keys):
    """int64 ones, too."""
    ranges = torch.tensor(pairs).view(1, 1, 3, 1, 2)
    part = masks.shift(ranges, first, keys)
    assert int(part.min()) >= 0
    assert int(part.max()) <= keys
    check(part, lambda i, j: j < keys and j + first < 2**31 - 1 and pairs[i][0] <= j + first < pairs[i][1])
    other = ranges.flip(2)

    def seen(i, j):
        return pairs[i][0] <= j < pairs[i][1]

    check(masks.union(ranges, other), lambda i, j: seen(i, j) or seen(2 - i, j))
    check(masks.intersection(ranges, other), lambda i, j: seen(i, j) and seen(2 - i, j))


@given(st.lists(held, min_size=1, max_size=4).map(sorted))
@often
def test_any_offsets(offsets):
    cu_seqlens = torch.tensor(offsets)
    found = [[s for s in range(len(offsets) - 1) if offsets[s] <= row < offsets[s + 1]] for row in range(6)]
    expected = [row - offsets[s[0]] if s else -1 for row, s in enumerate(found)]
    assert masks.positions(cu_seqlens, 6).tolist() == expected
    ranges = masks.documents(cu_seqlens=cu_seqlens, seqlen=6)
    check(ranges, lambda i, j: j <= i and bool(found[i]) and found[i] == found[j])
    ranges = masks.documents(cu_seqlens=cu_seqlens, seqlen=6, causal=False)[..., :6, :, :]
    for i, [(start, end)] in enumerate(ranges[0, 0].tolist()):
        assert [j for j in range(6) if start <= j < end] == [
            j for j in range(6) if found[i] and found[i] == found[j]
        ]
