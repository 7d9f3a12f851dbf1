"""Caches of keys and values, contiguous and in pages, and who is measured on them, for benchmarks.decode.

A cell's case is "64x8192", 64 sequences of 8192 keys, or "64x1-16384", 64 of lengths drawn between these. Its
keys and values are stored token by token, (rows, heads_kv, width), several times where one time fits into
L2: a contender is called on these *regions* in turn. Pages are in random order.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch

import flash_cute

from .contenders import Ours
from .peers import PEERS, named
from .peers.base import CONTIGUOUS, PAGED, CannotRun, Run, attempt
from .problem import DTYPES, Problem

SEED = 0
REGIONS_BYTES = {"cuda": 300_000_000, "cpu": 50_000}  # of all regions together: several times an L2
ROUNDED_TO = 256  # rows of a sequence, so that any page that divides it fits
CHECKED_QUERIES = 4  # of the last sequence, its last ones
MOST_ERROR = 0.02  # of a result, relative, root mean square: several times what rounding P to 16 bits costs
OURS, INVARIANT, LENGTHS, CODES = "ours", "ours, batch invariant", "ours, lengths", "ours, fp8"
PAGES = ", pages of "  # and their size, behind a contender's name
CACHE_PEERS = tuple(named(CONTIGUOUS, PAGED))
FP8 = torch.float8_e4m3fn
SCALE = 2**-6  # of codes, which reach 448: normal numbers are below 7


def parse_case(text: str) -> str:
    """A case as Cell takes it."""
    found = re.fullmatch(r"(\d+)x(\d+)(?:-(\d+))?", text)
    numbers = [int(number) for number in found.groups() if number] if found else [0]
    if min(numbers) < 1 or numbers[1] > numbers[-1]:
        raise argparse.ArgumentTypeError(f"a case is BATCHxKEYS or BATCHxLOW-HIGH, not {text!r}")
    return text


def parse_page(text: str) -> int:
    if not text.isdecimal() or int(text) < 1 or ROUNDED_TO % int(text):
        raise argparse.ArgumentTypeError(
            f"a page has a number of rows that divides {ROUNDED_TO}, not {text!r}"
        )
    return int(text)


@dataclass(frozen=True)
class Cell:
    """`queries` new tokens of each sequence of a case; packed: chunks of prompts, in one packed call."""

    case: str
    heads_q: int
    heads_kv: int
    head_dim: int
    queries: int
    packed: bool = False
    dtype: str = "bf16"
    head_dim_v: int | None = None  # of v, where it has its own
    fp8: bool = False  # codes of 8 bits are cached, beside q of dtype

    @property
    def widths(self) -> tuple[int, int]:
        """Of k and of v."""
        return self.head_dim, self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def lengths(self) -> list[int]:
        """Of the keys, those of the queries among them; the same at every call."""
        batch, low, *high = map(int, re.split("[x-]", self.case))
        if not high:
            return [low] * batch
        generator = torch.Generator().manual_seed(SEED)
        drawn = torch.randint(low, high[0] + 1, (batch,), generator=generator)
        return drawn.clamp_(min=self.queries).tolist()

    @property
    def mixed(self) -> bool:
        return "-" in self.case

    @property
    def rows(self) -> int:
        """Of a region."""
        return sum(-(-length // ROUNDED_TO) for length in self.lengths) * ROUNDED_TO

    @property
    def bytes(self) -> int:
        """Of the keys and values of all sequences, read once."""
        size = (FP8 if self.fp8 else DTYPES[self.dtype]).itemsize
        return sum(self.lengths) * self.heads_kv * sum(self.widths) * size

    @property
    def flops(self) -> int:
        shape = self.heads_q, self.heads_kv, self.queries
        problems = (Problem(1, *shape, length, *self.widths, causal=True) for length in self.lengths)
        return sum(problem.flops for problem in problems)

    def regions(self, device: torch.device) -> int:
        return -(-REGIONS_BYTES[device.type] // self.bytes)

    def numbers(self, device: torch.device) -> int:
        """In all regions of the keys or of the values, whichever are wider."""
        return self.regions(device) * self.rows * self.heads_kv * max(self.widths)

    def to_json(self) -> dict:
        return asdict(self) | {"tokens": sum(self.lengths), "bytes": self.bytes, "flops": self.flops}


def pools(cells: Sequence[Cell], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Of keys and of values, for each of the cells, which cache the same type."""
    largest = max((cell.numbers(device) for cell in cells), default=0)

    def pool() -> torch.Tensor:
        numbers = torch.randn(largest, dtype=DTYPES[cells[0].dtype], device=device)
        return numbers.div_(SCALE).to(FP8) if cells[0].fp8 else numbers

    return tuple(pool() for _ in range(2)) if cells else ()


