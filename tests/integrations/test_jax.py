"""flash_cute.jax: values and gradients against float64, JAX's semantics, transforms, lowering for CUDA."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.cases import matrix

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import PartitionSpec  # noqa: E402
from support.jax_cases import (  # noqa: E402
    MASKS,
    SEEDS,
    SHAPES,
    TOLD_APART,
    assert_attention,
    assert_within_rule,
    close,
    factors_of,
    gradients_of_results,
    inputs,
    loss_of,
    math,
    mesh_of,
    some_pairs,
    visible,
)

import flash_cute.jax as ours  # noqa: E402
from flash_cute.jax import attention, dot_product_attention  # noqa: E402


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_masks(shape, mask):
    assert_attention(*inputs(shape), **mask)


def test_float16():
    assert_attention(*inputs("grouped", jnp.float16), is_causal=True)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("shape", ["grouped", "more queries", "wider value"])
def test_float32(shape, mask):
    assert_attention(*inputs(shape, jnp.float32), **mask)


def test_float32_of_gpt2():
    """Heads of 1024 x 64, beside jax.numpy at its highest precision."""
    q, k, v = inputs((1, 1024, 1024, 2, 2, 64), jnp.float32)
    place = jnp.arange(1024)

    @jax.jit
    def plain(q, k, v):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest") / 8
        weights = jax.nn.softmax(jnp.where(place <= place[:, None], scores, -jnp.inf))
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v, precision="highest")

    def gradients(function):
        return jax.jit(jax.grad(lambda *x: (function(*x) ** 2).sum() / 2, (0, 1, 2)))(q, k, v)

    def ours(q, k, v):
        return attention(q, k, v, is_causal=True)

    with jax.enable_x64():
        exact = np.asarray(plain(*(x.astype(jnp.float64) for x in (q, k, v))))
    found, expected = (np.asarray(function(q, k, v)) for function in (jax.jit(ours), plain))
    assert np.linalg.norm(found - expected) <= 5e-7 * np.linalg.norm(expected)
    assert abs(found - exact).max() <= 2 * abs(expected - exact).max()
    for found, expected in zip(gradients(ours), gradients(plain), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=5e-5)


# Of jax.default_matmul_precision, and the argument: is it TF32?
PRECISIONS = {
    (None, None): False,
    ("highest", None): False,
    ("float32", None): False,
    ("high", None): True,
    ("tensorfloat32", None): True,
    ("default", None): True,
    ("high", "highest"): False,
    ("highest", jax.lax.Precision.HIGH): True,
    (None, jax.lax.Precision.HIGHEST): False,
}


@pytest.mark.parametrize(("setting", "argument"), PRECISIONS, ids=str)
def test_precision_of_float32(setting, argument, monkeypatch):
    """What reaches the calls of kernels, on any platform."""
    options = []
    forward = dot_product_attention._forward
    monkeypatch.setattr(dot_product_attention, "_forward", lambda *x: options.append(x[-1]) or forward(*x))
    q, k, v = inputs("grouped", jnp.float32)
    with jax.default_matmul_precision(setting):
        for dtype in (jnp.float32, jnp.bfloat16):
            jax.eval_shape(partial(attention, precision=argument), *(x.astype(dtype) for x in (q, k, v)))
    assert [x.tf32 for x in options] == [PRECISIONS[setting, argument], False]


def test_lengths_that_are_the_same():
    """One array for both, as for self-attention: each entry is a square."""
    q, k, v = inputs((3, 40, 40, 4, 2, 32))
    used = jnp.array([40, 7, 0], jnp.int32)
    assert_attention(q, k, v, is_causal=True, query_seq_lengths=used, key_value_seq_lengths=used)


@pytest.mark.parametrize("shape", ["more queries", "narrower value", "wider value"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths(is_causal, shape):
    """Entries with fewer keys than queries, with more, and with none."""
    q, k, v = inputs((4, *SHAPES[shape][1:]))
    used_q = jnp.array([q.shape[1], 5, 9, 0], jnp.int32)
    used_k = jnp.array([11, k.shape[1], 0, 3], jnp.int32)
    skipped = jnp.array([2, 0, 1, 3], jnp.int32)
    for options in (
        {"query_seq_lengths": used_q, "key_value_seq_lengths": used_k},
        {"key_value_left_padding": skipped},
        {"key_value_seq_lengths": used_k, "key_value_left_padding": skipped},
    ):
        assert_attention(q, k, v, is_causal=is_causal, scale=0.3, **options)


def some_ranges(entries, seqlen_q, seqlen_k, count, seed=11):
    """In any order, some empty, and leaving the keys."""
    size = entries, 1, seqlen_q, count, 2
    return np.random.default_rng(seed).integers(-5, seqlen_k + 6, size).astype(np.int32)


@matrix(
    dtype={"bf16": jnp.bfloat16, "fp32": jnp.float32},
    shape=SHAPES.keys(),
    mask=MASKS,
    count={"one for all": 1, "three": 3},
)
def test_ranges(dtype, shape, mask, count):
    q, k, v = inputs(shape, dtype)
    entries = 1 if count == 1 else len(q)
    assert_attention(q, k, v, ranges=some_ranges(entries, q.shape[1], k.shape[1], count), **mask)


@pytest.mark.parametrize("is_causal", [False, True])
def test_ranges_with_lengths(is_causal):
    """Keys are counted from the first row, padding included."""
    q, k, v = inputs((4, *SHAPES["more queries"][1:]))
    lengths = {
        "query_seq_lengths": jnp.array([q.shape[1], 5, 9, 0], jnp.int32),
        "key_value_seq_lengths": jnp.array([11, k.shape[1], 0, 3], jnp.int32),
        "key_value_left_padding": jnp.array([2, 0, 1, 3], jnp.int32),
    }
    for entries in (1, 4):
        ranges = some_ranges(entries, q.shape[1], k.shape[1], 2)
        assert_attention(q, k, v, is_causal=is_causal, ranges=ranges, **lengths)


def test_a_call_that_nothing_compiles_is_a_few_programs(caplog):
    """Operation by operation, the first call of a shape takes several times as long."""
    arrays = inputs((1, 7, 11, 2, 1, 24))
    with jax.log_compiles():
        jax.block_until_ready(jax.vjp(partial(attention, is_causal=True), *arrays)[1](arrays[0]))
        jax.block_until_ready(ours.softmax(jnp.ones((3, 7)), causal=True))
    assert 1 <= caplog.text.count("Finished XLA compilation") <= 20


def test_transforms_of_ranges():
    """vmap of them and of the others, shards, wide integers; no gradient of theirs."""
    q, k, v = inputs("grouped")
    ranges = some_ranges(2, 33, 33, 2)
    call = partial(attention, return_residual=True)
    expected = call(q, k, v, ranges=ranges)
    by_entry = jax.vmap(lambda q, k, v, r: call(q[None], k[None], v[None], ranges=r[None]))(q, k, v, ranges)
    close(jax.tree.map(lambda x: x[:, 0], by_entry), expected)
    both = jax.jit(jax.vmap(lambda r: call(q, k, v, ranges=r)))(np.stack([ranges, ranges[::-1]]))
    close(jax.tree.map(lambda x: x[0], both), expected)
    one = jax.vmap(lambda q: call(q, k, v, ranges=ranges[:1]))(q[None])
    close(jax.tree.map(lambda x: x[0], one), call(q, k, v, ranges=np.repeat(ranges[:1], 2, 0)))
    wide = ranges.astype(np.int64)
    for given in (np.where(wide > 33, 2**40, wide), ranges.astype(np.int8)):
        close(call(q, k, v, ranges=given), expected)
    mesh, spec = mesh_of(shards=2), PartitionSpec("shards")
    for entries, of_ranges in ((2, spec), (1, PartitionSpec())):
        sharded = jax.shard_map(
            lambda *x: attention(*x[:3], ranges=x[3]),
            mesh=mesh,
            in_specs=(spec,) * 3 + (of_ranges,),
            out_specs=spec,
        )
        arrays = q, k, v, ranges[:entries]
        close(jax.jit(sharded)(*arrays), attention(*arrays[:3], ranges=arrays[3]))


def test_wrong_ranges():
    q, k, v = inputs("grouped")
    for wrong in (
        np.zeros((2, 33, 1, 2), np.int32),
        np.zeros((3, 1, 33, 1, 2), np.int32),
        np.zeros((2, 6, 33, 1, 2), np.int32),
        np.zeros((2, 1, 33, 5, 2), np.int32),
        np.zeros((2, 1, 33, 1, 3), np.int32),
        np.zeros((2, 1, 33, 1, 2), np.float32),
    ):
        words = f"ranges is {wrong.dtype}{list(wrong.shape)}; int32[2 or 1, 1, 33, R, 2], R from 1 to 4, is"
        with pytest.raises(ValueError, match=re.escape(words)):
            attention(q, k, v, ranges=wrong)


# Scores that are changed


@matrix(shape=SHAPES.keys(), mask=MASKS, axes=TOLD_APART)
def test_masks_of_booleans(shape, mask, axes):
    q, k, v = inputs(shape)
    seen = some_pairs(q, k, axes) < 0.7
    assert_attention(q, k, v, mask=seen, **mask)


@matrix(
    dtype={"bf16": jnp.bfloat16, "fp32": jnp.float32},
    shape=SHAPES.keys(),
    mask=MASKS,
    axes=TOLD_APART,
)
def test_biases(dtype, shape, mask, axes):
    """With -inf, which hides, the lowest number, which does not, and float32 beside 16 bits."""
    q, k, v = inputs(shape, dtype)
    draw, bias = (some_pairs(q, k, axes, seed) for seed in (13, 17))
    bias = (4 * bias - 2).astype(dtype)
    bias = np.where(draw < 0.2, -np.inf, np.where(draw < 0.3, float(jnp.finfo(dtype).min), bias))
    bias[..., :1, :] = float(jnp.finfo(dtype).min)
    assert_attention(q, k, v, bias=jnp.asarray(bias, jnp.float32), **mask)
    found = attention(q, k, v, bias=jnp.asarray(bias, dtype), **mask)
    close(found, attention(q, k, v, bias=jnp.asarray(bias, jnp.float32), **mask))


@pytest.mark.parametrize("softcap", [0.7, 30])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_softcap(mask, softcap):
    assert_attention(*inputs("grouped"), softcap=softcap, **mask)


@pytest.mark.parametrize("p", [0.5, 0.1, 1 - 1 / 4096, 0.3333])
@pytest.mark.parametrize("seed", SEEDS)
def test_pairs_of_dropout(seed, p):
    """Those of flash_cute.dropout_mask."""
    torch = pytest.importorskip("torch")
    from flash_cute.dropout import dropout_mask
    from flash_cute.jax import dropout

    words = jnp.asarray(np.array(seed, np.int64).view(np.uint32))
    expected = dropout_mask(torch.tensor(seed), 2, 3, 37, 53, p).numpy()
    np.testing.assert_array_equal(dropout.kept(words, 2, 3, 37, 53, dropout.keep_of(p)), expected)


@matrix(shape=SHAPES.keys(), mask=MASKS, seed=SEEDS)
def test_dropout(shape, mask, seed):
    q, k, v = inputs(shape)
    given = {"dropout_p": 0.3, "dropout_seed": np.array(seed, np.int64), "kept": factors_of(q, k, seed, 0.3)}
    assert_attention(q, k, v, **given, **mask)


@pytest.mark.parametrize("is_causal", [False, True])
def test_everything_beside_lengths(is_causal):
    q, k, v = inputs((4, *SHAPES["more queries"][1:]))
    lengths = {
        "query_seq_lengths": jnp.array([q.shape[1], 5, 9, 0], jnp.int32),
        "key_value_seq_lengths": jnp.array([11, k.shape[1], 0, 3], jnp.int32),
        "key_value_left_padding": jnp.array([2, 0, 1, 3], jnp.int32),
    }
    seed = SEEDS[0]
    given = {"dropout_p": 0.3, "dropout_seed": np.array(seed, np.int64), "kept": factors_of(q, k, seed, 0.3)}
    given |= {"mask": some_pairs(q, k, TOLD_APART["pairs"]) < 0.7, "softcap": 2.0}
    given["bias"] = some_pairs(q, k, TOLD_APART["all alike"]).astype(jnp.bfloat16)
    given["ranges"] = some_ranges(4, q.shape[1], k.shape[1], 2)
    assert_attention(q, k, v, is_causal=is_causal, **given, **lengths)


def test_masks_and_biases_as_jax_has_them():
    """For rows that see a key; of three dimensions, too."""
    q, k, v = inputs("grouped", jnp.float32)
    mask = (some_pairs(q, k, TOLD_APART["pairs"]) < 0.7) | np.eye(33, dtype=bool)
    bias = some_pairs(q, k, TOLD_APART["all alike"])
    for options in ({"mask": mask}, {"bias": bias}, {"mask": mask, "bias": bias, "is_causal": True}):
        close(attention(q, k, v, **options), jax.nn.dot_product_attention(q, k, v, **options))
    one = q[0], k[0], v[0]
    options = {"mask": mask[0], "bias": bias[0]}
    close(attention(*one, **options), attention(q[:1], k[:1], v[:1], mask=mask[:1], bias=bias)[0])


def test_transforms_of_changed_scores():
    q, k, v = inputs("grouped")
    mask, bias = (jnp.asarray(some_pairs(q, k, TOLD_APART["pairs"], seed)) for seed in (13, 17))
    mask, bias = mask < 0.7, bias.astype(q.dtype)
    seeds = jax.random.bits(jax.random.key(0), (2, 4), jnp.uint32)

    def call(q, k, v, mask, bias, seed):
        options = {"mask": mask, "bias": bias, "dropout_p": 0.5, "dropout_seed": seed, "softcap": 2.0}
        return attention(q, k, v, return_residual=True, **options)

    arrays = [jnp.stack([x, x[::-1]]) for x in (q, k, v, mask, bias)]
    mapped = jax.jit(jax.vmap(call))(*arrays, seeds)
    for entry in range(2):
        alone = call(*(x[entry] for x in arrays), seeds[entry])
        close(jax.tree.map(lambda x, entry=entry: x[entry], mapped), alone)
    assert not np.allclose(call(q, k, v, mask, bias, seeds[0])[0], call(q, k, v, mask, bias, seeds[1])[0])
    assert attention(q, k, v, dropout_p=1e-5).shape == q.shape  # which rounds to none
    mesh, spec = mesh_of(shards=2), PartitionSpec("shards")
    sharded = jax.shard_map(
        lambda *x: attention(*x[:3], mask=x[3], bias=x[4]), mesh=mesh, in_specs=(spec,) * 5, out_specs=spec
    )
    close(jax.jit(sharded)(q, k, v, mask, bias), attention(q, k, v, mask=mask, bias=bias))


@pytest.mark.parametrize("shape", ["grouped", "more queries", "narrower value"])
@pytest.mark.parametrize(
    "options", [{}, {"local_window_size": (7, 3)}, {"used": [5, 30]}, {"ranges": 2}], ids=str
)
def test_sinks(shape, options):
    """By results and gradients without sinks, in float64: a sink takes a part of each row's weight."""
    q, k, v = inputs((2, *SHAPES[shape][1:]))
    masks, named = dict(options), {}
    if used := masks.pop("used", None):
        named = {"query_seq_lengths": jnp.array(used, jnp.int32)}
    if count := masks.get("ranges"):
        masks["ranges"] = some_ranges(2, q.shape[1], k.shape[1], count)
    seen = visible(q, k, used_q=used, **masks)
    sinks = 2 * np.random.default_rng(5).standard_normal(q.shape[2]).astype(np.float32)
    dout, dlse = gradients_of_results(q, v)

    @jax.jit
    def call(q, k, v, sinks, dout, dlse):
        function = partial(attention, return_residual=True, **masks, **named)
        results, gradients = jax.vjp(lambda q, k, v, s: function(q, k, v, sinks=s), q, k, v, sinks)
        return *results, *gradients((dout, dlse))

    def with_sinks(rounded):
        out, lse, *_ = math(q, k, v, dout, dlse, seen, q.shape[-1] ** -0.5, rounded)
        counts = np.ones(lse.shape, bool)
        if used:
            counts &= np.arange(q.shape[1])[None, :, None] < np.array(used)[:, None, None]
        after = np.where(counts, np.logaddexp(lse, sinks), -np.inf)
        whole = np.where(counts, after, 0)
        of_keys, of_sink = np.exp(lse - whole), np.where(counts, np.exp(sinks - whole), 0)
        out = rounded(out * of_keys[..., None])
        delta, of_lse = (np.asarray(dout, np.float64) * out).sum(-1), np.where(counts, dlse, 0)
        inner = np.asarray(dout, np.float64) * of_keys[..., None], of_keys * of_lse + of_sink * delta
        gradients = math(q, k, v, *inner, seen, q.shape[-1] ** -0.5, rounded)[2:]
        return out, after, *gradients, (of_sink * (of_lse - delta)).sum((0, 1))

    oracle, yardstick = map(with_sinks, (lambda x: x, lambda x: x.astype(q.dtype).astype(np.float64)))
    names = "out", "lse", "dq", "dk", "dv", "dsinks"
    for name, *triple in zip(names, call(q, k, v, sinks, dout, dlse), yardstick, oracle, strict=True):
        assert_within_rule(name, *triple)


