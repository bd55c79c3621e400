"""A pipeline that is given a schedule, or a strategy, instead of settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cases import batches, llama
from tawpipe import Pipeline, ScheduleSettings, UserError, World
from tawpipe.schedule.strategies.build import build
from tawpipe.schedule.strategies.weights import Spread
from tawpipe.topology import Topology

ALONE = World(Topology.grid(1, 1), 0, torch.device("cpu"), None)


def losses(schedule: Any, rows: int = 4) -> list[float]:
    torch.manual_seed(0)
    pipeline = Pipeline(llama(torch.float64), dtype=torch.float64, schedule=schedule, world=ALONE)
    values = [pipeline.step(batch).loss for batch in batches(rows)]
    pipeline.close()
    return values


def made(**settings: Any) -> Pipeline:
    schedule = ScheduleSettings(**settings)
    return Pipeline(llama(torch.float64), dtype=torch.float64, schedule=schedule, world=ALONE)


def test_a_schedule_a_strategy_a_name_and_settings_train_alike():
    pipeline = made()
    ready = pipeline.schedule(4)
    pipeline.close()
    expected = losses(ScheduleSettings())
    assert expected[0] != expected[-1]
    for schedule in (ready, Spread(), "tawpipe-spread"):
        assert losses(schedule) == expected


def test_ready_schedule_refuses_other_batches_and_forward_only():
    pipeline = made()
    ready = pipeline.schedule(4)
    pipeline.close()
    with pytest.raises(UserError, match="4 micro-batches, as the schedule that was given has"):
        losses(ready, rows=3)
    with pytest.raises(UserError, match="only goes forward"):
        losses(build(ready.step, training=False))
