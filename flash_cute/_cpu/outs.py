"""Where the result of a forward lies that no caller gave memory for."""

from __future__ import annotations

import torch


def empty_out(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A tensor of q's shape, but with v's head_dim: torch.empty_like(q) where both have the same.

    Else it is dense, its last dimension innermost and the others in the order of q's strides. C++ has this
    rule for GPUs (allocate_out in csrc/tensors.cpp).
    """
    width, last = v.shape[-1], q.dim() - 1
    if width == q.shape[-1]:
        return torch.empty_like(q)
    outermost_first = sorted(range(last), key=q.stride, reverse=True)  # of equal strides in their order
    sizes = *q.shape[:-1], width
    return torch.empty_permuted(sizes, (*outermost_first, last), dtype=q.dtype, device=q.device)
