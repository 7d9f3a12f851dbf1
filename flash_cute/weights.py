"""The weights of attention, for those who look at them."""

from __future__ import annotations

import torch
from typing_extensions import Unpack

from flash_cute._torch import checks, ops
from flash_cute.dot_product_attention import call
from flash_cute.options import WeightsOptions, spelled_out
from flash_cute.wording import shown

_FACE = "flash_cute.attention_weights"
_COLUMNS = 8  # of v, the fewest that kernels read without a copy


@spelled_out(WeightsOptions)
def attention_weights(
    q: torch.Tensor,
    k: torch.Tensor,
    causal: bool = False,
    *,
    softmax_scale: float | None = None,
    max_elements: int | None = 2**31,
    **options: Unpack[WeightsOptions],
) -> torch.Tensor:
    """The weights of attention, softmax(softmax_scale * q kᵀ + bias), by which forward multiplies v.

    To look at them: they take the memory of all pairs, which attention itself never stores.

    Args:
        q: (batch, heads_q, seqlen_q, head_dim), as in flash_cute.forward.
        k: (batch, heads_kv, seqlen_k, head_dim), likewise.
        max_elements: the most weights that are computed; None is any number.
        causal, softmax_scale, window, seqused_q, seqused_k, leftpad_k, ranges, family, sinks, mask, bias,
            alibi_slopes, softcap, precision: as in flash_cute.forward.

    Returns:
        weights: (batch, heads_q, seqlen_q, seqlen_k), of q's dtype, contiguous, before dropout: 0 for a pair
            that is hidden or doesn't count, whatever q and k hold there. With sinks a row's sum lacks the
            sink's share.

    Raises:
        ValueError, TypeError: an argument makes no sense, or there would be more than max_elements; the
            sentence says which, and what is accepted.
        NotImplementedError: a gradient is asked for.
    """
    for name, tensor in {"q": q, "k": k}.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{_FACE}: {name} is of type {type(tensor).__name__}; a torch.Tensor is accepted")
    checks.require_dense(_FACE, q=q, k=k)
    for name, tensor in {"q": q, "k": k}.items():
        if tensor.dim() != 4:
            raise ValueError(
                f"{_FACE}: {name} has {tensor.dim()} dimensions; 4, (batch, heads, seqlen, head_dim), are "
                "accepted"
            )
    if max_elements is not None:
        if not isinstance(max_elements, int) or isinstance(max_elements, bool):
            raise TypeError(f"{_FACE}: max_elements is {shown(max_elements)}; an int or None is accepted")
        count = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
        if count > max_elements:
            raise ValueError(
                f"{_FACE}: there would be {count} weights; at most max_elements, {max_elements}, are accepted"
            )
    checks.require_stored("attention_weights", k=k)
    v = k[..., :_COLUMNS]  # of which nothing but the LSE's forward knows
    weights = call("attention_weights", ops.weights, q, k, v, {}, causal, softmax_scale, options)
    return weights[..., : k.shape[2]]  # where there are no keys, sinks have one
