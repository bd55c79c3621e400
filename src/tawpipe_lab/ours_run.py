"""Contenders of this project: ``tawpipe.Pipeline`` on the real workload, and schedules of timed workloads.

On a timed workload everything is real except computing, which sleeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tawpipe.errors import UserError
from tawpipe.model.batch import MicroBatch
from tawpipe.model.units import ParameterSlot, Unit
from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.pipeline.setup import CheckSettings, TrainingSettings
from tawpipe.runtime.compute.step_input import StepInput
from tawpipe.runtime.executor import Executor
from tawpipe.runtime.frame import Frame, UpdateRule
from tawpipe.runtime.homes.home_actions import Optimizers
from tawpipe.runtime.homes.optimizer import adamw
from tawpipe.runtime.homes.storage import Storage
from tawpipe.runtime.homes.unit_optimizers import UnitOptimizers
from tawpipe.runtime.transport.transport import Transport
from tawpipe.runtime.watch.recording import Recording
from tawpipe.runtime.world import World
from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.buffers import BOUNDARIES, OUTSIDE, STAYING, Buffer, Kind
from tawpipe.schedule.proof.verify import verify
from tawpipe.schedule.step import Schedule
from tawpipe.schedule.transform import for_one_thread
from tawpipe.topology import Topology
from tawpipe_lab.contender import Contender
from tawpipe_lab.inside import SleptInside
from tawpipe_lab.lengths import DealtWorkload
from tawpipe_lab.ours import INSIDE, computed, recorded, schedule_of, settings_of
from tawpipe_lab.real_modules import ADAMW, WEIGHT_DECAY, make_model, random_tokens
from tawpipe_lab.sleeper import BusyTime, HostLink, Sleeper
from tawpipe_lab.workload import RealWorkload, TimedWorkload, Workload

HELD = {*BOUNDARIES, Kind.GRAPH, Kind.LINEAR} - OUTSIDE
"""Kinds of activations for which memory is allocated; ``OF_SLICES`` are added for groups of ranks and document
slices."""
OF_SLICES = {Kind.KEYS, Kind.KEY_GRADIENTS}


class PipelineContender(Contender):
    """Contender that runs a strategy on the real workload through ``tawpipe.Pipeline``, as a user would."""

    origin = "ours"

    def __init__(self, name: str, workload: RealWorkload, topology: Topology, rank: int, **knobs: Any) -> None:
        if "clip_norm" in knobs:
            raise UserError(f"knob of {name}", "clip_norm", "nothing here: the workload has a clip_norm, alike for all")
        settings = replace(settings_of(name, knobs), clip_norm=workload.clip_norm)
        super().__init__(name, settings.spelled_out())
        self._workload = workload.split(settings.parts_per_layer)
        self.pipeline = Pipeline(
            make_model(workload),
            optimizer=adamw(workload.learning_rate, weight_decay=WEIGHT_DECAY, **ADAMW),
            schedule=settings.schedule,
            training=TrainingSettings(clip_norm=workload.clip_norm),
            world=World(topology, rank, torch.device("cpu"), dist.group.WORLD if topology.world_size > 1 else None),
            checks=CheckSettings(strict=settings.strict),
        )
        self.schedule: Schedule = self.pipeline.schedule(workload.micro_batches)
        self.gradient_norm: float | None = None

    def step(self) -> None:
        every = range(self._workload.micro_batches)
        tokens = random_tokens(self._workload, self.pipeline.step_number, every)
        result = self.pipeline.step({"input_ids": tokens, "labels": tokens})
        self.pipeline.drain()
        self.gradient_norm = result.grad_norm
        self.loss_share = result.loss / self.pipeline.world.size  # every rank has the whole loss

    def close(self) -> None:
        self.pipeline.close()


class OurContender(Contender):
    """Contender that runs a schedule of this project on a timed workload: real transfers, sleeping for computing."""

    origin = "ours"
    sleeper: Sleeper

    def __init__(self, name: str, workload: Workload, topology: Topology, rank: int, **knobs: Any) -> None:
        settings, work = settings_of(name, knobs), computed(name, workload, topology, knobs)
        assert isinstance(work, TimedWorkload)
        self.schedule = for_one_thread(schedule_of(name, workload, topology, knobs))
        settings = replace(settings, schedule=self.schedule.step.settings)
        super().__init__(name, settings.spelled_out())
        self._rule = UpdateRule(clip_norm=settings.clip_norm)
        verify(self.schedule, one_thread=True)
        self.sleeper = Sleeper(self._busy)
        units = []
        for i, spec in enumerate(self.schedule.model.units):
            slot = ParameterSlot(f"layer.{i}", (spec.numel,), 0, spec.numel)
            units.append(Unit(i, slot.name, spec.trainable, (slot,), spec.blocks, spec.numel))
        device = torch.device("cpu")
        dtype = torch.bfloat16 if settings.bf16 else torch.float32
        storage = Storage(
            units,
            self.schedule.homes,
            rank,
            device=device,
            compute_dtype=dtype,
            master_dtype=torch.float32,
            host_homes=self.schedule.step.settings.host_homes or "none",
        )
        transport = _MeasuredTransport(
            self.schedule.topology, rank, [self.schedule], busy=self._busy, device=device, strict=settings.strict
        )
        if work.inside_sleeps:
            transport.sleep_inside(HostLink(INSIDE.bytes_per_s / topology.local_size))
        updates: Optimizers = _NoOptimizer(storage)
        if work.optimizer or storage.in_host:
            updates = UnitOptimizers(storage, adamw())
        self.compute = _SleepingCompute(work, self.schedule, rank, self.sleeper)
        self._executor = _LinkedExecutor(
            rank,
            compute=self.compute,
            storage=storage,
            transport=transport,
            optimizers=_Replayed(storage, updates, settings.changes, rank) if settings.changes else updates,
            reduce_dtype=torch.float32 if settings.schedule.reduce_dtype == "float32" else dtype,
            link=HostLink(work.homes_bytes_per_s) if work.homes_bytes_per_s else None,
            busy=self._busy,
        )
        self._executor.adopt(self.schedule)
        if settings.bf16:  # random like real gradients, because coding depends on values
            dice = torch.Generator().manual_seed(rank)
            for buffer, values in self._executor._buffers.items():
                if buffer.kind is Kind.GRADIENT and buffer.pool.startswith("G"):
                    values.copy_((torch.randn(values.numel(), generator=dice) * 1e-3).bfloat16())
        token = torch.zeros(1, 1, dtype=torch.long)
        micro_batches = self.schedule.step.micro_batches[rank]
        batches = {m: MicroBatch(token, token, token, (1,)) for m in micro_batches}
        counted = self.schedule.step.losses_of(rank)
        self._step_input = StepInput(batches, scale=1.0, seed=None, step=0, counted=counted)

    def step(self) -> None:
        self.begin_step()
        self._executor.drain()

    def begin_step(self) -> None:
        """Start one step without waiting for it. Actions may be in flight on return, so another step must follow."""
        self._executor.play(self.schedule, self._step_input, self._rule)

    def record(self) -> Recording:
        """Run one more step, wait for its end, and return the recording of its actions with their times."""
        recording = Recording(torch.device("cpu"), 0)
        self._executor.play(self.schedule, self._step_input, self._rule, recording=recording)
        self._executor.drain()
        return recording

    def close(self) -> None:
        self._executor.close()


class _LinkedExecutor(Executor):
    """Executor that sleeps for the time of transfers to and from homes in the host's memory.

    Args:
        link: link to the host's memory; None for one without a limit.
        busy: records how long every lane uses the link.
    """

    def __init__(self, rank: int, *, link: HostLink | None, busy: BusyTime, **settings: Any) -> None:
        super().__init__(rank, **settings)
        if link is not None and self.streaming is not None:
            of_homes = {op: self._handlers[op] for op in (Op.UPDATE, Op.ADD, Op.RAISE)}
            self._handlers |= {op: partial(self._through, link, busy, run) for op, run in of_homes.items()}

    def _through(self, link: HostLink, busy: BusyTime, run: Callable[..., None], action: Action, frame: Frame) -> None:
        """Run an action, then sleep until the bytes of homes that it reads and writes have passed ``link``.

        The sleep counts as busy time of the action's lane. Actions that use no home do not sleep."""
        begin = time.perf_counter()
        run(action, frame)
        if not any(buffer.is_home for buffer in (*action.reads, *action.writes)):
            return
        sides = (action.reads, action.writes)
        up, down = (sum(buffer.is_home for buffer in side) for side in sides)
        if action.op is Op.UPDATE:  # with both moments of AdamW; the gradient is not written back
            up, down = up + 2, 3
        shard_bytes = 4 * self.storage.master[action.unit].numel()
        with busy(_row(action)):
            link.carry(begin, up=up * shard_bytes, down=down * shard_bytes)


