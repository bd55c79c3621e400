"""Pipeline strategies: activations travel, weights stay.

Here are the base class and the strategies with published orders. made.py has strategies whose orders or stages are
searched.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

from tawpipe.dealing.balance import LayerTime, Packs
from tawpipe.errors import UserError
from tawpipe.schedule.pipelines.dealing import deal_to_pipelines
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.limits import QUICK_EFFORT, searched
from tawpipe.schedule.pipelines.links import Listed
from tawpipe.schedule.pipelines.orders import forward_only, interleaved, makes_groups, one_f_one_b
from tawpipe.schedule.pipelines.positions import AXES, Positions
from tawpipe.schedule.pipelines.program import PipelineShape, build_pipeline
from tawpipe.schedule.pipelines.times import BY_POSITION, parse_times, times_from_sizes
from tawpipe.schedule.pipelines.work import KINDS, BlockTimes, Order, PipelineCosts, play
from tawpipe.schedule.placement import Home
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.sharing import speeds_of
from tawpipe.schedule.spec import ModelSpec
from tawpipe.schedule.step import Planner, Schedule, StepSpec, Strategy, Trial
from tawpipe.topology import Topology

KEPT = 64
"""Number of layouts, costs and orders in each cache."""
_STAY = "weights stay where they are"
_ROWS = (
    "a micro-batch passes through a pipeline in whole rows; rows are cut where weights travel, as under tawpipe-spread"
)


def check_axis(stages: str) -> None:
    """Raise UserError if ``ScheduleSettings.stages`` does not begin with one of ``AXES``."""
    if (stages or "world").partition(":")[0] not in AXES:
        expected = f"{', '.join(AXES)}, with a layout after a colon if wanted, as in world:0,5,9@0,1,0"
        raise UserError("schedule.stages", stages, expected)


@dataclass(eq=False)
class ActivationPipeline(Strategy):
    """Base class of pipelines: weights stay on the ranks of a stage, activations travel.

    A subclass defines its default stages (``usual_layout``) and the order of the work of its positions (``order``).

    Args:
        stages: see ``ScheduleSettings.stages``.
        block_times: see ``ScheduleSettings.block_times``.
        pipeline_order: see ``ScheduleSettings.pipeline_order``.
        device_speeds: see ``ScheduleSettings.device_speeds``.
    """

    stages: str = ""
    block_times: str = ""
    pipeline_order: str = ""
    device_speeds: str = ""

    host_levels = ("none", "state")
    cuts_documents = True
    rounds_held = 3
    uses = ("stages", "block_times", "pipeline_order")
    orders_host = True
    refusals = {
        **dict.fromkeys(("homes", "step_cache", "weights_compression", "gradients_compression"), _STAY),
        **dict.fromkeys(("sequence_chunk", "sequence_ranks"), _ROWS),
        "offloaded_layers": "what a stage keeps is offloaded under solved alone, as its order says",
    }

    def __post_init__(self) -> None:
        check_axis(self.stages)
        self.layout = AXES[self.axis]

    @abstractmethod
    def usual_layout(self, model: ModelSpec, positions: Positions) -> Layout:
        """Return the default stages of a pipeline over ``positions``."""

    @abstractmethod
    def order(self, layout: Layout, costs: PipelineCosts, count: int) -> Order:
        """Return the work items of every position, in order, for ``count`` micro-batches (at least one)."""

    def usual_places(self, size: int, stages: int) -> tuple[int, ...] | None:
        """Return the position that each of ``stages`` stages must have; None if any are allowed."""
        return None

    def listed(self, layout: Layout, costs: PipelineCosts) -> Listed | None:
        """Return a function that makes the order of a pipeline with document slices; None to use ``causal``.

        None in this class. See ``PipelineShape.listed``."""
        return None

    def by_speed(self, layout: Layout, speeds: Sequence[float]) -> Layout:
        """Return the default stages ``layout`` with layers divided in proportion to the speeds of the positions."""
        return layout.by_speed(speeds)

    def played_round(self, step: StepSpec, positions: Positions, each: int, rounds: int) -> tuple[int, int]:
        """Return (least number of micro-batches to simulate, number of micro-batches in a round), see ``extended``.

        Args:
            step: the step.
            positions: the positions of the pipeline.
            each: number of micro-batches of a pipeline.
            rounds: number of rounds to simulate.
        """
        return rounds * positions.size, positions.size

    @property
    def axis(self) -> str:
        """Axis over which a pipeline extends, one of ``AXES``."""
        return (self.stages or "world").partition(":")[0]

    def configured(self, settings: ScheduleSettings) -> ActivationPipeline:
        """Return the pipeline with stages, times, order and speeds from ``settings``, where they are not empty."""
        stages, times = settings.stages or self.stages, settings.block_times or self.block_times
        order, speeds = settings.pipeline_order or self.pipeline_order, settings.device_speeds or self.device_speeds
        if (stages, times, order, speeds) == (self.stages, self.block_times, self.pipeline_order, self.device_speeds):
            return self
        return replace(self, stages=stages, block_times=times, pipeline_order=order, device_speeds=speeds)

    def settle(self, settings: ScheduleSettings) -> ScheduleSettings:
        """Return ``settings`` with empty stages, times and order taken from the pipeline.

        ``micro_batches_per_visit`` is set to 1. Other open choices get the defaults of ``Strategy.settle``."""
        stages = settings.stages or self.stages or "world"
        times = settings.block_times or self.block_times
        order = settings.pipeline_order or self.pipeline_order
        settings = replace(settings, stages=stages, block_times=times, pipeline_order=order)
        return super().settle(replace(settings, micro_batches_per_visit=1))

    def positions(self, topology: Topology) -> Positions:
        """Return the positions of the pipelines on ``topology``.

        Raises:
            UserError: a pipeline would have one position.
        """
        positions = Positions(topology, self.axis)
        if positions.size < 2:
            several = [axis for axis in AXES if Positions(topology, axis).size > 1]
            why = f"one of {', '.join(several)}" if several else "a pipeline needs several devices"
            expected = f"{why if several else f'nothing: {why}'}; {AXES[self.axis]} it would have one position"
            raise UserError("schedule.stages", self.axis, expected, need=why)
        return positions

    def speeds(self, positions: Positions) -> tuple[float, ...]:
        """Return the relative speed of every position; empty if equal."""
        return positions.speeds(speeds_of(ScheduleSettings(device_speeds=self.device_speeds), positions.topology))

    def costs(self, model: ModelSpec, positions: Positions) -> PipelineCosts:
        """Return the costs for which orders are made: from ``block_times``, or estimated from block sizes.

        The pace of every position is added (``paced``)."""
        return self.paced(_costs(self.block_times, model), positions)

    def paced(self, costs: PipelineCosts, positions: Positions) -> PipelineCosts:
        """Return ``costs`` with the pace of every position (fastest = 1), if the positions' speeds differ.

        Returns ``costs`` itself if it has a pace, or if speeds are equal."""
        speeds = self.speeds(positions)
        if costs.pace or not speeds:
            return costs
        return replace(costs, pace=tuple(max(speeds) / speed for speed in speeds))

    def layout_of(self, model: ModelSpec, positions: Positions) -> Layout:
        """Return the stages over ``positions``: those that ``stages`` gives, or the default ones.

        Raises:
            UserError: the given stages do not fit the positions or the strategy.
        """
        return _layout(self, model, positions)

    def shape(self, model: ModelSpec, topology: Topology) -> PipelineShape:
        """Return the layout, positions, costs and order that all ranks of a pipeline use. No order is made yet.

        Raises:
            UserError: a list in the costs (``pace`` or ``nodes``) does not have one number for every position.
        """
        positions = self.positions(topology)
        costs = self.costs(model, positions)
        for name in BY_POSITION:
            if len(numbers := getattr(costs, name)) not in (0, positions.size):
                expected = f"{positions.size} numbers, one for every position"
                raise UserError("schedule.block_times", f"{name}={'/'.join(map(str, numbers))}", expected)
        layout = self.layout_of(model, positions)
        return PipelineShape(
            model,
            layout,
            positions,
            costs,
            order_of=partial(order_of_layout, self, layout, costs),
            listed=self.listed(layout, costs),
        )

    def shape_of(self, step: StepSpec) -> PipelineShape:
        """Return ``shape`` for the model and nodes of ``step``."""
        return self.shape(step.model, step.topology)

    def dealt_to(self, topology: Topology) -> Sequence[int]:
        return tuple(map(self.positions(topology).replica, range(topology.world_size)))

    def dealing(
        self, step: StepSpec, *, cap: int, work: LayerTime, cuts: float | None = None
    ) -> Callable[[Sequence[int]], Packs]:
        """Return a function that assigns documents to the pipelines, see ``deal_to_pipelines``."""
        shape = self.shape(step.model, step.topology)
        return partial(
            deal_to_pipelines,
            pipelines=shape.positions.replicas,
            layout=shape.layout,
            costs=shape.costs,
            order_of=shape.order_of,
            listed=shape.listed,
            cap=cap,
            work=work,
            cuts=cuts,
        )

    def divided_over(self, topology: Topology) -> int:
        return self.positions(topology).size

    def computes(self, step: StepSpec) -> Sequence[Sequence[int]]:
        """Return for every rank the blocks of the stages at its position."""
        positions = self.positions(step.topology)
        layout = self.layout_of(step.model, positions)
        places = range(positions.size)
        blocks = [tuple(b for stage in layout.stages_of(p) for b in layout.blocks_of(stage)) for p in places]
        return [blocks[positions.position(rank)] for rank in range(step.topology.world_size)]

    def share_of_a_row(self, step: StepSpec, rank: int) -> float:
        """Return the time of one micro-batch on the stages of ``rank``, in the unit of the costs."""
        shape = self.shape(step.model, step.topology)
        stages = shape.layout.stages_of(shape.positions.position(rank))
        seconds = shape.costs.stages(shape.layout).seconds
        return sum(seconds[kind, stage] for kind in "FB" for stage in stages)

    def in_words(self, step: StepSpec) -> str:
        return f"through the stages of a pipeline, {step.settings.stages}"

    def share(self, count: int, topology: Topology, settings: ScheduleSettings) -> tuple[tuple[int, ...], ...]:
        return self.configured(settings).positions(topology).share(count, speeds_of(settings, topology))

    def place(self, model: ModelSpec, topology: Topology, homes: tuple[int, ...] = ()) -> tuple[Home, ...]:
        return self.shape(model, topology).homes

    def build(self, step: StepSpec, *, training: bool = True, ranks: Sequence[int] | None = None) -> Schedule:
        """Return the schedule of a step; an evaluation uses an order of forward passes only."""
        shape = self.shape_of(step) if training else self.shape(step.model, step.topology)
        if not training:
            shape = replace(shape, order_of=lambda count: forward_only(shape.layout, count))
        return build_pipeline(shape, step, training=training, ranks=ranks)

    def stand_ins(self, topology: Topology, *, inside_is_even: bool) -> tuple[int, ...]:
        """Return the ranks of the first pipeline, which represent all ranks; empty if there is only one pipeline."""
        positions = self.positions(topology)
        return tuple(positions.rank(place, 0) for place in range(positions.size)) if positions.replicas > 1 else ()

    def fullest(self, step: StepSpec) -> tuple[int, ...]:
        """Return the ranks of one pipeline for each form (``form_of``) that pipelines of the step have.

        Pipelines of equal form need equal memory."""
        shape, world = self.shape(step.model, step.topology), range(step.topology.world_size)
        one_of = {shape.form_of(step, rank): shape.positions.replica(rank) for rank in reversed(world)}
        return tuple(rank for rank in world if shape.positions.replica(rank) in one_of.values())

    def build_in_order(self, step: StepSpec, order: Order) -> Schedule:
        """Return the schedule of a training step in which every pipeline works in ``order``.

        Every pipeline must have as many micro-batches as ``order``."""
        return build_pipeline(
            replace(self.shape(step.model, step.topology), order_of=lambda _: order), step, training=True
        )

    def layouts(self, topology: Topology) -> Sequence[ActivationPipeline]:
        """Return this pipeline over each axis that gives several positions.

        Of axes with equal numbers of positions only one is used. If ``stages`` is set, only its axis is used."""
        axes = [self.axis] if self.stages else [axis for axis in AXES if Positions(topology, axis).size > 1]
        sizes = {Positions(topology, axis).size: axis for axis in reversed(axes)}
        return [replace(self, stages=self.stages or axis) for axis in axes if axis in sizes.values()]

    def trials(self, planner: Planner, like: Strategy | None) -> Sequence[Trial]:
        """Return a trial for every layout of ``layouts``, for a plan to evaluate.

        If making orders takes seconds (``takes_long``), other axes than that of ``like``, the best pipeline so far, are
        only tried while nothing else fits."""
        axis = like.axis if isinstance(like, ActivationPipeline) else ""
        return [
            Trial(way)
            if way.axis == axis
            else Trial(way, least_s=way.least_s(planner), spare=bool(axis) and way.takes_long(planner))
            for way in self.layouts(planner.topology)
        ]

    def least_s(self, planner: Planner) -> float:
        """Return a lower bound of the seconds of a step, known before anything is made."""
        return planner.least_s(self)

    def playing(self, model: ModelSpec, topology: Topology, count: int) -> int:
        """Return the approximate work of simulating orders: micro-batches of a pipeline, times blocks.

        Repeated parts of long orders are not counted."""
        positions = self.divided_over(topology)
        each = -(-count * positions // topology.world_size)
        return min(each, 2 * searched(positions)) * len(model.blocks)

    def takes_long(self, planner: Planner) -> bool:
        """Return True if making and simulating orders takes seconds."""
        return self.playing(planner.model, planner.topology, planner.micro_batches_of(self)) > QUICK_EFFORT

    def visits(self, count: int, topology: Topology, settings: ScheduleSettings) -> Sequence[int]:
        return [1]

    def changes(
        self, planner: Planner, step: StepSpec, worth: Callable[[str], bool], *, budget: int
    ) -> Iterator[dict[str, Any]]:
        """Yield dicts with values of ``recompute`` under which some or all layers keep everything.

        A quarter, half, or all of the layers keep all their activations. Values for which ``worth`` returns False are
        skipped."""
        layers = step.model.num_layers
        ways = (*(f"none:{max(1, layers // share)},full" for share in (4, 2)), "none")
        yield from ({"recompute": recompute} for recompute in filter(worth, ways))

    def extended(self, step: StepSpec, rounds: int) -> tuple[StepSpec, StepSpec, float]:
        """Return a short step, a longer step and a factor, see ``Strategy.extended``.

        The longer step has one round more in every pipeline. A round has as many micro-batches as there are positions,
        or as its order repeats. ``(step, step, 0.0)`` is returned for short steps, steps with given orders, and
        pipelines with unequal numbers of micro-batches."""
        positions = self.positions(step.topology)
        each = -(-len({m for share in step.micro_batches for m in share}) // positions.replicas)
        if step.speeds and len({len(share) for share in step.micro_batches}) > 1:
            return step, step, 0.0
        speeds = step.speeds if step.shared is None else ()  # packed: equal counts at any speed
        least, round_ = self.played_round(step, positions, each, rounds)
        least += max(sum(step.cut_in(share)) for share in step.micro_batches)
        if step.orders or each <= least + round_:
            return step, step, 0.0
        few = least + (each - least) % round_
        if each <= few + round_:
            return step, step, 0.0

        def cut(count: int) -> StepSpec:
            """Return ``step`` with ``count`` micro-batches for each pipeline."""
            return step.with_shares(positions.share(count * positions.replicas, speeds))

        return cut(few), cut(few + round_), (each - few) / round_


@lru_cache(KEPT)
def _costs(block_times: str, model: ModelSpec) -> PipelineCosts:
    """Return the costs that ``block_times`` spells, or costs estimated from sizes if it is empty; cached.

    Raises:
        UserError: ``block_times`` has another number of blocks than the model, or is not valid.
    """
    if not block_times:
        return times_from_sizes(model)
    costs = parse_times(block_times)
    if len(costs.blocks) != len(model.blocks):
        expected = f"times of the {len(model.blocks)} blocks of the model, the embedding and the head included"
        raise UserError("schedule.block_times", f"{len(costs.blocks)} blocks", expected)
    return costs


@lru_cache(KEPT)
def _layout(strategy: ActivationPipeline, model: ModelSpec, positions: Positions) -> Layout:
    """Return the layout that the strategy's ``stages`` give, or its default layout; cached.

    Raises:
        UserError: the layout does not fit the positions or the strategy.
    """
    text, size = strategy.stages.partition(":")[2], positions.size
    if not text:
        layout, speeds = strategy.usual_layout(model, positions), strategy.speeds(positions)
        return strategy.by_speed(layout, speeds) if speeds else layout
    layout = Layout.parse(text, len(model.blocks))
    if layout.size != size:
        raise UserError("schedule.stages", text, f"{size} positions, as there are {size} to lay it over")
    usual = strategy.usual_places(size, layout.stages)
    if usual is not None and layout.places != usual:
        why = f"stages at {','.join(map(str, usual))} under {strategy.name}"
        raise UserError("schedule.stages", text, f"{why}; generated takes any", need=why)
    return layout


@lru_cache(KEPT)
def order_of_layout(strategy: ActivationPipeline, layout: Layout, costs: PipelineCosts, count: int) -> Order:
    """Return the order given for ``count`` micro-batches, or the one that the strategy makes; cached.

    Raises:
        UserError: the given order does not fit the layout.
    """
    if strategy.pipeline_order and (order := parse_order(strategy.pipeline_order)).micro_batches == count:
        check_order(layout, order)
        return order
    return strategy.order(layout, costs, count) if count else Order(((),) * layout.size)


def parse_order(text: str) -> Order:
    """Parse ``text``, a value of ``ScheduleSettings.pipeline_order``, and return the order. Nothing else is checked.

    Raises:
        UserError: ``text`` is not the text of an order.
    """
    try:
        return Order.parse(text)
    except ValueError as error:
        expected = "works of every position, those of its host, and what waits, as a plan writes them; or nothing"
        raise UserError("schedule.pipeline_order", text[:40], expected) from error


def check_order(layout: Layout, order: Order) -> None:
    """Raise UserError if ``order`` does not fit ``layout``.

    Every work item must exist exactly once, on the position of its stage, and the order must not deadlock.
    """
    works = Counter((place, work) for place, lane in order.lanes for work in lane)
    done = {kind: {work[1:] for _, work in works if work.kind == kind} for kind in KINDS}
    everything = set(product(range(layout.stages), range(order.micro_batches)))
    valid_shape = len(order.compute) == layout.size and all(work.stage < layout.stages for _, work in works)
    good = valid_shape and all(layout.places[work.stage] == place for place, work in works) and max(works.values()) == 1
    good = (
        good and done["F"] == everything == done["B"] ^ done["I"] and done["I"] == done["W"] and done["O"] == done["R"]
    )
    try:
        if good:
            play(layout, order, PipelineCosts((BlockTimes(1, 1, 1),) * layout.blocks))
            return
    except ValueError:
        pass
    raise UserError("schedule.pipeline_order", str(order)[:40], f"an order for the stages {layout}; or nothing")


class OneForwardOneBackward(ActivationPipeline):
    """1F1B pipeline (PipeDream-flush)."""

    name = "1f1b"
    summary = "weights stay, activations travel: a stage on every device, a forward pass, then a backward pass"

    def usual_layout(self, model: ModelSpec, positions: Positions) -> Layout:
        return Layout.even(len(model.blocks), positions.size)

    def usual_places(self, size: int, stages: int) -> tuple[int, ...]:
        return tuple(range(size))

    def order(self, layout: Layout, costs: PipelineCosts, count: int) -> Order:
        return one_f_one_b(layout, count)


class Interleaved(ActivationPipeline):
    """Interleaved 1F1B pipeline (Megatron-LM): two stages on every position."""

    name = "interleaved-1f1b"
    summary = "1F1B with two stages on every device"

    def usual_layout(self, model: ModelSpec, positions: Positions) -> Layout:
        return Layout.even(len(model.blocks), positions.size, 2)

    def usual_places(self, size: int, stages: int) -> tuple[int, ...]:
        return tuple(range(size)) * -(-stages // size)

    def order(self, layout: Layout, costs: PipelineCosts, count: int) -> Order:
        return interleaved(layout, count)

    def played_round(self, step: StepSpec, positions: Positions, each: int, rounds: int) -> tuple[int, int]:
        """Return (micro-batches to simulate, micro-batches of a group): ``rounds`` groups, and one group.

        Both are ``each`` if the micro-batches cannot form equal groups; the order then raises an error when it is made.
        """
        group = each // max(1, each // positions.size)
        return (rounds * group, group) if makes_groups(each, positions.size) else (each, each)
