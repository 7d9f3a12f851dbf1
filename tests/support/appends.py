"""Calls of append_kv by name, and what they should do, a row at a time in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from support.cases import SEEDS, each_pair
from support.tolerance import assert_within_rule

HEADS = {"4 of 2": (4, 2), "3 of 1": (3, 1), "2 of 2": (2, 2), "40 of 40": (40, 40)}
PLACES = ["padded", "padded in pages", "packed", "packed in pages", "slots"]
ROTARIES = ["none", "halves", "interleaved", "halves of some columns", "interleaved of some columns"]
LAYOUTS = ["heads first", "rows first", "side by side"]
NEW_ROWS = {"1": 1, "5": 5, "40": 40}
WIDTHS = {"64 and 32": (64, 32), "24 and 80": (24, 80), "192 and 128": (192, 128), "16 and 256": (16, 256)}


def pairs(**axes) -> pytest.MarkDecorator:
    """Parametrizes a test over each pair of the axes' values, on a GPU, too: the reference is slow."""
    named = {
        axis: values if isinstance(values, dict) else {str(value): value for value in values}
        for axis, values in axes.items()
    }
    rows = sorted(each_pair(*named.values()))
    values = [[of_axis[name] for of_axis, name in zip(named.values(), row, strict=True)] for row in rows]
    return pytest.mark.parametrize(list(named), values, ids=["-".join(row) for row in rows])


@dataclass
class Append:
    """The arguments of a call; before: the caches as they were."""

    arguments: dict
    before: tuple[torch.Tensor, torch.Tensor]


