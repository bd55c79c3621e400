"""Fixed strategies to stay within a memory limit: fewer micro-batches in flight, or offloading some to the CPU memory.

An order is made in two passes (listing.py). The first decides what is computed when, as if there were more memory. The
second decides which activations go to the CPU memory in the meantime, in a pattern or by Belady's rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from tawpipe.errors import UserError
from tawpipe.orders.listing import listed, with_host
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.limits import filling
from tawpipe.schedule.pipelines.memory import fits, peak
from tawpipe.schedule.pipelines.periodic import Periodic, periodic
from tawpipe.schedule.pipelines.work import ROUNDING, Order, PipelineCosts, Work, makespan, play
from tawpipe.schedule.refusal import MemoryOfPosition

MARGINS = (0.0, 1.0, 2.0)
"""Amounts of memory kept free for transfers to and from the CPU memory, in units of the largest stage's activations."""
SHARES = (1.0, 1.25, 1.5, 2.0, 4.0, math.inf)
"""Numbers of micro-batches that are offloaded, relative to the number that does not fit in memory."""
LATE = (1, 2, math.inf)
"""Maximum numbers of W that wait on a position, if the memory limit is ignored."""
SPARE = (0, 1, 2, 4)
"""Numbers of micro-batches in flight beyond what a round trip needs."""
MOST = 200_000
"""Number of works played for each strategy after which no other variant is tried: seconds on one core."""


def round_trips(layout: Layout, costs: PipelineCosts, spare: int = 0) -> list[int]:
    """Return for every stage the number of micro-batches in flight, from F to B, that keeps the busiest position busy.

    With equal stages, these are the numbers of 1F1B. ``spare`` is added to each."""
    seconds = costs.stages(layout).seconds
    round_trip = [[seconds[kind, stage] for kind in "FB"] for stage in range(layout.stages)]
    busiest = max(sum(sum(round_trip[stage]) for stage in layout.stages_of(place)) for place in range(layout.size))
    flying, trip = [], 0.0
    for stage in reversed(range(layout.stages)):
        trip += sum(round_trip[stage])
        flying.append(max(1, math.ceil(trip / max(busiest, 1e-12) - 1e-6)) + spare)
        trip += 2 * costs.travel(layout.places[stage], layout.places[stage - 1]) if stage else 0.0
    return flying[::-1]


def _evenly(layout: Layout, compute: Sequence[Sequence[Work]], costs: PipelineCosts, share: float):
    """Select micro-batches to offload at regular distances, on every stage of a position without enough memory.

    Args:
        layout: stages and their positions.
        compute: compute order of each position.
        costs: times and memory of the blocks.
        share: number to offload, relative to the number that does not fit in memory.

    Returns:
        Set of (stage, micro-batch).
    """
    away, table = set(), costs.stages(layout)
    for place, works in enumerate(compute):
        most, free_memory = max(table.levels(works)), table.free_memory[place]
        part = min(1.0, share * (1 - free_memory / most)) if most > table.limits[place] else 0.0
        for work in works:
            number = work.micro_batch
            moves = work.kind == "F" and table.moved[work.stage] > 0
            if moves and math.floor((number + 1) * part + 1e-9) > math.floor(number * part + 1e-9):
                away.add((work.stage, number))
    return away


def _latest(layout: Layout, compute: Sequence[Sequence[Work]], costs: PipelineCosts, margin: float):
    """Select micro-batches to offload by Belady's rule, in compute order and without times.

    Whenever the memory is exceeded, the activations whose backward pass is last in the order are offloaded.

    Args:
        layout: stages and their positions.
        compute: compute order of each position.
        costs: times and memory of the blocks.
        margin: memory to keep free, in units of the largest stage's activations.

    Returns:
        Set of (stage, micro-batch).
    """
    away, table = set(), costs.stages(layout)
    for place, works in enumerate(compute):
        unit = max(table.taken["F", work.stage] for work in works)
        limit = max(table.free_memory[place] - margin * unit, unit) * (1 + ROUNDING)
        wanted = {(w.stage, w.micro_batch): number for number, w in enumerate(works) if w.kind in "BI"}
        here: dict[tuple[int, int], float] = {}
        parts = 0.0
        for work in works:
            key = work.stage, work.micro_batch
            if work.kind in "FBI":
                here[key] = table.taken["F", work.stage]
            parts += table.taken["I", work.stage] if work.kind == "I" else 0.0
            while parts + sum(here.values()) > limit:
                left = [other for other in here if other != key and other not in away and table.moved[other[0]]]
                if not left:
                    break
                last = max(left, key=wanted.__getitem__)
                away.add(last)
                here[last] -= table.moved[last[0]]
            if work.kind in "BI":
                del here[key]
            parts -= table.frees["W", work.stage] if work.kind == "W" else 0.0
    return away


def patterns(
    layout: Layout, compute: Sequence[Sequence[Work]], costs: PipelineCosts
) -> list[frozenset[tuple[int, int]]]:
    """Return several sets of (stage, micro-batch) to offload; without duplicates and empty sets.

    Each is meant to make the rest fit in memory. Whether it does is not checked."""
    options = [_evenly(layout, compute, costs, share) for share in SHARES]
    options += [_latest(layout, compute, costs, margin) for margin in MARGINS]
    return [*dict.fromkeys(map(frozenset, filter(None, options)))]


