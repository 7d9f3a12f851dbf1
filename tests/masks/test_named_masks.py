"""flash_cute.masks: each mask against its definition, one query and one key at a time."""

from __future__ import annotations

import itertools
import random
import re
import sys
from collections.abc import Callable

import pytest
import torch
from support.cases import ROOT, SEEDS, Shape, make_inputs, matrix

import flash_cute
from flash_cute import masks, reference

Sees = Callable[[int, int, int], bool]  # does query i of entry b see key j?


def dense(ranges: torch.Tensor, seqlen_k: int) -> torch.Tensor:
    return reference.visible(ranges.shape[-3], seqlen_k, ranges=ranges.cpu())


def defined(sees: Sees, batch: int, queries: int, keys: int) -> torch.Tensor:
    found = [[[sees(b, i, j) for j in range(keys)] for i in range(queries)] for b in range(batch)]
    return torch.tensor(found, dtype=torch.bool).reshape(batch, 1, queries, keys)


def check(ranges: torch.Tensor, sees: Sees, keys: int, device) -> None:
    """Are these ranges for a call, and the mask that is meant?"""
    assert (ranges.dtype, ranges.device.type, ranges.dim()) == (torch.int32, device.type, 5)
    assert ranges.is_contiguous()
    assert 1 <= ranges.shape[3] <= 4
    assert torch.equal(dense(ranges, keys), defined(sees, ranges.shape[0], ranges.shape[2], keys))


def random_runs(batch: int, seqlen: int, values: range) -> list[list[int]]:
    """Neighbours of one number, of random lengths."""
    rows = []
    for _ in range(batch):
        row = []
        while len(row) < seqlen:
            row += [SEEDS.choice(values)] * SEEDS.randint(1, 6)
        rows.append(row[:seqlen])
    return rows


def same_run(row: list[int], i: int, j: int) -> bool:
    return len(set(row[min(i, j) : max(i, j) + 1])) == 1


LENGTHS = [0, 1, 2, 17, 40]


@matrix(seqlen=LENGTHS, causal=[False, True])
def test_documents(device, seqlen, causal):
    ids = random_runs(3, seqlen, range(-1, 4))

    def sees(b, i, j):
        return same_run(ids[b], i, j) and ids[b][i] >= 0 and (j <= i or not causal)

    tensor = torch.tensor(ids, device=device, dtype=torch.int64).reshape(3, seqlen)
    for dtype in (torch.int64, torch.int32, torch.int16):
        check(masks.documents(tensor.to(dtype), causal=causal), sees, seqlen, device)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ends", [[], [5], [0, 5, 5, 12], [3, 20], [20]])
def test_documents_by_offsets(device, ends, causal):
    offsets, seqlen = [0, *ends], 20

    def sees(b, i, j):
        document = [sum(end <= place for end in ends) for place in (i, j)]
        return document[0] == document[1] < len(ends) and (j <= i or not causal)

    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=device)
    check(masks.documents(cu_seqlens=cu_seqlens, seqlen=seqlen, causal=causal), sees, seqlen, device)


