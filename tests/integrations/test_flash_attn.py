"""flash_attn's functions: same arguments, defaults and results, or a refusal by name."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.appends import turned_row
from support.caches import in_pages
from support.cases import (
    MASKS,
    ROOT,
    Mask,
    Ranged,
    Sequence,
    Shape,
    each_pair,
    make_gradients,
    make_inputs,
    make_ragged,
    make_ragged_gradients,
)
from support.changed import Changed, next_seed
from support.tolerance import (
    assert_attention,
    assert_gradients,
    assert_ragged,
    assert_ragged_gradients,
    assert_within_rule,
)

import flash_cute
from flash_cute.compat import flash_attn as fa2
from flash_cute.compat import flash_attn_interface as fa3

DTYPE = torch.bfloat16
SHAPE = Shape(2, 4, 2, 37, 61, 32)  # small: kernels have tests of their own
SQUARE = Shape(2, 4, 4, 53, 53, 32)
UNEQUAL = Sequence(1, 1), Sequence(30, 50), Sequence(0, 7), Sequence(20, 4), Sequence(5, 0)
USED = Sequence(40, 60, 30, 35), Sequence(20, 20, 0, 20), Sequence(20, 20, 20, 0)
SELF = tuple(Sequence(rows, rows) for rows in (1, 40, 0, 33))

# As their sources have them; s_aux, which builds with sinks have at other places, by its name alone.
MASK2 = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
)
MASK2 += "deterministic=False, return_attn_probs=False"
DESCALES = "q_descale=None, k_descale=None, v_descale=None"
MASK3 = f"softmax_scale=None, causal=False, qv=None, {DESCALES}, window_size=(-1, -1), attention_chunk=0, "
MASK3 += "softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
MASK3 += ", *, s_aux=None"
QKV3 = f"softmax_scale=None, causal=False, {DESCALES}, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
QKV3 += "deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False, *, s_aux=None"
PACKED = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
CACHE = "q, k_cache, v_cache, k=None, v=None"
ROTARY = "rotary_cos=None, rotary_sin=None"
PLACES = "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None"
CACHE2 = "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, "
CACHE2 += "alibi_slopes=None, num_splits=0, return_softmax_lse=False"
CACHE3 = f"cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, {DESCALES}, "
CACHE3 += "softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
CACHE3 += "rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, "
CACHE3 += "return_softmax_lse=False, *, s_aux=None"
SIGNATURES = {
    (fa2, "flash_attn_func"): f"q, k, v, {MASK2}",
    (fa2, "flash_attn_kvpacked_func"): f"q, kv, {MASK2}",
    (fa2, "flash_attn_qkvpacked_func"): f"qkv, {MASK2}",
    (fa2, "flash_attn_varlen_func"): f"q, k, v, {PACKED}, {MASK2}, block_table=None",
    (fa2, "flash_attn_varlen_kvpacked_func"): f"q, kv, {PACKED}, {MASK2}",
    (fa2, "flash_attn_varlen_qkvpacked_func"): f"qkv, cu_seqlens, max_seqlen, {MASK2}",
    (fa3, "flash_attn_func"): f"q, k, v, {MASK3}",
    (fa3, "flash_attn_varlen_func"): f"q, k, v, {PACKED}, seqused_q=None, seqused_k=None, {MASK3}",
    (fa3, "flash_attn_qkvpacked_func"): f"qkv, {QKV3}",
    (fa2, "flash_attn_with_kvcache"): f"{CACHE}, {ROTARY}, {PLACES}, block_table=None, {CACHE2}",
    (fa3, "flash_attn_with_kvcache"): f"{CACHE}, qv=None, {ROTARY}, {PLACES}, page_table=None, {CACHE3}",
}
FUNCTIONS = [pytest.param(*key, id=f"{key[0].__name__.rpartition('.')[2]}.{key[1]}") for key in SIGNATURES]

# Of each mask, flash_attn's arguments.
ARGUMENTS = {
    "full": ({}, MASKS["full"]),
    "causal": ({"causal": True}, MASKS["causal"]),
    "window": ({"window_size": (17, 9)}, Mask(window=(17, 9))),
    "window to the left": ({"window_size": (40, -1)}, Mask(window=(40, None))),
    "window to the right": ({"window_size": [-1, 9]}, Mask(window=(None, 9))),
    "causal window": ({"causal": True, "window_size": (33, 5)}, Mask(window=(33, 0))),
    "causal by its window": ({"window_size": (-1, 0)}, MASKS["causal"]),
}


@pytest.mark.parametrize(("module", "name"), FUNCTIONS)
def test_signatures(module, name):
    assert str(inspect.signature(getattr(module, name))) == f"({SIGNATURES[module, name]})"


def call(module, name, tensors, lengths, options):
    """The function of inputs that are q, k and v, stacked as it wants them."""
    q, k, v = tensors
    packed = {key: lengths[key] for key in lengths if key.startswith("cu_seqlens")}
    if "qkvpacked" in name:
        tensors = [torch.stack([q, k, v], -3)]
        packed = {"cu_seqlens": packed["cu_seqlens_q"]} if packed else {}
    elif "kvpacked" in name:
        tensors = [q, torch.stack([k, v], -3)]
    maxima = [None] * len(packed)  # not needed
    used = {key: lengths[key] for key in lengths if key.startswith("seqused")}
    return getattr(module, name)(*tensors, *packed.values(), *maxima, **used, **options)


def leaves(tensors) -> list[torch.Tensor]:
    return [x.detach().requires_grad_() for x in tensors]


def with_lse(module, result) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a call with return_attn_probs; FlashAttention-2's third is empty without dropout."""
    if module is fa2:
        *result, dropped = result
        assert dropped.shape == (0,)
    return tuple(result)


DENSE = [f for f in FUNCTIONS if "varlen" not in f.values[1] and "kvcache" not in f.values[1]]
VARLEN = [f for f in FUNCTIONS if "varlen" in f.values[1]]


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize(("module", "name"), DENSE)
def test_dense(device, module, name, arguments):
    options, mask = ARGUMENTS[arguments]
    shape = SQUARE if "qkv" in name else SHAPE
    if (module, name) == (fa3, "flash_attn_func"):
        shape = replace(shape, head_dim_v=40)
    inputs = leaves(x.transpose(1, 2) for x in make_inputs(shape, DTYPE, device))
    options = options | {"softmax_scale": 0.2, "deterministic": True}
    out, lse = with_lse(module, call(module, name, inputs, {}, options | {"return_attn_probs": True}))
    assert torch.equal(call(module, name, inputs, {}, options), out)
    transposed = [x.detach().transpose(1, 2) for x in (out, *inputs)]
    assert_attention((transposed[0], lse.detach()), *transposed[1:], mask, 0.2)
    dout, dlse = make_gradients(transposed[0])
    gradients = torch.autograd.grad((out, lse), inputs, (dout.transpose(1, 2), dlse))
    gradients = [
        torch.empty_like(x).copy_(g.transpose(1, 2)) for x, g in zip(transposed[1:], gradients, strict=True)
    ]
    assert_gradients(gradients, *transposed[1:], dout, dlse, mask, 0.2)


@pytest.mark.parametrize("arguments", ["full", "causal", "window"])
@pytest.mark.parametrize(("module", "name"), VARLEN)
def test_varlen(device, module, name, arguments):
    options, mask = ARGUMENTS[arguments]
    sequences, heads = (SELF, (4, 4)) if "qkv" in name else (UNEQUAL, (4, 2))
    of_v = None
    if module is fa3:
        sequences, of_v = USED, 40
    options_of_batch = {"packed": True, "layout": "transposed", "margins": (0, 0), "head_dim_v": of_v}
    batch = make_ragged(sequences, heads, 64, DTYPE, device, **options_of_batch)
    inputs = leaves((batch.q, batch.k, batch.v))
    options = options | {"softmax_scale": 0.2}
    result = call(module, name, inputs, batch.lengths, options | {"return_attn_probs": True})
    out, lse = with_lse(module, result)
    assert torch.equal(call(module, name, inputs, batch.lengths, options), out)
    assert_ragged((out.detach(), lse.detach()), batch, mask, 0.2)
    dout, dlse = make_ragged_gradients(batch)
    gradients = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    gradients = [
        torch.empty_like(x).copy_(g) for x, g in zip((batch.q, batch.k, batch.v), gradients, strict=True)
    ]
    assert_ragged_gradients(gradients, batch, dout, dlse, mask, 0.2)


@pytest.mark.parametrize("arguments", ["full", "causal", "window"])
@pytest.mark.parametrize("page_size", [1, 16, 100])
def test_varlen_in_pages(device, page_size, arguments):
    """cu_seqlens_k has the lengths of keys; there are no gradients."""
    options, mask = ARGUMENTS[arguments]
    batch = make_ragged(UNEQUAL, (4, 2), 64, DTYPE, device, packed=True, margins=(0, 0))
    k, v, lengths = in_pages(batch, page_size, "heads first")
    offsets = torch.nn.functional.pad(lengths["seqused_k"].cumsum(0), (1, 0)).int()
    inputs = batch.q, k.transpose(1, 2), v.transpose(1, 2), lengths["cu_seqlens_q"], offsets, None, None
    options = options | {"softmax_scale": 0.2, "block_table": lengths["block_table"]}
    out, lse = with_lse(fa2, fa2.flash_attn_varlen_func(*inputs, **options, return_attn_probs=True))
    assert_ragged((out, lse), batch, mask, 0.2)
    batch.q.requires_grad_()
    with pytest.raises(NotImplementedError, match=r"^flash_cute\.compat: there are no gradients through a"):
        fa2.flash_attn_varlen_func(*inputs, **options)


