"""flash_cute on two processes: DTensor, DDP, FSDP2, tensor parallelism; context_parallel on two GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed
from support.cases import ROOT
from torch.nn import attention

if not torch.distributed.is_available():
    pytest.skip("needs a torch with distributed", allow_module_level=True)

FOLDER = Path(__file__).parent
EXAMPLE = ROOT / "examples" / "char_gpt_parallel.py"
LEAVE = FOLDER / "run_and_leave.py"
SIZES = {"layers": 1, "heads": 4, "kv-heads": 2, "head-dim": 16, "batch": 4, "context": 48, "steps": 6}


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([*sys.path, str(ROOT), str(ROOT / "tests")])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | more


def on_two_processes(*arguments: Path | str) -> str:
    """What they printed, if both succeeded."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ran = subprocess.run([*command, *arguments], env=environment(), capture_output=True, text=True)
    assert ran.returncode == 0, f"{ran.stderr}\n{ran.stdout}"
    return ran.stdout


@pytest.mark.skipif(not hasattr(attention, "restore_flash_attention_impl"), reason="needs torch 2.11")
def test_dtensor():
    """dtensor_worker.py has the cases, and says which failed."""
    printed = on_two_processes(LEAVE, FOLDER / "dtensor_worker.py")
    assert printed.count("passed:") == 2 * 32


def test_training():
    """With DDP, FSDP2 and tensor parallelism, the losses are those of one process."""
    sizes = [f"--{name}={size}" for name, size in SIZES.items()]
    printed = on_two_processes(LEAVE, EXAMPLE, "--device=cpu", "--tolerance=1e-3", *sizes)
    assert "the losses agree" in printed
    assert all(f"{parallel}: " in printed for parallel in ("data", "fsdp", "tensor"))


def test_wrong_options():
    """Before anything is computed."""
    command = [sys.executable, str(EXAMPLE), "--parallel=tensor", "--device=cpu", "--heads=3"]
    ran = subprocess.run(command, env=environment(WORLD_SIZE="2"), capture_output=True, text=True)
    assert ran.returncode == 2
    assert "heads is 3; a multiple of the 2 processes is accepted" in ran.stderr


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_context_parallel(tmp_path):
    """The benchmark, in a small size, finds that results are those of one GPU."""
    sizes = "--tokens=4096", "--heads=4", "--repeats=1", f"--output={tmp_path}"
    assert "results agree" in on_two_processes("-m", "benchmarks.context_parallel", *sizes)
