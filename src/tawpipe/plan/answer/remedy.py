"""Ways out where memory does not suffice for the settings of a schedule: others, and what they cost in time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from operator import or_
from typing import Any

from tawpipe.console import span
from tawpipe.errors import UserError
from tawpipe.plan.cost.feasible import fits, relieved, with_settings
from tawpipe.plan.cost.predict import memory_quickly, predict
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.plan.search.plan import Plan
from tawpipe.plan.search.plan_file import settings_of
from tawpipe.plan.search.search import search
from tawpipe.schedule.step import StepSpec

LEANER: tuple[dict[str, Any], ...] = (
    {"recompute": "full"},
    {"micro_batches_per_visit": 1},
    {"look_ahead": 1, "gradient_buffers": 1},
    {"step_cache": 0, "gradients_scope": "visit"},
)
"""Changes that need less memory, those that cost the least time first."""
MOST_S = 4.0
"""Seconds that a search for the best plan may compute once something fits: a refusal is not waited for."""


def remedies(request: PlanRequest, step: StepSpec) -> Iterator[str]:
    """Settings of the schedule with which the same run would fit, with its seconds a step: those that are nearest, and
    those of the best plan.

    Args:
        step: what does not fit.
    """
    yield from _leaner(request, step)
    best = Plan.of(request, search(request, most_s=lambda _: MOST_S)).chosen
    if best is not None and best.step is not None:
        yield f"{' '.join(options_of(best.step, step))}: {span(best.seconds)} a step"


def _changes(request: PlanRequest, step: StepSpec) -> list[dict[str, Any]]:
    changes = list(LEANER)
    if request.chunks:
        changes.append({"recompute": "full", **request.in_chunks(request.chunks[0])})
    if request.sets:
        changes.append({"recompute": "full", "sequence_ranks": request.sets[-1]})
    if relieved(request, step.strategy):
        changes.append({"recompute": "full", "offloaded_layers": request.model.num_layers})
    changes.extend({"host_homes": level} for level in request.levels if level != "none")
    return changes


def _together(request: PlanRequest, step: StepSpec) -> list[dict[str, Any]]:
    return list(accumulate(_changes(request, step), or_))


def _changed(step: StepSpec, changes: Iterable[dict[str, Any]]) -> Iterator[StepSpec]:
    """The step with each of these changes, where that is another one."""
    for change in changes:
        try:
            other = with_settings(
                step, **{name: value for name, value in change.items() if name not in step.strategy.refusals}
            )
        except UserError:
            continue
        if other != step:
            yield other


def _leaner(request: PlanRequest, step: StepSpec) -> Iterator[str]:
    """Every change by itself that suffices; if none does, all of them up to the one with which it fits."""
    for changes, most in ((_changes(request, step), None), (_together(request, step), 1)):
        tried = ((other, _seconds(request, other)) for other in _changed(step, changes))
        fitting = [(other, seconds) for other, seconds in tried if seconds is not None]
        for other, seconds in fitting[:most]:
            yield f"{' '.join(options_of(other, step))}: {span(seconds)} a step"
        if fitting:
            return


def _seconds(request: PlanRequest, step: StepSpec) -> float | None:
    """Of a step with the settings of ``step``; None where it does not fit, or cannot work."""
    try:
        other = request.step(step.settings, step.strategy)
        return predict(request, other).step_seconds if fits(request, memory_quickly(request, other)) else None
    except UserError:
        return None


def options_of(after: StepSpec, before: StepSpec) -> list[str]:
    """The settings of one step that are not those of the other, as one types them."""
    values, others = settings_of(after), settings_of(before)
    named = ((name.replace("_", "-"), value) for name, value in values.items() if value != others[name])
    return [f"--schedule.{name} {value}" for name, value in named]