def chunks_of(size, mask, seqlen_q, seqlen_k, device):
    """The mask of attention_chunk by its definition, one query and key at a time."""
    rows = []
    for i in range(seqlen_q):
        own = i + seqlen_k - seqlen_q
        keys = [j for j in range(seqlen_k) if own // size == j // size]
        rows.append([[keys[0], keys[-1] + 1]] if keys else [[0, 0]])
    ranges = torch.tensor(rows, dtype=torch.int64, device=device).reshape(1, 1, seqlen_q, 1, 2)
    return Ranged.of(mask, ranges)


@pytest.mark.parametrize("size", [1, 16, 60, 2**40])
@pytest.mark.parametrize("arguments", ["full", "causal", "window", "causal window"])
@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_qkvpacked_func"])
def test_chunks(device, name, arguments, size):
    options, mask = ARGUMENTS[arguments]
    for shape in [SQUARE] if "qkv" in name else [SHAPE, Shape(2, 4, 2, 61, 37, 32)]:
        inputs = leaves(x.transpose(1, 2) for x in make_inputs(shape, DTYPE, device))
        options = options | {"softmax_scale": 0.2, "attention_chunk": size, "return_attn_probs": True}
        out, lse = call(fa3, name, inputs, {}, options)
        chunked = chunks_of(size, mask, shape.seqlen_q, shape.seqlen_k, device)
        tensors = [x.detach().transpose(1, 2) for x in (out, *inputs)]
        assert_attention((tensors[0], lse.detach()), *tensors[1:], chunked, 0.2)
        dout, dlse = make_gradients(tensors[1])
        gradients = torch.autograd.grad((out, lse), inputs, (dout.transpose(1, 2), dlse))
        gradients = [
            torch.empty_like(x).copy_(g.transpose(1, 2)) for x, g in zip(tensors[1:], gradients, strict=True)
        ]
        assert_gradients(gradients, *tensors[1:], dout, dlse, chunked, 0.2)


@pytest.mark.parametrize("arguments", ["full", "causal", "window"])
@pytest.mark.parametrize("sequences", [SELF, UNEQUAL, USED, ()], ids=["self", "unequal", "used", "none"])
def test_chunks_of_packed_sequences(device, sequences, arguments):
    """Counted from each sequence's own first key, the last query that counts at the last such key."""
    options, mask = ARGUMENTS[arguments]
    batch = make_ragged(sequences, (4, 2), 64, DTYPE, device, packed=True)
    options = options | {"softmax_scale": 0.2, "attention_chunk": 16, "return_attn_probs": True}
    result = call(fa3, "flash_attn_varlen_func", (batch.q, batch.k, batch.v), batch.lengths, options)
    sizes = [(q.stop - q.start, k.stop - k.start) for _, q, k in batch.places]
    assert_ragged(result, batch, [chunks_of(16, mask, *size, device) for size in sizes], 0.2)


# Scores that are changed


def exact(q, k, v, slopes, mask: Mask, as_causal: bool, softcap: float = 0.0, dtype=torch.float64):
    """(out, lse) as flash_attn has them: ALiBi adds slope * j where it is causal, else - slope * distance."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.to(dtype).repeat_interleave(group, 1) for x in (k, v))
    scores = q.to(dtype) @ k.mT * 0.2
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    row = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    key = torch.arange(k.shape[2], device=q.device)
    added = key.expand(len(row), -1) if as_causal else -(row - key).abs()
    if slopes is not None:
        scores = scores + slopes.to(dtype)[..., None, None] * added
    seen = mask.visible(q.shape[2], k.shape[2], q.device)
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = scores.softmax(-1).masked_fill(~seen.any(-1, keepdim=True), 0)
    return weights @ v, scores.logsumexp(-1)


def assert_exact(result, *arguments, **options) -> None:
    oracle, yardstick = (exact(*arguments, **options, dtype=dtype) for dtype in (torch.float64, DTYPE))
    for name, ours, allowed, right in zip(("out", "lse"), result, yardstick, oracle, strict=True):
        assert_within_rule(name, ours.detach(), allowed, right)


# Of flash_attn, whether it is causal: not with a limit to the left, unless no key lies so far away.
ALIBI = {
    "full": False,
    "causal": True,
    "causal by its window": True,
    "window": False,
    "causal window": False,
    "causal long window": True,
}
ARGUMENTS["causal long window"] = {"causal": True, "window_size": (61, 0)}, MASKS["causal"]


@pytest.mark.parametrize("of_sequences", [False, True])
@pytest.mark.parametrize("arguments", ALIBI)
@pytest.mark.parametrize(
    "name", [name for module, name in SIGNATURES if module is fa2 and "varlen" not in name]
)
def test_alibi(device, name, arguments, of_sequences):
    options, mask = ARGUMENTS[arguments]
    q, k, v = make_inputs(SQUARE if "qkv" in name else SHAPE, DTYPE, device)
    slopes = torch.rand(2, 4, device=device)
    slopes = slopes if of_sequences else slopes[0]
    given = {"alibi_slopes": slopes, "softmax_scale": 0.2, **options}
    inputs = leaves(x.transpose(1, 2) for x in (q, k, v))
    if "kvcache" in name:
        result = fa2.flash_attn_with_kvcache(*inputs, **given, return_softmax_lse=True)
    else:
        result = with_lse(fa2, call(fa2, name, inputs, {}, given | {"return_attn_probs": True}))
    out, lse = result[0].transpose(1, 2), result[1]
    assert_exact((out, lse), q, k, v, slopes, mask, ALIBI[arguments])
    if "kvcache" not in name:
        assert torch.equal(call(fa2, name, inputs, {}, given), result[0])
        lse.sum().backward()  # adds a number that q does not change
        expected = leaves((q, k, v))
        flash_cute.forward(*expected, **mask.options, softmax_scale=0.2, alibi_slopes=slopes)[
            1
        ].sum().backward()
        torch.testing.assert_close(inputs[0].grad.transpose(1, 2), expected[0].grad, rtol=0, atol=1e-2)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("arguments", ALIBI)
@pytest.mark.parametrize("of_sequences", [False, True])
def test_alibi_of_packed_sequences(device, arguments, of_sequences, paged):
    options, mask = ARGUMENTS[arguments]
    batch = make_ragged(UNEQUAL, (4, 2), 32, DTYPE, device, packed=True)
    slopes = torch.rand(len(UNEQUAL), 4, device=device)
    tensors, table = (batch.q, batch.k, batch.v), {}
    lengths = [batch.lengths[name] for name in ("cu_seqlens_q", "cu_seqlens_k")]
    if paged:
        *pages, held = in_pages(batch, 16, "rows first")
        tensors = batch.q, *(x.transpose(1, 2) for x in pages)
        lengths[1] = torch.nn.functional.pad(held["seqused_k"].cumsum(0), (1, 0)).int()
        table["block_table"] = held["block_table"]
    given = {"alibi_slopes": slopes if of_sequences else slopes[0], "softmax_scale": 0.2, **options, **table}
    out, lse, _ = fa2.flash_attn_varlen_func(*tensors, *lengths, 30, 50, **given, return_attn_probs=True)
    for number, (_, rows, keys) in enumerate(batch.places):
        parts = (x[part].transpose(0, 1)[None] for x, part in zip(
            (batch.q, batch.k, batch.v), (rows, keys, keys), strict=True))  # fmt: skip
        own = slopes[number] if of_sequences else slopes[0]
        result = out[rows].transpose(0, 1)[None], lse[None, :, rows]
        assert_exact(result, *parts, own, mask, ALIBI[arguments])
    counted = torch.zeros(len(out), dtype=torch.bool, device=device)
    for _, rows, _ in batch.places:
        counted[rows] = True
    assert (lse[:, ~counted] == -torch.inf).all()


@pytest.mark.parametrize("arguments", ["full", "causal", "window"])
@pytest.mark.parametrize("name", ["numbers", "left padding", "new rows, left padding"])
def test_alibi_beside_a_cache(device, name, arguments):
    options, mask = ARGUMENTS[arguments]
    used, leftpad, new = CACHES[name]
    q, *cache = (x.transpose(1, 2) for x in make_inputs(Shape(3, 4, 2, 5, 60, 32), DTYPE, device))
    cache = [x.clone() for x in cache]
    rows = [torch.randn(3, new, 2, 32, device=device, dtype=DTYPE) if new else None for _ in "kv"]
    lengths = {"cache_seqlens": int32(used, device)}
    if leftpad:
        lengths["cache_leftpad"] = int32(leftpad, device)
    slopes = torch.rand(3, 4, device=device)
    options = {**options, "softmax_scale": 0.2, "alibi_slopes": slopes, "softcap": 2.0}
    out, lse = fa2.flash_attn_with_kvcache(q, *cache, *rows, **lengths, **options, return_softmax_lse=True)
    for entry, count in enumerate(used):
        keys = slice(leftpad[entry] if leftpad else 0, count + new)
        parts = q[entry : entry + 1], *(x[entry : entry + 1, keys] for x in cache)
        sequence = [x.transpose(1, 2) for x in parts]
        result = out[entry : entry + 1].transpose(1, 2), lse[entry : entry + 1]
        assert_exact(result, *sequence, slopes[entry], mask, arguments == "causal", softcap=2.0)


@pytest.mark.parametrize(("module", "name"), FUNCTIONS)
def test_softcap(device, module, name):
    options = {"softcap": 0.3, "softmax_scale": 0.2, "causal": True}
    if "kvcache" in name:
        q, k, v = make_inputs(SHAPE, DTYPE, device)
        tensors = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = getattr(module, name)(*tensors, **options, return_softmax_lse=True)
        assert_exact((out.transpose(1, 2), lse), q, k, v, None, MASKS["causal"], True, softcap=0.3)
        return
    options["return_attn_probs"] = True
    mask = Changed(causal=True, changes={"softcap": 0.3})
    if "varlen" in name:
        batch = make_ragged(SELF, (4, 4), 32, DTYPE, device, packed=True)
        inputs = leaves((batch.q, batch.k, batch.v))
        out, lse = with_lse(module, call(module, name, inputs, batch.lengths, options))
        assert_ragged((out.detach(), lse), batch, mask, 0.2)
        return
    q, k, v = make_inputs(SQUARE, DTYPE, device)
    inputs = leaves(x.transpose(1, 2) for x in (q, k, v))
    out, lse = with_lse(module, call(module, name, inputs, {}, options))
    assert_attention((out.detach().transpose(1, 2), lse.detach()), q, k, v, mask, 0.2)
    dout, _ = make_gradients(q)
    found = torch.autograd.grad(out, inputs, dout.transpose(1, 2))
    laid_out = [torch.empty_like(x).copy_(dx.transpose(1, 2)) for x, dx in zip((q, k, v), found, strict=True)]
    assert_gradients(laid_out, q, k, v, dout, None, mask, 0.2)


@pytest.mark.parametrize(
    "name", [name for module, name in SIGNATURES if module is fa2 and "kvcache" not in name]
)
def test_dropout(device, name):
    """Of a seed from torch's generator; with all else that changes scores."""
    options = {"dropout_p": 0.3, "softmax_scale": 0.2, "causal": True, "softcap": 3.0}
    slopes = torch.rand(4, device=device)
    if "varlen" in name:
        batch = make_ragged(SELF, (4, 4), 32, DTYPE, device, packed=True, margins=(0, 0))
        inputs, lengths = leaves((batch.q, batch.k, batch.v)), batch.lengths
        seed = next_seed(inputs[0])
        out = call(fa2, name, inputs, lengths, options | {"alibi_slopes": slopes})
        again = leaves((batch.q, batch.k, batch.v))
        options |= {"alibi_slopes": slopes, "dropout_seed": seed}
        expected = flash_cute.attention_varlen(*again, **batch.lengths, **options)
        assert torch.equal(out, expected)
        dout = torch.randn_like(out)
        for one, other in zip(
            torch.autograd.grad(out, inputs, dout), torch.autograd.grad(expected, again, dout), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-2)
        return
    q, k, v = make_inputs(SQUARE, DTYPE, device)
    inputs = leaves(x.transpose(1, 2) for x in (q, k, v))
    seed = next_seed(q)
    out, lse = with_lse(fa2, call(fa2, name, inputs, {}, options | {"return_attn_probs": True}))
    changes = {"dropout_p": 0.3, "dropout_seed": seed, "softcap": 3.0}
    mask = Changed(causal=True, changes=changes)
    assert_attention((out.detach().transpose(1, 2), lse.detach()), q, k, v, mask, 0.2)
    dout, _ = make_gradients(q)
    found = torch.autograd.grad(out, inputs, dout.transpose(1, 2))
    laid_out = [torch.empty_like(x).copy_(dx.transpose(1, 2)) for x, dx in zip((q, k, v), found, strict=True)]
    assert_gradients(laid_out, q, k, v, dout, None, mask, 0.2)
    assert not torch.equal(call(fa2, name, inputs, {}, options), out)


@pytest.mark.parametrize("name", [name for module, name in SIGNATURES if module is fa3])
def test_sinks(device, name):
    """As those of flash_cute.forward; in the attention of a cache, too, there without gradients."""
    sinks = torch.randn(4, device=device, requires_grad=True)
    if "varlen" in name:
        batch = make_ragged(SELF, (4, 4), 32, DTYPE, device, packed=True)
        tensors, lengths = (batch.q, batch.k, batch.v), batch.lengths
        expected = flash_cute.forward_varlen(*tensors, **lengths, causal=True, sinks=sinks)
    else:
        tensors, lengths = [x.transpose(1, 2) for x in make_inputs(SQUARE, DTYPE, device)], {}
        expected = flash_cute.forward(*(x.transpose(1, 2) for x in tensors), causal=True, sinks=sinks)
        expected = expected[0].transpose(1, 2), expected[1]
    with_lse = {"return_softmax_lse" if "kvcache" in name else "return_attn_probs": True}
    out, lse, *_ = call(fa3, name, tensors, lengths, {"causal": True, "s_aux": sinks, **with_lse})
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    if "kvcache" in name:
        assert not any(x.requires_grad for x in (out, lse))
    else:
        dsinks = [torch.autograd.grad(x.sum(), sinks)[0] for x in (lse, expected[1])]
        assert torch.equal(*dsinks)
    with pytest.raises(ValueError, match=r"^flash_cute\.compat: s_aux must have shape \(heads_q,\), here"):
        call(fa3, name, tensors, lengths, {"s_aux": sinks[:3]})


def test_grouped_heads_in_one_tensor(device):
    """FlashAttention-3's qkv of 4 dimensions."""
    q, k, v = make_inputs(Shape(2, 6, 2, 150, 150, 64), DTYPE, device)
    qkv = torch.cat([x.transpose(1, 2) for x in (q, k, v)], 2)
    out, lse = fa3.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=6, return_attn_probs=True)
    assert_attention((out.transpose(1, 2), lse), q, k, v, MASKS["causal"])


