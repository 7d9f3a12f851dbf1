"""softmax/plan.hpp."""

from __future__ import annotations

from problems import LONGEST, given, st


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
