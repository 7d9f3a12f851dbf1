"""Wrong calls: one clear sentence each, raised before anything runs, and the next call is as good as ever."""

from __future__ import annotations

import math

import pytest
import torch
from cases import SHAPES, make_inputs

import flash_cute


def inputs(device) -> dict[str, torch.Tensor]:
    """q (2, 6, 150, 64), k and v (2, 2, 190, 64)."""
    return dict(zip("qkv", make_inputs(SHAPES["grouped_heads"], torch.bfloat16, device), strict=True))


def resized(tensors: dict[str, torch.Tensor], names: str, **changes: int) -> dict[str, torch.Tensor]:
    """The tensors so named, random and of the same kind, with some of their sizes changed."""
    dims = "batch", "heads", "seqlen", "head_dim"
    sizes = {name: dict(zip(dims, tensors[name].shape, strict=True)) | changes for name in names}
    return {
        name: torch.randn(*size.values(), device=tensors[name].device).to(tensors[name].dtype)
        for name, size in sizes.items()
    }


def nested(tensor: torch.Tensor, layout: torch.layout = torch.strided) -> torch.Tensor:
    """(batch, heads, ragged, head_dim), as a batch of sequences of unequal lengths."""
    sequences = [part.transpose(0, 1) for part in tensor]
    return torch.nested.nested_tensor(sequences, layout=layout).transpose(1, 2)


