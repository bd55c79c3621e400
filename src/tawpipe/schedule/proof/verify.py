"""Proof of a schedule: check that it is right before it runs.

The proof checks every action by itself (wellformed.py). Then it simulates all programs with symbolic contents
(symbolic.py), under rules that hold for NCCL and for gloo in strict mode:

* A lane runs its actions in order, one at a time.
* An action starts when the actions that it depends on (``Hazards``) have ended, on any lane.
* A collective starts when it is the first action of its lane on every member. It ends on all members at once.
* An exchange starts by itself. Each of its transfers ends when the peer's matching exchange has started, too. The
  exchange ends when all its transfers have ended. Transfers between two ranks on one lane and group match in the order
  in which they were issued.
* The early part of an action (``begins_early``) owns its buffers as soon as they are free, even if its lane is busy.
* A message gets its number when it begins, early or in its lane, from the counter that ``Action.counter`` names.

With ``one_thread`` a stricter rule holds: a rank's actions start in the order of its program, each when the one before
it has ended, on any lane. On CUDA one thread issues all actions. A call that blocks it (NCCL makes a connection, the
driver maps memory) stops all lanes. If a schedule ends although every action blocks, it also ends if only some block.

The result does not depend on which ready action is simulated first: order matters only where buffers or lanes enforce
it. Numbers are an exception. A collective that does not begin ahead starts only when nothing else can, so that messages
which may begin before it get their numbers first.

The proof fails if

* actions deadlock;
* operations of one group do not match;
* messages are not numbered in the order of the program, or a message has two numbers;
* a read finds anything but the unit, shards, version and contributions that the action needs, or reads a buffer while
  data arrives in it;
* a gradient contribution is missing or counted twice;
* an update, a loss or a part of the norm is missing, counted twice, or from an earlier step;
* activations are never freed;
* a pass of a decode step finds other passes in a layer's cache than all passes before it;
* copies that stay from step to step have several versions, or are read before this step has refreshed them;
* a buffer is in no pool, unused, or has another size or kind than its content;
* the elements sent between nodes differ from the closed formula.
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
    """Simulate some steps of a schedule without a barrier between them, and check the rules of this module.

    Before a step of a new form runs, a pipeline proves this form alone, for one thread. The proof then holds for every
    sequence of forms, because each rank ends a step before it begins the next, and only weights pass from step to step.

    Args:
        schedule: the schedule to prove.
        others: schedules of the same model, nodes and settings with other micro-batches. One step of each follows, and
            the default of ``steps`` is then 1.
        steps: number of steps of ``schedule``. By default 2 for training, after which all repeats, 3 for decode steps,
            and 1 for other forward-only schedules. The losses of two such steps are not ordered, so callers wait for
            each step.
        one_thread: True to prove it for one issuing thread that may block in any action, see
            ``transform.for_one_thread``.

    Raises:
        ScheduleError: the schedule is wrong; the message says what and where.
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
    """Simulation without times: ready actions start until all have ended, or the rest is in a deadlock."""

    def __init__(self, schedules: Sequence[Schedule], *, one_thread: bool = False) -> None:
        self.schedules, self.topology = schedules, schedules[0].topology
        self.one_thread = one_thread
        self.contents = Contents(schedules)
        self.lanes: dict[tuple[int, Lane | None, bool], deque[Running]] = {}
        """(Rank, lane, early part) -> actions in order. Early parts of a lane have a queue of their own."""
        self.begun: dict[tuple[int, Buffer], list[Running]] = {}
        """(Rank, buffer) -> early parts that use it and whose actions have not ended."""
        self.waiters: dict[int, list[Running]] = {}
        self.rendezvous: Rendezvous[Running] = Rendezvous(str)
        self.numbered: Counter[tuple] = Counter()
        """(Rank, counter) -> number of messages that it has numbered."""
        self.everything: list[Running] = []  # keeps objects alive, so that ids stay unique
        for rank in range(self.topology.world_size):
            self._enqueue(rank)

    def _enqueue(self, rank: int) -> None:
        """Put all actions of ``rank`` in all steps into the queues of their lanes.

        Sets the actions for which each must wait, and the numbers that its messages must get. An action that begins
        ahead also gets an early part, in a queue of its own. With ``one_thread`` there are no early parts and no
        numbers."""
        hazards: Hazards[int] = Hazards()
        numbers: Counter[tuple] = Counter()
        for step, schedule in enumerate(self.schedules):
            for index, action in enumerate(schedule.programs[rank]):
                running, first = Running(rank, step, index, action), list[int]()
                for message, counter in () if self.one_thread else _messages(rank, action):
                    numbers[counter] += 1
                    running.numbers[message] = numbers[counter]
                if action.begins_early and not self.one_thread:
                    begin = replace(running, begins=True)
                    self._append(begin, hazards.before(**action.early_needs))
                    first.append(id(begin))
                waits_for = hazards.add(id(running), reads=action.reads, writes=action.writes, frees=action.frees)
                self._append(running, [*waits_for, *first])

    def _append(self, running: Running, waits_for: list[int]) -> None:
        """Put an action into the queue of its lane, where it waits for the actions with given ids."""
        self.everything.append(running)
        running.waits = len(waits_for)
        for other in waits_for:
            self.waiters.setdefault(other, []).append(running)
        self.lanes.setdefault(self._lane(running), deque()).append(running)

    def _lane(self, running: Running) -> tuple[int, Lane | None, bool]:
        """Return the key of an action's queue: (rank, lane or None with ``one_thread``, True for an early part)."""
        return running.rank, None if self.one_thread else running.action.lane, running.begins

    def run(self) -> None:
        """Simulate all actions.

        Raises:
            ScheduleError: a deadlock, or anything that an action finds wrong.
        """
        ready, last = deque(self.lanes), deque[tuple[int, Lane | None, bool]]()
        finished = 0
        while ready or last:
            others = bool(ready)
            key = (ready or last).popleft()
            queue = self.lanes[key]
            if not queue or queue[0].waits or queue[0].started:
                continue
            if others and None in queue[0].numbers and not queue[0].action.begins_early:
                last.append(key)  # messages that begin ahead are numbered first
                continue
            for ended in self._start(queue[0]):
                finished += 1
                if not ended.begins and ended.action.begins_early:
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
        """Start ``running``, the first action of its queue, and return all actions that end now.

        An exchange or collective ends only when its other members have started. It is then returned together with them.
        """
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
        """Check that no action writes a buffer that an early part uses, or uses a buffer that an early part writes.

        If ``running`` is an early part itself, its buffers are recorded until its action ends.

        Raises:
            ScheduleError: such a use, or an early part that reads and writes one buffer.
        """
        action, rank = running.action, running.rank
        needs = (
            action.early_needs if running.begins else {"reads": action.reads, "writes": (*action.writes, *action.frees)}
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
        """Give numbers to the messages that begin now, and check that they equal those in the program's order.

        Raises:
            ScheduleError: a message gets another number.
        """
        early = running.action.begins_early
        for message, counter in _messages(running.rank, running.action) if running.numbers else ():
            if (early and (message is None or not message.send)) != running.begins:
                continue
            self.numbered[running.rank, counter] += 1
            if (number := self.numbered[running.rank, counter]) != running.numbers[message]:
                expected = f"{running.numbers[message]} in the order of the program"
                raise ScheduleError(f"a message is number {number} of {counter}, {expected}: {running}")

    def _start_exchange(self, running: Running) -> list[Running]:
        """Match the transfers of an exchange with waiting ones; return the exchanges of which no transfer is left.

        The content of every matched transfer is moved to the receiver. Other transfers wait for their other side."""
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
        """Register a rank at a collective, SIZE, COUNT or NORM, and run it once all members have arrived.

        Returns the actions of all members then, and an empty list before."""
        members = self.topology.group(running.action.group, running.rank)
        parts = self.rendezvous.collective(running, running.action, members, len(members))
        ended = sorted(parts, key=lambda part: members.index(part.rank))
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
        """Check that a message has equal numbers on both sides.

        Raises:
            ScheduleError: the numbers differ.
        """
        if (here := running.numbers.get(message)) != (other_numbers := other.numbers.get(match)):
            raise ScheduleError(f"a message has numbers {here} and {other_numbers}: {running} and {other}")


def _messages(rank: int, action: Action) -> list[tuple[Transfer | None, tuple]]:
    """Return (message, key of its counter) for every message of an action.

    A message is a transfer of an exchange, or None for a collective. Empty for actions without communication."""
    if action.transfers:
        ways = [(t, (rank, t.peer) if t.send else (t.peer, rank)) for t in action.transfers]
        return [(transfer, action.counter(*way)) for transfer, way in ways]
    return [(None, action.counter())] if action.group else []
