"""Costs in whole ticks for a solver that knows only whole numbers. Exact if all times are multiples of one unit."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.work import PipelineCosts, StageCosts

FINEST = 60
"""An exact unit is searched for down to the smallest time or memory divided by this number."""
TICKS, GRAINS = 200, 10**9
"""Without an exact unit: ticks of the shortest work, and parts of the memory limit (``GRAINS``)."""


@dataclass(frozen=True)
class Rounded(PipelineCosts):
    """Costs in whole ticks, rounded up.

    Args:
        unit: time of a tick.
        stretch: factor by which any schedule must be slowed down to be valid in ticks.
        true: the exact costs.
    """

    unit: float = 1.0
    stretch: float = 1.0
    true: PipelineCosts | None = None

    @classmethod
    def of(cls, layout: Layout, costs: PipelineCosts, most: float) -> Rounded:
        """Round costs up to whole ticks. The result is exact if all times are multiples of one unit.

        Args:
            layout: stages and their positions.
            costs: exact costs.
            most: longest time that must be representable: it becomes at most about 2**22 ticks.
        """
        seconds, hops = costs.stages(layout).seconds, (costs.hop, costs.near_hop)
        works = [seconds[kind, stage] for kind in _kinds(costs) for stage in range(layout.stages)]
        times = [time for time in (*works, *hops) if time > 0]
        unit = unit_of(times, max(min(times) / TICKS, most / 2**22))
        stretch = max(up(time / unit) * unit / time for time in times)
        hop, near = (up(time / unit) for time in hops)
        return cls(costs.blocks, hop, near_hop=near, nodes=costs.nodes, unit=unit, stretch=stretch, true=costs)

    def stages(self, layout: Layout) -> StageCosts:
        """Return the costs of stages in ticks. A B takes exactly the ticks of its I and W together."""
        assert self.true is not None
        table, seconds = super().stages(layout), self.true.stages(layout).seconds
        for stage in range(layout.stages):
            for kind in _kinds(self.true):
                table.seconds[kind, stage] = up(seconds[kind, stage] / self.unit)
            # A whole backward pass is as long as its parts, so that one variable can select between them.
            table.seconds["B", stage] = table.seconds["I", stage] + table.seconds["W", stage]
        return table


def _kinds(costs: PipelineCosts) -> str:
    """Return the kinds of works other than B; O and R only if the link to the CPU memory has a finite speed."""
    return "FIW" + "OR" * math.isfinite(costs.host)


def up(number: float) -> int:
    """Round up to a whole number, but ignore the rounding errors of floats."""
    return math.ceil(number - 1e-6)


def unit_of(numbers: list[float], finest: float) -> float:
    """Return the largest unit of which all numbers are multiples, or ``finest`` if there is none.

    Only whole fractions of the smallest number are tried, down to 1 / ``FINEST``.
    """
    least = min(numbers)
    for parts in range(1, FINEST + 1):
        shares = [number * parts / least for number in numbers]
        if all(abs(share - round(share)) < 1e-9 * max(1.0, share) for share in shares):
            return least / parts
    return finest
