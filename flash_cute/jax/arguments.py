"""What the functions check of their arguments, each error in one sentence."""

from __future__ import annotations

import operator
from numbers import Real

import jax
import jax.numpy as jnp
import numpy as np

from flash_cute.jax import dropout
from flash_cute.wording import shown

MAX_LENGTH = 2**28  # as csrc/problem.hpp has it
MOST_RANGES = 4  # of a query
ATTENTION, SOFTMAX, SOFTMAX_MATMUL = (
    f"flash_cute.jax.{name}" for name in ("attention", "softmax", "softmax_matmul")
)


def array(face, name, x, make=jnp.asarray):
    try:
        return make(x)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(
            f"{face}: {name} is {type(x).__name__}, which jax.numpy makes no array of; an array is accepted"
        ) from None


def checked_scale(face, scale) -> float:
    if isinstance(scale, jax.core.Tracer):
        raise TypeError(f"{face}: scale is traced; a Python number is accepted (static_argnames)")
    if not isinstance(scale, Real) or isinstance(scale, bool):
        raise TypeError(f"{face}: scale is {shown(scale)}; a number is accepted")
    try:
        with np.errstate(over="ignore", under="ignore"):
            fits = 0 < np.float32(float(scale)) < np.inf
    except OverflowError:  # of a large int
        fits = False
    if not fits:
        raise ValueError(
            f"{face}: scale is {shown(scale)}; a number > 0 that is finite in float32 is accepted"
        )
    return float(scale)


def _integers(face, name, x, least, most):
    """x, and its int32 with what is beyond these bounds at them. No value is lost to 32 bits on the way."""
    if not isinstance(x, jax.Array):
        is_traced = any(isinstance(y, jax.core.Tracer) for y in jax.tree.leaves(x))
        x = array(face, name, x, jnp.asarray if is_traced else np.asarray)

    def as_int32():
        if x.dtype == np.int32:
            return jnp.asarray(x)
        own = jnp.iinfo(x.dtype)
        return jnp.asarray(x.clip(max(least, int(own.min)), min(most, int(own.max))).astype(np.int32))

    return x, as_int32


def checked_lengths(face, name, x, batch):
    """As int32. Those beyond any sequence's end stay there."""
    if x is None:
        return None
    x, as_int32 = _integers(face, name, x, 0, MAX_LENGTH)
    if x.shape != (batch,) or not jnp.issubdtype(x.dtype, np.integer):
        raise ValueError(
            f"{face}: {name} is {x.dtype}{list(x.shape)}; int32[{batch}], as the batch is, is accepted"
        )
    return as_int32()


def checked_ranges(x, query):
    """As int32 (batch or 1, seqlen_q, R, 2)."""
    if x is None:
        return None
    x, as_int32 = _integers(ATTENTION, "ranges", x, -MAX_LENGTH, MAX_LENGTH)
    batch, seqlen_q = query.shape[:2]
    dims = tuple(x.shape)
    fits = len(dims) == 5 and dims[0] in (1, batch) and 1 <= dims[3] <= MOST_RANGES
    if not fits or dims[1:3] + dims[4:] != (1, seqlen_q, 2) or not jnp.issubdtype(x.dtype, np.integer):
        raise ValueError(
            f"{ATTENTION}: ranges is {x.dtype}{list(dims)}; int32[{batch} or 1, 1, {seqlen_q}, R, 2], R from "
            f"1 to {MOST_RANGES}, is accepted"
        )
    return jnp.squeeze(as_int32(), 1)


def checked_sinks(sinks, query: jax.Array) -> jax.Array:
    sinks = array(ATTENTION, "sinks", sinks)
    heads = query.shape[2]
    if sinks.shape != (heads,) or sinks.dtype not in (jnp.float32, query.dtype):
        raise ValueError(
            f"{ATTENTION}: sinks must be float32[{heads}], or of query's dtype, got "
            f"{sinks.dtype}{list(sinks.shape)}"
        )
    return sinks.astype(jnp.float32)


def checked_of_scores(face, name, x, sizes, dtype):
    """A mask of booleans or a bias of the operands' dtype. sizes: batch, heads_q, seqlen_q, seqlen_k; or 1.

    Of three dimensions it is that of all entries. A bias of float32 is rounded; what is finite stays so.
    """
    if x is None:
        return None
    x = array(face, name, x)
    x = x[None] if x.ndim == 3 else x
    kinds = (jnp.bool_,) if name == "mask" else (jnp.float32, dtype)
    fits = x.ndim == 4 and all(size in (1, whole) for size, whole in zip(x.shape, sizes, strict=True))
    if not fits or x.dtype not in kinds:
        kind = "bool" if name == "mask" else "float32 or of query's dtype,"
        shape = ", ".join(f"{whole} or 1" for whole in sizes)
        raise ValueError(f"{face}: {name} is {x.dtype}{list(x.shape)}; {kind} [{shape}] is accepted")
    if name == "mask" or x.dtype == dtype:
        return x
    most = float(jnp.finfo(dtype).max)
    return jnp.where(jnp.isfinite(x) & (jnp.abs(x) > most), jnp.sign(x) * most, x).astype(dtype)


def checked_softcap(softcap) -> float:
    if isinstance(softcap, jax.core.Tracer):
        raise TypeError(f"{ATTENTION}: softcap is traced; a Python number is accepted (static_argnames)")
    if not isinstance(softcap, Real) or isinstance(softcap, bool):
        raise TypeError(f"{ATTENTION}: softcap is {shown(softcap)}; a number is accepted")
    least, most = (float(x) for x in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))
    if softcap != 0 and not least <= softcap <= most:
        raise ValueError(
            f"{ATTENTION}: softcap is {shown(softcap)}; 0 or a normal number > 0 of float32 is accepted"
        )
    return float(softcap)


