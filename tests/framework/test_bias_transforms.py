"""The gradient of a bias under what PyTorch does around it: autograd, transforms, compilers, checkpoints."""

from __future__ import annotations

import pytest
import torch
from support.cases import Shape, make_gradients, make_inputs
from support.graphs import compiled_graphs
from support.tolerance import assert_within_rule
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flash_cute
from flash_cute import reference
from flash_cute._torch import ops

BATCH, HEADS, ROWS, KEYS, COUNT = 4, 4, 50, 70, 3
SHAPE = Shape(BATCH, HEADS, 2, ROWS, KEYS, 64)
OF_PAIRS = 1, HEADS, ROWS, KEYS


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Problem:
    """q, k, v and a bias, and the number whose gradients are those of given dout and dlse."""

    def __init__(self, kernel, size=OF_PAIRS, shape: Shape = SHAPE):
        self.kernel = kernel
        self.inputs = make_inputs(shape, torch.bfloat16, kernel.device)
        self.gradients = make_gradients(self.inputs[0])
        self.bias = torch.randn(size, device=kernel.device).bfloat16()

    def loss(self, q, k, v, bias, forward=flash_cute.forward, **options) -> torch.Tensor:
        out, lse = forward(q, k, v, causal=True, bias=bias, family=self.kernel.family, **options)
        dout, dlse = self.gradients
        return (out.float() * dout).sum() + (lse * dlse).sum()

    def of_bias(self, bias, **options) -> torch.Tensor:
        return self.loss(*self.inputs, bias, **options)

    def expected(self, inputs=None, bias=None, **options) -> list[torch.Tensor]:
        """The bias's gradient in bfloat16, and in float64."""
        options["bias"] = self.bias if bias is None else bias
        arguments = *(self.inputs if inputs is None else inputs), *self.gradients, True
        types = torch.bfloat16, torch.float64
        return [reference.bias_gradient(*arguments, dtype=dtype, **options) for dtype in types]

    def check(self, found, **options) -> None:
        assert_within_rule("dbias", found, *self.expected(**options))


@pytest.fixture
def problem(kernel) -> Problem:
    return Problem(kernel)


# Autograd


@pytest.mark.parametrize(
    ("needed", "expected"),
    [
        ("bias", ["_bias_gradient"]),
        ("q", ["_backward"]),
        ("sinks", ["_backward"]),
        ("bias sinks", ["_backward", "_bias_gradient"]),
        ("bias v", ["_backward", "_bias_gradient"]),
    ],
)
def test_what_is_needed_is_computed(problem, monkeypatch, needed, expected):
    called = []
    for name in ("_backward", "_bias_gradient"):
        op = getattr(ops, name)
        spied = lambda *args, op=op, name=name, **given: called.append(name) or op(*args, **given)  # noqa: E731
        monkeypatch.setattr(ops, name, spied)
    tensors = dict(zip("qkv", problem.inputs, strict=True)) | {"bias": problem.bias}
    tensors["sinks"] = torch.randn(HEADS, device=problem.kernel.device)
    leaves = [tensors[name].requires_grad_() for name in needed.split()]
    problem.loss(**tensors).backward()
    assert called == expected
    assert all(leaf.grad.shape == leaf.shape for leaf in leaves)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_bias_of_float32(problem, autocast):
    """Its gradient is of float32, and passed through the cast; of what is infinite it is 0."""
    wide = problem.bias.float()
    wide[..., 3] = -torch.inf
    wide.requires_grad_()
    with torch.autocast(problem.kernel.device.type, torch.bfloat16, enabled=autocast):
        inputs = [x.float() for x in problem.inputs] if autocast else problem.inputs
        loss = problem.loss(*inputs, wide)
    loss.backward()
    assert wide.grad.dtype == torch.float32
    assert (wide.grad[..., 3] == 0).all()
    problem.check(wide.grad.bfloat16(), bias=wide.detach().bfloat16())


