"""Attention for CPU tensors, by PyTorch's own CPU flash attention."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

# Queries per call with a mask: bounds its memory, and a call gets only the keys that its queries can see.
_MASKED_ROWS = 512
# PyTorch's kernel for 16-bit types has a cheaper exp(), which leaves up to 6e-5 in the LSE. Scores of this
# standard deviation and more are rounded by plain PyTorch in the same type to several times that.
_LARGE_SCORES = 0.3
_SAMPLED_ROWS = 16  # of each head, to estimate it from


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    window_left: int,
    window_right: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """flash_cute::_forward_cpu: the forward for checked arguments without defaults; a limit of -1 is none.

    Computes in the type of the inputs where there is no mask but the causal one and the LSE allows it, else
    in float32.

    Returns out like q, (batch, heads_q, seqlen_q, head_dim), and lse, float32 (batch, heads_q, seqlen_q).
    """
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    shift, unlimited = seqlen_k - seqlen_q, seqlen_q + seqlen_k
    left, right = (unlimited if limit < 0 else limit for limit in (window_left, window_right))
    first_row = max(0, -shift - right)  # those before it see no key
    some_see_nothing = first_row > 0 or seqlen_k == 0
    out = torch.zeros_like(q) if some_see_nothing else torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32)
    if some_see_nothing:
        lse.fill_(-torch.inf)
    if not (q.numel() and k.numel()):
        return out, lse

    full_to_the_left = left >= seqlen_k - 1
    full = full_to_the_left and right >= seqlen_q - 1
    # PyTorch's causal mask is aligned top left. That is ours where the rows that see a key form a square.
    causal = full_to_the_left and right == 0 and shift <= 0 and not full

    if (full or causal) and softmax_scale * _deviation(q, k) >= _LARGE_SCORES:
        # PyTorch's kernel allocates its output like q, and wants rows without gaps of all of them.
        q = q if out.stride(3) == 1 else q.contiguous()
        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    else:
        q, k, v = (x.to(torch.float32, memory_format=torch.contiguous_format) for x in (q, k, v))

    def blocks(step: int) -> Iterator[tuple[slice, slice]]:
        """Rows that see a key, `step` at a time, and the keys that they see."""
        for begin in range(first_row, seqlen_q, step):
            rows = slice(begin, min(begin + step, seqlen_q))
            yield rows, slice(max(0, begin + shift - left), min(seqlen_k, rows.stop + shift + right))

    for rows, keys in blocks(seqlen_q if full or causal else _MASKED_ROWS):
        mask = None if full or causal else _mask(rows, keys, shift, left, right)
        results = _flash(
            q[:, :, rows], k[:, :, keys], v[:, :, keys], 0.0, causal, attn_mask=mask, scale=softmax_scale
        )
        if (results[0].shape, results[0].stride(), results[0].dtype) == (out.shape, out.stride(), out.dtype):
            out, lse = results[0], results[1].contiguous()
        else:
            out[:, :, rows], lse[:, :, rows] = results
    # PyTorch's kernel gives an LSE and an out of 0 to rows whose scores are all -inf, or NaN.
    lowest, highest = (bound.item() for bound in lse[:, :, first_row:].abs().aminmax())
    if not (lowest > 0 and highest < torch.inf):
        for rows, keys in blocks(_MASKED_ROWS):
            mask = _mask(rows, keys, shift, left, right)
            out[:, :, rows], lse[:, :, rows] = _plain(
                q[:, :, rows], k[:, :, keys], v[:, :, keys], mask, softmax_scale
            )
    return out, lse


def _deviation(q: torch.Tensor, k: torch.Tensor) -> float:
    """About the standard deviation of q kᵀ: that of random directions, from a sample of the rows."""
    squares = 1.0
    for x in (q, k):
        sample = x[:, :, :: -(-x.shape[2] // _SAMPLED_ROWS)]
        squares *= torch.linalg.vector_norm(sample, dtype=torch.float32).item() ** 2 / sample.numel()
    return math.sqrt(squares * q.shape[3])


def _mask(rows: slice, keys: slice, shift: int, left: int, right: int) -> torch.Tensor:
    """float32 (rows, keys): 0 where a query sees a key, else -inf."""
    distance = torch.arange(keys.start, keys.stop) - torch.arange(rows.start, rows.stop).unsqueeze(1) - shift
    hidden = (distance < -left) | (distance > right)
    return torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)


def _plain(q, k, v, mask, scale) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) with the infinities and NaNs that PyTorch's operators give."""
    q, k, v = q.float(), *(x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * scale).masked_fill(mask.isneginf(), -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)
