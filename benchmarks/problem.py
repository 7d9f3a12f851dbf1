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
HEAD_DIMS_HELP = "DV: of v, where it has its own, as in 192x128"
SHAPE_METAVAR = "B,HQ,HKV,SQ,SK,D[xDV]"  # of --shape


class Work(NamedTuple):
    """What one direction does: products as wide as q and k, and as v and out, and passes over memory.

    tensors: over pairs of tensors, one as wide as q and one as v. lse: over the LSE.
    """

    of_q: int
    of_v: int
    tensors: int
    lse: int


DIRECTIONS = {
    "forward": Work(of_q=1, of_v=1, tensors=1, lse=1),  # q, k, v; out
    "backward": Work(of_q=3, of_v=2, tensors=2, lse=1),  # q, k, v, out, dout; dq, dk, dv
    "both": Work(of_q=4, of_v=3, tensors=3, lse=2),
}


@dataclass(frozen=True)
class Problem:
    """q is (batch, heads_q, seqlen_q, head_dim), k and v are (batch, heads_kv, seqlen_k, head_dim).

    head_dim_v: of v, where it has its own.
    """

    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    dtype: str = "bf16"
    direction: str = "forward"

    @property
    def width_v(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

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
        work = DIRECTIONS[self.direction]
        return 2 * (work.of_q * self.head_dim + work.of_v * self.width_v) * pairs

    @property
    def bytes(self) -> int:
        """Each input read once and each result written once; both directions are two calls."""
        work = DIRECTIONS[self.direction]
        q = self.batch * self.heads_q * self.seqlen_q
        kv = self.batch * self.heads_kv * self.seqlen_k
        row = (self.head_dim + self.width_v) * ALL_DTYPES[self.dtype].itemsize
        return work.tensors * (q + kv) * row + work.lse * q * LSE_BYTES

    def inputs(self, device, layout: str = "bshd", seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Random (q, k, v), and with a backward dout.

        bshd stores a token's heads together, as projections do, bhsd each head apart.
        """
        generator = torch.Generator(device).manual_seed(seed)

        def make(heads: int, seqlen: int, width: int) -> torch.Tensor:
            stored = (heads, seqlen) if layout == "bhsd" else (seqlen, heads)
            values = torch.randn(self.batch, *stored, width, generator=generator, device=device)
            values = values.to(ALL_DTYPES[self.dtype])
            return values if layout == "bhsd" else values.transpose(1, 2)

        q, kv = (self.heads_q, self.seqlen_q), (self.heads_kv, self.seqlen_k)
        shapes = [(*q, self.head_dim), (*kv, self.head_dim), (*kv, self.width_v), (*q, self.width_v)]
        return tuple(make(*shape) for shape in shapes[: 3 if self.direction == "forward" else 4])

    def to_json(self) -> dict:
        return asdict(self) | {"mask": self.mask, "flops": self.flops, "bytes": self.bytes}


def parse_window(text: str) -> tuple[int | None, int | None]:
    """'left,right', each a number or empty for unlimited; one number alone stands for both."""
    sides = [int(side) if side.strip() else None for side in text.split(",")]
    if len(sides) > 2:
        raise argparse.ArgumentTypeError(f"a window is left,right, not {text!r}")
    return sides[0], sides[-1]


def width_name(head_dim: int, head_dim_v: int | None) -> str:
    """'128', or '192/128' where v has a width of its own."""
    return f"{head_dim}" if head_dim_v in (None, head_dim) else f"{head_dim}/{head_dim_v}"


def parse_widths(text: str) -> tuple[int, ...]:
    """'128' of all, or '192x128' of q and k and of v: one number, or two that differ."""
    widths = tuple(dict.fromkeys(map(int, text.split("x"))))
    if len(widths) > 2:
        raise argparse.ArgumentTypeError(f"a head dim is D, or DxDV where v has its own, not {text!r}")
    return widths


def parse_shape(text: str) -> tuple[int, ...]:
    """'batch,heads_q,heads_kv,seqlen_q,seqlen_k,head_dim', the last as parse_widths takes it."""
    *lengths, widths = text.split(",")
    if len(lengths) != 5:
        raise argparse.ArgumentTypeError(
            f"a shape is batch,heads_q,heads_kv,seqlen_q,seqlen_k,head_dim, not {text!r}"
        )
    return *map(int, lengths), *parse_widths(widths)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def all_widths(text: str) -> list[tuple[int, ...]]:
    return [parse_widths(part) for part in text.split(",")]


def add_direction(args: argparse.ArgumentParser, *choices: str) -> None:
    """--pass, as options.direction: one of the choices, by default of all DIRECTIONS."""
    choices = choices or tuple(DIRECTIONS)
    args.add_argument("--pass", dest="direction", choices=choices, default="forward", help="what is measured")


def add_precision(args: argparse.ArgumentParser) -> None:
    args.add_argument(
        "--precision", choices=["highest", "high"], default="highest", help="of products of float32"
    )


def add_shapes(args: argparse.ArgumentParser) -> None:
    args.add_argument(
        "--shape", type=parse_shape, action="append", metavar=SHAPE_METAVAR, help="may be repeated"
    )
    args.add_argument("--mask", choices=MASKS, default="both")
    args.add_argument(
        "--window", type=parse_window, metavar="LEFT,RIGHT", help="sliding window of --shape's problems"
    )


def add_grid(args: argparse.ArgumentParser) -> None:
    """The papers' grid, which --shape takes the place of."""
    add_shapes(args)
    args.add_argument("--tokens", type=int, default=16384, help="of each cell of the grid, over the batch")
    args.add_argument("--hidden", type=int, default=2048, help="heads x head dim in the grid")
    args.add_argument(
        "--head-dims",
        type=all_widths,
        default=[(64,), (128,), (256,)],
        metavar="D[xDV],...",
        help=HEAD_DIMS_HELP,
    )
    args.add_argument("--seqlens", type=numbers, default=[512, 1024, 2048, 4096, 8192, 16384])


def of_shapes(options: argparse.Namespace, shapes: list[tuple[int, ...]], dtypes: list[str]) -> list[Problem]:
    return [
        Problem(*shape, causal=causal, window=options.window, dtype=dtype, direction=options.direction)
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
    head_dims: list[tuple[int, ...]],
    seqlens: list[int],
    masks: list[bool],
    dtype: str,
    direction: str = "forward",
):
    """The grid of the FlashAttention papers: tokens and hidden size are fixed, heads = hidden / head_dim."""

    def problem(widths: tuple[int, ...], causal: bool, seqlen: int) -> Problem:
        shape = tokens // seqlen, *[hidden // widths[0]] * 2, seqlen, seqlen, *widths
        return Problem(*shape, causal=causal, dtype=dtype, direction=direction)

    return [problem(widths, causal, seqlen) for widths in head_dims for causal in masks for seqlen in seqlens]
