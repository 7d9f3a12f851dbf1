"""Speed of the forward, the backward or both beside PyTorch's own kernels, in bursts and sustained.

    python -m benchmarks.attention                                    the papers' grid, both regimes
    python -m benchmarks.attention --shape 1,32,4,8192,8192,128 --mask causal --window 1024,0 --regime burst
    python -m benchmarks.attention --lengths uniform:1:4096 --lengths lognormal:512      packed sequences
    python -m benchmarks.attention --pass backward                              gradients, also "both"

Each cell times every family of ours and every peer; on a GPU an 8192^3 bf16 matrix product and a large copy
too: in bursts beside every cell, sustained once in a run, as they need the time of two contenders. Results go
to benchmarks/results/<device>/<name>.json; `python -m benchmarks.report` draws them.

Of a backward the contenders are the bare operators and ours deterministic, too; both are a forward and its
backward as one call.

With --lengths the contenders are ours packed, padded and "dense mean", and the peers packed, without the two
ceilings. Dense mean is our dense call of sequences as long as the mean, its time multiplied by the batch's
visited blocks over its own: packed/dense mean compares the rates per visited block, and of equal lengths the
times of the same work.
"""

from __future__ import annotations

import argparse
import operator
from pathlib import Path

import torch

from . import contenders, lengths, report, timing
from .problem import (
    ALL_DTYPES,
    Problem,
    add_direction,
    add_precision,
    paper_grid,
    parse_shape,
    parse_window,
    result_name,
)
from .results import choose_device, environment, save
from .timing import REGIMES

MASKS = {"full": [False], "causal": [True], "both": [False, True]}
MATMUL_SIZE = 8192
COPY_BYTES = 2**30
ESTIMATE = """\
On an H200 the grid takes about 4 minutes with four contenders: for each cell 1.2 s in bursts, 1.3 s for each
contender sustained, and the making of the inputs."""


