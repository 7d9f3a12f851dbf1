"""Sequences of unequal lengths to measure: how they are drawn, and who runs them packed, padded or alike."""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

import flash_cute

from .contenders import CPU, Prepared, prepare
from .peers.base import CannotRun, Tensors, attempt
from .problem import Problem

SEED = 0
SIGMA = 1.0  # of the logarithm of log-normal lengths
LONGEST = 8  # medians, of these
MOST_PADDING = 16  # times the tokens; more of it is left out
PACKED, PADDED, DENSE = "packed", "padded", "dense mean"
KINDS = {  # numbers of each, and what they say
    "equal": (1, "equal:N"),
    "uniform": (2, "uniform:LOW:HIGH"),
    "lognormal": (1, f"lognormal:MEDIAN (1 to {LONGEST} medians)"),
    "outlier": (3, "outlier:LONG:SHORT:COUNT (one among COUNT short ones, whatever the tokens)"),
}
HELP = "packed sequences of drawn lengths instead of the grid, may be repeated: " + ", ".join(
    how for _, how in KINDS.values()
)


@dataclass(frozen=True)
class Ragged:
    """Self-attention of sequences of these lengths; heads, widths and the rest are a Problem's."""

    name: str  # how the lengths were drawn
    lengths: tuple[int, ...]
    heads: int
    head_dim: int
    causal: bool
    dtype: str
    direction: str = "forward"
    head_dim_v: int | None = None
    window: ClassVar[None] = None

    @property
    def width_v(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def seqlen_q(self) -> int:
        """The longest."""
        return max(self.lengths)

    seqlen_k = seqlen_q

    def alike(self, batch: int, seqlen: int) -> Problem:
        """The dense problem of `batch` sequences of one length."""
        shape = batch, self.heads, self.heads, seqlen, seqlen, self.head_dim, self.head_dim_v
        return Problem(*shape, causal=self.causal, dtype=self.dtype, direction=self.direction)

    def mean(self) -> Problem:
        """As many sequences of the mean length as the tokens suffice for."""
        length = round(self.tokens / len(self.lengths))
        return self.alike(max(1, self.tokens // length), length)

    def visited_flops(self, block_m: int, block_n: int) -> int:
        """All products, of all pairs in the blocks that tiles of block_m queries visit; (1, 1): visible."""
        parts = (self.alike(count, length) for length, count in Counter(self.lengths).items())
        return sum(part.visited_flops(block_m, block_n) for part in parts)

    def inputs(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Random (q, k, v), of a backward dout too, each (tokens, heads, its head dim)."""
        return tuple(tensor[0].transpose(0, 1) for tensor in self.alike(1, self.tokens).inputs(device))

    def to_json(self) -> dict:
        whole = self.alike(len(self.lengths), self.seqlen_q).to_json()
        work = {"flops": self.visited_flops(1, 1), "bytes": self.alike(1, self.tokens).bytes}
        return whole | work | {"lengths": self.name, "tokens": self.tokens}


def parse(text: str) -> str:
    """A kind of KINDS with its numbers, as draw takes it."""
    kind, *values = text.split(":")
    right = kind in KINDS and len(values) == KINDS[kind][0] and all(value.isdecimal() for value in values)
    numbers = [int(value) for value in values] if right else [0]
    if min(numbers) < 1 or (kind == "uniform" and numbers[0] > numbers[1]):
        accepted = ", ".join(how for _, how in KINDS.values())
        raise argparse.ArgumentTypeError(f"lengths are {accepted}, not {text!r}")
    return text


def draw(text: str, tokens: int) -> tuple[int, ...]:
    """Lengths of this kind that sum to the tokens, the last one cut; the same at every call."""
    kind, *values = text.split(":")
    first, *others = (int(value) for value in values)
    generator = random.Random(SEED)
    if kind == "outlier":
        lengths = [first] + [others[0]] * others[1]
        generator.shuffle(lengths)
        return tuple(lengths)
    lengths = []
    while (left := tokens - sum(lengths)) > 0:
        if kind == "uniform":
            length = generator.randint(first, others[0])
        elif kind == "lognormal":
            length = round(first * generator.lognormvariate(0, SIGMA))
            length = min(max(length, 1), LONGEST * first)
        else:
            length = first
        lengths.append(min(length, left))
    return tuple(lengths)


def problems(
    kinds: list[str],
    tokens: int,
    hidden: int,
    head_dims: list[tuple[int, ...]],
    masks: list[bool],
    dtype: str,
    direction: str,
) -> list[Ragged]:
    return [
        Ragged(kind, draw(kind, tokens), hidden // dim, dim, causal, dtype, direction, *of_v)
        for dim, *of_v in head_dims
        for causal in masks
        for kind in kinds
    ]


def ours(families: list[str]) -> list[str]:
    """Our contenders: each family packed, the last one padded and dense, too."""
    return [f"{family} {PACKED}" for family in families] + [
        f"{families[-1]} {how}" for how in (PADDED, DENSE)
    ]


def compared(mine: list[str], peers: list[str]) -> dict[str, list[str]]:
    """Contender -> those that it is compared with: packed with peers and dense, padded with packed."""
    rivals = {
        PACKED: lambda family: [*peers, f"{family} {DENSE}"],
        PADDED: lambda family: [f"{family} {PACKED}"],
    }
    split = {name: name.split(maxsplit=1) for name in mine}
    return {name: rivals[how](family) for name, (family, how) in split.items() if how in rivals}


def preparer(problem: Ragged, device: torch.device) -> Callable[[str], Prepared]:
    """What prepares a contender: ours packed, padded or dense, or a peer packed.

    "dense mean" is our dense call of sequences as long as the mean: its time is multiplied to what the batch
    would take at the rate at which the dense call does its blocks.
    """
    inputs = problem.inputs(device)
    offsets = torch.tensor([0, *problem.lengths]).cumsum(0).to(device, torch.int32)

    def make(name: str) -> Prepared:
        family, _, how = name.partition(" ")
        if how == DENSE:
            return dense(problem, inputs, offsets, family, device)
        if how == PADDED:
            return padded(problem, inputs, family)
        return Prepared(prepare(family if how == PACKED else name, problem, *inputs, offsets=offsets))

    return make


def padded(problem: Ragged, inputs: Tensors, family: str) -> Prepared:
    """Our call on a batch padded with zeros."""
    batch, longest = len(problem.lengths), problem.seqlen_q
    if batch * longest > MOST_PADDING * problem.tokens:
        raise CannotRun(f"more than {MOST_PADDING} times the tokens")
    used = torch.tensor(problem.lengths, dtype=torch.int32, device=inputs[0].device)
    rows = (torch.arange(longest, device=used.device) < used.unsqueeze(1)).flatten().nonzero().squeeze(1)

    def pad(tensor: torch.Tensor) -> torch.Tensor:
        whole = tensor.new_zeros(batch * longest, *tensor.shape[1:])
        whole[rows] = tensor
        return whole.unflatten(0, (batch, longest)).transpose(1, 2)

    run = prepare(family, problem, *map(pad, inputs), seqused_q=used, seqused_k=used)
    return Prepared(run, lambda results: [x.transpose(1, 2).flatten(0, 1)[rows] for x in results])


def dense(problem: Ragged, inputs: Tensors, offsets, family: str, device: torch.device) -> Prepared:
    """Our dense call of problem.mean(), and the batch's visited blocks over its own.

    Of both directions the blocks are the backward's, which does most of the work.
    """
    mean = problem.mean()
    alike = mean.inputs(device)
    run = prepare(family, mean, *alike)
    options = {"causal": problem.causal, "family": None if family == CPU else family}
    explain = partial(flash_cute.explain, internals=True, backward=problem.direction != "forward", **options)
    whole, its_own = attempt(partial(explain, *inputs[:3], cu_seqlens_q=offsets)), explain(*alike[:3])
    scale = problem.visited_flops(*tile(whole)) / mean.visited_flops(*tile(its_own))
    return Prepared(run, scale=scale)


def tile(plan: dict) -> tuple[int, int]:
    """Queries and keys of a block; on the CPU, where there are none, one."""
    if plan["family"] == CPU:
        return 1, 1
    return plan["block_m"] // plan["packed_heads"], plan["block_n"]
