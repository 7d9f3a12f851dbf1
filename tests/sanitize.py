"""Every kernel on small shapes under compute-sanitizer: bounds, races, uninitialised reads and barriers.

    python tests/sanitize.py                   all four tools
    python tests/sanitize.py memcheck          one of them
    python tests/sanitize.py --parts softmax   some of the calls
    python tests/sanitize.py --bare            the calls alone, as each tool runs them

Inputs are drawn and results checked on the CPU, so that nearly all the kernels that a tool sees are ours.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))

from support.appends import LAYOUTS, PLACES, ROTARIES, assert_appended, make_append
from support.caches import in_pages
from support.cases import (
    ALL_DTYPES,
    BATCHES,
    DTYPES,
    MASKS,
    Ranged,
    Shape,
    make_gradients,
    make_inputs,
    make_ragged,
    make_ragged_gradients,
    with_head_dim,
)
from support.kernels import families
from support.ranges import KINDS, make_ranges, ranges_of_sequences
from support.tolerance import (
    assert_attention,
    assert_gradients,
    assert_ragged,
    assert_ragged_gradients,
    assert_within_rule,
)

import flash_cute
from flash_cute import reference
from flash_cute._cpu.softmax import hidden_columns

SOFTMAX_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LENGTHS = ("seqused_k", "leftpad_k")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# initcheck does not see what TMA stores: a copy of the result to the CPU would be reported for every byte.
OPTIONS = {"initcheck": ("--check-api-memory-access", "no")}
# Two tiles of queries, several of keys, none of them full; and rows that see nothing.
SIZES = {"rows": (150, 201), "blind": (201, 50)}
# For each type and head dim: more tiles than multiprocessors, so that a block goes from one to the next, and
# few queries of heads that share K and V; and keys enough for the backward on Hopper to find delta beside
# products.
SHAPES = {
    "many_tiles": Shape(3, 55, 55, 130, 70, 0),
    "few_queries": Shape(2, 14, 2, 19, 201, 0),
    "many_keys": Shape(1, 2, 2, 130, 600, 0),
}
# Of v's own: the pair that Hopper has a kernel for, and a wider one.
WIDTHS = (192, 128), (64, 256)
# Of cases.BATCHES: how many heads share K and V, and the mask.
RAGGED = (
    ("unequal", (2, 1), "causal"),
    ("used and left padding", (2, 2), "window_symmetric"),
    ("some empty", (2, 1), "full"),
    ("one query each", (14, 2), "causal"),
    ("many keys", (2, 2), "full"),
)
# initcheck does not see what TMA stores: out, and sums of dQ; racecheck not what orders the lanes of a warp
# (docs/sanitizer.md).
BLIND = ("initcheck", "racecheck")
BACKWARD_FAMILIES = ("sm80",) if os.environ.get("FLASH_CUTE_SANITIZER") in BLIND else ("sm80", "sm90")


def compiled(family: str, dtypes: dict[str, torch.dtype]) -> list[tuple[torch.dtype, list[int]]]:
    """Of these types the head dims of kernels. Those of TF32 differ from float32's in a constant alone."""
    elements = flash_cute.supported()["families"].get(family, {})
    return [(dtypes[name], head_dims) for name, head_dims in elements.items() if name in dtypes]


def calls():
    """(family, mask, shape, dtype) of every call: each kernel at its own head dim and just below it.

    Of v's own widths all that there is: kernels of a pair, and of the wider one.
    """
    for family in families(torch.device("cuda")):
        for dtype, head_dims in compiled(family, ALL_DTYPES):
            for head_dim, mask in itertools.product(head_dims, ("full", "causal", "window_symmetric")):
                for size, narrower in ((SIZES["rows"], 0), (SIZES["blind"], 8)):
                    yield family, MASKS[mask], Shape(1, 2, 1, *size, head_dim - narrower), dtype
            for head_dim, shape in itertools.product(head_dims, SHAPES.values()):
                yield family, MASKS["causal"], with_head_dim(shape, head_dim), dtype
            for widths, mask in itertools.product(WIDTHS, ("full", "causal")):
                yield family, MASKS[mask], Shape(1, 2, 1, *SIZES["rows"], *widths), dtype


