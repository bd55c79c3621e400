"""One strategy of a plan with the settings that suit it best, and what a search knows while it goes on."""

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
"""Below this a change of a knob is not worth its memory."""
MOST_EFFORT = 13_500
"""Of all pipelines together for which orders are made, see ``Strategy.effort``, after which no other is looked at."""
MOST_IMPROVED = 12_000
"""Micro-batches, times blocks, that are played while settings are changed one by one, of those steps for which more
than ``QUICK_PLAYED`` are.
"""
PATIENCE_S = 2.0
LOOKING, EARLY, LATE, REST = 0.6, 0.5, 0.7, 0.1
"""Parts of the time of a search: after the first no other strategy is looked at; after the next two no order is made
that takes many seconds, and none that takes a few. The last is left in any case for better settings of the best.
"""
TOO_LONG = "not evaluated: planning time limit reached (tawpipe plan --all evaluates it)"


class TooLong(Exception):
    """What is made for costs did not fit in time."""


@dataclass(frozen=True)
class Candidate:
    """One strategy with the settings that suit it best.

    Args:
        strategy: its name.
        step: with the settings; None where the strategy cannot be played at all; then ``why_not`` says why.
        homes: what was found where units can be placed one by one, see place.py.
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
        return self.prediction.step_seconds if self.prediction is not None else float("inf")

    def chosen_settings(self) -> dict[str, Any]:
        """The settings by name; none where the strategy cannot be played."""
        return settings_of(self.step) if self.step is not None else {}


@dataclass
class Outlook:
    """What a search knows while it goes on, and what it has spent.

    Args:
        hopeful: see ``Strategy.made_for``.
        ahead: seconds of the best step so far.
        effort: what is left for pipelines that are made for costs, see ``Strategy.effort``.
        plays: what is left for changes of settings, see ``MOST_IMPROVED``.
        most_s, vain_s: see ``search``.
    """

    hopeful: bool = True
    ahead: float = math.inf
    effort: int = MOST_EFFORT
    plays: int = MOST_IMPROVED
    patience_s: float = PATIENCE_S
    most_s: Callable[[float], float] = lambda _: math.inf
    vain_s: float = math.inf
    begin: float = field(default_factory=time.monotonic)
    began: float = field(default_factory=time.thread_time)

    def over(self, part: float = 1.0) -> bool:
        """True if looking further would take more than a part of the time that it may."""
        most_s = self.most_s(self.ahead) if self.ahead < math.inf else self.vain_s
        return time.thread_time() - self.began > part * most_s

    def leave(self, part: float) -> None:
        """Let a part of the time be left, whatever has been spent."""
        if self.over(1 - part):
            self.began = time.thread_time() - (1 - part) * self.most_s(self.ahead)

    def at(self, what: str) -> None:
        """Say what is looked at, if that has taken a while."""
        if (seconds := time.monotonic() - self.begin) >= self.patience_s:
            progress.info(f"planning: {what} ({seconds:.0f} s so far)")
            self.patience_s = 2 * seconds

    def why_not(self, effort: int, *, hopeful: bool) -> str:
        """Why an order is not made for a way to lay out a pipeline, or nothing; what it takes is spent.

        Args:
            effort: that making it takes, see ``Strategy.effort``.
            hopeful: a step may be among the best with it, as far as one sees.
        """
        long = effort > QUICK_EFFORT
        if long and self.over(EARLY):
            return TOO_LONG
        if long and not hopeful:
            return f"not evaluated: others take {span(self.ahead)} per step, pipelines of a fixed order far more"
        if long and effort > self.effort and self.ahead < math.inf:
            return "not evaluated: finding orders for this number of micro-batches and devices takes too long"
        self.effort -= effort
        return ""
