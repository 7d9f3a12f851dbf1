"""The benchmarks: counting work, calling peers, comparing, and a small run of each program on the CPU."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import kernels
from support.cases import MASKS
from support.precision import Calls, matmul_precision
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend

import flash_cute
from benchmarks import (
    accuracy,
    attention,
    changes,
    contenders,
    lengths,
    masks,
    overhead,
    peers,
    power,
    profile,
    ranges,
    report,
    results,
    scores,
    softmax,
    softmax_matmul,
    timing,
    training,
)
from benchmarks.peers import newer_flash
from benchmarks.peers.base import CannotRun, attempt
from benchmarks.peers.pytorch import Sdpa
from benchmarks.problem import Problem, parse_shape, parse_window
from benchmarks.report.__main__ import main as draw

CPU, GPU = torch.device("cpu"), torch.device("cuda")
RESULTS = sorted(results.FOLDER.glob("*/*.json"))


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


@pytest.mark.parametrize(
    ("direction", "width", "tensors"),
    [("forward", 48 + 32, "qkvo"), ("backward", 3 * 48 + 2 * 32, "qkvodqkv"), ("both", 4 * 48 + 3 * 32, "")],
)
def test_work_where_v_has_a_width_of_its_own(direction, width, tensors):
    problem = Problem(2, 8, 4, 128, 256, 48, 32, direction=direction)
    assert problem.flops == 2 * width * 2 * 8 * 128 * 256
    q, k, v, *dout = problem.inputs("cpu")
    assert [x.shape[-1] for x in (q, k, v, *dout)] == [48, 48, 32, 32][: 3 + len(dout)]
    sizes = {"q": q.nbytes, "k": k.nbytes, "v": v.nbytes} | dict.fromkeys("od", 2 * 2 * 8 * 128 * 32)
    lse = 4 * 2 * 8 * 128
    tensors = tensors or "qkvo" + "qkvodqkv"
    assert problem.bytes == sum(map(sizes.get, tensors)) + lse * (1 + (direction == "both"))


@pytest.mark.parametrize("head_dim_v", [None, 16, 56])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_work_is_what_explain_tells(mask, head_dim_v):
    mask = {"causal": mask.causal, "window": mask.window}
    forward = Problem(2, 4, 2, 37, 50, 32, head_dim_v, **mask)
    backward, both = (replace(forward, direction=direction) for direction in ("backward", "both"))
    for problem in (forward, backward):
        q, k, v, *_ = problem.inputs("cpu")
        plan = flash_cute.explain(q, k, v, **mask, backward=problem is backward)
        assert (problem.flops, problem.bytes) == (plan["flops"], plan["bytes"])
    assert both.flops == forward.flops + backward.flops
    assert head_dim_v or both.flops == 3.5 * forward.flops
    assert both.bytes == forward.bytes + backward.bytes


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
    *same, dout = Problem(2, 8, 4, 16, 32, 64, direction="backward").inputs("cpu", layout)
    assert all(map(torch.equal, same, (q, k, v)))
    assert (dout.shape, dout.stride()) == (q.shape, q.stride())


def test_arguments():
    assert parse_shape("1,32,4,100,200,128") == parse_shape("1,32,4,100,200,128x128")
    assert parse_shape("1,32,4,100,200,128") == (1, 32, 4, 100, 200, 128)
    assert parse_shape("1,32,4,100,200,192x128") == (1, 32, 4, 100, 200, 192, 128)
    assert parse_window("5") == (5, 5)
    assert parse_window("5,") == (5, None)
    assert parse_window(",0") == (None, 0)
    wrong = ["--shape", "1,2,3"], ["--head-dims", "3x2x1"], ["--window", "1,2,3"], ["--mask", "round"]
    for words in wrong:
        with pytest.raises(SystemExit):
            attention.parser().parse_args(words)


def test_grid_of_widths():
    """Heads are as many as fit with q's."""
    options = attention.parser().parse_args(["--head-dims", "64,192x128", "--mask", "full"])
    options.seqlens = [512]
    found = [(p.heads_q, p.head_dim, p.head_dim_v) for p in attention.problems(options)]
    assert found == [(32, 64, None), (10, 192, 128)]
    options.lengths = ["equal:512"]
    found = [(p.heads, p.head_dim, p.head_dim_v) for p in attention.problems(options)]
    assert found == [(32, 64, None), (10, 192, 128)]


PEERS_CALLED = {  # without a GPU: the operators take fake tensors, and so show that they are called rightly
    "causal": (Problem(2, 8, 8, 64, 64, 64, causal=True), {"flash", "cudnn", "efficient", "math"}),
    "grouped": (Problem(2, 8, 2, 64, 96, 64), {"flash", "cudnn", "efficient", "math"}),
    "window": (Problem(2, 8, 2, 64, 64, 64, causal=True, window=(9, None)), {"flash"}),
    "bottom-right": (Problem(2, 8, 8, 64, 96, 64, causal=True), {"flash"}),
    "narrower v": (Problem(2, 8, 8, 64, 64, 96, 64, causal=True), {"cudnn", "efficient", "math"}),
    "wider v": (Problem(2, 8, 8, 64, 96, 64, 96), {"cudnn", "efficient", "math"}),
}
OF_PYTORCH = [name for name in contenders.DENSE_PEERS if not peers.is_newer(name.split()[0])]


@pytest.mark.parametrize(("problem", "able"), PEERS_CALLED.values(), ids=PEERS_CALLED)
def test_peers_are_called_rightly(problem, able):
    with FakeTensorMode() as mode:
        inputs = on_fake_gpu(mode, problem)
        for name in OF_PYTORCH:
            if name.removesuffix(peers.DETERMINISTIC) not in able:
                with pytest.raises(CannotRun):
                    contenders.prepare(name, problem, *inputs)
                continue
            out, *lse = contenders.prepare(name, problem, *inputs)()[:2]
            assert out.shape == (*inputs[0].shape[:-1], inputs[2].shape[-1])
            assert all(values.numel() == inputs[0][..., 0].numel() for values in lse)


