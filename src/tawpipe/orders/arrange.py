"""An order for any layout and number of micro-batches, made for the costs at hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from tawpipe.errors import UserError
from tawpipe.orders.passes import Passes, TimedOrder
from tawpipe.orders.room import whole_stages
from tawpipe.orders.ticks import Ticks
from tawpipe.orders.zero_bubble import zero_bubble
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.limits import filling, searched
from tawpipe.schedule.pipelines.memory import worst
from tawpipe.schedule.pipelines.orders import interleaved, one_f_one_b
from tawpipe.schedule.pipelines.periodic import Periodic, periodic
from tawpipe.schedule.pipelines.work import Order, PipelineCosts, Work, makespan, play

ROUNDS = 6
"""Of a pass backward in time and one forward, at most."""
MANY = 4096
"""Works of a pipeline beyond which few beginnings are tried: those that are best with few micro-batches."""
HOPEFUL, FEW = 3, 2
"""So many beginnings, and for each position micro-batches."""
MOST = 250_000
"""Works beyond which even fewer are."""
LONG = 3
"""Times as many micro-batches more as an order that goes on begins with: by such a length orders are compared."""
SLACK = 1
"""Thousandths by which an order may be longer than the shortest, if it takes less memory."""
WAITING = 2
"""W that wait on a position, for each position: with room for more, orders are hardly ever shorter."""

Option = TypeVar("Option")


def arrange(layout: Layout, costs: PipelineCosts, micro_batches: int, *, split: bool = True) -> Order:
    """The shortest of a few orders, or one that takes hardly longer and less memory.

    Under any of them all ends, and no position ever keeps more than ``costs.memory``. Where ``split``, gradients of
    weights fill gaps; a backward pass stays whole where nothing is gained by parting it, or where the memory does not
    hold what its parts have between them. The published orders are among those compared, where the layout is theirs.

    Raises:
        UserError: the memory does not hold one micro-batch; names the least that works.

    >>> from tawpipe.schedule.pipelines.work import BlockTimes
    >>> costs = PipelineCosts((BlockTimes(0, 0, 0), *[BlockTimes(1, 1, 1)] * 4, BlockTimes(0, 0, 0)))
    >>> for works in arrange(Layout.even(6, 2), costs, 3).compute:
    ...     print(*works)
    F0.0 F0.1 I0.0 F0.2 B0.1 B0.2 W0.0
    F1.0 I1.0 F1.1 I1.1 F1.2 I1.2 W1.2 W1.1 W1.0
    """
    if micro_batches > searched(layout.size):
        return continuing(layout, costs, split=split).of(micro_batches)
    return hardly_longer(_orders(layout, costs, micro_batches, split))


@lru_cache(maxsize=64)
def continuing(layout: Layout, costs: PipelineCosts, *, split: bool = True) -> Periodic:
    """The order that ``arrange`` makes for more micro-batches than are searched: what is best with many.

    Raises:
        UserError: see ``arrange``.
    """
    few = filling(layout.size)
    stages = Ticks.of(costs).stages(layout)
    options: list[tuple[float, int, Periodic]] = []
    for *_, order in _orders(layout, costs, few, split, regular=True):
        repeating, most = periodic(layout, order, costs, few), max(worst(stages, order))
        time = makespan(play(layout, order, costs))
        options.append((time + LONG * few * repeating.length / repeating.period, most, repeating))
    return hardly_longer(options)


def hardly_longer(options: Sequence[tuple[float, float, Option]]) -> Option:
    """Of (length, most memory, what has them) that with least memory among those hardly longer than the shortest."""
    limit = min(length for length, _, _ in options) * (1 + SLACK / 1000)
    return min((option for option in options if option[0] <= limit), key=lambda option: (option[1], option[0]))[2]


def lean(layout: Layout, costs: PipelineCosts) -> PipelineCosts:
    """Costs with no more memory than an order mostly needs that is as short as any: for the activations of as many
    stages as a published zero bubble has, and for ``WAITING`` times as many W. As they are where W need none.
    """
    stages = costs.stages(layout)
    if not any(stages.kept_for_weights):
        return costs
    kept, waiting = max(stages.kept), max(stages.kept_for_weights)
    most = max(stages.resident) + (2 * layout.size + 1) * kept + WAITING * layout.size * waiting
    return replace(costs, memory=min(costs.memory, most))


def _orders(
    layout: Layout, costs: PipelineCosts, micro_batches: int, split: bool, *, regular: bool = False
) -> list[tuple[int, int, Order]]:
    """(makespan, most memory, order) of all that are tried, also with little memory for W.

    Args:
        regular: those that searches begin with, too.
    """
    orders, less = _within(layout, costs, micro_batches, split, regular), lean(layout, costs)
    if split and less.memory < costs.memory:
        with suppress(UserError):  # it is not for one micro-batch
            orders += _within(layout, less, micro_batches, split, regular)
    return orders


def _within(
    layout: Layout, costs: PipelineCosts, micro_batches: int, split: bool, regular: bool
) -> list[tuple[int, int, Order]]:
    ticks = Ticks.of(costs)
    stages = ticks.stages(layout)
    passes = Passes(stages, micro_batches, whole_stages(stages, split))
    orders: list[tuple[int, int, Order]] = []
    tried = policies(layout.size, micro_batches)
    if len(passes.works) > MANY:
        few = replace(passes, micro_batches=min(micro_batches, FEW * layout.size))
        hopeful = max(1, min(HOPEFUL, MOST // (2 * ROUNDS * len(passes.works))))
        tried = sorted(tried, key=lambda policy: began(few, *policy).makespan)[:hopeful]
    for flying, group in tried:
        first = began(passes, flying, group)
        for timed in (justified(passes, first, flying), *([first] if regular else [])):
            order = joined(passes, timed)
            orders.append((timed.makespan, max(worst(stages, order)), order))
    for order in published(layout, costs, micro_batches, split):
        most = max(worst(stages, order))
        if most <= ticks.memory:
            orders.append((round(makespan(play(layout, order, costs)) * ticks.scale), most, order))
    return orders


def policies(positions: int, micro_batches: int) -> list[tuple[int, int]]:
    """(micro-batches under way at most, those that go through a stage together): what orders begin with."""
    flying = sorted({min(times * positions, 2 * micro_batches) // 2 for times in (2, 3, 4, 6, 8)} | {micro_batches})
    groups = sorted({1, min(positions, micro_batches), micro_batches})
    return [(most, group) for most in flying for group in groups if group <= most]


def began(passes: Passes, flying: int, group: int) -> TimedOrder:
    """A pass in which positions prefer backward passes, the oldest first; then forward passes, in groups of so many
    micro-batches; then W.

    Args:
        flying: at most so many micro-batches under way; 0 for any number.
    """
    stages, count = passes.stages.layout.stages, passes.micro_batches

    def key(work: int) -> tuple[int, ...]:
        step, m = divmod(work, count)
        if step < stages:
            return (1, m // group, step if group > 1 else -step, m)
        return (0, m, step) if step < 2 * stages else (2, m, step)

    return passes.forward(sorted(passes.works, key=key), flying)


def justified(passes: Passes, first: TimedOrder, flying: int = 0, rounds: int = ROUNDS) -> TimedOrder:
    """The best of some passes in turn backward and forward in time, each with the list that the last one made.

    Args:
        first: the pass that they begin with.
        flying: at most so many micro-batches under way; 0 for any number.
        rounds: at most so many of two passes; they end when they find nothing better.
    """
    best = timed = first
    for _ in range(rounds):
        before = best.makespan
        ends = timed.ends
        timed = passes.backward(sorted(passes.works, key=lambda work: -ends[work]), flying)
        if timed.makespan < best.makespan and passes.fits(timed):
            best = timed
        starts = passes.starts(timed)
        timed = passes.forward(sorted(passes.works, key=starts.__getitem__), flying)
        if timed.makespan < best.makespan:
            best = timed
        if best.makespan == before:
            break
    return best


def joined(passes: Passes, timed: TimedOrder) -> Order:
    """A schedule's order, with B in the place of I and W that follow each other where that lets nothing begin later.

    W of a stage take equally long: in each one's place runs the latest that waits.
    """
    stages, count = passes.stages.layout.stages, passes.micro_batches
    places, travel = passes.stages.layout.places, passes.stages.costs.travel
    chain = 2 * stages * count
    starts, ends = passes.starts(timed), timed.ends
    lanes = []
    for lane in timed.lanes:
        works: list[Work] = []
        waiting: dict[int, list[int]] = {stage: [] for stage in range(stages)}
        done = -1
        for work, following in zip(lane, [*lane[1:], -1], strict=True):
            named = passes.named(work)
            stage = named.stage
            if work == done:
                continue
            if named.kind == "W":
                named = Work("W", stage, waiting[stage].pop())
            elif named.kind == "I":
                after, away = work + count, travel(places[stage], places[stage - 1]) if stage > 0 else 0
                if following // count == work // count + stages and (
                    after >= chain or ends[following] + away <= starts[after]
                ):
                    named, done = Work("B", stage, named.micro_batch), following
                else:
                    waiting[stage].append(named.micro_batch)
            works.append(named)
        lanes.append(tuple(works))
    return Order(tuple(lanes))


def published(layout: Layout, costs: PipelineCosts, micro_batches: int, split: bool) -> Iterator[Order]:
    """The published orders that a layout and a number of micro-batches allow."""
    for make in (one_f_one_b, interleaved):
        try:
            yield make(layout, micro_batches)
        except UserError:
            continue
    if split and layout.places == (*range(layout.size), *range(layout.size - 1, -1, -1)):
        yield zero_bubble(layout, micro_batches, costs)
