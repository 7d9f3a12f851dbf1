"""Softmax over the last dimension: the function that users call, and its gradient.

Schemas, checks and the way to the GPU's kernels are in csrc/softmax.cpp.
"""

from __future__ import annotations

import torch

from flash_cute._cpu import softmax as cpu
from flash_cute._torch import autograd, checks, fakes, library, private, vmap
from flash_cute.wording import hinting, named, require_bool, require_number, shown

_softmax = torch.ops.flash_cute._softmax.default
_softmax_backward = torch.ops.flash_cute._softmax_backward.default
_check = torch.ops.flash_cute._softmax_check.default
_GRADIENTS = "dprobabilities", "dlse"


@hinting("flash_cute")
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
            the CPU. A last dimension that is not contiguous is copied first. At most 2**31 - 2 rows
            and 2**28 columns.
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
    checks.require_dense("flash_cute.softmax", x=x)
    require_bool("flash_cute.softmax", "causal", causal)
    require_number("flash_cute.softmax", "scale", scale, "a number")
    if not 0 < scale <= torch.finfo(torch.float32).max:
        raise ValueError(f"flash_cute.softmax: scale is {shown(scale)}; a finite number > 0 is accepted")
    for name, length in {"seqused_k": seqused_k, "leftpad_k": leftpad_k}.items():
        if not (length is None or isinstance(length, torch.Tensor)):
            raise TypeError(
                f"flash_cute.softmax: {name} is {type(length).__name__}; a tensor or None is accepted"
            )
        if length is not None:
            checks.require_dense("flash_cute.softmax", **{name: length})
    if torch.compiler.is_compiling():  # dynamo can't look below the wrappers of a transform
        run = torch.ops.flash_cute.softmax.default
    else:
        run = _Softmax.apply if autograd.needs_gradient(x) else _softmax
    try:
        return run(x, float(scale), causal, seqused_k, leftpad_k)
    except RuntimeError as error:
        tensors = {"x": x, "seqused_k": seqused_k, "leftpad_k": leftpad_k}
        tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        accepted = checks.accepted_beside_lengths("torch.float32, torch.float16 and torch.bfloat16 are")
        raise checks.named(error, "flash_cute.softmax", tensors, accepted) from None


def _composite(x, scale=1.0, causal=False, seqused_k=None, leftpad_k=None):
    """The kernel of the public operator, which autograd sees through."""
    run = _Softmax.apply_here if autograd.needs_gradient(x) else _softmax
    return run(x, scale, causal, seqused_k, leftpad_k)


def _check_shapes(x, scale, causal, seqused_k, leftpad_k, dprobabilities=None, dlse=None):
    """The checks of a call by what is known while it is traced."""
    tensors = [x, seqused_k, leftpad_k, dprobabilities, dlse]
    sizes = [None if tensor is None else fakes.hints(tensor.shape) for tensor in tensors]
    given = [tensor for tensor in tensors if tensor is not None]
    steps = [private.hint(tensor.stride(0)) if tensor.dim() == 1 else 1 for tensor in given]
    if any(None in known for known in (*sizes, steps) if known):
        return
    with private.without_modes():
        dtypes, devices = ([getattr(tensor, name) for tensor in given] for name in ("dtype", "device"))
        _check(sizes[0], dtypes, devices, steps, scale, causal, *sizes[1:])


def _unmapped(function, info, in_dims, tensors, options):
    """function(*tensors, *options) of mapped tensors; the last two are lengths, which fold the batch."""
    mapped = [vmap.mapped(x, dim, info) for x, dim in zip(tensors, in_dims, strict=True)]
    folds = mapped[-1] is not None or mapped[-2] is not None
    if folds:
        batch = next(x for x in mapped if x is not None).shape[:2]
        mapped = [x if x is None else x.flatten(0, 1).contiguous() for x in mapped]
    results = function(*mapped[:-2], *options, *mapped[-2:])
    several = isinstance(results, tuple)
    results = results if several else (results,)
    if folds:
        results = tuple(x.unflatten(0, batch) for x in results)
    return (results, (0,) * len(results)) if several else (results[0], 0)


