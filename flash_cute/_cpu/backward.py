"""The backward on the CPU, by PyTorch's own CPU flash attention in float32; see forward.py."""

from __future__ import annotations

import torch

from flash_cute._cpu import key_ranges, scores
from flash_cute._cpu.key_ranges import flash_blocks
from flash_cute._cpu.scores import Scores
from flash_cute._cpu.sequences import FLOAT, entries, offsets_of, places, scale_and_window
from flash_cute._cpu.windows import Window

_ops = torch.ops.flash_cute
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def backward(*args, **options):
    """flash_cute::_backward: dq, dk, dv and dsinks like q, k, v and sinks."""
    _ops._backward_cpu.default(*args, **options)
    return _backward(*args, **options)


def backward_varlen(dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k=None, *args, **options):
    """flash_cute::_backward_varlen: likewise."""
    tensors = dout, dlse, q, k, v, out, lse
    _ops._backward_varlen_cpu.default(*tensors, cu_seqlens_q, cu_seqlens_k, *args, **options)
    return _backward(*tensors, *args, **offsets_of(cu_seqlens_q, cu_seqlens_k), **options)


def bias_gradient(*args, **options):
    """flash_cute::_bias_gradient: dbias and dv, dense, of the shapes and types of bias and v."""
    _ops._bias_gradient_cpu.default(*args, **options)
    return _bias_gradient(*args, **options)


def weights(*args, **options):
    """flash_cute::_weights: softmax of the scores, of q's type, (batch, heads, queries, keys)."""
    _ops._weights_cpu.default(*args, **options)
    return _weights(*args, **options)


