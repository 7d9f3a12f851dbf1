"""Sinks: for each head the logit of a key that every query sees and that has no value.

A sink adds exp(sink) to the sum of a row, so that results without it are all that is needed: its keys keep
exp(lse) / (exp(lse) + exp(sink)) of the weight. It is plain PyTorch behind the kernels, on every device, and
differentiable as such.
"""

from __future__ import annotations

import torch

from flash_cute import lengths, ops, torch_private
from flash_cute.storage import require_stored
from flash_cute.wording import OURS


def with_sinks(
    results: tuple[torch.Tensor, torch.Tensor], sinks: torch.Tensor, valid: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of forward or forward_varlen with sinks, (heads,).

    valid: booleans that broadcast to lse, which rows count; the others stay 0 and -inf.
    """
    out, lse = results
    sinks = sinks.to(lse.dtype).unsqueeze(-1)
    highest = torch.maximum(lse.detach(), sinks.detach())
    highest = highest.where(highest.isfinite(), 0)
    of_keys, of_sink = (lse - highest).exp(), (sinks - highest).exp()
    total = of_keys + of_sink
    counts = total != 0 if valid is None else (total != 0) & valid
    total = total.where(counts, 1)
    # Of rows that see no key, or scores of -inf alone, the sink has all of the weight, if there is one. Their
    # out may be NaN, and its gradients may hold anything.
    shares, idle = of_keys / total, (lse == -torch.inf) & (sinks != -torch.inf)
    if out.dim() == 3:  # packed, while lse is (heads, total)
        shares, idle = shares.mT, idle.mT
    shrunk = out.masked_fill(idle.unsqueeze(-1), 0) * shares.where(~idle, 0).unsqueeze(-1)
    if torch_private.transforms_are_active():  # vmap may have mapped the sinks alone
        shrunk = shrunk.to(out.dtype)
    else:
        shrunk = torch.empty_like(out).copy_(shrunk)  # in its strides, too
    return shrunk, (total.log() + highest).where(counts, -torch.inf)


def check_sinks(name: str, sinks: torch.Tensor, like: torch.Tensor) -> None:
    """Raises if they are no sinks for a tensor of queries, or of out, that is so named."""
    if not isinstance(sinks, torch.Tensor):
        raise TypeError(f"{OURS}sinks is of type {type(sinks).__name__}; a torch.Tensor is accepted")
    heads = like.shape[1]
    if sinks.shape != (heads,):
        raise ValueError(f"{OURS}sinks must have shape (heads_q,), here ({heads},), got {tuple(sinks.shape)}")
    if sinks.dtype not in (torch.float32, like.dtype, ops.autocast_dtype(like)):
        accepted = f"torch.float32 or that of {name}, {like.dtype}"
        raise ValueError(f"{OURS}sinks must have dtype {accepted}, got {sinks.dtype}")
    if sinks.device != like.device:
        raise ValueError(f"{OURS}sinks must be on device {like.device}, as {name} is, got {sinks.device}")
    require_stored("forward", sinks=sinks)


def applied(results, sinks: torch.Tensor, q: torch.Tensor, given: lengths.Lengths):
    """with_sinks of a call with these queries and lengths."""
    return with_sinks(results, sinks, lengths.valid_queries(q, given))
