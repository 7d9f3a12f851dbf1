"""flash_cute.merge: results for parts of the keys become those for all of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from support.cases import (
    MASKS,
    Sequence,
    Shape,
    make_gradients,
    make_inputs,
    make_ragged,
    make_ragged_gradients,
)
from support.tolerance import assert_attention, assert_gradients, assert_ragged, assert_ragged_gradients

import flash_cute

DTYPE = torch.bfloat16
SHAPE = Shape(2, 4, 2, 90, 90, 64)
# Where the keys are cut: not at all, into two, unequally, with parts of no key, one by one.
CUTS = {
    "one": (),
    "two": (45,),
    "unequal": (1, 60),
    "empty": (0, 30, 30, 90),
    "many": tuple(range(10, 90, 10)),
}


def parts_of(k, v, cuts):
    bounds = (0, *cuts, k.shape[2])
    for begin, end in pairwise(bounds):
        yield end, k[:, :, begin:end], v[:, :, begin:end]


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_dense(device, mask, cuts):
    """A causal part hides keys from its first queries, and is blind for those before its first key."""
    shape = replace(SHAPE, head_dim_v=40)
    q, k, v = inputs = [x.detach().requires_grad_() for x in make_inputs(shape, DTYPE, device)]
    results = [
        flash_cute.forward(q, *part, window=(None, 90 - end) if mask == "causal" else None)
        for end, *part in parts_of(k, v, CUTS[cuts])
    ]
    out, lse = flash_cute.merge(*zip(*results, strict=True))
    plain = [x.detach() for x in inputs]
    assert_attention((out.detach(), lse.detach()), *plain, MASKS[mask])
    dout, dlse = make_gradients(out.detach())
    gradients = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    gradients = [torch.empty_like(x).copy_(dx) for x, dx in zip(plain, gradients, strict=True)]
    assert_gradients(gradients, *plain, dout, dlse, MASKS[mask])


def test_packed(device):
    sequences = Sequence(20, 50), Sequence(1, 3), Sequence(7, 0), Sequence(40, 40)
    batch = make_ragged(sequences, (4, 2), 64, DTYPE, device, packed=True)
    inputs = [x.detach().requires_grad_() for x in (batch.q, batch.k, batch.v)]
    cut = torch.tensor([20, 3, 0, 1], dtype=torch.int32, device=device)
    results = [
        flash_cute.forward_varlen(*inputs, **batch.lengths, **part)
        for part in ({"seqused_k": cut}, {"leftpad_k": cut})
    ]
    out, lse = flash_cute.merge(*zip(*results, strict=True))
    assert_ragged((out.detach(), lse.detach()), batch)
    dout, dlse = make_ragged_gradients(batch)
    for gradient in (dout, dlse):
        gradient.nan_to_num_()
    gradients = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    tensors = batch.q, batch.k, batch.v
    gradients = [torch.empty_like(x).copy_(dx) for x, dx in zip(tensors, gradients, strict=True)]
    assert_ragged_gradients(gradients, batch, dout, dlse)


def results_of(count: int, blind: tuple[int, ...] = ()) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of two rows in float64; the first row of the parts in blind sees nothing."""
    outs = [torch.randn(1, 1, 2, 3, dtype=torch.float64) for _ in range(count)]
    lses = [torch.randn(1, 1, 2, dtype=torch.float64) for _ in range(count)]
    for part in blind:
        outs[part][:, :, 0], lses[part][:, :, 0] = 0, -torch.inf
    return outs, lses


def test_gradients_of_the_merge_alone():
    outs, lses = results_of(3)
    tensors = [x.requires_grad_() for x in (*outs, *lses)]
    assert torch.autograd.gradcheck(lambda *x: flash_cute.merge(x[:3], x[3:]), tensors)


