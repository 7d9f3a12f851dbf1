"""Ranges from masks of PyTorch's FlexAttention."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from flash_cute._torch.checks import require_stored
from flash_cute.masks.parts import (
    MOST,
    require_device,
    require_length,
    require_values,
    runs_in,
    with_least_room,
)
from flash_cute.wording import hinting, shown

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_PAIRS = 2**26  # evaluated at a time: bounds the memory


@hinting("flash_cute.masks")
def from_mask_mod(
    mask_mod: MaskMod,
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    *,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """The ranges of a mask_mod of FlexAttention, by its value for every pair. It waits for the device.

    Args:
        mask_mod: (b, h, q_idx, kv_idx) -> bool, of integers without dimensions, as FlexAttention takes it.
            What it captures is on `device`, and it does not look at h.
        batch, seqlen_q, seqlen_k: of the call; 1 as batch is one mask for all entries.

    Returns (batch, 1, seqlen_q, R, 2) with the least R that has room.

    Raises ValueError where the keys of a query lie in more than four runs, or mask_mod looks at h.
    """
    sizes = {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    batch, seqlen_q, seqlen_k = (require_length("from_mask_mod", *size) for size in sizes.items())
    require_device("from_mask_mod", device)
    if not callable(mask_mod):
        kind = type(mask_mod).__name__
        raise TypeError(
            f"flash_cute.masks.from_mask_mod: mask_mod is of type {kind}; a function (b, h, q_idx, kv_idx) "
            "is accepted"
        )
    step = max(1, _PAIRS // max(1, batch * seqlen_k))
    found = []
    for first in range(0, seqlen_q, step):
        rows = torch.arange(first, min(first + step, seqlen_q), device=device)
        entries, keys = torch.arange(batch, device=device), torch.arange(seqlen_k, device=device)
        seen = _values("from_mask_mod", mask_mod, entries, rows, keys.expand(batch, -1))
        found.append(runs_in(seen, MOST))
    return with_least_room("from_mask_mod", found, (batch, seqlen_q), device)


@hinting("flash_cute.masks")
def from_block_mask(block_mask: BlockMask) -> torch.Tensor:
    """The ranges of FlexAttention's BlockMask. It waits for the device, several times.

    Blocks that it lists as full are runs, and its mask_mod is evaluated in the partial ones alone.

    Args:
        block_mask: as create_block_mask makes it, whose heads are alike; not a slice, which has no mask_mod.

    Returns (batch or 1, 1, seqlen_q, R, 2) of its seq_lengths, with the least R that has room.

    Raises ValueError where the keys of a query lie in more than four runs, or heads differ.
    """
    if not hasattr(block_mask, "kv_num_blocks"):
        kind = type(block_mask).__name__
        raise TypeError(
            f"flash_cute.masks.from_block_mask: block_mask is of type {kind}; a BlockMask is accepted"
        )
    if block_mask.kv_num_blocks.dim() != 3:
        raise ValueError(
            "flash_cute.masks.from_block_mask: kv_num_blocks must have shape (batch, heads, blocks), got "
            f"{tuple(block_mask.kv_num_blocks.shape)}"
        )
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        require_stored("masks.from_block_mask", **{f"block_mask.{name}": getattr(block_mask, name)})
    require_values("from_block_mask", block_mask.kv_num_blocks)
    partial = _listed(block_mask.kv_num_blocks, block_mask.kv_indices)
    full = torch.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None:
        full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    if any(bool((blocks != blocks[:, :1]).any()) for blocks in (partial, full)):
        raise ValueError(
            "flash_cute.masks.from_block_mask: block_mask has other blocks for other heads; a mask alike for "
            "all heads is accepted"
        )
    partial, full = partial[:, 0], full[:, 0]
    (seqlen_q, _), height = block_mask.seq_lengths, block_mask.BLOCK_SIZE[0]
    found = []
    for block, first in enumerate(range(0, seqlen_q, height)):
        rows = torch.arange(first, min(first + height, seqlen_q), device=partial.device)
        found.append(_runs_of_blocks(block_mask, rows, partial[:, block], full[:, block]))
    return with_least_room("from_block_mask", found, (len(partial), seqlen_q), partial.device)


def _listed(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Booleans, (batch, heads, blocks of queries, blocks of keys): which are among the first `counts`."""
    columns = indices.shape[-1]
    counted = torch.arange(columns, device=indices.device) < counts.unsqueeze(-1)
    found = counted.new_zeros((*indices.shape[:-1], columns + 1))
    # What is not counted goes to a column after the last.
    return found.scatter(-1, indices.long().where(counted, columns), True)[..., :columns]


