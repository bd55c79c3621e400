"""Search for an order for any layout and number of micro-batches, made for the given costs.

F, B, I and W are the kinds of works, see the docstring of ``tawpipe.orders``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from tawpipe.errors import UserError
from tawpipe.orders.order_memory import whole_stages
from tawpipe.orders.passes import Passes, TimedOrder
from tawpipe.orders.ticks import Ticks
from tawpipe.orders.zero_bubble import zero_bubble
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.limits import filling, searched
from tawpipe.schedule.pipelines.memory import worst
from tawpipe.schedule.pipelines.orders import interleaved, one_f_one_b
from tawpipe.schedule.pipelines.periodic import Periodic, periodic
from tawpipe.schedule.pipelines.work import Order, PipelineCosts, Work, makespan, play

ROUNDS = 6
"""Maximum number of rounds; each is one pass backward in time and one forward."""
MANY = 4096
"""Number of works of a pipeline above which only a few starting orders are tried: the best with few micro-batches."""
HOPEFUL, FEW = 3, 2
"""Above ``MANY`` works: maximum number of starting orders, and micro-batches per position with which they are
compared."""
MOST = 250_000
"""Number of works that limits starting orders further: all rounds together list about this many works, at least
once."""
LONG = 3
"""Orders that repeat are compared at a length of 1 + this many times the micro-batches that they begin with."""
SLACK = 1
"""Thousandths by which an order may be longer than the shortest one if it needs less memory."""
WAITING = 2
"""Number of W that wait on a position, for each position. More memory for W hardly ever gives shorter orders."""

Option = TypeVar("Option")


def arrange(layout: Layout, costs: PipelineCosts, micro_batches: int, *, split: bool = True) -> Order:
    """Try several orders of the works for a layout; return the shortest, or one hardly longer that needs less memory.

    No order deadlocks, and no position ever keeps more than ``costs.memory``. With ``split``, the gradients of weights
    (W) fill gaps. A backward pass stays whole if splitting it gains nothing, or if the memory cannot hold what is kept
    between its parts. If the layout allows published orders, they are among the compared ones.

    Args:
        layout: stages and their positions.
        costs: times and memory of the blocks.
        micro_batches: number of micro-batches.
        split: allow backward passes in two parts, I and W.

    Raises:
        UserError: the memory cannot hold one micro-batch. The message names the least that works.

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
    """Return the periodic order that ``arrange`` extends if there are more micro-batches than it searches with.

    It is the one with the shortest step, or hardly longer, for many micro-batches. Results are cached.

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
    """Return the option that needs the least memory among those hardly longer (``SLACK``) than the shortest.

    Args:
        options: (length, maximum memory, option) of each option.
    """
    limit = min(length for length, _, _ in options) * (1 + SLACK / 1000)
    return min((option for option in options if option[0] <= limit), key=lambda option: (option[1], option[0]))[2]


def lean(layout: Layout, costs: PipelineCosts) -> PipelineCosts:
    """Return a copy of the costs with a lower memory limit: what an order of the best length mostly needs.

    The limit holds the activations of as many stages as a published zero-bubble order, and ``WAITING`` W per position.
    It is never raised. The costs are returned unchanged if W keeps no memory."""
    stages = costs.stages(layout)
    if not any(stages.kept_for_weights):
        return costs
    kept, waiting = max(stages.kept), max(stages.kept_for_weights)
    most = max(stages.resident) + (2 * layout.size + 1) * kept + WAITING * layout.size * waiting
    return replace(costs, memory=min(costs.memory, most))


def _orders(
    layout: Layout, costs: PipelineCosts, micro_batches: int, split: bool, *, regular: bool = False
) -> list[tuple[int, int, Order]]:
    """Return (makespan in ticks, maximum memory, order) of all orders that are tried.

    They include orders for a lower memory limit (``lean``).

    Args:
        layout: stages and their positions.
        costs: times and memory of the blocks.
        micro_batches: number of micro-batches.
        split: allow backward passes in two parts.
        regular: include the starting orders that are improved.
    """
    orders, less = _within(layout, costs, micro_batches, split, regular), lean(layout, costs)
    if split and less.memory < costs.memory:
        with suppress(UserError):  # the lower limit may not hold one micro-batch
            orders += _within(layout, less, micro_batches, split, regular)
    return orders


def _within(
    layout: Layout, costs: PipelineCosts, micro_batches: int, split: bool, regular: bool
) -> list[tuple[int, int, Order]]:
    """Return (makespan in ticks, maximum memory, order) of all orders tried under the memory limit of ``costs``.

    Args:
        layout: stages and their positions.
        costs: times and memory of the blocks.
        micro_batches: number of micro-batches.
        split: allow backward passes in two parts.
        regular: include the starting orders that are improved.
    """
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
    """Return the pairs of parameters with which ``began`` makes the starting orders.

    Returns:
        (maximum micro-batches in flight, micro-batches that pass a stage as one group) of each order.
    """
    flying = sorted({min(times * positions, 2 * micro_batches) // 2 for times in (2, 3, 4, 6, 8)} | {micro_batches})
    groups = sorted({1, min(positions, micro_batches), micro_batches})
    return [(most, group) for most in flying for group in groups if group <= most]


def began(passes: Passes, flying: int, group: int) -> TimedOrder:
    """Make a starting order from fixed priorities in one pass forward in time, within the memory limit.

    A free position prefers backward passes, the oldest micro-batch first. Then it runs forward passes, in groups of
    ``group`` micro-batches, and then W.

    Args:
        passes: layout, costs and number of micro-batches.
        flying: maximum number of micro-batches in flight; 0 for any number.
        group: micro-batches that pass a stage as one group.
    """
    stages, count = passes.stages.layout.stages, passes.micro_batches

    def key(work: int) -> tuple[int, ...]:
        """Return the priority of a work; smaller is more urgent."""
        step, m = divmod(work, count)
        if step < stages:
            return (1, m // group, step if group > 1 else -step, m)
        return (0, m, step) if step < 2 * stages else (2, m, step)

    return passes.forward(sorted(passes.works, key=key), flying)


def justified(passes: Passes, first: TimedOrder, flying: int = 0, rounds: int = ROUNDS) -> TimedOrder:
    """Improve an order by passes that alternate backward and forward in time; return the best order found.

    Each pass takes its priorities from the times of the pass before it.

    Args:
        passes: layout, costs and number of micro-batches.
        first: order to begin with.
        flying: maximum number of micro-batches in flight; 0 for any number.
        rounds: maximum number of rounds with two passes each. The search ends when a round finds nothing better.
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
    """Convert a timed order to an ``Order``. I and W that run in a row are joined to B if nothing starts later.

    All W of a stage take equally long. So at each place of a W, the W of the latest I that still waits for it is run.
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
    """Yield the published orders (1F1B, interleaved, zero bubble) that fit the layout and the micro-batches.

    They may exceed the memory limit. Zero bubble is included only with ``split``."""
    for make in (one_f_one_b, interleaved):
        try:
            yield make(layout, micro_batches)
        except UserError:
            continue
    if split and layout.places == (*range(layout.size), *range(layout.size - 1, -1, -1)):
        yield zero_bubble(layout, micro_batches, costs)
