"""Who is measured: each family of ours, PyTorch's own kernels, and newer_flash's where they are installed.

Forward, backward or one after the other.

A forward gives out and LSE, the others dq, dk and dv. A backward is called on what its own forward saved.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import deterministic as memory

import flash_cute
from flash_cute.precision import is_tf32

from . import newer_flash
from .problem import ALL_DTYPES, CannotRun, Problem

aten = torch.ops.aten
CPU = "cpu"  # our contender where there is no kernel family
DETERMINISTIC = " deterministic"  # behind a family's or a peer's name
Run = Callable[[], tuple[torch.Tensor, ...]]

# Above this the scores of PyTorch's math, kept several times in float32, no longer fit beside the rest.
MATH_SCORES_LIMIT = 2**31


def operators_precision(q) -> dict[str, bool]:
    """torch.get_float32_matmul_precision(), as our operators take it; their faces see to it themselves."""
    return {"tf32": is_tf32(None, q.dtype)}


def ours(problem: Problem, q, k, v, *, family: str | None) -> Run:
    """Of float32 as torch.get_float32_matmul_precision() says."""
    if problem.dtype == "fp32" and family == "sm90":
        raise CannotRun("float32 has kernels of sm80")
    return partial(flash_cute.forward, q, k, v, problem.causal, window=problem.window, family=family)


def ours_backward(problem: Problem, q, k, v, dout, saved, *, family: str | None, deterministic: bool) -> Run:
    left, right = problem.window or (None, None)
    options = {"window_left": left, "window_right": right, "family": family, "deterministic": deterministic}
    options |= operators_precision(q)
    backward = torch.ops.flash_cute._backward
    return partial(backward, dout, None, q, k, v, *saved, problem.causal, **options)


def require_top_left_mask(problem: Problem) -> None:
    """PyTorch's causal mask is aligned top-left, ours bottom-right: they agree on squares only."""
    if problem.window is not None:
        raise CannotRun("no window")
    if problem.causal and problem.seqlen_q != problem.seqlen_k:
        raise CannotRun("causal is top-left aligned")


def require_no_groups(problem: Problem) -> None:
    if problem.heads_q != problem.heads_kv:
        raise CannotRun("no gradients of grouped heads")


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
        out, *others = forward(window_size_left=left, window_size_right=right)
        return out.transpose(1, 2), *others

    return run


def flash_backward(problem: Problem, q, k, v, dout, saved) -> Run:
    out, lse, *others = saved
    if q.device.type == "cpu":
        require_no_groups(problem)
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return partial(backward, dout, q, k, v, out, lse, 0.0, problem.causal)
    if problem.window is None:
        *lengths, seed, offset, _ = others
        backward = aten._scaled_dot_product_flash_attention_backward
        return partial(backward, dout, q, k, v, out, lse, *lengths, 0.0, problem.causal, seed, offset)
    left, right = (-1 if side is None else side for side in problem.window)
    tokens_first = (tensor.transpose(1, 2) for tensor in (dout, q, k, v, out))
    lengths = None, None, problem.seqlen_q, problem.seqlen_k
    seed, offset, _ = others
    arguments = *tokens_first, lse, *lengths, 0.0, problem.causal, seed, offset
    backward = partial(aten._flash_attention_backward, *arguments)

    def run():
        gradients = backward(window_size_left=left, window_size_right=right)
        return tuple(gradient.transpose(1, 2) for gradient in gradients)

    return run


def flash_backward_deterministic(problem: Problem, q, k, v, dout, saved) -> Run:
    """The same in PyTorch's deterministic mode, but for its filling of new memory."""
    backward = flash_backward(problem, q, k, v, dout, saved)

    def run():
        enabled, fills = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
        torch.use_deterministic_algorithms(True)
        memory.fill_uninitialized_memory = False
        try:
            return backward()
        finally:
            memory.fill_uninitialized_memory = fills
            torch.use_deterministic_algorithms(enabled)

    return run


def cudnn(problem: Problem, q, k, v) -> Run:
    require_top_left_mask(problem)
    return partial(aten._scaled_dot_product_cudnn_attention, q, k, v, None, True, 0.0, problem.causal)


def cudnn_backward(problem: Problem, q, k, v, dout, saved) -> Run:
    out, lse, *lengths, seed, offset, _ = saved
    backward = aten._scaled_dot_product_cudnn_attention_backward
    arguments = dout, q, k, v, out, lse, seed, offset, None, *lengths, 0.0, problem.causal
    return partial(backward, *arguments)


def efficient(problem: Problem, q, k, v) -> Run:
    require_top_left_mask(problem)
    k, v = expanded(problem, k), expanded(problem, v)
    return partial(aten._scaled_dot_product_efficient_attention, q, k, v, None, True, 0.0, problem.causal)


def efficient_backward(problem: Problem, q, k, v, dout, saved) -> Run:
    require_no_groups(problem)
    backward = aten._scaled_dot_product_efficient_attention_backward
    return partial(backward, dout, q, k, v, None, *saved, 0.0, [True, True, True, False], problem.causal)


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


