"""An order for micro-batches of which some are slices of documents, listed in time with a link between two positions
that carries one boundary after the other.

``causal`` makes one of any other order, in which a position does all slices of a document where it did the first. It
waits while a long document comes slice by slice. Here whatever is there comes first, as far as the slices' own order
lets it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import accumulate, product

from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.memory import fits, peak
from tawpipe.schedule.pipelines.orders import causal
from tawpipe.schedule.pipelines.search.arrange import WAITING, hardly_longer
from tawpipe.schedule.pipelines.search.room import whole_stages
from tawpipe.schedule.pipelines.work import Order, PipelineCosts, Work, makespan, play

NOW, LATER, LAST = range(3)
"""How urgent a work is that is ready."""
MOST_FIRST = 8
"""Numbers of bins of whole documents before the others that are tried, about."""


def with_slices(layout: Layout, costs: PipelineCosts, order: Order, slices: tuple[int, ...]) -> Order:
    """The shortest of ``causal(order, slices)`` and of orders that are listed, as far as memory has room for these, or
    one that is hardly longer and takes less; bins count as equally long.

    Raises:
        UserError: as of ``causal``.
    """
    return _shortest(layout, costs, str(order), slices) if max(slices, default=1) > 1 else order


@lru_cache(maxsize=256)
def _shortest(layout: Layout, costs: PipelineCosts, text: str, slices: tuple[int, ...]) -> Order:
    def taken(order: Order) -> float:
        return makespan(play(layout, order, costs, larger=lambda _: 1))

    order, stages = Order.parse(text), costs.stages(layout)
    split = whole_stages(stages, split=True)
    split = tuple(apart and stage > 0 for stage, apart in enumerate(split))  # nobody waits for what the first one sends
    waiting = (math.inf, WAITING * layout.size) if any(stages.kept_for_weights) else (math.inf,)
    options = [(taken(first := causal(order, slices)), max(peak(layout, first, costs)), first)]
    for documents in _in_turn(slices, order.micro_batches):
        for eager, most in product((True, False), waiting):
            other = _listed(layout, costs, documents, split, eager, most)
            if (less := taken(other)) < options[0][0]:
                options.append((less, max(peak(layout, other, costs)), other))
    return hardly_longer([options[0], *(option for option in options[1:] if fits(costs, option[1]))])


def _in_turn(slices: Sequence[int], count: int) -> Iterator[list[range]]:
    """The micro-batches of documents, and of bins of whole ones, of which some come first, or between documents."""
    ends = [*accumulate(slices)]
    cut = [range(end - size, end) for end, size in zip(ends, slices, strict=True)]
    whole = [range(m, m + 1) for m in range(sum(slices), count)]
    for first in range(0, len(whole) + 1, 1 + len(whole) // MOST_FIRST):
        yield [*whole[:first], *cut, *whole[first:]]
    between = [part for pair in zip(whole, cut, strict=False) for part in pair]
    yield [*between, *whole[len(cut) :], *cut[len(whole) :]]


def _listed(
    layout: Layout,
    costs: PipelineCosts,
    documents: Sequence[range],
    split: Sequence[bool],
    eager: bool,
    most_waiting: float,
) -> Order:
    """An order in which every position does what is ready: of one kind what belongs to the first document.

    Args:
        documents: the micro-batches of each, in this order; a bin of whole documents is one.
        split: by stage, true for I and W apart, of bins that are no slices.
        eager: forward passes go before backward passes on all positions but the last one.
        most_waiting: so many W of a position wait until there is nothing else to do.
    """
    seconds, places = costs.stages(layout).seconds, layout.places
    missing, followers, urgency = defaultdict[Work, int](int), defaultdict[Work, list[Work]](list), dict[Work, tuple]()

    def add(work: Work, urgent: tuple, *needed: Work) -> None:
        urgency[work] = urgent
        missing[work] = len(needed)
        for other in needed:
            followers[other].append(work)

    for number, document in enumerate(documents):
        for stage in range(layout.stages):
            forward_first = eager and places[stage] < layout.size - 1
            for m in document:
                parts = "IW" if split[stage] and len(document) == 1 else "B"
                back, forward = Work(parts[0], stage, m), Work("F", stage, m)
                after = "I" if stage + 1 < layout.stages and split[stage + 1] and len(document) == 1 else "B"
                add(
                    forward,
                    (NOW if forward_first else LATER, number, m, -stage),
                    *([Work("F", stage - 1, m)] if stage else []),
                    *([Work("F", stage, m - 1)] if m > document[0] else []),
                )
                add(
                    back,
                    (LATER if forward_first else NOW, number, -m, -stage),
                    forward,
                    *([Work(after, stage + 1, m)] if stage + 1 < layout.stages else []),
                    *([Work("B", stage, m + 1)] if m < document[-1] else []),
                )
                if parts == "IW":
                    add(Work("W", stage, m), (LAST, number, m, -stage), back)
    lanes: list[list[Work]] = [[] for _ in range(layout.size)]
    ready: list[list[tuple]] = [[] for _ in range(layout.size)]
    waiting: list[list[tuple]] = [[] for _ in range(layout.size)]  # W
    busy, links, there = (
        [False] * layout.size,
        defaultdict[tuple[int, int], float](float),
        defaultdict[Work, float](float),
    )
    events: list[tuple[float, int, Work]] = [(0.0, 0, work) for work in missing if not missing[work]]
    while events:
        now = events[0][0]
        while events and events[0][0] <= now:
            _, ended, work = heappop(events)
            place = places[work.stage]
            if not ended:
                heappush((waiting if work.kind == "W" else ready)[place], (urgency[work], work))
                continue
            busy[place] = False
            for other in followers[work]:
                at, link = now, (place, places[other.stage])
                if link[0] != link[1]:
                    at = links[link] = max(now, links[link]) + costs.travel(*link)
                there[other] = max(there[other], at)
                missing[other] -= 1
                if not missing[other]:
                    heappush(events, (there[other], 0, other))
        for place in range(layout.size):
            if (ready[place] or waiting[place]) and not busy[place]:
                full = len(waiting[place]) > most_waiting or not ready[place]
                _, work = heappop((waiting if full else ready)[place])
                lanes[place].append(work)
                busy[place] = True
                heappush(events, (now + seconds[work.kind, work.stage], 1, work))
    return Order(tuple(map(tuple, lanes)))
