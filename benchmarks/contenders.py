"""Who is measured: each family of ours, and the peers, in the forward, the backward or one after the other.

A forward gives out and LSE, the others dq, dk and dv. A backward is called on what its own forward saved.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

import flash_cute
from flash_cute.families import refusals
from flash_cute.precision import is_tf32

from .peers import DETERMINISTIC, PEERS, named, with_modes
from .peers.base import CONTIGUOUS, DENSE, PACKED, PAGED, Call, CannotRun, Peer, Run, Tensors, attempt, sifted
from .problem import ALL_DTYPES, Problem

CPU = "cpu"  # our contender where there is no kernel family
FREE_PEERS = named(DENSE)
DENSE_PEERS = with_modes(FREE_PEERS)
DEFAULT_PEERS = ("flash", "cudnn")
PEERS_ON_CPU = ("flash", "math")


class Ours(Peer):
    """A family of our kernels; None: whichever the device decides. Of float32 as torch is set."""

    calls = frozenset({DENSE, PACKED, CONTIGUOUS, PAGED})
    deterministic = True

    def __init__(self, family: str | None):
        self.family = family

    def forward(self, problem, q, k, v, offsets=None, **lengths) -> Run:
        options = {"causal": problem.causal, "window": problem.window, "family": self.family} | lengths
        if offsets is None:
            return partial(flash_cute.forward, q, k, v, **options)
        return partial(flash_cute.forward_varlen, q, k, v, offsets, **options)

    def backward(
        self, problem, q, k, v, dout, saved, offsets=None, deterministic: bool = False, **lengths
    ) -> Run:
        left, right = problem.window or (None, None)
        options = {"window_left": left, "window_right": right, "family": self.family} | lengths
        # The operators take what their faces read from torch.get_float32_matmul_precision().
        options |= {"deterministic": deterministic, "tf32": is_tf32(None, q.dtype)}
        arguments = dout, None, q, k, v, *saved
        if offsets is None:
            return partial(torch.ops.flash_cute._backward, *arguments, problem.causal, **options)
        arguments = *arguments, offsets, None, problem.causal
        return partial(torch.ops.flash_cute._backward_varlen, *arguments, **options)

    def cached(self, cache, page: int | None, batch_invariant: bool = False) -> Call:
        cell = cache.cell
        options = {"causal": cell.queries > 1, "family": self.family, "batch_invariant": batch_invariant}
        if page:
            options |= {"seqused_k": cache.used, "block_table": cache.table(page)}
        if not cell.packed:
            return partial(flash_cute.attention, cache.q, **options)
        offsets = torch.arange(len(cell.lengths) + 1, dtype=torch.int32, device=cache.device) * cell.queries
        options["seqused_k"] = cache.used

        def call(k, v):
            return cache.padded(flash_cute.attention_varlen(cache.packed_q, k, v, offsets, **options))

        return call


def families(device: torch.device, direction: str = "forward", dtype: str = "bf16") -> list[str]:
    """The compiled families that run this here, or 'cpu'; says of the others why not."""
    if device.type == "cpu":
        return [CPU]
    found = refusals(device, ALL_DTYPES[dtype], backward=direction != "forward")
    for family, why in found.items():
        if why:
            print(f"{family} is left out: {why}", file=sys.stderr)
    return [family for family, why in found.items() if not why]


def mine(device: torch.device, direction: str, dtype: str = "bf16") -> list[str]:
    """Names of our contenders: the families, and with a backward each deterministic, too."""
    found = families(device, direction, dtype)
    return found if direction == "forward" else found + [family + DETERMINISTIC for family in found]


def compared(mine: list[str], peers: list[str]) -> dict[str, list[str]]:
    """Contender -> those that it is compared with: peers of its mode, deterministic also our free one."""

    def others(name: str) -> list[str]:
        free, mode = name.removesuffix(DETERMINISTIC), name.endswith(DETERMINISTIC)
        return [free] * mode + [peer for peer in peers if peer.endswith(DETERMINISTIC) == mode]

    return {name: others(name) for name in mine}


def prepare(name: str, problem, q, k, v, *dout, offsets=None, **lengths) -> Run:
    """The contender's call for these inputs, run once; raises CannotRun where it has no kernel for them.

    lengths: of padded inputs, for ours.
    """
    free = name.removesuffix(DETERMINISTIC)
    who = PEERS.get(free) or Ours(None if free == CPU else free)
    if (given := DENSE if offsets is None else PACKED) not in who.calls:
        raise CannotRun(f"not called with {given}")
    if name != free and not who.deterministic:
        raise CannotRun("has no deterministic gradients")
    forward = who.forward(problem, q, k, v, offsets, **lengths)

    def backward(saved: Tensors) -> Run:
        return who.backward(problem, q, k, v, *dout, saved, offsets, deterministic=name != free, **lengths)

    if problem.direction == "forward":
        run = forward
    elif problem.direction == "backward":
        run = attempt(lambda: backward(forward()))
    else:

        def run() -> Tensors:
            return backward(forward())()

    attempt(run)
    return run


class Prepared(NamedTuple):
    """A contender's call; how its results become those of the others; what its times are multiplied with.

    Where there is such a factor, the call is of another problem, and no results are compared.
    """

    run: Run
    alike: Callable[[torch.Tensor], torch.Tensor] = lambda result: result
    scale: float | None = None


def prepare_all(
    names: list[str], direction: str, make: Callable[[str], Prepared]
) -> tuple[dict[str, Run], dict[str, str], dict[str, float]]:
    """({name: its call}, {name: why it is left out}, {name: what its times are to be multiplied with}).

    Left out is what has no kernel, or another result than the first one.
    """
    prepared, excluded = sifted({name: partial(make, name) for name in names})
    scales = {name: found.scale for name, found in prepared.items() if found.scale is not None}
    running, first = {}, None
    for name, found in prepared.items():
        if name not in scales:
            results = [found.alike(result) for result in comparable(direction, found.run())]
            first = first or results
            if not all(map(agrees, results, first)):
                excluded[name] = "its result differs"
                continue
        running[name] = found.run
    return running, excluded, scales


def preparer(problem: Problem, inputs: Tensors) -> Callable[[str], Prepared]:
    return lambda name: Prepared(prepare(name, problem, *inputs))


def comparable(direction: str, results: Tensors) -> Tensors:
    """Of what a call gave, that which all contenders give alike: out, or the gradients."""
    return results[:1] if direction == "forward" else results[:3]


def agrees(result: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contenders compute the same function: looser than rounding, tighter than another mask."""
    return torch.allclose(result.float(), other.float(), rtol=0.1, atol=0.1)
