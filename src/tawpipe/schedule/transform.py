"""Transforms: pure functions from a schedule to another one."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.hazards import Hazards
from tawpipe.schedule.proof.symbolic import ScheduleError
from tawpipe.schedule.step import Schedule


def without_overlap(schedule: Schedule) -> Schedule:
    """The same actions with everything on the lane COMPUTE: a rank computes, or takes part in one transfer, never both.

    The order is that of one global sequence of events in which all ranks that an event concerns take part at once, so
    that one lane a rank is enough: nobody waits in one transfer for a rank that waits in another. It keeps to the
    programs' own order as closely as that allows; build the schedule with the least look-ahead, which now buys nothing.

    Raises:
        ScheduleError: the schedule cannot be put in such a sequence.
    """
    programs = tuple(
        tuple(replace(action, lane=Lane.COMPUTE) for action in program) for program in _Sequence(schedule).programs()
    )
    return replace(schedule, name=f"{schedule.name}, without overlap", programs=programs)


def for_one_thread(schedule: Schedule) -> Schedule:
    """The same actions on the same lanes, in programs that one thread can issue which may block at any of them.

    Lanes keep their order, and buffers theirs, so that what waits for what, and every time, stays as it was. Strategies
    whose ranks all go through one order (``Strategy.one_order``) are left as they are.

    Raises:
        ScheduleError: there is no such order.
    """
    if schedule.step.strategy.one_order:
        return schedule
    return replace(schedule, programs=tuple(map(tuple, _Sequence(schedule).programs())))


@dataclass(eq=False)
class _Waiting:
    """An action that has not had its turn."""

    rank: int
    index: int
    action: Action
    waits: int
    waiters: list[_Waiting]
    done: bool = False


class _Sequence:
    """Plays a step event by event. An event is one action, or all actions that meet in a collective or exchanges."""

    def __init__(self, schedule: Schedule) -> None:
        self.topology = schedule.topology
        self.heads: dict[tuple[int, Lane], deque[_Waiting]] = {}
        self.left: list[deque[_Waiting]] = []
        """The actions of every rank that have not had their turn, and some that have, in the program's order."""
        for rank, program in enumerate(schedule.programs):
            hazards: Hazards[_Waiting] = Hazards()
            self.left.append(deque())
            for index, action in enumerate(program):
                waits_for = hazards.before(reads=action.reads, writes=action.writes, frees=action.frees)
                waiting = _Waiting(rank, index, action, len(waits_for), [])
                for other in waits_for:
                    other.waiters.append(waiting)
                hazards.record(waiting, reads=action.reads, writes=action.writes, frees=action.frees)
                self.heads.setdefault((rank, action.lane), deque()).append(waiting)
                self.left[rank].append(waiting)

    def programs(self) -> list[list[Action]]:
        """The actions of every rank in the order of the events."""
        programs: list[list[Action]] = [[] for _ in range(self.topology.world_size)]
        while any(self.left):
            event = self._next()
            for waiting in event:
                self.heads[waiting.rank, waiting.action.lane].popleft()
                programs[waiting.rank].append(waiting.action)
                waiting.done = True
                for other in waiting.waiters:
                    other.waits -= 1
            for rank in {waiting.rank for waiting in event}:
                while self.left[rank] and self.left[rank][0].done:
                    self.left[rank].popleft()
        return programs

    def _next(self) -> list[_Waiting]:
        """The event that is closest to the programs' order: whose members overtake the fewest actions of their rank."""
        best: list[_Waiting] = []
        fewest = -1
        for (rank, lane), queue in self.heads.items():
            if queue and (event := self._event(rank, lane)):
                overtaken = max(waiting.index - self.left[waiting.rank][0].index for waiting in event)
                if overtaken == 0:
                    return event
                if fewest < 0 or overtaken < fewest:
                    best, fewest = event, overtaken
        if not best:
            stuck = "\n  ".join(str(queue[0].action) for queue in self.heads.values() if queue)
            raise ScheduleError(f"these can never meet all at once:\n  {stuck}")
        return best

    def _head(self, rank: int, lane: Lane) -> _Waiting | None:
        queue = self.heads.get((rank, lane))
        return queue[0] if queue and queue[0].waits == 0 else None

    def _event(self, rank: int, lane: Lane) -> list[_Waiting]:
        """What would happen together with the head of a lane, or nothing if somebody is not ready for it."""
        head = self._head(rank, lane)
        if head is None:
            return []
        if head.action.op is Op.EXCHANGE:
            return self._exchanges(head)
        if not head.action.group:
            return [head]
        heads = [self._head(member, lane) for member in self.topology.group(head.action.group, rank)]
        met = [
            other
            for other in heads
            if other and other.action.group == head.action.group and other.action.op is head.action.op
        ]
        return met if len(met) == len(heads) else []

    def _exchanges(self, head: _Waiting) -> list[_Waiting]:
        """All exchanges that have to be under way for this one to end, and for those to end."""
        met, open_ranks = {head.rank: head}, [head.rank]
        while open_ranks:
            for transfer in met[open_ranks.pop()].action.transfers:
                if transfer.peer not in met:
                    other = self._head(transfer.peer, head.action.lane)
                    if other is None or other.action.op is not Op.EXCHANGE:
                        return []
                    met[transfer.peer] = other
                    open_ranks.append(transfer.peer)
        sends: dict[tuple[int, int], list[int]] = {}
        receives: dict[tuple[int, int], list[int]] = {}
        for rank, waiting in met.items():
            for transfer in waiting.action.transfers:
                way = (rank, transfer.peer) if transfer.send else (transfer.peer, rank)
                (sends if transfer.send else receives).setdefault(way, []).append(transfer.unit)
        return list(met.values()) if sends == receives else []
