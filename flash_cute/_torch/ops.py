"""The native library's operators on Python's way to them, and what PyTorch is told of them.

Schemas, defaults and validation live in C++ (csrc/). No kernel of _forward, _backward and their likes for
packed sequences is in Python but on the CPU: calls without gradients, and compiled graphs with or without
them, stay in C++.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from flash_cute import dropout, wording
from flash_cute._cpu import backward as cpu_backward
from flash_cute._cpu import forward as cpu_forward
from flash_cute._cpu.kernel import without_autocast
from flash_cute._torch import fakes, flops, library, private, vmap
from flash_cute._torch.autocast import as_cast, cast, is_cache
from flash_cute._torch.autograd import (
    Function,
    count_versions,
    differentiated_once,
    for_outer_levels,
    needs_gradient,
    refuse_forward_mode,
    refuse_gradients,
)
from flash_cute._torch.checks import require_memory_of_its_own, require_stored
from flash_cute.options import FP8, OPERANDS

GENERAL = {"ranges", "mask", "bias", "alibi_slopes"}
_WITHOUT_GRADIENTS = "alibi_slopes", "k_scale", "v_scale"  # numbers among OPERANDS

_forward = torch.ops.flash_cute._forward.default
_forward_varlen = torch.ops.flash_cute._forward_varlen.default
_forward_out = torch.ops.flash_cute._forward_out.default
_backward = torch.ops.flash_cute._backward.default
_backward_varlen = torch.ops.flash_cute._backward_varlen.default
_bias_gradient = torch.ops.flash_cute._bias_gradient.default
_weights = torch.ops.flash_cute._weights.default
compiled = torch.ops.flash_cute.compiled.default


def forward(q, k, v, lengths, options):
    """The operator flash_cute::forward or, with cu_seqlens_q, forward_varlen on Python's way to its kernel.

    lengths: those of OPERANDS that there are; options: the operator's (csrc/ops.cpp), without defaults.
    """
    deterministic = options.pop("deterministic", False)
    if not _is_plain(q, k, v, lengths):
        return _in_context(q, k, v, lengths, options, deterministic)
    if not lengths:
        return _forward(q, k, v, **options)
    return (_forward_varlen if "cu_seqlens_q" in lengths else _forward)(q, k, v, **lengths, **options)


def forward_into(q, k, v, lengths, options, out):
    """forward, whose out is written into a tensor."""
    options.pop("deterministic", None)
    require_stored("forward", out=out)
    require_memory_of_its_own(out=out)
    q, k, v, lengths = cast(q, k, v, lengths)
    differentiable = {name: lengths.get(name) for name in ("sinks", "bias")}
    refuse_gradients("with out", q=q, k=k, v=v, out=out, **differentiable)
    _refuse_gradients_of_others(lengths)
    return out, _forward_out(q, k, v, out, **lengths, **options)


def weights(q, k, v, lengths, options):
    """softmax of the scores, without gradients: of a forward by its LSE. v has any columns."""
    if k.dtype in FP8:
        raise ValueError(f"{wording.OURS}k has dtype {k.dtype} and q {q.dtype}; they must be the same")
    q, k, v, lengths = cast(q, k, v, lengths)
    differentiable = {name: lengths.get(name) for name in ("sinks", "bias", "alibi_slopes")}
    refuse_gradients("of weights", q=q, k=k, **differentiable)
    _, lse = _forward(q, k, v, **lengths, **options)
    return _weights(q, k, v, lse, **lengths, **options)


def plan(q, k, v, lengths, options, backward=False) -> str:
    """The operator flash_cute::plan, of what forward, or its backward, would run under autocast."""
    options = options | {"backward": backward}
    if torch.are_deterministic_algorithms_enabled():
        options["deterministic"] = True
    q, k, v, lengths = cast(q, k, v, lengths, as_cast)
    if options.get("dropout_p") and "dropout_seed" not in lengths:  # which forward would draw
        lengths = lengths | {"dropout_seed": q.new_empty(2, dtype=torch.int64)}
    return torch.ops.flash_cute.plan.default(q, k, v, **lengths, **options)


plan_backward = partial(plan, backward=True)


def _is_plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: dict[str, torch.Tensor]) -> bool:
    """Does neither autocast nor a transform nor a gradient concern the call? False where one may.

    What is differentiable but q, k and v is looked at later, but for sinks and scales, which many calls have.
    """
    return not (
        private.autocast_is_enabled()
        or private.transforms_are_active()
        or private.dual_levels_are_active()
        or (lengths and ("bias" in lengths or "alibi_slopes" in lengths))
        or (
            (
                q.requires_grad
                or k.requires_grad
                or v.requires_grad
                or lengths.get("sinks", q).requires_grad
                or lengths.get("k_scale", q).requires_grad
                or lengths.get("v_scale", q).requires_grad
            )
            and torch.is_grad_enabled()
        )
    )


def _refuse_gradients_of_others(lengths: dict[str, torch.Tensor]) -> None:
    for name in _WITHOUT_GRADIENTS:
        if name in lengths:
            refuse_gradients(f"of {name}", **{name: lengths[name]})


def _is_general(lengths, options) -> bool:
    """Is there anything beside a window, lengths and sinks? As csrc/problem.hpp has it."""
    if not GENERAL.isdisjoint(lengths) or options.get("softcap", 0) > 0:
        return True
    return options.get("dropout_p", 0) > 0 and dropout.keep_of(options["dropout_p"]) < dropout.STEPS


def _in_context(q, k, v, lengths, options, deterministic, composite=False):
    """(out, lse) under autocast, transforms and autograd; composite: as the kernel of a public operator.

    lengths: those of OPERANDS that there are, options: the rest of an inner operator's arguments.
    """
    packed, cached = "cu_seqlens_q" in lengths, is_cache(k, lengths)
    q, k, v, lengths = cast(q, k, v, lengths)
    sinks, bias = lengths.get("sinks", q), lengths.get("bias", q)
    transformed = private.transforms_are_active()
    # dynamo cannot look below the wrappers of a transform.
    hidden = transformed and torch.compiler.is_dynamo_compiling()
    if cached:
        refuse_gradients("through a cache", q=q, k=k, v=v, sinks=lengths.get("sinks"))
    if not hidden:
        _refuse_gradients_of_others(lengths)
    if cached or not (hidden or needs_gradient(q, k, v, sinks, bias)):
        return (_forward_varlen if packed else _forward)(q, k, v, **lengths, **options)
    if torch.compiler.is_compiling() and not composite:  # who runs the graph comes here by the operator
        op = torch.ops.flash_cute.forward_varlen if packed else torch.ops.flash_cute.forward
        return op.default(q, k, v, **lengths, **options, deterministic=deterministic)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    if deterministic and options.get("family") == "sm90" and _is_general(lengths, options):
        # As the backward would (csrc/kernels/planned_call.cpp), but before a forward has run.
        raise ValueError(
            f"{wording.OURS}family must be 'sm80' or None where gradients with ranges or changed scores are "
            "deterministic, got 'sm90'"
        )
    call = _Call(packed, tuple(lengths), options, deterministic)
    # The dispatcher calls composites for one level of transforms at a time.
    apply = _Attention.apply if transformed and not composite else _Attention.apply_here
    return apply(call, q, k, v, *lengths.values())


def _composite(op):
    """The kernel of a public operator, which autograd sees through."""
    names = private.argument_names(op)

    def kernel(*args, deterministic=False, **options):
        named = dict(zip(names, args, strict=False)) | options
        lengths = {name: named.pop(name) for name in OPERANDS if name in named}
        # A None for cu_seqlens_q, which torch lets pass, is refused by the inner operator.
        lengths = {name: x for name, x in lengths.items() if x is not None or name == "cu_seqlens_q"}
        q, k, v = (named.pop(name) for name in "qkv")
        return _in_context(q, k, v, lengths, named, deterministic, composite=True)

    return kernel


@dataclass(slots=True)
class _Call:
    """What is no tensor among the arguments of a call. Transforms look into no object of such a type."""

    packed: bool
    names: tuple[str, ...]  # of OPERANDS that are passed
    options: dict[str, Any]
    deterministic: bool

    def named(self, lengths: tuple[torch.Tensor, ...]) -> dict[str, Any]:
        """The keywords for an inner operator."""
        return self.options | dict(zip(self.names, lengths, strict=True)) if lengths else self.options

    def named_in_backward(self, lengths: tuple[torch.Tensor, ...], needs_dsinks: bool) -> dict[str, Any]:
        """Likewise for one of the backward; lse has what sinks are for the other gradients."""
        options = dict(self.named(lengths))
        options.pop("batch_invariant", None)  # which is of out and lse
        if not needs_dsinks:
            options.pop("sinks", None)
        return options


class _Attention(Function):
    """out and lse. Keeps q, k, v and these for the backward, which computes the weights again."""

    @staticmethod
    def forward(call, q, k, v, *lengths):
        if private.transforms_are_active():
            op = torch.ops.flash_cute.forward_varlen if call.packed else torch.ops.flash_cute.forward
            options = call.named(lengths) | {"deterministic": call.deterministic}
            return for_outer_levels(op.default, q, k, v, **options)
        return (_forward_varlen if call.packed else _forward)(q, k, v, **call.named(lengths))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.call = inputs[0]
        ctx.save_for_backward(*output, *inputs[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dout, dlse):
        _, needs_dq, needs_dk, needs_dv, *others = ctx.needs_input_grad
        if dout is None and dlse is None:
            return (None,) * (4 + len(others))
        out, lse, q, k, v, *lengths = ctx.saved_tensors
        others = dict(zip(ctx.call.names, others, strict=True))
        tensors = dout, dlse, q, k, v, out, lse, *lengths
        # Only then may the gradients be differentiated.
        observed = torch.is_grad_enabled() or private.dual_levels_are_active()
        dq = dk = dv = dsinks = dbias = None
        needs_dbias = others.get("bias", False)
        multiplies = needs_dbias and needs_dv and not (needs_dq or needs_dk)
        multiplies = multiplies and _multiplies_weights(ctx.call, q, k, lengths)
        if needs_dq or needs_dk or (needs_dv and not multiplies) or others.get("sinks"):
            # Kernels make one of these at least, also where dsinks alone is asked for.
            needs = needs_dq, needs_dk or needs_dv or not needs_dq, others.get("sinks", False)
            run = _Gradients.apply if observed else _Gradients.forward
            dq, dk, dv, dsinks = run(ctx.call, *needs, *tensors)
        if needs_dbias:
            run = _BiasGradient.apply if observed else _BiasGradient.forward
            dbias, product = run(ctx.call, multiplies, *tensors)
            dv = product if multiplies else dv
        asked = (dq, needs_dq), (dk, needs_dk), (dv, needs_dv)
        found = {"sinks": dsinks, "bias": dbias}
        return (
            None,
            *(gradient if is_needed else None for gradient, is_needed in asked),
            *(found.get(name) if is_needed else None for name, is_needed in others.items()),
        )

    @staticmethod
    def vmap(info, in_dims, call, *tensors):
        def apply(q, k, v, **lengths):
            return _Attention.apply(call, q, k, v, *lengths.values())

        names = "q", "k", "v", *call.names
        named, dims = (dict(zip(names, values, strict=True)) for values in (tensors, in_dims[1:]))
        rule = vmap.refuse_packed if call.packed else vmap.into_batch
        return rule(apply, info, (dims,), named, {})

    jvp = refuse_forward_mode("flash_cute.forward")


class _Gradients(differentiated_once("flash_cute.backward")):
    """dq, dk, dv and dsinks."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call, needs_dq, needs_dkv, needs_dsinks, dout, dlse, q, k, v, out, lse, *lengths):
        op = _backward_varlen if call.packed else _backward
        options = call.named_in_backward(lengths, needs_dsinks)
        if not (needs_dq and needs_dkv):
            options = options | {"needs_dq": needs_dq, "needs_dkv": needs_dkv}
        if call.deterministic or torch.are_deterministic_algorithms_enabled():
            options = options | {"deterministic": True}
        try:
            return op(dout, dlse, q, k, v, out, lse, **options)
        except RuntimeError as error:
            raise wording.named(error, "flash_cute.backward") from None


