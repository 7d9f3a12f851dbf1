"""Memory that is written is shared with nothing: neither with what is read, nor between its own elements."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flash_cute

SHARED = r"^flash_cute\.\w+: {} is written, so it must not share memory with {}$"


def buffer(device, *shape):
    return torch.randn(*shape, device=device).bfloat16()


def bytes_of(tensor: torch.Tensor) -> list[int]:
    """The places of all elements' bytes, one by one."""
    offsets = itertools.product(*map(range, tensor.shape))
    first, size = tensor.data_ptr(), tensor.element_size()
    places = (
        first + size * sum(i * step for i, step in zip(index, tensor.stride(), strict=True))
        for index in offsets
    )
    return [place + byte for place in places for byte in range(size)]


sizes = st.lists(st.integers(1, 4), min_size=4, max_size=4)
strides = st.one_of(  # any, and those of slices, of which no two elements coincide
    st.lists(st.integers(0, 12), min_size=4, max_size=4),
    *(st.permutations(steps) for steps in ([1, 4, 16, 64], [2, 8, 24, 72], [1, 6, 18, 80])),
)
offsets = st.integers(0, 40)


@given(shape=sizes, of_out=strides, of_q=strides, begin_of_out=offsets, begin_of_q=offsets, odd=st.booleans())
@settings(max_examples=600, deadline=None)
def test_any_strides(shape, of_out, of_q, begin_of_out, begin_of_q, odd):
    """As each byte of each element says."""
    memory = torch.zeros(800, dtype=torch.uint8)
    out, q = (
        torch.frombuffer(memory.numpy(), dtype=torch.bfloat16, offset=begin, count=320).as_strided(
            shape, steps
        )
        for steps, begin in ((of_out, 2 * begin_of_out), (of_q, 2 * begin_of_q + odd))
    )
    k = torch.zeros(shape, dtype=torch.bfloat16)
    places = bytes_of(out)
    expected = None
    if len(set(places)) < len(places):
        expected = "out is written, so its elements must not overlap, got shape "
    elif set(places) & set(bytes_of(q)):
        expected = "out is written, so it must not share memory with q"
    said = None
    try:
        torch.ops.flash_cute._forward_out_cpu(q, k, k, out)
    except RuntimeError as error:
        said = str(error)
    assert (said is None) == (expected is None)
    assert said is None or said.startswith(f"flash_cute: {expected}")


def test_out_that_meets_an_operand(device):
    big, k = buffer(device, 1, 2, 10, 64), buffer(device, 1, 2, 7, 64)
    with pytest.raises(ValueError, match=SHARED.format("out", "q")):
        flash_cute.forward(big[:, :, :5], k, k, out=big[:, :, 3:8])
    flash_cute.forward(big[:, :, :5], k, k, out=big[:, :, 5:])
    kv = buffer(device, 1, 2, 14, 64)
    q = buffer(device, 1, 2, 7, 64)
    for name, kv_of in (("k", {"k": kv[:, :, 7:], "v": k}), ("v", {"k": k, "v": kv[:, :, 7:]})):
        with pytest.raises(ValueError, match=SHARED.format("out", name)):
            flash_cute.forward(q, **kv_of, out=kv[:, :, 1:8])
        flash_cute.forward(q, **kv_of, out=kv[:, :, :7])


def test_out_that_meets_itself(device):
    q = buffer(device, 1, 4, 6, 64)
    windows = buffer(device, 1, 4, 2000).as_strided((1, 4, 6, 64), (8000, 2000, 32, 1))
    with pytest.raises(ValueError, match=r"out is written, so its elements must not overlap, got shape"):
        flash_cute.forward(q, q, q, out=windows)


def test_slots_of_one_buffer(device):
    """Interleaved in whichever order of dimensions, they share nothing."""
    batch, heads, rows, head_dim = 2, 3, 5, 16
    sizes = {"slot": 4, "batch": batch, "heads": heads, "rows": rows}
    for order in itertools.permutations(sizes):
        packed = buffer(device, *(sizes[name] for name in order), head_dim)
        at = [order.index(name) for name in ("slot", "batch", "heads", "rows")]
        q, k, v, out = packed.permute(*at, 4)
        expected = flash_cute.attention(q, k, v)
        flash_cute.forward(q, k, v, out=out)
        assert torch.equal(out, expected)
    columns = buffer(device, batch, rows, heads, 4 * head_dim).transpose(1, 2)
    q, k, v, out = columns.chunk(4, dim=-1)
    flash_cute.forward(q, k, v, out=out)
    of_groups = buffer(device, batch, rows, heads * 4, head_dim).transpose(1, 2)  # q, q, k, v of each group
    q, out, k, v = (of_groups[:, i::4] for i in range(4))
    flash_cute.forward(q, k, v, out=out)
    every_other = buffer(device, batch, heads, 2 * rows, head_dim)
    flash_cute.forward(every_other[:, :, ::2], k, v, out=every_other[:, :, 1::2])


