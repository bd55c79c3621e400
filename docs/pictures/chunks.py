"""The picture of rows in chunks: the order that others take through layers and chunks, and the one taken here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from drawing import Drawing

LAYERS, CHUNKS, CELL, GAP = 4, 4, 52, 6
TITLE = (
    "Two orders through the layers and chunks of one long row. Chunk by chunk, keys and values of all layers stay and "
    "weights come once for every chunk. Layer by layer, those of one layer exist and its weights come once."
)


def chunks() -> str:
    """The SVG."""
    drawing = Drawing(820, 402, TITLE)
    _grid(
        drawing,
        40,
        "Chunk by chunk: others",
        lambda layer, chunk: chunk * LAYERS + layer,
        [
            ("activation", "keys and values of every layer stay"),
            ("", "weights that travel would come once for every chunk"),
        ],
    )
    _grid(
        drawing,
        470,
        "Layer by layer: a visit here",
        lambda layer, chunk: layer * CHUNKS + chunk,
        [
            ("activation", "keys and values of one layer exist"),
            ("", "its weights come once, whatever the length"),
            ("near", "inputs wait in the host's memory or in files"),
        ],
    )
    return drawing.svg()


def _grid(
    drawing: Drawing,
    left: float,
    title: str,
    order: Callable[[int, int], int],
    words: Sequence[tuple[str, str]],
) -> None:
    now, top = 9, 84
    drawing.text(left, 34, title, size=16, bold=True)
    by_layer = order(0, 1) == 1
    for layer in range(LAYERS):
        y = top + (LAYERS - 1 - layer) * (CELL + GAP)
        drawing.text(left, y + CELL / 2 + 5, f"layer {layer + 1}", "soft", size=12)
        for chunk in range(CHUNKS):
            number = order(layer, chunk)
            x = left + 62 + chunk * (CELL + GAP)
            holds = number <= now and (not by_layer or layer == now // CHUNKS)
            fill = "activation" if holds else ("near" if number <= now else "panel")
            drawing.rect(x, y, CELL, CELL, fill, radius=4, border="line")
            color = "paper" if holds else "ink" if number <= now else "soft"
            drawing.text(x + CELL / 2, y + CELL / 2 + 5, str(number + 1), color, anchor="middle", bold=number == now)
    for chunk in range(CHUNKS):
        x = left + 62 + chunk * (CELL + GAP) + CELL / 2
        drawing.text(x, top - 12, f"chunk {chunk + 1}", "soft", size=12, anchor="middle")
    y = top + LAYERS * (CELL + GAP) + 18
    for color, line in words:
        if color:
            drawing.rect(left, y - 11, 13, 13, color, radius=2)
        drawing.text(left + 20, y, line, size=13)
        y += 22
