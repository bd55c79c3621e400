"""Plays a schedule against the clock of a cost model.

The rules are those that ``schedule/proof/verify.py`` proves and the runtime follows:

* a lane runs its actions in their order, one at a time; the lanes of a rank run side by side;
* an action starts when its lane is free and what it depends on (``Hazards``, from step to step) has ended;
* a collective begins when it has started on all its members, and ends for all at once;
* each part of an exchange begins when both sides have started, and the exchange ends with its last part;
* a message holds its sender, and the lane that receives it, for its bytes and not for the latency of the last one: what
  begins ahead (``Action.begins_ahead``) may follow on that lane;
* where homes are in the host's memory, all lanes of a rank share its link to the host, each way.

Compute takes the cost model's seconds. A transfer shares the ports on its way with whatever else is in flight
(``network.py``), between its latencies. Steps follow each other without a barrier, as they do in the runtime.

The play is in proportion to ranks x actions x steps. A step repeats: its dependencies are derived once and shifted, and
from the second or third step on the times repeat too, so that few steps tell about all. Where units and nodes are even,
the rails are alike, and so are the rounds in the middle of a step: one rail with its share of every port, and few
rounds, can then stand for all of them.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.hazards import Hazards
from tawpipe.schedule.proof.rendezvous import Rendezvous
from tawpipe.schedule.proof.symbolic import ScheduleError
from tawpipe.schedule.step import Schedule
from tawpipe.simulate.cost_model import CostModel
from tawpipe.simulate.network import Flow, Network
from tawpipe.simulate.timeline import NodeBytes, Record, Timeline
from tawpipe.simulate.transfers import Load, Transfers
from tawpipe.topology import Topology

HOSTED = (Op.UPDATE, Op.ADD, Op.RAISE, Op.OFFLOAD, Op.RELOAD)
"""Operations that may pass the link between a device and its host."""


def play(schedule: Schedule, cost_model: CostModel, *, steps: int = 4, physical: Topology | None = None) -> Timeline:
    """When every action of ``steps`` successive steps starts and ends.

    Args:
        steps: at least 1. With 4 the third is free of the first one's start and of the last one's end.
        physical: the nodes that the ranks really are on, where the schedule was built for others (without grouping: for
            nodes of one rank each). Links are those of these nodes.

    Raises:
        ScheduleError: something waits for ever, or operations of a group do not match; with what waits for what.
        UserError: the cost model lacks a block.
    """
    assert steps >= 1
    return Player(schedule, cost_model, steps, physical).run()


def dependencies(program: tuple[Action, ...]) -> tuple[list[list[int]], list[list[int]]]:
    """Actions on other lanes that each action waits for: (in its own step, in the step before), as indices.

    Every step after the first has the same dependencies, because every buffer that is written at all is written in
    every step.
    """
    hazards: Hazards[int] = Hazards()
    size = len(program)
    for index, action in enumerate(program):
        hazards.record(index, reads=action.reads, writes=action.writes, frees=action.frees)
    same: list[list[int]] = []
    before: list[list[int]] = []
    for index, action in enumerate(program):
        awaited = hazards.add(size + index, reads=action.reads, writes=action.writes, frees=action.frees)
        same.append([i - size for i in awaited if i >= size and program[i - size].lane is not action.lane])
        before.append([i for i in awaited if i < size and program[i].lane is not action.lane])
    return same, before


@dataclass(eq=False, slots=True)
class _Lane:
    """One lane of one rank: the actions of a step, and how far it is; ``first`` is the number of the rank's first
    instance in the step that the lane is in. ``landing`` counts those that it is done with and that have not ended.
    """

    rank: int
    order: list[int]
    first: int
    step: int = 0
    position: int = 0
    busy: bool = False
    landing: int = 0


@dataclass(slots=True)
class LaneGranted:
    """In the log: an instance got its lane."""

    number: int


@dataclass(slots=True)
class End:
    """In the log: an instance is done."""

    number: int


@dataclass(eq=False, slots=True)
class Transit:
    """A transfer that has begun: which instances take part, when it began, which of them came last; and of a message
    the sender, else -1.
    """

    load: Load
    members: tuple[int, ...]
    began: float
    latest: int
    sender: int = -1


class Player:
    """The play. Instances of actions are numbered: those of a rank one after the other, step by step.

    ``log`` keeps the order of all starts, ends and transits: one in which nothing comes before what it depends on.
    """

    def __init__(self, schedule: Schedule, cost_model: CostModel, steps: int, physical: Topology | None = None) -> None:
        cost_model = cost_model.in_sets(schedule.step.sequence_ranks, schedule.step.shared)
        self.schedule, self.cost_model, self.steps = schedule, cost_model, steps
        self.physical = physical or schedule.topology
        assert self.physical.world_size == schedule.topology.world_size
        self.transfers = Transfers(schedule, cost_model, self.physical)
        self.network = Network(self.transfers.capacity)
        self.record = Record(schedule, steps)
        total = self.record.total
        self.start, self.begin, self.end = self.record.start, self.record.begin, self.record.end
        self.open_parts = [0] * total
        self.open_bytes = [0] * total
        """Of transfers, parts that are not there, and parts whose bytes have not passed."""
        self.waits = [0] * total
        self.bytes = [[NodeBytes() for _ in range(self.physical.num_nodes)] for _ in range(steps)]
        self.events: list[tuple[float, int, int, object]] = []
        self.count = 0
        self.lanes: list[_Lane] = []
        self._seconds: list[list[float | None]] = [[None] * size for size in self.record.sizes]
        """What ``seconds`` said of actions of a rank: it says the same in every step."""
        self.lane_of: list[list[_Lane]] = []
        self.same_step: list[list[list[int]]] = []
        self.next_step: list[list[list[int]]] = []
        self.rendezvous: Rendezvous[int] = Rendezvous(self.record.text)
        self._loads: dict[tuple[int, int], Load | None] = {}
        """Of actions of ranks, what passes the link to the host."""
        self._groups: dict[tuple[str, int], tuple[int, ...]] = {}
        self._taking_part: dict[tuple[int, str], int] = {}
        """First member and group -> how many are played; the others do what these do, when they do."""
        self.log: list[LaneGranted | End | Transit] = []
        for rank, program in enumerate(schedule.programs):
            self._prepare(rank, program)

    def _prepare(self, rank: int, program: tuple[Action, ...]) -> None:
        same, before = dependencies(program)
        followers: tuple[list[list[int]], list[list[int]]] = ([[] for _ in program], [[] for _ in program])
        for waiting, sources in zip(followers, (same, before), strict=True):
            for index, needed in enumerate(sources):
                for source in needed:
                    waiting[source].append(index)
        self.same_step.append(followers[0])
        self.next_step.append(followers[1])
        for step in range(self.steps):
            for index in range(len(program)):
                number = self.record.number(rank, step, index)
                self.waits[number] = len(same[index]) + (len(before[index]) if step else 0)
        lanes: dict[Lane, _Lane] = {}
        for index, action in enumerate(program):
            if action.lane not in lanes:
                lanes[action.lane] = _Lane(rank, [], self.record.base[rank])
            lanes[action.lane].order.append(index)
        self.lane_of.append([lanes[action.lane] for action in program])
        self.lanes.extend(lanes.values())

    # the loop

    def run(self) -> Timeline:
        for lane in self.lanes:
            self._try(lane, 0.0, -1)
        while self.events:
            now, _, kind, what = heapq.heappop(self.events)
            if kind in (_ENDED, _LANDED):
                assert isinstance(what, int)
                self._ended(what, now) if kind == _ENDED else self._landed(what, now)
            elif kind == _ON_THE_WAY:
                assert isinstance(what, Transit)
                self.network.add(Flow(what.load.ports, what))
            elif isinstance(what, tuple):
                flow, version = what
                if flow.version == version:
                    self.network.remove(flow)
                    self._arrived(flow.what, now)
            else:
                assert isinstance(what, Transit)
                self._arrived(what, now)
            if not self.events or self.events[0][0] > now:
                for when, flow in self.network.settle(now):  # once for all that happens at one time
                    self._at(when, _ARRIVED, (flow, flow.version))
        if any(lane.step < self.steps for lane in self.lanes):
            raise ScheduleError(self._deadlock())
        moved = tuple(tuple(nodes) for nodes in self.bytes)
        return Timeline(self.schedule, self.physical, self.record, moved)

    def _at(self, when: float, kind: int, what: object) -> None:
        self.count += 1
        heapq.heappush(self.events, (when, self.count, kind, what))

    # actions

    def _try(self, lane: _Lane, now: float, cause: int) -> None:
        """Start the head of a lane if nothing holds it back; ``cause`` is what has just ended."""
        if lane.busy or lane.step == self.steps:
            return
        index = lane.order[lane.position]
        number = lane.first + index
        action = self.schedule.programs[lane.rank][index]
        if self.waits[number] or (lane.landing and not _may_follow(action)):
            return
        lane.busy = True
        self._note_start(number, now, cause)
        if action.op is Op.EXCHANGE:
            self._start_exchange(lane.rank, number, action, now)
        elif action.group:
            self._start_collective(lane.rank, number, action, now)
        elif load := self._hosted(lane.rank, index):
            self._go(Transit(load, (number,), now, number))
        else:
            self._go_on(lane, now)

    def _hosted(self, rank: int, index: int) -> Load | None:
        """The load of an action on the link to the host, see ``Transfers.hosted``."""
        action = self.schedule.programs[rank][index]
        if not self.schedule.step.homes_in_host or action.op not in HOSTED:
            return None
        if (rank, index) not in self._loads:
            least = 0.0 if action.op in (Op.OFFLOAD, Op.RELOAD) else self.seconds(rank, action)
            self._loads[rank, index] = self.transfers.hosted(rank, action, least)
        return self._loads[rank, index]

    def _note_start(self, number: int, now: float, cause: int) -> None:
        self.start[number] = now
        self.log.append(LaneGranted(number))
        self.record.cause[number] = cause

    def _go_on(self, lane: _Lane, now: float) -> None:
        """Let the head of a lane run, which has started and which no other rank takes part in, and at once what follows
        it there, as long as no other lane waits for the end of the one and nothing holds the next one back.
        """
        program, seconds = self.schedule.programs[lane.rank], self._seconds[lane.rank]
        same, later = self.same_step[lane.rank], self.next_step[lane.rank]
        while True:
            index = lane.order[lane.position]
            number = lane.first + index
            self.begin[number] = now
            if (taken := seconds[index]) is None:
                taken = seconds[index] = self.seconds(lane.rank, program[index])
            now += taken
            if same[index] or later[index] or lane.position + 1 == len(lane.order):
                break
            after = lane.order[lane.position + 1]
            grouped = program[after].group  # of exchanges, too
            if self.waits[lane.first + after] or grouped or self._hosted(lane.rank, after):
                break
            self.end[number] = now
            self.log.append(End(number))
            lane.position += 1
            self._note_start(lane.first + after, now, number)
        self._at(now, _ENDED, number)

    def seconds(self, rank: int, action: Action) -> float:
        """Seconds of an action that no other rank takes part in."""
        costs = self.cost_model
        if action.op is Op.FORWARD:
            work = max(costs.forward_s(rank, action.block, action.micro_batch), costs.streaming_s(action))
        elif action.op is Op.BACKWARD:
            again = self.schedule.step.recomputes(action.block, action.micro_batch)
            work = max(
                costs.backward_s(rank, action.block, action.micro_batch, again), costs.streaming_s(action, passes=2)
            )
        elif action.op is Op.KEYS:
            work = max(costs.keys_s(rank, action.block, action.micro_batch), costs.streaming_s(action))
        elif action.op is Op.KEYS_BACKWARD:  # once more, and the gradients of its input and its weights
            work = max(3 * costs.keys_s(rank, action.block, action.micro_batch), costs.streaming_s(action))
        elif action.op is Op.BACKWARD_INPUT:
            again = self.schedule.step.recomputes(action.block, action.micro_batch)
            work = costs.backward_s(rank, action.block, action.micro_batch, again)
            work -= costs.backward_weight_s(rank, action.block, action.micro_batch)
        elif action.op is Op.BACKWARD_WEIGHT:
            work = costs.backward_weight_s(rank, action.block, action.micro_batch)
        elif action.op is Op.UPDATE:
            work = costs.update_seconds(rank, self.schedule.homes[action.unit].stripe, action.unit)
        elif action.op is Op.ADD:
            work = costs.add_s * self.transfers.elements(rank, action.writes[0])
        elif action.op in (Op.OFFLOAD, Op.RELOAD):
            work = costs.host_s(action)
        elif action.op in (Op.ZERO, Op.PREPARE, Op.RAISE):
            work = 0.0
        else:
            raise ScheduleError(f"unknown cost of an action: rank {rank}: {action}")
        if action.op in (Op.FORWARD, Op.BACKWARD):
            work += costs.unpack_s(rank, action.block) / self.schedule.step.settings.micro_batches_per_visit
        return work + costs.action_s

    def _start_collective(self, rank: int, number: int, action: Action, now: float) -> None:
        members = self._members(action.group, rank)
        self.open_parts[number] = self.open_bytes[number] = 1
        here = self.rendezvous.collective(number, action, members, self._taking_part[members[0], action.group])
        if not here:
            return
        if action.op in (Op.SIZE, Op.COUNT, Op.NORM):
            load = self.transfers.norm(action, members, rank)
        else:
            payer = next(n for n in here if action.root < 0 or self.record.rank(n) == action.root)
            load = self.transfers.collective(self.record.action(payer), members, self.record.rank(payer))
        self._go(Transit(load, tuple(here), now, number))

    def _members(self, group: str, rank: int) -> tuple[int, ...]:
        if (group, rank) not in self._groups:
            members = self._groups[group, rank] = self.schedule.topology.group(group, rank)
            self._taking_part[members[0], group] = sum(bool(self.schedule.programs[member]) for member in members)
        return self._groups[group, rank]

    def _start_exchange(self, rank: int, number: int, action: Action, now: float) -> None:
        self.open_parts[number] = self.open_bytes[number] = len(action.transfers)
        for transfer, other, _ in self.rendezvous.exchange(number, rank, action):
            sender, receiver = (rank, transfer.peer) if transfer.send else (transfer.peer, rank)
            load = self.transfers.part(sender, receiver, transfer, action.compression)
            self._go(Transit(load, (number, other), now, number, number if transfer.send else other))

    def _go(self, transit: Transit) -> None:
        load, step = transit.load, self.record.step(transit.latest)
        for node, amount in load.sent:
            self.bytes[step][node].sent += amount
        for node, amount in load.received:
            self.bytes[step][node].received += amount
        for node, amount in load.inside:
            self.bytes[step][node].inside += amount
        self.log.append(transit)
        ready = transit.began + load.delay_s + self.cost_model.action_s
        self._at(ready, _ON_THE_WAY if load.ports else _ARRIVED, transit)

    def _arrived(self, transit: Transit, now: float) -> None:
        if now < (least := transit.began + transit.load.least_s):
            self._at(least, _ARRIVED, transit)
            return
        for number in transit.members:
            self.begin[number] = transit.began
            self.record.latest[number] = transit.latest
            self.open_bytes[number] -= 1
            if transit.load.landing_s and number != transit.sender:
                self._at(now + transit.load.landing_s, _LANDED, number)
                if self.open_bytes[number] <= 0:
                    self._free(number, now)
            else:
                self._landed(number, now)

    def _landed(self, number: int, now: float) -> None:
        """A part of an instance is there."""
        self.open_parts[number] -= 1
        if self.open_parts[number] <= 0:
            self._ended(number, now)

    def _free(self, number: int, now: float) -> None:
        """A lane is done with its head, which has not ended."""
        rank, _, index = self.record.where(number)
        lane = self.lane_of[rank][index]
        lane.landing += 1
        self._pass(lane)
        self._try(lane, now, number)

    def _pass(self, lane: _Lane) -> None:
        lane.busy = False
        lane.position += 1
        if lane.position == len(lane.order):
            lane.step, lane.position = lane.step + 1, 0
            lane.first += self.record.sizes[lane.rank]

    def _ended(self, number: int, now: float) -> None:
        self.end[number] = now
        self.log.append(End(number))
        rank, step, index = self.record.where(number)
        lane = self.lane_of[rank][index]
        if lane.busy and lane.first + lane.order[lane.position] == number:
            self._pass(lane)
        else:
            lane.landing -= 1
        self._try(lane, now, number)
        first = number - index
        self._release(rank, first, self.same_step[rank][index], now, number)
        if step + 1 < self.steps:
            self._release(rank, first + self.record.sizes[rank], self.next_step[rank][index], now, number)

    def _release(self, rank: int, first: int, followers: list[int], now: float, cause: int) -> None:
        """Let actions of a rank wait for one thing less, in the step whose first instance has the number ``first``."""
        waits, lanes = self.waits, self.lane_of[rank]
        for index in followers:
            waits[first + index] -= 1
            if not waits[first + index]:
                self._try(lanes[index], now, cause)

    # what to say when nothing moves

    def _deadlock(self) -> str:
        lines = []
        for lane in self.lanes:
            if lane.step < self.steps:
                number = self.record.number(lane.rank, lane.step, lane.order[lane.position])
                lines += [self.record.text(number), *(f"  waits for {what}" for what in self._missing(number))]
        return "deadlock: these wait for ever\n  " + "\n  ".join(lines)

    def _missing(self, number: int) -> list[str]:
        rank, step, index = self.record.where(number)
        action = self.record.action(number)
        if self.start[number] != self.start[number]:
            same, before = dependencies(self.schedule.programs[rank])
            needed = [self.record.number(rank, step, i) for i in same[index]]
            needed += [self.record.number(rank, step - 1, i) for i in before[index] if step]
            return [self.record.text(n) for n in needed if self.end[n] != self.end[n]]
        if action.op is not Op.EXCHANGE:
            members = self._members(action.group, rank)
            here = {self.record.rank(n) for n in self.rendezvous.present(action, members)}
            return [f"rank {member} to come to this collective" for member in members if member not in here]
        unmet = self.rendezvous.unmet(number)
        return [
            f"rank {transfer.peer} to {'receive' if transfer.send else 'send'} u{transfer.unit}" for transfer in unmet
        ]


def _may_follow(action: Action) -> bool:
    """True if an action may start on a lane to which something is still coming: all of it begins ahead."""
    return action.begins_ahead and not any(transfer.send for transfer in action.transfers)


_ENDED, _LANDED, _ON_THE_WAY, _ARRIVED = range(4)
