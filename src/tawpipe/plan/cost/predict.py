"""A strategy's prediction: the schedule that would run, played by the clock.

Two things keep it fast for thousands of devices and many rounds. Where nodes, links and shares of the work are alike,
all ranks of many strategies run the same program at the same time, but for the names of micro-batches and peers, and so
do pipelines side by side; one is played for all (``foldable``): its collectives begin when it is there, and of the
links it sees what its whole node sends. Where a step has many rounds, a step with few is played twice, with one round
more the second time, and what the round took is added for all that are left (``Strategy.extended``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from tawpipe.plan.cost.request import PlanRequest
from tawpipe.runtime.transport.transport import needed_groups
from tawpipe.schedule.actions import Action
from tawpipe.schedule.buffers import Kind
from tawpipe.schedule.sizes.footprint import far_widths, held, held_apart, posted_ahead
from tawpipe.schedule.step import Schedule, StepSpec
from tawpipe.schedule.strategies.build import build
from tawpipe.simulate import CostModel, Timeline, play

MOST_VISITS = 20_000
"""Micro-batches of a step, times blocks, up to which a timeline has all of them."""
BETWEEN_BLOCKS, BETWEEN_CHUNKS, MOST_BETWEEN = 0.16, 0.6, 36 * 2**20
"""Shares of activations, and of what a chunk takes, that the allocator of a CPU holds besides, up to so many bytes:
blocks are not freed in the order they were made.
"""
PLAYED_STEPS = 3
"""Steps that are played: one before and one after the step that is looked at."""
PLAYED_ROUNDS = 3
"""Full rounds of a step that are played where there are more; and one more."""
LARGEST_WORK = 3_500
"""Ranks that are played, times blocks, beyond which a strategy is not played: a search should take seconds."""
MOST_UNEVEN = 6_000
"""Micro-batches, times blocks, beyond which devices that have one more or less are taken for equal ones."""


@dataclass(frozen=True)
class Needs:
    """Memory of a step, in bytes.

    Args:
        parts: of what a device holds, by name.
        host: of a node's host, for all of its devices; 0 where the host's memory is what devices compute in.
        files: of a node's disk, for all of its devices.
        absent: bytes that this device, which is the nearest to its end, has less than the one with most memory.
    """

    parts: Mapping[str, int]
    host: int
    files: int = 0
    absent: int = 0

    @property
    def device(self) -> int:
        """Bytes of a device."""
        return sum(self.parts.values())

    @property
    def wanted(self) -> int:
        """Bytes that the device with most memory must have for it."""
        return self.device + self.absent


@dataclass(frozen=True)
class Prediction:
    """Time, traffic and memory of a strategy.

    Args:
        step_seconds: of a step in the middle of training.
        exposed_communication_s, idle_s: of them, in which a device waits for transfers, and for anything.
        link_bytes: sent over the busiest node's link.
        needs: memory.
        bound_s: what computing and links alone need.
    """

    step_seconds: float
    exposed_communication_s: float
    idle_s: float
    link_bytes: int
    needs: Needs
    bound_s: float
    timeline: Timeline | None = field(default=None, repr=False, compare=False)

    @property
    def memory(self) -> Mapping[str, int]:
        """Parts of what a device holds."""
        return self.needs.parts

    @property
    def peak_bytes(self) -> int:
        return self.needs.device


def memory_of(request: PlanRequest, schedule: Schedule) -> Needs:
    """Bytes that a device and its host hold. ``system`` is what the driver, libraries and communicators take."""
    request = request.of(schedule.step)
    tokens, memory = round(request.size.tokens), request.profile.memory
    shares = request.shares(schedule.step)
    known: dict[tuple[object, ...], int] = {}
    step = schedule.step
    several = not step.keeps_alike

    def working(action: Action) -> int:
        of = action.micro_batch if several else action.micro_batch < 0
        alike = (action.op, action.block, of, len(action.reads), len(action.writes))
        if alike not in known:
            of_action = shares.get((Kind.INPUT, action.micro_batch), 1.0) if several else 1.0
            known[alike] = memory.working_of(schedule, action, round(of_action * tokens))
        return known[alike]

    said = held(
        schedule,
        request.widths,
        activation_bytes=request.activations_of(step.sequence_ranks),
        working=working,
        absent=request.absent,
        shares=shares,
    )
    settings, short = step.settings, request.absent[said.rank] if request.absent else 0
    chunk = min((settings.sequence_chunk or 0) * request.micro_batch, -(-tokens // step.sequence_ranks))
    passes = request.has_host and not settings.offload_dir
    parts = {
        "homes": said.home_bytes,
        "buffers": said.buffer_bytes,
        "activations": said.activation_bytes,
        "working": said.working_bytes + (memory.staged(schedule, chunk) if passes else 0),
        "system": request.system_bytes + request.communicator_bytes * len(needed_groups([schedule])),
    }
    devices = max(request.machine.nodes)
    sizes = request.activations_of(schedule.step.sequence_ranks)
    if request.on_cuda:
        apart = max(held_apart(schedule, rank, sizes, shares) for rank in schedule.played)
    else:
        between = said.activation_bytes * BETWEEN_BLOCKS + (said.working_bytes * BETWEEN_CHUNKS if chunk else 0)
        ahead = max(posted_ahead(schedule, rank, sizes, shares) for rank in schedule.played)
        apart = min(MOST_BETWEEN, round(between)) + ahead
    parts |= {"apart": apart} if apart or not request.on_cuda else {}
    if request.has_host:
        return Needs(parts, said.host_bytes * devices, said.file_bytes * devices, short)
    parts["saving"] = saved_bytes(request, schedule.step)
    return Needs(parts | {"host": said.host_bytes} if said.host_bytes else parts, 0, said.file_bytes * devices, short)


def link_bytes_of(timeline: Timeline) -> float:
    """Bytes that the busiest link between nodes carries in one direction in a step."""
    return max(max(node.sent, node.received) for node in timeline.node_bytes[timeline.steady_step])


def bound_of(request: PlanRequest, step: StepSpec) -> float:
    """Seconds that computing, and the links, need at least; without building a schedule."""
    strategy, topology = step.strategy, request.topology
    seconds = request.block_seconds(step)
    factor, blocks = request.costs.compute_factor, strategy.computes(step)
    works = {
        (len(share), mine, factor.get(rank, 1.0))
        for rank, (share, mine) in enumerate(zip(step.micro_batches, blocks, strict=True))
    }
    compute = max(slower * number * sum(seconds[block] for block in mine) for number, mine, slower in works)
    if topology.num_nodes == 1 or step.divided_over > 1:  # there is no formula for activations that travel
        return compute
    short, longer, left = shortened(request, step, PLAYED_ROUNDS)
    traffic = [played.strategy.traffic(played, training=True) for played in ((short, longer) if left else (short,))]
    far = far_widths(step.settings, request.widths, step=step)
    rates, amounts = request.link_rates, list[list[int]]()
    for links in traffic:
        if links is None:
            return compute
        amounts.append([max(link.bytes_sent(*far), link.bytes_received(*far)) for link in links])
    moved = [first + left * (second - first) for first, second in zip(amounts[0], amounts[-1], strict=True)]
    if topology == request.machine.topology:
        link = max(amount / rate for amount, rate in zip(moved, rates, strict=True))
    else:  # groups of one machine do not use its link between them, and units may all live in one
        link = 0.0 if step.strategy.places(topology) else min(moved) / max(rates)
    return max(compute, link)


def predict(request: PlanRequest, step: StepSpec, rounds: int = PLAYED_ROUNDS) -> Prediction:
    """Play a strategy.

    Args:
        rounds: of a step, that are played where there are more; and others as long as a step of few rounds, most of
            whose weights have come before it, makes the whole one faster than its bound.

    Raises:
        UserError: the strategy cannot run this model on these machines.
    """
    short, longer, left = shortened(request, step, rounds)
    schedule = _build(request, short)
    timeline = _play(request, schedule, step)
    more = _play(request, _build(request, longer), step) if left else timeline

    def extended(value: Callable[[Timeline], float]) -> float:
        first = value(timeline)
        return max(0.0, first + left * (value(more) - first)) if left else first

    seconds, bound = extended(lambda timeline: timeline.step_seconds), bound_of(request, step)
    if left and seconds < bound * (1 - 1e-6) and rounds < 2 * PLAYED_ROUNDS:
        return predict(request, step, rounds + 1)
    return Prediction(
        seconds,
        extended(lambda timeline: timeline.exposed_communication_s),
        extended(lambda timeline: timeline.idle_s),
        round(extended(link_bytes_of)),
        memory_of(request, schedule),
        bound,
        timeline,
    )


def timeline_of(request: PlanRequest, step: StepSpec) -> Timeline:
    """A step with all of its rounds and ranks, or with some of them if there are too many to look at."""
    if request.micro_batches * len(request.model.blocks) > MOST_VISITS:
        short, _, _ = shortened(request, step, PLAYED_ROUNDS)
        return _play(request, _build(request, short), step)
    return play(build(step), request.of(step).costs, steps=PLAYED_STEPS, physical=request.machine.topology)


def saved_bytes(request: PlanRequest, step: StepSpec) -> int:
    """Bytes of the copy of its state, weights and optimizer's, that a process holds while it is written."""
    return 0 if step.homes_in_host else state_bytes(request, step)  # those are written from where they are


