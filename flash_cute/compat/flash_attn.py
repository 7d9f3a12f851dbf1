"""FlashAttention-2's functions: flash_attn's names, arguments, defaults and return values.

    from flash_cute.compat.flash_attn import flash_attn_func

or, for code that can't be changed, before it imports flash_attn:

    flash_cute.compat.flash_attn.install()

Tensors are (batch, seqlen, heads, head_dim), packed (total, heads, head_dim); float16 or bfloat16, on CUDA
or the CPU. v, as v_cache, may have a head_dim of its own, which out then has. max_seqlen arguments are not
needed, and may hold anything.

Three differences: the LSE of a row that sees no key is -inf, as in FlashAttention-3, not inf; the LSE is
differentiable, where flash_attn drops its gradient; and dropout is keyed by flash_cute.dropout_mask.

Source: flash_attn/flash_attn_interface.py of github.com/Dao-AILab/flash-attention, 2.8.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec

from flash_cute.compat._cache import with_cache
from flash_cute.compat._translate import dense, packed, renaming, unstacked

__version__ = "2.8.3"  # the release whose functions these are

# What errors of the functions of q, k and v call what others have in one tensor.
_KV, _QKV = dict.fromkeys("kv", "kv"), dict.fromkeys("qkv", "qkv")


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """Attention of q, (batch, seqlen_q, heads_q, head_dim), with k and v, (batch, seqlen_k, heads_kv, ...).

    Args:
        window_size: (left, right), how many keys a query sees before and after its own; -1 is unlimited.
        softmax_scale, causal, deterministic: as in flash_cute.forward.
        dropout_p, softcap, alibi_slopes: as in flash_cute.forward, the seed from torch's generator.

    Returns:
        out, like q; with return_attn_probs=True (out, softmax_lse, S_dmask): softmax_lse is float32
        (batch, heads_q, seqlen_q), with alibi_slopes and causal of scores to which slope * j is added for key
        j, as flash_attn has them. S_dmask is an empty tensor: which weights dropout keeps is said by
        flash_cute.dropout_mask, of a dropout_seed that flash_cute.forward is given.
    """
    others = {"dropout_p": dropout_p, "softcap": softcap, "alibi_slopes": alibi_slopes}
    others["lse_is_read"] = return_attn_probs
    out, lse = dense(q, k, v, softmax_scale, causal, window_size, deterministic, **others)
    return (out, lse, out.new_empty(0)) if return_attn_probs else out


@partial(renaming, names=_KV)
def flash_attn_kvpacked_func(
    q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """flash_attn_func of kv, (batch, seqlen_k, 2, heads_kv, head_dim)."""
    mask = softmax_scale, causal, window_size, softcap, alibi_slopes
    k, v = unstacked("kv", kv, "batch", "seqlen", 2, "heads", "head_dim")
    return flash_attn_func(q, k, v, dropout_p, *mask, deterministic, return_attn_probs)


@partial(renaming, names=_QKV)
def flash_attn_qkvpacked_func(
    qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """flash_attn_func of qkv, (batch, seqlen, 3, heads, head_dim)."""
    mask = softmax_scale, causal, window_size, softcap, alibi_slopes
    q, k, v = unstacked("qkv", qkv, "batch", "seqlen", 3, "heads", "head_dim")
    return flash_attn_func(q, k, v, dropout_p, *mask, deterministic, return_attn_probs)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
    causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False, block_table=None,
):  # fmt: skip
    """Attention of packed sequences: q (total_q, heads_q, head_dim), k and v (total_k, heads_kv, head_dim).

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,), as in flash_cute.forward_varlen.
        max_seqlen_q, max_seqlen_k: not needed; max_seqlen_k as a number tells flash_attn's LSE with
            alibi_slopes, causal and a window to the left that is no shorter.
        block_table: int32 (batch, max_pages), where k and v are a cache in pages of any size, (pages,
            page_size, heads_kv, head_dim); cu_seqlens_k then only has their lengths. There are no gradients.
        The others: as in flash_attn_func.

    Returns:
        out, like q; with return_attn_probs=True (out, softmax_lse, S_dmask): softmax_lse is float32
        (heads_q, total_q).
    """
    others = {"dropout_p": dropout_p, "softcap": softcap, "alibi_slopes": alibi_slopes}
    others |= {"lse_is_read": return_attn_probs, "longest": max_seqlen_k}
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "block_table": block_table}
    out, lse = packed(q, k, v, lengths, softmax_scale, causal, window_size, deterministic, **others)
    return (out, lse, out.new_empty(0)) if return_attn_probs else out


@partial(renaming, names=_KV)
def flash_attn_varlen_kvpacked_func(
    q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
    causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False,
):  # fmt: skip
    """flash_attn_varlen_func of kv, (total_k, 2, heads_kv, head_dim)."""
    mask = softmax_scale, causal, window_size, softcap, alibi_slopes
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    k, v = unstacked("kv", kv, "total", 2, "heads", "head_dim")
    return flash_attn_varlen_func(q, k, v, *lengths, dropout_p, *mask, deterministic, return_attn_probs)


@partial(renaming, names=_QKV | {"cu_seqlens_q": "cu_seqlens", "cu_seqlens_k": "cu_seqlens"})
def flash_attn_varlen_qkvpacked_func(
    qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
    softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """flash_attn_varlen_func of qkv, (total, 3, heads, head_dim)."""
    mask = softmax_scale, causal, window_size, softcap, alibi_slopes
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    q, k, v = unstacked("qkv", qkv, "total", 3, "heads", "head_dim")
    return flash_attn_varlen_func(q, k, v, *lengths, dropout_p, *mask, deterministic, return_attn_probs)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
    return_softmax_lse=False,
):  # fmt: skip
    """Attention of q, (batch, seqlen_q, heads_q, head_dim), to a cache, (batch, seqlen_cache, heads_kv, ...).

    Args:
        k, v: (batch, seqlen_new, heads_kv, head_dim), written into the cache behind cache_seqlens before the
            attention, by flash_cute.append_kv; or None. They get no gradient, as in flash_attn.
        rotary_cos, rotary_sin: (max_position, rotary_dim / 2), dtype of k or float32; rotary_dim is a
            multiple of 16. They rotate row i of k by position cache_seqlens + i, and q likewise with causal
            or a window, else all of it by position cache_seqlens. q then gets no gradient. Only with k and v.
        rotary_interleaved: rotate columns 2i and 2i + 1 together; otherwise i and i + rotary_dim / 2.
        cache_seqlens: how many rows of the cache count before that: int, or int32 (batch,); None is all.
            Values of a tensor for which the cache has no room are cut to those for which it has.
        cache_leftpad: int32 (batch,), how many of them don't, at the begin. Default none.
        cache_batch_idx: int32 (batch,), which entry of the cache each sequence has, or with block_table which
            row of that; default its own.
        block_table: int32 (batch, max_pages), of a cache in pages of any size, (pages, page_size, heads_kv,
            head_dim).
        num_splits: 1 asks for results that don't depend on what else is in the call (batch_invariant of
            flash_cute.forward), on a GPU; any other value is accepted and not needed.
        The others: as in flash_attn_func.

    Returns:
        out, like q; with return_softmax_lse=True (out, softmax_lse), float32 (batch, heads_q, seqlen_q).
    """
    places = {"cache_seqlens": cache_seqlens, "cache_batch_idx": cache_batch_idx}
    places |= {"cache_leftpad": cache_leftpad, "block_table": block_table}
    places |= {"softcap": softcap, "alibi_slopes": alibi_slopes, "lse_is_read": return_softmax_lse}
    rotary = rotary_cos, rotary_sin, rotary_interleaved
    mask = softmax_scale, causal, window_size
    out, lse = with_cache(q, (k_cache, v_cache), (k, v), rotary, *mask, num_splits, **places)
    return (out, lse) if return_softmax_lse else out


def install() -> None:
    """Makes `import flash_attn` find this module, and `import flash_attn_interface` that of FlashAttention-3.

    For the whole process, also where the real ones are installed. Raises ImportError if one of them has been
    imported. flash_attn.bert_padding and flash_attn.layers.rotary are found as well. Other submodules, such
    as flash_attn.cute, are not offered: importlib.util.find_spec gives None for them, and importing one says
    so.
    """
    from flash_cute.compat import bert_padding, flash_attn_interface, rotary

    ours = sys.modules[__name__]
    layers = sys.modules.get("flash_attn.layers")
    if getattr(layers, "rotary", None) is not rotary:
        layers = module_from_spec(ModuleSpec("flash_attn.layers", None, is_package=True))
        layers.rotary = rotary
    modules = {
        "flash_attn": ours,
        "flash_attn.flash_attn_interface": ours,
        "flash_attn.bert_padding": bert_padding,
        "flash_attn.layers": layers,
        "flash_attn.layers.rotary": rotary,
        "flash_attn_interface": flash_attn_interface,
    }
    for name, module in modules.items():
        if sys.modules.get(name, module) is not module:
            raise ImportError(f"flash_cute.compat: {name} has been imported before; call install() first")
    sys.modules.update(modules)
    ours.flash_attn_interface, ours.bert_padding, ours.layers = ours, bert_padding, layers
    ours.__path__ = []  # importing a submodule asks the finders
    if not any(isinstance(finder, _Refusal) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Refusal())


class _Refusal:
    """Among Python's finders of modules: says which of flash_attn's are offered, where another is imported.

    importlib.util.find_spec, which only asks whether there is one, gets None. As finders are called alike for
    both, the stack tells; an import that is not recognised ends in Python's own ModuleNotFoundError.
    """

    def find_spec(self, name, path=None, target=None):
        for prefix in ("flash_attn.", f"{__name__}."):  # as `from flash_attn import ...` asks for it
            if name.startswith(prefix) and _is_imported():
                name = "flash_attn." + name.removeprefix(prefix)
                raise ModuleNotFoundError(
                    f"flash_cute.compat: there is no {name}; flash_attn, its flash_attn_interface, "
                    "bert_padding and layers.rotary, and flash_attn_interface are offered",
                    name=name,
                )


def _is_imported() -> bool:
    """Was the finder that calls this called by an import?"""
    caller = sys._getframe(2).f_back  # of importlib's _find_spec, which calls finders
    return caller is not None and caller.f_code.co_name == "_find_and_load_unlocked"
