"""What test_torch_private.py runs: flash_cute without one of torch's private names, each in a fork.

Prints for each name and use "works", or the exception. The name is there again once flash_cute is imported,
as torch itself needs it.
"""

from __future__ import annotations

import importlib
import os
import sys
from functools import reduce

import torch
import torch._dynamo
import torch.distributed.tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad


def inputs(**options):
    return [torch.randn(1, 2, 5, 16, **options).to(torch.bfloat16) for _ in range(3)]


def call(fc):
    out, lse = fc.forward(*inputs(), causal=True)
    assert out.isfinite().all()
    assert lse.isfinite().all()


def writing(fc):
    q, k, v = inputs()
    out = torch.empty_like(q)
    assert fc.attention(q, k, v, out=out) is out


def gradient(fc):
    q, k, v = (x.requires_grad_() for x in inputs())
    fc.attention(q, k, v).float().sum().backward()
    assert q.grad.isfinite().all()


def functional_gradient(fc):
    q, k, v = inputs()
    assert torch.func.grad(lambda q: fc.attention(q, k, v).float().sum())(q).shape == q.shape


def gradient_of_the_operator(fc):
    q, k, v = inputs()
    op = torch.ops.flash_cute.forward.default
    assert torch.func.grad(lambda q: op(q, k, v)[0].float().sum())(q).shape == q.shape


def gradient_of_an_escaped_tensor(fc):
    q, k, v = inputs()
    escaped = []
    torch.func.grad(lambda q: (escaped.append(q), q.float().sum())[1])(q)
    fc.attention(escaped[0], k, v.requires_grad_()).float().sum().backward()


def vmap(fc):
    q, k, v = (torch.stack([x, x]) for x in inputs())
    assert torch.vmap(fc.attention)(q, k, v).shape == q.shape


def autocast(fc):
    with torch.autocast("cpu", torch.bfloat16):
        assert fc.attention(*(x.float() for x in inputs())).dtype == torch.bfloat16


def dual_tensors_under_vmap(fc):
    q, k, v = (torch.stack([x, x]) for x in inputs())
    with forward_ad.dual_level():
        assert torch.vmap(fc.attention)(q, k, v).shape == q.shape


def fakes(fc):
    with FakeTensorMode():
        assert fc.attention(*inputs()).shape == (1, 2, 5, 16)


def dtensor(fc):
    importlib.import_module("flash_cute.integrations.dtensor")


USES = [call, writing, gradient, functional_gradient, gradient_of_the_operator, gradient_of_an_escaped_tensor,
        vmap, autocast, dual_tensors_under_vmap, fakes, dtensor]  # fmt: skip


def without(name: str) -> None:
    module, _, path = name.partition(":")
    *parents, attribute = path.split(".")
    owner = reduce(getattr, parents, importlib.import_module(module))
    owner = owner if attribute in vars(owner) else type(owner)
    hidden = vars(owner)[attribute]
    delattr(owner, attribute)
    try:
        fc = importlib.import_module("flash_cute")
        fc.softmax  # noqa: B018  imports what is for torch
        if name in fc._torch.private._OF_DTENSOR:
            use(name, dtensor, fc)
    finally:
        setattr(owner, attribute, hidden)
    for function in USES:
        if not (name in fc._torch.private._OF_DTENSOR and function is dtensor):
            use(name, function, fc)


def use(name: str, function, fc) -> None:
    try:
        function(fc)
        said = "works"
    except Exception as error:
        said = f"{type(error).__name__}: {error}".replace("\n", " ")
    print(f"{name}|{function.__name__}|{said}", flush=True)


for name in sys.argv[1:]:
    if child := os.fork():
        status = os.waitpid(child, 0)[1]
        assert status == 0, f"{name}: status {status}"
    else:
        without(name)
        os._exit(0)
