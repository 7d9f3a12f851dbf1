"""The CPU's kernels: attention and its gradients, by PyTorch's own CPU flash attention.

They call C++ for its checks, and for what it computes in the inputs' own type (csrc/forward_cpu.cpp); the
rest is computed here, in float32. Called from C++, they could not raise: of an exception, a KeyboardInterrupt
too, nothing passes through the stable ABI but that there was one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flash_cute import (
    _C,  # noqa: F401  importing it registers the operators
    key_ranges,
)
from flash_cute.sinks import gradient as gradient_of_sinks
from flash_cute.sinks import with_sinks
from flash_cute.windows import Window, in_ranges, visible

_ops = torch.ops.flash_cute
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Of what is allocated here, whatever torch.set_default_dtype says.
_FLOAT = {"dtype": torch.float32, "device": "cpu"}

# Queries per call with a mask: bounds its memory, and a call gets only the keys that its queries can see.
_MASKED_ROWS = 512


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args, sinks=None, **options):
    """flash_cute::_forward: out like q, and lse, float32 (batch, heads_q, seqlen_q)."""
    results = _ops._forward_cpu.default(q, k, v, *args, sinks=sinks, **options)
    if results:
        return _with_sinks(tuple(results), sinks)
    return _forward(q, k, v, *args, sinks=sinks, **options)


def _with_sinks(results, sinks):
    return results if sinks is None else with_sinks(results, sinks)


def _gathered(cache: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
    """The rows of each sequence's pages, (batch, heads, max_pages * page_size, head_dim)."""
    pages = cache[block_table.long().clamp(0, cache.shape[0] - 1)]
    return pages.transpose(1, 2).flatten(2, 3)


def forward_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k=None, *args, **options):
    """flash_cute::_forward_varlen: out like q, and lse, float32 (heads_q, total_q)."""
    _ops._forward_varlen_cpu.default(q, k, v, cu_seqlens_q, cu_seqlens_k, *args, **options)
    return _forward(q, k, v, *args, **_offsets(cu_seqlens_q, cu_seqlens_k), **options)


def forward_out(q, k, v, out, causal=False, *, cu_seqlens_q=None, cu_seqlens_k=None, **options):
    """flash_cute::_forward_out: lse, after the result is written into out."""
    offsets = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    _ops._forward_out_cpu.default(q, k, v, out, causal, **offsets, **options)
    if cu_seqlens_q is None:
        result, lse = forward(q, k, v, causal, **options)
    else:
        result, lse = forward_varlen(q, k, v, causal=causal, **offsets, **options)
    out.copy_(result)
    return lse


def backward(*args, **options):
    """flash_cute::_backward: dq, dk, dv and dsinks like q, k, v and sinks."""
    _ops._backward_cpu.default(*args, **options)
    return _backward(*args, **options)


def backward_varlen(dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k=None, *args, **options):
    """flash_cute::_backward_varlen: likewise."""
    tensors = dout, dlse, q, k, v, out, lse
    _ops._backward_varlen_cpu.default(*tensors, cu_seqlens_q, cu_seqlens_k, *args, **options)
    return _backward(*tensors, *args, **_offsets(cu_seqlens_q, cu_seqlens_k), **options)


def _offsets(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor | None) -> dict[str, torch.Tensor]:
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    return {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}


def _forward(q, k, v, causal=False, *, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
             leftpad_k=None, sinks=None, block_table=None, batch_invariant=False, ranges=None,
             **options) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The forward, padded or packed (both cu_seqlens are given), of checked arguments."""
    if block_table is not None:
        k, v = _gathered(k, block_table), _gathered(v, block_table)
    mask = _scale_and_window(q, causal, **options)
    packed = cu_seqlens_q is not None
    if not packed and seqused_q is None and seqused_k is None and leftpad_k is None:
        return _with_sinks(_dense(q, k, v, *mask, ranges), sinks)

    out = torch.zeros_like(q)
    lse = torch.full(q.shape[1::-1] if packed else q.shape[:3], -torch.inf, **_FLOAT)
    cu_seqlens_k = None if k.dim() == 4 else cu_seqlens_k  # of a cache beside packed queries
    q, k, v, outs, lses = _entries(packed, q, k, v, out, lse)
    places = _places(q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k)
    for queries, keys, first in places:
        seen = key_ranges.of_sequence(ranges, queries, first)
        outs[queries], lses[queries] = _with_sinks(_part(q[queries], k[keys], v[keys], *mask, seen), sinks)
    return out, lse


def _backward(dout, dlse, q, k, v, out, lse, causal=False, *, cu_seqlens_q=None, cu_seqlens_k=None,
              seqused_q=None, seqused_k=None, leftpad_k=None, sinks=None, needs_dq=True, needs_dkv=True,
              ranges=None, deterministic=False,
              **options) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Likewise the backward; gradients that are not needed are empty."""
    mask = _scale_and_window(q, causal, **options)
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k
    gradients = tuple(torch.zeros_like(x) for x in (q, k, v))
    dout = torch.zeros_like(out) if dout is None else dout
    dlse = torch.zeros_like(lse) if dlse is None else dlse
    packed = cu_seqlens_q is not None
    dout, dlse, q, k, v, out, lse, dq, dk, dv = _entries(packed, dout, dlse, q, k, v, out, lse, *gradients)
    dense = all(tensor is None for tensor in lengths)
    dsinks = None if sinks is None else torch.zeros(q.shape[1], **_FLOAT)
    for queries, keys, first in [(..., ..., 0)] if dense else _places(q, k, *lengths):
        of_queries = [x[queries] for x in (dout, dlse, q, out, lse)]
        seen = ranges if dense else key_ranges.of_sequence(ranges, queries, first)
        dq[queries], dk[keys], dv[keys] = _gradients(*of_queries, k[keys], v[keys], *mask, seen)
        if sinks is not None:
            window = Window.of(of_queries[2].shape[2], k[keys].shape[2], *mask[1:])
            blind = _blind(window, seen)
            dsinks += gradient_of_sinks(*of_queries[:2], *of_queries[3:], sinks, blind)
    needed = zip(gradients, (needs_dq, needs_dkv, needs_dkv), strict=True)
    asked = (gradient if is_needed else gradient.new_empty(0) for gradient, is_needed in needed)
    return *asked, q.new_empty(0) if sinks is None else dsinks.to(sinks.dtype)


