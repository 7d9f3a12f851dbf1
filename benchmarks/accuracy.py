"""Error against float64 of every family of ours and every peer, on the same inputs.

    python -m benchmarks.accuracy
    python -m benchmarks.accuracy --shape 2,8,2,1024,1024,128 --mask causal --dtype fp16 --seeds 9
    python -m benchmarks.accuracy --pass backward
    python -m benchmarks.accuracy --case bias --mask full

Each problem is drawn several times; the table has the median over the draws and, in brackets, the largest. Of
gradients it has, too, the RMS over that of PyTorch's FlashAttention-2, the median of the draws' ratios.
With --case ours are beside "operators", attention written with PyTorch's operators in the inputs' type.
"""

from __future__ import annotations

from pathlib import Path

import torch

import flash_cute.reference

from . import changes, contenders, results, timing
from .peers.base import CannotRun
from .problem import ALL_DTYPES, DTYPES, Problem, add_direction, add_precision, add_shapes, of_shapes
from .report import publish
from .report.others import OPERATORS

SHAPES = {
    "cuda": [
        (batch, heads, kv, seqlen, seqlen, dim)
        for dim in (64, 128, 256)
        for batch, heads, kv, seqlen in ((16, 16, 16, 512), (2, 8, 2, 4096))
    ],
    "cpu": [(1, 2, 2, 100, 100, 64)],
}
RESULTS = {"forward": ("out", "LSE"), "backward": ("dq", "dk", "dv")}
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


def oracle_of(problem: Problem, q, k, v, dout=None, **changed) -> tuple[torch.Tensor, ...]:
    """The oracle of the problem's results. changed: other arguments of flash_cute.reference, as a mask."""
    mask = {"causal": problem.causal, "window": problem.window}
    if dout is None:
        return flash_cute.reference.forward(q, k, v, **mask, **changed)
    return flash_cute.reference.backward(q, k, v, dout, None, **mask, **changed)


def measure(problem: Problem, names: list[str], seeds: int, device: torch.device, case: str) -> dict:
    """One problem: contender -> measure -> its value for each seed."""
    found: dict[str, dict[str, list[float]]] = {}
    for seed in range(seeds):
        inputs = problem.inputs(device, seed=seed)
        changed = changes.drawn(case, problem, device, seed)
        oracle = oracle_of(problem, *inputs, **changed)
        for name in names:
            try:
                if name == OPERATORS:
                    result = oracle_of(problem, *inputs, **changed, dtype=inputs[0].dtype)
                else:
                    result = contenders.prepare(name, problem, *inputs, **changed)()
            except CannotRun:
                continue
            if not contenders.agrees(result[0], oracle[0]):
                continue
            for what, value in errors(RESULTS[problem.direction], result, oracle).items():
                found.setdefault(name, {}).setdefault(what, []).append(value)
    return {"problem": problem.to_json(), "errors": found}


def main(arguments: list[str] | None = None) -> Path:
    args = results.parser("accuracy", __doc__, "accuracy, and the pass")
    add_direction(args, *RESULTS)
    add_shapes(args)
    args.add_argument("--dtype", choices=[*ALL_DTYPES, "both"], default="both")
    args.add_argument("--seeds", type=int, default=5)
    args.add_argument("--case", choices=changes.CASES, default=changes.PLAIN, help="what changes scores")
    add_precision(args)
    options = args.parse_args(arguments)
    torch.set_float32_matmul_precision(options.precision)
    device = results.choose_device(options.device)
    dtypes = list(DTYPES) if options.dtype == "both" else [options.dtype]
    names = contenders.mine(device, options.direction, dtypes[0])
    if options.case != changes.PLAIN:
        names.append(OPERATORS)
    else:
        names += contenders.PEERS_ON_CPU if device.type == "cpu" else contenders.FREE_PEERS
    problems = of_shapes(options, options.shape or SHAPES[device.type], dtypes)
    problems = timing.progress(problems, "accuracy")
    cells = [measure(problem, names, options.seeds, device, options.case) for problem in problems]
    name = "accuracy" if options.case == changes.PLAIN else f"accuracy-{options.case.replace(' ', '-')}"
    return publish("accuracy", options, device, {"case": options.case, "cells": cells}, name)


if __name__ == "__main__":
    main()
