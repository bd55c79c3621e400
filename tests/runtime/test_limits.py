"""Time limits of steps: they follow from what steps take, and no healthy step is ended."""

from __future__ import annotations

import io
import threading
from datetime import timedelta

import pytest

from given_time import given_time
from states import BATCHES, make, stepped
from tawpipe.runtime.watch.limits import FACTOR, SOON_S, StepLimit, estimate_s
from tawpipe.runtime.watch.watchdog import Watchdog
from tawpipe.train.step_limit import FollowedLimit

DEVICE = {"device_name": "NVIDIA H100 80GB HBM3", "dtype": "bfloat16"}
ROW_FLOPS = 2.9e16
"""Of a row of 128 K tokens through a model of 8 B parameters."""


def test_step_limit_is_a_multiple_of_known_times_and_at_least_the_setting():
    limit = StepLimit(300)
    assert limit.seconds == 300
    limit.estimated_s = 50
    assert limit.seconds == FACTOR * 50
    limit.took(80)  # with compilation and set-up
    assert limit.seconds == FACTOR * 80
    limit.took(40)
    assert limit.seconds == FACTOR * 40 and limit.lasting_s == 40
    limit.took(60)
    limit.took(10)
    assert limit.seconds == FACTOR * 60
    limit.predicted_s = 70
    assert limit.seconds == FACTOR * 70
    limit.least_s = 900
    assert limit.seconds == 900


def test_step_is_reported_early_once_step_times_are_known():
    limit = StepLimit(600)
    limit.took(80)
    assert limit.report_s == limit.seconds == FACTOR * 80
    limit.took(0.5)
    assert limit.report_s == SOON_S and limit.seconds == 600
    limit.took(20)
    assert limit.report_s == FACTOR * 20
    limit.least_s = 5  # a user who wants to know sooner
    assert StepLimit(5).report_s == 5


@pytest.mark.parametrize("utilisation", [0.6, 0.3, 0.1])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_unpredicted_long_first_step_stays_within_the_limit(rows, utilisation):
    limit = StepLimit(300)
    limit.estimated_s = estimate_s(rows * ROW_FLOPS, 0, **DEVICE)
    assert limit.seconds > rows * ROW_FLOPS * 4 / 3 / (989e12 * utilisation)


def test_step_estimate_has_defaults_for_unknown_dtypes_and_devices():
    assert estimate_s(1e15, 0, device_name="NVIDIA A100", dtype="float32") > 1e15 / 19.5e12
    assert estimate_s(1e15, 2.5e9, device_name="an accelerator", dtype="float32") == 2.0


def test_step_limit_allows_a_long_row_on_a_cpu():
    """65,536 tokens of a model of 8 M parameters: minutes for two cores, and more beside other work."""
    assert FACTOR * estimate_s(8e13, 0, device_name="cpu", dtype="float32") > 3600


class Step:
    def __init__(self) -> None:
        self.done = False


@pytest.mark.parametrize("known_s", [0.0, 400.0])
def test_watchdog_allows_a_predicted_long_step_and_ends_a_hanging_one(monkeypatch, known_s):
    """Five rows of 128 K tokens: 350 s and more, beyond the usual limit of 300 s."""
    clock = given_time(monkeypatch)
    said, ended = io.StringIO(), threading.Event()
    limit = StepLimit(300)
    limit.predicted_s = known_s
    dog = Watchdog(dict, "rank 0", limit_s=limit.seconds, stream=said, end=ended.set)
    step = Step()
    dog.watch("step 2", step)
    clock.now = 450.0
    if known_s:
        clock.looked()
        assert not ended.is_set() and not said.getvalue()
        clock.now = FACTOR * 400 + 1
    assert ended.wait(60)
    assert "step 2, " in said.getvalue() and f"the limit is {limit.seconds:.0f} s" in said.getvalue()


def test_step_limits_of_a_pipeline_follow_its_measured_steps(monkeypatch):
    """The watchdog and the transport, whose limit leaves room for two steps that were issued."""
    pipeline = stepped()
    told: list[timedelta] = []
    monkeypatch.setattr(pipeline.transport, "set_timeout", told.append)
    pipeline.limit.took(1e-3)
    pipeline.set_timeout(timedelta(seconds=5))
    assert pipeline.executor.watchdog.limit_s == 5 and told[-1].total_seconds() == 2 * 5 + 30
    pipeline.limit.took(7)
    pipeline.set_timeout(timedelta(seconds=5))
    assert pipeline.executor.watchdog.limit_s == 70 and told[-1].total_seconds() == 2 * 70 + 30
    pipeline.close()


def test_first_step_limit_of_a_pipeline_is_estimated(monkeypatch):
    asked: list[tuple[float, float]] = []
    estimate = lambda flops, link_bytes, **_: asked.append((flops, link_bytes)) or 1000.0  # noqa: E731
    monkeypatch.setattr("tawpipe.pipeline.steps.estimate_s", estimate)
    pipeline = make(delay=lambda lane: lambda: 0.02 if lane == "COMPUTE" else 0.0)
    told: list[timedelta] = []
    monkeypatch.setattr(pipeline.transport, "set_timeout", told.append)
    pipeline.step(BATCHES[0])
    assert asked[0][0] > 0 and asked[0][1] == 0  # one process
    assert told[-1].total_seconds() == 2 * FACTOR * 1000 + 30
    assert pipeline.executor.watchdog.limit_s == FACTOR * 1000 and not pipeline.executor.watchdog.ends
    pipeline.drain()
    assert 0.02 < pipeline.limit.known_s < 1000
    pipeline.step(BATCHES[1])
    pipeline.drain()
    assert pipeline.limit.lasting_s > 0.02 and len(asked) == 1
    pipeline.close()


def test_raised_step_limit_is_reported_once():
    said: list[str] = []
    told: list[timedelta] = []
    limit = StepLimit(600)
    followed = FollowedLimit(limit, 300, set_timeout=told.append)
    limit.took(100)  # what the first step takes is no measure
    said += filter(None, [followed.follow()])
    assert not said and told[-1].total_seconds() == 1000 + 30
    limit.predicted_s = 90
    said += filter(None, [followed.follow()])
    limit.took(120)
    said += filter(None, [followed.follow()])
    assert len(said) == 1 and "step time limit: 15 min 00 s" in said[0] and "300 s" in said[0]
    assert told[-1].total_seconds() == 1200 + 30
