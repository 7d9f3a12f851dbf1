"""flash_cute.attention_weights against float64, and under what PyTorch does around it."""

from __future__ import annotations

import pytest
import torch
from support.cases import ALL_DTYPES, EMPTY, MASKS, SEEDS, Shape, make_inputs, poisoned
from support.lengths import int32
from support.tolerance import assert_within_rule

import flash_cute
from flash_cute import reference

SHAPE = Shape(3, 4, 2, 130, 200, 64)


def found(kernel, q, k, **options) -> torch.Tensor:
    """In memory that is poisoned with NaN; the same bits in each call."""
    with poisoned():
        weights, again = (
            flash_cute.attention_weights(q, k, family=kernel.family, **options) for _ in range(2)
        )
    assert (weights.shape, weights.dtype) == ((*q.shape[:3], k.shape[2]), q.dtype)
    assert weights.is_contiguous()
    assert torch.equal(weights, again)
    return weights


def expected(q, k, dtype, sinks=None, **options) -> torch.Tensor:
    """out of values that are the unit vectors of their keys."""
    v = torch.eye(k.shape[2], dtype=k.dtype, device=k.device).expand(*k.shape[:2], -1, -1)
    weights, lse = reference.forward(q, k, v, dtype=dtype, **options)
    if sinks is not None:
        weights = weights * (lse - lse.logaddexp(sinks.to(lse.dtype)[:, None])).exp().unsqueeze(-1)
    return weights


def check(kernel, q, k, **options) -> None:
    yardstick, oracle = (expected(q, k, dtype, **options) for dtype in (q.dtype, torch.float64))
    assert_within_rule("weights", found(kernel, q, k, **options), yardstick, oracle)


def skip_what_is_not_there(kernel, dtype) -> None:
    if kernel.family == "sm90" and dtype == torch.float32:
        pytest.skip("float32 has no kernels of sm90")


def ranges(device) -> torch.Tensor:
    bounds = int32([[0, 90], [110, 200]], device).expand(1, 1, 130, 2, 2).clone()
    bounds[:, :, 30:50] = 0  # who sees nothing
    return bounds


CASES = {
    "scale": lambda device, dtype: {"softmax_scale": 0.3},
    "mask": lambda device, dtype: {"mask": torch.rand(3, 4, 130, 200, device=device) < 0.7},
    "bias": lambda device, dtype: {"bias": torch.randn(1, 4, 130, 200, device=device).to(dtype)},
    "ranges": lambda device, dtype: {"ranges": ranges(device)},
    "alibi": lambda device, dtype: {"alibi_slopes": torch.rand(4, device=device)},
    "softcap": lambda device, dtype: {"softcap": 1.5},
    "sinks": lambda device, dtype: {"sinks": torch.randn(4, device=device)},
    "lowest": lambda device, dtype: {
        "bias": torch.full((1, 1, 130, 1), torch.finfo(dtype).min, device=device, dtype=dtype),
    },
}  # fmt: skip
CASES["all"] = lambda device, dtype: (
    {"causal": True}
    | {
        name: value
        for case in ("scale", "mask", "bias", "ranges", "softcap", "sinks")
        for name, value in CASES[case](device, dtype).items()
    }
)


