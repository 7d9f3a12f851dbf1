"""Scores that people change, forward and backward: the table of cases, and what is special to each."""

from __future__ import annotations

import pytest
import torch
from support.cases import DTYPES, SEEDS, Shape, make_gradients, make_inputs
from support.lengths import int32
from support.scores import packed_bits
from support.table import check_forward, check_gradients
from support.tolerance import assert_within_rule

import flash_cute
from flash_cute import reference
from flash_cute._cpu import scores as scores_of_cpu

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def test_table(kernel, changed_forward_case):
    check_forward(kernel, changed_forward_case)


def test_gradients(kernel, changed_gradient_case):
    check_gradients(kernel, changed_gradient_case)


def both_passes(kernel, tensors, given, **options) -> tuple[torch.Tensor, ...]:
    """out, lse, dq, dk and dv."""
    return *kernel.forward(*tensors, **options), *kernel.backward(*tensors, *given, **options)


def problem(device, dtype=torch.bfloat16, shape=None, seed=None):
    """q, k, v, and dout and dlse."""
    shape = shape or Shape(2, 4, 2, 130, 200, 64)
    tensors = make_inputs(shape, dtype, device, seed=seed)
    return tensors, make_gradients(tensors[0], head_dim_v=shape.head_dim_v)


def assert_right(found, tensors, given, **options) -> None:
    """By the tolerance rule, against the reference."""
    oracle, yardstick = (
        (
            *reference.forward(*tensors, dtype=dtype, **options),
            *reference.backward(*tensors, *given, dtype=dtype, **options),
        )
        for dtype in (torch.float64, tensors[0].dtype)
    )
    names = "out", "lse", "dq", "dk", "dv"
    for name, *results in zip(names, found, yardstick, oracle, strict=True):
        assert_within_rule(name, *results)


@dtypes
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_all_at_once(kernel, causal, head_dim, dtype):
    device = kernel.device
    tensors, given = problem(device, dtype, Shape(2, 4, 2, 150, 210, head_dim))
    options = {
        "mask": torch.rand(2, 1, 150, 210, device=device) < 0.7,
        "bias": torch.randn(2, 4, 150, 210, device=device).to(dtype),
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.01], device=device),
        "softcap": 20.0,
        "dropout_p": 0.2,
        "dropout_seed": torch.tensor([SEEDS.getrandbits(62), 5], device=device),
    }
    found = both_passes(kernel, tensors, given, causal=causal, **options)
    assert_right(found, tensors, given, causal=causal, **options)


