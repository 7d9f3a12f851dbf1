"""Gradients under what PyTorch does around them: transforms, compilers, checkpoints, hooks, autocast."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.cases import BATCHES, MASKS, Sequence, Shape, make_gradients, make_inputs, make_ragged
from support.graphs import compiled_graphs
from support.tolerance import assert_gradients
from torch.autograd import forward_ad
from torch.export.experimental import _export_forward_backward
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flash_cute

SHAPE = Shape(2, 4, 2, 50, 70, 64)
CAUSAL = MASKS["causal"]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Problem:
    """q, k and v, gradients of out and lse, and the number whose gradient that makes."""

    def __init__(self, kernel, shape: Shape = SHAPE):
        self.kernel = kernel
        self.inputs = make_inputs(shape, torch.bfloat16, kernel.device)
        self.gradients = make_gradients(self.inputs[0])

    def loss(self, q, k, v, forward=flash_cute.forward) -> torch.Tensor:
        out, lse = forward(q, k, v, causal=True, deterministic=True, family=self.kernel.family)
        dout, dlse = self.gradients
        return (out.float() * dout).sum() + (lse * dlse).sum()

    def leaves(self) -> list[torch.Tensor]:
        return [x.detach().requires_grad_() for x in self.inputs]

    def check(self, gradients, inputs=None) -> None:
        inputs = inputs or self.inputs
        laid_out = [torch.empty_like(x).copy_(dx) for x, dx in zip(inputs, gradients, strict=True)]
        assert_gradients(laid_out, *inputs, *self.gradients, CAUSAL)


@pytest.fixture
def problem(kernel) -> Problem:
    return Problem(kernel)


def stacked(tensors, count: int = 2) -> list[torch.Tensor]:
    """Different entries along a new first dimension: the tensors, and them with the batch turned round."""
    return [torch.stack([x, x.flip(0)][:count]) for x in tensors]


# Eager autograd


def test_backward(problem):
    leaves = problem.leaves()
    problem.loss(*leaves).backward()
    problem.check([x.grad for x in leaves])


def test_expanded_gradients(problem):
    """As sum() gives them, and nothing for the LSE."""
    q, k, v = leaves = problem.leaves()
    flash_cute.attention(q, k, v, causal=True, family=problem.kernel.family).sum().backward()
    ones = torch.ones_like(q).detach()
    assert_gradients([x.grad for x in leaves], *problem.inputs, ones, None, CAUSAL)


def test_retained_graphs_and_accumulation(problem):
    leaves = problem.leaves()
    loss = problem.loss(*leaves)
    loss.backward(retain_graph=True)
    once = [x.grad.clone() for x in leaves]
    loss.backward()
    for leaf, gradient in zip(leaves, once, strict=True):
        assert torch.equal(leaf.grad, 2 * gradient)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_nothing_comes_back(problem):
    """Where what follows gives neither result a gradient."""

    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out, lse):
            return out.sum() + lse.sum()

        @staticmethod
        def backward(ctx, gradient):
            return None, None

    leaves = problem.leaves()
    Stop.apply(*flash_cute.forward(*leaves, family=problem.kernel.family)).backward()
    assert all(leaf.grad is None for leaf in leaves)


def test_hooks(problem):
    leaves = problem.leaves()
    seen = []
    for leaf in leaves:
        leaf.register_hook(lambda gradient: seen.append(gradient.shape) or gradient * 2)
    problem.loss(*leaves).backward()
    plain = problem.leaves()
    problem.loss(*plain).backward()
    assert sorted(seen) == sorted(x.shape for x in leaves)
    assert all(torch.equal(x.grad, 2 * y.grad) for x, y in zip(leaves, plain, strict=True))


def test_gradients_into_views(problem):
    """q, k and v are views of one leaf, as of a projection of all three."""
    kernel = problem.kernel
    x = torch.randn(2, 50, 8, 64, device=kernel.device).bfloat16().requires_grad_()
    views = x.transpose(1, 2).split((4, 2, 2), dim=1)
    out, lse = flash_cute.forward(*views, causal=True, family=kernel.family)
    dout, dlse = make_gradients(views[0].detach())
    torch.autograd.backward((out, lse), (dout, dlse))
    parts = x.grad.transpose(1, 2).split((4, 2, 2), dim=1)
    inputs = [view.detach() for view in views]
    laid_out = [torch.empty_like(x).copy_(dx) for x, dx in zip(inputs, parts, strict=True)]
    assert_gradients(laid_out, *inputs, dout, dlse, CAUSAL)


def test_saved_tensors_are_five(problem):
    """q, k, v, out and lse, through hooks as offloading has them."""
    kept = []

    def pack(tensor):
        kept.append(tensor.shape)
        return tensor.cpu()

    leaves = problem.leaves()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x.to(problem.kernel.device)):
        out, lse = flash_cute.forward(*leaves, causal=True, family=problem.kernel.family)
    assert sorted(kept) == sorted(x.shape for x in (*leaves, out, lse))
    torch.autograd.backward((out, lse), problem.gradients)
    problem.check([x.grad for x in leaves])


@pytest.mark.parametrize("changed", ["q", "k", "v", "out", "lse"])
def test_a_saved_tensor_that_changes(problem, changed):
    tensors = dict(zip("qkv", (x * 1 for x in problem.leaves()), strict=True))
    out, lse = flash_cute.forward(*tensors.values(), family=problem.kernel.family)
    loss = out.float().sum() + lse.sum()
    with torch.no_grad():
        (tensors | {"out": out, "lse": lse})[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpoints(problem, use_reentrant):
    leaves = problem.leaves()
    checkpoint(problem.loss, *leaves, use_reentrant=use_reentrant).backward()
    plain = problem.leaves()
    problem.loss(*plain).backward()
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(leaves, plain, strict=True))


def test_inference_mode_and_no_grad(problem):
    leaves = problem.leaves()
    for without in (torch.inference_mode, torch.no_grad):
        with without():
            out, lse = flash_cute.forward(*leaves, family=problem.kernel.family)
        assert not out.requires_grad
        assert not lse.requires_grad


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(problem, inside):
    """Inputs of float32 get gradients of float32, which passed through the cast."""
    leaves = [x.float().requires_grad_() for x in problem.inputs]
    with torch.autocast(problem.kernel.device.type, torch.bfloat16):
        loss = problem.loss(*leaves)
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    assert all(x.grad.dtype == torch.float32 for x in leaves)
    problem.check([x.grad for x in leaves])


def test_deterministic_algorithms_are_asked_for(problem, monkeypatch):
    """By PyTorch's switch at the time of the forward or of the backward, as by the argument."""
    from flash_cute._torch import ops

    asked = []
    backward = ops._backward

    def spied(*args, **options):
        asked.append(options.get("deterministic", False))
        return backward(*args, **options)

    monkeypatch.setattr(ops, "_backward", spied)
    q, k, v = problem.leaves()
    cases = (False, False, False), (True, False, False), (False, True, False), (False, False, True)
    try:
        for switch, option, switch_then in cases:
            torch.use_deterministic_algorithms(switch)
            out = flash_cute.attention(q, k, v, deterministic=option, family=problem.kernel.family)
            torch.use_deterministic_algorithms(switch_then)
            out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [False, True, True, True]