def test_defaults(device):
    """Scale, mask and dropout where nothing is said."""
    q, k, v = make_inputs(SHAPE, DTYPE, device)
    for module in (fa2, fa3):
        tensors = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = with_lse(module, module.flash_attn_func(*tensors, return_attn_probs=True))
        assert_attention((out.transpose(1, 2), lse), q, k, v)


def test_accepted_values_of_refused_options(device):
    q, k, v = (x.transpose(1, 2) for x in make_inputs(SHAPE, DTYPE, device))
    expected = fa2.flash_attn_func(q, k, v)
    assert torch.equal(fa2.flash_attn_func(q, k, v, 0, softcap=0, alibi_slopes=None), expected)
    assert torch.equal(fa3.flash_attn_func(q, k, v, softcap=0.0, attention_chunk=0), expected)


@pytest.mark.parametrize(
    "hints",
    [
        {"num_splits": 4, "pack_gqa": True, "sm_margin": 8},
        {"num_splits": None, "pack_gqa": False, "scheduler_metadata": torch.ones(4)},
        {"rotary_seqlens": torch.ones(2), "rotary_interleaved": False},
    ],
    ids=str,
)
@pytest.mark.parametrize(("module", "name"), FUNCTIONS)
def test_hints_change_nothing(device, module, name, hints):
    """Nor what belongs to an argument that is not given."""
    if "varlen" in name:
        batch = make_ragged(SELF, (4, 4), 32, DTYPE, device, packed=True)
        tensors, lengths = (batch.q, batch.k, batch.v), batch.lengths
    else:
        tensors, lengths = [x.transpose(1, 2) for x in make_inputs(SQUARE, DTYPE, device)], {}
    known = inspect.signature(getattr(module, name)).parameters
    hints = {hint: value for hint, value in hints.items() if hint in known}
    expected = call(module, name, tensors, lengths, {"causal": True})
    assert torch.equal(call(module, name, tensors, lengths, {"causal": True} | hints), expected)


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array, lambda window: list(torch.tensor(window))])
def test_windows_of_two_elements(device, kind):
    q, k, v = (x.transpose(1, 2) for x in make_inputs(SHAPE, DTYPE, device))
    for window in ((17, 9), (-1, 3)):
        expected = fa2.flash_attn_func(q, k, v, window_size=window)
        assert torch.equal(fa2.flash_attn_func(q, k, v, window_size=kind(window)), expected)


REFUSED = {
    "qv": (torch.ones(4), "a tensor; None is accepted"),
    "q_descale": (torch.ones(4), "a tensor; None is accepted"),
    "k_descale": (torch.ones(4), "a tensor; None is accepted"),
    "v_descale": (torch.ones(4), "a tensor; None is accepted"),
    "attention_chunk": (128, "128; 0 is accepted"),
}
REFUSALS = [
    pytest.param(module, name, option, id=f"{module.__name__.rpartition('.')[2]}.{name}-{option}")
    for module, name in SIGNATURES
    for option in inspect.signature(getattr(module, name)).parameters
    if option in REFUSED and (option != "attention_chunk" or name == "flash_attn_with_kvcache")
    if option not in ("k_descale", "v_descale") or name != "flash_attn_with_kvcache"
]


@pytest.mark.parametrize(("module", "name", "option"), REFUSALS)
def test_refused_options(device, module, name, option):
    value, sentence = REFUSED[option]
    if "varlen" in name:
        batch = make_ragged(SELF, (4, 4), 64, DTYPE, device, packed=True)
        tensors, lengths = (batch.q, batch.k, batch.v), batch.lengths
    else:
        tensors, lengths = [x.transpose(1, 2) for x in make_inputs(SQUARE, DTYPE, device)], {}
    with pytest.raises(NotImplementedError) as raised:
        call(module, name, tensors, lengths, {option: value})
    assert str(raised.value) == f"flash_cute.compat: {option} is {sentence}"


@pytest.mark.parametrize(
    ("sentence", "wrong"),
    [
        ("window_size must be (left, right), got 3", {"window_size": 3}),
        ("window_size must be (left, right), got (1, 2, 3)", {"window_size": (1, 2, 3)}),
        ("window_size must be (left, right), got (1.5, 2)", {"window_size": (1.5, 2)}),
        ("window_size must be (left, right), got tensor(3)", {"window_size": torch.tensor(3)}),
        ("window_size must be (left, right), got tensor([1., 2.])", {"window_size": torch.tensor([1.0, 2])}),
        (
            "window_size must be (left, right), got tensor(..., device='meta', size=(2,)",
            {"window_size": torch.ones(2, dtype=torch.int32, device="meta")},
        ),
        (
            "window_size's left limit is -2; -1, which is unlimited, or more is accepted",
            {"window_size": (-2, 3)},
        ),
        (f"window_size's right limit is {2**70}", {"window_size": (2, 2**70)}),
        ("causal is 1; True or False", {"causal": 1}),
        ("softmax_scale is", {"softmax_scale": "1"}),
        ("attention_chunk must be an int >= 0, got -3", {"attention_chunk": -3}),
        ("attention_chunk must be an int >= 0, got 2.5", {"attention_chunk": 2.5}),
    ],
)
def test_wrong_options(device, sentence, wrong):
    q, k, v = (x.transpose(1, 2) for x in make_inputs(SHAPE, DTYPE, device))
    module = fa3 if "attention_chunk" in wrong else fa2
    with pytest.raises((TypeError, ValueError)) as raised:
        module.flash_attn_func(q, k, v, **wrong)
    assert str(raised.value).startswith(f"flash_cute.compat: {sentence}")


