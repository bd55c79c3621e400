"""Costs of actions: seconds of compute; latency, bandwidth and sharing of links."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tawpipe.dealing.balance import Packs, pairs_within
from tawpipe.errors import UserError
from tawpipe.schedule.actions import Action
from tawpipe.schedule.buffers import OUTSIDE, Kind
from tawpipe.schedule.settings import ELEMENTWISE
from tawpipe.schedule.spec import EXACT_WIDTH, share_packs

KEYS_SHARE = 0.04
"""Share of a layer's linear forward work that precedes attention: 3 % where keys and values are a quarter of the heads,
6 % where they are as many."""
ID_BYTES = 8
"""Bytes of a sampled token."""
REDUCE_SCATTERS = ("pairwise", "ring")
ELEMENTWISE_SHARE = 0.15
"""Part of a layer's forward pass that computes norms and gates. Estimated from the bytes that they move on an H100: 0.2
with the code of an 8 B Llama, 0.1 with fused kernels. Not yet measured."""


@dataclass(frozen=True)
class LinkModel:
    """Kind of link.

    Args:
        bytes_per_s: payload rate in one direction (of both directions together without ``full_duplex``); ``math.inf``
            for a link that costs its latency only.
        latency_s: seconds from the moment at which both sides are ready until the first byte arrives. Link and sender
            are free during this time.
        full_duplex: True if the two directions do not take bandwidth from each other.
        shared: True for one link for all ranks of a node (a network card, a loopback device, a PCIe root); False for
            one per rank (NVLink, a card per device). A message inside a node passes a shared link once, which counts as
            both out and in.
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
        """Return the bytes per second in one direction of all links of a node with ``devices`` devices together."""
        return self.bytes_per_s * (1 if self.shared else devices)

    def busy_s(self, devices: int, sent: float, received: float) -> float:
        """Return the seconds in which the links of a node carry ``sent`` and ``received`` bytes, without latency."""
        return (max(sent, received) if self.full_duplex else sent + received) / self.node_rate(devices)


@dataclass(frozen=True)
class CodingTimes:
    """Seconds of lossless coding for one element, on one core or device.

    Args:
        count: to determine by how much a weight has changed.
        change: to write the change of a weight, and to read it.
        gradient: to write a gradient, and to read it.
    """

    count: float = 0.0
    change: tuple[float, float] = (0.0, 0.0)
    gradient: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class MicroBatchSize:
    """Work of a micro-batch.

    Args:
        tokens: number of tokens.
        pairs: sum of the squared lengths of its documents; attention grows with it.
        within: pairs of a window and the value of ``pairs`` where a token sees no more than that window.
        lengths: number of distinct lengths of its documents; a layer that takes documents in turn makes one call for
            each.
    """

    tokens: float = 1.0
    pairs: float = 1.0
    within: tuple[tuple[int, float], ...] = ()
    lengths: int = 1

    def times(self, factor: float) -> MicroBatchSize:
        """Return the size of a micro-batch with ``factor`` times as many documents of the same lengths."""
        within = tuple((window, pairs * factor) for window, pairs in self.within)
        return replace(self, tokens=self.tokens * factor, pairs=self.pairs * factor, within=within)

    def seen(self, window: int | None) -> MicroBatchSize:
        """Return the size for a layer with this window, which has fewer pairs; with None the size itself."""
        return replace(self, pairs=dict(self.within).get(window, self.pairs), within=()) if window else self


def size_of(lengths: Sequence[int], windows: Iterable[int] = ()) -> MicroBatchSize:
    """Return the size of a micro-batch with documents of these lengths.

    Args:
        windows: attention windows of the layers, for ``MicroBatchSize.within``.

    >>> size_of([3, 4])
    MicroBatchSize(tokens=7, pairs=25, within=(), lengths=2)
    """
    within = tuple((window, sum(pairs_within(length, window) for length in lengths)) for window in windows)
    return MicroBatchSize(sum(lengths), sum(map(pairs_within, lengths)), within, len(set(lengths)))


