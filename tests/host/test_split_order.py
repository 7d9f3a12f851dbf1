"""scheduler/split_order.hpp: sequences that are cut into parts of their keys."""

from __future__ import annotations

import heapq
from itertools import groupby, pairwise

import pytest
from problems import FULL, HOPPERS, given, make_varlen_batch, ragged_batches, st


@given(st.data())
def test_parts_have_every_visible_key_once(host, data):
    """Parts of a tile follow each other without gaps; few tiles have slots, and these are the first ones."""
    sizes, window, lengths = data.draw(ragged_batches())
    batch = make_varlen_batch(host, sizes, window, lengths)
    block_n, blocks = data.draw(st.sampled_from([16, 64])), data.draw(st.sampled_from([1, 4, 132]))
    rounds, rows = data.draw(st.sampled_from([1, 2, 16])), data.draw(st.sampled_from([1, 64]))
    wanted = blocks * rounds
    least, fixed = data.draw(st.sampled_from([1, 4])), data.draw(st.sampled_from([0, 0, 1, 3]))
    folds = fixed > 0 and data.draw(st.booleans())
    is_uniform = not any(lengths)
    part_lengths = block_n, blocks, rounds, least, fixed, rows, folds
    tiles, capacity, most_slots = host.split_tiles(batch, 16, 1, 1, part_lengths, is_uniform)
    slots = [tile[6] for tile in tiles]
    cut = sum(slot >= 0 for slot in slots)
    assert slots == [*range(cut), *[-1] * (len(tiles) - cut)]
    assert fixed or cut < 2 * wanted or cut == 0
    assert not fixed or is_uniform or cut <= most_slots
    assert len(tiles) <= capacity * sizes[1]
    by_tile = sorted(tiles, key=lambda tile: (tile[:3], tile[7]))
    for _, parts in groupby(by_tile, key=lambda tile: tile[:3]):
        parts = list(parts)
        assert [part[7:] for part in parts] == [(number, len(parts)) for number in range(len(parts))]
        blocks = [part[5] for part in parts]
        assert all(before[1] == after[0] for before, after in pairwise(blocks))
        if fixed:
            assert all(begin % fixed == 0 for begin, _ in blocks)
            assert all(end - begin <= fixed for begin, end in blocks) or (folds and len(blocks) == 1)
        entry, _, m_begin, first_key, keys, *_ = parts[0]
        mask = batch.sequence(entry)[4]
        assert keys == mask.seqlen_k
        seen = mask.visited(m_begin, 16, 1)
        if seen[0] < seen[1]:
            assert blocks[0][0] * block_n <= first_key + seen[0]
            assert first_key + seen[1] <= blocks[-1][1] * block_n
    counted = {tile[0] for tile in tiles}
    assert counted == {b for b in range(sizes[0]) if batch.sequence(b)[2] > 0}


def time_of(lengths, blocks):
    """When the last thread block ends. Each takes tiles one by one; they cost half a block of keys more."""
    ends = [0.0] * blocks
    for length in lengths:
        heapq.heappush(ends, heapq.heappop(ends) + length + 0.5)
    return max(ends)


@pytest.mark.parametrize(
    ("batch", "blocks_of_keys", "shorter", "most"),
    [
        (1, 64, False, 0.1),  # few tiles
        (17, 64, False, 0.65),  # little more than a round of them
        (17, 64, True, 0.8),  # of lengths that the device knows: at most two rounds
        (64, 16, True, 1.0),  # whole
        (64, 16, False, 1.0),
        (256, 8, True, 1.0),
        (5, 256, False, 0.4),
    ],
)
def test_parts_of_sequences_that_are_alike(host, batch, blocks_of_keys, shorter, most):
    """They take no more than this part of the time of tiles that have all of their keys."""
    heads_kv, block_n, keys = 8, 128, 128 * blocks_of_keys
    used = [keys - shorter * (b % 2) for b in range(batch)]
    sizes = batch, 4 * heads_kv, heads_kv, 1, keys, 128
    made = make_varlen_batch(host, sizes, FULL, [None, None, None, used if shorter else None])
    lengths = block_n, HOPPERS, 2 if shorter else 16, 2, 0, 4, False
    tiles, *_ = host.split_tiles(made, 64, 1, 4, lengths, not shorter)
    taken = time_of([tile[5][1] - tile[5][0] for tile in tiles], HOPPERS)
    whole = time_of([blocks_of_keys] * (heads_kv * batch), HOPPERS)
    assert taken <= most * whole
    assert (len(tiles) == heads_kv * batch) == (most == 1)


@pytest.mark.parametrize(
    ("used", "cut"),
    [
        ([131072] * 2, {0, 1}),  # 16 tiles
        ([8192] * 8, set()),  # 64 tiles, whose partial results would take longer than an even share saves
        ([8192] * 64, set()),  # a tile for each thread block, and more
        ([131072, *[1024] * 64], {0}),  # one is longer than a thread block's share
        ([2048] * 64, set()),
    ],
)
def test_long_sequences_are_cut_where_tiles_add_up_splits(host, used, cut):
    """At each multiple of a split; the tiles of others have all of their keys."""
    heads_kv, block_n, fixed = 8, 128, 8
    sizes = len(used), heads_kv, heads_kv, 128, max(used), 128
    batch = make_varlen_batch(host, sizes, FULL, [None, None, None, used])
    lengths = block_n, HOPPERS, 2, 2, fixed, 128
    tiles, _, most_slots = host.split_tiles(batch, 128, 1, 1, (*lengths, True), False)
    assert {tile[0] for tile in tiles if tile[8] > 1} == cut
    for entry, *_, (begin, end), _, _, splits in tiles:
        assert splits == (used[entry] // (block_n * fixed) if entry in cut else 1)
        assert end - begin == (fixed if entry in cut else used[entry] // block_n)
    assert sum(tile[6] >= 0 for tile in tiles) <= most_slots
    always, _, all_slots = host.split_tiles(batch, 128, 1, 1, (*lengths, False), False)
    assert len(always) == heads_kv * sum(keys // (block_n * fixed) for keys in used)
    assert most_slots <= all_slots == heads_kv * len(used) * (max(used) // (block_n * fixed))
