"""Which kernels there are to test."""

from __future__ import annotations

import torch

import flash_cute
from flash_cute.families import refusals
from support.cases import ALL_DTYPES


def families(device: torch.device) -> list[str | None]:
    """The compiled families that run some type on this device; None of the CPU.

    What else is asked of one that a build for visible GPUs has in part is skipped (conftest.py).
    """
    if device.type == "cpu":
        return [None]
    found = [refusals(device, dtype) for dtype in ALL_DTYPES.values()]
    return [family for family in flash_cute.supported()["families"] if any(not why[family] for why in found)]
