"""Information that a plan gives to strategies, and the costs for which pipeline schedules are searched.

Times are in microseconds and memory is in boundary activations, both rounded. A run receives exactly these numbers in
``ScheduleSettings.block_times``, so it makes the schedule that the plan has evaluated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from tawpipe.errors import UserError
from tawpipe.plan.cost.predict import bound_of, memory_of, memory_quickly, short_schedule
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.schedule.buffers import Kind
from tawpipe.schedule.pipelines.limits import PASSING
from tawpipe.schedule.pipelines.positions import Positions
from tawpipe.schedule.pipelines.work import BlockTimes, PipelineCosts
from tawpipe.schedule.refusal import MemoryOfPosition
from tawpipe.schedule.settings import RECOMPUTE
from tawpipe.schedule.sizes.footprint import home_bytes
from tawpipe.schedule.step import Planner, Schedule, StepSpec, Strategy
from tawpipe.simulate import LinkModel

MICRO = 1e6


def planner_of(request: PlanRequest) -> Planner:
    """Return the ``Planner`` through which strategies ask for facts about ``request``."""

    def keeps_attention(step: StepSpec) -> bool:
        return bool(request.of(step).profile.memory.kept.get("attention", 1))  # 0: no kernel's result can be kept

    def least_s(strategy: Strategy) -> float:
        """Return the lower bound of a step's seconds under ``strategy``; infinite if it cannot run."""
        with suppress(UserError):
            return bound_of(request, request.step(replace(request.settings, strategy=strategy.name), strategy))
        return math.inf

    def lacking_bytes(strategy: Strategy, **changes: Any) -> int:
        """Return the bytes that a device lacks under ``strategy`` with ``changes``; 0 if no limit is set.

        The number is negative if memory is left."""
        if not request.memory_bytes:
            return 0
        settings = replace(request.settings, strategy=strategy.name, **changes)
        return memory_quickly(request, request.step(settings, strategy)).wanted - request.memory_bytes

    return Planner(
        request.model,
        request.topology,
        request.settings,
        request.memory_bytes,
        boundary_bytes=request.profile.memory.boundary * request.size.tokens,
        chunks=request.chunks,
        micro_batches_of=request.micro_batches_of,
        keeps_attention=keeps_attention,
        keeps_products=bool(request.profile.memory.kept.get(Kind.PRODUCTS)),
        least_s=least_s,
        costs_of=partial(pipeline_costs, request),
        lacking_bytes=lacking_bytes,
    )


def fit_to(
    request: PlanRequest, way: Strategy, *, hopeful: bool = True, stop: Callable[[], None] = lambda: None
) -> Strategy:
    """Return the strategy with stages or orders made for this request (``Strategy.fit_to``).

    An error about the memory of a position is replaced by one about the memory of a device.

    Args:
        request: the request.
        way: the strategy for which stages and orders are made.
        hopeful, stop: see ``Strategy.fit_to``.

    Raises:
        UserError: the strategy cannot run, or a device's memory is too small for any order.
    """
    try:
        return way.fit_to(planner_of(request), hopeful=hopeful, stop=stop)
    except UserError as error:
        if not isinstance(error.need, MemoryOfPosition):
            raise
        available, need = f"{request.memory_bytes / 2**30:.4g} GiB", MemoryOfPosition(request.memory_bytes)
        raise UserError("memory of a device", available, "more, for a pipeline's stages", need=need) from error


def pipeline_costs(request: PlanRequest, positions: Positions, recompute: str) -> PipelineCosts:
    """Return the costs for which a pipeline's stages and order are searched, over ``positions``.

    Times are in microseconds, for the mean micro-batch. Memory is in boundary activations, for a full micro-batch.

    Args:
        request: the request.
        positions: the positions of the pipeline.
        recompute: what layers recompute in the backward pass.
    """
    costs, memory, blocks = request.costs, request.profile.memory, []
    if request.dealt:
        costs = replace(costs, size=request.mean_pack(positions.size)[1])
    boundary, passing = memory.boundary * request.size.tokens, memory.boundary * costs.size.tokens
    free_memory, resident = _free_memory(request, positions, recompute)
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
        memory=free_memory,
        host=round(host * MICRO) if host < math.inf else math.inf,
        **hops(positions, passing, blocks, between=costs.between, inside=costs.inside),
    )


