"""Batches of unequal lengths, packed and padded, against float64 sequence by sequence."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from support.cases import (
    BATCHES,
    BUCKETS,
    DTYPES,
    FULL_AND_CAUSAL,
    MASKS,
    PACKED,
    Sequence,
    Shape,
    make_inputs,
    make_ragged,
)
from support.lengths import WILD_LENGTHS, WILD_OFFSETS, clamped, int32
from support.tolerance import assert_attention, assert_ragged

import flash_cute
from flash_cute import lengths

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
masks = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
full_and_causal = pytest.mark.parametrize("mask", FULL_AND_CAUSAL.values(), ids=FULL_AND_CAUSAL)
both = pytest.mark.parametrize("packed", PACKED.values(), ids=PACKED)
SOME = "unequal", "some empty", "one query each", "used and left padding"


def check(kernel, sequences, packed, mask, dtype=torch.bfloat16, heads=(4, 2), head_dim=64, **options):
    batch = make_ragged(sequences, heads, head_dim, dtype, kernel.device, packed, **options)
    result = kernel.forward(batch.q, batch.k, batch.v, **batch.lengths, **mask.options)
    assert_ragged(result, batch, mask)


@pytest.mark.gpu  # where head dims choose kernels
@both
@pytest.mark.parametrize("mask", [MASKS[name] for name in ("full", "causal", "window_causal")])
@pytest.mark.parametrize("head_dim", BUCKETS)
@pytest.mark.parametrize("name", [*SOME, "tile edges", "one long"])
def test_lengths_in_every_bucket(kernel, name, head_dim, packed, mask):
    check(kernel, BATCHES[name], packed, mask, head_dim=head_dim)


@both
@pytest.mark.parametrize("head_dim", [64, 96, 40])
@pytest.mark.parametrize("counts", [(0, 0, 0), (0, 1, 0), (700, 0, 3)], ids=str)
def test_mostly_padding(kernel, counts, head_dim, packed):
    """More rows that no tile writes than rows that one does; and no tile at all."""
    sequences = tuple(Sequence(700, 700, count, 700) for count in counts)
    check(kernel, sequences, packed, MASKS["causal"], head_dim=head_dim)


@full_and_causal
@both
@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.gpu)])
def test_sequences_of_length_one(kernel, count, packed, mask):
    """Each query has one key: out is its value."""
    shape = Shape(1, 4, 2, count, count, 64) if packed else Shape(count, 4, 2, 1, 1, 64)
    tensors = make_inputs(shape, torch.bfloat16, kernel.device)
    q, k, v = (x[0].transpose(0, 1) if packed else x.squeeze(2) for x in tensors)
    if packed:
        offsets = torch.arange(count + 1, dtype=torch.int32, device=kernel.device)
        out, lse = kernel.forward(q, k, v, cu_seqlens_q=offsets, **mask.options)
        lse = lse.T
    else:
        ones = torch.ones(count, dtype=torch.int32, device=kernel.device)
        out, lse = kernel.forward(*tensors, seqused_q=ones, seqused_k=ones, **mask.options)
        out, lse = out.squeeze(2), lse.squeeze(2)
    assert torch.equal(out, v.repeat_interleave(2, 1))
    torch.testing.assert_close(lse, (q.float() * k.float().repeat_interleave(2, 1)).sum(-1) / 8)


@pytest.mark.gpu
@full_and_causal
@both
def test_one_sequence_among_many_short(kernel, packed, mask):
    sequences = (Sequence(40, 40),) * 20 + (Sequence(5000, 5000),) + (Sequence(40, 40),) * 20
    check(kernel, sequences, packed, mask, heads=(2, 1), head_dim=128)


@pytest.mark.gpu  # more tiles than multiprocessors, which are shared out where all are as long as the mean
@full_and_causal
@both
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("count", [20, 100], ids=["listed by each block", "listed before"])
@pytest.mark.parametrize("more", [0, 1], ids=["alike", "almost alike"])
def test_many_tiles_of_equal_lengths(kernel, more, count, head_dim, heads, packed, mask):
    sequences = [Sequence(260, 260)] * (count - 2) + [Sequence(260 + more, 260), Sequence(260 - more, 260)]
    if not packed:
        sequences = [Sequence(260, 260, sequence.rows_q - more, 260) for sequence in sequences]
    check(kernel, sequences, packed, mask, heads=heads, head_dim=head_dim)


def test_self_attention_needs_one_set_of_offsets(kernel):
    batch = make_ragged(
        tuple(Sequence(n, n) for n in (30, 0, 150)), (4, 2), 64, torch.bfloat16, kernel.device, packed=True
    )
    offsets = batch.lengths["cu_seqlens_q"]
    result = kernel.forward(batch.q, batch.k, batch.v, cu_seqlens_q=offsets, causal=True)
    assert_ragged(result, batch, MASKS["causal"])
    out = flash_cute.attention_varlen(batch.q, batch.k, batch.v, offsets, causal=True, family=kernel.family)
    assert torch.equal(out, result[0])


@both
@dtypes
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_neighbours_are_apart(kernel, bad, dtype, packed):
    """What a sequence holds shows in no other, be they in one tile."""
    sequences = tuple(Sequence(n, n + 3) for n in (20, 7, 90, 1, 40))
    batch = make_ragged(sequences, (4, 2), 64, dtype, kernel.device, packed, layout="transposed")
    clean = kernel.forward(batch.q, batch.k, batch.v, **batch.lengths, causal=True)
    _, k, v = batch.entries
    for entry, _, keys in batch.places[1::2]:
        k[entry, :, keys] = v[entry, :, keys] = bad
    dirty = kernel.forward(batch.q, batch.k, batch.v, **batch.lengths, causal=True)
    for ours, expected in zip(dirty, clean, strict=True):
        if packed:
            ours, expected = (x[None].movedim(1, 2) if x.dim() == 3 else x[None] for x in (ours, expected))
        for entry, rows, _ in batch.places[::2]:
            assert torch.equal(ours[entry, :, rows], expected[entry, :, rows])
        untouched = (
            expected.isneginf() if expected.dim() == 3 else torch.zeros_like(expected, dtype=torch.bool)
        )
        assert torch.equal(ours[untouched], expected[untouched])


@both
@masks
def test_bitwise_repeatable(kernel, mask, packed):
    batch = make_ragged(BATCHES["unequal"], (4, 2), 64, torch.bfloat16, kernel.device, packed)
    first, *others = (
        kernel.forward(batch.q, batch.k, batch.v, **batch.lengths, **mask.options)
        for _ in range(10 if kernel.family else 2)
    )
    for results in others:
        assert all(torch.equal(*pair) for pair in zip(results, first, strict=True))


@full_and_causal
@pytest.mark.parametrize("sides", ["qk", "q", "k"])
@pytest.mark.parametrize("offsets", WILD_OFFSETS.values(), ids=WILD_OFFSETS)
def test_wild_offsets_stay_inside(kernel, offsets, sides, mask):
    """Sequences keep to their tensors, and so does the next call."""
    q, k, v = (x[0].transpose(0, 1) for x in make_inputs(Shape(1, 4, 2, 100, 100, 64), torch.bfloat16, "cpu"))
    q, k, v = (x.to(kernel.device) for x in (q, k, v))
    good = [0, 30, 30, 100]
    given = {f"cu_seqlens_{side}": int32(good, kernel.device) for side in "qk"}
    expected = kernel.forward(q, k, v, **given, **mask.options)
    wild = given | {f"cu_seqlens_{side}": int32(offsets, kernel.device) for side in sides}
    out, lse = kernel.forward(q, k, v, **wild, **mask.options)
    assert out.isfinite().all()
    assert not lse.isnan().any()
    for result, same in zip(kernel.forward(q, k, v, **given, **mask.options), expected, strict=True):
        assert torch.equal(result, same)


@full_and_causal
@both
@pytest.mark.parametrize("given", ["seqused_q", "seqused_k", "leftpad_k"])
@pytest.mark.parametrize("values", WILD_LENGTHS.values(), ids=WILD_LENGTHS)
def test_wild_lengths_stay_inside(kernel, values, given, packed, mask):
    """They count as the nearest that make sense."""
    batch = make_ragged((Sequence(100, 100),) * 3, (4, 2), 64, torch.bfloat16, kernel.device, packed)
    tensors = batch.q, batch.k, batch.v
    wild, tame = (
        kernel.forward(*tensors, **batch.lengths | {given: int32(x, kernel.device)}, **mask.options)
        for x in (values, clamped(values, 0, 100))
    )
    assert all(torch.equal(*pair) for pair in zip(wild, tame, strict=True))


@pytest.fixture
def checked(monkeypatch):
    """As with FLASH_CUTE_CHECK=1 in the environment."""
    monkeypatch.setattr(lengths, "CHECKED", True)


# Of sequences of 100 queries and keys: what changes, and words of the sentence.
CHECKS = {
    "backwards": ({"cu_seqlens_q": [0, 70, 40, 100]}, "sequence 1 cu_seqlens_q 70 to 40 total 300"),
    "past the total": ({"cu_seqlens_k": [0, 70, 90, 301]}, "sequence 2 cu_seqlens_k 90 to 301 total 300"),
    "negative": ({"cu_seqlens_k": [-3, 70, 90, 100]}, "sequence 0 cu_seqlens_k -3 to 70 total 300"),
    "more than there are": ({"seqused_q": [100, 100, 101]}, "sequence 2 seqused_q 101 100"),
    "fewer than none": ({"seqused_k": [100, -1, 100]}, "sequence 1 seqused_k -1 100"),
    "more left padding than keys": (
        {"seqused_k": [9, 9, 9], "leftpad_k": [9, 10, 9]},
        "sequence 1 leftpad_k 10 to 9",
    ),
}


@both
@pytest.mark.parametrize(("change", "words"), CHECKS.values(), ids=CHECKS)
def test_checked_values(kernel, checked, change, words, packed):
    if not packed and any(name.startswith("cu_") for name in change):
        pytest.skip("padded batches have no offsets")
    sequences = (Sequence(100, 100),) * 3
    batch = make_ragged(sequences, (4, 2), 64, torch.bfloat16, kernel.device, packed, margins=(0, 0))
    kernel.forward(batch.q, batch.k, batch.v, **batch.lengths)
    wrong = batch.lengths | {name: int32(values, kernel.device) for name, values in change.items()}
    function = "forward_varlen" if packed else "forward"
    with pytest.raises(ValueError, match=rf"^flash_cute\.{function}: sequence ") as caught:
        kernel.forward(batch.q, batch.k, batch.v, **wrong)
    for word in words.split():
        assert word in str(caught.value)


def test_offsets_of_nested_tensors_are_checked_before_they_are_cast(checked):
    """2**32 + 8 would be 8, which is right."""
    offsets = torch.tensor([0, 3, 2**32 + 8])
    values = torch.zeros(8, 2, 64, dtype=torch.bfloat16)
    x = torch.nested.nested_tensor_from_jagged(values, offsets).transpose(1, 2)
    with pytest.raises(
        ValueError, match=r"^flash_cute\.forward: sequence 1 has cu_seqlens_q 3 to 2147483647"
    ):
        flash_cute.forward(x, x, x)


@pytest.mark.parametrize("window", [2**63 - 1, (2**63 - 1, 0), (0, 2**63 - 1)], ids=str)
def test_explain_counts_the_work_of_enormous_windows(window):
    q = torch.zeros(2, 2, 10, 64, dtype=torch.bfloat16)
    used = int32([10, 10], "cpu")
    given, dense = (flash_cute.explain(q, q, q, window=window, seqused_k=x) for x in (used, None))
    assert given["flops"] == dense["flops"] > 0


def test_checks_are_asked_for_by_the_environment():
    script = (
        "import importlib, os\n"
        "from flash_cute import lengths\n"
        "for value in ('1', '0', '', 'off'):\n"
        "    os.environ['FLASH_CUTE_CHECK'] = value\n"
        "    print(importlib.reload(lengths).CHECKED)\n"
    )
    path = os.pathsep.join(sys.path)
    ran = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert ran.stdout.split() == ["True", "False", "False", "False"], ran.stderr


def test_checks_under_autocast(kernel, checked):
    x = torch.randn(10, 4, 64, device=kernel.device)
    offsets = int32([0, 3, 10], kernel.device)
    with torch.autocast(kernel.device.type, torch.bfloat16):
        out, _ = kernel.forward(x, x, x, cu_seqlens_q=offsets)
    same, _ = kernel.forward(*[x.bfloat16()] * 3, cu_seqlens_q=offsets)
    assert torch.equal(out, same)


def test_checks_leave_other_errors_and_tracing_alone(kernel, checked):
    q, k, v = make_inputs(Shape(3, 4, 2, 9, 9, 64), torch.bfloat16, kernel.device)
    with pytest.raises(ValueError, match=r"seqused_q has shape \(2,\)"):
        kernel.forward(q, k, v, seqused_q=int32([10, 10], kernel.device))
    used = int32([9, 2, 0], kernel.device)
    expected = kernel.forward(q, k, v, seqused_q=used)
    compiled = torch.compile(flash_cute.forward, backend="aot_eager", fullgraph=True)
    for result, same in zip(compiled(q, k, v, seqused_q=used, family=kernel.family), expected, strict=True):
        assert torch.equal(result, same)


@both
@pytest.mark.parametrize("mask", [MASKS["full"], MASKS["causal"], MASKS["window_symmetric"]])
@pytest.mark.parametrize("name", ["unequal", "used and left padding", "no sequence"])
def test_explain_counts_the_work(kernel, name, mask, packed):
    batch = make_ragged(BATCHES[name], (4, 2), 64, torch.bfloat16, kernel.device, packed)
    plan = flash_cute.explain(
        batch.q, batch.k, batch.v, **batch.lengths, **mask.options, family=kernel.family
    )
    counts = [(s.queries.stop, max(0, s.keys.stop - s.keys.start)) for s in BATCHES[name]]
    assert plan["flops"] == 4 * 64 * 4 * sum(mask.visible(*count).sum().item() for count in counts)
    read = 64 * sum(4 * rows + 2 * 2 * keys for rows, keys in counts)
    assert plan["bytes"] == 2 * (read + batch.q.numel()) + 4 * batch.q[..., 0].numel()
    assert str(plan)


GRAPHS = {
    "packed": (
        True,
        [
            (Sequence(0, 0), Sequence(130, 300), Sequence(30, 4)),
            (Sequence(1, 90), Sequence(99, 4), Sequence(60, 210)),
        ],
    ),
    "packed, alike at first": (
        True,
        [(Sequence(130, 130),) * 60, (Sequence(129, 131), Sequence(131, 129)) * 30],
    ),
    "padded": (
        False,
        [
            (Sequence(100, 300, 0, 0), Sequence(100, 300, 100, 3), Sequence(100, 300, 1, 300)),
            (Sequence(100, 300, 100, 299), Sequence(100, 300, 5, 64, 64), Sequence(100, 300, 64, 100, 1)),
        ],
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 100, 128])
@pytest.mark.parametrize(("packed", "batches"), GRAPHS.values(), ids=GRAPHS)
@full_and_causal
def test_graph_replays_with_other_lengths(kernel, packed, batches, head_dim, mask):
    """The same totals, other offsets: nothing of the lengths is known to the host."""
    moments = [
        make_ragged(batch, (4, 2), head_dim, torch.bfloat16, kernel.device, packed) for batch in batches
    ]
    static = make_ragged(batches[0], (4, 2), head_dim, torch.bfloat16, kernel.device, packed)
    for batch in () if packed else (*moments, static):
        batch.lengths.setdefault("leftpad_k", int32([0] * 3, kernel.device))
    tensors = static.q, static.k, static.v
    kernel.forward(*tensors, **static.lengths, **mask.options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = kernel.forward(*tensors, **static.lengths, **mask.options)
    for batch in (moments[1], moments[0], moments[1]):
        for target, source in zip(tensors, (batch.q, batch.k, batch.v), strict=True):
            target.copy_(source)
        for name, values in static.lengths.items():
            values.copy_(batch.lengths[name])
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        assert_ragged(results, batch, mask)


@pytest.mark.gpu
@both
def test_the_host_does_not_wait(kernel, packed):
    batch = make_ragged(BATCHES["used"], (4, 2), 64, torch.bfloat16, kernel.device, packed)
    kernel.forward(batch.q, batch.k, batch.v, **batch.lengths)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    kernel.forward(batch.q, batch.k, batch.v, **batch.lengths)
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


def test_nested_results_are_like_q(kernel):
    """Their lengths are the same, so that they add."""
    offsets = torch.tensor([0, 3, 3, 40], device=kernel.device)
    values = torch.randn(40, 4, 64, device=kernel.device).bfloat16()
    q = torch.nested.nested_tensor_from_jagged(values, offsets).transpose(1, 2)
    out, lse = flash_cute.forward(q, q, q, family=kernel.family)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    assert out._ragged_idx == q._ragged_idx
    assert (out + q).shape == q.shape
    alone = flash_cute.attention(q, q, q, family=kernel.family)
    assert torch.equal(alone.values(), out.values())


def test_nested_keys_and_values_of_other_places(device):
    """As many rows of each sequence, which PyTorch takes for the same shape."""
    offsets, others = (torch.tensor(x, device=device) for x in ([0, 4, 8], [2, 6, 8]))
    counts = torch.tensor([2, 2], device=device)
    q, k, v = (
        torch.nested.nested_tensor_from_jagged(
            torch.randn(8, 2, 16, device=device).bfloat16(), where, counts
        ).transpose(1, 2)
        for where in (offsets, offsets, others)
    )
    with pytest.raises(ValueError, match="k and v are nested with different offsets"):
        flash_cute.attention(q, k, v)


def test_nested_tensors_of_other_batches(device):
    x = torch.randn(8, 2, 16, device=device).bfloat16()
    q, k = (
        torch.nested.nested_tensor_from_jagged(x, torch.tensor(offsets, device=device)).transpose(1, 2)
        for offsets in ([0, 4, 8], [0, 2, 4, 8])
    )
    with pytest.raises(
        ValueError, match=r"^flash_cute\.attention: k has batch 3 and q 2; they must be the same$"
    ):
        flash_cute.attention(q, k, k)


@pytest.mark.parametrize("behind", [0, 3000])
def test_rows_of_one_sequence_among_many(kernel, behind):
    """A buffer that few rows of are used is cleared by all blocks; a single row may have any stride."""
    total, used = 4000, 1 if behind == 0 else 128
    storage = torch.randn(total + 1, 4, 64, device=kernel.device).bfloat16()
    offsets = int32([0, used], kernel.device)
    packed = storage[: used + behind]
    out, lse = kernel.forward(packed, packed, packed, cu_seqlens_q=offsets)
    dense = packed[:used].transpose(0, 1).unsqueeze(0)
    assert_attention(
        (out[:used].transpose(0, 1).unsqueeze(0), lse[:, :used].unsqueeze(0).contiguous()), *[dense] * 3
    )
    assert not out[used:].any()
    assert lse[:, used:].isneginf().all()
    if behind == 0:
        odd = torch.as_strided(storage, (1, 4, 64), (2**40, 64, 1))
        for result, same in zip(kernel.forward(odd, odd, odd, cu_seqlens_q=offsets), (out, lse), strict=True):
            assert torch.equal(result, same)