def test_wrong_sinks():
    q, k, v = inputs("grouped")
    for sinks in (jnp.zeros(5), jnp.zeros((6, 1)), jnp.zeros(6, jnp.int32), jnp.zeros(6, jnp.float16)):
        with pytest.raises(ValueError, match=r"sinks must be float32\[6\], or of query's dtype, got"):
            attention(q, k, v, sinks=sinks)
    entry = attention(q[0], k[0], v[0], sinks=jnp.zeros(6))
    assert entry.shape == q[0].shape


@pytest.mark.parametrize("lengths", [False, True])
def test_blind_queries_reach_no_gradient(lengths):
    """What they hold, and the gradients of their rows: of queries that see nothing but padding."""
    q, k, v = inputs((2, 9, 5, 2, 1, 32))
    options = {"key_value_left_padding": jnp.array([2, 0], jnp.int32), "is_causal": True}
    if lengths:
        options["key_value_seq_lengths"] = jnp.array([4, 5], jnp.int32)

    def loss(q, k, v):
        out, lse = attention(q, k, v, return_residual=True, **options)
        seen = jnp.isfinite(lse)
        return jnp.where(seen[..., None], out, 0).astype(jnp.float32).sum() + jnp.where(seen, lse, 0).sum()

    function = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    expected = jax.tree.leaves(function(q, k, v))
    for garbage in (np.nan, np.inf):
        found = jax.tree.leaves(function(q.at[0, :2].set(garbage), k, v))
        for result, clean in zip(found, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(result, np.float32), np.asarray(clean, np.float32))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_drops_in_for_jax(mask):
    """Rows that see a key are as jax.nn.dot_product_attention gives them."""
    q, k, v = inputs("more queries")
    theirs, mine = (
        np.asarray(jax.jit(partial(function, **mask))(q, k, v), np.float32)
        for function in (jax.nn.dot_product_attention, attention)
    )
    sees = visible(q, k, **mask).any(-1)
    np.testing.assert_allclose(mine[sees], theirs[sees], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("head_dim_v", [1, 24, 72])
def test_a_head_dim_of_value_beside_jax(head_dim_v):
    """JAX's own asks for one width: zeros fill up what is narrower, and scale stays that of query's."""
    q, k, v = inputs((2, 33, 33, 6, 2, 40, head_dim_v))
    width = max(40, head_dim_v)
    padded = [jnp.pad(x, ((0, 0),) * 3 + ((0, width - x.shape[3]),)) for x in (q, k, v)]

    @jax.jit
    def theirs(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=40**-0.5)[..., :head_dim_v]

    found = jax.jit(partial(attention, is_causal=True))(q, k, v)
    assert found.shape == (2, 33, 6, head_dim_v)
    close(found, theirs(*padded))


def test_head_dims_far_apart():
    """The narrowest and the widest, which every one between lies within."""
    for head_dims in ((1, 256), (256, 1)):
        assert_attention(*inputs((1, 9, 12, 2, 1, *head_dims)))


@pytest.mark.parametrize("shape", ["grouped", "narrower value"])
def test_transforms(shape):
    q, k, v = inputs(shape)
    skipped = jnp.array([3, 0], jnp.int32)

    def loss(q, k, v, skipped):
        out = attention(q, k, v, is_causal=True, key_value_left_padding=skipped)
        return (out.astype(jnp.float32) ** 2).sum()

    gradient = jax.grad(loss, (0, 1, 2))
    mapped = jax.vmap(gradient, in_axes=(0, 0, 0, None))
    expected = jax.jit(gradient)(q, k, v, skipped)
    remade = jax.jit(jax.grad(jax.checkpoint(loss), (0, 1, 2)))(q, k, v, skipped)
    each = [x[0] for x in jax.jit(mapped)(q[None], k[None], v[None], skipped)]
    for found in (remade, each):
        for result, reference in zip(found, expected, strict=True):
            np.testing.assert_allclose(
                np.asarray(result, np.float32), np.asarray(reference, np.float32), rtol=0.02, atol=1e-3
            )


def test_many_mapped_sequences():
    """More than the kernels list without a workspace, of lengths of their own, each mapped."""
    q, k, v = (x[:, None] for x in inputs((100, 9, 9, 2, 1, 32)))
    used = (jnp.arange(100, dtype=jnp.int32) % 10)[:, None]

    def gradient(q, k, v, used):
        options = {"query_seq_lengths": used, "key_value_seq_lengths": used, "deterministic": True}
        return jax.grad(lambda *x: attention(*x, **options).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)

    mapped = jax.jit(jax.vmap(gradient))(q, k, v, used)
    whole = jax.jit(gradient)(q[:, 0], k[:, 0], v[:, 0], used[:, 0])
    for result, reference in zip(mapped, whole, strict=True):
        np.testing.assert_allclose(
            np.asarray(result[:, 0], np.float32), np.asarray(reference, np.float32), rtol=0.02, atol=1e-3
        )


@pytest.mark.parametrize("shape", ["grouped", "narrower value"])
def test_shard_map(shape):
    """Over batch and heads, forward and backward, on four devices where there are as many."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    sizes = (2, 2) if len(jax.devices()) >= 4 else (1, 1)
    mesh = jax.make_mesh(sizes, ("batch", "heads"), axis_types=auto, devices=jax.devices()[: sizes[0] ** 2])
    spec = PartitionSpec("batch", None, "heads", None)
    q, k, v = inputs(shape)

    def call(q, k, v):
        out, backward = jax.vjp(partial(attention, is_causal=True), q, k, v)
        return out, *backward(out)

    sharded = jax.shard_map(call, mesh=mesh, in_specs=(spec,) * 3, out_specs=(spec,) * 4)
    for found, expected in zip(jax.jit(sharded)(q, k, v), jax.jit(call)(q, k, v), strict=True):
        np.testing.assert_allclose(
            np.asarray(found, np.float32), np.asarray(expected, np.float32), rtol=0.02, atol=1e-3
        )


own_gradients = jax.jit(jax.grad(loss_of(attention), (0, 1, 2)))  # compiled once a shape


REPLICATED = {
    "heads": PartitionSpec(None, None, "shards", None),
    "queries": PartitionSpec(None, "shards", None, None),
}


@pytest.mark.parametrize("spec", REPLICATED.values(), ids=REPLICATED)
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_gradients_of_replicated_keys_are_summed(inside, spec):
    """Grad inside shard_map and around it: on the CPU by values, for CUDA as many sums are lowered."""
    mesh, whole = mesh_of(shards=4), PartitionSpec()
    q, k, v = inputs((2, 8, 8, 4, 1, 16))
    specs = spec, whole, whole
    if inside:
        call = jax.jit(jax.shard_map(own_gradients, mesh=mesh, in_specs=specs, out_specs=specs))
    else:
        sharded = jax.shard_map(attention, mesh=mesh, in_specs=specs, out_specs=spec)
        call = jax.jit(jax.grad(loss_of(sharded), (0, 1, 2)))
    close(call(q, k, v), own_gradients(q, k, v))
    checks = [
        jax.export.DisabledSafetyCheck.custom_call(f"flash_cute_{name}") for name in ("forward", "backward")
    ]
    for platform in ("cpu", "cuda"):
        exported = jax.export.export(call, platforms=[platform], disabled_checks=checks)(q, k, v)
        assert exported.mlir_module().count("all_reduce") == 2, platform


def test_operands_that_vary_over_different_axes():
    mesh = mesh_of(batch=2, heads=2)
    q, k, v = inputs((2, 8, 8, 4, 2, 16))
    used = jnp.array([3, 8, 0, 5], jnp.int32)
    batch, both, heads, whole = (PartitionSpec(*x) for x in (("batch",), ("batch", "heads"), ("heads",), ()))

    def over_keys(q, k, v):
        return jax.lax.pmean(attention(q, k, v), "heads")

    def over_lengths(q, used):
        return jax.lax.pmean(attention(q, q, q, key_value_seq_lengths=used), "heads")

    def over_lengths_of_rows(x, used):
        return jax.lax.pmean(ours.softmax(x, seqused_k=used)[0], "heads")

    mapped = jax.shard_map(over_keys, mesh=mesh, in_specs=(batch, both, both), out_specs=batch)
    halves = [(k[:, :4], v[:, :4]), (k[:, 4:], v[:, 4:])]
    close(
        jax.jit(mapped)(q, k, v), sum(jax.jit(attention)(q, *half).astype(jnp.float32) for half in halves) / 2
    )
    for function, own in (
        (over_lengths, lambda x, used: attention(x, x, x, key_value_seq_lengths=used)),
        (over_lengths_of_rows, lambda x, used: ours.softmax(x, seqused_k=used)[0]),
    ):
        mapped = jax.shard_map(function, mesh=mesh, in_specs=(whole, heads), out_specs=whole)

        def mean(x, own=own):
            return (own(x, used[:2]).astype(jnp.float32) + own(x, used[2:])) / 2

        ours_of, expected_of = (
            jax.jit(jax.grad(loss)) for loss in (lambda x, f=mapped: loss_of(f)(x, used), loss_of(mean))
        )
        close(ours_of(q), expected_of(q))


def explicit_mesh():
    if len(jax.devices()) < 4:
        pytest.skip("needs 4 devices")
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    return jax.make_mesh((2, 2), ("b", "h"), axis_types=kinds, devices=jax.devices()[:4])


@jax.jit
def causal_value_and_gradients(q, k, v, used):
    function = partial(attention, is_causal=True, key_value_seq_lengths=used)
    return jax.value_and_grad(loss_of(function), (0, 1, 2))(q, k, v)


EXPLICIT = {"batch": ("b",), "both": ("b", None, "h"), "batch over both": (("b", "h"),)}


@pytest.mark.parametrize("spec", EXPLICIT.values(), ids=EXPLICIT)
@pytest.mark.parametrize("head_dim_v", [8, 12])
def test_explicit_shards(spec, head_dim_v):
    """Results and gradients are sharded as the operands are."""
    mesh = explicit_mesh()
    q, k, v = inputs((4, 8, 8, 4, 2, 8, head_dim_v))
    used = jnp.array([3, 5, 2, 8], jnp.int32)
    ranges = [jnp.array(some_ranges(entries, 8, 8, 2)) for entries in (1, 4)]
    call = causal_value_and_gradients
    expected = call(q, k, v, used)
    with jax.set_mesh(mesh):
        operands = [jax.device_put(x, jax.NamedSharding(mesh, PartitionSpec(*spec))) for x in (q, k, v)]
        found = call(*operands, used)
        mixed = call(operands[0], k, v, used)
        sunk = jax.jit(lambda *x: attention(*x, sinks=jnp.ones(4)))(*operands)
        ranged = [jax.jit(lambda *x: attention(*x[:3], ranges=x[3]))(*operands, r) for r in ranges]
    assert all(jax.typeof(x) == jax.typeof(y) for x, y in zip(found[1], operands, strict=True))
    close(found, expected)
    close(mixed, expected)
    close(sunk, attention(q, k, v, sinks=jnp.ones(4)))
    for result, r in zip(ranged, ranges, strict=True):
        close(result, attention(q, k, v, ranges=r))


def test_explicit_shards_of_one_head_of_keys():
    mesh = explicit_mesh()
    q, k, v = inputs((2, 8, 8, 4, 1, 8))
    call = jax.grad(loss_of(attention), (0, 1, 2))
    expected = jax.jit(call)(q, k, v)
    with jax.set_mesh(mesh):
        heads = jax.NamedSharding(mesh, PartitionSpec(None, None, ("b", "h")))
        queries = jax.device_put(q, heads)
        close(jax.jit(call)(queries, k, v), expected)
        entry = jax.device_put(q[0], jax.NamedSharding(mesh, PartitionSpec(None, ("b", "h"))))
        close(jax.jit(attention)(entry, k[0], v[0]), jax.jit(attention)(q, k, v)[0])


def test_explicit_shards_within_shard_map():
    """Over the batch by hand, over the heads by type."""
    mesh = explicit_mesh()
    q, k, v = inputs((2, 8, 8, 4, 2, 8))
    expected = jax.jit(attention)(q, k, v)
    with jax.set_mesh(mesh):
        shards = jax.NamedSharding(mesh, PartitionSpec("b", None, "h"))
        operands = [jax.device_put(x, shards) for x in (q, k, v)]
        batch = PartitionSpec("b")
        call = jax.shard_map(attention, in_specs=(batch,) * 3, out_specs=batch, axis_names={"b"})
        close(jax.jit(call)(*operands), expected)


def test_explicit_shards_of_softmax():
    mesh = explicit_mesh()
    x, used = inputs((4, 6, 8, 2, 2, 8))[0].astype(jnp.float32), jnp.array([3, 5, 2, 8], jnp.int32)
    call = jax.value_and_grad(loss_of(lambda x: ours.softmax(x, causal=True, seqused_k=used)[0]))
    expected = jax.jit(call)(x)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, jax.NamedSharding(mesh, PartitionSpec("b", "h")))
        found = jax.jit(call)(sharded)
    assert jax.typeof(found[1]) == jax.typeof(sharded)
    close(found, expected)


def test_explicit_shards_that_are_refused():
    mesh = explicit_mesh()
    q, k, v = inputs((4, 8, 8, 4, 2, 8))
    with jax.set_mesh(mesh):

        def put(x, *spec):
            return jax.device_put(x, jax.NamedSharding(mesh, PartitionSpec(*spec)))

        for call, words in (
            (lambda: attention(put(q, None, "b"), k, v), "query is sharded as (None, 'b', None, None)"),
            (lambda: attention(q, k, put(v, None, None, None, "b")), "value is sharded as"),
            (lambda: attention(put(q, None, None, ("b", "h")), k, v), "key has 2 heads and query's are in 4"),
            (lambda: ours.softmax(put(q, None, None, None, "b")), "x is sharded as"),
            (lambda: ours.softmax(put(q, None, None, "b"), causal=True), "x is sharded as"),
        ):
            with pytest.raises(ValueError, match=re.escape(words)) as raised:
                call()
            assert "\n" not in str(raised.value)


def launches(compiled, *arguments) -> int:
    """How many kernels the host launches one by one in a call, once it has been called."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(2):
        jax.block_until_ready(compiled(*arguments))
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        jax.block_until_ready(compiled(*arguments))
    return sum(event.name() == "cudaLaunchKernelExC" for event in profiler.profiler.kineto_results.events())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "mask"),
    [
        ((1, 4096, 4096, 32, 1, 128), {"is_causal": True}),
        ((1, 20_000, 20_000, 3, 3, 64), {"local_window_size": (1024, 0)}),
        ((2, 4000, 9000, 8, 2, 64), {"ranges": 4}),
    ],
    ids=["parts of a group", "window", "ranges"],
)
def test_workspace_is_large_enough(shape, mask):
    """Gradients in two modes, of which the other one is known to have room."""
    arrays = inputs(shape)
    if count := mask.get("ranges"):
        mask = {"ranges": some_ranges(2, *shape[1:3], count)}

    def gradients(deterministic):
        function = partial(attention, deterministic=deterministic, **mask)
        return jax.jit(jax.grad(lambda *x: jnp.sin(function(*x).astype(jnp.float32)).sum(), (0, 1, 2)))(
            *arrays
        )

    for found, expected in zip(gradients(False), gradients(True), strict=True):
        found, expected = (np.asarray(x, np.float32) for x in (found, expected))
        assert np.abs(found - expected).max() <= 2**-7 * np.abs(expected).max()