def _blind(window: Window, ranges: torch.Tensor | None) -> torch.Tensor:
    """Which queries see no key, for an lse."""
    if ranges is not None:
        return key_ranges.blind(window, ranges)
    blind = window.blind if window.seqlen_k else window.seqlen_q
    return torch.arange(window.seqlen_q, device="cpu") < blind


def _scale_and_window(
    q, causal, softmax_scale=None, window_left=None, window_right=None, family=None, tf32=False
):
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return scale, window_left, 0 if causal else window_right


def _entries(packed: bool, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors as batches, of packed sequences with one entry: all have heads, then rows."""
    if not packed:
        return list(tensors)
    return [x if x.dim() == 4 else (x.transpose(0, 1) if x.dim() == 3 else x).unsqueeze(0) for x in tensors]


def _places(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...], int]]:
    """Where each sequence's queries that count are in _entries, its keys, and how many do not at the begin.

    Keys that don't count at the begin leave the mask where it is, as it is aligned at the end.
    """
    packed = cu_seqlens_q is not None
    batch = cu_seqlens_q.numel() - 1 if packed else q.shape[0]
    rows = rows_that_count(batch, q.shape[2], cu_seqlens_q, seqused_q, None)
    all_keys = rows_that_count(batch, k.shape[2], cu_seqlens_k, seqused_k, None)
    keys = rows_that_count(batch, k.shape[2], cu_seqlens_k, seqused_k, leftpad_k)
    for sequence in range(batch):
        entry_q, entry_k = (
            slice(0, 1) if offsets is not None else slice(sequence, sequence + 1)
            for offsets in (cu_seqlens_q, cu_seqlens_k)
        )
        first = keys[sequence].start - all_keys[sequence].start
        yield (entry_q, slice(None), rows[sequence]), (entry_k, slice(None), keys[sequence]), first


def rows_that_count(
    batch: int,
    size: int,
    offsets: torch.Tensor | None,
    used: torch.Tensor | None,
    skipped: torch.Tensor | None,
) -> list[slice]:
    """The rows that count of each sequence, among `size`, whatever values the tensors hold.

    offsets: int32 (batch + 1,), where sequences begin and end; without them each has all the rows. used,
    skipped: int32 (batch,), which of a sequence's rows count: those before used, but for the first, skipped.
    """
    offsets, used, skipped = (None if x is None else x.tolist() for x in (offsets, used, skipped))
    rows = []
    for sequence in range(batch):
        begin = min(max(offsets[sequence], 0), size) if offsets else 0
        end = min(max(offsets[sequence + 1], begin), size) if offsets else size
        end = min(max(begin + used[sequence], begin), end) if used else end
        begin = min(max(begin + skipped[sequence], begin), end) if skipped else begin
        rows.append(slice(begin, end))
    return rows


def _flash_blocks(
    window: Window, ranges: torch.Tensor | None
) -> Iterator[tuple[slice, slice, torch.Tensor | None]]:
    """Rows and the keys that they see for PyTorch's kernel, with a mask to add where that doesn't know it."""
    if ranges is None and (window.full or window.causal):
        yield slice(0, window.seqlen_q), slice(0, window.seqlen_k), None
        return
    yield from _masked_blocks(window, ranges)


def _masked_blocks(
    window: Window, ranges: torch.Tensor | None
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Rows, the keys that they see, and float32 (rows, keys): 0 where a query sees a key, else -inf.

    With ranges it is (batch or 1, 1, rows, keys), and only a block of the window may have no key at all.
    """
    for rows, keys in window.blocks(_MASKED_ROWS):
        if ranges is not None:
            of_rows = ranges[:, :, rows]
            bounds = of_rows[of_rows[..., 0] < of_rows[..., 1]]
            if len(bounds) == 0:
                continue
            first, last = bounds[:, 0].min().item(), bounds[:, 1].max().item()
            keys = slice(max(keys.start, first), min(keys.stop, last))
            if keys.start >= keys.stop:
                continue
        row, key = (torch.arange(part.start, part.stop, device="cpu") for part in (rows, keys))
        seen = visible(row.unsqueeze(1), key, *window)
        if ranges is not None:
            seen = seen & in_ranges(of_rows, key)
        yield rows, keys, torch.zeros(seen.shape, **_FLOAT).masked_fill(~seen, -torch.inf)


def _dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    window_left: int | None,
    window_right: int | None,
    ranges: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """forward where all the rows count."""
    window = Window.of(q.shape[2], k.shape[2], window_left, window_right)
    if window.blind or not (q.numel() and k.numel()):
        out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf, **_FLOAT)
        if q.numel() and k.numel() and window.blind < window.seqlen_q:
            seeing = (slice(None), slice(None), slice(window.blind, None))
            of_seeing = None if ranges is None else ranges[:, :, window.blind :]
            mask = softmax_scale, window_left, window_right, of_seeing
            out[seeing], lse[seeing] = _part(q[seeing], k, v, *mask)
        return out, lse

    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], **_FLOAT)
    blind = None if ranges is None else key_ranges.blind(window, ranges).expand(lse.shape)
    q, k, v = (x.float().contiguous() for x in (q, k, v))
    for rows, keys, added in _flash_blocks(window, ranges):
        out[:, :, rows], lse[:, :, rows] = _flash(
            q[:, :, rows],
            k[:, :, keys],
            v[:, :, keys],
            0.0,
            added is None and window.causal,
            attn_mask=added,
            scale=softmax_scale,
        )
    # PyTorch's kernel gives an LSE and an out of 0 to rows whose scores are all -inf, or NaN.
    sizes = lse.abs() if blind is None else lse.abs().masked_fill(blind, 1)
    lowest, highest = (bound.item() for bound in sizes.aminmax())
    if not (lowest > 0 and highest < torch.inf):
        for rows, keys, added in _masked_blocks(window, ranges):
            out[:, :, rows], lse[:, :, rows] = _plain(
                q[:, :, rows], k[:, :, keys], v[:, :, keys], added, softmax_scale
            )
    if blind is not None:
        out.masked_fill_(blind.unsqueeze(-1), 0)
        lse.masked_fill_(blind, -torch.inf)
    return out, lse


