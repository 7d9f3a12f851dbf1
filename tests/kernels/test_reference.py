"""The oracle itself, against attention written out pair by pair, and against PyTorch's own."""

from __future__ import annotations

import math
import re
from itertools import product

import pytest
import torch
from support.cases import DTYPES, MASKS, Shape, make_inputs
from torch.utils._python_dispatch import TorchDispatchMode

import flash_cute
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


def changed_by_definition(score: float, place, options) -> float:
    """What softmax is of; place: sequence, head, query, key, and the sizes of the last two."""
    n, head, i, j, seqlen_q, seqlen_k = place
    if softcap := options.get("softcap"):
        score = softcap * math.tanh(score / softcap)
    if "bias" in options:
        bias = options["bias"]
        entry = n // (2 // len(bias)), head, i, j
        score += bias[tuple(at % size for at, size in zip(entry, bias.shape, strict=True))].item()
    if "alibi_slopes" in options:
        slopes = options["alibi_slopes"]
        slope = slopes[head] if slopes.dim() == 1 else slopes[n, head]
        score -= slope.item() * abs(i + seqlen_k - seqlen_q - j)
    return score


BITS = torch.tensor([[0b1011001, 0b10], [0b11111111, 0b11111101], [0, 0]], dtype=torch.uint8)
CHANGES = {
    "softcap": lambda: {"softcap": 0.4},
    "mask": lambda: {"mask": torch.rand(2, 1, 7, 9) < 0.6},
    "bits": lambda: {"mask": BITS[torch.randint(0, 3, (7,))][None, None]},
    "a bias for each": lambda: {"bias": torch.randn(2, 4, 7, 9)},
    "a bias for both": lambda: {"bias": torch.randn(1, 1, 7, 1)},
    "-inf": lambda: {"bias": torch.randn(2, 1, 1, 9).masked_fill(torch.rand(2, 1, 1, 9) < 0.5, -torch.inf)},
    "slopes": lambda: {"alibi_slopes": torch.rand(4)},
    "slopes of sequences": lambda: {"alibi_slopes": torch.rand(2, 4)},
    "dropout": lambda: {"dropout_p": 0.3, "dropout_seed": torch.tensor([1, 2])},
}
CHANGES["all"] = lambda: {
    name: value
    for kind in ("softcap", "bits", "-inf", "slopes", "dropout")
    for name, value in CHANGES[kind]().items()
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_changed_reference_is_the_definition(changes, causal):
    """One query and key at a time, in Python's floats."""
    options = changes()
    q, k, v = (x.double() for x in make_inputs(Shape(2, 4, 2, 7, 9, 5, 3), torch.float32, "cpu"))
    out, lse = reference.forward(q, k, v, causal, 0.8, **options)
    p = options.get("dropout_p", 0)
    kept = flash_cute.dropout_mask(torch.tensor([1, 2]), 2, 4, 7, 9, p).tolist()
    for n, head, i in product(range(2), range(4), range(7)):
        scores, total, row = {}, 0, [0.0] * 3
        for j in range(9):
            score = 0.8 * (q[n, head, i] @ k[n, head // 2, j]).item()
            score = changed_by_definition(score, (n, head, i, j, 7, 9), options)
            seen = j <= i + 2 or not causal
            if (mask := options.get("mask")) is not None:
                of_row = mask[n % len(mask), 0, i]
                bit = of_row[j].item() if mask.dtype == torch.bool else of_row[j // 8].item() >> j % 8 & 1
                seen = seen and bit
            if seen and score > -math.inf:
                scores[j] = score
                total += math.exp(score)
        for j, score in scores.items():
            weight = math.exp(score) / total * kept[n][head][i][j] / (round(4096 * (1 - p)) / 4096)
            row = [x + weight * of_v for x, of_v in zip(row, v[n, head // 2, j].tolist(), strict=True)]
        expected = math.log(total) if scores else -math.inf
        torch.testing.assert_close(lse[n, head, i], torch.tensor(expected, dtype=torch.float64))
        torch.testing.assert_close(out[n, head, i], torch.tensor(row, dtype=torch.float64))


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


CHANGED = {
    "nothing else": (),
    "softcap": ("softcap",),
    "dropout": ("dropout",),
    "more": ("softcap", "slopes"),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 5), (3, 8), (8, 3)])
@pytest.mark.parametrize("kinds", CHANGED.values(), ids=CHANGED)
def test_reference_gradients_are_differences(kinds, mask, seqlen_q, seqlen_k):
    """Of both results, without what lies in rows that are not valid."""
    options = mask.options | {name: x for kind in kinds for name, x in CHANGES[kind]().items()}
    options |= {"alibi_slopes": options["alibi_slopes"][:2]} if "slopes" in kinds else {}
    shape = Shape(1, 2, 1, seqlen_q, seqlen_k, 3, 2)
    q, k, v = (x.double() for x in make_inputs(shape, torch.float32, "cpu", "contiguous"))
    visible = mask.visible(seqlen_q, seqlen_k)
    blind = ~visible.any(1)
    dout, dlse = torch.randn(1, 2, seqlen_q, 2).double(), torch.randn(1, 2, seqlen_q).double()

    def loss(q, k, v):
        out, lse = reference.forward(q, k, v, softmax_scale=0.3, **options)
        return ((out * dout).sum(-1) + lse * dlse)[:, :, ~blind].sum()

    dirty = [x.clone() for x in (q, k, v, dout, dlse)]
    for tensor in (dirty[0], dirty[3], dirty[4]):
        tensor[:, :, blind] = torch.nan
    for tensor in dirty[1:3]:
        tensor[:, :, ~visible.any(0)] = torch.nan
    gradients = reference.backward(*dirty, softmax_scale=0.3, **options)
    step = 1e-6
    for index, gradient in enumerate(gradients):
        for place in range(gradient.numel()):
            up, down = ([x.clone() for x in (q, k, v)] for _ in range(2))
            up[index].view(-1)[place] += step
            down[index].view(-1)[place] -= step
            difference = (loss(*up) - loss(*down)) / (2 * step)
            torch.testing.assert_close(gradient.reshape(-1)[place], difference, rtol=1e-6, atol=1e-7)
