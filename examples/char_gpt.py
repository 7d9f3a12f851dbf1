"""A small GPT on the bytes of real text, with attention by flash_cute and by PyTorch: the losses must agree.

    python examples/char_gpt.py [file ...]

Trains with PyTorch's SDPA (flash_cute has no backward yet), then evaluates text that it has not seen, at
several context lengths, with both. Exits with 1 where the losses differ by more than --tolerance. Without
files it reads the sources of Python's standard library. Both kinds of attention get q, k and v in bfloat16;
the rest of the model runs in bfloat16 on a GPU and in float32 on the CPU.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

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

# About a minute on two cores, and less than that on a large GPU.
NAMES = ("layers", "heads", "kv_heads", "head_dim", "batch", "context", "steps")
SIZES = {"cpu": (2, 4, 2, 32, 8, 256, 150), "cuda": (8, 8, 4, 64, 32, 1024, 500)}
CONTEXTS = {"cpu": [64, 256, 1024], "cuda": [256, 1024, 4096, 16384]}
BATCH_BYTES = {"cpu": 16384, "cuda": 131072}  # evaluated at each context length


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return flash_cute.attention(q, k, v, causal=True)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding, arXiv:2104.09864, of x (batch, heads, seqlen, head_dim)."""
    half = x.shape[3] // 2
    frequency = ROTARY_BASE ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[2], device=x.device).unsqueeze(1) * frequency
    cos, sin = angle.cos(), angle.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


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

    def forward(self, x: torch.Tensor, attend: Attention) -> torch.Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split(self.head_counts, dim=1)  # (batch, heads, seqlen, head_dim)
        mixed = attend(rotate(q).bfloat16(), rotate(k).bfloat16(), v.bfloat16())
        x = x + self.project(mixed.transpose(1, 2).flatten(2).to(x.dtype))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    def __init__(self, layers: int, heads: int, kv_heads: int, head_dim: int):
        super().__init__()
        width = heads * head_dim
        self.embedding = nn.Embedding(BYTE_VALUES, width)
        self.blocks = nn.ModuleList(Block(heads, kv_heads, head_dim) for _ in range(layers))
        self.norm, self.logits = nn.RMSNorm(width), nn.Linear(width, BYTE_VALUES)

    def loss(self, text: torch.Tensor, attend: Attention) -> torch.Tensor:
        """Mean nats per byte of text, (batch, 1 + seqlen) integers; each is predicted from those before."""
        with torch.autocast(text.device.type, torch.bfloat16, enabled=text.is_cuda):
            x = self.embedding(text[:, :-1])
            for block in self.blocks:
                x = block(x, attend)
            return F.cross_entropy(self.logits(self.norm(x)).flatten(0, 1), text[:, 1:].flatten())


def cut(text: torch.Tensor, starts: torch.Tensor, context: int, device: torch.device) -> torch.Tensor:
    """1 + context bytes of text from each start, (starts, 1 + context) integers on device."""
    return text[starts.unsqueeze(1) + torch.arange(1 + context)].long().to(device)


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
def evaluate(model: GPT, pieces: torch.Tensor, attend: Attention) -> tuple[float, float]:
    """Loss of the pieces, and bytes per second at the best of a few runs."""
    seconds = []
    for _ in range(TIMED_RUNS):
        start = time.perf_counter()
        loss = model.loss(pieces, attend).item()
        seconds.append(time.perf_counter() - start)
    return loss, pieces.numel() / min(seconds)


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

    print(f"\n{'context':>8}{'our loss':>10}{'SDPA':>10}{'difference':>12}{'our bytes/s':>13}{'SDPA':>10}")
    agree = True
    for context in options.contexts:
        count = max(1, min(BATCH_BYTES[device.type], len(unseen) - 1) // context)
        pieces = cut(unseen, torch.arange(count) * context, context, device)
        (loss, rate), (sdpa_loss, sdpa_rate) = (evaluate(model, pieces, attend) for attend in (ours, sdpa))
        difference = abs(loss - sdpa_loss)
        agree &= difference <= options.tolerance
        print(f"{context:8}{loss:10.5f}{sdpa_loss:10.5f}{difference:12.1e}{rate:13.0f}{sdpa_rate:10.0f}")
    print(f"the losses {'agree' if agree else 'DO NOT AGREE'} to {options.tolerance:g} nats per byte")
    return not agree


if __name__ == "__main__":
    sys.exit(main())
