"""What fits on some machines, and what is small enough to be played."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

from tawpipe.errors import UserError
from tawpipe.plan.cost.predict import LARGEST_WORK, PLAYED_ROUNDS, Needs, memory_quickly, played, shortened
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.schedule.settings import DEFAULT
from tawpipe.schedule.spec import ModelSpec
from tawpipe.schedule.step import Schedule, StepSpec, Strategy
from tawpipe.schedule.strategies.build import build, shares_of, step_of
from tawpipe.schedule.strategies.table import strategies
from tawpipe.topology import Topology

MOST_PLAYED = 10_000
"""Micro-batches, times blocks, of the ranks and rounds that are played, beyond which a setting is not: a search should
take seconds.
"""
QUICK_PLAYED = 2_000
"""The same up to which a strategy is played even if its bound is hopeless."""
LEAN = {"micro_batches_per_visit": 1, "look_ahead": 1, "gradient_buffers": 1}
"""The values of settings that need the least memory, besides offloading and recomputing."""
MOST_COMPARED = 2_000
"""Ranks of a node, times blocks, up to which it is found out which strategies do the same there."""
DEVICE, HOST, FILES = MEMORY = "device memory", "host memory", "disk"


def fits(request: PlanRequest, needs: Needs) -> bool:
    """True if so much memory is there, on every device, host and disk, as far as it is known."""
    return not lacking(request, needs)


def holds(request: PlanRequest, step: StepSpec, *what: str) -> bool:
    """True if a step fits; rank 0 is looked at first, where ``memory_quickly`` can.

    Args:
        what: the memory that is looked at; all by default.
    """
    parts = (True, False) if step.divided_over == 1 else (False,)
    needed = (memory_quickly(request, step, part=part) for part in parts)
    return not any({*lacking(request, needs)} & {*(what or MEMORY)} for needs in needed)


def lacking(request: PlanRequest, needs: Needs) -> list[str]:
    """Which memory does not suffice: some of ``DEVICE``, ``HOST`` and ``FILES``."""
    machine = request.machine
    there = {
        DEVICE: (request.memory_bytes, needs.wanted),
        HOST: (machine.host_bytes, needs.host),
        FILES: (machine.files_bytes, needs.files),
    }
    return [name for name, (most, needed) in there.items() if most and needed > most]


def whole_rows_fit(request: PlanRequest) -> bool:
    """True if some strategy whose rows could run in chunks can run them whole, with everything on the device. Of those
    that a plan looks at: on many devices the schedule alone of others takes minutes.
    """
    for strategy in strategies().values():
        if "sequence_chunk" in strategy.refusals or not strategy.candidate:
            continue
        with suppress(UserError):
            lean = replace(request.settings, strategy=strategy.name, sequence_chunk=0, **LEAN)
            step = request.step(lean, strategy)
            if not too_large(request, played(request, step)) and holds(request, step):
                return True
    return False


def some_fit(request: PlanRequest, over: Callable[[], bool]) -> bool:
    """True if some strategy is found that fits with the settings that need the least memory.

    Args:
        over: True when no other strategy is to be looked at: on many devices each takes a second.
    """
    return any(_some_strategy_fits(request.with_homes(level), over) for level in request.levels)


def _some_strategy_fits(request: PlanRequest, over: Callable[[], bool]) -> bool:
    for strategy in strategies().values():
        if over():
            break
        if not strategy.candidate:
            continue
        for ranks in (request.settings.sequence_ranks, *request.sets[-1:]):
            asked = request if ranks is None or "sequence_ranks" in strategy.refusals else request.with_ranks(ranks)
            for way in strategy.layouts(request.topology):
                with suppress(UserError):
                    if way.effort(asked.model, asked.topology, asked.micro_batches_of(way)):
                        continue  # making it takes longer than this look may
                    least = leanest(asked, asked.step(replace(asked.settings, strategy=strategy.name), way))
                    here = {least, with_settings(least, offloaded_layers=0)}
                    if not unplayed(asked, least) and any(holds(asked, step) for step in here):
                        return True
    return False


def shortage(request: PlanRequest, needs: Needs) -> str:
    """What is needed and what is there, of the memory that does not suffice; empty if all does."""
    words = []
    if request.memory_bytes and needs.wanted > request.memory_bytes:
        parts = ", ".join(f"{name} {gib(size)}" for name, size in needs.parts.items() if size)
        where = "a smaller device" if needs.absent else "every device"
        words.append(f"{gib(needs.device)} GiB of {gib(request.memory_bytes - needs.absent)} on {where} ({parts})")
    if request.machine.host_bytes and needs.host > request.machine.host_bytes:
        words.append(f"{gib(needs.host)} GiB of {gib(request.machine.host_bytes)} of every host's memory")
    if request.machine.files_bytes and needs.files > request.machine.files_bytes:
        words.append(f"{gib(needs.files)} GiB of {gib(request.machine.files_bytes)} of every node's disk")
    return " and ".join(words)


def gib(size: float) -> str:
    """
    >>> gib(3 * 2**30), gib(5 * 2**20)
    ('3.00', '0.005')
    """
    return f"{size / 2**30:.2f}" if size >= 2**30 / 10 else f"{size / 2**30:.3f}"


def leanest(request: PlanRequest, step: StepSpec) -> StepSpec:
    """The settings of a strategy that need the least memory."""
    chunk = request.chunks[0] if request.chunks and "sequence_chunk" not in step.strategy.refusals else 0
    offloaded = request.model.num_layers if relieved(request, step.strategy, chunk=chunk) else 0
    return with_settings(step, **LEAN, offloaded_layers=offloaded, **request.in_chunks(chunk))


def relieved(request: PlanRequest, strategy: Strategy, *, chunk: int = 0) -> bool:
    """True if files can take activations, or the host's memory: not where that is what a device computes in."""
    outside = request.has_host or bool(chunk and request.settings.offload_dir)
    return "offloaded_layers" not in strategy.refusals and outside


