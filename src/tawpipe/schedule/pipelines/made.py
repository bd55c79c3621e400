"""The pipelines whose orders, or stages as well, are made for the costs of a model.

The search for them stands higher, behind a door that opens when something is made: a run of any other strategy never
imports it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from tawpipe.doors import Door
from tawpipe.errors import UserError
from tawpipe.schedule.buffers import Kind
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.limits import QUICK, searched
from tawpipe.schedule.pipelines.links import Listed
from tawpipe.schedule.pipelines.memory import fits
from tawpipe.schedule.pipelines.periodic import Periodic
from tawpipe.schedule.pipelines.positions import Positions
from tawpipe.schedule.pipelines.program import PipelineShape, build_pipeline
from tawpipe.schedule.pipelines.strategy import KEPT, ActivationPipeline, order_of_layout, parse_order
from tawpipe.schedule.pipelines.work import Order, PipelineCosts, makespan, play
from tawpipe.schedule.refusal import MemoryOfPosition
from tawpipe.schedule.sizes.activations import peak_activations
from tawpipe.schedule.spec import ModelSpec
from tawpipe.schedule.step import StepSpec

TRIES = 8
"""Limits of memory, each lower by what the order for the one before held too much, after which none is found."""


@dataclass(frozen=True)
class OrderSearch:
    """The functions that search for stages and orders.

    Args:
        arrange: makes the shortest order of those that it tries.
        continuing: makes the order that goes on for any number of micro-batches.
        listed: makes an order of micro-batches that are cut in slices.
        generate: makes stages, their places and an order.
        fastest: makes the fastest order within a limit of memory, offloading included.
        continuing_in_memory: as ``continuing``, within a limit of memory, offloading included.
        choose: chooses for every layer what it keeps, offloads or computes again.
        solve: improves an order by a solver.
    """

    arrange: Callable[..., Order]
    continuing: Callable[..., Periodic]
    listed: Callable[..., Order]
    generate: Callable[..., Layout]
    fastest: Callable[..., Order]
    continuing_in_memory: Callable[..., Periodic]
    choose: Callable[..., Any]
    solve: Callable[..., Any]


SEARCH = Door[OrderSearch]("tawpipe.orders.search")


@lru_cache(KEPT)
def _within(step: StepSpec) -> PipelineCosts:
    """The costs of a step with as much less memory for what waits for backward passes as transfers need besides.

    Raises:
        UserError: a limit that nothing meets.
    """
    strategy = step.strategy
    assert isinstance(strategy, SolvedPipeline)
    shape = strategy.shape(step.model, step.topology)
    positions, few = shape.positions, searched(shape.layout.size) + 1
    if len(step.micro_batches[positions.rank(0, 0)]) > few:  # the rest is the same again
        step = replace(step, micro_batches=positions.share(few * positions.replicas, step.speeds))
    count, given, least = len(step.micro_batches[positions.rank(0, 0)]), shape.costs, math.inf
    low, high = -math.inf, given.memory
    for _ in range(TRIES):
        lower = low
        try:
            most = held_at_once(step, shape, order_of_layout(strategy, shape.layout, given, count))
        except UserError:  # memory for no order
            if given is shape.costs:
                raise
            low = given.memory
        else:
            if fits(shape.costs, most):
                return given
            least, high = min(least, most), given.memory
            lower = high - (most - shape.costs.memory)
        given = replace(given, memory=lower if lower > low else (low + high) / 2)
    expected = f"more: {least:.6g} was the least, with what is on its way between positions"
    raise UserError("memory of a position", shape.costs.memory, expected, need=MemoryOfPosition())


def held_at_once(step: StepSpec, shape: PipelineShape, order: Order) -> float:
    """The most memory of a position at any time of a step in an order, with what is resident, what has come for works
    that are yet to start, and what is yet to go.
    """
    ranks = [shape.positions.rank(place, 0) for place in range(shape.layout.size)]
    schedule = build_pipeline(replace(shape, order_of=lambda _: order), step, training=True, ranks=ranks)
    sizes, resident = activation_sizes(step, shape.costs), shape.costs.stages(shape.layout).resident
    return max(peak_activations(schedule, rank, sizes) + there for rank, there in zip(ranks, resident, strict=True))


def activation_sizes(step: StepSpec, costs: PipelineCosts) -> dict[Kind, Any]:
    """Of every kind of activation the memory of one, in the unit of the costs: that of a boundary is what a layer
    keeps which computes all again, or 1.
    """
    kept = dict[Kind, float]()
    for number, block in enumerate(costs.blocks):
        if step.model.blocks[number].kind == "layer":
            kind = step.keeps(number)
            kept[kind] = max(kept.get(kind, 0.0), block.kept)
    boundary = kept.setdefault(Kind.INPUT, 1.0)
    waiting = max(block.kept_for_weights for block in costs.blocks)
    return kept | {Kind.INPUT_GRADIENT: boundary, Kind.LINEAR: waiting}


class Made(ActivationPipeline):
    """A pipeline whose order is the shortest of those that ``arrange`` tries."""

    splits = True
    arranges = True

    def order(self, layout: Layout, costs: PipelineCosts, count: int) -> Order:
        return SEARCH().arrange(layout, self.limited(layout, costs), count)

    def listed(self, layout: Layout, costs: PipelineCosts) -> Listed | None:
        return None if self.given else partial(_listed, layout, self.limited(layout, costs))

    def continuing(self, layout: Layout, costs: PipelineCosts) -> Periodic:
        """The order that goes on for more micro-batches than orders are looked for."""
        return SEARCH().continuing(layout, self.limited(layout, costs))

    def limited(self, layout: Layout, costs: PipelineCosts) -> PipelineCosts:
        """Costs with as much memory as an order may use."""
        return costs

    def played_round(self, step: StepSpec, positions: Positions, each: int, rounds: int) -> tuple[int, int]:
        """What the order repeats, of one with more micro-batches than orders are looked for."""
        least = searched(positions.size) + 1
        if each <= least:
            return each, each
        layout = self.layout_of(step.model, positions)
        return least, self.continuing(layout, self.costs(step.model, positions)).period


def _listed(layout: Layout, costs: PipelineCosts, *given: Any) -> Order:
    return SEARCH().listed(layout, costs, *given)


class ZeroBubble(Made):
    """Zero bubble on a V, or what is shorter for the costs at hand and keeps no more."""

    name = "zero-bubble"
    summary = "two stages on every device in the shape of a V, gradients of weights where there is time for them"

    def usual_layout(self, model: ModelSpec, positions: Positions) -> Layout:
        return Layout.even(len(model.blocks), positions.size, 2, folded=True)

    def usual_places(self, size: int, stages: int) -> tuple[int, ...]:
        return (*range(size), *reversed(range(size)))

    def limited(self, layout: Layout, costs: PipelineCosts) -> PipelineCosts:
        """What there is room for, and no more than the published order, whose positions have the activations of 2p
        stages and of one more while W runs, and what p of W wait for.
        """
        table = costs.stages(layout)
        kept, waiting, resident = max(table.kept), max(table.kept_for_weights), max(table.resident)
        most = resident + (2 * layout.size + 1) * kept + layout.size * waiting
        return replace(costs, memory=min(costs.memory, most))


class Generated(Made):
    """Stages, their places and their order made together."""

    name = "generated"
    summary = "a pipeline whose stages, their places and their order are made for the costs of the model's layers"
    searches_stages = True

    def usual_layout(self, model: ModelSpec, positions: Positions) -> Layout:
        size = positions.size
        Layout.even(len(model.blocks), size)  # refuses fewer layers than positions
        # Orders are made for any number of micro-batches, stages for so many; every rank repeats the search.
        return SEARCH().generate(self.costs(model, positions), size, 4 * size, budget=QUICK)


class SolvedPipeline(Made):
    """1F1B or zero bubble within a limit of memory, offloading included; a solver may improve it."""

    name = "solved"
    summary = "a pipeline whose order, offloading included, is made for the memory that there is, and solved for it"
    improves = True

    def usual_layout(self, model: ModelSpec, positions: Positions) -> Layout:
        return Layout.even(len(model.blocks), positions.size)

    def shape_of(self, step: StepSpec) -> PipelineShape:
        shape, count = self.shape(step.model, step.topology), max(map(len, step.micro_batches))
        given = bool(self.given) and parse_order(self.given).micro_batches == count
        if given or not count or math.isinf(shape.costs.memory):
            return shape
        shares = shape.positions.share(count * shape.positions.replicas, step.speeds)
        costs = _within(replace(step, micro_batches=shares))
        return replace(shape, costs=costs, order_of=lambda many: order_of_layout(self, shape.layout, costs, many))

    def order(self, layout: Layout, costs: PipelineCosts, count: int) -> Order:
        if count > searched(layout.size):
            return self.continuing(layout, costs).of(count)
        orders = [SEARCH().fastest(layout, costs, count)]
        with suppress(UserError):  # memory for no order without the host's
            orders += [SEARCH().arrange(layout, costs, count, split=split) for split in (True, False)]
        return min(orders, key=lambda order: makespan(play(layout, order, costs)))

    def continuing(self, layout: Layout, costs: PipelineCosts) -> Periodic:
        return SEARCH().continuing_in_memory(layout, costs)
