"""What PyTorch does to functions and tensors around a call: vmap, autocast, FLOP counters, copy-on-write."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.cases import BATCHES, SHAPES, Mask, Shape, make_inputs, make_ragged
from support.tolerance import assert_attention, assert_ragged
from torch.utils.flop_counter import FlopCounterMode

import flash_cute

SHAPE = Shape(2, 4, 2, 70, 90, 64)


def stacked(count: int, device) -> list[torch.Tensor]:
    """q, k and v, each `count` of them along a new first dimension."""
    drawn = [make_inputs(SHAPE, torch.bfloat16, device) for _ in range(count)]
    return [torch.stack(parts) for parts in zip(*drawn, strict=True)]


@pytest.mark.parametrize("dims", [(0, 0, 0), (1, 0, 3), (-1, 2, 0)], ids=str)
def test_vmap(kernel, dims):
    """One call with a larger batch, the same as a loop, wherever the mapped dimension is."""
    inputs = stacked(3, kernel.device)

    def attend(q, k, v):
        return flash_cute.forward(q, k, v, causal=True, window=(50, None), family=kernel.family)

    mapped = torch.vmap(attend, in_dims=dims)(
        *(tensor.movedim(0, dim) for tensor, dim in zip(inputs, dims, strict=True))
    )
    for index in range(3):
        q, k, v = (tensor[index] for tensor in inputs)
        result = mapped[0][index], mapped[1][index].contiguous()
        assert_attention(result, q, k, v, Mask(causal=True, window=(50, None)))


@pytest.mark.parametrize("width", [24, 96])
def test_vmap_of_v_of_another_width(kernel, width):
    """Results and gradients, of v alone, too."""
    q, k, _ = stacked(3, kernel.device)
    v = torch.randn(3, 2, 2, 90, width, device=kernel.device).bfloat16()

    def attend(q, k, v):
        return flash_cute.attention(q, k, v, causal=True, deterministic=True, family=kernel.family)

    def gradients(q, k, v):
        def loss(q, k, v):
            return attend(q, k, v).float().square().sum()

        return torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v)

    for dims in ((0, 0, 0), (None, None, 0)):
        inputs = [x if dim == 0 else x[0] for x, dim in zip((q, k, v), dims, strict=True)]
        out = torch.vmap(attend, in_dims=dims)(*inputs)
        found = torch.vmap(gradients, in_dims=dims)(*inputs)
        for index in range(3):
            one = [x[index] if dim == 0 else x for x, dim in zip(inputs, dims, strict=True)]
            torch.testing.assert_close(out[index], attend(*one))
            for mapped, single in zip(found, gradients(*one), strict=True):
                torch.testing.assert_close(mapped[index], single)


def test_vmap_of_one_argument_and_nested(kernel):
    q, k, v = stacked(2, kernel.device)

    def attend(q):
        return flash_cute.forward(q, k[0], v[0], family=kernel.family)[0]

    expected = torch.stack([attend(part) for part in q])
    torch.testing.assert_close(torch.vmap(attend)(q), expected)
    pairs = torch.stack([q, q])
    torch.testing.assert_close(torch.vmap(torch.vmap(attend))(pairs), torch.stack([expected, expected]))


def test_vmap_without_gradients(kernel):
    """Parameters under no_grad, as ensembles are evaluated: nothing asks for a gradient."""
    q, k, v = stacked(2, kernel.device)

    def attend(q, k, v):
        return flash_cute.forward(q, k, v, family=kernel.family)[0]

    expected = torch.stack([attend(*parts) for parts in zip(q, k, v, strict=True)])
    with torch.no_grad():
        mapped = torch.vmap(attend)(torch.nn.Parameter(q), k, v)
    torch.testing.assert_close(mapped, expected)

    def loss(x, weight):
        return (attend(x, k[0], v[0]).float() * weight).sum()

    # Attention is a constant here, and must not be refused.
    grad = torch.func.grad(loss, argnums=1)(q[0], torch.ones((), device=kernel.device))
    torch.testing.assert_close(grad, attend(q[0], k[0], v[0]).float().sum())


def test_functionalize_and_nothing_to_map(kernel):
    q, k, v = make_inputs(SHAPES["few_of_each"], torch.float16, kernel.device)

    def attend(q):
        return flash_cute.forward(q, k, v, family=kernel.family)[0]

    assert torch.equal(torch.func.functionalize(attend)(q), attend(q))
    assert torch.vmap(attend)(q[None][:0]).shape == (0, *q.shape)


def test_vmap_is_exported(kernel):
    inputs = stacked(2, kernel.device)

    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return torch.vmap(flash_cute.attention)(q, k, v)

    program = torch.export.export(Model(), tuple(inputs), strict=False)
    assert torch.equal(program.module()(*inputs), Model()(*inputs))


def test_vmap_is_one_call(kernel):
    calls = stacked(4, kernel.device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.vmap(lambda q, k, v: flash_cute.forward(q, k, v)[0])(*calls)
    # The dispatcher names the operator once above the rule and once below it.
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["flash_cute::_forward"] <= 2


@pytest.mark.parametrize("mapped", [True, False])
def test_vmap_of_lengths(kernel, mapped):
    """Each entry's own, or the same for all."""
    inputs = stacked(3, kernel.device)
    used = torch.tensor([[70, 3], [0, 40], [21, 69]], dtype=torch.int32, device=kernel.device)
    skipped = (
        torch.tensor([[1], [7], [60]], dtype=torch.int32, device=kernel.device).expand(3, 2).contiguous()
    )

    def attend(q, k, v, used, skipped):
        options = {"seqused_q": used, "leftpad_k": skipped, "family": kernel.family}
        return flash_cute.forward(q, k, v, causal=True, **options)

    lengths = (used, skipped) if mapped else (used[1], skipped[1])
    dim = 0 if mapped else None
    for function in (
        attend,
        lambda *x: torch.ops.flash_cute._forward(
            *x[:3], True, seqused_q=x[3], leftpad_k=x[4], family=kernel.family
        ),
    ):
        results = torch.vmap(function, in_dims=(0, 0, 0, dim, dim))(*inputs, *lengths)
        for index in range(3):
            entry = lengths if not mapped else (x[index] for x in lengths)
            expected = attend(*(x[index] for x in inputs), *entry)
            for result, same in zip(results, expected, strict=True):
                torch.testing.assert_close(result[index], same)


