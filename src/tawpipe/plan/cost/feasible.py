"""Checks whether a step fits in the memory of the machines, and whether it is small enough to be simulated."""

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
"""Micro-batches, times blocks, of the simulated ranks and rounds, beyond which settings are not simulated: a search
should take seconds."""
QUICK_PLAYED = 2_000
"""Micro-batches, times blocks, of the simulated ranks and rounds, up to which a strategy is simulated even if its lower
bound is behind the best step."""
LEAN = {"micro_batches_per_visit": 1, "look_ahead": 1, "gradient_buffers": 1}
"""Values of settings that need the least memory, besides offloading and recomputing."""
MOST_COMPARED = 2_000
"""Ranks of a node, times blocks, up to which strategies are compared to find those that do the same on one node."""
DEVICE, HOST, FILES = MEMORY = "device memory", "host memory", "disk"


def fits(request: PlanRequest, needs: Needs) -> bool:
    """Return True if every device, host and disk has enough memory for ``needs``; unknown sizes count as enough."""
    return not lacking(request, needs)


def holds(request: PlanRequest, step: StepSpec, *what: str) -> bool:
    """Return True if a step has enough memory on every device, host and disk.

    Rank 0 is checked first, because that is quick.

    Args:
        request: the request.
        step: the step.
        what: kinds of memory to check, from ``MEMORY``; all by default.
    """
    parts = (True, False) if step.divided_over == 1 else (False,)
    needed = (memory_quickly(request, step, part=part) for part in parts)
    return not any({*lacking(request, needs)} & {*(what or MEMORY)} for needs in needed)


def lacking(request: PlanRequest, needs: Needs) -> list[str]:
    """Return the kinds of memory that are too small for ``needs``: any of ``DEVICE``, ``HOST`` and ``FILES``.

    Empty if all suffice. A memory of unknown size suffices."""
    machine = request.machine
    limits = {
        DEVICE: (request.memory_bytes, needs.wanted),
        HOST: (machine.host_bytes, needs.host),
        FILES: (machine.files_bytes, needs.files),
    }
    return [name for name, (most, needed) in limits.items() if most and needed > most]


def whole_rows_fit(request: PlanRequest) -> bool:
    """Return True if some strategy can train on whole rows with the leanest settings and no offloading.

    Only strategies that support chunks and that plans consider are checked. Building the schedules of the other
    strategies takes minutes on many devices."""
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
    """Return True if some strategy fits in memory with its leanest settings, at any value of ``host_homes``.

    False if ``over`` ends the search before. Pipelines whose orders must be made are skipped.

    Args:
        request: the request.
        over: returns True when no further strategy may be checked. On many devices each check takes a second.
    """
    return any(_some_strategy_fits(request.with_homes(level), over) for level in request.levels)


def _some_strategy_fits(request: PlanRequest, over: Callable[[], bool]) -> bool:
    """Return True if some strategy fits with its leanest settings, at the request's ``host_homes``.

    These settings are tried with all layers offloaded and with none. False if ``over`` ends the search before."""
    for strategy in strategies().values():
        if over():
            break
        if not strategy.candidate:
            continue
        for ranks in (request.settings.sequence_ranks, *request.cp_group_sizes[-1:]):
            asked = request if ranks is None or "sequence_ranks" in strategy.refusals else request.with_ranks(ranks)
            for way in strategy.layouts(request.topology):
                with suppress(UserError):
                    if way.effort(asked.model, asked.topology, asked.micro_batches_of(way)):
                        continue  # making its orders would take too long for this check
                    least = leanest(asked, asked.step(replace(asked.settings, strategy=strategy.name), way))
                    here = {least, with_settings(least, offloaded_layers=0)}
                    if not unplayed(asked, least) and any(holds(asked, step) for step in here):
                        return True
    return False


def shortage(request: PlanRequest, needs: Needs) -> str:
    """Return a phrase with needed and available memory for every kind that is too small; ``""`` if none is."""
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
    """Return a number of bytes as text in GiB.

    >>> gib(3 * 2**30), gib(5 * 2**20)
    ('3.00', '0.005')
    """
    return f"{size / 2**30:.2f}" if size >= 2**30 / 10 else f"{size / 2**30:.3f}"


