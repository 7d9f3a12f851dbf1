"""Who is measured: each family of ours, and the peers, in the forward, the backward or one after the other.

A forward gives out and LSE, the others dq, dk and dv. A backward is called on what its own forward saved.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import pad

import flash_cute
from flash_cute.families import refusals
from flash_cute.precision import is_tf32

from .peers import DETERMINISTIC, PEERS, named, with_modes
from .peers.base import (
    CONTIGUOUS,
    DENSE,
    PACKED,
    PAGED,
    Call,
    CannotRun,
    Peer,
    Run,
    Tensors,
    attempt,
    sifted,
    turned,
)
from .problem import ALL_DTYPES, Problem

CPU = "cpu"  # our contender where there is no kernel family
ONE_WIDTH = " padded to one width"  # behind a family's name
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

    def forward(self, problem, q, k, v, offsets=None, **given) -> Run:
        options = {"causal": problem.causal, "window": problem.window, "family": self.family} | given
        if offsets is None:
            return partial(flash_cute.forward, q, k, v, **options)
        return partial(flash_cute.forward_varlen, q, k, v, offsets, **options)

    def backward(
        self, problem, q, k, v, dout, saved, offsets=None, deterministic: bool = False, **given
    ) -> Run:
        left, right = problem.window or (None, None)
        options = {"window_left": left, "window_right": right, "family": self.family} | given
        # The operators take what their faces read from torch.get_float32_matmul_precision().
        options |= {"deterministic": deterministic, "tf32": is_tf32(None, q.dtype)}
        arguments = dout, None, q, k, v, *saved
        if offsets is None:
            return partial(torch.ops.flash_cute._backward, *arguments, problem.causal, **options)
        arguments = *arguments, offsets, None, problem.causal
        return partial(torch.ops.flash_cute._backward_varlen, *arguments, **options)

    def cached(self, cache, page: int | None, batch_invariant: bool = False, lengths: bool = False) -> Call:
        cell = cache.cell
        options = {"causal": cell.queries > 1, "family": self.family, "batch_invariant": batch_invariant}
        options |= cache.scales
        if page or lengths or cell.packed:
            options["seqused_k"] = cache.used
        if page:
            options["block_table"] = cache.table(page)
        if not cell.packed:
            return partial(flash_cute.attention, cache.q, **options)
        offsets = torch.arange(len(cell.lengths) + 1, dtype=torch.int32, device=cache.device) * cell.queries

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


def at_one_width(mine: list[str], problems: Iterable[Problem]) -> list[str]:
    """Names of ours padded to one width, where v has a width of its own: of those with free gradients."""
    if all(problem.width_v == problem.head_dim for problem in problems):
        return []
    return [name + ONE_WIDTH for name in mine if not name.endswith(DETERMINISTIC)]


def compared(mine: list[str], peers: list[str]) -> dict[str, list[str]]:
    """Contender -> those that it is compared with: peers of its mode, deterministic also our free one.

    A free one is compared with itself padded to one width, too.
    """

    def others(name: str) -> list[str]:
        free, mode = name.removesuffix(DETERMINISTIC), name.endswith(DETERMINISTIC)
        ours = [free] if mode else [other for other in mine if other == name + ONE_WIDTH]
        return ours + [peer for peer in peers if peer.endswith(DETERMINISTIC) == mode]

    return {name: others(name) for name in mine if not name.endswith(ONE_WIDTH)}


def prepare(name: str, problem, q, k, v, *dout, offsets=None, **options) -> Run:
    """The contender's call for these inputs, run once; raises CannotRun where it has no kernel for them.

    options: of ours, as lengths of padded inputs or a bias.
    """
    free = name.removesuffix(DETERMINISTIC)
    who = PEERS.get(free) or Ours(None if free == CPU else free)
    if (inputs := DENSE if offsets is None else PACKED) not in who.calls:
        raise CannotRun(f"not called with {inputs}")
    if options and not isinstance(who, Ours):
        raise CannotRun(f"not called with {', '.join(options)}")
    if name != free and not who.deterministic:
        raise CannotRun("has no deterministic gradients")
    forward = who.forward(problem, q, k, v, offsets, **options)

    def backward(saved: Tensors) -> Run:
        return who.backward(problem, q, k, v, *dout, saved, offsets, deterministic=name != free, **options)

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
    alike: Callable[[Tensors], Iterable[torch.Tensor]] = lambda results: results
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
            results = [*found.alike(comparable(direction, found.run()))]
            first = first or results
            if not all(map(agrees, results, first)):
                excluded[name] = "its result differs"
                continue
        running[name] = found.run
    return running, excluded, scales


def preparer(problem: Problem, inputs: Tensors) -> Callable[[str], Prepared]:
    def make(name: str) -> Prepared:
        family = name.removesuffix(ONE_WIDTH)
        if family != name:
            return padded_to_one_width(problem, inputs, family)
        return Prepared(prepare(name, problem, *inputs))

    return make


def padded_to_one_width(problem: Problem, inputs: Tensors, family: str) -> Prepared:
    """Our call on inputs padded with zeros, outside the timing, to the wider of q's width and v's."""
    if problem.width_v == problem.head_dim:
        raise CannotRun("q and v are alike in width")
    width = max(problem.head_dim, problem.width_v)

    def widened(tensor: torch.Tensor) -> torch.Tensor:
        turns = not tensor.is_contiguous()  # rows of tokens stay first in memory
        return turned(pad(turned(tensor, turns), (0, width - tensor.shape[-1])), turns)

    alike = replace(problem, head_dim=width, head_dim_v=None)
    run = prepare(family, alike, *map(widened, inputs), softmax_scale=problem.head_dim**-0.5)
    of_q, of_v = problem.head_dim, problem.width_v
    widths = [of_v] if problem.direction == "forward" else [of_q, of_q, of_v]
    return Prepared(run, lambda results: [x[..., :n] for x, n in zip(results, widths, strict=True)])


def comparable(direction: str, results: Tensors) -> Tensors:
    """Of what a call gave, that which all contenders give alike: out, or the gradients."""
    return results[:1] if direction == "forward" else results[:3]


def agrees(result: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contenders compute the same function: looser than rounding, tighter than another mask."""
    return torch.allclose(result.float(), other.float(), rtol=0.1, atol=0.1)