def _multiplies_weights(call: _Call, q: torch.Tensor, k: torch.Tensor, lengths: list[torch.Tensor]) -> bool:
    """Is dv a product of weights, which are stored for it beside the gradient of a bias?

    They take no more memory than that where it has a number for each pair. PyTorch's product has no order of
    its sums to rely on, of float32 no digits either, and a row's LSE says that it sees nothing if there are
    no sinks.
    """
    if call.deterministic or torch.are_deterministic_algorithms_enabled() or "sinks" in call.names:
        return False
    is_exact = q.dtype != torch.float32 or q.device.type == "cpu"
    return is_exact and lengths[call.names.index("bias")].shape == (*q.shape[:3], k.shape[2])


class _BiasGradient(differentiated_once("flash_cute.backward")):
    """dbias, which is always deterministic, and dv, which is empty if it is not asked for here."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call, needs_dv, dout, dlse, q, k, v, out, lse, *lengths):
        try:
            options = call.named_in_backward(lengths, needs_dsinks=False)
            if needs_dv:
                options = options | {"needs_dv": True}
            return _bias_gradient(dout, dlse, q, k, v, out, lse, **options)
        except RuntimeError as error:
            raise wording.named(error, "flash_cute.backward") from None


library.impl("forward", _composite(_forward), "CompositeImplicitAutograd")
library.impl("forward_varlen", _composite(_forward_varlen), "CompositeImplicitAutograd")
for _op, _kernel, _rule in (
    (_forward, cpu_forward.forward, vmap.into_batch),
    (_forward_varlen, cpu_forward.forward_varlen, vmap.refuse_packed),
    (_forward_out, cpu_forward.forward_out, vmap.refuse_out),
    (_backward, cpu_backward.backward, vmap.into_batch),
    (_backward_varlen, cpu_backward.backward_varlen, vmap.refuse_packed),
    (_bias_gradient, cpu_backward.bias_gradient, vmap.bias_gradient),
    (_weights, cpu_backward.weights, vmap.weights),
):
    library.impl(_op.name(), without_autocast(_kernel), "CPU")
    fakes.register(_op, getattr(fakes, _kernel.__name__))
    vmap.register(_op, _rule)
    register_flop_formula(_op.overloadpacket)(getattr(flops, _kernel.__name__))
count_versions(_forward_out)
# Of forward_varlen PyTorch's own rule is a loop over the mapped dimension.
vmap.register(torch.ops.flash_cute.forward.default, vmap.into_batch)
