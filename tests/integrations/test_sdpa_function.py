"""scaled_dot_product_attention of flash_cute.integrations.sdpa, and in the place of PyTorch's."""

from __future__ import annotations

import re
import warnings
from inspect import signature

import pytest
import torch
from support.cases import MASKS, Mask, Shape, make_gradients, make_inputs
from support.changed import Changed, next_seed
from support.tolerance import assert_gradients, assert_within_rule
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.checkpoint import checkpoint

import flash_cute
from flash_cute import reference
from flash_cute.integrations import _sdpa_function, sdpa

pytorchs = functional.scaled_dot_product_attention
DTYPE = torch.bfloat16
FULL = MASKS["full"]
SHAPE = Shape(2, 4, 2, 37, 71, 64)
QUERY, KEY = SHAPE.q[2], SHAPE.kv[2]
# Of an attn_mask, all of which broadcast to (batch, heads, seqlen_q, seqlen_k).
MASK_SHAPES = [
    (2, 4, QUERY, KEY),
    (2, 1, 1, KEY),
    (1, 4, QUERY, KEY),
    (2, 4, QUERY, 1),
    (4, QUERY, KEY),
    (QUERY, KEY),
    (1, KEY),
    (QUERY, 1),
]


@pytest.fixture(autouse=True)
def restored():
    torch._dynamo.reset()
    _sdpa_function._said.clear()
    yield
    sdpa.restore()


@pytest.fixture(autouse=True)
def left_to_pytorch_is_an_error():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="flash_cute.sdpa: PyTorch's own")
        yield


def leaves(tensors) -> list[torch.Tensor]:
    return [x.detach().requires_grad_() for x in tensors]


def check(inputs, mask: Mask, scale: float | None = None, call=sdpa.scaled_dot_product_attention, **options):
    """A call and its gradients, against float64."""
    inputs = leaves(inputs)
    if inputs[0].shape[1] != inputs[1].shape[1]:
        options["enable_gqa"] = True
    out = call(*inputs, scale=scale, **options)
    q, k, v = (x.detach() for x in inputs)
    given = {"softmax_scale": scale, **mask.options}
    oracle, yardstick = (reference.forward(q, k, v, dtype=t, **given)[0] for t in (torch.float64, q.dtype))
    assert_within_rule("out", out.detach(), yardstick, oracle)
    dout, _ = make_gradients(out.detach())
    gradients = torch.autograd.grad(out, inputs, dout)
    laid_out = [torch.empty_like(x).copy_(dx) for x, dx in zip((q, k, v), gradients, strict=True)]
    assert_gradients(laid_out, q, k, v, dout, None, mask, scale)


def test_signature_is_that_of_pytorch():
    ours = signature(sdpa.scaled_dot_product_attention)
    names = re.search(r"\((.*?)\) -> Tensor", pytorchs.__doc__, re.DOTALL).group(1)
    assert list(ours.parameters) == [part.split("=")[0].strip() for part in names.split(",")]
    assert ours.parameters["scale"].kind is ours.parameters["enable_gqa"].kind
    with pytest.raises(TypeError):
        pytorchs(*make_inputs(SHAPE, DTYPE, "cpu"), None, 0.0, False, 0.3)
    with pytest.raises(TypeError):
        sdpa.scaled_dot_product_attention(*make_inputs(SHAPE, DTYPE, "cpu"), None, 0.0, False, 0.3)


# Masks


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_masks_of_booleans(device, shape):
    mask = torch.rand(shape, device=device) < 0.7
    mask[..., :1, :] &= torch.rand(mask[..., :1, :].shape, device=device) < 0.5
    seen = mask.expand(*SHAPE.q[:3], KEY)
    check(make_inputs(SHAPE, DTYPE, device), Changed(changes={"mask": seen}), attn_mask=mask)


@pytest.mark.parametrize("dtype", [DTYPE, torch.float32])
@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_masks_that_are_added(device, shape, dtype):
    bias = torch.randn(shape, device=device).to(DTYPE)
    bias[torch.rand(shape, device=device) < 0.2] = -torch.inf
    bias[torch.rand(shape, device=device) < 0.1] = torch.finfo(DTYPE).min
    bias[..., 0, :] = torch.finfo(DTYPE).min
    added = bias.expand(*SHAPE.q[:3], KEY)
    check(make_inputs(SHAPE, DTYPE, device), Changed(changes={"bias": added}), 0.2, attn_mask=bias.to(dtype))


