"""Losses that jump: named as they come, because a run that diverges costs as much as one that does not."""

from __future__ import annotations

import math
import statistics
from collections import deque

WINDOW = 50
LEAST = 20
"""Losses that are known before one can stand out."""


class Spikes:
    """Says when a loss is far above those before it.

    Args:
        factor: times the median distance of the last losses from their median; 0 for never.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._recent: deque[float] = deque(maxlen=WINDOW)

    def look(self, loss: float) -> str:
        """A sentence, or nothing. The loss counts among the last ones from then on, unless it is not finite.

        >>> spikes = Spikes(8)
        >>> [spikes.look(3 + i % 3 / 100) for i in range(30)][-1], spikes.look(5.0)
        ('', 'the loss of 5.0000 stands out: the last 30 lie around 3.0100')
        """
        if not math.isfinite(loss):
            return ""
        said = ""
        if self.factor and len(self._recent) >= LEAST:
            middle = statistics.median(self._recent)
            usual = statistics.median(abs(one - middle) for one in self._recent)
            if loss - middle > self.factor * max(usual, 1e-3 * abs(middle)):
                said = f"the loss of {loss:.4f} stands out: the last {len(self._recent)} lie around {middle:.4f}"
        self._recent.append(loss)
        return said
