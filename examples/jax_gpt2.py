"""What flash_cute began with, in JAX: one head of GPT-2's causal self-attention, four ways.

    python examples/jax_gpt2.py [--batch 8] [--dtype float32] [--plot jax_gpt2.png]

1024 tokens, 768 wide, a head of 64, prompts padded on the left. Plain softmax; padded softmax; padded
softmax times V, as softmax and then a matrix product, and fused; padded attention, fused. Each is compared
with float64 and timed beside XLA's own and, for attention on CUDA in bfloat16, cuDNN's. float32 is multiplied
as exactly as that.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from flash_cute.jax import attention, softmax, softmax_matmul

TOKENS, WIDTH, HEAD_DIM = 1024, 768, 64
TOLERANCES = {"bfloat16": 0.02, "float32": 1e-5}  # of results, against float64


def inputs(batch: int, tokens: int, dtype: str):
    """q, k and v (batch, tokens, 1, head_dim), by projections of random hidden states; padding (batch,)."""
    hidden, weights = (
        jax.random.normal(jax.random.key(seed), shape, jnp.float32)
        for seed, shape in enumerate(((batch, tokens, WIDTH), (3, WIDTH, HEAD_DIM)))
    )
    q, k, v = ((hidden @ w / math.sqrt(WIDTH)).astype(dtype)[:, :, None] for w in weights)
    return q, k, v, jnp.arange(batch, dtype=jnp.int32) * tokens // (2 * batch)


def exact(q, k, v, padding):
    """Probabilities without and with padding, and out with padding, by numpy in float64."""
    q, k, v = (np.asarray(x, np.float64)[:, :, 0] for x in (q, k, v))
    scores = np.asarray(scores_of(q, k), np.float64)
    place = np.arange(q.shape[1])
    causal = place <= place[:, None]

    def probabilities(seen):
        weights = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0)
        return weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300)

    padded = probabilities(causal & (place >= np.asarray(padding)[:, None, None]))
    return probabilities(causal), padded, padded @ v


def scores_of(q, k):
    return q @ k.swapaxes(-1, -2) / math.sqrt(HEAD_DIM)


def xla_softmax(scores, padding=None):
    place = jnp.arange(scores.shape[-1])
    seen = place <= place[:, None]
    if padding is not None:
        seen = seen & (place >= padding[:, None, None])
    return jnp.where(seen, jax.nn.softmax(jnp.where(seen, scores.astype(jnp.float32), -1e30)), 0).astype(
        scores.dtype
    )


def xla_attention(q, k, v, padding, implementation="xla"):
    place = jnp.arange(k.shape[1])
    seen = (place >= padding[:, None])[:, None, None]
    mask = jnp.broadcast_to(seen, (*seen.shape[:2], q.shape[1], k.shape[1]))  # cuDNN's wants all queries
    out = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation=implementation)
    return jnp.where((place >= padding[:, None])[..., None, None], out, 0)


def median_us(function, arguments) -> float:
    """Of calls one after the other, in rounds; each round ends when the device does."""
    jax.block_until_ready(function(*arguments))
    begin = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    calls = max(1, int(0.01 / (time.perf_counter() - begin)))
    rounds = []
    for _ in range(7):
        begin = time.perf_counter()
        for _ in range(calls):
            found = function(*arguments)
        jax.block_until_ready(found)
        rounds.append(1e6 * (time.perf_counter() - begin) / calls)
    return float(np.median(rounds))


def ways(q, k, v, padding):
    """Name -> ({who: (function, arguments)}, the float64 result)."""
    plain, padded, out = exact(q, k, v, padding)
    scores, values = scores_of(q[:, :, 0], k[:, :, 0]).astype(q.dtype), v[:, :, 0]
    found = {
        "plain softmax": (
            {
                "flash_cute": (lambda s: softmax(s, causal=True)[0], (scores,)),
                "XLA": (xla_softmax, (scores,)),
            },
            plain,
        ),
        "padded softmax": (
            {
                "flash_cute": (lambda s, p: softmax(s, causal=True, leftpad_k=p)[0], (scores, padding)),
                "XLA": (xla_softmax, (scores, padding)),
            },
            padded,
        ),
        "padded softmax times V": (
            {
                "flash_cute": (
                    lambda s, v, p: softmax(s, causal=True, leftpad_k=p)[0] @ v,
                    (scores, values, padding),
                ),
                "fused": (fused_softmax_matmul, (scores, values, padding)),
                "XLA": (lambda s, v, p: xla_softmax(s, p) @ v, (scores, values, padding)),
            },
            out,
        ),
        "padded attention": (
            {
                "flash_cute": (padded_attention, (q, k, v, padding)),
                "XLA": (xla_attention, (q, k, v, padding)),
            },
            out[:, :, None],
        ),
    }
    if jax.default_backend() == "gpu" and q.dtype == jnp.bfloat16:
        cudnn = partial(xla_attention, implementation="cudnn")
        found["padded attention"][0]["cuDNN"] = (cudnn, (q, k, v, padding))
    return found


def fused_softmax_matmul(scores, v, padding):
    out, _ = softmax_matmul(scores[:, None], v[:, :, None], causal=True, leftpad_k=padding)
    return out[:, :, 0]


def padded_attention(q, k, v, padding):
    return attention(q, k, v, is_causal=True, key_value_left_padding=padding)


def plot(times: dict[str, dict[str, float]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4))
    names = list(dict.fromkeys(who for way in times.values() for who in way))
    for i, who in enumerate(names):
        places = [place + i / (len(names) + 1) for place, way in enumerate(times.values()) if who in way]
        axis.bar(places, [way[who] for way in times.values() if who in way], 1 / (len(names) + 1), label=who)
    axis.set_xticks(range(len(times)), times)
    axis.set_ylabel("microseconds")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--dtype", choices=TOLERANCES, default="bfloat16")
    parser.add_argument("--plot", default=None, help="a file for a bar chart")
    arguments = parser.parse_args()
    if arguments.dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")
    times, wrong = {}, []
    given = inputs(arguments.batch, arguments.tokens, arguments.dtype)
    for name, (contenders, oracle) in ways(*given).items():
        times[name] = {}
        for who, (function, operands) in contenders.items():
            jitted = jax.jit(function)
            error = np.abs(np.asarray(jitted(*operands), np.float64) - oracle).max()
            times[name][who] = median_us(jitted, operands)
            print(f"{name:24} {who:12} {times[name][who]:10.1f} us, largest error {error:.2e}", flush=True)
            if not error <= TOLERANCES[arguments.dtype]:
                wrong.append(f"{name}, {who}")
    if arguments.plot:
        plot(times, arguments.plot)
    print(f"wrong: {'; '.join(wrong)}" if wrong else "all agree with float64")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
