"""flash_attn's bert_padding and layers.rotary, compared with loops over rows."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from support.appends import turned_row

from flash_cute.compat import bert_padding
from flash_cute.compat.rotary import RotaryEmbedding, apply_rotary_emb

MASK = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]])
UNUSED = torch.tensor([[0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64])
@pytest.mark.parametrize("unused", [None, UNUSED], ids=["", "unused"])
def test_padding(unused, dtype):
    mask = MASK.to(dtype)
    unused = unused if unused is None else unused.to(dtype)
    kept = MASK if unused is None else MASK + UNUSED
    x = torch.randn(3, 4, 2, 5, requires_grad=True)
    packed, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, mask, unused)
    rows = [(b, i) for b in range(3) for i in range(4) if kept[b, i]]
    assert torch.equal(packed, torch.stack([x[row] for row in rows]))
    assert indices.tolist() == [4 * b + i for b, i in rows]
    assert (cu_seqlens.dtype, used.dtype) == (torch.int32, torch.int32)
    assert cu_seqlens.tolist() == [0, *kept.sum(1).cumsum(0).tolist()]
    assert (type(longest), longest) == (int, 4)
    assert used.tolist() == MASK.sum(1).tolist()

    padded = bert_padding.pad_input(packed, indices, 3, 4)
    assert torch.equal(padded, x * kept[..., None, None])
    (padded * 3).sum().backward()
    assert torch.equal(x.grad, 3.0 * kept[..., None, None].expand(x.shape))


def test_padding_of_no_tokens():
    packed, indices, cu_seqlens, longest, used = bert_padding.unpad_input(torch.ones(2, 3, 4), MASK[1:2, :3])
    assert packed.shape == (0, 4)
    assert (len(indices), cu_seqlens.tolist(), longest, used.tolist()) == (0, [0, 0], 0, [0])
    assert bert_padding.pad_input(packed, indices, 2, 3).tolist() == torch.zeros(2, 3, 4).tolist()
    assert bert_padding.unpad_input(torch.ones(0, 3, 4), MASK[:0, :3])[3] == 0


def test_rows_of_the_first_axis():
    x = torch.randn(7, 3, 2)
    indices = torch.tensor([4, 0, 4])
    assert torch.equal(bert_padding.index_first_axis(x, indices), x[[4, 0, 4]])
    whole = bert_padding.index_put_first_axis(x[:2], indices[:2], 6)
    assert torch.equal(whole[[4, 0]], x[:2])
    assert not whole[[1, 2, 3, 5]].any()


def test_names_of_einops(monkeypatch):
    monkeypatch.setitem(sys.modules, "einops", SimpleNamespace(rearrange="found"))
    assert bert_padding.rearrange == "found"
    with pytest.raises(AttributeError, match="no attribute 'more'"):
        bert_padding.more  # noqa: B018


def table(rows=20, columns=12):
    angles = torch.rand(rows, columns // 2) * 6
    return angles.cos(), angles.sin()


def turned(x, first, cos, sin, interleaved):
    """A sequence, (rows, heads, head_dim), in float64; rows outside of the table stay."""
    rows = [
        turned_row(row, cos[first + i], sin[first + i], interleaved)
        if 0 <= first + i < len(cos)
        else row.double()
        for i, row in enumerate(x)
    ]
    return torch.stack(rows) if rows else x.double()


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, 3, (5, 0), (18, -2)], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_rotation(packed, offsets, interleaved, inplace):
    cos, sin = table()
    x = torch.randn(2, 7, 3, 16)
    starts = offsets if isinstance(offsets, tuple) else (offsets, offsets)
    given = torch.tensor(offsets, dtype=torch.int32) if isinstance(offsets, tuple) else offsets
    options = {"interleaved": interleaved, "inplace": inplace, "seqlen_offsets": given}
    sequences = list(x)
    if packed:
        x = x.flatten(0, 1)
        sequences = x[:5], x[5:]
        options |= {"cu_seqlens": torch.tensor([0, 5, 14], dtype=torch.int32), "max_seqlen": 9}
    expected = [
        turned(own, first, cos, sin, interleaved) for own, first in zip(sequences, starts, strict=True)
    ]
    expected = torch.cat(expected) if packed else torch.stack(expected)
    before = x.clone()
    found = apply_rotary_emb(x, cos, sin, **options)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)
    assert (found is x) == inplace
    assert inplace or torch.equal(x, before)


def test_rotation_is_computed_in_float32_and_differentiable():
    cos, sin = table()
    x = torch.randn(2, 7, 3, 16).bfloat16().requires_grad_()
    found = apply_rotary_emb(x, cos, sin)
    exact = torch.stack([turned(own, 0, cos, sin, False) for own in x.detach().float()])
    assert torch.equal(found, exact.float().bfloat16())
    weights = torch.randn(found.shape).bfloat16()
    found.backward(weights)
    assert torch.equal(x.grad, apply_rotary_emb(weights, cos, -sin))  # a rotation's transpose turns back


@pytest.mark.parametrize(
    ("x", "cos", "offset", "sentence"),
    [
        ((2, 7, 16), (20, 6), 0, "x must have shape (batch, seqlen, heads, head_dim), got (2, 7, 16)"),
        (
            (2, 7, 3, 8),
            (20, 6),
            0,
            "cos and sin must have shape (positions, rotary_dim / 2), rotary_dim up to 8",
        ),
        ((2, 7, 3, 16), (20, 6), 14, "cos must have a row for each position, 14 to 20, got 20 rows"),
        ((2, 7, 3, 16), (20, 6), -1, "cos must have a row for each position, -1 to 5, got 20 rows"),
        (
            (2, 7, 3, 16),
            (20, 6),
            torch.zeros(3).int(),
            "seqlen_offsets must hold integers of shape (2,), got",
        ),
        (
            (2, 7, 3, 16),
            (20, 6),
            torch.zeros(0).int(),
            "seqlen_offsets must hold integers of shape (2,), got",
        ),
        ((2, 7, 3, 16), (20, 6), torch.zeros(2), "seqlen_offsets must hold integers of shape (2,), got"),
    ],
)
def test_wrong_rotations(x, cos, offset, sentence):
    cos = torch.ones(cos)
    with pytest.raises(ValueError, match="flash_cute") as caught:
        apply_rotary_emb(torch.ones(x), cos, cos, seqlen_offsets=offset)
    assert str(caught.value).startswith(f"flash_cute.compat: {sentence}")


@pytest.mark.parametrize("form", ["qkv", "q and kv", "grouped"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offset", [0, 4, (4, 1)], ids=str)
def test_rotary_embedding(form, interleaved, offset):
    """In place, of queries and keys alone, also of those that a layer has made."""
    module = RotaryEmbedding(12, base=100.0, interleaved=interleaved)
    assert not module.state_dict()
    weight = torch.ones((), requires_grad=True)
    q, k, v = torch.randn(2, 7, 4, 16), torch.randn(2, 7, 2, 16), torch.randn(2, 7, 2, 16)
    q = q[:, :, :2] if form == "qkv" else q
    angles = torch.outer(torch.arange(20.0), 100.0 ** (-torch.arange(0, 12, 2) / 12))
    starts = offset if isinstance(offset, tuple) else (offset, offset)
    expected = [
        torch.stack(
            [
                turned(own, first, angles.cos(), angles.sin(), interleaved)
                for own, first in zip(x, starts, strict=True)
            ]
        )
        for x in (q, k)
    ]
    options = {"seqlen_offset": offset}
    if isinstance(offset, tuple):
        options = {"seqlen_offset": torch.tensor(offset, dtype=torch.int32), "max_seqlen": 11}
    if form == "qkv":
        given = torch.stack([q, k, v], 2) * weight
        found = module(given, **options)
        parts = found.unbind(2)
    elif form == "grouped":
        given = torch.cat([q, k, v], 2) * weight
        found = module(given, num_heads_q=4, **options)
        parts = found.split([4, 2, 2], 2)
    else:
        given = q * weight
        found, kv = module(given, torch.stack([k, v], 2) * weight, **options)
        parts = found, *kv.unbind(2)
    assert found is given
    for part, wanted in zip(parts, (*expected, v.double()), strict=True):
        torch.testing.assert_close(part.double(), wanted, rtol=0, atol=1e-5)
    parts[0].sum().backward()
    assert weight.grad.isfinite()


def test_a_rotary_embedding_grows_its_table():
    module = RotaryEmbedding(8)
    one = module(torch.ones(1, 3, 3, 2, 8))
    other = module(torch.ones(1, 9, 3, 2, 8))
    assert torch.equal(one, other[:, :3])
    assert module._cos_cached.shape == (9, 4)
    assert module(torch.ones(1, 3, 3, 2, 8).bfloat16()).dtype == torch.bfloat16
    assert math.isclose(module.inv_freq[-1].item(), 10000 ** (-6 / 8), rel_tol=1e-6)


def test_frequencies_of_a_rotary_embedding():
    """Those of inv_freq, which a model may have scaled, but where a cast to 16 bits has rounded them."""
    module = RotaryEmbedding(8, 10000.0, False, None, "cpu")
    module.inv_freq /= 4
    module(torch.ones(1, 5, 3, 2, 8))
    angles = torch.outer(torch.arange(5.0), module.inv_freq)
    torch.testing.assert_close(module._cos_cached, angles.cos())
    cast = RotaryEmbedding(8).bfloat16()
    cast(torch.ones(1, 5, 3, 2, 8))
    torch.testing.assert_close(cast._cos_cached, (4 * angles).cos())


def test_what_a_rotary_embedding_has_not():
    with pytest.raises(
        TypeError, match=r"^flash_cute\.compat: x is of type list; a torch\.Tensor is accepted$"
    ):
        apply_rotary_emb([1.0], *table())
    with pytest.raises(
        NotImplementedError, match=r"^flash_cute\.compat: scale_base is 512; None is accepted$"
    ):
        RotaryEmbedding(8, scale_base=512)
    with pytest.raises(
        ValueError, match=r"^flash_cute\.compat: qkv must have shape .* or with num_heads_q .* got"
    ):
        RotaryEmbedding(8)(torch.ones(1, 3, 6, 8))
    for shape, heads in (((1, 3, 2, 6, 8), None), ((1, 3, 7, 8), 2), ((1, 3, 7, 8), 9)):
        with pytest.raises(ValueError, match=r"^flash_cute\.compat: qkv must have shape"):
            RotaryEmbedding(8)(torch.ones(shape), num_heads_q=heads)
    with pytest.raises(ValueError, match=r"^flash_cute\.compat: cu_seqlens must hold integers of shape"):
        apply_rotary_emb(torch.ones(5, 3, 16), *table(), cu_seqlens=torch.tensor([0.0, 5.0]))
