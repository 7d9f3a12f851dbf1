"""Masks, biases, slopes, caps and dropout under what PyTorch does to calls: vmap, autocast, tracing."""

from __future__ import annotations

import pytest
import torch
from support.cases import BATCHES, Shape, make_inputs, make_ragged
from torch._inductor import config as inductor_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import flash_cute

COUNT, BATCH, HEADS, ROWS, KEYS = 3, 4, 4, 70, 90
SHAPE = Shape(BATCH, HEADS, 2, ROWS, KEYS, 64)
SEED = (11, -5)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make(name: str, shape: tuple[int, ...], device) -> torch.Tensor:
    """A tensor for the argument of that name."""
    numbers = torch.randn(shape, device=device)
    return {"mask": numbers > -0.5, "bias": numbers, "alibi_slopes": numbers.abs()}[name]


def all_of_them(device) -> dict[str, torch.Tensor | float]:
    """Each of the arguments, alike for no two heads."""
    tensors = {"mask": (BATCH, 1, ROWS, KEYS), "bias": (2, HEADS, ROWS, KEYS), "alibi_slopes": (BATCH, HEADS)}
    given = {name: make(name, shape, device) for name, shape in tensors.items()}
    return given | {"softcap": 5.0, "dropout_p": 0.3, "dropout_seed": torch.tensor(SEED, device=device)}


def assert_close(results, expected, **tolerance) -> None:
    for result, same in zip(results, expected, strict=True):
        torch.testing.assert_close(result, same, **tolerance)


def is_deterministic(family: str | None) -> bool:
    """May gradients of such calls be so? sm90 adds them up in any order, and refuses the option."""
    return family != "sm90"


def assert_close_gradients(family: str | None, results, expected) -> None:
    tolerance = {} if is_deterministic(family) else {"rtol": 2e-2, "atol": 1e-2}
    assert_close(results, expected, **tolerance)


