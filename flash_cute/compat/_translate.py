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
