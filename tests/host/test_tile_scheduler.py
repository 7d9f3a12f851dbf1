"""backward/tile_scheduler.hpp: blocks of keys and of rows of dQ, each once and in which order."""

from __future__ import annotations

from itertools import accumulate, pairwise, product

import pytest
from problems import CAUSAL, FEW, FULL, HOPPERS, make_mask, make_varlen_batch, plan_backward, rows_of_sequence
from support.cases import matrix


@pytest.mark.parametrize(
    ("head_dim", "apart"), [(64, True), (96, True), (128, True), (192, False), (256, False)]
)
def test_heads_come_one_by_one_where_rows_are_made_of_their_sums(host, head_dim, apart):
    """Behind a window, too."""
    sizes, window = (2, 3, 3, 17_000, 17_000, head_dim), (1000, 0)
    plan = plan_backward(host, head_dim, sizes, family="sm90", window=window)
    heads = [(b, head) for (b, head, _), _ in host.key_tiles(plan)]
    changes = sum(before != after for before, after in pairwise(heads))
    assert (changes == 5) == apart


def assert_blocks_of_keys_on_ampere(host, sizes, lengths, limits, multiprocessors) -> None:
    options = {"lengths": lengths, "window": limits, "multiprocessors": multiprocessors}
    plan = plan_backward(host, sizes[-1], sizes, **options)
    expected = []
    for b in range(sizes[0]):
        _, queries, keys = rows_of_sequence(sizes, lengths, b)
        mask = make_mask(host, len(queries), len(keys), *limits)
        begins = range(0, len(keys) - mask.first_reachable_key(), plan.tile.block_n)
        expected += [(b, head, begin) for head in range(sizes[2] * plan.gqa_parts) for begin in begins]
    assert sorted(tile for tile, _ in host.key_tiles(plan)) == expected


@matrix(
    head_dim=[64, 128, 256],
    limits=[FULL, CAUSAL, (32, 0), (None, 40)],
    lengths={"dense": None, "packed": ([0, 400, 401, 900], [0, 1, 333, 700])},
    heads_and_multiprocessors=[(24, FEW), (24, 2), (24, HOPPERS), (6, FEW), (1, FEW)],
)
def test_blocks_of_keys_on_ampere(host, heads_and_multiprocessors, lengths, limits, head_dim):
    """Each block of keys comes once, of each head of K and V or of each part of its group."""
    heads_kv, multiprocessors = heads_and_multiprocessors
    sizes = (3, 24, heads_kv, 900 if lengths else 300, 700 if lengths else 520, head_dim)
    assert_blocks_of_keys_on_ampere(host, sizes, lengths, limits, multiprocessors)


@matrix(
    head_dim=[64, 128, 256],
    limits=[FULL, CAUSAL, (32, 0), (None, 40)],
    heads_kv=[6, 1],
    lengths={
        "used": (None, None, [400, 0, 7], [333, 5, 0]),
        "left padding": (None, None, [30, 40, 50], [520, 20, 400], [0, 3, 390]),
        "packed": ([0, 130, 130, 400], [5, 205, 205, 520]),
        "no queries": ([9, 9, 9, 9], [0, 100, 300, 520]),
        "no queries and keys at once": ([0, 400, 400, 400], [0, 0, 0, 520]),
        "few": ([0, 1, 2, 3], [0, 0, 1, 1]),
    },
)
def test_blocks_of_keys_of_unequal_lengths_on_ampere(host, lengths, heads_kv, limits, head_dim):
    assert_blocks_of_keys_on_ampere(host, (3, 6, heads_kv, 400, 520, head_dim), lengths, limits, HOPPERS)


@pytest.mark.parametrize(
    "offsets", [[0, 300, 130, 520], [520, 0, 90, 400], [300, 200, 100, 0], [-9, 700, 5, 800]]
)
@pytest.mark.parametrize("limits", [FULL, CAUSAL, (32, 0)])
@pytest.mark.parametrize("heads_kv", [6, 2])
@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_blocks_of_keys_of_offsets_that_decrease(host, family, heads_kv, limits, offsets):
    """As of offsets that are the largest so far, and within the total."""
    ordered = list(accumulate((min(max(offset, 0), 520) for offset in offsets), max))

    def tiles(offsets):
        sizes, lengths = (3, 6, heads_kv, 520, 520, 128), [offsets, offsets]
        return host.key_tiles(plan_backward(host, 128, sizes, lengths=lengths, family=family, window=limits))

    assert tiles(offsets) == tiles(ordered)


