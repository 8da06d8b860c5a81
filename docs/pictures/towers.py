"""Draws the gates of a forward, with text on one rank and an image on the other: `python docs/pictures/towers.py`."""

from __future__ import annotations

from pathlib import Path

# what each rank does between two gates, and what the ranks tell each other there: "" is none
COLUMNS = (
    (("embed", "embed"), ("", "vision")),
    (("attends vision", "vision"), ("", "projector")),
    (("attends projector", "projector"), ("", "")),
    (("language model", "language model"), ("", "")),
    (("head", "head"), ("", "")),
)
RANKS = ("text", "image")
COLORS = {"attends": "#eeeeee", "vision": "#f4c58a", "projector": "#f4c58a"}
LEFT, TOP, WIDTH, HEIGHT, GAP, GATE = 92, 34, 112, 26, 46, 62


def box(x: float, y: float, text: str) -> str:
    color = COLORS.get(text.split()[0], "#bcd6ee")
    return (
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="4" fill="{color}"/>'
        f'<text x="{x + WIDTH / 2}" y="{y + 17}" text-anchor="middle">{text}</text>'
    )


def gate(x: float, told: tuple[str, ...]) -> list[str]:
    middle, bottom = x + GATE / 2, TOP + (len(told) - 1) * GAP + HEIGHT + 8
    parts = [f'<line x1="{middle}" y1="{TOP - 8}" x2="{middle}" y2="{bottom}" stroke="#777" stroke-dasharray="3 3"/>']
    for rank, word in enumerate(told):
        y = TOP + rank * GAP + HEIGHT + 14
        parts.append(f'<text x="{middle}" y="{y}" text-anchor="middle" fill="#555">{word or "none"}</text>')
    return parts


def svg() -> str:
    step = WIDTH + GATE
    width, height = LEFT + len(COLUMNS) * step, TOP + len(RANKS) * GAP + 26
    parts = [f'<text x="8" y="{TOP + rank * GAP + 17}">rank {rank}: {what}</text>' for rank, what in enumerate(RANKS)]
    for number, (does, told) in enumerate(COLUMNS):
        x = LEFT + number * step
        parts += [box(x, TOP + rank * GAP, text) for rank, text in enumerate(does)]
        parts += gate(x + WIDTH, told)
    parts.append('<text x="8" y="14">gates (dashed), and what ranks tell each other there: 16 bytes</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(svg())
