"""flash_attn_with_kvcache of both of flash_attn's versions."""

from __future__ import annotations

import torch

import flash_cute
from flash_cute._cpu.append_kv import places_of
from flash_cute._torch.autocast import autocast_dtype
from flash_cute._torch.checks import require_stored
from flash_cute.compat._translate import (
    NAMES,
    adds_keys,
    check_tensor,
    common_options,
    heads_first,
    integer,
    lse_of_alibi,
    renaming,
    require_device,
    require_int32,
)
from flash_cute.options import FP8
from flash_cute.wording import shown

_NAMES = NAMES | {"k": "k_cache", "v": "v_cache", "seqused_k": "cache_seqlens", "leftpad_k": "cache_leftpad"}
_forward = renaming(flash_cute.forward, _NAMES)
_forward_varlen = renaming(flash_cute.forward_varlen, _NAMES)
_check_lengths = renaming(flash_cute.lengths.check, _NAMES)
_append_kv = renaming(
    flash_cute.append_kv, {"cu_seqlens": "cu_seqlens_k_new", "k_scale": "k_descale", "v_scale": "v_descale"}
)


@torch.no_grad()
def with_cache(
    q, cache, new, rotary, softmax_scale, causal, window_size, num_splits, *, cache_seqlens, cache_batch_idx,
    cache_leftpad, block_table, cu_seqlens_q=None, cu_seqlens_k_new=None, rotary_seqlens=None, sinks=None,
    k_descale=None, v_descale=None, lse_is_read=False, **others,
):  # fmt: skip
    """(out, lse) as of dense or, with cu_seqlens_q, of packed, after what is new is written into the cache.

    There are no gradients, as of flash_attn's functions, whatever the inputs require.

    cache, new: (k, v). rotary: (cos, sin, interleaved). lse_is_read, others: as of dense. The rest: as
    flash_attn's functions document them.
    """
    options = common_options(softmax_scale, causal, window_size, False, sinks=sinks, **others)
    packed = cu_seqlens_q is not None
    check_tensor("q", q)
    if packed:
        require_int32(q, cu_seqlens_q=cu_seqlens_q)
        tensors = [q, *heads_first(k_cache=cache[0], v_cache=cache[1])]
    else:
        tensors = heads_first(q=q, k_cache=cache[0], v_cache=cache[1])
    batch = cu_seqlens_q.shape[0] - 1 if packed else q.shape[0]
    # Those that are read here, before the operators' own checks.
    places = {"cache_seqlens": cache_seqlens, "cache_batch_idx": cache_batch_idx, "block_table": block_table}
    places |= {"cache_leftpad": cache_leftpad, "rotary_seqlens": rotary_seqlens}
    require_stored("compat", **places, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new)
    table = _table(q, batch, cache_batch_idx, block_table)
    capacity = cache[0].shape[1] * (table.shape[1] if table is not None else 1)

    rows, count = _new_rows(q, batch, capacity, cache, new, cache_seqlens, rotary, cu_seqlens_k_new)
    room = capacity - count
    if cache_seqlens is None and cache[0].dtype in FP8:  # which has lengths or pages
        cache_seqlens = capacity
    used = _rows_of_cache(cache_seqlens, q, batch, capacity if cu_seqlens_k_new is not None else room)
    if rows is not None:
        # Meta tensors, which say the rest, would not tell it.
        require_device(q, k=new[0], v=new[1], cache_leftpad=cache_leftpad, block_table=table, s_aux=sinks)
        _check_rows(q, used, room)
        # Those for which the cache has no room are cut to those for which it has.
        used = used.clamp(0, room) if cu_seqlens_k_new is None else torch.minimum(used.clamp(min=0), room)
    scales = {"k_scale": k_descale, "v_scale": v_descale}
    lengths = {"cu_seqlens_q": cu_seqlens_q, "leftpad_k": cache_leftpad, "block_table": table, **scales}
    lengths["seqused_k"] = used if rows is None else used + count
    lengths = {name: x for name, x in lengths.items() if x is not None}
    if cache_batch_idx is not None:
        entries = cache[0].shape[0] if block_table is None else block_table.shape[0]
        _check_entries(q, cache_batch_idx, entries, lengths.get("seqused_k"))

    forward = _forward_varlen if packed else _forward
    if q.is_cuda and isinstance(num_splits, int) and num_splits == 1:
        options["batch_invariant"] = True
    if rows is not None:
        _check_on_meta(forward, tensors, lengths, options)
        if flash_cute.lengths.CHECKED:
            _check_lengths(*tensors, lengths)
        follows = causal or options["window"] != (None, None) or (not packed and q.shape[1] == 1)
        offsets = cu_seqlens_q, cu_seqlens_k_new
        begins = used, None if rotary_seqlens is cache_seqlens else rotary_seqlens
        tensors[0] = _write(*tensors, rows, table, offsets, begins, rotary, follows, scales)
    out, lse = forward(*tensors, **lengths, **options)
    if lse_is_read and adds_keys(options, capacity):  # of FlashAttention-2, whose queries are not packed
        keys = lengths.get("seqused_k", torch.full((batch,), capacity, device=q.device))
        keys = keys - (0 if cache_leftpad is None else cache_leftpad)
        place = torch.arange(-q.shape[1], 0, device=q.device) + keys.unsqueeze(1)
        lse = lse_of_alibi(lse, options["alibi_slopes"], place)
    return (out if packed else out.transpose(1, 2)), lse


