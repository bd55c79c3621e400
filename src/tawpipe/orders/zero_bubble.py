"""The published zero-bubble order (Qi et al.): two stages per position as a V, with split backward passes."""

from __future__ import annotations

from collections import deque

from tawpipe.errors import UserError
from tawpipe.orders.ticks import Ticks
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.work import Order, PipelineCosts, Work


def zero_bubble(layout: Layout, micro_batches: int, costs: PipelineCosts) -> Order:
    """Return the zero-bubble order for a V, made greedily with the real times.

    A position prefers gradients of inputs, then forward passes, then gradients of weights. At most two gradients of
    weights per position of the pipeline wait. A micro-batch begins while its position holds fewer micro-batches than
    1F1B's first position does.

    Args:
        layout: stages and their positions.
        micro_batches: number of micro-batches.
        costs: times of the blocks.

    Raises:
        UserError: the stages do not form a V.

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
    seconds = ticks.stages(layout).seconds
    most = 2 * size
    ends: dict[Work, int] = {}
    orders: list[list[Work]] = [[] for _ in range(size)]
    free, held = [0] * size, [0] * size
    waiting: list[deque[Work]] = [deque() for _ in range(size)]
    heads = [{(kind, stage): 0 for stage in layout.stages_of(p) for kind in "FI"} for p in range(size)]

    def ready(task: Work) -> int | None:
        """Return the time at which all inputs of a forward or backward pass are ready; None if it is not known yet."""
        before = -1 if task.kind == "F" else 1
        needed = [] if task.kind == "F" else [Work("F", task.stage, task.micro_batch)]
        if 0 <= task.stage + before < layout.stages:
            needed.append(Work(task.kind, task.stage + before, task.micro_batch))
        place, at = layout.places[task.stage], 0
        for need in needed:
            if need not in ends:
                return None
            at = max(at, ends[need] + ticks.travel(layout.places[need.stage], place))
        return at

    def choice(p: int) -> tuple[int, int, int, int, int, Work] | None:
        """Return the next work of position ``p``: (start, values that decide between equal starts, work), or None."""
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
    while options := [option for option in best if option is not None]:
        at, *_, p, task = min(options)
        ends[task] = free[p] = at + seconds[task.kind, task.stage]
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
