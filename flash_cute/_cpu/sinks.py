"""Sinks: for each head the logit of a key that every query sees and that has no value.

A sink adds exp(sink) to the sum of a row, so that results without it are all that is needed: its keys keep
exp(lse) / (exp(lse) + exp(sink)) of the weight. This is what merge, the CPU, JAX and the kernels that may cut
keys into parts compute; other kernels add the sink to the row's sum before they divide by it.
"""

from __future__ import annotations


def with_sinks(xp, constant, out, lse, sinks, valid=True):
    """(out, lse) with sinks: arrays of xp, torch or jax.numpy, out (..., head_dim) of any type, lse (...).

    sinks broadcasts to lse. constant: of an array, itself without a gradient. valid: booleans that broadcast
    to lse, which rows count; the others stay 0 and -inf.
    """
    highest = constant(xp.maximum(lse, sinks))
    highest = xp.where(xp.isfinite(highest), highest, 0)
    of_keys, of_sink = xp.exp(lse - highest), xp.exp(sinks - highest)
    total = of_keys + of_sink
    counts = (total != 0) & valid
    total = xp.where(counts, total, 1)
    # Of rows that see no key, or scores of -inf alone, the sink has all of the weight, if there is one. Their
    # out may be NaN, and its gradients may hold anything.
    idle = (lse == -xp.inf) & (sinks != -xp.inf)
    shares = xp.where(idle, 0, of_keys / total)
    out = xp.where(idle[..., None], 0, out) * shares[..., None]
    return out, xp.where(counts, xp.log(total) + highest, -xp.inf)
