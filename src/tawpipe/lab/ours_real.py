"""Rows of this project on the real workload: ``tawpipe.Pipeline`` as a user of the library runs it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from tawpipe.lab.contender import check_clipping
from tawpipe.lab.ours import settings_of
from tawpipe.lab.real_modules import ADAMW, WEIGHT_DECAY, make_model, random_tokens
from tawpipe.lab.workload import RealWorkload
from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.runtime.optimizer import adamw
from tawpipe.runtime.world import World
from tawpipe.schedule.step import Schedule
from tawpipe.topology import Topology


class PipelineContender:
    """A strategy as a user of the library runs it; see `tawpipe.lab.contender.Contender`."""

    origin = "ours"
    sleeper = None

    def __init__(self, name: str, workload: RealWorkload, topology: Topology, rank: int, **knobs: Any) -> None:
        check_clipping(name, workload, knobs)
        settings = replace(settings_of(name, knobs), clip_norm=workload.clip_norm)
        self.name, self.knobs = name, settings.spelled_out()
        self._workload = workload.split(settings.parts_per_layer)
        self.pipeline = Pipeline(
            make_model(workload),
            optimizer=adamw(workload.learning_rate, weight_decay=WEIGHT_DECAY, **ADAMW),
            schedule=settings.schedule,
            clip_norm=workload.clip_norm,
            world=World(topology, rank, torch.device("cpu"), dist.group.WORLD if topology.world_size > 1 else None),
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
