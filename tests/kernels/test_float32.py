"""float32 q, k and v: as exact as PyTorch's own products of float32, or by TF32 where that is asked for."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from support.cases import (
    MASKS,
    Mask,
    Ranged,
    Shape,
    make_gradients,
    make_inputs,
    matrix,
)
from support.precision import Calls, RoundedProducts, matmul_precision, norms_of
from support.ranges import make_ranges, ordered
from support.tolerance import (
    assert_attention,
    assert_gradients,
    assert_within_rule,
)

import flash_cute
from flash_cute import reference

HEAD_DIMS = 8, 40, 64, 100, 128, 33, 200, 256
SHAPES = {
    "no_tile_divides": (197, 331),
    "more_queries": (150, 70),
    "few_queries": (3, 300),
    "one_tile": (128, 32),
}
MASK_NAMES = "full", "causal", "window_symmetric", "window_causal"


@pytest.fixture(autouse=True)
def family_of_float32(request):
    if "kernel" in request.fixturenames and request.getfixturevalue("kernel").family == "sm90":
        pytest.skip("float32 has kernels of the family sm80 alone")


def rms(error: torch.Tensor) -> float:
    return error.double().square().mean().sqrt().item()


def assert_as_exact(name, ours, yardstick, oracle, factor=2.0, slack=2**-22) -> None:
    """The rule by root mean square without its constant, in which errors of float32 would vanish.

    slack: what ex2.approx and the rounded LSE add to a probability, which sums of few keys do not hide.
    """
    seen = oracle.isfinite()
    got, allowed = (rms((x.double() - oracle)[seen]) for x in (ours, yardstick))
    size = rms(oracle[seen])
    assert got <= factor * allowed + slack * size, f"{name}: RMS error {got:.2e}, PyTorch's {allowed:.2e}"


@matrix(shape=SHAPES, head_dim=HEAD_DIMS, mask={name: MASKS[name] for name in MASK_NAMES})
def test_as_exact_as_pytorch(kernel, shape, head_dim, mask):
    q, k, v = make_inputs(Shape(2, 4, 2, *shape, head_dim), torch.float32, kernel.device)
    result = kernel.forward(q, k, v, precision="highest", **mask.options)
    assert_attention(result, q, k, v, mask)
    oracle = reference.forward(q, k, v, **mask.options)
    yardstick = reference.forward(q, k, v, dtype=torch.float32, **mask.options)
    for name, *results in zip(("out", "lse"), result, yardstick, oracle, strict=True):
        assert_as_exact(name, *results)


@pytest.mark.gpu
@pytest.mark.parametrize("seqlen", [512, 4096, 16384])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_sums_are_as_exact(kernel, head_dim, seqlen):
    """Tensor cores cut the last digit of a sum; the sums of long rows must not show it."""
    q, k, v = make_inputs(Shape(1, 2, 2, seqlen, seqlen, head_dim), torch.float32, kernel.device)
    q = q[:, :, -256:].contiguous()
    results = kernel.forward(q, k, v, precision="highest")
    oracle = reference.forward(q, k, v)
    yardstick = reference.forward(q, k, v, dtype=torch.float32)
    for name, *compared in zip(("out", "lse"), results, yardstick, oracle, strict=True):
        assert_as_exact(name, *compared)


@matrix(shape=SHAPES, head_dim=HEAD_DIMS, mask={name: MASKS[name] for name in MASK_NAMES})
def test_tf32(kernel, shape, head_dim, mask):
    q, k, v = make_inputs(Shape(2, 4, 2, *shape, head_dim), torch.float32, kernel.device)
    result = kernel.forward(q, k, v, precision="high", **mask.options)
    oracle = reference.forward(q, k, v, **mask.options)
    with RoundedProducts():
        yardstick = reference.forward(q, k, v, dtype=torch.float32, **mask.options)
    for name, *compared in zip(("out", "lse"), result, yardstick, oracle, strict=True):
        assert_within_rule(name, *compared, norms_of("high"))
        assert_as_exact(name, *compared)


def test_rows_and_their_sums(kernel):
    """What the project began with: O and the sums of a tile of rows, to 1e-6."""
    q, k, v = make_inputs(Shape(1, 1, 1, 32, 32, 128), torch.float32, kernel.device)
    out, lse = kernel.forward(q, k, v, precision="highest")
    scores = q.double() @ k.mT.double() / 128**0.5
    torch.testing.assert_close(out.double(), scores.softmax(-1) @ v.double(), rtol=0, atol=1e-6)
    sums = scores.exp().sum(-1)
    torch.testing.assert_close(lse.double().exp() / sums, torch.ones_like(sums), rtol=0, atol=1e-6)


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("mask", [MASKS["causal"], Mask(window=(3, 5))])
def test_rows_that_see_nothing(kernel, mask, precision):
    q, k, v = make_inputs(Shape(2, 2, 2, 300, 70, 128), torch.float32, kernel.device)
    v[:] = torch.nan
    out, lse = kernel.forward(q, k, v, precision=precision, **mask.options)
    blind = ~mask.visible(300, 70, kernel.device).any(1)
    assert (out[:, :, blind] == 0).all()
    assert (lse[:, :, blind] == -torch.inf).all()
    assert out[:, :, ~blind].isnan().all()


def test_nan_of_one_query(kernel):
    for value, precision in product((torch.nan, torch.inf), ("highest", "high")):
        q, k, v = make_inputs(Shape(1, 2, 1, 100, 100, 64), torch.float32, kernel.device)
        clean = kernel.forward(q, k, v, precision=precision)
        q[0, 1, 7, 3] = value
        found = kernel.forward(q, k, v, precision=precision)
        other = torch.arange(100, device=kernel.device) != 7
        assert found[0][0, 1, 7].isnan().all()
        for result, expected in zip(found, clean, strict=True):
            torch.testing.assert_close(result[:, :, other], expected[:, :, other], rtol=1e-5, atol=1e-6)


def test_bitwise_repeatable(kernel):
    for precision in ("highest", "high"):
        q, k, v = make_inputs(Shape(4, 8, 2, 333, 444, 128), torch.float32, kernel.device)
        first = kernel.forward(q, k, v, causal=True, precision=precision)
        for _ in range(5):
            for result, expected in zip(
                kernel.forward(q, k, v, causal=True, precision=precision), first, strict=True
            ):
                assert torch.equal(result, expected)


@pytest.mark.gpu
def test_the_precisions_are_kernels_of_their_own(device):
    q, k, v = make_inputs(Shape(1, 2, 2, 128, 128, 64), torch.float32, device)
    assert flash_cute.explain(q, k, v, precision="highest")["element"] == "fp32"
    assert flash_cute.explain(q, k, v, precision="high")["element"] == "tf32"
    exact, rounded = (flash_cute.forward(q, k, v, precision=name)[0] for name in ("highest", "high"))
    assert 1e-5 < (exact - rounded).abs().max() < 1e-2


GRADIENT_SHAPES = {"no_tile_divides": (197, 331), "more_queries": (150, 70), "few_keys": (130, 20)}


@matrix(
    shape=GRADIENT_SHAPES,
    head_dim=HEAD_DIMS,
    mask={name: MASKS[name] for name in MASK_NAMES},
    deterministic=[False, True],
)
def test_gradients(kernel, shape, head_dim, mask, deterministic):
    q, k, v = make_inputs(Shape(2, 4, 2, *shape, head_dim), torch.float32, kernel.device)
    given = make_gradients(q)
    options = {"deterministic": deterministic, **mask.options}
    found = kernel.backward(q, k, v, *given, precision="highest", **options)
    assert_gradients(found, q, k, v, *given, mask)
    oracle = reference.backward(q, k, v, *given, **mask.options)
    yardstick = reference.backward(q, k, v, *given, dtype=torch.float32, **mask.options)
    for name, *compared in zip(("dq", "dk", "dv"), found, yardstick, oracle, strict=True):
        assert_as_exact(name, *compared)


@matrix(
    shape=GRADIENT_SHAPES,
    head_dim=[64, 128, 256, 40],
    mask={name: MASKS[name] for name in ("full", "causal")},
    deterministic=[False, True],
)
def test_gradients_by_tf32(kernel, shape, head_dim, mask, deterministic):
    q, k, v = make_inputs(Shape(2, 4, 2, *shape, head_dim), torch.float32, kernel.device)
    given = make_gradients(q)
    found = kernel.backward(q, k, v, *given, precision="high", deterministic=deterministic, **mask.options)
    oracle = reference.backward(q, k, v, *given, **mask.options)
    with RoundedProducts():
        yardstick = reference.backward(q, k, v, *given, dtype=torch.float32, **mask.options)
    for name, *compared in zip(("dq", "dk", "dv"), found, yardstick, oracle, strict=True):
        assert_within_rule(name, *compared, norms_of("high"))
        assert_as_exact(name, *compared)


@pytest.mark.gpu
@pytest.mark.parametrize("seqlen", [512, 4096, 16384])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradients_of_long_sums_are_as_exact(kernel, head_dim, seqlen):
    q, k, v = make_inputs(Shape(1, 1, 1, seqlen, 512, head_dim), torch.float32, kernel.device)
    given = make_gradients(q)
    found = kernel.backward(q, k, v, *given, precision="highest")
    oracle = reference.backward(q, k, v, *given)
    yardstick = reference.backward(q, k, v, *given, dtype=torch.float32)
    for name, *compared in zip(("dq", "dk", "dv"), found, yardstick, oracle, strict=True):
        assert_as_exact(name, *compared)


@matrix(shape={"one query": (1, 5000), "a chunk": (200, 9000)}, head_dim=[64, 128, 256])
def test_few_queries_of_many_keys_by_ranges(kernel, shape, head_dim):
    """One thread block goes through all keys: none cuts them into parts. On the CPU a tenth of them."""
    queries, keys = shape
    shape = Shape(2, 8, 2, queries, keys if kernel.family else keys // 10, head_dim)
    mask = Ranged.of(MASKS["full"], make_ranges(shape, ordered, 3, True, kernel.device))
    q, k, v = make_inputs(shape, torch.float32, kernel.device)
    assert_attention(kernel.forward(q, k, v, precision="highest", **mask.options), q, k, v, mask)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_gradients(kernel, head_dim):
    q, k, v = make_inputs(Shape(2, 8, 2, 333, 444, head_dim), torch.float32, kernel.device)
    given = make_gradients(q)
    first, *others = (kernel.backward(q, k, v, *given, causal=True, deterministic=True) for _ in range(4))
    for other in others:
        assert all(map(torch.equal, first, other))


def test_the_backward_keeps_the_precision(device):
    """Of the call, whatever torch is set to when its gradients are computed."""
    leaves = [x.requires_grad_() for x in make_inputs(Shape(1, 2, 2, 10, 10, 64), torch.float32, device)]
    for setting, argument, expected in (("high", None, True), ("high", "highest", False)):
        with matmul_precision(setting):
            out = flash_cute.attention(*leaves, precision=argument)
        with Calls() as calls:
            torch.autograd.grad(out.sum(), leaves)
        assert calls.tf32 == [expected]


@pytest.mark.parametrize("needed", [(0,), (1, 2), (0, 2)])
def test_some_gradients(kernel, needed):
    q, k, v = make_inputs(Shape(1, 4, 2, 70, 90, 64), torch.float32, kernel.device)
    dout, _ = make_gradients(q)
    inputs = [x.detach().requires_grad_(i in needed) for i, x in enumerate((q, k, v))]
    out = flash_cute.attention(*inputs, causal=True, family=kernel.family)
    found = torch.autograd.grad(out, [inputs[i] for i in needed], dout)
    oracle = reference.backward(q, k, v, dout, None, causal=True)
    for i, x in zip(needed, found, strict=True):
        torch.testing.assert_close(x.double(), oracle[i], rtol=0, atol=1e-5)


# Of torch.set_float32_matmul_precision, and the argument: is it TF32?
SETTINGS = {
    ("highest", None): False,
    ("high", None): True,
    ("medium", None): True,
    ("high", "highest"): False,
    ("highest", "high"): True,
}


@pytest.mark.parametrize(("setting", "argument"), SETTINGS)
def test_none_is_what_torch_is_set_to(device, setting, argument):
    q, k, v = make_inputs(Shape(1, 2, 2, 10, 10, 64), torch.float32, device)
    expected = SETTINGS[setting, argument]
    offsets = torch.tensor([0, 10], dtype=torch.int32, device=device)
    with matmul_precision(setting), Calls() as calls:
        flash_cute.forward(q, k, v, precision=argument)
        flash_cute.attention_varlen(*(x[0].transpose(0, 1) for x in (q, k, v)), offsets, precision=argument)
        flash_cute.attention(q, k, v, precision=argument, out=torch.empty_like(q))
        flash_cute.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), precision=argument)
    assert calls.tf32 == [expected] * 3 + [False]


def test_the_newer_names_of_torch_set_it_too(device):
    """With torch.backends' fp32_precision, torch.get_float32_matmul_precision raises."""
    q, k, v = make_inputs(Shape(1, 2, 2, 10, 10, 64), torch.float32, device)
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        for name, expected in (("tf32", True), ("ieee", False)):
            matmul.fp32_precision = name
            with Calls() as calls:
                flash_cute.forward(q, k, v)
            assert calls.tf32 == [expected]
    finally:
        matmul.fp32_precision = before


