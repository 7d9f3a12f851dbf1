"""What all reports have in common: Markdown tables, numbers in them, and where they come from."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from ..problem import width_name

MISSING = "-"  # in a table
Columns = dict[str, str | Callable[[dict], str]]  # title -> a format of a cell, or a function of it
# Okabe and Ito's colours and four of Paul Tol's, which the colour-blind tell apart; ours are the strong ones.
COLOURS = {
    "sm90": "#0072B2",
    "sm80": "#D55E00",
    "cpu": "#009E73",
    "ours": "#0072B2",
    "flash": "#999999",
    "flash3": "#117733",
    "flash4": "#882255",
    "cudnn": "#56B4E9",
    "efficient": "#E69F00",
    "math": "#CC79A7",
    "flashinfer": "#AA4499",
    "xqa": "#332288",
    "flex": "#44AA99",
    "padded": "#F0E442",
    "mean": "#333333",
}


def colour(name: str) -> str:
    """Of a contender: that of the last word of its name that has one."""
    return next((COLOURS[word] for word in (name, *reversed(name.split())) if word in COLOURS), "black")


def source(results: dict) -> list[str]:
    """The machine, the software and the command."""
    where = results["environment"]
    return [
        f"{where['device']}, driver {where['driver']}, torch {where['torch']}, cuDNN {where['cudnn']}, "
        f"commit {where['commit']}, {where['date']}",
        f"`{where['command']}`",
    ]


def by_column(columns: Columns, cells: Iterable[dict]) -> list[str]:
    """A table with a row for each cell, which says MISSING where it lacks what a column asks for."""

    def said(column: str | Callable[[dict], str], cell: dict) -> str:
        try:
            return column.format_map(cell) if isinstance(column, str) else column(cell)
        except KeyError:
            return MISSING

    lines = [list(columns), ["---"] + ["---:"] * (len(columns) - 1)]
    lines += [[said(column, cell) for column in columns.values()] for cell in cells]
    return ["| " + " | ".join(line) + " |" for line in lines]


def union(cells: Iterable[dict], names: Callable[[dict], Iterable[str]]) -> list[str]:
    """What names gives for any cell, in its order."""
    return list(dict.fromkeys(name for cell in cells for name in names(cell)))


def grouped(cells: Iterable[dict], key: Callable[[dict], Any]) -> dict[Any, list[dict]]:
    """Key -> its cells, in the order in which they come."""
    found: dict[Any, list[dict]] = {}
    for cell in cells:
        found.setdefault(key(cell), []).append(cell)
    return found


def of_ratios(titles: list[str], ratios: Callable[[dict], dict[str, float]], places: int = 2) -> Columns:
    """Columns of what ratios gives for a cell."""
    return {title: lambda cell, title=title: f"{ratios(cell)[title]:.{places}f}" for title in titles}


def means(groups: dict[str, list[dict]], titles: list[str], ratios, places: int = 2) -> list[str]:
    """A table of the ratios' geometric means over each group."""
    rows = [{"name": name, "mean": mean_of(cells, ratios)} for name, cells in groups.items()]
    columns = {"": "{name}"} | of_ratios(titles, lambda row: row["mean"], places)
    return by_column(columns, rows)


def mean_of(cells: Iterable[dict], ratios: Callable[[dict], dict[str, float]]) -> dict[str, float]:
    """The geometric mean of each ratio over the cells that have it."""
    found: dict[str, list[float]] = {}
    for cell in cells:
        for name, ratio in ratios(cell).items():
            found.setdefault(name, []).append(ratio)
    return {name: statistics.geometric_mean(values) for name, values in found.items()}


def digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def reasons(cells: Iterable[dict]) -> list[str]:
    """Why contenders were left out."""
    found = {(name, why) for cell in cells for name, why in cell["excluded"].items()}
    return [f"- {name} left out of some cells: {why}" for name, why in sorted(found)]


def title(problem: dict) -> str:
    """A row's name: the problem without its head dim."""
    lengths = {problem["seqlen_q"]: f"{problem['seqlen_q']}"}.get(problem["seqlen_k"])
    lengths = problem.get("lengths") or lengths or f"{problem['seqlen_q']} x {problem['seqlen_k']}"
    group = problem["heads_q"] // problem["heads_kv"]
    grouped = f", {group} query heads per K/V head" if group > 1 else ""
    return f"{problem['mask']}, {lengths}{grouped}"


def head_dim_of(problem: dict) -> str:
    """'128', or '192/128' where v has a width of its own."""
    return width_name(problem["head_dim"], problem.get("head_dim_v"))


def heads_of(problem: dict) -> str:
    query, kv = problem["heads_q"], problem["heads_kv"]
    return f"heads {query}" if query == kv else f"heads {query} (K/V {kv})"


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


def legend(figure, axes, width: float, least: int = 1) -> None:
    """One of all axes, below a figure so many inches wide."""
    found = {}
    for axis in axes.flat:
        handles, labels = axis.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    columns = max(least, min(len(found), int(width / 1.8)))
    place = "outside lower center"
    figure.legend(found.values(), found, loc=place, ncols=columns, frameon=False, fontsize=8)
