"""Calls with one mistake each, and what a sentence about it looks like."""

from __future__ import annotations

import math

import torch

from support.cases import SHAPES, make_inputs


def inputs(device) -> dict[str, torch.Tensor]:
    """q (2, 6, 150, 64), k and v (2, 2, 190, 64)."""
    return dict(zip("qkv", make_inputs(SHAPES["grouped_heads"], torch.bfloat16, device), strict=True))


def resized(tensors: dict[str, torch.Tensor], names: str, **changes: int) -> dict[str, torch.Tensor]:
    """The tensors so named, random and of the same kind, with some of their sizes changed."""
    dims = "batch", "heads", "seqlen", "head_dim"
    sizes = {name: dict(zip(dims, tensors[name].shape, strict=True)) | changes for name in names}
    return {
        name: torch.randn(*size.values(), device=tensors[name].device).to(tensors[name].dtype)
        for name, size in sizes.items()
    }


def nested(tensor: torch.Tensor, layout: torch.layout = torch.strided) -> torch.Tensor:
    """(batch, heads, ragged, head_dim), as a batch of sequences of unequal lengths."""
    sequences = [part.transpose(0, 1) for part in tensor]
    return torch.nested.nested_tensor(sequences, layout=layout).transpose(1, 2)


def lengths(tensors: dict[str, torch.Tensor], name: str, shape: tuple[int, ...], dtype=torch.int32):
    """An argument of that name, and of the kind that lengths and offsets are, all of them 1."""
    return {name: torch.ones(shape, dtype=dtype, device=tensors["q"].device)}


