"""Request for a plan: the model as sizes, its data, the machines, and the measured times of its blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tawpipe.dealing.balance import LayerKind, LayerTime
from tawpipe.errors import UserError
from tawpipe.plan.cost.filling import Filling
from tawpipe.plan.cost.profile import Profile
from tawpipe.plan.cost.typical import TypicalStep, mean_pack, slices_in, typical_of_pipelines, typical_of_ranks
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
"""Most sequences of a step for which a plan is made."""
CHUNKS = (2048, 4096, 8192, 16384)
"""Chunk sizes, in tokens, that a plan tries where whole rows do not fit."""
ONE_MEMORY = ("GB10", "Orin", "Thor")
"""Parts of the names of devices that share one memory with their host."""
ASSUMED_HOST = LinkModel(20e9, 1e-5, shared=False)
"""Assumed link between a device and its host's memory, per direction, where none was measured: PCIe 4 with 16 lanes."""
BY_TOKENS = LayerTime((LayerKind(1, 1.0, 0.0),))
"""Default time of documents, where none is known: proportional to their tokens."""
MOST_TOKENS = 1 << 24
"""Most tokens of a row when the longest row that fits is searched."""


@dataclass(frozen=True)
class PlanRequest:
    """Model, data and machines for which a plan is made.

    Args:
        model: sizes of blocks and units.
        profile: measured or estimated times and memory of the blocks.
        machine: nodes, links and devices.
        global_batch: sequences in a step.
        micro_batch: sequences computed at one time.
        sequence_length: tokens of a sequence.
        size: work of one full micro-batch.
        widths: bytes of one element, at home and while it travels.
        memory_bytes: memory that the device with most memory may use; 0 for no limit.
        flops: operations of the model in a step, as MFU counts them; 0 if unknown.
        flops_by: operations of the model for a token, and for a pair of tokens; 0 if unknown.
        peak_flops: peak operations per second of a device; None if unknown.
        settings: settings that a plan takes as given, see ``schedule.settings.UNPLANNED`` and ``KEPT_BY_PLANS``.
        system_bytes: device memory that the driver and the libraries occupy; on a CPU the memory of the process after
            loading them.
        communicator_bytes: device memory that each process group occupies.
        drops: True if the model has dropout, which is drawn separately for every chunk of a row.
        needs_whole: name of an optimizer that needs whole matrices, and therefore unsharded units; ``""`` otherwise.
        why_not_staged: reason why the layers cannot be on other devices than the embedding; ``""`` if they can.
        compiled: True if layers are compiled, so that their backward passes cannot be split in two parts.
        mean: mean micro-batch, where rows differ. It is used for times, ``size`` for memory.
        dealt: lengths of the documents of a typical step that are assigned to devices by their time, with the longest
            document of all. A sequence is then a full packed micro-batch. Empty for rows of one length.
        cuts: True if pipelines may cut documents into slices.
        work: time of documents, used where the profile does not show it (``deals_by``).
        typical: micro-batches that result from assigning the documents; set by ``of``.
        filling: numbers of rows that a plan may choose instead of ``micro_batch``; None if it is given.
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
    flops_by: tuple[float, float] = (0.0, 0.0)
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
    filling: Filling | None = None

    def __post_init__(self) -> None:
        for name in ("global_batch", "micro_batch"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 < value <= MOST_SEQUENCES:
                raise UserError(f"--{name.replace('_', '-')}", value, f"a whole number from 1 to {MOST_SEQUENCES}")

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of a step."""
        return -(-self.global_batch // self.micro_batch)

    def micro_batches_of(self, strategy: Strategy) -> int:
        """Return the number of micro-batches of a step under a strategy.

        Raises:
            UserError: a document is too long for a packed micro-batch.
        """
        if not self.dealt:
            return self.micro_batches
        positions = strategy.divided_over(self.topology)
        return self.dealt_by(strategy).count if positions == 1 else self.mean_pack(positions)[0]

    def dealt_by(self, strategy: Strategy) -> TypicalStep:
        """Assign the documents of a typical step under ``strategy``, and return the resulting micro-batches.

        Raises:
            UserError: a document is too long for a packed micro-batch.
        """
        ranks, topology = self.settings.sequence_ranks or 1, self.topology
        arguments = {"work": self.deals_by, "windows": self.profile.windows, "cap": self.sequence_length // ranks}
        if isinstance(strategy, ActivationPipeline):
            laid_out = {"strategy": strategy, "model": self.model, "topology": topology}
            return typical_of_pipelines(self.dealt, **arguments, **laid_out, cuts=self.cuts)
        speeds = speeds_of(self.settings, topology)
        return typical_of_ranks(self.dealt, **arguments, world_size=topology.world_size, ranks=ranks, speeds=speeds)

    def mean_pack(self, positions: int) -> tuple[int, MicroBatchSize]:
        """Return (approximate number of packed micro-batches of a step, mean size of one), for pipelines.

        Args:
            positions: ranks of one pipeline.
        """
        arguments = {"cap": self.sequence_length, "windows": self.profile.windows}
        return mean_pack(self.dealt, pipelines=self.topology.world_size // positions, positions=positions, **arguments)

    @cached_property
    def deals_by(self) -> LayerTime:
        """Times of documents by which they are assigned to devices.

        These are the profile's if it shows the cost of attention, else ``work``."""
        seen = all(block.forward.per_pair and block.forward.per_token for block in self.profile.blocks[1:-1])
        return self.profile.work if seen else self.work

    @property
    def chunks(self) -> tuple[int, ...]:
        """Chunk sizes, in tokens, that a plan may choose, ascending; empty if rows must stay whole."""
        chunk = self.settings.sequence_chunk
        sizes = CHUNKS if chunk is None else (chunk,)
        return tuple(size for size in sizes if 0 < size < self.sequence_length) if self.profile.in_chunks else ()

    @property
    def cp_group_sizes(self) -> tuple[int, ...]:
        """Context-parallel sizes above 1 that a plan may choose, ascending; empty if it may choose none.

        They are divisors of the number of devices of a node. Empty as well if the setting ``sequence_ranks`` is given,
        or if rows cannot be split."""
        local = self.topology.local_size
        open_ = self.settings.sequence_ranks is None and self.profile.cuts
        return tuple(size for size in range(2, local + 1) if local % size == 0) if open_ else ()

    @property
    def leaves_idle(self) -> bool:
        """True if there are fewer micro-batches than devices."""
        return self.micro_batches < self.topology.world_size

    def with_ranks(self, ranks: int) -> PlanRequest:
        """Return the request with ``ranks`` devices for every row (setting ``sequence_ranks``)."""
        return replace(self, settings=replace(self.settings, sequence_ranks=ranks))

    @property
    def levels(self) -> tuple[str, ...]:
        """Values of ``host_homes`` that a plan may choose, the one with the least host memory first.

        Only the given value if the setting is given. Only ``none`` where device and host share one memory."""
        level = self.settings.host_homes
        return (level,) if level else ("none", "state", "all") if self.has_host else ("none",)

    def with_homes(self, level: str) -> PlanRequest:
        """Return the request with ``host_homes`` set to ``level``."""
        return replace(self, settings=replace(self.settings, host_homes=level))

    def of(self, step: StepSpec) -> PlanRequest:
        """Return the request with the profile and the packed micro-batches that belong to one step.

        The profile is for the step's chunk size. If documents are assigned, ``typical`` is set."""
        size, profile = step.settings.sequence_chunk or 0, self.profile
        if 0 < size < self.sequence_length and profile.in_chunks:
            profile = profile.cut(size * self.micro_batch)
        elif step.sequence_ranks > 1:
            profile = profile.split()
        settings = replace(self.settings, sequence_chunk=size, offload_dir=step.settings.offload_dir)
        typical = self.dealt_by(step.strategy).numbered(step.slices) if self.dealt else None
        return replace(self, profile=profile, settings=settings, typical=typical)

    def in_chunks(self, size: int) -> dict[str, Any]:
        """Return the settings for rows in chunks of ``size`` tokens, or for whole rows if ``size`` is 0.

        These are ``sequence_chunk`` and ``offload_dir``. Whole rows are never offloaded to files."""
        return {"sequence_chunk": size, "offload_dir": self.settings.offload_dir if size else ""}

    @cached_property
    def topology(self) -> Topology:
        """Nodes as schedules see them: equally large ones, into which unequal machines are divided."""
        return self.machine.topology.evened()

    @cached_property
    def absent(self) -> tuple[int, ...]:
        """For every device, the bytes that it has less than the device with most memory.

        Empty if all have equal memory, or if memory is not limited."""
        most, devices = self.machine.most_memory, self.machine.device_of
        if not most or not self.memory_bytes or len({device.memory_bytes for device in devices}) < 2:
            return ()
        return tuple(round(self.memory_bytes * (1 - device.memory_bytes / most)) for device in devices)

    @cached_property
    def costs(self) -> CostModel:
        """Cost model for the simulation.

        With several devices, times are multiplied by ``Device.beside``, because some transfer is always in progress."""
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
            products_bytes=profile.memory.kept.get(Kind.PRODUCTS, 0.0),
            coding=profile.coding,
            change_bytes=self.widths.change,
        )

    @property
    def mean_costs(self) -> CostModel:
        """Cost model in which every micro-batch, slice or not, has the mean size."""
        return replace(self.costs, size=self.typical.mean, sizes={}) if self.typical else self.costs

    @property
    def link_rates(self) -> list[float]:
        """For every machine, the bytes per second in one direction of its link to the other machines."""
        machines = range(len(self.machine.nodes))
        return [self.costs.node_link(machine).node_rate(self.topology.local_size) for machine in machines]

    def with_micro_batch(self, sequences: int) -> PlanRequest:
        """Return the request for the same batch in micro-batches of ``sequences`` rows."""
        times = sequences / self.micro_batch
        return replace(
            self, micro_batch=sequences, size=self.size.times(times), mean=self.mean and self.mean.times(times)
        )

    def with_rows(self, rows: int) -> PlanRequest:
        """Return the request for steps of ``rows`` rows, with a smaller micro-batch if that has more rows.

        Of assigned documents it keeps a proportional sample of the sorted lengths, the longest included."""
        times = min(1.0, rows / self.micro_batch)
        size, mean = self.size.times(times), self.mean and self.mean.times(times)
        few, share, longest_first = min(self.micro_batch, rows), rows / self.global_batch, sorted(self.dealt)[::-1]
        some = max(1, round(len(self.dealt) * share))
        dealt = tuple(longest_first[number * len(self.dealt) // some] for number in range(some)) if self.dealt else ()
        flops = self.flops * share
        return replace(self, global_batch=rows, micro_batch=few, size=size, mean=mean, flops=flops, dealt=dealt)

    def with_length(self, length: int) -> PlanRequest:
        """Return the request for the same number of rows, each of ``length`` tokens.

        A document that fills its row still fills it. Shorter documents keep their lengths, and their number scales with
        ``length``. Assigned documents that are longer than ``length`` are cut into pieces of at most ``length`` tokens.
        """
        fills = self.size.pairs * self.micro_batch >= self.size.tokens**2
        full = size_of([length] * self.micro_batch, self.profile.windows)
        size = full if fills else self.size.times(length / self.sequence_length)
        dealt = tuple(min(length, whole - at) for whole in self.dealt for at in range(0, whole, length))
        mean = self.mean and self.mean.times(min(1.0, size.tokens / self.mean.tokens))
        per_token, per_pair = self.flops_by
        flops = (per_token * size.tokens + per_pair * size.pairs) * self.global_batch / self.micro_batch
        return replace(self, sequence_length=length, size=size, mean=mean, flops=0.0 if dealt else flops, dealt=dealt)

    def step(self, settings: ScheduleSettings, strategy: Strategy | None = None) -> StepSpec:
        """Return a step of this batch, with its settings checked against model and machines.

        Args:
            settings: settings of the step.
            strategy: replaces the strategy that the settings name.

        Raises:
            UserError: the settings cannot work for this model on these machines.
        """
        if settings.sequence_chunk is None:  # None means whole rows
            settings = replace(settings, **self.in_chunks(0))
        configured = (strategy or find(settings.strategy)).configured(settings)
        # Every pipeline gets the same number of packed micro-batches, whatever its speed.
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
        if self.compiled and step.kept & {Kind.LINEAR, Kind.PRODUCTS}:
            why = why or "backward passes of compiled layers cannot be taken apart, nor what they keep be chosen"
        if why:
            raise UserError("schedule.strategy", step.strategy.name, f"another one: {why}", need=why)
        for unit, home in zip(self.model.units, step.homes, strict=True):
            if self.needs_whole and unit.trainable and len(home.ranks) > 1:
                expected = f"one that keeps whole units, for {self.needs_whole}, which looks at whole matrices"
                raise UserError("schedule.strategy", step.strategy.name, f"{expected}: tawpipe-whole")
        return step

    def block_seconds(self, step: StepSpec) -> list[float]:
        """Return, for every block, the seconds in which a device computes its share of a mean micro-batch.

        They contain forward pass, backward pass, recomputation and dequantisation."""
        costs, of_blocks = self.of(step).mean_costs.with_cp_groups(step.sequence_ranks), list[float]()
        for b, block in enumerate(self.model.blocks):
            seconds = costs.forward_s(0, b, 0) * (block.kind != "head")
            seconds += costs.backward_s(0, b, 0, step.recomputes(b)) * block.needs_backward
            visits = 1 + block.needs_backward
            of_blocks.append(seconds + visits * costs.unpack_s(0, b) / step.settings.micro_batches_per_visit)
        return of_blocks

    @property
    def activation_bytes(self) -> Mapping[Kind, int]:
        """Bytes of one activation of every kind, if every row is computed by one device."""
        return self.activations_of(1)

    def activations_of(self, ranks: int) -> Mapping[Kind, int]:
        """Return the bytes of one activation of every kind on each of ``ranks`` devices that compute a row together."""
        chunk, tokens = (self.settings.sequence_chunk or 0) * self.micro_batch, round(self.size.tokens)
        return self.profile.memory.activations(tokens, pinned=self.on_cuda, chunk=chunk, ranks=ranks)

    def shares(self, step: StepSpec) -> Shares:
        """Return, for activations of another size than those of a full micro-batch, the ratio of the two.

        Empty (all are equal) unless documents are assigned to pipelines."""
        if self.typical is None or step.divided_over == 1:
            return ALIKE
        return self.typical.held({m for share in step.micro_batches for m in share}, self.size.tokens)

    @property
    def has_host(self) -> bool:
        """True if devices have memory separate from their host's memory."""
        return self.on_cuda and not any(word in self.machine.device.name for word in ONE_MEMORY)

    @property
    def on_cuda(self) -> bool:
        """True if devices are GPUs, with separate or shared memory."""
        return self.machine.device.name != "CPU"
