"""What the functions of flash_attn's versions share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from operator import index

import torch

import flash_cute
from flash_cute.ops import autocast_dtype
from flash_cute.storage import require_stored
from flash_cute.wording import named, shown

# The values that ask for nothing that flash_cute has not.
_ACCEPTED = {
    "dropout_p": (0,),  # not 0.0: under torch.compile(dynamic=True) a float of a global is a symbol
    "softcap": (0,),
    "alibi_slopes": (None,),
    "block_table": (None,),
    "qv": (None,),
    "q_descale": (None,),
    "k_descale": (None,),
    "v_descale": (None,),
    "attention_chunk": (0,),
    "rotary_cos": (None,),
    "rotary_sin": (None,),
    "cache_batch_idx": (None,),
    "page_table": (None,),
    "cu_seqlens_q": (None,),
    "cu_seqlens_k_new": (None,),
}
# What flash_cute.forward calls otherwise than flash_attn does.
_NAMES = {"window": "window_size"}
_NAMES_OF_CACHE = {"k": "k_cache", "v": "v_cache", "seqused_k": "cache_seqlens", "leftpad_k": "cache_leftpad"}


def renaming(function: Callable, names: dict[str, str]) -> Callable:
    """The function with errors in the words of its caller, as wording.named has them."""

    @wraps(function)
    def call(*args, **options):
        try:
            return function(*args, **options)
        except (TypeError, ValueError, NotImplementedError) as error:
            if torch.compiler.is_compiling():  # which can't look into what an error says
                raise
            raise named(error, "flash_cute.compat", names) from None

    return call


_forward = renaming(flash_cute.forward, _NAMES)
_forward_varlen = renaming(flash_cute.forward_varlen, _NAMES)
_forward_of_cache = renaming(flash_cute.forward, _NAMES | _NAMES_OF_CACHE)
_check_lengths_of_cache = renaming(flash_cute.lengths.check, _NAMES | _NAMES_OF_CACHE)


def dense(q, k, v, softmax_scale, causal, window_size, deterministic, **refused):
    """(out, lse): q, k, v and out are (batch, seqlen, heads, head_dim), lse (batch, heads, seqlen_q).

    refused: arguments of flash_attn's function whose values must be those of _ACCEPTED.
    """
    options = _options(softmax_scale, causal, window_size, deterministic, refused)
    out, lse = _forward(*_heads_first(q=q, k=k, v=v), **options)
    return out.transpose(1, 2), lse


def packed(q, k, v, lengths, softmax_scale, causal, window_size, deterministic, **refused):
    """(out, lse): q, k, v and out are (total, heads, head_dim), lse (heads, total_q).

    lengths: those of flash_cute.forward_varlen.
    """
    options = _options(softmax_scale, causal, window_size, deterministic, refused)
    return _forward_varlen(q, k, v, **lengths, **options)


def with_cache(
    q, cache, new, cache_seqlens, cache_leftpad, block_table, softmax_scale, causal, window_size, **refused
):
    """(out, lse) as of dense, after what is new is written into the cache behind its cache_seqlens rows.

    cache, new: (k, v); both new ones may be None, and must be with a block_table. cache_seqlens: int, int32
    (batch,), or None, which is all. cache_leftpad: int32 (batch,) or None. block_table: int32 (batch,
    max_pages), where cache is in pages, (pages, page_size, heads_kv, head_dim), or None.
    """
    options = _options(softmax_scale, causal, window_size, False, refused)
    k, v = new
    if block_table is not None:
        check_tensor("block_table", block_table)
        if k is not None or v is not None:
            raise ValueError(
                "flash_cute.compat: k and v must be None with pages or cache_batch_idx; write them into the "
                "cache before the call"
            )
    if (k is None) != (v is None) or (k is not None and cache_seqlens is None):
        raise ValueError(
            "flash_cute.compat: of k, v and cache_seqlens some are None; all three, or None for k and v, are "
            "accepted"
        )
    tensors = _heads_first(q=q, k_cache=cache[0], v_cache=cache[1])
    count = 0 if k is None else _heads_first(k=k, v=v)[0].shape[2]
    require_stored("compat", cache_seqlens=cache_seqlens, cache_leftpad=cache_leftpad)
    most = cache[0].shape[1] - count
    if block_table is not None and block_table.dim() == 2:
        most *= block_table.shape[1]
    if most < 0:
        raise ValueError(
            f"flash_cute.compat: k has {count} rows and k_cache {cache[0].shape[1]}; no more than these are "
            "accepted"
        )
    used = _rows_of_cache(cache_seqlens, q, most)
    if k is not None:
        _check_new(q, cache, new, cache_seqlens, cache_leftpad)
        if isinstance(cache_seqlens, torch.Tensor):
            _check_rows(q, cache_seqlens, most)
            used = used.clamp(0, most)
    lengths = {"seqused_k": used if used is None else used + count, "leftpad_k": cache_leftpad}
    if block_table is not None:
        lengths["block_table"] = block_table
    if k is not None:
        # What else is wrong with a call, one on meta tensors says before a row is written.
        on_meta = {name: x if x is None else x.to("meta") for name, x in lengths.items()}
        _forward_of_cache(*(x.to("meta", autocast_dtype(x)) for x in tensors), **on_meta, **options)
        if flash_cute.lengths.CHECKED:
            _check_lengths_of_cache(*tensors, {name: x for name, x in lengths.items() if x is not None})
        entry = torch.arange(k.shape[0], device=k.device)[:, None]
        row = used[:, None] + torch.arange(count, device=k.device)
        with torch.no_grad():
            cache[0][entry, row], cache[1][entry, row] = k, v
    out, lse = _forward_of_cache(*tensors, **lengths, **options)
    return out.transpose(1, 2), lse


def one_column(cache_batch_idx, block_table):
    """The block table that names the entries of a cache, or its pages; None where neither is asked for."""
    if cache_batch_idx is None:
        return block_table
    check_tensor("cache_batch_idx", cache_batch_idx)
    if block_table is not None or cache_batch_idx.dim() != 1:
        raise ValueError(
            f"flash_cute.compat: cache_batch_idx must have shape (batch,), and no pages beside it, got "
            f"{tuple(cache_batch_idx.shape)}"
        )
    return cache_batch_idx[:, None]


def _check_new(q, cache, new, cache_seqlens, cache_leftpad):
    """Do k and v fit the cache, and are all tensors where q is, which meta tensors would not tell?"""
    if cache_leftpad is not None:
        check_tensor("cache_leftpad", cache_leftpad)
    named = {"k_cache": cache[0], "v_cache": cache[1], "k": new[0], "v": new[1]}
    named |= {"cache_seqlens": cache_seqlens, "cache_leftpad": cache_leftpad}
    for name, x in named.items():
        if isinstance(x, torch.Tensor) and x.device != q.device:
            raise ValueError(
                f"flash_cute.compat: {name} is on device {x.device} and q on {q.device}; they must be the "
                "same"
            )
    for name, rows, whole in (("k", new[0], cache[0]), ("v", new[1], cache[1])):
        expected = (whole.shape[0], new[0].shape[1], *whole.shape[2:])
        if tuple(rows.shape) != expected or rows.dtype != whole.dtype:
            raise ValueError(
                f"flash_cute.compat: {name} is {rows.dtype} of shape {tuple(rows.shape)}; "
                f"{whole.dtype} of shape {expected}, as the cache, is accepted"
            )


def _check_rows(q, cache_seqlens, most):
    """What a tensor holds, where FLASH_CUTE_CHECK asks for it."""
    if not (flash_cute.lengths.CHECKED and flash_cute.lengths.are_known(q, cache_seqlens)):
        return
    for sequence, rows in enumerate(cache_seqlens.tolist()):
        if not 0 <= rows <= most:
            raise ValueError(
                f"flash_cute.compat: sequence {sequence} has cache_seqlens {rows}; 0 to {most}, for which "
                "the cache has room, are accepted"
            )


def _rows_of_cache(cache_seqlens, q, most):
    """cache_seqlens as int32 (batch,), or None."""
    if cache_seqlens is None:
        return None
    if not isinstance(cache_seqlens, torch.Tensor):
        rows = integer(cache_seqlens)
        if rows is None or not 0 <= rows <= most:
            # Of a symbolic one dynamo knows no repr.
            value = shown(cache_seqlens) if rows is None else int(rows)
            raise ValueError(
                f"flash_cute.compat: cache_seqlens is {value}; 0 to {most}, for which the cache "
                "has room, or a tensor is accepted"
            )
        return torch.full((q.shape[0],), rows, dtype=torch.int32, device=q.device)
    shape = tuple(cache_seqlens.shape)
    if cache_seqlens.dtype != torch.int32 or shape != (q.shape[0],):
        raise ValueError(
            f"flash_cute.compat: cache_seqlens is {cache_seqlens.dtype} of shape {shape}; "
            f"torch.int32 of shape ({q.shape[0]},) is accepted"
        )
    return cache_seqlens


def integer(value):
    """An integer's value, symbolic or not; None of anything else."""
    if isinstance(value, int | torch.SymInt):
        return None if isinstance(value, bool) else value
    if isinstance(value, torch.Tensor) and value.is_meta:  # which holds none
        return None
    try:
        return index(value)
    except TypeError:  # also of an array, whose __index__ is for one element
        return None


