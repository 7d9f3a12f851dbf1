"""Fixtures: the device, the kernel families that run on it, and a summary of what was not run."""

from __future__ import annotations

import gc
import importlib.util
import json
import mmap
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # threads of several processes would only wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Of memory that PyTorch's products keep: without it they raise in `poisoned()`.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch


def flags_of_xla() -> str:
    """With which XLA compiles for the CPU in a sixth of the time; its code need not be fast here.

    XLA ends the process at a flag that it does not know, so that jaxlib must have the name of each.
    """
    flags = {
        "xla_backend_optimization_level": "0",
        "xla_cpu_parallel_codegen_split_count": "1",
        "xla_cpu_use_fusion_emitters": "false",
    }
    spec = importlib.util.find_spec("jaxlib")
    for folder in spec.submodule_search_locations if spec else ():
        for library in Path(folder).glob("libjax_common.so"):
            with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                known = [name for name in flags if content.find(name.encode()) >= 0]
                return " ".join(f"--{name}={flags[name]}" for name in known)
    return ""


if not torch.cuda.is_available():
    os.environ.setdefault("XLA_FLAGS", flags_of_xla())
    # A processor without vector units: inductor tries none of them out, and writes shorter code.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

ROOT = Path(__file__).resolve().parent.parent
# The benchmarks are tested from the checkout, but an installed flash_cute goes before the checkout's sources.
sys.path.append(str(ROOT))

from support.cases import SEEDS, poisoned  # noqa: E402
from support.kernels import families  # noqa: E402
from support.table import KINDS_OF_CASES, Case, crossed, drawn  # noqa: E402

import flash_cute  # noqa: E402
from flash_cute.build_report import installed  # noqa: E402

DEVICE = pytest.StashKey[torch.device]()
LEFT_OUT = pytest.StashKey[Counter[str]]()  # how many tests for which reason


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
    return [Kernel(device, family) for family in families(device)]


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
    config.stash[LEFT_OUT] = Counter()
    if config.stash[DEVICE].type == "cpu" and hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # pytest-xdist would begin with the files of most tests


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


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what this machine cannot run, and counts it: to skip thousands one by one takes long.

    Where nothing else was asked for, each is skipped, and says why.
    """
    reasons = [missing(item) for item in items]
    if all(reasons):
        for item, reason in zip(items, reasons, strict=True):
            item.add_marker(pytest.mark.skip(reason=reason))
        return
    config.stash[LEFT_OUT].update(filter(None, reasons))
    config.hook.pytest_deselected(items=[item for item, reason in zip(items, reasons, strict=True) if reason])
    items[:] = [item for item, reason in zip(items, reasons, strict=True) if not reason]
    if config.stash[DEVICE].type == "cpu":
        items[:] = in_order_of_cost(items)


def pytest_collection_finish() -> None:
    """Modules and tests stay until the end: the garbage collector need not look at them each time."""
    gc.collect()
    gc.freeze()
    inductor = sys.modules.get("torch._inductor.config")
    if not torch.cuda.is_available() and hasattr(inductor, "cpp_cache_precompile_headers"):
        inductor.cpp_cache_precompile_headers = False  # they take as long as two kernels, and save little


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist tells the process that prints the summary what it left out."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left out"] = dict(session.config.stash[LEFT_OUT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error: object) -> None:
    """Every worker leaves out the same, so that one tells for all; one that crashed tells nothing."""
    if told := getattr(node, "workeroutput", {}).get("left out"):
        node.config.stash[LEFT_OUT] = Counter(told)


# Files of which each takes a worker long on the CPU, as measured; those of the host follow the rest, as their
# modules are compiled meanwhile.
LONGEST_FILES = [
    "test_transformers.py",
    "test_jax.py",
    "test_jax_bias.py",
    "test_append.py",
    "test_compile.py",
    "test_benchmarks.py",
    "test_distributed.py",
    "test_examples.py",
    "test_docs.py",
    "test_backward_transforms.py",
]


def in_order_of_cost(items: list[pytest.Item]) -> list[pytest.Item]:
    """Whole files, the longest first, so that no worker ends with a long one while the others wait."""
    counts = Counter(item.path for item in items)

    def place(item: pytest.Item) -> tuple[int, int]:
        if item.path.name in LONGEST_FILES:
            return 0, LONGEST_FILES.index(item.path.name)
        return 2 if item.path.parent.name == "host" else 1, -counts[item.path]

    return sorted(items, key=place)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[bool | None]:
    """A build for the GPUs that it saw has not all kernels: what asks for another is skipped."""
    try:
        return (yield)
    except (ValueError, RuntimeError) as error:
        if "this build has no" in str(error) and built_for_visible_gpus():
            pytest.skip(str(error))
        raise


@cache
def built_for_visible_gpus() -> bool:
    report = installed()
    return report.exists() and bool(json.loads(report.read_text()).get("built_for"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Each test draws the same numbers every time, and others with another FLASH_CUTE_TEST_SEED."""
    SEEDS.seed(f"{os.environ.get('FLASH_CUTE_TEST_SEED', '')} {item.nodeid}")
    torch.manual_seed(SEEDS.getrandbits(31))


def cases(family: str | None, kind: str) -> list[Case]:
    """Those of the table, or FLASH_CUTE_TEST_CASES random ones, others with another FLASH_CUTE_TEST_SEED."""
    if count := int(os.environ.get("FLASH_CUTE_TEST_CASES", "0")):
        return crossed(family, kind, count, os.environ.get("FLASH_CUTE_TEST_SEED", ""))
    return drawn(family, kind)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kernel" in metafunc.fixturenames:
        choices = kernels(metafunc.config.stash[DEVICE])
        for name in KINDS_OF_CASES.intersection(metafunc.fixturenames):
            rows = [(kernel, case) for kernel in choices for case in cases(kernel.family, name)]
            ids = [f"{kernel.family or 'cpu'}, {case}" for kernel, case in rows]
            metafunc.parametrize(("kernel", name), rows, ids=ids)
            return
        metafunc.parametrize("kernel", choices, ids=[kernel.family or "cpu" for kernel in choices])


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> torch.device:
    return pytestconfig.stash[DEVICE]


@pytest.fixture(scope="session")
def build_report_path() -> Path:
    """What the compiler said about the kernels that are installed."""
    if not installed().exists():
        pytest.skip("this flash_cute was built without a build report")
    return installed()


@pytest.fixture(autouse=True)
def leave_little_memory_behind():
    """Memory that PyTorch keeps is of no use to other processes, and workers of pytest-xdist share a GPU."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def forget_faults_of_masks():
    """A fault that a mask has on a GPU is said by a later call, which may be another test's."""
    yield
    if later := sys.modules.get("flash_cute.integrations._transformers_later"):
        later.forget()


def pytest_report_header(config: pytest.Config) -> str:
    device = config.stash[DEVICE]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {os.cpu_count()} cores"
    families = ", ".join(kernel.family or "cpu" for kernel in kernels(device))
    return f"flash_cute: {Path(flash_cute.__file__).parent}, device: {name}, kernels: {families}"


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """What was left out or skipped and why, in one line each, whatever flags pytest was given."""
    reasons = config.stash[LEFT_OUT] + Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped")
    )
    if reasons:
        terminalreporter.section("not run here")
        for reason, count in reasons.most_common():
            terminalreporter.line(f"{count} tests: {reason}")
