"""Softmax by itself, differentiable."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from flash_cute.jax import arguments, kernels, plain, shards
from flash_cute.jax.arguments import MAX_LENGTH, SOFTMAX
from flash_cute.wording import hinting, require_bool

_MAX_ROWS = 2**31 - 2


@hinting("flash_cute.jax")
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
    x = arguments.array(SOFTMAX, "x", x)
    require_bool(SOFTMAX, "causal", causal)
    if x.dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
        raise ValueError(f"{SOFTMAX}: x has dtype {x.dtype}; float32, float16 and bfloat16 are accepted")
    has_lengths = seqused_k is not None or leftpad_k is not None
    needed = 1 + causal + has_lengths
    if x.ndim < needed:
        raise ValueError(f"{SOFTMAX}: x has {x.ndim} dimensions; at least {needed} are accepted")
    rows = math.prod(x.shape[:-1])
    if rows > _MAX_ROWS:
        raise ValueError(f"{SOFTMAX}: x has {rows} rows; at most {_MAX_ROWS} are accepted")
    if x.shape[-1] > MAX_LENGTH:
        raise ValueError(f"{SOFTMAX}: x has {x.shape[-1]} columns; at most {MAX_LENGTH} are accepted")
    options = arguments.checked_scale(SOFTMAX, scale), causal
    lengths = tuple(
        arguments.checked_lengths(SOFTMAX, name, y, x.shape[0] if has_lengths else 0)
        for name, y in (("seqused_k", seqused_k), ("leftpad_k", leftpad_k))
    )

    def compute(x, lengths):
        return _softmax(*shards.alike((x, lengths)), options)

    given = [y for y in lengths if y is not None]
    spec = shards.explicit_axes(x)
    if not any(axis for y in (x, *given) for axis in shards.explicit_axes(y)):
        return compute(x, lengths)
    if any(spec[-2:] if causal else spec[-1:]):
        raise ValueError(
            f"{SOFTMAX}: x is sharded as {spec}; whole columns, and with causal whole rows, are "
            "accepted, jax.sharding.reshard makes them"
        )
    whole, row = PartitionSpec(*spec), PartitionSpec(*spec[:-1])
    specs = whole, *(PartitionSpec(spec[0]) for _ in given)
    return shards.over_shards(compute, (x, lengths), specs, (whole, row))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _softmax(x, lengths, options):
    default = functools.partial(plain.softmax, options=options)
    if kernels.library() is None or x.size == 0:
        return default(x, lengths)

    def native(x, lengths):
        results = (
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32),
            _softmax_workspace(x, backward=False),
        )
        call = jax.ffi.ffi_call("flash_cute_softmax", results, vmap_method="broadcast_all")
        *found, _ = call(x, *kernels.given(lengths), scale=np.float32(options[0]), causal=options[1])
        return tuple(shards.varying(y, shards.axes_of(x)) for y in found)

    return jax.lax.platform_dependent(x, lengths, cuda=native, default=default)


def _softmax_forward(x, lengths, options):
    probabilities, lse = _softmax(x, lengths, options)
    return (probabilities, lse), (probabilities if x.dtype == jnp.float32 else x, lengths)


def _softmax_backward(options, kept, gradients):
    kept, lengths = kept
    dx = _softmax_gradient((*gradients, kept, lengths), options)
    return dx, tuple(None if y is None else np.zeros(y.shape, jax.dtypes.float0) for y in lengths)


_softmax.defvjp(_softmax_forward, _softmax_backward)


def _gradient_of_scores(dprobabilities, dlse, kept, lengths, options):
    default = functools.partial(plain.softmax_backward, options=options)

    def native(dprobabilities, dlse, kept, lengths):
        results = jax.ShapeDtypeStruct(kept.shape, kept.dtype), _softmax_workspace(kept, backward=True)
        call = jax.ffi.ffi_call("flash_cute_softmax_backward", results, vmap_method="broadcast_all")
        operands = dprobabilities, dlse, kept, *kernels.given(lengths)
        dx, _ = call(*operands, scale=np.float32(options[0]), causal=options[1])
        return shards.varying(dx, shards.axes_of(kept))

    if kept.size == 0:
        return jnp.zeros_like(kept)
    operands = dprobabilities, dlse, kept, lengths
    if kernels.library() is None:
        return default(*operands)
    return jax.lax.platform_dependent(*operands, cuda=native, default=default)


_softmax_gradient = kernels.differentiable_once(_gradient_of_scores, SOFTMAX)


def _softmax_workspace(x, backward) -> jax.ShapeDtypeStruct:
    """As in dot_product_attention.py: a result that is not read."""
    columns = x.shape[-1]
    size = kernels.library().flash_cute_jax_softmax_workspace(
        backward, x.size // columns, columns, x.dtype.itemsize
    )
    return jax.ShapeDtypeStruct((size,), jnp.uint8)
