"""What PyTorch asks about the operators beside running them: shapes while tracing, vmap, FLOPs."""

from __future__ import annotations

from functools import partial

import torch
from torch.utils.flop_counter import register_flop_formula

from flash_cute import (
    _C,  # noqa: F401  importing it registers the operators
    torch_private,
)
from flash_cute.torch_private import hint
from flash_cute.wording import OURS

# The tensors of integers: lengths and places, and which keys queries see.
LENGTHS = "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k", "block_table", "ranges"
RESULTS = "out", "lse", "dout", "dlse"
TENSORS = "q", "k", "v", *LENGTHS, "sinks", *RESULTS

_check = torch.ops.flash_cute._check.default


def check(q, k, v, causal=False, *, window_left=None, window_right=None, **options):
    """The checks of a call, by what is known while it is traced; options may have tensors of TENSORS.

    With out it is a call that writes into it, with lse, too, one of the backward.
    """
    given = {name: options.pop(name, None) for name in (*LENGTHS, "sinks", *RESULTS)}
    given = {name: tensor for name, tensor in given.items() if tensor is not None}
    sizes = {name: hints(tensor.shape) for name, tensor in given.items()}
    shapes = [hints(tensor.shape) for tensor in (q, k, v)]
    steps = [
        hint(tensor.stride(-1)) if tensor.dim() else 1 for name, tensor in given.items() if name in LENGTHS
    ]
    if any(None in known for known in (*shapes, *sizes.values(), steps)):
        return
    tensors = q, k, v, *given.values()
    with torch_private.without_modes():
        _check(
            *shapes,
            [tensor.dtype for tensor in tensors],
            [tensor.device for tensor in tensors],
            steps,
            causal,
            window_left=hint(window_left),
            window_right=hint(window_right),
            **sizes,
            **options,
        )


def _traced(q, k, v, causal=False, **options):
    """The results' shapes, strides and types, after the checks of a call that runs."""
    check(q, k, v, causal, **options)
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _traced_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k=None, causal=False, **options):
    check(q, k, v, causal, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options)
    return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def _traced_out(q, k, v, out, causal=False, **options):
    check(q, k, v, causal, out=out, **options)
    packed = options.get("cu_seqlens_q") is not None
    return q.new_empty(q.shape[1::-1] if packed else q.shape[:3], dtype=torch.float32)


def _traced_backward(
    dout,
    dlse,
    q,
    k,
    v,
    out,
    lse,
    causal=False,
    *,
    needs_dq=True,
    needs_dkv=True,
    deterministic=False,
    sinks=None,
    **options,
):
    check(q, k, v, causal, dout=dout, dlse=dlse, out=out, lse=lse, sinks=sinks, **options)
    needed = (q, needs_dq), (k, needs_dkv), (v, needs_dkv), (q if sinks is None else sinks, sinks is not None)
    return tuple(torch.empty_like(x) if is_needed else x.new_empty(0) for x, is_needed in needed)


def _traced_backward_varlen(
    dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k=None, causal=False, **options
):
    offsets = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    return _traced_backward(dout, dlse, q, k, v, out, lse, causal, **offsets, **options)


def hints(sizes: torch.Size) -> list[int | None]:
    return [hint(size) for size in sizes]


def mapped(tensor: torch.Tensor | None, dim: int | None, info) -> torch.Tensor | None:
    """The tensor with what vmap maps over in front."""
    if tensor is None:
        return None
    return tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def vmap(op, info, in_dims, tensors, options):
    """The mapped dimension becomes a part of the batch; with sinks, which all of a batch share, a loop."""
    if tensors.get("sinks") is not None:
        return _vmap_one_by_one(op, info, in_dims, tensors, options)
    if tensors.get("block_table") is not None:
        raise NotImplementedError(f"{OURS}vmap can't map a cache in pages; give block_table more sequences")

    def folded(name: str, dim: int | None) -> torch.Tensor | None:
        if name == "ranges" and tensors[name] is not None:
            batch = mapped(tensors["q"], in_dims[0]["q"], info).shape[1]
            return _folded_ranges(tensors[name], dim, info, batch)
        tensor = mapped(tensors[name], dim, info)
        if tensor is None:
            return None
        if tensor.dim() == 1:
            accepted = "(batch,)" if name in LENGTHS else "(batch, heads, seqlen, head_dim)"
            raise ValueError(f"{OURS}{name} has shape (); {accepted} is accepted")
        tensor = tensor.flatten(0, 1)
        return tensor.contiguous() if name in LENGTHS else tensor

    folds = {name: folded(name, in_dims[0][name]) for name in tensors}
    q, dim = tensors["q"], in_dims[0]["q"]
    batch = (q.shape if dim is None else q.movedim(dim, 0).shape[1:])[0]
    results = op(**folds, **options)
    is_empty = [result.dim() == 1 for result in results]  # a gradient that is not needed
    return (
        tuple(
            result if empty else result.unflatten(0, (info.batch_size, batch))
            for result, empty in zip(results, is_empty, strict=True)
        ),
        tuple(None if empty else 0 for empty in is_empty),
    )


