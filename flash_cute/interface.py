"""The functions that users call."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from typing import Any

import torch

from flash_cute import ops
from flash_cute.roofline import Explanation

Window = int | tuple[int | None, int | None] | None


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    *,
    softmax_scale: float | None = None,
    window: Window = None,
    family: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact attention, softmax(softmax_scale * q kᵀ + mask) v, and the log-sum-exp of its scores.

    Args:
        q: (batch, heads_q, seqlen_q, head_dim), float16 or bfloat16, any strides; head_dim up to 256.
            On a CUDA GPU, Ampere or newer, or on the CPU.
        k, v: (batch, heads_kv, seqlen_k, head_dim), dtype and device of q. heads_q is a multiple of heads_kv:
            each K/V head serves heads_q / heads_kv neighbouring query heads.
        causal: hide the keys after each query; the last query stands at the last key.
        softmax_scale: multiplies the scores; finite and > 0. Default 1 / sqrt(head_dim).
        window: (left, right), how many keys a query sees before and after its own. None is unlimited, w means
            (w, w), causal sets right to 0. Query i sees key j iff
            i + seqlen_k - seqlen_q - left <= j <= i + seqlen_k - seqlen_q + right.
        family: "sm80" or "sm90" insists on a family of kernels; by default the device decides.

    Returns:
        out: as torch.empty_like(q) in shape, dtype and strides. 0 for a query that sees no key.
        lse: float32 (batch, heads_q, seqlen_q), natural logarithm of the sum of exp(scaled scores). -inf for
            a query that sees no key.

    Raises:
        ValueError, TypeError: an argument makes no sense; the sentence says which, and what is accepted.
        NotImplementedError: autograd wants a gradient, and there is no backward yet.

    Source: Dao, "FlashAttention-2", arXiv:2307.08691. docs/numerics.md says what is rounded when.
    """
    return _call(ops.forward, q, k, v, causal, softmax_scale, window, family)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    *,
    softmax_scale: float | None = None,
    window: Window = None,
    family: str | None = None,
) -> torch.Tensor:
    """The out of forward, (batch, heads_q, seqlen_q, head_dim); forward documents the arguments."""
    return _call(ops.forward, q, k, v, causal, softmax_scale, window, family)[0]


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    *,
    softmax_scale: float | None = None,
    window: Window = None,
    family: str | None = None,
) -> Explanation:
    """What forward would run with these arguments, which it documents. Launches nothing; print() shows it."""
    plan = _call(ops.plan, q, k, v, causal, softmax_scale, window, family)
    return Explanation.of(json.loads(plan), q.device)


def supported() -> dict[str, Any]:
    """What is compiled: {"families": {family: {element: [head_dim, ...]}}, "kernels": [...]}.

    A kernel serves every head_dim up to its own; "kernels" lists them with their tile and shared memory in
    bytes, once for each tile that the launch chooses from. Both are empty in a build without CUDA. The CPU
    needs no kernel and is always supported.
    """
    kernels = json.loads(ops.compiled())
    families: dict[str, dict[str, list[int]]] = {}
    for kernel in kernels:
        head_dims = families.setdefault(kernel["family"], {}).setdefault(kernel["element"], [])
        if kernel["head_dim"] not in head_dims:
            head_dims.append(kernel["head_dim"])
    return {"families": families, "kernels": kernels}


def _call(op, q, k, v, causal, scale, window, family):
    """Calls the operator forward or plan, and raises what it throws in Python's terms."""
    left, right = (None, None) if window is None else _limits(window)
    try:
        # The guard is for eager calls: dynamo does not know it, and traces the operator with its autograd.
        with_autograd = torch.compiler.is_dynamo_compiling() or ops.is_differentiated(q, k, v)
        with nullcontext() if with_autograd else ops.BelowAutograd():
            return op(
                q, k, v, causal, softmax_scale=scale, window_left=left, window_right=right, family=family
            )
    except (RuntimeError, AttributeError) as error:
        raise _in_python_terms(error, q=q, k=k, v=v) from None


def _limits(window: Window) -> tuple[int | None, int | None]:
    """window as (left, right)."""
    limits = window if isinstance(window, tuple | list) else (window, window)
    if len(limits) == 2 and all(limit is None or isinstance(limit, int) for limit in limits):
        return limits[0], limits[1]
    raise TypeError(
        f"flash_cute.forward: window is {window!r}; None, an int or a pair of these (left, right) is accepted"
    )


def _in_python_terms(error: Exception, **tensors: object) -> Exception:
    """What an operator threw, as one sentence of the fitting type; what is not ours comes back unchanged."""
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            return TypeError(f"flash_cute.forward: {name} is of type {kind}; a torch.Tensor is accepted")
    message = str(error).partition("\n")[0]
    if mismatch := re.fullmatch(r"flash_cute::\w+\(\) Expected (.*)\.", message):
        return TypeError(f"flash_cute.forward: expected {mismatch[1]}")
    if message.startswith("Could not run 'flash_cute::"):
        device = tensors["q"].device.type
        return NotImplementedError(f"flash_cute.forward: q is on device {device}; cuda and cpu are supported")
    if message.startswith("flash_cute.forward: ") and type(error) is RuntimeError:
        return ValueError(message)
    return error
