"""New rows of a cache on the CPU, rotated on the way; see forward.py for the call of C++."""

from __future__ import annotations

import torch

from flash_cute import lengths
from flash_cute.options import FP8


def places_of(x, cache_seqlens, cu_seqlens) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the rows of k or q, entry by entry: which sequence has each, -1 for none, and its place in it."""
    device = x.device
    if cu_seqlens is None:
        sequence = torch.arange(x.shape[0], device=device).repeat_interleave(x.shape[2])
        place = torch.arange(x.shape[2], device=device).repeat(x.shape[0])
    else:
        sequence, place = lengths.sequences_of_rows(x.shape[0], cu_seqlens)
    if cache_seqlens is not None and len(cache_seqlens) > 0:
        place = place + cache_seqlens[sequence]
    return sequence, place


def _rows_of_cache(k, k_cache, cache_seqlens, block_table, slots, cu_seqlens):
    """Of each row of k: page, and row of it, that it goes to; -1 for none."""
    pages, page_size = k_cache.shape[0], k_cache.shape[2]
    if slots is not None:
        slots = torch.cat((slots, slots.new_full((k.shape[0] - slots.shape[0],), -1)))
        written = (slots >= 0) & (slots < pages * page_size)
        return (slots // page_size).where(written, -1), slots % page_size
    sequence, place = places_of(k, cache_seqlens, cu_seqlens)
    room = page_size * (1 if block_table is None else block_table.shape[1])
    written = (sequence >= 0) & (place >= 0) & (place < room)
    if block_table is None:
        return sequence.where(written, -1), place
    sequence, place = (x.where(written, 0) for x in (sequence, place))
    if len(block_table) == 0:
        return sequence - 1, place
    page = block_table[sequence, place // page_size].long()
    return page.where(written & (page < pages), -1), place % page_size


def turned_by(x, cos, sin, interleaved: bool) -> torch.Tensor:
    """(rows, heads, head_dim), where cos and sin are (rows, rotary_dim / 2)."""
    columns = 2 * cos.shape[-1]
    turning = x[..., :columns].float()
    cos, sin = cos.float().unsqueeze(1), sin.float().unsqueeze(1)
    a, b = (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.chunk(2, -1)
    turned = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((turned.to(x.dtype), x[..., columns:]), -1)


def _codes_of(numbers: torch.Tensor, scale: torch.Tensor | None, sequence: torch.Tensor) -> torch.Tensor:
    """(rows, heads, head_dim) as bits of e4m3, uint8; sequence: of each row."""
    if scale is not None:
        scale = scale[sequence] if scale.dim() == 2 else scale
        numbers = numbers.float() / (scale if scale.dim() == 0 else scale.unsqueeze(-1))
    most = torch.finfo(torch.float8_e4m3fn).max
    return numbers.float().clamp(-most, most).to(torch.float8_e4m3fn).view(torch.uint8)


def append_kv(k, v, k_cache, v_cache, cache_seqlens=None, *, block_table=None, slots=None,
              cu_seqlens=None, q=None, rotary_cos=None, rotary_sin=None, rotary_interleaved=False,
              positions=None, k_scale=None, v_scale=None) -> torch.Tensor:  # fmt: skip
    """flash_cute::append_kv: q rotated, or an empty tensor."""
    places = {"block_table": block_table, "slots": slots, "cu_seqlens": cu_seqlens}
    rotary = {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "rotary_interleaved": rotary_interleaved}
    torch.ops.flash_cute._append_kv_cpu.default(
        k, v, k_cache, v_cache, cache_seqlens, **places, q=q, **rotary, positions=positions,
        k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip

    def rows(x: torch.Tensor) -> torch.Tensor:
        return x if x.dim() == 3 else x.transpose(1, 2).flatten(0, 1)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        if rotary_cos is None:
            return rows(x)
        at = places_of(x, cache_seqlens, cu_seqlens)[1] if positions is None else positions.flatten()
        at = at.clamp(0, rotary_cos.shape[0] - 1)
        return turned_by(rows(x), rotary_cos[at], rotary_sin[at], rotary_interleaved)

    page, row = _rows_of_cache(k, k_cache, cache_seqlens, **places)
    written = page >= 0
    of_fp8 = k_cache.dtype in FP8
    new_k = rotated(k.float() if of_fp8 else k)
    for cache, new, scale in ((k_cache, new_k, k_scale), (v_cache, rows(v), v_scale)):
        new = new[written]
        if of_fp8:
            sequence = places_of(k, cache_seqlens, cu_seqlens)[0] if slots is None else page
            cache, new = cache.view(torch.uint8), _codes_of(new, scale, sequence[written])
        cache[page[written], :, row[written]] = new
    if q is None:
        return k.new_empty(0)
    result = torch.empty_like(q)
    turned = rotated(q)
    return result.copy_(turned if q.dim() == 3 else turned.unflatten(0, q.shape[0:3:2]).transpose(1, 2))
