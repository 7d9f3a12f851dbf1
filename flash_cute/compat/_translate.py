"""What the functions of flash_attn's versions share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from operator import index

import torch

import flash_cute
from flash_cute._torch.checks import require_stored
from flash_cute.wording import named, shown

# The values that ask for nothing that flash_cute has not.
_ACCEPTED = {
    "qv": (None,),
    "q_descale": (None,),
    "k_descale": (None,),
    "v_descale": (None,),
    "attention_chunk": (0,),  # beside a cache
}
# What flash_cute.forward calls otherwise than flash_attn does.
NAMES = {"window": "window_size", "sinks": "s_aux", "k_scale": "k_descale", "v_scale": "v_descale"}


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


_forward = renaming(flash_cute.forward, NAMES)
_forward_varlen = renaming(flash_cute.forward_varlen, NAMES)


def dense(
    q, k, v, softmax_scale, causal, window_size, deterministic, *, chunk=0, lse_is_read=False, **others
):
    """(out, lse): q, k, v and out are (batch, seqlen, heads, head_dim), lse (batch, heads, seqlen_q).

    chunk: FlashAttention-3's attention_chunk, see _chunks. lse_is_read: else it may be another than
    flash_attn's, see lse_of_alibi. others: of common_options.
    """
    options = common_options(softmax_scale, causal, window_size, deterministic, **others)
    q, k, v = heads_first(q=q, k=k, v=v)
    if (size := _size_of_chunks(chunk)) > 0:
        seqlen_q, seqlen_k = q.shape[2], k.shape[2]
        place = torch.arange(seqlen_k - seqlen_q, seqlen_k, device=q.device).unsqueeze(0)
        options["ranges"] = _chunks(size, place, seqlen_q, seqlen_k)
    out, lse = _forward(q, k, v, **options)
    if lse_is_read and adds_keys(options, k.shape[2]):
        place = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device)
        lse = lse_of_alibi(lse, options["alibi_slopes"], place)
    return out.transpose(1, 2), lse


def packed(
    q, k, v, lengths, softmax_scale, causal, window_size, deterministic, *, chunk=0, lse_is_read=False,
    longest=None, **others,
):  # fmt: skip
    """(out, lse): q, k, v and out are (total, heads, head_dim), lse (heads, total_q).

    lengths: those of flash_cute.forward_varlen. With a block_table k and v are pages, (pages, page_size,
    heads, head_dim), and of cu_seqlens_k the differences count. longest: max_seqlen_k, if it is a number. The
    others: as of dense.
    """
    options = common_options(softmax_scale, causal, window_size, deterministic, **others)
    require_stored("compat", **lengths)  # some are read here, before the operators' own checks
    if (size := _size_of_chunks(chunk)) > 0:
        offsets = [lengths["cu_seqlens_q"], lengths["cu_seqlens_k"]]
        require_int32(q, cu_seqlens_q=offsets[0])
        require_int32(q, len(offsets[0]), cu_seqlens_k=offsets[1])
        rows = [lengths[f"seqused_{side}"] for side in "qk"]
        rows = [x.diff() if used is None else used for x, used in zip(offsets, rows, strict=True)]
        sequence, place = flash_cute.lengths.sequences_of_rows(q.shape[0], offsets[0])
        if len(offsets[0]) > 1:  # else no row is of a sequence
            place = place + (rows[1] - rows[0])[sequence.clamp(min=0)]
        options["ranges"] = _chunks(size, place, q.shape[0], k.shape[0])
    if lengths.get("block_table") is not None:
        check_tensor("q", q)
        require_int32(q, cu_seqlens_q=lengths["cu_seqlens_q"])
        require_int32(q, len(lengths["cu_seqlens_q"]), cu_seqlens_k=lengths["cu_seqlens_k"])
        lengths = lengths | {"cu_seqlens_k": None, "seqused_k": lengths["cu_seqlens_k"].diff()}
        k, v = heads_first("(pages, page_size, heads, head_dim)", k=k, v=v)
    out, lse = _forward_varlen(q, k, v, **lengths, **options)
    if lse_is_read and adds_keys(options, longest):
        slopes, offsets = options["alibi_slopes"], lengths["cu_seqlens_q"]
        keys = lengths["seqused_k"] if lengths["cu_seqlens_k"] is None else lengths["cu_seqlens_k"].diff()
        lse = lse_of_alibi(lse, slopes, *_places_of_rows(q, offsets, keys))
    return out, lse


def adds_keys(options, longest) -> bool:
    """Does flash_attn add slope * j to the score of key j, as where it is causal, not - slope * distance?

    longest: so many keys or more in a window are no limit to flash_attn.
    """
    if options.get("alibi_slopes") is None:
        return False
    left, right = options["window"]
    longest = integer(longest)
    unlimited = left is None or (longest is not None and left >= longest)
    return unlimited and (options["causal"] or right == 0)


def lse_of_alibi(lse, slopes, place, sequence=None):
    """flash_attn's LSE where adds_keys: of a query at key `place` its scores are larger by slope * place.

    lse: (batch, heads, rows) with place (rows,) or (batch, rows); or (heads, rows) with the sequence of each.
    """
    if sequence is None:
        return lse + slopes.unsqueeze(-1) * (place if place.dim() == 1 else place.unsqueeze(1))
    slopes = slopes.unsqueeze(-1) if slopes.dim() == 1 else slopes[sequence].mT
    return lse + slopes * place


def _places_of_rows(q, offsets, keys):
    """Of packed queries: the key at which each stands, and its sequence; 0 for rows of none."""
    sequence, place = flash_cute.lengths.sequences_of_rows(q.shape[0], offsets)
    sequence = sequence.clamp(min=0)
    if len(offsets) > 1:  # else no row is of a sequence
        place = place + (keys - offsets.diff())[sequence]
    return place, sequence


def _size_of_chunks(value):
    size = integer(value)
    if size is None or size < 0:
        raise ValueError(f"flash_cute.compat: attention_chunk must be an int >= 0, got {shown(value)}")
    return size


def _chunks(size, place, *rows):
    """The ranges of attention_chunk: a query at this place sees the chunk of `size` keys that it lies in.

    causal and window_size cut it. rows: of q and of k, beyond which no chunk reaches.
    """
    return flash_cute.masks.chunks(min(size, max(*rows, 1)), place, causal=False)


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


def heads_first(dimensions="(batch, seqlen, heads, head_dim)", **tensors):
    """Tensors of these dimensions as flash_cute takes them, with the second and third exchanged."""
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
        if tensor.dim() != 4:
            shape = tuple(tensor.shape)
            raise ValueError(f"flash_cute.compat: {name} has shape {shape}; {dimensions} is accepted")
    (key, k), (value, v) = list(tensors.items())[-2:]
    if v.shape[:-1] != k.shape[:-1]:  # forward would show them heads first
        raise ValueError(
            f"flash_cute.compat: {value} must have {key}'s shape but for the last dimension, "
            f"{tuple(k.shape)}, got {tuple(v.shape)}"
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


def require_device(q, **tensors):
    """Are they, where they are given, tensors on q's device?"""
    for name, x in tensors.items():
        if x is None:
            continue
        check_tensor(name, x)
        if x.device != q.device:
            raise ValueError(
                f"flash_cute.compat: {name} is on device {x.device} and q on {q.device}; they must be the "
                "same"
            )


