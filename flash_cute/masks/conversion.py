"""Ranges from what others say a mask by, and from other ranges."""

from __future__ import annotations

import torch

from flash_cute import lengths
from flash_cute.masks.parts import (
    KEYS,
    MOST,
    RANGES,
    at_most,
    offsets,
    require_device,
    require_few,
    require_length,
    require_match,
    require_number,
    require_pair,
    require_room,
    require_tensor,
    runs_in,
    saturated,
    with_least_room,
)
from flash_cute.wording import hinting, shown

_FAR = 2**40  # beyond all keys, with room to add and subtract queries


@hinting("flash_cute.masks")
def from_slices(
    q_ranges: list[tuple[int, int]],
    k_ranges: list[tuple[int, int]],
    kinds: list[str],
    seqlen_q: int,
    *,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Rectangles of queries and keys, the slices of MagiAttention.

        (0, 3) x (0, 3), "causal"     #
        (1, 3) x (4, 6), "full"       ##  ##
                                      ### ##

    Args:
        q_ranges, k_ranges: [start, end) of each slice, numbers on the host. Those of one query hold its
            ranges; they may overlap.
        kinds: of each, "full"; "causal", aligned at the end of both: the last query sees all of its keys and
            each one before it one less; "inverse causal", aligned at the start: the first query sees all of
            them, and each one after it not the first ones; "both", these two at a time.
        seqlen_q: how many queries there are.

    Returns (1, 1, seqlen_q, R, 2) with the least R that has room.

    Raises ValueError where a query is in more than four slices.
    """
    for name, value in {"q_ranges": q_ranges, "k_ranges": k_ranges, "kinds": kinds}.items():
        if not isinstance(value, list | tuple):
            kind = type(value).__name__
            raise TypeError(f"flash_cute.masks.from_slices: {name} is of type {kind}; a list is accepted")
    seqlen_q = require_length("from_slices", "seqlen_q", seqlen_q)
    require_device("from_slices", device)
    if not len(q_ranges) == len(k_ranges) == len(kinds):
        raise ValueError(
            f"flash_cute.masks.from_slices: q_ranges, k_ranges and kinds have lengths {len(q_ranges)}, "
            f"{len(k_ranges)} and {len(kinds)}; they must be the same"
        )
    ranges = torch.zeros(seqlen_q, MOST, 2, dtype=torch.int32)
    count = torch.zeros(seqlen_q, dtype=torch.int64)
    for of_q, of_k, kind in zip(q_ranges, k_ranges, kinds, strict=True):
        of_q = require_pair("from_slices", "each of q_ranges", of_q)
        of_k = require_pair("from_slices", "each of k_ranges", of_k)
        if not isinstance(kind, str) or kind not in ("full", "causal", "inverse causal", "both"):
            accepted = "'full', 'causal', 'inverse causal' and 'both' are accepted"
            raise ValueError(f"flash_cute.masks.from_slices: kinds has {shown(kind)}; {accepted}")
        (first, last), (begin, end) = of_q, (max(-_FAR, min(bound, _FAR)) for bound in of_k)
        if not 0 <= first <= last <= seqlen_q:
            raise ValueError(
                f"flash_cute.masks.from_slices: q_ranges has {shown((first, last))}; ranges of 0 to "
                f"{seqlen_q} are accepted"
            )
        rows = torch.arange(first, last)
        count[rows] += 1
        require_few("from_slices", "query", count, MOST)
        starts = begin + (rows - first) * (kind in ("inverse causal", "both"))
        ends = end - (last - 1 - rows) * (kind in ("causal", "both"))
        ranges[rows, count[rows] - 1] = saturated(torch.stack((starts, ends), -1))
    most = max(1, int(count.max())) if seqlen_q else 1
    return ranges[None, None, :, :most].contiguous().to(device)


@hinting("flash_cute.masks")
def from_dense(mask: torch.Tensor) -> torch.Tensor:
    """The ranges of a mask of booleans. It waits for the device, and takes memory as the mask does.

    Args:
        mask: bool (seqlen_q, seqlen_k) or (batch or 1, 1, seqlen_q, seqlen_k), True where a query sees a key.

    Returns (batch or 1, 1, seqlen_q, R, 2) with the least R that has room.

    Raises ValueError where the keys of a query lie in more than four runs.
    """
    shapes = "seqlen_q, seqlen_k", "batch or 1, 1, seqlen_q, seqlen_k"
    require_tensor("from_dense", "mask", mask, *shapes, holds="booleans")
    mask = mask[:, 0] if mask.dim() == 4 else mask.unsqueeze(0)
    return with_least_room("from_dense", [runs_in(mask, MOST)], tuple(mask.shape[:2]), mask.device)


@hinting("flash_cute.masks")
def union(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """What either of two masks shows: their ranges side by side, up to four of a query together.

    Args:
        one, other: ranges, (batch or 1, 1, seqlen_q, R, 2) or (total_q, R, 2).
    """
    _require_alike("union", one, other)
    size = torch.broadcast_shapes(one.shape[:-2], other.shape[:-2])
    require_room("union", one.shape[-2] + other.shape[-2])
    return torch.cat([saturated(x).expand(*size, *x.shape[-2:]) for x in (one, other)], -2)


@hinting("flash_cute.masks")
def intersection(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """What both of two masks show: each range of one cut by each of the other, up to four together.

    Args:
        one, other: ranges, (batch or 1, 1, seqlen_q, R, 2) or (total_q, R, 2).
    """
    _require_alike("intersection", one, other)
    require_room("intersection", one.shape[-2] * other.shape[-2])
    one, other = saturated(one).unsqueeze(-2), saturated(other).unsqueeze(-3)
    start, end = one[..., 0].maximum(other[..., 0]), one[..., 1].minimum(other[..., 1])
    return torch.stack((start, end), -1).flatten(-3, -2)


@hinting("flash_cute.masks")
def shift(ranges: torch.Tensor, first_key: int, keys: int) -> torch.Tensor:
    """The ranges for a part of the keys, first_key to first_key + keys - 1, which then are 0 to keys - 1.

    For flash_cute.merge and rings of processes: each part is a call with its keys and these ranges.

    Args:
        ranges: of all keys, (batch or 1, 1, seqlen_q, R, 2) or (total_q, R, 2).
        first_key, keys: where the part begins and how many keys it has.

    Returns ranges of the same shape, inside [0, keys].
    """
    require_tensor("shift", "ranges", ranges, *RANGES)
    first_key = require_number("shift", "first_key", first_key, 0)
    keys = require_number("shift", "keys", keys, 0)
    first, last = at_most(first_key, KEYS), at_most(first_key + keys, KEYS)
    return saturated(ranges).clamp(first, last) - first


@hinting("flash_cute.masks")
def positions(cu_seqlens: torch.Tensor, total: int) -> torch.Tensor:
    """Where each of packed queries stands in its own sequence: `queries` of the functions above.

    Args:
        cu_seqlens: int32 (batch + 1,), where sequences begin and end.
        total: how many queries there are.

    Returns int32 (total,); of rows of no sequence, -1, which see nothing where a mask is causal.
    """
    require_tensor("positions", "cu_seqlens", cu_seqlens, "batch + 1,")
    total = require_length("positions", "total", total)
    sequence, place = lengths.sequences_of_rows(total, offsets(cu_seqlens))
    return place.where(sequence >= 0, -1).int()


def _require_alike(name: str, one: torch.Tensor, other: torch.Tensor) -> None:
    require_tensor(name, "one", one, *RANGES)
    require_tensor(name, "other", other, *RANGES)
    require_match(name, ("one", one), ("other", other), -2, batch=one.dim() == other.dim() == 5)
