"""Panels of points, each with the line through them, side by side in one SVG that is readable on light and on dark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 460, 340
"""Of a panel, in pixels."""
LEFT, RIGHT, TOP, BOTTOM = 62, 20, 62, 52
"""Margins of a panel, for its title and what its axes say."""
MAX_TICKS = 9
STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #333 } .title { font-size: 14px; font-weight: 600 }
.back { fill: #fff } .grid { stroke: #ddd } .axis { stroke: #777 } .line { stroke: #d55e00; stroke-width: 1.5 }
.point { fill: #0072b2 }
@media (prefers-color-scheme: dark) {
text { fill: #ddd } .back { fill: #16181c } .grid { stroke: #33363c } .axis { stroke: #999 } .line { stroke: #ff9d4d }
.point { fill: #56b4e9 } }
"""


class Panel(NamedTuple):
    """Milliseconds against something.

    Attributes:
        title: What is shown.
        unit: One of what is counted on the horizontal axis.
        points: (x, milliseconds), at least one.
        line: Milliseconds at 0, and a unit more costs so many.
    """

    title: str
    unit: str
    points: Sequence[tuple[float, float]]
    line: tuple[float, float]


def draw(heading: str, panels: Sequence[Panel]) -> str:
    """Return the panels as an SVG document under one heading; both axes of each begin at 0."""
    width, height = WIDTH * len(panels), HEIGHT + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<style>{STYLE}</style>",
        f'<rect class="back" width="{width}" height="{height}"/>',
        f'<text class="title" x="{LEFT}" y="26">{escape(heading)}</text>',
    ]
    for i, panel in enumerate(panels):
        parts += [f'<g transform="translate({i * WIDTH} 30)">', *_draw_panel(panel), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _draw_panel(panel: Panel) -> Iterator[str]:
    base, slope = panel.line
    first, last = panel.points[0][0], panel.points[-1][0]
    ends = [(x, base + slope * x) for x in (first, last)]
    x_ticks = _ticks(last)
    y_ticks = _ticks(max(y for _, y in [*panel.points, *ends]))
    left, right, top, bottom = LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM

    def at(x: float, y: float) -> tuple[str, str]:
        return (
            f"{left + (right - left) * x / x_ticks[-1]:.1f}",
            f"{bottom - (bottom - top) * max(0.0, y) / y_ticks[-1]:.1f}",
        )

    yield f'<text x="{left}" y="22">{escape(panel.title)}</text>'
    yield f'<text x="{left}" y="42">{base:.2f} ms, and {1000 * slope:.2f} µs a {panel.unit}</text>'
    for y in y_ticks:
        height = at(0, y)[1]
        yield f'<path class="{"grid" if y else "axis"}" d="M{left} {height}H{right}"/>'
        yield f'<text x="{left - 8}" y="{float(height) + 4:.1f}" text-anchor="end">{y:g}</text>'
    for x in x_ticks:
        yield f'<text x="{at(x, 0)[0]}" y="{bottom + 18}" text-anchor="middle">{x:g}</text>'
    yield f'<text x="{(left + right) / 2}" y="{bottom + 40}" text-anchor="middle">{panel.unit}s</text>'
    yield f'<text transform="translate(16 {(top + bottom) / 2}) rotate(-90)" text-anchor="middle">ms a step</text>'
    (x1, y1), (x2, y2) = at(*ends[0]), at(*ends[1])
    yield f'<path class="line" d="M{x1} {y1}L{x2} {y2}"/>'
    for x, y in panel.points:
        cx, cy = at(x, y)
        yield f'<circle class="point" cx="{cx}" cy="{cy}" r="3"><title>{x:g} {panel.unit}s: {y:.3g} ms</title></circle>'


def _ticks(greatest: float) -> list[float]:
    """Return round numbers from 0 to at least `greatest`, at equal distances."""
    least = max(greatest, 1e-9) / (MAX_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(least))
    distance = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))
    return [i * distance for i in range(math.ceil(greatest / distance - 1e-9) + 1)]
