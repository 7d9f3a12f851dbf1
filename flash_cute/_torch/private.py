"""Every private name of PyTorch that the package uses, with what it is for.

Seen in torch 2.10 to 2.15. flash_cute can be imported under a torch that lacks one of them: another way
stands in for the name where there is one, else what needs it raises one sentence when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pkgutil import resolve_name
from typing import Any

import torch
from torch.autograd import forward_ad

NAMES: dict[str, str] = {}  # "module:name" -> what needs it


def _missing(name: str) -> NotImplementedError:
    lacking = f"{name.replace(':', '.')}, which torch {torch.__version__} does not have"
    return NotImplementedError(f"flash_cute: {NAMES[name]} needs {lacking}; torch 2.10 to 2.15 have it")


def _find(name: str, purpose: str, otherwise: Callable | None = None) -> Any:
    """What goes by a private name; where there is none, `otherwise`, or a function that says so."""
    NAMES[name] = purpose

    def refuse(*args, **kwargs):
        raise _missing(name)

    try:
        return resolve_name(name)
    except (ImportError, AttributeError):
        return otherwise or refuse


# Is a transform of torch.func running? Every call asks.
transforms_are_active = _find(
    "torch._C:_are_functorch_transforms_active",
    "a transform of torch.func",
    lambda: torch._C._functorch.peek_interpreter_stack() is not None,
)
# Is autocast on for any device? Every call asks; the public function asks of one device at a time.
autocast_is_enabled = _find(
    "torch._C:_is_any_autocast_enabled",
    "autocast",
    lambda: any(map(torch.is_autocast_enabled, ("cuda", "cpu"))),
)

NAMES["torch.autograd.forward_ad:_current_level"] = "forward-mode differentiation"


def dual_levels_are_active() -> bool:
    """Is a dual level of forward-mode differentiation open? True where that is not known."""
    return getattr(forward_ad, "_current_level", 0) >= 0


# The layers of tensors that transforms wrap.
is_wrapped = _find("torch._C._functorch:is_functorch_wrapped_tensor", "a transform of torch.func")
unwrapped_once = _find("torch._C._functorch:get_unwrapped", "a transform of torch.func")
is_batched = _find("torch._C._functorch:is_batchedtensor", "vmap of dual tensors")
# A tensor that escaped its transform, without the wrapper.
unwrapped_if_dead = _find(
    "torch._C._functorch:unwrap_if_dead",
    "a tensor that has left its transform of torch.func",
    lambda tensor: _refuse_dead(tensor) if is_wrapped(tensor) else tensor,
)


def _refuse_dead(tensor: torch.Tensor) -> torch.Tensor:
    if transforms_are_active():
        return tensor
    raise _missing("torch._C._functorch:unwrap_if_dead")


# A kernel of Python for vmap, which may call its own operator again below the transform.
current_transform = _find(
    "torch._functorch.pyfunctorch:retrieve_current_functorch_interpreter", "vmap of an operator"
)
run_vmap_rule = _find(
    "torch._functorch.autograd_function:custom_function_call_vmap_helper", "vmap of an operator"
)

# An autograd Function for the one level of transforms that is being run.
_single_level_is_allowed = _find(
    "torch._functorch.utils:enable_single_level_autograd_function",
    "a gradient below a transform of torch.func",
)
_SingleLevelFunction = _find(
    "torch.autograd.function:_SingleLevelFunction", "a gradient below a transform of torch.func"
)
# Dispatch to a public operator inside the forward of such a Function, with gradients for the levels outside.
below_autograd = _find("torch._C:_AutoDispatchBelowAutograd", "a gradient below a transform of torch.func")
forward_mode_is_enabled = _find(
    "torch.autograd.forward_ad:_set_fwd_grad_enabled", "a gradient below a transform of torch.func"
)


@cache
def _single_level(function: type[torch.autograd.Function]) -> Callable:
    if not isinstance(_SingleLevelFunction, type):
        _SingleLevelFunction()
    rules = {name: vars(function)[name] for name in ("forward", "setup_context", "backward", "jvp")}
    return type(function.__name__, (_SingleLevelFunction,), rules).apply


def apply_at_level(function: type[torch.autograd.Function], *args):
    """function.apply for one level of transforms, where function.apply itself would begin at another."""
    with _single_level_is_allowed():
        return _single_level(function)(*args)


# The mode of make_fx, which traces plain tensors, too.
proxy_mode = _find(
    "torch.fx.experimental.proxy_tensor:get_proxy_mode", "make_fx of plain tensors", lambda: None
)
# Real numbers may be computed with while a mode traces.
without_modes = _find("torch.utils._python_dispatch:_disable_current_modes", "tracing")

NAMES["torch.fx.experimental.sym_node:SymNode.hint"] = "the checks of a call whose sizes are symbols"
NAMES["torch.fx.experimental.sym_node:SymNode.has_hint"] = "the checks of a call whose sizes are symbols"


def hint(size: int | torch.SymInt | None) -> int | None:
    """A size of the example that is traced, which does not bind the graph to it; None where there is none."""
    if not isinstance(size, torch.SymInt):
        return size
    has_hint = getattr(size.node, "has_hint", None)
    return getattr(size.node, "hint", None) if has_hint and has_hint() else None


NAMES["torch._ops:OpOverload._schema"] = "an operator"
NAMES["torch._C:_get_schema"] = "an operator without _schema"


def argument_names(op: torch._ops.OpOverload) -> list[str]:
    schema = getattr(op, "_schema", None) or torch._C._get_schema(op.name(), "")
    return [argument.name for argument in schema.arguments]


def written_arguments(op: torch._ops.OpOverload) -> list[tuple[int, str]]:
    """The place and name of each argument that op writes into."""
    schema = getattr(op, "_schema", None) or torch._C._get_schema(op.name(), "")
    return [
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


_below_versions = _find("torch._C:_after_ADInplaceOrView_keyset", "a call that writes into its arguments")


def below_versions(keys: torch._C.DispatchKeySet) -> torch._C.DispatchKeySet:
    """What is left of a call's keys once the versions of what it writes are counted."""
    return _below_versions() if callable(_below_versions) else keys & _below_versions


NAMES["torch.nested._internal.nested_tensor:NestedTensor._ragged_idx"] = "a nested tensor"


def ragged_dimension(tensor: torch.Tensor) -> int:
    """The dimension of a jagged tensor in which its entries have lengths of their own."""
    try:
        return tensor._ragged_idx
    except AttributeError:
        raise _missing("torch.nested._internal.nested_tensor:NestedTensor._ragged_idx") from None


# How an operator is told to DTensor; looked up by integrations/dtensor.py alone, as it takes long to import.
_OF_DTENSOR = (
    "torch.distributed.tensor._op_schema:OpStrategy",
    "torch.distributed.tensor._op_schema:RuntimeSchemaInfo",
    "torch.distributed.tensor._ops.utils:expand_to_full_mesh_op_strategy",
    "torch.distributed.tensor:DTensor._op_dispatcher.sharding_propagator.register_op_strategy",
)
NAMES |= dict.fromkeys(_OF_DTENSOR, "flash_cute.integrations.dtensor")


def parts_of_dtensor() -> list[Any]:
    """The things of these names; raises ImportError where one is missing."""
    found = []
    for name in _OF_DTENSOR:
        try:
            found.append(resolve_name(name))
        except (ImportError, AttributeError):
            raise ImportError(str(_missing(name))) from None
    return found
