"""scheduler/split_order.hpp: sequences that are cut into parts of their keys."""

from __future__ import annotations

from itertools import groupby, pairwise

from problems import given, make_varlen_batch, ragged_batches, st


@given(st.data())
def test_parts_have_every_visible_key_once(host, data):
    """Parts of a tile follow each other without gaps; few tiles have slots, and these are the first ones."""
    sizes, window, lengths = data.draw(ragged_batches())
    batch = make_varlen_batch(host, sizes, window, lengths)
    block_n, wanted = data.draw(st.sampled_from([16, 64])), data.draw(st.sampled_from([1, 8, 132]))
    least, fixed = data.draw(st.sampled_from([1, 4])), data.draw(st.sampled_from([0, 0, 1, 3]))
    is_uniform = not any(lengths)
    tiles, capacity = host.split_tiles(batch, 16, 1, 1, (block_n, wanted, least, fixed), is_uniform)
    slots = [tile[6] for tile in tiles]
    cut = sum(slot >= 0 for slot in slots)
    assert slots == [*range(cut), *[-1] * (len(tiles) - cut)]
    assert fixed or cut < 2 * wanted or cut == 0
    assert len(tiles) <= capacity * sizes[1]
    by_tile = sorted(tiles, key=lambda tile: (tile[:3], tile[7]))
    for _, parts in groupby(by_tile, key=lambda tile: tile[:3]):
        parts = list(parts)
        assert [part[7:] for part in parts] == [(number, len(parts)) for number in range(len(parts))]
        blocks = [part[5] for part in parts]
        assert all(before[1] == after[0] for before, after in pairwise(blocks))
        if fixed:
            assert all(begin % fixed == 0 for begin, _ in blocks)
        entry, _, m_begin, first_key, keys, *_ = parts[0]
        mask = batch.sequence(entry)[4]
        assert keys == mask.seqlen_k
        seen = mask.visited(m_begin, 16, 1)
        if seen[0] < seen[1]:
            assert blocks[0][0] * block_n <= first_key + seen[0]
            assert first_key + seen[1] <= blocks[-1][1] * block_n
    counted = {tile[0] for tile in tiles}
    assert counted == {b for b in range(sizes[0]) if batch.sequence(b)[2] > 0}
