"""A few launches of one kernel for a profiler, each under an NVTX range; see docs/profiling.md.

    ncu --profile-from-start off --nvtx --set full -o report python -m benchmarks.profile --mask causal

Everything before the profiled launches (compilation, inputs, warm-up) lies outside the profiler's window.
"""

from __future__ import annotations

import argparse
from contextlib import contextmanager

import torch

from . import changes, contenders, timing
from .problem import (
    DTYPES,
    SHAPE_METAVAR,
    Problem,
    add_direction,
    parse_shape,
    parse_window,
    width_name,
)
from .results import choose_device

DEFAULT_SHAPE = {"cuda": (1, 16, 16, 16384, 16384, 128), "cpu": (1, 2, 2, 128, 128, 64)}


@contextmanager
def profiled(device: torch.device):
    """The profiler's window, which ncu --profile-from-start off and nsys -c cudaProfilerApi wait for."""
    timing.synchronize(device)
    if device.type == "cuda":
        torch.cuda.profiler.start()
    yield
    timing.synchronize(device)
    if device.type == "cuda":
        torch.cuda.profiler.stop()


@contextmanager
def named_range(name: str, device: torch.device):
    if device.type == "cuda":
        with torch.cuda.nvtx.range(name):
            yield
    else:
        yield


def main(arguments: list[str] | None = None) -> None:
    args = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__.splitlines()[0])
    add_direction(args)
    args.add_argument("--shape", type=parse_shape, metavar=SHAPE_METAVAR, help="default: 16k tokens, d128")
    args.add_argument("--mask", choices=["full", "causal"], default="full")
    args.add_argument("--window", type=parse_window, metavar="LEFT,RIGHT")
    args.add_argument("--case", choices=changes.CASES, default=changes.PLAIN, help="what changes our scores")
    args.add_argument("--dtype", choices=DTYPES, default="bf16")
    args.add_argument("--who", help="a family of ours or a peer: " + ", ".join(contenders.DENSE_PEERS))
    args.add_argument("--launches", type=int, default=3)
    args.add_argument("--device", help="cpu runs a small form of it")
    options = args.parse_args(arguments)
    device = choose_device(options.device)
    shape = options.shape or DEFAULT_SHAPE[device.type]
    mask = {"causal": options.mask == "causal", "window": options.window}
    problem = Problem(*shape, **mask, dtype=options.dtype, direction=options.direction)
    who = options.who or contenders.families(device, problem.direction, problem.dtype)[-1]
    changed = changes.drawn(options.case, problem, device)
    run = contenders.prepare(who, problem, *problem.inputs(device), **changed)
    timing.start(run, timing.WARM_UP_CALLS, device)
    case = "" if options.case == changes.PLAIN else f" {options.case}"
    name = f"{who}{case} {problem.mask} d{width_name(problem.head_dim, problem.head_dim_v)}"
    with profiled(device):
        for i in range(options.launches):
            with named_range(f"{name} launch {i}", device):
                run()
    print(
        f"{options.launches} launches of {who}{case} on {problem}: run this under ncu or nsys "
        "(docs/profiling.md)"
    )


if __name__ == "__main__":
    main()
