"""torch.compile, fake tensors, export and opcheck."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy
import pytest
import torch
from support.cases import (
    BATCHES,
    BUCKETS,
    LAYOUTS,
    MASKS,
    ROOT,
    SHAPES,
    Sequence,
    Shape,
    make_inputs,
    make_ragged,
)
from support.wrong_calls import WRONG_PACKED, WRONG_VALUES, assert_one_sentence, packed
from support.wrong_calls import inputs as named_inputs
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


def packed_block(q, k, v, lengths, kernel):
    """Attention of packed sequences between other operators."""
    out, lse = flash_cute.forward_varlen(q * 1.5, k, v, causal=True, family=kernel.family, **lengths)
    return out.flatten(1) * 2, lse + 1


def padded_block(q, k, v, lengths, kernel):
    out, lse = flash_cute.forward(q * 1.5, k, v, causal=True, family=kernel.family, **lengths)
    return out.transpose(1, 2).flatten(2) * 2, lse + 1


ragged_blocks = pytest.mark.parametrize("block", [packed_block, padded_block])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@ragged_blocks
def test_unequal_lengths_compile_without_a_graph_break(kernel, block, backend):
    sequences = BATCHES["used and left padding"]
    batch = make_ragged(sequences, (4, 2), 64, torch.bfloat16, kernel.device, block is packed_block)
    inputs = batch.q.nan_to_num(), batch.k, batch.v, batch.lengths
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    for result, expected in zip(compiled(*inputs, kernel), block(*inputs, kernel), strict=True):
        torch.testing.assert_close(result, expected)


@ragged_blocks
def test_unequal_lengths_compile_once(kernel, block):
    """Whatever the lengths, the totals and the number of sequences."""
    compiles = 0

    def counting(graph, _):
        nonlocal compiles
        compiles += 1
        return graph

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counting)
    for name in ("used and left padding", "left padding"):
        for count in (4, 3, 2):
            sequences = tuple(Sequence(s.rows_q, s.rows_k, 2, 60, 1) for s in BATCHES[name][:count])
            batch = make_ragged(sequences, (6, 3), 64, torch.bfloat16, kernel.device, block is packed_block)
            inputs = batch.q.nan_to_num(), batch.k, batch.v, batch.lengths
            for result, expected in zip(compiled(*inputs, kernel), block(*inputs, kernel), strict=True):
                assert torch.equal(result, expected)
    assert compiles == 1


@pytest.mark.parametrize("strict", [False, True])
def test_packed_sequences_are_exported(kernel, strict):
    class Model(torch.nn.Module):
        def forward(self, q, k, v, offsets):
            return flash_cute.forward_varlen(q, k, v, offsets, causal=True)

    def inputs(*seqlens):
        sequences = tuple(Sequence(seqlen, seqlen) for seqlen in seqlens)
        batch = make_ragged(sequences, (4, 4), 64, torch.bfloat16, kernel.device, True, margins=(0, 0))
        return batch.q, batch.k, batch.v, batch.lengths["cu_seqlens_q"]

    total, entries = torch.export.Dim("total", min=2, max=4096), torch.export.Dim("entries", min=2, max=4096)
    shapes = ({0: total}, {0: total}, {0: total}, {0: entries})
    program = torch.export.export(Model(), inputs(40, 50, 7), strict=strict, dynamic_shapes=shapes)
    late = inputs(11, 100, 3, 1)
    for result, expected in zip(program.module()(*late), Model()(*late), strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("width", [64, 24])
def test_nested_tensors_compile(kernel, width):
    """What is jagged stays so; other lengths need no other graph."""

    def attend(q, k, v):
        return flash_cute.attention(q * 1.5, k, v, causal=True, family=kernel.family) * 2

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for seqlens in ((30, 5, 90), (8, 60, 1)):
        offsets = torch.tensor([0, *seqlens], device=kernel.device).cumsum(0)
        q, k, v = (
            torch.nested.nested_tensor_from_jagged(x[0].transpose(0, 1), offsets).transpose(1, 2)
            for x in make_inputs(
                Shape(1, 4, 2, sum(seqlens), sum(seqlens), 64, width), torch.bfloat16, kernel.device
            )
        )
        result, expected = compiled(q, k, v), attend(q, k, v)
        assert torch.equal(result.values(), expected.values())


def half_window(q, k, v, kernel):
    """A window that depends on the length."""
    return flash_cute.forward(q, k, v, window=(q.shape[2] // 2, 0), family=kernel.family)


@pytest.mark.parametrize("function", [block, half_window])
def test_dynamic_shapes_compile_once(kernel, function):
    compiles = 0

    def counting(graph, _):
        nonlocal compiles
        compiles += 1
        return graph

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counting)
    for batch, seqlen_q, seqlen_k in ((5, 130, 150), (7, 40, 200), (2, 77, 31), (5, 260, 260)):
        inputs = make_inputs(Shape(batch, 6, 3, seqlen_q, seqlen_k, 64), torch.bfloat16, kernel.device)
        for result, expected in zip(compiled(*inputs, kernel), function(*inputs, kernel), strict=True):
            assert torch.equal(result, expected)
    assert compiles == 1


@pytest.mark.parametrize("strict", [False, True])
def test_windows_of_dynamic_lengths_are_exported(kernel, strict):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return half_window(q, k, v, kernel)

    def inputs(seqlen):
        return make_inputs(Shape(2, 4, 4, seqlen, seqlen, 64), torch.bfloat16, kernel.device)

    shapes = ({2: torch.export.Dim("seqlen", min=8, max=4096)},) * 3
    program = torch.export.export(Model(), inputs(100), strict=strict, dynamic_shapes=shapes)
    late = inputs(33)
    for result, expected in zip(program.module()(*late), half_window(*late, kernel), strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize(
    "integer", [numpy.int32, numpy.int64, numpy.uint8, torch.tensor], ids=lambda integer: integer.__name__
)
def test_windows_are_anything_with_an_index(device, integer):
    q, k, v = make_inputs(SHAPES["few_of_each"], torch.bfloat16, device)
    expected = flash_cute.forward(q, k, v, window=(2, 1))
    for result, same in zip(flash_cute.forward(q, k, v, window=(integer(2), 1)), expected, strict=True):
        assert torch.equal(result, same)


@pytest.mark.parametrize("exported", [False, True])
def test_graphs_without_gradients_stay_out_of_our_python(kernel, exported):
    """But for the CPU's kernel, which is written in Python."""
    inputs = make_inputs(Shape(2, 4, 2, 130, 150, 64), torch.bfloat16, kernel.device)

    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return block(q, k, v, kernel)

    program = torch.export.export(Model(), inputs).module() if exported else torch.compile(Model())
    with torch.no_grad():
        program(*inputs)
        called = set()
        sys.setprofile(lambda frame, event, _: called.add(frame.f_code.co_filename))
        try:
            program(*inputs)
        finally:
            sys.setprofile(None)
    ours = {name for name in called if "/flash_cute/" in name and "/flash_cute/_cpu/" not in name}
    assert not ours


