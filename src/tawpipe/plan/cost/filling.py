"""Number of rows in a micro-batch that fills a device, for ``--micro-batch auto``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

FILLS = {"cuda": 16384, "cpu": 512}
"""Tokens of a micro-batch that fill a device, by its kind.

The host issues a layer of a micro-batch to a GPU in 2 to 5 ms. From about 16,384 tokens on, a layer computes longer
than that. On a CPU, twice as many tokens save a step of a small model nothing, and of SmolLM2-135M a tenth of its time
for twice the activations."""
PER_STAGE = 4
"""Number of micro-batches that a pipeline needs for each of its positions, so that they seldom wait."""


@dataclass(frozen=True)
class Filling:
    """Numbers of rows that ``auto`` may choose for a micro-batch.

    Args:
        sizes: the numbers, ascending; 1 is always among them.
        row: tokens of a row.
        share_tokens: tokens of a step that a device computes.
        fills: tokens that fill a device.
        reason: reason for ``sizes`` where the number of tokens is none, or ``""``.
        tried: numbers that a plan has compared, ascending.
    """

    sizes: tuple[int, ...]
    row: int
    share_tokens: int
    fills: int
    reason: str = ""
    tried: tuple[int, ...] = ()

    @classmethod
    def of(cls, kind: str, rows: int, row: int, devices: int, *, positions: int = 1, why_one: str = "") -> Filling:
        """Return the numbers with which all devices stay busy, and with at most ``FILLS`` tokens in a micro-batch.

        All micro-batches have equally many rows. No device computes more rows than with micro-batches of one row.

        Args:
            kind: ``cuda`` or ``cpu``.
            rows: rows of a step.
            row: tokens of a row.
            devices: devices, or groups of devices that compute a row together.
            positions: devices among which a pipeline divides the layers; 1 for other strategies.
            why_one: reason for micro-batches of one row, where another number would change results; else ``""``.
        """
        fills, groups = FILLS[kind], max(1, devices // positions)
        needed, most = min(rows, devices * PER_STAGE if positions > 1 else groups), ceil(rows / groups)
        counts = {size: rows // size for size in range(1, 1 if why_one else fills // row + 1) if rows % size == 0}
        sizes = [size for size, n in counts.items() if n >= needed and ceil(n / groups) * size <= most]
        return cls(tuple(sizes) or (1,), row, most * row // positions, fills, why_one)

    def up_to(self, size: int, reason: str) -> Filling:
        """Return a copy with ``size`` and the numbers below it, and with ``reason``."""
        return replace(self, sizes=(*(other for other in self.sizes if other < size), size), reason=reason)

    def words(self, size: int) -> str:
        """Return the reason for micro-batches of ``size`` rows, as a phrase."""
        why = f"{size * self.row:,} tokens, where {self.fills:,} fill a device"
        if (share := self.share_tokens) < self.fills:
            why = f"a device has {share:,} tokens of a step, fewer than the {self.fills:,} that fill it"
        more = f"{self.sizes[-1]} do not fit into memory; " * (size < self.sizes[-1])
        more = f"the fastest of {', '.join(map(str, self.tried))} by the plan; " if len(self.tried) > 1 else more
        return f"auto: {self.reason if self.reason and size == self.sizes[-1] else more + why}"
