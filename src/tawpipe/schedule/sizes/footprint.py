"""What a schedule costs, stated before it is paid: bytes over every node's link, memory per process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.buffers import AWAY, BACK, BOUNDARIES, OUTSIDE, STAYING, Buffer, Kind
from tawpipe.schedule.landing import ROOMS, SLICE
from tawpipe.schedule.settings import RECOMPUTE, ScheduleSettings
from tawpipe.schedule.sizes.activations import ALIKE, Shares, activations_held, peak_activations, size_in
from tawpipe.schedule.sizes.traffic import borders_passed, link_elements, scratch_bytes
from tawpipe.schedule.spec import EXACT_WIDTH, compressed_width, sum_width
from tawpipe.schedule.step import Schedule, StepSpec
from tawpipe.topology import Topology

IN_FILES = 4
"""Chunks of a layer's input and output that are on their way to files and back at one time."""
STAGED = {Kind.OFFLOADED: 6, Kind.OFFLOADED_ATTENTION: 4}
"""Chunks for which a device has room for the whole run where rows pass into the host's memory: two that come and two
that go; and two more that come, because a layer that is new runs twice, and its outputs are compared.
"""

TRAVELLING = 2
"""Transfers of activations that a lane may be given before they are over, on a device that runs behind the thread which
issues: what is received is made then, and what was sent stays until it has gone.
"""
MOST_AHEAD, AHEAD_BYTES = 16, 16 << 20
"""Actions of a lane that gloo begins before the first of them is over, at most, and bytes of activations among them."""