# What is wrong -> what changes, given q, k and v, and words that the sentence must contain.
WRONG_TYPES = {
    "q is a list": (lambda t: {"q": [[1.0]]}, "q list"),
    "k is None": (lambda t: {"k": None}, "k None"),
    "v is a number": (lambda t: {"v": 3.0}, "v float"),
    "window of three": (lambda t: {"window": (1, 2, 3)}, "window (1, 2, 3)"),
    "window of a float": (lambda t: {"window": (1.5, None)}, "window 1.5"),
    "window of text": (lambda t: {"window": "wide"}, "window wide"),
    "window of a boolean tensor": (lambda t: {"window": torch.tensor(True)}, "window tensor(True)"),
    "window of a bool": (lambda t: {"window": True}, "window True"),
    "scale is text": (lambda t: {"softmax_scale": "half"}, "softmax_scale half"),
    "scale is a bool": (lambda t: {"softmax_scale": True}, "softmax_scale True"),
    "scale is a tensor": (lambda t: {"softmax_scale": torch.tensor(0.5)}, "softmax_scale 0.5"),
    "causal is text": (lambda t: {"causal": "yes"}, "causal yes True False"),
    "causal is a number": (lambda t: {"causal": 0.1}, "causal 0.1 True False"),
    "causal is None": (lambda t: {"causal": None}, "causal None True False"),
    "causal is a tensor": (lambda t: {"causal": torch.tensor(True)}, "causal tensor(True) True False"),
    "family is a number": (lambda t: {"family": 90}, "family"),
    "SDPA's is_causal": (lambda t: {"is_causal": True}, "is_causal did you mean causal?"),
    "SDPA's scale": (lambda t: {"scale": 1.0}, "scale did you mean softmax_scale?"),
    "flash_attn's window_size": (lambda t: {"window_size": (1, 1)}, "window_size did you mean window?"),
    "dropout_p": (lambda t: {"dropout_p": 0.0}, "dropout_p did you mean"),
    "a misspelt argument": (lambda t: {"softmax_scal": 1.0}, "softmax_scal did you mean softmax_scale?"),
    "an unknown argument": (lambda t: {"bias": 1.0}, "bias softmax_scale window"),
}
WRONG_VALUES = {
    "q of three dimensions": (lambda t: {"q": t["q"][0]}, "q 3 dimensions 4"),
    "k of five dimensions": (lambda t: {"k": t["k"][None]}, "k 5 dimensions 4"),
    "v of no dimensions": (lambda t: {"v": t["v"].sum()}, "v 0 dimensions 4"),
    "all float32": (lambda t: {n: x.float() for n, x in t.items()}, "q torch.float32 float16 bfloat16"),
    "all float64": (
        lambda t: {n: x.double() for n, x in t.items()},
        "q torch.float64 float16 bfloat16",
    ),
    "all int32": (lambda t: {n: x.int() for n, x in t.items()}, "q torch.int32 float16 bfloat16"),
    "q is quantized": (
        lambda t: {
            "q": torch.quantize_per_tensor(t["q"].float().cpu(), 0.1, 0, torch.qint8).to(t["q"].device)
        },
        "q",
    ),
    "all float8": (
        lambda t: {n: x.to(torch.float8_e4m3fn) for n, x in t.items()},
        "q dtype torch.float8_e4m3fn",
    ),
    "k of another dtype": (lambda t: {"k": t["k"].half()}, "k dtype torch.float16 q torch.bfloat16"),
    "v of another dtype": (lambda t: {"v": t["v"].float()}, "v dtype torch.float32 q torch.bfloat16"),
    "k is nested": (lambda t: {"k": nested(t["k"])}, "k nested"),
    "all jagged": (lambda t: {n: nested(x, torch.jagged) for n, x in t.items()}, "q nested"),
    "v is sparse": (lambda t: {"v": t["v"].to_sparse()}, "v torch.sparse_coo"),
    "heads that do not divide": (lambda t: resized(t, "q", heads=5), "q 5 k 2 heads"),
    "fewer query heads": (lambda t: resized(t, "q", heads=1), "q 1 k 2 heads"),
    "no K/V heads": (lambda t: resized(t, "kv", heads=0), "q 6 k 0 heads"),
    "k of another batch": (lambda t: resized(t, "kv", batch=3), "k batch 3 2"),
    "k of another head_dim": (lambda t: resized(t, "kv", head_dim=32), "k head_dim 32 64"),
    "v of another batch": (lambda t: resized(t, "v", batch=1), "v k"),
    "v of other heads": (lambda t: resized(t, "v", heads=6), "v k"),
    "v of another seqlen": (lambda t: resized(t, "v", seqlen=191), "v k 191 190"),
    "v of another head_dim": (lambda t: resized(t, "v", head_dim=32), "v k 32 64"),
    "head_dim over 256": (lambda t: resized(t, "qkv", head_dim=264), "head_dim 264 256"),
    "head_dim of 0": (lambda t: resized(t, "qkv", head_dim=0), "head_dim 0 256"),
    "left is negative": (lambda t: {"window": (-3, 5)}, "window left -3 >= 0"),
    "right is negative": (lambda t: {"window": (3, -1)}, "window right -1 >= 0"),
    "window is negative": (lambda t: {"window": -7}, "window -7 >= 0"),
    "left is enormous": (lambda t: {"window": (2**70, 0)}, f"window left {2**70}"),
    "right is enormous": (lambda t: {"window": (0, 2**63)}, f"window right {2**63}"),
    "right is negative, causal": (lambda t: {"window": (3, -1), "causal": True}, "window right -1 >= 0"),
    "scale is NaN": (lambda t: {"softmax_scale": math.nan}, "softmax_scale nan finite"),
    "scale is infinite": (lambda t: {"softmax_scale": math.inf}, "softmax_scale inf finite"),
    "scale is zero": (lambda t: {"softmax_scale": 0.0}, "softmax_scale 0 > 0"),
    "scale is negative": (lambda t: {"softmax_scale": -1.0}, "softmax_scale -1 > 0"),
    "scale overflows float32": (lambda t: {"softmax_scale": 1e300}, "softmax_scale 1e+300"),
    "no such family": (lambda t: {"family": "sm70"}, "family sm70 sm80"),
}
DIFFERENTIATED = {
    "q needs a gradient": (lambda t: {"q": t["q"].requires_grad_()}, "backward"),
    "v needs a gradient": (lambda t: {"v": t["v"].requires_grad_()}, "backward"),
}


def cases(tables: dict[type[Exception], dict]) -> pytest.MarkDecorator:
    rows = [
        pytest.param(error, change, words, id=name)
        for error, table in tables.items()
        for name, (change, words) in table.items()
    ]
    return pytest.mark.parametrize(("error", "change", "words"), rows)


WRONG = {TypeError: WRONG_TYPES, ValueError: WRONG_VALUES}


