"""Times and memory as whole numbers, so that a search decides alike on every machine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tawpipe.schedule.pipelines.work import ROUNDING, BlockTimes, PipelineCosts

DIGITS = 40
"""Binary digits of the largest number. Whole numbers in the costs stay exact."""


def scale_of(values: Iterable[float]) -> float:
    """Return the power of two by which the largest of ``values`` gets ``DIGITS`` binary digits.

    >>> scale_of([3.0, 2.0**39])
    1.0
    """
    return math.ldexp(1.0, DIGITS - math.frexp(max(values, default=0.0) or 1.0)[1])


@dataclass(frozen=True)
class Ticks(PipelineCosts):
    """Costs of a pipeline in whole numbers, without the link to the CPU memory.

    Args:
        scale: ticks per unit of time.
        memory_scale: ticks per unit of memory.
    """

    scale: float = 1.0
    memory_scale: float = 1.0

    @classmethod
    def of(cls, costs: PipelineCosts) -> Ticks:
        """Round times and memory of ``costs`` to whole ticks.

        The scales are powers of two, chosen by the largest values, so that whole numbers stay exact."""
        times = [
            time for block in costs.blocks for time in (block.forward, block.backward_input, block.backward_weight)
        ]
        scale = scale_of([*times, costs.hop, costs.near_hop])
        memory_scale = scale_of(memory for block in costs.blocks for memory in (block.kept, block.kept_for_weights))
        blocks = tuple(
            BlockTimes(
                round(block.forward * scale),
                round(block.backward_input * scale),
                round(block.backward_weight * scale),
                round(block.kept * memory_scale),
                round(block.kept_for_weights * memory_scale),
                round(block.resident * memory_scale),
            )
            for block in costs.blocks
        )
        memory = costs.memory * memory_scale * (1 + ROUNDING)
        return cls(
            blocks,
            round(costs.hop * scale),
            costs.pace,
            memory if math.isinf(memory) else int(memory),
            near_hop=round(costs.near_hop * scale),
            nodes=costs.nodes,
            scale=scale,
            memory_scale=memory_scale,
        )

    def paced(self, time: float, position: int) -> int:
        """Return the ticks that blocks need on a position: ``time`` times the position's pace, rounded."""
        return round(time * self.pace[position]) if self.pace else round(time)
