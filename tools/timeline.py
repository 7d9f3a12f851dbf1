"""Draws what one thread block does when: docs/timeline_*.svg from docs/timeline_*.json.

    python tools/timeline.py

The JSON holds [event, clock] pairs of each role (two computing warpgroups, the loading warp and, in the
backward, the two adding warps), written by marks of %clock in a copy of the kernel: one at each line of its
consumer at which a phase begins or ends, after each load of its producer, and around each addition. The marks
themselves cost a tenth of the time in the forward and a quarter in the backward.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
WIDTH, ROW, LOAD_ROW, LEFT, TOP = 1100, 34, 18, 110, 40


@dataclass
class Picture:
    """phases: by the event that ends one, or by those around it -> (title, colour); it began at the role's
    event before. moments: of the loading role, event -> (title, colour). spans: of the roles behind it, the
    events around one. clocks: how many are shown."""

    name: str
    clocks: int
    phases: dict[int | tuple[int, int], tuple[str, str]]
    moments: dict[int, tuple[str, str]]
    spans: list[tuple[str, int, int]] = field(default_factory=list)


SCORES = ("products are issued; waits for scores", "#56B4E9")
TURN, TO_16_BITS, SOFTMAX = ("waits for its turn", "#DDDDDD"), ("P to 16 bits", "#F0E442"), "#E69F00"
LOADS = {"Q": "#000000", "K": "#CC79A7", "V": "#D55E00", "dO": "#666666"}
PICTURES = [
    Picture(
        "timeline_sm90",
        21000,
        {
            2: TURN,
            3: SCORES,
            4: ("softmax", SOFTMAX),
            5: ("waits for P V", "#0072B2"),
            1: TO_16_BITS,
            11: TO_16_BITS,
            12: TURN,
            13: ("last P V; next tile's scores issued", "#882255"),
            14: ("O and LSE leave", "#009E73"),
            15: SCORES,
            # The first softmax of a tile runs up to the wait for the next turn.
            (15, 1): ("softmax", SOFTMAX),
            (15, 11): ("softmax", SOFTMAX),
        },
        {23: ("Q", LOADS["Q"]), 21: ("K", LOADS["K"]), 22: ("V", LOADS["V"])},
    ),
    Picture(
        "timeline_backward_sm90",
        56000,
        {
            2: ("waits for Q and dO; S and dP issued", "#DDDDDD"),
            3: ("waits for S", "#56B4E9"),
            4: ("exponentials", SOFTMAX),
            5: ("waits for dP", "#0072B2"),
            6: ("dS; dV, dQ and dK issued", "#F0E442"),
            7: ("waits for dV", "#AA4499"),
            8: ("waits for dQ, hands it over", "#882255"),
            9: ("waits for dK", "#CC6677"),
            11: ("the last dQ", "#882255"),
            12: ("dV and dK leave", "#009E73"),
            1: ("next tile", "#999933"),
            10: ("waits for K and Q", "#BBBBBB"),
        },
        {20: ("Q", LOADS["Q"]), 21: ("dO", LOADS["dO"]), 22: ("K", LOADS["K"]), 23: ("V", LOADS["V"])},
        [("adds dQ, 0", 30, 31), ("adds dQ, 1", 30, 31)],
    ),
]


def draw(picture: Picture) -> None:
    roles = json.loads((DOCS / f"{picture.name}.json").read_text())
    warpgroups, loads, others = roles[:2], roles[2], roles[3:]
    begin = max(role[0][1] for role in roles)
    scale = (WIDTH - LEFT - 25) / picture.clocks

    def x(clock: int) -> float:
        return LEFT + min(max(clock - begin, 0), picture.clocks) * scale

    shapes, legend = [], {}

    def rectangle(y: int, height: int, start: int, end: int, title: str, colour: str) -> None:
        if x(end) > x(start):
            shapes.append(
                f'<rect x="{x(start):.1f}" y="{y}" width="{x(end) - x(start):.1f}" height="{height}" '
                f'fill="{colour}"><title>{title}: {end - start} clocks</title></rect>'
            )

    for row, events in enumerate(warpgroups):
        y = TOP + row * ROW
        shapes.append(f'<text x="4" y="{y + 18}">warpgroup {row}</text>')
        for (before, start), (event, end) in itertools.pairwise(events):
            title, colour = picture.phases.get((before, event)) or picture.phases[event]
            if x(end) > x(start):
                legend[title] = colour
            rectangle(y, ROW - 8, start, end, title, colour)
    y = TOP + len(warpgroups) * ROW
    for kind, (title, colour) in picture.moments.items():
        shapes.append(f'<text x="4" y="{y + 12}">loads of {title}</text>')
        for event, clock in loads:
            if event == kind and 0 <= clock - begin <= picture.clocks:
                shapes.append(
                    f'<rect x="{x(clock) - 1:.1f}" y="{y}" width="3" height="{LOAD_ROW - 4}" '
                    f'fill="{colour}"/>'
                )
        y += LOAD_ROW
    for (title, first, last), events in zip(picture.spans, others, strict=True):
        shapes.append(f'<text x="4" y="{y + 12}">{title}</text>')
        for (before, start), (event, end) in itertools.pairwise(events):
            if (before, event) == (first, last):
                rectangle(y, LOAD_ROW - 4, start, end, title, "#117733")
        y += LOAD_ROW
    y += 4
    for clock in range(0, picture.clocks + 1, picture.clocks // 7):
        at = LEFT + clock * scale
        shapes.append(f'<text x="{at:.0f}" y="{TOP - 14}" text-anchor="middle">{clock}</text>')
        shapes.append(f'<path d="M{at:.0f} {TOP - 8}V{y}" stroke="#BBB" stroke-dasharray="2"/>')
    shapes.append(f'<text x="4" y="{TOP - 14}">clocks</text>')
    for place, (title, colour) in enumerate(legend.items()):
        at, line = LEFT + place % 3 * 320, y + 10 + place // 3 * 20
        shapes.append(f'<rect x="{at}" y="{line}" width="12" height="12" fill="{colour}"/>')
        shapes.append(f'<text x="{at + 18}" y="{line + 11}">{title}</text>')
    height = y + 30 + (len(legend) - 1) // 3 * 20
    (DOCS / f"{picture.name}.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>' + "\n".join(shapes) + "</svg>\n"
    )


if __name__ == "__main__":
    for each in PICTURES:
        draw(each)
