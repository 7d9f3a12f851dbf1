"""append_kv's kernel, run by the host a thread after the other, with the launch that a GPU gets."""

from __future__ import annotations

import pytest
import torch
from support.appends import (
    HEADS,
    LAYOUTS,
    NEW_ROWS,
    PLACES,
    ROTARIES,
    WIDTHS,
    Append,
    assert_appended,
    make_append,
    pairs,
    without_pages,
)
from support.cases import ALL_DTYPES


def run(kernel, call, dtype) -> torch.Tensor | None:
    """As csrc/append_cuda.cpp sets the kernel's parameters."""
    given = call.arguments
    k, q = given["k"], given.get("q")
    packed = k.dim() == 3

    def view(x):
        batch, head, row = (0, x.stride(1), x.stride(0)) if x.dim() == 3 else x.stride()[:3]
        return x.data_ptr(), batch, head, row

    rows = {"rows_k": k.shape[0 if packed else 2], "rows_q": 0 if q is None else q.shape[0 if packed else 2]}
    table, cache = given.get("block_table"), given["k_cache"]
    values = rows | {
        "entries": 1 if packed else k.shape[0],
        "rows": max(rows.values()),
        "heads_kv": k.shape[1],
        "sequences": len(given.get("cache_seqlens", ())),
        "pages": cache.shape[0],
        "page_size": cache.shape[2],
        "head_dim": k.shape[-1],
        "head_dim_v": given["v"].shape[-1],
        **{name: view(given[name]) for name in ("k", "v", "k_cache", "v_cache")},
        **{
            name: given[name].data_ptr()
            for name in (
                "cu_seqlens",
                "cache_seqlens",
                "block_table",
                "slots",
                "rotary_cos",
                "rotary_sin",
                "positions",
            )
            if name in given
        },
    }
    values["is_fp8"] = cache.element_size() == 1
    for name in {"k_scale", "v_scale"} & given.keys():
        scale = given[name].expand(*[1] * (2 - given[name].dim()), *given[name].shape)
        steps = [0 if size == 1 else step for size, step in zip(scale.shape, scale.stride(), strict=True)]
        values[name] = scale.data_ptr(), *steps
    if table is not None:
        values |= {"width": table.shape[1], "table_stride": table.stride(0)}
    if "slots" in given:
        values["slot_count"] = len(given["slots"])
    if "positions" in given and not packed:
        values["positions_stride"] = given["positions"].stride(0)
    rotated = None
    if q is not None:
        rotated = torch.full_like(q, torch.nan)
        cos = given["rotary_cos"]
        values |= {"heads_q": q.shape[1], "q": view(q), "rotated_q": view(rotated)}
        values |= {"rotary_dim": 2 * cos.shape[1], "rotary_length": len(cos)}
        values |= {"rotary_is_fp32": cos.dtype == torch.float32}
        values["rotary_interleaved"] = given["rotary_interleaved"]
    kernel.append_kv(dtype, values)
    return rotated


@pairs(
    place=PLACES,
    rotary=ROTARIES,
    layout=LAYOUTS,
    dtype=list(ALL_DTYPES),
    head_dim=[16, 64, 72, 128, 256],
    heads=HEADS,
    rows=NEW_ROWS,
)
def test_rows(kernel_on_host, place, rotary, layout, dtype, head_dim, heads, rows):
    call = make_append(torch.device("cpu"), place, rotary, layout, ALL_DTYPES[dtype], head_dim, heads, rows)
    assert_appended(call, run(kernel_on_host, call, dtype))


@pairs(place=PLACES, rotary=ROTARIES, layout=LAYOUTS, dtype=list(ALL_DTYPES), widths=WIDTHS)
def test_two_widths(kernel_on_host, place, rotary, layout, dtype, widths):
    device, (head_dim, head_dim_v) = torch.device("cpu"), widths
    call = make_append(device, place, rotary, layout, ALL_DTYPES[dtype], head_dim, head_dim_v=head_dim_v)
    assert_appended(call, run(kernel_on_host, call, dtype))


@pairs(
    place=PLACES,
    rotary=ROTARIES[1:],
    page_size=[1, 5, 64],
    wide_table=[False, True],
    positions=[False, True],
    dtype=list(ALL_DTYPES),
)
def test_rotary(kernel_on_host, place, rotary, page_size, wide_table, positions, dtype):
    call = make_append(
        torch.device("cpu"), place, rotary, page_size=page_size, wide_table=wide_table, positions=positions,
        head_dim=32, dtype=ALL_DTYPES[dtype],
    )  # fmt: skip
    assert_appended(call, run(kernel_on_host, call, dtype))