def test_flop_counters_count_five_products(kernel):
    q, k, v = make_inputs(SHAPE, torch.bfloat16, kernel.device)
    with FlopCounterMode(display=False) as counter:
        out = flash_cute.attention(q.requires_grad_(), k, v, family=kernel.family)
        forward = counter.get_total_flops()
        out.sum().backward()
    assert counter.get_total_flops() - forward == forward * 5 // 2 == 10 * 2 * 4 * 50 * 70 * 64
    batch = make_ragged(BATCHES["equal"], (4, 2), 64, torch.bfloat16, kernel.device, True, margins=(0, 0))
    q = batch.q.detach().requires_grad_()
    out = flash_cute.attention_varlen(q, batch.k, batch.v, **batch.lengths, family=kernel.family)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 10 * 4 * 64 * (3 * 128) * 256


# Transforms of torch.func


def test_func_grad(problem):
    problem.check(torch.func.grad(problem.loss, argnums=(0, 1, 2))(*problem.inputs))


@pytest.mark.parametrize("form", ["face", "operator", "compiled"])
def test_func_grad_past_an_inner_transform(problem, form):
    """q, k and v are constants for the innermost grad, which gives the loss as a gradient."""

    forward = torch.ops.flash_cute.forward if form == "operator" else flash_cute.forward

    def inner(*qkv):
        one = torch.ones((), device=problem.kernel.device)
        return torch.func.grad(lambda factor: factor * problem.loss(*qkv, forward))(one)

    gradients = torch.func.grad(inner, argnums=(0, 1, 2))
    if form == "compiled":
        gradients = torch.compile(gradients, fullgraph=True, backend="aot_eager")
    problem.check(gradients(*problem.inputs))


