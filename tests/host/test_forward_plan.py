"""forward/plan.hpp: the tile, the grid and the workspace of a call."""

from __future__ import annotations

from itertools import pairwise

import pytest
from problems import CAUSAL, FULL, HOPPERS, assume, given, make_varlen_batch, ragged_batches, shapes, st

L2_BYTES = 60 << 20  # of an H200, as it says itself


def plan(host, family, head_dim, sizes, window=FULL, lengths=None, **changes):
    """Its kernel is compiled, and its regions lie one after the other in the workspace."""
    batch = make_varlen_batch(host, sizes, window, lengths)
    chosen = host.plan_forward(getattr(host.Family, family), head_dim, batch, HOPPERS, L2_BYTES, changes)
    assert chosen.is_listed
    end = 0
    for begin, size in sorted(chosen.regions):
        assert end <= begin <= end + 255
        end = begin + size
    assert chosen.workspace_bytes == end
    return chosen


@pytest.mark.parametrize(
    ("head_dim", "seqlen", "window", "tile"),
    [
        (64, 8192, FULL, (192, 128)),
        (64, 512, CAUSAL, (128, 128)),
        (128, 8192, FULL, (192, 64)),
        (128, 2048, CAUSAL, (128, 128)),
        (256, 2048, CAUSAL, (128, 64)),
    ],
)
def test_the_tile_is_that_of_least_work(host, head_dim, seqlen, window, tile):
    chosen = plan(host, "sm90", head_dim, (16384 // seqlen, 16, 16, seqlen, seqlen, head_dim), window).tile
    assert (chosen.block_m, chosen.block_n) == tile


@pytest.mark.parametrize(("bucket", "tile"), [((192, 128), (128, 128)), (192, (128, 64))])
@pytest.mark.parametrize("window", [FULL, CAUSAL])
def test_a_pair_of_head_dims_has_a_tile_of_its_own(host, bucket, tile, window):
    chosen = plan(host, "sm90", bucket, (8, 16, 16, 2048, 2048, 192, 128), window)
    assert (chosen.tile.block_m, chosen.tile.block_n) == tile
    assert not chosen.splits


@pytest.mark.parametrize(
    ("family", "buckets", "head_dim_v"),
    [("sm90", [(192, 128), 192], 128), ("sm80", [128], 64), ("sm90", [128], 64), ("sm90", [256], 256)],
)
def test_parts_of_a_head_dim_of_v(host, family, buckets, head_dim_v):
    """They are as wide as V, and in the kernel of a square bucket, whatever takes uncut keys."""
    for bucket in buckets:
        chosen = plan(host, family, bucket, (1, 32, 8, 1, 8192, 128, head_dim_v))
        assert chosen.splits
        assert chosen.slots > 0
        assert (chosen.tile.block_m, chosen.packed_heads) == (64, 4)
        rows = 4 * (head_dim_v + 1) * 4  # of a slot: 4 heads, O and the LSE in float32
        assert chosen.workspace_bytes == chosen.partial_offset + chosen.slots * rows


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
    assert plan(host, "sm90", 64, sizes, CAUSAL, [offsets, offsets]).tile.block_m == block_m


@pytest.mark.parametrize(("group", "packed"), [(1, 1), (4, 4), (64, 64), (65, 33), (256, 64)])
def test_heads_are_packed_where_queries_are_few(host, group, packed):
    for family in ("sm80", "sm90"):
        assert plan(host, family, 128, (16, group, 1, 1, 8192, 128)).packed_heads == packed
        assert plan(host, family, 128, (16, group, 1, 8192, 8192, 128)).packed_heads == 1
    assert plan(host, "sm80", 128, (16, group, 1, 1, 100, 128)).packed_heads == 1  # of uncut keys


@given(shapes, st.sampled_from(["sm80", "sm90"]), st.sampled_from([64, 128, 256]), st.integers(1, 4))
def test_the_table_of_ranges_is_a_region(host, shape, family, head_dim, ranges):
    """The last one, of as many bytes as each query's ranges take and more."""
    batch, heads_kv, group, seqlen_q, seqlen_k, _ = shape
    sizes = batch, heads_kv * group, heads_kv, seqlen_q, seqlen_k, head_dim
    chosen = plan(host, family, head_dim, sizes, CAUSAL, ranges=ranges)
    begin, size = chosen.regions[-1]
    assert begin % 256 == 0
    assert size > 8 * batch * seqlen_q * ranges
    without = plan(host, family, head_dim, sizes, CAUSAL)
    assert not chosen.splits or chosen.tile.block_n == without.tile.block_n


RANGES = {"ranges": 1}, {"ranges": 4}
MASKS = {"mask": (1, 1, 1)}, {"mask": (8, 1, 2048)}, {"mask": (8, 32, 2048)}
CHANGES = *MASKS, {"softcap": 20.0}, {"slopes": True}, {"bias": True}, {"keep": 3686}
LONG = 8, 32, 8, 2048, 2048


@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_kernels_of_general_calls(host, family, head_dim):
    """Of ranges alone, and of masks alone, Hopper has kernels that look at nothing else."""
    for changes in RANGES + CHANGES:
        chosen = plan(host, family, head_dim, (*LONG, head_dim), **changes)
        assert chosen.has_table
        assert chosen.hides_pairs == (family == "sm90" and changes in MASKS)
        assert chosen.changes_scores == (family == "sm80" or (changes in CHANGES and changes not in MASKS))
        assert plan(host, family, head_dim, (*LONG, head_dim), **{**changes, "slopes": True}).changes_scores
    for changes in ({}, {"keep": 4096}, {"softcap": 0.0}):
        chosen = plan(host, family, head_dim, (*LONG, head_dim), **changes)
        assert not chosen.has_table
        assert not chosen.changes_scores


@pytest.mark.parametrize(
    ("family", "head_dim", "of_ranges", "of_changes"),
    [
        ("sm80", 64, (128, 128, 1), (128, 128, 1)),
        ("sm80", 128, (128, 64, 1), (128, 64, 1)),
        ("sm80", 256, (64, 64, 1), (64, 64, 1)),
        ("sm90", 64, (192, 128, 2), (128, 128, 2)),
        ("sm90", 128, (128, 128, 2), (128, 128, 1)),  # a tile of the bias takes the second stage's room
        ("sm90", 256, (128, 64, 1), (128, 64, 1)),
    ],
)
@pytest.mark.parametrize("seqlen", [300, 8192])
def test_general_calls_have_one_tile(host, family, head_dim, of_ranges, of_changes, seqlen):
    """Whatever the lengths."""
    for changes in RANGES + CHANGES:
        for window in (FULL, CAUSAL):
            sizes = 16, 32, 32, seqlen, seqlen, head_dim
            tile = plan(host, family, head_dim, sizes, window, **changes).tile
            expected = of_changes if changes in CHANGES else of_ranges
            assert (tile.block_m, tile.block_n, tile.stages_q) == expected


@pytest.mark.parametrize(("group", "packed"), [(4, 4), (64, 64), (65, 33)])
def test_heads_that_share_a_tile_see_the_same_blocks(host, group, packed):
    """Not so where a mask differs between heads, nor do they share words of dropout or tiles of a bias. Keys
    are cut in parts or not."""
    heads = 2 * group
    for keys in (100, 8192):
        sizes = 16, heads, 2, 1, keys, 128
        for changes in ({}, {"ranges": 2}, {"mask": (16, 1, 1)}, {"softcap": 20.0}, {"slopes": True}):
            chosen = plan(host, "sm90", 128, sizes, **changes)
            assert chosen.splits == (keys > 100)
            assert chosen.packed_heads == packed
        of_heads = {"mask": (1, heads, 1)}
        for changes in (of_heads, {"keep": 2048}, {"bias": True}, {**of_heads, "softcap": 20.0}):
            for family in ("sm80", "sm90"):
                assert plan(host, family, 128, sizes, **changes).packed_heads == 1
        assert plan(host, "sm80", 128, sizes, mask=(1, heads, 1)).splits == (keys > 100)


@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize("sizes", [(1, 32, 8, 1, 8192), (4, 32, 8, 16, 256), (1, 1, 1, 4096, 8192)])
@pytest.mark.parametrize("lengths", [False, True])
def test_keys_are_whole_with_dropout_or_a_bias(host, family, sizes, lengths):
    """Not so with whatever else changes scores or hides pairs."""
    for head_dim in (64, 128, 256):
        used = [None, None, None, [sizes[4]] * sizes[0]] if lengths else None
        call = (*sizes, head_dim), CAUSAL, used
        for changes in ({"bias": True}, {"keep": 4095}, {"bias": True, "ranges": 1, "slopes": True}):
            chosen = plan(host, family, head_dim, *call, **changes)
            assert not chosen.splits
            assert chosen.slots == 0
        for changes in ({}, {"softcap": 20.0}, {"slopes": True}, {"ranges": 3}, {"mask": (1, 1, 1)}):
            chosen = plan(host, family, head_dim, *call, **changes)
            assert chosen.splits
            assert chosen.changes_scores == bool(changes)


@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize("seqlen_q", [1, 2048])
def test_the_workspace_of_a_mask_of_pairs(host, family, seqlen_q):
    """A bit for each pair that differs; those of one row, entry or head are there once."""
    batch, heads, seqlen_k = 2, 8, 4096
    sizes = batch, heads, 2, seqlen_q, seqlen_k, 128

    def table(*mask):
        return plan(host, family, 128, sizes, mask=mask).regions[-1][1]

    rows = seqlen_q * seqlen_k // 8
    least = table(1, 1, 1)
    for entries, of_heads in ((1, 1), (batch, 1), (1, heads), (batch, heads)):
        more = table(entries, of_heads, seqlen_q) - least
        differ = entries * of_heads * rows - seqlen_k // 8
        of_blocks = (of_heads - 1) * batch * (seqlen_q + 32 * -(-seqlen_q // 64))
        assert differ <= more <= differ + of_blocks + 64
    if seqlen_q > 1:
        assert 5 * least <= table(1, 1, seqlen_q)
        assert 60 * least <= table(batch, heads, seqlen_q)


@given(shapes, st.sampled_from(["sm80", "sm90"]), st.sampled_from([64, 96, 128, 192, 256]))
def test_grids(host, shape, family, head_dim):
    """Every tile has a block, and on sm90 none is started that another round would not need."""
    batch, heads_kv, group, seqlen_q, seqlen_k, _ = shape
    sizes = batch, heads_kv * group, heads_kv, seqlen_q, seqlen_k, head_dim
    chosen = plan(host, family, head_dim, sizes, CAUSAL)
    assume(not chosen.splits)
    blocks = -(-seqlen_q // chosen.tile_queries) * batch * heads_kv * -(-group // chosen.packed_heads)
    assert chosen.workspace_bytes == 0
    if family == "sm80":
        assert chosen.blocks == blocks
    else:
        rounds = -(-blocks // chosen.blocks)
        assert chosen.blocks <= HOPPERS
        assert rounds == -(-blocks // HOPPERS)


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
    assert not dynamic or chosen.blocks == HOPPERS
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
    assume(not chosen.splits)
    tiles = [chosen.order(index) for index in range(chosen.order.tiles())]
    starts = range(0, seqlen, chosen.tile_queries)
    heads = [(head, head // group) for head in range(heads_kv * group)]
    assert sorted(tiles) == sorted((m, *head, b) for m in starts for head in heads for b in range(batch))
    assert chosen.dynamic == (len(tiles) > HOPPERS)


@given(st.data(), st.sampled_from(["sm80", "sm90"]))
def test_plans_of_unequal_lengths(host, data, family):
    """Room for every tile there can be, whatever the lengths; the tile is the mean's if they may be alike."""
    sizes, window, lengths = data.draw(ragged_batches())
    assume(any(lengths))
    chosen = plan(host, family, 128, (*sizes[:5], 128), window, lengths)
    batch = make_varlen_batch(host, sizes, window, lengths)
    places = sum(-(-batch.sequence(b)[2] // chosen.tile_queries) for b in range(sizes[0]))
    tiles = places * sizes[2] * -(-(sizes[1] // sizes[2]) // chosen.packed_heads)
    assert chosen.blocks >= (tiles if family == "sm80" else min(tiles, HOPPERS))
    assert chosen.prepared_by_kernel == (family == "sm80")
    dynamic = 4 if tiles > chosen.blocks else 0  # a counter
    assert chosen.workspace_bytes >= (16 + 32 * places if chosen.prepared_by_kernel else dynamic)
    if family == "sm90" and lengths[0] and sizes[3] % sizes[0] == 0:
        mean = [max(1, -(-rows // sizes[0])) for rows in sizes[3:5]]
        assert chosen.tile.block_m == plan(host, family, 128, (*sizes[:3], *mean, 128), window).tile.block_m


@pytest.mark.parametrize("more", [0, 1])
def test_many_sequences_are_listed_by_a_kernel_before(host, more):
    batch = host.FEW_SEQUENCES + more
    offsets = list(range(batch + 1))
    chosen = plan(host, "sm90", 128, (batch, 2, 2, batch, batch, 128), CAUSAL, [offsets, offsets])
    assert chosen.prepared_by_kernel == bool(more)
    assert (chosen.workspace_bytes >= 16 + 32 * batch) == bool(more)


@pytest.mark.parametrize("more", [0, 1])
def test_many_sequences_that_are_cut(host, more):
    """Blocks that list them keep the tile of each slot, for the kernel that combines parts."""
    batch = host.FEW_CUT_SEQUENCES + more
    used = [None, None, None, [8192] * batch]
    chosen = plan(host, "sm90", 128, (batch, 32, 8, 1, 8192, 128), FULL, used)
    assert chosen.splits
    assert chosen.prepared_by_kernel == bool(more)
    rows = 4 * (128 + 1) * 4  # of a slot: 4 heads, O and the LSE in float32
    assert chosen.workspace_bytes == chosen.partial_offset + chosen.slots * (rows + 64 * (not more))
    assert chosen.slots == 4 * HOPPERS


@given(shapes, st.sampled_from([64, 128, 256]))
def test_partial_results_lie_behind_the_tile_counter(host, shape, head_dim):
    """Blocks add to the counter even where each of them has one tile."""
    batch, heads_kv, group, seqlen_q, seqlen_k, _ = shape
    sizes = batch, heads_kv * group, heads_kv, seqlen_q, 100 * seqlen_k, head_dim
    chosen = plan(host, "sm90", head_dim, sizes)
    assume(chosen.slots > 0)
    assert chosen.partial_offset >= 4
    assert chosen.workspace_bytes > chosen.partial_offset


@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize(
    ("sizes", "window", "splits"),
    [
        ((1, 32, 8, 1, 8192, 128), FULL, True),
        ((64, 32, 8, 1, 8192, 128), FULL, True),  # as their heads are packed
        ((64, 32, 8, 16, 256, 128), CAUSAL, True),
        ((64, 32, 8, 1, 255, 128), FULL, False),  # few keys
        ((64, 32, 8, 100, 390, 128), CAUSAL, False),  # many queries
        ((1, 1, 1, 4096, 8192, 128), CAUSAL, True),  # few tiles
        ((8, 8, 8, 2048, 8192, 128), CAUSAL, False),
        ((1, 4, 4, 8192, 8192, 128), CAUSAL, False),
    ],
)
def test_keys_are_cut_where_queries_or_tiles_are_few(host, family, head_dim, sizes, window, splits):
    sizes = *sizes[:5], head_dim
    assert plan(host, family, head_dim, sizes, window).splits == splits


@given(shapes, st.sampled_from([64, 96, 128, 192, 256]), st.sampled_from([0, 8, 40]))
def test_parts_on_sm80_have_a_block_each(host, shape, head_dim, narrower):
    """And as they take no tile from a counter, there is none before the partial results, which are as wide
    as V."""
    batch, heads_kv, group, seqlen_q, seqlen_k, _ = shape
    head_dim_v = head_dim - narrower
    sizes = batch, heads_kv * group, heads_kv, seqlen_q, 100 * seqlen_k, head_dim, head_dim_v
    chosen = plan(host, "sm80", head_dim, sizes)
    assume(chosen.splits)
    tiles = -(-seqlen_q // chosen.tile_queries) * batch * heads_kv * -(-group // chosen.packed_heads)
    assert chosen.slots in (0, chosen.blocks)
    assert chosen.blocks % tiles == 0
    assert (chosen.slots > 0) == (chosen.blocks > tiles)
    assert chosen.partial_offset == 0
    rows = min(chosen.tile.block_m // chosen.packed_heads, seqlen_q) * chosen.packed_heads
    assert chosen.workspace_bytes == 4 * chosen.slots * rows * (head_dim_v + 1)
    lengths = plan(host, "sm80", head_dim, sizes, lengths=[None, None, None, [1] * batch])
    assert not lengths.splits or lengths.prepared_by_kernel


SLOT = 128 * (128 + 1) * 4  # bytes of 128 rows at head dim 128, O and the LSE in float32


def packed(queries, sequences, keys=None):
    """Offsets of sequences that are equally long, and lengths of their keys in a cache."""
    offsets = [b * queries // sequences for b in range(sequences + 1)]
    return [offsets, None, None, [keys] * sequences] if keys else [offsets, offsets]


@pytest.mark.parametrize(
    ("sizes", "lengths", "most_bytes"),
    [
        ((1, 32, 8, 512, 8192, 128), None, 10 << 20),
        ((1, 32, 8, 16384, 16384, 128), packed(16384, 1), 105 << 20),
        ((4, 32, 8, 16384, 16384, 128), packed(16384, 4), 105 << 20),
        ((8, 32, 8, 16384, 131072, 128), packed(16384, 8, 131072), 800 << 20),
    ],
)
def test_workspace_of_batch_invariant_chunks(host, sizes, lengths, most_bytes):
    """Tiles of many queries add up their splits, each thread block in a total; few tiles have slots."""
    chosen = plan(host, "sm90", 128, sizes, CAUSAL, lengths, batch_invariant=True)
    assert chosen.folds
    assert chosen.tile.block_m == 128
    assert chosen.totals_bytes == chosen.blocks * 128 * (128 + 8) * 4
    assert chosen.workspace_bytes < most_bytes
    assert chosen.slots * SLOT <= chosen.workspace_bytes
    free = plan(host, "sm90", 128, sizes, CAUSAL, lengths)
    assert not free.folds
    assert free.totals_bytes == 0


@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 8192), (16, 8192), (16, 1000), (512, 1000)])
def test_other_batch_invariant_calls_have_a_slot_for_each_split(host, family, queries, keys):
    """Those of few queries, and all on Ampere. Where there is one split there is no slot, and no total."""
    sizes, used = (4, 32, 8, queries, keys, 128), [None, None, None, [keys] * 4]
    folds = family == "sm90" and queries == 512
    for lengths in (None, used):
        chosen = plan(host, family, 128, sizes, FULL, lengths, batch_invariant=True)
        assert chosen.splits
        assert chosen.folds == folds
        assert chosen.totals_bytes == 0
        packs = -(-32 // chosen.packed_heads)
        tiles = 4 * packs * -(-queries // chosen.tile_queries)
        assert chosen.slots == (tiles * -(-keys // 1024) if keys > 1024 else 0)


def test_batch_invariant_slots_of_few_queries_follow_from_capacity(host):
    """Whatever the lengths on the device are: tiles of all queries times splits of all keys of the cache."""
    sizes, keys = (256, 32, 8, 1, 131072, 128), [None, None, None, [1] * 256]
    chosen = plan(host, "sm90", 128, sizes, FULL, keys, batch_invariant=True)
    assert chosen.slots == 256 * 8 * 128
    slot = 4 * (128 + 1) * 4 + 64  # 4 heads of one query; with the slot's tile
    assert chosen.workspace_bytes == chosen.partial_offset + chosen.slots * slot


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize(
    ("heads", "queries", "packed"),
    [
        ((32, 8), 1, 4),
        ((32, 8), 4, 4),
        ((16, 16), 16, 1),
        ((16, 1), 1, 16),
        ((32, 1), 1, 16),
        ((17, 1), 1, 9),
    ],
    ids=str,
)
def test_few_rows_of_codes_have_a_tile_of_their_own(host, head_dim, heads, queries, packed):
    """Up to 16 rows, of heads in equal parts, unless bits must be those of other tiles."""
    sizes = (8, *heads, queries, 8192, head_dim)
    chosen = plan(host, "sm90", head_dim, sizes, CAUSAL, is_fp8=True)
    assert (chosen.tile.block_m, chosen.packed_heads) == (16, packed)
    assert chosen.tile.block_n % (16 * chosen.tile.warps) == 0
    assert chosen.splits
    for changes in ({"batch_invariant": True}, {"is_fp8": False}):
        other = plan(host, "sm90", head_dim, sizes, CAUSAL, **{"is_fp8": True, **changes})
        assert other.tile.block_m == 64
    more = (8, *heads, 17, 8192, head_dim)
    assert plan(host, "sm90", head_dim, more, CAUSAL, is_fp8=True).tile.block_m > 16
