"""Attention, differentiable: masks as JAX has them in terms of the kernels' own, and the calls of kernels."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from flash_cute._cpu.sinks import with_sinks
from flash_cute.jax import arguments, dropout, kernels, plain, shards
from flash_cute.jax.arguments import ATTENTION
from flash_cute.wording import hinting, require_bool

_ROW_BYTES = 16  # rows of the kernels are multiples of so many bytes
_CALLS = "flash_cute_forward", "flash_cute_backward", "flash_cute_bias_gradient"
_ELEMENTS = {"float16": 0, "bfloat16": 1, "float32": 2}  # ElementType in params.hpp

Window = int | tuple[int, int] | None


@hinting("flash_cute.jax")
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: Window = None,
    implementation: None = None,
    key_value_left_padding: jax.Array | None = None,
    deterministic: bool = False,
    return_residual: bool = False,
    sinks: jax.Array | None = None,
    ranges: jax.Array | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_seed: jax.Array | None = None,
    precision: str | jax.lax.Precision | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Exact attention with the signature, layout and masks of jax.nn.dot_product_attention.

    Args:
        query: (batch, seqlen_q, heads_q, head_dim), float16, bfloat16 or float32; head_dim up to 256. A batch
            of 1 may be left out, of any of the three.
        key: (batch, seqlen_k, heads_kv, head_dim), query's dtype. heads_q is a multiple of heads_kv.
        value: (batch, seqlen_k, heads_kv, head_dim_v), query's dtype; head_dim_v up to 256.
        bias: (batch or 1, heads_q or 1, seqlen_q or 1, seqlen_k or 1), of query's dtype, to which float32 is
            rounded: added to the scaled and capped scores; -inf hides a key.
        mask: bool, of the same shapes: True is seen, of the keys that the other arguments leave.
        implementation: for calls made for JAX's own; None.
        scale: multiplies the scores; a number > 0, not traced. Default 1 / sqrt(head_dim).
        is_causal: query i sees key j only if j <= i. As in JAX the first query stands at the first key, also
            where seqlen_q and seqlen_k differ; flash_cute.forward aligns the last ones.
        query_seq_lengths, key_value_seq_lengths: integers (batch,): how many rows of each entry count, from
            the first. Default all.
        local_window_size: (left, right), or one number for both: query i sees key j only if
            i - left <= j <= i + right. Not together with lengths or padding.
        key_value_left_padding: integers (batch,): how many keys at each entry's begin don't count. Default
            none.
        deterministic: the same bits in the gradients each time.
        return_residual: also return the log-sum-exp.
        sinks: (heads_q,), float32 or query's dtype: for each head the logit, not scaled, of a key that every
            query that counts sees and that has no value; -inf is none. lse counts it. Differentiable.
        ranges: int32 (batch or 1, 1, seqlen_q, R, 2), R from 1 to 4, as in flash_cute.forward: R ranges
            [start, end) of keys for each query, alike for all heads. It sees the keys that lie in one of them
            and that the other arguments leave it. Keys are counted from key's first row.
        softcap: c > 0 makes a scaled score x into c * tanh(x / c), before bias; a number, not traced.
        dropout_p: from 0 to less than 1, not traced: each weight is dropped with this probability, rounded so
            that 1 - dropout_p is a multiple of 1 / 4096, and the others are divided by that. lse is that
            without dropout. Not together with arrays that are sharded explicitly.
        dropout_seed: uint32 (4,), as jax.random.bits(key, 4, jnp.uint32) gives it: which weights are dropped,
            by the number of the entry, the head, and the rows of query and key. The words of the int64 (2,)
            of flash_cute.forward and flash_cute.dropout_mask, low ones first, which is accepted, too.
        precision: of float32 on a GPU: "highest" is as exact as float32, "high" multiplies in TF32, which is
            faster. None follows jax.default_matmul_precision where that is set, else it is "highest". 16-bit
            types ignore it.

    Returns:
        out: (batch, seqlen_q, heads_q, head_dim_v), query's dtype. 0 for a query that sees no key or doesn't
            count, where JAX's own gives the mean of the values to the former.
        lse: with return_residual, float32 (batch, seqlen_q, heads_q), natural logarithm; -inf where out is 0
            for these reasons; with sinks, that of the sink for a query that sees no key.

        Both are differentiable in query, key, value, bias and sinks, once, in reverse mode.

    Raises:
        ValueError, TypeError: an argument makes no sense; the sentence says which, and what is accepted.
        NotImplementedError: a second derivative is asked for.

    Source: Dao, "FlashAttention-2", arXiv:2307.08691.
    """
    if implementation is not None:
        raise ValueError(f"{ATTENTION}: implementation is given; None is accepted")
    options = {"is_causal": is_causal, "deterministic": deterministic, "return_residual": return_residual}
    for name, x in options.items():
        require_bool(ATTENTION, name, x)
    arrays = {"query": query, "key": key, "value": value}
    arrays = {name: arguments.array(ATTENTION, name, x) for name, x in arrays.items()}
    has_batch = arrays["query"].ndim != 3
    query, key, value = (x[None] if x.ndim == 3 else x for x in arrays.values())
    arguments.check_operands(query, key, value)
    lengths = {
        "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths,
        "key_value_left_padding": key_value_left_padding,
    }
    for name, x in lengths.items():
        if x is not None and local_window_size is not None:
            raise ValueError(f"{ATTENTION}: {name} is given with local_window_size; one of them is accepted")
    lengths = tuple(
        arguments.checked_lengths(ATTENTION, name, x, query.shape[0]) for name, x in lengths.items()
    )
    sizes = query.shape[0], query.shape[2], query.shape[1], key.shape[1]
    bias, mask = (
        arguments.checked_of_scores(ATTENTION, name, x, sizes, query.dtype)
        for name, x in (("bias", bias), ("mask", mask))
    )
    softcap = arguments.checked_softcap(softcap)
    keep, seed = arguments.checked_dropout(ATTENTION, dropout_p, dropout_seed)
    given = Given(*lengths, arguments.checked_ranges(ranges, query), mask, bias, seed)
    left, right = (None, None) if local_window_size is None else arguments.checked_window(local_window_size)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else arguments.checked_scale(ATTENTION, scale)
    tf32 = arguments.is_tf32(ATTENTION, precision) and query.dtype == jnp.float32
    gives_lse = return_residual or sinks is not None
    options = Options(scale, -1, -1, tf32, deterministic, gives_lse, softcap, 1.0, keep)
    sinks = None if sinks is None else arguments.checked_sinks(sinks, query)

    def compute(query, key, value, given):
        if all(x is None for x in given[:3]):
            return _in_window(query, key, value, given, (left, 0 if is_causal else right), options)
        same = query_seq_lengths is key_value_seq_lengths and query_seq_lengths is not None
        return _with_lengths(query, key, value, given, is_causal, same, options)

    out, lse = in_shards(compute, query, key, value, given)
    lse = jnp.swapaxes(lse, 1, 2)
    if sinks is not None:
        valid = True
        if lengths[0] is not None:
            valid = (jnp.arange(query.shape[1], dtype=jnp.int32) < lengths[0][:, None])[..., None]
        shrunk, lse = with_sinks(jnp, jax.lax.stop_gradient, out, lse, sinks[None, None], valid)
        out = shrunk.astype(out.dtype)
    out, lse = (x if has_batch else jnp.squeeze(x, 0) for x in (out, lse))
    return (out, lse) if return_residual else out


