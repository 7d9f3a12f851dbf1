"""Tokens per second of training steps of examples/char_gpt.py's model, with attention by us and by PyTorch.

    python -m benchmarks.training

A step is a forward, a backward and an update of the weights (AdamW, fused) on the same random bytes, eager
and under torch.compile. Contenders take turns, each back to back; ratios are within a turn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import results, timing
from .report import publish

sys.path.append(str(Path(__file__).parent.parent / "examples"))
import char_gpt

WIDTH = {"cuda": 1024, "cpu": 64}
HEAD_DIMS = {"cuda": (64, 128), "cpu": (32,)}
CONTEXTS = {"cuda": (2048,), "cpu": (64,)}
TOKENS = {"cuda": 16384, "cpu": 128}
LAYERS, TURNS = 4, 3
BACKENDS = {
    "cuda": {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION},
    "cpu": {"flash": SDPBackend.FLASH_ATTENTION},
}
OURS = "flash_cute"


def by_sdpa(backend: SDPBackend) -> char_gpt.Attention:
    def attend(q, k, v):
        with sdpa_kernel(backend):
            return char_gpt.sdpa(q, k, v)

    return attend


def training_step(
    attend: char_gpt.Attention, head_dim: int, context: int, compiled: bool, device: torch.device
) -> Callable[[], None]:
    """A step of a new model; each call continues where the last one ended."""
    torch.manual_seed(0)
    heads = WIDTH[device.type] // head_dim
    model = char_gpt.GPT(LAYERS, heads, heads, head_dim).to(device)
    loss_of = torch.compile(model.loss) if compiled else model.loss
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    shape = TOKENS[device.type] // context, context
    bytes_read = torch.randint(char_gpt.BYTE_VALUES, shape, device=device)
    text = char_gpt.Text(bytes_read, bytes_read.roll(-1, 1), torch.arange(context, device=device))

    def step() -> None:
        loss_of(text, attend).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(head_dim: int, context: int, compiled: bool, device: torch.device, seconds: float) -> dict:
    backends = BACKENDS[device.type]
    attentions = {OURS: char_gpt.ours} | {name: by_sdpa(backend) for name, backend in backends.items()}
    steps = {
        name: training_step(attend, head_dim, context, compiled, device)
        for name, attend in attentions.items()
    }
    samples, _ = timing.sustained(steps, device, seconds, TURNS)
    torch.compiler.reset()
    rates = {name: [TOKENS[device.type] / us * 1e6 for us in times] for name, times in samples.items()}
    speedups = {name: timing.paired_speedups(samples[OURS], samples[name]) for name in backends}
    return {
        "head_dim": head_dim,
        "context": context,
        "compiled": compiled,
        "tokens_per_second": {name: timing.summary(values) for name, values in rates.items()},
        "over": {name: timing.summary(values) for name, values in speedups.items()},
    }


def main(arguments: list[str] | None = None) -> Path:
    args = results.parser("training", __doc__)
    args.add_argument("--seconds", type=float, default=0.3, help="of each turn")
    options = args.parse_args(arguments)
    device = results.choose_device(options.device)
    cells = [
        (head_dim, context, compiled)
        for head_dim in HEAD_DIMS[device.type]
        for context in CONTEXTS[device.type]
        for compiled in (False, True)
    ]
    one = partial(measure, device=device, seconds=options.seconds)
    of = device.type
    content = {
        "size": {"layers": LAYERS, "width": WIDTH[of], "tokens": TOKENS[of], "turns": TURNS},
        "cells": [one(*cell) for cell in timing.progress(cells, "cells")],
    }
    return publish("training", options, device, content)


if __name__ == "__main__":
    main()
