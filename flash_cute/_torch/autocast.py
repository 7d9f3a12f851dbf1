"""What torch.autocast does to a call's tensors."""

from __future__ import annotations

import torch

from flash_cute._torch import private
from flash_cute._torch.checks import require_stored
from flash_cute.options import FP8


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.get_autocast_dtype(tensor.device.type) if autocast_concerns(tensor) else tensor.dtype


def autocast_concerns(tensor: torch.Tensor) -> bool:
    device = tensor.device.type
    # Codes of a cache are what they are.
    eligible = tensor.is_floating_point() and tensor.dtype not in (torch.float64, torch.float8_e4m3fn)
    # Not any device that autocast is available for: dynamo can't trace that question.
    return eligible and device in ("cuda", "cpu") and torch.is_autocast_enabled(device)


def as_cast(tensor: torch.Tensor) -> torch.Tensor:
    """What stands for the tensor as autocast gives it to forward; without autocast the tensor itself."""
    return torch.empty_like(tensor, dtype=autocast_dtype(tensor)) if private.autocast_is_enabled() else tensor


def _autocast(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(autocast_dtype(tensor))


def cast(q, k, v, lengths, how=_autocast):
    """The operands as autocast gives them to PyTorch's own attention, and lengths; a cache stays as it is.

    Sinks of q's dtype are read as float32 where that one changes. A bias becomes what q is, see is_rounded.
    """
    if "bias" in lengths and is_rounded(lengths["bias"], q):
        bias = lengths["bias"]
        require_stored("forward", bias=bias)
        rounded = torch.empty_like(bias, dtype=autocast_dtype(q)) if how is as_cast else rounded_bias(bias, q)
        lengths = lengths | {"bias": rounded}
    if not private.autocast_is_enabled():
        return q, k, v, lengths
    require_stored("forward", q=q, k=k, v=v)
    if "sinks" in lengths and lengths["sinks"].dtype == q.dtype:
        lengths = lengths | {"sinks": lengths["sinks"].float()}
    k, v = (k, v) if is_cache(k, lengths) else (how(k), how(v))
    return how(q), k, v, lengths


def is_rounded(bias: torch.Tensor, q: torch.Tensor) -> bool:
    """Is a bias not of q's dtype, but given to forward in it? float32 is, and what autocast concerns."""
    dtype = autocast_dtype(q)
    is_shortened = bias.dtype == torch.float32 and dtype in (torch.float16, torch.bfloat16)
    return is_shortened or (bias.dtype != dtype and autocast_concerns(bias))


def rounded_bias(bias: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The bias in the dtype of q. What is finite stays so: no key is hidden by a number too large for it."""
    dtype = autocast_dtype(q)
    most, wide = torch.finfo(dtype).max, bias.float()
    return torch.where(wide.isinf(), wide, wide.clamp(-most, most)).to(dtype)


def is_cache(k: torch.Tensor, lengths: dict[str, torch.Tensor]) -> bool:
    if "block_table" in lengths or k.dtype in FP8:
        return True
    return "cu_seqlens_q" in lengths and k.dim() == 4 and not k.is_nested
