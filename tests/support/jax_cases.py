"""What tests of flash_cute.jax share: inputs, masks and gradients in float64, meshes."""

from __future__ import annotations

import os
from functools import partial

import numpy as np
import pytest

from support.expected import LOWEST

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory of the same GPU
jax = pytest.importorskip("jax")
jax.config.update("jax_num_cpu_devices", 4)  # for shard_map

import jax.numpy as jnp  # noqa: E402

from flash_cute.jax import attention  # noqa: E402

FACTOR, SLACK = 2.0, 1e-5  # tests/support/tolerance.py has the rule
SHAPES = {  # batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, and value's where that is another
    "grouped": (2, 33, 33, 6, 2, 40),
    "more keys": (1, 20, 75, 2, 1, 32),
    "more queries": (1, 75, 20, 2, 1, 20),
    "narrower value": (2, 33, 40, 6, 2, 40, 24),
    "wider value": (2, 40, 33, 4, 2, 13, 50),
}
MASKS = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (7, 3)},
    "causal window": {"is_causal": True, "local_window_size": 9},
}


def inputs(shape, dtype=jnp.bfloat16):
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, *head_dims = (
        SHAPES[shape] if isinstance(shape, str) else shape
    )
    generator = np.random.default_rng(7)  # JAX's own would be compiled for every size
    sizes = [(batch, seqlen_q, heads_q, head_dims[0])]
    sizes += [(batch, seqlen_k, heads_kv, width) for width in (head_dims[0], head_dims[-1])]
    return [jnp.asarray(generator.standard_normal(size, np.float32).astype(dtype)) for size in sizes]


def visible(
    q,
    k,
    is_causal=False,
    local_window_size=None,
    used_q=None,
    used_k=None,
    skipped=None,
    ranges=None,
    mask=None,
    bias=None,
):
    """bool (batch, seqlen_q, seqlen_k), of all heads beside a mask or a bias, by JAX's rules written out."""
    rows, keys = np.arange(q.shape[1])[None, :, None], np.arange(k.shape[1])[None, None, :]
    seen = np.ones((q.shape[0], q.shape[1], k.shape[1]), bool)
    if is_causal:
        seen &= keys <= rows
    if local_window_size is not None:
        left, right = np.broadcast_to(local_window_size, 2)
        seen &= (rows - left <= keys) & (keys <= rows + right)
    for used, places in ((used_q, rows), (used_k, keys)):
        if used is not None:
            seen &= places < np.asarray(used)[:, None, None]
    if ranges is not None:
        start, end = np.moveaxis(np.asarray(ranges)[:, 0], -1, 0)[..., None, :]
        seen &= ((start <= keys[..., None]) & (keys[..., None] < end)).any(-1)
    seen = seen if skipped is None else seen & (keys >= np.asarray(skipped)[:, None, None])
    if mask is None and bias is None:
        return seen
    seen = np.broadcast_to(seen[:, None], (*q.shape[:1], q.shape[2], *seen.shape[1:]))
    seen = seen if mask is None else seen & np.asarray(mask)
    return seen if bias is None else seen & ~np.isneginf(np.asarray(bias, np.float32))


def math(q, k, v, dout, dlse, seen, scale, rounded, bias=None, softcap=0.0, kept=None):
    """out, lse, dq, dk, dv and, beside a bias, dbias in float64, each step rounded.

    0 and -inf for rows that see nothing. kept: (batch, heads, seqlen_q, seqlen_k), factors of the weights.
    dbias has its delta of the rounded out, as rows of one or two keys are exact otherwise.
    """
    groups = q.shape[2] // k.shape[2]
    q, k, v, dout = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (q, k, v, dout))
    wide_k, wide_v = (x.repeat(groups, 1) for x in (k, v))
    seen = seen[:, None] if seen.ndim == 3 else seen
    scores, slope = rounded(scale * rounded(q @ wide_k.mT)), 1
    if softcap:
        tanh = rounded(np.tanh(rounded(scores / softcap)))
        scores, slope = rounded(softcap * tanh), rounded(1 - tanh**2)
    if bias is not None:
        scores = rounded(scores + np.asarray(bias, np.float64))
    scores = np.where(seen, scores, -np.inf)
    blind = ~seen.any(-1)[..., None]
    scores = np.where(blind, 0, scores)
    highest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - highest)
    total = weights.sum(-1, keepdims=True)
    p = np.where(blind, 0, rounded(weights / total))
    lse = np.where(blind, -np.inf, highest + np.log(total))[..., 0]
    dp = rounded(dout @ wide_v.mT)
    left = p
    if kept is not None:
        left, dp = rounded(p * kept), rounded(dp * kept)
    dlse = np.where(blind[..., 0], 0, np.asarray(dlse, np.float64).swapaxes(1, 2))
    ds = rounded(scale * rounded(p * (dp - (p * dp).sum(-1, keepdims=True) + dlse[..., None])) * slope)
    dk, dv = (
        rounded(x).reshape(len(x), -1, groups, *x.shape[2:]).sum(2) for x in (ds.mT @ q, left.mT @ dout)
    )
    out = rounded(left @ wide_v)
    dbias = []
    if bias is not None:
        dbias = p * (dp - (dout * out).sum(-1, keepdims=True) + dlse[..., None])
        shared = tuple(axis for axis in range(4) if bias.shape[axis] == 1)
        dbias = [rounded(dbias.sum(shared, keepdims=True))]
    out, dq, dk, dv = (rounded(x).swapaxes(1, 2) for x in (out, ds @ wide_k, dk, dv))
    return out, lse.swapaxes(1, 2), dq, dk, dv, *dbias


