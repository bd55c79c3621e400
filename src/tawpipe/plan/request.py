"""What a plan is asked for, and what is predicted of one strategy. Imports topology, schedule, simulate, costs, plan.

A prediction plays the same schedule that would run. Two things keep it fast for thousands of devices and many rounds:
where all ranks do alike, one is played for all (``simulate.fold``); where a step has many rounds, a step with few is
played twice, with one round more the second time, and what the round took is added for all that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from tawpipe.errors import UserError
from tawpipe.plan.machine import Machine
from tawpipe.plan.profile import Profile
from tawpipe.schedule.build import build_training, place_units
from tawpipe.schedule.footprint import Costs, Widths, costs
from tawpipe.schedule.routes.pipelines import Shape, build_pipeline
from tawpipe.schedule.spec import Knobs, ModelSpec, Schedule, share_micro_batches, wire_width
from tawpipe.schedule.traffic import link_elements_formula
from tawpipe.simulate import CostModel, MicroBatchSize, Timeline, play
from tawpipe.simulate.fold import build_folded, foldable
from tawpipe.topology import Topology

MOST_SEQUENCES = 1_000_000
"""In a step, that a plan is made for."""
MOST_VISITS = 20_000
"""Micro-batches of a step, times blocks, up to which a timeline has all of them."""
PLAYED_STEPS = 3
"""One before and one after the step that is looked at."""
PLAYED_ROUNDS = 3
"""Full rounds of a step that are played where there are more; and one more."""


@dataclass(frozen=True)
class Question:
    """A model, its data and the machines.

    Args:
        model: sizes of blocks and units.
        global_batch: sequences in a step.
        micro_batch: sequences computed at one time.
        size: work of one micro-batch.
        widths: of numbers at home and on their way.
        memory_bytes: that a device may use; 0 for no limit.
        flops: that the model needs for a step, as MFU counts; 0 if unknown.
        peak_flops: of a device; None if unknown.
        clip: whether updates wait for the norm of all gradients.
    """

    model: ModelSpec
    profile: Profile
    machine: Machine
    global_batch: int
    micro_batch: int
    sequence_length: int
    size: MicroBatchSize
    widths: Widths
    memory_bytes: int = 0
    flops: float = 0.0
    peak_flops: float | None = None
    clip: bool = True

    def __post_init__(self) -> None:
        for name in ("global_batch", "micro_batch"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 < value <= MOST_SEQUENCES:
                raise UserError(f"--{name.replace('_', '-')}", value, f"a whole number from 1 to {MOST_SEQUENCES}")

    @property
    def micro_batches(self) -> int:
        return -(-self.global_batch // self.micro_batch)

    @cached_property
    def topology(self) -> Topology:
        """What schedules take for nodes."""
        return self.machine.topology.evened()

    @cached_property
    def costs(self) -> CostModel:
        """What the clock needs."""
        machine, profile = self.machine, self.profile
        return CostModel(
            profile.blocks,
            machine.between,
            machine.inside,
            dict(machine.between_of),
            weight_bytes=self.widths.weight,
            gradient_bytes=self.widths.gradient,
            update_s=profile.update_s,
            size=self.size,
            reduce_scatter="ring",
            host=machine.host,
            boundary_bytes=profile.boundary,
        )

    def knobs(self, **chosen) -> Knobs:
        """The knobs of a strategy for this batch."""
        shares = share_micro_batches(self.micro_batches, self.topology.world_size)
        return Knobs(micro_batches=shares, early_updates=not self.clip, **chosen)

    def compute_s(self, knobs: Knobs) -> float:
        """Seconds in which a device computes one micro-batch, forward and backward."""
        costs, found = self.costs, 0.0
        for b, block in enumerate(self.model.blocks):
            found += costs.forward_s(0, b, 0) * (block.kind != "head")
            found += costs.backward_s(0, b, 0, knobs.recomputes(b)) * block.needs_backward
        return found

    @property
    def activation_bytes(self) -> Mapping[str, int]:
        """Of one activation of every kind."""
        tokens = round(self.size.tokens)
        boundary = self.profile.boundary * tokens
        kept = {kind: each * tokens for kind, each in self.profile.kept.items()}
        return {"x": boundary, "dx": boundary, "slot": boundary, "host": boundary} | kept


@dataclass(frozen=True)
class Prediction:
    """Of one strategy.

    Args:
        step_seconds: of a step in the middle of training.
        exposed_communication_s, idle_s: of them, in which a device waits for transfers, and for anything.
        link_bytes: sent over the busiest node's link.
        memory: parts of what a device holds, in bytes, by name.
        bound_s: what computing and links alone need.
    """

    step_seconds: float
    exposed_communication_s: float
    idle_s: float
    link_bytes: int
    memory: Mapping[str, int]
    bound_s: float
    timeline: Timeline | None = field(default=None, repr=False, compare=False)

    @property
    def peak_bytes(self) -> int:
        return sum(self.memory.values())


def memory_of(question: Question, schedule: Schedule) -> dict[str, int]:
    """What a device holds, by parts."""
    said: Costs = costs(schedule, question.widths, activation_bytes=question.activation_bytes)
    working = question.profile.working * round(question.size.tokens) + question.profile.fixed_working
    return {
        "homes": said.home_bytes,
        "buffers": said.buffer_bytes,
        "activations": said.activation_bytes,
        "working": working,
    }


def link_bytes_of(timeline: Timeline) -> float:
    """Bytes that the busiest link between nodes carries in one direction in a step."""
    return max(max(node.sent, node.received) for node in timeline.node_bytes[timeline.steady_step])


def bound_of(question: Question, knobs: Knobs) -> float:
    """Seconds that computing, and the links, need at least; without building a schedule."""
    most, compute = max(len(own) for own in knobs.micro_batches), question.compute_s(knobs)
    topology = question.topology
    if topology.num_nodes == 1:
        return most * compute
    homes = place_units(question.model, topology, knobs.placement, knobs.homes)
    empty = ((),) * topology.world_size
    frame = Schedule("frame", topology, question.model, knobs, homes, empty, empty)
    far = (
        wire_width(knobs.weights_wire, question.widths.weight),
        wire_width(knobs.gradients_wire, question.widths.gradient),
    )
    links = [question.costs.node_link(node) for node in range(len(question.machine.nodes))]
    rates = [one.bytes_per_s * (1 if one.shared else topology.local_size) for one in links]
    moved = [max(one.bytes_sent(*far), one.bytes_received(*far)) for one in link_elements_formula(frame)]
    if topology == question.machine.topology:
        link = max(amount / rate for amount, rate in zip(moved, rates, strict=True))
    else:  # groups of one machine do not use its link between them
        link = 0.0 if knobs.placement in ("striped", "whole") else min(moved) / max(rates)
    return max(most * compute, link)


def predict(question: Question, knobs: Knobs) -> Prediction:
    """Play a strategy.

    Raises:
        UserError: the strategy cannot run this model on these machines.
    """
    short, longer, left = _rounds(question, knobs)
    schedule = _build(question, short)
    made = _play(question, schedule)
    more = _play(question, _build(question, longer)) if left else made
    return _predicted(made, more, left, memory_of(question, schedule), bound_of(question, knobs))


def predict_pipeline(question: Question, kind: str, axis: str) -> Prediction:
    """Play an activation pipeline, see ``schedule.pipelines``.

    Raises:
        UserError: it cannot be built for this model, batch and machines.
    """
    topology = question.topology
    size = Shape(topology, axis, 1, False).size
    replicas = topology.world_size // size
    each = -(-question.micro_batches // replicas)

    def built(count: int) -> Schedule:
        knobs = Knobs("pipeline", share_micro_batches(count * replicas, topology.world_size))
        return build_pipeline(kind, question.model, topology, knobs, axis=axis)

    few = 3 * size
    schedule = built(min(each, few))
    made = _play(question, schedule)
    more, left = made, 0.0
    if each > few:
        more, left = _play(question, built(few + size)), (each - few) / size
    most = question.micro_batches / topology.world_size * question.compute_s(Knobs("pipeline", ()))
    return replace(_predicted(made, more, left, memory_of(question, schedule), most), timeline=None)


def timeline_of(question: Question, knobs: Knobs) -> Timeline:
    """A step with all of its rounds and ranks, or with some of them if there are too many to look at."""
    visits = question.micro_batches * len(question.model.blocks)
    if visits > MOST_VISITS:
        short, _, _ = _rounds(question, knobs)
        return _play(question, _build(question, short))
    return play(
        build_training(question.model, question.topology, knobs),
        question.costs,
        steps=PLAYED_STEPS,
        physical=question.machine.topology,
    )


def _predicted(made: Timeline, more: Timeline, left: float, memory: Mapping[str, int], bound: float) -> Prediction:
    """From a play, and one with some more, which comes ``left`` times on top."""

    def extended(value: Callable[[Timeline], float]) -> float:
        first = value(made)
        return max(0.0, first + left * (value(more) - first)) if left else first

    return Prediction(
        extended(lambda one: one.step_seconds),
        extended(lambda one: one.exposed_communication_s),
        extended(lambda one: one.idle_s),
        round(extended(link_bytes_of)),
        memory,
        bound,
        made,
    )


def memory_quickly(question: Question, knobs: Knobs) -> dict[str, int]:
    """``memory_of`` without the whole schedule: two rounds hold as much as many."""
    short, _, _ = _rounds(question, knobs, played=2)
    return memory_of(question, _build(question, short))


def _rounds(question: Question, knobs: Knobs, played: int = PLAYED_ROUNDS) -> tuple[Knobs, Knobs, int]:
    """Knobs with few rounds, with one more, and how many rounds are left then to the real number."""
    shares, k = knobs.micro_batches, knobs.micro_batches_per_visit
    left = knobs.rounds - played - 1
    if left < 1 or len({len(own) for own in shares}) > 1:
        return knobs, knobs, 0

    def cut(rounds: int) -> Knobs:
        each = len(shares[0]) - k * (knobs.rounds - rounds)
        return replace(knobs, micro_batches=share_micro_batches(each * len(shares), len(shares)))

    return cut(played), cut(played + 1), left + 1


def _build(question: Question, knobs: Knobs) -> Schedule:
    alike = question.topology == question.machine.topology and foldable(question.topology, knobs, question.costs)
    return (build_folded if alike else build_training)(question.model, question.topology, knobs)


def _play(question: Question, schedule: Schedule) -> Timeline:
    physical = None if len(schedule.played) < schedule.topology.world_size else question.machine.topology
    return play(schedule, question.costs, steps=PLAYED_STEPS, physical=physical)
