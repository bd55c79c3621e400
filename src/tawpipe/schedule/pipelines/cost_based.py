"""Pipelines whose orders, and for some also stages, are made for the costs of a model.

The search is in ``tawpipe.orders``, which is imported only when something is made. So a run of any other strategy never
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
from tawpipe.schedule.settings import ELEMENTWISE, RECOMPUTE
from tawpipe.schedule.sizes.activations import peak_activations
from tawpipe.schedule.spec import ModelSpec
from tawpipe.schedule.step import Planner, StepSpec, Strategy, Trial
from tawpipe.topology import Topology

TRIES = 8
"""Number of memory limits that are tried before the search fails. Each is lower by the excess of the order before."""
FITTED = 4
"""Number of memory limits for which a plan makes a pipeline. Each is lower by what the device lacked before."""
LESS = 0.8
"""Share of the memory kept by an order with which stages are searched once more."""
KEEP_TRIES, SOLVE_S = 3000, 4.0
"""Limits (KEEP_TRIES, SOLVE_S) of a choice layer by layer: number of tries, and seconds of the solver."""


@dataclass(frozen=True)
class OrderSearch:
    """Functions that search for stages and orders, imported on first use.

    Args:
        arrange: returns the shortest of the orders that it tries.
        continuing: returns an order that can be repeated for any number of micro-batches.
        listed: returns an order for micro-batches with document slices.
        generate: returns stages and their positions, chosen together with an order.
        fastest: returns the fastest order within a limit of memory, with offloading.
        continuing_in_memory: as ``continuing``, within a limit of memory, with offloading.
        choose: chooses for every layer whether it keeps, offloads or recomputes its activations.
        solve: improves an order with a solver.
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
    """Return the step's costs with a memory limit under which the order and its transfers fit; cached.

    Up to ``TRIES`` limits (``PipelineCosts.memory``) are tried, from the given one down, and an order is made for each.
    Long steps are examined with fewer micro-batches, because their order repeats.

    Raises:
        UserError: no order fits.
    """
    strategy = step.strategy
    assert isinstance(strategy, SolvedPipeline)
    shape = strategy.shape(step.model, step.topology)
    positions, few = shape.positions, searched(shape.layout.size) + 1
    if len(step.micro_batches[positions.rank(0, 0)]) > few:  # the rest repeats
        step = replace(step, micro_batches=positions.share(few * positions.replicas, step.speeds))
    count, costs, least = len(step.micro_batches[positions.rank(0, 0)]), shape.costs, math.inf
    low, high = -math.inf, costs.memory
    for _ in range(TRIES):
        lower = low
        try:
            most = held_at_once(step, shape, order_of_layout(strategy, shape.layout, costs, count))
        except UserError:  # no order fits the memory
            if costs is shape.costs:
                raise
            low = costs.memory
        else:
            if fits(shape.costs, most):
                return costs
            least, high = min(least, most), costs.memory
            lower = high - (most - shape.costs.memory)
        costs = replace(costs, memory=lower if lower > low else (low + high) / 2)
    expected = f"more: {least:.6g} was the least, with what is on its way between positions"
    raise UserError("memory of a position", shape.costs.memory, expected, need=MemoryOfPosition())


def held_at_once(step: StepSpec, shape: PipelineShape, order: Order) -> float:
    """Build the schedule of a step in ``order`` and return the most memory that any position holds at one time.

    In the unit of the costs. Included are resident memory, inputs that have arrived before their work starts, and
    outputs that are not yet sent."""
    ranks = [shape.positions.rank(place, 0) for place in range(shape.layout.size)]
    schedule = build_pipeline(replace(shape, order_of=lambda _: order), step, training=True, ranks=ranks)
    sizes, resident = activation_sizes(step, shape.costs), shape.costs.stages(shape.layout).resident
    return max(peak_activations(schedule, rank, sizes) + base for rank, base in zip(ranks, resident, strict=True))


def activation_sizes(step: StepSpec, costs: PipelineCosts) -> dict[Kind, Any]:
    """Return for every kind of activation the memory of one, in the unit of ``costs``.

    If layers of one kind differ, the largest counts. A boundary activation has the size that a layer keeps which
    recomputes everything, or 1 if there is no such layer."""
    kept = dict[Kind, float]()
    for number, block in enumerate(costs.blocks):
        if step.model.blocks[number].kind == "layer":
            kind = step.keeps(number)
            kept[kind] = max(kept.get(kind, 0.0), block.kept)
    boundary = kept.setdefault(Kind.INPUT, 1.0)
    waiting = max(block.kept_for_weights for block in costs.blocks)
    return kept | {Kind.INPUT_GRADIENT: boundary, Kind.LINEAR: waiting}


