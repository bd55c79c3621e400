"""Search for the best settings of every strategy, and for the best strategy.

Every strategy is tried with few and with many micro-batches per visit. Settings that do not fit are dropped. Settings
whose lower bound on time (computing, links) is behind the best prediction so far are not simulated.

Then the settings of each strategy that is not far behind are tuned one by one, as long as a step gets faster. Where
units or links are uneven, better homes are searched (place.py). Where whole rows do not fit on a device, or some
devices would have no row, several devices are tried per row (``sequence_ranks``)."""

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
"""Multiple of the best step time beyond which the settings of a strategy are not tuned. The largest possible gain,
recomputing nothing, makes a step only a quarter shorter."""
FAR_OVER = 1.5
"""Multiple of a device's memory. While nothing fits, no other settings are tried if the leanest ones need more than
this."""
WORTH = 0.02
"""Share of the best step time that one of several layouts must be able to gain to be simulated."""


@rarely_collected()
def search(
    request: PlanRequest,
    *,
    most_s: Callable[[float], float] = lambda _: math.inf,
    vain_s: float = math.inf,
) -> list[Candidate]:
    """Search the best settings of every strategy, and return one candidate for each: those that fit first, by time.

    Prints a progress line after ``PATIENCE_S`` seconds, then at growing intervals.

    Args:
        request: model, data and machines.
        most_s: returns the seconds that the search may compute, given the seconds of the best step so far; used as soon
            as something fits.
        vain_s: seconds that the search may compute while nothing fits.
    """
    candidates: list[Candidate] = []
    outlook = Outlook(effort=MOST_EFFORT, patience_s=PATIENCE_S, most_s=most_s, vain_s=vain_s)
    # Each device draws its own dropout, so splitting rows over ranks changes the draws. Split rows are tried only if
    # nothing fits with whole ones.
    draws = [request.with_ranks(1), request] if request.drops and request.cp_group_sizes else [request]
    # Homes in host memory make a step slower, so the next level is tried only if nothing fits at the levels before it.
    for asked in [draw.with_homes(level) for level in request.levels for draw in draws]:
        if any(candidate.fits for candidate in candidates):
            break
        before, candidates = {candidate.strategy: candidate for candidate in candidates}, []
        for strategy in sorted(strategies().values(), key=lambda strategy: not strategy.usual):
            if strategy.candidate:
                if strategy.name in before and asked.settings.host_homes not in strategy.host_levels:
                    candidates.append(before[strategy.name])  # it does not support this level of host_homes
                    continue
                like, outlook.hopeful = _best_pipeline(candidates)
                outlook.best_s = min(
                    (candidate.seconds for candidate in candidates if candidate.fits), default=math.inf
                )
                if outlook.over(LOOKING):
                    candidates.append(Candidate(strategy.name, None, None, False, TOO_LONG))
                    continue
                candidate = _best(asked, strategy, like, outlook)
                if not outlook.hopeful and _best_pipeline([*candidates, candidate])[1]:
                    outlook.hopeful = True  # with balanced stages this pipeline is not far behind
                    candidate = _best(asked, strategy, like, outlook)
                candidates.append(candidate)
    candidates.sort(key=lambda candidate: (not candidate.fits, candidate.seconds))
    outlook.effort = MOST_EFFORT
    outlook.best_s = min((candidate.seconds for candidate in candidates if candidate.fits), default=math.inf)
    outlook.leave(REST)
    for i, candidate in enumerate(candidates):
        outlook.best_s = min(other.seconds for other in candidates if other.fits or not candidates[0].fits)
        if candidate.step is None or candidate.prediction is None:
            continue
        asked = request.with_homes(candidate.step.settings.host_homes or "none")
        if not candidate.fits and candidate.prediction.timeline is None:
            # The table shows memory for every candidate, but time only if the simulation is quick.
            quick = plays(asked, candidate.step) <= QUICK_PLAYED and not outlook.over()
            known = replace(candidate.prediction, needs=memory_quickly(asked, candidate.step))
            candidates[i] = replace(candidate, prediction=predict(asked, candidate.step) if quick else known)
        elif candidate.fits and candidate.seconds < outlook.best_s * HOPELESS and not outlook.over():
            step, prediction = improve(asked, candidate.step, candidate.prediction, outlook)
            candidates[i] = coded(asked, settle(asked, replace(candidate, step=step, prediction=prediction)))
    return sorted(candidates, key=lambda candidate: (not candidate.fits, candidate.seconds))


