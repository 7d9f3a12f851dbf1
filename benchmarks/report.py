"""A Markdown table and a plot from the results of benchmarks.attention.

python -m benchmarks.report benchmarks/results/<device>/attention.json

writes attention.md and attention.png beside the file.
"""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections.abc import Iterable
from pathlib import Path

from . import newer_flash
from .problem import paper_grid
from .results import FOLDER
from .timing import REGIMES

PEERS_H200 = FOLDER / "peers_h200.json"
TOKENS, HIDDEN = 16384, 2048  # of its cells: the papers' grid
MIXED = "mixed (before regimes)"  # of the files that know none: contenders in turn, the clock as it came
MISSING = "-"  # in a table
SHORT = 2048  # sequences up to here have a geometric mean of their own
FEW_QUERIES = 64  # up to here a problem is about the keys' bytes, and told in microseconds
BEST_HERE = "best peer"  # of those measured in the cell, where they are more than PyTorch's
BEST = "best known"  # of the peers: cuDNN's speed of this run times what is known of the best, same regime
RATE, TIME = "TFLOP/s", "microseconds"
# Okabe and Ito's colours and four of Paul Tol's, which the colour-blind tell apart; ours are the strong ones.
COLOURS = {
    "sm90": "#0072B2",
    "sm80": "#D55E00",
    "cpu": "#009E73",
    "flash": "#999999",
    "flash3": "#117733",
    "flash4": "#882255",
    "cudnn": "#56B4E9",
    "efficient": "#E69F00",
    "math": "#CC79A7",
    "flashinfer": "#AA4499",
    "xqa": "#332288",
    "padded": "#F0E442",
    "mean": "#333333",
}
HATCHES = {"deterministic": "////"}  # over a family's colour


def colour(name: str) -> str:
    """Of a contender: that of the last word of its name that has one."""
    return next((COLOURS[word] for word in (name, *reversed(name.split())) if word in COLOURS), "black")


Baseline = dict[str, dict[tuple, float]]  # regime -> cell -> the best known peer over cuDNN in speed


def key(problem: dict) -> tuple:
    """What identifies a cell in every result file."""
    names = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "mask")
    return *(problem[name] for name in names), problem.get("lengths"), problem.get("direction", "forward")


def load_baseline(path: Path) -> Baseline:
    """best_over_cudnn of every cell of the papers' grid, in a file like peers_h200.json."""
    found: Baseline = {regime: {} for regime in REGIMES}
    directions = {"fwd": "forward", "bwd": "backward"}
    for c in json.loads(path.read_text())["cells"]:
        where = [c["d"]], [c["s"]], [c["causal"]], "bf16", directions[c["mode"]]
        (problem,) = paper_grid(TOKENS, HIDDEN, *where)
        for regime, cells in found.items():
            cells[key(problem.to_json())] = c[regime]["best_over_cudnn"]
    return found


def baseline_for(results: dict, path: Path | None = None) -> Baseline:
    """The baseline named, or on an H200 the one committed, or none."""
    if path is None and "H200" in results["environment"]["device"]:
        path = PEERS_H200
    return load_baseline(path) if path else {}


def by_regime(results: dict) -> dict[str, dict]:
    """Regime -> results whose cells hold what that regime measured."""
    found: dict[str, dict] = {}
    for cell in results["cells"]:
        for regime, measured in cell.get("regimes", {MIXED: {}}).items():
            found.setdefault(regime, results | {"cells": []})["cells"].append(cell | measured)
    return found


def tflops(cell: dict, name: str) -> float:
    return cell["problem"]["flops"] / cell["times_us"][name]["median"] / 1e6


def matmul_tflops(cell: dict) -> float:
    return cell["rates"]["matmul_flops"] / 1e12


def unit_of(cells: list[dict]) -> str:
    few = all(c["problem"]["seqlen_q"] <= FEW_QUERIES < c["problem"]["seqlen_k"] for c in cells)
    return TIME if few else RATE


def in_unit(cell: dict, name: str, unit: str) -> float:
    return tflops(cell, name) if unit == RATE else cell["times_us"][name]["median"]


def entry(cell: dict, name: str, unit: str) -> str:
    """What a table says of a contender: of unequal lengths microseconds beside the rate."""
    if name not in cell["times_us"]:
        return MISSING
    beside = f", {digits(in_unit(cell, name, TIME))} us" if "lengths" in cell["problem"] else ""
    return digits(in_unit(cell, name, unit)) + spread(cell, name) + beside


def digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def spread(cell: dict, name: str) -> str:
    """Half the interquartile range as a share of the median, where there are several rounds."""
    times = cell["times_us"][name]
    half = (times["q75"] - times["q25"]) / times["median"] / 2
    return f" ±{100 * half:.0f}%" if cell["rounds"] > 1 else ""


