"""The benchmarks' own logic: counting work, comparing, reporting, and a small run of each on the CPU."""

from __future__ import annotations

import json
import random

import pytest
import torch
from cases import MASKS
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import accuracy, attention, contenders, masks, overhead, profile, report, results, timing
from benchmarks.problem import Problem, paper_grid, parse_shape, parse_window

MATMUL_TFLOPS, COPY_GBS = 700, 3000


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(37, 37), (20, 90), (90, 20), (1, 50), (50, 1)])
def test_pairs_are_the_masks(mask, seqlen_q, seqlen_k):
    problem = Problem(1, 1, 1, seqlen_q, seqlen_k, 64, causal=mask.causal, window=mask.window)
    assert problem.visited_pairs(1, 1) == mask.visible(seqlen_q, seqlen_k).sum().item()


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(37, 37), (20, 90), (90, 20), (1, 50)])
def test_visited_pairs_are_whole_blocks(mask, seqlen_q, seqlen_k):
    problem = Problem(1, 1, 1, seqlen_q, seqlen_k, 64, causal=mask.causal, window=mask.window)
    blocks = 0
    for rows in mask.visible(seqlen_q, seqlen_k).split(16):
        keys = rows.any(0).nonzero()
        blocks += int(keys.max()) // 8 - int(keys.min()) // 8 + 1 if len(keys) else 0
    assert problem.visited_pairs(16, 8) == blocks * 16 * 8


def test_work_of_a_problem():
    problem = Problem(2, 8, 4, 128, 256, 64)
    assert problem.flops == 4 * 2 * 8 * 128 * 256 * 64
    assert problem.bytes == 2 * (2 * 2 * 8 * 128 * 64 + 2 * 2 * 4 * 256 * 64) + 4 * 2 * 8 * 128


def test_default_grid_is_the_papers():
    options = attention.parser().parse_args([])
    grid = attention.problems(options)
    assert len(grid) == 3 * 2 * 6
    assert {p.batch * p.seqlen_q for p in grid} == {16384}
    assert {p.heads_q * p.head_dim for p in grid} == {2048}


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_inputs_have_the_layout(layout):
    q, k, v = Problem(2, 8, 4, 16, 32, 64).inputs("cpu", layout)
    assert q.shape == (2, 8, 16, 64)
    assert k.shape == v.shape == (2, 4, 32, 64)
    assert q.dtype == torch.bfloat16
    assert q.is_contiguous() == (layout == "bhsd")


def test_arguments():
    assert parse_shape("1,32,4,100,200,128") == (1, 32, 4, 100, 200, 128)
    assert parse_window("5") == (5, 5)
    assert parse_window("5,") == (5, None)
    assert parse_window(",0") == (None, 0)
    for wrong in (["--shape", "1,2,3"], ["--window", "1,2,3"], ["--mask", "round"]):
        with pytest.raises(SystemExit):
            attention.parser().parse_args(wrong)


PEERS_CALLED = {  # without a GPU: the operators take fake tensors, and so show that they are called rightly
    "causal": (Problem(2, 8, 8, 64, 64, 64, causal=True), {"flash", "cudnn", "efficient", "math"}),
    "grouped": (Problem(2, 8, 2, 64, 96, 64), {"flash", "cudnn", "efficient", "math"}),
    "window": (Problem(2, 8, 2, 64, 64, 64, causal=True, window=(9, None)), {"flash"}),
    "bottom-right": (Problem(2, 8, 8, 64, 96, 64, causal=True), {"flash"}),
}


@pytest.mark.parametrize(("problem", "able"), PEERS_CALLED.values(), ids=PEERS_CALLED)
def test_peers_are_called_rightly(problem, able):
    with FakeTensorMode() as mode:
        tensors = (mode.from_tensor(tensor) for tensor in problem.inputs("cpu"))
        inputs = [torch.empty_like(tensor, device="cuda") for tensor in tensors]
        for name, peer in contenders.PEERS.items():
            if name not in able:
                with pytest.raises(contenders.CannotRun):
                    peer(problem, *inputs)
                continue
            out, *lse = peer(problem, *inputs)()[:2]
            assert out.shape == inputs[0].shape
            assert all(values.numel() == inputs[0][..., 0].numel() for values in lse)


