"""Learning rates over a run: for every schedule the factor of the highest rate, as a function of the step alone.

A linear warm-up comes first in all of them: step 0 has 1/warmup of the highest rate and step warmup - 1 all of it. What
follows is as in transformers (``get_scheduler``), whose warm-up begins at zero, with a floor under it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tawpipe.train.settings.config import OptimizerConfig

DECAY_SHARE = 0.2
"""Of all steps, in which ``wsd`` falls by default."""
CYCLES = 2
"""Of ``cosine-restarts`` by default."""


@dataclass(frozen=True)
class RunSpan:
    """A run as its schedule sees it: its steps, those of the warm-up and of wsd's decay, cycles, and the floor."""

    steps: int
    warmup: int = 0
    decay: int = 1
    cycles: int = CYCLES
    least: float = 0.0

    def done(self, step: int) -> float:
        """The share of the steps after the warm-up that lie before a step."""
        return (step - self.warmup) / max(1, self.steps - self.warmup)


def _cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * done))


def _wsd(step: int, of: RunSpan) -> float:
    begun = step - (of.steps - of.decay)
    return _cosine(begun / max(1, of.decay)) if begun > 0 else 1.0


def _inverse_sqrt(step: int, of: RunSpan) -> float:
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
"""Name -> what follows the warm-up, from 1 down to 0 or to whatever it reaches; the floor is put under it."""
REACHES_ITS_END = ("cosine", "linear", "wsd", "cosine-restarts")
"""Schedules that would end at zero: between 1 and the floor they keep their shape. Under the others it cuts off."""


def factor(name: str, step: int, of: RunSpan) -> float:
    """The factor of the highest learning rate in step 0, 1, ...

    >>> [round(factor("cosine", s, RunSpan(10, warmup=2, least=0.1)), 2) for s in (0, 1, 2, 9)]
    [0.5, 1.0, 1.0, 0.13]
    """
    if step < of.warmup:
        return (step + 1) / of.warmup
    shape = SCHEDULES[name](step, of)
    return of.least + (1 - of.least) * shape if name in REACHES_ITS_END else max(of.least, shape)


def span_of(settings: OptimizerConfig, steps: int) -> RunSpan:
    """What the settings say of a run of so many steps."""
    decay = math.ceil(DECAY_SHARE * steps) if settings.decay_steps is None else settings.decay_steps
    cycles = CYCLES if settings.cycles is None else settings.cycles
    return RunSpan(steps, settings.warmup_steps, decay, cycles, settings.min_learning_rate_ratio)
