"""The mask function of flash_cute.integrations.transformers, and the masks that it makes.

Source: masking_utils.py of transformers 5.23 and 5.24.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
import transformers
from transformers import masking_utils

from flash_cute import lengths
from flash_cute.integrations._transformers_kinds import assumed_kind, conditions_of, kind_of, refused
from flash_cute.integrations._transformers_later import say_later, say_what_is_known
from flash_cute.integrations._transformers_ranges import packed_ids, ranges_of
from flash_cute.masks.parts import MOST

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
if VERSION < (5, 4):  # which call masks otherwise
    raise ImportError(
        f"flash_cute.transformers: transformers must be 5.4 or newer, got {transformers.__version__}"
    )

NAME = "cute_attention"
_SUMS = torch.Tensor.add, torch.Tensor.__add__, torch.add
_holes_are_expected = False  # of padding on a GPU


@dataclass(frozen=True)
class CuteMask:
    """transformers' mask in the terms of flash_cute.forward, made once for all layers that share it.

    extent: (batch, q_length, kv_length) that it is for. options: causal or window. lengths: those of forward.
    offsets: int32, where packed sequences begin among the tokens of all rows, and the last ones end. factor:
    float32 (batch or 1, q_length or 1, 1, 1), NaN for queries whose keys are not all said, where padding has
    holes or four ranges do not suffice, else 1. ranges: those of forward. given: made by ranges_mask. bias:
    what a model has added to the mask, as BEiT adds its biases of positions.
    """

    extent: tuple[int, int, int]
    options: dict[str, Any]
    lengths: dict[str, torch.Tensor] = field(default_factory=dict)
    offsets: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    ranges: torch.Tensor | None = None
    given: bool = False
    bias: torch.Tensor | None = None

    # generate() makes the masks of a static cache before it calls the model, and some models make the mask of
    # the model inside them. That model takes it for padding of two dimensions, handles it so, and asks
    # cute_mask for the mask that goes with it.
    ndim = 2

    @property
    def shape(self) -> tuple[int, int]:
        return self.extent[0], self.extent[2]

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(str(self._left_to_attention(f".{name} of it")))

    def with_bias(self, bias: Any) -> CuteMask:
        """With a bias, (batch or 1, heads or 1, q_length or 1, kv_length), for attention to add to scores."""
        if not isinstance(bias, torch.Tensor) or bias.ndim != 4 or not bias.is_floating_point():
            raise self._left_to_attention("a call of add with it")
        return replace(self, bias=bias if self.bias is None else self.bias + bias)

    __add__ = __radd__ = with_bias

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> CuteMask:
        if function in _SUMS and len(args) == 2 and not kwargs and isinstance(args[1], cls):
            return args[1].with_bias(args[0])
        raise cls._left_to_attention(cls, f"a call of {function.__name__} with it")

    def _left_to_attention(self, found: str) -> NotImplementedError:
        if self.given:
            return NotImplementedError(
                "flash_cute.transformers: ranges_mask is accepted by the forward of a model that leaves its "
                f'mask to attn_implementation="{NAME}", got {found} by generate(), another implementation or '
                "the model"
            )
        return NotImplementedError(
            f"flash_cute.transformers: the mask must be left to attention, got {found} by the model; load "
            f'it without attn_implementation and call model.set_attn_implementation("{NAME}"), which leaves '
            'such models as they are, or take "eager"'
        )

    def contiguous(self) -> CuteMask:
        return self

    def to(self, *args, **options) -> CuteMask:
        """On another device, as accelerate asks for where a model lies on several."""
        tensors = [
            x
            for x in (*self.lengths.values(), self.offsets, self.factor, self.ranges, self.bias)
            if x is not None
        ]
        if not tensors:
            return self
        device = tensors[0].new_empty(0).to(*args, **options).device

        def move(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x.to(device)

        moved = {name: x.to(device) for name, x in self.lengths.items()}
        others = {name: move(getattr(self, name)) for name in ("offsets", "factor", "ranges", "bias")}
        return replace(self, lengths=moved, **others)

    def __getitem__(self, index: Any) -> CuteMask:
        """mask[:, :, -n:, :], the mask of the last n queries, as Gemma 4 takes it, or [:, :, 0:, :]."""
        all_of = slice(None)
        others = (*index[:2], *index[3:]) if isinstance(index, tuple) and len(index) == 4 else ()
        rows = index[2] if others == (all_of,) * 3 and isinstance(index[2], slice) else slice(1)
        start = rows.start or 0
        if (
            rows.stop is not None
            or rows.step is not None
            or start > 0
            or (start and self.offsets is not None)
        ):
            raise self._left_to_attention("a part of it" if self.given else f"{index} of it")
        batch, q_length, kv_length = self.extent
        dropped = max(q_length + start, 0) if start else 0
        given = dict(self.lengths)
        if "seqused_q" in given:
            given["seqused_q"] = (given["seqused_q"] - dropped).clamp(min=0)
        ranges = None if self.ranges is None else self.ranges[:, :, dropped:]
        factor = self.factor
        if factor is not None and factor.shape[1] > 1:
            factor = factor[:, dropped:]
        bias = self.bias
        if bias is not None and bias.shape[2] > 1:
            bias = bias[:, :, dropped:]
        extent = batch, q_length - dropped, kv_length
        return replace(self, extent=extent, lengths=given, ranges=ranges, factor=factor, bias=bias)

    def view(self, *size: int) -> CuteMask:
        return self


def ranges_mask(ranges: torch.Tensor, kv_length: int | None = None) -> CuteMask:
    """A mask of flash_cute.masks, to give a model as its attention_mask. It is that of all layers.

    Args:
        ranges: int32 (batch or 1, 1, q_length, R, 2), of the whole mask: causal, too.
        kv_length: how many keys there are, as many as queries by default.
    """
    if not isinstance(ranges, torch.Tensor):
        kind = type(ranges).__name__
        raise TypeError(f"flash_cute.transformers: ranges is of type {kind}; a torch.Tensor is accepted")
    if ranges.ndim != 5:
        raise ValueError(
            "flash_cute.transformers: ranges must have shape (batch or 1, 1, q_length, R, 2), got "
            f"{tuple(ranges.shape)}"
        )
    batch, _, q_length = ranges.shape[:3]
    return CuteMask(
        (batch, q_length, q_length if kv_length is None else kv_length), {}, ranges=ranges, given=True
    )


def expect_holes(expected: bool = True) -> None:
    """Whether padding on a GPU may have holes, keys that don't count between others that do; False at first.

    Nothing waits to look for them. Where they are expected, padding becomes up to four ranges of keys, else
    lengths, for which the kernels are faster, and what it has of holes gives NaN, and an error in a later
    call. On the CPU it is looked at.
    """
    global _holes_are_expected
    _holes_are_expected = expected


def cute_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | CuteMask | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    **options: Any,
) -> CuteMask:
    """The mask function that transformers calls for "cute_attention".

    Args:
        q_length, kv_length, q_offset, kv_offset: how many queries and keys there are, and the first ones'
            positions; q_offset is a tensor with a static cache.
        mask_function: transformers' function for the mask, but for the padding.
        attention_mask: bool (batch or 1, positions), True for tokens that are no padding.
        local_size: the sliding window, where mask_function has one.

    Raises:
        NotImplementedError: for masks that are not made of transformers' own, under torch.compile for other
            than causal, bidirectional, sliding-window and packed ones; for queries with more than four ranges
            of keys; on a GPU, where these and holes give NaN, for what an earlier call has found of them.
        ValueError: for padding that ends before the new tokens (not looked at with a static cache), or on a
            GPU with holes, where FLASH_CUTE_CHECK=1 looks for them.
    """
    say_what_is_known()
    if isinstance(attention_mask, CuteMask):
        return attention_mask
    if torch.compiler.is_dynamo_compiling():
        bidirectional = "allow_is_bidirectional_skip" in options
        # Packed sequences are looked for by transformers where there is neither padding nor a cache.
        packed = not (allow_is_causal_skip or bidirectional) and attention_mask is None
        packed = packed and isinstance(q_offset, int) and q_offset == 0 and q_length == kv_length
        if use_vmap:
            raise refused("and_mask_function or or_mask_function under torch.compile")
        kind = assumed_kind(mask_function, local_size, bidirectional, packed, device)
    else:
        kind = kind_of(mask_function, local_size)
    if attention_mask is not None:
        _check_padding(attention_mask, batch_size)
        attention_mask = attention_mask.expand(batch_size, -1)
    ahead = kind is None or not kind[0]  # may queries that stand after the padding's end see keys?
    if ahead and attention_mask is not None and isinstance(q_offset, int):
        _check_end(attention_mask, q_offset + q_length)
    extent = batch_size, q_length, kv_length
    holes = _may_have_holes(attention_mask, kv_length, kv_offset)
    if kind is not None and kind[2] and not torch.compiler.is_dynamo_compiling():
        whole = isinstance(q_offset, int) and q_offset == kv_offset == 0 and attention_mask is None
        if not (whole and q_length == kv_length and _are_runs(mask_function, kv_length, use_vmap)):
            kind = None
    if kind is None or holes:
        own = (torch.arange(q_length, device=device) + q_offset)[None]
        return _ranged(extent, mask_function, own, kv_offset, attention_mask, holes)
    bidirectional, windowed, packed = kind
    # Query i stands at key i + shift. flash_cute puts the last query at the last key that counts.
    shift = q_offset - kv_offset
    aligned = isinstance(shift, int) and shift + q_length == kv_length
    if bidirectional and windowed and not aligned:
        raise error(f"there are {q_length} queries and {kv_length} keys in a window to both sides", "as many")

    if not windowed:
        options = {"causal": not bidirectional}
    elif bidirectional:
        options = {"window": (local_size, local_size)}
    else:  # a causal window counts the query's own key, too
        options = {"window": (local_size - 1, 0)}
    everything = bidirectional and not windowed  # is seen, whatever stands where
    if packed:
        return CuteMask(extent, options, offsets=_offsets(batch_size, q_length, mask_function, device))
    if attention_mask is None:
        if aligned or everything:
            return CuteMask(extent, options)
        end = torch.as_tensor(shift + q_length, device=device).to(torch.int32)
        return CuteMask(extent, options, {"seqused_k": end.expand(batch_size).contiguous()})

    first, end, factor = _padding(attention_mask, kv_length, kv_offset)
    given = {"leftpad_k": first, "seqused_k": end}
    if not everything:
        end = end.clamp(max=shift + q_length)
        given = {"leftpad_k": first.minimum(end), "seqused_k": end, "seqused_q": (end - shift).clamp(min=0)}
    given = {name: tensor.to(torch.int32) for name, tensor in given.items()}
    return CuteMask(extent, options, given, factor=factor)


def _check_padding(attention_mask: torch.Tensor, batch_size: int) -> None:
    if attention_mask.ndim != 2 or attention_mask.shape[0] not in (1, batch_size):
        raise NotImplementedError(
            f"flash_cute.transformers: attention_mask must have shape ({batch_size} or 1, positions), or be "
            f"made by ranges_mask, got shape {tuple(attention_mask.shape)}"
        )


def _check_end(attention_mask: torch.Tensor, end: int) -> None:
    if attention_mask.shape[1] < end:
        raise ValueError(
            f"flash_cute.transformers: attention_mask has {attention_mask.shape[1]} positions; {end}, those "
            "before and the new ones, are accepted"
        )


def _ranged(
    extent: tuple[int, int, int],
    mask_function: Callable,
    own: torch.Tensor,
    kv_offset: int,
    attention_mask: torch.Tensor | None,
    holes: bool,
) -> CuteMask:
    """The mask of a mask function as ranges, and the padding as lengths, or with holes as more ranges."""
    present = _present(attention_mask, extent[2], kv_offset) if holes else None
    found = ranges_of(mask_function, own, kv_offset + extent[2], kv_offset, present)
    if found is None:
        raise refused(" and ".join(conditions_of(mask_function)))
    ranges, count = found
    factor, given = None, {}
    if count is not None and _is_looked_at(count):
        if (count > MOST).any():
            place = [int(index) for index in (count > MOST).nonzero()[0]]
            raise NotImplementedError(f"{_TOO_MANY}; sequence {place[0]} has more for query {place[1]}")
        ranges = ranges[..., : max(1, int(count.max()) if count.numel() else 0), :]
    elif count is not None:
        say_later(count > MOST, f"{_TOO_MANY}; an earlier call had more, so NaN")
        factor = torch.where(count > MOST, torch.nan, 1.0)[..., None, None]
    if attention_mask is not None and not holes:
        first, end, of_padding = _padding(attention_mask, extent[2], kv_offset)
        factor = of_padding if factor is None else factor * of_padding
        given = {"leftpad_k": first.to(torch.int32), "seqused_k": end.to(torch.int32)}
    return CuteMask(extent, {}, given, factor=factor, ranges=ranges.contiguous())


_TOO_MANY = f"flash_cute.transformers: the mask must have at most {MOST} ranges of keys for each query"


def _may_have_holes(attention_mask: torch.Tensor | None, kv_length: int, kv_offset: int) -> bool:
    """Are there holes in padding, or are they expected where it isn't looked at? False under a compiler."""
    if attention_mask is None or torch.compiler.is_compiling():
        return False
    if attention_mask.device.type != "cpu":
        return _holes_are_expected
    if not _is_looked_at(attention_mask):
        return False
    return bool((_runs(_present(attention_mask, kv_length, kv_offset)) > 1).any())


