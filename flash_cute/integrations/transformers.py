"""flash_cute as an attention implementation of transformers (version 5).

    import flash_cute.integrations.transformers

    model = AutoModelForCausalLM.from_pretrained(..., dtype="bfloat16", attn_implementation="cute_attention")

The import registers the name with transformers' AttentionInterface and AttentionMaskInterface, and next to it
"cute_flash_attention_3", which continuous batching accepts (transformers 5.23 and newer). Nothing waits for
the GPU: on the device, padding becomes lengths, or after expect_holes() ranges of keys, and packed sequences
become offsets.

Source: masking_utils.py and integrations/sdpa_attention.py of transformers 5.23 and 5.24.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

import flash_cute
from flash_cute import lengths
from flash_cute._torch.checks import require_stored
from flash_cute.integrations._transformers_masks import (
    NAME,
    VERSION,
    CuteMask,
    cute_mask,
    error,
    expect_holes,
    ranges_mask,
)

__all__ = ["cute_attention", "cute_flash_attention", "cute_mask", "expect_holes", "ranges_mask"]


def cute_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: CuteMask | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    pages: Any = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    softcap: float | None = None,
    output_attentions: bool | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention function that transformers calls for "cute_attention".

    Args:
        query, key, value: (batch, heads, length, head_dim), float16, bfloat16 or float32.
        attention_mask: of cute_mask; without it is_causal (else module.is_causal) and sliding_window say it.
            Or of four dimensions, all of it: bool, True is seen, or added to the scores, as forward's bias.
        dropout: of the weights, forward's dropout_p.
        scaling: multiplies the scores.
        cu_seq_lens_q, cu_seq_lens_k: where packed sequences begin among the tokens of all rows, and the last
            one ends. max_length_q and max_length_k are not needed.
        pages: of _transformers_paged, the cache that has all keys, key and value among them.
        s_aux: (heads,), the sinks of flash_cute.forward.
        position_bias: (batch or 1, heads or 1, q_length or 1, kv_length), forward's bias.
        softcap: as of forward; None is none.
        output_attentions: whether the weights are asked for, too, by flash_cute.attention_weights. They have
            no gradients.

    Returns:
        (batch, q_length, heads, head_dim), and the weights, (batch, heads, q_length, kv_length), or None.
        Queries that are padding have an out and weights of 0, or in bidirectional attention of no meaning.

    Raises:
        NotImplementedError: sinks or a bias by another name, head_mask, indices of a sparse attention, a
            paged cache or another mask is given; output_attentions beside dropout, packed sequences or where
            a gradient is asked for.
        ValueError, TypeError: as flash_cute.forward.
    """
    _check_options(options)
    if output_attentions and dropout:
        raise error("output_attentions is given together with dropout", "one of both")
    if output_attentions and torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        raise error("output_attentions is given where gradients are asked for", "torch.no_grad()")
    scores = _scores(attention_mask, position_bias, softcap, dropout)
    mask = attention_mask
    if mask is None:
        mask = _mask_of_module(module, query, key, is_causal, sliding_window)
    elif not isinstance(mask, CuteMask):  # which is among the scores
        mask = CuteMask((query.shape[0], query.shape[2], key.shape[2]), {})
    q_length, kv_length = mask.extent[1:]
    if (q_length, kv_length) != (query.shape[2], key.shape[2]):
        raise ValueError(
            f"flash_cute.transformers: the mask is for {q_length} queries and {kv_length} keys, and "
            f"there are {query.shape[2]} and {key.shape[2]}"
        )
    given, offsets = {"softmax_scale": scaling, **mask.options, **scores}, (mask.offsets, mask.offsets)
    given["deterministic"] = bool(options.get("deterministic"))
    if s_aux is not None:
        given["sinks"] = s_aux if s_aux.dtype == query.dtype else s_aux.float()
    if (cu_seq_lens_q is None) != (cu_seq_lens_k is None):
        raise error("only one of cu_seq_lens_q and cu_seq_lens_k is given", "both")
    if cu_seq_lens_q is not None:
        dense = isinstance(attention_mask, torch.Tensor)
        if mask.lengths or mask.ranges is not None or dense:
            found = "a mask of four dimensions" if dense else "padding or a static cache"
            found = found if mask.ranges is None else "padding or a mask of ranges"
            raise error(f"cu_seq_lens_q is given together with {found}", "one of both")
        offsets = cu_seq_lens_q, cu_seq_lens_k
    elif lengths.CHECKED:
        _check_positions(mask, options.get("position_ids"))
    if offsets[0] is not None:
        if output_attentions:
            raise error("output_attentions is given together with packed sequences", "one of both")
        given_offsets = dict(zip(("cu_seq_lens_q", "cu_seq_lens_k"), offsets, strict=True))
        require_stored("transformers", query=query, key=key, value=value, **given_offsets)
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        offsets = [x.to(torch.int32) for x in offsets]
        if pages is None:
            out = flash_cute.attention_varlen(q, k, v, *offsets, **given)
        else:
            out = flash_cute.attention_varlen(q, cu_seqlens_q=offsets[0], **pages._asdict(), **given)
        return out.unflatten(0, (query.shape[0], query.shape[2])), None
    given |= mask.lengths
    given["ranges"] = mask.ranges
    out, weights = flash_cute.attention(query, key, value, **given).transpose(1, 2), None
    if output_attentions:
        del given["deterministic"]
        weights = flash_cute.attention_weights(query, key, **given)
    if mask.factor is not None:
        factor = mask.factor.to(out.dtype)
        out, weights = out * factor, weights if weights is None else weights * factor.transpose(1, 2)
    return out, weights