PLACES = {
    "from the first": (lambda device: 20, lambda b, i: i),
    "behind a cache": (
        lambda device: torch.arange(9, device=device) + torch.tensor([[4], [11]], device=device),
        lambda b, i: i + (4, 11)[b],
    ),
}
BY_POSITION = {
    "chunks": (
        lambda queries, device: masks.chunks(4, queries, device=device),
        lambda b, i, j: j <= i and j // 4 == i // 4,
    ),
    "chunks that see ahead": (
        lambda queries, device: masks.chunks(5, queries, causal=False, device=device),
        lambda b, i, j: j // 5 == i // 5,
    ),
    "chunks that see ahead, behind padding": (
        lambda queries, device: masks.chunks(
            4, queries, causal=False, leftpad=torch.tensor([3, 7], device=device)
        ),
        lambda b, i, j: (3, 7)[b] <= j and (j - (3, 7)[b]) // 4 == (i - (3, 7)[b]) // 4,
    ),
    "chunks behind padding": (
        lambda queries, device: masks.chunks(4, queries, leftpad=torch.tensor([3, 7], device=device)),
        lambda b, i, j: (3, 7)[b] <= j <= i and (j - (3, 7)[b]) // 4 == (i - (3, 7)[b]) // 4,
    ),
    "causal": (
        lambda queries, device: masks.causal(queries, device=device),
        lambda b, i, j: j <= i,
    ),
    "prefix": (
        lambda queries, device: masks.prefix(torch.tensor([6, 0], device=device), queries),
        lambda b, i, j: j <= i or j < (6, 0)[b],
    ),
    "sink_window": (
        lambda queries, device: masks.sink_window(3, 5, queries, device=device),
        lambda b, i, j: j <= i and (j < 3 or j >= i - 5),
    ),
    "a window alone": (
        lambda queries, device: masks.sink_window(0, 0, queries, device=device),
        lambda b, i, j: j == i,
    ),
}


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("name", BY_POSITION)
def test_by_position(device, name, places):
    make, sees = BY_POSITION[name]
    queries, place = PLACES[places]
    ranges = make(queries(device), device)
    check(ranges, lambda b, i, j: sees(b, place(b, i), j), 24, device)


@pytest.mark.parametrize("name", ["causal", "chunks", "sink_window"])
def test_packed_positions(device, name):
    """Each sequence as if alone, in one call."""
    make, sees = BY_POSITION[name]
    offsets = torch.tensor([2, 9, 9, 30], dtype=torch.int32, device=device)
    places = masks.positions(offsets, 33)
    assert places.tolist() == [-1] * 2 + [*range(7), *range(21)] + [-1] * 3
    ranges = make(places, device)
    for begin, end in ((2, 9), (9, 30)):
        length = end - begin
        alone = ranges[begin:end][None, None].contiguous()
        check(alone, sees, length, device)
    x = torch.randn(33, 2, 64, device=device).bfloat16()
    out, _ = flash_cute.forward_varlen(x, x, x, offsets, ranges=ranges)
    for begin, end in ((2, 9), (9, 30)):
        part = x[begin:end].transpose(0, 1)[None]
        alone = flash_cute.attention(part, part, part, ranges=make(end - begin, device))
        torch.testing.assert_close(out[begin:end].transpose(0, 1), alone[0])


@matrix(seqlen=LENGTHS, window=[None, 0, 3, 100], window_images=[False, True])
def test_images(device, seqlen, window, window_images):
    ids = random_runs(3, seqlen, range(-2, 3))

    def sees(b, i, j):
        near = window is None or j >= i - window
        together = ids[b][i] >= 0 and same_run(ids[b], i, j)
        return (j <= i and near) or (together and (near or not window_images))

    tensor = torch.tensor(ids, device=device, dtype=torch.int64).reshape(3, seqlen)
    check(masks.images(tensor, window=window, window_images=window_images), sees, seqlen, device)


@pytest.mark.parametrize("seqlen", LENGTHS)
@pytest.mark.parametrize("several", [False, True])
def test_shared_prefix(device, seqlen, several):
    """Also where a document has no prompt, or is padding."""
    answers = random_runs(4, seqlen, range(-1, 4))
    documents = random_runs(4, seqlen, range(3)) if several else [[0] * seqlen] * 4

    def sees(b, i, j):
        row = list(zip(answers[b], documents[b], strict=True))
        if answers[b][i] < 0 or j > i or documents[b][i] != documents[b][j]:
            return False
        if not same_run(documents[b], i, j):
            return False
        first = next(
            place for place in range(i, -1, -1) if place == 0 or not same_run(documents[b], i, place - 1)
        )
        prompt = answers[b][first] == 0 and same_run(row, first, j)
        return same_run(row, i, j) or prompt

    def tensor(rows):
        return torch.tensor(rows, device=device, dtype=torch.int64).reshape(4, seqlen)

    given = [tensor(documents)] if several else []
    check(masks.shared_prefix(tensor(answers), *given), sees, seqlen, device)