def gradients(function, inputs, *others) -> tuple[torch.Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, lse = function(*leaves, *others)
    (out.float().square().sum() + lse.exp().sum()).backward()
    return tuple(x.grad for x in leaves)


class Arguments(TorchDispatchMode):
    """Keeps what _forward is called with."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.flash_cute._forward.default:
            self.calls.append(kwargs)
        return op(*args, **(kwargs or {}))


# vmap

# The argument, its shape in each entry, and how many entries the one call below has where vmap maps over it,
# or not.
FOLDS = [
    ("mask", (1, 1, 1, KEYS), COUNT * BATCH, 1),
    ("mask", (1, HEADS, ROWS, KEYS), COUNT * BATCH, 1),
    ("mask", (BATCH, 1, ROWS, KEYS), COUNT * BATCH, COUNT * BATCH),
    ("bias", (1, 1, 1, KEYS), COUNT, 1),
    ("bias", (2, HEADS, ROWS, KEYS), 2 * COUNT, 2 * COUNT),
    ("bias", (BATCH, 1, ROWS, 1), COUNT * BATCH, COUNT * BATCH),
    ("alibi_slopes", (HEADS,), COUNT * BATCH, HEADS),
    ("alibi_slopes", (BATCH, HEADS), COUNT * BATCH, COUNT * BATCH),
]


@pytest.mark.parametrize("dim", [None, 0, -1])
@pytest.mark.parametrize(("name", "shape", "mapped", "shared"), FOLDS)
def test_vmap_is_one_call(kernel, name, shape, mapped, shared, dim):
    """The same as a loop, and what entries or sequences share is not repeated without need."""
    inputs = make_inputs(SHAPE, torch.bfloat16, kernel.device)
    q = torch.stack([inputs[0].roll(index, 2) for index in range(COUNT)])
    entries = [make(name, shape, kernel.device) for _ in range(COUNT)]

    def attend(q, given):
        options = {name: given, "causal": True, "family": kernel.family}
        return flash_cute.forward(q, *inputs[1:], **options)

    given = entries[0] if dim is None else torch.stack(entries, dim)
    with Arguments() as seen:
        results = torch.vmap(attend, in_dims=(0, dim))(q, given)
    assert [len(call[name]) for call in seen.calls] == [shared if dim is None else mapped]
    for index in range(COUNT):
        expected = attend(q[index], entries[0 if dim is None else index])
        assert_close((x[index] for x in results), expected)


def test_vmap_of_one_sequence_with_slopes_of_its_own(kernel):
    """Which are not those of all sequences once there are more of them."""
    q, k, v = make_inputs(Shape(1, HEADS, 2, ROWS, KEYS, 64), torch.bfloat16, kernel.device)
    slopes = make("alibi_slopes", (1, HEADS), kernel.device)

    def attend(q):
        return flash_cute.forward(q, k, v, alibi_slopes=slopes, family=kernel.family)

    pair = torch.stack([q, q.roll(1, 2)])
    results = torch.vmap(attend)(pair)
    for index in range(2):
        assert_close((x[index] for x in results), attend(pair[index]))


@pytest.mark.parametrize("name", ["mask", "bias", "alibi_slopes"])
def test_vmap_of_the_elements_of_a_vector(device, name):
    q, k, v = make_inputs(SHAPE, torch.bfloat16, device)
    with pytest.raises(ValueError, match=rf"^flash_cute\.forward: {name} has shape \(\) under vmap"):
        torch.vmap(lambda x: flash_cute.forward(q, k, v, **{name: x}))(make(name, (3,), device))


@pytest.mark.parametrize("mapped", [True, False])
def test_vmap_of_seeds(kernel, mapped):
    """Each entry drops what a call with its seed drops, in the gradients, too."""
    inputs = make_inputs(SHAPE, torch.bfloat16, kernel.device)
    q = torch.stack([inputs[0]] * COUNT)
    seeds = torch.randint(2**60, (COUNT, 2), device=kernel.device)

    def attend(q, seed):
        options = {"dropout_p": 0.5, "dropout_seed": seed, "family": kernel.family}
        return flash_cute.attention(q, *inputs[1:], **options)

    def gradient(q, seed):
        return torch.func.grad(lambda q: attend(q, seed).float().square().sum())(q)

    for function in (attend, gradient):
        given, dim = (seeds, 0) if mapped else (seeds[0], None)
        results = torch.vmap(function, in_dims=(0, dim))(q, given)
        for index in range(COUNT):
            expected = function(q[index], seeds[index if mapped else 0])
            torch.testing.assert_close(results[index], expected)
        assert torch.equal(results[0], results[1]) != mapped


def test_vmap_asks_how_to_draw(kernel):
    q, k, v = make_inputs(SHAPE, torch.bfloat16, kernel.device)

    def attend(q):
        return flash_cute.attention(q, k, v, dropout_p=0.5, family=kernel.family)

    pair = torch.stack([q, q])
    for randomness in ("different", "same"):
        one, other = torch.vmap(attend, randomness=randomness)(pair)
        assert torch.equal(one, other) == (randomness == "same")
    sentence = r"^flash_cute\.attention: dropout_p under vmap needs randomness='different' or 'same', or a"
    with pytest.raises(ValueError, match=sentence):
        torch.vmap(attend)(pair)


@pytest.mark.parametrize("name", ["dropout_p", "sinks"])
def test_vmap_of_nothing(device, name):
    """Of what is a loop over the entries, too."""
    q, k, v = make_inputs(SHAPE, torch.bfloat16, device)
    options = {name: 0.5 if name == "dropout_p" else torch.zeros(HEADS, device=device)}

    def attend(q):
        return flash_cute.forward(q, k, v, **options)

    out, lse = torch.vmap(attend, randomness="different")(q[None][:0])
    assert (out.shape, lse.shape) == ((0, *q.shape), (0, *q.shape[:3]))


# Seeds


def test_seeds_are_drawn_from_torchs_generator(kernel):
    """Anew in each call, by the generator of q's device alone."""
    q, k, v = make_inputs(SHAPE, torch.bfloat16, kernel.device)

    def attend(**options):
        return flash_cute.attention(q, k, v, dropout_p=0.5, family=kernel.family, **options)

    torch.manual_seed(1)
    first, second = attend(), attend()
    torch.manual_seed(1)
    assert torch.equal(first, attend())
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    attend(dropout_seed=torch.tensor(SEED, device=kernel.device))  # which draws nothing
    assert torch.equal(first, attend())
    state = torch.get_rng_state() if kernel.device.type == "cpu" else torch.cuda.get_rng_state()
    flash_cute.attention(q, k, v, family=kernel.family)
    flash_cute.explain(q, k, v, dropout_p=0.5, family=kernel.family)
    after = torch.get_rng_state() if kernel.device.type == "cpu" else torch.cuda.get_rng_state()
    assert torch.equal(state, after)


@pytest.mark.parametrize(
    ("use_reentrant", "compiled"),
    [(False, False), (True, False), (False, True)],
    ids=["", "reentrant", "compiled"],
)
def test_checkpoint_drops_the_same_again(kernel, use_reentrant, compiled):
    """And the same as without one.

    Compiled by AOTAutograd on a GPU it would draw from generators that its graph keeps, which manual_seed
    does not reach, unless PyTorch is asked for the numbers of eager calls.
    """
    inputs = make_inputs(SHAPE, torch.bfloat16, kernel.device)

    def attend(q, k, v):
        options = {"deterministic": is_deterministic(kernel.family), "family": kernel.family}
        return flash_cute.forward(q * 2, k, v, dropout_p=0.5, **options)

    def again(*inputs):
        return checkpoint(attend, *inputs, use_reentrant=use_reentrant)

    functions = [attend, again]
    if compiled:
        functions = [torch.compile(x, backend="aot_eager", fullgraph=True) for x in functions]
    found = []
    with inductor_config.patch(fallback_random=compiled):
        for function in functions:
            torch.manual_seed(2)
            found.append(gradients(function, inputs))
    assert_close_gradients(kernel.family, *found)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_checkpoints_drop_the_same_again(kernel, backend):
    """In each call's backward what its forward dropped, by whatever generator, also after other calls."""
    shape = Shape(2, 2, 2, 64, 64, 64)
    q, k, _ = (x.requires_grad_() for x in make_inputs(shape, torch.bfloat16, kernel.device))
    # out is what is left of the weights then, and dv, where dout is so, too, their transpose.
    identity = torch.eye(64, dtype=q.dtype, device=q.device).repeat(2, 2, 1, 1)
    v = identity.clone().requires_grad_()

    def attend(q, k, v):
        return flash_cute.attention(q * 2, k, v, dropout_p=0.5, family=kernel.family)

    @torch.compile(backend=backend, fullgraph=True)
    def again(*inputs):
        return checkpoint(attend, *inputs, use_reentrant=False)

    weights = [again(q, k, v) for _ in range(3)]
    assert not torch.equal(weights[0], weights[1])
    for out in (weights[1], weights[0], weights[2]):
        assert 0.4 < (out == 0).double().mean() < 0.6
        (dv,) = torch.autograd.grad(out, v, identity)
        torch.testing.assert_close(dv, out.mT)


@pytest.mark.gpu
def test_each_replay_of_a_cuda_graph_draws(kernel):
    q, k, v = make_inputs(SHAPE, torch.bfloat16, kernel.device)

    def attend(**options):
        return flash_cute.attention(q, k, v, dropout_p=0.5, family=kernel.family, **options)

    seed = torch.tensor(SEED, device=kernel.device)
    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn, given = attend(), attend(dropout_seed=seed)
    found = []
    for _ in range(2):
        graph.replay()
        found.append((drawn.clone(), given.clone()))
    assert not torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    seed += 1
    graph.replay()
    assert not torch.equal(given, found[0][1])


# Gradients


def test_gradients_that_there_are_not(device):
    """One sentence, only where the gradient would be computed."""
    inputs = make_inputs(SHAPE, torch.bfloat16, device)
    given = make("alibi_slopes", (HEADS,), device).requires_grad_()

    def attend(given, *inputs):
        return flash_cute.attention(*inputs, alibi_slopes=given).float().sum()

    sentence = r"there are no gradients of alibi_slopes; detach alibi_slopes"
    calls = [
        lambda: attend(given, *inputs),
        lambda: attend(given, inputs[0].detach().requires_grad_(), *inputs[1:]),
        lambda: torch.func.grad(attend)(given.detach(), *inputs),
        lambda: torch.func.jvp(lambda x: attend(x, *inputs), (given.detach(),), (given.detach(),)),
        lambda: torch.vmap(torch.func.grad(lambda x: attend(x, *inputs)))(given.detach()[None]),
        lambda: flash_cute.forward(*inputs, out=torch.empty_like(inputs[0]), alibi_slopes=given),
    ]
    for call in calls:
        with pytest.raises(NotImplementedError, match=rf"^flash_cute\.\w+: {sentence}$"):
            call()
    with pytest.raises(Exception, match=sentence):
        torch.compile(attend, backend="eager", fullgraph=True)(given, *inputs)
    expected = attend(given.detach(), *inputs)
    with torch.no_grad():
        assert torch.equal(attend(given, *inputs), expected)
    flash_cute.explain(*inputs, backward=True, alibi_slopes=given)


# autocast


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16])
def test_autocast_casts_a_bias(kernel, given, dtype):
    inputs = [x.to(given) for x in make_inputs(SHAPE, torch.float16, kernel.device)]
    changes = all_of_them(kernel.device)
    bias = changes.pop("bias").to(given)
    options = changes | {"causal": True, "family": kernel.family}
    with torch.autocast(kernel.device.type, dtype=dtype):
        results = flash_cute.forward(*inputs, bias=bias, **options)
        copies = flash_cute.explain(*inputs, bias=bias, **options)["copies"]
    assert results[0].dtype == dtype
    cast = [x.to(dtype) for x in (*inputs, bias)]
    expected = flash_cute.forward(*cast[:3], bias=cast[3], **options)
    for result, same in zip(results, expected, strict=True):
        assert torch.equal(result, same)
    rounded = f"bias: it is rounded from {given} to {dtype}"
    assert [copy for copy in copies if copy.startswith("bias: it is rounded")] == [rounded] * (given != dtype)


