"""How the package is built: its rooms on floors, and what imports what."""

from __future__ import annotations

import ast
import textwrap
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from drawing import Drawing

WIDE, GAP, LINE = 206, 22, 15
SOURCE = Path(__file__).parent.parent.parent / "src" / "tawpipe"


class House:
    """The rooms of the package, folders and files at its top, by what imports what; types alone do not count."""

    def __init__(self, source: Path) -> None:
        imports: dict[str, set[str]] = defaultdict(set)
        self.sentences: dict[str, str] = {}
        for path in sorted(source.rglob("*.py")):
            inside = path.relative_to(source)
            room = inside.parts[0].removesuffix(".py")
            tree = ast.parse(path.read_text(encoding="utf-8"))
            if len(inside.parts) == 1 or inside.name == "__init__.py":
                words = " ".join((ast.get_docstring(tree) or "").replace("`", "").split())
                self.sentences.setdefault(room, words.split(". ")[0].rstrip("."))
            imports[room] |= {name for name in _imported(tree) if name != room}
        left_out = {"__init__", "__main__", "errors"}  # the front doors, and what every room imports
        self.imports = {room: to - left_out for room, to in imports.items() if room not in left_out}

    def circles(self) -> dict[str, tuple[str, ...]]:
        """For every room all rooms that it imports and that import it, itself among them."""
        reach = {room: _reachable(room, self.imports) for room in self.imports}
        return {a: tuple(sorted({a, *(b for b in reach[a] if a in reach[b])})) for a in reach}


def _imported(tree: ast.AST) -> set[str]:
    """Names right below ``tawpipe`` that a module imports, at its top or inside of functions."""
    names: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if modules == ["tawpipe"] and isinstance(node, ast.ImportFrom):
            modules = [f"tawpipe.{alias.name}" for alias in node.names]
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        names |= {module.split(".")[1] for module in modules if module.startswith("tawpipe.")} | _imported(node)
    return names


def _reachable(start: Any, edges: dict[Any, set[Any]]) -> set[Any]:
    seen: set[Any] = set()
    waiting = list(edges[start])
    while waiting:
        room = waiting.pop()
        if room not in seen:
            seen.add(room)
            waiting += edges[room]
    return seen


Room = tuple[Any, ...]
"""What has a place on a floor: the names in one box, or an arrow that passes it (from, to, number of the floor)."""


def simplified(edges: dict[Room, set[Room]]) -> dict[Room, set[Room]]:
    """The arrows that do not follow from others."""
    return {
        room: {to for to in below if not any(to in _reachable(other, edges) for other in below - {to})}
        for room, below in edges.items()
    }


def floors(edges: dict[Room, set[Room]]) -> list[list[Room]]:
    """Every room on the floor below all that import it. Arrows that pass a floor get a place in it and in ``edges``."""
    floor = dict.fromkeys(edges, 0)
    for room in reversed(tuple(TopologicalSorter(edges).static_order())):
        for below in edges[room]:
            floor[below] = max(floor[below], floor[room] + 1)
    arrows = [(room, below) for room in sorted(edges) for below in sorted(edges[room])]
    for room, below in arrows:
        above = room
        for number in range(floor[room] + 1, floor[below]):
            passing = (room, below, number)
            floor[passing] = number
            edges[above] = edges[above] - {below} | {passing}
            edges[passing] = {below}
            above = passing
    above_of = {room: {above for above in edges if room in edges[above]} for room in edges}
    rows = [[room for room in floor if floor[room] == number] for number in range(max(floor.values()) + 1)]
    for _ in range(4):
        for number in range(1, len(rows)):
            rows[number] = _under(rows[number - 1], rows[number], above_of)
        for number in reversed(range(len(rows) - 1)):
            rows[number] = _under(rows[number + 1], rows[number], edges)
    return rows


def _under(near: list[Room], row: list[Room], neighbours: dict[Room, set[Room]]) -> list[Room]:
    """``row`` in the order of the middles of each room's neighbours in ``near``, so that few arrows cross."""
    spots = {room: (at + 0.5) / len(near) for at, room in enumerate(near)}
    pulls = {room: [spots[other] for other in near if other in neighbours[room]] for room in row}
    return sorted(row, key=lambda r: sum(pulls[r]) / len(pulls[r]) if pulls[r] else (row.index(r) + 0.5) / len(row))


def house() -> str:
    """The picture as SVG; an arrow leads to what is imported."""
    plan = House(SOURCE)
    circles = plan.circles()
    edges: dict[Room, set[Room]] = simplified(
        {
            circle: {circles[to] for room in circle for to in plan.imports[room]} - {circle}
            for circle in sorted(set(circles.values()))
        }
    )
    boxes = {room: [(name, textwrap.wrap(plan.sentences[name], 31)) for name in room] for room in edges}
    rows = floors(edges)
    heights = {room: 12 + sum(22 + LINE * len(lines) for _, lines in parts) for room, parts in boxes.items()}
    spans = [sum((WIDE if room in boxes else 0) + GAP for room in row) for row in rows]
    corners: dict[Room, tuple[float, float]] = {}
    y = 78
    for row, span in zip(rows, spans, strict=True):
        x = (max(spans) - span + GAP) / 2 + 20
        tall = max(heights.get(room, 0) for room in row)
        for room in row:
            corners[room] = (x, y)
            heights.setdefault(room, tall)
            x += (WIDE if room in boxes else 0) + GAP
        y += tall + 34
    picture = Drawing(max(spans) + 40, y - 14, "The rooms of the package tawpipe and what imports what")
    picture.text(20, 30, "The rooms of tawpipe", size=15, bold=True)
    picture.text(
        20, 50, "An arrow leads to what is imported. Arrows that follow from others are left out.", "soft", size=12
    )
    if any(len(room) > 1 for room in boxes):
        picture.text(20, 66, "Rooms in one orange box import each other.", "soft", size=12)
    for room, below in edges.items():
        x, top = corners[room]
        middle, bottom = x + (WIDE / 2 if room in boxes else 0), top + heights[room]
        if room not in boxes:
            picture.line([(middle, top), (middle, bottom)], "soft")
        for to in sorted(below, key=lambda room: corners[room]):
            end = corners[to][0] + (WIDE / 2 if to in boxes else 0)
            picture.line([(middle, bottom), (end, corners[to][1])], "soft", heads=">" if to in boxes else "")
    for room, parts in boxes.items():
        x, y = corners[room]
        picture.rect(x, y, WIDE, heights[room], "panel", radius=6, border="weight" if len(room) == 1 else "gradient")
        for name, lines in parts:
            y += 22
            picture.text(x + 10, y, name, "weight", size=14, bold=True)
            for line in lines:
                y += LINE
                picture.text(x + 10, y + 2, line, size=11)
    return picture.svg()
