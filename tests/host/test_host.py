"""Masks, tile orders, tile tables and the dispatcher, in C++ without a GPU, against brute force."""

from __future__ import annotations

import math
from collections import Counter
from itertools import accumulate, groupby, pairwise

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


def assert_tight(visible, tile, block, visited, unmasked) -> None:
    """visited: the blocks with a visible pair. unmasked: exactly the blocks without a hidden one.

    Both are asked for the begin of each tile of `tile` rows of visible, and count blocks of its columns.
    """
    for begin in range(0, len(visible), tile):
        columns = visible[begin : begin + tile].split(block, dim=1)
        seen = [index for index, pairs in enumerate(columns) if pairs.any()]
        whole = [index for index, pairs in enumerate(columns) if pairs.all() and pairs.shape[1] == block]
        assert list(range(*visited(begin, tile, block))) == seen
        assert list(range(*unmasked(begin, tile, block))) == whole


@given(masks, blocks, blocks)
def test_block_ranges_are_tight(host, case, block_m, block_n):
    mask = make_mask(host, *case)
    assert_tight(visible_pairs(*case), block_m, block_n, mask.visited, mask.unmasked)


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


@given(masks, blocks)
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
    assert_tight(visible_pairs(*case).T, block_n, block_m, mask.visited_rows, mask.unmasked_rows)


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
    forward, backward = pairs(mask.unmasked, mask.unmasked_rows)
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


def make_varlen_batch(host, sizes, window, lengths):
    return host.VarlenBatch(sizes, make_mask(host, *sizes[3:5], *window), lengths)


def rows_of_sequence(sizes, lengths, index):
    """Its rows of q, and of them and of k those that count, as ranges."""
    ranges = []
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


@given(st.one_of(ragged_batches(), ragged_batches(garbage=True)))
def test_sequence(host, case):
    """Its rows, those that count, and what they see of each other; never a row outside of the tensors."""
    sizes, window, lengths = case
    batch = make_varlen_batch(host, *case)
    for index in range(sizes[0]):
        owned, queries, keys = rows_of_sequence(sizes, lengths, index)
        begin, end, used, first_key, mask = batch.sequence(index)
        assert (begin, end, used) == (owned.start, owned.stop, len(queries))
        assert 0 <= begin <= begin + used <= end <= sizes[3]
        assert 0 <= first_key <= first_key + mask.seqlen_k <= sizes[4]

        seen = visible_pairs(len(queries), len(keys), *window)
        reachable = seen.any(0).nonzero().flatten().tolist() if len(queries) else []
        expected = keys[reachable[0] :] if reachable else keys[len(keys) :]
        if reachable or not len(keys):
            assert range(first_key, first_key + mask.seqlen_k) == expected
        assert mask.seqlen_q == len(queries)
        ours = {
            (row, first_key + key)
            for row in range(mask.seqlen_q)
            for key in range(mask.seqlen_k)
            if mask.visible(row, key)
        }
        assert ours == {(row, keys[key]) for row, key in seen.nonzero().tolist()}


@given(ragged_batches())
def test_offsets_that_make_sense_share_no_row(host, case):
    batch = make_varlen_batch(host, *case)
    if case[2][0]:
        rows = [row for b in range(case[0][0]) for row in range(*batch.sequence(b)[:2])]
        assert len(rows) == len(set(rows))


@given(ragged_batches(), st.integers(1, 9))
def test_unwritten_rows(host, case, parts):
    """The parts are every row that is no query that counts, each row once."""
    sizes, _, lengths = case
    batch = make_varlen_batch(host, *case)
    packed = lengths[0] is not None
    every = {(entry, row) for entry in range(1 if packed else sizes[0]) for row in range(sizes[3])}
    for index in range(sizes[0]):
        begin, _, used, *_ = batch.sequence(index)
        every -= {(0 if packed else index, row) for row in range(begin, begin + used)}
    found = [
        (entry, row)
        for part in range(parts)
        for entry, begin, end in batch.unwritten(part, parts)
        for row in range(begin, end)
    ]
    assert sorted(found) == sorted(every)


@given(ragged_batches(garbage=True), st.integers(1, 9))
def test_unwritten_rows_stay_inside(host, case, parts):
    sizes, _, lengths = case
    batch = make_varlen_batch(host, *case)
    for part in range(parts):
        for entry, begin, end in batch.unwritten(part, parts):
            assert 0 <= entry < (1 if lengths[0] is not None else sizes[0])
            assert 0 <= begin < end <= sizes[3]


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


def test_every_instance_has_a_tile(host):
    for direction, family, head_dim, _ in host.instances():
        if direction == host.Pass.backward:
            assert host.backward_tiles(family, head_dim), f"{family} has no tile for head_dim {head_dim}"
            continue
        main, small = host.forward_tiles(family, head_dim)
        assert main.warps > 0, f"{family} has no tile for head_dim {head_dim}"
        for tile in [main, small] if small.warps else [main]:
            assert tile.stages >= 1
            assert tile.block_m % 16 == 0
            assert tile.block_n % 16 == 0
        assert small.block_m < main.block_m


def test_a_head_dim_without_a_row_has_no_tile(host):
    assert host.forward_tiles(host.Family.sm80, 72)[0].warps == 0


def test_instances_are_well_formed(host):
    """No row is there twice, and each pass of each family has the largest head dim that is promised."""
    rows = host.instances()
    assert len(set(rows)) == len(rows)
    for direction in (host.Pass.forward, host.Pass.backward):
        for family in (host.Family.sm80, host.Family.sm90):
            head_dims = [row[2] for row in rows if row[:2] == (direction, family)]
            assert all(head_dim % 8 == 0 for head_dim in head_dims)
            assert max(head_dims) == 256


# What tests/host/flash_cute/compiled.def lists.
COMPILED = {
    ("forward", "sm80", "fp16"): [64, 128, 256],
    ("backward", "sm80", "fp16"): [128],
    ("forward", "sm80", "bf16"): [96],
    ("backward", "sm80", "bf16"): [],
    ("forward", "sm90", "fp16"): [],
    ("forward", "sm90", "bf16"): [64, 192],
    ("backward", "sm90", "bf16"): [64, 96],
}


@pytest.mark.parametrize(("direction", "family", "element"), COMPILED)
def test_dispatch_takes_the_smallest_kernel_that_fits(host, direction, family, element):
    names = {host.Pass: direction, host.Family: family, host.ElementType: element}
    values = [getattr(enum, name) for enum, name in names.items()]
    for head_dim in range(1, 300):
        fitting = [size for size in COMPILED[direction, family, element] if size >= head_dim]
        assert host.bucket(*values, head_dim) == (min(fitting) if fitting else 0)


# What a call runs. An H200, as it says itself.
MULTIPROCESSORS, L2_BYTES = 132, 60 << 20


