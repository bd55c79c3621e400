"""Assignment of documents of uneven lengths to pipelines, as packed micro-batches that pass all stages of one pipeline.

All packed micro-batches should take equal time (balance.py), so that none delays others. There are several for every
position, so that positions wait little at the beginning and the end of a step, and more if they would still be long. A
document is cut into *slices* of about equal time if it is longer than a packed micro-batch may be, or would take much
longer than the mean one. Each slice is a packed micro-batch. All slices of a document go to one pipeline, in order, and
come first. The document with the most slices is the first or the last of them, so that steps have few forms. Several
limits for cutting are tried: slices are even, but delay later micro-batches. Documents are assigned so that all
pipelines compute for equally long.

A schedule is made and proved for the numbers of packed micro-batches and slices (the form), and its buffers are for
full packed micro-batches. If documents are cut, an order is made for the step's packed micro-batches
(orders/slicing.py), and is part of the form. Otherwise a step only differs in which packed micro-batch runs when. To
choose this, the pipeline's order is simulated with the step's packed micro-batches: long ones first, last or in the
middle, then pairs are exchanged. The number of tries is limited by a bound on the work and not by a clock, so that all
ranks find the same result. This runs where documents are assigned, in a worker process beside the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain, islice
from typing import NamedTuple

from tawpipe.dealing.balance import LayerTime, Pack, Packs, deal
from tawpipe.errors import UserError
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.links import LaneLoad, Listed, played
from tawpipe.schedule.pipelines.memory import fits
from tawpipe.schedule.pipelines.orders import causal
from tawpipe.schedule.pipelines.work import Order, PipelineCosts, makespan, play

LEAST_PACKS, MOST_PACKS = 4, 12
"""Limits (BINS, MOST_PACKS) of the packed micro-batches of a pipeline, for each of its positions. BINS is the least, if
a step has enough documents. MOST_PACKS is the most, unless the token limit needs more."""
OVERHEAD = 128
"""Number of tokens that take as long as the fixed cost of a packed micro-batch: calls and messages."""
LONG = 3 / 2
"""A document is cut if it takes longer than this multiple of the mean packed micro-batch, even if one can hold it."""
TRIED = (1, 2, 2 / 3)
"""Multiples of the limit ``cuts`` that are tried."""
MOST_PLAYED, FEW_LISTED = 30_000, 3_000
"""Limits (MOST_PLAYED, FEW_LISTED) of the work items that are simulated. MOST_PLAYED is for placing packed
micro-batches or making an order, over all pipelines: some tenths of a second. FEW_LISTED is for one pipeline, to
compare ways of cutting documents."""


def packs_of_a_pipeline(needed: int, positions: int, tokens: float) -> int:
    """Return the number of packed micro-batches of a pipeline that wastes the least time; at least ``needed``.

    Time is wasted by waiting at both ends of the step, and by the fixed cost of each packed micro-batch. The result is
    a multiple of ``positions``. It has at least ``LEAST_PACKS`` for each position, and at most ``MOST_PACKS`` unless
    ``needed`` is more.

    Args:
        needed: least number.
        positions: number of positions of the pipeline.
        tokens: tokens of the step for this pipeline.

    >>> packs_of_a_pipeline(3, 4, 1000), packs_of_a_pipeline(17, 4, 1000), packs_of_a_pipeline(17, 4, 100_000)
    (16, 20, 48)
    """

    def beside_even(times: int) -> float:
        """Return the time of a step of ``times * positions`` packed micro-batches, relative to no waste."""
        count = times * positions
        return (1 + (positions - 1) / count) * (1 + count * OVERHEAD / tokens)

    return positions * max(-(-needed // positions), min(range(LEAST_PACKS, MOST_PACKS + 1), key=beside_even))


class LanePacks(NamedTuple):
    """Packed micro-batches of one pipeline.

    Args:
        packs: packed micro-batches in order, document slices first.
        slices: number of slices of every document that is cut.
    """

    packs: list[Pack]
    slices: tuple[int, ...]

    def filled(self, count: int) -> list[Pack]:
        """Return the list filled up to ``count`` with empty packed micro-batches, after the slices.

        Empty ones at the end would only delay the gradients."""
        cut = sum(self.slices)
        return [*self.packs[:cut], *[Pack(())] * (count - len(self.packs)), *self.packs[cut:]]


def lanes_of(
    lengths: Sequence[int], *, pipelines: int, positions: int, cap: int, work: LayerTime, cuts: float | None = None
) -> tuple[list[LanePacks], int]:
    """Cut and pack the documents of a step for each pipeline, before orders are considered.

    Returns the packed micro-batches of every pipeline, and the number to which each list must be filled up with empty
    ones (``LanePacks.filled``). For the arguments see ``deal_to_pipelines``.

    Raises:
        UserError: see ``deal``.
    """
    of = work.of
    if not lengths or min(lengths) < 1 or (max(lengths) > cap and cuts is None):
        deal(lengths, world_size=pipelines, cap=cap, work=work)  # raises the UserError that explains the refusal
    tokens = sum(lengths) / pipelines
    least = packs_of_a_pipeline(0, positions, tokens)
    mean = sum(map(of, lengths)) / least / pipelines
    lanes = list[LanePacks]()
    for numbers in _to_pipelines([of(length) for length in lengths], pipelines):
        most = math.inf if cuts is None else cuts * mean
        cut = [n for n in numbers if lengths[n] > 3 and (lengths[n] > cap or of(lengths[n]) > most)]
        parts = sorted(((n, slices_of(lengths[n], cap, mean, work)) for n in cut), key=lambda pair: -len(pair[1]))
        packs = [Pack((n,), part=part) for n, spans in parts for part in spans]
        whole = [n for n in numbers if n not in cut]
        if whole:
            beside = math.ceil(sum(of(lengths[n]) for n in whole) / mean) if mean else 1  # none is longer than a slice
            rounds = min(len(whole), max(beside, least - len(packs), 1))
            dealt = deal([lengths[n] for n in whole], world_size=1, cap=cap, work=work, rounds=rounds)
            packs += [Pack(tuple(whole[n] for n in row.documents)) for (row,) in dealt.single]
        lanes.append(LanePacks(packs, tuple(len(spans) for _, spans in parts)))
    return lanes, packs_of_a_pipeline(max(len(lane.packs) for lane in lanes), positions, tokens)


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
) -> Packs:
    """Assign the documents of a step to packed micro-batches of pipelines; return the fastest that fits.

    Several limits for cutting (``TRIED`` times ``cuts``), and without ``listed`` also reversed orders of the cut
    documents, are simulated. Assignments whose document slices need more memory than the stages have are left out.

    Args:
        lengths: tokens of every document.
        pipelines: number of pipelines side by side.
        layout: the stages and their positions.
        costs: costs of a packed micro-batch of mean size.
        order_of: function that returns the order of a pipeline for a number of packed micro-batches.
        listed: function that makes the order of a pipeline with document slices; it gets the usual order, the slices,
            the load and the number of work items to try. None to change the usual order by ``causal`` instead.
        cap: most tokens of a packed micro-batch.
        work: time of the model's layers for a document.
        cuts: a document that takes longer than ``cuts`` times the mean packed micro-batch is cut into slices, see
            ``Strategy.dealing``; None if no document may be cut.

    Raises:
        UserError: see ``deal``; or the stages have too little memory for the slices.
    """
    size, deals = layout.size, list[Packs]()
    limits = (None,) if cuts is None else (cuts,) if math.isinf(cuts) else tuple(cuts * times for times in TRIED)
    for limit in limits:
        lanes, count = lanes_of(lengths, pipelines=pipelines, positions=size, cap=cap, work=work, cuts=limit)
        rounds = zip(*(lane.filled(count) for lane in lanes), strict=True)
        slices = tuple(lane.slices for lane in lanes) if any(lane.slices for lane in lanes) else ()
        packs = Packs((), tuple(rounds), 1, tuple(lengths), work, positions=size, slices=slices)
        if all((packs.single, packs.slices) != (other.single, other.slices) for other in deals):
            deals.append(packs)

    def ordered(way: Packs, most: int) -> tuple[Packs, list[Order]]:
        """Return ``way`` and the order of every pipeline under it.

        With ``listed`` and slices, the orders are also stored in ``way.orders``.

        Args:
            most: number of work items that a search for an order may try.
        """
        usual, orders = order_of(len(way.single)), list[Order]()
        cuts = way.slices or ((),) * pipelines
        for cut, load in zip(cuts, _loads(way), strict=True):
            orders.append(listed(usual, cut, load, most) if listed and cut else causal(usual, cut))
        texts = tuple(str(order) if cut else "" for order, cut in zip(orders, cuts, strict=True))
        return replace(way, orders=texts) if listed and way.slices else way, orders

    ways = [way for packs in deals for way in (packs, *(() if listed else _turned(packs)))]
    few = [ordered(way, FEW_LISTED) for way in ways]
    fitting = [way for way in few if _has_memory(*way, layout, costs, cap)]
    if not fitting:
        value = f"one in {max(map(max, filter(None, deals[0].slices)))} slices, which stages of a pipeline keep"
        expected = (
            "fewer slices, by a larger bin_tokens or shorter documents; or a strategy whose weights travel, as "
            "tawpipe-spread, with sequence_chunk, sequence_ranks or offload_dir"
        )
        raise UserError("documents", value, expected)
    best = min(fitting, key=lambda way: (_in_their_places(*way, layout, costs, 0)[0], sum(map(sum, way[0].slices))))
    most = MOST_PLAYED // pipelines
    if best[0].orders and _has_memory(*(better := ordered(best[0], most)), layout, costs, cap):
        best = better
    return _in_their_places(*best, layout, costs, most)[1]


def _loads(packs: Packs) -> list[LaneLoad]:
    """Return for every pipeline the times and sizes of its packed micro-batches, relative to the mean one."""
    lanes = [*zip(*packs.single, strict=True)]
    count = len(packs.single) * len(lanes)
    mean, tokens = sum(map(packs.work.of, packs.lengths)) / count, sum(packs.lengths) / count
    return [
        LaneLoad(
            [packs.time(pack) / mean if mean else 1.0 for pack in lane],
            [packs.tokens(pack) / tokens for pack in lane],
            OVERHEAD / tokens,
        )
        for lane in lanes
    ]


def _turned(packs: Packs) -> Iterator[Packs]:
    """Yield the assignment with every pipeline's cut documents in reverse order, if a pipeline has several."""
    if not any(len(cut) > 1 for cut in packs.slices):
        return
    lanes = list[list[Pack]]()
    for lane, cut in zip(zip(*packs.single, strict=True), packs.slices, strict=True):
        ends = [*accumulate(cut)]
        documents = [lane[end - size : end] for size, end in zip(cut, ends, strict=True)]
        lanes.append([*chain.from_iterable(documents[::-1]), *lane[sum(cut) :]])
    slices = tuple(cut[::-1] for cut in packs.slices)
    yield replace(packs, single=tuple(zip(*lanes, strict=True)), slices=slices)


