"""From the layout of a pipeline and the order of its positions to the actions of every rank.

Weights are there for the whole step. Ranks that hold the same stages share their homes: they gather the weights as the
step begins and reduce the gradients as it ends. A unit that blocks on several positions use (tied embeddings) lives
with the first of them, which sends its weights to the others and receives their gradients.

Activations go between two positions on a lane of their own for each direction, as far as there are lanes: what one
position sends another waits for nothing else. Where two share a lane their transfers take the places of their times
in one order that all ranks make alike, so that a lane that waits for the other side waits for something that comes
before: no deadlock, although a send holds its lane until its receive is there.

What comes to a rank is freed by its last reader, and what goes by its send. What a micro-batch's layers are called with
besides (``context``) every rank makes for itself (PREPARE), without the embedding's weights.

A document that is cut into slices passes the stages slice by slice, in an order that is made of any other (``causal``)
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
from tawpipe.schedule.placement import Home, padded_stripe
from tawpipe.schedule.spec import ModelSpec
from tawpipe.schedule.step import Schedule, StepSpec
from tawpipe.schedule.step_end import StepEnd

LANES = (Lane.INTER_W, Lane.GATHER, Lane.INTER_G, Lane.REDUCE)
"""Lanes of transfers between positions; what goes to a later position prefers the first, the rest the last ones."""
LEAST = 1e-6
"""Share of the longest block's time that every work takes at least, so that nothing begins when it ends."""


class Crossing(NamedTuple):
    """A boundary activation, or its gradient, that goes from one position to another.

    Args:
        work: that makes it.
        border: the block at whose input it is.
    """

    work: Work
    border: int
    source: int
    target: int


PipelineForm = tuple[int, tuple[int, ...], str]
"""Micro-batches of a pipeline, slices of every document that is cut, and the order made for these, or nothing."""


