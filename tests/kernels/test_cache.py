"""Caches of keys and values, contiguous and in pages, and keys that are cut into parts."""

from __future__ import annotations

import pytest
import torch
from support.caches import LAYOUTS, LENGTHS, PAGE_SIZES, for_kernel, in_pages
from support.cases import (
    BUCKETS,
    DTYPES,
    MASKS,
    PACKED,
    SEEDS,
    Sequence,
    make_ragged,
    matrix,
)
from support.tolerance import assert_ragged

import flash_cute


def check_pages(kernel, sequences, packed, mask, page_size, layout="rows first", dtype=torch.bfloat16,
                heads=(4, 2), head_dim=64, **options):  # fmt: skip
    sequences = for_kernel(sequences, kernel)
    batch = make_ragged(sequences, heads, head_dim, dtype, kernel.device, packed)
    k, v, arguments = in_pages(batch, page_size, layout)
    assert_ragged(kernel.forward(batch.q, k, v, **arguments, **mask.options, **options), batch, mask)


@matrix(count=[41, 256, 257], packed=PACKED)  # up to 256 (SplitOrder::kFewSequences), as in BATCHES
def test_many_sequences(kernel, count, packed):
    sequences = [Sequence(1 + i % 3, 1 + 389 * i % 1531) for i in range(count)]
    sequences[3], sequences[7], sequences[-1] = Sequence(0, 90), Sequence(2, 0), Sequence(1, 9000)
    check_pages(kernel, tuple(sequences), packed, MASKS["causal"], 64)


@matrix(layout=LAYOUTS.keys(), page_size=PAGE_SIZES, packed=PACKED)
def test_layouts_and_page_sizes(kernel, layout, page_size, packed):
    check_pages(kernel, LENGTHS["used and left padding"], packed, MASKS["causal"], page_size, layout)


