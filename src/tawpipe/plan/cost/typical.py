"""A typical step of documents that are assigned to devices by their time: its micro-batches and their sizes.

Where weights travel, the mean packed micro-batch represents all. Of pipelines side by side, all are assumed equal to
the one with the most slices. Its slices have their own sizes, and their mean represents the whole packed micro-batches.

Packed micro-batches are uneven, so computing takes longer: every round waits for its longest one, or a pipeline's order
waits for them. This is a factor on the computing time (``TypicalStep.uneven``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from statistics import fmean

from tawpipe.dealing.balance import LayerTime, Pack, Packs, deal
from tawpipe.schedule.buffers import Kind
from tawpipe.schedule.pipelines.dealing import LONG, deal_to_pipelines, even_s, packs_of_a_pipeline
from tawpipe.schedule.pipelines.strategy import ActivationPipeline
from tawpipe.schedule.pipelines.work import makespan, play
from tawpipe.schedule.sizes.activations import Shares
from tawpipe.schedule.spec import ModelSpec
from tawpipe.simulate import MicroBatchSize, size_of, slice_of
from tawpipe.topology import Topology

LOOKED_AT = 60
"""Steps of which one is chosen as typical. If documents are few and long, the mean of fifteen steps is off by a few per
cent."""
OF_DOCUMENT = frozenset((Kind.CONTEXT, Kind.KEYS, Kind.KEY_GRADIENTS))
"""Kinds of activation that a stage holds for a whole document while any of its slices is in progress. They are
allocated with its first slice and freed together."""
OF_TOKENS = frozenset((Kind.INPUT, Kind.INPUT_GRADIENT, Kind.GRAPH, Kind.PRODUCTS, Kind.ATTENTION, Kind.LINEAR))


@dataclass(frozen=True)
class TypicalStep:
    """Micro-batches of a typical step.

    Args:
        count: micro-batches over all devices.
        size: size of a micro-batch that is no slice.
        mean: mean size of all micro-batches.
        largest: tokens of the largest packed micro-batch of a pipeline.
        cut: for each document that every pipeline cuts, the first token and the end of its slices.
        numbers: for every pipeline and cut document, the numbers of the micro-batches that are its slices.
        uneven: factor by which computing takes longer than with equal packed micro-batches of whole documents.
        order: order of every pipeline, see ``Packs.orders``.
    """

    count: int
    size: MicroBatchSize
    mean: MicroBatchSize
    largest: int = 0
    cut: tuple[tuple[tuple[int, int], ...], ...] = ()
    numbers: tuple[tuple[int, ...], ...] = ()
    uneven: float = 1.0
    order: str = ""

    def numbered(self, numbers: tuple[tuple[int, ...], ...]) -> TypicalStep:
        """Return a copy in which the micro-batches that are slices have the numbers ``numbers``."""
        return replace(self, numbers=numbers)

    @property
    def slices(self) -> Mapping[int, tuple[int, int]]:
        """Micro-batch -> (first token, end) in its document. Contains only slices."""
        each = [(number, self.cut[at % len(self.cut)]) for at, number in enumerate(self.numbers)] if self.cut else []
        return {m: span for numbers, spans in each for m, span in zip(numbers, spans, strict=True)}

    def sizes(self, windows: Sequence[int]) -> dict[int, MicroBatchSize]:
        """Return the sizes of micro-batches that are slices: micro-batch -> size."""
        return {m: slice_of(*span, windows) for m, span in self.slices.items()}

    def held(self, micro_batches: Iterable[int], tokens: float) -> Shares:
        """Return the size of each micro-batch's activations, relative to one of ``tokens`` tokens.

        A micro-batch that is no slice counts as the largest one. Memory of a whole document is counted at its first
        slice."""
        slices, shares = self.slices, dict[tuple[Kind, int], float]()
        for m in micro_batches:
            begin, end = slices.get(m, (0, self.largest))
            shares |= {(kind, m): (end - begin) / tokens for kind in (*OF_TOKENS, *OF_DOCUMENT)}
        for at, numbers in enumerate(self.numbers):
            length = self.cut[at % len(self.cut)][-1][1]
            shares |= {
                (kind, m): (length / tokens if m == numbers[0] else 0.0) for kind in OF_DOCUMENT for m in numbers
            }
        return shares


def typical_documents(steps: Iterable[Sequence[int]], longest: int, work: LayerTime) -> tuple[int, ...]:
    """Return the lengths of the documents of that step whose work is closest to the mean of all steps.

    In every step the longest document is first replaced by the longest of the corpus.

    Args:
        steps: for each step the lengths of its documents, in tokens.
        longest: longest document of the corpus, in tokens.
        work: time of documents.

    >>> from tawpipe.dealing.balance import LayerKind
    >>> typical_documents([[1, 9], [4, 4], [6, 5]], 9, LayerTime((LayerKind(1, 1.0, 0.0),)))
    (1, 9)
    """
    step_lengths = [list(lengths) for lengths in steps]
    mean = fmean(sum(map(work.of, lengths)) for lengths in step_lengths)
    for lengths in step_lengths:
        lengths[lengths.index(max(lengths))] = max(*lengths, longest)
    return tuple(min(step_lengths, key=lambda lengths: abs(sum(map(work.of, lengths)) - mean)))


def slices_in(shares: Iterable[tuple[int, ...]], typical: TypicalStep) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of the micro-batches that are slices, for every pipeline and cut document.

    Args:
        shares: for every rank the micro-batches of its pipeline.
        typical: the step; all pipelines cut equal documents. Slices are the first micro-batches of a pipeline.
    """
    of_pipelines = map(iter, dict.fromkeys(shares))
    return tuple(tuple(islice(numbers, len(spans))) for numbers in of_pipelines for spans in typical.cut)


