"""tools/build/same_code.py: what counts as the same machine code."""

from __future__ import annotations

import runpy

import pytest
from support.cases import ROOT

SASS = """
\tcode for sm_90a
\t\tFunction : _ZN10flash_cute6kernelI{name}EEv
        /*0000*/                   ULDC UR4, c[0x0][{offset}] ;     /* 0x00000a00ff017624 */
                                                                    /* 0x000fe400078e00ff */
        /*0010*/                   UMOV UR7, {place} ;              /* 0x00000a00ff017624 */
        /*0020*/                   ULDC UR5, c[0x0][UR7+{offset}] ; /* 0x00000a00ff017624 */
        /*0030*/               @P0 FADD {register}, R1, R2 ;        /* 0x00000a00ff017624 */
\t\t..........
"""
USAGE = """
Fatbin elf code:
================
arch = sm_90a

Resource usage:
 Function _ZN10flash_cute6kernelI{name}EEv:
  REG:{registers} STACK:0 SHARED:16 LOCAL:0 CONSTANT[0]:1020 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
KERNEL = {"name": "1A", "offset": "0x210", "place": "0x19c", "register": "R0", "registers": 32}


@pytest.fixture(scope="module")
def tool():
    return runpy.run_path(str(ROOT / "tools" / "build" / "same_code.py"))


@pytest.fixture
def code_of(tool, monkeypatch):
    """The code of a kernel as cuobjdump would print it."""

    def code(**changes):
        text = {"-sass": SASS.format(**KERNEL | changes), "-res-usage": USAGE.format(**KERNEL | changes)}
        monkeypatch.setitem(tool["code_of_file"].__globals__, "listing", lambda flag, path: text[flag])
        return tool["code_of_file"](None)

    return code


def test_code_is_found_by_its_name_without_template_arguments(code_of):
    code = code_of()
    assert list(code) == ["sm_90a kernel"]
    assert code["sm_90a kernel"].total() == 1


@pytest.mark.parametrize("change", [{"name": "2BC"}, {"offset": "0x218"}, {"place": "0x1a4"}])
def test_what_moves_with_the_parameters_is_the_same(tool, code_of, change):
    assert tool["differences"](code_of(), code_of(**change), False) == []


@pytest.mark.parametrize("change", [{"register": "R3"}, {"registers": 40}])
def test_other_code_is_not(tool, code_of, change):
    (difference,) = tool["differences"](code_of(), code_of(**change), False)
    assert difference == "sm_90a kernel: 1 of 1 are not in NEW, 1 of 1 not in OLD"


def test_a_part_of_a_build(tool, code_of):
    code = code_of()
    assert tool["differences"](code, {}, False)
    assert tool["differences"](code, {}, True) == []
    assert tool["differences"]({}, code, True)


def test_the_committed_hashes(tool):
    """They name their compiler, and are of both families' kernels."""
    code, versions = tool["code_of"](ROOT / "tools" / "build" / "code.json")
    assert set(versions) == {"nvcc", "cutlass", "cuobjdump"}
    assert {"sm_90a forward_kernel_sm90", "sm_80 backward_kernel_sm80", "sm_90 row_softmax"} <= set(code)
