"""Names ranks that stay slower than the others: the whole run goes at their pace."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

LOOKS = 4
"""Times in a row that a rank has to be slow before it is named, since once is noise; then again after twice as many."""


class Stragglers:
    """Looks at how long the ranks compute.

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
        slow = {rank: one / usual for rank, one in enumerate(seconds) if self.factor and one > self.factor * usual}
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank in slow}
        return [(rank, slow[rank]) for rank, looks in self._slow.items() if looks >= LOOKS and looks & (looks - 1) == 0]