class Given(NamedTuple):
    """What there may be beside query, key and value, checked."""

    used_q: jax.Array | None = None  # (batch,), as leftpad_k of flash_cute.forward and its likes
    used_k: jax.Array | None = None
    skipped: jax.Array | None = None
    ranges: jax.Array | None = None  # (batch or 1, seqlen_q, R, 2)
    mask: jax.Array | None = None  # (batch or 1, heads_q or 1, seqlen_q or 1, seqlen_k or 1)
    bias: jax.Array | None = None  # likewise, of query's dtype
    seed: jax.Array | None = None  # uint32 (4,)

    def cut(self, rows, keys):
        """For the first queries and keys."""
        ranges = None if self.ranges is None else self.ranges[:, :rows]
        mask, bias = (None if x is None else x[:, :, :rows, :keys] for x in (self.mask, self.bias))
        return self._replace(ranges=ranges, mask=mask, bias=bias)


def _in_window(query, key, value, given, window, options):
    """(out, lse): the kernels' windows are aligned at the end, so what none of the others sees is cut off."""
    seqlen_q, seqlen_k = query.shape[1], key.shape[1]
    left, right = (
        None if x is None else min(x, size) for x, size in zip(window, (seqlen_q, seqlen_k), strict=True)
    )
    if right is not None and seqlen_k > seqlen_q + right:
        seqlen_k = seqlen_q + right
        key, value = key[:, :seqlen_k], value[:, :seqlen_k]
    rows = seqlen_q if left is None else min(seqlen_q, seqlen_k + left)
    shift = seqlen_k - rows
    options = options._replace(
        left=-1 if left is None else left + shift, right=-1 if right is None else right - shift
    )
    given = given.cut(rows, seqlen_k)
    if rows == seqlen_q:
        return attend(query, key, value, given, options)
    out, lse = attend(query[:, :rows], key, value, given, options)
    blind = seqlen_q - rows
    return (
        jnp.pad(out, ((0, 0), (0, blind), (0, 0), (0, 0))),
        jnp.pad(lse, ((0, 0), (0, 0), (0, blind)), constant_values=-jnp.inf),
    )


