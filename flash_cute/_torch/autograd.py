"""Gradients: whether a call needs them, the base of autograd Functions, and what these refuse."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.autograd import forward_ad

from flash_cute._torch import library, private
from flash_cute.wording import OURS


class Function(torch.autograd.Function):
    @classmethod
    def apply_here(cls, *args):
        """apply for the one level of transforms that is being run. It takes 14 us less."""
        unwrapped = private.unwrapped_if_dead
        args = [unwrapped(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        if private.transforms_are_active():
            return private.apply_at_level(cls, *args)
        return super(torch.autograd.Function, cls).apply(*args)


def differentiated_once(face: str) -> type[Function]:
    """The base of a Function of gradients: they refuse to be differentiated."""

    class Gradients(Function):
        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, *gradients):
            raise NotImplementedError(f"{face}: there are no second derivatives; detach the gradients")

        jvp = backward

    return Gradients


def refuse_forward_mode(face: str) -> staticmethod:
    """A Function's jvp."""

    def jvp(ctx, *tangents):
        raise NotImplementedError(f"{face}: there is no forward-mode differentiation; use a gradient")

    return staticmethod(jvp)


def for_outer_levels(op, *args, **options):
    """A public operator, for the levels of transforms around that of the Function whose forward calls this.

    That turns gradients off for all of them, although it has gradients for its own alone.
    """
    with private.below_autograd(), torch.enable_grad(), private.forward_mode_is_enabled(True):
        return op(*args, **options)


def needs_gradient(*tensors: torch.Tensor) -> bool:
    """In reverse mode or, in a dual level, in forward mode."""
    if private.transforms_are_active():  # each wraps tensors, and hides what lies below
        tensors = [level for tensor in tensors for level in _levels(tensor)]
    if torch.is_grad_enabled():
        for tensor in tensors:  # any() of a generator takes 1 us more
            if tensor.requires_grad:
                return True
    return private.dual_levels_are_active() and any(
        forward_ad.unpack_dual(tensor).tangent is not None
        for tensor in tensors
        if not private.is_batched(tensor)  # has no rule for it, and is unwrapped besides
    )


def _levels(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor and, one after the other, those that transforms of torch.func have wrapped."""
    yield tensor
    while private.is_wrapped(tensor):
        tensor = private.unwrapped_once(tensor)
        yield tensor


def refuse_gradients(where: str, **tensors: torch.Tensor | None) -> None:
    """Raises NotImplementedError if a gradient is asked for, with the names of those to detach."""
    given = {name: x for name, x in tensors.items() if x is not None}
    if needs_gradient(*given.values()):  # of one after the other it takes 5 us more
        *others, last = (name for name, x in given.items() if needs_gradient(x))
        names = f"{', '.join(others)} and {last}" if others else last
        raise NotImplementedError(f"{OURS}there are no gradients {where}; detach {names}")


def count_versions(op) -> None:
    """Lets autograd, which counts the versions of what it saves, notice the arguments that op writes into."""
    written = private.written_arguments(op)

    def kernel(keyset, *args, **kwargs):
        results = op.redispatch(private.below_versions(keyset), *args, **kwargs)
        for place, name in written:
            tensor = args[place] if place < len(args) else kwargs[name]
            torch.autograd.graph.increment_version(tensor)
        return results

    library.impl(op.name(), kernel, "ADInplaceOrView", with_keyset=True)
