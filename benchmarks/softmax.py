"""Softmax by itself, forward and backward, beside a copy, PyTorch's softmax and a fused one in Triton.

    python -m benchmarks.softmax

A cell is a number of columns and an element type; x has 256 MB. "of a copy" is the time a copy of x takes, or
for the backward one and a half, divided by ours: the share of a copy's bandwidth. Ratios are medians over
rounds, beside them half their interquartile range.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import flash_cute

from . import timing
from .report import MISSING, source, table
from .results import choose_device, environment, save_and_show

COLUMNS = [2**power for power in (5, 7, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 20)]
ODD_COLUMNS = [1000, 4099, 50257]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BYTES = {"cuda": 2**28, "cpu": 2**22}


def triton_softmax(x: torch.Tensor) -> Callable[[], torch.Tensor] | None:
    """Triton's for x's rows; None where there is none."""
    if x.device.type != "cuda":
        return None
    try:
        from . import triton_softmax as kernels
    except ImportError:
        return None
    return kernels.softmax(x)


def contenders(x: torch.Tensor, direction: str) -> dict[str, Callable]:
    probabilities, target = x.softmax(-1), torch.empty_like(x)
    copy = partial(target.copy_, x)
    if direction == "forward":
        found = {
            "ours": partial(flash_cute.softmax, x),
            "torch": partial(torch.softmax, x, -1),
            "copy": copy,
        }
        if run := triton_softmax(x):
            found["triton"] = run
        return found
    gradient = torch.randn_like(x)
    kept = probabilities if x.dtype == torch.float32 else x
    backward, theirs = torch.ops.flash_cute._softmax_backward, torch.ops.aten._softmax_backward_data
    return {
        "ours": partial(backward, gradient, None, kept),
        "torch": partial(theirs, gradient, probabilities, -1, x.dtype),
        "copy": copy,
    }


def measure(columns: int, element: str, direction: str, device: torch.device, seconds: float) -> dict:
    size = BYTES[device.type] // DTYPES[element].itemsize
    rows = max(1, size // columns)
    x = torch.randn(rows, columns, device=device).to(DTYPES[element])
    samples = timing.burst(contenders(x, direction), device, seconds)
    cell = {"columns": columns, "rows": rows, "element": element, "direction": direction}
    cell["rounds"] = len(samples["ours"])
    cell["us"] = {name: timing.summary(values) for name, values in samples.items()}
    tensors = 1.0 if direction == "forward" else 1.5  # copies that move as many bytes
    cell["of_a_copy"] = round(tensors * timing.paired_speedup(samples["ours"], samples["copy"]), 3)
    for name in ("torch", "triton"):
        if name in samples:
            speedups = timing.paired_speedups(samples["ours"], samples[name])
            cell[f"over_{name}"] = timing.summary(speedups)
    return cell


def ratio(cell: dict, name: str) -> str:
    if name not in cell:
        return MISSING
    over = cell[name]
    return f"{over['median']:.3f} ±{(over['q75'] - over['q25']) / 2:.3f}"


def report(results: dict) -> str:
    header = ["direction", "type", "columns", "rows", "ours, us", "of a copy", "times torch", "times triton"]
    body = [
        [
            *(str(cell[name]) for name in ("direction", "element", "columns", "rows")),
            f"{cell['us']['ours']['median']:.1f}",
            f"{cell['of_a_copy']:.2f}",
            *(ratio(cell, name) for name in ("over_torch", "over_triton")),
        ]
        for cell in results["cells"]
    ]
    return "\n".join([*source(results["environment"]), "", *table(header, body)])


def main(arguments: list[str] | None = None) -> Path:
    args = argparse.ArgumentParser(prog="python -m benchmarks.softmax", description=__doc__.splitlines()[0])
    args.add_argument("--columns", type=int, nargs="+", default=COLUMNS + ODD_COLUMNS)
    args.add_argument("--element", choices=DTYPES, nargs="+", default=list(DTYPES))
    args.add_argument("--seconds", type=float, default=0.2, help="for each cell")
    args.add_argument("--device", help="cpu runs a small form of it")
    args.add_argument("--name", default="softmax", help="of the result file")
    args.add_argument("--output", type=Path, help="folder of results (default: benchmarks/results)")
    options = args.parse_args(arguments)
    device = choose_device(options.device)
    cells = [
        measure(columns, element, direction, device, options.seconds)
        for direction in ("forward", "backward")
        for element in options.element
        for columns in timing.progress(options.columns, f"{direction}, {element}")
    ]
    results = {"environment": environment(device), "cells": cells}
    return save_and_show(results, report(results), options.name, options.output)


if __name__ == "__main__":
    main()
