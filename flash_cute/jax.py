"""flash_cute for JAX: attention and softmax through XLA's foreign function interface, without torch.

On CUDA GPUs the library's kernels compute, elsewhere plain jax.numpy with the same semantics. docs/jax.md
shows its use.
"""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import flash_cute

_LIBRARY = "_jax.so"
_ROW_ELEMENTS = 8  # rows of the kernels are multiples of 16 bytes

Window = int | tuple[int, int] | None


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: Window = None,
    key_value_left_padding: jax.Array | None = None,
    deterministic: bool = False,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Exact attention with the signature, layout and masks of jax.nn.dot_product_attention.

    Args:
        query: (batch, seqlen_q, heads_q, head_dim), float16 or bfloat16; head_dim up to 256.
        key, value: (batch, seqlen_k, heads_kv, head_dim), query's dtype. heads_q is a multiple of heads_kv.
        scale: multiplies the scores; a number > 0. Default 1 / sqrt(head_dim).
        is_causal: query i sees key j only if j <= i. As in JAX the first query stands at the first key, also
            where seqlen_q and seqlen_k differ; flash_cute.forward aligns the last ones.
        query_seq_lengths, key_value_seq_lengths: int32 (batch,): how many rows of each entry count, from the
            first. Default all.
        local_window_size: (left, right), or one number for both: query i sees key j only if
            i - left <= j <= i + right. Not together with lengths or padding.
        key_value_left_padding: int32 (batch,): how many keys at each entry's begin don't count. Default none.
        deterministic: the same bits in the gradients each time.
        return_residual: also return the log-sum-exp.

    Returns:
        out: of query's shape and dtype. 0 for a query that sees no key or doesn't count, where JAX's own
            gives the mean of the values to the former.
        lse: with return_residual, float32 (batch, seqlen_q, heads_q), natural logarithm; -inf where out is 0
            for these reasons.

        Both are differentiable, once, in reverse mode.

    Raises:
        ValueError, TypeError: an argument makes no sense; the sentence says which, and what is accepted.

    Source: Dao, "FlashAttention-2", arXiv:2307.08691.
    """
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    lengths = query_seq_lengths, key_value_seq_lengths, key_value_left_padding
    lengths = tuple(None if x is None else jnp.asarray(x) for x in lengths)
    window = _checked(query, key, value, scale, is_causal, lengths, local_window_size)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    options = _Options(scale, -1, -1, bool(deterministic), bool(return_residual))
    if any(x is not None for x in lengths):
        out, lse = _with_lengths(query, key, value, lengths, is_causal, options)
    else:
        out, lse = _in_window(query, key, value, window, options)
    return (out, jnp.swapaxes(lse, 1, 2)) if return_residual else out


def _checked(query, key, value, scale, is_causal, lengths, local_window_size):
    """(left, right) of the window with is_causal, None for no limit; raises if the call makes no sense."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4:
            raise ValueError(
                f"flash_cute.jax.attention: {name} has {x.ndim} dimensions; 4, "
                "(batch, seqlen, heads, head_dim), are accepted"
            )
    if query.dtype not in (jnp.float16, jnp.bfloat16):
        raise ValueError(
            f"flash_cute.jax.attention: query has dtype {query.dtype}; float16 and bfloat16 are accepted"
        )
    for name, x in (("key", key), ("value", value)):
        if x.dtype != query.dtype:
            raise ValueError(
                f"flash_cute.jax.attention: {name} has dtype {x.dtype} and query {query.dtype}; they must be "
                "the same"
            )
    batch, _, heads_q, head_dim = query.shape
    if value.shape != key.shape:
        raise ValueError(
            f"flash_cute.jax.attention: value has shape {value.shape} and key {key.shape}; they must be the "
            "same"
        )
    if (key.shape[0], key.shape[3]) != (batch, head_dim):
        raise ValueError(
            f"flash_cute.jax.attention: key has batch {key.shape[0]} and head_dim {key.shape[3]}, and query "
            f"{batch} and {head_dim}; they must be the same"
        )
    if not 1 <= head_dim <= 256:
        raise ValueError(f"flash_cute.jax.attention: head_dim is {head_dim}; 1 to 256 are accepted")
    if key.shape[2] == 0 or heads_q % key.shape[2]:
        raise ValueError(
            f"flash_cute.jax.attention: query has {heads_q} heads and key {key.shape[2]}; the heads of query "
            "must be a multiple of those of key"
        )
    if scale is not None and not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"flash_cute.jax.attention: scale is {scale}; a finite number > 0 is accepted")
    names = "query_seq_lengths", "key_value_seq_lengths", "key_value_left_padding"
    for name, x in zip(names, lengths, strict=True):
        if x is not None and (x.shape != (batch,) or x.dtype != jnp.int32):
            raise ValueError(
                f"flash_cute.jax.attention: {name} is {x.dtype}{list(x.shape)}; int32[{batch}], as the batch "
                "is, is accepted"
            )
        if x is not None and local_window_size is not None:
            raise ValueError(
                f"flash_cute.jax.attention: {name} is given with local_window_size; one of them is accepted"
            )
    if not isinstance(is_causal, bool):
        raise TypeError(f"flash_cute.jax.attention: is_causal is {is_causal!r}; True or False is accepted")
    window = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
    left, right = (None, None) if window is None else window
    for limit in (left, right):
        if limit is not None and limit < 0:
            raise ValueError(
                f"flash_cute.jax.attention: local_window_size is {local_window_size}; numbers of keys >= 0 "
                "are accepted"
            )
    return left, 0 if is_causal else right


