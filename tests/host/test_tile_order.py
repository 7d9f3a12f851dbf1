"""scheduler/tile_order.hpp, static_scheduler.hpp: every tile once, long ones first, in sections for L2."""

from __future__ import annotations

from collections import Counter

from problems import assume, blocks, given, lengths, limits, make_mask, shapes, st

cache_sizes = st.sampled_from([0, 2**16, 2**20, 2**24, 2**26])
sections = st.sampled_from([0, 1, 132, 264, 2**20])
widths_of_v = st.sampled_from([8, 64, 256])


def make_order(host, shape, left, right, block_m, l2_bytes, section_tiles, groups=1, pack=False):
    batch, heads_kv, group, seqlen_q, seqlen_k, *head_dims = shape
    mask = make_mask(host, seqlen_q, seqlen_k, left, right)
    sizes = batch, heads_kv * group, heads_kv, seqlen_q, seqlen_k, *head_dims
    packed = -(-group // -(-group // (block_m // groups))) if pack else 1  # in equal parts
    order = host.TileOrder(sizes, mask, block_m, groups, packed, l2_bytes, section_tiles)
    return order, mask, [order(index) for index in range(order.tiles())]


@given(
    st.tuples(
        st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.integers(1, 90), lengths, st.just(64)
    ),
    limits,
    limits,
    st.sampled_from([(64, 1), (128, 2), (48, 3)]),
    cache_sizes,
    st.booleans(),
)
def test_tile_order_visits_every_row_once(host, shape, left, right, tile, l2_bytes, pack):
    """Every query of every head is a row of a tile, whose keys are those of its head; where heads are packed
    in parts that overlap, of two tiles."""
    batch, heads_kv, group, seqlen_q, *_ = shape
    block_m, groups = tile
    order, _, tiles = make_order(host, shape, left, right, block_m, l2_bytes, 1, groups, pack)
    rows_of_groups = [(group, row) for group in range(groups) for row in range(block_m // groups)]
    places = [place for group, row in rows_of_groups if (place := order.row(group, row))]
    rows = []
    for m_begin, head, head_kv, entry in tiles:
        for query, packed_head in places:
            assert (head + packed_head) // group == head_kv
            if m_begin + query < seqlen_q:
                rows.append((m_begin + query, head + packed_head, entry))
    expected = {(m, h, b) for m in range(seqlen_q) for h in range(heads_kv * group) for b in range(batch)}
    assert set(rows) == expected
    packs_fit = not pack or group % -(-group // -(-group // (block_m // groups))) == 0
    assert len(rows) == len(expected) or not packs_fit
    assert max(Counter(rows).values()) <= 2


@given(shapes, blocks, cache_sizes, sections, st.integers(1, 140))
def test_blocks_share_the_tiles_out(host, shape, block_m, l2_bytes, section_tiles, wanted):
    """Every tile is in the stream of one thread block, and no stream is longer than another by more than
    one."""
    order, _, tiles = make_order(host, shape, None, 0, block_m, l2_bytes, section_tiles)
    count = min(wanted, len(tiles))
    streams = [order.stream(block, count) for block in range(count)]
    assert sorted(tile for stream in streams for tile in stream) == sorted((m, h, b) for m, h, _, b in tiles)
    lengths = [len(stream) for stream in streams]
    assert max(lengths) - min(lengths) <= 1


@given(shapes, blocks, cache_sizes, sections)
def test_causal_tiles_come_longest_first(host, shape, block_m, l2_bytes, section_tiles):
    """Within a section, whose K and V share L2, no tile is longer than the one before it."""
    order, mask, tiles = make_order(host, shape, None, 0, block_m, l2_bytes, section_tiles)
    m_blocks = len({m for m, *_ in tiles})
    lengths = [end - begin for begin, end in (mask.visited(m, block_m, 1) for m, *_ in tiles)]
    section = order.section * m_blocks
    for begin in range(0, len(lengths), section):
        part = lengths[begin : begin + section]
        assert part == sorted(part, reverse=True)


@given(shapes, widths_of_v, blocks, cache_sizes, sections)
def test_sections_fit_the_cache(host, shape, head_dim_v, block_m, l2_bytes, section_tiles):
    """A section has as many tiles as asked for and K and V that fill half of L2, at most, unless it is of one
    head of K and V; groups stay whole."""
    batch, heads_kv, group, seqlen_q, seqlen_k, head_dim = shape
    order, _, _ = make_order(host, (*shape, head_dim_v), None, None, block_m, l2_bytes, section_tiles)
    kv_heads = -(-order.section // group)
    assert order.section % group == 0 or order.section == batch * heads_kv * group
    assert kv_heads == 1 or kv_heads * 2 * seqlen_k * (head_dim + head_dim_v) <= l2_bytes / 2
    assert kv_heads == 1 or order.section * -(-seqlen_q // block_m) <= section_tiles


@given(shapes, widths_of_v, blocks, cache_sizes, sections, st.integers(0, 40))
def test_behind_a_window_sections_are_what_the_cache_holds(
    host, shape, head_dim_v, block_m, l2_bytes, section_tiles, left
):
    """Where no tile sees 3/5 of the keys, a section has all the heads whose visible keys fill half of L2."""
    batch, heads_kv, group, _, seqlen_k, head_dim = shape
    shape = *shape, head_dim_v
    order, mask, tiles = make_order(host, shape, left, 0, block_m, l2_bytes, section_tiles)
    lengths = [end - begin for begin, end in (mask.visited(m, block_m, 1) for m, *_ in tiles)]
    assume(0 < max(lengths) == lengths[0] and 5 * max(lengths) < 3 * seqlen_k)
    in_l2 = l2_bytes // 2 // (2 * max(lengths) * (head_dim + head_dim_v))
    assert order.section == min(batch * heads_kv * group, max(1, in_l2) * group)
