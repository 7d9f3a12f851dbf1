"""Sinks in JAX, as flash_cute/sinks.py has them: behind attention, by what its keys keep of the weight."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from flash_cute.jax import arguments
from flash_cute.jax.arguments import ATTENTION


def checked(sinks, query: jax.Array) -> jax.Array:
    sinks = arguments.array(ATTENTION, "sinks", sinks)
    heads = query.shape[2]
    if sinks.shape != (heads,) or sinks.dtype not in (jnp.float32, query.dtype):
        raise ValueError(
            f"{ATTENTION}: sinks must be float32[{heads}], or of query's dtype, got "
            f"{sinks.dtype}{list(sinks.shape)}"
        )
    return sinks.astype(jnp.float32)


def with_sinks(out, lse, sinks, used):
    """(out, lse) with sinks: out (batch, seqlen_q, heads, head_dim), lse (batch, heads, seqlen_q).

    used: int32 (batch,), how many rows count, or None; the others stay 0 and -inf.
    """
    sinks = sinks[None, :, None]
    highest = jax.lax.stop_gradient(jnp.maximum(lse, sinks))
    highest = jnp.where(jnp.isfinite(highest), highest, 0)
    of_keys, of_sink = jnp.exp(lse - highest), jnp.exp(sinks - highest)
    total = of_keys + of_sink
    counts = total != 0
    if used is not None:
        counts &= (jnp.arange(lse.shape[2], dtype=jnp.int32) < used[:, None])[:, None]
    total = jnp.where(counts, total, 1)
    # Of rows that see no key, or scores of -inf alone, the sink has all of the weight, if there is one. Their
    # out may be NaN, and its gradients may hold anything.
    idle = (lse == -jnp.inf) & (sinks != -jnp.inf)
    shares, idle = (jnp.swapaxes(x, 1, 2)[..., None] for x in (jnp.where(idle, 0, of_keys / total), idle))
    shrunk = (jnp.where(idle, 0, out) * shares).astype(out.dtype)
    return shrunk, jnp.where(counts, jnp.log(total) + highest, -jnp.inf)