def tiles(device, *size: int) -> torch.Tensor:
    """Of tiles of 64 x 64 some that are seen, some that are hidden, and a few in which one pair is other."""
    whole = torch.rand(-(-size[0] // 64), -(-size[1] // 64), device=device) < 0.5
    mask = whole.repeat_interleave(64, 0).repeat_interleave(64, 1)[: size[0], : size[1]].contiguous()
    odd = torch.randint(0, mask.numel(), (whole.numel() // 4 + 1,), device=device)
    mask.view(-1)[odd] ^= True
    return mask


@pytest.mark.parametrize("shape", [Shape(1, 2, 2, 700, 900, 64), Shape(1, 4, 1, 333, 1030, 128)], ids=str)
@pytest.mark.parametrize("bits", [False, True])
def test_masks_of_whole_tiles(kernel, bits, shape):
    """Where kernels leave out what is hidden, and don't look at each pair of what is seen."""
    tensors, given = problem(kernel.device, shape=shape)
    mask = tiles(kernel.device, shape.seqlen_q, shape.seqlen_k)[None, None]
    mask = packed_bits(mask) if bits else mask
    assert_right(both_passes(kernel, tensors, given, mask=mask), tensors, given, mask=mask)


def causal_pairs(device):
    row, key = torch.arange(130, device=device).unsqueeze(1), torch.arange(200, device=device)
    return (key <= row + 70)[None, None]


def same_arguments(device):
    """Two ways to say the same, which may differ by their rounding."""
    keys = torch.arange(200, device=device).view(1, 1, 1, 200)
    used = int32([120, 200], device)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0], device=device)
    row, key = torch.arange(130, device=device).unsqueeze(1), torch.arange(200, device=device)
    distance = (row + 70 - key).abs().float()
    ranges = int32([[20, 150], [0, 64]], device).view(2, 1, 1, 1, 2).expand(2, 1, 130, 1, 2)
    start, end = ranges[:, :, :, 0, :1], ranges[:, :, :, 0, 1:]
    return {
        "causal": ({"causal": True}, {"mask": causal_pairs(device)}),
        "lengths": ({"seqused_k": used}, {"mask": keys < used.view(2, 1, 1, 1)}),
        "ranges": ({"ranges": ranges}, {"mask": (keys >= start) & (keys < end)}),
        "-inf": (
            {"mask": causal_pairs(device)},
            {"bias": torch.zeros_like(causal_pairs(device), dtype=torch.float32).masked_fill(
                ~causal_pairs(device), -torch.inf)},
        ),
        "the lowest number": (
            {"mask": causal_pairs(device)},
            {"bias": torch.zeros_like(causal_pairs(device), dtype=torch.float32).masked_fill(
                ~causal_pairs(device), torch.finfo(torch.float32).min)},
        ),
        "slopes": ({"alibi_slopes": slopes}, {"alibi_slopes": slopes.expand(2, 4).contiguous()}),
        "slopes as a bias": (
            {"alibi_slopes": slopes.round()},
            {"bias": -(slopes.round()[:, None, None] * distance.clamp(max=200))[None]},
        ),
        "a cap that nothing reaches": ({}, {"softcap": 1e4}),
        "a bias of 0": ({}, {"bias": torch.zeros(1, 1, 1, 1, device=device)}),
        "nothing hidden": ({}, {"mask": torch.ones(1, 1, 1, 200, dtype=torch.bool, device=device)}),
    }  # fmt: skip


@pytest.mark.parametrize("name", same_arguments(torch.device("cpu")))
def test_other_ways_to_say_it(kernel, name):
    tensors, given = problem(kernel.device)
    one, other = same_arguments(kernel.device)[name]
    found, expected = (both_passes(kernel, tensors, given, **options) for options in (one, other))
    for result, right in zip(found, expected, strict=True):
        torch.testing.assert_close(result, right, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("kind", "one"), [*((kind, one) for kind in ("mask", "bits", "bias") for one in range(3)), ("bias", 3)]
)
def test_what_is_alike_may_have_one_entry(kernel, kind, one):
    """As of a tensor that has all of them, or is expanded."""
    tensors, given = problem(kernel.device)
    size = [1 if dim == one else n for dim, n in enumerate((2, 4, 130, 200))]
    if kind == "bias":
        small = torch.randn(size, device=kernel.device).bfloat16()
    else:
        small = torch.rand(size, device=kernel.device) < 0.7
        small = packed_bits(small) if kind == "bits" else small
    expanded = small.expand(2, 4, 130, -1 if one < 3 else 200)
    name = "bias" if kind == "bias" else "mask"
    expected = both_passes(kernel, tensors, given, **{name: expanded.contiguous()})
    for x in (small, expanded):
        for result, right in zip(both_passes(kernel, tensors, given, **{name: x}), expected, strict=True):
            torch.testing.assert_close(result, right, atol=1e-2, rtol=1e-2)
            assert kernel.family or torch.equal(result, right)


def test_bits_are_booleans(kernel):
    """With any bits of no key behind the last one."""
    tensors, _ = problem(kernel.device, shape=Shape(2, 4, 2, 130, 203, 64))
    mask = torch.rand(2, 4, 130, 203, device=kernel.device) < 0.6
    expected = kernel.forward(*tensors, mask=mask)
    bits = packed_bits(mask)
    for x in (bits, torch.cat((bits[..., :-1], bits[..., -1:] & 7), -1)):
        for result, right in zip(kernel.forward(*tensors, mask=x), expected, strict=True):
            assert torch.equal(result, right)


@dtypes
def test_rows_of_the_lowest_number_alone(kernel, dtype):
    """The mean of V, finite, with the gradients of a mean; beside any other number the lowest is nothing."""
    tensors, (dout, _) = problem(kernel.device, dtype)
    bias = torch.zeros(2, 1, 130, 200, device=kernel.device)
    bias[:, :, 40:60] = torch.finfo(torch.float32).min
    bias[:, :, 60:, 50:150] = torch.finfo(torch.float32).min
    q, k, v = tensors
    q = q.clone()
    q[:, :, 40:60] = 0  # float16 has no number that is so low that it leaves no room for scores
    found = both_passes(kernel, (q, k, v), (dout, None), bias=bias)
    assert found[1].isfinite().all()
    assert (found[1][:, :, 40:60] < -6e4).all()
    mean = v.double().mean(2, keepdim=True).repeat_interleave(2, 1).expand(-1, -1, 20, -1)
    torch.testing.assert_close(found[0][:, :, 40:60].double(), mean, atol=2e-3, rtol=2e-2)
    seen = torch.ones(2, 1, 130, 200, dtype=torch.bool, device=kernel.device)
    seen[:, :, 60:, 50:150] = False
    oracle, yardstick = (
        (
            *reference.forward(q, k, v, dtype=t, mask=seen),
            *reference.backward(q, k, v, dout, None, dtype=t, mask=seen),
        )
        for t in (torch.float64, dtype)
    )
    for name, *results in zip(("out", "dq", "dk", "dv"), *(x[:1] + x[2:] for x in (found, yardstick, oracle)),
                              strict=True):  # fmt: skip
        assert_within_rule(name, *results)


HIDING = "mask", "bits", "bias", "mask and window", "bias and ranges", "mask and bias", "mask and lengths"


@pytest.mark.parametrize("kind", HIDING)
def test_who_sees_nothing(kernel, kind):
    """Of results and gradients 0 and -inf; what its row holds, or a key that nobody sees, is of no matter."""
    device = kernel.device
    tensors, given = problem(device)
    seen = torch.rand(2, 4, 130, 200, device=device) < 0.8
    seen[:, :, 30:50] = False
    seen[..., 90:110] = False
    options, low = {}, torch.zeros(2, 4, 130, 200, device=device).bfloat16()
    if kind == "mask and window":  # of which each alone leaves something
        options["window"] = (20, 20)
        row, key = torch.arange(130, device=device)[:, None] + 70, torch.arange(200, device=device)
        own = (key - row).abs() <= 20
        seen[:, :, 30:50] = ~own[30:50]
        expected = seen & own
    elif kind == "bias and ranges":
        ranges = int32([[0, 80]], device).view(1, 1, 1, 1, 2).repeat(1, 1, 130, 1, 1)
        options["ranges"] = ranges
        seen[:, :, 30:50, 100:] = True
        expected = seen & (torch.arange(200, device=device) < 80)
    elif kind == "mask and lengths":
        options["seqused_k"] = int32([150, 150], device)
        seen[:, :, 30:50, 150:] = True
        expected = seen & (torch.arange(200, device=device) < 150)
    else:
        expected = seen
    if "bias" in kind:
        part = seen if kind != "mask and bias" else seen | (torch.arange(200, device=device) < 100)
        options["bias"] = low.masked_fill(~part, -torch.inf)
    if "bias" not in kind or kind == "mask and bias":
        part = seen if kind != "mask and bias" else seen | (torch.arange(200, device=device) >= 100)
        options["mask"] = packed_bits(part) if kind == "bits" else part
    blind, unseen = ~expected.any(-1), ~expected.any(2).unflatten(1, (2, 2)).any(2)
    assert blind[:, :, 30:50].all()
    assert unseen.any()
    results = []
    # On a GPU what no number is may spread within a tile.
    for hidden in (0, torch.nan if kernel.family is None else 300):
        q, dout, dlse = (x.clone() for x in (tensors[0], *given))
        k, v = (x.clone() for x in tensors[1:])
        for x in (q, dout, dlse):
            x[blind] = hidden
        for x in (k, v):
            x[unseen] = hidden
        results.append(both_passes(kernel, (q, k, v), (dout, dlse), **options))
    for result, same in zip(*results, strict=True):
        torch.testing.assert_close(result, same, rtol=0, atol=0 if kernel.family is None else 1e-2)
    out, lse, dq, dk, dv = results[1]
    assert torch.equal(lse.isneginf(), blind)
    assert lse[~blind].isfinite().all()
    for result, zero in ((out, blind), (dq, blind), (dk, unseen), (dv, unseen)):
        assert (result[zero] == 0).all()


def test_scores_of_minus_infinity(kernel):
    """Seen by a query, they give NaN and -inf, as in PyTorch; a query that sees nothing stays 0."""
    q = torch.zeros(1, 2, 3, 64, device=kernel.device).bfloat16()
    k = torch.zeros(1, 2, 5, 64, device=kernel.device).bfloat16()
    q[..., 0], k[:, :, :3, 0] = 1, -torch.inf
    v = torch.ones_like(k)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 0, 0, 1], [0, 0, 0, 0, 0]], device=kernel.device).bool()
    out, lse = kernel.forward(q, k, v, mask=mask[None, None])
    assert out[:, :, 0].isnan().all()
    assert (out[:, :, 1] == 1).all()
    assert (out[:, :, 2] == 0).all()
    assert torch.equal(lse.cpu(), torch.tensor([-torch.inf, 0, -torch.inf]).expand(1, 2, 3))