def ragged_calls():
    """(family, mask, batch) of unequal lengths: each kernel, packed and padded, and heads that are packed."""
    for family in families(torch.device("cuda")):
        for dtype, head_dims in compiled(family, ALL_DTYPES):
            for head_dim, packed in itertools.product(head_dims, (True, False)):
                for name, heads, mask in RAGGED:
                    yield (
                        family,
                        MASKS[mask],
                        make_ragged(BATCHES[name], heads, head_dim, dtype, "cpu", packed, "padded_columns"),
                    )


# Some lanes, a warp, several warps, a block of 1024 threads, several blocks, which have several tiles; rows
# that don't begin or end at multiples of 16 bytes.
COLUMNS = (3, 64, 250, 512, 1500, 4096, 10_001, 32_768, 70_001, 2**20)
HIDING = ({}, {"leftpad_k": [1, 0], "seqused_k": [3, 2]}, {"causal": True})
Changed = namedtuple("Changed", ["options"])  # as a mask of support.cases has them
deterministic = itertools.cycle((False, True, False))


def check_softmax() -> None:
    """Forward and backward of each tile of rows, plain and with hidden columns, beside PyTorch's."""
    for dtype, columns, hiding in itertools.product(SOFTMAX_DTYPES, COLUMNS, HIDING):
        x = torch.randn(2, 3 if columns < 2**20 else 1, columns).to(dtype)
        lengths = {name: torch.tensor(n, dtype=torch.int32) for name, n in hiding.items() if name != "causal"}
        hidden = hidden_columns(x.shape, "causal" in hiding, *map(lengths.get, LENGTHS), x.device)
        leaf, given = x.to("cuda").requires_grad_(), torch.randn(x.shape).to(dtype)
        on_gpu = {name: tensor.to("cuda") for name, tensor in lengths.items()}
        results = flash_cute.softmax(leaf, causal="causal" in hiding, **on_gpu)
        (found,) = torch.autograd.grad(results[0], leaf, given.to("cuda"))
        p = x.double().masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0)
        dx = p * (given.double() - (p * given.double()).sum(-1, keepdim=True))
        for result, oracle in ((results[0], p), (found, dx)):
            torch.testing.assert_close(result.detach().cpu(), oracle.to(dtype), rtol=2e-2, atol=1e-5)


def check_ragged() -> None:
    for family, mask, batch in ragged_calls():
        inputs = {"q": batch.q, "k": batch.k, "v": batch.v, **batch.lengths}
        function = flash_cute.forward_varlen if batch.packed else flash_cute.forward
        on_gpu = {name: tensor.to("cuda") for name, tensor in inputs.items()}
        result = function(**on_gpu, family=family, **mask.options)
        assert_ragged([tensor.cpu() for tensor in result], batch, mask)
        if family in BACKWARD_FAMILIES:
            given = make_ragged_gradients(batch)
            found = gradients(function, on_gpu, given, mask, family, next(deterministic))
            assert_ragged_gradients(found, batch, *given, mask)


def check_pages() -> None:
    """Keys in pages, cut into parts and not: each kernel that reads them."""
    names = "unequal", "used and left padding", "many keys", "one query each"
    for family in families(torch.device("cuda")):
        for dtype, head_dims in compiled(family, DTYPES):
            for head_dim, name, page_size in itertools.product(head_dims, names, (1, 16, 100)):
                batch = make_ragged(BATCHES[name], (4, 2), head_dim, dtype, "cpu", True)
                k, v, given = in_pages(batch, page_size, "rows first")
                inputs = {"q": batch.q, "k": k, "v": v, **given}
                on_gpu = {name: tensor.to("cuda") for name, tensor in inputs.items()}
                result = flash_cute.forward_varlen(**on_gpu, family=family, causal=True)
                assert_ragged([tensor.cpu() for tensor in result], batch, MASKS["causal"])


