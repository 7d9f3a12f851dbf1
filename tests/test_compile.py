"""torch.compile, fake tensors and opcheck."""

from __future__ import annotations

import pytest
import torch
from cases import BUCKETS, LAYOUTS, MASKS, SHAPES, Shape, make_inputs
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_cute


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def block(q, k, v, kernel):
    """Attention between other operators, as in a model."""
    out, lse = flash_cute.forward(q * 1.5, k, v, causal=True, window=(100, None), family=kernel.family)
    return out.transpose(1, 2).flatten(2) * 2, lse + 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_without_a_graph_break(kernel, backend):
    inputs = make_inputs(Shape(2, 4, 2, 130, 150, 64), torch.bfloat16, kernel.device)
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    for result, expected in zip(compiled(*inputs, kernel), block(*inputs, kernel), strict=True):
        torch.testing.assert_close(result, expected)


def test_dynamic_shapes_compile_once(kernel):
    compiles = 0

    def counting(graph, _):
        nonlocal compiles
        compiles += 1
        return graph

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counting)
    for batch, seqlen_q, seqlen_k in ((5, 130, 150), (7, 40, 200), (2, 77, 31), (5, 260, 260)):
        inputs = make_inputs(Shape(batch, 6, 3, seqlen_q, seqlen_k, 64), torch.bfloat16, kernel.device)
        for result, expected in zip(compiled(*inputs, kernel), block(*inputs, kernel), strict=True):
            assert torch.equal(result, expected)
    assert compiles == 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [64, 100])
def test_fake_results_are_like_real_ones(kernel, layout, head_dim):
    """Sizes, strides, types and devices, which the compiler takes on trust."""
    inputs = make_inputs(Shape(2, 4, 2, 13, 17, head_dim), torch.float16, kernel.device, layout)
    real = kernel.forward(*inputs, causal=True)
    with FakeTensorMode() as mode:
        fake = flash_cute.forward(
            *(mode.from_tensor(tensor) for tensor in inputs), causal=True, family=kernel.family
        )
    for ours, theirs in zip(fake, real, strict=True):
        assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())
        assert (ours.dtype, ours.device) == (theirs.dtype, theirs.device)


@pytest.mark.parametrize("mask", [MASKS["full"], MASKS["causal"], MASKS["window_symmetric"]])
@pytest.mark.parametrize("head_dim", [BUCKETS[0], 100])
def test_opcheck(kernel, head_dim, mask):
    inputs = make_inputs(Shape(2, 4, 2, 30, 40, head_dim), torch.bfloat16, kernel.device)
    left, right = mask.window or (None, None)
    options = {"window_left": left, "window_right": right, "softmax_scale": 0.2, "family": kernel.family}
    torch.library.opcheck(torch.ops.flash_cute.forward.default, (*inputs, mask.causal), options)


def test_opcheck_of_the_cpu_operator():
    inputs = make_inputs(SHAPES["few_of_each"], torch.bfloat16, "cpu")
    torch.library.opcheck(torch.ops.flash_cute._forward_cpu.default, (*inputs, 0.2, 7, -1))


def test_meta_tensors(kernel):
    """Shapes of the results without data, as models are sized before they are loaded."""
    inputs = [tensor.to("meta") for tensor in make_inputs(SHAPES["grouped_heads"], torch.bfloat16, "cpu")]
    out, lse = flash_cute.forward(*inputs, causal=True, family=kernel.family)
    assert out.shape == inputs[0].shape
    assert lse.shape == inputs[0].shape[:3]


def test_export(kernel):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return flash_cute.forward(q, k, v, causal=True)[0]

    inputs = make_inputs(SHAPES["grouped_heads"], torch.bfloat16, kernel.device)
    program = torch.export.export(Model(), inputs)
    assert torch.equal(program.module()(*inputs), Model()(*inputs))
