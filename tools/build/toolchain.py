"""What the kernels are compiled with: the C++ compiler, the CUDA toolkit, headers of CUTLASS and JAX."""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch
from instances import is_set

KILOBYTES_PER_JOB = 6 << 20  # no compile may take more


def version_of(program: str | Path) -> str:
    return subprocess.check_output([program, "--version"], text=True)


def cpp_compiler() -> str:
    # CXX may name a launcher before the compiler; setup.py brings its own.
    wanted = os.environ.get("CXX", "c++").split()[-1]
    if path := shutil.which(wanted):
        return path
    raise SystemExit(f"flash_cute: CXX must be a C++ compiler such as g++, got {wanted}, which is not there")


def toolkit_candidates(major: str) -> Iterator[Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            yield Path(home)
    if nvcc := shutil.which("nvcc"):
        # nvcc itself says where it lives: a wrapper script on PATH does not.
        dryrun = subprocess.run([Path(nvcc).resolve(), "--dryrun", "none.cu"], capture_output=True, text=True)
        if top := re.search(r"^#\$ TOP=(.+)$", dryrun.stderr, re.MULTILINE):
            yield Path(top[1]).resolve()
    yield Path("/usr/local/cuda")
    if nvidia := importlib.util.find_spec("nvidia"):
        yield from (Path(folder) / f"cu{major}" for folder in nvidia.submodule_search_locations)


def nvcc_version(toolkit: Path) -> tuple[int, ...]:
    """(12, 8) for CUDA 12.8; empty where there is no nvcc."""
    nvcc = toolkit / "bin" / "nvcc"
    said = version_of(nvcc) if nvcc.exists() else ""
    release = re.search(r"release (\d+)\.(\d+)", said)
    return tuple(map(int, release.groups())) if release else ()


def cuda_toolkit() -> Path:
    """The first toolkit whose nvcc has the CUDA major version of torch."""
    major = torch.version.cuda.split(".")[0]
    for home in toolkit_candidates(major):
        if nvcc_version(home)[:1] == (int(major),):
            return home
    raise SystemExit(
        f"flash_cute: no CUDA {major} compiler for torch {torch.__version__}. Install the toolkit and set "
        f"CUDA_HOME, or pip install 'cuda-toolkit[nvcc,crt,nvvm,cccl,cudart]=={torch.version.cuda}.*', "
        "or set FLASH_CUTE_CPU_ONLY=1"
    )


def missing_for_cuda() -> str | None:
    """Why this is going to be the CPU package, or None when it is not."""
    if is_set("FLASH_CUTE_CPU_ONLY"):
        return "FLASH_CUTE_CPU_ONLY is set"
    return None if torch.version.cuda else f"torch {torch.__version__} has no CUDA"


def cutlass_headers() -> Path:
    """CUTLASS's include folder: of the checkout in FLASH_CUTE_CUTLASS, or else of package nvidia-cutlass."""
    if checkout := os.environ.get("FLASH_CUTE_CUTLASS"):
        include = Path(checkout).resolve() / "include"
    elif package := importlib.util.find_spec("cutlass_library"):
        include = Path(package.origin).parent / "source" / "include"
    else:
        raise SystemExit("flash_cute: no CUTLASS headers: pip install nvidia-cutlass==4.2.0.0")
    if not (include / "cute" / "tensor.hpp").exists():
        raise SystemExit(f"flash_cute: {include} holds no CUTLASS headers (see third_party/README.md)")
    return include


def jax_headers() -> Path | None:
    """The include folder of package jaxlib, or None where it is missing: then there is no face for JAX."""
    package = importlib.util.find_spec("jaxlib")
    include = Path(package.origin).parent / "include" if package else None
    return include if include and (include / "xla/ffi/api/ffi.h").exists() else None


def jobs() -> int:
    """Parallel compile jobs: one per core, as long as the free memory carries the largest of them."""
    for variable in ("FLASH_CUTE_JOBS", "MAX_JOBS"):
        if wanted := os.environ.get(variable):
            if not re.fullmatch("[1-9][0-9]*", wanted):
                raise SystemExit(f"{variable} must be a number >= 1, got {wanted}")
            return int(wanted)
    kilobytes = int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1])
    return max(1, min(len(os.sched_getaffinity(0)), kilobytes // KILOBYTES_PER_JOB))