class CostBasedPipeline(ActivationPipeline):
    """Base class of pipelines whose order is the shortest that ``arrange`` tries."""

    splits = True

    def order(self, layout: Layout, costs: PipelineCosts, count: int) -> Order:
        return SEARCH().arrange(layout, self.limited(layout, costs), count)

    def listed(self, layout: Layout, costs: PipelineCosts) -> Listed | None:
        return None if self.pipeline_order else partial(_listed, layout, self.limited(layout, costs))

    def continuing(self, layout: Layout, costs: PipelineCosts) -> Periodic:
        """Return an order and its repeating period, for steps with more micro-batches than orders are searched for."""
        return SEARCH().continuing(layout, self.limited(layout, costs))

    def limited(self, layout: Layout, costs: PipelineCosts) -> PipelineCosts:
        """Return ``costs`` with the memory limit for which orders are made; here the limit is unchanged."""
        return costs

    def played_round(self, step: StepSpec, positions: Positions, each: int, rounds: int) -> tuple[int, int]:
        """Return the numbers of micro-batches to simulate and of the period of the order.

        Both are ``each`` if an order is searched for all of them, because nothing is repeated then."""
        least = searched(positions.size) + 1
        if each <= least:
            return each, each
        layout = self.layout_of(step.model, positions)
        return least, self.continuing(layout, self.costs(step.model, positions)).period

    def trials(self, planner: Planner, like: Strategy | None) -> Sequence[Trial]:
        """Return the layouts to try: only the axis of the best pipeline so far (``like``) if there is one.

        Making orders takes time, so other axes are only tried if there is no pipeline yet."""
        if isinstance(like, ActivationPipeline) and not self.stages:
            return replace(self, stages=like.axis).trials(planner, like)
        return super().trials(planner, like)

    def least_s(self, planner: Planner) -> float:
        return 0.0

    def effort(self, model: ModelSpec, topology: Topology, count: int) -> int:
        return self.playing(model, topology, count)

    def fit_to(self, planner: Planner, *, hopeful: bool, stop: Callable[[], None] = lambda: None) -> ActivationPipeline:
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
        """Return the pipeline made for the costs of a plan, made again with less memory if it does not fit.

        Up to ``FITTED`` limits are tried. The last pipeline is returned even if it does not fit.

        Args:
            planner: information about the plan.
            recompute: value of the setting ``recompute``.
            budget: number of work items that a search for stages may try, see ``changes``.
            memory: most memory of a position, in boundary activations.
            stop: function called before each further attempt, see ``fit_to``.
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
        """Return ``costs`` with a memory limit of at most ``memory`` (boundary activations) for a position."""
        return replace(costs, memory=min(costs.memory, memory))

    def stages_for(self, costs: PipelineCosts, positions: Positions, count: int, *, budget: int) -> str:
        """Return the value of ``ScheduleSettings.stages`` for these costs; here the strategy's own value.

        Args:
            costs: costs for which stages are made.
            positions: the positions of the pipeline.
            count: number of micro-batches of a pipeline.
            budget: number of work items that a search may try.
        """
        return self.stages

    def changes(
        self, planner: Planner, step: StepSpec, worth: Callable[[str], bool], *, budget: int
    ) -> Iterator[dict[str, Any]]:
        """Yield a dict of settings: the pipeline made for layers that keep all their activations.

        ``recompute`` is ``none`` in it. Yields nothing if ``worth("none")`` is False, or if no order fits in memory.
        See ``Strategy.changes``."""
        if worth("none"):
            with suppress(UserError):  # no order fits what layers would keep
                yield _as_settings(self.fitted(planner, "none", budget=budget), "none")

    def remark(self, step: StepSpec) -> str:
        return "" if step.settings.pipeline_order and has_solver() else "heuristic order"


def has_solver() -> bool:
    """Return True if a solver (OR-tools) is installed."""
    return find_spec("ortools") is not None


def _as_settings(pipeline: ActivationPipeline, recompute: str) -> dict[str, Any]:
    """Return the settings that choose ``pipeline`` with this value of ``recompute``."""
    return {"recompute": recompute, "stages": pipeline.stages, "block_times": pipeline.block_times}


def _listed(layout: Layout, costs: PipelineCosts, *arguments: Any) -> Order:
    """Make the order of a pipeline with document slices by the search that ``SEARCH`` imports, and return it.

    Args:
        arguments: the usual order, the slices, the load and the number of work items to try, see ``deal_to_pipelines``.
    """
    return SEARCH().listed(layout, costs, *arguments)


class ZeroBubble(CostBasedPipeline):
    """Zero bubble on a V, or a shorter order for the given costs that needs no more memory."""

    name = "zero-bubble"
    summary = "two stages on every device in the shape of a V, gradients of weights where there is time for them"

    def usual_layout(self, model: ModelSpec, positions: Positions) -> Layout:
        return Layout.even(len(model.blocks), positions.size, 2, folded=True)

    def usual_places(self, size: int, stages: int) -> tuple[int, ...]:
        return (*range(size), *reversed(range(size)))

    def limited(self, layout: Layout, costs: PipelineCosts) -> PipelineCosts:
        """Return ``costs`` with a memory limit of at most what the published order needs.

        With p positions, its positions keep the activations of 2p stages, of one more while W runs, and what p items W
        wait for."""
        table = costs.stages(layout)
        kept, waiting, resident = max(table.kept), max(table.kept_for_weights), max(table.resident)
        most = resident + (2 * layout.size + 1) * kept + layout.size * waiting
        return replace(costs, memory=min(costs.memory, most))


class Generated(CostBasedPipeline):
    """Pipeline whose stages, positions of stages, and order are searched together for the costs of the layers."""

    name = "generated"
    summary = "a pipeline whose stages, their places and their order are made for the costs of the model's layers"

    def trials(self, planner: Planner, like: Strategy | None) -> Sequence[Trial]:
        """Return the trials, marked as able to overtake: searched stages may be far better than published ones."""
        return [replace(trial, may_overtake=True) for trial in super().trials(planner, like)]

    def by_speed(self, layout: Layout, speeds: Sequence[float]) -> Layout:
        return layout  # the search knew the pace of every position

    def usual_layout(self, model: ModelSpec, positions: Positions) -> Layout:
        """Search stages for the strategy's costs, with the small budget ``QUICK``, and return them.

        Raises:
            UserError: the model has fewer layers than positions.
        """
        size = positions.size
        Layout.even(len(model.blocks), size)  # raises if there are fewer layers than positions
        # Stages are searched for 4 * size micro-batches, whatever the number in a step. Every rank repeats the search.
        return SEARCH().generate(self.costs(model, positions), size, 4 * size, budget=QUICK)

    def stages_for(self, costs: PipelineCosts, positions: Positions, count: int, *, budget: int) -> str:
        """Search stages for these costs, and return them with the axis as a value of ``ScheduleSettings.stages``.

        ``fitted`` calls this again with less memory, because less memory may need other stages."""
        return f"{positions.axis}:{SEARCH().generate(costs, positions.size, count, budget=budget)}"

    def changes(
        self, planner: Planner, step: StepSpec, worth: Callable[[str], bool], *, budget: int
    ) -> Iterator[dict[str, Any]]:
        """Yield dicts of settings: two from a longer search for stages, then that of ``CostBasedPipeline.changes``.

        The second of the two has stages for less memory (``LESS``). See ``Strategy.changes`` for the arguments."""
        if budget > QUICK and worth("full"):
            with suppress(UserError):  # no order fits what layers would keep
                pipeline = self.fitted(planner, budget=budget)
                yield _as_settings(pipeline, "full")
                less = self.fitted(planner, budget=budget, memory=_less(planner, pipeline))
                yield _as_settings(less, "full")
        yield from super().changes(planner, step, worth, budget=budget)

    def instead(self, planner: Planner) -> Iterator[Strategy]:
        """Yield copies of this strategy with the stages of interleaved 1F1B and of 1F1B, if these fit.

        Orders for these stages are made for the costs, so they are not longer than the published ones. They may win
        because a plan's clock knows facts that the search does not, such as links that several positions share. Yields
        nothing if costs (``block_times``) were given."""
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
    """Return a memory limit of a position, in boundary activations, for a search with fewer choices.

    With this limit, micro-batches can keep ``LESS`` times the memory that they keep at most in the order of
    ``pipeline``. Such a search may find a shorter step."""
    positions = pipeline.positions(planner.topology)
    costs = pipeline.costs(planner.model, positions)
    count = -(-planner.micro_batches_of(pipeline) // positions.replicas)
    layout = pipeline.layout_of(planner.model, positions)
    order = pipeline.order(layout, costs, count if count <= searched(positions.size) else filling(positions.size))
    peaks = zip(peak(layout, order, costs), costs.stages(layout).resident, strict=True)
    whole, kept = max((whole, whole - resident) for whole, resident in peaks)
    return math.floor(whole - (1 - LESS) * kept)


class SolvedPipeline(CostBasedPipeline):
    """1F1B or zero bubble within a limit of memory, with offloading; a solver may improve the order."""

    name = "solved"
    summary = "a pipeline whose order, offloading included, is made for the memory that there is, and solved for it"

    def usual_layout(self, model: ModelSpec, positions: Positions) -> Layout:
        return Layout.even(len(model.blocks), positions.size)

    def check(self, step: StepSpec) -> None:
        """Check the settings as ``Strategy.check`` does, and refuse documents of uneven lengths.

        Raises:
            UserError: a setting does not work, or the step has packed micro-batches.
        """
        super().check(step)
        if step.shared is not None:
            expected = "generated where documents are dealt by time: its order may be that of bins; or --packing split"
            raise UserError("schedule.strategy", self.name, expected)

    def shape_of(self, step: StepSpec) -> PipelineShape:
        """Return the pipeline's shape with less memory, so that orders fit together with their transfers.

        Returns the unchanged shape if the settings give an order for this number of micro-batches, if there is no
        micro-batch, or if memory is not limited."""
        shape, count = self.shape(step.model, step.topology), max(map(len, step.micro_batches))
        has_order = bool(self.pipeline_order) and parse_order(self.pipeline_order).micro_batches == count
        if has_order or not count or math.isinf(shape.costs.memory):
            return shape
        shares = shape.positions.share(count * shape.positions.replicas, step.speeds)
        costs = _within(replace(step, micro_batches=shares))
        return replace(shape, costs=costs, order_of=lambda many: order_of_layout(self, shape.layout, costs, many))

    def limited_to(self, memory: float, costs: PipelineCosts) -> PipelineCosts:
        limited = super().limited_to(memory, costs)
        return replace(limited, memory=limited.memory + PASSING)  # transfers are counted in `_within`

    def changes(
        self, planner: Planner, step: StepSpec, worth: Callable[[str], bool], *, budget: int
    ) -> Iterator[dict[str, Any]]:
        """Yield the settings of ``CostBasedPipeline.changes``, then settings in which layers keep different things.

        The second one is only made with a memory limit and if ``worth("none")`` is True. See ``Strategy.changes``."""
        yield from super().changes(planner, step, worth, budget=budget)
        if planner.memory_bytes and worth("none"):
            with suppress(UserError):  # no choice fits the memory
                yield from self._layer_by_layer(planner)

    def _layer_by_layer(self, planner: Planner) -> Iterator[dict[str, Any]]:
        """Yield a dict of settings in which each layer keeps, offloads or recomputes its activations.

        A search chooses it for each layer. The dict contains the stages, costs and order for this choice. If a solver
        is installed, it improves the order for ``SOLVE_S`` seconds. Yields nothing if a step has too many micro-batches
        for a search, or if the second attempt does not fit in memory."""
        positions = self.positions(planner.topology)
        count = -(-planner.micro_batches_of(self) // positions.replicas)
        if count > searched(positions.size):
            return
        options = {how: planner.costs_of(positions, how) for how in RECOMPUTE if how != ELEMENTWISE}
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
        """Return the shortest of the orders made with offloading and, if memory allows, without.

        A long order is made by repeating the period of a short one.
        """
        if count > searched(layout.size):
            return self.continuing(layout, costs).of(count)
        orders = [SEARCH().fastest(layout, costs, count)]
        with suppress(UserError):  # no order fits without offloading
            orders += [SEARCH().arrange(layout, costs, count, split=split) for split in (True, False)]
        return min(orders, key=lambda order: makespan(play(layout, order, costs)))

    def continuing(self, layout: Layout, costs: PipelineCosts) -> Periodic:
        return SEARCH().continuing_in_memory(layout, costs)
