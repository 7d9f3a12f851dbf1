"""A small GPT on the bytes of real text, with attention by flash_cute and by PyTorch: the losses must agree.

    python examples/char_gpt.py [--compile] [--mask causal|documents|prefix] [file ...]

Trains the same model three times, from one seed and with the same data in the same order: with flash_cute,
with PyTorch's SDPA, and with SDPA's plain implementation, which rounds elsewhere. The losses of the first two
must not be further apart than twice what those of the last two are, plus 1e-5. With --mask documents a byte
sees those before it in its paragraph, and a fourth training packs the paragraphs; with --mask prefix bytes
of each row's first line see each other: by ranges, and by dense masks of SDPA. Then the model that flash_cute
trained reads text that it has not seen, at several context lengths, with both; and by flash_cute alone
paragraphs of unequal lengths, packed one behind the other and padded to the longest: these may differ by
--tolerance. Exits with 1 where losses do not agree. Without files it reads the sources of Python's standard
library. All attention gets q, k and v in bfloat16; the rest of the model runs in bfloat16 on a GPU and in
float32 on the CPU.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
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
LINE_END = ord("\n")
DOCUMENT_END = b"\n\n"  # a paragraph is a document
NO_TARGET = -100  # where nothing is to be predicted

# Two minutes on two cores, and less than that on a large GPU.
NAMES = ("layers", "heads", "kv_heads", "head_dim", "batch", "context", "steps")
SIZES = {"cpu": (2, 4, 2, 32, 8, 256, 150), "cuda": (8, 8, 4, 64, 32, 1024, 500)}
WARM_UP = 3  # steps that are not timed: they compile, and fill the allocator
FACTOR, SLACK = 2, 1e-5  # how far the losses may be apart, beside those of SDPA's two ways
CONTEXTS = {"cpu": [64, 256, 1024], "cuda": [256, 1024, 4096, 16384]}
BATCH_BYTES = {"cpu": 16384, "cuda": 131072}  # evaluated at each context length, and of documents
LONGEST_DOCUMENT = {"cpu": 1024, "cuda": 2048}  # what is longer is cut


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None = None) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None, enable_gqa=True)


def plain_sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None = None
) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(q, k, v, seen)


def ours(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: torch.Tensor | None = None
) -> torch.Tensor:
    return flash_cute.attention(q, k, v, causal=ranges is None, ranges=ranges)


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Each document alone, of rows offsets[i] to offsets[i + 1] of a batch, entry behind entry."""
    rows = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # (bytes, heads, head_dim)
    out = flash_cute.attention_varlen(*rows, offsets, causal=True)
    return out.unflatten(0, (len(q), -1)).transpose(1, 2)


def padded(lengths: torch.Tensor) -> Attention:
    """Of each entry of the batch the first rows, as many as its length; the others are padding."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_cute.attention(q, k, v, causal=True, seqused_q=lengths, seqused_k=lengths)

    return attend


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding, arXiv:2104.09864, of x (batch, heads, seqlen, head_dim).

    positions: (seqlen,), or where sequences have their own (batch, 1, seqlen).
    """
    half = x.shape[3] // 2
    frequency = ROTARY_BASE ** (-torch.arange(half, device=x.device) / half)
    angle = positions.unsqueeze(-1) * frequency
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
        self.head_dim = head_dim
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.ModuleList(
            nn.Linear(width, count * head_dim, bias=False) for count in (heads, kv_heads, kv_heads)
        )
        self.project = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, attend: Attention, positions: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(x)
        heads = (project(normed).unflatten(-1, (-1, self.head_dim)) for project in self.qkv)
        q, k, v = (x.transpose(1, 2) for x in heads)  # (batch, heads, seqlen, head_dim)
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

    def hidden(
        self, read: torch.Tensor, positions: torch.Tensor, attentions: list[Attention]
    ) -> torch.Tensor:
        """What the logits are made from, (batch, seqlen, width); each block has an attention of its own."""
        x = self.embedding(read)
        for block, attend in zip(self.blocks, attentions, strict=True):
            x = block(x, attend, positions)
        return self.norm(x)

    def loss(self, text: Text, attend: Attention) -> torch.Tensor:
        """Mean nats per byte of the targets; each is predicted from the bytes before it."""
        with torch.autocast(text.read.device.type, torch.bfloat16, enabled=text.read.is_cuda):
            hidden = self.hidden(text.read, text.positions, [attend] * len(self.blocks))
            logits = self.logits(hidden).flatten(0, 1)
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
    return Text(read.to(device), targets.to(device), positions.to(device)), partial(packed, offsets=offsets)


