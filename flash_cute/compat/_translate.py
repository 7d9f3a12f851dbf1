"""What the functions of flash_attn's versions share."""

from __future__ import annotations

import torch

import flash_cute

# The values that ask for nothing that flash_cute has not.
_ACCEPTED = {
    "dropout_p": (0.0,),
    "softcap": (0.0,),
    "alibi_slopes": (None,),
    "block_table": (None,),
    "qv": (None,),
    "q_descale": (None,),
    "k_descale": (None,),
    "v_descale": (None,),
    "attention_chunk": (0,),
    "num_splits": (0, 1),
    "pack_gqa": (None,),
    "sm_margin": (0,),
    "rotary_cos": (None,),
    "rotary_sin": (None,),
    "rotary_seqlens": (None,),
    "cache_batch_idx": (None,),
    "page_table": (None,),
    "cu_seqlens_q": (None,),
    "cu_seqlens_k_new": (None,),
    "scheduler_metadata": (None,),
}


def dense(q, k, v, softmax_scale, causal, window_size, deterministic, **refused):
    """(out, lse): q, k, v and out are (batch, seqlen, heads, head_dim), lse (batch, heads, seqlen_q).

    refused: arguments of flash_attn's function whose values must be those of _ACCEPTED.
    """
    options = _options(softmax_scale, causal, window_size, deterministic, refused)
    out, lse = flash_cute.forward(*(x.transpose(1, 2) for x in (q, k, v)), **options)
    return out.transpose(1, 2), lse


def packed(q, k, v, lengths, softmax_scale, causal, window_size, deterministic, **refused):
    """(out, lse): q, k, v and out are (total, heads, head_dim), lse (heads, total_q).

    lengths: those of flash_cute.forward_varlen.
    """
    options = _options(softmax_scale, causal, window_size, deterministic, refused)
    return flash_cute.forward_varlen(q, k, v, **lengths, **options)


def with_cache(q, cache, new, cache_seqlens, cache_leftpad, softmax_scale, causal, window_size, **refused):
    """(out, lse) as of dense, after what is new is written into the cache behind its cache_seqlens rows.

    cache, new: (k, v); both new ones may be None. cache_seqlens: int, int32 (batch,), or None, which is all.
    cache_leftpad: int32 (batch,) or None.
    """
    options = _options(softmax_scale, causal, window_size, False, refused)
    k, v = new
    if (k is None) != (v is None) or (k is not None and cache_seqlens is None):
        raise ValueError(
            "flash_cute.compat: of k, v and cache_seqlens some are None; all three, or None for k and v, are "
            "accepted"
        )
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
    if k is not None:
        entry = torch.arange(k.shape[0], device=k.device)[:, None]
        row = cache_seqlens[:, None] + torch.arange(k.shape[1], device=k.device)
        cache[0][entry, row], cache[1][entry, row] = k, v
        cache_seqlens = cache_seqlens + k.shape[1]
    tensors = (x.transpose(1, 2) for x in (q, *cache))
    out, lse = flash_cute.forward(*tensors, seqused_k=cache_seqlens, leftpad_k=cache_leftpad, **options)
    return out.transpose(1, 2), lse


def unstacked(name, tensor, count):
    """The `count` tensors that lie in one, (..., count, heads, head_dim)."""
    if tensor.dim() < 4 or tensor.shape[-3] != count:
        raise ValueError(
            f"flash_cute.compat: {name} has shape {tuple(tensor.shape)}; "
            f"(..., {count}, heads, head_dim) is accepted"
        )
    return tensor.unbind(-3)


def _options(softmax_scale, causal, window_size, deterministic, refused):
    for name, value in refused.items():
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor or value not in _ACCEPTED[name]:
            shown = "a tensor" if is_tensor else repr(value)
            accepted = " or ".join(map(repr, _ACCEPTED[name]))
            raise NotImplementedError(f"flash_cute.compat: {name} is {shown}; {accepted} is accepted")
    if not (isinstance(window_size, tuple | list) and len(window_size) == 2):
        raise TypeError(f"flash_cute.compat: window_size is {window_size!r}; (left, right) is accepted")
    return {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window": tuple(None if limit == -1 else limit for limit in window_size),
        "deterministic": deterministic,
    }
