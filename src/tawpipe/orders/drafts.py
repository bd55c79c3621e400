"""What annealing tries: what layers keep and where, their stages, and how an order is made for them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from tawpipe.orders.passes import Passes, TimedOrder
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.work import Order, PipelineCosts

SPARE = (2, 1, 3)
"""Places for what moves, see ``Draft``."""


@dataclass(frozen=True)
class Keeping:
    """What layers keep, and the stages that they are in.

    Args:
        keeps: for every block what its backward pass computes again, as in ``ScheduleSettings.recompute``.
        moving: blocks whose memory may go to the host's.
    """

    layout: Layout
    keeps: tuple[str, ...]
    moving: frozenset[int] = frozenset()

    @property
    def recompute(self) -> str:
        """The setting that says so, from the last layer backwards."""
        runs = [(how, len([*same])) for how, same in groupby(reversed(self.keeps[1:-1]))]
        return ",".join([*(f"{how}:{count}" for how, count in runs[:-1]), runs[-1][0]])

    def costs(self, options: Mapping[str, PipelineCosts]) -> PipelineCosts:
        """The costs of it, by those with all layers alike; with no host where nothing moves."""
        blocks = []
        for number, how in enumerate(self.keeps):
            block = options[how].blocks[number]
            blocks.append(replace(block, stays=0.0 if number in self.moving else block.kept))
        costs = next(iter(options.values()))
        return replace(costs, blocks=tuple(blocks), host=costs.host if self.moving else math.inf)


@dataclass(frozen=True)
class Draft:
    """A choice, and how an order is made for it.

    Args:
        parted: by stage, whether gradients of weights are computed apart, where memory holds that.
        policy: see ``arrange.policies``.
        hosted: by stage, whether what its layers keep waits in the host's memory.
        spare: places of a position for what is on its way to or from there, each for the most that one stage keeps.
    """

    choice: Keeping
    parted: tuple[bool, ...]
    policy: tuple[int, int]
    hosted: tuple[bool, ...]
    spare: int = SPARE[0]

    @property
    def chosen(self) -> Keeping:
        """The choice with the layers whose memory moves."""
        layout = self.choice.layout
        moving = (block for stage, away in enumerate(self.hosted) if away for block in layout.blocks_of(stage) if block)
        return replace(self.choice, moving=frozenset(moving))


@dataclass(frozen=True)
class Judged:
    """A draft with the order that it is judged by.

    Args:
        length: of a step, in ticks.
        energy: what annealing lowers, see ``LEAN``.
        order: with the host's works, where there are some.
    """

    draft: Draft
    passes: Passes
    timed: TimedOrder
    length: float
    energy: float
    order: Order | None = None

    @cached_property
    def starts(self) -> list[int]:
        """When works start, by number; a W that is none begins with its B."""
        count, stages, starts = self.passes.micro_batches, len(self.passes.split), self.passes.starts(self.timed)
        for step, split in enumerate(reversed(self.passes.split)):
            if not split:
                first = (stages + step) * count
                starts[first + stages * count : first + (stages + 1) * count] = starts[first : first + count]
        return starts

    def urgency(self, passes: Passes) -> list[int]:
        """All works of a neighbour, in the order of their starts here."""
        count, here, there = passes.micro_batches, self.draft.choice.layout, passes.stages.layout
        starts = self.starts
        if here.stages != there.stages:
            same = [bisect_right(here.cuts, first) - 1 for first in there.cuts]
            last = [here.stages - 1 - at for at in reversed(same)]
            steps = [*same, *(here.stages + at for at in last), *(2 * here.stages + at for at in last)]
            starts = [start for step in steps for start in starts[step * count : (step + 1) * count]]
        return sorted(passes.works, key=starts.__getitem__)