PADDINGS = {
    "none": [1] * 12,
    "all": [0] * 12,
    "left": [0] * 5 + [1] * 7,
    "right": [1] * 5 + [0] * 7,
    "both": [0] * 3 + [1] * 4 + [0] * 5,
    "a hole": [1] * 3 + [0] * 4 + [1] * 5,
    "four runs": [1, 0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 0],
}


@matrix(row=PADDINGS, causal=[False, True], queries=[None, 1, 5, 15])
def test_padding(device, row, causal, queries):
    rows = [row, *random.Random(len(row)).sample(list(PADDINGS.values()), 2)]
    mask = torch.tensor(rows, device=device)
    before = 12 - (12 if queries is None else queries)

    def sees(b, i, j):
        return rows[b][j] == 1 and (j <= i + before or not causal)

    for dtype in (torch.int64, torch.bool, torch.float32):
        ranges = masks.padding(mask.to(dtype), queries, causal=causal)
        assert ranges.shape == (3, 1, 12 - before, 4, 2)
        check(ranges, sees, 12, device)


def test_padding_of_five_runs(device, monkeypatch):
    """What is behind the last run is left out; it is an error on request."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 1]], device=device).repeat(1, 3)
    check(masks.padding(mask, runs=2), lambda b, i, j: b == 0 or j in (0, 2, 3), 9, device)
    monkeypatch.setattr(flash_cute.lengths, "CHECKED", True)
    masks.padding(mask, runs=4)
    sentence = r"flash_cute\.masks\.padding: row 1 has 4 ranges; at most 3 are accepted"
    with pytest.raises(ValueError, match=sentence):
        masks.padding(mask, runs=3)


@pytest.mark.parametrize(("size", "seqlen"), [(1, 5), (2, 6), (4, 10), (9, 5), (3, 0)])
def test_block_diffusion(device, size, seqlen):
    def sees(b, i, j):
        block_i, block_j = (place % seqlen // size for place in (i, j))
        if i < seqlen:
            return block_i == block_j if j < seqlen else block_j < block_i
        return j >= seqlen and block_j <= block_i

    check(masks.block_diffusion(size, seqlen, device=device), sees, 2 * seqlen, device)


def test_from_slices(device):
    slices = [((0, 6), (0, 6), "causal"), ((4, 9), (10, 14), "full"), ((2, 5), (7, 12), "inverse causal"),
              ((6, 12), (3, 20), "both"), ((3, 3), (0, 20), "full")]  # fmt: skip

    def sees(b, i, j):
        found = False
        for (q0, q1), (k0, k1), kind in slices:
            inside = q0 <= i < q1 and k0 <= j < k1
            if kind in ("causal", "both"):
                inside = inside and j <= i + (k1 - q1)
            if kind in ("inverse causal", "both"):
                inside = inside and j >= i + (k0 - q0)
            found = found or inside
        return found

    ranges = masks.from_slices(*map(list, zip(*slices, strict=True)), 13, device=device)
    assert ranges.shape == (1, 1, 13, 3, 2)
    check(ranges, sees, 20, device)
    with pytest.raises(ValueError, match="from_slices: query 1 has 5 ranges; at most 4 are accepted"):
        masks.from_slices([(1, 2)] * 5, [(0, 1)] * 5, ["full"] * 5, 3)
    with pytest.raises(
        ValueError, match="kinds has 'half'; 'full', 'causal', 'inverse causal' and 'both' are"
    ):
        masks.from_slices([(1, 2)], [(0, 1)], ["half"], 3)
    with pytest.raises(ValueError, match=r"q_ranges has \(1, 4\); ranges of 0 to 3 are accepted"):
        masks.from_slices([(1, 4)], [(0, 1)], ["full"], 3)


def test_from_dense(device):
    mask = torch.rand(2, 1, 30, 8) < 0.5
    ranges = masks.from_dense(mask.to(device))
    assert torch.equal(dense(ranges, 8), mask)
    assert masks.from_dense(mask[0, 0].to(device)).shape[:3] == (1, 1, 30)
    mask = torch.zeros(3, 20, dtype=torch.bool)
    assert masks.from_dense(mask).shape == (1, 1, 3, 1, 2)
    mask[1, ::2] = True
    with pytest.raises(ValueError, match="from_dense: query 1 has 10 ranges; at most 4 are accepted"):
        masks.from_dense(mask)
    with pytest.raises(ValueError, match=r"from_dense: mask must hold booleans, got torch\.float32"):
        masks.from_dense(mask.float())


def mask_mods(batch: int, seqlen: int, device) -> dict[str, Callable]:
    """mask_mods of FlexAttention."""
    ids = torch.tensor(random_runs(batch, seqlen, range(3)), device=device)
    length = torch.randint(0, seqlen, (batch,), device=device)
    anything = torch.rand(batch, seqlen, seqlen, device=device) < 0.3
    anything[:, :, 3:-2] = False  # at most three runs
    return {
        "causal": lambda b, h, q, kv: q >= kv,
        "documents": lambda b, h, q, kv: (q >= kv) & (ids[b, q] == ids[b, kv]) & (q - kv < 7),
        "prefix": lambda b, h, q, kv: (kv < length[b]) | (q >= kv),
        "sink and window": lambda b, h, q, kv: (q >= kv) & ((kv < 3) | (q - kv <= 20)),
        "rows of one entry": lambda b, h, q, kv: anything[b][q, kv],
        "nothing": lambda b, h, q, kv: q < q,
        "everything": lambda b, h, q, kv: kv >= 0,
    }


@pytest.mark.parametrize(
    "shape", [(3, 200, 200), (2, 70, 200), (1, 64, 128), (2, 1, 17), (0, 5, 5), (1, 0, 3)]
)
def test_from_mask_mod(device, shape, monkeypatch):
    create_mask = pytest.importorskip("torch.nn.attention.flex_attention").create_mask
    batch, queries, keys = shape
    for mask_mod, pairs in itertools.product(mask_mods(batch, 200, device).values(), (2**26, 20000)):
        monkeypatch.setattr(masks.flex, "_PAIRS", pairs)
        ranges = masks.from_mask_mod(mask_mod, batch, queries, keys, device=device)
        assert (ranges.dtype, ranges.shape[:3]) == (torch.int32, (batch, 1, queries))
        if 0 not in shape:
            right = create_mask(mask_mod, batch, None, queries, keys, device=device)
            assert torch.equal(dense(ranges, keys), right.cpu())


@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("shape", [(3, 200, 200), (2, 70, 200), (None, 64, 128)])
def test_from_block_mask(device, shape, heads, monkeypatch):
    """Of blocks of any size; mask_mod is asked for keys that there are, in partial blocks alone."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    batch, queries, keys = shape
    asked, evaluated = masks.flex._values, []
    monkeypatch.setattr(masks.flex, "_values", lambda *x: evaluated.append(len(x[2])) or asked(*x))
    for mask_mod in mask_mods(batch or 1, 200, device).values():
        right = flex.create_mask(mask_mod, batch, None, queries, keys, device=device).cpu()
        for size, pairs in (((128, 128), 2**26), ((64, 32), 20000), ((40, 200), 2**26)):
            monkeypatch.setattr(masks.flex, "_PAIRS", pairs)
            block_mask = flex.create_block_mask(
                mask_mod, batch, heads, queries, keys, device=device, BLOCK_SIZE=size
            )
            evaluated.clear()
            assert torch.equal(dense(masks.from_block_mask(block_mask), keys), right)
            assert sum(evaluated) == int(block_mask.kv_num_blocks[:, 0].sum())


