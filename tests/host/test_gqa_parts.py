"""backward/gqa_parts.hpp: in how many parts a group of query heads is worked on."""

from __future__ import annotations

import pytest
from problems import CAUSAL, FEW, FULL, HOPPERS, plan_backward


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
    assert plan.gqa_parts == without_keys.gqa_parts == parts
    floats = 2 * plan.tiles // parts * plan.tile.block_n * head_dim if parts > 1 else 0
    assert plan.workspace_bytes == without_keys.workspace_bytes + 4 * floats


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_many_blocks_clear_sums_of_many_keys(host, family):
    """Else those of few queries would, one after the other."""

    def blocks(*sizes):
        return plan_backward(host, 128, (*sizes, 128), family=family, window=FULL)

    few = blocks(1, 8, 1, 64, 8192)
    assert few.gqa_parts > 1
    assert few.q_blocks * 8 < HOPPERS <= few.preprocess_blocks
    for plan in (blocks(1, 8, 8, 64, 100_000), blocks(4, 8, 1, 4096, 4096)):
        # Or backward_zero_fill does.
        assert plan.preprocess_blocks == plan.q_blocks * 8


@pytest.mark.parametrize(("sizes", "parts"), [((32, 1, 4096, 4096), 4), ((32, 8, 2048, 2048), 1)])
def test_parts_of_groups_of_deterministic_calls_depend_on_no_batch(host, sizes, parts):
    for batch in (1, 2, 50):
        for multiprocessors in (FEW, HOPPERS):
            options = {"family": "sm90", "multiprocessors": multiprocessors}
            plan = plan_backward(host, 128, (batch, *sizes, 128), asked_for=(True, True, True), **options)
            assert plan.gqa_parts == parts
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
    assert plan.gqa_parts == parts
    assert plan.workspace_bytes == 4 * (floats + plan.rows * head_dim)
    grouped = sizes[1] != sizes[2]
    assert (plan.section == 1) != grouped
