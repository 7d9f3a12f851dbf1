"""Of benchmarks.attention: tables of each regime, and bars."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict
from functools import partial
from pathlib import Path

from .. import peers
from ..problem import paper_grid
from ..results import FOLDER
from ..timing import REGIMES
from .tables import (
    MISSING,
    by_column,
    colour,
    digits,
    grouped,
    head_dim_of,
    heads_of,
    legend,
    means,
    of_ratios,
    reasons,
    shape_labels,
    source,
    title,
    union,
)

PEERS_H200 = FOLDER / "peers_h200.json"
TOKENS, HIDDEN = 16384, 2048  # of its cells: the papers' grid
MIXED = "mixed (before regimes)"  # of the files that know none: contenders in turn, the clock as it came
SHORT = 2048  # sequences up to here have a geometric mean of their own
FEW_QUERIES = 64  # up to here a problem is about the keys' bytes, and told in microseconds
BEST_HERE = "best peer"  # of those measured in the cell, where they are more than PyTorch's
BEST = "best known"  # of the peers: cuDNN's speed of this run times what is known of the best, same regime
RATE, TIME = "TFLOP/s", "microseconds"
HATCHES = {"deterministic": "////"}  # over a family's colour

Baseline = dict[str, dict[tuple, float]]  # regime -> cell -> the best known peer over cuDNN in speed


def key(problem: dict) -> tuple:
    """What identifies a cell in every result file."""
    names = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "mask")
    of_some = map(problem.get, ("head_dim_v", "lengths"))
    return *(problem[name] for name in names), *of_some, problem["direction"]


def load_baseline(path: Path) -> Baseline:
    """best_over_cudnn of every cell of the papers' grid, in a file like peers_h200.json."""
    found: Baseline = {regime: {} for regime in REGIMES}
    directions = {"fwd": "forward", "bwd": "backward"}
    for c in json.loads(path.read_text())["cells"]:
        where = [(c["d"],)], [c["s"]], [c["causal"]], "bf16", directions[c["mode"]]
        (problem,) = paper_grid(TOKENS, HIDDEN, *where)
        for regime, cells in found.items():
            cells[key(asdict(problem) | {"mask": problem.mask})] = c[regime]["best_over_cudnn"]
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
        for regime, measured in cell["regimes"].items():
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


def entry(name: str, unit: str, cell: dict) -> str:
    """What a table says of a contender: of unequal lengths microseconds beside the rate."""
    beside = f", {digits(in_unit(cell, name, TIME))} us" if "lengths" in cell["problem"] else ""
    return digits(in_unit(cell, name, unit)) + spread(cell, name) + beside


def spread(cell: dict, name: str) -> str:
    """Half the interquartile range as a share of the median, where there are several rounds."""
    times = cell["times_us"][name]
    half = (times["q75"] - times["q25"]) / times["median"] / 2
    return f" ±{100 * half:.0f}%" if cell["rounds"] > 1 else ""


def floor_us(cell: dict) -> float:
    """The least time for the work, its bytes or its products, at the rates measured beside it."""
    problem, rates = cell["problem"], cell["rates"]
    return 1e6 * max(problem["bytes"] / rates["copy_bytes"], problem["flops"] / rates["matmul_flops"])


def ratios(results: dict, known: dict[tuple, float], mine: str, cell: dict) -> dict[str, float]:
    """Column title -> one of ours over a peer in speed; known is the best known peer over cuDNN."""
    found = cell["speedup"].get(mine, {})
    best = {}
    if any(map(peers.is_newer, found)):
        best = {BEST_HERE: min(found[peer] for peer in results["peers"] if peer in found)}
    if "cudnn" in found and (where := key(cell["problem"])) in known:
        found = found | {BEST: found["cudnn"] / known[where]}
    return {f"{mine}/{peer}": ratio for peer, ratio in (best | found).items()}


def drawn(name: str, cell: dict) -> str:
    """What a contender drew: joules per TFLOP of visible pairs, clock, watts."""
    power = cell["power"][name]
    if None in power.values():
        return MISSING
    rate = matmul_tflops(cell) if name == "matmul" else tflops(cell, name)
    return f"{power['watts'] / rate:.2f}, {power['sm_mhz']:.0f} MHz, {power['watts']:.0f} W"


def groups(cells: list[dict]) -> dict[str, list[dict]]:
    """What means are over: each head dim, its short sequences, all."""
    dims = by_head_dim(cells)
    short = {dim: [c for c in group if c["problem"]["seqlen_k"] <= SHORT] for dim, group in dims.items()}
    found = {f"d{dim}": group for dim, group in dims.items()}
    found |= {f"d{dim}, seq <= {SHORT}": group for dim, group in short.items()}
    return found | {"all": cells}


def by_head_dim(cells: list[dict]) -> dict[str, list[dict]]:
    """By what head_dim_of says of them, in the order of its numbers."""
    found = grouped(cells, lambda cell: head_dim_of(cell["problem"]))
    return dict(sorted(found.items(), key=lambda item: [*map(int, item[0].split("/"))]))


