"""Values of lengths and offsets, also such as make no sense."""

from __future__ import annotations

import torch


def int32(values, device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


LIMITS = torch.iinfo(torch.int32)
WILD_OFFSETS = {
    "backwards": [0, 70, 40, 100],
    "all backwards": [100, 70, 40, 0],
    "past the total": [0, 70, 300, 400],
    "far past the total": [0, 70, 90, LIMITS.max],
    "negative": [-50, 20, 60, 100],
    "far negative": [LIMITS.min, 20, 60, LIMITS.max],
    "up and down": [LIMITS.max, LIMITS.min, LIMITS.max, LIMITS.min],
    "all past": [5000, 6000, 7000, 8000],
}
WILD_LENGTHS = {
    "too many": [101, 200, LIMITS.max],
    "negative": [-1, -100, LIMITS.min],
    "both": [LIMITS.max, LIMITS.min, 50],
}


def clamped(values: list[int], low: int, high: int) -> list[int]:
    return [min(max(value, low), high) for value in values]
