"""PyTorch's own kernels, called below autograd, by the operators of aten."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils import deterministic as memory

from .base import CONTIGUOUS, DENSE, PACKED, Call, CannotRun, Peer, Run, Tensors, turned

aten = torch.ops.aten
# Above this the scores of PyTorch's math, kept several times in float32, no longer fit beside the rest.
MATH_SCORES_LIMIT = 2**31


def require_top_left_mask(problem) -> None:
    """PyTorch's causal mask is aligned top-left, ours bottom-right: they agree on squares only."""
    if problem.window is not None:
        raise CannotRun("no window")
    if problem.causal and problem.seqlen_q != problem.seqlen_k:
        raise CannotRun("causal is top-left aligned")


def require_one_width(problem) -> None:
    if problem.width_v != problem.head_dim:
        raise CannotRun("v as wide as q and k only")


def require_no_groups(problem) -> None:
    if problem.heads_q != problem.heads_kv:
        raise CannotRun("no gradients of grouped heads")


def expanded(problem, tensor: torch.Tensor) -> torch.Tensor:
    """Each K/V head repeated for its query heads, outside the timing, for kernels without GQA."""
    return tensor.repeat_interleave(problem.heads_q // problem.heads_kv, 1)


def lengths_of(problem, offsets) -> tuple:
    """Offsets, none of dense inputs, and longest sequences, of queries and of keys."""
    return offsets, offsets, problem.seqlen_q, problem.seqlen_k


class Cached(Peer):
    """Caches by SDPA's face, without a mask: its causal one is aligned top-left."""

    hides_keys = False
    backend: SDPBackend

    def cached(self, cache, page: None) -> Call:
        def call(k, v):
            with sdpa_kernel(self.backend):
                return scaled_dot_product_attention(cache.q, k, v, enable_gqa=True)

        return call


def deterministically(backward: Run) -> Run:
    """The same in PyTorch's deterministic mode, but for its filling of new memory."""

    def run() -> Tensors:
        enabled, fills = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
        torch.use_deterministic_algorithms(True)
        memory.fill_uninitialized_memory = False
        try:
            return backward()
        finally:
            memory.fill_uninitialized_memory = fills
            torch.use_deterministic_algorithms(enabled)

    return run


class Flash(Cached):
    """FlashAttention-2 as PyTorch ships it; windows and packed sequences by what SDPA's operator calls."""

    calls = frozenset({DENSE, PACKED, CONTIGUOUS})
    backend = SDPBackend.FLASH_ATTENTION
    deterministic = True

    def forward(self, problem, q, k, v, offsets=None) -> Run:
        require_one_width(problem)
        if q.device.type == "cpu" and offsets is None:
            require_top_left_mask(problem)
            k, v = expanded(problem, k), expanded(problem, v)
            return partial(aten._scaled_dot_product_flash_attention_for_cpu, q, k, v, 0.0, problem.causal)
        if offsets is None and problem.window is None:
            return partial(aten._scaled_dot_product_flash_attention, q, k, v, 0.0, problem.causal)
        turn, window = self.below_sdpa(problem, offsets)
        arguments = *map(turn, (q, k, v)), *lengths_of(problem, offsets), 0.0, problem.causal, False

        def run() -> Tensors:
            out, *others = aten._flash_attention_forward(*arguments, **window)
            return turn(out), *others

        return run

    def backward(self, problem, q, k, v, dout, saved, offsets=None, deterministic: bool = False) -> Run:
        run = self.free_backward(problem, q, k, v, dout, saved, offsets)
        return deterministically(run) if deterministic else run

    def free_backward(self, problem, q, k, v, dout, saved, offsets) -> Run:
        out, lse, *others = saved
        if q.device.type == "cpu" and offsets is None:
            require_no_groups(problem)
            backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
            return partial(backward, dout, q, k, v, out, lse, 0.0, problem.causal)
        if offsets is None and problem.window is None:
            *lengths, seed, offset, _ = others
            backward = aten._scaled_dot_product_flash_attention_backward
            return partial(backward, dout, q, k, v, out, lse, *lengths, 0.0, problem.causal, seed, offset)
        turn, window = self.below_sdpa(problem, offsets)
        seed, offset, _ = others
        arguments = *map(turn, (dout, q, k, v, out)), lse, *lengths_of(problem, offsets)

        def run() -> Tensors:
            backward = aten._flash_attention_backward
            return tuple(map(turn, backward(*arguments, 0.0, problem.causal, seed, offset, **window)))

        return run

    @staticmethod
    def below_sdpa(problem, offsets) -> tuple[Callable, dict[str, int]]:
        """How tensors are turned there, and a window's arguments."""
        left, right = (-1 if side is None else side for side in problem.window or (None, None))
        window = {"window_size_left": left, "window_size_right": right} if problem.window else {}
        return partial(turned, turns=offsets is None), window


class Cudnn(Cached):
    calls = frozenset({DENSE, PACKED, CONTIGUOUS})
    backend = SDPBackend.CUDNN_ATTENTION

    def forward(self, problem, q, k, v, offsets=None) -> Run:
        if offsets is None:
            require_top_left_mask(problem)
            forward, lengths = aten._scaled_dot_product_cudnn_attention, ()
        else:
            forward, lengths = aten._cudnn_attention_forward, lengths_of(problem, offsets)
        return partial(forward, q, k, v, None, *lengths, True, 0.0, problem.causal)

    def backward(self, problem, q, k, v, dout, saved, offsets=None, deterministic: bool = False) -> Run:
        if offsets is None:
            out, lse, *lengths, seed, offset, _ = saved
            backward = aten._scaled_dot_product_cudnn_attention_backward
        else:
            out, lse, *_, seed, offset, _ = saved
            backward, lengths = aten._cudnn_attention_backward, lengths_of(problem, offsets)
        arguments = dout, q, k, v, out, lse, seed, offset, None, *lengths, 0.0, problem.causal
        return partial(backward, *arguments)


class Efficient(Peer):
    calls = frozenset({DENSE})

    def forward(self, problem, q, k, v, offsets=None) -> Run:
        require_top_left_mask(problem)
        k, v = expanded(problem, k), expanded(problem, v)
        forward = aten._scaled_dot_product_efficient_attention
        return partial(forward, q, k, v, None, True, 0.0, problem.causal)

    def backward(self, problem, q, k, v, dout, saved, offsets=None, deterministic: bool = False) -> Run:
        require_no_groups(problem)
        backward = aten._scaled_dot_product_efficient_attention_backward
        needed = [True, True, True, False]
        return partial(backward, dout, q, k, v, None, *saved, 0.0, needed, problem.causal)


class Math(Peer):
    """SDPA's composite of matrix products and softmax; it gives no LSE."""

    calls = frozenset({DENSE})

    def forward(self, problem, q, k, v, offsets=None) -> Run:
        require_top_left_mask(problem)
        if problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k > MATH_SCORES_LIMIT:
            raise CannotRun("the score matrix is too large")
        grouped = problem.heads_q != problem.heads_kv

        def run() -> Tensors:
            with sdpa_kernel(SDPBackend.MATH):
                attend = scaled_dot_product_attention
                return (attend(q, k, v, is_causal=problem.causal, enable_gqa=grouped),)

        return run


class Sdpa:
    """SDPA by one of its kernels, with gradients by autograd, where it takes what changes scores.

    takes: arguments of ours that it has in another form.
    """

    def __init__(self, backend: SDPBackend, *takes: str):
        self.backend, self.takes = backend, {*takes}

    def forward(self, q, k, v, causal: bool, attn_mask: torch.Tensor | None, options: dict) -> Callable:
        """The call. attn_mask: of the options' mask or bias, with the causal one in it."""
        if refused := options.keys() - self.takes:
            raise CannotRun(f"no {', '.join(sorted(refused))}")
        given = {"attn_mask": attn_mask, "is_causal": causal and attn_mask is None}
        given["dropout_p"] = options.get("dropout_p", 0.0)

        def call() -> torch.Tensor:
            with sdpa_kernel(self.backend):
                return scaled_dot_product_attention(q, k, v, **given)

        return call


SDPA = {
    "cudnn": Sdpa(SDPBackend.CUDNN_ATTENTION, "mask", "bias", "dropout_p"),
    "flash": Sdpa(SDPBackend.FLASH_ATTENTION, "dropout_p"),
    "efficient": Sdpa(SDPBackend.EFFICIENT_ATTENTION, "mask", "bias", "dropout_p"),
}


class Flex:
    """FlexAttention, compiled. Unlike the peers it takes what changes scores and masks as functions."""

    def __init__(self):
        torch._dynamo.config.recompile_limit = 1000
        self.attend = torch.compile(flex_attention, dynamic=False)

    def forward(self, mask_mod: Callable, q, k, v) -> Callable[[], torch.Tensor]:
        """The call with a mask of (query, key)."""
        return self.scored(q, k, v, None, lambda b, h, i, j: mask_mod(i, j))

    def scored(
        self,
        q,
        k,
        v,
        score_mod: Callable | None,
        mask_mod: Callable | None,
        batch: int | None = None,
    ) -> Callable[[], torch.Tensor]:
        """The call with FlexAttention's own functions; its block mask is made before.

        batch: of the mask, None: alike for all sequences.
        """
        mask = None
        if mask_mod:
            sizes = batch, None, q.shape[2], k.shape[2]
            mask = torch.compile(create_block_mask)(mask_mod, *sizes, device=q.device)

        def call() -> torch.Tensor:
            try:
                return self.attend(q, k, v, score_mod=score_mod, block_mask=mask)
            except Exception as error:  # of any kind, its compiler's own
                raise CannotRun(f"{type(error).__name__}: {error}") from error

        return call
