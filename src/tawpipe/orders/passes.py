"""List scheduling of a layout's works, forward and backward in time: what ``arrange`` and ``generate`` ask thousands of
times, and therefore the fast twin of ``work.play``.

Works are numbers here. With M micro-batches and S stages, work ``step * M + m`` is micro-batch m on its way: steps 0 to
S - 1 are forward passes, S to 2S - 1 backward passes (or their parts I) from the last stage to the first, and 2S to
3S - 1 the W of these in the same order. What a work waits for is thereby M before it.

A pass lets every position do, whenever it is free, the first work of a list that is ready. A pass backward in time is
the same for the mirrored pipeline; the order in which it ends is the list of the next pass forward, and so on: double
justification, as in scheduling projects under limited resources, which closes gaps that no fixed rule sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import pairwise

from tawpipe.orders.room import OrderMemory
from tawpipe.schedule.pipelines.memory import worst
from tawpipe.schedule.pipelines.work import Order, StageCosts, Work


@dataclass(frozen=True)
class TimedOrder:
    """A schedule.

    Args:
        ends: of works, by number; of no meaning for those that are none.
        lanes: works of every position, in order.
        makespan: the last end.
    """

    ends: list[int]
    lanes: list[list[int]]
    makespan: int


@dataclass(frozen=True)
class Passes:
    """Schedules of a layout.

    Args:
        split: by stage, true for I and W apart, false for B.
    """

    stages: StageCosts
    micro_batches: int
    split: tuple[bool, ...]

    @cached_property
    def _steps(self) -> tuple[list[int], list[int], list[int]]:
        """(time, position, time until what follows M later can begin) of every work."""
        table, places, count = self.stages, self.stages.layout.places, self.micro_batches
        back = range(len(places) - 1, -1, -1)
        times = [table.seconds["F", s] for s in range(len(places))]
        times += [table.seconds["I", s] + (0 if self.split[s] else table.seconds["W", s]) for s in back]
        times += [table.seconds["W", s] for s in back]
        where = [*places, *places[::-1], *places[::-1]]
        away = [table.costs.travel(a, b) for a, b in pairwise(where[: 2 * len(places)])]
        away += [0] * (len(where) - len(away))

        def each(values: Sequence[int]) -> list[int]:
            return [value for value in values for _ in range(count)]

        return each(times), each(where), each(away)

    @cached_property
    def works(self) -> list[int]:
        """All numbers of works."""
        count, stages = self.micro_batches, self.stages.layout.stages
        chain = 2 * stages * count
        kept = [step for step in range(stages) if self.split[stages - 1 - step]]
        return [*range(chain), *(chain + step * count + m for step in kept for m in range(count))]

    def named(self, work: int) -> Work:
        """A number's work."""
        step, m = divmod(work, self.micro_batches)
        stages = len(self.split)
        turn, at = divmod(step, stages)
        stage = at if turn == 0 else stages - 1 - at
        return Work("F" if turn == 0 else "W" if turn == 2 else "I" if self.split[stage] else "B", stage, m)

    def order(self, timed: TimedOrder) -> Order:
        """A schedule's order."""
        return Order(tuple(tuple(map(self.named, lane)) for lane in timed.lanes))

    def starts(self, timed: TimedOrder) -> list[int]:
        """When the works of a schedule start, by number."""
        return [end - time for end, time in zip(timed.ends, self._steps[0], strict=True)]

    def fits(self, timed: TimedOrder) -> bool:
        """True if a schedule keeps within the limit of memory."""
        limit = self.stages.costs.memory
        return math.isinf(limit) or max(worst(self.stages, self.order(timed))) <= limit

    def forward(self, works: Sequence[int], flying: int = 0) -> TimedOrder:
        """One pass in time.

        Args:
            works: all of them, the most urgent first.
            flying: micro-batches that are under way at most; 0 for any number.
        """
        count, stages, away = self.micro_batches, self.stages.layout.stages, self._steps[2]
        chain, half, flying = 2 * stages * count, stages * count, min(flying, count) or count

        def following(work: int) -> Sequence[tuple[int, int]]:
            after = [(work + count, away[work])] if work + count < chain else []
            if half <= work < chain:
                if self.split[stages - 1 - (work - half) // count]:
                    after.append((work + half, 0))
                if work >= chain - count and (begins := work - chain + count + flying) < count:
                    after.append((begins, 0))
            return after

        room = OrderMemory(self.stages, count, self.split) if not math.isinf(self.stages.costs.memory) else None
        missing = [0] * flying + [1] * (3 * half - flying)
        return TimedOrder(*self._listed(works, missing, following, room))

    def backward(self, works: Sequence[int], flying: int = 0) -> TimedOrder:
        """One pass against time, mirrored: a schedule that ends as late as can be.

        Args:
            works: all of them, first what should end last.
            flying: see ``forward``.
        """
        count, stages, away = self.micro_batches, self.stages.layout.stages, self._steps[2]
        chain, half, flying = 2 * stages * count, stages * count, min(flying, count) or count
        last = chain - count
        missing = [1] * chain + [0] * half
        for work in range(last, chain):
            missing[work] = 1 if work + flying < chain else 0
        for step in range(stages):
            if self.split[stages - 1 - step]:
                for work in range(half + step * count, half + (step + 1) * count):
                    missing[work] += 1

        def following(work: int) -> Sequence[tuple[int, int]]:
            if work >= chain:
                return [(work - half, 0)]
            if work >= count:
                return [(work - count, away[work - count])]
            return [(last + work - flying, 0)] if work >= flying else []

        starts, lanes, makespan = self._listed(works, missing, following)
        ends = [makespan - start + time for start, time in zip(starts, self._steps[0], strict=True)]
        return TimedOrder(ends, [lane[::-1] for lane in lanes], makespan)

    def _listed(
        self,
        works: Sequence[int],
        missing: list[int],
        following: Callable[[int], Sequence[tuple[int, int]]],
        room: OrderMemory | None = None,
    ) -> tuple[list[int], list[list[int]], int]:
        """(ends of works, works of every position, the last end) of one pass.

        Args:
            missing: how many works each one waits for; is used up.
            following: the works that wait for one, each with the time between them.
        """
        times, places, _ = self._steps
        size, rank, due, ends = self.stages.layout.size, [0] * len(times), [0] * len(times), [0] * len(times)
        for index, work in enumerate(works):
            rank[work] = index
        lanes: list[list[int]] = [[] for _ in range(size)]
        coming: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        ready: list[list[int]] = [[] for _ in range(size)]
        free, idle, wakes = [0] * size, [True] * size, [(0, place) for place in range(size)]
        for work in works:
            if not missing[work]:
                heappush(ready[places[work]], rank[work])
        while wakes:
            now, place = heappop(wakes)
            if free[place] > now:
                continue
            arriving, runnable = coming[place], ready[place]
            while arriving and arriving[0][0] <= now:
                heappush(runnable, rank[heappop(arriving)[1]])
            work = -1
            if runnable:
                work = works[heappop(runnable)] if room is None else room.first(place, runnable, works)
            if work < 0:
                idle[place] = True
                if arriving:
                    heappush(wakes, (arriving[0][0], place))
                continue
            end = now + times[work]
            ends[work] = free[place] = end
            lanes[place].append(work)
            idle[place] = False
            heappush(wakes, (end, place))
            for after, delay in following(work):
                if end + delay > due[after]:
                    due[after] = end + delay
                missing[after] -= 1
                if not missing[after]:
                    heappush(coming[places[after]], (due[after], after))
                    if idle[places[after]]:
                        heappush(wakes, (due[after], places[after]))
        return ends, lanes, max(free)
