"""transformers' mask functions as ranges of keys for each query.

Source: masking_utils.py of transformers 5.23 and 5.24, whose functions each of these means.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import masking_utils

from flash_cute.masks.parts import MOST, runs_around

# One range [start, end) of positions for each query, (batch or 1, queries); a mask is the union of several.
Range = tuple[torch.Tensor, torch.Tensor]


def made_by(mask_function: Callable) -> tuple[str, dict[str, Any] | None]:
    """Which function of masking_utils has made a mask function, and what that holds; None if none has."""
    name = getattr(mask_function, "__qualname__", type(mask_function).__name__).partition(".")[0]
    if getattr(mask_function, "__module__", None) != masking_utils.__name__:
        return name, None
    cells = (cell.cell_contents for cell in mask_function.__closure__ or ())
    return name, dict(zip(mask_function.__code__.co_freevars, cells, strict=True))


def ranges_of(mask_function: Callable, own: torch.Tensor, end: int, first: int) -> torch.Tensor | None:
    """int32 (batch or 1, 1, queries, R, 2): the mask of a mask function, None where it is not known.

    own: where queries stand, (1, queries). first, end: the positions of the first key and behind the last.
    """
    found = _ranges(mask_function, own, end, False)
    if found is None:
        return None
    if len(found) > MOST:
        raise NotImplementedError(
            f"flash_cute.transformers: the mask must have at most {MOST} ranges of keys for each query, got "
            f"{len(found)}"
        )
    bounds = torch.broadcast_tensors(*(bound for one in found for bound in one))
    ranges = torch.stack(bounds, -1).unflatten(-1, (-1, 2)).clamp(first, end) - first
    return ranges.int().unsqueeze(1)


def _ranges(mask_function: Callable, own: torch.Tensor, end: int, packed: bool) -> list[Range] | None:
    """packed: the mask is cut by that of packed sequences, inside which positions count alike."""
    name, held = made_by(mask_function)
    if held is None:
        return None
    if name in ("and_masks", "or_masks"):
        parts = held["mask_functions"]
        union = name == "or_masks"
        packed = packed or (not union and any(made_by(part)[0] == _PACKED for part in parts))
        found = [_ranges(part, own, end, packed) for part in parts]
        if any(part is None for part in found):
            return None
        return [one for part in found for one in part] if union else _intersection(found)
    if name == "remap_positions_for_packed_sequence":
        # Distances are those of the row, but blocks and chunks would be looked up elsewhere.
        only_distances = packed and _leaves(held["mask_function"]) <= _OF_DISTANCES
        return _ranges(held["mask_function"], own, end, packed) if only_distances else None
    nothing, everything = torch.zeros_like(own), torch.full_like(own, end)
    if name == "causal_mask_function":
        return [(nothing, own + 1)]
    if name == "bidirectional_mask_function":
        return [(nothing, everything)]
    if name == "sliding_window_overlay":
        return [(own - held["sliding_window"] + 1, everything)]
    if name == "sliding_window_bidirectional_overlay":
        return [(own - held["sliding_window"], own + held["sliding_window"] + 1)]
    if name == "chunked_overlay":
        begin, size = held["left_padding"].unsqueeze(1), held["chunk_size"]
        start = (own - begin) // size * size + begin
        return [(start, start + size)]
    if name == "blockwise_overlay":
        return [_run(held["block_sequence_ids"], own, none_below_0=True)]
    if name == _PACKED:
        return [_run(held["packed_sequence_mask"], own)]
    return None


_PACKED = "packed_sequence_mask_function"
_OF_DISTANCES = {"causal_mask_function", "sliding_window_overlay", "sliding_window_bidirectional_overlay"}


def _leaves(mask_function: Callable) -> set[str]:
    """The names of what a mask function is put together from."""
    name, held = made_by(mask_function)
    parts = (held or {}).get("mask_functions")
    return {name} if parts is None else set().union(*map(_leaves, parts))


def _intersection(masks: list[list[Range]]) -> list[Range]:
    found, *others = masks
    for other in others:
        found = [(a.maximum(c), b.minimum(d)) for a, b in found for c, d in other]
    return found


def _run(ids: torch.Tensor, own: torch.Tensor, none_below_0: bool = False) -> Range:
    """The neighbours of one number among which each query stands. transformers' blocks lie together."""
    start, end = runs_around(ids)
    places = own.expand(len(ids), -1).clamp(max=ids.shape[1] - 1)
    start, end = start.gather(1, places), end.gather(1, places)
    return start, end.where(ids.gather(1, places) >= 0, start) if none_below_0 else end
