"""Costs of actions: seconds of compute; latency, bandwidth and sharing of links."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tawpipe.dealing.balance import Bins, pairs_within
from tawpipe.errors import UserError
from tawpipe.schedule.actions import Action
from tawpipe.schedule.buffers import OUTSIDE, Kind
from tawpipe.schedule.spec import EXACT_WIDTH, share_bins

KEYS_SHARE = 0.04
"""Of a layer's linear work in its forward pass, what comes before its attention: 3 % where keys and values are a
quarter of the heads, 6 % where they are as many."""
ID_BYTES = 8
"""Of a token that was drawn."""
REDUCE_SCATTERS = ("pairwise", "ring")


@dataclass(frozen=True)
class LinkModel:
    """A kind of link.

    Args:
        bytes_per_s: of payload, in one direction (both together where ``full_duplex`` is off); ``math.inf`` for a link
            that costs its latency only.
        latency_s: from the moment at which both sides are ready to the first byte's arrival; link and sender stay free.
        full_duplex: whether the two directions do not take bandwidth from each other.
        shared: one link for all ranks of a node (a network card, a loopback device, a PCIe root); off: one per rank
            (NVLink, a card per device). A message inside a node passes a shared link once, out and in together.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    full_duplex: bool = True
    shared: bool = True

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise UserError("link bytes_per_s", self.bytes_per_s, "more than 0")
        if not 0 <= self.latency_s < math.inf:
            raise UserError("link latency_s", self.latency_s, "0 or more")

    def node_rate(self, devices: int) -> float:
        """Bytes per second in one direction of a node with so many devices."""
        return self.bytes_per_s * (1 if self.shared else devices)

    def busy_s(self, devices: int, sent: float, received: float) -> float:
        """Seconds that so many bytes out and in keep the link of a node busy."""
        return (max(sent, received) if self.full_duplex else sent + received) / self.node_rate(devices)


@dataclass(frozen=True)
class CodingTimes:
    """Seconds for an element of what travels coded without loss, of one core or device.

    Args:
        count: of a weight, to see by how much it has changed.
        change, gradient: to write the change of a weight, or a gradient; and to read it.
    """

    count: float = 0.0
    change: tuple[float, float] = (0.0, 0.0)
    gradient: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class MicroBatchSize:
    """The work of a micro-batch.

    Args:
        tokens: in it.
        pairs: the sum over its documents of the squared length, which attention grows with.
        within: (window, pairs), where a token sees no more than a window.
        lengths: different ones among its documents: the calls of a layer that takes documents in turn.
    """

    tokens: float = 1.0
    pairs: float = 1.0
    within: tuple[tuple[int, float], ...] = ()
    lengths: int = 1

    def times(self, factor: float) -> MicroBatchSize:
        """So many times as much of the same documents."""
        within = tuple((window, pairs * factor) for window, pairs in self.within)
        return replace(self, tokens=self.tokens * factor, pairs=self.pairs * factor, within=within)

    def seen(self, window: int | None) -> MicroBatchSize:
        """The same for a layer with this window."""
        return replace(self, pairs=dict(self.within).get(window, self.pairs), within=()) if window else self


def size_of(lengths: Sequence[int], windows: Iterable[int] = ()) -> MicroBatchSize:
    """The size of a micro-batch with documents of these lengths, for layers with these windows.

    >>> size_of([3, 4])
    MicroBatchSize(tokens=7, pairs=25, within=(), lengths=2)
    """
    within = tuple((window, sum(pairs_within(length, window) for length in lengths)) for window in windows)
    return MicroBatchSize(sum(lengths), sum(map(pairs_within, lengths)), within, len(set(lengths)))


def mean_size(micro_batches: Sequence[Sequence[int]], windows: Iterable[int] = ()) -> MicroBatchSize:
    """The mean size of micro-batches with documents of these lengths.

    >>> mean_size([[3], [1, 1]])
    MicroBatchSize(tokens=2.5, pairs=5.5, within=(), lengths=1)
    """
    sizes, count = [size_of(lengths, windows) for lengths in micro_batches], len(micro_batches)
    within = tuple(
        (size[0][0], sum(pairs for _, pairs in size) / count) for size in zip(*(s.within for s in sizes), strict=True)
    )
    tokens, pairs = (sum(getattr(size, name) for size in sizes) / count for name in ("tokens", "pairs"))
    return MicroBatchSize(tokens, pairs, within, round(sum(size.lengths for size in sizes) / count))


def slice_of(begin: int, end: int, windows: Iterable[int] = ()) -> MicroBatchSize:
    """The size of tokens ``begin`` to ``end`` of a document.

    >>> slice_of(3, 7)
    MicroBatchSize(tokens=4, pairs=40, within=(), lengths=1)
    """
    within = tuple((window, pairs_within(end, window) - pairs_within(begin, window)) for window in windows)
    return MicroBatchSize(end - begin, pairs_within(end) - pairs_within(begin), within)


