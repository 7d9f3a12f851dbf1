"""attention/mask/mask_table.hpp: what lies where in the table of a mask, and how much memory it takes."""

from __future__ import annotations

import pytest
from problems import FULL, given, lengths, make_varlen_batch, ragged_batches, st

MOST_QUERIES = 192  # of a tile
tiles = st.tuples(st.sampled_from([32, 64, 128, 192]), st.sampled_from([16, 32, 64, 96, 128]))


def make_table(host, sizes, changes, tile, transposes, window=FULL, of_batch=None):
    return host.MaskTable(make_varlen_batch(host, sizes, window, of_batch), changes, *tile, transposes)


def table_bytes(host, sizes, **changes) -> int:
    return host.MaskTable.bytes_of(make_varlen_batch(host, sizes, FULL), changes)


@st.composite
def tables(draw):
    """(sizes, changes, tile, transposes) of batches that are dense or padded."""
    batch, heads_kv, group = (draw(st.integers(1, 3)) for _ in range(3))
    sizes = batch, heads_kv * group, heads_kv, draw(lengths), draw(lengths), 64
    changes = {"ranges": draw(st.integers(0, 4))}
    if draw(st.booleans()):
        changes["mask"] = tuple(draw(st.sampled_from([1, size])) for size in (sizes[0], sizes[1], sizes[3]))
    return sizes, changes, draw(tiles), draw(st.booleans())


def assert_apart(places) -> None:
    """Places of different values don't overlap, and are aligned to the kind's bytes."""
    end = 0
    for begin, size in sorted(set(places)):
        assert begin >= end
        end = begin + size