def on_fake_gpu(mode: FakeTensorMode, problem: Problem) -> list[torch.Tensor]:
    tensors = (mode.from_tensor(tensor) for tensor in problem.inputs("cpu"))
    return [torch.empty_like(tensor, device="cuda") for tensor in tensors]


@pytest.mark.parametrize("direction", ["backward", "both"])
@pytest.mark.parametrize(("problem", "able"), PEERS_CALLED.values(), ids=PEERS_CALLED)
def test_gradients_of_peers_are_called_rightly(problem, able, direction):
    problem = replace(problem, direction=direction)
    able = able - {"math"} - ({"efficient"} if problem.heads_q != problem.heads_kv else set())
    with FakeTensorMode() as mode:
        inputs = on_fake_gpu(mode, problem)
        for name in OF_PYTORCH:
            if name.removesuffix(peers.DETERMINISTIC) not in able:
                with pytest.raises(CannotRun):
                    contenders.prepare(name, problem, *inputs)
                continue
            gradients = contenders.prepare(name, problem, *inputs)()[:3]
            assert [x.shape for x in gradients] == [x.shape for x in inputs[:3]]


NEWER_MASKS = {  # the problem's causal and window -> what the newer ones are asked for
    "full": ((False, None), (False, None, None)),
    "causal": ((True, None), (True, None, None)),
    "window": ((False, (9, 4)), (False, 9, 4)),
    "causal window": ((True, (9, None)), (False, 9, 0)),
    "right": ((False, (None, 0)), (False, None, 0)),
}


def prepare_lengths(names: list[str], problem: lengths.Ragged) -> tuple[dict, dict, dict]:
    return contenders.prepare_all(names, problem.direction, lengths.preparer(problem, CPU))


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("lengths_differ", [False, True])
def test_float32_is_measured_as_torch_is_set(lengths_differ, precision):
    """The forward and the backward."""
    with matmul_precision(precision), Calls() as calls:
        if lengths_differ:
            problem = lengths.Ragged("x", (5, 9), 2, 16, False, "fp32", "backward")
            prepare_lengths(["cpu packed", "cpu padded"], problem)
        else:
            problem = Problem(1, 2, 2, 16, 16, 64, dtype="fp32", direction="backward")
            contenders.prepare("cpu", problem, *problem.inputs("cpu"))
    assert len(calls.tf32) >= (4 if lengths_differ else 2)
    assert set(calls.tf32) == {precision == "high"}


@pytest.mark.parametrize(("mask", "expected"), NEWER_MASKS.values(), ids=NEWER_MASKS)
def test_newer_peers_are_called_rightly(mask, expected, monkeypatch):
    """By a stand-in: rows of tokens first, a backward with what its forward gave."""
    seen = []

    class StandIn(newer_flash.NewerFlash):
        calls = peers.PEERS["flash3"].calls

        def load(self):
            pass

        def fwd(self, q, k, v, mask, **lengths):
            seen.append((q.shape, k.shape, mask, lengths))
            return 2 * q, q[..., 0].float()

        def bwd(self, dout, q, k, v, out, lse, mask, deterministic, **lengths):
            assert torch.equal(out, 2 * q)
            assert torch.equal(lse, q[..., 0].float())
            seen.append((dout.shape, k.shape, mask, lengths, deterministic))
            return q + 1, k + 2, v + 3

    monkeypatch.setitem(peers.PEERS, "flash3", StandIn())
    causal, window = mask
    problem = Problem(2, 4, 2, 33, 40, 64, causal=causal, window=window, direction="backward")
    inputs = problem.inputs("cpu")
    found = contenders.prepare("flash3 deterministic", problem, *inputs)()
    assert all(torch.equal(x, y + i) for i, (x, y) in enumerate(zip(found, inputs, strict=False), 1))
    shapes = (2, 33, 4, 64), (2, 40, 2, 64)
    assert seen[0] == (*shapes, expected, {})
    assert seen[1] == (*shapes, expected, {}, True)

    seen.clear()
    packed = lengths.Ragged("equal:20", (20, 13), 4, 64, mask[0], "bf16", "backward")
    offsets = torch.tensor([0, 20, 33], dtype=torch.int32)
    contenders.prepare("flash3", packed, *packed.inputs(CPU), offsets=offsets)()
    told = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 20, "max_seqlen_k": 20}
    assert seen[0] == ((33, 4, 64), (33, 4, 64), (mask[0], None, None), told)
    assert seen[-1] == ((33, 4, 64), (33, 4, 64), (mask[0], None, None), told, False)


def test_newer_peers_that_cannot_run_are_left_out(monkeypatch):
    class OfTheirCompiler(Exception):
        pass

    def fail(*_, **__):
        raise OfTheirCompiler("no such tile\nat a line")

    monkeypatch.setattr(newer_flash, "find", lambda *_: None)
    with pytest.raises(CannotRun, match="not installed"):
        newer_flash.operators_3.__wrapped__()
    monkeypatch.setattr(newer_flash, "find", lambda *_: Path(__file__))  # no library
    with pytest.raises(CannotRun, match="cannot be loaded"):
        newer_flash.operators_3.__wrapped__()
    interface = SimpleNamespace(_flash_attn_fwd=fail)
    monkeypatch.setattr(newer_flash, "interface_4", lambda: interface)
    with pytest.raises(CannotRun, match=r"^OfTheirCompiler: no such tile$"):
        attempt(partial(newer_flash.Flash4().fwd, None, None, None, newer_flash.Mask(True)))