def _with_lengths(query, key, value, given, is_causal, same, options):
    """(out, lse) of entries with lengths of their own.

    A causal mask of the kernels is aligned at the end of each entry's lengths. That is JAX's in the square of
    an entry's first queries and keys; the queries after it see all the keys, and those of the square are
    hidden from that second call: what they hold, if they see nothing, is to reach no gradient. same: queries
    and keys have the same lengths.
    """
    used_q, used_k = given[:2]
    if not is_causal:
        return attend(query, key, value, given, options)
    batch, seqlen_q = query.shape[:2]
    seqlen_k = key.shape[1]
    causal = options._replace(right=0)
    if same and seqlen_q == seqlen_k:  # each entry is a square
        return attend(query, key, value, given, causal)

    def within(used, size):
        return jnp.full((batch,), size, jnp.int32) if used is None else jnp.clip(used, 0, size)

    count_q, count_k = within(used_q, seqlen_q), within(used_k, seqlen_k)
    square = jnp.minimum(count_q, count_k)
    out, lse = attend(query, key, value, given._replace(used_q=square, used_k=square), causal)
    if used_k is None and seqlen_q <= seqlen_k:
        return out, lse
    if_needed = jnp.where(count_q > count_k, count_k, 0)
    inside = jnp.arange(seqlen_q, dtype=jnp.int32)[None] < square[:, None]
    behind = jnp.where(inside[:, :, None, None], 0, query)
    given = given._replace(used_q=count_q, used_k=if_needed)
    all_out, all_lse = attend(behind, key, value, given, options)
    return (
        jnp.where(inside[:, :, None, None], out, all_out),
        jnp.where(inside[:, None, :], lse, all_lse),
    )


class Options(NamedTuple):
    """What is no array among the arguments of a call; limits of -1 are none."""

    scale: float
    left: int
    right: int
    tf32: bool
    deterministic: bool
    gives_lse: bool  # else it has no gradient
    softcap: float
    bias_scale: float
    keep: int  # of 4096 weights, where there is a seed
    face: str = ATTENTION  # in whose name its gradients raise


def attend(query, key, value, given, options):
    """(out, lse) with flash_cute.forward's masks; lse (batch, heads_q, seqlen_q)."""
    # Outside jit, which leaves out what is not used, no other array has a gradient.
    of_bias = isinstance(given.bias, jax.core.Tracer)
    return _attend_alike(*shards.alike((query, key, value, given)), options, of_bias)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend_alike(query, key, value, given, options, of_bias):
    return _forward(query, key, value, given, options)


def _attend_forward(query, key, value, given, options, of_bias):
    out, lse = _attend_alike(query, key, value, given, options, of_bias)
    return (out, lse), (query, key, value, given, out, lse)


def _attend_backward(options, of_bias, kept, gradients):
    dout, dlse = gradients
    operands = dout, dlse if options.gives_lse else None, *kept
    of_given = Given(bias=_bias_gradient(operands, options)[0]) if of_bias else None
    return *_gradients(operands, options), of_given


