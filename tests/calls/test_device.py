"""Streams, host threads, CUDA graphs, memory, failing calls and several devices."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.cases import MASKS, SHAPES, Shape, make_inputs
from support.tolerance import assert_attention

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


def test_calls_that_claim_their_tiles(kernel):
    """Replays of a graph, each of which begins with the counter of the one before, and calls beside them."""
    inputs = make_inputs(Shape(1, 16, 16, 4200, 4200, 128), torch.bfloat16, kernel.device)
    expected = [kernel.forward(*inputs, causal=causal) for causal in (True, False)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = kernel.forward(*inputs, causal=True)
    side = torch.cuda.Stream(kernel.device)
    for _ in range(5):
        for tensor in results:
            tensor.fill_(torch.nan)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            beside = [kernel.forward(*inputs, causal=causal) for causal in (True, False)]
        graph.replay()
        torch.cuda.synchronize()
        assert_same(results, expected[0])
        for mine, others in zip(beside, expected, strict=True):
            assert_same(mine, others)


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

    def taken() -> tuple[int, int]:
        """By 20 calls: of PyTorch's memory, and of the GPU's, which other processes may use meanwhile."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
        for _ in range(20):
            kernel.forward(*inputs)
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() - before[0], before[1] - torch.cuda.mem_get_info()[0]

    assert (0, 0) in [taken() for _ in range(10)]


def test_a_cold_host_thread(kernel):
    """A host thread whose first use of CUDA is a call; servers and autograd have such threads."""
    inputs = make_inputs(SHAPES["one_tile"], torch.bfloat16, kernel.device)
    expected = kernel.forward(*inputs)
    with ThreadPoolExecutor(1) as pool:
        assert_same(pool.submit(flash_cute.forward, *inputs, family=kernel.family).result(), expected)


@pytest.mark.parametrize("head_dim", [64, 100])
@pytest.mark.parametrize("compiled", [False, True])
def test_out_of_memory(kernel, compiled, head_dim):
    """torch's exception, in a compiled graph one sentence; the bytes are named, and the next call is good."""
    good = make_inputs(Shape(1, 1, 1, 5, 5, head_dim), torch.float16, kernel.device)
    batch, rows = torch.cuda.mem_get_info()[1] // head_dim >> 20, 1 << 20  # twice the memory that there is
    q, k, v = (torch.empty(1, 1, 1, head_dim, dtype=torch.float16, device=kernel.device) for _ in range(3))
    huge = q.expand(batch, 1, rows, head_dim)
    forward = torch.compile(flash_cute.forward, backend="aot_eager") if compiled else flash_cute.forward
    error = RuntimeError if compiled else torch.OutOfMemoryError
    face = "flash_cute" if compiled else r"flash_cute\.forward"
    sentence = rf"^{face}: out of memory: \d+ bytes for .*free$"
    with torch.no_grad(), pytest.raises(error, match=sentence):
        forward(huge, *(x.expand(batch, 1, 1, head_dim) for x in (k, v)), family=kernel.family)
    assert_attention(kernel.forward(*good), *good)


def test_no_memory_for_a_copy(kernel):
    """Keys and values that are read in a copy, whose rows are padded; out and lse are small."""
    x = torch.empty(1, 1, 1, 100, dtype=torch.float16, device=kernel.device)
    q, k = x.expand(1, 64, 1, 100), x.expand(1, 64, 1 << 28, 100)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"out of memory: \d+ bytes for a copy of k could not be"
    ):
        flash_cute.forward(q, k, k, family=kernel.family)
    good = make_inputs(Shape(1, 1, 1, 5, 5, 100), torch.float16, kernel.device)
    assert_attention(kernel.forward(*good), *good)


def test_a_failed_launch_leaves_nothing_behind(kernel):
    """A launch into the legacy stream fails while another stream that it waits for is captured."""
    runtime = ctypes.CDLL("libcudart.so.13")
    inputs = make_inputs(SHAPES["one_tile"], torch.bfloat16, kernel.device, "contiguous")
    expected = kernel.forward(*inputs)
    torch.cuda.synchronize()
    blocking, graph = ctypes.c_void_p(), ctypes.c_void_p()
    assert runtime.cudaStreamCreate(ctypes.byref(blocking)) == 0
    assert runtime.cudaStreamBeginCapture(blocking, 1) == 0  # of this thread
    try:
        with pytest.raises(
            RuntimeError, match=r"^flash_cute\.forward: launching the kernel failed: operation "
        ):
            flash_cute.forward(*inputs, family=kernel.family)
    finally:
        runtime.cudaStreamEndCapture(blocking, ctypes.byref(graph))
        runtime.cudaGetLastError()
        assert runtime.cudaStreamDestroy(blocking) == 0
    assert_same(kernel.forward(*inputs), expected)


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
