"""Contenders in this project's runtime on the real workload: ``tawpipe.Pipeline`` with a strategy's knobs.

Imports pipeline, runtime, schedule, topology, torch and lab.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tawpipe.lab.ours import logical_topology, schedule_of, settings_of
from tawpipe.lab.real_modules import ADAMW, WEIGHT_DECAY, make_model, random_tokens
from tawpipe.lab.workload import RealWorkload
from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.runtime.optimizer import adamw
from tawpipe.runtime.world import World
from tawpipe.schedule.spec import Schedule
from tawpipe.topology import Topology


class PipelineContender:
    """A strategy as a user of the library runs it; see `tawpipe.lab.contender.Contender`."""

    origin = "ours"
    sleeper = None

    def __init__(
        self, name: str, workload: RealWorkload, topology: Topology, rank: int, knobs: Mapping[str, Any]
    ) -> None:
        settings = settings_of(name, knobs)
        self.name = name
        self.knobs: dict[str, object] = {**asdict(settings), "clip_norm": workload.clip_norm}
        self._workload = workload.split(settings.parts_per_layer)
        group = dist.group.WORLD if topology.world_size > 1 else None
        make: Callable[..., Pipeline] = Pipeline
        if name == "no-overlap" or not settings.reuse:
            make = partial(_ScheduledPipeline, schedule=schedule_of(name, workload, topology, knobs))
        self.pipeline = make(
            make_model(workload),
            optimizer=adamw(workload.learning_rate, weight_decay=WEIGHT_DECAY, **ADAMW),
            micro_batches_per_visit=settings.micro_batches_per_visit,
            placement=settings.placement,
            look_ahead=settings.look_ahead,
            gradient_buffers=settings.gradient_buffers,
            weights_scope=settings.weights_scope,
            kept_units=settings.kept_units,
            gradients_scope=settings.gradients_scope,
            recompute=settings.recompute,
            weights_wire=settings.weights_wire,
            gradients_wire=settings.gradients_wire,
            clip_norm=workload.clip_norm,
            world=World(logical_topology(name, topology), rank, torch.device("cpu"), group),
            strict=settings.strict,
        )
        self.schedule: Schedule = self.pipeline.schedule(workload.micro_batches)
        self.gradient_norm: float | None = None
        self.loss_share: float | None = None

    def step(self) -> None:
        every = range(self._workload.micro_batches)
        tokens = random_tokens(self._workload, self.pipeline.step_number, every)
        result = self.pipeline.step({"input_ids": tokens, "labels": tokens})
        self.pipeline.drain()
        self.gradient_norm = result.grad_norm
        self.loss_share = result.loss / self.pipeline.world.size  # every rank knows all of it

    def busy(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self.pipeline.close()


class _ScheduledPipeline(Pipeline):
    """Trains by a schedule that is given, because no setting of the library makes it."""

    def __init__(self, model: nn.Module, schedule: Schedule, **settings: Any) -> None:
        self._given = schedule
        super().__init__(model, **settings)

    def _build(self, count: int, *, training: bool) -> Schedule:
        return self._given if training else super()._build(count, training=training)