@pytest.mark.parametrize("direction", ["backward", "both"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_our_gradients_are_those_of_the_problem(mask, direction):
    problem = Problem(2, 4, 2, 37, 50, 32, **mask.options, direction=direction)
    inputs = problem.inputs("cpu")
    for name in contenders.mine(CPU, direction):
        gradients = contenders.prepare(name, problem, *inputs)()
        assert all(map(contenders.agrees, gradients, accuracy.oracle_of(problem, *inputs)))


@pytest.fixture
def hopper_alone(monkeypatch):
    """A build for Hopper: of sm80 it has float32's kernels, and gradients of ranges."""
    families = {"sm80": {"fp32": [64]}, "sm90": {"bf16": [64]}}

    def explain(q, k, v, family, backward):
        if (family == "sm80") != (q.dtype == torch.float32):
            raise ValueError(f"flash_cute.explain: this build has no {family} kernel")
        return {"family": family}

    monkeypatch.setattr(flash_cute, "supported", lambda: {"families": families})
    monkeypatch.setattr(flash_cute, "explain", explain)


def test_families_that_lack_kernels_are_left_out(hopper_alone, capsys):
    with FakeTensorMode():
        found = [
            contenders.mine(GPU, *of) for of in (("forward", "bf16"), ("both", "bf16"), ("forward", "fp32"))
        ]
        tested = kernels.families(GPU)
    assert found == [["sm90"], ["sm90", "sm90 deterministic"], ["sm80"]]
    assert tested == ["sm80", "sm90"]  # each runs some type
    assert "sm80 is left out: flash_cute.explain: this build has no sm80 kernel\n" in capsys.readouterr().err


def test_who_is_compared_with_whom():
    mine = ["sm80", "sm80 deterministic"]
    compared = contenders.compared(mine, ["flash"])
    assert compared == {"sm80": ["flash"], "sm80 deterministic": ["sm80"]}
    compared = contenders.compared(mine, ["flash", "flash deterministic"])
    assert compared == {"sm80": ["flash"], "sm80 deterministic": ["sm80", "flash deterministic"]}
    mine += contenders.at_one_width(mine, [Problem(1, 1, 1, 9, 9, 64, head_dim_v=32)])
    compared = contenders.compared(mine, ["flash"])
    assert compared == {"sm80": ["sm80 padded to one width", "flash"], "sm80 deterministic": ["sm80"]}
    assert contenders.at_one_width(mine, [Problem(1, 1, 1, 9, 9, 64, head_dim_v=64)]) == []
    mine = lengths.ours(["sm80", "sm90"])
    assert mine == ["sm80 packed", "sm90 packed", "sm90 padded", "sm90 dense mean"]
    compared = lengths.compared(mine, ["flash"])
    assert set(compared) == set(mine[:3])
    assert compared["sm90 packed"] == ["flash", "sm90 dense mean"]
    assert compared["sm90 padded"] == ["sm90 packed"]


def test_speedup_is_paired_by_round():
    assert timing.paired_speedup([1, 2, 4], [2, 4, 8]) == 2


@pytest.fixture
def sleepers() -> tuple[dict, list[str]]:
    """Three functions of 1, 2 and 3 ms, and the list in which each call leaves its name."""
    called: list[str] = []

    def sleep(name: str, ms: int) -> None:
        called.append(name)
        time.sleep(ms / 1e3)

    return {name: partial(sleep, name, ms) for ms, name in enumerate("abc", 1)}, called


def test_bursts_are_rounds_in_random_order(sleepers, monkeypatch):
    functions, called = sleepers
    monkeypatch.setattr(timing, "BURST_US", 1.0)  # one call each
    samples = timing.burst(functions, CPU, seconds=0)
    assert {len(values) for values in samples.values()} == {timing.ROUNDS.start}
    assert sorted(functions, key=lambda name: statistics.median(samples[name])) == ["a", "b", "c"]
    assert samples["b"][0] >= 2000
    bursts = called[-3 * timing.ROUNDS.start :]
    turns = ["".join(bursts[i : i + 3]) for i in range(0, len(bursts), 3)]
    assert {"".join(sorted(turn)) for turn in turns} == {"abc"}
    assert len(set(turns)) > 1


def test_sustained_takes_each_alone(sleepers):
    functions, called = sleepers
    samples, drawn = timing.sustained(functions, CPU, seconds=0.02, turns=2)
    assert [len(values) for values in samples.values()] == [2, 2, 2]
    assert samples["c"][0] >= 3000
    assert len([name for name, _ in groupby(called)]) <= 6
    nothing = {"watts": None, "joules_per_call": None, "sm_mhz": None}
    assert drawn == dict.fromkeys(functions, nothing)


def test_summary_takes_one_sample():
    assert timing.summary([3.0]) == {"q25": 3, "median": 3, "q75": 3}


class FakeNvml:
    """A card that draws 700 W at 1500 MHz, its energy counted in steps of 20 ms; each call's status is 0."""

    def __getattr__(self, name):
        return lambda *_: 0

    def nvmlDeviceGetTotalEnergyConsumption(self, _, energy):
        energy._obj.value = int(time.perf_counter() / 0.02) * 20 * 700

    def nvmlDeviceGetClockInfo(self, _, domain, clock):
        clock._obj.value = 1500 if domain == power.SM_CLOCK else 1


@pytest.fixture
def cuda_without_gpu(monkeypatch) -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="x"))
    power.gauge.cache_clear()
    yield torch.device("cuda")
    power.gauge.cache_clear()


def test_meter_reads_watts_and_clock(cuda_without_gpu, monkeypatch):
    monkeypatch.setattr(power.ctypes, "CDLL", lambda _: FakeNvml())
    with power.Meter(cuda_without_gpu) as meter:
        time.sleep(0.3)
    assert meter.watts == pytest.approx(700, rel=0.15)
    assert meter.sm_mhz == 1500
    read = timing.drawn([100.0, 300.0], [meter, meter])
    assert read["joules_per_call"] == pytest.approx(meter.watts * 200e-6)


def test_meter_without_nvml(cuda_without_gpu, monkeypatch):
    monkeypatch.setattr(power, "LIBRARY", "libno-such-library.so")
    with power.Meter(cuda_without_gpu) as meter:
        pass
    assert (meter.watts, meter.sm_mhz) == (None, None)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_committed_tables_are_made_again(path):
    """Byte for byte, but for the matrix product's type, which older ones do not say."""
    committed = path.with_suffix(".md").read_text()
    made = report.markdown(report.load(path)) + "\n"
    assert made == committed.replace("; beside it matmul", "; beside it bf16 matmul")


