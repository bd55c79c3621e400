"""What strategies ask of a plan; and the costs that searches for the schedules of pipelines are given.

Times are in microseconds and memory in boundary activations, rounded: what a run is told in
``ScheduleSettings.block_times`` is what the plan has looked at.
"""

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
    """What strategies are told that offer something to a plan."""

    def keeps_attention(step: StepSpec) -> bool:
        return bool(request.of(step).profile.memory.kept.get("attention", 1))  # none if no kernel's result can be kept

    def least_s(strategy: Strategy) -> float:
        with suppress(UserError):
            return bound_of(request, request.step(replace(request.settings, strategy=strategy.name), strategy))
        return math.inf

    def lacking_bytes(strategy: Strategy, **changes: Any) -> int:
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
        least_s=least_s,
        costs_of=partial(pipeline_costs, request),
        lacking_bytes=lacking_bytes,
    )


def made_for(
    request: PlanRequest, way: Strategy, *, hopeful: bool = True, stop: Callable[[], None] = lambda: None
) -> Strategy:
    """``Strategy.made_for``, which refuses in words of the device's memory."""
    try:
        return way.made_for(planner_of(request), hopeful=hopeful, stop=stop)
    except UserError as error:
        if not isinstance(error.need, MemoryOfPosition):
            raise
        there, need = f"{request.memory_bytes / 2**30:.4g} GiB", MemoryOfPosition(request.memory_bytes)
        raise UserError("memory of a device", there, "more, for a pipeline's stages", need=need) from error


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
