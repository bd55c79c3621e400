"""Needs of a refused strategy as data: values for ``UserError.need``.

A plan tries settings that the user did not set, and reports their refusals in its own sentences.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LeastLayers:
    """Need for a model of at least ``number`` layers."""

    number: int


@dataclass(frozen=True)
class MemoryOfPosition:
    """Need for more memory than a micro-batch of a pipeline can have on its device.

    Args:
        device_bytes: memory of a device; None if unknown.
    """

    device_bytes: int | None = None


@dataclass(frozen=True)
class MicroBatchCount:
    """Need for ``fewer`` or ``more`` micro-batches than there are.

    Args:
        fewer: nearest smaller number that works.
        more: nearest larger number that works.
    """

    fewer: int
    more: int
