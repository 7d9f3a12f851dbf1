"""Shapes of results while PyTorch traces, after the checks of a call that runs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flash_cute._cpu.outs import empty_out
from flash_cute._torch import library, private
from flash_cute._torch.private import hint
from flash_cute.options import LENGTHS, OPERANDS
from flash_cute.wording import OURS

RESULTS = "out", "lse", "dout", "dlse"

_check = torch.ops.flash_cute._check.default


def register(op: torch._ops.OpOverload, fake: Callable) -> None:
    """Here for all operators: PyTorch asks for the source of the call, which takes 5 ms for each file."""
    torch.library.register_fake(op.name(), fake, lib=library)


def check(q, k, v, causal=False, *, window_left=None, window_right=None, **options):
    """The checks of a call, by what is known while it is traced; options may have tensors of OPERANDS.

    With out it is a call that writes into it, with lse, too, one of the backward, with that alone of weights.
    """
    given = {name: options.pop(name, None) for name in (*OPERANDS, *RESULTS)}
    given = {name: tensor for name, tensor in given.items() if tensor is not None}
    sizes = {name: hints(tensor.shape) for name, tensor in given.items()}
    shapes = [hints(tensor.shape) for tensor in (q, k, v)]
    steps = [
        hint(tensor.stride(-1)) if tensor.dim() else 1 for name, tensor in given.items() if name in LENGTHS
    ]
    if any(None in known for known in (*shapes, *sizes.values(), steps)):
        return
    tensors = q, k, v, *given.values()
    with private.without_modes():
        _check(
            *shapes,
            [tensor.dtype for tensor in tensors],
            [tensor.device for tensor in tensors],
            steps,
            causal,
            window_left=hint(window_left),
            window_right=hint(window_right),
            **sizes,
            **options,
        )


def hints(sizes: torch.Size) -> list[int | None]:
    return [hint(size) for size in sizes]


def forward(q, k, v, causal=False, **options):
    """The results' shapes, strides and types, after the checks of a call that runs."""
    check(q, k, v, causal, **options)
    return empty_out(q, v), q.new_empty(q.shape[:3], dtype=torch.float32)


def forward_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k=None, causal=False, **options):
    check(q, k, v, causal, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options)
    return empty_out(q, v), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def forward_out(q, k, v, out, causal=False, **options):
    check(q, k, v, causal, out=out, **options)
    packed = options.get("cu_seqlens_q") is not None
    return q.new_empty(q.shape[1::-1] if packed else q.shape[:3], dtype=torch.float32)


def backward(
    dout, dlse, q, k, v, out, lse, causal=False, *, needs_dq=True, needs_dkv=True, deterministic=False,
    sinks=None, **options,
):  # fmt: skip
    check(q, k, v, causal, dout=dout, dlse=dlse, out=out, lse=lse, sinks=sinks, **options)
    needed = (q, needs_dq), (k, needs_dkv), (v, needs_dkv), (q if sinks is None else sinks, sinks is not None)
    return tuple(torch.empty_like(x) if is_needed else x.new_empty(0) for x, is_needed in needed)


def bias_gradient(dout, dlse, q, k, v, out, lse, causal=False, *, bias=None, needs_dv=False, **options):
    if bias is None:  # as csrc/validate.cpp, which is not told that it is this gradient
        raise RuntimeError(f"{OURS}bias is None; a tensor is accepted")
    check(q, k, v, causal, dout=dout, dlse=dlse, out=out, lse=lse, bias=bias, **options)
    pairs = *q.shape[:3], k.shape[2]
    if needs_dv and 0 not in pairs and bias.shape != pairs:  # likewise
        sentence = f"{tuple(bias.shape)}; {pairs} is accepted where needs_dv is True"
        raise RuntimeError(f"{OURS}bias has shape {sentence}")
    return bias.new_empty(bias.shape), v.new_empty(v.shape if needs_dv else 0)


def weights(q, k, v, lse, causal=False, **options):
    check(q, k, v, causal, lse=lse, **options)
    return q.new_empty((*q.shape[:3], k.shape[2]))


def backward_varlen(dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k=None, causal=False, **options):
    offsets = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    return backward(dout, dlse, q, k, v, out, lse, causal, **offsets, **options)