def checked_dropout(face, dropout_p, seed):
    """How many of 4096 pairs are kept, and the seed as uint32 (4,); None for it where that is all."""
    if isinstance(dropout_p, jax.core.Tracer):
        raise TypeError(f"{face}: dropout_p is traced; a Python number is accepted (static_argnames)")
    if not isinstance(dropout_p, Real) or isinstance(dropout_p, bool):
        raise TypeError(f"{face}: dropout_p is {shown(dropout_p)}; a number is accepted")
    if not 0 <= dropout_p < 1 or dropout.keep_of(dropout_p) == 0:
        raise ValueError(
            f"{face}: dropout_p is {shown(dropout_p)}; a number from 0 to {1 - 1 / dropout.STEPS} is accepted"
        )
    keep = dropout.keep_of(dropout_p)
    if keep == dropout.STEPS:
        return keep, None
    if seed is None:
        raise ValueError(
            f"{face}: dropout_seed is None beside dropout_p; uint32[4], as "
            "jax.random.bits(key, 4, jnp.uint32) gives it, is accepted"
        )
    if not isinstance(seed, jax.Array):
        seed = array(face, "dropout_seed", seed, np.asarray)
    if seed.shape == (2,) and seed.dtype == np.int64:  # as flash_cute.forward has it
        if isinstance(seed, np.ndarray):
            return keep, jnp.asarray(seed.astype("<i8").view("<u4"))
        words = seed.astype(jnp.uint64)
        return keep, jnp.stack([words, words >> 32], -1).astype(jnp.uint32).reshape(4)
    if seed.shape != (4,) or seed.dtype != np.uint32:
        raise ValueError(
            f"{face}: dropout_seed is {seed.dtype}{list(seed.shape)}; uint32[4] or int64[2] is accepted"
        )
    return keep, jnp.asarray(seed)


def checked_window(window):
    """(left, right)"""
    limits = tuple(window) if isinstance(window, tuple | list) else (window, window)
    if any(isinstance(x, jax.core.Tracer) for x in limits):
        raise TypeError(
            f"{ATTENTION}: local_window_size is traced; Python numbers are accepted (static_argnames)"
        )
    sentence = (
        f"{ATTENTION}: local_window_size is {shown(window)}; a number of keys >= 0, or two, "
        "(left, right), are accepted"
    )
    if len(limits) != 2 or any(isinstance(x, bool) for x in limits):
        raise TypeError(sentence)
    try:
        limits = [operator.index(x) for x in limits]
    except TypeError:
        raise TypeError(sentence) from None
    if min(limits) < 0:
        raise ValueError(sentence)
    return limits


def is_tf32(face, precision) -> bool:
    """Does a call multiply float32 in TF32, by its argument, or where that is None by JAX's setting?"""
    if precision is None:
        return jax.config.jax_default_matmul_precision not in (None, "highest", "float32")
    name = precision.name.lower() if isinstance(precision, jax.lax.Precision) else precision
    if name not in ("highest", "high"):
        kind = ValueError if isinstance(name, str) else TypeError
        raise kind(f"{face}: precision must be 'highest', 'high' or None, got {shown(precision)}")
    return name == "high"


def check_operands(query, key, value):
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4:
            raise ValueError(
                f"{ATTENTION}: {name} has {x.ndim} dimensions; 4, (batch, seqlen, heads, head_dim), or 3, "
                "without a batch, are accepted"
            )
    if query.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32):
        raise ValueError(
            f"{ATTENTION}: query has dtype {query.dtype}; float16, bfloat16 and float32 are accepted"
        )
    for name, x in (("key", key), ("value", value)):
        if x.dtype != query.dtype:
            raise ValueError(
                f"{ATTENTION}: {name} has dtype {x.dtype} and query {query.dtype}; they must be the same"
            )
    batch, _, heads_q, head_dim = query.shape
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"{ATTENTION}: value has shape {value.shape} and key {key.shape}; they must be the same but for "
            "the last dimension"
        )
    if (key.shape[0], key.shape[3]) != (batch, head_dim):
        raise ValueError(
            f"{ATTENTION}: key has batch {key.shape[0]} and head_dim {key.shape[3]}, and query "
            f"{batch} and {head_dim}; they must be the same"
        )
    for name, width in (("head_dim", head_dim), ("head_dim of value", value.shape[3])):
        if not 1 <= width <= 256:
            raise ValueError(f"{ATTENTION}: {name} is {width}; 1 to 256 are accepted")
    if heads_q != key.shape[2] and (key.shape[2] == 0 or heads_q % key.shape[2]):
        raise ValueError(
            f"{ATTENTION}: query has {heads_q} heads and key {key.shape[2]}; the heads of query "
            "must be a multiple of those of key"
        )
    for name, x in (("query", query), ("key", key)):
        if x.shape[1] > MAX_LENGTH:
            raise ValueError(f"{ATTENTION}: {name} has seqlen {x.shape[1]}; at most {MAX_LENGTH} is accepted")
    if batch * heads_q > MAX_LENGTH:
        raise ValueError(
            f"{ATTENTION}: query has {batch * heads_q} (batch, head) pairs; at most {MAX_LENGTH} are accepted"
        )
