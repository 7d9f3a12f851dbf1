"""Attention in plain PyTorch: the float64 oracle, the yardstick in the inputs' dtype, and the error between.

Quadratic in memory on purpose: what is computed should be plain to see. Works on any device.
"""

from __future__ import annotations

import math

import torch

from flash_cute import dropout
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


def visible_pairs(
    q: torch.Tensor,
    k: torch.Tensor,
    causal: bool = False,
    window: Window = None,
    ranges: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """visible of a call, cut by a mask, booleans or bits, and a bias of -inf: (..., seqlen_q, seqlen_k).

    All of its dimensions broadcast to (batch, heads_q, seqlen_q, seqlen_k).
    """
    seen = visible(q.shape[2], k.shape[2], causal, window, q.device, ranges)
    if mask is not None:
        if mask.dtype == torch.uint8:
            bits = mask.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=mask.device) & 1
            mask = bits.bool().flatten(-2)[..., : k.shape[2]]
        seen = seen & mask
    if bias is not None:
        seen = seen & ~_of_batch(bias, q.shape[0]).isneginf()
    return seen


def _of_batch(bias: torch.Tensor, batch: int) -> torch.Tensor:
    """A bias with an entry for each sequence; each of its own is of as many neighbouring ones."""
    return bias.repeat_interleave(batch // max(1, len(bias)), 0)


def changed_scores(
    scores: torch.Tensor,
    softcap: float = 0.0,
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Of products, scaled, (batch, heads_q, seqlen_q, seqlen_k), what softmax is of where seen."""
    if softcap > 0:
        scores = softcap * (scores / softcap).tanh()
    if bias is not None:
        bias = _of_batch(bias, scores.shape[0]).to(scores.dtype)
        bounds = torch.finfo(scores.dtype)
        total = scores + bias
        # Sums of what is finite, such as the lowest number and a score, stay so.
        scores = torch.where(scores.isfinite() & bias.isfinite(), total.clamp(bounds.min, bounds.max), total)
    if alibi_slopes is not None:
        seqlen_q, seqlen_k = scores.shape[2:]
        row = torch.arange(seqlen_q, device=scores.device).unsqueeze(1)
        distance = (row + seqlen_k - seqlen_q - torch.arange(seqlen_k, device=scores.device)).abs()
        wide = torch.promote_types(scores.dtype, torch.float32)
        scores = (scores.to(wide) - alibi_slopes.to(wide)[..., None, None] * distance).to(scores.dtype)
    return scores


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: Window = None,
    dtype: torch.dtype = torch.float64,
    ranges: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    dropout_seed: torch.Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """flash_cute.forward by its definition, computed in dtype. Differentiable.

    In float64 it is the oracle. In q.dtype it is the yardstick of the tolerance rule: attention written with
    PyTorch's operators, which rounds scores and weights to that type. A bias counts as it is given, in any
    type; with dropout_p > 0 there must be a dropout_seed.

    Returns out, (batch, heads_q, seqlen_q, head_dim of v) in dtype, and lse, (batch, heads_q, seqlen_q) in
    dtype or float32, whichever is wider.
    """
    group, rest = divmod(q.shape[1], max(1, k.shape[1]))
    if rest:
        raise ValueError(f"q has {q.shape[1]} heads and k {k.shape[1]}; a multiple of k's is accepted")
    scale = 1 / math.sqrt(q.shape[3]) if softmax_scale is None else softmax_scale
    seen = visible_pairs(q, k, causal, window, ranges, mask, bias)
    sees_nothing, unreachable = _hidden_rows(seen, q.shape[1], k.shape[1])

    q, k, v = q.to(dtype), k.to(dtype).repeat_interleave(group, 1), v.to(dtype)
    v = v.masked_fill(unreachable.unsqueeze(-1), 0).repeat_interleave(group, 1)  # 0 x NaN would be NaN
    scores = changed_scores(_product(q, k.mT) * scale, softcap, bias, alibi_slopes)
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = scores.softmax(-1).masked_fill(sees_nothing.unsqueeze(-1), 0)
    if dropout_p > 0:
        kept = dropout.dropout_mask(dropout_seed, *weights.shape, dropout_p)
        weights = weights * kept * (dropout.STEPS / dropout.keep_of(dropout_p))
    scores = scores.to(torch.promote_types(dtype, torch.float32))
    if bias is None or scores.shape[-1] == 0:
        return _product(weights, v), scores.logsumexp(-1)
    # Beside a number as large as the lowest of a type there is no room for the logarithm of a few keys, of
    # which the gradient is made.
    highest = scores.detach().amax(-1, keepdim=True)
    large = torch.where(highest.isfinite() & (highest.abs() > 1e4), highest, 0)
    return _product(weights, v), (scores - large).logsumexp(-1) + large.squeeze(-1)


def _hidden_rows(seen: torch.Tensor, heads: int, heads_kv: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of visible pairs: which queries see nothing, and which keys of which head of k nobody sees.

    Both broadcast to (batch, heads or heads_kv, rows).
    """
    unreachable = ~seen.any(-2)
    if unreachable.dim() == 3 and unreachable.shape[1] > 1:
        unreachable = unreachable.unflatten(1, (heads_kv, -1)).all(2)
    return ~seen.any(-1), unreachable


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
    **changes,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients dq, dk and dv by autograd through forward in dtype; dout and dlse belong to its results.

    changes: mask, bias, alibi_slopes, dropout_seed, softcap and dropout_p, as in forward. What queries hold
    that see no key, and keys that no query sees, does not matter: their gradients are 0.
    """
    return _gradients(q, k, v, dout, dlse, causal, softmax_scale, window, dtype, ranges, **changes)[:3]


def bias_gradient(q, k, v, dout, dlse, *arguments, **changes) -> torch.Tensor:
    """Likewise the gradient of the bias among the changes, of its shape, in dtype."""
    return _gradients(q, k, v, dout, dlse, *arguments, **changes)[3]


def _gradients(
    q, k, v, dout, dlse, causal=False, softmax_scale=None, window=None, dtype=torch.float64, ranges=None,
    **changes,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Of q, k, v and a bias that there is."""
    hiding = (changes.get(name) for name in ("mask", "bias"))
    seen = visible_pairs(q, k, causal, window, ranges, *hiding)
    sees_nothing, unreachable = _hidden_rows(seen, q.shape[1], k.shape[1])
    with torch.enable_grad():
        q, k, v = (
            x.detach().to(dtype).masked_fill(hidden.unsqueeze(-1), 0).requires_grad_()
            for x, hidden in ((q, sees_nothing), (k, unreachable), (v, unreachable))
        )
        leaves = [q, k, v]
        if changes.get("bias") is not None:
            leaves.append(changes["bias"].detach().to(dtype).requires_grad_())
            changes["bias"] = leaves[3]
        out, lse = forward(q, k, v, causal, softmax_scale, window, dtype, ranges, **changes)
    gradients = [
        torch.zeros_like(result) if gradient is None else gradient.to(result.dtype).masked_fill(hidden, 0)
        for result, gradient, hidden in (
            (out, dout, sees_nothing.unsqueeze(-1)),
            (lse, dlse, sees_nothing),
        )
    ]
    return torch.autograd.grad((out, lse), leaves, gradients)


def error(result: torch.Tensor, oracle: torch.Tensor) -> tuple[float, float]:
    """Maximum and root mean square of result - oracle, both inf where only one of the two is finite."""
    if not torch.equal(result.isfinite(), oracle.isfinite()):
        return math.inf, math.inf
    if result.numel() == 0:
        return 0.0, 0.0
    difference = (result - oracle).where(oracle.isfinite(), 0)
    return difference.abs().max().item(), difference.square().mean().sqrt().item()
