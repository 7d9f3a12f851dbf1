"""Softmax over the last dimension: the function that users call, its gradient, and the CPU's kernels.

Schemas, checks and the way to the GPU's kernels are in csrc/softmax.cpp.
"""

from __future__ import annotations

from numbers import Real

import torch
from torch.autograd import forward_ad

from flash_cute import rules  # noqa: F401  it loads the native library

_softmax = torch.ops.flash_cute._softmax.default
_softmax_backward = torch.ops.flash_cute._softmax_backward.default


def softmax(
    x: torch.Tensor,
    *,
    scale: float = 1.0,
    causal: bool = False,
    seqused_k: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * x) over the last dimension, and the log-sum-exp of its scores.

    Args:
        x: (..., columns), float32, float16 or bfloat16, any strides; on a CUDA GPU, Ampere or newer, or on
            the CPU. A last dimension that is not contiguous is copied first. At most 2**31 - 2 rows.
        scale: multiplies the scores; finite and > 0.
        causal: x is (..., rows, columns), and row i sees column j iff j <= i + columns - rows.
        seqused_k: int32 (batch,), on x's device; x is (batch, ..., columns), with causal
            (batch, ..., rows, columns). How many columns of each entry count, from the first; it takes the
            place of columns in the mask. Default all.
        leftpad_k: int32 (batch,), likewise: how many columns at each entry's begin don't count. Default none.

    Returns:
        probabilities: of x's shape and dtype, contiguous. 0 where a row doesn't see a column, whatever x
            holds there.
        lse: float32 (...), natural logarithm of the sum of exp(scale * x). -inf for a row that sees nothing.

        Both are differentiable, once. Gradients are contiguous; 0 where a row doesn't see a column.

    Raises:
        ValueError, TypeError: an argument makes no sense; the sentence says which, and what is accepted. What
            tensors of lengths hold is not looked at.
        NotImplementedError: a second derivative or forward-mode differentiation is asked for.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"flash_cute.softmax: x is {type(x).__name__}; a tensor is accepted")
    if not isinstance(causal, bool):
        raise TypeError(f"flash_cute.softmax: causal is {causal!r}; True or False is accepted")
    if not isinstance(scale, Real) or isinstance(scale, bool):
        raise TypeError(f"flash_cute.softmax: scale is {scale!r}; a number is accepted")
    for name, length in {"seqused_k": seqused_k, "leftpad_k": leftpad_k}.items():
        if not (length is None or isinstance(length, torch.Tensor)):
            raise TypeError(
                f"flash_cute.softmax: {name} is {type(length).__name__}; a tensor or None is accepted"
            )
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise NotImplementedError(
            "flash_cute.softmax: there is no forward-mode differentiation; use a gradient"
        )
    transformed = torch._C._are_functorch_transforms_active()
    plain = not (transformed or (x.requires_grad and torch.is_grad_enabled()))
    try:
        return (_softmax if plain else _Softmax.apply)(x, float(scale), causal, seqused_k, leftpad_k)
    except RuntimeError as error:
        message = str(error).partition("\n")[0]
        _, found, sentence = message.partition("flash_cute.forward: ")  # csrc/validate.hpp's prefix
        if not found:
            raise
        kind = torch.OutOfMemoryError if sentence.startswith("out of memory") else ValueError
        raise kind(f"flash_cute.softmax: {sentence}") from None


def _unmapped(function, info, in_dims, tensors, options):
    """function(*tensors, *options) of mapped tensors; the last two are lengths, which fold the batch."""
    mapped = [
        x if x is None else x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(tensors, in_dims, strict=True)
    ]
    folds = mapped[-1] is not None or mapped[-2] is not None
    if folds:
        mapped = [x if x is None else x.flatten(0, 1).contiguous() for x in mapped]
    results = function(*mapped[:-2], *options, *mapped[-2:])
    several = isinstance(results, tuple)
    results = results if several else (results,)
    if folds:
        results = tuple(x.unflatten(0, (info.batch_size, -1)) for x in results)
    return (results, (0,) * len(results)) if several else (results[0], 0)


