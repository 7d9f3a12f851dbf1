"""What the compiler said about every kernel: registers, spills, stack, shared memory.

And what its translation unit, which several kernels share, took: processor seconds, peak memory.

setup.py collects this from the compilers' logs into build_report.json, beside the native library. As a
program,

    python -m flash_cute.build_report [--check] [path]

it prints a table; with --check it fails when a kernel spills or keeps a stack frame beyond what the report
tolerates of it, or when ptxas says that it serialises WGMMAs.
"""

import argparse
import json
import re
from pathlib import Path

ENTRY = re.compile(r"Compiling entry function '(?P<symbol>\w+)' for '(?P<architecture>\w+)'")
SERIALISED = re.compile(r"^.*(?:\(C75\d\d\)|wgmma.* serialized).*$", re.MULTILINE)
MEASURE = re.compile(r"flash_cute measure: ([\d.]+) seconds, (\d+) MB")  # written by tools/measure.py
TILE = re.compile(r"ForwardTileELi(\d+)ELi(\d+)")  # in the mangled name of a kernel: queries, keys
BUILT_FOR = (
    "kernels that GPUs of compute capability {} take, which the build found here; "
    "FLASH_CUTE_FAMILIES=all pip install . builds all"
)
PTXAS = {  # key in a kernel's record: what ptxas -v prints
    "registers": r"Used (\d+) registers",
    "spill_bytes": r"(\d+) bytes spill (?:stores|loads)",
    "stack_bytes": r"(\d+) bytes stack frame",
    "static_smem_bytes": r"(\d+) bytes smem",
}


def short_name(symbol: str) -> str:
    """The function's own name in a mangled symbol: _ZN10flash_cute14forward_kernelI... -> forward_kernel."""
    name, rest = symbol, symbol.removeprefix("_ZN").removeprefix("_Z")
    while length := re.match(r"\d+", rest):
        end = length.end() + int(length[0])
        name, rest = rest[length.end() : end], rest[end:]
    return name


def kernels(unit: str, log: str, instances: dict[str, str]) -> list[dict]:
    """One record for each kernel and architecture in the log of one translation unit.

    instances: patterns of mangled names by which its kernels are told apart. A kernel that none fits serves
    several, and goes by the unit's name.
    """
    entries = list(ENTRY.finditer(log))
    ends = [entry.start() for entry in entries[1:]] + [len(log)]
    records = []
    for entry, end in zip(entries, ends, strict=True):
        tile = TILE.search(entry["symbol"])
        fits = (name for name, pattern in instances.items() if re.search(pattern, entry["symbol"]))
        names = {
            "kernel": short_name(entry["symbol"]),
            "tile": "x".join(tile.groups()) if tile else "",
            "architecture": entry["architecture"],
        }
        said = log[entry.end() : end]
        numbers = {key: sum(map(int, re.findall(pattern, said))) for key, pattern in PTXAS.items()}
        records.append({"instance": next(fits, unit), **names, **numbers, "unit": unit})
    return records


def collect(logs: dict[str, str], instances: dict[str, tuple[str, str]]) -> dict:
    """The report of a build, from the compiler's log of each translation unit.

    instances: of each by name its unit, and a pattern of its kernels' mangled names.
    """
    measured = {unit: MEASURE.search(log) for unit, log in logs.items()}
    patterns = {
        unit: {name: pattern for name, (where, pattern) in instances.items() if where == unit}
        for unit in logs
    }
    return {
        # Not of what ninja compiled by hand, without the measure.
        "units": {unit: {"seconds": float(m[1]), "peak_mb": int(m[2])} for unit, m in measured.items() if m},
        "kernels": [record for unit, log in logs.items() for record in kernels(unit, log, patterns[unit])],
        "serialised": [line for log in logs.values() for line in SERIALISED.findall(log)],
    }


def faults(report: dict) -> list[str]:
    """One line for each thing in the report that no kernel of this library may have."""
    found = []
    for record in report["kernels"]:
        most = {}
        for tolerated in report.get("tolerated", []):
            ends_so = record["instance"].endswith(f"_{tolerated['element']}")
            most = tolerated if ends_so and record["kernel"] == tolerated["kernel"] else most
        for key in ("spill_bytes", "stack_bytes"):
            if record[key] > most.get(key, 0):
                kernel = f"{record['instance']}, {record['kernel']} {record['tile']}"
                found.append(f"{kernel} on {record['architecture']}: {key} = {record[key]}")
    return found + report["serialised"]


def table(report: dict, dynamic_smem: dict[tuple[str, str], int]) -> str:
    """The report as aligned columns, one line for each kernel and architecture.

    dynamic_smem: bytes of shared memory that an instance's tile asks for at its launch, which ptxas cannot
    know.
    """
    records = [
        record
        | {"dynamic_smem_bytes": dynamic_smem.get((record["instance"], record["tile"]), "")}
        | report["units"].get(record["unit"], {"seconds": "", "peak_mb": ""})
        for record in report["kernels"]
    ]
    rows = [[str(value) for value in row] for row in (*records[:1], *(record.values() for record in records))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def installed() -> Path:
    """The report of the build that is imported."""
    from flash_cute import _C

    return Path(_C.__file__).with_name("build_report.json")


def width(kernel: dict) -> str:
    """The head dims of a compiled kernel as the names of instances have them."""
    head_dim, head_dim_v = kernel["head_dim"], kernel["head_dim_v"]
    return f"{head_dim}" if head_dim == head_dim_v else f"{head_dim}x{head_dim_v}"


def what_was_built(report: dict) -> str | None:
    """A line for a build that has not all kernels, as it was for the GPUs that it found."""
    capabilities = report.get("built_for")
    return f"This build has the {BUILT_FOR.format(', '.join(capabilities))}." if capabilities else None


def main() -> int:
    import torch

    beside_library = installed()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", nargs="?", type=Path, default=beside_library)
    parser.add_argument(
        "--check", action="store_true", help="fail on spills, stack frames, serialised WGMMAs"
    )
    arguments = parser.parse_args()
    try:
        report = json.loads(arguments.path.read_text())
        missing = report["missing"]
    except (ValueError, KeyError, TypeError):
        parser.error(f"path must be a build_report.json, got {arguments.path}")
    if missing:
        print(f"This is the CPU package: {missing}")
        return 0
    name, tile = "forward_{family}_{element}_{width}", "{block_m}x{block_n}"
    dynamic_smem = {
        (name.format(width=width(kernel), **kernel), tile.format_map(kernel["tile"])): kernel["smem_bytes"]
        for kernel in json.loads(torch.ops.flash_cute.compiled())
        if kernel["pass"] == "forward"
    }
    print(table(report, dynamic_smem))
    if line := what_was_built(report):
        print(line)
    if not arguments.check:
        return 0
    found = faults(report)
    tolerated = sum(record["spill_bytes"] > 0 for record in report["kernels"])
    clean = (
        f"{len(report['kernels'])} kernels: no serialised WGMMA, and no spill and no stack frame but "
        f"{tolerated} that are tolerated"
    )
    print("\n".join(found) or clean)
    return bool(found)


if __name__ == "__main__":
    from flash_cute.program import run

    run(main)
