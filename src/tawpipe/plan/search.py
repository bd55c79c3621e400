"""Which settings suit each strategy, and which strategy is best.

The search is small and says what it does: every strategy is tried with few and many micro-batches per visit; those that
do not fit are dropped, those whose bound (computing, links) is behind the best prediction so far are not played; then
the best settings of each strategy that is not far behind are improved one by one as long as that gains something, and
homes are found for it where units or links are uneven (place.py). Where whole rows do not fit on a device, or devices
have none, several devices are tried for every row (``sequence_ranks``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from tawpipe.console import span
from tawpipe.errors import UserError
from tawpipe.garbage import rarely_collected
from tawpipe.plan import pipelines
from tawpipe.plan.place import Homes, find_homes
from tawpipe.plan.plan_file import settings_of
from tawpipe.plan.predict import (
    LARGEST_WORK,
    PLAYED_ROUNDS,
    Needs,
    Prediction,
    bound_of,
    memory_of,
    memory_quickly,
    played,
    predict,
    short_schedule,
    shortened,
)
from tawpipe.plan.refused import in_plain_words
from tawpipe.plan.request import PlanRequest
from tawpipe.schedule.buffers import Kind
from tawpipe.schedule.settings import DEFAULT, spell_homes
from tawpipe.schedule.spec import ModelSpec
from tawpipe.schedule.step import Schedule, StepSpec, Strategy
from tawpipe.schedule.strategies.build import build, shares_of, step_of
from tawpipe.schedule.strategies.table import strategies
from tawpipe.topology import Topology

GAIN = 0.005
"""Below this a change of a knob is not worth its memory."""
LESS_MEMORY = 0.01
"""A choice that takes as long and saves as much of the memory is better."""
MOST_PLAYED = 10_000
"""Micro-batches, times blocks, of the ranks and rounds that are played, beyond which a setting is not: a search should
take seconds.
"""
QUICK_PLAYED = 2_000
"""The same up to which a strategy is played even if its bound is hopeless."""
PASSES = 3
LEAN = {"micro_batches_per_visit": 1, "look_ahead": 1, "gradient_buffers": 1}
"""The values of settings that need the least memory, besides offloading and recomputing."""
MOST_COMPARED = 2_000
"""Ranks of a node, times blocks, up to which it is found out which strategies do the same there."""
MOST_EFFORT = 13_500
"""Of all pipelines together for which orders are made, see ``pipelines.effort``, after which no other is looked at."""
MOST_IMPROVED = 12_000
"""Micro-batches, times blocks, that are played while settings are changed one by one, of those steps for which more
than ``QUICK_PLAYED`` are.
"""
PATIENCE_S = 2.0
DEVICE, HOST, FILES = "device memory", "host memory", "disk"
HOPELESS = 1.35
"""Multiple of the best step time beyond which a strategy is not improved knob by knob: recomputing nothing, the largest
gain there is, makes a step a quarter shorter.
"""
TOO_LONG = "not looked at: planning has taken as long as it may"
NEAR = 1.05
"""The same beyond which what is long to make is not made anew: another search gains a few per cent."""


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
        waiting: see ``search``.
        hopeful: see ``pipelines.made_for``.
        ahead: seconds of the best step so far.
        effort: what is left for pipelines that are made for costs, see ``pipelines.effort``.
        plays: what is left for changes of settings, see ``MOST_IMPROVED``.
        most_s: see ``search``.
    """

    waiting: Callable[[str], None] = lambda _: None
    hopeful: bool = True
    ahead: float = math.inf
    effort: int = MOST_EFFORT
    plays: int = MOST_IMPROVED
    patience_s: float = PATIENCE_S
    most_s: Callable[[float], float] = lambda _: math.inf
    begin: float = field(default_factory=time.monotonic)
    began: float = field(default_factory=time.thread_time)

    @property
    def over(self) -> bool:
        """True if something fits, and looking further would take more time than it may."""
        return self.ahead < math.inf and time.thread_time() - self.began > self.most_s(self.ahead)

    def at(self, what: str) -> None:
        """Say what is looked at, if that has taken a while."""
        if (seconds := time.monotonic() - self.begin) >= self.patience_s:
            self.waiting(f"planning for {seconds:.0f} s, now {what}")
            self.patience_s = 2 * seconds

    def why_not(self, request: PlanRequest, way: Strategy, *, hopeful: bool) -> str:
        """Why an order is not made for a way to lay out a pipeline, or nothing; what it takes is spent.

        Args:
            hopeful: a step may be among the best with it, as far as one sees.
        """
        long, effort = pipelines.long(request, way), pipelines.effort(request, way)
        if long and not hopeful:
            return f"not looked at: others take {span(self.ahead)} a step, pipelines of a fixed order far more"
        if long and effort > self.effort and self.ahead < math.inf:
            return "not looked at: orders for so many micro-batches and devices take too long to make"
        self.effort -= effort
        return ""


