"""Fused softmax in Triton, a program for each row, for benchmarks.softmax to compare with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl

WHOLE_ROW_UP_TO = 2**16  # columns: a program holds as many, and spills
BLOCK_OF_LONG_ROWS = 8192


@triton.jit
def whole_row(source, target, columns, BLOCK: tl.constexpr):
    """As in Triton's tutorial: the row stays in registers."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < columns
    scores = tl.load(source + row * columns + offsets, mask=mask, other=-float("inf")).to(tl.float32)
    numerator = tl.exp(scores - tl.max(scores, axis=0))
    result = numerator / tl.sum(numerator, axis=0)
    tl.store(target + row * columns + offsets, result.to(target.dtype.element_ty), mask=mask)


@triton.jit
def in_blocks(source, target, columns, BLOCK: tl.constexpr):
    """Reads the row twice: for an online maximum and sum, then for the result."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, columns, BLOCK):
        mask = begin + offsets < columns
        scores = tl.load(source + row * columns + begin + offsets, mask=mask, other=-float("inf"))
        scores = scores.to(tl.float32)
        higher = tl.maximum(highest, scores)
        total = total * tl.exp(highest - higher) + tl.where(mask, tl.exp(scores - higher), 0)
        highest = higher
    maximum = tl.max(highest, axis=0)
    total_of_row = tl.sum(total * tl.exp(highest - maximum), axis=0)
    for begin in range(0, columns, BLOCK):
        mask = begin + offsets < columns
        scores = tl.load(source + row * columns + begin + offsets, mask=mask, other=-float("inf"))
        result = tl.exp(scores.to(tl.float32) - maximum) / total_of_row
        tl.store(target + row * columns + begin + offsets, result.to(target.dtype.element_ty), mask=mask)


def softmax(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A call for x (rows, columns), contiguous, of one block or more columns if more than WHOLE_ROW_UP_TO."""
    rows, columns = x.shape
    if columns <= WHOLE_ROW_UP_TO:
        kernel, block = whole_row, triton.next_power_of_2(columns)
        warps = 4 if block < 2048 else 8 if block < 8192 else 16 if block < 32768 else 32
    else:
        kernel, block, warps = in_blocks, BLOCK_OF_LONG_ROWS, 32
    launch = partial(kernel[(rows,)], x, columns=columns, BLOCK=block, num_warps=warps)

    def run():
        target = torch.empty_like(x)  # memory of the allocator's choice, as ours and PyTorch's
        launch(target=target)
        return target

    return run
