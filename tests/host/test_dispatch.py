"""core/dispatch.hpp, instances.def and the tiles of its rows."""

from __future__ import annotations

import pytest


def test_every_instance_has_a_tile(host):
    for direction, family, head_dim, _ in host.instances():
        if direction == host.Pass.backward:
            assert host.backward_tiles(family, head_dim), f"{family} has no tile for head_dim {head_dim}"
            continue
        main, small, *_ = host.forward_tiles(family, head_dim)
        assert main.warps > 0, f"{family} has no tile for head_dim {head_dim}"
        for tile in [main, small] if small.warps else [main]:
            assert tile.stages >= 1
            assert tile.block_m % 16 == 0
            assert tile.block_n % 16 == 0
        assert small.block_m < main.block_m


@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_tiles_of_parts(host, family, head_dim):
    """Both have the same block of keys, on which a query's bits depend, and parts of whole blocks."""
    _, _, few, many = host.forward_tiles(getattr(host.Family, family), head_dim)
    if (family, head_dim) in (("sm80", 96), ("sm80", 192)):  # a larger kernel serves them
        assert few.warps == many.warps == 0
        return
    assert few.block_n == many.block_n
    assert few.block_m == 64
    for tile in (few, many):
        assert 256 % tile.block_n == 0
        rows = tile.block_m + 2 * tile.stages * tile.block_n
        assert rows * head_dim * 2 <= (96 if family == "sm80" else 226) << 10


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tiles_of_float32(host, head_dim):
    """They fit into the 99 KB that a thread block has on 8.6 and 8.9, with the description of a tile."""
    main, small, few, many = host.forward_tiles(host.Family.sm80, head_dim, 4)
    assert small.warps == few.warps == many.warps == 0
    assert main.block_m % (16 * main.warps) == 0
    assert main.block_n % 16 == 0
    assert (main.block_m + 2 * main.stages * main.block_n) * head_dim * 4 <= (99 << 10) - 256
    assert host.forward_tiles(host.Family.sm90, head_dim, 4)[0].warps == 0


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
