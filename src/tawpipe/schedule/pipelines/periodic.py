"""Orders of any length, made by repeating the middle of an order for few micro-batches.

A full pipeline repeats itself. A *period* lies between two moments at which all positions have equal work in progress,
for later micro-batches at the second one. An order with one more period is an order for more micro-batches: it has no
additional waits and needs no more memory. If an order has no such moments except its beginning and its end, all of it
is the period.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.memory import fits, peak
from tawpipe.schedule.pipelines.work import Order, PipelineCosts, Work, needs, play

HARDLY = 1e-3
"""Share by which a micro-batch may take longer, for a shorter period."""


@dataclass(frozen=True, eq=False)
class Periodic:
    """An order for few micro-batches and the part of it that is repeated.

    Args:
        order: the order.
        few: number of its micro-batches.
        period: number of micro-batches in the repeated part.
        spans: for the lanes that compute and for the host lanes, by position: (items before the period begins, items
            before it ends).
        length: time of a period, without waits for other positions.
    """

    order: Order
    few: int
    period: int
    spans: tuple[tuple[tuple[int, int], ...], ...]
    length: float

    def of(self, count: int) -> Order:
        """Return the order for ``count`` micro-batches (at least ``few``), in which the period is repeated.

        The period is repeated until there are enough micro-batches; then the work items of surplus ones are removed."""
        repeats = -(-(count - self.few) // self.period)
        sides = [(self.order.compute, self.spans[0])]
        sides += [(self.order.host, self.spans[1])] if self.order.host else []
        lanes = [[_repeated(lane, span, repeats) for lane, span in zip(*side, strict=True)] for side in sides]
        repeated = [
            tuple(tuple(_later(work, turn * self.period) for turn, work in lane) for lane in side) for side in lanes
        ]
        if not self.order.host:
            return _first(Order(tuple(map(_in_turn, repeated[0]))), count)
        at = {work: index for _, lane in self.order.lanes for index, work in enumerate(lane)}
        after = dict[Work, Work]()
        for side, other in ((0, 1), (1, 0)):
            for lane, works, others, (begin, end) in zip(
                lanes[side], repeated[side], repeated[other], self.spans[other], strict=True
            ):
                for (turn, first), work in zip(lane, works, strict=True):
                    if first in self.order.after:  # shifted by the items of a period
                        after[work] = others[at[self.order.after[first]] + turn * (end - begin)]
        return _first(Order(repeated[0], repeated[1], after), count)


def _repeated(lane: Sequence[Work], span: tuple[int, int], repeats: int) -> list[tuple[int, Work]]:
    """Return (repetitions before it, item) for every item of a lane, its period run ``repeats`` more times.

    Micro-batch numbers are those of the short order.

    Args:
        lane: items of the short order.
        span: (items before the period begins, items before it ends).
        repeats: number of additional periods.
    """
    begin, end = span
    parts = [(0, lane[:end]), *((turn, lane[begin:end]) for turn in range(1, repeats + 1)), (repeats, lane[end:])]
    return [(turn, work) for turn, works in parts for work in works]


def periodic(layout: Layout, order: Order, costs: PipelineCosts, few: int) -> Periodic:
    """Find the part of ``order`` whose repetition takes the least time per micro-batch.

    Returns that part with the order. A part can be repeated if the work in progress is equal at its beginning and its
    end on every position. Micro-batches of a stage are interchangeable. Without offloading they are renumbered in the
    order in which they run, so that only their numbers differ between periods. With offloading, only parts are
    considered whose repetition fits in memory.

    Args:
        layout: the stages and their positions.
        order: an order for ``few`` micro-batches.
        costs: costs of the blocks.
        few: number of micro-batches of ``order``.
    """
    if not order.host:
        order = Order(tuple(map(_in_turn, order.compute)))
    times = play(layout, order, costs)
    works: list[list[Work]] = [[] for _ in range(layout.size)]
    for work in sorted(times, key=lambda work: times[work][0]):  # stable: `play` orders equal starts
        works[layout.places[work.stage]].append(work)
    positions = [_Position(layout.stages_of(place), place_works, times) for place, place_works in enumerate(works)]
    options: list[tuple[float, int, list[tuple[int, int]]]] = []
    for moment in dict.fromkeys([0.0, *positions[0].moments]):
        begins = [bisect_left(position.starts, moment) for position in positions]
        for period in range(1, few + 1):
            spans = list[tuple[int, int]]()
            for position, begin in zip(positions, begins, strict=True):
                if (end := position.again(begin, period)) is None:
                    break
                spans.append((begin, end))
            if len(spans) < len(positions):
                continue
            length = max(position.length(*span) for position, span in zip(positions, spans, strict=True))
            options.append((length / period, period, spans))
            break
    limit = min(each for each, _, _ in options) * (1 + HARDLY)
    options.sort(key=lambda option: (option[0] > limit, option[1] if option[0] <= limit else option[0]))
    for each, period, spans in options:  # the last option is the whole order
        sides = [
            tuple(position.of_lane(side, *span) for position, span in zip(positions, spans, strict=True))
            for side in (0, 1)
        ]
        repeating = Periodic(order, few, period, (sides[0], sides[1] if order.host else ()), each * period)
        # Waits for memory repeat with the period, but `order` need not contain all of them. So memory is checked.
        if not order.host or fits(costs, max(peak(layout, repeating.of(few + 2 * period), costs))):
            return repeating
    raise AssertionError("an order can follow itself")


class _Position:
    """Work items of one position on both lanes, sorted by their start, and the work in progress after each.

    Attributes:
        starts: start of every item.
        moments: times at which a period may begin: the starts of forward passes.
    """

    def __init__(self, stages: Sequence[int], works: Sequence[Work], times: Mapping[Work, tuple[float, float]]) -> None:
        self._times = [times[work] for work in works]
        self._sides = [int(work.kind in "OR") for work in works]
        self.starts = [start for start, _ in self._times]
        self.moments = dict.fromkeys(times[work][0] for work in works if work.kind == "F")
        self._states = list(_states(stages, works))
        self._index = {state: index for index, state in enumerate(self._states)}

    def again(self, begin: int, period: int) -> int | None:
        """Return after how many items the state after ``begin`` items recurs, ``period`` micro-batches later.

        None if it does not occur again. A state is the work in progress of this position, see ``_states``."""
        forward, under_way = self._states[begin]
        return self._index.get((tuple(number + period for number in forward), under_way))

    def length(self, begin: int, end: int) -> float:
        """Return the time from the start of item ``begin`` to the end of item ``end - 1``, the longer of both lanes.

        A period with these items cannot be shorter."""
        length = 0.0
        for side in (0, 1):
            first = next((index for index in range(begin, len(self._sides)) if self._sides[index] == side), None)
            last = next((index for index in range(end - 1, -1, -1) if self._sides[index] == side), None)
            if first is not None and last is not None:
                length = max(length, self._times[last][1] - self._times[first][0])
        return length

    def of_lane(self, side: int, begin: int, end: int) -> tuple[int, int]:
        """Return how many of the first ``begin`` items, and how many of the first ``end`` items, are on one lane.

        Args:
            side: 0 for the lane that computes, 1 for the host lane.
        """
        return self._sides[:begin].count(side), self._sides[:end].count(side)


def _states(
    stages: Sequence[int], works: Iterable[Work]
) -> Iterator[tuple[tuple[int, ...], tuple[tuple[tuple[int, int], ...], frozenset[tuple[str, int, int]]]]]:
    """Yield (forward passes by stage, work in progress) before the first item and after each item.

    This is a position's state. Work in progress is, for each stage, the number of input gradients and of weight
    gradients that are missing for its forward passes. It also contains the micro-batches that are offloaded or
    reloaded, numbered relative to the stage's next forward pass.

    Args:
        stages: stages of the position.
        works: work items of the position, sorted by their start.
    """
    done = {kind: dict.fromkeys(stages, 0) for kind in "FIW"}
    host: set[tuple[str, int, int]] = set()

    def state():
        """Return (forward passes by stage, work in progress) at this point."""
        forward = tuple(done["F"].values())
        to_come = tuple((number - done["I"][s], number - done["W"][s]) for s, number in done["F"].items())
        return forward, (to_come, frozenset((kind, stage, m - done["F"][stage]) for kind, stage, m in host))

    yield state()
    for kind, stage, m in works:
        if kind in "OR":
            host.add((kind, stage, m))
        else:
            for part in "IW" if kind == "B" else kind:
                done[part][stage] += 1
            if kind in "BI":
                host -= {("O", stage, m), ("R", stage, m)}
        yield state()


def _in_turn(lane: Iterable[Work]) -> tuple[Work, ...]:
    """Return a lane's items with micro-batches renumbered 0, 1, 2, ... in the order in which each stage runs them.

    Forward and backward passes are numbered separately. A W item gets the number of the first I item that waits for it.
    """
    forward, backward = dict[int, int](), dict[int, int]()
    waiting: dict[int, deque[int]] = {}
    works = []
    for kind, stage, _ in lane:
        if kind == "W":
            m = waiting[stage].popleft()
        else:
            numbers = forward if kind == "F" else backward
            m = numbers.get(stage, 0)
            numbers[stage] = m + 1
            if kind == "I":
                waiting.setdefault(stage, deque()).append(m)
        works.append(Work(kind, stage, m))
    return tuple(works)


def _first(order: Order, count: int) -> Order:
    """Return a longer order without the items of all but its first ``count`` micro-batches.

    If a removed item waits for the other lane of its position, the next kept item waits instead, so that nothing starts
    earlier than before. An item that waited for a removed item waits for the kept item before it."""

    def kept(lane: Iterable[Work]) -> tuple[Work, ...]:
        """Return the items of the first ``count`` micro-batches."""
        return tuple(work for work in lane if work.micro_batch < count)

    after, stages = dict[Work, Work](), 1 + max(work.stage for lane in order.compute for work in lane)
    for lanes in zip(order.compute, order.host, strict=True) if order.host else ():
        for lane, other in (lanes, lanes[::-1]):
            left, ended, before = kept(other), 0, dict[Work, int]()
            """Of the other lane: what is left, and how much of it has ended when a work has."""
            for work in other:
                ended += work.micro_batch < count
                before[work] = ended
            pending = 0
            for work in lane:
                waited = before[order.after[work]] if work in order.after else 0
                pending = max(pending, waited)
                if work.micro_batch >= count:
                    needed = (before.get(need, 0) for choice in needs(work, stages) for need in choice)
                    pending = max(pending, *needed, 0)
                elif pending:
                    after[work], pending = left[pending - 1], 0
    return Order(tuple(map(kept, order.compute)), tuple(map(kept, order.host)), after)


def _later(work: Work, shift: int) -> Work:
    """Return ``work`` with its micro-batch number increased by ``shift``."""
    return work._replace(micro_batch=work.micro_batch + shift) if shift else work
