"""flash_attn.layers.rotary: rotary embeddings in plain PyTorch, differentiable in what they rotate.

Names, arguments and return values are those of flash_attn 2.8. What is new in a cache is rotated by the
kernel that writes it, see flash_cute.append_kv.
"""

from __future__ import annotations

import torch

from flash_cute._cpu.append_kv import places_of, turned_by
from flash_cute.compat._translate import check_tensor
from flash_cute.wording import shown


def apply_rotary_emb(
    x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None,
):  # fmt: skip
    """x with its first rotary_dim columns rotated, computed in float32.

    Args:
        x: (batch, seqlen, heads, head_dim), or with cu_seqlens (total, heads, head_dim).
        cos, sin: (positions, rotary_dim / 2).
        interleaved: columns 2i and 2i + 1 are a pair; otherwise i and i + rotary_dim / 2.
        inplace: write into x, and return it.
        seqlen_offsets: the position of each sequence's first row, int or int32 (batch,). Rows that tensors
            put outside of the table are not rotated.
        cu_seqlens: int32 (batch + 1,), as in flash_cute.forward_varlen. max_seqlen: not needed.
    """
    _check(x, cos, sin, cu_seqlens, seqlen_offsets)
    packed = cu_seqlens is not None
    rows = x if packed else x.flatten(0, 1)
    sequence, place = places_of(x if packed else x.transpose(1, 2), None, cu_seqlens)
    if isinstance(seqlen_offsets, torch.Tensor):
        place = place + (seqlen_offsets[sequence] if len(seqlen_offsets) else 0)  # of an empty batch
    else:
        needed = seqlen_offsets + (0 if packed else x.shape[1])
        if seqlen_offsets < 0 or needed > cos.shape[0]:
            raise ValueError(
                f"flash_cute.compat: cos must have a row for each position, {seqlen_offsets} to "
                f"{needed - 1}, got {cos.shape[0]} rows"
            )
        place = place + seqlen_offsets
    inside = ((place >= 0) & (place < len(cos)) & (sequence >= 0)).unsqueeze(-1)
    place = place.clamp(0, max(len(cos) - 1, 0))
    cos, sin = cos[place].where(inside, 1), sin[place].where(inside, 0)
    turned = turned_by(rows, cos, sin, interleaved)
    turned = turned if packed else turned.unflatten(0, x.shape[:2])
    return x.copy_(turned) if inplace else turned


apply_rotary_emb_func = apply_rotary_emb  # its older name


