"""List scheduling of a layout's works, forward and backward in time.

``arrange`` and ``generate`` call it thousands of times, so it is a fast version of ``work.play``.

Works are numbers here. With M micro-batches and S stages, work ``step * M + m`` belongs to micro-batch m. Steps 0 to S
- 1 are forward passes. Steps S to 2S - 1 are backward passes (or their parts I), from the last stage to the first.
Steps 2S to 3S - 1 are the W of these, in the order of the backward passes. The work that precedes another one in its
chain therefore has a number smaller by M.

In a pass, every free position runs the first ready work of a list. A pass backward in time does this for the mirrored
pipeline. The order of its end times is the list of the next pass forward, and so on. This is double justification,
known from project scheduling under limited resources. It closes gaps that no fixed rule sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import pairwise

from tawpipe.orders.order_memory import OrderMemory
from tawpipe.schedule.pipelines.memory import worst
from tawpipe.schedule.pipelines.work import Order, StageCosts, Work


@dataclass(frozen=True)
class TimedOrder:
    """Order of a pipeline's works with their end times.

    Args:
        ends: end time of each work, by number. Without meaning for W that are part of a whole B.
        lanes: works of every position, in order.
        makespan: end of the last work.
    """

    ends: list[int]
    lanes: list[list[int]]
    makespan: int


@dataclass(frozen=True)
class Passes:
    """Scheduling of a layout's works.

    Args:
        stages: costs of the layout's stages, in ticks.
        micro_batches: number of micro-batches.
        split: for each stage, True for separate I and W, False for a whole B.
    """

    stages: StageCosts
    micro_batches: int
    split: tuple[bool, ...]

    @cached_property
    def _steps(self) -> tuple[list[int], list[int], list[int]]:
        """Three lists by work: its time, its position, and the time until the next work of its chain can begin."""
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
        """Numbers of all works."""
        count, stages = self.micro_batches, self.stages.layout.stages
        chain = 2 * stages * count
        kept = [step for step in range(stages) if self.split[stages - 1 - step]]
        return [*range(chain), *(chain + step * count + m for step in kept for m in range(count))]

    def named(self, work: int) -> Work:
        """Return the ``Work`` with this number."""
        step, m = divmod(work, self.micro_batches)
        stages = len(self.split)
        turn, at = divmod(step, stages)
        stage = at if turn == 0 else stages - 1 - at
        return Work("F" if turn == 0 else "W" if turn == 2 else "I" if self.split[stage] else "B", stage, m)

    def order(self, timed: TimedOrder) -> Order:
        """Convert a timed order to an ``Order``, which has no times."""
        return Order(tuple(tuple(map(self.named, lane)) for lane in timed.lanes))

    def starts(self, timed: TimedOrder) -> list[int]:
        """Return the start times of all works, by number."""
        return [end - time for end, time in zip(timed.ends, self._steps[0], strict=True)]

    def fits(self, timed: TimedOrder) -> bool:
        """Return True if the order stays within the memory limit."""
        limit = self.stages.costs.memory
        return math.isinf(limit) or max(worst(self.stages, self.order(timed))) <= limit

    def forward(self, works: Sequence[int], flying: int = 0) -> TimedOrder:
        """Start each work as early as possible, in one pass forward in time, within the memory limit; return the order.

        Args:
            works: all works, the most urgent first.
            flying: maximum number of micro-batches in flight; 0 for any number.
        """
        count, stages, away = self.micro_batches, self.stages.layout.stages, self._steps[2]
        chain, half, flying = 2 * stages * count, stages * count, min(flying, count) or count

        def following(work: int) -> Sequence[tuple[int, int]]:
            """Return the works that wait for a work, each with the time between them."""
            after = [(work + count, away[work])] if work + count < chain else []
            if half <= work < chain:
                if self.split[stages - 1 - (work - half) // count]:
                    after.append((work + half, 0))
                if work >= chain - count and (begins := work - chain + count + flying) < count:
                    after.append((begins, 0))
            return after

        order_memory = OrderMemory(self.stages, count, self.split) if not math.isinf(self.stages.costs.memory) else None
        missing = [0] * flying + [1] * (3 * half - flying)
        return TimedOrder(*self._listed(works, missing, following, order_memory))

    def backward(self, works: Sequence[int], flying: int = 0) -> TimedOrder:
        """Let each work end as late as possible, in one pass backward in time; return the order.

        The memory limit is not checked, see ``fits``.

        Args:
            works: all works, first the one that should end last.
            flying: maximum number of micro-batches in flight; 0 for any number.
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
            """Return the works that wait for a work in the mirrored pipeline, each with the time between them."""
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
        order_memory: OrderMemory | None = None,
    ) -> tuple[list[int], list[list[int]], int]:
        """Simulate list scheduling: every free position runs the first work in ``works`` that is ready.

        Args:
            works: all works, the most urgent first.
            missing: for each work, the number of works it waits for. This list is modified.
            following: returns the works that wait for a work, each with the time between them.
            order_memory: memory of the positions, which is updated; None for no limit.

        Returns:
            (end time of each work, works of every position, end of the last work)
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
                work = works[heappop(runnable)] if order_memory is None else order_memory.first(place, runnable, works)
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
