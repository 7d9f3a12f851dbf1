"""Text from the GPT of char_gpt.py, served with a cache in pages and continuous batching.

    python examples/generate.py [--check | --cache fp8] [file ...]

Trains the model, then continues prompts of mixed lengths from text that it has not seen, always with the
likeliest byte, in three ways, and prints tokens per second of each:

- Continuous batching. Keys and values of all sequences lie in one pool of pages. Prompts arrive one by one; a
  sequence joins while others run, gets pages, and gives them back as soon as it is done. A step is one pass
  of the model over a packed batch without padding: one token of each sequence that generates, and chunks of
  prompts, up to --chunk tokens. In each layer `append_kv` writes the new keys and values into their pages,
  and `attention_varlen` reads the pages where they lie. Nothing is planned on the host.
- SDPA with a static cache: groups of sequences, padded to the longest, until the last of them is done.
- One sequence at a time, by the first way: only some of the requests, as it is slow.

With --check all but attention is computed in float32, and the text must be that of the model without a cache,
but where it finds two bytes equally likely, within --tolerance. Exits with 1 where it is not. The model
rotates q and k itself; `append_kv` could do that, too.

With --cache fp8 the pages hold codes of 8 bits with a scale for each head, from the keys and values of the
first prompt. The text may then differ from that of SDPA; the perplexity of unseen text is printed with keys
and values that are read from a cache of 16 bits, and from one of codes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import char_gpt
import torch
from char_gpt import GPT, Attention, count
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import flash_cute

# Most tokens of a prompt and of new ones: each request has at least a quarter of them.
NAMES = ("requests", "running", "pages", "page_size", "chunk", "prompt", "new")
SIZES = {"cpu": (16, 8, 120, 16, 64, 160, 48), "cuda": (256, 64, 2048, 64, 2048, 2048, 256)}
ARRIVALS = 2  # of requests, each step
SHOWN_EVERY = 0.1  # seconds
CODES = torch.float8_e4m3fn
HEADROOM = 2  # of scales, for larger numbers than the first prompt has; codes are floating-point numbers
SMALLEST = 1e-6  # of the numbers that scales are for, as a scale must be above 0
ALONE = 16  # of so many sequences one is timed by itself, but at least four are

Scales = list[dict[str, torch.Tensor]]  # of each layer, k_scale and v_scale; none where a cache has 16 bits


@dataclass
class Request:
    tokens: list[int]  # the prompt, and behind it what is generated
    end: int  # how many tokens it has when it is done
    arrives: int = 0  # at this step
    cached: int = 0  # tokens whose keys and values are in the cache
    pages: list[int] = field(default_factory=list)  # where they are: token i in pages[i // page_size]


class Server:
    """Continuous batching of at most `most` sequences over one pool of pages."""

    def __init__(self, model: GPT, options: argparse.Namespace, scales: Scales, most: int):
        self.model, self.options, self.scales, self.most = model, options, scales, most
        self.k_pages, self.v_pages = empty_caches(options, scales, options.pages, options.page_size)
        self.free = list(range(options.pages))  # the same pages in every layer
        self.running: list[Request] = []

    def admit(self, waiting: deque[Request], step: int) -> None:
        """Starts those that have arrived, in order, while there are pages for all that they will be.

        So none can run out of pages. Servers that take a page when it is needed run more at a time, and must
        be able to stop one.
        """
        while waiting and waiting[0].arrives <= step and len(self.running) < self.most:
            needed = -(-waiting[0].end // self.options.page_size)
            if needed > len(self.free):
                return
            self.running.append(request := waiting.popleft())
            request.pages = [self.free.pop() for _ in range(needed)]

    def chosen(self) -> list[tuple[Request, int]]:
        """Requests of this step and how many tokens of each: first those that generate, then prompts."""
        left, found = self.options.chunk, []
        for request in sorted(self.running, key=lambda one: len(one.tokens) - one.cached > 1):
            tokens = min(len(request.tokens) - request.cached, left)
            left -= tokens
            if tokens:
                found.append((request, tokens))
        return found

    def step(self) -> None:
        """One pass over new tokens of several sequences; where a prompt is complete it gives the next one."""
        batch = self.chosen()
        on_device = partial(torch.tensor, device=self.options.device)
        before = on_device([request.cached for request, _ in batch], dtype=torch.int32)
        offsets = on_device([0, *accumulate(tokens for _, tokens in batch)], dtype=torch.int32)
        after = before + offsets.diff()
        table = pad_sequence([torch.tensor(request.pages) for request, _ in batch], batch_first=True)
        table = table.to(self.options.device, torch.int32)
        new = [(one, i) for one, tokens in batch for i in range(one.cached, one.cached + tokens)]
        read, positions = on_device([one.tokens[i] for one, i in new]), on_device([i for _, i in new])

        def attend(k_pages, v_pages, scales, q, k, v):
            """The new rows of sequence b are offsets[b] to offsets[b + 1], behind before[b] in the cache."""
            q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # (tokens, heads, head_dim)
            flash_cute.append_kv(
                k, v, k_pages, v_pages, before, block_table=table, cu_seqlens=offsets, **scales
            )
            given = {"seqused_k": after, "block_table": table, **scales}
            out = flash_cute.attention_varlen(q, k_pages, v_pages, offsets, causal=True, **given)
            return out.transpose(0, 1).unsqueeze(0)

        layers = zip(self.k_pages, self.v_pages, self.scales, strict=True)
        attentions = [partial(attend, *layer) for layer in layers]
        last = offsets[1:] - 1
        best = next_tokens(self.model, read[None], positions, attentions, (0, last)).tolist()
        for (request, tokens), token in zip(batch, best, strict=True):
            request.cached += tokens
            if request.cached == len(request.tokens):
                request.tokens.append(token)
            if len(request.tokens) == request.end:
                self.running.remove(request)
                self.free += request.pages


def empty_caches(options: argparse.Namespace, scales: Scales, count: int, rows: int) -> list[torch.Tensor]:
    """Keys and values of all layers: for each, count times so many rows."""
    shape = options.layers, count, options.kv_heads, rows, options.head_dim
    dtype = CODES if scales[0] else torch.bfloat16
    return [torch.zeros(shape, dtype=dtype, device=options.device) for _ in range(2)]


def scales_for(model: GPT, prompt: list[int], device: torch.device) -> Scales:
    """Of each head, by the largest of its keys and values in a prompt."""
    found: Scales = []

    def attend(q, k, v):
        largest = (x.float().abs().amax((0, 2, 3)).clamp_min(SMALLEST) for x in (k, v))
        most = torch.finfo(CODES).max / HEADROOM
        found.append({name: x / most for name, x in zip(("k_scale", "v_scale"), largest, strict=True)})
        return char_gpt.ours(q, k, v)

    positions = torch.arange(len(prompt), device=device)
    model.hidden(torch.tensor([prompt], device=device), positions, [attend] * len(model.blocks))
    return found


def perplexity(model: GPT, text: char_gpt.Text, options: argparse.Namespace, scales: Scales) -> float:
    """Of text whose keys and values are read from a cache."""
    batch, length = text.read.shape
    before, after = (torch.full((batch,), n, device=options.device).int() for n in (0, length))

    def attend(k_cache, v_cache, scales, q, k, v):
        flash_cute.append_kv(k, v, k_cache, v_cache, before, **scales)
        return flash_cute.attention(q, k_cache, v_cache, causal=True, seqused_k=after, **scales)

    layers = zip(*empty_caches(options, scales, batch, length), scales, strict=True)
    hidden = model.hidden(text.read, text.positions, [partial(attend, *layer) for layer in layers])
    return F.cross_entropy(model.logits(hidden).flatten(0, 1), text.targets.flatten()).exp().item()


def next_tokens(model: GPT, read, positions, attentions: list[Attention], rows: tuple) -> torch.Tensor:
    """The likeliest tokens behind some rows of read, (batch, seqlen)."""
    return model.logits(model.hidden(read, positions, attentions)[rows]).argmax(-1)


def serve(title: str, server: Server, requests: list[Request]) -> None:
    waiting, step, shown, start = deque(requests), 0, 0.0, time.perf_counter()
    prompts = sum(len(request.tokens) for request in requests)
    while waiting or server.running:
        if not server.running:
            step = max(step, waiting[0].arrives)
        server.admit(waiting, step)
        server.step()
        step += 1
        now = time.perf_counter()
        if now - shown > SHOWN_EVERY or not (waiting or server.running):
            shown, new = now, sum(len(request.tokens) for request in requests) - prompts
            used = server.options.pages - len(server.free)
            at = f"step {step}, {len(server.running)} running, {len(waiting)} to come, {used} pages used"
            show(f"{title}: {at}, {new} new tokens, {new / (now - start):.0f}/s")


def show(line: str) -> None:
    """Where there is a terminal, over the line before; what is printed next goes over it."""
    if sys.stderr.isatty():
        print(f"{line:<110}\r", end="", flush=True, file=sys.stderr)


def static_batching(model: GPT, options: argparse.Namespace, requests: list[Request]) -> None:
    """SDPA with a static cache: each group is padded, and runs until the last of its sequences is done."""
    for begin in range(0, len(requests), options.running):
        group = requests[begin : begin + options.running]
        show(f"SDPA with a static cache: {begin} of {len(requests)} sequences")
        lengths = torch.tensor([len(request.tokens) for request in group], device=options.device)
        read = pad_sequence([torch.tensor(request.tokens) for request in group], batch_first=True)
        read = read.to(options.device)
        steps = max(request.end - len(request.tokens) for request in group)
        shape = 2, options.layers, len(group), options.kv_heads, read.shape[1] + steps, options.head_dim
        caches = torch.zeros(shape, dtype=torch.bfloat16, device=options.device)
        positions = torch.arange(read.shape[1], device=options.device).expand(len(group), -1)
        each, last, found = torch.arange(len(group), device=options.device), lengths - 1, []
        for step in range(steps):
            attentions = [partial(static_attention, positions, *pair) for pair in zip(*caches, strict=True)]
            found.append(next_tokens(model, read, positions.unsqueeze(1), attentions, (each, last)))
            read, positions, last = found[-1].unsqueeze(1), (lengths + step).unsqueeze(1), last * 0
        for request, tokens in zip(group, torch.stack(found, 1).tolist(), strict=True):
            request.tokens += tokens[: request.end - len(request.tokens)]


def static_attention(positions, k_cache, v_cache, q, k, v) -> torch.Tensor:
    """Writes k and v at their positions, (batch, seqlen). Padding lies behind the keys that a token sees."""
    each = torch.arange(len(k), device=k.device).unsqueeze(1)
    k_cache[each, :, positions], v_cache[each, :, positions] = k.transpose(1, 2), v.transpose(1, 2)
    if q.shape[2] > 1:  # prompts, of which the cache has nothing yet
        return char_gpt.sdpa(q, k, v)
    mask = torch.arange(k_cache.shape[2], device=k.device) <= positions[:, None, None]
    return F.scaled_dot_product_attention(q, k_cache, v_cache, attn_mask=mask, enable_gqa=True)


def check(model: GPT, request: Request, new: int) -> float:
    """By how much the model without a cache likes another token more than one of the `new` ones; logits."""
    text = torch.tensor(request.tokens[:-1], device=model.logits.weight.device)
    positions = torch.arange(len(text), device=text.device)
    hidden = model.hidden(text[None], positions, [char_gpt.ours] * len(model.blocks))
    logits = model.logits(hidden[0, -new:])
    chosen = torch.tensor(request.tokens[-new:], device=text.device).unsqueeze(1)
    return (logits.amax(1) - logits.gather(1, chosen).squeeze(1)).max().item()


def draw(text: torch.Tensor, options: argparse.Namespace) -> list[Request]:
    """Requests from places of the text, in the order in which they arrive."""
    most = torch.tensor([options.prompt, options.new])
    sizes = (most * torch.empty(options.requests, 2).uniform_(0.25, 1)).ceil().long().tolist()
    starts = torch.randint(len(text) - options.prompt, (options.requests,)).tolist()
    return [
        Request(text[start : start + prompt].tolist(), prompt + new, i // ARRIVALS)
        for i, (start, (prompt, new)) in enumerate(zip(starts, sizes, strict=True))
    ]


def timed(run: Callable[[list[Request]], None], requests: list[Request]) -> tuple[list[Request], float]:
    """The requests, done, and the seconds that it took; the first ones run before, to warm up."""
    run([Request(one.tokens[:], min(one.end, len(one.tokens) + 2)) for one in requests[:4]])
    done, start = deepcopy(requests), time.perf_counter()
    run(done)
    return done, time.perf_counter() - start


def report(
    title: str,
    run: Callable[[list[Request]], None],
    requests: list[Request],
    served: list[Request] | None = None,
) -> list[Request]:
    """Prints the line of a way to generate, as soon as it is done; served: whose text it should have."""
    done, seconds = timed(run, requests)
    new = sum(request.end - len(request.tokens) for request in requests)
    same = sum(one.tokens == other.tokens for one, other in zip(done, served or done, strict=False))
    show("")
    line = f"{title:>20}{len(done):10}{seconds:10.2f}{new / seconds:10.0f}{same:>6} of {len(done)}"
    print(line, flush=True)
    return done


def options() -> argparse.Namespace:
    parser = char_gpt.training_parser(__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the model without a cache")
    parser.add_argument("--cache", choices=["fp8"], help="of 8 bits (default: of 16)")
    parser.add_argument("--tolerance", type=float, default=1e-2, help="of logits; default: 1e-2")
    for name in NAMES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=count, metavar="N")
    defaults = {device: dict(zip(NAMES, sizes, strict=True)) for device, sizes in SIZES.items()}
    found = char_gpt.parse(parser, defaults)
    if found.check and found.cache:
        parser.error("--check: with --cache fp8 the text is not that of the model without a cache")
    if found.prompt + found.new > found.pages * found.page_size:
        room = f"{found.pages} pages of {found.page_size}"
        parser.error(f"--pages: {room} are too few for a prompt of {found.prompt} and {found.new} new tokens")
    return found


@torch.inference_mode()
def compare(model: GPT, text: torch.Tensor, options: argparse.Namespace) -> bool:
    requests = draw(text, options)
    new = [request.end - len(request.tokens) for request in requests]
    print(f"{len(requests)} prompts of up to {options.prompt} bytes, {sum(new)} bytes to generate")
    plain: Scales = [{}] * options.layers
    scales = scales_for(model, requests[0].tokens, options.device) if options.cache else plain
    if options.cache:
        number = min(options.running, (len(text) - 1) // options.prompt)
        pieces = char_gpt.cut(text, torch.arange(number) * options.prompt, options.prompt, options.device)
        found = [perplexity(model, pieces, options, given) for given in (plain, scales)]
        told = f"{found[0]:.4f} from a cache of 16 bits, {found[1]:.4f} from one of 8"
        print(f"perplexity of {pieces.read.numel()} unseen bytes: {told}")
    batching, alone = (
        partial(serve, title, Server(model, options, scales, most))
        for title, most in (("continuous batching", options.running), ("one at a time", 1))
    )
    print(f"\n{'':>20}{'sequences':>10}{'seconds':>10}{'tokens/s':>10}{'same text':>12}", flush=True)
    served = report("continuous batching", batching, requests)
    report("one at a time", alone, requests[: max(4, len(requests) // ALONE)], served)
    report("SDPA, static cache", partial(static_batching, model, options), requests, served)
    prompt, written = (bytes(part) for part in (served[0].tokens[: -new[0]], served[0].tokens[-new[0] :]))
    print(f"\n...{prompt[-60:].decode(errors='replace')}[{written.decode(errors='replace')}]")
    if not options.check:
        return True
    gaps = [check(model, request, number) for request, number in zip(served, new, strict=True)]
    agree = "is" if max(gaps) <= options.tolerance else "IS NOT"
    told = f"{gaps.count(0)} of {len(gaps)} are equal, logits of other bytes at most {max(gaps):.1e} higher"
    print(f"the text {agree} that of the model without a cache: {told}")
    return max(gaps) <= options.tolerance


def main() -> int:
    given = options()
    learned, unseen = char_gpt.read(given, max(given.context, given.prompt))
    model = char_gpt.train("flash_cute", char_gpt.causally(char_gpt.ours), learned, given).model
    in_half = given.device.type == "cuda" and not given.check
    with torch.autocast(given.device.type, torch.bfloat16, enabled=in_half):
        return not compare(model, unseen, given)


if __name__ == "__main__":
    sys.exit(main())