_attend_alike.defvjp(_attend_forward, _attend_backward)


def in_shards(compute, query, key, value, given):
    """compute's (out, lse), by itself for each shard of the batch and of the heads."""
    there_are = {name: x for name, x in given._asdict().items() if x is not None}
    if not any(axis for x in (query, key, value, *there_are.values()) for axis in shards.explicit_axes(x)):
        return compute(query, key, value, given)
    if given.seed is not None:
        raise ValueError(
            f"{ATTENTION}: dropout_p is given and arrays are sharded explicitly; 0 is accepted beside these, "
            "as weights are dropped by their place in the whole"
        )
    for name, x in (("query", query), ("key", key), ("value", value)):
        axes = shards.explicit_axes(x)
        if axes[1] or axes[3]:
            raise ValueError(
                f"{ATTENTION}: {name} is sharded as {axes}; shards of its batch and heads are accepted, "
                "jax.sharding.reshard makes them"
            )
    batch, _, heads, _ = shards.explicit_axes(query)
    of_queries = of_keys = PartitionSpec(batch, None, heads, None)
    if heads:
        mesh = jax.typeof(query).sharding.mesh
        parts = math.prod(mesh.shape[axis] for axis in (heads if isinstance(heads, tuple) else (heads,)))
        if key.shape[2] == 1:
            of_keys = PartitionSpec(batch, None, None, None)
        elif key.shape[2] % parts:
            raise ValueError(
                f"{ATTENTION}: key has {key.shape[2]} heads and query's are in {parts} shards; 1, or a "
                "multiple of the shards, is accepted"
            )
    entries = query.shape[0]

    def spec_of(name, x):
        of_heads = heads if name in ("mask", "bias") and x.shape[1] == query.shape[2] else None
        rest = (of_heads, *(None,) * (x.ndim - 2)) if x.ndim > 1 else ()
        return PartitionSpec(batch if len(x) == entries else None, *rest)

    of_given = (spec_of(name, x) for name, x in there_are.items())
    specs = of_queries, of_keys, of_keys, *of_given
    out_specs = of_queries, PartitionSpec(batch, heads, None)
    return shards.over_shards(compute, (query, key, value, given), specs, out_specs)


def _forward(query, key, value, given, options):
    if 0 in query.shape or 0 in key.shape:
        batch, seqlen_q, heads_q, _ = query.shape
        out = jnp.zeros((batch, seqlen_q, heads_q, value.shape[3]), query.dtype)
        lse = jnp.full((batch, heads_q, seqlen_q), -jnp.inf, jnp.float32)
        return tuple(shards.varying(x, shards.axes_of(query)) for x in (out, lse))
    default = functools.partial(plain.attention, options=options)
    if kernels.library() is None:
        return default(query, key, value, given)
    native = functools.partial(_native_forward, options=options)
    return jax.lax.platform_dependent(query, key, value, given, cuda=native, default=default)


def _backward(dout, dlse, query, key, value, given, out, lse, options, of_bias=False):
    """(dq, dk, dv), or (dbias,)"""
    if 0 in query.shape or 0 in key.shape:
        return tuple(map(jnp.zeros_like, (given.bias,) if of_bias else (query, key, value)))

    def default(dout, dlse, query, key, value, given, out, lse):
        return plain.attention_backward(dout, dlse, query, key, value, given, options, of_bias)

    operands = dout, dlse, query, key, value, given, out, lse
    if kernels.library() is None:
        return default(*operands)
    native = functools.partial(_native_backward, options=options, of_bias=of_bias)
    return jax.lax.platform_dependent(*operands, cuda=native, default=default)


_gradients = kernels.differentiable_once(_backward)
_bias_gradient = kernels.differentiable_once(functools.partial(_backward, of_bias=True))