def _has_memory(packs: Packs, orders: Sequence[Order], layout: Layout, costs: PipelineCosts, cap: int) -> bool:
    """Return True if every position of the pipelines with slices has enough memory.

    Args:
        packs: the assignment.
        orders: order of every pipeline.
        layout: the stages and their positions.
        costs: costs of a full packed micro-batch, with the memory limit.
        cap: tokens of a full packed micro-batch.
    """
    for lane, cut, order in zip(zip(*packs.single, strict=True), packs.slices, orders, strict=False):
        full = [packs.tokens(row) / cap for row in lane]
        if cut and not all(fits(costs, most) for most in _peaks(layout, order, costs, full)):
            return False
    return True


def _to_pipelines(times: Sequence[float], pipelines: int) -> list[list[int]]:
    """Assign documents to pipelines and return the indices of the documents of each.

    Documents are taken in the order of their times, the longest first; each goes to the pipeline with the least time so
    far.

    Args:
        times: time of every document.
        pipelines: number of pipelines.
    """
    lanes, taken = [list[int]() for _ in range(pipelines)], [0.0] * pipelines
    for number in sorted(range(len(times)), key=lambda number: (-times[number], number)):
        least = taken.index(min(taken))
        lanes[least].append(number)
        taken[least] += times[number]
    return lanes