def test_compiled_calls_follow_the_setting(device):
    """Which graph runs; a dispatch mode around it is nothing that newer compilers take."""
    ran = []

    def backend(graph, _):
        def run(*inputs):
            ran.append(any(node.kwargs.get("tf32", False) for node in graph.graph.nodes))
            return graph(*inputs)

        return run

    q, k, v = make_inputs(Shape(1, 2, 2, 10, 10, 64), torch.float32, device)
    compiled = torch.compile(flash_cute.attention, backend=backend, fullgraph=True)
    for setting, expected in (("highest", False), ("high", True), ("highest", False)):
        with matmul_precision(setting):
            compiled(q, k, v)
        assert ran[-1] == expected
    assert len(ran) == 3


@pytest.mark.parametrize(
    ("value", "error"), [("medium", ValueError), ("tf32", ValueError), (3, TypeError), (True, TypeError)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_wrong_precisions(device, value, error, dtype):
    q, k, v = make_inputs(Shape(1, 2, 2, 10, 10, 64), dtype, device)
    sentence = rf"^flash_cute\.forward: precision must be 'highest', 'high' or None, got {value!r}$"
    with pytest.raises(error, match=sentence):
        flash_cute.forward(q, k, v, precision=value)


@pytest.mark.gpu
def test_there_is_no_float32_on_sm90(device):
    q, k, v = make_inputs(Shape(1, 2, 2, 10, 10, 64), torch.float32, device)
    with pytest.raises(ValueError, match=r"this build has no sm90 forward kernel for fp32|needs compute"):
        flash_cute.forward(q, k, v, family="sm90")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [{"batch_invariant": True}, {"block_table": torch.zeros(1, 1, dtype=torch.int32)}],
    ids=["batch_invariant", "pages"],
)
def test_what_float32_has_no_kernels_for(device, options):
    q, k, v = make_inputs(Shape(1, 2, 2, 16, 16, 64), torch.float32, device, "contiguous")
    options = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    with pytest.raises(ValueError, match="this build has no sm80 kernel for caches and batch_invariant with"):
        flash_cute.forward(q, k, v, **options)
