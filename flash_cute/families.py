"""Which of the compiled families of kernels a GPU runs: what tests and benchmarks call by name."""

from __future__ import annotations

import torch

import flash_cute


def refusals(device: torch.device, dtype: torch.dtype, backward: bool = False) -> dict[str, str | None]:
    """Compiled family -> the sentence that refuses operands of this type on the device, None where it runs.

    A build for Hopper alone has, of sm80, only the kernels that calls fall back on there. A kernel serves
    every head_dim up to its own, so the least one tells.
    """
    q = torch.empty(1, 1, 1, 8, dtype=dtype, device=device)
    found: dict[str, str | None] = {}
    for family in flash_cute.supported()["families"]:
        try:
            flash_cute.explain(q, q, q, family=family, backward=backward)
            found[family] = None
        except ValueError as error:
            found[family] = str(error)
    return found