def _workspace(call, query, key, value, given, options) -> jax.ShapeDtypeStruct:
    """A result of a call that is not read, so that XLA knows of the memory, in CUDA graphs as well."""
    batch, seqlen_q, heads_q, head_dim = query.shape
    _, seqlen_k, heads_kv, _ = key.shape
    size = kernels.library().flash_cute_jax_workspace(
        _CALLS.index(call),
        _ELEMENTS[query.dtype.name],
        batch,
        heads_q,
        heads_kv,
        seqlen_q,
        seqlen_k,
        head_dim,
        value.shape[3],
        options.left,
        options.right,
        any(x is not None for x in given[:3]),
        options.deterministic,
        0 if given.ranges is None else given.ranges.shape[2],
        *((0, 0, 0) if given.mask is None else given.mask.shape[:3]),
        *((0, 0, 0, 0) if given.bias is None else given.bias.shape),
        options.softcap > 0,
        _keep(given, options),
    )
    return jax.ShapeDtypeStruct((size,), jnp.uint8)


def _keep(given, options):
    return dropout.STEPS if given.seed is None else options.keep


def _attributes(given, options):
    return {
        "scale": np.float32(options.scale),
        "left": np.int64(options.left),
        "right": np.int64(options.right),
        "tf32": options.tf32,
        "softcap": np.float32(options.softcap),
        "bias_scale": np.float32(options.bias_scale),
        "keep": np.int64(_keep(given, options)),
    }


def _operands(given, batch, seqlen_k):
    """What the kernels take of given, ranges of each entry: vmap folds what it maps over into the batch."""
    ranges, mask, bias = given.ranges, given.mask, given.bias
    if ranges is not None:
        ranges = jnp.broadcast_to(ranges, (batch, *ranges.shape[1:]))
    if mask is not None:
        mask = jnp.packbits(jnp.broadcast_to(mask, (*mask.shape[:3], seqlen_k)), axis=-1, bitorder="little")
    if bias is not None and bias.shape[3] > 1:
        bias = _wide(bias)
    return kernels.given((*given[:3], ranges, mask, bias, given.seed))


def _vmap_method(given, batch):
    """How vmap calls the kernels: once, unless what it maps over can't be folded into the batch.

    Weights are dropped by an entry's number, and one entry of a mask stands for one of the batch or for all.
    """
    is_shared = given.mask is not None and len(given.mask) < batch
    return "sequential" if given.seed is not None or is_shared else "broadcast_all"


def _wide(x):
    """x with rows of a multiple of _ROW_BYTES."""
    missing = -x.shape[-1] % (_ROW_BYTES // x.dtype.itemsize)
    return jnp.pad(x, ((0, 0),) * 3 + ((0, missing),)) if missing else x


def _native_forward(query, key, value, given, options):
    batch, seqlen_q, heads_q, _ = query.shape
    head_dim_v = value.shape[3]
    query, key, value = map(_wide, (query, key, value))
    results = (
        jax.ShapeDtypeStruct((batch, seqlen_q, heads_q, value.shape[3]), query.dtype),
        jax.ShapeDtypeStruct((batch, heads_q, seqlen_q), jnp.float32),
        _workspace(_CALLS[0], query, key, value, given, options),
    )
    call = jax.ffi.ffi_call(_CALLS[0], results, vmap_method=_vmap_method(given, batch))
    operands = _operands(given, batch, key.shape[1])
    out, lse, _ = call(query, key, value, *operands, **_attributes(given, options))
    return tuple(shards.varying(x, shards.axes_of(query)) for x in (out[..., :head_dim_v], lse))


def _native_backward(dout, dlse, query, key, value, given, out, lse, options, of_bias):
    name = _CALLS[2 if of_bias else 1]
    widths = [x.shape[3] for x in ((given.bias,) if of_bias else (query, key, value))]
    dout, query, key, value, out = map(_wide, (dout, query, key, value, out))
    likes = (given.bias,) if of_bias else (query, key, value)
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in likes]
    results.append(_workspace(name, query, key, value, given, options))
    call = jax.ffi.ffi_call(name, results, vmap_method=_vmap_method(given, len(query)))
    *gradients, _ = call(
        dout,
        jnp.zeros((0,), jnp.float32) if dlse is None else dlse,
        query,
        key,
        value,
        out,
        lse,
        *_operands(given, len(query), key.shape[1]),
        **_attributes(given, options),
        **({} if of_bias else {"deterministic": options.deterministic}),
    )
    return tuple(
        shards.varying(x[..., :width], shards.axes_of(query))
        for x, width in zip(gradients, widths, strict=True)
    )
