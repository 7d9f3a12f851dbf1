"""The native library's operators on Python's way to them: autocast, autograd, and the CPU's kernels.

Schemas, defaults and validation live in C++ (csrc/). What tracing, vmap and FLOP counters ask is answered in
flash_cute/registration.py. No kernel of _forward, _backward and their likes for packed sequences is in Python
but on the CPU: calls without gradients, and compiled graphs with or without them, stay in C++.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch.autograd import forward_ad

from flash_cute import cpu, registration, torch_private, wording
from flash_cute.registration import LENGTHS
from flash_cute.storage import require_stored

_forward = torch.ops.flash_cute._forward.default
_forward_varlen = torch.ops.flash_cute._forward_varlen.default
_forward_out = torch.ops.flash_cute._forward_out.default
_backward = torch.ops.flash_cute._backward.default
_backward_varlen = torch.ops.flash_cute._backward_varlen.default
compiled = torch.ops.flash_cute.compiled.default


def forward(q, k, v, lengths, options):
    """The operator flash_cute::forward or, with cu_seqlens_q, forward_varlen on Python's way to its kernel.

    lengths: those of LENGTHS and sinks that there are; options: the operator's (csrc/ops.cpp), without
    defaults.
    """
    deterministic = options.pop("deterministic", False)
    if not _is_plain(q, k, v, lengths.get("sinks", q)):
        return _in_context(q, k, v, lengths, options, deterministic)
    if not lengths:
        return _forward(q, k, v, **options)
    return (_forward_varlen if "cu_seqlens_q" in lengths else _forward)(q, k, v, **lengths, **options)


def forward_into(q, k, v, lengths, options, out):
    """forward, whose out is written into a tensor."""
    options.pop("deterministic", None)
    require_stored("forward", out=out)
    require_memory_of_its_own(out=out)
    q, k, v, lengths = _cast(q, k, v, lengths)
    if needs_gradient(q, k, v, out, lengths.get("sinks", q)):
        raise NotImplementedError(
            f"{wording.OURS}there are no gradients with out; detach q, k, v, out and sinks"
        )
    return out, _forward_out(q, k, v, out, **lengths, **options)


def plan(q, k, v, lengths, options, backward=False) -> str:
    """The operator flash_cute::plan, of what forward, or its backward, would run under autocast."""
    options = options | {"backward": backward}
    if torch.are_deterministic_algorithms_enabled():
        options["deterministic"] = True
    return torch.ops.flash_cute.plan.default(*as_cast(q, k, v), **lengths, **options)


plan_backward = partial(plan, backward=True)


def as_cast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What stands for the tensors as autocast gives them to forward; without autocast they themselves."""
    if not torch_private.autocast_is_enabled():
        return tensors
    return tuple(torch.empty_like(tensor, dtype=autocast_dtype(tensor)) for tensor in tensors)


def _is_plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> bool:
    """Does neither autocast nor a transform nor a gradient concern the call? False where one may."""
    return not (
        torch_private.autocast_is_enabled()
        or torch_private.transforms_are_active()
        or torch_private.dual_levels_are_active()
        or (
            (q.requires_grad or k.requires_grad or v.requires_grad or sinks.requires_grad)
            and torch.is_grad_enabled()
        )
    )


def _in_context(q, k, v, lengths, options, deterministic, composite=False):
    """(out, lse) under autocast, transforms and autograd; composite: as the kernel of a public operator.

    lengths: those of LENGTHS and sinks that there are, options: the rest of an inner operator's arguments.
    """
    packed, cached = "cu_seqlens_q" in lengths, _is_cache(k, lengths)
    q, k, v, lengths = _cast(q, k, v, lengths)
    sinks = lengths.get("sinks", q)
    transformed = torch_private.transforms_are_active()
    # dynamo cannot look below the wrappers of a transform.
    hidden = transformed and torch.compiler.is_dynamo_compiling()
    if cached and needs_gradient(q, k, v, sinks):
        raise NotImplementedError(f"{wording.OURS}there are no gradients through a cache; detach q, k and v")
    if cached or not (hidden or needs_gradient(q, k, v, sinks)):
        return (_forward_varlen if packed else _forward)(q, k, v, **lengths, **options)
    if torch.compiler.is_compiling() and not composite:  # who runs the graph comes here by the operator
        op = torch.ops.flash_cute.forward_varlen if packed else torch.ops.flash_cute.forward
        return op.default(q, k, v, **lengths, **options, deterministic=deterministic)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    call = _Call(packed, tuple(lengths), options, deterministic)
    # The dispatcher calls composites for one level of transforms at a time.
    apply = _Attention.apply if transformed and not composite else _Attention.apply_here
    return apply(call, q, k, v, *lengths.values())


def _is_cache(k: torch.Tensor, lengths: dict[str, torch.Tensor]) -> bool:
    return "block_table" in lengths or ("cu_seqlens_q" in lengths and k.dim() == 4)


