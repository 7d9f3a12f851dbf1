"""Serving: a few new queries or a chunk of a prompt against a long cache, and writing into it, beside others.

    python -m benchmarks.decode                                 all cells
    python -m benchmarks.decode --quick                         a few of them
    python -m benchmarks.decode --only decode --head-dims 128 --heads 32/8 --cases 1x8192,64x1-16384
    python -m benchmarks.decode --cache fp8 --name decode-fp8   ours with caches of 8 bits, too
    python -m benchmarks.report benchmarks/results/<device>/decode.json    table and plot again

A time is that of a call in a CUDA graph of calls back to back, 1 ms or longer, over regions of memory that
are together several times as large as the L2: keys are read from memory, as when a model's layers follow each
other. The graphs of a cell are replayed in another random order every round; a ratio is within a round.

The share of the read rate is the bytes of K and V, read once, over the time and the rate at which a kernel
that does nothing else reads 4 GiB, before or after all cells, whichever is higher. Queries after the first
are causal, but for PyTorch's peers, which run them without a mask. Contenders are ours contiguous, without
lengths, with lengths (seqused_k) and with batch_invariant, and in pages of each size; PyTorch's cuDNN and
FlashAttention-2; and where they are installed FlashAttention-3 and FlashInfer ("flashinfer", its
FlashAttention-2, and "xqa"), whose first run takes minutes to compile. What gives another result than float32
is left out.

With --cache fp8 ours read a cache of 8 bits, too, with lengths and in pages. It has about twice as many
regions, its share of the read rate is that of its own bytes, and its float32 result is of its own numbers.

Chunks are the next 512 tokens of prompts, packed, ours by forward_varlen, contiguous with the same cuts of
the keys as in pages. append_kv writes new rows of K and V and rotates K and Q, beside a copy of the same
bytes.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path

import torch

import flash_cute

from . import caches, report, results, timing
from .caches import Cache, Cell
from .peers.base import CannotRun, Run, attempt, sifted
from .problem import DTYPES, HEAD_DIMS_HELP, all_widths, numbers

KINDS = ("decode", "chunks", "append")
ROUNDS = 7
GRAPH_US = {"cuda": 1000.0, "cpu": 0.0}
RATE_BYTES = 2**32
READERS = (264, 528, 1056)  # programs of the kernel that reads: the best of them is the rate
PAGES = [64, 16, 1]
APPEND_PAGES = (64, 16)
CASES = {
    "cuda": ["1x8192", "1x131072", "8x8192", "64x2048", "64x8192", "256x1024", "64x1-16384"],
    "cpu": ["2x40", "3x1-90"],
}
CHUNKS = {"cuda": (512, ["1x8192", "4x8192", "1x32768", "1x131072"]), "cpu": (16, ["2x70"])}
APPENDS = {"cuda": [(8, 512), (64, 1)], "cpu": [(2, 5), (3, 1)]}  # sequences, and new rows of each
HEADS = {"cuda": ["32/8", "32/1", "32/32"], "cpu": ["4/2"]}
HEAD_DIMS = {"cuda": [(128,), (64,)], "cpu": [(32,)]}
QUICK = {  # of a GPU
    "cases": ["1x8192", "64x8192", "64x1-16384"],
    "chunks": ["1x32768"],
    "heads": ["32/8"],
    "head_dims": [(128,)],
}


@dataclass(frozen=True)
class Append:
    """`rows` new tokens of each of `sequences`."""

    sequences: int
    rows: int
    heads_q: int
    heads_kv: int
    head_dim: int
    dtype: str = "bf16"

    @property
    def tokens(self) -> int:
        return self.sequences * self.rows

    @property
    def copied(self) -> int:
        """Numbers of k, v and q, each of which is read once and written once."""
        return self.tokens * (self.heads_q + 2 * self.heads_kv) * self.head_dim

    @property
    def bytes(self) -> int:
        return 2 * self.copied * DTYPES[self.dtype].itemsize

    def to_json(self) -> dict:
        return asdict(self) | {"tokens": self.tokens, "bytes": self.bytes}


def in_turn(calls: list[Run]) -> Run:
    """The next of the calls, each time that it is called."""
    turns = cycle(calls)
    return lambda: next(turns)()


def in_a_graph(calls: list[Run], device: torch.device) -> tuple[Run, int]:
    """(what runs GRAPH_US of the calls in turn or longer, how many these are); all of them equally often."""

    def graph(rounds: int) -> Run:
        count = rounds * len(calls)
        if device.type == "cuda":
            return timing.graphed(in_turn(calls), count)
        return lambda: [call() for call in calls * rounds]

    replay = graph(1)
    for _ in range(2):  # the first time to warm up
        read = timing.start(replay, 1, device)
        timing.synchronize(device)
    rounds = math.ceil(GRAPH_US[device.type] / read())
    if rounds <= 1:
        return replay, len(calls)
    return graph(rounds), rounds * len(calls)


def captured(running: dict[str, list[Run]], excluded: dict[str, str], device: torch.device) -> dict:
    """Contender -> its graph; what cannot be captured is excluded. The calls own what the graphs read."""
    capture = {name: partial(in_a_graph, calls, device) for name, calls in running.items()}
    graphs, failed = sifted({name: partial(caches.attempt_theirs, run) for name, run in capture.items()})
    excluded |= failed
    return graphs


def replays(graphs: dict[str, tuple[Run, int]], device: torch.device) -> dict[str, list[float]]:
    """Samples, in microseconds per call, of each graph; sample i of each belongs to the same round."""
    for replay, _ in graphs.values():
        replay()
    reads: dict[str, list] = {name: [] for name in graphs}
    for name in timing.in_turns(graphs, range(ROUNDS)):
        reads[name].append(timing.start(graphs[name][0], 1, device))
    timing.synchronize(device)
    return {name: [read() / graphs[name][1] for read in found] for name, found in reads.items()}


def rates(device: torch.device) -> dict[str, float]:
    """Bytes per second of reading, and of a copy (read and written), of RATE_BYTES; of a CPU none."""
    if device.type == "cpu":
        return {}
    from .triton_read import reader

    source = torch.randint(2**31 - 1, (RATE_BYTES // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    running = {programs: [reader(source, programs)] for programs in READERS}
    running["copy"] = [partial(target.copy_, source)]
    samples = replays({name: in_a_graph(calls, device) for name, calls in running.items()}, device)
    us = {name: timing.summary(values)["median"] for name, values in samples.items()}
    copy = us.pop("copy")
    return {"read_bytes": RATE_BYTES / min(us.values()) * 1e6, "copy_bytes": 2 * RATE_BYTES / copy * 1e6}


def measure(found: list[Cache], options) -> dict:
    """Of a cell's cache, and of that of 8 bits where it is asked for."""
    cell, device = found[0].cell, found[0].device
    makers = {
        name: partial(caches.prepare, name, cache, options.family)
        for cache in found
        for name in caches.names(cache.cell, options.pages, options.peers)
    }
    prepared, excluded = sifted(makers)
    running, errors = ({name: found[i] for name, found in prepared.items()} for i in range(2))
    samples = replays(captured(running, excluded, device), device)
    mine = [name for name in samples if name.startswith(caches.OURS)]
    against = {name: [other for other in samples if other != name] for name in mine}
    measured = timing.compared(samples, against)
    regions = cell.regions(device)
    return {"problem": cell.to_json(), "regions": regions, **measured, "errors": errors, "excluded": excluded}


