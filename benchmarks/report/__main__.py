"""A Markdown table, and of attention and decode a plot, from a result file of any program.

python -m benchmarks.report benchmarks/results/<device>/attention.json

writes attention.md and attention.png beside the file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from . import PLOTS, load, markdown


def main(arguments: list[str] | None = None) -> None:
    args = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    args.add_argument("results", type=Path, help="a JSON file in benchmarks/results")
    args.add_argument(
        "--baseline",
        type=Path,
        help="peers of benchmarks.attention measured elsewhere (default: peers_h200.json on an H200)",
    )
    options = args.parse_args(arguments)
    results = load(options.results)
    text = markdown(results, **({"baseline": options.baseline} if options.baseline else {}))
    options.results.with_suffix(".md").write_text(text + "\n")
    if plot := PLOTS.get(results["program"]):
        plot(results, options.results.with_suffix(".png"))
    print(text)


if __name__ == "__main__":
    main()