def assert_one_sentence(message: str, words: str, function: str = "forward") -> None:
    assert message.startswith(f"flash_cute.{function}: "), message
    assert "\n" not in message, message
    assert len(message) < 250, message
    for leftover in (".cpp", ".hpp", "Exception raised", "c10", "RuntimeError", "aten::"):
        assert leftover not in message, message
    for word in words.split():
        assert word in message, f"{word!r} is not in: {message}"


def call(function, arguments: dict):
    arguments = dict(arguments)
    return function(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


@pytest.mark.parametrize("function", [flash_cute.forward, flash_cute.attention], ids=["forward", "attention"])
@cases(WRONG | {NotImplementedError: DIFFERENTIATED})
def test_wrong_calls(device, function, error, change, words):
    good = inputs(device)
    expected = call(flash_cute.forward, good)
    bad = {name: tensor.clone() for name, tensor in good.items()}
    with pytest.raises(error) as caught:
        call(function, bad | change(bad))
    assert type(caught.value) is error
    assert_one_sentence(str(caught.value), words, function.__name__)
    if device.type == "cuda":
        torch.cuda.synchronize()
    for result, unchanged in zip(call(flash_cute.forward, good), expected, strict=True):
        assert torch.equal(result, unchanged)


@cases(WRONG)
def test_explain_refuses_the_same(device, error, change, words):
    good = inputs(device)
    with pytest.raises(error) as caught:
        call(flash_cute.explain, good | change(good))
    assert type(caught.value) is error
    assert_one_sentence(str(caught.value), words, "explain")


@pytest.mark.parametrize("name", "qkv")
def test_one_of_them_on_meta(device, name):
    """Whose kernel would give results that nothing has written."""
    tensors = inputs(device)
    tensors[name] = tensors[name].to("meta")
    with pytest.raises(ValueError, match="meta"):
        call(flash_cute.forward, tensors)
    with pytest.raises(NotImplementedError, match=f"{name} is on device meta"):
        call(flash_cute.explain, tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("name", "qkv")
def test_devices_mixed(kernel, name):
    tensors = inputs(kernel.device)
    tensors[name] = tensors[name].cpu()
    with pytest.raises(ValueError, match="device") as caught:
        call(flash_cute.forward, tensors)
    assert_one_sentence(str(caught.value), f"{name} device")
    torch.cuda.synchronize()
    call(flash_cute.forward, inputs(kernel.device))


def test_family_on_the_cpu():
    with pytest.raises(ValueError, match="family") as caught:
        call(flash_cute.forward, inputs("cpu") | {"family": "sm80"})
    assert_one_sentence(str(caught.value), "family sm80 CPU")


@pytest.mark.gpu
def test_family_of_another_gpu(device):
    if torch.cuda.get_device_capability(device) == (9, 0):
        pytest.skip("every family runs on this GPU")
    with pytest.raises(ValueError, match="sm90"):
        call(flash_cute.forward, inputs(device) | {"family": "sm90"})


def test_explain_of_a_meta_tensor():
    meta = {name: tensor.to("meta") for name, tensor in inputs("cpu").items()}
    with pytest.raises(NotImplementedError, match="meta") as caught:
        call(flash_cute.explain, meta)
    assert_one_sentence(str(caught.value), "q device meta cuda cpu", "explain")


def test_no_silent_wrong_gradient(device):
    """The bare operator, forward-mode differentiation and torch.func's transforms refuse as the face does."""
    q, k, v = inputs(device).values()
    with pytest.raises(NotImplementedError, match="backward"):
        torch.ops.flash_cute.forward(q.clone().requires_grad_(), k, v)
    with pytest.raises(NotImplementedError, match="backward"):
        torch.func.jvp(lambda x: flash_cute.forward(x, k, v)[0], (q,), (torch.ones_like(q),))
    with pytest.raises(NotImplementedError, match="backward"):
        torch.func.grad(lambda x: flash_cute.forward(x, k, v)[0].sum())(q)
    stacked = torch.stack([q, q]).requires_grad_()
    with pytest.raises(NotImplementedError, match="backward"):
        torch.vmap(lambda x: flash_cute.forward(x, k, v)[0] * x)(stacked).sum().backward()
    with torch.no_grad():
        out, _ = flash_cute.forward(q.clone().requires_grad_(), k, v)
    assert not out.requires_grad
