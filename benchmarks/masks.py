"""FLOP rate of the blocks that a sliding window or grouped heads visit, beside the causal mask's.

    python -m benchmarks.masks

A share is of the causal rate in the same regime.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import flash_cute

from . import contenders, timing
from .attention import add_regime
from .problem import DTYPES, Problem, add_direction, parse_shape, parse_window, result_name
from .report import digits, source, table
from .results import choose_device, environment, save_and_show

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
    if plan["family"] == "cpu":
        return problem.flops
    return problem.visited_flops(plan["block_m"] // plan["packed_heads"], plan["block_n"])


def measure(cases: dict[str, Problem], device, seconds: float, regime: str, family: str | None) -> dict:
    """For each case its times, its FLOP rates, and the latter's share of the first case's."""
    inputs = {name: problem.inputs(device) for name, problem in cases.items()}
    family = family or contenders.families(device, cases["causal"].direction)[-1]
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


def markdown(results: dict) -> str:
    lines = source(results["environment"])
    for measured in results["measured"]:
        problem = next(iter(measured["cases"].values()))["problem"]
        shape = f"{measured['family']}, {problem['batch']} x {problem['heads_q']} heads"
        shape += f", {problem['seqlen_q']} tokens, head dim {problem['head_dim']}, {problem['dtype']}"
        lines += ["", f"{measured['regime'].capitalize()}, {shape}, rounds: {measured['rounds']}", ""]
        header = [
            "",
            "us",
            "TFLOP/s, visible pairs",
            "TFLOP/s, visited blocks",
            "share of causal",
            "quartiles",
        ]
        rows = [
            [
                name,
                f"{case['times_us']['median']:.1f}",
                digits(case["visible_tflops"]),
                digits(case["visited_tflops"]),
                f"{case['share']['median']:.3f}",
                f"{case['share']['q25']:.3f} to {case['share']['q75']:.3f}",
            ]
            for name, case in measured["cases"].items()
        ]
        lines += table(header, rows)
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> Path:
    args = argparse.ArgumentParser(prog="python -m benchmarks.masks", description=__doc__.splitlines()[0])
    add_direction(args, "forward", "backward")
    args.add_argument("--shape", type=parse_shape, metavar="B,HQ,HKV,SQ,SK,D", help="of the causal problem")
    args.add_argument("--group", type=int, help="query heads per K/V head (default: 8, on the CPU 2)")
    args.add_argument("--family", help="ours (default: the last that runs here)")
    args.add_argument("--window", type=parse_window, default=(1024, 0), metavar="LEFT,RIGHT")
    args.add_argument("--seconds", type=float, default=6.0, help="of measuring per type and regime")
    add_regime(args)
    args.add_argument("--device", help="cpu runs a small form of it")
    args.add_argument("--name", help="of the result file (default: masks, and the pass)")
    args.add_argument("--output", type=Path, help="folder of results (default: benchmarks/results)")
    options = args.parse_args(arguments)
    device = choose_device(options.device)
    shape = options.shape or SHAPE[device.type]
    group = options.group or (2 if device.type == "cpu" else 8)
    measured = []
    for dtype in timing.progress(DTYPES, "masks"):
        causal = Problem(*shape, causal=True, dtype=dtype, direction=options.direction)
        cases = problems(causal, group, options.window)
        for regime in timing.REGIMES:
            if options.regime in (regime, "both"):
                measured.append(measure(cases, device, options.seconds, regime, options.family))
    results = {"environment": environment(device), "measured": measured}
    name = options.name or result_name("masks", options.direction)
    return save_and_show(results, markdown(results), name, options.output)


if __name__ == "__main__":
    main()