def mean_size(micro_batches: Sequence[Sequence[int]], windows: Iterable[int] = ()) -> MicroBatchSize:
    """Return the mean size of micro-batches, each given by the lengths of its documents.

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
    """Return the size of tokens ``begin`` to ``end`` of a document.

    >>> slice_of(3, 7)
    MicroBatchSize(tokens=4, pairs=40, within=(), lengths=1)
    """
    within = tuple((window, pairs_within(end, window) - pairs_within(begin, window)) for window in windows)
    return MicroBatchSize(end - begin, pairs_within(end) - pairs_within(begin), within)


@dataclass(frozen=True)
class Seconds:
    """Seconds that grow with the micro-batch: ``fixed + per_token * tokens + per_pair * pairs``; 0 without tokens.

    With ``in_turn`` the fixed part is taken for each call, of which there is one per distinct length."""

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
        forward: forward pass; for the head of an evaluation with the loss.
        backward: backward pass with full recomputation; for the head the loss with its forward pass.
        attention: part of ``forward`` that selective recomputation saves.
        window: most tokens that a token attends to; ``pairs`` are counted within it.
        unpack_s: dequantisation of its packed units, once for all micro-batches of a visit.
        backward_weight: part of ``backward`` for gradients of weights, where a pipeline computes them separately; None
            for half of ``backward`` without recomputation.
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
        """Return a block of the lab's timed workload, on one micro-batch of the usual size.

        Args:
            linear: share of the time that grows with the tokens; the rest grows with their pairs.
        """

        # Time grows with pairs, so that context-parallel ranks share it, and keys alone cost nothing.
        def split(seconds: float) -> Seconds:
            return Seconds(0.0, linear * seconds, (1 - linear) * seconds)

        weight = None if backward_weight_s is None else split(backward_weight_s)
        return cls(split(forward_s), split(backward_s), backward_weight=weight)

    def times(self, factor: float) -> BlockCost:
        """Return the cost with all seconds multiplied by ``factor``, for a slower or faster device."""
        return replace(
            self,
            forward=self.forward.times(factor),
            backward=self.backward.times(factor),
            attention=self.attention.times(factor),
            unpack_s=self.unpack_s * factor,
            backward_weight=self.backward_weight and self.backward_weight.times(factor),
        )

    def with_attention(self, factor: float) -> BlockCost:
        """Return the cost with ``factor`` times the time of attention over all pairs; unchanged with a window."""
        if self.window or factor == 1:
            return self
        names = ("forward", "backward", "attention")
        parts = {name: getattr(self, name) for name in names}
        return replace(self, **{name: replace(of, per_pair=of.per_pair * factor) for name, of in parts.items()})


@dataclass(frozen=True)
class CostModel:
    """Everything that the simulation needs besides the schedule.

    Args:
        blocks: one per block of the model, the embedding first and the head last.
        between, inside: links between nodes and inside a node.
        between_of: links of single nodes that differ from ``between``. A transfer is limited by both its ends.
        weight_bytes, gradient_bytes: bytes of an element that travels.
        update_s: seconds of the optimizer for one element at home.
        update_of: seconds of the optimizer for one element of every unit; empty if all are equal.
        add_s: seconds of one addition of a gradient element, where it arrives (ADD, and inside reductions).
        action_s: seconds added to every action, for issuing it and the fixed cost of its call.
        size: size of all micro-batches that are not in ``sizes``.
        sizes: sizes of micro-batches, by their global index.
        compute_factor: by rank, multiplies the seconds of its COMPUTE lane: 2.0 for a device that is half as fast.
        reduce_scatter: ``pairwise``, every rank sends every other its piece, as the runtime does on gloo; ``ring``, as
            NCCL does. Both move equal bytes if every member is on its own node. In a group with several members on a
            node the ring moves fewer bytes between nodes.
        host: link between a device and its host's memory, or its disk if rows are offloaded there; every rank has one.
        homes: link between a device and homes in its host's memory, while all devices of the node use it.
        master_bytes, optimizer_states: see ``Widths``; for homes in host memory.
        boundary_bytes: bytes of a boundary activation per token.
        kept_bytes, graph_bytes, products_bytes: bytes that a layer keeps per token, with selective recomputation, with
            none, and with that of norms and gates.
        key_elements: elements of a layer's keys and values per token.
        ranks: ranks that compute a micro-batch together, see ``with_cp_groups``.
        shared: micro-batches below this number are computed by several ranks; None for all.
        kept: by micro-batch, the blocks that recompute nothing because they keep their activations.
        coding: seconds of lossless coding.
        change_bytes: bytes of a weight that is sent as its change.
        summands: see ``StepSpec``; None for the value of the simulated step, which may be shorter than the real one.
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
    products_bytes: float = 0.0
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
        """Return the costs of ``layers`` equal layers, an embedding that takes no time, and a head.

        Args:
            layers: number of layers.
            forward_s: forward pass of a layer on a micro-batch.
            backward_s: backward pass, with both gradients and the recomputation.
            between, inside: links between nodes and inside a node.
            head_s: loss and its gradients.
            linear: share of a layer's seconds that grows with the tokens; the rest grows with their pairs.
            settings: other fields of the cost model.
        """
        layer = BlockCost.timed(forward_s, backward_s, linear=linear)
        return cls((BlockCost(), *[layer] * layers, BlockCost.timed(0.0, head_s)), between, inside, **settings)

    def node_link(self, node: int) -> LinkModel:
        return self.between_of.get(node, self.between)

    def with_cp_groups(self, ranks: int, shared: int | None = None) -> CostModel:
        """Return a copy in which ``ranks`` ranks compute a micro-batch together, an equal share each.

        Args:
            ranks: ranks of a context-parallel group.
            shared: only micro-batches below this number are split; None for all.
        """
        return replace(self, ranks=ranks, shared=shared)

    @property
    def windows(self) -> tuple[int, ...]:
        """Attention windows of the layers, ascending."""
        return tuple(sorted({block.window for block in self.blocks if block.window}))

    def with_packs(self, packs: Packs) -> CostModel:
        """Return a copy in which micro-batches have the sizes of the packed micro-batches in ``packs``.

        Numbers of micro-batches are those of ``share_packs``."""
        sizes: dict[int, MicroBatchSize] = {}
        for rank, numbers in enumerate(share_packs(*packs.shape, packs.world_size, packs.ranks)):
            for number, row in zip(numbers, packs.of(rank), strict=True):
                if number not in sizes:
                    sizes[number] = size_of([packs.lengths[document] for document in row.documents], self.windows)
                    if row.part is not None:
                        sizes[number] = slice_of(*row.part, self.windows)
        return replace(self, sizes=sizes)

    def without_overheads(self) -> CostModel:
        """Return a copy without latencies, additions, coding and fixed costs of actions, for lower bounds."""
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
        """Return the seconds of a block's backward pass on a micro-batch, with its recomputation.

        Args:
            rank: the rank.
            block: index of the block.
            micro_batch: index of the micro-batch.
            recompute: one of ``RECOMPUTE``. Blocks in ``kept`` recompute nothing in any case.
        """
        cost = self._block(block)
        size = self._size(micro_batch, cost.window)
        recompute = "none" if block in self.kept.get(micro_batch, ()) else recompute
        saved = {"full": Seconds(), "selective": cost.attention, "none": cost.forward}
        saved[ELEMENTWISE] = cost.forward.times(1 - ELEMENTWISE_SHARE)
        return (cost.backward.of(size) - saved[recompute].of(size)) * self.compute_factor.get(rank, 1.0)

    def unpack_s(self, rank: int, block: int) -> float:
        """Return the seconds in which ``rank`` dequantises a block's packed units once, as for every visit."""
        return self._block(block).unpack_s * self.compute_factor.get(rank, 1.0)

    def keys_s(self, rank: int, block: int, micro_batch: int) -> float:
        """Return the seconds in which a layer computes its keys and values in the forward pass, without attention."""
        cost = self._block(block).forward
        linear = replace(cost, per_pair=0.0).of(self._size(micro_batch))
        return KEYS_SHARE * linear * self.compute_factor.get(rank, 1.0)

    def keys_bytes(self, micro_batch: int, *, gradients: bool) -> float:
        """Return the bytes of a layer's keys and values for all tokens of a micro-batch, over all its ranks.

        Args:
            micro_batch: index of the micro-batch.
            gradients: True for their gradients, which are at least fp32.
        """
        width = max(4, self.weight_bytes) if gradients else self.weight_bytes
        return self.key_elements * width * self._size(micro_batch).tokens * self._ranks(micro_batch)

    def backward_weight_s(self, rank: int, block: int, micro_batch: int) -> float:
        """Return the seconds of the part of a backward pass that computes gradients of weights (``BlockCost``)."""
        cost = self._block(block)
        if cost.backward_weight is not None:
            size = self._size(micro_batch, cost.window)
            return cost.backward_weight.of(size) * self.compute_factor.get(rank, 1.0)
        forward = self.forward_s(rank, block, micro_batch)
        return max(0.0, self.backward_s(rank, block, micro_batch) - forward) / 2

    def boundary(self, micro_batch: int) -> float:
        """Return the bytes of a boundary activation (a block's input, or its gradient) of a micro-batch on one rank."""
        return self.boundary_bytes * self._size(micro_batch).tokens

    def drawn(self, group: int) -> float:
        """Return the bytes of the sampled tokens of one group of a decode step."""
        return ID_BYTES * self._size(group).tokens

    def waiting(self, action: Action) -> float:
        """Return the bytes of activations that an OFFLOAD or RELOAD moves between device and host."""
        used = (*action.reads, *action.writes)
        kind = next((buffer.kind for buffer in used if buffer.kind in OUTSIDE), Kind.OFFLOADED)
        each = {Kind.OFFLOADED_ATTENTION: self.kept_bytes, Kind.OFFLOADED_GRAPH: self.graph_bytes}
        each[Kind.OFFLOADED_PRODUCTS] = self.products_bytes
        return each.get(kind, self.boundary_bytes) * self._size(action.micro_batch).tokens

    def host_s(self, action: Action) -> float:
        """Return the seconds in which an OFFLOAD or RELOAD passes between a device and its host, latency included."""
        return self.host.latency_s + self.waiting(action) / self.host.bytes_per_s

    def streaming_s(self, action: Action, *, passes: int = 1) -> float:
        """Return the seconds in which an action moves offloaded chunks while it computes; 0 if it has none.

        Args:
            action: the action.
            passes: number of times that the action reads its input.
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
        """Return (bytes to the device, bytes back to the host) that an update of homes in host memory moves.

        Args:
            elements: elements that are updated.
            unit: unit to which they belong.
            lands: True if the gradient is in host memory; False if it is on the device.
            copies: True if the copy that travels is in host memory, too.
        """
        states = self.optimizer_states[unit] if isinstance(self.optimizer_states, tuple) else self.optimizer_states
        copy = self.weight_bytes if copies and self.weight_bytes != self.master_bytes else 0
        kept = self.master_bytes * (1 + states)
        return elements * (kept + self.master_bytes * lands), elements * (kept + copy)

    def update_seconds(self, rank: int, elements: int, unit: int) -> float:
        each = self.update_of[unit] if self.update_of else self.update_s
        return each * elements * self.compute_factor.get(rank, 1.0)

    def _block(self, block: int) -> BlockCost:
        """Return the cost of a block.

        Raises:
            UserError: the cost model has fewer blocks.
        """
        if block >= len(self.blocks):
            raise UserError("costs.blocks", f"{len(self.blocks)} blocks", f"costs of block {block} as well")
        return self.blocks[block]

    def _ranks(self, micro_batch: int) -> int:
        return self.ranks if self.shared is None or micro_batch < self.shared else 1

    def _size(self, micro_batch: int, window: int | None = None) -> MicroBatchSize:
        """Return the size of one rank's share of a micro-batch, for a layer with this window."""
        size, ranks = self.sizes.get(micro_batch, self.size).seen(window), self._ranks(micro_batch)
        return size if ranks == 1 else size.times(1 / ranks)
