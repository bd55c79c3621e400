"""Changes with which a run fits in memory, for a schedule whose settings do not fit, and their cost in time.

A change is data; only its ``str`` puts it into words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from operator import or_
from typing import Any

from tawpipe.console import span
from tawpipe.errors import UserError
from tawpipe.options.names import Change, spelled
from tawpipe.plan.cost.feasible import fits, gib, relieved, with_settings
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
"""Seconds that a search for the best plan may compute once something fits; a refusal should not take long."""
BATCHES = {
    "sequence_length": " of as many rows",
    "bin_tokens": " of as many rows",
    "global_batch": " of fewer rows",
    "tokens_per_step": " of fewer tokens",
}
"""Settings of the batch, and the words that say what a step contains when the setting is reduced."""


@dataclass(frozen=True)
class WayOut:
    """Change of a run with which it fits.

    Args:
        changes: settings with their new values.
        seconds: predicted seconds of a step.
        strategy: strategy that a plan chooses with the change; ``""`` if none is chosen.
        peak_bytes: predicted device memory with that strategy.
        machines: change of the machines in words, instead of settings.
    """

    changes: tuple[Change, ...]
    seconds: float
    strategy: str = ""
    peak_bytes: int = 0
    machines: str = ""

    def __str__(self) -> str:
        chosen = f" ({self.strategy}, {gib(self.peak_bytes)} GiB)" if self.strategy else ""
        of_batch = "".join(BATCHES.get(change.setting, "") for change in self.changes)
        return f"{self.machines or spelled(self.changes)}: {span(self.seconds)} per step{chosen}{of_batch}"


def remedies(request: PlanRequest, step: StepSpec) -> Iterator[WayOut]:
    """Yield changes of schedule settings with which a run would fit, each with the predicted seconds of a step.

    Changes of few settings are first. The last one has all settings of the plan's best candidate, for which a whole
    search runs.

    Args:
        request: the request for which ``step`` does not fit.
        step: the step that does not fit.
    """
    yield from _leaner(request, step)
    best = Plan.of(request, search(request, most_s=lambda _: MOST_S)).chosen
    if best is not None and best.step is not None:
        yield WayOut(changes_of(best.step, step), best.seconds)


def _changes(request: PlanRequest, step: StepSpec) -> list[dict[str, Any]]:
    """Return the changes to try, those that cost the least time first."""
    changes = list(LEANER)
    if request.chunks:
        changes.append({"recompute": "full", **request.in_chunks(request.chunks[0])})
    if request.cp_group_sizes:
        changes.append({"recompute": "full", "sequence_ranks": request.cp_group_sizes[-1]})
    if relieved(request, step.strategy):
        changes.append({"recompute": "full", "offloaded_layers": request.model.num_layers})
    changes.extend({"host_homes": level} for level in request.levels if level != "none")
    return changes


def _leaner(request: PlanRequest, step: StepSpec) -> Iterator[WayOut]:
    """Yield every change of ``_changes`` that suffices alone; if none does, the first combination that suffices.

    Combinations contain the first change, the first two, and so on. Nothing is yielded if none suffices."""
    changes = _changes(request, step)
    for trials, most in ((changes, None), (accumulate(changes, or_), 1)):
        fitting = [way for change in trials if (way := _way_out(request, step, change))]
        yield from fitting[:most]
        if fitting:
            return


def _way_out(request: PlanRequest, step: StepSpec, change: dict[str, Any]) -> WayOut | None:
    """Return ``change`` with the predicted seconds if the step then fits; None if not, or if it changes nothing.

    Settings that the strategy cannot use are left out of the change."""
    with suppress(UserError):
        refusals = step.strategy.refusals
        other = with_settings(step, **{name: value for name, value in change.items() if name not in refusals})
        changed = request.step(other.settings, other.strategy)
        if other != step and fits(request, memory_quickly(request, changed)):
            return WayOut(changes_of(other, step), predict(request, changed).step_seconds)
    return None


def changes_of(after: StepSpec, before: StepSpec) -> tuple[Change, ...]:
    """Return the settings in which ``after`` differs from ``before``, with the values of ``after``.

    Only settings that a plan chooses are compared."""
    values, others = settings_of(after), settings_of(before)
    return tuple(Change(f"schedule.{name}", value) for name, value in values.items() if value != others[name])
