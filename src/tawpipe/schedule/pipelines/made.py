"""The pipelines whose orders, or stages as well, are made for the costs of a model.

The search for them stands higher, behind a door that opens when something is made: a run of any other strategy never
imports it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any

from tawpipe.doors import Door
from tawpipe.errors import UserError
from tawpipe.extras import install_hint
from tawpipe.schedule.buffers import Kind
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.limits import PASSING, QUICK, filling, searched
from tawpipe.schedule.pipelines.links import Listed
from tawpipe.schedule.pipelines.memory import fits, peak
from tawpipe.schedule.pipelines.periodic import Periodic
from tawpipe.schedule.pipelines.positions import Positions
from tawpipe.schedule.pipelines.program import PipelineShape, build_pipeline
from tawpipe.schedule.pipelines.strategy import (
    KEPT,
    ActivationPipeline,
    Interleaved,
    OneForwardOneBackward,
    order_of_layout,
    parse_order,
)
from tawpipe.schedule.pipelines.times import spell_times
from tawpipe.schedule.pipelines.work import Order, PipelineCosts, makespan, play
from tawpipe.schedule.refusal import MemoryOfPosition
from tawpipe.schedule.settings import RECOMPUTE
from tawpipe.schedule.sizes.activations import peak_activations
from tawpipe.schedule.spec import ModelSpec
from tawpipe.schedule.step import Planner, StepSpec, Strategy, Trial
from tawpipe.topology import Topology

TRIES = 8
"""Limits of memory, each lower by what the order for the one before held too much, after which none is found."""
FITTED = 4
"""Limits of memory for which a plan makes something, each lower by what the one before was too high."""
LESS = 0.8
"""Share of what an order keeps with which stages are looked for once more."""
KEEP_TRIES, SOLVE_S = 3000, 4.0
"""For a choice layer by layer: tries, and the solver's seconds."""


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

    def trials(self, planner: Planner, like: Strategy | None) -> Sequence[Trial]:
        """Only laid out as the best pipeline so far: what is made takes time."""
        if isinstance(like, ActivationPipeline) and not self.stages:
            return replace(self, stages=like.axis).trials(planner, like)
        return super().trials(planner, like)

    def least_s(self, planner: Planner) -> float:
        return 0.0

    def effort(self, model: ModelSpec, topology: Topology, count: int) -> int:
        return self.playing(model, topology, count)

    def made_for(
        self, planner: Planner, *, hopeful: bool, stop: Callable[[], None] = lambda: None
    ) -> ActivationPipeline:
        return self if self.block_times else self.fitted(planner, budget=QUICK if hopeful else 0, stop=stop)

    def fitted(
        self,
        planner: Planner,
        recompute: str = "full",
        *,
        budget: int,
        memory: float = math.inf,
        stop: Callable[[], None] = lambda: None,
    ) -> ActivationPipeline:
        """What is made for costs, with less memory where a first one does not fit: ends and uneven stages take theirs.

        Args:
            memory: of a position, at most.
            budget, stop: see ``changes``, ``made_for``.
        """
        positions = self.positions(planner.topology)
        costs = self.limited_to(memory, planner.costs_of(positions, recompute))
        each = -(-planner.micro_batches_of(self) // positions.replicas)
        for _ in range(FITTED):
            stages = self.stages_for(costs, positions, each, budget=budget)
            pipeline = replace(self, stages=stages, block_times=spell_times(costs))
            if (lacking := planner.lacking_bytes(pipeline, recompute=recompute)) <= 0:
                break
            stop()
            costs = replace(costs, memory=max(0, costs.memory - lacking // planner.boundary_bytes - 1))
        return pipeline

    def limited_to(self, memory: float, costs: PipelineCosts) -> PipelineCosts:
        """Costs of a plan with no more memory of a position than that."""
        return replace(costs, memory=min(costs.memory, memory))

    def stages_for(self, costs: PipelineCosts, positions: Positions, count: int, *, budget: int) -> str:
        """``ScheduleSettings.stages`` for some costs and micro-batches of a pipeline."""
        return self.stages

    def changes(
        self, planner: Planner, step: StepSpec, worth: Callable[[str], bool], *, budget: int
    ) -> Iterator[dict[str, Any]]:
        """What is made anew for the costs of other settings."""
        if worth("none"):
            with suppress(UserError):  # memory for no order of what layers would keep
                yield _as_settings(self.fitted(planner, "none", budget=budget), "none")

    def remark(self, step: StepSpec) -> str:
        return "" if step.settings.pipeline_order and has_solver() else "heuristic order"


def has_solver() -> bool:
    """True if orders are given to a solver."""
    return find_spec("ortools") is not None


def _as_settings(pipeline: ActivationPipeline, recompute: str) -> dict[str, Any]:
    return {"recompute": recompute, "stages": pipeline.stages, "block_times": pipeline.block_times}


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

    def trials(self, planner: Planner, like: Strategy | None) -> Sequence[Trial]:
        """Other stages may be far better than those of published orders."""
        return [replace(trial, may_overtake=True) for trial in super().trials(planner, like)]

    def by_speed(self, layout: Layout, speeds: Sequence[float]) -> Layout:
        return layout  # it was looked for with the pace of every position

    def usual_layout(self, model: ModelSpec, positions: Positions) -> Layout:
        size = positions.size
        Layout.even(len(model.blocks), size)  # refuses fewer layers than positions
        # Orders are made for any number of micro-batches, stages for so many; every rank repeats the search.
        return SEARCH().generate(self.costs(model, positions), size, 4 * size, budget=QUICK)

    def stages_for(self, costs: PipelineCosts, positions: Positions, count: int, *, budget: int) -> str:
        """Looked for anew where memory was too little: other stages may then be best."""
        return f"{positions.axis}:{SEARCH().generate(costs, positions.size, count, budget=budget)}"

    def changes(
        self, planner: Planner, step: StepSpec, worth: Callable[[str], bool], *, budget: int
    ) -> Iterator[dict[str, Any]]:
        """Also what a search finds that takes longer than the first one."""
        if budget > QUICK and worth("full"):
            with suppress(UserError):  # memory for no order of what layers would keep
                pipeline = self.fitted(planner, budget=budget)
                yield _as_settings(pipeline, "full")
                less = self.fitted(planner, budget=budget, memory=_less(planner, pipeline))
                yield _as_settings(less, "full")
        yield from super().changes(planner, step, worth, budget=budget)

    def instead(self, planner: Planner) -> Iterator[Strategy]:
        """Its stages those of published orders, as far as these fit: in the memory that they take, what is made for
        costs is no longer. A plan's clock knows what a search for stages does not, such as links that several positions
        share.
        """
        if self.block_times:
            return
        positions = self.positions(planner.topology)
        costs = planner.costs_of(positions, "full")
        count = min(-(-planner.micro_batches_of(self) // positions.replicas), filling(positions.size))
        for published in (Interleaved(), OneForwardOneBackward()):
            fixed = published.configured(replace(planner.settings, stages=positions.axis))
            with suppress(UserError):
                if planner.lacking_bytes(fixed, recompute="full") <= 0:
                    layout = fixed.layout_of(planner.model, positions)
                    most = max(costs.memory, *peak(layout, fixed.order(layout, costs, count), costs))
                    times = spell_times(replace(costs, memory=most))
                    yield replace(self, stages=f"{positions.axis}:{layout}", block_times=times)


def _less(planner: Planner, pipeline: ActivationPipeline) -> float:
    """Memory of a position in which micro-batches may keep ``LESS`` of what they do: a search that has less to choose
    from may find a shorter step.
    """
    positions = pipeline.positions(planner.topology)
    costs = pipeline.costs(planner.model, positions)
    count = -(-planner.micro_batches_of(pipeline) // positions.replicas)
    layout = pipeline.layout_of(planner.model, positions)
    order = pipeline.order(layout, costs, count if count <= searched(positions.size) else filling(positions.size))
    peaks = zip(peak(layout, order, costs), costs.stages(layout).resident, strict=True)
    whole, kept = max((whole, whole - resident) for whole, resident in peaks)
    return math.floor(whole - (1 - LESS) * kept)


class SolvedPipeline(Made):
    """1F1B or zero bubble within a limit of memory, offloading included; a solver may improve it."""

    name = "solved"
    summary = "a pipeline whose order, offloading included, is made for the memory that there is, and solved for it"

    def usual_layout(self, model: ModelSpec, positions: Positions) -> Layout:
        return Layout.even(len(model.blocks), positions.size)

    def check(self, step: StepSpec) -> None:
        super().check(step)
        if step.shared is not None:
            expected = "generated where documents are dealt by time: its order may be that of bins; or --packing split"
            raise UserError("schedule.strategy", self.name, expected)

    def shape_of(self, step: StepSpec) -> PipelineShape:
        shape, count = self.shape(step.model, step.topology), max(map(len, step.micro_batches))
        given = bool(self.given) and parse_order(self.given).micro_batches == count
        if given or not count or math.isinf(shape.costs.memory):
            return shape
        shares = shape.positions.share(count * shape.positions.replicas, step.speeds)
        costs = _within(replace(step, micro_batches=shares))
        return replace(shape, costs=costs, order_of=lambda many: order_of_layout(self, shape.layout, costs, many))

    def limited_to(self, memory: float, costs: PipelineCosts) -> PipelineCosts:
        limited = super().limited_to(memory, costs)
        return replace(limited, memory=limited.memory + PASSING)  # it counts what passes between positions itself

    def changes(
        self, planner: Planner, step: StepSpec, worth: Callable[[str], bool], *, budget: int
    ) -> Iterator[dict[str, Any]]:
        yield from super().changes(planner, step, worth, budget=budget)
        if planner.memory_bytes and worth("none"):
            with suppress(UserError):  # memory for no choice
                yield from self._layer_by_layer(planner)

    def _layer_by_layer(self, planner: Planner) -> Iterator[dict[str, Any]]:
        """Settings in which every layer keeps, offloads or computes again what suits it, on stages that are made for
        that, in an order that a solver has had some seconds for, where it is installed.
        """
        positions = self.positions(planner.topology)
        count = -(-planner.micro_batches_of(self) // positions.replicas)
        if count > searched(positions.size):
            return
        options = {how: planner.costs_of(positions, how) for how in RECOMPUTE}
        memory = min(costs.memory for costs in options.values())
        blocks = len(planner.model.blocks)
        layouts = [Layout.even(blocks, positions.size)]
        if blocks - 2 >= 2 * positions.size:
            layouts.append(Layout.even(blocks, positions.size, 2, folded=True))
        for _ in range(2):
            limited = {how: replace(costs, memory=memory) for how, costs in options.items()}
            kept = SEARCH().choose(limited, layouts, count, tries=KEEP_TRIES)
            layout, order = kept.choice.layout, kept.order
            if has_solver():
                order = SEARCH().solve(layout, kept.costs, count, order, seconds=SOLVE_S).order
            changes = {
                "recompute": kept.choice.recompute,
                "stages": f"{positions.axis}:{layout}",
                "block_times": spell_times(kept.costs),
                "pipeline_order": str(order),
            }
            if (lacking := planner.lacking_bytes(self, **changes)) <= 0:
                yield changes
                return
            memory -= lacking // planner.boundary_bytes + 1

    def missing(self) -> str:
        return "" if has_solver() else f"without a solver, as OR-tools is not installed ({install_hint('plan')})"

    def order(self, layout: Layout, costs: PipelineCosts, count: int) -> Order:
        if count > searched(layout.size):
            return self.continuing(layout, costs).of(count)
        orders = [SEARCH().fastest(layout, costs, count)]
        with suppress(UserError):  # memory for no order without the host's
            orders += [SEARCH().arrange(layout, costs, count, split=split) for split in (True, False)]
        return min(orders, key=lambda order: makespan(play(layout, order, costs)))

    def continuing(self, layout: Layout, costs: PipelineCosts) -> Periodic:
        return SEARCH().continuing_in_memory(layout, costs)
