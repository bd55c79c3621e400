"""Orders of any length, from one for few micro-batches whose middle goes on.

A pipeline that is full does the same again and again. Between two moments at which all positions have as much under
way, for later micro-batches, lies a *period*. An order with one more of it is an order for so many more micro-batches:
it waits for nothing that the first one does not wait for, and keeps no more. Where an order has no such moments but its
beginning and its end, all of it is the period.
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
    """An order for few micro-batches, and what of it is repeated.

    Args:
        few: micro-batches of the order.
        period: micro-batches of what is repeated.
        spans: of the lanes of computing and of those of the host, by position: works before the period begins, and
            before it ends.
        length: time of a period, but for what waits for other positions.
    """

    order: Order
    few: int
    period: int
    spans: tuple[tuple[tuple[int, int], ...], ...]
    length: float

    def of(self, count: int) -> Order:
        """The order for so many micro-batches, at least ``few``: periods for no fewer, of which the last ones go."""
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
                    if first in self.order.after:  # as many works of the other lane later, whichever they are
                        after[work] = others[at[self.order.after[first]] + turn * (end - begin)]
        return _first(Order(repeated[0], repeated[1], after), count)


def _repeated(lane: Sequence[Work], span: tuple[int, int], repeats: int) -> list[tuple[int, Work]]:
    """(repetition, work) of a lane whose period comes so many times more."""
    begin, end = span
    parts = [(0, lane[:end]), *((turn, lane[begin:end]) for turn in range(1, repeats + 1)), (repeats, lane[end:])]
    return [(turn, work) for turn, works in parts for work in works]


def periodic(layout: Layout, order: Order, costs: PipelineCosts, few: int) -> Periodic:
    """What of an order for ``few`` micro-batches is repeated: what takes the least time for each of them.

    Micro-batches of a stage are alike. Where none goes to the host's memory they take turns, and nothing but their
    numbers counts.
    """
    if not order.host:
        order = Order(tuple(map(_in_turn, order.compute)))
    times = play(layout, order, costs)
    works: list[list[Work]] = [[] for _ in range(layout.size)]
    for work in sorted(times, key=lambda work: times[work][0]):  # those that start together as ``play`` has done them
        works[layout.places[work.stage]].append(work)
    positions = [_Position(layout.stages_of(place), there, times) for place, there in enumerate(works)]
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
    for each, period, spans in options:  # from the beginning to the end it is the whole order
        sides = [
            tuple(position.of_lane(side, *span) for position, span in zip(positions, spans, strict=True))
            for side in (0, 1)
        ]
        repeating = Periodic(order, few, period, (sides[0], sides[1] if order.host else ()), each * period)
        # What works wait for because of memory repeats itself, but need not have been said again in the first order.
        if not order.host or fits(costs, max(peak(layout, repeating.of(few + 2 * period), costs))):
            return repeating
    raise AssertionError("an order can follow itself")


class _Position:
    """The works of a position by their start, those of both lanes, and what is under way after each.

    Args:
        starts: of the works.
        moments: at which a period may begin, those of forward passes.
    """

    def __init__(self, stages: Sequence[int], works: Sequence[Work], times: Mapping[Work, tuple[float, float]]) -> None:
        self._times = [times[work] for work in works]
        self._sides = [int(work.kind in "OR") for work in works]
        self.starts = [start for start, _ in self._times]
        self.moments = dict.fromkeys(times[work][0] for work in works if work.kind == "F")
        self._states = list(_states(stages, works))
        self._index = {state: index for index, state in enumerate(self._states)}

    def again(self, begin: int, period: int) -> int | None:
        """After how many works there is as much under way as after ``begin``, ``period`` micro-batches later."""
        forward, under_way = self._states[begin]
        return self._index.get((tuple(number + period for number in forward), under_way))

    def length(self, begin: int, end: int) -> float:
        """By how much later a lane can begin again, at least."""
        length = 0.0
        for side in (0, 1):
            first = next((index for index in range(begin, len(self._sides)) if self._sides[index] == side), None)
            last = next((index for index in range(end - 1, -1, -1) if self._sides[index] == side), None)
            if first is not None and last is not None:
                length = max(length, self._times[last][1] - self._times[first][0])
        return length

    def of_lane(self, side: int, begin: int, end: int) -> tuple[int, int]:
        """So many works of a lane are among the first ones."""
        return self._sides[:begin].count(side), self._sides[:end].count(side)


def _states(
    stages: Sequence[int], works: Iterable[Work]
) -> Iterator[tuple[tuple[int, ...], tuple[tuple[tuple[int, int], ...], frozenset[tuple[str, int, int]]]]]:
    """(forward passes by stage, what is under way) before the first work and after each.

    Under way are as many backward passes, and gradients of weights, as are still to come for these forward passes, and
    what has gone to the host's memory or come back, as counted from the next forward pass.
    """
    done = {kind: dict.fromkeys(stages, 0) for kind in "FIW"}
    host: set[tuple[str, int, int]] = set()

    def state():
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
    """A lane on which the micro-batches of a stage take turns, whichever they were."""
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
    """The order of so many micro-batches of one for more.

    Where a work goes that waits for the other lane of its position, the next one waits in its stead, so that nothing
    begins sooner than it did; and what waited for a work that goes waits for the one before it.
    """

    def kept(lane: Iterable[Work]) -> tuple[Work, ...]:
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
    return work._replace(micro_batch=work.micro_batch + shift) if shift else work
