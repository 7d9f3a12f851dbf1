"""The native library's operators, completed: shapes for the compiler, vmap, FLOPs, and the CPU.

Schemas, defaults and validation live in C++ (csrc/). What is here is what only Python can register. No kernel
of _forward is in Python but on the CPU: calls without gradients, compiled graphs too, stay in C++.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from flash_cute import _C, cpu  # noqa: F401  importing _C registers the operators

_forward = torch.ops.flash_cute._forward.default
compiled = torch.ops.flash_cute.compiled.default
_check = torch.ops.flash_cute._check.default


def forward(q, k, v, causal=False, *, softmax_scale=None, window_left=None, window_right=None, family=None):
    """The operator flash_cute::forward, whose schema is in csrc/ops.cpp, on Python's way to its kernel."""
    op = _forward
    if torch._C._is_any_autocast_enabled():
        q, k, v = (_autocast(tensor) for tensor in (q, k, v))
    if torch._C._are_functorch_transforms_active() and torch.compiler.is_dynamo_compiling():
        op = torch.ops.flash_cute.forward.default  # dynamo cannot look below the wrappers of a transform
    elif _needs_gradient(q, k, v):
        raise NotImplementedError(
            "flash_cute.forward: there is no backward yet; use torch.no_grad() or detach q, k and v"
        )
    return op(
        q,
        k,
        v,
        causal,
        softmax_scale=softmax_scale,
        window_left=window_left,
        window_right=window_right,
        family=family,
    )


def plan(q, k, v, *args, **options) -> str:
    """The operator flash_cute::plan, of what forward would run under autocast."""
    if torch._C._is_any_autocast_enabled():
        q, k, v = (torch.empty_like(tensor, dtype=_autocast_dtype(tensor)) for tensor in (q, k, v))
    return torch.ops.flash_cute.plan.default(q, k, v, *args, **options)


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


def _traced(q, k, v, causal=False, *, softmax_scale=None, window_left=None, window_right=None, family=None):
    """The results' shapes, strides and types, after the checks of a call that runs."""
    sizes = [[_hint(size) for size in tensor.shape] for tensor in (q, k, v)]
    if None not in [*sizes[0], *sizes[1], *sizes[2]]:
        with torch.utils._python_dispatch._disable_current_modes():
            _check(
                *sizes,
                [tensor.dtype for tensor in (q, k, v)],
                [tensor.device for tensor in (q, k, v)],
                causal,
                softmax_scale=softmax_scale,
                window_left=_hint(window_left),
                window_right=_hint(window_right),
                family=family,
            )
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _hint(size: int | torch.SymInt | None) -> int | None:
    """A size of the example that is traced, which does not bind the graph to it; None where there is none."""
    if not isinstance(size, torch.SymInt):
        return size
    return size.node.hint if size.node.has_hint() else None


def _traced_cpu(q, *args):
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _vmap(info, in_dims, q, k, v, *args, **kwargs):
    """The mapped dimension becomes a part of the batch."""

    def folded(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
        mapped = tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        return mapped.flatten(0, 1)

    tensors = [folded(tensor, dim) for tensor, dim in zip((q, k, v), in_dims, strict=False)]
    results = _forward(*tensors, *args, **kwargs)
    sizes = q.shape if in_dims[0] is None else q.movedim(in_dims[0], 0).shape[1:]
    return tuple(result.unflatten(0, (info.batch_size, sizes[0])) for result in results), (0, 0)


def _flops(q: tuple[int, ...], k: tuple[int, ...], v, *args, **kwargs) -> int:
    """As PyTorch counts its own attention: both products of all pairs, those that a mask hides too."""
    return 4 * q[0] * q[1] * q[2] * k[2] * q[3]


_library = torch.library.Library("flash_cute", "IMPL")
_library.impl("forward", forward, "CompositeImplicitAutograd")
_library.impl("_forward_cpu", cpu.forward, "CPU")
torch.library.register_fake("flash_cute::_forward", _traced, lib=_library)
torch.library.register_fake("flash_cute::_forward_cpu", _traced_cpu, lib=_library)
torch.library.register_vmap("flash_cute::_forward", _vmap, lib=_library)
register_flop_formula(torch.ops.flash_cute._forward)(_flops)
