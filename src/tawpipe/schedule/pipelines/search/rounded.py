"""Costs in whole ticks for a solver that knows nothing else; exact where they are multiples of one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.work import PipelineCosts, Work

FINEST = 60
"""An exact unit of time or memory is looked for down to this part of the smallest number."""
TICKS, GRAINS = 200, 10**9
"""Where there is none: ticks of the shortest work, and parts of the limit of memory."""


@dataclass(frozen=True)
class Rounded(PipelineCosts):
    """Costs in whole ticks, none of them less than in truth.

    Args:
        unit: time of a tick.
        stretch: any schedule, slowed down by this, is one in ticks.
    """

    unit: float = 1.0
    stretch: float = 1.0
    true: PipelineCosts | None = None

    @classmethod
    def of(cls, layout: Layout, costs: PipelineCosts, most: float) -> Rounded:
        """Exact where all times are multiples of one.

        Args:
            most: the longest time that has to be counted.
        """
        kinds = "FIW" + "OR" * math.isfinite(costs.host)
        works = [Work(kind, stage, 0) for kind in kinds for stage in range(layout.stages)]
        hops = costs.hop, costs.near_hop
        times = [one for one in (*(costs.seconds(layout, work) for work in works), *hops) if one > 0]
        unit = unit_of(times, max(min(times) / TICKS, most / 2**22))
        stretch = max(up(one / unit) * unit / one for one in times)
        hop, near = (up(one / unit) for one in hops)
        return cls(costs.blocks, hop, near_hop=near, nodes=costs.nodes, unit=unit, stretch=stretch, true=costs)

    def seconds(self, layout: Layout, work: Work) -> int:
        assert self.true is not None
        # A whole backward pass is as long as its parts, so that one variable says which of them it is.
        kinds = "IW" if work.kind == "B" else work.kind
        return sum(up(self.true.seconds(layout, work._replace(kind=kind)) / self.unit) for kind in kinds)


def up(number: float) -> int:
    """The next whole number, but for what floats add."""
    return math.ceil(number - 1e-6)


def unit_of(numbers: list[float], finest: float) -> float:
    """The largest part of the smallest number of which all are multiples, or else ``finest``."""
    least = min(numbers)
    for parts in range(1, FINEST + 1):
        shares = [number * parts / least for number in numbers]
        if all(abs(share - round(share)) < 1e-9 * max(1.0, share) for share in shares):
            return least / parts
    return finest