@pytest.mark.parametrize("dims", [(0, 0, 0), (0, None, None), (None, 0, 0)], ids=str)
@pytest.mark.parametrize("bare", [False, True], ids=["face", "operator"])
def test_vmap_of_grad(problem, dims, bare):
    """One call of the backward for all entries, the same as one by one."""

    def loss(q, k, v):
        if not bare:
            return problem.loss(q, k, v)
        options = {"deterministic": True, "family": problem.kernel.family}
        out, lse = torch.ops.flash_cute.forward(q, k, v, True, **options)
        return (out.float() * problem.gradients[0]).sum() + (lse * problem.gradients[1]).sum()

    mapped = [
        x if dim is None else y
        for x, y, dim in zip(problem.inputs, stacked(problem.inputs), dims, strict=True)
    ]
    grad = torch.func.grad(loss, argnums=(0, 1, 2))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = torch.vmap(grad, in_dims=dims)(*mapped)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["flash_cute::_backward"] <= 3  # named once for each level of the dispatcher
    for index in range(2):
        entry = [x if dim is None else x[index] for x, dim in zip(mapped, dims, strict=True)]
        problem.check(
            [x[index] for x in found],
            [torch.empty_like(x).copy_(y) for x, y in zip(problem.inputs, entry, strict=True)],
        )


@pytest.mark.parametrize("bare", [False, True], ids=["face", "operator"])
@pytest.mark.parametrize("wanted", ["out", "lse", "both"])
def test_backward_of_vmap(problem, wanted, bare):
    """By autograd and by torch.func alike; K and V of all entries are the same."""
    q, k, v = problem.inputs
    dout, dlse = problem.gradients
    qs = torch.stack([q, q.flip(0)])

    def loss(qs, k, v):
        function = torch.ops.flash_cute.forward if bare else flash_cute.forward
        options = {"deterministic": True, "family": problem.kernel.family}
        out, lse = torch.vmap(lambda x: function(x, k, v, True, **options))(qs)
        losses = {"out": (out.float() * dout).sum(), "lse": (lse * dlse).sum()}
        return sum(losses.values()) if wanted == "both" else losses[wanted]

    leaves = [x.detach().requires_grad_() for x in (qs, k, v)]
    loss(*leaves).backward()
    gradients = {"out": (dout, None), "lse": (None, dlse), "both": (dout, dlse)}[wanted]
    expected = [problem.kernel.backward(x, k, v, *gradients, causal=True, deterministic=True) for x in qs]
    for index in range(2):
        assert torch.equal(leaves[0].grad[index], expected[index][0])
    for side in (1, 2):
        torch.testing.assert_close(leaves[side].grad, expected[0][side] + expected[1][side])
    for leaf, gradient in zip(leaves, torch.func.grad(loss, argnums=(0, 1, 2))(qs, k, v), strict=True):
        torch.testing.assert_close(leaf.grad, gradient)


