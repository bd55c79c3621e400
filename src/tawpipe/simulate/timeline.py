"""Timeline: result of a simulation, with the start and end of every action, and numbers that follow from them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import nan

from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.step import Schedule
from tawpipe.topology import Topology

TRANSFERS = (Op.EXCHANGE, Op.COLLECTIVE, Op.SIZE, Op.COUNT, Op.NORM)


@dataclass(slots=True)
class NodeBytes:
    """Bytes that one node moves in one step.

    Args:
        sent: bytes sent over its link to other nodes.
        received: bytes received over its link.
        inside: bytes moved between its ranks.
    """

    sent: float = 0.0
    received: float = 0.0
    inside: float = 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """Times of one action, in seconds from the start of the simulation.

    Args:
        index: index of the action in its rank's program.
        start: time at which it gets its lane.
        begin: time at which it begins, because every participant has arrived; for an exchange, that of its last part.
        end: time at which it has finished. Its lane is free then, or earlier by the latency of the last message, see
            ``clock``.
    """

    rank: int
    step: int
    index: int
    action: Action
    start: float
    begin: float
    end: float


@dataclass(frozen=True)
class Idle:
    """Seconds in which the COMPUTE lane was idle, by what delayed the action that it waited for.

    Args:
        transfer_s: waiting for transfers (exposed communication).
        compute_s: waiting for another rank's computation.
        other_s: waiting for additions, latency of the lanes, and anything else.
    """

    transfer_s: float = 0.0
    compute_s: float = 0.0
    other_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.transfer_s + self.compute_s + self.other_s


class Record:
    """Times and causes of all instances of actions, in flat lists. An instance is an action in one step.

    ``cause`` contains the instance whose end let this one start, or -1 for a start at time zero. ``latest`` contains
    the instance of the member of a transfer that arrived last."""

    def __init__(self, schedule: Schedule, steps: int) -> None:
        self.schedule, self.steps = schedule, steps
        self.sizes = [len(program) for program in schedule.programs]
        self.base = [0]
        for size in self.sizes:
            self.base.append(self.base[-1] + size * steps)
        self.total = self.base[-1]
        self.start, self.begin, self.end = ([nan] * self.total for _ in range(3))
        self.cause, self.latest = [-1] * self.total, list(range(self.total))

    def number(self, rank: int, step: int, index: int) -> int:
        """Return the index in the lists of the instance of one action in one step."""
        return self.base[rank] + step * self.sizes[rank] + index

    def where(self, number: int) -> tuple[int, int, int]:
        """Return (rank, step, index in the program) of the instance ``number``."""
        rank = bisect_right(self.base, number) - 1
        step, index = divmod(number - self.base[rank], self.sizes[rank])
        return rank, step, index

    def rank(self, number: int) -> int:
        return self.where(number)[0]

    def step(self, number: int) -> int:
        return self.where(number)[1]

    def action(self, number: int) -> Action:
        rank, _, index = self.where(number)
        return self.schedule.programs[rank][index]

    def text(self, number: int) -> str:
        rank, step, index = self.where(number)
        return f"rank {rank} step {step} #{index}: {self.schedule.programs[rank][index]}"


class Timeline:
    """Result of ``play``. Times are seconds from its start; steps are counted from 0."""

    def __init__(
        self, schedule: Schedule, physical: Topology, record: Record, node_bytes: tuple[tuple[NodeBytes, ...], ...]
    ) -> None:
        self.schedule, self.physical, self._record = schedule, physical, record
        self.steps = record.steps
        self.node_bytes = node_bytes
        """[step][node] bytes that each node moves."""

    def span(self, rank: int, step: int, index: int) -> Span:
        """Return the times of one action in one step."""
        n, record = self._record.number(rank, step, index), self._record
        action = self.schedule.programs[rank][index]
        return Span(rank, step, index, action, record.start[n], record.begin[n], record.end[n])

    def spans(self, rank: int, *, lane: Lane | None = None, step: int | None = None) -> Iterator[Span]:
        """Yield the spans of one rank in the order of its program, optionally of one lane or one step only."""
        for s in range(self.steps) if step is None else (step,):
            for index, action in enumerate(self.schedule.programs[rank]):
                if lane is None or action.lane is lane:
                    yield self.span(rank, s, index)

    # steps

    @cached_property
    def step_ends(self) -> tuple[float, ...]:
        """Time at which the last action of every step ended, over all ranks."""
        record, ends = self._record, []
        for step in range(self.steps):
            cuts = ((record.number(r, step, 0), size) for r, size in enumerate(record.sizes) if size)
            ends.append(max(max(record.end[a : a + size]) for a, size in cuts))
        return tuple(ends)

    @property
    def step_times(self) -> tuple[float, ...]:
        """Seconds of every step, each from the end of the step before.

        The first starts at 0 and includes filling the pipeline."""
        return tuple(b - a for a, b in zip((0.0, *self.step_ends), self.step_ends, strict=False))

    @property
    def steady_step(self) -> int:
        """Index of the step that represents training: the last but one if there are at least three, else the last."""
        return max(0, self.steps - 2) if self.steps > 2 else self.steps - 1

    @property
    def step_seconds(self) -> float:
        """Seconds of a step in the middle of training, where each step begins while the one before it drains."""
        return self.step_times[self.steady_step]

    @property
    def makespan(self) -> float:
        """Seconds from 0 to the last end; for a single step its time if nothing runs before and after it."""
        return self.step_ends[-1]

    # what delayed COMPUTE

    def idle(self, rank: int, step: int | None = None) -> Idle:
        """Return the seconds for which the COMPUTE lane of ``rank`` is idle in one step, by cause.

        This is the time before the actions of the step. Each gap is traced back through the actions that let its last
        action start, across ranks, to the beginning of the gap.

        Args:
            rank: the rank.
            step: index of the step; by default ``steady_step``.
        """
        step = self.steady_step if step is None else step
        record, free, seconds = self._record, 0.0, [0.0, 0.0, 0.0]
        if step:
            free = max((span.end for span in self.spans(rank, lane=Lane.COMPUTE, step=step - 1)), default=0.0)
        for index, action in enumerate(self.schedule.programs[rank]):
            if action.lane is Lane.COMPUTE:
                number = record.number(rank, step, index)
                if record.start[number] > free:
                    self._attribute(number, free, seconds)
                free = record.end[number]
        return Idle(*seconds)

    def _attribute(self, number: int, since: float, seconds: list[float]) -> None:
        """Find the causes of the idle time before an instance, and add their seconds to ``seconds``.

        The idle time is from ``since`` to the start of the instance. ``seconds`` has one entry per cause: transfer,
        compute, other."""
        record, now = self._record, self._record.start[number]
        while now > since and record.cause[number] >= 0:
            number = record.cause[number]
            action, begin = record.action(number), max(record.begin[number], since)
            kind = 0 if action.op in TRANSFERS else 1 if action.lane is Lane.COMPUTE else 2
            seconds[kind] += now - begin
            now = begin
            number = record.latest[number]
        seconds[2] += max(0.0, now - since)

    @property
    def exposed_communication_s(self) -> float:
        """Seconds per step in which COMPUTE waits for transfers, in the steady step, averaged over ranks."""
        ranks = self.schedule.played
        return sum(self.idle(rank).transfer_s for rank in ranks) / len(ranks)

    @property
    def idle_s(self) -> float:
        """Seconds per step in which COMPUTE is idle, in the steady step, averaged over ranks."""
        ranks = self.schedule.played
        return sum(self.idle(rank).total_s for rank in ranks) / len(ranks)
