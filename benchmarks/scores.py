"""Masks, biases, dropout, soft caps and ALiBi beside the same kernels without them, and beside peers.

    python -m benchmarks.scores
    python -m benchmarks.scores --no-flex --cases bias,dropout --lengths 4096 --by-length

Times of the forward and of the gradients, in bursts. In each cell "plain" is our call that asks for nothing,
or of a bias that trains, the call with that bias as a constant, and "ours" the case's. Peers are called by
SDPA with one of its kernels, and FlexAttention, compiled, with its block mask made before; each where it
takes the case. Rates count visible pairs. FlexAttention compiles for a minute or so in each cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import flash_cute

from . import changes, results, timing
from .changes import CASES, PLAIN
from .peers.base import CannotRun, attempt, sifted
from .peers.pytorch import SDPA, Flex
from .problem import Problem, numbers
from .report import publish

LENGTHS = {"cuda": [1024, 2048, 4096, 8192, 16384], "cpu": [256]}
TOKENS, HIDDEN = {"cuda": 16384, "cpu": 256}, {"cuda": 2048, "cpu": 64}
OURS, FLEX = "ours", "flex"
WAYS = "forward", "backward"
BOTH = "both"  # the sum of the ways
APART = 0.1  # RMS of the difference from ours over that of ours, from which a peer computes something else
FLEX_VALUES = 2**31  # a score_mod reads tensors at places of 32 bits, and beyond them wherever those lead


def score_mod_of(options: dict) -> Callable | None:
    """FlexAttention's of our arguments; None: scores stay as they are."""
    if options.get("dropout_p"):
        raise CannotRun("no dropout")
    bias, slopes, softcap = map(options.get, ("bias", "alibi_slopes", "softcap"))
    if bias is not None:
        if bias.numel() > FLEX_VALUES:
            raise CannotRun(f"a bias of more than {FLEX_VALUES} values")
        return lambda score, b, h, i, j: score + bias[0, h, i, j]
    if slopes is not None:
        return lambda score, b, h, i, j: score - slopes[h] * (i - j).abs()
    if softcap:
        return lambda score, b, h, i, j: softcap * torch.tanh(score / softcap)
    return None


def mask_mod_of(options: dict, causal: bool) -> Callable | None:
    """FlexAttention's of our arguments, for as many queries as keys; None: all is visible."""
    mask = options.get("mask")
    if mask is None:
        return (lambda b, h, i, j: i >= j) if causal else None
    several = [size > 1 for size in mask.shape]

    def seen(b, h, i, j):
        place = tuple(at if varies else 0 for at, varies in zip((b, h, i, j), several, strict=True))
        return mask[place] & (i >= j) if causal else mask[place]

    return seen


def forwards_of(problem: Problem, inputs, options: dict, family, peers: list[str], flex: Flex | None) -> dict:
    """What makes each contender's forward, by name."""
    ours = partial(flash_cute.attention, *inputs, problem.causal, family=family)
    # As users call it, each time with another seed, which ours draws.
    asked = {name: value for name, value in options.items() if name != "dropout_seed"}
    trained = (
        {"bias": bias.detach()} if (bias := asked.get("bias")) is not None and bias.requires_grad else {}
    )
    makers = {PLAIN: lambda: partial(ours, **trained)} if options else {}
    makers[OURS] = lambda: partial(ours, **asked)
    attn_mask = changes.attn_mask_of(options, problem)
    for peer in peers:
        makers[peer] = partial(SDPA[peer].forward, *inputs, problem.causal, attn_mask, asked)

    def of_flex() -> Callable:
        mods = score_mod_of(options), mask_mod_of(options, problem.causal)
        of_each = len(options.get("mask", ())) > 1
        return flex.scored(*inputs, *mods, problem.batch if of_each else None)

    return makers | ({FLEX: of_flex} if flex else {})


def agrees(found: list[torch.Tensor], ours: list[torch.Tensor]) -> bool:
    """Whether out, or the gradients, are ours but for rounding."""

    def rms(x: torch.Tensor) -> float:
        return x.float().square().mean().sqrt().item()

    return all(rms(x - y) <= APART * rms(y) for x, y in zip(found, ours, strict=True))


def ways_of(forward: Callable, inputs, dout) -> Iterator[tuple[str, Callable, list[torch.Tensor]]]:
    """Each way of a contender: its name, what is timed, and what that gives. inputs: that have gradients."""
    out = attempt(forward)
    yield "forward", torch.no_grad()(forward), [out.detach()]

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, inputs, dout, retain_graph=True)

    yield "backward", backward, list(attempt(backward))


