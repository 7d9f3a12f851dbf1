"""Tensors whose memory was given back, where Python reads them before csrc/validate.cpp can look."""

from __future__ import annotations

import torch


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