def floor_us(cell: dict) -> float:
    """The least time for the work, its bytes or its products, at the rates measured beside it."""
    problem, rates = cell["problem"], cell["rates"]
    return 1e6 * max(problem["bytes"] / rates["copy_bytes"], problem["flops"] / rates["matmul_flops"])


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def comparisons(results: dict, known: dict[tuple, float]) -> dict[str, dict[tuple, float]]:
    """Column title -> cell -> ours over a peer in speed; known is the best known peer over cuDNN."""
    columns: dict[str, dict[tuple, float]] = {}
    newer = {peer for peer in results["peers"] if peer in newer_flash.VERSIONS}
    for mine in results["ours"]:
        for cell in results["cells"]:
            where = key(cell["problem"])
            ratios = cell["speedup"].get(mine, {})
            if newer & ratios.keys():
                best = min(ratios[peer] for peer in results["peers"] if peer in ratios)
                columns.setdefault(f"{mine}/{BEST_HERE}", {})[where] = best
            for peer, ratio in ratios.items():
                columns.setdefault(f"{mine}/{peer}", {})[where] = ratio
            if "cudnn" in ratios and where in known:
                columns.setdefault(f"{mine}/{BEST}", {})[where] = ratios["cudnn"] / known[where]
    return columns


def table(header: list[str], rows: Iterable[list[str]]) -> list[str]:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def title(problem: dict) -> str:
    """A row's name: the problem without its head dim."""
    lengths = {problem["seqlen_q"]: f"{problem['seqlen_q']}"}.get(problem["seqlen_k"])
    lengths = problem.get("lengths") or lengths or f"{problem['seqlen_q']} x {problem['seqlen_k']}"
    group = problem["heads_q"] // problem["heads_kv"]
    grouped = f", {group} query heads per K/V head" if group > 1 else ""
    return f"{problem['mask']}, {lengths}{grouped}"


def cell_rows(results: dict, cells: list[dict], columns: dict, unit: str) -> Iterable[list[str]]:
    ours, names = results["ours"], results["ours"] + results["peers"]
    for cell in cells:
        times = cell["times_us"]
        row = [title(cell["problem"])]
        row += [entry(cell, n, unit) for n in names]
        ratios = [column.get(key(cell["problem"])) for column in columns.values()]
        row += [f"{ratio:.2f}" if ratio else MISSING for ratio in ratios]
        if cell["rates"]:
            rate, floor = matmul_tflops(cell), floor_us(cell)
            row += [f"{tflops(cell, n) / rate:.2f}" if n in times else MISSING for n in ours]
            row += [f"{floor / times[n]['median']:.2f}" if n in times else MISSING for n in ours]
        yield row


def power_rows(names: list[str], cells: list[dict]) -> Iterable[list[str]]:
    """What each contender drew: joules per TFLOP of visible pairs, clock, watts."""
    for cell in cells:
        row = [title(cell["problem"])]
        for name in names:
            power = cell["power"].get(name)
            if not power or None in power.values():
                row.append(MISSING)
                continue
            rate = matmul_tflops(cell) if name == "matmul" else tflops(cell, name)
            row.append(f"{power['watts'] / rate:.2f}, {power['sm_mhz']:.0f} MHz, {power['watts']:.0f} W")
        yield row


def mean_rows(results: dict, columns: dict) -> Iterable[list[str]]:
    """Geometric means of each comparison: per head dim, over all and over short sequences."""
    problems = [cell["problem"] for cell in results["cells"]]
    head_dims = sorted({problem["head_dim"] for problem in problems})
    groups = [(f"d{dim}", [p for p in problems if p["head_dim"] == dim]) for dim in head_dims]
    groups += [
        (f"{name}, seq <= {SHORT}", [p for p in group if p["seqlen_k"] <= SHORT]) for name, group in groups
    ]
    groups += [("all", problems)]
    for name, group in groups:
        chosen = [[column[key(p)] for p in group if key(p) in column] for column in columns.values()]
        if any(chosen):
            yield [name] + [f"{geometric_mean(values):.3f}" if values else MISSING for values in chosen]


def source(where: dict) -> list[str]:
    """The machine, the software and the command, from a result's environment."""
    return [
        f"{where['device']}, driver {where['driver']}, torch {where['torch']}, cuDNN {where['cudnn']}, "
        f"commit {where['commit']}, {where['date']}",
        f"`{where['command']}`",
    ]


