"""flash_cute as an attention implementation of transformers (version 5).

    import flash_cute.integrations.transformers

    model = AutoModelForCausalLM.from_pretrained(..., dtype="bfloat16", attn_implementation="cute_attention")

The import registers the name with transformers' AttentionInterface and AttentionMaskInterface. Nothing waits
for the GPU: on the device, padding becomes lengths, and packed sequences become offsets.

Source: masking_utils.py and integrations/sdpa_attention.py of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
import transformers

import flash_cute
from flash_cute import lengths
from flash_cute.storage import require_stored

if int(transformers.__version__.partition(".")[0]) < 5:
    raise ImportError(
        f"flash_cute.transformers: this is transformers {transformers.__version__}; 5 is needed"
    )

NAME = "cute_attention"


@dataclass(frozen=True)
class CuteMask:
    """transformers' mask in the terms of flash_cute.forward, made once for all layers that share it.

    size: (q_length, kv_length) that it is for. options: causal or window. lengths: those of forward. offsets:
    int32, where packed sequences begin among the tokens of all rows, and the last ones end. factor: float32
    (batch, 1, 1, 1), NaN where the padding has holes, else 1.
    """

    size: tuple[int, int]
    options: dict[str, Any]
    lengths: dict[str, torch.Tensor] = field(default_factory=dict)
    offsets: torch.Tensor | None = None
    factor: torch.Tensor | None = None

    # generate() makes the masks of a static cache before it calls the model. That takes them for padding of
    # two dimensions, handles them so, and asks cute_mask for the mask that goes with them.
    ndim = 2

    def __getattr__(self, name: str) -> NoReturn:
        """Of models that handle their mask themselves."""
        raise AttributeError(
            str(_error(f"the model takes .{name} of its mask", "a mask that only attention reads"))
        )

    def contiguous(self) -> CuteMask:
        return self

    def to(self, *args, **options) -> CuteMask:
        """On another device, as accelerate asks for where a model lies on several."""
        device = torch._C._nn._parse_to(*args, **options)[0]
        if device is None:
            return self

        def move(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x.to(device)

        moved = {name: x.to(device) for name, x in self.lengths.items()}
        return replace(self, lengths=moved, offsets=move(self.offsets), factor=move(self.factor))

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
            raise _error(f"the model takes {index} of its mask", "[:, :, -n:, :]")
        dropped = max(self.size[0] + start, 0) if start else 0
        given = dict(self.lengths)
        if "seqused_q" in given:
            given["seqused_q"] = (given["seqused_q"] - dropped).clamp(min=0)
        return replace(self, size=(self.size[0] - dropped, self.size[1]), lengths=given)

    def view(self, *size: int) -> CuteMask:
        return self


def cute_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = transformers.masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | CuteMask | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> CuteMask:
    """The mask function that transformers calls for "cute_attention".

    Args:
        q_length, kv_length, q_offset, kv_offset: how many queries and keys there are, and the first ones'
            positions; q_offset is a tensor with a static cache.
        mask_function: transformers' function for the mask, but for the padding.
        attention_mask: bool (batch, positions), True for tokens that are no padding.
        local_size: the sliding window.

    Raises:
        NotImplementedError: for masks other than causal, bidirectional, sliding-window and packed ones.
        ValueError: for padding that ends before the new tokens (with a static cache nobody looks), or with
            holes, where FLASH_CUTE_CHECK=1 looks for them.
    """
    if isinstance(attention_mask, CuteMask):
        return attention_mask
    bidirectional = "allow_is_bidirectional_skip" in options
    # Packed sequences are looked for by transformers where there is neither padding nor a cache.
    packed = not (allow_is_causal_skip or bidirectional) and attention_mask is None
    packed = packed and isinstance(q_offset, int) and q_offset == 0 and q_length == kv_length
    _check_kind(
        getattr(mask_function, "__name__", type(mask_function).__name__),
        bidirectional,
        packed,
        local_size,
        use_vmap,
        config,
    )
    # Query i stands at key i + shift. flash_cute puts the last query at the last key that counts.
    shift = q_offset - kv_offset
    aligned = isinstance(shift, int) and shift + q_length == kv_length
    if bidirectional and local_size is not None and not aligned:
        raise _error(
            f"there are {q_length} queries and {kv_length} keys in a window to both sides", "as many"
        )

    if local_size is None:
        options = {"causal": not bidirectional}
    elif bidirectional:
        options = {"window": (local_size, local_size)}
    else:  # a causal window counts the query's own key, too
        options = {"window": (local_size - 1, 0)}
    size = q_length, kv_length
    everything = bidirectional and local_size is None  # is seen, whatever stands where
    if packed:
        return CuteMask(size, options, offsets=_offsets(batch_size, q_length, mask_function, device))
    if attention_mask is None:
        if aligned or everything:
            return CuteMask(size, options)
        end = torch.as_tensor(shift + q_length, device=device).to(torch.int32)
        return CuteMask(size, options, {"seqused_k": end.expand(batch_size).contiguous()})

    if attention_mask.ndim != 2:
        shape = tuple(attention_mask.shape)
        raise _error(f"attention_mask has shape {shape}", "padding, (batch, positions),")
    if not bidirectional and isinstance(q_offset, int) and attention_mask.shape[1] < q_offset + q_length:
        raise ValueError(
            f"flash_cute.transformers: attention_mask has {attention_mask.shape[1]} positions; "
            f"{q_offset + q_length}, those before and the new ones, are accepted"
        )
    first, end, factor = _padding(attention_mask, kv_length, kv_offset)
    given = {"leftpad_k": first, "seqused_k": end}
    if not everything:
        end = end.clamp(max=shift + q_length)
        given = {"leftpad_k": first.minimum(end), "seqused_k": end, "seqused_q": (end - shift).clamp(min=0)}
    given = {name: tensor.to(torch.int32) for name, tensor in given.items()}
    return CuteMask(size, options, given, factor=factor)


def cute_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: CuteMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls for "cute_attention".

    Args:
        query, key, value: (batch, heads, length, head_dim), float16 or bfloat16, or float32 under autocast.
        attention_mask: of cute_mask; without it is_causal (else module.is_causal) and sliding_window say it.
        scaling: multiplies the scores.
        cu_seq_lens_q, cu_seq_lens_k: where packed sequences begin among the tokens of all rows, and the last
            one ends. max_length_q and max_length_k are not needed.

    Returns:
        (batch, q_length, heads, head_dim), and None, as there are no weights. Queries that are padding have
        an out of 0, or in bidirectional attention of no meaning.

    Raises:
        NotImplementedError: dropout, softcap, s_aux, sinks, a bias, head_mask, output_attentions, indices of
            a sparse attention, a paged cache or a mask that is not of cute_mask is given.
        ValueError, TypeError: as flash_cute.forward.
    """
    _check_options(options | {"dropout": dropout})
    mask = attention_mask
    if mask is None:
        mask = _mask_of_module(module, query, key, is_causal, sliding_window)
    elif not isinstance(mask, CuteMask):
        shape = tuple(getattr(mask, "shape", ()))
        found = f"attention_mask is a {type(mask).__name__} of shape {shape}"
        raise _error(found, "padding of two dimensions, given to the model,")
    if mask.size != (query.shape[2], key.shape[2]):
        raise ValueError(
            f"flash_cute.transformers: the mask is for {mask.size[0]} queries and {mask.size[1]} keys, and "
            f"there are {query.shape[2]} and {key.shape[2]}"
        )
    given, offsets = {"softmax_scale": scaling, **mask.options}, (mask.offsets, mask.offsets)
    given["deterministic"] = bool(options.get("deterministic"))
    if (cu_seq_lens_q is None) != (cu_seq_lens_k is None):
        raise _error("only one of cu_seq_lens_q and cu_seq_lens_k is given", "both")
    if cu_seq_lens_q is not None:
        if mask.lengths:
            raise _error("cu_seq_lens_q is given beside padding or a static cache", "one of both")
        offsets = cu_seq_lens_q, cu_seq_lens_k
    if offsets[0] is not None:
        given_offsets = dict(zip(("cu_seq_lens_q", "cu_seq_lens_k"), offsets, strict=True))
        require_stored("transformers", query=query, key=key, value=value, **given_offsets)
        tensors = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        offsets = (None if x is None else x.to(torch.int32) for x in offsets)
        out = flash_cute.attention_varlen(*tensors, *offsets, **given)
        return out.unflatten(0, (query.shape[0], query.shape[2])), None
    out = flash_cute.attention(query, key, value, **given, **mask.lengths).transpose(1, 2)
    return out if mask.factor is None else out * mask.factor.to(out.dtype), None


