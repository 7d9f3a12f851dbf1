"""The one tolerance rule, for every result of every kernel.

    err(ours, fp64) <= 2 * err(same-dtype PyTorch math, fp64) + 1e-5

by element maximum and by root mean square, for out and LSE; and -inf and NaN in the same places.
"""

from __future__ import annotations

import torch
from cases import MASKS, Mask, Ragged

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


def assert_ragged(
    result, batch: Ragged, mask: Mask = MASKS["full"], softmax_scale: float | None = None
) -> None:
    """Likewise for a batch of unequal lengths, against its sequences one by one; the rest is 0 and -inf."""
    out, lse = result
    assert (out.shape, out.dtype, out.device) == (batch.q.shape, batch.q.dtype, batch.q.device)
    assert out.stride() == torch.empty_like(batch.q).stride()
    assert (lse.dtype, lse.device) == (torch.float32, out.device)
    assert lse.is_contiguous()
    if batch.packed:
        out, lse = out.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)
    q, k, v = batch.entries
    options = {"softmax_scale": softmax_scale, **mask.options}
    oracle, yardstick = (
        (torch.zeros_like(q, dtype=dtype), torch.full(q.shape[:3], -torch.inf, device=q.device).to(lse_dtype))
        for dtype, lse_dtype in ((torch.float64, torch.float64), (q.dtype, torch.float32))
    )
    for entry, rows, keys in batch.places:
        tensors = (x[entry, :, part].unsqueeze(0) for x, part in ((q, rows), (k, keys), (v, keys)))
        sequence = list(tensors)
        for results, dtype in ((oracle, torch.float64), (yardstick, q.dtype)):
            for whole, part in zip(
                results, reference.forward(*sequence, dtype=dtype, **options), strict=True
            ):
                whole[entry, :, rows] = part[0]
    assert (out[oracle[1].isneginf()] == 0).all()
    assert_within_rule("out", out, yardstick[0], oracle[0])
    assert_within_rule("lse", lse, yardstick[1], oracle[1])