def prepare(
    makers: dict, inputs, trained, dout, comparable: bool
) -> tuple[dict[str, Callable], dict[str, str]]:
    """({"name, way": what is timed}, {"name" or "name, way": why it is left out}).

    trained: what has a gradient beside inputs, but in the plain call.
    """
    calls, first = {}, {}
    forwards, excluded = sifted(makers)
    for name, forward in forwards.items():
        try:
            with_gradient = inputs if name == PLAIN else [*inputs, *trained]
            for way, call, found in ways_of(forward, with_gradient, dout):
                if name == OURS:
                    first[way] = found
                elif comparable and way in first and not agrees(found, first[way]):
                    excluded[f"{name}, {way}"] = "its result differs"
                    continue
                calls[f"{name}, {way}"] = call
        except CannotRun as reason:
            way = ", backward" if f"{name}, forward" in calls else ""
            excluded[name + way] = str(reason)
    return calls, excluded


def measure(case: str, problem: Problem, device, seconds: float, **contenders) -> dict:
    """A cell. contenders: family, peers and flex, as forwards_of takes them."""
    *inputs, dout = problem.inputs(device)
    inputs = [x.requires_grad_() for x in inputs]
    options = changes.drawn(case, problem, device)
    trained = [options["bias"].requires_grad_()] if CASES[case].trains else []
    makers = forwards_of(problem, inputs, options, **contenders)
    calls, excluded = prepare(makers, inputs, trained, dout, comparable="dropout_p" not in options)
    samples = timing.burst(calls, device, seconds)
    visible = changes.visible_share(options, problem)

    def of_way(way: str) -> dict:
        found = {name: samples[call] for name in makers if (call := f"{name}, {way}") in samples}
        return told(found, replace(problem, direction=way).flops)

    def told(found: dict[str, list[float]], flops: int) -> dict:
        compared = timing.compared(found, {OURS: [name for name in found if name != OURS]})
        rates = {
            name: float(f"{(1 if name == PLAIN else visible) * flops / us['median'] / 1e6:.4g}")
            for name, us in compared["times_us"].items()
        }
        return compared | {"tflops": rates}

    sums = {
        name: [sum(pair) for pair in zip(*(samples[call] for call in both), strict=True)]
        for name in makers
        if samples.keys() >= {*(both := [f"{name}, {way}" for way in WAYS])}
    }
    passes = {way: of_way(way) for way in WAYS} | {BOTH: told(sums, problem.flops)}
    return {
        "case": case,
        "problem": problem.to_json(),
        "visible": visible,
        "passes": passes,
        "excluded": excluded,
    }


def names_of(known: dict) -> Callable[[str], list[str]]:
    """A parser of names, comma separated, that refuses others."""

    def names(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        if wrong := [name for name in found if name not in known]:
            raise ValueError(wrong)
        return found

    return names


def main(arguments: list[str] | None = None) -> Path:
    args = results.parser("scores", __doc__)
    args.add_argument("--cases", type=names_of(CASES), default=[*CASES], help=f"of {', '.join(CASES)}")
    args.add_argument("--lengths", type=numbers, help="default: 1024 to 16384, on the CPU 256")
    args.add_argument("--head-dims", type=numbers, help="default: 64,128, of softcap 256, too")
    args.add_argument("--tokens", type=int, help="of each cell, over the batch (default: 16384)")
    args.add_argument("--hidden", type=int, help="heads x head dim (default: 2048)")
    args.add_argument("--causal", action="store_true", help="under a causal mask")
    args.add_argument("--family", help="of our kernels; default: as the device decides")
    args.add_argument("--peers", type=names_of(SDPA), default=[*SDPA], help=f"of {', '.join(SDPA)}, or ''")
    args.add_argument("--no-flex", action="store_true", help="without FlexAttention")
    args.add_argument("--seconds", type=float, default=0.2, help="of measuring a cell")
    args.add_argument("--by-length", action="store_true", help="tables of each length, too")
    options = args.parse_args(arguments)
    device = results.choose_device(options.device)
    flex = Flex() if device.type == "cuda" and not options.no_flex else None
    contenders = {"family": options.family, "peers": options.peers, "flex": flex}
    tokens, hidden = options.tokens or TOKENS[device.type], options.hidden or HIDDEN[device.type]
    head_dims = options.head_dims or sorted({dim for case in options.cases for dim in CASES[case].head_dims})

    def problem(head_dim: int, length: int) -> Problem:
        batch, heads = max(1, tokens // length), max(1, hidden // head_dim)
        shape = batch, heads, heads, length, length, head_dim
        return Problem(*shape, causal=options.causal, direction=BOTH)

    problems = [
        (case, problem(head_dim, length))
        for head_dim in head_dims
        for length in options.lengths or LENGTHS[device.type]
        for case in options.cases
        if options.head_dims or head_dim in CASES[case].head_dims
    ]
    cells = [
        measure(*cell, device, options.seconds, **contenders) for cell in timing.progress(problems, "scores")
    ]
    return publish("scores", options, device, {"by_length": options.by_length, "cells": cells})


if __name__ == "__main__":
    main()
