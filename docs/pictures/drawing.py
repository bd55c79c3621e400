"""A small SVG writer for the pictures of the documents: light and dark in one file, the same bytes each time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from xml.sax.saxutils import escape

PALETTE = {  # light and dark; every picture brings its own background, so that it is readable on any page
    "paper": ("#ffffff", "#0d1117"),
    "panel": ("#f3f5f8", "#1a212b"),
    "line": ("#c8d0d9", "#444c56"),
    "ink": ("#1f2328", "#e6edf3"),
    "soft": ("#59636e", "#9ba4ae"),
    "weight": ("#2367d1", "#58a0ff"),
    "weight2": ("#0f8a7c", "#3fc0ae"),
    "gradient": ("#c9580a", "#f59145"),
    "activation": ("#8250df", "#b48cff"),
    "near": ("#8fb8ee", "#3a629b"),
    "rival": ("#b4bcc5", "#5f6873"),
}
HATCH = (
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="f-paper" width="2.5" height="6"/></pattern>'
)


class Drawing:
    """An SVG under construction. Colours are names of the palette; text stays text."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []
        self.rect(0, 0, width, height, "paper", radius=8)

    def add(self, tag: str, attributes: dict[str, object], content: str = "") -> None:
        words = " ".join(f'{name}="{_plain(value)}"' for name, value in attributes.items())
        self.parts.append(f"<{tag} {words}>{content}</{tag}>" if content else f"<{tag} {words}/>")

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        *,
        radius: float = 0,
        border: str = "",
        opacity: float = 1,
    ) -> None:
        more: dict[str, object] = {"rx": radius} if radius else {}
        more |= {"fill-opacity": f"{opacity:g}"} if opacity < 1 else {}
        names = f"f-{fill} s-{border}" if border else f"f-{fill}"
        self.add("rect", {"class": names, "x": x, "y": y, "width": width, "height": height, **more})

    def text(
        self,
        x: float,
        y: float,
        content: str,
        color: str = "ink",
        *,
        size: float = 13,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        more = {"text-anchor": anchor} if anchor != "start" else {}
        more |= {"font-weight": 600} if bold else {}
        self.add("text", {"class": f"f-{color}", "x": x, "y": y, "font-size": size, **more}, escape(content))

    def line(self, points: Iterable[tuple[float, float]], color: str, *, width: float = 1.5, heads: str = "") -> None:
        """A line through ``points``, with an arrow head at its end (``>``), its start (``<``) or both (``<>``)."""
        points = list(points)
        self.add("polyline", {"class": f"s-{color}", "points": _points(points), "fill": "none", "stroke-width": width})
        for head, (x, y), before in ((">", points[-1], points[-2]), ("<", points[0], points[1])):
            if head in heads:
                angle = math.atan2(y - before[1], x - before[0])
                corners = [(x - 9 * math.cos(angle + turn), y - 9 * math.sin(angle + turn)) for turn in (0.42, -0.42)]
                self.add("polygon", {"class": f"f-{color}", "points": _points([(x, y), *corners])})

    def number(self, x: float, y: float, value: int, color: str) -> None:
        """A disc with a digit in it, centred on (x, y)."""
        self.add("circle", {"class": f"f-{color}", "cx": x, "cy": y, "r": 9})
        self.text(x, y + 4, str(value), "paper", size=12, anchor="middle", bold=True)

    def svg(self) -> str:
        schemes = [
            "".join(f".f-{name}{{fill:{pair[at]}}}.s-{name}{{stroke:{pair[at]}}}" for name, pair in PALETTE.items())
            for at in (0, 1)
        ]
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_plain(self.width)} {_plain(self.height)}" '
                f'width="{_plain(self.width)}" height="{_plain(self.height)}" role="img" '
                'font-family="-apple-system,BlinkMacSystemFont,Segoe UI,Noto Sans,Helvetica,Arial,sans-serif">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{schemes[0]}@media (prefers-color-scheme:dark){{{schemes[1]}}}</style>",
                *([HATCH] if any("url(#hatch)" in part for part in self.parts) else []),
                *self.parts,
                "</svg>\n",
            ]
        )


def _plain(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def _points(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{_plain(float(x))},{_plain(float(y))}" for x, y in points)
