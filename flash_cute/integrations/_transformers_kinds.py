"""Which masks transformers' mask functions say without ranges: causal, bidirectional, windows, packed.

Source: masking_utils.py of transformers 5.23 and 5.24.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import masking_utils

from flash_cute.integrations._transformers_ranges import made_by

# The conditions whose intersection each accepted mask is, and whether it is bidirectional, a window, packed.
_CAUSAL, _PACKED, _WINDOW = "causal_mask_function", "packed_sequence_mask_function", "sliding_window_overlay"
_KINDS = {
    (_CAUSAL,): (False, False, False),
    (_CAUSAL, _WINDOW): (False, True, False),
    # On places in the row, up to some version before transformers 5.23, or in the packed sequence.
    (_CAUSAL, _PACKED): (False, False, True),
    (_CAUSAL, _PACKED, _WINDOW): (False, True, True),
    (f"packed {_CAUSAL}", _PACKED): (False, False, True),
    (f"packed {_CAUSAL}", f"packed {_WINDOW}", _PACKED): (False, True, True),
    ("bidirectional_mask_function",): (True, False, False),
    ("bidirectional_mask_function", "sliding_window_bidirectional_overlay"): (True, True, False),
}
_SAID = {
    "blockwise_overlay": "blocks of block_sequence_ids or token_type_ids",
    "chunked_overlay": "chunks of attention_chunk_size",
}


def kind_of(mask_function: Callable, local_size: int | None) -> tuple[bool, bool, bool] | None:
    """Whether a mask function's mask is bidirectional, a window of local_size, packed; None for others."""
    conditions = conditions_of(mask_function)
    return _KINDS.get(tuple(sorted(name.removesuffix(f"({local_size})") for name in conditions)))


def conditions_of(mask_function: Callable) -> list[str]:
    """What a mask function of transformers is the intersection of, by the names of what makes it there.

    Anything else is one condition, with a name that no accepted one has.
    """
    name, held = made_by(mask_function)
    if held is None:
        return [f"the mask function {name}"]
    if name == "and_masks" and "mask_functions" in held:
        return [condition for part in held["mask_functions"] for condition in conditions_of(part)]
    if name == "or_masks" and "mask_functions" in held:
        return [f"({' or '.join(' and '.join(conditions_of(part)) for part in held['mask_functions'])})"]
    if name == "remap_positions_for_packed_sequence" and "mask_function" in held:
        return [f"packed {condition}" for condition in conditions_of(held["mask_function"])]
    return [f"{name}({held['sliding_window']})" if "sliding_window" in held else _SAID.get(name, name)]


_AND_MASK = masking_utils.and_masks(masking_utils.causal_mask_function).__code__


def assumed_kind(
    mask_function: Callable, local_size: int | None, bidirectional: bool, packed: bool, device: Any
) -> tuple[bool, bool, bool]:
    """kind_of under Dynamo, which reads no closure in torch 2.11.

    What and_masks has made is taken for what transformers makes with these arguments, if it only compares.
    """
    if mask_function is masking_utils.causal_mask_function:
        return False, False, False
    if mask_function is masking_utils.bidirectional_mask_function:
        return True, False, False
    windowed = local_size is not None
    if getattr(mask_function, "__code__", None) is not _AND_MASK or not (windowed or packed):
        raise refused(f"the mask function {mask_function.__name__} under torch.compile")
    nowhere = torch.arange(0, device=device)
    with _Comparisons():
        mask_function(nowhere, 0, nowhere, nowhere)
    return bidirectional, windowed, packed


# What the accepted masks call, of either module. or_masks begins with new_zeros, and chunks are a quotient.
_COMPARISONS = frozenset(
    getattr(module, form)
    for name in ("new_ones", "to", "getitem", "sub", "abs", "le", "gt", "ge", "eq", "and")
    for form in (name, f"__{name}__")
    for module in (torch.Tensor, operator)
    if hasattr(module, form)
)


class _Comparisons(TorchFunctionMode):
    """Refuses a mask function that is more than an intersection of comparisons, when it is called."""

    def __torch_function__(self, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in _COMPARISONS:
            raise refused("a mask function that is more than comparisons under torch.compile")
        return function(*args, **(kwargs or {}))


def refused(found: str) -> NotImplementedError:
    return NotImplementedError(
        "flash_cute.transformers: the mask must be made of transformers' causal, bidirectional, "
        f"sliding-window, chunked, blockwise and packed ones, got {found}"
    )
