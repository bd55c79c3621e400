"""Which settings suit each strategy, and which strategy is best.

The search is small and says what it does: every strategy is tried with few and many micro-batches per visit; those that
do not fit are dropped, those whose bound (computing, links) is behind the best prediction so far are not played; then
the best settings of each strategy that is not far behind are improved one by one as long as that gains something, and
homes are found for it where units or links are uneven (place.py). Where whole rows do not fit on a device, or devices
have none, several devices are tried for every row (``sequence_ranks``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from tawpipe.console import span
from tawpipe.errors import UserError
from tawpipe.garbage import rarely_collected
from tawpipe.plan.cost.feasible import (
    DEVICE,
    MOST_PLAYED,
    QUICK_PLAYED,
    fits,
    holds,
    leanest,
    plays,
    relieved,
    resized,
    too_large,
    unplayed,
    with_settings,
)
from tawpipe.plan.cost.predict import Prediction, bound_of, memory_of, memory_quickly, predict, short_schedule
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.plan.search import pipelines
from tawpipe.plan.search.candidate import (
    GAIN,
    LOOKING,
    MOST_EFFORT,
    PATIENCE_S,
    REST,
    TOO_LONG,
    Candidate,
    Outlook,
    TooLong,
)
from tawpipe.plan.search.pipelines import planner_of
from tawpipe.plan.search.place import homes_by_memory
from tawpipe.plan.search.refine import coded, improve, settle
from tawpipe.plan.search.refused import in_plain_words
from tawpipe.schedule.settings import spell_homes
from tawpipe.schedule.step import StepSpec, Strategy, Trial
from tawpipe.schedule.strategies.table import strategies

HOPELESS = 1.35
"""Multiple of the best step time beyond which a strategy is not improved knob by knob: recomputing nothing, the largest
gain there is, makes a step a quarter shorter.
"""
FAR_OVER = 1.5
"""Multiple of a device's memory: while nothing has fitted, no other settings are tried if the leanest need more."""
WORTH = 0.02
"""The part of the best step so far that a way to lay groups out must be able to gain, to be played."""


@rarely_collected()
def search(
    request: PlanRequest,
    *,
    most_s: Callable[[float], float] = lambda _: math.inf,
    vain_s: float = math.inf,
) -> list[Candidate]:
    """The best settings of every strategy, the fastest that fits first.

    ``progress`` says what is looked at, after ``PATIENCE_S`` and then less and less often.

    Args:
        most_s: seconds that the search may compute where the best step so far takes so long, as soon as something fits.
        vain_s: seconds that it may compute before anything fits.
    """
    candidates: list[Candidate] = []
    outlook = Outlook(effort=MOST_EFFORT, patience_s=PATIENCE_S, most_s=most_s, vain_s=vain_s)
    # Random numbers are drawn by every device for itself: another number of them is another draw, for want of which
    # alone no row is taken apart.
    draws = [request.with_ranks(1), request] if request.drops and request.sets else [request]
    # Homes that pass through the device take longer: they are looked at where nothing fits without.
    for asked in [draw.with_homes(level) for level in request.levels for draw in draws]:
        if any(candidate.fits for candidate in candidates):
            break
        before, candidates = {candidate.strategy: candidate for candidate in candidates}, []
        for strategy in sorted(strategies().values(), key=lambda strategy: not strategy.usual):
            if strategy.candidate:
                if strategy.name in before and asked.settings.host_homes not in strategy.host_levels:
                    candidates.append(before[strategy.name])  # it keeps its weights on devices
                    continue
                like, outlook.hopeful = _best_pipeline(candidates)
                outlook.ahead = min((candidate.seconds for candidate in candidates if candidate.fits), default=math.inf)
                if outlook.over(LOOKING):
                    candidates.append(Candidate(strategy.name, None, None, False, TOO_LONG))
                    continue
                candidate = _best(asked, strategy, like, outlook)
                if not outlook.hopeful and _best_pipeline([*candidates, candidate])[1]:
                    outlook.hopeful = True  # balanced, it is not far behind
                    candidate = _best(asked, strategy, like, outlook)
                candidates.append(candidate)
    candidates.sort(key=lambda candidate: (not candidate.fits, candidate.seconds))
    outlook.effort = MOST_EFFORT
    outlook.ahead = min((candidate.seconds for candidate in candidates if candidate.fits), default=math.inf)
    outlook.leave(REST)
    for i, candidate in enumerate(candidates):
        outlook.ahead = min(other.seconds for other in candidates if other.fits or not candidates[0].fits)
        if candidate.step is None or candidate.prediction is None:
            continue
        asked = request.with_homes(candidate.step.settings.host_homes or "none")
        if not candidate.fits and candidate.prediction.timeline is None:
            # The memory is shown for all, the time where it is known soon.
            quick = plays(asked, candidate.step) <= QUICK_PLAYED and not outlook.over()
            known = replace(candidate.prediction, needs=memory_quickly(asked, candidate.step))
            candidates[i] = replace(candidate, prediction=predict(asked, candidate.step) if quick else known)
        elif candidate.fits and candidate.seconds < outlook.ahead * HOPELESS and not outlook.over():
            step, prediction = improve(asked, candidate.step, candidate.prediction, outlook)
            candidates[i] = coded(asked, settle(asked, replace(candidate, step=step, prediction=prediction)))
    return sorted(candidates, key=lambda candidate: (not candidate.fits, candidate.seconds))


