"""Draws a block's exchanges when experts stay at home: `python docs/pictures/experts.py`."""

from __future__ import annotations

from pathlib import Path

STEPS = (
    ("forward", ("router", "counts", "there", "own experts", "back", "add")),
    ("backward", ("router", "gradients back", "own experts", "gradients there")),
)
EXCHANGES = {"counts": "8 bytes", "there": "rows", "back": "rows", "gradients there": "rows", "gradients back": "rows"}
RANKS = 3
LEFT, TOP, WIDTH, HEIGHT, GAP = 90, 46, 104, 26, 40


def box(x: float, y: float, text: str, color: str) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{WIDTH - 12}" height="{HEIGHT}" rx="4" fill="{color}"/>'
        f'<text x="{x + (WIDTH - 12) / 2}" y="{y + 17}" text-anchor="middle">{text}</text>'
    )


def arrows(x: float, y: float) -> str:
    """From each rank to each other."""
    middle = [y + rank * GAP + HEIGHT / 2 for rank in range(RANKS)]
    right = x + WIDTH - 12
    return "".join(f'<line x1="{x}" y1="{a}" x2="{right}" y2="{b}"/>' for a in middle for b in middle if a != b)


def row(what: str, steps: tuple[str, ...], y: float) -> list[str]:
    parts = [f'<text x="8" y="{y - 12}" font-weight="bold">{what}</text>']
    parts += [f'<text x="8" y="{y + rank * GAP + 17}">rank {rank}</text>' for rank in range(RANKS)]
    for number, step in enumerate(steps):
        x = LEFT + number * WIDTH
        if step in EXCHANGES:
            parts.append(f'<text x="{x + (WIDTH - 12) / 2}" y="{y - 6}" text-anchor="middle">{step}: {EXCHANGES[step]}</text>')
            parts.append(f'<g stroke="#777">{arrows(x, y)}</g>')
        else:
            color = "#f4c58a" if step == "own experts" else "#bcd6ee"
            parts += [box(x, y + rank * GAP, step, color) for rank in range(RANKS)]
    return parts


def svg() -> str:
    height = TOP + 2 * (RANKS * GAP + 44)
    width = LEFT + max(len(steps) for _, steps in STEPS) * WIDTH
    parts = []
    for number, (what, steps) in enumerate(STEPS):
        drawn = steps if what == "forward" else tuple(reversed(steps))
        parts += row(what, drawn, TOP + number * (RANKS * GAP + 44))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(svg())
