"""What changes scores in cases: masks of pairs, biases, slopes, a cap and dropout; and what is right then."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from flash_cute import dropout
from support.cases import SEEDS
from support.expected import Sequence

# Which of the batch, heads, queries and keys a mask or a bias tells apart.
_ALL = (True, True, True, True)
PAIRS = {
    "none": None,
    "pairs": _ALL,
    "pairs, all heads alike": (True, False, True, True),
    "pairs, all sequences alike": (False, True, True, True),
    "keys": (True, False, False, True),
    "blocks": (False, False, True, True),
    "no pair": (True, True, True, True),
    "bits": _ALL,
    "bits, all alike": (False, False, True, True),
    "bits of keys": (True, False, False, True),
    "last keys": _ALL,
    "bits of last keys": (True, False, True, True),
}
BIASES = {
    "none": None,
    "pairs": _ALL,
    "pairs, all heads alike": (True, False, True, True),
    "pairs, all sequences alike": (False, True, True, True),
    "pairs, some sequences alike": _ALL,
    "keys": (True, False, False, True),
    "queries": (True, True, True, False),
    "heads": (False, True, False, False),
    "pairs, all alike": (False, False, True, True),
    "one number": (False, False, False, False),
    "some -inf": _ALL,
    "lowest": _ALL,
    "lowest, keys": (True, False, False, True),
    "float32": _ALL,
}


def packed_bits(mask: torch.Tensor) -> torch.Tensor:
    """Key j in bit j % 8 of byte j // 8; bits of no key are 1."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 8), value=True)
    weights = torch.tensor([1 << bit for bit in range(8)], device=mask.device)
    return (padded.unflatten(-1, (-1, 8)) * weights).sum(-1).to(torch.uint8)


def laid_out(x: torch.Tensor) -> torch.Tensor:
    """The same numbers in some memory: dense, by steps, dimensions in another order or with room behind."""
    kind = SEEDS.choice(("dense", "dense", "steps", "other order", "room"))
    if kind == "other order":
        return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    if kind == "dense":
        return x.contiguous()
    step, more = (2, 0) if kind == "steps" else (1, 5)
    room = torch.zeros(*x.shape[:3], x.shape[3] * step + more, dtype=x.dtype, device=x.device)
    return room[..., : x.shape[3] * step : step].copy_(x)


MOST_PAIRS = 1 << 28


