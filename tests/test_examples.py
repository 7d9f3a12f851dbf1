"""The examples run from end to end, in a small size, and find that the losses agree."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys

import pytest
from cases import ROOT

LLAMA = {"layers": 1, "heads": 2, "kv-heads": 1, "head-dim": 16, "tokens": 200, "steps": 4}
SIZES = {"layers": 1, "heads": 2, "kv-heads": 1, "head-dim": 16, "batch": 2, "context": 48, "steps": 8}


def example(name: str, device, folder, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "examples" / name), f"--device={device.type}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)])}
    return subprocess.run([*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def test_char_gpt(device, tmp_path):
    sizes = [f"--{name}={size}" for name, size in SIZES.items()]
    options = [*sizes, "--contexts", "30", "64", "--plot", "curves.png"]
    files = [str(ROOT / "flash_cute" / "interface.py"), str(ROOT / "tests" / "cases.py")]
    ran = example("char_gpt.py", device, tmp_path, *options, *files)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "the losses agree" in ran.stdout
    assert (tmp_path / "curves.png").stat().st_size > 0


def test_train_llama(device, tmp_path):
    pytest.importorskip("transformers", reason="needs transformers")
    sizes = [f"--{name}={size}" for name, size in LLAMA.items()]
    ran = example("train_llama.py", device, tmp_path, *sizes, str(ROOT / "tests" / "cases.py"))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "the losses agree" in ran.stdout
    assert all(attention in ran.stdout for attention in ("eager", "SDPA", "flash_cute"))


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("--steps=0", "--steps: 0 is no number above 0"),
        ("--contexts=-3", "--contexts: -3 is no number above 0"),
        ("--head-dim=7", "--head-dim: 7 is odd"),
        ("--plot=nowhere/curves.png", "there is no such folder"),
    ],
)
def test_wrong_options_of_char_gpt(tmp_path, monkeypatch, capsys, argument, sentence):
    """Before anything is computed."""
    program = str(ROOT / "examples" / "char_gpt.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [program, "--device=cpu", argument])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(program, run_name="__main__")
    assert left.value.code == 2
    assert sentence in capsys.readouterr().err
