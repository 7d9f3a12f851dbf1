"""flash_cute.jax: the gradient of a bias under transforms, and softmax_matmul, which has a bias alone."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest
from support.cases import matrix

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import PartitionSpec  # noqa: E402
from support.jax_cases import (  # noqa: E402
    SEEDS,
    TOLD_APART,
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
from flash_cute.jax import attention, dot_product_attention, softmax_matmul  # noqa: E402

needs_kernels = pytest.mark.skipif(
    ours.kernels.library() is None, reason="this flash_cute has no kernels for JAX"
)


def some_bias(q, k, axes, dtype=jnp.float32):
    return jnp.asarray(4 * some_pairs(q, k, TOLD_APART[axes]) - 2, dtype)


@pytest.mark.parametrize("axes", TOLD_APART)
def test_a_bias_as_jax_has_it(axes):
    """By each of the transforms, those of jax.nn.dot_product_attention."""
    q, k, v = inputs("grouped", jnp.float32)
    bias = some_bias(q, k, axes)
    many = jnp.stack([q, 2 * q, q[::-1]])

    def gradients(attention):
        loss = loss_of(lambda q, bias: attention(q, k, v, bias, is_causal=True))
        gradient = jax.grad(loss, 1)
        mapped = jax.vmap(gradient, (0, None))(many, bias)
        total = jax.grad(lambda bias: jax.vmap(loss, (0, None))(many, bias).sum())(bias)
        again = jax.grad(jax.checkpoint(loss), (0, 1))(q, bias)
        both = jax.vmap(gradient)(many, jnp.stack([bias, bias + 1, -bias]))
        return *jax.value_and_grad(loss, 1)(q, bias), mapped, total, again, both

    expected = jax.jit(partial(gradients, jax.nn.dot_product_attention))()
    close(jax.jit(partial(gradients, attention))(), expected)
    close(gradients(attention), expected)


def test_a_rounded_bias():
    """Through the cast of float32 beside 16 bits: what the rounded one has, in float32."""
    q, k, v = inputs("grouped")
    bias = some_bias(q, k, "pairs", jnp.bfloat16)
    gradient = jax.jit(jax.grad(loss_of(partial(attention, q, k, v))))
    wide = gradient(bias.astype(jnp.float32))
    assert wide.dtype == jnp.float32
    np.testing.assert_array_equal(wide, gradient(bias).astype(jnp.float32))
    low = jnp.full((1, 1, 1, 33), jnp.finfo(jnp.bfloat16).min, jnp.float32)
    close(gradient(low), gradient(low.astype(q.dtype)))
    assert np.isfinite(gradient(jnp.finfo(jnp.float32).min * jnp.ones_like(low))).all()


@pytest.mark.parametrize("is_mapped", [False, True])
def test_a_bias_of_mapped_calls_with_dropout(is_mapped):
    """Which the kernels run for one entry after the other."""
    q, k, v = inputs("grouped", jnp.float32)
    bias = some_bias(q, k, "queries")
    seeds = jax.random.bits(jax.random.key(0), (2, 4), jnp.uint32)
    given = jnp.stack([bias, -bias]) if is_mapped else bias

    def gradient(bias, seed, skipped):
        options = {"dropout_p": 0.5, "dropout_seed": seed, "key_value_left_padding": skipped, "softcap": 2.0}
        return jax.grad(loss_of(partial(attention, q, k, v, **options)))(bias)

    skipped = jnp.array([[0, 3], [5, 33]], jnp.int32)
    found = jax.jit(jax.vmap(gradient, (0 if is_mapped else None, 0, 0)))(given, seeds, skipped)
    for entry in range(2):
        close(found[entry], gradient(given[entry] if is_mapped else bias, seeds[entry], skipped[entry]))


@pytest.mark.parametrize(
    ("shape", "options"),
    [("more queries", {"local_window_size": (7, 3)}), ("more keys", {"is_causal": True})],
)
def test_a_bias_beside_what_cuts_queries_and_keys(shape, options):
    """Queries or keys that none of the others sees have a gradient of 0."""
    q, k, v = inputs(shape, jnp.float32)
    bias = some_bias(q, k, "pairs")
    found, expected = (
        jax.grad(loss_of(lambda bias, call=call: call(q, k, v, bias, **options)[:, :20]))(bias)
        for call in (attention, jax.nn.dot_product_attention)
    )
    close(found, expected)
    seen = visible(q, k, **options) & (np.arange(q.shape[1]) < 20)[:, None]
    assert (np.asarray(found)[np.broadcast_to(~seen[:, None], found.shape)] == 0).all()


def test_a_shared_bias_of_shards():
    """Its gradient is summed over the shards, also where types name the mesh's axes."""
    q, k, v = inputs((4, 9, 9, 4, 2, 16), jnp.float32)
    bias = some_bias(q, k, "all alike")
    gradient = jax.grad(loss_of(attention), 3)
    expected = gradient(q, k, v, bias)
    spec, whole, mesh = PartitionSpec("shards"), PartitionSpec(), mesh_of(shards=2)
    inside = jax.shard_map(gradient, mesh=mesh, in_specs=(spec,) * 3 + (whole,), out_specs=whole)
    around = jax.shard_map(attention, mesh=mesh, in_specs=(spec,) * 3 + (whole,), out_specs=spec)
    close(jax.jit(inside)(q, k, v, bias), expected)
    close(jax.jit(jax.grad(loss_of(around), 3))(q, k, v, bias), expected)
    kind = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((2,), ("shards",), axis_types=kind, devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        close(gradient(*(jax.sharding.reshard(x, spec) for x in (q, k, v)), bias), expected)


def test_an_empty_bias():
    q, k, v = inputs("grouped", jnp.float32)
    for bias in (jnp.ones((1, 6, 33, 1)), jnp.ones((2, 1, 33, 0))):
        gradient = jax.grad(loss_of(lambda bias: attention(q, k[:, :0], v[:, :0], bias)))(bias)
        assert gradient.shape == bias.shape
        assert (gradient == 0).all()


def lowered(function, *arguments):
    names = "forward", "backward", "bias_gradient"
    checks = [jax.export.DisabledSafetyCheck.custom_call(f"flash_cute_{name}") for name in names]
    text = jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=checks)(*arguments)
    text = text.mlir_module()
    assert "stablehlo.dot_general" not in text
    return [text.count(f"@flash_cute_{name}(") for name in names]


