"""The gradient of a bias, as its operator gives it; test_scores.py has it in the table of cases."""

from __future__ import annotations

import pytest
import torch
from support.cases import ALL_DTYPES, EMPTY, SEEDS, Shape, make_gradients, make_inputs, poisoned
from support.lengths import int32
from support.tolerance import assert_within_rule

import flash_cute
from flash_cute import reference

SHAPE = Shape(4, 4, 2, 130, 200, 64)

_ops = torch.ops.flash_cute


def problem(device, dtype=torch.bfloat16, shape=SHAPE):
    """q, k and v, and dout and dlse."""
    tensors = make_inputs(shape, dtype, device)
    return tensors, make_gradients(tensors[0], head_dim_v=shape.head_dim_v)


def bias_gradient(kernel, tensors, given, **options) -> torch.Tensor:
    """After its forward, in memory that is poisoned with NaN; the same bits in each call."""
    options["family"] = kernel.family
    with poisoned():
        results = _ops._forward(*tensors, **options)
        found, again = (_ops._bias_gradient(*given, *tensors, *results, **options)[0] for _ in range(2))
    bias = options["bias"]
    assert (found.shape, found.dtype, found.device) == (bias.shape, bias.dtype, bias.device)
    assert found.is_contiguous()
    assert torch.equal(found, again)
    return found


def changes(device) -> dict:
    return {
        "causal": True,
        "softcap": 5.0,
        "mask": torch.rand(1, 4, 1, 200, device=device) < 0.8,
        "dropout_p": 0.2,
        "dropout_seed": torch.tensor([SEEDS.getrandbits(62), 5], device=device),
        "seqused_q": int32([130, 0, 77, 130], device),
        "seqused_k": int32([200, 200, 64, 150], device),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(1, 1, 1, 1), (2, 4, 130, 200), (1, 4, 130, 200), (4, 1, 130, 200),
                                  (1, 1, 130, 200), (4, 4, 1, 200), (2, 1, 1, 200), (4, 4, 130, 1),
                                  (1, 1, 130, 1), (1, 4, 1, 1)], ids=str)  # fmt: skip