def state_bytes(request: PlanRequest, step: StepSpec) -> int:
    """Bytes of the state, weights and optimizer's, that the process which has most of it saves."""
    widths, most = request.widths, defaultdict[int, float](float)
    for number, (home, unit) in enumerate(zip(step.homes, request.model.units, strict=True)):
        if unit.trainable:
            gradient = widths.master + (widths.weight if widths.weight != widths.master else 0)
            for rank in home.ranks:
                most[rank] += home.stripe * (widths.at_home(number, trainable=True) - gradient)
    return round(max(most.values(), default=0))


def memory_quickly(request: PlanRequest, step: StepSpec, *, part: bool = False) -> Needs:
    """``memory_of`` without the whole schedule.

    Args:
        part: look at rank 0 alone, for a lower bound: where devices differ, looking at all of many takes seconds. Of a
            pipeline all are looked at.
    """
    return memory_of(request, short_schedule(request, step, (0,) if part and step.divided_over == 1 else ()))


def short_schedule(request: PlanRequest, step: StepSpec, some: tuple[int, ...] = ()) -> Schedule:
    """A schedule that holds as much as the whole step's: few rounds hold as much as many, and of ranks that do alike
    one has a program.

    Args:
        some: ranks to make a program for if the ranks differ; those with the most memory in use if it is empty.
    """
    short, _, _ = shortened(request, step, step.strategy.rounds_held)
    if not request.absent and foldable(short, replace(request.costs, between_of={}, compute_factor={})):
        return _built(short, stand_ins(short))  # unequal links or speeds change nothing of what ranks hold
    return _built(short, some or (None if request.absent else short.strategy.fullest(short)))


