"""A timeline as a picture for documents. matplotlib is loaded when one is drawn: not every installation has it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from tawpipe.errors import UserError
from tawpipe.report.bars import KINDS, Bar, first_of_nodes, kind_of, lanes_of

WAITING = "#e8e8e8"
SUFFIXES = (".svg", ".png", ".pdf")


def draw_timeline(
    timelines: Sequence[tuple[str, Sequence[Bar]]], path: Path, *, ranks: Sequence[int] | None = None, title: str = ""
) -> None:
    """Lanes over seconds, one row for every lane that a rank uses; several timelines one below the other.

    Args:
        timelines: each with its name, for example ``predicted`` and ``executed``; one may lack some of the ranks.
        path: ends with .svg, .png or .pdf.
        ranks: which are drawn; by default the first of every node.

    Raises:
        UserError: another suffix, or a rank that is not there.
    """
    if path.suffix not in SUFFIXES:
        raise UserError("picture", str(path), f"a name that ends with {', '.join(SUFFIXES)}")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    known = {bar.rank for _, bars in timelines for bar in bars}
    if missing := [rank for rank in ranks or () if rank not in known]:
        raise UserError("--ranks", missing[0], f"some of {', '.join(map(str, sorted(known)))}")
    rows = [
        (name, bars, rank, lane)
        for name, bars in timelines
        for rank, lane in lanes_of(bars, first_of_nodes(bars) if ranks is None else ranks)
    ]
    figure, axes = pyplot.subplots(figsize=(14, 1.4 + 0.26 * len(rows)))
    for number, (_, bars, rank, lane) in enumerate(rows):
        mine = [bar for bar in bars if bar.rank == rank and bar.action.lane is lane]
        waits = [(bar.start, bar.begin - bar.start) for bar in mine if bar.begin > bar.start]
        axes.broken_barh(waits, (number - 0.3, 0.6), color=WAITING, linewidth=0)
        for kind, color in KINDS.items():
            spans = [(bar.begin, bar.end - bar.begin) for bar in mine if kind_of(bar) == kind]
            if spans:
                axes.broken_barh(spans, (number - 0.38, 0.76), facecolor=color, edgecolor="white", linewidth=0.3)
    several = len(timelines) > 1
    axes.set_yticks(
        range(len(rows)), [f"{name + ', ' if several else ''}rank {rank} {lane}" for name, _, rank, lane in rows]
    )
    for number, (above, below) in enumerate(pairwise(rows)):
        if above[0] != below[0] or above[2] != below[2]:
            axes.axhline(number + 0.5, color="#444", linewidth=0.6 if above[0] == below[0] else 1.6)
    axes.invert_yaxis()
    axes.set_xlim(min((bar.begin for _, bars in timelines for bar in bars), default=0), None)
    axes.set_xlabel("seconds")
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    if title:
        axes.set_title(title, loc="left", fontsize=10)
    drawn = {kind_of(bar) for _, bars in timelines for bar in bars}
    handles = [Patch(color=color, label=kind) for kind, color in KINDS.items() if kind in drawn]
    axes.legend(
        handles=[*handles, Patch(color=WAITING, label="waiting")],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.55 / (1.4 + 0.26 * len(rows)) - 0.02),
        ncols=5,
        fontsize=8,
        frameon=False,
    )
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)