@pytest.mark.gpu
def test_cuda_graphs():
    """Graphs as XLA makes them: with the calls, their workspaces, and other memory between the replays."""
    q, k, v = inputs((3, 200, 200, 4, 2, 64))
    used, ranges = jnp.array([200, 77, 1], jnp.int32), some_ranges(3, 200, 200, 2)

    def step(q, k, v, used):
        def loss(q, k, v):
            out = attention(q, k, v, is_causal=True, deterministic=True)
            out = attention(out, k, v, query_seq_lengths=used, key_value_seq_lengths=used, deterministic=True)
            out = attention(out, k, v, ranges=ranges, deterministic=True)
            rows = ours.softmax(out.reshape(3, -1))[0]  # several thread blocks share such a row
            return (rows.astype(jnp.float32) * jnp.arange(rows.shape[1])).sum()

        return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)

    lowered = jax.jit(step).lower(q, k, v, used)
    graphs = {"xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL", "xla_gpu_graph_min_graph_size": 1}
    graphed, plain = (lowered.compile(options) for options in (graphs, {"xla_gpu_enable_command_buffer": ""}))
    for factor in (1, 0.5, -2):
        arguments = factor * q, k, v, used
        found = graphed(*arguments)
        # Memory that XLA had not set aside for the workspaces would be handed out here.
        others = [jnp.full((size,), 7, jnp.uint8) for size in range(1000, 2_000_000, 50_000)]
        again = graphed(*arguments)
        assert all((x == 7).all() for x in others)
        for results in (found, again):
            for result, expected in zip(
                jax.tree.leaves(results), jax.tree.leaves(plain(*arguments)), strict=True
            ):
                np.testing.assert_array_equal(
                    np.asarray(result, np.float32), np.asarray(expected, np.float32)
                )