def test_blocks_that_are_listed():
    """Full ones are not asked, and what is behind the counts does not count."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    counts = torch.tensor([[[1, 0, 1]]], dtype=torch.int32)
    indices = torch.tensor([[[[1, 0, 9], [0, 1, 2], [2, 2, 2]]]], dtype=torch.int32)
    full = torch.tensor([[[[2, 0, 1], [0, 1, 2], [0, 9, 9]]]], dtype=torch.int32)
    block_mask = flex.BlockMask.from_kv_blocks(
        counts,
        indices,
        counts,
        full,
        BLOCK_SIZE=4,
        mask_mod=lambda b, h, q, kv: q % 4 >= kv % 4,
        seq_lengths=(11, 10),
    )
    diagonal = torch.ones(4, 4, dtype=torch.bool).tril()
    right = torch.zeros(12, 12, dtype=torch.bool)
    right[:4, 4:8], right[:4, 8:], right[8:, 8:], right[8:, :4] = diagonal, True, diagonal, True
    ranges = masks.from_block_mask(block_mask)
    assert ranges.shape == (1, 1, 11, 2, 2)
    assert torch.equal(dense(ranges, 10)[0, 0], right[:11, :10])


def test_mask_mods_that_are_refused():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    slopes = torch.arange(4)

    for mask_mod, sentence in (
        (lambda b, h, q, kv: (q != 33) | (kv % 4 == 1), "query 33 has 10 ranges; at most 4 are accepted"),
        (lambda b, h, q, kv: q - kv < slopes[h], "mask_mod looks at its head; a mask alike for all heads is"),
        (lambda b, h, q, kv: (q >= kv) & (h == 0), "mask_mod looks at its head"),
    ):
        with pytest.raises(ValueError, match=f"^flash_cute.masks.from_mask_mod: {sentence}"):
            masks.from_mask_mod(mask_mod, 1, 40, 40)
        block_mask = flex.create_block_mask(mask_mod, 1, None, 40, 40, device="cpu", BLOCK_SIZE=16)
        with pytest.raises(ValueError, match=f"^flash_cute.masks.from_block_mask: {sentence}"):
            masks.from_block_mask(block_mask)
    with pytest.raises(ValueError, match=r"must return torch\.bool of no dimensions, got torch\.int64"):
        masks.from_mask_mod(lambda b, h, q, kv: q - kv, 1, 40, 40)
    of_heads = flex.create_block_mask(lambda b, h, q, kv: q >= kv + 16 * h, 1, 2, 64, 64, device="cpu")
    of_heads.kv_num_blocks = torch.tensor([[[1], [0]]], dtype=torch.int32)
    with pytest.raises(
        ValueError, match="from_block_mask: block_mask has other blocks for other heads; a mask"
    ):
        masks.from_block_mask(of_heads)
    with pytest.raises(TypeError, match="block_mask is of type Tensor; a BlockMask is accepted"):
        masks.from_block_mask(torch.ones(3))
    with pytest.raises(ValueError, match="from_mask_mod: batch must be an int from 0 to 268435456, got None"):
        masks.from_mask_mod(lambda b, h, q, kv: q >= kv, None, 3, 3)


def test_union_and_intersection(device):
    ids = torch.tensor(random_runs(2, 30, range(3)), device=device)
    documents, local = masks.documents(ids), masks.sink_window(2, 4, 30, device=device)
    both, either = masks.intersection(documents, local), masks.union(documents, local)
    assert both.shape == (2, 1, 30, 2, 2)
    assert either.shape == (2, 1, 30, 3, 2)
    assert torch.equal(dense(both, 30), dense(documents, 30) & dense(local, 30))
    assert torch.equal(dense(either, 30), dense(documents, 30) | dense(local, 30))
    assert torch.equal(dense(masks.intersection(local, local), 30), dense(local, 30))
    with pytest.raises(ValueError, match="union: a query has at most 4 ranges, got 5"):
        masks.union(either, local)
    with pytest.raises(ValueError, match="intersection: a query has at most 4 ranges, got 6"):
        masks.intersection(either, local)


def test_shift(device):
    """The parts of the keys are the whole's columns; extreme numbers do not overflow."""
    bounds = torch.iinfo(torch.int32)
    ranges = torch.randint(-10, 50, (2, 1, 20, 3, 2), dtype=torch.int32, device=device)
    ranges[0, 0, :4, 0] = torch.tensor([bounds.min, bounds.max], dtype=torch.int32, device=device)
    whole = dense(ranges, 40)
    for first, keys in ((0, 10), (10, 30), (7, 0), (0, 40)):
        part = masks.shift(ranges, first, keys)
        assert part.dtype == torch.int32
        assert torch.equal(dense(part, keys), whole[..., first : first + keys])
    q, k, v = make_inputs(Shape(2, 4, 2, 20, 40, 64), torch.bfloat16, device)
    parts = [
        flash_cute.forward(q, k[:, :, rows], v[:, :, rows], ranges=masks.shift(ranges, rows.start, 20))
        for rows in (slice(0, 20), slice(20, 40))
    ]
    merged = flash_cute.merge(*zip(*parts, strict=True))
    for result, right in zip(merged, flash_cute.forward(q, k, v, ranges=ranges), strict=True):
        torch.testing.assert_close(result, right, atol=1e-2, rtol=1e-2)


