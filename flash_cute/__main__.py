"""Try flash_cute on this machine: which kernel runs, how exact it is, and how fast beside PyTorch's SDPA.

Errors are the largest difference from attention in float64. Ours may be twice that of attention written with
PyTorch's operators in the same type, plus 1e-5; where it is more, the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

# torch says so when it is imported where there is no NumPy, which nothing here needs.
warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

import flash_cute  # noqa: E402
from flash_cute import build_report, program, reference  # noqa: E402

DTYPE = torch.bfloat16
FACTOR, SLACK = 2.0, 1e-5
ROUNDS = 15

Tensors = tuple[torch.Tensor, ...]


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
    """A forward of sequences of one length; its results are out and lse."""

    name: str
    causal: bool = True
    window: tuple[int, None] | None = None
    group: int = 1  # query heads per K/V head

    def inputs(self, size: Size, device: torch.device) -> Tensors:
        """Random q, k and v."""
        heads = size.heads, size.heads // self.group, size.heads // self.group
        shapes = [(size.batch, count, size.seqlen, size.head_dim) for count in heads]
        return tuple(torch.randn(shape, device=device).to(DTYPE) for shape in shapes)

    def ours(self, *inputs: torch.Tensor) -> Callable[[], Tensors]:
        return partial(flash_cute.forward, *inputs, self.causal, window=self.window)

    def sdpa(self, *inputs: torch.Tensor) -> Callable[[], Tensors]:
        """PyTorch's attention, which has no lse, and takes a window only as a mask."""
        attend = partial(scaled_dot_product_attention, *inputs, enable_gqa=self.group > 1)
        if self.window is None:
            return lambda: (attend(is_causal=self.causal),)
        q, k, _ = inputs
        mask = reference.visible(q.shape[2], k.shape[2], self.causal, self.window, q.device)
        return lambda: (attend(attn_mask=mask),)

    def in_dtype(self, *inputs: torch.Tensor, dtype: torch.dtype) -> Tensors:
        """The results by plain PyTorch operators in dtype."""
        return reference.forward(*inputs, self.causal, window=self.window, dtype=dtype)


class Backward(Case):
    """The backward of a forward; its results are dq, dk and dv for a dout of ones."""

    @staticmethod
    def _gradients(forward: Callable, inputs: Tensors) -> Callable[[], Tensors]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = forward(*leaves)[0]
        return partial(torch.autograd.grad, out, leaves, torch.ones_like(out), retain_graph=True)

    def ours(self, *inputs):
        return self._gradients(lambda *leaves: super(Backward, self).ours(*leaves)(), inputs)

    def sdpa(self, *inputs):
        return self._gradients(lambda *leaves: super(Backward, self).sdpa(*leaves)(), inputs)

    def in_dtype(self, *inputs, dtype):
        inputs = tuple(x.to(dtype) for x in inputs)
        return self._gradients(partial(super().in_dtype, dtype=dtype), inputs)()


