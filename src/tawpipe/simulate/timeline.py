"""The result of a play: when everything started and ended, and what follows from it."""

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
    """Bytes of one node in one step.

    Args:
        sent, received: over its link to the other nodes.
        inside: that moved between its ranks.
    """

    sent: float = 0.0
    received: float = 0.0
    inside: float = 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """One action in time, seconds from the start of the play.

    Args:
        index: of the action in its rank's program.
        start: it has its lane from here on.
        begin: it is under way: everybody who takes part is there. (Of an exchange: its last part is.)
        end: it is done. Its lane is free then, or before by the latency of the last message, see ``clock``.
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
    """Seconds in which COMPUTE had nothing to do, by what held up the action that it waited for.

    Args:
        transfer_s: something was being transferred: exposed communication.
        compute_s: another rank was computing.
        other_s: additions, latency of the lanes, and whatever else.
    """

    transfer_s: float = 0.0
    compute_s: float = 0.0
    other_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.transfer_s + self.compute_s + self.other_s


class Record:
    """The times of all instances of actions, flat, and who made whom start.

    ``cause`` is the instance whose end let this one start, -1 at time zero; ``latest`` the instance of the member of a
    transfer that came last.
    """

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
        return self.base[rank] + step * self.sizes[rank] + index

    def where(self, number: int) -> tuple[int, int, int]:
        """(rank, step, index)."""
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
    """The result of ``play``. Times are seconds from its start, steps count from 0."""

    def __init__(
        self, schedule: Schedule, physical: Topology, record: Record, node_bytes: tuple[tuple[NodeBytes, ...], ...]
    ) -> None:
        self.schedule, self.physical, self._record = schedule, physical, record
        self.steps = record.steps
        self.node_bytes = node_bytes
        """[step][node]."""

    def span(self, rank: int, step: int, index: int) -> Span:
        n, record = self._record.number(rank, step, index), self._record
        action = self.schedule.programs[rank][index]
        return Span(rank, step, index, action, record.start[n], record.begin[n], record.end[n])

    def spans(self, rank: int, *, lane: Lane | None = None, step: int | None = None) -> Iterator[Span]:
        """The spans of one rank, in the order of its program; of one lane or step where asked."""
        for s in range(self.steps) if step is None else (step,):
            for index, action in enumerate(self.schedule.programs[rank]):
                if lane is None or action.lane is lane:
                    yield self.span(rank, s, index)

    # steps

    @cached_property
    def step_ends(self) -> tuple[float, ...]:
        """When the last action of every step ended, over all ranks."""
        record, ends = self._record, []
        for step in range(self.steps):
            cuts = ((record.number(r, step, 0), size) for r, size in enumerate(record.sizes) if size)
            ends.append(max(max(record.end[a : a + size]) for a, size in cuts))
        return tuple(ends)

    @property
    def step_times(self) -> tuple[float, ...]:
        """Seconds from the end of the step before, the first one from zero; it includes the filling of the pipeline."""
        return tuple(b - a for a, b in zip((0.0, *self.step_ends), self.step_ends, strict=False))

    @property
    def steady_step(self) -> int:
        """The step that stands for all: with a step before it and a step after it where there are enough."""
        return max(0, self.steps - 2) if self.steps > 2 else self.steps - 1

    @property
    def step_seconds(self) -> float:
        """Seconds of a step in the middle of training, where each begins while the one before it drains."""
        return self.step_times[self.steady_step]

    @property
    def makespan(self) -> float:
        """Seconds from zero to the last end; of a single step, its time if nothing is under way before and after it."""
        return self.step_ends[-1]

    # what held COMPUTE up

    def idle(self, rank: int, step: int | None = None) -> Idle:
        """Idle time of COMPUTE before the actions of one step, with its cause.

        Each gap is followed back along what let its last action start, from rank to rank, as far as the gap reaches.
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
        """Idle COMPUTE behind a transfer in the steady step, the mean over the ranks."""
        ranks = self.schedule.played
        return sum(self.idle(rank).transfer_s for rank in ranks) / len(ranks)

    @property
    def idle_s(self) -> float:
        """All idle time of COMPUTE in the steady step, the mean over the ranks."""
        ranks = self.schedule.played
        return sum(self.idle(rank).total_s for rank in ranks) / len(ranks)

    # links