@rarely_collected()
def search(
    request: PlanRequest,
    *,
    waiting: Callable[[str], None] = lambda _: None,
    most_s: Callable[[float], float] = lambda _: math.inf,
) -> list[Candidate]:
    """The best settings of every strategy, the fastest that fits first.

    Args:
        waiting: is given a line that says what is looked at, after ``PATIENCE_S`` and then less and less often.
        most_s: seconds that the search may compute where the best step so far takes so long, as soon as something fits.
    """
    candidates: list[Candidate] = []
    outlook = Outlook(waiting, effort=MOST_EFFORT, patience_s=PATIENCE_S, most_s=most_s)
    # Random numbers are drawn by every device for itself: another number of them is another draw, for want of which
    # alone no row is taken apart.
    draws = [request.with_ranks(1), request] if request.drops and request.sets else [request]
    # Homes that pass through the device take longer: they are looked at where nothing fits without.
    for asked in [draw.with_homes(level) for level in request.levels for draw in draws]:
        if any(one.fits for one in candidates):
            break
        before, candidates = {candidate.strategy: candidate for candidate in candidates}, []
        for strategy in sorted(strategies().values(), key=lambda one: not one.usual):
            if strategy.candidate:
                if strategy.name in before and asked.settings.host_homes == "all" and strategy.axis:
                    candidates.append(before[strategy.name])  # it keeps its weights on devices
                    continue
                axis, outlook.hopeful = _best_pipeline(candidates)
                outlook.ahead = min((one.seconds for one in candidates if one.fits), default=math.inf)
                if outlook.over:
                    candidates.append(Candidate(strategy.name, None, None, False, TOO_LONG))
                    continue
                made = _best(asked, strategy, axis, outlook)
                if not outlook.hopeful and _best_pipeline([*candidates, made])[1]:  # balanced, it is not far behind
                    outlook.hopeful = True
                    made = _best(asked, strategy, axis, outlook)
                candidates.append(made)
    candidates.sort(key=lambda one: (not one.fits, one.seconds))
    outlook.effort = MOST_EFFORT
    for i, one in enumerate(candidates):
        outlook.ahead = min(other.seconds for other in candidates if other.fits or not candidates[0].fits)
        near = one.seconds < outlook.ahead * HOPELESS and not outlook.over
        if one.fits and one.step is not None and one.prediction and near:
            asked = request.with_homes(one.step.settings.host_homes or "none")
            step, made = _improve(asked, one.step, one.prediction, outlook)
            candidates[i] = settle(asked, replace(one, step=step, prediction=made))
    return sorted(candidates, key=lambda one: (not one.fits, one.seconds))


def fits(request: PlanRequest, needs: Needs) -> bool:
    """True if so much memory is there, on every device, host and disk, as far as it is known."""
    return not lacking(request, needs)


def lacking(request: PlanRequest, needs: Needs) -> list[str]:
    """Which memory does not suffice: some of ``DEVICE``, ``HOST`` and ``FILES``."""
    machine = request.machine
    there = {
        DEVICE: (request.memory_bytes, needs.device),
        HOST: (machine.host_bytes, needs.host),
        FILES: (machine.files_bytes, needs.files),
    }
    return [name for name, (most, needed) in there.items() if most and needed > most]


def whole_rows_fit(request: PlanRequest) -> bool:
    """True if some strategy whose rows could run in chunks can run them whole, with everything on the device."""
    for strategy in strategies().values():
        if "sequence_chunk" in strategy.refusals or not strategy.candidate:
            continue
        with suppress(UserError):
            lean = replace(request.settings, strategy=strategy.name, sequence_chunk=0, **LEAN)
            if fits(request, memory_quickly(request, request.step(lean, strategy))):
                return True
    return False