def test_no_forward_mode():
    q, k, v = inputs("grouped")
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: attention(q, k, v), (q,), (q,))


@pytest.mark.parametrize("face", ["attention", "softmax"])
def test_no_second_derivatives(face):
    """On any platform; the gradients may be used where nothing differentiates them."""
    q, k, v = inputs("grouped")
    function = (lambda q: attention(q, k, v)) if face == "attention" else (lambda x: ours.softmax(x)[0])
    gradient = jax.grad(loss_of(function))
    sentence = f"flash_cute.jax.{face}: there are no second derivatives"
    with pytest.raises(NotImplementedError, match=re.escape(sentence)):
        jax.grad(loss_of(gradient))(q)
    with pytest.raises(NotImplementedError, match=re.escape(sentence)):
        jax.jit(jax.grad(loss_of(gradient)))(q)
    kept = jax.grad(lambda q: (q * jax.lax.stop_gradient(gradient(q))).astype(jnp.float32).sum())(q)
    np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (kept, gradient(q))))


def test_no_second_derivatives_on_cuda():
    """What is lowered there has no derivative of its own either: the same sentence."""
    q, k, v = inputs("grouped")
    second = jax.jit(jax.grad(loss_of(jax.grad(loss_of(lambda q: attention(q, k, v))))))
    with pytest.raises(NotImplementedError, match="there are no second derivatives"):
        jax.export.export(second, platforms=["cuda"])(q)


