"""Most memory that an order needs under all possible timings, and the waits that keep it within a limit.

A position has two lanes, compute and host, each with its own order. The progress of a lane is a *state*: 2i after i
work items, 2i + 1 while the next one runs. An item takes memory at its start and frees memory at its end. So the memory
of a pair of states is the sum of what both lanes have taken and not freed. Which pairs of states are possible depends
only on the waits between the lanes, not on times.
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
    """Return True if ``memory`` is within the limit of ``costs``, up to rounding."""
    return memory <= costs.memory * (1 + ROUNDING)


def peak(layout: Layout, order: Order, costs: PipelineCosts) -> tuple[float, ...]:
    """Return the most memory of every position, including resident memory, over all timings that the order allows."""
    return worst(costs.stages(layout), order)


def worst(table: StageCosts, order: Order) -> tuple[Any, ...]:
    """Return the most memory of every position, as ``peak`` does, in the number type of the costs (such as int)."""
    return tuple(table.resident[place] + _worst(place, order, table) for place in range(table.layout.size))


def _worst(place: int, order: Order, table: StageCosts) -> float:
    """Return the most memory of position ``place`` without resident memory, over all pairs of states of its lanes.

    Only pairs that can occur at one moment under some timing are examined. A lane's states are explained in this
    module's docstring."""
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
    """Return for every state of lane ``works`` the first state of lane ``others`` that it requires.

    A state is reached only after the other lane has ended the items that the started items need, or that
    ``Order.after`` names."""
    done = {work: 2 * index + 2 for index, work in enumerate(others)}
    least: list[int] = [0]
    for work in works:
        waits = [need for choice in needs(work, layout.stages) for need in choice]
        waits += [order.after[work]] if work in order.after else []
        least += [max((done.get(need, 0) for need in waits), default=0), 0]
    return list(accumulate(least, max))


def guarded(layout: Layout, order: Order, times: Mapping[Work, tuple[float, float]], costs: PipelineCosts) -> Order:
    """Return ``order`` with waits between the lanes (``Order.after``) that keep memory within its limit.

    The limit then holds under any timing. Every item that takes memory waits for the earliest end on the other lane
    with which its start fits, together with all items that had started on that lane before it in ``times``. In every
    possible state, all memory was taken up to the latest such start, and at least what this item waits for was freed.
    So the memory never exceeds the memory of some moment in ``times``, or the limit.

    Args:
        layout: the stages and their positions.
        order: the order without waits.
        times: (start, end) of every item, with memory within the limit at every moment.
        costs: costs of the blocks, with the limit.
    """
    after: dict[Work, Work] = {}
    hosts, table = order.host or ((),) * layout.size, costs.stages(layout)
    for place, (compute, host) in enumerate(zip(order.compute, hosts, strict=True)):
        levels, other = table.levels(compute), table.levels(host)
        for works, own_levels, others, theirs in ((compute, levels, host, other), (host, other, compute, levels)):
            started = 0
            for index, work in enumerate(works):
                start = times[work][0]
                while started < len(others) and (times[others[started]][0], others is compute) <= (start, False):
                    started += 1
                if not table.taken[work.kind, work.stage]:
                    continue
                if wait := _least(table.limits[place] - own_levels[2 * index + 1], theirs, started):
                    after[work] = others[wait - 1]
    return replace(order, after=after)


def _least(free_memory: float, others: list[float], started: int) -> int:
    """Return the number of items of the other lane that must end before an item may start.

    The fewest are returned after which the other lane fits into ``free_memory`` in every state up to the last started
    item.

    Args:
        free_memory: memory that the other lane may hold.
        others: memory of the other lane in each state.
        started: number of items that have started there.
    """
    ended = started
    while ended and others[2 * ended - 2] <= free_memory and others[2 * ended - 1] <= free_memory:
        ended -= 1
    return ended