def check_ranges() -> None:
    """Each kernel of key ranges, and those that make their tables: dense, packed and padded."""
    kinds = itertools.cycle(KINDS.values())
    for kernel in flash_cute.supported()["kernels"]:
        family, head_dim, dtype = kernel["family"], kernel["head_dim"], DTYPES[kernel["element"]]
        if kernel["variant"] != "general" or family not in families(torch.device("cuda")):
            continue
        sizes = [Shape(2, 2, 1, *SIZES["rows"], head_dim), Shape(2, 2, 1, *SIZES["blind"], head_dim - 8)]
        shapes = [*sizes, *(with_head_dim(shape, head_dim) for shape in SHAPES.values())]
        counts = itertools.cycle((1, 4, 2, 3, 4))
        for shape, name, broadcast in itertools.product(shapes, ("full", "causal"), (True, False)):
            inputs = make_inputs(shape, dtype, "cpu", "padded_columns")
            ranges = make_ranges(shape, next(kinds), next(counts), broadcast, "cpu")
            mask, of_call = (Ranged.of(MASKS[name], x) for x in (ranges, ranges.to("cuda")))
            on_gpu = {name: tensor.to("cuda") for name, tensor in zip("qkv", inputs, strict=True)}
            result = flash_cute.forward(**on_gpu, family=family, **of_call.options)
            assert_attention([tensor.cpu() for tensor in result], *inputs, mask)
            if family in BACKWARD_FAMILIES:
                given = make_gradients(inputs[0])
                found = gradients(flash_cute.forward, on_gpu, given, of_call, family, next(deterministic))
                assert_gradients(found, *inputs, *given, mask)
        for (name, heads, mask), packed in itertools.product(RAGGED, (True, False)):
            batch = make_ragged(BATCHES[name], heads, head_dim, dtype, "cpu", packed, "padded_columns")
            rows = batch, BATCHES[name], next(kinds), next(counts), MASKS[mask]
            ranges, masks = ranges_of_sequences(*rows)
            of_call = Ranged.of(MASKS[mask], ranges.to("cuda"))
            function = flash_cute.forward_varlen if packed else flash_cute.forward
            inputs = {"q": batch.q, "k": batch.k, "v": batch.v, **batch.lengths}
            on_gpu = {name: tensor.to("cuda") for name, tensor in inputs.items()}
            result = function(**on_gpu, family=family, **of_call.options)
            assert_ragged([tensor.cpu() for tensor in result], batch, masks)
            if family in BACKWARD_FAMILIES:
                given = make_ragged_gradients(batch)
                found = gradients(function, on_gpu, given, of_call, family, next(deterministic))
                assert_ragged_gradients(found, batch, *given, masks)


def check_scores() -> None:
    """Each kernel that hides pairs, changes scores or drops weights: one argument alone, and all together."""
    for kernel in flash_cute.supported()["kernels"]:
        family, head_dim, dtype = kernel["family"], kernel["head_dim"], DTYPES.get(kernel["element"])
        if kernel["variant"] != "general" or family not in families(torch.device("cuda")) or dtype is None:
            continue
        inputs = make_inputs(Shape(2, 4, 2, 150, 210, head_dim), dtype, "cpu", "padded_columns")
        given = make_gradients(inputs[0])
        options = {
            "mask": {"mask": torch.rand(2, 1, 150, 210) < 0.7},
            "bias": {"bias": torch.randn(2, 4, 150, 210).to(dtype)},
            "slopes": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.01])},
            "softcap": {"softcap": 20.0},
            "dropout": {"dropout_p": 0.2, "dropout_seed": torch.tensor([17, head_dim])},
        }
        options["all"] = {name: value for each in options.values() for name, value in each.items()}
        for of_call in options.values():
            check_scores_of(family, inputs, given, of_call)


