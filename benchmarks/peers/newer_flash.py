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

from .base import CONTIGUOUS, DENSE, PACKED, PAGED, Call, CannotRun, Peer, Run, Tensors, turned


class Mask(NamedTuple):
    causal: bool
    left: int | None = None  # of a window, None: unlimited
    right: int | None = None

    @classmethod
    def of(cls, problem) -> Mask:
        """A window's right side is 0 under a causal mask, as these ask for one or the other."""
        left, right = problem.window or (None, None)
        if (left, right) == (None, None):
            return cls(problem.causal)
        return cls(False, left, 0 if problem.causal else right)


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


@cache
def interface_4():
    try:
        from flash_attn.cute import interface
    except Exception as error:  # of any kind where the packages that it builds on are others
        raise CannotRun(f"FlashAttention-4 is not installed (flash-attn-4 has it): {error}") from error
    return interface


def call_4(name: str, *arguments, **options) -> Tensors:
    """It compiles its kernels when it is called first, which fails by exceptions of its compiler's own."""
    interface = interface_4()
    try:
        return getattr(interface, name)(*arguments, **options)
    except Exception as error:
        raise CannotRun(f"{type(error).__name__}: {error}") from error


class NewerFlash(Peer):
    """What both have in common.

    load raises CannotRun where it is not installed; fwd gives (out, lse), bwd the gradients, with tokens
    before heads.
    """

    title: str
    deterministic = True

    def forward(self, problem, q, k, v, offsets=None) -> Run:
        self.load()
        turn, mask, lengths = self.told(problem, offsets)
        q, k, v = map(turn, (q, k, v))

        def run() -> Tensors:
            out, lse = self.fwd(q, k, v, mask, **lengths)
            return turn(out), lse

        return run

    def backward(self, problem, q, k, v, dout, saved, offsets=None, deterministic: bool = False) -> Run:
        turn, mask, lengths = self.told(problem, offsets)
        out, lse = saved
        dout, q, k, v, out = map(turn, (dout, q, k, v, out))
        return lambda: tuple(map(turn, self.bwd(dout, q, k, v, out, lse, mask, deterministic, **lengths)))

    @staticmethod
    def told(problem, offsets) -> tuple[Callable, Mask, dict]:
        """How tensors are turned, and what the operators are told beside them."""
        lengths = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        lengths |= {"max_seqlen_q": problem.seqlen_q, "max_seqlen_k": problem.seqlen_k}
        turn = partial(turned, turns=offsets is None)
        return turn, Mask.of(problem), {} if offsets is None else lengths


class Flash3(NewerFlash):
    title = "FlashAttention-3"
    calls = frozenset({DENSE, PACKED, CONTIGUOUS, PAGED})

    def load(self) -> None:
        operators_3()

    @staticmethod
    def mask_options(mask: Mask) -> dict:
        left, right = (-1 if side is None else side for side in mask[1:])
        return {"is_causal": mask.causal, "window_size_left": left, "window_size_right": right}

    def fwd(self, q, k, v, mask: Mask, **lengths) -> Tensors:
        return operators_3().fwd(q, k, v, **self.mask_options(mask), **lengths)[:2]

    def bwd(self, dout, q, k, v, out, lse, mask: Mask, deterministic: bool, **lengths) -> Tensors:
        options = {**self.mask_options(mask), "deterministic": deterministic}
        # Made here, as the operator would: which of its results are the gradients depends on its version.
        gradients = dict(zip(("dq", "dk", "dv"), map(torch.empty_like, (q, k, v)), strict=True))
        operators_3().bwd(dout, q, k, v, out, lse, **gradients, **options, **lengths)
        return tuple(gradients.values())

    def cached(self, cache, page: int | None) -> Call:
        self.load()
        q, mask = turned(cache.q), Mask(cache.cell.queries > 1)
        lengths = {"seqused_k": cache.used, "page_table": cache.table(page)} if page else {}

        def call(k, v):
            return turned(self.fwd(q, turned(k), turned(v), mask, **lengths)[0])

        return call


class Flash4(NewerFlash):
    title = "FlashAttention-4"
    calls = frozenset({DENSE, PACKED})

    def load(self) -> None:
        interface_4()

    @staticmethod
    def mask_options(mask: Mask) -> dict:
        return {"causal": mask.causal, "window_size_left": mask.left, "window_size_right": mask.right}

    def fwd(self, q, k, v, mask: Mask, **lengths) -> Tensors:
        return call_4("_flash_attn_fwd", q, k, v, **self.mask_options(mask), return_lse=True, **lengths)[:2]

    def bwd(self, dout, q, k, v, out, lse, mask: Mask, deterministic: bool, **lengths) -> Tensors:
        options = {**self.mask_options(mask), "deterministic": deterministic}
        return call_4("_flash_attn_bwd", q, k, v, out, dout, lse, **options, **lengths)
