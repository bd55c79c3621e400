"""A step of documents that are dealt by their time, as plans price and weigh it: its micro-batches and their sizes.

Where weights travel, the mean bin stands for all. Pipelines side by side are all taken for the one that has most
slices: these have the sizes that they have, and the mean bin stands for all that are whole. Computing takes longer by
as much as it does because bins are no more even than they are: the longest one of every round is waited for, or a
pipeline's order waits for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from statistics import fmean

from tawpipe.dealing.balance import Bin, Bins, LayerTime, deal
from tawpipe.schedule.buffers import Kind
from tawpipe.schedule.pipelines.dealing import LONG, bins_of_a_pipeline, deal_to_pipelines, even_s
from tawpipe.schedule.pipelines.strategy import ActivationPipeline
from tawpipe.schedule.pipelines.work import makespan, play
from tawpipe.schedule.sizes.activations import Shares
from tawpipe.schedule.spec import ModelSpec
from tawpipe.simulate import MicroBatchSize, size_of, slice_of
from tawpipe.topology import Topology

LOOKED_AT = 60
"""Steps of which one is typical: with few, long documents the work of fifteen is off by some per cent in the mean."""
OF_DOCUMENT = frozenset((Kind.CONTEXT, Kind.KEYS, Kind.KEY_GRADIENTS))
"""What a stage has for a whole document as long as any of its slices is under way: it comes with the first of them, and
goes with it."""
OF_TOKENS = frozenset((Kind.INPUT, Kind.INPUT_GRADIENT, Kind.GRAPH, Kind.ATTENTION, Kind.LINEAR))


@dataclass(frozen=True)
class TypicalStep:
    """The micro-batches of a step.

    Args:
        count: over all devices.
        size: of a micro-batch that is no slice.
        mean: of all micro-batches.
        largest: tokens of the largest bin of a pipeline.
        cut: the documents that every pipeline cuts; of each its slices, first token and end.
        numbers: of the micro-batches that are these slices, for every pipeline and document.
        uneven: how many times as long computing takes as if bins of whole documents were alike.
        order: of every pipeline, see ``Bins.orders``.
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
        """The same for a schedule that gives the slices these numbers."""
        return replace(self, numbers=numbers)

    @property
    def slices(self) -> Mapping[int, tuple[int, int]]:
        """Of every micro-batch that is a slice, the first token and the end."""
        each = [(number, self.cut[at % len(self.cut)]) for at, number in enumerate(self.numbers)] if self.cut else []
        return {m: span for numbers, spans in each for m, span in zip(numbers, spans, strict=True)}

    def sizes(self, windows: Sequence[int]) -> dict[int, MicroBatchSize]:
        """Of every micro-batch that is a slice."""
        return {m: slice_of(*span, windows) for m, span in self.slices.items()}

    def held(self, micro_batches: Iterable[int], tokens: float) -> Shares:
        """Of what pipelines keep of micro-batches: the share of what one of so many tokens would take. Any that is
        whole may be the largest.
        """
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
    """Of the documents of some steps those of the one that does about as much as they do in the mean, with the longest
    of all in the place of its longest.

    Args:
        steps: lengths of the documents of each, in tokens.
        longest: of the corpus.

    >>> from tawpipe.dealing.balance import LayerKind
    >>> typical_documents([[1, 9], [4, 4], [6, 5]], 9, LayerTime((LayerKind(1, 1.0, 0.0),)))
    (1, 9)
    """
    given = [list(lengths) for lengths in steps]
    mean = fmean(sum(map(work.of, lengths)) for lengths in given)
    for lengths in given:
        lengths[lengths.index(max(lengths))] = max(*lengths, longest)
    return tuple(min(given, key=lambda lengths: abs(sum(map(work.of, lengths)) - mean)))


