"""What a refused strategy would need, as data: a plan tries settings that nobody has set, and says it in its own words.

Each of them is the ``need`` of a ``UserError``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LeastLayers:
    """A model of at least ``number`` layers."""

    number: int


@dataclass(frozen=True)
class MemoryOfPosition:
    """More memory than there is for a micro-batch of a pipeline.

    Args:
        device_bytes: memory of a device; None where it is not known.
    """

    device_bytes: int | None = None


@dataclass(frozen=True)
class MicroBatchCount:
    """``fewer`` or ``more`` micro-batches."""

    fewer: int
    more: int
