"""append_kv: where new rows go, how they and their queries are rotated, and what is refused."""

from __future__ import annotations

import gc

import pytest
import torch
from support.appends import (
    HEADS,
    LAYOUTS,
    NEW_ROWS,
    PLACES,
    ROTARIES,
    WIDTHS,
    assert_appended,
    make_append,
    make_cache,
    pairs,
    without_pages,
)
from support.cases import ALL_DTYPES

import flash_cute


@pairs(
    place=PLACES,
    rotary=ROTARIES,
    layout=LAYOUTS,
    dtype=ALL_DTYPES,
    head_dim=[16, 64, 72, 128, 256],
    heads=HEADS,
    rows=NEW_ROWS,
)
def test_rows(device, place, rotary, layout, dtype, head_dim, heads, rows):
    call = make_append(device, place, rotary, layout, dtype, head_dim, heads, rows)
    assert_appended(call, flash_cute.append_kv(**call.arguments))


@pairs(
    place=PLACES, rotary=ROTARIES[1:], page_size=[1, 5, 64], wide_table=[False, True], positions=[False, True]
)
def test_rotary(device, place, rotary, page_size, wide_table, positions):
    call = make_append(
        device, place, rotary, page_size=page_size, wide_table=wide_table, positions=positions, head_dim=32
    )
    assert_appended(call, flash_cute.append_kv(**call.arguments))


@pairs(place=PLACES, rotary=ROTARIES, layout=LAYOUTS, dtype=ALL_DTYPES, widths=WIDTHS)
def test_two_widths(device, place, rotary, layout, dtype, widths):
    call = make_append(device, place, rotary, layout, dtype, widths[0], head_dim_v=widths[1])
    assert_appended(call, flash_cute.append_kv(**call.arguments))


@pairs(
    place=PLACES,
    rotary=ROTARIES,
    layout=LAYOUTS,
    dtype=ALL_DTYPES,
    head_dim=[16, 64, 80, 128, 256],
    heads=HEADS,
    rows=NEW_ROWS,
    scale=["none", "one", "of heads", "of sequences and heads"],
    stored=[torch.float8_e4m3fn, torch.uint8],
)
def test_rows_of_codes(device, place, rotary, layout, dtype, head_dim, heads, rows, scale, stored):
    if place == "slots" and scale == "of sequences and heads":
        scale = "of heads"
    call = make_append(
        device, place, rotary, layout, dtype, head_dim, heads, rows, scale=scale, stored=stored
    )
    assert_appended(call, flash_cute.append_kv(**call.arguments))


def test_codes_are_cut_and_rounded_to_even(device):
    """What is larger than the largest code becomes that one, and NaN stays NaN."""
    nan, inf = torch.nan, torch.inf
    numbers = torch.tensor(
        [0, 448, 463, 465, 1e6, inf, -inf, nan, 17, 19, -17, 2**-9, 2**-10, 3 * 2**-10, 1, -1]
    )
    codes = torch.tensor([0, 448, 448, 448, 448, 448, -448, nan, 16, 20, -16, 2**-9, 0, 2**-8, 1, -1])
    k = numbers.to(device).view(1, 1, 1, 16)
    cache = torch.zeros(2, 1, 1, 4, 16, device=device).to(torch.float8_e4m3fn)
    flash_cute.append_kv(k, 0.25 * k, *cache, v_scale=torch.tensor(0.25, device=device))
    for found in cache.float().cpu()[:, 0, 0]:
        torch.testing.assert_close(found[0], codes, equal_nan=True, rtol=0, atol=0)
        assert (found[1:] == 0).all()


@pytest.mark.parametrize("transposed", ["k", "v", "q"])
def test_rows_of_any_layout(device, transposed):
    """New rows and queries may have any strides; the rotated q has those of torch.empty_like."""
    call = make_append(device, "padded", "halves")
    x = call.arguments[transposed]
    call.arguments[transposed] = (
        x.mT.contiguous().mT if transposed != "q" else x.transpose(1, 2).clone().mT.mT.transpose(1, 2)
    )
    assert_appended(call, flash_cute.append_kv(**call.arguments))


