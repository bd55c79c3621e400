"""The strategies whose activations travel: published orders, and what searches find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial

from tawpipe.errors import UserError
from tawpipe.schedule.pipelines.arrange import arrange, continuing
from tawpipe.schedule.pipelines.fitting import heuristics
from tawpipe.schedule.pipelines.generate import BUDGET, generate
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.orders import forward_only, interleaved, makes_groups, one_f_one_b
from tawpipe.schedule.pipelines.periodic import Periodic, filling, periodic, searched
from tawpipe.schedule.pipelines.positions import AXES, Positions
from tawpipe.schedule.pipelines.program import PipelineShape, build_pipeline
from tawpipe.schedule.pipelines.times import BY_POSITION, parse_times, times_from_sizes
from tawpipe.schedule.pipelines.work import Order, PipelineCosts, makespan, play
from tawpipe.schedule.placement import Home
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.spec import ModelSpec
from tawpipe.schedule.step import Schedule, StepSpec, Strategy
from tawpipe.topology import Topology

SUMMARIES = {
    "1f1b": "weights stay, activations travel: a stage on every device, a forward pass, then a backward pass",
    "interleaved-1f1b": "1F1B with two stages on every device",
    "zero-bubble": "two stages on every device in the shape of a V, gradients of weights where there is time for them",
    "generated": "a pipeline whose stages, their places and their order are made for the costs of the model's layers",
    "solved": "a pipeline whose order, offloading included, is made for the memory that there is, and solved for it",
}
PER_POSITION = 2
"""Stages that a position of ``interleaved-1f1b`` and ``zero-bubble`` has, unless a layout says otherwise."""
GENERATED_FOR = 4
"""Micro-batches, for each position, that ``generated`` looks for a layout with: orders are made for any number."""
QUICK = BUDGET // 10
"""Of its search for a layout that no plan has made: every rank repeats it."""
_STAY = "weights stay where they are"
_ROWS = "a micro-batch passes through a pipeline in whole rows"


def check_axis(stages: str) -> None:
    """Raise UserError if ``ScheduleSettings.stages`` begins with nothing that positions can be laid over."""
    if (stages or "world").partition(":")[0] not in AXES:
        expected = f"{', '.join(AXES)}, with a layout after a colon if wanted, as in world:0,5,9@0,1,0"
        raise UserError("schedule.stages", stages, expected)


@dataclass(eq=False)
class ActivationPipeline(Strategy):
    """Weights stay on the ranks of a stage, activations travel.

    Args:
        kind: one of ``SUMMARIES``.
        stages: see ``ScheduleSettings.stages``.
        block_times: see ``ScheduleSettings.block_times``.
    """

    kind: str
    stages: str = ""
    block_times: str = ""

    weights_stay = True
    refusals = {
        **dict.fromkeys(("homes", "step_cache", "weights_compression", "gradients_compression"), _STAY),
        **dict.fromkeys(("sequence_chunk", "sequence_ranks"), _ROWS),
        "offloaded_layers": "what a stage keeps is offloaded under solved alone, as its order says",
        "keep_mib": "recompute says what its layers keep",
    }

    def __post_init__(self) -> None:
        self.name, self.summary = self.kind, SUMMARIES[self.kind]
        self.layout = AXES.get(self.axis, "")

    @property
    def splits(self) -> bool:
        return self.kind not in ("1f1b", "interleaved-1f1b")

    @property
    def made(self) -> bool:
        """True if stages or orders are made for costs."""
        return self.kind in ("zero-bubble", "generated", "solved")

    @property
    def searches_stages(self) -> bool:
        """True if the stages themselves are looked for, and not given or even."""
        return self.kind == "generated"

    @property
    def improves(self) -> bool:
        """True if a solver may look for a better order by times that a run has measured."""
        return self.kind == "solved"

    @property
    def axis(self) -> str:
        return (self.stages or "world").partition(":")[0]

    def configured(self, settings: ScheduleSettings) -> ActivationPipeline:
        stages, times = settings.stages or self.stages, settings.block_times or self.block_times
        if (stages, times) == (self.stages, self.block_times):
            return self
        return replace(self, stages=stages, block_times=times)

    def settle(self, settings: ScheduleSettings) -> ScheduleSettings:
        stages = settings.stages or self.stages or "world"
        times = settings.block_times or self.block_times
        return super().settle(replace(settings, micro_batches_per_visit=1, stages=stages, block_times=times))

    def positions(self, topology: Topology) -> Positions:
        """Where the positions are.

        Raises:
            UserError: no such axis, or a pipeline of one.
        """
        check_axis(self.stages)
        found = Positions(topology, self.axis)
        if found.size < 2:
            several = [axis for axis in AXES if Positions(topology, axis).size > 1]
            expected = f"one of {', '.join(several)}" if several else "nothing: a pipeline needs several devices"
            raise UserError("schedule.stages", self.axis, f"{expected}; {AXES[self.axis]} it would have one position")
        return found

    def costs(self, model: ModelSpec) -> PipelineCosts:
        """What orders are made for: times that were measured, or what the sizes of the blocks say."""
        return _costs(self.block_times, model)

    def layout_of(self, model: ModelSpec, size: int) -> Layout:
        """The stages of a pipeline of so many positions."""
        return _layout(self.kind, self.stages.partition(":")[2], self.block_times, model, size)

    def shape(self, model: ModelSpec, topology: Topology) -> PipelineShape:
        """All that the ranks of a pipeline agree on."""
        positions = self.positions(topology)
        costs = self.costs(model)
        for name in BY_POSITION:
            if len(found := getattr(costs, name)) not in (0, positions.size):
                expected = f"{positions.size} numbers, one for every position"
                raise UserError("schedule.block_times", f"{name}={'/'.join(map(str, found))}", expected)
        layout = self.layout_of(model, positions.size)
        return PipelineShape(model, layout, positions, costs, lambda count: _order(self.kind, layout, costs, count))

    def share(self, count: int, topology: Topology, settings: ScheduleSettings) -> tuple[tuple[int, ...], ...]:
        return self.configured(settings).positions(topology).share(count)

    def place(self, model: ModelSpec, topology: Topology, homes: tuple[int, ...] = ()) -> tuple[Home, ...]:
        return self.shape(model, topology).homes

    def build(self, step: StepSpec, *, training: bool = True, ranks: Sequence[int] | None = None) -> Schedule:
        shape = self.shape(step.model, step.topology)
        if not training:
            shape = replace(shape, order_of=lambda count: forward_only(shape.layout, count))
        return build_pipeline(shape, step, training=training, ranks=ranks)

    def stand_ins(self, topology: Topology, *, inside_is_even: bool) -> tuple[int, ...]:
        """One of several pipelines side by side."""
        positions = self.positions(topology)
        return tuple(positions.rank(place, 0) for place in range(positions.size)) if positions.replicas > 1 else ()

    def fullest(self, step: StepSpec) -> tuple[int, ...]:
        """One of all pipelines with as many micro-batches: side by side they do the same."""
        positions = self.positions(step.topology)
        one_of = {len(own): positions.replica(rank) for rank, own in reversed([*enumerate(step.micro_batches)])}
        world = range(step.topology.world_size)
        return tuple(rank for rank in world if positions.replica(rank) in one_of.values())

    def build_in_order(self, step: StepSpec, order: Order) -> Schedule:
        """A training step in a given order; every pipeline has as many micro-batches."""
        return build_pipeline(
            replace(self.shape(step.model, step.topology), order_of=lambda _: order), step, training=True
        )

    def check(self, step: StepSpec) -> None:
        super().check(step)
        if step.shared is not None:
            expected = "a strategy whose weights travel where documents are dealt by time; or --packing split, in rows"
            raise UserError("schedule.strategy", self.name, expected)

    def layouts(self, topology: Topology) -> Sequence[Strategy]:
        axes = [self.axis] if self.stages else [axis for axis in AXES if Positions(topology, axis).size > 1]
        sizes = {Positions(topology, axis).size: axis for axis in reversed(axes)}
        return [replace(self, stages=self.stages or axis) for axis in axes if axis in sizes.values()]

    def extended(self, step: StepSpec, rounds: int) -> tuple[StepSpec, StepSpec, float]:
        """A round here is as many micro-batches of a pipeline as it has positions, or what its order repeats; each
        pipeline has an equal share.
        """
        positions = self.positions(step.topology)
        each = -(-len({m for own in step.micro_batches for m in own}) // positions.replicas)
        round_, least = positions.size, rounds * positions.size
        if self.made:
            least = searched(positions.size) + 1
            if each > least:
                round_ = _continuing(
                    self.kind, self.layout_of(step.model, positions.size), self.costs(step.model)
                ).period
        elif self.kind == "interleaved-1f1b":
            if not makes_groups(each, positions.size):  # as its order says when it is made
                return step, step, 0.0
            round_ = each // max(1, each // positions.size)
            least = rounds * round_
        few = least + (each - least) % round_
        if each <= few + round_:
            return step, step, 0.0

        def cut(count: int) -> StepSpec:
            return replace(step, micro_batches=positions.share(count * positions.replicas))

        return cut(few), cut(few + round_), (each - few) / round_


@cache
def _costs(block_times: str, model: ModelSpec) -> PipelineCosts:
    if not block_times:
        return times_from_sizes(model)
    found = parse_times(block_times)
    if len(found.blocks) != len(model.blocks):
        expected = f"times of the {len(model.blocks)} blocks of the model, the embedding and the head included"
        raise UserError("schedule.block_times", f"{len(found.blocks)} blocks", expected)
    return found


@cache
def _layout(kind: str, given: str, block_times: str, model: ModelSpec, size: int) -> Layout:
    blocks = len(model.blocks)
    even = {
        "1f1b": lambda: Layout.even(blocks, size),
        "solved": lambda: Layout.even(blocks, size),
        "interleaved-1f1b": lambda: Layout.even(blocks, size, PER_POSITION),
        "zero-bubble": lambda: Layout.even(blocks, size, PER_POSITION, folded=True),
    }
    if not given:
        if kind == "generated":
            Layout.even(blocks, size)  # refuses fewer layers than positions
            return generate(_costs(block_times, model), size, GENERATED_FOR * size, budget=QUICK)
        return even[kind]()
    layout = Layout.parse(given, blocks)
    if layout.size != size:
        raise UserError("schedule.stages", given, f"{size} positions, as there are {size} to lay it over")
    turns = -(-layout.stages // size)
    usual = {
        "1f1b": tuple(range(size)),
        "interleaved-1f1b": tuple(range(size)) * turns,
        "zero-bubble": (*range(size), *reversed(range(size))),
    }
    if layout.places != usual.get(kind, layout.places):
        places = ",".join(map(str, usual[kind]))
        raise UserError("schedule.stages", given, f"stages at {places} under {kind}; generated takes any")
    return layout


def _memory_of_a_v(layout: Layout, costs: PipelineCosts) -> float:
    """What ``zero-bubble`` may keep: what there is room for, and no more than the published order, whose positions have
    the activations of 2p stages and of one more while W runs, and what p of W wait for.
    """
    stages = range(layout.stages)
    activations, waiting = (max(map(partial(what, layout), stages)) for what in (costs.kept, costs.kept_for_weights))
    return min(costs.memory, (2 * layout.size + 1) * activations + layout.size * waiting)


@cache
def _order(kind: str, layout: Layout, costs: PipelineCosts, count: int) -> Order:
    if not count:
        return Order(((),) * layout.size)
    if kind == "1f1b":
        return one_f_one_b(layout, count)
    if kind == "interleaved-1f1b":
        return interleaved(layout, count)
    if count > searched(layout.size):
        return _continuing(kind, layout, costs).of(count)
    if kind == "solved":
        found = heuristics(layout, costs, count)
        return min(found.values(), key=lambda order: makespan(play(layout, order, costs)))
    return arrange(layout, _limited(kind, layout, costs), count)


@lru_cache(maxsize=64)
def _continuing(kind: str, layout: Layout, costs: PipelineCosts) -> Periodic:
    """The order that goes on for more micro-batches than orders are looked for."""
    if kind != "solved":
        return continuing(layout, _limited(kind, layout, costs))
    few = filling(layout.size)
    found = [periodic(layout, order, costs, few) for order in heuristics(layout, costs, few).values()]
    return min(found, key=lambda one: one.length / one.period)


def _limited(kind: str, layout: Layout, costs: PipelineCosts) -> PipelineCosts:
    return replace(costs, memory=_memory_of_a_v(layout, costs)) if kind == "zero-bubble" else costs
