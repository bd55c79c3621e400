"""Limits of the search for orders and stages, for code that does not import the search itself."""

from __future__ import annotations

SEARCHED, FILLED, LEAST = 64, 3, 16
"""Limits (SEARCHED, FILLED, LEAST) of the number of micro-batches for which an order is searched. An order is searched
for up to ``SEARCHED`` micro-batches, or ``FILLED`` for each position, which fill a pipeline. A longer, periodic order
begins with ``FILLED`` micro-batches for each position, and at least ``LEAST``."""
BUDGET = 2_000_000
"""Work items that a search for stages may put into lists in total: some seconds on one core."""
QUICK = BUDGET // 10
"""Budget of a first search, which shows whether a longer one is worth it, and of a search that every rank repeats."""

QUICK_EFFORT = 2_000
"""Micro-batches times blocks of a pipeline up to which all orders are evaluated."""
PASSING = 3
"""Number of boundary activations and their gradients that are sent or received while a stage computes."""


def searched(positions: int) -> int:
    """Return the most micro-batches for which an order is searched; a longer order repeats a part of a shorter one."""
    return max(SEARCHED, FILLED * positions)


def filling(positions: int) -> int:
    """Return the number of micro-batches of the searched order that a longer, periodic order begins with."""
    return max(LEAST, FILLED * positions)
