"""Softmax of scores times values, fused: attention with scores of one's own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from flash_cute.jax import arguments, shards
from flash_cute.jax.arguments import MAX_LENGTH, SOFTMAX_MATMUL
from flash_cute.jax.dot_product_attention import Given, Options, attend, in_shards
from flash_cute.wording import hinting, require_bool

_HEAD_DIM = 8  # of queries and keys of zeros


@hinting("flash_cute.jax")
def softmax_matmul(
    x: jax.Array,
    v: jax.Array,
    *,
    scale: float = 1.0,
    causal: bool = False,
    seqused_q: jax.Array | None = None,
    seqused_k: jax.Array | None = None,
    leftpad_k: jax.Array | None = None,
    mask: jax.Array | None = None,
    dropout_p: float = 0.0,
    dropout_seed: jax.Array | None = None,
    deterministic: bool = False,
    precision: str | jax.lax.Precision | None = None,
) -> tuple[jax.Array, jax.Array]:
    """softmax(scale * x) times v and the log-sum-exp. The probabilities are not stored.

    Args:
        x: scores, (batch or 1, heads or 1, seqlen_q, seqlen_k), v's dtype; -inf hides a key.
        v: (batch, seqlen_k, heads_kv, head_dim), as flash_cute.jax.attention has it, float32, float16 or
            bfloat16; head_dim up to 256. heads is a multiple of heads_kv. Without batch and heads, too:
            x (seqlen_q, seqlen_k) and v (seqlen_k, head_dim).
        scale: multiplies the scores; a number > 0, not traced.
        causal: query i sees key j iff j <= i + seqlen_k - seqlen_q, as in flash_cute.jax.softmax; with
            lengths, by those of each entry.
        seqused_q, seqused_k: integers (batch,): how many queries and keys of an entry count, from the first.
        leftpad_k: integers (batch,): how many keys at an entry's begin don't count.
        mask: bool, (batch or 1, heads or 1, seqlen_q or 1, seqlen_k or 1): True is seen, of the keys that the
            other arguments leave.
        dropout_p, dropout_seed, precision: as in flash_cute.jax.attention.
        deterministic: the same bits in v's gradient each time; those of x's are.

    Returns:
        out: (batch, seqlen_q, heads, head_dim), v's dtype; 0 for a query that sees no key or doesn't count.
        lse: float32, out's shape without the last dimension; -inf for such a query. Both are differentiable
            in x and v, once, in reverse mode.

    Raises:
        ValueError, TypeError: an argument makes no sense; the sentence says which, and what is accepted.
        NotImplementedError: a second derivative is asked for.
    """
    x, v = (arguments.array(SOFTMAX_MATMUL, name, y) for name, y in (("x", x), ("v", v)))
    for name, y in (("causal", causal), ("deterministic", deterministic)):
        require_bool(SOFTMAX_MATMUL, name, y)
    if x.ndim != v.ndim or x.ndim not in (2, 4):
        raise ValueError(
            f"{SOFTMAX_MATMUL}: x has {x.ndim} dimensions and v {v.ndim}; 4, or 2 without batch and heads, "
            "are accepted"
        )
    has_batch = x.ndim == 4
    if not has_batch:
        x, v = x[None, None], v[None, :, None]
        mask = mask[None, None] if getattr(mask, "ndim", 0) == 2 else mask
    _check(x, v)
    (_, heads, seqlen_q, seqlen_k), (batch, _, heads_kv, _) = x.shape, v.shape
    heads = heads_kv if heads == 1 else heads
    lengths = (
        arguments.checked_lengths(SOFTMAX_MATMUL, name, y, batch)
        for name, y in (("seqused_q", seqused_q), ("seqused_k", seqused_k), ("leftpad_k", leftpad_k))
    )
    sizes = batch, heads, seqlen_q, seqlen_k
    mask = arguments.checked_of_scores(SOFTMAX_MATMUL, "mask", mask, sizes, v.dtype)
    keep, seed = arguments.checked_dropout(SOFTMAX_MATMUL, dropout_p, dropout_seed)
    options = Options(
        scale=1.0,
        left=-1,
        right=0 if causal else -1,
        tf32=arguments.is_tf32(SOFTMAX_MATMUL, precision) and v.dtype == jnp.float32,
        deterministic=deterministic,
        gives_lse=True,
        softcap=0.0,
        bias_scale=arguments.checked_scale(SOFTMAX_MATMUL, scale),
        keep=keep,
        face=SOFTMAX_MATMUL,
    )

    def compute(query, key, value, given):
        return attend(query, key, value, given, options)

    query = jnp.zeros((batch, seqlen_q, heads, _HEAD_DIM), v.dtype)
    key = jnp.zeros((batch, seqlen_k, heads_kv, _HEAD_DIM), v.dtype)
    axes = shards.explicit_axes(v)
    if axes[0] or axes[2]:
        query = jax.sharding.reshard(query, PartitionSpec(axes[0], None, axes[2], None))
    out, lse = in_shards(compute, query, key, v, Given(*lengths, mask=mask, bias=x, seed=seed))
    lse = jnp.swapaxes(lse, 1, 2)
    return (out, lse) if has_batch else (out[0, :, 0], lse[0, :, 0])


def _check(x, v):
    if v.dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
        raise ValueError(
            f"{SOFTMAX_MATMUL}: v has dtype {v.dtype}; float32, float16 and bfloat16 are accepted"
        )
    batch, seqlen_k, heads_kv, head_dim = v.shape
    fits = x.shape[0] in (1, batch) and x.shape[3] == seqlen_k
    fits_heads = x.shape[1] == 1 or (x.shape[1] % heads_kv == 0 if heads_kv else x.shape[1] == 0)
    if not (fits and fits_heads) or x.dtype != v.dtype:
        raise ValueError(
            f"{SOFTMAX_MATMUL}: x is {x.dtype}{list(x.shape)}; {v.dtype}[{batch} or 1, heads, seqlen_q, "
            f"{seqlen_k}], heads 1 or a multiple of {heads_kv}, is accepted beside v {list(v.shape)}"
        )
    if not 1 <= head_dim <= 256:
        raise ValueError(f"{SOFTMAX_MATMUL}: v has head_dim {head_dim}; 1 to 256 are accepted")
    for name, size in (
        ("rows", x.shape[2]),
        ("columns", seqlen_k),
        ("(batch, head) pairs", batch * max(x.shape[1], heads_kv)),
    ):
        if size > MAX_LENGTH:
            raise ValueError(f"{SOFTMAX_MATMUL}: x has {size} {name}; at most {MAX_LENGTH} are accepted")
