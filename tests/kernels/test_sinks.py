"""sinks=: a logit for each head that counts in the sum of every row and has no value."""

from __future__ import annotations

import pytest
import torch
from support.cases import Shape, make_inputs

import flash_cute


def with_gradients(function, tensors, given):
    leaves = [x.detach().requires_grad_() for x in tensors]
    results = function(*leaves)
    return *results, *torch.autograd.grad(
        results, leaves, [g.to(r.dtype) for g, r in zip(given, results, strict=True)]
    )


def test_sinks_in_the_type_of_q(kernel):
    """As the same numbers in float32; their gradient is rounded once."""
    q, k, v = make_inputs(Shape(2, 4, 2, 30, 40, 64), torch.bfloat16, kernel.device)
    sinks = torch.randn(4, device=kernel.device).bfloat16()
    given = torch.randn_like(q), torch.randn(q.shape[:3], device=kernel.device)

    def call(q, k, v, sinks):
        return flash_cute.forward(q, k, v, sinks=sinks, deterministic=True, family=kernel.family)

    narrow, wide = (with_gradients(call, (q, k, v, s), given) for s in (sinks, sinks.float()))
    for result, expected in zip(narrow, wide, strict=True):
        assert torch.equal(result, expected.to(result.dtype))
    assert narrow[-1].dtype == torch.bfloat16


def test_none_at_all(kernel):
    """-inf is no sink: the same as without."""
    q, k, v = make_inputs(Shape(2, 4, 2, 30, 50, 64), torch.bfloat16, kernel.device)
    none = torch.full((4,), -torch.inf, device=kernel.device)
    options = {"causal": True, "window": 7, "family": kernel.family}
    for result, expected in zip(
        flash_cute.forward(q, k, v, **options, sinks=none),
        flash_cute.forward(q, k, v, **options),
        strict=True,
    ):
        assert torch.equal(result, expected)


def test_keys_that_are_hidden_by_scores(device):
    """Where all visible scores are -inf, the sink has all of the weight."""
    q = torch.zeros(1, 2, 3, 16, device=device).bfloat16()
    k = torch.zeros(1, 2, 5, 16, device=device).bfloat16()
    q[..., 0], k[..., 0] = 1, -torch.inf
    sinks = torch.tensor([1.0, -2.0], device=device)
    v = k.nan_to_num(0, 0, 0)
    leaf = sinks.clone().requires_grad_()
    out, lse = flash_cute.forward(q, k, v, sinks=leaf)
    assert (out == 0).all()
    torch.testing.assert_close(lse, sinks[None, :, None].expand(1, 2, 3))
    (dsinks,) = torch.autograd.grad((out, lse), leaf, (torch.ones_like(out), torch.ones_like(lse)))
    torch.testing.assert_close(dsinks, torch.full_like(sinks, 3))  # of the LSE in each row
    none = torch.full_like(sinks, -torch.inf)
    assert flash_cute.forward(q, k, v, sinks=none)[0].isnan().all()  # as without


@pytest.mark.parametrize("packed", [False, True])
def test_strides(device, packed):
    """As of torch.empty_like(q)."""
    x = torch.randn(2, 30, 4, 64, device=device).bfloat16()
    x = x[0].transpose(0, 1).contiguous().transpose(0, 1) if packed else x.transpose(1, 2)
    sinks, lengths = torch.zeros(x.shape[1], device=device), {}
    if packed:
        lengths = {"cu_seqlens_q": torch.tensor([0, 30], dtype=torch.int32, device=device)}
    function = flash_cute.attention_varlen if packed else flash_cute.attention
    assert function(x, x, x, **lengths, sinks=sinks).stride() == torch.empty_like(x).stride()


def test_out_has_no_gradients(device):
    q, k, v = make_inputs(Shape(1, 4, 2, 5, 5, 64), torch.bfloat16, device)
    sinks, out = torch.zeros(4, device=device, requires_grad=True), torch.empty_like(q)
    with pytest.raises(NotImplementedError, match="there are no gradients with out; detach sinks"):
        flash_cute.forward(q, k, v, sinks=sinks, out=out)
    assert out._version == 0


def test_wrong_queries_beside_sinks(device):
    q, k, v = make_inputs(Shape(1, 4, 2, 5, 5, 64), torch.bfloat16, device)
    for wrong in (q[0], q[0, 0, 0]):
        with pytest.raises(ValueError, match=r"^flash_cute\.forward: q has [13] dimensions"):
            flash_cute.forward(wrong, k, v, sinks=torch.zeros(4, device=device))