def _heads_first(**tensors):
    """(batch, seqlen, heads, head_dim) as flash_cute takes them."""
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
        if tensor.dim() != 4:
            shape = tuple(tensor.shape)
            raise ValueError(
                f"flash_cute.compat: {name} has shape {shape}; (batch, seqlen, heads, head_dim) is accepted"
            )
    (key, k), (value, v) = list(tensors.items())[-2:]
    if v.shape != k.shape:  # forward would show them heads first
        raise ValueError(
            f"flash_cute.compat: {value} must have {key}'s shape, {tuple(k.shape)}, got {tuple(v.shape)}"
        )
    try:
        return [tensor.transpose(1, 2) for tensor in tensors.values()]
    except RuntimeError:
        require_stored("compat", **tensors)
        raise


def check_tensor(name, value):
    if not isinstance(value, torch.Tensor):
        kind = type(value).__name__
        raise TypeError(f"flash_cute.compat: {name} is of type {kind}; a torch.Tensor is accepted")


def unstacked(name, tensor, *sizes):
    """The tensors that lie in one, as many as its size in the last dimension but two; sizes: what each is."""
    check_tensor(name, tensor)
    if tensor.dim() != len(sizes) or tensor.shape[-3] != sizes[-3]:
        raise ValueError(
            f"flash_cute.compat: {name} must have shape ({', '.join(map(str, sizes))}), got "
            f"{tuple(tensor.shape)}"
        )
    try:
        return tensor.unbind(-3)
    except RuntimeError:
        require_stored("compat", **{name: tensor})
        raise


def _options(softmax_scale, causal, window_size, deterministic, refused):
    for name, value in refused.items():
        # Of numbers dynamo may know no attribute.
        is_number = isinstance(value, int | float | torch.SymInt | torch.SymFloat)
        is_tensor = not is_number and bool(getattr(value, "shape", ()))  # or an array
        if is_tensor or value not in _ACCEPTED[name]:
            given = "a tensor" if is_tensor else shown(value)
            accepted = " or ".join(map(repr, _ACCEPTED[name]))
            raise NotImplementedError(f"flash_cute.compat: {name} is {given}; {accepted} is accepted")
    return {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window": _limits(window_size),
        "deterministic": deterministic,
    }


def _limits(window_size):
    """(left, right) with None for no limit, of a pair, or of a tensor or an array of two."""
    if hasattr(window_size, "shape"):
        is_pair = tuple(window_size.shape) == (2,)
    else:
        is_pair = isinstance(window_size, tuple | list) and len(window_size) == 2
    limits = [-1 if limit is None else integer(limit) for limit in window_size] if is_pair else [None]
    if None in limits:
        raise TypeError(f"flash_cute.compat: window_size must be (left, right), got {shown(window_size)}")
    return tuple(None if limit == -1 else limit for limit in limits)