@pytest.mark.parametrize("name", ["decode", "few-queries"])
def test_plots_are_pictures(tmp_path, name):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"{name}.json"
    path.write_text((results.FOLDER / "nvidia-h200" / path.name).read_text())
    draw([str(path)])
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
def test_memory_beside_results():
    """Of a call that has nothing else, and of one that has a step or two between."""
    x = torch.zeros(1000, device="cuda")
    assert timing.bytes_beside(lambda: (x + 1,)) == 0
    assert timing.bytes_beside(lambda: ((x + 1) * 2 + 1,)) in (x.nbytes, 2 * x.nbytes)


def test_best_known_peers_are_those_of_the_regime_and_the_pass():
    found = report.attention.load_baseline(report.attention.PEERS_H200)
    assert [len(cells) for cells in found.values()] == [72, 72]
    for cell in json.loads(report.attention.PEERS_H200.read_text())["cells"]:
        shape = 16384 // cell["s"], *[2048 // cell["d"]] * 2, cell["s"], cell["s"], cell["d"]
        direction = {"fwd": "forward", "bwd": "backward"}[cell["mode"]]
        where = *shape, "causal" if cell["causal"] else "full", None, None, direction
        assert all(found[regime][where] == cell[regime]["best_over_cudnn"] for regime in found)


TINY = ["--device", "cpu", "--seconds", "0.01"]
SUSTAINED = ["--sustained-seconds", "0.01"]


def test_attention_then_report(tmp_path):
    pytest.importorskip("matplotlib")
    tiny = ["--tokens", "64", "--hidden", "64", "--head-dims", "32", "--seqlens", "32,64"]
    path = attention.main([*TINY, *SUSTAINED, *tiny, "--output", str(tmp_path), "--name", "tiny"])
    cells = json.loads(path.read_text())["cells"]
    assert len(cells) == 4
    for cell in cells:
        burst, sustained = cell["regimes"]["burst"], cell["regimes"]["sustained"]
        assert burst["rounds"] >= timing.ROUNDS.start
        assert sustained["rounds"] == 1
        assert set(burst["times_us"]) == set(sustained["times_us"]) == {"cpu", "flash", "math"}
        assert "power" in sustained
        assert "power" not in burst
    told = path.with_suffix(".md").read_text()
    draw([str(path)])
    assert path.with_suffix(".md").read_text() == told
    assert path.with_suffix(".png").exists()


@pytest.mark.parametrize("direction", ["backward", "both"])
def test_attention_of_gradients(tmp_path, direction):
    shapes = ["--shape", "1,4,2,32,64,32", "--shape", "1,2,2,64,64,32", "--mask", "causal"]
    path = attention.main([*TINY, *SUSTAINED, *shapes, "--pass", direction, "--output", str(tmp_path)])
    assert path.name == f"attention-{direction}.json"
    grouped, square = json.loads(path.read_text())["cells"]
    assert set(grouped["excluded"]) == {"flash", "math"}
    assert set(square["excluded"]) == {"math"}
    for measured in square["regimes"].values():
        assert set(measured["times_us"]) == {"cpu", "cpu deterministic", "flash"}
        speedup = {mine: set(rivals) for mine, rivals in measured["speedup"].items()}
        assert speedup == {"cpu": {"flash"}, "cpu deterministic": {"cpu"}}


@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
def test_attention_where_v_has_a_width_of_its_own(tmp_path, direction):
    """That ours padded stay in is to say that they have the same results, cut to each width."""
    pytest.importorskip("matplotlib")
    shapes = [word for widths in ("64x32", "32x64", "32") for word in ("--shape", f"1,2,2,32,40,{widths}")]
    asked = [*shapes, "--mask", "full", "--regime", "burst", "--pass", direction]
    path = attention.main([*TINY, *asked, "--output", str(tmp_path)])
    *uneven, even = json.loads(path.read_text())["cells"]
    padded = "cpu padded to one width"
    for cell in uneven:
        (measured,) = cell["regimes"].values()
        assert {"cpu", padded} <= measured["times_us"].keys()
        assert padded in measured["speedup"]["cpu"]
        assert "flash" in cell["excluded"]
    assert even["excluded"][padded] == "q and v are alike in width"
    told = path.with_suffix(".md").read_text()
    for name in ("32", "32/64", "64/32"):
        assert f"Head dim {name}, bf16" in told
        assert f"| d{name} |" in told
    assert f"cpu/{padded} |" in told
    results_of = json.loads(path.read_text())
    titles = [report.attention.shape_title([cell]) for cell in results_of["cells"]]
    assert titles == [f"head dim {name}, full, heads 2" for name in ("64/32", "32/64", "32")]
    draw([str(path)])
    assert path.with_suffix(".png").exists()


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_padded_inputs_keep_their_layout(layout, monkeypatch):
    seen = []
    monkeypatch.setattr(contenders, "prepare", lambda *given, **options: seen.append((given, options)))
    problem = Problem(2, 8, 4, 16, 32, 64, 48, direction="backward")
    inputs = problem.inputs("cpu", layout)
    contenders.preparer(problem, inputs)("sm90 padded to one width")
    (((name, alike, *padded), options),) = seen
    assert (name, alike, options) == (
        "sm90",
        Problem(2, 8, 4, 16, 32, 64, direction="backward"),
        {"softmax_scale": 1 / 8},
    )
    for tensor, given, like in zip(padded, inputs, alike.inputs("cpu", layout), strict=True):
        assert (tensor.shape, tensor.stride()) == (like.shape, like.stride())
        assert torch.equal(tensor[..., : given.shape[-1]], given)
        assert not tensor[..., given.shape[-1] :].any()


@pytest.mark.parametrize("kind", ["equal:512", "equal:3000", "uniform:1:4096", "lognormal:512"])
def test_drawn_lengths_sum_to_the_tokens(kind):
    drawn = lengths.draw(kind, 65536)
    assert drawn == lengths.draw(kind, 65536)
    assert sum(drawn) == 65536
    assert min(drawn) >= 1
    assert max(drawn) <= {"uniform:1:4096": 4096, "lognormal:512": 8 * 512}.get(kind, drawn[0])
    if kind.startswith(("uniform", "lognormal")):
        middle = {"uniform:1:4096": 2048, "lognormal:512": 512}[kind]
        assert statistics.median(drawn) == pytest.approx(middle, rel=0.5)