@pytest.mark.parametrize("dtype", ALL_DTYPES.values(), ids=ALL_DTYPES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_changed_scores(kernel, case, dtype):
    skip_what_is_not_there(kernel, dtype)
    q, k, _ = make_inputs(SHAPE, dtype, kernel.device)
    check(kernel, q, k, **case(kernel.device, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_masks(kernel, mask, dtype):
    skip_what_is_not_there(kernel, dtype)
    q, k, _ = make_inputs(SHAPE, dtype, kernel.device)
    check(kernel, q, k, **mask.options)


SHAPES = {
    "narrow": Shape(2, 2, 2, 100, 150, 8),
    "odd": Shape(2, 3, 1, 77, 131, 13),
    "one column of q": Shape(2, 3, 1, 77, 131, 1),
    "wide": Shape(1, 2, 1, 100, 150, 256),
    "more tiles": Shape(1, 2, 1, 333, 1030, 80),
    "one query": Shape(16, 8, 2, 1, 413, 64),
    "one key": Shape(16, 8, 8, 413, 1, 64),
    "one of both": Shape(32, 8, 8, 1, 1, 64),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(kernel, shape, dtype):
    skip_what_is_not_there(kernel, dtype)
    q, k, _ = make_inputs(shape, dtype, kernel.device)
    check(kernel, q, k)


@pytest.mark.parametrize("layout", ["transposed", "rows_not_16_bytes", "columns_of_rows", "expanded_heads"])
def test_layouts(kernel, layout):
    q, k, _ = make_inputs(SHAPE, torch.bfloat16, kernel.device, layout)
    check(kernel, q, k, causal=True)


@pytest.mark.parametrize("changes", [{}, {"softcap": 2.0}], ids=["plain", "softcap"])
def test_lengths(kernel, changes):
    """Rows that don't count are NaN, and all weights of theirs 0."""
    used_q, used_k, leftpad = [130, 0, 77], [190, 150, 64], [9, 0, 10]
    q, k, _ = make_inputs(SHAPE, torch.bfloat16, kernel.device)
    right = [torch.zeros(3, 4, 130, 200, dtype=t, device=kernel.device) for t in (q.dtype, torch.float64)]
    for n, (rows, end, first) in enumerate(zip(used_q, used_k, leftpad, strict=True)):
        part = q[n : n + 1, :, :rows], k[n : n + 1, :, first:end]
        for whole in right:
            whole[n, :, :rows, first:end] = expected(*part, whole.dtype, causal=True, **changes)[0]
        q[n, :, rows:], k[n, :, end:], k[n, :, :first] = torch.nan, torch.nan, torch.nan
    lengths = {"seqused_q": used_q, "seqused_k": used_k, "leftpad_k": leftpad}
    lengths = {name: int32(values, kernel.device) for name, values in lengths.items()}
    assert_within_rule("weights", found(kernel, q, k, causal=True, **lengths, **changes), *right)


@pytest.mark.parametrize("kind", ["mask", "bias"])
def test_what_is_hidden_is_0(kernel, kind):
    """Whatever is in a query that sees nothing, a key that nobody sees, and a bias of a hidden pair.

    On a GPU what is no number spreads where a bias alone hides it (docs/numerics.md).
    """
    device = kernel.device
    q, k, _ = make_inputs(SHAPE, torch.bfloat16, device)
    seen = torch.rand(3, 4, 130, 200, device=device) < 0.7
    seen[:, :, 30:50], seen[..., 90:110] = False, False
    bias, options = torch.zeros(seen.shape, device=device).bfloat16(), {}
    if kind == "mask":
        options = {"mask": seen}
        bias[~seen] = torch.nan
    else:
        bias[~seen] = -torch.inf
    right = [expected(q, k, dtype, mask=seen) for dtype in (q.dtype, torch.float64)]
    garbage = 300 if kernel.family and kind == "bias" else torch.nan
    q[:, :, 30:50], k[:, :, 90:110] = garbage, garbage
    weights = found(kernel, q, k, bias=bias, **options)
    assert (weights[~seen] == 0).all()
    assert_within_rule("weights", weights, *right)


def test_infinite_scores_are_nan(kernel):
    """As PyTorch's maths has them, in the rows that see them alone."""
    q, k, _ = make_inputs(SHAPE, torch.bfloat16, kernel.device)
    k[:, :, 150, 0] = torch.inf
    weights = flash_cute.attention_weights(q, k, True, family=kernel.family)
    rows = expected(q, k, torch.float64, causal=True).isnan().any(-1)
    assert 0 < rows.sum() < rows.numel()
    assert torch.equal(weights.isnan().any(-1), rows)


def test_they_are_those_of_a_forward(kernel):
    q, k, v = make_inputs(SHAPE, torch.bfloat16, kernel.device)
    options = {"causal": True, "softcap": 3.0, "family": kernel.family}
    seed = torch.tensor([SEEDS.getrandbits(62), 5], device=kernel.device)
    kept = flash_cute.dropout_mask(seed, 3, 4, 130, 200, 0.5)
    weights = flash_cute.attention_weights(q, k, **options)
    out = flash_cute.attention(q, k, v, dropout_p=0.5, dropout_seed=seed, **options)
    mine = 2 * (weights.float() * kept) @ v.float().repeat_interleave(2, 1)
    torch.testing.assert_close(out.float(), mine, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("shape", EMPTY.values(), ids=EMPTY)
def test_empty(kernel, shape, with_sinks):
    q, k, _ = make_inputs(shape, torch.bfloat16, kernel.device)
    options = {"sinks": torch.zeros(shape.heads_q, device=kernel.device)} if with_sinks else {}
    assert found(kernel, q, k, **options).numel() == 0


def test_memory_is_bounded(device):
    q = torch.empty(1, 1, 1, 8, device=device).expand(64, 32, 4096, 8)
    with pytest.raises(ValueError, match=r"would be 34359738368 weights; at most max_elements, 2147483648"):
        flash_cute.attention_weights(q, q)
    q = q[:1, :1, :10]
    with pytest.raises(ValueError, match=r"would be 100 weights; at most max_elements, 99, are accepted"):
        flash_cute.attention_weights(q, q, max_elements=99)
    assert flash_cute.attention_weights(q, q, max_elements=None).shape == (1, 1, 10, 10)


@pytest.mark.big_memory(40)
def test_more_than_int32_counts(kernel):
    q, k, _ = make_inputs(Shape(1, 33, 1, 8192, 8200, 64), torch.bfloat16, kernel.device)
    weights = flash_cute.attention_weights(q, k, True, max_elements=None, family=kernel.family)
    part = flash_cute.attention_weights(q[:, -1:], k, True, family=kernel.family)
    torch.testing.assert_close(weights[:, -1:], part, rtol=2**-6, atol=1e-6)


# What PyTorch does around it

SMALL = Shape(2, 4, 2, 50, 70, 64)


def test_gradients_are_refused(kernel):
    q, k, _ = make_inputs(SMALL, torch.bfloat16, kernel.device)
    leaf = q.clone().requires_grad_()
    sentence = r"^flash_cute\.attention_weights: there are no gradients of weights; detach q"
    with pytest.raises(NotImplementedError, match=sentence):
        flash_cute.attention_weights(leaf, k, family=kernel.family)
    with torch.no_grad():
        weights = flash_cute.attention_weights(leaf, k, family=kernel.family)
    assert torch.equal(weights, flash_cute.attention_weights(q, k, family=kernel.family))


def test_autocast(kernel):
    q, k, _ = (x.float() for x in make_inputs(SMALL, torch.bfloat16, kernel.device))
    with torch.autocast(kernel.device.type, torch.bfloat16):
        weights = flash_cute.attention_weights(q, k, family=kernel.family)
    same = flash_cute.attention_weights(q.bfloat16(), k.bfloat16(), family=kernel.family)
    assert torch.equal(weights, same)


@pytest.mark.parametrize("mapped", [(0, None), (None, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("changes", ["bias", "sinks"])
def test_vmap(kernel, mapped, changes):
    q, k, _ = make_inputs(SMALL, torch.bfloat16, kernel.device)
    options = {"family": kernel.family}
    if changes == "sinks":
        options["sinks"] = torch.randn(4, device=kernel.device)
    else:
        options["bias"] = torch.randn(1, 4, 50, 70, device=kernel.device).bfloat16()
    function = lambda q, k: flash_cute.attention_weights(q, k, True, **options)  # noqa: E731
    several = [
        [x.roll(i, 2) for i in range(3)] if dim == 0 else [x] * 3
        for x, dim in zip((q, k), mapped, strict=True)
    ]
    stacked = [torch.stack(xs) if dim == 0 else xs[0] for xs, dim in zip(several, mapped, strict=True)]
    weights = torch.vmap(function, in_dims=mapped)(*stacked)
    expected = torch.stack([function(*pair) for pair in zip(*several, strict=True)])
    torch.testing.assert_close(weights, expected, rtol=0, atol=0 if kernel.family is None else 1e-2)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(kernel, dynamic):
    torch._dynamo.reset()
    q, k, _ = make_inputs(SMALL, torch.bfloat16, kernel.device)
    function = lambda q, k: flash_cute.attention_weights(q * 2, k, True, family=kernel.family)  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert torch.equal(compiled(q, k), function(q, k))
    torch._dynamo.reset()


def test_opcheck(kernel):
    q, k, v = make_inputs(Shape(2, 4, 2, 30, 40, 40), torch.bfloat16, kernel.device)
    options = {"softcap": 5.0, "family": kernel.family}
    _, lse = torch.ops.flash_cute._forward(q, k, v, True, **options)
    torch.library.opcheck(torch.ops.flash_cute._weights.default, (q, k, v, lse, True), options)