def shortened(request: PlanRequest, step: StepSpec, rounds: int) -> tuple[StepSpec, StepSpec, float]:
    """``Strategy.extended`` of a step that can be played."""
    return (step := alike(request, step)).strategy.extended(step, rounds)


def alike(request: PlanRequest, step: StepSpec) -> StepSpec:
    """The step; or where it is too large to play all ranks, of which some have less, with as much for these."""
    shares, world = step.micro_batches, step.topology.world_size
    most, blocks = max(map(len, shares)), len(request.model.blocks)
    count = 1 + max(share[-1] for share in shares if share)
    even = min(map(len, shares)) == most
    if step.speeds or even or max(world * blocks / LARGEST_WORK, count * blocks / MOST_UNEVEN) <= 1:
        return step
    ranks = sum(map(len, shares)) // count
    """That a micro-batch goes to."""
    return replace(step, micro_batches=step.strategy.share(most * world // ranks, step.topology, step.settings))


def one_for_all(request: PlanRequest, step: StepSpec) -> bool:
    """True if one rank is played for all, or one pipeline."""
    alike = request.topology == request.machine.topology and not request.absent
    return alike and foldable(step, request.costs)


def played(request: PlanRequest, step: StepSpec) -> int:
    """Ranks that are played."""
    step = alike(request, step)
    if not one_for_all(request, step):
        return request.topology.world_size
    return len(stand_ins(step))


def _build(request: PlanRequest, step: StepSpec) -> Schedule:
    return _built(step, stand_ins(step) if one_for_all(request, step) else None)


@lru_cache(maxsize=4)
def _built(step: StepSpec, ranks: tuple[int, ...] | None) -> Schedule:
    """What was built to see whether it fits is played next, and once more with other links."""
    return build(step, ranks=ranks)


def stand_ins(step: StepSpec) -> tuple[int, ...]:
    """The ranks that stand for all of a step that is foldable."""
    return step.strategy.stand_ins(step.topology, inside_is_even=True)


def _play(request: PlanRequest, schedule: Schedule, whole: StepSpec) -> Timeline:
    """Play a schedule that stands for a whole step."""
    physical = None if len(schedule.played) < schedule.topology.world_size else request.machine.topology
    costs = replace(request.of(schedule.step).costs, summands=whole.summands)
    return play(schedule, costs, steps=PLAYED_STEPS, physical=physical)


def foldable(step: StepSpec, cost_model: CostModel | None = None) -> bool:
    """True if one rank, or one pipeline, can stand for all; without a cost model, as far as the schedule goes."""
    even = cost_model is None or cost_model.inside.shared or cost_model.inside.full_duplex
    shares = {len(share) for share in step.micro_batches}
    if not step.topology.is_even or len(shares) > 1:
        return False
    if not step.strategy.stand_ins(step.topology, inside_is_even=even):
        return False
    if cost_model is None:
        return True
    one_size = set(cost_model.sizes.values()) <= {cost_model.size}
    return one_size and not cost_model.between_of and not cost_model.compute_factor