def _runs_of_blocks(block_mask: BlockMask, rows: torch.Tensor, partial: torch.Tensor, full: torch.Tensor):
    """runs_in of these rows, of a block of queries, from its blocks of keys (batch, blocks).

    A column that no entry has as a partial block is looked at as one key.
    """
    seqlen_k, width = block_mask.seq_lengths[1], block_mask.BLOCK_SIZE[1]
    sizes = torch.where(partial.any(0), width, 1)
    block = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes)
    place = torch.arange(len(block), device=sizes.device) - (sizes.cumsum(0) - sizes)[block]
    key = block * width + place
    seen = full[:, None, block].repeat(1, len(rows), 1)
    pieces = partial.nonzero()
    step = max(1, _PAIRS // (len(rows) * width))
    for entries, blocks in zip(*(x.split(step) for x in pieces.unbind(1)), strict=True):
        keys = blocks.unsqueeze(1) * width + torch.arange(width, device=blocks.device)
        # Behind the last key mask_mod may have nothing to look at.
        of_piece = _values(
            "from_block_mask", block_mask.mask_mod, entries, rows, keys.clamp(max=seqlen_k - 1)
        )
        begins = (sizes.cumsum(0) - sizes)[blocks].unsqueeze(1) + torch.arange(width, device=blocks.device)
        seen[entries[:, None], :, begins] = of_piece.transpose(1, 2)
    start, end, count = runs_in(seen & (key < seqlen_k), MOST)
    edges = torch.cat((key, key.new_full((1,), seqlen_k))).clamp(max=seqlen_k).int()
    return edges[start], edges[end], count


class _Head(torch.Tensor):
    """What mask_mod gets as h: whatever it does with it is told."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise _HeadIsRead


class _HeadIsRead(Exception):
    pass


def _values(
    name: str, mask_mod: MaskMod, entries: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """mask_mod of each entry's rows and of its own keys, (entries, keys): booleans (entries, rows, keys)."""
    from torch.nn.attention.flex_attention import create_mask

    size = len(entries), len(rows), keys.shape[1]
    if 0 in size:  # torch.vmap has none
        return torch.zeros(size, dtype=torch.bool, device=rows.device)
    head = torch.zeros((), dtype=torch.int64, device=rows.device).as_subclass(_Head)

    def at(entry, _, row, key):
        try:
            seen = mask_mod(entries[entry], head, rows[row], keys[entry, key])
        except _HeadIsRead:
            raise ValueError(
                f"flash_cute.masks.{name}: mask_mod looks at its head; a mask alike for all heads is accepted"
            ) from None
        except Exception as error:
            raise ValueError(f"flash_cute.masks.{name}: mask_mod raised {shown(error)}") from error
        if not isinstance(seen, torch.Tensor) or seen.dtype != torch.bool or seen.dim() > 0:
            got = f"{seen.dtype} {tuple(seen.shape)}" if isinstance(seen, torch.Tensor) else shown(seen)
            raise ValueError(
                f"flash_cute.masks.{name}: mask_mod must return torch.bool of no dimensions, got {got}"
            )
        return seen

    return create_mask(at, size[0], 1, *size[1:], device=rows.device)[:, 0]
