"""benchmarks.decode without a GPU: cells, caches, the peers' calls, graphs, the report, and a small run."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

import flash_cute
from benchmarks import caches, decode, report, timing
from benchmarks.caches import Cache, Cell
from benchmarks.peers import flash_infer, newer_flash
from benchmarks.peers.base import CannotRun
from benchmarks.report.__main__ import main as draw

OF_PAGES = ["flash3", "flashinfer", "xqa"]
CPU, GPU = torch.device("cpu"), torch.device("cuda")
MIXED = Cell("3x1-90", 4, 2, 32, queries=4)
CELLS = {
    "equal": Cell("2x40", 4, 2, 32, queries=1),
    "several queries": Cell("3x70", 4, 2, 32, queries=4),
    "mixed": MIXED,
    "chunks": Cell("2x300", 4, 2, 32, queries=20, packed=True),
    "narrower v": Cell("3x70", 4, 2, 32, queries=4, head_dim_v=16),
    "wider v": Cell("3x1-90", 4, 2, 32, queries=4, head_dim_v=48),
    "fp8": Cell("3x70", 4, 2, 32, queries=4, fp8=True),
    "fp8, mixed": Cell("3x1-90", 4, 2, 32, queries=1, fp8=True),
    "fp8 chunks": Cell("2x300", 4, 2, 32, queries=20, packed=True, fp8=True),
}
each_cell = pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)


def made(cell: Cell) -> Cache:
    torch.manual_seed(3)
    return Cache(cell, caches.pools([cell], CPU))


def chosen(*arguments: str, device: torch.device = GPU) -> tuple[list, list]:
    return decode.problems(decode.parser().parse_args(arguments), device)


def test_the_grid():
    cells, writes = chosen()
    assert len({*cells}) == len(cells) == 2 * 2 * 3 * 7 + 2 * 4
    assert {(cell.head_dim, cell.queries, cell.packed) for cell in cells} == {
        (dim, queries, queries == 512) for dim in (64, 128) for queries in (1, 4, 512)
    }
    assert {cell.tokens for cell in writes} == {4096, 64}
    assert max(cell.numbers(GPU) for cell in cells) * 2 * 2 < 2**34  # bytes of both pools


def test_selected_cells():
    asked = ["--only", "decode", "--heads", "32/8", "--head-dims", "64"]
    asked += ["--queries", "2", "--cases", "1x9,2x3-5"]
    cells, writes = chosen(*asked)
    assert cells == [Cell(case, 32, 8, 64, 2) for case in ("1x9", "2x3-5")]
    assert writes == []
    cells, writes = chosen("--head-dims", "64,192x128", "--cases", "1x9", "--heads", "32/8", "--queries", "1")
    assert {(cell.packed, cell.widths) for cell in cells} == {
        (packed, widths) for packed in (False, True) for widths in ((64, 64), (192, 128))
    }
    assert {cell.head_dim for cell in writes} == {64}
    few, writes = chosen("--quick", "--queries", "4")
    assert {cell.queries for cell in few} == {4, 512}
    assert {cell.head_dim for cell in few} == {cell.head_dim for cell in writes} == {128}
    assert {cell.case for cell in few} <= {cell.case for cell in chosen()[0]}


@pytest.mark.parametrize(
    "wrong",
    [
        ["--cases", "8"],
        ["--cases", "0x4"],
        ["--chunks", "2x9-3"],
        ["--heads", "32"],
        ["--heads", "32/5"],
        ["--pages", "48"],
        ["--pages", "0"],
        ["--peers", "math"],
        ["--only", "prefill"],
    ],
    ids=" ".join,
)
def test_wrong_arguments(wrong):
    with pytest.raises(SystemExit):
        decode.parser().parse_args(wrong)


def test_lengths_are_drawn_as_those_of_the_measured_peers():
    lengths = Cell("64x1-16384", 32, 8, 128, 1).lengths
    assert (len(lengths), sum(lengths)) == (64, 492466)
    assert min(Cell("64x1-9", 32, 8, 128, 4).lengths) == 4


@each_cell
def test_work_is_what_explain_tells(cell):
    cache = made(cell)
    k, v = next(cache.regions(4))
    lengths = {"seqused_k": cache.used, "block_table": cache.table(4), **cache.scales}
    plan = flash_cute.explain(cache.q, k, v, True, **lengths)
    assert cell.flops == plan["flops"]
    rows = cache.q[..., 0].numel()
    assert cell.bytes == plan["bytes"] - 2 * sum(cell.widths) * rows - 4 * rows  # q and out, lse


@each_cell
@pytest.mark.parametrize("page", [64, 16, 1])
def test_pages_are_each_sequences_own(cell, page):
    cache = made(cell)
    table = cache.table(page)
    assert table.dtype == torch.int32
    held = [row[:count] for row, count in zip(table, cache.pages_of(page), strict=True)]
    numbers = torch.cat(held)
    assert torch.equal(numbers, cache.page_numbers(page))
    assert len(numbers.unique()) == len(numbers)
    k, v = next(cache.regions(page))
    for tensor, width in zip((k, v), cell.widths, strict=True):
        assert tensor.shape == (cell.rows // page, cell.heads_kv, page, width)
    assert int(numbers.max()) < len(k)
    assert not torch.equal(numbers, numbers.sort().values)


@pytest.mark.parametrize("cell", ["equal", "narrower v", "fp8"])
@pytest.mark.parametrize("page", [None, 16])
def test_regions_share_no_memory(page, cell):
    cache = made(CELLS[cell])
    regions = list(cache.regions(page))
    assert len(regions) == cache.cell.regions(CPU) > 1
    for tensors in zip(*regions, strict=True):  # K, V
        size = tensors[0].numel() * tensors[0].element_size()
        starts = [tensor.data_ptr() for tensor in tensors]
        assert all(after - before >= size for before, after in pairwise(starts))
    assert len(regions) * cache.cell.bytes >= caches.REGIONS_BYTES["cpu"]


def test_names_of_contenders():
    peers = ["cudnn", "flash3", "xqa"]
    found = caches.names(CELLS["equal"], [64, 1], peers)
    assert found[:5] == ["ours", "ours, lengths", "ours, batch invariant", "cudnn", "flash3"]
    paged = [f"{name}, pages of {page}" for name in ("ours", "flash3", "xqa") for page in (64, 1)]
    assert found[5:] == paged == caches.names(MIXED, [64, 1], peers)
    assert "ours, lengths" not in caches.names(CELLS["chunks"], [64, 1], peers)
    codes = ["ours, fp8, pages of 64", "ours, fp8, pages of 1"]
    assert caches.names(CELLS["fp8"], [64, 1], peers) == ["ours, fp8", *codes]
    assert caches.names(CELLS["fp8, mixed"], [64, 1], peers) == codes


@each_cell
def test_ours_agrees_wherever_keys_lie(cell):
    cache = made(cell)
    for name in caches.names(cell, [64, 16, 1], ["flash"]):
        if name == caches.INVARIANT:
            with pytest.raises(CannotRun, match="batch_invariant"):
                caches.prepare(name, cache, None)
            continue
        if name == "flash" and cell.head_dim_v:
            with pytest.raises(CannotRun):
                caches.prepare(name, cache, None)
            continue
        calls, error = caches.prepare(name, cache, None)
        assert len(calls) == cell.regions(CPU)
        assert 0 < error < caches.MOST_ERROR / 2
        assert calls[0]().shape == (*cache.q.shape[:3], cell.widths[1])


def test_another_result_is_left_out(monkeypatch):
    monkeypatch.setattr(flash_cute, "attention", lambda q, k, v, **_: q * 0)
    with pytest.raises(CannotRun, match=r"differs by 1\.000"):
        caches.prepare("ours", made(CELLS["equal"]), None)


class Wrapper:
    """FlashInfer's, of decoding and of prefill: pages by offsets and numbers, given to plan."""

    def __init__(self, workspace, layout, **options):
        assert (layout, options.pop("backend")) == ("NHD", "fa2")
        self.decodes = options == {"use_tensor_cores": True}

    def plan(self, *given, q_data_type, kv_data_type, causal=False):
        assert q_data_type == kv_data_type == torch.bfloat16
        assert causal != self.decodes
        self.rows = None if self.decodes else given[0]
        offsets, numbers, last, self.heads_q, heads_kv, head_dim, page = given[not self.decodes :]
        assert not offsets.is_cuda
        counts = offsets.diff()
        self.used = (counts - 1) * page + last
        self.table = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
        for row, part in zip(self.table, numbers.split(counts.tolist()), strict=True):
            row[: len(part)] = part
        self.shape = page, heads_kv, head_dim

    def run(self, q, cache, out):
        k, v = (x.transpose(1, 2) for x in cache)
        assert all(x.shape[1:] == self.shape for x in cache)
        rows = torch.arange(len(q) + 1, dtype=torch.int32) if self.rows is None else self.rows
        lengths = {"seqused_k": self.used, "block_table": self.table}
        out.copy_(flash_cute.attention_varlen(q, k, v, rows, causal=True, **lengths))


