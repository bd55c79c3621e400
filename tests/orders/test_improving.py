"""Times of a pipeline's works from what actions of a rank took."""

from __future__ import annotations

import pytest

from tawpipe.orders.improving import seconds_of
from tawpipe.schedule.pipelines.layout import Layout


def spans(*actions: tuple[str, float]) -> list[tuple[str, float, float]]:
    return [(f"COMPUTE {text} | ->", 10.0, 10.0 + seconds) for text, seconds in actions]


def test_work_seconds_sum_the_times_of_their_blocks():
    layout = Layout.even(5, 2)
    first = spans(("FORWARD b1 m0", 1.0), ("FORWARD b1 m1", 3.0), ("BACKWARD b1 m0", 4.0), ("BACKWARD b0 m0", 1.0))
    second = spans(("FORWARD b1 m0", 2.0), ("FORWARD b0 m0", 0.5))
    found = seconds_of([first, second], layout)
    assert found == pytest.approx({("F", 0): 0.5 + 2.0, ("B", 0): 5.0}) or layout.blocks_of(0) != range(2)


def test_head_backward_counts_as_part_of_the_input_backward():
    layout = Layout.even(4, 2)
    last = spans(("BACKWARD b3 m0", 2.0), ("BACKWARD_INPUT b2 m0", 3.0), ("BACKWARD_WEIGHT b2 m0", 1.0))
    assert seconds_of([last], layout) == pytest.approx({("I", 1): 5.0, ("W", 1): 1.0})
