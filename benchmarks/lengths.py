"""Sequences of unequal lengths to measure: how they are drawn, and who runs them packed, padded or alike."""

from __future__ import annotations

import argparse
import random
from collections import Counter
from dataclasses import dataclass
from functools import partial

import torch

import flash_cute

from . import newer_flash
from .contenders import (
    CPU,
    CannotRun,
    Run,
    agrees,
    aten,
    attempt,
    comparable,
    in_direction,
    operators_precision,
    prepare,
)
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
    """Self-attention of sequences of these lengths, each with heads * head_dim hidden values to a token."""

    name: str  # how the lengths were drawn
    lengths: tuple[int, ...]
    heads: int
    head_dim: int
    causal: bool
    dtype: str
    direction: str = "forward"

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def alike(self, batch: int, seqlen: int) -> Problem:
        """The dense problem of `batch` sequences of one length."""
        shape = batch, self.heads, self.heads, seqlen, seqlen, self.head_dim
        return Problem(*shape, self.causal, None, self.dtype, self.direction)

    def mean(self) -> Problem:
        """As many sequences of the mean length as the tokens suffice for."""
        length = round(self.tokens / len(self.lengths))
        return self.alike(max(1, self.tokens // length), length)

    def visited_flops(self, block_m: int, block_n: int) -> int:
        """All products, of all pairs in the blocks that tiles of block_m queries visit; (1, 1): visible."""
        parts = (self.alike(count, length) for length, count in Counter(self.lengths).items())
        return sum(part.visited_flops(block_m, block_n) for part in parts)

    def inputs(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Random (q, k, v), of a backward dout too, each (tokens, heads, head_dim)."""
        return tuple(tensor[0].transpose(0, 1) for tensor in self.alike(1, self.tokens).inputs(device))

    def to_json(self) -> dict:
        whole = self.alike(len(self.lengths), max(self.lengths)).to_json()
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
    head_dims: list[int],
    masks: list[bool],
    dtype: str,
    direction: str,
) -> list[Ragged]:
    return [
        Ragged(kind, draw(kind, tokens), hidden // dim, dim, causal, dtype, direction)
        for dim in head_dims
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


def prepare_all(
    names: list[str], problem: Ragged, device: torch.device
) -> tuple[dict[str, Run], dict[str, str], dict[str, float]]:
    """({name: its call}, {name: why it is left out}, {name: what its times are to be multiplied with}).

    The last is for "dense mean", our dense call of sequences as long as the mean: multiplied, its time is
    what the batch would take at the rate at which the dense call does its blocks.
    """
    inputs = problem.inputs(device)
    offsets = torch.tensor([0, *problem.lengths]).cumsum(0).to(device, torch.int32)
    running, excluded, scales, first = {}, {}, {}, None
    for name in names:
        family, _, how = name.partition(" ")
        family = None if family == CPU else family
        try:
            if how == DENSE:
                running[name], scales[name] = dense(problem, inputs, offsets, family, device)
                continue
            if how == PACKED:
                run = packed(problem, *inputs, offsets=offsets, family=family)
            elif how == PADDED:
                run, rows = padded(problem, inputs, family)
            elif name in PEERS:
                run = PEERS[name](problem, *inputs, offsets=offsets)
            else:
                raise CannotRun("not called with packed sequences")
        except CannotRun as reason:
            excluded[name] = str(reason)
            continue
        results = comparable(problem, run())
        if how == PADDED:
            results = [result.transpose(1, 2).flatten(0, 1)[rows] for result in results]
        first = first or results
        if all(map(agrees, results, first)):
            running[name] = run
        else:
            excluded[name] = "its result differs"
    return running, excluded, scales


def packed(problem: Ragged, q, k, v, *dout, offsets, family: str | None) -> Run:
    forward = partial(flash_cute.forward_varlen, q, k, v, offsets, None, problem.causal, family=family)

    def backward(saved):
        arguments = *dout, None, q, k, v, *saved, offsets, None, problem.causal
        return partial(
            torch.ops.flash_cute._backward_varlen, *arguments, family=family, **operators_precision(q)
        )

    return in_direction(problem, forward, backward)


def padded(problem: Ragged, inputs, family: str | None) -> tuple[Run, torch.Tensor]:
    """The call on a batch padded with zeros, and which of its rows are the packed ones."""
    batch, longest = len(problem.lengths), max(problem.lengths)
    if batch * longest > MOST_PADDING * problem.tokens:
        raise CannotRun(f"more than {MOST_PADDING} times the tokens")
    used = torch.tensor(problem.lengths, dtype=torch.int32, device=inputs[0].device)
    rows = (torch.arange(longest, device=used.device) < used.unsqueeze(1)).flatten().nonzero().squeeze(1)

    def pad(tensor: torch.Tensor) -> torch.Tensor:
        whole = tensor.new_zeros(batch * longest, *tensor.shape[1:])
        whole[rows] = tensor
        return whole.unflatten(0, (batch, longest)).transpose(1, 2)

    q, k, v, *dout = map(pad, inputs)
    options = {"seqused_q": used, "seqused_k": used, "family": family}

    def backward(saved):
        arguments = *dout, None, q, k, v, *saved, problem.causal
        return partial(torch.ops.flash_cute._backward, *arguments, **options, **operators_precision(q))

    forward = partial(flash_cute.forward, q, k, v, problem.causal, **options)
    return in_direction(problem, forward, backward), rows


def dense(problem: Ragged, inputs, offsets, family: str | None, device: torch.device) -> tuple[Run, float]:
    """Our dense call of problem.mean(), and the batch's visited blocks over its own.

    Of both directions the blocks are the backward's, which does most of the work.
    """
    mean = problem.mean()
    alike = mean.inputs(device)
    run = prepare(family or CPU, mean, *alike)
    options = {"causal": problem.causal, "family": family, "backward": problem.direction != "forward"}
    explain = partial(flash_cute.explain, internals=True, **options)
    whole, its_own = attempt(partial(explain, *inputs[:3], cu_seqlens_q=offsets)), explain(*alike[:3])
    return run, problem.visited_flops(*tile(whole)) / mean.visited_flops(*tile(its_own))


def tile(plan: dict) -> tuple[int, int]:
    """Queries and keys of a block; on the CPU, where there are none, one."""
    if plan["family"] == CPU:
        return 1, 1
    return plan["block_m"] // plan["packed_heads"], plan["block_n"]


def flash(problem: Ragged, q, k, v, *dout, offsets) -> Run:
    """FlashAttention-2 as PyTorch ships it: what torch.nn.attention.varlen.varlen_attn calls."""
    lengths = offsets, offsets, max(problem.lengths), max(problem.lengths)
    forward = partial(aten._flash_attention_forward, q, k, v, *lengths, 0.0, problem.causal, False)

    def backward(saved):
        out, lse, seed, offset, _ = saved
        arguments = *dout, q, k, v, out, lse, *lengths, 0.0, problem.causal, seed, offset
        return partial(aten._flash_attention_backward, *arguments)

    return in_direction(problem, forward, backward)


def cudnn(problem: Ragged, q, k, v, *dout, offsets) -> Run:
    lengths = offsets, offsets, max(problem.lengths), max(problem.lengths)
    forward = partial(aten._cudnn_attention_forward, q, k, v, None, *lengths, True, 0.0, problem.causal)

    def backward(saved):
        out, lse, *_, seed, offset, _ = saved
        arguments = *dout, q, k, v, out, lse, seed, offset, None, *lengths, 0.0, problem.causal
        return partial(aten._cudnn_attention_backward, *arguments)

    return in_direction(problem, forward, backward)


def newer(problem: Ragged, q, k, v, *dout, offsets, version: newer_flash.Version) -> Run:
    calls = newer_flash.packed(problem, q, k, v, dout, offsets=offsets, version=version)
    return in_direction(problem, *calls)


PEERS = {"flash": flash, "cudnn": cudnn}
PEERS |= {name: partial(newer, version=version) for name, version in newer_flash.VERSIONS.items()}
