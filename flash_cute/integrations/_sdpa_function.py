"""scaled_dot_product_attention by PyTorch's signature and rules, in its place where that is asked for.

Source: torch/nn/functional.py and torch/nn/attention/bias.py of torch 2.11.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, CausalVariant

import flash_cute
from flash_cute import dropout
from flash_cute._torch import private
from flash_cute._torch.autocast import autocast_dtype
from flash_cute.wording import named

_pytorchs = functional.scaled_dot_product_attention
_NAMES = {"q": "query", "k": "key", "v": "value", "softmax_scale": "scale"}
_NAMES |= {"mask": "attn_mask", "bias": "attn_mask"}
_DTYPES = torch.float16, torch.bfloat16, torch.float32
_HAS_KERNELS = bool(flash_cute.supported()["kernels"])  # for GPUs
_WIDEST = 256

_said: set[str] = set()


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention on flash_cute, masks and dropout included.

    Args:
        query: (..., heads, seqlen_q, head_dim), with two dimensions or more.
        key, value: likewise; the heads of query are a multiple of theirs with enable_gqa, else as many.
        attn_mask: bool, True is seen; or float32 or of query's dtype, added to the scores, -inf hides. It
            broadcasts to (..., heads, seqlen_q, seqlen_k). Or a CausalBias of torch.nn.attention.bias.
        dropout_p: as in flash_cute.forward, rounded to a multiple of 1 / 4096.
        is_causal: query i sees key j only if j <= i. Not together with attn_mask.
        scale: multiplies the scores. Default 1 / sqrt(head_dim).
        enable_gqa: may query have more heads?

    What left_to_pytorch has a reason for is computed by PyTorch's own function, with a warning, once for each
    reason.

    Raises:
        RuntimeError: attn_mask and is_causal are both given.
        ValueError, NotImplementedError: as flash_cute.forward.
    """
    if attn_mask is not None and is_causal:
        raise RuntimeError("flash_cute.sdpa: attn_mask must be None where is_causal is True, got a tensor")
    arguments = query, key, value, attn_mask, dropout_p, is_causal
    reason = left_to_pytorch(*arguments, scale=scale, enable_gqa=enable_gqa)
    if reason is not None:
        _say(reason)
        options = {"scale": scale, "enable_gqa": enable_gqa}
        if isinstance(attn_mask, CausalBias):  # whose class looks whether it is asked by the function's name
            call = functional.scaled_dot_product_attention
            return CausalBias.__torch_function__(call, (), arguments, options)
        return _pytorchs(*arguments, **options)
    batch = query.shape[:-3]
    if query.dim() != 4:
        query, key, value = (_with_four_dimensions(x) for x in (query, key, value))
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    options = {}
    if scale is not None:
        options["softmax_scale"] = scale
    if dropout_p:
        options["dropout_p"] = dropout_p
    if isinstance(attn_mask, CausalBias):
        is_causal = attn_mask.variant == CausalVariant.UPPER_LEFT
        options["causal"] = not is_causal
    elif attn_mask is not None:
        attn_mask = _of_scores(attn_mask, batch)
        if attn_mask.dtype == torch.bool:
            options["mask"] = attn_mask.expand(*attn_mask.shape[:3], seqlen_k)
        else:
            options["bias"] = attn_mask
    if is_causal and seqlen_q < seqlen_k:  # whose last keys no query sees
        key, value = key[:, :, :seqlen_q], value[:, :, :seqlen_q]
    if is_causal and seqlen_q > seqlen_k:
        options["window"] = None, seqlen_q - seqlen_k
    elif is_causal:
        options["causal"] = True
    try:
        out = flash_cute.attention(query, key, value, **options)
    except (TypeError, ValueError, NotImplementedError) as error:
        if torch.compiler.is_compiling():  # which can't look into what an error says
            raise
        raise named(error, "flash_cute.sdpa", _NAMES) from None
    return out if len(batch) == 1 else _with_batch(out, batch, arguments[0].dim())


def left_to_pytorch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str | None:
    """Why scaled_dot_product_attention would leave a call to PyTorch's own function; None where it does not.

    What makes no sense is left to PyTorch as well, whose error says so.
    """
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    for x in tensors:
        if not isinstance(x, torch.Tensor):
            return "what is no tensor is among the arguments"
        if x.is_nested or x.layout != torch.strided:
            return "a tensor is nested or not dense"
        if type(x) not in (torch.Tensor, torch.nn.Parameter) and hasattr(type(x), "__tensor_flatten__"):
            return f"a tensor is of type {type(x).__name__}"
        if x.device != query.device and not isinstance(x, CausalBias):
            return "tensors are on several devices"
    reason = _of_device(query.device) or _of_operands(query, key, value, enable_gqa)
    if reason is not None:
        return reason
    if not (scale is None or 0 < scale < torch.inf):
        return "scale is not a finite number > 0"
    if dropout_p and not (0 < dropout_p < 1 and dropout.keep_of(dropout_p) > 0):
        return "dropout_p leaves nothing or is not in [0, 1]"
    if attn_mask is not None and (reason := _of_mask(query, key, attn_mask)):
        return reason
    if private.dual_levels_are_active():
        return "forward-mode differentiation is asked for"
    return None


