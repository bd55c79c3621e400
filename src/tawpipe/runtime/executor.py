"""Executor: runs one rank's program of a schedule.

One thread submits every action, in the schedule's order, to the lane that the action names. ``Hazards`` derives from
the buffers of an action which earlier actions it must wait for, also across steps. The executor has no code for single
strategies: a strategy is a schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from tawpipe.errors import RunError
from tawpipe.runtime.compute.step_input import DecodeInput, StepInput
from tawpipe.runtime.frame import Frame, UpdateRule
from tawpipe.runtime.homes.home_actions import HomeActions, Optimizers
from tawpipe.runtime.homes.step_result import VALUES, StepResult
from tawpipe.runtime.homes.storage import Storage
from tawpipe.runtime.lanes import CpuLane, Doing, Event, Failure, LaneProtocol, Moment, make_lane
from tawpipe.runtime.transport.refresh import Refresh
from tawpipe.runtime.transport.transport import Transport
from tawpipe.runtime.watch.faults import Injector
from tawpipe.runtime.watch.recording import Recording
from tawpipe.runtime.watch.stalls import messages_of
from tawpipe.runtime.watch.watchdog import LastEvents, Watchdog
from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.buffers import Buffer, Kind, home_gradient, home_weight
from tawpipe.schedule.hazards import Hazards
from tawpipe.schedule.sizes.footprint import MOST_EARLY, most_early_receives
from tawpipe.schedule.step import Schedule


class BlockCompute(Protocol):
    """Interface of the object that computes blocks: ``Compute``, or a substitute in serving and measurements."""

    def forward(self, action: Action, frame: Frame) -> None: ...

    def backward(self, action: Action, frame: Frame) -> None: ...

    def backward_weight(self, action: Action, frame: Frame) -> None: ...

    def prepare(self, action: Action, frame: Frame) -> None: ...

    def keys(self, action: Action, frame: Frame) -> None: ...

    def keys_together(self, action: Action, frame: Frame) -> None: ...

    def keys_backward(self, action: Action, frame: Frame) -> None: ...

    def travel(self, action: Action, frame: Frame) -> None: ...

    def receive_buffers(self, action: Action, frame: Frame) -> dict[Buffer, Tensor]: ...

    def offload(self, action: Action, frame: Frame) -> None: ...

    def reload(self, action: Action, frame: Frame) -> None: ...

    def losses(self, action: Action, frame: Frame) -> list[Tensor]: ...


COMPUTING = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "backward",
    Op.BACKWARD_WEIGHT: "backward_weight",
    Op.PREPARE: "prepare",
    Op.KEYS: "keys",
    Op.KEYS_BACKWARD: "keys_backward",
    Op.OFFLOAD: "offload",
    Op.RELOAD: "reload",
}
"""Names of the methods of ``BlockCompute`` that run actions, by operation.