def some_fit(request: PlanRequest) -> bool:
    """True if some strategy fits with the settings that need the least memory."""
    return any(_some_strategy_fits(request.with_homes(level)) for level in request.levels)


def _some_strategy_fits(request: PlanRequest) -> bool:
    for strategy in strategies().values():
        if not strategy.candidate or strategy.made:
            continue
        for ranks in (request.settings.sequence_ranks, *request.sets[-1:]):
            asked = request if ranks is None or "sequence_ranks" in strategy.refusals else request.with_ranks(ranks)
            for way in strategy.layouts(request.topology):
                with suppress(UserError):
                    least = leanest(asked, asked.step(replace(asked.settings, strategy=strategy.name), way))
                    here = {least, with_settings(least, offloaded_layers=0)}
                    if not unplayed(asked, least) and any(fits(asked, memory_quickly(asked, step)) for step in here):
                        return True
    return False


def shortage(request: PlanRequest, needs: Needs) -> str:
    """What is needed and what is there, of the memory that does not suffice; empty if all does."""
    words = []
    if request.memory_bytes and needs.device > request.memory_bytes:
        parts = ", ".join(f"{name} {gib(size)}" for name, size in needs.parts.items() if size)
        words.append(f"{gib(needs.device)} GiB of {gib(request.memory_bytes)} on every device ({parts})")
    if request.machine.host_bytes and needs.host > request.machine.host_bytes:
        words.append(f"{gib(needs.host)} GiB of {gib(request.machine.host_bytes)} of every host's memory")
    if request.machine.files_bytes and needs.files > request.machine.files_bytes:
        words.append(f"{gib(needs.files)} GiB of {gib(request.machine.files_bytes)} of every node's disk")
    return " and ".join(words)


def gib(size: float) -> str:
    """
    >>> gib(3 * 2**30), gib(5 * 2**20)
    ('3.00', '0.005')
    """
    return f"{size / 2**30:.2f}" if size >= 2**30 / 10 else f"{size / 2**30:.3f}"


def _best(request: PlanRequest, strategy: Strategy, axis: str = "", outlook: Outlook | None = None) -> Candidate:
    """The settings that suit a strategy, as long as nothing is improved one by one.

    Args:
        axis: see ``pipelines.laid_out``.
    """
    outlook = outlook or Outlook()
    best = _best_of(request, strategy, axis, outlook)
    spread = "sequence_ranks" not in strategy.refusals and (request.leaves_idle or not _on_device(best))
    for ranks in request.sets if spread else ():
        other = _best_of(request.with_ranks(ranks), strategy, axis, outlook)
        if other.fits != best.fits:
            better = other.fits
        elif other.fits:
            better = other.seconds < best.seconds * (1 - GAIN)
        else:
            better = _peak(other) < _peak(best)
        best = other if better else best
    if best.step is not None and best.prediction and best.prediction.timeline is None:
        return replace(best, prediction=predict(request, best.step))
    return best


def _on_device(candidate: Candidate) -> bool:
    """True if it fits with whole rows, and everything on the device."""
    if not candidate.fits or candidate.step is None:
        return False
    return not candidate.step.settings.sequence_chunk and not candidate.step.settings.offloaded_layers


def _peak(candidate: Candidate) -> float:
    return candidate.prediction.peak_bytes if candidate.prediction else float("inf")


def _best_of(request: PlanRequest, strategy: Strategy, axis: str, outlook: Outlook) -> Candidate:
    """The same with as many ranks to a row as the request says: the best of all ways to lay it out."""
    refused = Candidate(strategy.name, None, None, False, "a pipeline needs several devices")
    ways: list[Candidate] = []
    for way in sorted(pipelines.laid_out(request, strategy, axis), key=lambda one: _least(request, one, axis)):
        other = way.axis and axis not in ("", way.axis) and pipelines.long(request, way)
        if other and any(one.fits for one in ways):
            continue
        outlook.at(strategy.name)
        most = min((one.seconds for one in ways if one.fits), default=outlook.ahead * HOPELESS)
        try:
            why = _too_large(request, way.divided_over(request.topology))
            if way.made and not why:
                why = outlook.why_not(request, way, hopeful=outlook.hopeful or way.searches_stages)
            if not why:
                way = pipelines.made_for(request, way, hopeful=outlook.hopeful)
            ways.append(replace(refused, why_not=why) if why else _best_laid_out(request, way, most))
        except UserError as error:
            ways.append(replace(refused, why_not=in_plain_words(error)))
    if not ways:
        return refused
    return min(ways, key=lambda one: (not one.fits, one.seconds if one.fits else _peak(one)))