def require_int32(q, size=None, **tensors):
    """Are they tensors on q's device, int32 and (size,), or of any size?"""
    for name, x in tensors.items():
        check_tensor(name, x)
        require_device(q, **{name: x})
        expected = (max(x.numel(), 1) if size is None else size,)
        if x.dtype != torch.int32 or tuple(x.shape) != expected:
            raise ValueError(
                f"flash_cute.compat: {name} is {x.dtype} of shape {tuple(x.shape)}; torch.int32 of shape "
                f"{expected} is accepted"
            )


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


def common_options(
    softmax_scale, causal, window_size, deterministic, *, sinks=None, softcap=0.0, dropout_p=0.0,
    alibi_slopes=None, **refused,
):  # fmt: skip
    """What flash_cute.forward takes of these. refused: arguments whose values must be those of _ACCEPTED."""
    for name, value in refused.items():
        # Of numbers dynamo may know no attribute.
        is_number = isinstance(value, int | float | torch.SymInt | torch.SymFloat)
        is_tensor = not is_number and bool(getattr(value, "shape", ()))  # or an array
        if is_tensor or value not in _ACCEPTED[name]:
            given = "a tensor" if is_tensor else shown(value)
            accepted = " or ".join(map(repr, _ACCEPTED[name]))
            raise NotImplementedError(f"flash_cute.compat: {name} is {given}; {accepted} is accepted")
    options = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window": _limits(window_size),
        "deterministic": deterministic,
    }
    for name, value in (("softcap", softcap), ("dropout_p", dropout_p)):
        if type(value) not in (int, float) or value != 0:
            options[name] = value
    if alibi_slopes is not None:
        options["alibi_slopes"] = alibi_slopes
    if sinks is None:
        return options
    # As FlashAttention-3 any 16-bit type is taken, whichever q has.
    is_short = isinstance(sinks, torch.Tensor) and sinks.dtype in (torch.float16, torch.bfloat16)
    return options | {"sinks": sinks.float() if is_short else sinks}


def _limits(window_size):
    """(left, right) with None for no limit, of a pair, or of a tensor or an array of two."""
    if hasattr(window_size, "shape"):
        is_pair = tuple(window_size.shape) == (2,)
    else:
        is_pair = isinstance(window_size, tuple | list) and len(window_size) == 2
    limits = [-1 if limit is None else integer(limit) for limit in window_size] if is_pair else [None]
    if None in limits:
        raise TypeError(f"flash_cute.compat: window_size must be (left, right), got {shown(window_size)}")
    for side, limit in zip(("left", "right"), limits, strict=True):
        if limit < -1:
            raise ValueError(
                f"flash_cute.compat: window_size's {side} limit is {shown(limit)}; -1, which is unlimited, "
                "or more is accepted"
            )
    return tuple(None if limit == -1 else limit for limit in limits)
