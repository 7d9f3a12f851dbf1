"""The table of cases: a feature is an axis, and every two values of two axes meet in a case.

A case that the library refuses is one, too: REFUSALS says which are, and with which sentence.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import accumulate, product
from unittest.mock import patch

import pytest
import torch

import flash_cute
from support.cases import (
    ALL_DTYPES,
    CONTIGUOUS,
    HEAD_DIMS,
    LAYOUTS,
    MASKS,
    ODD_HEAD_DIMS,
    SEEDS,
    Layout,
    each_pair,
    poisoned,
)
from support.expected import EPSILONS, LOWEST, Sequence, resolution
from support.precision import Calls
from support.ranges import KINDS, anywhere
from support.scores import BIASES, PAIRS, Given
from support.tolerance import NORMS, assert_within_rule

# Queries and keys of each sequence. Without lengths all are as long as the longest.
ROWS = {
    "unequal": ((60, 80), (1, 1), (33, 47), (70, 20), (3, 100)),
    "square": ((64, 64),) * 2,
    "tile edges": ((64, 128), (63, 127), (65, 129)),
    "one query": tuple((1, 1 + 37 * i % 150) for i in range(10)),
    "few queries": ((5, 150), (16, 128), (3, 40), (9, 17)),
    "one key": ((40, 1),) * 6,
    "more keys": ((20, 300), (50, 180)),
    "more queries": ((150, 40), (60, 30)),
    "some empty": ((60, 80), (0, 0), (20, 0), (0, 30)),
    "several blocks of the CPU": ((530, 520),),
    "short": tuple((1 + 7 * i % 20, 1 + 11 * i % 23) for i in range(16)),
}
# More rows than tiles, or sequences than a block lists, of which the CPU knows nothing.
ROWS_OF_KERNELS = {
    "several tiles": ((384, 512), (197, 331)),
    "many sequences": tuple((1 + 37 * i % 150, 1 + 53 * i % 190) for i in range(81)),
    "one long": ((5, 7), (3, 2), (300, 1100), (40, 1), (2, 70)) * 2,
    "many keys of few queries": ((4, 5000), (1, 1), (2, 700), (3, 129)),
    "chunks beside single queries": ((300, 900), *((1, 800 + 37 * i) for i in range(20))),
}
HEADS = {"4 of 2": (4, 2), "3 of 3": (3, 3), "5 of 1": (5, 1)}
HEADS_OF_KERNELS = {"14 of 2": (14, 2), "67 of 1": (67, 1)}
# To the CPU's code all are the same, but that some are padded first.
SOME_HEAD_DIMS = 64, 8, 24, 40, 72, 96, 128, 152, 192, 200, 256
# Of v, where it is not as wide as q: all pairs of kernels with the head dims, and widths that no kernel has.
AS_Q = "as q"
WIDTHS_OF_V = 8, 24, 33, 57, 64, 96, 128, 192, 200, 256
SOME_WIDTHS_OF_V = 8, 40, 57, 128, 256
# Where scores are changed, which knows nothing of them.
FEW_HEAD_DIMS = 64, 8, 40, 96, 128, 192, 256, 33, 130
FEW_LAYOUTS = "contiguous", "mixed", "rows_not_16_bytes", "every_second_element", "expanded_heads"
FEW_PAGES = "pages of 1", "pages of 17", "pages of 128", "scaled fp8 in pages of 64"
SCALES = {"default": None, "1e-3": 1e-3, "0.3": 0.3}
PRECISIONS = {"torch's": None, "highest": "highest", "high": "high"}
SINKS = "none", "float32", "of q's type", "some -inf"
OF_QUERIES, OF_BOTH = ("cu_seqlens_q",), ("cu_seqlens_q", "cu_seqlens_k")
USED, LEFTPAD = ("seqused_q", "seqused_k"), ("leftpad_k",)
LENGTHS = {
    "none": (),
    "seqused_q": USED[:1],
    "seqused_k": USED[1:],
    "leftpad_k": LEFTPAD,
    "used": USED,
    "used and left padding": USED + LEFTPAD,
    "packed": OF_BOTH,
    "packed, of one set of offsets": OF_QUERIES,
    "packed and used": OF_BOTH + USED,
    "packed and left padding": OF_BOTH + LEFTPAD,
    "packed, used and left padding": OF_BOTH + USED + LEFTPAD,
}
PACKED = [name for name in LENGTHS if name.startswith("packed")]
WIDE_PAGES = {f"pages of {size}": size for size in (1, 2, 5, 16, 17, 64, 100, 128, 256)}
SCALED = "scaled fp8 in pages of 64"  # by numbers of sequences and heads; the other has none
FP8_PAGES = {"fp8 in pages of 17": 17, SCALED: 64}
PAGES = WIDE_PAGES | FP8_PAGES
MARGINS = (0, 0), (3, 5), (1, 1), (0, 300), (200, 0)
NESTED = "jagged", "jagged with holes"
SHARED = "shared"  # the layout in which the narrower of k and v is the other's first columns
SLOPES = "none", "of heads", "of sequences and heads"
SOFTCAPS = "none", "30", "1.5"
DROPS = "none", "0.1", "0.5", "0.97", "1e-5"  # the last is rounded to none
GIVEN = "both", "dout", "dlse"
GRADIENT_LAYOUTS = {
    "heads after rows": Layout("bshd"),
    "contiguous": CONTIGUOUS,
    "one number, as from sum()": Layout(expand="bhsd"),
    "expanded rows": Layout(expand="s"),
    "columns of rows": Layout("bhds"),
    "every second element": Layout(step=2),
    "rows not of 16 bytes": Layout(columns=1),
    "misaligned start": Layout(offset=1),
}


KINDS_OF_CASES = {"forward_case", "gradient_case", "changed_forward_case", "changed_gradient_case"}


@dataclass(frozen=True)
class Case:
    """By the names of what each axis has. rows, heads, head_dim and width_v are its shape."""

    rows: str = "unequal"
    heads: str = "4 of 2"
    head_dim: str = "64"
    width_v: str = AS_Q
    element: str = "bf16"
    precision: str = "torch's"
    scale: str = "default"
    mask: str = "full"
    ranges: str = "none"
    sinks: str = "none"
    lengths: str = "none"
    cache: str = "none"
    nested: str = "no"
    layout: str = "contiguous"
    # What changes scores.
    pairs: str = "none"
    bias: str = "none"
    alibi: str = "none"
    softcap: str = "none"
    dropout: str = "none"
    # Of the forward alone.
    out: str = "new"
    batch_invariant: str = "no"
    # Of the gradients alone.
    deterministic: str = "no"
    given: str = "both"
    dout: str = "heads after rows"

    def __str__(self) -> str:
        """What differs from a plain call."""
        plain = asdict(Case())
        return (
            ", ".join(f"{axis} {value}" for axis, value in asdict(self).items() if value != plain[axis])
            or "plain"
        )

    @property
    def packed(self) -> bool:
        return self.lengths in PACKED

    @property
    def widths(self) -> dict[str, int]:
        """Head dims by the tensor that has them."""
        width = int(self.head_dim)
        return {"q": width, "k": width, "v": width if self.width_v == AS_Q else int(self.width_v)}


def axes(family: str | None, kind: str) -> dict[str, Iterable[str]]:
    """What is to meet in cases of a family's kernels, or of the CPU; what goes with nothing is left out.

    kind: forward_case or gradient_case, or with changed_ before it, which are a table of their own: among so
    many features a call without those that change scores would be rare.
    """
    changed = kind.startswith("changed_")
    on_gpu = family is not None
    found = {
        "rows": ROWS | (ROWS_OF_KERNELS if on_gpu else {}),
        "heads": HEADS | (HEADS_OF_KERNELS if on_gpu else {}),
        "head_dim": map(str, (HEAD_DIMS if on_gpu else SOME_HEAD_DIMS) + ODD_HEAD_DIMS),
        "width_v": [AS_Q, *map(str, WIDTHS_OF_V if on_gpu else SOME_WIDTHS_OF_V)],
        "element": [name for name in ALL_DTYPES if name != "fp32" or family != "sm90"],
        "precision": PRECISIONS,
        "scale": SCALES,
        "mask": MASKS,
        "ranges": ["none", *KINDS],
        "sinks": SINKS,
        "lengths": LENGTHS,
        "nested": ["no", *NESTED],
        "layout": [*LAYOUTS, SHARED],
    }
    if changed:
        found |= {"head_dim": map(str, FEW_HEAD_DIMS), "layout": FEW_LAYOUTS}
        found |= {"width_v": [AS_Q, *map(str, SOME_WIDTHS_OF_V)]}
        # Those of the CPU have a test of their own.
        found["rows"] = [name for name in found["rows"] if name != "several blocks of the CPU"]
        found |= {"pairs": PAIRS, "bias": BIASES, "alibi": SLOPES, "softcap": SOFTCAPS, "dropout": DROPS}
    if kind.endswith("gradient_case"):
        return found | {"deterministic": ["no", "yes"], "given": GIVEN, "dout": GRADIENT_LAYOUTS}
    pages = [name for name in (FEW_PAGES if changed else PAGES) if family != "sm80" or name in WIDE_PAGES]
    found |= {"cache": ["none", "contiguous", *pages], "out": ["new", "given"]}
    return found | ({"batch_invariant": ["no", "yes"]} if on_gpu else {})


NOT_NESTED = [name for name in LENGTHS if name not in (*PACKED, "none")]
CACHES = ["contiguous", *PAGES]
UNSCALED_CACHES = [name for name in CACHES if name != SCALED]
# Those whose K or V has columns apart, or a start or strides that are no multiples of 16 bytes.
NOT_OF_CACHES = [
    "rows_not_16_bytes", "misaligned_start", "every_second_element", "columns_of_rows", "expanded_columns",
]  # fmt: skip
ODD = [str(size) for size in ODD_HEAD_DIMS if size % 8]
NOT_OF_FP8 = [str(size) for size in range(8, 257, 16)]
ODD_WIDTHS_OF_V = [str(size) for size in {*WIDTHS_OF_V, *SOME_WIDTHS_OF_V} if size % 8]
CHANGED = {
    "pairs": [name for name in PAIRS if name != "none"],
    "bias": [name for name in BIASES if name != "none"],
    "dropout": [name for name in DROPS if name != "none"],
}
# What only the kernels of general calls know.
GENERAL = {
    "ranges": KINDS,
    "pairs": [name for name in PAIRS if name != "none"],
    "bias": [name for name in BIASES if name != "none"],
    "alibi": [name for name in SLOPES if name != "none"],
    "softcap": [name for name in SOFTCAPS if name != "none"],
    "dropout": [name for name in DROPS if name not in ("none", "1e-5")],  # which keeps all
}
NO_KERNEL = "this build has no sm.. kernel for caches and batch_invariant with"
# Which values are refused together, the sentence, and where: everywhere, on a GPU or by a family.
REFUSALS = (
    ({"nested": NESTED, "lengths": NOT_NESTED}, "is given with nested tensors, which have lengths", ""),
    ({"nested": NESTED, "lengths": PACKED}, "q is nested; dense tensors are accepted", ""),
    ({"nested": NESTED, "ranges": KINDS}, "ranges is given with nested tensors; pack the sequences", ""),
    ({"nested": NESTED, "cache": UNSCALED_CACHES}, "q is nested and k is not; they must be alike", ""),
    ({"nested": NESTED, "cache": [SCALED]}, "k_scale must be None where q is nested, got a tensor", ""),
    *(
        ({argument: CHANGED[argument]} | others, sentence, where)
        for argument, others, sentence, where in (
            ("pairs", {"lengths": PACKED}, "mask must be None with cu_seqlens_q, got a tensor", ""),
            ("bias", {"lengths": PACKED}, "bias must be None with cu_seqlens_q, got a tensor", ""),
            ("pairs", {"nested": NESTED}, "mask must be None where q is nested, got a tensor", ""),
            ("bias", {"nested": NESTED}, "bias must be None where q is nested, got a tensor", ""),
            ("bias", {"cache": PAGES}, "bias must be None with block_table, got a tensor", ""),
            ("dropout", {"cache": PAGES}, "dropout_p must be 0 with block_table, got", ""),
            (
                "dropout", {"cache": ["contiguous"], "lengths": PACKED},
                "dropout_p must be 0 where k is a cache beside packed queries, got", "",
            ),
            ("bias", {"batch_invariant": ["yes"]}, "bias must be None with batch_invariant", "gpu"),
            ("dropout", {"batch_invariant": ["yes"]}, "dropout_p must be 0 with batch_invariant", "gpu"),
        )
    ),
    ({"nested": NESTED, "out": ["given"]}, "out must be None where q is nested, got a tensor", ""),
    *(
        (cached | refused, sentence, where)
        for refused, sentence, where in (
            ({"head_dim": ODD}, "head_dim of a cache must be a multiple of 8, got", ""),
            ({"width_v": ODD_WIDTHS_OF_V}, "head_dim of a cache must be a multiple of 8, got", ""),
            ({"layout": NOT_OF_CACHES}, "[kv] is a cache, which is not copied; it", ""),
        )
        for cached in ({"cache": PAGES}, {"cache": ["contiguous"], "lengths": PACKED})
    ),
    ({"element": ["fp32"], "cache": WIDE_PAGES}, NO_KERNEL, "gpu"),
    ({"element": ["fp32"], "cache": ["contiguous"], "lengths": PACKED}, NO_KERNEL, "gpu"),
    *(
        ({"cache": FP8_PAGES} | refused, sentence, "")
        for refused, sentence in (
            ({"element": ["fp32"]}, "q must have dtype torch.float16 or torch.bfloat16 where k has dtype"),
            ({"head_dim": NOT_OF_FP8}, "head_dim must be a multiple of 16 where k has dtype torch.float8"),
            ({"width_v": NOT_OF_FP8}, "head_dim must be a multiple of 16 where k has dtype torch.float8"),
            ({"layout": ["aligned_start", "expanded_rows"]}, "[kv] is a cache, which is not copied; it"),
        )
    ),
    ({"batch_invariant": ["yes"], "element": ["fp32"]}, NO_KERNEL, "gpu"),
    ({"batch_invariant": ["yes"], "ranges": KINDS}, "ranges must be None with batch_invariant", "gpu"),
    *(
        (
            {axis: values, "deterministic": ["yes"]},
            "family must be 'sm80' or None where gradients with ranges or changed scores are deterministic",
            "sm90",
        )
        for axis, values in GENERAL.items()
    ),
)  # fmt: skip


def refusals(values: dict[str, str], family: str | None) -> list[str]:
    """The sentences that refuse a case, or any that has these values."""
    places = {"", family, "gpu" if family else None}
    return [
        sentence
        for refused, sentence, where in REFUSALS
        if where in places and all(values.get(axis) in names for axis, names in refused.items())
    ]


@cache
def drawn(family: str | None, kind: str) -> list[Case]:
    """The cases of a family's kernels, or of the CPU: each pair, and on a GPU once more of v as wide as q."""
    named = {axis: [*values] for axis, values in axes(family, kind).items()}
    names = [*named]
    rows = {}
    if kind.startswith("changed_"):  # each by itself, too, as in most calls
        for axis in ("pairs", "bias", "alibi", "softcap", "dropout"):
            for value in named[axis][1:]:
                alone = asdict(Case()) | {axis: value}
                rows[tuple(alone[name] for name in names)] = None
    twice = family and not rows
    for seed, widths in enumerate([named["width_v"], [AS_Q]] if twice else [named["width_v"]]):
        found = each_pair(
            *(named | {"width_v": widths}).values(),
            refused=lambda row: len(refusals({names[i]: value for i, value in row.items()}, family)),
            shuffle=random.Random(seed),  # in their order axes of as many values would go hand in hand
        )
        rows |= dict.fromkeys(found)
    for refused, *_ in REFUSALS:
        if len(refused) > 2:  # of which no two values alone are refused
            there_are = [[name for name in refused[axis] if name in named.get(axis, ())] for axis in refused]
            for values in product(*there_are):
                given = dict(zip(refused, values, strict=True))
                rows[tuple(given.get(axis, values[0]) for axis, values in named.items())] = None
    return [Case(**dict(zip(names, row, strict=True))) for row in rows]