def _gradients(
    dout: torch.Tensor,
    dlse: torch.Tensor,
    q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    window_left: int | None,
    window_right: int | None,
    ranges: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """backward where all the rows count, in float32."""
    window = Window.of(q.shape[2], k.shape[2], window_left, window_right)
    dq, dk, dv = (torch.zeros(x.shape, **_FLOAT) for x in (q, k, v))
    if not (q.numel() and k.numel()):
        return dq, dk, dv

    def widened(x: torch.Tensor, column: float | torch.Tensor = 0.0) -> torch.Tensor:
        wide = torch.empty(*x.shape[:3], x.shape[3] + 1, **_FLOAT)
        wide[..., :-1], wide[..., -1] = x, column
        return wide

    # PyTorch's kernel knows no dlse, but takes rowsum(dout * out) from the gradients of the weights: one more
    # column makes that the sum less dlse, and changes nothing else.
    q, k, v, dout, out = widened(q), widened(k), widened(v), widened(dout, 1.0), widened(out, -dlse)
    lse = lse.where(lse.isfinite(), torch.nan)  # softmax of an infinite score is NaN
    if ranges is not None:  # queries that see no key have weights of exp(-inf), whatever they hold
        blind = key_ranges.blind(window, ranges).expand(lse.shape)
        lse = lse.masked_fill(blind, torch.inf)
        q, dout, out = (x.masked_fill_(blind.unsqueeze(-1), 0) for x in (q, dout, out))
    for rows, keys, added in _flash_blocks(window, ranges):
        of_rows = (x[:, :, rows] for x in (out, lse))
        parts = _flash_backward(
            *(dout[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], *of_rows),
            *(0.0, added is None and window.causal),
            attn_mask=added,
            scale=softmax_scale,
        )
        for whole, where, part in zip((dq, dk, dv), (rows, keys, keys), parts, strict=True):
            whole[:, :, where] += part[..., :-1]
    return dq, dk, dv


def _part(
    q, k, v, softmax_scale, window_left, window_right, ranges=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """forward of some of a call's rows, which may allow what all of them did not."""
    if ranges is not None:
        return _dense(q, k, v, softmax_scale, window_left, window_right, ranges)
    window = {"window_left": window_left, "window_right": window_right}
    return forward(q, k, v, softmax_scale=softmax_scale, **window)


def _plain(q, k, v, mask, scale) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) with the infinities and NaNs that PyTorch's operators give."""
    q, k, v = q.float(), *(x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * scale).masked_fill(mask.isneginf(), -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)