def test_vmap_of_lengths_and_gradients(kernel):
    q, k, v = (
        torch.stack(x)
        for x in zip(*(make_inputs(SHAPE, torch.bfloat16, kernel.device) for _ in range(3)), strict=True)
    )
    used = torch.tensor([[50, 3], [0, 40], [21, 49]], dtype=torch.int32, device=kernel.device)

    def loss(q, k, v, used):
        options = {"causal": True, "seqused_q": used, "deterministic": True, "family": kernel.family}
        return flash_cute.attention(q, k, v, **options).float().square().sum()

    mapped = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v, used)
    for index in range(3):
        single = torch.func.grad(loss, argnums=(0, 1, 2))(q[index], k[index], v[index], used[index])
        assert all(torch.equal(x[index], y) for x, y in zip(mapped, single, strict=True))


def test_jacrev(kernel):
    q, k, v = make_inputs(Shape(1, 2, 1, 2, 3, 8), torch.bfloat16, kernel.device)
    options = {"deterministic": True, "family": kernel.family}
    jacobian = torch.func.jacrev(lambda x: flash_cute.attention(x, k, v, **options))(q)
    assert jacobian.shape == (*q.shape, *q.shape)
    for index in (0, 13, 31):
        dout = torch.zeros(q.numel(), device=q.device, dtype=q.dtype)
        dout[index] = 1
        expected = kernel.backward(q, k, v, dout.view(q.shape), None, deterministic=True)[0]
        assert torch.equal(jacobian.flatten(0, 3)[index], expected)


def test_vmap_of_packed_gradients_is_refused(kernel):
    batch = make_ragged(BATCHES["unequal"], (4, 2), 64, torch.bfloat16, kernel.device, packed=True)

    def loss(q):
        return flash_cute.attention_varlen(q, batch.k, batch.v, **batch.lengths, family=kernel.family).sum()

    assert torch.func.grad(loss)(batch.q).shape == batch.q.shape
    with pytest.raises(NotImplementedError, match=r"^flash_cute\.attention_varlen: vmap can't map packed"):
        torch.vmap(torch.func.grad(loss))(torch.stack([batch.q, batch.q]))


def second(problem, x):
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(problem.loss(x, *problem.inputs[1:]), x, create_graph=True)
    gradient.float().sum().backward()


def second_of_dout(problem, x):
    x = x.clone().requires_grad_()
    out = flash_cute.attention(x, *problem.inputs[1:], family=problem.kernel.family)
    dout = torch.ones_like(out).requires_grad_()
    (gradient,) = torch.autograd.grad(out, x, dout, create_graph=True)
    gradient.float().sum().backward()


def dual(problem, x):
    with forward_ad.dual_level():
        problem.loss(forward_ad.make_dual(x, x), *problem.inputs[1:])


def dual_gradient(problem, x):
    x = x.clone().requires_grad_()
    out = flash_cute.attention(x, *problem.inputs[1:], family=problem.kernel.family)
    with forward_ad.dual_level():
        torch.autograd.grad(out, x, forward_ad.make_dual(out.detach(), out.detach()))


def of_loss(transform):
    """transform(f, x) of the loss as a function of q."""
    return lambda problem, x: transform(lambda q: problem.loss(q, *problem.inputs[1:]), x)


REFUSED = {
    "second": (second, "second derivatives"),
    "second_of_dout": (second_of_dout, "second derivatives"),
    "grad_grad": (
        of_loss(lambda f, x: torch.func.grad(lambda y: torch.func.grad(f)(y).float().sum())(x)),
        "second derivatives",
    ),
    "vmap_grad_grad": (
        of_loss(
            lambda f, x: torch.vmap(torch.func.grad(lambda y: torch.func.grad(f)(y).float().sum()))(x[None])
        ),
        "second derivatives",
    ),
    "hessian": (of_loss(lambda f, x: torch.func.hessian(f)(x)), "forward-mode"),
    "jacrev_jacrev": (of_loss(lambda f, x: torch.func.jacrev(torch.func.jacrev(f))(x)), "second derivatives"),
    "jvp": (of_loss(lambda f, x: torch.func.jvp(f, (x,), (x,))), "forward-mode"),
    "jvp_vmap": (of_loss(lambda f, x: torch.func.jvp(torch.vmap(f), (x[None],), (x[None],))), "forward-mode"),
    "vmap_jvp": (
        of_loss(lambda f, x: torch.vmap(lambda a: torch.func.jvp(f, (a,), (a,)))(x[None])),
        "forward-mode",
    ),
    "jacfwd": (of_loss(lambda f, x: torch.func.jacfwd(f)(x)), "forward-mode"),
    "dual": (dual, "forward-mode"),
    "dual_gradient": (dual_gradient, "second derivatives"),
}


