"""Named tables of what is tested: shapes, masks, layouts and element types, and the tensors they describe."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, permutations, product
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
SEEDS = random.Random()  # conftest.py seeds it anew for each test
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
ALL_DTYPES = DTYPES | {"fp32": torch.float32}


LISTED = (ROOT / "include/flash_cute/instances.def").read_text()
ELEMENTS = re.findall(r"^FLASH_CUTE_ELEMENT\((\w+)\)", LISTED, re.MULTILINE)
# (pass, family, head_dim, head_dim_v, variant), and the element types of a row that has its own.
INSTANCES = [
    (*axes, head_dim, head_dim_v or head_dim, variant, elements.split(", ")[1:] or ELEMENTS)
    for *axes, head_dim, head_dim_v, variant, elements in re.findall(
        r"^FLASH_CUTE_(?:INSTANCE|PAIR)\((\w+), (\w+), (\d+)(?:, (\d+))?, ([a-z]+)(.*)\)",
        LISTED,
        re.MULTILINE,
    )
]


def each_pair(
    *axes: Iterable[str],
    refused: Callable[[dict[int, str]], int] = lambda row: 0,
    shuffle: random.Random | None = None,
) -> list[tuple[str, ...]]:
    """A few combinations of the axes' values in which every two values of two axes meet.

    refused: for how many reasons a combination, {number of an axis: value}, whole or in part, is refused. Two
    values that are refused together meet in one that is refused for nothing else, all others in one that is
    not, as long as each axis has a value that goes with any others. shuffle: draws other combinations.
    """
    axes = [[(number, value) for value in axis] for number, axis in enumerate(axes)]
    missing = [pair for one, other in combinations(axes, 2) for pair in product(one, other)]
    if shuffle:
        shuffle.shuffle(missing)
    left = {value: set() for axis in axes for value in axis}  # with which others it has not met
    for one, other in missing:
        left[one].add(other)
        left[other].add(one)
    chosen, times = {}, Counter()
    for pair in missing:
        if pair[1] not in left[pair[0]]:
            continue
        row = set(pair)
        reasons = refused(dict(row))
        for axis in axes:
            if row.isdisjoint(axis):
                ties = {value: shuffle.random() if shuffle else 0 for value in axis}
                ranked = sorted(axis, key=lambda x: (len(left[x] & row), -times[x], ties[x]), reverse=True)
                row.add(next(value for value in ranked if refused(dict([*row, value])) == reasons))
        times.update(row)
        for one, other in permutations(pair if reasons else row, 2):
            left[one].discard(other)
        chosen[tuple(value for _, value in sorted(row))] = None
    return [*chosen]


def matrix(of_kernels: Iterable[str] = (), **axes: dict[str, object] | Iterable) -> pytest.MarkDecorator:
    """Parametrizes a test: over every combination of the axes' values on a GPU, over each pair on the CPU.

    There element type, head dim and layout change but a copy before the same computation in float32.
    of_kernels: names of values that only a GPU runs.
    """
    named = {
        axis: values if isinstance(values, dict) else {str(value): value for value in values}
        for axis, values in axes.items()
    }
    on_cpu = set(
        each_pair(*([name for name in values if name not in of_kernels] for values in named.values()))
    )
    return pytest.mark.parametrize(
        list(named),
        [
            pytest.param(
                *(values[name] for values, name in zip(named.values(), names, strict=True)),
                id="-".join(names),
                marks=[pytest.mark.gpu] * (names not in on_cpu),
            )
            for names in product(*named.values())
        ],
    )


@dataclass(frozen=True)
class Shape:
    """q is (batch, heads_q, seqlen_q, head_dim), k and v (batch, heads_kv, seqlen_k, head_dim)."""

    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int | None = None  # of v and out; that of q and k by default

    @property
    def q(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads_q, self.seqlen_q, self.head_dim

    @property
    def kv(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads_kv, self.seqlen_k, self.head_dim

    @property
    def v(self) -> tuple[int, int, int, int]:
        return *self.kv[:3], self.head_dim_v or self.head_dim


@dataclass(frozen=True)
class Mask:
    """The mask arguments of flash_cute.forward and, written out independently of it, what they mean."""

    causal: bool = False
    window: int | tuple[int | None, int | None] | None = None

    @property
    def options(self) -> dict:
        return {"causal": self.causal, "window": self.window}

    def visible(self, seqlen_q: int, seqlen_k: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """(seqlen_q, seqlen_k): query i sees key j iff i + sk - sq - left <= j <= i + sk - sq + right."""
        left, right = self.window if isinstance(self.window, tuple) else (self.window, self.window)
        right = 0 if self.causal else right
        diagonal = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
        key = torch.arange(seqlen_k, device=device)[None, :]
        seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
        if left is not None:
            seen &= key >= diagonal - left
        if right is not None:
            seen &= key <= diagonal + right
        return seen


@dataclass(frozen=True)
class Ranged(Mask):
    """A mask, and the ranges of keys that it cuts."""

    ranges: torch.Tensor | None = None

    @property
    def options(self) -> dict:
        return {**super().options, "ranges": self.ranges}

    @classmethod
    def of(cls, mask: Mask, ranges: torch.Tensor) -> Ranged:
        return cls(mask.causal, mask.window, ranges)


@dataclass(frozen=True)
class Layout:
    """How a (batch, heads, seqlen, head_dim) tensor lies in a larger buffer whose every other element is NaN.

    order: the dimensions from the outermost to the innermost in memory. rows, columns: how many more of them
    the buffer has at the end of seqlen and head_dim. offset: elements before the first. step: stride of the
    innermost dimension. expand: dimensions that hold one entry, repeated with stride 0.
    """

    order: str = "bhsd"
    rows: int = 0
    columns: int = 0
    offset: int = 0
    step: int = 1
    expand: str = ""

    def make(
        self, size: tuple[int, ...], dtype: torch.dtype, device, generator: torch.Generator
    ) -> torch.Tensor:
        names = "bhsd"
        stored = {
            name: 1 if name in self.expand else length for name, length in zip(names, size, strict=True)
        }
        room = dict(stored, s=stored["s"] + self.rows, d=stored["d"] + self.columns)
        innermost = self.order[-1]
        room[innermost] *= self.step
        buffer = torch.full(
            (self.offset + torch.Size(room.values()).numel(),), torch.nan, dtype=dtype, device=device
        )
        view = buffer[self.offset :].view([room[name] for name in self.order])
        view = view.permute([self.order.index(name) for name in names])
        if self.step > 1:
            axis = names.index(innermost)
            view = view[(slice(None),) * axis + (slice(None, None, self.step),)]
        view = view[:, :, : stored["s"], : stored["d"]]
        view.copy_(torch.randn(view.shape, generator=generator, device=device))
        return view.expand(size)


CONTIGUOUS = Layout()
TRANSPOSED = Layout("bshd")  # what a projection followed by view and transpose gives

# Layouts of q, k and v. K and V differ in strides wherever the name does not say otherwise.
LAYOUTS = {
    "contiguous": (CONTIGUOUS, CONTIGUOUS, CONTIGUOUS),
    "transposed": (TRANSPOSED, TRANSPOSED, TRANSPOSED),
    "mixed": (TRANSPOSED, CONTIGUOUS, Layout("sbhd")),
    "head_innermost_but_one": (Layout("bsdh"), TRANSPOSED, CONTIGUOUS),
    "padded_rows": (Layout(rows=3), Layout("bshd", rows=70), Layout(rows=130)),
    "padded_columns": (Layout(columns=8), Layout("bshd", columns=16), Layout(columns=64)),
    "rows_not_16_bytes": (Layout(columns=1), Layout("bshd", columns=3), Layout(columns=4)),
    "misaligned_start": (Layout(offset=1), Layout("bshd", offset=4), Layout(offset=2)),
    "aligned_start": (Layout(offset=8), Layout("bshd", offset=24), Layout(offset=64)),
    "every_second_element": (Layout(step=2), Layout("bshd", step=3), Layout(step=2, offset=1)),
    "columns_of_rows": (Layout("bhds"), Layout("bhds", rows=8), Layout("hbds")),
    "expanded_heads": (CONTIGUOUS, Layout("bshd", expand="h"), Layout(expand="h")),
    "expanded_batch": (Layout("bshd", expand="b"), Layout(expand="b"), Layout("bshd", expand="bh")),
    "expanded_rows": (Layout(expand="s"), Layout(expand="s", columns=8), Layout("bshd")),
    "expanded_columns": (CONTIGUOUS, Layout("bshd", expand="d"), Layout(expand="d")),
}

MASKS = {
    "full": Mask(),
    "causal": Mask(causal=True),
    "window_symmetric": Mask(window=(17, 17)),
    "window_left": Mask(window=(40, None)),
    "window_right": Mask(window=(None, 9)),
    "window_causal": Mask(causal=True, window=(33, None)),
    "window_diagonal": Mask(window=(0, 0)),
    "window_wider_than_all": Mask(window=(10_000, 10_000)),
    "window_left_zero": Mask(window=(0, 100)),
}

FULL_AND_CAUSAL = {name: MASKS[name] for name in ("full", "causal")}

# Tiles have 64 to 192 rows and columns: lengths on, before and after their edges, and some that fit none.
SHAPES = {
    "one_tile": Shape(2, 3, 3, 128, 128, 64),
    "several_tiles": Shape(2, 2, 2, 384, 512, 64),
    "no_tile_divides": Shape(2, 3, 3, 197, 331, 64),
    "one_before_a_tile": Shape(1, 4, 4, 127, 255, 64),
    "one_after_a_tile": Shape(1, 4, 4, 129, 257, 64),
    # One row a head (of a single key under a causal mask), and the rule needs many.
    "single_query": Shape(16, 8, 8, 1, 413, 64),
    "single_key": Shape(16, 8, 8, 413, 1, 64),
    "single_both": Shape(32, 8, 8, 1, 1, 64),
    "few_of_each": Shape(4, 8, 8, 3, 5, 64),
    "more_keys": Shape(2, 2, 2, 113, 700, 64),
    "more_queries": Shape(2, 2, 2, 700, 113, 64),
    "grouped_heads": Shape(2, 6, 2, 150, 190, 64),
    "one_kv_head": Shape(2, 8, 1, 130, 260, 64),
    "one_query_of_grouped_heads": Shape(3, 8, 2, 1, 413, 64),
    "few_queries_of_grouped_heads": Shape(2, 16, 2, 21, 300, 64),
    "few_queries_of_seven_heads": Shape(2, 14, 2, 19, 260, 64),
    "few_queries_of_64_heads": Shape(1, 64, 1, 3, 200, 64),
    "few_queries_of_100_heads": Shape(1, 100, 1, 3, 200, 64),
    "one_query_of_67_heads": Shape(2, 134, 2, 1, 300, 64),
    "few_queries_of_129_heads": Shape(1, 258, 2, 5, 150, 64),
    "long_one_head": Shape(1, 1, 1, 1024, 1024, 64),
    "many_short": Shape(32, 8, 8, 33, 47, 64),
    "more_tiles_than_multiprocessors": Shape(3, 55, 55, 130, 70, 64),
    "rows_that_fit_192": Shape(2, 34, 17, 570, 330, 64),
    "many_keys": Shape(2, 6, 6, 300, 1100, 64),
    "many_keys_of_grouped_heads": Shape(2, 6, 2, 300, 1100, 64),
}

EMPTY = {
    "no batch": Shape(0, 4, 2, 10, 20, 64),
    "no heads": Shape(2, 0, 0, 10, 20, 64),
    "no query heads": Shape(2, 0, 2, 10, 20, 64),
    "no queries": Shape(2, 4, 2, 0, 20, 64),
    "no keys": Shape(2, 4, 2, 10, 0, 64),
    "no keys, head_dim to pad": Shape(2, 4, 2, 10, 0, 50),
    "no queries, no keys": Shape(2, 4, 2, 0, 0, 64),
}

HEAD_DIMS = tuple(range(8, 257, 8))
# Of q and k, and of v.
TWO_WIDTHS = (64, 40), (40, 64), (192, 128), (72, 200), (13, 7)
ODD_HEAD_DIMS = (1, 4, 15, 33, 63, 100, 130, 250)
BUCKETS = tuple(sorted({int(head_dim) for _, _, head_dim, *_ in INSTANCES}))


def with_head_dim(shape: Shape, head_dim: int) -> Shape:
    return replace(shape, head_dim=head_dim)


def make_inputs(shape: Shape, dtype: torch.dtype, device, layout: str = "mixed", seed: int | None = None):
    """Fresh random (q, k, v). The seed is the next of SEEDS unless given; it is printed."""
    seed = SEEDS.getrandbits(31) if seed is None else seed
    print(f"{shape} {dtype} {layout} seed={seed}")
    generator = torch.Generator(device).manual_seed(seed)
    sizes = shape.q, shape.kv, shape.v
    return tuple(
        part.make(size, dtype, device, generator) for part, size in zip(LAYOUTS[layout], sizes, strict=True)
    )


def make_gradients(
    q: torch.Tensor, layout: Layout = TRANSPOSED, seed: int | None = None, head_dim_v: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fresh random (dout, dlse) for a dense q. head_dim_v: of v, where it isn't q's."""
    seed = SEEDS.getrandbits(31) if seed is None else seed
    print(f"{layout} gradients' seed={seed}")
    generator = torch.Generator(q.device).manual_seed(seed)
    dlse = torch.randn(q.shape[:3], generator=generator, device=q.device)
    shape = *q.shape[:3], q.shape[3] if head_dim_v is None else head_dim_v
    return layout.make(shape, q.dtype, q.device, generator), dlse


