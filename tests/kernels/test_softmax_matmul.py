"""flash_cute.softmax_matmul against float64, and under what PyTorch does around it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from unittest.mock import patch

import pytest
import torch
from support.cases import ALL_DTYPES, DTYPES, EMPTY, SEEDS, Mask, Shape, make_gradients, make_inputs, poisoned
from support.graphs import compiled_graphs
from support.lengths import int32
from support.tolerance import assert_within_rule
from torch.utils.checkpoint import checkpoint

import flash_cute
from flash_cute import reference
from flash_cute._torch import ops

SHAPE = Shape(3, 4, 2, 130, 200, 64)  # batch, heads, heads of v, rows, columns, head_dim of v
SMALL = Shape(2, 4, 2, 50, 70, 64)
SIZES = {"all": (3, 4), "one batch": (1, 4), "one head": (3, 1), "one for all": (1, 1)}
USED_Q, USED_K, LEFTPAD = [130, 0, 77], [190, 150, 64], [9, 0, 70]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def problem(device, dtype=torch.bfloat16, shape=SHAPE, size=None):
    """x of so many entries and heads, v, and the gradients of their out and lse."""
    size = size or (shape.batch, shape.heads_q)
    if size[1] == 1:  # v's heads are out's
        shape = replace(shape, heads_kv=shape.heads_q)
    _, _, v = make_inputs(shape, dtype, device)
    generator = torch.Generator(device).manual_seed(SEEDS.getrandbits(31))
    x = 2 * torch.randn(*size, shape.seqlen_q, shape.seqlen_k, generator=generator, device=device)
    rows = torch.empty(shape.q, dtype=dtype, device=device)
    return x.to(dtype), v, make_gradients(rows, head_dim_v=v.shape[3])


def seen_by(options: dict, rows: int, keys: int, batch: int, device) -> torch.Tensor:
    """bool (batch, 1, rows, keys): what all but a mask leaves, by each sequence's own lengths."""
    seen = torch.zeros(batch, 1, rows, keys, dtype=torch.bool, device=device)
    mask = Mask(options.get("causal", False), options.get("window"))
    for number in range(batch):
        used_q, used_k, first = (
            options[name][number].item() if name in options else default
            for name, default in (("seqused_q", rows), ("seqused_k", keys), ("leftpad_k", 0))
        )
        seen[number, 0, :used_q, :used_k] = mask.visible(used_q, used_k, device)
        seen[number, ..., :first] = False
    return seen


def expected(x, v, given, options, dtype):
    """out, lse, dx and dv in dtype."""
    options, scale = dict(options), options.get("scale", 1.0)
    batch, heads = given[1].shape[:2]
    rows, keys = x.shape[2:]
    seen = seen_by(options, rows, keys, batch, x.device)
    changes = {name: options[name] for name in ("dropout_p", "dropout_seed") if name in options}
    changes["mask"] = seen & options["mask"] if "mask" in options else seen
    q, k = (x.new_zeros(batch, count, length, 8) for count, length in ((heads, rows), (v.shape[1], keys)))
    changes["bias"] = x.double() * scale
    results = reference.forward(q, k, v, dtype=dtype, **changes)
    gradients = reference._gradients(q, k, v, *given, dtype=dtype, **changes)
    return *results, gradients[3] * scale, gradients[2]


def found(kernel, x, v, given, **options):
    """The same by a kernel, in memory that is poisoned with NaN; of the mode for that it is not told."""
    x, v = x.detach().requires_grad_(), v.detach().requires_grad_()
    with poisoned(), patch("torch.are_deterministic_algorithms_enabled", return_value=False):
        results = flash_cute.softmax_matmul(x, v, family=kernel.family, **options)
        torch.autograd.backward(results, given)
    return *(result.detach() for result in results), x.grad, v.grad


def check(kernel, x, v, given, clean=None, **options) -> tuple[torch.Tensor, ...]:
    """clean: x, v and given without what does not count."""
    ours = found(kernel, x, v, given, **options)
    assert ours[0].is_contiguous()
    assert (ours[0].dtype, ours[1].dtype) == (v.dtype, torch.float32)
    assert (ours[2].shape, ours[3].shape) == (x.shape, v.shape)
    yardstick, oracle = (
        expected(*(clean or (x, v, given)), options, dtype) for dtype in (x.dtype, torch.float64)
    )
    for name, *results in zip(("out", "lse", "dx", "dv"), ours, yardstick, oracle, strict=True):
        assert_within_rule(name, *results)
    return ours


