"""The operators under torch.vmap."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NoReturn

import torch

from flash_cute._torch import library, private
from flash_cute._torch.fakes import RESULTS
from flash_cute.options import LENGTHS, OPERANDS, SCALES
from flash_cute.wording import OURS

TENSORS = "q", "k", "v", *OPERANDS, *RESULTS


def register(op, rule, tensor_names=TENSORS) -> None:
    """op's rule under vmap. torch.library.register_vmap has none for tensors that only have a keyword."""
    names = private.argument_names(op)

    def kernel(keyset, *args, **kwargs):
        named = dict(zip(names, args, strict=False)) | kwargs
        tensors = {name: named.pop(name) for name in tensor_names if name in named}
        transform = private.current_transform()
        unmapped = lambda tensors, options: op(**tensors, **options)  # noqa: E731
        return private.run_vmap_rule(transform, partial(rule, op), unmapped, tensors, named)

    library.impl(op.name(), kernel, "FuncTorchBatched", with_keyset=True)


def mapped(tensor: torch.Tensor | None, dim: int | None, info) -> torch.Tensor | None:
    """The tensor with what vmap maps over in front."""
    if tensor is None:
        return None
    return tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def into_batch(op, info, in_dims, tensors, options, entries_of="q"):
    """The mapped dimension becomes a part of the batch; with what all of a batch share, a loop.

    Those are sinks and a dropout_seed, by which sequences of a number drop the same in each entry's call.
    entries_of: of which tensor op's results have the entries.
    """
    if tensors.get("sinks") is not None or tensors.get("dropout_seed") is not None:
        return _one_by_one(op, info, in_dims, tensors, options)
    if tensors.get("block_table") is not None:
        raise NotImplementedError(f"{OURS}vmap can't map a cache in pages; give block_table more sequences")

    def entries(name: str) -> torch.Size:
        """Of one call; of a q that has no dimension none."""
        tensor, dim = tensors[name], in_dims[0][name]
        return (tensor.shape if dim is None else tensor.movedim(dim, 0).shape[1:])[:1]

    def folded(name: str, dim: int | None) -> torch.Tensor | None:
        if name in _FOLDS and tensors[name] is not None:
            return _FOLDS[name](name, tensors[name], dim, info, *entries("q"))
        tensor = mapped(tensors[name], dim, info)
        if tensor is None:
            return None
        if tensor.dim() == 1:
            accepted = "(batch,)" if name in LENGTHS else "(batch, heads, seqlen, head_dim)"
            raise ValueError(f"{OURS}{name} has shape (); {accepted} is accepted")
        tensor = tensor.flatten(0, 1)
        return tensor.contiguous() if name in LENGTHS else tensor

    folds = {name: folded(name, in_dims[0][name]) for name in tensors}
    results = op(**folds, **options)
    is_empty = [result.dim() == 1 for result in results]  # a gradient that is not needed
    return (
        tuple(
            result if empty else result.unflatten(0, (info.batch_size, *entries(entries_of)))
            for result, empty in zip(results, is_empty, strict=True)
        ),
        tuple(None if empty else 0 for empty in is_empty),
    )


def bias_gradient(op, info, in_dims, tensors, options):
    """into_batch of _bias_gradient; a bias that calls share has a gradient in each."""
    bias, dims = tensors.get("bias"), in_dims[0]
    if bias is not None and dims["bias"] is None:
        tensors = tensors | {"bias": mapped(bias, None, info)}
        dims = dims | {"bias": 0}
    return into_batch(op, info, (dims,), tensors, options, "bias")


def weights(op, info, in_dims, tensors, options):
    """into_batch of _weights."""
    (found,), (dim,) = into_batch(lambda **given: (op(**given),), info, in_dims, tensors, options)
    return found, dim


def _folded_by_entry(name: str, tensor: torch.Tensor, dim: int | None, info, batch: int) -> torch.Tensor:
    """Ranges, masks and biases of all calls: an entry for each sequence, or one for those that share it.

    Entries of a bias serve as many sequences as in one call, whose own lie behind each other.
    """
    if dim is None and tensor.shape[:1] == (1,):
        return tensor
    tensor = mapped(tensor, dim, info)
    _require_dimension(name, tensor)
    if name != "bias" and tensor.shape[1] == 1:
        tensor = tensor.expand(-1, batch, *tensor.shape[2:])
    tensor = tensor.flatten(0, 1)
    return tensor.contiguous() if name == "ranges" else tensor


def _folded_slopes(name: str, slopes: torch.Tensor, dim: int | None, info, batch: int) -> torch.Tensor:
    """(heads,) where all calls share them, else (batch, heads)."""
    for_all = slopes.dim() - (dim is not None) == 1
    if for_all and dim is None:
        return slopes
    slopes = mapped(slopes, dim, info)
    _require_dimension(name, slopes)
    return (slopes.unsqueeze(1).expand(-1, batch, -1) if for_all else slopes).flatten(0, 1)


def _folded_scale(name: str, scale: torch.Tensor, dim: int | None, info, batch: int) -> torch.Tensor:
    """As _folded_slopes, of the scales of a cache, which may be one number."""
    if dim is None and scale.dim() == 0:
        return scale
    return _folded_slopes(name, scale, dim, info, batch)


def _require_dimension(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError for one that has nothing but what vmap maps over."""
    if tensor.dim() < 2:
        raise ValueError(f"{OURS}{name} has shape () under vmap; at least one dimension is accepted")


_FOLDS = dict.fromkeys(("ranges", "mask", "bias"), _folded_by_entry) | {"alibi_slopes": _folded_slopes}
_FOLDS |= dict.fromkeys(SCALES, _folded_scale)


def _one_by_one(op, info, in_dims, tensors, options):
    def entry(index: int) -> dict[str, torch.Tensor | None]:
        dims = in_dims[0]
        return {
            name: x if x is None or dims[name] is None else selected(x.movedim(dims[name], 0), index)
            for name, x in tensors.items()
        }

    def selected(x: torch.Tensor, index: int) -> torch.Tensor:
        return x[index] if info.batch_size else x.new_zeros(x.shape[1:])  # for the shapes of no results

    results = [op(**entry(index), **options) for index in range(max(1, info.batch_size))]
    stacked = tuple(torch.stack(parts)[: info.batch_size] for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def refusing(what: str) -> Callable[..., NoReturn]:
    """A rule, or a kernel under vmap, that says what can't be mapped."""

    def refuse(*args, **kwargs):
        raise NotImplementedError(f"{OURS}vmap can't map {what}")

    return refuse


refuse_packed = refusing("packed sequences; pack those of all its entries into one call")
refuse_out = refusing("a call with out; leave it out")