@pytest.mark.parametrize("bits", [False, True])
@pytest.mark.parametrize("pages", [False, True])
def test_a_mask_of_the_last_keys(kernel, pages, bits):
    """As drafts of a tree have it, behind any number of keys that all of them see."""
    device, columns, used = kernel.device, 24, [24, 57, 100, 10]
    q, k, v = make_inputs(Shape(4, 4, 2, 8, 112, 64), torch.bfloat16, device)
    drafts = torch.rand(4, 1, 8, columns, device=device) < 0.5
    whole = torch.ones(4, 1, 8, 112, dtype=torch.bool, device=device)
    for n, count in enumerate(used):
        own = min(count, columns)
        whole[n, ..., count - own : count] = drafts[n, ..., columns - own :]
    lengths = {"seqused_k": int32(used, device)}
    expected = kernel.forward(q, k, v, mask=whole, **lengths)
    if pages:
        lengths["block_table"] = int32(torch.randperm(28).view(4, 7).tolist(), device)
        k, v = (
            torch.empty(28, 2, 16, 64, device=device)
            .bfloat16()
            .index_copy_(
                0,
                lengths["block_table"].flatten().long(),
                x.unflatten(2, (7, 16)).transpose(1, 2).flatten(0, 1),
            )
            for x in (k, v)
        )
    found = kernel.forward(q, k, v, mask=packed_bits(drafts) if bits else drafts, **lengths)
    for result, right in zip(found, expected, strict=True):
        torch.testing.assert_close(result, right, atol=1e-2, rtol=1e-2)


