"""The Python package around the kernels: what is compiled, what a call would run, the newcomer's main job."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.cases import DTYPES, INSTANCES, MASKS, ROOT, SHAPES, Shape, make_inputs

import flash_cute
from flash_cute.explanation import INTERNALS, Explanation, Rates


@pytest.mark.gpu
def test_everything_listed_is_compiled():
    found = flash_cute.supported()
    compiled = {
        (direction, family, element, head_dim)
        for direction, families in (("forward", found["families"]), ("backward", found["backward"]))
        for family, elements in families.items()
        for element, head_dims in elements.items()
        for head_dim in head_dims
    }
    assert compiled == {
        (direction, family, element, int(head_dim))
        for direction, family, head_dim, *_, elements in INSTANCES
        for element in elements
    }
    assert all(kernel["smem_bytes"] > 0 for kernel in found["kernels"])


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("shape", [SHAPES[name] for name in ("grouped_heads", "more_keys", "more_queries")])
def test_explain_counts_the_work(kernel, shape, mask):
    q, k, v = make_inputs(shape, torch.bfloat16, kernel.device)
    plan = flash_cute.explain(q, k, v, family=kernel.family, **mask.options)
    pairs = mask.visible(shape.seqlen_q, shape.seqlen_k).sum().item()
    assert plan["flops"] == 4 * shape.head_dim * shape.batch * shape.heads_q * pairs
    assert plan["bytes"] == 2 * (2 * q.numel() + k.numel() + v.numel()) + 4 * q[..., 0].numel()


@pytest.mark.parametrize("width", [24, 96])
def test_explain_counts_the_work_of_two_widths(kernel, width):
    q, k, _ = make_inputs(Shape(2, 4, 2, 15, 19, 64), torch.bfloat16, kernel.device)
    v = torch.zeros(2, 2, 19, width, dtype=torch.bfloat16, device=kernel.device)
    plan = flash_cute.explain(q, k, v, family=kernel.family)
    pairs, rows = 2 * 4 * 15 * 19, 2 * 4 * 15
    assert (plan["head_dim"], plan["head_dim_v"]) == (64, width)
    assert plan["softmax_scale"] == 1 / 8
    assert plan["flops"] == 2 * (64 + width) * pairs
    assert plan["written_bytes"] == 2 * rows * width + 4 * rows
    assert kernel.family or f"in float32; columns of zeros make all {max(64, width)} wide" in str(plan)
    inputs = 2 * (q.numel() + k.numel() + v.numel())
    assert plan["bytes"] == inputs + plan["written_bytes"]
    plan = flash_cute.explain(q, k, v, family=kernel.family, backward=True)
    assert plan["flops"] == 2 * (3 * 64 + 2 * width) * pairs
    assert plan["written_bytes"] == inputs
    assert plan["bytes"] == 2 * inputs + 2 * 2 * rows * width + 4 * rows


def test_explain_tells_of_ranges_and_sinks():
    q, k, v = make_inputs(Shape(2, 4, 2, 15, 19, 8), torch.bfloat16, "cpu")
    ranges = torch.tensor([[[0, 4], [6, 9]]] * 15, dtype=torch.int32)[None, None]
    plan = flash_cute.explain(q, k, v, ranges=ranges, sinks=torch.zeros(4))
    assert (plan["ranges"], plan["sinks"]) == (2, True)
    assert "\nranges    2 of keys for each query" in str(plan)
    assert "\nsinks     a logit for each query head" in str(plan)
    plain = flash_cute.explain(q, k, v)
    assert (plain["ranges"], plain["sinks"]) == (0, False)
    assert "ranges" not in str(plain)
    assert "sinks" not in str(plain)
    with pytest.raises(ValueError, match=r"^flash_cute\.explain: sinks must have shape \(heads_q,\)"):
        flash_cute.explain(q, k, v, sinks=torch.zeros(3))
    with torch.autocast("cpu", torch.bfloat16):  # sinks of q's type are read as float32, as in forward
        flash_cute.explain(q.half(), k.half(), v.half(), sinks=torch.zeros(4).half())


@pytest.mark.parametrize("backward", [False, True])
def test_explain_tells_of_scores(backward):
    q, k, v = make_inputs(Shape(2, 4, 2, 15, 19, 8), torch.bfloat16, "cpu")
    options = {"bias": torch.zeros(1, 4, 15, 19), "alibi_slopes": torch.ones(4), "softcap": 30}
    bits = torch.ones(2, 1, 1, 3, dtype=torch.uint8)
    plan = flash_cute.explain(q, k, v, mask=bits, dropout_p=0.1, backward=backward, **options)
    shown = str(plan)
    assert (plan["mask"], plan["bias"], plan["alibi_slopes"]) == ("bits", (1, 4, 15, 19), (4,))
    assert (plan["softcap"], plan["dropout_keep"]) == (30, 3686 / 4096)
    assert plan["copies"] == ["bias: it is rounded from torch.float32 to torch.bfloat16"]
    assert (
        "\nmask      a bit for each pair, 8 keys a byte\nbias      (1, 4, 15, 19), added to scores" in shown
    )
    assert (
        "\nalibi     slopes (4,), times the distance\nsoftcap   scores are less than 30 either way" in shown
    )
    assert "\ndropout   keeps 3686 of 4096 weights, by a bit for each pair" in shown
    seen = flash_cute.explain(q, k, v, mask=torch.ones(1, 1, 1, 19, dtype=torch.bool), backward=backward)
    assert (seen["mask"], seen["copies"]) == ("bool", [])
    assert "\nmask      a boolean for each pair" in str(seen)
    plain = flash_cute.explain(q, k, v, backward=backward)
    absent = {"mask": None, "bias": None, "alibi_slopes": None, "softcap": 0, "dropout_keep": 1}
    assert {name: plain[name] for name in absent} == absent
    assert not any(f"\n{word}" in str(plain) for word in ("mask", "bias", "alibi", "softcap", "dropout"))
    assert ("PyTorch's operators" in shown, "PyTorch's operators" in str(plain)) == (True, False)


def test_explain_tells_of_the_gradient_of_a_bias(kernel):
    """What computes it, beside the other gradients; in neither a forward nor without a bias."""
    q, k, v = make_inputs(Shape(2, 4, 2, 15, 19, 64), torch.bfloat16, kernel.device)
    options = {"bias": torch.zeros(1, 4, 15, 19, device=kernel.device), "family": kernel.family}
    plan = flash_cute.explain(q, k, v, **options, backward=True)
    assert plan["bias_gradient"]["family"] == (kernel.family or "cpu")
    assert (plan["bias_gradient"]["workspace_bytes"] > 0) == (kernel.family is not None)
    assert f"\ndbias     {kernel.family or 'cpu'}, scores and their gradients once more where" in str(plan)
    forward = flash_cute.explain(q, k, v, **options)
    plain = flash_cute.explain(q, k, v, family=kernel.family, backward=True)
    assert "bias_gradient" not in forward
    assert plain["bias_gradient"] is None
    assert "dbias" not in str(forward) + str(plain)


@pytest.mark.parametrize("of_heads", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_explain_counts_the_pairs_that_masks_leave(backward, of_heads):
    """Beside a window, lengths and ranges, and where it is of the last keys alone."""
    q, k, v = make_inputs(Shape(2, 4, 2, 15, 19, 8), torch.bfloat16, "cpu")
    used, leftpad = torch.tensor([19, 11], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    ranges = torch.tensor([[[0, 4], [6, 17]]] * 15, dtype=torch.int32)[None, None]
    options = {"window": (9, 3), "seqused_k": used, "leftpad_k": leftpad, "ranges": ranges}
    for columns in (19, 16, 5):
        mask = torch.rand(2, 4 if of_heads else 1, 15, columns) > 0.4
        expected = 0
        for sequence, (last, first) in enumerate(((19, 2), (11, 0))):
            whole = torch.ones(len(mask[0]), 15, 19, dtype=torch.bool)
            begin = 0 if columns == 19 else last - columns
            whole[..., max(0, begin) : begin + columns] = mask[sequence, ..., max(0, -begin) :]
            window = flash_cute.reference.visible(15, last - first, window=(9, 3))
            within = torch.tensor([j < 4 or 6 <= j < 17 for j in range(first, last)])
            expected += (whole[..., first:last] & window & within).sum().item() * (1 if of_heads else 4)
        plan = flash_cute.explain(q, k, v, mask=mask, backward=backward, **options)
        assert plan["flops"] == 2 * (5 if backward else 2) * 8 * expected
        plain = flash_cute.explain(q, k, v, backward=backward, **options)
        assert plan["bytes"] == plain["bytes"] + mask.numel()
        if columns == 16:  # with bits, whole bytes
            weights = torch.tensor([1 << bit for bit in range(8)])
            bits = (mask.unflatten(-1, (2, 8)) * weights).sum(-1).to(torch.uint8)
            of_bits = flash_cute.explain(q, k, v, mask=bits, backward=backward, **options)
            assert of_bits["flops"] == plan["flops"]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("used", [False, True], ids=["dense", "seqused"])
@pytest.mark.parametrize(
    ("heads", "seqlen", "causal"), [(1, 2**28, False), (64, 2**25, True), (2**7, 2**28, True)]
)
def test_explain_counts_more_than_64_bits_hold(heads, seqlen, causal, used, backward):
    row = torch.zeros(64, dtype=torch.bfloat16)
    q, kv = row.expand(1, heads, seqlen, 64), row.expand(1, 1, seqlen, 64)
    lengths = {"seqused_k": torch.tensor([seqlen], dtype=torch.int32)} if used else {}
    plan = flash_cute.explain(q, kv, kv, causal, **lengths, backward=backward)
    pairs = seqlen * (seqlen + 1) // 2 if causal else seqlen**2
    assert plan["flops"] == (10 if backward else 4) * 64 * heads * pairs
    rows = 2 * (heads + 1) * seqlen * (2 if backward else 1)
    assert plan["bytes"] == 2 * 64 * rows + 4 * heads * seqlen
    assert " EFLOP" in str(plan)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 136, 256])
def test_explain_names_the_kernel(kernel, head_dim, dtype):
    q, k, v = make_inputs(Shape(2, 4, 2, 150, 190, head_dim), dtype, kernel.device)
    plan = flash_cute.explain(q, k, v, causal=True, softmax_scale=0.5, family=kernel.family, internals=True)
    assert plan["family"] == (kernel.family or "cpu")
    assert (plan["head_dim"], plan["softmax_scale"]) == (head_dim, 0.5)
    assert (plan["window_left"], plan["window_right"]) == (None, 0)
    assert plan["family"] in str(plan).lower()
    if kernel.family:
        kernels = flash_cute.supported()["families"][kernel.family][plan["element"]]
        assert plan["bucket"] == min(size for size in kernels if size >= head_dim)
        assert plan["local_bytes"] == 0
        assert plan["grid"] > 0


@pytest.mark.parametrize("backward", [False, True])
def test_an_explanation_shows_kernel_and_workspace(backward):
    """Of a plan as a GPU gives it."""
    names = (
        "bucket bucket_v block_m block_n stages packed_heads threads registers local_bytes smem_bytes grid"
    )
    plan = dict.fromkeys(names.split(), 1) | {"flops": 1, "bytes": 1, "copies": [], "backward": backward}
    plan |= {"family": "sm90", "element": "bf16", "window_left": None, "window_right": 0}
    shown = [
        str(Explanation.of(plan | {"workspace_bytes": size}, torch.device("cpu"), internals=True))
        for size in (0, 2_500_000)
    ]
    assert all(("sm90 backward, bf16" if backward else "sm90, bf16") in text for text in shown)
    assert "workspace none" in shown[0]
    assert "workspace 2.5 MB" in shown[1]
    assert "parts" not in shown[0]
    assert "for head_dim up to 1\n" in shown[0]
    of_pair = plan | {"workspace_bytes": 0, "bucket": 192, "bucket_v": 128}
    shown_pair = str(Explanation.of(of_pair, torch.device("cpu")))
    assert "for head_dim up to 192 and, of v, up to 128\n" in shown_pair
    shown = str(Explanation.of(plan | {"partial_results": 264, "workspace_bytes": 0}, torch.device("cpu")))
    assert "keys      cut into parts, up to 264 partial results" in shown
    plan |= {"workspace_bytes": 0, "gqa_splits": 4, "lse_delta_mma": True}
    shown = str(Explanation.of(plan, torch.device("cpu"), internals=True))
    assert "LSE and delta by a product, query heads that share K and V in 4 parts" in shown
    for_users = Explanation.of(plan, torch.device("cpu"))
    assert for_users.keys().isdisjoint(INTERNALS)
    assert plan.keys() - INTERNALS <= for_users.keys()
    assert not any(line.startswith(("tile", "block", "grid")) for line in str(for_users).splitlines())


def test_an_explanation_holds_reads_against_the_rate_of_reading(monkeypatch):
    """As much as is written is copied; one query reads its keys at the rate of reading."""
    rates = Rates(1e15, 4e12, "measured", 5e12)
    assert rates.memory_seconds(10e12, 0) == 2
    assert rates.memory_seconds(12e12, 2e12) == 3
    assert Rates(1e15, 4e12, "estimated").memory_seconds(12e12, 4e12) == 4
    monkeypatch.setattr("flash_cute.explanation.rates_of", lambda device: rates)
    q, k = (torch.zeros(2, heads, rows, 64, dtype=torch.bfloat16) for heads, rows in ((8, 1), (2, 8000)))
    plan = flash_cute.explain(q, k, k)
    assert plan["written_bytes"] == q.numel() * 2 + 16 * 4
    assert plan["roofline"]["bound_by"] == "memory"
    assert plan["roofline"]["seconds"] == pytest.approx(plan["bytes"] / 5e12, rel=1e-2)
    assert "(5 TB/s where it only reads), measured" in str(plan)


@pytest.mark.parametrize(("element", "share"), [("bf16", 1), ("tf32", 2), ("fp32", 6)])
def test_the_roofline_of_float32(monkeypatch, element, share):
    """TF32 has half the rate of 16-bit types, an exact product three of TF32."""
    monkeypatch.setattr("flash_cute.explanation.rates_of", lambda device: Rates(6e14, 4e12, "measured"))
    plan = {"element": element, "flops": 6e14, "bytes": 4, "written_bytes": 1}
    assert Explanation.of(plan, torch.device("cpu"))["roofline"]["seconds"] == pytest.approx(share)


# (batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim), causal: what the launch makes of it.
PLANS = {
    "long": (
        Shape(4, 32, 32, 4096, 4096, 64),
        True,
        {"block_m": 192, "packed_heads": 1, "grid": 132, "workspace_bytes": 4},
    ),
    "short full": (Shape(32, 32, 32, 512, 512, 64), False, {"block_m": 192}),
    "one long head": (Shape(1, 1, 1, 16384, 16384, 64), False, {"block_m": 128, "grid": 128}),
    "short causal": (Shape(32, 32, 32, 512, 512, 64), True, {"block_m": 128}),
    "long full, 128": (Shape(4, 16, 16, 4096, 4096, 128), False, {"block_m": 192}),
    "long causal, 128": (Shape(4, 16, 16, 4096, 4096, 128), True, {"block_m": 128, "workspace_bytes": 4}),
    "longer causal, 128": (Shape(2, 16, 16, 8192, 8192, 128), True, {"block_m": 192, "workspace_bytes": 4}),
    "short causal, 128": (Shape(32, 16, 16, 512, 512, 128), True, {"block_m": 128, "workspace_bytes": 0}),
    "short full, 128": (Shape(32, 16, 16, 512, 512, 128), False, {"block_m": 128}),
    "long causal, 96": (Shape(4, 21, 21, 4096, 4096, 96), True, {"block_m": 192}),
    "fits 192": (SHAPES["rows_that_fit_192"], False, {"block_m": 192}),
    "few queries": (Shape(1, 4, 4, 100, 4096, 64), False, {"block_m": 128, "packed_heads": 1}),
    "one query": (Shape(4, 32, 8, 1, 4096, 128), True, {"packed_heads": 4, "grid": 128}),
    "few queries of 8 heads": (Shape(1, 32, 4, 30, 4096, 128), True, {"packed_heads": 8, "grid": 128}),
    "groups that fill tiles": (Shape(1, 32, 4, 1024, 1024, 128), False, {"packed_heads": 1}),
    "a group larger than a warpgroup's rows": (
        Shape(1, 65, 1, 1, 512, 128),
        False,
        {"packed_heads": 33, "grid": 2},
    ),
    "two warpgroups' rows of heads": (
        Shape(16, 128, 1, 1, 8192, 128),
        False,
        {"packed_heads": 64, "grid": 128},
    ),
    "a prime number of heads": (Shape(1, 134, 2, 1, 512, 128), False, {"packed_heads": 34, "grid": 4}),
}


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "causal", "expected"), PLANS.values(), ids=PLANS)
def test_the_launch_fits_the_problem(shape, causal, expected):
    gpu = torch.cuda.get_device_properties()
    if (gpu.major, gpu.minor, gpu.multi_processor_count) != (9, 0, 132):
        pytest.skip("these are the plans of the sm90 family on 132 multiprocessors")
    plan = flash_cute.explain(*make_inputs(shape, torch.bfloat16, "cuda"), causal=causal, internals=True)
    assert {name: plan[name] for name in expected} == expected
    packing = f"({plan['packed_heads']} heads of each query)"
    assert (packing in str(plan)) == (plan["packed_heads"] > 1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (Shape(32, 32, 32, 512, 512, 64), {"lse_delta_mma": False, "gqa_splits": 1}),
        (Shape(4, 32, 32, 4096, 4096, 64), {"lse_delta_mma": True, "gqa_splits": 1}),
        (Shape(1, 32, 1, 8192, 8192, 64), {"lse_delta_mma": True, "gqa_splits": 8}),
    ],
)
def test_a_plan_tells_which_backward_it_is(shape, expected):
    gpu = torch.cuda.get_device_properties()
    if (gpu.major, gpu.minor, gpu.multi_processor_count) != (9, 0, 132):
        pytest.skip("these are the plans of the sm90 family on 132 multiprocessors")
    inputs = make_inputs(shape, torch.bfloat16, "cuda")
    plan = flash_cute.explain(*inputs, causal=True, backward=True, internals=True)
    assert {name: plan[name] for name in expected} == expected


# Inputs of each layout that the kernels cannot read where they lie.
COPIED = {
    "contiguous": "",
    "transposed": "",
    "padded_columns": "",
    "aligned_start": "",
    "expanded_batch": "",
    "misaligned_start": "qkv",
    "rows_not_16_bytes": "qkv",
    "every_second_element": "qkv",
    "columns_of_rows": "qkv",
    "expanded_columns": "kv",
}


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "copied"), COPIED.items(), ids=COPIED)
def test_explain_names_the_copies(kernel, layout, copied):
    inputs = make_inputs(Shape(2, 4, 2, 150, 190, 64), torch.bfloat16, kernel.device, layout)
    plan = flash_cute.explain(*inputs, family=kernel.family)
    assert [copy.partition(":")[0] for copy in plan["copies"]] == list(copied)
    assert all(reason.partition(": ")[2] for reason in plan["copies"])


MODULES = "masks", "reference"


def test_the_face_is_documented_and_typed():
    for function in (getattr(flash_cute, name) for name in flash_cute.__all__ if name not in MODULES):
        assert inspect.getdoc(function)
        assert inspect.signature(function).return_annotation is not inspect.Signature.empty
    assert any((Path(folder) / "py.typed").exists() for folder in flash_cute.__path__)


def test_attention_and_forward_take_the_same():
    assert (
        inspect.signature(flash_cute.attention).parameters == inspect.signature(flash_cute.forward).parameters
    )
    packed = flash_cute.forward_varlen, flash_cute.attention_varlen
    forward, attention = (inspect.signature(function).parameters for function in packed)
    assert forward == attention
    options = inspect.signature(flash_cute.forward).parameters
    assert [name for name in forward if not name.startswith("cu_seqlens")] == list(options)


def program(folder, *arguments, first_on_path=(), **options):
    """What `python -m` does with these arguments in that folder, by the package that the tests import."""
    path = os.pathsep.join([*map(str, first_on_path), *sys.path, str(ROOT)])
    options = {"stdout": subprocess.PIPE} | options
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, "-m", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True, **options)


def test_main_job(device, tmp_path):
    """It succeeds, compares with SDPA, and has nothing to complain about, also where there is no NumPy."""
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError")
    ran = program(tmp_path, "flash_cute", "--quick", "--device", device.type, first_on_path=[tmp_path])
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "SDPA" in ran.stdout
    assert "NumPy" not in ran.stderr
    assert ("causal, backward" in ran.stdout) == (device.type == "cuda")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["flash_cute.build_report", "nowhere"],
            "flash_cute: [Errno 2] No such file or directory: 'nowhere'",
        ),
        (["flash_cute.build_report", __file__], f"path must be a build_report.json, got {__file__}"),
        (["flash_cute", "--device", "cuda"], "--device must be cpu where there is no GPU"),
    ],
)
def test_programs_say_what_is_wrong(arguments, sentence, tmp_path):
    if arguments[-1] == "cuda" and torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    ran = program(tmp_path, *arguments)
    assert ran.returncode in (1, 2)
    assert sentence in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.usefixtures("build_report_path")
def test_output_that_cannot_be_written(closed, tmp_path):
    """A pipe that is closed says nothing, as of other programs; a disk that is full does."""
    if closed:
        end, target = os.pipe()
        os.close(end)
    else:
        target = os.open("/dev/full", os.O_WRONLY)
    ran = program(tmp_path, "flash_cute.build_report", stdout=target)
    os.close(target)
    assert ran.returncode == 1
    assert ran.stderr == ("" if closed else "flash_cute: [Errno 28] No space left on device\n")