@pytest.mark.parametrize(("differentiate", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_first_gradient_is_refused(kernel, differentiate, words):
    problem = Problem(kernel, Shape(1, 2, 1, 2, 3, 8))
    with pytest.raises(NotImplementedError, match=rf"^flash_cute\.\w+: there (is|are) no {words}"):
        differentiate(problem, problem.inputs[0])


def test_a_graph_of_gradients_may_be_made(problem):
    """Only who goes on differentiates twice."""
    leaves = problem.leaves()
    problem.check(torch.autograd.grad(problem.loss(*leaves), leaves, create_graph=True))


# Compilers and exports


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_compiled(problem, backend):
    leaves = problem.leaves()
    torch.compile(problem.loss, fullgraph=True, backend=backend)(*leaves).backward()
    problem.check([x.grad for x in leaves])


def test_compiled_under_autocast(problem):
    """Within the graph, as a training step has it, and around it."""

    def step(*leaves):
        with torch.autocast(problem.kernel.device.type, torch.bfloat16):
            return problem.loss(*leaves)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    leaves = [x.float().requires_grad_() for x in problem.inputs]
    with torch.autocast(problem.kernel.device.type, torch.bfloat16):
        around = torch.compile(problem.loss, fullgraph=True, backend="aot_eager")(*leaves)
    assert torch.equal(around, compiled(*leaves))
    compiled(*leaves).backward()
    problem.check([x.grad for x in leaves])


def test_compiled_by_inductor_alone(problem):
    """Without other operators, whose kernels take the CPU's compiler half a minute."""
    leaves = problem.leaves()
    options = {"causal": True, "family": problem.kernel.family}
    results = torch.compile(flash_cute.forward, fullgraph=True)(*leaves, **options)
    problem.check(torch.autograd.grad(results, leaves, problem.gradients))


def test_compiled_graphs_hold_inner_operators_alone(problem):
    graphs, backend = compiled_graphs()
    torch.compile(problem.loss, fullgraph=True, backend=backend)(*problem.leaves()).backward()
    assert graphs == [{"flash_cute._forward.default"}, {"flash_cute._backward.default"}]


def test_dynamic_shapes_compile_once(kernel):
    graphs, backend = compiled_graphs()

    def loss(q, k, v):
        window = q.shape[2] // 2, 0
        out, lse = flash_cute.forward(q * 1.5, k, v, window=window, deterministic=True, family=kernel.family)
        return out.float().square().sum() + lse.clamp(min=-10).sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=backend)
    for batch, seqlen_q, seqlen_k in ((5, 130, 150), (7, 40, 200), (2, 77, 31), (5, 260, 260)):
        inputs = make_inputs(Shape(batch, 6, 3, seqlen_q, seqlen_k, 64), torch.bfloat16, kernel.device)
        found, expected = ([x.detach().requires_grad_() for x in inputs] for _ in range(2))
        compiled(*found).backward()
        loss(*expected).backward()
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x.grad, y.grad)
    assert len(graphs) == 2


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_unequal_lengths_compile_once(kernel, packed):
    graphs, backend = compiled_graphs()
    function = flash_cute.attention_varlen if packed else flash_cute.attention

    def loss(q, k, v, lengths):
        options = {"causal": True, "deterministic": True, "family": kernel.family}
        return function(q, k, v, **lengths, **options).float().square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=backend)
    for count in (4, 3, 2):
        sequences = tuple(Sequence(s.rows_q, s.rows_k, 2, 60, 1) for s in BATCHES["used"][:count])
        batch = make_ragged(sequences, (6, 3), 64, torch.bfloat16, kernel.device, packed)
        tensors = batch.q, batch.k, batch.v
        found, expected = ([x.detach().requires_grad_() for x in tensors] for _ in range(2))
        compiled(*found, batch.lengths).backward()
        loss(*expected, batch.lengths).backward()
        assert all(torch.equal(x.grad, y.grad) for x, y in zip(found, expected, strict=True))
    assert len(graphs) == 2