def test_gradients_of_rows_that_do_not_count():
    """Whatever they hold, NaN included, no gradient has of it."""
    q, k, v = inputs((2, 6, 6, 2, 1, 8))
    used = jnp.array([3, 5], jnp.int32)
    options = {"query_seq_lengths": used, "return_residual": True, "deterministic": True}
    (out, lse), backward = jax.vjp(jax.jit(partial(attention, **options)), q, k, v)
    behind = np.arange(6)[None, :, None] >= np.asarray(used)[:, None, None]
    dirty = [
        jnp.where(behind.reshape(2, 6, *(1,) * (x.ndim - 2)), jnp.nan, 1).astype(x.dtype) for x in (out, lse)
    ]
    dirty = tuple(jnp.broadcast_to(d, x.shape) for d, x in zip(dirty, (out, lse), strict=True))
    clean = tuple(jnp.nan_to_num(x) for x in dirty)
    for found, expected in zip(backward(dirty), backward(clean), strict=True):
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))


@pytest.mark.parametrize("window", [2**31 - 1, (2**40, 0), (0, 2**40), (2**70, 2**70)])
def test_windows_wider_than_the_keys(window):
    q, k, v = inputs("more queries")
    limits = tuple(min(x, 100) for x in (window if isinstance(window, tuple) else (window, window)))
    found, expected = (attention(q, k, v, local_window_size=x) for x in (window, limits))
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))


