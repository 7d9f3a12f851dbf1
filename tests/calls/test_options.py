"""Every option through every face: it reaches the operator, or a sentence refuses it."""

from __future__ import annotations

import inspect
import json
from typing import get_type_hints

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flash_cute
from flash_cute._torch import ops
from flash_cute.options import OptionsAndOut
from flash_cute.wording import is_ours

HEADS, ROWS, HEAD_DIM = 2, 4, 8


def int32(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# What is given for each option, and what the operator gets of it.
GIVEN = {
    "softmax_scale": (0.3, {"softmax_scale": 0.3}),
    "window": ((3, 1), {"window_left": 3, "window_right": 1}),
    "seqused_q": (int32(3), {"seqused_q": torch.Tensor}),
    "seqused_k": (int32(3), {"seqused_k": torch.Tensor}),
    "leftpad_k": (int32(1), {"leftpad_k": torch.Tensor}),
    "block_table": (int32([0]), {"block_table": torch.Tensor}),
    "batch_invariant": (True, {"batch_invariant": True}),
    "ranges": (torch.zeros(1, 1, ROWS, 1, 2, dtype=torch.int32), {"ranges": torch.Tensor}),
    "deterministic": (True, {"deterministic": True}),
    "family": ("sm80", {"family": "sm80"}),
    "sinks": (torch.zeros(HEADS), {"sinks": torch.Tensor}),
    "mask": (torch.ones(1, 1, ROWS, ROWS, dtype=torch.bool), {"mask": torch.Tensor}),
    "bias": (torch.zeros(1, HEADS, 1, ROWS), {"bias": torch.Tensor}),
    "alibi_slopes": (torch.ones(HEADS), {"alibi_slopes": torch.Tensor}),
    "softcap": (30, {"softcap": 30}),
    "dropout_p": (0.25, {"dropout_p": 0.25}),
    "dropout_seed": (torch.tensor([1, 2]), {"dropout_seed": None}),  # without dropout_p it says nothing
    "precision": ("highest", {"tf32": False}),
    "out": (torch.empty(1, HEADS, ROWS, HEAD_DIM), {"out": torch.Tensor}),
}


OF_CODES = {"k_scale", "v_scale"}  # of caches of 8 bits alone: tests/kernels/test_fp8_cache.py


class Recorded(TorchDispatchMode):
    """Keeps what operators of flash_cute are called with, and gives results without running them."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace != "flash_cute":
            return op(*args, **(kwargs or {}))
        names = [argument.name for argument in op._schema.arguments]
        given = {argument.name: argument.default_value for argument in op._schema.arguments}
        given |= dict(zip(names, args, strict=False)) | (kwargs or {})
        self.calls.append(given)
        q = given["q"]
        if "lse" in given:
            return [torch.zeros_like(given[name]) for name in "qkv"] + [torch.zeros(HEADS)]
        lse = q.new_zeros(q.shape[1::-1] if q.dim() == 3 else q.shape[:3])
        return lse if "out" in given else (torch.zeros_like(q), lse)


def dense(function, q, **options):
    return function(q, q, q, **options)


def packed(function, q, **options):
    rows = {name: x[0].transpose(0, 1) if name == "out" else x for name, x in options.items()}
    if "ranges" in rows:
        rows["ranges"] = rows["ranges"][0, 0]
    if "block_table" in options:
        return function(q[0].transpose(0, 1), q, q, int32(0, ROWS), **rows)
    q = q[0].transpose(0, 1)
    return function(q, q, q, int32(0, ROWS), **rows)


def nested(function, q, **options):
    q = torch.nested.nested_tensor_from_jagged(q[0].transpose(0, 1), torch.tensor([0, ROWS])).transpose(1, 2)
    results = function(q, q, q, **options)
    return [x.values() for x in (results if isinstance(results, tuple) else [results])]


def mapped(function, q, **options):
    return torch.func.vmap(lambda q: function(q, q, q, **options))(q[None])


LENGTHS = "seqused_q", "seqused_k", "leftpad_k", "block_table", "ranges"
OF_PADDED = "mask", "bias"
OF_RANDOM = ("dropout_p",)  # which vmap draws for no entry unless it is told how
FACES = {  # how it is called, and which options it refuses
    "forward": (dense, flash_cute.forward, ()),
    "attention": (dense, flash_cute.attention, ()),
    "forward_varlen": (packed, flash_cute.forward_varlen, ()),
    "attention_varlen": (packed, flash_cute.attention_varlen, ()),
    "nested forward": (nested, flash_cute.forward, (*LENGTHS, *OF_PADDED, "out")),
    "nested attention": (nested, flash_cute.attention, (*LENGTHS, *OF_PADDED, "out")),
    "vmap of forward": (mapped, flash_cute.forward, ("block_table", "out", *OF_RANDOM)),
    "vmap of attention": (mapped, flash_cute.attention, ("block_table", "out", *OF_RANDOM)),
}


def test_each_option_has_a_case():
    assert GIVEN.keys() | OF_CODES == {*OptionsAndOut.__annotations__, "softmax_scale"}
    for function in (flash_cute.forward, flash_cute.attention):
        parameters = inspect.signature(function).parameters
        assert [*parameters][4:] == [name for name in parameters if name in GIVEN.keys() | OF_CODES]
        assert get_type_hints(function)["q"] is torch.Tensor


@pytest.fixture
def tf32_unless_asked():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def assert_reached(call, expected):
    for name, value in expected.items():
        assert isinstance(call[name], value) if isinstance(value, type) else call[name] == value, name


@pytest.mark.usefixtures("tf32_unless_asked")
@pytest.mark.parametrize("needs_gradient", [False, True], ids=["", "gradients"])
@pytest.mark.parametrize("option", GIVEN)
@pytest.mark.parametrize("face", FACES)
def test_an_option_reaches_the_operator(face, option, needs_gradient):
    call, function, refused = FACES[face]
    value, expected = GIVEN[option]
    q = torch.randn(1, HEADS, ROWS, HEAD_DIM, requires_grad=needs_gradient)
    without_gradients = "block_table", "out"
    with Recorded() as recorded:
        if option in refused or (needs_gradient and option in without_gradients):
            with pytest.raises((ValueError, NotImplementedError)) as caught:
                call(function, q, **{option: value})
            assert is_ours(caught.value)
            return
        results = call(function, q, **{option: value})
        if needs_gradient:
            (results if isinstance(results, torch.Tensor) else results[0]).sum().backward()
    forward, *backward = recorded.calls
    if option != "deterministic":  # of the gradients alone
        assert_reached(forward, expected)
    assert len(backward) == needs_gradient
    for gradient in backward:
        if option not in ("batch_invariant", "sinks"):  # which need no gradient here
            assert_reached(gradient, expected)


@pytest.mark.usefixtures("tf32_unless_asked")
@pytest.mark.parametrize("option", GIVEN)
@pytest.mark.parametrize("face", ["forward", "attention", "forward_varlen", "attention_varlen"])
def test_an_option_reaches_a_compiled_operator(face, option):
    call, function, _ = FACES[face]
    value, expected = GIVEN[option]
    seen = []

    def backend(graph, inputs):
        for node in graph.graph.nodes:
            if node.op == "call_function" and "flash_cute" in str(node.target):
                names = [argument.name for argument in node.target._schema.arguments]
                seen.append(dict(zip(names, node.args, strict=False)) | node.kwargs)
        return graph.forward

    torch._dynamo.reset()
    q = torch.randn(1, HEADS, ROWS, HEAD_DIM, requires_grad=option == "deterministic")
    compiled = torch.compile(call, backend=backend, fullgraph=True)
    if option in ("family", "batch_invariant"):  # the operator's own check, on the CPU
        with pytest.raises(Exception, match=rf"flash_cute: {option} .* on the CPU"):
            compiled(function, q, **{option: value})
        return
    if call is packed and option in OF_PADDED:
        with pytest.raises(Exception, match=rf"flash_cute: {option} must be None with cu_seqlens_q"):
            compiled(function, q, **{option: value})
        return
    compiled(function, q, **{option: value})
    for name, wanted in expected.items():
        found = seen[0].get(name, None if wanted is None else False)
        assert isinstance(found, torch.fx.Node) if isinstance(wanted, type) else found == wanted


@pytest.mark.usefixtures("tf32_unless_asked")
@pytest.mark.parametrize("option", [option for option in GIVEN if option != "out"])
@pytest.mark.parametrize("call", [dense, nested])
def test_an_option_reaches_the_plan(call, option, monkeypatch):
    value, expected = GIVEN[option]
    seen = []

    def plan(q, k, v, lengths, options):
        seen.append(lengths | options)
        return json.dumps({"window_left": None, "window_right": None, "family": "cpu"})

    def explained(*tensors, **options):
        assert isinstance(flash_cute.explain(*tensors, **options), dict)
        return ()

    monkeypatch.setattr(ops, "plan", plan)
    q = torch.randn(1, HEADS, ROWS, HEAD_DIM)
    if call is nested and option in LENGTHS:
        with pytest.raises(ValueError, match=rf"^flash_cute\.explain: {option} is given with nested tensors"):
            call(explained, q, **{option: value})
        return
    if call is nested and option in OF_PADDED:
        with pytest.raises(
            ValueError, match=rf"^flash_cute\.explain: {option} must be None where q is nested"
        ):
            call(explained, q, **{option: value})
        return
    call(explained, q, **{option: value})
    assert_reached({"tf32": False, "dropout_seed": None} | seen[0], expected)
