"""Timing several functions beside each other, so that a warming card or a busy host favours none of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable

import torch

SAMPLE_US = (
    1500.0  # one sample is a batch of calls about this long, so that an event's own time does not count
)
WARM_UP_CALLS = 3
ROUNDS = range(5, 400)  # fewest and most samples of each function


def start(function: Callable, calls: int, device: torch.device) -> Callable[[], float]:
    """Run function() `calls` times; the result, when called later, gives microseconds per call.

    On a GPU the batch lies between two events and nothing waits for it: read it after a synchronisation.
    """
    if device.type == "cpu":
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        elapsed = 1e6 * (time.perf_counter() - begin) / calls
        return lambda: elapsed
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        function()
    end.record()
    return lambda: 1e3 * begin.elapsed_time(end) / calls


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleaved(
    functions: dict[str, Callable], device: torch.device, seconds: float
) -> dict[str, list[float]]:
    """Samples, in microseconds per call, of every function, round by round; each round starts with another.

    As many rounds as `seconds` allow, within ROUNDS. Sample i of each function belongs to the same round.
    """
    calls = {}
    round_us = 0.0
    for name, function in functions.items():
        start(function, WARM_UP_CALLS, device)
        synchronize(device)
        estimate = start(function, WARM_UP_CALLS, device)
        synchronize(device)
        calls[name] = max(1, round(SAMPLE_US / estimate()))
        round_us += calls[name] * estimate()
    rounds = min(max(int(seconds * 1e6 / round_us), ROUNDS.start), ROUNDS.stop)

    names = list(functions)
    pending: dict[str, list[Callable[[], float]]] = {name: [] for name in names}
    for i in range(rounds):
        turn = i % len(names)
        for name in names[turn:] + names[:turn]:
            pending[name].append(start(functions[name], calls[name], device))
    synchronize(device)
    return {name: [read() for read in reads] for name, reads in pending.items()}


def summary(samples: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    quartiles = statistics.quantiles(samples, n=4, method="inclusive")
    return {name: round(value, 3) for name, value in zip(("q25", "median", "q75"), quartiles, strict=True)}


def paired_speedup(ours: list[float], theirs: list[float]) -> float:
    """How many times as fast ours is: the median over rounds of the ratio within a round."""
    return round(statistics.median(b / a for a, b in zip(ours, theirs, strict=True)), 4)


def graphed(function: Callable, calls: int = 1) -> Callable[[], None]:
    """`calls` calls captured into one CUDA graph; the result replays it."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    return graph.replay


def progress(items: Iterable, title: str) -> Iterable:
    """A progress bar where tqdm is installed, a line per item where it is not."""
    items = list(items)
    try:
        from tqdm import tqdm
    except ImportError:
        for i, item in enumerate(items, 1):
            print(f"{title}: {i}/{len(items)}", flush=True)
            yield item
    else:
        yield from tqdm(items, desc=title, leave=False)
