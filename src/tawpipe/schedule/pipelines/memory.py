"""What an order keeps in memory, in the worst of all timings, and what must wait so that this is within a limit.

A position has two lanes, compute and host, each with an order of its own. Where the works of a lane stand is a *state*:
2i after i works, 2i + 1 while the next one runs. A work takes memory at its start and gives it back at its end, so the
memory of a pair of states is the sum of what either lane has taken and not given back. Which pairs can be depends on
what waits for the other lane alone, and not on any time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.work import ROUNDING, Order, PipelineCosts, StageCosts, Work, needs


def fits(costs: PipelineCosts, memory: float) -> bool:
    """True within the limit."""
    return memory <= costs.memory * (1 + ROUNDING)


def peak(layout: Layout, order: Order, costs: PipelineCosts) -> tuple[float, ...]:
    """The most memory of every position over all timings that the order allows, what is resident included."""
    return worst(costs.stages(layout), order)


def worst(table: StageCosts, order: Order) -> tuple[Any, ...]:
    """The same, in the numbers of the costs given."""
    return tuple(table.resident[place] + _worst(place, order, table) for place in range(table.layout.size))


def _worst(place: int, order: Order, table: StageCosts) -> float:
    layout, compute = table.layout, order.compute[place]
    if not order.host:
        return max(table.levels(compute))
    host = order.host[place]
    levels, other = table.levels(compute), table.levels(host)
    least = _waits(layout, order, compute, host)
    reached = _waits(layout, order, host, compute)
    most, last = 0.0, 0
    for state, level in enumerate(levels):
        while last + 1 < len(other) and reached[last + 1] <= state:
            last += 1
        most = max(most, level + max(other[least[state] : last + 1], default=-math.inf))
    return most


def _waits(layout: Layout, order: Order, works: tuple[Work, ...], others: tuple[Work, ...]) -> list[int]:
    """The least state of the other lane, by state of this one."""
    done = {work: 2 * index + 2 for index, work in enumerate(others)}
    least: list[int] = [0]
    for work in works:
        waits = [need for choice in needs(work, layout.stages) for need in choice]
        waits += [order.after[work]] if work in order.after else []
        least += [max((done.get(need, 0) for need in waits), default=0), 0]
    return list(accumulate(least, max))


def guarded(layout: Layout, order: Order, times: Mapping[Work, tuple[float, float]], costs: PipelineCosts) -> Order:
    """The order with what has to wait for the other lane so that memory never exceeds its limit, whatever the timing.

    Every work that takes memory waits for the earliest end on the other lane with which its own start fits beside all
    that had started there before it. In any state that can be, all that has been taken was taken up to the latest such
    start, and at least what that one waits for has been given back: so no more is held than in the times given, at
    some moment, or than the limit.

    Args:
        times: (start, end) of every work, in which memory is within the limit at every time.
    """
    after: dict[Work, Work] = {}
    hosts, table = order.host or ((),) * layout.size, costs.stages(layout)
    for place, (compute, host) in enumerate(zip(order.compute, hosts, strict=True)):
        levels, other = table.levels(compute), table.levels(host)
        for works, mine, others, theirs in ((compute, levels, host, other), (host, other, compute, levels)):
            started = 0
            for index, work in enumerate(works):
                start = times[work][0]
                while started < len(others) and (times[others[started]][0], others is compute) <= (start, False):
                    started += 1
                if not table.taken[work.kind, work.stage]:
                    continue
                if wait := _least(table.limits[place] - mine[2 * index + 1], theirs, started):
                    after[work] = others[wait - 1]
    return replace(order, after=after)


def _least(room: float, others: list[float], started: int) -> int:
    """So many works of the other lane have to end first, where so many have started."""
    ended = started
    while ended and others[2 * ended - 2] <= room and others[2 * ended - 1] <= room:
        ended -= 1
    return ended