@pytest.mark.parametrize("function", [fa2.flash_attn_qkvpacked_func, fa3.flash_attn_qkvpacked_func])
@pytest.mark.parametrize("shape", [(2, 50, 2, 4, 64), (50, 3, 4, 64), (3, 4, 64)], ids=str)
def test_wrong_stacks(device, function, shape):
    sentence = f"flash_cute.compat: qkv must have shape (batch, seqlen, 3, heads, head_dim), got {shape}"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        function(torch.ones(shape, device=device, dtype=DTYPE))


Q, K, KV = torch.ones(2, 9, 4, 16), torch.ones(2, 9, 2, 16), torch.ones(2, 9, 2, 2, 16)
OFFSETS, ROWS_OF_CACHE = torch.tensor([0, 9, 18]), torch.tensor([3, 3], dtype=torch.int32)
TABLE = torch.tensor([[0], [1]], dtype=torch.int32)
IN_WORDS_OF_THE_CALLER = [
    (fa2.flash_attn_func, (Q, K, K[:, :8]), {},
     "v must have k's shape but for the last dimension, (2, 9, 2, 16), got (2, 8, 2, 16)"),
    (fa2.flash_attn_kvpacked_func, (Q, KV[:1]), {}, "kv has batch 1 and q 2"),
    (fa2.flash_attn_kvpacked_func, (Q, KV.half()), {}, "kv has dtype torch.float16 and q torch.bfloat16"),
    (fa2.flash_attn_varlen_kvpacked_func, (Q[0], KV[0][..., :8], *[OFFSETS.int()] * 2, 9, 9), {},
     "kv has head_dim 8 and q 16"),
    (fa2.flash_attn_qkvpacked_func, (torch.ones(2, 9, 3, 4, 300),), {}, "head_dim is 300"),
    (fa2.flash_attn_qkvpacked_func, (torch.ones(2, 9, 3, 4, 8).int(),), {}, "qkv must have dtype"),
    (fa3.flash_attn_qkvpacked_func, (torch.ones(2, 9, 3, 4, 8).int(),), {}, "qkv must have dtype"),
    (fa2.flash_attn_varlen_qkvpacked_func, (torch.ones(18, 3, 4, 8), OFFSETS, 9), {},
     "cu_seqlens has dtype torch.int64"),
    (fa2.flash_attn_varlen_func, (Q[0], K[0], K[0], *[OFFSETS.int()] * 2, 9, 9), {"block_table": TABLE},
     "k has shape (9, 2, 16); (pages, page_size, heads, head_dim) is accepted"),
    (fa2.flash_attn_varlen_func, (Q[0], K, K, OFFSETS.int(), OFFSETS, 9, 9), {"block_table": TABLE},
     "cu_seqlens_k is torch.int64 of shape (3,); torch.int32 of shape (3,) is accepted"),
    (fa2.flash_attn_varlen_func, (Q[0], K, K, OFFSETS.int(), OFFSETS[:2].int(), 9, 9), {"block_table": TABLE},
     "cu_seqlens_k is torch.int32 of shape (2,); torch.int32 of shape (3,) is accepted"),
    (fa2.flash_attn_with_kvcache, (Q, K, K[:, 1:]), {},
     "v_cache must have k_cache's shape but for the last dimension, (2, 9, 2, 16), got (2, 8, 2, 16)"),
    (fa2.flash_attn_with_kvcache, (Q, K[:1], K[:1]), {}, "k_cache has batch 1 and q 2"),
    (fa2.flash_attn_with_kvcache, (Q, K, K.half()), {}, "v_cache has dtype torch.float16 and q"),
    (fa3.flash_attn_with_kvcache, (Q, K, K), {"cache_leftpad": [1, 2]}, "cache_leftpad is of type list"),
    (fa3.flash_attn_with_kvcache, (Q, K, K), {"cache_leftpad": ROWS_OF_CACHE.long()},
     "cache_leftpad has dtype torch.int64"),
    (fa3.flash_attn_with_kvcache, (Q, K, K), {"cache_seqlens": ROWS_OF_CACHE.to("meta")},
     "cache_seqlens is on device meta and q on"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "tensors", "options", "sentence"), IN_WORDS_OF_THE_CALLER)
def test_errors_in_words_of_the_caller(function, tensors, options, sentence):
    tensors = [
        x.to(DTYPE) if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x for x in tensors
    ]
    with pytest.raises((TypeError, ValueError)) as raised:
        function(*tensors, **options)
    assert str(raised.value).startswith(f"flash_cute.compat: {sentence}")


# A cache


KVCACHE = "flash_attn_with_kvcache"
CACHES = {  # rows that count before the call, in a cache of 60, and at its begin do not; rows that are new
    "all": (None, None, 0),
    "a number": (33, None, 0),
    "numbers": ((60, 1, 0), None, 0),
    "left padding": ((60, 33, 7), (10, 0, 7), 0),
    "new rows": ((50, 0, 7), None, 10),
    "new rows behind a number": (40, None, 3),
    "new rows, left padding": ((50, 8, 7), (10, 0, 7), 10),
}


@pytest.mark.parametrize("arguments", ["full", "causal", "window"])
@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("module", [fa2, fa3], ids=["flash_attn", "flash_attn_interface"])
def test_kvcache(device, module, name, arguments):
    """Beside each entry of the batch alone."""
    options, mask = ARGUMENTS[arguments]
    used, leftpad, new = CACHES[name]
    counts = [60 if used is None else used] * 3 if not isinstance(used, tuple) else used
    widths = 32, 48 if module is fa3 else 32
    q, *cache = (x.transpose(1, 2) for x in make_inputs(Shape(3, 4, 2, 5, 60, *widths), DTYPE, device))
    cache = [x.clone() for x in cache]
    before = [x.clone() for x in cache]
    rows = [torch.randn(3, new, 2, width, device=device, dtype=DTYPE) if new else None for width in widths]
    lengths = {
        name: torch.tensor(value, dtype=torch.int32, device=device) if isinstance(value, tuple) else value
        for name, value in (("cache_seqlens", used), ("cache_leftpad", leftpad))
    }
    function = getattr(module, KVCACHE)
    result = function(q, *cache, *rows, **lengths, **options, softmax_scale=0.2, return_softmax_lse=True)
    assert len(result) == (2 if module is fa2 else 4)
    for entry, count in enumerate(counts):
        for mine, old, fresh in zip(cache, before, rows, strict=True):
            if new:
                old[entry, count : count + new] = fresh[entry]
            assert torch.equal(mine[entry], old[entry])
        keys = slice(leftpad[entry] if leftpad else 0, count + new)
        parts = q[entry : entry + 1], *(x[entry : entry + 1, keys] for x in cache)
        sequence = [x.transpose(1, 2) for x in parts]
        out, lse = result[0][entry : entry + 1].transpose(1, 2), result[1][entry : entry + 1]
        assert_attention((out, lse.contiguous()), *sequence, mask, 0.2)
    if not new:
        assert torch.equal(function(q, *cache, **lengths, **options, softmax_scale=0.2), result[0])


# Whose function, and whether queries and new rows are packed.
FACES = {
    "flash_attn": (fa2, False, False),
    "flash_attn_interface": (fa3, False, False),
    "packed": (fa3, True, True),
    "packed apart": (fa3, True, True),
    "packed queries": (fa3, True, False),
    "packed rows": (fa3, False, True),
}
# Pages and rows in each of a cache, which of them four sequences have, and by which arguments.
HELD = {
    "entries": (4, 65, [[0], [1], [2], [3]], ()),
    "chosen entries": (6, 65, [[4], [1], [5], [0]], ("cache_batch_idx",)),
    "pages": (23, 13, "shuffled", ("table",)),
    "pages of one row": (270, 1, "shuffled", ("table",)),
    "chosen pages": (23, 13, "shuffled", ("table", "cache_batch_idx")),
}
# Columns that are rotated, of 32, whether neighbours are, and the table's type.
ROTARY = {
    "no rotation": None,
    "neighbours": (16, True, DTYPE),
    "halves": (32, False, DTYPE),
    "by float32": (16, False, torch.float32),
    "from other positions": (32, True, DTYPE),
}
ROWS_BEFORE = {"numbers": (40, 0, 7, 13), "one number": (20, 20, 20, 20)}


def turned(x, positions, cos, sin, neighbours) -> torch.Tensor:
    """Rows of x, (rows, heads, head_dim), rotated in float64."""
    rows = [turned_row(row, cos[at], sin[at], neighbours) for row, at in zip(x, positions, strict=True)]
    return torch.stack(rows) if rows else x.double()