def pad(pieces: list[torch.Tensor], device: torch.device) -> tuple[Text, Attention]:
    """Each in an entry of the batch, padded to the longest."""
    lengths = torch.tensor([len(piece) - 1 for piece in pieces], dtype=torch.int32, device=device)
    read = pad_sequence([piece[:-1] for piece in pieces], batch_first=True).to(device)
    targets = pad_sequence([piece[1:] for piece in pieces], batch_first=True, padding_value=NO_TARGET)
    return Text(read, targets.to(device), torch.arange(read.shape[1], device=device)), padded(lengths)


Arrangement = Callable[[Text], tuple[Text, Attention]]


def causally(attend: Attention) -> Arrangement:
    return lambda text: (text, attend)


def by_document(attend: Callable, mask_of: Callable[[torch.Tensor], torch.Tensor]) -> Arrangement:
    """A byte sees those before it in its paragraph. mask_of: what attend takes, of each byte's paragraph."""

    def arrange(text: Text) -> tuple[Text, Attention]:
        is_line_end = text.read == LINE_END
        ends = is_line_end[:, 1:] & is_line_end[:, :-1]  # at the second byte, behind which another one begins
        mask = mask_of(F.pad(ends.cumsum(1), (2, 0))[:, :-1])
        return text, lambda q, k, v: attend(q, k, v, mask)

    return arrange


def offsets_of(documents: torch.Tensor) -> torch.Tensor:
    begins = F.pad(documents.diff(dim=1) != 0, (1, 0), value=True).flatten().nonzero().flatten()
    return F.pad(begins, (0, 1), value=documents.numel()).int()


def dense_documents(documents: torch.Tensor) -> torch.Tensor:
    return (documents[:, None, :, None] == documents[:, None, None, :]).tril()


def by_prefix(attend: Callable, mask_of: Callable[[torch.Tensor, int], torch.Tensor]) -> Arrangement:
    """The first line sees itself, and foretells what is behind it. mask_of: of its length in each row."""

    def arrange(text: Text) -> tuple[Text, Attention]:
        context = text.read.shape[1]
        length = 1 + (text.read == LINE_END).int().argmax(1)
        mask = mask_of(length, context)
        known = torch.arange(1, 1 + context, device=length.device) < length.unsqueeze(1)
        text = text._replace(targets=text.targets.masked_fill(known, NO_TARGET))
        return text, lambda q, k, v: attend(q, k, v, mask)

    return arrange


def dense_prefix(length: torch.Tensor, context: int) -> torch.Tensor:
    place = torch.arange(context, device=length.device)
    return (place <= place.unsqueeze(1)) | (place < length[:, None, None, None])


OURS, THEIRS, PLAIN = "flash_cute", "SDPA", "plain SDPA"
MASKS = {
    "causal": {OURS: causally(ours), THEIRS: causally(sdpa), PLAIN: causally(plain_sdpa)},
    "documents": {
        OURS: by_document(ours, flash_cute.masks.documents),
        "packed": by_document(packed, offsets_of),
        THEIRS: by_document(sdpa, dense_documents),
        PLAIN: by_document(plain_sdpa, dense_documents),
    },
    "prefix": {
        OURS: by_prefix(ours, flash_cute.masks.prefix),
        THEIRS: by_prefix(sdpa, dense_prefix),
        PLAIN: by_prefix(plain_sdpa, dense_prefix),
    },
}


class Run(NamedTuple):
    model: GPT
    losses: torch.Tensor  # (steps,) in nats per byte
    bytes_per_second: float
    peak_bytes: int  # of the GPU's memory; 0 on the CPU