def _is_looked_at(attention_mask: torch.Tensor) -> bool:
    """Are values of padding read? They wait for a GPU, where FLASH_CUTE_CHECK asks for it."""
    reads = attention_mask.device.type == "cpu" or lengths.CHECKED
    return reads and lengths.are_known(attention_mask, attention_mask)


def _runs(present: torch.Tensor) -> torch.Tensor:
    """(batch,): how many runs of keys that count lie in each row."""
    return (present & ~torch.nn.functional.pad(present, (1, 0))[:, :-1]).sum(1)


def _are_runs(mask_function: Callable, length: int, of_the_caller: bool) -> bool:
    """Is each packed sequence of a mask function in one piece? Those that transformers has found are."""
    ids = packed_ids(mask_function)
    if ids.shape[1] != length:
        return False
    if not _is_looked_at(ids):
        made_by_transformers = "packed causal_mask_function" in conditions_of(mask_function)
        return not of_the_caller and (made_by_transformers or not _PLACES_ARE_REMAPPED)
    return bool((ids[:, 1:] >= ids[:, :-1]).all())


_PLACES_ARE_REMAPPED = hasattr(masking_utils, "remap_positions_for_packed_sequence")


def _offsets(batch_size: int, length: int, mask_function: Callable, device) -> torch.Tensor:
    """Where packed sequences begin among all tokens: where one doesn't see the token before it.

    As the host doesn't know how many there are, there are as many as tokens; those too many are empty.
    """
    row, token = torch.arange(batch_size, device=device)[:, None], torch.arange(length, device=device)[None]
    begins = ~mask_function(row, 0, token, token - 1) | (token == 0)
    places = torch.arange(batch_size * length + 1, device=device)  # and the end, no constant of the graph
    begins = torch.nn.functional.pad(begins.expand(batch_size, length).flatten(), (0, 1), value=True)
    return places.where(begins, places[-1]).sort().values.to(torch.int32)


