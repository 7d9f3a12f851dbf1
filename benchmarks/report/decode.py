"""Of benchmarks.decode: tables of decoding, of chunks and of append_kv, and shares of the read rate."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from ..caches import CODES, INVARIANT, LENGTHS, OURS, PAGES
from .tables import (
    by_column,
    colour,
    digits,
    grouped,
    head_dim_of,
    legend,
    means,
    of_ratios,
    reasons,
    source,
    union,
)

BEST = f"{OURS}/best peer"
MARKERS = {64: "s", 16: "^", 1: "v"}  # of pages


def us(cell: dict, name: str) -> float:
    return cell["times_us"][name]["median"]


def read_rate(results: dict) -> float | None:
    """Bytes per second, the higher of those measured before and after the cells; None of a CPU."""
    return max((found["read_bytes"] for found in results["rates"] if found), default=None)


def share(cell: dict, name: str, read: float) -> float:
    """Of the read rate; codes of 8 bits are half of the problem's bytes."""
    read_bytes = cell["problem"]["bytes"] / (2 if name.startswith(CODES) else 1)
    return read_bytes / us(cell, name) * 1e6 / read


def page_of(name: str) -> int | None:
    rows = name.partition(PAGES)[2]
    return int(rows) if rows else None


def ratios(cell: dict) -> dict[str, float]:
    """How many times as fast ours is as the best peer, and as ours in another way.

    That is in all ways as contiguous, in pages as contiguous with lengths, with a cache of 8 bits as likewise
    with one of 16.

    Of mixed lengths, which are in pages only, ours is that with the pages that are best for it.
    """
    all_of_ours = cell["speedup"]
    speedup = {name: over for name, over in all_of_ours.items() if not name.startswith(CODES)}
    mine = sorted(speedup, key=lambda name: us(cell, name))
    found = {}
    if mine:
        best = OURS if OURS in speedup else mine[0]
        peers = {other: ratio for other, ratio in speedup[best].items() if other not in all_of_ours}
        if peers:
            found[BEST] = min(peers.values())
    for base, title in ((OURS, "contiguous"), (LENGTHS, "lengths")):
        for name in speedup:
            if base in speedup[name] and (base == OURS or page_of(name)):
                found[f"{name.removeprefix(f'{OURS}, ')}/{title}"] = speedup[name][base]
    for name in (name for name in all_of_ours if name not in speedup):
        where = name.removeprefix(CODES)
        same = OURS + where if where or LENGTHS not in speedup else LENGTHS
        if same in all_of_ours[name]:
            found[f"fp8{where}/16 bits"] = all_of_ours[name][same]
    return found


def group_title(cell: dict) -> str:
    what = f"chunks of {cell['queries']} queries" if cell["packed"] else f"{cell['queries']} "
    what += "" if cell["packed"] else "query" if cell["queries"] == 1 else "queries"
    return f"head dim {head_dim_of(cell)}, {what}"


def entry(read: float | None, name: str, cell: dict) -> str:
    """Microseconds, and beside them the share of the read rate, of chunks TFLOP/s."""
    text = digits(us(cell, name))
    if cell["problem"]["packed"]:
        return f"{text}, {digits(cell['problem']['flops'] / us(cell, name) / 1e6)}"
    return f"{text}, {share(cell, name, read):.2f}" if read else text


def of_one_kind(results: dict) -> dict[str, list[dict]]:
    """Cells of one head dim and number of queries."""
    return grouped(results["cells"], lambda cell: group_title(cell["problem"]))


def mean_title(cell: dict) -> str:
    mixed = ", mixed lengths" if "-" in cell["problem"]["case"] else ""
    return f"{group_title(cell['problem'])}, {heads_of(cell)}{mixed}"


def heads_of(cell: dict) -> str:
    return f"{cell['problem']['heads_q']}/{cell['problem']['heads_kv']} heads"


