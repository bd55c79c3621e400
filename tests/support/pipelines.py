"""Pipelines for tests, with all settings given like any other argument."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import nn

from tawpipe import CheckSettings, Pipeline, ScheduleSettings, TrainingSettings

SETTINGS = tuple(one.name for one in fields(ScheduleSettings))


def grouped(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``Pipeline``, for those of its settings for training and checks given like any other argument."""
    arguments = dict(arguments)
    for argument, group in (("training", TrainingSettings), ("checks", CheckSettings)):
        chosen = {one.name: arguments.pop(one.name) for one in fields(group) if one.name in arguments}
        if chosen:
            arguments[argument] = group(**chosen)
    return arguments


def make_pipeline(model: nn.Module, **arguments: Any) -> Pipeline:
    """``Pipeline(model, schedule=...)``; a visit has one micro-batch unless ``arguments`` say otherwise."""
    chosen = {name: arguments.pop(name) for name in SETTINGS if name in arguments}
    settings = ScheduleSettings(**{"micro_batches_per_visit": 1, **chosen})
    return Pipeline(model, schedule=settings, **grouped(arguments))
