"""Dropout's draws from Philox's words, for torch's arrays and JAX's alike, and without either."""

from __future__ import annotations

from collections.abc import Callable

STEPS = 4096  # a pair is kept with a probability that is a multiple of 1 / STEPS
ROUNDS = 7  # of Philox4x32, with these numbers
MULTIPLIERS, WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
QUERIES, KEYS = 4, 8  # of a word
# Of the words that are sums, from the lowest on: how far word i % 4 and the one after it are rotated.
ROTATIONS = (3, 16), (26, 16), (9, 1), (31, 27), (25, 27), (31, 13), (1, 14), (8, 31)


def keep_of(p: float) -> int:
    """Of STEPS, how many a pair is kept with where it is dropped with probability p."""
    return round(STEPS * (1 - p))


def compared(drawn, keep: int, rotated: Callable):
    """Words of 32 bits: each bit is 1 with probability keep / STEPS, 0 < keep < STEPS.

    drawn: Philox's four words. rotated(word, left): of 32 bits.
    """
    result = drawn[0] & 0
    for bit in range(STEPS.bit_length() - 1):
        word = drawn[bit % 4]
        if bit < len(ROTATIONS):
            first, second = ROTATIONS[bit]
            word = rotated(word, first) ^ rotated(drawn[(bit + 1) % 4], second)
        result = result | word if keep >> bit & 1 else result & word
    return result
