"""Attention in plain PyTorch: the float64 oracle, the yardstick in the inputs' dtype, and the error between.

Quadratic in memory on purpose: what is computed should be plain to see. Works on any device.
"""

from __future__ import annotations

import math

import torch

from flash_cute.wording import shown

Window = int | tuple[int | None, int | None] | None


def visible(
    seqlen_q: int,
    seqlen_k: int,
    causal: bool = False,
    window: Window = None,
    device: torch.device | None = None,
    ranges: torch.Tensor | None = None,
) -> torch.Tensor:
    """The mask as booleans, (seqlen_q, seqlen_k), aligned at the bottom right.

    Query i sees key j iff i + seqlen_k - seqlen_q - left <= j <= i + seqlen_k - seqlen_q + right. With
    ranges, (..., seqlen_q, R, 2), it is (..., seqlen_q, seqlen_k), and start <= j < end holds in one of them.
    """
    limits = window if isinstance(window, tuple | list) else (window, window)
    if len(limits) != 2 or any(limit is not None and limit < 0 for limit in limits):
        raise ValueError(f"window is {shown(window)}; None, an int >= 0 or a pair of these is accepted")
    left, right = limits
    right = 0 if causal else right
    diagonal = torch.arange(seqlen_q, device=device).unsqueeze(1) + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k, device=device)
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if left is not None:
        seen &= key >= diagonal - left
    if right is not None:
        seen &= key <= diagonal + right
    if ranges is not None:
        seen = seen & sum((start <= key) & (key < end) for start, end in _starts_and_ends(ranges)).bool()
    return seen


def _starts_and_ends(ranges: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each range of all queries, (..., seqlen_q, 1)."""
    return [tuple(bound.unsqueeze(-1) for bound in one.unbind(-1)) for one in ranges.unbind(-2)]


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, summed in float32 and rounded once where the type has 16 bits; so are its gradients.

    PyTorch's own product does the same, but on a CPU without instructions for such types it takes 10 to 20
    times as long as that of float32.
    """
    if a.device.type == "cpu" and a.dtype in (torch.float16, torch.bfloat16):
        return (a.float() @ b.float()).to(a.dtype)
    return a @ b


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: Window = None,
    dtype: torch.dtype = torch.float64,
    ranges: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """flash_cute.forward by its definition, computed in dtype. Differentiable.

    In float64 it is the oracle. In q.dtype it is the yardstick of the tolerance rule: attention written with
    PyTorch's operators, which rounds scores and weights to that type.

    Returns out, (batch, heads_q, seqlen_q, head_dim of v) in dtype, and lse, (batch, heads_q, seqlen_q) in
    dtype or float32, whichever is wider.
    """
    group, rest = divmod(q.shape[1], max(1, k.shape[1]))
    if rest:
        raise ValueError(f"q has {q.shape[1]} heads and k {k.shape[1]}; a multiple of k's is accepted")
    scale = 1 / math.sqrt(q.shape[3]) if softmax_scale is None else softmax_scale
    seen = visible(q.shape[2], k.shape[2], causal, window, q.device, ranges)
    sees_nothing, unreachable = ~seen.any(-1, keepdim=True), ~seen.any(-2).unsqueeze(-1)

    q, k, v = q.to(dtype), k.to(dtype).repeat_interleave(group, 1), v.to(dtype).repeat_interleave(group, 1)
    scores = (_product(q, k.mT) * scale).masked_fill(~seen, -torch.inf)
    weights = scores.softmax(-1).masked_fill(sees_nothing, 0)
    out = _product(weights, v.masked_fill(unreachable, 0))  # 0 x NaN would be NaN
    return out, scores.to(torch.promote_types(dtype, torch.float32)).logsumexp(-1)


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: Window = None,
    dtype: torch.dtype = torch.float64,
    ranges: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients dq, dk and dv by autograd through forward in dtype; dout and dlse belong to its results.

    What queries hold that see no key, and keys that no query sees, does not matter: their gradients are 0.
    """
    seen = visible(q.shape[2], k.shape[2], causal, window, q.device, ranges)
    sees_nothing, unreachable = ~seen.any(-1), ~seen.any(-2).unsqueeze(-1)
    with torch.enable_grad():
        q, k, v = (
            x.detach().to(dtype).masked_fill(hidden, 0).requires_grad_()
            for x, hidden in ((q, sees_nothing.unsqueeze(-1)), (k, unreachable), (v, unreachable))
        )
        out, lse = forward(q, k, v, causal, softmax_scale, window, dtype, ranges)
    gradients = [
        torch.zeros_like(result) if gradient is None else gradient.to(result.dtype).masked_fill(hidden, 0)
        for result, gradient, hidden in (
            (out, dout, sees_nothing.unsqueeze(-1)),
            (lse, dlse, sees_nothing),
        )
    ]
    return torch.autograd.grad((out, lse), (q, k, v), gradients)


def error(result: torch.Tensor, oracle: torch.Tensor) -> tuple[float, float]:
    """Maximum and root mean square of result - oracle, both inf where only one of the two is finite."""
    if not torch.equal(result.isfinite(), oracle.isfinite()):
        return math.inf, math.inf
    if result.numel() == 0:
        return 0.0, 0.0
    difference = (result - oracle).where(oracle.isfinite(), 0)
    return difference.abs().max().item(), difference.square().mean().sqrt().item()
