"""An order for micro-batches of which some are slices of documents, listed in time for the bins of a step as they are.

``causal`` makes one of any other order, in which a position does all slices of a document where it did the first. It
waits while a long document comes slice by slice. Here whatever is there comes first, as far as the slices' own order
lets it. Slices send less than bins of whole documents that take as long, and the last ones of a document least: in
which turn documents begin is tried with the times and bytes of a step's own bins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import accumulate, islice, product, takewhile

from tawpipe.orders.arrange import WAITING, hardly_longer
from tawpipe.orders.room import whole_stages
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.links import LaneLoad, Linked, played
from tawpipe.schedule.pipelines.memory import fits, peak
from tawpipe.schedule.pipelines.orders import causal
from tawpipe.schedule.pipelines.work import Order, PipelineCosts, Work

AHEAD = (math.inf, 3.0, 6.0)
"""Micro-batches by which a stage is ahead of each one behind it before it prefers to go back."""
LAST = 4
"""Documents and bins, the last ones, whose backward passes are taken apart where not all are."""
FIRST = 4
"""Numbers of bins of whole documents before the others that are tried, about."""


def listed(
    layout: Layout, costs: PipelineCosts, order: Order, slices: tuple[int, ...], load: LaneLoad, most: int
) -> Order:
    """The shortest of ``causal(order, slices)`` and of orders that are listed, as far as memory has room for these, or
    one that is hardly longer and takes less.

    Args:
        load: of the bins of a step.
        most: works that are listed altogether, about.

    Raises:
        UserError: as of ``causal``.
    """
    stages = costs.stages(layout)
    split = [*whole_stages(stages, split=True)]
    begins, split[0] = split[0], False  # nobody waits for what the first one sends
    waiting = (math.inf, WAITING * layout.size) if any(stages.kept_for_weights) else (math.inf,)
    first, places = causal(order, slices), [*product(range(layout.stages), range(order.micro_batches))]
    options = [(played(layout, first, costs, load), max(peak(layout, first, costs)), first)]
    ways = product(_turns(slices, load), (0, -LAST), AHEAD, waiting)
    for turn, last, ahead, few in islice(ways, max(1, most // (2 * len(places)))):
        apart = {m for document in turn[last:] for m in document}
        works = [Work(kind, s, m) for s, m in places for kind in ("FIW" if split[s] and m in apart else "FB")]
        taken, other = _in_turn(Linked(layout, costs, works, load, slices), layout, turn, ahead, few)
        if taken < options[0][0]:
            options.append((taken, max(peak(layout, other, costs)), other))
    order = hardly_longer([options[0], *(option for option in options[1:] if fits(costs, option[1]))])
    ended, alone = _ended(layout, order) if begins else order, load._replace(beside=0.0)
    later = played(layout, ended, costs, alone) > played(layout, order, costs, alone)  # by W that had gaps to run in
    return order if later or not fits(costs, max(peak(layout, ended, costs))) else ended


def _ended(layout: Layout, order: Order) -> Order:
    """The same with the last few backward passes of the first stage apart: W may go layer by layer, so that what is
    summed over ranks as the step ends is there earlier.
    """
    place, works = layout.places[0], order.compute[layout.places[0]]
    last = [*islice(takewhile(lambda work: work[:2] == ("B", 0), reversed(works)), LAST)][::-1]
    parts = [work._replace(kind=kind) for kind in "IW" for work in last]
    lanes = [*order.compute]
    lanes[place] = (*works[: len(works) - len(last)], *parts)
    return replace(order, compute=tuple(lanes))


def _turns(slices: Sequence[int], load: LaneLoad) -> Iterator[list[range]]:
    """The micro-batches of documents, and of bins of whole ones, of which some come first. The others come behind the
    documents, or between them, the last document at the end: while its slices pass a stage, the one before has bins to
    go back with. Documents are as they are, or in reverse. Empty bins come second, where nothing waits for them.
    """
    cut = [range(end - size, end) for end, size in zip(accumulate(slices), slices, strict=True)]
    bins = [range(m, m + 1) for m in range(sum(slices), len(load.times))]
    whole, empty = ([part for part in bins if bool(load.sizes[part[0]]) == full] for full in (True, False))
    for first in range(0, len(whole) + 1, 1 + len(whole) // FIRST):
        for documents in (cut, cut[::-1]) if len(cut) > 1 else (cut,):
            rest = iter(whole[first:])
            between = [part for document in documents[:-1] for part in (document, *islice(rest, 1))]
            for turn in (
                [*documents[:-1], *whole[first:], documents[-1]],
                [*documents, *whole[first:]],
                [*between, *rest, documents[-1]],
            ):
                begun = [*whole[:first], *turn]
                yield [*begun[:1], *empty, *begun[1:]]


def _in_turn(
    linked: Linked, layout: Layout, documents: Sequence[range], ahead: float, most_waiting: float
) -> tuple[float, Order]:
    """(time, order) in which every position does what is ready: of one kind what belongs to the first document.

    Args:
        documents: the micro-batches of each, in this order; a bin of whole documents is one.
        ahead: of ``AHEAD``.
        most_waiting: so many W of a position wait until there is nothing else to do.
    """
    turn = {m: number for number, document in enumerate(documents) for m in document}
    ready: dict[str, list[list[tuple]]] = {kind: [[] for _ in range(layout.size)] for kind in "FBW"}
    under_way, lanes = [0] * layout.stages, [list[Work]() for _ in range(layout.size)]
    head = layout.stages - 1

    def come(number: int) -> None:
        kind, stage, m = work = linked.works[number]
        urgency = turn[m], m if kind in "FW" else -m, -stage
        heappush(ready["B" if kind == "I" else kind][linked.places[number]], (urgency, number, work))

    def chosen(place: int) -> int | None:
        forward, back, rest = (ready[kind][place] for kind in "FBW")
        if rest and (len(rest) > most_waiting or not (forward or back)):
            heap = rest
        elif forward and back:
            stage = forward[0][2].stage
            heap = forward if stage < head and under_way[stage] < ahead * (head - stage) else back
        elif not (heap := forward or back):
            return None
        _, number, work = heappop(heap)
        under_way[work.stage] += (work.kind == "F") - (work.kind in "BI")
        lanes[place].append(work)
        return number

    taken = linked.run(come, chosen)
    return taken, Order(tuple(map(tuple, lanes)))
