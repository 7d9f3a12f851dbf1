"""The library of kernels, and what all calls of it share."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import jax
import jax.numpy as jnp

import flash_cute

_LIBRARY = "_jax.so"


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels, registered with XLA; None in a build without CUDA, or without JAX's headers."""
    paths = (Path(folder) / _LIBRARY for folder in flash_cute.__path__)
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        return None
    found = ctypes.CDLL(str(path))
    for name in ("forward", "backward", "bias_gradient", "softmax", "softmax_backward"):
        handler = jax.ffi.pycapsule(getattr(found, f"flash_cute_jax_{name}"))
        jax.ffi.register_ffi_target(f"flash_cute_{name}", handler, platform="CUDA")
    found.flash_cute_jax_workspace.argtypes = [
        *[ctypes.c_int] * 9,
        *[ctypes.c_int64] * 2,
        *[ctypes.c_bool] * 2,
        *[ctypes.c_int] * 8,
        ctypes.c_bool,
        ctypes.c_int,
    ]
    found.flash_cute_jax_softmax_workspace.argtypes = [
        ctypes.c_bool,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int,
    ]
    for ask in (found.flash_cute_jax_workspace, found.flash_cute_jax_softmax_workspace):
        ask.restype = ctypes.c_int64
    return found


def given(lengths):
    """The lengths, empty where they are None."""
    return tuple(jnp.zeros((0,), jnp.int32) if x is None else x for x in lengths)


def differentiable_once(compute, face=None):
    """compute(*arguments, options) as a function of (arguments, options) whose derivative is refused.

    face: of which function, where options don't say it.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
    def call(arguments, options):
        return compute(*arguments, options)

    def forward(arguments, options):
        return call(arguments, options), None

    def refuse(options, kept, gradients):
        raise NotImplementedError(
            f"{face or options.face}: there are no second derivatives; put the gradients through "
            "jax.lax.stop_gradient"
        )

    call.defvjp(forward, refuse)
    return call
