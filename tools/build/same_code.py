"""Do two builds have the same machine code? A hash for each kernel and architecture of its SASS.

    python tools/build/same_code.py OLD NEW [--part] [--renamed old=new ...]
    python tools/build/same_code.py --write tools/build/code.json NEW

OLD and NEW are libraries, folders of objects, or files that --write made. A kernel is its instructions in
order, with its registers, stack and static shared memory. What moves with the parameters alone does not
count: offsets in the constant bank, and immediates that are such offsets. Kernels are paired as sets under
their names without template arguments, so that types may be renamed.

--part: NEW is a narrower build, and what only OLD has is left out. The exit status tells whether both are
alike. A file names its nvcc, CUTLASS and cuobjdump; under others the tool says so and compares nothing.

cuobjdump and nvdisasm, which it runs, are NVIDIA's: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm.
"""

import argparse
import hashlib
import importlib.util
import json
import re
import runpy
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
short_name = runpy.run_path(str(ROOT / "flash_cute" / "build_report.py"))["short_name"]

FUNCTION = re.compile(r"^\t\tFunction : (\w+)$")
ARCHITECTURE = re.compile(r"^\tcode for (\w+)$")
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);")
USAGE = re.compile(r"Function (\w+):\n\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)")
BANK = re.compile(r"c\[0x0\]\[(?:(\w+)(?: ?\+ ?))?0x[0-9a-f]+\]")
INDEXED = re.compile(r"c\[0x0\]\[U?R\d+")
# An offset in the bank that is chosen at run time.
PLACE = re.compile(r"^((?:@!?U?P\d )?(?:U?MOV U?R\d+, |IMAD.MOV.U32 R\d+, RZ, RZ, ))0x[0-9a-f]{1,3}$")
# The address of a tensor map among the parameters, whose base the bank has.
TENSOR_MAP = re.compile(r"^((?:@!?U?P\d )?UIADD3 UR\d+, UP\d, UR\d+, )0x[0-9a-f]{1,3}(, URZ)$")

Code = dict[str, Counter[str]]  # of a kernel's name and architecture: hashes, and how many kernels have each


def cuobjdump() -> str:
    if path := shutil.which("cuobjdump"):
        return path
    if nvidia := importlib.util.find_spec("nvidia"):
        for folder in nvidia.submodule_search_locations:
            for path in Path(folder).glob("cu*/bin/cuobjdump"):
                return str(path)
    raise SystemExit("same_code: no cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")