def crossed(family: str | None, kind: str, count: int, seed: str) -> list[Case]:
    """So many random cases that nothing refuses. Each axis has its plain value, or one of all, as likely."""
    generator = random.Random(f"{seed} {family} {kind}")
    named = {axis: [*values] for axis, values in axes(family, kind).items()}
    plain, found = asdict(Case()), {}
    while len(found) < count:
        values = {axis: generator.choice([plain[axis], generator.choice(of)]) for axis, of in named.items()}
        if not refusals(values, family):
            found[Case(**values)] = None
    return [*found]


@dataclass(frozen=True)
class Place:
    """Where a sequence's rows that count, and its left padding, are: the entries and rows of tensors."""

    queries: tuple[torch.Tensor, torch.Tensor]
    keys: tuple[torch.Tensor, torch.Tensor]
    leftpad: int

    def taken(self, tensor: torch.Tensor, side: str) -> torch.Tensor:
        """Its rows of (entries, heads, rows, ...), as (heads, rows, ...)."""
        return tensor.transpose(1, 2)[self.queries if side == "q" else self.keys].transpose(0, 1)

    def put(self, tensor: torch.Tensor, side: str, rows: torch.Tensor) -> None:
        at = self.queries if side == "q" else self.keys
        tensor.transpose(1, 2)[at] = rows.transpose(0, 1).to(tensor.dtype)