def _in_window(query, key, value, window, options):
    """(out, lse): the kernels' windows are aligned at the end, so what none of the others sees is cut off."""
    left, right = window
    seqlen_q, seqlen_k = query.shape[1], key.shape[1]
    if right is not None and seqlen_k > seqlen_q + right:
        seqlen_k = seqlen_q + right
        key, value = key[:, :seqlen_k], value[:, :seqlen_k]
    rows = seqlen_q if left is None else min(seqlen_q, seqlen_k + left)
    shift = seqlen_k - rows
    options = options._replace(
        left=-1 if left is None else left + shift, right=-1 if right is None else right - shift
    )
    if rows == seqlen_q:
        return _attend(query, key, value, (None,) * 3, options)
    out, lse = _attend(query[:, :rows], key, value, (None,) * 3, options)
    blind = seqlen_q - rows
    return (
        jnp.pad(out, ((0, 0), (0, blind), (0, 0), (0, 0))),
        jnp.pad(lse, ((0, 0), (0, 0), (0, blind)), constant_values=-jnp.inf),
    )


def _with_lengths(query, key, value, lengths, is_causal, options):
    """(out, lse) of entries with lengths of their own.

    A causal mask of the kernels is aligned at the end of each entry's lengths. That is JAX's in the square of
    an entry's first queries and keys; the queries after it see all the keys.
    """
    used_q, used_k, skipped = lengths
    if not is_causal:
        return _attend(query, key, value, lengths, options)
    batch, seqlen_q = query.shape[:2]
    seqlen_k = key.shape[1]
    causal = options._replace(right=0)
    if used_q is used_k and seqlen_q == seqlen_k:  # each entry is a square
        return _attend(query, key, value, lengths, causal)

    def within(used, size):
        return jnp.full((batch,), size, jnp.int32) if used is None else jnp.clip(used, 0, size)

    count_q, count_k = within(used_q, seqlen_q), within(used_k, seqlen_k)
    square = jnp.minimum(count_q, count_k)
    out, lse = _attend(query, key, value, (square, square, skipped), causal)
    if used_k is None and seqlen_q <= seqlen_k:
        return out, lse
    if_needed = jnp.where(count_q > count_k, count_k, 0)
    all_out, all_lse = _attend(query, key, value, (count_q, if_needed, skipped), options)
    inside = jnp.arange(seqlen_q) < square[:, None]
    return (
        jnp.where(inside[:, :, None, None], out, all_out),
        jnp.where(inside[:, None, :], lse, all_lse),
    )


class _Options(NamedTuple):
    """What is no array among the arguments of a call; limits of -1 are none."""

    scale: float
    left: int
    right: int
    deterministic: bool
    gives_lse: bool  # else it has no gradient


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(query, key, value, lengths, options):
    """(out, lse) with flash_cute.forward's masks; lse (batch, heads_q, seqlen_q)."""
    return _forward(query, key, value, lengths, options)


def _attend_forward(query, key, value, lengths, options):
    out, lse = _forward(query, key, value, lengths, options)
    return (out, lse), (query, key, value, lengths, out, lse)


def _attend_backward(options, kept, gradients):
    query, key, value, lengths, out, lse = kept
    dout, dlse = gradients
    dlse = dlse if options.gives_lse else None
    found = _backward(dout, dlse, query, key, value, lengths, out, lse, options)
    return *found, tuple(None if x is None else np.zeros(x.shape, jax.dtypes.float0) for x in lengths)


