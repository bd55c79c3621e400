"""The request for a plan: a model as sizes, its data, the machines, and how long things take on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from tawpipe.errors import UserError
from tawpipe.plan.machine import Machine
from tawpipe.plan.profile import Profile
from tawpipe.schedule.buffers import Kind
from tawpipe.schedule.footprint import Widths
from tawpipe.schedule.sets import share_in_sets
from tawpipe.schedule.settings import DEFAULT, ScheduleSettings
from tawpipe.schedule.spec import ModelSpec
from tawpipe.schedule.step import StepSpec, Strategy
from tawpipe.schedule.strategies import step_of
from tawpipe.simulate import CostModel, MicroBatchSize
from tawpipe.topology import Topology

MOST_SEQUENCES = 1_000_000
"""In a step, that a plan is made for."""
MOST_TOKENS = 1 << 24
"""In a row, where the longest that fits is looked for."""


@dataclass(frozen=True)
class PlanRequest:
    """A model, its data and the machines.

    Args:
        model: sizes of blocks and units.
        global_batch: sequences in a step.
        micro_batch: sequences computed at one time.
        size: work of one micro-batch.
        widths: of numbers at home and on their way.
        memory_bytes: that a device may use; 0 for no limit.
        system_bytes: of a device that the driver and libraries take for themselves; on a CPU the process that has
            loaded them.
        communicator_bytes: of a device that each of its process groups takes.
        flops: that the model needs for a step, as MFU counts; 0 if unknown.
        peak_flops: of a device; None if unknown.
        settings: what a plan takes as given: see ``schedule.settings.UNPLANNED``.
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
    settings: ScheduleSettings = DEFAULT
    system_bytes: int = 0
    communicator_bytes: int = 0

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
        """The nodes as schedules see them."""
        return self.machine.topology.evened()

    @cached_property
    def costs(self) -> CostModel:
        """The cost model of the clock."""
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
            boundary_bytes=profile.memory.boundary,
            key_elements=round(profile.memory.keys) // self.widths.weight,
            kept_bytes=profile.memory.kept.get("kept", 0.0),
        )

    @property
    def link_rates(self) -> list[float]:
        """Bytes per second of every machine's link to the others, in one direction."""
        machines = range(len(self.machine.nodes))
        return [self.costs.node_link(one).node_rate(self.topology.local_size) for one in machines]

    def with_micro_batch(self, sequences: int) -> PlanRequest:
        """The same batch, computed in micro-batches of so many rows."""
        share = sequences / self.micro_batch
        size = MicroBatchSize(round(self.size.tokens * share), round(self.size.pairs * share))
        return replace(self, micro_batch=sequences, size=size)

    def with_length(self, length: int) -> PlanRequest:
        """As many rows of another length: a document that fills its row still does, shorter ones stay as they are."""
        share = length / self.sequence_length
        fills = self.size.pairs * self.micro_batch >= self.size.tokens**2
        pairs = self.size.pairs * share * (share if fills else 1)
        return replace(
            self, sequence_length=length, size=MicroBatchSize(length * self.micro_batch, round(pairs)), flops=0.0
        )

    def step(self, settings: ScheduleSettings, strategy: Strategy | None = None) -> StepSpec:
        """A step of this batch.

        Args:
            strategy: in place of the one that the settings name.

        Raises:
            UserError: the settings cannot work for this model on these machines.
        """
        shares = share_in_sets(self.micro_batches, self.topology, settings)
        return step_of(self.model, self.topology, settings, shares, strategy=strategy)

    def compute_s(self, step: StepSpec) -> float:
        """Seconds in which a device computes its share of one micro-batch, forward and backward."""
        costs, seconds = self.costs.in_sets(step.settings.sequence_ranks), 0.0
        for b, block in enumerate(self.model.blocks):
            seconds += costs.forward_s(0, b, 0) * (block.kind != "head")
            seconds += costs.backward_s(0, b, 0, step.recomputes(b)) * block.needs_backward
        return seconds

    @property
    def activation_bytes(self) -> Mapping[Kind, int]:
        """Bytes of one activation of every kind, where no rows are computed together."""
        return self.activations_of(1)

    def activations_of(self, ranks: int) -> Mapping[Kind, int]:
        """The same on each of so many ranks that compute a micro-batch together."""
        chunk, tokens = self.settings.sequence_chunk * self.micro_batch, round(self.size.tokens)
        return self.profile.memory.activations(tokens, pinned=self.has_host, chunk=chunk, ranks=ranks)

    @property
    def has_host(self) -> bool:
        """True if devices have memory of their own, and their host's besides."""
        return self.machine.device.name != "CPU"
