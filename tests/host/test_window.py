"""attention/mask/window.hpp, in C++ without a GPU, against brute force."""

from __future__ import annotations

import numpy as np
from problems import LONGEST, UNLIMITED, blocks, given, limits, make_mask, masks, st, visible_pairs


@given(
    st.tuples(
        st.integers(1, 60), st.integers(1, 60), st.none() | st.integers(0, 70), st.none() | st.integers(0, 70)
    )
)
def test_visible_is_the_definition(host, case):
    mask, expected = make_mask(host, *case), visible_pairs(*case)
    rows, keys = expected.shape
    assert [[mask.visible(row, key) for key in range(keys)] for row in range(rows)] == expected.tolist()


def assert_tight(visible, tile, block, visited, unmasked) -> None:
    """visited: the blocks with a visible pair. unmasked: exactly the blocks without a hidden one.

    Both are asked for the begin of each tile of `tile` rows of visible, and count blocks of its columns.
    """
    rows, keys = (
        np.minimum(np.arange(0, length + step, step), length)
        for length, step in zip(visible.shape, (tile, block), strict=True)
    )
    before = np.pad(visible.numpy().cumsum(0).cumsum(1), ((1, 0), (1, 0)))  # pairs before a row and a key
    pairs = np.diff(np.diff(before[rows][:, keys], axis=0), axis=1)
    for begin, end, counts in zip(rows, rows[1:], pairs, strict=False):
        assert list(range(*visited(begin, tile, block))) == np.flatnonzero(counts).tolist()
        whole = np.flatnonzero(counts == (end - begin) * block).tolist()
        assert list(range(*unmasked(begin, tile, block))) == whole


@given(masks, blocks, blocks)
def test_block_ranges_are_tight(host, case, block_m, block_n):
    mask = make_mask(host, *case)
    assert_tight(visible_pairs(*case), block_m, block_n, mask.visited, mask.full)


@given(masks)
def test_the_mask_looks_both_ways(host, case):
    """first_row, end_row: the queries that see a key, where there are some; transposed: the same pairs."""
    mask, expected = make_mask(host, *case), visible_pairs(*case)
    transposed = mask.transposed()
    assert (transposed.seqlen_q, transposed.seqlen_k) == (mask.seqlen_k, mask.seqlen_q)
    for key, column in enumerate(expected.T):
        rows = column.nonzero().flatten().tolist()
        first, end = mask.first_row(key), mask.end_row(key)
        assert list(range(first, end)) == rows
        for row in {0, mask.seqlen_q - 1, *range(first - 1, first + 1), *range(end - 1, end + 1)}:
            if 0 <= row < mask.seqlen_q:
                assert transposed.visible(key, row) == mask.visible(row, key) == expected[row, key]


@given(st.tuples(st.integers(1, 150), st.integers(1, 150), limits, limits), blocks)
def test_keys_counted_from_another_one(host, case, first):
    mask, expected = make_mask(host, *case), visible_pairs(*case)
    moved = mask.from_key(first)
    for row, key in expected[:, first:].nonzero().tolist():
        assert moved.visible(row, key)
    seen = sum(moved.visible(row, key) for row in range(mask.seqlen_q) for key in range(mask.seqlen_k))
    assert seen == expected[:, first:].sum()


@given(masks, blocks, blocks)
def test_block_ranges_of_keys_are_tight(host, case, block_m, block_n):
    mask = make_mask(host, *case)
    assert_tight(visible_pairs(*case).T, block_n, block_m, mask.visited_rows, mask.full_rows)


@given(masks, blocks, blocks)
def test_both_ways_visit_the_same_blocks(host, case, block_m, block_n):
    """What a backward over blocks of keys meets is what the forward over blocks of queries met."""
    mask = make_mask(host, *case)
    rows, keys = -(-mask.seqlen_q // block_m), -(-mask.seqlen_k // block_n)

    def pairs(over_keys, over_rows):
        forward = {(m, n) for m in range(rows) for n in range(*over_keys(m * block_m, block_m, block_n))}
        backward = {(m, n) for n in range(keys) for m in range(*over_rows(n * block_n, block_n, block_m))}
        return forward, backward

    forward, backward = pairs(mask.visited, mask.visited_rows)
    assert forward == backward
    # A block that is not full is masked; a tile that is not may be unmasked.
    whole = {(m, n) for m in range(mask.seqlen_q // block_m) for n in range(mask.seqlen_k // block_n)}
    forward, backward = pairs(mask.full, mask.full_rows)
    assert forward & whole == backward & whole


@given(masks)
def test_reachable_keys_and_pairs(host, case):
    mask, expected = make_mask(host, *case), visible_pairs(*case)
    reachable = expected.any(0).nonzero().flatten().tolist()
    assert mask.first_reachable_key() == (reachable[0] if reachable else expected.shape[1])
    assert mask.visible_pairs() == expected.sum().item()


@given(masks)
def test_rows_that_see_nothing_come_first(host, case):
    seeing = visible_pairs(*case).any(1)
    first = make_mask(host, *case).fully_masked_rows()
    assert not seeing[:first].any()
    assert seeing[first:].all()


@given(st.integers(1, LONGEST), st.integers(1, LONGEST), st.none() | st.integers(0, 2**63 - 1), st.data())
def test_long_sequences_do_not_overflow(host, seqlen_q, seqlen_k, left, data):
    """Lengths and limits as large as validation lets through: unclamped, their sums overflow 32 bits."""
    right = data.draw(st.none() | st.integers(0, 2**63 - 1))
    mask = make_mask(host, seqlen_q, seqlen_k, left, right)
    row = data.draw(st.integers(0, seqlen_q - 1))
    diagonal = row + seqlen_k - seqlen_q
    first = max(0, diagonal - (UNLIMITED if left is None else left))
    end = min(seqlen_k, diagonal + (UNLIMITED if right is None else right) + 1)
    for key in {0, seqlen_k - 1, first - 1, first, end - 1, end, data.draw(st.integers(0, seqlen_k - 1))}:
        if 0 <= key < seqlen_k:
            assert mask.visible(row, key) == (first <= key < end)
    assert mask.visited(row, 1, 1) == ((first, end) if first < end else (0, 0))
