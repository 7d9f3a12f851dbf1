"""Which pairs dropout keeps: bits by their definition, their statistics, and that all kernels have them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from support.cases import Shape, make_gradients, make_inputs
from support.lengths import int32

import flash_cute
from flash_cute import dropout
from flash_cute._cpu.draws import ROTATIONS

FULL = 0xFFFFFFFF
OF_PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
# Those that Random123 has for its own: counter, key, rounds, words.
KNOWN = {
    "zeros, 7": ((0,) * 4, (0,) * 2, 7, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    "ones, 7": ((FULL,) * 4, (FULL,) * 2, 7, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    "pi, 7": (*OF_PI, 7, "4dfccaba 190a87f0 c47362ba b6b5242a"),
    "zeros, 10": ((0,) * 4, (0,) * 2, 10, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    "ones, 10": ((FULL,) * 4, (FULL,) * 2, 10, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    "pi, 10": (*OF_PI, 10, "d16cfe09 94fdcceb 5001e420 24126ea1"),
}
SEEDS = {
    "small": (1, 2),
    "negative": (-5, -7),
    "large": (2**62 + 12345, 2**61 + 987654321),
    "the ends": (-(2**63), 2**63 - 1),
    "one more": (1, 3),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_words(device, name):
    counter, key, rounds, words = KNOWN[name]
    counter, key = ([torch.tensor(x, device=device) for x in numbers] for numbers in (counter, key))
    assert " ".join(f"{word.item():08x}" for word in dropout.philox(counter, key, rounds)) == words


def philox_by_definition(counter: list[int], key: list[int]) -> list[int]:
    for _ in range(7):
        of_0, of_2 = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            of_2 >> 32 ^ counter[1] ^ key[0],
            of_2 & FULL,
            of_0 >> 32 ^ counter[3] ^ key[1],
            of_0 & FULL,
        ]
        key = [key[0] + 0x9E3779B9 & FULL, key[1] + 0xBB67AE85 & FULL]
    return counter


def is_kept(seed: tuple[int, int], heads: int, n: int, head: int, i: int, j: int, p: float) -> bool:
    """By the definition, in whole numbers of Python."""
    s, o = (x % 2**64 for x in seed)
    key = [s & FULL, s >> 32 ^ o >> 32]
    drawn = philox_by_definition([j // 8, i // 4, n * heads + head, o & FULL], key)
    place = i % 4 * 8 + j % 8
    bits = (sum(drawn[word] >> at for word, at in terms) & 1 for terms in draws_of(place))
    draw = sum(bit << step for step, bit in enumerate(bits))
    return 4095 - draw < round(4096 * (1 - p))


def draws_of(place: int) -> list[list[tuple[int, int]]]:
    """Of a pair's twelve bits, from the lowest on: the words and places of those that it is the sum of."""
    sums = [
        [(step % 4, (place - first) % 32), ((step + 1) % 4, (place - second) % 32)]
        for step, (first, second) in enumerate(ROTATIONS)
    ]
    return sums + [[(word, place)] for word in range(4)]


def test_any_two_pairs_of_a_word_are_independent():
    """The 24 bits that two pairs draw are sums modulo 2 of bits of Philox; no sum of some of them is 0."""
    draws = [[sum(1 << 32 * word + at for word, at in terms) for terms in draws_of(i)] for i in range(32)]
    for one, other in combinations(draws, 2):
        found = []
        for draw in one + other:
            for lead in found:
                draw = min(draw, draw ^ lead)
            assert draw
            found.append(draw)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9997])
@pytest.mark.parametrize("name", SEEDS)
def test_each_bit_is_its_definition(device, name, p):
    found = flash_cute.dropout_mask(torch.tensor(SEEDS[name], device=device), 2, 3, 9, 19, p)
    assert (found.shape, found.dtype, found.device.type) == ((2, 3, 9, 19), torch.bool, device.type)
    expected = [
        is_kept(SEEDS[name], 3, n, head, i, j, p)
        for n in range(2)
        for head in range(3)
        for i in range(9)
        for j in range(19)
    ]
    assert found.flatten().tolist() == expected


@pytest.mark.parametrize("words", [1, 50, 1 << 20])
def test_any_part_has_the_same_bits(device, monkeypatch, words):
    """In blocks of any size, from any query and key on, and of fewer heads."""
    seed = torch.tensor([3, 4], device=device)
    whole = flash_cute.dropout_mask(seed, 2, 3, 61, 123, 0.3)
    assert torch.equal(flash_cute.dropout_mask(seed, 1, 3, 20, 30, 0.3), whole[:1, :, :20, :30])
    monkeypatch.setattr(dropout, "_WORDS", words)
    for queries, keys in (((0, 61), (0, 123)), ((3, 47), (13, 101)), ((4, 8), (8, 16)), ((7, 7), (0, 9))):
        heads = torch.tensor([1, 2, 5], device=device)
        part = dropout.kept(seed, heads, slice(*queries), slice(*keys), dropout.keep_of(0.3))
        assert torch.equal(part, whole.flatten(0, 1)[heads, slice(*queries), slice(*keys)])


