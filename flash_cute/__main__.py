"""Try flash_cute on this machine: which kernel runs, how exact it is, and how fast beside PyTorch's SDPA.

Errors are the largest difference from attention in float64. Ours may be twice that of attention written with
PyTorch's operators in the same type, plus 1e-5; where it is more, the exit status is 1.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

import flash_cute
from flash_cute import reference

DTYPE = torch.bfloat16
FACTOR, SLACK = 2.0, 1e-5
ROUNDS = 15


@dataclass(frozen=True)
class Size:
    batch: int
    heads: int
    seqlen: int
    head_dim: int
    calls: int  # per timing: enough to make the synchronisation around them cheap


SIZES = {"cuda": Size(2, 16, 2048, 128, calls=20), "cpu": Size(1, 8, 1024, 64, calls=1)}
QUICK_SIZES = {"cuda": Size(1, 8, 512, 128, calls=20), "cpu": Size(1, 4, 256, 64, calls=1)}


@dataclass(frozen=True)
class Case:
    name: str
    causal: bool = True
    window: tuple[int, None] | None = None
    group: int = 1  # query heads per K/V head

    def inputs(self, size: Size, device: torch.device) -> list[torch.Tensor]:
        """Random q, k and v."""
        heads = size.heads, size.heads // self.group, size.heads // self.group
        shapes = [(size.batch, count, size.seqlen, size.head_dim) for count in heads]
        return [torch.randn(shape, device=device).to(DTYPE) for shape in shapes]

    def ours(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable:
        return partial(flash_cute.forward, q, k, v, self.causal, window=self.window)

    def sdpa(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable:
        """PyTorch's attention, which takes a window only as a mask."""
        attend = partial(scaled_dot_product_attention, q, k, v, enable_gqa=self.group > 1)
        if self.window is None:
            return partial(attend, is_causal=self.causal)
        mask = reference.visible(q.shape[2], k.shape[2], self.causal, self.window, q.device)
        return partial(attend, attn_mask=mask)

    def in_dtype(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype):
        """(out, lse) of plain PyTorch operators in dtype."""
        return reference.forward(q, k, v, self.causal, window=self.window, dtype=dtype)


CASES = (
    Case("full", causal=False),
    Case("causal"),
    Case("causal, 128 keys back", window=(128, None)),
    Case("causal, 4 heads share K/V", group=4),
)
TITLES = ("", "out", "SDPA's", "allowed", "lse", "allowed", "ms", "SDPA's", "speed-up")


def milliseconds(functions: list[Callable], calls: int, device: torch.device) -> list[float]:
    """Best time per call of each; they take turns, so that a warming device or a busy host favours none."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    best = [math.inf] * len(functions)
    for _ in range(ROUNDS):
        for index, function in enumerate(functions):
            synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            synchronize()
            best[index] = min(best[index], 1e3 * (time.perf_counter() - start) / calls)
    return best


def measure(case: Case, size: Size, device: torch.device) -> tuple[list[str], bool]:
    """The case's row of the table, and whether out and lse obey the rule, in maximum and root mean square."""
    inputs = case.inputs(size, device)
    ours, sdpa = case.ours(*inputs), case.sdpa(*inputs)
    exact_out, exact_lse = case.in_dtype(*inputs, torch.float64)
    plain_out, plain_lse = case.in_dtype(*inputs, DTYPE)
    out, lse = ours()

    def allowed(plain: torch.Tensor, exact: torch.Tensor) -> list[float]:
        return [FACTOR * error + SLACK for error in reference.error(plain, exact)]

    errors = [*reference.error(out, exact_out), *reference.error(lse, exact_lse)]
    limits = [*allowed(plain_out, exact_out), *allowed(plain_lse, exact_lse)]
    within = all(error <= limit for error, limit in zip(errors, limits, strict=True))

    sdpa_error, _ = reference.error(sdpa(), exact_out)
    shown = [errors[0], sdpa_error, limits[0], errors[2], limits[2]]
    our_time, sdpa_time = milliseconds([ours, sdpa], size.calls, device)
    times = [f"{our_time:.3f}", f"{sdpa_time:.3f}", f"{sdpa_time / our_time:.2f}"]
    return [case.name, *(f"{error:.1e}" for error in shown), *times], within


def show_row(cells: list[str]) -> None:
    print(f"{cells[0]:<{max(len(case.name) for case in CASES)}}", *(f"{cell:>10}" for cell in cells[1:]))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m flash_cute", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--device", choices=SIZES, help="default: cuda if there is a GPU and this build has kernels"
    )
    parser.add_argument("--quick", action="store_true", help="smaller inputs")
    options = parser.parse_args()
    use_gpu = torch.cuda.is_available() and flash_cute.supported()["families"]
    if torch.cuda.is_available() and not use_gpu:
        print("This build has no kernels for the GPU here; docs/building.md says how to get them.\n")
    device = torch.device(options.device or ("cuda" if use_gpu else "cpu"))
    size = (QUICK_SIZES if options.quick else SIZES)[device.type]

    torch.manual_seed(0)
    shape = f"({size.batch}, {size.heads}, {size.seqlen}, {size.head_dim})"
    print(f"(batch, heads, seqlen, head_dim) = {shape}, {DTYPE}; causal attention of it runs as\n")
    print(flash_cute.explain(*CASES[1].inputs(size, device), causal=True))
    print("\nlargest errors against float64, and time per call\n")
    show_row(TITLES)
    all_within = True
    for case in CASES:
        row, within = measure(case, size, device)
        show_row([*row, *([] if within else ["  error too large"])])
        all_within &= within
    print("\nevery error is within twice PyTorch's own in this type + 1e-5" if all_within else "\nFAILED")
    return not all_within


if __name__ == "__main__":
    sys.exit(main())