def appended(cells: list[dict]) -> list[str]:
    def over_copy(cell: dict) -> dict[str, float]:
        return {f"{name}/copy": ratio["copy"] for name, ratio in cell["speedup"].items()}

    def name(cell: dict) -> str:
        told = "{sequences} x {rows} tokens, {heads_q}/{heads_kv} heads, head dim {head_dim}"
        return told.format(**cell["problem"])

    names = union(cells, lambda cell: cell["times_us"])
    columns = {"": name} | {name: lambda cell, name=name: digits(us(cell, name)) for name in names}
    titles = [f"{name}/copy" for name in names if name != "copy"]
    return by_column(columns | of_ratios(titles, over_copy), cells)


def markdown(results: dict) -> str:
    lines = source(results)
    read = read_rate(results)
    if read:
        told = [
            f"{' and '.join(f'{found[name] / 1e9:.0f}' for found in results['rates'])} GB/s"
            for name in ("read_bytes", "copy_bytes")
        ]
        lines += ["", f"Before and after the cells a kernel that only reads has {told[0]}, a copy {told[1]}."]
    if results["cells"]:
        groups = {title: grouped(cells, mean_title) for title, cells in of_one_kind(results).items()}
        groups = {name: cells for group in groups.values() for name, cells in group.items()}
        titles = union(results["cells"], ratios)
        lines += ["", "Times as fast, geometric means:", "", *means(groups, titles, ratios)]
    for title, cells in of_one_kind(results).items():
        packed, dtype = cells[0]["problem"]["packed"], cells[0]["problem"]["dtype"]
        beside = ", TFLOP/s" if packed else ", of the read rate" if read else ""
        caption = f"{title[0].upper()}{title[1:]}, {dtype}, microseconds{beside}; then times as fast:"
        columns = {"": lambda cell: f"{cell['problem']['case']}, {heads_of(cell)}"}
        names = union(cells, lambda cell: cell["times_us"])
        columns |= {name: partial(entry, read, name) for name in names}
        columns |= of_ratios(union(cells, ratios), ratios)
        lines += ["", caption, "", *by_column(columns, cells)]
    if results["appends"]:
        what = "append_kv with rotary of q and k, microseconds; then times as fast as a copy of its bytes:"
        lines += ["", what, "", *appended(results["appends"])]
    return "\n".join([*lines, "", *reasons(results["cells"] + results["appends"])]).rstrip()


def plot(results: dict, path: Path) -> None:
    """Shares of the read rate, a panel for each head dim and number of queries; none of a CPU's."""
    read = read_rate(results)
    panels = [
        (title, cells) for title, cells in of_one_kind(results).items() if not cells[0]["problem"]["packed"]
    ]
    if not read or not panels:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    widest = max(len(cells) for _, cells in panels)
    size = max(6.0, 1.5 + 0.6 * widest), 1 + 3 * len(panels)
    figure, axes = pyplot.subplots(len(panels), squeeze=False, figsize=size, layout="constrained")
    for axis, (title, cells) in zip(axes[:, 0], panels, strict=True):
        names = union(cells, lambda cell: cell["times_us"])
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
    dtype = results["cells"][0]["problem"]["dtype"]
    figure.suptitle(f"{results['environment']['device']}, {dtype}, {read / 1e9:.0f} GB/s read", fontsize=11)
    legend(figure, axes, size[0], least=2)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def style(name: str) -> dict:
    """Ours filled, peers hollow; a colour for each of them and a marker for where keys lie."""
    base = name.partition(PAGES)[0]
    mine = base.startswith(OURS)
    found = colour({OURS: "sm90", INVARIANT: "sm80", LENGTHS: "cpu", CODES: "math"}.get(base, base))
    marker = MARKERS.get(page_of(name), "D") if page_of(name) else "o"
    fill = found if mine else "none"
    return {"color": found, "marker": marker, "linestyle": "", "markersize": 5, "markerfacecolor": fill}


def label(cell: dict) -> str:
    return f"{cell['problem']['case'].replace('x', ' x', 1)}\n{heads_of(cell).removesuffix(' heads')}"