def markdown(results: dict, baseline: Path | None = None) -> str:
    """Where the results come from, and each regime's means and cells, beside peers measured elsewhere."""
    known = baseline_for(results, baseline)
    lines = source(results)
    direction = direction_title(results["cells"][0]["problem"])
    for regime, measured in by_regime(results).items():
        name = regime.capitalize() if direction == "Forward" else f"{direction}, {regime}"
        how = f": {REGIMES[regime]}" if regime in REGIMES else ""
        lines += ["", f"## {name}{how}", "", *section(measured, known.get(regime, {}))]
    if any("bytes_beside" in cell for cell in results["cells"]):
        columns = {"": lambda cell: f"d{head_dim_of(cell['problem'])}, {title(cell['problem'])}"}
        for name in results["ours"] + results["peers"]:
            columns[name] = lambda cell, name=name: f"{cell['bytes_beside'][name] / 1e6:.2f}"
        memory = by_column(columns, [cell for cell in results["cells"] if "bytes_beside" in cell])
        lines += ["", "## The most memory that a call has beside its results, MB", "", *memory]
    return "\n".join([*lines, "", *reasons(results["cells"])]).rstrip()


def section(results: dict, known: dict[tuple, float]) -> list[str]:
    """One regime: geometric means, and every cell per head dim."""
    ours, names = results["ours"], results["ours"] + results["peers"]
    of_each = [partial(ratios, results, known, mine) for mine in ours]

    def compared(cell: dict) -> dict[str, float]:
        return {column: ratio for find in of_each for column, ratio in find(cell).items()}

    ratio_columns = [column for find in of_each for column in union(results["cells"], find)]
    lines = []
    if ratio_columns:
        all_groups = groups(results["cells"]).items()
        some = {name: cells for name, cells in all_groups if any(map(compared, cells))}
        told = means(some, ratio_columns, compared, places=3)
        lines += ["Times as fast as the peer, geometric means:", "", *told]
    if any(column.endswith(BEST) for column in ratio_columns):
        told = f"{BEST}: cuDNN of this run times the best peer over cuDNN elsewhere (bf16), same regime."
        lines += ["", told]
    for dim, cells in by_head_dim(results["cells"]).items():
        unit = unit_of(cells)
        caption = f"Head dim {dim}, {cells[0]['problem']['dtype']}, {unit}"
        caption += " and half the interquartile range" if cells[0]["rounds"] > 1 else ""
        columns = {"": lambda cell: title(cell["problem"])}
        columns |= {name: partial(entry, name, unit) for name in names}
        columns |= of_ratios(ratio_columns, compared)
        if rates := [cell["rates"] for cell in cells if cell["rates"]]:
            matmul, copy = (
                " to ".join(f"{pick(rate[what] for rate in rates) / scale:.0f}" for pick in (min, max))
                for what, scale in (("matmul_flops", 1e12), ("copy_bytes", 1e9))
            )
            caption += f"; beside it bf16 matmul {matmul} TFLOP/s, copy {copy} GB/s"
            for name in ours:
                columns[f"{name} of matmul"] = lambda c, n=name: f"{tflops(c, n) / matmul_tflops(c):.2f}"
            for name in ours:
                columns[f"{name} of floor"] = lambda c, n=name: f"{floor_us(c) / in_unit(c, n, TIME):.2f}"
        lines += ["", f"{caption}:", "", *by_column(columns, cells)]
        if "power" in cells[0]:
            drawing = names + ["matmul"] * any("matmul" in cell["power"] for cell in cells)
            caption = f"Head dim {dim}, joules per TFLOP, SM clock and power ({MISSING}: NVML does not tell):"
            columns = {"": columns[""]} | {name: partial(drawn, name) for name in drawing}
            lines += ["", caption, "", *by_column(columns, cells)]
    return lines


def plot(results: dict, path: Path) -> None:
    """Bars of speed: a row of panels per regime and mask, a column per head dim; the ceiling is a line.

    Only what this run measured: the best known peer, of another run, is in the tables.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    regimes = by_regime(results)
    head_dims = [*by_head_dim(results["cells"])]
    masks = list(dict.fromkeys(cell["problem"]["mask"] for cell in results["cells"]))
    timed = {name for measured in regimes.values() for cell in measured["cells"] for name in cell["times_us"]}
    names = [name for name in (*results["peers"], *results["ours"]) if name in timed]
    panels: dict[tuple, dict[str, list[dict]]] = {}
    for regime, measured in regimes.items():
        for mask in masks:
            shown = [cell for cell in measured["cells"] if cell["problem"]["mask"] == mask]
            of_each = by_head_dim(shown)
            panels[regime, mask] = {head_dim: of_each.get(head_dim, []) for head_dim in head_dims}
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
    legend(figure, axes, size[0])
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw(axis, cells: list[dict], names: list[str], ours: list[str], unit: str) -> None:
    """One panel: a group of bars per cell, each with its number."""
    from matplotlib.patheffects import withStroke

    numbers = {"fontsize": 6.5, "padding": 2, "rotation": 90 if len(cells) * len(names) > 12 else 0}
    numbers["path_effects"] = [withStroke(linewidth=2.5, foreground="white")]  # over the line
    width = 0.84 / len(names)
    for i, name in enumerate(names):
        shown = {x: in_unit(cell, name, unit) for x, cell in enumerate(cells) if name in cell["times_us"]}
        at = [x + (i - (len(names) - 1) / 2) * width for x in shown]
        label = f"flash_cute {name}" if name in ours else peers.title(name)
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
    direction = problem["direction"]
    return "Forward and backward" if direction == "both" else direction.capitalize()


def shape_title(cells: list[dict]) -> str:
    """What a panel's cells have in common: head dim, mask and, where they are alike, heads."""
    problem = cells[0]["problem"]
    heads = {heads_of(cell["problem"]) for cell in cells}
    return ", ".join(
        [f"head dim {head_dim_of(problem)}", problem["mask"], *(heads if len(heads) == 1 else ())]
    )