def _folded_ranges(ranges: torch.Tensor, dim: int | None, info, batch: int) -> torch.Tensor:
    """Of all calls: an entry for each sequence, or the only one of them all."""
    if dim is None and ranges.shape[0] == 1:
        return ranges
    ranges = mapped(ranges, dim, info)
    if ranges.dim() > 1 and ranges.shape[1] == 1:
        ranges = ranges.expand(-1, batch, *ranges.shape[2:])
    return ranges.flatten(0, 1).contiguous()


def _vmap_one_by_one(op, info, in_dims, tensors, options):
    def entry(index: int) -> dict[str, torch.Tensor | None]:
        dims = in_dims[0]
        return {
            name: x if x is None or dims[name] is None else x.select(dims[name], index)
            for name, x in tensors.items()
        }

    results = [op(**entry(index), **options) for index in range(info.batch_size)]
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def vmap_varlen(op, info, in_dims, tensors, options):
    raise NotImplementedError(
        f"{OURS}vmap can't map packed sequences; pack those of all its entries into one call"
    )


def count_versions(op, library: torch.library.Library) -> None:
    """Lets autograd, which counts the versions of what it saves, notice the arguments that op writes into."""
    written = torch_private.written_arguments(op)

    def kernel(keyset, *args, **kwargs):
        results = op.redispatch(torch_private.below_versions(keyset), *args, **kwargs)
        for place, name in written:
            tensor = args[place] if place < len(args) else kwargs[name]
            torch.autograd.graph.increment_version(tensor)
        return results

    library.impl(op.name().split("::")[1], kernel, "ADInplaceOrView", with_keyset=True)


def vmapped(op, rule, tensor_names=TENSORS):
    """op's kernel under vmap. torch.library.register_vmap has none for tensors that only have a keyword."""
    names = torch_private.argument_names(op)

    def kernel(keyset, *args, **kwargs):
        named = dict(zip(names, args, strict=False)) | kwargs
        tensors = {name: named.pop(name) for name in tensor_names if name in named}
        transform = torch_private.current_transform()
        unmapped = lambda tensors, options: op(**tensors, **options)  # noqa: E731
        return torch_private.run_vmap_rule(transform, partial(rule, op), unmapped, tensors, named)

    return kernel


def _refuse_vmap(*args, **kwargs):
    raise NotImplementedError(f"{OURS}vmap can't map a call with out; leave it out")


def _flops(q: tuple[int, ...], k: tuple[int, ...], v, *args, block_table=None, **kwargs) -> int:
    """As PyTorch counts its own attention: both products of all pairs, those that a mask hides too."""
    return 4 * q[0] * q[1] * q[2] * _keys(k, block_table) * q[3]


def _keys(k: tuple[int, ...], block_table: tuple[int, int] | None) -> int:
    """The keys of a sequence that has all rows of a batch's entry, or of its pages."""
    return k[2] * (block_table[1] if block_table else 1)


def _flops_varlen(q, k, v, cu_seqlens_q, *args, block_table=None, **kwargs) -> int:
    """Likewise, as if every sequence had keys of mean number: the lengths are on the device."""
    total_q, heads, head_dim = q
    mean_k = _keys(k, block_table) if len(k) == 4 else -(-k[0] // max(1, cu_seqlens_q[0] - 1))
    return 4 * heads * head_dim * total_q * mean_k


def _flops_out(q, k, v, out, *args, cu_seqlens_q=None, **kwargs) -> int:
    if cu_seqlens_q is None:
        return _flops(q, k, v, **kwargs)
    return _flops_varlen(q, k, v, cu_seqlens_q, **kwargs)


def _flops_backward(dout, dlse, q, k, v, *args, **kwargs) -> int:
    """Five products in place of two."""
    return _flops(q, k, v) * 5 // 2


def _flops_backward_varlen(dout, dlse, q, k, v, out, lse, cu_seqlens_q, *args, **kwargs) -> int:
    return _flops_varlen(q, k, v, cu_seqlens_q) * 5 // 2


def register(library: torch.library.Library) -> None:
    ops = torch.ops.flash_cute
    for op, fake, rule, formula in (
        (ops._forward, _traced, vmap, _flops),
        (ops._forward_varlen, _traced_varlen, vmap_varlen, _flops_varlen),
        (ops._backward, _traced_backward, vmap, _flops_backward),
        (ops._backward_varlen, _traced_backward_varlen, vmap_varlen, _flops_backward_varlen),
    ):
        name = op.default.name()
        torch.library.register_fake(name, fake, lib=library)
        library.impl(name, vmapped(op.default, rule), "FuncTorchBatched", with_keyset=True)
        register_flop_formula(op)(formula)
    out = ops._forward_out
    torch.library.register_fake(out.default.name(), _traced_out, lib=library)
    library.impl("_forward_out", _refuse_vmap, "FuncTorchBatched")
    register_flop_formula(out)(_flops_out)
    count_versions(out.default, library)
    # Of forward_varlen PyTorch's own rule is a loop over the mapped dimension.
    library.impl("forward", vmapped(ops.forward.default, vmap), "FuncTorchBatched", with_keyset=True)