SETTINGS = {
    "debug_nans": {"jax_debug_nans": True},
    "rank_promotion": {"jax_numpy_rank_promotion": "raise"},
    "strict types": {"jax_enable_x64": True, "jax_numpy_dtype_promotion": "strict"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_strict_settings(settings):
    """With blind rows, of all masks, forward and backward."""
    q, k, v = inputs("more queries")
    used = jnp.array([5], jnp.int32)
    lengths = {
        "query_seq_lengths": used + 4,
        "key_value_seq_lengths": used,
        "key_value_left_padding": used - 3,
    }
    rows = jnp.ones((1, 7, 3))
    calls = [
        partial(attention, q, k, v, is_causal=c, **options)
        for c in (False, True)
        for options in ({}, lengths)
    ]
    calls.append(partial(attention, q, k, v, local_window_size=(2, 1)))
    calls += [
        partial(ours.softmax, rows.astype(dtype), causal=True, **options)
        for dtype in (jnp.float32, jnp.bfloat16)
        for options in ({}, {"seqused_k": used - 4, "leftpad_k": used - 5})
    ]
    previous = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        for call in calls:

            def gradients(*arrays, call=call):
                results, backward = jax.vjp(partial(call.func, **call.keywords), *arrays)
                return backward(jax.tree.map(jnp.ones_like, results))

            if "jax_debug_nans" in settings:  # of what is computed; the others are of what is traced
                assert all(jnp.isfinite(x).all() for x in gradients(*call.args))
            else:
                jax.eval_shape(gradients, *call.args)
    finally:
        for name, value in previous.items():
            jax.config.update(name, value)


def test_integers_of_any_type_are_lengths():
    """The same with 64 bits and without; what is too long for int32 is long."""
    q, k, v = inputs("grouped")
    x = jnp.ones((2, 5))
    used = jnp.array([33, 4], jnp.int32)
    expected = attention(q, k, v, key_value_seq_lengths=used), ours.softmax(x, seqused_k=used)
    for wide in (False, True):
        with jax.enable_x64(wide):
            for given in ([33, 4], np.array([2**32, 4]), np.array([33, 4], np.int8), jnp.array([33, 4])):
                found = attention(q, k, v, key_value_seq_lengths=given), ours.softmax(x, seqused_k=given)
                close(found, expected)
    few = jnp.array([7, 4], jnp.int4)
    close(ours.softmax(x, seqused_k=few), ours.softmax(x, seqused_k=few.astype(jnp.int32)))


def test_lists_of_traced_lengths():
    x = jnp.ones((2, 5))

    @jax.jit
    def call(used):
        return ours.softmax(x, seqused_k=[used, 4])

    close(call(3), ours.softmax(x, seqused_k=[3, 4]))


def test_arguments_of_jax():
    """bias, mask and implementation where JAX has them, and no batch, of any of the operands."""
    q, k, v = inputs((1, 9, 9, 4, 2, 16))
    expected = attention(q, k, v, return_residual=True)
    close(attention(q, k, v, None, None, implementation=None, return_residual=True), expected)
    out, lse = attention(q[0], k, v[0], return_residual=True)
    assert (out.shape, lse.shape) == ((9, 4, 16), (9, 4))
    close((out, lse), [x[0] for x in expected])
    assert attention(q, k[0], v).shape == q.shape


def test_sizes_that_are_refused():
    """By shapes alone, before anything is allocated; to the last that is accepted."""

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    small = array(1, 4, 1, 8)
    for function, arguments, words in (
        (attention, (array(1, 2**28 + 1, 1, 8), small, small), "query has seqlen 268435457"),
        (attention, (small, *[array(1, 2**28 + 1, 1, 8)] * 2), "key has seqlen 268435457"),
        (attention, [array(2**27 + 1, 4, 2, 8)] * 3, "query has 268435458 (batch, head) pairs"),
        (ours.softmax, (array(2**31 - 1, 1),), "x has 2147483647 rows"),
        (ours.softmax, (array(1, 2**28 + 1),), "x has 268435457 columns"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            jax.eval_shape(function, *arguments)
    assert jax.eval_shape(ours.softmax, array(2**31 - 2, 1))[1].shape == (2**31 - 2,)
    assert jax.eval_shape(ours.softmax, array(1, 2**28))[1].shape == (1,)


@pytest.mark.skipif(ours.kernels.library() is None, reason="this flash_cute has no kernels for JAX")
def test_sizes_that_the_handlers_refuse():
    """Where vmap made them larger; 32 bits of them look small."""
    ask = ours.kernels.library().flash_cute_jax_softmax_workspace
    assert ask(False, 10, 2**20, 4) > 0
    assert ask(False, 2**32 + 10, 2**20, 4) == 0
    assert ask(False, 10, 2**28 + 1, 4) == 0


UNCHANGED = *[0] * 7, False, 4096  # a mask, a bias, a soft cap and dropout of a workspace


@pytest.mark.skipif(ours.kernels.library() is None, reason="this flash_cute has no kernels for JAX")
@pytest.mark.parametrize(("seqlen_k", "counters"), [(300, 2 + 2 * 16), (140 * 128, 2 + 2 * 16)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_workspace_holds_that_of_any_gpu(deterministic, seqlen_k, counters):
    """Asked for before the GPU is known: here for Hopper's, which count what is added to each part of dQ."""
    ask = ours.kernels.library().flash_cute_jax_workspace
    bound = ask(True, False, 2, 4, 4, 100, seqlen_k, 128, 128, -1, -1, False, deterministic, 0, *UNCHANGED)
    rows = 4 * 2 * 128  # of all heads, in blocks of 64
    assert bound >= 4 * rows * 128 + 4 * counters


@pytest.mark.skipif(ours.kernels.library() is None, reason="this flash_cute has no kernels for JAX")
def test_workspace_depends_on_the_mask():
    """Behind a window long sequences need no cleared sums, but what is added to each of two parts is counted;
    under a causal mask groups are split that else are whole (Hopper's, with 132 multiprocessors)."""
    ask = ours.kernels.library().flash_cute_jax_workspace
    rows = 3 * 25_600
    assert ask(True, False, 1, 3, 3, 25_600, 25_600, 128, 128, 1024, 0, False, False, 0, *UNCHANGED) >= 4 * (
        rows * 128 + 1 + 2 * rows // 64
    )
    rows, parts = 16 * 16 * 1024, 2 * 16 * 2 * 1024 * 128
    assert ask(True, False, 16, 16, 2, 1024, 1024, 128, 128, -1, 0, False, False, 0, *UNCHANGED) >= 4 * (
        rows * 128 + parts
    )


@pytest.mark.skipif(ours.kernels.library() is None, reason="this flash_cute has no kernels for JAX")
def test_workspace_holds_the_list_of_packed_heads():
    """With 132 multiprocessors and a causal mask, 8 heads share a tile of 24 queries: 6 for each sequence."""
    ask = ours.kernels.library().flash_cute_jax_workspace
    assert (
        ask(False, False, 400, 64, 8, 128, 128, 128, 128, -1, 0, True, False, 0, *UNCHANGED)
        >= 16 + 32 * 6 * 400
    )


@pytest.mark.skipif(ours.kernels.library() is None, reason="this flash_cute has no kernels for JAX")
def test_workspace_holds_ranges():
    """The ranges of all queries, and two bits for each pair of tiles, 192 queries and 128 keys at most."""
    ask = ours.kernels.library().flash_cute_jax_workspace
    for backward in (False, True):
        for count in (1, 4):
            bound = ask(
                backward, False, 3, 4, 4, 10_000, 50_000, 64, 64, -1, -1, False, False, count, *UNCHANGED
            )
            assert bound >= 3 * 10_000 * count * 8 + 3 * (10_000 // 192) * (50_000 // 128) // 4


def test_empty_within_shard_map():
    mesh, spec = mesh_of(shards=4), PartitionSpec("shards")
    q, k, v = inputs((4, 3, 0, 2, 1, 8, 5))
    for function, arrays in ((attention, (q, k, v)), (lambda x: ours.softmax(x)[0], (k,))):
        sharded = jax.shard_map(function, mesh=mesh, in_specs=(spec,) * len(arrays), out_specs=spec)
        gradients = jax.jit(jax.grad(loss_of(sharded), tuple(range(len(arrays)))))(*arrays)
        for x, array in zip(gradients, arrays, strict=True):
            np.testing.assert_array_equal(np.asarray(x, np.float32), np.zeros(array.shape))


def test_empty():
    q, k, v = inputs("narrower value")
    out, lse = jax.jit(partial(attention, return_residual=True))(q, k[:, :0], v[:, :0])
    assert out.shape == (2, 33, 6, 24)
    assert (out == 0).all()
    assert (lse == -jnp.inf).all()
    assert attention(q[:0], k[:0], v[:0]).shape == (0, 33, 6, 24)
    no_heads = q[:, :, :0], k[:, :, :0], v[:, :, :0]
    assert attention(*no_heads).shape == (2, 33, 0, 24)
    gradients = jax.grad(lambda *x: attention(*x).sum(), (0, 1, 2))(*no_heads)
    assert [x.shape for x in gradients] == [x.shape for x in no_heads]


@pytest.mark.skipif(ours.kernels.library() is None, reason="this flash_cute has no kernels for JAX")
@pytest.mark.parametrize("shape", ["grouped", "more queries", "wider value"])
def test_kernels_are_called_on_cuda(shape):
    """What is lowered for CUDA, where there need be none."""
    q, k, v = inputs(shape)

    def gradients(q, k, v):
        call = partial(attention, is_causal=True, ranges=some_ranges(1, q.shape[1], k.shape[1], 2))
        return jax.grad(lambda *x: call(*x).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)

    checks = [
        jax.export.DisabledSafetyCheck.custom_call(f"flash_cute_{name}") for name in ("forward", "backward")
    ]
    exported = jax.export.export(jax.jit(gradients), platforms=["cuda"], disabled_checks=checks)(q, k, v)
    text = exported.mlir_module()
    assert f"tensor<{len(q)}x{q.shape[1]}x2x2xi32>" in text  # ranges of each entry
    assert text.count("@flash_cute_forward") == 1
    assert text.count("@flash_cute_backward") == 1
    assert "stablehlo.dot_general" not in text


@pytest.mark.parametrize(
    ("dtype", "head_dims", "wide"),
    [
        (jnp.bfloat16, (40, 24), (40, 24)),
        (jnp.bfloat16, (13, 50), (16, 56)),
        (jnp.float32, (13, 50), (16, 52)),
        (jnp.float16, (192, 1), (192, 8)),
    ],
)
def test_widths_that_kernels_get(dtype, head_dims, wide, monkeypatch):
    """Each rounded up by itself to 16 bytes: in the calls that are lowered, and where workspaces are asked
    for."""
    asked = []
    library = SimpleNamespace(flash_cute_jax_workspace=lambda *x: asked.append(x) or 48)
    monkeypatch.setattr(dot_product_attention.kernels, "library", lambda: library)
    q, k, v = inputs((2, 5, 7, 4, 2, *head_dims), dtype)

    def call(q, k, v):
        out, backward = jax.vjp(attention, q, k, v)
        return out, *backward(out)

    checks = [
        jax.export.DisabledSafetyCheck.custom_call(f"flash_cute_{name}") for name in ("forward", "backward")
    ]
    exported = jax.export.export(jax.jit(call), platforms=["cuda"], disabled_checks=checks)(q, k, v)
    assert [x.shape for x in exported.out_avals] == [(2, 5, 4, head_dims[1]), *(x.shape for x in (q, k, v))]
    name = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[q.dtype.name]
    found = {}
    for line in exported.mlir_module().splitlines():
        if match := re.search(r"@flash_cute_(\w+)\(.* : \((.*)\) -> \((.*)\)", line):
            of_rows = rf"tensor<2x([57])x([24])x(\d+)x{name}>"
            found[match[1]] = [[tuple(map(int, x)) for x in re.findall(of_rows, match[i])] for i in (2, 3)]
    of_q, of_k, of_v, of_out = (5, 4, wide[0]), (7, 2, wide[0]), (7, 2, wide[1]), (5, 4, wide[1])
    assert found == {
        "forward": [[of_q, of_k, of_v], [of_out]],
        "backward": [[of_out, of_q, of_k, of_v, of_out], [of_q, of_k, of_v]],
    }
    assert {(x[0], *x[2:9]) for x in asked} == {
        (backward, 2, 4, 2, 5, 7, *wide) for backward in (False, True)
    }


def test_torch_is_not_imported():
    """Nor need flash_cute.jax be: it is found in the package."""
    program = (
        "import sys, jax.numpy as jnp, flash_cute\n"
        "flash_cute.jax.attention(*[jnp.ones((1, 4, 2, 8), jnp.bfloat16)] * 3)\n"
        "assert 'torch' not in sys.modules\n"
        "assert 'forward' in dir(flash_cute)\n"
        "assert flash_cute.forward.__module__ == 'flash_cute.dot_product_attention'\n"
        "assert 'torch' in sys.modules\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("line", ["import flash_cute.jax", "import flash_cute; flash_cute.jax"])
def test_without_jax(line):
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules['jax'] = None; {line}"],
        capture_output=True,
        text=True,
    )
    sentence = "ModuleNotFoundError: flash_cute.jax needs jax; pip install 'flash_cute[jax]'"
    assert ran.stderr.splitlines()[-1] == sentence


def changed(**changes):
    q, k, v = inputs("grouped")
    return SimpleNamespace(**({"query": q, "key": k, "value": v} | changes))


INT = jnp.ones((2,), jnp.int32)
WRONG = {
    "two dimensions": (ValueError, lambda t: {"query": t.query[0, 0]}, "query has 2 dimensions; 4"),
    "no query": (TypeError, lambda t: {"query": None}, "query is NoneType"),
    "query of text": (TypeError, lambda t: {"query": "a"}, "query is str"),
    "ragged key": (TypeError, lambda t: {"key": [[1], [1, 2]]}, "key is list"),
    "int32": (ValueError, lambda t: {"query": t.query.astype(jnp.int32)}, "query has dtype int32"),
    "precision": (ValueError, lambda t: {"precision": "medium"}, "precision must be 'highest', 'high'"),
    "precision of a number": (TypeError, lambda t: {"precision": 3}, "precision must be 'highest', 'high'"),
    "another dtype": (
        ValueError,
        lambda t: {"key": t.key.astype(jnp.float16)},
        "key has dtype float16 and query",
    ),
    "value's shape": (
        ValueError,
        lambda t: {"value": t.value[:, :5]},
        "value has shape (2, 5, 2, 40) and key (2, 33, 2, 40); they must be the same but for the last "
        "dimension",
    ),
    "key's head_dim": (
        ValueError,
        lambda t: {"key": t.key[..., :8]},
        "key has batch 2 and head_dim 8, and query 2 and 40; they must be the same",
    ),
    "wide query": (
        ValueError,
        lambda t: {"query": jnp.tile(t.query, 7), "key": jnp.tile(t.key, 7)},
        "head_dim is 280; 1 to 256 are accepted",
    ),
    "wide value": (
        ValueError,
        lambda t: {"value": jnp.tile(t.value, 7)},
        "head_dim of value is 280; 1 to 256 are accepted",
    ),
    "value of no columns": (
        ValueError,
        lambda t: {"value": t.value[..., :0]},
        "head_dim of value is 0; 1 to 256 are accepted",
    ),
    "batch": (ValueError, lambda t: {"key": t.key[:1], "value": t.value[:1]}, "key has batch 1"),
    "heads": (ValueError, lambda t: {"query": t.query[:, :, :5]}, "query has 5 heads and key 2"),
    "scale": (ValueError, lambda t: {"scale": 0.0}, "scale is 0.0"),
    "scale of text": (TypeError, lambda t: {"scale": "x"}, "scale is 'x'; a number"),
    "complex scale": (TypeError, lambda t: {"scale": 1j}, "scale is 1j"),
    "truth as scale": (TypeError, lambda t: {"scale": True}, "scale is True"),
    "scale of an array": (TypeError, lambda t: {"scale": np.ones((2, 2))}, "scale is array("),
    "large scale": (ValueError, lambda t: {"scale": 1e300}, "scale is 1e+300"),
    "huge scale": (ValueError, lambda t: {"scale": 10**400}, "finite in float32"),
    "tiny scale": (ValueError, lambda t: {"scale": 1e-60}, "scale is 1e-60"),
    "NaN as scale": (ValueError, lambda t: {"scale": float("nan")}, "scale is nan"),
    "bias": (
        ValueError,
        lambda t: {"bias": jnp.ones((2, 2, 5, 3))},
        "bias is float32[2, 2, 5, 3]; float32 or",
    ),
    "bias' type": (
        ValueError,
        lambda t: {"bias": INT.reshape(2, 1, 1, 1)},
        "bias is int32[2, 1, 1, 1]; float",
    ),
    "mask": (ValueError, lambda t: {"mask": jnp.ones((1, 1), bool)}, "mask is bool[1, 1]; bool ["),
    "mask's type": (
        ValueError,
        lambda t: {"mask": jnp.ones((1, 1, 1, 1))},
        "mask is float32[1, 1, 1, 1]; bool",
    ),
    "softcap": (
        ValueError,
        lambda t: {"softcap": -1},
        "softcap is -1; 0 or a normal number > 0 of float32 is accepted",
    ),
    "softcap below float32": (
        ValueError,
        lambda t: {"softcap": 1e-46},
        "softcap is 1e-46; 0 or a normal number",
    ),
    "softcap beyond float32": (
        ValueError,
        lambda t: {"softcap": 1e39},
        "softcap is 1e+39; 0 or a normal number",
    ),
    "softcap of text": (TypeError, lambda t: {"softcap": "x"}, "softcap is 'x'; a number is accepted"),
    "dropout_p": (ValueError, lambda t: {"dropout_p": 1.0}, "dropout_p is 1.0; a number from 0 to 0.99"),
    "dropout_p of text": (TypeError, lambda t: {"dropout_p": "x"}, "dropout_p is 'x'; a number is accepted"),
    "no seed": (ValueError, lambda t: {"dropout_p": 0.1}, "dropout_seed is None beside dropout_p; uint32[4]"),
    "seed": (
        ValueError,
        lambda t: {"dropout_p": 0.1, "dropout_seed": INT},
        "dropout_seed is int32[2]; uint32[4] or int64[2] is accepted",
    ),
    "implementation": (ValueError, lambda t: {"implementation": "xla"}, "implementation is given; None"),
    "lengths": (
        ValueError,
        lambda t: {"query_seq_lengths": INT[:1]},
        "query_seq_lengths is int32[1]; int32[2]",
    ),
    "lengths' type": (
        ValueError,
        lambda t: {"key_value_left_padding": INT.astype(jnp.float32)},
        "key_value_left_padding is float32[2]",
    ),
    "lengths of text": (ValueError, lambda t: {"query_seq_lengths": "ab"}, "query_seq_lengths is <U2[]"),
    "ragged lengths": (
        TypeError,
        lambda t: {"query_seq_lengths": [[1], [1, 2]]},
        "query_seq_lengths is list",
    ),
    "lengths of keys": (
        ValueError,
        lambda t: {"query_seq_lengths": jax.random.split(jax.random.key(0), 2)},
        "query_seq_lengths is key<fry>[2]",
    ),
    "list of keys": (
        TypeError,
        lambda t: {"query_seq_lengths": [jax.random.key(0)] * 2},
        "query_seq_lengths is list",
    ),
    "lengths and window": (
        ValueError,
        lambda t: {"key_value_seq_lengths": INT, "local_window_size": 3},
        "key_value_seq_lengths is given with local_window_size",
    ),
    "window": (ValueError, lambda t: {"local_window_size": (3, -1)}, "local_window_size is (3, -1)"),
    "window of one": (TypeError, lambda t: {"local_window_size": (3,)}, "local_window_size is (3,)"),
    "window of text": (TypeError, lambda t: {"local_window_size": "ab"}, "local_window_size is 'ab'"),
    "fraction": (TypeError, lambda t: {"local_window_size": (3.5, 1)}, "local_window_size is (3.5, 1)"),
    "truth as window": (TypeError, lambda t: {"local_window_size": True}, "local_window_size is True"),
    "truth and two": (TypeError, lambda t: {"local_window_size": (True, 1, 2)}, "is (True, 1, 2); a number"),
    "deterministic": (TypeError, lambda t: {"deterministic": 1}, "deterministic is 1; True or False"),
    "return_residual": (TypeError, lambda t: {"return_residual": None}, "return_residual is None"),
    "causal": (TypeError, lambda t: {"is_causal": 1}, "is_causal is 1; True or False"),
}


@pytest.mark.parametrize(("kind", "change", "words"), WRONG.values(), ids=WRONG)
def test_wrong_calls(kind, change, words):
    arguments = changed()
    with pytest.raises(kind) as raised:
        attention(**(vars(arguments) | change(arguments)))
    assert str(raised.value).startswith("flash_cute.jax.attention: ")
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_traced_arguments():
    """Of what must be a Python value: one sentence."""
    q, k, v = inputs("grouped")
    for call, given, words in (
        (lambda x: attention(q, k, v, scale=x), 0.5, "attention: scale is traced"),
        (lambda x: attention(q, k, v, local_window_size=x), 3, "local_window_size is traced"),
        (lambda x: attention(q, k, v, local_window_size=(1, x)), 3, "local_window_size is traced"),
        (lambda x: attention(q, k, v, is_causal=x), True, "is_causal is"),
        (lambda x: attention(q, k, v, softcap=x), 0.5, "softcap is traced"),
        (lambda x: attention(q, k, v, dropout_p=x), 0.5, "dropout_p is traced"),
        (lambda x: ours.softmax(q, scale=x), 0.5, "softmax: scale is traced"),
        (lambda x: ours.softmax(q, causal=x), True, "causal is"),
    ):
        with pytest.raises(TypeError, match=words) as raised:
            jax.jit(call)(given)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("argument", ["scale", "local_window_size", "is_causal"])
@pytest.mark.parametrize("value", [["text"] * 1000, 2**20000], ids=["list", "integer"])
def test_long_values_are_cut(argument, value):
    value = -value if argument == "local_window_size" and isinstance(value, int) else value
    with pytest.raises((TypeError, ValueError)) as raised:
        attention(*inputs("grouped"), **{argument: value})
    assert str(raised.value).startswith(f"flash_cute.jax.attention: {argument} is ")
    assert len(str(raised.value)) < 250


def test_numbers_of_numpy():
    q, k, v = inputs("grouped")
    options = {"scale": np.float32(0.5), "local_window_size": np.int64(3)}
    close(attention(q, k, v, **options), attention(q, k, v, scale=0.5, local_window_size=3))
    close(attention(q, k, v, local_window_size=[np.int8(3), 0]), attention(q, k, v, local_window_size=(3, 0)))
    close(ours.softmax(q, scale=np.float64(2)), ours.softmax(q, scale=2))


@matrix(
    dtype={"fp32": jnp.float32, "fp16": jnp.float16, "bf16": jnp.bfloat16},
    magnitude=[3, 3000],
    causal=[False, True],
)
def test_softmax(causal, magnitude, dtype):
    """Values and gradients; what is hidden holds NaN."""
    x = magnitude * jax.random.normal(jax.random.key(1), (4, 3, 9, 40)).astype(dtype)
    used, skipped = jnp.array([40, 11, 0, 6], jnp.int32), jnp.array([0, 5, 1, 6], jnp.int32)
    columns, rows = np.arange(40), np.arange(9)[:, None]
    end, begin = (np.asarray(y)[:, None, None, None] for y in (used, skipped))
    seen = (begin <= columns) & (columns < end) & ((columns <= rows - 9 + end) if causal else True)
    seen = np.broadcast_to(seen, x.shape)
    dprobabilities, dlse = (
        np.random.default_rng(2).standard_normal(shape) for shape in (x.shape, x.shape[:-1])
    )
    dirty = np.where(seen, np.asarray(x, np.float32), np.nan).astype(x.dtype)

    @jax.jit
    def call(x, *gradients):
        options = {"scale": 0.5, "causal": causal, "seqused_k": used, "leftpad_k": skipped}
        results, backward = jax.vjp(partial(ours.softmax, **options), x)
        return *results, *backward(gradients)

    found = call(dirty, dprobabilities.astype(x.dtype), dlse.astype(np.float32))

    def by_numpy(rounded):
        scores = np.where(seen, rounded(0.5 * np.asarray(x, np.float64)), -np.inf)
        highest = np.where(seen.any(-1, keepdims=True), scores.max(-1, keepdims=True), 0)
        weights = np.exp(scores - highest)
        total = weights.sum(-1, keepdims=True)
        with np.errstate(divide="ignore"):
            lse = np.where(total > 0, np.log(total) + highest, -np.inf)[..., 0]
        p = rounded(weights / np.where(total > 0, total, 1))
        dp = dprobabilities.astype(x.dtype).astype(np.float64)
        dx = 0.5 * p * (dp - (p * dp).sum(-1, keepdims=True) + dlse.astype(np.float32)[..., None])
        return p, lse, rounded(dx)

    oracle = by_numpy(lambda y: y)
    yardstick = by_numpy(lambda y: y.astype(x.dtype).astype(np.float64))
    for name, *triple in zip(("probabilities", "lse", "dx"), found, yardstick, oracle, strict=True):
        assert_within_rule(name, *triple)
    assert (np.asarray(found[0], np.float32)[~seen] == 0).all()


@pytest.mark.skipif(ours.kernels.library() is None, reason="this flash_cute has no kernels for JAX")
def test_softmax_kernels_are_called_on_cuda():
    names = "flash_cute_softmax", "flash_cute_softmax_backward"
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]
    gradient = jax.jit(jax.grad(lambda x: (ours.softmax(x, causal=True)[0] ** 2).sum()))
    exported = jax.export.export(gradient, platforms=["cuda"], disabled_checks=checks)(jnp.ones((4, 8)))
    for name in names:
        assert exported.mlir_module().count(f"@{name}(") == 1


def test_transforms_of_softmax():
    x = jax.random.normal(jax.random.key(5), (3, 4, 5, 30))
    used = jnp.array([30, 7, 0, 12], jnp.int32)

    def gradient(x, used):
        def loss(x):
            probabilities, lse = ours.softmax(x, causal=True, seqused_k=used)
            return (probabilities**2).sum() + jnp.exp(lse).sum()

        return jax.grad(loss)(x)

    mapped = jax.jit(jax.vmap(gradient, (0, None)))(x, used)
    each = jnp.stack([jax.jit(gradient)(entry, used) for entry in x])
    np.testing.assert_allclose(mapped, each, rtol=1e-5, atol=1e-6)


def test_wrong_softmax():
    for kind, call, words in (
        (ValueError, lambda: ours.softmax(jnp.ones(3, jnp.int32)), "x has dtype int32"),
        (ValueError, lambda: ours.softmax(jnp.ones(3), causal=True), "x has 1 dimensions; at least 2"),
        (ValueError, lambda: ours.softmax(jnp.ones(3), scale=0), "scale is 0"),
        (ValueError, lambda: ours.softmax(jnp.ones(3), scale=1e-60), "scale is 1e-60"),
        (ValueError, lambda: ours.softmax(jnp.ones((2, 3)), seqused_k=INT[:1]), "seqused_k is int32[1]"),
        (TypeError, lambda: ours.softmax("a"), "x is str"),
        (TypeError, lambda: ours.softmax(jnp.ones(3), scale="x"), "scale is 'x'"),
        (TypeError, lambda: ours.softmax(jnp.ones((2, 3)), causal=2), "causal is 2"),
        (TypeError, lambda: ours.softmax(jnp.ones((2, 3)), causal="x"), "causal is 'x'"),
    ):
        with pytest.raises(kind, match=re.escape(f"flash_cute.jax.softmax: {words}")):
            call()


def test_snippets_of_the_page():
    """The code of docs/jax.md, block after block."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "jax.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    names: dict = {}
    for block in blocks:
        exec(block, names)
    assert all(jnp.isfinite(x.astype(jnp.float32)).all() for x in (names["out"], *names["gradients"]))
    assert names["dbias"].shape == names["bias"].shape


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_example(tmp_path, dtype):
    """In a small size: what it computes agrees with float64."""
    root = Path(__file__).resolve().parents[2]
    program = [sys.executable, str(root / "examples" / "jax_gpt2.py"), "--batch=2", "--tokens=48"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(root)])}
    ran = subprocess.run(
        [*program, f"--dtype={dtype}", "--plot=times.png"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "all agree with float64" in ran.stdout
    assert (tmp_path / "times.png").stat().st_size > 0


# What is given for each option, and what the computation gets of it.
OPTIONS = {
    "scale": (0.3, lambda lengths, options: options.scale == 0.3),
    "is_causal": (True, lambda lengths, options: options.right == 0),
    "query_seq_lengths": (jnp.array([3, 2]), lambda lengths, options: lengths[0].tolist() == [3, 2]),
    "key_value_seq_lengths": (jnp.array([3, 2]), lambda lengths, options: lengths[1].tolist() == [3, 2]),
    "key_value_left_padding": (jnp.array([1, 0]), lambda lengths, options: lengths[2].tolist() == [1, 0]),
    "local_window_size": ((2, 1), lambda lengths, options: (options.left, options.right) == (2, 1)),
    "ranges": (
        jnp.ones((1, 1, 4, 1, 2), jnp.int32),
        lambda lengths, options: lengths[3].shape == (1, 4, 1, 2),
    ),
    "deterministic": (True, lambda lengths, options: options.deterministic),
    "return_residual": (True, lambda lengths, options: options.gives_lse),
    "sinks": (jnp.zeros(2), lambda lengths, options: options.gives_lse),
    "precision": ("high", lambda lengths, options: options.tf32),
    "mask": (jnp.ones((1, 1, 1, 4), bool), lambda given, options: given.mask.shape == (1, 1, 1, 4)),
    "bias": (jnp.ones((1, 1, 1, 4)), lambda given, options: given.bias.shape == (1, 1, 1, 4)),
    "softcap": (2.0, lambda given, options: options.softcap == 2),
    "dropout_p": (1e-6, lambda given, options: (options.keep, given.seed) == (4096, None)),
    "dropout_seed": (
        jnp.arange(4, dtype=jnp.uint32),
        lambda given, options: options.keep == 2048 and given.seed.tolist() == [0, 1, 2, 3],
    ),
}


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_reaches_the_computation(option, mapped, monkeypatch):
    refused = {"query", "key", "value", "implementation"}
    assert OPTIONS.keys() == inspect.signature(attention).parameters.keys() - refused
    value, reached = OPTIONS[option]
    seen = []

    def plain(query, key, value, lengths, options):
        seen.append(reached(lengths, options))
        return jnp.zeros_like(query), jnp.zeros((2, 2, 4))

    monkeypatch.setattr(dot_product_attention.plain, "attention", plain)
    monkeypatch.setattr(dot_product_attention.kernels, "library", lambda: None)
    q = jnp.ones((2, 4, 2, 8))
    function = partial(
        attention, **{option: value} | ({"dropout_p": 0.5} if option == "dropout_seed" else {})
    )
    with jax.disable_jit():
        jax.vmap(function)(*[q[None]] * 3) if mapped else function(q, q, q)
    assert seen
    assert all(seen)


@pytest.mark.parametrize(
    ("face", "name", "hint"),
    [
        ("attention", "causal", "; did you mean is_causal?"),
        ("attention", "window_size", "; did you mean local_window_size?"),
        ("attention", "seqused_k", "; did you mean key_value_seq_lengths?"),
        ("attention", "leftpad_k", "; did you mean key_value_left_padding?"),
        ("attention", "s_aux", "; did you mean sinks?"),
        (
            "attention",
            "attn_mask",
            "; did you mean mask, where True is seen, or bias, which is added to scores?",
        ),
        ("attention", "dropout", "; did you mean dropout_p?"),
        ("softmax", "softmax_scale", "; did you mean scale?"),
    ],
)
def test_names_of_other_libraries(face, name, hint):
    x = jnp.ones((1, 3, 2, 8))
    with pytest.raises(TypeError) as caught:
        getattr(ours, face)(*[x] * (3 if face == "attention" else 1), **{name: 1})
    assert str(caught.value) == f"flash_cute.jax.{face}: there is no argument {name}{hint}"


@pytest.mark.skipif(ours.kernels.library() is None, reason="this flash_cute has no kernels for JAX")
def test_workspace_holds_masks_of_pairs():
    """Their bits, in rows of a multiple of 128 keys, of each entry, head and query that they tell apart."""
    ask = ours.kernels.library().flash_cute_jax_workspace
    for backward in (False, True):
        for mask, rows in (((3, 4, 10_000), 3 * 4 * 10_000), ((1, 1, 10_000), 10_000), ((3, 1, 1), 3)):
            of_scores = *mask, *[0] * 4, False, 4096
            bound = ask(backward, False, 3, 4, 4, 10_000, 50_000, 64, 64, -1, -1, False, False, 0, *of_scores)
            assert bound >= rows * 50_048 // 8
