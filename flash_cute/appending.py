"""New keys and values into a cache: the function that users call, and the CPU's kernel.

The schema, checks and the way to the GPU's kernel are in csrc/append.cpp.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from flash_cute import lengths, ops, registration, torch_private
from flash_cute.storage import require_stored
from flash_cute.wording import OURS, require_bool

_append = torch.ops.flash_cute.append_kv.default
_check = torch.ops.flash_cute._append_kv_check.default
_TENSORS = (
    *("k", "v", "k_cache", "v_cache", "cache_seqlens", "block_table", "slots", "cu_seqlens", "q"),
    *("rotary_cos", "rotary_sin", "positions"),
)
_DTYPES = torch.float16, torch.bfloat16, torch.float32
_INTEGERS = dict.fromkeys(("cache_seqlens", "block_table", "cu_seqlens"), torch.int32)
_INTEGERS |= dict.fromkeys(("slots", "positions"), torch.int64)


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
) -> torch.Tensor | None:
    """Writes new keys and values into a cache, in place, and rotates keys and queries on the way.

    One kernel on a GPU. Nothing waits for the device, and a captured CUDA graph replays with other lengths,
    places and positions.

    Args:
        k, v: the new rows, (batch, heads_kv, rows, head_dim), or packed, with cu_seqlens or slots,
            (total, heads_kv, head_dim). float16, bfloat16 or float32, any strides; head_dim is a multiple
            of 8. What autocast would cast of them, and of q, is cast to the cache's dtype.
        k_cache, v_cache: (batch, heads_kv, capacity, head_dim), or pages (pages, heads_kv, page_size,
            head_dim) with block_table or slots; k's dtype and device. A cache is never copied: the last
            dimension must be contiguous, and other strides multiples of 16 bytes.
        cache_seqlens: int32 (batch,), how many rows each sequence has before the call: its row i of k goes
            to cache_seqlens + i. Default 0. Rows for which there is no room are not written.
        block_table: int32 (batch, max_pages), as in flash_cute.forward.
        slots: int64 (tokens,), where each row of k goes, page * page_size + row of it; rows whose slot is
            negative, and rows behind the last slot, are not written. It takes the place of cache_seqlens,
            block_table and cu_seqlens.
        cu_seqlens: int32 (batch + 1,), which rows of packed k each sequence has, as in
            flash_cute.forward_varlen. Rows of no sequence are not written.
        q: queries to rotate, (batch, heads_q, rows_q, head_dim) or packed with as many rows as k; it needs
            rotary_cos.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), float32 or k's dtype. The first rotary_dim
            columns of k and q, a multiple of 16, are rotated: column i with column i + rotary_dim / 2.
        rotary_interleaved: column 2i with column 2i + 1 instead.
        positions: int64 (batch, rows), packed (total,): the position of each row of k and q in the table.
            Default the row's place in its sequence; slots need it. Positions outside of the table are
            cut to it.

    Returns:
        The rotated q, as torch.empty_like(q); None without q. A row of no sequence has no meaning.

    Raises:
        ValueError, TypeError: an argument makes no sense; the sentence says which, and what is accepted.
            Values on the device are not looked at, but with FLASH_CUTE_CHECK=1, which waits for it.
        NotImplementedError: gradients or vmap are asked for.
    """
    values = (k, v, k_cache, v_cache, cache_seqlens, block_table, slots, cu_seqlens, q, rotary_cos)
    values = (*values, rotary_sin, positions)
    tensors = {
        name: x for name, x in zip(_TENSORS, values, strict=True) if x is not None or name in _TENSORS[:4]
    }
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            raise TypeError(f"flash_cute.append_kv: {name} is of type {kind}; a torch.Tensor is accepted")
    require_bool("flash_cute.append_kv", "rotary_interleaved", rotary_interleaved)
    try:
        if torch_private.autocast_is_enabled():
            require_stored("append_kv", **tensors)
            rows = {name: tensors[name] for name in ("k", "v", "q") if name in tensors}
            if k_cache.dtype in _DTYPES:
                cast = {name: x for name, x in rows.items() if ops.autocast_concerns(x)}
                tensors |= {name: x.to(k_cache.dtype) for name, x in cast.items()}
        if ops.needs_gradient(*tensors.values()):
            raise NotImplementedError(f"{OURS}there are no gradients through a cache; detach k, v and q")
        ops.require_memory_of_its_own(k_cache=k_cache, v_cache=v_cache)
        if lengths.CHECKED and lengths.are_known(*tensors.values()):
            _check_values(**tensors)
        rotated = _append(**tensors, rotary_interleaved=rotary_interleaved)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        if torch.compiler.is_compiling():  # which can't trace what follows, and shows the error as it is
            raise
        raise ops.named(error, "flash_cute.append_kv", tensors, _accepted) from None
    return None if q is None else rotated


def _accepted(argument: str) -> str:
    if argument in _INTEGERS:
        return f"{_INTEGERS[argument]} is"
    *others, last = map(str, _DTYPES)
    return f"{', '.join(others)} and {last} are"


def places_of(x, cache_seqlens, cu_seqlens) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the rows of k or q, entry by entry: which sequence has each, -1 for none, and its place in it."""
    device = x.device
    if cu_seqlens is None:
        sequence = torch.arange(x.shape[0], device=device).repeat_interleave(x.shape[2])
        place = torch.arange(x.shape[2], device=device).repeat(x.shape[0])
    else:
        sequence, place = lengths.sequences_of_rows(x.shape[0], cu_seqlens)
    if cache_seqlens is not None and len(cache_seqlens) > 0:
        place = place + cache_seqlens[sequence]
    return sequence, place


