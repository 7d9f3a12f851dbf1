"""How everything is compiled: the build folder, its links and stamps, ninja's rules and the run of ninja."""

import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from instances import ROOT, Compiled, flags_of, is_set
from toolchain import cpp_compiler, cutlass_headers, jax_headers, jobs, nvcc_version, version_of

BUILD = ROOT / "build" / "native"
LIBRARY = "_C.so"
KERNELS = "libflash_cute.so"  # without torch; both faces link it
JAX_LIBRARY = "_jax.so"

FLAGS = "-O3 -std=c++20 -DNDEBUG"
CPP_FLAGS = (
    f"{FLAGS} -fPIC -fvisibility=hidden -Wall -Wextra"
    " -DPy_LIMITED_API=0x030a0000 -DTORCH_TARGET_VERSION=0x020a000000000000"
)
NVCC_FLAGS = (
    f"{FLAGS} -Xcompiler=-fPIC,-fvisibility=hidden -Xptxas=-v --expt-relaxed-constexpr --expt-extended-lambda"
)
LINK_FLAGS = "-shared -Wl,--exclude-libs,ALL -Wl,-s -Wl,-rpath,'$$ORIGIN'"
# libtorch stays although nothing refers to it: through it the weak symbols for CUDA are found.
TORCH_LIBRARIES = "-Wl,--no-as-needed -ltorch -Wl,--as-needed -ltorch_cpu -lc10"
CUDA_LIBRARIES = "-lcudart_static -ldl -lrt -lpthread"

# Headers in a depfile for which stamps stand: all but the project's own, and those of a checkout of CUTLASS.
STAMPED = "(^| )(/|external/(torch|python|jaxlib|toolkit|cutlass)/)[^ ]*"
REPORTED_LINES = "^(ptxas info|flash_cute measure|    [0-9]+ bytes stack frame)"
MEASURE = "external/interpreter ../../tools/measure.py"  # in the build folder
CCACHE_SETTINGS = {
    "CCACHE_BASEDIR": str(ROOT),
    "CCACHE_COMPILERCHECK": "%compiler% --version",
    # Headers from the depfile: ccache's own search sees one pass of nvcc, misses what is included under
    # `#if __CUDA_ARCH__`, and would hand out stale objects.
    "CCACHE_DEPEND": "1",
    "CCACHE_NOHASHDIR": "1",  # it takes -gencode=...sm_90a for -g, and with -g the folder would count
    "CCACHE_PREFIX": " ".join(str(BUILD / word) for word in MEASURE.split()),
    # Apart from what was compiled without MEASURE, whose stored messages lack its line.
    "CCACHE_NAMESPACE": "flash_cute",
}


def write(path: Path, text: str) -> None:
    """Writes a file only when its text changes, so that ninja compiles only what did."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def link(name: str, target: Path) -> str:
    """Links a folder into the build folder and returns its path there.

    Every path that a compiler sees is thus relative to the build folder, the same in each checkout and in
    each of pip's temporary environments: ccache finds again what it has compiled elsewhere, and ninja what it
    has compiled here.
    """
    path = BUILD / "external" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    return str(path.relative_to(BUILD))


def stamp(name: str, version: str) -> str:
    """A file that holds the version of what objects are made with, and stands for its headers.

    These are new files in each of pip's temporary environments, and mostly the same ones.
    """
    write(BUILD / "stamps" / name, version + "\n")
    return f"stamps/{name}"


def compiler_launcher() -> str:
    """What stands before a compiler. ccache's settings go with it, so that ninja by hand does the same."""
    if not (ccache := shutil.which("ccache")):
        return MEASURE
    return shlex.join(["env", *(f"{name}={value}" for name, value in CCACHE_SETTINGS.items()), ccache])


def linked_cutlass() -> tuple[str, str]:
    """CUTLASS's headers in the build folder, and a stamp. Of a checkout, depfiles name the headers, too."""
    headers = cutlass_headers()
    if os.environ.get("FLASH_CUTE_CUTLASS"):
        return link("cutlass_checkout", headers), stamp("cutlass", str(headers))
    return link("cutlass", headers), stamp("cutlass", importlib.metadata.version("nvidia-cutlass"))


@dataclass(frozen=True)
class Rule:
    """How ninja compiles one kind of source, and again where the text of a stamp has changed."""

    name: str
    command: str
    stamps: list[str]

    def lines(self) -> list[str]:
        command = f"{compiler_launcher()} {self.command} -MD -MF $out.d -c $in -o $out"
        # The log keeps what ptxas -v and tools/measure.py say, and ccache repeats it; the rest is shown.
        talk = f"2> $out.log; status=$$?; grep -vE '{REPORTED_LINES}' $out.log; exit $$status"
        return [
            f"rule {self.name}",
            f"  command = {{ {command} && sed -i -E 's#{STAMPED}##g' $out.d; }} {talk}",
            f"  description = {self.name} $in",
            "  depfile = $out.d",
            "  deps = gcc",
        ]

    def build(self, target: str, source: str) -> str:
        return f"build {target}: {self.name} {source} | {' '.join(self.stamps)}"


