"""attention/mask/ranges.hpp and block_table.hpp, in C++ without a GPU, against sets of keys and of blocks."""

from __future__ import annotations

from itertools import pairwise

from problems import given, make_mask, masks, st

EXTREME = st.integers(-(2**31), 2**31 - 1)
bounds = EXTREME | st.integers(-20, 330)
given_ranges = st.lists(st.tuples(bounds, bounds), min_size=1, max_size=4)


@given(masks, given_ranges, st.integers(0, 40), st.data())
def test_cut_ranges_are_the_union(host, case, ranges, shift, data):
    """Of the ranges within the window; sorted, with a hidden key between two, the empty ones last."""
    mask = make_mask(host, *case)
    row = data.draw(st.integers(0, mask.seqlen_q - 1))
    cut = host.cut_ranges(ranges, shift, mask, row)
    expected = {
        key
        for key in range(mask.seqlen_k)
        if mask.visible(row, key) and any(begin <= key + shift < end for begin, end in ranges)
    }
    assert {key for begin, end in cut for key in range(begin, end)} == expected
    some = [pair for pair in cut if pair[0] < pair[1]]
    assert cut[: len(some)] == some
    assert all(before[1] < after[0] for before, after in pairwise(some))


words = st.lists(
    st.sampled_from([0, 1, 2**31, 2**32 - 1]) | st.integers(0, 2**32 - 1), min_size=1, max_size=5
)


def blocks_of(bits):
    return [32 * word + i for word, value in enumerate(bits) for i in range(32) if value >> i & 1]


@given(words)
def test_walk_over_keys(host, bits):
    """From the last block to the first; each step knows the one behind it, and how many are left."""
    expected = blocks_of(bits)[::-1]
    if not expected:
        return  # the table has a block for each tile
    steps = host.walk_over_keys(bits, len(expected))
    assert [block for block, *_ in steps] == expected
    assert [following for _, following, *_ in steps[:-1]] == expected[1:]
    assert [left for _, _, left, _ in steps] == list(range(len(expected)))[::-1]
    assert [full for *_, full in steps] == [block % 3 == 0 for block in expected]


@given(words, st.data())
def test_walk_over_a_part_of_the_keys(host, bits, data):
    """Likewise; where it has no block that is visited, one step over its first, hidden."""
    begin = data.draw(st.integers(0, 32 * len(bits) - 1))
    end = data.draw(st.integers(begin + 1, 32 * len(bits)))
    expected = [block for block in blocks_of(bits)[::-1] if begin <= block < end]
    steps = host.walk_over_part(bits, begin, end)
    assert [block for block, *_ in steps] == (expected or [begin])
    assert [following for _, following, *_ in steps[:-1]] == expected[1:]
    assert [left for _, _, left, _ in steps] == list(range(max(1, len(expected))))[::-1]
    assert [full for *_, full in steps] == ([block % 3 == 0 for block in expected] or [False])


@given(words, st.integers(1, 3), st.data())
def test_walk_over_queries(host, bits, heads, data):
    """From the first block to the last, head by head; where there is none, one hidden step for each head."""
    blocks = data.draw(st.integers(1, 32 * len(bits)))  # of the sequence: no other is visited
    seen = [block for block in blocks_of(bits) if block < blocks] or [0]
    are_full = set(blocks_of(bits))
    expected = [
        (head, block, block % 3 == 0 and block in are_full) for head in range(heads) for block in seen
    ]
    assert host.walk_over_queries(bits, blocks, heads) == expected


@given(st.integers(-40, 80), st.integers(-40, 80))
def test_bits_between(host, begin, end):
    assert blocks_of([host.bits_between(begin, end)]) == [i for i in range(32) if begin <= i < end]