def _cast(q, k, v, lengths) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The operands as autocast gives them to PyTorch's own attention; a cache stays as it is.

    Sinks of q's dtype are read as float32 where that one changes.
    """
    if not torch_private.autocast_is_enabled():
        return q, k, v, lengths
    require_stored("forward", q=q, k=k, v=v)
    if "sinks" in lengths and lengths["sinks"].dtype == q.dtype:
        lengths = lengths | {"sinks": lengths["sinks"].float()}
    k, v = (k, v) if _is_cache(k, lengths) else (_autocast(k), _autocast(v))
    return _autocast(q), k, v, lengths


def _composite(op):
    """The kernel of a public operator, which autograd sees through."""
    names = torch_private.argument_names(op)

    def kernel(*args, deterministic=False, **options):
        named = dict(zip(names, args, strict=False)) | options
        lengths = {name: named.pop(name) for name in (*LENGTHS, "sinks") if name in named}
        # A None for cu_seqlens_q, which torch lets pass, is refused by the inner operator.
        lengths = {name: x for name, x in lengths.items() if x is not None or name == "cu_seqlens_q"}
        q, k, v = (named.pop(name) for name in "qkv")
        return _in_context(q, k, v, lengths, named, deterministic, composite=True)

    return kernel


def named(
    error: Exception, face: str, tensors: dict[str, torch.Tensor], accepted: Callable[[str], str]
) -> Exception:
    """wording.named, and a sentence for what torch refuses before our checks: layouts, devices, dtypes.

    tensors: of the call, by the names of its arguments; accepted: "torch.int32 is" for an argument.
    """
    if not wording.is_ours(error):
        for argument, tensor in tensors.items():
            if tensor.is_nested or tensor.layout != torch.strided:
                kind = "nested" if tensor.is_nested else f"of layout {tensor.layout}"
                return ValueError(f"{face}: {argument} is {kind}; dense tensors are accepted")
        for argument, tensor in tensors.items():
            if tensor.is_quantized:
                return ValueError(f"{face}: {argument} is quantized; {accepted(argument)} accepted")
        for argument, tensor in tensors.items():
            if tensor.device.type not in ("cuda", "cpu"):
                where = f"{argument} is on device {tensor.device}"
                return NotImplementedError(f"{face}: {where}; cuda and cpu are supported, all on one device")
    if "Not yet supported ScalarType" in str(error):
        for argument, tensor in tensors.items():
            if str(tensor.dtype) not in accepted(argument):
                return ValueError(
                    f"{face}: {argument} has dtype {tensor.dtype}; {accepted(argument)} accepted"
                )
    return wording.named(error, face)


def accepted_beside_lengths(elements: str) -> Callable[[str], str]:
    """accepted of named, where all that are no lengths are of these dtypes."""
    return lambda argument: "torch.int32 is" if argument in LENGTHS else elements


def require_memory_of_its_own(**tensors: torch.Tensor) -> None:
    """Raises ValueError for a tensor to write into that is a view which negates what its memory holds."""
    if torch.compiler.is_compiling():  # which can't trace the question
        return
    for name, tensor in tensors.items():
        if tensor.is_neg():
            raise ValueError(f"{wording.OURS}{name} is a view that negates; call resolve_neg() on it first")


def require_number(face: str, name: str, value: object, accepted: str) -> None:
    if not isinstance(value, Real | torch.SymFloat | torch.SymInt) or isinstance(value, bool):
        kind = "a tensor" if isinstance(value, torch.Tensor) else wording.shown(value)
        raise TypeError(f"{face}: {name} is {kind}; {accepted} is accepted")


def for_outer_levels(op, *args, **options):
    """A public operator, for the levels of transforms around that of the Function whose forward calls this.

    That turns gradients off for all of them, although it has gradients for its own alone.
    """
    with torch_private.below_autograd(), torch.enable_grad(), torch_private.forward_mode_is_enabled(True):
        return op(*args, **options)


class Function(torch.autograd.Function):
    @classmethod
    def apply_here(cls, *args):
        """apply for the one level of transforms that is being run. It takes 14 us less."""
        unwrapped = torch_private.unwrapped_if_dead
        args = [unwrapped(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        if torch_private.transforms_are_active():
            return torch_private.apply_at_level(cls, *args)
        return super(torch.autograd.Function, cls).apply(*args)


def refuse_forward_mode(face: str) -> staticmethod:
    """A Function's jvp."""

    def jvp(ctx, *tangents):
        raise NotImplementedError(f"{face}: there is no forward-mode differentiation; use a gradient")

    return staticmethod(jvp)


def differentiated_once(face: str) -> type[Function]:
    """The base of a Function of gradients: they refuse to be differentiated."""

    class Gradients(Function):
        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, *gradients):
            raise NotImplementedError(f"{face}: there are no second derivatives; detach the gradients")

        jvp = backward

    return Gradients