@pytest.mark.parametrize("place", ["padded", "packed"])
def test_rows_without_lengths(device, place):
    """Without cache_seqlens the cache is empty."""
    call = make_append(device, place, "halves")
    call.arguments["cache_seqlens"] = torch.zeros_like(call.arguments["cache_seqlens"])
    assert_appended(call, flash_cute.append_kv(**call.arguments))
    written = call.arguments["k_cache"].clone()
    call.arguments["k_cache"].copy_(call.before[0])
    flash_cute.append_kv(**{name: x for name, x in call.arguments.items() if name != "cache_seqlens"})
    assert torch.equal(call.arguments["k_cache"], written)


@pytest.mark.parametrize("place", PLACES)
def test_lengths_that_make_no_sense(device, place):
    """Negative and huge lengths, slots and pages write nothing."""
    call = make_append(device, place, "halves")
    if place == "slots":
        extreme = torch.tensor([-(2**62), 2**62, -1, call.before[0].shape[0] * call.before[0].shape[2]])
        slots = call.arguments["slots"]
        slots.copy_(extreme.repeat(len(slots))[: len(slots)])
    else:
        lengths = torch.tensor([-(2**31), 2**31 - 1, -40, 2**30, -5], dtype=torch.int32)
        call.arguments["cache_seqlens"].copy_(lengths)
    flash_cute.append_kv(**call.arguments)
    assert torch.equal(call.arguments["k_cache"], call.before[0])
    assert torch.equal(call.arguments["v_cache"], call.before[1])
    if place.endswith("pages"):
        call.arguments["cache_seqlens"].zero_()
        call.arguments["block_table"].copy_(torch.tensor([-(2**31), 2**31 - 1, 99, -1]))
        flash_cute.append_kv(**call.arguments)
        assert torch.equal(call.arguments["k_cache"], call.before[0])


@pytest.mark.parametrize("place", ["padded in pages", "packed in pages"])
def test_sequences_without_pages(device, place, monkeypatch):
    """Their rows are not written over another's, which is no error where they say so."""
    call = without_pages(make_append(device, place, "halves", rows=40))
    assert_appended(call, flash_cute.append_kv(**call.arguments))
    monkeypatch.setattr(flash_cute.lengths, "CHECKED", True)
    call.arguments["block_table"].fill_(-1)
    call.arguments["cache_seqlens"].zero_()
    call.before = tuple(call.arguments[name].clone() for name in ("k_cache", "v_cache"))
    assert_appended(call, flash_cute.append_kv(**call.arguments))


@pytest.mark.parametrize("place", PLACES)
def test_nothing_to_append(device, place):
    """No rows, no sequences, no slots, a cache without room."""
    call = make_append(device, place)
    k, v = call.arguments["k"], call.arguments["v"]
    rows = 0 if k.dim() == 3 else 2
    none = {"k": k.narrow(rows, 0, 0), "v": v.narrow(rows, 0, 0)}
    if place == "slots":
        none["slots"] = call.arguments["slots"][:0]
        flash_cute.append_kv(**call.arguments | {"slots": none["slots"]})
    assert flash_cute.append_kv(**call.arguments | none) is None
    if place in ("padded", "packed"):
        without_room = {name: call.arguments[name][:, :, :0] for name in ("k_cache", "v_cache")}
        flash_cute.append_kv(**call.arguments | without_room | (none if place == "padded" else {}))
        of_none = {name: x[:0] for name, x in call.arguments.items() if x.dim() > 1 and name not in "kv"}
        of_none["cache_seqlens"] = call.arguments["cache_seqlens"][:0]
        rows = (
            {"cu_seqlens": call.arguments["cu_seqlens"][:1]}
            if place == "packed"
            else {"k": k[:0], "v": v[:0]}
        )
        flash_cute.append_kv(**call.arguments | of_none | rows)
    assert torch.equal(call.arguments["k_cache"], call.before[0])
    assert torch.equal(call.arguments["v_cache"], call.before[1])


