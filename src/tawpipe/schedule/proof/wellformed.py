"""Checks of every action by itself: its lane, its numbers and its buffers must fit its operation.

The users of a schedule (``runtime``, ``simulate``, the proof) take some facts from an action's fields and some from its
buffers; both must agree. Dependencies follow from the buffers alone, so a missing buffer is a race.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property

from tawpipe.schedule.actions import COLLECTIVES, Action, Lane, Op, exchange
from tawpipe.schedule.blocks import left_behind
from tawpipe.schedule.buffers import (
    AWAY,
    BALANCE,
    COUNT,
    KEPT,
    NORM,
    SIZE,
    TRAVELLING,
    Buffer,
    Kind,
    block_input,
    context,
    home_gradient,
    home_weight,
    ids,
    input_gradient,
    key_gradients,
    keys,
    layer_cache,
    linear,
    loss,
    offloaded,
    pool_kind,
    pooled,
    reloaded,
    weight_copy,
)
from tawpipe.schedule.proof.symbolic import ScheduleError
from tawpipe.schedule.step import Schedule
from tawpipe.topology import cp_group_name

GROUPS = ("node", "rail", "world")


def _no_turn(buffer: Buffer) -> bool:
    """Return False for a TURN buffer, which holds no data."""
    return buffer.kind is not Kind.TURN


def _is_activation(buffer: Buffer) -> bool:
    """Return True for a buffer that holds data of a micro-batch."""
    return buffer.is_activation and _no_turn(buffer)


def check_forms(schedule: Schedule) -> None:
    """Check every home and every action of a schedule, each on its own, and raise an error at the first fault.

    Raises:
        ScheduleError: an action or a home is wrong; the message says what.
    """
    for unit, (spec, home) in enumerate(zip(schedule.model.units, schedule.homes, strict=True)):
        ranks = [rank for copy in home.copies for rank in copy]
        if home.padded < spec.numel or len(set(ranks)) < len(ranks):
            raise ScheduleError(f"unit {unit} does not fit its home, or a rank has it twice: {spec} in {home}")
    for rank, program in enumerate(schedule.programs):
        checker = _Checker(schedule, rank)
        for index, action in enumerate(program):
            for wrong in checker.faults(action):
                raise ScheduleError(f"{wrong}: rank {rank} #{index}: {action}")


def check_programs(schedule: Schedule) -> None:
    """Check the program of every rank as a whole (``_Checker.program_faults``). Raises at the first fault.

    Raises:
        ScheduleError: a program is wrong; the message says what and on which rank.
    """
    for rank, program in enumerate(schedule.programs):
        for wrong in _Checker(schedule, rank).program_faults(program):
            raise ScheduleError(f"rank {rank} {wrong}")


class _Checker:
    """Checks for one rank. Methods that yield texts yield one for every fault, and nothing if there is none."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule, self.rank, self.model, self.topology = schedule, rank, schedule.model, schedule.topology
        self.buffers = schedule.buffer_elements(rank)
        self.step, self.own = schedule.step, schedule.step.micro_batches[rank]
        homes = [unit for unit, home in enumerate(schedule.homes) if home.index(rank) is not None]
        self.contexts = {
            buffer for action in schedule.programs[rank] for buffer in action.reads if buffer.kind is Kind.CONTEXT
        }
        self.early = schedule.training and schedule.step.settings.early_updates
        backward = [action for action in schedule.programs[rank] if action.op in (Op.BACKWARD, Op.BACKWARD_INPUT)]
        of_layers = [action for action in backward if 0 < action.block < len(self.model.blocks) - 1]
        self.sums = of_layers[-1:] if schedule.training and self.model.balances else []
        """The action after which the loss that balances experts is complete on this rank; empty for none."""
        overlaps = any(action.lane is not Lane.COMPUTE for action in schedule.programs[rank])
        self.homes = Lane.HOME if overlaps else Lane.COMPUTE
        """Lane of homes in CPU memory; COMPUTE if the schedule has no overlap."""
        self.raises = Lane.RAISE if overlaps else Lane.COMPUTE
        self.updated = [unit for unit in homes if schedule.training and self.model.units[unit].trainable]

    def faults(self, action: Action) -> Iterator[str]:
        """Yield the faults of one action: in its buffers, its fields, and the rules of its operation."""
        for buffers in (action.reads, action.writes, action.frees):
            if len(set(buffers)) < len(buffers):
                yield "names a buffer twice"
        for buffer in (*action.reads, *action.writes):
            cached = self.schedule.looped and buffer.kind is Kind.CACHE
            if not (buffer in self.buffers or buffer.is_activation or buffer in (NORM, COUNT, BALANCE, SIZE) or cached):
                yield f"{buffer} is in no pool and no home"
            if buffer.kind is Kind.IDS and not self.schedule.looped:
                yield f"{buffer} is for laps"
        if bool(action.transfers) != (action.op is Op.EXCHANGE) or bool(action.collective) != (
            action.op is Op.COLLECTIVE
        ):
            yield "has transfers or a collective that its operation does not take, or none"
        if bool(action.group) != (action.op in (Op.EXCHANGE, Op.COLLECTIVE, Op.SIZE, Op.COUNT, Op.NORM)):
            yield "has a group that its operation does not take, or none"
        if BALANCE in action.reads and action.op is not Op.NORM:
            yield "reads the sums of the loss that balances experts"
        yield from self._compression(action)
        yield from self._lane_of_homes(action)
        if action.op is Op.UPDATE:
            yield from self._update(action)
            return
        if any(buffer.kind is Kind.HOME_WEIGHT for buffer in action.writes):
            yield "only UPDATE changes weights at home"
        checks = {
            Op.FORWARD: self._compute,
            Op.BACKWARD: self._compute,
            Op.KEYS: self._compute,
            Op.KEYS_BACKWARD: self._compute,
            Op.BACKWARD_INPUT: self._compute,
            Op.BACKWARD_WEIGHT: self._weight_part,
            Op.PREPARE: self._prepare,
            Op.ZERO: self._zero,
            Op.ADD: self._add,
            Op.EXCHANGE: self._exchange,
            Op.COLLECTIVE: self._collective,
            Op.SIZE: self._size,
            Op.COUNT: self._count,
            Op.NORM: self._norm,
            Op.RAISE: self._raise,
            Op.OFFLOAD: self._host,
            Op.RELOAD: self._host,
        }
        refreshes = action.op is Op.COLLECTIVE and action.refreshes
        if not (refreshes or action.op is Op.SIZE) and SIZE in (*action.reads, *action.writes):
            yield "has nothing to do with what has changed"
        if not refreshes and any(buffer.kind is Kind.COPY for buffer in action.writes):
            yield "only a refresh changes what stays"
        if action.op is Op.PREPARE and not self.step.strategy.axis:
            yield "is for ranks that another one sends a micro-batch to"
        if action.op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) and not self.step.strategy.splits:
            yield "is for strategies that take backward passes apart"
        yield from checks[action.op](action)

    def program_faults(self, program: tuple[Action, ...]) -> Iterator[str]:
        """Yield the faults of a whole program: wrong numbers of NORM or UPDATE, or unused buffers.

        Required are one NORM, one UPDATE for every gradient at home, and a use of every pool buffer. With early updates
        also one COUNT; with refreshed copies one SIZE, of exactly the units that are refreshed."""
        counts = Counter(action.op for action in program)
        for op, wanted in (
            (Op.NORM, int(not (self.schedule.looped or self.schedule.placed))),
            (Op.COUNT, int(self.early)),
        ):
            if counts[op] != wanted:
                yield f"has {counts[op]} {op}"
        if [action for action in program if BALANCE in action.writes] != self.sums:
            yield "does not complete the loss that balances experts with the last backward action of its layers"
        sized = [buffer for action in program if action.op is Op.SIZE for buffer in action.reads]
        refreshed = [action for action in program if action.refreshes]
        if counts[Op.SIZE] != self.step.refreshes or sorted(sized) != sorted(b for a in refreshed for b in a.reads[:2]):
            yield f"counts once a step what has changed of {_texts(sized)}, and refreshes something else"
        updates = Counter(action.unit for action in program if action.op is Op.UPDATE)
        if updates != Counter(self.updated):
            yield f"updates the units {sorted(updates.elements())}, at home are {self.updated}"
        pools = self.schedule.pools[self.rank]
        if len({pool.name for pool in pools}) < len(pools):
            yield "has two pools of one name"
        if any(pool.kind is not pool_kind(pool.name) for pool in pools):
            yield "has a pool of another kind than its name says"
        used = {buffer for action in program for buffer in (*action.reads, *action.writes)}
        unused = set(self.buffers) - used - self._at_home_already()
        if unused := sorted(str(buffer) for buffer in unused if not buffer.is_home):
            yield f"has buffers that nothing uses: {', '.join(unused)}"

    def _at_home_already(self) -> set[Buffer]:
        """Return the pool buffers that may be unused, because their shards are at home on this rank."""
        units = self.schedule.placed[self.rank] if self.schedule.placed else ()
        shards = ((unit, self.schedule.homes[unit].index(self.rank)) for unit in units)
        return {pooled(f"W{unit}", shard) for unit, shard in shards if shard is not None}

    def _compute(self, action: Action) -> Iterator[str]:
        """Yield the faults of an action that computes: its lane, block, activations, weights or gradients."""
        if action.lane is not Lane.COMPUTE:
            yield "computes on a lane of transfers"
        if not 0 <= action.block < len(self.model.blocks) or action.micro_batch not in self.own:
            yield "a block that does not exist or a micro-batch of another rank"
            return
        if self.schedule.looped:
            yield from self._pass(action)
            return
        b, m, spec = action.block, action.micro_batch, self.model.blocks[action.block]
        backward = action.op in (Op.BACKWARD, Op.BACKWARD_INPUT, Op.KEYS_BACKWARD)
        if action.op is Op.BACKWARD_INPUT and spec.kind != "layer":
            yield "only layers have their backward pass in parts"
        together = self.step.ranks_of(m) > 1 and spec.kind == "layer"
        if action.op in (Op.KEYS, Op.KEYS_BACKWARD) and not together:
            yield "keys and values of what is no layer, or of rows that a rank computes alone"
            return
        saved = self.step.saves(b, m) if self.schedule.training and spec.needs_backward else None
        if not backward and self.schedule.training and spec.kind == "head":
            yield "the head goes forward within its backward pass"

        # The activations of the block, forward or backward.
        reads, writes = {self._boundary(b, m), context(m)}, {self._boundary(b + 1, m)}
        if b == 0:
            reads, writes = {context(m)} if backward else set(), writes | {context(m)}
            if context(m) not in self.contexts:  # no other block on this rank needs it
                writes.discard(context(m))
        if self.schedule.training and (not backward or spec.kind == "head"):
            reads |= set(left_behind(self.step, b, m))
        if spec.kind == "head":
            writes = {loss(m)}
        elif backward:
            reads, writes = reads | {input_gradient(m, b + 1)}, set()
            if self.step.settings.sequence_chunk:
                reads |= {self._kept(saved, b, m)} if saved else set()
            else:
                kept, moved = self.step.keeps(b, m), self.step.offloads(b)
                source = reloaded(self._place(m), b, kept) if moved else Buffer(kept, (m, b))
                reads = reads - {block_input(m, b)} | ({source} if b > 0 else set())
        elif saved:
            writes |= {self._kept(saved, b, m)}
        if backward and b > self.model.first_backward:
            writes |= {input_gradient(m, b)}

        # Keys and values of a context-parallel group; data for the second part of a split backward pass.
        if action.op is Op.KEYS:
            back = reloaded(self._place(m), b)
            source = back if self.step.moves(b) and back in action.reads else self._boundary(b, m)
            reads, writes = {source, context(m)}, {keys(m, b)}
        elif action.op is Op.KEYS_BACKWARD:
            reads = {buffer for buffer in reads if buffer != input_gradient(m, b + 1) and buffer.kind not in KEPT}
            reads |= {key_gradients(m, b)} | writes
        elif together:
            reads |= {keys(m, b)}
            writes |= {key_gradients(m, b)} if backward else set()
        if m in self.step.neighbours and spec.kind == "layer":
            of_others = self._of_slices(action, backward)
            reads, writes = reads | of_others[0], writes | of_others[1]
        if action.op is Op.BACKWARD_INPUT:
            writes |= {linear(m, b)}
        activations = [set(filter(_is_activation, side)) for side in (action.reads, action.writes)]
        if activations != [reads, writes]:
            yield f"reads and writes other activations than {_texts(reads)} and {_texts(writes)}"

        # Weights, gradients and freed buffers.
        needs = spec.kind == "head" or not backward or spec.backward_reads_weights
        if len(action.weights) != (len(spec.units) if needs else 0) or any(
            buffer.is_weight for buffer in action.writes
        ):
            yield f"reads other weights than those of the units {spec.units}"
        makes = self.model.trainable_units(b) if backward else ()
        if len(action.gradients) != len(makes):
            yield f"makes other gradients than those of the units {makes}"
        if not {buffer for buffer in action.reads if buffer.is_gradient} <= set(action.writes):
            yield "reads a gradient that it does not add to"
        if NORM in (*action.reads, *action.writes):
            yield "has nothing to do with the norm"
        turns = {buffer for buffer in action.reads if buffer.kind is Kind.TURN}
        if not set(action.frees) <= reads | turns:
            yield "frees something else than an activation that it reads"

    def _of_slices(self, action: Action, backward: bool) -> tuple[set[Buffer], set[Buffer]]:
        """Return the keys and key gradients that a layer's action on a document slice must (read, write)."""
        b, m = action.block, action.micro_batch
        before, behind = self.step.neighbours[m]
        earlier = {keys(other, b) for other in before}
        if not backward:
            stays = behind or (self.schedule.training and self.model.blocks[b].needs_backward)
            return earlier, {keys(m, b)} if stays else set()
        sums = {key_gradients(other, b) for other in before}
        return earlier | {keys(m, b)} | (sums | {key_gradients(m, b)} if behind else set()), sums

    def _pass(self, action: Action) -> Iterator[str]:
        """Yield the faults of a block's action in a decode step: a FORWARD with exactly certain buffers."""
        b, m, kind = action.block, action.micro_batch, self.model.blocks[action.block].kind
        kept = {layer_cache(b)} if kind == "layer" else set()
        source = {ids(m)} if kind == "embedding" else {block_input(m, b), context(m)}
        target = {ids(m)} if kind == "head" else {block_input(m, b + 1)}
        if kind == "embedding" and context(m) in self.contexts:
            target |= {context(m)}
        needs = {home_weight(unit) for unit in self.model.blocks[b].units}
        if (set(action.reads), set(action.writes)) != (source | kept | needs, target | kept):
            yield f"must read {_texts(source | kept | needs)} and write {_texts(target | kept)}"
        if len(action.weights) != len(self.model.blocks[b].units) or action.op is not Op.FORWARD:
            yield "goes forward with its units, once each"
        if not set(action.frees) <= source:
            yield "frees something else than an activation that it reads"

    def _weight_part(self, action: Action) -> Iterator[str]:
        """Yield the faults of a BACKWARD_WEIGHT: it must free its input and add to its block's gradients."""
        if not 0 <= action.block < len(self.model.blocks) or action.micro_batch not in self.own:
            yield "a block that does not exist or a micro-batch of another rank"
            return
        kept = linear(action.micro_batch, action.block)
        read, freed = set(filter(_is_activation, action.reads)), set(filter(_no_turn, action.frees))
        if action.lane is not Lane.COMPUTE or read != {kept} or freed != {kept}:
            yield f"must read and free {kept}"
        sums = {buffer for buffer in action.reads if buffer.is_gradient}
        if sums != set(action.gradients) or len(sums) != len(self.model.trainable_units(action.block)):
            yield "must add to the gradients of its block's units"

    def _prepare(self, action: Action) -> Iterator[str]:
        """Yield the faults of a PREPARE: it must write the context of one of this rank's micro-batches.

        It reads nothing, or in decode steps the input of its first block."""
        if action.lane is not Lane.COMPUTE or action.micro_batch not in self.own:
            yield "computes on a lane of transfers, or a micro-batch of another rank"
        headed = self.schedule.looped and len(action.reads) == 1 and action.reads[0].kind is Kind.INPUT
        told = headed and action.reads[0].at[0] == action.micro_batch
        if (action.reads and not told) or action.frees or action.writes != (context(action.micro_batch),):
            yield "must write what a micro-batch's layers are called with, and read nothing but a pass's header"

    def _streams(self, b: int) -> bool:
        """Return True if the input of block ``b`` is offloaded chunk by chunk."""
        return self.schedule.training and self.step.streams(b)

    def _boundary(self, b: int, m: int) -> Buffer:
        """Return the buffer of the input of block ``b`` for micro-batch ``m``."""
        return offloaded(self._place(m), b) if self._streams(b) else block_input(m, b)

    def _kept(self, saved: Kind, b: int, m: int) -> Buffer:
        """Return the buffer of what block ``b`` keeps for micro-batch ``m``, of kind ``saved``."""
        return Buffer(Kind.OFFLOADED_ATTENTION, (self._place(m), b)) if self._streams(b) else Buffer(saved, (m, b))

    def _host(self, action: Action) -> Iterator[str]:
        """Yield the faults of an OFFLOAD or RELOAD: it must move what a layer keeps, between the expected buffers."""
        b, m = action.block, action.micro_batch
        if self.step.strategy.orders_host:
            yield from self._ordered_host(action)
            return
        if not self.schedule.training or not self.step.moves(b) or m not in self.own:
            yield "moves what a block keeps that does not wait in the host's memory"
            return
        kept, place = self.step.keeps(b), self._place(m)
        host_buffers = (offloaded(place, b, kept),)
        expected = ((Buffer(kept, (m, b)),), host_buffers, ())
        if action.op is Op.RELOAD:
            expected = (host_buffers, (reloaded(place, b, kept),), host_buffers)
        if (action.reads, action.writes, action.frees) != expected:
            reads, writes, frees = map(_texts, expected)
            yield f"must read {reads}, write {writes} and free {frees}"

    def _ordered_host(self, action: Action) -> Iterator[str]:
        """Yield the faults of an OFFLOAD or RELOAD, for strategies whose order chooses the slots in CPU memory.

        It must move what a layer keeps into or out of any slot of this layer, and free what it reads."""
        reads, writes, frees = (tuple(filter(_no_turn, side)) for side in (action.reads, action.writes, action.frees))
        here, away = (reads, writes) if action.op is Op.OFFLOAD else (writes, reads)
        layer = 0 < action.block < len(self.model.blocks) - 1 and action.micro_batch in self.own
        kind = self.step.keeps(action.block) if layer else Kind.INPUT
        if not layer or here != (Buffer(kind, (action.micro_batch, action.block)),) or frees != reads:
            yield "must move what a layer keeps, and leave nothing behind"
        if [(buffer.kind, buffer.at[-1]) for buffer in away] != [(AWAY[kind], action.block)]:
            yield "must move it to the host's memory, or from there"

    def _place(self, m: int) -> int:
        """Return the position of micro-batch ``m`` in its round on this rank."""
        return self._places[m]

    @cached_property
    def _places(self) -> dict[int, int]:
        """Micro-batch -> its position in its round."""
        rounds = (self.step.in_round(self.rank, number) for number in range(self.step.rounds))
        return {m: place for micro_batches in rounds for place, m in enumerate(micro_batches)}

    def _zero(self, action: Action) -> Iterator[str]:
        """Yield the faults of a ZERO: it must write one gradient of an existing unit, and read nothing."""
        if action.reads or action.frees or len(action.writes) != 1 or not action.gradients or not self._unit(action):
            yield "must write one gradient of a unit and read nothing"

    def _add(self, action: Action) -> Iterator[str]:
        """Yield the faults of an ADD: it must add one or more gradients of a unit to one buffer, and free nothing."""
        gradients = all(buffer.is_gradient for buffer in (*action.reads, *action.writes))
        if not gradients or action.frees or not self._unit(action):
            yield "must read and write gradients of a unit"
        if len(action.writes) != 1 or not set(action.reads) - set(action.writes):
            yield "must add at least one other buffer to one buffer"

    def _unit(self, action: Action) -> bool:
        """Return True if the action's unit exists and every home buffer that the action names is of this unit."""
        homes = [buffer for buffer in (*action.reads, *action.writes) if buffer.is_home]
        return 0 <= action.unit < len(self.model.units) and all(buffer.at == (action.unit,) for buffer in homes)

    def _exchange(self, action: Action) -> Iterator[str]:
        """Yield the faults of an EXCHANGE: its buffers, its group, its peers, and the kinds of what it moves."""
        if action != exchange(action.lane, action.transfers, action.group, compression=action.compression):
            yield "its buffers are not those of its transfers"
        if action.group not in GROUPS:
            yield "there is no such group"
            return
        peers = set(self.topology.group(action.group, self.rank)) - {self.rank}
        if not {transfer.peer for transfer in action.transfers} <= peers:
            yield "a peer is not in the group"
        used = (*action.reads, *action.writes)
        if not all(buffer.is_weight or buffer.is_gradient or buffer.kind in TRAVELLING for buffer in used):
            yield "sends or receives what does not travel"
        if set(action.reads) & set(action.writes):
            yield "receives into a buffer that it sends"
        if any(buffer.is_home for buffer in action.writes):
            yield "receives into a home"

    def _collective(self, action: Action) -> Iterator[str]:
        """Yield the faults of a COLLECTIVE: weights are gathered, gradients reduced, never into a home.

        It must have a known group and unit. One that refreshes a copy must read home, copy and SIZE, and write the
        copy."""
        if any(map(_is_activation, (*action.reads, *action.writes))):
            yield from self._keys_together(action)
            return
        known = action.group in GROUPS or self.topology.has_strided_group(action.group)
        if action.collective not in COLLECTIVES or not known or not self._unit(action) or action.frees:
            yield "there is no such collective, group or unit"
            return
        rooted = action.collective in ("broadcast", "reduce")
        if rooted != (action.root in self.topology.group(action.group, self.rank)):
            yield "the root is not in the group"
        if action.refreshes:
            copy = weight_copy(action.unit)
            if (action.reads, action.writes) != ((home_weight(action.unit), copy, SIZE), (copy,)):
                yield "must read what is at home, its copy and size, and write the copy"
            return
        gathers = action.collective in ("all_gather", "broadcast")
        if not all(buffer.is_weight if gathers else buffer.is_gradient for buffer in (*action.reads, *action.writes)):
            yield "weights are gathered, gradients are reduced"
        counts = (len(action.reads), len(action.writes))
        if action.collective == "broadcast":
            fits = counts == ((1, 0) if action.root == self.rank else (0, 1))
        else:
            in_place = action.collective in ("reduce", "all_reduce")
            fits = counts == (1, 1) and (action.reads == action.writes) == in_place
        if not fits:
            yield "reads or writes other buffers than its collective does"
        if any(buffer.is_home for buffer in action.writes):
            yield "a collective writes into a home"

    def _keys_together(self, action: Action) -> Iterator[str]:
        """Yield the faults of a COLLECTIVE of keys and values or of their gradients.

        It must gather keys and values, or reduce gradients, in place and within a context-parallel group."""
        ranks, b, m = self.step.ranks_of(action.micro_batch), action.block, action.micro_batch
        buffer = keys(m, b) if action.collective == "all_gather" else key_gradients(m, b)
        if ranks == 1 or action.group != cp_group_name(ranks) or action.root >= 0 or action.unit >= 0:
            yield "keys and values are for the ranks that compute a row together"
        if action.collective not in ("all_gather", "reduce_scatter") or action.frees:
            yield "keys and values are gathered, their gradients summed up, and nothing else"
        if (action.reads, action.writes) != ((buffer,), (buffer,)) or m not in self.own:
            yield f"must read and write {buffer}"

    def _compression(self, action: Action) -> Iterator[str]:
        """Yield the faults of the compression of an action: only transfers between nodes may have one."""
        settings = self.step.settings
        weights = any(buffer.is_weight for buffer in (*action.reads, *action.writes))
        chosen = settings.weights_compression if weights else settings.gradients_compression
        far = action.op in (Op.EXCHANGE, Op.COLLECTIVE) and action.lane not in (Lane.GATHER, Lane.REDUCE, Lane.SEQ)
        far = far and self.topology.num_nodes > 1
        allowed = {"" if chosen == "none" else chosen} if far else {""}
        if weights and chosen == "exact" and not any(buffer.kind is Kind.HOME_WEIGHT for buffer in action.reads):
            allowed = {""}  # weights from a refreshed copy
        if action.lane is Lane.COMPUTE:  # without overlap all transfers are on COMPUTE
            allowed.add("")
        if action.compression not in allowed:
            yield f"travels as {action.compression or 'its own type'}"
        if action.compression and action.collective not in ("", "all_gather", "reduce_scatter"):
            yield f"no {action.collective} knows 8 bits"
        if action.compression == "exact" and action.collective != ("all_gather" if weights else "reduce_scatter"):
            yield "changes of weights are gathered, coded gradients are reduced"

    def _lane_of_homes(self, action: Action) -> Iterator[str]:
        """Yield the faults of the lane of an action that uses homes, or of the lanes HOME and RAISE.

        Transfers between the device and homes in CPU memory share buffers, so they must be on one lane. Only UPDATE,
        ADD, NORM and RAISE may use these homes directly."""
        touches = any(buffer.kind is Kind.HOME_GRADIENT for buffer in (*action.reads, *action.writes))
        at_home = action.op is Op.UPDATE or (action.op is Op.ADD and touches)
        streams = at_home and self.step.homes_in_host
        if action.lane is Lane.HOME and not streams:
            yield "has nothing to do with homes in the host's memory"
        if (streams or action.op is Op.UPDATE) and action.lane is not (self.homes if streams else Lane.COMPUTE):
            yield "is not on the lane of homes"
        if touches and self.step.homes_in_host and not at_home and action.op is not Op.NORM:
            yield "reads or writes a gradient in the host's memory"

        if (action.lane is Lane.RAISE) > (action.op is Op.RAISE):
            yield "brings no weights from homes"
        reads = any(buffer.kind is Kind.HOME_WEIGHT for buffer in action.reads)
        if reads and self.step.copies_in_host and action.op not in (Op.UPDATE, Op.RAISE):
            yield "reads weights in the host's memory"

    def _raise(self, action: Action) -> Iterator[str]:
        """Yield the faults of a RAISE: it must copy one unit's weights from a home in CPU memory to a device buffer."""
        if not self.step.copies_in_host or action.lane is not self.raises or not self._unit(action):
            yield "is for weights of a unit in the host's memory, on a lane of its own"
        places = [buffer for buffer in action.writes if buffer.kind is Kind.WEIGHT]
        if action.reads != (home_weight(action.unit),) or len(action.writes) != 1 or not places or action.frees:
            yield "must bring weights from home to a place on the device"

    def _size(self, action: Action) -> Iterator[str]:
        """Yield the faults of a SIZE: it must read pairs of weights at home and their copy, and write SIZE."""
        pairs = [buffer for home in action.reads[::2] for buffer in (home, weight_copy(home.at[0]))]
        if action.writes != (SIZE,) or action.frees or list(action.reads) != pairs or not pairs:
            yield "must read weights at home, each with its copy, and write size"
        if any(buffer.kind is not Kind.HOME_WEIGHT for buffer in action.reads[::2]):
            yield "counts changes of what is not at home"
        if action.group not in GROUPS and not self.topology.has_strided_group(action.group):
            yield "there is no such group"

    def _count(self, action: Action) -> Iterator[str]:
        """Yield the faults of a COUNT: it must be over all ranks, read nothing and write COUNT."""
        if (action.group, action.reads, action.writes, action.frees) != ("world", (), (COUNT,), ()):
            yield "must be over the world, read nothing and write count"

    def _norm(self, action: Action) -> Iterator[str]:
        """Yield the faults of a NORM: it must read gradients and losses, write NORM and free the losses."""
        first = {home_gradient(unit) for unit in self.updated if self.rank in self.schedule.homes[unit].ranks}
        losses = set(map(loss, self.step.losses_of(self.rank)))
        if action.group != "world":
            yield "NORM is over the world"
        expected = {
            *first,
            *losses,
            *[NORM] * self.schedule.training,
            *[COUNT] * self.early,
            *[BALANCE] * len(self.sums),
        }
        if set(action.reads) != expected or action.writes != (NORM,) or set(action.frees) != losses:
            yield f"must read {_texts(expected)}, write norm and free the losses"

    def _update(self, action: Action) -> Iterator[str]:
        """Yield the faults of an UPDATE: it must read NORM (or COUNT) and the unit's home here, and write that home."""
        home = {home_weight(action.unit), home_gradient(action.unit)}
        if action.unit not in self.updated or action.frees:
            yield "updates what is not at home here"
        after = COUNT if self.early else NORM
        landed = {buffer for buffer in action.reads if buffer.kind is Kind.LANDING}
        passes = home - {home_gradient(action.unit)} | landed
        wanted = passes if landed and self.step.passes_gradients else home
        if set(action.reads) != wanted | {after} or len(landed) > 1 or set(action.writes) != home:
            yield f"must read {after} and {_texts(home)} and write these two"


def _texts(buffers: Iterable[Buffer]) -> str:
    """Return the texts of ``buffers``, sorted and separated by commas; ``nothing`` if there are none."""
    return ", ".join(sorted(map(str, buffers))) or "nothing"