def test_speedup_is_paired_by_round():
    assert timing.paired_speedup([1, 2, 4], [2, 4, 8]) == 2


def test_interleaved_times_every_function():
    order = []
    functions = {name: (lambda name=name: order.append(name)) for name in "abc"}
    samples = timing.interleaved(functions, torch.device("cpu"), seconds=1e-6)
    assert set(samples) == {"a", "b", "c"}
    assert {len(values) for values in samples.values()} == {timing.ROUNDS.start}
    assert set(timing.summary(samples["a"])) == {"q25", "median", "q75"}


@pytest.fixture(scope="module")
def h100_like() -> dict:
    """Results as attention.py writes them, on the papers' grid, ours 1.1 times as fast as cuDNN."""
    peers = json.loads(report.PEERS_H100.read_text())["cells"]
    known = {(c["d"], c["causal"], c["s"]): c for c in peers if c["mode"] == "fwd"}
    rates = {"matmul_flops": MATMUL_TFLOPS * 1e12, "copy_bytes": COPY_GBS * 1e9}
    draw = random.Random(0)
    cells = []
    for problem in paper_grid(
        16384, 2048, [64, 128, 256], [512, 1024, 2048, 4096, 8192, 16384], [False, True], "bf16"
    ):
        peer = known[problem.head_dim, problem.causal, problem.seqlen_q]
        speeds = {
            "sm80": 1.05 * peer["fa2"],
            "sm90": 1.1 * peer["cudnn"],
            "flash": peer["fa2"],
            "cudnn": peer["cudnn"],
        }
        medians = {name: problem.flops / speed / 1e6 for name, speed in speeds.items()}
        noise = draw.uniform(0.002, 0.02)
        cells.append(
            {
                "problem": problem.to_json(),
                "times_us": {
                    n: {"q25": t * (1 - noise), "median": t, "q75": t * (1 + noise)}
                    for n, t in medians.items()
                },
                "rates": rates,
                "speedup": {
                    o: {p: speeds[o] / speeds[p] for p in ("flash", "cudnn")} for o in ("sm80", "sm90")
                },
                "excluded": {},
            }
        )
    where = dict.fromkeys(("driver", "torch", "cudnn", "commit", "date", "command"), "x")
    where["device"] = "NVIDIA H100 80GB HBM3"
    return {"environment": where, "ours": ["sm80", "sm90"], "peers": ["flash", "cudnn"], "cells": cells}


def test_comparison_with_the_best_known_peer(h100_like):
    baseline = report.baseline_for(h100_like)
    columns = report.comparisons(h100_like, baseline)
    assert list(columns) == [
        "sm80/flash",
        "sm80/cudnn",
        "sm80/best known",
        "sm90/flash",
        "sm90/cudnn",
        "sm90/best known",
    ]
    assert {len(column) for column in columns.values()} == {36}
    for where, ratio in columns["sm90/best known"].items():
        assert ratio == pytest.approx(1.1 / baseline[where])
    assert report.geometric_mean(columns["sm80/flash"].values()) == pytest.approx(1.05)


def test_no_baseline_off_the_h100(h100_like):
    elsewhere = dict(h100_like, environment=h100_like["environment"] | {"device": "another"})
    assert report.baseline_for(elsewhere) == {}
    assert len(report.baseline_for(elsewhere, report.PEERS_H100)) == 36


