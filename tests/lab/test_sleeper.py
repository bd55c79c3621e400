"""Slow spells of nodes: what they do to computing, and what of it a comparison reports."""

from __future__ import annotations

import pytest

from tawpipe_lab import sleeper
from tawpipe_lab.compare import bounds_of, disturbance, link_of
from tawpipe_lab.sleeper import BusyTime, Pace, Sleeper, Slowdown
from tawpipe_lab.suite import load_suite, read_suite
from tawpipe_lab.workload import TimedWorkload

MANY = 400


def test_pace_without_a_slowdown_adds_no_time():
    assert Pace().seconds(0.25) == 0.25


def test_slowdown_lengthens_work_by_its_share_of_slow_time():
    """A tenth of the time at half the speed: 0.95 seconds of work per second."""
    pace = Pace(Slowdown(factor=2.0, share=0.1, spell_s=0.5))
    taken = []
    for step in range(MANY):
        pace.begin(step)
        taken.append(pace.seconds(20.0, since=0.0))
    assert sum(taken) / MANY == pytest.approx(20 / 0.95, rel=0.02)
    assert min(taken) >= 20.0


def test_slowdown_takes_equal_time_for_work_in_pieces_and_at_once():
    pace = Pace(Slowdown(share=0.5))
    pace.begin(7)
    whole, now = pace.seconds(10.0, since=0.0), 0.0
    for _ in range(100):
        now += pace.seconds(0.1, since=now)
    assert now == pytest.approx(whole)


def test_slowdown_repeats_for_a_step_and_differs_between_nodes():
    def one(node: int, step: int) -> float:
        pace = Pace(Slowdown(share=0.5), node)
        pace.begin(step)
        return pace.seconds(5.0, since=0.0)

    assert one(0, 3) == one(0, 3)
    assert len({one(node, step) for node in range(3) for step in range(3)}) == 9


def test_sleeper_reports_the_delay_of_slow_spells():
    sleeper = Sleeper(BusyTime())
    sleeper.pace = Pace(Slowdown(factor=3.0, share=0.999, spell_s=1000.0))
    sleeper.pace.begin(0)
    sleeper.compute(0.01)
    assert sleeper.asked_s == 0.01
    assert sleeper.delay_s == pytest.approx(0.02)


def test_slow_device_sleeps_longer_without_reporting_a_delay():
    sleeper = Sleeper(BusyTime())
    sleeper.pace = Pace(speed=0.5)
    sleeper.compute(0.01)
    assert sleeper.asked_s == 0.02 and sleeper.delay_s == 0
    assert sleeper.busy.take()["COMPUTE"] >= 0.02