def _best(
    request: PlanRequest, strategy: Strategy, like: Strategy | None = None, outlook: Outlook | None = None
) -> Candidate:
    """Return the best candidate of a strategy, before its settings are tuned one by one.

    If whole rows do not fit on the device without offloading, or devices would be idle, larger context-parallel groups
    are tried as well.

    Args:
        request: model, data and machines.
        strategy: the strategy.
        like: the best pipeline so far, see ``Strategy.trials``.
        outlook: state of the search; None for one without limits.
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
    # ``_best_pipeline`` compares the seconds of pipelines even if they do not fit, so simulate this one now.
    step, prediction = best.step, best.prediction
    if step and prediction and not prediction.timeline and step.divided_over > 1 and outlook.best_s < math.inf:
        return replace(best, prediction=predict(request, step))
    return best


def _spread(
    request: PlanRequest, strategy: Strategy, like: Strategy | None, outlook: Outlook, best: Candidate
) -> list[Candidate]:
    """Return the best candidate for each context-parallel size in ``request.cp_group_sizes``, smallest size first.

    If ``best`` does not fit, the largest size is tried first, because it needs the least memory per rank. If even that
    is far from fitting, it is the only candidate returned. Sizes are skipped once the time for evaluating strategies is
    over. ``outlook.best_s`` is lowered to the time of ``best`` if that fits.

    Args:
        request: model, data and machines.
        strategy: the strategy.
        like: the best pipeline so far, see ``Strategy.trials``.
        outlook: state of the search.
        best: the candidate with one rank per row.
    """
    best_of = [
        partial(_best_of, request.with_ranks(ranks), strategy, like, outlook) for ranks in request.cp_group_sizes
    ]
    outlook.best_s = min(outlook.best_s, best.seconds if best.fits else math.inf)
    widest = [] if best.fits else [find() for find in best_of[-1:]]
    if any(least.prediction and not least.fits and _far_over(request, _peak(least)) for least in widest):
        return widest
    return [*(find() for find in best_of[: len(best_of) - len(widest)] if not outlook.over(LOOKING)), *widest]


def _on_device(candidate: Candidate) -> bool:
    """Return True if the candidate fits with whole rows and without offloaded layers."""
    if not candidate.fits or candidate.step is None:
        return False
    return not candidate.step.settings.sequence_chunk and not candidate.step.settings.offloaded_layers


def _peak(candidate: Candidate) -> float:
    """Return the peak bytes of a device; infinite without a prediction."""
    return candidate.prediction.peak_bytes if candidate.prediction else float("inf")


def _best_of(request: PlanRequest, strategy: Strategy, like: Strategy | None, outlook: Outlook) -> Candidate:
    """Return the best candidate of all layouts of ``strategy``, with the context-parallel size that ``request`` sets.

    The best is the fastest that fits; if nothing fits, the one that needs the least device memory."""
    looked_at: list[Candidate] = []
    for trial in sorted(strategy.trials(planner_of(request), like), key=lambda trial: trial.least_s):
        if looked_at and outlook.over(LOOKING):
            break
        fitting = [candidate.seconds for candidate in looked_at if candidate.fits]
        if trial.spare and fitting:
            continue
        outlook.at(strategy.name)
        looked_at += _look(request, trial, min(fitting, default=outlook.best_s * HOPELESS), outlook)
    return min(
        looked_at,
        key=lambda candidate: (not candidate.fits, candidate.seconds if candidate.fits else _peak(candidate)),
        default=Candidate(strategy.name, None, None, False, "a pipeline needs several devices"),
    )


def _look(request: PlanRequest, trial: Trial, most: float, outlook: Outlook) -> list[Candidate]:
    """Return the best candidate for the layout of ``trial``, and after it alternatives.

    The candidate has a reason instead of a prediction if the layout cannot run or is not worth its time. Alternatives
    are the candidates for ``Strategy.instead`` of this layout. There are some only while ``outlook.hopeful`` is True,
    and if the first candidate does not fit or is slower than the best step.

    Args:
        request: model, data and machines.
        trial: the layout.
        most: see ``_best_laid_out``.
        outlook: state of the search.
    """
    way, planner = trial.strategy, planner_of(request)
    refused = Candidate(way.name, None, None, False)

    def stop() -> None:
        """Raise ``TooLong`` if the time for evaluating strategies is over."""
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
        fitted = pipelines.fit_to(request, way, hopeful=outlook.hopeful, stop=stop)
        first = _best_laid_out(request, fitted, most)
    except UserError as error:
        first = replace(refused, why_not=in_plain_words(error))
    except TooLong:
        first = replace(refused, why_not=TOO_LONG)
    if outlook.hopeful and (not first.fits or first.seconds > outlook.best_s):
        with suppress(UserError):
            return [first, *(_best_laid_out(request, other, most) for other in way.instead(planner))]
    return [first]


def _behind(request: PlanRequest, way: Strategy, outlook: Outlook) -> str:
    """Return the reason why this layout of a weight-moving strategy cannot win; ``""`` if it may.

    It cannot if nothing has fitted yet (it needs more memory), or if its lower bound is not below the best step."""
    if outlook.best_s == math.inf:
        return "not evaluated: it needs more memory than tawpipe-spread"
    fewest = replace(request.settings, strategy=way.name, micro_batches_per_visit=_visits(request, way)[-1])
    bound = bound_of(request, request.step(fewest, way))
    if bound > outlook.best_s * (1 - WORTH):
        return f"not evaluated: computing and links alone take {span(bound)} per step"
    return ""


def _best_pipeline(candidates: Sequence[Candidate]) -> tuple[Strategy | None, bool]:
    """Return the best pipeline so far (None if no pipeline fits), and True if pipelines may still be among the best.

    Pipelines may be among the best if there is no candidate for one yet, or if the best one takes less than
    ``HOPELESS`` times the best step."""
    pipelined = [candidate for candidate in candidates if candidate.step and candidate.step.divided_over > 1]
    best_s = min((candidate.seconds for candidate in candidates if candidate.fits), default=math.inf)
    best = min(pipelined, key=lambda candidate: (not candidate.fits, candidate.seconds), default=None)
    if best is None or not best.fits:  # another layout may fit
        return None, best is None or best.seconds < best_s * HOPELESS
    assert best.step is not None
    return best.step.strategy, best.seconds < best_s * HOPELESS


def _best_laid_out(request: PlanRequest, strategy: Strategy, most: float = math.inf) -> Candidate:
    """Return the candidate with the best settings for one layout of a strategy.

    Several numbers of micro-batches per visit are tried first. If none fits: offloading and rows in chunks, then the
    leanest settings. A candidate that does not fit contains the memory and the lower bound on time of the leanest
    settings only. One that cannot run contains the reason.

    Args:
        request: model, data and machines.
        strategy: the strategy with this layout.
        most: seconds; layouts whose lower bound is larger are simulated only if that is quick (``QUICK_PLAYED``).
            Infinite while nothing has fitted.
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
    """Return True if the first or the last of ``options`` fits.

    The options are ordered by micro-batches per visit. Memory grows with that number, except for the last option if it
    computes everything in one round, because it keeps nothing for another round. Therefore these two suffice.

    Args:
        what: kinds of memory to check; all by default.
    """
    return any(holds(request, step, *what) for step in dict.fromkeys((options[0], options[-1])))


