"""Sentences about lossless coding in a plan: its effect on a step, and why it was chosen or not.

The bits that coding needs depend on values that no plan has seen. The sentences hold for the usual bits at the run's
learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from tawpipe.console import span
from tawpipe.errors import UserError
from tawpipe.options.names import spelled
from tawpipe.plan.answer.remedy import changes_of
from tawpipe.plan.cost.feasible import QUICK_PLAYED, fits, plays, with_settings
from tawpipe.plan.cost.predict import memory_quickly, predict
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.plan.search.candidate import GAIN, Candidate
from tawpipe.plan.search.plan import Plan
from tawpipe.plan.search.refine import CODING_GAIN, codings, why_not_coded


def without_loss(plan: Plan) -> Iterator[str]:
    """Yield a sentence on the effect that lossless coding has, or would have, on the chosen step.

    Yields nothing on one node, or if nothing that can be coded is sent."""
    chosen, request = plan.chosen, plan.request
    if chosen is None or chosen.step is None or request.topology.num_nodes == 1:
        return
    bits = f"assuming {8 * request.widths.change:.2g} bits per changed weight"
    usual = {name: "none" for option in codings(request) for name in option}
    plain = with_settings(chosen.step, **usual)
    if plain != chosen.step:
        seconds, words = span(predict(request, plain).step_seconds), spelled(changes_of(chosen.step, plain))
        yield f"chosen: {words}, which changes no number; without it a step takes {seconds} ({bits})"
        return
    ways = list(_coded(request, chosen, plan.candidates))
    if not ways:
        return
    seconds, without, words = min(ways)
    if seconds < chosen.seconds * (1 - GAIN):
        spared = f"a plan chooses it where the best step is {CODING_GAIN:.0%} shorter with it"
        took = f"{span(seconds)} per step instead of {span(chosen.seconds)} ({bits})"
        yield f"available without changing any number: {words}, {took}; {why_not_coded(request) or spared}"
    elif seconds >= without * (1 - GAIN):
        yield (
            f"exact coding of weights and gradients is off: a step would take {span(seconds)} instead of "
            f"{span(without)}, because coding takes as long as it saves on the link, or computing hides both"
        )


def _coded(
    request: PlanRequest, chosen: Candidate, others: tuple[Candidate, ...]
) -> Iterator[tuple[float, float, str]]:
    """Yield (seconds with coding, seconds without, settings in words) for each lossless coding that fits in memory.

    Two candidates are examined: the chosen one, and the fastest other whose copies of weights stay from step to step.
    Candidates whose prediction takes seconds are skipped."""
    kept = [
        other
        for other in others
        if other is not chosen and other.step is not None and not other.step.strategy.why_not_exact(other.step)
    ]
    for candidate in (chosen, *sorted(kept, key=lambda other: other.seconds)[:1]):
        step = candidate.step
        if not candidate.fits or step is None or plays(request, step) > QUICK_PLAYED // 2:  # predictions take seconds
            continue
        asked = request.with_homes(step.settings.host_homes or "none")
        for option in codings(request):
            with suppress(UserError):  # the strategy refuses it
                other, usual = with_settings(step, **option), asked.step(asked.settings)
                if fits(asked, memory_quickly(asked, other)):
                    words = spelled(changes_of(other, usual))
                    yield predict(asked, other).step_seconds, candidate.seconds, words