class Packed(Case):
    """A causal forward of sequences of unequal lengths, one behind the other, PyTorch's by varlen_attn."""

    @staticmethod
    def _lengths(total: int) -> list[int]:
        """A half of the rows, a quarter, and so on, down to a single row."""
        halves = [total >> power for power in range(1, total.bit_length())]
        return [*halves, total - sum(halves)]

    def inputs(self, size, device):
        return tuple(x[0].transpose(0, 1).contiguous() for x in super().inputs(size, device))

    def _offsets(self, q: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor(self._lengths(len(q)), dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return torch.nn.functional.pad(ends, (1, 0)).to(q.device)

    def ours(self, *inputs):
        return partial(flash_cute.forward_varlen, *inputs, self._offsets(inputs[0]), causal=self.causal)

    def sdpa(self, *inputs):
        from torch.nn.attention.varlen import varlen_attn

        offsets, longest = self._offsets(inputs[0]), self._lengths(len(inputs[0]))[0]
        arguments = *inputs, offsets, offsets, longest, longest
        return lambda: (varlen_attn(*arguments, window_size=(-1, 0)),)

    def in_dtype(self, *inputs, dtype):
        sequences = zip(
            *(x.transpose(0, 1)[None].split(self._lengths(len(x)), 2) for x in inputs), strict=True
        )
        parts = [super(Packed, self).in_dtype(*sequence, dtype=dtype) for sequence in sequences]
        out, lse = (torch.cat(part, 2)[0] for part in zip(*parts, strict=True))
        return out.transpose(0, 1), lse


CASES = {
    "cpu": (
        Case("full", causal=False),
        Case("causal"),
        Case("causal, 128 keys back", window=(128, None)),
        Case("causal, 4 heads share K/V", group=4),
    )
}
CASES["cuda"] = *CASES["cpu"], Packed("causal, unequal lengths"), Backward("causal, backward")
TITLES = ("", "error", "SDPA's", "allowed", "of lse", "allowed", "ms", "SDPA's", "speed-up")
WIDTH = max(len(case.name) for case in CASES["cuda"])


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
    """The case's row of the table, and whether its results obey the rule, in maximum and root mean square.

    Of several gradients the row shows the one whose error comes nearest to what is allowed.
    """
    inputs = case.inputs(size, device)
    ours, sdpa = case.ours(*inputs), case.sdpa(*inputs)
    results = ours()  # first: PyTorch's products would complain of a backward's thread without a context
    exact = case.in_dtype(*inputs, dtype=torch.float64)
    plain = case.in_dtype(*inputs, dtype=DTYPE)

    def errors(results: Tensors) -> list[tuple[float, float]]:
        return [reference.error(*pair) for pair in zip(results, exact, strict=False)]

    allowed = [tuple(FACTOR * error + SLACK for error in pair) for pair in errors(plain)]
    found, of_sdpa = errors(results), errors(sdpa())
    within = all(e <= a for pair in zip(found, allowed, strict=True) for e, a in zip(*pair, strict=True))
    worst = max(range(len(of_sdpa)), key=lambda index: found[index][0] / allowed[index][0])
    shown = [found[worst][0], of_sdpa[worst][0], allowed[worst][0]]
    has_lse = len(of_sdpa) < len(found)
    shown = [f"{error:.1e}" for error in (*shown, *((found[-1][0], allowed[-1][0]) if has_lse else ()))]
    our_time, sdpa_time = milliseconds([ours, sdpa], size.calls, device)
    times = [f"{our_time:.3f}", f"{sdpa_time:.3f}", f"{sdpa_time / our_time:.2f}"]
    return [case.name, *shown, *([] if has_lse else ["", ""]), *times], within


def show_row(cells: list[str]) -> None:
    print(f"{cells[0]:<{WIDTH}}", *(f"{cell:>10}" for cell in cells[1:]))


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
    if options.device == "cuda" and not use_gpu:
        parser.error("--device must be cpu where there is no GPU, or no kernel for it, got cuda")
    device = torch.device(options.device or ("cuda" if use_gpu else "cpu"))
    report = build_report.installed()
    if report.exists() and (line := build_report.what_was_built(json.loads(report.read_text()))):
        print(f"{line}\n")
    size = (QUICK_SIZES if options.quick else SIZES)[device.type]

    torch.manual_seed(0)
    shape = f"({size.batch}, {size.heads}, {size.seqlen}, {size.head_dim})"
    print(f"(batch, heads, seqlen, head_dim) = {shape}, {DTYPE}; causal attention of it runs as\n")
    print(flash_cute.explain(*Case("causal").inputs(size, device), causal=True))
    print("\nlargest errors against float64, of out or a gradient and of lse, and time per call\n")
    show_row(TITLES)
    all_within = True
    for case in CASES[device.type]:
        row, within = measure(case, size, device)
        show_row([*row, *([] if within else ["  error too large"])])
        all_within &= within
    print("\nevery error is within twice PyTorch's own in this type + 1e-5" if all_within else "\nFAILED")
    return not all_within


if __name__ == "__main__":
    program.run(main)
