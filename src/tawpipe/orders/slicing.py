"""Orders for micro-batches of which some are slices of documents, listed for the exact packed micro-batches of a step.

``causal`` makes an order with slices from any other order: a position runs all slices of a document where it ran the
first one. It waits while a long document arrives slice by slice. The orders here instead run whatever has arrived, as
far as the order of the slices allows. Slices send less data than packed micro-batches of whole documents with equal
computing time, and the last slices of a document send the least. So several sequences of documents are tried, with the
times and bytes of the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import accumulate, islice, product, takewhile

from tawpipe.orders.arrange import WAITING, hardly_longer
from tawpipe.orders.order_memory import whole_stages
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.links import LaneLoad, Linked, played
from tawpipe.schedule.pipelines.memory import fits, peak
from tawpipe.schedule.pipelines.orders import causal
from tawpipe.schedule.pipelines.work import Order, PipelineCosts, Work

LEADS = (math.inf, 3.0, 6.0)
"""Values tried for the lead of a stage: it prefers backward passes when it is ahead of the last stage by this many
micro-batches for each stage between."""
LAST = 4
"""Number of last documents and packed micro-batches whose backward passes are split, where not all are."""
FIRST = 4
"""Approximate number of values tried for the count of packed micro-batches that come before all documents."""


def listed(
    layout: Layout, costs: PipelineCosts, order: Order, slices: tuple[int, ...], load: LaneLoad, most: int
) -> Order:
    """Return the shortest of ``causal(order, slices)`` and several listed orders.

    An order that is hardly longer and needs less memory is preferred. Listed orders count only if they fit in memory.

    Args:
        layout: stages and their positions.
        costs: times and memory of the blocks.
        order: order without slices.
        slices: number of slices of each document that is cut; these are the first micro-batches.
        load: times and sizes of the packed micro-batches of a step.
        most: approximate maximum number of works that are listed.

    Raises:
        UserError: ``causal`` cannot convert the order.
    """
    stages = costs.stages(layout)
    split = [*whole_stages(stages, split=True)]
    begins, split[0] = split[0], False  # no position waits for the input gradients of the first stage
    waiting = (math.inf, WAITING * layout.size) if any(stages.kept_for_weights) else (math.inf,)
    first, places = causal(order, slices), [*product(range(layout.stages), range(order.micro_batches))]
    options = [(played(layout, first, costs, load), max(peak(layout, first, costs)), first)]
    ways = product(_turns(slices, load), (0, -LAST), LEADS, waiting)
    for turn, last, lead, few in islice(ways, max(1, most // (2 * len(places)))):
        apart = {m for document in turn[last:] for m in document}
        works = [Work(kind, s, m) for s, m in places for kind in ("FIW" if split[s] and m in apart else "FB")]
        taken, other = _in_turn(Linked(layout, costs, works, load, slices), layout, turn, lead, few)
        if taken < options[0][0]:
            options.append((taken, max(peak(layout, other, costs)), other))
    order = hardly_longer([options[0], *(option for option in options[1:] if fits(costs, option[1]))])
    ended, alone = _ended(layout, order) if begins else order, load._replace(beside=0.0)
    later = played(layout, ended, costs, alone) > played(layout, order, costs, alone)  # W no longer fills gaps
    return order if later or not fits(costs, max(peak(layout, ended, costs))) else ended


def _ended(layout: Layout, order: Order) -> Order:
    """Return a copy of the order in which the last backward passes of the first stage, at most ``LAST``, are split.

    W can then run layer by layer, so that gradients which are summed over ranks at the end of the step are ready
    earlier."""
    place, works = layout.places[0], order.compute[layout.places[0]]
    last = [*islice(takewhile(lambda work: work[:2] == ("B", 0), reversed(works)), LAST)][::-1]
    parts = [work._replace(kind=kind) for kind in "IW" for work in last]
    lanes = [*order.compute]
    lanes[place] = (*works[: len(works) - len(last)], *parts)
    return replace(order, compute=tuple(lanes))


def _turns(slices: Sequence[int], load: LaneLoad) -> Iterator[list[range]]:
    """Yield sequences in which the micro-batches can begin: documents that are cut, and packed whole documents.

    Some packed micro-batches of whole documents begin the sequence. The rest follow the cut documents, or lie between
    them, with the last document at the end: while its slices pass a stage, the stage before has other backward passes
    to run. Cut documents keep their order or are reversed. Empty micro-batches are second, where no other work waits
    for them.

    Args:
        slices: number of slices of each document that is cut.
        load: times and sizes of all micro-batches.
    """
    cut = [range(end - size, end) for end, size in zip(accumulate(slices), slices, strict=True)]
    packs = [range(m, m + 1) for m in range(sum(slices), len(load.times))]
    whole, empty = ([part for part in packs if bool(load.sizes[part[0]]) == full] for full in (True, False))
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
    linked: Linked, layout: Layout, documents: Sequence[range], lead: float, most_waiting: float
) -> tuple[float, Order]:
    """Simulate a step in which every position runs what is ready; return its duration and the order.

    Of the ready works of one kind, a position runs the work of the earliest document in ``documents``.

    Args:
        linked: works of the step, with their times.
        layout: stages and their positions.
        documents: the micro-batches of each document in sequence. A packed micro-batch of whole documents counts as
            one.
        lead: lead of a stage, see ``LEADS``.
        most_waiting: maximum number of W that wait on a position while there are other works.
    """
    turn = {m: number for number, document in enumerate(documents) for m in document}
    ready: dict[str, list[list[tuple]]] = {kind: [[] for _ in range(layout.size)] for kind in "FBW"}
    under_way, lanes = [0] * layout.stages, [list[Work]() for _ in range(layout.size)]
    head = layout.stages - 1

    def come(number: int) -> None:
        """Add work item ``number`` to the ready work items of its position."""
        kind, stage, m = work = linked.works[number]
        urgency = turn[m], m if kind in "FW" else -m, -stage
        heappush(ready["B" if kind == "I" else kind][linked.places[number]], (urgency, number, work))

    def chosen(place: int) -> int | None:
        """Add the work that a free position runs next to its order, and return its number; None if none is ready.

        The work is removed from the ready works."""
        forward, back, rest = (ready[kind][place] for kind in "FBW")
        if rest and (len(rest) > most_waiting or not (forward or back)):
            heap = rest
        elif forward and back:
            stage = forward[0][2].stage
            heap = forward if stage < head and under_way[stage] < lead * (head - stage) else back
        elif not (heap := forward or back):
            return None
        _, number, work = heappop(heap)
        under_way[work.stage] += (work.kind == "F") - (work.kind in "BI")
        lanes[place].append(work)
        return number

    taken = linked.run(come, chosen)
    return taken, Order(tuple(map(tuple, lanes)))
