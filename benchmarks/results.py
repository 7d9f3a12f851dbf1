"""Where results go and what is written down with them."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

FOLDER = Path(__file__).parent / "results"
# In which peers come.
PACKAGES = ("flash_attn_3", "xformers", "flash-attn-4", "nvidia-cutlass-dsl", "flashinfer-python")


def _output(*command: str) -> str | None:
    """What a command prints, or None where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=FOLDER).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def command_line(arguments: list[str]) -> str:
    """The command to repeat a benchmark, from sys.argv; where its results were written does not matter."""
    program, *options = arguments
    options = [option for option in options if not option.startswith("--output=")]
    if "--output" in options:
        place = options.index("--output")
        del options[place : place + 2]
    return shlex.join(["python", "-m", f"benchmarks.{Path(program).stem}", *options])


def environment(device: torch.device) -> dict:
    """The machine, the software and the command behind a result.

    FLASH_CUTE_COMMIT names the commit where the sources were copied without their repository.
    """
    on_gpu = device.type == "cuda"
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else None
    name = torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine()
    return {
        "device": name,
        "driver": driver.splitlines()[0] if driver else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "python": platform.python_version(),
        "commit": os.environ.get("FLASH_CUTE_COMMIT") or _output("git", "describe", "--always", "--dirty"),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command_line(sys.argv),
    }


def slug(name: str) -> str:
    """A device's name as a folder: 'NVIDIA H100 80GB HBM3' -> 'nvidia-h100-80gb-hbm3'."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def save(results: dict, name: str, folder: Path | None = None) -> Path:
    """Write results as <folder>/<device>/<name>.json, the folder being benchmarks/results unless given."""
    path = (folder or FOLDER) / slug(results["environment"]["device"]) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    return path


def parser(
    program: str, doc: str, name: str | None = None, epilog: str | None = None
) -> argparse.ArgumentParser:
    """Of a program, with the options of all that write results.

    doc: the program's, of which the first line is shown. name: of its result file, where it is not the
    program's.
    """
    args = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{program}", description=doc.splitlines()[0], epilog=epilog
    )
    args.add_argument("--device", help="cpu runs a small form of it")
    args.add_argument("--name", help=f"of the result file (default: {name or program})")
    args.add_argument("--output", type=Path, help="folder of results (default: benchmarks/results)")
    return args


def choose_device(name: str | None) -> torch.device:
    """The device of a benchmark: the one named, else the GPU, and where there is none a plain refusal."""
    if name is None and not torch.cuda.is_available():
        print(
            "This measures a GPU and there is none here; --device cpu runs a small form of it.",
            file=sys.stderr,
        )
        sys.exit(2)
    return torch.device(name or "cuda")