def test_sleeper_subtracts_time_that_the_process_computes_itself(monkeypatch):
    now, slept = [100.0], list[float]()
    monkeypatch.setattr(sleeper.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(sleeper.time, "sleep", slept.append)
    device = Sleeper(BusyTime())
    with device.computing(0.05):
        now[0] += 0.04
    assert slept == [pytest.approx(0.01)]
    assert device.asked_s == 0.05 and device.first_s == 100


def test_cell_with_device_speeds_has_bounds_of_their_combined_speed():
    """Bounds are those of all devices together, whoever has how much to do; by dependencies those of the dealing."""
    suite = load_suite("unequal")
    cell = suite.cells[0]
    assert cell.device_speeds == (1.0, 1.0, 0.5, 0.5) and cell.spelled_out()["speeds"] == "2x1,2x0.5"
    calm = load_suite("jitter").cells[0]
    assert calm.device_speeds == () and "speeds" not in calm.spelled_out()
    assert isinstance(cell.workload, TimedWorkload)
    least = cell.workload.compute_s / 3
    bounds = {entry.label: bounds_of(cell, entry, link_of(cell)) for entry in suite.strategies}
    assert [bound.physical_s for bound in bounds.values()] == pytest.approx([least] * len(bounds))
    needed = {label: bound.dependency_s or 0.0 for label, bound in bounds.items()}
    by_speed, even = (
        needed[f"tawpipe-spread (micro_batches_per_visit {n})"] for n in ("4, device_speeds 2x1,2x0.5", 3)
    )
    assert by_speed < 1.1 * least < 1.3 * least < even
    assert needed["generated (device_speeds 2x1,2x0.5)"] < 1.3 * least


def test_rows_report_time_beyond_the_delays_of_the_nodes():
    calm, slow = load_suite("jitter").cells
    first = {
        "cell": calm.spelled_out(),
        "label": "x",
        "status": "ok",
        "seconds_per_step": {"median": 5.0, "samples": [5.0, 5.0]},
    }
    second = {
        "cell": slow.spelled_out(),
        "label": "x",
        "status": "ok",
        "seconds_per_step": {"samples": [5.25, 5.75]},
        "node_delay_s": [[0.25, 0.0, 0.25], [0.5, 0.25, 0.0]],
    }
    assert disturbance(first, []) == {}
    assert disturbance(second, []) == {}
    assert disturbance(second, [{**first, "label": "y"}]) == {}
    assert disturbance(second, [{**first, "status": "void"}]) == {}
    assert disturbance(second, [first])["disturbance"] == {
        "added_s": 0.5,
        "largest_node_delay_s": 0.375,
        "sum_of_node_delays_s": 0.625,
    }


def test_layer_is_split_into_equal_layers():
    work = TimedWorkload(4, 8000, 0.1, 0.2, 0.1, 8, 100)
    assert work.split(2) == TimedWorkload(8, 4000, 0.05, 0.1, 0.05, 8, 100)
    assert work.split(2).compute_s == pytest.approx(work.compute_s)
    with pytest.raises(Exception, match="parts_per_layer"):
        work.split(3)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"slow": {"factor": 0.5}}, "factor"),
        ({"slow": {"share": 1.5}}, "share"),
        ({"slow": {"spell": 1}}, "spell"),
        ({"speeds": "1,0.5"}, "device_speeds: got '1,0.5'; 1 speeds"),
        ({"speeds": "0"}, "device_speeds: got '0'"),
    ],
)
def test_mistakes_in_slowdown_settings_are_named(wrong, named):
    cell = {"name": "c", "nodes": 1, "local": 1, "rate": "none"} | wrong
    work = {"layers": 1, "layer_bytes": 8, "forward_s": 0, "backward_input_s": 0, "backward_weight_s": 0}
    cell["workload"] = work | {"micro_batches": 1, "activation_bytes": 4}
    with pytest.raises(Exception, match=named):
        read_suite({"name": "x", "cells": [cell], "strategies": [{"strategy": "flat"}]})


def test_lanes_share_the_host_link_in_each_direction_by_slices(monkeypatch):
    """On a clock that stands still: when a way is free again is what has been asked of it."""
    monkeypatch.setattr(sleeper.time, "perf_counter", lambda: 0.0)
    waits: list[float] = []
    monkeypatch.setattr(sleeper.time, "sleep", waits.append)
    link = sleeper.HostLink(1e6)
    link.carry(0.0, up=1e6, down=0.25e6)  # both ways together, at the pace of the fuller one
    assert waits[-1] == pytest.approx(1.0) and len(waits) == round(1 / sleeper.TURN_S)
    link.carry(0.0, up=0.5e6, down=0.0)
    assert waits[-1] == pytest.approx(1.5)  # behind what had the way before
    link.carry(0.0, up=0.0, down=0.1e6)
    assert waits[-1] < 1.2
    link.carry(5.0, up=0.0, down=0.1e6)
    assert waits[-1] == pytest.approx(5.1)  # a way that nobody uses is free at once


@pytest.mark.parametrize(("late", "ended"), [(0.0002, 0.0302), (0.004, 0.0410)])
def test_timer_lateness_is_subtracted_from_the_next_sleep_unless_too_long(monkeypatch, late, ended):
    class Clock:
        now = 0.0

        def perf_counter(self) -> float:
            return self.now

        def sleep(self, seconds: float) -> None:
            self.now += seconds + late

    clock = Clock()
    monkeypatch.setattr(sleeper, "time", clock)
    device = Sleeper(BusyTime())
    for _ in range(3):
        device.compute(0.01)
    assert clock.now == pytest.approx(ended)
    assert device.asked_s == pytest.approx(0.03)
