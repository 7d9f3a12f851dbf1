"""Which pairs of a query and a key dropout keeps: bits of Philox4x32, keyed by place and by no tile.

A word of 32 bits is of 4 queries x 8 keys: that of sequence n, head h, queries 4 y to 4 y + 3 and keys 8 x to
8 x + 7 comes of the counter (x, y, n * heads + h, ...), and query i's bit for key j is i % 4 * 8 + j % 8.
Twelve words are compared with keep, one bit of it after the other: the four highest are Philox's, the others
sums modulo 2 of two of these, rotated so that the twelve bits of any two pairs are 24 independent ones.
Kernels, the CPU and JAX have the same words (docs/scores.md).
"""

from __future__ import annotations

import torch

from flash_cute._cpu.draws import KEYS, MULTIPLIERS, QUERIES, ROUNDS, STEPS, WEYL, compared, keep_of
from flash_cute.wording import shown

_32_BITS = 0xFFFFFFFF
_WORDS = 1 << 16  # at once: what is computed on the way stays in a cache


def dropout_mask(seed: torch.Tensor, b: int, h: int, sq: int, sk: int, p: float) -> torch.Tensor:
    """The pairs that dropout_p=p keeps in a call with dropout_seed=seed: True is kept.

    Args:
        seed: int64 (2,), on any device.
        b, h, sq, sk: the batch, q's heads, queries and keys of the call. A pair's bit depends on the number
            of its sequence, its head, its query and key, counted from the sequence's first ones (what pads
            keys on the left is counted), and, by n * h + head, on h; not on b, sq and sk.
        p: in [0, 1): as dropout_p, the probability that a pair is dropped, in steps of 1 / 4096.

    Returns:
        bool (b, h, sq, sk), on the seed's device. With keep = round(4096 (1 - p)) / 4096 the call's out is
        (softmax(scores) * dropout_mask(...) / keep) v.

    Raises:
        ValueError: the seed is not such a tensor, p is not in [0, 1) or so large that nothing is kept.
    """
    if not isinstance(seed, torch.Tensor) or seed.dtype != torch.int64 or seed.shape != (2,):
        got = f"{seed.dtype} {tuple(seed.shape)}" if isinstance(seed, torch.Tensor) else shown(seed)
        raise ValueError(f"flash_cute.dropout_mask: seed must be an int64 tensor of shape (2,), got {got}")
    if not 0 <= p < 1 or keep_of(p) == 0:
        raise ValueError(
            f"flash_cute.dropout_mask: p must be in [0, 1) and less than {1 - 0.5 / STEPS}, as 1 - p is "
            f"rounded to multiples of 1 / {STEPS} of which 0 would keep nothing, got {shown(p)}"
        )
    heads = torch.arange(b * h, device=seed.device)
    if keep_of(p) == STEPS:
        return torch.ones(b, h, sq, sk, dtype=torch.bool, device=seed.device)
    return kept(seed, heads, slice(0, sq), slice(0, sk), keep_of(p)).view(b, h, sq, sk)


def kept(seed: torch.Tensor, heads: torch.Tensor, queries: slice, keys: slice, keep: int) -> torch.Tensor:
    """bool (heads, queries, keys): heads is int64, n * heads of q + head; keep is below STEPS."""
    first_y, first_x = queries.start // QUERIES, keys.start // KEYS
    y = torch.arange(first_y, -(-queries.stop // QUERIES), device=seed.device)
    x = torch.arange(first_x, -(-keys.stop // KEYS), device=seed.device)
    result = torch.empty(
        len(heads), queries.stop - queries.start, keys.stop - keys.start, dtype=torch.bool, device=seed.device
    )
    if result.numel() == 0:
        return result
    rows = min(len(y), max(1, _WORDS // len(x)))
    several = max(1, _WORDS // (len(x) * rows))
    for head in range(0, len(heads), several):
        of_heads = slice(head, head + several)
        for row in range(0, len(y), rows):
            bits = _unpacked(_words(seed, heads[of_heads], y[row : row + rows], x, keep))
            begin = (first_y + row) * QUERIES - queries.start  # the first query of these bits in the result
            skipped = max(0, -begin)
            end = min(result.shape[1], begin + bits.shape[1])
            first = keys.start - first_x * KEYS
            result[of_heads, begin + skipped : end] = bits[
                :, skipped : end - begin, first : first + result.shape[2]
            ]
    return result


def _words(seed, heads, y, x, keep: int) -> torch.Tensor:
    """int64 (heads, y, x), of 32 bits each: each bit is 1 with probability keep / STEPS."""
    s, o = seed.unbind()
    key = s & _32_BITS, (s >> 32 ^ o >> 32) & _32_BITS
    drawn = philox((x, y[:, None], heads[:, None, None], o & _32_BITS), key, ROUNDS)
    return compared(drawn, keep, _rotated)


def _rotated(word: torch.Tensor, left: int) -> torch.Tensor:
    return (word << left | word >> (32 - left)) & _32_BITS


def _unpacked(words: torch.Tensor) -> torch.Tensor:
    """Their bits, bool (heads, 4 y, 8 x)."""
    octets = torch.stack([words >> shift & 0xFF for shift in range(0, 32, KEYS)], -2).to(torch.uint8)
    bit = torch.arange(KEYS, dtype=torch.uint8, device=words.device)
    return (octets.unsqueeze(-1) >> bit & 1).bool().flatten(-2).flatten(1, 2)


def philox(counter, key, rounds: int) -> tuple[torch.Tensor, ...]:
    """Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    counter: four int64 tensors that broadcast, key: two; all numbers have 32 bits, and so have the results.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for turn in range(rounds):
        if turn > 0:
            k0, k1 = (k0 + WEYL[0]) & _32_BITS, (k1 + WEYL[1]) & _32_BITS
        (high0, low0), (high1, low1) = (_product(c, m) for c, m in zip((c0, c2), MULTIPLIERS, strict=True))
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


def _product(a: torch.Tensor, multiplier: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The upper and the lower 32 bits of a * multiplier, which may have 64, more than int64 has room for.

    A multiplier of 2^31 or more lacks less than 2^31 to 2^32, and so the product with what it lacks fits.
    """
    rest = a * (multiplier - (1 << 32))
    return a + (rest >> 32), rest & _32_BITS
