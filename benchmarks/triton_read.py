"""A kernel in Triton that only reads, for benchmarks.decode: the rate that a cache could be read at."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 4096, 8


@triton.jit
def read(source, target, count, BLOCK: tl.constexpr):
    """Each program stores one number, so that its loads are not left out."""
    found = tl.zeros([BLOCK], tl.int32)
    for begin in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        found ^= tl.load(source + begin + tl.arange(0, BLOCK))
    tl.store(target + tl.program_id(0), tl.sum(found, axis=0))


def reader(source: torch.Tensor, programs: int) -> Callable[[], None]:
    """A call that reads all of source, int32, a multiple of BLOCK numbers."""
    target = torch.empty(programs, dtype=torch.int32, device=source.device)
    return partial(read[(programs,)], source, target, source.numel(), BLOCK=BLOCK, num_warps=WARPS)