def of_xqa(q, k, v, table, used, out, workspace, semaphores, heads_kv, page, *, q_seq_len, mask):
    assert k.shape[1:3] == (page, heads_kv)
    assert used.shape == (len(q), 1)
    if q_seq_len > 1:
        assert mask.view(torch.int16).tolist() == [[[2 ** (i + 1) - 1, 0] for i in range(q_seq_len)]] * len(q)
        q, out = q[:, 0], out[:, 0]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    lengths = {"seqused_k": used[:, 0].view(torch.int32), "block_table": table}
    out.copy_(flash_cute.attention(q, k, v, causal=True, **lengths).transpose(1, 2))


def fwd(q, k, v, *, is_causal, window_size_left, window_size_right, seqused_k=None, page_table=None):
    """FlashAttention-3's operator."""
    assert (window_size_left, window_size_right) == (-1, -1)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return flash_cute.attention(
        q, k, v, causal=is_causal, seqused_k=seqused_k, block_table=page_table
    ).transpose(1, 2), None


@pytest.fixture
def installed(monkeypatch):
    """Stand-ins for the peers that are packages of their own."""
    monkeypatch.setattr(newer_flash, "operators_3", lambda: SimpleNamespace(fwd=fwd))
    module = SimpleNamespace(
        decode=SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Wrapper),
        prefill=SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper),
        xqa=SimpleNamespace(xqa=of_xqa),
    )
    monkeypatch.setattr(flash_infer, "infer", lambda: (module, None, (None, None)))
    monkeypatch.setattr(flash_infer, "XQA_GROUPS", (2,))