@pytest.mark.parametrize(("change", "words"), WRONG_VALUES.values(), ids=WRONG_VALUES)
def test_fakes_refuse_what_calls_refuse(device, change, words):
    wrong = named_inputs(device)
    wrong |= change(wrong)
    assert_fakes_are_refused(flash_cute.forward, wrong, words)


@pytest.mark.parametrize(("change", "words"), WRONG_PACKED.values(), ids=WRONG_PACKED)
def test_packed_fakes_refuse_what_calls_refuse(device, change, words):
    wrong = packed(device)
    wrong |= change(wrong)
    assert_fakes_are_refused(flash_cute.forward_varlen, wrong, words)


def assert_fakes_are_refused(function, wrong, words):
    tensors = [x for x in wrong.values() if isinstance(x, torch.Tensor)]
    if any(x.is_nested or x.is_sparse or x.is_quantized for x in tensors):
        pytest.skip("fake tensors are dense")
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in wrong.items()}
        with pytest.raises(ValueError, match="flash_cute") as caught:
            function(fakes.pop("q"), fakes.pop("k"), fakes.pop("v"), **fakes)
    assert_one_sentence(str(caught.value), words, function.__name__)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiling_a_wrong_call_says_what_is_wrong(device, dynamic):
    q, k, v = make_inputs(SHAPES["grouped_heads"], torch.bfloat16, device)
    compiled = torch.compile(flash_cute.forward, backend="aot_eager", dynamic=dynamic, fullgraph=True)
    with pytest.raises(RuntimeError, match=r"flash_cute: q has 5 heads and k 2; the heads of q must"):
        compiled(q[:, :5], k, v)
    with pytest.raises(RuntimeError, match=r"flash_cute: q must have dtype .*, got torch\.float64"):
        compiled(q.double(), k.double(), v.double())


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiling_an_enormous_window(device, fullgraph):
    inputs = make_inputs(SHAPES["few_of_each"], torch.bfloat16, device)
    compiled = torch.compile(
        lambda: flash_cute.forward(*inputs, window=2**70), backend="aot_eager", fullgraph=fullgraph
    )
    with pytest.raises(
        RuntimeError if fullgraph else ValueError, match=rf"window's left limit is {2**70}; less"
    ):
        compiled()


