"""Settings of a step that are changed one by one as long as that gains something; homes that are found for it, and
whether what it sends is coded without loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from tawpipe.errors import UserError
from tawpipe.plan.cost.feasible import QUICK_PLAYED, fits, plays, with_settings
from tawpipe.plan.cost.predict import Prediction, bound_of, memory_quickly, predict
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.plan.search.candidate import GAIN, LATE, Candidate, Outlook
from tawpipe.plan.search.pipelines import planner_of
from tawpipe.plan.search.place import find_homes
from tawpipe.schedule.pipelines.limits import BUDGET, QUICK, QUICK_EFFORT
from tawpipe.schedule.settings import spell_homes
from tawpipe.schedule.step import StepSpec
from tawpipe.simulate import CodingTimes

LESS_MEMORY = 0.01
"""A choice that takes as long and saves as much of the memory is better."""
PASSES = 3
CODING_GAIN = 0.05
"""The part of a step by which coding without loss must make it shorter, on the clock, to be chosen: how many bits are
left depends on numbers that no plan has seen."""
NEAR = 1.05
"""The same beyond which what is long to make is not made anew: another search gains a few per cent."""


def improve(
    request: PlanRequest, step: StepSpec, prediction: Prediction, outlook: Outlook
) -> tuple[StepSpec, Prediction]:
    """Change one setting at a time while a step gets faster by ``GAIN``, and memory allows it."""
    for _ in range(PASSES):
        before = prediction.step_seconds
        for change in _changes(request, step, prediction.step_seconds, outlook):
            outlook.at(f"other settings of {step.strategy.name}")
            if outlook.over():
                return step, prediction
            if (work := plays(request, step)) > QUICK_PLAYED and work > outlook.plays:
                return step, prediction
            with suppress(UserError):  # not for this strategy, or two settings that do not go together
                if request.dealt and step.divided_over > 1:  # other stages are dealt other bins
                    other = request.step(replace(step.settings, **change))
                else:
                    other = with_settings(step, **change)
                if other == step or bound_of(request, other) >= prediction.step_seconds * (1 - GAIN):
                    continue
                if not fits(request, memory_quickly(request, other)):
                    continue
                outlook.plays -= work if work > QUICK_PLAYED else 0
                tried = predict(request, other)
                if tried.step_seconds < prediction.step_seconds * (1 - GAIN):
                    step, prediction = other, tried
        if prediction.step_seconds > before * (1 - GAIN):
            break
    return step, prediction


def settle(request: PlanRequest, candidate: Candidate) -> Candidate:
    """The candidate with the homes that ``find_homes`` finds, if a step is faster with them or needs less memory."""
    step, prediction = candidate.step, candidate.prediction
    assert step is not None and prediction is not None
    homes = find_homes(request, step)
    if homes is not None and homes.of_unit:
        other = with_settings(step, homes=spell_homes(homes.of_unit))
        moved = predict(request, other)
        gain = GAIN if moved.peak_bytes >= prediction.peak_bytes * (1 - LESS_MEMORY) else -GAIN
        if moved.step_seconds < prediction.step_seconds * (1 - gain) and fits(request, moved.needs):
            step, prediction = other, moved
    return replace(candidate, step=step, prediction=prediction, homes=homes)


def codings(request: PlanRequest) -> list[dict[str, str]]:
    """Settings by which what passes between nodes is coded without loss, as far as that can be and nobody has chosen
    otherwise.
    """
    if request.topology.num_nodes == 1:
        return []
    given = request.settings
    weights = [{"weights_compression": "exact"}]
    if given.weights_compression != "none" or request.widths.weight != 2:
        weights = []
    if given.gradients_compression != "none" or request.widths.gradient > 4 or request.on_cuda:
        return weights
    gradients = {"gradients_compression": "exact"}
    return [*weights, gradients, *(option | gradients for option in weights)]


def why_not_coded(request: PlanRequest) -> str:
    """Why a plan leaves it to others to choose coding without loss, though a step might be shorter; or nothing."""
    if request.on_cuda:
        return "a plan does not choose it for GPUs, where it has not been run yet"
    unknown = request.profile.coding == CodingTimes()
    return "a plan does not choose it where coding was not measured" if unknown else ""


def coded(request: PlanRequest, candidate: Candidate) -> Candidate:
    """The candidate with what it sends coded without loss, which changes no number, if a step is shorter by
    ``CODING_GAIN``.
    """
    best, seconds = candidate, candidate.seconds * (1 - CODING_GAIN)
    assert candidate.step is not None
    if why_not_coded(request) or plays(request, candidate.step) > QUICK_PLAYED // 2:  # each takes seconds
        return candidate
    for option in codings(request):
        with suppress(UserError):  # not for this strategy
            other = with_settings(candidate.step, **option)
            if bound_of(request, other) >= seconds or not fits(request, memory_quickly(request, other)):
                continue
            tried = predict(request, other)
            if tried.step_seconds < seconds:
                best, seconds = replace(candidate, step=other, prediction=tried), tried.step_seconds * (1 - GAIN)
    return best


def _changes(request: PlanRequest, step: StepSpec, seconds: float, outlook: Outlook) -> Iterator[dict[str, Any]]:
    """Settings that may be worth a try, where a step takes so long; a strategy refuses those that are not for it."""
    planner = planner_of(request)
    effort = step.strategy.effort(request.model, request.topology, request.micro_batches_of(step.strategy))

    def worth(recompute: str) -> bool:
        """True if computing alone takes less, so that a step may; and if what is made anew could then be best. It
        takes seconds to make, and is not begun late.
        """
        if effort and outlook.over(LATE):
            return False
        bound = bound_of(request, with_settings(step, recompute=recompute))
        if bound >= seconds * (1 - GAIN):
            return False
        before = bound_of(request, step)  # 0 where nothing was timed
        expected = seconds * bound / before if before else seconds
        return not outlook.why_not(effort, hopeful=expected < outlook.ahead * NEAR)

    budget = QUICK if effort > QUICK_EFFORT else BUDGET
    return step.strategy.changes(planner, step, worth, budget=budget)