class Cache:
    """A cell's queries, lengths and regions. Every cell's regions lie in the same two pools."""

    def __init__(self, cell: Cell, pools: tuple[torch.Tensor, torch.Tensor]):
        self.cell, self.pools, self.device = cell, pools, pools[0].device
        generator = torch.Generator(self.device).manual_seed(SEED)
        shape = len(cell.lengths), cell.queries, cell.heads_q, cell.head_dim
        q = torch.randn(shape, generator=generator, device=self.device)
        self.q = q.to(DTYPES[cell.dtype]).transpose(1, 2)
        self.packed_q = self.q.transpose(1, 2).flatten(0, 1)
        self.used = torch.tensor(cell.lengths, dtype=torch.int32, device=self.device)
        scale = torch.full((cell.heads_kv,), SCALE, device=self.device)
        self.scales = dict.fromkeys(("k_scale", "v_scale"), scale) if cell.fp8 else {}
        self.references: dict[tuple, torch.Tensor] = {}

    def padded(self, packed: torch.Tensor) -> torch.Tensor:
        """(batch x queries, heads_q, width) as (batch, heads_q, queries, width)."""
        return packed.unflatten(0, (-1, self.cell.queries)).transpose(1, 2)

    def regions(self, page: int | None) -> Iterator[list[torch.Tensor]]:
        """Of each region K and V: (pages, heads_kv, page, width), or (batch, heads_kv, keys, width)."""
        cell, rows = self.cell, page or self.cell.lengths[0]
        count = cell.rows // page if page else len(cell.lengths)

        def part(pool: torch.Tensor, width: int, region: int) -> torch.Tensor:
            shape = count, rows, cell.heads_kv, width
            begin = region * cell.rows * cell.heads_kv * width
            return pool[begin : begin + math.prod(shape)].view(shape).transpose(1, 2)

        for region in range(cell.regions(self.device)):
            yield [part(*pair, region) for pair in zip(self.pools, cell.widths, strict=True)]

    def pages_of(self, page: int) -> list[int]:
        """How many pages each sequence has."""
        return [-(-length // page) for length in self.cell.lengths]

    def page_numbers(self, page: int) -> torch.Tensor:
        """Of all sequences' pages, one sequence behind the other."""
        generator = torch.Generator(self.device).manual_seed(SEED)
        order = torch.randperm(self.cell.rows // page, generator=generator, device=self.device)
        return order[: sum(self.pages_of(page))].to(torch.int32)

    def table(self, page: int) -> torch.Tensor:
        counts = torch.tensor(self.pages_of(page), device=self.device).unsqueeze(1)
        held = torch.arange(int(counts.max()), device=self.device) < counts
        table = torch.zeros(held.shape, dtype=torch.int32, device=self.device)
        return table.masked_scatter_(held, self.page_numbers(page))

    def reference(self, page: int | None, causal: bool) -> torch.Tensor:
        """In float32, of the last sequence in the first region: its last CHECKED_QUERIES."""
        if (page, causal) not in self.references:
            k, v = next(self.regions(page))
            if page:
                last = self.page_numbers(page)[-self.pages_of(page)[-1] :]
                k, v = (x[last].transpose(0, 1).flatten(1, 2) for x in (k, v))
            else:
                k, v = k[-1], v[-1]
            k, v = (x[None, :, : self.cell.lengths[-1]] for x in (k, v))
            if self.cell.fp8:
                k, v = (x.float() * SCALE for x in (k, v))
            arguments = self.q[-1:, :, -CHECKED_QUERIES:], k, v, causal
            self.references[page, causal] = flash_cute.reference.forward(*arguments, dtype=torch.float32)[0]
        return self.references[page, causal]


def names(cell: Cell, pages: list[int], peers: list[str]) -> list[str]:
    """The contenders of a cell; sequences of mixed lengths are in pages only.

    A chunk's calls have lengths anyway; of others contiguous ones have them as a contender of their own.
    """

    def called_with(what: str) -> list[str]:
        return [peer for peer in peers if peer in named(what)]

    mine = [OURS, INVARIANT] if cell.packed else [OURS, LENGTHS, INVARIANT]
    contiguous, paged = mine + called_with(CONTIGUOUS), [OURS, *called_with(PAGED)]
    if cell.fp8:
        contiguous = paged = [CODES]
    contiguous = [] if cell.mixed else contiguous
    return contiguous + [f"{name}{PAGES}{page}" for name in paged for page in pages]


def attempt_theirs(run: Callable):
    """attempt, for those whose compilers and versions fail by exceptions of any kind."""
    try:
        return attempt(run)
    except CannotRun:
        raise
    except Exception as error:
        raise CannotRun(f"{type(error).__name__}: {error}".splitlines()[0]) from error


def prepare(name: str, cache: Cache, family: str | None) -> tuple[list[Run], float]:
    """(a contender's call of each region, its error); raises CannotRun where it has none that is right."""
    base, _, rows = name.partition(PAGES)
    page = int(rows) if rows else None
    who, options, tried = PEERS.get(base), {}, attempt_theirs
    if not who:
        who, tried = Ours(family), attempt
        options = {"batch_invariant": base == INVARIANT, "lengths": base in (LENGTHS, CODES)}
    call = tried(lambda: who.cached(cache, page, **options))
    calls = [partial(call, k, v) for k, v in cache.regions(page)]
    reference = cache.reference(page, cache.cell.queries > 1 and who.hides_keys)

    def error() -> float:
        found = calls[0]()[-1:, :, -CHECKED_QUERIES:].float()
        return ((found - reference).norm() / reference.norm()).item()

    found = tried(error)
    if not found <= MOST_ERROR:
        raise CannotRun(f"its result differs by {found:.3f} of its size")
    return calls, found
