"""Pipelines for tests, with settings of the schedule given like any other argument."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import nn

from tawpipe import Pipeline, ScheduleSettings

SETTINGS = tuple(one.name for one in fields(ScheduleSettings))


def make_pipeline(model: nn.Module, **arguments: Any) -> Pipeline:
    """``Pipeline(model, schedule=...)``; a visit has one micro-batch unless ``arguments`` say otherwise."""
    chosen = {name: arguments.pop(name) for name in SETTINGS if name in arguments}
    return Pipeline(model, schedule=ScheduleSettings(**{"micro_batches_per_visit": 1, **chosen}), **arguments)
