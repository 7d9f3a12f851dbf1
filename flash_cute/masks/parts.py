"""What the makers of masks share: positions, runs of tokens, checks."""

from __future__ import annotations

from operator import index

import torch

from flash_cute._torch.checks import require_stored
from flash_cute.wording import require_bool, shown

Queries = int | torch.Tensor
_FACE = "flash_cute.masks."
MOST = 4  # ranges of a query
SEQLEN = 2**28  # the largest, see docs/limits.md
KEYS = 2**31 - 1  # more than all keys that there may be, and the largest int32
LARGEST = 2**63 - 1  # of the host's numbers that meet a tensor of int64
RANGES = "batch or 1, 1, seqlen_q, R, 2", "total_q, R, 2"
_INTEGERS = torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32
_FLOATS = torch.float32, torch.bfloat16, torch.float16, torch.float64
_HELD = {"integers": _INTEGERS, "booleans": (torch.bool,), "numbers": (torch.bool, *_INTEGERS, *_FLOATS)}


def places(name: str, queries: Queries, device: torch.device | str | None) -> torch.Tensor:
    """int64 (batch or 1, seqlen_q) or (total_q,): where queries stand, -1 of all before the first key."""
    require_device(name, device)
    if not isinstance(queries, torch.Tensor):
        queries = require_length(name, "queries", queries, "a tensor of integers or an int")
        return torch.arange(queries, device=device).unsqueeze(0)
    require_tensor(name, "queries", queries, "batch or 1, seqlen_q", "total_q,")
    return queries.long().clamp(min=-1)


def after(place: torch.Tensor) -> torch.Tensor:
    """The key after each, and of what is beyond all keys, one that is, too: place + 1 may not be an int64."""
    return place.clamp(max=KEYS) + 1


def at_most(number: int, most: int) -> int:
    """The smaller; of a symbol without a comparison, which is a guard: min() has none in torch.compile."""
    return torch.sym_min(number, most) if isinstance(number, torch.SymInt) else min(number, most)


