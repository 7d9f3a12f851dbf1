"""The same in jax.numpy: what computes where there are no kernels.

Compiled as a whole, also where a caller compiles nothing: operation by operation, the first call of a shape
takes several times as long.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from flash_cute._cpu import windows
from flash_cute.jax import dropout


def _places(shape, dim):
    """int32: 0, 1, ... along a dimension, 1 element in the others."""
    return jax.lax.broadcasted_iota(jnp.int32, [size if d == dim else 1 for d, size in enumerate(shape)], dim)


def _visible(seqlen_q, seqlen_k, given, options):
    """bool (batch or 1, heads_q or 1, seqlen_q, seqlen_k): which queries see which keys."""
    ranges = given.ranges
    used_q, used_k, skipped = (None if x is None else x[:, None, None] for x in given[:3])
    used_q = seqlen_q if used_q is None else jnp.clip(used_q, 0, seqlen_q)
    used_k = seqlen_k if used_k is None else jnp.clip(used_k, 0, seqlen_k)
    rows, keys = (_places((1, seqlen_q, seqlen_k), dim) for dim in (1, 2))
    left, right = (None if limit < 0 else limit for limit in (options.left, options.right))
    seen = windows.visible(rows, keys, used_q, used_k, left, right, 0 if skipped is None else skipped)
    if ranges is not None:
        seen &= windows.in_ranges(ranges, _places((1, 1, 1, seqlen_k), 3))
    seen = (seen & (rows < used_q))[:, None]
    seen = seen if given.mask is None else seen & given.mask
    return seen if given.bias is None else seen & ~jnp.isneginf(given.bias)


@functools.partial(jax.jit, static_argnames="options")
def attention(query, key, value, given, options):
    """(out, lse) in float32, with the whole matrix of scores, of the kernels' masks."""
    batch, seqlen_q, heads_q, head_dim = query.shape
    heads = key.shape[2]
    q, k, v = (x.astype(jnp.float32) for x in (query, key, value))
    visible = _visible(seqlen_q, k.shape[1], given, options)
    blind = ~visible.any(-1)
    # What no query sees may be NaN, and 0 x NaN is.
    seen = visible.any(2)
    if seen.shape[1] > 1:
        seen = seen.reshape(len(seen), heads, heads_q // heads, -1).any(2)
    k, v = (jnp.where(jnp.swapaxes(seen, 1, 2)[..., None], x, 0) for x in (k, v))
    blind_rows = jnp.swapaxes(blind, 1, 2)[..., None]
    q = jnp.where(blind_rows, 0, q).reshape(batch, seqlen_q, heads, heads_q // heads, head_dim)
    precision = jax.lax.Precision.HIGHEST
    scores = options.scale * jnp.einsum("bqhgd,bkhd->bhgqk", q, k, precision=precision)
    scores = scores.reshape(batch, heads_q, *scores.shape[3:])
    scores = _changed(scores, given.bias, options)
    scores = jnp.where(visible, scores, jnp.where(blind, 0.0, -jnp.inf)[..., None])
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jax.nn.softmax(scores)
    if given.seed is not None:
        kept = dropout.kept(given.seed, *scores.shape, options.keep)
        weights = jnp.where(kept, weights * (dropout.STEPS / options.keep), 0)
    weights = weights.reshape(batch, heads, heads_q // heads, *scores.shape[2:])
    out = jnp.einsum("bhgqk,bkhd->bqhgd", weights, v, precision=precision)
    out = out.reshape(batch, seqlen_q, heads_q, v.shape[3])
    # Last, as it hides the blind rows' gradients from the values', too.
    out = jnp.where(blind_rows, 0, out)
    return out.astype(query.dtype), jnp.where(blind, -jnp.inf, lse)


def _changed(scores, bias, options):
    """Scaled scores with a cap and a bias; sums of what is finite stay so."""
    if options.softcap > 0:
        scores = options.softcap * jnp.tanh(scores / options.softcap)
    if bias is None:
        return scores
    total = scores + options.bias_scale * bias.astype(jnp.float32)
    bounds = jnp.finfo(jnp.float32)
    finite = jnp.isfinite(scores) & jnp.isfinite(bias)
    total = jnp.where(finite & jnp.isposinf(total), bounds.max, total)
    return jnp.where(finite & jnp.isneginf(total), bounds.min, total)


@functools.partial(jax.jit, static_argnames=("options", "of_bias"))
def attention_backward(dout, dlse, query, key, value, given, options, of_bias=False):
    """(dq, dk, dv), or (dbias,); dlse may be None."""
    if of_bias:
        operands = (given.bias,)
        function = lambda bias: attention(query, key, value, given._replace(bias=bias), options)  # noqa: E731
    else:
        operands = query, key, value
        function = lambda *x: attention(*x, given, options)  # noqa: E731
    (_, lse), gradients = jax.vjp(function, *operands)
    return gradients((dout, jnp.zeros_like(lse) if dlse is None else dlse))


def _hidden_columns(shape, lengths, causal):
    """bool, of a shape that broadcasts to x's: where a row does not see a column."""
    columns = _places(shape, len(shape) - 1)
    rows, seqlen_q, right = (_places(shape, len(shape) - 2), shape[-2], 0) if causal else (0, 0, None)
    used, skipped = (
        default if y is None else jnp.clip(y, 0, shape[-1]).reshape(-1, *(1,) * (len(shape) - 1))
        for y, default in zip(lengths, (shape[-1], 0), strict=True)
    )
    return ~windows.visible(rows, columns, seqlen_q, used, right=right, skipped=skipped)


@functools.partial(jax.jit, static_argnames="options")
def softmax(x, lengths, options):
    """(probabilities, lse)"""
    scale, causal = options
    hidden = _hidden_columns(x.shape, lengths, causal)
    blind = hidden.all(-1, keepdims=True)
    scores = _scores(x, hidden, scale)
    lse = jnp.where(blind[..., 0], -jnp.inf, jax.nn.logsumexp(scores, axis=-1))
    probabilities = jnp.where(hidden, 0, jax.nn.softmax(scores))
    return probabilities.astype(x.dtype), lse


def _scores(x, hidden, scale):
    """-inf where they are hidden, but 0 where that is a whole row: its softmax is no NaN."""
    fill = jnp.where(hidden.all(-1, keepdims=True), 0.0, -jnp.inf)
    return jnp.where(hidden, fill, scale * jnp.where(hidden, 0, x.astype(jnp.float32)))


@functools.partial(jax.jit, static_argnames="options")
def softmax_backward(dprobabilities, dlse, kept, lengths, options):
    """dx; kept: the probabilities where they are float32, else x."""
    scale, causal = options
    hidden = _hidden_columns(kept.shape, lengths, causal)
    p = kept.astype(jnp.float32)
    if kept.dtype != jnp.float32:
        p = jnp.where(hidden, 0, jax.nn.softmax(_scores(kept, hidden, scale)))
    dp = jnp.where(hidden, 0, dprobabilities.astype(jnp.float32))
    dx = scale * p * (dp - (p * dp).sum(-1, keepdims=True) + dlse[..., None])
    return jnp.where(hidden, 0, dx).astype(kept.dtype)