def sigmas(x: torch.Tensor, y: torch.Tensor | None, p: float) -> float:
    """How far the mean of x, or of the product with y, is from what it should be, in standard deviations."""
    keep = dropout.keep_of(p) / dropout.STEPS
    assert x.numel() >= 65536
    if y is None:
        return abs(x.double().mean().item() - keep) * (x.numel() / (keep * (1 - keep))) ** 0.5
    x, y = (side.double() - keep for side in (x, y))
    return abs((x * y).mean().item()) * x.numel() ** 0.5 / (keep * (1 - keep))


PROBABILITIES = 0.1, 0.5, 0.3, 0.9


@pytest.mark.parametrize("p", PROBABILITIES)
def test_means(device, p):
    """Of heads, of each bit of the words, and of what rows and columns have in common."""
    kept = flash_cute.dropout_mask(torch.tensor([2024, 7], device=device), 2, 4, 512, 1024, p)
    for head in kept.flatten(0, 1):
        assert sigmas(head, None, p) < 4
    for bits in kept.unflatten(2, (-1, 4)).unflatten(4, (-1, 8)).permute(3, 5, 0, 1, 2, 4).flatten(0, 1):
        assert sigmas(bits, None, p) < 4
    keep = dropout.keep_of(p) / dropout.STEPS
    for sums, count in ((kept.sum(-1), 1024), (kept.sum(-2), 512)):  # the spread of whole rows and columns
        scaled = (sums.double() - keep * count).square() / (count * keep * (1 - keep))
        # Of a sum of so many, nearly normal: its square has the mean 1 and the variance 2.
        assert abs(scaled.mean().item() - 1) < 4 * (2 / scaled.numel()) ** 0.5


@pytest.mark.parametrize("p", PROBABILITIES)
@pytest.mark.parametrize("step", [1, 2, 3, 4, 7, 8, 16, 64, 128])
def test_neighbours_have_nothing_in_common(device, step, p):
    """Rows, columns and both diagonals."""
    kept = flash_cute.dropout_mask(torch.tensor([99, 1], device=device), 1, 3, 512, 512, p)
    first, last = slice(0, -step), slice(step, None)
    assert sigmas(kept[:, :, first], kept[:, :, last], p) < 4
    assert sigmas(kept[..., first], kept[..., last], p) < 4
    assert sigmas(kept[:, :, first, first], kept[:, :, last, last], p) < 4
    assert sigmas(kept[:, :, first, last], kept[:, :, last, first], p) < 4


@pytest.mark.parametrize("p", PROBABILITIES)
def test_heads_sequences_and_seeds_have_nothing_in_common(device, p):
    def drawn(*seed: int) -> torch.Tensor:
        return flash_cute.dropout_mask(torch.tensor(seed, device=device), 3, 3, 256, 256, p)

    kept = drawn(5, 6)
    for one, other in pairwise(kept.flatten(0, 1)):
        assert sigmas(one, other, p) < 4
    assert sigmas(kept[:-1], kept[1:], p) < 4
    seeds = (5, 7), (5, 8), (6, 6), (6, 5), (5 + 2**32, 6), (5, 6 + 2**30), (5, 6 + 2**61), (-5, 6), (5, -6)
    for seed in seeds:
        assert sigmas(kept, drawn(*seed), p) < 4
    assert torch.equal(drawn(5, 6), kept)


def test_wrong_arguments(device):
    seed = torch.tensor([1, 2], device=device)
    for wrong, words in ((seed.int(), r"torch.int32 \(2,\)"), (seed[:1], r"torch.int64 \(1,\)"), (1, "1")):
        with pytest.raises(ValueError, match=rf"^flash_cute\.dropout_mask: seed must be .*, got {words}$"):
            flash_cute.dropout_mask(wrong, 1, 1, 2, 2, 0.1)
    for p in (-0.1, 1, 1.5, 0.99999, float("nan")):
        with pytest.raises(
            ValueError, match=rf"^flash_cute\.dropout_mask: p must be in \[0, 1\).*, got {p}$"
        ):
            flash_cute.dropout_mask(seed, 1, 1, 2, 2, p)
    for p in (0, 1e-4):
        assert flash_cute.dropout_mask(seed, 1, 2, 3, 4, p).all()


def test_compiled(device):
    compiled = torch.compile(flash_cute.dropout_mask, fullgraph=True, backend="aot_eager")
    for seed in ((1, 2), (-3, 2**40)):
        arguments = torch.tensor(seed, device=device), 2, 3, 21, 33, 0.2
        assert torch.equal(compiled(*arguments), flash_cute.dropout_mask(*arguments))


P = 0.4
WIDTH = 128  # of v, whose columns tell the keys, or of dout, whose columns tell the queries, apart


