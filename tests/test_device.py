"""Streams, CUDA graphs, memory and several devices."""

from __future__ import annotations

import pytest
import torch
from cases import MASKS, SHAPES, Shape, make_inputs
from tolerance import assert_attention

import flash_cute

pytestmark = pytest.mark.gpu

LONG_WAIT = 200_000_000  # GPU clocks, about a tenth of a second: far longer than all that a test enqueues


def assert_same(results, expected) -> None:
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


# One that runs as it is, one that is padded, one that is copied: each must keep to the stream.
LAYOUTS = pytest.mark.parametrize(
    ("head_dim", "layout"), [(64, "mixed"), (100, "mixed"), (64, "columns_of_rows")]
)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_call_waits_for_the_one_before(kernel, head_dim):
    """The queries are the output of the call before: the same as with a synchronisation between calls."""
    shape = Shape(2, 8, 8, 1000, 1000, head_dim)
    start, k, v = make_inputs(shape, torch.bfloat16, kernel.device)
    kernel.forward(start, k, v)  # skips what this build has not

    def chain(after_each) -> list[torch.Tensor]:
        outputs = [start]
        for _ in range(20):
            outputs.append(flash_cute.forward(outputs[-1], k, v, causal=True, family=kernel.family)[0])
            after_each()
        return outputs

    assert_same(chain(lambda: None), chain(torch.cuda.synchronize))


@LAYOUTS
def test_work_goes_to_the_current_stream(kernel, head_dim, layout):
    """The inputs arrive late on a side stream; a kernel on another would read the NaN that was there."""
    shape = Shape(2, 4, 4, 500, 500, head_dim)
    inputs = make_inputs(shape, torch.bfloat16, kernel.device, layout)
    expected = kernel.forward(*inputs)
    late = [torch.full_like(tensor, torch.nan) for tensor in inputs]
    side = torch.cuda.Stream(kernel.device)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG_WAIT)
        for target, source in zip(late, inputs, strict=True):
            target.copy_(source)
        results = kernel.forward(*late)
    side.synchronize()
    assert_same(results, expected)


@LAYOUTS
def test_the_host_does_not_wait(kernel, head_dim, layout):
    inputs = make_inputs(Shape(2, 4, 4, 500, 500, head_dim), torch.bfloat16, kernel.device, layout)
    flash_cute.forward(*inputs, family=kernel.family)  # the first call may load the kernel, which may wait
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_WAIT)
    flash_cute.forward(*inputs, family=kernel.family)
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


@LAYOUTS
@pytest.mark.parametrize("causal", [False, True])
def test_graph_replays_with_new_inputs(kernel, causal, head_dim, layout):
    shape = Shape(2, 4, 2, 300, 400, head_dim)
    inputs = make_inputs(shape, torch.bfloat16, kernel.device, layout)
    kernel.forward(*inputs, causal=causal)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = kernel.forward(*inputs, causal=causal)
    for _ in range(3):
        fresh = make_inputs(shape, torch.bfloat16, kernel.device)
        for tensor, values in zip(inputs, fresh, strict=True):
            tensor.copy_(values)
        graph.replay()
        assert_same(results, kernel.forward(*fresh, causal=causal))


def test_graph_without_keys(kernel):
    """Nothing to attend to is filled in by PyTorch's kernels; these too belong to the graph."""
    q, k, v = make_inputs(Shape(2, 4, 4, 30, 0, 64), torch.bfloat16, kernel.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_cute.forward(q, k, v, family=kernel.family)
    out.fill_(torch.nan)
    lse.fill_(torch.nan)
    graph.replay()
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@LAYOUTS
def test_memory_is_torchs_and_comes_back(kernel, head_dim, layout):
    inputs = make_inputs(Shape(2, 4, 4, 500, 500, head_dim), torch.bfloat16, kernel.device, layout)
    kernel.forward(*inputs)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    for _ in range(20):
        kernel.forward(*inputs)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]) == before


@pytest.mark.multi_gpu
def test_runs_on_the_inputs_device(kernel):
    """On another device than the current one, which stays current."""
    other = torch.device("cuda", 1)
    q, k, v = make_inputs(SHAPES["no_tile_divides"], torch.bfloat16, other)
    with torch.cuda.device(0):
        result = kernel.forward(q, k, v, causal=True)
        assert torch.cuda.current_device() == 0
    assert_attention(result, q, k, v, MASKS["causal"])


@pytest.mark.multi_gpu
def test_inputs_on_two_gpus_are_refused(kernel):
    q, k, v = make_inputs(SHAPES["one_tile"], torch.bfloat16, kernel.device)
    with pytest.raises(ValueError, match="device"):
        kernel.forward(q, k.to("cuda:1"), v)
