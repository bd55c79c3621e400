"""Proves a schedule right before anything runs it.

The proof checks every action by itself (wellformed.py) and plays all programs with symbolic contents (symbolic.py),
under the rules that hold for NCCL and for gloo in strict mode:

* a lane runs its actions in their order, one at a time;
* an action starts when the actions it depends on (``Hazards``) have ended, on whichever lane they are;
* a collective starts when it is at the head of its lane on every member and ends for all at once;
* an exchange starts by itself; each of its parts ends when the peer's matching exchange has started too, and the
  exchange when all its parts have. Parts between two ranks on one lane and group match in the order in which they were
  issued;
* what ``begins_ahead`` has its buffers from the moment at which they are free, whatever its lane still waits for;
* a message gets its number when it begins, ahead or in its lane, from the counter that ``Action.counter`` names.

With ``one_thread`` a stricter rule holds: a rank's actions begin in the order of its program, each when the one before
it has ended, on whichever lane. On CUDA one thread issues all of them, and whatever blocks it (a connection that NCCL
makes, memory that the driver maps) couples all lanes. What ends although every action blocks ends wherever some do or
none: there is an order of all events that keeps to more than is asked for.

Which action the play starts first makes no difference to what it finds: order matters only where buffers or lanes
impose it. Numbers are the exception: a collective that does not begin ahead starts when nothing else can, so that
messages which may begin before it draw their numbers first.

It fails if something waits for ever; if operations of one group do not match; if messages are not numbered in the order
of the program, or a message has two numbers; if a read finds anything but what the action needs (unit, stripes,
version, contributions), or anything while it arrives; if a gradient contribution is missing or counted twice; if an
update, a loss or a part of the norm is missing, counted twice, or made from an earlier step; if activations pile up; if
a pass of a lap finds other passes in a layer's cache than all those before it; if copies that stay from step to step
are of several versions, or are read before the step has refreshed them; if a buffer is in no pool, in no use, of
another size or kind than what it holds; or if the elements between nodes differ from the closed formula.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace

from tawpipe.schedule.actions import Action, Lane, Op, Transfer
from tawpipe.schedule.buffers import Buffer
from tawpipe.schedule.hazards import Hazards
from tawpipe.schedule.proof.rendezvous import Rendezvous
from tawpipe.schedule.proof.symbolic import Content, Contents, Running, ScheduleError
from tawpipe.schedule.proof.wellformed import check_forms, check_programs
from tawpipe.schedule.sizes.traffic import link_elements
from tawpipe.schedule.step import Schedule

__all__ = ["Content", "ScheduleError", "verify"]


def verify(schedule: Schedule, *others: Schedule, steps: int | None = None, one_thread: bool = False) -> None:
    """Play some steps of a schedule, one after the other without a barrier, and check what the module's head lists.

    Before a step of a new form runs, a pipeline proves this form alone, for one thread. The proof holds for every order
    of forms: each rank then ends a step before it begins the next, which takes over nothing but weights.

    Args:
        others: schedules of the same model, nodes and settings with other micro-batches. One step of each follows, and
            ``steps`` is 1 by default.
        steps: by default 2 of training, after which all repeats, 3 laps, and 1 of other forward-only schedules: nothing
            orders the losses of one such step before those of the next, whoever plays them waits for each.
        one_thread: prove it for one issuing thread that may block at any action, see ``transform.for_one_thread``.

    Raises:
        ScheduleError: what is wrong, and where.
    """
    distinct = list({id(each): each for each in (schedule, *others)}.values())
    for each in distinct:
        check_forms(each)
    usual = 1 if others else 3 if schedule.looped else 2 if schedule.training else 1
    _ClocklessPlay([schedule] * (steps or usual) + list(others), one_thread=one_thread).run()
    for each in distinct:
        check_programs(each)
        counted = link_elements(each)
        formula = each.step.strategy.traffic(each.step, training=each.training)
        if formula is not None and counted != formula:
            raise ScheduleError(f"elements between nodes: the actions move {counted}, the formula says {formula}")


class _ClocklessPlay:
    """The clockless play: what may start starts, until all has ended or the rest waits for ever."""

    def __init__(self, schedules: Sequence[Schedule], *, one_thread: bool = False) -> None:
        self.schedules, self.topology = schedules, schedules[0].topology
        self.one_thread = one_thread
        self.contents = Contents(schedules)
        self.lanes: dict[tuple[int, Lane | None, bool], deque[Running]] = {}
        """By rank and lane; those of beginnings apart."""
        self.begun: dict[tuple[int, Buffer], list[Running]] = {}
        """Buffers of what has begun and not ended."""
        self.waiters: dict[int, list[Running]] = {}
        self.rendezvous: Rendezvous[Running] = Rendezvous(str)
        self.numbered: Counter[tuple] = Counter()
        """Numbers that a rank has drawn from a counter."""
        self.everything: list[Running] = []  # ids stay unique while their objects live
        for rank in range(self.topology.world_size):
            self._enqueue(rank)

    def _enqueue(self, rank: int) -> None:
        hazards: Hazards[int] = Hazards()
        numbers: Counter[tuple] = Counter()
        for step, schedule in enumerate(self.schedules):
            for index, action in enumerate(schedule.programs[rank]):
                running, first = Running(rank, step, index, action), list[int]()
                for message, counter in () if self.one_thread else _messages(rank, action):
                    numbers[counter] += 1
                    running.numbers[message] = numbers[counter]
                if action.begins_ahead and not self.one_thread:
                    begin = replace(running, begins=True)
                    self._append(begin, hazards.before(**action.needs_ahead))
                    first.append(id(begin))
                waits_for = hazards.add(id(running), reads=action.reads, writes=action.writes, frees=action.frees)
                self._append(running, [*waits_for, *first])

    def _append(self, running: Running, waits_for: list[int]) -> None:
        self.everything.append(running)
        running.waits = len(waits_for)
        for other in waits_for:
            self.waiters.setdefault(other, []).append(running)
        self.lanes.setdefault(self._lane(running), deque()).append(running)

    def _lane(self, running: Running) -> tuple[int, Lane | None, bool]:
        return running.rank, None if self.one_thread else running.action.lane, running.begins

    def run(self) -> None:
        ready, last = deque(self.lanes), deque[tuple[int, Lane | None, bool]]()
        finished = 0
        while ready or last:
            others = bool(ready)
            key = (ready or last).popleft()
            queue = self.lanes[key]
            if not queue or queue[0].waits or queue[0].started:
                continue
            if others and None in queue[0].numbers and not queue[0].action.begins_ahead:
                last.append(key)  # messages that begin ahead may draw their numbers before it
                continue
            for ended in self._start(queue[0]):
                finished += 1
                if not ended.begins and ended.action.begins_ahead:
                    for buffer in (*ended.action.reads, *ended.action.writes):
                        begun = self.begun.get((ended.rank, buffer), [])
                        begun[:] = [other for other in begun if (other.step, other.index) != (ended.step, ended.index)]
                lane = self.lanes[self._lane(ended)]
                assert lane[0] is ended
                lane.popleft()
                ready.append(self._lane(ended))
                for waiter in self.waiters.pop(id(ended), ()):
                    waiter.waits -= 1
                    (ready.appendleft if waiter.begins else ready.append)(self._lane(waiter))
        if finished < len(self.everything):
            stuck = "\n  ".join(str(queue[0]) for queue in self.lanes.values() if queue)
            raise ScheduleError(f"deadlock: these wait for ever\n  {stuck}")
        self.contents.expect_end()

    def _start(self, running: Running) -> list[Running]:
        """Start the head of a lane; returns the actions that end with it."""
        running.started = True
        self._check_begun(running)
        self._draw_numbers(running)
        if running.begins:
            return [running]
        if running.action.op is Op.EXCHANGE:
            return self._start_exchange(running)
        if running.action.group:
            return self._start_collective(running)
        self.contents.local(running)
        return [running]

    def _check_begun(self, running: Running) -> None:
        """What has begun and not ended has what it writes for itself, and nobody writes what it reads."""
        action, rank = running.action, running.rank
        needs = (
            action.needs_ahead if running.begins else {"reads": action.reads, "writes": (*action.writes, *action.frees)}
        )
        for name, buffers in needs.items():
            for buffer in buffers:
                for other in self.begun.get((rank, buffer), ()):
                    alone = name == "writes" or buffer in other.action.writes
                    if alone and (other.step, other.index) != (running.step, running.index):
                        raise ScheduleError(f"{buffer} belongs to what has begun, {other}: {running}")
        if running.begins:
            if both := set(action.reads) & set(action.writes):
                raise ScheduleError(f"what is sent may arrive before, in {min(both)}: {running}")
            for buffer in {buffer for buffers in needs.values() for buffer in buffers}:
                self.begun.setdefault((rank, buffer), []).append(running)

    def _draw_numbers(self, running: Running) -> None:
        """Number the messages that begin now: they must get the numbers that the program gives them."""
        ahead = running.action.begins_ahead
        for message, counter in _messages(running.rank, running.action) if running.numbers else ():
            if (ahead and (message is None or not message.send)) != running.begins:
                continue
            self.numbered[running.rank, counter] += 1
            if (number := self.numbered[running.rank, counter]) != running.numbers[message]:
                expected = f"{running.numbers[message]} in the order of the program"
                raise ScheduleError(f"a message is number {number} of {counter}, {expected}: {running}")

    def _start_exchange(self, running: Running) -> list[Running]:
        running.open_parts = len(running.action.transfers)
        ended = []
        for transfer, other, match in self.rendezvous.exchange(running, running.rank, running.action):
            if transfer.send:
                self.contents.transfer(running, transfer.buffer, other, match.buffer, transfer.unit)
            else:
                self.contents.transfer(other, match.buffer, running, transfer.buffer, transfer.unit)
            self._compare_numbers(running, transfer, other, match)
            for part in (running, other):
                part.open_parts -= 1
                if part.open_parts == 0:
                    ended.append(part)
        return ended

    def _start_collective(self, running: Running) -> list[Running]:
        members = self.topology.group(running.action.group, running.rank)
        met = self.rendezvous.collective(running, running.action, members, len(members))
        ended = sorted(met, key=lambda part: members.index(part.rank))
        for part in ended[1:]:
            self._compare_numbers(ended[0], None, part, None)
        if running.action.op in (Op.COUNT, Op.NORM):
            for part in ended:
                (self.contents.norm if part.action.op is Op.NORM else self.contents.count)(part)
        elif ended and running.action.op is Op.SIZE:
            self.contents.size(ended)
        elif ended:
            self.contents.collective(ended)
        return ended

    def _compare_numbers(
        self, running: Running, message: Transfer | None, other: Running, match: Transfer | None
    ) -> None:
        if (here := running.numbers.get(message)) != (there := other.numbers.get(match)):
            raise ScheduleError(f"a message has numbers {here} and {there}: {running} and {other}")


def _messages(rank: int, action: Action) -> list[tuple[Transfer | None, tuple]]:
    """Return the messages of an action with their counters: its transfers, or None for a collective."""
    if action.transfers:
        ways = [(t, (rank, t.peer) if t.send else (t.peer, rank)) for t in action.transfers]
        return [(transfer, action.counter(*way)) for transfer, way in ways]
    return [(None, action.counter())] if action.group else []
