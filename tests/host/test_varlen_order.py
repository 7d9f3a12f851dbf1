"""scheduler/varlen_order.hpp: tiles of sequences of unequal lengths, and where they lie."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

from problems import given, make_varlen_batch, ragged_batches, st


@st.composite
def ragged_tiles(draw, host):
    """A batch, its list of sequences in any order, and the order over it: (sizes, batch, entries, order)."""
    sizes, window, lengths = draw(ragged_batches())
    batch = make_varlen_batch(host, sizes, window, lengths)
    block_m, groups = draw(st.sampled_from([(16, 1), (64, 1), (32, 2), (48, 3)]))
    group = sizes[1] // sizes[2]
    packed = -(-group // -(-group // (block_m // groups))) if draw(st.booleans()) else 1
    queries = block_m // groups // packed * groups
    used = [batch.sequence(index)[2] for index in range(sizes[0])]
    assert sum(-(-count // queries) for count in used) <= batch.m_block_capacity(block_m, groups, packed)
    listed = draw(st.permutations([index for index in range(sizes[0]) if used[index]]))
    # q and out lie alike or not, and between two entries may be more than their rows
    sizes_of = sizes[3], sizes[4], sizes[4], sizes[3]
    entries = [0 if lengths[0] else size + draw(st.integers(0, 20)) for size in sizes_of]
    tile = block_m, groups, packed
    section_tiles = draw(st.sampled_from([1, 2, 7, 132]))
    return sizes, batch, tile, entries, host.VarlenTiles(batch, *tile, section_tiles, entries, listed)


@given(st.data())
def test_ragged_order_visits_every_row_once(host, data):
    """Every query that counts, of every head, is a row of one tile; in packs that overlap, of two."""
    sizes, batch, (block_m, groups, packed), _, order = data.draw(ragged_tiles(host))
    group = sizes[1] // sizes[2]
    places = [
        place for g in range(groups) for row in range(block_m // groups) if (place := order.row(g, row))
    ]
    rows = []
    for index in range(order.tiles()):
        m_begin, head, head_kv, entry = order(index)
        begin, _, used, first_key, mask = batch.sequence(entry)
        assert order.begins(index) == (begin, first_key)
        assert (order.mask(index).seqlen_q, order.mask(index).seqlen_k) == (used, mask.seqlen_k)
        for query, packed_head in places:
            assert (head + packed_head) // group == head_kv
            if m_begin + query < used:
                rows.append((entry, m_begin + query, head + packed_head))
    expected = {
        (b, m, h) for b in range(sizes[0]) for m in range(batch.sequence(b)[2]) for h in range(sizes[1])
    }
    assert set(rows) == expected
    assert len(rows) == len(expected) or group % packed
    assert max(Counter(rows).values(), default=1) <= 2


@given(st.data())
def test_sequences_of_the_list_stay_together(host, data):
    *_, order = data.draw(ragged_tiles(host))
    sequences = [order(index)[3] for index in range(order.tiles())]
    assert len([sequence for sequence, _ in groupby(sequences)]) == len(set(sequences))


@given(st.data())
def test_places_clip_at_the_end_of_a_sequence(host, data):
    """A tensor map clips the coordinates that are `bound` or more: those of rows past the end, and no others.
    The two coordinates of a row, and that of the dimension that wraps around, add up to its address."""
    bound, row_bytes = host.MAP_BOUND, data.draw(st.integers(1, 2**20)) * 16
    sizes, batch, (block_m, *_), entries, order = data.draw(ragged_tiles(host))
    for index in range(order.tiles()):
        *_, entry = order(index)
        begin, _, used, first_key, mask = batch.sequence(entry)
        sides = {"q": (begin, used), "out": (begin, used), "k": (first_key, mask.seqlen_k)}
        sides["v"] = sides["k"]
        rows_of = {"q": sizes[3], "k": sizes[4], "v": sizes[4], "out": sizes[3]}
        for (name, rows), rows_of_entry in zip(rows_of.items(), entries, strict=True):
            first, length = sides[name]
            shift, plane = getattr(order, f"coord_{name}")(index)
            assert shift >= 0
            assert 0 <= plane <= (sizes[0] - 1) * rows_of_entry + rows
            for row in {*range(length), length, length + block_m}:
                assert (shift + row < bound) == (row < length)
                address = (shift + row + plane) * row_bytes + bound * (host.MAP_WRAP - row_bytes)
                assert address % 2**64 == (entry * rows_of_entry + first + row) * row_bytes


@given(st.data())
def test_lse_of_ragged_tiles(host, data):
    sizes, batch, _, entries, order = data.draw(ragged_tiles(host))
    packed = entries[0] == 0
    for index in range(order.tiles()):
        _, head, _, entry = order(index)
        lse_entry = 0 if packed else entry
        expected = (lse_entry * sizes[1] + head) * sizes[3] + batch.sequence(entry)[0]
        assert order.lse_offset(index) == expected