def with_settings(step: StepSpec, **changes: Any) -> StepSpec:
    """The same step with other settings.

    Raises:
        UserError: they cannot work.
    """
    settings = replace(step.settings, **changes)
    dealt = {"shared": step.shared, "slices": step.slices, "orders": step.orders}
    return step_of(step.model, step.topology, settings, step.micro_batches, strategy=step.strategy, **dealt)


def resized(schedule: Schedule, step: StepSpec) -> Schedule:
    """A schedule with the settings of a step that has chunks of another size, on which no action depends."""
    return replace(schedule, step=replace(schedule.step, settings=step.settings))


def unplayed(request: PlanRequest, step: StepSpec) -> str:
    """Why a strategy is not looked at here, or nothing."""
    return too_large(request, played(request, step)) or _same_here(step.strategy, request)


def _same_here(strategy: Strategy, request: PlanRequest) -> str:
    """Why a strategy is no other than one before it on these machines, or nothing."""
    model, topology = request.model, request.topology
    compared = topology.world_size * len(model.blocks)
    if topology.num_nodes > 1 or strategy.divided_over(topology) > 1 or compared > MOST_COMPARED:
        return ""
    for other in strategies().values():
        if other is strategy:
            break
        if not other.candidate or not set(other.refusals) <= set(strategy.refusals):
            continue  # it is not planned itself, or cannot do all that this one can
        with suppress(UserError):  # of one that cannot run here at all
            alike = other.divided_over(topology) == 1
            if alike and _program_here(other, model, topology) == _program_here(strategy, model, topology):
                return f"the same as {other.name} on one node"
    return ""


@lru_cache(maxsize=32)
def _program_here(strategy: Strategy, model: ModelSpec, topology: Topology) -> int:
    """A hash of where units live, and of what ranks do in a step of two rounds; other settings mean the same to all."""
    settings = replace(DEFAULT, strategy=strategy.name)
    shares = shares_of(2 * topology.world_size, topology, settings, strategy)
    step = step_of(model, topology, settings, shares, strategy=strategy)
    return hash((step.homes, build(step).programs))


def plays(request: PlanRequest, step: StepSpec) -> int:
    """Micro-batches, times blocks, that a prediction plays; of all ranks of a pipeline together."""
    _, longer, _ = shortened(request, step, PLAYED_ROUNDS)
    ranks = played(request, step) if step.divided_over == 1 else 1
    return ranks * len(request.model.blocks) * max(map(len, longer.micro_batches))


def too_large(request: PlanRequest, ranks: int) -> str:
    """Why a strategy of which so many ranks would be played is not, or nothing."""
    if ranks * len(request.model.blocks) <= LARGEST_WORK:
        return ""
    return f"not simulated on {request.topology.world_size} devices with different schedules"