@dataclass(frozen=True)
class Sequence:
    """One of a batch: how many rows of q, and of k and v, it has, and which of them count (None: all)."""

    rows_q: int
    rows_k: int
    used_q: int | None = None
    used_k: int | None = None
    leftpad: int = 0

    @property
    def queries(self) -> slice:
        return slice(0, self.rows_q if self.used_q is None else self.used_q)

    @property
    def keys(self) -> slice:
        return slice(self.leftpad, self.rows_k if self.used_k is None else self.used_k)


PACKED = {"packed": True, "padded": False}
SHORT_ONES = Sequence(5, 7), Sequence(3, 2), Sequence(40, 1), Sequence(2, 70)

# Unequal lengths of one batch. Tiles as in SHAPES; few queries are packed with the heads of a group.
BATCHES = {
    "no sequence": (),
    "one": (Sequence(130, 190),),
    "equal": (Sequence(128, 256),) * 3,
    "unequal": (Sequence(1, 1), Sequence(130, 150), Sequence(64, 257), Sequence(200, 40), Sequence(3, 300)),
    "tile edges": tuple(Sequence(q, k) for q in (63, 128, 193) for k in (64, 127, 129)),
    "some empty": tuple(
        Sequence(*rows) for rows in ((0, 0), (50, 0), (0, 50), (70, 90), (0, 0), (0, 0), (33, 33), (0, 7))
    ),
    "all empty": (Sequence(0, 0),) * 3,
    "no keys": (Sequence(20, 0), Sequence(3, 0)),
    # The short ones four times, as below: their few rows broke the rule once in some hundred runs.
    "one long": (*SHORT_ONES * 2, Sequence(900, 1000), *SHORT_ONES * 2),
    "many keys": (  # in the mean 512 and more
        Sequence(300, 700),
        Sequence(0, 900),
        Sequence(130, 0),
        Sequence(513, 1024, 400, 600, 30),
        Sequence(64, 1100, 64, 1100, 1000),
    ),
    "short": tuple(Sequence(1 + 7 * i % 20, 1 + 11 * i % 23) for i in range(40)),
    **{  # up to 80 (VarlenOrder::kFewSequences), blocks on Hopper list them themselves
        f"{count} of them": tuple(Sequence(1 + 37 * i % 150, 1 + 53 * i % 190) for i in range(count))
        for count in (80, 81)
    },
    # Four of each: the tolerance rule compares maxima, and few rows make them a matter of chance.
    "one query each": tuple(Sequence(1, k) for k in (300, 17, 0, 129, 64, 1) * 4),
    "used": (
        Sequence(100, 120, 60, 70),
        Sequence(80, 80, 0, 80),
        Sequence(50, 50, 50, 0),
        Sequence(130, 200, 129, 128),
        Sequence(70, 270, 1, 269),
    ),
    "left padding": (
        Sequence(60, 100, leftpad=30),
        Sequence(100, 60, leftpad=60),
        Sequence(9, 300, leftpad=257),
    ),
    "used and left padding": (
        Sequence(100, 150, 90, 120, 40),
        Sequence(40, 80, 30, 50, 50),
        Sequence(3, 9, 3, 9, 0),
        Sequence(20, 200, 5, 131, 1),
    ),
}