def hops(
    positions: Positions, boundary: float, blocks: Sequence[BlockTimes], *, between: LinkModel, inside: LinkModel
) -> dict[str, Any]:
    """Return the transfer times of boundary activations between positions, as fields of ``PipelineCosts``.

    Times are in microseconds. Pipelines side by side send over one link between nodes at the same time. A node between
    two others sends in both directions, so a transfer meets one of the other direction for the share of time in which
    the link is busy with them.

    Args:
        positions: the positions of the pipeline.
        boundary: bytes of one boundary activation.
        blocks: times of the blocks, in microseconds.
        between, inside: links between nodes, and inside a node.
    """
    over_nodes = positions.axis == "nodes"
    beside, both_ways = positions.replicas if over_nodes else 1, over_nodes and positions.size > 2
    stage_s = sum(b.forward + b.backward_input + b.backward_weight for b in blocks) / positions.size / MICRO

    def alone_s(link: LinkModel) -> float:
        return boundary * beside / link.node_rate(beside)

    def time(link: LinkModel) -> int:
        """Return the microseconds of a boundary on ``link``, with the share of waiting for the other direction."""
        passing_s = alone_s(link)
        if both_ways:
            passing_s += passing_s**2 / max(stage_s, passing_s, 1 / MICRO)
        return round((link.latency_s + passing_s) * MICRO)

    if positions.axis == "locals" or positions.topology.num_nodes == 1:
        return {"hop": time(inside)}
    near = {"near_hop": time(inside), "nodes": positions.nodes} if positions.nodes else {}
    alone = {"link": round(alone_s(between) * MICRO)} if both_ways else {}
    return {"hop": time(between), **near, **alone}


def _free_memory(request: PlanRequest, positions: Positions, recompute: str) -> tuple[float, list[float]]:
    """Return (memory of a position for kept activations, memory that each block occupies permanently).

    A block occupies weights, gradients, optimizer state, and working memory beyond a layer's. Both results are in
    boundary activations. Without a memory limit the first is infinite and the others are 0."""
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
    free_memory = (request.memory_bytes - besides - usual - of_layers) // boundary - PASSING
    return max(0, free_memory), [math.ceil(100 * taken / boundary) / 100 for taken in of_blocks]


def _of_units(request: PlanRequest, step: StepSpec, positions: Positions) -> list[float]:
    """Return, for every block, the bytes that its units occupy on the device that computes it."""
    widths, seen, of_blocks = request.widths, set[int](), list[float]()
    for block in request.model.blocks:
        of_blocks.append(0.0)
        for number in block.units:
            home, unit = step.homes[number], request.model.units[number]
            if number in seen:  # a tied unit's home is at its first block, which receives this block's gradient
                of_blocks[-1] += home.padded * (widths.weight + widths.gradient * unit.trainable)
                continue
            seen.add(number)
            of_blocks[-1] += home.shard_size * widths.on_device(
                number, step.settings.host_homes, trainable=unit.trainable
            )
            if unit.trainable:  # each further block of a tied unit needs a receive buffer for its gradient
                of_blocks[-1] += (len(unit.blocks) - 1) * home.padded * widths.gradient
            if positions.replicas > 1:  # replicas gather weights and sum gradients
                summed = (home.padded + home.shard_size) * widths.gradient if unit.trainable else 0
                of_blocks[-1] += home.padded * widths.weight + summed
    return of_blocks


def _passing(request: PlanRequest, step: StepSpec, positions: Positions) -> list[int]:
    """Return, for every block, the bytes of device buffers through which its gradients pass to homes in host memory.

    The numbers are 0 if homes are on the device, or with several pipelines. Layers of equal size share one set of
    buffers. Each of these layers has the bytes of the whole set, so the numbers must not be added."""
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
    """Return the bytes of device memory that belong to no block, whichever stage the device has.

    Included are the system and the allocator, the buffer for dequantised weights, and the buffers through which homes
    in host memory pass."""
    step, widths, parts = schedule.step, request.widths, memory_of(request, schedule).parts
    at_home = [
        home.shard_size * widths.on_device(number, step.settings.host_homes, trainable=unit.trainable)
        for number, (home, unit) in enumerate(zip(step.homes, step.model.units, strict=True))
    ]
    passing_bytes = max(
        home_bytes(schedule, rank, widths)[0]
        - sum(size for size, home in zip(at_home, step.homes, strict=True) if home.index(rank) is not None)
        for rank in schedule.played
    )
    return parts["system"] + parts.get("apart", 0) + widths.unpacked * widths.weight + passing_bytes