def test_compiling_a_wrong_window_falls_back_to_our_sentence(device):
    inputs = make_inputs(SHAPES["few_of_each"], torch.bfloat16, device)
    with pytest.raises(TypeError, match=r"flash_cute\.attention: window is 3\.0"):
        torch.compile(flash_cute.attention, backend="aot_eager")(*inputs, window=3.0)


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"is_causal": True}, "there is no argument is_causal; did you mean causal?"),
        ({"k": None}, "k is of type NoneType; a torch.Tensor is accepted"),
        ({"seqused_q": [1]}, "seqused_q is of type list; a torch.Tensor is accepted"),
        ({"window": 3.0}, "window is 3.0; None, an int or a pair of these (left, right) is accepted"),
        ({"family": 90}, "family is 90; 'sm80', 'sm90' or None is accepted"),
        ({"softmax_scale": torch.tensor(0.5)}, "softmax_scale is a tensor; a number or None is accepted"),
        ({"softmax_scal": 0.5}, "there is no argument softmax_scal; "),
    ],
    ids=str,
)
def test_compiling_arguments_of_a_wrong_kind_says_so(device, wrong, sentence, fullgraph):
    named = dict(zip("qkv", make_inputs(SHAPES["few_of_each"], torch.bfloat16, device), strict=True))
    compiled = torch.compile(
        lambda: flash_cute.forward(**named | wrong), backend="aot_eager", fullgraph=fullgraph
    )
    # With the whole as one graph the compiler's own error quotes it.
    with pytest.raises(RuntimeError if fullgraph else TypeError) as caught:
        compiled()
    assert f"flash_cute.forward: {sentence}" in str(caught.value)


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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [24, 100])
def test_out_of_another_width(kernel, layout, width):
    """Dense in the order of q's dimensions, the last one innermost; fakes and compilers say so, too."""
    inputs = make_inputs(Shape(2, 4, 2, 13, 17, 64, width), torch.float16, kernel.device, layout)
    q = inputs[0]
    real, _ = kernel.forward(*inputs, causal=True)
    order = sorted(range(3), key=lambda dim: (-q.stride(dim), dim))
    expected = torch.empty([q.shape[dim] for dim in order] + [width]).permute(
        *(order.index(dim) for dim in range(3)), 3
    )
    assert (real.shape, real.stride()) == (expected.shape, expected.stride())
    with FakeTensorMode() as mode:
        fake = flash_cute.attention(*(mode.from_tensor(x) for x in inputs), family=kernel.family)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "mixed", "head_innermost_but_one"])
@pytest.mark.parametrize("width", [24, 96])
def test_compiled_out_of_another_width(kernel, layout, width, dynamic):
    inputs = make_inputs(Shape(2, 4, 2, 13, 17, 64, width), torch.bfloat16, kernel.device, layout)

    def attend(q, k, v):
        out, lse = flash_cute.forward(q, k, v, causal=True, family=kernel.family)
        return out * 2, lse

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for found, expected in zip(compiled(*inputs), attend(*inputs), strict=True):
        assert (found.shape, found.stride()) == (expected.shape, expected.stride())
        assert torch.equal(found, expected)


def test_packed_out_of_another_width(kernel):
    offsets = torch.tensor([0, 30, 70], dtype=torch.int32, device=kernel.device)
    for heads_first in (False, True):
        shapes = [
            (heads, 70, width) if heads_first else (70, heads, width) for heads, width in ((4, 64), (2, 24))
        ]
        q, v = (torch.randn(shape, device=kernel.device).bfloat16() for shape in shapes)
        q, v = (x.transpose(0, 1) if heads_first else x for x in (q, v))
        k = q[:, :2]
        out, lse = kernel.forward(q, k, v, cu_seqlens_q=offsets)
        assert out.stride() == ((24, 70 * 24, 1) if heads_first else (4 * 24, 24, 1))
        with FakeTensorMode() as mode:
            tensors = [mode.from_tensor(x) for x in (q, k, v, offsets)]
            fakes = flash_cute.forward_varlen(*tensors, family=kernel.family)
        for ours, theirs in zip(fakes, (out, lse), strict=True):
            assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())