def test_compiled(device):
    """Without a break in the graph, and so without a synchronisation."""
    ids = torch.tensor(random_runs(2, 30, range(3)), device=device)

    def all_of_them(ids):
        cu_seqlens = ids[0, :4].cumsum(0, dtype=torch.int32)
        return (
            masks.documents(ids),
            masks.documents(cu_seqlens=cu_seqlens, seqlen=30),
            masks.images(ids, window=3),
            masks.shared_prefix(ids),
            masks.padding(ids, causal=True),
            masks.prefix(ids[:, 0], 30),
            masks.chunks(4, 30, leftpad=ids[:, 1]),
            masks.sink_window(1, 2, ids),
            masks.causal(ids),
            masks.causal(30, device=device),
            masks.intersection(masks.causal(30, device=device), masks.sink_window(sys.maxsize, 2**40, ids)),
            masks.shift(masks.union(masks.documents(ids), masks.images(ids)), 3, 9),
        )

    compiled = torch.compile(all_of_them, fullgraph=True, backend="aot_eager")
    for result, right in zip(compiled(ids), all_of_them(ids), strict=True):
        assert torch.equal(result, right)


def test_traced_as_plain_tensors():
    """By make_fx, whose tensors are no fakes and can't be read either."""
    make_fx = pytest.importorskip("torch.fx.experimental.proxy_tensor").make_fx

    def makers(mask):
        return masks.padding(mask, causal=True), masks.images(mask), masks.chunks(3, mask)

    traced = make_fx(makers)(torch.tensor([[1, 0, 1, 1]]))
    other = torch.tensor([[0, 1, 1, 0]])
    for result, right in zip(traced(other), makers(other), strict=True):
        assert torch.equal(result, right)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_for_any_seqlen(strict):
    """Without a bound, which a comparison of a length with a number would be."""

    class Masks(torch.nn.Module):
        def forward(self, ids):
            seqlen = ids.shape[1]
            return (
                masks.documents(ids),
                masks.documents(cu_seqlens=ids[0], seqlen=seqlen),
                masks.images(ids, window=seqlen),
                masks.padding(ids >= 0, seqlen, causal=True),
                masks.prefix(ids[:, 0], seqlen),
                masks.chunks(seqlen, seqlen, causal=False, leftpad=ids[:, 0]),
                masks.sink_window(seqlen, seqlen, seqlen),
                masks.block_diffusion(seqlen, seqlen),
                masks.shift(masks.causal(seqlen), seqlen, seqlen),
                masks.positions(ids[0], seqlen),
            )

    given, other = (torch.tensor(random_runs(2, seqlen, range(3))) for seqlen in (6, 11))
    sizes = ({1: torch.export.Dim("seqlen", min=3)},)
    exported = torch.export.export(Masks(), (given,), dynamic_shapes=sizes, strict=strict).module()
    for result, right in zip(exported(other), Masks()(other), strict=True):
        assert torch.equal(result, right)


