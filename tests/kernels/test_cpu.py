"""The CPU path on machines that have a GPU, where the other tests run on that one only."""

from __future__ import annotations

import pytest
import torch
from support.cases import DTYPES, LAYOUTS, MASKS, SHAPES, make_gradients, make_inputs
from support.tolerance import assert_attention, assert_gradients

import flash_cute

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("shape", ["few_of_each", "grouped_heads", "more_keys", "more_queries"])
def test_cpu(shape, mask, dtype):
    q, k, v = make_inputs(SHAPES[shape], dtype, "cpu")
    assert_attention(flash_cute.forward(q, k, v, **mask.options), q, k, v, mask)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("shape", ["few_of_each", "grouped_heads", "more_keys", "more_queries"])
def test_gradients_on_the_cpu(shape, mask, dtype):
    inputs = make_inputs(SHAPES[shape], dtype, "cpu")
    gradients = make_gradients(inputs[0])
    leaves = [x.detach().requires_grad_() for x in inputs]
    results = torch.autograd.grad(flash_cute.forward(*leaves, **mask.options), leaves, gradients)
    assert_gradients(results, *inputs, *gradients, mask)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_are_alike_on_cpu_and_gpu(device, layout):
    """Shapes, strides and types; the values follow from each being right."""
    inputs = make_inputs(SHAPES["few_of_each"], torch.bfloat16, device, layout)
    on_gpu, on_cpu = (flash_cute.forward(*(x.to(where) for x in inputs)) for where in (device, "cpu"))
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