def slices_of(length: int, cap: int, mean: float, work: LayerTime) -> list[tuple[int, int]]:
    """Cut a document of more than three tokens into slices of about equal time, and return (begin, end) of each.

    There are at least two slices. A slice takes about the ``mean`` time at most. It has at least two tokens and at most
    ``cap`` tokens, or one token more if only one would remain.

    Args:
        length: tokens of the document.
        cap: most tokens of a packed micro-batch.
        mean: time of the mean packed micro-batch.
        work: time of the model's layers for a document.

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
            while low < high:  # bisection: last end within the share of these slices
                middle = (low + high + 1) // 2
                low, high = (middle, high) if of(middle) * count <= whole * number else (low, middle - 1)
            if length - low == 1:  # no slice of one token: mixers then change states in place
                low = low - 1 if low - begin > 2 else length
            begin = low
            ends.append(begin)
            if begin == length:
                return list(zip([0, *ends], ends, strict=False))
        count += 1


def _in_their_places(
    packs: Packs, orders: Sequence[Order], layout: Layout, costs: PipelineCosts, most: int
) -> tuple[float, Packs]:
    """Permute the packed micro-batches of each pipeline so that the step gets shorter, by simulating permutations.

    Whole documents only are moved, and only in pipelines whose order was not made for this step. Returns the time of
    the step in the slowest pipeline relative to even work (``even_s``), and the permuted assignment. ``Packs.stretch``
    of the assignment is set to the relative time without shared links.

    Args:
        packs: the assignment.
        orders: order of every pipeline.
        layout: the stages and their positions.
        costs: costs of a packed micro-batch of mean size.
        most: number of work items that are simulated for each pipeline.
    """
    even = even_s(layout, costs, len(packs.single)) or math.inf  # 0 for a tiny model whose blocks take no time
    lanes, longest, alone = list[list[Pack]](), 0.0, 0.0
    cuts, texts = packs.slices or ((),) * len(orders), packs.orders or ("",) * len(orders)
    pipelines = zip(zip(*packs.single, strict=True), _loads(packs), cuts, texts, orders, strict=True)
    for lane, load, cut, text, order in pipelines:

        def taken(places: Sequence[int], load: LaneLoad = load, order: Order = order) -> float:
            return played(layout, order, costs, load.placed(places))

        places = [*range(len(lane))]
        if not text:
            places = _places(taken, load.times, sum(cut), max(1, most // sum(map(len, order.compute))))
        lanes.append([lane[number] for number in places])
        times = load.placed(places).times
        free = makespan(play(layout, order, costs, lambda work, times=times: times[work.micro_batch]))
        longest, alone = max(longest, taken(places)), max(alone, free)
    return longest / even, replace(packs, single=tuple(zip(*lanes, strict=True)), stretch=alone / even or 1.0)


def even_s(layout: Layout, costs: PipelineCosts, count: int) -> float:
    """Return the time in which all positions compute ``count`` mean packed micro-batches without waiting.

    The time is in the unit of ``costs``. Transfers and memory are ignored."""
    seconds = costs.stages(layout).seconds
    return count * sum(seconds[kind, stage] for kind in "FB" for stage in range(layout.stages)) / layout.size


def _peaks(layout: Layout, order: Order, costs: PipelineCosts, full: Sequence[float]) -> Iterator[float]:
    """Yield the most memory, resident memory included, that each position holds while it runs ``order``.

    Args:
        layout: the stages and their positions.
        order: the order.
        costs: costs of a full packed micro-batch.
        full: for every packed micro-batch, its share of the memory of a full one.
    """
    table = costs.stages(layout)
    for place, works in enumerate(order.compute):
        held = most = table.resident[place]
        for kind, stage, m in works:
            held += table.taken[kind, stage] * full[m]
            most = max(most, held)
            held -= table.frees[kind, stage] * full[m]
        yield most


def _places(taken: Callable[[Sequence[int]], float], times: Sequence[float], fixed: int, tries: int) -> list[int]:
    """Search a permutation of packed micro-batches with a short step; return their indices in that order.

    Tries the present order and three orders by time, then swaps of two packed micro-batches in the best of these.

    Args:
        taken: function that returns the time of a step with a permutation.
        times: times of the packed micro-batches.
        fixed: number of packed micro-batches at the beginning that are not moved.
        tries: most permutations to try; the first four are always tried.
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
