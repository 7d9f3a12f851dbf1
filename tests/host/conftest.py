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
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
INCLUDE = HERE.parent.parent / "include"


def module(pytestconfig: pytest.Config, name: str, *include: Path) -> ModuleType:
    """<name>.cpp of this folder as a Python module; include: more folders of headers."""
    pybind11 = pytest.importorskip("pybind11", reason="pybind11 is not installed")
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"no C++ compiler ({compiler})")
    patterns = "conftest.py", "*.cpp", "*.def", "*.hpp", "*.cuh"
    sources = sorted(
        path for folder in (HERE, INCLUDE) for pattern in patterns for path in folder.rglob(pattern)
    )
    state = hashlib.sha256(b"".join(source.read_bytes() for source in sources) + sys.version.encode())
    folder = pytestconfig.cache.mkdir("host") / state.hexdigest()[:16]
    library = folder / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    folder.mkdir(exist_ok=True)
    with (folder / f"{name}.lock").open("w") as lock:  # workers of pytest-xdist wait for one of them
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            build(library, compiler, [pybind11.get_include(), sysconfig.get_path("include")], include)
    spec = importlib.util.spec_from_file_location(name, library)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def build(library: Path, compiler: str, includes: list[str], system_includes: tuple[Path, ...]) -> None:
    flags = ["-std=c++20", "-O1", "-Wall", "-Werror", "-fPIC", "-shared", "-Wl,-Bsymbolic"]
    flags += [f"-I{path}" for path in (HERE, INCLUDE, *includes)]
    flags += [f"-isystem{path}" for path in system_includes]
    unfinished = library.with_suffix(".unfinished")
    source = HERE / f"{library.name.partition('.')[0]}.cpp"
    subprocess.run([compiler, *flags, source, "-o", unfinished], check=True)
    unfinished.rename(library)


@pytest.fixture(scope="session")
def host(pytestconfig: pytest.Config) -> ModuleType:
    """The device-independent C++ as a Python module."""
    return module(pytestconfig, "flash_cute_host")


@pytest.fixture(scope="session")
def launcher(pytestconfig: pytest.Config) -> ModuleType:
    """What launches kernels, on a CUDA runtime and driver that fail when told to."""
    for folder in cuda_headers():
        if (folder / "cuda_runtime.h").exists():
            return module(pytestconfig, "flash_cute_launcher", folder)
    pytest.skip("no CUDA headers")


def cuda_headers() -> Iterator[Path]:
    """Where CUDA's headers may be: a toolkit, or NVIDIA's wheels that torch brings."""
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda", "/usr/local/cuda-13.0"):
        if home:
            yield Path(home) / "include"
    if nvidia := importlib.util.find_spec("nvidia"):
        for folder in nvidia.submodule_search_locations:
            yield from Path(folder).glob("cu*/include")