@pytest.mark.parametrize("blind", [(0,), (1, 2), (0, 1, 2)])
def test_blind_parts(blind):
    """They change nothing, and have no gradients; a row that is blind everywhere stays so."""
    outs, lses = results_of(3, blind)
    tensors = [x.requires_grad_() for x in (*outs, *lses)]
    out, lse = flash_cute.merge(outs, lses)
    seeing = [part for part in range(3) if part not in blind]
    if seeing:
        alone = flash_cute.merge([outs[i] for i in seeing], [lses[i] for i in seeing])
        assert torch.equal(out[:, :, 0], alone[0][:, :, 0])
        assert torch.equal(lse[:, :, 0], alone[1][:, :, 0])
    else:
        assert (out[:, :, 0] == 0).all()
        assert lse[:, :, 0].isneginf().all()
    gradients = torch.autograd.grad((out.sum(), lse.where(lse.isfinite(), 0).sum()), tensors)
    assert all(gradient.isfinite().all() for gradient in gradients)
    for part in blind:
        assert (gradients[3 + part][:, :, 0] == 0).all()
        assert (gradients[part][:, :, 0] == 0).all()


def test_visible_infinities():
    """As of a softmax: an LSE of inf makes the whole inf and out NaN; NaN stays NaN."""
    outs, lses = results_of(2)
    lses[0][:, :, 0], lses[1][:, :, 1] = torch.inf, torch.nan
    out, lse = flash_cute.merge(outs, lses)
    assert out.isnan().all()
    assert lse[:, :, 0].isposinf().all()
    assert lse[:, :, 1].isnan().all()


def merged(*tensors):
    """merge of outs and as many lses behind them, as transforms take tensors."""
    return flash_cute.merge(tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :])


def mapped(*tensors):
    results = torch.func.vmap(merged)(*(x.unsqueeze(0) for x in tensors))
    return tuple(x.squeeze(0) for x in results)


