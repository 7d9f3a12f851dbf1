"""The native library's operators, completed: shapes for the compiler, derivatives, vmap, FLOPs, and the CPU.

Schemas, defaults and validation live in C++ (csrc/). What is here is what only Python can register. No kernel
of _forward is in Python but on the CPU: calls without gradients, compiled graphs too, stay in C++.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from flash_cute import _C, cpu  # noqa: F401  importing _C registers the operators

_forward = torch.ops.flash_cute._forward.default
plan = torch.ops.flash_cute.plan.default
compiled = torch.ops.flash_cute.compiled.default
_check = torch.ops.flash_cute._check.default


def forward(q, k, v, causal=False, *, softmax_scale=None, window_left=None, window_right=None, family=None):
    """The operator flash_cute::forward, whose schema is in csrc/ops.cpp, on Python's way to its kernel."""
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(q.device.type):
        q, k, v = (_autocast(tensor) for tensor in (q, k, v))
    if torch._C._are_functorch_transforms_active():  # they hide whether a tensor needs a gradient
        if torch.compiler.is_dynamo_compiling():  # which would lose _Forward's backward below vmap
            return torch.ops.flash_cute.forward.default(
                q,
                k,
                v,
                causal,
                softmax_scale=softmax_scale,
                window_left=window_left,
                window_right=window_right,
                family=family,
            )
        return _Forward.apply(q, k, v, causal, softmax_scale, window_left, window_right, family)
    if _needs_gradient(q, k, v):
        raise _no_backward()
    return _Forward.forward(q, k, v, causal, softmax_scale, window_left, window_right, family)


def _autocast(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as autocast gives it to PyTorch's own attention."""
    eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(torch.get_autocast_dtype(tensor.device.type)) if eligible else tensor


def _needs_gradient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """In reverse mode or, in a dual level, in forward mode."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return True
    in_dual_level = forward_ad._current_level >= 0
    return in_dual_level and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in (q, k, v))


def _no_backward() -> NotImplementedError:
    return NotImplementedError(
        "flash_cute.forward: there is no backward yet; use torch.no_grad() or detach q, k and v"
    )


class _Forward(torch.autograd.Function):
    """The forward under the transforms of torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, causal, softmax_scale, window_left, window_right, family):
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

    @staticmethod
    def setup_context(ctx, inputs, output):
        if any(ctx.needs_input_grad[:3]):
            raise _no_backward()

    @staticmethod
    def jvp(ctx, *tangents):
        raise _no_backward()


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
    batch = results[0].shape[0] // info.batch_size
    return tuple(result.unflatten(0, (info.batch_size, batch)) for result in results), (0, 0)


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