def check_scores_of(family: str, inputs, given, options: dict) -> None:
    on_gpu = {name: x.to("cuda") if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    tensors = {name: tensor.to("cuda") for name, tensor in zip("qkv", inputs, strict=True)}
    found = [x.cpu() for x in flash_cute.forward(**tensors, family=family, **on_gpu)]
    dtypes = torch.float64, inputs[0].dtype
    exact, rounded = (list(reference.forward(*inputs, dtype=dtype, **options)) for dtype in dtypes)
    if family in BACKWARD_FAMILIES:
        found += gradients(flash_cute.forward, tensors, given, Changed(on_gpu), family, False)
        for results, dtype in zip((exact, rounded), dtypes, strict=True):
            results += reference.backward(*inputs, *given, dtype=dtype, **options)
    for name, *results in zip(("out", "lse", "dq", "dk", "dv"), found, rounded, exact, strict=False):
        assert_within_rule(name, *results)


def check_append() -> None:
    for place, rotary, layout, dtype in itertools.product(PLACES, ROTARIES, LAYOUTS, SOFTMAX_DTYPES):
        call = make_append("cpu", place, rotary, layout, dtype, head_dim=72, heads=(40, 40))
        given = call.arguments.items()
        call.arguments = {name: x.to("cuda") if isinstance(x, torch.Tensor) else x for name, x in given}
        assert_appended(call, flash_cute.append_kv(**call.arguments))


def check_dense() -> None:
    for family, mask, shape, dtype in calls():
        inputs = make_inputs(shape, dtype, "cpu", "padded_columns")
        on_gpu = {name: tensor.to("cuda") for name, tensor in zip("qkv", inputs, strict=True)}
        result = flash_cute.forward(**on_gpu, family=family, **mask.options)
        assert_attention([tensor.cpu() for tensor in result], *inputs, mask)
        if family in BACKWARD_FAMILIES:
            given = make_gradients(inputs[0], head_dim_v=shape.head_dim_v)
            found = gradients(flash_cute.forward, on_gpu, given, mask, family, next(deterministic))
            assert_gradients(found, *inputs, *given, mask)


def check_claimed() -> None:
    """Forwards with more tiles than multiprocessors, long ones of unequal length, which are claimed."""
    for dtype, head_dims in compiled("sm90", DTYPES):
        for head_dim in head_dims:
            inputs = make_inputs(Shape(1, 45, 9, 300, 4300, head_dim), dtype, "cpu")
            result = flash_cute.forward(*(tensor.to("cuda") for tensor in inputs), causal=True)
            assert_attention([tensor.cpu() for tensor in result], *inputs, MASKS["causal"])


def gradients(function, inputs, given, mask, family: str, deterministic: bool) -> list[torch.Tensor]:
    """dq, dk and dv, on the CPU, of a call with these inputs on the GPU."""
    leaves = [inputs[name].requires_grad_() for name in "qkv"]
    results = function(**inputs, deterministic=deterministic, family=family, **mask.options)
    found = torch.autograd.grad(results, leaves, [tensor.to("cuda") for tensor in given])
    return [tensor.cpu() for tensor in found]


PARTS = {
    "ragged": check_ragged,
    "pages": check_pages,
    "ranges": check_ranges,
    "scores": check_scores,
    "dense": check_dense,
    "claimed": check_claimed,
    "append": check_append,
    "softmax": check_softmax,
}


def under(tool: str, parts: list[str]) -> bool:
    """Run the calls under one tool, each tensor in an allocation of its own, so that its ends are known."""
    begin = time.perf_counter()
    command = [
        "compute-sanitizer",
        "--tool",
        tool,
        "--error-exitcode",
        "9",
        *OPTIONS.get(tool, ()),
        sys.executable,
        __file__,
        "--bare",
        "--parts",
        *parts,
    ]
    settings = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "FLASH_CUTE_SANITIZER": tool}
    ran = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    said = [line for line in ran.stdout.splitlines() if line.startswith("=========")]
    print(f"{tool}, {time.perf_counter() - begin:.0f} s: {said[-1] if said else 'no summary'}", flush=True)
    if ran.returncode:
        drawn = [line for line in ran.stdout.splitlines() if line not in said]  # ends with the problem
        print(*said[:40], *drawn[-2:], ran.stderr, sep="\n")
    return ran.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tools", nargs="*", metavar="tool", help="of " + ", ".join(TOOLS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--bare", action="store_true", help="without a tool")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("compute-sanitizer looks at GPU kernels, and there is no GPU here")
    if options.bare:
        for part in options.parts:
            PARTS[part]()
    elif failed := [tool for tool in options.tools or TOOLS if not under(tool, options.parts)]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
