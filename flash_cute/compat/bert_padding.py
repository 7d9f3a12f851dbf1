"""flash_attn.bert_padding: padded sequences to packed ones and back, in plain PyTorch, differentiable.

Names, arguments and return values are those of flash_attn 2.8. `rearrange` and `repeat`, which some import
from there, are einops', where that is installed.
"""

from __future__ import annotations

import torch


def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The rows of input, (rows, ...), that indices, (count,), names: (count, ...)."""
    return input.index_select(0, indices)


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """A tensor (first_axis_dim, ...) with these rows, (count, ...), where indices says, and 0 elsewhere."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """The tokens of padded sequences one after the other; waits for the device.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), bool or integers: 1 where there is a token.
        unused_mask: likewise, of tokens that are kept but are not to count.

    Returns:
        hidden_states: (total, ...), of both masks.
        indices: int64 (total,), which rows of (batch * seqlen, ...) these are.
        cu_seqlens: int32 (batch + 1,), where each sequence starts.
        max_seqlen_in_batch: the most tokens that a sequence has.
        seqused: int32 (batch,), how many tokens each sequence has in attention_mask alone.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if len(lengths) else 0
    used = attention_mask.sum(-1, dtype=torch.int32)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, used


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """(batch, seqlen, ...) with the rows of hidden_states, (total, ...), at unpad_input's indices, else 0."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.unflatten(0, (batch, seqlen))


def __getattr__(name: str):
    if name in ("rearrange", "repeat"):
        import einops

        return getattr(einops, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
