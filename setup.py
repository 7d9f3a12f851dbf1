"""Builds what is native of flash_cute with the C++ compiler and nvcc, into the package.

libflash_cute.so has the kernels, from generated .cu files, and knows no torch (csrc/kernels). _C.abi3.so has
PyTorch's operators (csrc/*.cpp), _jax.so JAX's (csrc/jax). Without CUDA there is _C.abi3.so alone.

docs/building.md lists the FLASH_CUTE_* environment variables that are read here.
tools/build has what is compiled, with what, and how.
"""

import json
import os
import runpy
import shutil
import sys
from pathlib import Path

import torch
from setuptools import Extension, setup
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools" / "build"))  # pip does not run this with the checkout on the path

from instances import TOLERATED, built_for, other_instances, selected_instances, source_of, units_of  # noqa: E402
from ninja_file import BUILD, JAX_LIBRARY, KERNELS, LIBRARY, ninja_file, run_ninja, write  # noqa: E402
from toolchain import cuda_toolkit, missing_for_cuda  # noqa: E402

COMPILED = "generated/flash_cute/compiled.def"
REPORT = "build_report.json"
of_report = runpy.run_path(str(ROOT / "flash_cute" / "build_report.py"))
BUILT_FOR = of_report["BUILT_FOR"]


class BuildNative(cpp_extension.BuildExtension):
    """torch's build_ext, with a ninja file that gives each kernel family its own architectures."""

    def build_extension(self, extension: Extension) -> None:
        missing = missing_for_cuda()
        toolkit = None if missing else cuda_toolkit()
        selected = [] if missing else selected_instances()
        instances = [] if missing else [*selected, *other_instances(selected)]
        if missing:
            print(f"flash_cute: the CPU package, without kernels for NVIDIA GPUs: {missing}", flush=True)
        else:
            print(f"flash_cute: {len(instances)} kernel instances with {toolkit}/bin/nvcc", flush=True)
        capabilities = [] if missing else [f"{capability / 10:.1f}" for capability in built_for()]
        if capabilities:
            print(f"flash_cute: {BUILT_FOR.format(', '.join(capabilities))}", flush=True)
        write(BUILD / COMPILED, "".join(instance.definition for instance in instances))
        units = units_of(instances)
        for name, unit in units.items():
            write(BUILD / "generated" / f"{name}.cu", source_of(unit))
        write(BUILD / "build.ninja", ninja_file(extension.sources, units, toolkit))
        run_ninja()
        logs = {name: (BUILD / "objects" / f"{name}.o.log").read_text() for name in units}
        patterns = {instance.name: (instance.unit, instance.mangled) for instance in instances}
        report = {
            "torch": torch.__version__,
            "missing": missing,
            "built_for": capabilities,
            "tolerated": TOLERATED,
            **of_report["collect"](logs, patterns),
        }
        write(BUILD / REPORT, json.dumps(report, indent=1) + "\n")
        self.deliver(Path(self.get_ext_fullpath(extension.name)))

    def copy_extensions_to_source(self) -> None:
        for extension in self.extensions:
            self.deliver(ROOT / self.get_ext_filename(extension.name))

    def deliver(self, library: Path) -> None:
        library.parent.mkdir(parents=True, exist_ok=True)
        library.unlink(missing_ok=True)  # never written over: a running program may have it mapped
        shutil.copy(BUILD / LIBRARY, library)
        for name in (KERNELS, JAX_LIBRARY):
            beside = library.with_name(name)
            beside.unlink(missing_ok=True)
            if f"build {name}:" in (BUILD / "build.ninja").read_text():
                shutil.copy(BUILD / name, beside)
        shutil.copy(BUILD / REPORT, library.with_name(REPORT))


if not os.environ.get("CXX", "c++").strip():
    del os.environ["CXX"]  # else setuptools and torch, too, look for a compiler without a name

setup(
    license="BSD-3-Clause",
    ext_modules=[
        Extension(
            "flash_cute._C",
            sources=sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/*.cpp")),
            py_limited_api=True,
        )
    ],
    cmdclass={"build_ext": BuildNative},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