def _best(
    request: PlanRequest, strategy: Strategy, like: Strategy | None = None, outlook: Outlook | None = None
) -> Candidate:
    """The settings that suit a strategy, as long as nothing is improved one by one.

    Args:
        like: see ``Strategy.trials``.
    """
    outlook = outlook or Outlook()
    best = _best_of(request, strategy, like, outlook)
    spread = "sequence_ranks" not in strategy.refusals and (request.leaves_idle or not _on_device(best))
    for other in _spread(request, strategy, like, outlook, best) if spread else ():
        if other.fits != best.fits:
            better = other.fits
        elif other.fits:
            better = other.seconds < best.seconds * (1 - GAIN)
        else:
            better = _peak(other) < _peak(best)
        best = other if better else best
    # Seconds of what does not fit are asked for in ``_best_pipeline`` alone, and played in the end where that is quick.
    step, prediction = best.step, best.prediction
    if step and prediction and not prediction.timeline and step.divided_over > 1 and outlook.ahead < math.inf:
        return replace(best, prediction=predict(request, step))
    return best


def _spread(
    request: PlanRequest, strategy: Strategy, like: Strategy | None, outlook: Outlook, best: Candidate
) -> list[Candidate]:
    """Best candidates with several ranks to a row, the fewest ranks first; only the one with the most, which need the
    least memory each, if that is far from fitting.

    Args:
        best: the candidate with one rank to a row; if it fits, the limits of a search with something that fits hold.
    """
    best_of = [partial(_best_of, request.with_ranks(ranks), strategy, like, outlook) for ranks in request.sets]
    outlook.ahead = min(outlook.ahead, best.seconds if best.fits else math.inf)
    widest = [] if best.fits else [find() for find in best_of[-1:]]
    if any(least.prediction and not least.fits and _far_over(request, _peak(least)) for least in widest):
        return widest
    return [*(find() for find in best_of[: len(best_of) - len(widest)] if not outlook.over(LOOKING)), *widest]


def _on_device(candidate: Candidate) -> bool:
    """True if it fits with whole rows, and everything on the device."""
    if not candidate.fits or candidate.step is None:
        return False
    return not candidate.step.settings.sequence_chunk and not candidate.step.settings.offloaded_layers


def _peak(candidate: Candidate) -> float:
    return candidate.prediction.peak_bytes if candidate.prediction else float("inf")


def _best_of(request: PlanRequest, strategy: Strategy, like: Strategy | None, outlook: Outlook) -> Candidate:
    """The same with as many ranks to a row as the request says: the best of all ways to lay it out."""
    looked_at: list[Candidate] = []
    for trial in sorted(strategy.trials(planner_of(request), like), key=lambda trial: trial.least_s):
        if looked_at and outlook.over(LOOKING):
            break
        fitting = [candidate.seconds for candidate in looked_at if candidate.fits]
        if trial.spare and fitting:
            continue
        outlook.at(strategy.name)
        looked_at += _look(request, trial, min(fitting, default=outlook.ahead * HOPELESS), outlook)
    return min(
        looked_at,
        key=lambda candidate: (not candidate.fits, candidate.seconds if candidate.fits else _peak(candidate)),
        default=Candidate(strategy.name, None, None, False, "a pipeline needs several devices"),
    )


