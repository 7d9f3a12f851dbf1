"""A small GPT on the bytes of real text, with attention by flash_cute and by PyTorch: the losses must agree.

    python examples/char_gpt.py [file ...]

Trains with PyTorch's SDPA (flash_cute has no backward yet), then evaluates text that it has not seen, at
several context lengths, with both. Then by flash_cute alone paragraphs of unequal lengths, packed one behind
the other and padded to the longest. Exits with 1 where losses differ by more than --tolerance. Without files
it reads the sources of Python's standard library. All attention gets q, k and v in bfloat16; the rest of the
model runs in bfloat16 on a GPU and in float32 on the CPU.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import flash_cute

try:
    from tqdm import tqdm
except ImportError:

    def tqdm(steps, **_):
        return steps


Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

BYTE_VALUES = 256
HELD_OUT = 0.1  # of the text, at its end
ROTARY_BASE = 10_000
TIMED_RUNS = 3
DOCUMENT_END = b"\n\n"  # a paragraph is a document
NO_TARGET = -100  # where nothing is to be predicted

# About a minute on two cores, and less than that on a large GPU.
NAMES = ("layers", "heads", "kv_heads", "head_dim", "batch", "context", "steps")
SIZES = {"cpu": (2, 4, 2, 32, 8, 256, 150), "cuda": (8, 8, 4, 64, 32, 1024, 500)}
CONTEXTS = {"cpu": [64, 256, 1024], "cuda": [256, 1024, 4096, 16384]}
BATCH_BYTES = {"cpu": 16384, "cuda": 131072}  # evaluated at each context length, and of documents
LONGEST_DOCUMENT = {"cpu": 1024, "cuda": 2048}  # what is longer is cut


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return flash_cute.attention(q, k, v, causal=True)


def packed(offsets: torch.Tensor) -> Attention:
    """Each document alone, of rows offsets[i] to offsets[i + 1] of a batch of one."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = (x[0].transpose(0, 1) for x in (q, k, v))  # (bytes, heads, head_dim)
        return flash_cute.attention_varlen(*rows, offsets, causal=True).transpose(0, 1).unsqueeze(0)

    return attend


def padded(lengths: torch.Tensor) -> Attention:
    """Of each entry of the batch the first rows, as many as its length; the others are padding."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_cute.attention(q, k, v, causal=True, seqused_q=lengths, seqused_k=lengths)

    return attend


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding, arXiv:2104.09864, of x (batch, heads, seqlen, head_dim)."""
    half = x.shape[3] // 2
    frequency = ROTARY_BASE ** (-torch.arange(half, device=x.device) / half)
    angle = positions.unsqueeze(1) * frequency
    cos, sin = angle.cos(), angle.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Text(NamedTuple):
    read: torch.Tensor  # (batch, seqlen) integers
    targets: torch.Tensor  # likewise: the byte after each, NO_TARGET after padding
    positions: torch.Tensor  # (seqlen,) of each within its document