@dataclass(frozen=True)
class Seconds:
    """A time that grows with the micro-batch: ``fixed + per_token * tokens + per_pair * pairs``; nothing for none.
    Where documents are taken ``in_turn`` the fixed part is that of each call.
    """

    fixed: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0
    in_turn: bool = False

    def of(self, size: MicroBatchSize) -> float:
        fixed = self.fixed * (size.lengths if self.in_turn else 1)
        return fixed + self.per_token * size.tokens + self.per_pair * size.pairs if size.tokens else 0.0

    def times(self, factor: float) -> Seconds:
        return Seconds(self.fixed * factor, self.per_token * factor, self.per_pair * factor, self.in_turn)


@dataclass(frozen=True)
class BlockCost:
    """Seconds of one block on one micro-batch.

    Args:
        forward: for the head of an evaluation, with the loss.
        backward: with the recomputation; for the head the loss, its forward pass included.
        attention: of ``forward``, what selective recomputation does not compute again.
        window: tokens that a token sees at most; ``pairs`` are those within.
        unpack_s: of its packed units, which are dequantised once for all micro-batches of a visit.
        backward_weight: of ``backward``, the gradients of weights, where a pipeline computes them apart; None for half
            of what is no recomputation.
    """

    forward: Seconds = Seconds()
    backward: Seconds = Seconds()
    attention: Seconds = Seconds()
    window: int | None = None
    unpack_s: float = 0.0
    backward_weight: Seconds | None = None

    @classmethod
    def timed(
        cls, forward_s: float, backward_s: float, backward_weight_s: float | None = None, *, linear: float = 0.0
    ) -> BlockCost:
        """A block of the lab's timed workload, on one micro-batch of the usual size.

        Args:
            linear: share that grows with the tokens; the rest grows with their pairs.
        """

        # By pairs of tokens: ranks that compute a micro-batch together share them, and keys alone cost nothing.
        def split(seconds: float) -> Seconds:
            return Seconds(0.0, linear * seconds, (1 - linear) * seconds)

        weight = None if backward_weight_s is None else split(backward_weight_s)
        return cls(split(forward_s), split(backward_s), backward_weight=weight)

    def times(self, factor: float) -> BlockCost:
        """The same on a device that takes so many times as long."""
        return replace(
            self,
            forward=self.forward.times(factor),
            backward=self.backward.times(factor),
            attention=self.attention.times(factor),
            unpack_s=self.unpack_s * factor,
            backward_weight=self.backward_weight and self.backward_weight.times(factor),
        )


