"""Sequences of unequal lengths in Python: nested tensors, the values of lengths."""

from __future__ import annotations

import os
from itertools import pairwise

import torch

from flash_cute._torch import fakes, private
from flash_cute._torch.autocast import as_cast
from flash_cute._torch.checks import require_stored
from flash_cute.options import SCALES
from flash_cute.wording import OURS

# Whether calls look at what their tensors of lengths hold, which waits for the device.
CHECKED = os.environ.get("FLASH_CUTE_CHECK", "").lower() not in ("", "0", "false", "no", "off")

Lengths = dict[str, torch.Tensor]  # those of options.LENGTHS that are given


def unwrapped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Lengths):
    """q, k and v of nested tensors as packed ones, (total, heads, head_dim), and where their sequences lie.

    The data are not copied. Raises ValueError if one of them is not (batch, heads, ragged, head_dim), jagged.
    """
    for name, tensor in {"q": q, "k": k, "v": v}.items():
        if not tensor.is_nested:
            raise _error(f"q is nested and {name} is not; they must be alike")
        if tensor.layout != torch.jagged:
            raise _error(f"{name} is nested with layout {tensor.layout}; torch.jagged is accepted")
        ragged = private.ragged_dimension(tensor)
        if tensor.dim() != 4 or ragged != 2:
            raise _error(
                f"{name} is nested with {tensor.dim()} dimensions, ragged in dimension {ragged}; "
                "(batch, heads, ragged, head_dim), as x.transpose(1, 2) gives it, is accepted"
            )
    if k.shape[0] != q.shape[0]:
        raise _error(f"k has batch {k.shape[0]} and q {q.shape[0]}; they must be the same")
    if "ranges" in given:
        raise _error("ranges is given with nested tensors; pack the sequences and call forward_varlen")
    if given:
        raise _error(f"{next(iter(given))} is given with nested tensors, which have lengths of their own")
    # Tensors with lengths have the same symbolic size where these are the same, whatever the offsets.
    if v.shape[2] != k.shape[2] or (k.lengths() is not None and v.offsets() is not k.offsets()):
        raise _error("k and v are nested with different offsets; make both from the same offsets tensor")
    given = {
        "cu_seqlens_q": q.offsets(),
        "cu_seqlens_k": k.offsets(),
        "seqused_q": q.lengths(),
        "seqused_k": k.lengths(),
    }
    if k.offsets() is q.offsets():
        del given["cu_seqlens_k"]
    require_stored("forward", **given)
    given = {name: _as_int32(tensor) for name, tensor in given.items() if tensor is not None}
    return *(tensor.values().transpose(0, 1) for tensor in (q, k, v)), given


def _as_int32(tensor: torch.Tensor) -> torch.Tensor:
    if CHECKED and tensor.dtype != torch.int32:  # what is too large must not look small
        bounds = torch.iinfo(torch.int32)
        tensor = tensor.clamp(bounds.min, bounds.max)
    return tensor.to(torch.int32)