WRONG_VALUES = {
    "q of three dimensions": (lambda t: {"q": t["q"][0]}, "q 3 dimensions 4"),
    "k of five dimensions": (lambda t: {"k": t["k"][None]}, "k 5 dimensions 4"),
    "v of no dimensions": (lambda t: {"v": t["v"].sum()}, "v 0 dimensions 4"),
    "all float64": (
        lambda t: {n: x.double() for n, x in t.items()},
        "q torch.float64 float16 bfloat16 float32",
    ),
    "all int32": (lambda t: {n: x.int() for n, x in t.items()}, "q torch.int32 float16 bfloat16"),
    "q is quantized": (
        lambda t: {
            "q": torch.quantize_per_tensor(t["q"].float().cpu(), 0.1, 0, torch.qint8).to(t["q"].device)
        },
        "q",
    ),
    "k is quantized": (
        lambda t: {
            "k": torch.quantize_per_tensor(t["k"].float().cpu(), 0.1, 0, torch.qint8).to(t["k"].device)
        },
        "k quantized torch.float16",
    ),
    "all float8": (
        lambda t: {n: x.to(torch.float8_e4m3fn) for n, x in t.items()},
        "q dtype torch.float8_e4m3fn",
    ),
    "k of another dtype": (lambda t: {"k": t["k"].half()}, "k dtype torch.float16 q torch.bfloat16"),
    "v of another dtype": (lambda t: {"v": t["v"].float()}, "v dtype torch.float32 q torch.bfloat16"),
    "k is nested": (lambda t: {"k": nested(t["k"])}, "k nested"),
    "q is nested": (lambda t: {"q": nested(t["q"])}, "q nested layout torch.strided torch.jagged"),
    "k is jagged": (lambda t: {"k": nested(t["k"], torch.jagged)}, "k nested"),
    "q is jagged": (lambda t: {"q": nested(t["q"], torch.jagged)}, "q nested k not"),
    "all jagged, heads last but one": (
        lambda t: {n: nested(x, torch.jagged).transpose(1, 2) for n, x in t.items()},
        "q nested 4 ragged dimension 1 (batch, heads, ragged, head_dim)",
    ),
    "all jagged, each for itself": (
        lambda t: {n: nested(x, torch.jagged) for n, x in t.items()},
        "k v nested different offsets",
    ),
    "jagged and lengths": (
        lambda t: {n: nested(x, torch.jagged) for n, x in t.items()} | {"seqused_k": t["q"]},
        "seqused_k nested",
    ),
    "v is sparse": (lambda t: {"v": t["v"].to_sparse()}, "v torch.sparse_coo"),
    "heads that do not divide": (lambda t: resized(t, "q", heads=5), "q 5 k 2 heads"),
    "fewer query heads": (lambda t: resized(t, "q", heads=1), "q 1 k 2 heads"),
    "no K/V heads": (lambda t: resized(t, "kv", heads=0), "q 6 k 0 heads"),
    "k of another batch": (lambda t: resized(t, "kv", batch=3), "k batch 3 2"),
    "k of another head_dim": (lambda t: resized(t, "kv", head_dim=32), "k head_dim 32 64"),
    "v of another batch": (lambda t: resized(t, "v", batch=1), "v k"),
    "v of other heads": (lambda t: resized(t, "v", heads=6), "v k"),
    "v of another seqlen": (lambda t: resized(t, "v", seqlen=191), "v k 191 190"),
    "v of a head_dim over 256": (lambda t: resized(t, "v", head_dim=264), "head_dim of v is 264; 1 to 256"),
    "v of a head_dim of 0": (lambda t: resized(t, "v", head_dim=0), "head_dim of v is 0; 1 to 256"),
    "head_dim over 256": (lambda t: resized(t, "qkv", head_dim=264), "head_dim 264 256"),
    "head_dim of 0": (lambda t: resized(t, "qkv", head_dim=0), "head_dim 0 256"),
    "left is negative": (lambda t: {"window": (-3, 5)}, "window left -3 >= 0"),
    "right is negative": (lambda t: {"window": (3, -1)}, "window right -1 >= 0"),
    "window is negative": (lambda t: {"window": -7}, "window -7 >= 0"),
    "left is enormous": (lambda t: {"window": (2**70, 0)}, f"window left {2**70}"),
    "right is enormous": (lambda t: {"window": (0, 2**63)}, f"window right {2**63}"),
    "right is negative, causal": (lambda t: {"window": (3, -1), "causal": True}, "window right -1 >= 0"),
    "scale is NaN": (lambda t: {"softmax_scale": math.nan}, "softmax_scale nan finite"),
    "scale is infinite": (lambda t: {"softmax_scale": math.inf}, "softmax_scale inf finite"),
    "scale is zero": (lambda t: {"softmax_scale": 0.0}, "softmax_scale 0 > 0"),
    "scale is negative": (lambda t: {"softmax_scale": -1.0}, "softmax_scale -1 > 0"),
    "scale overflows float32": (lambda t: {"softmax_scale": 1e300}, "softmax_scale 1e+300"),
    "no such family": (lambda t: {"family": "sm70"}, "family sm70 sm80"),
    "a type that torch's stable ABI does not know": (
        lambda t: {"q": torch.empty(t["q"].shape, dtype=torch.float8_e8m0fnu, device=t["q"].device)},
        "q dtype torch.float8_e8m0fnu torch.float16 and torch.bfloat16",
    ),
    "seqused of such a type": (
        lambda t: {"seqused_k": torch.empty(2, dtype=torch.uint4, device=t["q"].device)},
        "seqused_k dtype torch.uint4 torch.int32",
    ),
    "seqused of int64": (lambda t: lengths(t, "seqused_q", (2,), torch.int64), "seqused_q int64 torch.int32"),
    "seqused of bfloat16": (lambda t: lengths(t, "seqused_k", (2,), torch.bfloat16), "seqused_k torch.int32"),
    "leftpad of bools": (lambda t: lengths(t, "leftpad_k", (2,), torch.bool), "leftpad_k torch.bool int32"),
    "a seqused for another batch": (lambda t: lengths(t, "seqused_q", (3,)), "seqused_q (3,) (2,) batch 2"),
    "a seqused of two dimensions": (lambda t: lengths(t, "seqused_k", (2, 1)), "seqused_k (2, 1) (2,)"),
    "a leftpad of no dimensions": (lambda t: lengths(t, "leftpad_k", ()), "leftpad_k () (2,)"),
    "seqused with strides": (
        lambda t: {"seqused_q": lengths(t, "x", (4,))["x"][::2]},
        "seqused_q stride 2 contiguous",
    ),
    "an expanded leftpad": (
        lambda t: {"leftpad_k": lengths(t, "x", (1,))["x"].expand(2)},
        "leftpad_k stride 0 contiguous",
    ),
    "a mask of numbers": (
        lambda t: lengths(t, "mask", (2, 1, 150, 190), torch.float32),
        "mask torch.float32 torch.bool torch.uint8 numbers bias",
    ),
    "a mask of a type that torch's stable ABI does not know": (
        lambda t: {"mask": torch.empty(1, 1, 1, 190, dtype=torch.uint4, device=t["q"].device)},
        "mask dtype torch.uint4 torch.bool and torch.uint8",
    ),
    "a mask of two dimensions": (
        lambda t: lengths(t, "mask", (150, 190), torch.bool),
        "mask (batch or 1, heads_q or 1, seqlen_q or 1, seqlen_k) (2 or 1, 6 or 1, 150 or 1, 190) (150, 190)",
    ),
    "a mask for another batch": (lambda t: lengths(t, "mask", (3, 1, 1, 190), torch.bool), "mask (3, 1, 1,"),
    "a mask for heads of k": (
        lambda t: lengths(t, "mask", (1, 2, 1, 190), torch.bool),
        "mask (1, 2, 1, 190)",
    ),
    "a mask of one column": (lambda t: lengths(t, "mask", (2, 1, 150, 1), torch.bool), "mask 190), got (2,"),
    "bits of as many columns as booleans": (
        lambda t: lengths(t, "mask", (1, 1, 1, 190), torch.uint8),
        "mask seqlen_k / 8 24) (1, 1, 1, 190)",
    ),
    "a mask of more columns than keys": (
        lambda t: lengths(t, "mask", (1, 1, 1, 191), torch.bool) | lengths(t, "seqused_k", (2,)),
        "mask 1 to 190) (1, 1, 1, 191)",
    ),
    "bits of more columns than keys": (
        lambda t: lengths(t, "mask", (1, 1, 1, 25), torch.uint8) | lengths(t, "seqused_k", (2,)),
        "mask 1 to 24) (1, 1, 1, 25)",
    ),
    "a bias of float16": (
        lambda t: lengths(t, "bias", (1, 1, 1, 190), torch.float16),
        "bias dtype of q, torch.bfloat16, torch.float16",
    ),
    "a bias of booleans": (lambda t: lengths(t, "bias", (1, 1, 1, 190), torch.bool), "bias torch.bool"),
    "a bias of float64": (lambda t: lengths(t, "bias", (1, 1, 1, 190), torch.float64), "bias torch.float64"),
    "a bias of three dimensions": (
        lambda t: lengths(t, "bias", (6, 150, 190), torch.bfloat16),
        "bias divisor of 2, 6 or 1, 150 or 1, 190 or 1 (6, 150, 190)",
    ),
    "a bias of entries that do not divide the batch": (
        lambda t: lengths(t, "bias", (4, 1, 1, 190), torch.float32),
        "bias divisor of 2 (4, 1, 1, 190)",
    ),
    "a bias of no entries": (lambda t: lengths(t, "bias", (0, 1, 1, 1), torch.float32), "bias (0, 1, 1, 1)"),
    "a bias for heads of k": (lambda t: lengths(t, "bias", (1, 2, 1, 1), torch.float32), "bias (1, 2, 1, 1)"),
    "a bias of fewer columns beside lengths": (
        lambda t: lengths(t, "bias", (1, 1, 1, 64), torch.bfloat16) | lengths(t, "seqused_k", (2,)),
        "bias (1, 1, 1, 64)",
    ),
    "slopes of bfloat16": (
        lambda t: lengths(t, "alibi_slopes", (6,), torch.bfloat16),
        "alibi_slopes torch.bfloat16 torch.float32",
    ),
    "slopes for heads of k": (
        lambda t: lengths(t, "alibi_slopes", (2,), torch.float32),
        "alibi_slopes (heads_q,) (batch, heads_q) (6,) (2, 6) (2,)",
    ),
    "slopes for another batch": (
        lambda t: lengths(t, "alibi_slopes", (1, 6), torch.float32),
        "alibi_slopes (2, 6), got (1, 6)",
    ),
    "a slope of no dimensions": (lambda t: lengths(t, "alibi_slopes", (), torch.float32), "alibi_slopes ()"),
    "softcap is negative": (lambda t: {"softcap": -30.0}, "softcap -30 0, for none, finite number > 0"),
    "softcap is NaN": (lambda t: {"softcap": math.nan}, "softcap nan finite"),
    "softcap is infinite": (lambda t: {"softcap": math.inf}, "softcap inf finite"),
    "softcap vanishes in float32": (lambda t: {"softcap": 1e-50}, "softcap 1e-50"),
    "dropout_p is negative": (lambda t: {"dropout_p": -0.1}, "dropout_p -0.1 from 0 to less than 1"),
    "dropout_p is 1": (lambda t: {"dropout_p": 1}, "dropout_p 1; from 0 to less than 1"),
    "dropout_p is NaN": (lambda t: {"dropout_p": math.nan}, "dropout_p nan"),
    "dropout_p that keeps nothing": (
        lambda t: {"dropout_p": 0.9999},
        "dropout_p 0.9999 keeps no weight 4096 0.999878",
    ),
    "a seed of int32": (
        lambda t: {"dropout_p": 0.5} | lengths(t, "dropout_seed", (2,)),
        "dropout_seed torch.int32 torch.int64",
    ),
    "a seed of one number": (
        lambda t: {"dropout_p": 0.5} | lengths(t, "dropout_seed", (1,), torch.int64),
        "dropout_seed (2,), got (1,)",
    ),
}
WRONG_PACKED = {
    "q of four dimensions": (lambda t: {"q": t["q"][None]}, "q 4 dimensions 3 (total, heads, head_dim)"),
    "v of two dimensions": (lambda t: {"v": t["v"][0]}, "v 2 dimensions 3 (total, heads, head_dim)"),
    "q of float32": (lambda t: {"q": t["q"].float()}, "k torch.bfloat16 q torch.float32"),
    "v of another total": (lambda t: {"v": t["v"][1:]}, "v k 379 380"),
    "heads that do not divide": (lambda t: {"q": t["q"][:, :5]}, "q 5 k 2 heads"),
    "k of another head_dim": (lambda t: {n: t[n][..., :32] for n in "kv"}, "k head_dim 32 64"),
    "q is nested": (lambda t: {"q": nested(t["q"][None], torch.jagged)}, "q nested dense"),
    "offsets of int64": (lambda t: lengths(t, "cu_seqlens_q", (3,), torch.int64), "cu_seqlens_q int64 int32"),
    "offsets of another batch": (
        lambda t: lengths(t, "cu_seqlens_k", (2,)),
        "cu_seqlens_k (2,) (3,) batch 2",
    ),
    "offsets of two dimensions": (
        lambda t: lengths(t, "cu_seqlens_q", (1, 3)),
        "cu_seqlens_q (1, 3) (batch + 1,)",
    ),
    "empty offsets": (lambda t: lengths(t, "cu_seqlens_q", (0,)), "cu_seqlens_q (0,) (batch + 1,)"),
    "offsets with strides": (
        lambda t: {"cu_seqlens_q": lengths(t, "x", (5,))["x"][::2]},
        "cu_seqlens_q stride 2",
    ),
    "as many lengths as offsets": (lambda t: lengths(t, "seqused_q", (3,)), "seqused_q (3,) (2,) batch 2"),
    "leftpad of int64": (lambda t: lengths(t, "leftpad_k", (2,), torch.int64), "leftpad_k int64 int32"),
    "left is negative": (lambda t: {"window": (-3, 5)}, "window left -3 >= 0"),
    "scale is NaN": (lambda t: {"softmax_scale": math.nan}, "softmax_scale nan finite"),
    "a mask": (lambda t: lengths(t, "mask", (2, 1, 1, 380), torch.bool), "mask None cu_seqlens_q"),
    "a bias": (lambda t: lengths(t, "bias", (1, 1, 1, 1), torch.bfloat16), "bias None cu_seqlens_q"),
    "slopes for as many as offsets": (
        lambda t: lengths(t, "alibi_slopes", (3, 6), torch.float32),
        "alibi_slopes (6,) (2, 6), got (3, 6)",
    ),
    "softcap is negative": (lambda t: {"softcap": -30.0}, "softcap -30"),
    "dropout_p is 1": (lambda t: {"dropout_p": 1.0}, "dropout_p 1"),
    "a seed of two dimensions": (
        lambda t: {"dropout_p": 0.5} | lengths(t, "dropout_seed", (1, 2), torch.int64),
        "dropout_seed (2,), got (1, 2)",
    ),
}
# Of flash_cute::_bias_gradient, beside those of other operators of the backward.
WRONG_BIAS_GRADIENTS = {
    "dv of a bias for all": (
        lambda t: {"needs_dv": True},
        "bias (1, 1, 1, 1) (2, 6, 150, 190) is accepted where needs_dv is True",
    ),
    "no bias": (lambda t: {"bias": None}, "bias is None; a tensor is accepted"),
    "a bias of float32": (lambda t: {"bias": t["bias"].float()}, "bias dtype of q, torch.bfloat16 float32"),
    "a bias for heads of k": (lambda t: {"bias": t["bias"].expand(1, 2, 1, 1)}, "bias (1, 2, 1, 1)"),
    "bias_scale is zero": (lambda t: {"bias_scale": 0.0}, "bias_scale is 0; a finite number > 0"),
    "bias_scale is NaN": (lambda t: {"bias_scale": math.nan}, "bias_scale is nan; a finite number > 0"),
    "bias_scale overflows float32": (lambda t: {"bias_scale": 1e300}, "bias_scale is 1e+300; finite"),
}
# Of flash_cute::_weights, beside those of lse and k.
WRONG_WEIGHTS = {
    "lse of another shape": (lambda t: {"lse": t["lse"][:1]}, "lse has shape as q"),
    "lse of another dtype": (lambda t: {"lse": t["lse"].double()}, "lse torch.float64 torch.float32"),
    "lse elsewhere": (lambda t: {"lse": t["lse"].to("meta")}, "lse meta q same"),
    "k of another head_dim": (lambda t: {"k": t["k"][..., :32]}, "k head_dim 32 64"),
    "a bias of float32": (
        lambda t: lengths(t, "bias", (1, 1, 1, 1), torch.float32),
        "bias dtype of q, torch.bfloat16 float32",
    ),
}
# Of softmax_matmul, given x (2, 6, 150, 190) and v (2, 2, 190, 64).
WRONG_MATMULS = {
    "x is a list": (lambda t: {"x": [[1.0]]}, "x list torch.Tensor"),
    "v is None": (lambda t: {"v": None}, "v NoneType torch.Tensor"),
    "x of three dimensions": (lambda t: {"x": t["x"][0]}, "x has 3 dimensions (batch, heads, seqlen_q,"),
    "v of three dimensions": (lambda t: {"v": t["v"][0]}, "v has 3 dimensions (batch, heads, seqlen_k,"),
    "x is nested": (lambda t: {"x": nested(t["x"])}, "x is nested; dense"),
    "v is sparse": (lambda t: {"v": t["v"].to_sparse()}, "v torch.sparse_coo dense"),
    "x of float32": (lambda t: {"x": t["x"].float()}, "x dtype torch.float32 v torch.bfloat16 the same"),
    "v of float16": (lambda t: {"v": t["v"].half()}, "x dtype torch.bfloat16 v torch.float16 the same"),
    "both of float64": (lambda t: {n: x.double() for n, x in t.items()}, "x must torch.float64 float32"),
    "x elsewhere": (lambda t: {"x": t["x"].to("meta")}, "x is on device meta and v on same"),
    "more columns than rows of v": (lambda t: {"v": t["v"][:, :, 1:]}, "x 190 columns v 189 rows"),
    "x of another batch": (lambda t: {"x": t["x"].expand(2, 2, 6, 150, 190)[:, 0].repeat(2, 1, 1, 1)},
                           "x has batch 4 and v 2; v's or 1"),
    "heads that do not divide": (lambda t: {"x": t["x"][:, :5]}, "x has 5 heads and v 2; a multiple"),
    "v of no heads": (lambda t: {"v": t["v"][:, :0]}, "x has 6 heads and v 0;"),
    "a head_dim over 256": (lambda t: {"v": t["v"].repeat(1, 1, 1, 5)}, "head_dim of v is 320; 1 to 256"),
    "scale is zero": (lambda t: {"scale": 0.0}, "scale is 0; a finite number > 0"),
    "scale is negative": (lambda t: {"scale": -1}, "scale is -1; a finite number > 0"),
    "scale is NaN": (lambda t: {"scale": math.nan}, "scale is nan; finite"),
    "scale overflows float32": (lambda t: {"scale": 1e300}, "scale is 1e+300; finite"),
    "scale is text": (lambda t: {"scale": "1"}, "scale is '1'; a number"),
    "scale is longer than a float": (lambda t: {"scale": 10**400}, "scale is inf; finite"),
    "causal is a number": (lambda t: {"causal": 1}, "causal 1 True False"),
    "window is negative": (lambda t: {"window": -7}, "window -7 >= 0"),
    "a mask for another batch": (
        lambda t: {"mask": torch.ones(3, 1, 1, 190, dtype=torch.bool, device=t["x"].device)},
        "mask (2 or 1, 6 or 1, 150 or 1, 190) (3, 1, 1, 190)",
    ),
    "a mask of numbers": (lambda t: {"mask": t["x"]}, "mask torch.bfloat16 torch.bool numbers x"),
    "a mask that is a list": (lambda t: {"mask": [[True]]}, "mask list torch.Tensor"),
    "lengths of int64": (
        lambda t: {"seqused_k": torch.ones(2, dtype=torch.int64, device=t["x"].device)},
        "seqused_k int64 torch.int32",
    ),
    "dropout_p is 1": (lambda t: {"dropout_p": 1.0}, "dropout_p 1"),
    "no such family": (lambda t: {"family": "sm70"}, "family sm70 sm80"),
    "a bias": (lambda t: {"bias": t["x"]}, "no argument bias, as there is no bias leave it out?"),
    "forward's softmax_scale": (lambda t: {"softmax_scale": 1.0}, "did you mean scale?"),
    "a cache in pages": (lambda t: {"block_table": None}, "no argument block_table seqused_k"),
}  # fmt: skip
# Of attention_weights, given q and k.
WRONG_LOOKS = {
    "q is a list": (lambda t: {"q": [[1.0]]}, "q list torch.Tensor"),
    "packed sequences": (lambda t: {n: x[0] for n, x in t.items()}, "q has 3 dimensions; 4 (batch, heads,"),
    "k of three dimensions": (lambda t: {"k": t["k"][0]}, "k has 3 dimensions; 4 (batch, heads, seqlen"),
    "offsets": (lambda t: {"cu_seqlens_q": None}, "no argument cu_seqlens_q"),
    "a cache in pages": (lambda t: {"block_table": None}, "no argument block_table"),
    "jagged tensors": (lambda t: {n: nested(x, torch.jagged) for n, x in t.items()}, "q is nested; dense"),
    "k of another head_dim": (lambda t: {"k": t["k"][..., :32]}, "k head_dim 32 64"),
    "k of another batch": (lambda t: {"k": t["k"][:1]}, "k batch 1 q 2"),
    "heads that do not divide": (lambda t: {"q": t["q"][:, :5]}, "q 5 k 2 heads"),
    "k of another dtype": (lambda t: {"k": t["k"].half()}, "k dtype torch.float16 q torch.bfloat16"),
    "both of float64": (lambda t: {n: x.double() for n, x in t.items()}, "q must torch.float64 float32"),
    "dropout": (lambda t: {"dropout_p": 0.5}, "dropout_p no dropout leave it out?"),
    "too many": (lambda t: {"max_elements": 341999}, "342000 weights; at most max_elements, 341999,"),
    "max_elements is text": (lambda t: {"max_elements": "all"}, "max_elements 'all' int None"),
    "scale is zero": (lambda t: {"softmax_scale": 0.0}, "softmax_scale 0 > 0"),
}


def assert_one_sentence(message: str, words: str, function: str = "forward") -> None:
    """function: the name in front of the sentence; empty for an operator, which no face has called."""
    assert message.startswith(f"flash_cute.{function}: " if function else "flash_cute: "), message
    assert "\n" not in message, message
    assert len(message) < 350, message  # that which names all arguments of explain has 333
    for leftover in (".cpp", ".hpp", "Exception raised", "c10", "RuntimeError", "aten::"):
        assert leftover not in message, message
    for word in words.split():
        assert word in message, f"{word!r} is not in: {message}"


def packed(device) -> dict[str, torch.Tensor]:
    """Two sequences: q (300, 6, 64), k and v (380, 2, 64), cu_seqlens_q and cu_seqlens_k."""
    tensors = {name: x.transpose(1, 2).flatten(0, 1) for name, x in inputs(device).items()}
    offsets = {"cu_seqlens_q": [0, 150, 300], "cu_seqlens_k": [0, 100, 380]}
    return tensors | {
        name: torch.tensor(values, dtype=torch.int32, device=device) for name, values in offsets.items()
    }
