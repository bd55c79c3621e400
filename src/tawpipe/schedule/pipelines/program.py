"""Actions of every rank of a pipeline, made from its layout and the order of its positions.

Weights are on the devices for the whole step. Ranks with the same stages share their homes: they gather the weights at
the beginning of the step and reduce the gradients at its end. A unit that blocks on several positions use (tied
embeddings) has its home at the first of them, which sends its weights to the others and receives their gradients.

Activations between two positions have a lane for each direction, as far as there are enough lanes, so that transfers
from one position to another wait for nothing else. If two pairs share a lane, their transfers are sorted by their
simulated times, equally on all ranks. A lane that waits for the other side then waits for an earlier transfer. So there
is no deadlock, although a send holds its lane until its receive is there.

A received activation is freed by its last reader, and a sent one by its send. Every rank makes the extra arguments of a
micro-batch's layers (``context``) itself (PREPARE), without the embedding's weights.

A document that is cut into slices passes the stages slice by slice. Its order is made from any other order (``causal``)
or for the step (``StepSpec.orders``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, takewhile
from typing import NamedTuple

from tawpipe.schedule.actions import Action, Lane, Op, Transfer, exchange
from tawpipe.schedule.blocks import backward, forward
from tawpipe.schedule.buffers import (
    AWAY,
    Buffer,
    Kind,
    Pool,
    block_input,
    home_gradient,
    home_weight,
    input_gradient,
    linear,
    pooled,
    turn,
)
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.links import Listed
from tawpipe.schedule.pipelines.orders import causal
from tawpipe.schedule.pipelines.positions import Positions
from tawpipe.schedule.pipelines.work import Order, PipelineCosts, Work, play
from tawpipe.schedule.placement import Home, padded_shard
from tawpipe.schedule.spec import ModelSpec
from tawpipe.schedule.step import Schedule, StepSpec
from tawpipe.schedule.step_end import StepEnd

LANES = (Lane.INTER_W, Lane.GATHER, Lane.INTER_G, Lane.REDUCE)
"""Lanes of transfers between positions. Transfers to later positions prefer the first ones, others the last."""
LEAST = 1e-6
"""Least time of a work item as a share of the longest block's time, so that no item ends when it begins."""


class Crossing(NamedTuple):
    """A boundary activation, or its gradient, that is sent from one position to another.

    Args:
        work: the work item that makes it.
        border: index of the block whose input it is.
        source: position that sends.
        target: position that receives.
    """

    work: Work
    border: int
    source: int
    target: int


PipelineForm = tuple[int, tuple[int, ...], str]
"""Form of a pipeline's step: number of micro-batches, number of slices of every cut document, and the text of the order
made for them (or ``""``)."""