class _SleepingCompute:
    """Handlers of compute actions that sleep for the workload's seconds and do not change weights and gradients.

    Transfers send whatever the buffers hold. Activations are tensors of their real size, held for as long as the
    schedule says, so that memory can be compared.
    """

    def __init__(self, workload: TimedWorkload, schedule: Schedule, rank: int, sleeper: Sleeper) -> None:
        self._workload, self._model, self._step = workload, schedule.model, schedule.step
        self._sleeper = sleeper
        self._kept = workload.kept(schedule.step) if isinstance(workload, DealtWorkload) else {}
        self._held: dict[Buffer, Tensor] = {}
        """Activations by buffer. Tensors of keys and values, and of their gradients, hold all tokens: (ranks, elements
        per rank)."""
        self.most_bytes = 0
        """Most bytes of activations held at one time."""
        self._rank = rank

    def forward(self, action: Action, frame: Frame) -> None:
        in_backward = self._model.blocks[action.block].kind == "head"
        self._compute(action, 0.0 if in_backward else self._workload.block_parts[action.block].forward_s)

    def backward(self, action: Action, frame: Frame) -> None:
        """Sleep for a block's backward pass, without the recomputation of activations that were kept.

        The activations of the action are allocated, and those that it frees are dropped."""
        part, m = self._workload.block_parts[action.block], action.micro_batch
        if self._model.blocks[action.block].kind == "head":
            self._compute(action, part.seconds)
            return
        kept = self._step.recomputes(action.block, m) == "none" or action.block in self._kept.get(m, ())
        seconds = part.backward_input_s - (part.forward_s if kept else 0.0)
        self._compute(action, seconds + (part.backward_weight_s if action.op is Op.BACKWARD else 0.0))

    def backward_weight(self, action: Action, frame: Frame) -> None:
        self._compute(action, self._workload.block_parts[action.block].backward_weight_s)

    def prepare(self, action: Action, frame: Frame) -> None:
        pass

    def travel(self, action: Action, frame: Frame) -> None:
        """Run an EXCHANGE: send activations, store those received, and drop those that the action frees."""
        tensors = {transfer.buffer: self._held[transfer.buffer] for transfer in action.transfers if transfer.send}
        self._held |= frame.transport.exchange(action, tensors)
        self._drop(action)

    def receive_buffers(self, action: Action, frame: Frame) -> dict[Buffer, Tensor]:
        return {buffer: self._new(buffer) for buffer in action.writes}

    def _compute(self, action: Action, seconds: float) -> None:
        """Sleep for this rank's share of a computation; meanwhile allocate and drop the activations of the action.

        Args:
            action: the action.
            seconds: seconds of the computation for a micro-batch of mean size.
        """
        m = action.micro_batch
        with self._sleeper.computing(seconds * self._workload.work(m) / self._step.ranks_of(m)):
            self._turn_over(action)

    def _turn_over(self, action: Action) -> None:
        """Allocate the activations that an action writes, then drop those that it frees.

        Only kinds of activations that take memory of the device are allocated, and only if they are not held yet."""
        held = HELD | OF_SLICES if action.micro_batch in self._step.neighbours else HELD
        for buffer in action.writes:
            if buffer.kind in held and buffer not in self._held:
                self._held[buffer] = self._new(buffer, action.micro_batch)
        self._drop(action)

    def _new(self, buffer: Buffer, m: int | None = None) -> Tensor:
        """Return a new tensor of ones that is as large as the activation in ``buffer``.

        Args:
            buffer: buffer of the activation.
            m: micro-batch; None if the buffer names it.
        """
        m = buffer.at[0] if m is None or buffer.kind in OF_SLICES else m
        size = self._workload.keys_bytes if buffer.kind in OF_SLICES else self._workload.activation_bytes
        if buffer.kind in (Kind.LINEAR, Kind.GRAPH, Kind.RELOADED_GRAPH):
            part = self._workload.block_parts[buffer.at[1]]
            size = part.linear_bytes if buffer.kind is Kind.LINEAR else part.graph_bytes
        return torch.ones(max(1, int(size * self._workload.tokens(m)) // 4 // self._step.ranks_of(m)))

    def _drop(self, action: Action) -> None:
        """Raise ``most_bytes`` to the bytes that are held now, then drop the activations that an action frees."""
        held = [*self._held.values()]  # copied at once, because lanes of transfers change the dict meanwhile
        self.most_bytes = max(self.most_bytes, sum(tensor.nbytes for tensor in held))
        for buffer in action.frees:
            if buffer.kind not in STAYING:
                self._held.pop(buffer, None)

    def keys(self, action: Action, frame: Frame) -> None:
        """Allocate keys and values of a micro-batch for all ranks of its group, and sleep for this rank's share."""
        m = action.micro_batch
        self._held[action.writes[0]] = self._all_keys(m)
        self._sleeper.compute(self._workload.keys_s(m) / self._step.ranks_of(m))

    def keys_together(self, action: Action, frame: Frame) -> None:
        """Run a COLLECTIVE: gather keys and values of a micro-batch in its group, or reduce-scatter their gradients.

        Gathered values are not used."""
        whole = self._held.setdefault(action.reads[0], self._all_keys(action.micro_batch))
        share, every = whole[self._rank % len(whole)], whole.view(-1)
        gathers = action.collective == "all_gather"
        frame.transport.together(action, [(share, every) if gathers else (every, torch.empty_like(share))])

    def keys_backward(self, action: Action, frame: Frame) -> None:
        """Sleep for the backward pass of a micro-batch's keys and values, and drop what the action frees."""
        m = action.micro_batch  # keys and values again, and gradients of their input and weights
        self._sleeper.compute(3 * self._workload.keys_s(m) / self._step.ranks_of(m))
        self._drop(action)

    def _all_keys(self, m: int) -> Tensor:
        """Return a new tensor for keys and values of micro-batch ``m``, for its group: (ranks, elements per rank)."""
        ranks = self._step.ranks_of(m)
        return torch.ones(ranks, max(1, int(self._workload.keys_bytes * self._workload.tokens(m)) // 4 // ranks))

    def offload(self, action: Action, frame: Frame) -> None:
        """Run an OFFLOAD or RELOAD action: sleep while the activations pass the link between device and host.

        Then the device's activations that the action writes are allocated, and those that it frees are dropped.
        Activations in the host's memory are not allocated, because they take no memory of the device. The handler
        ``reload`` is this function."""
        if self._workload.host_s:
            with self._sleeper.busy("HOST"):
                time.sleep(self._workload.host_s * self._workload.tokens(action.micro_batch))
        self._turn_over(action)

    reload = offload

    def losses(self, action: Action, frame: Frame) -> list[Tensor]:
        return []


def _row(action: Action) -> str:
    """Return the name under which a transfer's busy time counts: its lane, or TRANSFER in the compute lane."""
    return "TRANSFER" if action.lane is Lane.COMPUTE else action.lane.value


def _noted(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of a transport so that its duration is added to the busy time of the action's lane."""

    def run(self: _MeasuredTransport, action: Action, *others: Any) -> Any:
        with self.busy(_row(action)):
            return operation(self, action, *others)

    return run


class _MeasuredTransport(Transport):
    """Transport that records for how long every lane runs its operations."""

    def __init__(self, *schedules: Any, busy: BusyTime, **settings: Any) -> None:
        self.busy = busy  # before super(): its warm-up runs operations
        super().__init__(*schedules, **settings)

    def sleep_inside(self, link: HostLink) -> None:
        """Make collectives inside a node sleep for their time on ``link``. Call it before any transfer has begun."""
        self.early_transfers = SleptInside(self.topology, self.rank, self._groups, link=link, strict=self.strict)

    collective = _noted(Transport.collective)
    together = _noted(Transport.together)
    exchange = _noted(Transport.exchange)
    all_reduce = _noted(Transport.all_reduce)
    refresh = _noted(Transport.refresh)


class _Replayed:
    """Optimizers that overwrite the weights with recorded ones after every update.

    So weights change from step to step as they did in the recorded run. Steps of the recording are used to its end,
    then backward to its beginning, and so on. Every unit and rank begins at another position of the recorded weights.

    Args:
        updates: optimizers that run first, for their time.
        path: file of the recording.
    """

    def __init__(self, storage: Storage, updates: Optimizers, path: str, rank: int) -> None:
        self.pieces, self._storage, self._updates = updates.pieces, storage, updates
        self._weights, self._rank = recorded(path), rank
        self._steps = dict.fromkeys(storage.master, 0)
        for unit in storage.master:
            self._bring(unit)
            storage.refresh(unit)

    def step(self, unit: int, updates: Tensor | None, rate: float, chosen: Any) -> None:
        self._updates.step(unit, updates, rate, chosen)
        self._bring(unit)

    def _bring(self, unit: int) -> None:
        """Overwrite the master weights of ``unit`` with recorded weights of the next step of the recording.

        They begin at a position that depends on unit and rank."""
        last, master = len(self._weights) - 1, self._storage.master[unit]
        at = self._steps[unit] % (2 * last)
        of_step = self._weights[min(at, 2 * last - at)]
        begin, left = (self._rank * 7919 + unit * 104_729) % len(of_step), master
        while left.numel():
            some = of_step[begin : begin + left.numel()]
            left[: len(some)].copy_(some)
            begin, left = 0, left[len(some) :]
        self._steps[unit] += 1


class _NoOptimizer:
    """Optimizer that does nothing, for workloads without an update."""

    def __init__(self, storage: Storage) -> None:
        self.pieces = {unit: pieces for unit, pieces in storage.pieces.items() if unit in storage.gradient}

    def step(self, unit: int, updates: Tensor | None, rate: float, chosen: object) -> None:
        pass