class Block(nn.Module):
    """Causal attention with grouped K/V heads and an MLP, each behind a norm and added to its input."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int):
        super().__init__()
        width = heads * head_dim
        self.head_counts, self.head_dim = (heads, kv_heads, kv_heads), head_dim
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, sum(self.head_counts) * head_dim, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, attend: Attention, positions: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split(self.head_counts, dim=1)  # (batch, heads, seqlen, head_dim)
        mixed = attend(rotate(q, positions).bfloat16(), rotate(k, positions).bfloat16(), v.bfloat16())
        x = x + self.project(mixed.transpose(1, 2).flatten(2).to(x.dtype))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    def __init__(self, layers: int, heads: int, kv_heads: int, head_dim: int):
        super().__init__()
        width = heads * head_dim
        self.embedding = nn.Embedding(BYTE_VALUES, width)
        self.blocks = nn.ModuleList(Block(heads, kv_heads, head_dim) for _ in range(layers))
        self.norm, self.logits = nn.RMSNorm(width), nn.Linear(width, BYTE_VALUES)

    def loss(self, text: Text, attend: Attention) -> torch.Tensor:
        """Mean nats per byte of the targets; each is predicted from the bytes before it."""
        with torch.autocast(text.read.device.type, torch.bfloat16, enabled=text.read.is_cuda):
            x = self.embedding(text.read)
            for block in self.blocks:
                x = block(x, attend, text.positions)
            logits = self.logits(self.norm(x)).flatten(0, 1)
            return F.cross_entropy(logits, text.targets.flatten(), ignore_index=NO_TARGET)


def cut(text: torch.Tensor, starts: torch.Tensor, context: int, device: torch.device) -> Text:
    """1 + context bytes of text from each start: all but the last are read, all but the first predicted."""
    pieces = text[starts.unsqueeze(1) + torch.arange(1 + context)].long().to(device)
    return Text(pieces[:, :-1], pieces[:, 1:], torch.arange(context, device=device))


def documents(text: torch.Tensor, longest: int, most: int) -> list[torch.Tensor]:
    """The first documents of text, `most` bytes or a few more together; the long ones are cut."""
    pieces = (
        torch.frombuffer(bytearray(part), dtype=torch.uint8).long().split(1 + longest)
        for part in text.numpy().tobytes().split(DOCUMENT_END)
        if part
    )
    found: list[torch.Tensor] = []
    size = 0
    for piece in chain.from_iterable(pieces):
        if len(piece) > 1 and size < most:
            found.append(piece)
            size += len(piece)
    return found


def pack(pieces: list[torch.Tensor], device: torch.device) -> tuple[Text, Attention]:
    """One behind the other in a batch of one."""
    lengths = torch.tensor([len(piece) - 1 for piece in pieces])
    read, targets = (torch.cat([x[part] for x in pieces])[None] for part in (slice(-1), slice(1, None)))
    positions = torch.cat([torch.arange(length) for length in lengths])
    offsets = F.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32)
    return Text(read.to(device), targets.to(device), positions.to(device)), packed(offsets)


def pad(pieces: list[torch.Tensor], device: torch.device) -> tuple[Text, Attention]:
    """Each in an entry of the batch, padded to the longest."""
    lengths = torch.tensor([len(piece) - 1 for piece in pieces], dtype=torch.int32, device=device)
    read = pad_sequence([piece[:-1] for piece in pieces], batch_first=True).to(device)
    targets = pad_sequence([piece[1:] for piece in pieces], batch_first=True, padding_value=NO_TARGET)
    return Text(read, targets.to(device), torch.arange(read.shape[1], device=device)), padded(lengths)


def train(model: GPT, text: torch.Tensor, options: argparse.Namespace) -> float:
    """Trains on random pieces of text; returns the last loss."""
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, options.steps)
    for _ in tqdm(range(options.steps), desc="training", unit="step"):
        starts = torch.randint(len(text) - options.context, (options.batch,))
        loss = model.loss(cut(text, starts, options.context, options.device), sdpa)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return loss.item()


@torch.no_grad()
def evaluate(model: GPT, text: Text, attend: Attention) -> tuple[float, float]:
    """Loss of the text, and bytes predicted per second at the best of a few runs."""
    seconds = []
    for _ in range(TIMED_RUNS):
        start = time.perf_counter()
        loss = model.loss(text, attend).item()
        seconds.append(time.perf_counter() - start)
    return loss, (text.targets != NO_TARGET).sum().item() / min(seconds)


def compare(title: str, results: list[tuple[float, float]], tolerance: float) -> bool:
    """Prints a row of two losses, their difference and two rates; whether the losses agree."""
    (loss, rate), (other_loss, other_rate) = results
    difference = abs(loss - other_loss)
    print(f"{title:>9}{loss:13.5f}{other_loss:13.5f}{difference:12.1e}{rate:17.0f}{other_rate:17.0f}")
    return difference <= tolerance


def header(title: str, mine: str, other: str) -> None:
    losses, rates = ([f"{name} {what}" for name in (mine, other)] for what in ("loss", "bytes/s"))
    print(f"\n{title:>9}{losses[0]:>13}{losses[1]:>13}{'difference':>12}{rates[0]:>17}{rates[1]:>17}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="text; default: Python's standard library")
    has_kernels = torch.cuda.is_available() and flash_cute.supported()["families"]
    parser.add_argument("--device", choices=SIZES, default="cuda" if has_kernels else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--tolerance", type=float, default=1e-3, help="nats per byte; default: 1e-3")
    parser.add_argument("--contexts", type=int, nargs="+", metavar="N", help="context lengths to evaluate at")
    for name in NAMES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N")
    device = parser.parse_args().device
    parser.set_defaults(contexts=CONTEXTS[device], **dict(zip(NAMES, SIZES[device], strict=True)))
    return parser.parse_args()


def main() -> int:
    options = parse()
    device = options.device = torch.device(options.device)
    torch.manual_seed(options.seed)
    files = options.files or sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    learned, unseen = text.tensor_split([int((1 - HELD_OUT) * len(text))])
    longest = max(options.context, *options.contexts)
    if len(unseen) <= longest:
        sys.exit(f"{len(text)} bytes of text are too few for a context of {longest}")

    model = GPT(options.layers, options.heads, options.kv_heads, options.head_dim).to(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(files)} files, {len(text)} bytes; {parameters} parameters on {device}, seed {options.seed}")
    print(f"loss after training: {train(model, learned, options):.3f} nats per byte")

    header("context", "our", "SDPA")
    agree = True
    for context in options.contexts:
        count = max(1, min(BATCH_BYTES[device.type], len(unseen) - 1) // context)
        pieces = cut(unseen, torch.arange(count) * context, context, device)
        agree &= compare(
            str(context), [evaluate(model, pieces, attend) for attend in (ours, sdpa)], options.tolerance
        )

    parts = documents(unseen, LONGEST_DOCUMENT[device.type], BATCH_BYTES[device.type])
    lengths = sorted(len(part) - 1 for part in parts)
    print(
        f"\n{len(parts)} documents of {lengths[0]} to {lengths[-1]} bytes, half of them up to "
        f"{lengths[len(parts) // 2]}; {sum(lengths)} bytes together and {len(parts) * lengths[-1]} padded"
    )
    header("documents", "packed", "padded")
    results = [evaluate(model, *arrange(parts, device)) for arrange in (pack, pad)]
    agree &= compare(str(len(parts)), results, options.tolerance)
    print(f"the losses {'agree' if agree else 'DO NOT AGREE'} to {options.tolerance:g} nats per byte")
    return not agree


if __name__ == "__main__":
    sys.exit(main())