@given(tables())
def test_each_value_has_a_place_of_its_own(host, case):
    """Heads and entries share what is alike for them. Kernels read whole blocks, also past the last row."""
    sizes, changes, tile, transposes = case
    batch, heads, heads_kv, seqlen_q, seqlen_k, _ = sizes
    block_m, block_n = tile
    table = make_table(host, sizes, changes, tile, transposes)
    entries_of_mask, heads_of_mask, rows_of_mask = changes.get("mask", (1, 1, 1))
    per_head = heads_of_mask
    m_blocks, n_blocks = -(-seqlen_q // block_m), -(-seqlen_k // block_n)
    some_rows = sorted({0, seqlen_q // 2, seqlen_q - 1})
    entries, heads_of = range(batch), range(heads)

    ranges = {(b, row): table.ranges(b, 0, 0, row) for b in entries for row in range(seqlen_q)}
    groups = [ranges]
    for b in entries:
        for head in heads_of:
            assert all(table.ranges(b, head, 0, row) == ranges[b, row] for row in some_rows)
    count = max(1, changes["ranges"])
    assert {size for _, size in ranges.values()} == {8 * count}

    blocks = [(b, head, block) for b in entries for head in heads_of for block in range(m_blocks)]
    key_bits = {at: table.key_bits(*at[:2], at[2] * block_m) for at in blocks}
    visited = {at: table.visited(*at[:2], at[2] * block_m) for at in blocks}
    for found in (key_bits, visited):
        assert len(set(found.values())) == batch * m_blocks * per_head
        groups.append(found)
    assert {size for _, size in key_bits.values()} == {8 * -(-n_blocks // 32)}

    if transposes:
        of_keys = {
            (b, head, block): table.query_bits(b, head, block)
            for b in entries
            for head in range(heads_kv)
            for block in range(n_blocks)
        }
        assert len(set(of_keys.values())) == batch * n_blocks * (1 if per_head == 1 else heads_kv)
        assert {size for _, size in of_keys.values()} == {8 * -(-m_blocks // 32)}
        groups.append(of_keys)

    pairs = [(b, head, row) for b in entries for head in heads_of for row in range(seqlen_q)]
    last = (m_blocks * block_m - 1, batch - 1, heads - 1)
    if "mask" in changes:
        bits = {(b, head, row): table.bits(b, head, 0, row) for b, head, row in pairs}
        sees = {(b, head, row): table.sees(b, head, 0, row) for b, head, row in pairs}
        assert len(set(bits.values())) == entries_of_mask * heads_of_mask * rows_of_mask
        assert len(set(sees.values())) == batch * per_head * seqlen_q
        for begin, size in bits.values():
            assert begin % 16 == 0
            assert 8 * size >= n_blocks * block_n
        assert sum(table.bits(*last[1:], 0, last[0])) <= table.bytes
        groups += [bits, sees]
    else:
        assert table.bits(0, 0, 0, 0) == table.sees(0, 0, 0, 0) == (-1, 0)
    assert sum(table.ranges(*last[1:], 0, last[0])) <= table.bytes

    assert_apart([place for group in groups for place in group.values()])
    assert max(sum(place) for group in groups for place in group.values()) <= table.bytes


@given(ragged_batches(), tiles, st.integers(0, 4))
def test_tables_of_unequal_lengths(host, case, tile, ranges):
    """Packed or padded, with room for a whole tile of the last rows."""
    sizes, window, of_batch = case
    table = make_table(host, sizes, {"ranges": ranges}, tile, True, window, of_batch)
    batch = make_varlen_batch(host, sizes, window, of_batch)
    ranges_of, blocks, of_keys = [], [], []
    for b in range(sizes[0]):
        begin, _, used, _, mask = batch.sequence(b)
        ranges_of += [table.ranges(b, 0, begin, row) for row in range(used)]
        starts = range(0, used, tile[0])
        blocks += [table.key_bits(b, 0, m_begin) for m_begin in starts]
        of_keys += [table.query_bits(b, 0, n) for n in range(-(-mask.seqlen_k // tile[1]))]
        if used:
            assert sum(table.ranges(b, 0, begin, starts[-1] + tile[0] - 1)) <= table.bytes
    for places in (ranges_of, blocks, of_keys):
        assert len(set(places)) == len(places)
    assert_apart(ranges_of + blocks + of_keys)
    assert all(sum(place) <= table.bytes for place in ranges_of + blocks + of_keys)


@given(tables(), st.data())
def test_who_sees_a_key(host, case, data):
    """Kernels before and behind the main one find it where that one does, of this query and no other."""
    sizes, changes, tile, transposes = case
    table = make_table(host, sizes, changes, tile, transposes)
    b, head, row = (data.draw(st.integers(0, size - 1)) for size in (sizes[0], sizes[1], sizes[3]))
    others = [(b, head, other) for other in {0, row - 1, row + 1, sizes[3] - 1} - {row, -1, sizes[3]}]
    others += [(other, head, row) for other in range(sizes[0]) if other != b]
    per_head = changes.get("mask", (1, 1, 1))[1] > 1
    same = [(b, other, row) for other in range(sizes[1]) if other != head]
    for sees in (True, False):
        table.write(b, head, 0, row, sees)
        assert table.sees_any_key(b, head, row) == sees
        assert table.is_fully_masked(b, head, 0, row) == (not sees)
        for other in others:
            assert not table.sees_any_key(*other)
        for other in same:
            assert table.sees_any_key(*other) == (sees and not per_head)


@pytest.mark.parametrize("seqlen", [512, 4096, 16384])
@pytest.mark.parametrize("mask", [(2, 16, None), (1, 1, None), (2, 1, None), (1, 16, None)])
def test_a_mask_of_pairs_takes_a_bit_a_pair(host, mask, seqlen):
    """And an eighth more at most, beside what a window's table takes and a tile's last rows."""
    mask = (*mask[:2], seqlen)
    sizes = 2, 16, 4, seqlen, seqlen, 128
    more = table_bytes(host, sizes, mask=mask) - table_bytes(host, sizes, ranges=1)
    entries, heads, rows = mask
    bits = entries * heads * rows * seqlen // 8
    assert bits <= more - MOST_QUERIES * seqlen // 8 <= 1.125 * bits + 2 * 16 * seqlen


@pytest.mark.parametrize("seqlen", [512, 4096, 16384])
def test_a_mask_of_one_row_takes_little(host, seqlen):
    """Of its keys, whatever the queries: a small part of what as many rows take."""
    sizes = 2, 16, 4, seqlen, seqlen, 128
    nothing = table_bytes(host, sizes, ranges=1)
    whole = table_bytes(host, sizes, mask=(2, 16, seqlen)) - nothing
    of_keys = table_bytes(host, sizes, mask=(2, 1, 1)) - nothing
    assert of_keys <= (MOST_QUERIES + 2) * seqlen // 8 + 2 * seqlen + 16 + MOST_QUERIES
    assert table_bytes(host, sizes, mask=(1, 1, 1)) - nothing <= of_keys
    assert 20 * of_keys <= whole


@pytest.mark.parametrize(("heads", "rows"), [(1, 1), (1, 4096), (16, 4096)])
def test_a_mask_of_one_entry_takes_no_more_for_more_sequences(host, heads, rows):
    """But for what each query and each block of them has: no bits of pairs."""

    def more(batch):
        sizes = batch, 16, 4, 4096, 4096, 128
        return table_bytes(host, sizes, mask=(1, heads, rows)) - table_bytes(host, sizes, ranges=1)

    blocks = heads * 4096 // 128  # of a sequence: bits of blocks, how many of them
    assert more(8) - more(1) <= 7 * (heads * 4096 + blocks * (8 + 4)) + 64