@pytest.mark.parametrize("limits", [FULL, CAUSAL, (32, 0)])
@pytest.mark.parametrize("heads_kv", [12, 4])
@pytest.mark.parametrize("length", [512, 500])
def test_packed_sequences_of_equal_lengths_go_as_dense_ones_on_ampere(host, length, heads_kv, limits):
    batch, head_dim, mean = 8, 128, 512
    rows = [length] * (batch - 1) + [length + batch * (mean - length)]
    offsets = list(accumulate(rows, initial=0))

    def tiles(total, lengths=None):
        sizes = (batch, 12, heads_kv, total, total, head_dim)
        options = {"window": limits, "multiprocessors": FEW}
        return host.key_tiles(plan_backward(host, head_dim, sizes, lengths=lengths, **options))

    dense, packed = tiles(mean), tiles(offsets[-1], (offsets, offsets))
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
        ([0, 130, 130, 400], [5, 200, 300, 333]),
        ([0, 120, 260, 400], [5, 105, 210, 320]),
        ([200, 264, 392, 395], [5, 105, 210, 320]),
        ([0, 130, 260, 400], [5, 200, 300, 333], [0, 65, 1]),
        (None, None, [400, 0, 129]),
    ],
    ids=["dense", "packed", "alike", "behind other rows", "partly used", "padded"],
)
@pytest.mark.parametrize("heads_kv", [1, 2, 4])
@pytest.mark.parametrize("block_m", [64, 128])
def test_order_of_rows_of_dq(host, block_m, heads_kv, lengths):
    """Each block of queries that has rows comes once, and pairs come in the order in which their blocks of
    keys do."""
    sizes = (3, 4, heads_kv, 400, 333, 64)
    batch = make_varlen_batch(host, sizes, FULL, lengths)
    places = host.BatchBlocks(batch, True, block_m)
    order = host.rows_order(batch, block_m)
    assert len(order) == 4 * places.count()
    blocks = [(pair, *block) for pair, *block, exists, _ in order if exists]
    begins = {place: begin for _, _, _, place, exists, begin in order if exists}
    rows = [len(rows_of_sequence(sizes, lengths, b)[1]) for b in range(3)]
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
    if lengths and not lengths[0]:
        return
    options = {"lengths": lengths, "family": "sm90", "window": FULL, "multiprocessors": FEW}
    listed = host.key_tiles(plan_backward(host, 64, sizes, **options))
    first_keys = {begin: b for b, begin in enumerate(lengths[1][:3])} if lengths else {}
    pairs = [(first_keys.get(k, b) if lengths else b, head) for (b, head, k), _ in listed]
    pairs = [pair for pair in pairs if pair[0] * heads_kv + pair[1] in {block[0] for block in blocks}]
    of_keys = [b * heads_kv + head for b, head in dict.fromkeys(pairs)]
    of_rows = [pair for pair in dict.fromkeys(block[0] for block in blocks) if pair in of_keys]
    assert of_rows == of_keys


# These three decide together in which order blocks of queries come.
ORDERS = {
    f"{lengths}, {limits}, {'deterministic' if deterministic else 'free'}": (offsets, window, deterministic)
    for (lengths, offsets), (limits, window), deterministic in product(
        {"dense": None, "packed": ([0, 130, 130, 400], [5, 200, 300, 333])}.items(),
        {"causal": CAUSAL, "full": FULL, "window": (50, 20)}.items(),
        (False, True),
    )
}


@matrix(
    head_dim=[64, 96, 128, 192, 256],
    order=ORDERS,
    heads_and_multiprocessors=[(4, HOPPERS), (2, HOPPERS), (1, 12), (2, FEW)],
)
def test_blocks_of_keys_on_hopper(host, heads_and_multiprocessors, order, head_dim):
    """Each block of keys comes once, with all blocks of queries that see it, of all heads of the group, or of
    a part of it: from its own on, where the first one stores; in turns the last ones first, where blocks of
    keys have those in common."""
    (heads_kv, multiprocessors), (lengths, limits, deterministic) = heads_and_multiprocessors, order
    sizes = (3, 4, heads_kv, 400, 333, head_dim)
    asked_for = (True, True, deterministic)
    options = {"family": "sm90", "window": limits, "multiprocessors": multiprocessors}
    plan = plan_backward(host, head_dim, sizes, lengths=lengths, asked_for=asked_for, **options)
    heads_kv *= plan.gqa_parts
    tile = host.backward_tiles(host.Family.sm90, head_dim)[0]
    listed = host.key_tiles(plan)
    found = dict(listed)
    assert len(found) == len(listed)
    last_first = deterministic and (lengths or limits != FULL)
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