class RotaryEmbedding(torch.nn.Module):
    """Rotates queries and keys in place by positions from seqlen_offset on.

    Args:
        dim: how many columns are rotated. base: of the frequencies, base^(-2i / dim).
        interleaved: as of apply_rotary_emb. scale_base (xPos): None.
        pos_idx_in_fp32: False, of older releases, computes the angles in the type of inv_freq.
    """

    def __init__(
        self, dim, base=10000.0, interleaved=False, scale_base=None, device=None, pos_idx_in_fp32=True
    ):
        super().__init__()
        if scale_base is not None:
            raise NotImplementedError(
                f"flash_cute.compat: scale_base is {shown(scale_base)}; None is accepted"
            )
        self.dim, self.base, self.interleaved = dim, float(base), interleaved
        self.pos_idx_in_fp32, self.scale_base, self.scale = pos_idx_in_fp32, None, None
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        self._seq_len_cached, self._cos_cached, self._sin_cached = 0, None, None

    def _compute_inv_freq(self, device=None):
        columns = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return 1.0 / self.base ** (columns / self.dim)

    def _update_cos_sin_cache(self, seqlen, device=None, dtype=None):
        cos = self._cos_cached
        fits = cos is not None and (cos.device, cos.dtype) == (device, dtype) and len(cos) >= seqlen
        if fits and not (self.training and cos.is_inference()):
            return
        frequencies = self.inv_freq.to(device)  # which a model may have scaled
        if self.pos_idx_in_fp32 and frequencies.dtype != torch.float32:  # rounded
            frequencies = self._compute_inv_freq(device)
        place = torch.arange(seqlen, device=device, dtype=frequencies.dtype)
        angles = torch.outer(place, frequencies)
        self._seq_len_cached, self._cos_cached = seqlen, angles.cos().to(dtype)
        self._sin_cached = angles.sin().to(dtype)

    def forward(self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None):
        """qkv, or (q, kv), whose queries and keys are rotated in place.

        Args:
            qkv: (batch, seqlen, 3, heads, head_dim), or with num_heads_q
                (batch, seqlen, num_heads_q + 2 * heads_kv, head_dim); with kv q, (batch, seqlen, heads,
                head_dim).
            kv: (batch, seqlen, 2, heads_kv, head_dim).
            seqlen_offset: int or int32 (batch,), the position of each sequence's first row.
            max_seqlen: the most positions, where seqlen_offset is a tensor.
        """
        if max_seqlen is None:
            offset = 0 if isinstance(seqlen_offset, torch.Tensor) else seqlen_offset
            max_seqlen = qkv.shape[1] + offset
        self._update_cos_sin_cache(max_seqlen, device=qkv.device, dtype=qkv.dtype)
        if kv is not None:
            parts = qkv, kv[:, :, 0]
        elif qkv.dim() == 5 and qkv.shape[2] == 3:
            parts = qkv[:, :, 0], qkv[:, :, 1]
        elif qkv.dim() == 4 and num_heads_q is not None and _is_grouped(qkv.shape[2], num_heads_q):
            heads_kv = (qkv.shape[2] - num_heads_q) // 2
            parts = (qkv[:, :, : num_heads_q + heads_kv],)
        else:
            raise ValueError(
                "flash_cute.compat: qkv must have shape (batch, seqlen, 3, heads, head_dim), or with "
                "num_heads_q (batch, seqlen, num_heads_q + 2 * heads_kv, head_dim), got "
                f"{tuple(qkv.shape)} and num_heads_q {shown(num_heads_q)}"
            )
        options = {"interleaved": self.interleaved, "inplace": True, "seqlen_offsets": seqlen_offset}
        for part in parts:
            apply_rotary_emb(part, self._cos_cached, self._sin_cached, **options)
        return qkv if kv is None else (qkv, kv)


def _is_grouped(heads: int, num_heads_q: object) -> bool:
    return isinstance(num_heads_q, int) and 0 < num_heads_q <= heads and (heads - num_heads_q) % 2 == 0


def _check(x, cos, sin, cu_seqlens, offsets):
    for name, tensor in {"x": x, "cos": cos, "sin": sin}.items():
        check_tensor(name, tensor)
    dims = 4 if cu_seqlens is None else 3
    if x.dim() != dims:
        accepted = "(batch, seqlen, heads, head_dim)" if dims == 4 else "(total, heads, head_dim)"
        raise ValueError(f"flash_cute.compat: x must have shape {accepted}, got {tuple(x.shape)}")
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(
            "flash_cute.compat: cos and sin must have shape (positions, rotary_dim / 2), rotary_dim up to "
            f"{x.shape[-1]}, got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if not x.is_floating_point():
        raise ValueError(f"flash_cute.compat: x must be of a floating type, got {x.dtype}")
    if cu_seqlens is not None:
        _check_integers("cu_seqlens", cu_seqlens, None)
    if not isinstance(offsets, int | torch.SymInt) or isinstance(offsets, bool):
        _check_integers("seqlen_offsets", offsets, x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1)


def _check_integers(name, tensor, entries):
    """Raises where it is no tensor of integers, (entries,), or with one entry at least."""
    check_tensor(name, tensor)
    fits = tensor.dim() == 1 and len(tensor) >= 1 if entries is None else tensor.shape == (entries,)
    if not fits or tensor.dtype not in (torch.int32, torch.int64):
        shape = "(batch + 1,)" if entries is None else f"({entries},)"
        raise ValueError(
            f"flash_cute.compat: {name} must hold integers of shape {shape}, got {tensor.dtype} "
            f"{tuple(tensor.shape)}"
        )
