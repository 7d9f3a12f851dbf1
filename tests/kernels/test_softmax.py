"""flash_cute.softmax against float64: sizes, masks, layouts, element types, gradients, wrong calls."""

from __future__ import annotations

import pytest
import torch
from support.cases import poisoned
from support.tolerance import assert_within_rule
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import flash_cute
from flash_cute._cpu.softmax import hidden_columns

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
# Around what a thread, some lanes, a warp, a block and several blocks hold; also rows of no multiple of
# 16 bytes.
COLUMNS = [1, 3, 8, 17, 64, 100, 511, 1024, 1025, 4100, 10_000]
LONG = [16_384, 16_391, 32_768, 50_000, 131_072, 262_147, 1_000_000, 1_048_576]  # of the GPU


def plain(x, dtype, scale=1.0, causal=False, seqused_k=None, leftpad_k=None):
    """The same by PyTorch's operators in a type, hidden columns 0."""
    hidden = hidden_columns(x.shape, causal, seqused_k, leftpad_k, x.device)
    scores = (x.to(dtype) * scale).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1).masked_fill(hidden, 0), scores.logsumexp(-1)


def assert_softmax(x, **options):
    """Values and gradients of a call; x is drawn anew where it is not visible."""
    seen = ~hidden_columns(
        x.shape, options.get("causal", False), options.get("seqused_k"), options.get("leftpad_k"), x.device
    )
    dirty = x.masked_fill(~seen, torch.nan).detach() if not seen.all() else x.detach()
    if dirty.stride() != x.stride():
        dirty = x.detach().copy_(dirty)
    ours = dirty.requires_grad_()
    with poisoned():
        results = flash_cute.softmax(ours, **options)
    assert results[0].is_contiguous()
    assert (results[0].dtype, results[1].dtype) == (x.dtype, torch.float32)
    generator = torch.Generator(x.device).manual_seed(1)
    gradients = [
        torch.randn(y.shape, generator=generator, device=x.device, dtype=torch.float32).to(y.dtype)
        for y in results
    ]
    gradients[0].masked_fill_(~seen, torch.nan)
    with poisoned():
        (dx,) = torch.autograd.grad(results, ours, gradients)
    clean = torch.where(seen, x.detach(), 0)
    checked = {}
    for dtype in (torch.float64, x.dtype):
        leaf = clean.clone().requires_grad_()
        outputs = plain(leaf, dtype, **options)
        blind = ~seen.expand(x.shape).any(-1)
        given = [gradients[0].masked_fill(~seen, 0).to(dtype), gradients[1].masked_fill(blind, 0).to(dtype)]
        (gradient,) = torch.autograd.grad(outputs, leaf, given)
        gradient = torch.where(seen & ~blind.unsqueeze(-1), gradient, 0)
        checked[dtype] = *(y.detach() for y in outputs), gradient
    names = "probabilities", "lse", "dx"
    for name, result, yardstick, oracle in zip(
        names, (*results, dx), checked[x.dtype], checked[torch.float64], strict=True
    ):
        assert_within_rule(name, result.detach(), yardstick, oracle)
    assert (results[0].masked_select(~seen) == 0).all()
    assert (dx.masked_select(~seen) == 0).all()


def scores(device, *shape, dtype=torch.float32):
    generator = torch.Generator(device).manual_seed(sum(shape))
    return (3 * torch.randn(shape, generator=generator, device=device)).to(dtype)


@dtypes
@pytest.mark.parametrize("columns", COLUMNS + [pytest.param(n, marks=pytest.mark.gpu) for n in LONG])
def test_columns(device, columns, dtype):
    assert_softmax(scores(device, 5, columns, dtype=dtype))


@dtypes
@pytest.mark.gpu
@pytest.mark.parametrize("columns", [64, 1000, 40_000])
def test_more_rows_than_run_at_once(device, columns, dtype):
    assert_softmax(scores(device, 3000 if columns < 2000 else 700, columns, dtype=dtype), scale=0.5)


