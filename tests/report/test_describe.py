"""What a figure shows, in words: all values are there, and a long list is cut and says by how much."""

from __future__ import annotations

import pytest

from tawpipe.report.bars import Bar
from tawpipe.report.figures import MOST_NAMES, describe, heat_map, lines, stacked_bars, timeline_figure
from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.buffers import home_weight, pooled

pytest.importorskip("plotly")


def test_description_names_every_part_of_every_bar() -> None:
    words = describe(stacked_bars(["a", "b"], {"compute": [1.5, 2.0], "wait": [0.25, 0.0]}, unit="seconds"))
    assert words.startswith("Bars, in seconds: ")
    for bar in ("a: compute 1.5, wait 0.25", "b: compute 2, wait 0"):
        assert bar in words


def test_description_cuts_many_bars_and_counts_the_rest() -> None:
    names = [f"bar{number}" for number in range(MOST_NAMES + 3)]
    words = describe(stacked_bars(names, {"x": [1.0] * len(names)}, unit="GiB"))
    assert words.endswith("and 3 more") and words.count("x 1") == MOST_NAMES


def test_description_gives_the_first_and_last_point_of_curves() -> None:
    series = {"first": [None, 2.0, 3.25, None], "second": [4.0, None, None, 1.0], "none": [None] * 4}
    words = describe(lines([1, 2, 4, 8], series, x_title="nodes", y_title="seconds"))
    assert words.startswith("Curves of seconds over nodes: ")
    assert "first from 2 at 2 to 3.25 at 4" in words and "second from 4 at 1 to 1 at 8" in words and "none" not in words


def test_description_names_cells_with_row_and_column_without_markup() -> None:
    shares, cells = [[0.1, 0.2], [0.3, 0.4]], [["A<br>a", "B"], ["C", "D"]]
    words = describe(heat_map(["x1", "x2"], ["y1", "y2"], shares, cells, x_title="", y_title=""))
    assert words == "Cells: x1, y1: A a; x2, y1: B; x1, y2: C; x2, y2: D"


def test_description_of_a_timeline_gives_lanes_and_length() -> None:
    forward = Action(Op.FORWARD, Lane.COMPUTE, block=1, micro_batch=0)
    read, write = (home_weight(0),), (pooled("W0", 0),)
    gather = Action(Op.COLLECTIVE, Lane.GATHER, read, write, unit=0, collective="all_gather", group="node")
    bars = [Bar(0, 0, forward, 0.0, 0.0, 1.5), Bar(0, 0, gather, 1.0, 1.0, 2.25)]
    words = describe(timeline_figure(bars, [0]))
    assert words.startswith("Timeline of 2.25 seconds") and "COMPUTE" in words and "GATHER" in words