def _best_pipeline(candidates: Sequence[Candidate]) -> tuple[str, bool]:
    """(what the best pipeline so far is laid over, whether it is not far behind the best of all); of none so far what
    leaves all open.
    """
    found = [one for one in candidates if one.step is not None and one.step.strategy.axis]
    ahead = min((one.seconds for one in candidates if one.fits), default=math.inf)
    best = min(found, key=lambda one: (not one.fits, one.seconds), default=None)
    if best is None or not best.fits:  # what is made for the memory that there is may fit, and laid out otherwise
        return "", best is None or best.seconds < ahead * HOPELESS
    assert best.step is not None
    return best.step.strategy.axis, best.seconds < ahead * HOPELESS


def _least(request: PlanRequest, way: Strategy, axis: str) -> float:
    """Seconds that a way to lay a pipeline out needs at least, as far as that is known before anything is made; none
    for the one that suits another pipeline best.
    """
    if not way.axis or way.made or way.axis == axis:
        return 0.0
    with suppress(UserError):
        return bound_of(request, request.step(replace(request.settings, strategy=way.name), way))
    return math.inf


def _best_laid_out(request: PlanRequest, strategy: Strategy, most: float = math.inf) -> Candidate:
    """The best settings of one way to lay a strategy out.

    Args:
        most: seconds beyond which no more than ``QUICK_PLAYED`` is played.
    """
    refused = Candidate(strategy.name, None, None, False)
    base = replace(request.settings, strategy=strategy.name)
    visits = _per_visit(request) if Kind.WEIGHT in strategy.travels else [1]
    try:
        options = [request.step(replace(base, micro_batches_per_visit=k), strategy) for k in visits]
        if why := unplayed(request, options[0]):
            return replace(refused, why_not=why)
        options = [step for step in options if plays(request, step) <= MOST_PLAYED] or options[:1]
        bound, work = min(bound_of(request, one) for one in options), min(plays(request, one) for one in options)
        if bound > most and work > QUICK_PLAYED:
            return replace(refused, why_not=f"not looked at: computing and links alone take {span(bound)} a step")
        best = _fastest(request, options, look=True) if _some_fit(request, options) else None
    except UserError as error:
        return replace(refused, why_not=in_plain_words(error))
    if best is None:
        least = leanest(request, options[0])
        lean = [least, with_settings(least, micro_batches_per_visit=options[-1].settings.micro_batches_per_visit)]
        if _some_fit(request, lean, DEVICE):
            options = [with_settings(step, look_ahead=1, gradient_buffers=1) for step in options]
            best = _fastest(request, [*_offloaded(request, options), *_in_chunks(request, options)])
        if best is None:
            if fits(request, needs := memory_quickly(request, least)):
                return Candidate(strategy.name, least, predict(request, least), True)
            # Of several that do not fit, only the one that needs least is played, in ``_best``.
            bound = bound_of(request, least)
            return replace(refused, step=least, prediction=Prediction(bound, 0.0, 0.0, 0, needs, bound))
    return Candidate(strategy.name, *best, True)


def _some_fit(request: PlanRequest, options: Sequence[StepSpec], *what: str) -> bool:
    """True if one of them may fit, which have more and more micro-batches a visit: these need more memory, but for all
    in one round, of which nothing is kept for another one.

    Args:
        what: the memory that is looked at; all by default.
    """
    ends = [*options[:1], *options[-1:]] if len(options) > 1 else options
    short = (lacking(request, memory_quickly(request, one)) for one in ends)
    return any(not (set(missing) & set(what) if what else missing) for missing in short)


