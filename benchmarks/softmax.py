"""Softmax by itself, forward and backward, beside a copy, PyTorch's softmax and a fused one in Triton.

    python -m benchmarks.softmax

A cell is a number of columns and an element type; x has 256 MB. "of a copy" is the time a copy of x takes, or
for the backward one and a half, divided by ours: the share of a copy's bandwidth.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import flash_cute

from . import timing
from .report import MISSING, table
from .results import choose_device, environment, save_and_show

COLUMNS = [2**power for power in (5, 7, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 20)]
ODD_COLUMNS = [1000, 4099, 50257]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BYTES = {"cuda": 2**28, "cpu": 2**22}
TRITON_UP_TO = 2**16  # columns: it holds a row in one program, and spills


def triton_softmax(x: torch.Tensor) -> Callable[[], torch.Tensor] | None:
    """Triton's tutorial kernel, a program for each row; None where Triton is missing or the row too long."""
    try:
        import triton
        import triton.language as tl
    except ImportError:
        return None
    rows, columns = x.shape
    if columns > TRITON_UP_TO or x.device.type != "cuda":
        return None
    global _row_kernel
    if _row_kernel is None:

        @triton.jit
        def _row_kernel(source, target, columns, BLOCK: tl.constexpr):
            row = tl.program_id(0).to(tl.int64)
            offsets = tl.arange(0, BLOCK)
            mask = offsets < columns
            scores = tl.load(source + row * columns + offsets, mask=mask, other=-float("inf")).to(tl.float32)
            numerator = tl.exp(scores - tl.max(scores, axis=0))
            result = numerator / tl.sum(numerator, axis=0)
            tl.store(target + row * columns + offsets, result.to(target.dtype.element_ty), mask=mask)

    target, block = torch.empty_like(x), triton.next_power_of_2(columns)
    warps = 4 if block < 2048 else 8 if block < 8192 else 16 if block < 32768 else 32

    def run():
        _row_kernel[(rows,)](x, target, columns, BLOCK=block, num_warps=warps)
        return target

    return run


_row_kernel = None


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
    cell["us"] = {name: timing.summary(values)["median"] for name, values in samples.items()}
    tensors = 1.0 if direction == "forward" else 1.5  # copies that move as many bytes
    cell["of_a_copy"] = round(tensors * timing.paired_speedup(samples["ours"], samples["copy"]), 3)
    for name in ("torch", "triton"):
        if name in samples:
            cell[f"over_{name}"] = timing.paired_speedup(samples["ours"], samples[name])
    return cell


def report(cells: list[dict]) -> str:
    header = ["direction", "type", "columns", "rows", "ours, us", "of a copy", "times torch", "times triton"]
    body = [
        [
            *(str(cell[name]) for name in ("direction", "element", "columns", "rows")),
            f"{cell['us']['ours']:.1f}",
            f"{cell['of_a_copy']:.2f}",
            *(f"{cell[name]:.2f}" if name in cell else MISSING for name in ("over_torch", "over_triton")),
        ]
        for cell in cells
    ]
    return "\n".join(table(header, body))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default=None)
    parser.add_argument("--columns", type=int, nargs="+", default=COLUMNS + ODD_COLUMNS)
    parser.add_argument("--seconds", type=float, default=0.2, help="for each cell")
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    cells = [
        measure(columns, element, direction, device, arguments.seconds)
        for direction in ("forward", "backward")
        for element in DTYPES
        for columns in timing.progress(arguments.columns, f"{direction}, {element}")
    ]
    results = {"environment": environment(device), "cells": cells}
    save_and_show(results, report(cells), "softmax", arguments.output)


if __name__ == "__main__":
    main()