@pytest.mark.parametrize(
    "cell", [cell for cell in CELLS.values() if not cell.fp8], ids=lambda cell: cell.case
)
def test_peers_are_called_rightly(cell, installed):
    cache = made(cell)
    called = Counter()
    for name in caches.names(cell, [64, 16], OF_PAGES):
        base, _, page = name.partition(caches.PAGES)
        if base in ("flashinfer", "xqa") and cell.head_dim_v:
            with pytest.raises(CannotRun, match="as wide as q and k only"):
                caches.prepare(name, cache, None)
        elif base == "xqa" and (cell.packed or page != "64"):
            with pytest.raises(CannotRun, match="not called"):
                caches.prepare(name, cache, None)
        elif base in OF_PAGES:
            caches.prepare(name, cache, None)  # which compares with the reference
            called[base] += 1
    of_one_width = {"flashinfer": 2, "xqa": 0 if cell.packed else 1}
    assert called == Counter(
        {"flash3": 2 if cell.mixed else 3}
        | (dict.fromkeys(of_one_width, 0) if cell.head_dim_v else of_one_width)
    )


def test_peers_that_fail_are_left_out(monkeypatch):
    def fail():
        raise TypeError("no such argument\nat a line")

    monkeypatch.setattr(flash_infer, "infer", fail)
    with pytest.raises(CannotRun, match=r"^TypeError: no such argument$"):
        caches.prepare("flashinfer, pages of 64", made(MIXED), None)


