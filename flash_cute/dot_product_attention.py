"""Attention: the functions that users call, and what these share."""

from __future__ import annotations

import torch
from typing_extensions import Unpack

from flash_cute import lengths
from flash_cute._torch import checks, ops
from flash_cute.options import ARGUMENTS, LENGTHS, READERS, SCALES, SCORES, OptionsAndOut, spelled_out
from flash_cute.precision import is_tf32
from flash_cute.wording import OURS, misnamed, require_bool, require_number

_BOOLS = bool, torch.SymBool
_OF_KEYS = frozenset((*LENGTHS, *SCALES))


@spelled_out(OptionsAndOut)
def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    *,
    softmax_scale: float | None = None,
    **options: Unpack[OptionsAndOut],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact attention, softmax(softmax_scale * q kᵀ + bias) v, and the log-sum-exp of its scores.

    Args:
        q: (batch, heads_q, seqlen_q, head_dim), float16, bfloat16 or float32, any strides; head_dim up to
            256. On a CUDA GPU, Ampere or newer, or on the CPU. Or nested with layout torch.jagged: q, k and v
            (batch, heads, ragged, head_dim), as x.transpose(1, 2) gives them; then out and lse are, too.
        k, v: (batch, heads_kv, seqlen_k, head_dim), dtype and device of q, but for a cache of 8 bits a number
            (k_scale). heads_q is a multiple of heads_kv: each K/V head serves heads_q / heads_kv neighbouring
            query heads. v may have a head dim of its own, head_dim_v up to 256, which out then has, and may
            be columns of k's memory.
        causal: hide the keys after each query; the last query stands at the last key.
        softmax_scale: multiplies the scores; finite and > 0. Default 1 / sqrt(head_dim), that of q.
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
            block_table[b, j // page_size]. Pages may be shared. Entries after a sequence's seqused_k, and
            what its pages hold there, are never used. There are no gradients, and nothing is copied: the last
            dimension must be contiguous and other strides multiples of 16 bytes.
        k_scale, v_scale: float32 (), (heads_kv,) or (batch, heads_kv), on q's device, finite and > 0, by
            default 1: where k and v are a cache of torch.float8_e4m3fn, or of torch.uint8 with its bits,
            beside 16-bit q, a number of them is its code times its scale. Such a cache has seqused_k or
            block_table, and a head_dim that is a multiple of 16; it is never copied and has no gradients. On
            a GPU it needs Hopper's kernels.
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
        family: "sm80" or "sm90" insists on a family of kernels; by default the device decides. sm90 has no
            deterministic gradients with ranges, or where scores are changed (docs/scores.md).
        out: a tensor for the result, (batch, heads_q, seqlen_q, head_dim_v), of q's dtype and device (under
            autocast of its dtype), any strides, of memory that q, k and v don't have. There are then no
            gradients.
        sinks: (heads_q,), float32 or q's dtype: for each head the logit, not scaled, of a key that every
            valid query sees and that has no value; -inf is none. lse counts it. Differentiable.
        mask: bool (batch or 1, heads_q or 1, seqlen_q or 1, seqlen_k), any strides, on q's device: True is
            seen, of the keys that the other arguments leave. Or uint8 (..., seqlen_k / 8 rounded up), with
            key j in bit j % 8 of byte j // 8. Beside seqused_k or block_table fewer columns are those of
            each sequence's last keys, and the keys before them are seen, as drafts of a tree need it.
        bias: (g, heads_q or 1, seqlen_q or 1, seqlen_k or 1), any strides, of q's dtype, to which float32 is
            rounded in a copy and autocast casts it: added to the scaled and capped scores. g divides the
            batch, and sequence n reads entry n // (batch / g). -inf hides a key as mask does; finite numbers
            stay finite, so that a query with nothing but the least of bfloat16's or float32's has the mean
            of v. Differentiable. Not with block_table or batch_invariant.
        alibi_slopes: float32 (heads_q,) or (batch, heads_q), on q's device: the score of query i and key j
            loses slope * abs(i + seqlen_k - seqlen_q - j), by each sequence's own lengths. No gradient yet.
        softcap: c > 0 makes a scaled score x into c * tanh(x / c), before bias and ALiBi; 0 leaves it. Sinks
            are not capped.
        dropout_p: from 0 to less than 1: each weight is dropped with this probability, rounded so that
            1 - dropout_p is a multiple of 1 / 4096, and the others are divided by that. lse is that without
            dropout. Not with block_table, a cache beside packed queries, or batch_invariant.
        dropout_seed: int64 (2,), on q's device: which weights are dropped; flash_cute.dropout_mask tells. It
            depends on nothing but the seed, the number of the sequence, the head, and the rows of query and
            key in it. By default it is drawn from torch's generator of q's device, in each call and each
            replay of a CUDA graph anew. Under vmap each entry has its own where randomness is "different".
        precision: of float32 on a GPU: "highest" is as exact as float32, "high" rounds what is multiplied to
            TF32, which is faster. None follows torch.get_float32_matmul_precision(). 16-bit types ignore it.

    Returns:
        out: the tensor given for it, else as torch.empty_like(q) in shape, dtype and strides; where v has a
            head dim of its own, that, dense, the last dimension innermost and the others in the order of q's
            strides. 0 for a query that sees no key or doesn't count.
        lse: float32 (batch, heads_q, seqlen_q), natural logarithm of the sum of exp(scaled scores). -inf for
            a query that sees no key, which with sinks is that of its sink, or doesn't count.

        Both are differentiable, once. Gradients are as torch.empty_like of q, k and v, that of a bias is
        dense; 0 for queries that see no key or don't count, keys that no query sees, and what a bias has for
        hidden pairs alone, whatever the gradients of out and lse hold there; but with ranges, mask or bias on
        a GPU, NaN in a query that sees no key, or in its gradient, may spread.

    Raises:
        ValueError, TypeError: an argument makes no sense; the sentence says which, and what is accepted. What
            tensors of lengths hold is not looked at, but with FLASH_CUTE_CHECK=1 in the environment, which
            waits for the device.
        NotImplementedError: a second derivative or forward-mode differentiation is asked for.

    Source: Dao, "FlashAttention-2", arXiv:2307.08691. docs/numerics.md says what is rounded when.
    """
    return call("forward", ops.forward, q, k, v, {}, causal, softmax_scale, options)


@spelled_out(OptionsAndOut)
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    *,
    softmax_scale: float | None = None,
    **options: Unpack[OptionsAndOut],
) -> torch.Tensor:
    """The out of forward, (batch, heads_q, seqlen_q, head_dim_v); forward documents the arguments."""
    return call("attention", ops.forward, q, k, v, {}, causal, softmax_scale, options)[0]


@spelled_out(OptionsAndOut)
def forward_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    causal: bool = False,
    *,
    softmax_scale: float | None = None,
    **options: Unpack[OptionsAndOut],
) -> tuple[torch.Tensor, torch.Tensor]:
    """forward for sequences of unequal lengths that are packed, one after the other, without padding.

    Nothing waits for the device, and a captured CUDA graph replays with other offsets of the same totals.

    Args:
        q: (total_q, heads_q, head_dim), otherwise as in forward.
        k, v: (total_k, heads_kv, head_dim), likewise; v of head_dim_v, too. Or a cache with packed queries,
            without cu_seqlens_k and without gradients: (batch, heads_kv, capacity, head_dim), or with
            block_table pages as in forward; seqused_k has the lengths. A cache is never copied.
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,), on q's device: sequence b has the rows cu_seqlens[b]
            to cu_seqlens[b + 1] - 1. They don't decrease, from 0 or more to the total or less. cu_seqlens_k
            is cu_seqlens_q by default, but of a cache.
        seqused_q, seqused_k: int32 (batch,), on q's device: how many of a sequence's rows count, from its
            first. Default all.
        leftpad_k: int32 (batch,), on q's device: how many keys at a sequence's begin don't count. Default 0.
        block_table, k_scale, v_scale, batch_invariant: as in forward.
        ranges: int32 (total_q, R, 2), as in forward. Keys are counted from each sequence's own first row.
        causal, softmax_scale, window, deterministic, family, out, sinks, alibi_slopes, softcap, dropout_p,
            dropout_seed, precision: as in forward. The mask is that of each sequence alone, by its own
            lengths.
        mask, bias: must be None.

    Returns:
        out: the tensor given for it, (total_q, heads_q, head_dim_v), else one as in forward. 0 for rows that
            see no key, don't count or belong to no sequence.
        lse: float32 (heads_q, total_q), as in forward. -inf where out is 0 for these reasons.

        Both are differentiable, as in forward.

    Raises:
        As forward. Offsets that decrease or leave the totals give undefined out and lse; with
        FLASH_CUTE_CHECK=1 they are a ValueError.
    """
    offsets = offsets_of(cu_seqlens_q, cu_seqlens_k)
    return call("forward_varlen", ops.forward, q, k, v, offsets, causal, softmax_scale, options)


@spelled_out(OptionsAndOut)
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    causal: bool = False,
    *,
    softmax_scale: float | None = None,
    **options: Unpack[OptionsAndOut],
) -> torch.Tensor:
    """The out of forward_varlen, (total_q, heads_q, head_dim_v); forward_varlen documents the arguments."""
    offsets = offsets_of(cu_seqlens_q, cu_seqlens_k)
    return call("attention_varlen", ops.forward, q, k, v, offsets, causal, softmax_scale, options)[0]


def offsets_of(cu_seqlens_q, cu_seqlens_k) -> dict[str, torch.Tensor]:
    """Those of packed sequences by name; the first one is always there, so that a None is refused."""
    offsets = {"cu_seqlens_q": cu_seqlens_q}
    return offsets if cu_seqlens_k is None else offsets | {"cu_seqlens_k": cu_seqlens_k}


def call(name, op, q, k, v, tensors, causal, softmax_scale, options):
    """Calls forward or a plan of ops for the function so named, and raises what it throws in its name.

    tensors: offsets of packed sequences, to which lengths among the options are added. The operator gets no
    defaults: each option that is passed takes the host 0.3 us.
    """
    if not isinstance(causal, _BOOLS):
        require_bool(f"flash_cute.{name}", "causal", causal)
    passed, others = {"causal": causal}, {}
    precision = sinks = out = None
    scored = False
    if softmax_scale is not None:
        if type(softmax_scale) is not float:
            require_number(f"flash_cute.{name}", "softmax_scale", softmax_scale, "a number or None")
        passed["softmax_scale"] = softmax_scale
    if options:
        known = ARGUMENTS[name]
        for option, value in options.items():
            if option not in known:
                raise TypeError(misnamed(f"flash_cute.{name}", option, tuple(known)))
            if option in READERS:
                READERS[option](name, option, value, passed)
            elif value is not None:
                (tensors if option in _OF_KEYS else others)[option] = value
        precision = passed.pop("precision", None)
        scored = "dropout_p" in passed
        if others:
            sinks, out = others.get("sinks"), others.get("out")
            scored = scored or len(others) > (sinks is not None) + (out is not None)
    nested = None
    try:
        if (precision is not None or q.dtype is torch.float32) and is_tf32(precision, q.dtype):
            passed["tf32"] = True
        given = tensors
        # A compiler's fakes would complain about other types in words of their own.
        for value in tensors.values():
            if not isinstance(value, torch.Tensor):
                raise TypeError("named below")
        if q.is_nested and "cu_seqlens_q" not in given:
            for argument in ("out", "mask", "bias", *SCALES):
                if argument in others or argument in given:
                    raise ValueError(f"{OURS}{argument} must be None where q is nested, got a tensor")
            nested = q
            q, k, v, given = lengths.unwrapped(q, k, v, given)
        if given:
            if "ranges" in given:
                given["ranges"] = lengths.laid_out(given["ranges"])
            if lengths.CHECKED:
                lengths.check(q, k, v, given)
        if sinks is not None:
            if not isinstance(sinks, torch.Tensor):
                raise TypeError("named below")
            keys = k
            k, v, given = lengths.with_a_row(k, v, given)
            given = given | {"sinks": sinks}
        if scored:
            given = given | _scores(q, others, passed.get("dropout_p", 0), op is ops.forward)
            if sinks is not None and k is not keys:  # a row for sinks, where there were none to see
                given.pop("mask", None)
                if "bias" in given:  # whose gradient is 0
                    given["bias"] = given["bias"][..., :0].sum(-1, keepdim=True)
        if out is not None:
            return ops.forward_into(q, k, v, given, passed, out)
        results = op(q, k, v, given, passed)
        return results if nested is None or op is not ops.forward else lengths.wrapped(*results, nested)
    except (RuntimeError, AttributeError, TypeError, ValueError) as error:
        raise _in_python_terms(name, error, q=q, k=k, v=v, **tensors, **others) from None


def _scores(q, others, dropout_p, draws):
    """What an operator gets of the tensors that change scores; draws: a seed, where there is none."""
    scores = {name: others[name] for name in SCORES if name in others}
    for value in scores.values():
        if not isinstance(value, torch.Tensor):
            raise TypeError("named below")
    if not dropout_p:
        scores.pop("dropout_seed", None)
    elif draws and "dropout_seed" not in scores:
        scores["dropout_seed"] = drawn_seed(q)
    return scores


def drawn_seed(q: torch.Tensor) -> torch.Tensor:
    """A dropout_seed from torch's generator for q's device: checkpoint finds the same when it draws again."""
    try:
        return torch.randint_like(q.new_empty(2, dtype=torch.int64), 2**63 - 1)
    except RuntimeError as error:
        if "randomness" in str(error):
            sentence = "dropout_p under vmap needs randomness='different' or 'same', or a dropout_seed"
            raise ValueError(f"{OURS}{sentence}") from None
        raise


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
    accepted = checks.accepted_beside_lengths("torch.float16, torch.bfloat16 and torch.float32 are")
    return checks.named(error, face, tensors, accepted)