_attend.defvjp(_attend_forward, _attend_backward)


def _forward(query, key, value, lengths, options):
    if 0 in query.shape or 0 in key.shape:
        batch, seqlen_q, heads_q, _ = query.shape
        return jnp.zeros_like(query), jnp.full((batch, heads_q, seqlen_q), -jnp.inf, jnp.float32)
    plain = functools.partial(_plain, options=options)
    if _library() is None:
        return plain(query, key, value, lengths)
    native = functools.partial(_native_forward, options=options)
    return jax.lax.platform_dependent(query, key, value, lengths, cuda=native, default=plain)


def _backward(dout, dlse, query, key, value, lengths, out, lse, options):
    if 0 in query.shape or 0 in key.shape:
        return jnp.zeros_like(query), jnp.zeros_like(key), jnp.zeros_like(value)

    def plain(dout, dlse, query, key, value, lengths, out, lse):
        _, gradients = jax.vjp(lambda *x: _plain(*x, lengths, options), query, key, value)
        return gradients((dout, jnp.where(jnp.isneginf(lse), 0.0, 0.0 if dlse is None else dlse)))

    arguments = dout, dlse, query, key, value, lengths, out, lse
    if _library() is None:
        return plain(*arguments)
    native = functools.partial(_native_backward, options=options)
    return jax.lax.platform_dependent(*arguments, cuda=native, default=plain)


# The kernels


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The kernels, registered with XLA; None in a build without CUDA, or without JAX's headers."""
    paths = (Path(folder) / _LIBRARY for folder in flash_cute.__path__)
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    for name in ("forward", "backward", "softmax", "softmax_backward"):
        handler = jax.ffi.pycapsule(getattr(library, f"flash_cute_jax_{name}"))
        jax.ffi.register_ffi_target(f"flash_cute_{name}", handler, platform="CUDA")
    library.flash_cute_jax_workspace.argtypes = [ctypes.c_bool] * 2 + [ctypes.c_int] * 6 + [ctypes.c_bool] * 2
    library.flash_cute_jax_softmax_workspace.argtypes = [
        ctypes.c_bool,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int,
    ]
    for ask in (library.flash_cute_jax_workspace, library.flash_cute_jax_softmax_workspace):
        ask.restype = ctypes.c_int64
    return library


def _workspace(query, key, lengths, options, backward) -> jax.ShapeDtypeStruct:
    """A result of a call that nobody reads, so that XLA knows of the memory, in CUDA graphs as well."""
    batch, seqlen_q, heads_q, head_dim = query.shape
    _, seqlen_k, heads_kv, _ = key.shape
    size = _library().flash_cute_jax_workspace(
        backward,
        query.dtype == jnp.float16,
        batch,
        heads_q,
        heads_kv,
        seqlen_q,
        seqlen_k,
        head_dim,
        any(x is not None for x in lengths),
        options.deterministic,
    )
    return jax.ShapeDtypeStruct((size,), jnp.uint8)


def _attributes(options):
    return {
        "scale": np.float32(options.scale),
        "left": np.int64(options.left),
        "right": np.int64(options.right),
    }


def _wide(x, head_dim):
    return jnp.pad(x, ((0, 0),) * 3 + ((0, head_dim - x.shape[-1]),)) if x.shape[-1] != head_dim else x


def _axes(x) -> frozenset[str]:
    """Of the shard_map's axes around, those that x varies over."""
    kind = jax.typeof(x)
    if hasattr(kind, "manual_axis_type"):
        return kind.manual_axis_type.varying
    return getattr(kind, "vma", frozenset())  # JAX before 0.10


def _varying(x, like):
    """x varying over the axes that `like` does, which a foreign call does not tell."""
    axes = _axes(like) - _axes(x)
    return jax.lax.pcast(x, tuple(axes), to="varying") if axes else x


def _given(lengths):
    """The lengths, empty where they are None."""
    return tuple(jnp.zeros((0,), jnp.int32) if x is None else x for x in lengths)


