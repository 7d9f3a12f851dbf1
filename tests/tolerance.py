"""The one tolerance rule, for every result of every kernel.

    err(ours, fp64) <= 2 * err(same-dtype PyTorch math, fp64) + 1e-5

by element maximum and by root mean square, for the output and for the LSE, and -inf and NaN in the same places.
"""

from __future__ import annotations

import math

import torch
from cases import Mask

import flash_cute.reference

FACTOR, SLACK = 2.0, 1e-5


def same_dtype_math(q, k, v, mask: Mask, softmax_scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention written with PyTorch's operators in the inputs' own dtype, the yardstick: (out, float32 LSE)."""
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    visible = mask.visible(q.shape[2], k.shape[2], q.device)
    scores = (q @ k.mT * scale).masked_fill(~visible, -torch.inf)
    weights = scores.softmax(-1).masked_fill(~visible, 0)
    return weights @ v, scores.float().logsumexp(-1)


def assert_within_rule(name: str, ours: torch.Tensor, math_result: torch.Tensor, oracle: torch.Tensor) -> None:
    """Assert the rule for one result; oracle is float64, math_result the same-dtype yardstick, all of one shape."""
    assert ours.shape == oracle.shape, f"{name}: shape {tuple(ours.shape)}, expected {tuple(oracle.shape)}"
    for pattern in (torch.isnan, torch.isneginf, torch.isposinf):
        wrong = (pattern(ours) != pattern(oracle)).sum().item()
        assert wrong == 0, f"{name}: {pattern.__name__} differs from the oracle in {wrong} of {ours.numel()} elements"
    finite = torch.isfinite(oracle)
    if not finite.any():
        return
    error, allowed = ((result.double() - oracle)[finite].abs() for result in (ours, math_result))
    for norm, measure in (("maximum", torch.amax), ("RMS", lambda e, dim: e.square().mean(dim).sqrt())):
        got, bound = measure(error, dim=0).item(), FACTOR * measure(allowed, dim=0).item() + SLACK
        assert got <= bound, f"{name}: {norm} error {got:.3e} is over {bound:.3e} (2 x PyTorch's own + 1e-5)"


def assert_attention(result, q, k, v, mask: Mask = Mask(), softmax_scale: float | None = None) -> None:
    """Check result = (out, lse) of our forward on finite inputs against float64, with types and shapes."""
    out, lse = result
    assert out.dtype == q.dtype and out.device == q.device
    assert lse.dtype == torch.float32 and lse.is_contiguous()
    oracle = flash_cute.reference.forward(q, k, v, softmax_scale=softmax_scale, **mask.options)
    yardstick = same_dtype_math(q, k, v, mask, softmax_scale)
    for name, ours, math_result, exact in zip(("out", "lse"), (out, lse), yardstick, oracle):
        assert exact.dtype == torch.float64
        assert_within_rule(name, ours, math_result, exact)