def test_a_graph_has_each_region_equally_often(monkeypatch):
    """It is captured again where one call of each takes less than GRAPH_US."""
    called: Counter = Counter()
    monkeypatch.setattr(timing, "graphed", lambda run, count: lambda: [run() for _ in range(count)])
    monkeypatch.setattr(timing, "synchronize", lambda _: None)

    def start(replay, count, device):
        called.clear()
        replay()
        return lambda: 10.0 * called.total()

    monkeypatch.setattr(timing, "start", start)
    calls = [lambda i=i: called.update([i]) for i in range(3)]
    replay, count = decode.in_a_graph(calls, GPU)
    assert count == 102
    called.clear()
    replay()
    assert called == Counter(dict.fromkeys(range(3), 34))


def test_samples_are_of_one_call():
    graphs = decode.captured({"a": [lambda: None] * 5, "b": [lambda: None]}, {}, CPU)
    samples = decode.replays(graphs, CPU)
    assert {name: len(values) for name, values in samples.items()} == {"a": decode.ROUNDS, "b": decode.ROUNDS}


def test_a_small_run(tmp_path):
    path = decode.main(["--device", "cpu", "--output", str(tmp_path)])
    found = json.loads(path.read_text())
    assert [cell["problem"]["case"] for cell in found["cells"]] == ["2x40", "3x1-90"] * 2 + ["2x70"]
    equal, mixed = found["cells"][:2]
    pages = {f"ours, pages of {page}" for page in (64, 16, 1)}
    assert set(equal["times_us"]) == pages | {"ours", "ours, lengths", "flash"}
    assert set(mixed["times_us"]) == pages
    assert set(equal["excluded"]) == {"ours, batch invariant"}
    assert equal["speedup"].keys() == pages | {"ours", "ours, lengths"}
    assert equal["speedup"]["ours"].keys() == pages | {"ours, lengths", "flash"}
    over = [f"pages of {page}/{what}" for what in ("contiguous", "lengths") for page in (64, 16, 1)]
    assert list(report.decode.ratios(equal)) == ["ours/best peer", "lengths/contiguous", *over]
    assert list(report.decode.ratios(mixed)) == []
    assert list(report.decode.ratios(found["cells"][-1])) == ["ours/best peer", *over[:3]]
    paged = {f"ours, pages of {page}" for page in decode.APPEND_PAGES}
    assert [append["problem"]["tokens"] for append in found["appends"]] == [10, 3]
    for append in found["appends"]:
        assert set(append["times_us"]) == paged | {"ours", "ours, slots", "copy"}
        assert append["excluded"] == {}
    draw([str(path)])
    assert not path.with_suffix(".png").exists()  # there is no read rate to draw a share of


def test_a_small_run_with_caches_of_8_bits(tmp_path):
    path = decode.main(
        ["--device", "cpu", "--cache", "fp8", "--only", "decode,chunks", "--output", str(tmp_path)]
    )
    cells = json.loads(path.read_text())["cells"]
    codes = {f"ours, fp8, pages of {page}" for page in (64, 16, 1)}
    for cell in cells:
        few = set() if "-" in cell["problem"]["case"] else {"ours, fp8"}
        assert {name for name in cell["times_us"] if "fp8" in name} == codes | few
        found = report.decode.ratios(cell)
        over = [f"fp8, pages of {page}/16 bits" for page in (64, 16, 1)]
        assert [title for title in found if "fp8" in title] == ["fp8/16 bits"] * len(few) + over
        same = "ours" if cell["problem"]["packed"] else "ours, lengths"
        assert found.get("fp8/16 bits") == cell["speedup"].get("ours, fp8", {}).get(same)
        assert "fp8" not in "".join(cell["excluded"])
    found, codes = (report.decode.share(cells[0], f"ours{kind}", 1e9) for kind in ("", ", fp8"))
    times = [cells[0]["times_us"][name]["median"] for name in ("ours", "ours, fp8")]
    assert codes / found == pytest.approx(times[0] / times[1] / 2)


def test_who_cannot_be_captured_is_left_out():
    excluded: dict = {}
    graphs = decode.captured({"a": [lambda: None], "b": [lambda: 1 / 0]}, excluded, CPU)
    assert list(graphs) == ["a"]
    assert excluded == {"b": "ZeroDivisionError: division by zero"}