def most_ahead(message_bytes: int) -> int:
    """Messages of activations of which a lane posts the receives before the first of them is there.

    >>> most_ahead(1000), most_ahead(4 << 20), most_ahead(1 << 30)
    (16, 4, 2)
    """
    return min(MOST_AHEAD, max(2, AHEAD_BYTES // max(1, message_bytes)))


@dataclass(frozen=True)
class Widths:
    """Bytes of one element.

    Args:
        weight: of weights that travel and compute.
        gradient: of gradients that are summed and travel.
        master: of weights and gradients at home.
        optimizer_states: tensors of a parameter's size that the optimizer keeps, in the master's dtype; for every unit,
            where they differ.
        exact: of a frozen weight's exact value in the host's memory; 0 where the weight's type holds it.
        unpacked: elements of weights for which there is room besides, into which packed units are dequantised.
        slice: elements of the largest slice of a home in the host's memory that passes through a device: more than
            ``SLICE`` where an optimizer wants whole matrices.
        change: of a weight that travels as it has changed.
    """

    weight: int
    gradient: int
    master: int
    optimizer_states: float | tuple[float, ...]
    exact: int = 0
    unpacked: int = 0
    slice: int = SLICE
    change: float = EXACT_WIDTH

    def state(self, unit: int) -> float:
        """Bytes of an element of a trainable unit that are in the host's memory where homes are: weight, gradient and
        optimizer state.
        """
        states = self.optimizer_states[unit] if isinstance(self.optimizer_states, tuple) else self.optimizer_states
        return self.master * (2 + states)

    def on_device(self, unit: int, level: str | None, *, trainable: bool) -> float:
        """The part of ``at_home`` that is on the device where ``ScheduleSettings.host_homes`` is this level."""
        if level == "all":
            return 0
        return self.weight if level == "state" and trainable else self.at_home(unit, trainable=trainable)

    def host(self, unit: int, *, trainable: bool, copies: bool, gradient: bool) -> float:
        """Bytes of an element of a unit in the host's memory, where homes are there.

        Args:
            copies: what travels is there as well.
            gradient: the gradient is kept.
        """
        copy = self.weight if copies and not (trainable and self.weight == self.master) else 0
        return copy + (self.state(unit) - (0 if gradient else self.master) if trainable else 0)

    def at_home(self, unit: int, *, trainable: bool) -> float:
        """Bytes of an element of a unit where it lives: weight, gradient, optimizer state, the copy that travels; of a
        frozen one only the latter.
        """
        if not trainable:
            return self.weight
        return self.state(unit) + (self.weight if self.weight != self.master else 0)


@dataclass(frozen=True)
class BlockMemory:
    """Bytes that a micro-batch needs in blocks of a model, besides weights and gradients of weights in their buffers.

    Args:
        boundary: of a block's input, for every token.
        kept: for every token, by kind of activation: what a layer keeps (``graph``, ``kept``), its input included,
            what is kept between the two parts of its backward pass (``lin``), and what all layers of a micro-batch
            share (``ctx``).
        working: what computing takes at its highest besides what it is given and leaves behind, by kind of block and
            by what runs (``forward full``, ``backward none``, ...): a fixed part, and one for every token. Below zero
            where memory is given back before the rest is taken.
        at_once: tokens that blocks of a kind compute at one time, of those kinds that do not compute all of them: the
            head, whose logits exist for a chunk only.
        keys, key_gradients: of a layer's keys and values, and of their gradients, for every token: where several ranks
            compute a row together, each of them has those of all its tokens for a time, and of a document in slices a
            stage has those of all slices.
        in_chunks: of layers whose rows run in chunks, ``working`` by what runs, and what is ``kept`` of attention: a
            fixed part, one for every token of a chunk, and one for every token.
        unpacking: what dequantising the packed units of a block takes for a while, before it computes.
    """

    boundary: int
    kept: Mapping[str, float]
    working: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    at_once: Mapping[str, int] = field(default_factory=dict)
    keys: float = 0
    key_gradients: float = 0
    in_chunks: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    unpacking: int = 0

    def cut(self, chunk: int) -> BlockMemory:
        """The same for rows that run in chunks of so many tokens."""
        lines = {name: (fixed + by_chunk * chunk, token) for name, (fixed, by_chunk, token) in self.in_chunks.items()}
        _, attention = lines.pop("kept", (0, 0.0))
        kept = {**self.kept, "kept": attention, "attention": attention}
        return replace(self, kept=kept, working={**self.working, "layer": lines}, in_chunks={})

    def with_more(self, kind: str, amount: int) -> BlockMemory:
        """The same with so many bytes more whenever a block of a kind computes."""
        more = {name: (fixed + amount, per_token) for name, (fixed, per_token) in self.working.get(kind, {}).items()}
        return replace(self, working={**self.working, kind: more})

    def activations(self, tokens: int, *, pinned: bool = False, chunk: int = 0, ranks: int = 1) -> dict[Kind, int]:
        """Bytes of one activation of every kind, for a micro-batch.

        Args:
            pinned: the host's memory is pinned, which comes in powers of two.
            chunk: tokens that come and go at one time, 0 for all.
            ranks: that compute it together. What layers are called with besides their input is there for all tokens.
        """
        of_rank = -(-tokens // ranks)
        sizes = dict.fromkeys(BOUNDARIES, self.boundary * of_rank)
        sizes |= {kind: round(self.kept.get(kind, 0) * of_rank) for kind in (Kind.GRAPH, Kind.ATTENTION, Kind.LINEAR)}
        sizes[Kind.CONTEXT] = round(self.kept.get(Kind.CONTEXT, 0) * tokens)
        sizes |= {Kind.KEYS: round(self.keys * tokens), Kind.KEY_GRADIENTS: round(self.key_gradients * tokens)}
        sizes |= {other: sizes[kind] for places in (AWAY, BACK) for kind, other in places.items()}
        if pinned:
            whole, rest = divmod(of_rank, min(chunk, of_rank) or of_rank)
            for kind in OUTSIDE:
                each = sizes[kind] / of_rank
                parts = [each * (chunk or of_rank)] * whole + [each * rest] * (rest > 0)
                sizes[kind] = sum(1 << max(0, ceil(part) - 1).bit_length() for part in parts)
        return sizes

    def working_of(self, schedule: Schedule, action: Action, tokens: int) -> int:
        """What an action takes while it computes."""
        if action.block < 0 or action.micro_batch < 0 or action.op is Op.BACKWARD_WEIGHT:
            return 0
        kinds = {buffer.kind for buffer in (*action.reads, *action.writes)}
        recompute = next((name for name, kind in RECOMPUTE.items() if kind and kinds & {kind, BACK[kind]}), "full")
        block = schedule.model.blocks[action.block].kind
        of_kind = self.working.get(block, {})
        forward, settings = action.op in (Op.FORWARD, Op.KEYS), schedule.step.settings
        fixed, per_token = of_kind.get(f"{'forward' if forward else 'backward'} {recompute}", (0, 0))
        if schedule.step.sequence_ranks > 1:
            together = schedule.step.ranks_of(action.micro_batch) > 1
            if block == "layer" and settings.sequence_chunk and together:  # what it says of the row are keys and values
                per_token = max(0.0, per_token - self.keys - (0 if forward else self.key_gradients))
            tokens = -(-tokens // schedule.step.sequence_ranks)
        computing = round(fixed + per_token * min(tokens, self.at_once.get(block, tokens)))
        if any(schedule.model.units[unit].packed for unit in schedule.model.blocks[action.block].units):
            computing = max(computing, self.unpacking)
        if Kind.OFFLOADED in kinds and block == "embedding":  # its output, which goes chunk by chunk
            return computing + tokens * self.boundary
        if not settings.offload_dir or Kind.OFFLOADED not in kinds:
            return computing
        chunk = min(tokens, settings.sequence_chunk or tokens)
        kept = round(self.kept.get(Kind.ATTENTION, 0) * chunk) if Kind.OFFLOADED_ATTENTION in kinds else 0
        return computing + min(tokens, IN_FILES * chunk) * self.boundary + IN_FILES // 2 * kept

    def staged(self, schedule: Schedule, chunk: int) -> int:
        """What a device holds all the time of a schedule whose rows pass chunk by chunk into the host's memory.

        Args:
            chunk: tokens of a micro-batch that pass at one time; 0 for whole rows, which do not pass.
        """
        written = {buffer.kind for program in schedule.programs for action in program for buffer in action.writes}
        sizes = {Kind.OFFLOADED: self.boundary, Kind.OFFLOADED_ATTENTION: self.kept.get(Kind.ATTENTION, 0)}
        return sum(round(STAGED[kind] * chunk * size) for kind, size in sizes.items() if kind in written)


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Memory of one step. Where processes differ, it is that of the process that needs most.

    Args:
        home_bytes: master weights, gradients, optimizer state and travelling copies at home; of homes in the host's
            memory the latter, and the rooms through which the rest passes.
        buffer_bytes: pools of units and slices on their way, messages in 8 bits and what packed units are dequantised
            into included.
        activation_bytes: boundary activations, inputs of blocks and their gradients, and what layers keep besides.
        working_bytes: what computing a block takes besides, if that is known. Where it is, both are those of the moment
            at which they are most together.
        host_bytes: activations that wait in the host's memory, homes that are there, and exact values of frozen units
            that the compute dtype rounds.
        file_bytes: activations that wait in files, of one process.
        rank: whose memory on the device it is.
    """

    home_bytes: int
    buffer_bytes: int
    activation_bytes: int
    working_bytes: int = 0
    host_bytes: int = 0
    file_bytes: int = 0
    rank: int = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.parts()})"

    def parts(self) -> str:
        """What a process holds, in words."""
        names = ("home", "buffer", "activation", "working", "host", "file")
        sizes = {name: getattr(self, f"{name}_bytes") for name in names}
        held = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in sizes.items() if size)
        return f"MiB of a process: {held}"


@dataclass(frozen=True, kw_only=True)
class Costs(StepMemory):
    """Costs of one step.

    Args:
        strategy, schedule: in words.
        link_sent_bytes, link_received_bytes: for every node's link to the others.
    """

    parameters: int
    trainable: int
    strategy: str
    schedule: str
    link_sent_bytes: tuple[int, ...]
    link_received_bytes: tuple[int, ...]

    def __repr__(self) -> str:
        """What a process holds, by its parts, and what a link carries."""
        sent = max(self.link_sent_bytes, default=0)
        return f"Costs({self.strategy}: {self.parts()}; the busiest link sends {sent / 1e6:.1f} MB a step)"


def far_widths(settings: ScheduleSettings, widths: Widths, *, step: StepSpec | None = None) -> tuple[float, float]:
    """Bytes of an element of weights, and of gradients, between nodes. Where a step's weights travel as they change,
    what is frozen does not: then it is the mean of all.
    """
    travels, summands = 1.0, 1 if step is None else step.summands
    if step is not None and step.refreshes:
        units = zip(step.homes, step.model.units, strict=True)
        travels = sum(home.padded for home, unit in units if unit.trainable) / sum(home.padded for home in step.homes)
    return (
        compressed_width(settings.weights_compression, widths.weight, widths.change) * travels,
        compressed_width(settings.gradients_compression, widths.gradient, sum_width(widths.gradient, summands)),
    )


def held(
    schedule: Schedule,
    widths: Widths,
    *,
    activation_bytes: Mapping[Kind, int],
    working: Callable[[Action], int] = lambda _: 0,
    absent: Sequence[int] = (),
    shares: Shares = ALIKE,
) -> StepMemory:
    """The memory that a schedule takes; arguments as of ``costs``.

    Args:
        absent: of every rank, bytes that its device has less than others.
        shares: of activations that are not of the usual size.
    """
    ranks = schedule.played
    lacks = [absent[rank] if absent else 0 for rank in ranks]
    homes = [home_bytes(schedule, rank, widths) for rank in ranks]
    buffers = [
        (schedule.pool_elements(rank, Kind.WEIGHT) + schedule.pool_elements(rank, Kind.COPY)) * widths.weight
        + schedule.pool_elements(rank, Kind.GRADIENT) * widths.gradient
        + schedule.pool_elements(rank, Kind.LANDING) * widths.master
        + scratch_bytes(schedule, rank, widths.gradient)
        + widths.unpacked * widths.weight
        for rank in ranks
    ]
    outside = {kind: each for kind, each in activation_bytes.items() if kind in OUTSIDE}
    on_device = {kind: each for kind, each in activation_bytes.items() if kind not in OUTSIDE}
    programs = [activations_held(schedule, rank, on_device, shares) for rank in ranks]
    moments = [max(((total, working(action)) for action, total in held), key=sum, default=(0, 0)) for held in programs]
    most = max(range(len(ranks)), key=lambda i: homes[i][0] + buffers[i] + sum(moments[i]) + lacks[i])
    activations, computing = moments[most]
    exact = [schedule.home_elements(rank, trainable=False, packed=False) * widths.exact for rank in ranks]
    left, in_files = [peak_activations(schedule, r, outside) for r in ranks], bool(schedule.step.settings.offload_dir)
    return StepMemory(
        home_bytes=homes[most][0],
        buffer_bytes=buffers[most],
        activation_bytes=activations,
        working_bytes=computing,
        host_bytes=max(
            kept + state + (0 if in_files else out) for kept, (_, state), out in zip(exact, homes, left, strict=True)
        ),
        file_bytes=max(left) if in_files else 0,
        rank=ranks[most],
    )


def home_bytes(schedule: Schedule, rank: int, widths: Widths) -> tuple[int, int]:
    """Bytes at home on a rank's device, with the rooms that others pass through, and in its host's memory."""
    on_device = in_host = 0.0
    elements, width, several = 0, 0, False
    """Of a room, and whether there are two; a unit that is no larger than a slice passes through a single one."""
    step, copies = schedule.step, schedule.step.copies_in_host
    updates = (action for action in schedule.programs[rank] if action.op is Op.UPDATE)
    passing = {action.unit for action in updates if any(buffer.kind is Kind.LANDING for buffer in action.reads)}
    for number, (home, unit) in enumerate(zip(schedule.homes, schedule.model.units, strict=True)):
        if home.index(rank) is None:
            continue
        on_device += home.stripe * widths.on_device(number, step.settings.host_homes, trainable=unit.trainable)
        if not step.homes_in_host or not (unit.trainable or copies):
            continue
        gradient = number not in passing
        in_host += home.stripe * widths.host(number, trainable=unit.trainable, copies=copies, gradient=gradient)
        if unit.trainable:
            different = widths.weight != widths.master
            several |= home.stripe > min(widths.slice, SLICE)  # where matrices pass whole, a unit has some
            elements = max(elements, min(home.stripe, widths.slice))
            tensors = ceil(widths.state(number) / widths.master)
            width = max(width, tensors * widths.master + (widths.weight if copies and different else 0))
    return ceil(on_device) + (ROOMS if several else 1) * elements * width, ceil(in_host)


def held_apart(schedule: Schedule, rank: int, sizes: Mapping[Kind, int], shares: Shares = ALIKE) -> int:
    """Bytes that a GPU's allocator holds besides what tensors take: memory made on one stream is never given to another
    one, and what another one has used not before that is done with it.

    Every lane on which activations arrive has memory of its own, as much as it ever needs at one time. What has come or
    gone there last may still be used.

    Args:
        sizes: of one activation of every kind.
    """
    most, now, lane_of = dict[Lane, int](), dict[Lane, int](), dict[Buffer, Lane]()
    highest, travelling = 0, dict[Lane, int]()
    for action in schedule.programs[rank]:
        for buffer in action.writes:
            if buffer.kind in sizes and buffer.kind not in STAYING and buffer not in lane_of:
                lane_of[buffer] = action.lane
                now[action.lane] = now.get(action.lane, 0) + size_in(sizes, shares, buffer)
                most[action.lane] = max(most.get(action.lane, 0), now[action.lane])
        highest = max(highest, sum(now.values()))
        for buffer in action.frees:
            if (lane := lane_of.pop(buffer, None)) is not None:
                now[lane] -= size_in(sizes, shares, buffer)
        for transfer in action.transfers:
            size = size_in(sizes, shares, transfer.buffer) if transfer.buffer.is_activation else 0
            travelling[action.lane] = max(travelling.get(action.lane, 0), size)
    return sum(most.values()) - highest + TRAVELLING * sum(travelling.values())


def posted_ahead(schedule: Schedule, rank: int, sizes: Mapping[Kind, int], shares: Shares = ALIKE) -> int:
    """Bytes of activations for which gloo has room before the schedule says so: those whose receives are posted.

    Args:
        sizes: of one activation of every kind.
    """
    largest = dict[Lane, int]()
    for action in schedule.programs[rank]:
        if action.begins_ahead and action.writes[0].is_activation:
            size = sum(size_in(sizes, shares, buffer) for buffer in action.writes)
            largest[action.lane] = max(largest.get(action.lane, 0), size)
    return sum(size * (most_ahead(size) - 1) for size in largest.values())


def costs(
    schedule: Schedule,
    widths: Widths,
    *,
    activation_bytes: Mapping[Kind, int],
    working: Callable[[Action], int] = lambda _: 0,
    nodes: Topology | None = None,
) -> Costs:
    """Add up a schedule.

    Args:
        activation_bytes: of one activation of every kind, see ``peak_activations``.
        working: bytes that an action takes besides while it runs.
        nodes: the real ones, where the schedule was built for others.
    """
    traffic = link_elements(schedule, physical=nodes)
    settings, units = schedule.step.settings, schedule.model.units
    far, passed = far_widths(settings, widths, step=schedule.step), borders_passed(schedule, physical=nodes)
    border = activation_bytes.get(Kind.INPUT, 0)
    memory = held(schedule, widths, activation_bytes=activation_bytes, working=working)
    return Costs(
        **vars(memory),
        parameters=sum(unit.parameters for unit in units),
        trainable=sum(unit.numel for unit in units if unit.trainable),
        strategy=schedule.name
        + (", homes as given" if settings.homes else "")
        + (f", changes of weights taken for {8 * widths.change:.2g} bits each" if schedule.step.refreshes else "")
        + (f", gradients for {8 * far[1]:.3g}" if schedule.step.codes_sums else ""),
        schedule=_in_words(schedule),
        link_sent_bytes=tuple(
            link.bytes_sent(*far) + sent * border for link, (sent, _) in zip(traffic, passed, strict=True)
        ),
        link_received_bytes=tuple(
            link.bytes_received(*far) + received * border for link, (_, received) in zip(traffic, passed, strict=True)
        ),
    )


def _in_words(schedule: Schedule) -> str:
    many = count(len(schedule.micro_batches), "micro-batch", "micro-batches")
    return f"{many} {schedule.step.strategy.in_words(schedule.step)}"


def count(number: int, singular: str, many: str | None = None) -> str:
    """
    >>> count(1, "round"), count(2, "round")
    ('1 round', '2 rounds')
    """
    return f"{number} {singular if number == 1 else many or singular + 's'}"