def test_then_attention(kernel):
    """A prompt in chunks, then single rows, through pages, as all of it at once."""
    torch.manual_seed(0)
    device, batch, total, page_size = kernel.device, 3, 70, 16
    q, k, v = (torch.randn(batch, heads, total, 64, device=device).bfloat16() for heads in (4, 2, 2))
    caches = [torch.full((20, 2, page_size, 64), torch.nan, device=device).bfloat16() for _ in range(2)]
    table = torch.randperm(20)[:15].view(batch, 5).int().to(device)
    used = torch.zeros(batch, dtype=torch.int32, device=device)
    whole, lse = kernel.forward(q, k, v, causal=True)
    begin = 0
    for count in (33, 16, 1, 1, 19):
        rows = slice(begin, begin + count)
        flash_cute.append_kv(k[:, :, rows], v[:, :, rows], *caches, used, block_table=table)
        used += count
        part = kernel.forward(q[:, :, rows], *caches, causal=True, seqused_k=used, block_table=table)
        torch.testing.assert_close(part[0], whole[:, :, rows], atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(part[1], lse[:, :, rows], atol=1e-3, rtol=1e-3)
        begin += count


def changed(**changes):
    """Arguments of a padded call with one that is wrong; a change is a function of the argument."""
    return lambda given: (
        given
        | {name: change(given.get(name)) if callable(change) else change for name, change in changes.items()}
    )


INT = torch.int32
WRONG = {
    "k of three dimensions": (
        "padded",
        changed(k=lambda k: k[0]),
        "k has 3 dimensions; 4, (batch, heads, rows,",
    ),
    "packed rows of four": ("packed", changed(k=lambda k: k[None]), "k has 4 dimensions; 3, (total, heads,"),
    "v of another shape": (
        "padded",
        changed(v=lambda v: v[:, :, 1:]),
        "v has shape (5, 2, 4, 64) and k (5, 2, 5, 64); they must be the same but for the last dimension",
    ),
    "v of three dimensions": (
        "padded",
        changed(v=lambda v: v[0]),
        "v has shape (2, 5, 64) and k (5, 2, 5, 64); they must be the same but for the last dimension",
    ),
    "v of another width than its cache": (
        "padded",
        changed(v=lambda v: v[..., :32]),
        "v_cache has head_dim 64 and v 32; they must be the same",
    ),
    "v of a head_dim of 60": (
        "padded",
        changed(**dict.fromkeys(("v", "v_cache"), lambda x: x[..., :60])),
        "head_dim of a cache must be a multiple of 8, got 60",
    ),
    "columns of k_cache as v_cache": (
        "padded",
        lambda given: given | {"v": given["v"][..., :32].clone(), "v_cache": given["k_cache"][..., :32]},
        "share memory with k_cache",
    ),
    "v of another dtype": (
        "padded",
        changed(v=lambda v: v.half()),
        "v has dtype torch.float16 and k torch.bfloat16",
    ),
    "integers": (
        "padded",
        changed(k=lambda k: k.int()),
        "k has dtype torch.int32; torch.float16, torch.bfloat16 and",
    ),
    "a cache of another dtype": (
        "padded",
        changed(v_cache=lambda c: c.float()),
        "v_cache has dtype torch.float32",
    ),
    "a cache of other heads": (
        "padded",
        changed(k_cache=lambda c: c[:, :1], v_cache=lambda c: c[:, :1]),
        "k_cache has 1 heads and k 2",
    ),
    "a cache of another head_dim": (
        "padded",
        changed(k_cache=lambda c: c[..., :32], v_cache=lambda c: c[..., :32]),
        "k_cache has head_dim 32 and k 64",
    ),
    "a cache of another batch": (
        "padded",
        changed(k_cache=lambda c: c[:3], v_cache=lambda c: c[:3]),
        "k_cache has batch 3 and k 5",
    ),
    "more rows than a cache": (
        "padded",
        lambda given: (
            given
            | {"k": given["k_cache"], "v": given["v_cache"], "k_cache": given["k"], "v_cache": given["v"]}
        ),
        "k must have at most as many rows as k_cache, which is 5, got 64",
    ),
    "more rows than pages": (
        "padded in pages",
        changed(block_table=lambda x: x[:, :1], **dict.fromkeys("kv", lambda x: x.repeat(1, 1, 4, 1))),
        "k must have at most as many rows as a sequence's pages, which is 16, got 20",
    ),
    "caches that differ": ("padded", changed(v_cache=lambda c: c[:, :, 1:]), "v_cache has shape"),
    "a head_dim of 60": (
        "padded",
        changed(**dict.fromkeys(("k", "v", "k_cache", "v_cache"), lambda x: x[..., :60])),
        "head_dim of a cache must be a multiple of 8, got 60",
    ),
    "a cache of odd strides": (
        "padded",
        changed(k_cache=lambda c: c.mT.contiguous().mT),
        "k_cache is a cache, which is not copied; its last dimension must have stride 1",
    ),
    "an expanded cache": (
        "padded",
        changed(v_cache=lambda c: c[:1].expand(5, -1, -1, -1)),
        "v_cache is written, so its elements must not overlap, got shape (5, 2, 64, 64) with strides (0,",
    ),
    "lengths of int64": (
        "padded",
        changed(cache_seqlens=lambda x: x.long()),
        "cache_seqlens has dtype torch.int64",
    ),
    "too few lengths": (
        "padded",
        changed(cache_seqlens=lambda x: x[:2]),
        "cache_seqlens has shape (2,); (5,)",
    ),
    "a table of another batch": (
        "padded in pages",
        changed(block_table=lambda x: x[:2]),
        "block_table must have shape (batch, max_pages), where the batch is 5, got (2, 4)",
    ),
    "slots beside lengths": (
        "padded",
        changed(slots=torch.zeros(1).long()),
        "cache_seqlens must be None with slots",
    ),
    "slots of int32": ("slots", changed(slots=lambda x: x.int()), "slots has dtype torch.int32; torch.int64"),
    "more slots than rows": (
        "slots",
        changed(slots=lambda x: x.repeat(9)),
        "no more entries than rows are accepted",
    ),
    "offsets of two dimensions": (
        "packed",
        changed(cu_seqlens=lambda x: x[None]),
        "cu_seqlens has shape (1, 6)",
    ),
    "no page": (
        "slots",
        changed(k_cache=lambda c: c[:0], v_cache=lambda c: c[:0]),
        "k_cache must have at least one page",
    ),
}
WRONG_ROTARY = {
    "sin alone": (changed(rotary_cos=None, q=None), "rotary_cos is None and the other of the two is not"),
    "q without a table": (changed(rotary_cos=None, rotary_sin=None), "q is given without rotary_cos"),
    "another dtype": (
        changed(rotary_cos=lambda x: x.half()),
        "rotary_cos has dtype torch.float16; that of k,",
    ),
    "sin of another dtype": (changed(rotary_sin=lambda x: x.float()), "rotary_sin has dtype torch.float32"),
    "sin of another shape": (changed(rotary_sin=lambda x: x[1:]), "rotary_sin has shape"),
    "too many columns": (
        changed(rotary_cos=lambda x: x.repeat(1, 2), rotary_sin=lambda x: x.repeat(1, 2)),
        "rotary_cos has 64 columns; a multiple of 8, and at most half of head_dim, which is 64,",
    ),
    "12 columns": (
        changed(rotary_cos=lambda x: x[:, :12], rotary_sin=lambda x: x[:, :12]),
        "rotary_cos has 12 columns",
    ),
    "no position": (
        changed(rotary_cos=lambda x: x[:0], rotary_sin=lambda x: x[:0]),
        "with one position at least",
    ),
    "q of another batch": (changed(q=lambda q: q[:2]), "q has batch 2 and k 5"),
    "q of another head_dim": (changed(q=lambda q: q[..., :32]), "q has head_dim 32 and k 64"),
    "positions of int32": (
        changed(positions=torch.zeros(5, 5, dtype=INT), q=lambda q: q[:, :, :1].expand(-1, -1, 5, -1)),
        "positions has dtype torch.int32; torch.int64",
    ),
    "too few positions": (
        changed(positions=torch.zeros(5, 4).long(), q=lambda q: q[:, :, :1].expand(-1, -1, 5, -1)),
        "positions has shape (5, 4); (5, 5), one for each row of k, is accepted",
    ),
    "rows of q beside positions": (
        changed(positions=torch.zeros(5, 5).long(), q=lambda q: q[:, :, :1]),
        "q has 1 rows and k 5; they must be the same where positions are given",
    ),
}
WRONG_CODES = {
    "v_cache of another type": (
        lambda t: t | {"k_cache": t["k_cache"].to(torch.float8_e4m3fn)},
        "v_cache has dtype torch.bfloat16 and k_cache torch.float8_e4m3fn; they must be the same",
    ),
    "a scale of a cache of 16 bits": (
        lambda t: t | {"v_scale": torch.ones(())},
        "v_scale must be None where k_cache has dtype torch.bfloat16, got a tensor",
    ),
    "a scale of another type": (
        lambda t: {**t, **codes(t), "k_scale": torch.ones(2).double()},
        "k_scale has dtype torch.float64; torch.float32 is accepted",
    ),
    "scales of other heads": (
        lambda t: {**t, **codes(t), "k_scale": torch.ones(5, 3)},
        "k_scale must have shape (), (heads_kv,) or (batch, heads_kv), here (), (2,) or (5, 2), got (5, 3)",
    ),
    "a head_dim of 8": (
        lambda t: {name: x[..., :8] for name, x in (t | codes(t)).items() if name[:1] in "kv"},
        "head_dim must be a multiple of 16 where k_cache has dtype torch.float8_e4m3fn, got 8",
    ),
}
WRONG_SLOTS = {
    "scales of sequences with slots": (
        lambda t: {**t, **codes(t), "k_scale": torch.ones(5, 2)},
        "k_scale must have shape () or (heads_kv,) with slots, got (5, 2)",
    ),
}


def codes(given: dict) -> dict[str, torch.Tensor]:
    return {name: given[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}


CALLS = {name: (place, "none", change, words) for name, (place, change, words) in WRONG.items()}
CALLS |= {name: ("padded", "halves", *rest) for name, rest in WRONG_ROTARY.items()}
CALLS |= {name: ("padded", "none", *rest) for name, rest in WRONG_CODES.items()}
CALLS |= {name: ("slots", "none", *rest) for name, rest in WRONG_SLOTS.items()}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("traced", [False, True], ids=["run", "traced"])
def test_wrong_calls(device, name, traced):
    """One sentence, nothing is written, and the next call is as good as ever."""
    place, rotary, change, words = CALLS[name]
    call = make_append(device, place, rotary)
    arguments = change(call.arguments)
    arguments = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
    if traced:
        if "stride" in words or "memory" in words:
            pytest.skip("strides and memory are not traced")
        with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
            arguments = {
                n: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for n, x in arguments.items()
            }
            with pytest.raises(ValueError, match="flash_cute") as error:
                flash_cute.append_kv(**arguments)
    else:
        with pytest.raises(ValueError, match=r"^flash_cute\.append_kv: ") as error:
            flash_cute.append_kv(**arguments)
    assert words in str(error.value), str(error.value)
    assert torch.equal(call.arguments["k_cache"], call.before[0])
    assert_appended(call, flash_cute.append_kv(**call.arguments))


def test_other_kinds_of_tensors(device):
    """One sentence for what torch itself would refuse, and nothing is counted as written."""
    call = make_append(device, rotary="halves")
    given, version = call.arguments, call.arguments["k_cache"]._version
    offsets = torch.tensor([0, 3, 5])
    wrong = {
        "k": (given["k"].to_sparse(), "k is of layout torch.sparse_coo; dense tensors are accepted"),
        "cache_seqlens": (
            torch.nested.nested_tensor_from_jagged(torch.ones(5), offsets),
            "cache_seqlens is nested",
        ),
        "rotary_cos": (
            given["rotary_cos"].to(torch.float8_e8m0fnu),
            "rotary_cos has dtype torch.float8_e8m0fnu; torch",
        ),
        "v_cache": (torch._neg_view(given["v_cache"]), "v_cache is a view that negates; call resolve_neg()"),
        "q": (given["q"].to("meta"), "q is on device meta"),
        "v": (given["v"][:1], "v has shape"),
    }
    for name, (tensor, sentence) in wrong.items():
        with pytest.raises((ValueError, NotImplementedError), match=r"^flash_cute\.append_kv: ") as error:
            flash_cute.append_kv(**given | {name: tensor})
        assert sentence in str(error.value)
    with pytest.raises(ValueError, match="v_cache is written, so it must not share memory with k_cache"):
        flash_cute.append_kv(**given | {"v_cache": given["k_cache"]})
    assert given["k_cache"]._version == version
    assert_appended(call, flash_cute.append_kv(**given))


def test_other_types(device):
    call = make_append(device)
    for name, value in (("k", 3), ("cache_seqlens", [1, 2]), ("q", "x")):
        with pytest.raises(
            TypeError, match=rf"^flash_cute\.append_kv: {name} is of type .*; a torch\.Tensor is"
        ):
            flash_cute.append_kv(**call.arguments | {name: value})
    with pytest.raises(TypeError, match="rotary_interleaved is 1; True or False is accepted"):
        flash_cute.append_kv(**call.arguments, rotary_interleaved=1)
    with pytest.raises(TypeError):
        flash_cute.append_kv(**call.arguments, cache_lens=1)


@pytest.mark.parametrize("name", ["k", "v_cache", "q"])
def test_gradients_are_refused(device, name):
    call = make_append(device, rotary="halves")
    call.arguments[name].requires_grad_()
    with pytest.raises(NotImplementedError, match=r"^flash_cute\.append_kv: there are no gradients"):
        flash_cute.append_kv(**call.arguments)
    with torch.no_grad():
        rotated = flash_cute.append_kv(**call.arguments)
    assert not rotated.requires_grad


def test_transforms_are_refused(device):
    call = make_append(device)
    k = call.arguments.pop("k")
    with pytest.raises(NotImplementedError, match=r"^flash_cute\.append_kv: vmap can't map a cache"):
        torch.vmap(lambda k: flash_cute.append_kv(k, **call.arguments))(k[None])
    with pytest.raises(NotImplementedError, match="there are no gradients"):
        torch.func.grad(lambda k: (flash_cute.append_kv(k, **call.arguments), k.sum())[1])(k.float())


def test_autograd_notices(device):
    """A cache that a backward needs must not have changed."""
    call = make_append(device)
    x = torch.ones((), device=device, requires_grad=True)
    product = x * call.arguments["k_cache"]
    flash_cute.append_kv(**call.arguments)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_autocast(device):
    """Rows and queries in float32 are cast to the cache's dtype."""
    call = make_append(device, rotary="halves", wide_table=True)
    wide = {name: call.arguments[name].float() for name in ("k", "v", "q")}
    with torch.autocast(device.type, torch.bfloat16):
        rotated = flash_cute.append_kv(**call.arguments | wide)
    assert_appended(call, rotated)
    for other in (torch.int64, torch.float64):
        with (
            torch.autocast(device.type, torch.bfloat16),
            pytest.raises(ValueError, match=rf"v has dtype {other} and k torch\.bfloat16"),
        ):
            flash_cute.append_kv(**call.arguments | {"v": call.arguments["v"].to(other)})


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", ["rows first", "side by side"])
def test_compiled(device, place, layout):
    """The mutation is part of the graph, also of views of one tensor."""
    torch._dynamo.reset()  # PyTorch 2.11 loses what any operator writes into these once sizes are symbols
    compiled = torch.compile(lambda given: flash_cute.append_kv(**given), fullgraph=True, backend="aot_eager")
    for _ in range(2):
        call = make_append(device, place, "halves", layout)
        assert_appended(call, compiled(call.arguments))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_views_of_one_base_in_a_graph(device, backend):
    """K and V are views that the graph itself makes, and are read behind the write, of any sizes."""

    def step(both, k, v, used):
        k_cache, v_cache = both[..., :64], both[..., 64:]
        flash_cute.append_kv(k, v, k_cache, v_cache, used)
        return both.float().sum(), k_cache[:, :, 3] + 1

    torch._dynamo.reset()
    call = torch.compile(step, fullgraph=True, backend=backend)
    for batch, rows in ((2, 3), (4, 5), (3, 1)):
        k, v = (torch.randn(batch, 2, rows, 64, device=device).bfloat16() for _ in range(2))
        used = torch.arange(batch, dtype=torch.int32, device=device)
        both = torch.randn(batch, 2, 10, 128, device=device).bfloat16()
        eager, compiled = both.clone(), both.clone()
        for result, expected in zip(call(compiled, k, v, used), step(eager, k, v, used), strict=True):
            torch.testing.assert_close(result, expected)
        assert torch.equal(eager, compiled)
        assert not torch.equal(eager, both)


@pytest.mark.parametrize("dynamic", [None, True])
def test_layers_given_to_a_compiled_function(device, dynamic):
    """Views of stacks of caches are its inputs (docs/decoding.md), of any number of sequences."""

    def step(q, k, v, used, k_cache, v_cache, out):
        flash_cute.append_kv(k, v, k_cache, v_cache, used)
        return flash_cute.forward(q, k_cache, v_cache, seqused_k=used + 1, out=out)[1]

    torch._dynamo.reset()
    # A graph that was kept is found by a key without its views' offsets.
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
        for batch in (2, 3, 5):
            q, k, v = (torch.randn(batch, 2, 1, 64, device=device).bfloat16() for _ in "qkv")
            used = torch.arange(batch, dtype=torch.int32, device=device)
            stacks = [torch.randn(3, batch, 2, rows, 64, device=device).bfloat16() for rows in (10, 10, 1)]
            expected = [x.clone() for x in stacks]
            for layer in (1, 2):
                step(q, k, v, used, *(x[layer] for x in expected))
                compiled(q, k, v, used, *(x[layer] for x in stacks))
            assert all(map(torch.equal, stacks, expected))


def test_opcheck(device):
    for place in PLACES:
        call = make_append(device, place, "halves")
        torch.library.opcheck(
            torch.ops.flash_cute.append_kv.default,
            (),
            call.arguments,
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )


def test_exported(device):
    class Step(torch.nn.Module):
        def forward(self, k, v, k_cache, v_cache, used):
            flash_cute.append_kv(k, v, k_cache, v_cache, used)
            return k_cache + 0

    call = make_append(device)
    arguments = tuple(call.arguments[name] for name in ("k", "v", "k_cache", "v_cache", "cache_seqlens"))
    program = torch.export.export(Step(), tuple(x.clone() for x in arguments))
    result = program.module()(*arguments)
    assert_appended(call, None)
    assert torch.equal(result, call.arguments["k_cache"])


def test_values_are_checked_on_request(device, monkeypatch):
    monkeypatch.setattr(flash_cute.lengths, "CHECKED", True)
    cases = {
        "padded": "the places of new rows behind cache_seqlens must be 0 to 63, got 6",
        "slots": "slots must be less than the cache's rows, at most 351, got 352",
    }
    for place, sentence in cases.items():
        call = make_append(device, place, page_size=16)
        if place == "slots":
            call.arguments["slots"][0] = 352
        with pytest.raises(ValueError, match=f"^flash_cute.append_kv: {sentence}"):
            flash_cute.append_kv(**call.arguments)
    call = make_append(device, "packed in pages", "halves")
    call.arguments["cache_seqlens"].zero_()
    flash_cute.append_kv(**call.arguments)
    table = call.arguments["block_table"].clone()
    call.arguments["block_table"].fill_(22)
    with pytest.raises(ValueError, match=r"block_table must have pages, at most 21, got 22"):
        flash_cute.append_kv(**call.arguments)
    call.arguments |= {
        "block_table": table,
        "positions": torch.full((len(call.arguments["k"]),), 999, device=device),
    }
    with pytest.raises(ValueError, match=r"positions must be rows of rotary_cos, 0 to 191, got 999"):
        flash_cute.append_kv(**call.arguments)


def test_values_that_are_wrong_in_other_ways(device, monkeypatch):
    monkeypatch.setattr(flash_cute.lengths, "CHECKED", True)
    call = make_append(device, "packed", "halves")
    call.arguments["cache_seqlens"].zero_()
    changes = {
        "cu_seqlens": (
            lambda x: x.flip(0),
            "cu_seqlens .* to .*; offsets that do not decrease, from 0 to k's total",
        ),
        "k_cache": (lambda x: x[:, :, :0], "the places of new rows .* must be of a cache with room, got 0"),
        "rotary_cos": (lambda x: x[:2], "positions must be rows of rotary_cos, 0 to 1, got"),
    }
    for name, (change, sentence) in changes.items():
        arguments = call.arguments | {name: change(call.arguments[name])}
        others = {"k_cache": "v_cache", "rotary_cos": "rotary_sin"}
        if other := others.get(name):
            arguments[other] = change(call.arguments[other])
        with pytest.raises(ValueError, match=sentence):
            flash_cute.append_kv(**arguments)
    call.arguments["cu_seqlens"].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="cu_seqlens must have a storage of at least"):
        flash_cute.append_kv(**call.arguments)


def test_freed_storage(device):
    call = make_append(device)
    call.arguments["k_cache"].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"k_cache must have a storage of at least"):
        flash_cute.append_kv(**call.arguments)
    gc.collect()