def int32(values, device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def make_held(held, counts, device):
    """Of sequences of so many rows, where each row of them is, (page, row), and the arguments that say so."""
    pages, page_size, table, by = HELD[held]
    if table == "shuffled":
        table = torch.randperm(pages)[: 4 * (65 // page_size)].view(4, -1).tolist()
    places = [
        [(own[j // page_size], j % page_size) for j in range(count)]
        for own, count in zip(table, counts, strict=True)
    ]
    arguments = {}
    if by == ("cache_batch_idx",):
        arguments["cache_batch_idx"] = int32(table, device)[:, 0]
    elif by == ("table",):
        arguments["page_table"] = int32(table, device)
    elif by:  # which rows of a larger table
        shuffled = [table[3], table[0], [-1] * len(table[0]), *table[1:3]]
        arguments["page_table"] = int32(shuffled, device)
        arguments["cache_batch_idx"] = int32([1, 3, 4, 0], device)
    return places, arguments


@pytest.mark.parametrize(
    ("face", "held", "rotary", "before", "leftpad", "arguments"),
    sorted(each_pair(FACES, HELD, ROTARY, ROWS_BEFORE, ["", "left padding"], ["full", "causal", "window"])),
)
def test_new_rows(device, face, held, rotary, before, leftpad, arguments):
    """Beside each sequence alone, by a plain rotation; and nothing else of the cache is touched."""
    (module, packed_q, packed_k), (options, mask) = FACES[face], ARGUMENTS[arguments]
    used, skipped = ROWS_BEFORE[before], (10, 0, 7, 3) if leftpad else (0, 0, 0, 0)
    new = (3, 1, 0, 5) if packed_k else (3, 3, 3, 3)
    queries = (new if face == "packed" else (2, 1, 4, 5)) if packed_q else (5, 5, 5, 5)
    of_v = 48 if module is fa3 else 32
    q, k, v = (
        [torch.randn(count, heads, width, device=device, dtype=DTYPE) for count in counts]
        for counts, heads, width in ((queries, 4, 32), (new, 2, 32), (new, 2, of_v))
    )

    places, given = make_held(held, [a + b for a, b in zip(used, new, strict=True)], device)
    pages, page_size, *_ = HELD[held]
    cache = [
        torch.full((pages, page_size, 2, width), torch.nan, device=device, dtype=DTYPE)
        for width in (32, of_v)
    ]
    for own, skip, count in zip(places, skipped, used, strict=True):
        for place in own[skip:count]:
            for part in cache:
                part[place] = torch.randn(part.shape[2:])
    before_call = [part.clone() for part in cache]

    given["cache_seqlens"] = used[0] if before == "one number" else int32(used, device)
    if leftpad:
        given["cache_leftpad"] = int32(skipped, device)
    if packed_q:
        given["cu_seqlens_q"] = int32([0, *np.cumsum(queries)], device)
    if packed_k:
        offsets = int32([0, *np.cumsum(new)], device)
        given["cu_seqlens_k_new"] = given["cu_seqlens_q"] if face == "packed" else offsets
    begins = used
    if ROTARY[rotary]:
        columns, neighbours, dtype = ROTARY[rotary]
        angles = torch.rand(80, columns // 2, device=device) * 6
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        given |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": neighbours}
        if rotary == "from other positions" and module is fa3:
            begins = (0, 31, 2, 60)
            given["rotary_seqlens"] = int32(begins, device)
    if module is fa2 and "page_table" in given:
        given["block_table"] = given.pop("page_table")

    tensors = [
        (torch.cat if packed else torch.stack)(parts)
        for parts, packed in ((q, packed_q), (k, packed_k), (v, packed_k))
    ]
    options = options | given | {"softmax_scale": 0.2, "return_softmax_lse": True}
    out, lse, *_ = getattr(module, KVCACHE)(tensors[0], *cache, *tensors[1:], **options)
    if packed_q:
        out, lse = out.split(queries), lse.split(queries, 1)

    written = []  # rows of K: as they are, as PyTorch rounds them, exact
    follows = arguments != "full"
    for b, own in enumerate(places):
        exact, turned_q = k[b].double(), q[b]
        if ROTARY[rotary]:
            positions = [begins[b] + i for i in range(new[b])]
            exact = turned(k[b], positions, cos, sin, neighbours)
            positions = [begins[b] + (i if follows else 0) for i in range(queries[b])]
            turned_q = turned(q[b], positions, cos, sin, neighbours).to(DTYPE)
        for i, place in enumerate(own[used[b] :]):
            written.append((cache[0][place], exact[i].to(DTYPE), exact[i]))
            before_call[0][place], before_call[1][place] = cache[0][place], v[b][i]
        seen = own[skipped[b] :]
        keys = [torch.stack([x[place] for place in seen]) if seen else x[0, :0] for x in cache]
        if queries[b]:
            sequence = [x.transpose(0, 1)[None] for x in (turned_q, *keys)]
            assert_attention((out[b].transpose(0, 1)[None], lse[b][None].contiguous()), *sequence, mask, 0.2)
    assert_within_rule("k", *(torch.stack(rows) for rows in zip(*written, strict=True)))
    for mine, expected in zip(cache, before_call, strict=True):
        assert torch.equal(mine.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("held", ["chosen entries", "pages", "chosen pages"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_pages_and_chosen_entries(device, held, packed):
    """As the same rows in a cache of their own."""
    q, k, v = (x.transpose(1, 2) for x in make_inputs(Shape(5, 4, 2, 2, 16, 32), DTYPE, device, "contiguous"))
    table = torch.tensor([[4, 1], [0, -1]], dtype=torch.int32, device=device)
    used = torch.tensor([30, 7], dtype=torch.int32, device=device)
    arguments = {
        "chosen entries": {"cache_batch_idx": table[:, 0]},
        "pages": {"page_table": table},
        "chosen pages": {
            "page_table": table.flip(0),
            "cache_batch_idx": torch.tensor([1, 0], dtype=torch.int32, device=device),
        },
    }[held]
    used = used.clamp(max=16) if held == "chosen entries" else used
    options = {"cache_seqlens": used, "causal": True, "return_softmax_lse": True}
    gathered = [x[table.long().clamp(0)].flatten(1, 2) for x in (k, v)]
    expected = fa3.flash_attn_with_kvcache(q[:2], *gathered, **options)[:2]
    if packed:
        options["cu_seqlens_q"] = torch.tensor([0, 2, 4], dtype=torch.int32, device=device)
        result = fa3.flash_attn_with_kvcache(q[:2].flatten(0, 1), k, v, **arguments, **options)[:2]
        result = result[0].unflatten(0, (2, 2)), result[1].unflatten(1, (2, 2)).transpose(0, 1)
    else:
        result = fa3.flash_attn_with_kvcache(q[:2], k, v, **arguments, **options)[:2]
        arguments["block_table"] = arguments.pop("page_table", None)
        assert torch.equal(result[0], fa2.flash_attn_with_kvcache(q[:2], k, v, **arguments, **options)[0])
    torch.testing.assert_close(result, expected)


BESIDE_NEW_ROWS = {
    "causal": {"causal": True},
    "window": {"window_size": (7, 2)},
    "scale": {"softmax_scale": 0.2},
    "splits": {"num_splits": 4},
    "left padding": {"cache_leftpad": (2, 0)},
    "entries": {"cache_batch_idx": (1, 0)},
    "pages": {"page_table": ((1,), (0,))},
    "packed queries": {"cu_seqlens_q": (0, 2, 4)},
    **{f"sinks of {dtype}": {"s_aux": dtype} for dtype in (torch.float32, torch.float16, torch.bfloat16)},
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", BESIDE_NEW_ROWS)
def test_new_rows_with_each_other_option(device, name, dtype):
    """As a call after they were written; sinks are of any type beside any type of q."""
    q, *cache = (x.transpose(1, 2).clone() for x in make_inputs(Shape(2, 4, 2, 2, 20, 16), dtype, device))
    new = [torch.randn(2, 3, 2, 16, device=device).to(dtype) for _ in "kv"]
    options = {
        option: torch.randn(4, device=device).to(value)
        if option == "s_aux"
        else int32(value, device)
        if option not in ("causal", "window_size", "softmax_scale", "num_splits")
        else value
        for option, value in BESIDE_NEW_ROWS[name].items()
    }
    options["return_softmax_lse"] = True
    entries = [1, 0] if name in ("entries", "pages") else [0, 1]
    written = [x.clone() for x in cache]
    for whole, rows in zip(written, new, strict=True):
        whole[entries, 5:8] = rows
    q = q.flatten(0, 1) if name == "packed queries" else q
    result = fa3.flash_attn_with_kvcache(q, *cache, *new, cache_seqlens=5, **options)
    expected = fa3.flash_attn_with_kvcache(q, *written, cache_seqlens=8, **options)
    assert all(map(torch.equal, result, expected))
    assert all(map(torch.equal, cache, written))


@pytest.mark.parametrize("name", [name for name in BESIDE_NEW_ROWS if name != "padding"])
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("rotary", [False, True], ids=["", "rotary"])
def test_caches_of_8_bits(kernel, name, scaled, rotary):
    """What is read, and what is written of new rows, are codes times their descales."""
    if kernel.family == "sm80":
        pytest.skip("has no such kernels")
    device = kernel.device
    q = torch.randn(2, 3, 4, 16, device=device).to(DTYPE)
    codes = [torch.randn(2, 20, 2, 16, device=device).to(torch.float8_e4m3fn) for _ in "kv"]
    new = [torch.randn(2, 3, 2, 16, device=device).to(DTYPE) for _ in "kv"]
    descales = {f"{x}_descale": torch.tensor([[0.5, 1], [2, 0.25]], device=device) for x in "kv"}
    descales = descales if scaled else {}
    options = {
        option: torch.randn(4, device=device).to(value)
        if option == "s_aux"
        else value
        if option in ("causal", "window_size", "softmax_scale", "num_splits")
        else int32(value, device)
        for option, value in BESIDE_NEW_ROWS[name].items()
    }
    if rotary:
        angles = torch.rand(30, 8, device=device)
        options |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    q = q.flatten(0, 1) if name == "packed queries" else q

    def numbers(whole):
        """Of an entry, which is the sequence of that number, or the other one."""
        order = [1, 0] if name in ("entries", "pages") else [0, 1]
        scale = descales.get("k_descale", torch.ones(2, 2, device=device))[order]
        return (whole.float() * scale[:, None, :, None]).to(DTYPE)

    out = fa3.flash_attn_with_kvcache(q, *codes, *new, cache_seqlens=5, **options, **descales)
    options = {key: x for key, x in options.items() if not key.startswith("rotary")}
    if not rotary:  # which turns queries on the way
        wide = [numbers(x) for x in codes]
        expected = fa3.flash_attn_with_kvcache(q, *wide, cache_seqlens=8, **options)
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
        again = fa3.flash_attn_with_kvcache(q, *codes, cache_seqlens=8, **options, **descales)
        assert torch.equal(again, out)
    entries = [1, 0] if name in ("entries", "pages") else [0, 1]
    found = numbers(codes[1])[entries, 5:8].float()
    torch.testing.assert_close(found, new[1].float(), rtol=2**-4 + 1e-2, atol=2**-8)


def test_a_whole_cache_of_8_bits(kernel):
    if kernel.family == "sm80":
        pytest.skip("has no such kernels")
    device = kernel.device
    q = torch.randn(2, 3, 4, 16, device=device).to(DTYPE)
    codes = [torch.randn(2, 20, 2, 16, device=device).to(torch.float8_e4m3fn) for _ in "kv"]
    out = fa3.flash_attn_with_kvcache(q, *codes, causal=True)
    used = int32([20, 20], device)
    expected = flash_cute.attention(
        q.transpose(1, 2), *(x.transpose(1, 2) for x in codes), causal=True, seqused_k=used
    )
    assert torch.equal(out, expected.transpose(1, 2))
    with pytest.raises(ValueError, match="k_descale must be None where k_cache has dtype torch"):
        fa3.flash_attn_with_kvcache(
            q, *(x.to(DTYPE) for x in codes), k_descale=torch.ones(2, 2, device=device)
        )
    with pytest.raises(
        ValueError, match=r"k is torch\.float8_e4m3fn of shape .*; torch\..* of shape .*, as q, is"
    ):
        fa3.flash_attn_with_kvcache(q, *codes, *(x[:, :3] for x in codes), cache_seqlens=5)
    new = (x[:, :3].to(DTYPE) for x in codes)
    with pytest.raises(TypeError, match=r"v_descale is of type float; a torch\.Tensor is accepted"):
        fa3.flash_attn_with_kvcache(q, *codes, *new, cache_seqlens=5, v_descale=1.0)


@pytest.mark.parametrize("s_aux", [torch.float16, torch.bfloat16])
def test_gradients_of_sinks_of_another_type(device, s_aux):
    q, k, v = (x.transpose(1, 2) for x in make_inputs(SHAPE, torch.float16, device))
    sinks = torch.randn(4, device=device).to(s_aux)
    mine, exact = sinks.clone().requires_grad_(), sinks.float().requires_grad_()
    for x in (mine, exact):
        fa3.flash_attn_func(q, k, v, s_aux=x).sum().backward()
    assert torch.equal(mine.grad, exact.grad.to(s_aux))


@pytest.mark.parametrize("rotary", [False, True], ids=["", "rotary"])
@pytest.mark.parametrize("name", ["causal", "entries", "pages", "packed queries"])
def test_calls_with_a_cache_where_gradients_are_on(device, name, rotary):
    """They have none, as flash_attn's, and are not refused for what their inputs require."""
    q, *cache = (x.transpose(1, 2).clone() for x in make_inputs(CACHE, DTYPE, device))
    new = [torch.randn(2, 3, 2, 16, device=device).to(DTYPE) for _ in "kv"]
    q = q.flatten(0, 1) if name == "packed queries" else q
    options = {key: int32(x, device) for key, x in BESIDE_NEW_ROWS[name].items() if key != "causal"}
    if name == "packed queries":
        options["cu_seqlens_q"] = int32([0, 1, 2], device)
    if rotary:
        angles = torch.rand(30, 8, device=device)
        options |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    options |= {"causal": True, "cache_seqlens": 5}
    expected = fa3.flash_attn_with_kvcache(q, *(x.clone() for x in cache), *new, **options)
    needing = [x.clone().requires_grad_() for x in (q, *new)]
    out = fa3.flash_attn_with_kvcache(needing[0], *cache, *needing[1:], **options)
    assert torch.equal(out, expected)
    assert not out.requires_grad
    if not rotary:
        options["s_aux"] = torch.zeros(4, device=device, requires_grad=True)
        assert not fa3.flash_attn_with_kvcache(needing[0], *cache, **options).requires_grad


@pytest.mark.parametrize("missing", ["k", "v", "cache_seqlens"])
def test_new_rows_want_a_place(device, missing):
    q, k, v = (x.transpose(1, 2) for x in make_inputs(SHAPE, DTYPE, device))
    given = {"k": k[:, :3], "v": v[:, :3], "cache_seqlens": 5, missing: None}
    with pytest.raises(ValueError, match=r"^flash_cute\.compat: of k, v and cache_seqlens some are None"):
        fa2.flash_attn_with_kvcache(q, k, v, **given)


CACHE = Shape(2, 4, 2, 1, 20, 16)
WRONG_CACHES = {  # what is wrong with a call that would write 3 rows behind 5
    "v is shorter": ("flash_cute.compat: v must have k's shape", lambda k, v: {"v": v[:, :1]}),
    "v is of another type": ("flash_cute.compat: v is", lambda k, v: {"v": v.half()}),
    "one head": ("flash_cute.compat: k is", lambda k, v: {"k": k[:, :, :1], "v": v[:, :, :1]}),
    "no room": ("flash_cute.compat: cache_seqlens is 18; 0 to 17", lambda k, v: {"cache_seqlens": 18}),
    "negative": ("flash_cute.compat: cache_seqlens is -3; 0 to 17", lambda k, v: {"cache_seqlens": -3}),
    "a list": ("flash_cute.compat: cache_seqlens is [5, 5]", lambda k, v: {"cache_seqlens": [5, 5]}),
    "an array": (
        "flash_cute.compat: cache_seqlens is array([5, 5])",
        lambda k, v: {"cache_seqlens": np.array([5, 5])},
    ),
    "int64": (
        "flash_cute.compat: cache_seqlens is torch.int64",
        lambda k, v: {"cache_seqlens": torch.tensor([5, 5], device=k.device)},
    ),
    "a bool": ("flash_cute.compat: cache_seqlens is True; 0 to 17", lambda k, v: {"cache_seqlens": True}),
    "v is a list": ("flash_cute.compat: v is of type list", lambda k, v: {"v": [1]}),
    "left padding is a list": (
        "flash_cute.compat: cache_leftpad is of type list",
        lambda k, v: {"cache_leftpad": [1, 2]},
    ),
    "v is elsewhere": ("flash_cute.compat: v is on device meta", lambda k, v: {"v": v.to("meta")}),
    "left padding is elsewhere": (
        "flash_cute.compat: cache_leftpad is on device meta",
        lambda k, v: {"cache_leftpad": torch.ones(2, dtype=torch.int32, device="meta")},
    ),
    "left padding with strides": (
        "flash_cute.compat: cache_leftpad has stride 0; a contiguous tensor is accepted",
        lambda k, v: {"cache_leftpad": torch.ones(1, dtype=torch.int32, device=k.device).expand(2)},
    ),
    "more rows than the cache has": (
        "flash_cute.compat: k has 21 rows and k_cache 20",
        lambda k, v: {"k": k[:, :1].expand(2, 21, 2, 16), "v": v[:, :1].expand(2, 21, 2, 16)},
    ),
    "scale": ("flash_cute.compat: softmax_scale is -1", lambda k, v: {"softmax_scale": -1.0}),
    "window": ("flash_cute.compat: window_size's left limit is -2", lambda k, v: {"window_size": (-2, 0)}),
    "window of an array": (
        "flash_cute.compat: window_size must be (left, right), got (array([1, 2]), 0)",
        lambda k, v: {"window_size": (np.array([1, 2]), 0)},
    ),
}


COS = torch.ones(30, 8)
WRONG_PLACES = {  # likewise with FlashAttention-3's arguments, of which the cache is that of two sequences
    "one table of rotation": (
        "of rotary_cos and rotary_sin one is None; both, or none, must be",
        lambda t: {"rotary_cos": COS},
    ),
    "rotation of more columns": ("rotary_cos", lambda t: dict.fromkeys(ROTATION, torch.ones(30, 16))),
    "positions of int64": (
        "rotary_seqlens is torch.int64 of shape (2,); torch.int32 of shape (2,) is accepted",
        lambda t: dict.fromkeys(ROTATION, COS) | {"rotary_seqlens": t(1, 2).long()},
    ),
    "a table of one dimension": (
        "page_table must have shape (batch, max_pages), got",
        lambda t: {"page_table": t(0, 1)},
    ),
    "a table of another batch": ("page_table must have", lambda t: {"page_table": t(0)[:, None]}),
    "a table of int64": (
        "page_table has dtype torch.int64",
        lambda t: {"page_table": t(0, 1)[:, None].long()},
    ),
    "a table elsewhere": (
        "page_table is on device meta",
        lambda t: {"page_table": t(0, 1)[:, None].to("meta")},
    ),
    "more rows than pages": (
        "cache_seqlens is 18; 0 to 17",
        lambda t: {"page_table": t(0, 1)[:, None], "cache_seqlens": 18},
    ),
    "entries of int64": ("cache_batch_idx is torch.int64", lambda t: {"cache_batch_idx": t(0, 1).long()}),
    "entries for three": (
        "cache_batch_idx is torch.int32 of shape (3,)",
        lambda t: {"cache_batch_idx": t(0, 1, 1)},
    ),
    "entries in a list": ("cache_batch_idx is of type list", lambda t: {"cache_batch_idx": [0, 1]}),
    "packed queries of 4 dimensions": (
        "q has 4 dimensions; 3, (total, heads, head_dim), are accepted with cu_seqlens_q",
        lambda t: {"cu_seqlens_q": t(0, 1, 2)},
    ),
    "offsets of int64": ("cu_seqlens_q is torch.int64", lambda t: {"cu_seqlens_q": t(0, 1, 2).long()}),
    "packed rows of 4 dimensions": (
        "k is torch.bfloat16 of shape (2, 3, 2, 16)",
        lambda t: {"cu_seqlens_k_new": t(0, 3, 6)},
    ),
    "offsets for one": (
        "cu_seqlens_k_new is torch.int32 of shape (2,)",
        lambda t: {"cu_seqlens_k_new": t(0, 3)},
    ),
}
ROTATION = "rotary_cos", "rotary_sin"


@pytest.mark.parametrize("name", WRONG_PLACES)
def test_a_refused_place_leaves_the_cache(device, name):
    sentence, wrong = WRONG_PLACES[name]
    q, *cache = (x.transpose(1, 2).clone() for x in make_inputs(CACHE, DTYPE, device))
    before = [x.clone() for x in cache]
    wrong = {
        name: x.to(device) if isinstance(x, torch.Tensor) and not x.is_meta else x
        for name, x in wrong(lambda *values: int32(values, device)).items()
    }
    given = {"k": before[0][:, :3], "v": before[1][:, :3], "cache_seqlens": 5, "causal": True} | wrong
    with pytest.raises((TypeError, ValueError)) as raised:
        fa3.flash_attn_with_kvcache(q, *cache, **given)
    assert str(raised.value).startswith(f"flash_cute.compat: {sentence}")
    assert "\n" not in str(raised.value)
    assert all(map(torch.equal, cache, before))


@pytest.mark.parametrize("name", [*ROTATION, "cu_seqlens_k_new"])
def test_what_only_new_rows_have(device, name):
    q, k, v = (x.transpose(1, 2) for x in make_inputs(CACHE, DTYPE, device))
    sentence = f"flash_cute.compat: {name} must be None where k and v are, got a tensor"
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=5, **{name: COS})


@pytest.mark.parametrize("name", WRONG_CACHES)
def test_a_refused_call_leaves_the_cache(device, name):
    sentence, wrong = WRONG_CACHES[name]
    q, *cache = (x.transpose(1, 2).clone() for x in make_inputs(CACHE, DTYPE, device))
    before = [x.clone() for x in cache]
    k, v = (x[:, :3] for x in before)
    given = {"k": k, "v": v, "cache_seqlens": 5} | wrong(k, v)
    with pytest.raises((TypeError, ValueError)) as raised:
        fa2.flash_attn_with_kvcache(q, *cache, **given)
    assert str(raised.value).startswith(sentence)
    assert all(map(torch.equal, cache, before))


ROWS = [-(2**31), 2], [-1, 2], [18, 2], [2**31 - 1, 2]  # the first of which has no room in a cache of 20


@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_rows_of_a_tensor_are_cut_to_the_cache(device, rows):
    q, *cache = (x.transpose(1, 2).clone() for x in make_inputs(CACHE, DTYPE, device))
    expected = [x.clone() for x in cache]
    k, v = (x[:, :3] + 1 for x in expected)
    begin = 0 if rows[0] < 0 else 17
    for mine, new in zip(expected, (k, v), strict=True):
        mine[0, begin : begin + 3], mine[1, 2:5] = new
    used = torch.tensor(rows, dtype=torch.int32, device=device)
    out = fa2.flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=used)
    assert all(map(torch.equal, cache, expected))
    assert torch.equal(out, fa2.flash_attn_with_kvcache(q, *cache, cache_seqlens=used.clamp(0, 17) + 3))


@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_rows_of_a_tensor_are_checked_before_any_is_written(device, rows, monkeypatch):
    monkeypatch.setattr(flash_cute.lengths, "CHECKED", True)
    q, *cache = (x.transpose(1, 2).clone() for x in make_inputs(CACHE, DTYPE, device))
    before = [x.clone() for x in cache]
    used = torch.tensor(rows, dtype=torch.int32, device=device)
    sentence = f"^flash_cute.compat: sequence 0 has cache_seqlens {rows[0]}; 0 to 17, for which"
    with pytest.raises(ValueError, match=sentence):
        fa2.flash_attn_with_kvcache(q, *cache, *(x[:, :3] for x in before), cache_seqlens=used)
    assert all(map(torch.equal, cache, before))
    fa2.flash_attn_with_kvcache(q, *cache, *(x[:, :3] for x in before), cache_seqlens=used.clamp(0, 17))


def packed_rows(device):
    """q of one row, a cache of 20 in pages of 10, and the arguments that write 3 and 21 rows into it."""
    q, *cache = (x.transpose(1, 2).clone() for x in make_inputs(CACHE, DTYPE, device))
    new = [torch.randn(24, 2, 16, device=device).to(DTYPE) for _ in "kv"]
    given = {"cu_seqlens_k_new": int32([0, 3, 24], device), "cache_seqlens": int32([18, 5], device)}
    given["page_table"] = int32([[3, 1], [0, 2]], device)
    return q, [x.reshape(4, 10, 2, 16) for x in cache], new, given


def test_packed_rows_are_cut_to_the_cache(device):
    """Likewise; of more rows than the cache has, the last ones remain."""
    q, cache, new, given = packed_rows(device)
    out = fa3.flash_attn_with_kvcache(q, *cache, *new, **given)
    table = given["page_table"].long()
    for mine, rows in zip(cache, new, strict=True):
        gathered = mine[table].flatten(1, 2)
        assert torch.equal(gathered[0, 17:], rows[:3])
        assert torch.equal(gathered[1], rows[4:])
    given |= {"cache_seqlens": 20, "cu_seqlens_k_new": None}
    assert torch.equal(out, fa3.flash_attn_with_kvcache(q, *cache, **given))


def test_packed_rows_are_checked_before_any_is_written(device, monkeypatch):
    monkeypatch.setattr(flash_cute.lengths, "CHECKED", True)
    q, cache, new, given = packed_rows(device)
    before = [x.clone() for x in cache]
    for rows, sentence in (([18, 0], "sequence 0 has cache_seqlens 18; 0 to 17"), ([5, 5], "sequence 1 has")):
        given["cache_seqlens"] = int32(rows, device)
        with pytest.raises(ValueError, match=f"^flash_cute.compat: {sentence}"):
            fa3.flash_attn_with_kvcache(q, *cache, *new, **given)
    given["page_table"][0, 0] = 9
    given |= {"cache_seqlens": int32([5, 5], device), "cu_seqlens_k_new": int32([0, 3, 4], device)}
    with pytest.raises(ValueError, match="compat: sequence 0 has page 9 in page_table; 0 to 3 are accepted"):
        fa3.flash_attn_with_kvcache(q, *cache, *new, **given)
    assert all(map(torch.equal, cache, before))


@pytest.mark.parametrize("face", [fa2, fa3])
@pytest.mark.parametrize("by", ["entries", "pages", "chosen pages"])
@pytest.mark.parametrize("missing", [-1, -(2**31), 4, 2**31 - 1])
def test_rows_of_a_sequence_without_a_place(device, face, by, missing, monkeypatch):
    """As servers pad a captured step: they are not written over another's, whose result is as alone."""
    q, *cache = (x.transpose(1, 2) for x in make_inputs(Shape(4, 4, 2, 1, 16, 16), DTYPE, device))
    q, k, v = q[:2], *(torch.randn(2, 1, 2, 16, device=device).to(DTYPE) for _ in "kv")
    table = "block_table" if face is fa2 else "page_table"
    given = {
        "entries": {"cache_batch_idx": int32([0, missing], device)},
        "pages": {table: int32([[0, 1], [missing, missing]], device)},
        "chosen pages": {
            table: int32([[3, 2], [0, 1], [-1, -1], [-1, -1]], device),
            "cache_batch_idx": int32([1, missing], device),
        },
    }[by]
    given["cache_seqlens"] = int32([9, 0], device)
    expected = [x.clone() for x in cache]
    expected[0][0, 9], expected[1][0, 9] = k[0, 0], v[0, 0]
    out = face.flash_attn_with_kvcache(q, *cache, k, v, **given)
    assert all(map(torch.equal, cache, expected))
    alone = face.flash_attn_with_kvcache(q[:1], *(x[:1] for x in cache), cache_seqlens=10)
    torch.testing.assert_close(out[:1], alone)
    monkeypatch.setattr(flash_cute.lengths, "CHECKED", True)
    names = {"pages": f"page {missing} in {table}; 0 to 3"}
    named = names.get(by, f"cache_batch_idx {missing}; 0 to 3")
    with pytest.raises(ValueError, match=f"^flash_cute.compat: sequence 1 has {named} are accepted"):
        face.flash_attn_with_kvcache(q, *cache, k, v, **given)
    given["cache_seqlens"] = int32([9, 0], device)
    face.flash_attn_with_kvcache(q, *cache, **given)  # none of the other's keys count


@pytest.mark.parametrize(
    "name", ["cache_seqlens", "cache_batch_idx", "page_table", "cu_seqlens_q", "cu_seqlens_k_new"]
)
def test_freed_lengths(device, name):
    q, cache, new, given = packed_rows(device)
    given |= {"cu_seqlens_q": int32([0, 1, 2], device), "cache_batch_idx": int32([1, 0], device)}
    given[name].untyped_storage().resize_(0)
    with pytest.raises(
        ValueError, match=r"^flash_cute\.compat: \w+ must have a storage of at least"
    ) as raised:
        fa3.flash_attn_with_kvcache(q.flatten(0, 1), *cache, *new, **given)
    assert f"compat: {name} must" in str(raised.value)


@pytest.mark.parametrize("causal", [False, True])
def test_positions_are_checked_before_a_row_is_written(device, causal, monkeypatch):
    monkeypatch.setattr(flash_cute.lengths, "CHECKED", True)
    q, *cache = (x.transpose(1, 2).clone() for x in make_inputs(CACHE, DTYPE, device))
    before = [x.clone() for x in cache]
    given = {"cache_seqlens": 5, "causal": causal} | dict.fromkeys(ROTATION, COS[:5].to(device))
    with pytest.raises(ValueError, match="compat: positions must be rows of rotary_cos, 0 to 4, got 5"):
        fa2.flash_attn_with_kvcache(q.repeat(1, 2, 1, 1), *cache, *(x[:, :3] for x in before), **given)
    assert all(map(torch.equal, cache, before))


def test_left_padding_is_checked_before_a_row_is_written(device, monkeypatch):
    monkeypatch.setattr(flash_cute.lengths, "CHECKED", True)
    q, *cache = (x.transpose(1, 2).clone() for x in make_inputs(CACHE, DTYPE, device))
    before = [x.clone() for x in cache]
    padding = torch.tensor([0, 9], dtype=torch.int32, device=device)
    given = {"cache_seqlens": 5, "cache_leftpad": padding}
    with pytest.raises(ValueError, match="compat: sequence 1 has cache_leftpad 9; 0 to 8, its keys that"):
        fa2.flash_attn_with_kvcache(q, *cache, *(x[:, :3] for x in before), **given)
    assert all(map(torch.equal, cache, before))


@pytest.mark.parametrize("cached", [torch.float32, DTYPE])
def test_a_cache_under_autocast(device, cached):
    q, *cache = (x.transpose(1, 2).float() for x in make_inputs(CACHE, torch.float32, device))
    cache = [x.to(cached) for x in cache]
    new = [x[:, :3] + 1 for x in cache]
    with torch.autocast(device.type, DTYPE):
        out = fa2.flash_attn_with_kvcache(q, *cache, *new, cache_seqlens=5)
        assert torch.equal(out, fa2.flash_attn_with_kvcache(q, *cache, cache_seqlens=8))
        rotation = {
            "rotary_cos": torch.ones(30, 8, device=device),
            "rotary_sin": torch.zeros(30, 8, device=device),
        }
        for causal in (False, True):
            turned = fa2.flash_attn_with_kvcache(q, *cache, *new, cache_seqlens=5, causal=causal, **rotation)
            torch.testing.assert_close(turned, out)
    assert out.dtype == DTYPE


def test_pages_that_autocast_leaves_as_they_are(device):
    q, cache, new, given = packed_rows(device)
    cache, new = ([x.float() for x in tensors] for tensors in (cache, new))
    before = [x.clone() for x in cache]
    sentence = "^flash_cute.compat: k_cache has dtype torch.float32 and q torch.bfloat16; they must be"
    with torch.autocast(device.type, DTYPE), pytest.raises(ValueError, match=sentence):
        fa3.flash_attn_with_kvcache(q.float(), *cache, *new, **given)
    assert all(map(torch.equal, cache, before))


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_decoding_loop_is_compiled(device, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(fa2.flash_attn_with_kvcache, fullgraph=True, dynamic=dynamic, backend="eager")
    q, *cache = (x.transpose(1, 2).clone() for x in make_inputs(CACHE, DTYPE, device))
    expected = [x.clone() for x in cache]
    for rows in (3, 4, 5, 6):
        new = torch.randn(2, 2, 1, 2, 16, device=device).to(DTYPE)
        out = compiled(q, *cache, *new, cache_seqlens=rows, softcap=0.0)
        assert torch.equal(out, fa2.flash_attn_with_kvcache(q, *expected, *new, cache_seqlens=rows))
        assert all(map(torch.equal, cache, expected))
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="cache_seqlens is 20; 0 to 19, for which the cache"
    ):
        compiled(q, *cache, *new, cache_seqlens=20, softcap=0.0)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_decoding_step_in_pages_is_compiled(device, packed):
    torch._dynamo.reset()
    compiled = torch.compile(fa3.flash_attn_with_kvcache, fullgraph=True, backend="eager")
    q, cache, new, given = packed_rows(device)
    angles = torch.rand(30, 8, device=device)
    given |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "causal": True}
    if packed:
        q = q[:, :1].expand(2, 12, 4, 16).flatten(0, 1)
        given["cu_seqlens_q"] = given["cu_seqlens_k_new"]
    expected = [x.clone() for x in cache]
    for rows in ([0, 0], [3, 21]):
        given["cache_seqlens"] = int32(rows, device)
        out = compiled(q, *cache, *new, **given)
        assert torch.equal(out, fa3.flash_attn_with_kvcache(q, *expected, *new, **given))
        assert all(map(torch.equal, cache, expected))


@pytest.mark.parametrize("module", [fa2, fa3], ids=["flash_attn", "flash_attn_interface"])
def test_one_split_is_the_same_in_any_batch(device, module):
    q, k, v = (x.transpose(1, 2) for x in make_inputs(Shape(9, 4, 2, 3, 2500, 64), DTYPE, device))
    used = int32([2500, 1, 1025, 70, 2049, 3, 0, 999, 12], device)
    options = {"causal": True, "num_splits": 1, "return_softmax_lse": True}
    out, lse, *_ = getattr(module, KVCACHE)(q, k, v, cache_seqlens=used, **options)
    for b in range(9):
        entry = slice(b, b + 1)
        alone = getattr(module, KVCACHE)(q[entry], k[entry], v[entry], cache_seqlens=used[entry], **options)
        assert torch.equal(alone[0], out[entry])
        assert torch.equal(alone[1], lse[entry])


def test_a_cache_gets_no_gradient(device):
    q, *cache = (x.transpose(1, 2).clone() for x in make_inputs(CACHE, DTYPE, device))
    new = torch.ones(2, 3, 2, 16, device=device, dtype=DTYPE, requires_grad=True)
    fa2.flash_attn_with_kvcache(q, *cache, new, new, cache_seqlens=5)
    assert not any(x.requires_grad for x in cache)


@pytest.mark.parametrize("wrong", [None, torch.ones(2, 3), [1.0]], ids=["none", "2-d", "list"])
def test_no_tensors_of_four_dimensions(wrong):
    with pytest.raises((TypeError, ValueError), match=r"^flash_cute\.compat: q (is of type|has shape) "):
        fa2.flash_attn_func(wrong, wrong, wrong)


@pytest.mark.parametrize("heads", [5, 0, -2, 2, 8, True, "four"])
def test_heads_that_do_not_add_up(device, heads):
    sentence = rf"num_heads_q must be a multiple of \(8 - num_heads_q\) / 2, as .* 8 heads, got {heads!r}$"
    with pytest.raises(ValueError, match=sentence):
        fa3.flash_attn_qkvpacked_func(torch.ones(2, 5, 8, 16, device=device, dtype=DTYPE), num_heads_q=heads)


@pytest.mark.parametrize("module", [fa2, fa3], ids=["flash_attn", "flash_attn_interface"])
def test_no_stack(module):
    with pytest.raises(
        TypeError, match=r"^flash_cute\.compat: qkv is of type list; a torch\.Tensor is accepted"
    ):
        module.flash_attn_qkvpacked_func([1.0])


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled(device, dynamic):
    @torch.compile(
        fullgraph=True, dynamic=dynamic, backend="inductor" if device.type == "cuda" else "aot_eager"
    )
    def compiled(qkv, cu_seqlens):
        dense = fa2.flash_attn_qkvpacked_func(qkv.unsqueeze(0), causal=True)
        return dense, fa2.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 130, causal=True)

    torch._dynamo.reset()
    batch = make_ragged(SELF, (4, 4), 64, DTYPE, device, packed=True, margins=(0, 0))
    tensors = batch.q, batch.k, batch.v
    out, packed = compiled(torch.stack(tensors, 1), batch.lengths["cu_seqlens_q"])
    options = {"causal": True, "return_attn_probs": True}
    expected = fa2.flash_attn_func(*(x.unsqueeze(0) for x in tensors), **options)
    assert torch.equal(out, expected[0])
    lse = fa2.flash_attn_varlen_func(*tensors, *batch.lengths.values(), 0, 0, **options)[1]
    assert_ragged((packed, lse), batch, MASKS["causal"])


INSTALLED = """
import flash_cute.compat.flash_attn
flash_cute.compat.flash_attn.install()
flash_cute.compat.flash_attn.install()  # again
import importlib.util
import sys
import flash_attn
import flash_attn.flash_attn_interface as fa2
import flash_attn_interface as fa3
from flash_attn import flash_attn_func
from flash_attn.flash_attn_interface import flash_attn_varlen_func
assert flash_attn_func is fa2.flash_attn_func is flash_cute.compat.flash_attn.flash_attn_func
assert fa3.flash_attn_func is flash_cute.compat.flash_attn_interface.flash_attn_func
assert flash_attn.__version__ == "2.8.3"
assert importlib.util.find_spec("flash_attn") is not None
from flash_attn import bert_padding
from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb
import flash_attn.layers.rotary
assert bert_padding.pad_input is pad_input is flash_cute.compat.bert_padding.pad_input
assert flash_attn.layers.rotary.RotaryEmbedding is flash_cute.compat.rotary.RotaryEmbedding
for name in ("bert_padding", "layers", "layers.rotary"):
    assert importlib.util.find_spec(f"flash_attn.{name}") is not None
for name in ("cute", "layers.patch_embed", "flash_attn_interface.more"):
    assert all(finder.find_spec(f"flash_attn.{name}", []) is None for finder in sys.meta_path)
    assert importlib.util.find_spec(f"flash_attn.{name}") is None
    try:
        importlib.import_module(f"flash_attn.{name}")
    except ModuleNotFoundError as error:
        assert str(error).startswith(f"flash_cute.compat: there is no flash_attn.{name}; flash_attn, ")
    else:
        raise AssertionError
try:
    from flash_attn import ops
except ModuleNotFoundError as error:
    assert str(error).startswith("flash_cute.compat: there is no flash_attn.ops; flash_attn, ")
else:
    raise AssertionError
"""
TOO_LATE = """
import sys
import types
sys.modules["flash_attn"] = types.ModuleType("flash_attn")
import flash_cute.compat.flash_attn
try:
    flash_cute.compat.flash_attn.install()
except ImportError as error:
    assert str(error) == "flash_cute.compat: flash_attn has been imported before; call install() first"
else:
    raise AssertionError
assert "flash_attn_interface" not in sys.modules
"""


@pytest.mark.parametrize("program", [INSTALLED, TOO_LATE], ids=["installed", "too late"])
def test_install(program):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)])}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
