"""The formulas of FLOP counters (torch.utils.flop_counter)."""

from __future__ import annotations


def forward(q: tuple[int, ...], k, v, *args, block_table=None, **kwargs) -> int:
    """As PyTorch counts its own attention: both products of all pairs, those that a mask hides too."""
    return 2 * (q[3] + v[3]) * q[0] * q[1] * q[2] * _keys(k, block_table)


def _keys(k: tuple[int, ...], block_table: tuple[int, int] | None) -> int:
    """The keys of a sequence that has all rows of a batch's entry, or of its pages."""
    return k[2] * (block_table[1] if block_table else 1)


def forward_varlen(q, k, v, cu_seqlens_q, *args, block_table=None, **kwargs) -> int:
    """Likewise, as if every sequence had keys of mean number: the lengths are on the device."""
    return 2 * (q[2] + v[-1]) * _pairs_of_packed(q, k, cu_seqlens_q, block_table)


def _pairs_of_packed(q, k, cu_seqlens_q, block_table=None) -> int:
    mean_k = _keys(k, block_table) if len(k) == 4 else -(-k[0] // max(1, cu_seqlens_q[0] - 1))
    return q[0] * q[1] * mean_k


def forward_out(q, k, v, out, *args, cu_seqlens_q=None, **kwargs) -> int:
    if cu_seqlens_q is None:
        return forward(q, k, v, **kwargs)
    return forward_varlen(q, k, v, cu_seqlens_q, **kwargs)


def backward(dout, dlse, q, k, v, *args, **kwargs) -> int:
    """Five products in place of two: three over the columns of q and k, two over those of v."""
    return 2 * (3 * q[3] + 2 * v[3]) * q[0] * q[1] * q[2] * k[2]


def bias_gradient(dout, dlse, q, k, v, *args, needs_dv=False, **kwargs) -> int:
    """Both products of the forward, for the scores and the gradients of the weights, and that of dv."""
    return forward(q, k, v) + needs_dv * forward((*q[:3], 0), k, v)


def weights(q, k, *args, **kwargs) -> int:
    """One product, that of the scores."""
    return 2 * q[3] * q[0] * q[1] * q[2] * k[2]


def backward_varlen(dout, dlse, q, k, v, out, lse, cu_seqlens_q, *args, **kwargs) -> int:
    return 2 * (3 * q[2] + 2 * v[2]) * _pairs_of_packed(q, k, cu_seqlens_q)
