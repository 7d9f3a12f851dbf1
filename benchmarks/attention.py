"""Speed of the forward, the backward or both beside PyTorch's own kernels, in bursts and sustained.

    python -m benchmarks.attention                                    the papers' grid, both regimes
    python -m benchmarks.attention --shape 1,32,4,8192,8192,128 --mask causal --window 1024,0 --regime burst
    python -m benchmarks.attention --head-dims 192x128                 v with a head dim of its own
    python -m benchmarks.attention --lengths uniform:1:4096 --lengths lognormal:512      packed sequences
    python -m benchmarks.attention --pass backward                              gradients, also "both"

Each cell times every family of ours and every peer; on a GPU an 8192^3 bf16 matrix product and a large copy
too: in bursts beside every cell, sustained once in a run, as they need the time of two contenders. Results go
to benchmarks/results/<device>/<name>.json; `python -m benchmarks.report` draws them.

Where v has a head dim of its own, each family of ours is also timed on inputs padded to the wider of both.

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

from . import contenders, lengths, results, timing
from .problem import ALL_DTYPES, MASKS, Problem, add_direction, add_grid, add_precision, of_grid
from .report import publish

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
    found = timing.compared(samples, compared)
    return found | {"rates": yardstick_rates(found["times_us"])}


def measure(problem, mine: list[str], peers: list[str], yards: dict, steady, device, options) -> dict:
    """One cell: for each regime times of all contenders that can run it, and why the others cannot.

    problem: a Problem, or lengths.Ragged. yards are timed in bursts; steady has the samples of the same
    yardsticks sustained, and what they drew.
    """
    if options.lengths:
        make, compared = lengths.preparer(problem, device), lengths.compared(mine, peers)
    else:
        make = contenders.preparer(problem, problem.inputs(device, options.layout))
        compared = contenders.compared(mine, peers)
    running, excluded, scales = contenders.prepare_all(mine + peers, problem.direction, make)
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
    if not options.lengths:
        return of_grid(options)
    grid = options.tokens, options.hidden, options.head_dims, MASKS[options.mask]
    return lengths.problems(options.lengths, *grid, options.dtype, options.direction)


def parser() -> argparse.ArgumentParser:
    name = "attention or lengths, and the pass"
    args = results.parser("attention", __doc__, name, epilog=ESTIMATE)
    add_direction(args)
    timing.add_regime(args)
    add_grid(args)
    args.add_argument("--lengths", type=lengths.parse, action="append", metavar="KIND:N", help=lengths.HELP)
    args.add_argument("--dtype", choices=ALL_DTYPES, default="bf16")
    add_precision(args)
    args.add_argument("--layout", choices=["bshd", "bhsd"], default="bshd", help="order in memory")
    args.add_argument(
        "--families", type=lambda text: text.split(","), help="ours (default: all that run here)"
    )
    args.add_argument(
        "--peers", type=lambda text: text.split(","), help="of " + ", ".join(contenders.DENSE_PEERS)
    )
    args.add_argument("--seconds", type=float, default=1.0, help="of bursts per cell")
    args.add_argument("--sustained-seconds", type=float, default=1.0, help="per contender and cell")
    args.add_argument("--sustained-rounds", type=int, default=1, help="turns of each contender in a cell")
    args.add_argument(
        "--graph", action="store_true", help="replay CUDA graphs, for kernels shorter than their launch"
    )
    args.add_argument(
        "--baseline", type=Path, help="peers measured elsewhere (default: results/peers_h200.json on an H200)"
    )
    return args


def main(arguments: list[str] | None = None) -> Path:
    options = parser().parse_args(arguments)
    torch.set_float32_matmul_precision(options.precision)
    device = results.choose_device(options.device)
    asked = device, options.direction, options.dtype
    default_peers = contenders.PEERS_ON_CPU if device.type == "cpu" else contenders.DEFAULT_PEERS
    yards, steady = {}, ({}, {})
    if options.lengths:
        mine = lengths.ours(options.families or contenders.families(*asked))
        default_peers = default_peers if device.type == "cuda" else ()
    else:
        mine = options.families or contenders.mine(*asked)
        mine = mine + contenders.at_one_width(mine, problems(options))
        yards = yardsticks(device)
    peers = options.peers or list(default_peers)
    if options.regime != "burst":
        steady = timing.sustained(yards, device, options.sustained_seconds, options.sustained_rounds)
    cells = [
        measure(problem, mine, peers, yards, steady, device, options)
        for problem in timing.progress(problems(options), "attention")
    ]
    content = {"ours": mine, "peers": peers, "cells": cells}
    name = "lengths" if options.lengths else "attention"
    return publish("attention", options, device, content, name, baseline=options.baseline)


if __name__ == "__main__":
    main()