def leanest(request: PlanRequest, step: StepSpec) -> StepSpec:
    """Return the step with the settings of its strategy that need the least memory.

    These are the smallest chunks, all layers offloaded, and ``LEAN``, as far as the strategy supports them."""
    chunk = request.chunks[0] if request.chunks and "sequence_chunk" not in step.strategy.refusals else 0
    offloaded = request.model.num_layers if relieved(request, step.strategy, chunk=chunk) else 0
    return with_settings(step, **LEAN, offloaded_layers=offloaded, **request.in_chunks(chunk))


def relieved(request: PlanRequest, strategy: Strategy, *, chunk: int = 0) -> bool:
    """Return True if activations can be offloaded under ``strategy``, to host memory or to files.

    Host memory helps only if it is separate from the device's. Files need chunks.

    Args:
        request: the request.
        strategy: the strategy.
        chunk: tokens of a chunk; 0 for whole rows.
    """
    outside = request.has_host or bool(chunk and request.settings.offload_dir)
    return "offloaded_layers" not in strategy.refusals and outside


def with_settings(step: StepSpec, **changes: Any) -> StepSpec:
    """Return the step with the given settings changed, and checked again.

    Raises:
        UserError: the settings cannot work.
    """
    settings = replace(step.settings, **changes)
    dealt = {"shared": step.shared, "slices": step.slices, "orders": step.orders}
    return step_of(step.model, step.topology, settings, step.micro_batches, strategy=step.strategy, **dealt)


def resized(schedule: Schedule, step: StepSpec) -> Schedule:
    """Return the schedule with the settings of ``step``, which may differ in chunk size only.

    No action of a schedule depends on the chunk size."""
    return replace(schedule, step=replace(schedule.step, settings=step.settings))


def unplayed(request: PlanRequest, step: StepSpec) -> str:
    """Return the reason why a strategy is not evaluated on these machines, or ``""``.

    Either too many different ranks would be simulated, or an earlier strategy does exactly the same (``_same_here``).
    """
    return too_large(request, played(request, step)) or _same_here(step.strategy, request)


def _same_here(strategy: Strategy, request: PlanRequest) -> str:
    """Return a phrase that names an earlier strategy with exactly the same program here, or ``""``.

    The phrase is "the same as NAME on one node". ``""`` is returned on several nodes, for pipelines, if too much would
    be compared, and if the earlier strategy supports fewer settings."""
    model, topology = request.model, request.topology
    compared = topology.world_size * len(model.blocks)
    if topology.num_nodes > 1 or strategy.divided_over(topology) > 1 or compared > MOST_COMPARED:
        return ""
    for other in strategies().values():
        if other is strategy:
            break
        if not other.candidate or not set(other.refusals) <= set(strategy.refusals):
            continue  # plans do not consider it, or it supports fewer settings
        with suppress(UserError):  # the other strategy cannot run here
            alike = other.divided_over(topology) == 1
            if alike and _program_here(other, model, topology) == _program_here(strategy, model, topology):
                return f"the same as {other.name} on one node"
    return ""


@lru_cache(maxsize=32)
def _program_here(strategy: Strategy, model: ModelSpec, topology: Topology) -> int:
    """Return a hash of all homes and actions of a step of two rounds, with default settings on ``topology``; cached.

    Strategies with equal hashes do the same on this topology. Other settings affect them equally."""
    settings = replace(DEFAULT, strategy=strategy.name)
    shares = shares_of(2 * topology.world_size, topology, settings, strategy)
    step = step_of(model, topology, settings, shares, strategy=strategy)
    return hash((step.homes, build(step).programs))


def plays(request: PlanRequest, step: StepSpec) -> int:
    """Return the work of predicting a step: simulated micro-batches times blocks.

    Of simulated ranks each counts, but a whole pipeline counts as one rank."""
    _, longer, _ = shortened(request, step, PLAYED_ROUNDS)
    ranks = played(request, step) if step.divided_over == 1 else 1
    return ranks * len(request.model.blocks) * max(map(len, longer.micro_batches))


def too_large(request: PlanRequest, ranks: int) -> str:
    """Return the reason why a strategy is not simulated that needs ``ranks`` simulated ranks; ``""`` for few.

    The limit is on ranks times blocks (``LARGEST_WORK``)."""
    if ranks * len(request.model.blocks) <= LARGEST_WORK:
        return ""
    return f"not simulated on {request.topology.world_size} devices with different schedules"
