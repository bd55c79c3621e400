"""Ways out where memory does not suffice: what would fit, and what it costs in time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from operator import or_
from typing import Any

from tawpipe.errors import UserError
from tawpipe.plan.plan import Plan
from tawpipe.plan.plan_file import settings_of
from tawpipe.plan.predict import memory_quickly, predict
from tawpipe.plan.request import PlanRequest
from tawpipe.plan.search import fits, search, with_settings
from tawpipe.schedule.step import StepSpec

LEANER: tuple[dict[str, Any], ...] = (
    {"recompute": "full"},
    {"micro_batches_per_visit": 1},
    {"look_ahead": 1, "gradient_buffers": 1},
    {"step_cache": 0, "gradients_scope": "visit"},
)
"""Changes that need less memory, those that cost the least time first."""
SMALLEST_ROW = 128


def remedies(request: PlanRequest, step: StepSpec) -> Iterator[str]:
    """What would fit, with its seconds a step: other settings for the same batch, the best strategy for it, smaller
    micro-batches, shorter rows.

    Args:
        step: what does not fit.
    """
    yield from _leaner(request, step)
    best = Plan.of(request, search(request)).chosen
    if best is not None and best.step is not None:
        before, after = settings_of(step), settings_of(best.step)
        yield _words(after, before, best.seconds)
    yield from smaller(request, step)


def smaller(request: PlanRequest, step: StepSpec) -> Iterator[str]:
    """Smaller micro-batches, and shorter rows, that would fit."""
    micro_batch = request.micro_batch
    while micro_batch > 1:
        micro_batch //= 2
        if (seconds := _seconds(request.with_micro_batch(micro_batch), step)) is not None:
            yield f"--micro-batch {micro_batch}: {_time(seconds)}"
            break
    length = request.sequence_length
    while length >= 2 * SMALLEST_ROW:
        length //= 2
        if (seconds := _seconds(request.with_length(length), step)) is not None:
            yield f"--sequence-length {length}: {_time(seconds)} of as many rows"
            break


def _leaner(request: PlanRequest, step: StepSpec) -> Iterator[str]:
    """Every change by itself that suffices; if none does, all of them up to the one with which it fits."""
    changes, before = list(LEANER), settings_of(step)
    if request.has_host and "offloaded_layers" not in step.strategy.refusals:
        changes.append({"recompute": "full", "offloaded_layers": request.model.num_layers})
    together = list(accumulate(changes, or_))
    for attempt in (changes, together):
        found = False
        for change in attempt:
            try:
                other = with_settings(step, **change)
            except UserError:  # not for this strategy
                continue
            if other != step and (seconds := _seconds(request, other)) is not None:
                yield _words(settings_of(other), before, seconds)
                found = True
                if attempt is together:
                    return
        if found:
            return


def _seconds(request: PlanRequest, step: StepSpec) -> float | None:
    """Of a step with the settings of ``step``; None where it does not fit, or cannot work."""
    try:
        other = request.step(step.settings, step.strategy)
        return predict(request, other).step_seconds if fits(request, memory_quickly(request, other)) else None
    except UserError:
        return None


def _words(after: dict[str, Any], before: dict[str, Any], seconds: float) -> str:
    changed = [f"--schedule.{name.replace('_', '-')} {value}" for name, value in after.items() if value != before[name]]
    return f"{' '.join(changed)}: {_time(seconds)}"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s a step"