def _check_kind(
    name: str, bidirectional: bool, packed: bool, local_size: int | None, use_vmap: bool, config: Any
) -> None:
    chunk_size = getattr(config, "attention_chunk_size", None)
    accepted = "causal, bidirectional, sliding-window or packed attention"
    if use_vmap:
        raise _error("and_mask_function or or_mask_function is given", accepted)
    if local_size is not None and local_size == chunk_size:
        raise _error(f"attention is in chunks of {chunk_size}", accepted)
    known = {
        "causal_mask_function": not bidirectional,
        "bidirectional_mask_function": bidirectional,
        "and_mask": packed or local_size is not None,
    }
    if not known.get(name, False):
        raise _error(f"the mask function is {name}", accepted)


# Options that models pass to their attention, and that flash_cute has not.
_NOT_OFFERED = (
    "dropout",
    "softcap",
    "s_aux",
    "sinks",
    "position_bias",
    "alibi",
    "attention_bias",
    "head_mask",
    "cache",
    "output_attentions",
    "indices",
    "block_indices",
    "block_table",
)


def _check_options(options: dict[str, Any]) -> None:
    for name in _NOT_OFFERED:
        value = options.get(name)
        if isinstance(value, torch.Tensor) or value:
            shown = value if isinstance(value, bool | int | float) else type(value).__name__
            raise _error(f"{name} is {shown}", "none")