@needs_kernels
def test_kernels_of_a_bias_on_cuda():
    """Each gradient is computed where it is asked for."""
    q, k, v = inputs("grouped")
    bias = some_bias(q, k, "pairs", q.dtype)
    for argument, expected in ((0, [1, 1, 0]), (3, [1, 0, 1]), ((0, 3), [1, 1, 1])):
        gradient = jax.grad(loss_of(attention), argument)
        assert lowered(gradient, q, k, v, bias) == expected
    mapped = jax.vmap(jax.grad(loss_of(attention), 3), (0, None, None, None))
    assert lowered(mapped, jnp.stack([q, q]), k, v, bias) == [1, 0, 1]
    assert lowered(jax.grad(loss_of(lambda *x: softmax_matmul(*x)[0]), (0, 1)), bias, v) == [1, 1, 1]


def test_a_bias_that_nothing_differentiates(monkeypatch):
    """Outside jit, too, it costs nothing."""
    q, k, v = inputs("grouped")
    bias = some_bias(q, k, "pairs")
    monkeypatch.setattr(dot_product_attention, "_bias_gradient", None)
    jax.grad(loss_of(attention))(q, k, v, bias)
    with pytest.raises(TypeError):
        jax.grad(loss_of(attention), 3)(q, k, v, bias)


@needs_kernels
def test_workspace_of_a_bias():
    """LSE and delta of each row, and where its sums have few tiles, those of parts in float32."""
    ask = partial(ours.kernels.library().flash_cute_jax_workspace, 2, 1)
    of_call = 4, 8, 8, 1024, 1024, 64, 64, -1, 0, False, False, 0, 0, 0, 0
    rows = 4 * 8 * 1024
    assert ask(*of_call, 4, 8, 1024, 1024, False, 4096) >= 2 * 4 * rows
    assert ask(*of_call, 1, 1, 1024, 1024, False, 4096) >= 4 * (2 * rows + 4 * 1024 * 1024)
    assert ask(*of_call, 0, 8, 1024, 1024, False, 4096) == 0


# softmax_matmul


LENGTHS = {
    "whole": {},
    "padded": {
        "seqused_q": jnp.array([33, 20, 9, 0], jnp.int32),
        "seqused_k": jnp.array([40, 11, 0, 7], jnp.int32),
        "leftpad_k": jnp.array([3, 0, 1, 7], jnp.int32),
    },
}


