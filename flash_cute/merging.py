"""Attention to some of the keys at a time: one result of several."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flash_cute._cpu.forward import with_sinks
from flash_cute._torch.autocast import autocast_dtype
from flash_cute._torch.checks import require_stored
from flash_cute.wording import hinting


@hinting("flash_cute")
def merge(
    outs: Iterable[torch.Tensor], lses: Iterable[torch.Tensor], sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention of queries to all of their keys, from its results for parts of these keys.

    For those who write a ring of their own: any number of parts, in any order, makes what forward would have
    returned, up to the rounding of each out to its type. Plain PyTorch, computed in float32.

    Args:
        outs: one or more of forward, (batch, heads_q, seqlen_q, head_dim_v), or of forward_varlen,
            (total_q, heads_q, head_dim_v), all alike. Together their keys are those of the whole, each once.
        lses: of the same calls, (batch, heads_q, seqlen_q), or (heads_q, total_q).
        sinks: (heads_q,), as in forward, where the parts were computed without: a row counts its sink once.

    Returns:
        out: as outs in shape and dtype.
        lse: as lses; -inf, where out is 0, for queries that see no key in any part. Where all scores are
            -inf, lse is, too, and out NaN. With sinks lse is then that of the sink, and out 0.

        Both are differentiable in all outs, lses and sinks. Where a part sees no key, or scores of -inf alone
        beside parts with others, its gradients are 0.

    Raises:
        ValueError, TypeError: the arguments are no tensors, or don't belong together.

    Source: Dao, "FlashAttention-2", arXiv:2307.08691, section 3.1, which does this block by block.
    """
    for name, tensors in (("outs", outs), ("lses", lses)):
        scalar = getattr(tensors, "ndim", 1) == 0  # a tensor or an array, which has __iter__ all the same
        if scalar or not isinstance(tensors, Iterable):
            kind = "0-d " * scalar + type(tensors).__name__
            raise TypeError(f"flash_cute.merge: {name} must be a list of tensors, got {kind}")
    outs, lses = list(outs), list(lses)
    _check(outs, lses)
    if sinks is not None:
        _check_sinks(sinks, outs[0])
    for name, tensors in (("outs", outs), ("lses", lses)):
        require_stored("merge", **{f"{name}[{index}]": tensor for index, tensor in enumerate(tensors)})
    stacked = torch.stack(lses)
    highest = stacked.detach().amax(0)
    highest = highest.where(highest.isfinite(), 0)
    parts = (stacked - highest).exp()
    total = parts.sum(0)
    seen = total != 0
    total = total.where(seen, 1)
    lse = (total.log() + highest).where(seen, -torch.inf)
    weights = (parts / total).unsqueeze(-1)
    # Beside parts that count, one whose scores are all -inf has a weight of 0, and an out of NaN.
    idle = (stacked.isneginf() & seen).unsqueeze(-1)
    if outs[0].dim() == 3:
        weights, idle = weights.transpose(1, 2), idle.transpose(1, 2)
    outs = [out.masked_fill(hidden, 0) for out, hidden in zip(outs, idle, strict=True)]
    out = sum(out * weight for out, weight in zip(outs, weights, strict=True))
    out, lse = with_sinks((out, lse), sinks)
    return out.to(outs[0].dtype), lse


def _check(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> None:
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"flash_cute.merge: there are {len(outs)} outs and {len(lses)} lses; as many of both, and at "
            "least one, are accepted"
        )
    for name, tensors in (("outs", outs), ("lses", lses)):
        for index, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor):
                kind = type(tensor).__name__
                raise TypeError(
                    f"flash_cute.merge: {name}[{index}] is of type {kind}; a torch.Tensor is accepted"
                )
            if tensor.is_nested or tensor.layout != torch.strided:
                kind = "nested" if tensor.is_nested else f"of layout {tensor.layout}"
                raise ValueError(f"flash_cute.merge: {name}[{index}] is {kind}; dense tensors are accepted")
            wide = (torch.float32, torch.float64)
            accepted = wide if name == "lses" else (torch.float16, torch.bfloat16, *wide)
            if tensor.dtype not in accepted:
                *others, last = map(str, accepted)
                raise ValueError(
                    f"flash_cute.merge: {name}[{index}] has dtype {tensor.dtype}; {', '.join(others)} and "
                    f"{last} are accepted"
                )
            if tensor.device != outs[0].device:
                raise ValueError(
                    f"flash_cute.merge: {name}[{index}] is on {tensor.device} and outs[0] on "
                    f"{outs[0].device}; they must be on one device"
                )
    shape = outs[0].shape
    if len(shape) not in (3, 4):
        raise ValueError(
            f"flash_cute.merge: outs[0] has shape {tuple(shape)}; (batch, heads, seqlen, head_dim) or "
            "(total, heads, head_dim) is accepted"
        )
    expected = {"outs": shape, "lses": shape[:3] if len(shape) == 4 else shape[1::-1]}
    for name, tensors in (("outs", outs), ("lses", lses)):
        for index, tensor in enumerate(tensors):
            if tensor.shape != expected[name] or tensor.dtype != tensors[0].dtype:
                raise ValueError(
                    f"flash_cute.merge: {name}[{index}] is {tensor.dtype} {tuple(tensor.shape)}; "
                    f"{tensors[0].dtype} {tuple(expected[name])} is accepted beside outs[0] of {tuple(shape)}"
                )


def _check_sinks(sinks: torch.Tensor, out: torch.Tensor) -> None:
    """As validate_sinks in csrc, which asks for an operator's tensors."""
    face = "flash_cute.merge: sinks"
    if not isinstance(sinks, torch.Tensor):
        raise TypeError(f"{face} is of type {type(sinks).__name__}; a torch.Tensor is accepted")
    heads = out.shape[1]
    if sinks.shape != (heads,):
        raise ValueError(f"{face} must have shape (heads_q,), here ({heads},), got {tuple(sinks.shape)}")
    if sinks.dtype not in (torch.float32, out.dtype, autocast_dtype(out)):
        accepted = f"torch.float32 or that of outs[0], {out.dtype}"
        raise ValueError(f"{face} must have dtype {accepted}, got {sinks.dtype}")
    if sinks.device != out.device:
        raise ValueError(f"{face} must be on device {out.device}, as outs[0] is, got {sinks.device}")
    require_stored("merge", sinks=sinks)
