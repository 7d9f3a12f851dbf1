"""The oracle itself, against attention written out pair by pair, and against PyTorch's own."""

from __future__ import annotations

import math
import re

import pytest
import torch
from support.cases import DTYPES, MASKS, Shape, make_inputs
from torch.utils._python_dispatch import TorchDispatchMode

from flash_cute import reference


def by_definition(q, k, v, visible, scale):
    """Attention of one head by plain loops over Python floats: (out, lse) as nested lists."""
    outs, lses = [], []
    for i, row in enumerate(q):
        seen = [j for j in range(len(k)) if visible[i][j]]
        scores = [scale * math.fsum(a * b for a, b in zip(row, k[j], strict=True)) for j in seen]
        total = math.fsum(math.exp(score) for score in scores)
        outs.append(
            [
                math.fsum(math.exp(score) * v[j][d] for score, j in zip(scores, seen, strict=True)) / total
                if seen
                else 0.0
                for d in range(len(v[0]))
            ]
        )
        lses.append(math.log(total) if seen else -math.inf)
    return outs, lses


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(9, 9), (5, 60), (60, 5), (1, 7), (7, 1)])
@pytest.mark.parametrize("head_dim_v", [5, 3, 8])
def test_reference_is_the_definition(mask, seqlen_q, seqlen_k, head_dim_v):
    shape = Shape(2, 4, 2, seqlen_q, seqlen_k, 5, head_dim_v)
    q, k, v = (x.double() for x in make_inputs(shape, torch.float32, "cpu"))
    out, lse = reference.forward(q, k, v, softmax_scale=0.3, **mask.options)
    visible = mask.visible(seqlen_q, seqlen_k).tolist()
    for batch in range(2):
        for head in range(4):
            tensors = (x.tolist() for x in (q[batch, head], k[batch, head // 2], v[batch, head // 2]))
            expected_out, expected_lse = by_definition(*tensors, visible, 0.3)
            torch.testing.assert_close(out[batch, head], torch.tensor(expected_out, dtype=torch.float64))
            torch.testing.assert_close(lse[batch, head], torch.tensor(expected_lse, dtype=torch.float64))


@pytest.mark.parametrize("causal", [False, True])
def test_reference_is_pytorchs(causal):
    """On squares, where the alignment of the causal mask does not matter; with the default scale."""
    q, k, v = (x.double() for x in make_inputs(Shape(2, 4, 2, 40, 40, 24), torch.float32, "cpu"))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(reference.forward(q, k, v, causal)[0], expected)


class TypesOfProducts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.types = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.bmm.default:
            self.types.update(x.dtype for x in args)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_products_of_16_bits_on_the_cpu(dtype):
    """In float32, which takes a tenth of the time; the errors are those of PyTorch's own products."""
    q, k, v = make_inputs(Shape(2, 3, 3, 100, 300, 64), dtype, "cpu", "contiguous")
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = (leaves[0] @ leaves[1].mT / 8).softmax(-1) @ leaves[2]
    dout = torch.randn_like(out)
    own = out, *torch.autograd.grad(out, leaves, dout)
    with TypesOfProducts() as products:
        results = [
            (reference.forward(q, k, v, dtype=t)[0], *reference.backward(q, k, v, dout, None, dtype=t))
            for t in (dtype, torch.float64)
        ]
    assert products.types == {torch.float32, torch.float64}
    for result, exact, allowed in zip(*results, own, strict=True):
        error, of_pytorch = ((x - exact).norm().item() for x in (result, allowed))
        assert error == pytest.approx(of_pytorch, rel=0.01)


def test_reference_ignores_unreachable_garbage():
    q, k, v = make_inputs(Shape(1, 2, 2, 4, 30, 8), torch.float32, "cpu")
    expected = reference.forward(q, k, v, window=(3, 3))
    k[:, :, :20], v[:, :, :20] = torch.nan, torch.inf
    for result, clean in zip(reference.forward(q, k, v, window=(3, 3)), expected, strict=True):
        assert torch.equal(result, clean)


@pytest.mark.parametrize(
    ("sentence", "heads", "window"),
    [
        ("window is -1; None, an int >= 0", 4, -1),
        ("window is (1, 2, 3); None, an int >= 0", 4, (1, 2, 3)),
        ("q has 3 heads and k 2; a multiple of k's", 3, None),
    ],
)
def test_reference_refuses(sentence, heads, window):
    q, k, v = make_inputs(Shape(1, 4, 2, 4, 30, 8), torch.float32, "cpu")
    with pytest.raises(ValueError, match=re.escape(sentence)):
        reference.forward(q[:, :heads], k, v, window=window)


def test_reference_of_nothing_has_no_error():
    nothing = torch.zeros(0, 2, 4, 8)
    assert reference.error(nothing, nothing.double()) == (0, 0)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 5), (3, 8), (8, 3)])
def test_reference_gradients_are_differences(mask, seqlen_q, seqlen_k):
    """Of both results, without what lies in rows that are not valid."""
    shape = Shape(1, 2, 1, seqlen_q, seqlen_k, 3, 2)
    q, k, v = (x.double() for x in make_inputs(shape, torch.float32, "cpu", "contiguous"))
    visible = mask.visible(seqlen_q, seqlen_k)
    blind = ~visible.any(1)
    dout, dlse = torch.randn(1, 2, seqlen_q, 2).double(), torch.randn(1, 2, seqlen_q).double()

    def loss(q, k, v):
        out, lse = reference.forward(q, k, v, softmax_scale=0.3, **mask.options)
        return ((out * dout).sum(-1) + lse * dlse)[:, :, ~blind].sum()

    dirty = [x.clone() for x in (q, k, v, dout, dlse)]
    for tensor in (dirty[0], dirty[3], dirty[4]):
        tensor[:, :, blind] = torch.nan
    for tensor in dirty[1:3]:
        tensor[:, :, ~visible.any(0)] = torch.nan
    gradients = reference.backward(*dirty, softmax_scale=0.3, **mask.options)
    step = 1e-6
    for index, gradient in enumerate(gradients):
        for place in range(gradient.numel()):
            up, down = ([x.clone() for x in (q, k, v)] for _ in range(2))
            up[index].view(-1)[place] += step
            down[index].view(-1)[place] -= step
            difference = (loss(*up) - loss(*down)) / (2 * step)
            torch.testing.assert_close(gradient.reshape(-1)[place], difference, rtol=1e-6, atol=1e-7)
