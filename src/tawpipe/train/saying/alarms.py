"""Alarms of a running run: a loss that jumps, and ranks that stay slower than others.

They are reported during the run. A run that diverges costs as much as a good one, and all ranks run at the pace of the
slowest.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

WINDOW = 50
"""Number of recent losses that a loss is compared with."""
LEAST = 20
"""Number of losses that must be known before a loss can be reported."""
LOOKS = 4
"""Number of consecutive calls in which a rank must be slow before it is reported, because one slow call is noise.

It is reported again after twice as many calls each time."""


class Spikes:
    """Alarm for a loss that is far above the losses before it.

    Args:
        factor: allowed distance from the median, in multiples of the median distance of recent losses; 0 to report
            none.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._recent: deque[float] = deque(maxlen=WINDOW)

    def look(self, loss: float) -> str:
        """Record the loss; return a sentence if it stands out, else ``""``. A loss that is not finite is ignored.

        >>> spikes = Spikes(8)
        >>> [spikes.look(3 + i % 3 / 100) for i in range(30)][-1], spikes.look(5.0)
        ('', 'loss spike: 5.0000; the last 30 losses are around 3.0100')
        """
        if not math.isfinite(loss):
            return ""
        warning = ""
        if self.factor and len(self._recent) >= LEAST:
            middle = statistics.median(self._recent)
            usual = statistics.median(abs(past - middle) for past in self._recent)
            if loss - middle > self.factor * max(usual, 1e-3 * abs(middle)):
                warning = f"loss spike: {loss:.4f}; the last {len(self._recent)} losses are around {middle:.4f}"
        self._recent.append(loss)
        return warning


def paces(seconds: Sequence[float], work: Sequence[float]) -> list[float]:
    """Return the seconds per unit of work of every rank.

    A rank with little work (less than a quarter of the mean) spends its time on other things: it gets the median pace.

    >>> paces([2.0, 4.0, 0.5], [1.0, 2.0, 0.0])
    [2.0, 2.0, 2.0]

    Args:
        seconds: computing time of every rank.
        work: work of every rank, in any unit.
    """
    least = sum(work) / len(work) / 4
    known = [spent / assigned for spent, assigned in zip(seconds, work, strict=True) if assigned > least]
    usual = statistics.median(known) if known else 0.0
    return [spent / assigned if assigned > least else usual for spent, assigned in zip(seconds, work, strict=True)]


class Stragglers:
    """Alarm for ranks that compute longer than most ranks.

    Args:
        factor: multiple of the median above which a rank is slow; 0 to report none.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._slow: dict[int, int] = {}

    def look(self, seconds: Sequence[float]) -> list[tuple[int, float]]:
        """Record one measurement of all ranks; return the ranks to report now, each with its time over the median.

        A rank is reported when it has been slow in ``LOOKS`` consecutive calls, then after 8, 16, ... such calls.

        >>> stragglers = Stragglers(1.5)
        >>> [stragglers.look([1.0, 1.1, 2.0]) for _ in range(8)][3:]
        [[(2, 1.8181818181818181)], [], [], [], [(2, 1.8181818181818181)]]

        Args:
            seconds: computing time of every rank, in rank order.
        """
        usual = max(statistics.median(seconds), 1e-9)
        slow = {rank: pace / usual for rank, pace in enumerate(seconds) if self.factor and pace > self.factor * usual}
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank in slow}
        return [(rank, slow[rank]) for rank, looks in self._slow.items() if looks >= LOOKS and looks & (looks - 1) == 0]