def _native_forward(query, key, value, lengths, options):
    batch, seqlen_q, heads_q, head_dim = query.shape
    width = -(-head_dim // _ROW_ELEMENTS) * _ROW_ELEMENTS
    query, key, value = (_wide(x, width) for x in (query, key, value))
    results = (
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        jax.ShapeDtypeStruct((batch, heads_q, seqlen_q), jnp.float32),
        _workspace(query, key, lengths, options, backward=False),
    )
    call = jax.ffi.ffi_call("flash_cute_forward", results, vmap_method="broadcast_all")
    out, lse, _ = call(query, key, value, *_given(lengths), **_attributes(options))
    return _varying(out[..., :head_dim], query), _varying(lse, query)


def _native_backward(dout, dlse, query, key, value, lengths, out, lse, options):
    head_dim = query.shape[-1]
    width = -(-head_dim // _ROW_ELEMENTS) * _ROW_ELEMENTS
    dout, query, key, value, out = (_wide(x, width) for x in (dout, query, key, value, out))
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, key, value)]
    results.append(_workspace(query, key, lengths, options, backward=True))
    call = jax.ffi.ffi_call("flash_cute_backward", results, vmap_method="broadcast_all")
    *gradients, _ = call(
        dout,
        jnp.zeros((0,), jnp.float32) if dlse is None else dlse,
        query,
        key,
        value,
        out,
        lse,
        *_given(lengths),
        **_attributes(options),
        deterministic=options.deterministic,
    )
    inputs = query, key, value
    return tuple(_varying(x[..., :head_dim], like) for x, like in zip(gradients, inputs, strict=True))


# Softmax by itself


