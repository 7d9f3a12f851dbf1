"""Error against float64 of every family of ours and every peer, on the same inputs.

    python -m benchmarks.accuracy
    python -m benchmarks.accuracy --shape 2,8,2,1024,1024,128 --mask causal --dtype fp16 --seeds 9
    python -m benchmarks.accuracy --pass backward

Each problem is drawn several times; the table has the median over the draws and, in brackets, the largest. Of
gradients it has, too, the RMS over that of PyTorch's FlashAttention-2, the median of the draws' ratios.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch

import flash_cute.reference

from . import contenders, timing
from .problem import (
    ALL_DTYPES,
    DTYPES,
    Problem,
    add_direction,
    add_precision,
    parse_shape,
    parse_window,
    result_name,
)
from .report import MISSING, table, title
from .results import choose_device, environment, save_and_show

MASKS = {"full": [False], "causal": [True], "both": [False, True]}
SHAPES = {
    "cuda": [
        (batch, heads, kv, seqlen, seqlen, dim)
        for dim in (64, 128, 256)
        for batch, heads, kv, seqlen in ((16, 16, 16, 512), (2, 8, 2, 4096))
    ],
    "cpu": [(1, 2, 2, 100, 100, 64)],
}
RESULTS = {"forward": ("out", "LSE"), "backward": ("dq", "dk", "dv")}
REFERENCE = "flash"
NORMS = {
    "max": lambda error: error.abs().amax().item(),
    "RMS": lambda error: error.square().mean().sqrt().item(),
}


def errors(names: tuple[str, ...], result: tuple, oracle: tuple) -> dict[str, float]:
    """{'out max', 'out RMS', 'LSE max', ...} of the named results; without those that a contender lacks."""
    found = {}
    for name, ours, exact in zip(names, result, oracle, strict=False):
        if name == "LSE" and ours.dim() > exact.dim():  # cuDNN's has a last dimension of one
            ours = ours.squeeze(-1)
        ours = ours[:, :, : exact.shape[2]]  # the efficient kernel's LSE is padded
        visible = torch.isfinite(exact)
        difference = (ours.double() - exact)[visible]
        found |= {f"{name} {norm}": measure(difference) for norm, measure in NORMS.items()}
    return found


def oracle_of(problem: Problem, q, k, v, dout=None) -> tuple[torch.Tensor, ...]:
    """The oracle of the problem's results."""
    mask = {"causal": problem.causal, "window": problem.window}
    if dout is None:
        return flash_cute.reference.forward(q, k, v, **mask)
    return flash_cute.reference.backward(q, k, v, dout, None, **mask)


def measure(problem: Problem, names: list[str], seeds: int, device: torch.device) -> dict:
    """One problem: contender -> measure -> its value for each seed."""
    found: dict[str, dict[str, list[float]]] = {}
    for seed in range(seeds):
        inputs = problem.inputs(device, seed=seed)
        oracle = oracle_of(problem, *inputs)
        for name in names:
            try:
                result = contenders.prepare(name, problem, *inputs)()
            except contenders.CannotRun:
                continue
            if not contenders.agrees(result[0], oracle[0]):
                continue
            for what, value in errors(RESULTS[problem.direction], result, oracle).items():
                found.setdefault(name, {}).setdefault(what, []).append(value)
    return {"problem": problem.to_json(), "errors": found}


def markdown(cells: list[dict]) -> str:
    direction = cells[0]["problem"]["direction"]
    measures = [f"{name} {norm}" for name in RESULTS[direction] for norm in NORMS]
    compared = [f"{name} RMS" for name in RESULTS[direction]] if direction == "backward" else []
    rows = []
    for cell in cells:
        problem = cell["problem"]
        for name, values in cell["errors"].items():
            row = [f"d{problem['head_dim']}, {title(problem)}, {problem['dtype']}: {name}"]
            for what in measures:
                seen = values.get(what)
                row.append(f"{statistics.median(seen):.2e} ({max(seen):.2e})" if seen else MISSING)
            for what in compared:
                theirs = cell["errors"].get(REFERENCE, {}).get(what)
                row.append(f"{median_ratio(values[what], theirs):.3f}" if theirs else MISSING)
            rows.append(row)
    return "\n".join(table(["", *measures, *(f"{what}/{REFERENCE}" for what in compared)], rows))


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def main(arguments: list[str] | None = None) -> Path:
    args = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__.splitlines()[0])
    add_direction(args, *RESULTS)
    args.add_argument("--shape", type=parse_shape, action="append", metavar="B,HQ,HKV,SQ,SK,D")
    args.add_argument("--mask", choices=MASKS, default="both")
    args.add_argument("--window", type=parse_window, metavar="LEFT,RIGHT")
    args.add_argument("--dtype", choices=[*ALL_DTYPES, "both"], default="both")
    args.add_argument("--seeds", type=int, default=5)
    args.add_argument("--device", help="cpu runs a small form of it")
    args.add_argument("--name", help="of the result file (default: accuracy, and the pass)")
    args.add_argument("--output", type=Path, help="folder of results (default: benchmarks/results)")
    add_precision(args)
    options = args.parse_args(arguments)
    torch.set_float32_matmul_precision(options.precision)
    device = choose_device(options.device)
    names = contenders.mine(device, options.direction)
    names += contenders.PEERS_ON_CPU if device.type == "cpu" else contenders.FREE_PEERS
    problems = [
        Problem(*shape, causal, options.window, dtype, options.direction)
        for shape in options.shape or SHAPES[device.type]
        for causal in MASKS[options.mask]
        for dtype in (DTYPES if options.dtype == "both" else [options.dtype])
    ]
    problems = timing.progress(problems, "accuracy")
    cells = [measure(problem, names, options.seeds, device) for problem in problems]
    text = "Error against float64, median (largest) over the draws:\n\n" + markdown(cells)
    results = {"environment": environment(device), "cells": cells}
    name = options.name or result_name("accuracy", options.direction)
    return save_and_show(results, text, name, options.output)


if __name__ == "__main__":
    main()
