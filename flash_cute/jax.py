"""flash_cute for JAX: attention and softmax through XLA's foreign function interface, without torch.

On CUDA GPUs the library's kernels compute, elsewhere plain jax.numpy with the same semantics. docs/jax.md
shows its use.
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
from numbers import Real
from pathlib import Path
from typing import NamedTuple

try:
    import jax
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise ModuleNotFoundError("flash_cute.jax needs jax; pip install 'flash_cute[jax]'", name="jax") from None
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import flash_cute

_LIBRARY = "_jax.so"
_ROW_ELEMENTS = 8  # rows of the kernels are multiples of 16 bytes
_MAX_LENGTH = 2**28  # as csrc/problem.hpp has it
_MAX_ROWS = 2**31 - 2
_ATTENTION, _SOFTMAX = "flash_cute.jax.attention", "flash_cute.jax.softmax"

Window = int | tuple[int, int] | None


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: None = None,
    mask: None = None,
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
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Exact attention with the signature, layout and masks of jax.nn.dot_product_attention.

    Args:
        query: (batch, seqlen_q, heads_q, head_dim), float16 or bfloat16; head_dim up to 256. A batch of 1 may
            be left out, of any of the three.
        key, value: (batch, seqlen_k, heads_kv, head_dim), query's dtype. heads_q is a multiple of heads_kv.
        bias, mask, implementation: for calls made for JAX's own; None.
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

    Returns:
        out: of query's shape and dtype. 0 for a query that sees no key or doesn't count, where JAX's own
            gives the mean of the values to the former.
        lse: with return_residual, float32 (batch, seqlen_q, heads_q), natural logarithm; -inf where out is 0
            for these reasons.

        Both are differentiable, once, in reverse mode.

    Raises:
        ValueError, TypeError: an argument makes no sense; the sentence says which, and what is accepted.
        NotImplementedError: a second derivative is asked for.

    Source: Dao, "FlashAttention-2", arXiv:2307.08691.
    """
    for name, x in (("bias", bias), ("mask", mask), ("implementation", implementation)):
        if x is not None:
            raise ValueError(f"{_ATTENTION}: {name} is given; None is accepted")
    options = {"is_causal": is_causal, "deterministic": deterministic, "return_residual": return_residual}
    for name, x in options.items():
        if not isinstance(x, bool):
            raise TypeError(f"{_ATTENTION}: {name} is {_shown(x)}; True or False is accepted")
    arrays = {"query": query, "key": key, "value": value}
    arrays = {name: _array(_ATTENTION, name, x) for name, x in arrays.items()}
    has_batch = arrays["query"].ndim != 3
    query, key, value = (x[None] if x.ndim == 3 else x for x in arrays.values())
    _check_operands(query, key, value)
    lengths = {
        "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths,
        "key_value_left_padding": key_value_left_padding,
    }
    for name, x in lengths.items():
        if x is not None and local_window_size is not None:
            raise ValueError(f"{_ATTENTION}: {name} is given with local_window_size; one of them is accepted")
    lengths = tuple(_checked_lengths(_ATTENTION, name, x, query.shape[0]) for name, x in lengths.items())
    left, right = (None, None) if local_window_size is None else _checked_window(local_window_size)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else _checked_scale(_ATTENTION, scale)
    options = _Options(scale, -1, -1, deterministic, return_residual)

    def compute(query, key, value, lengths):
        if all(x is None for x in lengths):
            return _in_window(query, key, value, (left, 0 if is_causal else right), options)
        same = query_seq_lengths is key_value_seq_lengths and query_seq_lengths is not None
        return _with_lengths(query, key, value, lengths, is_causal, same, options)

    out, lse = _in_shards(compute, query, key, value, lengths)
    out, lse = (x if has_batch else jnp.squeeze(x, 0) for x in (out, jnp.swapaxes(lse, 1, 2)))
    return (out, lse) if return_residual else out


def _shown(x) -> str:
    """x in one line."""
    return " ".join(repr(x).split())


