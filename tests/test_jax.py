"""flash_cute.jax: values and gradients against float64, JAX's semantics, transforms, lowering for CUDA."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory of the same GPU
jax = pytest.importorskip("jax")
jax.config.update("jax_num_cpu_devices", 4)  # for shard_map

import jax.numpy as jnp  # noqa: E402
from jax.sharding import PartitionSpec  # noqa: E402

import flash_cute.jax as ours  # noqa: E402
from flash_cute.jax import attention  # noqa: E402

FACTOR, SLACK = 2.0, 1e-5  # tests/tolerance.py has the rule
SHAPES = {  # batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim
    "grouped": (2, 33, 33, 6, 2, 40),
    "more keys": (1, 20, 75, 2, 1, 32),
    "more queries": (1, 75, 20, 2, 1, 20),
}
MASKS = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (7, 3)},
    "causal window": {"is_causal": True, "local_window_size": 9},
}


def inputs(shape, dtype=jnp.bfloat16):
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim = (
        SHAPES[shape] if isinstance(shape, str) else shape
    )
    keys = jax.random.split(jax.random.key(7), 3)
    sizes = [(batch, seqlen_q, heads_q, head_dim), *[(batch, seqlen_k, heads_kv, head_dim)] * 2]
    return [jax.random.normal(key, size).astype(dtype) for key, size in zip(keys, sizes, strict=True)]


def visible(q, k, is_causal=False, local_window_size=None, used_q=None, used_k=None, skipped=None):
    """bool (batch, seqlen_q, seqlen_k), by JAX's rules written out."""
    rows, keys = np.arange(q.shape[1])[None, :, None], np.arange(k.shape[1])[None, None, :]
    seen = np.ones((q.shape[0], q.shape[1], k.shape[1]), bool)
    if is_causal:
        seen &= keys <= rows
    if local_window_size is not None:
        left, right = np.broadcast_to(local_window_size, 2)
        seen &= (rows - left <= keys) & (keys <= rows + right)
    for used, places in ((used_q, rows), (used_k, keys)):
        if used is not None:
            seen &= places < np.asarray(used)[:, None, None]
    return seen if skipped is None else seen & (keys >= np.asarray(skipped)[:, None, None])


def math(q, k, v, dout, dlse, seen, scale, rounded):
    """out, lse, dq, dk and dv in float64, each step rounded; 0 and -inf for rows that see nothing."""
    groups = q.shape[2] // k.shape[2]
    q, k, v, dout = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (q, k, v, dout))
    wide_k, wide_v = (x.repeat(groups, 1) for x in (k, v))
    scores = np.where(seen[:, None], rounded(scale * rounded(q @ wide_k.mT)), -np.inf)
    blind = ~seen.any(-1)[:, None, :, None]
    scores = np.where(blind, 0, scores)
    highest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - highest)
    total = weights.sum(-1, keepdims=True)
    p = np.where(blind, 0, rounded(weights / total))
    lse = np.where(blind, -np.inf, highest + np.log(total))[..., 0]
    dp = rounded(dout @ wide_v.mT)
    dlse = np.where(blind[..., 0], 0, np.asarray(dlse, np.float64).swapaxes(1, 2))
    ds = rounded(scale * rounded(p * (dp - (p * dp).sum(-1, keepdims=True) + dlse[..., None])))
    dk, dv = (rounded(x).reshape(len(k), -1, groups, *k.shape[2:]).sum(2) for x in (ds.mT @ q, p.mT @ dout))
    out, dq, dk, dv = (rounded(x).swapaxes(1, 2) for x in (p @ wide_v, ds @ wide_k, dk, dv))
    return out, lse.swapaxes(1, 2), dq, dk, dv


def assert_within_rule(name, result, yardstick, oracle):
    result, yardstick, oracle = (np.asarray(x, np.float64) for x in (result, yardstick, oracle))
    assert result.shape == oracle.shape
    assert (np.isfinite(result) == np.isfinite(oracle)).all(), name
    finite = np.isfinite(oracle)
    errors = [np.abs(x[finite] - oracle[finite]) for x in (result, yardstick)]
    for norm in (np.max, lambda x: np.sqrt(np.mean(x**2))):
        error, allowed = map(norm, errors)
        assert error <= FACTOR * allowed + SLACK, f"{name}: error {error:.3e}, the type's own {allowed:.3e}"


