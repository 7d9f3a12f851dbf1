"""backward/plan.hpp: the tile of a call, the kernels it runs and what they share."""

from __future__ import annotations

import math

import pytest
from problems import CAUSAL, FEW, FULL, HOPPERS, plan_backward

# The shared memory of a thread block on GPUs of 9.0, 8.0, and 8.6.
HOPPER, A100, ADA = 232448, 166912, 101376
KEPT_TILE = 128  # of shared memory, beside what tiles ask for


@pytest.mark.parametrize("smem_bytes", [HOPPER, A100, ADA])
def test_tiles_of_the_backward_fit(host, smem_bytes):
    for direction, family, head_dim, _, variant in host.instances():
        if (direction, family) != (host.Pass.backward, host.Family.sm80):
            continue
        general = variant == host.Variant.general
        tiles = host.backward_tiles(family, head_dim, general, general)
        changes = {"softcap": 20.0} if general else {}
        tile = plan_backward(host, head_dim, (1, 1, 1, 4096, 4096, head_dim), smem_bytes, **changes).tile
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
        (1024, FULL, 128),
        (512, FULL, 64),
        (8192, (1024, None), 128),
        (8192, (512, 0), 64),
    ],
)
def test_keys_that_few_queries_see_take_a_smaller_tile(host, seqlen, window, block_m):
    batch = 16384 // seqlen
    offsets = [seqlen * index for index in range(batch + 1)]
    dense, packed = (batch, 2, 2, seqlen, seqlen, 64), (batch, 2, 2, 16384, 16384, 64)
    for sizes, lengths in ((dense, None), (packed, (offsets, offsets))):
        assert plan_backward(host, 64, sizes, lengths=lengths, window=window).tile.block_m == block_m


def test_keys_out_of_reach_do_not_make_the_tile_smaller(host):
    """2048 queries at the end of 16384 keys, a window of 4096: the first 10240 keys are nobody's."""
    queries, keys = [0, 2048, 4096], [0, 16384, 32768]
    dense, packed = (2, 2, 2, 2048, 16384, 64), (2, 2, 2, 4096, 32768, 64)
    for sizes, lengths in ((dense, None), (packed, (queries, keys))):
        assert plan_backward(host, 64, sizes, lengths=lengths, window=(4096, 0)).tile.block_m == 128


RANGES = {"ranges": 1}, {"ranges": 4}
MASKS = {"mask": (1, 1, 1)}, {"mask": (2, 8, 2048)}
CHANGES = *MASKS, {"softcap": 20.0}, {"slopes": True}, {"bias": True}, {"keep": 3686}
LONG = 2, 8, 8, 2048, 2048


@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_kernels_of_general_calls(host, family, head_dim):
    """Of ranges alone, and of masks alone, Hopper has kernels that look at nothing else."""
    for changes in RANGES + CHANGES:
        plan = plan_backward(host, head_dim, (*LONG, head_dim), family=family, **changes)
        assert plan.has_table
        hides_pairs = changes in MASKS and family == "sm90" and head_dim < 256
        assert plan.hides_pairs == hides_pairs
        assert plan.changes_scores == (family == "sm80" or (changes in CHANGES and not hides_pairs))
        assert not plan.tile.has_two_roles
        assert plan.zero_fills_dq  # of blocks of queries that no tile visits
    for changes in ({}, {"keep": 4096}, {"softcap": 0.0}):
        plan = plan_backward(host, head_dim, (*LONG, head_dim), family=family, **changes)
        assert not plan.has_table
        assert not plan.changes_scores
        assert plan.tile.has_two_roles == (family == "sm80" and head_dim == 256)