class _Softmax(torch.autograd.Function):
    """Keeps x for the backward, of which that computes the probabilities again; of float32 these."""

    @staticmethod
    def forward(x, scale, causal, seqused_k, leftpad_k):
        return _softmax(x, scale, causal, seqused_k, leftpad_k)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, *ctx.options, seqused_k, leftpad_k = inputs
        probabilities, _ = output
        kept = probabilities if x.dtype == torch.float32 else x
        ctx.save_for_backward(kept, seqused_k, leftpad_k)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dprobabilities, dlse):
        if dprobabilities is None and dlse is None:
            return (None,) * 5
        kept, *lengths = ctx.saved_tensors
        return _Gradient.apply(dprobabilities, dlse, kept, *ctx.options, *lengths), *(None,) * 4

    @staticmethod
    def vmap(info, in_dims, x, scale, causal, *lengths):
        dims = in_dims[0], *in_dims[3:]
        return _unmapped(_Softmax.apply, info, dims, (x, *lengths), (scale, causal))


class _Gradient(torch.autograd.Function):
    """The gradient of x, which refuses to be differentiated."""

    @staticmethod
    def forward(dprobabilities, dlse, kept, scale, causal, seqused_k, leftpad_k):
        return _softmax_backward(dprobabilities, dlse, kept, scale, causal, seqused_k, leftpad_k)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError("flash_cute.softmax: there are no second derivatives; detach the gradients")

    @staticmethod
    def vmap(info, in_dims, dprobabilities, dlse, kept, scale, causal, *lengths):
        dims = *in_dims[:3], *in_dims[5:]
        tensors = dprobabilities, dlse, kept, *lengths
        return _unmapped(_Gradient.apply, info, dims, tensors, (scale, causal))


def hidden_columns(
    shape: torch.Size,
    causal: bool,
    seqused_k: torch.Tensor | None,
    leftpad_k: torch.Tensor | None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """bool, of a shape that broadcasts to x's: where a row does not see a column."""
    columns = torch.arange(shape[-1], device=device)

    def bound(length: torch.Tensor | None, default: int) -> torch.Tensor | int:
        if length is None:
            return default
        return length.clamp(0, shape[-1]).view(-1, *(1,) * (len(shape) - 1))

    used = bound(seqused_k, shape[-1])
    hidden = (columns < bound(leftpad_k, 0)) | (columns >= used)
    if causal:
        rows = torch.arange(shape[-2], device=device).unsqueeze(1)
        hidden = hidden | (columns > rows - shape[-2] + used)
    return hidden


def _softmax_cpu(x, scale=1.0, causal=False, seqused_k=None, leftpad_k=None):
    hidden = hidden_columns(x.shape, causal, seqused_k, leftpad_k)
    if x.numel() == 0:
        return x.new_empty(x.shape), x.new_full(x.shape[:-1], -torch.inf, dtype=torch.float32)
    scores = (x.float() * scale).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1).masked_fill(hidden, 0).to(x.dtype), scores.logsumexp(-1)


def _softmax_backward_cpu(
    dprobabilities, dlse, kept, scale=1.0, causal=False, seqused_k=None, leftpad_k=None
):
    hidden = hidden_columns(kept.shape, causal, seqused_k, leftpad_k)
    p, shift = kept.float(), 0 if dlse is None else dlse.unsqueeze(-1)
    if kept.dtype != torch.float32:
        p = (scale * p).masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0)
    dp = torch.zeros(()) if dprobabilities is None else dprobabilities.float().masked_fill(hidden, 0)
    gradient = scale * p * (dp - (p * dp).sum(-1, keepdim=True) + shift)
    return gradient.masked_fill(hidden, 0).to(kept.dtype, memory_format=torch.contiguous_format)


def _traced(x, *options, **named):
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _traced_backward(dprobabilities, dlse, kept, *options, **named):
    return kept.new_empty(kept.shape)


_library = torch.library.Library("flash_cute", "IMPL")
_library.impl("_softmax_cpu", _softmax_cpu, "CPU")
_library.impl("_softmax_backward_cpu", _softmax_backward_cpu, "CPU")
for _suffix in ("", "_cpu"):
    torch.library.register_fake(f"flash_cute::_softmax{_suffix}", _traced, lib=_library)
    torch.library.register_fake(f"flash_cute::_softmax_backward{_suffix}", _traced_backward, lib=_library)
