"""Results as Markdown and plots, whichever program measured them.

A result file holds `program`, `environment` and, of most programs, `cells`; a cell says its `problem` and, by
contender, `times_us`, under the regime that they were measured in if there are several.
"""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch

from ..results import environment, save
from . import attention, decode, others, scores

MARKDOWN: dict[str, Callable[[dict], str]] = {
    "attention": attention.markdown,
    "decode": decode.markdown,
    "accuracy": others.accuracy,
    "masks": others.masks,
    "overhead": others.overhead,
    "ranges": others.ranges,
    "scores": scores.markdown,
    "softmax": others.softmax,
    "softmax_matmul": others.softmax_matmul,
    "training": others.training,
    "jax_attention": others.jax_attention,
    "context_parallel": others.context_parallel,
}
PLOTS: dict[str, Callable[[dict, Path], None]] = {
    "attention": attention.plot,
    "decode": decode.plot,
    "scores": scores.plot,
}


def load(path: Path) -> dict:
    """A result file as programs write it today."""
    results = json.loads(path.read_text())
    return results if "program" in results else converted(results)


def converted(results: dict) -> dict:
    """Results from before they named their program: by their command, and today's words for what they say."""
    program = re.search(r"benchmarks\.(\w+)", results["environment"]["command"])[1]
    for cell in results.get("cells", []) + results.get("appends", []):
        if program == "decode":
            cell["problem"] = cell.pop("cell")
        elif program in ("softmax", "jax_attention"):
            cell["times_us"] = cell.pop("us")
        elif program in ("attention", "accuracy"):
            cell["problem"].setdefault("direction", "forward")
        if program == "attention" and "regimes" not in cell:
            known = "rounds", "times_us", "rates", "speedup"
            cell["regimes"] = {attention.MIXED: {name: cell.pop(name) for name in known}}
    if program == "jax_attention":
        results["jax"] = results["environment"]["jax"]
    if program == "training":
        results["size"] = {"layers": 4, "width": 1024, "tokens": 16384, "turns": 3}
    return {"program": program, **results}


def markdown(results: dict, **options) -> str:
    return MARKDOWN[results["program"]](results, **options)


def publish(
    program: str, options: Namespace, device: torch.device, content: dict, name: str | None = None, **how
) -> Path:
    """Save what was measured, with its Markdown beside the JSON and on the terminal.

    The file is named by --name, or after name or the program, and the pass unless that is the forward.
    """
    direction = getattr(options, "direction", "forward")
    default = (name or program) + ("" if direction == "forward" else f"-{direction}")
    results = {"program": program, "environment": environment(device), **content}
    path = save(results, getattr(options, "name", None) or default, options.output)
    text = markdown(results, **how)
    path.with_suffix(".md").write_text(text + "\n")
    print(f"{text}\n\nwritten to {path}")
    return path