@pytest.mark.parametrize("number", [torch.finfo(torch.float32).min, -1e9, -70000.0, 1e9])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_finite_stays_so(kernel, dtype, number):
    """A float32 bias has numbers that 16 bits would make infinite, and hides nothing by them."""
    q, k, v = make_inputs(SHAPE, dtype, kernel.device)
    bias = torch.full((1, 1, 1, KEYS), number, device=kernel.device)
    bias[..., 3] = -torch.inf
    out, lse = flash_cute.forward(q, k, v, bias=bias, family=kernel.family)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    v[:, :, 3] = 1000.0  # is hidden
    assert torch.equal(flash_cute.attention(q, k, v, bias=bias, family=kernel.family), out)


# torch.compile, export, opcheck


def block(q, k, v, changes, family):
    """Attention between other operators, as in a model."""
    options = {"causal": True, "deterministic": is_deterministic(family), "family": family}
    out, lse = flash_cute.forward(q * 1.5, k, v, **options, **changes)
    return out * 2, lse + 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_without_a_graph_break(kernel, backend, dtype):
    if dtype == torch.float32 and kernel.family == "sm90":
        pytest.skip("float32 has kernels of the family sm80 alone")
    inputs = make_inputs(SHAPE, dtype, kernel.device)
    others = all_of_them(kernel.device), kernel.family
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    assert_close(compiled(*inputs, *others), block(*inputs, *others))
    found, expected = (gradients(function, inputs, *others) for function in (compiled, block))
    assert_close_gradients(kernel.family, found, expected)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_calls_draw_their_seeds(kernel, backend):
    """Anew in each call, and the backward has that of its forward."""
    q, k, v = make_inputs(SHAPE, torch.bfloat16, kernel.device)
    v = torch.ones_like(v)
    q.requires_grad_()
    v.requires_grad_()

    def attend(q, k, v):
        return flash_cute.attention(q, k, v, dropout_p=0.5, family=kernel.family)

    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    first, second = compiled(q, k, v), compiled(q, k, v)
    assert not torch.equal(first, second)
    for out in (first, second):
        # out is linear in v, so that both sums are of the weights that this call kept.
        dout = torch.randn_like(out)
        (dv,) = torch.autograd.grad(out, v, dout)
        torch.testing.assert_close(dv.double().sum(), (out * dout).double().sum(), rtol=0.02, atol=0.5)