def train(title: str, arrange: Arrangement, text: torch.Tensor, options: argparse.Namespace) -> Run:
    """Trains a new model on random pieces of text, the same ones each time."""

    def loss_of(text: Text) -> torch.Tensor:
        return model.loss(*arrange(text))

    torch.manual_seed(options.seed)
    device = options.device
    model = GPT(options.layers, options.heads, options.kv_heads, options.head_dim).to(device)
    loss_of = torch.compile(loss_of) if options.compile else loss_of
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, options.steps)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, start = [], time.perf_counter()
    for step in tqdm(range(options.steps), desc=f"training with {title}", unit="step"):
        if step == min(WARM_UP, options.steps - 1):
            synchronize()
            start = time.perf_counter()
            timed = options.steps - step
        starts = torch.randint(len(text) - options.context, (options.batch,))
        loss = loss_of(cut(text, starts, options.context, device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
    synchronize()
    rate = timed * options.batch * options.context / (time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return Run(model, torch.stack(losses).cpu(), rate, peak)


def apart(run: Run, other: Run) -> float:
    """Root mean square of the differences of their losses."""
    return (run.losses - other.losses).square().mean().sqrt().item()


def compare_training(text: torch.Tensor, options: argparse.Namespace) -> tuple[GPT, bool]:
    """Trains with each attention, prints and plots what came of it: our model, and do the losses agree?"""
    runs = {title: train(title, arrange, text, options) for title, arrange in MASKS[options.mask].items()}
    print(f"\n{'training':>12}{'first loss':>13}{'last loss':>13}{'bytes/s':>13}{'peak memory':>15}")
    for title, run in runs.items():
        peak = f"{run.peak_bytes / 2**20:.0f} MiB" if run.peak_bytes else "not measured"
        first, last = run.losses[0], run.losses[-1]
        print(f"{title:>12}{first:13.5f}{last:13.5f}{run.bytes_per_second:13.0f}{peak:>15}")
    spread = apart(runs[PLAIN], runs[THEIRS])
    differences = {title: apart(runs[OURS], runs[title]) for title in runs if title not in (OURS, PLAIN)}
    for title, difference in differences.items():
        print(f"losses of {OURS} and {title} are {difference:.1e} apart", end=", ")
    print(f"those of {THEIRS} and {PLAIN} {spread:.1e}")
    plot({title: run.losses for title, run in runs.items()}, options.plot)
    return runs[OURS].model, max(differences.values()) <= FACTOR * spread + SLACK


def plot(curves: dict[str, torch.Tensor], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no matplotlib: the curves are not plotted")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for (title, losses), style in zip(curves.items(), ("-", "--", ":", "-."), strict=False):
        axis.plot(range(1, 1 + len(losses)), losses, style, label=title)
    axis.set(xlabel="step", ylabel="loss, nats per byte", title="The same training with each attention")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    print(f"the curves are in {path}")


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


def count(text: str) -> int:
    """A number of something that there must be."""
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text} is no number above 0")
    return int(text)


def even(text: str) -> int:
    if count(text) % 2:
        raise argparse.ArgumentTypeError(f"{text} is odd; rotary positions turn pairs of columns")
    return int(text)


def training_parser(description: str) -> argparse.ArgumentParser:
    """Options of every program that trains the model."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="text; default: Python's standard library")
    has_kernels = torch.cuda.is_available() and flash_cute.supported()["families"]
    parser.add_argument("--device", choices=SIZES, default="cuda" if has_kernels else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--compile", action="store_true", help="train by torch.compile")
    for name in NAMES:
        kind = even if name == "head_dim" else count
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N")
    return parser


def parse(parser: argparse.ArgumentParser, defaults: dict[str, dict]) -> argparse.Namespace:
    """Its options, by default those of the device: SIZES, and `defaults` by device."""
    device = parser.parse_args().device
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no GPU that torch can use")
    parser.set_defaults(**dict(zip(NAMES, SIZES[device], strict=True)), **defaults[device])
    options = parser.parse_args()
    options.device = torch.device(device)
    return options


def read(options: argparse.Namespace, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The text to learn from, and the unseen rest, of more than `longest` bytes."""
    files = options.files or sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    learned, unseen = text.tensor_split([int((1 - HELD_OUT) * len(text))])
    if len(unseen) <= longest:
        sys.exit(f"{len(text)} bytes of text are too few for a context of {longest}")
    print(f"{len(files)} files, {len(text)} bytes; on {options.device}, seed {options.seed}")
    return learned, unseen


def main() -> int:
    parser = training_parser(__doc__)
    parser.add_argument("--mask", choices=MASKS, default="causal", help="of the training; default: causal")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="nats per byte; default: 1e-3")
    parser.add_argument("--plot", type=Path, default=Path("char_gpt.png"), help="default: char_gpt.png")
    parser.add_argument(
        "--contexts", type=count, nargs="+", metavar="N", help="context lengths to evaluate at"
    )
    options = parse(parser, {name: {"contexts": lengths} for name, lengths in CONTEXTS.items()})
    if not options.plot.resolve().parent.is_dir():
        parser.error(f"--plot {options.plot}: there is no such folder")
    device = options.device
    learned, unseen = read(options, max(options.context, *options.contexts))
    model, agree = compare_training(learned, options)
    print(f"{sum(parameter.numel() for parameter in model.parameters())} parameters")

    header("context", "our", "SDPA")
    for context in options.contexts:
        number = max(1, min(BATCH_BYTES[device.type], len(unseen) - 1) // context)
        pieces = cut(unseen, torch.arange(number) * context, context, device)
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
    print(f"the losses {'agree' if agree else 'DO NOT AGREE'}")
    return not agree


if __name__ == "__main__":
    sys.exit(main())