def test_a_table_of_relative_positions_trains(problem):
    """As T5 has it, of float32."""
    device = problem.kernel.device
    distance = torch.arange(KEYS, device=device) - torch.arange(ROWS, device=device)[:, None]
    bucket = distance.clamp(-8, 8) + 8
    table = torch.randn(17, HEADS, device=device)
    leaf = table.clone().requires_grad_()
    problem.of_bias(leaf[bucket].permute(2, 0, 1)[None]).backward()
    bias = table[bucket].permute(2, 0, 1)[None].bfloat16()
    yardstick, oracle = (
        torch.zeros(17, HEADS, device=device, dtype=x.dtype).index_put(
            (bucket,), x[0].permute(1, 2, 0), accumulate=True
        )
        for x in problem.expected(bias=bias)
    )
    assert_within_rule("the table's gradient", leaf.grad, yardstick, oracle)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpoints(problem, use_reentrant):
    leaf = problem.bias.clone().requires_grad_()
    checkpoint(problem.of_bias, leaf, use_reentrant=use_reentrant).backward()
    problem.check(leaf.grad)


def test_saved_tensors_are_six(problem):
    """The bias with q, k, v, out and lse, through hooks as offloading has them."""
    kept, leaf = [], problem.bias.clone().requires_grad_()
    hooks = (lambda x: kept.append(x.shape) or x.cpu()), (lambda x: x.to(problem.kernel.device))
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        options = {"causal": True, "family": problem.kernel.family}
        results = flash_cute.forward(*problem.inputs, bias=leaf, **options)
    assert sorted(kept) == sorted(x.shape for x in (*problem.inputs, leaf, *results))
    problem.check(*torch.autograd.grad(results, leaf, problem.gradients))


def test_a_bias_that_changes(problem):
    bias = problem.bias.clone().requires_grad_() * 1
    loss = problem.of_bias(bias)
    with torch.no_grad():
        bias.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_are_deterministic(problem):
    """Also where q's come from another family's kernels then."""
    found = []
    for _ in range(2):
        leaf = problem.bias.clone().requires_grad_()
        torch.use_deterministic_algorithms(True)
        try:
            flash_cute.attention(*problem.inputs, causal=True, bias=leaf).float().sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
        found.append(leaf.grad)
    assert torch.equal(*found)


def test_flop_counters_count_two_products(problem):
    leaf = problem.bias.clone().requires_grad_()
    with FlopCounterMode(display=False) as counter:
        loss = problem.of_bias(leaf)
        forward = counter.get_total_flops()
        loss.backward()
    assert counter.get_total_flops() - forward == forward == 4 * BATCH * HEADS * ROWS * KEYS * 64


def test_flop_counters_count_a_third_one_for_v(kernel):
    problem = Problem(kernel, (BATCH, HEADS, ROWS, KEYS))
    leaf = problem.bias.requires_grad_()
    problem.inputs[2].requires_grad_()
    with FlopCounterMode(display=False) as counter:
        loss = problem.of_bias(leaf)
        forward = counter.get_total_flops()
        loss.backward()
    assert counter.get_total_flops() - forward == forward * 3 // 2


@pytest.mark.parametrize("function", [flash_cute.forward, torch.ops.flash_cute.forward], ids=["", "operator"])
def test_without_gradients(problem, function):
    leaf = problem.bias.requires_grad_()
    expected = function(*problem.inputs, bias=leaf.detach())
    for without in (torch.inference_mode, torch.no_grad):
        with without():
            results = function(*problem.inputs, bias=leaf)
        for result, same in zip(results, expected, strict=True):
            assert not result.requires_grad
            assert torch.equal(result, same)
    plans = [flash_cute.explain(*problem.inputs, bias=x, backward=True) for x in (leaf, leaf.detach())]
    assert plans[0] == plans[1]


# Transforms of torch.func

SIZES = OF_PAIRS, (2, HEADS, 1, KEYS), (BATCH, 1, ROWS, 1), (1, 1, 1, 1)
# Over which of q and the bias vmap maps.
MAPPED = (0, None), (None, 0), (0, 0)


