"""Drafts of the annealing search: what each layer keeps and where, the stages, and how an order is made for them."""

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
"""Values of ``Draft.spare`` that are tried."""


@dataclass(frozen=True)
class Keeping:
    """Choice of what each layer keeps until its backward pass, and of the stages.

    Args:
        layout: stages and their positions.
        keeps: for every block, what its backward pass computes again, as in ``ScheduleSettings.recompute``.
        moving: blocks whose saved activations may go to the CPU memory.
    """

    layout: Layout
    keeps: tuple[str, ...]
    moving: frozenset[int] = frozenset()

    @property
    def recompute(self) -> str:
        """Value of the setting ``recompute`` that gives this choice, for example ``none:4,selective:8,full``.

        The setting counts layers from the last one backwards."""
        runs = [(how, len([*same])) for how, same in groupby(reversed(self.keeps[1:-1]))]
        return ",".join([*(f"{how}:{count}" for how, count in runs[:-1]), runs[-1][0]])

    def costs(self, options: Mapping[str, PipelineCosts]) -> PipelineCosts:
        """Combine the costs of the recomputation options into the costs of this choice.

        The link to the CPU memory is infinitely slow if no block moves.

        Args:
            options: for each recomputation option, the costs if all layers use it.
        """
        blocks = []
        for number, how in enumerate(self.keeps):
            block = options[how].blocks[number]
            blocks.append(replace(block, stays=0.0 if number in self.moving else block.kept))
        costs = next(iter(options.values()))
        return replace(costs, blocks=tuple(blocks), host=costs.host if self.moving else math.inf)


@dataclass(frozen=True)
class Draft:
    """Choice of stages and recomputation, with the parameters of its order.

    Args:
        choice: stages, and what layers keep.
        parted: for each stage, True to compute gradients of weights apart if the memory allows it.
        policy: (maximum micro-batches in flight, group size), see ``arrange.policies``.
        hosted: for each stage, True if the activations that its layers keep wait in the CPU memory.
        spare: number of buffers on each position for activations on their way to or from the CPU memory. Each is as
            large as the most that one stage keeps.
    """

    choice: Keeping
    parted: tuple[bool, ...]
    policy: tuple[int, int]
    hosted: tuple[bool, ...]
    spare: int = SPARE[0]

    @property
    def chosen(self) -> Keeping:
        """Copy of ``choice`` in which ``moving`` has all blocks, except the embedding, of the stages in ``hosted``."""
        layout = self.choice.layout
        moving = (block for stage, away in enumerate(self.hosted) if away for block in layout.blocks_of(stage) if block)
        return replace(self.choice, moving=frozenset(moving))


@dataclass(frozen=True)
class Judged:
    """Draft with the order by which its quality is measured.

    Args:
        draft: the draft.
        passes: layout, costs and number of micro-batches in ticks.
        timed: its order with times.
        length: duration of a step in ticks.
        energy: value that annealing minimises, see ``LEAN``.
        order: order with the transfers to and from the CPU memory, or None without offloading.
    """

    draft: Draft
    passes: Passes
    timed: TimedOrder
    length: float
    energy: float
    order: Order | None = None

    @cached_property
    def starts(self) -> list[int]:
        """Start times of all works by number. A W that is part of a whole B gets the start of that B."""
        count, stages, starts = self.passes.micro_batches, len(self.passes.split), self.passes.starts(self.timed)
        for step, split in enumerate(reversed(self.passes.split)):
            if not split:
                first = (stages + step) * count
                starts[first + stages * count : first + (stages + 1) * count] = starts[first : first + count]
        return starts

    def urgency(self, passes: Passes) -> list[int]:
        """Return the numbers of all works of a neighbouring draft, sorted by their start times in this order.

        If the neighbour has other stages, each of its stages takes the times of the stage that holds its first block
        here.

        Args:
            passes: layout, costs and number of micro-batches of the neighbour.
        """
        count, here, neighbour = passes.micro_batches, self.draft.choice.layout, passes.stages.layout
        starts = self.starts
        if here.stages != neighbour.stages:
            same = [bisect_right(here.cuts, first) - 1 for first in neighbour.cuts]
            last = [here.stages - 1 - at for at in reversed(same)]
            steps = [*same, *(here.stages + at for at in last), *(2 * here.stages + at for at in last)]
            starts = [start for step in steps for start in starts[step * count : (step + 1) * count]]
        return sorted(passes.works, key=starts.__getitem__)
