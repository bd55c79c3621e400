"""How short a step of a pipeline can be at best, by arithmetic."""

from __future__ import annotations

import math

from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.memory import ROUNDING
from tawpipe.schedule.pipelines.work import PipelineCosts, Work


def apart(layout: Layout, costs: PipelineCosts, stage: int) -> bool:
    """True if there is room for both, what I gives back and what it takes: else the backward pass has to be whole."""
    both = costs.kept(layout, stage) + costs.kept_for_weights(layout, stage)
    return costs.seconds(layout, Work("W", stage, 0)) > 0 and both <= costs.memory * (1 + ROUNDING)


def _kinds(layout: Layout, costs: PipelineCosts, *, split: bool) -> list[str]:
    """Of every stage what a gradient has to wait for at least, I or B."""
    return ["I" if split and apart(layout, costs, stage) else "B" for stage in range(layout.stages)]


def _ends(layout: Layout, costs: PipelineCosts, *, split: bool) -> tuple[list[float], list[float]]:
    """By stage: the earliest start of an F, and the least time from the end of its B or I to the end of the step."""
    stages, kinds = layout.stages, _kinds(layout, costs, split=split)
    head, tail = [0.0] * stages, [0.0] * stages
    for stage in range(1, stages):
        hop = costs.travel(layout.places[stage], layout.places[stage - 1])
        head[stage] = head[stage - 1] + costs.seconds(layout, Work("F", stage - 1, 0)) + hop
        # The first stage ends with its W, apart or not.
        kind = kinds[stage - 1] if stage > 1 else "B"
        tail[stage] = tail[stage - 1] + costs.seconds(layout, Work(kind, stage - 1, 0)) + hop
    return head, tail


def bound(layout: Layout, costs: PipelineCosts, micro_batches: int, *, split: bool) -> float:
    """A step takes no less: every position's work between its earliest start and its latest end, and its memory.

    Args:
        split: gradients of weights may be computed apart from those of inputs.
    """
    head, tail = _ends(layout, costs, split=split)
    last = layout.stages - 1
    found = (
        head[last]
        + sum(costs.seconds(layout, Work(kind, last, 0)) for kind in ("F", _kinds(layout, costs, split=split)[last]))
        + tail[last]
    )
    for place in range(layout.size):
        stages = layout.stages_of(place)
        first, rest = min(head[stage] for stage in stages), min(tail[stage] for stage in stages)
        work = micro_batches * sum(costs.seconds(layout, Work(kind, stage, 0)) for kind in "FB" for stage in stages)
        late = _late(layout, costs, micro_batches, place) if split else 0.0
        memory = _memory(layout, costs, micro_batches, place, split=split)
        found = max(found, first + work, first + work - late + rest, first + memory + rest)
    return found


def _late(layout: Layout, costs: PipelineCosts, micro_batches: int, place: int) -> float:
    """The most work that can be left of W at the end of the last B or I of a position, beside which it has to fit."""
    stages = layout.stages_of(place)
    parts = [
        (costs.kept_for_weights(layout, one), costs.seconds(layout, Work("W", one, 0)))
        for one in stages
        if apart(layout, costs, one)
    ]
    most = micro_batches * sum(seconds for _, seconds in parts)
    if math.isinf(costs.memory) or not all(memory > 0 for memory, _ in parts):
        return most
    room = costs.memory * (1 + ROUNDING) - min(costs.kept(layout, stage) for stage in stages)
    counts = [room / memory if len(parts) > 1 else math.floor(room / memory) for memory, _ in parts]
    return min(
        most, max(0.0, max((count * seconds for count, (_, seconds) in zip(counts, parts, strict=True)), default=0))
    )


def _memory(layout: Layout, costs: PipelineCosts, micro_batches: int, place: int, *, split: bool) -> float:
    """The shortest time in which memory of the limit's size can hold all that has to be held, for as long as it has.

    What stays is held for a round trip at least; what goes to the host for F, O, R and B, while the link is busy with
    it. What is kept for W is held while I and W run, or else, B being whole, all that F kept while it runs on.
    """
    stages, kinds = layout.stages_of(place), _kinds(layout, costs, split=split)
    sizes = {size for stage in stages if (size := costs.kept(layout, stage)) > 0}
    if math.isinf(costs.memory) or not sizes:
        return 0.0
    total, more, saved = 0.0, 0.0, []
    for stage in stages:
        kept, link = costs.kept(layout, stage), 2 * costs.seconds(layout, Work("O", stage, 0))
        own = sum(costs.seconds(layout, Work(one, stage, 0)) for one in ("F", kinds[stage]))
        trip = own
        for later in range(stage + 1, layout.stages):
            hop = costs.travel(layout.places[later], layout.places[later - 1])
            trip += sum(costs.seconds(layout, Work(one, later, 0)) for one in ("F", kinds[later])) + 2 * hop
        total += micro_batches * trip * kept
        if kinds[stage] == "I":
            inputs, weights = (costs.seconds(layout, Work(kind, stage, 0)) for kind in "IW")
            parts = costs.kept_for_weights(layout, stage)
            more += micro_batches * min(parts * (inputs + weights), kept * weights)
        if (gain := (trip - own - link) * kept) > 0:
            saved.append((gain / max(link, 1e-12), micro_batches * link))
    saved.sort(reverse=True)
    limit = costs.memory * (1 + ROUNDING)
    most = max(costs.kept_for_weights(layout, stage) for stage in stages)
    later = most * _late(layout, costs, micro_batches, place) if split else 0.0
    found = _held(total + max(0.0, more - later), saved, limit)
    if len(sizes) == 1:
        found = max(found, _held(total, saved, math.floor(limit / min(sizes)) * min(sizes)))
    return found


def _held(total: float, saved: list[tuple[float, float]], limit: float) -> float:
    """Time for so much memory times seconds, of which seconds of the host's link save some.

    Args:
        saved: (memory times seconds for a second of the link, seconds of the link), the best first.
    """
    left, spent = total, 0.0
    for rate, link in saved:
        # left is what has to be held after so many seconds of the link; more of them lower it, and raise the time.
        time = (left + rate * spent) / (limit + rate)
        if time <= spent + link:
            return max(time, spent)
        left, spent = left - rate * link, spent + link
    return left / limit