def test_outlier_is_one_among_short_ones():
    drawn = lengths.draw("outlier:32768:256:64", 5)
    assert sorted(drawn) == [256] * 64 + [32768]


@pytest.mark.parametrize("kind", ["equal", "equal:0", "uniform:3", "uniform:9:3", "lognormal:x", "odd:3"])
def test_wrong_lengths_are_refused(kind):
    with pytest.raises(SystemExit):
        attention.parser().parse_args(["--lengths", kind])


def test_work_of_unequal_lengths():
    ragged = lengths.Ragged("x", (1, 40, 40, 7), 2, 32, causal=True, dtype="bf16")
    alone = [Problem(1, 2, 2, n, n, 32, causal=True) for n in ragged.lengths]
    told = ragged.to_json()
    assert told["flops"] == sum(problem.flops for problem in alone)
    assert told["bytes"] == sum(problem.bytes for problem in alone)
    assert ragged.visited_flops(16, 8) == sum(problem.visited_flops(16, 8) for problem in alone)
    assert ragged.mean() == Problem(4, 2, 2, 22, 22, 32, causal=True)
    assert [tuple(x.shape) for x in ragged.inputs("cpu")] == [(88, 2, 32)] * 3


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_flash_is_called_rightly_with_packed_sequences(direction):
    problem = lengths.Ragged("x", (5, 60), 2, 64, causal=True, dtype="bf16", direction=direction)
    with FakeTensorMode():
        q, *others = (torch.empty(65, 2, 64, dtype=torch.bfloat16, device="cuda") for _ in range(4))
        inputs = q, *others[: 2 + (direction == "backward")]
        offsets = torch.empty(3, dtype=torch.int32, device="cuda")
        found = contenders.prepare("flash", problem, *inputs, offsets=offsets)()
    assert all(x.shape == q.shape for x in found[: 1 if direction == "forward" else 3])


def test_packed_padded_and_dense(tmp_path):
    """The dense call's time is that of as many blocks; what cannot run, as too much padding, is told."""
    kinds = ["uniform:1:32", "equal:16", "outlier:60:1:40"]
    asked = [word for kind in kinds for word in ("--lengths", kind)]
    asked += ["--tokens", "64", "--hidden", "64", "--head-dims", "32", "--mask", "causal"]
    asked += ["--peers", "flash,efficient"]
    path = attention.main([*TINY, *SUSTAINED, *asked, "--output", str(tmp_path)])
    assert path.name == "lengths.json"
    cells = json.loads(path.read_text())["cells"]
    assert [cell["problem"]["lengths"] for cell in cells] == kinds
    for cell in cells:
        much = cell["problem"]["lengths"] == "outlier:60:1:40"
        compared = {"cpu packed": {"cpu dense mean"}} | ({} if much else {"cpu padded": {"cpu packed"}})
        for measured in cell["regimes"].values():
            assert {name: set(found) for name, found in measured["speedup"].items()} == compared
        assert set(cell["excluded"]) == {"flash", "efficient"} | ({"cpu padded"} if much else set())
        assert cell["excluded"]["efficient"] == "not called with packed sequences"
        mean = lengths.Ragged("", lengths.draw(cell["problem"]["lengths"], 64), 2, 32, True, "bf16").mean()
        assert cell["times_scaled"] == {"cpu dense mean": cell["problem"]["flops"] / mean.flops}
    assert cells[1]["times_scaled"] == {"cpu dense mean": 1}


@pytest.mark.parametrize("direction", ["backward", "both"])
def test_gradients_of_packed_sequences(tmp_path, direction):
    """That padded ones stay in is to say that their rows' gradients agree."""
    asked = ["--lengths", "uniform:1:32", "--tokens", "64", "--hidden", "64", "--head-dims", "32"]
    asked += ["--regime", "burst", "--pass", direction]
    path = attention.main([*TINY, *asked, "--output", str(tmp_path)])
    assert path.name == f"lengths-{direction}.json"
    for cell in json.loads(path.read_text())["cells"]:
        times = cell["regimes"]["burst"]["times_us"]
        assert set(times) == {"cpu packed", "cpu padded", "cpu dense mean"}
        assert cell["excluded"] == {}


def test_visited_blocks_are_of_each_ones_tile(monkeypatch):
    """Where packed has another tile than dense, times are scaled to the blocks of each."""
    ragged = lengths.Ragged("x", (100, 30), 2, 32, causal=False, dtype="bf16")
    tiles = {True: {"block_m": 64, "block_n": 32}, False: {"block_m": 128, "block_n": 64}}
    plan = {"family": "sm90", "packed_heads": 1}
    monkeypatch.setattr(
        lengths.flash_cute,
        "explain",
        lambda *_, cu_seqlens_q=None, **__: plan | tiles[cu_seqlens_q is not None],
    )
    _, _, scales = prepare_lengths(["cpu dense mean"], ragged)
    assert scales == {"cpu dense mean": (2 * 4 + 1) * 64 * 32 / (2 * 2 * 128 * 64)}  # two of 65 tokens


def test_times_are_scaled_before_they_are_compared():
    samples = {"a": [1.0, 2.0], "b": [1.0, 1.0]}
    found = attention.in_regime(samples, {"a": ["b", "c"], "c": ["a"]}, {"b": 3.0})
    assert found["times_us"]["b"]["median"] == 3
    assert found["speedup"] == {"a": {"b": 2.25}}


