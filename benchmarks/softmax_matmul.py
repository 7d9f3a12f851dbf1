"""Softmax of given scores, times v, beside PyTorch's two operators: forward, and forward and backward.

    python -m benchmarks.softmax_matmul

x is (batch, heads, length, length) and v (batch, heads, length, head dim), bf16; gradients are those of both.
Times are of bursts. The share of the read rate is the bytes of x over the forward's time and the rate of a
kernel that does nothing else but read, as in benchmarks.decode. What does not fit in memory is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import flash_cute

from . import results, timing
from .decode import rates
from .peers.base import CannotRun, attempt
from .problem import numbers
from .report import publish
from .scores import OURS, agrees

LENGTHS = {"cuda": [1024, 2048, 4096, 8192, 16384], "cpu": [64]}
TOKENS, HIDDEN = {"cuda": 16384, "cpu": 128}, {"cuda": 2048, "cpu": 128}
WAYS = "forward", "both"


def ours(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return flash_cute.softmax_matmul(x, v)[0]


def operators(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1) @ v


def prepare(contenders: dict[str, Callable], shape: tuple[int, ...], device) -> tuple[dict, dict[str, str]]:
    """({"name, way": what is timed}, {"name, way": why it is left out}). shape: of v."""
    draw = partial(torch.randn, dtype=torch.bfloat16, device=device)
    try:
        x, v, dout = attempt(lambda: [draw(*shape[:3], columns) for columns in (shape[2], *[shape[3]] * 2)])
    except CannotRun as reason:
        return {}, {"all": str(reason)}
    leaves = x.requires_grad_(), v.requires_grad_()
    calls, excluded, first = {}, {}, {}
    for name, function in contenders.items():
        run = partial(function, *leaves)
        ways = (
            torch.no_grad()(lambda run=run: (run(),)),
            lambda run=run: torch.autograd.grad(run(), leaves, dout),
        )
        for way, call in zip(WAYS, ways, strict=True):
            try:
                found = attempt(call)[-1:]  # out, or the gradient of v: those of x take too much memory
                if not agrees(found, first.setdefault(way, found)):
                    raise CannotRun("its result differs")
                calls[f"{name}, {way}"] = call
            except CannotRun as reason:
                excluded[f"{name}, {way}"] = str(reason)
    return calls, excluded


def measure(head_dim: int, length: int, compiled: bool, device: torch.device, seconds: float) -> dict:
    batch = max(1, TOKENS[device.type] // length)
    shape = batch, HIDDEN[device.type] // head_dim, length, head_dim
    contenders = {OURS: ours, "torch": operators}
    if compiled:
        torch.compiler.reset()  # each cell has a graph of its own sizes
        contenders["compiled"] = torch.compile(operators, dynamic=False)
    calls, excluded = prepare(contenders, shape, device)
    samples = timing.burst(calls, device, seconds)

    def of_way(way: str) -> dict:
        found = {name: samples[call] for name in contenders if (call := f"{name}, {way}") in samples}
        return timing.compared(found, {OURS: [name for name in found if name != OURS]})

    size = {"bytes": 2 * batch * shape[1] * length**2}  # of x
    passes = {way: of_way(way) for way in WAYS}
    return {"shape": shape, "problem": size, "passes": passes, "excluded": excluded}


def main(arguments: list[str] | None = None) -> Path:
    args = results.parser("softmax_matmul", __doc__, "softmax-matmul")
    args.add_argument(
        "--lengths", type=numbers, help="default: 1024 to 16384, of 16384 tokens over the batch"
    )
    args.add_argument("--head-dims", type=numbers, default=[64, 128], help="heads x head dim is 2048")
    args.add_argument("--compile", action="store_true", help="PyTorch's operators under torch.compile, too")
    args.add_argument("--seconds", type=float, default=1.0, help="of measuring a cell")
    options = args.parse_args(arguments)
    device = results.choose_device(options.device)
    found = [rates(device)]
    lengths = options.lengths or LENGTHS[device.type]
    cells = [(head_dim, length) for head_dim in options.head_dims for length in lengths]
    measured = [
        measure(*cell, options.compile, device, options.seconds)
        for cell in timing.progress(cells, "softmax_matmul")
    ]
    content = {"rates": [*found, rates(device)], "cells": measured}
    return publish("softmax_matmul", options, device, content, "softmax-matmul")


if __name__ == "__main__":
    main()
