"""What changes scores, hides pairs of them or drops weights: cases by name, as arguments of ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flash_cute import reference

from .problem import ALL_DTYPES, Problem

PLAIN = "plain"  # the case that asks for nothing
DROPOUT_P, SOFTCAP = 0.1, 50.0
BLOCK = 128  # rows and columns of a mask's blocks


@dataclass(frozen=True)
class Case:
    make: Callable[[Problem, torch.Generator], dict]  # our arguments; tensors on the generator's device
    head_dims: tuple[int, ...] = (64, 128)  # that benchmarks.scores measures
    trains: bool = False  # has the bias a gradient, too?


def _bias(problem: Problem, generator: torch.Generator) -> dict:
    shape = 1, problem.heads_q, problem.seqlen_q, problem.seqlen_k
    options = {"dtype": ALL_DTYPES[problem.dtype], "device": generator.device}
    return {"bias": torch.randn(shape, generator=generator, **options)}


def _dropout(problem: Problem, generator: torch.Generator) -> dict:
    seed = torch.randint(2**62, (2,), generator=generator, device=generator.device)
    return {"dropout_p": DROPOUT_P, "dropout_seed": seed}


def _alibi(problem: Problem, generator: torch.Generator) -> dict:
    """Slopes of Press et al., "Train short, test long", arXiv:2108.12409."""
    heads = torch.arange(1, problem.heads_q + 1, device=generator.device)
    return {"alibi_slopes": 2.0 ** (-8 * heads / problem.heads_q)}


def _blocks(problem: Problem) -> tuple[int, int]:
    return -(-problem.seqlen_q // BLOCK), -(-problem.seqlen_k // BLOCK)


def _hidden_pairs(problem: Problem, generator: torch.Generator) -> dict:
    """One in each block, so that no block is all visible and none is all hidden."""
    rows, columns = _blocks(problem)
    device = generator.device
    place = torch.randint(BLOCK**2, (rows, columns), generator=generator, device=device)
    query = torch.arange(rows, device=device)[:, None] * BLOCK + place // BLOCK
    key = torch.arange(columns, device=device) * BLOCK + place % BLOCK
    mask = torch.ones(rows * BLOCK, columns * BLOCK, dtype=torch.bool, device=device)
    mask[query, key] = False
    return {"mask": mask[None, None, : problem.seqlen_q, : problem.seqlen_k]}


def _half_the_blocks(problem: Problem, generator: torch.Generator) -> dict:
    """Half of each row's blocks are visible, and of square masks half of each column's.

    Under a causal mask so are those of the diagonal, as each query is to see a key.
    """
    rows, columns = _blocks(problem)
    device = generator.device
    row, column = (torch.randperm(n, generator=generator, device=device) for n in (rows, columns))
    visible = (row[:, None] + column) % columns < (columns + 1) // 2
    if problem.causal:
        visible.fill_diagonal_(True)
    mask = visible.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return {"mask": mask[None, None, : problem.seqlen_q, : problem.seqlen_k]}


def _padding(problem: Problem, generator: torch.Generator) -> dict:
    """Sequences of half to all keys, three quarters in the mean, each of the batch of another length."""
    number = torch.arange(problem.batch, device=generator.device)
    lengths = (problem.seqlen_k * (1 - (number + 0.5) / (2 * problem.batch))).long().clamp(min=1)
    return {"mask": torch.arange(problem.seqlen_k, device=generator.device) < lengths[:, None, None, None]}


CASES = {
    PLAIN: Case(lambda problem, generator: {}),
    "bias": Case(_bias),
    "trained bias": Case(_bias, trains=True),
    "dropout": Case(_dropout),
    "softcap": Case(lambda problem, generator: {"softcap": SOFTCAP}, (64, 128, 256)),
    "alibi": Case(_alibi),
    "hidden pairs": Case(_hidden_pairs),
    "half the blocks": Case(_half_the_blocks),
    "padding": Case(_padding),
}


def drawn(case: str, problem: Problem, device, seed: int = 0) -> dict:
    """Our arguments of the case, for a problem without a window."""
    return CASES[case].make(problem, torch.Generator(device).manual_seed(seed))


def attn_mask_of(options: dict, problem: Problem) -> torch.Tensor | None:
    """SDPA's of these arguments. It takes no mask beside is_causal, so that of a causal problem is in it."""
    mask, bias = options.get("mask"), options.get("bias")
    found = bias if mask is None else mask
    if found is None or not problem.causal:
        return found
    seen = reference.visible(problem.seqlen_q, problem.seqlen_k, True, device=found.device)
    return found & seen if bias is None else found.masked_fill(~seen, -torch.inf)


def visible_share(options: dict, problem: Problem) -> float:
    """How many of the pairs that the problem without them has are visible."""
    if "mask" not in options:
        return 1.0
    seen = attn_mask_of(options, problem)
    pairs = problem.visited_pairs(1, 1) / (problem.seqlen_q * problem.seqlen_k)
    return seen.sum().item() / seen.numel() / pairs
