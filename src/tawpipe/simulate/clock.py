"""Simulation of a schedule by a clock with a cost model.

The rules are those that ``schedule/proof/verify.py`` proves and that the runtime follows:

* a lane runs its actions in order, one at a time; the lanes of a rank run concurrently;
* an action starts when its lane is free and its dependencies (``Hazards``, also from step to step) have ended;
* a collective begins when it has started on all its members, and ends on all at the same time;
* each part of an exchange begins when both sides have started, and the exchange ends with its last part;
* a message occupies its sender and the receiving lane while its bytes pass, but not during its last latency. In the
  meantime an action that begins ahead (``Action.begins_early``) may follow on that lane;
* if homes are in host memory, all lanes of a rank share its link to the host, in each direction.

Compute takes the seconds of the cost model. A transfer shares the ports on its way with all other transfers in flight
(``network.py``), between its latencies. Steps follow each other without a barrier, as in the runtime.

The simulation takes time in proportion to ranks x actions x steps. Steps repeat: dependencies are derived once and
shifted, and from the second or third step on the times repeat, too, so that few steps are enough. If units and nodes
are even, all rails are equal, and so are the rounds in the middle of a step. Then one rail with its share of every
port, and few rounds, can represent all.
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
"""Operations that may use the link between a device and its host."""


def play(schedule: Schedule, cost_model: CostModel, *, steps: int = 4, physical: Topology | None = None) -> Timeline:
    """Simulate ``steps`` successive steps and return the timeline of all actions.

    Args:
        schedule: the schedule of one step.
        cost_model: seconds of computing, and links.
        steps: at least 1. With 4, the third is affected neither by the start of the first nor by the end of the last.
        physical: the nodes on which the ranks really are, if the schedule was built for other ones (without grouping:
            for nodes of one rank each). Links are those of these nodes.

    Raises:
        ScheduleError: a deadlock, with what waits for what; or operations of a group do not match.
        UserError: the cost model lacks a block.
    """
    assert steps >= 1
    return Player(schedule, cost_model, steps, physical).run()


def dependencies(program: tuple[Action, ...]) -> tuple[list[list[int]], list[list[int]]]:
    """Return, for each action, the indices of the actions on other lanes that must end before it.

    The first list is for actions of the same step, the second for those of the step before. Every step after the first
    has equal dependencies, because every buffer that is written at all is written in every step."""
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
    """State of one lane of one rank.

    Args:
        order: indices of the lane's actions in the rank's program.
        first: number of the rank's first instance in the current step of the lane.
        step, position: step, and index in ``order``, of the next action.
        busy: True while an action occupies the lane.
        landing: number of actions that no longer occupy the lane but have not ended.
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
    """Log entry: an instance has got its lane."""

    number: int


@dataclass(slots=True)
class End:
    """Log entry: an instance has ended."""

    number: int


@dataclass(eq=False, slots=True)
class Transit:
    """Transfer that has begun.

    Args:
        load: bytes and latencies.
        members: instances that take part.
        began: time at which it began.
        latest: instance that arrived last.
        sender: instance that sends, for a message; else -1.
    """

    load: Load
    members: tuple[int, ...]
    began: float
    latest: int
    sender: int = -1


