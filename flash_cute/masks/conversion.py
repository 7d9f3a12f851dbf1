"""Ranges from what others say a mask by, and from other ranges."""

from __future__ import annotations

import torch

from flash_cute import lengths
from flash_cute.masks.parts import MOST, require_few, require_room, require_tensor, runs_in, with_least_room
from flash_cute.wording import shown


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
            each one before it one less; "inverse causal", aligned at the begin: the first query sees all of
            them, and each one behind it not the first ones; "both", these two at a time.
        seqlen_q: how many queries there are.

    Returns (1, 1, seqlen_q, R, 2) with the least R that has room.

    Raises ValueError where a query is in more than four slices.
    """
    if not len(q_ranges) == len(k_ranges) == len(kinds):
        raise ValueError(
            f"flash_cute.masks.from_slices: q_ranges, k_ranges and kinds have lengths {len(q_ranges)}, "
            f"{len(k_ranges)} and {len(kinds)}; they must be the same"
        )
    ranges = torch.zeros(seqlen_q, MOST, 2, dtype=torch.int32)
    count = torch.zeros(seqlen_q, dtype=torch.int64)
    for (first, last), (begin, end), kind in zip(q_ranges, k_ranges, kinds, strict=True):
        if kind not in ("full", "causal", "inverse causal", "both"):
            accepted = "'full', 'causal', 'inverse causal' and 'both' are accepted"
            raise ValueError(f"flash_cute.masks.from_slices: kinds has {shown(kind)}; {accepted}")
        if not 0 <= first <= last <= seqlen_q:
            raise ValueError(
                f"flash_cute.masks.from_slices: q_ranges has {(first, last)}; ranges of 0 to {seqlen_q} are "
                "accepted"
            )
        rows = torch.arange(first, last)
        count[rows] += 1
        require_few("from_slices", "query", count, MOST)
        starts = begin + (rows - first) * (kind in ("inverse causal", "both"))
        ends = end - (last - 1 - rows) * (kind in ("causal", "both"))
        ranges[rows, count[rows] - 1] = torch.stack((starts, ends), -1).int()
    most = max(1, int(count.max())) if seqlen_q else 1
    return ranges[None, None, :, :most].contiguous().to(device)


def from_dense(mask: torch.Tensor) -> torch.Tensor:
    """The ranges of a mask of booleans. It waits for the device, and takes memory as the mask does.

    Args:
        mask: bool (seqlen_q, seqlen_k) or (batch or 1, 1, seqlen_q, seqlen_k), True where a query sees a key.

    Returns (batch or 1, 1, seqlen_q, R, 2) with the least R that has room.

    Raises ValueError where the keys of a query lie in more than four runs.
    """
    alike = mask.dim() == 2 or (mask.dim() == 4 and mask.shape[1] == 1)
    if mask.dtype != torch.bool or not alike:
        raise ValueError(
            f"flash_cute.masks.from_dense: mask is {mask.dtype} {tuple(mask.shape)}; torch.bool (seqlen_q, "
            "seqlen_k) or (batch or 1, 1, seqlen_q, seqlen_k) is accepted"
        )
    mask = mask[:, 0] if mask.dim() == 4 else mask.unsqueeze(0)
    return with_least_room("from_dense", [runs_in(mask, MOST)], tuple(mask.shape[:2]), mask.device)


def union(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """What either of two masks shows: their ranges side by side, up to four of a query together.

    Args:
        one, other: ranges, (batch or 1, 1, seqlen_q, R, 2) or (total_q, R, 2).
    """
    size = torch.broadcast_shapes(one.shape[:-2], other.shape[:-2])
    require_room("union", one.shape[-2] + other.shape[-2])
    return torch.cat([x.expand(*size, *x.shape[-2:]) for x in (one, other)], -2)


def intersection(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """What both of two masks show: each range of one cut by each of the other, up to four together.

    Args:
        one, other: ranges, (batch or 1, 1, seqlen_q, R, 2) or (total_q, R, 2).
    """
    require_room("intersection", one.shape[-2] * other.shape[-2])
    one, other = one.unsqueeze(-2), other.unsqueeze(-3)
    start, end = one[..., 0].maximum(other[..., 0]), one[..., 1].minimum(other[..., 1])
    return torch.stack((start, end), -1).flatten(-3, -2)


def shift(ranges: torch.Tensor, first_key: int, keys: int) -> torch.Tensor:
    """The ranges for a part of the keys, first_key to first_key + keys - 1, which then are 0 to keys - 1.

    For flash_cute.merge and rings of processes: each part is a call with its keys and these ranges.

    Args:
        ranges: of all keys, of any shape.
        first_key, keys: where the part begins and how many keys it has.

    Returns ranges of the same shape, inside [0, keys].
    """
    return ranges.clamp(first_key, first_key + keys) - first_key


def positions(cu_seqlens: torch.Tensor, total: int) -> torch.Tensor:
    """Where each of packed queries stands in its own sequence: `queries` of the functions above.

    Args:
        cu_seqlens: int32 (batch + 1,), where sequences begin and end.
        total: how many queries there are.

    Returns int32 (total,); of rows of no sequence, -1, which see nothing where a mask is causal.
    """
    require_tensor("positions", "cu_seqlens", cu_seqlens, 1, "(batch + 1,)")
    sequence, place = lengths.sequences_of_rows(total, cu_seqlens.int())
    return place.where(sequence >= 0, -1).int()
