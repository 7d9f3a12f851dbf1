"""Kinds of ranges of keys, and the ranges of calls."""

from __future__ import annotations

from collections.abc import Callable

import torch

from support.cases import BATCHES, SEEDS, Ranged, Sequence, Shape


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEEDS.getrandbits(31))


def int32(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.int32)


# Of these (entries, queries, R): starts and ends, (entries, 1, queries, R, 2), for so many keys.
def anywhere(size, keys):
    return torch.randint(-keys // 4, keys + keys // 4 + 1, (size[0], 1, *size[1:], 2), generator=generator())


def ordered(size, keys):
    return anywhere(size, keys).sort(-1).values


def reversed_order(size, keys):
    """Touching ones, the last first, that together are all keys but a few."""
    cuts = (
        torch.randint(0, keys + 1, (size[0], 1, size[1], size[2] + 1), generator=generator()).sort(-1).values
    )
    return torch.stack((cuts[..., :-1], cuts[..., 1:]), -1).flip(-2)


def nested(size, keys):
    """Each range inside the one before."""
    middle = torch.randint(0, keys + 1, (size[0], 1, size[1], 1), generator=generator())
    width = torch.randint(0, keys + 1, (size[0], 1, *size[1:]), generator=generator()).sort(-1, True).values
    return torch.stack((middle - width // 2, middle + width // 2), -1)


def far_out(size, keys):
    """All keys by the largest numbers that there are, or none."""
    bounds = torch.iinfo(torch.int32)
    found = torch.tensor([[bounds.min, bounds.max], [bounds.max, bounds.min]])
    return found[torch.randint(0, 2, (size[0], 1, *size[1:]), generator=generator())]


def mostly_none(size, keys):
    """One query in twenty sees something; the others have empty ranges at any place."""
    found = anywhere(size, keys).sort(-1, descending=True).values
    seeing = torch.rand(size[0], 1, size[1], generator=generator()) < 0.05
    found[seeing] = torch.tensor([keys // 3, keys])
    return found


def blocks(size, keys):
    """Alike for 64 queries at a time, so that whole tiles are full, or hidden."""
    return ordered(size, keys)[:, :, torch.arange(size[1]) // 64]


KINDS = {
    kind.__name__: kind for kind in (anywhere, ordered, reversed_order, nested, far_out, mostly_none, blocks)
}


def make_ranges(shape: Shape, kind: Callable, count: int, broadcast: bool, device) -> torch.Tensor:
    size = 1 if broadcast else shape.batch, shape.seqlen_q, count
    return int32(kind(size, shape.seqlen_k)).to(device)


RAGGED = {
    name: BATCHES[name]
    for name in ("unequal", "some empty", "short", "used", "left padding", "used and left padding")
} | {"left padding of all": (Sequence(40, 60, leftpad=60), Sequence(50, 90, 50, 70, 69))}


def ranges_of_sequences(batch, sequences, kind, count, mask) -> tuple[torch.Tensor, list[Ranged]]:
    """The ranges of a call, and the masks of its sequences without the rows that do not count."""
    rows = batch.entries[0].shape[2]
    entries = 1 if batch.packed else len(sequences)
    # What rows that belong to no sequence hold is of no matter.
    ranges = int32(anywhere((entries, rows, count), 1000))
    masks = []
    for (entry, queries, _), sequence in zip(batch.places, sequences, strict=True):
        size = 1, queries.stop - queries.start, count
        own = int32(kind(size, max(1, sequence.rows_k)))
        ranges[entry, :, queries] = own[0]
        shifted = own.long() - sequence.leftpad
        masks.append(Ranged.of(mask, shifted.to(batch.q.device)))
    return ranges[0, 0] if batch.packed else ranges, masks
