"""Continuous batching of transformers, where attention reads the cache in place.

transformers keeps the keys and values of all layers in one tensor. A layer's pages are views of it, of shape
(pages, page_size, heads_kv, head_dim). PagedAttentionCache.update writes the new rows and gathers all rows of
all sequences; what install puts in its place writes the new rows and passes the pages on.

Source: generation/continuous_batching of transformers 5.23 and 5.24.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, modeling_flash_attention_utils
from transformers.generation.continuous_batching import PagedAttentionCache

import flash_cute
from flash_cute.compat import flash_attn_interface

# transformers batches continuously by names with "flash" in them. Where a 2 or a 3 follows, batches of single
# queries come with a block table, so that the host need not list the rows of the cache.
NAME = "cute_flash_attention_3"


class Pages(NamedTuple):
    """What flash_cute.attention_varlen takes of a layer's cache."""

    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor
    seqused_k: torch.Tensor


_gathering_update = PagedAttentionCache.update
_lazy_imports = modeling_flash_attention_utils._lazy_imports


@torch.compiler.disable  # as transformers' own
def _update(
    self: PagedAttentionCache,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    layer_idx: int,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """PagedAttentionCache.update. kwargs, which it changes, get "pages" where attention is to read the cache.

    A layer with a sliding window keeps a ring of rows, where new ones take the place of some that other
    queries of the same batch see. So transformers gathers them, at most window - 1 old rows a sequence.
    """
    allocator = self.layer_to_allocator[layer_idx]
    in_place = allocator.supports_block_table and _reads_pages(key_states.device)
    if self.config._attn_implementation != NAME or not in_place:
        return _gathering_update(self, key_states, value_states, layer_idx, kwargs)
    kwargs["cu_seq_lens_k"] = kwargs["cu_seq_lens_k"][allocator.layer_type]
    k, v = (x[0].transpose(0, 1) for x in (key_states, value_states))
    k_cache, v_cache = (x.transpose(1, 2) for x in allocator.get_cache_for_block_table(layer_idx))
    if kwargs["block_table"] is None and not kwargs["read_index"][allocator.index].numel():
        flash_cute.append_kv(k, v, k_cache, v_cache, slots=kwargs["write_index"][allocator.index])
        return key_states, value_states  # all keys that there are
    if layer_idx == allocator.layer_indices[0]:  # once in a forward, or in a CUDA graph, for all its layers
        allocator.flash_cute_places = _places(allocator, kwargs)
    block_table, used, before = allocator.flash_cute_places
    offsets = kwargs["cu_seq_lens_q"]
    flash_cute.append_kv(k, v, k_cache, v_cache, before, block_table=block_table, cu_seqlens=offsets)
    kwargs |= {"pages": Pages(k_cache, v_cache, block_table, used), "block_table": None}
    return key_states, value_states


def _places(allocator: Any, kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The block table, and the lengths of the keys with the new ones and without."""
    begins = kwargs["cu_seq_lens_k"]
    used = begins.diff()
    before = used - kwargs["cu_seq_lens_q"].diff()
    if kwargs["block_table"] is not None:
        return kwargs["block_table"][allocator.index], used, before
    # transformers lists rows: those of a sequence from its first on, so each page_size-th begins a page.
    page_size, rows = allocator.tokens_per_page, kwargs["read_index"][allocator.index]
    first = torch.arange(0, kwargs["max_length_k"][allocator.layer_type], page_size, device=rows.device)
    places = (begins[:-1, None] + first).clamp(max=rows.shape[0] - 1)  # past a sequence's end is not used
    return (rows[places] // page_size).to(torch.int32), used, before


def _reads_pages(device: torch.device) -> bool:
    """Whether pages are read in place: not on other GPUs than Hopper, where that has not been measured."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) == (9, 0)


def _imports(implementation: str | None, *args: Any, **options: Any) -> tuple:
    """What transformers imports for the name of an implementation, its own of unpadding included."""
    if implementation != NAME:
        return _lazy_imports(implementation, *args, **options)
    names = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
    functions = [getattr(flash_attn_interface, name) for name in names]
    if torch.cuda.is_available() and not _reads_pages(torch.device("cuda")):
        functions[2] = None  # so there are no block tables
    return *functions, modeling_flash_attention_utils._pad_input, modeling_flash_attention_utils._unpad_input


# Model types that list the flash attention they take; transformers replaces any other by the first of these.
# Theirs needs sinks and windows. That of other types with such a list, minimax_m3_vl so far, may be sparse.
_OF_A_LIST = {
    "flint",
    "gpt_oss",
    "granite_swa",
    "granitemoe_swa",
    "mimo_v2_flash",
    "openai_privacy_filter",
}
_check_implementation = PreTrainedModel._check_and_adjust_attn_implementation


def _checked(self: PreTrainedModel, attn_implementation: str | None, *args: Any, **options: Any) -> str:
    """PreTrainedModel._check_and_adjust_attn_implementation, which keeps our name for these model types."""
    listed = self._compatible_flash_implementations
    if attn_implementation == NAME and listed is not None and NAME not in listed:
        model_type = self.config.model_type
        if model_type not in _OF_A_LIST:
            raise NotImplementedError(
                f"flash_cute.transformers: attn_implementation of {type(self).__name__} must be eager or of "
                f'its list {listed}, as its attention may be sparse, got "{NAME}"'
            )
        listed.append(NAME)
    return _check_implementation(self, attn_implementation, *args, **options)


def install() -> None:
    PreTrainedModel._check_and_adjust_attn_implementation = _checked
    PagedAttentionCache.update = _update
    modeling_flash_attention_utils._lazy_imports = _imports
