"""The one tolerance rule, for every result of every kernel.

    err(ours, fp64) <= 2 * err(same-dtype PyTorch math, fp64) + 1e-5

by element maximum and by root mean square, for out, LSE and gradients; and -inf and NaN in the same places.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flash_cute import reference
from support.cases import MASKS, Mask, Ragged, as_entries

FACTOR, SLACK = 2.0, 1e-5
NORMS = {"maximum": torch.max, "RMS": lambda errors: errors.square().mean().sqrt()}


def assert_within_rule(
    name: str,
    ours: torch.Tensor,
    yardstick: torch.Tensor,
    oracle: torch.Tensor,
    norms: Iterable[str] = tuple(NORMS),
) -> None:
    """Assert the rule for one result; oracle is float64, yardstick PyTorch's result in the inputs' dtype."""
    assert ours.shape == oracle.shape, f"{name}: shape {tuple(ours.shape)}, expected {tuple(oracle.shape)}"
    results = [ours, yardstick, oracle]
    if not (ours.isfinite().all() and oracle.isfinite().all()):  # seldom; a selection takes the CPU long
        for pattern in (torch.isnan, torch.isneginf, torch.isposinf):
            wrong = (pattern(ours) != pattern(oracle)).sum().item()
            assert wrong == 0, (
                f"{name}: {pattern.__name__} is not the oracle's in {wrong} of {ours.numel()} elements"
            )
        finite = torch.isfinite(oracle)
        results = [result[finite] for result in results]
    ours, yardstick, oracle = results
    if not oracle.numel():
        return
    error, allowed = ((result.double() - oracle).abs() for result in (ours, yardstick))
    for norm in norms:
        got, bound = NORMS[norm](error).item(), FACTOR * NORMS[norm](allowed).item() + SLACK
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
    result,
    batch: Ragged,
    mask: Mask | list[Mask] = MASKS["full"],
    softmax_scale: float | None = None,
) -> None:
    """Likewise for a batch of unequal lengths, against its sequences one by one; the rest is 0 and -inf.

    mask: of all sequences, or a list with that of each.
    """
    out, lse = result
    sizes = *batch.q.shape[:-1], batch.v.shape[-1]
    assert (out.shape, out.dtype, out.device) == (sizes, batch.q.dtype, batch.q.device)
    if sizes == batch.q.shape:
        assert out.stride() == torch.empty_like(batch.q).stride()
    assert (lse.dtype, lse.device) == (torch.float32, out.device)
    assert lse.is_contiguous()
    if batch.packed:
        out, lse = out.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)
    q, k, v = batch.entries
    oracle, yardstick = (
        (
            torch.zeros_like(out, dtype=dtype),
            torch.full(q.shape[:3], -torch.inf, device=q.device).to(lse_dtype),
        )
        for dtype, lse_dtype in ((torch.float64, torch.float64), (q.dtype, torch.float32))
    )
    for (entry, rows, keys), options in zip(batch.places, _options(batch, mask, softmax_scale), strict=True):
        tensors = (x[entry, :, part].unsqueeze(0) for x, part in ((q, rows), (k, keys), (v, keys)))
        sequence = list(tensors)
        for results, dtype in ((oracle, torch.float64), (yardstick, q.dtype)):
            parts = reference.forward(*sequence, dtype=dtype, **options)
            for whole, part in zip(results, parts, strict=True):
                whole[entry, :, rows] = part[0]
    assert (out[oracle[1].isneginf()] == 0).all()
    assert_within_rule("out", out, yardstick[0], oracle[0])
    assert_within_rule("lse", lse, yardstick[1], oracle[1])


def assert_gradients(
    gradients, q, k, v, dout, dlse, mask: Mask = MASKS["full"], softmax_scale: float | None = None
) -> None:
    """Check our backward's (dq, dk, dv) against float64; dout or dlse may be None."""
    options = {"softmax_scale": softmax_scale, **mask.options}
    oracle = reference.backward(q, k, v, dout, dlse, **options)
    yardstick = reference.backward(q, k, v, dout, dlse, dtype=q.dtype, **options)
    for name, tensor, *results in zip("qkv", (q, k, v), gradients, yardstick, oracle, strict=True):
        ours = results[0]
        assert (ours.dtype, ours.device) == (tensor.dtype, tensor.device)
        assert ours.stride() == torch.empty_like(tensor).stride()
        assert_within_rule(f"d{name}", *results)


