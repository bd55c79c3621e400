"""Memory that a position can still give to new works so that everything in flight can finish: the banker's algorithm.

A stage's F takes the memory of what it keeps. Its I first takes the memory that W needs, and then frees the memory of
F. W frees the memory that I took. B frees the memory of F. W is always ready, so the memory that it frees is available
at any time.
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
    """Return for each stage True if I and W are separate, False if its backward pass must be whole.

    They are separate if ``split`` is set, W takes time, and the memory holds what is kept between them.

    Raises:
        UserError: the memory cannot hold one micro-batch.
    """
    layout, free_memory = stages.layout, stages.free_memory
    apart = [split and stages.seconds["W", stage] > 0 for stage in range(layout.stages)]
    needed = [resident + kept for resident, kept in zip(stages.resident, stages.micro_batch, strict=True)]
    if max(needed) > stages.costs.memory:
        scale = stages.costs.memory_scale if isinstance(stages.costs, Ticks) else 1.0
        place = needed.index(max(needed))
        least, available = max(needed) / scale, stages.costs.memory / scale
        expected = f"at least {least:.6g}: position {place} keeps that for one micro-batch in {layout}"
        expected += f", {least - available:.3g} more than available"
        raise UserError("memory of a position", f"{available:.6g}", expected, need=MemoryOfPosition())
    for place in range(layout.size):
        own_stages = layout.stages_of(place)
        for stage, below in zip(own_stages, accumulate(stages.kept[stage] for stage in own_stages), strict=True):
            apart[stage] = apart[stage] and below + stages.kept_for_weights[stage] <= free_memory[place]
    return tuple(apart)


def all_end(free: float, wanted: Sequence[float], held: Sequence[float], enough: float = math.inf) -> bool:
    """Return True if everything in flight can finish, one after another (the banker's algorithm).

    Args:
        free: free memory.
        wanted: for each micro-batch in order, the memory that it needs in addition to what it holds.
        held: for each micro-batch in order, the memory that it frees at its end.
        enough: amount of free memory with which all can certainly finish.
    """
    for more, release in zip(wanted, held, strict=True):
        if free >= enough:
            return True
        if more > free:
            return False
        free += release
    return True


class OrderMemory:
    """Memory of all positions while works start one after another.

    Args:
        stages: costs of the stages.
        micro_batches: number of micro-batches.
        split: for each stage, True if I and W are separate, see ``whole_stages``.
    """

    def __init__(self, stages: StageCosts, micro_batches: int, split: Sequence[bool]) -> None:
        layout, self.count = stages.layout, micro_batches
        self.free_memory = stages.free_memory
        kept = stages.kept
        parts = [part if apart else 0 for part, apart in zip(stages.kept_for_weights, split, strict=True)]
        self.stages, self.kept = layout.stages, kept
        self.takes = [*kept, *parts[::-1], *[0] * layout.stages]
        """By step (passes.py): memory that a work takes at its start."""
        self.changes = [
            *kept,
            *(w - k for w, k in zip(parts[::-1], kept[::-1], strict=True)),
            *(-w for w in parts[::-1]),
        ]
        """By step: memory that a work takes at its start, minus the memory that it frees at its end."""
        self.held = [0] * layout.size
        self.waiting = [0] * layout.size
        """By position: the part of ``held`` that is kept for W."""
        self.in_flight = [[0] * micro_batches for _ in range(layout.size)]
        """By position and micro-batch: memory held between F and I."""
        self.left = [[len(layout.stages_of(place))] * micro_batches for place in range(layout.size)]
        """By position and micro-batch: number of the position's stages, counted from its first, without a backward pass
        yet."""
        self.most: list[list[int]] = []
        """By position and number of stages without a backward pass yet: memory that a micro-batch needs to finish."""
        for place in range(layout.size):
            own_stages = layout.stages_of(place)
            sums = list(accumulate((kept[stage] for stage in own_stages), initial=0))
            ends = [total + parts[stage] for total, stage in zip(sums[1:], own_stages, strict=True)]
            self.most.append(list(accumulate(ends, max, initial=0)))
        self.wanted = [[most[-1]] * micro_batches for most in self.most]
        """By position and micro-batch: memory that it needs to finish, in addition to what it holds."""

    def first(self, place: int, ready: list[int], works: Sequence[int]) -> int:
        """Start the most urgent ready work that the memory allows, and return the number of this work.

        A started work is removed from ``ready``, and its memory is accounted for. A forward pass may start only if
        everything in flight can still finish.

        Args:
            place: the position.
            ready: heap of indices of ``works`` that are ready.
            works: numbers of all works in the order of urgency.

        Returns:
            An element of ``works``, or -1 if no work may start.
        """
        ready.sort()  # a sorted list is a heap, and sorting it again is fast
        available, enough = self.free_memory[place] - self.held[place], self.most[place][-1] - self.waiting[place]
        for at, index in enumerate(ready):
            work = works[index]
            step = work // self.count
            free = available - self.takes[step]
            if free >= 0 and (step >= self.stages or free >= enough or self._all_end(place, work, free)):
                del ready[at]
                self._start(place, work)
                return work
        return -1

    def _all_end(self, place: int, work: int, free: int) -> bool:
        """Return True if everything in flight can finish after the F ``work``, the oldest micro-batch first.

        Args:
            place: the position.
            work: number of the F.
            free: memory that is free after its start.
        """
        in_flight, wanted, (step, number) = self.in_flight[place], self.wanted[place], divmod(work, self.count)
        takes = self.takes[step]
        in_flight[number] += takes
        wanted[number] -= takes
        fits = all_end(free + self.waiting[place], wanted, in_flight, self.most[place][-1])
        in_flight[number] -= takes
        wanted[number] += takes
        return fits

    def _start(self, place: int, work: int) -> None:
        """Account for all memory that ``work`` takes and frees. No other work runs on the position before its end."""
        step, m = divmod(work, self.count)
        self.held[place] += self.changes[step]
        if step < self.stages:
            self.in_flight[place][m] += self.takes[step]
            self.wanted[place][m] -= self.takes[step]
        elif step < 2 * self.stages:
            self.waiting[place] += self.takes[step]
            self.in_flight[place][m] -= self.kept[2 * self.stages - 1 - step]
            self.left[place][m] -= 1
            self.wanted[place][m] = self.most[place][self.left[place][m]] - self.in_flight[place][m]
        else:
            self.waiting[place] += self.changes[step]