@dataclass(frozen=True)
class PipelineShape:
    """All that the ranks of a pipeline agree on.

    Args:
        costs: by whose times the transfers of one lane are put in order.
        order_of: the order of a pipeline with so many micro-batches.
        listed: what makes one for the bins of a step that has slices; None where orders are made ``causal``.
    """

    model: ModelSpec
    layout: Layout
    positions: Positions
    costs: PipelineCosts
    order_of: Callable[[int], Order]
    listed: Listed | None = None

    def form_of(self, step: StepSpec, rank: int) -> PipelineForm:
        """Of a rank's pipeline in a training step."""
        share, order = step.micro_batches[rank], step.orders[self.positions.replica(rank)] if step.orders else ""
        return len(share), step.cut_in(share), order

    def order_of_form(self, count: int, slices: tuple[int, ...], order: str) -> Order:
        """The order of a pipeline of this form."""
        return Order.parse(order) if order else causal(self.order_of(count), slices)

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For every unit the positions that compute with it; it lives with the first."""
        return tuple(self.layout.positions_of(unit.blocks) for unit in self.model.units)

    @cached_property
    def homes(self) -> tuple[Home, ...]:
        """Every unit over the ranks that hold its (first) block."""
        homes = []
        for unit, (first, *_) in zip(self.model.units, self.users, strict=True):
            ranks = self.positions.holders(first)
            homes.append(Home(ranks, padded_stripe(unit.numel, len(ranks))))
        return tuple(homes)

    @cached_property
    def lanes(self) -> dict[tuple[int, int], Lane]:
        """The lane of what goes from one position to another: of the four the one that fewest others of the two use."""
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
        """When every work would start and end if transfers took no time, and none of them is in no time itself."""
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
        """By position, what it sends to another one and receives from there."""
        crossings: list[list[Crossing]] = [[] for _ in range(self.layout.size)]
        for work in works:
            step = {"F": 1, "B": -1, "I": -1}.get(work.kind, 0)
            other = work.stage + step
            if not step or not 0 <= other < self.layout.stages:
                continue
            source, target = self.layout.places[work.stage], self.layout.places[other]
            border = self.layout.cuts[max(work.stage, other)]
            if source == target or (step < 0 and border <= self.model.first_backward):  # nothing is trained before
                continue
            for place in (source, target):
                crossings[place].append(Crossing(work, border, source, target))
        return crossings


def build_pipeline(
    shape: PipelineShape, step: StepSpec, *, training: bool, ranks: Sequence[int] | None = None
) -> Schedule:
    """The schedule of one step.

    Args:
        ranks: those whose programs are made, all by default.

    Raises:
        UserError: the order cannot use so many micro-batches.
    """
    world, positions = step.topology.world_size, shape.positions
    count = len({m for share in step.micro_batches for m in share})
    shares = positions.share(count, step.speeds) if step.shared is None else step.micro_batches  # bins were dealt
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
    """One rank's program."""

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
        """Units whose gradient buffer holds something of this step."""

    # buffers

    def _is_home(self, unit: int) -> bool:
        """True if the whole unit lives here, so that computing reads it there."""
        return self.homes[unit].index(self.rank) is not None and not self.several

    def _weights(self, unit: int) -> Buffer:
        return home_weight(unit) if self._is_home(unit) else pooled(f"W{unit}", 0)

    def _gradient(self, unit: int) -> Buffer:
        return home_gradient(unit) if self._is_home(unit) else pooled(f"G{unit}", 0)

    def _others(self, unit: int) -> tuple[int, ...]:
        """Positions besides its home that use a unit which lives here."""
        return self.shape.users[unit][1:] if unit in self.homed else ()

    def pools(self) -> tuple[Pool, ...]:
        """The buffers that the program uses."""
        pools = []
        for unit in self.units:
            padded, stripe, trained = self.homes[unit].padded, self.homes[unit].stripe, unit in self.trained
            if not self._is_home(unit):
                pools.append(Pool(f"W{unit}", Kind.WEIGHT, 1, padded))
                if trained:
                    pools.append(Pool(f"G{unit}", Kind.GRADIENT, 1, padded))
            if trained and (others := self._others(unit)):
                pools.append(Pool(f"A{unit}", Kind.GRADIENT, len(others), padded))
            if trained and self.several and unit in self.homed:
                pools.append(Pool(f"R{unit}", Kind.GRADIENT, 1, stripe))
        return tuple(pools)

    # the program

    def program(self) -> Iterator[Action]:
        """All but the end of the step."""
        group = self.shape.positions.group
        gather, reduce = (Lane.GATHER, Lane.REDUCE) if group == "node" else (Lane.INTER_W, Lane.INTER_G)
        for unit in self.homed if self.several else ():
            reads, writes = (home_weight(unit),), (self.weights[unit],)
            yield Action(Op.COLLECTIVE, gather, reads, writes, unit=unit, collective="all_gather", group=group)
        yield from self._tied(weights=True)
        yield from self._body()
        for unit in self.trained:
            if unit not in self.started:  # a pipeline without a micro-batch
                yield Action(Op.ZERO, Lane.COMPUTE, (), (self.gradients[unit],), unit=unit)
        if self.training:
            yield from self._tied(weights=False)
        for unit in reversed(self.homed) if self.several else ():
            if unit in self.trained:
                reads, writes = (self.gradients[unit],), (pooled(f"R{unit}", 0),)
                yield Action(Op.COLLECTIVE, reduce, reads, writes, unit=unit, collective="reduce_scatter", group=group)
                yield Action(Op.ADD, reduce, writes, (home_gradient(unit),), unit=unit)

    def _tied(self, *, weights: bool) -> Iterator[Action]:
        """The weights of units that several positions use, or their gradients."""
        for unit, (first, *others) in enumerate(self.shape.users):
            if not weights and unit not in self.trained:
                continue
            for number, other in enumerate(others):
                if self.position not in (first, other):
                    continue
                here, there = (first, other) if self.position == first else (other, first)
                send = (self.position == first) == weights
                lane = self.shape.lanes[(here, there) if send else (there, here)]
                arriving = pooled(f"A{unit}", number)
                buffer = self.weights[unit] if weights else self.gradients[unit] if send else arriving
                peer = self.shape.positions.rank(there, self.replica)
                yield exchange(lane, (Transfer(send, peer, unit, buffer),), "world")
                if not weights and not send:
                    gradient = self.gradients[unit]
                    yield Action(Op.ADD, lane, (gradient, arriving), (gradient,), unit=unit)

    def _body(self) -> Iterator[Action]:
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
        """Let the W at the end of a step go layer by layer, so that sums over ranks begin while others compute."""
        last = [*takewhile(lambda work: work.kind == "W", reversed(compute))][::-1]
        actions = sorted(chain.from_iterable(map(actions_of.__getitem__, last)), key=lambda action: -action.block)
        actions_of.update({work: [] if number else actions for number, work in enumerate(last)})

    def _take_turns(self, actions_of: dict[Work, list[Action]]) -> None:
        """Let works wait for those of the other lane that ``Order.after`` names."""
        for number, (work, other) in enumerate(sorted(self.order.after.items())):
            if actions_of.get(work) and actions_of.get(other):
                ended, begun = actions_of[other][-1], actions_of[work][0]
                actions_of[other][-1] = replace(ended, writes=(*ended.writes, turn(number)))
                reads, frees = (*begun.reads, turn(number)), (*begun.frees, turn(number))
                actions_of[work][0] = replace(begun, reads=reads, frees=frees)

    def _transfers(self) -> Iterator[tuple[Work, Action]]:
        """What goes to another position, or comes from there, with the work that makes it."""
        for work, border, source, target in self.crossings:
            send = self.position == source
            buffer = (block_input if work.kind == "F" else input_gradient)(self.numbers[work.micro_batch], border)
            peer = self.shape.positions.rank(target if send else source, self.replica)
            transfers = (Transfer(send, peer, border, buffer),)
            yield work, exchange(self.shape.lanes[source, target], transfers, "world")

    def _compute(self, work: Work) -> Iterator[Action]:
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
        """OFFLOAD or RELOAD of what a stage's layers keep: their inputs, or what is in the place of these.

        Args:
            slots: places in the host's memory that are taken, by the work that took them.
        """
        m, of_stage = self.numbers[work.micro_batch], self.layout.blocks_of(work.stage)
        first = max(1, self.model.first_backward)
        layers = [
            b for b in of_stage if b >= first and self.model.blocks[b].kind == "layer" and self.shape.costs.moves(b)
        ]
        there = work._replace(kind="O")
        if work.kind == "O":
            taken = {slot for other, slot in slots.items() if other.stage == work.stage}
            slots[there] = next(slot for slot in range(len(taken) + 1) if slot not in taken)
            for block in layers:
                here, away = self._kept(block, m, slots[there])
                yield Action(Op.OFFLOAD, Lane.HOST, here, away, here, block=block, micro_batch=m)
            return
        for block in reversed(layers):
            here, away = self._kept(block, m, slots[there])
            yield Action(Op.RELOAD, Lane.HOST, away, here, away, block=block, micro_batch=m)
        del slots[there]

    def _kept(self, block: int, m: int, slot: int) -> tuple[tuple[Buffer], tuple[Buffer]]:
        """What a layer keeps, on the device and at a place in the host's memory."""
        kind = self.step.keeps(block)
        return (Buffer(kind, (m, block)),), (Buffer(AWAY[kind], (slot, block)),)


def _with_contexts(program: Sequence[Action]) -> tuple[Action, ...]:
    """The program with PREPARE where no embedding makes a micro-batch's context, which its last reader frees."""
    existing, last = set[Buffer](), dict[Buffer, int]()
    for index, action in enumerate(program):
        for buffer in action.reads:
            if buffer.kind is Kind.CONTEXT:
                last[buffer] = index
    actions: list[Action] = []
    for index, action in enumerate(program):
        mine = next((buffer for buffer in (*action.reads, *action.writes) if buffer.kind is Kind.CONTEXT), None)
        if mine is not None:
            if mine not in existing and mine in action.reads:
                actions.append(Action(Op.PREPARE, Lane.COMPUTE, (), (mine,), micro_batch=action.micro_batch))
            if mine not in last:  # an embedding alone on its position, frozen
                actions.append(replace(action, writes=tuple(buffer for buffer in action.writes if buffer != mine)))
                continue
            existing.add(mine)
            frees = tuple(buffer for buffer in action.frees if buffer != mine)
            action = replace(action, frees=(*frees, mine) if last.get(mine) == index else frees)
        actions.append(action)
    return tuple(actions)
