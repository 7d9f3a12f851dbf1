"""The forward on the CPU, by PyTorch's own CPU flash attention in float32.

The CPU's kernels call C++ for its checks, and the forward for what that computes in the inputs' own type, too
(csrc/forward_cpu.cpp); the rest is computed in Python. Called from C++, they could not raise: of an
exception, a KeyboardInterrupt too, nothing passes through the stable ABI but that there was one.
"""

from __future__ import annotations

import torch

from flash_cute._cpu import key_ranges, scores
from flash_cute._cpu.key_ranges import flash_blocks, masked_blocks
from flash_cute._cpu.outs import empty_out
from flash_cute._cpu.scores import Scores
from flash_cute._cpu.sequences import FLOAT, entries, offsets_of, places, scale_and_window
from flash_cute._cpu.sinks import with_sinks as rule_of_sinks
from flash_cute._cpu.windows import Window
from flash_cute._torch import private

_ops = torch.ops.flash_cute
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args, sinks=None, **options):
    """flash_cute::_forward: out as empty_out(q, v), and lse, float32 (batch, heads_q, seqlen_q)."""
    results = _ops._forward_cpu.default(q, k, v, *args, sinks=sinks, **options)
    if results:
        return with_sinks(tuple(results), sinks)
    return _forward(q, k, v, *args, sinks=sinks, **options)


def forward_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k=None, *args, **options):
    """flash_cute::_forward_varlen: out as empty_out(q, v), and lse, float32 (heads_q, total_q)."""
    _ops._forward_varlen_cpu.default(q, k, v, cu_seqlens_q, cu_seqlens_k, *args, **options)
    return _forward(q, k, v, *args, **offsets_of(cu_seqlens_q, cu_seqlens_k), **options)


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


def _forward(q, k, v, causal=False, *, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
             leftpad_k=None, sinks=None, block_table=None, batch_invariant=False, k_scale=None, v_scale=None,
             ranges=None, mask=None, bias=None, alibi_slopes=None, dropout_seed=None, softcap=0.0,
             bias_scale=1.0, dropout_p=0.0, **options) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The forward, padded or packed (both cu_seqlens are given), of checked arguments."""
    if block_table is not None:
        k, v = _gathered(k, block_table), _gathered(v, block_table)
    if k.dtype != q.dtype:
        k, v = _widened(k, k_scale, q.dtype), _widened(v, v_scale, q.dtype)
    window = scale_and_window(q, causal, **options)
    changed = Scores.of(mask, bias, alibi_slopes, dropout_seed, softcap, bias_scale, dropout_p)
    packed = cu_seqlens_q is not None
    dense = not packed and seqused_q is None and seqused_k is None and leftpad_k is None
    if dense and changed is None:
        return with_sinks(_dense(q, k, v, *window, ranges), sinks)

    out = empty_out(q, v).zero_()
    lse = torch.full(q.shape[1::-1] if packed else q.shape[:3], -torch.inf, **FLOAT)
    cu_seqlens_k = None if k.dim() == 4 else cu_seqlens_k  # of a cache beside packed queries
    q, k, v, outs, lses = entries(packed, q, k, v, out, lse)
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k
    for number, (queries, keys, first) in enumerate(places(q, k, *lengths)):
        seen = key_ranges.of_sequence(ranges, queries, first)
        tensors = q[queries], k[keys], v[keys]
        if changed is None:
            results = _part(*tensors, *window, seen)
        else:
            own = changed.of_sequence(number, len(q), first, tensors[1].shape[2], k.shape[2])
            with torch.autocast("cpu", enabled=False):  # which would round products
                results = scores.forward(*tensors, *window, seen, own)
        outs[queries], lses[queries] = with_sinks(results, sinks)
    return out, lse


def with_sinks(
    results: tuple[torch.Tensor, torch.Tensor], sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of forward or forward_varlen, all of whose rows count, with sinks, (heads,), if any."""
    if sinks is None:
        return results
    out, lse = results
    packed = out.dim() == 3  # while lse is (heads, total)
    sinks = sinks.to(lse.dtype)
    aligned = (lse.mT, sinks) if packed else (lse, sinks.unsqueeze(-1))
    shrunk, lse = rule_of_sinks(torch, torch.Tensor.detach, out, *aligned)
    lse = lse.mT if packed else lse
    if private.transforms_are_active():  # vmap may have mapped the sinks alone
        return shrunk.to(out.dtype), lse
    return torch.empty_like(out).copy_(shrunk), lse  # in its strides, too


