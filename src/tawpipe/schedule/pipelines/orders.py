"""The published orders of a pipeline, and the one for evaluation.

``one_f_one_b`` (Narayanan et al., PipeDream-flush), ``interleaved`` (Narayanan et al., Megatron-LM: several stages a
position, micro-batches in groups) and ``zero_bubble`` (Qi et al.: two stages a position in the shape of a V, gradients
of weights apart from those of inputs, filled in).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from tawpipe.errors import UserError
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.ticks import Ticks
from tawpipe.schedule.pipelines.work import Order, PipelineCosts, Work


def one_f_one_b(layout: Layout, micro_batches: int) -> Order:
    """1F1B, for any number of micro-batches: a stage starts as many as stages follow, then does one backward pass for
    every forward pass.

    Raises:
        UserError: a position with more than one stage.

    >>> " ".join(map(str, one_f_one_b(Layout.even(5, 3), 4).compute[1]))
    'F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3'
    """
    if layout.stages != layout.size:
        raise UserError("schedule.stages", str(layout), "one stage on every position, for 1f1b")
    compute: list[tuple[Work, ...]] = [()] * layout.size
    for stage, place in enumerate(layout.places):
        numbers = range(micro_batches)
        forward, backward = [Work("F", stage, m) for m in numbers], [Work("B", stage, m) for m in numbers]
        compute[place] = tuple(_one_by_one(forward, backward, layout.stages - 1 - stage))
    return Order(tuple(compute))


def interleaved(layout: Layout, micro_batches: int) -> Order:
    """Interleaved 1F1B: a position goes round its stages with a group of micro-batches at a time.

    A group has as many micro-batches as there are positions, or some more where that makes groups of one size.

    Raises:
        UserError: stages that do not go round the positions, or micro-batches that make no groups of one size.

    >>> " ".join(map(str, interleaved(Layout.even(6, 2, 2), 4).compute[1]))
    'F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3'
    >>> interleaved(Layout.even(6, 3), 7)
    Traceback (most recent call last):
    tawpipe.errors.UserError: micro-batches: got 7; 6 or 8, which make groups of one size, of at least 3 positions each
    """
    size, turns = layout.size, layout.stages // layout.size
    if layout.places != tuple(range(size)) * turns:
        raise UserError("schedule.stages", str(layout), "stages that go round the positions, for interleaved-1f1b")
    if not makes_groups(micro_batches, size):
        below, above = nearest_groups(micro_batches, size)
        expected = f"{below} or {above}, which make groups of one size, of at least {size} positions each"
        raise UserError("micro-batches", micro_batches, expected)
    group = micro_batches // max(1, micro_batches // size)

    def works(kind: str, position: int) -> list[Work]:
        chunks = range(turns) if kind == "F" else range(turns - 1, -1, -1)
        return [
            Work(kind, chunk * size + position, m)
            for first in range(0, micro_batches, group)
            for chunk in chunks
            for m in range(first, first + group)
        ]

    compute = []
    for position in range(size):
        ahead = (size - 1 - position) * 2 + (turns - 1) * group
        compute.append(tuple(_one_by_one(works("F", position), works("B", position), ahead)))
    return Order(tuple(compute))


def makes_groups(micro_batches: int, positions: int) -> bool:
    """True if interleaved 1F1B can use a number of micro-batches.

    >>> [count for count in range(1, 16) if makes_groups(count, 4)]
    [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15]
    """
    return micro_batches % max(1, micro_batches // positions) == 0


def nearest_groups(micro_batches: int, positions: int) -> tuple[int, int]:
    """The next numbers below and above that interleaved 1F1B can use."""
    below = next(n for n in range(micro_batches - 1, 0, -1) if makes_groups(n, positions))
    return below, next(n for n in range(micro_batches + 1, 2 * micro_batches + 2) if makes_groups(n, positions))


def zero_bubble(layout: Layout, micro_batches: int, costs: PipelineCosts) -> Order:
    """Zero bubble on a V, greedy by the real times: gradients of inputs first, then forward passes, then gradients of
    weights, of which no more wait than two for every position. Micro-batches begin as long as a position holds fewer
    than 1F1B does on its first.

    Raises:
        UserError: stages that make no V.

    >>> from tawpipe.schedule.pipelines.work import BlockTimes
    >>> layout = Layout.even(6, 2, 2, folded=True)
    >>> costs = PipelineCosts((BlockTimes(0, 0, 0), *[BlockTimes(1, 1, 1)] * 4, BlockTimes(0, 0, 0)))
    >>> " ".join(map(str, zero_bubble(layout, 2, costs).compute[1]))
    'F1.0 F2.0 F1.1 F2.1 I2.0 I1.0 I2.1 I1.1 W2.0 W1.0 W2.1 W1.1'
    """
    size = layout.size
    if layout.places != (*range(size), *range(size - 1, -1, -1)):
        raise UserError("schedule.stages", str(layout), "two stages on every position in a V, for zero-bubble")
    ticks = Ticks.of(costs)
    stages = ticks.stages(layout)
    seconds = {"F": stages.forward, "I": stages.inputs, "W": stages.weights}
    most = 2 * size
    ends: dict[Work, int] = {}
    orders: list[list[Work]] = [[] for _ in range(size)]
    free, held = [0] * size, [0] * size
    waiting: list[deque[Work]] = [deque() for _ in range(size)]
    heads = [{(kind, stage): 0 for stage in layout.stages_of(p) for kind in "FI"} for p in range(size)]

    def ready(task: Work) -> int | None:
        """When all that a forward or backward pass needs is there; None if that is not known yet."""
        before = -1 if task.kind == "F" else 1
        needed = [] if task.kind == "F" else [Work("F", task.stage, task.micro_batch)]
        if 0 <= task.stage + before < layout.stages:
            needed.append(Work(task.kind, task.stage + before, task.micro_batch))
        place, found = layout.places[task.stage], 0
        for one in needed:
            if one not in ends:
                return None
            found = max(found, ends[one] + ticks.travel(layout.places[one.stage], place))
        return found

    def choice(p: int) -> tuple[int, int, int, int, int, Work] | None:
        """(start, what decides between equal ones..., work): what a position would do next."""
        options = []
        for (kind, stage), m in heads[p].items():
            if m == micro_batches or (kind == "F" and stage < size and held[p] >= most):
                continue
            task = Work(kind, stage, m)
            if (at := ready(task)) is not None:
                options.append((max(free[p], at), 0 if kind == "I" else 1, -stage, m, p, task))
        if waiting[p]:
            task = waiting[p][0]
            options.append((free[p], -1 if len(waiting[p]) >= most else 2, 0, task.micro_batch, p, task))
        return min(options, default=None)

    best = [choice(p) for p in range(size)]
    while options := [one for one in best if one is not None]:
        at, *_, p, task = min(options)
        ends[task] = free[p] = at + seconds[task.kind][task.stage]
        orders[p].append(task)
        if task.kind == "W":
            waiting[p].popleft()
        else:
            heads[p][task.kind, task.stage] += 1
            held[p] += 1 if task.kind == "F" else -1
            if task.kind == "I":
                waiting[p].append(Work("W", task.stage, task.micro_batch))
        near = [stage for stage in (task.stage - 1, task.stage + 1) if 0 <= stage < layout.stages]
        for q in {p, *(layout.places[stage] for stage in near)}:
            best[q] = choice(q)
    return Order(tuple(map(tuple, orders)))


def forward_only(layout: Layout, micro_batches: int) -> Order:
    """Forward passes alone, for any layout and number: all positions go through one order of all works, in which each
    comes after what it needs. Micro-batches go in groups of as many as there are positions.

    >>> " ".join(map(str, forward_only(Layout.even(6, 2, 2), 3).compute[0]))
    'F0.0 F0.1 F2.0 F2.1 F0.2 F2.2'
    """
    works = [Work("F", stage, m) for stage in range(layout.stages) for m in range(micro_batches)]
    works.sort(key=lambda one: (one.micro_batch // layout.size, one.stage, one.micro_batch))
    places = range(layout.size)
    return Order(tuple(tuple(one for one in works if layout.places[one.stage] == p) for p in places))


def _one_by_one(forward: list[Work], backward: list[Work], ahead: int) -> Iterator[Work]:
    """So many forward passes, then a forward and a backward pass in turn."""
    ahead = min(ahead, len(forward))
    yield from forward[:ahead]
    for one, other in zip(forward[ahead:], backward, strict=False):
        yield one
        yield other
    yield from backward[len(forward) - ahead :]