def assert_attention(q, k, v, scale=None, key_value_left_padding=None, **options):
    """Values and gradients, with NaN in the keys that nobody sees."""
    lengths = {"used_q": "query_seq_lengths", "used_k": "key_value_seq_lengths"}
    named = {short: options.get(name) for short, name in lengths.items()}
    masks = {name: value for name, value in options.items() if name not in lengths.values()}
    seen = visible(q, k, skipped=key_value_left_padding, **named, **masks)
    generator = np.random.default_rng(3)
    dout = generator.standard_normal(q.shape).astype(q.dtype)
    dlse = generator.standard_normal(q.shape[:3]).astype(np.float32)

    @jax.jit
    def call(q, k, v, dout, dlse):
        options_of_call = {"key_value_left_padding": key_value_left_padding, **options}
        function = partial(attention, scale=scale, return_residual=True, **options_of_call)
        results, gradients = jax.vjp(function, q, k, v)
        return *results, *gradients((dout, dlse))

    unseen = ~seen.any(1)[..., None, None]
    dirty = (np.where(unseen, np.nan, np.asarray(x, np.float32)).astype(x.dtype) for x in (k, v))
    found = call(q, *dirty, dout, dlse)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    oracle, yardstick = (
        math(q, k, v, dout, dlse, seen, factor, rounded)
        for rounded in (lambda x: x, lambda x: x.astype(q.dtype).astype(np.float64))
    )
    for name, *triple in zip(("out", "lse", "dq", "dk", "dv"), found, yardstick, oracle, strict=True):
        assert_within_rule(name, *triple)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_masks(shape, mask):
    assert_attention(*inputs(shape), **mask)


def test_float16():
    assert_attention(*inputs("grouped", jnp.float16), is_causal=True)


def test_lengths_that_are_the_same():
    """One array for both, as for self-attention: each entry is a square."""
    q, k, v = inputs((3, 40, 40, 4, 2, 32))
    used = jnp.array([40, 7, 0], jnp.int32)
    assert_attention(q, k, v, is_causal=True, query_seq_lengths=used, key_value_seq_lengths=used)


@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths(is_causal):
    """Entries with fewer keys than queries, with more, and with none."""
    q, k, v = inputs((4, *SHAPES["more queries"][1:]))
    used_q = jnp.array([q.shape[1], 5, 9, 0], jnp.int32)
    used_k = jnp.array([11, k.shape[1], 0, 3], jnp.int32)
    skipped = jnp.array([2, 0, 1, 3], jnp.int32)
    for options in (
        {"query_seq_lengths": used_q, "key_value_seq_lengths": used_k},
        {"key_value_left_padding": skipped},
        {"key_value_seq_lengths": used_k, "key_value_left_padding": skipped},
    ):
        assert_attention(q, k, v, is_causal=is_causal, scale=0.3, **options)


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


def test_transforms():
    q, k, v = inputs("grouped")
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


def test_shard_map():
    """Over batch and heads, forward and backward, on four devices where there are as many."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    sizes = (2, 2) if len(jax.devices()) >= 4 else (1, 1)
    mesh = jax.make_mesh(sizes, ("batch", "heads"), axis_types=auto, devices=jax.devices()[: sizes[0] ** 2])
    spec = PartitionSpec("batch", None, "heads", None)
    q, k, v = inputs("grouped")

    def call(q, k, v):
        out, backward = jax.vjp(partial(attention, is_causal=True), q, k, v)
        return out, *backward(out)

    sharded = jax.shard_map(call, mesh=mesh, in_specs=(spec,) * 3, out_specs=(spec,) * 4)
    for found, expected in zip(jax.jit(sharded)(q, k, v), jax.jit(call)(q, k, v), strict=True):
        np.testing.assert_allclose(
            np.asarray(found, np.float32), np.asarray(expected, np.float32), rtol=0.02, atol=1e-3
        )


def launches(compiled, *arguments) -> int:
    """How many kernels the host launches one by one in a call, once it has been called."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(2):
        jax.block_until_ready(compiled(*arguments))
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        jax.block_until_ready(compiled(*arguments))
    return sum(event.name() == "cudaLaunchKernelExC" for event in profiler.profiler.kineto_results.events())


@pytest.mark.gpu
def test_cuda_graphs():
    """Graphs as XLA makes them: with the calls, their workspaces, and other memory between the replays."""
    q, k, v = inputs((3, 200, 200, 4, 2, 64))
    used = jnp.array([200, 77, 1], jnp.int32)

    def step(q, k, v, used):
        def loss(q, k, v):
            out = attention(q, k, v, is_causal=True, deterministic=True)
            out = attention(out, k, v, query_seq_lengths=used, key_value_seq_lengths=used, deterministic=True)
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


def test_empty():
    q, k, v = inputs("grouped")
    out, lse = jax.jit(partial(attention, return_residual=True))(q, k[:, :0], v[:, :0])
    assert (out == 0).all()
    assert (lse == -jnp.inf).all()
    assert attention(q[:0], k[:0], v[:0]).shape == (0, *q.shape[1:])