@dataclass(frozen=True)
class PipelineShape:
    """Layout, positions, costs and orders that all ranks of a pipeline use.

    Args:
        model: sizes of the model.
        layout: the stages and their positions.
        positions: the ranks of every pipeline.
        costs: costs by whose times the transfers of one lane are ordered.
        order_of: function that returns the order of a pipeline for a number of micro-batches.
        listed: function that makes an order for the packed micro-batches of a step with slices; None to use ``causal``.
    """

    model: ModelSpec
    layout: Layout
    positions: Positions
    costs: PipelineCosts
    order_of: Callable[[int], Order]
    listed: Listed | None = None

    def form_of(self, step: StepSpec, rank: int) -> PipelineForm:
        """Return (micro-batch count, slices, order as text) of the pipeline of ``rank`` in a training step.

        ``slices`` are the numbers of slices of its cut documents. The text is ``""`` unless the step has orders of its
        own."""
        share, order = step.micro_batches[rank], step.orders[self.positions.replica(rank)] if step.orders else ""
        return len(share), step.cut_in(share), order

    def order_of_form(self, count: int, slices: tuple[int, ...], order: str) -> Order:
        """Return the order of a pipeline: from the text ``order``, or made if that is empty.

        An order that is made is the usual order for ``count`` micro-batches, changed by ``causal`` for ``slices``."""
        return Order.parse(order) if order else causal(self.order_of(count), slices)

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For every unit, the positions that compute with it; its home is at the first of them."""
        return tuple(self.layout.positions_of(unit.blocks) for unit in self.model.units)

    @cached_property
    def homes(self) -> tuple[Home, ...]:
        """Home of every unit: sharded over the ranks, one of each pipeline, that have its first block."""
        homes = []
        for unit, (first, *_) in zip(self.model.units, self.users, strict=True):
            ranks = self.positions.holders(first)
            homes.append(Home(ranks, padded_shard(unit.numel, len(ranks))))
        return tuple(homes)

    @cached_property
    def lanes(self) -> dict[tuple[int, int], Lane]:
        """(Source, target) positions -> lane on which one sends to the other.

        Of the possible lanes, the one is chosen that the fewest other transfers of the two positions use."""
        layout, pairs = self.layout, list[tuple[int, int]]()
        for stage in range(layout.stages - 1):
            a, b = layout.places[stage : stage + 2]
            pairs += [(a, b), (b, a)]
        for first, *others in self.users:
            pairs += [pair for other in others for pair in ((first, other), (other, first))]
        chosen: dict[tuple[int, int], Lane] = {}
        for a, b in dict.fromkeys(pairs):
            if a != b:
                used = [lane for pair, lane in chosen.items() if {a, b} & set(pair)]
                wanted = LANES if a < b else LANES[2:] + LANES[:2]
                chosen[a, b] = min(wanted, key=used.count)
        return chosen

    def times(self, order: Order) -> dict[Work, tuple[float, float]]:
        """Simulate ``order`` with transfers that take no time, and return (start, end) of every work item.

        Every item takes at least ``LEAST`` times the longest block's time, so that no item ends when it begins. The
        unit is that of the costs."""
        longest = max(block.forward + block.backward_input + block.backward_weight for block in self.costs.blocks)
        least = LEAST * longest or 1.0
        blocks = tuple(
            replace(
                block,
                forward=max(block.forward, least),
                backward_input=max(block.backward_input, least),
                backward_weight=max(block.backward_weight, least),
            )
            for block in self.costs.blocks
        )
        host = max(self.costs.host, least)
        return play(self.layout, order, replace(self.costs, blocks=blocks, hop=0.0, near_hop=0.0, host=host))

    def crossings(self, works: Iterable[Work]) -> list[list[Crossing]]:
        """Return for every position the activations and gradients that it sends or receives.

        Only transfers between positions are meant. Neighbouring stages on one position need no transfer. Gradients that
        no trained block needs are left out."""
        crossings: list[list[Crossing]] = [[] for _ in range(self.layout.size)]
        for work in works:
            step = {"F": 1, "B": -1, "I": -1}.get(work.kind, 0)
            other = work.stage + step
            if not step or not 0 <= other < self.layout.stages:
                continue
            source, target = self.layout.places[work.stage], self.layout.places[other]
            border = self.layout.cuts[max(work.stage, other)]
            if source == target or (step < 0 and border <= self.model.first_backward):  # nothing before is trained
                continue
            for place in (source, target):
                crossings[place].append(Crossing(work, border, source, target))
        return crossings


def build_pipeline(
    shape: PipelineShape, step: StepSpec, *, training: bool, ranks: Sequence[int] | None = None
) -> Schedule:
    """Return the schedule of one step of a pipeline strategy.

    Args:
        shape: layout, positions, costs and orders of the pipeline.
        step: the step.
        training: False for one forward pass with its loss.
        ranks: ranks whose programs are made; None for all.

    Raises:
        UserError: the order cannot use this number of micro-batches.
    """
    world, positions = step.topology.world_size, shape.positions
    count = len({m for share in step.micro_batches for m in share})
    shares = positions.share(count, step.speeds) if step.shared is None else step.micro_batches  # packed: as assigned
    head = shape.layout.places[-1]
    losses = tuple(share if positions.position(rank) == head else () for rank, share in enumerate(shares))
    step = replace(step, micro_batches=shares, losses=losses)
    forms = [shape.form_of(step, rank) if training else (len(share), (), "") for rank, share in enumerate(shares)]
    orders = {form: shape.order_of_form(*form) for form in set(forms)}
    times = {form: shape.times(order) for form, order in orders.items()}
    crossings = {form: shape.crossings(works) for form, works in times.items()}
    programs: list[tuple[Action, ...]] = [()] * world
    pools: list[tuple[Pool, ...]] = [()] * world
    for rank in range(world) if ranks is None else ranks:
        form = forms[rank]
        of_position = crossings[form][shape.positions.position(rank)]
        worker = _StageProgram(shape, step, rank, orders[form], times[form], of_position, training=training)
        end = StepEnd(rank, step, training=training)
        programs[rank] = tuple(end.close(_with_contexts(tuple(worker.program()))))
        pools[rank] = (*worker.pools(), *end.pools)
    name = step.strategy.name if training else "evaluation"
    return Schedule(name, step, tuple(programs), tuple(pools), training)


class _StageProgram:
    """Program of one rank of a pipeline."""

    def __init__(
        self,
        shape: PipelineShape,
        step: StepSpec,
        rank: int,
        order: Order,
        times: dict[Work, tuple[float, float]],
        crossings: Sequence[Crossing],
        *,
        training: bool,
    ) -> None:
        self.shape, self.step, self.rank, self.order, self.times = shape, step, rank, order, times
        self.crossings = crossings
        self.model, self.layout, self.homes, self.training = shape.model, shape.layout, step.homes, training
        self.position, self.replica = shape.positions.position(rank), shape.positions.replica(rank)
        self.numbers = step.micro_batches[rank]
        self.several = shape.positions.replicas > 1
        blocks = [block for stage in self.layout.stages_of(self.position) for block in self.layout.blocks_of(stage)]
        self.units = sorted({unit for block in blocks for unit in self.model.blocks[block].units})
        self.homed = [unit for unit in self.units if self.homes[unit].index(rank) is not None]
        self.trained = [unit for unit in self.units if training and self.model.units[unit].trainable]
        self.weights = {unit: self._weights(unit) for unit in self.units}
        self.gradients = {unit: self._gradient(unit) for unit in self.trained}
        self.started: set[int] = set()
        """Units whose gradient buffer already holds a value of this step."""

    # buffers

    def _is_home(self, unit: int) -> bool:
        """Return True if this rank owns the whole of ``unit``, so that computing reads and fills its home directly."""
        return self.homes[unit].index(self.rank) is not None and not self.several

    def _weights(self, unit: int) -> Buffer:
        """Return the buffer from which computing reads the whole weights of ``unit``: the home, or a pool buffer."""
        return home_weight(unit) if self._is_home(unit) else pooled(f"W{unit}", 0)

    def _gradient(self, unit: int) -> Buffer:
        """Return the buffer to which backward passes add the whole gradient of ``unit``: the home, or a pool buffer."""
        return home_gradient(unit) if self._is_home(unit) else pooled(f"G{unit}", 0)

    def _others(self, unit: int) -> tuple[int, ...]:
        """Return the positions that use ``unit`` in addition to its home's position; empty if its home is elsewhere."""
        return self.shape.users[unit][1:] if unit in self.homed else ()

    def pools(self) -> tuple[Pool, ...]:
        """Return the pools of the buffers that the program uses."""
        pools = []
        for unit in self.units:
            padded, shard_size, trained = self.homes[unit].padded, self.homes[unit].shard_size, unit in self.trained
            if not self._is_home(unit):
                pools.append(Pool(f"W{unit}", Kind.WEIGHT, 1, padded))
                if trained:
                    pools.append(Pool(f"G{unit}", Kind.GRADIENT, 1, padded))
            if trained and (others := self._others(unit)):
                pools.append(Pool(f"A{unit}", Kind.GRADIENT, len(others), padded))
            if trained and self.several and unit in self.homed:
                pools.append(Pool(f"R{unit}", Kind.GRADIENT, 1, shard_size))
        return tuple(pools)

    # the program

    def program(self) -> Iterator[Action]:
        """Yield all actions of the rank without the end of the step.

        First weights are gathered and sent to other positions, then the step is computed. At the end gradients are sent
        to their homes' positions, and reduced over the pipelines."""
        group = self.shape.positions.group
        gather, reduce = (Lane.GATHER, Lane.REDUCE) if group == "node" else (Lane.INTER_W, Lane.INTER_G)
        for unit in self.homed if self.several else ():
            reads, writes = (home_weight(unit),), (self.weights[unit],)
            yield Action(Op.COLLECTIVE, gather, reads, writes, unit=unit, collective="all_gather", group=group)
        yield from self._tied(weights=True)
        yield from self._body()
        for unit in self.trained:
            if unit not in self.started:  # a pipeline without micro-batches
                yield Action(Op.ZERO, Lane.COMPUTE, (), (self.gradients[unit],), unit=unit)
        if self.training:
            yield from self._tied(weights=False)
        for unit in reversed(self.homed) if self.several else ():
            if unit in self.trained:
                reads, writes = (self.gradients[unit],), (pooled(f"R{unit}", 0),)
                yield Action(Op.COLLECTIVE, reduce, reads, writes, unit=unit, collective="reduce_scatter", group=group)
                yield Action(Op.ADD, reduce, writes, (home_gradient(unit),), unit=unit)

    def _tied(self, *, weights: bool) -> Iterator[Action]:
        """Yield the transfers of this rank for units that several positions use, such as tied embeddings.

        Args:
            weights: True to send weights from the home's position to the others; False to send gradients to the home's
                position and add them there.
        """
        for unit, (first, *others) in enumerate(self.shape.users):
            if not weights and unit not in self.trained:
                continue
            for number, other in enumerate(others):
                if self.position not in (first, other):
                    continue
                here, remote = (first, other) if self.position == first else (other, first)
                send = (self.position == first) == weights
                lane = self.shape.lanes[(here, remote) if send else (remote, here)]
                arriving = pooled(f"A{unit}", number)
                buffer = self.weights[unit] if weights else self.gradients[unit] if send else arriving
                peer = self.shape.positions.rank(remote, self.replica)
                yield exchange(lane, (Transfer(send, peer, unit, buffer),), "world")
                if not weights and not send:
                    gradient = self.gradients[unit]
                    yield Action(Op.ADD, lane, (gradient, arriving), (gradient,), unit=unit)

    def _body(self) -> Iterator[Action]:
        """Yield the computing actions, offloads and transfers of the step, sorted by their simulated times.

        Work items are sorted by their start, and transfers by the end of the item whose result they carry."""
        compute, host = self.order.compute[self.position], self.order.host
        actions_of = {work: list(self._compute(work)) for work in compute}
        slots: dict[Work, int] = {}
        for work in host[self.position] if host else ():
            actions_of[work] = list(self._host(work, slots))
        if not host:
            self._by_layer(compute, actions_of)
        self._take_turns(actions_of)
        events = [(self.times[work][0], 1, work, actions) for work, actions in actions_of.items()]
        events += [(self.times[work][1], 0, work, [action]) for work, action in self._transfers()]
        for _, _, _, actions in sorted(events, key=lambda event: event[:3]):
            yield from actions

    def _by_layer(self, compute: Sequence[Work], actions_of: dict[Work, list[Action]]) -> None:
        """Sort the actions of the W items that end the program by layer, the last layer first.

        Changes ``actions_of``: all actions are moved to the first of these items. The gradient of a layer is then
        complete, and can be reduced over ranks, while other layers still compute."""
        last = [*takewhile(lambda work: work.kind == "W", reversed(compute))][::-1]
        actions = sorted(chain.from_iterable(map(actions_of.__getitem__, last)), key=lambda action: -action.block)
        actions_of.update({work: [] if number else actions for number, work in enumerate(last)})

    def _take_turns(self, actions_of: dict[Work, list[Action]]) -> None:
        """Add TURN buffers that make items wait for the items that ``Order.after`` names. Changes ``actions_of``.

        The last action of the earlier item writes the buffer; the first action of the waiting item reads and frees it.
        """
        for number, (work, other) in enumerate(sorted(self.order.after.items())):
            if actions_of.get(work) and actions_of.get(other):
                ended, begun = actions_of[other][-1], actions_of[work][0]
                actions_of[other][-1] = replace(ended, writes=(*ended.writes, turn(number)))
                reads, frees = (*begun.reads, turn(number)), (*begun.frees, turn(number))
                actions_of[work][0] = replace(begun, reads=reads, frees=frees)

    def _transfers(self) -> Iterator[tuple[Work, Action]]:
        """Yield (work item, EXCHANGE) for everything that this rank sends or receives.

        The work item makes what is transferred. For a receive it is an item of the sending rank."""
        for work, border, source, target in self.crossings:
            send = self.position == source
            buffer = (block_input if work.kind == "F" else input_gradient)(self.numbers[work.micro_batch], border)
            peer = self.shape.positions.rank(target if send else source, self.replica)
            transfers = (Transfer(send, peer, border, buffer),)
            yield work, exchange(self.shape.lanes[source, target], transfers, "world")

    def _compute(self, work: Work) -> Iterator[Action]:
        """Yield the actions of a work item F, B, I or W: at most one for each block of its stage.

        Blocks are in the order of the pass. Units whose gradients are filled are added to ``started``. In training the
        head has no FORWARD, because its backward pass computes the loss, too."""
        m, of_stage, blocks = self.numbers[work.micro_batch], self.layout.blocks_of(work.stage), self.model.blocks
        if work.kind == "F":
            for block in of_stage:
                if blocks[block].kind != "head" or not self.training:
                    weights = [self.weights[unit] for unit in blocks[block].units]
                    yield forward(self.step, block, m, weights, training=self.training)
            return
        for block in reversed(of_stage):
            spec = blocks[block]
            if not spec.needs_backward and spec.kind != "head":
                continue
            units = self.model.trainable_units(block)
            split = work.kind != "B" and spec.kind == "layer" and bool(units)
            gradients = {unit: (self.gradients[unit], unit in self.started) for unit in units}
            if work.kind == "W":
                if split:
                    sums, kept = tuple(buffer for buffer, _ in gradients.values()), linear(m, block)
                    reads = (kept, *sums)
                    yield Action(Op.BACKWARD_WEIGHT, Lane.COMPUTE, reads, sums, (kept,), block=block, micro_batch=m)
                continue
            self.started.update(units)
            reads = spec.backward_reads_weights or spec.kind == "head"
            weights = [self.weights[unit] for unit in spec.units] if reads else []
            (whole,) = backward(self.step, block, [m], weights, gradients)
            if split:
                whole = replace(whole, op=Op.BACKWARD_INPUT, writes=(*whole.writes, linear(m, block)))
            yield whole

    def _host(self, work: Work, slots: dict[Work, int]) -> Iterator[Action]:
        """Yield an OFFLOAD or RELOAD action for each layer of a stage whose kept activations may be offloaded.

        Args:
            work: an item O or R.
            slots: O item -> slot in CPU memory that it uses. An O item is added with the first free slot; an R item
                removes it.
        """
        m, of_stage = self.numbers[work.micro_batch], self.layout.blocks_of(work.stage)
        first = max(1, self.model.first_backward)
        layers = [
            b for b in of_stage if b >= first and self.model.blocks[b].kind == "layer" and self.shape.costs.moves(b)
        ]
        offload_work = work._replace(kind="O")
        if work.kind == "O":
            taken = {slot for other, slot in slots.items() if other.stage == work.stage}
            slots[offload_work] = next(slot for slot in range(len(taken) + 1) if slot not in taken)
            for block in layers:
                here, away = self._kept(block, m, slots[offload_work])
                yield Action(Op.OFFLOAD, Lane.HOST, here, away, here, block=block, micro_batch=m)
            return
        for block in reversed(layers):
            here, away = self._kept(block, m, slots[offload_work])
            yield Action(Op.RELOAD, Lane.HOST, away, here, away, block=block, micro_batch=m)
        del slots[offload_work]

    def _kept(self, block: int, m: int, slot: int) -> tuple[tuple[Buffer], tuple[Buffer]]:
        """Return the buffers of the activation that a layer keeps: on the device, and in a slot in the host."""
        kind = self.step.keeps(block)
        return (Buffer(kind, (m, block)),), (Buffer(AWAY[kind], (slot, block)),)


