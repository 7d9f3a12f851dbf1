"""16-bit queries over a cache of 8-bit codes: bits are those of 16-bit kernels over the codes' numbers.

Up to 16 rows have another kernel unless calls are batch-invariant: they are as near as rounding is.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from support.cases import BUCKETS, DTYPES, MASKS, matrix
from support.ranges import anywhere
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_cute
from flash_cute import reference

CODES = torch.float8_e4m3fn
NAN_CODES = 0x7F, 0xFF
# Powers of two, with which numbers of 16 bits are exact: shapes by the batch and the heads of K and V.
SCALES = {
    "none": lambda batch, heads: None,
    "one": lambda batch, heads: powers_of_two(()),
    "of heads": lambda batch, heads: powers_of_two((heads,)),
    "of sequences and heads": lambda batch, heads: powers_of_two((batch, heads)),
}
PLACES = "padded", "packed", "padded in pages", "packed in pages"
QUERIES = {"one": (1, 1, 1), "few": (3, 1, 4), "many": (150, 1, 70)}
HEADS = {"4 of 2": (4, 2), "5 of 1": (5, 1), "3 of 3": (3, 3)}


def powers_of_two(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(-2, 3, shape).float().exp2()


@dataclass
class Call:
    """A call over codes, and that over their numbers."""

    q: torch.Tensor
    codes: dict[str, torch.Tensor]
    numbers: dict[str, torch.Tensor]
    lengths: dict[str, torch.Tensor]
    scales: dict[str, torch.Tensor]


def numbers_of(codes: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """(batch, heads, rows, head_dim)."""
    scale = torch.ones((), device=codes.device) if scale is None else scale
    return (codes.float() * (scale if scale.dim() == 0 else scale[..., None, None])).to(dtype)


def make_call(
    device, place="padded in pages", queries=QUERIES["few"], heads=(4, 2), head_dim=64, dtype=torch.bfloat16,
    scale="none", page_size=17, used=(300, 40, 129), head_dim_v=None,
) -> Call:  # fmt: skip
    """Rows of the cache that no sequence uses, and unused columns beside them, are NaN."""
    heads_q, heads_kv = heads
    batch, capacity = len(used), 320
    packed, paged = place.startswith("packed"), place.endswith("pages")
    widths = {"k": head_dim, "v": head_dim_v or head_dim}
    scales = {f"{name}_scale": SCALES[scale](batch, heads_kv) for name in "kv"}
    scales = {name: x.to(device) for name, x in scales.items() if x is not None}
    codes, numbers = {}, {}
    for name, width in widths.items():
        rows = (3 * torch.randn(batch, heads_kv, capacity, width, device=device)).to(CODES)
        codes[name] = rows
        numbers[name] = numbers_of(rows, scales.get(f"{name}_scale"), dtype)
        for b, count in enumerate(used):
            codes[name].view(torch.uint8)[b, :, count:] = NAN_CODES[b % 2]
            numbers[name][b, :, count:] = torch.nan
    lengths = {"seqused_k": torch.tensor(used, dtype=torch.int32, device=device)}
    if paged:
        columns = -(-capacity // page_size)
        pages = torch.randperm(batch * columns).view(batch, columns).to(device)
        lengths["block_table"] = pages.int()
        codes = {
            name: in_pages(x.view(torch.uint8), pages, page_size).view(CODES) for name, x in codes.items()
        }
        numbers = {name: in_pages(x, pages, page_size) for name, x in numbers.items()}
    if packed:
        q = torch.randn(sum(queries), heads_q, head_dim, device=device)
        offsets = torch.tensor([0, *queries]).cumsum(0)
        lengths["cu_seqlens_q"] = offsets.int().to(device)
    else:
        q = torch.randn(batch, heads_q, max(queries), head_dim, device=device)
    return Call(q.to(dtype), codes, numbers, lengths, scales)


def in_pages(rows: torch.Tensor, pages: torch.Tensor, page_size: int) -> torch.Tensor:
    """(pages, heads, page_size, head_dim), with heads behind rows in memory."""
    batch, heads, capacity, width = rows.shape
    room = pages.shape[1] * page_size
    whole = torch.zeros(batch, heads, room, width, dtype=rows.dtype, device=rows.device)
    whole[:, :, :capacity] = rows
    cache = torch.empty(pages.numel(), page_size, heads, width, dtype=rows.dtype, device=rows.device)
    cache[pages.flatten()] = whole.transpose(1, 2).unflatten(1, (-1, page_size)).flatten(0, 1)
    return cache.transpose(1, 2)


def check(kernel, call: Call, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """The results, compared with those over numbers; a family without such kernels says so."""
    if kernel.family == "sm80":
        with pytest.raises(
            ValueError, match="k must have the dtype of q with the kernels of the Ampere family"
        ):
            kernel.forward(call.q, **call.codes, **call.lengths, **call.scales, **options)
        pytest.skip("refused, as it should be")
    if has_tile_of_codes(kernel, call, options):
        if "ranges" not in options:  # which batch-invariant calls do not take
            compare(kernel, call, is_exact=True, **options | {"batch_invariant": True})
        return compare(kernel, call, is_exact=False, **options)
    if "block_table" not in call.lengths and "cu_seqlens_q" not in call.lengths and kernel.family:
        options.setdefault("batch_invariant", True)  # else keys of 16 bits may not be cut into parts
    return compare(kernel, call, is_exact=True, **options)


def has_tile_of_codes(kernel, call: Call, options: dict) -> bool:
    if kernel.family is None:
        return False
    given = call.codes | call.lengths | call.scales | options
    return flash_cute.explain(call.q, **given, internals=True, family=kernel.family)["block_m"] == 16


def compare(kernel, call: Call, is_exact: bool, **options) -> tuple[torch.Tensor, torch.Tensor]:
    results = kernel.forward(call.q, **call.codes, **call.lengths, **call.scales, **options)
    expected = kernel.forward(call.q, **call.numbers, **call.lengths, **options)
    for result, right in zip(results, expected, strict=True):
        assert torch.equal(result.isnan(), right.isnan())
    if is_exact:
        for result, right in zip(results, expected, strict=True):
            assert torch.equal(result.nan_to_num(), right.nan_to_num())
        return results
    # Both round out, and the call over numbers its weights. A cap's tanh is within 2^-11.
    out, right = (result.nan_to_num().float() for result, *_ in (results, expected))
    largest = call.numbers["v"].nan_to_num().abs().max().item()
    cap = options.get("softcap", 0.0)
    rounding = torch.finfo(call.q.dtype).eps
    torch.testing.assert_close(out, right, rtol=0, atol=(1.5 * rounding + cap * 2**-10) * largest)
    torch.testing.assert_close(results[1], expected[1], rtol=1e-5, atol=1e-5 + cap * 2**-10, equal_nan=True)
    return results


@matrix(place=PLACES, queries=QUERIES, heads=HEADS, scale=SCALES)
def test_bits(kernel, place, queries, heads, scale):
    call = make_call(kernel.device, place, queries, heads, scale=name_of(scale))
    out, _ = check(kernel, call, causal=True)
    assert out.isfinite().all()


def name_of(scale) -> str:
    return next(name for name, value in SCALES.items() if value is scale)


@matrix(head_dim=[*BUCKETS, 16, 80, 112, 160, 208], dtype=DTYPES, queries=QUERIES, place=PLACES)
def test_head_dims(kernel, head_dim, dtype, queries, place):
    call = make_call(kernel.device, place, queries, head_dim=head_dim, dtype=dtype, scale="of heads")
    out, _ = check(kernel, call, causal=True)
    assert out.isfinite().all()


@matrix(mask=MASKS, queries=QUERIES, place=PLACES)
def test_masks(kernel, mask, queries, place):
    check(kernel, make_call(kernel.device, place, queries, scale="one"), **mask.options)


@matrix(page_size=[1, 2, 16, 17, 64, 128, 320], queries=QUERIES, head_dim=[64, 96, 128, 256])
def test_pages(kernel, page_size, queries, head_dim):
    check(kernel, make_call(kernel.device, queries=queries, page_size=page_size, head_dim=head_dim))


@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("used", [(1, 0, 2), (320, 128, 129), (127, 64, 65), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_lengths(kernel, used, place, queries):
    check(kernel, make_call(kernel.device, place, QUERIES[queries], used=used), causal=True)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("queries", [1, 40, 512])
def test_many_tiles(kernel, queries, head_dim):
    """Several tiles a thread block, some of one block of keys, and several parts of a sequence."""
    device = kernel.device
    if kernel.family is None:
        queries, head_dim = min(queries, 40), 64
    batch, capacity, heads_kv = 24, 3000 if kernel.family else 300, 4
    used = torch.tensor([1 + 397 * i % capacity for i in range(batch)], dtype=torch.int32, device=device)
    q = torch.randn(batch, 8, queries, head_dim, device=device).bfloat16()
    k, v = (torch.randn(batch, heads_kv, capacity, head_dim, device=device).to(CODES) for _ in "kv")
    table = torch.arange(batch, dtype=torch.int32, device=device).flip(0)[:, None].contiguous()
    codes = {"k": k, "v": v}
    numbers = {name: x.bfloat16() for name, x in codes.items()}
    check(kernel, Call(q, codes, numbers, {"seqused_k": used, "block_table": table}, {}), causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("queries", [1, 70])
def test_every_code(kernel, queries, head_dim, dtype):
    """Each code is a number of V, of one key alone, and of K where a query has a single column."""
    device, dtype = kernel.device, DTYPES[dtype]
    every = torch.arange(256, dtype=torch.uint8, device=device)
    batch = 256 // head_dim + 1
    rows = every.repeat(-(-batch * head_dim // 256))[: batch * head_dim].view(batch, 1, 1, head_dim)
    numbers = rows.view(CODES).to(dtype)
    used = torch.ones(batch, dtype=torch.int32, device=device)
    table = torch.arange(batch, dtype=torch.int32, device=device)[:, None].contiguous()
    lengths = {"seqused_k": used, "block_table": table}
    zeros = torch.zeros_like(rows)
    q = torch.zeros(batch, 1, queries, head_dim, device=device, dtype=dtype)
    call = Call(q, {"k": zeros, "v": rows}, {"k": zeros.to(dtype), "v": numbers}, lengths, {})
    out, lse = check(kernel, call)
    right = numbers.expand_as(out)
    assert torch.equal(out.isnan(), right.isnan())
    assert torch.equal(out.nan_to_num(), right.nan_to_num())
    assert (lse == 0).all()
    for column in range(0, head_dim, 7):
        q.zero_()[..., column] = 1
        finite = numbers.where(numbers.isfinite(), 0)  # times 0 NaN would be NaN
        codes = rows.where(numbers.isfinite(), 0)
        call = Call(q, {"k": codes, "v": zeros}, {"k": finite, "v": zeros.to(dtype)}, lengths, {})
        _, lse = check(kernel, call, softmax_scale=1.0)
        torch.testing.assert_close(lse, finite[..., column].float().expand_as(lse), rtol=1e-6, atol=0)


@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("name", ["k", "v"])
def test_a_used_nan_is_nan(kernel, name, queries):
    call = make_call(kernel.device, queries=QUERIES[queries], page_size=320, used=(300, 300, 300))
    page = call.lengths["block_table"][0, 0].item()
    call.codes[name].view(torch.uint8)[page, 0, 100, 5] = NAN_CODES[0]
    call.numbers[name][page, 0, 100, 5] = torch.nan
    out, _ = check(kernel, call)
    assert out[0, :2].isnan().any()
    assert out[0, 2:].isfinite().all()
    assert out[1:].isfinite().all()


CHANGES = {
    "softcap": lambda call: {"softcap": 2.0},
    "slopes": lambda call: {"alibi_slopes": torch.rand(call.q.shape[1], device=call.q.device)},
    "softcap and slopes": lambda call: {
        "softcap": 30.0,
        "alibi_slopes": torch.rand(3, call.q.shape[1], device=call.q.device),
    },
    "sinks": lambda call: {"sinks": torch.randn(call.q.shape[1], device=call.q.device)},
    "a mask": lambda call: {
        "mask": torch.rand(3, 1, call.q.shape[2], 16, device=call.q.device) < 0.7,
        "softcap": 2.0,
    },
    "a mask alone": lambda call: {"mask": torch.rand(3, 4, call.q.shape[2], 16, device=call.q.device) < 0.7},
    "ranges": lambda call: {
        "ranges": anywhere((3, call.q.shape[2], 2), 300).to(torch.int32).to(call.q.device)
    },
}


@matrix(change=CHANGES, scale=SCALES, queries=QUERIES, head_dim=[64, 128, 256])
def test_changed_scores(kernel, change, scale, queries, head_dim):
    call = make_call(kernel.device, queries=queries, scale=name_of(scale), head_dim=head_dim)
    check(kernel, call, causal=True, **change(call))


@pytest.mark.gpu
@matrix(queries=QUERIES, place=PLACES, head_dim=BUCKETS)
def test_batch_invariant(kernel, queries, place, head_dim):
    """A sequence has the same bits alone."""
    call = make_call(kernel.device, place, queries, head_dim=head_dim, scale="of heads")
    options = {"causal": True, "batch_invariant": True}
    out, lse = check(kernel, call, **options)
    if place != "padded":
        return
    for b in range(3):
        alone = {name: x[b : b + 1] for name, x in (call.codes | call.lengths).items()}
        results = kernel.forward(call.q[b : b + 1], **alone, **call.scales, **options)
        assert torch.equal(results[0], out[b : b + 1])
        assert torch.equal(results[1], lse[b : b + 1])


@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_scale(kernel, dtype, queries, softcap):
    """Scales that are no powers of two multiply what is computed in float32."""
    call = make_call(kernel.device, queries=QUERIES[queries], scale="of heads", dtype=DTYPES[dtype])
    call.scales = {
        "k_scale": torch.tensor([0.3, 1.7]),
        "v_scale": torch.tensor([[0.7, 3], [1.1, 0.2], [5, 1]]),
    }
    call.scales = {name: x.to(kernel.device) for name, x in call.scales.items()}
    if kernel.family == "sm80":
        pytest.skip("has no such kernels")
    options = {"causal": True, "softcap": softcap}
    out, lse = kernel.forward(call.q, **call.codes, **call.lengths, **call.scales, **options)
    table, used = call.lengths["block_table"].long(), call.lengths["seqused_k"].tolist()
    for b, count in enumerate(used):
        k, v = (
            numbers_of(
                call.codes[name][table[b]].transpose(0, 1).flatten(1, 2)[None, :, :count],
                scale[b : b + 1] if scale.dim() == 2 else scale,
                torch.float64,
            )
            for name, scale in (("k", call.scales["k_scale"]), ("v", call.scales["v_scale"]))
        )
        right = reference.forward(call.q[b : b + 1].double(), k, v, **options)
        largest = right[0].abs().max().item()
        torch.testing.assert_close(out[b : b + 1].double(), right[0].double(), rtol=0.02, atol=0.02 * largest)
        torch.testing.assert_close(lse[b : b + 1].double(), right[1].double(), rtol=1e-3, atol=4e-3)


def test_bits_of_uint8_are_codes(kernel):
    call = make_call(kernel.device, scale="one")
    out, lse = check(kernel, call)
    codes = {name: x.view(torch.uint8) for name, x in call.codes.items()}
    results = kernel.forward(call.q, **codes, **call.lengths, **call.scales)
    assert torch.equal(results[0], out)
    assert torch.equal(results[1], lse)


def test_strides_of_scales(kernel):
    call = make_call(kernel.device, scale="of sequences and heads")
    out, _ = check(kernel, call)
    call.scales = {name: x.mT.contiguous().mT for name, x in call.scales.items()}
    assert torch.equal(kernel.forward(call.q, **call.codes, **call.lengths, **call.scales)[0], out)
    call.scales = {name: x[:1, :1].expand(3, 2) for name, x in call.scales.items()}
    expanded, _ = kernel.forward(call.q, **call.codes, **call.lengths, **call.scales)
    call.scales = {name: x[0, 0] for name, x in call.scales.items()}
    assert torch.equal(kernel.forward(call.q, **call.codes, **call.lengths, **call.scales)[0], expanded)


def test_two_widths(kernel):
    check(kernel, make_call(kernel.device, head_dim=64, head_dim_v=128, scale="of heads"))
    check(kernel, make_call(kernel.device, head_dim=192, head_dim_v=32, scale="one"))


def test_out_and_autocast(kernel):
    """Codes are not cast, and q is."""
    call = make_call(kernel.device, scale="of heads")
    out, _ = check(kernel, call)
    given = torch.full_like(out, torch.nan)
    assert kernel.forward(call.q, **call.codes, **call.lengths, **call.scales, out=given)[0] is given
    assert torch.equal(given, out)
    with torch.autocast(kernel.device.type, torch.bfloat16):
        cast, _ = kernel.forward(call.q.float(), **call.codes, **call.lengths, **call.scales)
    assert torch.equal(cast, out)


def test_compiled_and_traced(kernel):
    call = make_call(kernel.device, scale="of heads")
    out, lse = check(kernel, call)
    tensors = {"q": call.q, **call.codes, **call.lengths, **call.scales}
    compiled = torch.compile(flash_cute.forward, fullgraph=True, backend="aot_eager")
    results = compiled(**tensors, family=kernel.family)
    assert torch.equal(results[0], out)
    assert torch.equal(results[1], lse)
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(x) for name, x in tensors.items()}
        assert flash_cute.forward(**fakes)[0].shape == out.shape
        fakes["k_scale"] = mode.from_tensor(torch.ones(7, device=kernel.device))
        with pytest.raises(ValueError, match="k_scale must have shape"):
            flash_cute.forward(**fakes)


def test_vmap(kernel):
    call = make_call(kernel.device, "padded", scale="one")
    out, _ = check(kernel, call)

    lengths = call.lengths["seqused_k"]
    mapped = torch.vmap(lambda q, k, v, used: flash_cute.forward(q, k, v, seqused_k=used, **call.scales)[0])(
        call.q[None], call.codes["k"][None], call.codes["v"][None], lengths[None]
    )
    torch.testing.assert_close(mapped[0], out, atol=1e-2, rtol=1e-2)
    with pytest.raises(ValueError, match="k_scale has shape"):
        torch.vmap(lambda scale: flash_cute.forward(call.q, **call.codes, **call.lengths, k_scale=scale))(
            torch.ones(2, device=kernel.device)
        )


def eight_columns(call: Call) -> dict[str, torch.Tensor]:
    return {"q": call.q[..., :8], **{name: x[..., :8] for name, x in call.codes.items()}}


def without_pages(call: Call) -> dict:
    return {"block_table": None, **{name: x[:3] for name, x in call.codes.items()}}


def ones(call: Call, *shape: int) -> torch.Tensor:
    return torch.ones(shape, device=call.q.device)


SHAPES = "must have shape (), (heads_kv,) or (batch, heads_kv), here (), (2,) or (3, 2), got"
WRONG = {
    "no lengths": (
        lambda call: {"seqused_k": None, "block_table": None},
        "seqused_k or block_table must be given where k has dtype torch.float8_e4m3fn, as caches alone may",
    ),
    "q of float32": (
        lambda call: {"q": call.q.float()},
        "q must have dtype torch.float16 or torch.bfloat16 where k has dtype torch.float8_e4m3fn, got torch",
    ),
    "v of another type": (
        lambda call: {"v": call.numbers["v"]},
        "v has dtype torch.bfloat16 and k torch.float8_e4m3fn; they must be the same",
    ),
    "k of another type": (
        lambda call: {"k": call.numbers["k"]},
        "v has dtype torch.float8_e4m3fn and q torch.bfloat16; they must be the same",
    ),
    "another type of 8 bits": (
        lambda call: {name: x.view(torch.float8_e5m2) for name, x in call.codes.items()},
        "k has dtype torch.float8_e5m2 and q torch.bfloat16; they must be the same",
    ),
    "scales of keys of 16 bits": (
        lambda call: {**call.numbers, "k_scale": ones(call)},
        "k_scale must be None where k has dtype torch.bfloat16, got a tensor",
    ),
    "a scale of float64": (
        lambda call: {"v_scale": ones(call).double()},
        "v_scale has dtype torch.float64; torch.float32 is accepted",
    ),
    "scales of other heads": (lambda call: {"v_scale": ones(call, 3)}, f"v_scale {SHAPES} (3,)"),
    "scales of another batch": (lambda call: {"k_scale": ones(call, 2, 2)}, f"k_scale {SHAPES} (2, 2)"),
    "a head_dim of 8": (
        eight_columns,
        "head_dim must be a multiple of 16 where k has dtype torch.float8_e4m3fn, got 8",
    ),
    "rows of an odd stride": (
        lambda call: {
            "k": torch.nn.functional.pad(call.codes["k"].view(torch.uint8), (0, 8))[..., :64].view(CODES)
        },
        "k is a cache, which is not copied; its stride of dimension 1 must be a multiple of 16, got",
    ),
    "dropout": (
        lambda call: {"dropout_p": 0.5, **without_pages(call)},
        "dropout_p must be 0 where k has dtype torch.float8_e4m3fn, got 0.5",
    ),
    "a bias": (
        lambda call: {"bias": ones(call, 1, 1, 1, 17).bfloat16(), **without_pages(call)},
        "bias must be None where k has dtype torch.float8_e4m3fn, got a tensor",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(device, name):
    call = make_call(device)
    change, words = WRONG[name]
    with pytest.raises(ValueError, match=r"flash_cute\.forward: ") as error:
        flash_cute.forward(**{"q": call.q, **call.codes, **call.lengths, **call.scales} | change(call))
    assert words in str(error.value), str(error.value)


def test_types_of_scales(device):
    call = make_call(device)
    with pytest.raises(TypeError, match=r"k_scale is of type float; a torch\.Tensor is accepted"):
        flash_cute.forward(call.q, **call.codes, **call.lengths, k_scale=1.0)


def test_packed_keys_are_no_cache(device):
    call = make_call(device, "packed")
    tensors = {name: x[0].transpose(0, 1) for name, x in call.codes.items()}
    with pytest.raises(ValueError, match="k has 3 dimensions; 4, "):
        flash_cute.forward_varlen(call.q, **tensors, **call.lengths)


def test_gradients_and_weights_are_refused(device):
    call = make_call(device, "padded")
    with pytest.raises(NotImplementedError, match="no gradients through a cache"):
        flash_cute.forward(call.q.requires_grad_(), **call.codes, **call.lengths)
    scale = torch.ones((), device=device, requires_grad=True)
    for function in flash_cute.forward, flash_cute.attention:
        with pytest.raises(NotImplementedError, match="no gradients of v_scale; detach v_scale"):
            function(call.q.detach(), **call.codes, **call.lengths, v_scale=scale)
        with torch.no_grad():
            function(call.q, **call.codes, **call.lengths, v_scale=scale)
    with pytest.raises(ValueError, match=r"k has dtype torch\.float8_e4m3fn and q torch\.bfloat16"):
        flash_cute.attention_weights(call.q.detach(), call.codes["k"], **call.lengths)


def test_scales_of_zeros(kernel):
    """A cache of zeros has a scale of 0 by its largest number, and a sequence without keys may have any."""
    if kernel.family == "sm80":
        pytest.skip("has no such kernels")
    call = make_call(kernel.device, used=(300, 0, 129))
    scales = {name: torch.zeros(3, 2, device=kernel.device) for name in ("k_scale", "v_scale")}
    for value in (0.0, torch.nan):
        for scale in scales.values():
            scale[1] = value
        out, lse = flash_cute.forward(call.q, **call.codes, **call.lengths, **scales, family=kernel.family)
        assert (out == 0).all()
        found = lse[[0, 2]].exp()  # the number of keys
        expected = torch.tensor([300.0, 129.0], device=kernel.device).view(2, 1, 1).expand_as(found)
        torch.testing.assert_close(found, expected)
        assert (lse[1] == -torch.inf).all()


def test_scales_are_checked_on_request(device, monkeypatch):
    monkeypatch.setattr(flash_cute.lengths, "CHECKED", True)
    call = make_call(device)
    for value in (0.0, -1.0, float("inf"), float("nan")):
        scale = torch.tensor(value, device=device)
        with pytest.raises(ValueError, match=r"v_scale has .*; finite numbers > 0 are accepted"):
            flash_cute.forward(call.q, **call.codes, **call.lengths, v_scale=scale)


def test_explain(kernel):
    call = make_call(kernel.device, scale="one")
    tensors = call.lengths | call.scales
    if kernel.family == "sm80":
        pytest.skip("has no such kernels")
    found = flash_cute.explain(call.q, **call.codes, **tensors, family=kernel.family)
    wide = flash_cute.explain(call.q, **call.numbers, **call.lengths, family=kernel.family)
    assert (found["fp8"], wide["fp8"]) == (True, False)
    assert found["flops"] == wide["flops"]
    keys = sum(call.lengths["seqused_k"].tolist()) * 2 * 2 * 64
    assert wide["bytes"] - found["bytes"] == keys
    assert kernel.family is None or "over a cache of fp8" in str(found)
