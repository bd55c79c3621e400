"""How far orders and stages are looked for; what plays and plans pipelines knows it without the search."""

from __future__ import annotations

SEARCHED, FILLED, LEAST = 64, 3, 16
"""Micro-batches for which an order is looked for: up to so many, or so many for each position, which fill a pipeline.
An order that goes on begins with the latter, but no fewer than the last.
"""
BUDGET = 2_000_000
"""Works that a search for stages puts into lists altogether: seconds on one core."""
QUICK = BUDGET // 10
"""Of a search where it is to be seen whether it is worth one that takes longer, or that every rank repeats."""

QUICK_EFFORT = 2_000
"""Micro-batches, times blocks, of a pipeline for which all orders are looked at."""
PASSING = 3
"""Boundary activations, and gradients of them, that come and go while a stage computes."""


def searched(positions: int) -> int:
    """The most micro-batches of a pipeline for which an order is looked for; a longer one goes on periodically."""
    return max(SEARCHED, FILLED * positions)


def filling(positions: int) -> int:
    """Micro-batches of the order with which a longer one begins."""
    return max(LEAST, FILLED * positions)