def _mask_of_module(module, query, key, is_causal: bool | None, sliding_window: int | None) -> CuteMask:
    """What holds where transformers has made no mask."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options: dict[str, Any] = {"causal": bool(causal)}
    if sliding_window is not None:
        if not causal:
            raise _error("sliding_window is given without a mask, where is_causal is False", "a mask")
        options["window"] = (sliding_window - 1, 0)
    return CuteMask((query.shape[2], key.shape[2]), options)


def _offsets(batch_size: int, length: int, mask_function: Callable, device) -> torch.Tensor:
    """Where packed sequences begin among all tokens: where one doesn't see the token before it.

    As the host doesn't know how many there are, there are as many as tokens; those too many are empty.
    """
    row, token = torch.arange(batch_size, device=device)[:, None], torch.arange(length, device=device)[None]
    begins = ~mask_function(row, 0, token, token - 1) | (token == 0)
    places = torch.arange(batch_size * length + 1, device=device)  # and the end, no constant of the graph
    begins = torch.nn.functional.pad(begins.expand(batch_size, length).flatten(), (0, 1), value=True)
    return places.where(begins, places[-1]).sort().values.to(torch.int32)


def _padding(attention_mask: torch.Tensor, kv_length: int, kv_offset: int):
    """The first of the keys that are no padding, (batch,), the end of them, and a CuteMask's factor."""
    present = attention_mask[:, kv_offset : kv_offset + kv_length]
    awaited = kv_length - present.shape[1]  # by a static cache
    present = torch.nn.functional.pad(present, (0, awaited))
    place = torch.arange(kv_length, device=present.device)
    end = (place + 1).where(present, 0).amax(1)
    first = place.where(present, kv_length).amin(1).minimum(end)
    holes = end - first != present.sum(1)
    if lengths.CHECKED and not torch.compiler.is_compiling() and holes.any():
        raise ValueError(
            f"flash_cute.transformers: the padding of sequence {int(holes.nonzero()[0])} has holes; padding "
            "at the begin and at the end is accepted"
        )
    factor = torch.where(holes, torch.nan, 1.0)
    return first, end, factor[:, None, None, None]


def _error(found: str, accepted: str) -> NotImplementedError:
    return NotImplementedError(f"flash_cute.transformers: {found}; {accepted} is accepted")


transformers.AttentionInterface.register(NAME, cute_attention)
transformers.AttentionMaskInterface.register(NAME, cute_mask)