def caches(device, layout):
    """K and V of 4 pages, of 2 heads and 8 rows of 16 columns each, in one buffer."""
    shape, of_k, of_v = {
        "slots of a page": ((4, 2, 2, 8, 16), lambda x: x[:, 0], lambda x: x[:, 1]),
        "slots of a row": ((4, 2, 8, 2, 16), lambda x: x[:, :, :, 0], lambda x: x[:, :, :, 1]),
        "one after the other": ((2, 4, 2, 8, 16), lambda x: x[0], lambda x: x[1]),
        "heads side by side": (
            (4, 8, 4, 16),
            lambda x: x[:, :, :2].transpose(1, 2),
            lambda x: x[:, :, 2:].transpose(1, 2),
        ),
        "columns": ((4, 2, 8, 32), lambda x: x[..., :16], lambda x: x[..., 16:]),
        "pages by turns": ((8, 2, 8, 16), lambda x: x[::2], lambda x: x[1::2]),
        "rows by turns": ((4, 2, 16, 16), lambda x: x[:, :, ::2], lambda x: x[:, :, 1::2]),
    }[layout]
    both = buffer(device, *shape)
    return of_k(both), of_v(both)


LAYOUTS = [
    *("slots of a page", "slots of a row", "one after the other", "heads side by side"),
    *("columns", "pages by turns", "rows by turns"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_caches_in_one_buffer(device, layout):
    k_cache, v_cache = caches(device, layout)
    k, v = (buffer(device, 4, 2, 3, 16) for _ in "kv")
    flash_cute.append_kv(k, v, k_cache, v_cache)
    assert torch.equal(k_cache[:, :, :3], k)
    assert torch.equal(v_cache[:, :, :3], v)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["k_cache", "v_cache"])
@pytest.mark.parametrize("name", ["k", "v", "q"])
def test_rows_that_lie_in_a_cache(device, layout, which, name):
    """Whose own rows lie there, at other places than those that are written."""
    k_cache, v_cache = caches(device, layout)
    cache = {"k_cache": k_cache, "v_cache": v_cache}[which]
    before = cache.clone()
    given = {"k": buffer(device, 4, 2, 3, 16), "v": buffer(device, 4, 2, 3, 16)}
    given |= {"q": buffer(device, 4, 2, 3, 16), name: cache[:, :, 5:]}
    angles = torch.ones(8, 8, device=device)
    with pytest.raises(ValueError, match=SHARED.format(which, name)):
        flash_cute.append_kv(**given, k_cache=k_cache, v_cache=v_cache, rotary_cos=angles, rotary_sin=angles)
    assert torch.equal(cache, before)


def test_caches_that_meet(device):
    both, k = buffer(device, 2, 2, 20, 16), buffer(device, 2, 2, 3, 16)
    with pytest.raises(ValueError, match=SHARED.format("v_cache", "k_cache")):
        flash_cute.append_kv(k, k, both[:, :, :11], both[:, :, 9:])
    flash_cute.append_kv(k, k, both[:, :, :10], both[:, :, 10:])
    windows = buffer(device, 500).as_strided((2, 2, 5, 16), (160, 40, 8, 1))
    with pytest.raises(ValueError, match="v_cache is written, so its elements must not overlap, got shape"):
        flash_cute.append_kv(k, k, both[:, :, :5], windows)


def test_pages_of_another_layer(device):
    """A pool of pages of all layers, of which each layer has every other one, and new rows of such a pool."""
    pool = buffer(device, 6, 2, 2, 8, 16)  # pages, layers
    new = buffer(device, 6, 3, 2, 16).transpose(1, 2)
    for layer in range(2):
        other = 1 - layer
        flash_cute.append_kv(new, pool[:, other, :, :3], pool[:, layer], buffer(device, 6, 2, 8, 16))
        assert torch.equal(pool[:, layer, :, :3], new)


@pytest.mark.parametrize("by", ["table", "slots"])
def test_pages_of_one_pool_that_are_shifted(device, by):
    """As transformers has them: page p of V is page p + 1 of K, and only every other one is used."""
    pool, new = buffer(device, 9, 2, 8, 16), buffer(device, 3, 2, 16)
    k_pages, v_pages = pool[:8], pool[1:]
    if by == "table":
        places = {"block_table": torch.tensor([[4, 2]], dtype=torch.int32, device=device)}
        places |= {"cu_seqlens": torch.tensor([0, 3], dtype=torch.int32, device=device)}
    else:
        places = {"slots": torch.tensor([32, 33, 34], device=device)}
    flash_cute.append_kv(new, new + 1, k_pages, v_pages, **places)
    assert torch.equal(pool[4, :, :3], new.transpose(0, 1))
    assert torch.equal(pool[5, :, :3], (new + 1).transpose(0, 1))
    with pytest.raises(ValueError, match=SHARED.format("v_cache", "k_cache")):
        flash_cute.append_kv(new, new, pool, pool, **places)


def test_lazy_clones(device):
    """They share memory until one of them is written."""
    q, k = buffer(device, 1, 2, 5, 16), buffer(device, 1, 2, 7, 16)
    before, out = q.clone(), torch._lazy_clone(q)
    flash_cute.forward(q, k, k, out=out)
    assert torch.equal(q, before)
    assert torch.equal(out, flash_cute.attention(q, k, k))


def test_strides_that_no_slicing_makes(device):
    """60047 is the sum of the other two and of 5 times 3."""
    q = torch.zeros(64, 64, 64, 8, device=device).bfloat16()
    out = buffer(device, 9_000_000).as_strided(q.shape, (20011, 40021, 60047, 3))
    with pytest.raises(ValueError, match="out is written, so its elements must not overlap"):
        flash_cute.forward(q, q, q, out=out)
