"""The native library's operators, completed: shapes for the compiler, vmap, FLOPs, and the CPU.

Schemas, defaults and validation live in C++ (csrc/). What is here is what only Python can register. No kernel
of _forward and _forward_varlen is in Python but on the CPU: calls without gradients, compiled graphs too,
stay in C++.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch._functorch.autograd_function import custom_function_call_vmap_helper
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from flash_cute import _C, cpu  # noqa: F401  importing _C registers the operators

_forward = torch.ops.flash_cute._forward.default
_forward_varlen = torch.ops.flash_cute._forward_varlen.default
compiled = torch.ops.flash_cute.compiled.default
_check = torch.ops.flash_cute._check.default

LENGTHS = "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k"


def forward(
    q, k, v, causal=False, *, softmax_scale=None, window_left=None, window_right=None, family=None, **lengths
):
    """The operator flash_cute::forward, whose schema is in csrc/ops.cpp, on Python's way to its kernel."""
    if not lengths and _is_plain(q, k, v):  # written out, as a dictionary of options takes 0.5 us
        return _forward(
            q,
            k,
            v,
            causal,
            softmax_scale=softmax_scale,
            window_left=window_left,
            window_right=window_right,
            family=family,
        )
    window = {"window_left": window_left, "window_right": window_right}
    options = {"softmax_scale": softmax_scale, **window, "family": family, **lengths}
    return _in_context(_forward, q, k, v, (causal,), options)


def forward_varlen(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k=None,
    causal=False,
    *,
    softmax_scale=None,
    window_left=None,
    window_right=None,
    family=None,
    **lengths,
):
    """The operator flash_cute::forward_varlen, likewise."""
    if not lengths and _is_plain(q, k, v):
        return _forward_varlen(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            causal,
            softmax_scale=softmax_scale,
            window_left=window_left,
            window_right=window_right,
            family=family,
        )
    window = {"window_left": window_left, "window_right": window_right}
    options = {"softmax_scale": softmax_scale, **window, "family": family, **lengths}
    return _in_context(_forward_varlen, q, k, v, (cu_seqlens_q, cu_seqlens_k, causal), options)


def plan(q, k, v, *args, **options) -> str:
    """The operator flash_cute::plan, of what forward would run under autocast."""
    return torch.ops.flash_cute.plan.default(*as_cast(q, k, v), *args, **options)


def as_cast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What stands for the tensors as autocast gives them to forward; without autocast they themselves."""
    if not torch._C._is_any_autocast_enabled():
        return tensors
    return tuple(torch.empty_like(tensor, dtype=_autocast_dtype(tensor)) for tensor in tensors)


def _is_plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Does neither autocast nor a transform nor a gradient concern the call?"""
    return not (
        torch._C._is_any_autocast_enabled()
        or torch._C._are_functorch_transforms_active()
        or _needs_gradient(q, k, v)
    )


def _in_context(op, q, k, v, arguments, options):
    """(out, lse) of an inner operator under autocast and transforms, or a refusal of their gradient."""
    if torch._C._is_any_autocast_enabled():
        q, k, v = (_autocast(tensor) for tensor in (q, k, v))
    if torch._C._are_functorch_transforms_active() and torch.compiler.is_dynamo_compiling():
        # dynamo cannot look below the wrappers of a transform
        packed = op is _forward_varlen
        op = (torch.ops.flash_cute.forward_varlen if packed else torch.ops.flash_cute.forward).default
    elif _needs_gradient(q, k, v):
        raise NotImplementedError(
            "flash_cute.forward: there is no backward yet; use torch.no_grad() or detach q, k and v"
        )
    return op(q, k, v, *arguments, **options)