def assert_within_rule(name, result, yardstick, oracle):
    result, yardstick, oracle = (np.asarray(x, np.float64) for x in (result, yardstick, oracle))
    assert result.shape == oracle.shape
    assert (np.isfinite(result) == np.isfinite(oracle)).all(), name
    finite = np.isfinite(oracle)
    errors = [np.abs(x[finite] - oracle[finite]) for x in (result, yardstick)]
    for norm in (np.max, lambda x: np.sqrt(np.mean(x**2))):
        error, allowed = map(norm, errors)
        assert error <= FACTOR * allowed + SLACK, f"{name}: error {error:.3e}, the type's own {allowed:.3e}"


def gradients_of_results(q, v):
    """Random (dout, dlse)."""
    generator = np.random.default_rng(3)
    dout = generator.standard_normal((*q.shape[:3], v.shape[3])).astype(q.dtype)
    return dout, generator.standard_normal(q.shape[:3]).astype(np.float32)


def assert_attention(q, k, v, scale=None, key_value_left_padding=None, kept=None, **options):
    """Values and gradients, with NaN in the keys that no query sees, whatever a mask, a bias or ranges hide.

    kept: what dropout_p and dropout_seed keep, times its factor.
    """
    changes = {name: options[name] for name in ("bias", "softcap") if name in options}
    lengths = {"used_q": "query_seq_lengths", "used_k": "key_value_seq_lengths"}
    named = {short: options.get(name) for short, name in lengths.items()}
    others = *lengths.values(), "softcap", "dropout_p", "dropout_seed"
    masks = {name: value for name, value in options.items() if name not in others}
    seen = visible(q, k, skipped=key_value_left_padding, **named, **masks)
    dout, dlse = gradients_of_results(q, v)

    @jax.jit
    def call(q, k, v, bias, dout, dlse):
        others = {name: x for name, x in options.items() if name != "bias"}
        others |= {"key_value_left_padding": key_value_left_padding, "scale": scale}
        function = partial(attention, return_residual=True, **others)
        results, gradients = jax.vjp(function, q, k, v, bias)
        return *results, *gradients((dout, dlse))

    hidden = {name: x for name, x in masks.items() if name not in ("mask", "bias")}
    hidden = {} if "ranges" in options else hidden
    reached = visible(q, k, skipped=key_value_left_padding, **named, **hidden).any(-2)
    if reached.ndim == 3:  # of query's heads, which share key's
        reached = reached.reshape(len(reached), k.shape[2], -1, k.shape[1]).any(2)
    reached = reached[:, None] if reached.ndim == 2 else reached
    unseen = ~reached.swapaxes(1, 2)[..., None]
    dirty = (np.where(unseen, np.nan, np.asarray(x, np.float32)).astype(x.dtype) for x in (k, v))
    found = [x for x in call(q, *dirty, options.get("bias"), dout, dlse) if x is not None]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    oracle, yardstick = (
        math(q, k, v, dout, dlse, seen, factor, rounded, kept=kept, **changes)
        for rounded in (lambda x: x, lambda x: x.astype(q.dtype).astype(np.float64))
    )
    # Of queries that see a bias's lowest number alone: so is the LSE, about.
    low = np.isfinite(oracle[1]) & (oracle[1] < LOWEST)
    found_lse = np.asarray(found[1], np.float64)
    assert (np.isfinite(found_lse) & (found_lse < LOWEST))[low].all()
    found = found[0], np.where(low, oracle[1], found_lse), *found[2:]
    names = ("out", "lse", "dq", "dk", "dv", "dbias")[: len(found)]
    for name, *triple in zip(names, found, yardstick, oracle, strict=True):
        assert_within_rule(name, *triple)


# Which of batch, heads, queries and keys a mask or a bias tells apart.
TOLD_APART = {
    "pairs": (True,) * 4,
    "keys": (True, False, False, True),
    "queries": (False, True, True, False),
    "all alike": (False, False, True, True),
}


def some_pairs(q, k, axes, seed=13):
    sizes = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    shape = [size if told else 1 for size, told in zip(sizes, axes, strict=True)]
    return np.random.default_rng(seed).random(shape, np.float32)


SEEDS = [(5, 9), (-(2**62) + 3, 2**63 - 1), (2**40 + 7, -1)]


def factors_of(q, k, seed, p):
    from flash_cute.jax import dropout

    words, keep = jnp.asarray(np.array(seed, np.int64).view(np.uint32)), dropout.keep_of(p)
    kept = dropout.kept(words, q.shape[0], q.shape[2], q.shape[1], k.shape[1], keep)
    return np.asarray(kept) * (4096 / keep)


def close(found, expected):
    """Of trees of arrays, within what bfloat16 loses where sums are ordered differently."""
    for result, reference in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            np.asarray(result, np.float32), np.asarray(reference, np.float32), rtol=0.02, atol=0.04
        )


def mesh_of(**sizes):
    """A mesh whose types XLA looks after, and shard_map."""
    count = np.prod(list(sizes.values()))
    if len(jax.devices()) < count:
        pytest.skip(f"needs {count} devices")
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=auto, devices=jax.devices()[:count])


def loss_of(function):
    return lambda *x: (function(*x).astype(jnp.float32) ** 2).sum()
