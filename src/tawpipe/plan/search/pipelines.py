"""Pipelines in plans: how they are laid over the devices, and the costs that searches for schedules are given.

Times are in microseconds and memory in boundary activations, rounded: what a run is told in
``ScheduleSettings.block_times`` is what the plan has looked at.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from statistics import fmean
from typing import Any

from tawpipe.errors import UserError
from tawpipe.plan.cost.predict import memory_of, memory_quickly, short_schedule
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.schedule.buffers import Kind
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.limits import BUDGET, QUICK, filling, searched
from tawpipe.schedule.pipelines.made import SEARCH
from tawpipe.schedule.pipelines.memory import peak
from tawpipe.schedule.pipelines.positions import Positions
from tawpipe.schedule.pipelines.strategy import ActivationPipeline
from tawpipe.schedule.pipelines.times import spell_times
from tawpipe.schedule.pipelines.work import BlockTimes, PipelineCosts
from tawpipe.schedule.refusal import MemoryOfPosition
from tawpipe.schedule.settings import RECOMPUTE
from tawpipe.schedule.sizes.footprint import home_bytes
from tawpipe.schedule.step import Schedule, StepSpec, Strategy
from tawpipe.schedule.strategies.table import strategies
from tawpipe.simulate import LinkModel

MICRO = 1e6
QUICK_EFFORT = 2_000
"""Micro-batches, times blocks, of a pipeline for which all orders are looked at."""
KEEP_TRIES, SOLVE_S = 3000, 4.0
"""For a choice layer by layer: tries, and the solver's seconds."""
TRIES = 4
"""Limits of memory for which something is made, each lower by what the one before was too high."""
LESS = 0.8
"""Share of what an order keeps with which stages are looked for once more."""
PASSING = 3
"""Boundary activations, and gradients of them, that come and go while a stage computes."""


def laid_out(request: PlanRequest, strategy: Strategy, axis: str) -> Sequence[Strategy]:
    """The ways to lay a strategy out that a plan tries.

    Args:
        axis: the only one for what is made for costs, which takes time; any if empty.
    """
    if isinstance(strategy, ActivationPipeline) and strategy.arranges and not strategy.stages:
        strategy = replace(strategy, stages=axis)
    return strategy.layouts(request.topology)


class TooLong(Exception):
    """What is made for costs did not fit in time."""


def made_for(
    request: PlanRequest, way: Strategy, *, hopeful: bool = True, over: Callable[[], bool] = lambda: False
) -> Strategy:
    """A way to lay a strategy out with what is made for the costs at hand, if it is such a strategy.

    Args:
        hopeful: pipelines are not so far behind that a search for stages would be lost time.
        over: true if nothing is to be made once more, with less memory.

    Raises:
        UserError: memory for no order.
        TooLong: what was made does not fit, and time is over.
    """
    if isinstance(way, ActivationPipeline) and way.arranges and not way.block_times:
        return _made(request, way, "full", budget=QUICK if hopeful else 0, over=over)
    return way


