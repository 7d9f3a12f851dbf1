"""ranges=: each query sees the keys of a few ranges, in every shape, against float64 and dense masks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.cases import (
    DTYPES,
    MASKS,
    SEEDS,
    Mask,
    Ranged,
    Shape,
    make_gradients,
    make_inputs,
    make_ragged,
)
from support.ranges import (
    KINDS,
    RAGGED,
    anywhere,
    int32,
    make_ranges,
    ordered,
    ranges_of_sequences,
)
from support.tolerance import assert_attention, assert_gradients

import flash_cute
from flash_cute import reference

SOME_MASKS = {
    name: MASKS[name] for name in ("full", "causal", "window_symmetric", "window_right", "window_causal")
}
MANY_KEYS = {"few_queries": Shape(2, 8, 2, 4, 5000, 64), "a_chunk": Shape(1, 2, 2, 200, 9000, 64)}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_reference_is_the_union(kind):
    """By its definition, one query and key at a time."""
    shape = Shape(2, 1, 1, 9, 13, 8)
    ranges = make_ranges(shape, kind, 3, False, "cpu")
    seen = reference.visible(9, 13, window=(6, 2), ranges=ranges)
    for entry in range(2):
        for i in range(9):
            for j in range(13):
                found = any(start <= j < end for start, end in ranges[entry, 0, i].tolist())
                assert seen[entry, 0, i, j] == (found and i + 4 - 6 <= j <= i + 4 + 2)


@pytest.mark.gpu  # which cuts keys into parts
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("mask", SOME_MASKS.values(), ids=SOME_MASKS)
@pytest.mark.parametrize("shape", MANY_KEYS.values(), ids=MANY_KEYS)
def test_many_keys(kernel, shape, mask, kind):
    count, broadcast = SEEDS.randint(1, 4), SEEDS.random() < 0.5
    mask = Ranged.of(mask, make_ranges(shape, kind, count, broadcast, kernel.device))
    q, k, v = make_inputs(shape, SEEDS.choice(list(DTYPES.values())), kernel.device)
    assert_attention(kernel.forward(q, k, v, **mask.options), q, k, v, mask)
    dout, dlse = make_gradients(q)
    gradients = kernel.backward(q, k, v, dout, dlse, **mask.options)
    assert_gradients(gradients, q, k, v, dout, dlse, mask)


@pytest.mark.parametrize("by", ["argument", "torch"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
def test_a_family_without_deterministic_gradients(device, by, packed, backend):
    """It is said before a forward has run."""
    shape = (9, 2, 64) if packed else (1, 2, 9, 64)
    q = torch.randn(shape, device=device).bfloat16().requires_grad_()
    ranges = int32(torch.tensor([0, 9], device=device).repeat(9, 1)).view(
        *(() if packed else (1, 1)), 9, 1, 2
    )
    lengths = {"cu_seqlens_q": int32(torch.tensor([0, 9], device=device))} if packed else {}
    function = flash_cute.attention_varlen if packed else flash_cute.attention
    if backend:
        torch._dynamo.reset()
        function = torch.compile(function, backend=backend)
    options = {"family": "sm90", "deterministic": by == "argument"}
    sentence = "gradients with ranges or changed scores are deterministic, got 'sm90'"
    torch.use_deterministic_algorithms(by == "torch")
    try:
        with pytest.raises((ValueError, RuntimeError), match=sentence):
            function(q, q, q, **lengths, ranges=ranges, **options)
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_does_not_count_may_be_nan(kernel):
    """NaN in V and K behind seqused_k and before leftpad_k; any number in queries that see nothing."""
    device = kernel.device
    q, k, v = make_inputs(Shape(1, 4, 2, 130, 200, 64), torch.bfloat16, device)
    used, pad = (torch.tensor([x], dtype=torch.int32, device=device) for x in (150, 30))
    ranges = int32(ordered((1, 130, 3), 200)).to(device)
    ranges[:, :, 40:60] = torch.tensor([9, 9], dtype=torch.int32, device=device)
    options = {"seqused_k": used, "leftpad_k": pad, "ranges": ranges}
    dout, dlse = make_gradients(q)
    deterministic = replace(kernel, family=None) if kernel.family == "sm90" else kernel
    results = []
    for hidden, blind in ((torch.nan, 300), (0, 0)):
        for x in (k, v):
            x[:, :, 150:], x[:, :, :30] = hidden, hidden
        for x in (q, dout, dlse):
            x[:, :, 40:60] = blind
        gradients = deterministic.backward(q, k, v, dout, dlse, deterministic=True, **options)
        results.append((*kernel.forward(q, k, v, **options), *gradients))
    assert (results[0][0][:, :, 40:60] == 0).all()
    assert results[0][1][:, :, 40:60].isneginf().all()
    for with_nan, without in zip(*results, strict=True):
        assert torch.equal(with_nan, without)


def test_scores_of_minus_infinity(kernel):
    """Seen by a query, they give NaN and -inf, as in PyTorch; a query that sees nothing stays 0."""
    q = torch.zeros(1, 2, 3, 64, device=kernel.device).bfloat16()
    k = torch.zeros(1, 2, 5, 64, device=kernel.device).bfloat16()
    q[..., 0], k[:, :, :3, 0] = 1, -torch.inf
    v = torch.ones_like(k)
    rows = [[[0, 3], [5, 5]], [[1, 2], [4, 9]], [[3, 3], [2, 1]]]
    ranges = torch.tensor(rows, dtype=torch.int32, device=kernel.device)[None, None]
    out, lse = kernel.forward(q, k, v, ranges=ranges)
    assert out[:, :, 0].isnan().all()
    assert (out[:, :, 1] == 1).all()
    assert (out[:, :, 2] == 0).all()
    assert torch.equal(lse.cpu(), torch.tensor([-torch.inf, 0, -torch.inf]).expand(1, 2, 3))


SAME = {
    "documents": ([[0, 20]] * 20 + [[20, 50]] * 30, {}),
    "causal": ([[0, i + 1] for i in range(50)], {"causal": True}),
    "a window": ([[i - 7, i + 4] for i in range(50)], {"window": (7, 3)}),
}


@pytest.mark.parametrize("name", SAME)
def test_other_ways_to_say_it(kernel, name):
    """The same keys by the other arguments; within their rounding."""
    rows, options = SAME[name]
    q, k, v = make_inputs(Shape(1, 4, 2, 50, 50, 64), torch.bfloat16, kernel.device)
    ranges = torch.tensor(rows, dtype=torch.int32, device=kernel.device)[None, None, :, None]
    if name == "documents":
        offsets = torch.tensor([0, 20, 50], dtype=torch.int32, device=kernel.device)
        packed = [x[0].transpose(0, 1) for x in (q, k, v)]
        out, lse = kernel.forward(*packed, cu_seqlens_q=offsets)
        expected = out.transpose(0, 1)[None], lse[None]
    else:
        expected = kernel.forward(q, k, v, **options)
    for result, right in zip(kernel.forward(q, k, v, ranges=ranges), expected, strict=True):
        torch.testing.assert_close(result, right, atol=1e-2, rtol=1e-2)


def problem(device, count=2):
    shape = Shape(2, 4, 2, 20, 30, 64)
    tensors = make_inputs(shape, torch.bfloat16, device)
    return *tensors, make_ranges(shape, ordered, count, False, device)


def with_gradients(function, tensors, given):
    leaves = [x.detach().requires_grad_() for x in tensors]
    results = function(*leaves)
    return *results, *torch.autograd.grad(results, leaves, given)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(device, packed, dynamic):
    """ranges are an input of the graph."""
    q, k, v, ranges = problem(device)
    options = {"causal": True}
    if packed:
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        ranges = ranges.flatten(0, 2)
        for name, step in (("cu_seqlens_q", 20), ("cu_seqlens_k", 30)):
            options[name] = torch.tensor([0, step, 2 * step], dtype=torch.int32, device=device)
    function = flash_cute.forward_varlen if packed else flash_cute.forward
    given = torch.randn_like(q), torch.randn(q.shape[1::-1] if packed else q.shape[:3], device=device)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    found, expected = (
        with_gradients(lambda *x, call=call: call(*x, ranges=ranges, **options), (q, k, v), given)
        for call in (compiled, function)
    )
    for result, right in zip(found, expected, strict=True):
        assert torch.equal(result, right)


def test_exported(device):
    class Model(torch.nn.Module):
        def forward(self, q, k, v, ranges):
            return flash_cute.forward(q, k, v, ranges=ranges)

    *tensors, ranges = problem(device)
    program = torch.export.export(Model(), (*tensors, ranges))
    other = ranges.flip(2).contiguous()
    expected = flash_cute.forward(*tensors, ranges=other)
    for result, right in zip(program.module()(*tensors, other), expected, strict=True):
        assert torch.equal(result, right)


VMAPPED = {
    "all": (0, 0, 0, 0),
    "ranges alone": (None, None, None, 0),
    "all but ranges": (0, 0, 0, None),
    "q and ranges": (1, None, None, 2),
}


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("dims", VMAPPED.values(), ids=VMAPPED)
def test_mapped(device, dims, broadcast):
    calls = [problem(device) for _ in range(3)]
    if broadcast:
        calls = [(*tensors, ranges[:1]) for *tensors, ranges in calls]

    def call(q, k, v, ranges):
        return flash_cute.forward(q, k, v, causal=True, ranges=ranges)

    columns = list(zip(*calls, strict=True))
    several = [
        column[0] if dim is None else torch.stack(column, dim)
        for column, dim in zip(columns, dims, strict=True)
    ]
    expected = [
        call(*(column[0 if dim is None else i] for column, dim in zip(columns, dims, strict=True)))
        for i in range(3)
    ]
    for result, entries in zip(torch.vmap(call, dims)(*several), zip(*expected, strict=True), strict=True):
        assert torch.equal(result, torch.stack(entries))
    if dims[0] == 0:
        gradient = torch.func.grad(lambda *x: call(*x)[0].float().square().sum(), (0, 1, 2))
        results = torch.vmap(gradient, dims)(*several)
        alone = [
            gradient(*(column[0 if dim is None else i] for column, dim in zip(columns, dims, strict=True)))
            for i in range(3)
        ]
        for result, entries in zip(results, zip(*alone, strict=True), strict=True):
            torch.testing.assert_close(result, torch.stack(entries))


STRIDES = {
    "every second": lambda r: r.repeat_interleave(2, 2)[:, :, ::2],
    "ends first in memory": lambda r: r.flip(-1).contiguous().flip(-1),
    "ranges outermost": lambda r: r.transpose(2, 3).contiguous().transpose(2, 3),
    "batch behind queries": lambda r: r.transpose(0, 2).contiguous().transpose(0, 2),
}


@pytest.mark.parametrize("change", STRIDES.values(), ids=STRIDES)
def test_strides(device, change):
    """Whatever they are; one entry may be expanded over the batch."""
    q, k, v, ranges = problem(device)
    expected = flash_cute.forward(q, k, v, ranges=ranges)
    for result, right in zip(flash_cute.forward(q, k, v, ranges=change(ranges)), expected, strict=True):
        assert torch.equal(result, right)
    one = ranges[:1]
    expected = flash_cute.forward(q, k, v, ranges=one.repeat(2, 1, 1, 1, 1))
    for same in (one, one.expand(2, -1, -1, -1, -1)):
        for result, right in zip(flash_cute.forward(q, k, v, ranges=same), expected, strict=True):
            assert torch.equal(result, right)


SIZES = {"no queries": (0, 30), "no keys": (20, 0), "neither": (0, 0)}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_empty(kernel, size):
    for batch in (0, 2):
        shape = Shape(batch, 4, 2, *size, 64)
        q, k, v = make_inputs(shape, torch.bfloat16, kernel.device, "contiguous")
        ranges = torch.zeros(batch, 1, size[0], 2, 2, dtype=torch.int32, device=kernel.device)
        out, lse = kernel.forward(q, k, v, ranges=ranges)
        assert (out == 0).all()
        assert lse.isneginf().all()
        gradients = kernel.backward(q, k, v, torch.ones_like(out), None, ranges=ranges)
        assert all((gradient == 0).all() for gradient in gradients)


def test_explain_counts_what_is_seen(device):
    sequences = RAGGED["used and left padding"]
    for packed in (False, True):
        batch = make_ragged(sequences, (4, 2), 64, torch.bfloat16, device, packed)
        ranges, masks = ranges_of_sequences(batch, sequences, anywhere, 4, MASKS["window_causal"])
        pairs = sum(
            int(
                reference.visible(
                    q.stop - q.start, k.stop - k.start, *mask_of(mask), ranges=mask.ranges.cpu()
                ).sum()
            )
            for mask, (_, q, k) in zip(masks, batch.places, strict=True)
        )
        options = MASKS["window_causal"].options | batch.lengths
        plan = flash_cute.explain(batch.q, batch.k, batch.v, **options, ranges=ranges.to(device))
        assert plan["flops"] == 4 * 64 * 4 * pairs


def mask_of(mask: Mask) -> tuple:
    return mask.causal, mask.window


SHAPE = (
    "ranges must have shape (batch or 1, 1, seqlen_q, R, 2) with R from 1 to 4, here (2 or 1, 1, 20, R, 2)"
)
WRONG = {
    "of no range": (lambda r: r[..., :0, :], f"{SHAPE}, got (2, 1, 20, 0, 2)"),
    "of five ranges": (lambda r: r[..., :1, :].repeat(1, 1, 1, 5, 1), f"{SHAPE}, got (2, 1, 20, 5, 2)"),
    "of other queries": (lambda r: r[:, :, 1:], f"{SHAPE}, got (2, 1, 19, 2, 2)"),
    "of another batch": (lambda r: r.repeat(2, 1, 1, 1, 1), f"{SHAPE}, got (4, 1, 20, 2, 2)"),
    "of three bounds": (lambda r: r.repeat(1, 1, 1, 1, 2)[..., :3], f"{SHAPE}, got (2, 1, 20, 2, 3)"),
    "packed": (lambda r: r[0, 0], f"{SHAPE}, got (20, 2, 2)"),
    "of heads": (
        lambda r: r.repeat(1, 4, 1, 1, 1),
        "ranges must be alike for all heads, with 1 in dimension 1, got 4",
    ),
    "of int64": (torch.Tensor.long, "ranges has dtype torch.int64; torch.int32 is accepted"),
    "on another device": (lambda r: r.to("meta"), "ranges is on device meta"),
    "a list": (torch.Tensor.tolist, "ranges is of type list; a torch.Tensor is accepted"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_ranges(device, name):
    change, words = WRONG[name]
    q, k, v, ranges = problem(device)
    with pytest.raises(
        (ValueError, TypeError, NotImplementedError), match=r"^flash_cute\.forward: "
    ) as error:
        flash_cute.forward(q, k, v, ranges=change(ranges))
    assert words in str(error.value)


def test_wrong_packed_ranges(device):
    q, k, v, ranges = problem(device)
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    offsets = {
        "cu_seqlens_q": torch.tensor([0, 20], dtype=torch.int32, device=device),
        "cu_seqlens_k": torch.tensor([0, 30], dtype=torch.int32, device=device),
    }
    sentence = (
        r"flash_cute\.forward_varlen: ranges must have shape \(total_q, R, 2\) with R from 1 to 4, here "
        r"\(20, R, 2\), got \(2, 1, 20, 2, 2\)"
    )
    with pytest.raises(ValueError, match=sentence):
        flash_cute.forward_varlen(q, k, v, **offsets, ranges=ranges)


def test_values_are_no_mistakes(device, monkeypatch):
    """Whatever they are, with FLASH_CUTE_CHECK=1, too: every pair of numbers is a range."""
    q, k, v, _ = problem(device)
    expected = {}
    for checked in (False, True):
        monkeypatch.setattr(flash_cute.lengths, "CHECKED", checked)
        for kind in KINDS.values():
            ranges = expected.setdefault(
                kind, make_ranges(Shape(2, 4, 2, 20, 30, 64), kind, 2, False, device)
            )
            flash_cute.forward(q, k, v, ranges=ranges)
