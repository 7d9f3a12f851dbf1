"""FlashAttention-3's functions, as flash_cute.compat.flash_attn has FlashAttention-2's.

    from flash_cute.compat.flash_attn_interface import flash_attn_func

v, as v_cache, may have a head_dim of its own, which out then has.
What flash_cute has not (qv, descales but of a cache, attention_chunk beside a cache) raises
NotImplementedError.
What only says how to compute (num_splits but that of flash_attn_with_kvcache, pack_gqa, sm_margin,
scheduler_metadata) may hold anything. Each function takes s_aux as well, as builds of FlashAttention-3 with
sinks do.

Source: hopper/flash_attn_interface.py of github.com/Dao-AILab/flash-attention, 2.8.
"""

from __future__ import annotations

from functools import partial

from flash_cute.compat._cache import with_cache
from flash_cute.compat._translate import (
    check_tensor,
    dense,
    integer,
    packed,
    renaming,
    unstacked,
)
from flash_cute.wording import shown


def flash_attn_func(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
    sm_margin=0, return_attn_probs=False, *, s_aux=None,
):  # fmt: skip
    """Attention of q, (batch, seqlen_q, heads_q, head_dim), with k and v, (batch, seqlen_k, heads_kv, ...).

    Args:
        window_size: (left, right), how many keys a query sees before and after its own; -1 is unlimited.
        softmax_scale, causal, deterministic: as in flash_cute.forward.
        attention_chunk: a query sees only keys of its own chunk of so many, counted from the first key; the
            last query stands at the last key. Differentiable. 0 is none.
        s_aux: (heads_q,), the sinks of flash_cute.forward.
        softcap: as in flash_cute.forward. qv, descales: None. num_splits, pack_gqa, sm_margin: not needed.

    Returns:
        out, like q; with return_attn_probs=True (out, softmax_lse), float32 (batch, heads_q, seqlen_q).
    """
    refused = {"qv": qv, "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    given = {"chunk": attention_chunk, "sinks": s_aux, "softcap": softcap}
    out, lse = dense(q, k, v, softmax_scale, causal, window_size, deterministic, **given, **refused)
    return (out, lse) if return_attn_probs else out


@partial(renaming, names=dict.fromkeys("qkv", "qkv"))
def flash_attn_qkvpacked_func(
    qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, window_size=(-1,
    -1), attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0,
    return_attn_probs=False, *, s_aux=None,
):  # fmt: skip
    """flash_attn_func of qkv, (batch, seqlen, 3, heads, head_dim).

    With num_heads_q also (batch, seqlen, num_heads_q + 2 * heads_kv, head_dim).
    """
    check_tensor("qkv", qkv)
    if num_heads_q is None or qkv.dim() != 4:
        q, k, v = unstacked("qkv", qkv, "batch", "seqlen", 3, "heads", "head_dim")
    else:
        of_queries, heads = integer(num_heads_q), qkv.shape[-2]
        heads_kv, odd = (0, 0) if of_queries is None else divmod(heads - of_queries, 2)
        if heads_kv < 1 or odd or of_queries < 1 or of_queries % heads_kv:
            raise ValueError(
                f"flash_cute.compat: num_heads_q must be a multiple of ({heads} - num_heads_q) / 2, as qkv "
                f"has {heads} heads, got {shown(num_heads_q)}"
            )
        q, k, v = qkv.split([num_heads_q, heads_kv, heads_kv], -2)
    refused = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    given = {"chunk": attention_chunk, "sinks": s_aux, "softcap": softcap}
    out, lse = dense(q, k, v, softmax_scale, causal, window_size, deterministic, **given, **refused)
    return (out, lse) if return_attn_probs else out


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
    softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
    sm_margin=0, return_attn_probs=False, *, s_aux=None,
):  # fmt: skip
    """Attention of packed sequences: q (total_q, heads_q, head_dim), k and v (total_k, heads_kv, head_dim).

    Args:
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k: as in flash_cute.forward_varlen.
        max_seqlen_q, max_seqlen_k: not needed. The others: as in flash_attn_func.

    Returns:
        out, like q; with return_attn_probs=True (out, softmax_lse), softmax_lse float32 (heads_q, total_q).
    """
    refused = {"qv": qv, "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    given = {"chunk": attention_chunk, "sinks": s_aux, "softcap": softcap}
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    lengths |= {"seqused_q": seqused_q, "seqused_k": seqused_k}
    out, lse = packed(q, k, v, lengths, softmax_scale, causal, window_size, deterministic, **given, **refused)
    return (out, lse) if return_attn_probs else out


@partial(renaming, names={"block_table": "page_table"})
def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None,
    softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
    rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
    return_softmax_lse=False, *, s_aux=None,
):  # fmt: skip
    """Attention of q, (batch, seqlen_q, heads_q, head_dim), to a cache, (batch, seqlen_cache, heads_kv, ...).

    Args:
        k, v, rotary_cos, rotary_sin, rotary_interleaved, cache_seqlens, cache_leftpad, cache_batch_idx,
            num_splits: as in flash_cute.compat.flash_attn.
        page_table: as block_table there.
        cu_seqlens_q: int32 (batch + 1,), of packed queries, (total_q, heads_q, head_dim), as in
            flash_cute.forward_varlen; cu_seqlens_k_new likewise of k and v, (total_new, heads_kv, head_dim).
        rotary_seqlens: int32 (batch,), the position of each sequence's first new row. Default cache_seqlens.
        k_descale, v_descale: float32 (batch, heads_kv), of a cache of torch.float8_e4m3fn beside 16-bit q,
            as k_scale and v_scale in flash_cute.forward; new rows, of q's dtype, are divided by them.
        max_seqlen_q, scheduler_metadata: not needed. attention_chunk: 0. The others: as in flash_attn_func.

    Returns:
        out, like q; with return_softmax_lse=True (out, softmax_lse), float32 (batch, heads_q, seqlen_q) or
        packed (heads_q, total_q), and two empty tensors.
    """
    places = {"cache_seqlens": cache_seqlens, "cache_batch_idx": cache_batch_idx}
    places |= {"cache_leftpad": cache_leftpad, "block_table": page_table, "rotary_seqlens": rotary_seqlens}
    places |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k_new": cu_seqlens_k_new}
    places |= {"sinks": s_aux, "softcap": softcap, "k_descale": k_descale, "v_descale": v_descale}
    refused = {"qv": qv, "q_descale": q_descale, "attention_chunk": attention_chunk}
    rotary = rotary_cos, rotary_sin, rotary_interleaved
    mask = softmax_scale, causal, window_size
    out, lse = with_cache(q, (k_cache, v_cache), (k, v), rotary, *mask, num_splits, **places, **refused)
    return (out, lse, lse.new_empty(0), lse.new_empty(0)) if return_softmax_lse else out
