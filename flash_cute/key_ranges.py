"""What ranges of keys say about a sequence: who sees anything, how many pairs, which keys.

Ranges are (..., seqlen_q, R, 2), [start, end) in any order, with anything outside the keys that there are.
"""

from __future__ import annotations

import torch

from flash_cute.windows import Window


def laid_out(ranges: torch.Tensor) -> torch.Tensor:
    """ranges as they are read: an entry of the batch lies without gaps, and one may stand for all."""
    if ranges.layout != torch.strided:
        return ranges
    expected = 1
    for dim in range(ranges.dim() - 1, 0 if ranges.dim() == 5 else -1, -1):
        if ranges.shape[dim] > 1 and ranges.stride(dim) != expected:
            return ranges.contiguous()
        expected *= ranges.shape[dim]
    return ranges


def of_sequence(ranges: torch.Tensor | None, queries: tuple[slice, ...], first: int) -> torch.Tensor | None:
    """Those of a sequence's queries (entry, heads, rows), whose first `first` keys are cut off."""
    if ranges is None:
        return None
    if ranges.dim() == 3:
        ranges = ranges[None, None]
    entry, _, rows = queries
    return ranges[entry if len(ranges) > 1 else slice(None), :, rows].long() - first


def starts_and_ends(window: Window, ranges: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 (..., seqlen_q, R): the bounds of a sequence's ranges, cut by its window and its keys."""
    own = torch.arange(window.seqlen_q, device=ranges.device).unsqueeze(1) + window.shift
    start, end = ranges.long().unbind(-1)
    start = start.clamp(min=0).maximum(own - window.left)
    return start, end.clamp(max=window.seqlen_k).minimum(own + window.right + 1)


def disjoint(window: Window, ranges: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Likewise, in their order and without what another one has; an empty range ends where it starts."""
    start, end = starts_and_ends(window, ranges)
    start, order = start.sort(-1)
    end = end.gather(-1, order).maximum(start)
    before = torch.cat((start[..., :1], end.cummax(-1).values[..., :-1]), -1)  # up to here all is counted
    start = start.maximum(before)
    return start, end.maximum(start)


def blind(window: Window, ranges: torch.Tensor) -> torch.Tensor:
    """Booleans, (..., seqlen_q): which queries see no key."""
    start, end = starts_and_ends(window, ranges)
    return (start >= end).all(-1)


def pairs(window: Window, ranges: torch.Tensor) -> int:
    """How many pairs of a query and a key see each other, each counted once."""
    start, end = disjoint(window, ranges)
    return int((end - start).sum())