def test_sums_over_what_it_does_not_tell_apart(kernel, size, dtype):
    """As where it is expanded, in any memory."""
    if kernel.family == "sm90" and dtype == torch.float32:
        pytest.skip("float32 has no kernels of sm90")
    tensors, given = problem(kernel.device, dtype)
    bias, options = torch.randn(size, device=kernel.device).to(dtype), changes(kernel.device)
    found = bias_gradient(kernel, tensors, given, bias=bias, **options)
    whole = bias.repeat_interleave(4 // len(bias), 0).expand(4, 4, 130, 200)
    of_pairs = bias_gradient(kernel, tensors, given, bias=whole, **options).double()
    expected = of_pairs.unflatten(0, (len(bias), -1)).sum(1).sum_to_size(size)
    of_rounding = of_pairs.square().sum().sqrt().item() * {torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=of_rounding)


@pytest.mark.parametrize("dtype", ALL_DTYPES.values(), ids=ALL_DTYPES)
@pytest.mark.parametrize("shape", [Shape(1, 2, 1, 700, 900, 64), Shape(2, 2, 2, 333, 1030, 80, 40),
                                   Shape(1, 4, 2, 500, 130, 256)], ids=str)  # fmt: skip
def test_more_tiles(kernel, shape, dtype):
    if kernel.family == "sm90" and dtype == torch.float32:
        pytest.skip("float32 has no kernels of sm90")
    tensors, given = problem(kernel.device, dtype, shape)
    bias = torch.randn(1, shape.heads_q, shape.seqlen_q, shape.seqlen_k, device=kernel.device).to(dtype)
    for causal in (False, True):
        found = bias_gradient(kernel, tensors, given, bias=bias, causal=causal)
        yardstick, oracle = (
            reference.bias_gradient(*tensors, *given, causal, dtype=t, bias=bias)
            for t in (dtype, torch.float64)
        )
        assert_within_rule("dbias", found, yardstick, oracle)


HIDING = "mask", "bias", "ranges", "lengths"


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", HIDING)
def test_what_is_hidden_has_a_gradient_of_0(kernel, kind, garbage):
    """Whatever its row holds, or a key that nobody sees, or what comes back there.

    On a GPU what a key holds that no length hides may spread, if it is no number, and what a query holds, or
    what comes back for it, that a bias alone hides (docs/numerics.md).
    """
    device = kernel.device
    of_keys = garbage if kernel.family is None or kind == "lengths" else 300
    of_queries = 300 if kernel.family and kind == "bias" else garbage
    tensors, given = problem(device)
    seen = torch.ones(4, 4, 130, 200, dtype=torch.bool, device=device)
    seen[:, :, 30:50] = False
    seen[..., 90:110] = False
    bias, options = torch.randn(4, 4, 130, 200, device=device).bfloat16(), {}
    if kind == "mask":
        seen &= torch.rand(seen.shape, device=device) < 0.8
        options["mask"] = seen
    elif kind == "bias":
        bias[~seen] = -torch.inf
    elif kind == "ranges":
        ranges = int32([[0, 90], [110, 200]], device).expand(1, 1, 130, 2, 2).clone()
        ranges[:, :, 30:50] = 0
        options["ranges"] = ranges
    else:
        used_q, used_k = int32([130, 0, 77, 100], device), int32([200, 100, 0, 64], device)
        row, key = torch.arange(130, device=device).unsqueeze(1), torch.arange(200, device=device)
        seen = (row < used_q.view(4, 1, 1, 1)) & (key < used_k.view(4, 1, 1, 1)) & (key >= 5)
        seen = seen.expand(4, 4, -1, -1)
        options |= {"seqused_q": used_q, "seqused_k": used_k, "leftpad_k": int32([5] * 4, device)}
    blind, unseen = ~seen.any(-1), ~seen.any(2).unflatten(1, (2, 2)).any(2)
    results = []
    for hidden, hidden_query, hidden_key in ((0, 0, 0), (garbage, of_queries, of_keys)):
        for x in (tensors[0], *given):
            x[blind] = hidden_query
        for x in tensors[1:]:
            x[unseen] = hidden_key
        if kind != "bias":
            bias[~seen] = hidden
        results.append(bias_gradient(kernel, tensors, given, bias=bias, **options))
    assert (results[1][~seen] == 0).all()
    assert results[1].isfinite().all()
    assert results[1].any()
    torch.testing.assert_close(*results, rtol=0, atol=0 if kernel.family is None else 1e-2)


@pytest.mark.parametrize("scale", [0.125, 3.0, 1.7])
def test_a_bias_times_a_number(kernel, scale):
    """Out, LSE and all gradients are those of the product, and that of the bias is so many times as large."""
    tensors, given = problem(kernel.device)
    bias = torch.randn(2, 4, 130, 200, device=kernel.device).bfloat16()
    bias[:, :, 5, 7:90], bias[..., 150:160] = -1e38, -torch.inf
    shared = {"causal": True, "softcap": 5.0}
    options = shared | {"bias": bias, "bias_scale": scale, "family": kernel.family}
    results = _ops._forward(*tensors, **options)
    arguments = *given, *tensors, *results
    of_backward = _ops._backward(*arguments, **options)[:3]
    found = *results, *of_backward, _ops._bias_gradient(*arguments, **options)[0]
    shared["bias"] = bias.double() * scale
    yardstick, oracle = (
        (
            *reference.forward(*tensors, dtype=dtype, **shared),
            *reference.backward(*tensors, *given, dtype=dtype, **shared),
            reference.bias_gradient(*tensors, *given, dtype=dtype, **shared) * scale,
        )
        for dtype in (torch.bfloat16, torch.float64)
    )
    names = "out", "lse", "dq", "dk", "dv", "dbias"
    for name, *values in zip(names, found, yardstick, oracle, strict=True):
        assert_within_rule(name, *values)


def test_a_bias_that_is_finite_stays_so(kernel):
    """Times a number, too."""
    (q, k, v), _ = problem(kernel.device)
    lowest = torch.finfo(torch.bfloat16).min
    bias = torch.full((1, 1, 1, 200), lowest, device=kernel.device, dtype=torch.bfloat16)
    bias[..., 7] = -torch.inf
    out, lse = _ops._forward(q, k, v, bias=bias, bias_scale=1e4, family=kernel.family)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    v[:, :, 7] = 1000.0  # is hidden
    assert torch.equal(_ops._forward(q, k, v, bias=bias, bias_scale=1e4, family=kernel.family)[0], out)


@pytest.mark.parametrize("shape", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("told", [(True, True, True, True), (False, True, False, False)], ids=str)
def test_empty(kernel, told, shape):
    tensors, given = problem(kernel.device, shape=shape)
    sizes = shape.batch, shape.heads_q, shape.seqlen_q, shape.seqlen_k
    size = [
        n if tells or dim == 0 == n else 1 for dim, (n, tells) in enumerate(zip(sizes, told, strict=True))
    ]
    bias = torch.randn(size, device=kernel.device).bfloat16()
    assert not bias_gradient(kernel, tensors, given, bias=bias).any()
    leaf = bias.requires_grad_()
    for options in ({}, {"sinks": torch.zeros(shape.heads_q, device=kernel.device)}):
        results = flash_cute.forward(*tensors, bias=leaf, family=kernel.family, **options)
        (dbias,) = torch.autograd.grad(results, leaf, given)
        assert dbias.shape == bias.shape
        assert not dbias.any()
