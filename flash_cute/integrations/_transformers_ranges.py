"""transformers' mask functions as ranges of keys for each query.

Source: masking_utils.py of transformers 5.23 and 5.24, whose functions each of these means.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import masking_utils

from flash_cute.masks.parts import MOST, runs_around, runs_in


class Range(NamedTuple):
    """Positions [start, end) for each query, (batch or 1, queries); a mask is the union of several.

    exact: are all of them seen? Else some are, the first or the last of them among these.
    """

    start: torch.Tensor
    end: torch.Tensor
    exact: bool = True


def made_by(mask_function: Callable) -> tuple[str, dict[str, Any] | None]:
    """Which function of masking_utils has made a mask function, and what that holds; None if none has."""
    name = getattr(mask_function, "__qualname__", type(mask_function).__name__).partition(".")[0]
    if getattr(mask_function, "__module__", None) != masking_utils.__name__:
        return name, None
    cells = (cell.cell_contents for cell in mask_function.__closure__ or ())
    return name, dict(zip(mask_function.__code__.co_freevars, cells, strict=True))


def packed_ids(mask_function: Callable) -> torch.Tensor | None:
    """The ids of a packed_sequence_mask_function that a mask function is put together with."""
    name, held = made_by(mask_function)
    if name == _PACKED and held is not None:
        return held["packed_sequence_mask"]
    found = (packed_ids(part) for part in (held or {}).get("mask_functions", ()))
    return next((ids for ids in found if ids is not None), None)


def ranges_of(
    mask_function: Callable, own: torch.Tensor, end: int, first: int, present: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """A mask function's mask, int32 (batch or 1, 1, queries, R, 2); None where it is not known.

    own: where queries stand, (1, queries). first, end: the positions of the first key and after the last.
    present: bool (batch, keys), the keys that count, if there are others.

    With it comes how many ranges each query has, int32 (batch or 1, queries); more than 4 may be said as 5,
    and are not all there. None where the mask function itself says that there are at most 4.
    """
    # Packed sequences that transformers has found in positions are each in one piece.
    found = _ranges(mask_function, own, end, False, 0 if _REMAP in _leaves(mask_function) else MOST - 1)
    if found is None:
        return None
    if present is not None:
        found = _intersection([found, _padding(present, first)])
    if len(found) <= MOST and all(one.exact for one in found):
        bounds = torch.broadcast_tensors(*(bound for one in found for bound in one[:2]))
        ranges, count = torch.stack(bounds, -1).unflatten(-1, (-1, 2)).clamp(first, end), None
    else:
        ranges, count = _merged(found, first, end)
    return (ranges - first).int().unsqueeze(1), count


def _ranges(
    mask_function: Callable, own: torch.Tensor, end: int, packed: bool, reach: int
) -> list[Range] | None:
    """packed: the mask is cut by that of packed sequences, inside which positions count alike. reach: how
    many runs of a packed sequence's number are looked for to each side of a query's own.
    """
    name, held = made_by(mask_function)
    if held is None:
        return None
    if name in ("and_masks", "or_masks"):
        parts = held["mask_functions"]
        union = name == "or_masks"
        packed = packed or (not union and any(made_by(part)[0] == _PACKED for part in parts))
        found = [_ranges(part, own, end, packed, reach) for part in parts]
        if any(part is None for part in found):
            return None
        return [one for part in found for one in part] if union else _intersection(found)
    if name == _REMAP:
        # Distances are those of the row, but blocks and chunks would be looked up elsewhere.
        only_distances = packed and _leaves(held["mask_function"]) <= _OF_DISTANCES
        return _ranges(held["mask_function"], own, end, packed, reach) if only_distances else None
    nothing, everything = torch.zeros_like(own), torch.full_like(own, end)
    if name == "causal_mask_function":
        return [Range(nothing, own + 1)]
    if name == "bidirectional_mask_function":
        return [Range(nothing, everything)]
    if name == "sliding_window_overlay":
        return [Range(own - min(held["sliding_window"], _FAR) + 1, everything)]
    if name == "sliding_window_bidirectional_overlay":
        distance = min(held["sliding_window"], _FAR)
        return [Range(own - distance, own + distance + 1)]
    if name == "chunked_overlay":
        begin, size = held["left_padding"].unsqueeze(1), min(held["chunk_size"], _FAR)
        start = (own - begin) // size * size + begin
        return [Range(start, start + size)]
    if name == "blockwise_overlay":
        return _of_number(held["block_sequence_ids"], own, MOST - 1, none_below_0=True)
    if name == _PACKED:
        ids = held["packed_sequence_mask"]
        if ids.shape[1] < max(end, own.shape[1]):
            raise ValueError(
                "flash_cute.transformers: the ids of packed_sequence_mask_function must have as many "
                f"positions as there are keys, {end}, got {ids.shape[1]}"
            )
        return _of_number(ids, own, reach)
    return None


_FAR = 2**31  # further than any key
_PACKED, _REMAP = "packed_sequence_mask_function", "remap_positions_for_packed_sequence"
_OF_DISTANCES = {"causal_mask_function", "sliding_window_overlay", "sliding_window_bidirectional_overlay"}


def _leaves(mask_function: Callable) -> set[str]:
    """The names of what a mask function is put together from."""
    name, held = made_by(mask_function)
    parts = (held or {}).get("mask_functions")
    return {name} if parts is None else set().union(*map(_leaves, parts))


def _intersection(masks: list[list[Range]]) -> list[Range]:
    found, *others = masks
    for other in others:
        found = [
            Range(a.start.maximum(b.start), a.end.minimum(b.end), a.exact and b.exact)
            for a in found
            for b in other
        ]
    return found


def _of_number(ids: torch.Tensor, own: torch.Tensor, reach: int, none_below_0: bool = False) -> list[Range]:
    """The positions that have the number of each query's own: the run of neighbours around it, `reach` runs
    to each side, and what lies beyond these. Queries past the ids have no number, as transformers pads them.
    """
    size = ids.shape[1]
    start, end = runs_around(ids)
    in_order, token = ids.sort(stable=True)
    alike = in_order[:, 1:] == in_order[:, :-1]
    none = torch.full_like(token, size)
    # The next token of the same number to each side of a run; `size` is no token, whose run is empty.
    earlier = none.scatter(1, token[:, 1:], token[:, :-1].where(alike, size)).gather(1, start.long())
    later = none.scatter(1, token[:, :-1], token[:, 1:].where(alike, size)).gather(1, end.long() - 1)
    start, end, earlier, later = (
        torch.nn.functional.pad(x, (0, 1), value=size) for x in (start, end, earlier, later)
    )
    place = own.expand(len(ids), -1).clamp(max=size)
    if none_below_0:
        place = place.where(torch.nn.functional.pad(ids >= 0, (0, 1)).gather(1, place), size)
    found = [Range(start.gather(1, place), end.gather(1, place))]
    for before, next_one in ((True, earlier), (False, later)):
        at = place
        for _ in range(reach):
            at = next_one.gather(1, at)
            found.append(Range(start.gather(1, at), end.gather(1, at)))
        at = next_one.gather(1, at)
        edge = torch.full_like(at, size)
        beyond = (edge.where(at == size, 0), end.gather(1, at)) if before else (start.gather(1, at), edge)
        found.append(Range(*beyond, exact=False))
    return found


def _padding(present: torch.Tensor, first: int) -> list[Range]:
    """The positions of keys that count: the first four runs of them, and what comes after these."""
    start, end, _ = runs_in(present, MOST + 1)
    runs = [Range(start[:, i, None] + first, end[:, i, None] + first) for i in range(MOST)]
    fifth, last = start[:, MOST, None], torch.full_like(start[:, MOST, None], present.shape[1])
    return [*runs, Range(fifth.where(fifth > 0, last) + first, last + first, False)]


def _merged(found: list[Range], first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The union as ranges in order, with gaps between them, (..., MOST, 2), and how many there are.

    One more than MOST also where those that are not exact add anything to the others.
    """
    bounds = torch.broadcast_tensors(*(bound for one in found for bound in one[:2]))
    bounds = torch.stack(bounds, -1).unflatten(-1, (-1, 2)).clamp(first, end).int().unbind(-2)
    exact = [one for one, known in zip(bounds, found, strict=True) if known.exact]
    ranges, count = _in_order(torch.stack(exact, -2))
    if len(exact) < len(found):
        most, most_count = _in_order(torch.stack(bounds, -2))
        same = (ranges == most).flatten(-2).all(-1)
        count = most_count.where(same, MOST + 1)
    return ranges, count


def _in_order(bounds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first MOST of the ranges that others, (..., R, 2), put together make, and the number of all."""
    start, end = bounds.unbind(-1)
    never, empty = torch.iinfo(torch.int32).max, start >= end
    start, order = start.masked_fill(empty, never).sort(-1)
    end = end.masked_fill(empty, 0).gather(-1, order)
    reached = torch.nn.functional.pad(end.cummax(-1).values[..., :-1], (1, 0), value=-1)
    begins = (start > reached) & (start < never)
    rank, count = begins.cumsum(-1), begins.sum(-1, dtype=torch.int32)
    merged = []
    for i in range(1, MOST + 1):
        of_rank = rank == i
        pair = start.masked_fill(~of_rank, never).amin(-1), end.masked_fill(~of_rank, 0).amax(-1)
        merged.append(torch.stack(pair, -1).masked_fill((count < i).unsqueeze(-1), 0))
    return torch.stack(merged, -2), count
