"""flash_cute.jax.attention under jax.jit, beside the same kernels called from PyTorch, and cuDNN through JAX.

    python -m benchmarks.jax_attention

A time is that of many calls and the wait for the last one, by the host's clock, divided by their number. The
calls take the device longer than the host takes to enqueue them, so it never waits. Who is first in a round
is drawn. A backward is called on what its own forward saved.

"GPU" is the time from the first kernel of a call to its last one's end, as CUPTI saw them, of calls that wait
for each other, in turns drawn anew each round: without what the host does, or kernels of the next call that
begin early. All of them read the same memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

# PyTorch needs memory of the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import torch

import flash_cute  # noqa: F401  it registers PyTorch's operators
from flash_cute.jax import attention

from . import results, timing
from .problem import Problem, paper_grid
from .report import publish

JAX, TORCH, CUDNN, XLA = "flash_cute.jax", "flash_cute in PyTorch", "cuDNN in JAX", "XLA"
GRID = {
    "cuda": (16384, 2048, [(64,), (128,)], [512, 1024, 2048, 4096, 16384]),
    "cpu": (128, 64, [(32,)], [32, 64]),
}
ROUND_SECONDS = 0.012  # of each contender
Timed = tuple[Callable[[], object], Callable[[object], object]]  # a call, and the wait for its result


def gradients(function: Callable, inputs: list[jax.Array], dout: jax.Array) -> Callable[[], object]:
    """The jitted backward alone, on what a jitted forward saved."""
    _, backward = jax.jit(partial(jax.vjp, function))(*inputs)
    return partial(jax.jit(lambda saved, dout: saved(dout)), backward, dout)


def contenders(problem: Problem, device: torch.device) -> dict[str, Timed]:
    tensors = problem.inputs(device)  # (batch, heads, seqlen, head_dim), a token's heads stored together
    arrays = [jnp.from_dlpack(x.transpose(1, 2)) for x in tensors]
    their = jax.nn.dot_product_attention
    functions = {JAX: attention}
    functions |= {CUDNN: partial(their, implementation="cudnn")} if device.type == "cuda" else {XLA: their}
    found: dict[str, Timed] = {}
    for name, function in functions.items():
        call = partial(function, is_causal=problem.causal)
        if problem.direction == "forward":
            run = partial(jax.jit(call), *arrays)
        else:
            run = gradients(call, arrays[:3], arrays[3])
        found[name] = run, jax.block_until_ready
    if problem.direction == "forward":
        run = partial(torch.ops.flash_cute.forward, *tensors, problem.causal)
    else:
        *inputs, dout = tensors
        saved = torch.ops.flash_cute.forward(*inputs, problem.causal)
        run = partial(torch.ops.flash_cute._backward, dout, None, *inputs, *saved, problem.causal)
    found[TORCH] = run, lambda _: timing.synchronize(device)
    return found


def seconds_of(timed: Timed, calls: int) -> float:
    run, wait = timed
    begin = time.perf_counter()
    for _ in range(calls):
        result = run()
    wait(result)
    return time.perf_counter() - begin


def gpu_us(timed: dict[str, Timed], rounds: int = 12) -> dict[str, list[float]]:
    """Microseconds of the GPU's own clock for each of some calls."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    def kernels(names: list[str]) -> list[tuple[int, int]]:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for name in names:
                seconds_of(timed[name], 1)
        return sorted(
            (event.start_ns(), event.start_ns() + event.duration_ns())
            for event in profiler.profiler.kineto_results.events()
            if event.device_type() == DeviceType.CUDA and event.duration_ns() > 0
        )

    of_a_call = {name: len(kernels([name])) for name in timed}
    turns = list(timing.in_turns(timed, range(rounds)))
    found = kernels(turns)
    if len(found) != sum(of_a_call[name] for name in turns):
        raise RuntimeError(f"{len(found)} kernels in {len(turns)} calls, {of_a_call} in one")
    samples: dict[str, list[float]] = {name: [] for name in timed}
    for name in turns:
        part, found = found[: of_a_call[name]], found[of_a_call[name] :]
        samples[name].append((max(end for _, end in part) - part[0][0]) / 1e3)
    return samples


def measure(problem: Problem, device: torch.device, seconds: float) -> dict:
    running = contenders(problem, device)
    calls = {}
    for name, timed in running.items():
        for _ in range(2):  # the first time to compile
            took = seconds_of(timed, 3) / 3
        calls[name] = max(3, round(ROUND_SECONDS / took))
    samples: dict[str, list[float]] = {name: [] for name in running}
    for name in timing.in_turns(running, timing.rounds(seconds)):
        samples[name].append(1e6 * seconds_of(running[name], calls[name]) / calls[name])
    peers = [name for name in running if name != JAX]
    cell = {
        "problem": problem.to_json(),
        "times_us": {name: timing.summary(values) for name, values in samples.items()},
        "over": {name: timing.paired_speedup(samples[JAX], samples[name]) for name in peers},
    }
    if device.type == "cuda":
        samples = gpu_us({name: running[name] for name in (JAX, TORCH)})
        on_gpu = {name: timing.summary(values) for name, values in samples.items()}
        cell["gpu_us"] = on_gpu
        cell["gpu_share"] = round(on_gpu[JAX]["median"] / on_gpu[TORCH]["median"], 4)
    return cell


def main(arguments: list[str] | None = None) -> Path:
    args = results.parser("jax_attention", __doc__, "jax-attention")
    args.add_argument("--seqlen", type=int, nargs="+", help="a part of the grid")
    args.add_argument("--seconds", type=float, default=0.4, help="per problem")
    options = args.parse_args(arguments)
    device = results.choose_device(options.device)
    *sizes, seqlens = GRID[device.type]
    problems = [
        problem
        for direction in ("forward", "backward")
        for problem in paper_grid(*sizes, options.seqlen or seqlens, [False, True], "bf16", direction)
    ]
    cells = [measure(problem, device, options.seconds) for problem in timing.progress(problems, "jax")]
    content = {"jax": jax.__version__, "cells": cells}
    return publish("jax_attention", options, device, content, "jax-attention")


if __name__ == "__main__":
    main()