def markdown(results: dict, baseline: Baseline) -> str:
    """The results as Markdown: where they come from, and each regime's means and cells."""
    lines = source(results["environment"])
    direction = direction_title(results["cells"][0]["problem"])
    for regime, measured in by_regime(results).items():
        name = regime.capitalize() if direction == "Forward" else f"{direction}, {regime}"
        how = f": {REGIMES[regime]}" if regime in REGIMES else ""
        lines += ["", f"## {name}{how}", "", *section(measured, baseline.get(regime, {}))]
    if any("bytes_beside" in cell for cell in results["cells"]):
        lines += ["", "## The most memory that a call has beside its results, MB", "", *memory(results)]
    reasons = {(name, why) for cell in results["cells"] for name, why in cell["excluded"].items()}
    lines += ["", *(f"- {name} left out of some cells: {why}" for name, why in sorted(reasons))]
    return "\n".join(lines).rstrip()


def memory(results: dict) -> list[str]:
    names = results["ours"] + results["peers"]

    def row(cell: dict) -> list[str]:
        sizes = cell["bytes_beside"]
        problem = f"d{cell['problem']['head_dim']}, {title(cell['problem'])}"
        return [problem, *(f"{sizes[name] / 1e6:.2f}" if name in sizes else MISSING for name in names)]

    return table(["", *names], (row(cell) for cell in results["cells"] if "bytes_beside" in cell))


def section(results: dict, known: dict[tuple, float]) -> list[str]:
    """One regime: geometric means, and every cell per head dim."""
    columns = comparisons(results, known)
    lines = []
    if columns:
        lines += [
            "Times as fast as the peer, geometric means:",
            "",
            *table(["", *columns], mean_rows(results, columns)),
        ]
    if any(column.endswith(BEST) for column in columns):
        lines += [
            "",
            f"{BEST}: cuDNN of this run times the best peer over cuDNN elsewhere (bf16), same regime.",
        ]
    ours, names = results["ours"], results["ours"] + results["peers"]
    for dim in sorted({cell["problem"]["head_dim"] for cell in results["cells"]}):
        cells = [cell for cell in results["cells"] if cell["problem"]["head_dim"] == dim]
        unit = unit_of(cells)
        caption = f"Head dim {dim}, {cells[0]['problem']['dtype']}, {unit}"
        caption += " and half the interquartile range" if cells[0]["rounds"] > 1 else ""
        header = [*names, *columns]
        if rates := [cell["rates"] for cell in cells if cell["rates"]]:
            matmul = " to ".join(
                f"{pick(r['matmul_flops'] for r in rates) / 1e12:.0f}" for pick in (min, max)
            )
            copy = " to ".join(f"{pick(r['copy_bytes'] for r in rates) / 1e9:.0f}" for pick in (min, max))
            caption += f"; beside it bf16 matmul {matmul} TFLOP/s, copy {copy} GB/s"
            header += [*(f"{n} of matmul" for n in ours), *(f"{n} of floor" for n in ours)]
        lines += ["", f"{caption}:", "", *table(["", *header], cell_rows(results, cells, columns, unit))]
        if "power" in cells[0]:
            drawing = names + ["matmul"] * any("matmul" in cell["power"] for cell in cells)
            lines += [
                "",
                f"Head dim {dim}, joules per TFLOP, SM clock and power ({MISSING}: NVML does not tell):",
                "",
            ]
            lines += table(["", *drawing], power_rows(drawing, cells))
    return lines


