"""Who is measured: each family of ours and PyTorch's own kernels, called so that all give out and LSE."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_cute

from .problem import DTYPES, Problem

aten = torch.ops.aten
CPU = "cpu"  # our contender where there is no kernel family
Run = Callable[[], tuple[torch.Tensor, ...]]

# Above this the scores of PyTorch's math, kept several times in float32, no longer fit beside the rest.
MATH_SCORES_LIMIT = 2**31


class CannotRun(Exception):
    """A contender has no kernel for a problem; the message says why."""


def ours(problem: Problem, q, k, v, *, family: str | None) -> Run:
    return partial(flash_cute.forward, q, k, v, problem.causal, window=problem.window, family=family)


def require_top_left_mask(problem: Problem) -> None:
    """PyTorch's causal mask is aligned top-left, ours bottom-right: they agree on squares only."""
    if problem.window is not None:
        raise CannotRun("no window")
    if problem.causal and problem.seqlen_q != problem.seqlen_k:
        raise CannotRun("causal is top-left aligned")


def expanded(problem: Problem, tensor: torch.Tensor) -> torch.Tensor:
    """Each K/V head repeated for its query heads, outside the timing, for kernels without GQA."""
    return tensor.repeat_interleave(problem.heads_q // problem.heads_kv, 1)


def flash(problem: Problem, q, k, v) -> Run:
    """FlashAttention-2 as PyTorch ships it; windows through the operator below, which takes (b, s, h, d)."""
    if q.device.type == "cpu":
        require_top_left_mask(problem)
        k, v = expanded(problem, k), expanded(problem, v)
        return partial(aten._scaled_dot_product_flash_attention_for_cpu, q, k, v, 0.0, problem.causal)
    if problem.window is None:
        return partial(aten._scaled_dot_product_flash_attention, q, k, v, 0.0, problem.causal)
    left, right = (-1 if side is None else side for side in problem.window)
    tokens_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
    lengths = None, None, problem.seqlen_q, problem.seqlen_k
    forward = partial(aten._flash_attention_forward, *tokens_first, *lengths, 0.0, problem.causal, False)

    def run():
        out, lse, *_ = forward(window_size_left=left, window_size_right=right)
        return out.transpose(1, 2), lse

    return run


def cudnn(problem: Problem, q, k, v) -> Run:
    require_top_left_mask(problem)
    return partial(aten._scaled_dot_product_cudnn_attention, q, k, v, None, True, 0.0, problem.causal)


def efficient(problem: Problem, q, k, v) -> Run:
    require_top_left_mask(problem)
    k, v = expanded(problem, k), expanded(problem, v)
    return partial(aten._scaled_dot_product_efficient_attention, q, k, v, None, True, 0.0, problem.causal)


def math(problem: Problem, q, k, v) -> Run:
    """SDPA's composite of matrix products and softmax; it gives no LSE."""
    require_top_left_mask(problem)
    if problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k > MATH_SCORES_LIMIT:
        raise CannotRun("the score matrix is too large")
    grouped = problem.heads_q != problem.heads_kv

    def run():
        with sdpa_kernel(SDPBackend.MATH):
            attend = torch.nn.functional.scaled_dot_product_attention
            return (attend(q, k, v, is_causal=problem.causal, enable_gqa=grouped),)

    return run


PEERS = {"flash": flash, "cudnn": cudnn, "efficient": efficient, "math": math}
DEFAULT_PEERS = ("flash", "cudnn")
PEERS_ON_CPU = ("flash", "math")


def runs_on(device: torch.device, family: str) -> bool:
    """Whether a device runs a compiled family; any one of its kernels can tell."""
    element, head_dims = next(iter(flash_cute.supported()["families"][family].items()))
    q = torch.empty(1, 1, 1, head_dims[0], dtype=DTYPES[element], device=device)
    try:
        flash_cute.explain(q, q, q, family=family)
    except ValueError:
        return False
    return True


def families(device: torch.device) -> list[str]:
    """Names of our contenders on this device: each compiled family that runs on it, or 'cpu'."""
    if device.type == "cpu":
        return [CPU]
    return [family for family in flash_cute.supported()["families"] if runs_on(device, family)]


def prepare(name: str, problem: Problem, q, k, v) -> Run:
    """The contender's call for these inputs, run once; raises CannotRun where it has no kernel for them."""
    if name in PEERS:
        run = PEERS[name](problem, q, k, v)
    else:
        run = ours(problem, q, k, v, family=None if name == CPU else name)
    attempt(run)
    return run


def attempt(run: Callable):
    """What the call gives; raises CannotRun where it has no kernel for its inputs."""
    try:
        return run()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise CannotRun(str(error).splitlines()[0]) from error


def prepare_all(names: list[str], problem: Problem, q, k, v) -> tuple[dict[str, Run], dict[str, str]]:
    """({name: its call}, {name: why it is left out}); left out is what has no kernel, or another result."""
    running, excluded, first_out = {}, {}, None
    for name in names:
        try:
            run = prepare(name, problem, q, k, v)
        except CannotRun as reason:
            excluded[name] = str(reason)
            continue
        out = run()[0]
        first_out = out if first_out is None else first_out
        if agrees(out, first_out):
            running[name] = run
        else:
            excluded[name] = "its result differs"
    return running, excluded


def agrees(out: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contenders compute the same function: looser than rounding, tighter than another mask."""
    return bool((out.float() - other.float()).abs().amax() < 0.1)
