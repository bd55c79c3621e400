"""The strategies whose activations travel. Here are those of published orders; made.py has those whose orders, or
stages, are looked for.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

from tawpipe.dealing.balance import Bins, LayerTime
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
"""Layouts, costs and orders that are kept, each."""
_STAY = "weights stay where they are"
_ROWS = (
    "a micro-batch passes through a pipeline in whole rows; rows are cut where weights travel, as under tawpipe-spread"
)


def check_axis(stages: str) -> None:
    """Raise UserError if ``ScheduleSettings.stages`` begins with nothing that positions can be laid over."""
    if (stages or "world").partition(":")[0] not in AXES:
        expected = f"{', '.join(AXES)}, with a layout after a colon if wanted, as in world:0,5,9@0,1,0"
        raise UserError("schedule.stages", stages, expected)


@dataclass(eq=False)
class ActivationPipeline(Strategy):
    """Weights stay on the ranks of a stage, activations travel.

    A subclass says what its stages are (``usual_layout``) and what its positions do when (``order``).

    Args:
        stages: see ``ScheduleSettings.stages``.
        block_times: see ``ScheduleSettings.block_times``.
        given: see ``ScheduleSettings.pipeline_order``.
        device_speeds: see ``ScheduleSettings.device_speeds``.
    """

    stages: str = ""
    block_times: str = ""
    given: str = ""
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
        """The stages of a pipeline over some positions, where the user gives none."""

    @abstractmethod
    def order(self, layout: Layout, costs: PipelineCosts, count: int) -> Order:
        """What the positions do with one micro-batch or more."""

    def usual_places(self, size: int, stages: int) -> tuple[int, ...] | None:
        """The positions of so many stages; None where any will do."""
        return None

    def listed(self, layout: Layout, costs: PipelineCosts) -> Listed | None:
        """See ``PipelineShape``."""
        return None

    def by_speed(self, layout: Layout, speeds: Sequence[float]) -> Layout:
        """Its usual stages on positions of several speeds."""
        return layout.by_speed(speeds)

    def played_round(self, step: StepSpec, positions: Positions, each: int, rounds: int) -> tuple[int, int]:
        """(micro-batches that are played at least, those of a round) of a pipeline of so many, see ``extended``."""
        return rounds * positions.size, positions.size

    @property
    def axis(self) -> str:
        return (self.stages or "world").partition(":")[0]

    def configured(self, settings: ScheduleSettings) -> ActivationPipeline:
        stages, times = settings.stages or self.stages, settings.block_times or self.block_times
        order, speeds = settings.pipeline_order or self.given, settings.device_speeds or self.device_speeds
        if (stages, times, order, speeds) == (self.stages, self.block_times, self.given, self.device_speeds):
            return self
        return replace(self, stages=stages, block_times=times, given=order, device_speeds=speeds)

    def settle(self, settings: ScheduleSettings) -> ScheduleSettings:
        stages = settings.stages or self.stages or "world"
        times = settings.block_times or self.block_times
        order = settings.pipeline_order or self.given
        settings = replace(settings, stages=stages, block_times=times, pipeline_order=order)
        return super().settle(replace(settings, micro_batches_per_visit=1))

    def positions(self, topology: Topology) -> Positions:
        """Where the positions are.

        Raises:
            UserError: a pipeline of one.
        """
        positions = Positions(topology, self.axis)
        if positions.size < 2:
            several = [axis for axis in AXES if Positions(topology, axis).size > 1]
            why = f"one of {', '.join(several)}" if several else "a pipeline needs several devices"
            expected = f"{why if several else f'nothing: {why}'}; {AXES[self.axis]} it would have one position"
            raise UserError("schedule.stages", self.axis, expected, need=why)
        return positions

    def speeds(self, positions: Positions) -> tuple[float, ...]:
        """Of every position; empty where they are alike."""
        return positions.speeds(speeds_of(ScheduleSettings(device_speeds=self.device_speeds), positions.topology))

    def costs(self, model: ModelSpec, positions: Positions) -> PipelineCosts:
        """What orders are made for: times that were measured, or what the sizes of the blocks say."""
        return self.paced(_costs(self.block_times, model), positions)

    def paced(self, costs: PipelineCosts, positions: Positions) -> PipelineCosts:
        """Costs with the pace of every position, where they have none and the positions' speeds differ."""
        speeds = self.speeds(positions)
        if costs.pace or not speeds:
            return costs
        return replace(costs, pace=tuple(max(speeds) / speed for speed in speeds))

    def layout_of(self, model: ModelSpec, positions: Positions) -> Layout:
        """The stages of a pipeline over some positions."""
        return _layout(self, model, positions)

    def shape(self, model: ModelSpec, topology: Topology) -> PipelineShape:
        """All that the ranks of a pipeline agree on."""
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
        """The same for a step."""
        return self.shape(step.model, step.topology)

    def dealt_to(self, topology: Topology) -> Sequence[int]:
        return tuple(map(self.positions(topology).replica, range(topology.world_size)))

    def dealing(
        self, step: StepSpec, *, cap: int, work: LayerTime, cuts: float | None = None
    ) -> Callable[[Sequence[int]], Bins]:
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
        positions = self.positions(step.topology)
        layout = self.layout_of(step.model, positions)
        places = range(positions.size)
        blocks = [tuple(b for stage in layout.stages_of(p) for b in layout.blocks_of(stage)) for p in places]
        return [blocks[positions.position(rank)] for rank in range(step.topology.world_size)]

    def share_of_a_row(self, step: StepSpec, rank: int) -> float:
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
        shape = self.shape_of(step) if training else self.shape(step.model, step.topology)
        if not training:
            shape = replace(shape, order_of=lambda count: forward_only(shape.layout, count))
        return build_pipeline(shape, step, training=training, ranks=ranks)

    def stand_ins(self, topology: Topology, *, inside_is_even: bool) -> tuple[int, ...]:
        """One of several pipelines side by side."""
        positions = self.positions(topology)
        return tuple(positions.rank(place, 0) for place in range(positions.size)) if positions.replicas > 1 else ()

    def fullest(self, step: StepSpec) -> tuple[int, ...]:
        """One of all pipelines of a form: side by side they do the same."""
        shape, world = self.shape(step.model, step.topology), range(step.topology.world_size)
        one_of = {shape.form_of(step, rank): shape.positions.replica(rank) for rank in reversed(world)}
        return tuple(rank for rank in world if shape.positions.replica(rank) in one_of.values())

    def build_in_order(self, step: StepSpec, order: Order) -> Schedule:
        """A training step in a given order; every pipeline has as many micro-batches."""
        return build_pipeline(
            replace(self.shape(step.model, step.topology), order_of=lambda _: order), step, training=True
        )

    def layouts(self, topology: Topology) -> Sequence[ActivationPipeline]:
        axes = [self.axis] if self.stages else [axis for axis in AXES if Positions(topology, axis).size > 1]
        sizes = {Positions(topology, axis).size: axis for axis in reversed(axes)}
        return [replace(self, stages=self.stages or axis) for axis in axes if axis in sizes.values()]

    def trials(self, planner: Planner, like: Strategy | None) -> Sequence[Trial]:
        """All ways, that of the best pipeline so far first; others only in its place where orders take long."""
        axis = like.axis if isinstance(like, ActivationPipeline) else ""
        return [
            Trial(way)
            if way.axis == axis
            else Trial(way, least_s=way.least_s(planner), spare=bool(axis) and way.takes_long(planner))
            for way in self.layouts(planner.topology)
        ]

    def least_s(self, planner: Planner) -> float:
        """Seconds that a step needs at least, as far as that is known before anything is made."""
        return planner.least_s(self)

    def playing(self, model: ModelSpec, topology: Topology, count: int) -> int:
        """Micro-batches, times blocks, of its orders that are played, about."""
        positions = self.divided_over(topology)
        each = -(-count * positions // topology.world_size)
        return min(each, 2 * searched(positions)) * len(model.blocks)

    def takes_long(self, planner: Planner) -> bool:
        """True if making and playing orders takes seconds."""
        return self.playing(planner.model, planner.topology, planner.micro_batches_of(self)) > QUICK_EFFORT

    def visits(self, count: int, topology: Topology, settings: ScheduleSettings) -> Sequence[int]:
        return [1]

    def changes(
        self, planner: Planner, step: StepSpec, worth: Callable[[str], bool], *, budget: int
    ) -> Iterator[dict[str, Any]]:
        layers = step.model.num_layers
        ways = (*(f"none:{max(1, layers // share)},full" for share in (4, 2)), "none")
        yield from ({"recompute": recompute} for recompute in filter(worth, ways))

    def extended(self, step: StepSpec, rounds: int) -> tuple[StepSpec, StepSpec, float]:
        """A round here is as many micro-batches of a pipeline as it has positions, or what its order repeats; each
        pipeline has an equal share.
        """
        positions = self.positions(step.topology)
        each = -(-len({m for share in step.micro_batches for m in share}) // positions.replicas)
        if step.speeds and len({len(share) for share in step.micro_batches}) > 1:
            return step, step, 0.0
        speeds = step.speeds if step.shared is None else ()  # pipelines have as many bins, however fast they are
        least, round_ = self.played_round(step, positions, each, rounds)
        least += max(sum(step.cut_in(share)) for share in step.micro_batches)
        if step.orders or each <= least + round_:
            return step, step, 0.0
        few = least + (each - least) % round_
        if each <= few + round_:
            return step, step, 0.0

        def cut(count: int) -> StepSpec:
            return step.with_shares(positions.share(count * positions.replicas, speeds))

        return cut(few), cut(few + round_), (each - few) / round_


@lru_cache(KEPT)
def _costs(block_times: str, model: ModelSpec) -> PipelineCosts:
    if not block_times:
        return times_from_sizes(model)
    costs = parse_times(block_times)
    if len(costs.blocks) != len(model.blocks):
        expected = f"times of the {len(model.blocks)} blocks of the model, the embedding and the head included"
        raise UserError("schedule.block_times", f"{len(costs.blocks)} blocks", expected)
    return costs


@lru_cache(KEPT)
def _layout(strategy: ActivationPipeline, model: ModelSpec, positions: Positions) -> Layout:
    given, size = strategy.stages.partition(":")[2], positions.size
    if not given:
        layout, speeds = strategy.usual_layout(model, positions), strategy.speeds(positions)
        return strategy.by_speed(layout, speeds) if speeds else layout
    layout = Layout.parse(given, len(model.blocks))
    if layout.size != size:
        raise UserError("schedule.stages", given, f"{size} positions, as there are {size} to lay it over")
    usual = strategy.usual_places(size, layout.stages)
    if usual is not None and layout.places != usual:
        why = f"stages at {','.join(map(str, usual))} under {strategy.name}"
        raise UserError("schedule.stages", given, f"{why}; generated takes any", need=why)
    return layout


@lru_cache(KEPT)
def order_of_layout(strategy: ActivationPipeline, layout: Layout, costs: PipelineCosts, count: int) -> Order:
    """The order that is given for so many micro-batches, or the one that the strategy makes; remembered."""
    if strategy.given and (order := parse_order(strategy.given)).micro_batches == count:
        check_order(layout, order)
        return order
    return strategy.order(layout, costs, count) if count else Order(((),) * layout.size)


def parse_order(text: str) -> Order:
    """``ScheduleSettings.pipeline_order`` as an order.

    Raises:
        UserError: something else.
    """
    try:
        return Order.parse(text)
    except ValueError as error:
        expected = "works of every position, those of its host, and what waits, as a plan writes them; or nothing"
        raise UserError("schedule.pipeline_order", text[:40], expected) from error


def check_order(layout: Layout, order: Order) -> None:
    """Raise UserError if an order is none of a layout: works are missing, twice or elsewhere, or wait for ever."""
    works = Counter((place, work) for place, lane in order.lanes for work in lane)
    done = {kind: {work[1:] for _, work in works if work.kind == kind} for kind in KINDS}
    everything = set(product(range(layout.stages), range(order.micro_batches)))
    there = len(order.compute) == layout.size and all(work.stage < layout.stages for _, work in works)
    good = there and all(layout.places[work.stage] == place for place, work in works) and max(works.values()) == 1
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
    """1F1B (PipeDream-flush)."""

    name = "1f1b"
    summary = "weights stay, activations travel: a stage on every device, a forward pass, then a backward pass"

    def usual_layout(self, model: ModelSpec, positions: Positions) -> Layout:
        return Layout.even(len(model.blocks), positions.size)

    def usual_places(self, size: int, stages: int) -> tuple[int, ...]:
        return tuple(range(size))

    def order(self, layout: Layout, costs: PipelineCosts, count: int) -> Order:
        return one_f_one_b(layout, count)


class Interleaved(ActivationPipeline):
    """Interleaved 1F1B (Megatron-LM)."""

    name = "interleaved-1f1b"
    summary = "1F1B with two stages on every device"

    def usual_layout(self, model: ModelSpec, positions: Positions) -> Layout:
        return Layout.even(len(model.blocks), positions.size, 2)

    def usual_places(self, size: int, stages: int) -> tuple[int, ...]:
        return tuple(range(size)) * -(-stages // size)

    def order(self, layout: Layout, costs: PipelineCosts, count: int) -> Order:
        return interleaved(layout, count)

    def played_round(self, step: StepSpec, positions: Positions, each: int, rounds: int) -> tuple[int, int]:
        """A group of the order; all micro-batches where these make none, as the order says when it is made."""
        group = each // max(1, each // positions.size)
        return (rounds * group, group) if makes_groups(each, positions.size) else (each, each)