@pytest.mark.gpu
def test_nothing_waits_for_the_device(device):
    ids = torch.tensor(random_runs(2, 3000, range(3)), device=device)
    used = torch.tensor([5, 7], device=device)
    places = torch.arange(9, device=device) + used[:, None]
    offsets = torch.tensor([0, 100, 3000], dtype=torch.int32, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        masks.documents(ids)
        masks.documents(cu_seqlens=offsets, seqlen=3000)
        masks.images(ids, window=3)
        masks.shared_prefix(ids, ids)
        masks.padding(ids, causal=True)
        masks.prefix(used, places)
        masks.chunks(4, places, leftpad=used)
        masks.sink_window(1, 2, masks.positions(offsets, 3000))
        masks.causal(places)
        masks.causal(9, device=device)
        masks.shift(masks.union(masks.documents(ids), masks.images(ids)), 3, 9)
        masks.block_diffusion(2, 100, device=device)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_show(device, tmp_path):
    ranges = masks.chunks(3, 5, device=device)
    drawing = "#\n##\n###\n   #\n   ##\n9 of 25 pairs, 36.0%; 5 of 9 blocks of 2 x 2, 55.6%"
    assert masks.show(ranges, 5, block=(2, 2)) == drawing
    for size, block in itertools.product([(70, 130), (130, 70), (1, 1)], [(16, 32), (128, 128)]):
        ranges = torch.randint(-10, 150, (2, 1, size[0], 3, 2), dtype=torch.int32, device=device)
        *rows, work = masks.show(
            ranges, size[1], causal=True, window=30, entry=1, block=block, width=20
        ).split("\n")
        seen = reference.visible(*size, True, 30, ranges=ranges[1, 0].cpu())
        assert work.startswith(f"{int(seen.sum())} of {seen.numel()} pairs")
        cells = [part.split(block[1], 1) for part in seen.split(block[0], 0)]
        visited = sum(bool(cell.any()) for part in cells for cell in part)
        assert f"; {visited} of {sum(map(len, cells))} blocks of {block[0]} x {block[1]}" in work
        step = -(-max(size) // 20)
        for row, part in zip(rows, seen.split(step, 0), strict=True):
            shares = [cell.float().mean().item() for cell in part.split(step, 1)]
            letters = ["#" if s == 1 else ":" if s >= 0.5 else "." if s > 0 else " " for s in shares]
            assert row == "".join(letters).rstrip()
    assert masks.show(ranges[0, 0], 1) == masks.show(ranges[:1], 1)
    pytest.importorskip("matplotlib")
    masks.show(masks.chunks(3, 50), 50, png=tmp_path / "mask.png")
    assert (tmp_path / "mask.png").read_bytes().startswith(b"\x89PNG")


WRONG = {
    "ids of one dimension": (
        lambda: masks.documents(torch.zeros(3, dtype=torch.int64)),
        r"masks\.documents: ids must have shape \(batch, seqlen\), got \(3,\)",
    ),
    "ids of another type": (
        lambda: masks.images(torch.zeros(1, 3)),
        r"masks\.images: ids must hold integers, got torch\.float32",
    ),
    "a list": (
        lambda: masks.padding([[0, 1]]),
        r"attention_mask is of type list; a torch\.Tensor is accepted",
    ),
    "no documents": (lambda: masks.documents(), "either ids, or cu_seqlens and seqlen, must be given"),
    "offsets without a length": (
        lambda: masks.documents(cu_seqlens=torch.zeros(2, dtype=torch.int32)),
        "either ids, or cu_seqlens and seqlen, must be given",
    ),
    "a chunk of 0": (lambda: masks.chunks(0, 5), r"masks\.chunks: size must be an int >= 1, got 0"),
    "a window of -1": (lambda: masks.sink_window(1, -1, 5), "window must be an int >= 0, got -1"),
    "padding of packed queries": (
        lambda: masks.chunks(4, torch.arange(5), leftpad=torch.tensor([1, 2])),
        "leftpad is given with packed queries; leave it out",
    ),
    "positions as numbers": (
        lambda: masks.chunks(4, torch.zeros(3)),
        r"masks\.chunks: queries must hold integers, got torch\.float32",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name):
    call, words = WRONG[name]
    with pytest.raises((ValueError, TypeError), match=rf"^flash_cute\.masks\.\w+: .*{words.split(': ')[-1]}"):
        call()


PAGE = (ROOT / "docs" / "masks.md").read_text()
DRAWN = re.findall(r"^```python\n([^`]*?)\n```\n\n```text\n(.*?)\n```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("code", "drawing"), DRAWN, ids=[code.split("masks.")[2].split("(")[0] for code, _ in DRAWN]
)
def test_drawings_of_the_page(code, drawing):
    assert eval(code, {"masks": masks, "torch": torch}) == drawing