An object that computes decode steps has only the methods that decode steps need.
"""


@dataclass
class _Issued:
    """Events of one issued step: the last event of every lane, and the event of NORM (None without NORM)."""

    last: dict[Lane, Event] = field(default_factory=dict)
    normed: Event | None = None


DECODE_STEPS_IN_FLIGHT = 2
"""Decode steps in flight: one may start on the first stage while the one before leaves the last stage."""


class Executor:
    """Buffers and lanes of one rank, and the loop that issues the actions of its schedule.

    Args:
        compute: Computes the blocks.
        storage: Weights, gradients and compute copies of the homes of this rank.
        transport: Sends and receives messages.
        optimizers: Optimizers of the homes; None if nothing is trained.
        reduce_dtype: Dtype of gradients while they are summed and sent.
        delay: Returns, for a lane's name, a function that returns seconds to wait before each action of the lane. For
            tests.
        injector: Injects faults into actions. For tests.
        where: Description of this rank in reports of the watchdog.
    """

    def __init__(
        self,
        rank: int,
        *,
        compute: BlockCompute,
        storage: Storage,
        transport: Transport,
        optimizers: Optimizers | None,
        reduce_dtype: torch.dtype,
        delay: Callable[[str], Callable[[], float]] | None = None,
        injector: Injector | None = None,
        where: str = "",
    ) -> None:
        self.injector = injector
        self.rank, self.compute, self.storage, self.transport = rank, compute, storage, transport
        self.optimizers, self.device, self.reduce_dtype = optimizers, storage.device, reduce_dtype
        self._buffers: dict[Buffer, Tensor] = {}
        for unit in storage.master:
            self._buffers[home_weight(unit)] = storage.compute_copy[unit]
            if unit in storage.gradient and not storage.in_host:
                self._buffers[home_gradient(unit)] = storage.gradient[unit]
        self._home = home = HomeActions(storage, optimizers)
        self.streaming = home.streaming
        self.refresh = Refresh(storage.units, transport)
        """Updates the copies of weights that stay on this rank from step to step."""
        self._failure = failure = Failure()
        self._lanes: dict[Lane, LaneProtocol] = {
            lane: make_lane(lane.value, self.device, failure, delay=delay(lane.value) if delay else None)
            for lane in Lane
            if lane not in (Lane.HOME, Lane.RAISE) or self.streaming is not None
        }
        self._beside: dict[Lane, LaneProtocol] = {}
        """Second worker thread of a lane, which begins actions before the lane itself reaches them."""
        self._begun: dict[Lane, deque[Event]] = {}
        """End events of the latest actions of each lane that were begun by the thread in ``_beside``."""
        self._delay = delay
        if self.device.type == "cuda":
            # torch's allocator keeps these pinned blocks for results; pinning new memory later would stall the issuing
            # thread
            del [torch.zeros(len(VALUES), dtype=torch.float64, device="cpu", pin_memory=True) for _ in range(4)][:]
        self._hazards: Hazards[Event] = Hazards()
        self._submitted = self._drained = 0  # number of submitted actions, and of those known to have ended
        self._ended: Moment | None = None
        """End of the last step that was issued."""
        messages, name = partial(messages_of, topology=transport.topology, rank=rank), where or f"rank {rank}"
        self.watchdog = Watchdog(
            self._doing, name, messages=messages, failure=lambda: failure.error, device=self.device
        )
        self._handlers: dict[Op, Callable[[Action, Frame], None]] = {
            **{op: getattr(compute, name) for op, name in COMPUTING.items() if hasattr(compute, name)},
            Op.EXCHANGE: self._exchange,
            Op.COLLECTIVE: self._collective,
            Op.SIZE: self._size,
            Op.ZERO: self._zero,
            Op.RAISE: self._raise,
            Op.ADD: home.add,
            Op.COUNT: home.count,
            Op.NORM: self._norm,
            Op.UPDATE: home.update,
        }

    def adopt(self, schedule: Schedule) -> None:
        """Allocate the buffers that ``schedule`` needs and that do not exist yet, also home gradients in CPU memory.

        Schedules of one strategy share their buffers.
        """
        for pool in schedule.pools[self.rank]:
            dtype = {
                Kind.WEIGHT: self.storage.compute_dtype,
                Kind.COPY: self.storage.compute_dtype,
                Kind.GRADIENT: self.reduce_dtype,
                Kind.LANDING: self.storage.master_dtype,
            }[pool.kind]
            for buffer in pool.buffers:
                if buffer not in self._buffers:
                    self._buffers[buffer] = torch.zeros(pool.elements, dtype=dtype, device=self.device)
                assert self._buffers[buffer].numel() == pool.elements
        for action in schedule.programs[self.rank] if self.streaming is not None else ():
            if action.op is Op.ADD and action.writes[0].is_home:
                self.storage.open_gradient(action.unit)

    def play(
        self, schedule: Schedule, step_input: StepInput, rule: UpdateRule, *, recording: Recording | None = None
    ) -> StepResult:
        """Issue all actions of one step or evaluation, and return before they have ended.

        Args:
            schedule: Schedule to run.
            step_input: Micro-batches and other inputs of the step.
            rule: Clipping, learning rates and handling of numbers that are not finite.
            recording: Records when the actions run.

        Returns:
            Result whose values become available when NORM has ended.

        Raises:
            RunError: If an action of an earlier step failed.
        """
        ended = self._ended = Moment(self.device, self._ended)
        on_cuda = self.device.type == "cuda"
        values = torch.zeros(len(VALUES), dtype=torch.float64, device="cpu", pin_memory=on_cuda)
        training = step_input.seed is not None
        name = f"step {step_input.step + 1}" if training else "an evaluation"
        self._refuse_after_failure()
        frame = Frame(self._buffers, self.transport, step_input, rule, values, ended)
        faulty = step_input.step + 1 if training else 0
        issued = self._issue(schedule, frame, name, faulty=faulty, recording=recording)
        assert issued.normed is not None
        return StepResult(issued.normed, values, ended, self._failure)

    def loop(self, schedule: Schedule) -> int:
        """Run decode steps until one is marked as the last, wait for all, and return the number of decode steps issued.

        ``DECODE_STEPS_IN_FLIGHT`` decode steps are in flight at any time. Decode steps that were already issued when
        the last one was computed run with empty passes. By the end of a decode step all ranks have seen the headers of
        all its passes, so all ranks stop after the same decode step and no receive stays open.
        """
        self._refuse_after_failure()
        decode_steps = deque[tuple[DecodeInput, _Issued]]()
        ends, on_cuda = {action.lane: action for action in schedule.programs[self.rank]}, self.device.type == "cuda"
        # On CPUs, do not wait for lanes that end with a receive: this thread would wake together with the computing
        # thread and compete with it while it issues the next decode step.
        awaited = [lane for lane, action in ends.items() if on_cuda or not action.begins_early]
        number, last = 0, False
        while decode_steps or not last:
            while len(decode_steps) < DECODE_STEPS_IN_FLIGHT and not last:
                decode_step = DecodeInput(number)
                frame = Frame(self._buffers, self.transport, decode_step)
                decode_steps.append((decode_step, self._issue(schedule, frame, f"decode step {number + 1}")))
                number += 1
            decode_step, issued = decode_steps.popleft()
            for lane in awaited:
                issued.last[lane].wait()
            last |= decode_step.last
        self.drain()
        return number

    def _doing(self) -> dict[Lane, Doing | None]:
        """Return the action that each lane is at, or None for a lane with nothing to do."""
        return {lane: worker.doing() for lane, worker in self._lanes.items()}

    def _refuse_after_failure(self) -> None:
        """Raise ``RunError`` if any action has failed, and note that the caller has been given an error."""
        if (cause := self._failure.error) is not None:
            self._failure.told = True
            words = "an earlier step of this pipeline failed; make a new one, and load its last state"
            raise RunError(words) from cause

    def _issue(
        self, schedule: Schedule, frame: Frame, name: str, *, faulty: int = 0, recording: Recording | None = None
    ) -> _Issued:
        """Submit all actions of one step or decode step to their lanes, and return the last events.

        Args:
            schedule: Schedule to run.
            frame: Values shared by the actions.
            name: Name of the step for the watchdog.
            faulty: Number of the step for the injector, from 1; 0 if no faults are injected.
            recording: Records when the actions run.
        """
        issued = _Issued()
        last = LastEvents(issued.last)
        self.watchdog.watch(name, last)
        for lane in self._lanes.values():
            lane.begin_step()
        try:
            for index, action in enumerate(schedule.programs[self.rank]):
                run: Callable[[], None] = partial(self._handlers[action.op], action, frame)
                if self.injector is not None and faulty:
                    run = self.injector.around(action, faulty, run, self._buffers)
                run = recording.around(index, str(action), run) if recording else run
                event = self._submit(action, run, frame)
                issued.last[action.lane] = event
                if action.op is Op.NORM:
                    issued.normed = event
        except BaseException as error:  # on CUDA, actions are executed by this thread and may raise here
            self._failure.note(error)
            self._failure.told = True
            raise
        last.issued = True
        return issued

    def on_compute(self, run: Callable[[], None]) -> None:
        """Run a function on the compute lane after all actions submitted to it, and wait until it has ended."""
        self._failure.wait_for(self._lanes[Lane.COMPUTE].submit(run, (), "a measurement"))

    @property
    def compute_stream(self) -> torch.cuda.Stream | None:
        """CUDA stream of the compute lane; None on the CPU."""
        return getattr(self._lanes[Lane.COMPUTE], "stream", None)

    @property
    def compute_s(self) -> float:
        """Seconds that this rank has computed since the executor was made, counting only actions that have ended."""
        return self._lanes[Lane.COMPUTE].busy_s()

    def drain(self) -> None:
        """Wait until all submitted actions have ended. Raises the error of any action that failed."""
        submitted = self._submitted
        if submitted == self._drained:  # fast path: reading all parameters calls this once per parameter
            return
        for event in self._hazards.last_events():
            self._failure.wait_for(event)
        self._drained = submitted

    def close(self) -> None:
        """Stop the watchdog, wait for all actions, and end the lanes.

        Raises the error of an action that failed, and then leaves the lanes running: they may wait for peers that are
        gone.
        """
        self.watchdog.close()
        self.drain()
        for lane in (*self._lanes.values(), *self._beside.values()):
            lane.close()

    @property
    def failure(self) -> BaseException | None:
        """First error of any action, or None."""
        return self._failure.error

    @property
    def untold(self) -> BaseException | None:
        """First error of any action, or None; None as well once a call has raised an error because of it."""
        return None if self._failure.told else self._failure.error

    @property
    def idle(self) -> bool:
        """True if all submitted actions have ended."""
        return all(event.done for event in self._hazards.last_events())

    def end_lanes(self, limit_s: float) -> list[bool]:
        """Ask each lane to end after its submitted actions, and return for each whether it has ended.

        Waits at most ``limit_s`` seconds per lane.
        """
        return [lane.close(limit_s) for lane in (*self._lanes.values(), *self._beside.values())]

    def forgive(self) -> None:
        """Allow updates again after a number that was not finite; call after the weights have been replaced."""
        self._home.forgive()

    def _submit(self, action: Action, run: Callable[[], None], frame: Frame) -> Event:
        """Submit an action to its lane with the events it must wait for, and return its event.

        If the transport can begin the action early, a second thread of the lane begins it first.
        """
        names = {"reads": action.reads, "writes": action.writes, "frees": action.frees, "lane": action.lane}
        awaited, early_transfers = self._hazards.before(**names), self.transport.early_transfers
        begins = early_transfers is not None and early_transfers.begins(action)
        if begins:
            awaited.append(self._begin_early(action, frame))
        event = self._lanes[action.lane].submit(run, awaited, action)
        if begins:
            self._begun[action.lane].append(event)
        self._hazards.record(event, **names)
        self._submitted += 1
        return event

    def _begin_early(self, action: Action, frame: Frame) -> Event:
        """Submit the early part of an action to the second thread of its lane, and return the event of this part.

        The early part waits only for the buffers of the action (of an EXCHANGE, the buffers it receives into), not for
        the actions before it on its lane. Other actions of the lane may run meanwhile.
        """
        lane = action.lane
        if lane not in self._beside:
            delay = self._delay(f"{lane.value} ahead") if self._delay else None
            self._beside[lane] = CpuLane(f"{lane.value} ahead", self._failure, delay=delay)
            self._begun[lane] = deque(maxlen=MOST_EARLY)
        begin = partial(self._begin, action, frame, tuple(self._begun[lane]))
        return self._beside[lane].submit(begin, self._hazards.before(**action.early_needs), action)

    def _begin(self, action: Action, frame: Frame, earlier: Sequence[Event]) -> None:
        """Begin an action early, in the second thread of its lane.

        Waits first while too many messages are in flight on the lane.

        Args:
            action: EXCHANGE or ring collective.
            frame: Values shared by the actions of the step.
            earlier: End events of the actions of this lane that were begun early before, at most ``MOST_EARLY``.
        """
        buffers, most = frame.buffers, MOST_EARLY
        if action.writes[0].is_activation:
            buffers = self.compute.receive_buffers(action, frame)
            most = most_early_receives(sum(tensor.nbytes for tensor in buffers.values()))
        elif action.group == "node":
            # inside a node there is no latency to hide, and a second message would slow down the one needed first
            most = 1
        if len(earlier) >= most:
            earlier[-most].wait()
        assert self.transport.early_transfers is not None
        self.transport.early_transfers.begin(action, buffers)

    # actions

    def _exchange(self, action: Action, frame: Frame) -> None:
        """Run an EXCHANGE: of activations through ``compute``, of weights and gradients through ``transport``."""
        if action.transfers[0].buffer.is_activation:
            self.compute.travel(action, frame)
        else:
            self.transport.exchange(action, frame.buffers)

    def _collective(self, action: Action, frame: Frame) -> None:
        """Run a COLLECTIVE.

        ``compute`` runs it for keys and values, ``refresh`` for weight copies that stay, ``transport`` for all others.
        """
        if action.lane is Lane.SEQ:
            self.compute.keys_together(action, frame)
        elif action.refreshes:
            self.refresh.gather(action, frame.buffers)
        else:
            self.transport.collective(action, frame.buffers)

    def _size(self, action: Action, frame: Frame) -> None:
        self.refresh.size(action, frame.buffers)

    def _norm(self, action: Action, frame: Frame) -> None:
        self._home.norm(action, frame, self.compute.losses(action, frame))

    @torch.no_grad()
    def _zero(self, action: Action, frame: Frame) -> None:
        frame.buffers[action.writes[0]].zero_()

    @torch.no_grad()
    def _raise(self, action: Action, frame: Frame) -> None:
        frame.buffers[action.writes[0]].copy_(frame.buffers[action.reads[0]], non_blocking=True)