def plot(results: dict, path: Path) -> None:
    """Bars of speed: a row of panels per regime and mask, a column per head dim; the ceiling is a line.

    Only what this run measured: the best known peer, of another run, is in the tables.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    regimes = by_regime(results)
    head_dims = sorted({cell["problem"]["head_dim"] for cell in results["cells"]})
    masks = list(dict.fromkeys(cell["problem"]["mask"] for cell in results["cells"]))
    timed = {name for measured in regimes.values() for cell in measured["cells"] for name in cell["times_us"]}
    names = [name for name in (*results["peers"], *results["ours"]) if name in timed]
    panels: dict[tuple, dict[int, list[dict]]] = {}
    for regime, measured in regimes.items():
        for mask in masks:
            shown = [cell for cell in measured["cells"] if cell["problem"]["mask"] == mask]
            panels[regime, mask] = {d: [c for c in shown if c["problem"]["head_dim"] == d] for d in head_dims}
    widest = max(len(cells) for row in panels.values() for cells in row.values())
    size = len(head_dims) * max(4.5, 0.9 + 0.15 * widest * len(names)), len(panels) * 2.9 + 1
    figure, axes = pyplot.subplots(
        len(panels), len(head_dims), sharey="row", squeeze=False, figsize=size, layout="constrained"
    )
    for row, ((regime, _), columns) in zip(axes, panels.items(), strict=True):
        unit = unit_of([cell for cells in columns.values() for cell in cells])
        row[0].set_ylabel(unit)
        for axis, cells in zip(row, columns.values(), strict=True):
            draw(axis, cells, names, results["ours"], unit)
            axis.set_title(textwrap.fill(f"{regime}: {shape_title(cells)}", 60) if cells else "", fontsize=9)
    where = results["environment"]
    problem = results["cells"][0]["problem"]
    figure.suptitle(f"{direction_title(problem)}, {where['device']}, {problem['dtype']}", fontsize=11)
    legend = {}
    for axis in axes.flat:
        handles, labels = axis.get_legend_handles_labels()
        legend |= dict(zip(labels, handles, strict=True))
    columns = min(len(legend), int(size[0] / 1.8))
    figure.legend(
        legend.values(), legend, loc="outside lower center", ncols=columns, frameon=False, fontsize=8
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def peer_title(name: str) -> str:
    version, *mode = name.split()
    if version not in newer_flash.VERSIONS:
        return f"PyTorch's {name}"
    return " ".join([newer_flash.VERSIONS[version].title, *mode])


def draw(axis, cells: list[dict], names: list[str], ours: list[str], unit: str) -> None:
    """One panel: a group of bars per cell, each with its number."""
    from matplotlib.patheffects import withStroke

    numbers = {"fontsize": 6.5, "padding": 2, "rotation": 90 if len(cells) * len(names) > 12 else 0}
    numbers["path_effects"] = [withStroke(linewidth=2.5, foreground="white")]  # over the line
    width = 0.84 / len(names)
    for i, name in enumerate(names):
        shown = {x: in_unit(cell, name, unit) for x, cell in enumerate(cells) if name in cell["times_us"]}
        at = [x + (i - (len(names) - 1) / 2) * width for x in shown]
        label = f"flash_cute {name}" if name in ours else peer_title(name)
        hatch = HATCHES.get(name.split()[-1])
        bars = axis.bar(at, shown.values(), width * 0.92, color=colour(name), hatch=hatch, label=label)
        axis.bar_label(bars, [digits(value) for value in shown.values()], **numbers)
    ceiling, label = (
        (matmul_tflops, "bf16 matmul 8192³") if unit == RATE else (floor_us, "floor: its bytes, copied")
    )
    line = [
        (x + side, ceiling(cell)) for x, cell in enumerate(cells) if cell["rates"] for side in (-0.5, 0.5)
    ]
    if line:
        axis.plot(*zip(*line, strict=True), ":k", linewidth=1, label=label, zorder=0.6)
    axis.set_xticks(range(len(cells)), shape_labels(cells), fontsize=7.5)
    axis.margins(x=0.02, y=0.12)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", linewidth=0.4, alpha=0.5)
    axis.set_axisbelow(True)


def direction_title(problem: dict) -> str:
    direction = problem.get("direction", "forward")
    return "Forward and backward" if direction == "both" else direction.capitalize()


def heads_of(problem: dict) -> str:
    query, kv = problem["heads_q"], problem["heads_kv"]
    return f"heads {query}" if query == kv else f"heads {query} (K/V {kv})"


def shape_title(cells: list[dict]) -> str:
    """What a panel's cells have in common: head dim, mask and, where they are alike, heads."""
    problem = cells[0]["problem"]
    heads = {heads_of(cell["problem"]) for cell in cells}
    return ", ".join(
        [f"head dim {problem['head_dim']}", problem["mask"], *(heads if len(heads) == 1 else ())]
    )


def shape_labels(cells: list[dict]) -> list[str]:
    """Sequence length (512, 1k, both lengths where they differ) and batch, and heads where they differ."""
    several = len({heads_of(cell["problem"]) for cell in cells}) > 1
    labels = []
    for problem in (cell["problem"] for cell in cells):
        lengths = dict.fromkeys((problem["seqlen_q"], problem["seqlen_k"]))
        seqlen = " x ".join(f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths)
        drawn = problem.get("lengths", f"seq {seqlen}").replace(":", "\n", 1)
        lines = [drawn, f"batch {problem['batch']}"]
        if several:
            lines.append(heads_of(problem).replace(" (", "\n("))
        labels.append("\n".join(lines))
    return labels


def main(arguments: list[str] | None = None) -> None:
    args = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    args.add_argument("results", type=Path, help="a JSON file of benchmarks.attention")
    args.add_argument(
        "--baseline", type=Path, help="peers measured elsewhere (default: peers_h200.json on an H200)"
    )
    options = args.parse_args(arguments)
    results = json.loads(options.results.read_text())
    text = markdown(results, baseline_for(results, options.baseline))
    options.results.with_suffix(".md").write_text(text + "\n")
    plot(results, options.results.with_suffix(".png"))
    print(text)


if __name__ == "__main__":
    main()
