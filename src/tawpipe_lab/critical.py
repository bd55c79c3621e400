"""Lower bound on the time of a schedule by its dependencies, which holds however transfers share their links.

A simulation with unlimited buffers gives no such bound: with fair sharing of links, deeper prefetch lets weights that
are needed later take bandwidth from weights that are needed now, so that the step can become slower. The bound here is
a longest path over the events of a simulation (starts and ends of actions, and transfers):

* Head of an event: the longest chain of work before it, with every transfer at the full rate of its slowest port. The
  head is also at least the seconds that any one port needs for all bytes that must have passed it before the event.
* Tail of an event: defined in the same manner for the work that must follow the event.
* Bound: the largest head + tail of any event.

Overheads of actions and limits of buffers are left out (``unlimited_buffers``). The order of every lane is kept. An
action that needs a message between nodes also waits for the latency of the link. The lane that carried the message does
not wait for that latency. The actions of a lane run in order, so one number per lane (a vector clock) says which
transfers must come before an event.
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
"""Edges of every event, by event index: (index of the other event, least seconds between the two)."""


def dependency_bound(
    schedule: Schedule, cost_model: CostModel, *, steady: bool = False, physical: Topology | None = None
) -> float:
    """Return the least seconds of a step of ``schedule`` with its own order of actions.

    The module docstring defines the bound.

    Args:
        schedule: schedule of one step.
        cost_model: costs of actions and transfers; its overheads are ignored.
        steady: if True, bound one step in a series of steps, from one NORM action to the NORM of the next step. If
            False, bound a single step that begins and ends with nothing in flight. All ranks take part in NORM, updates
            follow it, and the next step's weights follow the updates. So two steps hardly overlap, and the two bounds
            are nearly equal.
        physical: nodes on which the ranks really run, as in ``play``; None for the nodes of the schedule.
    """
    relaxed, free = unlimited_buffers(schedule), cost_model.without_overheads()
    latency_s = cost_model.between.latency_s
    if not steady:
        return _Events(relaxed, free, physical, steps=1, latency_s=latency_s).longest()
    events = _Events(relaxed, free, physical, steps=2, latency_s=latency_s)
    return events.longest(after=events.norms(0), before=events.norms(1))


class _Events:
    """Graph of all events of a simulated schedule, with the least seconds between events that depend on each other.

    Events are starts and ends of action instances (one action in one step) and transfers. Their order in ``log`` keeps
    all dependencies.

    Args:
        steps: number of steps to simulate.
        latency_s: latency of a message between nodes, in seconds.
    """

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
        """Return the events at which the NORM action of ``step`` ends, one per rank."""
        numbers = (n for n in self.ends if self.record.step(n) == step and self.record.action(n).op is Op.NORM)
        return [self.ends[n] for n in numbers]

    def _number_lanes(self) -> None:
        """Fill ``place`` and ``lengths``: position of every action instance in its lane, and length of every lane.

        ``place`` maps an action instance to (lane index, position in that lane over all steps).
        """
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
        """Fill ``into`` and ``out`` with the edges between events, and ``ports`` and ``work`` with all transfers."""
        latencies: dict[int, float] = {}
        """Action instance with a transfer -> seconds before its end at which its lane is free again."""
        capacity = self.player.transfers.capacity
        self.ports: dict[Port, int] = {}
        self.work: list[tuple[int, int, float]] = []
        """(event index of a transfer, port index, seconds for which the transfer keeps the port busy)."""
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
        """Return the seconds of the longest path, which is the largest head + tail of any event.

        Args:
            after: if given, count only these events and events that depend on them.
            before: if given, count only these events and events on which they depend.
        """
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
        """Return the seconds of the longest path to every event, in one direction of time.

        Events that are not ``inside`` get ``NEVER``.

        Args:
            order: indices of all events, sources first in this direction.
            edges: per event, the edges from the events that come before it in this direction.
            inside: mask of the events that count.
            marked: event index -> (lane, position in this direction) of the action instance that the pass completes
                there.
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
        """Return True if bytes on ports are counted at event ``i``: starts and ends of COMPUTE actions and of NORM.

        That is enough, because every chain of transfers leads to one of these.
        """
        event = self.log[i]
        if isinstance(event, Transit):
            return False
        action = self.record.action(event.number)
        return action.lane is Lane.COMPUTE or action.op is Op.NORM

    def _work_on_the_way(self, inside: np.ndarray, marked: dict[int, tuple[int, int]]) -> Callable[[np.ndarray], float]:
        """Return a function from a vector clock to the busy seconds of the busiest port.

        The function adds up all transfers that the clock includes. A transfer is counted at the first of the action
        instances that take part in it.

        Args:
            inside: mask of the events whose transfers count.
            marked: event index -> (lane, position) of the action instance that is completed there.
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
        """Return the number of the action instance that starts or ends at event ``i``."""
        event = self.log[i]
        assert not isinstance(event, Transit)
        return event.number


def _reached(order: Iterable[int], edges: Edges, sources: list[int]) -> np.ndarray:
    """Return a mask of the events that a path from ``sources`` reaches; ``sources`` are included.

    Args:
        order: indices of all events in the direction of the paths.
        edges: per event, the edges from the events before it in this direction.
    """
    reached = np.zeros(len(edges), dtype=bool)
    reached[sources] = True
    for i in order:
        if not reached[i]:
            reached[i] = any(reached[other] for other, _ in edges[i])
    return reached


def unlimited_buffers(schedule: Schedule) -> Schedule:
    """Return a copy of ``schedule`` that never reuses a pooled buffer within a step, and has pools as large as needed.

    Actions and their order stay. Every write that does not also read its buffer begins a new buffer, and the pools grow
    to the number of buffers. So no action waits for readers of an earlier content, and lanes run ahead as far as their
    data allow. Homes, and copies that stay from step to step, keep their buffers, because an update in place does wait
    for the readers of the weights before the update. The next step uses the same buffers again, one step later.
    ``verify`` holds for the result."""
    renamed = [_rename(program, pools) for program, pools in zip(schedule.programs, schedule.pools, strict=True)]
    return replace(
        schedule,
        name=f"{schedule.name}, unlimited buffers",
        programs=tuple(program for program, _ in renamed),
        pools=tuple(pools for _, pools in renamed),
    )


def _rename(program: tuple[Action, ...], pools: tuple[Pool, ...]) -> tuple[tuple[Action, ...], tuple[Pool, ...]]:
    """Return ``program`` and ``pools`` with a new pooled buffer for every write that does not read its buffer."""
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
