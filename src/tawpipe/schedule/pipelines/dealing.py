"""Documents of uneven lengths dealt to pipelines: a bin is a micro-batch, which passes all stages of one pipeline.

What has to be equal is the time of all bins (balance.py): none makes others wait. There are several for every position,
so that positions wait little as a step begins and ends, and more where bins are then still long. A document that is
longer than a bin may be, or that would take much longer than the mean bin, is cut into *slices* of about equal time:
each is a bin of its own, all go to one pipeline one behind the other, and they come first, those of
the document with most slices ahead or at the end, so that steps are of few forms. How much longer is tried: slices are
even, but hold up what is behind them. Documents go to pipelines so that these compute equally long.

A schedule is made and proved for a form of bins, as one of rounds is for weights that travel, and its buffers are those
of full bins. Where documents are cut, an order is made for the bins of the step (search/slicing.py), and is of their
form. Else what each step has of its own is which bin goes when. That is looked for by playing the pipeline's order with
the step's bins: long ones first, last or in the middle, then pairs that change places. Either way as much is tried as a
bound on the work allows and not as a clock does, so that all ranks find the same. It runs where documents are dealt, in
a worker beside the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain, islice
from typing import NamedTuple

from tawpipe.dealing.balance import Bin, Bins, LayerTime, deal
from tawpipe.errors import UserError
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.links import LaneLoad, Listed, played
from tawpipe.schedule.pipelines.memory import fits
from tawpipe.schedule.pipelines.orders import causal
from tawpipe.schedule.pipelines.work import Order, PipelineCosts, makespan, play

BINS, MOST_BINS = 4, 12
"""Bins of a pipeline for each of its positions, at least, where a step has as many documents; and at most, unless the
cap asks for more.
"""
OVERHEAD = 128
"""Tokens that take as long as what a bin costs besides its own: calls, and messages."""
LONG = 3 / 2
"""Time of a document that is cut though a bin holds it, in that of the mean bin."""
TRIED = (1, 2, 2 / 3)
"""Multiples of that limit that are tried."""
MOST_PLAYED, FEW_LISTED = 30_000, 3_000
"""Works that are played to find a place for every bin, or an order, over all pipelines: some tenths of a second. And of
a pipeline, to see which way of cutting documents is best.
"""


def bins_of_a_pipeline(needed: int, positions: int, tokens: float) -> int:
    """Bins of a pipeline in a step that has so many tokens for it, and needs so many bins at least: those with which
    waiting at both ends and what bins cost besides are least together. They are always the same few numbers.

    >>> bins_of_a_pipeline(3, 4, 1000), bins_of_a_pipeline(17, 4, 1000), bins_of_a_pipeline(17, 4, 100_000)
    (16, 20, 48)
    """

    def beside_even(times: int) -> float:
        count = times * positions
        return (1 + (positions - 1) / count) * (1 + count * OVERHEAD / tokens)

    return positions * max(-(-needed // positions), min(range(BINS, MOST_BINS + 1), key=beside_even))


class LaneBins(NamedTuple):
    """What one pipeline is dealt.

    Args:
        bins: as they come, slices of documents first.
        slices: of every document that is cut how many.
    """

    bins: list[Bin]
    slices: tuple[int, ...]

    def filled(self, count: int) -> list[Bin]:
        """So many bins, empty ones before whole documents: with an empty last one gradients would wait for nothing."""
        cut = sum(self.slices)
        return [*self.bins[:cut], *[Bin(())] * (count - len(self.bins)), *self.bins[cut:]]


def lanes_of(
    lengths: Sequence[int], *, pipelines: int, positions: int, cap: int, work: LayerTime, cuts: float | None = None
) -> tuple[list[LaneBins], int]:
    """What every pipeline of so many positions is dealt, and the bins that each has room for, of which some may be left
    empty; arguments as of ``deal_to_pipelines``.

    Raises:
        UserError: as of ``deal``.
    """
    of = work.of
    if not lengths or min(lengths) < 1 or (max(lengths) > cap and cuts is None):
        deal(lengths, world_size=pipelines, cap=cap, work=work)  # which says what is wrong
    tokens = sum(lengths) / pipelines
    least = bins_of_a_pipeline(0, positions, tokens)
    mean = sum(map(of, lengths)) / least / pipelines
    lanes = list[LaneBins]()
    for numbers in _to_pipelines([of(length) for length in lengths], pipelines):
        most = math.inf if cuts is None else cuts * mean
        cut = [n for n in numbers if lengths[n] > 3 and (lengths[n] > cap or of(lengths[n]) > most)]
        parts = sorted(((n, slices_of(lengths[n], cap, mean, work)) for n in cut), key=lambda pair: -len(pair[1]))
        bins = [Bin((n,), part=part) for n, spans in parts for part in spans]
        whole = [n for n in numbers if n not in cut]
        if whole:
            beside = (
                math.ceil(sum(of(lengths[n]) for n in whole) / mean) if mean else 1
            )  # none is longer than slices are
            rounds = min(len(whole), max(beside, least - len(bins), 1))
            dealt = deal([lengths[n] for n in whole], world_size=1, cap=cap, work=work, rounds=rounds)
            bins += [Bin(tuple(whole[n] for n in row.documents)) for (row,) in dealt.single]
        lanes.append(LaneBins(bins, tuple(len(spans) for _, spans in parts)))
    return lanes, bins_of_a_pipeline(max(len(lane.bins) for lane in lanes), positions, tokens)


def deal_to_pipelines(
    lengths: Sequence[int],
    *,
    pipelines: int,
    layout: Layout,
    costs: PipelineCosts,
    order_of: Callable[[int], Order],
    listed: Listed | None = None,
    cap: int,
    work: LayerTime,
    cuts: float | None = None,
) -> Bins:
    """Deal the documents of a step.

    Args:
        lengths: of the documents, in tokens.
        pipelines: side by side.
        costs: of the mean bin.
        order_of: the order of a pipeline with so many bins.
        listed: the same with slices, for the bins of a step; None for ``causal``.
        cap: tokens of a bin at most.
        cuts: see ``Strategy.dealing``.

    Raises:
        UserError: as of ``deal``; or slices for which stages have no memory.
    """
    size, deals = layout.size, list[Bins]()
    limits = (None,) if cuts is None else (cuts,) if math.isinf(cuts) else tuple(cuts * times for times in TRIED)
    for limit in limits:
        lanes, count = lanes_of(lengths, pipelines=pipelines, positions=size, cap=cap, work=work, cuts=limit)
        rounds = zip(*(lane.filled(count) for lane in lanes), strict=True)
        slices = tuple(lane.slices for lane in lanes) if any(lane.slices for lane in lanes) else ()
        bins = Bins((), tuple(rounds), 1, tuple(lengths), work, positions=size, slices=slices)
        if all((bins.single, bins.slices) != (other.single, other.slices) for other in deals):
            deals.append(bins)

    def ordered(way: Bins, most: int) -> tuple[Bins, list[Order]]:
        """With the order of every pipeline, of which so many works are listed."""
        usual, orders = order_of(len(way.single)), list[Order]()
        cuts = way.slices or ((),) * pipelines
        for cut, load in zip(cuts, _loads(way), strict=True):
            orders.append(listed(usual, cut, load, most) if listed and cut else causal(usual, cut))
        texts = tuple(str(order) if cut else "" for order, cut in zip(orders, cuts, strict=True))
        return replace(way, orders=texts) if listed and way.slices else way, orders

    ways = [way for bins in deals for way in (bins, *(() if listed else _turned(bins)))]
    few = [ordered(way, FEW_LISTED) for way in ways]
    fitting = [way for way in few if _has_room(*way, layout, costs, cap)]
    if not fitting:
        given = f"one in {max(map(max, filter(None, deals[0].slices)))} slices, which stages of a pipeline keep"
        expected = (
            "fewer slices, by a larger bin_tokens or shorter documents; or a strategy whose weights travel, as "
            "tawpipe-spread, with sequence_chunk, sequence_ranks or offload_dir"
        )
        raise UserError("documents", given, expected)
    best = min(fitting, key=lambda way: (_in_their_places(*way, layout, costs, 0)[0], sum(map(sum, way[0].slices))))
    most = MOST_PLAYED // pipelines
    if best[0].orders and _has_room(*(better := ordered(best[0], most)), layout, costs, cap):
        best = better
    return _in_their_places(*best, layout, costs, most)[1]


def _loads(bins: Bins) -> list[LaneLoad]:
    """What the bins of every pipeline are beside the mean one."""
    lanes = [*zip(*bins.single, strict=True)]
    count = len(bins.single) * len(lanes)
    mean, tokens = sum(map(bins.work.of, bins.lengths)) / count, sum(bins.lengths) / count
    return [
        LaneLoad(
            [bins.time(bin) / mean if mean else 1.0 for bin in lane],
            [bins.tokens(bin) / tokens for bin in lane],
            OVERHEAD / tokens,
        )
        for lane in lanes
    ]


def _turned(bins: Bins) -> Iterator[Bins]:
    """The same with the documents that are cut, of every pipeline, in reverse, if there are several anywhere."""
    if not any(len(cut) > 1 for cut in bins.slices):
        return
    lanes = list[list[Bin]]()
    for lane, cut in zip(zip(*bins.single, strict=True), bins.slices, strict=True):
        ends = [*accumulate(cut)]
        documents = [lane[end - size : end] for size, end in zip(cut, ends, strict=True)]
        lanes.append([*chain.from_iterable(documents[::-1]), *lane[sum(cut) :]])
    slices = tuple(cut[::-1] for cut in bins.slices)
    yield replace(bins, single=tuple(zip(*lanes, strict=True)), slices=slices)


def _has_room(bins: Bins, orders: Sequence[Order], layout: Layout, costs: PipelineCosts, cap: int) -> bool:
    """True if stages have memory for the slices of documents, beside bins as full as these."""
    for lane, cut, order in zip(zip(*bins.single, strict=True), bins.slices, orders, strict=False):
        full = [bins.tokens(row) / cap for row in lane]
        if cut and not all(fits(costs, most) for most in _peaks(layout, order, costs, full)):
            return False
    return True


def _to_pipelines(times: Sequence[float], pipelines: int) -> list[list[int]]:
    """The numbers of documents for every pipeline: the longest first, each where least has to be done."""
    lanes, taken = [list[int]() for _ in range(pipelines)], [0.0] * pipelines
    for number in sorted(range(len(times)), key=lambda number: (-times[number], number)):
        least = taken.index(min(taken))
        lanes[least].append(number)
        taken[least] += times[number]
    return lanes


def slices_of(length: int, cap: int, mean: float, work: LayerTime) -> list[tuple[int, int]]:
    """A document of more than three tokens in slices that each take the ``mean`` time at most, and ``cap`` tokens, as
    far as these are two; about equally long.

    >>> from tawpipe.dealing.balance import LayerKind
    >>> slices_of(10, 6, 40.0, LayerTime((LayerKind(1, 0.0, 1.0),)))
    [(0, 5), (5, 8), (8, 10)]
    """
    of, count = work.of, max(2, -(-length // cap))
    whole = of(length)
    count = max(count, -int(-whole // mean)) if mean else count
    while True:
        ends, begin = list[int](), 0
        for number in range(1, count + 1):
            end = begin + 2
            low, high = end, min(begin + max(cap, 2), length)
            while low < high:  # the last token up to which the slices so far take their share
                middle = (low + high + 1) // 2
                low, high = (middle, high) if of(middle) * count <= whole * number else (low, middle - 1)
            if length - low == 1:  # one token is no slice: code of mixers for one changes states in place
                low = low - 1 if low - begin > 2 else length
            begin = low
            ends.append(begin)
            if begin == length:
                return list(zip([0, *ends], ends, strict=False))
        count += 1


def _in_their_places(
    bins: Bins, orders: Sequence[Order], layout: Layout, costs: PipelineCosts, most: int
) -> tuple[float, Bins]:
    """How often as long as even work a step is; and the same with every bin of whole documents where that is short, in
    pipelines whose order is not made for their bins, and how long it is if transfers take no link from each other.

    Args:
        most: works of a pipeline that are played.
    """
    even = even_s(layout, costs, len(bins.single)) or math.inf  # 0 of a model so small that its blocks take no time
    lanes, longest, alone = list[list[Bin]](), 0.0, 0.0
    cuts, texts = bins.slices or ((),) * len(orders), bins.orders or ("",) * len(orders)
    given = zip(zip(*bins.single, strict=True), _loads(bins), cuts, texts, orders, strict=True)
    for lane, load, cut, text, order in given:

        def taken(places: Sequence[int], load: LaneLoad = load, order: Order = order) -> float:
            return played(layout, order, costs, load.placed(places))

        places = [*range(len(lane))]
        if not text:
            places = _places(taken, load.times, sum(cut), max(1, most // sum(map(len, order.compute))))
        lanes.append([lane[number] for number in places])
        times = load.placed(places).times
        free = makespan(play(layout, order, costs, lambda work, times=times: times[work.micro_batch]))
        longest, alone = max(longest, taken(places)), max(alone, free)
    return longest / even, replace(bins, single=tuple(zip(*lanes, strict=True)), stretch=alone / even or 1.0)


def even_s(layout: Layout, costs: PipelineCosts, count: int) -> float:
    """Time in which all positions compute so many mean bins, if none ever waits."""
    seconds = costs.stages(layout).seconds
    return count * sum(seconds[kind, stage] for kind in "FB" for stage in range(layout.stages)) / layout.size


def _peaks(layout: Layout, order: Order, costs: PipelineCosts, full: Sequence[float]) -> Iterator[float]:
    """The most memory of every position.

    Args:
        full: of every bin, its share of what a full one keeps.
    """
    table = costs.stages(layout)
    for place, works in enumerate(order.compute):
        held = most = table.resident[place]
        for kind, stage, m in works:
            held += table.taken[kind, stage] * full[m]
            most = max(most, held)
            held -= table.given[kind, stage] * full[m]
        yield most


def _places(taken: Callable[[Sequence[int]], float], times: Sequence[float], fixed: int, tries: int) -> list[int]:
    """Which bin goes when.

    Args:
        taken: the time of a step with bins in these places.
        times: of the bins.
        fixed: so many of them stay where they are.
        tries: so many places of all bins at most, beyond a few.
    """
    count = len(times)
    first, rising = list(range(fixed)), sorted(range(fixed, count), key=lambda number: times[number])
    tried = [list(range(count))]
    tried += [[*first, *rest] for rest in (rising, rising[::-1], [*rising[::2], *rising[1::2][::-1]])]
    best, places = min((taken(places), places) for places in tried)
    pairs = ((i, i + apart) for apart in range(1, count) for i in range(fixed, count - apart))
    for i, j in islice(pairs, max(0, tries - len(tried))):
        other = [*places]
        other[i], other[j] = other[j], other[i]
        if (less := taken(other)) < best:
            best, places = less, other
    return places