def test_vmap_of_lengths_of_one_sequence(kernel):
    """Folding leaves a stride that only a tensor of one entry may have."""
    q, k, v = (x[:, :1] for x in stacked(3, kernel.device))
    used = torch.tensor([70, 3, 40], dtype=torch.int32, device=kernel.device)

    def attend(q, k, v, used):
        return flash_cute.forward(q, k, v, seqused_k=used, family=kernel.family)

    wide = used.unsqueeze(1).repeat(1, 3)[:, :1]
    for lengths, dim in ((wide, 0), (used[:1], None)):
        results = torch.vmap(attend, in_dims=(0, 0, 0, dim))(q, k, v, lengths)
        for index in range(3):
            expected = attend(
                q[index], k[index], v[index], lengths if dim is None else lengths[index].clone()
            )
            for result, same in zip(results, expected, strict=True):
                torch.testing.assert_close(result[index], same)
    with pytest.raises(ValueError, match=r"seqused_k has shape \(\); \(batch,\) is accepted"):
        torch.vmap(attend)(q, k, v, used)


def test_vmap_of_the_elements_of_a_vector(kernel):
    k = torch.zeros(1, 2, 5, 64, dtype=torch.float16, device=kernel.device)
    with pytest.raises(ValueError, match=r"q has shape \(\); \(batch, heads, seqlen, head_dim\) is accepted"):
        torch.vmap(lambda x: flash_cute.forward(x, k, k, family=kernel.family))(k[0, 0, 0, :3])


def test_vmap_of_packed_sequences_is_refused(kernel):
    batch = make_ragged(BATCHES["unequal"], (4, 2), 64, torch.bfloat16, kernel.device, packed=True)
    q = torch.stack([batch.q, batch.q])

    def attend(q):
        return flash_cute.forward_varlen(q, batch.k, batch.v, family=kernel.family, **batch.lengths)[0]

    with pytest.raises(NotImplementedError, match=r"^flash_cute\.forward_varlen: vmap can't map packed"):
        torch.vmap(attend)(q)
    out = torch.vmap(lambda x: x + attend(batch.q))(torch.zeros(2, device=kernel.device))
    assert out.shape == q.shape


def test_vmap_of_empty_batches(kernel):
    q = torch.empty(3, 0, 4, 5, 64, dtype=torch.float16, device=kernel.device)
    out, lse = torch.vmap(lambda x: flash_cute.forward(x, x, x, family=kernel.family))(q)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:4])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("given", [torch.float32, torch.float16])
