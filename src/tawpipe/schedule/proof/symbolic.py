"""Symbolic contents of every buffer while the proof simulates a schedule, and the effect of every action on them.

Weights have a unit, shards and a version. Gradients also have the contributions that they sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from tawpipe.schedule.actions import Action, Op, Transfer
from tawpipe.schedule.buffers import (
    OUTSIDE,
    Buffer,
    Kind,
    home_gradient,
    home_weight,
    ids,
    key_gradients,
    pooled,
    weight_copy,
)
from tawpipe.schedule.step import Schedule

COMPUTES = (Op.FORWARD, Op.BACKWARD, Op.KEYS, Op.KEYS_BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
"""Operations that compute with a block on a micro-batch."""


class ScheduleError(AssertionError):
    """A schedule is wrong and must not run. The message contains the action at which the proof failed."""


@dataclass(frozen=True)
class Content:
    """Content of a buffer of weights or gradients.

    Args:
        kind: ``w`` weights, ``g`` gradients, ``m`` gradients that an update has scaled to gradients of the mean loss.
        unit: index of the unit.
        shards: indices of the unit's shards, in order.
        version: for weights the number of updates before; for gradients the step.
        parts: for gradients the (block, micro-batch) pairs that are summed. In a context-parallel group a pair also has
            the rank's position in the group, and a layer has a second set of pairs for its keys and values.
    """

    kind: str
    unit: int
    shards: tuple[int, ...]
    version: int = 0
    parts: frozenset[tuple[int, ...]] = frozenset()


@dataclass
class Running:
    """An action of one rank in one step of the simulation.

    Args:
        rank: the rank.
        step: number of the step.
        index: index in the rank's program.
        action: the action.
        waits: number of actions that it still waits for.
        started: True once it has started.
        open_parts: number of transfers of an exchange that have not met their other side.
        begins: True for the early part of the action, which starts before its lane is free.
        numbers: transfer -> number of its message; the key is None for a collective. An action and its early part share
            it.
    """

    rank: int
    step: int
    index: int
    action: Action
    waits: int = 0
    started: bool = False
    open_parts: int = 0
    begins: bool = False
    numbers: dict[Transfer | None, int] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        return f"rank {self.rank} step {self.step} #{self.index}: {self.action}"


class Contents:
    """Contents of the buffers and activations of all ranks.

    Every method takes running actions, checks what they read, and records what they write.

    Args:
        schedules: schedule of every step, in order. They differ in their micro-batches, or only go forward.

    Raises:
        ScheduleError: an action does not find what it needs, or writes what does not fit.
    """

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        self.schedules, schedule = schedules, schedules[0]
        self.schedule, self._early = schedule, schedule.step.settings.early_updates
        self._updates = tuple(accumulate((each.training for each in schedules), initial=0))
        """For every step the number of updates before it; at the end the number of all updates."""
        self.held: list[dict[Buffer, Content]] = []
        self.alive: list[set[Buffer]] = []
        """For every rank the activations and losses that hold something."""
        self.places: list[dict[Buffer, frozenset[int]]] = [{} for _ in schedule.programs]
        """For every rank: keys and values, or their gradients -> positions in the context-parallel group that are in
        them."""
        self._unfinished: list[set[Buffer]] = [set() for _ in schedule.programs]
        """For every rank the input gradients that still lack the part through keys and values."""
        distinct = list({id(each): each for each in schedules}.values())
        self._sizes = [
            {buffer: size for each in distinct for buffer, size in each.buffer_elements(rank).items()}
            for rank in range(schedule.topology.world_size)
        ]
        self._normed = [-1] * schedule.topology.world_size
        """For every rank the step of its last NORM."""
        self._counted = [-1] * schedule.topology.world_size
        """For every rank the step of its last COUNT."""
        for rank in range(schedule.topology.world_size):
            homes = ((unit, home.index(rank)) for unit, home in enumerate(schedule.homes))
            self.held.append({home_weight(unit): Content("w", unit, (i,)) for unit, i in homes if i is not None})
            self.alive.append(self._at_first(rank))
        self._passes: list[dict[Buffer, int]] = [{} for _ in schedule.programs]
        """For every rank: KV cache of a layer -> number of passes in it."""
        self._sized: list[dict[int, Content]] = [{} for _ in schedule.programs]
        """For every rank: unit that a SIZE has counted and that is not refreshed yet -> weights that SIZE saw."""
        self._moved: list[dict[Buffer, int]] = [{} for _ in schedule.programs]
        """For every rank: slot in CPU memory -> micro-batch that is in it, in pipelines."""
        self._everything = {id(each): _everything(each) for each in distinct}
        """Id of a schedule -> unit -> contributions that its gradient must have."""

    def _at_first(self, rank: int) -> set[Buffer]:
        """Return the activations that a rank holds before the first step, and must hold after every step.

        Empty except for decode steps, where the rank of the embedding holds the sampled tokens of every group."""
        schedule = self.schedule
        embeds = schedule.looped and 0 in schedule.step.strategy.computes(schedule.step)[rank]
        return set(map(ids, schedule.micro_batches)) if embeds else set()

    def _place(self, rank: int) -> int:
        """Return the position of a rank in its context-parallel group."""
        return self.schedule.topology.local_of(rank) % self.schedule.step.sequence_ranks

    def _read(self, buffer: Buffer, running: Running) -> Content:
        """Return what ``buffer`` holds on the rank of ``running``.

        Raises:
            ScheduleError: it holds nothing, or is a weight copy whose changes this step has counted (SIZE) but not
                applied.
        """
        if buffer.kind is Kind.COPY and int(buffer.pool[1:]) in self._sized[running.rank]:
            raise ScheduleError(f"reads {buffer} before this step's refresh: {running}")
        content = self.held[running.rank].get(buffer)
        if content is None:
            raise ScheduleError(f"reads {buffer}, which holds nothing yet: {running}")
        return content

    def _write(self, buffer: Buffer, content: Content, running: Running) -> None:
        """Set what ``buffer`` holds on the rank of ``running``.

        Raises:
            ScheduleError: the size or kind of the buffer does not fit the content.
        """
        elements = len(content.shards) * self.schedule.homes[content.unit].shard_size
        if (size := self._sizes[running.rank][buffer]) != elements:
            raise ScheduleError(f"writes {elements} elements into {buffer}, which has {size}: {running}")
        if buffer.is_weight != (content.kind == "w"):
            raise ScheduleError(f"writes {content} into {buffer}: {running}")
        self.held[running.rank][buffer] = content

    def _sum(self, parts: Sequence[Content], running: Running) -> Content:
        """Return the content that results from adding up ``parts``, whose contributions are united. Records nothing.

        Raises:
            ScheduleError: they are of different units, shards or steps, or a contribution is in two of them.
        """
        together: set[tuple[int, ...]] = set()
        first = parts[0]
        for content in parts:
            if content.kind != "g" or (content.unit, content.shards, content.version) != (
                first.unit,
                first.shards,
                first.version,
            ):
                raise ScheduleError(f"adds {content} to {first}: {running}")
            if together & content.parts:
                raise ScheduleError(f"counts {min(together & content.parts)} (block, micro-batch) twice: {running}")
            together |= content.parts
        return Content("g", first.unit, first.shards, first.version, frozenset(together))

    # between ranks

    def transfer(self, sender: Running, source: Buffer, receiver: Running, target: Buffer, unit: int) -> None:
        """Run one transfer of an exchange: copy a weight or gradient to the receiver, or move an activation to it.

        Args:
            sender: action of the sending rank.
            source: buffer that is sent.
            receiver: action of the receiving rank.
            target: buffer that is filled.
            unit: unit that is expected in ``source``; not used for activations.

        Raises:
            ScheduleError: the source holds nothing or another unit, or the target still holds an activation.
        """
        if source.is_activation or target.is_activation:
            if source != target or source not in self.alive[sender.rank]:
                raise ScheduleError(f"sends {source} as {target}, or holds nothing there: {sender}")
            if target in self.alive[receiver.rank]:
                raise ScheduleError(f"receives {target} over something that nobody freed: {receiver}")
            self.alive[sender.rank].remove(source)
            self.alive[receiver.rank].add(target)
            return
        content = self._read(source, sender)
        if content.unit != unit:
            raise ScheduleError(f"sends {content} as unit {unit}: {sender}")
        self._write(target, content, receiver)

    def collective(self, parts: Sequence[Running]) -> None:
        """Run a COLLECTIVE of all members, which are in the order of the group.

        Raises:
            ScheduleError: a member has other content than the operation needs.
        """
        action = parts[0].action
        if action.reads and action.reads[0].is_activation:
            self._keys_together(parts)
            return
        brings = [p for p in parts if action.collective != "broadcast" or p.rank == action.root]
        contents = [self._read(p.action.reads[0], p) for p in brings]
        if action.refreshes:
            for part, content in zip(parts, contents, strict=True):
                if (seen := self._sized[part.rank].pop(action.unit, None)) != content:
                    raise ScheduleError(f"refreshes from {content}, of which {seen} was counted: {part}")
        kind = "w" if action.collective in ("all_gather", "broadcast") else "g"
        for content, part in zip(contents, brings, strict=True):
            if (content.kind, content.unit, content.version) != (kind, action.unit, contents[0].version):
                raise ScheduleError(f"a member brings {content}: {part}")
        if action.collective == "all_gather":
            shards = tuple(shard for content in contents for shard in content.shards)
            outputs = [Content("w", action.unit, shards, contents[0].version)] * len(parts)
        elif action.collective == "broadcast":
            outputs = contents * len(parts)
        else:
            total = self._sum(contents, parts[0])
            outputs = [total] * len(parts)
            if action.collective == "reduce_scatter":
                size, rest = divmod(len(total.shards), len(parts))
                if rest:
                    raise ScheduleError(f"{len(total.shards)} stripes do not divide: {parts[0]}")
                cuts = [total.shards[i * size : (i + 1) * size] for i in range(len(parts))]
                outputs = [Content("g", total.unit, cut, total.version, total.parts) for cut in cuts]
        for part, output in zip(parts, outputs, strict=True):
            for name in part.action.writes:
                if action.collective == "reduce" and part.rank != action.root:
                    del self.held[part.rank][name]  # a reduce leaves no usable content on other ranks
                else:
                    self._write(name, output, part)

    def _keys_together(self, parts: Sequence[Running]) -> None:
        """Run a collective of keys and values (gathered) or of their gradients (summed) in a context-parallel group.

        Raises:
            ScheduleError: a member has other content than its own part, or the operation does not fit the kind of
                buffer.
        """
        everyone = frozenset(range(self.schedule.step.sequence_ranks))
        gathers = parts[0].action.collective == "all_gather"
        for part in parts:
            (buffer,), here = part.action.reads, self.places[part.rank]
            own_places = frozenset((self._place(part.rank),))
            if part.action.reads != parts[0].action.reads or here.get(buffer) != own_places:
                raise ScheduleError(f"a member brings {buffer} with {here.get(buffer)}: {part}")
            if (buffer.kind is Kind.KEYS) != gathers:
                raise ScheduleError(f"keys are gathered, their gradients summed up: {part}")
        for part in parts:
            self.places[part.rank][part.action.reads[0]] = everyone

    def size(self, parts: Sequence[Running]) -> None:
        """Run a SIZE of all members of a group: record the weights at home whose changes were counted.

        Raises:
            ScheduleError: members read different buffers, changes of an earlier SIZE were not refreshed, or the
                members' copies of a unit have different versions.
        """
        for part in parts:
            if part.action.reads != parts[0].action.reads:
                raise ScheduleError(f"counts other changes than {parts[0]}: {part}")
            sized = self._sized[part.rank]
            if sized:
                raise ScheduleError(f"unit {min(sized)} was counted and has not come: {part}")
            sized.update({home.at[0]: self._read(home, part) for home in part.action.reads[::2]})
        for unit in self._sized[parts[0].rank]:
            copies = {self.held[part.rank].get(weight_copy(unit)) for part in parts}
            if len(copies) > 1:
                raise ScheduleError(f"copies of unit {unit} of several versions: {parts[0]}")

    def norm(self, running: Running) -> None:
        """Run NORM on one rank: check that the gradients are complete, and record that the norm is known.

        Raises:
            ScheduleError: a gradient at home is not complete, or a loss is missing.
        """
        for buffer in running.action.reads:
            if buffer.is_gradient:
                self._expect_complete(running, buffer, buffer.at[0], kind="m" if self._early else "g")
        self._activations(running)
        self._normed[running.rank] = running.step

    def count(self, running: Running) -> None:
        """Run COUNT on one rank: record that it has run in this step. Early updates check this."""
        self._counted[running.rank] = running.step

    # on one rank

    def local(self, running: Running) -> None:
        """Run an action without communication: computing, offloading, PREPARE, ZERO, ADD, RAISE or UPDATE.

        Checks what it reads and records what it writes and frees.

        Raises:
            ScheduleError: the action does not find what it needs.
        """
        action = running.action
        if action.op in COMPUTES:
            self._compute(running)
        elif action.op in (Op.OFFLOAD, Op.RELOAD):
            self._activations(running)
            self._move(running)
        elif action.op is Op.PREPARE:
            self._activations(running)
        elif action.op is Op.ZERO:
            self._write(action.writes[0], self._gradient(action.unit, running), running)
        elif action.op is Op.ADD:
            total = self._sum([self._read(name, running) for name in action.reads], running)
            if total.unit != action.unit:
                raise ScheduleError(f"adds up unit {total.unit}: {running}")
            self._write(action.writes[0], total, running)
        elif action.op is Op.RAISE:
            self._write(action.writes[0], self._read(action.reads[0], running), running)
        else:
            self._update(running)

    def _gradient(self, unit: int, running: Running, *parts: tuple[int, ...]) -> Content:
        """Return a gradient of ``unit`` that contains the contributions ``parts``."""
        return Content("g", unit, self._shards(unit), running.step, frozenset(parts))

    def _shards(self, unit: int) -> tuple[int, ...]:
        """Return the indices of all shards of ``unit``."""
        return tuple(range(len(self.schedule.homes[unit].ranks)))

    def _version(self, unit: int, step: int) -> int:
        """Return the number of updates before ``step`` in the weights of ``unit``; 0 for frozen units."""
        return self._updates[step] if self.schedule.model.units[unit].trainable else 0

    def _compute(self, running: Running) -> None:
        """Run an action that computes with a block: check weights, add to gradients, and update activations."""
        action, block = running.action, self.schedule.model.blocks[running.action.block]
        step = self.schedules[running.step].step
        ranks = step.ranks_of(action.micro_batch)
        for unit, name in zip(block.units, action.weights, strict=False):  # a backward pass may read no weights
            whole = Content("w", unit, self._shards(unit), self._version(unit, running.step))
            if (content := self._read(name, running)) != whole:
                raise ScheduleError(f"needs {whole}, finds {content} in {name}: {running}")
        if action.op not in (Op.FORWARD, Op.KEYS):
            units = self.schedule.model.trainable_units(action.block)
            place = self._place(running.rank) + (ranks if action.op is Op.KEYS_BACKWARD else 0)
            part = (action.block, action.micro_batch, *([place] if ranks > 1 else []))
            if action.op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT):
                part = (action.block, action.micro_batch, int(action.op is Op.BACKWARD_WEIGHT))
            for unit, name in zip(units, action.gradients, strict=True):
                gradient = self._gradient(unit, running, part)
                before = [self._read(name, running)] if name in action.reads else []
                self._write(name, self._sum([*before, gradient], running), running)
        if ranks > 1 and block.kind == "layer":
            self._keys(running)
        if action.micro_batch in step.neighbours and block.kind == "layer":
            self._slice(running)
        if self.schedule.looped and block.kind == "layer":
            self._pass(running)
        self._activations(running)

    def _pass(self, running: Running) -> None:
        """Add a pass of a decode step to a layer's KV cache, which must contain exactly the passes before it.

        Raises:
            ScheduleError: passes are missing or surplus.
        """
        groups, passes = self.schedule.micro_batches, self._passes[running.rank]
        number = running.step * len(groups) + groups.index(running.action.micro_batch)
        for buffer in (buffer for buffer in running.action.writes if buffer.kind is Kind.CACHE):
            if (before := passes.get(buffer, 0)) != number:
                raise ScheduleError(f"pass {number} finds {before} passes in {buffer}: {running}")
            passes[buffer] = number + 1

    def _keys(self, running: Running) -> None:
        """Check and record the keys and values, or their gradients, that an action of a context-parallel group uses.

        Where they are read, they must contain the parts of all ranks of the group. What is written contains this rank's
        part only. Input gradients are recorded as unfinished between BACKWARD and KEYS_BACKWARD.

        Raises:
            ScheduleError: some rank's part is missing.
        """
        action, here, unfinished = running.action, self.places[running.rank], self._unfinished[running.rank]
        for buffer in (buffer for buffer in action.reads if buffer.kind in (Kind.KEYS, Kind.KEY_GRADIENTS)):
            if len(here.get(buffer, ())) != self.schedule.step.sequence_ranks:
                raise ScheduleError(f"reads {buffer}, which is not of all ranks: {running}")
            del here[buffer]
        for buffer in (buffer for buffer in action.writes if buffer.kind in (Kind.KEYS, Kind.KEY_GRADIENTS)):
            here[buffer] = frozenset((self._place(running.rank),))
        (unfinished.update if action.op is Op.BACKWARD else unfinished.difference_update)(
            buffer for buffer in action.writes if buffer.kind is Kind.INPUT_GRADIENT
        )

    def _slice(self, running: Running) -> None:
        """Check and record the gradients of keys and values in a layer's action on a document slice.

        A backward pass requires that exactly the later slices have added to the gradients of its own keys and values.
        It is then recorded as an addition to those of the earlier slices.

        Raises:
            ScheduleError: additions of later slices are missing or surplus.
        """
        action, here = running.action, self.places[running.rank]
        if action.op in (Op.FORWARD, Op.BACKWARD_WEIGHT):
            return
        m = action.micro_batch
        before, behind = self.schedules[running.step].step.neighbours[m]
        if (added := here.pop(key_gradients(m, action.block), frozenset())) != frozenset(behind):
            raise ScheduleError(f"uses gradients of keys from slices {sorted(added)} of {sorted(behind)}: {running}")
        for other in before:
            sums = key_gradients(other, action.block)
            here[sums] = (here.get(sums, frozenset()) if sums in action.reads else frozenset()) | {m}

    def _activations(self, running: Running) -> None:
        """Check and record the activations and losses that an action reads, writes and frees.

        Raises:
            ScheduleError: it reads one that holds nothing or is not complete, or overwrites one that was not freed.
        """
        action, alive = running.action, self.alive[running.rank]
        for buffer in action.reads:
            if buffer.is_activation and buffer not in alive:
                raise ScheduleError(f"reads {buffer}, which holds nothing: {running}")
            if buffer in self._unfinished[running.rank] and buffer not in action.writes:
                raise ScheduleError(f"reads {buffer}, which is not finished: {running}")
        for buffer in action.writes:
            if buffer in alive and buffer not in action.reads:
                raise ScheduleError(f"writes {buffer} over something that nobody freed: {running}")
            if buffer.is_activation:
                alive.add(buffer)
        alive.difference_update(action.frees)

    def _move(self, running: Running) -> None:
        """Record what an OFFLOAD puts into its slot, and check that a RELOAD takes the same back.

        Does nothing unless the strategy's order chooses the slots (``Strategy.orders_host``).

        Raises:
            ScheduleError: the slot holds another micro-batch.
        """
        action, here = running.action, self._moved[running.rank]
        if not self.schedule.step.strategy.orders_host:
            return
        if action.op is Op.OFFLOAD:
            here[next(buffer for buffer in action.writes if buffer.kind in OUTSIDE)] = action.micro_batch
        elif (micro_batch := here.pop(next(b for b in action.reads if b.kind in OUTSIDE))) != action.micro_batch:
            raise ScheduleError(f"brings back micro-batch {micro_batch}: {running}")

    def _expect_complete(self, running: Running, home: Buffer, unit: int, kind: str = "g") -> None:
        """Check that a gradient of ``unit`` has all contributions of its step, and is of this rank's shard.

        Args:
            running: the action that reads it.
            home: buffer with the gradient.
            unit: index of the unit.
            kind: expected ``Content.kind``.

        Raises:
            ScheduleError: contributions are missing, or the content is another one.
        """
        content = self._read(home, running)
        shards = (self.schedule.homes[unit].index(running.rank) or 0,)
        everything = self._everything[id(self.schedules[running.step])][unit]
        expected = Content(kind, unit, shards, running.step, everything)
        if content != expected:
            if missing := sorted(expected.parts - content.parts):
                lacks = f"{len(missing)} of {len(expected.parts)} (block, micro-batch) pairs, the first {missing[0]}"
                raise ScheduleError(f"{home} lacks {lacks}: {running}")
            raise ScheduleError(f"{home} holds {content}: {running}")

    def _update(self, running: Running) -> None:
        """Run UPDATE: check that the gradient is complete, and give the weights at home the next version.

        The gradient is then no longer usable. With early updates NORM may still read it.

        Raises:
            ScheduleError: NORM (or COUNT, with early updates) of the step has not run, or the gradient is not complete.
        """
        rank, unit = running.rank, running.action.unit
        weights, gradient = home_weight(unit), home_gradient(unit)
        if (self._counted if self._early else self._normed)[rank] != running.step:
            raise ScheduleError(f"updates before the {'COUNT' if self._early else 'NORM'} of its step: {running}")
        source = next(buffer for buffer in running.action.reads if buffer.is_gradient)
        self._expect_complete(running, source, unit)
        content = self._read(weights, running)
        self._write(weights, Content("w", unit, content.shards, content.version + 1), running)
        if self._early:
            self.held[rank][gradient] = replace(self.held[rank][source], kind="m")
        else:  # also scaled by the clipping factor, so it is not usable
            del self.held[rank][gradient]

    def expect_end(self) -> None:
        """Check the state after all steps: every home has its updates, and no activation is left.

        Raises:
            ScheduleError: a home has other content, or an activation was not freed.
        """
        for rank, sized in enumerate(self._sized):
            if sized:
                raise ScheduleError(f"rank {rank} ends without unit {min(sized)}, whose changes were counted")
        for rank, (held, alive) in enumerate(zip(self.held, self.alive, strict=True)):
            if left := alive ^ self._at_first(rank):
                raise ScheduleError(f"rank {rank} never frees, or lacks, {', '.join(sorted(map(str, left))[:3])}")
            for unit, home in enumerate(self.schedule.homes):
                index = home.index(rank)
                if index is not None:
                    expected = Content("w", unit, (index,), self._version(unit, len(self.schedules)))
                    if (content := held[home_weight(unit)]) != expected:
                        raise ScheduleError(f"rank {rank} ends with {content} at home, not {expected}")
        for rank, units in enumerate(self.schedule.placed):
            for unit in units:
                self._expect_whole(rank, unit)

    def _expect_whole(self, rank: int, unit: int) -> None:
        """Check that a rank has every shard of a unit, at home or in the buffer for it.

        Raises:
            ScheduleError: a shard is missing.
        """
        home = self.schedule.homes[unit]
        for shard in range(len(home.ranks)):
            content = self.held[rank].get(pooled(f"W{unit}", shard))
            if home.index(rank) != shard and content != Content("w", unit, (shard,)):
                raise ScheduleError(f"rank {rank} ends with {content} for stripe {shard} of unit {unit}")


def _everything(schedule: Schedule) -> dict[int, frozenset[tuple[int, ...]]]:
    """Return for every unit all contributions that its gradient must contain, as in ``Content.parts``.

    Each (block, micro-batch) whose backward pass adds to the gradient has one or more tuples."""
    programs, blocks = schedule.programs, schedule.model.blocks
    split = {(a.block, a.micro_batch) for program in programs for a in program if a.op is Op.BACKWARD_INPUT}

    def parts(block: int, m: int) -> list[tuple[int, ...]]:
        """Return the contributions of the backward pass of one block on one micro-batch.

        One pair (block, micro-batch), or several with a third number: for a backward pass in two parts, or for a
        context-parallel group."""
        ranks = schedule.step.ranks_of(m)
        if (block, m) in split:  # the backward pass is split
            return [(block, m, 0), (block, m, 1)]
        if ranks == 1:
            return [(block, m)]
        times = 2 if blocks[block].kind == "layer" else 1
        return [(block, m, place) for place in range(times * ranks)]

    summed = [number for number, block in enumerate(blocks) if block.needs_backward or block.kind == "head"]
    of_block = {block: [part for m in schedule.micro_batches for part in parts(block, m)] for block in summed}
    units = enumerate(schedule.model.units)
    return {unit: frozenset(part for b in spec.blocks for part in of_block.get(b, ())) for unit, spec in units}