PEERS = {
    "flash": flash,
    "flash" + DETERMINISTIC: flash,
    "cudnn": cudnn,
    "efficient": efficient,
    "math": math,
}
NEWER = {name + how: version for name, version in newer_flash.VERSIONS.items() for how in ("", DETERMINISTIC)}
PEERS |= {name: partial(newer_flash.forward, version=version) for name, version in NEWER.items()}
BACKWARDS = {
    "flash": flash_backward,
    "flash" + DETERMINISTIC: flash_backward_deterministic,
    "cudnn": cudnn_backward,
    "efficient": efficient_backward,
}
BACKWARDS |= {
    name: partial(newer_flash.backward, version=version, deterministic=name.endswith(DETERMINISTIC))
    for name, version in NEWER.items()
}
FREE_PEERS = tuple(name for name in PEERS if not name.endswith(DETERMINISTIC))
DEFAULT_PEERS = ("flash", "cudnn")
PEERS_ON_CPU = ("flash", "math")


def serves(device: torch.device, family: str, backward: bool) -> str | None:
    """The family whose kernels a device runs when asked for a compiled one; any of its kernels can tell."""
    element, head_dims = next(iter(flash_cute.supported()["families"][family].items()))
    q = torch.empty(1, 1, 1, head_dims[0], dtype=ALL_DTYPES.get(element, torch.float32), device=device)
    try:
        return flash_cute.explain(q, q, q, family=family, backward=backward)["family"]
    except ValueError:
        return None


def families(device: torch.device, direction: str = "forward") -> list[str]:
    """Names of the compiled families that run on this device, once where two mean the same; or 'cpu'."""
    if device.type == "cpu":
        return [CPU]
    found = [serves(device, name, direction == "backward") for name in flash_cute.supported()["families"]]
    return list(dict.fromkeys(filter(None, found)))


def mine(device: torch.device, direction: str) -> list[str]:
    """Names of our contenders: the families, and with a backward each deterministic, too."""
    found = families(device, direction)
    return found if direction == "forward" else found + [family + DETERMINISTIC for family in found]


def compared(mine: list[str], peers: list[str]) -> dict[str, list[str]]:
    """Contender -> those that it is compared with: peers of its mode, deterministic also our free one."""

    def others(name: str) -> list[str]:
        free, mode = name.removesuffix(DETERMINISTIC), name.endswith(DETERMINISTIC)
        return [free] * mode + [peer for peer in peers if peer.endswith(DETERMINISTIC) == mode]

    return {name: others(name) for name in mine}


def prepare(name: str, problem: Problem, q, k, v, *dout) -> Run:
    """The contender's call for these inputs, run once; raises CannotRun where it has no kernel for them."""
    if name in PEERS:
        forward, backward = PEERS[name], BACKWARDS.get(name)
    else:
        free = name.removesuffix(DETERMINISTIC)
        family = None if free == CPU else free
        forward = partial(ours, family=family)
        backward = partial(ours_backward, family=family, deterministic=name != free)
    arguments = problem, q, k, v, *dout
    return in_direction(problem, forward(problem, q, k, v), backward and partial(backward, *arguments))


def in_direction(problem, forward: Run, backward: Callable[[tuple], Run] | None) -> Run:
    """The problem's call, run once; backward makes one from what the forward gave, None where it cannot."""
    if problem.direction == "forward":
        run = forward
    elif backward is None:
        raise CannotRun("no operator of its own for the gradients")
    elif problem.direction == "backward":
        run = attempt(lambda: backward(forward()))
    else:

        def run():
            return backward(forward())()

    attempt(run)
    return run


def attempt(run: Callable):
    """What the call gives; raises CannotRun where it has no kernel for its inputs."""
    try:
        return run()
    except (RuntimeError, NotImplementedError, ValueError, CannotRun) as error:
        raise CannotRun(f"{error}\n".splitlines()[0]) from error


def prepare_all(names: list[str], problem: Problem, *inputs) -> tuple[dict[str, Run], dict[str, str]]:
    """({name: its call}, {name: why it is left out}); left out is what has no kernel, or another result."""
    running, excluded, first = {}, {}, None
    for name in names:
        try:
            run = prepare(name, problem, *inputs)
        except CannotRun as reason:
            excluded[name] = str(reason)
            continue
        results = comparable(problem, run())
        first = first or results
        if all(map(agrees, results, first)):
            running[name] = run
        else:
            excluded[name] = "its result differs"
    return running, excluded


def comparable(problem, results: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Of what a call gave, that which all contenders give alike: out, or the gradients."""
    return results[:1] if problem.direction == "forward" else results[:3]


def agrees(result: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contenders compute the same function: looser than rounding, tighter than another mask."""
    return torch.allclose(result.float(), other.float(), rtol=0.1, atol=0.1)