def listing(flag: str, path: Path) -> str:
    run = subprocess.run(
        [cuobjdump(), flag, path], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if run.returncode and "does not contain device code" not in run.stdout:
        raise SystemExit(f"same_code: cuobjdump {flag} {path}: {run.stdout.strip()}")
    return run.stdout


def normalised(instructions: list[str]) -> list[str]:
    """Instructions without what the layout of the parameters decides."""
    if any(INDEXED.search(text) for text in instructions):
        instructions = [PLACE.sub(r"\1", text) for text in instructions]
    instructions = [TENSOR_MAP.sub(r"\1\2", text) for text in instructions]
    return [BANK.sub(lambda bank: f"c[0x0][{bank[1] or ''}]", text) for text in instructions]


def functions(sass: str) -> Iterator[tuple[str, str, list[str]]]:
    """(symbol, architecture, instructions) of each kernel in the output of cuobjdump -sass."""
    architecture = symbol = ""
    instructions: list[str] = []
    for line in sass.splitlines():
        if found := INSTRUCTION.match(line):
            instructions.append(found[1].strip())
        elif found := FUNCTION.match(line):
            if symbol:
                yield symbol, architecture, instructions
            symbol, instructions = found[1], []
        elif found := ARCHITECTURE.match(line):
            if symbol:
                yield symbol, architecture, instructions
            symbol, architecture = "", found[1]
    if symbol:
        yield symbol, architecture, instructions


def usages(text: str) -> dict[tuple[str, str], tuple[str, ...]]:
    """(symbol, architecture) to registers, stack and shared memory, of cuobjdump -res-usage."""
    found = {}
    for part in re.split(r"^arch = ", text, flags=re.MULTILINE)[1:]:
        architecture = part.partition("\n")[0]
        found |= {(symbol, architecture): tuple(numbers) for symbol, *numbers in USAGE.findall(part)}
    return found


def code_of_file(path: Path) -> Code:
    code: Code = defaultdict(Counter)
    usage = usages(listing("-res-usage", path))
    for symbol, architecture, instructions in functions(listing("-sass", path)):
        text = "\n".join([*usage[symbol, architecture], *normalised(instructions)])
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        code[f"{architecture} {short_name(symbol)}"][digest] += 1
    return code


def versions() -> dict[str, str]:
    """Those of nvcc and CUTLASS that the build in this checkout was made with, and of what reads the code."""
    stamps = ROOT / "build" / "native" / "stamps"
    if not (stamps / "cutlass").exists():
        raise SystemExit(f"same_code: {stamps} has no versions: build the kernels in this checkout first")
    nvcc = re.search(r"V([\d.]+)", (stamps / "nvcc").read_text())[1]
    cutlass = (stamps / "cutlass").read_text().strip()
    shown = subprocess.run([cuobjdump(), "--version"], text=True, stdout=subprocess.PIPE).stdout
    return {"nvcc": nvcc, "cutlass": cutlass, "cuobjdump": re.search(r"V([\d.]+)", shown)[1]}


def code_of(path: Path) -> tuple[Code, dict[str, str] | None]:
    """The code of a library, of a folder of objects or of a file, and of the last its versions."""
    if path.suffix == ".json":
        kept = json.loads(path.read_text())
        return {name: Counter(hashes) for name, hashes in kept["kernels"].items()}, kept["versions"]
    code: Code = defaultdict(Counter)
    with ThreadPoolExecutor() as pool:
        for of_file in pool.map(code_of_file, sorted(path.glob("*.o")) if path.is_dir() else [path]):
            for name, hashes in of_file.items():
                code[name] += hashes
    return code, None


def differences(old: Code, new: Code, is_part: bool) -> list[str]:
    found = []
    for name in sorted({*old, *new}):
        lost, gained = old.get(name, Counter()), new.get(name, Counter())
        lost, gained = lost - gained, gained - lost
        if gained or (lost and not is_part):
            found.append(f"{name}: {lost.total()} of {old.get(name, Counter()).total()} are not in NEW, ")
            found[-1] += f"{gained.total()} of {new.get(name, Counter()).total()} not in OLD"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="+", type=Path, metavar="OLD NEW")
    parser.add_argument("--part", action="store_true", help="NEW is a narrower build than OLD")
    parser.add_argument("--renamed", nargs="+", default=[], metavar="old=new", help="kernels by another name")
    parser.add_argument("--write", type=Path, help="keep the hashes of NEW in this file")
    arguments = parser.parse_args()
    *old_path, new_path = arguments.paths
    if len(old_path) > 1 or bool(old_path) == bool(arguments.write):
        parser.error("OLD and NEW, or --write FILE and NEW, must be given")
    new, _ = code_of(new_path)
    if arguments.write:
        kernels = {name: dict(sorted(hashes.items())) for name, hashes in sorted(new.items())}
        kept = {"versions": versions(), "kernels": kernels}
        arguments.write.write_text(json.dumps(kept, indent=0) + "\n")
        return 0
    old, made_with = code_of(old_path[0])
    if made_with and made_with != versions():
        print(f"same_code: nothing compared: {old_path[0]} is of {made_with}, this is {versions()}")
        return 0
    for renaming in arguments.renamed:
        before, after = renaming.split("=")
        old = {" ".join(after if w == before else w for w in name.split()): c for name, c in old.items()}
    found = differences(old, new, arguments.part)
    count = sum(hashes.total() for hashes in new.values())
    print("\n".join(found) or f"{count} kernels, each with the machine code of one in {old_path[0]}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