def assert_gradients_of_rounded_out(gradients, q, k, v, dout, out, softmax_scale: float) -> None:
    """Likewise without a mask, where another yardstick than PyTorch's path is due: FlashAttention's.

    That computes in float32, but takes delta from `out`, which is rounded, and rounds the weights and the
    gradients of the scores for their products.
    """
    group = q.shape[1] // k.shape[1]
    queries, of_out = q.float(), dout.float()
    keys, values = (x.float().repeat_interleave(group, 1) for x in (k, v))
    weights = (softmax_scale * queries @ keys.mT).softmax(-1)
    delta = (of_out * out.float()).sum(-1, keepdim=True)
    of_scores = (weights * (of_out @ values.mT - delta)).to(q.dtype).float() * softmax_scale
    yardstick = [
        of_scores @ keys,
        (of_scores.mT @ queries).unflatten(1, (-1, group)).sum(2),
        (weights.to(q.dtype).float().mT @ of_out).unflatten(1, (-1, group)).sum(2),
    ]
    oracle = reference.backward(q, k, v, dout, None, softmax_scale=softmax_scale)
    for name, ours, allowed, exact in zip("qkv", gradients, yardstick, oracle, strict=True):
        assert_within_rule(f"d{name}", ours, allowed.to(q.dtype), exact)


def assert_ragged_gradients(
    gradients,
    batch: Ragged,
    dout,
    dlse,
    mask: Mask | list[Mask] = MASKS["full"],
    softmax_scale: float | None = None,
) -> None:
    """Likewise for a batch of unequal lengths, against its sequences one by one; the rest is 0."""
    tensors = batch.q, batch.k, batch.v
    for ours, tensor in zip(gradients, tensors, strict=True):
        assert (ours.shape, ours.dtype, ours.device) == (tensor.shape, tensor.dtype, tensor.device)
        assert ours.stride() == torch.empty_like(tensor).stride()
    gradients, dout = ([as_entries(batch, x) for x in tensors] for tensors in (gradients, [dout]))
    dlse = dlse.unsqueeze(0) if batch.packed else dlse
    types = torch.float64, batch.q.dtype
    oracle, yardstick = ([torch.zeros_like(x, dtype=dtype) for x in batch.entries] for dtype in types)
    for (entry, rows, keys), options in zip(batch.places, _options(batch, mask, softmax_scale), strict=True):
        q, k, v, of_out, of_lse = (
            x[entry, :, part].unsqueeze(0)
            for x, part in zip((*batch.entries, *dout, dlse), (rows, keys, keys, rows, rows), strict=True)
        )
        for results, dtype in zip((oracle, yardstick), types, strict=True):
            parts = reference.backward(q, k, v, of_out, of_lse, dtype=dtype, **options)
            for whole, place, part in zip(results, (rows, keys, keys), parts, strict=True):
                whole[entry, :, place] = part[0]
    counts = [torch.zeros(x.shape[0], x.shape[2], dtype=torch.bool, device=x.device) for x in batch.entries]
    for entry, rows, keys in batch.places:
        for count, place in zip(counts, (rows, keys, keys), strict=True):
            count[entry, place] = True
    for name, count, *results in zip("qkv", counts, gradients, yardstick, oracle, strict=True):
        assert (results[0].transpose(1, 2)[~count] == 0).all()
        assert_within_rule(f"d{name}", *results)


def _options(batch: Ragged, mask: Mask | list[Mask], softmax_scale: float | None) -> list[dict]:
    masks = mask if isinstance(mask, list) else [mask] * len(batch.places)
    return [{"softmax_scale": softmax_scale, **mask.options} for mask in masks]