def _vmap_of_op(op, info, in_dims, tensors, options):
    """The rule of an operator: while a transform is traced, dispatch comes by no autograd Function."""
    names = [name for name in (*_GRADIENTS, "x", "kept") if name in tensors] + ["seqused_k", "leftpad_k"]
    dims, given = ([found.get(name) for name in names] for found in (in_dims[0], tensors))
    options = options.get("scale", 1.0), options.get("causal", False)
    if "x" in tensors:
        _check_mapped(given, options[1], dims)
    return _unmapped(op, info, dims, given, options)


def _check_mapped(tensors, causal, dims):
    """Has an entry of what vmap maps the dimensions that a call needs? The rest is checked of all entries."""
    x, *lengths = (
        None if tensor is None else tensor.dim() - (dim is not None)
        for tensor, dim in zip(tensors, dims, strict=True)
    )
    needed = 1 + causal + (lengths != [None, None])
    if x < needed:
        raise ValueError(
            f"flash_cute.softmax: under vmap an entry of x has {x} dimensions; at least {needed} are accepted"
        )
    for name, dims in zip(("seqused_k", "leftpad_k"), lengths, strict=True):
        if dims not in (None, 1):
            raise ValueError(
                f"flash_cute.softmax: under vmap an entry of {name} has {dims} dimensions; (batch,) is "
                "accepted"
            )


class _Softmax(autograd.Function):
    """Keeps x for the backward, of which that computes the probabilities again; of float32 these."""

    @staticmethod
    def forward(x, *args):
        if private.transforms_are_active():
            return autograd.for_outer_levels(torch.ops.flash_cute.softmax.default, x, *args)
        return _softmax(x, *args)

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
        _check_mapped((x, *lengths), causal, dims)
        return _unmapped(_Softmax.apply, info, dims, (x, *lengths), (scale, causal))

    jvp = autograd.refuse_forward_mode("flash_cute.softmax")


class _Gradient(autograd.differentiated_once("flash_cute.softmax")):
    """The gradient of x."""

    @staticmethod
    def forward(dprobabilities, dlse, kept, scale, causal, seqused_k, leftpad_k):
        try:
            return _softmax_backward(dprobabilities, dlse, kept, scale, causal, seqused_k, leftpad_k)
        except RuntimeError as error:
            raise named(error, "flash_cute.softmax") from None

    @staticmethod
    def vmap(info, in_dims, dprobabilities, dlse, kept, scale, causal, *lengths):
        dims = *in_dims[:3], *in_dims[5:]
        tensors = dprobabilities, dlse, kept, *lengths
        return _unmapped(_Gradient.apply, info, dims, tensors, (scale, causal))


def _traced(x, scale=1.0, causal=False, seqused_k=None, leftpad_k=None):
    _check_shapes(x, scale, causal, seqused_k, leftpad_k)
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _traced_backward(dprobabilities, dlse, kept, scale=1.0, causal=False, seqused_k=None, leftpad_k=None):
    _check_shapes(kept, scale, causal, seqused_k, leftpad_k, dprobabilities, dlse)
    return kept.new_empty(kept.shape)


library.impl("softmax", _composite, "CompositeImplicitAutograd")
library.impl("_softmax", cpu.softmax, "CPU")
library.impl("_softmax_backward", cpu.softmax_backward, "CPU")
for _op in (torch.ops.flash_cute.softmax.default, _softmax, _softmax_backward):
    vmap.register(_op, _vmap_of_op, (*_GRADIENTS, "x", "kept", "seqused_k", "leftpad_k"))
fakes.register(_softmax, _traced)
fakes.register(_softmax_backward, _traced_backward)