def seen_by(shape, causal, seqused_q=None, seqused_k=None, leftpad_k=None):
    """bool, of the shape (batch, heads, seqlen_q, seqlen_k)."""
    default = np.full(shape[0], shape[2]), np.full(shape[0], shape[3]), np.zeros(shape[0], int)
    used_q, used_k, skipped = (
        np.asarray(y if x is None else x)[:, None, None, None]
        for x, y in zip((seqused_q, seqused_k, leftpad_k), default, strict=True)
    )
    rows, keys = np.arange(shape[2])[:, None], np.arange(shape[3])
    seen = (rows < used_q) & (skipped <= keys) & (keys < used_k)
    seen = seen & (keys <= rows + used_k - used_q) if causal else seen
    return np.broadcast_to(seen, shape)


@matrix(
    dtype={"fp32": jnp.float32, "fp16": jnp.float16, "bf16": jnp.bfloat16},
    lengths=LENGTHS,
    causal=[False, True],
    shared=[(False, False), (True, False), (False, True), (True, True)],
    scores=["alone", "changed"],
)
def test_softmax_matmul(dtype, lengths, causal, shared, scores):
    """Values and gradients, of one x for all entries or heads; what is hidden holds NaN."""
    _, _, v = inputs((4, 33, 40, 6, 2, 8, 24), dtype)
    heads = 2 if shared[1] else 6
    q, k = (jnp.zeros((4, rows, width, 8), dtype) for rows, width in ((33, heads), (40, 2)))
    x = 2 * np.random.default_rng(5).standard_normal((1 if shared[0] else 4, 1 if shared[1] else 6, 33, 40))
    x = jnp.asarray(x, dtype)
    options, changes = {"scale": 0.3, "causal": causal, **lengths}, {}
    seen = seen_by((4, heads, 33, 40), causal, **lengths)
    if scores == "changed":
        options |= {"mask": some_pairs(q, k, TOLD_APART["pairs"]) < 0.8, "deterministic": True}
        options |= {"dropout_p": 0.3, "dropout_seed": np.array(SEEDS[0], np.int64)}
        changes = {"kept": factors_of(q, k, SEEDS[0], 0.3)}
        seen = seen & options["mask"]
    dout, dlse = gradients_of_results(q, v)
    scaled = np.float32(0.3) * np.asarray(x, np.float64)
    expected = [
        math(q, k, v, dout, dlse, seen, 1.0, rounded, bias=scaled, **changes)
        for rounded in (lambda y: y.astype(dtype).astype(np.float64), lambda y: y)
    ]
    common = seen.any(tuple(axis for axis in (0, 1) if shared[axis]), keepdims=True)
    dirty = jnp.where(common, x, jnp.nan)

    @jax.jit
    def call(x, v, dout, dlse):
        results, gradients = jax.vjp(partial(softmax_matmul, **options), x, v)
        return *results, *gradients((dout, dlse))

    out, lse, dx, dv = call(dirty, v, dout, dlse)
    assert (np.asarray(dx, np.float32)[~np.broadcast_to(common, x.shape)] == 0).all()
    pairs = {"out": (out, 0), "lse": (lse, 1), "dv": (dv, 4), "dx": (np.asarray(dx, np.float64) / 0.3, 5)}
    for name, (found, place) in pairs.items():
        assert_within_rule(name, found, *(of[place] for of in expected))


def test_softmax_matmul_of_gpt2():
    """float32 within 5e-7 of jax.numpy at its highest precision."""
    scores, v = (
        jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))
        for seed, shape in enumerate(((1, 12, 1024, 1024), (1, 1024, 12, 64)))
    )
    dout = v[:, ::-1]
    skipped = jnp.array([300], jnp.int32)

    def plain(x, v):
        place = jnp.arange(1024)
        seen = (place <= place[:, None]) & (place >= skipped[:, None, None, None])
        weights = jnp.where(seen, jax.nn.softmax(jnp.where(seen, x, -1e30)), 0)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v, precision="highest")

    def results(function, scores, v, dout):
        out, gradients = jax.vjp(function, scores, v)
        return out, *gradients(dout)

    with jax.default_matmul_precision("highest"):
        found, expected = (
            jax.jit(partial(results, function))(scores, v, dout)
            for function in (lambda *x: softmax_matmul(*x, causal=True, leftpad_k=skipped)[0], plain)
        )
    assert np.linalg.norm(found[0] - expected[0]) <= 5e-7 * np.linalg.norm(expected[0])
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=5e-5)


def test_softmax_matmul_of_two_dimensions():
    x, v = jnp.asarray(np.random.default_rng(1).standard_normal((2, 9, 9), np.float32))
    mask = x > -1
    found = softmax_matmul(x, v, causal=True, mask=mask, leftpad_k=[2])
    whole = softmax_matmul(x[None, None], v[None, :, None], causal=True, mask=mask[None, None], leftpad_k=[2])
    assert found[0].shape == (9, 9)
    assert found[1].shape == (9,)
    close(found, [y[0, :, 0] for y in whole])
    close(softmax_matmul(x, v), (jax.nn.softmax(x) @ v, jax.nn.logsumexp(x, -1)))


