"""Contenders in this project's runtime: the real schedule, storage, transport and optimizer, computation as sleeps.

Imports topology, model.units, schedule, runtime and lab. A strategy here is a placement and knobs, nothing else:

* ``tawpipe-whole``: as its paper has it, units on one device, staggered, every visit's weights pulled anew;
* ``tawpipe-striped``: units over the devices of one node;
* ``tawpipe-spread``: every unit over all devices, which is hierarchical flat sharding under another name;
* ``tawpipe-step``: ``spread`` with weights kept in the node for the step and gradients sent home once;
* ``flat``: ring collectives over the whole cluster, fully overlapped;
* ``hsdp-ours``: one copy of everything per node;
* ``weipipe``: weights and gradients round a ring of all devices;
* ``no-grouping``: ``tawpipe-spread`` as if every device were a node; ``no-overlap``: everything in one lane. Both to be
  read against ``tawpipe-spread`` with ``reuse: false``, or what buffers hold would count as grouping or overlap.

This is for the timed workload; `tawpipe.lab.ours_real` runs the same strategies on a real one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from tawpipe.errors import UserError
from tawpipe.lab.bounds import workload_model
from tawpipe.lab.busy import BusyTime
from tawpipe.lab.contender import Contender, check_clipping, read_settings
from tawpipe.lab.sleeper import Sleeper
from tawpipe.lab.workload import RealWorkload, TimedWorkload, Workload
from tawpipe.model.batch import MicroBatch
from tawpipe.model.units import ParameterSlot, Unit
from tawpipe.runtime.compute import StepInput
from tawpipe.runtime.executor import Executor, UpdateRule
from tawpipe.runtime.optimizer import UnitOptimizers, adamw
from tawpipe.runtime.recording import Recording
from tawpipe.runtime.storage import Storage
from tawpipe.runtime.transport import Transport
from tawpipe.schedule.actions import Action, Lane
from tawpipe.schedule.blocks import recompute_of_blocks
from tawpipe.schedule.build import build_training
from tawpipe.schedule.proof.verify import verify
from tawpipe.schedule.spec import Knobs, ModelSpec, Schedule, share_micro_batches
from tawpipe.schedule.transform import without_overlap
from tawpipe.topology import Topology

STRATEGIES: dict[str, dict[str, Any]] = {
    "tawpipe-whole": {"placement": "whole", "reuse": False},
    "tawpipe-striped": {"placement": "striped"},
    "tawpipe-spread": {"placement": "spread"},
    "tawpipe-step": {"placement": "spread", "weights_scope": "step", "gradients_scope": "step"},
    "flat": {"placement": "flat"},
    "hsdp-ours": {"placement": "hybrid", "gradients_scope": "step"},
    "weipipe": {"placement": "ring"},
    "no-grouping": {"placement": "spread", "reuse": False},
    "no-overlap": {"placement": "spread", "look_ahead": 0, "reuse": False},
}
NAMES = tuple(STRATEGIES)


@dataclass(frozen=True)
class OurSettings:
    """Knobs of a contender in our runtime; see ``schedule.spec.Knobs``.

    Args:
        parts_per_layer: every layer of the workload is cut into so many; a ring needs a layer per device.
        clip_norm: largest global gradient norm; None for no clipping, and updates as soon as gradients are complete.
        strict: check sequence number and action of every message.
    """

    placement: str = "spread"
    micro_batches_per_visit: int = 1
    look_ahead: int = 3
    gradient_buffers: int = 3
    weights_scope: str = "visit"
    gradients_scope: str = "visit"
    reuse: bool = True
    kept_units: int = 0
    recompute: str = "full"
    weights_wire: str = "dtype"
    gradients_wire: str = "dtype"
    parts_per_layer: int = 1
    clip_norm: float | None = 1.0
    strict: bool = True


def settings_of(name: str, knobs: Mapping[str, Any]) -> OurSettings:
    """The settings of a strategy; ``knobs`` beat what its name stands for.

    Raises:
        UserError: no such strategy or knob.
    """
    if name not in STRATEGIES:
        raise UserError("strategy", name, f"one of {', '.join(STRATEGIES)}")
    return read_settings(OurSettings, name, {**STRATEGIES[name], **knobs})


def schedule_of(name: str, workload: Workload, topology: Topology, knobs: Mapping[str, Any]) -> Schedule:
    """The schedule that a strategy runs.

    Raises:
        UserError: the strategy cannot run this workload on this topology.
    """
    settings = settings_of(name, knobs)
    model = _model_of(workload.split(settings.parts_per_layer))
    recompute = recompute_of_blocks(settings.recompute, model)
    if "selective" in recompute and isinstance(workload, TimedWorkload):
        raise UserError("recompute", settings.recompute, "full or none: a timed layer has no attention of its own")
    schedule = build_training(
        model,
        logical_topology(name, topology),
        Knobs(
            placement=settings.placement,
            micro_batches=share_micro_batches(workload.micro_batches, topology.world_size),
            micro_batches_per_visit=settings.micro_batches_per_visit,
            look_ahead=settings.look_ahead,
            gradient_buffers=settings.gradient_buffers,
            weights_scope=settings.weights_scope,
            gradients_scope=settings.gradients_scope,
            reuse=settings.reuse,
            kept_units=settings.kept_units,
            recompute=recompute,
            early_updates=settings.clip_norm is None,
            weights_wire=settings.weights_wire,
            gradients_wire=settings.gradients_wire,
        ),
    )
    return without_overlap(schedule) if name == "no-overlap" else schedule


def logical_topology(name: str, topology: Topology) -> Topology:
    """What a strategy takes for nodes."""
    return Topology.grid(topology.world_size, 1) if name == "no-grouping" else topology


def _model_of(workload: Workload) -> ModelSpec:
    if isinstance(workload, RealWorkload):
        from tawpipe.lab.real_modules import real_model_spec

        return real_model_spec(workload)
    return workload_model(workload)


def make(name: str, workload: Workload, topology: Topology, rank: int, **knobs: Any) -> Contender:
    """The contender on this rank; see ``contender.Maker``."""
    check_clipping(name, workload, knobs)
    if isinstance(workload, RealWorkload):
        from tawpipe.lab.ours_real import PipelineContender

        return PipelineContender(name, workload, topology, rank, knobs)
    return OurContender(name, workload, topology, rank, settings_of(name, knobs), knobs)


class OurContender:
    """A schedule of a timed workload, run step by step."""

    origin = "ours"
    loss_share: float | None = None

    def __init__(
        self,
        name: str,
        workload: TimedWorkload,
        topology: Topology,
        rank: int,
        settings: OurSettings,
        knobs: Mapping[str, Any],
    ) -> None:
        self.name, self.knobs = name, asdict(settings)
        self._rule = UpdateRule(clip_norm=settings.clip_norm)
        self.schedule = schedule_of(name, workload, topology, knobs)
        verify(self.schedule)
        self._busy = BusyTime()
        self.sleeper = Sleeper(self._busy)
        units = []
        for i, spec in enumerate(self.schedule.model.units):
            slot = ParameterSlot(f"layer.{i}", (spec.numel,), 0, spec.numel)
            units.append(Unit(i, slot.name, True, (slot,), spec.blocks, spec.numel))
        device = torch.device("cpu")
        storage = Storage(
            units, self.schedule.homes, rank, device=device, compute_dtype=torch.float32, master_dtype=torch.float32
        )
        transport = _MeasuredTransport(
            self.schedule.topology, rank, [self.schedule], device=device, strict=settings.strict
        )
        transport.busy = self._busy
        self._executor = Executor(
            rank,
            compute=_SleepingCompute(workload.split(settings.parts_per_layer), self.schedule, self.sleeper),
            storage=storage,
            transport=transport,
            optimizers=UnitOptimizers(storage, adamw()) if workload.optimizer else _NoOptimizer(),
            reduce_dtype=torch.float32,
        )
        self._executor.adopt(self.schedule)
        token = torch.zeros(1, 1, dtype=torch.long)
        mine = self.schedule.knobs.micro_batches[rank]
        batches = {m: MicroBatch(token, token, token, (1,)) for m in mine}
        self._given = StepInput(batches, scale=1.0, seed=None, step=0)

    def step(self) -> None:
        self._executor.play(self.schedule, self._given, self._rule)
        self._executor.drain()

    def record(self) -> Recording:
        """One more step, with the times of its actions."""
        recording = Recording(torch.device("cpu"), 0)
        self._executor.play(self.schedule, self._given, self._rule, recording=recording)
        self._executor.drain()
        return recording

    def busy(self) -> dict[str, float]:
        return self._busy.take()

    def close(self) -> None:
        self._executor.close()


class _SleepingCompute:
    """Takes the seconds of the workload and leaves buffers as they are: what travels is what was there.

    Boundary activations stay from forward to backward, as in training, so that memory can be compared.
    """

    def __init__(self, workload: TimedWorkload, schedule: Schedule, sleeper: Sleeper) -> None:
        self._workload, self._model, self._knobs = workload, schedule.model, schedule.knobs
        self._sleep = sleeper.compute
        self._boundaries: dict[tuple[int, int], Tensor] = {}

    def forward(self, action: Action, buffers: Mapping[str, Tensor], given: StepInput) -> None:
        if self._model.blocks[action.block].kind == "layer":
            boundary = torch.ones(max(1, self._workload.activation_bytes // 4))
            self._boundaries[action.block, action.micro_batch] = boundary
            self._sleep(self._workload.forward_s)

    def backward(self, action: Action, buffers: Mapping[str, Tensor], given: StepInput) -> None:
        if self._model.blocks[action.block].kind == "layer":
            again = self._knobs.recomputes(action.block)
            self._sleep(self._workload.backward_input_s - (self._workload.forward_s if again == "none" else 0))
            self._sleep(self._workload.backward_weight_s)
            del self._boundaries[action.block, action.micro_batch]

    def offload(self, action: Action) -> None:
        pass

    def reload(self, action: Action) -> None:
        pass

    def losses(self, action: Action) -> list[Tensor]:
        return []


class _MeasuredTransport(Transport):
    """Notes how long every lane was in its operations."""

    busy: BusyTime

    def collective(self, action: Action, buffers: Mapping[str, Tensor]) -> None:
        with self.busy(_row(action)):
            super().collective(action, buffers)

    def exchange(self, action: Action, buffers: Mapping[str, Tensor]) -> None:
        with self.busy(_row(action)):
            super().exchange(action, buffers)

    def all_reduce(self, action: Action, values: Tensor) -> None:
        with self.busy(_row(action)):
            super().all_reduce(action, values)


def _row(action: Action) -> str:
    """Where a transfer's time counts: on its lane, and apart from computing where both have the same one."""
    return "TRANSFER" if action.lane is Lane.COMPUTE else action.lane.value


class _NoOptimizer:
    """For workloads that leave the optimizer's arithmetic out."""

    def step(self, unit: int, finite: Tensor | None, rate: float) -> None:
        pass
