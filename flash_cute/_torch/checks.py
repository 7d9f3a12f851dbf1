"""What Python checks of tensors before csrc/validate.cpp can, and what errors of PyTorch's own come as."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flash_cute import wording
from flash_cute.options import LENGTHS

_ACCEPTED = {
    "mask": "torch.bool and torch.uint8 are",
    "alibi_slopes": "torch.float32 is",
    "dropout_seed": "torch.int64 is",
    "k_scale": "torch.float32 is",
    "v_scale": "torch.float32 is",
}


def require_stored(function: str, **tensors: object) -> None:
    """Raises ValueError, as the function so named, if a tensor reaches behind the end of its storage.

    Of what is no plain tensor, is only traced, or wrapped by a transform, nothing is looked at.
    """
    if torch.compiler.is_compiling():
        return
    for name, tensor in tensors.items():
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.numel() == 0:
            continue
        try:
            stored = tensor.untyped_storage().nbytes()
        except NotImplementedError:  # of a transform's wrapper
            continue
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
        if needed > stored:
            raise ValueError(
                f"flash_cute.{function}: {name} must have a storage of at least {needed} bytes, got one of "
                f"{stored}"
            )


def require_dense(face: str, **tensors: torch.Tensor) -> None:
    """Raises ValueError for a tensor that has no strides to be read by."""
    for name, x in tensors.items():
        if x.is_nested or x.layout != torch.strided or x.is_quantized:
            kind = "nested" if x.is_nested else "quantized" if x.is_quantized else f"of layout {x.layout}"
            raise ValueError(f"{face}: {name} is {kind}; dense tensors are accepted")


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
    """accepted of named, where all that have no dtype of their own are of these."""
    return lambda argument: "torch.int32 is" if argument in LENGTHS else _ACCEPTED.get(argument, elements)


def require_memory_of_its_own(**tensors: torch.Tensor) -> None:
    """Raises ValueError for a tensor to write into that is a view which negates what its memory holds."""
    if torch.compiler.is_compiling():  # which can't trace the question
        return
    for name, tensor in tensors.items():
        if tensor.is_neg():
            raise ValueError(f"{wording.OURS}{name} is a view that negates; call resolve_neg() on it first")