class Rows:
    """New rows of an Append, and where they go: a region is the next rows of each sequence of a cache."""

    def __init__(self, cell: Append, device: torch.device):
        self.cell, self.device, self.dtype = cell, device, DTYPES[cell.dtype]
        self.regions = -(-caches.REGIONS_BYTES[device.type] // cell.bytes)
        rounded = caches.ROUNDED_TO
        self.capacity = -(-self.regions * cell.rows // rounded) * rounded
        shape = self.regions, cell.sequences, cell.rows
        heads = {"q": cell.heads_q, "k": cell.heads_kv, "v": cell.heads_kv}
        self.new = {
            name: torch.randn(*shape, count, cell.head_dim, device=device).to(self.dtype)
            for name, count in heads.items()
        }
        angles = torch.rand(self.capacity, cell.head_dim // 2, device=device)
        self.rotary = {"rotary_cos": angles.cos().to(self.dtype), "rotary_sin": angles.sin().to(self.dtype)}

    def append(self, page: int | None, by_slots: bool = False) -> list[Run]:
        """append_kv of each region; raises CannotRun where it can't, or writes other rows."""
        cell, size = self.cell, page or self.capacity
        shuffled = torch.randperm if page else torch.arange
        count = cell.sequences * self.capacity // size
        table = shuffled(count, device=self.device).view(cell.sequences, -1)
        shape = count, size, cell.heads_kv, cell.head_dim
        pools = [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2)]
        kv_cache = [pool.transpose(1, 2) for pool in pools]
        given = {"block_table": table.to(torch.int32)} if page and not by_slots else {}
        owner = torch.arange(cell.sequences, device=self.device).unsqueeze(1)

        def slots(region: int) -> tuple[torch.Tensor, torch.Tensor]:
            """Where each of (sequences, rows) goes, and its position in its sequence."""
            positions = region * cell.rows + torch.arange(cell.rows, device=self.device)
            places = table[owner, positions // size] * size + positions % size
            return places, positions.expand(cell.sequences, -1)

        calls = []
        for region in range(self.regions):
            q, k, v = (self.new[name][region] for name in "qkv")
            if by_slots:
                q, k, v = (rows.flatten(0, 1) for rows in (q, k, v))
                where, positions = slots(region)
                place = {"slots": where.flatten(), "positions": positions.flatten().contiguous()}
            else:
                q, k, v = (rows.transpose(1, 2) for rows in (q, k, v))
                before = torch.full((cell.sequences,), region * cell.rows, device=self.device)
                place = {"cache_seqlens": before.to(torch.int32)}
            calls.append(partial(flash_cute.append_kv, k, v, *kv_cache, q=q, **place, **given, **self.rotary))
        attempt(calls[0])
        if not torch.equal(pools[1].flatten(0, 1)[slots(0)[0]], self.new["v"][0]):
            raise CannotRun("other rows of the cache hold the new values")
        return calls

    def copies(self) -> list[Run]:
        source, target = (
            torch.zeros(self.regions, self.cell.copied, dtype=self.dtype, device=self.device)
            for _ in range(2)
        )
        return [partial(y.copy_, x) for x, y in zip(source, target, strict=True)]


def measure_append(cell: Append, device: torch.device) -> dict:
    rows = Rows(cell, device)
    contenders = {caches.OURS: partial(rows.append, None)}
    contenders |= {f"{caches.OURS}{caches.PAGES}{page}": partial(rows.append, page) for page in APPEND_PAGES}
    contenders[f"{caches.OURS}, slots"] = partial(rows.append, APPEND_PAGES[0], by_slots=True)
    running, excluded = sifted(contenders)
    running["copy"] = rows.copies()
    samples = replays(captured(running, excluded, device), device)
    measured = timing.compared(samples, {name: ["copy"] for name in samples if name != "copy"})
    return {"problem": cell.to_json(), "regions": rows.regions, **measured, "excluded": excluded}


def problems(options, device: torch.device) -> tuple[list[Cell], list[Append]]:
    """Cells of decoding and of chunks, and of append_kv where v has no head dim of its own, as chosen."""
    kind = device.type
    chosen = {
        "cases": CASES[kind],
        "chunks": CHUNKS[kind][1],
        "heads": HEADS[kind],
        "head_dims": HEAD_DIMS[kind],
    }
    chosen |= QUICK if options.quick and kind == "cuda" else {}
    chosen |= {name: given for name in chosen if (given := getattr(options, name)) is not None}
    heads = [tuple(map(int, text.split("/"))) for text in chosen["heads"]]
    cells, writes = [], []
    for dim, *of_v in chosen["head_dims"]:
        if "decode" in options.only:
            for queries in options.queries or ([1] if options.quick else [1, 4]):
                for pair in heads:
                    shape = *pair, dim, queries, False, options.dtype, *of_v
                    cells += [Cell(case, *shape) for case in chosen["cases"]]
        chunk = CHUNKS[kind][0]
        if "chunks" in options.only:
            shape = *heads[0], dim, chunk, True, options.dtype, *of_v
            cells += [Cell(case, *shape) for case in chosen["chunks"]]
        if "append" in options.only and not of_v:
            writes += [Append(*shape, *heads[0], dim, options.dtype) for shape in APPENDS[kind]]
    return cells, writes


def parse_heads(text: str) -> list[str]:
    """'32/8,32/1': heads of q and of K and V."""
    pairs = text.split(",")
    for pair in pairs:
        query, slash, kv = pair.partition("/")
        if not (slash and query.isdecimal() and kv.isdecimal() and int(kv) and int(query) % int(kv) == 0):
            raise argparse.ArgumentTypeError(f"heads are HQ/HKV, HQ a multiple of HKV, not {pair!r}")
    return pairs


def listed(choices: tuple[str, ...]):
    """A parser of some of the choices, comma separated."""

    def parse(text: str) -> list[str]:
        found = text.split(",")
        if wrong := set(found) - set(choices):
            raise argparse.ArgumentTypeError(
                f"there are {', '.join(choices)}, not {', '.join(sorted(wrong))}"
            )
        return found

    return parse


def parser() -> argparse.ArgumentParser:
    def cases(text: str) -> list[str]:
        return [caches.parse_case(case) for case in text.split(",")]

    def pages(text: str) -> list[int]:
        return [caches.parse_page(page) for page in text.split(",")]

    args = results.parser("decode", __doc__)
    args.add_argument("--quick", action="store_true", help="a few cells")
    args.add_argument("--only", type=listed(KINDS), default=list(KINDS), help="of " + ", ".join(KINDS))
    args.add_argument("--cases", type=cases, help="BATCHxKEYS or BATCHxLOW-HIGH, comma separated")
    args.add_argument("--chunks", type=cases, help="cases of chunks, likewise")
    args.add_argument("--heads", type=parse_heads, metavar="HQ/HKV,...", help="the first ones also of chunks")
    args.add_argument("--head-dims", type=all_widths, metavar="D[xDV],...", help=HEAD_DIMS_HELP)
    args.add_argument("--queries", type=numbers, help="of a sequence")
    args.add_argument("--pages", type=pages, default=PAGES, help="default: 64,16,1")
    args.add_argument("--cache", choices=["fp8"], help="ours with a cache of 8 bits, too")
    args.add_argument("--peers", type=listed(caches.CACHE_PEERS), help="of " + ", ".join(caches.CACHE_PEERS))
    args.add_argument("--family", help="ours (default: the device decides)")
    args.add_argument("--dtype", choices=DTYPES, default="bf16")
    return args


def main(arguments: list[str] | None = None) -> Path:
    options = parser().parse_args(arguments)
    device = results.choose_device(options.device)
    if options.peers is None:
        options.peers = ["flash"] if device.type == "cpu" else list(caches.CACHE_PEERS)
    cells, writes = problems(options, device)
    found = [rates(device)]
    cached = [cells, [replace(cell, fp8=True) for cell in cells]][: 2 if options.cache else 1]
    pools = [caches.pools(of_a_type, device) for of_a_type in cached]
    measured = [
        measure([Cache(*pair) for pair in zip(alike, pools, strict=True)], options)
        for alike in timing.progress(zip(*cached, strict=True), "decode")
    ]
    del pools
    written = [measure_append(cell, device) for cell in timing.progress(writes, "append")]
    found.append(rates(device))
    content = {"rates": found, "cells": measured, "appends": written}
    path = report.publish("decode", options, device, content)
    report.decode.plot(report.load(path), path.with_suffix(".png"))
    return path


if __name__ == "__main__":
    main()
