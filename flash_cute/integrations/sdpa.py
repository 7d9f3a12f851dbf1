"""flash_cute as PyTorch's flash attention.

    import flash_cute.integrations.sdpa

    torch.nn.attention.activate_flash_attention_impl("flash_cute")

The import registers the name; PyTorch's own function then puts flash_cute in the place of the operators

    aten::_scaled_dot_product_flash_attention, aten::_flash_attention_forward, and their backwards,
    aten::_flash_attention_forward_no_dropout_inplace (newer than torch 2.11), which varlen_attn_out calls,

on CUDA and, where PyTorch has no kernel for them, on the CPU; its restore_flash_attention_impl (torch 2.11)
undoes that. Autograd, autocast, vmap, DTensor and torch.compile remain PyTorch's.

These operators align a causal mask at the bottom right, as ours do. scaled_dot_product_attention aligns its
is_causal at the top left, and calls them only where both lengths are the same, and never with an attn_mask.

scaled_dot_product_attention of this module has PyTorch's signature and takes masks, too. activate() and
restore(), or a block of `with activated()`, put it in the place of torch.nn.functional's.

Source: torch/nn/attention/_registry.py and _fa4.py of torch 2.11, varlen.py of 2.15.
"""

from __future__ import annotations

import torch

from flash_cute._torch import ops
from flash_cute.dot_product_attention import drawn_seed
from flash_cute.integrations._sdpa_function import (
    activate,
    activated,
    left_to_pytorch,
    restore,
    scaled_dot_product_attention,
)
from flash_cute.wording import named

__all__ = ["activate", "activated", "left_to_pytorch", "restore", "scaled_dot_product_attention"]

NAME = "flash_cute"

# PyTorch's names of arguments by ours.
_NAMES = {"q": "query", "k": "key", "v": "value", "dout": "grad_out", "lse": "logsumexp"}
_NAMES |= {"softmax_scale": "scale", "window": "window_size"}
_NAMES |= {"cu_seqlens_q": "cum_seq_q", "cu_seqlens_k": "cum_seq_k", "batch_invariant": "num_splits=1"}


def sdpa_forward(
    query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
) -> tuple:
    """aten::_scaled_dot_product_flash_attention: q, k and v are (batch, heads, seqlen, head_dim).

    Returns out, lse (float32, (batch, heads, seqlen_q)), None, None, both lengths and _states of dropout.
    """
    _refuse(return_debug_mask=return_debug_mask)
    dropped = _drawn(query, dropout_p)
    out, lse = _run(ops._forward, query, key, value, causal=is_causal, softmax_scale=scale, **dropped)
    return out, lse, None, None, query.shape[2], key.shape[2], *_states(query, dropped)


def sdpa_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    philox_seed, philox_offset, *, scale=None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """aten::_scaled_dot_product_flash_attention_backward."""
    tensors = grad_out, None, query, key, value, out, logsumexp
    options = {"softmax_scale": scale, "deterministic": torch.are_deterministic_algorithms_enabled()}
    options |= _kept(dropout_p, philox_seed)
    return _run(ops._backward, *tensors, causal=is_causal, **options)[:3]


