"""Masks by name, as ranges of keys for flash_cute.forward and its likes.

    ranges = flash_cute.masks.documents(ids)
    out, lse = flash_cute.forward(q, k, v, ranges=ranges)

Each function returns the whole mask, so that the call says causal=False: int32 (batch or 1, 1, seqlen_q, R,
2), R half-open ranges [start, end) of keys for each query, or (total_q, R, 2) where positions of packed
queries are given. They are plain PyTorch on the device of their input, take memory and time in proportion to
seqlen, and don't wait for the device where nothing else is said. In the drawings a row is a query, a column a
key, and # is what it sees.

`queries` says where each query stands among the keys: a number n (0 to n - 1), or integers: (batch or 1,
seqlen_q), such as torch.arange(n) + used[:, None] after a cache of `used` keys, or (total_q,) of packed
queries, as positions() gives them. `device`: of the result where queries is a number and no tensor is given.
"""

from flash_cute.masks.conversion import from_dense, from_slices, intersection, positions, shift, union
from flash_cute.masks.drawing import show
from flash_cute.masks.flex import from_block_mask, from_mask_mod
from flash_cute.masks.named import (
    block_diffusion,
    causal,
    chunks,
    documents,
    images,
    padding,
    prefix,
    shared_prefix,
    sink_window,
)

__all__ = [
    "block_diffusion",
    "causal",
    "chunks",
    "documents",
    "from_block_mask",
    "from_dense",
    "from_mask_mod",
    "from_slices",
    "images",
    "intersection",
    "padding",
    "positions",
    "prefix",
    "shared_prefix",
    "shift",
    "show",
    "sink_window",
    "union",
]
