"""Costs of a schedule, predicted before it runs: bytes over every node's link, memory of a process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.buffers import AWAY, BACK, BOUNDARIES, OUTSIDE, STAYING, Buffer, Kind
from tawpipe.schedule.landing import LOAD_BUFFERS, PORTION_SIZE
from tawpipe.schedule.pieces import AT_ONCE
from tawpipe.schedule.settings import RECOMPUTE, ScheduleSettings
from tawpipe.schedule.sizes.activations import ALIKE, Shares, activations_held, peak_activations, size_in
from tawpipe.schedule.sizes.traffic import borders_passed, link_elements, scratch_bytes
from tawpipe.schedule.spec import EXACT_WIDTH, compressed_width, sum_width
from tawpipe.schedule.step import Schedule, StepSpec
from tawpipe.topology import Topology

IN_FILES = 4
"""Number of chunks of a layer's input and output that are being written to files or read from them at one time."""
STAGED = {Kind.OFFLOADED: 6, Kind.OFFLOADED_ATTENTION: 4}
"""Kind of activation -> number of chunks for which a device has buffers during the whole run, if rows are offloaded by
chunk: two that arrive and two that leave. Inputs have two more, because a new layer runs twice to compare its outputs.
"""

TRAVELLING = 2
"""Number of transfers of activations of one lane that may be issued before they have ended, on a device that is behind
the issuing thread. Memory of a receive is allocated when it is issued. Memory of a send is held until it has ended."""
MOST_EARLY, EARLY_BYTES = 16, 16 << 20
"""Limits (MOST_EARLY, EARLY_BYTES) of what gloo begins on one lane before the first of it has ended: number of actions,
and bytes of activations among them."""