_ACCEPTED = "padding at the start and at the end is accepted, any after expect_holes()"


def _padding(attention_mask: torch.Tensor, kv_length: int, kv_offset: int):
    """The first of the keys that are no padding, (batch,), the end of them, and a CuteMask's factor."""
    present = _present(attention_mask, kv_length, kv_offset)
    place = torch.arange(kv_length, device=present.device)
    end = (place + 1).where(present, 0).amax(1)
    first = place.where(present, kv_length).amin(1).minimum(end)
    holes = end - first != present.sum(1)
    if lengths.CHECKED and lengths.are_known(holes, holes) and holes.any():
        raise ValueError(
            f"flash_cute.transformers: the padding of sequence {int(holes.nonzero()[0])} has holes; "
            f"{_ACCEPTED}"
        )
    say_later(holes, f"flash_cute.transformers: padding of an earlier call has holes, so NaN; {_ACCEPTED}")
    factor = torch.where(holes, torch.nan, 1.0)
    return first, end, factor[:, None, None, None]


def _present(attention_mask: torch.Tensor, kv_length: int, kv_offset: int) -> torch.Tensor:
    """bool (batch, kv_length): which keys are no padding; those that a static cache awaits are."""
    present = attention_mask[:, kv_offset : kv_offset + kv_length]
    return torch.nn.functional.pad(present, (0, kv_length - present.shape[1]))


def error(found: str, accepted: str) -> NotImplementedError:
    return NotImplementedError(f"flash_cute.transformers: {found}; {accepted} is accepted")
