"""What a GPU draws while something runs, and its clock, from the driver's management library."""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import torch

LIBRARY = "libnvidia-ml.so.1"
SM_CLOCK = 1  # NVML_CLOCK_SM
INTERVAL_SECONDS = 0.005

Reading = tuple[int, int]  # millijoules since the driver was loaded, MHz of the multiprocessors


@cache
def gauge(device: torch.device) -> Callable[[], Reading] | None:
    """What reads a device's counters; None without NVML, or where it does not tell."""
    if device.type != "cuda":
        return None
    try:
        nvml = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
    handle, energy, clock = ctypes.c_void_p(), ctypes.c_ulonglong(), ctypes.c_uint()

    def read() -> Reading:
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(energy))
        nvml.nvmlDeviceGetClockInfo(handle, SM_CLOCK, ctypes.byref(clock))
        return energy.value, clock.value

    failed = nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle))
    return None if failed or 0 in read() else read


class Meter:
    """Within `with`, a thread samples a device's counters; afterwards watts and sm_mhz, or None, tell."""

    def __init__(self, device: torch.device):
        self.read = gauge(device)
        self.samples: list[tuple[float, int, int]] = []  # seconds, then what was read
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while self.read and not self.over.wait(INTERVAL_SECONDS):
            reading = self.read()
            self.samples.append((time.perf_counter(), *reading))

    def __enter__(self) -> Meter:
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.over.set()
        self.thread.join()

    @property
    def watts(self) -> float | None:
        """Between the first and the last time that the energy, which moves in steps, was seen to move."""
        moved = [now for before, now in pairwise(self.samples) if now[1] != before[1]]
        if len(moved) < 2:
            return None
        (begin, least, _), (end, most, _) = moved[0], moved[-1]
        return (most - least) / 1e3 / (end - begin)

    @property
    def sm_mhz(self) -> float | None:
        return statistics.median(mhz for _, _, mhz in self.samples) if self.samples else None