def _rows_of_cache(k, k_cache, cache_seqlens, block_table, slots, cu_seqlens):
    """Of each row of k: page, and row of it, that it goes to; -1 for none."""
    pages, page_size = k_cache.shape[0], k_cache.shape[2]
    if slots is not None:
        slots = torch.cat((slots, slots.new_full((k.shape[0] - slots.shape[0],), -1)))
        written = (slots >= 0) & (slots < pages * page_size)
        return (slots // page_size).where(written, -1), slots % page_size
    sequence, place = places_of(k, cache_seqlens, cu_seqlens)
    room = page_size * (1 if block_table is None else block_table.shape[1])
    written = (sequence >= 0) & (place >= 0) & (place < room)
    if block_table is None:
        return sequence.where(written, -1), place
    sequence, place = (x.where(written, 0) for x in (sequence, place))
    if len(block_table) == 0:
        return sequence - 1, place
    page = block_table[sequence, place // page_size].long().clamp(0, pages - 1)
    return page.where(written, -1), place % page_size


def _rotated(x, cos, sin, interleaved: bool) -> torch.Tensor:
    """(rows, heads, head_dim), where cos and sin are (rows, rotary_dim / 2)."""
    columns = 2 * cos.shape[-1]
    turning = x[..., :columns].float()
    cos, sin = cos.float().unsqueeze(1), sin.float().unsqueeze(1)
    a, b = (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.chunk(2, -1)
    turned = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((turned.to(x.dtype), x[..., columns:]), -1)


def _append_kv_cpu(k, v, k_cache, v_cache, cache_seqlens=None, *, block_table=None, slots=None,
                   cu_seqlens=None, q=None, rotary_cos=None, rotary_sin=None, rotary_interleaved=False,
                   positions=None) -> torch.Tensor:  # fmt: skip
    """flash_cute::append_kv on the CPU: Python that calls the checks, see flash_cute/cpu.py."""
    places = {"block_table": block_table, "slots": slots, "cu_seqlens": cu_seqlens}
    rotary = {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "rotary_interleaved": rotary_interleaved}
    torch.ops.flash_cute._append_kv_cpu.default(
        k, v, k_cache, v_cache, cache_seqlens, **places, q=q, **rotary, positions=positions
    )

    def rows(x: torch.Tensor) -> torch.Tensor:
        return x if x.dim() == 3 else x.transpose(1, 2).flatten(0, 1)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        if rotary_cos is None:
            return rows(x)
        at = places_of(x, cache_seqlens, cu_seqlens)[1] if positions is None else positions.flatten()
        at = at.clamp(0, rotary_cos.shape[0] - 1)
        return _rotated(rows(x), rotary_cos[at], rotary_sin[at], rotary_interleaved)

    page, row = _rows_of_cache(k, k_cache, cache_seqlens, **places)
    written = page >= 0
    for cache, new in ((k_cache, rotated(k)), (v_cache, rows(v))):
        cache[page[written], :, row[written]] = new[written]
    if q is None:
        return k.new_empty(0)
    result = torch.empty_like(q)
    turned = rotated(q)
    return result.copy_(turned if q.dim() == 3 else turned.unflatten(0, q.shape[0:3:2]).transpose(1, 2))


def _traced(k, v, k_cache, v_cache, cache_seqlens=None, *, q=None, rotary_interleaved=False, **others):
    _check_shapes(k=k, v=v, k_cache=k_cache, v_cache=v_cache, cache_seqlens=cache_seqlens, q=q, **others)
    return k.new_empty(0) if q is None else torch.empty_like(q)


def _check_shapes(**tensors: torch.Tensor | None) -> None:
    """The checks of a call by what is known while it is traced."""
    given = {name: tensors[name] for name in _TENSORS if tensors.get(name) is not None}
    sizes = {name: registration.hints(x.shape) for name, x in given.items()}
    steps = [torch_private.hint(x.stride(-1)) if x.dim() else 1 for x in given.values()]
    if any(None in known for known in (*sizes.values(), steps)):
        return
    with torch_private.without_modes():
        _check([x.dtype for x in given.values()], [x.device for x in given.values()], steps, **sizes)


def _check_values(**tensors: torch.Tensor) -> None:
    """Raises ValueError for a row without a place, or a position that the table of rotations has not."""
    _check_shapes(**tensors)
    require_stored("append_kv", **tensors)
    names = (
        "k",
        "k_cache",
        "cache_seqlens",
        "block_table",
        "slots",
        "cu_seqlens",
        "q",
        "rotary_cos",
        "positions",
    )
    k, k_cache, used, table, slots, offsets, q, cos, positions = map(tensors.get, names)
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
            _require("block_table must have pages", table[sequence, place // page_size], 0, pages)
    if cos is not None:
        if positions is None:
            positions = torch.cat(
                [_places_in_sequences(x, used, offsets)[1] for x in (k, q) if x is not None]
            )
        _require("positions must be rows of rotary_cos,", positions, 0, cos.shape[0])


def _places_in_sequences(*arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """places_of, without rows that belong to none."""
    sequence, place = places_of(*arguments)
    return sequence[sequence >= 0], place[sequence >= 0]


def _require(what: str, values: torch.Tensor, least: int | None, end: int) -> None:
    for value in values.flatten().tolist():
        if value >= end or (least is not None and value < least):
            accepted = "of a cache with room" if end == 0 else f"at most {end - 1}"
            accepted = accepted if least is None or end == 0 else f"{least} to {end - 1}"
            raise ValueError(f"{OURS}{what} {accepted}, got {value}")


def _refuse_vmap(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(f"{OURS}vmap can't map a cache; give it more sequences")


_library = torch.library.Library("flash_cute", "IMPL")
_library.impl("append_kv", _append_kv_cpu, "CPU")
_library.impl("append_kv", _refuse_vmap, "FuncTorchBatched")
torch.library.register_fake("flash_cute::append_kv", _traced, lib=_library)
registration.count_versions(_append, _library)