def _look(request: PlanRequest, trial: Trial, most: float, outlook: Outlook) -> list[Candidate]:
    """The best settings of one way to lay a strategy out, and of what it offers instead where that is behind.

    Args:
        most: see ``_best_laid_out``.
    """
    way, planner = trial.strategy, planner_of(request)
    refused = Candidate(way.name, None, None, False)

    def stop() -> None:
        if outlook.over(LOOKING):
            raise TooLong

    try:
        why = too_large(request, way.divided_over(request.topology))
        why = why or (_behind(request, way, outlook) if trial.must_gain else "")
        if not why:
            effort = way.effort(request.model, request.topology, request.micro_batches_of(way))
            why = outlook.why_not(effort, hopeful=outlook.hopeful or trial.may_overtake)
        if why:
            return [replace(refused, why_not=why)]
        fitted = pipelines.made_for(request, way, hopeful=outlook.hopeful, stop=stop)
        first = _best_laid_out(request, fitted, most)
    except UserError as error:
        first = replace(refused, why_not=in_plain_words(error))
    except TooLong:
        first = replace(refused, why_not=TOO_LONG)
    if outlook.hopeful and (not first.fits or first.seconds > outlook.ahead):
        with suppress(UserError):
            return [first, *(_best_laid_out(request, other, most) for other in way.instead(planner))]
    return [first]


def _behind(request: PlanRequest, way: Strategy, outlook: Outlook) -> str:
    """Why one of several ways to lay out weights that travel cannot be the best of all, or nothing."""
    if outlook.ahead == math.inf:
        return "not evaluated: it needs more memory than tawpipe-spread"
    fewest = replace(request.settings, strategy=way.name, micro_batches_per_visit=_visits(request, way)[-1])
    bound = bound_of(request, request.step(fewest, way))
    if bound > outlook.ahead * (1 - WORTH):
        return f"not evaluated: computing and links alone take {span(bound)} per step"
    return ""


def _best_pipeline(candidates: Sequence[Candidate]) -> tuple[Strategy | None, bool]:
    """(the best pipeline so far, if one fits; whether it is not far behind the best of all)."""
    pipelined = [candidate for candidate in candidates if candidate.step and candidate.step.divided_over > 1]
    ahead = min((candidate.seconds for candidate in candidates if candidate.fits), default=math.inf)
    best = min(pipelined, key=lambda candidate: (not candidate.fits, candidate.seconds), default=None)
    if best is None or not best.fits:  # what is made for the memory that there is may fit, and laid out otherwise
        return None, best is None or best.seconds < ahead * HOPELESS
    assert best.step is not None
    return best.step.strategy, best.seconds < ahead * HOPELESS


def _best_laid_out(request: PlanRequest, strategy: Strategy, most: float = math.inf) -> Candidate:
    """The best settings of one way to lay a strategy out.

    Args:
        most: seconds beyond which no more than ``QUICK_PLAYED`` is played; infinite while nothing has fitted.
    """
    refused = Candidate(strategy.name, None, None, False)
    base = replace(request.settings, strategy=strategy.name)
    visits = _visits(request, strategy)
    try:
        options = [request.step(replace(base, micro_batches_per_visit=k), strategy) for k in visits]
        if why := unplayed(request, options[0]):
            return replace(refused, why_not=why)
        if homes := homes_by_memory(request, options[0]):
            options = [with_settings(step, homes=spell_homes(homes)) for step in options]
        options = [step for step in options if plays(request, step) <= MOST_PLAYED] or options[:1]
        bound, work = min(bound_of(request, step) for step in options), min(plays(request, step) for step in options)
        if bound > most and work > QUICK_PLAYED:
            return replace(refused, why_not=f"not evaluated: computing and links alone take {span(bound)} per step")
        hopeless = most == math.inf and _hopeless(request, options)
        best = _fastest(request, options, look=True) if not hopeless and _some_fit(request, options) else None
    except UserError as error:
        return replace(refused, why_not=in_plain_words(error))
    if best is None:
        least, *others = _lean(request, options)
        if not hopeless and _some_fit(request, [least, *others], DEVICE):
            options = [with_settings(step, look_ahead=1, gradient_buffers=1) for step in options]
            best = _fastest(request, [*_offloaded(request, options), *_in_chunks(request, options)])
        if best is None:
            if fits(request, needs := memory_quickly(request, least, part=hopeless)):
                return Candidate(strategy.name, least, predict(request, least), True)
            bound = bound_of(request, least)
            return replace(refused, step=least, prediction=Prediction(bound, 0.0, 0.0, 0, needs, bound))
    return Candidate(strategy.name, *best, True)