@pytest.mark.skipif(ours._library() is None, reason="this flash_cute has no kernels for JAX")
@pytest.mark.parametrize("shape", ["grouped", "more queries"])
def test_kernels_are_called_on_cuda(shape):
    """What is lowered for CUDA, where there need be none."""
    q, k, v = inputs(shape)

    def gradients(q, k, v):
        return jax.grad(lambda *x: attention(*x, is_causal=True).astype(jnp.float32).sum(), (0, 1, 2))(
            q, k, v
        )

    checks = [
        jax.export.DisabledSafetyCheck.custom_call(f"flash_cute_{name}") for name in ("forward", "backward")
    ]
    exported = jax.export.export(jax.jit(gradients), platforms=["cuda"], disabled_checks=checks)(q, k, v)
    text = exported.mlir_module()
    assert text.count("@flash_cute_forward") == 1
    assert text.count("@flash_cute_backward") == 1
    assert "stablehlo.dot_general" not in text


def test_torch_is_not_imported():
    program = (
        "import sys, jax.numpy as jnp, flash_cute.jax\n"
        "flash_cute.jax.attention(*[jnp.ones((1, 4, 2, 8), jnp.bfloat16)] * 3)\n"
        "assert 'torch' not in sys.modules\n"
        "import flash_cute\n"
        "assert 'forward' in dir(flash_cute)\n"
        "assert flash_cute.forward.__module__ == 'flash_cute.interface'\n"
        "assert 'torch' in sys.modules\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def changed(**changes):
    q, k, v = inputs("grouped")
    return SimpleNamespace(**({"query": q, "key": k, "value": v} | changes))


INT = jnp.ones((2,), jnp.int32)
WRONG = {
    "three dimensions": (ValueError, lambda t: {"query": t.query[0]}, "query has 3 dimensions; 4"),
    "float32": (ValueError, lambda t: {"query": t.query.astype(jnp.float32)}, "query has dtype float32"),
    "another dtype": (
        ValueError,
        lambda t: {"key": t.key.astype(jnp.float16)},
        "key has dtype float16 and query",
    ),
    "value's shape": (
        ValueError,
        lambda t: {"value": t.value[:, :5]},
        "value has shape (2, 5, 2, 40) and key",
    ),
    "batch": (ValueError, lambda t: {"key": t.key[:1], "value": t.value[:1]}, "key has batch 1"),
    "heads": (ValueError, lambda t: {"query": t.query[:, :, :5]}, "query has 5 heads and key 2"),
    "scale": (ValueError, lambda t: {"scale": 0.0}, "scale is 0.0"),
    "lengths": (
        ValueError,
        lambda t: {"query_seq_lengths": INT[:1]},
        "query_seq_lengths is int32[1]; int32[2]",
    ),
    "lengths' type": (
        ValueError,
        lambda t: {"key_value_left_padding": INT.astype(jnp.int16)},
        "key_value_left_padding is int16[2]",
    ),
    "lengths and window": (
        ValueError,
        lambda t: {"key_value_seq_lengths": INT, "local_window_size": 3},
        "key_value_seq_lengths is given with local_window_size",
    ),
    "window": (ValueError, lambda t: {"local_window_size": (3, -1)}, "local_window_size is (3, -1)"),
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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("magnitude", [3, 3000])
@pytest.mark.parametrize("causal", [False, True])
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


@pytest.mark.skipif(ours._library() is None, reason="this flash_cute has no kernels for JAX")
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
    for call, words in (
        (lambda: ours.softmax(jnp.ones(3, jnp.int32)), "x has dtype int32"),
        (lambda: ours.softmax(jnp.ones(3), causal=True), "x has 1 dimensions; at least 2"),
        (lambda: ours.softmax(jnp.ones(3), scale=0), "scale is 0"),
        (lambda: ours.softmax(jnp.ones((2, 3)), seqused_k=jnp.ones(3, jnp.int32)), "seqused_k is int32[3]"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            call()


def test_snippets_of_the_page():
    """The code of docs/jax.md, block after block."""
    page = (Path(__file__).resolve().parent.parent / "docs" / "jax.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    names: dict = {}
    for block in blocks:
        exec(block, names)
    assert all(jnp.isfinite(x.astype(jnp.float32)).all() for x in (names["out"], *names["gradients"]))


def test_example(tmp_path):
    """In a small size: what it computes agrees with float64."""
    root = Path(__file__).resolve().parent.parent
    program = [sys.executable, str(root / "examples" / "jax_gpt2.py"), "--batch=2", "--tokens=48"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(root)])}
    ran = subprocess.run(
        [*program, "--plot=times.png"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "all agree with float64" in ran.stdout
    assert (tmp_path / "times.png").stat().st_size > 0