def _lean(request: PlanRequest, options: Sequence[StepSpec]) -> list[StepSpec]:
    """Return the step with the leanest settings twice: with the fewest micro-batches per visit, and with the most."""
    least = leanest(request, options[0])
    return [least, with_settings(least, micro_batches_per_visit=options[-1].settings.micro_batches_per_visit)]


def _hopeless(request: PlanRequest, steps: Sequence[StepSpec]) -> bool:
    """Return True if even the leanest settings need far more device memory (``FAR_OVER``) than there is.

    False if the leanest settings cannot be built, because the usual ones may still work."""
    with suppress(UserError):
        return all(_far_over(request, memory_quickly(request, way, part=True).wanted) for way in _lean(request, steps))
    return False


def _far_over(request: PlanRequest, needed: float) -> bool:
    """Return True if ``needed`` bytes exceed ``FAR_OVER`` times the memory of the device with the most memory."""
    return 0 < request.memory_bytes * FAR_OVER < needed


def _fastest(
    request: PlanRequest, steps: Sequence[StepSpec], *, look: bool = False
) -> tuple[StepSpec, Prediction] | None:
    """Simulate steps and return the one with the least predicted time and its prediction; None if no step fits.

    Steps are tried in the order of their lower bounds. A later one replaces the best only if it is faster by ``GAIN``.
    Steps whose lower bound cannot reach that are not simulated.

    Args:
        request: model, data and machines.
        steps: steps to compare.
        look: True to check memory, and leave out steps that do not fit; False if all are known to fit.
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
    """Yield steps whose rows run in chunks and that fit, with different numbers of offloaded layers.

    Of each, only the largest chunk size that fits is yielded. Nothing is yielded if the setting is given, or if rows
    must stay whole."""
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
    """Yield the steps of ``options``, with different numbers of offloaded layers, that fit with whole rows."""
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
    """Yield (step, number of offloaded layers) pairs to try, the fewest layers first.

    Every step is tried with no layer offloaded and with all. The first step is also tried with half and three quarters
    of the layers. So is the last step if its gradients are updated without a home (``StepSpec.passes_gradients``).

    Args:
        request: model, data and machines.
        options: the steps.
        chunk: tokens of a chunk; 0 for whole rows.
    """
    yield from ((step, 0) for step in options)
    layers, last = request.model.num_layers, options[1:][-1:]
    if relieved(request, options[0].strategy, chunk=chunk):
        some = [options[0], *(step for step in last if step.passes_gradients)]
        yield from ((step, number) for number in (layers // 2, layers * 3 // 4) for step in some)
        yield from ((step, layers) for step in options)


def _visits(request: PlanRequest, strategy: Strategy) -> Sequence[int]:
    """Return the numbers of micro-batches per visit to try, ascending."""
    return strategy.visits(request.micro_batches, request.topology, request.settings)