@dataclass(frozen=True)
class Ragged:
    """A batch of unequal lengths.

    lengths: the arguments of flash_cute that say where sequences are. places: the entry of q, k and v, as
    (entries, heads, rows, head_dim), where each sequence is, its queries and its keys that count.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lengths: dict[str, torch.Tensor]
    places: tuple[tuple[int, slice, slice], ...]

    @property
    def packed(self) -> bool:
        return self.q.dim() == 3

    @property
    def entries(self) -> list[torch.Tensor]:
        """q, k and v as (entries, heads, rows, head_dim): one entry if packed."""
        return [as_entries(self, tensor) for tensor in (self.q, self.k, self.v)]


def as_entries(batch: Ragged, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, 1).unsqueeze(0) if batch.packed else tensor


def shifted(rows: slice, offset: int) -> slice:
    return slice(rows.start + offset, rows.stop + offset)


def make_ragged(
    sequences: tuple[Sequence, ...],
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    device,
    packed: bool,
    layout: str = "mixed",
    margins: tuple[int, int] = (3, 5),
    seed: int | None = None,
    head_dim_v: int | None = None,
) -> Ragged:
    """Fresh random inputs in which every row that doesn't count is NaN.

    heads: of q, and of k and v. margins: rows before the first packed sequence, and behind the last.
    """
    begins = []
    for side in ("rows_q", "rows_k"):
        rows = [getattr(sequence, side) for sequence in sequences]
        begins.append(list(accumulate(rows, initial=margins[0])) if packed else rows)
    if packed:
        sizes = [begin[-1] + margins[1] for begin in begins]
        pairs = zip(sequences, *begins, strict=False)
        places = [(0, shifted(s.queries, q), shifted(s.keys, k)) for s, q, k in pairs]
    else:
        sizes = [max(rows, default=7) for rows in begins]
        places = [(entry, s.queries, s.keys) for entry, s in enumerate(sequences)]
    shape = Shape(1 if packed else len(sequences), *heads, *sizes, head_dim, head_dim_v)
    tensors = make_inputs(shape, dtype, device, layout, seed)
    for tensor, axis in zip(tensors, (1, 2, 2), strict=True):
        counts = torch.zeros(tensor.shape[0], tensor.shape[2], dtype=torch.bool, device=device)
        for place in places:
            counts[place[0], place[axis]] = True
        tensor.transpose(1, 2)[~counts] = torch.nan

    def int32(values) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    lengths = {"cu_seqlens_q": int32(begins[0]), "cu_seqlens_k": int32(begins[1])} if packed else {}
    if not packed or any(s.used_q is not None for s in sequences):
        lengths["seqused_q"] = int32(s.queries.stop for s in sequences)
    if not packed or any(s.used_k is not None for s in sequences):
        lengths["seqused_k"] = int32(s.keys.stop for s in sequences)
    if any(s.leftpad for s in sequences):
        lengths["leftpad_k"] = int32(s.leftpad for s in sequences)
    if packed:
        tensors = [tensor[0].transpose(0, 1) for tensor in tensors]
    return Ragged(*tensors, lengths, tuple(places))


def make_ragged_gradients(batch: Ragged, seed: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Fresh random (dout, dlse) for a batch of unequal lengths, NaN in every row that doesn't count."""
    q, _, v = batch.entries
    entries = q if q.shape[3] == v.shape[3] else q.new_empty(*q.shape[:3], v.shape[3])
    dout, dlse = make_gradients(entries, seed=seed)
    counts = torch.zeros(entries.shape[0], entries.shape[2], dtype=torch.bool, device=entries.device)
    for entry, rows, _ in batch.places:
        counts[entry, rows] = True
    dout.transpose(1, 2)[~counts] = torch.nan
    dlse.transpose(1, 2)[~counts] = torch.nan
    return (dout[0].transpose(0, 1), dlse[0]) if batch.packed else (dout, dlse)


@contextmanager
def poisoned():
    """Deterministic mode, in which torch.empty is NaN; skips what this build has no kernel for."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if "this build has no" in str(error):  # one for development, with a part of the kernels
            pytest.skip(str(error))
        raise
    finally:
        torch.use_deterministic_algorithms(False)