def test_a_cap_bounds_scores(kernel):
    """Scores of some hundreds, far beyond the cap and well below it."""
    (q, k, v), given = problem(kernel.device)
    tensors = q * 20, k * 5, v
    for softcap in (50.0, 5.0, 0.5):
        assert_right(both_passes(kernel, tensors, given, softcap=softcap), tensors, given, softcap=softcap)
        _, lse = kernel.forward(*tensors, softcap=softcap)
        assert (lse <= softcap + torch.tensor(200.0).log().item() + 1e-3).all()


def test_sums_of_finite_numbers_are_finite():
    """Also where a score is so low that float32 has no number for its sum with a bias: such keys are seen."""
    q, v = torch.ones(1, 1, 1, 8), torch.randn(1, 1, 5, 8)
    k = torch.full((1, 1, 5, 8), -1e35)
    lowest = torch.finfo(torch.float32).min
    out, lse = flash_cute.forward(q, k, v, softmax_scale=1.0, bias=torch.full((1, 1, 1, 5), lowest))
    torch.testing.assert_close(out[0, 0, 0], v[0, 0].mean(0))
    assert lse.item() == lowest


def test_blocks_of_the_cpu(monkeypatch):
    """However few queries are computed at once, with the same pairs that dropout keeps."""
    tensors, given = problem(torch.device("cpu"), torch.float32, Shape(1, 4, 2, 77, 90, 24, 16))
    options = {
        "mask": torch.rand(1, 4, 77, 90) < 0.7,
        "bias": torch.randn(1, 1, 77, 90),
        "alibi_slopes": torch.rand(4),
        "softcap": 3.0,
        "dropout_p": 0.3,
        "dropout_seed": torch.tensor([1, 2]),
        "window": (60, 9),
        "ranges": int32([[0, 30], [20, 80]], "cpu").repeat(77, 1, 1)[None, None],
    }
    results = []
    for size in (1 << 20, 1 << 13, 1):
        monkeypatch.setattr(scores_of_cpu, "_SCORES", size)
        leaves = [x.clone().requires_grad_() for x in tensors]
        found = flash_cute.forward(*leaves, **options)
        results.append((*found, *torch.autograd.grad(found, leaves, given)))
    assert_right(results[0], tensors, given, **options)
    for other in results[1:]:
        for result, right in zip(other, results[0], strict=True):
            torch.testing.assert_close(result, right)


def test_a_mask_of_too_many_heads(kernel):
    q = torch.zeros(1, 65536, 1, 8, device=kernel.device, dtype=torch.bfloat16)
    mask = torch.ones(1, 65536, 1, 1, device=kernel.device, dtype=torch.bool)
    if kernel.family is None:
        assert flash_cute.forward(q, q, q, mask=mask)[0].shape == q.shape
    else:
        with pytest.raises(
            ValueError, match="mask has 65536 heads; 1, or at most 65535, are accepted on a GPU"
        ):
            flash_cute.forward(q, q, q, mask=mask, family=kernel.family)
    assert flash_cute.forward(q, q, q, mask=mask[:, :1], family=kernel.family)[0].shape == q.shape
