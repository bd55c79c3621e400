"""Transforms: pure functions from one schedule to another."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.hazards import Hazards
from tawpipe.schedule.proof.symbolic import ScheduleError
from tawpipe.schedule.step import Schedule


def without_overlap(schedule: Schedule) -> Schedule:
    """Return a schedule of the same actions, all on the lane COMPUTE, so that computation and transfers never overlap.

    A rank computes, or takes part in one transfer, never both. The programs follow one global sequence of events, in
    which all ranks of an event take part at one time. So one lane per rank is enough: no rank waits in one transfer for
    a rank that waits in another. The order follows the original programs as closely as possible. Build ``schedule``
    with the least prefetch depth, because prefetching gains nothing here.

    Raises:
        ScheduleError: the actions cannot be put into one such sequence.
    """
    programs = tuple(
        tuple(replace(action, lane=Lane.COMPUTE) for action in program) for program in _Sequence(schedule).programs()
    )
    return replace(schedule, name=f"{schedule.name}, without overlap", programs=programs)


def for_one_thread(schedule: Schedule) -> Schedule:
    """Return a schedule of the same actions on the same lanes, ordered for one thread that may block in any action.

    Lanes and buffers keep their order, so that all dependencies and times stay the same. Returns ``schedule`` itself if
    its strategy already has one order for all ranks (``Strategy.one_order``).

    Raises:
        ScheduleError: no such order exists.
    """
    if schedule.step.strategy.one_order:
        return schedule
    return replace(schedule, programs=tuple(map(tuple, _Sequence(schedule).programs())))


@dataclass(eq=False)
class _Waiting:
    """An action that is not yet in the sequence of events.

    Args:
        rank: the rank that runs it.
        index: index in the rank's program.
        action: the action.
        waits: number of actions that it still waits for.
        waiters: actions that wait for it.
        done: True once it is in the sequence.
    """

    rank: int
    index: int
    action: Action
    waits: int
    waiters: list[_Waiting]
    done: bool = False


class _Sequence:
    """Order a step event by event. An event is one action, or all actions of a collective or of matching exchanges."""

    def __init__(self, schedule: Schedule) -> None:
        self.topology = schedule.topology
        self.heads: dict[tuple[int, Lane], deque[_Waiting]] = {}
        self.left: list[deque[_Waiting]] = []
        """Actions of every rank from the first one that is not done, in the order of its program. Some later ones may
        be done."""
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
        """Put all actions into one sequence of events, and return the actions of every rank in this order.

        Raises:
            ScheduleError: no event can be next.
        """
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
        """Return the next event: the one whose actions overtake the fewest earlier actions of their ranks.

        Raises:
            ScheduleError: no event is ready.
        """
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
        """Return the first action of a lane that is not in the sequence, if it waits for nothing; else None."""
        queue = self.heads.get((rank, lane))
        return queue[0] if queue and queue[0].waits == 0 else None

    def _event(self, rank: int, lane: Lane) -> list[_Waiting]:
        """Return all actions of the event that begins with the first action of a lane; empty if one is not ready."""
        head = self._head(rank, lane)
        if head is None:
            return []
        if head.action.op is Op.EXCHANGE:
            return self._exchanges(head)
        if not head.action.group:
            return [head]
        heads = [self._head(member, lane) for member in self.topology.group(head.action.group, rank)]
        ready = [
            other
            for other in heads
            if other and other.action.group == head.action.group and other.action.op is head.action.op
        ]
        return ready if len(ready) == len(heads) else []

    def _exchanges(self, head: _Waiting) -> list[_Waiting]:
        """Return all EXCHANGE actions that must run at one time so that ``head`` and each of them can end.

        Empty if one of them is not ready, or if sends and receives do not match.
        """
        by_rank, open_ranks = {head.rank: head}, [head.rank]
        while open_ranks:
            for transfer in by_rank[open_ranks.pop()].action.transfers:
                if transfer.peer not in by_rank:
                    other = self._head(transfer.peer, head.action.lane)
                    if other is None or other.action.op is not Op.EXCHANGE:
                        return []
                    by_rank[transfer.peer] = other
                    open_ranks.append(transfer.peer)
        sends: dict[tuple[int, int], list[int]] = {}
        receives: dict[tuple[int, int], list[int]] = {}
        for rank, waiting in by_rank.items():
            for transfer in waiting.action.transfers:
                way = (rank, transfer.peer) if transfer.send else (transfer.peer, rank)
                (sends if transfer.send else receives).setdefault(way, []).append(transfer.unit)
        return list(by_rank.values()) if sends == receives else []