@dataclass(frozen=True)
class Call:
    """The tensors and arguments of a case.

    q, k and v are (entries, heads, rows, its width), however they are given; rows that don't count are NaN.
    """

    case: Case
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    arguments: dict
    places: list[Place]
    sequences: list[Sequence]
    scores: Given
    offsets: dict[str, tuple[torch.Tensor, torch.Tensor | None]]

    @property
    def shape_of_out(self) -> tuple[int, ...]:
        """As q, k and v are here."""
        return *self.q.shape[:3], self.v.shape[3]

    @property
    def function(self):
        return flash_cute.forward_varlen if self.case.packed else flash_cute.forward

    @property
    def is_packed(self) -> bool:
        return self.case.packed or self.case.nested != "no"

    def given(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor as calls take it: packed rows have no dimension of entries, and are before heads."""
        return tensor[0].transpose(0, 1) if self.is_packed else tensor

    def nested(self, tensor: torch.Tensor, side: str) -> torch.Tensor:
        if self.case.nested == "no":
            return tensor
        return torch.nested.nested_tensor_from_jagged(tensor, *self.offsets[side]).transpose(1, 2)

    def inputs(self) -> list[torch.Tensor]:
        cached = self.case.cache != "none"
        return [self.given(self.q), *(x if cached else self.given(x) for x in (self.k, self.v))]

    def results(self, inputs, family: str | None, **options) -> tuple[torch.Tensor, torch.Tensor]:
        q, *kv = inputs
        kv = kv if self.case.cache != "none" else [self.nested(x, "k") for x in kv]
        out, lse = self.function(self.nested(q, "q"), *kv, family=family, **self.arguments | options)
        if self.case.nested == "no":
            return out, lse
        assert out.is_nested
        assert lse.is_nested
        return out.values().transpose(0, 1), lse.values()

    def entries(self, tensor: torch.Tensor) -> torch.Tensor:
        """A result as q, k and v are here."""
        if not self.is_packed:
            return tensor
        return (tensor if tensor.dim() == 2 else tensor.transpose(0, 1)).unsqueeze(0)

    @contextmanager
    def precision_arrives(self):
        """Asserts that each operator of ours is told the precision: on the CPU no number shows it."""
        if self.case.element != "fp32":
            yield
            return
        with Calls() as calls:
            yield
        assert {*calls.tf32} == {self.case.precision == "high"}

    @property
    def norms(self) -> Iterable[str]:
        """Of few products of numbers that are cut to TF32 the largest error is chance."""
        return ["RMS"] if self.sequences and self.sequences[0].tf32 else NORMS


def make_call(case: Case, device: torch.device) -> Call:
    generator = torch.Generator(device).manual_seed(SEEDS.getrandbits(31))
    names, nested = LENGTHS[case.lengths], case.nested != "no"
    packed, page = case.packed or nested, PAGES.get(case.cache)
    used = {side: f"seqused_{side}" in names or case.nested == "jagged with holes" for side in "qk"}
    used["k"] |= "cu_seqlens_k" in names and case.cache != "none"  # a cache has no offsets
    rows = {side: [pair["qk".index(side)] for pair in (ROWS | ROWS_OF_KERNELS)[case.rows]] for side in "qk"}
    if names == OF_QUERIES:
        rows["k"] = rows["q"]
    # Whether each sequence has an entry of its own.
    alone = {"q": not packed, "k": not packed or case.cache != "none"}
    counts, sizes, begins, margins = {}, {}, {}, SEEDS.choice(MARGINS)
    for side in "qk":
        own = rows[side]
        if alone[side]:
            counts[side] = own if used[side] else [max(own)] * len(own)
            sizes[side], begins[side] = max(own), [0] * len(own)
        else:
            counts[side] = [SEEDS.randint(0, n) if used[side] and i else n for i, n in enumerate(own)]
            margins = margins if names == OF_QUERIES else (0, 0) if nested else SEEDS.choice(MARGINS)
            begins[side] = [*accumulate(own, initial=margins[0])]
            sizes[side] = begins[side][-1] + margins[1]
    batch = len(rows["q"])
    table, entries = None, {side: batch if alone[side] else 1 for side in "qk"}
    if page:
        table, counts["k"], entries["k"], sizes["k"] = _in_pages(counts["k"], sizes["k"], used["k"], page)
    leftpads = [SEEDS.randint(0, n) if i else n // 3 for i, n in enumerate(counts["k"])]
    leftpads = leftpads if "leftpad_k" in names else [0] * batch

    def at(side: str, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = torch.arange(counts[side][sequence])
        if side == "k" and page:
            entry, row = table[sequence].long()[row // page], row % page
        else:
            entry, row = torch.full_like(row, sequence * alone[side]), row + begins[side][sequence]
        return entry.to(device), row.to(device)

    places = [Place(at("q", i), at("k", i), leftpads[i]) for i in range(batch)]
    heads, dtype = (HEADS | HEADS_OF_KERNELS)[case.heads], ALL_DTYPES[case.element]
    shapes = {side: (entries[side], heads[side == "k"], sizes[side]) for side in "qk"}
    of_keys = torch.float8_e4m3fn if case.cache in FP8_PAGES else dtype
    types = {"q": dtype, "k": of_keys, "v": of_keys}
    tensors = [
        layout.make((*shapes["q" if name == "q" else "k"], case.widths[name]), types[name], device, generator)
        for name, layout in _layouts(case).items()
    ]
    if case.layout == SHARED:
        wider = max(tensors[1:], key=lambda x: x.shape[-1])
        tensors[1:] = (wider[..., : case.widths[name]] for name in "kv")
    _poison(tensors[0], [place.queries for place in places])
    for tensor in tensors[1:]:
        _poison(tensor, [tuple(x[place.leftpad :] for x in place.keys) for place in places])

    def int32(values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    values = {f"cu_seqlens_{side}": begins[side] for side in "qk"}
    values |= {f"seqused_{side}": counts[side] for side in "qk"} | {"leftpad_k": leftpads}
    if case.cache != "none":
        names = [{"cu_seqlens_k": "seqused_k"}.get(name, name) for name in names]
    arguments = {name: int32(values[name]) for name in names}
    arguments |= {} if table is None else {"block_table": table.to(device)}
    scales = {}
    if case.cache == SCALED:
        scales = {name: 0.3 + torch.rand(batch, heads[1], device=device) for name in "kv"}
        arguments |= {f"{name}_scale": scale for name, scale in scales.items()}
    arguments |= MASKS[case.mask].options
    if SCALES[case.scale] is not None:
        arguments["softmax_scale"] = SCALES[case.scale]
    if PRECISIONS[case.precision]:
        arguments["precision"] = PRECISIONS[case.precision]
    if case.batch_invariant == "yes":
        arguments["batch_invariant"] = True
    ranges = None
    if case.ranges != "none":
        one_for_all = not packed and SEEDS.random() < 0.5
        ranges = _ranges(case, 1 if one_for_all else entries["q"], sizes["q"], places).to(device)
        arguments["ranges"] = ranges[0] if packed else ranges.unsqueeze(1)
    sinks = None
    if case.sinks != "none":
        sinks = 2 * torch.randn(heads[0], generator=generator, device=device)
        sinks[::2] = -torch.inf if case.sinks == "some -inf" else sinks[::2]
        arguments["sinks"] = sinks = sinks.to(dtype) if case.sinks == "of q's type" else sinks
    offsets = {}
    if nested:
        for side in "qk":
            lengths = torch.tensor(counts[side], device=device) if used[side] else None
            offsets[side] = torch.tensor(begins[side], device=device), lengths
    room = len(table[0]) * page if page else sizes["k"]
    short = page or "seqused_k" in names
    given = Given.of(case, (batch, heads[0], sizes["q"], room), counts["k"], short, dtype, device, generator)
    seen = [_sees(case, place, ranges) for place in places]
    if given.bias is not None and not packed:
        given.poison_bias([(place.queries[1], pairs) for place, pairs in zip(places, seen, strict=True)])
    arguments |= given.arguments()
    sequences = [
        Sequence(
            place.taken(tensors[0], "q"),
            *(
                _numbers(place.taken(x, "k"), scales[name][number] if scales else None)
                for name, x in zip("kv", tensors[1:], strict=True)
            ),
            pairs,
            sinks,
            SCALES[case.scale] or int(case.head_dim) ** -0.5,
            case.element == "fp32" and case.precision == "high",
        )
        for number, (place, pairs) in enumerate(zip(places, seen, strict=True))
    ]
    if not (packed and (given.mask is not None or given.bias is not None)):
        sequences = [
            given.changed(sequence, number, place.queries[1])
            for number, (sequence, place) in enumerate(zip(sequences, places, strict=True))
        ]
    return Call(case, *tensors, arguments, places, sequences, given, offsets)


def _layouts(case: Case) -> dict[str, Layout]:
    """Of q, k and v. What is narrower than another has columns of NaN behind it, up to a multiple of 8."""
    widest = max(case.widths.values())

    def wide(layout: Layout, width: int) -> Layout:
        more = 0 if width == widest else -(-widest // 8) * 8 - width
        return replace(layout, columns=layout.columns + more)

    layouts = zip("qkv", LAYOUTS["mixed" if case.layout == SHARED else case.layout], strict=True)
    return {name: wide(layout, case.widths[name]) for name, layout in layouts}


def _in_pages(counts: list[int], most: int, used: bool, page: int):
    """A table of pages, how many keys count then, and how many pages there are of which size."""
    width = -(-most // page)
    if not used:
        counts = [width * page] * len(counts)
    order = list(range(len(counts) * width + 2))
    SEEDS.shuffle(order)
    # What is behind a sequence's last page is no page at all.
    table = torch.full((len(counts), width + used), -1, dtype=torch.int32).random_(-7, 2 * len(order))
    for sequence, n in enumerate(counts):
        for column in range(-(-n // page)):
            table[sequence, column] = order.pop()
    return table, counts, len(counts) * width + 2, page


def _numbers(rows: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """(heads, rows, head_dim); of codes in float32. scale: (heads,)."""
    if rows.element_size() > 1:
        return rows
    return rows.float() * (1 if scale is None else scale[:, None, None])


def _poison(tensor: torch.Tensor, places: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Makes NaN of the rows that are none of these; one that is repeated, with stride 0, is one."""
    counts = torch.zeros(tensor.shape[0], tensor.shape[2], dtype=torch.bool, device=tensor.device)
    for place in places:
        counts[place] = True
    for dim in range(4):
        if tensor.stride(dim) == 0:
            tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
            if dim in (0, 2):
                counts = counts.any(dim // 2, keepdim=True)
    if tensor.element_size() == 1:
        tensor.view(torch.uint8).transpose(1, 2)[~counts] = 0x7F  # the code of NaN
    else:
        tensor.transpose(1, 2)[~counts] = torch.nan


def _ranges(case: Case, entries: int, rows: int, places: list[Place]) -> torch.Tensor:
    """(entries, rows, R, 2), of each sequence's own keys; what rows of no sequence have is of no matter."""
    kind, count = KINDS[case.ranges], SEEDS.randint(1, 4)
    found = anywhere((entries, rows, count), 1000)[:, 0].to(torch.int32)
    for place in places:
        entry, row = place.queries
        own = kind((1, len(row), count), max(1, len(place.keys[0])))[0, 0]
        found[entry.cpu() * (entries > 1), row.cpu()] = own.to(torch.int32)
    return found


def _sees(case: Case, place: Place, ranges: torch.Tensor | None) -> torch.Tensor:
    """(queries, keys), as docs/api.md says it; keys are counted from the first, left padding included."""
    (entry, row), keys = place.queries, len(place.keys[0])
    key = torch.arange(keys, device=row.device)
    seen = MASKS[case.mask].visible(len(row), keys, row.device) & (key >= place.leftpad)
    if ranges is not None:
        start, end = ranges[entry * (len(ranges) > 1), row].long().unsqueeze(-1).unbind(2)
        seen &= ((start <= key) & (key < end)).any(1)
    return seen


def check_forward(kernel, case: Case) -> None:
    """out and lse of a case, or the sentence that refuses it."""
    call = make_call(case, kernel.device)
    inputs, options = call.inputs(), {}
    if case.out == "given":
        layout, generator = Layout("bshd", columns=8), torch.Generator(kernel.device).manual_seed(0)
        options["out"] = call.given(layout.make(call.shape_of_out, call.q.dtype, kernel.device, generator))
    if sentences := refusals(asdict(case), kernel.family):
        _assert_refused(sentences, lambda: call.results(inputs, kernel.family, **options))
        return
    with poisoned(), call.precision_arrives():
        out, lse = call.results(inputs, kernel.family, **options)
    assert (lse.dtype, lse.device, lse.is_contiguous()) == (torch.float32, out.device, True)
    if "out" in options:
        assert out is options["out"]
    else:
        _assert_alike(out, _like_out(inputs[0], case.widths["v"]), case)
    out, lse = call.entries(out), call.entries(lse)
    oracle, yardstick = (
        (torch.zeros_like(out, dtype=dtype), torch.full_like(lse, -torch.inf, dtype=of_lse))
        for dtype, of_lse in ((torch.float64, torch.float64), (call.q.dtype, torch.float32))
    )
    for place, sequence in zip(call.places, call.sequences, strict=True):
        for whole, rows in zip(oracle, sequence.forward(torch.float64), strict=True):
            place.put(whole, "q", rows)
        for whole, rows in zip(yardstick, sequence.rounded_forward(), strict=True):
            place.put(whole, "q", rows)
    assert (out[oracle[1].isneginf()] == 0).all()
    low = (oracle[1] < LOWEST) & oracle[1].isfinite()
    if low.any():  # of biases that are the lowest number: so is the LSE, about
        assert ((lse < LOWEST) & lse.isfinite())[low].all()
        lse = lse.where(~low, oracle[1].float())
    assert_within_rule("out", out, _with_rounding(oracle[0], out.dtype, yardstick[0]), oracle[0], call.norms)
    allowed = (yardstick[1] - oracle[1]).abs().maximum(resolution(oracle[1]))
    assert_within_rule("lse", lse, oracle[1] + allowed, oracle[1], call.norms)


def check_gradients(kernel, case: Case) -> None:
    """dq, dk, dv, dsinks and dbias of a case, or the sentence that refuses it."""
    call = make_call(case, kernel.device)
    tensors = {"q": call.q, "k": call.k, "v": call.v}
    leaves = [x.detach().requires_grad_() for x in call.inputs()]
    options = {"deterministic": True} if case.deterministic == "yes" else {}
    others = [name for name in ("sinks", "bias") if getattr(case, name) != "none"]
    tensors |= {name: call.arguments[name] for name in others}
    options |= {name: call.arguments[name].detach().requires_grad_() for name in others}
    wanted = leaves + [options[name] for name in others]
    if sentences := refusals(asdict(case), kernel.family):
        _assert_refused(sentences, lambda: call.results(leaves, kernel.family, **options))
        return
    generator = torch.Generator(kernel.device).manual_seed(SEEDS.getrandbits(31))
    sizes = (call.shape_of_out, call.q.dtype), ((*call.q.shape[:3], 1), torch.float32)
    dout, dlse = (GRADIENT_LAYOUTS[case.dout].make(*size, kernel.device, generator) for size in sizes)
    for tensor in (dout, dlse):
        _poison(tensor, [place.queries for place in call.places])
    dlse = dlse.squeeze(-1)
    # Of the mode that poisons new memory, its option alone decides whether gradients are deterministic.
    told = patch("torch.are_deterministic_algorithms_enabled", return_value=False)
    with poisoned(), told, call.precision_arrives():
        results = call.results(leaves, kernel.family, **options)
        incoming = call.given(dout), dlse[0] if call.is_packed else dlse
        asked = {"both": slice(0, 2), "dout": slice(0, 1), "dlse": slice(1, 2)}[case.given]
        found = torch.autograd.grad(results[asked], wanted, incoming[asked])
    dout = torch.zeros_like(dout) if case.given == "dlse" else dout
    dlse = torch.zeros_like(dlse) if case.given == "dout" else dlse
    for name, gradient, leaf in zip(tensors, found, wanted, strict=True):
        _assert_alike(gradient, leaf, case, has_its_strides=name != "bias")
    oracle, yardstick, rounded = (
        {name: torch.zeros(x.shape, dtype=torch.float64, device=x.device) for name, x in tensors.items()}
        for _ in range(3)
    )
    low = {name: torch.zeros_like(x) for name, x in oracle.items()}
    has_low = case.element == "fp16" and case.bias.startswith("lowest")
    variances = {name: torch.zeros_like(oracle[name]) for name in others}
    for number, (place, sequence) in enumerate(zip(call.places, call.sequences, strict=True)):
        given = place.taken(dout, "q"), place.taken(dlse, "q")
        computed = (
            sequence.gradients(*given, torch.float64),
            sequence.gradients(*given, call.q.dtype),
            sequence.gradients_of_rounded_out(*given),
            *([sequence.resolution_of_gradients(*given)] if has_low else []),
        )
        of_sinks, of_bias = sequence.chances(given[0]) if others else (None, None)
        if "sinks" in others:
            variances["sinks"] += of_sinks
        if "bias" in others and tensors["bias"].shape[3] == 1:  # else its gradient has many numbers
            call.scores.add_to_bias(variances["bias"], number, place.queries[1], of_bias)
        for whole, parts in zip((oracle, yardstick, rounded, low), computed, strict=False):
            for name, part in zip(whole, parts, strict=False):  # slopes alone have no gradient
                if name == "sinks":
                    whole[name] += part
                elif name == "bias":
                    call.scores.add_to_bias(whole[name], number, place.queries[1], part)
                else:
                    place.put(whole[name], name, part)
    for name, gradient in zip(oracle, found, strict=True):
        ours, right = gradient if name in others else call.entries(gradient), oracle[name]
        dtype = call.q.dtype if name == "bias" else ours.dtype  # to which a bias of float32 is rounded
        yard = _with_rounding(right, dtype, yardstick[name].to(dtype), rounded[name].to(dtype))
        yard += low[name]
        if name in others:  # a few sums, of which the error is chance
            yard += 2 * variances[name].sqrt()
        assert_within_rule(f"d{name}", ours, yard, right, call.norms)


def _with_rounding(oracle: torch.Tensor, dtype: torch.dtype, *yardsticks: torch.Tensor) -> torch.Tensor:
    """Errs as the worst of these and as rounding does: few numbers may be exact by chance."""
    errors = [(x - oracle).abs() for x in yardsticks]
    return oracle + torch.stack([*errors, oracle.abs() * EPSILONS[dtype]]).amax(0)


def _like_out(q: torch.Tensor, width: int) -> torch.Tensor:
    """q where it is so wide; else rows without gaps, in memory one after another as q's are."""
    if q.shape[-1] == width:
        return q
    order = sorted(range(q.dim() - 1), key=lambda dim: -q.stride(dim))
    return torch.empty_permuted((*q.shape[:-1], width), (*order, q.dim() - 1), dtype=q.dtype, device=q.device)


def _assert_alike(result: torch.Tensor, given: torch.Tensor, case: Case, has_its_strides=True) -> None:
    assert (result.shape, result.dtype, result.device) == (given.shape, given.dtype, given.device)
    if case.nested == "no" and has_its_strides:
        assert result.stride() == torch.empty_like(given).stride()


def _assert_refused(sentences: list[str], call) -> None:
    words = "|".join(f".*{sentence}" for sentence in sentences)
    with pytest.raises(ValueError, match=rf"^flash_cute\.forward(_varlen)?: ({words})"):
        call()
