"""Sinks: for each head the logit of a key that every query sees and that has no value.

A sink adds exp(sink) to the sum of a row, so that results without it are all that is needed: its keys keep
exp(lse) / (exp(lse) + exp(sink)) of the weight. This is what merge, the CPU and the kernels that may cut keys
into parts compute; other kernels add the sink to the row's sum before they divide by it.
"""

from __future__ import annotations

import torch

from flash_cute import torch_private


def with_sinks(
    results: tuple[torch.Tensor, torch.Tensor], sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of forward or forward_varlen, all of whose rows count, with sinks, (heads,)."""
    out, lse = results
    sinks = sinks.to(lse.dtype).unsqueeze(-1)
    highest = torch.maximum(lse.detach(), sinks.detach())
    highest = highest.where(highest.isfinite(), 0)
    of_keys, of_sink = (lse - highest).exp(), (sinks - highest).exp()
    total = of_keys + of_sink
    counts = total != 0
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


def gradient(
    dout: torch.Tensor,
    dlse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor,
    blind: torch.Tensor,
) -> torch.Tensor:
    """float32 (heads,), of results with sinks, (batch, heads, seqlen[, head_dim]).

    blind: booleans that broadcast to lse, which queries see no key.
    """
    delta = (dout.float() * out.float()).sum(-1)
    delta = delta.masked_fill(blind, 0)  # whatever dout holds there
    sinks = sinks.float().unsqueeze(-1)
    weights = (sinks - lse).exp().where(sinks != -torch.inf, 0)
    return (weights * (dlse - delta)).sum((0, 2))