def _table(q, batch, cache_batch_idx, block_table):
    """The block table of a call, that of a cache's entries too; None where each sequence has its own."""
    if block_table is not None:
        check_tensor("block_table", block_table)
        if block_table.dim() != 2:
            raise ValueError(
                "flash_cute.compat: block_table must have shape (batch, max_pages), got "
                f"{tuple(block_table.shape)}"
            )
    if cache_batch_idx is None:
        return block_table
    require_int32(q, batch, cache_batch_idx=cache_batch_idx)
    if block_table is None:
        return cache_batch_idx[:, None]
    require_device(q, block_table=block_table)
    entries = block_table.shape[0]
    if entries == 0:
        raise ValueError("flash_cute.compat: block_table must have a row for cache_batch_idx, got none")
    # An index that makes no sense is that of a sequence without pages.
    missing = (cache_batch_idx < 0) | (cache_batch_idx >= entries)
    rows = block_table.index_select(0, cache_batch_idx.clamp(0, entries - 1))
    return rows.masked_fill(missing[:, None], -1)


def _new_rows(q, batch, capacity, cache, new, cache_seqlens, rotary, cu_seqlens_k_new):
    """(k, v) as flash_cute takes what is new, and how many rows each sequence gets, a number or int32.

    None and 0 where nothing is new.
    """
    k, v = new
    cos, sin, _ = rotary
    if (k is None) != (v is None) or (k is not None and cache_seqlens is None):
        raise ValueError(
            "flash_cute.compat: of k, v and cache_seqlens some are None; all three, or None for k and v, are "
            "accepted"
        )
    if k is None:
        for name, x in {"rotary_cos": cos, "rotary_sin": sin, "cu_seqlens_k_new": cu_seqlens_k_new}.items():
            if x is not None:
                raise ValueError(f"flash_cute.compat: {name} must be None where k and v are, got a tensor")
        return None, 0
    if (cos is None) != (sin is None):
        raise ValueError(
            "flash_cute.compat: of rotary_cos and rotary_sin one is None; both, or none, must be"
        )
    if cu_seqlens_k_new is None:
        rows = heads_first(k=k, v=v)
        count, leading = k.shape[1], (batch, k.shape[1])
        if count > capacity:
            raise ValueError(
                f"flash_cute.compat: k has {count} rows and k_cache {capacity}; no more than these are "
                "accepted"
            )
    else:
        require_int32(q, batch + 1, cu_seqlens_k_new=cu_seqlens_k_new)
        check_tensor("k", k)
        check_tensor("v", v)
        rows, count, leading = [k, v], cu_seqlens_k_new.diff(), tuple(k.shape[:1])
    for name, mine, whole in (("k", k, cache[0]), ("v", v, cache[1])):
        expected = (*leading, *whole.shape[2:])
        dtype, why = (q.dtype, "as q") if whole.dtype in FP8 else (whole.dtype, "as the cache")
        if tuple(mine.shape) != expected or mine.dtype != dtype:
            raise ValueError(
                f"flash_cute.compat: {name} is {mine.dtype} of shape {tuple(mine.shape)}; "
                f"{dtype} of shape {expected}, {why}, is accepted"
            )
    return rows, count


def _check_on_meta(forward, tensors, lengths, options):
    """Says what else is wrong with a call, before a row is written: by one of meta tensors."""
    q, *cache = tensors
    # Under autocast.
    stays = "cu_seqlens_q" in lengths or "block_table" in lengths or cache[0].dtype in FP8
    operands = [q.to("meta", autocast_dtype(q))]
    operands += [x.to("meta", x.dtype if stays else autocast_dtype(x)) for x in cache]
    forward(*operands, **{name: _on_meta(x) for name, x in (lengths | options).items()})