def kept_by(kernel, size: tuple[int, int, int, int], seed, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Which weights of a call are not 0 in its forward, and in its backward: (batch, heads, queries, keys).

    Packed where options have cu_seqlens_q, of sequences of that many queries and keys.
    """
    batch, heads, queries, keys = size
    packed = "cu_seqlens_q" in options
    options |= {"dropout_p": P, "dropout_seed": seed}

    def given(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).flatten(0, 1) if packed else x

    def whole(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (batch, -1)).transpose(1, 2) if packed else x

    def told_apart(rows: int, first: int) -> torch.Tensor:
        """(batch, heads, rows, WIDTH): 1 in row first + d and column d."""
        one = torch.zeros(batch, heads, rows, WIDTH, device=kernel.device).bfloat16()
        count = min(WIDTH, rows - first)
        one[:, :, torch.arange(first, first + count), torch.arange(count)] = 1
        return one

    q, k = (torch.zeros(batch, heads, rows, 64, device=kernel.device).bfloat16() for rows in (queries, keys))
    seen = [
        whole(kernel.forward(given(q), given(k), given(told_apart(keys, first)), **options)[0]) != 0
        for first in range(0, keys, WIDTH)
    ]
    v, by_gradients = torch.ones(batch, heads, keys, WIDTH, device=kernel.device).bfloat16(), []
    for first in range(0, queries, WIDTH):
        dout = given(told_apart(queries, first))
        by_gradients.append(
            whole(kernel.backward(given(q), given(k), given(v), dout, None, **options)[2]) != 0
        )
    return torch.cat(seen, -1)[..., :keys], torch.cat(by_gradients, -1)[..., :queries].mT


def test_pairs_of_kernels(kernel):
    """Dense, causal, padded on either side and packed: the same ones as dropout_mask says."""
    size = 3, 2, 150, 330
    seed = torch.tensor([2**40 + 17, -3], device=kernel.device)
    kept = flash_cute.dropout_mask(seed, *size, P)
    row, key = torch.arange(150, device=kernel.device)[:, None], torch.arange(330, device=kernel.device)
    calls = {
        "dense": ({}, True),
        "causal": ({"causal": True}, key <= row + 180),
        "window": ({"window": (40, 30)}, (key >= row + 140) & (key <= row + 210)),
    }
    for name, (options, seen) in calls.items():
        for found in kept_by(kernel, size, seed, **options):
            assert torch.equal(found, kept & seen), name
    used = [330, 201, 64]
    seen = key < torch.tensor(used, device=kernel.device).view(3, 1, 1, 1)
    for found in kept_by(kernel, size, seed, seqused_k=int32(used, kernel.device)):
        assert torch.equal(found, kept & seen)
    for found in kept_by(kernel, size, seed, leftpad_k=int32([0, 77, 5], kernel.device)):
        assert torch.equal(
            found, kept & (key >= torch.tensor([0, 77, 5], device=kernel.device).view(3, 1, 1, 1))
        )
    offsets = {
        f"cu_seqlens_{side}": int32([n * rows for n in range(4)], kernel.device)
        for side, rows in (("q", 150), ("k", 330))
    }
    for found in kept_by(kernel, size, seed, **offsets):
        assert torch.equal(found, kept)


def test_lse_is_that_without_dropout(kernel):
    q, k, v = make_inputs(Shape(2, 4, 2, 70, 130, 64), torch.bfloat16, kernel.device)
    seed = torch.tensor([1, 2], device=kernel.device)
    _, expected = kernel.forward(q, k, v)
    _, lse = kernel.forward(q, k, v, dropout_p=0.5, dropout_seed=seed)
    torch.testing.assert_close(lse, expected, rtol=1e-5, atol=1e-5)


def test_a_probability_that_is_rounded_to_none(kernel):
    """The same bits as without dropout, and a seed alone is none."""
    q, k, v = make_inputs(Shape(1, 4, 2, 70, 130, 64), torch.bfloat16, kernel.device)
    seed = torch.tensor([1, 2], device=kernel.device)
    expected = kernel.forward(q, k, v, causal=True)
    for options in ({"dropout_p": 1e-4}, {"dropout_p": 1e-4, "dropout_seed": seed}, {"dropout_seed": seed}):
        for result, right in zip(kernel.forward(q, k, v, causal=True, **options), expected, strict=True):
            assert torch.equal(result, right)


def test_the_mean_of_many_seeds_is_attention_without(kernel):
    """Of out and of dv, within 5 standard deviations of their sums."""
    q, k, v = make_inputs(Shape(1, 2, 2, 16, 40, 64), torch.float16, kernel.device)
    if kernel.family == "sm90":
        kernel = replace(kernel, family=None)
    dout, _ = make_gradients(q)
    right = kernel.forward(q, k, v)[0], kernel.backward(q, k, v, dout, None)[2]
    found = []
    for number in range(400):
        options = {"dropout_p": 0.3, "dropout_seed": torch.tensor([9, number], device=kernel.device)}
        out, _ = kernel.forward(q, k, v, **options)
        found.append((out.double(), kernel.backward(q, k, v, dout, None, **options)[2].double()))
    for results, expected in zip(zip(*found, strict=True), right, strict=True):
        results = torch.stack(results)
        error = (results.mean(0) - expected.double()).abs() / (results.std(0) / 20 + 1e-3)
        assert error.max() < 5
