"""Softmax by itself, forward and backward, beside a copy, PyTorch's softmax and a fused one in Triton.

    python -m benchmarks.softmax

A cell is a number of columns and an element type; x has 256 MB. "of a copy" is the time a copy of x takes, or
for the backward one and a half, divided by ours: the share of a copy's bandwidth. Ratios are medians over
rounds, beside them half their interquartile range.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import flash_cute

from . import results, timing
from .problem import ALL_DTYPES
from .report import publish

COLUMNS = [2**power for power in (5, 7, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 20)]
ODD_COLUMNS = [1000, 4099, 50257]
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
    size = BYTES[device.type] // ALL_DTYPES[element].itemsize
    rows = max(1, size // columns)
    x = torch.randn(rows, columns, device=device).to(ALL_DTYPES[element])
    samples = timing.burst(contenders(x, direction), device, seconds)
    cell = {"columns": columns, "rows": rows, "element": element, "direction": direction}
    cell["rounds"] = len(samples["ours"])
    cell["times_us"] = {name: timing.summary(values) for name, values in samples.items()}
    tensors = 1.0 if direction == "forward" else 1.5  # copies that move as many bytes
    cell["of_a_copy"] = round(tensors * timing.paired_speedup(samples["ours"], samples["copy"]), 3)
    for name in ("torch", "triton"):
        if name in samples:
            speedups = timing.paired_speedups(samples["ours"], samples[name])
            cell[f"over_{name}"] = timing.summary(speedups)
    return cell


def main(arguments: list[str] | None = None) -> Path:
    args = results.parser("softmax", __doc__)
    args.add_argument("--columns", type=int, nargs="+", default=COLUMNS + ODD_COLUMNS)
    args.add_argument("--element", choices=ALL_DTYPES, nargs="+", default=list(ALL_DTYPES))
    args.add_argument("--seconds", type=float, default=0.2, help="for each cell")
    options = args.parse_args(arguments)
    device = results.choose_device(options.device)
    cells = [
        measure(columns, element, direction, device, options.seconds)
        for direction in ("forward", "backward")
        for element in options.element
        for columns in timing.progress(options.columns, f"{direction}, {element}")
    ]
    return publish("softmax", options, device, {"cells": cells})


if __name__ == "__main__":
    main()
