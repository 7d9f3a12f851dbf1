"""What flash_cute.masks takes: every argument is checked."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch

from flash_cute import masks
from flash_cute.wording import is_ours

IDS = torch.tensor([[0, 0, 1, 1, -1], [0, 1, 1, 1, 1]])
OFFSETS = torch.tensor([0, 2, 5], dtype=torch.int32)
RANGES, PACKED = masks.chunks(2, 5), masks.chunks(2, torch.arange(5))


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


FREED, FREED_LENGTHS, FREED_RANGES = freed(IDS), freed(IDS[:, 0]), freed(RANGES)
META = torch.zeros(2, 5, dtype=torch.int64, device="meta")
FLAG = ["no", 1, None, torch.tensor(True)]
NUMBER = [-1, 2.0, True, "3", torch.tensor(3)]
LENGTH = [*NUMBER, None, 2**31, 2**70]
TENSOR = [None, 3, [[0, 1]], torch.zeros(2, 5), torch.zeros(1, 1, 1, 2, 5, 3), IDS.to_sparse(), IDS.bool()]
TENSOR += [IDS.to(torch.uint64), IDS.cfloat(), torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])]
OF_IDS = [*TENSOR, IDS[0], FREED]
OF_QUERIES = [*LENGTH, *TENSOR[2:], torch.tensor(3), FREED]
OF_RANGES = [
    *TENSOR,
    RANGES.float(),
    RANGES[0],
    RANGES[..., :1],
    RANGES[..., :0, :],
    RANGES.repeat(1, 2, 1, 1, 1),
]
OF_RANGES += [RANGES[None], FREED_RANGES]
OTHER_RANGES = [*OF_RANGES, PACKED, masks.chunks(2, 6), masks.chunks(2, 1), RANGES.to("meta")]
DEVICE = ["nonsense", 2.5, [], "cuda:99"]
CALLS = {  # a call that is right, and of each argument what is not accepted with the others
    masks.block_diffusion: (
        {"size": 2, "seqlen": 4},
        {"size": [*NUMBER, 0], "seqlen": LENGTH, "device": DEVICE},
    ),
    masks.causal: ({"queries": 5}, {"queries": OF_QUERIES, "device": DEVICE}),
    masks.chunks: (
        {"size": 2, "queries": 5},
        {
            "size": [*NUMBER, 0],
            "queries": OF_QUERIES,
            "causal": FLAG,
            "leftpad": [2, [2], IDS, torch.zeros(2), FREED_LENGTHS],
            "device": DEVICE,
        },
    ),
    masks.documents: ({"ids": IDS}, {"ids": OF_IDS, "cu_seqlens": [OFFSETS], "seqlen": [5], "causal": FLAG}),
    masks.from_block_mask: ({}, {"block_mask": [None, IDS, 3]}),
    masks.from_dense: (
        {"mask": IDS > 0},
        {"mask": [*TENSOR[:6], *TENSOR[7:], IDS, IDS[0] > 0, torch.zeros(1, 2, 5, 5) > 0, META > 0]},
    ),
    masks.from_mask_mod: (
        {"mask_mod": lambda b, h, q, kv: q >= kv, "batch": 1, "seqlen_q": 4, "seqlen_k": 4},
        {
            "mask_mod": [
                None,
                "causal",
                lambda b, h, q, kv: True,
                lambda b, h, q, kv: None,
                lambda b, h, q, kv: q - kv,
                lambda b, h, q, kv: q >= torch.arange(4),
                lambda b, h, q, kv: bool(q >= kv),
                lambda b, h, q: q >= 0,
                lambda b, h, q, kv: IDS[q, kv, b] > 0,
            ],
            "batch": LENGTH,
            "seqlen_q": LENGTH,
            "seqlen_k": LENGTH,
            "device": [*DEVICE, "meta"],
        },
    ),
    masks.from_slices: (
        {"q_ranges": [(0, 2)], "k_ranges": [(0, 3)], "kinds": ["full"], "seqlen_q": 5},
        {
            "q_ranges": [
                None,
                3,
                [],
                [3],
                [(0, 1, 2)],
                [(0.0, 2.0)],
                [(2, 1)],
                [(0, 9)],
                [("a", "b")],
                [(0, 2**70)],
            ],
            "k_ranges": [None, 3, [], [3], [(0, 1, 2)], [(0.0, 2.0)], [("a", "b")], [(None, 1)]],
            "kinds": [None, 3, "full", [], [None], ["half"], [["full"]]],
            "seqlen_q": LENGTH,
            "device": DEVICE,
        },
    ),
    masks.images: ({"ids": IDS}, {"ids": OF_IDS, "window": NUMBER, "window_images": FLAG}),
    masks.intersection: ({"one": RANGES, "other": RANGES}, {"one": OTHER_RANGES, "other": OTHER_RANGES}),
    masks.padding: (
        {"attention_mask": IDS.clamp(0)},
        {
            "attention_mask": [
                *(None, [[0, 1]], IDS[0], IDS, IDS.cfloat(), IDS.to_sparse(), FREED),
                torch.zeros(2, 5).masked_fill(IDS < 0, -torch.inf),
                torch.zeros(2, 5).masked_fill(IDS < 0, torch.finfo().min),
                torch.full((2, 5), torch.nan),
            ],
            "queries": [x for x in LENGTH if x is not None],
            "causal": FLAG,
            "runs": [*LENGTH, 0, 9],
        },
    ),
    masks.positions: (
        {"cu_seqlens": OFFSETS, "total": 5},
        {"cu_seqlens": [*TENSOR, OFFSETS[:0]], "total": LENGTH},
    ),
    masks.prefix: (
        {"length": torch.tensor([3, 1]), "queries": 5},
        {
            "length": [*TENSOR, META[:, 0].float(), FREED_LENGTHS],
            "queries": [*OF_QUERIES, torch.arange(5), torch.zeros(3, 5, dtype=torch.int64), META],
        },
    ),
    masks.shared_prefix: (
        {"answers": IDS, "documents": IDS},
        {"answers": [*OF_IDS, META], "documents": [*OF_IDS[1:], IDS[:1], IDS[:, :1], META]},
    ),
    masks.shift: (
        {"ranges": RANGES, "first_key": 1, "keys": 3},
        {"ranges": OF_RANGES, "first_key": [*NUMBER, None], "keys": [*NUMBER, None]},
    ),
    masks.show: (
        {"ranges": RANGES.expand(2, -1, -1, -1, -1), "seqlen_k": 5},
        {
            "ranges": [*OF_RANGES, RANGES.to("meta"), RANGES[:0]],
            "seqlen_k": LENGTH,
            "causal": FLAG,
            "window": [-1, "3", 2.0, True, (1, 2, 3), (-1, None), (1.0, 2), IDS],
            "entry": [*NUMBER, None, 2, 9],
            "block": [4, None, (4,), (4, 0), (4, "4"), (4, 4, 4), (2.0, 2), (True, 4)],
            "width": [*NUMBER, None, 0],
            "png": [3, IDS],
        },
    ),
    masks.sink_window: (
        {"first": 1, "window": 2, "queries": 5},
        {"first": [*NUMBER, None], "window": [*NUMBER, None], "queries": OF_QUERIES, "device": DEVICE},
    ),
    masks.union: ({"one": RANGES, "other": RANGES}, {"one": OTHER_RANGES, "other": OTHER_RANGES}),
}
OTHER_CALLS = [  # of which other arguments are checked
    (
        masks.documents,
        {"cu_seqlens": OFFSETS, "seqlen": 5},
        "cu_seqlens",
        [*TENSOR, OFFSETS[:0], FREED_LENGTHS],
    ),
    (masks.documents, {"cu_seqlens": OFFSETS, "seqlen": 5}, "seqlen", LENGTH),
    (masks.images, {"ids": IDS, "window": 2}, "ids", OF_IDS),
    (
        masks.padding,
        {"attention_mask": IDS > 0, "queries": 3, "causal": True},
        "attention_mask",
        [None, IDS, IDS[0]],
    ),
    (masks.prefix, {"length": OFFSETS, "queries": OFFSETS}, "length", [OFFSETS[:2], OFFSETS.to("meta")]),
    (masks.show, {"ranges": PACKED, "seqlen_k": 5, "window": (3, None)}, "ranges", OF_RANGES),
    (masks.union, {"one": PACKED, "other": PACKED}, "one", [*OF_RANGES, RANGES, PACKED[:1]]),
]
ARGUMENTS = [
    (function, CALLS[function][0], name, CALLS[function][1][name])
    for function in map(masks.__dict__.get, masks.__all__)
    for name in inspect.signature(function).parameters
] + OTHER_CALLS


def names(value: object) -> str:
    """Of a case, its function and its argument."""
    return value if isinstance(value, str) else getattr(value, "__name__", "")


@pytest.mark.parametrize(("function", "right", "argument", "wrong"), ARGUMENTS, ids=names)
def test_wrong_values(function, right, argument, wrong):
    """Each is refused in one sentence of this function that names the argument."""
    assert wrong
    if function is not masks.from_block_mask:
        function(**right)
    for value in wrong:
        with pytest.raises((ValueError, TypeError)) as caught:
            function(**right | {argument: value})
        sentence = str(caught.value)
        assert sentence.startswith(f"flash_cute.masks.{function.__name__}: "), sentence
        assert argument in sentence or "device meta hold no values" in sentence, sentence
        assert "\n" not in sentence


NUMBERS = [0, 1, 3, -1, 2**31, 2**40, sys.maxsize, 2**70, 1.5, float("nan"), 1j]
OBJECTS = [
    None,
    True,
    False,
    "",
    "cpu",
    "meta",
    (),
    (1, 2),
    [1, 2],
    [(0, 1)],
    ["full"],
    {},
    object(),
    print,
    slice(3),
]
TENSORS = [
    *(IDS, IDS[0], IDS[:0], IDS[:, :0], IDS.T, IDS.int(), IDS.byte(), IDS > 0, IDS.float(), IDS + 2**40),
    *(kind for x in (IDS, OFFSETS, RANGES) for kind in (x.to(torch.uint16), x.to(torch.uint32))),
    *(OFFSETS, OFFSETS.long() + 2**40, torch.tensor(3), torch.zeros(0)),
    *(RANGES, PACKED, RANGES.long(), RANGES.byte(), RANGES.float(), RANGES.to("meta"), RANGES[None]),
    *(RANGES[:0], RANGES[:, :, :0], RANGES[..., :0], RANGES[..., :0, :], torch.zeros(1, 1, 1, 1, 1, 2)),
    *(RANGES.expand(2, -1, -1, -1, -1), RANGES.expand(3, -1, -1, -1, -1), META, META[0]),
    *(IDS.to_sparse(), torch.eye(3, dtype=torch.int64).to_sparse_csr(), FREED, FREED_RANGES, FREED_LENGTHS),
    *(torch.nested.nested_tensor([IDS[0], IDS[1]], layout=kind) for kind in (torch.strided, torch.jagged)),
    *(torch.nn.Parameter(torch.zeros(2, 5)), torch.quantize_per_tensor(torch.ones(2, 5), 1, 0, torch.qint8)),
]


@pytest.mark.parametrize(("function", "right", "argument", "wrong"), ARGUMENTS, ids=names)
def test_any_value(function, right, argument, wrong):
    """Of whatever comes, what is not taken is refused in a sentence of ours."""
    foreign = []
    for value in (*wrong, *NUMBERS, *OBJECTS, *TENSORS):
        if argument in ("png", "device") and isinstance(value, str):
            continue  # files and devices that are there
        try:
            function(**right | {argument: value})
        except Exception as error:
            if not is_ours(error):
                foreign.append((value, error))
    assert not foreign


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32])
def test_unsigned_integers(dtype):
    """PyTorch compares only some of them."""
    ids = IDS[:, :4]
    for make in (
        masks.documents,
        lambda ids: masks.images(ids, window=1),
        lambda ids: masks.shared_prefix(ids, ids),
        lambda ids: masks.padding(ids, causal=True),
        lambda ids: masks.prefix(ids[:, 0], ids),
        lambda ids: masks.chunks(2, ids, leftpad=ids[:, 1]),
        lambda ids: masks.union(masks.causal(ids).to(ids.dtype), masks.causal(ids)),
        lambda ids: masks.shift(masks.causal(ids).to(ids.dtype), 1, 2),
        lambda ids: masks.positions(ids[1, :3], 4),
    ):
        assert torch.equal(make(ids.to(dtype)), make(ids))


def test_integers_of_numpy():
    numpy = pytest.importorskip("numpy")
    two, four = numpy.int64(2), numpy.int32(4)
    for one, other in (
        (masks.chunks(two, four), masks.chunks(2, 4)),
        (masks.sink_window(two, two, four), masks.sink_window(2, 2, 4)),
        (masks.images(IDS, window=two), masks.images(IDS, window=2)),
        (masks.documents(cu_seqlens=OFFSETS, seqlen=four), masks.documents(cu_seqlens=OFFSETS, seqlen=4)),
        (masks.padding(IDS > 0, four, runs=two), masks.padding(IDS > 0, 4, runs=2)),
        (masks.block_diffusion(two, four), masks.block_diffusion(2, 4)),
        (masks.positions(OFFSETS, four), masks.positions(OFFSETS, 4)),
        (masks.shift(RANGES, two, four), masks.shift(RANGES, 2, 4)),
        (
            masks.from_slices([(numpy.int64(0), two)], [(two, four)], ["both"], four),
            masks.from_slices([(0, 2)], [(2, 4)], ["both"], 4),
        ),
        (
            masks.from_mask_mod(lambda b, h, q, kv: q >= kv, numpy.int64(1), four, four),
            masks.from_mask_mod(lambda b, h, q, kv: q >= kv, 1, 4, 4),
        ),
    ):
        assert torch.equal(one, other)
    drawn = masks.show(RANGES, four, window=(two, None), entry=numpy.int64(0), block=(two, two), width=two)
    assert drawn == masks.show(RANGES, 4, window=(2, None), block=(2, 2), width=2)
    with pytest.raises(ValueError, match=r"size must be an int >= 1, got array\(\[2, 2\]\)"):
        masks.chunks(numpy.full(2, 2), 4)


def test_block_masks_without_values():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    block_mask = flex.create_block_mask(lambda b, h, q, kv: q >= kv, 1, None, 300, 300, device="cpu")
    with pytest.raises(ValueError, match=r"^flash_cute\.masks\.from_block_mask: tensors on device meta hold"):
        masks.from_block_mask(block_mask.to("meta"))
    block_mask.kv_indices = freed(block_mask.kv_indices)
    sentence = r"^flash_cute\.masks\.from_block_mask: block_mask\.kv_indices must have a storage of at least"
    with pytest.raises(ValueError, match=sentence):
        masks.from_block_mask(block_mask)


def test_names_of_other_libraries():
    """Every function answers them."""
    for function in map(masks.__dict__.get, masks.__all__):
        sentence = rf"^flash_cute\.masks\.{function.__name__}: there is no argument dropout, as there is"
        with pytest.raises(TypeError, match=sentence):
            function(dropout=0.1)
    with pytest.raises(TypeError, match=r"did you mean ranges, which flash_cute\.masks\.from_dense makes"):
        masks.show(attn_mask=None)
