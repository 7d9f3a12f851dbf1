"""A small Llama of transformers on packed paragraphs of real text: tokens per second with each attention.

    python examples/train_llama.py [--mask packed|documents|prefix] [file ...]

Trains the same model from one seed on the same batches with eager attention, SDPA and flash_cute. A batch is
one row of whole paragraphs, one behind the other, whose positions restart; flash_cute is told their offsets,
or with --mask documents gets ranges. With --mask prefix the row's first paragraph sees itself, and foretells
the others: ranges for flash_cute, dense masks for the others. A token is a byte. Without files it reads the
sources of Python's standard library. Everything runs under autocast to bfloat16. Exits with 1 where the last
losses of flash_cute and SDPA are over --tolerance apart.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from pathlib import Path

import torch
from char_gpt import count, tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import flash_cute
from flash_cute import masks
from flash_cute.integrations.transformers import ranges_mask  # the import registers "cute_attention"

ATTENTIONS = {"eager": "eager", "SDPA": "sdpa", "flash_cute": "cute_attention"}
BYTE_VALUES = 256
NO_TARGET = -100
LEARNING_RATE = 1e-3
WARM_UP = 2  # steps that are not timed
NAMES = ("layers", "heads", "kv_heads", "head_dim", "tokens", "steps")
SIZES = {"cpu": (2, 4, 2, 32, 1024, 12), "cuda": (8, 16, 4, 64, 8192, 60)}


def batches(
    text: bytes, tokens: int, steps: int, mask: str, device: torch.device
) -> list[dict[str, torch.Tensor]]:
    """The model's inputs, each `tokens` bytes, or one less, of paragraphs; the last one is cut."""
    made, rows, size = [], [], 0
    for paragraph in text.split(b"\n\n"):
        row = paragraph[: tokens - size]
        if len(row) < 2:
            continue
        rows.append(torch.frombuffer(bytearray(row), dtype=torch.uint8).long())
        size += len(row)
        if size >= tokens - 1:
            made.append((behind_prefix if mask == "prefix" else packed)(rows, device))
            rows, size = [], 0
        if len(made) == steps:
            return made
    sys.exit(f"{len(text)} bytes of text are too few for {steps} batches of {tokens}")


def packed(rows: list[torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.cat(rows)
    positions = torch.cat([torch.arange(length) for length in lengths])
    labels = ids.masked_fill(positions == 0, NO_TARGET)  # nothing foretells a paragraph's first byte
    inputs = {"input_ids": ids, "position_ids": positions, "labels": labels}
    return {name: tensor[None].to(device) for name, tensor in inputs.items()}


def behind_prefix(rows: list[torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    ids = torch.cat(rows)
    labels = ids.clone()
    labels[: min(len(rows[0]), len(ids) - 1)] = NO_TARGET  # the prefix sees what it would foretell
    return {"input_ids": ids[None].to(device), "labels": labels[None].to(device)}


def offsets(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | int]:
    """What flash_cute is told of a batch, as DataCollatorWithFlattening makes it."""
    positions = batch["position_ids"]
    begins = (positions[0] == 0).nonzero().flatten()
    ends = torch.nn.functional.pad(begins, (0, 1), value=positions.shape[1]).int()
    longest = int(ends.diff().max())
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def told(mask: str, attention: str, batch: dict[str, torch.Tensor]) -> dict:
    """What a model is told beside the batch; of paragraphs, other attention knows by their positions."""
    is_ours = attention == "cute_attention"
    if mask == "packed":
        return offsets(batch) if is_ours else {}
    if mask == "documents":
        documents = (batch["position_ids"] == 0).cumsum(1)
        return {"attention_mask": ranges_mask(masks.documents(documents))} if is_ours else {}
    length = (batch["labels"] != NO_TARGET).int().argmax(1)
    size = batch["labels"].shape[1]
    if is_ours:
        return {"attention_mask": ranges_mask(masks.prefix(length, size))}
    place = torch.arange(size, device=length.device)
    seen = (place <= place.unsqueeze(1)) | (place < length[:, None, None, None])
    if attention == "eager":  # which adds the mask
        return {"attention_mask": torch.where(seen, 0.0, torch.finfo(torch.bfloat16).min)}
    return {"attention_mask": seen}


def train(attention: str, data: list[dict[str, torch.Tensor]], options) -> tuple[list[float], float]:
    """The losses of all steps, and tokens per second."""
    torch.manual_seed(options.seed)
    config = LlamaConfig(
        vocab_size=BYTE_VALUES,
        hidden_size=options.heads * options.head_dim,
        intermediate_size=3 * options.heads * options.head_dim,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        max_position_embeddings=options.tokens,
    )
    device = options.device
    model = LlamaForCausalLM._from_config(config, attn_implementation=attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    known = [told(options.mask, attention, batch) for batch in data]
    losses, timed, start = [], 0, 0.0
    steps = tqdm(list(zip(data, known, strict=True)), desc=attention, leave=False)
    for step, (batch, also) in enumerate(steps):
        if step == min(WARM_UP, len(data) - 1):
            synchronize()
            timed, start = 0, time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(**batch, **also, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        timed += batch["input_ids"].numel()
    synchronize()
    rate = timed / (time.perf_counter() - start)
    return [loss.item() for loss in losses], rate


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="text; default: Python's standard library")
    has_kernels = torch.cuda.is_available() and flash_cute.supported()["families"]
    parser.add_argument("--device", choices=SIZES, default="cuda" if has_kernels else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mask", choices=("packed", "documents", "prefix"), default="packed")
    parser.add_argument("--tolerance", type=float, default=0.05, help="nats per byte; default: 0.05")
    for name in NAMES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=count, metavar="N")
    device = parser.parse_args().device
    parser.set_defaults(**dict(zip(NAMES, SIZES[device], strict=True)))
    return parser.parse_args()


def main() -> int:
    options = parse()
    options.device = torch.device(options.device)
    files = options.files or sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"\n\n".join(file.read_bytes() for file in files)
    data = batches(text, options.tokens, options.steps, options.mask, options.device)
    print(f"{len(data)} batches of {options.tokens} bytes, mask {options.mask}; on {options.device}\n")
    print(f"{'attention':>12}{'first loss':>13}{'last loss':>13}{'tokens/s':>13}")
    last = {}
    for title, attention in ATTENTIONS.items():
        losses, rate = train(attention, data, options)
        print(f"{title:>12}{losses[0]:13.5f}{losses[-1]:13.5f}{rate:13.0f}")
        last[title] = losses[-1]
    agree = abs(last["flash_cute"] - last["SDPA"]) <= options.tolerance
    print(f"the losses {'agree' if agree else 'DO NOT AGREE'}")
    return not agree


if __name__ == "__main__":
    sys.exit(main())
