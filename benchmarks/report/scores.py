"""Of benchmarks.scores: tables of each pass, and bars."""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path

from .tables import (
    by_column,
    colour,
    digits,
    grouped,
    head_dim_of,
    legend,
    mean_of,
    of_ratios,
    reasons,
    source,
    title,
    union,
)

PLAIN, OURS = "plain", "ours"
TITLES = {"forward": "Forward", "backward": "Backward", "both": "Forward and backward"}


def ratios(way: str, cell: dict) -> dict[str, float]:
    """Of ours: its rate, by visible pairs, over plain's, and how many times as fast it is as each peer."""
    speedup = cell["passes"][way]["speedup"].get(OURS)
    if speedup is None:
        return {}
    dim = f"d{head_dim_of(cell['problem'])}"
    of_plain = speedup[PLAIN] * cell["visible"] if PLAIN in speedup else 1.0  # in the plain case
    return {dim: of_plain} | {f"{dim}/{peer}": ratio for peer, ratio in speedup.items() if peer != PLAIN}


def entry(way: str, name: str, cell: dict) -> str:
    """Microseconds and TFLOP/s."""
    found = cell["passes"][way]
    return f"{digits(found['times_us'][name]['median'])}, {digits(found['tflops'][name])}"


def markdown(results: dict) -> str:
    cells = results["cells"]
    by_dim = [cell for group in by_head_dim(cells).values() for cell in group]
    told = (
        "Geometric means over the lengths: rate of visible pairs over that of the plain call; then times as "
    )
    lines = [*source(results), "", told + "fast as each peer."]
    for way, name in TITLES.items():
        columns = union(by_dim, partial(ratios, way))
        rows = [
            {"case": case, "mean": mean_of(group, partial(ratios, way))}
            for case, group in grouped(cells, lambda cell: cell["case"]).items()
        ]
        table = {"case": "{case}"} | of_ratios(columns, lambda row: row["mean"])
        lines += ["", f"## {name}", "", *by_column(table, rows)]
        if results["by_length"]:
            lines += each_length(cells, way)
    return "\n".join([*lines, "", *reasons(cells)]).rstrip()


def each_length(cells: list[dict], way: str) -> list[str]:
    lines = []
    for dim, group in by_head_dim(cells).items():
        columns = {"case": "{case}", "mask, length": lambda cell: title(cell["problem"])}
        names = union(group, lambda cell: cell["passes"][way]["times_us"])
        for name in sorted(names, key=PLAIN.__ne__):
            columns[name] = partial(entry, way, name)
        columns |= of_ratios(union(group, partial(ratios, way)), partial(ratios, way))
        lines += ["", f"Head dim {dim}, microseconds, TFLOP/s of visible pairs:", ""]
        lines += by_column(columns, group)
    return lines


def by_head_dim(cells: list[dict]) -> dict[str, list[dict]]:
    found = grouped(cells, lambda cell: head_dim_of(cell["problem"]))
    return dict(sorted(found.items(), key=lambda item: int(item[0])))


def share_of_plain(way: str, name: str, cell: dict) -> float:
    """A contender's rate of visible pairs over that of plain, which in the plain case is ours."""
    times = {who: us["median"] for who, us in cell["passes"][way]["times_us"].items()}
    return times[PLAIN if PLAIN in times else OURS] / times[name] * cell["visible"]


def plot(results: dict, path: Path) -> None:
    """Bars of rates over plain's, means over the lengths: a row of panels a pass, a column a head dim."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    dims = by_head_dim(results["cells"])
    names = union(results["cells"], lambda cell: cell["passes"]["forward"]["times_us"])
    names = [name for name in names if name != PLAIN]
    ways = [way for way in TITLES if way != "both"]
    of_case = max(0.62, 0.18 * len(names))
    widths = [max(1.8, 0.8 + of_case * len({cell["case"] for cell in cells})) for cells in dims.values()]
    size = max(6.0, sum(widths)), 2.9 * len(ways) + 0.6
    figure, axes = pyplot.subplots(
        len(ways),
        len(dims),
        sharey="row",
        squeeze=False,
        figsize=size,
        layout="constrained",
        width_ratios=widths,
    )
    for row, way in zip(axes, ways, strict=True):
        row[0].set_ylabel("rate of visible pairs\nover the plain call's")
        for axis, (dim, cells) in zip(row, dims.items(), strict=True):
            draw(axis, cells, names, way)
            axis.set_title(f"{TITLES[way]}, head dim {dim}", fontsize=9)
    figure.suptitle(
        f"{results['environment']['device']}, {results['cells'][0]['problem']['dtype']}", fontsize=11
    )
    legend(figure, axes, size[0])
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw(axis, cells: list[dict], names: list[str], way: str) -> None:
    """One panel: a group of bars for each case."""
    cases = grouped(cells, lambda cell: cell["case"])
    width = 0.84 / len(names)
    for i, name in enumerate(names):
        bars = {}
        for x, group in enumerate(cases.values()):
            ran = [cell for cell in group if name in cell["passes"][way]["times_us"]]
            if ran:
                bars[x] = statistics.geometric_mean([share_of_plain(way, name, cell) for cell in ran])
        if not bars:  # which would have no colour of its own in the legend
            continue
        at = [x + (i - (len(names) - 1) / 2) * width for x in bars]
        label = "flash_cute" if name == OURS else name
        drawn = axis.bar(at, bars.values(), width * 0.92, color=colour(name), label=label)
        numbers = [f"{value:.2f}" for value in bars.values()]
        axis.bar_label(drawn, numbers, fontsize=6.5, padding=2, rotation=90)
    axis.axhline(1, linestyle=":", color="black", linewidth=1, zorder=0.6)
    axis.set_xticks(range(len(cases)), [case.replace(" ", "\n") for case in cases], fontsize=7.5)
    axis.set_xlim(-0.6, len(cases) - 0.4)
    axis.margins(y=0.18)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", linewidth=0.4, alpha=0.5)
    axis.set_axisbelow(True)
