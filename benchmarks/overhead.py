"""What a call costs beside its kernel: host microseconds, and end to end at tiny sizes, also in a graph.

    python -m benchmarks.overhead

"host" is the time a call takes to return while the device is faster than the host, so that no queue fills.
"latency" is a call and the wait for its result. "in a graph" is one call's share of replaying many of them.
Only the first says anything of a CPU, of functions under torch.compile, which run without gradients, and of
training steps, which are a forward and its gradients by autograd. Those of a GPU come from a thread of
autograd's own; to wake it and to be woken takes longer than most calls, by host more or less: "one
thread" is a step without.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_cute

from . import contenders, results, timing
from .problem import Problem
from .report import publish

TINY = [Problem(1, 2, 2, 64, 64, 64, causal=True), Problem(4, 8, 8, 128, 128, 128, causal=True)]
CALLS = {"cuda": 400, "cpu": 2}  # of one sample
GRAPH_CALLS = 50
PEERS = ("flash", "cudnn", "efficient")
ALLOCATION = "empty_like"  # has no kernel, so no graph
only_flash = partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)


@contextmanager
def one_thread():
    with only_flash(), torch.autograd.set_multithreading_enabled(False):
        yield


def host_us(function: Callable, calls: int, device: torch.device) -> float:
    """Host time of a call that nothing holds up: the device is idle before and keeps pace after."""
    timing.synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        function()
    elapsed = time.perf_counter() - begin
    timing.synchronize(device)
    return 1e6 * elapsed / calls


def latency_us(function: Callable, calls: int, device: torch.device) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        function()
        timing.synchronize(device)
    return 1e6 * (time.perf_counter() - begin) / calls


def functions(problem: Problem, device: torch.device) -> dict[str, Callable]:
    """Our face (also of packed sequences), our bare operator, the peers' bare operators, SDPA's face, and one
    allocation for scale."""
    q, k, v = problem.inputs(device)
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    offsets = torch.arange(problem.batch + 1, dtype=torch.int32, device=device) * problem.seqlen_q
    found = {
        "flash_cute.forward": partial(flash_cute.forward, q, k, v, problem.causal),
        "flash_cute.forward_varlen": partial(
            flash_cute.forward_varlen, *packed, offsets, causal=problem.causal
        ),
        "torch.ops.flash_cute.forward": partial(torch.ops.flash_cute.forward, q, k, v, problem.causal),
    }
    ours = contenders.families(device)
    for family in ours if len(ours) > 1 else ():
        found[f"flash_cute.forward, {family}"] = contenders.prepare(family, problem, q, k, v)
    for peer in ("flash",) if device.type == "cpu" else PEERS:
        found[f"aten {peer}"] = contenders.prepare(peer, problem, q, k, v)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return found | {
        "SDPA": partial(sdpa, q, k, v, is_causal=problem.causal),
        ALLOCATION: partial(torch.empty_like, q),
    }


def compiled(problem: Problem, device: torch.device) -> dict[str, Callable]:
    """Our face and aten's flash operator, each compiled alone, in the same way, without gradients."""
    if device.type == "cpu":
        return {}
    q, k, v = problem.inputs(device)

    def theirs(q, k, v, causal):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]

    found = {}
    for name, function in {"flash_cute": flash_cute.forward, "aten flash": theirs}.items():
        call = partial(torch.compile(function, fullgraph=True, dynamic=False), q, k, v, problem.causal)
        with torch.no_grad():
            call()
        found[f"torch.compile, {name}"] = call
    return found


def training_steps(problem: Problem, device: torch.device) -> dict[str, Callable]:
    """Our face and SDPA's, which only_flash makes FlashAttention-2, each with the gradients of q, k and v."""
    *leaves, dout = replace(problem, direction="both").inputs(device)
    for leaf in leaves:
        leaf.requires_grad_()

    def ours(q, k, v):
        return flash_cute.forward(q, k, v, problem.causal)[0]

    def theirs(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=problem.causal)

    def step(attend: Callable) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(attend(*leaves), leaves, dout)

    functions = {"flash_cute": ours, "SDPA flash": theirs}
    found = {f"training step, {name}": partial(step, function) for name, function in functions.items()}
    if device.type == "cuda":
        for name, function in functions.items():
            compiled = torch.compile(function, fullgraph=True, dynamic=False)
            found[f"torch.compile, training step, {name}"] = partial(step, compiled)
    with only_flash():
        for run in found.values():
            run()
    return found


def measure(problem: Problem, device: torch.device, seconds: float) -> dict:
    """Samples of each measure, taken in turn over all functions."""
    eager, inference, training = (find(problem, device) for find in (functions, compiled, training_steps))
    contexts = dict.fromkeys(inference, torch.no_grad)
    contexts |= dict.fromkeys(training, only_flash)
    if device.type == "cuda":  # a CPU's gradients come from the calling thread
        alone = {f"{name}, one thread": step for name, step in training.items() if "compile" not in name}
        contexts |= dict.fromkeys(alone, one_thread)
        training |= alone
    found: dict[str, dict[str, dict]] = {name: {} for name in eager | inference | training}
    measures = {"host": (host_us, eager | inference | training)}
    if device.type == "cuda":
        measures["latency"] = latency_us, eager
    for what, (clock, running) in measures.items():
        samples: dict[str, list[float]] = {name: [] for name in running}
        for _ in timing.rounds(seconds):
            for name, function in running.items():
                with contexts.get(name, nullcontext)():
                    samples[name].append(clock(function, CALLS[device.type], device))
        for name, values in samples.items():
            found[name][what] = timing.summary(values)
    if device.type == "cuda":
        kernels = {name: function for name, function in eager.items() if name != ALLOCATION}
        graphs = {name: timing.graphed(function, GRAPH_CALLS) for name, function in kernels.items()}
        for name, values in timing.burst(graphs, device, seconds).items():
            found[name]["in a graph"] = timing.summary([value / GRAPH_CALLS for value in values])
    return {"problem": problem.to_json(), "us": found}


def main(arguments: list[str] | None = None) -> Path:
    args = results.parser("overhead", __doc__)
    args.add_argument("--seconds", type=float, default=8.0, help="per problem and measure")
    options = args.parse_args(arguments)
    device = results.choose_device(options.device)
    cells = [measure(problem, device, options.seconds) for problem in timing.progress(TINY, "overhead")]
    return publish("overhead", options, device, {"cells": cells})


if __name__ == "__main__":
    main()
