"""What the compiler said about the kernels that are installed."""

from __future__ import annotations

import json

import pytest
import torch

from flash_cute import build_report


@pytest.fixture(scope="module")
def report(build_report_path) -> dict:
    report = json.loads(build_report_path.read_text())
    if not report["kernels"]:
        pytest.skip(f"this flash_cute has no kernels: {report['missing']}")
    return report


def test_no_serialised_wgmma_and_no_spill_but_those_tolerated(report):
    assert build_report.faults(report) == []


def test_every_kernel_is_reported(report):
    """For each instance and architecture the registers and the memory, and what compiling a unit took."""
    assert {kernel["unit"] for kernel in report["kernels"]} == set(report["units"])
    compiled = {
        f"{kernel['pass']}_{kernel['family']}_{kernel['element']}_{build_report.width(kernel)}"
        + f"_{kernel['variant']}".removesuffix("_plain")
        for kernel in json.loads(torch.ops.flash_cute.compiled())
    }
    assert compiled <= {kernel["instance"] for kernel in report["kernels"]}
    for kernel in report["kernels"]:
        assert 0 < kernel["registers"] <= 255
        assert kernel["architecture"].startswith("sm_")
    assert all(cost["seconds"] > 0 for cost in report["units"].values())


def test_a_pair_of_head_dims_is_named_as_its_instance():
    assert build_report.width({"head_dim": 128, "head_dim_v": 128}) == "128"
    assert build_report.width({"head_dim": 192, "head_dim_v": 128}) == "192x128"


def test_faults_are_found():
    log = """flash_cute measure: 10.5 seconds, 900 MB
ptxas info    : Compiling entry function '_ZN10flash_cute6kernelEv' for 'sm_90a'
ptxas info    : Function properties for _ZN10flash_cute6kernelEv
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...
"""
    report = build_report.collect({"forward_sm90_64": log}, {})
    spill, stack, serialised = build_report.faults(report)
    assert "spill" in spill
    assert "28" in spill
    assert "stack" in stack
    assert "serialized" in serialised


def test_spills_are_tolerated_of_the_kernels_that_are_named():
    def found(instance, kernel, spill_bytes):
        record = {"instance": instance, "kernel": kernel, "tile": "", "architecture": "sm_90a"}
        record |= {"spill_bytes": spill_bytes, "stack_bytes": 0}
        tolerated = {"kernel": "row_softmax", "element": "bf16", "spill_bytes": 56, "stack_bytes": 16}
        return build_report.faults({"kernels": [record], "serialised": [], "tolerated": [tolerated]})

    assert found("softmax_bf16", "row_softmax", 56) == []
    assert found("softmax_bf16", "row_softmax", 60)
    assert found("softmax_fp16", "row_softmax", 4)
    for head_dim in (64, 256):
        assert found(f"backward_sm90_bf16_{head_dim}", "backward_kernel_sm90", 0) == []
        assert found(f"backward_sm90_bf16_{head_dim}", "backward_kernel_sm90", 4)


def test_a_build_for_the_gpus_that_were_visible_says_so():
    assert build_report.what_was_built({"kernels": []}) is None
    assert build_report.what_was_built({"built_for": []}) is None
    said = build_report.what_was_built({"built_for": ["8.0", "9.0"]})
    assert "compute capability 8.0, 9.0 take" in said
    assert "FLASH_CUTE_FAMILIES=all" in said


def test_a_log_without_its_measure():
    """As of a compile by hand, without tools/measure.py."""
    log = """ptxas info    : Compiling entry function '_ZN10flash_cute6kernelEv' for 'sm_90a'
ptxas info    : Used 255 registers, used 1 barriers
"""
    report = build_report.collect({"forward_sm90_64": log}, {})
    assert report["units"] == {}
    assert [kernel["registers"] for kernel in report["kernels"]] == [255]
    assert "255" in build_report.table(report, {})


def test_kernels_of_a_shared_unit_are_told_apart():
    log = """ptxas info    : Compiling entry function '_ZN1a6kernelIfEE' for 'sm_80'
ptxas info    : Used 10 registers
ptxas info    : Compiling entry function '_ZN1a6kernelIdEE' for 'sm_80'
ptxas info    : Used 20 registers
ptxas info    : Compiling entry function '_ZN1a5otherEE' for 'sm_80'
ptxas info    : Used 30 registers
"""
    patterns = {"one_fp32": ("one", "If"), "one_fp64": ("one", "Id"), "two_fp32": ("two", "other")}
    report = build_report.collect({"one": log}, patterns)
    found = {kernel["instance"]: kernel["registers"] for kernel in report["kernels"]}
    assert found == {"one_fp32": 10, "one_fp64": 20, "one": 30}
