"""What happens when CUDA fails below us: its own words are reported, and the next good call succeeds."""

from __future__ import annotations

import pytest

INVALID_VALUE = 1  # cudaErrorInvalidValue and CUDA_ERROR_INVALID_VALUE


@pytest.mark.parametrize(
    ("function", "doing"),
    [("attribute", "asking for the kernel's shared memory"), ("launch", "launching the kernel")],
)
def test_a_failed_call_leaves_nothing_behind(launcher, function, doing):
    device = 3 if function == "attribute" else 4  # the attribute is set once for each
    launcher.reset({function: INVALID_VALUE}, True)
    with pytest.raises(RuntimeError, match=f"^flash_cute: {doing} failed: invalid value$"):
        launcher.launch(device)
    assert launcher.last_error() == 0
    launcher.launch(device)
    assert launcher.calls().count("attribute") == (2 if function == "attribute" else 1)


def test_failing_to_read_attributes(launcher):
    launcher.reset({"attributes": INVALID_VALUE}, True)
    with pytest.raises(
        RuntimeError, match=r"^flash_cute: reading the kernel's attributes failed: invalid value$"
    ):
        launcher.read_attributes()
    assert launcher.last_error() == 0
    launcher.launch(5)


def test_an_error_from_before_is_not_the_launchs(launcher):
    """The launch's own status counts, not the last error of whoever called CUDA before."""
    launcher.reset({"attributes": INVALID_VALUE}, True)
    with pytest.raises(RuntimeError):
        launcher.read_attributes()
    launcher.launch(6)


def test_a_warm_thread_binds_no_context(launcher):
    launcher.reset({}, True)
    launcher.encode()
    assert launcher.calls() == ["cuTensorMapEncodeTiled"]


def test_a_cold_thread_gets_the_devices_context(launcher):
    launcher.reset({}, False)
    launcher.encode()
    assert launcher.calls() == ["cuTensorMapEncodeTiled", "set device", "cuTensorMapEncodeTiled"]


def test_the_drivers_own_words(launcher):
    launcher.reset({"cuTensorMapEncodeTiled": INVALID_VALUE}, True)
    with pytest.raises(
        RuntimeError, match=r"^flash_cute: encoding a tensor map failed: the driver's own words$"
    ):
        launcher.encode()


@pytest.mark.parametrize(
    ("device", "ptx", "waits"), [(0, 80, False), (1, 89, False), (2, 90, True), (3, 120, True)]
)
def test_a_kernel_starts_early_only_if_its_code_waits(launcher, device, ptx, waits):
    """Which depends on the PTX that it was made of, not on the device; asked once for each device."""
    launcher.reset({"attributes": INVALID_VALUE}, True)
    with pytest.raises(RuntimeError, match=r"reading the kernel's attributes failed: invalid value$"):
        launcher.waits(device, ptx)
    assert [launcher.waits(device, ptx) for _ in range(3)] == [waits] * 3
    assert launcher.calls() == ["attributes"] * 2