def test_nested_tensors_compile(kernel):
    def loss(q, k, v):
        out = flash_cute.attention(q, k, v, causal=True, deterministic=True, family=kernel.family)
        return out.values().float().square().sum()

    offsets = torch.tensor([0, 30, 35, 125], device=kernel.device)
    values = make_inputs(Shape(1, 4, 2, 125, 125, 64), torch.bfloat16, kernel.device)
    gradients = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [x[0].transpose(0, 1).detach().requires_grad_() for x in values]
        nested = (torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2) for x in leaves)
        function(*nested).backward()
        gradients.append([x.grad for x in leaves])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    ("transform", "maps"),
    [
        (lambda f: torch.func.grad(f, argnums=(0, 1, 2)), False),
        (lambda f: torch.vmap(torch.func.grad(f, argnums=(0, 1, 2))), True),
        (lambda f: torch.func.grad(lambda *x: torch.vmap(f)(*x).sum(), argnums=(0, 1, 2)), True),
    ],
    ids=["grad", "vmap_grad", "grad_vmap"],
)
def test_compiled_transforms(problem, transform, maps):
    inputs = stacked(problem.inputs) if maps else problem.inputs
    compiled = torch.compile(transform(problem.loss), backend="aot_eager", fullgraph=True)
    for found, expected in zip(compiled(*inputs), transform(problem.loss)(*inputs), strict=True):
        assert torch.equal(found, expected)


def test_backward_of_a_compiled_vmap(problem):
    compiled = torch.compile(lambda *x: torch.vmap(problem.loss)(*x).sum(), backend="aot_eager")
    gradients = []
    for function in (compiled, lambda *x: torch.vmap(problem.loss)(*x).sum()):
        leaves = [x.requires_grad_() for x in stacked(problem.inputs)]
        function(*leaves).backward()
        gradients.append([x.grad for x in leaves])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.parametrize("strict", [False, True])
def test_exported_models_are_trained(problem, strict):
    """The exported program has the public operator where autograd is to come by, and its joint graph not."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(64, device=problem.kernel.device).bfloat16())

        def forward(self, q, k, v):
            return problem.loss(q * self.weight, k, v)

    model = Model()
    program = torch.export.export(model, problem.inputs, strict=strict)
    trained = program.module()
    trained(*problem.inputs).backward()
    model(*problem.inputs).backward()
    assert torch.equal(trained.weight.grad, model.weight.grad)
    joint = _export_forward_backward(program)
    targets = {str(node.target) for node in joint.graph.nodes if "flash_cute" in str(node.target)}
    assert targets == {"flash_cute._forward.default", "flash_cute._backward.default"}


@pytest.mark.parametrize("packed", [True, False, None], ids=["packed", "padded", "dense"])
def test_opcheck(kernel, packed):
    """Of the public operators with gradients, and of the backward's own."""
    options = {"softmax_scale": 0.2, "family": kernel.family}
    if packed is None:
        tensors, offsets = make_inputs(Shape(2, 4, 2, 30, 40, 40), torch.bfloat16, kernel.device), []
    else:
        batch = make_ragged(
            BATCHES["used and left padding"], (4, 2), 40, torch.bfloat16, kernel.device, packed
        )
        tensors = [x.nan_to_num() for x in (batch.q, batch.k, batch.v)]
        options |= batch.lengths
        offsets = [options.pop(name) for name in ("cu_seqlens_q", "cu_seqlens_k") if name in options]
    ops = torch.ops.flash_cute
    forward, backward = (ops.forward_varlen, ops._backward_varlen) if packed else (ops.forward, ops._backward)
    leaves = [x.detach().requires_grad_() for x in tensors]
    torch.library.opcheck(forward.default, (*leaves, *offsets, True), dict(options, deterministic=True))
    out, lse = (x.detach() for x in forward(*tensors, *offsets, True, **options))
    for dout, dlse, needs in (
        (out, lse, {}),
        (None, lse, {"needs_dq": False}),
        (out, None, {"needs_dkv": False}),
    ):
        arguments = dout, dlse, *tensors, out, lse, *offsets, True
        torch.library.opcheck(backward.default, arguments, options | needs | {"deterministic": True})