def _array(face, name, x, make=jnp.asarray):
    try:
        return make(x)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(
            f"{face}: {name} is {type(x).__name__}, which jax.numpy makes no array of; an array is accepted"
        ) from None


def _checked_scale(face, scale) -> float:
    if isinstance(scale, jax.core.Tracer):
        raise TypeError(f"{face}: scale is traced; a Python number is accepted (static_argnames)")
    if not isinstance(scale, Real) or isinstance(scale, bool):
        raise TypeError(f"{face}: scale is {_shown(scale)}; a number is accepted")
    try:
        with np.errstate(over="ignore", under="ignore"):
            fits = 0 < np.float32(float(scale)) < np.inf
    except OverflowError:  # of a large int
        fits = False
    if not fits:
        raise ValueError(f"{face}: scale is {scale}; a number > 0 that is finite in float32 is accepted")
    return float(scale)


def _checked_lengths(face, name, x, batch):
    """As int32. Those beyond any sequence's end stay there."""
    if x is None:
        return None
    if not isinstance(x, jax.Array):
        is_traced = any(isinstance(y, jax.core.Tracer) for y in jax.tree.leaves(x))
        x = _array(face, name, x, jnp.asarray if is_traced else np.asarray)
    if x.shape != (batch,) or not jnp.issubdtype(x.dtype, np.integer):
        raise ValueError(
            f"{face}: {name} is {x.dtype}{list(x.shape)}; int32[{batch}], as the batch is, is accepted"
        )
    if x.dtype != np.int32:
        x = x.clip(0, min(_MAX_LENGTH, int(jnp.iinfo(x.dtype).max))).astype(np.int32)
    return jnp.asarray(x)


