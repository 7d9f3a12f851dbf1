"""Times builds of flash_cute beside each other: a change beside the state before it, in turns, in one run.

    python -m benchmarks.builds before after --pass backward --head-dims 64,128

Each build is a folder with a compiled package flash_cute in it, and gets a process of its own, which keeps
its inputs on the GPU and waits while another one runs. The table has, for each cell, how many times as fast
as the first build each of the others is: the median over rounds of the ratio within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch

from . import timing
from .problem import Problem, add_direction, add_grid, of_grid, width_name

ROOT = Path(__file__).resolve().parent.parent


def call(problem: Problem, packed: bool, deterministic: bool):
    """The function that is timed, of the flash_cute that this process imports."""
    import flash_cute

    tensors = [x.detach() for x in problem.inputs("cuda")]
    options = {"causal": problem.causal, "window": problem.window, "deterministic": deterministic}
    forward = flash_cute.forward
    if packed:
        steps = range(0, (problem.batch + 1) * problem.seqlen_q, problem.seqlen_q)
        options["cu_seqlens_q"] = torch.tensor(steps, dtype=torch.int32, device="cuda")
        tensors = [x.transpose(1, 2).flatten(0, 1) for x in tensors]
        forward = flash_cute.forward_varlen
    if problem.direction == "forward":
        return partial(forward, *tensors, **options)
    *inputs, dout = tensors
    inputs = [x.requires_grad_() for x in inputs]
    out, _ = forward(*inputs, **options)
    return partial(torch.autograd.grad, out, inputs, dout, retain_graph=True)


def serve() -> None:
    """What a build's process does: a line of JSON says what to prepare, or to time; a line answers."""
    device = torch.device("cuda")
    function, calls = None, 1
    for line in sys.stdin:
        order = json.loads(line)
        answer = None
        if order["do"] == "prepare":
            function = None
            problem = order["problem"]
            problem["window"] = tuple(problem["window"]) if problem["window"] else None
            function = call(Problem(**problem), order["packed"], order["deterministic"])
            calls = max(1, round(timing.BURST_US / timing.first_timing(function, device)))
        elif order["do"] == "burst":
            time.sleep(timing.IDLE_SECONDS)
            torch.cuda._sleep(timing.HEAD_START_CYCLES)
            read = timing.start(function, calls, device)
            timing.synchronize(device)
            answer = read()
        else:
            answer, _ = timing.back_to_back(function, device, order["seconds"])
        print(json.dumps(answer), flush=True)


class Build:
    def __init__(self, folder: Path):
        self.name = folder.name
        path = os.pathsep.join(map(str, (folder.resolve(), ROOT)))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.builds", "--serve"],
            cwd="/",
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, do: str, **options) -> float | None:
        self.process.stdin.write(json.dumps({"do": do, **options}) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"the process of {self.name} has ended")
        return json.loads(answer)


def speedups(builds: list[Build], problem: Problem, options: argparse.Namespace) -> list[float]:
    """Of all builds but the first, over the first."""
    cell = {name: getattr(problem, name) for name in Problem.__dataclass_fields__}
    for build in builds:
        build("prepare", problem=cell, packed=options.packed, deterministic=options.deterministic)
    samples: dict[Build, list[float]] = {build: [] for build in builds}
    for build in timing.in_turns(builds, range(options.rounds)):
        samples[build].append(build(options.regime, seconds=options.seconds))
    first = samples[builds[0]]
    return [statistics.median(timing.paired_speedups(samples[build], first)) for build in builds[1:]]


def parser() -> argparse.ArgumentParser:
    args = argparse.ArgumentParser(prog="python -m benchmarks.builds", description=__doc__.splitlines()[0])
    args.add_argument("builds", type=Path, nargs="*", help="folders, the state before first")
    add_direction(args, "forward", "backward")
    args.add_argument("--regime", choices=["burst", "sustained"], default="burst")
    args.add_argument("--rounds", type=int, default=15, help="turns of each build in a cell")
    args.add_argument("--seconds", type=float, default=1.0, help="of a turn in the sustained regime")
    add_grid(args)
    args.add_argument("--dtype", choices=["bf16", "fp16"], default="bf16")
    args.add_argument("--packed", action="store_true", help="by forward_varlen, all of one length")
    args.add_argument("--deterministic", action="store_true")
    args.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return args


def main() -> None:
    options = parser().parse_args()
    if options.serve:
        return serve()
    builds = [Build(folder) for folder in options.builds]
    print(f"{torch.cuda.get_device_name()}, {options.direction}, {options.regime}, over {builds[0].name}")
    print(f"{'':<28}", *(f"{build.name:>10}" for build in builds[1:]))
    found: dict[str, list[list[float]]] = {}
    for problem in of_grid(options):
        ratios = speedups(builds, problem, options)
        width = width_name(problem.head_dim, problem.head_dim_v)
        found.setdefault(width, []).append(ratios)
        name = f"{width} {problem.seqlen_q} {problem.mask} {problem.heads_q}/{problem.heads_kv}"
        print(f"{name:<28}", *(f"{ratio:>10.3f}" for ratio in ratios), flush=True)
    for width, cells in found.items():
        means = [statistics.geometric_mean(column) for column in zip(*cells, strict=True)]
        print(f"{f'mean of {width}':<28}", *(f"{ratio:>10.3f}" for ratio in means))


if __name__ == "__main__":
    main()