def cute_flash_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: CuteMask | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """cute_attention for "cute_flash_attention_3", in continuous batching, too."""
    if "read_index" in options:
        attention_mask = None  # transformers 5.23 makes that of the new tokens alone
        cache = options.pop("cache", None)
        if cache is not None:  # and its models leave the update to attention
            key, value = cache.update(key, value, module.layer_idx, options)
    return cute_attention(module, query, key, value, attention_mask, **options)


# Options that models pass to their attention, and that flash_cute has not.
_NOT_OFFERED = (
    "sinks",
    "alibi",
    "attention_bias",
    "head_mask",
    "cache",
    "indices",
    "block_indices",
    "block_table",
)


def _check_options(options: dict[str, Any]) -> None:
    for name in _NOT_OFFERED:
        value = options.get(name)
        if isinstance(value, torch.Tensor) or value:
            shown = value if isinstance(value, bool | int | float) else type(value).__name__
            raise error(f"{name} is {shown}", "none")


def _scores(
    attention_mask: Any, position_bias: torch.Tensor | None, softcap: float | None, dropout: float
) -> dict[str, Any]:
    """What forward takes of a mask of four dimensions, biases, a cap and dropout."""
    found: dict[str, Any] = {}
    if softcap:
        found["softcap"] = softcap
    if dropout:
        found["dropout_p"] = dropout
    biases = [position_bias]
    if isinstance(attention_mask, CuteMask):
        biases.append(attention_mask.bias)
    elif attention_mask is not None:
        name, shape = type(attention_mask).__name__, tuple(getattr(attention_mask, "shape", ()))
        is_tensor = isinstance(attention_mask, torch.Tensor)
        if is_tensor and len(shape) == 4 and attention_mask.dtype == torch.bool:
            found["mask"] = attention_mask
        elif is_tensor and len(shape) == 4 and attention_mask.is_floating_point():
            biases.append(attention_mask)
        else:
            of_type = f" and {attention_mask.dtype}" if is_tensor else ""
            accepted = "padding of two dimensions, or four, of booleans or what is added to scores,"
            raise error(f"attention_mask is a {name} of shape {shape}{of_type}", accepted)
    for bias in biases:
        if bias is not None:
            found["bias"] = found["bias"] + bias if "bias" in found else bias
    return found


def _check_positions(mask: CuteMask, position_ids: torch.Tensor | None) -> None:
    """Of packed sequences that see each other, as transformers tells them apart only without a cache."""
    causal = mask.options.get("causal", True) and mask.options.get("window", (0, 0))[1] == 0
    together = causal and mask.offsets is mask.ranges is None and "leftpad_k" not in mask.lengths
    if not together or position_ids is None or position_ids.ndim != 2:
        return
    if not lengths.are_known(position_ids, position_ids):
        return
    restarts = (position_ids.diff(dim=1) < 1).nonzero()
    if len(restarts):
        raise ValueError(
            "flash_cute.transformers: position_ids must increase unless use_cache is False, got a restart "
            f"after token {int(restarts[0, 1])} of row {int(restarts[0, 0])}"
        )


def _mask_of_module(module, query, key, is_causal: bool | None, sliding_window: int | None) -> CuteMask:
    """What holds where transformers has made no mask."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options: dict[str, Any] = {"causal": bool(causal)}
    if sliding_window is not None:
        if not causal:
            raise error("sliding_window is given without a mask, where is_causal is False", "a mask")
        options["window"] = (sliding_window - 1, 0)
    return CuteMask((query.shape[0], query.shape[2], key.shape[2]), options)


transformers.AttentionInterface.register(NAME, cute_attention)
transformers.AttentionMaskInterface.register(NAME, cute_mask)
if VERSION >= (5, 23):  # whose caches are as _transformers_paged takes them
    from flash_cute.integrations import _transformers_paged

    _transformers_paged.install()
    transformers.AttentionInterface.register(_transformers_paged.NAME, cute_flash_attention)
    transformers.AttentionMaskInterface.register(_transformers_paged.NAME, cute_mask)
