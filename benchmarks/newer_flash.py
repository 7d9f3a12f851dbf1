"""FlashAttention-3 and -4, which PyTorch does not ship: peers where a package of them is installed.

    pip install --no-deps xformers==0.0.34 nvidia-cuda-runtime-cu12        FlashAttention-3
    pip install 'flash-attn-4[cu13]==4.0.0b36'                             FlashAttention-4

Of xformers only the library that has FlashAttention-3's operators is loaded. Tensors are (batch, seqlen,
heads, head_dim), or (tokens, heads, head_dim) with offsets; a backward takes what its own forward gave.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from .problem import CannotRun

Tensors = tuple[torch.Tensor, ...]


class Version(NamedTuple):
    """(q, k, v, mask, **options) -> (out, lse), and (dout, q, k, v, out, lse, mask, ...) -> (dq, dk, dv)."""

    title: str
    load: Callable  # raises CannotRun where it is not installed
    forward: Callable[..., Tensors]
    backward: Callable[..., Tensors]


class Mask(NamedTuple):
    causal: bool
    left: int | None = None  # of a window, None: unlimited
    right: int | None = None


def find(package: str, pattern: str) -> Path | None:
    """The first such file of an installed package, which is not imported for it."""
    spec = find_spec(package)
    places = (spec and spec.submodule_search_locations) or ()
    return next((file for place in places for file in sorted(Path(place).glob(pattern))), None)


@cache
def operators_3():
    """torch.ops.flash_attn_3 of FlashAttention-3's own package, or of xformers."""
    library = find("flash_attn_3", "_C*.so") or find("xformers", "flash_attn_3/_C*.so")
    if not library:
        raise CannotRun("FlashAttention-3 is not installed (xformers 0.0.34 has it)")
    try:
        if runtime := find("nvidia", "cuda_runtime/lib/libcudart.so.12"):  # of what xformers was built with
            ctypes.CDLL(str(runtime))
        torch.ops.load_library(str(library))
    except OSError as error:
        raise CannotRun(f"FlashAttention-3 cannot be loaded: {error}") from error
    return torch.ops.flash_attn_3


def options_3(mask: Mask) -> dict:
    left, right = (-1 if side is None else side for side in mask[1:])
    return {"is_causal": mask.causal, "window_size_left": left, "window_size_right": right}


def forward_3(q, k, v, mask: Mask, **lengths) -> Tensors:
    return operators_3().fwd(q, k, v, **options_3(mask), **lengths)[:2]


def backward_3(dout, q, k, v, out, lse, mask: Mask, deterministic: bool = False, **lengths) -> Tensors:
    options = {**options_3(mask), "deterministic": deterministic}
    # Made here, as the operator would: which of its results are the gradients depends on its version.
    gradients = dict(zip(("dq", "dk", "dv"), map(torch.empty_like, (q, k, v)), strict=True))
    operators_3().bwd(dout, q, k, v, out, lse, **gradients, **options, **lengths)
    return tuple(gradients.values())


@cache
def interface_4():
    try:
        from flash_attn.cute import interface
    except Exception as error:  # of any kind where the packages that it builds on are others
        raise CannotRun(f"FlashAttention-4 is not installed (flash-attn-4 has it): {error}") from error
    return interface


def options_4(mask: Mask) -> dict:
    return {"causal": mask.causal, "window_size_left": mask.left, "window_size_right": mask.right}


def call_4(name: str, *arguments, **options) -> Tensors:
    """It compiles its kernels when it is called first, which fails by exceptions of its compiler's own."""
    interface = interface_4()
    try:
        return getattr(interface, name)(*arguments, **options)
    except Exception as error:
        raise CannotRun(f"{type(error).__name__}: {error}") from error


def forward_4(q, k, v, mask: Mask, **lengths) -> Tensors:
    return call_4("_flash_attn_fwd", q, k, v, **options_4(mask), return_lse=True, **lengths)[:2]


def backward_4(dout, q, k, v, out, lse, mask: Mask, deterministic: bool = False, **lengths) -> Tensors:
    options = {**options_4(mask), "deterministic": deterministic}
    return call_4("_flash_attn_bwd", q, k, v, out, dout, lse, **options, **lengths)


VERSIONS = {
    "flash3": Version("FlashAttention-3", operators_3, forward_3, backward_3),
    "flash4": Version("FlashAttention-4", interface_4, forward_4, backward_4),
}


def mask_of(problem) -> Mask:
    """A problem's; a window's right side is 0 under a causal mask, as these ask for one or the other."""
    left, right = getattr(problem, "window", None) or (None, None)
    if (left, right) == (None, None):
        return Mask(problem.causal)
    return Mask(False, left, 0 if problem.causal else right)


def forward(problem, q, k, v, *, version: Version) -> Callable[[], Tensors]:
    """A contender's call, on (batch, heads, seqlen, head_dim)."""
    version.load()
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    mask = mask_of(problem)

    def run():
        out, lse = version.forward(q, k, v, mask)
        return out.transpose(1, 2), lse

    return run


def backward(
    problem, q, k, v, dout, saved, *, version: Version, deterministic: bool
) -> Callable[[], Tensors]:
    out, lse = saved
    dout, q, k, v, out = (tensor.transpose(1, 2) for tensor in (dout, q, k, v, out))
    mask = mask_of(problem)

    def run():
        gradients = version.backward(dout, q, k, v, out, lse, mask, deterministic)
        return tuple(gradient.transpose(1, 2) for gradient in gradients)

    return run


def packed(problem, q, k, v, dout, *, offsets, version: Version) -> tuple[Callable, Callable]:
    """(forward's call, what makes the backward's from what that gave), of sequences one behind the other."""
    version.load()
    longest = max(problem.lengths)
    lengths = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    lengths |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    mask = mask_of(problem)

    def backward(saved):
        return partial(version.backward, *dout, q, k, v, *saved, mask, **lengths)

    return partial(version.forward, q, k, v, mask, **lengths), backward
