"""The example runs from end to end, in a small size, and finds that the losses agree."""

from __future__ import annotations

import os
import subprocess
import sys

from cases import ROOT

SIZES = {"layers": 1, "heads": 2, "kv-heads": 1, "head-dim": 16, "batch": 2, "context": 48, "steps": 8}


def test_char_gpt(device, tmp_path):
    sizes = [f"--{name}={size}" for name, size in SIZES.items()]
    command = [sys.executable, str(ROOT / "examples" / "char_gpt.py"), f"--device={device.type}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)])}
    files = [str(ROOT / "flash_cute" / "interface.py"), str(ROOT / "tests" / "cases.py")]
    ran = subprocess.run(
        [*command, *sizes, "--contexts", "30", "64", "--plot", "curves.png", *files],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "the losses agree" in ran.stdout
    assert (tmp_path / "curves.png").stat().st_size > 0
