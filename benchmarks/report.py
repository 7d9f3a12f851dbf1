"""A Markdown table and a plot from the results of benchmarks.attention.

python -m benchmarks.report benchmarks/results/<device>/attention.json

writes attention.md and attention.png beside the file.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from pathlib import Path

from .results import FOLDER

PEERS_H100 = FOLDER / "peers_h100.json"
MISSING = "-"  # in a table
SHORT = 2048  # sequences up to here have a geometric mean of their own
# Okabe and Ito's colours, which the colour-blind tell apart; ours take the strong ones.
OUR_COLOURS = ("#D55E00", "#0072B2", "#009E73")
PEER_COLOURS = ("#999999", "#56B4E9", "#E69F00", "#CC79A7")


def key(problem: dict) -> tuple:
    """What identifies a cell in every result file."""
    names = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "mask")
    return tuple(problem[name] for name in names)


def load_baseline(path: Path) -> dict[tuple, float]:
    """best_over_cudnn of every forward cell in a file like peers_h100.json."""
    return {
        (c["b"], c["h"], c["h"], c["s"], c["s"], c["d"], "causal" if c["causal"] else "full"): c[
            "best_over_cudnn"
        ]
        for c in json.loads(path.read_text())["cells"]
        if c["mode"] == "fwd"
    }


def baseline_for(results: dict, path: Path | None = None) -> dict[tuple, float]:
    """The baseline named, or on an H100 the one committed, or none."""
    if path is None and "H100" in results["environment"]["device"]:
        path = PEERS_H100
    return load_baseline(path) if path else {}


def tflops(cell: dict, name: str) -> float:
    return cell["problem"]["flops"] / cell["times_us"][name]["median"] / 1e6


def digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def spread(cell: dict, name: str) -> float:
    """The interquartile range as a share of the median."""
    times = cell["times_us"][name]
    return (times["q75"] - times["q25"]) / times["median"]


def floor_us(cell: dict) -> float:
    """The least time for the work, its bytes or its products, at the rates measured beside it."""
    problem, rates = cell["problem"], cell["rates"]
    return 1e6 * max(problem["bytes"] / rates["copy_bytes"], problem["flops"] / rates["matmul_flops"])


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def comparisons(results: dict, baseline: dict[tuple, float]) -> dict[str, dict[tuple, float]]:
    """Column title -> cell -> ours over a peer in speed; the baseline's best peer is one of them."""
    columns: dict[str, dict[tuple, float]] = {}
    for mine in results["ours"]:
        for cell in results["cells"]:
            where = key(cell["problem"])
            ratios = cell["speedup"].get(mine, {})
            for peer, ratio in ratios.items():
                columns.setdefault(f"{mine}/{peer}", {})[where] = ratio
            if "cudnn" in ratios and where in baseline:
                columns.setdefault(f"{mine}/best known", {})[where] = ratios["cudnn"] / baseline[where]
    return columns


def table(header: list[str], rows: Iterable[list[str]]) -> list[str]:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def title(problem: dict) -> str:
    """A row's name: the problem without its head dim."""
    lengths = {problem["seqlen_q"]: f"{problem['seqlen_q']}"}.get(problem["seqlen_k"])
    lengths = lengths or f"{problem['seqlen_q']} x {problem['seqlen_k']}"
    group = problem["heads_q"] // problem["heads_kv"]
    grouped = f", {group} query heads per K/V head" if group > 1 else ""
    return f"{problem['mask']}, {lengths}{grouped}"


def cell_rows(results: dict, cells: list[dict], columns: dict) -> Iterable[list[str]]:
    ours, names = results["ours"], results["ours"] + results["peers"]
    for cell in cells:
        times, floor = cell["times_us"], floor_us(cell)
        rate = cell["rates"]["matmul_flops"] / 1e12
        row = [title(cell["problem"])]
        row += [
            f"{digits(tflops(cell, n))} ±{50 * spread(cell, n):.0f}%" if n in times else MISSING
            for n in names
        ]
        ratios = [column.get(key(cell["problem"])) for column in columns.values()]
        row += [f"{ratio:.2f}" if ratio else MISSING for ratio in ratios]
        row += [f"{tflops(cell, n) / rate:.2f}" if n in times else MISSING for n in ours]
        row += [f"{floor / times[n]['median']:.2f}" if n in times else MISSING for n in ours]
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


