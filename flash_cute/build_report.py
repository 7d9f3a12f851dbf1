"""What the compiler said about every kernel: registers, spills, stack, shared memory, seconds, peak memory.

setup.py collects this from the compilers' logs into build_report.json, beside this file; as a program,

    python -m flash_cute.build_report [--check] [path]

prints it as a table, and with --check fails when a kernel spills or keeps a stack frame, or when ptxas says
that it serialises WGMMAs.
"""

import argparse
import json
import re
import sys
from pathlib import Path

REPORT = Path(__file__).with_name("build_report.json")

ENTRY = re.compile(r"Compiling entry function '(?P<symbol>\w+)' for '(?P<architecture>\w+)'")
SERIALISED = re.compile(r"^.*(?:C75\d\d|wgmma\S* .*serialized).*$", re.MULTILINE | re.IGNORECASE)
MEASURE = re.compile(r"flash_cute measure: ([\d.]+) seconds, (\d+) MB")  # written by tools/measure.py
COLUMNS = {  # key of a kernel's record: what ptxas -v prints
    "registers": r"Used (\d+) registers",
    "spill_bytes": r"(\d+) bytes spill (?:stores|loads)",
    "stack_bytes": r"(\d+) bytes stack frame",
    "static_smem_bytes": r"(\d+) bytes smem",
}


def short_name(symbol: str) -> str:
    """The function's own name in a mangled symbol: _ZN10flash_cute14forward_kernelI... -> forward_kernel."""
    name, position = symbol, re.match(r"_ZN?", symbol).end() if symbol.startswith("_Z") else len(symbol)
    while length := re.match(r"\d+", symbol[position:]):
        begin = position + length.end()
        position = begin + int(length[0])
        name = symbol[begin:position]
    return name


def kernels(instance: str, log: str) -> list[dict]:
    """One record for each kernel and architecture in the log of one compile."""
    entries = list(ENTRY.finditer(log))
    ends = [entry.start() for entry in entries[1:]] + [len(log)]
    return [
        {"instance": instance, "kernel": short_name(entry["symbol"]), "architecture": entry["architecture"]}
        | {key: sum(map(int, re.findall(pattern, log[entry.end() : end]))) for key, pattern in COLUMNS.items()}
        for entry, end in zip(entries, ends, strict=True)
    ]


def collect(logs: dict[str, str]) -> dict:
    """The report of a build, from the compiler's log of each kernel instance."""
    measured = {instance: MEASURE.search(log) for instance, log in logs.items()}
    return {
        "instances": {
            instance: {"seconds": float(match[1]), "peak_megabytes": int(match[2])}
            for instance, match in measured.items()
        },
        "kernels": [record for instance, log in logs.items() for record in kernels(instance, log)],
        "serialised": [line for log in logs.values() for line in SERIALISED.findall(log)],
    }


def faults(report: dict) -> list[str]:
    """One line for each thing in the report that no kernel of this library may have."""
    return [
        f"{record['instance']} on {record['architecture']}: {record[key]} {key.replace('_', ' ')}"
        for record in report["kernels"]
        for key in ("spill_bytes", "stack_bytes")
        if record[key]
    ] + report["serialised"]


def table(report: dict) -> str:
    """The report as aligned columns, one line for each kernel and architecture."""
    rows = [("instance", "kernel", "architecture", *COLUMNS, "seconds", "peak_megabytes")]
    for record in report["kernels"]:
        rows.append((*record.values(), *report["instances"][record["instance"]].values()))
    widths = [max(len(str(row[column])) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(str(v).ljust(w) for v, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m flash_cute.build_report", description=__doc__.split("\n")[0])
    parser.add_argument("path", nargs="?", type=Path, default=REPORT, help="a build_report.json")
    parser.add_argument("--check", action="store_true", help="fail on spills, stack frames and serialised WGMMAs")
    arguments = parser.parse_args()
    report = json.loads(arguments.path.read_text())
    print(table(report))
    if report["missing"]:
        print(f"the CPU package: {report['missing']}")
    if not arguments.check:
        return 0
    found = faults(report)
    print("\n".join(found) or f"{len(report['kernels'])} kernels: no spill, no stack frame, no serialised WGMMA")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
