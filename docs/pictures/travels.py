"""The three kinds of strategies side by side: what stays on a device, and what crosses the slow link."""

from __future__ import annotations

from drawing import Drawing

PANELS = (  # name, what crosses, how much of a layer a device keeps, colours of the lines between nodes
    ("weights travel", "each layer's weights and gradients cross,", "to each node, not to each device", 4),
    ("copies in every node", "only gradients cross,", "once per step", 2),
    ("activations travel", "hidden states and their gradients cross,", "for every micro-batch", 1),
)
WIDTH, PANEL, NODE, LEFT = 900, 280, 116, 14
ROWS = (84, 138)
"""Middles of the two devices of a node."""
LEGEND = (("weight", "weights, in pieces or whole"), ("activation", "activations"), ("gradient", "gradients"))


def travels() -> str:
    """The picture as SVG."""
    picture = Drawing(WIDTH, 272, "What travels between nodes: weights, gradients of copies, or activations")
    for number, (name, *words, pieces) in enumerate(PANELS):
        left = LEFT + number * (PANEL + 16)
        picture.text(left + PANEL / 2, 28, name, anchor="middle", size=15, bold=True)
        for node in (0, 1):
            _node(picture, left + node * (PANEL - NODE), node, pieces)
        for line, text in enumerate(words):
            picture.text(left + PANEL / 2, 196 + 18 * line, text, "soft", anchor="middle")
        _links(picture, left + NODE, left + PANEL - NODE, pieces)
    x = float(LEFT)
    for color, text in LEGEND:
        picture.rect(x, 244, 14, 14, color, radius=2)
        picture.text(x + 20, 255, text, "soft", size=12)
        x += 50 + 6.3 * len(text)
    return picture.svg()


def _node(picture: Drawing, left: float, node: int, pieces: int) -> None:
    """Two devices: what each keeps of a layer, and its micro-batch; or its stage of a pipeline."""
    picture.rect(left, 42, NODE, 134, "panel", radius=8, border="line")
    picture.text(left + NODE / 2, 56, f"node {node}", "soft", size=11, anchor="middle")
    for row, middle in enumerate(ROWS):
        picture.rect(left + 6, middle - 20, NODE - 12, 40, "paper", radius=6, border="line")
        if pieces == 1:
            picture.rect(left + 16, middle - 12, NODE - 32, 24, "weight", radius=3)
            stage = row + 1 if node == 0 else 4 - row
            picture.text(left + NODE / 2, middle + 4, f"stage {stage}", "paper", size=12, anchor="middle")
            continue
        inner, outer = (left + 66, left + 16) if node == 0 else (left + 14, left + 68)
        picture.rect(outer, middle - 12, 32, 24, "activation", radius=3)
        kept = (row + 2 * node) % pieces
        for piece in range(pieces):
            wide = 36 / pieces
            opacity = 1.0 if piece == kept else 0.16
            picture.rect(inner + piece * wide, middle - 12, wide - 1.5, 24, "weight", opacity=opacity)


def _links(picture: Drawing, left: float, right: float, pieces: int) -> None:
    """The lines over the slow link, and those of a pipeline inside a node."""
    if pieces == 1:
        for x in (left - NODE / 2, right + NODE / 2):
            down = x < left
            for color, shift, heads in (("activation", -7, ">"), ("gradient", 7, "<")):
                ends = [(x + shift, ROWS[0] + 13), (x + shift, ROWS[1] - 13)]
                picture.line(ends if down else ends[::-1], color, width=2, heads=heads)
    for middle in ROWS if pieces > 1 else ROWS[1:]:
        ends = [(left - 4, middle - 6), (right + 4, middle - 6)]
        if pieces == 4:
            picture.line(ends, "weight", width=2, heads="<>")
        elif pieces == 1:
            picture.line(ends, "activation", width=2, heads=">")
        back = [(left - 4, middle + 6), (right + 4, middle + 6)]
        picture.line(back, "gradient", width=2, heads="<" if pieces == 1 else "<>")
