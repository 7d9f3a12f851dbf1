"""What the makers of masks share: positions, runs of tokens, checks."""

from __future__ import annotations

import torch

from flash_cute.wording import shown

Queries = int | torch.Tensor
MOST = 4  # ranges of a query


def places(name: str, queries: Queries, device) -> torch.Tensor:
    """int32 (batch or 1, seqlen_q) or (total_q,): where queries stand."""
    if not isinstance(queries, torch.Tensor):
        require_number(name, "queries", queries, 0)
        return torch.arange(queries, device=device, dtype=torch.int32).unsqueeze(0)
    if queries.dim() not in (1, 2) or queries.is_floating_point() or queries.dtype == torch.bool:
        raise ValueError(
            f"flash_cute.masks.{name}: queries is {queries.dtype} {tuple(queries.shape)}; a number, or "
            "integers (batch or 1, seqlen_q) or (total_q,), are accepted"
        )
    return queries.int()


def stacked(*bounds: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """(start, end) of each range of all queries, (batch, seqlen_q) or (total_q,), as the calls take them."""
    ranges = torch.stack([torch.stack(torch.broadcast_tensors(*pair), -1) for pair in bounds], -2).int()
    return ranges.unsqueeze(1) if ranges.dim() == 4 else ranges


def runs_around(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int32, like ids: where a token's run, neighbours of one number, starts and ends."""
    place = torch.arange(ids.shape[1], device=ids.device, dtype=torch.int32).expand(ids.shape)
    if ids.shape[1] == 0:
        return place, place
    changes = ids[:, 1:] != ids[:, :-1]
    edge = changes.new_ones(len(ids), 1)
    begins, ends = torch.cat((edge, changes), 1), torch.cat((changes, edge), 1)
    start = place.where(begins, 0).cummax(1).values
    end = (place + 1).where(ends, ids.shape[1]).flip(1).cummin(1).values.flip(1)
    return start, end


def runs_in(mask: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first runs of True in each row of booleans, (..., keys): int32 starts and ends, (..., most), and
    how many there are, (...,).
    """
    if mask.shape[-1] == 0:
        none = mask.new_zeros((*mask.shape[:-1], most), dtype=torch.int32)
        return none, none, none.sum(-1)
    edge = torch.zeros_like(mask[..., :1])
    begins = mask & ~torch.cat((edge, mask[..., :-1]), -1)
    ends = mask & ~torch.cat((mask[..., 1:], edge), -1)
    rank = begins.cumsum(-1, dtype=torch.int32)
    starts, stops = [], []
    for run in range(1, most + 1):
        exists = (rank[..., -1] >= run).int()
        of_run = rank == run
        starts.append((begins & of_run).int().argmax(-1) * exists)
        stops.append(((ends & of_run).int().argmax(-1) + 1) * exists)
    return torch.stack(starts, -1).int(), torch.stack(stops, -1).int(), rank[..., -1]


def with_least_room(
    name: str,
    found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    size: tuple[int, int],
    device: torch.device | str | None,
) -> torch.Tensor:
    """What runs_in found for parts of the queries, one behind the other, as ranges of size (batch, queries).

    Raises ValueError if a query has too many; waits for the device.
    """
    if 0 in size:
        return torch.zeros(size[0], 1, size[1], 1, 2, dtype=torch.int32, device=device)
    start, end, count = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    require_few(name, "query", count, MOST)
    most = max(1, int(count.max()))
    return torch.stack((start, end), -1)[..., :most, :].contiguous().unsqueeze(1)


def require_tensor(
    name: str, argument: str, tensor: torch.Tensor, dims: int, accepted: str, integers: bool = True
) -> None:
    if not isinstance(tensor, torch.Tensor):
        kind = type(tensor).__name__
        raise TypeError(f"flash_cute.masks.{name}: {argument} is of type {kind}; a torch.Tensor is accepted")
    if tensor.dim() != dims:
        raise ValueError(
            f"flash_cute.masks.{name}: {argument} must have shape {accepted}, got {tuple(tensor.shape)}"
        )
    if integers and (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool):
        raise ValueError(f"flash_cute.masks.{name}: {argument} must hold integers, got {tensor.dtype}")


def require_number(name: str, argument: str, value: int, least: int) -> None:
    if not isinstance(value, int | torch.SymInt) or isinstance(value, bool) or value < least:
        raise ValueError(f"flash_cute.masks.{name}: {argument} must be an int >= {least}, got {shown(value)}")


def require_room(name: str, count: int) -> None:
    if count > MOST:
        raise ValueError(f"flash_cute.masks.{name}: a query has at most {MOST} ranges, got {count}")


def require_few(name: str, what: str, count: torch.Tensor, most: int) -> None:
    """Raises if one of the counts, one of each row of a mask, is larger than `most`; waits for the device."""
    if count.numel() and int(count.max()) > most:
        place = [int(index) for index in (count > most).nonzero()[0]]
        raise ValueError(
            f"flash_cute.masks.{name}: {what} {place[-1]} has {int(count[tuple(place)])} ranges; at most "
            f"{most} are accepted"
        )