def make_cache(
    pages, heads, rows, head_dim, dtype, device, layout, head_dim_v=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v as (pages, heads, rows, head_dim)."""
    widths = head_dim, head_dim_v or head_dim
    if layout == "heads first":
        return tuple(torch.randn(pages, heads, rows, width, device=device).to(dtype) for width in widths)
    if layout == "rows first":
        made = (torch.randn(pages, rows, heads, width, device=device).to(dtype) for width in widths)
        return tuple(x.transpose(1, 2) for x in made)
    both = torch.randn(pages, heads, rows, sum(widths), device=device).to(dtype)
    return both[..., :head_dim], both[..., head_dim:]


def make_append(
    device, place="padded", rotary="none", layout="heads first", dtype=torch.bfloat16, head_dim=64,
    heads=(4, 2), rows=5, page_size=16, wide_table=False, positions=False, head_dim_v=None, scale="none",
    stored=None,
) -> Append:  # fmt: skip
    """Sequences of unequal lengths before the call; some rows of some have no room.

    stored: the type of the caches, if not that of the rows.
    """
    batch, (heads_q, heads_kv) = 5, heads
    width, capacity = 4, 4 * page_size
    if place.startswith("padded"):  # all of them must fit into an empty cache
        rows = min(rows, capacity)
    counts = [rows] * batch if place.startswith("padded") else [SEEDS.randint(0, rows) for _ in range(batch)]
    total = sum(counts) + (0 if place.startswith("padded") else 3)  # the last three are of no sequence
    shape = (batch, heads_kv, rows) if place.startswith("padded") else (total, heads_kv)
    widths = head_dim, head_dim_v or head_dim
    k, v = (torch.randn(*shape, width, device=device).to(dtype) for width in widths)
    paged = place.endswith("pages")
    pages = batch * width + 2 if paged or place == "slots" else batch
    page_rows = page_size if paged or place == "slots" else capacity
    of_codes = torch.float8_e4m3fn if stored else dtype
    cache = make_cache(pages, heads_kv, page_rows, head_dim, of_codes, device, layout, head_dim_v)
    cache = tuple(x.view(stored or dtype) for x in cache)

    def whole(values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=device)

    arguments = {"k": k, "v": v, "k_cache": cache[0], "v_cache": cache[1]}
    if scale != "none":
        size = {"one": (), "of heads": (heads_kv,), "of sequences and heads": (batch, heads_kv)}[scale]
        arguments |= {f"{name}_scale": torch.rand(size, device=device) / 9 + 0.003 for name in "kv"}
    if place == "slots":
        slots = torch.randperm(pages * page_rows)[: total - 2].tolist()
        arguments["slots"] = whole([-1 if i % 3 == 1 else slot for i, slot in enumerate(slots)], torch.int64)
    else:
        lengths = [0, capacity - 2, SEEDS.randint(0, capacity), capacity, SEEDS.randint(0, capacity)]
        arguments["cache_seqlens"] = whole(lengths)
        if place.startswith("packed"):
            offsets = [0, *torch.tensor(counts).cumsum(0).tolist()]
            arguments["cu_seqlens"] = whole(offsets)
        if paged:
            arguments["block_table"] = (
                torch.randperm(pages)[: batch * width].view(batch, width).int().to(device)
            )
    if rotary != "none":
        columns = head_dim if "some" not in rotary else head_dim // 2
        shape = 3 * capacity, columns // 16 * 8 or 8
        table_type = torch.float32 if wide_table else dtype
        angles = torch.rand(shape, device=device) * 7
        arguments |= {"rotary_cos": angles.cos().to(table_type), "rotary_sin": angles.sin().to(table_type)}
        arguments["rotary_interleaved"] = rotary.startswith("interleaved")
        of_tokens = (total,) if k.dim() == 3 else (batch, rows)
        if positions or place == "slots":
            arguments["positions"] = torch.randint(-1, shape[0] + 1, of_tokens, device=device)
        rows_q = of_tokens[-1] if k.dim() == 3 or positions else SEEDS.randint(1, 2 * rows)
        shape = (total, heads_q) if k.dim() == 3 else (batch, heads_q, rows_q)
        arguments["q"] = torch.randn(*shape, head_dim, device=device).to(dtype)
    return Append(arguments, tuple(x.clone() for x in cache))


def without_pages(call: Append) -> Append:
    """The call, where pages of some sequences, all of one of them, are none that there are."""
    table, pages = call.arguments["block_table"], len(call.before[0])
    table[0] = -1
    table[1, ::2] = pages
    table[2:4, 1:] = torch.tensor([[-(2**31)], [2**31 - 1]])
    call.arguments["cache_seqlens"].copy_(torch.tensor([0, 3, 7, 9, 5]))
    return call


def turned_row(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """(heads, head_dim) in float64, by the pairs of columns one after the other."""
    x, half = x.double(), len(cos)
    turned = x.clone()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = cos[i].double(), sin[i].double()
        turned[:, a], turned[:, b] = x[:, a] * c - x[:, b] * s, x[:, b] * c + x[:, a] * s
    return turned


def expected(call: Append) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """float64: the caches after the call, and the rotated q, NaN where it has no meaning."""
    given = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in call.arguments.items()}
    caches = [numbers_of(x) for x in call.before]
    k, v, q, slots = (given.get(name) for name in ("k", "v", "q", "slots"))
    page_size, packed = caches[0].shape[2], k.dim() == 3
    of_sequence = {}
    if "cu_seqlens" in given:
        offsets = given["cu_seqlens"].tolist()
        for sequence in range(len(offsets) - 1):
            of_sequence |= {
                t: (sequence, t - offsets[sequence]) for t in range(*offsets[sequence : sequence + 2])
            }

    def place(entry: int, row: int) -> tuple[int, int] | None:
        """The sequence of a row, and its place there."""
        sequence, row = of_sequence.get(row, (None, None)) if packed else (entry, row)
        return None if sequence is None else (sequence, given["cache_seqlens"][sequence].item() + row)

    def in_cache(entry: int, row: int) -> tuple[int, int] | None:
        if slots is not None:
            return divmod(slots[row].item(), page_size) if row < len(slots) and slots[row] >= 0 else None
        found = place(entry, row)
        if found is None:
            return None
        if "block_table" not in given:
            return found if found[1] < page_size else None
        (column, row), table = divmod(found[1], page_size), given["block_table"]
        page = table[found[0], column].item() if column < table.shape[1] else -1
        return (page, row) if 0 <= page < len(caches[0]) else None

    def turned(x: torch.Tensor, entry: int, row: int) -> torch.Tensor:
        if "rotary_cos" not in given:
            return x.double()
        if "positions" in given:
            at = given["positions"][row] if packed else given["positions"][entry, row]
        else:
            found = place(entry, row)
            if found is None:
                return torch.full_like(x.double(), torch.nan)
            at = found[1]
        at = min(max(int(at), 0), len(given["rotary_cos"]) - 1)
        return turned_row(
            x, given["rotary_cos"][at], given["rotary_sin"][at], given.get("rotary_interleaved", False)
        )

    def of_row(x: torch.Tensor, entry: int, row: int) -> torch.Tensor:
        return x[row] if packed else x[entry, :, row]

    def scaled(name: str, x: torch.Tensor, entry: int, row: int) -> torch.Tensor:
        """(heads, head_dim), as codes have it."""
        if call.before[0].element_size() > 1:
            return x
        scale = given.get(f"{name}_scale", torch.ones(()))
        if scale.dim() == 2:
            scale = scale[place(entry, row)[0]]
        return (x / (scale if scale.dim() == 0 else scale[:, None]).double()).clamp(-448, 448)

    entries = 1 if packed else k.shape[0]
    for entry in range(entries):
        for row in range(k.shape[0 if packed else 2]):
            if (found := in_cache(entry, row)) is None:
                continue
            new = turned(of_row(k, entry, row), entry, row), of_row(v, entry, row).double()
            for cache, name, x in zip(caches, "kv", new, strict=True):
                cache[found[0], :, found[1]] = scaled(name, x, entry, row)
    if q is None:
        return *caches, None
    rotated = torch.empty_like(q, dtype=torch.float64)
    for entry in range(entries):
        for row in range(q.shape[0 if packed else 2]):
            of_row(rotated, entry, row).copy_(turned(of_row(q, entry, row), entry, row))
    return *caches, rotated


def numbers_of(cache: torch.Tensor) -> torch.Tensor:
    """In float64, those of codes without their scales."""
    cache = cache.cpu()
    return (cache.view(torch.float8_e4m3fn) if cache.element_size() == 1 else cache).double()


def assert_appended(call: Append, rotated: torch.Tensor | None) -> None:
    """Do the caches, and the rotated q, hold what they should?"""
    k_cache, v_cache, of_q = expected(call)
    results = {}
    if call.before[0].element_size() == 1:
        for name, oracle in (("k_cache", k_cache), ("v_cache", v_cache)):
            ours = numbers_of(call.arguments[name])  # half a unit in the last place, and float32's rounding
            torch.testing.assert_close(ours, oracle, rtol=2**-4 + 1e-4, atol=2**-10 + 1e-6)
    else:
        assert torch.equal(call.arguments["v_cache"].cpu().double(), v_cache)
        results = {"k_cache": (call.arguments["k_cache"], k_cache)}
    if of_q is None:
        assert rotated is None
    else:
        assert rotated.dtype == call.arguments["q"].dtype
        assert rotated.stride() == torch.empty_like(call.arguments["q"]).stride()
        known = ~of_q.isnan()
        results["q"] = rotated.cpu().where(known, 0), of_q.where(known, 0)
    for name, (ours, oracle) in results.items():
        assert_within_rule(name, ours.cpu(), oracle.to(ours.dtype), oracle)
    unchanged = k_cache == numbers_of(call.before[0])
    assert torch.equal(
        numbers_of(call.arguments["k_cache"])[unchanged], numbers_of(call.before[0])[unchanged]
    )
