"""Ranges of keys as a picture."""

from __future__ import annotations

from os import PathLike

import torch

from flash_cute._cpu import key_ranges
from flash_cute._cpu.windows import Window
from flash_cute.masks.parts import (
    RANGES,
    require_flag,
    require_length,
    require_number,
    require_pair,
    require_tensor,
    require_values,
)
from flash_cute.wording import hinting, shown

_SHADES = " .:#"  # nothing, less than half, more, all
_ROWS = 2048  # queries at a time: bounds the memory


@hinting("flash_cute.masks")
def show(
    ranges: torch.Tensor,
    seqlen_k: int,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    entry: int = 0,
    block: tuple[int, int] = (128, 128),
    width: int = 64,
    png: str | PathLike | None = None,
) -> str:
    """A drawing of a mask, and the work that it leaves. It waits for the device.

        >>> print(flash_cute.masks.show(flash_cute.masks.chunks(3, 5), 5, block=(2, 2)))
        #
        ##
        ###
           #
           ##
        9 of 25 pairs, 36.0%; 5 of 9 blocks of 2 x 2, 55.6%

    Args:
        ranges: (batch or 1, 1, seqlen_q, R, 2), or of one sequence (seqlen_q, R, 2).
        seqlen_k: how many keys there are.
        causal, window: of the call, which cuts the ranges.
        entry: the entry of the batch that is drawn; one that serves all of them is drawn for any.
        block: (queries, keys) of a block that is visited if one of its pairs is seen.
        width: at most so many rows and columns of letters, of which each stands for several queries and keys
            where there are more. Of its pairs all are seen ("#"), half or more (":"), fewer (".") or none.
        png: a file to write as a picture too, by matplotlib.

    Returns the lines.
    """
    require_tensor("show", "ranges", ranges, *RANGES)
    require_values("show", ranges)
    seqlen_k = require_length("show", "seqlen_k", seqlen_k)
    require_flag("show", "causal", causal)
    left, right = _limits(window)
    entries = len(ranges) if ranges.dim() == 5 else 1
    entry = require_number("show", "entry", entry, 0)
    if entries != 1 and entry >= entries:
        raise ValueError(f"flash_cute.masks.show: entry must be below ranges' batch {entries}, got {entry}")
    block = require_pair("show", "block", block)
    for length in block:
        require_number("show", "each of block", length, 1)
    width = require_number("show", "width", width, 1)
    if not isinstance(png, str | PathLike | None):
        accepted = "the name of a file or None"
        raise TypeError(f"flash_cute.masks.show: png must be {accepted}, got {shown(png)}")
    ranges = (ranges[min(entry, entries - 1), 0] if ranges.dim() == 5 else ranges).cpu()
    limits = Window.of(len(ranges), seqlen_k, left, 0 if causal else right)
    start, end = key_ranges.disjoint(limits, ranges)
    step = max(1, -(-max(len(ranges), seqlen_k) // width))
    cells, sizes = _seen(start, end, seqlen_k, (step, step))
    most = max(1, len(ranges), seqlen_k)
    visited, _ = _seen(start, end, seqlen_k, tuple(min(length, most) for length in block))
    pairs, of_pairs = int((end - start).sum()), len(ranges) * seqlen_k
    blocks, of_blocks = int((visited > 0).sum()), visited.numel()
    shares = cells / sizes
    shades = (shares > 0).int() + (shares >= 0.5).int() + (cells == sizes).int()
    lines = ["".join(_SHADES[shade] for shade in row).rstrip() for row in shades.tolist()]
    work = f"{pairs} of {of_pairs} pairs, {pairs / max(1, of_pairs):.1%}; {blocks} of {of_blocks} blocks of "
    lines.append(f"{work}{block[0]} x {block[1]}, {blocks / max(1, of_blocks):.1%}")
    if png is not None:
        _write(png, shares, lines[-1], step)
    return "\n".join(lines)


def _limits(window: object) -> tuple[int | None, int | None]:
    limits = tuple(window) if isinstance(window, tuple | list) else (window, window)
    if len(limits) != 2:
        raise ValueError(
            f"flash_cute.masks.show: window must be an int, a pair of them or None, got {shown(window)}"
        )
    return tuple(limit if limit is None else require_number("show", "window", limit, 0) for limit in limits)


def _seen(start: torch.Tensor, end: torch.Tensor, seqlen_k: int, size: tuple[int, int]):
    """How many pairs of each cell of `size` queries and keys are seen, and how many it has."""
    rows, columns = (-(-length // step) for length, step in zip((len(start), seqlen_k), size, strict=True))
    begins = torch.arange(columns) * size[1]
    ends = (begins + size[1]).clamp(max=seqlen_k)
    seen = torch.zeros(rows, columns, dtype=torch.int64)
    for first in range(0, len(start), _ROWS):
        part = slice(first, first + _ROWS)
        overlap = end[part, :, None].minimum(ends) - start[part, :, None].maximum(begins)
        overlap = overlap.clamp(min=0).sum(1)
        seen.index_add_(0, torch.arange(first, first + len(overlap)) // size[0], overlap)
    heights = torch.full((rows, 1), size[0]).minimum(len(start) - torch.arange(rows)[:, None] * size[0])
    return seen, heights * (ends - begins)


def _write(png: str | PathLike, shares: torch.Tensor, title: str, step: int) -> None:
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(6, 6), layout="constrained")).add_subplot()
    axes.imshow(
        shares.tolist(),
        cmap="Greys",
        vmin=0,
        vmax=1,
        extent=(0, shares.shape[1] * step, shares.shape[0] * step, 0),
    )
    axes.set(title=title, xlabel="key", ylabel="query")
    axes.title.set_fontsize(9)
    figure.savefig(png, dpi=100)