def flash_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
    scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None,
    block_table=None, num_splits=None, out=None,
) -> tuple:  # fmt: skip
    """aten::_flash_attention_forward: (batch, seqlen, heads, head_dim), or packed (total, heads, head_dim).

    window_size_left and _right: keys before and after a query's own; None or -1 is unlimited. max_q and max_k
    are not needed. With a block_table (torch 2.12 and newer) key and value are pages, (pages, page_size,
    heads, head_dim), whose lengths are seqused_k or, without it, the differences of cum_seq_k. num_splits: 1
    promises a sequence the same bits in any batch, as batch_invariant does; on the CPU each sequence is
    computed by itself. Other values are hints. out: a tensor like query for the result.

    Returns out, lse (float32, (batch, heads, seqlen_q) or packed (heads, total_q)) and _states of dropout.
    """
    _refuse(return_debug_mask, alibi_slopes)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        for name, tensor in {"seqused_k": seqused_k, "block_table": block_table}.items():
            if tensor is not None:
                raise NotImplementedError(
                    f"flash_cute.sdpa: {name} is given and gradients are needed, but PyTorch doesn't tell it "
                    "to aten::_flash_attention_backward; call it under torch.no_grad()"
                )
    paged = block_table is not None
    packed = cum_seq_q is not None if paged else _is_packed(cum_seq_q, cum_seq_k)
    if paged or not packed:
        key, value = _transposed(key, value)
    if paged and seqused_k is None and cum_seq_k is not None:
        seqused_k = cum_seq_k.diff()
    options = {"softmax_scale": scale, "seqused_k": seqused_k, "block_table": block_table}
    options |= _mask(is_causal, window_size_left, window_size_right)
    if num_splits == 1 and query.is_cuda:
        options["batch_invariant"] = True
    dropped = _drawn(query, dropout_p)
    options |= dropped
    if packed:
        options |= {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": None if paged else cum_seq_k}
    else:
        query, out = query.transpose(1, 2), None if out is None else out.transpose(1, 2)
    if out is None:
        out, lse = _run(ops._forward_varlen if packed else ops._forward, query, key, value, **options)
    else:
        lse = _run(ops._forward_out, query, key, value, out, **options)
    return out if packed else out.transpose(1, 2), lse, *_states(query, dropped)


def flash_forward_out(out, *tensors, **options) -> torch.Tensor:
    """aten::_flash_attention_forward_no_dropout_inplace: the lse of flash_forward, whose out it writes."""
    return flash_forward(*tensors, **options, out=out)[1]


def flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """aten::_flash_attention_backward."""
    options = {"softmax_scale": scale, "deterministic": torch.are_deterministic_algorithms_enabled()}
    options |= _mask(is_causal, window_size_left, window_size_right) | _kept(dropout_p, rng_state)
    if _is_packed(cum_seq_q, cum_seq_k):
        tensors = grad_out, None, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k
        return _run(ops._backward_varlen, *tensors, **options)[:3]
    grad_out, *tensors = _transposed(grad_out, query, key, value, out)
    return _transposed(*_run(ops._backward, grad_out, None, *tensors, logsumexp, **options)[:3])


KERNELS = {
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
    "_flash_attention_forward": flash_forward,
    "_flash_attention_backward": flash_backward,
}
if hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"):  # newer than torch 2.11
    KERNELS["_flash_attention_forward_no_dropout_inplace"] = flash_forward_out


class Registration:
    """What PyTorch's registry holds while flash_cute is active."""

    def __init__(self) -> None:
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        for name, kernel in KERNELS.items():
            for key in ("CUDA", "CPU"):
                self._library.impl(name, kernel, key)

    def remove(self) -> None:
        self._library = None  # the kernels go with it


def _run(op, *tensors, **options):
    try:
        return op(*tensors, **options)
    except RuntimeError as error:
        raise named(error, "flash_cute.sdpa", _NAMES) from None


def _refuse(return_debug_mask=False, alibi_slopes=None) -> None:
    if return_debug_mask:
        raise NotImplementedError("flash_cute.sdpa: return_debug_mask is True; False is accepted")
    if alibi_slopes is not None:
        raise NotImplementedError("flash_cute.sdpa: alibi_slopes is a tensor; None is accepted")


def _mask(causal: bool, left: int | None, right: int | None) -> dict[str, bool | int | None]:
    left, right = (None if limit == -1 else limit for limit in (left, right))
    return {"causal": causal, "window_left": left, "window_right": right}


def _is_packed(cum_seq_q: torch.Tensor | None, cum_seq_k: torch.Tensor | None) -> bool:
    if (cum_seq_q is None) != (cum_seq_k is None):
        missing = "cum_seq_q" if cum_seq_q is None else "cum_seq_k"
        raise ValueError(
            f"flash_cute.sdpa: only {missing} is None; cum_seq_q and cum_seq_k, or neither, are accepted"
        )
    return cum_seq_q is not None


def _transposed(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


def _drawn(query: torch.Tensor, dropout_p: float) -> dict[str, float | torch.Tensor]:
    """Dropout for a forward, with a seed from torch's generator; of a p that is none, nothing."""
    return {"dropout_p": dropout_p, "dropout_seed": drawn_seed(query)} if dropout_p else {}


def _kept(dropout_p: float, state: torch.Tensor) -> dict[str, float | torch.Tensor]:
    """Likewise for a backward, from the first one of _states."""
    return {"dropout_p": dropout_p, "dropout_seed": state.view(torch.int64)} if dropout_p else {}


def _states(query: torch.Tensor, dropped: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The seed of dropout as uint64, which PyTorch keeps, an offset that is not read, and debug_attn_mask."""
    seed = dropped.get("dropout_seed")
    seed = query.new_empty(2, dtype=torch.uint64) if seed is None else seed.view(torch.uint64)
    return seed, query.new_empty((), dtype=torch.uint64), query.new_empty(0)


torch.nn.attention.register_flash_attention_impl(NAME, register_fn=Registration)