def _backward(dout, dlse, q, k, v, out, lse, causal=False, *, cu_seqlens_q=None, cu_seqlens_k=None,
              seqused_q=None, seqused_k=None, leftpad_k=None, sinks=None, needs_dq=True, needs_dkv=True,
              ranges=None, mask=None, bias=None, alibi_slopes=None, dropout_seed=None, softcap=0.0,
              bias_scale=1.0, dropout_p=0.0, deterministic=False,
              **options) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Likewise the backward; gradients that are not needed are empty."""
    window = scale_and_window(q, causal, **options)
    changed = Scores.of(mask, bias, alibi_slopes, dropout_seed, softcap, bias_scale, dropout_p)
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k
    gradients = tuple(torch.zeros_like(x) for x in (q, k, v))
    dout = torch.zeros_like(out) if dout is None else dout
    dlse = torch.zeros_like(lse) if dlse is None else dlse
    packed = cu_seqlens_q is not None
    dout, dlse, q, k, v, out, lse, dq, dk, dv = entries(packed, dout, dlse, q, k, v, out, lse, *gradients)
    whole = changed is None and all(tensor is None for tensor in lengths)
    dsinks = None if sinks is None else torch.zeros(q.shape[1], **FLOAT)
    for number, (queries, keys, first) in enumerate([(..., ..., 0)] if whole else places(q, k, *lengths)):
        of_queries = [x[queries] for x in (dout, dlse, q, out, lse)]
        of_keys = k[keys], v[keys]
        seen = ranges if whole else key_ranges.of_sequence(ranges, queries, first)
        if changed is None:
            found = _gradients(*of_queries, *of_keys, *window, seen)
        else:
            own = changed.of_sequence(number, len(q), first, of_keys[0].shape[2], k.shape[2])
            with torch.autocast("cpu", enabled=False):  # which would round products
                *found, blind = scores.backward(*of_queries, *of_keys, *window, seen, own)
        dq[queries], dk[keys], dv[keys] = found
        if sinks is not None:
            if changed is None:
                limits = Window.of(of_queries[2].shape[2], of_keys[0].shape[2], *window[1:])
                blind = key_ranges.blind(limits, seen)
            dsinks += _gradient_of_sinks(*of_queries[:2], *of_queries[3:], sinks, blind)
    needed = zip(gradients, (needs_dq, needs_dkv, needs_dkv), strict=True)
    asked = (gradient if is_needed else gradient.new_empty(0) for gradient, is_needed in needed)
    return *asked, q.new_empty(0) if sinks is None else dsinks.to(sinks.dtype)


def _bias_gradient(dout, dlse, q, k, v, out, lse, causal=False, *, seqused_q=None, seqused_k=None,
                   leftpad_k=None, sinks=None, ranges=None, mask=None, bias=None, alibi_slopes=None,
                   dropout_seed=None, softcap=0.0, bias_scale=1.0, dropout_p=0.0, needs_dv=False,
                   **options) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Likewise the gradient of the bias, and that of v if it is needed."""
    window = scale_and_window(q, causal, **options)
    changed = Scores.of(mask, bias, alibi_slopes, dropout_seed, softcap, bias_scale, dropout_p)
    dout = torch.zeros_like(out) if dout is None else dout
    dlse = torch.zeros_like(lse) if dlse is None else dlse
    dbias = torch.zeros(bias.shape, **FLOAT)
    dv = torch.zeros(v.shape, **FLOAT) if needs_dv else None
    lengths = {"seqused_q": seqused_q, "seqused_k": seqused_k, "leftpad_k": leftpad_k}
    for number, (queries, keys, first) in enumerate(places(q, k, **lengths)):
        tensors = *(x[queries] for x in (dout, dlse, q, out, lse)), k[keys], v[keys]
        seen = key_ranges.of_sequence(ranges, queries, first)
        own = changed.of_sequence(number, len(q), first, tensors[-1].shape[2], k.shape[2])
        of_entry = dbias[number // (len(q) // len(bias))]
        of_keys = dv[keys] if needs_dv else None
        scores.add_bias_gradient(of_entry, of_keys, *tensors, *window, seen, own)
    return dbias.to(bias.dtype), dv.to(v.dtype) if needs_dv else v.new_empty(0)


def _weights(q, k, v, lse, causal=False, *, seqused_q=None, seqused_k=None, leftpad_k=None, sinks=None,
             ranges=None, mask=None, bias=None, alibi_slopes=None, dropout_seed=None, softcap=0.0,
             bias_scale=1.0, dropout_p=0.0, **options) -> torch.Tensor:  # fmt: skip
    window = scale_and_window(q, causal, **options)
    changed = Scores.of(mask, bias, alibi_slopes, None, softcap, bias_scale) or Scores()
    result = q.new_zeros(*q.shape[:3], k.shape[2])
    lengths = {"seqused_q": seqused_q, "seqused_k": seqused_k, "leftpad_k": leftpad_k}
    for number, (queries, keys, first) in enumerate(places(q, k, **lengths)):
        seen = key_ranges.of_sequence(ranges, queries, first)
        own = changed.of_sequence(number, len(q), first, k[keys].shape[2], k.shape[2])
        found = result[(*queries, keys[2])]
        scores.write_weights(found, q[queries], lse[queries], k[keys], *window, seen, own)
    return result


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
    dq, dk, dv = (torch.zeros(x.shape, **FLOAT) for x in (q, k, v))
    if not (q.numel() and k.numel()):
        return dq, dk, dv

    columns = max(q.shape[3], v.shape[3])  # PyTorch's kernel wants as many of v

    def widened(x: torch.Tensor, column: float | torch.Tensor = 0.0) -> torch.Tensor:
        wide = torch.empty(*x.shape[:3], columns + 1, **FLOAT)
        wide[..., : x.shape[3]], wide[..., x.shape[3] : -1], wide[..., -1] = x, 0, column
        return wide

    # PyTorch's kernel knows no dlse, but takes rowsum(dout * out) from the gradients of the weights: one more
    # column makes that the sum less dlse, and changes nothing else.
    q, k, v, dout, out = widened(q), widened(k), widened(v), widened(dout, 1.0), widened(out, -dlse)
    lse = lse.where(lse.isfinite(), torch.nan)  # softmax of an infinite score is NaN
    if ranges is not None:  # queries that see no key have weights of exp(-inf), whatever they hold
        blind = key_ranges.blind(window, ranges).expand(lse.shape)
        lse = lse.masked_fill(blind, torch.inf)
        q, dout, out = (x.masked_fill_(blind.unsqueeze(-1), 0) for x in (q, dout, out))
    for rows, keys, added in flash_blocks(window, ranges):
        of_rows = (x[:, :, rows] for x in (out, lse))
        parts = _flash_backward(
            *(dout[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], *of_rows),
            *(0.0, added is None and window.causal),
            attn_mask=added,
            scale=softmax_scale,
        )
        for whole, where, part in zip((dq, dk, dv), (rows, keys, keys), parts, strict=True):
            whole[:, :, where] += part[..., : whole.shape[-1]]
    return dq, dk, dv


def _gradient_of_sinks(
    dout: torch.Tensor,
    dlse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor,
    blind: torch.Tensor,
) -> torch.Tensor:
    """float32 (heads,), of results with sinks, (batch, heads, seqlen[, head_dim]).

    blind: booleans that broadcast to lse, which queries see no key.
    """
    delta = (dout.float() * out.float()).sum(-1)
    delta = delta.masked_fill(blind, 0)  # whatever dout holds there
    sinks = sinks.float().unsqueeze(-1)
    weights = (sinks - lse).exp().where(sinks != -torch.inf, 0)
    return (weights * (dlse - delta)).sum((0, 2))