def slices_in(shares: Iterable[tuple[int, ...]], typical: TypicalStep) -> tuple[tuple[int, ...], ...]:
    """Numbers of the micro-batches that are slices, of every pipeline and document that it cuts.

    Args:
        shares: of every rank, the micro-batches of its pipeline.
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
    """A step whose bins are dealt to ranks.

    Args:
        lengths: of its documents, in tokens.
        cap: tokens of a bin, for each of the ranks that compute it.
        ranks: of a set.
        speeds: of all ranks, see ``Bins``.

    Raises:
        UserError: as of ``deal``.
    """
    bins = deal(lengths, world_size=world_size, cap=cap, work=work, ranks=ranks, speeds=speeds)
    count = sum(bins.shape) * world_size // ranks
    mean = _whole(bins, [bin for row in (*bins.shared, *bins.single) for bin in row], count, windows)
    return TypicalStep(count, mean, mean, uneven=bins.seconds / bins.mean_seconds)


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
    """A step whose bins are dealt to pipelines.

    Args:
        cuts: documents may be cut into slices.

    Raises:
        UserError: as of ``deal_to_pipelines``.
    """
    shape = strategy.shape(model, topology)
    layout, costs = shape.layout, shape.costs
    given = {
        "layout": layout,
        "costs": costs,
        "order_of": shape.order_of,
        "listed": shape.listed,
        "cap": cap,
        "work": work,
    }
    bins = deal_to_pipelines(lengths, pipelines=shape.positions.replicas, **given, cuts=LONG if cuts else None)
    count, slices = len(bins.single), bins.slices or ((),) * bins.world_size
    lanes = [bins.of(pipeline) for pipeline in range(bins.world_size)]
    times = [sum(map(bins.time, lane)) for lane in lanes]
    most = max(range(len(lanes)), key=lambda pipeline: (sum(slices[pipeline]), times[pipeline]))
    parts, whole = lanes[most][: sum(slices[most])], lanes[most][sum(slices[most]) :]
    even = [*map(bins.time, parts), *[sum(map(bins.time, whole)) / max(1, len(whole))] * len(whole)]
    text, mean = bins.orders[most] if bins.orders else "", bins.mean_seconds * layout.size / count
    order = shape.order_of_form(count, slices[most], text)
    taken = makespan(play(layout, order, costs, lambda work: even[work.micro_batch] / mean))
    uneven = bins.stretch * even_s(layout, costs, count) / taken if taken else 1.0
    spans = iter([part.part or (0, 0) for part in parts])
    return TypicalStep(
        count * bins.world_size,
        _whole(bins, whole, max(1, len(whole)), windows),
        _whole(bins, lanes[most], count, windows),
        max(map(bins.tokens, whole or parts)),
        tuple(tuple(islice(spans, number)) for number in slices[most]),
        uneven=uneven,
        order=text,
    )


def mean_bin(
    lengths: Sequence[int], *, pipelines: int, positions: int, cap: int, windows: Sequence[int]
) -> tuple[int, MicroBatchSize]:
    """How many bins pipelines of so many positions have, about, and the size of the mean one."""
    needed = -(-sum(lengths) // (cap * pipelines))
    count = pipelines * bins_of_a_pipeline(needed, positions, sum(lengths) / pipelines)
    return count, size_of(lengths, windows).times(1 / count)


def _whole(bins: Bins, some: Sequence[Bin], count: int, windows: Sequence[int]) -> MicroBatchSize:
    """What some bins are together, as one of so many micro-batches."""
    sizes = [slice_of(*bin.part, windows) for bin in some if bin.part]
    sizes += [
        size_of([bins.lengths[n] for n in bin.documents], windows) for bin in some if bin.documents and not bin.part
    ]
    within = tuple((window, sum(dict(size.within)[window] for size in sizes) / count) for window in windows)
    calls = round(sum(size.lengths for size in sizes) / max(1, len(sizes)))
    tokens, pairs = sum(size.tokens for size in sizes) / count, sum(size.pairs for size in sizes) / count
    return MicroBatchSize(tokens, pairs, within, max(1, calls))
