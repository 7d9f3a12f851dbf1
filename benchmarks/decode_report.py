"""A Markdown table and a plot from the results of benchmarks.decode.

python -m benchmarks.decode_report benchmarks/results/<device>/decode.json

writes decode.md and decode.png beside the file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from .caches import INVARIANT, OURS, PAGES
from .report import MISSING, colour, digits, geometric_mean, source, table

BEST = f"{OURS}/best peer"
MARKERS = {64: "s", 16: "^", 1: "v"}  # of pages


def us(cell: dict, name: str) -> float:
    return cell["times_us"][name]["median"]


def read_rate(results: dict) -> float | None:
    """Bytes per second, the higher of those measured before and after the cells; None of a CPU."""
    return max((found["read_bytes"] for found in results["rates"] if found), default=None)


def share(cell: dict, name: str, read: float) -> float:
    """Of the read rate."""
    return cell["cell"]["bytes"] / us(cell, name) * 1e6 / read


def page_of(name: str) -> int | None:
    rows = name.partition(PAGES)[2]
    return int(rows) if rows else None


def ratios(cell: dict) -> dict[str, float]:
    """How many times as fast ours is as the best peer, on pages as contiguous, and batch invariant as free.

    Of mixed lengths, which are in pages only, ours is that with the pages that are best for it.
    """
    speedup = cell["speedup"]
    mine = sorted(speedup, key=lambda name: us(cell, name))
    found = {}
    if mine:
        best = OURS if OURS in speedup else mine[0]
        peers = {other: ratio for other, ratio in speedup[best].items() if other not in speedup}
        if peers:
            found[BEST] = min(peers.values())
    for name in speedup:
        if name != OURS and OURS in speedup:
            title = "batch invariant" if name == INVARIANT else f"pages of {page_of(name)}"
            found[f"{title}/contiguous"] = speedup[name][OURS]
    return found


def columns(cells: Iterable[dict], find) -> list[str]:
    """The names that find gives for any cell, in their order."""
    return list(dict.fromkeys(name for cell in cells for name in find(cell)))


def group_title(cell: dict) -> str:
    what = f"chunks of {cell['queries']} queries" if cell["packed"] else f"{cell['queries']} "
    what += "" if cell["packed"] else "query" if cell["queries"] == 1 else "queries"
    return f"head dim {cell['head_dim']}, {what}"


def grouped(results: dict) -> Iterator[tuple[str, list[dict]]]:
    """Cells of one head dim and number of queries."""
    for title in columns(results["cells"], lambda cell: [group_title(cell["cell"])]):
        yield title, [cell for cell in results["cells"] if group_title(cell["cell"]) == title]


def entry(cell: dict, name: str, read: float | None) -> str:
    """Microseconds, and beside them the share of the read rate, of chunks TFLOP/s."""
    if name not in cell["times_us"]:
        return MISSING
    text = digits(us(cell, name))
    if cell["cell"]["packed"]:
        return f"{text}, {digits(cell['cell']['flops'] / us(cell, name) / 1e6)}"
    return f"{text}, {share(cell, name, read):.2f}" if read else text


def ratio_entries(found: dict[str, float], titles: list[str]) -> list[str]:
    return [f"{found[title]:.2f}" if title in found else MISSING for title in titles]


def means(results: dict) -> list[str]:
    """Geometric means of the ratios, by head dim, queries and heads; mixed lengths apart."""
    titles = columns(results["cells"], ratios)
    rows = []
    for title, cells in grouped(results):
        for group in columns(cells, lambda cell: [mean_title(cell)]):
            found = [ratios(cell) for cell in cells if mean_title(cell) == group]
            chosen = {name: [one[name] for one in found if name in one] for name in titles}
            mean = {name: geometric_mean(values) for name, values in chosen.items() if values}
            rows.append([f"{title}, {group}", *ratio_entries(mean, titles)])
    return table(["", *titles], rows)


def mean_title(cell: dict) -> str:
    return heads_of(cell) + (", mixed lengths" if "-" in cell["cell"]["case"] else "")


def heads_of(cell: dict) -> str:
    return f"{cell['cell']['heads_q']}/{cell['cell']['heads_kv']} heads"


def appended(results: dict) -> list[str]:
    names = columns(results["appends"], lambda cell: cell["times_us"])
    titles = [f"{name}/copy" for name in names if name != "copy"]
    rows = []
    for cell in results["appends"]:
        shape = cell["cell"]
        text = (
            f"{shape['sequences']} x {shape['rows']} tokens, {heads_of(cell)}, head dim {shape['head_dim']}"
        )
        times = [digits(us(cell, name)) if name in cell["times_us"] else MISSING for name in names]
        found = {f"{name}/copy": ratio["copy"] for name, ratio in cell["speedup"].items()}
        rows.append([text, *times, *ratio_entries(found, titles)])
    return table(["", *names, *titles], rows)


def markdown(results: dict) -> str:
    lines = source(results["environment"])
    read = read_rate(results)
    if read:
        told = [
            f"{' and '.join(f'{found[name] / 1e9:.0f}' for found in results['rates'])} GB/s"
            for name in ("read_bytes", "copy_bytes")
        ]
        lines += ["", f"Before and after the cells a kernel that only reads has {told[0]}, a copy {told[1]}."]
    if results["cells"]:
        lines += ["", "Times as fast, geometric means:", "", *means(results)]
    for title, cells in grouped(results):
        names = columns(cells, lambda cell: cell["times_us"])
        titles = columns(cells, ratios)
        packed, dtype = cells[0]["cell"]["packed"], cells[0]["cell"]["dtype"]
        beside = ", TFLOP/s" if packed else ", of the read rate" if read else ""
        rows = [
            [
                f"{cell['cell']['case']}, {heads_of(cell)}",
                *(entry(cell, name, read) for name in names),
                *ratio_entries(ratios(cell), titles),
            ]
            for cell in cells
        ]
        caption = f"{title[0].upper()}{title[1:]}, {dtype}, microseconds{beside}; then times as fast:"
        lines += ["", caption, "", *table(["", *names, *titles], rows)]
    if results["appends"]:
        what = "append_kv with rotary of q and k, microseconds; then times as fast as a copy of its bytes:"
        lines += ["", what, "", *appended(results)]
    every = results["cells"] + results["appends"]
    reasons = sorted({(name, why) for cell in every for name, why in cell["excluded"].items()})
    lines += ["", *(f"- {name} left out of some cells: {why}" for name, why in reasons)]
    return "\n".join(lines).rstrip()


def plot(results: dict, path: Path) -> None:
    """Shares of the read rate, a panel for each head dim and number of queries; none of a CPU's."""
    read = read_rate(results)
    panels = [(title, cells) for title, cells in grouped(results) if not cells[0]["cell"]["packed"]]
    if not read or not panels:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    widest = max(len(cells) for _, cells in panels)
    size = max(6.0, 1.5 + 0.6 * widest), 1 + 3 * len(panels)
    figure, axes = pyplot.subplots(len(panels), squeeze=False, figsize=size, layout="constrained")
    for axis, (title, cells) in zip(axes[:, 0], panels, strict=True):
        names = columns(cells, lambda cell: cell["times_us"])
        for i, name in enumerate(names):
            shown = {x: share(cell, name, read) for x, cell in enumerate(cells) if name in cell["times_us"]}
            at = [x + 0.7 * ((i + 0.5) / len(names) - 0.5) for x in shown]
            axis.plot(at, shown.values(), label=name, **style(name))
        axis.axhline(1, color="black", linestyle=":", linewidth=1)
        axis.set_xticks(range(len(cells)), [label(cell) for cell in cells], fontsize=7)
        axis.set_xlim(-0.6, len(cells) - 0.4)
        axis.set_ylim(bottom=0)
        axis.set(title=title, ylabel="of the read rate")
        axis.grid(axis="y", linewidth=0.4, alpha=0.5)
        for x in range(len(cells) - 1):
            axis.axvline(x + 0.5, color="black", linewidth=0.4, alpha=0.2)
        axis.spines[["top", "right"]].set_visible(False)
    legend = {}
    for axis in axes.flat:
        handles, labels = axis.get_legend_handles_labels()
        legend |= dict(zip(labels, handles, strict=True))
    dtype = results["cells"][0]["cell"]["dtype"]
    figure.suptitle(f"{results['environment']['device']}, {dtype}, {read / 1e9:.0f} GB/s read", fontsize=11)
    figure.legend(
        legend.values(),
        legend,
        loc="outside lower center",
        ncols=max(2, int(size[0] / 1.9)),
        frameon=False,
        fontsize=8,
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def style(name: str) -> dict:
    """Ours filled, peers hollow; a colour for each of them and a marker for where keys lie."""
    base = name.partition(PAGES)[0]
    mine = base in (OURS, INVARIANT)
    found = {OURS: colour("sm90"), INVARIANT: colour("sm80")}.get(base) or colour(base)
    marker = MARKERS.get(page_of(name), "D") if page_of(name) else "o"
    fill = found if mine else "none"
    return {"color": found, "marker": marker, "linestyle": "", "markersize": 5, "markerfacecolor": fill}


def label(cell: dict) -> str:
    return f"{cell['cell']['case'].replace('x', ' x', 1)}\n{heads_of(cell).removesuffix(' heads')}"


def main(arguments: list[str] | None = None) -> None:
    args = argparse.ArgumentParser(
        prog="python -m benchmarks.decode_report", description=__doc__.splitlines()[0]
    )
    args.add_argument("results", type=Path, help="a JSON file of benchmarks.decode")
    options = args.parse_args(arguments)
    results = json.loads(options.results.read_text())
    text = markdown(results)
    options.results.with_suffix(".md").write_text(text + "\n")
    plot(results, options.results.with_suffix(".png"))
    print(text)


if __name__ == "__main__":
    main()