def test_compiles_once(kernel):
    """Whatever the sizes."""
    compiles = 0

    def counting(graph, _):
        nonlocal compiles
        compiles += 1
        return graph

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counting)
    for batch, rows, keys in ((5, 50, 60), (6, 70, 40), (3, 33, 190)):
        inputs = make_inputs(Shape(batch, 8, 2, rows, keys, 64), torch.bfloat16, kernel.device)
        changes = all_of_them(kernel.device) | {
            "mask": make("mask", (batch, 1, rows, keys), kernel.device),
            "bias": make("bias", (1, 8, rows, keys), kernel.device),
            "alibi_slopes": make("alibi_slopes", (batch, 8), kernel.device),
        }
        assert_close(compiled(*inputs, changes, kernel.family), block(*inputs, changes, kernel.family))
    assert compiles == 1


@pytest.mark.parametrize("strict", [False, True])
def test_is_exported(kernel, strict):
    class Model(torch.nn.Module):
        def forward(self, q, k, v, mask, bias, slopes, seed):
            changes = {"mask": mask, "bias": bias, "alibi_slopes": slopes, "dropout_seed": seed}
            return block(q, k, v, changes | {"softcap": 5.0, "dropout_p": 0.3}, kernel.family)

    def inputs(batch, rows, keys):
        tensors = {"mask": (batch, 1, rows, keys), "bias": (1, HEADS, rows, keys), "alibi_slopes": (HEADS,)}
        made = [make(name, shape, kernel.device) for name, shape in tensors.items()]
        shape = Shape(batch, HEADS, 2, rows, keys, 64)
        seed = torch.tensor(SEED, device=kernel.device)
        leaves = [x.requires_grad_() for x in make_inputs(shape, torch.bfloat16, kernel.device)]
        return *leaves, *made, seed

    batch, rows, keys = (torch.export.Dim(name, min=2, max=4096) for name in ("batch", "rows", "keys"))
    of_keys = {0: batch, 2: keys}
    shapes = ({0: batch, 2: rows}, of_keys, of_keys, {0: batch, 2: rows, 3: keys}, {2: rows, 3: keys}, {}, {})
    program = torch.export.export(Model(), inputs(4, 30, 50), strict=strict, dynamic_shapes=shapes)
    late = inputs(3, 41, 37)
    assert_close(program.module()(*late), Model()(*late))
    found, expected = (gradients(x, late[:3], *late[3:]) for x in (program.module(), Model()))
    assert_close_gradients(kernel.family, found, expected)


