"""What moves where: two nodes of three devices, and the way of one layer's weights and gradients between them."""

from __future__ import annotations

from functools import partial

from drawing import Drawing

WIDTH = 880
ROWS = (124, 190, 256)
"""Middles of the three devices of a node."""
PIECES = [(color, opacity) for color in ("weight", "weight2") for opacity in (1.0, 0.72, 0.45)]
"""How the piece of a layer looks whose home is on each device, those of node 0 first."""
STORY = (
    ("activation", "Activations stay. Each device computes its own micro-batches, and all are at the same layer."),
    ("weight", "Every weight has one home. Each device keeps a piece of the layer, its gradient and optimizer state."),
    (
        "weight",
        "Weights travel: each piece crosses the slow link once to a node, not once to every device there.",
    ),
    ("weight", "Inside the node an all-gather over the fast links makes the whole layer, just before it is needed."),
    ("gradient", "Gradients go home the same way: added up inside the node first, then one hop over the slow link."),
)
NUMBERS_AT = ((84, 58), (332, 58), (440, 92), (275, 92), (440, 290))


def traffic() -> str:
    """The picture as SVG."""
    picture = Drawing(WIDTH, 458, "Activations stay on their devices; weights travel to them and gradients go home")
    for node in (0, 1):
        _node(picture, node)
    for middle in ROWS:
        picture.line([(348, middle - 8), (532, middle - 8)], "weight", width=2, heads="<>")
        picture.line([(348, middle + 8), (532, middle + 8)], "gradient", width=2, heads="<>")
    picture.text(WIDTH / 2, 40, "slow link", anchor="middle", size=15, bold=True)
    for line, ((color, words), (x, y)) in enumerate(zip(STORY, NUMBERS_AT, strict=True)):
        picture.number(x, y, line + 1, color)
        picture.number(30, 336 + 26 * line, line + 1, color)
        picture.text(50, 341 + 26 * line, words, size=14)
    return picture.svg()


def _node(picture: Drawing, node: int) -> None:
    """One node; the second is the mirror of the first, so that their homes face each other."""

    def at(x: float) -> float:
        return WIDTH - x if node else x

    def box(x: float, y: float, width: float, height: float) -> partial[None]:
        return partial(picture.rect, WIDTH - x - width if node else x, y, width, height)

    box(16, 16, 352, 296)("panel", radius=8, border="line")
    picture.text(at(192), 40, f"node {node}", anchor="middle", size=15, bold=True)
    for x, y, label in ((84, 80, "activations"), (198, 80, "whole layer"), (332, 80, "home"), (284, 304, "fast links")):
        picture.text(at(x), y, label, "soft", anchor="middle")
    for middle in ROWS:
        box(28, middle - 29, 328, 58)("paper", radius=6, border="line")
    picture.line([(at(275), ROWS[0] - 9), (at(275), ROWS[2] - 7)], "weight", width=7)
    picture.line([(at(293), ROWS[0] + 7), (at(293), ROWS[2] + 9)], "gradient", width=7)
    for row, middle in enumerate(ROWS):
        picture.text(at(22), middle + 4, str(row), "soft", size=10, anchor="middle")
        for micro_batch in range(3):
            box(42 + 29 * micro_batch, middle - 14, 25, 28)("activation", radius=3)
        for piece, (color, opacity) in enumerate(PIECES):
            picture.rect(min(at(144), at(252)) + 18 * piece, middle - 14, 16.5, 28, color, opacity=opacity)
        color, opacity = PIECES[row + 3 * node]
        box(318, middle - 14, 28, 28)(color, radius=3, opacity=opacity)
        picture.line([(at(318), middle - 8), (at(254), middle - 8)], "weight", width=2, heads=">")
        picture.line([(at(254), middle + 8), (at(318), middle + 8)], "gradient", width=2, heads=">")
