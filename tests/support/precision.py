"""How exact products of float32 are: what a call was given, and what PyTorch makes of either precision."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from support.tolerance import NORMS


@contextmanager
def matmul_precision(name: str):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class _RoundedProduct(torch.autograd.Function):
    """a b, both rounded to TF32, and likewise its gradients."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return _RoundedProduct.product(a, b)

    @staticmethod
    def backward(ctx, gradient):
        a, b = ctx.saved_tensors
        return _RoundedProduct.product(gradient, b.mT), _RoundedProduct.product(a.mT, gradient)

    @staticmethod
    def product(a, b):
        a, b = (((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32) for x in (a, b))
        return (a.double() @ b.double()).float()


class RoundedProducts(TorchFunctionMode):
    """PyTorch's products of float32 in TF32 on any device; cuBLAS has small ones in float32 all the same."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        is_product = func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
        if is_product and args[0].dtype == torch.float32:
            return _RoundedProduct.apply(*args)
        return func(*args, **(kwargs or {}))


def norms_of(precision: str) -> Iterable[str]:
    """Which errors count: of few products of numbers that are cut to TF32 the largest one is chance."""
    return ["RMS"] if precision == "high" else NORMS


class Calls(TorchDispatchMode):
    """Keeps the option tf32 of each operator of ours."""

    def __init__(self):
        super().__init__()
        self.tf32 = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "flash_cute" and not func.name().endswith("_cpu"):
            self.tf32.append(kwargs.get("tf32", False))
        return func(*args, **kwargs)
