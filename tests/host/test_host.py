"""Masks, tile orders, tile tables and the dispatcher, in C++ without a GPU, against brute force."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from cases import Mask

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
from hypothesis import assume, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

settings.register_profile("flash_cute", deadline=None, max_examples=200)
settings.load_profile("flash_cute")

UNLIMITED = 2**62
LONGEST = 2**28  # the longest sequence that validation lets through

lengths = st.integers(1, 300)
limits = st.none() | st.integers(0, 330)
blocks = st.sampled_from([1, 16, 48, 64, 80, 128])
masks = st.tuples(lengths, lengths, limits, limits)


def make_mask(host, seqlen_q, seqlen_k, left, right):
    return host.WindowMask(
        seqlen_q, seqlen_k, *(UNLIMITED if side is None else side for side in (left, right))
    )


def visible_pairs(seqlen_q, seqlen_k, left, right) -> torch.Tensor:
    return Mask(window=(left, right)).visible(seqlen_q, seqlen_k)


@given(
    st.tuples(
        st.integers(1, 60), st.integers(1, 60), st.none() | st.integers(0, 70), st.none() | st.integers(0, 70)
    )
)
def test_visible_is_the_definition(host, case):
    mask, expected = make_mask(host, *case), visible_pairs(*case)
    rows, keys = expected.shape
    assert [[mask.visible(row, key) for key in range(keys)] for row in range(rows)] == expected.tolist()


@given(masks, blocks, blocks)
def test_block_ranges_are_tight(host, case, block_m, block_n):
    """visited: the blocks with a visible pair. unmasked: exactly the blocks without a hidden one."""
    mask, expected = make_mask(host, *case), visible_pairs(*case)
    for m_begin in range(0, len(expected), block_m):
        columns = expected[m_begin : m_begin + block_m].split(block_n, dim=1)
        seen = [block for block, pairs in enumerate(columns) if pairs.any()]
        whole = [block for block, pairs in enumerate(columns) if pairs.all() and pairs.shape[1] == block_n]
        begin, end = mask.visited(m_begin, block_m, block_n)
        assert list(range(begin, end)) == seen
        begin, end = mask.unmasked(m_begin, block_m, block_n)
        assert list(range(begin, end)) == whole


@given(masks)
def test_reachable_keys_and_pairs(host, case):
    mask, expected = make_mask(host, *case), visible_pairs(*case)
    reachable = expected.any(0).nonzero().flatten().tolist()
    assert mask.first_reachable_key() == (reachable[0] if reachable else expected.shape[1])
    assert mask.visible_pairs() == expected.sum().item()


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


shapes = st.tuples(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), lengths, lengths, st.sampled_from([8, 64, 256])
)
cache_sizes = st.sampled_from([0, 2**16, 2**20, 2**24, 2**26])
sections = st.sampled_from([0, 1, 132, 264, 2**20])


def make_order(host, shape, left, right, block_m, l2_bytes, section_tiles, groups=1, pack=False):
    batch, heads_kv, group, seqlen_q, seqlen_k, head_dim = shape
    mask = make_mask(host, seqlen_q, seqlen_k, left, right)
    sizes = batch, heads_kv * group, heads_kv, seqlen_q, seqlen_k, head_dim
    packed = -(-group // -(-group // (block_m // groups))) if pack else 1  # in equal parts
    order = host.TileOrder(sizes, mask, block_m, groups, packed, 2, l2_bytes, section_tiles)
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


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_divisor(host, value, number):
    divisor = host.Divisor(value)
    for dividend in {number, 0, value - 1, value, 2**31 - 1, number // value * value}:
        if dividend < 2**31:
            assert (divisor.quotient(dividend), divisor.remainder(dividend)) == divmod(dividend, value)


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


@given(shapes, blocks, cache_sizes, sections)
def test_sections_fit_the_cache(host, shape, block_m, l2_bytes, section_tiles):
    """A section has as many tiles as asked for and K and V that fill half of L2, at most, unless it is of one
    head of K and V; groups stay whole."""
    batch, heads_kv, group, seqlen_q, seqlen_k, head_dim = shape
    order, _, _ = make_order(host, shape, None, None, block_m, l2_bytes, section_tiles)
    kv_heads = -(-order.section // group)
    assert order.section % group == 0 or order.section == batch * heads_kv * group
    assert kv_heads == 1 or kv_heads * 2 * 2 * seqlen_k * head_dim <= l2_bytes / 2
    assert kv_heads == 1 or order.section * -(-seqlen_q // block_m) <= section_tiles


@given(shapes, blocks, cache_sizes, sections, st.integers(0, 40))
def test_behind_a_window_sections_are_what_the_cache_holds(
    host, shape, block_m, l2_bytes, section_tiles, left
):
    """Where no tile sees 3/5 of the keys, a section has all the heads whose visible keys fill half of L2."""
    batch, heads_kv, group, _, seqlen_k, head_dim = shape
    order, mask, tiles = make_order(host, shape, left, 0, block_m, l2_bytes, section_tiles)
    lengths = [end - begin for begin, end in (mask.visited(m, block_m, 1) for m, *_ in tiles)]
    assume(0 < max(lengths) == lengths[0] and 5 * max(lengths) < 3 * seqlen_k)
    in_l2 = l2_bytes // 2 // (2 * 2 * max(lengths) * head_dim)
    assert order.section == min(batch * heads_kv * group, max(1, in_l2) * group)


def test_every_instance_has_a_tile(host):
    instances = host.instances()
    for family in instances.families:
        for head_dim in instances.head_dims:
            main, small = host.forward_tiles(getattr(host.Family, family), head_dim)
            assert main.warps > 0, f"{family} has no tile for head_dim {head_dim}"
            for tile in [main, small] if small.warps else [main]:
                assert tile.stages >= 1
                assert tile.block_m % 16 == 0
                assert tile.block_n % 16 == 0
            assert small.block_m < main.block_m


def test_a_head_dim_without_a_row_has_no_tile(host):
    assert host.forward_tiles(host.Family.sm80, 72)[0].warps == 0


def test_instances_are_well_formed(host):
    """Each axis has names, without duplicates, and the head dims end with the largest that is promised."""
    instances = host.instances()
    for axis in (instances.families, instances.elements, instances.head_dims):
        assert axis
        assert len(set(axis)) == len(axis)
    assert all(head_dim % 8 == 0 and head_dim <= 256 for head_dim in instances.head_dims)
    assert max(instances.head_dims) == 256


# What tests/host/flash_cute/compiled.def lists.
COMPILED = {
    ("sm80", "fp16"): [64, 128, 256],
    ("sm80", "bf16"): [96],
    ("sm90", "fp16"): [],
    ("sm90", "bf16"): [64, 192],
}


@pytest.mark.parametrize(("family", "element"), COMPILED)
def test_dispatch_takes_the_smallest_kernel_that_fits(host, family, element):
    for head_dim in range(1, 300):
        fitting = [size for size in COMPILED[family, element] if size >= head_dim]
        chosen = host.bucket(getattr(host.Family, family), getattr(host.ElementType, element), head_dim)
        assert chosen == (min(fitting) if fitting else 0)
