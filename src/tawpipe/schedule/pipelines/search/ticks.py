"""Times and memory of a layout's stages in whole numbers, so that a search decides alike on every machine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.work import PipelineCosts

DIGITS = 40
"""Binary digits of the largest number. What is a whole number in the costs stays exact."""

ROUNDING = 1e-10
"""Sums of rounded memory may exceed a limit by this share of it."""


def scale_of(values: Iterable[float]) -> float:
    """The power of two that leaves the largest of some numbers ``DIGITS`` digits.

    >>> scale_of([3.0, 2.0**39])
    1.0
    """
    return math.ldexp(1.0, DIGITS - math.frexp(max(values, default=0.0) or 1.0)[1])


@dataclass(frozen=True)
class Ticks:
    """A pipeline's costs in whole numbers.

    Args:
        forward, inputs, weights: time by block: F, I, W.
        kept, kept_for_weights: memory by block.
        hop, near_hop, nodes: time between two positions, see ``PipelineCosts``.
        pace: multiplies the times of a position; empty for 1.
        memory: that a position can keep at one time; None for any.
        scale: ticks of a unit of time.
        memory_scale: the same for memory.
    """

    forward: tuple[int, ...]
    inputs: tuple[int, ...]
    weights: tuple[int, ...]
    kept: tuple[int, ...]
    kept_for_weights: tuple[int, ...]
    hop: int
    near_hop: int
    nodes: tuple[int, ...]
    pace: tuple[float, ...]
    memory: int | None
    scale: float
    memory_scale: float

    @classmethod
    def of(cls, costs: PipelineCosts) -> Ticks:
        """Of some costs, rounded."""
        blocks = costs.blocks
        scale = scale_of(
            time
            for one in blocks
            for time in (one.forward, one.backward_input, one.backward_weight, costs.hop, costs.near_hop)
        )
        memory_scale = scale_of(memory for one in blocks for memory in (one.kept, one.kept_for_weights))

        def whole(name: str, scale: float) -> tuple[int, ...]:
            return tuple(round(getattr(one, name) * scale) for one in blocks)

        return cls(
            whole("forward", scale),
            whole("backward_input", scale),
            whole("backward_weight", scale),
            whole("kept", memory_scale),
            whole("kept_for_weights", memory_scale),
            round(costs.hop * scale),
            round(costs.near_hop * scale),
            costs.nodes,
            costs.pace,
            None if costs.memory == math.inf else int(costs.memory * memory_scale * (1 + ROUNDING)),
            scale,
            memory_scale,
        )

    def travel(self, source: int, target: int) -> int:
        """Time of a boundary from one position to another; none if they are the same."""
        if source == target:
            return 0
        return self.near_hop if self.nodes and self.nodes[source] == self.nodes[target] else self.hop

    def stages(self, layout: Layout) -> StageTicks:
        """By stage of a layout."""

        def summed(values: tuple[int, ...], *, paced: bool = False) -> list[int]:
            sums = [sum(values[block] for block in layout.blocks_of(stage)) for stage in range(layout.stages)]
            if not paced:
                return sums
            return [round(one * self.pace[place]) for one, place in zip(sums, layout.places, strict=True)]

        paced = bool(self.pace)
        forward, inputs = summed(self.forward, paced=paced), summed(self.inputs, paced=paced)
        weights = summed(self.weights, paced=paced)
        return StageTicks(layout, forward, inputs, weights, summed(self.kept), summed(self.kept_for_weights), self)


@dataclass(frozen=True)
class StageTicks:
    """The costs of a layout's stages in whole numbers, by stage; see ``Ticks``."""

    layout: Layout
    forward: list[int]
    inputs: list[int]
    weights: list[int]
    kept: list[int]
    kept_for_weights: list[int]
    of: Ticks