def test_a_peer_that_cannot_is_left_out_with_a_reason(tmp_path):
    shape = ["--shape", "1,2,1,32,64,32", "--mask", "causal", "--window", "9,0", "--regime", "burst"]
    path = attention.main([*TINY, *shape, "--output", str(tmp_path)])
    (cell,) = json.loads(path.read_text())["cells"]
    assert cell["excluded"] == {"flash": "no window", "math": "no window"}
    assert cell["regimes"]["burst"]["speedup"] == {"cpu": {}}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_accuracy(tmp_path, direction):
    shape = ["--shape", "1,2,2,40,40,32", "--seeds", "2", "--pass", direction]
    path = accuracy.main(["--device", "cpu", *shape, "--output", str(tmp_path)])
    for cell in json.loads(path.read_text())["cells"]:
        for found in cell["errors"].values():
            assert all(len(seen) == 2 and 0 <= min(seen) <= max(seen) < 0.1 for seen in found.values())
        assert {"cpu", "flash"} <= cell["errors"].keys()


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("case", ["bias", "dropout", "softcap", "alibi", "half the blocks"])
def test_accuracy_of_changed_scores(tmp_path, case, direction):
    """Ours and PyTorch's operators, which are the yardstick; the file says of what."""
    asked = ["--case", case, "--shape", "1,2,2,40,40,32", "--dtype", "bf16", "--seeds", "2"]
    path = accuracy.main(["--device", "cpu", *asked, "--pass", direction, "--output", str(tmp_path)])
    of_pass = "" if direction == "forward" else "-backward"
    assert path.stem == f"accuracy-{case.replace(' ', '-')}{of_pass}"
    for cell in json.loads(path.read_text())["cells"]:
        ours, yardstick = cell["errors"]["cpu"], cell["errors"]["operators"]
        assert all(statistics.median(found) < 0.1 for found in ours.values())
        assert ours.keys() == yardstick.keys()
    told = path.with_suffix(".md").read_text()
    assert told.startswith(f"Error against float64 with {case}, ")
    assert ("dq RMS/operators" in told) == (direction == "backward")


def test_overhead(tmp_path):
    path = overhead.main([*TINY, "--output", str(tmp_path)])
    for cell in json.loads(path.read_text())["cells"]:
        assert {"flash_cute.forward", "aten flash", "training step, SDPA flash"} <= cell["us"].keys()
        assert {what for us in cell["us"].values() for what in us} == {"host"}


def test_softmax(tmp_path):
    path = softmax.main([*TINY, "--columns", "40", "--output", str(tmp_path)])
    cells = json.loads(path.read_text())["cells"]
    assert {cell["element"] for cell in cells} == {"fp32", "fp16", "bf16"}
    assert all(cell["of_a_copy"] > 0 for cell in cells)
    assert all(0 < cell["over_torch"]["q25"] <= cell["over_torch"]["q75"] for cell in cells)


def test_softmax_matmul(tmp_path, monkeypatch):
    """What runs out of memory is left out with a reason; the share is of the higher of two read rates."""
    operators = softmax_matmul.operators

    def fails(x, v):
        if x.shape[1] == 1 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("out of memory\nat a line")
        return operators(x, v)

    monkeypatch.setattr(softmax_matmul, "operators", fails)
    path = softmax_matmul.main([*TINY, "--output", str(tmp_path)])
    whole, partly = json.loads(path.read_text())["cells"]
    for way in ("forward", "both"):
        assert whole["passes"][way]["times_us"].keys() == {"ours", "torch"}
        assert whole["passes"][way]["speedup"]["ours"]["torch"] > 0
    assert partly["passes"]["both"]["times_us"].keys() == {"ours"}
    assert (whole["excluded"], partly["excluded"]) == ({}, {"torch, both": "out of memory"})
    assert "- torch, both left out of some cells: out of memory" in path.with_suffix(".md").read_text()
    monkeypatch.setattr(softmax_matmul, "attempt", lambda _: attempt(partial(fails, torch.ones(1, 1), None)))
    found = json.loads(softmax_matmul.main([*TINY, "--output", str(tmp_path)]).read_text())
    assert [cell["excluded"] for cell in found["cells"]] == [{"all": "out of memory"}] * 2
    whole["passes"]["forward"]["times_us"]["ours"] = {"median": 1.0}
    rates = [{"read_bytes": whole["problem"]["bytes"] * rate} for rate in (2e6, 4e6)]
    told = report.markdown(found | {"cells": [whole], "rates": rates})
    assert told.endswith(" | 0.25 |")


def test_training(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)  # which takes a minute on the CPU
    path = training.main([*TINY, "--output", str(tmp_path)])
    cells = json.loads(path.read_text())["cells"]
    assert [cell["compiled"] for cell in cells] == [False, True]
    assert all(0 < cell["over"]["flash"]["q25"] <= cell["over"]["flash"]["q75"] for cell in cells)


def test_jax_attention(tmp_path):
    pytest.importorskip("jax", reason="needs jax")
    from benchmarks import jax_attention

    path = jax_attention.main([*TINY, "--seqlen", "32", "--output", str(tmp_path)])
    cells = json.loads(path.read_text())["cells"]
    assert {cell["problem"]["direction"] for cell in cells} == {"forward", "backward"}
    assert all(min(cell["over"].values()) > 0 for cell in cells)


def test_ranges(tmp_path):
    """A cell for each mask and shape; without FlexAttention on the CPU."""
    path = ranges.main([*TINY, "--head-dims", "32", "--tokens", "64", "--output", str(tmp_path)])
    cells = json.loads(path.read_text())["cells"]
    assert [cell["mask"] for cell in cells] == list(ranges.CASES)
    names = {f"{who}, {way}" for who in ("ranges", "other") for way in ("forward", "backward")}
    assert all(cell["shape"][2:] == [64, 32] and cell["times_us"].keys() == names for cell in cells)


