"""The bound by dependencies: what no clock, however links are shared, can undercut.

A relaxed play is not a bound: where links are shared fairly, more look-ahead lets what is needed later take bandwidth
from what is needed now, and a play without limits can come out slower than one with them. So it is a longest path:

* head of an event: the longest chain of work before it, every transfer at the full rate of its slowest port. Also, for
  every port: all bytes that must have passed the port before the event, over its rate, however they shared it.
* tail of an event: the same for what must follow it.
* bound: the largest head + tail of any event.

Overheads and buffers are left out (``unlimited_buffers``), the order of every lane is kept. What waits for a message
between nodes waits for its latency as well; the lane that carried it may go on before. Which bytes must come before an
event follows from one number for every lane, because a lane's actions are in order (a vector clock).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from tawpipe.schedule.actions import Action, Lane, Op, exchange
from tawpipe.schedule.buffers import Buffer, Kind, Pool, pooled
from tawpipe.schedule.step import Schedule
from tawpipe.simulate.clock import End, LaneGranted, Player, Transit, dependencies
from tawpipe.simulate.cost_model import CostModel
from tawpipe.simulate.transfers import Port
from tawpipe.topology import Topology

NEVER = float("-inf")
Edges = list[list[tuple[int, float]]]
"""Edges of every event: (event, seconds between the two at least)."""


def dependency_bound(
    schedule: Schedule, cost_model: CostModel, *, steady: bool = False, physical: Topology | None = None
) -> float:
    """Seconds that a schedule's own order needs at least; see the module's head.

    Args:
        steady: of a step among others, from one NORM to the next, instead of one step that begins and ends with nothing
            under way. All ranks take part in NORM, updates come after it and the next step's weights after them, so
            that next to nothing of two steps overlaps and the two bounds are nearly equal.
        physical: the nodes that the ranks really are on, as for ``play``.
    """
    relaxed, free = unlimited_buffers(schedule), cost_model.without_overheads()
    latency_s = cost_model.between.latency_s
    if not steady:
        return _Events(relaxed, free, physical, steps=1, latency_s=latency_s).longest()
    events = _Events(relaxed, free, physical, steps=2, latency_s=latency_s)
    return events.longest(after=events.norms(0), before=events.norms(1))


class _Events:
    """The starts and ends of a play's instances and the transits between, in an order that keeps all dependencies."""

    def __init__(
        self, schedule: Schedule, cost_model: CostModel, physical: Topology | None, *, steps: int, latency_s: float
    ) -> None:
        self.schedule, self.steps, self.latency_s = schedule, steps, latency_s
        self.player = Player(schedule, cost_model, steps, physical)
        self.player.run()
        self.record, self.log = self.player.record, self.player.log
        self.starts = {event.number: i for i, event in enumerate(self.log) if isinstance(event, LaneGranted)}
        self.ends = {event.number: i for i, event in enumerate(self.log) if isinstance(event, End)}
        self._number_lanes()
        self.into: Edges = [[] for _ in self.log]
        self.out: Edges = [[] for _ in self.log]
        self._connect()

    def norms(self, step: int) -> list[int]:
        """The ends of a step's NORM on all ranks."""
        numbers = (n for n in self.ends if self.record.step(n) == step and self.record.action(n).op is Op.NORM)
        return [self.ends[n] for n in numbers]

    def _number_lanes(self) -> None:
        """The place of every instance: (lane, position in it over all steps)."""
        self.place: dict[int, tuple[int, int]] = {}
        lanes: dict[tuple[int, Lane], int] = {}
        self.lengths: list[int] = []
        for rank, program in enumerate(self.schedule.programs):
            for step in range(self.steps):
                for index, action in enumerate(program):
                    lane = lanes.setdefault((rank, action.lane), len(lanes))
                    if lane == len(self.lengths):
                        self.lengths.append(0)
                    self.place[self.record.number(rank, step, index)] = lane, self.lengths[lane]
                    self.lengths[lane] += 1

    def _connect(self) -> None:
        latencies: dict[int, float] = {}
        """Instance with a transit -> seconds before its end at which its lane is free."""
        capacity = self.player.transfers.capacity
        self.ports: dict[Port, int] = {}
        self.work: list[tuple[int, int, float]] = []
        """(transit's event, port, seconds that it keeps the port busy)."""
        for i, event in enumerate(self.log):
            if not isinstance(event, Transit):
                continue
            busy = {port: amount / capacity(port) for port, amount in event.load.ports}
            self.work += [(i, self.ports.setdefault(port, len(self.ports)), s) for port, s in busy.items()]
            for number in event.members:
                self._edge(self.starts[number], i, 0.0)
                latency_s = self.latency_s if event.load.sent and number != event.sender else 0.0
                self._edge(i, self.ends[number], max([event.load.least_s, *busy.values()]) + latency_s)
                latencies[number] = max(latency_s, latencies.get(number, 0.0))
        for rank, program in enumerate(self.schedule.programs):
            same, before = dependencies(program)
            free: dict[Lane, int] = {}
            for step in range(self.steps):
                for index, action in enumerate(program):
                    number = self.record.number(rank, step, index)
                    if number not in latencies:
                        self._edge(self.starts[number], self.ends[number], self.player.seconds(rank, action))
                    needed = [self.record.number(rank, step, i) for i in same[index]]
                    needed += [self.record.number(rank, step - 1, i) for i in before[index] if step]
                    for other in needed:
                        self._edge(self.ends[other], self.starts[number], 0.0)
                    if action.lane in free:
                        last = free[action.lane]
                        self._edge(self.ends[last], self.starts[number], -latencies.get(last, 0.0))
                    free[action.lane] = number

    def _edge(self, source: int, target: int, seconds: float) -> None:
        self.into[target].append((source, seconds))
        self.out[source].append((target, seconds))

    # longest paths

    def longest(self, *, after: list[int] | None = None, before: list[int] | None = None) -> float:
        """The longest path in seconds; given events ``after`` or ``before``, only of what lies after or before them."""
        count = len(self.log)
        inside = np.ones(count, dtype=bool)
        if after is not None:
            inside &= _reached(range(count), self.into, after)
        if before is not None:
            inside &= _reached(range(count - 1, -1, -1), self.out, before)
        marked = {self.ends[n]: (lane, at) for n, (lane, at) in self.place.items()}
        heads = self._pass(range(count), self.into, inside, marked)
        marked = {self.starts[n]: (lane, self.lengths[lane] - 1 - at) for n, (lane, at) in self.place.items()}
        tails = self._pass(range(count - 1, -1, -1), self.out, inside, marked)
        return float((heads + tails).max())

    def _pass(
        self, order: Iterable[int], edges: Edges, inside: np.ndarray, marked: dict[int, tuple[int, int]]
    ) -> np.ndarray:
        """The longest path to every event, in one direction.

        Args:
            order: of the events, sources first.
            edges: against that direction.
            inside: events that count; the others are at ``NEVER``.
            marked: events at which an instance is passed, with its lane and its position in this direction.
        """
        passed_work = self._work_on_the_way(inside, marked)
        paths = np.full(len(self.log), NEVER)
        clocks = np.zeros((len(self.log), len(self.lengths)), dtype=np.int32)
        for i in order:
            clock = clocks[i]
            for other, _ in edges[i]:
                np.maximum(clock, clocks[other], out=clock)
            if i in marked:
                lane, position = marked[i]
                clock[lane] = position + 1
            if inside[i]:
                longest = max((paths[other] + seconds for other, seconds in edges[i]), default=0.0)
                paths[i] = max(longest, passed_work(clock) if self._weighs(i) else 0.0)
        return paths

    def _weighs(self, i: int) -> bool:
        """True if the bytes before an event are looked at: every chain of transfers leads to compute or to NORM."""
        event = self.log[i]
        if isinstance(event, Transit):
            return False
        action = self.record.action(event.number)
        return action.lane is Lane.COMPUTE or action.op is Op.NORM

    def _work_on_the_way(self, inside: np.ndarray, marked: dict[int, tuple[int, int]]) -> Callable[[np.ndarray], float]:
        """A function from a vector clock to the seconds of the port that is busiest with what the clock has passed.

        A transit counts at one of the instances that take part in it.
        """
        places = {self._number(i): place for i, place in marked.items()}
        offsets = np.concatenate([[0], np.cumsum([n + 1 for n in self.lengths])]).astype(np.int64)
        table = np.zeros((int(offsets[-1]), max(1, len(self.ports))))
        for i, port, seconds in self.work:
            if inside[i]:
                transit = self.log[i]
                assert isinstance(transit, Transit)
                lane, position = places[transit.members[0]]
                table[offsets[lane] + position + 1, port] += seconds
        for lane, length in enumerate(self.lengths):
            cut = slice(offsets[lane], offsets[lane] + length + 1)
            table[cut] = np.cumsum(table[cut], axis=0)
        return lambda clock: table[offsets[:-1] + clock].sum(axis=0).max()

    def _number(self, i: int) -> int:
        event = self.log[i]
        assert not isinstance(event, Transit)
        return event.number


