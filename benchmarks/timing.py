"""Timing several functions beside each other in two regimes, which a GPU limited by power sets apart.

Little work runs at its full clock, lasting work at the clock that the limit leaves for work of that kind. Who
is first in one regime need not be first in the other, so a time, a ratio and a plot name theirs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator

import torch

from .power import Meter

REGIMES = {
    "burst": "about 3 ms of calls after 12 ms of idleness, in another random order every round",
    "sustained": "each alone and back to back",
}
BURST_US = 3000.0
IDLE_SECONDS = 0.012
# About 0.5 ms, in which the host gets ahead of a device that was idle: its first call then takes it longer,
# some 0.1 to 0.3 ms on the machine of the H200, which is no time of a kernel.
HEAD_START_CYCLES = 1_000_000
CHUNK_US = 10_000.0  # calls in this time are enqueued without a look at the device
AHEAD = 2  # chunks in its queue, which is then never empty and never long
WARM_UP_SHARE = 0.2  # of the time measured: the power limit takes hold
WARM_UP_CALLS = 3
ROUNDS = range(9, 400)  # fewest and most bursts of each function


class HostEvent:
    """The face of torch.cuda.Event on the CPU, where a call is over when it returns."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: HostEvent) -> float:
        return 1e3 * (end.at - self.at)


def mark(device: torch.device) -> torch.cuda.Event | HostEvent:
    """An event, recorded now."""
    event = HostEvent() if device.type == "cpu" else torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def start(function: Callable, calls: int, device: torch.device) -> Callable[[], float]:
    """Run function() `calls` times; the result, when called later, gives microseconds per call.

    On a GPU the batch lies between two events and nothing waits for it: read it after a synchronisation.
    """
    begin = mark(device)
    for _ in range(calls):
        function()
    end = mark(device)
    return lambda: 1e3 * begin.elapsed_time(end) / calls


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def first_timing(function: Callable, device: torch.device) -> float:
    """Microseconds of a call, roughly, to choose how many calls to time."""
    for _ in range(2):  # the first time to warm up
        read = start(function, WARM_UP_CALLS, device)
        synchronize(device)
    return read()


def rounds(seconds: float) -> Iterator[int]:
    """Counts rounds of measuring while `seconds` last, within ROUNDS."""
    end = time.perf_counter() + seconds
    for i in range(ROUNDS.stop):
        if i >= ROUNDS.start and time.perf_counter() > end:
            return
        yield i


def in_turns(functions: Iterable, rounds: Iterable) -> Iterator:
    """Each of them (or of their names) in every round, in another random order every time."""
    names = list(functions)
    for _ in rounds:
        yield from random.sample(names, len(names))


def burst(functions: dict[str, Callable], device: torch.device, seconds: float) -> dict[str, list[float]]:
    """Samples, in microseconds per call, of every function; sample i of each belongs to the same round."""
    calls = {
        name: max(1, round(BURST_US / first_timing(function, device))) for name, function in functions.items()
    }
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for name in in_turns(functions, rounds(seconds)):
        if device.type == "cuda":
            time.sleep(IDLE_SECONDS)
            torch.cuda._sleep(HEAD_START_CYCLES)
        read = start(functions[name], calls[name], device)
        synchronize(device)
        samples[name].append(read())
    return samples


def back_to_back(function: Callable, device: torch.device, seconds: float) -> tuple[float, Meter]:
    """Microseconds per call on a device that does nothing else for `seconds`, and what it drew meanwhile."""
    estimate = first_timing(function, device)
    calls = max(1, round(CHUNK_US / estimate))
    marks = [mark(device)]

    def advance(share: float) -> int:
        """Keep the device busy for a share of the time; the result is the last mark that it has passed."""
        for _ in range(max(AHEAD, round(share * seconds * 1e6 / (calls * estimate)))):
            for _ in range(calls):
                function()
            marks.append(mark(device))
            marks[-AHEAD].synchronize()
        return len(marks) - AHEAD

    first = advance(WARM_UP_SHARE)
    with Meter(device) as meter:
        last = advance(1)
    synchronize(device)
    return 1e3 * marks[first].elapsed_time(marks[last]) / ((last - first) * calls), meter


def sustained(
    functions: dict[str, Callable], device: torch.device, seconds: float, turns: int = 1
) -> tuple[dict[str, list[float]], dict[str, dict[str, float | None]]]:
    """A sample for every turn of each function like burst's, and the medians of what it drew.

    That is watts, joules_per_call and sm_mhz, each None where NVML does not tell.
    """
    samples: dict[str, list[float]] = {name: [] for name in functions}
    meters: dict[str, list[Meter]] = {name: [] for name in functions}
    for name in in_turns(functions, range(turns)):
        us, meter = back_to_back(functions[name], device, seconds)
        samples[name].append(us)
        meters[name].append(meter)
    return samples, {name: drawn(samples[name], meters[name]) for name in functions}


def drawn(samples: list[float], meters: list[Meter]) -> dict[str, float | None]:
    watts, sm_mhz = ([getattr(meter, name) for meter in meters] for name in ("watts", "sm_mhz"))
    joules = [watt and watt * us / 1e6 for watt, us in zip(watts, samples, strict=True)]
    found = {"watts": watts, "joules_per_call": joules, "sm_mhz": sm_mhz}
    return {name: None if None in values else statistics.median(values) for name, values in found.items()}


def summary(samples: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    several = samples if len(samples) > 1 else samples * 2  # as quantiles demands
    quartiles = statistics.quantiles(several, n=4, method="inclusive")
    return {name: round(value, 3) for name, value in zip(("q25", "median", "q75"), quartiles, strict=True)}


def paired_speedups(ours: list[float], theirs: list[float]) -> list[float]:
    """How many times as fast ours is in each round."""
    return [b / a for a, b in zip(ours, theirs, strict=True)]


def paired_speedup(ours: list[float], theirs: list[float]) -> float:
    """How many times as fast ours is: the median over rounds of the ratio within a round."""
    return round(statistics.median(paired_speedups(ours, theirs)), 4)


def compared(samples: dict[str, list[float]], against: dict[str, list[str]]) -> dict:
    """Times of all, and how many times as fast each of `against` is as those that it is compared with."""
    speedup = {
        mine: {other: paired_speedup(samples[mine], samples[other]) for other in others if other in samples}
        for mine, others in against.items()
        if mine in samples
    }
    times = {name: summary(values) for name, values in samples.items()}
    rounds = max(map(len, samples.values()), default=0)
    return {"rounds": rounds, "times_us": times, "speedup": speedup}


def bytes_beside(function: Callable) -> int:
    """The most that a call has of the GPU's memory at one time, beside its results.

    Of a forward and its backward as one call what the former leaves for the latter, too.
    """

    def requested(when: str) -> int:
        return torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]

    torch.cuda.reset_peak_memory_stats()
    before = requested("current")
    results = [result for result in function() if isinstance(result, torch.Tensor) and result.is_cuda]
    storages = {result.untyped_storage().data_ptr(): result.untyped_storage().nbytes() for result in results}
    return requested("peak") - before - sum(storages.values())


def graphed(function: Callable, calls: int = 1) -> Callable[[], None]:
    """`calls` calls captured into one CUDA graph; the result replays it."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    return graph.replay


def add_regime(args: argparse.ArgumentParser) -> None:
    how = "; ".join(f"{name}: {how}" for name, how in REGIMES.items())
    args.add_argument("--regime", choices=[*REGIMES, "both"], default="both", help=how)


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
