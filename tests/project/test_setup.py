"""The build's settings: what setup.py takes from the environment, and what it says of what makes no sense."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from itertools import product
from operator import ge
from unittest.mock import patch

import pytest
from support.cases import ROOT

pytest.importorskip("setuptools")


@pytest.fixture(scope="module")
def build():
    """What setup.py and the modules of tools/build define."""
    with patch("setuptools.setup"), patch.object(sys, "path", list(sys.path)):
        names = runpy.run_path(str(ROOT / "setup.py"))
    stems = (path.stem for path in (ROOT / "tools" / "build").glob("*.py"))
    modules = [stem for stem in stems if stem in sys.modules]
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
        (
            "selected_instances",
            "FLASH_CUTE_FAMILIES",
            "sm70",
            "FLASH_CUTE_FAMILIES must be of all, sm80, sm90",
        ),
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


@pytest.fixture
def visible(build, monkeypatch):
    """Sets the compute capabilities of the GPUs that the build sees."""
    for variable in ("FLASH_CUTE_FAMILIES", "FLASH_CUTE_ARCHS"):
        monkeypatch.delenv(variable, raising=False)
    return lambda *capabilities: monkeypatch.setitem(
        build["built_for"].__globals__, "visible_capabilities", lambda: list(capabilities)
    )


def head_dims_of(instance):
    return int(instance.head_dim), int(instance.head_dim_v or instance.head_dim)


def taken(instances, direction, element, head_dims, variant, deterministic):
    """What a call on Hopper takes that names no family: as family_for and backward_of of planned_call.cpp."""

    def serving(family):
        if direction == "backward" and variant == "general" and deterministic:
            family = "sm80"
        axes = direction, family, element, variant
        fits = [
            instance
            for instance in instances
            if (instance.direction, instance.family, instance.element, instance.variant) == axes
            and all(map(ge, head_dims_of(instance), head_dims))
        ]
        return min(fits, key=lambda instance: sum(head_dims_of(instance)), default=None)

    return serving("sm90") or serving("sm80")


def test_a_build_for_hopper_has_all_that_calls_there_take(build, visible):
    visible()
    everything = build["selected_instances"]()
    visible(90)
    of_hopper = build["selected_instances"]()
    assert len(of_hopper) < len(everything)
    used = set()
    elements = dict.fromkeys(instance.element for instance in everything)
    widths = {width for instance in everything for width in head_dims_of(instance)}
    for element, direction, variant, deterministic in product(
        elements, ("forward", "backward"), ("plain", "split", "general"), (False, True)
    ):
        for head_dims in product(widths, widths):
            call = direction, element, head_dims, variant, deterministic
            instance = taken(everything, *call)
            assert taken(of_hopper, *call) == instance
            used.add(instance)
    assert used - {None} == set(of_hopper)


@pytest.mark.parametrize(
    ("capabilities", "families"),
    [((80,), {"sm80"}), ((120,), {"sm80"}), ((75,), {"sm80", "sm90"}), ((86, 90), {"sm80", "sm90"})],
)
def test_visible_gpus_choose_families(build, visible, monkeypatch, capabilities, families):
    visible()
    everything = build["selected_instances"]()
    visible(*capabilities)
    assert {instance.family for instance in build["selected_instances"]()} == families
    assert bool(build["built_for"]()) == (capabilities != (75,))
    for value in ("all", "all,sm90"):
        monkeypatch.setenv("FLASH_CUTE_FAMILIES", value)
        assert build["selected_instances"]() == everything
    assert build["built_for"]() == []
    monkeypatch.setenv("FLASH_CUTE_FAMILIES", "sm90")
    assert {instance.family for instance in build["selected_instances"]()} == {"sm90"}
    monkeypatch.delenv("FLASH_CUTE_FAMILIES")
    monkeypatch.setenv("FLASH_CUTE_ARCHS", "80;90a")
    assert {instance.family for instance in build["selected_instances"]()} == {"sm80", "sm90"}


def test_rows_become_instances(build):
    """A row is compiled for the element types of the axis, or for those that it lists."""
    table = """
#define FLASH_CUTE_INSTANCE(pass, family, head_dim, variant, ...)
FLASH_CUTE_ELEMENT(fp16)
FLASH_CUTE_ELEMENT(bf16)
FLASH_CUTE_INSTANCE(backward, sm90, 64, plain)
FLASH_CUTE_INSTANCE(forward, sm80, 96, general, fp32, bf16)
FLASH_CUTE_PAIR(forward, sm90, 192, 128, general)
FLASH_CUTE_PAIR(forward, sm90, 64, 256, plain, bf16)
"""
    instances = build["listed_instances"](table)
    assert [instance.name for instance in instances] == [
        "backward_sm90_fp16_64",
        "backward_sm90_bf16_64",
        "forward_sm80_fp32_96_general",
        "forward_sm80_bf16_96_general",
        "forward_sm90_fp16_192x128_general",
        "forward_sm90_bf16_192x128_general",
        "forward_sm90_bf16_64x256",
    ]
    assert instances[2].definition == "FLASH_CUTE_COMPILED(forward, sm80, fp32, 96, general, 96)\n"
    assert instances[4].definition == "FLASH_CUTE_COMPILED(forward, sm90, fp16, 192, general, 128)\n"
    assert instances[6].instantiated == (
        "ForwardLaunch<Instance<Family::sm90, ElementType::bf16, 64, Variant::plain, 256>>"
    )


def test_instances_that_take_longest_come_first(build, monkeypatch):
    monkeypatch.setenv("FLASH_CUTE_FAMILIES", "all")
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
            expected += [f"{kernel}_bf16_{head_dim}_general"]
    assert names == expected


def test_instances_share_translation_units(build, monkeypatch):
    """One for each pass, family and head dim; the Ampere family's largest are cut for their memory."""
    monkeypatch.delenv("FLASH_CUTE_HEAD_DIMS", raising=False)
    selected = build["selected_instances"]()
    instances = [*selected, *build["other_instances"](selected)]
    units = build["units_of"](instances)
    assert sum(map(len, units.values())) == len(instances)
    assert {"forward_sm90_64", "backward_sm80_256_bf16", "softmax_kernels", "append_kernels"} <= set(units)
    assert [x.element for x in units["pairs_sm80"]] == ["fp16", "bf16", "fp32", "tf32"]
    assert [x.element for x in units["pairs_sm90"]] == ["fp16", "bf16"]
    for unit in units.values():
        assert len({instance.register_flags for instance in unit}) == 1
        source = build["source_of"](unit)
        assert source.count("template struct") == len(unit)
    names = [instance.name for instance in units["forward_sm90_64"]]
    assert "forward_sm90_fp16_64_split" in names
    for axes, unit, name in (
        ("Li64ELNS_7VariantE1ELi64E", "forward_sm90_64", "forward_sm90_fp16_64_split"),
        ("Li192ELNS_7VariantE0ELi192E", "forward_sm90_192", "forward_sm90_fp16_192"),
        ("Li192ELNS_7VariantE0ELi128E", "forward_sm90_192", "forward_sm90_fp16_192x128"),
    ):
        mangled = f"INS_8InstanceILNS_6FamilyE1ELNS_11ElementTypeE0E{axes}EEXt"
        assert [x.name for x in units[unit] if re.search(x.mangled, mangled)] == [name]


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
