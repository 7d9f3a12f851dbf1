"""The softmax on the CPU, and its gradient; see forward.py for the calls of C++."""

from __future__ import annotations

import torch

from flash_cute._cpu.windows import visible


def hidden_columns(
    shape: torch.Size,
    causal: bool,
    seqused_k: torch.Tensor | None,
    leftpad_k: torch.Tensor | None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """bool, of a shape that broadcasts to x's: where a row does not see a column."""
    columns = torch.arange(shape[-1], device=device)
    rows = torch.arange(shape[-2], device=device).unsqueeze(1) if causal else 0

    def bound(length: torch.Tensor | None, default: int) -> torch.Tensor | int:
        if length is None:
            return default
        return length.clamp(0, shape[-1]).view(-1, *(1,) * (len(shape) - 1))

    used, skipped = bound(seqused_k, shape[-1]), bound(leftpad_k, 0)
    right = 0 if causal else None
    return ~visible(rows, columns, shape[-2] if causal else 0, used, right=right, skipped=skipped)


def softmax(x, scale=1.0, causal=False, seqused_k=None, leftpad_k=None):
    """flash_cute::_softmax."""
    torch.ops.flash_cute._softmax_cpu.default(x, scale, causal, seqused_k, leftpad_k)
    hidden = hidden_columns(x.shape, causal, seqused_k, leftpad_k)
    if x.numel() == 0:
        return x.new_empty(x.shape), x.new_full(x.shape[:-1], -torch.inf, dtype=torch.float32)
    scores = (x.float() * scale).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1).masked_fill(hidden, 0).to(x.dtype), scores.logsumexp(-1)


def softmax_backward(dprobabilities, dlse, kept, scale=1.0, causal=False, seqused_k=None, leftpad_k=None):
    arguments = dprobabilities, dlse, kept, scale, causal, seqused_k, leftpad_k
    torch.ops.flash_cute._softmax_backward_cpu.default(*arguments)
    hidden = hidden_columns(kept.shape, causal, seqused_k, leftpad_k)
    p, shift = kept.float(), 0 if dlse is None else dlse.unsqueeze(-1)
    if kept.dtype != torch.float32:
        p = (scale * p).masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0)
    dp = (
        torch.zeros((), dtype=torch.float32)
        if dprobabilities is None
        else dprobabilities.float().masked_fill(hidden, 0)
    )
    gradient = scale * p * (dp - (p * dp).sum(-1, keepdim=True) + shift)
    return gradient.masked_fill(hidden, 0).to(kept.dtype, memory_format=torch.contiguous_format)
