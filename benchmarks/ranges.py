"""Masks of key ranges beside the same keys by other arguments, and beside FlexAttention; sinks beside none.

    python -m benchmarks.ranges

Times of the forward and of the gradients, in bursts. "other" is our call that says the same by other
arguments, or nearly so. FlexAttention is compiled, and its block mask is made before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import flash_cute
from flash_cute import masks

from . import results, timing
from .peers.pytorch import Flex
from .problem import numbers
from .report import publish

HEAD_DIMS, LENGTHS = (64, 128), (8192, 32768)
HIDDEN = 2048  # heads x head_dim, at 8192 tokens; a quarter of the heads at 32768
DOCUMENT, WINDOW, FIRST = 2048, 1023, 4


@dataclass(frozen=True)
class Case:
    """A mask in each contender's terms."""

    ranges: Callable | None  # of (tokens, device); None: `other` with sinks
    mask_mod: Callable | None  # FlexAttention's, of (query, key, numbers of images)
    other: dict  # arguments of forward; "documents" stands for packed sequences
    heads: tuple[int, int] | None = None  # of q and of k, instead of those that follow from the head dim


def _offsets(tokens: int, device) -> torch.Tensor:
    return torch.arange(0, tokens + 1, min(tokens, DOCUMENT), dtype=torch.int32, device=device)


def _images(tokens: int, device) -> torch.Tensor:
    """A quarter of each 2048 tokens is a block whose tokens see each other."""
    place = torch.arange(tokens, device=device)
    inside = (place % DOCUMENT >= DOCUMENT // 8) & (place % DOCUMENT < 3 * DOCUMENT // 8)
    return (place // DOCUMENT).where(inside, -1)[None]


def _causal(tokens: int, device) -> torch.Tensor:
    return masks.prefix(torch.zeros(1, dtype=torch.int32, device=device), tokens)


CASES = {
    "causal": Case(_causal, lambda q, k, ids: q >= k, {"causal": True}),
    "documents": Case(
        lambda tokens, device: masks.documents(cu_seqlens=_offsets(tokens, device), seqlen=tokens),
        lambda q, k, ids: (q >= k) & (q // DOCUMENT == k // DOCUMENT),
        {"documents": True},
    ),
    "chunks": Case(
        lambda tokens, device: masks.chunks(DOCUMENT, tokens, device=device),
        lambda q, k, ids: (q >= k) & (q // DOCUMENT == k // DOCUMENT),
        {"documents": True},
    ),
    "sink and window": Case(
        lambda tokens, device: masks.sink_window(FIRST, WINDOW, tokens, device=device),
        lambda q, k, ids: (q >= k) & ((q - k <= WINDOW) | (k < FIRST)),
        {"causal": True, "window": (WINDOW, 0)},
    ),
    "prefix": Case(
        lambda tokens, device: masks.prefix(torch.tensor([tokens // 4], device=device), tokens),
        lambda q, k, ids: (q >= k) | (k < len(ids) // 4),
        {"causal": True},
    ),
    "images": Case(
        lambda tokens, device: masks.images(_images(tokens, device)),
        lambda q, k, ids: (q >= k) | ((ids[q] == ids[k]) & (ids[q] >= 0)),
        {"causal": True},
    ),
    # As in gpt-oss.
    "sinks": Case(None, None, {"causal": True}, (64, 8)),
    "sinks and window": Case(None, None, {"causal": True, "window": (127, 0)}, (64, 8)),
}


def calls_of(case: Case, inputs, flex: Flex | None) -> dict[str, Callable]:
    """What is timed, by name: the forward and the backward of each contender."""
    q, k, v, dout = inputs
    tokens, device = q.shape[2], q.device
    if case.ranges:
        own = {"ranges": case.ranges(tokens, device)}
    else:
        own = case.other | {"sinks": torch.randn(q.shape[1], device=device)}
    forwards = {"ranges": lambda: flash_cute.forward(q, k, v, **own)[0]}
    given = dict.fromkeys(("ranges", "other", "flex"), ((q, k, v), dout))
    if "documents" in case.other:
        packed = [x.detach()[0].transpose(0, 1).contiguous().requires_grad_() for x in (q, k, v)]
        given["other"] = packed, dout[0].transpose(0, 1).contiguous()
        offsets = _offsets(tokens, device)
        forwards["other"] = lambda: flash_cute.forward_varlen(*packed, offsets, causal=True)[0]
    else:
        forwards["other"] = lambda: flash_cute.forward(q, k, v, **case.other)[0]
    if flex and case.mask_mod:
        ids = _images(tokens, device)[0]
        forwards["flex"] = flex.forward(lambda i, j: case.mask_mod(i, j, ids), q, k, v)

    calls = {}
    for name, forward in forwards.items():
        out = forward()
        calls[f"{name}, forward"] = torch.no_grad()(forward)
        leaves, gradient = given[name]
        calls[f"{name}, backward"] = lambda out=out, leaves=leaves, gradient=gradient: torch.autograd.grad(
            out, leaves, gradient, retain_graph=True
        )
    return calls


def measure(name: str, head_dim: int, tokens: int, device, seconds: float, flex: Flex | None) -> dict:
    heads = max(1, HIDDEN // head_dim // (4 if tokens > 8192 else 1))
    heads = CASES[name].heads or (heads, heads)
    make = partial(torch.randn, dtype=torch.bfloat16, device=device)
    q, dout = (make(1, heads[0], tokens, head_dim) for _ in range(2))
    inputs = q, *(make(1, heads[1], tokens, head_dim) for _ in range(2))
    calls = calls_of(CASES[name], (*(x.requires_grad_() for x in inputs), dout), flex)
    samples = timing.burst(calls, device, seconds)
    return {
        "mask": name,
        "shape": tuple(q.shape),
        "times_us": {call: timing.summary(samples[call]) for call in calls},
    }


def main(arguments: list[str] | None = None) -> Path:
    args = results.parser("ranges", __doc__)
    args.add_argument("--masks", default=",".join(CASES), help="of these, comma separated")
    args.add_argument("--head-dims", type=numbers, default=HEAD_DIMS)
    args.add_argument("--tokens", type=numbers, help="default: 8192,32768, on the CPU 256")
    args.add_argument("--seconds", type=float, default=0.2, help="of measuring a cell")
    args.add_argument("--no-flex", action="store_true", help="without FlexAttention")
    options = args.parse_args(arguments)
    device = results.choose_device(options.device)
    flex = Flex() if device.type == "cuda" and not options.no_flex else None
    lengths = options.tokens or ([256] if device.type == "cpu" else LENGTHS)
    problems = [
        (mask, head_dim, tokens)
        for head_dim in options.head_dims
        for tokens in lengths
        for mask in options.masks.split(",")
    ]
    cells = [
        measure(*problem, device, options.seconds, flex) for problem in timing.progress(problems, "ranges")
    ]
    return publish("ranges", options, device, {"cells": cells})


if __name__ == "__main__":
    main()