def _checked_window(window):
    """(left, right)"""
    limits = tuple(window) if isinstance(window, tuple | list) else (window, window)
    if any(isinstance(x, jax.core.Tracer) for x in limits):
        raise TypeError(
            f"{_ATTENTION}: local_window_size is traced; Python numbers are accepted (static_argnames)"
        )
    sentence = (
        f"{_ATTENTION}: local_window_size is {_shown(window)}; a number of keys >= 0, or two, "
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


def _check_operands(query, key, value):
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4:
            raise ValueError(
                f"{_ATTENTION}: {name} has {x.ndim} dimensions; 4, (batch, seqlen, heads, head_dim), or 3, "
                "without a batch, are accepted"
            )
    if query.dtype not in (jnp.float16, jnp.bfloat16):
        raise ValueError(f"{_ATTENTION}: query has dtype {query.dtype}; float16 and bfloat16 are accepted")
    for name, x in (("key", key), ("value", value)):
        if x.dtype != query.dtype:
            raise ValueError(
                f"{_ATTENTION}: {name} has dtype {x.dtype} and query {query.dtype}; they must be the same"
            )
    batch, _, heads_q, head_dim = query.shape
    if value.shape != key.shape:
        raise ValueError(
            f"{_ATTENTION}: value has shape {value.shape} and key {key.shape}; they must be the same"
        )
    if (key.shape[0], key.shape[3]) != (batch, head_dim):
        raise ValueError(
            f"{_ATTENTION}: key has batch {key.shape[0]} and head_dim {key.shape[3]}, and query "
            f"{batch} and {head_dim}; they must be the same"
        )
    if not 1 <= head_dim <= 256:
        raise ValueError(f"{_ATTENTION}: head_dim is {head_dim}; 1 to 256 are accepted")
    if key.shape[2] == 0 or heads_q % key.shape[2]:
        raise ValueError(
            f"{_ATTENTION}: query has {heads_q} heads and key {key.shape[2]}; the heads of query "
            "must be a multiple of those of key"
        )
    for name, x in (("query", query), ("key", key)):
        if x.shape[1] > _MAX_LENGTH:
            raise ValueError(
                f"{_ATTENTION}: {name} has seqlen {x.shape[1]}; at most {_MAX_LENGTH} is accepted"
            )
    if batch * heads_q > _MAX_LENGTH:
        raise ValueError(
            f"{_ATTENTION}: query has {batch * heads_q} (batch, head) pairs; at most {_MAX_LENGTH} are "
            "accepted"
        )


def _in_window(query, key, value, window, options):
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
    if rows == seqlen_q:
        return _attend(query, key, value, (None,) * 3, options)
    out, lse = _attend(query[:, :rows], key, value, (None,) * 3, options)
    blind = seqlen_q - rows
    return (
        jnp.pad(out, ((0, 0), (0, blind), (0, 0), (0, 0))),
        jnp.pad(lse, ((0, 0), (0, 0), (0, blind)), constant_values=-jnp.inf),
    )


def _with_lengths(query, key, value, lengths, is_causal, same, options):
    """(out, lse) of entries with lengths of their own.

    A causal mask of the kernels is aligned at the end of each entry's lengths. That is JAX's in the square of
    an entry's first queries and keys; the queries after it see all the keys. same: queries and keys have the
    same lengths.
    """
    used_q, used_k, skipped = lengths
    if not is_causal:
        return _attend(query, key, value, lengths, options)
    batch, seqlen_q = query.shape[:2]
    seqlen_k = key.shape[1]
    causal = options._replace(right=0)
    if same and seqlen_q == seqlen_k:  # each entry is a square
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
    inside = jnp.arange(seqlen_q, dtype=jnp.int32)[None] < square[:, None]
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


def _attend(query, key, value, lengths, options):
    """(out, lse) with flash_cute.forward's masks; lse (batch, heads_q, seqlen_q)."""
    return _attend_alike(*_alike((query, key, value, lengths)), options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend_alike(query, key, value, lengths, options):
    return _forward(query, key, value, lengths, options)


def _attend_forward(query, key, value, lengths, options):
    out, lse = _attend_alike(query, key, value, lengths, options)
    return (out, lse), (query, key, value, lengths, out, lse)


def _attend_backward(options, kept, gradients):
    query, key, value, lengths, out, lse = kept
    dout, dlse = gradients
    dlse = dlse if options.gives_lse else None
    found = _gradients((dout, dlse, query, key, value, lengths, out, lse), options)
    return *found, tuple(None if x is None else np.zeros(x.shape, jax.dtypes.float0) for x in lengths)


_attend_alike.defvjp(_attend_forward, _attend_backward)


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
        return gradients((dout, jnp.zeros_like(lse) if dlse is None else dlse))

    arguments = dout, dlse, query, key, value, lengths, out, lse
    if _library() is None:
        return plain(*arguments)
    native = functools.partial(_native_backward, options=options)
    return jax.lax.platform_dependent(*arguments, cuda=native, default=plain)


def _differentiable_no_more(face, compute):
    """compute(*arguments, options) as a function of (arguments, options) whose derivative is refused."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
    def call(arguments, options):
        return compute(*arguments, options)

    def forward(arguments, options):
        return call(arguments, options), None

    def refuse(options, kept, gradients):
        raise NotImplementedError(
            f"{face}: there are no second derivatives; put the gradients through jax.lax.stop_gradient"
        )

    call.defvjp(forward, refuse)
    return call


_gradients = _differentiable_no_more(_ATTENTION, _backward)


# Meshes


def _axes(x) -> frozenset[str]:
    """Of the shard_map's axes around, those that x varies over."""
    kind = jax.typeof(x)
    if hasattr(kind, "manual_axis_type"):
        return kind.manual_axis_type.varying
    return getattr(kind, "vma", frozenset())  # JAX before 0.10


def _varying(x, axes):
    """x varying over these axes, too. Its gradient is summed over those that it did not vary over."""
    axes -= _axes(x)
    if not axes:
        return x
    if not hasattr(jax.lax, "pcast"):  # JAX 0.8.0 and older
        return jax.lax.pvary(x, tuple(axes))
    return jax.lax.pcast(x, tuple(axes), to="varying")


def _alike(arrays):
    """The arrays, each varying over the axes that any of them does."""
    axes = frozenset().union(*(_axes(x) for x in jax.tree.leaves(arrays)))
    return jax.tree.map(lambda x: _varying(x, axes), arrays)


def _spec(x) -> tuple:
    """The explicit axes of a mesh, if any, that each dimension is sharded over."""
    return tuple(jax.typeof(x).sharding.spec)


def _over_shards(compute, arrays, specs, out_specs):
    """compute(*arrays) of each shard; the first of the arrays says how they are, and the others follow it."""
    axes = {axis for entry in specs[0] for axis in (entry if isinstance(entry, tuple) else (entry,))} - {None}
    leaves, tree = jax.tree.flatten(tuple(arrays))
    leaves = [
        x if _spec(x) == tuple(s) else jax.sharding.reshard(x, s) for x, s in zip(leaves, specs, strict=True)
    ]
    if not axes:
        return compute(*jax.tree.unflatten(tree, leaves))
    mesh = jax.typeof(leaves[0]).sharding.mesh
    return jax.shard_map(
        lambda *leaves: compute(*jax.tree.unflatten(tree, leaves)),
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=out_specs,
        axis_names=axes,
    )(*leaves)


def _in_shards(compute, query, key, value, lengths):
    """compute's (out, lse), by itself for each shard of the batch and of the heads."""
    given = [x for x in lengths if x is not None]
    if not any(axis for x in (query, key, value, *given) for axis in _spec(x)):
        return compute(query, key, value, lengths)
    for name, x in (("query", query), ("key", key), ("value", value)):
        _, seqlen, _, head_dim = _spec(x)
        if seqlen or head_dim:
            raise ValueError(
                f"{_ATTENTION}: {name} is sharded as {_spec(x)}; shards of its batch and heads are accepted, "
                "jax.sharding.reshard makes them"
            )
    batch, _, heads, _ = _spec(query)
    of_queries = of_keys = PartitionSpec(batch, None, heads, None)
    if heads:
        mesh = jax.typeof(query).sharding.mesh
        parts = math.prod(mesh.shape[axis] for axis in (heads if isinstance(heads, tuple) else (heads,)))
        if key.shape[2] == 1:
            of_keys = PartitionSpec(batch, None, None, None)
        elif key.shape[2] % parts:
            raise ValueError(
                f"{_ATTENTION}: key has {key.shape[2]} heads and query's are in {parts} shards; 1, or a "
                "multiple of the shards, is accepted"
            )
    specs = of_queries, of_keys, of_keys, *(PartitionSpec(batch) for _ in given)
    out_specs = of_queries, PartitionSpec(batch, heads, None)
    return _over_shards(compute, (query, key, value, lengths), specs, out_specs)


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
    return tuple(_varying(x, _axes(query)) for x in (out[..., :head_dim], lse))


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
    return tuple(_varying(x[..., :head_dim], _axes(query)) for x in gradients)


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
            (batch, ..., columns). At most 2**31 - 2 rows and 2**28 columns.
        scale: multiplies the scores; a number > 0, not traced.
        causal: row i sees column j iff j <= i + columns - rows.
        seqused_k, leftpad_k: integers (batch,): how many columns of an entry count, from the first, and how
            many at its begin don't.

    Returns:
        probabilities: of x's shape and dtype; 0 where a row doesn't see a column.
        lse: float32 (...); -inf for a row that sees nothing. Both are differentiable, once, in reverse mode.

    Raises:
        ValueError, TypeError: an argument makes no sense; the sentence says which, and what is accepted.
        NotImplementedError: a second derivative is asked for.
    """
    x = _array(_SOFTMAX, "x", x)
    if not isinstance(causal, bool):
        raise TypeError(f"{_SOFTMAX}: causal is {_shown(causal)}; True or False is accepted")
    if x.dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
        raise ValueError(f"{_SOFTMAX}: x has dtype {x.dtype}; float32, float16 and bfloat16 are accepted")
    has_lengths = seqused_k is not None or leftpad_k is not None
    needed = 1 + causal + has_lengths
    if x.ndim < needed:
        raise ValueError(f"{_SOFTMAX}: x has {x.ndim} dimensions; at least {needed} are accepted")
    rows = math.prod(x.shape[:-1])
    if rows > _MAX_ROWS:
        raise ValueError(f"{_SOFTMAX}: x has {rows} rows; at most {_MAX_ROWS} are accepted")
    if x.shape[-1] > _MAX_LENGTH:
        raise ValueError(f"{_SOFTMAX}: x has {x.shape[-1]} columns; at most {_MAX_LENGTH} are accepted")
    options = _checked_scale(_SOFTMAX, scale), causal
    lengths = tuple(
        _checked_lengths(_SOFTMAX, name, y, x.shape[0] if has_lengths else 0)
        for name, y in (("seqused_k", seqused_k), ("leftpad_k", leftpad_k))
    )

    def compute(x, lengths):
        return _softmax(*_alike((x, lengths)), options)

    given = [y for y in lengths if y is not None]
    spec = _spec(x)
    if not any(axis for y in (x, *given) for axis in _spec(y)):
        return compute(x, lengths)
    if any(spec[-2:] if causal else spec[-1:]):
        raise ValueError(
            f"{_SOFTMAX}: x is sharded as {spec}; whole columns, and with causal whole rows, are "
            "accepted, jax.sharding.reshard makes them"
        )
    whole, row = PartitionSpec(*spec), PartitionSpec(*spec[:-1])
    specs = whole, *(PartitionSpec(spec[0]) for _ in given)
    return _over_shards(compute, (x, lengths), specs, (whole, row))


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
        return tuple(_varying(y, _axes(x)) for y in found)

    return jax.lax.platform_dependent(x, lengths, cuda=native, default=plain)


def _softmax_forward(x, lengths, options):
    probabilities, lse = _softmax(x, lengths, options)
    return (probabilities, lse), (probabilities if x.dtype == jnp.float32 else x, lengths)


def _softmax_backward(options, kept, gradients):
    kept, lengths = kept
    dx = _softmax_gradient((*gradients, kept, lengths), options)
    return dx, tuple(None if y is None else np.zeros(y.shape, jax.dtypes.float0) for y in lengths)


_softmax.defvjp(_softmax_forward, _softmax_backward)


def _gradient_of_scores(dprobabilities, dlse, kept, lengths, options):
    plain = functools.partial(_plain_softmax_backward, options=options)

    def native(dprobabilities, dlse, kept, lengths):
        results = jax.ShapeDtypeStruct(kept.shape, kept.dtype), _softmax_workspace(kept, backward=True)
        call = jax.ffi.ffi_call("flash_cute_softmax_backward", results, vmap_method="broadcast_all")
        arguments = dprobabilities, dlse, kept, *_given(lengths)
        dx, _ = call(*arguments, scale=np.float32(options[0]), causal=options[1])
        return _varying(dx, _axes(kept))

    if kept.size == 0:
        return jnp.zeros_like(kept)
    arguments = dprobabilities, dlse, kept, lengths
    if _library() is None:
        return plain(*arguments)
    return jax.lax.platform_dependent(*arguments, cuda=native, default=plain)


_softmax_gradient = _differentiable_no_more(_SOFTMAX, _gradient_of_scores)


def _softmax_workspace(x, backward) -> jax.ShapeDtypeStruct:
    """See _workspace."""
    columns = x.shape[-1]
    size = _library().flash_cute_jax_softmax_workspace(backward, x.size // columns, columns, x.dtype.itemsize)
    return jax.ShapeDtypeStruct((size,), jnp.uint8)


def _places(shape, dim):
    """int32: 0, 1, ... along a dimension, 1 element in the others."""
    return jax.lax.broadcasted_iota(jnp.int32, [size if d == dim else 1 for d, size in enumerate(shape)], dim)


def _hidden_columns(shape, lengths, causal):
    """bool, of a shape that broadcasts to x's: where a row does not see a column."""
    columns = _places(shape, len(shape) - 1)
    used, skipped = (
        default if y is None else jnp.clip(y, 0, shape[-1]).reshape(-1, *(1,) * (len(shape) - 1))
        for y, default in zip(lengths, (shape[-1], 0), strict=True)
    )
    hidden = (columns < skipped) | (columns >= used)
    if causal:
        hidden = hidden | (columns > _places(shape, len(shape) - 2) - shape[-2] + used)
    return hidden


def _plain_softmax(x, lengths, options):
    scale, causal = options
    hidden = _hidden_columns(x.shape, lengths, causal)
    blind = hidden.all(-1, keepdims=True)
    scores = _plain_scores(x, hidden, scale)
    lse = jnp.where(blind[..., 0], -jnp.inf, jax.nn.logsumexp(scores, axis=-1))
    probabilities = jnp.where(hidden, 0, jax.nn.softmax(scores))
    return probabilities.astype(x.dtype), lse


def _plain_scores(x, hidden, scale):
    """-inf where they are hidden, but 0 where that is a whole row: its softmax is no NaN."""
    fill = jnp.where(hidden.all(-1, keepdims=True), 0.0, -jnp.inf)
    return jnp.where(hidden, fill, scale * jnp.where(hidden, 0, x.astype(jnp.float32)))


def _plain_softmax_backward(dprobabilities, dlse, kept, lengths, options):
    scale, causal = options
    hidden = _hidden_columns(kept.shape, lengths, causal)
    p = kept.astype(jnp.float32)
    if kept.dtype != jnp.float32:
        p = jnp.where(hidden, 0, jax.nn.softmax(_plain_scores(kept, hidden, scale)))
    dp = jnp.where(hidden, 0, dprobabilities.astype(jnp.float32))
    dx = scale * p * (dp - (p * dp).sum(-1, keepdims=True) + dlse[..., None])
    return jnp.where(hidden, 0, dx).astype(kept.dtype)


# The same in jax.numpy


def _visible(seqlen_q, seqlen_k, lengths, options):
    """bool (batch or 1, seqlen_q, seqlen_k): which queries see which keys."""
    used_q, used_k, skipped = (None if x is None else x[:, None, None] for x in lengths)
    used_q = seqlen_q if used_q is None else jnp.clip(used_q, 0, seqlen_q)
    used_k = seqlen_k if used_k is None else jnp.clip(used_k, 0, seqlen_k)
    rows, keys = (_places((1, seqlen_q, seqlen_k), dim) for dim in (1, 2))
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
    batch, seqlen_q, heads_q, head_dim = query.shape
    heads = key.shape[2]
    q, k, v = (x.astype(jnp.float32) for x in (query, key, value))
    visible = _visible(seqlen_q, k.shape[1], lengths, options)
    blind = ~visible.any(-1)
    # What nobody sees may be NaN, and 0 x NaN is.
    k, v = (jnp.where(visible.any(1)[:, :, None, None], x, 0) for x in (k, v))
    q = jnp.where(blind[:, :, None, None], 0, q).reshape(batch, seqlen_q, heads, heads_q // heads, head_dim)
    precision = jax.lax.Precision.HIGHEST
    scores = options.scale * jnp.einsum("bqhgd,bkhd->bhgqk", q, k, precision=precision)
    scores = scores.reshape(batch, heads_q, *scores.shape[3:])
    unseen = jnp.where(blind, 0.0, -jnp.inf)[:, None, :, None]
    scores = jnp.where(visible[:, None], scores, unseen)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jax.nn.softmax(scores).reshape(batch, heads, heads_q // heads, *scores.shape[2:])
    out = jnp.einsum("bhgqk,bkhd->bqhgd", weights, v, precision=precision).reshape(query.shape)
    # Last, as it hides the blind rows' gradients from the values', too.
    out = jnp.where(blind[:, :, None, None], 0, out)
    return out.astype(query.dtype), jnp.where(blind[:, None], -jnp.inf, lse)
