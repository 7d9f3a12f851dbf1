"""Attention for CPU tensors, by PyTorch's own CPU flash attention."""

from __future__ import annotations

import torch

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

# Queries per call with a mask: bounds its memory, and a call gets only the keys that its queries can see.
_MASKED_ROWS = 512


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    window_left: int,
    window_right: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """flash_cute::_forward_cpu: the forward for checked arguments without defaults; a limit of -1 is none.

    Computes in float32: PyTorch's kernel for 16-bit types has a cheaper exp() that leaves 6e-5 in the LSE.

    Returns out like q, (batch, heads_q, seqlen_q, head_dim), and lse, float32 (batch, heads_q, seqlen_q).
    """
    out = torch.zeros_like(q)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
    if not (q.numel() and k.numel()):
        return out, lse

    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    shift, unlimited = seqlen_k - seqlen_q, seqlen_q + seqlen_k
    left, right = (unlimited if limit < 0 else limit for limit in (window_left, window_right))
    first_row = max(0, -shift - right)  # those before it see no key
    full_to_the_left = left >= seqlen_k - 1
    full = full_to_the_left and right >= seqlen_q - 1
    # PyTorch's causal mask is aligned top left. That is ours where the rows that see a key form a square.
    causal = full_to_the_left and right == 0 and shift <= 0 and not full

    q, k, v = (x.to(torch.float32, memory_format=torch.contiguous_format) for x in (q, k, v))
    step = seqlen_q if full or causal else _MASKED_ROWS
    for begin in range(first_row, seqlen_q, step):
        rows = slice(begin, min(begin + step, seqlen_q))
        keys = slice(max(0, begin + shift - left), min(seqlen_k, rows.stop + shift + right))
        mask = None if full or causal else _mask(rows, keys, shift, left, right)
        out[:, :, rows], lse[:, :, rows] = _flash(
            q[:, :, rows], k[:, :, keys], v[:, :, keys], 0.0, causal, attn_mask=mask, scale=softmax_scale
        )
    return out, lse


def _mask(rows: slice, keys: slice, shift: int, left: int, right: int) -> torch.Tensor:
    """float32 (rows, keys): 0 where a query sees a key, else -inf."""
    distance = torch.arange(keys.start, keys.stop) - torch.arange(rows.start, rows.stop).unsqueeze(1) - shift
    hidden = (distance < -left) | (distance > right)
    return torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)
