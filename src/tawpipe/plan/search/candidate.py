"""Candidate: one strategy with its best settings. Outlook: the state and the time budget of a running search."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tawpipe.console import progress, span
from tawpipe.plan.cost.feasible import gib
from tawpipe.plan.cost.predict import Prediction
from tawpipe.plan.search.place import Homes
from tawpipe.plan.search.plan_file import settings_of
from tawpipe.schedule.pipelines.limits import QUICK_EFFORT
from tawpipe.schedule.step import StepSpec

GAIN = 0.005
"""Smallest relative gain in step time for which a setting is changed. A smaller gain is not worth its memory."""
MOST_EFFORT = 13_500
"""Budget of a search for making pipeline orders, summed over all pipelines, in units of ``Strategy.effort``. Once it is
used up, no order that takes long to make is begun."""
MOST_IMPROVED = 12_000
"""Budget for tuning settings one by one, in micro-batches times blocks that are simulated. Only steps with more than
``QUICK_PLAYED`` are charged to it."""
PATIENCE_S = 2.0
LOOKING, EARLY, LATE, REST = 0.6, 0.5, 0.7, 0.1
"""Shares of the time budget of a search. After ``LOOKING`` no further strategy is evaluated. After ``EARLY`` no order
is made that takes many seconds. After ``LATE`` no order is made that takes a few seconds. ``REST`` is always reserved
for tuning the settings of the best candidates."""
TOO_LONG = "not evaluated: planning time limit reached (tawpipe plan --all evaluates it)"


class TooLong(Exception):
    """Raised when making a pipeline's order would exceed the time budget of the search."""


@dataclass(frozen=True)
class Candidate:
    """One strategy with the best settings that were found for it.

    Args:
        strategy: name of the strategy.
        step: the step with these settings; None if the strategy cannot be simulated at all.
        prediction: predicted time and memory of ``step``; None if there is none, and ``why_not`` gives the reason.
        fits: True if the step fits in the memory of the machines.
        why_not: reason why the candidate has no prediction, or ``""``.
        homes: result of the search for homes of single units (place.py); None if that search was not made.
    """

    strategy: str
    step: StepSpec | None
    prediction: Prediction | None
    fits: bool
    why_not: str = ""
    homes: Homes | None = None

    def __repr__(self) -> str:
        if self.prediction is None:
            return f"Candidate({self.strategy}: {self.why_not})"
        fits = "" if self.fits else ", does not fit"
        return f"Candidate({self.strategy}: {span(self.seconds)} a step, {gib(self.prediction.peak_bytes)} GiB{fits})"

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step; infinite without a prediction."""
        return self.prediction.step_seconds if self.prediction is not None else float("inf")

    def chosen_settings(self) -> dict[str, Any]:
        """Return the chosen settings by name; empty if the candidate has no step."""
        return settings_of(self.step) if self.step is not None else {}


@dataclass
class Outlook:
    """State of a running search: what is known so far, and what is left of its budgets.

    Args:
        hopeful: True while a pipeline may still be among the best; passed to ``Strategy.made_for``.
        best_s: seconds of the fastest step so far; infinite while nothing fits.
        effort: what is left of ``MOST_EFFORT``.
        plays: what is left of ``MOST_IMPROVED``.
        patience_s: seconds after ``begin`` at which the next progress line is printed.
        most_s: returns the seconds that the search may compute, given ``best_s``; used as soon as something fits.
        vain_s: seconds that the search may compute while nothing fits.
        begin: start of the search on the monotonic clock; for progress lines.
        began: CPU time of the thread at the start of the search; for the time limit.
    """

    hopeful: bool = True
    best_s: float = math.inf
    effort: int = MOST_EFFORT
    plays: int = MOST_IMPROVED
    patience_s: float = PATIENCE_S
    most_s: Callable[[float], float] = lambda _: math.inf
    vain_s: float = math.inf
    begin: float = field(default_factory=time.monotonic)
    began: float = field(default_factory=time.thread_time)

    def over(self, part: float = 1.0) -> bool:
        """Return True if the search has used more than the share ``part`` of its time limit.

        Time is the CPU time of this thread."""
        most_s = self.most_s(self.best_s) if self.best_s < math.inf else self.vain_s
        return time.thread_time() - self.began > part * most_s

    def leave(self, part: float) -> None:
        """Ensure that at least the share ``part`` of the time limit is left.

        If less is left, the recorded start of the search is moved forward."""
        if self.over(1 - part):
            self.began = time.thread_time() - (1 - part) * self.most_s(self.best_s)

    def at(self, what: str) -> None:
        """Print a progress line that names ``what`` if the search has run for ``patience_s``.

        The next line is printed after twice the time that has passed."""
        if (seconds := time.monotonic() - self.begin) >= self.patience_s:
            progress.info(f"planning: {what} ({seconds:.0f} s so far)")
            self.patience_s = 2 * seconds

    def why_not(self, effort: int, *, hopeful: bool) -> str:
        """Return the reason not to make an order for a pipeline layout; ``""`` if it may be made.

        If it may be made, ``effort`` is charged to the budget. Reasons are: little time is left, pipelines are too
        slow, or the budget is used up. There are none against orders that are made quickly.

        Args:
            effort: work of making the order, see ``Strategy.effort``.
            hopeful: True if a step with this order may be among the best, as far as can be predicted.
        """
        long = effort > QUICK_EFFORT
        if long and self.over(EARLY):
            return TOO_LONG
        if long and not hopeful:
            return f"not evaluated: others take {span(self.best_s)} per step, pipelines of a fixed order far more"
        if long and effort > self.effort and self.best_s < math.inf:
            return "not evaluated: finding orders for this number of micro-batches and devices takes too long"
        self.effort -= effort
        return ""
