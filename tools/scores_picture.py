"""Draws what changes scores: docs/scores.svg.

    python tools/scores_picture.py

Of 24 queries and keys, a row of cells for each query, from what the package's own functions say: a mask of
padding and of a draft tree, a bias by buckets of distance, ALiBi and dropout's pairs; and the curve of a
soft cap.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flash_cute import dropout_mask, reference  # noqa: E402

SIZE, CELL, GAP, TOP = 24, 8, 24, 26
SIDE = SIZE * CELL
SHADES, HIDDEN = 8, "#D55E00"
CAP, FARTHEST = 50.0, 150.0  # of the curve: the cap, and the largest score


def grey(level: int) -> str:
    """Of level 0, the lowest number, to SHADES - 1."""
    return "#" + f"{round(222 - 190 * level / (SHADES - 1)):02X}" * 3


def cells(values: torch.Tensor) -> str:
    """Squares of the numbers' shades, those of one shade as one path; -inf has a colour of its own."""
    finite = values[values.isfinite()]
    low, high = finite.min(), finite.max()
    levels = ((values - low) / (high - low).clamp(min=1e-9) * (SHADES - 1)).round()
    squares: dict[str, list[str]] = {}
    for row, column in torch.cartesian_prod(torch.arange(SIZE), torch.arange(SIZE)).tolist():
        level = levels[row, column].item()
        colour = HIDDEN if level == -torch.inf else grey(int(level))
        path = squares.setdefault(colour, [])
        path.append(f"M{column * CELL} {row * CELL}h{CELL - 1}v{CELL - 1}h-{CELL - 1}z")
    return "".join(f'<path fill="{colour}" d="{"".join(path)}"/>' for colour, path in squares.items())


def curve() -> str:
    scores = torch.linspace(-FARTHEST, FARTHEST, 121)
    capped = reference.changed_scores(scores.view(1, 1, 1, -1), softcap=CAP).flatten()

    def line(heights: torch.Tensor, colour: str, width: float) -> str:
        at = [
            f"{(x + FARTHEST) / (2 * FARTHEST) * SIDE:.1f},{(1 - y / (2 * CAP)) / 2 * SIDE:.1f}"
            for x, y in zip(scores.tolist(), heights.tolist(), strict=True)
            if abs(y) <= 2 * CAP
        ]
        return f'<polyline points="{" ".join(at)}" fill="none" stroke="{colour}" stroke-width="{width}"/>'

    bounds = "".join(line(torch.full_like(scores, bound), "#BBBBBB", 1) for bound in (-CAP, CAP))
    frame = f'<rect width="{SIDE}" height="{SIDE}" fill="none" stroke="#BBBBBB"/>'
    return frame + bounds + line(scores, "#999999", 1.5) + line(capped, "#0072B2", 2.5)


def mask() -> torch.Tensor:
    """Hidden pairs are -inf, others 0: of a cache that begins with padding, and a draft tree behind it."""
    seen = torch.zeros(SIZE, SIZE, dtype=torch.bool)
    drafts = SIZE // 2
    seen[:, 3:drafts] = True
    for draft in range(drafts, SIZE):
        parent = (draft - drafts - 1) // 2 + drafts
        seen[draft] |= seen[parent] if draft > drafts else False
        seen[draft, draft] = True
    return torch.where(seen, 0.0, -torch.inf)


def panels() -> dict[str, str]:
    distance = torch.arange(SIZE) - torch.arange(SIZE)[:, None]
    generator = torch.Generator().manual_seed(3)
    buckets = torch.randn(17, generator=generator)[distance.clamp(-8, 8) + 8]
    alibi = reference.changed_scores(torch.zeros(1, 1, SIZE, SIZE), alibi_slopes=torch.tensor([0.5]))[0, 0]
    kept = dropout_mask(torch.tensor([17, 0]), 1, 1, SIZE, SIZE, 0.1)[0, 0]
    return {
        "mask": cells(mask()),
        "bias, by buckets": cells(buckets),
        "ALiBi": cells(alibi),
        "dropout of 0.1": cells(torch.where(kept, 0.0, -torch.inf)),
        f"soft cap of {CAP:.0f}": curve(),
    }


def main() -> None:
    parts = [
        f'<g transform="translate({GAP + i * (SIDE + GAP)} {TOP})"><text y="-8">{title}</text>{drawing}</g>'
        for i, (title, drawing) in enumerate(panels().items())
    ]
    width, height = GAP + len(parts) * (SIDE + GAP), TOP + SIDE + GAP
    style = 'font-family="sans-serif" font-size="13"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {style}>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *parts,
        "</svg>",
    ]
    (ROOT / "docs" / "scores.svg").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
