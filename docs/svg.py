"""A drawing as SVG, readable on light and on dark ground: colours are roles, and a style sheet inside says which."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

__all__ = ["Drawing", "Point"]

Point = tuple[float, float]
_STYLE = """
svg { --ink: #1f2328; --pale: #8c959f; --c0: #0072b2; --c1: #3a9bd9; --c2: #c98500; --c3: #d55e00; --mark: #8250df }
@media (prefers-color-scheme: dark) {
svg { --ink: #e6edf3; --pale: #848d97; --c0: #4a9fe0; --c1: #8ccbf5; --c2: #f0b429; --c3: #ff8c42; --mark: #bc8cff }
}
text { font: 14px system-ui, sans-serif; fill: var(--ink) }
"""
_GROUND = """svg { --ground: #ffffff }
@media (prefers-color-scheme: dark) { svg { --ground: #0d1117 } }
"""


class Drawing:
    """A canvas; y grows downwards.

    Args:
        width, height: in pixels.
        title: what it shows, in words.
        ground: whether it brings its own ground: for pages that may not follow the system's light or dark.
    """

    def __init__(self, width: int, height: int, title: str, *, ground: bool = False) -> None:
        self._size = (width, height)
        self._title = title
        self._style = _STYLE + (_GROUND if ground else "")
        self._parts: list[str] = []
        if ground:
            self._parts.append('<rect width="100%" height="100%" rx="8" style="fill: var(--ground)"/>')

    def line(self, points: Sequence[Point], colour: str, width: float = 2, dash: str = "") -> None:
        """A polygon line in the colour of a role."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" style="stroke: var(--{colour})" stroke-width="{width:g}"'
            f' stroke-linejoin="round"{dashes}/>'
        )

    def area(self, points: Sequence[Point], colour: str, opacity: float = 0.2) -> None:
        """A filled polygon without an outline."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polygon points="{path}" style="fill: var(--{colour})" fill-opacity="{opacity:g}"/>')

    def dot(self, at: Point, colour: str, radius: float = 4) -> None:
        """A filled circle."""
        x, y = at
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" style="fill: var(--{colour})"/>')

    def text(self, at: Point, words: str, anchor: str = "middle", colour: str = "ink", size: int = 14) -> None:
        """Words; ``_x`` is set lower."""
        x, y = at
        style = f"fill: var(--{colour}); font-size: {size}px"
        base, *lowered = words.split("_")
        spans = "".join(
            f'<tspan dy="4" font-size="75%">{escape(s[:1])}</tspan><tspan dy="-4">{escape(s[1:])}</tspan>'
            for s in lowered
        )
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" style="{style}">{escape(base)}{spans}</text>'
        )

    def arrow(self, start: Point, end: Point, colour: str = "ink") -> None:
        """A straight arrow, horizontal or vertical."""
        (x, y), (u, v) = start, end
        length = max(abs(u - x), abs(v - y))
        dx, dy = (u - x) / length * 7, (v - y) / length * 7
        self.line([start, end], colour, 1.2)
        self.line([(u - dx - dy / 2, v - dy + dx / 2), end, (u - dx + dy / 2, v - dy - dx / 2)], colour, 1.2)

    def write(self, path: Path) -> None:
        """One file."""
        width, height = self._size
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
        parts = [head, f"<title>{escape(self._title)}</title>", f"<style>{self._style}</style>", *self._parts, "</svg>"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(parts) + "\n", encoding="utf-8")