WRONG = {
    "another number": (lambda s: s[:2], "sinks must have shape (heads_q,), here (4,), got (2,)"),
    "two dimensions": (lambda s: s[None], "sinks must have shape (heads_q,), here (4,), got (1, 4)"),
    "another dtype": (
        torch.Tensor.double,
        "sinks must have dtype torch.float32 or that of q, torch.bfloat16, got",
    ),
    "another device": (lambda s: s.to("meta"), "sinks must be on device"),
    "a number": (lambda s: 1.0, "sinks is of type float; a torch.Tensor is accepted"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_sinks(device, name):
    change, words = WRONG[name]
    q, k, v = make_inputs(Shape(1, 4, 2, 5, 5, 64), torch.bfloat16, device)
    with pytest.raises((ValueError, TypeError), match=r"^flash_cute\.forward: sinks ") as error:
        flash_cute.forward(q, k, v, sinks=change(torch.zeros(4, device=device)), out=torch.empty_like(q))
    assert words in str(error.value)
    with pytest.raises((ValueError, TypeError), match=r"^flash_cute\.merge: sinks ") as error:
        flash_cute.merge([q], [q.sum(-1).float()], change(torch.zeros(4, device=device)))


def test_merged(device):
    """Parts computed without sinks, which then count once."""
    q, k, v = make_inputs(Shape(1, 4, 2, 20, 60, 64), torch.bfloat16, device)
    sinks = torch.randn(4, device=device)
    parts = [flash_cute.forward(q, k[:, :, rows], v[:, :, rows]) for rows in (slice(0, 25), slice(25, 60))]
    out, lse = flash_cute.merge(*zip(*parts, strict=True), sinks=sinks)
    whole = flash_cute.forward(q, k, v, sinks=sinks)
    torch.testing.assert_close(out, whole[0], atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse, whole[1], atol=1e-4, rtol=1e-4)


def test_compiled_mapped_and_nested(device):
    q, k, v = make_inputs(Shape(2, 4, 2, 20, 30, 64), torch.bfloat16, device)
    sinks = torch.randn(4, device=device)
    tensors, given = (q, k, v, sinks), (torch.randn_like(q), torch.randn(q.shape[:3], device=device))

    def call(q, k, v, sinks):
        return flash_cute.forward(q, k, v, causal=True, sinks=sinks)

    expected = with_gradients(call, tensors, given)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for result, right in zip(with_gradients(compiled, tensors, given), expected, strict=True):
        torch.testing.assert_close(result, right)
    several = [torch.stack((x, x / 2)) for x in tensors]
    for result, *entries in zip(
        torch.vmap(call)(*several), call(*tensors), call(*(x[1] for x in several)), strict=True
    ):
        torch.testing.assert_close(result, torch.stack(entries))
    gradient = torch.func.grad(lambda s: call(q, k, v, s)[0].float().sum())
    assert gradient(sinks).isfinite().all()
    ragged = torch.nested.nested_tensor([torch.randn(n, 4, 64) for n in (3, 9)], layout=torch.jagged)
    ragged = ragged.to(device, torch.bfloat16).transpose(1, 2)
    out, _ = flash_cute.forward(ragged, ragged, ragged, sinks=sinks)
    for alone, whole in zip(ragged.transpose(1, 2).unbind(), out.transpose(1, 2).unbind(), strict=True):
        alone = alone.transpose(0, 1)[None]
        torch.testing.assert_close(
            flash_cute.attention(alone, alone, alone, sinks=sinks)[0].transpose(0, 1), whole
        )


def test_autocast(device):
    q, k, v = make_inputs(Shape(1, 4, 2, 5, 9, 64), torch.bfloat16, device)
    sinks = torch.randn(4, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        out, _ = flash_cute.forward(q.float(), k.float(), v.float(), sinks=sinks)
    assert torch.equal(out, flash_cute.forward(q, k, v, sinks=sinks)[0])


@pytest.mark.parametrize("head_dim_v", [64, 40])
@pytest.mark.parametrize("packed", [False, True])
def test_no_keys_at_all(kernel, packed, head_dim_v):
    """The LSE is the sink, out 0; the gradient is that of the LSE alone."""
    shape = (5, 4, 64) if packed else (2, 4, 5, 64)
    q = torch.randn(shape, device=kernel.device).bfloat16().requires_grad_()
    k = q.detach()[:0, :2] if packed else q.detach()[:, :2, :0]
    sinks = torch.randn(4, device=kernel.device).requires_grad_()
    given = {"family": kernel.family}
    if packed:
        given["cu_seqlens_q"] = torch.tensor([0, 2, 5], dtype=torch.int32, device=kernel.device)
        given["cu_seqlens_k"] = torch.zeros_like(given["cu_seqlens_q"])
    function = flash_cute.forward_varlen if packed else flash_cute.forward
    out, lse = function(q, k, k[..., :head_dim_v], **given, sinks=sinks)
    assert out.shape == (*shape[:-1], head_dim_v)
    assert (out == 0).all()
    torch.testing.assert_close(lse, sinks.detach().unsqueeze(-1).expand_as(lse))
    given = torch.full_like(out, torch.nan), torch.ones_like(lse)
    dq, dsinks = torch.autograd.grad((out, lse), (q, sinks), given)
    assert (dq == 0).all()
    torch.testing.assert_close(dsinks, torch.full_like(sinks, lse.numel() / 4))