def sequences_of_rows(total: int, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the rows of packed sequences: which sequence has each, -1 for none, and its place in it."""
    row = torch.arange(total, device=offsets.device, dtype=torch.int32)
    begins, ends = offsets[:-1], offsets[1:].contiguous()
    sequence = torch.searchsorted(ends, row, right=True)
    begin = torch.cat((begins, begins.new_full((1,), total)))[sequence]  # of none, behind all rows
    return sequence.masked_fill(begin > row, -1), (row - begin).long()


def with_a_row(k: torch.Tensor, v: torch.Tensor, given: Lengths):
    """k, v and lengths where no keys at all are one that doesn't count: kernels need its rows for sinks."""
    packed = "cu_seqlens_q" in given and k.dim() == 3
    if k.dim() not in (3, 4) or k.shape[:-1] != v.shape[:-1] or k.shape[0 if packed else 2] > 0:
        return k, v, given
    batch = given["cu_seqlens_q"].shape[0] - 1 if packed else k.shape[0]
    row = (0, 0, 0, 0, 0, 1) if packed else (0, 0, 0, 1)
    k, v = (torch.nn.functional.pad(x, row) for x in (k, v))
    none = torch.zeros(batch, dtype=torch.int32, device=k.device)
    return k, v, given | {"seqused_k": none}


def laid_out(ranges: torch.Tensor) -> torch.Tensor:
    """ranges as they are read: an entry of the batch lies without gaps, and one may stand for all."""
    if ranges.layout != torch.strided:
        return ranges
    expected = 1
    for dim in range(ranges.dim() - 1, 0 if ranges.dim() == 5 else -1, -1):
        if ranges.shape[dim] > 1 and ranges.stride(dim) != expected:
            return ranges.contiguous()
        expected *= ranges.shape[dim]
    return ranges


def wrapped(out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of packed sequences nested like q, lse without its last dimension."""
    return tuple(
        torch.nested.nested_tensor_from_jagged(values, q.offsets(), q.lengths(), jagged_dim=2)
        for values in (out.transpose(0, 1), lse)
    )


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Lengths) -> None:
    """Raises ValueError if a sequence leaves its tensor, or more of its rows are to count than it has.

    Values that are not known yet are not read.
    """
    if not are_known(q, *given.values()):
        return
    fakes.check(*map(as_cast, (q, k, v)), **given)
    require_stored("forward", **given)
    _check_side("q", q, given)
    _check_side("k", k, given)
    for name in SCALES:
        if name in given:
            check_scale(name, given[name])


def are_known(q: torch.Tensor, *given: torch.Tensor) -> bool:
    """Can values be read? Not while a compiler traces or a CUDA graph is captured, nor of subclasses."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if private.transforms_are_active() or private.proxy_mode() is not None:
        return False
    plain = torch.Tensor, torch.nn.Parameter
    if any(type(tensor) not in plain or tensor.is_meta for tensor in given):
        return False
    return not (q.is_cuda and torch.cuda.is_current_stream_capturing())


def check_offsets(name: str, offsets: list[int], side: str, total: int) -> None:
    for sequence, (begin, end) in enumerate(pairwise(offsets)):
        if not 0 <= begin <= end <= total:
            raise _error(
                f"sequence {sequence} has {name} {begin} to {end}; offsets that do not decrease, "
                f"from 0 to {side}'s total {total}, are accepted"
            )


def check_scale(name: str, scale: torch.Tensor) -> None:
    for value in scale.flatten().tolist():
        if not 0 < value < float("inf"):
            raise _error(f"{name} has {value:g}; finite numbers > 0 are accepted")


def _check_side(side: str, tensor: torch.Tensor, given: Lengths) -> None:
    table = given.get("block_table") if side == "k" else None
    if "cu_seqlens_q" in given and tensor.dim() == 3:
        name = f"cu_seqlens_{side}" if f"cu_seqlens_{side}" in given else "cu_seqlens_q"
        offsets = given[name].tolist()
        check_offsets(name, offsets, side, tensor.shape[0])
        room = [end - begin for begin, end in pairwise(offsets)]
    elif table is not None:
        room = [tensor.shape[2] * table.shape[1]] * table.shape[0]
    else:
        room = [tensor.shape[2]] * tensor.shape[0]
    for name, meaning in ((f"seqused_{side}", "its rows"), (f"leftpad_{side}", "its keys that count")):
        if name in given:
            values = given[name].tolist()
            for sequence, (value, most) in enumerate(zip(values, room, strict=True)):
                if not 0 <= value <= most:
                    raise _error(
                        f"sequence {sequence} has {name} {value}; 0 to {most}, {meaning}, are accepted"
                    )
            room = values if name.startswith("seqused") else room
    if table is not None:
        for sequence, (pages, used) in enumerate(zip(table.tolist(), room, strict=True)):
            for page in pages[: -(-used // tensor.shape[2])]:
                if not 0 <= page < tensor.shape[0]:
                    raise _error(
                        f"sequence {sequence} has page {page} in block_table; 0 to {tensor.shape[0] - 1} "
                        "are accepted"
                    )


def _error(sentence: str) -> ValueError:
    return ValueError(OURS + sentence)