@dataclass(frozen=True)
class CostModel:
    """Everything that the clock needs besides the schedule.

    Args:
        blocks: one per block of the model, the embedding first and the head last.
        between, inside: links between nodes and inside a node.
        between_of: links of single nodes that differ from ``between``. A transfer is bound by both its ends.
        weight_bytes, gradient_bytes: of an element that travels.
        update_s: of the optimizer, for one element at home; ``update_of`` of every unit, where they differ.
        add_s: of one addition of a gradient element, where it arrives (ADD, and inside reductions).
        action_s: added to every action: handing it to its lane, and what its call costs whatever it does.
        sizes: of micro-batches, by their global index; ``size`` for all others.
        compute_factor: by rank, multiplies the seconds of its COMPUTE lane: 2.0 for a device that is half as fast.
        reduce_scatter: ``pairwise``, every rank sends every other its piece, as the runtime does on gloo; ``ring``, as
            NCCL does. They move equal bytes where every member is on a node of its own; over a group with several
            members on a node the ring moves fewer between the nodes.
        host: between a device and its host's memory, or its disk if rows wait there; every rank has one.
        homes: between a device and homes in its host's memory, while all devices of the node use it.
        master_bytes, optimizer_states: see ``Widths``; for homes in the host's memory.
        boundary_bytes: of a boundary activation, for every token.
        kept_bytes, graph_bytes: of what selective recomputation, or none, keeps of a layer, for every token.
        key_elements: of a layer's keys and values, for every token.
        ranks: that compute a micro-batch together, see ``in_sets``.
        shared: only those below this number; None for all.
        kept: by micro-batch, blocks that compute nothing again because they keep it.
        coding: of what travels coded without loss; change_bytes: of a weight that travels as it has changed.
        summands: see ``StepSpec``; those of the step that is played by default, which may stand for a longer one.
    """

    blocks: tuple[BlockCost, ...]
    between: LinkModel
    inside: LinkModel
    between_of: Mapping[int, LinkModel] = field(default_factory=dict)
    weight_bytes: int = 4
    gradient_bytes: int = 4
    update_s: float = 0.0
    update_of: tuple[float, ...] = ()
    add_s: float = 0.0
    action_s: float = 0.0
    size: MicroBatchSize = MicroBatchSize()
    sizes: Mapping[int, MicroBatchSize] = field(default_factory=dict)
    compute_factor: Mapping[int, float] = field(default_factory=dict)
    reduce_scatter: str = "pairwise"
    host: LinkModel = LinkModel(math.inf)
    homes: LinkModel = LinkModel(math.inf)
    master_bytes: int = 4
    optimizer_states: float | tuple[float, ...] = 2.0
    boundary_bytes: int = 0
    kept_bytes: float = 0.0
    graph_bytes: float = 0.0
    key_elements: int = 0
    ranks: int = 1
    shared: int | None = None
    kept: Mapping[int, Collection[int]] = field(default_factory=dict)
    coding: CodingTimes = CodingTimes()
    change_bytes: float = EXACT_WIDTH
    summands: int | None = None

    def __post_init__(self) -> None:
        for name in ("weight_bytes", "gradient_bytes"):
            if getattr(self, name) < 1:
                raise UserError(f"costs.{name}", getattr(self, name), "at least 1")
        for name in ("update_s", "add_s", "action_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"costs.{name}", getattr(self, name), "0 or more")
        if self.reduce_scatter not in REDUCE_SCATTERS:
            raise UserError("costs.reduce_scatter", self.reduce_scatter, f"one of {', '.join(REDUCE_SCATTERS)}")

    @classmethod
    def timed(
        cls,
        *,
        layers: int,
        forward_s: float,
        backward_s: float,
        between: LinkModel,
        inside: LinkModel,
        head_s: float = 0.0,
        linear: float = 0.0,
        **settings: Any,
    ) -> CostModel:
        """A model of ``layers`` equal layers, an embedding that takes no time, and a head.

        Args:
            forward_s: of a layer and micro-batch.
            backward_s: both gradients and the recomputation.
            head_s: of the loss and its gradients.
            linear: share of a layer's seconds that grows with the tokens; the rest grows with their pairs.
            settings: other fields of the model.
        """
        layer = BlockCost.timed(forward_s, backward_s, linear=linear)
        return cls((BlockCost(), *[layer] * layers, BlockCost.timed(0.0, head_s)), between, inside, **settings)

    def node_link(self, node: int) -> LinkModel:
        return self.between_of.get(node, self.between)

    def in_sets(self, ranks: int, shared: int | None = None) -> CostModel:
        """The same for micro-batches of which every rank has a share, because so many compute one together: for those
        below the number ``shared``, or all.
        """
        return replace(self, ranks=ranks, shared=shared)

    @property
    def windows(self) -> tuple[int, ...]:
        """Windows of its layers, ascending."""
        return tuple(sorted({block.window for block in self.blocks if block.window}))

    def with_bins(self, bins: Bins) -> CostModel:
        """The same for a dealt step: every micro-batch is as large as its bin."""
        sizes: dict[int, MicroBatchSize] = {}
        for rank, numbers in enumerate(share_bins(*bins.shape, bins.world_size, bins.ranks)):
            for number, row in zip(numbers, bins.of(rank), strict=True):
                if number not in sizes:
                    sizes[number] = size_of([bins.lengths[document] for document in row.documents], self.windows)
                    if row.part is not None:
                        sizes[number] = slice_of(*row.part, self.windows)
        return replace(self, sizes=sizes)

    def without_overheads(self) -> CostModel:
        """The same without latencies and what an action costs besides its work: for bounds."""
        return replace(
            self,
            between=replace(self.between, latency_s=0.0),
            inside=replace(self.inside, latency_s=0.0),
            between_of={node: replace(link, latency_s=0.0) for node, link in self.between_of.items()},
            add_s=0.0,
            action_s=0.0,
            coding=CodingTimes(),
        )

    def forward_s(self, rank: int, block: int, micro_batch: int) -> float:
        cost = self._block(block)
        return cost.forward.of(self._size(micro_batch, cost.window)) * self.compute_factor.get(rank, 1.0)

    def backward_s(self, rank: int, block: int, micro_batch: int, recompute: str = "full") -> float:
        """Seconds of a backward pass that computes again what ``recompute`` says."""
        cost = self._block(block)
        size = self._size(micro_batch, cost.window)
        recompute = "none" if block in self.kept.get(micro_batch, ()) else recompute
        saved = {"full": Seconds(), "selective": cost.attention, "none": cost.forward}[recompute]
        return (cost.backward.of(size) - saved.of(size)) * self.compute_factor.get(rank, 1.0)

    def unpack_s(self, rank: int, block: int) -> float:
        """Seconds of a visit in which a block's packed units are dequantised."""
        return self._block(block).unpack_s * self.compute_factor.get(rank, 1.0)

    def keys_s(self, rank: int, block: int, micro_batch: int) -> float:
        """Seconds of a layer's forward pass as far as its keys and values; what attention takes is no part of it."""
        cost = self._block(block).forward
        linear = replace(cost, per_pair=0.0).of(self._size(micro_batch))
        return KEYS_SHARE * linear * self.compute_factor.get(rank, 1.0)

    def keys_bytes(self, micro_batch: int, *, gradients: bool) -> float:
        """Bytes of keys and values of all tokens of a micro-batch in a layer; their gradients are fp32 at least."""
        width = max(4, self.weight_bytes) if gradients else self.weight_bytes
        return self.key_elements * width * self._size(micro_batch).tokens * self._ranks(micro_batch)

    def backward_weight_s(self, rank: int, block: int, micro_batch: int) -> float:
        """Seconds of a backward pass for the gradients of weights, see ``BlockCost``."""
        cost = self._block(block)
        if cost.backward_weight is not None:
            size = self._size(micro_batch, cost.window)
            return cost.backward_weight.of(size) * self.compute_factor.get(rank, 1.0)
        forward = self.forward_s(rank, block, micro_batch)
        return max(0.0, self.backward_s(rank, block, micro_batch) - forward) / 2

    def boundary(self, micro_batch: int) -> float:
        """Bytes of a boundary activation: a block's input, or its gradient."""
        return self.boundary_bytes * self._size(micro_batch).tokens

    def drawn(self, group: int) -> float:
        """Bytes in which what was drawn for a group of a lap travels."""
        return ID_BYTES * self._size(group).tokens

    def waiting(self, action: Action) -> float:
        """Bytes that an OFFLOAD or RELOAD moves."""
        used = (*action.reads, *action.writes)
        kind = next((buffer.kind for buffer in used if buffer.kind in OUTSIDE), Kind.OFFLOADED)
        each = {Kind.OFFLOADED_ATTENTION: self.kept_bytes, Kind.OFFLOADED_GRAPH: self.graph_bytes}
        return each.get(kind, self.boundary_bytes) * self._size(action.micro_batch).tokens

    def host_s(self, action: Action) -> float:
        """Seconds in which it passes between a device and its host."""
        return self.host.latency_s + self.waiting(action) / self.host.bytes_per_s

    def streaming_s(self, action: Action, *, passes: int = 1) -> float:
        """Seconds in which rows come and go by chunk while an action computes.

        Args:
            passes: how often it reads its input.
        """
        if not any(buffer.kind in OUTSIDE for buffer in (*action.reads, *action.writes)):
            return 0.0
        each = {Kind.OFFLOADED: float(self.boundary_bytes), Kind.OFFLOADED_ATTENTION: self.kept_bytes}
        read = sum(
            each[buffer.kind] * (passes if buffer.kind is Kind.OFFLOADED else 1)
            for buffer in action.reads
            if buffer.kind in each
        )
        written = sum(each[buffer.kind] for buffer in action.writes if buffer.kind in each)
        if not read and not written:
            return 0.0
        tokens = self._size(action.micro_batch).tokens
        return self.host.latency_s + self.host.busy_s(1, written * tokens, read * tokens)

    def streamed_update_bytes(self, elements: int, unit: int, *, lands: bool, copies: bool) -> tuple[float, float]:
        """Bytes that the update of elements in the host's memory brings to the device, and that it takes back.

        Args:
            lands: the gradient comes from home; otherwise it is on the device.
            copies: what travels is in the host's memory, too.
        """
        states = self.optimizer_states[unit] if isinstance(self.optimizer_states, tuple) else self.optimizer_states
        copy = self.weight_bytes if copies and self.weight_bytes != self.master_bytes else 0
        kept = self.master_bytes * (1 + states)
        return elements * (kept + self.master_bytes * lands), elements * (kept + copy)

    def update_seconds(self, rank: int, elements: int, unit: int) -> float:
        each = self.update_of[unit] if self.update_of else self.update_s
        return each * elements * self.compute_factor.get(rank, 1.0)

    def _block(self, block: int) -> BlockCost:
        if block >= len(self.blocks):
            raise UserError("costs.blocks", f"{len(self.blocks)} blocks", f"costs of block {block} as well")
        return self.blocks[block]

    def _ranks(self, micro_batch: int) -> int:
        return self.ranks if self.shared is None or micro_batch < self.shared else 1

    def _size(self, micro_batch: int, window: int | None = None) -> MicroBatchSize:
        """Of a rank's share, for a layer with this window."""
        size, ranks = self.sizes.get(micro_batch, self.size).seen(window), self._ranks(micro_batch)
        return size if ranks == 1 else size.times(1 / ranks)