def _fastest(
    request: PlanRequest, steps: Sequence[StepSpec], *, look: bool = False
) -> tuple[StepSpec, Prediction] | None:
    """The step that takes the least time, but for ``GAIN``; those whose bound is behind it are not played.

    Args:
        look: steps may not fit, and are then left out.
    """
    best: tuple[StepSpec, Prediction] | None = None
    for bound, step in sorted(((bound_of(request, one), one) for one in steps), key=lambda pair: pair[0]):
        if best is not None and bound >= best[1].step_seconds * (1 - GAIN):
            break
        if look and not fits(request, memory_quickly(request, step)):
            continue
        made = predict(request, step)
        if best is None or made.step_seconds < best[1].step_seconds * (1 - GAIN):
            best = step, made
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
        if fits(request, memory_quickly(request, step)):
            yield step
        else:
            over.add(layers)


def resized(schedule: Schedule, step: StepSpec) -> Schedule:
    """A schedule with the settings of a step that has chunks of another size, on which no action depends."""
    return replace(schedule, step=replace(schedule.step, settings=step.settings))


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


def with_settings(step: StepSpec, **changes: Any) -> StepSpec:
    """The same step with other settings.

    Raises:
        UserError: they cannot work.
    """
    settings = replace(step.settings, **changes)
    return step_of(step.model, step.topology, settings, step.micro_batches, strategy=step.strategy)


def unplayed(request: PlanRequest, step: StepSpec) -> str:
    """Why a strategy is not looked at here, or nothing."""
    return _too_large(request, played(request, step)) or _same_here(step.strategy, request)


def _same_here(strategy: Strategy, request: PlanRequest) -> str:
    """Why a strategy is no other than one before it on these machines, or nothing."""
    model, topology = request.model, request.topology
    if topology.num_nodes > 1 or strategy.axis or topology.world_size * len(model.blocks) > MOST_COMPARED:
        return ""
    for other in strategies().values():
        if other is strategy:
            break
        if other.axis or not other.candidate or not set(other.refusals) <= set(strategy.refusals):
            continue  # it is not planned itself, or cannot do all that this one can
        with suppress(UserError):  # of one that cannot run here at all
            if _program_here(other, model, topology) == _program_here(strategy, model, topology):
                return f"the same as {other.name} on one node"
    return ""


@lru_cache(maxsize=32)
def _program_here(strategy: Strategy, model: ModelSpec, topology: Topology) -> int:
    """A hash of where units live, and of what ranks do in a step of two rounds; other settings mean the same to all."""
    settings = replace(DEFAULT, strategy=strategy.name)
    shares = shares_of(2 * topology.world_size, topology, settings, strategy)
    step = step_of(model, topology, settings, shares, strategy=strategy)
    return hash((step.homes, build(step).programs))


def plays(request: PlanRequest, step: StepSpec) -> int:
    """Micro-batches, times blocks, that a prediction plays; of all ranks of a pipeline together."""
    _, longer, _ = shortened(request, step, PLAYED_ROUNDS)
    ranks = played(request, step) if step.strategy.divided_over(step.topology) == 1 else 1
    return ranks * len(request.model.blocks) * max(map(len, longer.micro_batches))


def _too_large(request: PlanRequest, ranks: int) -> str:
    """Why a strategy of which so many ranks would be played is not, or nothing."""
    if ranks * len(request.model.blocks) <= LARGEST_WORK:
        return ""
    return f"not played on {request.topology.world_size} devices that do not all do alike"


