"""Learning-rate schedules: the factor on the highest learning rate as a function of the step.

Every schedule begins with a linear warm-up: step 0 has 1/warmup of the highest rate, step warmup - 1 has all of it. The
rest follows ``get_scheduler`` of transformers, with two differences: the warm-up of transformers begins at zero, and
here the rate never falls below a floor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tawpipe.train.settings.config import OptimizerConfig

DECAY_SHARE = 0.2
"""Default share of all steps in which the rate falls under ``wsd``."""
CYCLES = 2
"""Default number of cosines under ``cosine-restarts``."""


@dataclass(frozen=True)
class RunSpan:
    """Lengths that a schedule depends on.

    Args:
        steps: steps of the whole run.
        warmup: steps of the warm-up.
        decay: steps at the end in which the rate falls under ``wsd``.
        cycles: number of cosines under ``cosine-restarts``.
        least: floor of the factor.
    """

    steps: int
    warmup: int = 0
    decay: int = 1
    cycles: int = CYCLES
    least: float = 0.0

    def done(self, step: int) -> float:
        """Return how far ``step`` is between the end of the warm-up (0) and the end of the run (1)."""
        return (step - self.warmup) / max(1, self.steps - self.warmup)


def _cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * done))


def _wsd(step: int, of: RunSpan) -> float:
    """Return 1, and in the last ``of.decay`` steps a cosine from 1 down to 0."""
    begun = step - (of.steps - of.decay)
    return _cosine(begun / max(1, of.decay)) if begun > 0 else 1.0


def _inverse_sqrt(step: int, of: RunSpan) -> float:
    """Return one over the square root of the steps since the warm-up, scaled so that it begins at 1."""
    scale = of.warmup or 10_000
    return 1 / math.sqrt((step - of.warmup + scale) / scale)


SCHEDULES: Mapping[str, Callable[[int, RunSpan], float]] = {
    "cosine": lambda step, of: _cosine(of.done(step)),
    "linear": lambda step, of: 1 - of.done(step),
    "constant": lambda step, of: 1.0,
    "wsd": _wsd,
    "inverse-sqrt": _inverse_sqrt,
    "cosine-restarts": lambda step, of: _cosine(of.done(step) * of.cycles % 1.0),
}
"""Schedule name -> function that returns the factor for a step after the warm-up, before the floor is applied."""
REACHES_ITS_END = ("cosine", "linear", "wsd", "cosine-restarts")
"""Schedules that fall to zero. They are scaled so that they end at the floor; under the others the floor cuts off."""


def factor(name: str, step: int, of: RunSpan) -> float:
    """Return the factor on the highest learning rate in ``step``, which counts from 0.

    >>> [round(factor("cosine", s, RunSpan(10, warmup=2, least=0.1)), 2) for s in (0, 1, 2, 9)]
    [0.5, 1.0, 1.0, 0.13]
    """
    if step < of.warmup:
        return (step + 1) / of.warmup
    shape = SCHEDULES[name](step, of)
    return of.least + (1 - of.least) * shape if name in REACHES_ITS_END else max(of.least, shape)


def span_of(settings: OptimizerConfig, steps: int) -> RunSpan:
    """Return the ``RunSpan`` of a run of ``steps`` steps, with defaults for decay and cycles if they are unset."""
    decay = math.ceil(DECAY_SHARE * steps) if settings.decay_steps is None else settings.decay_steps
    cycles = CYCLES if settings.cycles is None else settings.cycles
    return RunSpan(steps, settings.warmup_steps, decay, cycles, settings.min_learning_rate_ratio)
