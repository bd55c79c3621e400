"""Proves a schedule right before anything runs it. Imports schedule only.

The proof plays all programs with symbolic contents, under the rules that hold for NCCL and for gloo in strict mode:

* a lane runs its actions in their order, one at a time;
* an action starts when the actions it depends on (``Hazards``) have ended, on whichever lane they are;
* a collective starts when it is at the head of its lane on every member and ends for all at once;
* an exchange starts by itself; each of its parts ends when the peer's matching exchange has started too, and the exchange when
  all its parts have. Parts between two ranks on one lane match in the order in which they were issued.

It fails if something waits for ever, if operations of one group do not match, if a read finds anything but what the action
needs (unit, stripes, version, contributions), if a gradient contribution is missing or counted twice, if a buffer is in no
pool, or if the bytes between nodes differ from the closed formula.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tawpipe.schedule.actions import Action, Lane, Op, Transfer, is_gradient, is_weight
from tawpipe.schedule.hazards import Hazards
from tawpipe.schedule.spec import Schedule
from tawpipe.schedule.traffic import link_elements, link_elements_formula


class ScheduleError(AssertionError):
    """A schedule that must not run, with the action at which the proof failed."""


@dataclass(frozen=True)
class Content:
    """What a buffer holds.

    Args:
        kind: ``w`` weights, ``g`` gradients.
        stripes: which stripes of the unit, in order.
        version: of weights: the number of updates before it.
        parts: of gradients: the (block, micro-batch) pairs summed in it.
    """

    kind: str
    unit: int
    stripes: tuple[int, ...]
    version: int = 0
    parts: frozenset[tuple[int, int]] = frozenset()


@dataclass
class _Running:
    """An action of one rank in one step, in the play."""

    rank: int
    step: int
    index: int
    action: Action
    waits: int = 0
    started: bool = False
    done: bool = False
    open_parts: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} step {self.step} #{self.index}: {self.action}"


def verify(schedule: Schedule, *, steps: int = 2) -> None:
    """Play ``steps`` steps of a schedule and check everything that the module's head lists.

    Raises:
        ScheduleError: what is wrong, and where.
    """
    _Play(schedule, steps).run()
    counted, formula = link_elements(schedule), link_elements_formula(schedule)
    if counted != formula:
        raise ScheduleError(f"elements between nodes: the actions move {counted}, the formula says {formula}")


class _Play:
    def __init__(self, schedule: Schedule, steps: int) -> None:
        self.schedule, self.steps = schedule, steps
        self.topology = schedule.topology
        world = range(self.topology.world_size)
        self.contents: list[dict[str, Content | str]] = [{} for _ in world]
        self.lanes: dict[tuple[int, Lane], deque[_Running]] = {}
        self.waiters: dict[int, list[_Running]] = {}
        self.sends: dict[tuple, deque[tuple[_Running, Transfer]]] = {}
        self.receives: dict[tuple, deque[tuple[_Running, Transfer]]] = {}
        self.gathering: dict[tuple, list[_Running]] = {}
        self.total = 0
        self.keep: list[_Running] = []  # ids stay unique while their objects live
        self.legal = [self._legal_names(rank) for rank in world]
        for rank in world:
            for unit, home in enumerate(schedule.homes):
                if rank in home.ranks:
                    stripes = tuple(s for s, r in enumerate(home.ranks) if r == rank)
                    self.contents[rank][f"home.w.{unit}"] = Content("w", unit, stripes)
            self._enqueue(rank)

    def _legal_names(self, rank: int) -> set[str]:
        names = {f"{pool.name}.{i}" for pool in self.schedule.pools[rank] for i in range(pool.count)}
        for unit, home in enumerate(self.schedule.homes):
            if rank in home.ranks:
                names |= {f"home.w.{unit}", f"home.g.{unit}"}
        return names

    def _enqueue(self, rank: int) -> None:
        hazards: Hazards[int] = Hazards()
        for step in range(self.steps):
            for index, action in enumerate(self.schedule.programs[rank]):
                running = _Running(rank, step, index, action)
                for name in (*action.reads, *action.writes):
                    if (is_weight(name) or is_gradient(name)) and name not in self.legal[rank]:
                        raise ScheduleError(f"{name} is in no pool and no home: {running}")
                self.keep.append(running)
                found = hazards.add(id(running), reads=action.reads, writes=action.writes, frees=action.frees)
                running.waits = len(found)
                for other in found:
                    self.waiters.setdefault(other, []).append(running)
                self.lanes.setdefault((rank, action.lane), deque()).append(running)
                self.total += 1

    # the clockless play

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
                ended.done = True
                lane = self.lanes[ended.rank, ended.action.lane]
                assert lane[0] is ended
                lane.popleft()
                ready.append((ended.rank, ended.action.lane))
                for waiter in self.waiters.pop(id(ended), ()):
                    waiter.waits -= 1
                    ready.append((waiter.rank, waiter.action.lane))
        if finished < self.total:
            stuck = "\n  ".join(str(queue[0]) for queue in self.lanes.values() if queue)
            raise ScheduleError(f"deadlock: these wait for ever\n  {stuck}")

    def _start(self, running: _Running) -> list[_Running]:
        """Start the head of a lane; returns the actions that end with it."""
        running.started = True
        action = running.action
        if action.op is Op.EXCHANGE:
            return self._start_exchange(running)
        if action.group:
            return self._start_collective(running)
        self._local(running)
        return [running]

    def _start_exchange(self, running: _Running) -> list[_Running]:
        running.open_parts = len(running.action.transfers)
        ended = []
        for transfer in running.action.transfers:
            sender, receiver = (running.rank, transfer.peer) if transfer.send else (transfer.peer, running.rank)
            key = (running.action.lane, sender, receiver)
            mine, theirs = (self.sends, self.receives) if transfer.send else (self.receives, self.sends)
            waiting = theirs.get(key)
            if not waiting:
                mine.setdefault(key, deque()).append((running, transfer))
                continue
            other, match = waiting.popleft()
            if match.unit != transfer.unit:
                raise ScheduleError(f"a send meets the receive of another unit: {running} and {other}")
            source, target = (transfer, match) if transfer.send else (match, transfer)
            content = self._read(sender, source.buffer, running if transfer.send else other)
            self.contents[receiver][target.buffer] = content
            for part in (running, other):
                part.open_parts -= 1
                if part.open_parts == 0:
                    ended.append(part)
        return ended

    def _start_collective(self, running: _Running) -> list[_Running]:
        action = running.action
        members = self.topology.group(action.group, running.rank)
        here = self.gathering.setdefault((action.lane, members), [])
        for other in here:
            theirs = other.action
            if (theirs.op, theirs.collective, theirs.unit, theirs.root) != (
                action.op,
                action.collective,
                action.unit,
                action.root,
            ):
                raise ScheduleError(f"members of a group issue different operations: {running} and {other}")
        here.append(running)
        if len(here) < len(members):
            return []
        ended = sorted(here, key=lambda part: members.index(part.rank))
        here.clear()
        if action.op is Op.NORM:
            for part in ended:
                self._norm(part)
        else:
            self._collective(action, ended)
        return ended

    # contents

    def _read(self, rank: int, name: str, running: _Running) -> Content:
        content = self.contents[rank].get(name)
        if not isinstance(content, Content):
            raise ScheduleError(f"reads {name}, which holds nothing yet: {running}")
        return content

    def _collective(self, action: Action, parts: list[_Running]) -> None:
        if action.collective in ("all_gather", "reduce_scatter", "reduce"):
            found = [self._read(part.rank, part.action.reads[0], part) for part in parts]
            wrong = [c for c in found if c.unit != action.unit or c.version != found[0].version]
            if wrong:
                raise ScheduleError(f"a member brings {wrong[0]}: {parts[found.index(wrong[0])]}")
        else:
            found = [self._read(p.rank, p.action.reads[0], p) for p in parts if p.rank == action.root]
        if action.collective == "all_gather":
            stripes = tuple(s for content in found for s in content.stripes)
            outputs = [Content("w", action.unit, stripes, found[0].version)] * len(parts)
        elif action.collective == "broadcast":
            outputs = found * len(parts)
        else:
            summed = self._sum(found, parts[0])
            outputs = [summed] * len(parts)
            if action.collective == "reduce_scatter":
                if len(summed.stripes) % len(parts):
                    raise ScheduleError(f"{len(summed.stripes)} stripes do not divide: {parts[0]}")
                size = len(summed.stripes) // len(parts)
                cuts = [summed.stripes[i * size : (i + 1) * size] for i in range(len(parts))]
                outputs = [Content("g", summed.unit, cut, parts=summed.parts) for cut in cuts]
        for part, output in zip(parts, outputs, strict=True):
            for name in part.action.writes:
                if action.collective == "reduce" and part.rank != action.root:
                    self.contents[part.rank][name] = "left over from a reduction"
                else:
                    self.contents[part.rank][name] = output

    def _sum(self, found: list[Content], where: _Running) -> Content:
        together: set[tuple[int, int]] = set()
        for content in found:
            if content.stripes != found[0].stripes or content.unit != found[0].unit or content.kind != "g":
                raise ScheduleError(f"adds {content} to {found[0]}: {where}")
            if together & content.parts:
                raise ScheduleError(f"counts {sorted(together & content.parts)[0]} (block, micro-batch) twice: {where}")
            together |= content.parts
        return Content("g", found[0].unit, found[0].stripes, parts=frozenset(together))

    def _local(self, running: _Running) -> None:
        action, rank = running.action, running.rank
        held = self.contents[rank]
        if action.op in (Op.FORWARD, Op.BACKWARD):
            self._compute(running)
        elif action.op is Op.ZERO:
            held[action.writes[0]] = self._gradient(action.unit)
        elif action.op is Op.ADD:
            held[action.writes[0]] = self._sum([self._read(rank, name, running) for name in action.reads], running)
        elif action.op is Op.UPDATE:
            self._update(running)
        else:
            raise ScheduleError(f"nobody knows how to run this: {running}")
        for name in action.frees:
            if held.pop(name, None) is None:
                raise ScheduleError(f"frees {name}, which holds nothing: {running}")

    def _gradient(self, unit: int, parts: frozenset[tuple[int, int]] = frozenset()) -> Content:
        return Content("g", unit, tuple(range(len(self.schedule.homes[unit].ranks))), parts=parts)

    def _compute(self, running: _Running) -> None:
        action, rank = running.action, running.rank
        held, block = self.contents[rank], self.schedule.model.blocks[action.block]
        needs = block.kind == "head" or action.op is Op.FORWARD or block.backward_reads_weights
        if len(action.weights) != (len(block.units) if needs else 0):
            raise ScheduleError(f"block {action.block} has units {block.units}: {running}")
        for unit, name in zip(block.units, action.weights, strict=False):
            version = running.step if self.schedule.model.units[unit].trainable else 0
            whole = Content("w", unit, tuple(range(len(self.schedule.homes[unit].ranks))), version)
            if self._read(rank, name, running) != whole:
                raise ScheduleError(f"needs {whole}, finds {held[name]} in {name}: {running}")
        for name in action.reads:
            if name not in held:
                raise ScheduleError(f"reads {name}, which holds nothing: {running}")
        for unit, name in zip(self.schedule.model.trainable_units(action.block), action.gradients, strict=False):
            mine = self._gradient(unit, frozenset({(action.block, action.micro_batch)}))
            held[name] = self._sum([self._read(rank, name, running), mine], running) if name in action.reads else mine
        for name in action.writes:
            if not is_gradient(name):
                if name in held and not is_weight(name):
                    raise ScheduleError(f"writes {name} over something that nobody freed: {running}")
                held[name] = "activation"

    def _norm(self, running: _Running) -> None:
        held, schedule = self.contents[running.rank], self.schedule
        if not schedule.training:
            missing = {f"loss.{m}" for m in schedule.knobs.micro_batches[running.rank]} - set(running.action.reads)
            if missing:
                raise ScheduleError(f"leaves out {sorted(missing)}: {running}")
        for name in running.action.reads:
            if name not in held:
                raise ScheduleError(f"reads {name}, which holds nothing: {running}")
            if is_gradient(name):
                self._expect_complete(running, name)
        for name in running.action.frees:
            del held[name]
        held["norm"] = "activation"

    def _expect_complete(self, running: _Running, name: str) -> None:
        content = self._read(running.rank, name, running)
        unit = self.schedule.model.units[content.unit]
        backward = [b for b in unit.blocks if self.schedule.model.blocks[b].needs_backward]
        expected = {(b, m) for b in backward for m in self.schedule.micro_batches}
        if content.parts != expected:
            missing = sorted(expected - content.parts)
            raise ScheduleError(f"{name} lacks {missing[:3]} (block, micro-batch) of {len(expected)}: {running}")
        home = self.schedule.homes[content.unit]
        if content.stripes != tuple(s for s, r in enumerate(home.ranks) if r == running.rank):
            raise ScheduleError(f"{name} holds the stripes {content.stripes} of another rank: {running}")

    def _update(self, running: _Running) -> None:
        unit = running.action.unit
        name = f"home.w.{unit}"
        self._expect_complete(running, f"home.g.{unit}")
        content = self._read(running.rank, name, running)
        self.contents[running.rank][name] = Content("w", unit, content.stripes, content.version + 1)