# CUDA graphs


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("total", [300, 3600])
def test_a_training_step_in_a_cuda_graph(kernel, total, packed, deterministic):
    """Forward, backward and the optimizer's step, replayed with other inputs; packed, with other offsets."""
    options = {"causal": True, "deterministic": deterministic, "family": kernel.family}
    heads = 4
    x = torch.randn(total, heads, 64, dtype=torch.bfloat16, device=kernel.device)
    offsets = torch.tensor([0, total // 3, total // 2, total], dtype=torch.int32, device=kernel.device)
    weights = torch.ones(3, heads, 64, dtype=torch.bfloat16, device=kernel.device)

    def step(weights, optimizer):
        q, k, v = (x * weight for weight in weights)
        if packed:
            out, lse = flash_cute.forward_varlen(q, k, v, offsets, **options)
        else:
            out, lse = flash_cute.forward(*(y[None].transpose(1, 2) for y in (q, k, v)), **options)
        optimizer.zero_grad(set_to_none=False)
        (out.float().square().mean() + lse.mean()).backward()
        optimizer.step()

    def trained():
        leaf = weights.clone().requires_grad_()
        leaf.grad = torch.zeros_like(leaf)
        return leaf, torch.optim.SGD([leaf], lr=0.1)

    captured, eager = trained(), trained()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(*captured)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(*captured)
    with torch.no_grad():
        captured[0].copy_(weights)
    for ends in ([0, total // 3, total // 2, total], [0, 7, total - 50, total]):
        x.normal_()
        offsets.copy_(torch.tensor(ends, dtype=torch.int32))
        graph.replay()
        step(*eager)
        same = torch.equal if deterministic else partial(torch.allclose, rtol=0.02, atol=0.002)
        assert same(captured[0], eager[0])


# What explain tells


@pytest.mark.parametrize("mask", [MASKS["full"], CAUSAL, MASKS["window_symmetric"]])
def test_explain_counts_the_work(kernel, mask):
    q, k, v = make_inputs(SHAPE, torch.bfloat16, kernel.device)
    plan = flash_cute.explain(q, k, v, **mask.options, backward=True, family=kernel.family)
    assert plan["backward"]
    assert plan["flops"] == 10 * 64 * 2 * 4 * mask.visible(50, 70).sum().item()
    assert plan["bytes"] == 2 * (4 * q.numel() + 4 * k.numel()) + 4 * q[..., 0].numel()
    assert plan["workspace_bytes"] >= 0
    assert str(plan)
    assert not flash_cute.explain(q, k, v, **mask.options, family=kernel.family)["backward"]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("name", ["unequal", "used and left padding", "no sequence"])
def test_explain_counts_the_work_of_unequal_lengths(kernel, name, packed):
    batch = make_ragged(BATCHES[name], (4, 2), 64, torch.bfloat16, kernel.device, packed)
    plan = flash_cute.explain(
        *(batch.q, batch.k, batch.v), **batch.lengths, causal=True, backward=True, family=kernel.family
    )
    counts = [(s.queries.stop, max(0, s.keys.stop - s.keys.start)) for s in BATCHES[name]]
    assert plan["flops"] == 10 * 64 * 4 * sum(CAUSAL.visible(*count).sum().item() for count in counts)
    read = sum(4 * rows * (3 * 64 * 2 + 4) + 2 * 2 * keys * 64 * 2 for rows, keys in counts)
    assert plan["bytes"] == read + 2 * (batch.q.numel() + batch.k.numel() + batch.v.numel())
