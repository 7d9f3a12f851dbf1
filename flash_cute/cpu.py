"""Attention for CPU tensors in float32, by PyTorch's own CPU flash attention.

csrc/forward_cpu.cpp comes here where it cannot let that compute in the inputs' own type.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

# Queries per call with a mask: bounds its memory, and a call gets only the keys that its queries can see.
_MASKED_ROWS = 512


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """flash_cute::_forward_cpu: the forward for checked arguments without defaults; a limit of -1 is none.

    Returns out like q, (batch, heads_q, seqlen_q, head_dim), and lse, float32 (batch, heads_q, seqlen_q); of
    packed sequences (both cu_seqlens are given) like q, (total_q, heads_q, head_dim), and (heads_q, total_q).
    """
    mask = softmax_scale, window_left, window_right
    packed = cu_seqlens_q is not None
    if not packed and seqused_q is None and seqused_k is None and leftpad_k is None:
        return _dense(q, k, v, *mask)

    out = torch.zeros_like(q)
    lse = torch.full(q.shape[1::-1] if packed else q.shape[:3], -torch.inf)
    batch = cu_seqlens_q.numel() - 1 if packed else q.shape[0]
    # Packed sequences as ranges of rows of the one entry of a batch.
    q, k, v, outs = (x.transpose(0, 1).unsqueeze(0) if packed else x for x in (q, k, v, out))
    lses = lse.unsqueeze(0) if packed else lse
    rows = ranges(batch, q.shape[2], cu_seqlens_q, seqused_q, None)
    keys = ranges(batch, k.shape[2], cu_seqlens_k, seqused_k, leftpad_k)
    for sequence in range(batch):
        entry = slice(0, 1) if packed else slice(sequence, sequence + 1)
        # Keys that don't count at the begin leave the mask where it is, as it is aligned at the end.
        queries, reachable = (entry, slice(None), rows[sequence]), (entry, slice(None), keys[sequence])
        outs[queries], lses[queries] = _part(q[queries], k[reachable], v[reachable], *mask)
    return out, lse


def ranges(
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
    ranges = []
    for sequence in range(batch):
        begin = min(max(offsets[sequence], 0), size) if offsets else 0
        end = min(max(offsets[sequence + 1], begin), size) if offsets else size
        end = min(max(begin + used[sequence], begin), end) if used else end
        begin = min(max(begin + skipped[sequence], begin), end) if skipped else begin
        ranges.append(slice(begin, end))
    return ranges


def _dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    window_left: int,
    window_right: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """forward where all the rows count."""
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    shift, unlimited = seqlen_k - seqlen_q, seqlen_q + seqlen_k
    left, right = (unlimited if limit < 0 else limit for limit in (window_left, window_right))
    blind = max(0, -shift - right)  # the first rows, which see no key
    if blind or not (q.numel() and k.numel()):
        out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf)
        if q.numel() and k.numel() and blind < seqlen_q:
            seeing = (slice(None), slice(None), slice(blind, None))
            out[seeing], lse[seeing] = _part(q[seeing], k, v, softmax_scale, window_left, window_right)
        return out, lse

    full_to_the_left = left >= seqlen_k - 1
    full = full_to_the_left and right >= seqlen_q - 1
    causal = full_to_the_left and right == 0 and shift == 0  # PyTorch's causal mask is aligned top left
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3])
    q, k, v = (x.to(torch.float32, memory_format=torch.contiguous_format) for x in (q, k, v))

    def blocks(step: int) -> Iterator[tuple[slice, slice]]:
        """Rows, `step` at a time, and the keys that they see."""
        for begin in range(0, seqlen_q, step):
            rows = slice(begin, min(begin + step, seqlen_q))
            yield rows, slice(max(0, begin + shift - left), min(seqlen_k, rows.stop + shift + right))

    for rows, keys in blocks(seqlen_q if full or causal else _MASKED_ROWS):
        mask = None if full or causal else _mask(rows, keys, shift, left, right)
        out[:, :, rows], lse[:, :, rows] = _flash(
            q[:, :, rows], k[:, :, keys], v[:, :, keys], 0.0, causal, attn_mask=mask, scale=softmax_scale
        )
    # PyTorch's kernel gives an LSE and an out of 0 to rows whose scores are all -inf, or NaN.
    lowest, highest = (bound.item() for bound in lse.abs().aminmax())
    if not (lowest > 0 and highest < torch.inf):
        for rows, keys in blocks(_MASKED_ROWS):
            mask = _mask(rows, keys, shift, left, right)
            out[:, :, rows], lse[:, :, rows] = _plain(
                q[:, :, rows], k[:, :, keys], v[:, :, keys], mask, softmax_scale
            )
    return out, lse


def _part(q, k, v, softmax_scale, window_left, window_right) -> tuple[torch.Tensor, torch.Tensor]:
    """forward of some of a call's rows, which may allow what all of them did not."""
    window = {
        name: None if limit < 0 else limit
        for name, limit in (("window_left", window_left), ("window_right", window_right))
    }
    return torch.ops.flash_cute._forward.default(q, k, v, softmax_scale=softmax_scale, **window)


def _mask(rows: slice, keys: slice, shift: int, left: int, right: int) -> torch.Tensor:
    """float32 (rows, keys): 0 where a query sees a key, else -inf."""
    distance = torch.arange(keys.start, keys.stop) - torch.arange(rows.start, rows.stop).unsqueeze(1) - shift
    hidden = (distance < -left) | (distance > right)
    return torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)


def _plain(q, k, v, mask, scale) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) with the infinities and NaNs that PyTorch's operators give."""
    q, k, v = q.float(), *(x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * scale).masked_fill(mask.isneginf(), -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)
