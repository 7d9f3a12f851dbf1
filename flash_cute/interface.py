"""The functions that users call."""

from __future__ import annotations

import json
from difflib import get_close_matches
from inspect import signature
from operator import index
from typing import Any, NoReturn

import torch

from flash_cute import key_ranges, lengths, ops
from flash_cute.explanation import Explanation, work
from flash_cute.precision import is_tf32
from flash_cute.registration import LENGTHS
from flash_cute.wording import OURS, require_bool, shown

_BOOLS = bool, torch.SymBool
Window = int | tuple[int | None, int | None] | None


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    *,
    softmax_scale: float | None = None,
    window: Window = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    batch_invariant: bool = False,
    ranges: torch.Tensor | None = None,
    deterministic: bool = False,
    family: str | None = None,
    out: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    precision: str | None = None,
    **misnamed: NoReturn,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact attention, softmax(softmax_scale * q kᵀ + mask) v, and the log-sum-exp of its scores.

    Args:
        q: (batch, heads_q, seqlen_q, head_dim), float16, bfloat16 or float32, any strides; head_dim up to
            256. On a CUDA GPU, Ampere or newer, or on the CPU. Or nested with layout torch.jagged: q, k and v
            (batch, heads, ragged, head_dim), as x.transpose(1, 2) gives them; then out and lse are, too.
        k, v: (batch, heads_kv, seqlen_k, head_dim), dtype and device of q. heads_q is a multiple of heads_kv:
            each K/V head serves heads_q / heads_kv neighbouring query heads.
        causal: hide the keys after each query; the last query stands at the last key.
        softmax_scale: multiplies the scores; finite and > 0. Default 1 / sqrt(head_dim).
        window: (left, right), how many keys a query sees before and after its own. None is unlimited, w means
            (w, w), causal sets right to 0. Query i sees key j iff
            i + seqlen_k - seqlen_q - left <= j <= i + seqlen_k - seqlen_q + right.
        seqused_q, seqused_k: int32 (batch,), on q's device: how many of each sequence's rows count, from the
            first; they take the place of seqlen_q and seqlen_k in the mask. Default all. What the rows after
            them hold, NaN too, is never used.
        leftpad_k: int32 (batch,), on q's device: how many keys at each sequence's begin don't count, though
            j counts them: keys leftpad_k <= j < seqused_k do. Default none.
        block_table: int32 (batch, max_pages), on q's device: k and v are a cache in pages, (pages, heads_kv,
            page_size, head_dim) of any page size, and sequence b has key j in row j % page_size of page
            block_table[b, j // page_size]. Pages may be shared. Entries behind a sequence's seqused_k, and
            what its pages hold there, are never used. There are no gradients, and nothing is copied: the last
            dimension must be contiguous and other strides multiples of 16 bytes.
        batch_invariant: a query's out and LSE don't depend, to the bit, on what else is in the call, in which
            chunks queries come and where keys lie, at a price (docs/decoding.md). It needs a GPU.
        ranges: int32 (batch or 1, 1, seqlen_q, R, 2), R from 1 to 4, on q's device: R ranges [start, end) of
            keys for each query, alike for all heads. It sees the keys that lie in one of them and that the
            other arguments leave it: causal and window hide keys as ever, and seqused_k and leftpad_k say
            which ones count. Keys are rows of k, or of the sequence's pages, from the first. Ranges come in
            any order; they may overlap and leave k, and one whose start is not before its end has no key. Not
            with batch_invariant. flash_cute.masks makes ranges of many masks.
        deterministic: the same bits in the gradients each time, at a price that docs/limits.md tells; also
            where torch.use_deterministic_algorithms(True) holds. out and lse are always repeatable.
        family: "sm80" or "sm90" insists on a family of kernels; by default the device decides.
        out: a tensor for the result, like q in shape, dtype and device (under autocast of its dtype), any
            strides, of memory that q, k and v don't have. There are then no gradients.
        sinks: (heads_q,), float32 or q's dtype: for each head the logit, not scaled, of a key that every
            valid query sees and that has no value; -inf is none. lse counts it. Differentiable.
        precision: of float32 on a GPU: "highest" is as exact as float32, "high" rounds what is multiplied to
            TF32, which is faster. None follows torch.get_float32_matmul_precision(). 16-bit types ignore it.

    Returns:
        out: the tensor given for it, else as torch.empty_like(q) in shape, dtype and strides. 0 for a query
            that sees no key or doesn't count.
        lse: float32 (batch, heads_q, seqlen_q), natural logarithm of the sum of exp(scaled scores). -inf for
            a query that sees no key, which with sinks is that of its sink, or doesn't count.

        Both are differentiable, once. Gradients are as torch.empty_like of q, k and v; 0 for queries that see
        no key or don't count, and keys that no query sees, whatever the gradients of out and lse hold there.

    Raises:
        ValueError, TypeError: an argument makes no sense; the sentence says which, and what is accepted. What
            tensors of lengths hold is not looked at, but with FLASH_CUTE_CHECK=1 in the environment, which
            waits for the device.
        NotImplementedError: a second derivative or forward-mode differentiation is asked for.

    Source: Dao, "FlashAttention-2", arXiv:2307.08691. docs/numerics.md says what is rounded when.
    """
    options = _options(
        "forward", causal, softmax_scale, window, family, deterministic, batch_invariant, misnamed
    )
    given = _given(None, None, seqused_q, seqused_k, leftpad_k, block_table, ranges)
    return _call("forward", ops.forward, q, k, v, given, options, out, sinks, precision)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    *,
    softmax_scale: float | None = None,
    window: Window = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    batch_invariant: bool = False,
    ranges: torch.Tensor | None = None,
    deterministic: bool = False,
    family: str | None = None,
    out: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    precision: str | None = None,
    **misnamed: NoReturn,
) -> torch.Tensor:
    """The out of forward, (batch, heads_q, seqlen_q, head_dim); forward documents the arguments."""
    options = _options(
        "attention", causal, softmax_scale, window, family, deterministic, batch_invariant, misnamed
    )
    given = _given(None, None, seqused_q, seqused_k, leftpad_k, block_table, ranges)
    return _call("attention", ops.forward, q, k, v, given, options, out, sinks, precision)[0]


def forward_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    causal: bool = False,
    *,
    softmax_scale: float | None = None,
    window: Window = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    batch_invariant: bool = False,
    ranges: torch.Tensor | None = None,
    deterministic: bool = False,
    family: str | None = None,
    out: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    precision: str | None = None,
    **misnamed: NoReturn,
) -> tuple[torch.Tensor, torch.Tensor]:
    """forward for sequences of unequal lengths that are packed, one behind the other, without padding.

    Nothing waits for the device, and a captured CUDA graph replays with other offsets of the same totals.

    Args:
        q: (total_q, heads_q, head_dim), otherwise as in forward.
        k, v: (total_k, heads_kv, head_dim), likewise. Or a cache beside packed queries, without cu_seqlens_k
            and without gradients: (batch, heads_kv, capacity, head_dim), or with block_table pages as in
            forward; seqused_k has the lengths. A cache is never copied.
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,), on q's device: sequence b has the rows cu_seqlens[b]
            to cu_seqlens[b + 1] - 1. They don't decrease, from 0 or more to the total or less. cu_seqlens_k
            is cu_seqlens_q by default, but of a cache.
        seqused_q, seqused_k: int32 (batch,), on q's device: how many of a sequence's rows count, from its
            first. Default all.
        leftpad_k: int32 (batch,), on q's device: how many keys at a sequence's begin don't count. Default 0.
        block_table, batch_invariant: as in forward.
        ranges: int32 (total_q, R, 2), as in forward. Keys are counted from each sequence's own first row.
        causal, softmax_scale, window, deterministic, family, out, sinks, precision: as in forward. The mask
            is that of each sequence alone, by its own lengths.

    Returns:
        out: the tensor given for it, else as torch.empty_like(q) in shape, dtype and strides. 0 for rows that
            see no key, don't count or belong to no sequence.
        lse: float32 (heads_q, total_q), as in forward. -inf where out is 0 for these reasons.

        Both are differentiable, as in forward.

    Raises:
        As forward. Offsets that decrease or leave the totals give out and lse of no meaning; with
        FLASH_CUTE_CHECK=1 they are a ValueError.
    """
    options = _options(
        "forward_varlen", causal, softmax_scale, window, family, deterministic, batch_invariant, misnamed
    )
    given = {"cu_seqlens_q": cu_seqlens_q} | _given(
        None, cu_seqlens_k, seqused_q, seqused_k, leftpad_k, block_table, ranges
    )
    return _call("forward_varlen", ops.forward, q, k, v, given, options, out, sinks, precision)


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    causal: bool = False,
    *,
    softmax_scale: float | None = None,
    window: Window = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    batch_invariant: bool = False,
    ranges: torch.Tensor | None = None,
    deterministic: bool = False,
    family: str | None = None,
    out: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    precision: str | None = None,
    **misnamed: NoReturn,
) -> torch.Tensor:
    """The out of forward_varlen, (total_q, heads_q, head_dim); forward_varlen documents the arguments."""
    options = _options(
        "attention_varlen", causal, softmax_scale, window, family, deterministic, batch_invariant, misnamed
    )
    given = {"cu_seqlens_q": cu_seqlens_q} | _given(
        None, cu_seqlens_k, seqused_q, seqused_k, leftpad_k, block_table, ranges
    )
    return _call("attention_varlen", ops.forward, q, k, v, given, options, out, sinks, precision)[0]


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    *,
    softmax_scale: float | None = None,
    window: Window = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    batch_invariant: bool = False,
    ranges: torch.Tensor | None = None,
    deterministic: bool = False,
    family: str | None = None,
    precision: str | None = None,
    backward: bool = False,
    internals: bool = False,
    **misnamed: NoReturn,
) -> Explanation:
    """What forward, or with cu_seqlens_q forward_varlen, would run with these arguments, which they document.

    With backward=True it is what the backward of that call would run, for all three gradients; internals=True
    adds the kernel's tile and launch. Launches nothing, but reads the lengths from the device to count the
    work; print() shows it.
    """
    require_bool("flash_cute.explain", "backward", backward)
    require_bool("flash_cute.explain", "internals", internals)
    options = _options(
        "explain", causal, softmax_scale, window, family, deterministic, batch_invariant, misnamed
    )
    given = _given(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k, block_table, ranges)
    op = ops.plan_backward if backward else ops.plan
    plan = json.loads(_call("explain", op, q, k, v, given, options, precision=precision))
    if q.is_nested:
        q, k, v, given = lengths.unwrapped(q, k, v, given)
    window = plan["window_left"], plan["window_right"]
    plan |= work(q, k, window, given, backward, ops.autocast_dtype(q).itemsize)
    return Explanation.of(plan | {"backward": backward}, q.device, internals)


def supported() -> dict[str, Any]:
    """What is compiled: {"families": {family: {element: [head_dim, ...]}}, "backward": ..., "kernels": [...]}

    A kernel serves every head_dim up to its own. "families" has the kernels of the forward and "backward",
    likewise, those of the backward; "kernels" lists those of the forward with their tile and shared memory in
    bytes, once for each tile that the launch chooses from. All are empty in a build without CUDA. The CPU
    needs no kernel and is always supported.
    """
    kernels = json.loads(ops.compiled())
    found: dict[str, dict[str, dict[str, list[int]]]] = {"forward": {}, "backward": {}}
    for kernel in kernels:
        elements = found[kernel["pass"]].setdefault(kernel["family"], {})
        head_dims = elements.setdefault(kernel["element"], [])
        if kernel["head_dim"] not in head_dims:
            head_dims.append(kernel["head_dim"])
    return {
        "families": found["forward"],
        "backward": found["backward"],
        "kernels": [kernel for kernel in kernels if kernel["pass"] == "forward"],
    }


def _given(
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k, block_table, ranges
) -> dict[str, torch.Tensor]:
    """The tensors of LENGTHS by name, without those that are None."""
    if cu_seqlens_q is cu_seqlens_k is seqused_q is seqused_k is leftpad_k is block_table is ranges is None:
        return {}
    values = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k, block_table, ranges
    return {name: value for name, value in zip(LENGTHS, values, strict=True) if value is not None}


def _options(name, causal, scale, window, family, deterministic, batch_invariant, misnamed) -> dict[str, Any]:
    """The operator's options for a call of the function so named.

    Defaults are left out: each option that is passed takes the host 0.3 us.
    """
    if misnamed:
        raise TypeError(f"flash_cute.{name}: {_meant(name, *misnamed)}")
    if not isinstance(causal, _BOOLS):
        require_bool(f"flash_cute.{name}", "causal", causal)
    options = {"causal": causal}
    if deterministic is not False:
        require_bool(f"flash_cute.{name}", "deterministic", deterministic)
        options["deterministic"] = deterministic
    if batch_invariant is not False:
        require_bool(f"flash_cute.{name}", "batch_invariant", batch_invariant)
        options["batch_invariant"] = batch_invariant
    if scale is not None:
        if type(scale) is not float:
            ops.require_number(f"flash_cute.{name}", "softmax_scale", scale, "a number or None")
        options["softmax_scale"] = scale
    if family is not None:
        if not isinstance(family, str):
            sentence = f"family is {shown(family)}; 'sm80', 'sm90' or None is accepted"
            raise TypeError(f"flash_cute.{name}: {sentence}")
        options["family"] = family
    if window is not None:
        left, right = _limits(name, window)
        if left is not None:
            options["window_left"] = left
        if right is not None:
            options["window_right"] = right
    return options


def _call(name, op, q, k, v, given, options, out=None, sinks=None, precision=None):
    """Calls forward or a plan of ops for the function so named, and raises what it throws in its name."""
    try:
        if (precision is not None or q.dtype is torch.float32) and is_tf32(precision, q.dtype):
            options["tf32"] = True
        if q.is_nested and (op is not ops.forward or "cu_seqlens_q" not in given):
            if out is not None:
                raise ValueError(f"{OURS}out must be None where q is nested, got a tensor")
            *packed, offsets = lengths.unwrapped(q, k, v, given)
            results = _call(name, op, *packed, offsets, options, None, sinks)
            return lengths.wrapped(*results, q) if op is ops.forward else results
        if given:
            # A compiler's fakes would complain about other types in words of their own.
            for value in given.values():
                if not isinstance(value, torch.Tensor):
                    raise TypeError("named below")
            if "ranges" in given:
                given["ranges"] = key_ranges.laid_out(given["ranges"])
            if lengths.CHECKED:
                lengths.check(q, k, v, given)
        passed = given
        if sinks is not None:
            if not isinstance(sinks, torch.Tensor):
                raise TypeError("named below")
            k, v, passed = lengths.with_a_row(k, v, given)
            passed = passed | {"sinks": sinks}
        if out is None:
            return op(q, k, v, passed, options)
        return ops.forward_into(q, k, v, passed, options, out)
    except (RuntimeError, AttributeError, TypeError, ValueError) as error:
        others = {name: x for name, x in (("out", out), ("sinks", sinks)) if x is not None}
        raise _in_python_terms(name, error, q=q, k=k, v=v, **given, **others) from None


def _meant(name: str, misnamed: str, *others: str) -> str:
    if misnamed == "dropout_p":
        return "there is no argument dropout_p, as there is no dropout; did you mean to leave it out?"
    if misnamed.startswith("max_"):  # seqlen_q, seqlen, q, ...
        return f"there is no argument {misnamed}; none is needed, did you mean to leave it out?"
    arguments = _ARGUMENTS[name]
    if misnamed.startswith("cu_seq") and "cu_seqlens_q" not in arguments:
        return f"there is no argument {misnamed}; did you mean flash_cute.{name}_varlen?"
    meant = {
        "is_causal": "causal",
        "scale": "softmax_scale",
        "window_size": "window",
        "cache_seqlens": "seqused_k",
    }.get(misnamed)
    if not torch.compiler.is_compiling():  # which can't look into difflib
        meant = meant or next(iter(get_close_matches(misnamed, arguments, n=1)), None)
    hint = f"did you mean {meant}?" if meant else f"there are {', '.join(arguments)}"
    return f"there is no argument {misnamed}; {hint}"


def _limits(name: str, window: Window) -> tuple[int | None, int | None]:
    """window as (left, right)."""
    limits = window if isinstance(window, tuple | list) else (window, window)
    if len(limits) != 2 or not all(limit is None or _is_integer(limit) for limit in limits):
        expected = "None, an int or a pair of these (left, right)"
        raise TypeError(f"flash_cute.{name}: window is {shown(window)}; {expected} is accepted")
    left, right = (
        limit if limit is None or isinstance(limit, int | torch.SymInt) else index(limit) for limit in limits
    )
    for side, limit in (("left", left), ("right", right)):
        if isinstance(limit, int) and not -(2**63) <= limit < 2**63:
            raise ValueError(
                f"flash_cute.{name}: window's {side} limit is {shown(limit)}; less than 2**63 keys are "
                "accepted"
            )
    return left, right


def _is_integer(limit: object) -> bool:
    if isinstance(limit, int | torch.SymInt):
        return not isinstance(limit, bool)
    if isinstance(limit, torch.Tensor):
        is_inexact = limit.is_floating_point() or limit.is_complex()
        return limit.numel() == 1 and limit.dtype != torch.bool and not is_inexact and not limit.is_meta
    if not hasattr(type(limit), "__index__"):
        return False
    try:
        index(limit)
    except TypeError:  # of an array of several numbers
        return False
    return True


def _in_python_terms(name: str, error: Exception, **tensors: object) -> Exception:
    """What an operator threw, as one sentence of the fitting type; what is not ours comes back unchanged."""
    face = f"flash_cute.{name}"
    for argument, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            return TypeError(f"{face}: {argument} is of type {kind}; a torch.Tensor is accepted")
    if torch.compiler.is_compiling():  # which can't trace what follows, and shows the error as it is
        return error
    message = str(error).partition("\n")[0]
    operator, mismatch, expected = message.partition("() Expected ")  # re can't be traced
    if mismatch and operator.startswith("flash_cute::"):
        return TypeError(f"{face}: expected {expected.removesuffix('.')}")
    accepted = ops.accepted_beside_lengths("torch.float16, torch.bfloat16 and torch.float32 are")
    return ops.named(error, face, tensors, accepted)


# By function, for who misnames one: while a compiler traces, signatures are out of reach.
_ARGUMENTS = {
    function.__name__: list(signature(function).parameters)[:-1]
    for function in (forward, attention, forward_varlen, attention_varlen, explain)
}