def skip_what_is_not_there(kernel, dtype) -> None:
    if kernel.family == "sm90" and dtype == torch.float32:
        pytest.skip("float32 has no kernels of sm90")


CASES = {
    "plain": lambda device: {},
    "causal": lambda device: {"causal": True},
    "window": lambda device: {"window": (20, 5), "scale": 0.3},
    "mask": lambda device: {"mask": torch.rand(1, 4, 130, 200, device=device) < 0.7},
    "lengths": lambda device: {
        "seqused_q": int32(USED_Q, device), "seqused_k": int32(USED_K, device),
        "leftpad_k": int32(LEFTPAD, device), "causal": True, "scale": 1.7,
    },
    "dropout": lambda device: {
        "dropout_p": 0.25, "dropout_seed": torch.tensor([SEEDS.getrandbits(62), 5], device=device),
    },
}  # fmt: skip
CASES["all"] = lambda device: {
    name: value for case in ("mask", "lengths", "dropout") for name, value in CASES[case](device).items()
}
CASES["hidden rows"] = lambda device: {
    "mask": torch.rand(3, 4, 130, 200, device=device) < (torch.rand(3, 4, 130, 1, device=device) - 0.3)
}


ROWS = [(case, *pair) for case, pair in zip(CASES, product(SIZES, ALL_DTYPES), strict=False)]
ROWS += [("all", *pair) for pair in product(SIZES, ALL_DTYPES)]
ROWS += [(case, "all", dtype) for case, dtype in product(CASES, DTYPES)]
ROWS = list(dict.fromkeys(ROWS))


@pytest.mark.parametrize(("case", "size", "dtype"), ROWS, ids=map(", ".join, ROWS))
def test_against_float64(kernel, case, size, dtype):
    """What does not count is NaN: pairs of x that are hidden, rows of v outside the lengths, and what comes
    back to rows that see nothing."""
    size, dtype = SIZES[size], ALL_DTYPES[dtype]
    skip_what_is_not_there(kernel, dtype)
    device, options = kernel.device, CASES[case](kernel.device)
    x, v, given = problem(device, dtype, size=size)
    seen = seen_by(options, 130, 200, 3, device) & options.get("mask", True)
    hidden = ~seen.expand(3, 4, -1, -1)
    hidden = hidden.unflatten(0, (size[0], -1)).all(1).unflatten(1, (size[1], -1)).all(2)
    unused = ~seen_by({n: x for n, x in options.items() if n[-2:] == "_k"}, 1, 200, 3, device)[:, 0, 0]
    clean = x.masked_fill(hidden, 0), v.masked_fill(unused[:, None, :, None], 0), given
    x, v = x.masked_fill(hidden, torch.nan), v.masked_fill(unused[:, None, :, None], torch.nan)
    blind = ~seen.any(-1).expand(3, 4, -1)
    given = given[0].masked_fill(blind.unsqueeze(-1), torch.nan), given[1].masked_fill(blind, torch.nan)
    ours = check(kernel, x, v, given, clean, **options)
    assert (ours[2][hidden] == 0).all()