@lru_cache(maxsize=16)
def typical_of_ranks(
    lengths: tuple[int, ...],
    *,
    work: LayerTime,
    windows: tuple[int, ...],
    cap: int,
    world_size: int,
    ranks: int,
    speeds: tuple[float, ...],
) -> TypicalStep:
    """Assign the documents of one step to ranks, and return the number and mean size of its micro-batches.

    Args:
        lengths: lengths of the step's documents, in tokens.
        work: time of documents.
        windows: attention windows of the layers.
        cap: most tokens of a packed micro-batch, for each rank that computes it.
        world_size: number of ranks.
        ranks: ranks of a context-parallel group.
        speeds: speed of every rank, see ``Packs``.

    Raises:
        UserError: as in ``deal``.
    """
    packs = deal(lengths, world_size=world_size, cap=cap, work=work, ranks=ranks, speeds=speeds)
    count = sum(packs.shape) * world_size // ranks
    mean = _whole(packs, [pack for row in (*packs.shared, *packs.single) for pack in row], count, windows)
    return TypicalStep(count, mean, mean, uneven=packs.seconds / packs.mean_seconds)


@lru_cache(maxsize=64)
def typical_of_pipelines(
    lengths: tuple[int, ...],
    *,
    strategy: ActivationPipeline,
    model: ModelSpec,
    topology: Topology,
    work: LayerTime,
    windows: tuple[int, ...],
    cap: int,
    cuts: bool,
) -> TypicalStep:
    """Assign the documents of one step to pipelines, and return a step in which all pipelines are equal.

    Every pipeline is like the one with the most slices. Its packed micro-batches of whole documents have their mean
    size; ``TypicalStep.uneven`` makes up for the time.

    Args:
        lengths: lengths of the step's documents, in tokens.
        strategy: the pipeline.
        model: sizes of the model.
        topology: the nodes and ranks.
        work: time of documents.
        windows: attention windows of the layers.
        cap: most tokens of a packed micro-batch.
        cuts: True if documents may be cut into slices.

    Raises:
        UserError: as in ``deal_to_pipelines``.
    """
    shape = strategy.shape(model, topology)
    layout, costs = shape.layout, shape.costs
    arguments = {
        "layout": layout,
        "costs": costs,
        "order_of": shape.order_of,
        "listed": shape.listed,
        "cap": cap,
        "work": work,
    }
    packs = deal_to_pipelines(lengths, pipelines=shape.positions.replicas, **arguments, cuts=LONG if cuts else None)
    count, slices = len(packs.single), packs.slices or ((),) * packs.world_size
    lanes = [packs.of(pipeline) for pipeline in range(packs.world_size)]
    times = [sum(map(packs.time, lane)) for lane in lanes]
    most = max(range(len(lanes)), key=lambda pipeline: (sum(slices[pipeline]), times[pipeline]))
    parts, whole = lanes[most][: sum(slices[most])], lanes[most][sum(slices[most]) :]
    even = [*map(packs.time, parts), *[sum(map(packs.time, whole)) / max(1, len(whole))] * len(whole)]
    text, mean = packs.orders[most] if packs.orders else "", packs.mean_seconds * layout.size / count
    order = shape.order_of_form(count, slices[most], text)
    taken = makespan(play(layout, order, costs, lambda work: even[work.micro_batch] / mean))
    uneven = packs.stretch * even_s(layout, costs, count) / taken if taken else 1.0
    spans = iter([part.part or (0, 0) for part in parts])
    return TypicalStep(
        count * packs.world_size,
        _whole(packs, whole, max(1, len(whole)), windows),
        _whole(packs, lanes[most], count, windows),
        max(map(packs.tokens, whole or parts)),
        tuple(tuple(islice(spans, number)) for number in slices[most]),
        uneven=uneven,
        order=text,
    )


def mean_pack(
    lengths: Sequence[int], *, pipelines: int, positions: int, cap: int, windows: Sequence[int]
) -> tuple[int, MicroBatchSize]:
    """Return (approximate number of packed micro-batches of all pipelines, mean size of one). Nothing is assigned.

    Args:
        lengths: lengths of the documents, in tokens.
        pipelines: number of pipelines.
        positions: ranks of one pipeline.
        cap: most tokens of a packed micro-batch.
        windows: attention windows of the layers.
    """
    needed = -(-sum(lengths) // (cap * pipelines))
    count = pipelines * packs_of_a_pipeline(needed, positions, sum(lengths) / pipelines)
    return count, size_of(lengths, windows).times(1 / count)


def _whole(packs: Packs, some: Sequence[Pack], count: int, windows: Sequence[int]) -> MicroBatchSize:
    """Return the size of the packed micro-batches ``some`` together, divided by ``count``."""
    sizes = [slice_of(*pack.part, windows) for pack in some if pack.part]
    sizes += [
        size_of([packs.lengths[n] for n in pack.documents], windows)
        for pack in some
        if pack.documents and not pack.part
    ]
    within = tuple((window, sum(dict(size.within)[window] for size in sizes) / count) for window in windows)
    calls = round(sum(size.lengths for size in sizes) / max(1, len(sizes)))
    tokens, pairs = sum(size.tokens for size in sizes) / count, sum(size.pairs for size in sizes) / count
    return MicroBatchSize(tokens, pairs, within, max(1, calls))
