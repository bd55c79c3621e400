"""Costs in whole ticks for a solver that knows nothing else; exact where they are multiples of one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.work import PipelineCosts, StageCosts

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
        seconds, hops = costs.stages(layout).seconds, (costs.hop, costs.near_hop)
        works = [seconds[kind, stage] for kind in _kinds(costs) for stage in range(layout.stages)]
        times = [time for time in (*works, *hops) if time > 0]
        unit = unit_of(times, max(min(times) / TICKS, most / 2**22))
        stretch = max(up(time / unit) * unit / time for time in times)
        hop, near = (up(time / unit) for time in hops)
        return cls(costs.blocks, hop, near_hop=near, nodes=costs.nodes, unit=unit, stretch=stretch, true=costs)

    def stages(self, layout: Layout) -> StageCosts:
        assert self.true is not None
        table, seconds = super().stages(layout), self.true.stages(layout).seconds
        for stage in range(layout.stages):
            for kind in _kinds(self.true):
                table.seconds[kind, stage] = up(seconds[kind, stage] / self.unit)
            # A whole backward pass is as long as its parts, so that one variable says which of them it is.
            table.seconds["B", stage] = table.seconds["I", stage] + table.seconds["W", stage]
        return table


def _kinds(costs: PipelineCosts) -> str:
    """Kinds of works besides B that there can be."""
    return "FIW" + "OR" * math.isfinite(costs.host)


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