@pytest.mark.parametrize("dtype", [DTYPE, torch.float32])
@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_masks_that_train(device, shape, dtype):
    inputs = make_inputs(SHAPE, DTYPE, device)
    mask = torch.randn(shape, device=device).to(DTYPE)
    leaf = mask.to(dtype).requires_grad_()
    out = sdpa.scaled_dot_product_attention(*inputs, leaf, enable_gqa=True)
    dout, _ = make_gradients(out.detach())
    (found,) = torch.autograd.grad(out, leaf, dout)
    assert found.dtype == dtype
    bias = mask[(None,) * (4 - mask.dim())]
    yardstick, oracle = (
        reference.bias_gradient(*inputs, dout, None, dtype=t, bias=bias).view(shape)
        for t in (DTYPE, torch.float64)
    )
    assert_within_rule("the mask's gradient", found, yardstick, oracle)


def test_masks_in_float32(device):
    shape = Shape(2, 4, 4, 30, 40, 64)
    bias = torch.randn(2, 1, 30, 40, device=device)
    with torch.no_grad():
        inputs = make_inputs(shape, torch.float32, device)
        out = sdpa.scaled_dot_product_attention(*inputs, bias)
    oracle = reference.forward(*inputs, bias=bias)[0]
    yardstick = reference.forward(*inputs, bias=bias, dtype=torch.float32)[0]
    assert_within_rule("out", out, yardstick, oracle)


@pytest.mark.parametrize("shape", [(2, 4, 2, 37, 71, 64), (2, 4, 4, 71, 37, 64), (3, 4, 4, 50, 50, 64)])
def test_is_causal_begins_at_the_first_key(device, shape):
    shape = Shape(*shape)
    first = torch.ones(shape.q[2], shape.kv[2], dtype=torch.bool, device=device).tril()
    inputs = make_inputs(shape, DTYPE, device)
    check(inputs, Changed(changes={"mask": first}), is_causal=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of more queries than keys, by PyTorch
        upper, lower = (make(shape.q[2], shape.kv[2]) for make in (causal_upper_left, causal_lower_right))
    check(inputs, Changed(changes={"mask": first}), attn_mask=upper)
    check(inputs, MASKS["causal"], attn_mask=lower)


def test_a_mask_and_is_causal(device):
    inputs = make_inputs(SHAPE, DTYPE, device)
    mask = torch.ones(QUERY, KEY, dtype=torch.bool, device=device)
    sentence = "flash_cute.sdpa: attn_mask must be None where is_causal is True, got a tensor"
    with pytest.raises(RuntimeError, match=f"^{re.escape(sentence)}$"):
        sdpa.scaled_dot_product_attention(*inputs, mask, is_causal=True, enable_gqa=True)


# Ranks


RANKS = {
    "one head": ((), ()),
    "heads": ((4,), ()),
    "two batches": ((2, 3, 4), ()),
    "an empty batch": ((0, 3, 4), ()),
    "mask of one head": ((), (30, 40)),
    "mask of heads": ((4,), (4, 30, 40)),
    "mask of all heads": ((4,), (1, 30, 40)),
    "mask of two batches": ((2, 3, 4), (2, 3, 1, 30, 40)),
    "mask of one of two batches": ((2, 3, 4), (2, 1, 4, 1, 40)),
    "mask of the inner batch": ((2, 3, 4), (3, 1, 30, 40)),
    "mask without batches": ((2, 3, 4), (4, 30, 40)),
}


@pytest.mark.parametrize("name", RANKS)
def test_ranks(device, name):
    lead, shape = RANKS[name]
    sizes = (*lead, 30, 64), (*lead, 40, 64), (*lead, 40, 32)
    inputs = leaves(torch.randn(size, device=device) for size in sizes)
    options = {}
    if shape:
        options["attn_mask"] = torch.rand(shape, device=device) < 0.8
    out = sdpa.scaled_dot_product_attention(*inputs, **options)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = pytorchs(*exact, **options)
    assert out.shape == expected.shape
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, dout)
    oracle = torch.autograd.grad(expected, exact, dout.double())
    yardstick = [torch.zeros_like(x) for x in (expected, *oracle)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yardstick[0] = pytorchs(*inputs, **options)
    yardstick[1:] = torch.autograd.grad(yardstick[0], inputs, dout)
    for result, allowed, right in zip((out.detach(), *found), yardstick, (expected, *oracle), strict=True):
        assert_within_rule("out or a gradient", result, allowed.detach(), right.detach())


# Dropout


@pytest.mark.parametrize("mask", ["none", "is_causal", "booleans"])
def test_dropout(device, mask):
    inputs = make_inputs(SHAPE, DTYPE, device)
    changes, options = {}, {"dropout_p": 0.3}
    if mask == "is_causal":
        options["is_causal"] = True
        changes["mask"] = torch.ones(QUERY, KEY, dtype=torch.bool, device=device).tril()
    elif mask == "booleans":
        options["attn_mask"] = changes["mask"] = torch.rand(QUERY, KEY, device=device) < 0.7
    changes |= {"dropout_p": 0.3, "dropout_seed": next_seed(inputs[0])}
    check(inputs, Changed(changes=changes), **options)


def test_dropout_in_a_checkpoint(device):
    inputs = leaves(make_inputs(SHAPE, DTYPE, device))
    options = {"dropout_p": 0.5, "enable_gqa": True}
    results = []
    for again in (False, True):
        torch.manual_seed(3)
        call = sdpa.scaled_dot_product_attention
        out = checkpoint(call, *inputs, use_reentrant=False, **options) if again else call(*inputs, **options)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), inputs)))
    assert torch.equal(results[0][0], results[1][0])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)  # which a GPU adds up in any order


