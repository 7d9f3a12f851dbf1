"""Builds the host module, once per state of its sources."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

HERE = Path(__file__).parent
INCLUDE = HERE.parent.parent / "include"


@pytest.fixture(scope="session")
def host(pytestconfig: pytest.Config):
    """The device-independent C++ as a Python module."""
    pybind11 = pytest.importorskip("pybind11", reason="pybind11 is not installed")
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"no C++ compiler ({compiler})")
    sources = sorted(
        [*HERE.rglob("*.cpp"), *HERE.rglob("*.def"), *INCLUDE.rglob("*.hpp"), *INCLUDE.rglob("*.def")]
    )
    state = hashlib.sha256(b"".join(source.read_bytes() for source in sources) + sys.version.encode())
    folder = pytestconfig.cache.mkdir("host") / state.hexdigest()[:16]
    library = folder / f"flash_cute_host{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not library.exists():
        folder.mkdir(exist_ok=True)
        includes = [HERE, INCLUDE, pybind11.get_include(), sysconfig.get_path("include")]
        flags = [
            "-std=c++20",
            "-O1",
            "-Wall",
            "-Werror",
            "-fPIC",
            "-shared",
            *(f"-I{path}" for path in includes),
        ]
        unfinished = library.with_suffix(".unfinished")
        subprocess.run([compiler, *flags, HERE / "host.cpp", "-o", unfinished], check=True)
        unfinished.rename(library)
    spec = importlib.util.spec_from_file_location("flash_cute_host", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