def _per_visit(request: PlanRequest) -> list[int]:
    """1, 2, 4, ... up to all micro-batches of a device."""
    most = -(-request.micro_batches * (request.settings.sequence_ranks or 1) // request.topology.world_size)
    powers = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return [*powers, most]


def _improve(
    request: PlanRequest, step: StepSpec, prediction: Prediction, outlook: Outlook
) -> tuple[StepSpec, Prediction]:
    """Change one setting at a time while a step gets faster by ``GAIN``, and memory allows it."""
    for _ in range(PASSES):
        before = prediction.step_seconds
        for change in _changes(request, step, prediction.step_seconds, outlook):
            outlook.at(f"other settings of {step.strategy.name}")
            if outlook.over:
                return step, prediction
            if (work := plays(request, step)) > QUICK_PLAYED and work > outlook.plays:
                return step, prediction
            try:
                other = with_settings(step, **change)
                if other == step or bound_of(request, other) >= prediction.step_seconds * (1 - GAIN):
                    continue
                if not fits(request, memory_quickly(request, other)):
                    continue
                outlook.plays -= work if work > QUICK_PLAYED else 0
                made = predict(request, other)
            except UserError:  # not for this strategy, or two settings that do not go together
                continue
            if made.step_seconds < prediction.step_seconds * (1 - GAIN):
                step, prediction = other, made
        if prediction.step_seconds > before * (1 - GAIN):
            break
    return step, prediction


def settle(request: PlanRequest, candidate: Candidate) -> Candidate:
    """The candidate with the homes that ``find_homes`` finds, if a step is faster with them or needs less memory."""
    step, made = candidate.step, candidate.prediction
    assert step is not None and made is not None
    homes = find_homes(request, step)
    if homes is not None and homes.of_unit:
        other = with_settings(step, homes=spell_homes(homes.of_unit))
        moved = predict(request, other)
        gain = GAIN if moved.peak_bytes >= made.peak_bytes * (1 - LESS_MEMORY) else -GAIN
        if moved.step_seconds < made.step_seconds * (1 - gain) and fits(request, moved.needs):
            step, made = other, moved
    return replace(candidate, step=step, prediction=made, homes=homes)


def _changes(request: PlanRequest, step: StepSpec, seconds: float, outlook: Outlook) -> Iterator[dict[str, Any]]:
    """Settings that may be worth a try, where a step takes so long; a strategy refuses those that are not for it."""
    settings, units, layers = step.settings, len(request.model.units), request.model.num_layers
    strategy = step.strategy
    if Kind.WEIGHT not in strategy.travels:

        def worth(recompute: str) -> bool:
            """True if computing alone takes less, so that a step may; and if what is made anew could then be best."""
            bound = bound_of(request, with_settings(step, recompute=recompute))
            if bound >= seconds * (1 - GAIN):
                return False
            expected = seconds * bound / bound_of(request, step)
            return not strategy.made or not outlook.why_not(request, strategy, hopeful=expected < outlook.ahead * NEAR)

        budget = pipelines.QUICK if pipelines.long(request, strategy) else pipelines.BUDGET
        yield from pipelines.changes(request, step, worth, budget=budget)
        return
    for name in ("look_ahead", "gradient_buffers"):
        yield {name: getattr(settings, name) + 1}
    if request.topology.num_nodes > 1:
        yield from ({"step_cache": more} for more in (units // 4, units // 2, units) if more > step.step_cache)
    if settings.gradients_scope == "visit" and step.rounds > 1:
        yield {"gradients_scope": "step"}
    offloaded = settings.offloaded_layers
    for fewer in (0, offloaded // 2, offloaded * 3 // 4):
        if fewer < offloaded:
            yield {"offloaded_layers": fewer}
    if settings.sequence_chunk:
        yield from ({"sequence_chunk": size} for size in request.chunks if size != settings.sequence_chunk)
    if offloaded and not settings.sequence_chunk:  # what layers keep waits there in the place of their inputs
        yield from ({"recompute": recompute} for recompute in ("selective", "none"))
    if request.of(step).profile.memory.kept.get("attention", 1):  # none where no kernel's result could be kept
        yield {"recompute": "selective"} | ({} if settings.sequence_chunk else {"offloaded_layers": 0})
    for share in (4, 2, 1) if layers else ():
        last = max(1, layers // share)
        yield {"recompute": f"none:{last},full", "offloaded_layers": min(offloaded, layers - last)}


def leanest(request: PlanRequest, step: StepSpec) -> StepSpec:
    """The settings of a strategy that need the least memory."""
    chunk = request.chunks[0] if request.chunks and "sequence_chunk" not in step.strategy.refusals else 0
    offloaded = request.model.num_layers if relieved(request, step.strategy, chunk=chunk) else 0
    return with_settings(step, **LEAN, offloaded_layers=offloaded, **request.in_chunks(chunk))


def relieved(request: PlanRequest, strategy: Strategy, *, chunk: int = 0) -> bool:
    """True if files can take activations, or the host's memory: not where that is what a device computes in."""
    outside = request.has_host or bool(chunk and request.settings.offload_dir)
    return "offloaded_layers" not in strategy.refusals and outside
