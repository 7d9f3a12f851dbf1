"""The build's settings: what setup.py takes from the environment, and what it says of what makes no sense."""

from __future__ import annotations

import runpy
import subprocess
import sys
from unittest.mock import patch

import pytest
from cases import ROOT

pytest.importorskip("setuptools")


@pytest.fixture(scope="module")
def build():
    """What setup.py and the modules of tools/build define."""
    with patch("setuptools.setup"), patch.object(sys, "path", list(sys.path)):
        names = runpy.run_path(str(ROOT / "setup.py"))
    modules = [path.stem for path in (ROOT / "tools" / "build").glob("*.py")]
    return names | {name: value for module in modules for name, value in vars(sys.modules[module]).items()}


@pytest.mark.parametrize(
    ("function", "variable", "value", "sentence"),
    [
        ("jobs", "FLASH_CUTE_JOBS", "x", "FLASH_CUTE_JOBS must be a number >= 1, got x"),
        ("jobs", "FLASH_CUTE_JOBS", "0", "FLASH_CUTE_JOBS must be a number >= 1, got 0"),
        ("jobs", "MAX_JOBS", "-2", "MAX_JOBS must be a number >= 1, got -2"),
        (
            "cpp_compiler",
            "CXX",
            "no-such-compiler",
            "flash_cute: CXX must be a C++ compiler such as g++, got no-",
        ),
        ("missing_for_cuda", "FLASH_CUTE_CPU_ONLY", "maybe", "FLASH_CUTE_CPU_ONLY must be 0 or 1, got maybe"),
        (
            "selected_instances",
            "FLASH_CUTE_ARCHS",
            "100a",
            "FLASH_CUTE_ARCHS must be of 80, 80+PTX, likewise",
        ),
        ("selected_instances", "FLASH_CUTE_ARCHS", "75", "FLASH_CUTE_ARCHS must be of 80, 80+PTX, likewise"),
        ("selected_instances", "FLASH_CUTE_ARCHS", "8.0", "FLASH_CUTE_ARCHS must be of 80, 80+PTX, likewise"),
        ("selected_instances", "FLASH_CUTE_HEAD_DIMS", "7", "FLASH_CUTE_HEAD_DIMS must be of 64, 96, 128"),
    ],
)
def test_wrong_settings(build, function, variable, value, sentence, monkeypatch):
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit) as raised:
        build[function]()
    assert str(raised.value).startswith(sentence)


def test_a_family_without_an_architecture(build, monkeypatch):
    monkeypatch.setenv("FLASH_CUTE_ARCHS", "80")
    assert {instance.family for instance in build["selected_instances"]()} == {"sm80"}
    monkeypatch.setenv("FLASH_CUTE_FAMILIES", "sm80,sm90")
    with pytest.raises(SystemExit, match="FLASH_CUTE_ARCHS must have one for sm90, got 80"):
        build["selected_instances"]()


def test_rows_become_instances(build):
    """A row is compiled for the element types of the axis, or for those that it lists."""
    table = """
#define FLASH_CUTE_INSTANCE(pass, family, head_dim, variant, ...)
FLASH_CUTE_ELEMENT(fp16)
FLASH_CUTE_ELEMENT(bf16)
FLASH_CUTE_INSTANCE(backward, sm90, 64, plain)
FLASH_CUTE_INSTANCE(forward, sm80, 96, general, fp32, bf16)
"""
    instances = build["listed_instances"](table)
    assert [instance.name for instance in instances] == [
        "backward_sm90_fp16_64",
        "backward_sm90_bf16_64",
        "forward_sm80_fp32_96_general",
        "forward_sm80_bf16_96_general",
    ]
    assert instances[2].definition == "FLASH_CUTE_COMPILED(forward, sm80, fp32, 96, general)\n"


def test_instances_that_take_longest_come_first(build, monkeypatch):
    monkeypatch.setenv("FLASH_CUTE_HEAD_DIMS", "64,256")
    monkeypatch.setenv("FLASH_CUTE_ELEMENTS", "bf16")
    names = [instance.name for instance in build["selected_instances"]()]
    kernels = [
        f"{direction}_{family}" for family in ("sm80", "sm90") for direction in ("backward", "forward")
    ]
    expected = []
    for head_dim in (256, 64):
        for kernel in kernels:
            expected += [f"{kernel}_bf16_{head_dim}"]
            if kernel.startswith("forward"):
                expected += [f"{kernel}_bf16_{head_dim}_split"]
            expected += [f"{kernel}_bf16_{head_dim}_ranges"]
    assert names == expected


@pytest.mark.parametrize(("value", "expected"), [("", False), ("false", False), ("no", False), ("1", True)])
def test_switches(build, value, expected, monkeypatch):
    monkeypatch.setenv("FLASH_CUTE_CPU_ONLY", value)
    assert build["is_set"]("FLASH_CUTE_CPU_ONLY") is expected


@pytest.mark.parametrize(
    ("version", "lines", "expected"),
    [
        ((12, 8), "", "--compress-mode"),
        ((12, 6), "1", "-lineinfo"),
        ((13, 0), "1", "--compress-mode -lineinfo"),
    ],
)
def test_flags_of_kernels(build, version, lines, expected, monkeypatch):
    monkeypatch.setenv("FLASH_CUTE_LINEINFO", lines)
    flags = build["nvcc_flags"](version)
    for flag in ("--compress-mode", "-lineinfo"):
        assert (flag in flags) == (flag in expected)


def test_depfiles_keep_the_headers_of_the_project(build, tmp_path):
    """For those of torch, the toolkit and the system stand stamps; of a checkout of CUTLASS they are kept."""
    depfile = tmp_path / "x.d"
    kept = "objects/x.o: generated/x.cu ../../include/flash_cute/params.hpp"
    checkout = "external/cutlass_checkout/cute/tensor.hpp"
    depfile.write_text(
        f"{kept} /usr/include/stdio.h \\\n external/cutlass/cute/a.hpp {checkout} \\\n external/torch/a.h\n"
    )
    subprocess.run(["sed", "-i", "-E", f"s#{build['STAMPED']}##g", depfile], check=True)
    assert depfile.read_text().replace("\\\n", " ").split() == [*kept.split(), checkout]