def markdown(results: dict, baseline: dict[tuple, float]) -> str:
    """The results as Markdown: where they come from, geometric means, and every cell per head dim."""
    columns = comparisons(results, baseline)
    lines = [*source(results["environment"]), ""]
    if columns:
        lines += [
            "Times as fast as the peer, geometric means:",
            "",
            *table(["", *columns], mean_rows(results, columns)),
        ]
    head_dims = sorted({cell["problem"]["head_dim"] for cell in results["cells"]})
    ours, names = results["ours"], results["ours"] + results["peers"]
    header = [*names, *columns, *(f"{n} of matmul" for n in ours), *(f"{n} of floor" for n in ours)]
    for dim in head_dims:
        cells = [cell for cell in results["cells"] if cell["problem"]["head_dim"] == dim]
        caption = f"Head dim {dim}, {cells[0]['problem']['dtype']}, TFLOP/s and half the interquartile range"
        rates = [cell["rates"] for cell in cells]
        matmul = " to ".join(f"{pick(r['matmul_flops'] for r in rates) / 1e12:.0f}" for pick in (min, max))
        copy = " to ".join(f"{pick(r['copy_bytes'] for r in rates) / 1e9:.0f}" for pick in (min, max))
        lines += ["", f"{caption}; beside it matmul {matmul} TFLOP/s, copy {copy} GB/s:", ""]
        lines += table(["", *header], cell_rows(results, cells, columns))
    reasons = {(name, why) for cell in results["cells"] for name, why in cell["excluded"].items()}
    lines += ["", *(f"- {name} left out of some cells: {why}" for name, why in sorted(reasons))]
    return "\n".join(lines).rstrip()


def plot(results: dict, path: Path) -> None:
    """Bars of TFLOP/s, a panel per head dim and mask, the run's matrix product as a line above them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cells = results["cells"]
    head_dims = sorted({cell["problem"]["head_dim"] for cell in cells})
    masks = list(dict.fromkeys(cell["problem"]["mask"] for cell in cells))
    colours = dict(zip(results["ours"], OUR_COLOURS, strict=False))
    colours |= dict(zip(results["peers"], PEER_COLOURS, strict=False))
    names = [*results["peers"], *results["ours"]]
    width = 0.84 / len(names)
    panel = {"sharey": True, "squeeze": False, "figsize": (5 * len(head_dims), 3.1 * len(masks) + 0.8)}
    figure, axes = pyplot.subplots(len(masks), len(head_dims), **panel)
    for row, mask in zip(axes, masks, strict=True):
        for axis, dim in zip(row, head_dims, strict=True):
            shown = [c for c in cells if (c["problem"]["head_dim"], c["problem"]["mask"]) == (dim, mask)]
            for i, name in enumerate(names):
                at = [x + (i - (len(names) - 1) / 2) * width for x in range(len(shown))]
                heights = [tflops(cell, name) if name in cell["times_us"] else 0 for cell in shown]
                mine = name in results["ours"]
                label = f"flash_cute {name}" if mine else f"PyTorch's {name}"
                bars = axis.bar(at, heights, width * 0.92, color=colours[name], label=label)
                if mine:
                    axis.bar_label(bars, fmt="%.0f", fontsize=6.5, padding=1)
            rates = [cell["rates"]["matmul_flops"] / 1e12 for cell in shown]
            axis.plot(
                range(len(shown)), rates, color="black", linewidth=1, linestyle=":", label="matmul 8192³"
            )
            axis.set_xticks(range(len(shown)), [seqlen_label(cell["problem"]) for cell in shown])
            axis.set_title(f"head dim {dim}, {mask}", fontsize=10)
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(axis="y", linewidth=0.4, alpha=0.5)
            axis.set_axisbelow(True)
        row[0].set_ylabel("TFLOP/s")
    for axis in axes[-1]:
        axis.set_xlabel("sequence length")
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), loc="upper center", ncols=len(names) + 1, frameon=False
    )
    where = results["environment"]
    figure.text(
        0.995,
        0.005,
        f"{where['device']}, {cells[0]['problem']['dtype']}",
        ha="right",
        fontsize=7,
        color="0.4",
    )
    figure.tight_layout(rect=(0, 0.01, 1, 1 - 0.35 / figure.get_figheight()))
    figure.savefig(path, dpi=160)
    pyplot.close(figure)


def seqlen_label(problem: dict) -> str:
    """512, 1k, 16k; both lengths where they differ."""
    lengths = dict.fromkeys((problem["seqlen_q"], problem["seqlen_k"]))
    return " x ".join(f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths)


def main(arguments: list[str] | None = None) -> None:
    args = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    args.add_argument("results", type=Path, help="a JSON file of benchmarks.attention")
    args.add_argument(
        "--baseline", type=Path, help="peers measured elsewhere (default: peers_h100.json on an H100)"
    )
    options = args.parse_args(arguments)
    results = json.loads(options.results.read_text())
    text = markdown(results, baseline_for(results, options.baseline))
    options.results.with_suffix(".md").write_text(text + "\n")
    plot(results, options.results.with_suffix(".png"))
    print(text)


if __name__ == "__main__":
    main()
