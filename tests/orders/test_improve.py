"""Better orders while training goes on: by measured times, from a process of its own, as text that is exact."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tawpipe.orders.fitting import heuristics
from tawpipe.orders.improve import Improvement, measured
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.memory import fits, peak
from tawpipe.schedule.pipelines.work import BlockTimes, Order, PipelineCosts, Work, makespan, play

LAYOUT = Layout.even(5, 3)
LAYER = BlockTimes(1.0, 2.0, 1.0, 1.0, 0.5)
COSTS = PipelineCosts((BlockTimes(0, 0, 0, 0), *[LAYER] * 3, BlockTimes(0.25, 0.25, 0.5, 0)), 0.0, memory=2.0, host=1.0)

works = st.builds(Work, st.sampled_from("FBIWOR"), st.integers(0, 12), st.integers(0, 120))
lanes = st.lists(st.lists(works, max_size=4).map(tuple), min_size=2, max_size=3).map(tuple)


@given(st.builds(Order, lanes, st.one_of(st.just(()), lanes), st.dictionaries(works, works, max_size=4)))
@settings(max_examples=50, deadline=None)
def test_order_reads_back_from_its_text(order):
    assert Order.parse(str(order)) == order


@pytest.mark.parametrize("text", ["", "F0.0", "F0.0;;;", "X0.0;;", "F0;;", "F0.0;;F0.0", "F0.0;;F0.0>B0.0>B0.0"])
def test_invalid_order_text_is_refused(text):
    with pytest.raises(ValueError):
        Order.parse(text)


def test_costs_are_updated_with_measured_times():
    seconds = {
        (0, "F", 0): 2.0,
        (1, "I", 1): 5.0,
        (1, "W", 1): 1.0,
        (2, "B", 2): 7.5,
        (0, "O", 0): 3.0,
        (1, "R", 1): 4.0,
    }
    found = measured(LAYOUT, replace(COSTS, pace=(1.0, 2.0, 1.0)), seconds, hop=0.125)
    stages = found.stages(LAYOUT)
    for (_, kind, stage), value in seconds.items():
        if kind in "FBIW":
            assert stages.seconds[kind, stage] == pytest.approx(value)
    assert stages.seconds["I", 2] == pytest.approx(7.5 * 2.25 / 3.75), "shared as before"
    assert (found.host, found.hop, found.pace, found.memory) == (3.5, 0.125, (), 2.0)
    scale = 2.0  # the median of 2, 5/4, 1/2, 2
    scaled = measured(LAYOUT, COSTS, {(0, "F", 0): 2.0})
    assert scaled.stages(LAYOUT).seconds["F", 2] == pytest.approx(1.25 * scale)
    assert [one.kept for one in found.blocks] == [one.kept for one in COSTS.blocks]


@pytest.mark.parametrize("kinds", ["F", "FB", "FIW", "FBO"])
def test_embedding_block_keeps_zero_time_whatever_is_measured(kinds: str):
    layout = Layout(5, (0, 1, 3), (0, 1, 2))
    seconds = {(place, kind, place): 1.5 for place in range(3) for kind in kinds}
    found = measured(layout, replace(COSTS, blocks=(BlockTimes(0, 0, 0, 0), *COSTS.blocks[1:])), seconds)
    stages = found.stages(layout)
    assert stages.seconds["F", 0] == stages.seconds["B", 0] == 0 and stages.seconds["F", 1] == 1.5


@pytest.mark.slow
def test_improvement_process_finds_a_shorter_order():
    fixed = heuristics(LAYOUT, COSTS, 3)
    start = max(fixed.values(), key=lambda one: makespan(play(LAYOUT, one, COSTS)))
    with Improvement(LAYOUT, COSTS, 3, start, seconds=1.5) as search:
        assert search.poll() is None and search.running
        end = time.monotonic() + 200
        while search.running and time.monotonic() < end:
            time.sleep(0.05)
            found = search.poll()
    assert found is not None and found == search.poll() and not search.running
    order = Order.parse(found.order)
    assert found.after == makespan(play(LAYOUT, order, COSTS)) < found.before
    assert found.bound <= found.after and found.gain > 0
    assert all(fits(COSTS, most) for most in peak(LAYOUT, order, COSTS))


def test_closed_improvement_search_ends_at_once(caplog):
    start = next(iter(heuristics(LAYOUT, COSTS, 4).values()))
    search = Improvement(LAYOUT, COSTS, 4, start, seconds=1000.0)
    worker = search._worker
    search.close()
    search.close()
    assert worker is not None and worker.process.returncode is not None
    assert not search.running and search.poll() is None and not caplog.records


def test_failed_improvement_search_keeps_the_order(caplog):
    start = next(iter(heuristics(LAYOUT, COSTS, 4).values()))
    with Improvement(LAYOUT, replace(COSTS, memory=0.5), 4, start, seconds=1.0) as search:  # which nothing meets
        end = time.monotonic() + 200
        while search.running and time.monotonic() < end:
            time.sleep(0.05)
            assert search.poll() is None
    assert "keeps its order: the solver failed with exit code 1" in caplog.text
