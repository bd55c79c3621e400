"""Rivals that pass activations, as torch ships them: ``torch.distributed.pipelining``.

All ranks form one pipeline in rank order. So the ranks of a node are neighbours, and a node has one boundary to each
neighbouring node. Weights, gradients and optimizer state stay where they are. The shapes that travel are inferred in
the first step, which therefore runs one more micro-batch. torch also takes shapes as arguments, but then refuses middle
stages whose example needs no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

from tawpipe.errors import UserError
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.topology import Topology
from tawpipe_lab.contender import Contender, read_settings
from tawpipe_lab.rivals.stages import stages_of
from tawpipe_lab.rivals.task import task_of
from tawpipe_lab.rivals.traffic import stages_per_rank
from tawpipe_lab.workload import Known, LengthsWorkload, ServingWorkload, Workload, check_whole

NAMES = ("1f1b", "interleaved-1f1b", "zbv")
ZBV_NEEDS = "2.13"
"""First torch version whose zbv runs with gloo. In 2.11, zbv begins with a message from a rank to itself, which gloo
refuses."""


@dataclass(frozen=True)
class PipelineSettings:
    """Knobs of the pipelines.

    Args:
        parts_per_layer: number of equal parts into which each layer of the workload is cut, for workloads in which one
            layer stands for several.
        balance: what stages are equal in, as far as whole layers allow: ``layers`` for their number, ``cost`` for their
            time.
    """

    parts_per_layer: int = 1
    balance: str = "layers"


def make(name: str, workload: Workload, topology: Topology, rank: int, **knobs: Any) -> Contender:
    """Build a contender that runs one of torch's pipeline schedules; see `tawpipe_lab.contender.Maker`.

    Raises:
        UserError: torch's schedule cannot run this workload on this topology with these knobs.
    """
    if isinstance(workload, LengthsWorkload):
        raise UserError("workload", workload.kind, f"timed or real: {name} has micro-batches of one length")
    assert not isinstance(workload, ServingWorkload)
    settings = read_settings(PipelineSettings, name, knobs)
    _check(name, settings, workload, topology.world_size)
    return _Pipeline(name, workload, topology, rank, settings)


def _check(name: str, settings: PipelineSettings, workload: Known, ranks: int) -> None:
    """Raise UserError if torch, micro-batches or layers do not fit the pipeline ``name``."""
    if name == "zbv" and torch.__version__ < ZBV_NEEDS:
        raise UserError("torch", torch.__version__, f"zbv on gloo needs {ZBV_NEEDS} or newer")
    parts = settings.parts_per_layer
    check_whole(settings, parts_per_layer=1)
    stages_of(name, workload.split(parts), ranks, stages_per_rank(name), settings.balance)
    micro_batches = workload.micro_batches
    if name == "1f1b" and micro_batches < ranks:
        raise UserError("micro_batches", micro_batches, f"{name} needs at least as many as its {ranks} stages")
    rounds = max(1, micro_batches // ranks)
    if name == "interleaved-1f1b" and micro_batches % rounds:
        raise UserError("micro_batches", micro_batches, f"{name} needs a multiple of {rounds} here")


class _Pipeline(Contender):
    """Contender that trains a timed or real workload with one of torch's pipeline schedules."""

    def __init__(self, name: str, workload: Known, topology: Topology, rank: int, settings: PipelineSettings) -> None:
        super().__init__(name, asdict(settings))
        self.gradient_norm: Tensor | None = None
        self._task = task_of(workload, self._busy)
        self.sleeper = self._task.sleeper
        parts, each = settings.parts_per_layer, stages_per_rank(name)
        layout = stages_of(name, workload.split(parts), topology.world_size, each, settings.balance)
        stages = self._stages(layout, layout.stages_of(rank), parts)
        self._feeds, self._ends = stages[0].is_first, stages[-1].is_last
        self.model = nn.ModuleList(stage.submod for stage in stages)
        self._micro_batches = range(workload.micro_batches)
        self._schedule = self._make_schedule(stages)
        self._optimizer = self._task.optimizer(self.model.parameters())
        self._steps = 0

    def _stages(self, layout: Layout, stages: Sequence[int], parts: int) -> list[PipelineStage]:
        """Build torch's stages of this rank.

        Args:
            layout: blocks of all stages.
            stages: numbers of the stages of this rank.
            parts: number of parts into which each layer is cut.
        """
        modules = [self._task.stage(layout.blocks_of(stage), parts_per_layer=parts) for stage in stages]
        device = torch.device("cpu")
        return [PipelineStage(m, stage, layout.stages, device) for m, stage in zip(modules, stages, strict=True)]

    def _make_schedule(
        self, stages: list[PipelineStage]
    ) -> Schedule1F1B | ScheduleInterleaved1F1B | ScheduleZBVZeroBubble:
        """Build torch's schedule for the pipeline's name and its stages on this rank."""
        count, loss = len(self._micro_batches), self._task.loss
        # The loss is a sum over micro-batches, so gradients need no scaling.
        if self.name == "1f1b":
            return Schedule1F1B(stages[0], count, loss_fn=loss, scale_grads=False)
        kind = ScheduleInterleaved1F1B if self.name == "interleaved-1f1b" else ScheduleZBVZeroBubble
        return kind(list(stages), count, loss_fn=loss, scale_grads=False)

    def step(self) -> None:
        inputs, targets = self._task.batch(self._steps, self._micro_batches)
        losses: list[Tensor] = []  # filled on the rank of the last stage
        self._schedule.step(
            *((inputs,) if self._feeds else ()),
            target=targets if self._ends else None,
            losses=losses,
            return_outputs=False,
        )
        self._clip_gradients()
        if self._optimizer is not None:
            self._optimizer.step()
        self.model.zero_grad(set_to_none=True)
        self.loss_share = sum(float(loss.detach()) for loss in losses) if self._task.has_loss else None
        self._steps += 1

    def _clip_gradients(self) -> None:
        """Clip the gradients of all stages to the workload's largest global norm. Call on all ranks.

        The squared norms of all ranks are summed by one all-reduce. ``gradient_norm`` becomes the global norm."""
        parameters = list(self.model.parameters())
        gradients: list[Tensor] = [p.grad for p in parameters if p.grad is not None]
        square = nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(square)
        self.gradient_norm = square.sqrt()
        nn.utils.clip_grads_with_norm_(parameters, self._task.largest_norm, self.gradient_norm)

    def close(self) -> None:
        del self._schedule, self._optimizer, self.model