def test_floor_agrees_with_the_committed_peers(h100_like):
    """Ours counts the causal diagonal, the committed file half the square: less than half a percent apart."""
    peers = json.loads(report.PEERS_H100.read_text())["cells"]
    known = {(c["d"], c["causal"], c["s"]): c["floor_us"] for c in peers if c["mode"] == "fwd"}
    for cell in h100_like["cells"]:
        cell = cell | {"rates": {"matmul_flops": 788e12, "copy_bytes": 3.02e12}}
        problem = cell["problem"]
        where = problem["head_dim"], problem["causal"], problem["seqlen_q"]
        assert report.floor_us(cell) == pytest.approx(known[where], rel=0.01)


def test_markdown_has_every_cell(h100_like):
    text = report.markdown(h100_like, report.baseline_for(h100_like))
    assert sum(line.startswith(("| full, ", "| causal, ")) for line in text.splitlines()) == 36
    assert "| d128, seq <= 2048 |" in text


def test_plot_is_a_picture(h100_like, tmp_path):
    pytest.importorskip("matplotlib")
    report.plot(h100_like, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


TINY = ["--device", "cpu", "--seconds", "0.01"]


def test_attention_then_report(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    tiny = ["--tokens", "64", "--hidden", "64", "--head-dims", "32", "--seqlens", "32,64"]
    path = attention.main([*TINY, *tiny, "--output", str(tmp_path), "--name", "tiny"])
    written = json.loads(path.read_text())
    assert [set(cell["times_us"]) for cell in written["cells"]] == [
        {"cpu", "flash", "math", "matmul", "copy"}
    ] * 4
    report.main([str(path)])
    assert path.with_suffix(".md").exists()
    assert path.with_suffix(".png").exists()
    assert "cpu/flash" in capsys.readouterr().out


def test_a_peer_that_cannot_is_left_out_with_a_reason(tmp_path):
    shape = ["--shape", "1,2,1,32,64,32", "--mask", "causal", "--window", "9,0"]
    path = attention.main([*TINY, *shape, "--output", str(tmp_path)])
    (cell,) = json.loads(path.read_text())["cells"]
    assert cell["excluded"] == {"flash": "no window", "math": "no window"}
    assert cell["speedup"] == {"cpu": {}}


def test_accuracy(tmp_path, capsys):
    accuracy.main(["--device", "cpu", "--shape", "1,2,2,40,60,32", "--seeds", "2", "--output", str(tmp_path)])
    assert "LSE" in capsys.readouterr().out


def test_overhead(tmp_path, capsys):
    overhead.main([*TINY, "--output", str(tmp_path)])
    assert "flash_cute.forward" in capsys.readouterr().out


def test_masks(tmp_path, capsys, monkeypatch):
    """A window that takes as long as the causal problem has its visited blocks' share of the rate."""
    monkeypatch.setattr(timing, "interleaved", lambda functions, *_: {name: [8.0] * 3 for name in functions})
    plan = {"family": "sm90", "block_m": 128, "block_n": 64, "packed_heads": 2}
    monkeypatch.setattr(masks.flash_cute, "explain", lambda *_, **__: plan)
    path = masks.main(["--device", "cpu", "--window", "63,0", "--output", str(tmp_path)])
    assert "share of causal" in capsys.readouterr().out
    causal, grouped, window = json.loads(path.read_text())["dtypes"]["fp16"]["cases"].values()
    assert causal["visited_tflops"] == pytest.approx(4 * 32 * 2 * (1 + 2 + 3 + 4) * 64 * 64 / 8 / 1e6)
    assert grouped["share"]["median"] == pytest.approx(1)
    assert window["share"]["median"] == pytest.approx((1 + 2 + 2 + 2) / (1 + 2 + 3 + 4))


def test_profile(capsys):
    profile.main(["--device", "cpu", "--shape", "1,2,2,40,60,32"])
    assert "ncu" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
def test_without_a_gpu_one_line_says_so(capsys):
    with pytest.raises(SystemExit) as exit_status:
        results.choose_device(None)
    assert exit_status.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