def _with_contexts(program: Sequence[Action]) -> tuple[Action, ...]:
    """Return ``program`` with a PREPARE for each context that no embedding on this rank makes.

    It is inserted before the first reader. A context holds the extra arguments of a micro-batch's layers. Its last
    reader now frees it. A context without readers is removed from the writes of the action that makes it."""
    existing, last = set[Buffer](), dict[Buffer, int]()
    for index, action in enumerate(program):
        for buffer in action.reads:
            if buffer.kind is Kind.CONTEXT:
                last[buffer] = index
    actions: list[Action] = []
    for index, action in enumerate(program):
        context_buffer = next(
            (buffer for buffer in (*action.reads, *action.writes) if buffer.kind is Kind.CONTEXT), None
        )
        if context_buffer is not None:
            if context_buffer not in existing and context_buffer in action.reads:
                actions.append(Action(Op.PREPARE, Lane.COMPUTE, (), (context_buffer,), micro_batch=action.micro_batch))
            if context_buffer not in last:  # a frozen embedding alone on its position
                actions.append(
                    replace(action, writes=tuple(buffer for buffer in action.writes if buffer != context_buffer))
                )
                continue
            existing.add(context_buffer)
            frees = tuple(buffer for buffer in action.frees if buffer != context_buffer)
            action = replace(action, frees=(*frees, context_buffer) if last.get(context_buffer) == index else frees)
        actions.append(action)
    return tuple(actions)
