"""Prediction of time, traffic and memory of a step: the schedule that would run is simulated with measured costs.

Two shortcuts keep this fast for thousands of devices and many rounds.

If nodes, links and shares of work are equal, all ranks of many strategies run the same program at the same time, except
for the names of micro-batches and peers. The same holds for pipelines side by side. Then one rank (or pipeline) is
simulated for all (``foldable``). Its collectives begin when it arrives, and its link carries what its whole node sends.

If a step has many rounds, a step with few rounds is simulated, then one with one more round. The difference is added
for every round that remains (``Strategy.extended``)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from tawpipe.plan.cost.request import PlanRequest
from tawpipe.runtime.transport.exact import coding_bytes
from tawpipe.runtime.transport.transport import needed_groups
from tawpipe.schedule.actions import Action
from tawpipe.schedule.buffers import Kind
from tawpipe.schedule.sizes.footprint import early_receive_bytes, far_widths, held, held_apart
from tawpipe.schedule.step import Schedule, StepSpec
from tawpipe.schedule.strategies.build import build
from tawpipe.simulate import CostModel, Timeline, play

MOST_VISITS = 20_000
"""Micro-batches of a step, times blocks, up to which a timeline contains all of them."""
BETWEEN_BLOCKS, BETWEEN_CHUNKS, MOST_BETWEEN = 0.16, 0.6, 36 * 2**20
"""Shares of the bytes of activations (``BETWEEN_BLOCKS``), and of working memory with chunks (``BETWEEN_CHUNKS``), that
a CPU's allocator holds in addition, together at most ``MOST_BETWEEN`` bytes. Blocks are not freed in the order in which
they were allocated."""
PLAYED_STEPS = 3
"""Steps that are simulated: the one that is measured, one before it and one after it."""
PLAYED_ROUNDS = 3
"""Full rounds that are simulated of a step with more rounds; a second simulation has one round more."""
LARGEST_WORK = 3_500
"""Simulated ranks, times blocks, beyond which a strategy is not simulated: a search should take seconds."""
MOST_UNEVEN = 6_000
"""Micro-batches, times blocks, beyond which all devices are simulated with equally many micro-batches."""


@dataclass(frozen=True)
class Needs:
    """Memory that a step needs, in bytes.

    Args:
        parts: device memory by name of its use.
        host: memory of a node's host, for all of its devices; 0 if devices compute in the host's memory.
        files: disk space of a node, for all of its devices.
        absent: bytes that this device has less than the device with most memory. It is the device that is fullest
            relative to its own memory.
    """

    parts: Mapping[str, int]
    host: int
    files: int = 0
    absent: int = 0

    @property
    def device(self) -> int:
        """Bytes of device memory, all parts together."""
        return sum(self.parts.values())

    @property
    def wanted(self) -> int:
        """Bytes that the device with most memory must have, so that the step fits on every device."""
        return self.device + self.absent


@dataclass(frozen=True)
class Prediction:
    """Predicted time, traffic and memory of a step.

    Args:
        step_seconds: seconds of a step in the middle of training.
        exposed_communication_s: seconds of the step during which a device waits for transfers.
        idle_s: seconds of the step during which a device waits for anything.
        link_bytes: bytes sent or received over the busiest node's link, whichever is more.
        needs: memory.
        bound_s: lower bound on the seconds, by computing and links alone.
        timeline: the simulated step; None if it was not simulated.
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
        """Device memory in bytes, by name of its use."""
        return self.needs.parts

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of a device."""
        return self.needs.device


def memory_of(request: PlanRequest, schedule: Schedule) -> Needs:
    """Return the memory of a step: on the device that is fullest, and on a node's host and disk.

    ``schedule`` may be one that is short but needs equal memory. The part ``system`` contains driver, libraries and
    communicators."""
    request = request.of(schedule.step)
    tokens, memory = round(request.size.tokens), request.profile.memory
    shares = request.shares(schedule.step)
    known: dict[tuple[object, ...], int] = {}
    step = schedule.step
    several = not step.keeps_alike

    def working(action: Action) -> int:
        """Return the most temporary memory of an action while it computes, in bytes; cached."""
        of = action.micro_batch if several else action.micro_batch < 0
        alike = (action.op, action.block, of, len(action.reads), len(action.writes))
        if alike not in known:
            of_action = shares.get((Kind.INPUT, action.micro_batch), 1.0) if several else 1.0
            known[alike] = memory.working_of(schedule, action, round(of_action * tokens))
        return known[alike]

    footprint = held(
        schedule,
        request.widths,
        activation_bytes=request.activations_of(step.sequence_ranks),
        working=working,
        absent=request.absent,
        shares=shares,
    )
    settings, short = step.settings, request.absent[footprint.rank] if request.absent else 0
    chunk = min((settings.sequence_chunk or 0) * request.micro_batch, -(-tokens // step.sequence_ranks))
    passes = request.has_host and not settings.offload_dir
    parts = {
        "homes": footprint.home_bytes,
        "buffers": footprint.buffer_bytes,
        "activations": footprint.activation_bytes,
        "working": footprint.working_bytes + (memory.staged(schedule, chunk) if passes else 0),
        "system": request.system_bytes + request.communicator_bytes * len(needed_groups([schedule])),
    }
    devices = max(request.machine.nodes)
    sizes = request.activations_of(schedule.step.sequence_ranks)
    if request.on_cuda:
        apart = max(held_apart(schedule, rank, sizes, shares) for rank in schedule.played)
        if step.refreshes:
            units = zip(step.homes, step.model.units, strict=True)
            apart += coding_bytes(max(home.shard_size for home, unit in units if unit.trainable))
    else:
        between = footprint.activation_bytes * BETWEEN_BLOCKS + (
            footprint.working_bytes * BETWEEN_CHUNKS if chunk else 0
        )
        early_bytes = max(early_receive_bytes(schedule, rank, sizes, shares) for rank in schedule.played)
        apart = min(MOST_BETWEEN, round(between)) + early_bytes
    parts |= {"apart": apart} if apart or not request.on_cuda else {}
    if request.has_host:
        return Needs(parts, footprint.host_bytes * devices, footprint.file_bytes * devices, short)
    parts["saving"] = saved_bytes(request, schedule.step)
    return Needs(
        parts | {"host": footprint.host_bytes} if footprint.host_bytes else parts,
        0,
        footprint.file_bytes * devices,
        short,
    )


def link_bytes_of(timeline: Timeline) -> float:
    """Return the bytes that the busiest link between nodes carries in one direction in a step."""
    return max(max(node.sent, node.received) for node in timeline.node_bytes[timeline.steady_step])


def bound_of(request: PlanRequest, step: StepSpec) -> float:
    """Return a lower bound on the seconds of a step: the longer of computing alone and links alone.

    No schedule is built. Links count only with several nodes, and not for strategies without a formula for their
    traffic, such as pipelines."""
    strategy, topology = step.strategy, request.topology
    seconds = request.block_seconds(step)
    factor, blocks = request.costs.compute_factor, strategy.computes(step)
    works = {
        (len(share), rank_blocks, factor.get(rank, 1.0))
        for rank, (share, rank_blocks) in enumerate(zip(step.micro_batches, blocks, strict=True))
    }
    compute = max(
        slower * number * sum(seconds[block] for block in rank_blocks) for number, rank_blocks, slower in works
    )
    if topology.num_nodes == 1 or step.divided_over > 1:  # pipelines have no formula for their traffic
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
    else:  # several schedule nodes share a machine, so traffic between them uses no link
        link = 0.0 if step.strategy.places(topology) else min(moved) / max(rates)
    return max(compute, link)


def predict(request: PlanRequest, step: StepSpec, rounds: int = PLAYED_ROUNDS) -> Prediction:
    """Simulate a step and return its predicted time, traffic and memory.

    Long steps are not simulated as a whole: two shorter ones are, from which times are extrapolated.

    Args:
        request: model, data and machines.
        step: the step.
        rounds: rounds that are simulated of a step with more rounds. The simulation is repeated with one round more
            while the extrapolated time is below the bound. This happens if most weights of a short step arrived before
            it.

    Raises:
        UserError: the strategy cannot run this model on these machines.
    """
    short, longer, left = shortened(request, step, rounds)
    schedule = _build(request, short)
    timeline = _play(request, schedule, step)
    more = _play(request, _build(request, longer), step) if left else timeline

    def extended(value: Callable[[Timeline], float]) -> float:
        """Return ``value`` of the whole step, extrapolated from the short and the longer simulation."""
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
    """Simulate a step and return its timeline with all rounds and ranks, or with some of them if there are too many."""
    if request.micro_batches * len(request.model.blocks) > MOST_VISITS:
        short, _, _ = shortened(request, step, PLAYED_ROUNDS)
        return _play(request, _build(request, short), step)
    return play(build(step), request.of(step).costs, steps=PLAYED_STEPS, physical=request.machine.topology)


def saved_bytes(request: PlanRequest, step: StepSpec) -> int:
    """Return the bytes of the copy of weights and optimizer state that a process holds while it writes a checkpoint.

    0 if homes are in host memory, from which they are written without a copy."""
    return 0 if step.homes_in_host else state_bytes(request, step)  # written without a copy


def state_bytes(request: PlanRequest, step: StepSpec) -> int:
    """Return the bytes of weights and optimizer state that the process which saves most writes into a checkpoint.

    Only trained units count, and of copies only the first."""
    widths, most = request.widths, defaultdict[int, float](float)
    for number, (home, unit) in enumerate(zip(step.homes, request.model.units, strict=True)):
        if unit.trainable:
            gradient = widths.master + (widths.weight if widths.weight != widths.master else 0)
            for rank in home.ranks:
                most[rank] += home.shard_size * (widths.at_home(number, trainable=True) - gradient)
    return round(max(most.values(), default=0))


def memory_quickly(request: PlanRequest, step: StepSpec, *, part: bool = False) -> Needs:
    """Return the memory of a step (``memory_of``) from a schedule with fewer rounds and ranks.

    Args:
        request: model, data and machines.
        step: the step.
        part: True to check rank 0 only, for a lower bound. This saves seconds where many devices differ. All ranks of a
            pipeline are checked in any case.
    """
    return memory_of(request, short_schedule(request, step, (0,) if part and step.divided_over == 1 else ()))


def short_schedule(request: PlanRequest, step: StepSpec, some: tuple[int, ...] = ()) -> Schedule:
    """Return a schedule that needs the same memory as the whole step: fewer rounds, and one rank for all equal ones.

    Args:
        some: ranks whose programs are made if ranks differ; by default those that may need the most memory.
    """
    short, _, _ = shortened(request, step, step.strategy.rounds_held)
    if not request.absent and foldable(short, replace(request.costs, between_of={}, compute_factor={})):
        return _built(short, stand_ins(short))  # unequal links or speeds do not change memory
    return _built(short, some or (None if request.absent else short.strategy.fullest(short)))


def shortened(request: PlanRequest, step: StepSpec, rounds: int) -> tuple[StepSpec, StepSpec, float]:
    """Return a short step, a longer step and a factor, from which ``step`` can be extrapolated.

    The short step has about ``rounds`` rounds. See ``Strategy.extended``."""
    return (step := alike(request, step)).strategy.extended(step, rounds)


def alike(request: PlanRequest, step: StepSpec) -> StepSpec:
    """Return the step; if it is too large to simulate all ranks, with equally many micro-batches on every rank.

    Ranks that have fewer micro-batches get as many as the others."""
    shares, world = step.micro_batches, step.topology.world_size
    most, blocks = max(map(len, shares)), len(request.model.blocks)
    count = 1 + max(share[-1] for share in shares if share)
    even = min(map(len, shares)) == most
    if step.speeds or even or max(world * blocks / LARGEST_WORK, count * blocks / MOST_UNEVEN) <= 1:
        return step
    ranks = sum(map(len, shares)) // count
    """Ranks that compute each micro-batch."""
    return replace(step, micro_batches=step.strategy.share(most * world // ranks, step.topology, step.settings))


def one_for_all(request: PlanRequest, step: StepSpec) -> bool:
    """Return True if one rank (or one pipeline) can be simulated in place of all.

    That requires equal nodes, links, speeds and memory."""
    alike = request.topology == request.machine.topology and not request.absent
    return alike and foldable(step, request.costs)


def played(request: PlanRequest, step: StepSpec) -> int:
    """Return the number of ranks that are simulated."""
    step = alike(request, step)
    if not one_for_all(request, step):
        return request.topology.world_size
    return len(stand_ins(step))


def _build(request: PlanRequest, step: StepSpec) -> Schedule:
    """Build the schedule of a step, with programs for the simulated ranks only."""
    return _built(step, stand_ins(step) if one_for_all(request, step) else None)


@lru_cache(maxsize=4)
def _built(step: StepSpec, ranks: tuple[int, ...] | None) -> Schedule:
    """Build a schedule with programs for ``ranks`` (None for all); the last four results are cached.

    A schedule that was built to check its memory is simulated next, and again with other links."""
    return build(step, ranks=ranks)


def stand_ins(step: StepSpec) -> tuple[int, ...]:
    """Return the ranks that are simulated in place of all ranks, for a step for which ``foldable`` is True."""
    return step.strategy.stand_ins(step.topology, inside_is_even=True)


def _play(request: PlanRequest, schedule: Schedule, whole: StepSpec) -> Timeline:
    """Simulate a schedule, which may be a short one, with the costs of the step ``whole``."""
    physical = None if len(schedule.played) < schedule.topology.world_size else request.machine.topology
    costs = replace(request.of(schedule.step).costs, summands=whole.summands)
    return play(schedule, costs, steps=PLAYED_STEPS, physical=physical)


def foldable(step: StepSpec, cost_model: CostModel | None = None) -> bool:
    """Return True if one rank (or one pipeline) does the same as all others, and can represent them.

    Args:
        step: the step.
        cost_model: if given, its links, speeds and sizes of micro-batches must be equal, too.
    """
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