RUNS = {
    "eager": merged,
    "compiled": torch.compile(merged, fullgraph=True, backend="aot_eager"),
    "vmap": mapped,
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("infinite", [(0,), (2,), (0, 1)])
def test_parts_whose_scores_are_all_infinite(infinite, run):
    """Out NaN and an LSE of -inf: beside other parts such a part is as one that sees nothing."""
    torch._dynamo.reset()

    def with_gradients(run, tensors):
        tensors = [x.clone().requires_grad_() for x in tensors]
        out, lse = run(*tensors)
        return out, lse, *torch.autograd.grad((out.sum(), lse.sum()), tensors)

    outs, lses = results_of(3, infinite)
    expected = with_gradients(merged, (*outs, *lses))
    for part in infinite:
        outs[part][:, :, 0] = torch.nan
    torch.testing.assert_close(with_gradients(run, (*outs, *lses)), expected)


def test_all_parts_have_infinite_scores():
    """NaN as of a softmax, if one of them sees keys; the other row is untouched."""
    outs, lses = results_of(3, (0, 1, 2))
    outs[1][:, :, 0] = torch.nan
    out, lse = flash_cute.merge(outs, lses)
    assert out[:, :, 0].isnan().all()
    assert lse[:, :, 0].isneginf().all()
    assert out[:, :, 1].isfinite().all()


@pytest.mark.parametrize("packed", [False, True])
def test_keys_of_infinite_scores(device, packed):
    q, k, v = make_inputs(SHAPE, DTYPE, device)
    q, k = q.abs(), k.clone()
    k[:, :, :20] = -torch.inf
    parts = [(k[:, :, keys], v[:, :, keys]) for keys in (slice(0, 15), slice(15, 90))]
    if not packed:
        out, lse = flash_cute.merge(*zip(*(flash_cute.forward(q, *part) for part in parts), strict=True))
        assert_attention((out, lse), q, k, v)
        return
    results = []
    for part in parts:
        offsets = [torch.arange(3, device=device, dtype=torch.int32) * x.shape[2] for x in (q, part[0])]
        tensors = (x.transpose(1, 2).flatten(0, 1) for x in (q, *part))
        results.append(flash_cute.forward_varlen(*tensors, *offsets))
    out, lse = flash_cute.merge(*zip(*results, strict=True))
    out, lse = out.unflatten(0, (2, 90)).transpose(1, 2), lse.unflatten(1, (2, 90)).transpose(0, 1)
    assert_attention((out, lse.contiguous()), q, k, v)


def test_far_apart():
    """No overflow, where one part outweighs the other."""
    outs, lses = results_of(2)
    out, lse = flash_cute.merge(outs, [lses[0] + 3e4, lses[1] - 3e4])
    assert torch.equal(out, outs[0])
    assert torch.equal(lse, lses[0] + 3e4)


def test_compiled(device):
    q, k, v = make_inputs(SHAPE, DTYPE, device)
    results = [flash_cute.forward(q, *part) for _, *part in parts_of(k, v, (40,))]
    outs, lses = zip(*results, strict=True)
    torch._dynamo.reset()
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    out, lse = torch.compile(flash_cute.merge, fullgraph=True, backend=backend)(outs, lses)
    assert_attention((out, lse), q, k, v)


OUT, LSE = torch.zeros(2, 4, 5, 8), torch.zeros(2, 4, 5)


@pytest.mark.parametrize(
    ("kind", "sentence", "outs", "lses"),
    [
        (ValueError, "there are 0 outs and 0 lses", [], []),
        (ValueError, "there are 2 outs and 1 lses", [OUT, OUT], [LSE]),
        (TypeError, "outs[1] is of type NoneType", [OUT, None], [LSE, LSE]),
        (TypeError, "outs must be a list of tensors, got NoneType", None, [LSE]),
        (TypeError, "lses must be a list of tensors, got int", [OUT], 3),
        (TypeError, "outs must be a list of tensors, got 0-d Tensor", OUT.sum(), [LSE]),
        (TypeError, "lses must be a list of tensors, got 0-d ndarray", [OUT], np.array(3.0)),
        (ValueError, "outs[0] has shape ()", [OUT.sum()], [LSE]),
        (ValueError, "lses[0] is torch.float32 ()", [OUT], [LSE.sum()]),
        (ValueError, "outs[0] has dtype torch.float8_e4m3fn", [OUT.to(torch.float8_e4m3fn)], [LSE]),
        (ValueError, "outs[0] has shape (2, 4)", [OUT[..., 0, 0]], [LSE]),
        (ValueError, "outs[1] is torch.float32 (2, 4, 3, 8)", [OUT, OUT[:, :, :3]], [LSE, LSE]),
        (ValueError, "outs[1] is torch.float16 (2, 4, 5, 8)", [OUT, OUT.half()], [LSE, LSE]),
        (ValueError, "lses[0] is torch.float32 (2, 5, 4)", [OUT], [LSE.mT]),
        (ValueError, "lses[0] is torch.float32 (2, 4)", [OUT[0]], [LSE[..., 0]]),
        (ValueError, "outs[0] has dtype torch.int32", [OUT.int()], [LSE]),
        (ValueError, "lses[1] has dtype torch.float16", [OUT, OUT], [LSE, LSE.half()]),
        (ValueError, "outs[1] is on meta and outs[0] on cpu", [OUT, OUT.to("meta")], [LSE, LSE]),
        (ValueError, "lses[0] is on meta and outs[0] on cpu", [OUT], [LSE.to("meta")]),
        (ValueError, "outs[0] is of layout torch.sparse_coo", [OUT.to_sparse()], [LSE]),
        (ValueError, "outs[0] is nested", [torch.nested.nested_tensor([OUT[0]], layout=torch.jagged)], [LSE]),
    ],
)  # fmt: skip
def test_errors(kind, sentence, outs, lses):
    with pytest.raises(kind) as raised:
        flash_cute.merge(outs, lses)
    assert str(raised.value).startswith(f"flash_cute.merge: {sentence}")
