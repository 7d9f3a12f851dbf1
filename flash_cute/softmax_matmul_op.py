"""Softmax of given scores, times v: a forward whose products of q and k are 0."""

from __future__ import annotations

import torch
from typing_extensions import Unpack

from flash_cute._torch import checks, ops
from flash_cute._torch.autocast import autocast_dtype
from flash_cute.dot_product_attention import call
from flash_cute.options import MatmulOptions, spelled_out
from flash_cute.wording import named

_FACE = "flash_cute.softmax_matmul"
_COLUMNS = 8  # of q and k, the fewest that kernels read without a copy
# What the operator calls its arguments -> what they are here.
_WORDS = {"q": "x", "k": "v", "bias": "x", "bias_scale": "scale", "heads_q": "heads"}
_MAX_LENGTH = 2**28  # as csrc/problem.hpp has it


@spelled_out(MatmulOptions)
def softmax_matmul(
    x: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    *,
    scale: float = 1.0,
    **options: Unpack[MatmulOptions],
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * x) v, and the log-sum-exp of its scores, in one pass over x.

    Args:
        x: (batch or 1, heads or 1, seqlen_q, seqlen_k), float16, bfloat16 or float32, any strides, on a CUDA
            GPU, Ampere or newer, or on the CPU: scores, of which -inf hides a pair.
        v: (batch, heads_v, seqlen_k, head_dim_v), dtype and device of x, any strides; head_dim_v up to 256.
            The heads are those of x, where it has 1 those of v; they are a multiple of heads_v.
        causal: hide the keys after each query; the last query stands at the last key.
        scale: multiplies x; finite and > 0.
        window, seqused_q, seqused_k, leftpad_k: as in flash_cute.forward. Rows of x are queries, its columns
            and rows of v are keys.
        mask: bool (batch or 1, heads or 1, seqlen_q or 1, seqlen_k), or bits, as in flash_cute.forward.
        dropout_p, dropout_seed, deterministic, family, precision: as in flash_cute.forward.

    Returns:
        out: (batch, heads, seqlen_q, head_dim_v), of v's dtype, contiguous. 0 for a row that sees nothing.
        lse: float32 (batch, heads, seqlen_q), natural logarithm of the sum of exp(scale * x). -inf for a row
            that sees nothing.

        Both are differentiable, once. The gradient of x is of its own shape, summed where x has 1; 0 for
        pairs that are hidden. Of 16-bit types on a GPU the gradients of x and v together take the memory of x
        twice, one of them for weights, if x has v's batch and all heads and deterministic is False.

    Raises:
        ValueError, TypeError: an argument makes no sense; the sentence says which, and what is accepted.
        NotImplementedError: a second derivative or forward-mode differentiation is asked for.
    """
    batch, heads = _batch_and_heads(x, v)
    rows, keys = x.shape[2:]
    family = options.get("family")
    if family in ("sm80", "sm90") and x.device.type == "cpu":  # of a traced call, likewise
        raise ValueError(f"{_FACE}: family is '{family}', but x is on the CPU; None is accepted there")
    # Few zeros, which all batches and heads share. As q's strides decrease, out is contiguous.
    steps = 3 * _COLUMNS, 2 * _COLUMNS, _COLUMNS, 1
    room = 3 * batch + 2 * heads + rows + keys
    given = {"scale": scale, **options}
    try:
        zeros = torch.zeros(room * _COLUMNS, dtype=v.dtype, device=v.device)  # of no tensor that vmap maps
        q = zeros.as_strided((batch, heads, rows, _COLUMNS), steps)
        k = zeros.as_strided((*v.shape[:2], keys, _COLUMNS), (0, 0, *steps[2:]))
        return call("softmax_matmul", ops.forward, q, k, v, {"bias": x}, causal, 1.0, given)
    except (RuntimeError, ValueError) as error:
        if torch.compiler.is_compiling():
            raise
        raise named(error, _FACE, _WORDS) from None


def _batch_and_heads(x: torch.Tensor, v: torch.Tensor) -> tuple[int, int]:
    """Those of out, of tensors that belong together."""
    for name, tensor in {"x": x, "v": v}.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{_FACE}: {name} is of type {type(tensor).__name__}; a torch.Tensor is accepted")
    checks.require_dense(_FACE, x=x, v=v)
    for tensor, name, shape in (x, "x", "seqlen_q, seqlen_k"), (v, "v", "seqlen_k, head_dim_v"):
        if tensor.dim() != 4:
            raise ValueError(
                f"{_FACE}: {name} has {tensor.dim()} dimensions; 4, (batch, heads, {shape}), are accepted"
            )
    dtype = autocast_dtype(x)
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        # Of a traced call, whose error would say so of q.
        accepted = "torch.float16, torch.bfloat16 or torch.float32"
        raise ValueError(f"{_FACE}: x must have dtype {accepted}, got {x.dtype}")
    if dtype != autocast_dtype(v):
        raise ValueError(f"{_FACE}: x has dtype {x.dtype} and v {v.dtype}; they must be the same")
    if x.device != v.device:
        raise ValueError(f"{_FACE}: x is on device {x.device} and v on {v.device}; they must be on the same")
    if x.shape[3] != v.shape[2]:
        raise ValueError(f"{_FACE}: x has {x.shape[3]} columns and v {v.shape[2]} rows; they must be as many")
    if x.shape[0] not in (1, v.shape[0]):
        raise ValueError(f"{_FACE}: x has batch {x.shape[0]} and v {v.shape[0]}; v's or 1 is accepted")
    heads = v.shape[1] if x.shape[1] == 1 else x.shape[1]
    if heads != v.shape[1] and (v.shape[1] == 0 or heads % v.shape[1]):
        raise ValueError(
            f"{_FACE}: x has {heads} heads and v {v.shape[1]}; a multiple of v's, or 1, is accepted"
        )
    if not torch.compiler.is_compiling():  # whose graphs would be of no more
        pairs = v.shape[0] * heads
        for size, name in (x.shape[2], "rows"), (x.shape[3], "columns"), (pairs, "(batch, head) pairs"):
            if size > _MAX_LENGTH:
                raise ValueError(f"{_FACE}: x has {size} {name}; at most {_MAX_LENGTH} are accepted")
    return v.shape[0], heads
