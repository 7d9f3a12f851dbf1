"""One attention problem to measure: its shape, mask and type, its inputs, and the work that it demands."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ALL_DTYPES = DTYPES | {"fp32": torch.float32}
MASKS = {"full": [False], "causal": [True], "both": [False, True]}  # of --mask: which are causal
LSE_BYTES = 4


class Work(NamedTuple):
    """What one direction does: matrix products, and passes over tensors like q and k, and over the LSE."""

    products: int
    tensors: int
    lse: int


DIRECTIONS = {
    "forward": Work(products=2, tensors=2, lse=1),  # q, k, v; out
    "backward": Work(products=5, tensors=4, lse=1),  # q, k, v, out, dout; dq, dk, dv
    "both": Work(products=7, tensors=6, lse=2),
}


@dataclass(frozen=True)
class Problem:
    """q is (batch, heads_q, seqlen_q, head_dim), k and v are (batch, heads_kv, seqlen_k, head_dim)."""

    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    dtype: str = "bf16"
    direction: str = "forward"

    @property
    def mask(self) -> str:
        window = "" if self.window is None else f"window {self.window[0]},{self.window[1]}"
        return " ".join(filter(None, ["causal" if self.causal else "", window])) or "full"

    def visited_pairs(self, block_m: int, block_n: int) -> int:
        """(query, key) pairs of one head, hidden ones too, in the blocks that tiles of block_m queries visit.

        For each tile these are the blocks of block_n keys from the first key of its first query to the last
        key of its last one; with (1, 1) the pairs that the mask lets through.
        """
        left, right = self.window or (None, None)
        right = 0 if self.causal else right
        blocks = 0
        for row in range(0, self.seqlen_q, block_m):
            diagonal = row + self.seqlen_k - self.seqlen_q
            last_diagonal = min(diagonal + block_m, self.seqlen_k) - 1
            first = 0 if left is None else max(0, diagonal - left)
            end = self.seqlen_k if right is None else min(self.seqlen_k, last_diagonal + right + 1)
            blocks += -(-end // block_n) - first // block_n if end > first else 0
        return blocks * block_m * block_n

    @property
    def flops(self) -> int:
        """All products, of visible pairs only: for causal half of the square plus half of its diagonal."""
        return self.visited_flops(1, 1)

    def visited_flops(self, block_m: int, block_n: int) -> int:
        """All products, of all visited_pairs."""
        pairs = self.visited_pairs(block_m, block_n) * self.batch * self.heads_q
        return 2 * DIRECTIONS[self.direction].products * self.head_dim * pairs

    @property
    def bytes(self) -> int:
        """Each input read once and each result written once; both directions are two calls."""
        work = DIRECTIONS[self.direction]
        q = self.batch * self.heads_q * self.seqlen_q
        kv = self.batch * self.heads_kv * self.seqlen_k
        row = self.head_dim * ALL_DTYPES[self.dtype].itemsize
        return work.tensors * (q + kv) * row + work.lse * q * LSE_BYTES

    def inputs(self, device, layout: str = "bshd", seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Random (q, k, v), and with a backward dout.

        bshd stores a token's heads together, as projections do, bhsd each head apart.
        """
        generator = torch.Generator(device).manual_seed(seed)

        def make(heads: int, seqlen: int) -> torch.Tensor:
            stored = (heads, seqlen) if layout == "bhsd" else (seqlen, heads)
            values = torch.randn(self.batch, *stored, self.head_dim, generator=generator, device=device)
            values = values.to(ALL_DTYPES[self.dtype])
            return values if layout == "bhsd" else values.transpose(1, 2)

        q, kv = (self.heads_q, self.seqlen_q), (self.heads_kv, self.seqlen_k)
        shapes = [q, kv, kv] if self.direction == "forward" else [q, kv, kv, q]
        return tuple(make(*shape) for shape in shapes)

    def to_json(self) -> dict:
        return asdict(self) | {"mask": self.mask, "flops": self.flops, "bytes": self.bytes}


def parse_window(text: str) -> tuple[int | None, int | None]:
    """'left,right', each a number or empty for unlimited; one number alone stands for both."""
    sides = [int(side) if side.strip() else None for side in text.split(",")]
    if len(sides) > 2:
        raise argparse.ArgumentTypeError(f"a window is left,right, not {text!r}")
    return sides[0], sides[-1]


def parse_shape(text: str) -> tuple[int, ...]:
    """'batch,heads_q,heads_kv,seqlen_q,seqlen_k,head_dim'."""
    shape = tuple(int(length) for length in text.split(","))
    if len(shape) != 6:
        raise argparse.ArgumentTypeError(
            f"a shape is batch,heads_q,heads_kv,seqlen_q,seqlen_k,head_dim, not {text!r}"
        )
    return shape


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def add_direction(args: argparse.ArgumentParser, *choices: str) -> None:
    """--pass, as options.direction: one of the choices, by default of all DIRECTIONS."""
    choices = choices or tuple(DIRECTIONS)
    args.add_argument("--pass", dest="direction", choices=choices, default="forward", help="what is measured")


def add_precision(args: argparse.ArgumentParser) -> None:
    args.add_argument(
        "--precision", choices=["highest", "high"], default="highest", help="of products of float32"
    )


def add_shapes(args: argparse.ArgumentParser) -> None:
    metavar = "B,HQ,HKV,SQ,SK,D"
    args.add_argument("--shape", type=parse_shape, action="append", metavar=metavar, help="may be repeated")
    args.add_argument("--mask", choices=MASKS, default="both")
    args.add_argument(
        "--window", type=parse_window, metavar="LEFT,RIGHT", help="sliding window of --shape's problems"
    )


def add_grid(args: argparse.ArgumentParser) -> None:
    """The papers' grid, which --shape takes the place of."""
    add_shapes(args)
    args.add_argument("--tokens", type=int, default=16384, help="of each cell of the grid, over the batch")
    args.add_argument("--hidden", type=int, default=2048, help="heads x head dim in the grid")
    args.add_argument("--head-dims", type=numbers, default=[64, 128, 256])
    args.add_argument("--seqlens", type=numbers, default=[512, 1024, 2048, 4096, 8192, 16384])


def of_shapes(options: argparse.Namespace, shapes: list[tuple[int, ...]], dtypes: list[str]) -> list[Problem]:
    return [
        Problem(*shape, causal, options.window, dtype, options.direction)
        for shape in shapes
        for causal in MASKS[options.mask]
        for dtype in dtypes
    ]


def of_grid(options: argparse.Namespace) -> list[Problem]:
    """Those of --shape, or else the papers' grid."""
    if options.shape:
        return of_shapes(options, options.shape, [options.dtype])
    grid = options.tokens, options.hidden, options.head_dims, options.seqlens
    return paper_grid(*grid, MASKS[options.mask], options.dtype, options.direction)


def paper_grid(
    tokens: int,
    hidden: int,
    head_dims: list[int],
    seqlens: list[int],
    masks: list[bool],
    dtype: str,
    direction: str = "forward",
):
    """The grid of the FlashAttention papers: tokens and hidden size are fixed, heads = hidden / head_dim."""
    return [
        Problem(tokens // seqlen, *[hidden // dim] * 2, seqlen, seqlen, dim, causal, None, dtype, direction)
        for dim in head_dims
        for causal in masks
        for seqlen in seqlens
    ]
