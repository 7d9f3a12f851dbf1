"""attention/sequence.hpp and batch_blocks.hpp: which rows of a batch of unequal lengths are whose."""

from __future__ import annotations

from problems import given, make_varlen_batch, ragged_batches, rows_of_sequence, st, visible_pairs


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


@given(st.one_of(ragged_batches(), ragged_batches(garbage=True)), st.sampled_from([1, 8, 64]), st.booleans())
def test_places_of_blocks(host, case, block, of_queries):
    """Each sequence's blocks have places of their own, and a place knows its sequence; never one past all."""
    sizes, _, lengths = case
    places = host.BatchBlocks(make_varlen_batch(host, *case), of_queries, block)
    offsets = lengths[0 if of_queries else 1]
    in_order = not offsets or offsets == sorted(offsets)
    taken = set()
    for index in range(sizes[0]):
        owned = rows_of_sequence(sizes, lengths[:2], index)[0 if of_queries else 2]
        if of_queries:  # of the keys, owned are those that count
            assert places.owned(index) == (owned.start, owned.stop)
        blocks = range(places.first(index), places.first(index) + -(-len(owned) // block))
        assert 0 <= blocks.start <= blocks.stop <= places.count()
        if in_order:
            assert not taken & set(blocks)
            taken |= set(blocks)
            assert all(places.sequence(place) == index for place in blocks)
    assert all(0 <= places.sequence(place) < sizes[0] for place in range(places.count()))