def _reached(order: Iterable[int], edges: Edges, sources: list[int]) -> np.ndarray:
    """Events on a path from ``sources``, themselves included."""
    reached = np.zeros(len(edges), dtype=bool)
    reached[sources] = True
    for i in order:
        if not reached[i]:
            reached[i] = any(reached[other] for other, _ in edges[i])
    return reached


def unlimited_buffers(schedule: Schedule) -> Schedule:
    """The same actions in the same order, with a buffer of its own for everything that a pool's buffer held in turn.

    Every write that does not also read its buffer begins a new one. So no action waits for the readers of what was
    there before, and lanes run ahead as far as the data allow: look-ahead without a limit. Homes, and copies that stay
    from step to step, keep their names, because an update in place does wait for those who still read the weights
    before it. The next step uses the buffers again, a whole step later. The result is a schedule like any other, and
    ``verify`` holds for it.
    """
    renamed = [_rename(program, pools) for program, pools in zip(schedule.programs, schedule.pools, strict=True)]
    return replace(
        schedule,
        name=f"{schedule.name}, unlimited buffers",
        programs=tuple(program for program, _ in renamed),
        pools=tuple(pools for _, pools in renamed),
    )


def _rename(program: tuple[Action, ...], pools: tuple[Pool, ...]) -> tuple[tuple[Action, ...], tuple[Pool, ...]]:
    used = {pool.name: 0 for pool in pools if pool.kind is not Kind.COPY}
    current: dict[Buffer, Buffer] = {}

    def fresh(buffer: Buffer) -> Buffer:
        if buffer.pool not in used:
            return buffer
        current[buffer] = pooled(buffer.pool, used[buffer.pool])
        used[buffer.pool] += 1
        return current[buffer]

    renamed = []
    for action in program:
        if action.op is Op.EXCHANGE:
            sends = {t.buffer: current.get(t.buffer, t.buffer) for t in action.transfers if t.send}
            parts = (replace(t, buffer=sends[t.buffer] if t.send else fresh(t.buffer)) for t in action.transfers)
            renamed.append(exchange(action.lane, tuple(parts), action.group, compression=action.compression))
            continue
        reads = tuple(current.get(buffer, buffer) for buffer in action.reads)
        writes = tuple(
            current.get(buffer, buffer) if buffer in action.reads else fresh(buffer) for buffer in action.writes
        )
        renamed.append(replace(action, reads=reads, writes=writes))
    return tuple(renamed), tuple(replace(pool, count=used.get(pool.name, pool.count)) for pool in pools)