# What is left to PyTorch


def reasons(device) -> dict:
    q, k, v = make_inputs(Shape(2, 4, 4, 9, 9, 16), torch.float32, device)
    nested = torch.nested.nested_tensor([x[0].transpose(0, 1) for x in (q, q)], layout=torch.jagged)
    nested = nested.transpose(1, 2)
    wide = torch.randn(2, 4, 9, 264, device=device)
    return {
        "a tensor is nested or not dense": ((nested,) * 3, {}),
        "dtypes are torch.float64": ((q.double(), k.double(), v.double()), {}),
        "a head_dim is not in 1 to 256": ((wide, wide, wide), {}),
        "the shapes of query, key and value broadcast or do not fit": ((q, k[:1], v[:1]), {}),
        "scale is not a finite number > 0": ((q, k, v), {"scale": -0.5}),
    }


@pytest.mark.parametrize("reason", reasons("cpu"))
def test_what_is_left_to_pytorch(device, reason):
    args, options = reasons(device)[reason]
    assert sdpa.left_to_pytorch(*args, **options) == reason
    sentence = f"flash_cute.sdpa: PyTorch's own scaled_dot_product_attention computes this call, as {reason}"
    with pytest.warns(UserWarning, match=f"^{re.escape(sentence)}$"):
        out = sdpa.scaled_dot_product_attention(*args, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sdpa.scaled_dot_product_attention(*args, **options)  # a second time it is not said
    if not args[0].is_nested:
        torch.testing.assert_close(out, pytorchs(*args, **options))


def test_a_lower_causal_bias_that_is_left_to_pytorch(device):
    q, k, v = (torch.randn(1, 2, n, 16, device=device, dtype=torch.float64) for n in (5, 9, 9))
    bias = causal_lower_right(5, 9)
    for active in (False, True):
        if active:
            sdpa.activate()
        else:
            _sdpa_function._said.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = sdpa.scaled_dot_product_attention(q, k, v, bias)
        oracle = reference.forward(q, k, v, causal=True)[0]
        torch.testing.assert_close(out, oracle)


NONSENSE = {
    "dtype": lambda q, k, v: {"attn_mask": torch.ones(9, 9, dtype=torch.uint8, device=q.device)},
    "shape": lambda q, k, v: {"attn_mask": torch.ones(9, 8, dtype=torch.bool, device=q.device)},
    "one dimension": lambda q, k, v: {"attn_mask": torch.ones(9, dtype=torch.bool, device=q.device)},
    "dropout_p": lambda q, k, v: {"dropout_p": 1.5},
    "key": lambda q, k, v: {"key": k.double()},
    "heads": lambda q, k, v: {"key": k[:, :3], "value": v[:, :3], "enable_gqa": True},
}


def outcome(call, given: dict) -> torch.Tensor | str:
    """What it returns, or the error that it raises."""
    torch.manual_seed(0)
    try:
        return call(**given)
    except (RuntimeError, IndexError) as error:
        return str(error)


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_said_by_pytorch(device, name):
    """Or computed, as some of its kernels for GPUs take masks of one dimension, and any dropout_p."""
    q, k, v = make_inputs(Shape(2, 4, 4, 9, 9, 16), torch.float32, device)
    given = {"query": q, "key": k, "value": v} | NONSENSE[name](q, k, v)
    assert sdpa.left_to_pytorch(**given) is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, found = (outcome(call, given) for call in (pytorchs, sdpa.scaled_dot_product_attention))
    if isinstance(expected, str):
        assert found == expected
    else:
        assert device.type == "cuda"
        torch.testing.assert_close(found, expected, equal_nan=True)


# In the place of PyTorch's


class Attention(torch.nn.Module):
    """As diffusers' AttnProcessor2_0 has it, with grouped heads: a mask of the text that is attended to."""

    def __init__(self, width: int, heads: int, heads_kv: int, head_dim: int):
        super().__init__()
        self.heads, self.heads_kv = heads, heads_kv
        self.to_q = torch.nn.Linear(width, heads * head_dim, bias=False)
        self.to_k, self.to_v = (torch.nn.Linear(width, heads_kv * head_dim, bias=False) for _ in "kv")
        self.to_out = torch.nn.Linear(heads * head_dim, width)

    def forward(self, hidden, text=None, attention_mask=None):
        text = hidden if text is None else text
        q = self.to_q(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (to(text).unflatten(-1, (self.heads_kv, -1)).transpose(1, 2) for to in (self.to_k, self.to_v))
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=attention_mask, dropout_p=0.0, is_causal=False, enable_gqa=True
        )
        return self.to_out(out.transpose(1, 2).flatten(2))


class Denoiser(torch.nn.Module):
    """Blocks of attention to the image, to a text with padding, and of a layer for each pixel."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(3))
        self.own = Attention(width, 4, 2, 32)
        self.crossed = Attention(width, 4, 1, 32)
        self.last = torch.nn.Sequential(torch.nn.Linear(width, 2 * width), torch.nn.GELU())
        self.out = torch.nn.Linear(2 * width, width)

    def forward(self, image, text, text_mask):
        hidden = image + self.own(self.norms[0](image))
        mask = text_mask[:, None, None, :]
        hidden = hidden + self.crossed(self.norms[1](hidden), text, mask)
        return hidden + self.out(self.last(self.norms[2](hidden)))


@pytest.mark.parametrize("kind", ["booleans", "added"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_as_diffusers_has_it(device, kind, compiled, monkeypatch):
    """Its loss's gradients in float32, where PyTorch's own function is in its place and where ours is."""
    torch.manual_seed(0)
    model = Denoiser().to(device)
    image, text = torch.randn(2, 50, 64, device=device), torch.randn(2, 20, 64, device=device)
    mask = torch.arange(20, device=device) < torch.tensor([[20], [7]], device=device)
    calls = []
    real = flash_cute.attention

    def counted(*args, **options):
        calls.append(options)
        return real(*args, **options)

    if not compiled:
        monkeypatch.setattr(flash_cute, "attention", counted)

    def step(call, module):
        given = mask
        if kind == "added":  # as models make it of booleans
            given = (1 - mask.float()) * torch.finfo(torch.float32).min
        loss = call(image.to(module), text.to(module), given.to(module) if kind == "added" else given)
        loss = loss.square().mean()
        return loss, *torch.autograd.grad(loss, list(model.parameters()))

    expected = step(model, torch.float32)
    oracle = step(model.double(), torch.float64)
    model.float()
    assert not calls
    with sdpa.activated():
        assert functional.scaled_dot_product_attention is sdpa.scaled_dot_product_attention
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        found = step(call, torch.float32)
    assert functional.scaled_dot_product_attention is pytorchs
    assert len(calls) == (0 if compiled else 2)
    for ours, yardstick, right in zip(found, expected, oracle, strict=True):
        assert_within_rule("a gradient", ours.detach(), yardstick.detach(), right.detach())


def test_activate_and_restore():
    for _ in range(2):
        sdpa.activate()
        assert functional.scaled_dot_product_attention is sdpa.scaled_dot_product_attention
        with sdpa.activated():
            pass
        assert functional.scaled_dot_product_attention is sdpa.scaled_dot_product_attention
    sdpa.restore()
    assert functional.scaled_dot_product_attention is pytorchs


@pytest.mark.parametrize("mask", ["none", "is_causal", "padding", "both"])
def test_multihead_attention(device, mask):
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(64, 4, batch_first=True, device=device)
    exact = torch.nn.MultiheadAttention(64, 4, batch_first=True, device=device, dtype=torch.float64)
    exact.load_state_dict(module.state_dict())
    x = torch.randn(2, 40, 64, device=device)
    options = {"need_weights": False}
    if mask in ("is_causal", "both"):
        options |= {"attn_mask": torch.ones(40, 40, dtype=torch.bool, device=device).triu(1)}
        options["is_causal"] = mask == "is_causal"
    if mask in ("padding", "both"):
        options["key_padding_mask"] = torch.arange(40, device=device).expand(2, 40) > 30
    yardstick = module(x, x, x, **options)[0]
    oracle = exact(*(x.double() for _ in range(3)), **options)[0]
    with sdpa.activated():
        out = module(x, x, x, **options)[0]
    assert_within_rule("out", out.detach(), yardstick.detach(), oracle.detach())


# Compilers and transforms


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", ["is_causal", "booleans", "added", "left to PyTorch"])
def test_compiled(device, kind, dynamic):
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    options = {"enable_gqa": True}
    if kind == "is_causal":
        options["is_causal"] = True
    elif kind != "left to PyTorch":
        mask = torch.rand(2, 1, QUERY, KEY, device=device) < 0.7
        options["attn_mask"] = mask if kind == "booleans" else torch.zeros_like(mask, dtype=DTYPE)

    @torch.compile(fullgraph=True, dynamic=dynamic, backend=backend)
    def compiled(q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, **options)

    # float64, as PyTorch's FlashAttention gives NaN for a scale < 0: it hides keys before it scales.
    dtype = torch.float64 if kind == "left to PyTorch" else DTYPE
    inputs = leaves(make_inputs(SHAPE, dtype, device))
    assert (sdpa.left_to_pytorch(*inputs, **options) is None) == (dtype == DTYPE)
    with sdpa.activated(), warnings.catch_warnings():
        out = compiled(*inputs)
        warnings.simplefilter("ignore")
        expected = functional.scaled_dot_product_attention(*inputs, **options)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-2)
    dout = torch.randn_like(out)
    for one, other in zip(
        torch.autograd.grad(out, inputs, dout), torch.autograd.grad(expected, inputs, dout), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=5e-2)


def test_autocast(device):
    inputs = leaves(make_inputs(SHAPE, torch.float32, device))
    bias = torch.randn(QUERY, KEY, device=device).to(DTYPE).float()
    with torch.autocast(device.type, DTYPE):
        out = sdpa.scaled_dot_product_attention(*inputs, bias, enable_gqa=True)
    assert out.dtype == DTYPE
    rounded = [x.detach().to(DTYPE) for x in inputs]
    again = sdpa.scaled_dot_product_attention(*rounded, bias, enable_gqa=True)
    assert torch.equal(out, again)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["booleans", "added"])
def test_vmap(device, kind, compiled):
    inputs = [torch.stack([x, x.flip(0)]) for x in make_inputs(SHAPE, DTYPE, device)]
    masks = torch.rand(2, 2, 1, QUERY, KEY, device=device)
    masks = masks < 0.7 if kind == "booleans" else masks.to(DTYPE)

    def call(q, k, v, mask):
        return sdpa.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    mapped = torch.vmap(call)
    if compiled:
        mapped = torch.compile(mapped, backend="aot_eager", fullgraph=True)
    mapped = mapped(*inputs, masks)
    for entry in range(2):
        alone = call(*(x[entry] for x in inputs), masks[entry])
        torch.testing.assert_close(mapped[entry], alone, rtol=0, atol=1e-2)