@pytest.mark.gpu
@matrix(
    page_size=[64, 128, 192, None],
    layout=["heads first", "k and v in turns"],
    mask=["causal", "window_left", "full"],
    head_dim=BUCKETS,
)
def test_blocks_by_tma_have_the_bits_of_rows(kernel, page_size, layout, mask, head_dim):
    """Many queries: blocks that are seen whole come by TMA where pages are multiples of 64 rows, or none."""
    rows = [
        (300, 1000, 900, 0),
        (70, 400, 400, 37),
        (600, 1111, 1100, 64),
        (1, 64, 64, 0),
        (500, 700, 128, 3),
    ]
    queries, capacities, used, leftpad = (list(column) for column in zip(*rows, strict=True))
    device, width = kernel.device, max(capacities)
    q = torch.randn(sum(queries), 4, head_dim, device=device).bfloat16()
    lengths = {
        "cu_seqlens_q": torch.tensor([0, *queries], device=device).cumsum(0).int(),
        "seqused_k": torch.tensor(used, device=device, dtype=torch.int32),
        "leftpad_k": torch.tensor(leftpad, device=device, dtype=torch.int32),
    }
    keys, values = torch.randn(2, len(used), width, 2, head_dim, device=device).bfloat16()
    for rows_of_all in (keys, values):
        for b, (skipped, end) in enumerate(zip(leftpad, used, strict=True)):
            rows_of_all[b, :skipped] = rows_of_all[b, end:] = torch.nan
    options = lengths | MASKS[mask].options

    def result(size: int | None) -> tuple[torch.Tensor, ...]:
        if size is None:
            return kernel.forward(q, keys.transpose(1, 2), values.transpose(1, 2), **options)
        pages = -(-width // size)
        order = torch.randperm(len(used) * pages)
        table = torch.empty_like(order).int()
        table[order] = torch.arange(len(order), dtype=torch.int32)
        cache = LAYOUTS[layout](len(order), 2, size, head_dim).bfloat16().to(device)
        for part, source in zip(cache, (keys, values), strict=True):
            padded = torch.nn.functional.pad(source, (0, 0, 0, 0, 0, pages * size - width), value=torch.nan)
            part.copy_(padded.unflatten(1, (pages, size)).flatten(0, 1)[order.to(device)].transpose(1, 2))
        return kernel.forward(q, *cache, block_table=table.view(-1, pages).to(device), **options)

    by_rows = result(17)
    assert not by_rows[0].isnan().any()
    for got, expected in zip(result(page_size), by_rows, strict=True):
        assert torch.equal(got, expected)


def test_one_packed_sequence_with_a_cache(kernel):
    """Its lengths are no secret to the host: keys may stay whole, with the kernels of any other call."""
    q = torch.randn(300, 32, 64, device=kernel.device).bfloat16()
    k, v = torch.randn(2, 1, 8, 700, 64, device=kernel.device).bfloat16()
    k[:, :, 650:], v[:, :, 650:] = torch.nan, torch.nan
    offsets = torch.tensor([0, 280], device=kernel.device, dtype=torch.int32)
    used = torch.tensor([650], device=kernel.device, dtype=torch.int32)
    out, lse = kernel.forward(q, k, v, cu_seqlens_q=offsets, seqused_k=used, causal=True)
    alone = kernel.forward(q[None, :280].transpose(1, 2), k[:, :, :650], v[:, :, :650], causal=True)
    torch.testing.assert_close(out[:280], alone[0][0].transpose(0, 1), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse[:, :280], alone[1][0], atol=1e-4, rtol=1e-4)
    assert not out[280:].any()


def test_pages_are_shared(kernel):
    """Sequences may begin with the same pages."""
    device = kernel.device
    k, v = (torch.randn(9, 2, 16, 64, device=device).bfloat16() for _ in range(2))
    table = torch.tensor([[4, 2, 7], [4, 2, 0], [4, 1, 0]], dtype=torch.int32, device=device)
    used = torch.tensor([48, 40, 17], dtype=torch.int32, device=device)
    q = torch.randn(3, 4, 1, 64, device=device).bfloat16()
    out, lse = kernel.forward(q, k, v, block_table=table, seqused_k=used)
    for b in range(3):
        rows = [x[table[b].long()].transpose(0, 1).flatten(1, 2)[None, :, : used[b]] for x in (k, v)]
        alone = kernel.forward(q[b : b + 1], *rows)
        torch.testing.assert_close(out[b : b + 1], alone[0], atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse[b : b + 1], alone[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("option", ["softcap", "alibi_slopes", "mask", "ranges"])
@pytest.mark.parametrize("queries", [1, 40])
def test_padding_that_fills_a_cache(kernel, stored, option, queries):
    """No key is left of a sequence, and a table of blocks has none after the last one."""
    if kernel.family == "sm80" and stored != torch.bfloat16:
        pytest.skip("caches of 8 bits are of the Hopper family")
    device, capacity = kernel.device, 8192
    q = torch.randn(2, 2, queries, 64, device=device).bfloat16()
    k, v = (torch.randn(1, 1, capacity, 64, device=device).to(stored) for _ in "kv")
    page = torch.zeros(2, 1, dtype=torch.int32, device=device)
    used = torch.full((2,), capacity, dtype=torch.int32, device=device)
    leftpad = torch.tensor([capacity, 0], dtype=torch.int32, device=device)
    options = {
        "softcap": {"softcap": 5.0},
        "alibi_slopes": {"alibi_slopes": torch.rand(2, device=device) / 100},
        "mask": {"mask": torch.ones(1, 1, 1, capacity, dtype=torch.bool, device=device)},
        "ranges": {
            "ranges": torch.tensor([0, capacity], dtype=torch.int32, device=device).expand(
                1, 1, queries, 1, 2
            )
        },
    }[option]
    out, lse = kernel.forward(q, k, v, block_table=page, seqused_k=used, leftpad_k=leftpad, **options)
    assert (out[0] == 0).all()
    assert (lse[0] == -torch.inf).all()
    assert out[1].isfinite().all()
    assert lse[1].isfinite().all()


def cache(device, page_size=16) -> dict[str, torch.Tensor]:
    """q (2, 4, 1, 64), and pages of 2 heads for two sequences of three pages."""
    q = torch.randn(2, 4, 1, 64, device=device).bfloat16()
    k, v = (torch.randn(8, 2, page_size, 64, device=device).bfloat16() for _ in range(2))
    table = torch.arange(6, dtype=torch.int32, device=device).view(2, 3)
    return {"q": q, "k": k, "v": v, "block_table": table}


WRONG = {
    "a table of one dimension": (
        lambda t: {"block_table": t["block_table"][0]},
        "block_table must have shape",
    ),
    "a table of another batch": (lambda t: {"block_table": t["block_table"][:1]}, "where the batch is 2"),
    "a table of int64": (lambda t: {"block_table": t["block_table"].long()}, "block_table dtype torch.int64"),
    "a table without pages": (
        lambda t: {"block_table": t["block_table"][:, :0]},
        "block_table must have shape",
    ),
    "a table of strides": (
        lambda t: {"block_table": t["block_table"].repeat(1, 2)[:, ::2]},
        "block_table must be contiguous in its last dimension, got stride 2",
    ),
    "pages of three dimensions": (lambda t: {"k": t["k"][0], "v": t["v"][0]}, "k 3 dimensions page_size"),
    "a head_dim of 60": (
        lambda t: {name: t[name][..., :60] for name in "qkv"},
        "head_dim of a cache must be a multiple of 8, got 60",
    ),
    "columns that are not neighbours": (
        lambda t: {"k": t["k"].mT.contiguous().mT},
        "k is a cache, which is not copied; its last dimension must have stride 1, got 16",
    ),
    "rows of an odd stride": (
        lambda t: {"v": torch.nn.functional.pad(t["v"], (0, 3))[..., :64]},
        "v is a cache, which is not copied; its stride of dimension 2 must be a multiple of 8, got 67",
    ),
    "no page": (lambda t: {"k": t["k"][:0], "v": t["v"][:0]}, "k must have at least one page"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_caches(device, name):
    """One sentence, and the next call is as good as ever."""
    tensors = cache(device)
    change, words = WRONG[name]
    wrong = tensors | change(tensors)
    with pytest.raises(ValueError, match=r"flash_cute\.forward: ") as error:
        flash_cute.forward(**wrong)
    assert all(word in str(error.value) for word in words.split(" ")), str(error.value)


def test_offsets_of_keys_are_refused(device):
    tensors = cache(device)
    offsets = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    tensors["q"] = tensors["q"][:, :, 0]
    with pytest.raises(ValueError, match="cu_seqlens_k must be None where k is a cache"):
        flash_cute.forward_varlen(**tensors, cu_seqlens_q=offsets, cu_seqlens_k=offsets)


def test_vmap_is_refused(device):
    tensors = cache(device)
    with pytest.raises(NotImplementedError, match="can't map a cache in pages"):
        torch.vmap(lambda q: flash_cute.forward(**tensors | {"q": q}))(tensors["q"][None])


def test_compiled(kernel):
    """The table and the lengths are inputs of the graph."""
    tensors = cache(kernel.device)
    call = torch.compile(flash_cute.forward, fullgraph=True, backend="aot_eager")
    used = torch.tensor([40, 7], dtype=torch.int32, device=kernel.device)
    for result, expected in zip(
        call(**tensors, seqused_k=used), flash_cute.forward(**tensors, seqused_k=used), strict=True
    ):
        assert torch.equal(result, expected)


def test_values_are_checked_on_request(device, monkeypatch):
    monkeypatch.setattr(flash_cute.lengths, "CHECKED", True)
    tensors = cache(device)
    used = torch.tensor([48, 16], dtype=torch.int32, device=device)
    tensors["block_table"][1, 1] = 99  # behind the length
    flash_cute.forward(**tensors, seqused_k=used)
    tensors["block_table"][0, 2] = 8
    with pytest.raises(ValueError, match="sequence 0 has page 8 in block_table; 0 to 7 are accepted"):
        flash_cute.forward(**tensors, seqused_k=used)


@pytest.mark.gpu
def test_graph_replays_with_other_lengths_and_tables(kernel):
    """Captured once; then lengths, tables and what the pages hold change under it."""
    device = kernel.device
    tensors, used = cache(device, page_size=256), torch.tensor([700, 3], dtype=torch.int32, device=device)
    flash_cute.forward(**tensors, seqused_k=used)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = flash_cute.forward(**tensors, seqused_k=used)
    for lengths in ([700, 3], [1, 768], [0, 0], [256, 257]):
        used.copy_(torch.tensor(lengths))
        tensors["block_table"].copy_(torch.randperm(8)[:6].view(2, 3))
        tensors["k"].normal_()
        graph.replay()
        for result, expected in zip(results, flash_cute.forward(**tensors, seqused_k=used), strict=True):
            assert torch.equal(result, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", BUCKETS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("window", [None, (9500, 0)], ids=["causal", "window"])
def test_batch_invariance(kernel, head_dim, dtype, window):
    """A query's bits are those that it has alone: in any batch, packed or paged, in chunks of any size."""
    device, heads_q, heads_kv = kernel.device, 4, 2
    lengths = [3000, 1, 20000, 1024, 1025, 77]  # up to 20 parts
    options = {"causal": True, "window": window, "batch_invariant": True}
    k, v = ([torch.randn(n, heads_kv, head_dim, device=device).to(dtype) for n in lengths] for _ in range(2))
    queries = [SEEDS.choice([1, 2, 17, 70, 300]) for _ in lengths]
    queries = [min(n, rows) for n, rows in zip(queries, lengths, strict=True)]
    q = [torch.randn(n, heads_q, head_dim, device=device).to(dtype) for n in queries]

    def alone(b: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries of sequence b, of which the last one of the slice stands at its own key."""
        end = lengths[b] - queries[b] + rows.stop
        part = [x.transpose(0, 1)[None] for x in (q[b][rows], k[b][:end], v[b][:end])]
        out, lse = flash_cute.forward(*part, **options)
        return out[0].transpose(0, 1), lse[0]

    expected = [alone(b, slice(0, n)) for b, n in enumerate(queries)]
    for b, n in enumerate(queries):
        cut = SEEDS.randint(0, n)
        for rows in (slice(0, cut), slice(cut, n)):
            if rows.start < rows.stop:
                out, lse = alone(b, rows)
                assert torch.equal(out, expected[b][0][rows])
                assert torch.equal(lse, expected[b][1][:, rows])

    chosen = [SEEDS.randrange(len(lengths)) for _ in range(SEEDS.choice([3, 50]))]
    offsets = [torch.tensor([0, *(len(x[b]) for b in chosen)], device=device).cumsum(0).int() for x in (q, k)]
    packed = [torch.cat([x[b] for b in chosen]) for x in (q, k, v)]
    results = [flash_cute.forward_varlen(*packed, *offsets, **options)]
    page_size = SEEDS.choice([1, 16, 64, 100])
    pages = [-(-n // page_size) for n in lengths]
    table = torch.zeros(len(chosen), max(pages), dtype=torch.int32)
    order = torch.randperm(sum(pages), dtype=torch.int32)
    caches = [
        torch.zeros(sum(pages), page_size, heads_kv, head_dim, device=device, dtype=dtype) for _ in range(2)
    ]
    own = list(order.split(pages))
    for b, n in enumerate(lengths):
        for cached, source in zip(caches, (k[b], v[b]), strict=True):
            rows = torch.arange(n)
            cached[own[b].long()[rows // page_size].to(device), (rows % page_size).to(device)] = source
    for row, b in enumerate(chosen):
        table[row, : pages[b]] = own[b]
    used = torch.tensor([lengths[b] for b in chosen], dtype=torch.int32, device=device)
    results.append(
        flash_cute.forward_varlen(
            packed[0],
            *(x.transpose(1, 2) for x in caches),
            offsets[0],
            seqused_k=used,
            block_table=table.to(device),
            **options,
        )
    )
    for out, lse in results:
        begin = 0
        for b in chosen:
            rows = slice(begin, begin := begin + queries[b])
            assert torch.equal(out[rows], expected[b][0])
            assert torch.equal(lse[:, rows], expected[b][1])


@pytest.mark.gpu
@matrix(
    head_dim=BUCKETS,
    queries=[1, 600],
    option=["causal", "full", "window", "sinks", "softcap", "alibi_slopes", "leftpad_k", "fp8"],
)
def test_batch_invariance_whole_and_cut(kernel, head_dim, queries, option):
    """Alone a sequence is cut, among many it is whole or not: out and LSE have the same bits."""
    if option == "fp8" and kernel.family != "sm90":
        pytest.skip("caches of 8 bits are of the Hopper family")
    device, count, keys, heads = kernel.device, 41, 5100, (4, 2)
    lengths = torch.randint(1, keys + 1, (count,), dtype=torch.int32, device=device)
    lengths[7] = 4999
    q = torch.randn(count, queries, heads[0], head_dim, device=device).bfloat16()
    k, v = torch.randn(2, count, heads[1], keys, head_dim, device=device).bfloat16()
    options = {"batch_invariant": True, "causal": option != "full"}
    if option == "fp8":
        k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    elif option == "window":
        options["window"] = (2500, 0)
    elif option == "softcap":
        options["softcap"] = 5.0
    elif option in ("sinks", "alibi_slopes"):
        options[option] = torch.rand(heads[0], device=device)
        if option == "sinks":
            options[option] = options[option].bfloat16()

    def result(chosen: slice) -> tuple[torch.Tensor, ...]:
        own = {"seqused_k": lengths[chosen]}
        if option == "leftpad_k":
            own["leftpad_k"] = own["seqused_k"] // 3
        batch = len(own["seqused_k"])
        offsets = torch.arange(0, (batch + 1) * queries, queries, device=device, dtype=torch.int32)
        return kernel.forward(
            q[chosen].flatten(0, 1), k[chosen], v[chosen], cu_seqlens_q=offsets, **own, **options
        )

    (out, lse), (out_alone, lse_alone) = result(slice(None)), result(slice(7, 8))
    rows = slice(7 * queries, 8 * queries)
    assert torch.equal(out[rows], out_alone)
    assert torch.equal(lse[:, rows], lse_alone)


def test_batch_invariance_is_refused_on_the_cpu():
    q = torch.randn(1, 1, 4, 64).bfloat16()
    with pytest.raises(ValueError, match="batch_invariant must be False on the CPU"):
        flash_cute.forward(q, q, q, batch_invariant=True)
