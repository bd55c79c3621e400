"""What a position can still take under a limit of memory, so that everything under way can end: the banker's algorithm.

A stage's forward pass takes what it keeps, its I takes what W needs and then gives the former back, W gives the latter
back, B the former. W is always ready, so what waits for it can be had at any time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from tawpipe.errors import UserError
from tawpipe.orders.ticks import Ticks
from tawpipe.schedule.pipelines.work import StageCosts
from tawpipe.schedule.refusal import MemoryOfPosition


def whole_stages(stages: StageCosts, split: bool) -> tuple[bool, ...]:
    """By stage, true if I and W can be apart: they are to be, W takes time, and memory holds what is between them.

    Raises:
        UserError: memory does not hold one micro-batch.
    """
    layout, rooms = stages.layout, stages.rooms
    apart = [split and stages.seconds["W", stage] > 0 for stage in range(layout.stages)]
    needed = [resident + kept for resident, kept in zip(stages.resident, stages.micro_batch, strict=True)]
    if max(needed) > stages.costs.memory:
        scale = stages.costs.memory_scale if isinstance(stages.costs, Ticks) else 1.0
        place = needed.index(max(needed))
        least, there = max(needed) / scale, stages.costs.memory / scale
        expected = f"at least {least:.6g}: position {place} keeps that for one micro-batch in {layout}"
        expected += f", {least - there:.3g} more than available"
        raise UserError("memory of a position", f"{there:.6g}", expected, need=MemoryOfPosition())
    for place in range(layout.size):
        own_stages = layout.stages_of(place)
        for stage, below in zip(own_stages, accumulate(stages.kept[stage] for stage in own_stages), strict=True):
            apart[stage] = apart[stage] and below + stages.kept_for_weights[stage] <= rooms[place]
    return tuple(apart)


def all_end(free: float, wanted: Sequence[float], held: Sequence[float], enough: float = math.inf) -> bool:
    """True if all that is under way can end, one after the other (the banker's algorithm).

    Args:
        free: memory.
        wanted: what each needs besides what it holds, in order.
        held: what each gives back at its end.
        enough: all can end with so much free.
    """
    for more, there in zip(wanted, held, strict=True):
        if free >= enough:
            return True
        if more > free:
            return False
        free += there
    return True


class OrderMemory:
    """The memory of all positions while works start one after the other.

    Args:
        split: by stage, see ``whole_stages``.
    """

    def __init__(self, stages: StageCosts, micro_batches: int, split: Sequence[bool]) -> None:
        layout, self.count = stages.layout, micro_batches
        self.rooms = stages.rooms
        kept = stages.kept
        parts = [part if apart else 0 for part, apart in zip(stages.kept_for_weights, split, strict=True)]
        self.stages, self.kept = layout.stages, kept
        self.takes = [*kept, *parts[::-1], *[0] * layout.stages]
        """By step (passes.py), memory from the start of a work on."""
        self.changes = [
            *kept,
            *(w - k for w, k in zip(parts[::-1], kept[::-1], strict=True)),
            *(-w for w in parts[::-1]),
        ]
        """By step, the same less what is free again after the work."""
        self.held = [0] * layout.size
        self.waiting = [0] * layout.size
        """For W, of what is held."""
        self.mine = [[0] * micro_batches for _ in range(layout.size)]
        """By position and micro-batch, between F and I."""
        self.left = [[len(layout.stages_of(place))] * micro_batches for place in range(layout.size)]
        """Stages whose backward pass is still to come, the first ones of the position."""
        self.most: list[list[int]] = []
        """By position and number of such stages, what a micro-batch needs to end."""
        for place in range(layout.size):
            own_stages = layout.stages_of(place)
            sums = list(accumulate((kept[stage] for stage in own_stages), initial=0))
            ends = [total + parts[stage] for total, stage in zip(sums[1:], own_stages, strict=True)]
            self.most.append(list(accumulate(ends, max, initial=0)))
        self.wanted = [[most[-1]] * micro_batches for most in self.most]
        """By position and micro-batch, what it needs to end besides what it has."""

    def first(self, place: int, ready: list[int], works: Sequence[int]) -> int:
        """The most urgent work that may start, which then has; -1 if none may.

        Args:
            ready: a heap of indices of ``works``; what is taken leaves it.
        """
        ready.sort()  # a sorted list is a heap, and the next sort has little to do
        room, enough = self.rooms[place] - self.held[place], self.most[place][-1] - self.waiting[place]
        for at, index in enumerate(ready):
            work = works[index]
            step = work // self.count
            free = room - self.takes[step]
            if free >= 0 and (step >= self.stages or free >= enough or self._all_end(place, work, free)):
                del ready[at]
                self._start(place, work)
                return work
        return -1

    def _all_end(self, place: int, work: int, free: int) -> bool:
        """True if all that is under way can end beside an F that leaves so much free, the oldest first."""
        mine, wanted, (step, number) = self.mine[place], self.wanted[place], divmod(work, self.count)
        takes = self.takes[step]
        mine[number] += takes
        wanted[number] -= takes
        fits = all_end(free + self.waiting[place], wanted, mine, self.most[place][-1])
        mine[number] -= takes
        wanted[number] += takes
        return fits

    def _start(self, place: int, work: int) -> None:
        """Take and give back what a work does; nothing else runs there before it ends."""
        step, m = divmod(work, self.count)
        self.held[place] += self.changes[step]
        if step < self.stages:
            self.mine[place][m] += self.takes[step]
            self.wanted[place][m] -= self.takes[step]
        elif step < 2 * self.stages:
            self.waiting[place] += self.takes[step]
            self.mine[place][m] -= self.kept[2 * self.stages - 1 - step]
            self.left[place][m] -= 1
            self.wanted[place][m] = self.most[place][self.left[place][m]] - self.mine[place][m]
        else:
            self.waiting[place] += self.changes[step]