def test_an_exported_program_draws(kernel):
    inputs = make_inputs(SHAPE, torch.bfloat16, kernel.device)

    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return flash_cute.attention(q, k, v, dropout_p=0.5, family=kernel.family)

    program = torch.export.export(Model(), inputs).module()
    assert not torch.equal(program(*inputs), program(*inputs))


def test_opcheck(kernel):
    """Of the public operator with gradients, of that which it runs, and of the backward's own."""
    inputs = make_inputs(Shape(2, 4, 2, 30, 40, 40), torch.bfloat16, kernel.device)
    options = {name: make(name, (1, 4, 30, 40), kernel.device) for name in ("mask", "bias")}
    options["bias"] = options["bias"].bfloat16()
    options |= {"alibi_slopes": make("alibi_slopes", (2, 4), kernel.device), "softcap": 5.0}
    options |= {"dropout_p": 0.3, "dropout_seed": torch.tensor(SEED, device=kernel.device)}
    options["family"] = kernel.family
    ops = torch.ops.flash_cute
    leaves = [x.detach().requires_grad_() for x in inputs]
    deterministic = {"deterministic": is_deterministic(kernel.family)}
    torch.library.opcheck(ops.forward.default, (*leaves, True), options | deterministic)
    torch.library.opcheck(ops._forward.default, (*inputs, True), options)
    out, lse = ops._forward(*inputs, True, **options)
    arguments = out, lse, *inputs, out, lse, True
    torch.library.opcheck(ops._backward.default, arguments, options | deterministic)


# Nested tensors


def test_nested_tensors(kernel):
    """The same as of packed sequences, of which each is dropped by its own rows."""
    batch = make_ragged(BATCHES["unequal"], (4, 2), 64, torch.bfloat16, kernel.device, True, margins=(0, 0))
    changes = all_of_them(kernel.device)
    options = {name: changes[name] for name in ("softcap", "dropout_p", "dropout_seed")}
    options |= {"alibi_slopes": changes["alibi_slopes"][0], "causal": True, "family": kernel.family}
    expected, _ = flash_cute.forward_varlen(batch.q, batch.k, batch.v, **batch.lengths, **options)
    offsets = [batch.lengths[name].long() for name in ("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k")]
    nested = [
        torch.nested.nested_tensor_from_jagged(x, offset).transpose(1, 2)
        for x, offset in zip((batch.q, batch.k, batch.v), (offsets[0], offsets[1], offsets[1]), strict=True)
    ]
    out = flash_cute.attention(*nested, **options)
    assert torch.equal(out.transpose(1, 2).values(), expected)
    drawn = [flash_cute.attention(*nested, dropout_p=0.5, family=kernel.family).values() for _ in range(2)]
    assert not torch.equal(*drawn)
