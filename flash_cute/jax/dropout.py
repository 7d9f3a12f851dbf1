"""Which pairs dropout keeps: the bits of flash_cute.dropout_mask, by integers of 32 bits, as JAX has them."""

from __future__ import annotations

import jax.numpy as jnp

from flash_cute._cpu.draws import KEYS, MULTIPLIERS, QUERIES, ROUNDS, STEPS, WEYL, compared, keep_of

__all__ = ["STEPS", "keep_of", "kept"]


def kept(seed, batch, heads, seqlen_q, seqlen_k, keep):
    """bool (batch, heads, seqlen_q, seqlen_k). seed: uint32 (4,), of an int64 (2,) the low words first."""
    y, x = (
        jnp.arange(-(-n // size), dtype=jnp.uint32) for n, size in ((seqlen_q, QUERIES), (seqlen_k, KEYS))
    )
    head = jnp.arange(batch * heads, dtype=jnp.uint32)[:, None, None]
    words = _words(seed, head, y[:, None], x, keep)
    words = jnp.repeat(jnp.repeat(words, QUERIES, 1), KEYS, 2)[:, :seqlen_q, :seqlen_k]
    row, key = (jnp.arange(n, dtype=jnp.uint32) for n in (seqlen_q, seqlen_k))
    bit = row[:, None] % QUERIES * KEYS + key % KEYS
    return (words >> bit & 1).astype(bool).reshape(batch, heads, seqlen_q, seqlen_k)


def _words(seed, head, y, x, keep):
    """uint32 (heads, y, x): each bit is 1 with probability keep / STEPS."""
    s_low, s_high, o_low, o_high = seed
    drawn = _philox((x, y, head, o_low), (s_low, s_high ^ o_high))
    return compared(drawn, keep, _rotated)


def _rotated(word, left: int):
    return word << left | word >> (32 - left)


def _philox(counter, key):
    """Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for turn in range(ROUNDS):
        if turn > 0:
            k0, k1 = k0 + jnp.uint32(WEYL[0]), k1 + jnp.uint32(WEYL[1])
        (high0, low0), (high1, low1) = (_product(c, m) for c, m in zip((c0, c2), MULTIPLIERS, strict=True))
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


def _product(a, multiplier):
    """The upper and the lower 32 bits of a * multiplier, by halves."""
    low, high = a & 0xFFFF, a >> 16
    m_low, m_high = jnp.uint32(multiplier & 0xFFFF), jnp.uint32(multiplier >> 16)
    middle = high * m_low + (low * m_low >> 16)
    other = low * m_high + (middle & 0xFFFF)
    return high * m_high + (middle >> 16) + (other >> 16), a * jnp.uint32(multiplier)
