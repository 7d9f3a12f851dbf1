"""What forward and its likes take by name: one record, their signatures, and what the operator gets of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from inspect import Parameter, signature
from operator import index
from typing import Any, TypedDict, TypeVar

import torch

from flash_cute.wording import require_bool, require_number, shown

# The tensors of integers: lengths and places, and which keys queries see.
LENGTHS = "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k", "block_table", "ranges"
# Those that change scores and weights.
SCORES = "mask", "bias", "alibi_slopes", "dropout_seed"
# What the numbers of a cache of 8 bits are multiplied by, and the types that it may have.
SCALES = "k_scale", "v_scale"
FP8 = torch.float8_e4m3fn, torch.uint8
# All that operators take beside q, k, v and results, in the order of csrc/ops.cpp's checks.
OPERANDS = *LENGTHS, "sinks", *SCORES, *SCALES

_LARGEST = torch.finfo(torch.float32).max
_INTEGERS = int, torch.SymInt  # a tuple, as a union is made anew each time, in 0.5 us
Window = int | tuple[int | None, int | None] | None
Function = TypeVar("Function", bound=Callable)

# Names of arguments by function: while a compiler traces, signatures are out of reach.
ARGUMENTS: dict[str, dict[str, None]] = {}


class Options(TypedDict, total=False):
    """What forward, which documents them, and its likes take by name. Defaults: DEFAULTS, else None.

    A function hands on all that it was given, and what becomes of that is decided once, in
    dot_product_attention.call. causal and softmax_scale, which most calls have, are not among them: an option
    takes the host 0.5 us more than an argument.
    """

    window: Window
    seqused_q: torch.Tensor | None
    seqused_k: torch.Tensor | None
    leftpad_k: torch.Tensor | None
    block_table: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    batch_invariant: bool
    ranges: torch.Tensor | None
    deterministic: bool
    family: str | None
    sinks: torch.Tensor | None
    mask: torch.Tensor | None
    bias: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    softcap: float
    dropout_p: float
    dropout_seed: torch.Tensor | None
    precision: str | None


class OptionsAndOut(Options, total=False):
    out: torch.Tensor | None


class WeightsOptions(TypedDict, total=False):
    """Those of attention_weights."""

    window: Window
    seqused_q: torch.Tensor | None
    seqused_k: torch.Tensor | None
    leftpad_k: torch.Tensor | None
    ranges: torch.Tensor | None
    family: str | None
    sinks: torch.Tensor | None
    mask: torch.Tensor | None
    bias: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    softcap: float
    precision: str | None


class MatmulOptions(TypedDict, total=False):
    """Those of softmax_matmul."""

    window: Window
    mask: torch.Tensor | None
    seqused_q: torch.Tensor | None
    seqused_k: torch.Tensor | None
    leftpad_k: torch.Tensor | None
    dropout_p: float
    dropout_seed: torch.Tensor | None
    deterministic: bool
    family: str | None
    precision: str | None


DEFAULTS = {"bool": False, "float": 0.0}  # by annotation


def spelled_out(options: type) -> Callable[[Function], Function]:
    """Gives a function a signature with these options one by one, for help() and editors."""

    def decorate(function: Function) -> Function:
        own = signature(function)
        parameters = list(own.parameters.values())[:-1]
        for name, reference in options.__annotations__.items():
            annotation = reference.__forward_arg__
            default = DEFAULTS.get(annotation)
            parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
        function.__signature__ = own.replace(parameters=parameters)
        ARGUMENTS[function.__name__] = {parameter.name: None for parameter in parameters}
        return function

    return decorate


def _read_bool(name: str, option: str, value: object, passed: dict[str, Any]) -> None:
    if value is not False:
        require_bool(f"flash_cute.{name}", option, value)
        passed[option] = value


def _read_family(name: str, option: str, value: object, passed: dict[str, Any]) -> None:
    if value is not None:
        if not isinstance(value, str):
            sentence = f"family is {shown(value)}; 'sm80', 'sm90' or None is accepted"
            raise TypeError(f"flash_cute.{name}: {sentence}")
        passed[option] = value


def _read_precision(name: str, option: str, value: object, passed: dict[str, Any]) -> None:
    passed[option] = value  # what it is to the operator depends on q's dtype


def _read_number(name: str, option: str, value: object, passed: dict[str, Any]) -> None:
    if type(value) is not float:
        require_number(f"flash_cute.{name}", option, value, "a number")
    if value != 0:
        passed[option] = value


def _read_scale(name: str, option: str, value: object, passed: dict[str, Any]) -> None:
    require_number(f"flash_cute.{name}", option, value, "a number")
    try:
        scale = float(value)
    except OverflowError:
        scale = math.inf
    if not 0 < scale <= _LARGEST:  # as the operator says of bias_scale, also while a compiler traces
        raise ValueError(f"flash_cute.{name}: {option} is {scale:g}; a finite number > 0 is accepted")
    passed["bias_scale"] = scale


def _read_window(name: str, option: str, value: Window, passed: dict[str, Any]) -> None:
    limits = value if isinstance(value, (tuple, list)) else (value, value)
    if len(limits) != 2 or not all(limit is None or _is_integer(limit) for limit in limits):
        expected = "None, an int or a pair of these (left, right)"
        raise TypeError(f"flash_cute.{name}: window is {shown(value)}; {expected} is accepted")
    for side, limit in zip(("left", "right"), limits, strict=True):
        if limit is None:
            continue
        limit = limit if isinstance(limit, _INTEGERS) else index(limit)
        if isinstance(limit, int) and not -(2**63) <= limit < 2**63:
            raise ValueError(
                f"flash_cute.{name}: window's {side} limit is {shown(limit)}; less than 2**63 keys are "
                "accepted"
            )
        passed[f"window_{side}"] = limit


def _is_integer(limit: object) -> bool:
    if isinstance(limit, _INTEGERS):
        return not isinstance(limit, bool)
    if isinstance(limit, torch.Tensor):
        is_inexact = limit.is_floating_point() or limit.is_complex()
        return limit.numel() == 1 and limit.dtype != torch.bool and not is_inexact and not limit.is_meta
    if not hasattr(type(limit), "__index__"):
        return False
    try:
        index(limit)
    except TypeError:  # of an array of several numbers
        return False
    return True


# How each option that is no tensor becomes the operator's.
READERS = {
    "window": _read_window,
    "batch_invariant": _read_bool,
    "deterministic": _read_bool,
    "family": _read_family,
    "softcap": _read_number,
    "dropout_p": _read_number,
    "precision": _read_precision,
    "scale": _read_scale,
}