@pairs(
    place=PLACES,
    rotary=ROTARIES,
    layout=LAYOUTS,
    dtype=list(ALL_DTYPES),
    head_dim=[16, 64, 80],
    heads=HEADS,
    scale=["none", "one", "of heads", "of sequences and heads"],
)
def test_codes(kernel_on_host, place, rotary, layout, dtype, head_dim, heads, scale):
    if place == "slots" and scale == "of sequences and heads":
        scale = "of heads"
    call = make_append(
        torch.device("cpu"), place, rotary, layout, ALL_DTYPES[dtype], head_dim, heads, scale=scale,
        stored=torch.float8_e4m3fn,
    )  # fmt: skip
    assert_appended(call, run(kernel_on_host, call, dtype))


@pytest.mark.parametrize("place", ["padded in pages", "packed in pages"])
def test_sequences_without_pages(kernel_on_host, place):
    """Their rows are not written over another's."""
    call = without_pages(make_append(torch.device("cpu"), place, "halves", rows=40, dtype=torch.float32))
    assert_appended(call, run(kernel_on_host, call, "fp32"))


def test_slots_of_no_token(kernel_on_host):
    """They write nothing, although an empty tensor has no address, as one that is not given."""
    call = make_append(torch.device("cpu"), "slots", "halves", dtype=torch.float32)
    call.arguments["slots"] = call.arguments["slots"][:0]
    assert_appended(call, run(kernel_on_host, call, "fp32"))


@pytest.mark.parametrize(("pages", "page_size"), [(2**30, 5), (3, 2**30)], ids=["pages", "rows"])
def test_slots_beyond_32_bits(kernel_on_host, pages, page_size):
    """And below, in a cache of which many pages, or many rows of a page, are one place in memory."""
    few, many = sorted((pages, page_size))
    caches = [torch.zeros((few, 1, 1, 16) if few == pages else (1, 1, few, 16)) for _ in range(2)]
    apart, alike = torch.arange(few), torch.tensor([0, many - 1, *torch.randint(0, many, (few - 2,))])
    page, row = (apart, alike) if few == pages else (alike, apart)
    slots = page * page_size + row
    assert slots.min() < 2**31 <= slots.max()
    k, v = (torch.randn(few, 1, 16) for _ in range(2))
    k_cache, v_cache = (cache.expand(pages, 1, page_size, 16) for cache in caches)
    given = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slots": slots}
    run(kernel_on_host, Append(given, ()), "fp32")
    for cache, rows in zip(caches, (k, v), strict=True):
        assert torch.equal(cache.flatten(0, 2), rows.flatten(0, 1))


def test_many_sequences(kernel_on_host):
    """Offsets of more sequences than one round of the search asks for, many of them empty."""
    counts = torch.randint(0, 3, (300,))
    offsets = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
    k, v = (torch.randn(int(offsets[-1]) + 2, 1, 16) for _ in range(2))
    caches = torch.zeros(300, 1, 4, 16), torch.zeros(300, 1, 4, 16)
    call = make_append(torch.device("cpu"), "packed", dtype=torch.float32)
    call.arguments = {"k": k, "v": v, "k_cache": caches[0], "v_cache": caches[1], "cu_seqlens": offsets}
    call.arguments["cache_seqlens"] = torch.randint(0, 4, (300,), dtype=torch.int32)
    call.before = tuple(x.clone() for x in caches)
    assert_appended(call, run(kernel_on_host, call, "fp32"))


def test_lengths_that_make_no_sense(kernel_on_host):
    for place in PLACES:
        call = make_append(torch.device("cpu"), place, "halves", dtype=torch.float32)
        if place == "slots":
            rows = call.before[0].shape[0] * call.before[0].shape[2]
            extreme = torch.tensor([-(2**62), 2**62, -1, rows]).repeat(99)
            call.arguments["slots"].copy_(extreme[: len(call.arguments["slots"])])
        else:
            lengths = torch.tensor([-(2**31), 2**31 - 1, -40, 2**30, -5], dtype=torch.int32)
            call.arguments["cache_seqlens"].copy_(lengths)
        run(kernel_on_host, call, "fp32")
        assert torch.equal(call.arguments["k_cache"], call.before[0])
