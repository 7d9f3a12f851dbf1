"""Builds the host module, once per state of its sources."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
INCLUDE = HERE.parent.parent / "include"
CALLS = HERE.parent.parent / "csrc"  # what plans a call, without torch


# What each fixture loads, and a header of CUDA's that this includes.
MODULES = {
    "host": ("flash_cute_host", None),
    "kernel_on_host": ("flash_cute_append", "cuda_fp16.h"),
    "planned": ("flash_cute_planned", "cuda_runtime.h"),
    "launcher": ("flash_cute_launcher", "cuda_runtime.h"),
}


def module(pytestconfig: pytest.Config, fixture: str) -> ModuleType:
    library = built(pytestconfig, fixture)
    spec = importlib.util.spec_from_file_location(MODULES[fixture][0], library)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def built(pytestconfig: pytest.Config, fixture: str) -> Path:
    """The library of what a fixture loads, <name>.cpp of this folder, which is compiled unless it was."""
    name, header = MODULES[fixture]
    pybind11 = pytest.importorskip("pybind11", reason="pybind11 is not installed")
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"no C++ compiler ({compiler})")
    include = [folder for folder in cuda_headers() if (folder / header).exists()][:1] if header else []
    if header and not include:
        pytest.skip("no CUDA headers")
    patterns = "conftest.py", "*.cpp", "*.def", "*.hpp", "*.cuh"
    sources = sorted(
        path for folder in (HERE, INCLUDE, CALLS) for pattern in patterns for path in folder.rglob(pattern)
    )
    state = hashlib.sha256(b"".join(source.read_bytes() for source in sources) + sys.version.encode())
    folder = kept(pytestconfig) / state.hexdigest()[:16]
    library = folder / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    folder.mkdir(exist_ok=True)
    with (folder / f"{name}.lock").open("w") as lock:  # workers of pytest-xdist wait for one of them
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            build(library, compiler, [pybind11.get_include(), sysconfig.get_path("include")], include)
    return library


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compiles what tests will load while others run. What fails here fails again, or is skipped, there."""
    needed = {name for item in session.items for name in item.fixturenames}

    def build_all() -> None:
        for fixture in filter(needed.__contains__, MODULES):
            with suppress(Exception, pytest.skip.Exception):
                built(session.config, fixture)

    if not session.config.option.collectonly:
        threading.Thread(target=build_all, daemon=True).start()


def kept(pytestconfig: pytest.Config) -> Path:
    """A folder that outlives the run, also of `pytest -p no:cacheprovider`."""
    if cache := getattr(pytestconfig, "cache", None):
        return cache.mkdir("host")
    folder = Path(tempfile.gettempdir()) / f"flash_cute-host-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def build(library: Path, compiler: str, includes: list[str], system_includes: list[Path]) -> None:
    flags = ["-std=c++20", "-O1", "-Wall", "-Werror", "-fPIC", "-shared", "-Wl,-Bsymbolic"]
    flags += [f"-I{path}" for path in (HERE, INCLUDE, *includes)]
    flags += [f"-isystem{path}" for path in system_includes]
    unfinished = library.with_suffix(f".{os.getpid()}")
    source = HERE / f"{library.name.partition('.')[0]}.cpp"
    subprocess.run([compiler, *flags, source, "-o", unfinished], check=True)
    unfinished.rename(library)


@pytest.fixture(scope="session")
def host(pytestconfig: pytest.Config) -> ModuleType:
    """The device-independent C++ as a Python module."""
    return module(pytestconfig, "host")


@pytest.fixture(scope="session")
def launcher(pytestconfig: pytest.Config) -> ModuleType:
    """What launches kernels, on a CUDA runtime and driver that fail when told to."""
    return module(pytestconfig, "launcher")


@pytest.fixture(scope="session")
def planned(pytestconfig: pytest.Config) -> ModuleType:
    """What decides a call of any face before it knows where its operands lie."""
    return module(pytestconfig, "planned")


@pytest.fixture(scope="session")
def kernel_on_host(pytestconfig: pytest.Config) -> ModuleType:
    """append_kv's kernel, on threads of the host."""
    return module(pytestconfig, "kernel_on_host")


def cuda_headers() -> Iterator[Path]:
    """Where CUDA's headers may be: a toolkit, or NVIDIA's wheels that torch brings."""
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda", "/usr/local/cuda-13.0"):
        if home:
            yield Path(home) / "include"
    if nvidia := importlib.util.find_spec("nvidia"):
        for folder in nvidia.submodule_search_locations:
            yield from Path(folder).glob("cu*/include")