def yardsticks(device: torch.device) -> dict:
    """The two ceilings of a GPU: a large matrix product and a large copy. A CPU has none as plain."""
    if device.type == "cpu":
        return {}
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    source = torch.randint(0, 127, (COPY_BYTES,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return {"matmul": lambda: torch.mm(a, b, out=product), "copy": lambda: target.copy_(source)}


def yardstick_rates(times: dict) -> dict[str, float]:
    """Operations and bytes (read and written) per second from the yardsticks' medians, where they ran."""
    work = {"matmul_flops": ("matmul", 2 * MATMUL_SIZE**3), "copy_bytes": ("copy", 2 * COPY_BYTES)}
    return {rate: amount / times[n]["median"] * 1e6 for rate, (n, amount) in work.items() if n in times}


def in_regime(samples: dict[str, list[float]], compared: dict[str, list[str]], scales: dict) -> dict:
    """What one regime says of a cell: times, the yardsticks' rates, and speeds over those compared with.

    scales: what times are multiplied with, where they are.
    """
    samples = {name: [scales.get(name, 1) * us for us in values] for name, values in samples.items()}
    times = {name: timing.summary(values) for name, values in samples.items()}
    speedup = {
        mine: {
            rival: timing.paired_speedup(samples[mine], samples[rival])
            for rival in rivals
            if rival in samples
        }
        for mine, rivals in compared.items()
        if mine in samples
    }
    rounds = max(map(len, samples.values()), default=0)
    return {"rounds": rounds, "times_us": times, "rates": yardstick_rates(times), "speedup": speedup}


def measure(problem, mine: list[str], peers: list[str], yards: dict, steady, device, options) -> dict:
    """One cell: for each regime times of all contenders that can run it, and why the others cannot.

    problem: a Problem, or lengths.Ragged. yards are timed in bursts; steady has the samples of the same
    yardsticks sustained, and what they drew.
    """
    if options.lengths:
        running, excluded, scales = lengths.prepare_all(mine + peers, problem, device)
        compared = lengths.compared(mine, peers)
    else:
        inputs = problem.inputs(device, options.layout)
        running, excluded = contenders.prepare_all(mine + peers, problem, *inputs)
        compared, scales = contenders.compared(mine, peers), {}
    memory = {}
    if device.type == "cuda":
        its_own = {name: run for name, run in running.items() if name not in scales}
        memory["bytes_beside"] = {name: timing.bytes_beside(run) for name, run in its_own.items()}
    if options.graph:
        running = {name: timing.graphed(run) for name, run in running.items()}
    regimes = {}
    if options.regime != "sustained":
        regimes["burst"] = in_regime(timing.burst(running | yards, device, options.seconds), compared, scales)
    if options.regime != "burst":
        turns = options.sustained_seconds, options.sustained_rounds
        samples, power = map(operator.or_, timing.sustained(running, device, *turns), steady)
        regimes["sustained"] = in_regime(samples, compared, scales) | {"power": power}
    scaled = {"times_scaled": scales} if scales else {}
    return {"problem": problem.to_json(), "regimes": regimes, "excluded": excluded} | scaled | memory


def problems(options) -> list[Problem] | list[lengths.Ragged]:
    causal = MASKS[options.mask]
    if options.lengths:
        grid = options.tokens, options.hidden, options.head_dims
        return lengths.problems(options.lengths, *grid, causal, options.dtype, options.direction)
    if not options.shape:
        grid = options.tokens, options.hidden, options.head_dims, options.seqlens
        return paper_grid(*grid, causal, options.dtype, options.direction)
    return [
        Problem(*shape, is_causal, options.window, options.dtype, options.direction)
        for shape in options.shape
        for is_causal in causal
    ]


def add_regime(args: argparse.ArgumentParser) -> None:
    how = "; ".join(f"{name}: {how}" for name, how in REGIMES.items())
    args.add_argument("--regime", choices=[*REGIMES, "both"], default="both", help=how)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parser() -> argparse.ArgumentParser:
    args = argparse.ArgumentParser(
        prog="python -m benchmarks.attention", description=__doc__.splitlines()[0], epilog=ESTIMATE
    )
    add_direction(args)
    add_regime(args)
    args.add_argument(
        "--shape", type=parse_shape, action="append", metavar="B,HQ,HKV,SQ,SK,D", help="instead of the grid"
    )
    args.add_argument("--lengths", type=lengths.parse, action="append", metavar="KIND:N", help=lengths.HELP)
    args.add_argument("--mask", choices=MASKS, default="both")
    args.add_argument(
        "--window", type=parse_window, metavar="LEFT,RIGHT", help="sliding window of --shape's problems"
    )
    args.add_argument("--dtype", choices=ALL_DTYPES, default="bf16")
    add_precision(args)
    args.add_argument("--layout", choices=["bshd", "bhsd"], default="bshd", help="order in memory")
    args.add_argument("--tokens", type=int, default=16384, help="of each cell of the grid, over the batch")
    args.add_argument("--hidden", type=int, default=2048, help="heads x head dim in the grid")
    args.add_argument("--head-dims", type=numbers, default=[64, 128, 256])
    args.add_argument("--seqlens", type=numbers, default=[512, 1024, 2048, 4096, 8192, 16384])
    args.add_argument(
        "--families", type=lambda text: text.split(","), help="ours (default: all that run here)"
    )
    args.add_argument("--peers", type=lambda text: text.split(","), help="of " + ", ".join(contenders.PEERS))
    args.add_argument("--seconds", type=float, default=1.0, help="of bursts per cell")
    args.add_argument("--sustained-seconds", type=float, default=1.0, help="per contender and cell")
    args.add_argument("--sustained-rounds", type=int, default=1, help="turns of each contender in a cell")
    args.add_argument(
        "--graph", action="store_true", help="replay CUDA graphs, for kernels shorter than their launch"
    )
    args.add_argument(
        "--baseline", type=Path, help="peers measured elsewhere (default: results/peers_h200.json on an H200)"
    )
    args.add_argument("--device", help="cpu runs a small form of it")
    args.add_argument("--name", help="of the result file (default: attention or lengths, and the pass)")
    args.add_argument("--output", type=Path, help="folder of results (default: benchmarks/results)")
    return args


def main(arguments: list[str] | None = None) -> Path:
    options = parser().parse_args(arguments)
    torch.set_float32_matmul_precision(options.precision)
    device = choose_device(options.device)
    direction = options.direction
    default_peers = contenders.PEERS_ON_CPU if device.type == "cpu" else contenders.DEFAULT_PEERS
    yards, steady = {}, ({}, {})
    if options.lengths:
        mine = lengths.ours(options.families or contenders.families(device, direction))
        default_peers = default_peers if device.type == "cuda" else ()
    else:
        mine = options.families or contenders.mine(device, direction)
        yards = yardsticks(device)
    peers = options.peers or list(default_peers)
    if options.regime != "burst":
        steady = timing.sustained(yards, device, options.sustained_seconds, options.sustained_rounds)
    cells = [
        measure(problem, mine, peers, yards, steady, device, options)
        for problem in timing.progress(problems(options), "attention")
    ]
    results = {"environment": environment(device), "ours": mine, "peers": peers, "cells": cells}
    name = result_name("lengths" if options.lengths else "attention", direction)
    path = save(results, options.name or name, options.output)
    print(report.markdown(results, report.baseline_for(results, options.baseline)))
    print(f"\nwritten to {path}")
    return path


if __name__ == "__main__":
    main()