@pytest.mark.parametrize("strict", [False, True])
def test_v_of_another_width_is_exported(kernel, strict):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return flash_cute.forward(q, k, v, causal=True)

    def inputs(seqlen):
        return make_inputs(Shape(2, 4, 4, seqlen, seqlen, 64, 40), torch.bfloat16, kernel.device)

    shapes = ({2: torch.export.Dim("seqlen", min=2, max=4096)},) * 3
    program = torch.export.export(Model(), inputs(100), strict=strict, dynamic_shapes=shapes)
    late = inputs(33)
    for result, expected in zip(program.module()(*late), Model()(*late), strict=True):
        assert torch.equal(result, expected)
        assert result.stride() == expected.stride()


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if not name.startswith("expanded")])
@pytest.mark.parametrize("is_packed", [True, False])
def test_fake_results_of_unequal_lengths_are_like_real_ones(kernel, layout, is_packed):
    sequences = BATCHES["used and left padding"]
    batch = make_ragged(sequences, (4, 2), 64, torch.float16, kernel.device, is_packed, layout)
    inputs = {"q": batch.q, "k": batch.k, "v": batch.v, **batch.lengths}
    real = kernel.forward(**inputs)
    function = flash_cute.forward_varlen if is_packed else flash_cute.forward
    with FakeTensorMode() as mode:
        fake = function(**{name: mode.from_tensor(x) for name, x in inputs.items()}, family=kernel.family)
    for ours, theirs in zip(fake, real, strict=True):
        assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())
        assert (ours.dtype, ours.device) == (theirs.dtype, theirs.device)


@pytest.mark.parametrize("name", ["unequal", "used and left padding"])
@pytest.mark.parametrize("is_packed", [True, False])
def test_opcheck_of_unequal_lengths(kernel, name, is_packed):
    batch = make_ragged(BATCHES[name], (4, 2), 40, torch.bfloat16, kernel.device, is_packed)
    ops = torch.ops.flash_cute
    options = dict(batch.lengths, softmax_scale=0.2, family=kernel.family)
    offsets = [options.pop(name) for name in ("cu_seqlens_q", "cu_seqlens_k") if name in options]
    for op in (ops._forward_varlen, ops.forward_varlen) if is_packed else (ops._forward, ops.forward):
        torch.library.opcheck(op.default, (batch.q, batch.k, batch.v, *offsets, True), options)


@pytest.mark.parametrize("mask", [MASKS["full"], MASKS["causal"], MASKS["window_symmetric"]])
@pytest.mark.parametrize("head_dim", [BUCKETS[0], 100])
def test_opcheck(kernel, head_dim, mask):
    inputs = make_inputs(Shape(2, 4, 2, 30, 40, head_dim), torch.bfloat16, kernel.device)
    left, right = mask.window or (None, None)
    options = {"window_left": left, "window_right": right, "softmax_scale": 0.2, "family": kernel.family}
    narrow = *inputs[:2], inputs[2][..., :40]
    for op in (torch.ops.flash_cute._forward.default, torch.ops.flash_cute.forward.default):
        torch.library.opcheck(op, (*inputs, mask.causal), options)
        torch.library.opcheck(op, (*narrow, mask.causal), options)


def test_meta_tensors(kernel):
    """Shapes of the results without data, as models are sized before they are loaded."""
    inputs = [tensor.to("meta") for tensor in make_inputs(SHAPES["grouped_heads"], torch.bfloat16, "cpu")]
    out, lse = flash_cute.forward(*inputs, causal=True, family=kernel.family)
    assert out.shape == inputs[0].shape
    assert lse.shape == inputs[0].shape[:3]
    meta = {name: tensor.to("meta") for name, tensor in packed("cpu").items()}
    out, lse = flash_cute.forward_varlen(**meta, family=kernel.family)
    assert out.shape == meta["q"].shape
    assert lse.shape == out.shape[1::-1]


def test_export(kernel):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return flash_cute.forward(q, k, v, causal=True)[0]

    inputs = make_inputs(SHAPES["grouped_heads"], torch.bfloat16, kernel.device)
    program = torch.export.export(Model(), inputs)
    assert torch.equal(program.module()(*inputs), Model()(*inputs))


@pytest.mark.parametrize("touch", ["", "from flash_cute import forward\n"], ids=["not touched", "touched"])
def test_loading_a_program_needs_the_operators(touch, tmp_path):
    """What docs/api.md says of an import that comes before torch's."""

    class Model(torch.nn.Module):
        def forward(self, q):
            return flash_cute.attention(q, q, q)

    program = torch.export.export(Model(), (torch.ones(1, 1, 4, 8, dtype=torch.bfloat16),))
    torch.export.save(program, tmp_path / "program.pt2")
    script = f"import flash_cute\nimport torch\n{touch}torch.export.load('program.pt2')"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)])}
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (ran.returncode == 0) == bool(touch), ran.stderr