def offsets(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """As int32, beyond all rows what was: with room to add and subtract rows."""
    return cu_seqlens.long().clamp(-(2**30), 2**30).int()


def saturated(bounds: torch.Tensor) -> torch.Tensor:
    """As int32; what has no room there is beyond all keys."""
    return bounds if bounds.dtype == torch.int32 else bounds.long().clamp(-KEYS - 1, KEYS).int()


def stacked(*bounds: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """(start, end) of each range of all queries, (batch, seqlen_q) or (total_q,), as the calls take them."""
    ranges = torch.stack([torch.stack(torch.broadcast_tensors(*pair), -1) for pair in bounds], -2)
    ranges = saturated(ranges)
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
    """What runs_in found for parts of the queries, one after the other, as ranges of size (batch, queries).

    Raises ValueError if a query has too many; waits for the device.
    """
    if 0 in size:
        return torch.zeros(size[0], 1, size[1], 1, 2, dtype=torch.int32, device=device)
    require_values(name, found[0][0])
    start, end, count = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    require_few(name, "query", count, MOST)
    most = max(1, int(count.max()))
    return torch.stack((start, end), -1)[..., :most, :].contiguous().unsqueeze(1)


def require_tensor(
    name: str, argument: str, tensor: object, *shapes: str, holds: str = "integers"
) -> torch.Tensor:
    """The tensor, of a type that PyTorch compares.

    Raises where it is none of one of these shapes: "batch or 1, 1, seqlen_q" has a 1 in the middle.
    """
    if not isinstance(tensor, torch.Tensor):
        kind = type(tensor).__name__
        raise TypeError(f"{_FACE}{name}: {argument} is of type {kind}; a torch.Tensor is accepted")
    if tensor.is_nested or tensor.layout != torch.strided:
        layout = "a nested tensor" if tensor.is_nested else tensor.layout
        raise ValueError(f"{_FACE}{name}: {argument} must be a dense tensor, got {layout}")
    if not any(_fits(tensor.shape, shape.split(", ")) for shape in shapes):
        accepted = " or ".join(f"({shape})" for shape in shapes)
        raise ValueError(f"{_FACE}{name}: {argument} must have shape {accepted}, got {tuple(tensor.shape)}")
    if tensor.dtype not in _HELD[holds]:
        raise ValueError(f"{_FACE}{name}: {argument} must hold {holds}, got {tensor.dtype}")
    require_stored(f"masks.{name}", **{argument: tensor})
    return tensor.long() if tensor.dtype in (torch.uint16, torch.uint32) else tensor


def _fits(shape: torch.Size, sizes: list[str]) -> bool:
    def fits(length: int, size: str) -> bool:
        return length == int(size) if size.isdigit() else length > 0 or not (size == "R" or "+ 1" in size)

    return len(shape) == len(sizes) and all(fits(*pair) for pair in zip(shape, sizes, strict=True))


def require_match(
    name: str, one: tuple[str, torch.Tensor], other: tuple[str, torch.Tensor], dims: int, batch: bool
) -> None:
    """Raises where two arguments differ in shape[:dims], of which a batch may be 1, or in their device."""
    (first, x), (second, y) = one, other
    if x.device != y.device:
        raise ValueError(
            f"{_FACE}{name}: {first} and {second} are on {x.device} and {y.device}; they must be on "
            "one device"
        )
    sizes, others = x.shape[:dims], y.shape[:dims]
    if batch and 1 in (sizes[0], others[0]):
        sizes, others = sizes[1:], others[1:]
    if sizes != others:
        raise ValueError(
            f"{_FACE}{name}: {first} and {second} have shapes {tuple(x.shape)} and {tuple(y.shape)}; "
            "they must be of the same batch and queries"
        )


def require_values(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise ValueError(f"{_FACE}{name}: tensors on device meta hold no values, which this function reads")


def require_number(
    name: str, argument: str, value: object, least: int, most: int | None = None, kind: str = "an int"
) -> int:
    number = _integer(value)
    if number is None or number < least or (most is not None and number > most):
        bounds = f">= {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{_FACE}{name}: {argument} must be {kind} {bounds}, got {shown(value)}")
    return number


def require_length(name: str, argument: str, value: object, kind: str = "an int") -> int:
    """Of a compiler's symbols there is no upper bound, which would be a guard."""
    return require_number(name, argument, value, 0, None if torch.compiler.is_compiling() else SEQLEN, kind)


def require_pair(name: str, argument: str, value: object) -> tuple[int, int]:
    pair = tuple(map(_integer, value)) if isinstance(value, tuple | list) else ()
    if len(pair) != 2 or None in pair:
        raise ValueError(f"{_FACE}{name}: {argument} must be a pair of ints, got {shown(value)}")
    return pair


def _integer(value: object) -> int | None:
    """Its value, of one of NumPy, too; None of a tensor, whose device would be waited for."""
    if isinstance(value, int | torch.SymInt):
        return None if isinstance(value, bool) else value
    try:
        return None if isinstance(value, torch.Tensor) else index(value)
    except TypeError:
        return None


def require_flag(name: str, argument: str, value: object) -> None:
    require_bool(f"{_FACE}{name}", argument, value)


def require_device(name: str, device: object) -> None:
    if device is None or torch.compiler.is_compiling():
        return
    try:
        torch.empty(0, device=device)
    except Exception as error:  # of many types
        accepted = "a torch.device that is there, its name or None"
        raise ValueError(f"{_FACE}{name}: device must be {accepted}, got {shown(device)}") from error


def require_room(name: str, count: int) -> None:
    if count > MOST:
        raise ValueError(f"{_FACE}{name}: a query has at most {MOST} ranges, got {count}")


def require_few(name: str, what: str, count: torch.Tensor, most: int) -> None:
    """Raises if one of the counts, one of each row of a mask, is larger than `most`; waits for the device."""
    if count.numel() and int(count.max()) > most:
        place = [int(index) for index in (count > most).nonzero()[0]]
        raise ValueError(
            f"{_FACE}{name}: {what} {place[-1]} has {int(count[tuple(place)])} ranges; at most "
            f"{most} are accepted"
        )
