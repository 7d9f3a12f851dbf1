"""Where the sequences of a call on the CPU lie in its tensors, and the scale and the window of all."""

from __future__ import annotations

from collections.abc import Iterator

import torch

# Of what is allocated on the CPU, whatever torch.set_default_dtype says.
FLOAT = {"dtype": torch.float32, "device": "cpu"}


def scale_and_window(
    q, causal, softmax_scale=None, window_left=None, window_right=None, family=None, tf32=False
):
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return scale, window_left, 0 if causal else window_right


def offsets_of(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor | None) -> dict[str, torch.Tensor]:
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    return {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}


def entries(packed: bool, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors as batches, of packed sequences with one entry: all have heads, then rows."""
    if not packed:
        return list(tensors)
    return [x if x.dim() == 4 else (x.transpose(0, 1) if x.dim() == 3 else x).unsqueeze(0) for x in tensors]


def places(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...], int]]:
    """Where each sequence's queries that count are in entries, its keys, and how many do not at the begin.

    Keys that don't count at the begin leave the mask where it is, as it is aligned at the end.
    """
    packed = cu_seqlens_q is not None
    batch = cu_seqlens_q.numel() - 1 if packed else q.shape[0]
    rows = rows_that_count(batch, q.shape[2], cu_seqlens_q, seqused_q, None)
    all_keys = rows_that_count(batch, k.shape[2], cu_seqlens_k, seqused_k, None)
    keys = rows_that_count(batch, k.shape[2], cu_seqlens_k, seqused_k, leftpad_k)
    for sequence in range(batch):
        entry_q, entry_k = (
            slice(0, 1) if offsets is not None else slice(sequence, sequence + 1)
            for offsets in (cu_seqlens_q, cu_seqlens_k)
        )
        first = keys[sequence].start - all_keys[sequence].start
        yield (entry_q, slice(None), rows[sequence]), (entry_k, slice(None), keys[sequence]), first


def rows_that_count(
    batch: int,
    size: int,
    offsets: torch.Tensor | None,
    used: torch.Tensor | None,
    skipped: torch.Tensor | None,
) -> list[slice]:
    """The rows that count of each sequence, among `size`, whatever values the tensors hold.

    offsets: int32 (batch + 1,), where sequences begin and end; without them each has all the rows. used,
    skipped: int32 (batch,), which of a sequence's rows count: those before used, but for the first, skipped.
    """
    offsets, used, skipped = (None if x is None else x.tolist() for x in (offsets, used, skipped))
    rows = []
    for sequence in range(batch):
        begin = min(max(offsets[sequence], 0), size) if offsets else 0
        end = min(max(offsets[sequence + 1], begin), size) if offsets else size
        end = min(max(begin + used[sequence], begin), end) if used else end
        begin = min(max(begin + skipped[sequence], begin), end) if skipped else begin
        rows.append(slice(begin, end))
    return rows