@pytest.mark.parametrize("columns", [32, 512, 8192])
@dtypes
def test_calls_behind_each_other(device, columns, dtype):
    """A kernel may be launched before those are through that write what it reads, or read what it writes."""
    rows = (2**22 if device.type == "cuda" else 2**13) // columns
    drawn = [scores(device, rows, columns, dtype=dtype) for _ in range(4)]
    x, results = torch.empty_like(drawn[0]), []
    for source in 4 * drawn:
        x.copy_(source)
        probabilities, _ = flash_cute.softmax(x)
        x.zero_()
        results.append(flash_cute.softmax(probabilities, scale=3.0)[0])
        del probabilities  # the next call writes there
    for source, result in zip(4 * drawn, results, strict=True):
        expected = flash_cute.softmax(flash_cute.softmax(source)[0], scale=3.0)[0]
        assert torch.equal(result, expected)


@dtypes
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("columns", [7, 64, 300, 5000])
def test_masks(device, columns, causal, dtype):
    """Columns that don't count hold NaN; entries without any, and values that make no sense."""
    used = torch.tensor([columns, columns // 2, 0, columns + 9, -4], dtype=torch.int32, device=device)
    skipped = torch.tensor([0, columns // 3, 2, 5, -7], dtype=torch.int32, device=device)
    x = scores(device, 5, 2, 9, columns, dtype=dtype)
    for lengths in (
        {},
        {"seqused_k": used},
        {"leftpad_k": skipped},
        {"seqused_k": used, "leftpad_k": skipped},
    ):
        assert_softmax(x, scale=0.3, causal=causal, **lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [40_000, 300_000])
def test_masks_of_long_rows(device, columns):
    used = torch.tensor([columns, 77, 0], dtype=torch.int32, device=device)
    skipped = torch.tensor([33_333, 5, 2], dtype=torch.int32, device=device)
    x = scores(device, 3, 4, columns, dtype=torch.bfloat16)
    assert_softmax(x, causal=True, seqused_k=used, leftpad_k=skipped)


LAYOUTS = {
    "transposed": lambda x: x.mT,
    "every second column": lambda x: x[..., ::2],
    "a slice": lambda x: x[..., 1:-2],
    "rows permuted": lambda x: x.permute(2, 0, 1, 3),
    "one row for all": lambda x: x[:, :, :1].expand(x.shape),
    "no batch": lambda x: x[0, 0, 0],
    "aligned slice": lambda x: x[..., 8:72],
}


@dtypes
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(device, layout, dtype):
    assert_softmax(layout(scores(device, 3, 4, 20, 90, dtype=dtype)), scale=2)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (3, 0, 7), (0,)])
def test_empty(device, shape):
    x = torch.zeros(shape, device=device, requires_grad=True)
    probabilities, lse = flash_cute.softmax(x)
    assert probabilities.shape == x.shape
    assert (lse == -torch.inf).all()
    assert (
        torch.autograd.grad(probabilities.sum() + lse.masked_fill(lse.isinf(), 0).sum(), x)[0].shape == shape
    )


@dtypes
@pytest.mark.parametrize("columns", [5, 100, 3000])
def test_infinities(device, columns, dtype):
    """As PyTorch's: NaN where the scores that a row sees are all -inf, or one is inf or NaN."""
    x = scores(device, 4, columns, dtype=dtype)
    x[0] = -torch.inf
    x[1, columns // 2] = torch.inf
    x[2, columns // 3] = torch.nan
    x[3, 0] = -torch.inf
    results = flash_cute.softmax(x)
    for name, ours, *theirs in zip(
        ("probabilities", "lse"), results, plain(x, x.dtype), plain(x, torch.float64), strict=True
    ):
        assert_within_rule(name, ours, *theirs)


@dtypes
def test_large_scores(device, dtype):
    assert_softmax(scores(device, 6, 700, dtype=dtype) * 1000)


@dtypes
@pytest.mark.parametrize("columns", [5, 700, 20_000])
def test_largest_scores(device, columns, dtype):
    """A row of nothing but the lowest number, as masks that are added make it, is even. PyTorch's gradient of
    logsumexp, which has e^(x - LSE), is not."""
    x = scores(device, 4, columns, dtype=dtype) * 1000
    x[0] *= min(1e30, torch.finfo(dtype).max / 32 / 1000 / 16)
    x[1] = x[2, 1:] = torch.finfo(dtype).min
    dout = scores(device, 5, columns, dtype=dtype)[1:]
    results = []
    for kind in (None, dtype, torch.float64):  # ours, and PyTorch's in two types
        leaf = x.to(kind or dtype).requires_grad_()
        p, lse = flash_cute.softmax(leaf) if kind is None else plain(leaf, kind)
        (dx,) = torch.autograd.grad(p, leaf, dout.to(leaf.dtype))
        results.append((p.detach(), lse.detach(), dx))
    for name, *compared in zip(("probabilities", "lse", "dx"), *results, strict=True):
        assert_within_rule(name, *compared)


def test_one_result_alone(device):
    x = scores(device, 6, 70).requires_grad_()
    probabilities, lse = flash_cute.softmax(x)
    expected = torch.autograd.grad(x.double().logsumexp(-1).sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad(lse.sum(), x, retain_graph=True)[0], expected)
    weights = scores(device, 70)
    expected = torch.autograd.grad((x.double().softmax(-1) * weights).sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad((probabilities * weights).sum(), x)[0], expected)


def test_vmap_and_grad(device):
    x = scores(device, 3, 4, 5, 30)
    used = torch.tensor([30, 7, 0, 12], dtype=torch.int32, device=device)

    def loss(x, used):
        probabilities, lse = flash_cute.softmax(x, causal=True, seqused_k=used)
        return probabilities.square().sum() + lse.exp().sum()

    for dims in ((0, None), (2, None)):
        mapped = x.movedim(0, dims[0])
        ours = torch.vmap(torch.func.grad(loss), dims)(mapped, used)
        each = torch.stack([torch.func.grad(loss)(entry, used) for entry in x])
        torch.testing.assert_close(ours, each)
    torch.testing.assert_close(torch.vmap(flash_cute.softmax)(x), flash_cute.softmax(x))


def test_vmap_over_nothing(device):
    x, used = (torch.zeros(0, *shape, device=device) for shape in ((2, 5), (2,)))

    def call(x, used):
        return flash_cute.softmax(x, seqused_k=used)[0]

    gradient = torch.func.grad(lambda x, used: call(x, used).square().sum())
    for function in (call, gradient):
        assert torch.vmap(function)(x, used.int()).shape == x.shape


def test_compiled(device):
    x = scores(device, 4, 50).requires_grad_()

    def loss(x):
        probabilities, lse = flash_cute.softmax(x, scale=0.5, causal=True)
        return probabilities.square().sum() + lse.sum()

    (expected,) = torch.autograd.grad(loss(x), x)
    (ours,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), x)
    torch.testing.assert_close(ours, expected)


TRANSFORMS = {
    "grad": torch.func.grad,
    "vmap of grad": lambda loss: torch.vmap(torch.func.grad(loss)),
    "vmap over lengths": lambda loss: (
        lambda x: torch.vmap(
            lambda used: torch.func.grad(lambda x: flash_cute.softmax(x, seqused_k=used)[0].square().sum())(x)
        )(torch.arange(5 * len(x), dtype=torch.int32, device=x.device).view(5, -1))
    ),
    "jacrev": torch.func.jacrev,
    "vjp": lambda loss: lambda x: torch.func.vjp(loss, x)[1](torch.ones((), device=x.device))[0],
}


@pytest.mark.filterwarnings("error:There is a performance drop")
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_compiled_transforms(device, transform):
    """Inside a graph, too, a transform sees softmax's own gradient."""
    call = transform(lambda x: flash_cute.softmax(x, scale=0.5)[0].square().sum())
    x = scores(device, 4, 50)
    expected = call(x)
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(x), expected)


OPERATOR = torch.ops.flash_cute.softmax.default
calls = pytest.mark.parametrize("call", [flash_cute.softmax, OPERATOR], ids=["face", "operator"])


@pytest.mark.parametrize("compiled", [False, True])
@calls
def test_gradients_past_an_inner_transform(device, call, compiled):
    """Of torch.func and of autograd, where x is a constant for the innermost grad."""

    weights = torch.arange(50.0, device=device)

    def number(x):
        inner = torch.func.grad(lambda weights: (call(x)[0] * weights.square()).sum())
        return inner(weights).square().sum()

    x = scores(device, 4, 50).requires_grad_()
    functional = torch.func.grad(number)
    if compiled:
        number, functional = (
            torch.compile(f, fullgraph=True, backend="aot_eager") for f in (number, functional)
        )
    inner = flash_cute.softmax(x)[0].sum(0) * (2 * weights)  # written out
    (expected,) = torch.autograd.grad(inner.square().sum(), x)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(torch.autograd.grad(number(x), x)[0], expected)
    torch.testing.assert_close(functional(x.detach()), expected)


def test_functionalized(device):
    x = scores(device, 4, 50)
    torch.testing.assert_close(torch.func.functionalize(flash_cute.softmax)(x), flash_cute.softmax(x))


def test_exported_and_dynamic(device):
    class Module(torch.nn.Module):
        def forward(self, x):
            return flash_cute.softmax(x, causal=True)

    rows = torch.export.Dim("rows")
    program = torch.export.export(Module(), (scores(device, 4, 50),), dynamic_shapes={"x": {0: rows}})
    for count in (4, 7):
        x = scores(device, count, 50)
        torch.testing.assert_close(program.module()(x), flash_cute.softmax(x, causal=True))
    with pytest.raises(ValueError, match=r"^flash_cute.softmax: x has dtype torch.float64"):
        torch.export.export(Module(), (scores(device, 4, 50).double(),))


@pytest.mark.parametrize("wanted", [1, 2])
def test_lengths_of_an_unknown_stride(device, wanted):
    """What tracing can't know is checked by the call; what it takes for a constant, while tracing."""
    x = scores(device, 3, 50)
    given = torch.tensor([4, 50, 7, 8, 9], dtype=torch.int32, device=device)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(x, given, step):
        return flash_cute.softmax(x, seqused_k=given.as_strided((3,), (step.item(),)))

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        step = torch.tensor(wanted)
        if wanted == 1:
            torch.testing.assert_close(call(x, given, step), flash_cute.softmax(x, seqused_k=given[:3]))
        else:
            # Some versions of dynamo say before it where it happened.
            with pytest.raises(RuntimeError, match=r"flash_cute: seqused_k has stride 2"):
                call(x, given, step)


def test_scale_of_a_traced_size(device):
    """PyTorch binds the graph to it, as for its own attention's."""

    def call(x):
        return flash_cute.softmax(x, scale=x.shape[-1] ** -0.5)[0]

    x = scores(device, 4, 50)
    torch.testing.assert_close(make_fx(call, tracing_mode="symbolic")(x)(x), call(x))


def test_gradients_of_other_shapes(device):
    x = scores(device, 4, 50)
    for wrong in (x[:1, :1], x.half()):
        with pytest.raises(RuntimeError, match=r"^flash_cute: dprobabilities has"):
            torch.ops.flash_cute._softmax_backward(wrong.contiguous(), None, x)
    with pytest.raises(RuntimeError, match=r"^flash_cute: dlse has another shape"):
        torch.ops.flash_cute._softmax_backward(None, x, x)


def dual(f, x):
    with forward_ad.dual_level():
        f(forward_ad.make_dual(x, x))


FORWARD_MODE = {
    "dual": dual,
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "jvp of grad": lambda f, x: torch.func.jvp(torch.func.grad(f), (x,), (x,)),
}


@pytest.mark.parametrize("transform", FORWARD_MODE.values(), ids=FORWARD_MODE)
@calls
def test_no_forward_mode(device, transform, call):
    with pytest.raises(NotImplementedError, match=r"^flash_cute.softmax: there is no forward-mode"):
        transform(lambda x: call(x)[0].square().sum(), scores(device, 4, 50))


@calls
def test_no_second_derivative(device, call):
    x = scores(device, 4, 50).requires_grad_()
    (gradient,) = torch.autograd.grad(call(x)[0].square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^flash_cute.softmax: there are no second derivatives"):
        gradient.sum().backward()
    first = torch.func.grad(lambda x: call(x)[0].square().sum())
    with pytest.raises(NotImplementedError, match=r"^flash_cute.softmax: there are no second derivatives"):
        torch.func.grad(lambda x: first(x).sum())(x.detach())


WRONG = {
    "x is a list": (TypeError, lambda x: flash_cute.softmax([1.0]), "x is list"),
    "float64": (ValueError, lambda x: flash_cute.softmax(x.double()), "x has dtype torch.float64"),
    "a type that torch's stable ABI does not know": (
        ValueError,
        lambda x: flash_cute.softmax(torch.empty(3, 4, dtype=torch.uint4, device=x.device)),
        "x has dtype torch.uint4; torch.float32, torch.float16 and torch.bfloat16 are accepted",
    ),
    "lengths of such a type": (
        ValueError,
        lambda x: flash_cute.softmax(x, seqused_k=torch.empty(2, dtype=torch.uint4, device=x.device)),
        "seqused_k has dtype torch.uint4; torch.int32 is accepted",
    ),
    "no dimension": (ValueError, lambda x: flash_cute.softmax(x.sum()), "x has 0 dimensions; at least 1"),
    "causal vector": (
        ValueError,
        lambda x: flash_cute.softmax(x[0, 0], causal=True),
        "x has 1 dimensions; at least 2, (..., rows, columns)",
    ),
    "scale": (ValueError, lambda x: flash_cute.softmax(x, scale=-1), "scale is -1"),
    "scale of inf": (ValueError, lambda x: flash_cute.softmax(x, scale=10**400), "scale is 1000"),
    "scale of 0 in float32": (ValueError, lambda x: flash_cute.softmax(x, scale=1e-60), "scale is 1e-60"),
    "scale is a tensor": (TypeError, lambda x: flash_cute.softmax(x, scale=x.sum()), "scale is a tensor"),
    "sparse": (ValueError, lambda x: flash_cute.softmax(x.to_sparse()), "x is of layout torch.sparse_coo"),
    "sparse lengths": (
        ValueError,
        lambda x: flash_cute.softmax(
            x, leftpad_k=torch.ones(2, dtype=torch.int32, device=x.device).to_sparse()
        ),
        "leftpad_k is of layout torch.sparse_coo; dense tensors are accepted",
    ),
    "vmap leaves no rows": (
        ValueError,
        lambda x: torch.vmap(lambda row: flash_cute.softmax(row, causal=True))(x[0]),
        "under vmap an entry of x has 1 dimensions; at least 2",
    ),
    "vmap leaves no columns": (
        ValueError,
        lambda x: torch.vmap(flash_cute.softmax)(x[0, 0]),
        "under vmap an entry of x has 0 dimensions; at least 1",
    ),
    "vmap leaves no batch": (
        ValueError,
        lambda x: torch.vmap(lambda row, used: flash_cute.softmax(row, seqused_k=used))(
            x, torch.ones(2, dtype=torch.int32, device=x.device)
        ),
        "under vmap an entry of seqused_k has 0 dimensions; (batch,)",
    ),
    "scale is text": (TypeError, lambda x: flash_cute.softmax(x, scale="one"), "scale is 'one'"),
    "causal is a number": (
        TypeError,
        lambda x: flash_cute.softmax(x, causal=1),
        "causal is 1; True or False",
    ),
    "lengths are a list": (TypeError, lambda x: flash_cute.softmax(x, leftpad_k=[1]), "leftpad_k is list"),
    "lengths of another batch": (
        ValueError,
        lambda x: flash_cute.softmax(x, seqused_k=torch.ones(3, dtype=torch.int32, device=x.device)),
        "seqused_k has shape (3,); (2,)",
    ),
    "lengths in int64": (
        ValueError,
        lambda x: flash_cute.softmax(x, seqused_k=torch.ones(2, dtype=torch.int64, device=x.device)),
        "seqused_k has dtype torch.int64; torch.int32 is accepted",
    ),
}


@pytest.mark.parametrize(("kind", "call", "words"), WRONG.values(), ids=WRONG)
def test_wrong_calls(device, kind, call, words):
    with pytest.raises(kind) as raised:
        call(scores(device, 2, 3, 20))
    assert str(raised.value).startswith("flash_cute.softmax: ")
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
