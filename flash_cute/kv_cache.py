"""New keys and values into a cache: the function that users call.

The schema, checks and the way to the GPU's kernel are in csrc/append.cpp.
"""

from __future__ import annotations

import torch

from flash_cute import lengths
from flash_cute._cpu import append_kv as cpu
from flash_cute._torch import autograd, checks, fakes, library, private, vmap
from flash_cute._torch.autocast import autocast_concerns
from flash_cute.options import SCALES
from flash_cute.wording import OURS, hinting, require_bool

_append = torch.ops.flash_cute.append_kv.default
_check = torch.ops.flash_cute._append_kv_check.default
_TENSORS = (
    *("k", "v", "k_cache", "v_cache", "cache_seqlens", "block_table", "slots", "cu_seqlens", "q"),
    *("rotary_cos", "rotary_sin", "positions", *SCALES),
)
_DTYPES = torch.float16, torch.bfloat16, torch.float32
_INTEGERS = dict.fromkeys(("cache_seqlens", "block_table", "cu_seqlens"), torch.int32)
_INTEGERS |= dict.fromkeys(("slots", "positions"), torch.int64)


@hinting("flash_cute")
def append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor | None = None,
    *,
    block_table: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    q: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    rotary_interleaved: bool = False,
    positions: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Writes new keys and values into a cache, in place, and rotates keys and queries on the way.

    One kernel on a GPU. Nothing waits for the device, and a captured CUDA graph replays with other lengths,
    places and positions.

    Args:
        k, v: the new rows, (batch, heads_kv, rows, head_dim), or packed, with cu_seqlens or slots,
            (total, heads_kv, head_dim). float16, bfloat16 or float32, any strides; head_dim is a multiple
            of 8. v may have one of its own, a multiple of 8, too. What autocast would cast of them, and of q,
            is cast to the cache's dtype.
        k_cache, v_cache: (batch, heads_kv, capacity, head_dim), or pages (pages, heads_kv, page_size,
            head_dim) with block_table or slots; k's dtype and device, v_cache of v's head_dim. Or both of
            torch.float8_e4m3fn, or of torch.uint8 with its bits, where head_dim is a multiple of 16. A cache
            is never copied: the last dimension must be contiguous, other strides multiples of 16 bytes.
        cache_seqlens: int32 (batch,), how many rows each sequence has before the call: its row i of k goes
            to cache_seqlens + i. Default 0. Rows for which there is no room are not written; more rows of
            padded k than a sequence's capacity raise, as caches passed in the place of new rows do.
        block_table: int32 (batch, max_pages), as in flash_cute.forward. Rows whose page is negative or too
            large, as those of a sequence that has none, are not written.
        slots: int64 (tokens,), where each row of k goes, page * page_size + row of it; rows whose slot is
            negative, and rows after the last slot, are not written. It takes the place of cache_seqlens,
            block_table and cu_seqlens.
        cu_seqlens: int32 (batch + 1,), which rows of packed k each sequence has, as in
            flash_cute.forward_varlen. Rows of no sequence are not written.
        q: queries to rotate, (batch, heads_q, rows_q, head_dim) or packed with as many rows as k; it needs
            rotary_cos.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), float32 or k's dtype. The first rotary_dim
            columns of k and q, a multiple of 16, are rotated: column i with column i + rotary_dim / 2.
        rotary_interleaved: column 2i with column 2i + 1 instead.
        k_scale, v_scale: of caches of 8 bits, as in flash_cute.forward; with slots () or (heads_kv,).
            Numbers, rotated before, are divided by them, rounded once, and cut to 448, the largest one.
        positions: int64 (batch, rows), packed (total,): the position of each row of k and q in the table.
            Default the row's place in its sequence; slots need it. Positions outside of the table are
            cut to it.

    Returns:
        The rotated q, as torch.empty_like(q); None without q. A row of no sequence is undefined.

    Raises:
        ValueError, TypeError: an argument makes no sense; the sentence says which, and what is accepted.
            Values on the device are not looked at, but with FLASH_CUTE_CHECK=1, which waits for it.
        NotImplementedError: gradients or vmap are asked for.
    """
    values = (k, v, k_cache, v_cache, cache_seqlens, block_table, slots, cu_seqlens, q, rotary_cos)
    values = (*values, rotary_sin, positions, k_scale, v_scale)
    tensors = {
        name: x for name, x in zip(_TENSORS, values, strict=True) if x is not None or name in _TENSORS[:4]
    }
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            raise TypeError(f"flash_cute.append_kv: {name} is of type {kind}; a torch.Tensor is accepted")
    require_bool("flash_cute.append_kv", "rotary_interleaved", rotary_interleaved)
    try:
        if private.autocast_is_enabled():
            checks.require_stored("append_kv", **tensors)
            rows = {name: tensors[name] for name in ("k", "v", "q") if name in tensors}
            if k_cache.dtype in _DTYPES:
                cast = {name: x for name, x in rows.items() if autocast_concerns(x)}
                tensors |= {name: x.to(k_cache.dtype) for name, x in cast.items()}
        autograd.refuse_gradients("through a cache", **tensors)
        checks.require_memory_of_its_own(k_cache=k_cache, v_cache=v_cache)
        if lengths.CHECKED and lengths.are_known(*tensors.values()):
            _check_values(**tensors)
        rotated = _append(**tensors, rotary_interleaved=rotary_interleaved)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        if torch.compiler.is_compiling():  # which can't trace what follows, and shows the error as it is
            raise
        raise checks.named(error, "flash_cute.append_kv", tensors, _accepted) from None
    return None if q is None else rotated


def _accepted(argument: str) -> str:
    if argument in _INTEGERS:
        return f"{_INTEGERS[argument]} is"
    if argument in SCALES:
        return "torch.float32 is"
    *others, last = map(str, _DTYPES)
    return f"{', '.join(others)} and {last} are"


def _traced(k, v, k_cache, v_cache, cache_seqlens=None, *, q=None, rotary_interleaved=False, **others):
    _check_shapes(k=k, v=v, k_cache=k_cache, v_cache=v_cache, cache_seqlens=cache_seqlens, q=q, **others)
    return k.new_empty(0) if q is None else torch.empty_like(q)


def _check_shapes(**tensors: torch.Tensor | None) -> None:
    """The checks of a call by what is known while it is traced."""
    given = {name: tensors[name] for name in _TENSORS if tensors.get(name) is not None}
    sizes = {name: fakes.hints(x.shape) for name, x in given.items()}
    steps = [private.hint(x.stride(-1)) if x.dim() else 1 for x in given.values()]
    if any(None in known for known in (*sizes.values(), steps)):
        return
    with private.without_modes():
        _check([x.dtype for x in given.values()], [x.device for x in given.values()], steps, **sizes)


def _check_values(**tensors: torch.Tensor) -> None:
    """Raises ValueError for a row without a place, or a position that the table of rotations has not."""
    _check_shapes(**tensors)
    checks.require_stored("append_kv", **tensors)
    for name in SCALES:
        if tensors.get(name) is not None:
            lengths.check_scale(name, tensors[name])
    k, _, k_cache, _, used, table, slots, offsets, q, cos, _, positions, *_ = map(tensors.get, _TENSORS)
    pages, page_size = k_cache.shape[0], k_cache.shape[2]
    if slots is not None:
        _require("slots must be less than the cache's rows,", slots, None, pages * page_size)
    else:
        if offsets is not None:
            lengths.check_offsets("cu_seqlens", offsets.tolist(), "k", k.shape[0])
        sequence, place = _places_in_sequences(k, used, offsets)
        room = page_size * (1 if table is None else table.shape[1])
        _require("the places of new rows behind cache_seqlens must be", place, 0, room)
        if table is not None:
            _require("block_table must have pages,", table[sequence, place // page_size], None, pages)
    if cos is not None:
        if positions is None:
            positions = torch.cat(
                [_places_in_sequences(x, used, offsets)[1] for x in (k, q) if x is not None]
            )
        _require("positions must be rows of rotary_cos,", positions, 0, cos.shape[0])


def _places_in_sequences(*arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """places_of, without rows that belong to none."""
    sequence, place = cpu.places_of(*arguments)
    return sequence[sequence >= 0], place[sequence >= 0]


def _require(what: str, values: torch.Tensor, least: int | None, end: int) -> None:
    for value in values.flatten().tolist():
        if value >= end or (least is not None and value < least):
            accepted = "of a cache with room" if end == 0 else f"at most {end - 1}"
            accepted = accepted if least is None or end == 0 else f"{least} to {end - 1}"
            raise ValueError(f"{OURS}{what} {accepted}, got {value}")


library.impl("append_kv", cpu.append_kv, "CPU")
library.impl("append_kv", vmap.refusing("a cache; give it more sequences"), "FuncTorchBatched")
fakes.register(_append, _traced)
autograd.count_versions(_append)
