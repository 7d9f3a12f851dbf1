"""Wrong calls: one clear sentence each, raised before anything runs, and the next call is as good as ever."""

from __future__ import annotations

import math

import pytest
import torch
from cases import SHAPES, make_inputs

import flash_cute


def inputs(device):
    return dict(zip("qkv", make_inputs(SHAPES["grouped_heads"], torch.bfloat16, device), strict=True))


def like(tensor: torch.Tensor, **changes: int) -> torch.Tensor:
    """A random tensor of the same kind with some of its sizes changed."""
    sizes = dict(zip(("batch", "heads", "seqlen", "head_dim"), tensor.shape, strict=True)) | changes
    return torch.randn(*sizes.values(), device=tensor.device).to(tensor.dtype)


def change_all(tensors, **changes):
    return {name: like(tensor, **changes) for name, tensor in tensors.items()}


# What is wrong -> (changed arguments, given q, k and v; the exception; words that the sentence must contain).
# grouped_heads is q (2, 6, 150, 64) and k, v (2, 2, 190, 64).
WRONG = {
    "q is a list": (lambda t: {"q": [[1.0]]}, TypeError, ["q", "list"]),
    "k is None": (lambda t: {"k": None}, TypeError, ["k", "None"]),
    "v is a number": (lambda t: {"v": 3.0}, TypeError, ["v", "float"]),
    "q of three dimensions": (lambda t: {"q": t["q"][0]}, ValueError, ["q", "3 dimensions", "4"]),
    "k of five dimensions": (lambda t: {"k": t["k"][None]}, ValueError, ["k", "5 dimensions", "4"]),
    "v of no dimensions": (lambda t: {"v": t["v"].sum()}, ValueError, ["v", "0 dimensions", "4"]),
    "all float32": (lambda t: {n: x.float() for n, x in t.items()}, ValueError, ["q", "dtype", "float16", "bfloat16"]),
    "all float64": (lambda t: {n: x.double() for n, x in t.items()}, ValueError, ["q", "dtype", "float16", "bfloat16"]),
    "all int32": (lambda t: {n: x.int() for n, x in t.items()}, ValueError, ["q", "dtype", "float16", "bfloat16"]),
    "k of another dtype": (lambda t: {"k": t["k"].half()}, ValueError, ["k", "dtype", "q"]),
    "v of another dtype": (lambda t: {"v": t["v"].float()}, ValueError, ["v", "dtype", "q"]),
    "heads that do not divide": (lambda t: {"q": like(t["q"], heads=5)}, ValueError, ["q", "5", "k", "2", "heads"]),
    "fewer query heads": (lambda t: {"q": like(t["q"], heads=1)}, ValueError, ["q", "1", "k", "2", "heads"]),
    "no K/V heads": (lambda t: {n: like(t[n], heads=0) for n in "kv"}, ValueError, ["q", "6", "k", "0", "heads"]),
    "k of another batch": (lambda t: {n: like(t[n], batch=3) for n in "kv"}, ValueError, ["k", "batch", "3", "2"]),
    "k of another head_dim": (
        lambda t: {n: like(t[n], head_dim=32) for n in "kv"}, ValueError, ["k", "head_dim", "32", "64"],
    ),
    "v of another seqlen": (lambda t: {"v": like(t["v"], seqlen=191)}, ValueError, ["v", "k", "191", "190"]),
    "v of other heads": (lambda t: {"v": like(t["v"], heads=6)}, ValueError, ["v", "k"]),
    "v of another batch": (lambda t: {"v": like(t["v"], batch=1)}, ValueError, ["v", "k"]),
    "v of another head_dim": (lambda t: {"v": like(t["v"], head_dim=32)}, ValueError, ["v", "k", "32", "64"]),
    "head_dim over 256": (lambda t: change_all(t, head_dim=264), ValueError, ["head_dim", "264", "256"]),
    "head_dim of 0": (lambda t: change_all(t, head_dim=0), ValueError, ["head_dim", "0", "256"]),
    "window's left is negative": (lambda t: {"window": (-3, 5)}, ValueError, ["window", "left", "-3", ">= 0"]),
    "window's right is negative": (lambda t: {"window": (3, -1)}, ValueError, ["window", "right", "-1", ">= 0"]),
    "window is negative": (lambda t: {"window": -7}, ValueError, ["window", "-7", ">= 0"]),
    "window's right is negative, causal": (
        lambda t: {"window": (3, -1), "causal": True}, ValueError, ["window", "right", "-1", ">= 0"],
    ),
    "window of three": (lambda t: {"window": (1, 2, 3)}, TypeError, ["window", "(1, 2, 3)"]),
    "window of a float": (lambda t: {"window": (1.5, None)}, TypeError, ["window", "1.5"]),
    "window of text": (lambda t: {"window": "wide"}, TypeError, ["window", "wide"]),
    "scale is NaN": (lambda t: {"softmax_scale": math.nan}, ValueError, ["softmax_scale", "nan", "finite"]),
    "scale is infinite": (lambda t: {"softmax_scale": math.inf}, ValueError, ["softmax_scale", "inf", "finite"]),
    "scale is zero": (lambda t: {"softmax_scale": 0.0}, ValueError, ["softmax_scale", "0", "> 0"]),
    "scale is negative": (lambda t: {"softmax_scale": -1.0}, ValueError, ["softmax_scale", "-1", "> 0"]),
    "scale overflows float32": (lambda t: {"softmax_scale": 1e300}, ValueError, ["softmax_scale", "1e+300"]),
    "scale is text": (lambda t: {"softmax_scale": "half"}, TypeError, ["softmax_scale"]),
    "causal is text": (lambda t: {"causal": "yes"}, TypeError, ["causal"]),
    "no such family": (lambda t: {"family": "sm70"}, ValueError, ["family", "sm70", "sm80"]),
    "q needs a gradient": (lambda t: {"q": t["q"].requires_grad_()}, NotImplementedError, ["backward"]),
    "v needs a gradient": (lambda t: {"v": t["v"].requires_grad_()}, NotImplementedError, ["backward"]),
}


