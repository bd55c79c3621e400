"""Lower bounds for the time of a pipeline's step, by arithmetic."""

from __future__ import annotations

import math

from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.work import PipelineCosts, StageCosts


def apart(table: StageCosts, stage: int) -> bool:
    """Return True if the backward pass of ``stage`` can be split into I and W.

    W must take time, and the memory must hold both what I frees and what it takes for W. Otherwise the pass is whole.
    """
    both = table.kept[stage] + table.kept_for_weights[stage]
    return table.seconds["W", stage] > 0 and both <= table.limits[table.layout.places[stage]]


def _kinds(table: StageCosts, *, split: bool) -> list[str]:
    """Return for every stage the kind of work that yields its input gradient: I if the pass can be split, else B."""
    return ["I" if split and apart(table, stage) else "B" for stage in range(table.layout.stages)]


def _ends(table: StageCosts, *, split: bool) -> tuple[list[float], list[float]]:
    """Return, by stage, the earliest start of the first F, and the least time after the last B or I.

    The second is the time from the end of that B or I to the end of the step."""
    stages, kinds = table.layout.stages, _kinds(table, split=split)
    head, tail = [0.0] * stages, [0.0] * stages
    for stage in range(1, stages):
        hop = table.costs.travel(table.layout.places[stage], table.layout.places[stage - 1])
        head[stage] = head[stage - 1] + table.seconds["F", stage - 1] + hop
        # The step ends with the first stage's W, whether it is split off or not.
        kind = kinds[stage - 1] if stage > 1 else "B"
        tail[stage] = tail[stage - 1] + table.seconds[kind, stage - 1] + hop
    return head, tail


def bound(layout: Layout, costs: PipelineCosts, micro_batches: int, *, split: bool) -> float:
    """Return a lower bound of the time of a step: no order of this pipeline can be shorter.

    For every position, it takes into account the work between its earliest start and its latest end, and its memory.

    Args:
        layout: stages and their positions.
        costs: times and memory of the blocks.
        micro_batches: number of micro-batches.
        split: gradients of weights may be computed apart from gradients of inputs.
    """
    table = costs.stages(layout)
    head, tail = _ends(table, split=split)
    last = table.layout.stages - 1
    least = head[last] + sum(table.seconds[kind, last] for kind in ("F", _kinds(table, split=split)[last])) + tail[last]
    for place in range(table.layout.size):
        stages = table.layout.stages_of(place)
        first, rest = min(head[stage] for stage in stages), min(tail[stage] for stage in stages)
        work = micro_batches * sum(table.seconds[kind, stage] for kind in "FB" for stage in stages)
        late = _late(table, micro_batches, place) if split else 0.0
        memory = _memory(table, micro_batches, place, split=split)
        least = max(least, first + work, first + work - late + rest, first + memory + rest)
    return least


def _late(table: StageCosts, micro_batches: int, place: int) -> float:
    """Return the maximum total time of W that a position can still have to run when its last B or I ends.

    Its memory limits this time, because each waiting W holds memory."""
    stages = table.layout.stages_of(place)
    parts = [(table.kept_for_weights[stage], table.seconds["W", stage]) for stage in stages if apart(table, stage)]
    most = micro_batches * sum(seconds for _, seconds in parts)
    if math.isinf(table.costs.memory) or not all(memory > 0 for memory, _ in parts):
        return most
    free_memory = table.limits[place] - min(table.kept[stage] for stage in stages)
    counts = [free_memory / memory if len(parts) > 1 else math.floor(free_memory / memory) for memory, _ in parts]
    return min(
        most, max(0.0, max((count * seconds for count, (_, seconds) in zip(counts, parts, strict=True)), default=0))
    )


def _memory(table: StageCosts, micro_batches: int, place: int, *, split: bool) -> float:
    """Return a lower bound of the time of a position's works that follows from its limited memory; 0 without a limit.

    The memory that works hold, multiplied by the time for which they hold it, has to fit into limit times duration.
    Activations that stay are held for at least a round trip. Activations that go to the CPU memory are held during F,
    O, R and B, and occupy the link. Memory for W is held while I and W run. If B is whole instead, all that F kept is
    held during B.

    Args:
        table: costs of the stages.
        micro_batches: number of micro-batches.
        place: the position.
        split: gradients of weights may be computed apart.
    """
    stages, kinds = table.layout.stages_of(place), _kinds(table, split=split)
    sizes = {size for stage in stages if (size := table.kept[stage]) > 0}
    if math.isinf(table.costs.memory) or not sizes:
        return 0.0
    total, more, saved = 0.0, 0.0, []
    for stage in stages:
        kept, link = table.kept[stage], 2 * table.seconds["O", stage]
        here = sum(table.seconds[kind, stage] for kind in ("F", kinds[stage]))
        trip = here
        for later in range(stage + 1, table.layout.stages):
            hop = table.costs.travel(table.layout.places[later], table.layout.places[later - 1])
            trip += sum(table.seconds[kind, later] for kind in ("F", kinds[later])) + 2 * hop
        total += micro_batches * trip * kept
        if kinds[stage] == "I":
            inputs, weights = (table.seconds[kind, stage] for kind in "IW")
            parts = table.kept_for_weights[stage]
            more += micro_batches * min(parts * (inputs + weights), kept * weights)
        if (gain := (trip - here - link) * table.moved[stage]) > 0:
            saved.append((gain / max(link, 1e-12), micro_batches * link))
    saved.sort(reverse=True)
    limit = table.limits[place]
    most = max(table.kept_for_weights[stage] for stage in stages)
    later = most * _late(table, micro_batches, place) if split else 0.0
    least = _held(total + max(0.0, more - later), saved, limit)
    if len(sizes) == 1:
        least = max(least, _held(total, saved, math.floor(limit / min(sizes)) * min(sizes)))
    return least


def _held(total: float, saved: list[tuple[float, float]], limit: float) -> float:
    """Return the least duration with which ``total`` memory-seconds fit into ``limit``. Offloading can lower the total.

    Args:
        total: memory multiplied by the time for which it is held.
        saved: (memory-seconds saved per second of the link, seconds of the link), the best first.
        limit: memory of the position.
    """
    left, spent = total, 0.0
    for rate, link in saved:
        # left: memory-seconds to hold after spent seconds of the link. More link time lowers left but is itself a
        # bound.
        time = (left + rate * spent) / (limit + rate)
        if time <= spent + link:
            return max(time, spent)
        left, spent = left - rate * link, spent + link
    return left / limit if limit > 0 else math.inf