def _gathered(cache: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
    """The rows of each sequence's pages, (batch, heads, max_pages * page_size, head_dim)."""
    pages = cache[block_table.long().clamp(0, cache.shape[0] - 1)]
    return pages.transpose(1, 2).flatten(2, 3)


def _widened(codes: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of a cache of 8 bits, (batch, heads, rows, head_dim): of dtype, or of float32 where that
    does not hold them all.
    """
    numbers = codes.view(torch.float8_e4m3fn).float()
    if scale is not None:
        numbers *= scale if scale.dim() == 0 else scale[..., None, None]
    rounded = numbers.to(dtype)
    return rounded if torch.equal(rounded.float().nan_to_num(), numbers.nan_to_num()) else numbers


def _part(
    q, k, v, softmax_scale, window_left, window_right, ranges=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """forward of some of a call's rows, which may allow what all of them did not."""
    if ranges is not None or {k.dtype, v.dtype} != {q.dtype}:
        return _dense(q, k, v, softmax_scale, window_left, window_right, ranges)
    window = {"window_left": window_left, "window_right": window_right}
    return forward(q, k, v, softmax_scale=softmax_scale, **window)


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
        out, lse = empty_out(q, v).zero_(), torch.full(q.shape[:3], -torch.inf, **FLOAT)
        if q.numel() and k.numel() and window.blind < window.seqlen_q:
            seeing = (slice(None), slice(None), slice(window.blind, None))
            of_seeing = None if ranges is None else ranges[:, :, window.blind :]
            mask = softmax_scale, window_left, window_right, of_seeing
            out[seeing], lse[seeing] = _part(q[seeing], k, v, *mask)
        return out, lse

    out, lse = empty_out(q, v), torch.empty(q.shape[:3], **FLOAT)
    blind = None if ranges is None else key_ranges.blind(window, ranges).expand(lse.shape)
    columns = max(q.shape[-1], v.shape[-1])  # PyTorch's kernel wants as many of v; those added change nothing
    q, k, v = (_padded(x.float(), columns).contiguous() for x in (q, k, v))
    for rows, keys, added in flash_blocks(window, ranges):
        wide, lse[:, :, rows] = _flash(
            q[:, :, rows],
            k[:, :, keys],
            v[:, :, keys],
            0.0,
            added is None and window.causal,
            attn_mask=added,
            scale=softmax_scale,
        )
        out[:, :, rows] = wide[..., : out.shape[-1]]
    # PyTorch's kernel gives an LSE and an out of 0 to rows whose scores are all -inf, or NaN.
    sizes = lse.abs() if blind is None else lse.abs().masked_fill(blind, 1)
    lowest, highest = (bound.item() for bound in sizes.aminmax())
    if not (lowest > 0 and highest < torch.inf):
        for rows, keys, added in masked_blocks(window, ranges):
            wide, lse[:, :, rows] = _plain(q[:, :, rows], k[:, :, keys], v[:, :, keys], added, softmax_scale)
            out[:, :, rows] = wide[..., : out.shape[-1]]
    if blind is not None:
        out.masked_fill_(blind.unsqueeze(-1), 0)
        lse.masked_fill_(blind, -torch.inf)
    return out, lse


def _padded(x: torch.Tensor, columns: int) -> torch.Tensor:
    """x, (..., head_dim), with columns of zeros behind its own, `columns` in all."""
    return x if x.shape[-1] == columns else torch.nn.functional.pad(x, (0, columns - x.shape[-1]))


def _plain(q, k, v, mask, scale) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) with the infinities and NaNs that PyTorch's operators give."""
    q, k, v = q.float(), *(x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * scale).masked_fill(mask.isneginf(), -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)