def assert_one_sentence(message: str, words: list[str]) -> None:
    assert message.startswith("flash_cute.forward: "), message
    assert "\n" not in message, message
    assert len(message) < 250, message
    for leftover in (".cpp", ".hpp", "Exception raised", "c10", "RuntimeError", "aten::"):
        assert leftover not in message, message
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"


def call(function, arguments: dict):
    arguments = dict(arguments)
    return function(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


@pytest.mark.parametrize("function", [flash_cute.forward, flash_cute.attention], ids=["forward", "attention"])
@pytest.mark.parametrize(("change", "error", "words"), WRONG.values(), ids=WRONG)
def test_wrong_calls(device, function, change, error, words):
    good = inputs(device)
    expected = call(flash_cute.forward, good)
    bad = {name: tensor.clone() for name, tensor in good.items()}
    with pytest.raises(error) as caught:
        call(function, bad | change(bad))
    assert type(caught.value) is error
    assert_one_sentence(str(caught.value), words)
    if device.type == "cuda":
        torch.cuda.synchronize()
    for result, unchanged in zip(call(flash_cute.forward, good), expected, strict=True):
        assert torch.equal(result, unchanged)


NOT_FOR_EXPLAIN = ("gradient",)  # it launches nothing, so nothing can be differentiated


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [pytest.param(*case, id=name) for name, case in WRONG.items() if not name.endswith(NOT_FOR_EXPLAIN)],
)
def test_explain_refuses_the_same(device, change, error, words):
    good = inputs(device)
    with pytest.raises(error) as caught:
        call(flash_cute.explain, good | change(good))
    assert_one_sentence(str(caught.value), words)


@pytest.mark.gpu
@pytest.mark.parametrize("name", "qkv")
def test_devices_mixed(kernel, name):
    tensors = inputs(kernel.device)
    tensors[name] = tensors[name].cpu()
    with pytest.raises(ValueError, match="device") as caught:
        call(flash_cute.forward, tensors)
    assert_one_sentence(str(caught.value), ["q", "device"] if name == "q" else [name, "device", "q"])
    torch.cuda.synchronize()
    call(flash_cute.forward, inputs(kernel.device))


def test_family_on_the_cpu():
    with pytest.raises(ValueError, match="family") as caught:
        call(flash_cute.forward, inputs("cpu") | {"family": "sm80"})
    assert_one_sentence(str(caught.value), ["family", "sm80", "CPU"])


@pytest.mark.gpu
def test_family_of_another_gpu(device):
    if torch.cuda.get_device_capability(device) == (9, 0):
        pytest.skip("every family runs on this GPU")
    with pytest.raises(ValueError, match="sm90"):
        call(flash_cute.forward, inputs(device) | {"family": "sm90"})


def test_no_silent_wrong_gradient(device):
    """The bare operator, and forward-mode differentiation, refuse as the face does."""
    q, k, v = inputs(device).values()
    with pytest.raises(NotImplementedError, match="backward"):
        torch.ops.flash_cute.forward(q.clone().requires_grad_(), k, v)
    with pytest.raises(NotImplementedError, match="backward"):
        torch.func.jvp(lambda x: flash_cute.forward(x, k, v)[0], (q,), (torch.ones_like(q),))
    with torch.no_grad():
        out, _ = flash_cute.forward(q.clone().requires_grad_(), k, v)
    assert not out.requires_grad