def effort(request: PlanRequest, way: Strategy) -> int:
    """Micro-batches, times blocks, of the orders that are made and played, about."""
    positions = way.divided_over(request.topology)
    each = -(-request.micro_batches_of(way) * positions // request.topology.world_size)
    return min(each, 2 * searched(positions)) * len(request.model.blocks)


def long(request: PlanRequest, way: Strategy) -> bool:
    """True if making and playing orders takes seconds."""
    return effort(request, way) > QUICK_EFFORT


def changes(
    request: PlanRequest, step: StepSpec, worth: Callable[[str], bool], *, budget: int = BUDGET
) -> Iterator[dict[str, Any]]:
    """Settings of a pipeline that may be worth a try. What is made for costs is made anew for those of others.

    Args:
        worth: says whether recomputing so could gain anything.
        budget: for a search for stages, of which the first one had ``QUICK``.
    """
    strategy, layers = step.strategy, request.model.num_layers
    assert isinstance(strategy, ActivationPipeline)
    ways = [f"none:{max(1, layers // share)},full" for share in (4, 2)] if not strategy.arranges else []
    thorough = strategy.searches_stages and budget > QUICK
    for recompute in filter(worth, (*ways, *(["full"] if thorough else []), "none")):
        with suppress(UserError):  # memory for no order of what layers would keep
            pipeline = _made(request, strategy, recompute, budget=budget) if strategy.arranges else None
            yield {"recompute": recompute} | (_found(pipeline) if pipeline else {})
            if pipeline and thorough and recompute == "full":
                less = _made(request, strategy, recompute, budget=budget, memory=_less(request, pipeline))
                yield {"recompute": recompute} | _found(less)
    if strategy.improves and request.memory_bytes and worth("none"):
        with suppress(UserError):  # memory for no choice
            yield from _layer_by_layer(request, strategy)


def _layer_by_layer(request: PlanRequest, strategy: ActivationPipeline) -> Iterator[dict[str, Any]]:
    """Settings in which every layer keeps, offloads or computes again what suits it, on stages that are made for that,
    in an order that a solver has had some seconds for, where it is installed.
    """
    positions = strategy.positions(request.topology)
    count = -(-request.micro_batches // positions.replicas)
    if count > searched(positions.size):
        return
    options = {how: pipeline_costs(request, positions, how) for how in RECOMPUTE}
    boundary = request.profile.memory.boundary * request.size.tokens
    memory = min(costs.memory for costs in options.values())
    blocks = len(request.model.blocks)
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
        settings = replace(request.settings, strategy=strategy.name, **changes)
        over = memory_quickly(request, request.step(settings)).wanted - request.memory_bytes
        if over <= 0:
            yield changes
            return
        memory -= over // boundary + 1


def solved(step: StepSpec) -> bool:
    """True if a solver has had some seconds for the order of a step."""
    return bool(step.settings.pipeline_order) and has_solver()


def has_solver() -> bool:
    """True if orders are given to a solver."""
    return find_spec("ortools") is not None


def _found(pipeline: ActivationPipeline) -> dict[str, Any]:
    return {"stages": pipeline.stages, "block_times": pipeline.block_times}


def _less(request: PlanRequest, pipeline: ActivationPipeline) -> float:
    """Memory of a position in which micro-batches may keep ``LESS`` of what they do: a search that has less to choose
    from may find a shorter step.
    """
    positions = pipeline.positions(request.topology)
    costs = pipeline.costs(request.model, positions)
    count = -(-request.micro_batches_of(pipeline) // positions.replicas)
    layout = pipeline.layout_of(request.model, positions)
    order = pipeline.order(layout, costs, count if count <= searched(positions.size) else filling(positions.size))
    peaks = zip(peak(layout, order, costs), costs.stages(layout).resident, strict=True)
    whole, kept = max((whole, whole - resident) for whole, resident in peaks)
    return math.floor(whole - (1 - LESS) * kept)


def _made(
    request: PlanRequest,
    strategy: ActivationPipeline,
    recompute: str,
    *,
    budget: int,
    memory: float = math.inf,
    over: Callable[[], bool] = lambda: False,
) -> ActivationPipeline:
    """What is made for costs, with less memory where a first one does not fit: ends and uneven stages take theirs.

    Args:
        memory: of a position, at most.
        over: see ``made_for``.
    """
    positions = strategy.positions(request.topology)
    costs, stages = pipeline_costs(request, positions, recompute), strategy.stages
    costs = replace(costs, memory=min(costs.memory, memory))
    if strategy.improves:  # it counts what passes between positions itself
        costs = replace(costs, memory=costs.memory + PASSING)
    boundary = request.profile.memory.boundary * request.size.tokens
    each = -(-request.micro_batches_of(strategy) // positions.replicas)
    try:
        for _ in range(TRIES):
            if strategy.searches_stages:  # anew where memory was too little: other stages may then be best
                layout = SEARCH().generate(costs, positions.size, each, budget=budget)
                stages = f"{positions.axis}:{layout}"
            pipeline = replace(strategy, stages=stages, block_times=spell_times(costs))
            if (lacking := _over(request, pipeline, recompute)) <= 0:
                break
            if over():
                raise TooLong
            costs = replace(costs, memory=max(0, costs.memory - lacking // boundary - 1))
    except UserError as error:
        if not isinstance(error.need, MemoryOfPosition):
            raise
        there, need = f"{request.memory_bytes / 2**30:.4g} GiB", MemoryOfPosition(request.memory_bytes)
        raise UserError("memory of a device", there, "more, for a pipeline's stages", need=need) from error
    return pipeline


def _over(request: PlanRequest, way: ActivationPipeline, recompute: str) -> int:
    """Bytes that a device lacks; none where its memory is not known."""
    if not request.memory_bytes:
        return 0
    settings = replace(request.settings, strategy=way.name, recompute=recompute)
    return memory_quickly(request, request.step(settings, way)).wanted - request.memory_bytes


def as_published(request: PlanRequest, way: Strategy) -> Iterator[Strategy]:
    """A pipeline that looks for its stages with those of published orders instead, as far as these fit: in the memory
    that they take, what is made for costs is no longer. The plan's clock knows what a search for stages does not, such
    as links that several positions share.
    """
    assert isinstance(way, ActivationPipeline)
    if way.block_times:
        return
    positions = way.positions(request.topology)
    costs = pipeline_costs(request, positions, "full")
    count = min(-(-request.micro_batches_of(way) // positions.replicas), filling(positions.size))
    for name in ("interleaved-1f1b", "1f1b"):
        fixed = strategies()[name].configured(replace(request.settings, stages=positions.axis))
        assert isinstance(fixed, ActivationPipeline)
        with suppress(UserError):
            if _over(request, fixed, "full") <= 0:
                layout = fixed.layout_of(request.model, positions)
                most = max(costs.memory, *peak(layout, fixed.order(layout, costs, count), costs))
                times = spell_times(replace(costs, memory=most))
                yield replace(way, stages=f"{positions.axis}:{layout}", block_times=times)


def pipeline_costs(request: PlanRequest, positions: Positions, recompute: str) -> PipelineCosts:
    """What a search for a pipeline's schedule is given: the costs of the clock, for each position. Times are those of
    the mean micro-batch, memory is that of a full one.

    Args:
        recompute: what layers compute again.
    """
    costs, memory, blocks = request.costs, request.profile.memory, []
    if request.dealt:
        costs = replace(costs, size=request.mean_bin(positions.size)[1])
    boundary, passing = memory.boundary * request.size.tokens, memory.boundary * costs.size.tokens
    room, resident = _room(request, positions, recompute)
    for number, (block, taken) in enumerate(zip(request.model.blocks, resident, strict=True)):
        layer, trains = block.kind == "layer", block.needs_backward or block.kind == "head"
        forward = costs.forward_s(0, number, 0) if block.kind != "head" else 0.0
        back = costs.backward_s(0, number, 0, recompute if layer else "full") if trains else 0.0
        weights = costs.backward_weight_s(0, number, 0) if layer and request.model.trainable_units(number) else 0.0
        saved = RECOMPUTE[recompute] if layer else None
        kept = memory.kept.get(saved, 0.0) / memory.boundary if saved else float(block.kind != "embedding")
        linear = memory.kept.get(Kind.LINEAR, 0.0) / memory.boundary if layer else 0.0
        times = (round(seconds * MICRO) for seconds in (forward, back - weights, weights))
        blocks.append(BlockTimes(*times, kept=round(kept, 2), kept_for_weights=round(linear, 2), resident=taken))
    factor, pipelines = costs.compute_factor, range(positions.replicas)
    paces = tuple(
        fmean(1 / factor.get(positions.rank(place, pipeline), 1.0) for pipeline in pipelines) ** -1
        for place in range(positions.size)
    )
    host = costs.host.latency_s + boundary / costs.host.bytes_per_s if request.has_host else math.inf
    return PipelineCosts(
        tuple(blocks),
        pace=paces if max(paces) - min(paces) > 1e-9 or abs(paces[0] - 1) > 1e-9 else (),
        memory=room,
        host=round(host * MICRO) if host < math.inf else math.inf,
        **hops(positions, passing, blocks, between=costs.between, inside=costs.inside),
    )


def hops(
    positions: Positions, boundary: float, blocks: Sequence[BlockTimes], *, between: LinkModel, inside: LinkModel
) -> dict[str, Any]:
    """How long boundaries take from one position to another, as ``PipelineCosts`` says it.

    Args:
        boundary: bytes. Pipelines side by side send theirs over one link between nodes at one time. A node between two
            others sends both ways: a boundary meets one of the other way as often as the link is busy with those.
        blocks: times in microseconds.
    """
    over_nodes = positions.axis == "nodes"
    beside, both_ways = positions.replicas if over_nodes else 1, over_nodes and positions.size > 2
    stage_s = sum(b.forward + b.backward_input + b.backward_weight for b in blocks) / positions.size / MICRO

    def alone_s(link: LinkModel) -> float:
        return boundary * beside / link.node_rate(beside)

    def time(link: LinkModel) -> int:
        passing_s = alone_s(link)
        if both_ways:
            passing_s += passing_s**2 / max(stage_s, passing_s, 1 / MICRO)
        return round((link.latency_s + passing_s) * MICRO)

    if positions.axis == "locals" or positions.topology.num_nodes == 1:
        return {"hop": time(inside)}
    near = {"near_hop": time(inside), "nodes": positions.nodes} if positions.nodes else {}
    alone = {"link": round(alone_s(between) * MICRO)} if both_ways else {}
    return {"hop": time(between), **near, **alone}


def _room(request: PlanRequest, positions: Positions, recompute: str) -> tuple[float, list[float]]:
    """Memory of a position, and what every block takes of it for good: weights, gradients, optimizer state, and what
    computing it needs beyond a layer. Both in boundary activations; no end and nothing where memory is not known.
    """
    blocks = request.model.blocks
    if not request.memory_bytes:
        return math.inf, [0.0] * len(blocks)
    fixed = replace(request.settings, strategy="1f1b", stages=positions.axis, block_times="", recompute=recompute)
    step = request.step(fixed)
    schedule, memory = short_schedule(request, step), request.of(step).profile.memory
    tokens = round(request.size.tokens)
    working = dict.fromkeys((block.kind for block in blocks), 0)
    for action in itertools.chain.from_iterable(schedule.programs):
        if action.block >= 0:
            kind = blocks[action.block].kind
            working[kind] = max(working[kind], memory.working_of(schedule, action, tokens))
    usual, besides = working.get("layer", 0), _besides(request, schedule)
    passing = _passing(request, step, positions)
    of_blocks = _of_units(request, step, positions)
    for number, block in enumerate(blocks):
        of_blocks[number] += max(0, working[block.kind] - usual) + passing[number] * (block.kind != "layer")
    of_layers = sum({size for size, block in zip(passing, blocks, strict=True) if block.kind == "layer"})
    boundary = request.profile.memory.boundary * request.size.tokens
    room = (request.memory_bytes - besides - usual - of_layers) // boundary - PASSING
    return max(0, room), [math.ceil(100 * taken / boundary) / 100 for taken in of_blocks]


def _of_units(request: PlanRequest, step: StepSpec, positions: Positions) -> list[float]:
    """Bytes that the units of every block take of a device that computes it."""
    widths, seen, of_blocks = request.widths, set[int](), list[float]()
    for block in request.model.blocks:
        of_blocks.append(0.0)
        for number in block.units:
            home, unit = step.homes[number], request.model.units[number]
            if number in seen:  # it lives where its first block is, to which its gradient goes
                of_blocks[-1] += home.padded * (widths.weight + widths.gradient * unit.trainable)
                continue
            seen.add(number)
            of_blocks[-1] += home.stripe * widths.on_device(number, step.settings.host_homes, trainable=unit.trainable)
            if unit.trainable:  # gradients of its other blocks come into memory of their own
                of_blocks[-1] += (len(unit.blocks) - 1) * home.padded * widths.gradient
            if positions.replicas > 1:  # weights come from the others, and gradients go to them
                summed = (home.padded + home.stripe) * widths.gradient if unit.trainable else 0
                of_blocks[-1] += home.padded * widths.weight + summed
    return of_blocks


def _passing(request: PlanRequest, step: StepSpec, positions: Positions) -> list[int]:
    """Bytes of the places in which backward passes of every block leave gradients for homes in the host's memory;
    layers of one size have them together.
    """
    blocks, units = request.model.blocks, request.model.units
    if not step.homes_in_host or positions.replicas > 1:
        return [0] * len(blocks)
    places = {"layer": step.settings.gradient_buffers or 1}
    return [
        places.get(block.kind, 1)
        * request.widths.master
        * sum(step.homes[u].padded for u in request.model.trainable_units(number) if units[u].blocks[0] == number)
        for number, block in enumerate(blocks)
    ]


def _besides(request: PlanRequest, schedule: Schedule) -> float:
    """Bytes of a device besides what its blocks take: of the system, and of what passes through it."""
    step, widths, parts = schedule.step, request.widths, memory_of(request, schedule).parts
    at_home = [
        home.stripe * widths.on_device(number, step.settings.host_homes, trainable=unit.trainable)
        for number, (home, unit) in enumerate(zip(step.homes, step.model.units, strict=True))
    ]
    rooms = max(
        home_bytes(schedule, rank, widths)[0]
        - sum(size for size, home in zip(at_home, step.homes, strict=True) if home.index(rank) is not None)
        for rank in schedule.played
    )
    return parts["system"] + parts.get("apart", 0) + widths.unpacked * widths.weight + rooms
