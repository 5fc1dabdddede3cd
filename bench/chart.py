"""A line chart as SVG: shares (0 to 1) over sizes on a logarithmic axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log2

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 150, 16, 44
COLOURS = ("#1b6ca8", "#c8553d", "#588157", "#6d597a")

Points = Sequence[tuple[float, float]]


def chart(lines: Mapping[str, Points], level: tuple[str, float]) -> str:
    """One line a name, its (size in GiB, share) joined; ``level`` is a dashed line across."""
    sizes = sorted({size for points in lines.values() for size, _ in points})
    low, high = log2(sizes[0]), log2(sizes[-1])

    def x(size: float) -> float:
        return LEFT + (log2(size) - low) / max(high - low, 1e-9) * (WIDTH - LEFT - RIGHT)

    def y(share: float) -> float:
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for step in range(0, 11, 2):
        share = step / 10
        out.append(_line(x(sizes[0]), y(share), x(sizes[-1]), y(share), "#dddddd"))
        out.append(_text(LEFT - 8, y(share) + 4, f"{share:.0%}", "end"))
    for size in sizes:
        out.append(_text(x(size), HEIGHT - BOTTOM + 18, f"{size:.0f}", "middle"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    out.append(_text(middle, HEIGHT - 8, "pool, GiB", "middle"))
    name, share = level
    out.append(_line(x(sizes[0]), y(share), x(sizes[-1]), y(share), "#333333", "6 4"))
    labels = [(y(share), name, "#333333")]
    for colour, (name, points) in zip(COLOURS, lines.items(), strict=False):
        path = " ".join(f"{x(size):.1f},{y(share):.1f}" for size, share in sorted(points))
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        labels.append((y(max(points)[1]), name, colour))
    height = 0.0
    for top, name, colour in sorted(labels):
        height = max(top + 4, height + 15)  # labels at the lines' ends, none over another
        out.append(_text(WIDTH - RIGHT + 8, height, name, "start", colour))
    return "\n".join([*out, "</svg>", ""])


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dashes: str = "none") -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"'
        f' stroke-dasharray="{dashes}"/>'
    )


def _text(x: float, y: float, text: str, anchor: str, colour: str = "black") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{text}</text>'