def most_early_receives(message_bytes: int) -> int:
    """Return the number of messages of activations whose receives a lane posts before the first message has arrived.

    Args:
        message_bytes: bytes of one message.

    >>> most_early_receives(1000), most_early_receives(4 << 20), most_early_receives(1 << 30)
    (16, 4, 2)
    """
    return min(MOST_EARLY, max(2, EARLY_BYTES // max(1, message_bytes)))


@dataclass(frozen=True)
class Widths:
    """Bytes of one element of weights, gradients and optimizer state.

    Args:
        weight: bytes of a weight that travels and is computed with.
        gradient: bytes of a gradient that is summed and travels.
        master: bytes of a weight or gradient at home.
        optimizer_states: number of tensors of a parameter's size that the optimizer keeps, in the dtype of the master
            weights; one number for every unit if they differ.
        exact: bytes of a frozen weight's exact value in CPU memory; 0 if the weight's own dtype holds it.
        unpacked: number of weights in the buffers into which packed (quantised) units are dequantised.
        slice: elements of the largest portion of a home in CPU memory that passes through a device. More than
            ``PORTION_SIZE`` if an optimizer needs whole matrices.
        change: bytes of a weight that travels as a change.
    """

    weight: int
    gradient: int
    master: int
    optimizer_states: float | tuple[float, ...]
    exact: int = 0
    unpacked: int = 0
    slice: int = PORTION_SIZE
    change: float = EXACT_WIDTH

    def state(self, unit: int) -> float:
        """Return the bytes of master weight, gradient and optimizer state of one trained element of ``unit``."""
        states = self.optimizer_states[unit] if isinstance(self.optimizer_states, tuple) else self.optimizer_states
        return self.master * (2 + states)

    def on_device(self, unit: int, level: str | None, *, trainable: bool) -> float:
        """Return the bytes that one element of ``unit`` needs at home on the device, with homes as ``level`` says.

        Args:
            unit: index of the unit.
            level: value of ``ScheduleSettings.host_homes``.
            trainable: True if the unit is trained.
        """
        if level == "all":
            return 0
        return self.weight if level == "state" and trainable else self.at_home(unit, trainable=trainable)

    def host(self, unit: int, *, trainable: bool, copies: bool, gradient: bool) -> float:
        """Return the bytes that one element of ``unit`` needs at home in CPU memory, if homes are there.

        Args:
            unit: index of the unit.
            trainable: True if the unit is trained.
            copies: True if weights that travel are in CPU memory, too.
            gradient: False if the gradient is not stored at home.
        """
        copy = self.weight if copies and not (trainable and self.weight == self.master) else 0
        return copy + (self.state(unit) - (0 if gradient else self.master) if trainable else 0)

    def at_home(self, unit: int, *, trainable: bool) -> float:
        """Return the bytes of one element of ``unit`` at home, on device and in CPU memory together.

        They are master weight, gradient, optimizer state and the weight that travels; for a frozen unit only the last.
        """
        if not trainable:
            return self.weight
        return self.state(unit) + (self.weight if self.weight != self.master else 0)


@dataclass(frozen=True)
class BlockMemory:
    """Bytes of activations and temporary memory of a micro-batch in the blocks of a model.

    Weights, and their gradients in buffers, are not included.

    Args:
        boundary: bytes of a block's input per token.
        kept: kind of activation -> bytes per token. ``graph`` and ``kept`` are what a layer keeps, including its input;
            ``lin`` is kept between the two parts of its backward pass; ``ctx`` is shared by all layers of a
            micro-batch.
        working: kind of block -> what runs (``forward full``, ``backward none``, ...) -> (fixed bytes, bytes per token)
            of the most temporary memory, without inputs and outputs. Negative if memory is freed before more is taken.
        at_once: kind of block -> tokens that it computes at one time, if not all of them: the head, which has logits of
            one chunk only.
        keys: bytes of a layer's keys and values per token. In a context-parallel group every rank has the keys and
            values of all tokens for a time. With document slices a stage has the keys and values of all slices.
        key_gradients: bytes of the gradients of keys and values per token.
        in_chunks: what runs -> (fixed bytes, bytes per token of a chunk, bytes per token of the row), in place of
            ``working`` for layers whose rows are computed in chunks. The key ``kept`` is for kept attention outputs.
        unpacking: bytes for dequantising the packed units of a block, before it computes.
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
        """Return a copy for rows that layers compute in chunks of ``chunk`` tokens.

        The numbers of ``in_chunks`` replace those of layers in ``working`` and ``kept``."""
        lines = {name: (fixed + by_chunk * chunk, token) for name, (fixed, by_chunk, token) in self.in_chunks.items()}
        _, attention = lines.pop("kept", (0, 0.0))
        kept = {**self.kept, "kept": attention, "attention": attention}
        return replace(self, kept=kept, working={**self.working, "layer": lines}, in_chunks={})

    def with_more(self, kind: str, amount: int) -> BlockMemory:
        """Return a copy with ``amount`` more bytes of working memory for blocks of ``kind``."""
        more = {name: (fixed + amount, per_token) for name, (fixed, per_token) in self.working.get(kind, {}).items()}
        return replace(self, working={**self.working, kind: more})

    def activations(self, tokens: int, *, pinned: bool = False, chunk: int = 0, ranks: int = 1) -> dict[Kind, int]:
        """Return the bytes of one activation of every kind on each rank, for a micro-batch of ``tokens`` tokens.

        Args:
            tokens: tokens of the micro-batch.
            pinned: True if CPU memory is pinned, which is allocated in powers of two.
            chunk: tokens that are offloaded at one time; 0 for all.
            ranks: ranks that compute the micro-batch together, each a share of the tokens. Keys and values and the
                extra arguments of layers are for all tokens on each of them.
        """
        of_rank = -(-tokens // ranks)
        sizes = dict.fromkeys(BOUNDARIES, self.boundary * of_rank)
        kept = Kind.GRAPH, Kind.PRODUCTS, Kind.ATTENTION, Kind.LINEAR
        sizes |= {kind: round(self.kept.get(kind, 0) * of_rank) for kind in kept}
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
        """Return the most temporary memory (bytes) of an action; 0 if it does not compute a block.

        Args:
            schedule: the schedule.
            action: the action.
            tokens: tokens of its micro-batch.
        """
        if action.block < 0 or action.micro_batch < 0 or action.op is Op.BACKWARD_WEIGHT:
            return 0
        kinds = {buffer.kind for buffer in (*action.reads, *action.writes)}
        recompute = next((name for name, kind in RECOMPUTE.items() if kind and kinds & {kind, BACK[kind]}), "full")
        block = schedule.model.blocks[action.block].kind
        forward, settings = action.op in (Op.FORWARD, Op.KEYS), schedule.step.settings
        name = f"{'forward' if forward else 'backward'} {recompute}"
        fixed, per_token = self.working.get(block, {}).get(name, (0, 0))
        tokens = -(-tokens // schedule.step.sequence_ranks)
        at_once = min(tokens, self.at_once.get(block, tokens))
        if block == "layer" and schedule.step.ranks_of(action.micro_batch) > 1:
            if settings.sequence_chunk:  # keys and values of the row are activations here
                per_token -= self.keys + (0 if forward else self.key_gradients)
            elif tokens > AT_ONCE:  # the input's gradient overwrites the output's
                at_once, fixed = AT_ONCE, fixed - (0 if forward else self.boundary * (tokens - AT_ONCE))
        computing = round(fixed + per_token * at_once)
        if any(schedule.model.units[unit].packed for unit in schedule.model.blocks[action.block].units):
            computing = max(computing, self.unpacking)
        if Kind.OFFLOADED in kinds and block == "embedding":  # its output, offloaded chunk by chunk
            return computing + tokens * self.boundary
        if not settings.offload_dir or Kind.OFFLOADED not in kinds:
            return computing
        chunk = min(tokens, settings.sequence_chunk or tokens)
        kept = round(self.kept.get(Kind.ATTENTION, 0) * chunk) if Kind.OFFLOADED_ATTENTION in kinds else 0
        return computing + min(tokens, IN_FILES * chunk) * self.boundary + IN_FILES // 2 * kept

    def staged(self, schedule: Schedule, chunk: int) -> int:
        """Return the bytes of the device buffers through which rows are offloaded chunk by chunk.

        They exist during the whole run. 0 if the schedule offloads nothing.

        Args:
            schedule: the schedule.
            chunk: tokens of a micro-batch that are moved at one time; 0 for whole rows, which have no such buffers.
        """
        written = {buffer.kind for program in schedule.programs for action in program for buffer in action.writes}
        sizes = {Kind.OFFLOADED: self.boundary, Kind.OFFLOADED_ATTENTION: self.kept.get(Kind.ATTENTION, 0)}
        return sum(round(STAGED[kind] * chunk * size) for kind, size in sizes.items() if kind in written)


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Memory of one step in bytes, of the process that needs most.

    Args:
        home_bytes: master weights, gradients, optimizer state and weights that travel, at home on the device. With
            homes in CPU memory: only the weights that travel, and buffers through which the rest passes.
        buffer_bytes: buffers of units and shards that travel, of coded messages, and of dequantised units.
        activation_bytes: block inputs, their gradients, and what layers keep in addition.
        working_bytes: temporary memory of the computing block, if known. Then ``activation_bytes`` and
            ``working_bytes`` are from the moment at which their sum is largest.
        host_bytes: CPU memory of offloaded activations, of homes, and of exact values of frozen units that the compute
            dtype rounds.
        file_bytes: activations in files.
        rank: rank whose device memory this is.
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
        """Return a line with the memory of a process by part, in MiB."""
        names = ("home", "buffer", "activation", "working", "host", "file")
        sizes = {name: getattr(self, f"{name}_bytes") for name in names}
        held = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in sizes.items() if size)
        return f"MiB of a process: {held}"


@dataclass(frozen=True, kw_only=True)
class Costs(StepMemory):
    """Costs of one step: memory, and traffic of links.

    Args:
        parameters: number of parameters.
        trainable: number of trained parameters.
        strategy: description of the strategy.
        schedule: description of the schedule.
        link_sent_bytes: for every node the bytes that it sends to other nodes.
        link_received_bytes: for every node the bytes that it receives from other nodes.
    """

    parameters: int
    trainable: int
    strategy: str
    schedule: str
    link_sent_bytes: tuple[int, ...]
    link_received_bytes: tuple[int, ...]

    def __repr__(self) -> str:
        """Return a line with the memory of a process by part and the traffic of the busiest link."""
        sent = max(self.link_sent_bytes, default=0)
        return f"Costs({self.strategy}: {self.parts()}; the busiest link sends {sent / 1e6:.1f} MB a step)"


def far_widths(settings: ScheduleSettings, widths: Widths, *, step: StepSpec | None = None) -> tuple[float, float]:
    """Return the mean bytes that one element of weights, and one of gradients, takes between nodes.

    If weights travel as changes, frozen weights do not travel, which lowers the mean over all weights.

    Args:
        settings: settings with the compression.
        widths: bytes of one element without compression.
        step: the step; None if unknown.
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
    """Return the memory that a step of ``schedule`` needs, on the rank whose device needs most.

    CPU memory and file space are the largest of all ranks.

    Args:
        schedule: the schedule.
        widths: bytes of one element.
        activation_bytes: bytes of one activation of every kind, see ``peak_activations``.
        working: function that returns the temporary memory (bytes) of an action.
        absent: for every rank, bytes that its device has less than the largest one. They count as needed when the rank
            is chosen, but are not in the result. Empty if equal.
        shares: shares of activations that do not have the usual size.
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
    """Return the bytes of the homes of ``rank``: (on its device, in CPU memory).

    With homes in CPU memory, the device has buffers through which portions of them pass; these are included."""
    on_device = in_host = 0.0
    elements, width, several = 0, 0, False
    """Elements and bytes per element of a portion, and True if there are two portions at one time. A unit that is not
    larger than a portion needs only one buffer."""
    step, copies = schedule.step, schedule.step.copies_in_host
    updates = (action for action in schedule.programs[rank] if action.op is Op.UPDATE)
    passing = {action.unit for action in updates if any(buffer.kind is Kind.LANDING for buffer in action.reads)}
    for number, (home, unit) in enumerate(zip(schedule.homes, schedule.model.units, strict=True)):
        if home.index(rank) is None:
            continue
        on_device += home.shard_size * widths.on_device(number, step.settings.host_homes, trainable=unit.trainable)
        if not step.homes_in_host or not (unit.trainable or copies):
            continue
        gradient = number not in passing
        in_host += home.shard_size * widths.host(number, trainable=unit.trainable, copies=copies, gradient=gradient)
        if unit.trainable:
            different = widths.weight != widths.master
            # A unit whose matrices pass whole has several portions.
            several |= home.shard_size > min(widths.slice, PORTION_SIZE)
            elements = max(elements, min(home.shard_size, widths.slice))
            tensors = ceil(widths.state(number) / widths.master)
            width = max(width, tensors * widths.master + (widths.weight if copies and different else 0))
    return ceil(on_device) + (LOAD_BUFFERS if several else 1) * elements * width, ceil(in_host)


def held_apart(schedule: Schedule, rank: int, sizes: Mapping[Kind, int], shares: Shares = ALIKE) -> int:
    """Return the bytes that a GPU's allocator reserves in addition to the peak of activations.

    Several streams need more. Memory that was allocated on one stream is never used for another stream. Memory that
    another stream has used is only free when that stream is done with it. So every lane on which activations arrive has
    memory of its own, up to its own peak. The last activations that were received or sent there may still be in use.

    Args:
        schedule: the schedule.
        rank: the rank.
        sizes: bytes of one activation of every kind.
        shares: shares of activations that do not have the usual size.
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


def early_receive_bytes(schedule: Schedule, rank: int, sizes: Mapping[Kind, int], shares: Shares = ALIKE) -> int:
    """Return the bytes of activations that gloo allocates for receives that are posted early.

    Args:
        schedule: the schedule.
        rank: the rank.
        sizes: bytes of one activation of every kind.
        shares: shares of activations that do not have the usual size.
    """
    largest = dict[Lane, int]()
    for action in schedule.programs[rank]:
        if action.begins_early and action.writes[0].is_activation:
            size = sum(size_in(sizes, shares, buffer) for buffer in action.writes)
            largest[action.lane] = max(largest.get(action.lane, 0), size)
    return sum(size * (most_early_receives(size) - 1) for size in largest.values())


def costs(
    schedule: Schedule,
    widths: Widths,
    *,
    activation_bytes: Mapping[Kind, int],
    working: Callable[[Action], int] = lambda _: 0,
    nodes: Topology | None = None,
) -> Costs:
    """Return the costs of a step: memory of the process that needs most, and traffic of every node's link.

    Args:
        schedule: the schedule.
        widths: bytes of one element.
        activation_bytes: bytes of one activation of every kind, see ``peak_activations``.
        working: function that returns the temporary memory (bytes) of an action.
        nodes: the real nodes, if the schedule was built for others.
    """
    traffic = link_elements(schedule, physical=nodes)
    settings, units = schedule.step.settings, schedule.model.units
    far, passed = far_widths(settings, widths, step=schedule.step), borders_passed(schedule, physical=nodes)
    border, links = activation_bytes.get(Kind.INPUT, 0), [*zip(traffic, passed, strict=True)]
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
        link_sent_bytes=tuple(link.bytes_sent(*far) + sent * border for link, (sent, _) in links),
        link_received_bytes=tuple(link.bytes_received(*far) + received * border for link, (_, received) in links),
    )


def _in_words(schedule: Schedule) -> str:
    """Return a phrase with the number of micro-batches and how they are computed."""
    many = count(len(schedule.micro_batches), "micro-batch", "micro-batches")
    return f"{many} {schedule.step.strategy.in_words(schedule.step)}"


def count(number: int, singular: str, many: str | None = None) -> str:
    """Return a number with its noun in singular or plural.

    >>> count(1, "round"), count(2, "round")
    ('1 round', '2 rounds')
    """
    return f"{number} {singular if number == 1 else many or singular + 's'}"