SHAPES = {
    "wide": Shape(1, 2, 1, 100, 150, 256),
    "narrow": Shape(2, 2, 2, 100, 150, 8),
    "odd": Shape(2, 3, 1, 77, 131, 13),
    "more tiles": Shape(1, 1, 1, 333, 1030, 40),
    "one row": Shape(16, 8, 4, 1, 413, 64),
    "one column": Shape(16, 8, 8, 413, 1, 64),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(kernel, shape, dtype):
    skip_what_is_not_there(kernel, dtype)
    check(kernel, *problem(kernel.device, dtype, shape), scale=0.5)


@pytest.mark.parametrize("shape", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("told", [True, False])
def test_empty(kernel, told, shape):
    x, v, given = problem(kernel.device, shape=shape, size=None if told else (1, 1))
    out, lse, dx, dv = found(kernel, x, v, given)
    assert out.shape == given[0].shape
    assert (out == 0).all()
    assert lse.isneginf().all()
    assert (dx.shape, dv.shape) == (x.shape, v.shape)
    assert not dx.any()
    assert not dv.any()


LAYOUTS = {
    "columns first": lambda x: x.mT.contiguous().mT,
    "heads last": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "every second column": lambda x: x.repeat_interleave(2, 3)[..., ::2],
    "expanded": lambda x: x[:1, :1].expand(x.shape),
    "one row for all": lambda x: x[:, :, :1].expand(x.shape),
    "a misaligned slice": lambda x: torch.nn.functional.pad(x, (3, 2))[..., 3:-2],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(kernel, layout):
    x, v, given = problem(kernel.device, shape=SMALL)
    results = found(kernel, layout(x), v, given), found(kernel, layout(x).contiguous(), v, given)
    for name, *same in zip(("out", "lse", "dx"), *results, strict=False):
        tolerance = 0 if kernel.family is None else 1e-2
        torch.testing.assert_close(*same, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: n + text)


MAKERS = {
    "both": ((2, 4), torch.bfloat16, {}, ["_bias_gradient"]),
    "sums": ((1, 4), torch.bfloat16, {}, ["_backward", "_bias_gradient"]),
    "deterministic": ((2, 4), torch.float16, {"deterministic": True}, ["_backward", "_bias_gradient"]),
    "float32": ((2, 4), torch.float32, {}, ["_backward", "_bias_gradient"]),
}


@pytest.mark.parametrize(("size", "dtype", "options", "expected"), MAKERS.values(), ids=MAKERS)
def test_which_operators_make_gradients(kernel, monkeypatch, size, dtype, options, expected):
    if kernel.family == "sm90" and (dtype == torch.float32 or options):
        pytest.skip("sm90 has no kernels for it")
    called = []
    for name in ("_backward", "_bias_gradient"):
        op = getattr(ops, name)
        spied = lambda *args, op=op, name=name, **given: called.append(name) or op(*args, **given)  # noqa: E731
        monkeypatch.setattr(ops, name, spied)
    x, v, given = problem(kernel.device, dtype, SMALL, size)
    leaves = x.requires_grad_(), v.requires_grad_()
    torch.autograd.backward(flash_cute.softmax_matmul(*leaves, family=kernel.family, **options), given)
    on_cpu = kernel.device.type == "cpu" and dtype == torch.float32
    assert called == (expected[1:] if on_cpu else expected)


def test_of_the_lse_alone(kernel):
    """dv is 0."""
    x, v, (_, dlse) = problem(kernel.device, shape=SMALL)
    leaves = x.requires_grad_(), v.requires_grad_()
    with poisoned(), patch("torch.are_deterministic_algorithms_enabled", return_value=False):
        _, lse = flash_cute.softmax_matmul(*leaves, family=kernel.family)
        dx, dv = torch.autograd.grad(lse, leaves, dlse, materialize_grads=True)
    assert dx.any()
    assert not dv.any()


@pytest.mark.parametrize("layout", ["heads last", "expanded"])
def test_dout_of_any_strides_under_autocast(kernel, layout):
    """Where the backward runs in autocast, that changes the type of no product."""
    x, v, (dout, _) = problem(kernel.device, shape=SMALL)
    dout = dout.transpose(1, 2).contiguous().transpose(1, 2) if layout == "heads last" else dout[:1, :, :1]
    dout, found = dout.expand(2, 4, 50, 64), []
    for given in (dout, dout.contiguous()):
        leaves = x.detach().requires_grad_(), v.detach().requires_grad_()
        out, _ = flash_cute.softmax_matmul(*leaves, family=kernel.family)
        with torch.autocast(kernel.device.type, torch.float16, enabled=given is dout):
            found.append(torch.autograd.grad(out, leaves, given))
    for name, *pair in zip(("dx", "dv"), *found, strict=True):
        torch.testing.assert_close(*pair, rtol=1e-2, atol=1e-2, msg=lambda text, n=name: n + text)
        assert pair[0].dtype == torch.bfloat16


def test_infinities(kernel):
    """-inf hides; a row of the lowest number, which is finite, has the mean of v."""
    x, v, given = problem(kernel.device, shape=SMALL)
    x[:, :, 5:9], x[..., 30:40], x[:, :, 20] = -torch.inf, -torch.inf, torch.finfo(x.dtype).min
    x[:, :, 20, 30:40] = -torch.inf
    out, lse, dx, _ = found(kernel, x, v, given)
    assert (out[:, :, 5:9] == 0).all()
    assert lse[:, :, 5:9].isneginf().all()
    assert (dx[x.isneginf()] == 0).all()
    assert out.isfinite().all()
    seen = torch.cat((v[:, :, :30], v[:, :, 40:]), 2).float().mean(2).repeat_interleave(2, 1)
    torch.testing.assert_close(out[:, :, 20].float(), seen, rtol=2e-2, atol=2e-3)


# What PyTorch does around it


class Loss:
    """A number of x and v, whose gradients are those of given dout and dlse."""

    def __init__(self, kernel, size=(1, 4)):
        self.options = {"causal": True, "scale": 0.7}
        self.kernel = kernel
        self.x, self.v, self.given = problem(kernel.device, shape=SMALL, size=size)

    def __call__(self, x, v):
        out, lse = flash_cute.softmax_matmul(x, v, family=self.kernel.family, **self.options)
        return (out.float() * self.given[0]).sum() + (lse * self.given[1]).sum()

    def check(self, *gradients, x=None, v=None):
        x, v = self.x if x is None else x, self.v if v is None else v
        yardstick, oracle = (
            expected(x, v, self.given, self.options, dtype)[2:] for dtype in (torch.bfloat16, torch.float64)
        )
        for name, *results in zip(("dx", "dv"), gradients, yardstick, oracle, strict=True):
            assert_within_rule(name, *results)

    def leaves(self):
        return [x.detach().requires_grad_() for x in (self.x, self.v)]


@pytest.fixture
def loss(kernel) -> Loss:
    return Loss(kernel)


@pytest.mark.parametrize("needed", ["x", "v"])
def test_one_gradient(loss, needed):
    """The other operator is not called."""
    x, v = loss.leaves()
    leaf, other = (x, v) if needed == "x" else (v, x)
    loss(x, v.detach()).backward() if needed == "x" else loss(x.detach(), v).backward()
    assert other.grad is None
    both = loss.leaves()
    loss(*both).backward()
    torch.testing.assert_close(leaf.grad, both[needed == "v"].grad, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints(loss, use_reentrant):
    leaves = loss.leaves()
    checkpoint(loss, *leaves, use_reentrant=use_reentrant).backward()
    loss.check(*(leaf.grad for leaf in leaves))


def test_deterministic(kernel):
    """By the kernels of sm80, where sm90 is not insisted on."""
    loss, found = Loss(kernel), []
    for _ in range(2):
        x, v = loss.leaves()
        out, _ = flash_cute.softmax_matmul(x, v, deterministic=True)
        found.append(torch.autograd.grad(out, (x, v), loss.given[0]))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_autocast(loss):
    """float32 becomes of 16 bits, gradients are float32 again."""
    leaves = [x.float().detach().requires_grad_() for x in (loss.x, loss.v)]
    with torch.autocast(loss.kernel.device.type, torch.bfloat16):
        out, _ = flash_cute.softmax_matmul(*leaves)
        number = loss(*leaves)
    assert out.dtype == torch.bfloat16
    number.backward()
    assert all(leaf.grad.dtype == torch.float32 for leaf in leaves)
    loss.check(*(leaf.grad.bfloat16() for leaf in leaves))


@pytest.mark.parametrize("mapped", [(0, None), (None, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("size", [(1, 4), (2, 1)], ids=str)
def test_vmap_of_grad(kernel, size, mapped):
    loss = Loss(kernel, size)
    several = [
        [x.roll(i, 3) for i in range(3)] if dim == 0 else [x] * 3
        for x, dim in zip((loss.x, loss.v), mapped, strict=True)
    ]
    stacked = [torch.stack(xs) if dim == 0 else xs[0] for xs, dim in zip(several, mapped, strict=True)]
    gradients = torch.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=mapped)(*stacked)
    for x, v, *of_entry in zip(*several, *gradients, strict=True):
        loss.check(*of_entry, x=x, v=v)


def test_grad_of_vmap(loss):
    """Of what entries share, their sum."""
    v = torch.stack([loss.v, loss.v])
    found = torch.func.grad(lambda x: torch.vmap(loss, in_dims=(None, 0))(x, v).sum())(loss.x)
    whole = torch.func.grad(loss)(loss.x, loss.v)
    torch.testing.assert_close(found, 2 * whole, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(loss, backend):
    leaves = loss.leaves()
    torch.compile(loss, fullgraph=True, backend=backend)(*leaves).backward()
    loss.check(*(leaf.grad for leaf in leaves))


@pytest.mark.parametrize("value", [-3e38, -1e8, 1e5, 1e8, 3e38])
def test_rows_of_one_large_number_on_the_cpu(value):
    """Their LSE has no room for the logarithm of how many keys there are, and the gradients none the less."""
    x = torch.full((1, 2, 4, 7), value, requires_grad=True)
    v = torch.randn(1, 2, 7, 3, requires_grad=True)
    out, _ = flash_cute.softmax_matmul(x, v)
    weight = torch.full_like(x, 1 / 7)
    torch.testing.assert_close(out, weight.detach() @ v.detach())
    dx, dv = torch.autograd.grad(out.square().sum(), (x, v))
    dout = 2 * out.detach()
    dp = dout @ v.detach().mT
    torch.testing.assert_close(dv, weight.detach().mT @ dout)
    torch.testing.assert_close(dx, weight.detach() * (dp - dp.mean(-1, keepdim=True)), atol=1e-5, rtol=1e-4)


WRONG_WHILE_TRACED = {
    "dtype": ({"dtype": torch.float64}, {}, "x must have dtype torch.float16, torch.bfloat16 or"),
    "scale": ({}, {"scale": 0.0}, "scale is 0; a finite number > 0"),
    "large scale": ({}, {"scale": 1e39}, r"scale is 1e\+39; a finite number > 0"),
    "family": (
        {"device": "cpu"},
        {"family": "sm90"},
        "family is 'sm90', but x is on the CPU; None is accepted",
    ),
}


@pytest.mark.parametrize(("kind", "options", "sentence"), WRONG_WHILE_TRACED.values(), ids=WRONG_WHILE_TRACED)
def test_what_is_wrong_while_traced_has_its_own_name(device, kind, options, sentence):
    """Not q's and bias_scale's, as the operator calls them: compilers can't trace the change of names."""
    compiled = torch.compile(flash_cute.softmax_matmul, backend="eager", fullgraph=True)
    x, v = (torch.ones(1, 2, 8, 8, **{"device": device, "dtype": torch.bfloat16} | kind) for _ in range(2))
    with pytest.raises(Exception, match=rf"flash_cute\.softmax_matmul: {sentence}"):
        compiled(x, v, **options)


def test_dynamic_shapes_compile_once(kernel):
    graphs, backend = compiled_graphs()

    def weighed(x, v):
        return flash_cute.softmax_matmul(x * 1.5, v, family=kernel.family)[0].float().square().sum()

    compiled = torch.compile(weighed, fullgraph=True, dynamic=True, backend=backend)
    for shape in (Shape(5, 6, 3, 50, 60, 64), Shape(6, 6, 3, 70, 40, 64), Shape(3, 6, 3, 33, 190, 64)):
        x, v, _ = problem(kernel.device, shape=shape, size=(1, 6))
        gradients = []
        for function in (compiled, weighed):
            leaves = [tensor.clone().requires_grad_() for tensor in (x, v)]
            function(*leaves).backward()
            gradients.append([leaf.grad for leaf in leaves])
        for pair in zip(*gradients, strict=True):
            torch.testing.assert_close(*pair, rtol=2e-2, atol=2e-2)
    assert graphs[0] == {"flash_cute._forward.default"}
    assert len(graphs) == 2


def test_exported(loss):
    """With parameters, which train."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.x = torch.nn.Parameter(loss.x)

        def forward(self, v):
            return loss(self.x, v)

    program = torch.export.export(Model(), (loss.v,)).module()
    program(loss.v).backward()
    torch.testing.assert_close(program.x.grad, torch.func.grad(loss)(loss.x, loss.v), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("differentiate", "words"),
    [
        (lambda f, x: torch.func.jvp(f, (x,), (x,)), "forward-mode"),
        (lambda f, x: torch.func.grad(lambda y: torch.func.grad(f)(y).float().sum())(x), "second"),
    ],
    ids=["jvp", "second"],
)
def test_other_derivatives_are_refused(loss, differentiate, words):
    with pytest.raises(NotImplementedError, match=rf"^flash_cute\.\w+: there (is|are) no {words}"):
        differentiate(lambda x: loss(x, loss.v), loss.x)


@pytest.mark.gpu
def test_a_cuda_graph(loss):
    x, v = loss.x.clone(), loss.v.clone()
    flash_cute.softmax_matmul(x, v, family=loss.kernel.family)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = flash_cute.softmax_matmul(x, v, family=loss.kernel.family)
    x.copy_(loss.x.roll(1, 3))
    graph.replay()
    expected = flash_cute.softmax_matmul(x, v, family=loss.kernel.family)
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