def _some_fit(request: PlanRequest, options: Sequence[StepSpec], *what: str) -> bool:
    """True if one of them may fit, which have more and more micro-batches a visit: these need more memory, but for all
    in one round, of which nothing is kept for another one.

    Args:
        what: the memory that is looked at; all by default.
    """
    return any(holds(request, step, *what) for step in dict.fromkeys((options[0], options[-1])))


def _lean(request: PlanRequest, options: Sequence[StepSpec]) -> list[StepSpec]:
    """The settings that need the least memory, with the fewest micro-batches per visit and with the most."""
    least = leanest(request, options[0])
    return [least, with_settings(least, micro_batches_per_visit=options[-1].settings.micro_batches_per_visit)]


def _hopeless(request: PlanRequest, steps: Sequence[StepSpec]) -> bool:
    """True if the lean settings are far from fitting; an error in these says nothing of the usual ones."""
    with suppress(UserError):
        return all(_far_over(request, memory_quickly(request, way, part=True).wanted) for way in _lean(request, steps))
    return False


def _far_over(request: PlanRequest, needed: float) -> bool:
    """True if ``needed`` bytes of a device are far more than the device with most memory has."""
    return 0 < request.memory_bytes * FAR_OVER < needed


def _fastest(
    request: PlanRequest, steps: Sequence[StepSpec], *, look: bool = False
) -> tuple[StepSpec, Prediction] | None:
    """The step that takes the least time, but for ``GAIN``; those whose bound is behind it are not played.

    Args:
        look: steps may not fit, and are then left out.
    """
    best: tuple[StepSpec, Prediction] | None = None
    for bound, step in sorted(((bound_of(request, step), step) for step in steps), key=lambda pair: pair[0]):
        if best is not None and bound >= best[1].step_seconds * (1 - GAIN):
            break
        if look and not holds(request, step):
            continue
        prediction = predict(request, step)
        if best is None or prediction.step_seconds < best[1].step_seconds * (1 - GAIN):
            best = step, prediction
    return best


def _in_chunks(request: PlanRequest, options: Sequence[StepSpec]) -> Iterator[StepSpec]:
    """Steps whose rows run in chunks, the largest that fit."""
    whole = "sequence_chunk" in options[0].strategy.refusals
    if whole or request.settings.sequence_chunk is not None or not request.chunks:
        return
    over = set[int]()
    for option, layers in _offloading(request, options, chunk=request.chunks[0]):
        if layers in over and option.rounds > 1:  # see ``_some_fit``
            continue
        first = with_settings(option, **request.in_chunks(request.chunks[0]), offloaded_layers=layers)
        schedule = short_schedule(request, first)
        over.add(layers)
        for size in reversed(request.chunks):
            step = with_settings(first, sequence_chunk=size)
            if fits(request, memory_of(request, resized(schedule, step))):
                over.discard(layers)
                yield step
                break


def _offloaded(request: PlanRequest, options: Sequence[StepSpec]) -> Iterator[StepSpec]:
    """Steps with whole rows and layers offloaded, or less ahead, that fit."""
    over = set[int]()
    for option, layers in _offloading(request, options, chunk=0):
        step = with_settings(option, offloaded_layers=layers)
        if layers in over and option.rounds > 1:  # see ``_some_fit``
            continue
        if holds(request, step):
            yield step
        else:
            over.add(layers)


def _offloading(request: PlanRequest, options: Sequence[StepSpec], *, chunk: int) -> Iterator[tuple[StepSpec, int]]:
    """Every step with no layer offloaded and with all, and the first also with some; so is the last where gradients of
    one round need no home.
    """
    yield from ((step, 0) for step in options)
    layers, last = request.model.num_layers, options[1:][-1:]
    if relieved(request, options[0].strategy, chunk=chunk):
        some = [options[0], *(step for step in last if step.passes_gradients)]
        yield from ((step, number) for number in (layers // 2, layers * 3 // 4) for step in some)
        yield from ((step, layers) for step in options)


def _visits(request: PlanRequest, strategy: Strategy) -> Sequence[int]:
    return strategy.visits(request.micro_batches, request.topology, request.settings)