@dataclass(slots=True)
class _Call:
    """What is no tensor among the arguments of a call. Transforms look into no object of such a type."""

    packed: bool
    names: tuple[str, ...]  # of the lengths and sinks that are passed as tensors
    options: dict[str, Any]
    deterministic: bool

    def named(self, lengths: tuple[torch.Tensor, ...]) -> dict[str, Any]:
        """The keywords for an inner operator."""
        return self.options | dict(zip(self.names, lengths, strict=True)) if lengths else self.options


class _Attention(Function):
    """out and lse. Keeps q, k, v and these for the backward, which computes the weights again."""

    @staticmethod
    def forward(call, q, k, v, *lengths):
        if torch_private.transforms_are_active():
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
        _, *needed = ctx.needs_input_grad
        if dout is None and dlse is None:
            return (None,) * (1 + len(needed))
        out, lse, q, k, v, *lengths = ctx.saved_tensors
        # Kernels make one of these at least, also where dsinks alone is asked for.
        needs_dkv = needed[1] or needed[2] or not needed[0]
        needs_dsinks = "sinks" in ctx.call.names and needed[3 + ctx.call.names.index("sinks")]
        tensors = dout, dlse, q, k, v, out, lse, *lengths
        arguments = ctx.call, needed[0], needs_dkv, needs_dsinks, *tensors
        # Only then may the gradients be differentiated.
        observed = torch.is_grad_enabled() or torch_private.dual_levels_are_active()
        *gradients, dsinks = (_Gradients.apply if observed else _Gradients.forward)(*arguments)
        asked = [x if is_needed else None for x, is_needed in zip(gradients, needed[:3], strict=True)]
        return None, *asked, *(dsinks if needs_dsinks and n == "sinks" else None for n in ctx.call.names)

    @staticmethod
    def vmap(info, in_dims, call, *tensors):
        def apply(q, k, v, **lengths):
            return _Attention.apply(call, q, k, v, *lengths.values())

        names = "q", "k", "v", *call.names
        named, dims = (dict(zip(names, values, strict=True)) for values in (tensors, in_dims[1:]))
        return (registration.vmap_varlen if call.packed else registration.vmap)(
            apply, info, (dims,), named, {}
        )

    jvp = refuse_forward_mode("flash_cute.forward")


class _Gradients(differentiated_once("flash_cute.backward")):
    """dq, dk, dv and dsinks."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call, needs_dq, needs_dkv, needs_dsinks, dout, dlse, q, k, v, out, lse, *lengths):
        op = _backward_varlen if call.packed else _backward
        options = call.named(lengths)
        if not needs_dsinks:
            options = {name: value for name, value in options.items() if name != "sinks"}
        if not (needs_dq and needs_dkv):
            options = options | {"needs_dq": needs_dq, "needs_dkv": needs_dkv}
        if call.deterministic or torch.are_deterministic_algorithms_enabled():
            options = options | {"deterministic": True}
        try:
            return op(dout, dlse, q, k, v, out, lse, **options)
        except RuntimeError as error:
            raise wording.named(error, "flash_cute.backward") from None


def _autocast(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as autocast gives it to PyTorch's own attention."""
    return tensor.to(autocast_dtype(tensor))


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.get_autocast_dtype(tensor.device.type) if autocast_concerns(tensor) else tensor.dtype


def autocast_concerns(tensor: torch.Tensor) -> bool:
    device = tensor.device.type
    eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
    # Not any device that autocast is available for: dynamo can't trace that question.
    return eligible and device in ("cuda", "cpu") and torch.is_autocast_enabled(device)


def needs_gradient(*tensors: torch.Tensor) -> bool:
    """In reverse mode or, in a dual level, in forward mode."""
    if torch_private.transforms_are_active():  # each wraps tensors, and hides what lies below
        tensors = [level for tensor in tensors for level in _levels(tensor)]
    if torch.is_grad_enabled():
        for tensor in tensors:  # any() of a generator takes 1 us more
            if tensor.requires_grad:
                return True
    return torch_private.dual_levels_are_active() and any(
        forward_ad.unpack_dual(tensor).tangent is not None
        for tensor in tensors
        if not torch_private.is_batched(tensor)  # has no rule for it, and is unwrapped besides
    )


def _levels(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor and, one after the other, those that transforms of torch.func have wrapped."""
    yield tensor
    while torch_private.is_wrapped(tensor):
        tensor = torch_private.unwrapped_once(tensor)
        yield tensor


_library = torch.library.Library("flash_cute", "IMPL")
_library.impl("forward", _composite(_forward), "CompositeImplicitAutograd")
_library.impl("forward_varlen", _composite(_forward_varlen), "CompositeImplicitAutograd")
for _name in ("forward", "forward_varlen", "forward_out", "backward", "backward_varlen"):
    _library.impl(f"_{_name}", getattr(cpu, _name), "CPU")
registration.register(_library)