def plan(host, family, head_dim, sizes, window=(None, None), lengths=None):
    batch = make_varlen_batch(host, sizes, window, lengths or [None] * 5)
    return host.plan_forward(getattr(host.Family, family), head_dim, batch, MULTIPROCESSORS, L2_BYTES)


CAUSAL = None, 0
FULL = None, None


@pytest.mark.parametrize(
    ("head_dim", "seqlen", "window", "tile"),
    [
        (64, 8192, (None, None), (192, 128)),
        (64, 512, CAUSAL, (128, 128)),
        (128, 8192, (None, None), (192, 64)),
        (128, 2048, CAUSAL, (128, 128)),
        (256, 2048, CAUSAL, (128, 64)),
    ],
)
def test_the_tile_is_that_of_least_work(host, head_dim, seqlen, window, tile):
    chosen = plan(host, "sm90", head_dim, (16384 // seqlen, 16, 16, seqlen, seqlen, head_dim), window).tile
    assert (chosen.block_m, chosen.block_n) == tile


@pytest.mark.parametrize(
    ("lengths", "block_m"),
    [
        ([756] * 65, 128),  # the mean is known, and it may be that of all
        ([256] * 32 + [32768] + [256] * 32, 192),  # they differ, as 65 does not divide the rows
        ([100, 157] * 32, 128),
    ],
    ids=["alike", "one is long", "short"],
)
def test_the_tile_of_unequal_lengths(host, lengths, block_m):
    offsets = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
    sizes = (len(lengths), 32, 32, offsets[-1], offsets[-1], 64)
    assert plan(host, "sm90", 64, sizes, CAUSAL, [offsets, offsets, None, None, None]).tile.block_m == block_m


@pytest.mark.parametrize(("group", "packed"), [(1, 1), (4, 4), (64, 64), (65, 33), (256, 64)])
def test_heads_are_packed_where_queries_are_few(host, group, packed):
    assert plan(host, "sm90", 128, (16, group, 1, 1, 8192, 128)).packed_heads == packed
    assert plan(host, "sm90", 128, (16, group, 1, 8192, 8192, 128)).packed_heads == 1
    assert plan(host, "sm80", 128, (16, group, 1, 1, 8192, 128)).packed_heads == 1


@given(shapes, st.sampled_from(["sm80", "sm90"]), st.sampled_from([64, 96, 128, 192, 256]))
def test_grids(host, shape, family, head_dim):
    """Every tile has a block, and on sm90 none is started that another round would not need."""
    batch, heads_kv, group, seqlen_q, seqlen_k, _ = shape
    sizes = batch, heads_kv * group, heads_kv, seqlen_q, seqlen_k, head_dim
    chosen = plan(host, family, head_dim, sizes, CAUSAL)
    blocks = -(-seqlen_q // chosen.tile_queries) * batch * heads_kv * -(-group // chosen.packed_heads)
    assert chosen.workspace_bytes == 0
    if family == "sm80":
        assert chosen.blocks == blocks
    else:
        rounds = -(-blocks // chosen.blocks)
        assert chosen.blocks <= MULTIPROCESSORS
        assert rounds == -(-blocks // MULTIPROCESSORS)


@pytest.mark.parametrize(
    ("head_dim", "heads", "seqlen", "window", "dynamic"),
    [
        (64, 32, 8192, CAUSAL, True),
        (128, 16, 8192, CAUSAL, True),
        (256, 8, 8192, CAUSAL, True),
        (128, 16, 8192, FULL, False),  # alike
        (128, 16, 1024, CAUSAL, True),
        (128, 16, 512, CAUSAL, False),  # short
        (128, 16, 8192, (1024, 0), False),  # nearly alike
        (128, 1, 8192, CAUSAL, False),  # one tile a multiprocessor
    ],
)
def test_long_tiles_of_unequal_length_are_scheduled_dynamically(
    host, head_dim, heads, seqlen, window, dynamic
):
    sizes = (16384 // seqlen, heads, heads, seqlen, seqlen, head_dim)
    chosen = plan(host, "sm90", head_dim, sizes, window)
    assert chosen.dynamic == dynamic
    assert chosen.workspace_bytes == 4 * dynamic
    assert not dynamic or chosen.blocks == MULTIPROCESSORS
    assert not plan(host, "sm80", head_dim, sizes, window).dynamic


@pytest.mark.parametrize(
    ("heads", "sections"), [(4, [1, 3]), (16, [2] * 5 + [6]), (2, [2])], ids=["three rounds", "many", "two"]
)
def test_sections_of_dynamic_tiles(host, heads, sections):
    """Tiles of a section come longest first; the last one's are two or three rounds."""
    order = plan(host, "sm90", 128, (1, heads, heads, 16384, 16384, 128), CAUSAL).order
    starts = [order(index)[0] for index in range(order.tiles())]
    rises = [0, *(i for i in range(1, len(starts)) if starts[i] > starts[i - 1]), len(starts)]
    assert [(end - begin) * heads // len(starts) for begin, end in pairwise(rises)] == sections


@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(4000, 9000),
    st.sampled_from([64, 96, 128, 192, 256]),
)
def test_dynamic_tiles_are_all_tiles(host, batch, heads_kv, group, seqlen, head_dim):
    sizes = (batch, heads_kv * group, heads_kv, seqlen, seqlen, head_dim)
    chosen = plan(host, "sm90", head_dim, sizes, CAUSAL)
    tiles = [chosen.order(index) for index in range(chosen.order.tiles())]
    starts = range(0, seqlen, chosen.tile_queries)
    heads = [(head, head // group) for head in range(heads_kv * group)]
    assert sorted(tiles) == sorted((m, *head, b) for m in starts for head in heads for b in range(batch))
    assert chosen.dynamic == (len(tiles) > MULTIPROCESSORS)


@given(st.data(), st.sampled_from(["sm80", "sm90"]))
def test_plans_of_unequal_lengths(host, data, family):
    """Room for every tile there can be, whatever the lengths; the tile is the mean's if they may be alike."""
    sizes, window, lengths = data.draw(ragged_batches())
    assume(any(lengths))
    chosen = plan(host, family, 128, (*sizes[:5], 128), window, lengths)
    batch = make_varlen_batch(host, sizes, window, lengths)
    places = sum(-(-batch.sequence(b)[2] // chosen.tile_queries) for b in range(sizes[0]))
    tiles = places * sizes[2] * -(-(sizes[1] // sizes[2]) // chosen.packed_heads)
    assert chosen.blocks >= (tiles if family == "sm80" else min(tiles, MULTIPROCESSORS))
    assert chosen.prepares == (family == "sm80")
    dynamic = 4 if tiles > chosen.blocks else 0  # a counter
    assert chosen.workspace_bytes >= (16 + 32 * places if chosen.prepares else dynamic)
    if family == "sm90" and lengths[0] and sizes[3] % sizes[0] == 0:
        mean = [max(1, -(-rows // sizes[0])) for rows in sizes[3:5]]
        assert chosen.tile.block_m == plan(host, family, 128, (*sizes[:3], *mean, 128), window).tile.block_m


@pytest.mark.parametrize("more", [0, 1])
def test_many_sequences_are_listed_by_a_kernel_before(host, more):
    batch = host.FEW_SEQUENCES + more
    offsets = list(range(batch + 1))
    chosen = plan(
        host, "sm90", 128, (batch, 2, 2, batch, batch, 128), CAUSAL, [offsets, offsets, None, None, None]
    )
    assert chosen.prepares == bool(more)
    assert (chosen.workspace_bytes >= 16 + 32 * batch) == bool(more)


@given(st.one_of(ragged_batches(), ragged_batches(garbage=True)), st.sampled_from([1, 8, 64]), st.booleans())
def test_places_of_blocks(host, case, block, of_queries):
    """Each sequence's blocks have places of their own, and a place knows its sequence; never one past all."""
    sizes, _, lengths = case
    places = host.BatchBlocks(make_varlen_batch(host, *case), of_queries, block)
    offsets = lengths[0 if of_queries else 1]
    in_order = not offsets or offsets == sorted(offsets)
    taken = set()
    for index in range(sizes[0]):
        owned = rows_of_sequence(sizes, (lengths[0], lengths[1], None, None, None), index)[
            0 if of_queries else 2
        ]
        if of_queries:  # of the keys, owned are those that count
            assert places.owned(index) == (owned.start, owned.stop)
        blocks = range(places.first(index), places.first(index) + -(-len(owned) // block))
        assert 0 <= blocks.start <= blocks.stop <= places.count()
        if in_order:
            assert not taken & set(blocks)
            taken |= set(blocks)
            assert all(places.sequence(place) == index for place in blocks)
    assert all(0 <= places.sequence(place) < sizes[0] for place in range(places.count()))


# The shared memory of a thread block on GPUs of 9.0, 8.0, and 8.6.
HOPPER, A100, ADA = 232448, 166912, 101376
HOPPERS = 132  # multiprocessors
FEW = 4  # so few that query heads of a group stay together
KEPT_TILE = 128  # of shared memory, beside what tiles ask for


def plan_backward(
    host,
    head_dim,
    sizes,
    smem_bytes=HOPPER,
    lengths=None,
    asked_for=(True, True, False),
    family="sm80",
    window=CAUSAL,
    multiprocessors=HOPPERS,
):
    batch = make_varlen_batch(host, sizes, window, lengths or [None] * 5)
    return host.plan_backward(
        getattr(host.Family, family), head_dim, batch, smem_bytes, *asked_for, multiprocessors
    )


@pytest.mark.parametrize("smem_bytes", [HOPPER, A100, ADA])
def test_tiles_of_the_backward_fit(host, smem_bytes):
    for direction, family, head_dim, _ in host.instances():
        if (direction, family) != (host.Pass.backward, host.Family.sm80):
            continue
        tiles = host.backward_tiles(family, head_dim)
        tile = plan_backward(host, head_dim, (1, 1, 1, 4096, 4096, head_dim), smem_bytes).tile
        assert tile.smem_bytes(head_dim) + KEPT_TILE <= smem_bytes
        largest = max(
            tile.block_m * tile.block_n
            for tile in tiles
            if tile.smem_bytes(head_dim) + KEPT_TILE <= smem_bytes
        )
        assert tile.block_m * tile.block_n == largest


@pytest.mark.parametrize(
    ("seqlen", "window", "block_m"),
    [
        (2048, CAUSAL, 128),
        (1024, CAUSAL, 64),
        (1024, (None, None), 128),
        (512, (None, None), 64),
        (8192, (1024, None), 128),
        (8192, (512, 0), 64),
    ],
)
def test_keys_that_few_queries_see_take_a_smaller_tile(host, seqlen, window, block_m):
    batch = 16384 // seqlen
    offsets = [seqlen * index for index in range(batch + 1)]
    dense, packed = (batch, 2, 2, seqlen, seqlen, 64), (batch, 2, 2, 16384, 16384, 64)
    for sizes, lengths in ((dense, None), (packed, (offsets, offsets, None, None, None))):
        assert plan_backward(host, 64, sizes, lengths=lengths, window=window).tile.block_m == block_m


def test_keys_out_of_reach_do_not_make_the_tile_smaller(host):
    """2048 queries at the end of 16384 keys, a window of 4096: the first 10240 keys are nobody's."""
    queries, keys = [0, 2048, 4096], [0, 16384, 32768]
    dense, packed = (2, 2, 2, 2048, 16384, 64), (2, 2, 2, 4096, 32768, 64)
    for sizes, lengths in ((dense, None), (packed, (queries, keys, None, None, None))):
        assert plan_backward(host, 64, sizes, lengths=lengths, window=(4096, 0)).tile.block_m == 128


@pytest.mark.parametrize(
    ("asked_for", "runs"),
    [
        ((True, True, False), (True, False, True)),
        ((True, True, True), (True, True, False)),
        ((True, False, False), (False, True, False)),
        ((False, True, False), (True, False, False)),
    ],
    ids=["all", "all, deterministic", "dq", "dk and dv"],
)
def test_kernels_of_the_backward(host, asked_for, runs):
    plan = plan_backward(host, 128, (2, 4, 2, 100, 300, 128), asked_for=asked_for)
    assert (plan.runs_kv, plan.runs_dq_alone, plan.accumulates_dq) == runs
    assert (plan.q_blocks, plan.kv_blocks) == (2 * 2, 2 * 5)
    rows = 4 * plan.q_blocks * plan.tile.block_m
    parts = 2 * plan.tiles * plan.tile.block_n * 128 if plan.gqa_splits > 1 and plan.runs_kv else 0
    if not asked_for[2]:
        parts //= plan.gqa_splits  # these add to the same sums
    assert plan.lse_delta_in_dq == plan.accumulates_dq
    assert plan.workspace_bytes == 4 * (parts + rows * (128 if plan.accumulates_dq else 2))


@pytest.mark.parametrize(
    ("sizes", "lengths", "in_dq"),
    [
        ((2, 4, 4, 4, 300, 64), None, True),  # 512 bytes a head for 64 queries
        ((2, 4, 4, 3, 300, 64), None, False),
        ((2, 4, 4, 128, 300, 64), [0, 64, 128], True),  # a block more for each sequence
        ((64, 4, 4, 64, 300, 64), list(range(65)), False),
        ((64, 4, 4, 64, 64, 64), [64] * 64 + [128], False),
    ],
)
def test_statistics_of_queries_lie_in_dq_where_they_fit(host, sizes, lengths, in_dq):
    lengths = lengths and [lengths, lengths, None, None, None]
    plan = plan_backward(host, 64, sizes, lengths=lengths)
    assert plan.lse_delta_in_dq == in_dq
    assert plan.workspace_bytes >= 4 * plan.rows * (64 + 2 * (not in_dq))
    for family, asked_for in (("sm90", (True, True, False)), ("sm80", (True, True, True))):
        assert not plan_backward(
            host, 64, sizes, lengths=lengths, family=family, asked_for=asked_for
        ).lse_delta_in_dq


@pytest.mark.parametrize("lengths", [None, [0, 3, 3, 400]])
@pytest.mark.parametrize("head_dim", [8, 40, 96, 128, 256])
@pytest.mark.parametrize("asked_for", [(True, True, False), (False, True, False)], ids=["dq", "no dq"])
def test_terms_of_queries_lie_in_rows_of_dq(host, asked_for, head_dim, lengths):
    """On Hopper, 16 bytes of each query, where dQ is asked for; as many side by side as a row and a line of
    the L2 cache have room for, so that a short last block has rows enough."""
    bucket = next(size for size in (64, 96, 128, 192, 256) if head_dim <= size)
    sizes, bucketed = (3, 4, 4, 400, 400, head_dim), bucket in (96, 128)
    lengths = lengths and [lengths, lengths, None, None, None]
    plan = plan_backward(host, bucket, sizes, lengths=lengths, asked_for=asked_for, family="sm90")
    beside = bucket > 128 and not lengths  # LSE and delta as they are: a kernel behind makes rows
    assert plan.lse_delta_in_dq == (asked_for[0] and (bucketed or beside))
    if not bucketed:
        return
    (in_dq, first), row_stride, side_by_side = host.terms(plan, sizes, lengths is not None)
    assert (in_dq, first) == (plan.lse_delta_in_dq, 0)
    assert row_stride == (head_dim if in_dq else 4 * 8)
    assert side_by_side == (min(8, 2 ** int(math.log2(head_dim // 8))) if in_dq else 1)


@pytest.mark.parametrize("window", [FULL, CAUSAL, (1000, 0)])
@pytest.mark.parametrize("heads", [(16, 16), (16, 8), (16, 2), (32, 1)])
@pytest.mark.parametrize("seqlen", [128, 512, 1024, 4096, 16384])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_workspace_is_no_larger_than_flash_attention_3s(host, head_dim, seqlen, heads, window):
    """By its source: of each query two floats and sums of dQ, of each block of at most 128 a counter, and
    where query heads share K and V sums of dK and dV. But where these floats do not lie in dQ (head dim 64,
    below 1024 queries a key), there are more counters."""
    for batch in (1, 4):
        queries, keys = batch * seqlen * heads[0], batch * seqlen * heads[1] * (heads[0] != heads[1])
        sizes = (batch, *heads, seqlen, seqlen, head_dim)
        plan = plan_backward(host, head_dim, sizes, window=window, family="sm90")
        theirs = queries * 4 * (head_dim + 2) + 4 * queries // 128 + 2 * keys * 4 * head_dim
        assert plan.lse_delta_in_dq or head_dim == 64
        counted = 0 if plan.lse_delta_in_dq else queries // 4 + 64
        assert plan.workspace_bytes <= theirs + counted


@pytest.mark.parametrize("asked_for", [(True, True, False), (True, True, True), (True, False, False)])
@pytest.mark.parametrize("heads", [(4, 4), (6, 1), (32, 2)])
@pytest.mark.parametrize("lengths", [None, [0, 5, 900, 3000], "used"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_parts_of_the_workspace_lie_side_by_side(host, family, head_dim, lengths, heads, asked_for):
    total = 1000 if lengths == "used" else 3000
    sizes = (3, *heads, total, total, head_dim)
    lengths = lengths and (
        [None, None, [5, 0, 1000], [1000] * 3, None] if lengths == "used" else [lengths] * 2 + [None] * 3
    )
    plan = plan_backward(host, head_dim, sizes, lengths=lengths, family=family, asked_for=asked_for)
    zero_begin, zero_bytes = plan.zero_filled
    end = 0
    for name, begin, size, found in host.workspace_regions(plan, 3, bool(lengths and lengths[0])):
        if size == 0:  # in dQ's memory
            assert name in {"lse", "delta", "terms"}
            assert plan.lse_delta_in_dq
            assert found >= 1 << 59
            continue
        assert found == begin
        assert 0 <= begin - end < 16
        assert begin % (16 if name in {"dq", "gqa"} else 4) == 0
        end = begin + size
        is_zero_filled = zero_begin <= begin and end <= zero_begin + zero_bytes
        counts = name in {"tile_counter", "dq_adds", "dq_blocks_taken", "dq_tiles_finished"}
        adds = name == "gqa" or (name == "dq" and family == "sm90" and plan.zero_fills_dq)
        assert is_zero_filled == (counts or adds)
    assert end <= plan.workspace_bytes < end + 16
    if plan.lse_delta_in_dq and not plan.tile.lse_delta_mma:
        entries = 3 if lengths is None or lengths[2] else 1
        assert 2 * plan.rows * 4 <= entries * heads[0] * total * head_dim * 2
    assert zero_begin % 16 == zero_bytes % 16 == 0


@pytest.mark.parametrize("window", [FULL, CAUSAL, (1000, 0)])
@pytest.mark.parametrize("heads", [(16, 16), (16, 8), (16, 2), (28, 4), (32, 1), (71, 1), (6, 2)])
@pytest.mark.parametrize("seqlen", [128, 1024, 4096, 16384])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_workspace_is_no_larger_than_flash_attention_2s(host, head_dim, seqlen, heads, window):
    """By its source: sums of dQ and a float for each query, and a dK and dV for each query head."""
    for batch in (1, 4):
        queries, keys = (batch * seqlen * number for number in (heads[0], heads[0] * (heads[0] != heads[1])))
        sizes = (batch, *heads, seqlen, seqlen, head_dim)
        plan = plan_backward(host, head_dim, sizes, window=window)
        assert plan.workspace_bytes <= queries * 4 * (head_dim + 1) + 2 * keys * 2 * head_dim


@pytest.mark.parametrize(
    ("asked_for", "sums_dq", "ordered"),
    [
        ((True, True, False), True, False),
        ((True, True, True), True, True),
        ((True, False, True), True, True),
        ((False, True, True), False, False),
    ],
    ids=["all", "all, deterministic", "dq", "dk and dv"],
)
def test_one_kernel_of_the_backward_on_hopper(host, asked_for, sums_dq, ordered):
    """Whatever is asked for, so that each gradient has the same bits; sums of dQ have one order in turns."""
    plan = plan_backward(host, 128, (2, 4, 4, 100, 300, 128), asked_for=asked_for, family="sm90")
    assert (plan.runs_kv, plan.runs_dq_alone) == (True, False)
    assert (plan.accumulates_dq, plan.ordered, plan.zero_fills_dq) == (sums_dq, ordered, False)
    assert plan.converts_dq == sums_dq
    assert plan.tiles == plan.blocks == 4 * plan.kv_blocks
    rows = 4 * plan.q_blocks * plan.tile.block_m
    assert plan.workspace_bytes == 4 * rows * (128 if sums_dq else 4) + 4 * counters(plan, 4, 2 * 4)


@pytest.mark.parametrize("lengths", [None, [0, 100, 2000]])
@pytest.mark.parametrize("deterministic", [False, True])
def test_queries_add_terms_where_many_see_a_key(host, lengths, deterministic):
    """At head dim 64; in turns an entry's bits don't depend on other lengths."""

    def lse_delta_mma(seqlen, head_dim, window=FULL):
        sizes = (2, 4, 4, seqlen, seqlen, head_dim)
        cumulated = lengths and [[0, seqlen // 10, seqlen]] * 2 + [None] * 3
        options = {"lengths": cumulated, "window": window, "family": "sm90"}
        return plan_backward(
            host, head_dim, sizes, asked_for=(True, True, deterministic), **options
        ).tile.lse_delta_mma

    always = lengths is not None and deterministic
    sequences = 2 if lengths else 1
    assert lse_delta_mma(1024 * sequences, 64)
    assert lse_delta_mma(1023 * sequences, 64) == always
    assert lse_delta_mma(1024 * sequences, 64, CAUSAL) == always
    assert lse_delta_mma(100, 96)
    assert lse_delta_mma(100, 128)
    assert not lse_delta_mma(4096, 192)
    assert not lse_delta_mma(4096, 256)


def counters(plan, heads, pairs):
    """Integers of a workspace: of tiles, of each warpgroup's part of dQ, of rows of dQ and of statistics, in
    16 bytes at a time."""
    additions = (
        2 * plan.tile.cluster * heads * plan.q_blocks if plan.accumulates_dq and not plan.zero_fills_dq else 0
    )
    cleared = 1 + additions + plan.converts_dq * (1 + pairs)
    return 4 * math.ceil(cleared / 4)


@pytest.mark.parametrize("head_dim", [192, 256])
@pytest.mark.parametrize("heads", [4, 100])
def test_two_thread_blocks_share_a_tile(host, heads, head_dim):
    """Whole clusters, and each block has sums of its own."""
    plan = plan_backward(host, head_dim, (2, heads, heads, 100, 300, head_dim), family="sm90")
    assert (plan.tile.block_m, plan.tile.block_n) == (64, 128)
    assert (plan.kv_blocks, plan.tiles) == (2 * 3, 2 * 3 * heads)
    assert plan.blocks == 2 * min(plan.tiles, 132 // 2)
    blocks = heads * plan.q_blocks
    assert plan.workspace_bytes == 4 * (64 * blocks * head_dim + counters(plan, heads, 2 * heads))


@pytest.mark.parametrize("packed", [False, True])
def test_some_sums_are_cleared(host, packed):
    """Where the blocks of keys of a query don't run at once, or tiles have several heads of many queries; not
    in turns, where the first one is known."""

    def clears(seqlen, deterministic=False, heads_kv=4, queries=100, window=FULL, head_dim=128):
        sizes, lengths = (2, 4, heads_kv, queries, seqlen, head_dim), None
        if packed:
            sizes = (2, 4, heads_kv, 2 * queries, 2 * seqlen, head_dim)
            lengths = ([0, queries, 2 * queries], [0, seqlen, 2 * seqlen], None, None, None)
        options = {} if heads_kv == 4 else {"multiprocessors": FEW}
        asked_for = (True, True, deterministic)
        return plan_backward(
            host,
            head_dim,
            sizes,
            lengths=lengths,
            asked_for=asked_for,
            family="sm90",
            window=window,
            **options,
        ).zero_fills_dq

    assert not clears(130 * 128)
    assert clears(140 * 128)
    assert not clears(140 * 128, deterministic=True)
    assert not clears(256, heads_kv=2)
    many = {"queries": 4096, "head_dim": 256}
    assert clears(256, heads_kv=2, **many)
    assert not clears(256, heads_kv=4, **many)
    assert not clears(256, deterministic=True, heads_kv=2, **many)
    assert not clears(200 * 128, queries=200 * 128, window=(1024, 0))
    assert clears(200 * 128, queries=200 * 128, window=(140 * 128, 0))
    assert clears(200 * 128, queries=200 * 128, window=(1024, 0), head_dim=256)  # heads are side by side


@pytest.mark.parametrize(
    ("head_dim", "apart"), [(64, True), (96, True), (128, True), (192, False), (256, False)]
)
def test_heads_come_one_by_one_where_rows_are_made_of_their_sums(host, head_dim, apart):
    """Behind a window, too."""
    sizes, window = (2, 3, 3, 17_000, 17_000, head_dim), (1000, 0)
    batch = make_varlen_batch(host, sizes, window, [None] * 5)
    heads = [(b, head) for (b, head, _), _ in host.key_tiles(head_dim, batch, False, HOPPERS)]
    changes = sum(before != after for before, after in pairwise(heads))
    assert (changes == 5) == apart


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_who_makes_rows_of_dq(host, head_dim):
    """The kernel that sums them up, where it has room, and tiles enough for the blocks of queries."""

    def converts_dq(seqlen_q, seqlen_k, heads_kv=4):
        sizes = (2, 4, heads_kv, seqlen_q, seqlen_k, head_dim)
        return plan_backward(host, head_dim, sizes, family="sm90").converts_dq

    small = head_dim <= 128
    assert converts_dq(512, 512) == converts_dq(500, 4000) == converts_dq(5, 5) == small
    assert not converts_dq(4000, 500)
    assert converts_dq(512, 512, heads_kv=1) == small


@pytest.mark.parametrize(
    ("head_dim", "sizes", "window", "parts"),
    [
        (128, (8, 16, 16, 2048, 2048), CAUSAL, 1),
        (128, (4, 32, 8, 2048, 2048), CAUSAL, 1),
        (128, (8, 16, 2, 2048, 2048), CAUSAL, 2),  # to even out
        (128, (16, 16, 2, 1024, 1024), CAUSAL, 2),
        (128, (16, 16, 2, 1024, 1024), FULL, 1),
        (128, (1, 16, 2, 16384, 16384), (1024, 0), 1),
        (128, (16, 32, 8, 256, 256), CAUSAL, 1),  # too short
        (128, (1, 16, 2, 8192, 8192), CAUSAL, 4),
        (128, (1, 16, 2, 8192, 8192), FULL, 1),  # one round of tiles
        (128, (1, 16, 2, 8000, 8192), FULL, 1),
        (128, (1, 16, 2, 8000, 8000), CAUSAL, 4),
        (64, (1, 32, 4, 16384, 16384), CAUSAL, 2),
        (256, (4, 8, 1, 8192, 8192), CAUSAL, 2),
        (128, (1, 32, 1, 4096, 4096), CAUSAL, 16),  # to fill the GPU
        (128, (1, 32, 1, 4096, 4096), FULL, 4),
        (64, (1, 14, 2, 64, 64), FULL, 7),
        (256, (16, 8, 1, 1024, 1024), CAUSAL, 2),
        (128, (1, 28, 4, 4096, 4096), CAUSAL, 7),  # 3 would do
        (128, (1, 28, 4, 8192, 8192), CAUSAL, 7),
        (64, (1, 71, 1, 2048, 2048), CAUSAL, 71),
        (64, (1, 71, 1, 16384, 16384), CAUSAL, 71),
        (64, (64, 71, 1, 128, 128), CAUSAL, 1),  # a head has a single step
        (128, (1, 127, 1, 64, 8192), FULL, 1),
        (64, (1, 4194319, 1, 1, 33600), FULL, 1),
        (128, (1, 127, 1, 8192, 8192), FULL, 127),
        (128, (1, 130, 1, 2048, 2048), FULL, 65),  # 7.9 rounds
        (128, (2, 1 << 20, 1, 0, 0), FULL, 1),
        (64, (2, 0, 2, 10, 20), FULL, 1),
        (64, (2, 0, 2, 9000, 9000), FULL, 1),
        (256, (1, 64, 1, 65536, 16896), FULL, 16),  # 2^18 rows each
        (256, (1, 64, 1, 65536, 32768), CAUSAL, 8),  # half of the queries see nothing
        (256, (8, 64, 8, 32768, 32768), FULL, 1),
        (128, (1, 3, 1, 1 << 20, 16384), FULL, 3),
    ],
)
def test_parts_of_groups(host, head_dim, sizes, window, parts):
    """As few as fill the GPU, or even out the ends of tiles; they add to the same sums."""

    def planned(asked_for):
        shape = (*sizes, head_dim)
        return plan_backward(host, head_dim, shape, asked_for=asked_for, family="sm90", window=window)

    plan, without_keys = planned((True, True, False)), planned((True, False, False))
    assert plan.gqa_splits == without_keys.gqa_splits == parts
    floats = 2 * plan.tiles // parts * plan.tile.block_n * head_dim if parts > 1 else 0
    assert plan.workspace_bytes == without_keys.workspace_bytes + 4 * floats


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_many_blocks_clear_sums_of_many_keys(host, family):
    """Else those of few queries would, one after the other."""

    def blocks(*sizes):
        return plan_backward(host, 128, (*sizes, 128), family=family, window=FULL)

    few = blocks(1, 8, 1, 64, 8192)
    assert few.gqa_splits > 1
    assert few.q_blocks * 8 < HOPPERS <= few.preprocess_blocks
    for plan in (blocks(1, 8, 8, 64, 100_000), blocks(4, 8, 1, 4096, 4096)):
        # Or backward_zero_fill does.
        assert plan.preprocess_blocks == plan.q_blocks * 8


@pytest.mark.parametrize(("sizes", "parts"), [((32, 1, 4096, 4096), 4), ((32, 8, 2048, 2048), 1)])
def test_parts_of_groups_of_deterministic_calls_depend_on_no_batch(host, sizes, parts):
    for batch in (1, 2, 50):
        for multiprocessors in (FEW, HOPPERS):
            plan = plan_backward(
                host,
                128,
                (batch, *sizes, 128),
                asked_for=(True, True, True),
                family="sm90",
                multiprocessors=multiprocessors,
            )
            assert plan.gqa_splits == parts
            sums = 2 * plan.tiles * plan.tile.block_n * 128 if parts > 1 else 0
            of_queries = plan.rows * 128
            assert 0 <= plan.workspace_bytes // 4 - sums - of_queries < of_queries // 64
            assert sums + of_queries <= 2 * (sums // parts + of_queries)


@pytest.mark.parametrize(
    ("head_dim", "sizes", "window", "parts"),
    [
        (128, (1, 32, 1, 4096, 4096), FULL, 4),  # to fill the GPU
        (128, (1, 32, 1, 4096, 4096), CAUSAL, 16),
        (128, (8, 16, 2, 2048, 2048), CAUSAL, 2),  # to even out
        (128, (2, 32, 8, 4096, 4096), CAUSAL, 1),
        (256, (4, 8, 1, 4096, 4096), CAUSAL, 2),
        (64, (1, 16, 16, 300, 300), CAUSAL, 1),
    ],
)
def test_parts_of_groups_on_ampere(host, head_dim, sizes, window, parts):
    plan = plan_backward(host, head_dim, (*sizes, head_dim), family="sm80", window=window)
    floats = 2 * plan.tiles // parts * plan.tile.block_n * head_dim if parts > 1 else 0
    assert plan.gqa_splits == parts
    assert plan.workspace_bytes == 4 * (floats + plan.rows * head_dim)
    grouped = sizes[1] != sizes[2]
    assert (plan.section == 1) != grouped


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("limits", [(None, None), CAUSAL, (32, 0), (None, 40)])
@pytest.mark.parametrize("lengths", [None, ([0, 400, 401, 900], [0, 1, 333, 700], None, None, None)])
@pytest.mark.parametrize(
    ("heads_kv", "multiprocessors"), [(24, FEW), (24, 2), (24, HOPPERS), (6, FEW), (1, FEW)]
)
def test_blocks_of_keys_on_ampere(host, heads_kv, multiprocessors, lengths, limits, head_dim):
    """Each block of keys comes once, of each head of K and V or of each part of its group."""
    sizes = (3, 24, heads_kv, 900 if lengths else 300, 700 if lengths else 520, head_dim)
    options = {"lengths": lengths, "window": limits, "multiprocessors": multiprocessors}
    plan = plan_backward(host, head_dim, sizes, **options)
    batch = make_varlen_batch(host, sizes, limits, lengths or [None] * 5)
    block_n = plan.tile.block_n
    masks = [
        make_mask(host, seqlen_q, seqlen_k, *limits)
        for seqlen_q, seqlen_k in (((400, 1), (1, 332), (499, 367)) if lengths else [(300, 520)] * 3)
    ]
    counted = [mask.seqlen_k - mask.first_reachable_key() for mask in masks]
    found = host.key_tiles_sm80(head_dim, batch, multiprocessors)
    expected = [
        (b, head, begin)
        for b in range(3)
        for head in range(heads_kv * plan.gqa_splits)
        for begin in range(0, counted[b], block_n)
    ]
    assert sorted(found) == expected


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("limits", [(None, None), CAUSAL, (32, 0), (None, 40)])
@pytest.mark.parametrize("heads_kv", [6, 1])
@pytest.mark.parametrize(
    "lengths",
    [
        (None, None, [400, 0, 7], [333, 5, 0], None),
        (None, None, [30, 40, 50], [520, 20, 400], [0, 3, 390]),
        ([0, 130, 130, 400], [5, 205, 205, 520], None, None, None),
        ([9, 9, 9, 9], [0, 100, 300, 520], None, None, None),
        ([0, 400, 400, 400], [0, 0, 0, 520], None, None, None),
        ([0, 1, 2, 3], [0, 0, 1, 1], None, None, None),
    ],
)
def test_blocks_of_keys_of_unequal_lengths_on_ampere(host, lengths, heads_kv, limits, head_dim):
    sizes = (3, 6, heads_kv, 400, 520, head_dim)
    batch = make_varlen_batch(host, sizes, limits, lengths)
    plan = plan_backward(host, head_dim, sizes, lengths=lengths, window=limits)
    expected = []
    for b in range(3):
        offsets_q, offsets_k, used_q, used_k, leftpad = lengths
        rows_q = offsets_q[b + 1] - offsets_q[b] if offsets_q else used_q[b]
        rows_k = offsets_k[b + 1] - offsets_k[b] if offsets_k else used_k[b] - (leftpad or [0] * 3)[b]
        mask = make_mask(host, rows_q, rows_k, *limits)
        count = rows_k - mask.first_reachable_key()
        begins = range(0, count, plan.tile.block_n)
        expected += [(b, head, begin) for head in range(heads_kv * plan.gqa_splits) for begin in begins]
    assert sorted(host.key_tiles_sm80(head_dim, batch, HOPPERS)) == expected


@pytest.mark.parametrize(
    "offsets", [[0, 300, 130, 520], [520, 0, 90, 400], [300, 200, 100, 0], [-9, 700, 5, 800]]
)
@pytest.mark.parametrize("limits", [(None, None), CAUSAL, (32, 0)])
@pytest.mark.parametrize("heads_kv", [6, 2])
@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_blocks_of_keys_of_offsets_that_decrease(host, family, heads_kv, limits, offsets):
    """As of offsets that are the largest so far, and within the total."""
    ordered = list(accumulate((min(max(offset, 0), 520) for offset in offsets), max))

    def tiles(offsets):
        batch = make_varlen_batch(host, (3, 6, heads_kv, 520, 520, 128), limits, [offsets] * 2 + [None] * 3)
        if family == "sm80":
            return host.key_tiles_sm80(128, batch, HOPPERS)
        return host.key_tiles(128, batch, False, HOPPERS)

    assert tiles(offsets) == tiles(ordered)


@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("empty", range(5))
def test_empty_problems_have_a_plan(host, empty, packed, family):
    sizes = [3, 4, 4, 50, 60]
    for dimension in ((0,), (1, 2), (3,), (4,), (3, 4))[empty]:
        sizes[dimension] = 0
    ends = [[size * i // 3 for i in range(sizes[0] + 1)] for size in sizes[3:]]
    lengths = (*ends, None, None, None) if packed else None
    plan = plan_backward(host, 64, (*sizes, 64), lengths=lengths, family=family)
    assert plan.tiles == plan.kv_blocks * sizes[2]


@pytest.mark.parametrize("limits", [(None, None), CAUSAL, (32, 0)])
@pytest.mark.parametrize("heads_kv", [12, 4])
@pytest.mark.parametrize("length", [512, 500])
def test_packed_sequences_of_equal_lengths_go_as_dense_ones_on_ampere(host, length, heads_kv, limits):
    batch, head_dim, mean = 8, 128, 512
    rows = [length] * (batch - 1) + [length + batch * (mean - length)]
    offsets = list(accumulate(rows, initial=0))
    total = offsets[-1]

    def tiles(sizes, lengths=(None,) * 5):
        return host.key_tiles_sm80(
            head_dim, make_varlen_batch(host, (*sizes, head_dim), limits, list(lengths)), FEW
        )

    dense = tiles((batch, 12, heads_kv, mean, mean))
    packed = tiles((batch, 12, heads_kv, total, total), (offsets, offsets, None, None, None))
    assert (packed == dense) == (length == mean)


@pytest.mark.parametrize(
    ("family", "head_dim", "at_a_time"),
    [("sm80", 128, 2 * HOPPERS), ("sm90", 128, HOPPERS), ("sm90", 256, HOPPERS // 2)],
)
def test_last_heads_go_side_by_side_where_the_others_do_not(host, family, head_dim, at_a_time):
    """Those of two rounds of thread blocks."""

    def sections(*sizes, window=CAUSAL):
        plan = plan_backward(host, head_dim, (*sizes, head_dim), family=family, window=window)
        return plan.section, plan.last_section

    block_n = plan_backward(host, head_dim, (1, 1, 1, 512, 512, head_dim), family=family).tile.block_n
    assert sections(64, 16, 16, 512, 512) == (1, -(-2 * at_a_time // (512 // block_n)))
    assert sections(16, 16, 16, 4096, 4096) == (1, -(-2 * at_a_time // (4096 // block_n)))
    assert sections(2, 2, 2, 512, 512) == (1, 2 * 2)
    converts_dq = (family, head_dim) == ("sm90", 128)
    full = at_a_time // (512 // block_n) if (family, head_dim) == ("sm90", 256) else 1
    assert sections(64, 16, 16, 512, 512, window=FULL) == (full, 64 * 16 % full or full)
    assert (sections(64, 16, 16, 512, 512, window=(100, 0)) == (1, 1)) == converts_dq  # else all side by side
    assert sections(64, 16, 8, 512, 512)[0] > 1  # of tiles that have, or on Ampere share, several heads


@pytest.mark.parametrize(
    "lengths",
    [
        None,
        ([0, 130, 130, 400], [5, 200, 300, 333], None, None, None),
        ([0, 120, 260, 400], [5, 105, 210, 320], None, None, None),
        ([200, 264, 392, 395], [5, 105, 210, 320], None, None, None),
        ([0, 130, 260, 400], [5, 200, 300, 333], [0, 65, 1], None, None),
        (None, None, [400, 0, 129], None, None),
    ],
    ids=["dense", "packed", "alike", "behind other rows", "partly used", "padded"],
)
@pytest.mark.parametrize("heads_kv", [1, 2, 4])
@pytest.mark.parametrize("block_m", [64, 128])
def test_order_of_rows_of_dq(host, block_m, heads_kv, lengths):
    """Each block of queries that has rows comes once, and pairs come in the order in which their blocks of
    keys do."""
    sizes = (3, 4, heads_kv, 400, 333, 64)
    batch = make_varlen_batch(host, sizes, (None, None), lengths or [None] * 5)
    places = host.BatchBlocks(batch, True, block_m)
    order = host.rows_order(batch, block_m)
    assert len(order) == 4 * places.count()
    blocks = [(pair, *block) for pair, *block, exists, _ in order if exists]
    begins = {place: begin for _, _, _, place, exists, begin in order if exists}
    offsets, _, used, *_ = lengths or [None] * 5
    rows = [
        min(larger, used[b] if used else 400)
        for b, larger in enumerate(
            [max(0, end - begin) for begin, end in pairwise(offsets)] if offsets else [400] * 3
        )
    ]
    first = [places.first(b) for b in range(3)]
    expected = {
        place: (place - first[b]) * block_m
        for place in range(places.count())
        for b in [places.sequence(place)]
        if 0 <= (place - first[b]) * block_m < rows[b]
    }
    assert begins == expected
    assert sorted((head, place) for _, _, head, place in blocks) == [
        (head, place) for head in range(4) for place in sorted(expected)
    ]
    for pair, sequence, head, place in blocks:
        assert sequence == places.sequence(place)
        assert pair == sequence * heads_kv + head // (4 // heads_kv)
    if offsets is None and lengths:
        return
    listed = host.key_tiles(64, batch, False, FEW)
    first_keys = {begin: b for b, begin in enumerate(lengths[1][:3])} if lengths else {}
    pairs = [(first_keys.get(k, b) if lengths else b, head) for (b, head, k), _ in listed]
    pairs = [pair for pair in pairs if pair[0] * heads_kv + pair[1] in {block[0] for block in blocks}]
    of_keys = [b * heads_kv + head for b, head in dict.fromkeys(pairs)]
    of_rows = [pair for pair in dict.fromkeys(block[0] for block in blocks) if pair in of_keys]
    assert of_rows == of_keys


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("lengths", [None, ([0, 130, 130, 400], [5, 200, 300, 333], None, None, None)])
@pytest.mark.parametrize("limits", [CAUSAL, (None, None), (50, 20)], ids=["causal", "full", "window"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("heads_kv", "multiprocessors"), [(4, HOPPERS), (2, HOPPERS), (1, 12), (2, FEW)])
def test_blocks_of_keys_on_hopper(host, heads_kv, multiprocessors, deterministic, limits, lengths, head_dim):
    """Each block of keys comes once, with all blocks of queries that see it, of all heads of the group, or of
    a part of it: from its own on, where the first one stores; in turns the last ones first, where blocks of
    keys have those in common."""
    sizes = (3, 4, heads_kv, 400, 333, head_dim)
    batch = make_varlen_batch(host, sizes, limits, lengths or [None] * 5)
    asked_for = (True, True, deterministic)
    options = {"family": "sm90", "window": limits, "multiprocessors": multiprocessors}
    plan = plan_backward(host, head_dim, sizes, lengths=lengths, asked_for=asked_for, **options)
    heads_kv *= plan.gqa_splits
    tile = host.backward_tiles(host.Family.sm90, head_dim)[0]
    listed = host.key_tiles(head_dim, batch, deterministic, multiprocessors)
    found = dict(listed)
    assert len(found) == len(listed)
    last_first = deterministic and (lengths or limits != (None, None))
    expected = {}
    for b in range(3):
        begin_q, end_q = lengths[0][b : b + 2] if lengths else (0, 400)
        begin_k, end_k = lengths[1][b : b + 2] if lengths else (0, 333)
        mask = make_mask(host, end_q - begin_q, end_k - begin_k, *limits)
        cut, fully_masked = mask.first_reachable_key(), mask.fully_masked_rows()
        queries, keys = end_q - begin_q - fully_masked, end_k - begin_k - cut
        if queries == 0:  # nobody sees these keys
            continue
        if not lengths:  # the host has cut keys off before
            cut, keys = 0, end_k
        mask = make_mask(host, queries, keys, *limits)
        for head_kv in range(heads_kv):
            for n_begin in range(0, keys, tile.block_n):
                blocks = range(*mask.visited_rows(n_begin, tile.block_n, tile.block_m))
                if last_first:
                    blocks = blocks[::-1]
                elif not deterministic and not plan.zero_fills_dq and len(blocks) > 0:
                    own = max(blocks[0], min(blocks[-1], n_begin // tile.block_m)) - blocks[0]
                    blocks = [*blocks[own:], *blocks[:own]]
                group = 4 // heads_kv
                heads = range(group * head_kv, group * (head_kv + 1))
                steps = [(head, block) for head in heads for block in blocks]
                expected[0 if lengths else b, head_kv, begin_k + cut + n_begin] = steps
    assert found == expected
    places = {(b, begin, head): index for index, (b, head, begin) in enumerate(found)}
    # In deterministic mode parts of a group, which are heads here, add in this order and wait for each other.
    for one, next_one in pairwise(sorted(places)):
        assert one[:2] != next_one[:2] or places[one] < places[next_one]


@given(
    st.integers(1, 10_000),
    st.integers(1, 70_000) | st.integers(1, LONGEST) | st.integers(1, 20).map(lambda power: 2**power),
    st.sampled_from([2, 4]),
    st.sampled_from([(False, False), (True, False), (True, True)]),
    st.booleans(),
    st.sampled_from([1, 7, 40, 132]),
)
def test_softmax_plan(host, rows, columns, element_bytes, edges, backward, multiprocessors):
    """Threads hold all chunks of a row, blocks that wait for each other all run at once, and a workspace that
    was allocated without a look at the GPU is large enough."""
    aligned, plain = edges
    plan = host.plan_row_softmax(rows, columns, element_bytes, aligned, plain, backward, multiprocessors)
    tiles = host.row_tiles(element_bytes, backward)
    tile = tiles[plan.tile]
    width = 16 // element_bytes
    chunks = -(-(columns + (0 if aligned else width - 1)) // width)
    assert [tile.capacity() for tile in tiles[:-1]] == sorted({tile.capacity() for tile in tiles[:-1]})
    assert [tile.shared for tile in tiles] == [False] * (len(tiles) - 1) + [True]
    assert plan.threads % 32 == 0
    assert plain or not tile.plain_only
    resident = multiprocessors * (1024 // plan.threads)
    if tile.shared:
        assert 1 <= plan.parts * plan.teams <= resident
        part = -(-chunks // plan.parts)
        assert plan.threads * tile.chunks >= part or plan.parts == resident
    else:
        assert plan.parts == 1
        assert plan.teams * tile.rows() >= rows
        assert chunks <= (plan.threads * tile.chunks if tile.of_block else tile.capacity())
    assert plan.workspace_bytes <= host.row_softmax_workspace(rows, columns, element_bytes, backward)