def test_softmax_matmul_under_transforms():
    _, _, v = inputs((2, 9, 9, 4, 2, 16), jnp.float32)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 4, 9, 9), np.float32))

    def loss(x, v):
        out, lse = softmax_matmul(x, v, scale=0.5, causal=True)
        return (out**2).sum() + (lse**2).sum()

    gradient = jax.grad(loss, (0, 1))
    expected = gradient(x, v)
    close(jax.jit(gradient)(x, v), expected)
    close(jax.grad(jax.checkpoint(loss), (0, 1))(x, v), expected)
    mapped = jax.jit(jax.vmap(gradient, (0, None)))(jnp.stack([x, -x]), v)
    close(mapped, jax.tree.map(lambda *y: jnp.stack(y), expected, gradient(-x, v)))
    for argument in (0, 1):
        second = loss_of(jax.grad(loss, argument))
        with pytest.raises(
            NotImplementedError, match=r"^flash_cute\.jax\.softmax_matmul: there are no second"
        ):
            jax.grad(second, argument)(x, v)
    kind = (jax.sharding.AxisType.Explicit,) * 2
    mesh_of(batch=2, heads=2)  # or skip
    mesh = jax.make_mesh((2, 2), ("batch", "heads"), axis_types=kind, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        spec = PartitionSpec("batch", None, "heads", None)
        close(jax.jit(gradient)(x, jax.sharding.reshard(v, spec)), expected)


def test_an_empty_softmax_matmul():
    out, lse = softmax_matmul(jnp.ones((1, 1, 3, 0)), jnp.ones((2, 0, 4, 8)))
    assert out.shape == (2, 3, 4, 8)
    assert (out == 0).all()
    assert (lse == -jnp.inf).all()
    assert softmax_matmul(jnp.ones((2, 4, 0, 5)), jnp.ones((2, 5, 4, 8)))[0].shape == (2, 0, 4, 8)


X, V = jnp.ones((2, 4, 3, 5)), jnp.ones((2, 5, 2, 8))
WRONG = {
    "dimensions": (
        ValueError,
        {"x": X[0]},
        "x has 3 dimensions and v 4; 4, or 2 without batch and heads, are",
    ),
    "text": (TypeError, {"v": "a"}, "v is str"),
    "dtype of v": (ValueError, {"v": V.astype(jnp.int32)}, "v has dtype int32; float32, float16"),
    "dtype of x": (
        ValueError,
        {"x": X.astype(jnp.float16)},
        "x is float16[2, 4, 3, 5]; float32[2 or 1, heads",
    ),
    "batch": (ValueError, {"x": X[:0]}, "x is float32[0, 4, 3, 5]; float32[2 or 1, heads"),
    "heads": (
        ValueError,
        {"x": X[:, :3]},
        "x is float32[2, 3, 3, 5]; float32[2 or 1, heads, seqlen_q, 5], heads 1 or a multiple of 2, is",
    ),
    "keys": (ValueError, {"x": X[..., :4]}, "x is float32[2, 4, 3, 4]"),
    "head_dim": (ValueError, {"v": jnp.ones((2, 5, 2, 257))}, "v has head_dim 257; 1 to 256 are accepted"),
    "scale": (ValueError, {"scale": -1.0}, "scale is -1.0; a number > 0"),
    "causal": (TypeError, {"causal": 1}, "causal"),
    "lengths": (ValueError, {"seqused_k": [1]}, "seqused_k is int64[1]; int32[2]"),
    "mask": (
        ValueError,
        {"mask": X},
        "mask is float32[2, 4, 3, 5]; bool [2 or 1, 4 or 1, 3 or 1, 5 or 1] is",
    ),
    "seed": (ValueError, {"dropout_p": 0.5}, "dropout_seed is None beside dropout_p"),
    "precision": (ValueError, {"precision": "low"}, "precision must be 'highest', 'high' or None"),
    "name": (TypeError, {"is_causal": True}, "there is no argument is_causal; did you mean causal?"),
    "mask of SDPA": (TypeError, {"attn_mask": X}, "there is no argument attn_mask; did you mean mask?"),
}


@pytest.mark.parametrize(("kind", "change", "words"), WRONG.values(), ids=WRONG)
def test_wrong_calls(kind, change, words):
    with pytest.raises(kind, match=re.escape(f"flash_cute.jax.softmax_matmul: {words}")):
        softmax_matmul(**{"x": X, "v": V} | change)