def test_autocast(kernel, given, dtype):
    """As PyTorch's own attention: what is not of autocast's type is cast to it."""
    inputs = [tensor.to(given) for tensor in make_inputs(SHAPE, torch.float16, kernel.device)]
    with torch.autocast(kernel.device.type, dtype=dtype):
        results = flash_cute.forward(*inputs, causal=True, family=kernel.family)
        bare = torch.ops.flash_cute.forward(*inputs, True, family=kernel.family)
        sdpa = torch.nn.functional.scaled_dot_product_attention(inputs[0], inputs[0], inputs[0])
    assert results[0].dtype == sdpa.dtype == dtype
    expected = flash_cute.forward(*(tensor.to(dtype) for tensor in inputs), causal=True, family=kernel.family)
    for ours, theirs, cast in zip(results, bare, expected, strict=True):
        assert torch.equal(ours, cast)
        assert torch.equal(theirs, cast)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_of_packed_sequences(kernel, dtype):
    batch = make_ragged(BATCHES["unequal"], (4, 2), 64, torch.float16, kernel.device, packed=True)
    inputs = [x.float() for x in (batch.q, batch.k, batch.v)]
    with torch.autocast(kernel.device.type, dtype=dtype):
        results = flash_cute.forward_varlen(*inputs, **batch.lengths, family=kernel.family)
    cast = replace(batch, q=inputs[0].to(dtype), k=inputs[1].to(dtype), v=inputs[2].to(dtype))
    assert_ragged(results, cast)


def test_autocast_of_fakes_and_plans(device):
    inputs = [tensor.float() for tensor in make_inputs(SHAPE, torch.float16, device)]
    with torch.autocast(device.type, dtype=torch.bfloat16):
        plan = flash_cute.explain(*inputs)
        out, _ = flash_cute.forward(*(tensor.bfloat16().to("meta") for tensor in inputs))
    assert plan.get("element", "bf16") == "bf16"
    assert out.dtype == torch.bfloat16


def test_autocast_leaves_float64_alone(device):
    inputs = [tensor.double() for tensor in make_inputs(SHAPE, torch.float16, device)]
    with torch.autocast(device.type), pytest.raises(ValueError, match=r"torch\.float64"):
        flash_cute.forward(*inputs)


def test_flop_counters_know_the_operator(kernel):
    """They count as for PyTorch's attention: all pairs, without regard to a mask."""
    q, k, v = make_inputs(SHAPE, torch.bfloat16, kernel.device)
    with FlopCounterMode(display=False) as counter:
        flash_cute.forward(q, k, v, causal=True, family=kernel.family)
    assert counter.get_total_flops() == 4 * SHAPE.batch * SHAPE.heads_q * 70 * 90 * 64


def test_flop_counters_count_both_widths(kernel):
    q, k, v = make_inputs(replace(SHAPE, head_dim_v=40), torch.bfloat16, kernel.device)
    q.requires_grad_()
    pairs = SHAPE.batch * SHAPE.heads_q * 70 * 90
    with FlopCounterMode(display=False) as counter:
        out = flash_cute.attention(q, k, v, causal=True, family=kernel.family)
        assert counter.get_total_flops() == 2 * (64 + 40) * pairs
        out.sum().backward()
    assert counter.get_total_flops() == 2 * (4 * 64 + 3 * 40) * pairs
    offsets = torch.tensor([0, 30, 70], dtype=torch.int32, device=kernel.device)
    q, k, v = (x[0].transpose(0, 1)[:70].detach() for x in (q, k, v))
    with FlopCounterMode(display=False) as counter:
        out = flash_cute.attention_varlen(q.requires_grad_(), k, v, offsets, family=kernel.family)
        assert counter.get_total_flops() == 2 * (64 + 40) * 4 * 70 * 35
        out.sum().backward()
    assert counter.get_total_flops() == 2 * (4 * 64 + 3 * 40) * 4 * 70 * 35


def test_flop_counters_take_sequences_for_alike(kernel):
    """As the lengths are on the device: every query has the mean number of keys."""
    batch = make_ragged(BATCHES["equal"], (4, 2), 64, torch.bfloat16, kernel.device, True, margins=(0, 0))
    with FlopCounterMode(display=False) as counter:
        flash_cute.forward_varlen(batch.q, batch.k, batch.v, **batch.lengths, family=kernel.family)
    assert counter.get_total_flops() == 4 * 4 * 64 * (3 * 128) * 256


@pytest.mark.gpu
def test_lazy_clones_stay_lazy(kernel):
    """Inputs are only read: a copy-on-write clone keeps sharing its memory."""
    inputs = make_inputs(SHAPES["one_tile"], torch.bfloat16, kernel.device, "contiguous")
    clones = [torch._lazy_clone(tensor) for tensor in inputs]
    kernel.forward(*clones)
    assert all(torch._C._is_cow_tensor(clone) for clone in clones)


def test_version():
    assert flash_cute.__version__.count(".") == 2