def _of_device(device: torch.device) -> str | None:
    if device.type == "cpu":
        return None
    if device.type != "cuda" or not _HAS_KERNELS:
        return f"flash_cute has no kernels for device type {device.type}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than Ampere"
    return None


def _of_operands(query, key, value, enable_gqa: bool) -> str | None:
    dtypes = {autocast_dtype(x) for x in (query, key, value)}
    if len(dtypes) > 1 or not dtypes <= {*_DTYPES}:
        return f"dtypes are {', '.join(sorted(map(str, dtypes)))}"
    dims = query.dim()
    if dims < 2 or key.dim() != dims or value.dim() != dims:
        return "query, key and value have not as many dimensions, two or more"
    if not (1 <= query.shape[-1] <= _WIDEST and 1 <= value.shape[-1] <= _WIDEST):
        return f"a head_dim is not in 1 to {_WIDEST}"
    same_keys = key.shape[:-1] == value.shape[:-1] and key.shape[-1] == query.shape[-1]
    if not same_keys or query.shape[:-3] != key.shape[:-3]:
        return "the shapes of query, key and value broadcast or do not fit"
    if dims > 2 and (heads := query.shape[-3]) != (heads_kv := key.shape[-3]):
        if not enable_gqa:
            return "query has another number of heads than key, without enable_gqa"
        if heads_kv == 0 or heads % heads_kv:
            return "the number of heads of query is no multiple of that of key"
    return None


def _of_mask(query, key, mask) -> str | None:
    if isinstance(mask, CausalBias):
        fits = (mask.seq_len_q, mask.seq_len_kv) == (query.shape[-2], key.shape[-2])
        return None if fits else "a CausalBias is for other lengths"
    if mask.dtype != torch.bool and mask.dtype not in (torch.float32, query.dtype):
        return f"attn_mask has dtype {mask.dtype}"
    if not 2 <= mask.dim() <= query.dim():
        return "attn_mask has fewer than two dimensions, or more than query"
    sizes = (*query.shape[:-1], key.shape[-2])[query.dim() - mask.dim() :]
    if any(size not in (1, whole) for size, whole in zip(mask.shape, sizes, strict=True)):
        return "attn_mask does not broadcast to the shape of the scores"
    return None


def _with_four_dimensions(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, -4) if x.dim() > 4 else x[(None,) * (4 - x.dim())]


def _of_scores(mask: torch.Tensor, batch: torch.Size) -> torch.Tensor:
    """(1 or that of batch, ...), the dimensions that broadcast of size 1; a part of batch is repeated."""
    mask = mask[(None,) * max(0, 3 + len(batch) - mask.dim(), 4 - mask.dim())]
    if mask.dim() == 4:
        return mask
    if mask.shape[:-3].numel() != 1:
        mask = mask.expand(*batch, *mask.shape[-3:])
    return mask.flatten(0, -4)


def _with_batch(out: torch.Tensor, batch: torch.Size, dims: int) -> torch.Tensor:
    return out.unflatten(0, batch) if batch else out[(0,) * (4 - dims)]


def _say(reason: str) -> None:
    """Warns of a call that is left to PyTorch, once for each reason."""
    if reason in _said or torch.compiler.is_compiling():
        return
    _said.add(reason)
    sentence = f"flash_cute.sdpa: PyTorch's own scaled_dot_product_attention computes this call, as {reason}"
    warnings.warn(sentence, stacklevel=3)


def activate() -> None:
    """Puts scaled_dot_product_attention in the place of torch.nn.functional's, in the whole process.

    What was imported from there by name before, and graphs that are compiled already, stay as they are.
    """
    functional.scaled_dot_product_attention = scaled_dot_product_attention


def restore() -> None:
    """Puts PyTorch's own function back."""
    functional.scaled_dot_product_attention = _pytorchs


@contextmanager
def activated() -> Iterator[None]:
    """activate for the block of a with statement, in all threads; then what was there before comes back."""
    before = functional.scaled_dot_product_attention
    activate()
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = before