def test_scores(tmp_path, monkeypatch):
    """A cell for each case; in tables of each pass its rate over plain's, of visible pairs; a plot."""
    pytest.importorskip("matplotlib")
    took = {"plain": 3.0, "ours": 4.0, "flash": 6.0}

    def burst(calls, *_):
        assert all(call() is not None for call in calls.values())
        return {name: [took[name.split(",")[0]]] * 3 for name in calls}

    monkeypatch.setattr(timing, "burst", burst)
    sizes = ["--head-dims", "16,24", "--lengths", "130,65", "--tokens", "130", "--hidden", "48"]
    path = scores.main(["--device", "cpu", *sizes, "--by-length", "--output", str(tmp_path)])
    cells = json.loads(path.read_text())["cells"]
    assert [cell["case"] for cell in cells] == [*changes.CASES] * 4
    for cell in cells:
        case, problem = cell["case"], cell["problem"]
        contenders = {"ours", "flash"} if case == "plain" else {"ours", "plain"}
        assert cell["passes"].keys() == {"forward", "backward", "both"}
        for way, found in cell["passes"].items():
            assert found["times_us"].keys() == found["tflops"].keys() == contenders
            products = {"forward": 2, "backward": 5, "both": 7}[way]
            size = problem["batch"] * problem["heads_q"] * problem["head_dim"]
            flops = 2 * products * size * problem["seqlen_q"] ** 2 * cell["visible"]
            us = took["ours"] * (1 + (way == "both"))
            assert found["tflops"]["ours"] == pytest.approx(flops / us / 1e6, rel=1e-3)
        assert {"cudnn", "efficient"} <= cell["excluded"].keys()
        assert case in ("hidden pairs", "half the blocks", "padding") or cell["visible"] == 1
    told = path.with_suffix(".md").read_text()
    for way in ("Forward", "Backward", "Forward and backward"):
        (of_way,) = (part for part in told.split("\n## ") if part.startswith(f"{way}\n"))
        table = [line for line in of_way.split("\n\n")[1].splitlines() if not line.startswith("| --")]
        header, *rows = ([word.strip() for word in line.strip("|").split("|")] for line in table)
        assert header == ["case", "d16", "d16/flash", "d24", "d24/flash"]
        assert [row[0] for row in rows] == [*changes.CASES]
        found = {case: shares for case, *shares in rows}
        assert found["plain"] == ["1.00", "1.50", "1.00", "1.50"]
        assert found["bias"] == found["alibi"] == ["0.75", "-", "0.75", "-"]
        assert found["padding"][0] == f"{mean_visible(cells, 'padding') * 0.75:.2f}"
    draw([str(path)])
    assert path.with_suffix(".md").read_text() == told
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def mean_visible(cells: list[dict], case: str) -> float:
    found = [cell["visible"] for cell in cells if cell["case"] == case]
    assert all(0.5 < visible < 1 for visible in found)
    return statistics.geometric_mean(found)


def test_scores_under_a_causal_mask(tmp_path):
    sizes = ["--head-dims", "16", "--lengths", "40", "--tokens", "40", "--hidden", "16", "--peers", "flash"]
    asked = ["--cases", "plain,padding", "--causal", "--output", str(tmp_path), "--name", "tiny"]
    path = scores.main([*TINY, *sizes, *asked])
    assert path.name == "tiny.json"
    plain, padding = json.loads(path.read_text())["cells"]
    assert plain["passes"]["both"]["times_us"].keys() == {"ours", "flash"}
    assert padding["excluded"] == {"flash": "no mask"}
    seen = [min(query + 1, 30) for query in range(40)]  # three quarters of one sequence's keys
    assert padding["visible"] == pytest.approx(sum(seen) / sum(range(1, 41)))
    assert "| plain | causal, 40 |" not in path.with_suffix(".md").read_text()


SMALL = Problem(2, 2, 2, 260, 260, 16, dtype="fp32", direction="both")


def test_scores_of_cells():
    """Means of ours over plain count visible pairs; a case that ours cannot has no ratio."""
    times = {"plain": {"median": 3.0}, "ours": {"median": 2.0}, "cudnn": {"median": 4.0}}
    measured = {"times_us": times, "speedup": {"ours": {"plain": 1.5, "cudnn": 2.0}}}
    cell = {"problem": SMALL.to_json(), "visible": 0.5, "passes": {"forward": measured}}
    assert report.scores.ratios("forward", cell) == {"d16": 0.75, "d16/cudnn": 2.0}
    assert report.scores.share_of_plain("forward", "cudnn", cell) == 0.375
    measured["speedup"] = {}
    assert report.scores.ratios("forward", cell) == {}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", changes.CASES)
def test_changed_scores_in_terms_of_others(case, causal):
    """SDPA, where it takes the case, and FlexAttention's functions give what ours does; pairs are counted."""
    problem = replace(SMALL, causal=causal)
    inputs = problem.inputs("cpu")[:3]
    options = changes.drawn(case, problem, "cpu")
    options |= {"softcap": 1.0} if case == "softcap" else {}  # one that shows
    attn_mask = changes.attn_mask_of(options, problem)
    ours = flash_cute.attention(*inputs, causal, **options)
    assert (case == "plain") == torch.equal(ours, flash_cute.attention(*inputs, causal))
    others = []
    if case == "plain" or "bias" in options or "mask" in options:
        others.append(Sdpa(SDPBackend.MATH, "mask", "bias").forward(*inputs, causal, attn_mask, options)())
    else:
        with pytest.raises(CannotRun, match=r"^no (softcap|alibi_slopes|dropout_p, dropout_seed)$"):
            Sdpa(SDPBackend.MATH, "mask", "bias").forward(*inputs, causal, attn_mask, options)
    if case == "dropout":
        with pytest.raises(CannotRun, match="no dropout"):
            scores.score_mod_of(options)
    else:
        # Written out: to make blocks takes FlexAttention a compiler.
        place = torch.meshgrid(*map(torch.arange, (2, 2, 260, 260)), indexing="ij")
        products = inputs[0] @ inputs[1].mT / 4
        if score_mod := scores.score_mod_of(options):
            products = score_mod(products, *place)
        if mask_mod := scores.mask_mod_of(options, causal):
            products = products.masked_fill(~mask_mod(*place), -torch.inf)
        others.append(products.softmax(-1) @ inputs[2])
        if mask_mod:
            share = mask_mod(*place).sum().item() / 4 / problem.visited_pairs(1, 1)
            assert changes.visible_share(options, problem) == pytest.approx(share)
    for other in others:
        torch.testing.assert_close(other, ours)