@pytest.mark.gpu
def test_graph_replays_with_other_places(device):
    """Captured once; then lengths, tables, slots and positions change under it."""
    for place in PLACES:
        call = make_append(device, place, "halves", positions=True)
        flash_cute.append_kv(**call.arguments)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rotated = flash_cute.append_kv(**call.arguments)
        for _ in range(3):
            other = make_append(device, place, "halves", positions=True).arguments
            for name, x in call.arguments.items():
                if isinstance(x, torch.Tensor) and x.shape == other[name].shape and "cache" not in name[1:]:
                    x.copy_(other[name])
            call.before = tuple(call.arguments[name].clone() for name in ("k_cache", "v_cache"))
            graph.replay()
            assert_appended(call, rotated)


@pytest.mark.gpu
@pytest.mark.big_memory(12)
def test_many_heads_and_large_caches(device):
    """More items of a token than a thread block has threads, and offsets beyond 2**31 elements."""
    heads, head_dim = 300, 128
    caches = make_cache(2, heads, 30000, head_dim, torch.bfloat16, device, "rows first")
    k, v = (torch.randn(2, heads, 2, head_dim, device=device).bfloat16() for _ in range(2))
    used = torch.tensor([29998, 29997], dtype=torch.int32, device=device)
    flash_cute.append_kv(k, v, *caches, used)
    for b, begin in enumerate((29998, 29997)):
        assert torch.equal(caches[0][b, :, begin : begin + 2], k[b])
        assert torch.equal(caches[1][b, :, begin : begin + 2], v[b])