@pytest.mark.parametrize(
    ("head_dim", "of_ranges", "of_changes"),
    [(64, (128, 128), (64, 128)), (128, (64, 128), (64, 128)), (256, (64, 128), (64, 128))],
)
def test_tiles_of_changed_scores_on_hopper(host, head_dim, of_ranges, of_changes):
    """Threads add LSE and delta, but where pairs are hidden alone; where one thread block has a tile, pairs
    have room in its memory instead of sums of dQ."""
    for changes in RANGES + CHANGES:
        plan = plan_backward(host, head_dim, (*LONG, head_dim), family="sm90", window=FULL, **changes)
        changed = changes in CHANGES
        assert (plan.tile.block_m, plan.tile.block_n) == (of_changes if changed else of_ranges)
        assert plan.tile.lse_delta_mma == ((not changed or changes in MASKS) and head_dim <= 128)
        assert plan.tile.has_pair_tiles == (changed and head_dim <= 128)
        assert plan.converts_dq == (not changed and head_dim <= 128)


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_the_workspace_of_a_mask_of_pairs(host, family):
    """A bit for each pair that differs; those of one row, entry or head are there once."""
    batch, heads, _, seqlen, _ = LONG

    def table(*mask):
        plan = plan_backward(host, 128, (*LONG, 128), family=family, mask=mask)
        return plan.regions[-1][2]

    least = table(1, 1, 1)
    for entries, of_heads in ((1, 1), (batch, 1), (1, heads), (batch, heads)):
        more = table(entries, of_heads, seqlen) - least
        differ = (entries * of_heads * seqlen - 1) * seqlen // 8
        of_blocks = (of_heads - 1) * batch * (seqlen + (8 + 8 + 4) * seqlen // 64)
        assert differ <= more <= differ + of_blocks + 64
    assert 30 * least <= table(batch, heads, seqlen)


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
    parts = 2 * plan.tiles * plan.tile.block_n * 128 if plan.gqa_parts > 1 and plan.runs_kv else 0
    if not asked_for[2]:
        parts //= plan.gqa_parts  # these add to the same sums
    assert plan.lse_delta_in_dq == plan.accumulates_dq
    assert plan.workspace_bytes == 4 * (parts + rows * (128 if plan.accumulates_dq else 2))


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
        cumulated = lengths and [[0, seqlen // 10, seqlen]] * 2
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
            lengths = ([0, queries, 2 * queries], [0, seqlen, 2 * seqlen])
        options = {"lengths": lengths, "asked_for": (True, True, deterministic), "window": window}
        multiprocessors = HOPPERS if heads_kv == 4 else FEW
        return plan_backward(
            host, head_dim, sizes, family="sm90", multiprocessors=multiprocessors, **options
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


@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize("bucket", [64, 128, 256])
def test_sums_are_as_wide_as_the_kernel(host, family, bucket):
    """Whatever the head dim of V: those of dK and dV, where the keys of a group are shared out, and of dQ."""

    def planned(*head_dims):
        plan = plan_backward(host, bucket, (1, 32, 2, 2048, 2048, *head_dims), family=family)
        sums = {name: size for name, _, size, _ in plan.regions if name in ("dq", "gqa")}
        return sums, (plan.tile.block_m, plan.tile.block_n, plan.gqa_parts)

    square = planned(bucket)
    assert square[0]["gqa"] > 0
    for head_dims in ((bucket, 40), (40, bucket)):
        assert planned(*head_dims) == square


@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("empty", range(5))
def test_empty_problems_have_a_plan(host, empty, packed, family):
    sizes = [3, 4, 4, 50, 60]
    for dimension in ((0,), (1, 2), (3,), (4,), (3, 4))[empty]:
        sizes[dimension] = 0
    ends = [[size * i // 3 for i in range(sizes[0] + 1)] for size in sizes[3:]]
    plan = plan_backward(host, 64, (*sizes, 64), lengths=ends if packed else None, family=family)
    assert plan.tiles == plan.kv_blocks * sizes[2]


@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_a_gpu_of_one_multiprocessor(host, family, head_dim):
    """As a bound over all GPUs asks for; a tile of a cluster has two thread blocks."""
    plan = plan_backward(
        host, head_dim, (1, 2, 1, 1, 1, head_dim), family=family, window=FULL, multiprocessors=1
    )
    assert plan.blocks >= 1