def test_masks_of_changed_scores():
    """On sizes that are no multiples of a block; under a causal mask each query sees a key."""
    hidden = ~changes.drawn("hidden pairs", replace(SMALL, seqlen_q=256, seqlen_k=384), "cpu")["mask"][0, 0]
    blocks = hidden.unflatten(0, (2, 128)).unflatten(2, (3, 128)).sum((1, 3))
    assert (blocks == 1).all()
    for seed in range(5):
        square = replace(SMALL, seqlen_q=1000, seqlen_k=1000)
        (mask,) = changes.drawn("half the blocks", square, "cpu", seed)["mask"][0]
        assert mask.shape == (1000, 1000)
        of_blocks = mask[::128, ::128]
        assert torch.equal(of_blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)[:1000, :1000], mask)
        assert (of_blocks.sum(0) == 4).all()
        assert (of_blocks.sum(1) == 4).all()
        causal = changes.drawn("half the blocks", replace(square, causal=True), "cpu", seed)
        assert changes.attn_mask_of(causal, replace(square, causal=True)).any(-1).all()
    padding = changes.drawn("padding", replace(SMALL, batch=16, seqlen_k=1024), "cpu")["mask"]
    assert padding.shape == (16, 1, 1, 1024)
    lengths_of = padding.sum(-1).flatten().tolist()
    assert len(set(lengths_of)) == 16
    assert 512 <= min(lengths_of) < max(lengths_of) <= 1024
    assert statistics.mean(lengths_of) == pytest.approx(768, abs=1)


def test_scores_leave_out_what_cannot_or_differs():
    """A contender with another result, one whose backward fails, and where ours fails, ours alone."""
    *inputs, dout = SMALL.inputs("cpu")
    inputs = [x.requires_grad_() for x in inputs]

    class OnlyForward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *given):
            return flash_cute.attention(*(x.detach() for x in given))

        @staticmethod
        def backward(ctx, gradient):
            raise NotImplementedError("no gradients\nat a line")

    def refuse():
        raise ValueError("no such kernel")

    ours = partial(flash_cute.attention, *inputs)
    makers = {"plain": lambda: ours, "ours": lambda: ours, "same": lambda: ours}
    makers |= {"other": lambda: lambda: 1.5 * ours(), "half": lambda: partial(OnlyForward.apply, *inputs)}
    calls, excluded = scores.prepare(makers, inputs, [], dout, comparable=True)
    both = {f"{name}, {way}" for name in ("plain", "ours", "same") for way in scores.WAYS}
    assert calls.keys() == both | {"half, forward"}
    differs = "its result differs"
    assert excluded == {
        "other, forward": differs,
        "other, backward": differs,
        "half, backward": "no gradients",
    }
    calls, _ = scores.prepare(makers, inputs, [], dout, comparable=False)
    assert "other, backward" in calls
    calls, excluded = scores.prepare(makers | {"ours": lambda: refuse}, inputs, [], dout, comparable=True)
    assert excluded["ours"] == "no such kernel"
    assert {"plain, forward", "same, backward"} <= calls.keys()


def test_flex_gets_no_bias_beyond_its_indices():
    bias = torch.empty(1, 32, 16384, 16384, dtype=torch.bfloat16, device="meta")
    with pytest.raises(CannotRun, match="more than 2147483648 values"):
        scores.score_mod_of({"bias": bias})
    assert scores.score_mod_of({"bias": bias[:, :, :8192, :8192]})


def test_wrong_cases_are_refused():
    for words in (["--cases", "bias,round"], ["--peers", "math"]):
        with pytest.raises(SystemExit):
            scores.main(["--device", "cpu", *words])


@pytest.mark.parametrize(("direction", "products"), [("forward", 2), ("backward", 5)])
def test_masks(tmp_path, monkeypatch, direction, products):
    """A window that takes as long as the causal problem has its visited blocks' share of the rate."""
    monkeypatch.setattr(timing, "burst", lambda functions, *_: {name: [8.0] * 3 for name in functions})
    plan = {"family": "sm90", "block_m": 128, "block_n": 64, "packed_heads": 2}
    monkeypatch.setattr(masks.flash_cute, "explain", lambda *_, **__: plan)
    options = ["--device", "cpu", "--window", "63,0", "--seconds", "0.1", "--pass", direction]
    path = masks.main([*options, "--output", str(tmp_path)])
    measured = json.loads(path.read_text())["measured"]
    assert [entry["regime"] for entry in measured] == ["burst", "sustained"] * 2
    causal, grouped, window = measured[2]["cases"].values()
    assert causal["visited_tflops"] == pytest.approx(2 * products * 32 * 2 * 10 * 64 * 64 / 8 / 1e6)
    assert grouped["share"]["median"] == pytest.approx(1)
    assert window["share"]["median"] == pytest.approx((1 + 2 + 2 + 2) / (1 + 2 + 3 + 4))


@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
def test_profile(capsys, direction):
    profile.main(["--device", "cpu", "--shape", "1,2,2,40,60,32", "--pass", direction])
    assert "ncu" in capsys.readouterr().out


@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
@pytest.mark.parametrize("case", changes.CASES)
def test_profile_of_changed_scores(capsys, monkeypatch, case, direction):
    """Each call gets the case's arguments; peers get none of them."""
    seen = []
    prepare = contenders.prepare

    def note(*given, **options):
        seen.append(options)
        return prepare(*given, **options)

    monkeypatch.setattr(contenders, "prepare", note)
    asked = ["--device", "cpu", "--shape", "1,2,2,40,40,32", "--pass", direction, "--case", case]
    profile.main(asked)
    assert case == "plain" or f"launches of cpu {case} on" in capsys.readouterr().out
    (options,) = seen
    assert options.keys() == changes.drawn(case, SMALL, "cpu").keys()
    if case != "plain":
        with pytest.raises(CannotRun, match="not called with"):
            profile.main([*asked, "--who", "flash"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
def test_without_a_gpu_one_line_says_so(capsys):
    with pytest.raises(SystemExit) as exit_status:
        results.choose_device(None)
    assert exit_status.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
