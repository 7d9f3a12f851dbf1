"""FlashInfer's kernels for caches in pages, where it is installed: its FlashAttention-2, and XQA.

Their first calls compile them, for minutes.
"""

from __future__ import annotations

from functools import cache

import torch

from .base import PAGED, Call, CannotRun, Peer, turned

XQA_PAGES, XQA_GROUPS = (64,), (4, 8, 32)  # each combination is compiled when it is first called


@cache
def infer() -> tuple:
    """FlashInfer, and what its calls share: a workspace of its wrappers, and XQA's with semaphores."""
    try:
        import flashinfer.decode
        import flashinfer.prefill
        import flashinfer.xqa
    except Exception as error:  # of any kind where the packages that it builds on are others
        raise CannotRun(f"FlashInfer is not installed: {error}") from error
    workspace, of_xqa, semaphores = (
        torch.zeros(size, dtype=torch.uint8, device="cuda") for size in (2**29, 2**29, 2**23)
    )
    return flashinfer, workspace, (of_xqa, semaphores.view(torch.uint32))


def require_one_width(cell) -> None:
    if len({*cell.widths}) > 1:
        raise CannotRun("called with v as wide as q and k only")


class FlashInfer(Peer):
    """Its FlashAttention-2 on tensor cores, planned on the host for these lengths, which is not timed."""

    calls = frozenset({PAGED})

    def cached(self, cache, page: int) -> Call:
        cell = cache.cell
        require_one_width(cell)
        module, workspace, _ = infer()
        counts = torch.tensor([0, *cache.pages_of(page)], dtype=torch.int32)
        last = torch.tensor([(length - 1) % page + 1 for length in cell.lengths], dtype=torch.int32)
        pages = counts.cumsum(0).to(torch.int32), cache.page_numbers(page), last
        sizes = cell.heads_q, cell.heads_kv, cell.head_dim, page
        dtypes = dict.fromkeys(("q_data_type", "kv_data_type"), cache.q.dtype)
        if cell.queries == 1:
            wrapper = module.decode.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=True, backend="fa2"
            )
            wrapper.plan(*pages, *sizes, **dtypes)
        else:
            wrapper = module.prefill.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
            offsets = torch.arange(len(cell.lengths) + 1, dtype=torch.int32) * cell.queries
            wrapper.plan(offsets, *pages, *sizes, causal=True, **dtypes)
        out = torch.empty_like(cache.packed_q)

        def call(k, v):
            wrapper.run(cache.packed_q, (turned(k), turned(v)), out=out)
            return cache.padded(out)

        return call


class Xqa(Peer):
    """FlashInfer's port of TensorRT-LLM's kernel; it needs no plan."""

    calls = frozenset({PAGED})

    def cached(self, cache, page: int) -> Call:
        cell = cache.cell
        require_one_width(cell)
        if cell.packed or page not in XQA_PAGES or cell.heads_q // cell.heads_kv not in XQA_GROUPS:
            raise CannotRun("not called with chunks, other pages or groups of heads")
        module, _, shared = infer()
        table, used = cache.table(page), cache.used.view(torch.uint32).unsqueeze(1)
        q, mask = turned(cache.q).unsqueeze(1), None  # (batch, 1, queries, heads_q, head_dim)
        if cell.queries == 1:
            q = q.squeeze(2)
        else:  # 32 bits of a query tell which of the new keys it sees
            rows = [[(2 << query) - 1, 0] for query in range(cell.queries)]
            rows = torch.tensor(rows, dtype=torch.int16, device=cache.device).repeat(len(cell.lengths), 1, 1)
            mask = rows.view(torch.uint16)
        out = torch.empty_like(q)
        options = {"q_seq_len": cell.queries, "mask": mask}

        def call(k, v):
            rows_first = turned(k), turned(v)
            module.xqa.xqa(q, *rows_first, table, used, out, *shared, cell.heads_kv, page, **options)
            return out.view(len(cell.lengths), cell.queries, cell.heads_q, -1).transpose(1, 2)

        return call
