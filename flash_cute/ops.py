"""The native library's operators, completed: shapes for the compiler, autograd, and the CPU implementation.

Schemas, defaults and validation live in C++ (csrc/). What is here is what only Python can register.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import forward_ad

from flash_cute import _C, cpu  # noqa: F401  importing _C registers the operators

forward = torch.ops.flash_cute.forward.default
forward_cpu = torch.ops.flash_cute._forward_cpu.default
plan = torch.ops.flash_cute.plan.default
compiled = torch.ops.flash_cute.compiled.default

# Skips the Autograd key, for calls that nothing differentiates. The kernel registered there below is Python:
# going through it more than doubles a call's host time (7.9 -> 18.1 us on a slow core), this guard adds 1.0.
BelowAutograd = torch._C._AutoDispatchBelowAutograd


def is_differentiated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether autograd may follow an operator on these, in reverse or (in a dual level) in forward mode."""
    in_reverse = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return in_reverse or forward_ad._current_level >= 0


def _refusing_gradients(op: torch._ops.OpOverload) -> Callable:
    """An autograd kernel for op that raises, before op runs, where a derivative is wanted and else calls op.

    Without one, PyTorch would give gradients of zero.
    """

    def kernel(keyset, q, k, v, *args, **kwargs):
        in_reverse = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v))
        tangents = [forward_ad.unpack_dual(tensor).tangent for tensor in (q, k, v)]
        if in_reverse or tangents != [None] * len(tangents):
            raise NotImplementedError(
                "flash_cute.forward: there is no backward yet; use torch.no_grad() or detach q, k and v"
            )
        with BelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, q, k, v, *args, **kwargs)

    return kernel


def _empty_results(q: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


_library = torch.library.Library("flash_cute", "IMPL")
_library.impl(forward_cpu, cpu.forward, "CPU")
for _op in (forward, forward_cpu):
    torch.library.register_fake(_op, _empty_results, lib=_library)
    _library.impl(_op, _refusing_gradients(_op), "Autograd", with_keyset=True)