def one_by_one(layout: Layout, micro_batches: int) -> tuple[tuple[Work, ...], ...]:
    """Return the compute order of every position with a single micro-batch in flight: all its F, then all its B."""
    works = [
        Work(kind, stage, number)
        for number in range(micro_batches)
        for kind, stages in (("F", range(layout.stages)), ("B", reversed(range(layout.stages))))
        for stage in stages
    ]
    return tuple(tuple(w for w in works if layout.places[w.stage] == place) for place in range(layout.size))


def heuristics(layout: Layout, costs: PipelineCosts, micro_batches: int, *, split: bool = True) -> dict[str, Order]:
    """Return orders of fixed strategies within ``costs.memory`` by name. Each is the fastest of a few variants.

    ``1f1b`` and ``zero-bubble`` have fewer micro-batches in flight if memory is short. ``1f1b-offload`` and
    ``zero-bubble-offload`` send some to the CPU memory. ``one-by-one`` is included only if nothing else fits.

    Args:
        layout: stages and their positions.
        costs: times and memory of the blocks.
        micro_batches: number of micro-batches.
        split: include the zero-bubble strategies.

    Raises:
        UserError: no order fits in the memory.
    """
    smallest(layout, costs)
    best: dict[str, tuple[float, Order]] = {}

    def offer(name: str, order: Order | None) -> None:
        """Keep an order under ``name`` if it fits in memory and is faster than the one so far."""
        if order is None or not all(fits(costs, most) for most in peak(layout, order, costs)):
            return
        seconds = makespan(play(layout, order, costs))
        if name not in best or seconds < best[name][0] * (1 - 1e-9):
            best[name] = seconds, order

    seen = set()
    for parts, name in ((False, "1f1b"), (True, "zero-bubble"))[: 1 + split]:
        left = max(1, MOST // ((3 if parts else 2) * layout.stages * micro_batches))
        for spare in SPARE:
            if left <= 0:
                break
            caps = round_trips(layout, costs, spare)
            compute, left = listed(layout, costs, micro_batches, caps, parts, costs.memory), left - 1
            if compute and compute not in seen:
                seen.add(compute)
                offer(name, Order(compute))
            for late in LATE if parts and not math.isinf(costs.host) else [math.inf] * (not math.isinf(costs.host)):
                wide, left = listed(layout, costs, micro_batches, caps, parts, math.inf, late), left - 1
                if wide is None or wide in seen:
                    continue
                seen.add(wide)
                for away in patterns(layout, wide, costs)[: max(1, left)]:
                    left -= 1
                    most = best[f"{name}-offload"][0] if f"{name}-offload" in best else math.inf
                    offer(f"{name}-offload", with_host(layout, wide, away, costs, most))
    if not best:
        compute = one_by_one(layout, micro_batches)
        away = {(w.stage, w.micro_batch) for works in compute for w in works if w.stage < layout.stages - 1}
        for some in (set(), *([] if math.isinf(costs.host) else [away])):
            offer("one-by-one", with_host(layout, compute, some, costs))
    return {name: order for name, (_, order) in best.items()}


def fastest(layout: Layout, costs: PipelineCosts, micro_batches: int, *, split: bool = True) -> Order:
    """Return the shortest order of ``heuristics``."""
    orders = heuristics(layout, costs, micro_batches, split=split).values()
    return min(orders, key=lambda order: makespan(play(layout, order, costs)))


@lru_cache(maxsize=64)
def continuing(layout: Layout, costs: PipelineCosts) -> Periodic:
    """Return the order of ``heuristics`` whose repeated part is shortest per micro-batch, as a periodic order.

    Results are cached.

    Raises:
        UserError: no order fits in the memory.
    """
    few = filling(layout.size)
    orders = (periodic(layout, order, costs, few) for order in heuristics(layout, costs, few).values())
    return min(orders, key=lambda order: order.length / order.period)


def smallest(layout: Layout, costs: PipelineCosts) -> float:
    """Return the memory of the order that needs the least, after checking that it fits.

    It has a single micro-batch in flight. On each position, all but one stage's activations are in the CPU memory.
    Without a link to the CPU memory, all of them stay on the device.

    Raises:
        UserError: this exceeds the memory limit.
    """
    table = costs.stages(layout)
    if math.isinf(costs.host):
        each = table.micro_batch
        what = "one micro-batch in flight without the host's memory"
    else:
        stays = [kept - moved for kept, moved in zip(table.kept, table.moved, strict=True)]
        stages = map(layout.stages_of, range(layout.size))
        each = [sum(stays[s] for s in own_stages) + max(table.moved[s] for s in own_stages) for own_stages in stages]
        what = "one stage's of one micro-batch, all else in the host's memory"
    least = max(resident + kept for resident, kept in zip(table.resident, each, strict=True))
    if not fits(costs, least):
        more = least - costs.memory
        expected = f"at least {least:.6g}, {more:.6g} more: {what}; or stages of fewer layers"
        raise UserError("memory of a position", costs.memory, expected, need=MemoryOfPosition())
    return least
