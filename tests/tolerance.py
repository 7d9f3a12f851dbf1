"""The one tolerance rule, for every result of every kernel.

    err(ours, fp64) <= 2 * err(same-dtype PyTorch math, fp64) + 1e-5

by element maximum and by root mean square, for out and LSE; and -inf and NaN in the same places.
"""

from __future__ import annotations

import torch
from cases import MASKS, Mask

from flash_cute import reference

FACTOR, SLACK = 2.0, 1e-5


def assert_within_rule(name: str, ours: torch.Tensor, yardstick: torch.Tensor, oracle: torch.Tensor) -> None:
    """Assert the rule for one result; oracle is float64, yardstick PyTorch's result in the inputs' dtype."""
    assert ours.shape == oracle.shape, f"{name}: shape {tuple(ours.shape)}, expected {tuple(oracle.shape)}"
    for pattern in (torch.isnan, torch.isneginf, torch.isposinf):
        wrong = (pattern(ours) != pattern(oracle)).sum().item()
        assert wrong == 0, (
            f"{name}: {pattern.__name__} is not the oracle's in {wrong} of {ours.numel()} elements"
        )
    finite = torch.isfinite(oracle)
    if not finite.any():
        return
    error, allowed = ((result.double() - oracle)[finite].abs() for result in (ours, yardstick))
    for norm, measure in (("maximum", torch.max), ("RMS", lambda errors: errors.square().mean().sqrt())):
        got, bound = measure(error).item(), FACTOR * measure(allowed).item() + SLACK
        assert got <= bound, f"{name}: {norm} error {got:.3e} is over {bound:.3e}, what PyTorch's own allows"


def assert_attention(result, q, k, v, mask: Mask = MASKS["full"], softmax_scale: float | None = None) -> None:
    """Check our forward's (out, lse): shapes, types, and values against float64 on these inputs."""
    out, lse = result
    assert (out.dtype, out.device) == (q.dtype, q.device)
    assert (lse.dtype, lse.device) == (torch.float32, q.device)
    assert lse.is_contiguous()
    options = {"softmax_scale": softmax_scale, **mask.options}
    oracle = reference.forward(q, k, v, **options)
    yardstick = reference.forward(q, k, v, dtype=q.dtype, **options)
    assert_within_rule("out", out, yardstick[0], oracle[0])
    assert_within_rule("lse", lse, yardstick[1], oracle[1])
