"""Tune the settings of a step one by one, find homes for its units, and choose lossless coding of what it sends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from tawpipe.errors import UserError
from tawpipe.plan.cost.feasible import QUICK_PLAYED, fits, plays, relieved, with_settings
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
"""Share of the memory that a choice must save to be preferred to one that is equally fast."""
PASSES = 3
CODING_GAIN = 0.05
"""Share of a step's predicted time that lossless coding must save to be chosen. The number of bits that remain depends
on the values, which no plan has seen."""
NEAR = 1.05
"""Multiple of the best step time beyond which a pipeline's order, if it takes long to make, is not made again. Another
search gains only a few per cent."""


def improve(
    request: PlanRequest, step: StepSpec, prediction: Prediction, outlook: Outlook
) -> tuple[StepSpec, Prediction]:
    """Try changes of single settings, and keep each that makes the step faster by ``GAIN`` and fits in memory.

    Stops when a pass over all settings gains nothing, after ``PASSES`` passes, or when time or the budget of
    ``outlook`` is used up. Returns the best step and its prediction."""
    for _ in range(PASSES):
        before = prediction.step_seconds
        for change in _changes(request, step, prediction.step_seconds, outlook):
            outlook.at(f"other settings of {step.strategy.name}")
            if outlook.over():
                return step, prediction
            if (work := plays(request, step)) > QUICK_PLAYED and work > outlook.plays:
                return step, prediction
            with suppress(UserError):  # the strategy refuses the setting, or two settings exclude each other
                if request.dealt and step.divided_over > 1:  # other stages get another assignment of documents
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
    """Search homes of single units, and return the candidate with them if they make its step faster or save memory.

    The step keeps its homes otherwise. The result of the search is recorded in ``Candidate.homes`` in both cases."""
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
    """Return options for lossless coding between nodes, each a dict of settings to try.

    Left out are those that the user has set or that cannot work here. The list is empty on one node."""
    if request.topology.num_nodes == 1:
        return []
    settings = request.settings
    weights = [{"weights_compression": "exact"}]
    if settings.weights_compression != "none" or request.widths.weight != 2:
        weights = []
    if settings.gradients_compression != "none" or request.widths.gradient > 4 or request.on_cuda:
        return weights
    gradients = {"gradients_compression": "exact"}
    return [*weights, gradients, *(option | gradients for option in weights)]


def why_not_coded(request: PlanRequest) -> str:
    """Return the reason why a plan does not choose lossless coding although it might be faster, or ``""``."""
    if request.on_cuda:
        return "a plan does not choose it for GPUs, where it has not been run yet"
    unknown = request.profile.coding == CodingTimes()
    return "a plan does not choose it where coding was not measured" if unknown else ""


def coded(request: PlanRequest, candidate: Candidate) -> Candidate:
    """Try lossless coding, and return the candidate with it if its step gets shorter by ``CODING_GAIN``.

    Otherwise returns the candidate itself. Lossless coding changes no result. Nothing is tried where coding was not
    measured, or where predictions take long."""
    best, seconds = candidate, candidate.seconds * (1 - CODING_GAIN)
    assert candidate.step is not None
    if why_not_coded(request) or plays(request, candidate.step) > QUICK_PLAYED // 2:  # predictions take seconds
        return candidate
    for option in codings(request):
        with suppress(UserError):  # the strategy refuses the option
            other = with_settings(candidate.step, **option)
            if bound_of(request, other) >= seconds or not fits(request, memory_quickly(request, other)):
                continue
            tried = predict(request, other)
            if tried.step_seconds < seconds:
                best, seconds = replace(candidate, step=other, prediction=tried), tried.step_seconds * (1 - GAIN)
    return best


def _changes(request: PlanRequest, step: StepSpec, seconds: float, outlook: Outlook) -> Iterator[dict[str, Any]]:
    """Return an iterator over the changes of settings that the strategy of ``step`` offers, each a dict of settings.

    Changes of ``recompute`` that cannot make the step shorter than ``seconds`` are left out (``worth``). The strategy
    may still refuse a change."""
    planner = planner_of(request)
    effort = step.strategy.effort(request.model, request.topology, request.micro_batches_of(step.strategy))

    def worth(recompute: str) -> bool:
        """Return True if the value ``recompute`` may make the step faster, and its order may be made.

        It can be faster only if its lower bound is. A new order takes seconds to make, so none is begun late in the
        search. If True, the effort of making an order is charged to the budget."""
        if effort and outlook.over(LATE):
            return False
        bound = bound_of(request, with_settings(step, recompute=recompute))
        if bound >= seconds * (1 - GAIN):
            return False
        before = bound_of(request, step)  # 0 if nothing was timed
        expected = seconds * bound / before if before else seconds
        return not outlook.why_not(effort, hopeful=expected < outlook.best_s * NEAR)

    budget = QUICK if effort > QUICK_EFFORT else BUDGET
    yield from ways_of_rows(request, step)
    yield from step.strategy.changes(planner, step, worth, budget=budget)


def ways_of_rows(request: PlanRequest, step: StepSpec) -> Iterator[dict[str, Any]]:
    """Yield settings for whole rows and for rows in chunks, if whole rows do not fit without offloading.

    All layers are offloaded, if the strategy can, and attention's output is kept or recomputed. No single change leads
    from one of these ways to the other. Of chunks the largest and the smallest are tried."""
    if step.settings.keep_mib or request.settings.sequence_chunk is not None or not request.chunks:
        return
    if "sequence_chunk" in step.strategy.refusals:
        return
    for size in dict.fromkeys((0, request.chunks[-1], request.chunks[0])):
        layers = request.model.num_layers if relieved(request, step.strategy, chunk=size) else 0
        for recompute in ("selective", "full"):
            yield {**request.in_chunks(size), "recompute": recompute, "offloaded_layers": layers}
