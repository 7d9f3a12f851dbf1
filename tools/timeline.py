"""Draws docs/timeline_sm90.svg from docs/timeline_sm90.json: what one thread block does when.

    python tools/timeline.py

The JSON holds [event, clock] pairs of three roles (two computing warpgroups and the loading warp), written by
marks of %clock in a copy of the kernel: one at each line of forward/consumer_sm90.hpp at which a phase begins
or ends, and after each load of forward/producer_sm90.hpp. The marks themselves cost a tenth of the time.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
# Event that ends a phase -> (title, colour); the phase began at the role's event before it.
PHASES = {
    2: ("waits for its turn", "#DDDDDD"),
    3: ("products are issued; waits for scores", "#56B4E9"),
    4: ("softmax", "#E69F00"),
    5: ("waits for P V", "#0072B2"),
    1: ("P to 16 bits", "#F0E442"),
    11: ("P to 16 bits", "#F0E442"),
    12: ("waits for its turn", "#DDDDDD"),
    13: ("last P V; next tile's scores issued", "#882255"),
    14: ("O and LSE leave", "#009E73"),
    15: ("products are issued; waits for scores", "#56B4E9"),
}
AFTER_SCORES = {(15, 1), (15, 11)}  # the first softmax of a tile runs up to the wait for the next turn
LOADS = {23: ("Q", "#000000"), 21: ("K", "#CC79A7"), 22: ("V", "#D55E00")}
WIDTH, ROW, LOAD_ROW, LEFT, TOP = 1100, 34, 18, 110, 40
SPAN = 21000  # clocks that are shown


def main() -> None:
    *warpgroups, loads = json.loads((DOCS / "timeline_sm90.json").read_text())
    begin = max(role[0][1] for role in (*warpgroups, loads))
    scale = (WIDTH - LEFT - 25) / SPAN

    def x(clock: int) -> float:
        return LEFT + min(max(clock - begin, 0), SPAN) * scale

    shapes, legend = [], {}
    for row, events in enumerate(warpgroups):
        y = TOP + row * ROW
        shapes.append(f'<text x="4" y="{y + 18}">warpgroup {row}</text>')
        for (before, start), (event, end) in itertools.pairwise(events):
            title, colour = PHASES[4] if (before, event) in AFTER_SCORES else PHASES[event]
            if x(end) > x(start):
                legend[title] = colour
                shapes.append(
                    f'<rect x="{x(start):.1f}" y="{y}" width="{x(end) - x(start):.1f}" height="{ROW - 8}" '
                    f'fill="{colour}"><title>{title}: {end - start} clocks</title></rect>'
                )
    y = TOP + len(warpgroups) * ROW
    for kind, (title, colour) in LOADS.items():
        shapes.append(f'<text x="4" y="{y + 12}">loads of {title}</text>')
        for event, clock in loads:
            if event == kind and 0 <= clock - begin <= SPAN:
                shapes.append(
                    f'<rect x="{x(clock) - 1:.1f}" y="{y}" width="3" height="{LOAD_ROW - 4}" '
                    f'fill="{colour}"/>'
                )
        y += LOAD_ROW
    y += 4
    for clock in range(0, SPAN + 1, 3000):
        at = LEFT + clock * scale
        shapes.append(f'<text x="{at:.0f}" y="{TOP - 14}" text-anchor="middle">{clock}</text>')
        shapes.append(f'<path d="M{at:.0f} {TOP - 8}V{y}" stroke="#BBB" stroke-dasharray="2"/>')
    shapes.append(f'<text x="4" y="{TOP - 14}">clocks</text>')
    for place, (title, colour) in enumerate(legend.items()):
        at, line = LEFT + place % 3 * 320, y + 10 + place // 3 * 20
        shapes.append(f'<rect x="{at}" y="{line}" width="12" height="12" fill="{colour}"/>')
        shapes.append(f'<text x="{at + 18}" y="{line + 11}">{title}</text>')
    height = y + 30 + (len(legend) - 1) // 3 * 20
    (DOCS / "timeline_sm90.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>' + "\n".join(shapes) + "</svg>\n"
    )


if __name__ == "__main__":
    main()
