"""Batches whose keys and values are a cache in pages."""

from __future__ import annotations

from dataclasses import replace

import torch

from support.cases import BATCHES, SEEDS, Ragged, Sequence

# How the pages of K and V lie in memory: k and v of (pages, heads, page_size, head_dim).
LAYOUTS = {
    "heads first": lambda n, h, page, d: torch.empty(2, n, h, page, d),
    "rows first": lambda n, h, page, d: torch.empty(2, n, page, h, d).transpose(2, 3),
    "side by side": lambda n, h, page, d: torch.empty(n, page, h, 2, d).permute(3, 0, 2, 1, 4),
    "k and v in turns": lambda n, h, page, d: torch.empty(n, 2, page, h, d).permute(1, 0, 3, 2, 4),
    "layers": lambda n, h, page, d: torch.empty(n, 3, 2, h, page, d)[:, 1].transpose(0, 1),
}
PAGE_SIZES = 1, 2, 5, 16, 17, 64, 100, 128, 256
LENGTHS = {
    name: BATCHES[name]
    for name in ("unequal", "one query each", "used and left padding", "some empty", "many keys", "short")
} | {
    "a few queries": tuple(Sequence(4, keys) for keys in (5000, 1, 700, 0, 129)),
    "chunks beside single queries": (Sequence(300, 900), *(Sequence(1, 800 + 37 * i) for i in range(50))),
}


def for_kernel(sequences: tuple[Sequence, ...], kernel) -> tuple[Sequence, ...]:
    """On the CPU long ones are a tenth as long, where all rows count: only a GPU's kernels share out many."""

    def shortened(s: Sequence) -> Sequence:
        if s.rows_k < 400 or s.used_k is not None:
            return s
        return replace(s, rows_q=max(min(s.rows_q, 9), s.rows_q // 10), rows_k=s.rows_k // 10)

    return sequences if kernel.family else tuple(map(shortened, sequences))


def in_pages(batch: Ragged, page_size: int, layout: str) -> tuple[torch.Tensor, ...]:
    """k, v and the arguments of a batch whose valid keys lie in pages; what no query may use is NaN."""
    device, heads, head_dim = batch.k.device, batch.k.shape[1], batch.k.shape[-1]
    _, keys, values = batch.entries
    leftpad = batch.lengths.get("leftpad_k")
    skipped = leftpad.tolist() if leftpad is not None else [0] * len(batch.places)
    used = [skip + place[2].stop - place[2].start for skip, place in zip(skipped, batch.places, strict=True)]
    pages = [-(-rows // page_size) for rows in used]
    order = list(range(sum(pages) + 2))
    SEEDS.shuffle(order)
    kv = LAYOUTS[layout](len(order), heads, page_size, head_dim).to(device=device, dtype=torch.float32)
    cache = torch.full_like(kv, torch.nan).to(batch.k.dtype)
    table = torch.full((len(used), max(pages, default=0) + 1), -1, dtype=torch.int32)
    table.random_(-7, 2 * len(order))
    for index, (entry, _, place) in enumerate(batch.places):
        own, order = order[: pages[index]], order[pages[index] :]
        table[index, : len(own)] = torch.tensor(own, dtype=torch.int32)
        rows = torch.arange(skipped[index], used[index])
        at = torch.tensor(own, dtype=torch.long)[rows // page_size].to(device), (rows % page_size).to(device)
        for part, source in zip(cache, (keys, values), strict=True):
            part.transpose(1, 2)[at] = source[entry, :, place].transpose(0, 1)
    arguments = {name: x for name, x in batch.lengths.items() if name not in ("cu_seqlens_k", "seqused_k")}
    arguments["seqused_k"] = torch.tensor(used, dtype=torch.int32, device=device)
    return *cache, arguments | {"block_table": table.to(device)}
