"""core/dispatch.hpp, instances.def and the tiles of its rows."""

from __future__ import annotations

from itertools import product

import pytest


def test_every_instance_has_a_tile(host):
    for direction, family, *head_dims, _ in host.instances():
        if direction == host.Pass.backward:
            assert host.backward_tiles(family, tuple(head_dims)), f"{family} has no tile for {head_dims}"
            continue
        main, small, *_ = host.forward_tiles(family, tuple(head_dims))
        assert main.warps > 0, f"{family} has no tile for {head_dims}"
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


@pytest.mark.parametrize("head_dims", [72, (192, 128), (64, 128)])
def test_head_dims_without_a_row_have_no_tile(host, head_dims):
    assert host.forward_tiles(host.Family.sm80, head_dims)[0].warps == 0
    assert host.backward_tiles(host.Family.sm80, head_dims) == []


def test_instances_are_well_formed(host):
    """No row is there twice, and each pass of each family has the largest head dims that are promised."""
    rows = host.instances()
    assert len(set(rows)) == len(rows)
    for direction in (host.Pass.forward, host.Pass.backward):
        for family in (host.Family.sm80, host.Family.sm90):
            pairs = [row[2:4] for row in rows if row[:2] == (direction, family)]
            assert all(width % 8 == 0 for pair in pairs for width in pair)
            assert max(pairs) == (256, 256)


# What tests/host/flash_cute/compiled.def lists: head dims, and pairs of those of Q and K, and of V.
COMPILED = {
    ("forward", "sm80", "fp16"): [64, (64, 256), 128, 256],
    ("backward", "sm80", "fp16"): [128],
    ("forward", "sm80", "bf16"): [96],
    ("backward", "sm80", "bf16"): [],
    ("forward", "sm90", "fp16"): [],
    ("forward", "sm90", "bf16"): [64, (192, 128), 192],
    ("backward", "sm90", "bf16"): [64, 96],
}
WIDTHS = sorted({1, *(size + more for size in (64, 96, 128, 192, 256) for more in (-1, 0, 1))})


@pytest.fixture
def bucket(host):
    def of(axes, head_dim, head_dim_v):
        enums = zip((host.Pass, host.Family, host.ElementType), axes, strict=True)
        return host.bucket(*(getattr(enum, name) for enum, name in enums), head_dim, head_dim_v)

    return of


@pytest.mark.parametrize("axes", COMPILED, ids="_".join)
def test_dispatch_takes_the_smallest_kernel_that_fits(bucket, axes):
    """It holds both head dims, and has the smallest sum of them."""
    kernels = [size if isinstance(size, tuple) else (size, size) for size in COMPILED[axes]]
    for head_dim, head_dim_v in [*((size, size) for size in range(1, 300)), *product(WIDTHS, WIDTHS)]:
        fitting = [pair for pair in kernels if pair[0] >= head_dim and pair[1] >= head_dim_v]
        assert bucket(axes, head_dim, head_dim_v) == min(fitting, key=sum, default=(0, 0))


@pytest.mark.parametrize(
    ("axes", "head_dims", "expected"),
    [
        (("forward", "sm90", "bf16"), (192, 128), (192, 128)),
        (("forward", "sm90", "bf16"), (65, 1), (192, 128)),
        (("forward", "sm90", "bf16"), (64, 65), (192, 128)),  # of a smaller sum than 192 and 192
        (("forward", "sm90", "bf16"), (192, 129), (192, 192)),
        (("forward", "sm90", "bf16"), (64, 64), (64, 64)),
        (("forward", "sm90", "bf16"), (193, 64), (0, 0)),
        (("forward", "sm80", "fp16"), (64, 128), (128, 128)),  # of a smaller sum than 64 and 256
        (("forward", "sm80", "fp16"), (64, 129), (64, 256)),
        (("forward", "sm80", "fp16"), (65, 129), (256, 256)),
        (("backward", "sm90", "bf16"), (64, 65), (96, 96)),  # no pair holds them
        (("backward", "sm90", "bf16"), (96, 8), (96, 96)),
    ],
)
def test_pairs_and_what_takes_their_place(bucket, axes, head_dims, expected):
    assert bucket(axes, *head_dims) == expected
