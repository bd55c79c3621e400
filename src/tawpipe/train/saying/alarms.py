"""Alarms of a run that goes on: losses that jump, and ranks that stay slower than the others.

They are named as they come: a run that diverges costs as much as one that does not, and all go at the slowest's pace.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

WINDOW = 50
"""Losses that one is compared with."""
LEAST = 20
"""Losses that are known before one can stand out."""
LOOKS = 4
"""Times in a row that a rank has to be slow before it is named, since once is noise; then again after twice as many."""


class Spikes:
    """Alarm for a loss that is far above those before it.

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
            usual = statistics.median(abs(past - middle) for past in self._recent)
            if loss - middle > self.factor * max(usual, 1e-3 * abs(middle)):
                said = f"loss spike: {loss:.4f}; the last {len(self._recent)} losses are around {middle:.4f}"
        self._recent.append(loss)
        return said


def paces(seconds: Sequence[float], work: Sequence[float]) -> list[float]:
    """How long every rank computes for what it has to. One with next to nothing to do spends its time on all else, and
    counts as the usual one.

    >>> paces([2.0, 4.0, 0.5], [1.0, 2.0, 0.0])
    [2.0, 2.0, 2.0]

    Args:
        seconds: that they computed.
        work: what they had to compute, in any unit.
    """
    least = sum(work) / len(work) / 4
    known = [spent / assigned for spent, assigned in zip(seconds, work, strict=True) if assigned > least]
    usual = statistics.median(known) if known else 0.0
    return [spent / assigned if assigned > least else usual for spent, assigned in zip(seconds, work, strict=True)]


class Stragglers:
    """Alarm for ranks that compute for longer than most do.

    Args:
        factor: of the median, above which a rank is slow; 0 to name none.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._slow: dict[int, int] = {}

    def look(self, seconds: Sequence[float]) -> list[tuple[int, float]]:
        """Ranks to name now, and how many times as long as the median each of them computes.

        >>> stragglers = Stragglers(1.5)
        >>> [stragglers.look([1.0, 1.1, 2.0]) for _ in range(8)][3:]
        [[(2, 1.8181818181818181)], [], [], [], [(2, 1.8181818181818181)]]
        """
        usual = max(statistics.median(seconds), 1e-9)
        slow = {rank: pace / usual for rank, pace in enumerate(seconds) if self.factor and pace > self.factor * usual}
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank in slow}
        return [(rank, slow[rank]) for rank, looks in self._slow.items() if looks >= LOOKS and looks & (looks - 1) == 0]