def _autocast(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as autocast gives it to PyTorch's own attention."""
    return tensor.to(_autocast_dtype(tensor))


def _autocast_dtype(tensor: torch.Tensor) -> torch.dtype:
    device = tensor.device.type
    eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
    if eligible and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return tensor.dtype


def _needs_gradient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """In reverse mode or, in a dual level, in forward mode."""
    tensors = q, k, v
    if torch._C._are_functorch_transforms_active():  # each wraps tensors, and hides what lies below
        tensors = [level for tensor in tensors for level in _levels(tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return True
    return forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(tensor).tangent is not None
        for tensor in tensors
        if not torch._C._functorch.is_batchedtensor(tensor)  # has no rule for it, and is unwrapped besides
    )


def _levels(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor and, one after the other, those that transforms of torch.func have wrapped."""
    yield tensor
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
        yield tensor


def check(q, k, v, causal=False, *, window_left=None, window_right=None, **options):
    """The checks of a call, by what is known while it is traced; options may have all of LENGTHS."""
    lengths = {name: options.pop(name, None) for name in LENGTHS}
    given = [tensor for tensor in lengths.values() if tensor is not None]
    sizes = {name: _hints(tensor.shape) for name, tensor in lengths.items() if tensor is not None}
    shapes = [_hints(tensor.shape) for tensor in (q, k, v)]
    steps = [_hint(tensor.stride(0)) if tensor.dim() == 1 else 1 for tensor in given]
    if any(None in known for known in (*shapes, *sizes.values(), steps)):
        return
    with torch.utils._python_dispatch._disable_current_modes():
        _check(
            *shapes,
            [tensor.dtype for tensor in (q, k, v, *given)],
            [tensor.device for tensor in (q, k, v, *given)],
            steps,
            causal,
            window_left=_hint(window_left),
            window_right=_hint(window_right),
            **sizes,
            **options,
        )


def _traced(q, k, v, causal=False, **options):
    """The results' shapes, strides and types, after the checks of a call that runs."""
    check(q, k, v, causal, **options)
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _traced_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k=None, causal=False, **options):
    check(q, k, v, causal, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options)
    return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def _traced_cpu(q, k, v, scale, window_left, window_right, cu_seqlens_q=None, *lengths):
    shape = q.shape[:3] if cu_seqlens_q is None else (q.shape[1], q.shape[0])
    return torch.empty_like(q), q.new_empty(shape, dtype=torch.float32)


def _hint(size: int | torch.SymInt | None) -> int | None:
    """A size of the example that is traced, which does not bind the graph to it; None where there is none."""
    if not isinstance(size, torch.SymInt):
        return size
    return size.node.hint if size.node.has_hint() else None


def _hints(sizes: torch.Size) -> list[int | None]:
    return [_hint(size) for size in sizes]


def _vmap(info, in_dims, tensors, options):
    """The mapped dimension becomes a part of the batch."""

    def folded(name: str, dim: int | None) -> torch.Tensor | None:
        tensor = tensors[name]
        if tensor is None:
            return None
        mapped = tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        if name not in LENGTHS:
            return mapped.flatten(0, 1)
        if mapped.dim() == 1:
            raise ValueError(f"flash_cute.forward: {name} has shape (); (batch,) is accepted")
        return mapped.flatten(0, 1).contiguous()

    folds = {name: folded(name, in_dims[0][name]) for name in tensors}
    results = _forward(**folds, **options)
    q, dim = tensors["q"], in_dims[0]["q"]
    sizes = q.shape if dim is None else q.movedim(dim, 0).shape[1:]
    return tuple(result.unflatten(0, (info.batch_size, sizes[0])) for result in results), (0, 0)


def _vmap_varlen(*args):
    raise NotImplementedError(
        "flash_cute.forward: vmap can't map packed sequences; pack those of all its entries into one call"
    )


def _vmapped(op, rule):
    """op's kernel under vmap. torch.library.register_vmap has none for tensors that only have a keyword."""

    def kernel(keyset, *args, **kwargs):
        named = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
        tensors = {name: named.pop(name) for name in ("q", "k", "v", *LENGTHS) if name in named}
        interpreter = retrieve_current_functorch_interpreter()
        unmapped = lambda tensors, options: op(**tensors, **options)  # noqa: E731
        return custom_function_call_vmap_helper(interpreter, rule, unmapped, tensors, named)

    return kernel


def _flops(q: tuple[int, ...], k: tuple[int, ...], v, *args, **kwargs) -> int:
    """As PyTorch counts its own attention: both products of all pairs, those that a mask hides too."""
    return 4 * q[0] * q[1] * q[2] * k[2] * q[3]


def _flops_varlen(q: tuple[int, ...], k: tuple[int, ...], v, cu_seqlens_q, *args, **kwargs) -> int:
    """Likewise, as if every sequence had keys of mean number: the lengths are on the device."""
    total_q, heads, head_dim = q
    mean_k = -(-k[0] // max(1, cu_seqlens_q[0] - 1))
    return 4 * heads * head_dim * total_q * mean_k


_library = torch.library.Library("flash_cute", "IMPL")
_library.impl("forward", forward, "CompositeImplicitAutograd")
_library.impl("forward_varlen", forward_varlen, "CompositeImplicitAutograd")
_library.impl("_forward_cpu", cpu.forward, "CPU")
_library.impl("_forward", _vmapped(_forward, _vmap), "FuncTorchBatched", with_keyset=True)
_library.impl(
    "_forward_varlen", _vmapped(_forward_varlen, _vmap_varlen), "FuncTorchBatched", with_keyset=True
)
torch.library.register_fake("flash_cute::_forward", _traced, lib=_library)
torch.library.register_fake("flash_cute::_forward_varlen", _traced_varlen, lib=_library)
torch.library.register_fake("flash_cute::_forward_cpu", _traced_cpu, lib=_library)
register_flop_formula(torch.ops.flash_cute._forward)(_flops)
register_flop_formula(torch.ops.flash_cute._forward_varlen)(_flops_varlen)
