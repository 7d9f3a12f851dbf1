"""FLOP rate of the blocks that a sliding window or grouped heads visit, beside the causal mask's.

    python -m benchmarks.masks

A share is of the causal rate in the same regime.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import flash_cute

from . import contenders, lengths, results, timing
from .problem import DTYPES, SHAPE_METAVAR, Problem, add_direction, parse_shape, parse_window
from .report import publish

SHAPE = {"cuda": (1, 16, 16, 16384, 16384, 128), "cpu": (1, 2, 2, 256, 256, 32)}
TURNS = 3  # of each case, sustained


def problems(causal: Problem, group: int, window: tuple[int | None, int | None]) -> dict[str, Problem]:
    """The causal problem, the same with `group` query heads to a head of K and V, and behind a window."""
    return {
        "causal": causal,
        f"causal, {group} query heads per K/V head": replace(causal, heads_kv=causal.heads_q // group),
        f"causal, window {window[0]},{window[1]}": replace(causal, window=window),
    }


def visited_flops(problem: Problem, inputs, family: str) -> int:
    """Of the blocks that our kernel visits; on the CPU of the visible pairs."""
    plan = flash_cute.explain(
        *inputs[:3],
        problem.causal,
        window=problem.window,
        backward=problem.direction == "backward",
        family=None if family == contenders.CPU else family,
        internals=True,
    )
    return problem.visited_flops(*lengths.tile(plan))


def measure(cases: dict[str, Problem], device, seconds: float, regime: str, family: str | None) -> dict:
    """For each case its times, its FLOP rates, and the latter's share of the first case's."""
    inputs = {name: problem.inputs(device) for name, problem in cases.items()}
    asked = cases["causal"]
    family = family or contenders.families(device, asked.direction, asked.dtype)[-1]
    calls = {name: contenders.prepare(family, cases[name], *inputs[name]) for name in cases}
    if regime == "burst":
        samples = timing.burst(calls, device, seconds)
    else:
        samples, _ = timing.sustained(calls, device, seconds / len(calls) / TURNS, TURNS)
    first = next(iter(cases))
    flops = {name: visited_flops(problem, inputs[name], family) for name, problem in cases.items()}
    found = {}
    for name, problem in cases.items():
        times = timing.summary(samples[name])
        shares = [
            flops[name] / mine / (flops[first] / theirs)
            for mine, theirs in zip(samples[name], samples[first], strict=True)
        ]
        found[name] = {
            "problem": problem.to_json(),
            "times_us": times,
            "visible_tflops": problem.flops / times["median"] / 1e6,
            "visited_tflops": flops[name] / times["median"] / 1e6,
            "share": timing.summary(shares),
        }
    return {"regime": regime, "family": family, "rounds": len(samples[first]), "cases": found}


def main(arguments: list[str] | None = None) -> Path:
    args = results.parser("masks", __doc__, "masks, and the pass")
    add_direction(args, "forward", "backward")
    args.add_argument("--shape", type=parse_shape, metavar=SHAPE_METAVAR, help="of the causal problem")
    args.add_argument("--group", type=int, help="query heads per K/V head (default: 8, on the CPU 2)")
    args.add_argument("--family", help="ours (default: the last that runs here)")
    args.add_argument("--window", type=parse_window, default=(1024, 0), metavar="LEFT,RIGHT")
    args.add_argument("--seconds", type=float, default=6.0, help="of measuring per type and regime")
    timing.add_regime(args)
    options = args.parse_args(arguments)
    device = results.choose_device(options.device)
    shape = options.shape or SHAPE[device.type]
    group = options.group or (2 if device.type == "cpu" else 8)
    measured = []
    for dtype in timing.progress(DTYPES, "masks"):
        causal = Problem(*shape, causal=True, dtype=dtype, direction=options.direction)
        cases = problems(causal, group, options.window)
        for regime in timing.REGIMES:
            if options.regime in (regime, "both"):
                measured.append(measure(cases, device, options.seconds, regime, options.family))
    return publish("masks", options, device, {"measured": measured})


if __name__ == "__main__":
    main()
