"""out=: the result is written into a tensor that the caller has."""

from __future__ import annotations

import pytest
import torch
from support.cases import MASKS, matrix

import flash_cute

# Of a tensor like q: (batch, heads, seqlen, head_dim) or packed (total, heads, head_dim).
LAYOUTS = {
    "like q": torch.empty_like,
    "rows first": lambda q: torch.empty_like(
        q.transpose(-3, -2), memory_format=torch.contiguous_format
    ).transpose(-3, -2),
    "columns first": lambda q: torch.empty_like(q.mT, memory_format=torch.contiguous_format).mT,
    "a part of rows": lambda q: q.new_empty(*q.shape[:-1], q.shape[-1] + 5)[..., 3:-2],
}
CALLS = ["dense", "lengths", "packed", "pages"]


def make_call(kind, device, head_dim=64, dtype=torch.bfloat16, requires_grad=False) -> dict:
    def random(*shape):
        return torch.randn(*shape, device=device).to(dtype).requires_grad_(requires_grad)

    def whole(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    if kind == "packed":
        q, k, v = (random(100, heads, head_dim) for heads in (4, 2, 2))
        return {"q": q, "k": k, "v": v, "cu_seqlens_q": whole(0, 30, 30, 97)}  # rows of no sequence
    q, k, v = random(2, 4, 40, head_dim), *(random(2, 2, 70, head_dim) for _ in range(2))
    if kind == "dense":
        return {"q": q, "k": k, "v": v}
    if kind == "lengths":
        return {"q": q, "k": k, "v": v, "seqused_q": whole(40, 7), "seqused_k": whole(3, 70)}
    k, v = (random(12, 2, 16, head_dim) for _ in range(2))
    table = torch.randperm(12)[:10].view(2, 5).int().to(device)
    return {"q": q, "k": k, "v": v, "seqused_k": whole(77, 12), "block_table": table}


@matrix(kind=CALLS, layout=LAYOUTS, mask=["full", "causal"], head_dim=[64, 72])
def test_the_same_bits(kernel, kind, layout, mask, head_dim):
    arguments = make_call(kind, kernel.device, head_dim) | MASKS[mask].options
    expected, lse = kernel.forward(**arguments)
    out = layout(arguments["q"]).fill_(torch.nan)
    result = kernel.forward(**arguments, out=out)
    assert result[0] is out
    assert torch.equal(out, expected)
    assert torch.equal(result[1], lse)


def test_every_function(device):
    for kind in ("dense", "packed"):
        arguments = make_call(kind, device)
        names = ("forward", "attention") if kind == "dense" else ("forward_varlen", "attention_varlen")
        expected = getattr(flash_cute, names[1])(**arguments)
        for name in names:
            out = torch.empty_like(arguments["q"])
            result = getattr(flash_cute, name)(**arguments, out=out)
            assert (result[0] if name.startswith("forward") else result) is out
            assert torch.equal(out, expected)


@pytest.mark.parametrize("shape", [(0, 2, 5, 64), (2, 2, 0, 64), (2, 0, 5, 64)], ids=str)
def test_empty(device, shape):
    q = torch.randn(shape, device=device).bfloat16()
    out = torch.empty_like(q)
    assert flash_cute.forward(q, q, q, out=out)[0] is out


def test_nothing_to_attend_to(device):
    q, k = (torch.randn(1, 2, n, 64, device=device).bfloat16() for n in (5, 0))
    out = torch.full_like(q, torch.nan)
    _, lse = flash_cute.forward(q, k, k, out=out)
    assert (out == 0).all()
    assert lse.isneginf().all()


WRONG = {
    "another shape": (
        lambda q: q[:, :2].clone(),
        "out has shape (2, 2, 40, 64); (2, 4, 40, 64), as q has shape (2, 4, 40, 64) and v (2, 2, 70, 64)",
    ),
    "packed": (lambda q: q.flatten(0, 1), "out has shape (8, 40, 64); (2, 4, 40, 64), as q has"),
    "another dtype": (torch.Tensor.half, "out has dtype torch.float16; torch.bfloat16 is accepted"),
    "another device": (lambda q: q.to("meta"), "out is on device meta and q on"),
    "expanded": (
        lambda q: q[:1].expand(2, -1, -1, -1),
        "out is written, so its elements must not overlap, got shape (2, 4, 40, 64) with strides (0,",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tensors(device, name):
    arguments, (change, words) = make_call("dense", device), WRONG[name]
    out = change(arguments["q"])
    with pytest.raises(ValueError, match=r"^flash_cute\.forward: out ") as error:
        flash_cute.forward(**arguments, out=out)
    assert words in str(error.value), str(error.value)
    assert flash_cute.forward(**arguments, out=torch.empty_like(arguments["q"]))[0].isfinite().all()


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("width", [40, 128])
def test_v_of_a_width_of_its_own(kernel, kind, width):
    arguments = make_call(kind, kernel.device, 64)
    arguments["v"] = torch.randn(*arguments["v"].shape[:-1], width, device=kernel.device).bfloat16()
    expected, lse = kernel.forward(**arguments)
    out = torch.full_like(expected, torch.nan)
    result = kernel.forward(**arguments, out=out)
    assert result[0] is out
    assert torch.equal(out, expected)
    assert torch.equal(result[1], lse)
    sizes = tuple(expected.shape)
    with pytest.raises(ValueError, match=r"^flash_cute\.forward\w*: out has shape") as error:
        kernel.forward(**arguments, out=torch.empty_like(arguments["q"]))
    assert f"; {sizes}, as q has shape {tuple(arguments['q'].shape)} and v" in str(error.value)


def test_memory_of_others(device):
    arguments = make_call("dense", device) | {"k": torch.randn(2, 2, 70, 64, device=device).bfloat16()}
    q = arguments["q"]
    with pytest.raises(ValueError, match=r"out is written, so it must not share memory with q$"):
        flash_cute.forward(**arguments, out=q)
    with pytest.raises(ValueError, match=r"^flash_cute\.forward: out is a view that negates"):
        flash_cute.forward(**arguments, out=torch._neg_view(torch.empty_like(q)))
    version = (out := torch.empty_like(q).half())._version
    with pytest.raises(ValueError, match="out has dtype"):
        flash_cute.forward(**arguments, out=out)
    assert out._version == version
    empty = q[:, :, :0]
    flash_cute.forward(empty, arguments["k"], arguments["v"], out=empty[:1].expand(2, -1, -1, -1))


def test_freed_storage(device):
    arguments = make_call("dense", device)
    out = torch.empty_like(arguments["q"])
    out.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"^flash_cute\.forward: out must have a storage of at least"):
        flash_cute.forward(**arguments, out=out)


@pytest.mark.parametrize("traced", [False, True])
def test_gradients_are_refused(device, traced):
    arguments = make_call("dense", device, requires_grad=True)
    out = torch.empty_like(arguments["q"], requires_grad=False)
    function = torch.compile(flash_cute.attention, backend="eager") if traced else flash_cute.attention
    with pytest.raises(NotImplementedError, match="there are no gradients with out; detach q, k and v"):
        function(**arguments, out=out)
    with torch.no_grad():
        assert not function(**arguments, out=out).requires_grad


def test_transforms_are_refused(device):
    arguments = make_call("dense", device)
    q = arguments.pop("q")
    with pytest.raises(NotImplementedError, match=r"^flash_cute\.attention: vmap can't map a call with out"):
        torch.vmap(lambda q: flash_cute.attention(q, **arguments, out=torch.empty_like(q)))(q[None])
    ragged = torch.nested.nested_tensor([torch.randn(n, 2, 64) for n in (3, 5)], layout=torch.jagged)
    ragged = ragged.to(device, torch.bfloat16).transpose(1, 2)
    with pytest.raises(ValueError, match=r"^flash_cute\.forward: out must be None where q is nested"):
        flash_cute.forward(ragged, ragged, ragged, out=q)


def test_autocast(device):
    """out has the dtype that autocast gives q."""
    arguments = make_call("dense", device)
    out = torch.empty_like(arguments["q"])
    wide = {name: x.float() for name, x in arguments.items()}
    with torch.autocast(device.type, torch.bfloat16):
        flash_cute.forward(**wide, out=out)
    assert torch.equal(out, flash_cute.forward(**arguments)[0])


def test_autograd_notices(device):
    """A tensor that a backward needs must not have changed."""
    arguments = make_call("dense", device)
    out = torch.zeros_like(arguments["q"])
    product = torch.ones((), device=device, requires_grad=True) * out
    flash_cute.forward(**arguments, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("kind", CALLS)
def test_compiled(kernel, kind):
    """The write is part of the graph, and what comes behind it reads the result."""
    torch._dynamo.reset()

    function = flash_cute.forward_varlen if kind == "packed" else flash_cute.forward

    def call(arguments, out):
        lse = function(**arguments, out=out, family=kernel.family)[1]
        return lse, out + 1

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        arguments = make_call(kind, kernel.device)
        expected, lse = function(**arguments, family=kernel.family)
        out = torch.full_like(expected, torch.nan)
        result = compiled(arguments, out)
        assert torch.equal(out, expected)
        assert torch.equal(result[0], lse)
        assert torch.equal(result[1], expected + 1)


def test_wrong_tensors_while_tracing(device):
    arguments = make_call("dense", device)
    with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(x) for name, x in arguments.items()}
        assert flash_cute.forward(**fakes, out=torch.empty_like(fakes["q"]))[1].shape == (2, 4, 40)
        with pytest.raises(ValueError, match="out has shape"):
            flash_cute.forward(**fakes, out=fakes["q"][:1])


@pytest.mark.parametrize("kind", CALLS)
def test_opcheck(device, kind):
    arguments = make_call(kind, device)
    torch.library.opcheck(
        torch.ops.flash_cute._forward_out.default,
        (),
        arguments | {"out": torch.empty_like(arguments["q"])},
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


@pytest.mark.gpu
def test_graph(device):
    """A captured call writes into the same tensor at each replay."""
    arguments = make_call("dense", device)
    out = torch.empty_like(arguments["q"])
    flash_cute.forward(**arguments, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flash_cute.forward(**arguments, out=out)
    for _ in range(3):
        arguments["q"].normal_()
        graph.replay()
        assert torch.equal(out, flash_cute.forward(**arguments)[0])