@dataclass
class Given:
    """Of a call: mask (booleans of all keys), bias (of q's type), slopes (batch, heads), seed and p."""

    size: tuple[int, int, int, int]  # batch, heads, queries, keys that there is room for
    keys: list[int]  # of each sequence
    mask: torch.Tensor | None = None
    bits: bool = False
    columns: int | None = None  # of the last keys, None for all
    bias: torch.Tensor | None = None
    wide_bias: bool = False
    slopes: torch.Tensor | None = None
    softcap: float = 0.0
    seed: torch.Tensor | None = None
    p: float = 0.0

    @classmethod
    def of(cls, case, size, keys, may_be_short, dtype, device, generator) -> Given:
        found = cls(size, keys)

        def draw(axes, random=torch.rand):
            shape = [n if told else 1 for n, told in zip(size, axes, strict=True)]
            return random(shape, generator=generator, device=device)

        def affordable(axes):
            """With sequences and heads told apart only where memory holds so many pairs."""
            for told in ((), (0,), (0, 1)):
                fewer = tuple(x and dim not in told for dim, x in enumerate(axes))
                if math.prod(n if x else 1 for n, x in zip(size, fewer, strict=True)) <= MOST_PAIRS:
                    break
            return fewer

        if axes := PAIRS[case.pairs] and affordable(PAIRS[case.pairs]):
            found.bits = case.pairs.startswith("bits")
            found.mask = draw(axes) < 0.7
            if axes[2]:
                found.mask &= draw((*axes[:3], False)) > 0.1  # some see nothing
            if case.pairs == "blocks":
                blocks = torch.rand(size[2] // 64 + 1, size[3] // 64 + 1, generator=generator, device=device)
                whole = (blocks < 0.5).repeat_interleave(64, 0).repeat_interleave(64, 1)
                found.mask[:] = whole[: size[2], : size[3]]
            if case.pairs == "no pair":
                found.mask[:] = False
            if case.pairs.endswith("last keys") and may_be_short and size[3] > 1:
                columns = SEEDS.randint(1, size[3] - 1)
                if found.bits:
                    columns = min(-(-columns // 8), -(-size[3] // 8) - 1) * 8
                if columns > 0:
                    found.columns, found.mask = columns, found.mask[..., :columns]
        if axes := BIASES[case.bias] and affordable(BIASES[case.bias]):
            bias = 2 * draw(axes, torch.randn)
            if case.bias == "pairs, some sequences alike":
                divisors = [n for n in range(1, size[0] + 1) if size[0] % n == 0]
                bias = bias[: SEEDS.choice(divisors)]
            if case.bias == "some -inf":
                bias[draw(axes) < 0.3] = -torch.inf
                bias[(draw((*axes[:3], False)) < 0.1).expand(bias.shape)] = -torch.inf
            bias = bias.to(dtype)
            if case.bias.startswith("lowest"):
                bias[draw(axes) < 0.5] = torch.finfo(dtype).min
                if axes[2]:
                    bias[(draw((*axes[:3], False)) < 0.2).expand(bias.shape)] = torch.finfo(dtype).min
            found.bias, found.wide_bias = bias, case.bias == "float32"
        if case.alibi != "none":
            shape = size[:2] if case.alibi == "of sequences and heads" else size[1:2]
            found.slopes = torch.rand(shape, generator=generator, device=device).mul(-8).exp2()
        if case.softcap != "none":
            found.softcap = float(case.softcap)
        if case.dropout != "none":
            found.p = float(case.dropout)
            found.seed = torch.tensor([SEEDS.getrandbits(63) - 2**62 for _ in range(2)], device=device)
        return found

    def arguments(self) -> dict:
        """Of the function that is called."""
        found = {"softcap": self.softcap} if self.softcap else {}
        if self.mask is not None:
            found["mask"] = laid_out(packed_bits(self.mask) if self.bits else self.mask)
        if self.bias is not None:
            found["bias"] = laid_out(self.bias.float() if self.wide_bias else self.bias)
        if self.slopes is not None:
            found["alibi_slopes"] = self.slopes
        if self.p:
            found |= {"dropout_p": self.p, "dropout_seed": self.seed}
        return found

    def poison_bias(self, seen: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Makes NaN of what no visible pair has. seen: of each sequence its rows, and their pairs."""
        read = torch.zeros(self.bias.shape, dtype=torch.bool, device=self.bias.device)
        for number, (rows, pairs) in enumerate(seen):
            if self.mask is not None:
                pairs = pairs & self.mask_of(number, rows)
            pairs = pairs if pairs.dim() == 3 else pairs.unsqueeze(0)
            of_entry = read[number // (self.size[0] // len(read))]
            for dim in range(3):
                if of_entry.shape[dim] == 1:
                    pairs = pairs.any(dim, keepdim=True)
            rows = rows if of_entry.shape[1] > 1 else slice(0, pairs.shape[1])
            of_entry[:, rows, : pairs.shape[2]] |= pairs
        self.bias[~read] = torch.nan

    def add_to_bias(self, whole: torch.Tensor, number: int, rows: torch.Tensor, part: torch.Tensor) -> None:
        """Adds the gradient of what is added to one sequence's scores to that of a bias."""
        of_entry = whole[number // (self.size[0] // len(whole))]
        part = part.sum_to_size([1 if n == 1 else m for n, m in zip(of_entry.shape, part.shape, strict=True)])
        of_entry[:, rows if of_entry.shape[1] > 1 else slice(None), : part.shape[2]] += part

    def mask_of(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        """(heads or 1, rows or 1, keys of the sequence)."""
        mask, keys = self.mask[number if len(self.mask) > 1 else 0], self.keys[number]
        mask = mask if mask.shape[1] == 1 else mask[:, rows]
        if self.columns is None:
            return mask[..., :keys]
        before = max(0, keys - self.columns)
        mask = mask[..., max(0, self.columns - keys) :]
        return torch.nn.functional.pad(mask, (before, 0), value=True)

    def changed(self, sequence: Sequence, number: int, rows: torch.Tensor) -> Sequence:
        """A sequence of so many keys, with what this says of it."""
        keys, heads, device = self.keys[number], self.size[1], rows.device
        sees, added = sequence.sees, None
        if self.mask is not None:
            sees = sees & self.mask_of(number, rows)
        if self.bias is not None:
            bias = self.bias[number // (self.size[0] // len(self.bias))]
            bias = bias if bias.shape[1] == 1 else bias[:, rows]
            bias = bias if bias.shape[2] == 1 else bias[..., :keys]
            sees, added = sees & ~bias.isneginf(), bias.double()
        if self.slopes is not None:
            slopes = self.slopes if self.slopes.dim() == 1 else self.slopes[number]
            own = torch.arange(len(rows), device=device).unsqueeze(1) + keys - len(rows)
            distance = (own - torch.arange(keys, device=device)).abs()
            term = -slopes.double()[:, None, None] * distance
            added = term if added is None else added + term
        keep = dropout.keep_of(self.p)
        kept = None
        if keep < dropout.STEPS:
            numbers = torch.arange(number * heads, (number + 1) * heads, device=device)
            kept = dropout.kept(self.seed, numbers, slice(0, len(rows)), slice(0, keys), keep)
        return replace(
            sequence, sees=sees, softcap=self.softcap, added=added, kept=kept, keep=keep / dropout.STEPS
        )