class Player:
    """State of a simulation. The instances of a rank's actions are numbered one after another, step by step.

    ``log`` contains all starts, ends and transits in an order in which each follows everything that it depends on."""

    def __init__(self, schedule: Schedule, cost_model: CostModel, steps: int, physical: Topology | None = None) -> None:
        cost_model = cost_model.with_cp_groups(schedule.step.sequence_ranks, schedule.step.shared)
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
        """For transfers: number of parts whose bytes have not passed. ``open_parts``: number of parts that have not
        arrived."""
        self.waits = [0] * total
        self.bytes = [[NodeBytes() for _ in range(self.physical.num_nodes)] for _ in range(steps)]
        self.events: list[tuple[float, int, int, object]] = []
        self.count = 0
        self.lanes: list[_Lane] = []
        self._seconds: list[list[float | None]] = [[None] * size for size in self.record.sizes]
        """Cached results of ``seconds`` by rank and action; they are equal in every step."""
        self.lane_of: list[list[_Lane]] = []
        self.same_step: list[list[list[int]]] = []
        self.next_step: list[list[list[int]]] = []
        self.rendezvous: Rendezvous[int] = Rendezvous(self.record.text)
        self._loads: dict[tuple[int, int], Load | None] = {}
        """Cached loads on the link to the host, by rank and action."""
        self._groups: dict[tuple[str, int], tuple[int, ...]] = {}
        self._taking_part: dict[tuple[int, str], int] = {}
        """(first member, group) -> number of simulated members. The other members do the same at the same time."""
        self.log: list[LaneGranted | End | Transit] = []
        for rank, program in enumerate(schedule.programs):
            self._prepare(rank, program)

    def _prepare(self, rank: int, program: tuple[Action, ...]) -> None:
        """Create the lanes of a rank, and set for every instance of its actions how many others it waits for."""
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
        """Process all events in the order of time and return the timeline.

        Raises:
            ScheduleError: some actions wait forever.
        """
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
                for when, flow in self.network.settle(now):  # once for all events of one time
                    self._at(when, _ARRIVED, (flow, flow.version))
        if any(lane.step < self.steps for lane in self.lanes):
            raise ScheduleError(self._deadlock())
        moved = tuple(tuple(nodes) for nodes in self.bytes)
        return Timeline(self.schedule, self.physical, self.record, moved)

    def _at(self, when: float, kind: int, what: object) -> None:
        """Add an event at time ``when``."""
        self.count += 1
        heapq.heappush(self.events, (when, self.count, kind, what))

    # actions

    def _try(self, lane: _Lane, now: float, cause: int) -> None:
        """Start the next action of a lane, unless the lane is busy or the action waits for others.

        Args:
            lane: the lane.
            now: time in seconds.
            cause: instance whose end may let it start; -1 at time zero.
        """
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
        """Return the bytes that an action moves between device and host, as a load; None if it moves none; cached.

        None as well if homes are not in host memory, see ``Transfers.hosted``."""
        action = self.schedule.programs[rank][index]
        if not self.schedule.step.homes_in_host or action.op not in HOSTED:
            return None
        if (rank, index) not in self._loads:
            least = 0.0 if action.op in (Op.OFFLOAD, Op.RELOAD) else self.seconds(rank, action)
            self._loads[rank, index] = self.transfers.hosted(rank, action, least)
        return self._loads[rank, index]

    def _note_start(self, number: int, now: float, cause: int) -> None:
        """Record the time at which an instance gets its lane, and the instance that caused it.

        A ``LaneGranted`` entry is added to the log."""
        self.start[number] = now
        self.log.append(LaneGranted(number))
        self.record.cause[number] = cause

    def _go_on(self, lane: _Lane, now: float) -> None:
        """Run the action that has got its lane and involves no other rank, and the actions behind it.

        An action behind it is run at once if nothing waits for the end of the one before it, and nothing holds it back.
        The end of the last one becomes an event."""
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
            grouped = program[after].group  # exchanges have a group, too
            if self.waits[lane.first + after] or grouped or self._hosted(lane.rank, after):
                break
            self.end[number] = now
            self.log.append(End(number))
            lane.position += 1
            self._note_start(lane.first + after, now, number)
        self._at(now, _ENDED, number)

    def seconds(self, rank: int, action: Action) -> float:
        """Return the seconds that an action without communication takes on ``rank``, fixed cost included.

        Raises:
            ScheduleError: the operation is unknown.
        """
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
        elif action.op is Op.KEYS_BACKWARD:  # recomputation, gradients of input and of weights
            work = max(3 * costs.keys_s(rank, action.block, action.micro_batch), costs.streaming_s(action))
        elif action.op is Op.BACKWARD_INPUT:
            again = self.schedule.step.recomputes(action.block, action.micro_batch)
            work = costs.backward_s(rank, action.block, action.micro_batch, again)
            work -= costs.backward_weight_s(rank, action.block, action.micro_batch)
        elif action.op is Op.BACKWARD_WEIGHT:
            work = costs.backward_weight_s(rank, action.block, action.micro_batch)
        elif action.op is Op.UPDATE:
            work = costs.update_seconds(rank, self.schedule.homes[action.unit].shard_size, action.unit)
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
        """Register a rank at a collective, and start the transfer if all simulated members have arrived."""
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
        """Return the ranks of the group to which ``rank`` belongs, and cache how many of them are simulated."""
        if (group, rank) not in self._groups:
            members = self._groups[group, rank] = self.schedule.topology.group(group, rank)
            self._taking_part[members[0], group] = sum(bool(self.schedule.programs[member]) for member in members)
        return self._groups[group, rank]

    def _start_exchange(self, rank: int, number: int, action: Action, now: float) -> None:
        """Register a rank at an exchange, and start each transfer whose other side has arrived."""
        self.open_parts[number] = self.open_bytes[number] = len(action.transfers)
        for transfer, other, _ in self.rendezvous.exchange(number, rank, action):
            sender, receiver = (rank, transfer.peer) if transfer.send else (transfer.peer, rank)
            load = self.transfers.part(sender, receiver, transfer, action.compression)
            self._go(Transit(load, (number, other), now, number, number if transfer.send else other))

    def _go(self, transit: Transit) -> None:
        """Start a transfer: count its bytes, and schedule the event at which its first byte leaves."""
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
        """Handle the moment at which the last byte of a transfer has left: free the lanes.

        If the transfer's least time is not over, it is handled again when it is. A sender's part ends now. A receiver's
        lane is free now, and its part arrives later by ``Load.landing_s`` (if that is 0, now)."""
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
        """Count one part of an instance as arrived; the instance ends with its last part."""
        self.open_parts[number] -= 1
        if self.open_parts[number] <= 0:
            self._ended(number, now)

    def _free(self, number: int, now: float) -> None:
        """Free the lane of an instance that has not ended, and try to start the next action there."""
        rank, _, index = self.record.where(number)
        lane = self.lane_of[rank][index]
        lane.landing += 1
        self._pass(lane)
        self._try(lane, now, number)

    def _pass(self, lane: _Lane) -> None:
        """Mark a lane as free and move it to its next action, which may be in the next step."""
        lane.busy = False
        lane.position += 1
        if lane.position == len(lane.order):
            lane.step, lane.position = lane.step + 1, 0
            lane.first += self.record.sizes[lane.rank]

    def _ended(self, number: int, now: float) -> None:
        """Record the end of an instance, free its lane, and start what waited for it."""
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
        """Count one awaited action as ended for each follower, and try to start those that wait for none.

        Args:
            rank: rank of the instance and of the followers.
            first: number of the rank's first instance in the step of the followers.
            followers: indices of actions in the rank's program.
            now: time in seconds.
            cause: instance that has ended.
        """
        waits, lanes = self.waits, self.lane_of[rank]
        for index in followers:
            waits[first + index] -= 1
            if not waits[first + index]:
                self._try(lanes[index], now, cause)

    # messages about deadlocks

    def _deadlock(self) -> str:
        """Return a message that lists all actions that wait forever, and what each waits for."""
        lines = []
        for lane in self.lanes:
            if lane.step < self.steps:
                number = self.record.number(lane.rank, lane.step, lane.order[lane.position])
                lines += [self.record.text(number), *(f"  waits for {what}" for what in self._missing(number))]
        return "deadlock: these wait for ever\n  " + "\n  ".join(lines)

    def _missing(self, number: int) -> list[str]:
        """Return descriptions of what an instance waits for."""
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
    """Return True if an action may start on a lane on which a message is still arriving.

    It may if all of its parts begin ahead and none of them sends."""
    return action.begins_early and not any(transfer.send for transfer in action.transfers)


_ENDED, _LANDED, _ON_THE_WAY, _ARRIVED = range(4)
