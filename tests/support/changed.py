"""A mask with what changes scores besides, for the checks of support.tolerance."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from flash_cute.dot_product_attention import drawn_seed
from support.cases import Mask


@dataclass(frozen=True)
class Changed(Mask):
    """changes: mask, bias, alibi_slopes, softcap, dropout_p, dropout_seed of reference.forward."""

    changes: dict = field(default_factory=dict)

    @property
    def options(self) -> dict:
        return {**super().options, **self.changes}


def next_seed(q: torch.Tensor, seed: int = 5) -> torch.Tensor:
    """The dropout_seed that a call with q draws next, with torch's generators seeded for it."""
    torch.manual_seed(seed)
    drawn = drawn_seed(q)
    torch.manual_seed(seed)
    return drawn