def mapped_pairs(problem, dims) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """q and the bias of each entry."""
    q, bias = problem.inputs[0], problem.bias
    return [
        (q if dims[0] is None else q.roll(index, 2), bias if dims[1] is None else bias.roll(index, 3) + index)
        for index in range(COUNT)
    ]


def stacked(pairs, dims) -> list[torch.Tensor]:
    return [
        x[0] if dim is None else torch.stack(x) for x, dim in zip(zip(*pairs, strict=True), dims, strict=True)
    ]


def sums_within_rule(found, expected) -> None:
    """But for single numbers, the sums of all, which may be exact by chance."""
    yardstick, oracle = (torch.stack(x) for x in zip(*expected, strict=True))
    if found[0].numel() == 1:
        torch.testing.assert_close(torch.stack([*found]).double(), oracle, rtol=2e-2, atol=0.2)
    else:
        assert_within_rule("dbias", torch.stack([*found]), yardstick, oracle)


@pytest.mark.parametrize("form", ["face", "operator", "sinks", "dropout"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dims", MAPPED, ids=str)
def test_vmap_of_grad(kernel, dims, size, form):
    """A gradient for each entry, also of a bias that all share."""
    problem, options = Problem(kernel, size), {}
    forward = torch.ops.flash_cute.forward if form == "operator" else flash_cute.forward
    if form == "dropout":
        seed = torch.tensor([3, 4], device=kernel.device)
        options = {"dropout_p": 0.25, "dropout_seed": seed}
    elif form == "sinks":
        options = {"sinks": torch.full((HEADS,), -torch.inf, device=kernel.device)}

    def loss(q, bias):
        return problem.loss(q, *problem.inputs[1:], bias, forward, **options)

    pairs = mapped_pairs(problem, dims)
    found = torch.vmap(torch.func.grad(loss, argnums=1), in_dims=dims)(*stacked(pairs, dims))
    options.pop("sinks", None)  # which are none
    expected = [problem.expected((q, *problem.inputs[1:]), bias, **options) for q, bias in pairs]
    sums_within_rule(found, expected)


@pytest.mark.parametrize("form", ["face", "operator", "autograd"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dims", MAPPED, ids=str)
def test_grad_of_vmap(kernel, dims, size, form):
    """The sum over the entries, of a bias that they share."""
    problem = Problem(kernel, size)
    forward = torch.ops.flash_cute.forward if form == "operator" else flash_cute.forward

    def loss(q, bias):
        function = lambda q, bias: problem.loss(q, *problem.inputs[1:], bias, forward)  # noqa: E731
        return torch.vmap(function, in_dims=dims)(q, bias).sum()

    pairs = mapped_pairs(problem, dims)
    q, bias = stacked(pairs, dims)
    if form == "autograd":
        bias.requires_grad_()
        (found,) = torch.autograd.grad(loss(q, bias), bias)
    else:
        found = torch.func.grad(loss, argnums=1)(q, bias)
    expected = [problem.expected((q, *problem.inputs[1:]), bias) for q, bias in pairs]
    if dims[1] is None:
        found, expected = [found], [[sum(x) for x in zip(*expected, strict=True)]]
    sums_within_rule(found, expected)


@pytest.mark.parametrize("form", ["face", "operator", "compiled"])
def test_grad_past_an_inner_transform(problem, form):
    """The bias is a constant for the innermost grad, which gives the loss as a gradient."""
    forward = torch.ops.flash_cute.forward if form == "operator" else flash_cute.forward

    def inner(bias):
        one = torch.ones((), device=problem.kernel.device)
        return torch.func.grad(lambda factor: factor * problem.of_bias(bias, forward=forward))(one)

    gradient = torch.func.grad(inner)
    if form == "compiled":
        gradient = torch.compile(gradient, fullgraph=True, backend="aot_eager")
    problem.check(gradient(problem.bias))


def dual(f, x):
    with forward_ad.dual_level():
        f(forward_ad.make_dual(x, x))


def second(f, x):
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(f(x), x, create_graph=True)
    gradient.float().sum().backward()


REFUSED = {
    "second": (second, "second derivatives"),
    "grad_grad": (
        lambda f, x: torch.func.grad(lambda y: torch.func.grad(f)(y).float().sum())(x),
        "second derivatives",
    ),
    "vmap_grad_grad": (
        lambda f, x: torch.vmap(torch.func.grad(lambda y: torch.func.grad(f)(y).float().sum()))(x[None]),
        "second derivatives",
    ),
    "jvp": (lambda f, x: torch.func.jvp(f, (x,), (x,)), "forward-mode"),
    "jvp_vmap": (lambda f, x: torch.func.jvp(torch.vmap(f), (x[None],), (x[None],)), "forward-mode"),
    "vmap_jvp": (lambda f, x: torch.vmap(lambda a: torch.func.jvp(f, (a,), (a,)))(x[None]), "forward-mode"),
    "dual": (dual, "forward-mode"),
}


@pytest.mark.parametrize(("differentiate", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_first_gradient_is_refused(problem, differentiate, words):
    with pytest.raises(NotImplementedError, match=rf"^flash_cute\.\w+: there (is|are) no {words}"):
        differentiate(problem.of_bias, problem.bias)


def test_a_graph_of_gradients_may_be_made(problem):
    leaf = problem.bias.clone().requires_grad_()
    problem.check(*torch.autograd.grad(problem.of_bias(leaf), leaf, create_graph=True))


# Compilers and exports


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(problem, backend):
    def step(*tensors):
        return flash_cute.forward(*tensors[:3], causal=True, bias=tensors[3], family=problem.kernel.family)

    leaf = problem.bias.clone().requires_grad_()
    results = torch.compile(step, fullgraph=True, backend=backend)(*problem.inputs, leaf)
    problem.check(*torch.autograd.grad(results, leaf, problem.gradients))


@pytest.mark.parametrize("needed", ["bias", "all"])
def test_compiled_graphs_hold_inner_operators_alone(problem, needed):
    graphs, backend = compiled_graphs()
    leaves = [x.detach().requires_grad_(needed == "all") for x in problem.inputs]
    leaves.append(problem.bias.clone().requires_grad_())
    torch.compile(problem.loss, fullgraph=True, backend=backend)(*leaves).backward()
    problem.check(leaves[3].grad)
    of_backward = {"flash_cute._bias_gradient.default"}
    of_backward |= {"flash_cute._backward.default"} if needed == "all" else set()
    assert graphs == [{"flash_cute._forward.default"}, of_backward]


def test_dynamic_shapes_compile_once(kernel):
    graphs, backend = compiled_graphs()

    def loss(q, k, v, bias):
        out, lse = flash_cute.forward(q * 1.5, k, v, bias=bias, family=kernel.family)
        return out.float().square().sum() + lse.clamp(min=-10).sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=backend)
    for batch, rows, keys in ((5, 50, 60), (6, 70, 40), (3, 33, 190)):
        inputs = make_inputs(Shape(batch, 6, 3, rows, keys, 64), torch.bfloat16, kernel.device)
        bias = torch.randn(1, 6, rows, keys, device=kernel.device)  # float32, which is cast
        gradients = []
        for function in (compiled, loss):
            leaf = bias.clone().requires_grad_()
            function(*inputs, leaf).backward()
            gradients.append(leaf.grad)
        torch.testing.assert_close(*gradients, rtol=2e-2, atol=2e-2)
    assert len(graphs) == 2


@pytest.mark.parametrize(
    ("transform", "maps"),
    [
        (torch.func.grad, False),
        (lambda f: torch.vmap(torch.func.grad(f)), True),
        (lambda f: torch.func.grad(lambda x: torch.vmap(f)(x).sum()), True),
    ],
    ids=["grad", "vmap_grad", "grad_vmap"],
)
def test_compiled_transforms(problem, transform, maps):
    bias = torch.stack([problem.bias, problem.bias.roll(1, 3)]) if maps else problem.bias
    compiled = torch.compile(transform(problem.of_bias), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(bias), transform(problem.of_bias)(bias))


@pytest.mark.parametrize("strict", [False, True])
def test_exported_models_are_trained(problem, strict):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(problem.bias.float())

        def forward(self, q, k, v):
            return problem.loss(q, k, v, self.bias)

    program = torch.export.export(Model(), problem.inputs, strict=strict).module()
    program(*problem.inputs).backward()
    problem.check(program.bias.grad.bfloat16())


def test_opcheck(kernel):
    """Of the public operator with gradients, and of the gradient's own."""
    shape = Shape(4, 4, 2, 30, 40, 40)
    problem = Problem(kernel, (2, 4, 1, 40), shape)
    options = {"softcap": 5.0, "bias_scale": 2.0, "family": kernel.family}
    public = torch.ops.flash_cute.forward.default
    leaf = problem.bias.clone().requires_grad_()
    torch.library.opcheck(public, (*problem.inputs, True), options | {"bias": leaf})
    dout, dlse = problem.gradients
    for bias, needs_dv in ((problem.bias, False), (Problem(kernel, (4, 4, 30, 40), shape).bias, True)):
        options["bias"] = bias
        results = torch.ops.flash_cute._forward(*problem.inputs, True, **options)
        for given in ((dout, dlse), (None, dlse), (dout, None)):
            arguments = *given, *problem.inputs, *results, True
            op = torch.ops.flash_cute._bias_gradient.default
            torch.library.opcheck(op, arguments, options | {"needs_dv": needs_dv})


@pytest.mark.gpu
def test_a_training_step_in_a_cuda_graph(problem):
    leaf = problem.bias.clone().requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        problem.of_bias(leaf).backward()
    torch.cuda.current_stream().wait_stream(stream)
    leaf.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        problem.of_bias(leaf).backward()
    with torch.no_grad():
        leaf.copy_(problem.bias.roll(1, 3))
    leaf.grad.zero_()
    graph.replay()
    problem.check(leaf.grad, bias=problem.bias.roll(1, 3))


class Evoformer(torch.nn.Module):
    """A block of AlphaFold 2's: rows of an alignment attend with a bias of their pairs, which they change."""

    def __init__(self, attention):
        super().__init__()
        self.attention, self.heads = attention, 4
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for width in (64, 16))
        self.of_rows = torch.nn.Linear(64, 4 * 64)  # q, k, v and a gate
        self.bias = torch.nn.Linear(16, self.heads, bias=False)
        self.out, self.of_pairs = torch.nn.Linear(64, 64), torch.nn.Linear(64, 16)

    def forward(self, rows, pairs):
        q, k, v, gate = self.of_rows(self.norms[0](rows)).unflatten(-1, (4, self.heads, -1)).unbind(-3)
        bias = self.bias(self.norms[1](pairs)).permute(2, 0, 1)[None]
        found = self.attention(*(x.transpose(1, 2) for x in (q, k, v)), bias).transpose(1, 2)
        rows = rows + self.out((found * gate.sigmoid()).flatten(-2))
        of_each = self.of_pairs(rows)
        return rows, pairs + torch.einsum("nic,njc->ijc", of_each, of_each) / len(rows)


def test_an_evoformer_block_trains(device):
    """With the losses of PyTorch's maths; the bias's own weights change, too."""

    def eager(q, k, v, bias):
        return (q @ k.mT / q.shape[-1] ** 0.5 + bias).softmax(-1) @ v

    def ours(q, k, v, bias):
        return flash_cute.attention(q, k, v, bias=bias)

    rows, pairs, target = (
        torch.randn(*sizes, device=device) for sizes in ((6, 33, 64), (33, 33, 16), (6, 33, 64))
    )
    losses, models = [], [Evoformer(eager).to(device)]
    models.append(Evoformer(ours).to(device))
    models[1].load_state_dict(models[0].state_dict())
    before = models[1].bias.weight.detach().clone()
    for model in models:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(8):
            x, y = rows, pairs
            for _ in range(2):
                x, y = model(x, y)
            loss = (x - target).square().mean() + y.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[1][-1] < 0.9 * losses[1][0]
    assert (models[1].bias.weight - before).abs().max() > 1e-2
