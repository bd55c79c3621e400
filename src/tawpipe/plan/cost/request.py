"""The request for a plan: a model as sizes, its data, the machines, and how long things take on them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tawpipe.dealing.balance import LayerKind, LayerTime
from tawpipe.errors import UserError
from tawpipe.plan.cost.profile import Profile
from tawpipe.plan.cost.typical import TypicalStep, mean_bin, slices_in, typical_of_pipelines, typical_of_ranks
from tawpipe.plan.machine.machine import Machine
from tawpipe.schedule.buffers import Kind
from tawpipe.schedule.pipelines.strategy import ActivationPipeline
from tawpipe.schedule.settings import DEFAULT, ScheduleSettings
from tawpipe.schedule.sharing import speeds_of
from tawpipe.schedule.sizes.activations import ALIKE, Shares
from tawpipe.schedule.sizes.footprint import Widths
from tawpipe.schedule.spec import ModelSpec
from tawpipe.schedule.step import StepSpec, Strategy
from tawpipe.schedule.strategies.build import shares_of, step_of
from tawpipe.schedule.strategies.table import find
from tawpipe.simulate import CostModel, LinkModel, MicroBatchSize, size_of
from tawpipe.topology import Topology

MOST_SEQUENCES = 1_000_000
"""In a step, that a plan is made for."""
CHUNKS = (2048, 4096, 8192, 16384)
"""Tokens of a row that layers may compute at one time where whole rows do not fit."""
ONE_MEMORY = ("GB10", "Orin", "Thor")
"""In the names of devices whose memory is their host's."""
ASSUMED_HOST = LinkModel(20e9, 1e-5, shared=False)
"""Between a device and homes in its host's memory, each way, where nobody has measured it: PCIe 4 with 16 lanes."""
BY_TOKENS = LayerTime((LayerKind(1, 1.0, 0.0),))
"""Of documents of which nobody has said how long they take."""
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
        memory_bytes: that the device with most memory may use; 0 for no limit.
        system_bytes: of a device that the driver and libraries take for themselves; on a CPU the process that has
            loaded them.
        communicator_bytes: of a device that each of its process groups takes.
        drops: the model has dropout, which is drawn for every chunk of a row.
        flops: that the model needs for a step, as MFU counts; 0 if unknown.
        peak_flops: of a device; None if unknown.
        why_not_staged: the reason why the layers cannot be on other devices than the embedding; mostly empty.
        compiled: layers are compiled, so that their backward passes are not taken apart.
        mean: mean micro-batch, where rows differ: used for times. Memory uses ``size``.
        dealt: lengths of the documents of a step, which are dealt by their time: of a typical one, the longest of all
            among them. A sequence is then a full bin. None for rows of one length.
        cuts: pipelines may cut documents into slices.
        work: the time of documents where the profile has none (``deals_by``).
        typical: the micro-batches as they are dealt (``of``).
        needs_whole: an optimizer that looks at whole matrices, which every unit's home has to have; empty for others.
        settings: what a plan takes as given: see ``schedule.settings.UNPLANNED`` and ``KEPT_BY_PLANS``.
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
    drops: bool = False
    needs_whole: str = ""
    why_not_staged: str = ""
    compiled: bool = False
    mean: MicroBatchSize | None = None
    dealt: tuple[int, ...] = ()
    cuts: bool = False
    work: LayerTime = BY_TOKENS
    typical: TypicalStep | None = None

    def __post_init__(self) -> None:
        for name in ("global_batch", "micro_batch"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 < value <= MOST_SEQUENCES:
                raise UserError(f"--{name.replace('_', '-')}", value, f"a whole number from 1 to {MOST_SEQUENCES}")

    @property
    def micro_batches(self) -> int:
        return -(-self.global_batch // self.micro_batch)

    def micro_batches_of(self, strategy: Strategy) -> int:
        """Of a step under a strategy.

        Raises:
            UserError: a document that no bin holds.
        """
        if not self.dealt:
            return self.micro_batches
        positions = strategy.divided_over(self.topology)
        return self.dealt_by(strategy).count if positions == 1 else self.mean_bin(positions)[0]

    def dealt_by(self, strategy: Strategy) -> TypicalStep:
        """The micro-batches of documents that are dealt, under a strategy.

        Raises:
            UserError: a document that no bin holds.
        """
        ranks, topology = self.settings.sequence_ranks or 1, self.topology
        given = {"work": self.deals_by, "windows": self.profile.windows, "cap": self.sequence_length // ranks}
        if isinstance(strategy, ActivationPipeline):
            laid_out = {"strategy": strategy, "model": self.model, "topology": topology}
            return typical_of_pipelines(self.dealt, **given, **laid_out, cuts=self.cuts)
        speeds = speeds_of(self.settings, topology)
        return typical_of_ranks(self.dealt, **given, world_size=topology.world_size, ranks=ranks, speeds=speeds)

    def mean_bin(self, positions: int) -> tuple[int, MicroBatchSize]:
        """The number of micro-batches under pipelines of so many positions, about, and the size of the mean one."""
        given = {"cap": self.sequence_length, "windows": self.profile.windows}
        return mean_bin(self.dealt, pipelines=self.topology.world_size // positions, positions=positions, **given)

    @cached_property
    def deals_by(self) -> LayerTime:
        """The time of documents by which they are dealt: as the profile has it, if attention shows in it."""
        seen = all(block.forward.per_pair and block.forward.per_token for block in self.profile.blocks[1:-1])
        return self.profile.work if seen else self.work

    @property
    def chunks(self) -> tuple[int, ...]:
        """Sizes of chunks in which a plan may let rows run, ascending; none if it may not."""
        given = self.settings.sequence_chunk
        sizes = CHUNKS if given is None else (given,)
        return tuple(size for size in sizes if 0 < size < self.sequence_length) if self.profile.in_chunks else ()

    @property
    def sets(self) -> tuple[int, ...]:
        """Numbers of ranks that a plan may let compute a row together, ascending, besides 1; none if it may not."""
        local = self.topology.local_size
        open_ = self.settings.sequence_ranks is None and self.profile.cuts
        return tuple(size for size in range(2, local + 1) if local % size == 0) if open_ else ()

    @property
    def leaves_idle(self) -> bool:
        """True if there are devices without a micro-batch where each computes its own."""
        return self.micro_batches < self.topology.world_size

    def with_ranks(self, ranks: int) -> PlanRequest:
        """The same where so many ranks compute a row together."""
        return replace(self, settings=replace(self.settings, sequence_ranks=ranks))

    @property
    def levels(self) -> tuple[str, ...]:
        """What of the homes a plan may keep in the host's memory, the least first; where it is none beside the devices'
        it gains nothing.
        """
        given = self.settings.host_homes
        return (given,) if given else ("none", "state", "all") if self.has_host else ("none",)

    def with_homes(self, level: str) -> PlanRequest:
        """The same with so much of the homes in the host's memory."""
        return replace(self, settings=replace(self.settings, host_homes=level))

    def of(self, step: StepSpec) -> PlanRequest:
        """The request as a step computes it: layers on whole rows or in chunks."""
        size, profile = step.settings.sequence_chunk or 0, self.profile
        if 0 < size < self.sequence_length and profile.in_chunks:
            profile = profile.cut(size * self.micro_batch)
        given = replace(self.settings, sequence_chunk=size, offload_dir=step.settings.offload_dir)
        typical = self.dealt_by(step.strategy).numbered(step.slices) if self.dealt else None
        return replace(self, profile=profile, settings=given, typical=typical)

    def in_chunks(self, size: int) -> dict[str, Any]:
        """Settings for rows in chunks of so many tokens, or for whole ones (0), which wait in no files."""
        return {"sequence_chunk": size, "offload_dir": self.settings.offload_dir if size else ""}

    @cached_property
    def topology(self) -> Topology:
        """The nodes as schedules see them."""
        return self.machine.topology.evened()

    @cached_property
    def absent(self) -> tuple[int, ...]:
        """Of every device, bytes that it has less than the one with most; empty where they are alike."""
        most, devices = self.machine.most_memory, self.machine.device_of
        if not most or not self.memory_bytes or len({device.memory_bytes for device in devices}) < 2:
            return ()
        return tuple(round(self.memory_bytes * (1 - device.memory_bytes / most)) for device in devices)

    @cached_property
    def costs(self) -> CostModel:
        """The cost model of the clock. Where there are peers, some transfer is under way or waited for all the time."""
        machine, profile = self.machine, self.profile
        slower = machine.device.beside if machine.world_size > 1 else 1.0
        slower *= self.typical.uneven if self.typical else 1.0
        return CostModel(
            tuple(block.times(slower) for block in profile.blocks) if slower != 1 else profile.blocks,
            machine.between,
            machine.inside,
            dict(machine.between_of),
            weight_bytes=self.widths.weight,
            gradient_bytes=self.widths.gradient,
            update_s=profile.update_s,
            update_of=profile.update_of,
            size=self.typical.size if self.typical else self.mean or self.size,
            sizes=self.typical.sizes(profile.windows) if self.typical else {},
            compute_factor={rank: machine.device.speed / speed for rank, speed in enumerate(machine.speeds)},
            reduce_scatter="ring",
            host=machine.disk if self.settings.offload_dir else machine.host,
            homes=machine.host if math.isfinite(machine.host.bytes_per_s) else ASSUMED_HOST,
            master_bytes=self.widths.master,
            optimizer_states=self.widths.optimizer_states,
            boundary_bytes=profile.memory.boundary,
            key_elements=round(profile.memory.keys) // self.widths.weight,
            kept_bytes=profile.memory.kept.get("kept", 0.0),
            graph_bytes=profile.memory.kept.get("graph", 0.0),
            coding=profile.coding,
            change_bytes=self.widths.change,
        )

    @property
    def mean_costs(self) -> CostModel:
        """The same for micro-batches that are all as large as the mean one."""
        return replace(self.costs, size=self.typical.mean, sizes={}) if self.typical else self.costs

    @property
    def link_rates(self) -> list[float]:
        """Bytes per second of every machine's link to the others, in one direction."""
        machines = range(len(self.machine.nodes))
        return [self.costs.node_link(machine).node_rate(self.topology.local_size) for machine in machines]

    def with_micro_batch(self, sequences: int) -> PlanRequest:
        """The same batch, computed in micro-batches of so many rows."""
        times = sequences / self.micro_batch
        return replace(
            self, micro_batch=sequences, size=self.size.times(times), mean=self.mean and self.mean.times(times)
        )

    def with_rows(self, rows: int) -> PlanRequest:
        """Steps of so many rows; of documents that are dealt those whose lengths are spread alike, the longest too."""
        times = min(1.0, rows / self.micro_batch)
        size, mean = self.size.times(times), self.mean and self.mean.times(times)
        few, share, longest_first = min(self.micro_batch, rows), rows / self.global_batch, sorted(self.dealt)[::-1]
        some = max(1, round(len(self.dealt) * share))
        dealt = tuple(longest_first[number * len(self.dealt) // some] for number in range(some)) if self.dealt else ()
        flops = self.flops * share
        return replace(self, global_batch=rows, micro_batch=few, size=size, mean=mean, flops=flops, dealt=dealt)

    def with_length(self, length: int) -> PlanRequest:
        """As many rows of another length: a document that fills its row still does, shorter ones stay as they are. Of
        those that are dealt no piece is longer.
        """
        fills = self.size.pairs * self.micro_batch >= self.size.tokens**2
        full = size_of([length] * self.micro_batch, self.profile.windows)
        size = full if fills else self.size.times(length / self.sequence_length)
        dealt = tuple(min(length, whole - at) for whole in self.dealt for at in range(0, whole, length))
        mean = self.mean and self.mean.times(min(1.0, size.tokens / self.mean.tokens))
        return replace(self, sequence_length=length, size=size, mean=mean, flops=0.0, dealt=dealt)

    def step(self, settings: ScheduleSettings, strategy: Strategy | None = None) -> StepSpec:
        """A step of this batch.

        Args:
            strategy: in place of the one that the settings name.

        Raises:
            UserError: the settings cannot work for this model on these machines.
        """
        if settings.sequence_chunk is None:  # and so rows are whole
            settings = replace(settings, **self.in_chunks(0))
        configured = (strategy or find(settings.strategy)).configured(settings)
        # Every pipeline has as many bins, however fast it is.
        binned = bool(self.dealt) and configured.divided_over(self.topology) > 1
        alike = replace(settings, device_speeds="") if binned else settings
        typical = self.dealt_by(configured) if self.dealt else None
        shares = shares_of(typical.count if typical else self.micro_batches, self.topology, alike, strategy)
        dealt: dict[str, Any] = {"shared": 0} if binned else {}
        if typical and binned:
            dealt |= {"slices": slices_in(shares, typical)}
            dealt |= {"orders": (typical.order,) * len(set(shares))} if typical.order else {}
        step = step_of(self.model, self.topology, settings, shares, strategy=strategy, **dealt)
        why = self.why_not_staged if step.divided_over > 1 else ""
        if self.compiled and Kind.LINEAR in step.kept:  # which wait for a second part of backward passes
            why = why or "backward passes of compiled layers cannot be taken apart"
        if why:
            raise UserError("schedule.strategy", step.strategy.name, f"another one: {why}", need=why)
        for unit, home in zip(self.model.units, step.homes, strict=True):
            if self.needs_whole and unit.trainable and len(home.ranks) > 1:
                expected = f"one that keeps whole units, for {self.needs_whole}, which looks at whole matrices"
                raise UserError("schedule.strategy", step.strategy.name, f"{expected}: tawpipe-whole")
        return step

    def block_seconds(self, step: StepSpec) -> list[float]:
        """Of every block, seconds in which a device computes its share of a micro-batch, forward and backward."""
        costs, of_blocks = self.of(step).mean_costs.in_sets(step.sequence_ranks), list[float]()
        for b, block in enumerate(self.model.blocks):
            seconds = costs.forward_s(0, b, 0) * (block.kind != "head")
            seconds += costs.backward_s(0, b, 0, step.recomputes(b)) * block.needs_backward
            visits = 1 + block.needs_backward
            of_blocks.append(seconds + visits * costs.unpack_s(0, b) / step.settings.micro_batches_per_visit)
        return of_blocks

    @property
    def activation_bytes(self) -> Mapping[Kind, int]:
        """Bytes of one activation of every kind, where no rows are computed together."""
        return self.activations_of(1)

    def activations_of(self, ranks: int) -> Mapping[Kind, int]:
        """The same on each of so many ranks that compute a micro-batch together."""
        chunk, tokens = (self.settings.sequence_chunk or 0) * self.micro_batch, round(self.size.tokens)
        return self.profile.memory.activations(tokens, pinned=self.on_cuda, chunk=chunk, ranks=ranks)

    def shares(self, step: StepSpec) -> Shares:
        """Of what micro-batches of a step keep, the share of what full ones would, where pipelines are dealt them."""
        if self.typical is None or step.divided_over == 1:
            return ALIKE
        return self.typical.held({m for share in step.micro_batches for m in share}, self.size.tokens)

    @property
    def has_host(self) -> bool:
        """True if devices have memory of their own, and their host's besides."""
        return self.on_cuda and not any(word in self.machine.device.name for word in ONE_MEMORY)

    @property
    def on_cuda(self) -> bool:
        """True if devices are GPUs, whatever memory they have."""
        return self.machine.device.name != "CPU"
