"""What a peer is: kernels of others that ours are measured beside."""

from __future__ import annotations

from collections.abc import Callable

import torch

Tensors = tuple[torch.Tensor, ...]
Run = Callable[[], Tensors]
Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of a region's K and V

DENSE, PACKED, CONTIGUOUS, PAGED = "dense inputs", "packed sequences", "contiguous caches", "pages"


class CannotRun(Exception):
    """A contender has no kernel for a problem; the message says why."""


class Peer:
    """Makes calls from tensors that are there; raises CannotRun, as do its calls, where there is no kernel.

    forward(problem, q, k, v, offsets=None) makes a call that gives (out, lse, ...), and backward one that
    gives (dq, dk, dv, ...) from what the forward's gave. Tensors are (batch, heads, seqlen, head_dim), with
    offsets (tokens, heads, head_dim). cached(cache, page) makes a call for the queries of a caches.Cache, its
    keys in pages of so many rows, None: contiguous.
    """

    calls: frozenset[str]  # what it is called with
    deterministic = False  # has gradients of that mode, too
    hides_keys = True  # of a cache, those after a query

    def backward(self, problem, q, k, v, dout, saved, offsets=None, deterministic: bool = False) -> Run:
        raise CannotRun("no operator of its own for the gradients")


def attempt(run: Callable):
    """What the call gives; raises CannotRun where it has no kernel for its inputs."""
    try:
        return run()
    except (RuntimeError, NotImplementedError, ValueError, CannotRun) as error:
        raise CannotRun(f"{error}\n".splitlines()[0]) from error


def sifted(makers: dict[str, Callable]) -> tuple[dict, dict[str, str]]:
    """({name: what its maker gives}, {name: why it cannot})."""
    found, excluded = {}, {}
    for name, make in makers.items():
        try:
            found[name] = make()
        except CannotRun as reason:
            excluded[name] = str(reason)
    return found, excluded


def turned(tensor: torch.Tensor, turns: bool = True) -> torch.Tensor:
    """Tokens before heads, or the other way around."""
    return tensor.transpose(1, 2) if turns else tensor
