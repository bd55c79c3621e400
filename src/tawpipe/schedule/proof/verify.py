"""Proves a schedule right before anything runs it. Imports schedule only.

The proof checks every action by itself (forms.py) and plays all programs with symbolic contents (contents.py), under
the rules that hold for NCCL and for gloo in strict mode:

* a lane runs its actions in their order, one at a time;
* an action starts when the actions it depends on (``Hazards``) have ended, on whichever lane they are;
* a collective starts when it is at the head of its lane on every member and ends for all at once;
* an exchange starts by itself; each of its parts ends when the peer's matching exchange has started too, and the
  exchange when all its parts have. Parts between two ranks on one lane and group match in the order in which they were
  issued.

Which action the play starts first makes no difference to what it finds: order matters only where buffers or lanes
impose it.

It fails if something waits for ever; if operations of one group do not match; if a read finds anything but what the
action needs (unit, stripes, version, contributions); if a gradient contribution is missing or counted twice; if an
update, a loss or a part of the norm is missing, counted twice, or made from an earlier step; if activations pile up;
if a buffer is in no pool, in no use, of another size or kind than what it holds; or if the elements between nodes
differ from the closed formula.
"""

from __future__ import annotations

from collections import deque

from tawpipe.schedule.actions import Action, Lane, Op, Transfer
from tawpipe.schedule.hazards import Hazards
from tawpipe.schedule.proof.symbolic import Content, Contents, Running, ScheduleError
from tawpipe.schedule.proof.wellformed import check_forms, check_programs
from tawpipe.schedule.spec import Schedule
from tawpipe.schedule.traffic import link_elements, link_elements_formula

__all__ = ["Content", "ScheduleError", "verify"]


def verify(schedule: Schedule, *, steps: int | None = None) -> None:
    """Play some steps of a schedule, one after the other without a barrier, and check what the module's head lists.

    Args:
        steps: by default 2 of training, after which all repeats, and 1 of a forward-only schedule: nothing orders
            the losses of one such step before those of the next, whoever plays them waits for each.

    Raises:
        ScheduleError: what is wrong, and where.
    """
    check_forms(schedule)
    _Play(schedule, steps or (2 if schedule.training else 1)).run()
    check_programs(schedule)
    counted, formula = link_elements(schedule), link_elements_formula(schedule)
    if counted != formula:
        raise ScheduleError(f"elements between nodes: the actions move {counted}, the formula says {formula}")


class _Play:
    """The clockless play: what may start starts, until all has ended or the rest waits for ever."""

    def __init__(self, schedule: Schedule, steps: int) -> None:
        self.schedule, self.steps, self.topology = schedule, steps, schedule.topology
        self.contents = Contents(schedule)
        self.lanes: dict[tuple[int, Lane], deque[Running]] = {}
        self.waiters: dict[int, list[Running]] = {}
        self.sends: dict[tuple, deque[tuple[Running, Transfer]]] = {}
        self.receives: dict[tuple, deque[tuple[Running, Transfer]]] = {}
        self.gathering: dict[tuple, list[Running]] = {}
        self.everything: list[Running] = []  # ids stay unique while their objects live
        for rank in range(self.topology.world_size):
            self._enqueue(rank)

    def _enqueue(self, rank: int) -> None:
        hazards: Hazards[int] = Hazards()
        for step in range(self.steps):
            for index, action in enumerate(self.schedule.programs[rank]):
                running = Running(rank, step, index, action)
                self.everything.append(running)
                found = hazards.add(id(running), reads=action.reads, writes=action.writes, frees=action.frees)
                running.waits = len(found)
                for other in found:
                    self.waiters.setdefault(other, []).append(running)
                self.lanes.setdefault((rank, action.lane), deque()).append(running)

    def run(self) -> None:
        ready = deque(self.lanes)
        finished = 0
        while ready:
            key = ready.popleft()
            queue = self.lanes[key]
            if not queue or queue[0].waits or queue[0].started:
                continue
            for ended in self._start(queue[0]):
                finished += 1
                lane = self.lanes[ended.rank, ended.action.lane]
                assert lane[0] is ended
                lane.popleft()
                ready.append((ended.rank, ended.action.lane))
                for waiter in self.waiters.pop(id(ended), ()):
                    waiter.waits -= 1
                    ready.append((waiter.rank, waiter.action.lane))
        if finished < len(self.everything):
            stuck = "\n  ".join(str(queue[0]) for queue in self.lanes.values() if queue)
            raise ScheduleError(f"deadlock: these wait for ever\n  {stuck}")
        self.contents.expect_end(self.steps)

    def _start(self, running: Running) -> list[Running]:
        """Start the head of a lane; returns the actions that end with it."""
        running.started = True
        if running.action.op is Op.EXCHANGE:
            return self._start_exchange(running)
        if running.action.group:
            return self._start_collective(running)
        self.contents.local(running)
        return [running]

    def _start_exchange(self, running: Running) -> list[Running]:
        running.open_parts = len(running.action.transfers)
        ended = []
        for transfer in running.action.transfers:
            sender, receiver = (running.rank, transfer.peer) if transfer.send else (transfer.peer, running.rank)
            key = (running.action.lane, running.action.group, sender, receiver)
            mine, theirs = (self.sends, self.receives) if transfer.send else (self.receives, self.sends)
            waiting = theirs.get(key)
            if not waiting:
                mine.setdefault(key, deque()).append((running, transfer))
                continue
            other, match = waiting.popleft()
            if match.unit != transfer.unit:
                raise ScheduleError(f"a send meets the receive of another unit: {running} and {other}")
            if transfer.send:
                self.contents.transfer(running, transfer.buffer, other, match.buffer, transfer.unit)
            else:
                self.contents.transfer(other, match.buffer, running, transfer.buffer, transfer.unit)
            for part in (running, other):
                part.open_parts -= 1
                if part.open_parts == 0:
                    ended.append(part)
        return ended

    def _start_collective(self, running: Running) -> list[Running]:
        members = self.topology.group(running.action.group, running.rank)
        here = self.gathering.setdefault((running.action.lane, running.action.group, members), [])
        if here and _operation(here[0].action) != _operation(running.action):
            raise ScheduleError(f"members of a group issue different operations: {running} and {here[0]}")
        here.append(running)
        if len(here) < len(members):
            return []
        ended = sorted(here, key=lambda part: members.index(part.rank))
        here.clear()
        if running.action.op in (Op.COUNT, Op.NORM):
            for part in ended:
                (self.contents.norm if part.action.op is Op.NORM else self.contents.count)(part)
        else:
            self.contents.collective(ended)
        return ended


def _operation(action: Action) -> tuple:
    return action.op, action.collective, action.unit, action.root, action.wire