def nvcc_flags(version: tuple[int, ...]) -> str:
    """For kernels. Line numbers change no instruction; they take a fifth of the time, half of the library."""
    compression = " --compress-mode=size" if version >= (12, 8) else ""
    lines = " -lineinfo" if is_set("FLASH_CUTE_LINEINFO") else ""
    return NVCC_FLAGS + compression + lines


def rules(toolkit: Path | None) -> tuple[Rule, Rule, Rule | None, Rule | None]:
    """For sources that see torch, those that see CUDA alone, those that see JAX, and kernels."""
    compiler, includes = cpp_compiler(), f"-Igenerated -I{os.path.relpath(ROOT / 'include', BUILD)}"
    torch_home = link("torch", Path(torch.__file__).parent)
    python_headers = link("python", Path(sysconfig.get_path("include")))
    cpp = f"{compiler} {CPP_FLAGS} {includes}"
    stamps = [stamp("cpp", version_of(compiler))]
    of_jax = of_kernels = None
    if toolkit:
        cuda, (cutlass, of_cutlass) = link("toolkit", toolkit), linked_cutlass()
        cpp += f" -DFLASH_CUTE_WITH_CUDA -isystem {cuda}/include"
        stamps.append(stamp("nvcc", version_of(toolkit / "bin" / "nvcc")))
        flags = nvcc_flags(nvcc_version(toolkit))
        nvcc = f"{cuda}/bin/nvcc -ccbin={compiler} {flags} {includes} -isystem {cutlass} $architectures"
        of_kernels = Rule("cuda", nvcc, [*stamps, of_cutlass])
        if headers := jax_headers():
            command = f"{cpp} -fvisibility=default -isystem {link('jaxlib', headers)}"
            of_jax = Rule(
                "cpp_jax", command, [*stamps, stamp("jaxlib", importlib.metadata.version("jaxlib"))]
            )
    version = f"torch {torch.__version__}, Python {platform.python_version()}"
    command = f"{cpp} -isystem {torch_home}/include -isystem {python_headers}"
    return (
        Rule("cpp_torch", command, [*stamps, stamp("torch", version)]),
        Rule("cpp", cpp, stamps),
        of_jax,
        of_kernels,
    )


def ninja_file(sources: list[str], units: dict[str, list[Compiled]], toolkit: Path | None) -> str:
    """The text of build.ninja for the C++ sources and the translation units of kernels."""
    link("interpreter", Path(sys.executable))
    of_torch, plain, of_jax, of_kernels = rules(toolkit)
    lines = [line for rule in (of_torch, plain, of_jax, of_kernels) if rule for line in rule.lines()]
    lines += [
        "rule link",
        f"  command = {cpp_compiler()} {LINK_FLAGS} $in -o $out -L. $libraries",
        "  description = link $out",
    ]
    for name, unit in units.items():
        lines += [of_kernels.build(f"objects/{name}.o", f"generated/{name}.cu")]
        lines += [f"  architectures = {flags_of(unit)}"]
    cuda_libraries = ""
    if toolkit:  # lib64: toolkits; lib: wheels
        cuda_libraries = f"-Lexternal/toolkit/lib64 -Lexternal/toolkit/lib {CUDA_LIBRARIES}"
    linked = {LIBRARY: (sources, of_torch, f"-Lexternal/torch/lib {TORCH_LIBRARIES}")}
    if toolkit:
        linked[KERNELS] = (
            ["csrc/kernels/planned_call.cpp", "csrc/kernels/kernels.cpp"],
            plain,
            cuda_libraries,
        )
    if of_jax:
        linked[JAX_LIBRARY] = (
            ["csrc/jax/attention_ffi.cpp", "csrc/jax/softmax_ffi.cpp"],
            of_jax,
            cuda_libraries,
        )
    for library, (parts, rule, needed) in linked.items():
        objects = [f"objects/{Path(part).stem}.o" for part in parts]
        for part, target in zip(parts, objects, strict=True):
            lines += [rule.build(target, os.path.relpath(ROOT / part, BUILD))]
        if library == KERNELS:
            objects += [f"objects/{name}.o" for name in units]
        elif toolkit:
            needed = f"-l:{KERNELS} {needed} {cuda_libraries if library == LIBRARY else ''}"
            objects += [f"| {KERNELS}"]
        lines += [f"build {library}: link {' '.join(objects)}", f"  libraries = {needed}"]
    return "\n".join(lines) + "\n"


def run_ninja() -> None:
    # pip may run this without the venv's bin folder on PATH, so ninja's own package is asked first.
    ninja = [sys.executable, "-m", "ninja"] if importlib.util.find_spec("ninja") else ["ninja"]
    command = [*ninja, "-C", BUILD, "-j", str(jobs())]
    if subprocess.run(command).returncode:
        raise SystemExit("flash_cute: the build failed; the compiler's message is above")