def softmax(
    x: jax.Array,
    *,
    scale: float = 1.0,
    causal: bool = False,
    seqused_k: jax.Array | None = None,
    leftpad_k: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """softmax(scale * x) over the last dimension and the log-sum-exp, as flash_cute.softmax of PyTorch.

    Args:
        x: (..., columns), float32, float16 or bfloat16; with causal (..., rows, columns); with lengths
            (batch, ..., columns).
        scale: multiplies the scores; a number > 0.
        causal: row i sees column j iff j <= i + columns - rows.
        seqused_k, leftpad_k: int32 (batch,): how many columns of an entry count, from the first, and how many
            at its begin don't.

    Returns:
        probabilities: of x's shape and dtype; 0 where a row doesn't see a column.
        lse: float32 (...); -inf for a row that sees nothing. Both are differentiable, once, in reverse mode.

    Raises:
        ValueError: an argument makes no sense; the sentence says which, and what is accepted.
    """
    x = jnp.asarray(x)
    if x.dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
        raise ValueError(
            f"flash_cute.jax.softmax: x has dtype {x.dtype}; float32, float16 and bfloat16 are accepted"
        )
    lengths = tuple(None if y is None else jnp.asarray(y) for y in (seqused_k, leftpad_k))
    needed = 1 + causal + any(y is not None for y in lengths)
    if x.ndim < needed:
        raise ValueError(f"flash_cute.jax.softmax: x has {x.ndim} dimensions; at least {needed} are accepted")
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"flash_cute.jax.softmax: scale is {scale}; a finite number > 0 is accepted")
    for name, y in zip(("seqused_k", "leftpad_k"), lengths, strict=True):
        if y is not None and (y.shape != x.shape[:1] or y.dtype != jnp.int32):
            raise ValueError(
                f"flash_cute.jax.softmax: {name} is {y.dtype}{list(y.shape)}; int32[{x.shape[0]}], as the "
                "batch is, is accepted"
            )
    return _softmax(x, lengths, (float(scale), bool(causal)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _softmax(x, lengths, options):
    plain = functools.partial(_plain_softmax, options=options)
    if _library() is None or x.size == 0:
        return plain(x, lengths)

    def native(x, lengths):
        results = (
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32),
            _softmax_workspace(x, backward=False),
        )
        call = jax.ffi.ffi_call("flash_cute_softmax", results, vmap_method="broadcast_all")
        *found, _ = call(x, *_given(lengths), scale=np.float32(options[0]), causal=options[1])
        return tuple(_varying(y, x) for y in found)

    return jax.lax.platform_dependent(x, lengths, cuda=native, default=plain)


def _softmax_forward(x, lengths, options):
    probabilities, lse = _softmax(x, lengths, options)
    return (probabilities, lse), (probabilities if x.dtype == jnp.float32 else x, lengths)


def _softmax_backward(options, kept, gradients):
    kept, lengths = kept
    plain = functools.partial(_plain_softmax_backward, options=options)

    def native(dprobabilities, dlse, kept, lengths):
        results = jax.ShapeDtypeStruct(kept.shape, kept.dtype), _softmax_workspace(kept, backward=True)
        call = jax.ffi.ffi_call("flash_cute_softmax_backward", results, vmap_method="broadcast_all")
        arguments = dprobabilities, dlse, kept, *_given(lengths)
        dx, _ = call(*arguments, scale=np.float32(options[0]), causal=options[1])
        return _varying(dx, kept)

    arguments = *gradients, kept, lengths
    if _library() is None or kept.size == 0:
        dx = plain(*arguments)
    else:
        dx = jax.lax.platform_dependent(*arguments, cuda=native, default=plain)
    return dx, tuple(None if y is None else np.zeros(y.shape, jax.dtypes.float0) for y in lengths)


_softmax.defvjp(_softmax_forward, _softmax_backward)


def _softmax_workspace(x, backward) -> jax.ShapeDtypeStruct:
    """See _workspace."""
    columns = x.shape[-1]
    size = _library().flash_cute_jax_softmax_workspace(backward, x.size // columns, columns, x.dtype.itemsize)
    return jax.ShapeDtypeStruct((size,), jnp.uint8)


def _hidden_columns(shape, lengths, causal):
    """bool, of a shape that broadcasts to x's: where a row does not see a column."""
    columns = jnp.arange(shape[-1])
    used, skipped = (
        default if y is None else jnp.clip(y, 0, shape[-1]).reshape(-1, *(1,) * (len(shape) - 1))
        for y, default in zip(lengths, (shape[-1], 0), strict=True)
    )
    hidden = (columns < skipped) | (columns >= used)
    if causal:
        hidden = hidden | (columns > jnp.arange(shape[-2])[:, None] - shape[-2] + used)
    return hidden


def _plain_softmax(x, lengths, options):
    scale, causal = options
    hidden = _hidden_columns(x.shape, lengths, causal)
    scores = jnp.where(hidden, -jnp.inf, scale * x.astype(jnp.float32))
    lse = jax.nn.logsumexp(scores, axis=-1)
    probabilities = jnp.where(hidden, 0, jax.nn.softmax(scores))
    return probabilities.astype(x.dtype), lse


def _plain_softmax_backward(dprobabilities, dlse, kept, lengths, options):
    scale, causal = options
    hidden = _hidden_columns(kept.shape, lengths, causal)
    p = kept.astype(jnp.float32)
    if kept.dtype != jnp.float32:
        p = jnp.where(hidden, 0, jax.nn.softmax(jnp.where(hidden, -jnp.inf, scale * p)))
    dp = jnp.where(hidden, 0, dprobabilities.astype(jnp.float32))
    dx = scale * p * (dp - (p * dp).sum(-1, keepdims=True) + dlse[..., None])
    return jnp.where(hidden, 0, dx).astype(kept.dtype)


# The same in jax.numpy


def _visible(seqlen_q, seqlen_k, lengths, options):
    """bool (batch or 1, seqlen_q, seqlen_k): which queries see which keys."""
    used_q, used_k, skipped = (None if x is None else x[:, None, None] for x in lengths)
    used_q = seqlen_q if used_q is None else jnp.clip(used_q, 0, seqlen_q)
    used_k = seqlen_k if used_k is None else jnp.clip(used_k, 0, seqlen_k)
    rows, keys = jnp.arange(seqlen_q)[None, :, None], jnp.arange(seqlen_k)[None, None, :]
    visible = (rows < used_q) & (keys < used_k)
    if skipped is not None:
        visible &= keys >= skipped
    own = rows + used_k - used_q
    if options.left >= 0:
        visible &= keys >= own - options.left
    if options.right >= 0:
        visible &= keys <= own + options.right
    return visible


def _plain(query, key, value, lengths, options):
    """_attend in float32, with the whole matrix of scores."""
    groups = query.shape[2] // key.shape[2]
    q, k, v = (x.astype(jnp.float32) for x in (query, key, value))
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    visible = _visible(q.shape[1], k.shape[1], lengths, options)[:, None]
    blind = ~visible.any(-1, keepdims=True)
    # What nobody sees may be NaN, and 0 x NaN is.
    k, v = (jnp.where(visible.any((1, 2))[:, :, None, None], x, 0) for x in (k, v))
    q = jnp.where(blind.swapaxes(1, 2), 0, q)
    precision = jax.lax.Precision.HIGHEST
    scores = options.scale * jnp.einsum("bqhd,bkhd->bhqk", q, k, precision=precision)
    scores = jnp.where(visible, scores, jnp.where(blind, 0, -jnp.inf))
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.where(blind, 0, jax.nn.softmax(scores))
    out = jnp.einsum("bhqk,bkhd->bqhd", weights, v, precision=precision)
    return out.astype(query.dtype), jnp.where(blind[..., 0], -jnp.inf, lse)
