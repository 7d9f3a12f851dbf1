"""What ranges of keys say about a sequence: who sees anything, how many pairs, which keys.

Ranges are (..., seqlen_q, R, 2), [start, end) in any order, with anything outside the keys that there are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flash_cute._cpu.sequences import FLOAT
from flash_cute._cpu.windows import Window, in_ranges, visible

# Queries per call with a mask: bounds its memory, and a call gets only the keys that its queries can see.
_MASKED_ROWS = 512


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


def blind(window: Window, ranges: torch.Tensor | None) -> torch.Tensor:
    """Booleans, (..., seqlen_q): which queries see no key."""
    if ranges is None:
        count = window.blind if window.seqlen_k else window.seqlen_q
        return torch.arange(window.seqlen_q, device="cpu") < count
    start, end = starts_and_ends(window, ranges)
    return (start >= end).all(-1)


def pairs(window: Window, ranges: torch.Tensor) -> int:
    """How many pairs of a query and a key see each other, each counted once."""
    start, end = disjoint(window, ranges)
    return int((end - start).sum())


def flash_blocks(
    window: Window, ranges: torch.Tensor | None
) -> Iterator[tuple[slice, slice, torch.Tensor | None]]:
    """Rows and the keys that they see for PyTorch's kernel, with a mask to add where that doesn't know it."""
    if ranges is None and (window.full or window.causal):
        yield slice(0, window.seqlen_q), slice(0, window.seqlen_k), None
        return
    yield from masked_blocks(window, ranges)


def masked_blocks(window: Window, ranges: torch.Tensor | None) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Rows, the keys that they see, and float32 (rows, keys): 0 where a query sees a key, else -inf.

    With ranges it is (batch or 1, 1, rows, keys), and only a block of the window may have no key at all.
    """
    for rows, keys, seen in seen_in_blocks(window, ranges, _MASKED_ROWS):
        yield rows, keys, torch.zeros(seen.shape, **FLOAT).masked_fill(~seen, -torch.inf)


def seen_in_blocks(
    window: Window, ranges: torch.Tensor | None, step: int
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Likewise of `step` rows at a time, with booleans: which query sees which key."""
    for rows, keys in window.blocks(step):
        if ranges is not None:
            of_rows = ranges[:, :, rows]
            bounds = of_rows[of_rows[..., 0] < of_rows[..., 1]]
            if len(bounds) == 0:
                continue
            first, last = bounds[:, 0].min().item(), bounds[:, 1].max().item()
            keys = slice(max(keys.start, first), min(keys.stop, last))
            if keys.start >= keys.stop:
                continue
        row, key = (torch.arange(part.start, part.stop, device="cpu") for part in (rows, keys))
        seen = visible(row.unsqueeze(1), key, *window)
        if ranges is not None:
            seen = seen & in_ranges(of_rows, key)
        yield rows, keys, seen