def _on_meta(x):
    if not isinstance(x, torch.Tensor):
        return x
    if x.is_nested or x.layout != torch.strided:  # which forward refuses
        return x.to("meta")
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _rows_of_cache(cache_seqlens, q, batch, most):
    """cache_seqlens as int32 (batch,), or None."""
    if cache_seqlens is None:
        return None
    if isinstance(cache_seqlens, torch.Tensor):
        require_int32(q, batch, cache_seqlens=cache_seqlens)
        return cache_seqlens
    rows = integer(cache_seqlens)
    if rows is None or not 0 <= rows <= most:
        # Of a symbolic one dynamo knows no repr.
        value = shown(cache_seqlens) if rows is None else int(rows)
        raise ValueError(
            f"flash_cute.compat: cache_seqlens is {value}; 0 to {most}, for which the cache "
            "has room, or a tensor is accepted"
        )
    return torch.full((batch,), rows, dtype=torch.int32, device=q.device)


def _check_rows(q, used, room):
    """What a tensor holds, where FLASH_CUTE_CHECK asks for it. room: the most, a number or int32 (batch,)."""
    if not (flash_cute.lengths.CHECKED and flash_cute.lengths.are_known(q, used)):
        return
    most = room.tolist() if isinstance(room, torch.Tensor) else [room] * len(used)
    for sequence, (rows, free) in enumerate(zip(used.tolist(), most, strict=True)):
        if not 0 <= rows <= free:
            raise ValueError(
                f"flash_cute.compat: sequence {sequence} has cache_seqlens {rows}; 0 to {free}, for which "
                "the cache has room, are accepted"
            )


def _check_entries(q, cache_batch_idx, entries, used):
    """Likewise: has each sequence with keys one of the entries? used: int32 (batch,), None for all rows."""
    if not (flash_cute.lengths.CHECKED and flash_cute.lengths.are_known(q, cache_batch_idx)):
        return
    rows = [1] * len(cache_batch_idx) if used is None else used.tolist()
    for sequence, (entry, count) in enumerate(zip(cache_batch_idx.tolist(), rows, strict=True)):
        if count > 0 and not 0 <= entry < entries:
            raise ValueError(
                f"flash_cute.compat: sequence {sequence} has cache_batch_idx {entry}; 0 to {entries - 1} are "
                "accepted"
            )


def _write(q, k_cache, v_cache, rows, table, offsets, begins, rotary, follows, scales):
    """Writes rows, (k, v), into the cache, and gives q back, rotated where rotary asks for it.

    offsets: cu_seqlens_q and cu_seqlens_k_new. begins: how many rows the cache had, int32 (batch,), and the
    position of the first new one where it is another, or None. follows: does query i of a sequence stand i
    rows behind the first new key? Otherwise all stand there. scales: of the cache.
    """
    cos, sin, interleaved = rotary
    (cu_seqlens_q, cu_seqlens_k), (used, first) = offsets, begins
    places = {"cache_seqlens": used, "block_table": table, "cu_seqlens": cu_seqlens_k}
    turning = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
    if cos is None:
        _append_kv(*rows, k_cache, v_cache, **places, **scales)
        return q
    if first is None and follows and cu_seqlens_q is cu_seqlens_k:
        return _append_kv(*rows, k_cache, v_cache, **places, **turning, **scales, q=q)
    if first is not None:
        require_int32(q, used.shape[0], rotary_seqlens=first)
        positions = places_of(rows[0], first, cu_seqlens_k)[1]
        padded = rows[0].shape[:3:2]  # batch and rows
        places["positions"] = positions if cu_seqlens_k is not None else positions.view(padded)
    q = _turned(q, used if first is None else first, cu_seqlens_q, follows, k_cache, v_cache, turning)
    _append_kv(*rows, k_cache, v_cache, **places, **turning, **scales)
    return q


def _turned(q, begin, cu_seqlens_q, follows, k_cache, v_cache, turning):
    """q rotated from position begin on, int32 (batch,), by a call of append_kv that writes nothing."""
    sequence, position = places_of(q, begin, cu_seqlens_q)
    position = position if follows else begin[sequence].long()
    packed = q if cu_seqlens_q is not None else q.transpose(1, 2).flatten(0, 1)
    unused = packed[:, : k_cache.shape[1]]
    unused = unused, unused.new_empty(*unused.shape[:2], v_cache.shape[3])
    nowhere = {"slots": position[:0], "positions": position}
    packed = _append_kv(*unused, k_cache, v_cache, **nowhere, **turning, q=packed)
    return packed if cu_seqlens_q is not None else packed.unflatten(0, q.shape[:3:2]).transpose(1, 2)
