"""Fixtures: the device, the kernel families that run on it, and a summary of what was skipped."""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # threads of several processes would only wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if (
    not torch.cuda.is_available()
):  # XLA's code need not be fast here: it is compiled in two thirds of the time
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

ROOT = Path(__file__).resolve().parent.parent
# The benchmarks are tested from the checkout, but an installed flash_cute goes before the checkout's sources.
sys.path.append(str(ROOT))

from cases import SEEDS, poisoned  # noqa: E402

import flash_cute  # noqa: E402
from benchmarks.contenders import CPU, families  # noqa: E402

DEVICE = pytest.StashKey[torch.device]()


@dataclass(frozen=True)
class Kernel:
    """One way to run the forward: a kernel family on the GPU, or the CPU path (family None)."""

    device: torch.device
    family: str | None

    def forward(self, q, k, v, **options) -> tuple[torch.Tensor, torch.Tensor]:
        """flash_cute.forward by this kernel, or forward_varlen where options have cu_seqlens_q.

        Its outputs and workspaces are poisoned with NaN when allocated. Deterministic mode fills torch.empty
        so: what the kernel then leaves out shows in the result.
        """
        with poisoned():
            return self.function(options)(q, k, v, family=self.family, **options)

    def backward(self, q, k, v, dout, dlse, **options) -> tuple[torch.Tensor | None, ...]:
        """dq, dk and dv by this kernel, likewise poisoned; dout or dlse may be None.

        Its option alone decides whether they are deterministic: of the mode that poisons, it is not told.
        """
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        results = self.function(options)(*inputs, family=self.family, **options)
        given = [pair for pair in zip(results, (dout, dlse), strict=True) if pair[1] is not None]
        results, gradients = zip(*given, strict=True)
        with poisoned(), patch("torch.are_deterministic_algorithms_enabled", return_value=False):
            return torch.autograd.grad(results, inputs, gradients)

    @staticmethod
    def function(options: dict):
        return flash_cute.forward_varlen if "cu_seqlens_q" in options else flash_cute.forward


def kernels(device: torch.device) -> list[Kernel]:
    """Every family that is compiled and runs on this device."""
    return [Kernel(device, None if family == CPU else family) for family in families(device)]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", default=None, help="where to run: cuda or cpu (default: cuda if there is one)"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "multi_gpu: needs two CUDA devices")
    config.addinivalue_line("markers", "big_memory(gib): needs a CUDA device with this much free memory")
    name = config.getoption("--device") or ("cuda" if torch.cuda.is_available() else "cpu")
    config.stash[DEVICE] = torch.device(name)


def missing(item: pytest.Item) -> str | None:
    """Why this machine cannot run a marked test, or None."""
    on_gpu = item.config.stash[DEVICE].type == "cuda"
    if any(item.iter_markers("gpu")) and not on_gpu:
        return "needs a CUDA device"
    if any(item.iter_markers("multi_gpu")) and torch.cuda.device_count() < 2:
        return "needs two CUDA devices"
    for mark in item.iter_markers("big_memory"):
        if not on_gpu or torch.cuda.mem_get_info()[1] < mark.args[0] * 2**30:
            return "needs a CUDA device with much memory"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if reason := missing(item):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Each test draws the same numbers every time, and others with another FLASH_CUTE_TEST_SEED."""
    SEEDS.seed(f"{os.environ.get('FLASH_CUTE_TEST_SEED', '')} {item.nodeid}")
    torch.manual_seed(SEEDS.getrandbits(31))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kernel" in metafunc.fixturenames:
        choices = kernels(metafunc.config.stash[DEVICE])
        metafunc.parametrize("kernel", choices, ids=[kernel.family or "cpu" for kernel in choices])


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> torch.device:
    return pytestconfig.stash[DEVICE]


@pytest.fixture(scope="session")
def build_report_path() -> Path:
    """What the compiler said about the kernels that are installed."""
    paths = (Path(folder) / "build_report.json" for folder in flash_cute.__path__)
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        pytest.skip("this flash_cute was built without a build report")
    return path


@pytest.fixture(autouse=True)
def leave_little_memory_behind():
    """Memory that PyTorch keeps is of no use to other processes, and workers of pytest-xdist share a GPU."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()


def pytest_report_header(config: pytest.Config) -> str:
    device = config.stash[DEVICE]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {os.cpu_count()} cores"
    families = ", ".join(kernel.family or "cpu" for kernel in kernels(device))
    return f"flash_cute: {Path(flash_cute.__file__).parent}, device: {name}, kernels: {families}"


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """What was skipped and why, in one line each, whatever flags pytest was given."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped")
    )
    if reasons:
        terminalreporter.section("not run here")
        for reason, count in reasons.most_common():
            terminalreporter.line(f"{count} tests: {reason}")
