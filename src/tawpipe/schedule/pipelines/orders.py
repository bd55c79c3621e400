"""Published orders of a pipeline, and the order of an evaluation.

``one_f_one_b`` is 1F1B (Narayanan et al., PipeDream-flush). ``interleaved`` is interleaved 1F1B (Narayanan et al.,
Megatron-LM): several stages per position, micro-batches in groups. Zero bubble depends on times; see
orders/zero_bubble.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

from tawpipe.errors import UserError
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.work import Order, Work
from tawpipe.schedule.refusal import MicroBatchCount


def one_f_one_b(layout: Layout, micro_batches: int) -> Order:
    """Return the 1F1B order for any number of micro-batches.

    A stage runs one forward pass for each stage after it, then one forward and one backward pass in turn.

    Raises:
        UserError: a position has more than one stage.

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
    """Return the interleaved 1F1B order: a position passes a group of micro-batches through its stages in turn.

    A group has as many micro-batches as there are positions, or some more if that makes all groups equally large.

    Raises:
        UserError: the stages are not in rotation over the positions (0, 1, ..., 0, 1, ...), or the micro-batches cannot
            form equal groups.

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
        raise UserError("micro-batches", micro_batches, expected, need=MicroBatchCount(below, above))
    group = micro_batches // max(1, micro_batches // size)

    def works(kind: str, position: int) -> list[Work]:
        """Return the work items of one kind on a position, in the order of the groups."""
        chunks = range(turns) if kind == "F" else range(turns - 1, -1, -1)
        return [
            Work(kind, chunk * size + position, m)
            for first in range(0, micro_batches, group)
            for chunk in chunks
            for m in range(first, first + group)
        ]

    compute = []
    for position in range(size):
        warmup = (size - 1 - position) * 2 + (turns - 1) * group
        compute.append(tuple(_one_by_one(works("F", position), works("B", position), warmup)))
    return Order(tuple(compute))


def causal(order: Order, slices: Sequence[int]) -> Order:
    """Return ``order`` changed for micro-batches of which the first ones are document slices.

    The forward passes of a document's slices run in order, and its backward passes run in reverse, each as a whole
    (``I`` and ``W`` become ``B``). A stage runs further ahead than in ``order``: where it had done n forward passes, it
    has now done those of all slices in the document of the n-th micro-batch. The first stage is as far ahead as the
    largest document to come needs, so that no document delays another. Later stages are less far ahead. The last stage
    starts backward passes of a document as soon as the document has arrived.

    The new order has no deadlock, because a work item's dependencies are at or before their places in the old order.
    ``order`` itself is returned if no document has more than one slice.

    Args:
        order: the order to change.
        slices: number of slices of each cut document; they are the first micro-batches.

    Raises:
        UserError: micro-batches of ``order`` overtake each other or are offloaded.

    >>> " ".join(map(str, causal(one_f_one_b(Layout.even(4, 2), 4), [3]).compute[0]))
    'F0.0 F0.1 F0.2 B0.2 B0.1 F0.3 B0.0 B0.3'
    """
    if max(slices, default=1) < 2:
        return order
    last, back = list[int](), list[int]()
    for size in (*slices, *[1] * (order.micro_batches - sum(slices))):
        first = len(last)
        last += [first + size - 1] * size
        back += range(first + size - 1, first - 1, -1)
    more = [*accumulate((end - m for m, end in reversed([*enumerate(last)])), max)][::-1]
    far = [*accumulate((min(m + lead, len(last) - 1) for m, lead in enumerate(more)), max)]
    end = max(work.stage for works in order.compute for work in works)
    until = [
        [-(-(a * (end - stage) + b * stage) // end) for a, b in zip(far, last, strict=True)] for stage in range(end + 1)
    ]
    compute, in_order = [], not order.host
    for works in order.compute:
        lane, done = list[Work](), Counter[tuple[str, int]]()
        for kind, stage, m in works:
            passes = ("B" if kind == "I" else kind), stage
            in_order &= kind == "W" or done[passes] == m
            done[passes] += 1
            if kind == "F":
                begin = until[stage][m - 1] + 1 if m else 0
                lane += [Work(kind, stage, number) for number in range(begin, until[stage][m] + 1)]
            elif m >= sum(slices):
                lane.append(Work(kind, stage, m))
            elif kind != "W":
                lane.append(Work("B", stage, back[m]))
        compute.append(tuple(lane))
    if not in_order:
        expected = "an order of the strategy's own where documents are cut, whose slices follow each other"
        raise UserError("schedule.pipeline_order", str(order)[:40], expected)
    return Order(tuple(compute))


def makes_groups(micro_batches: int, positions: int) -> bool:
    """Return True if interleaved 1F1B can use ``micro_batches`` micro-batches on ``positions`` positions.

    >>> [count for count in range(1, 16) if makes_groups(count, 4)]
    [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15]
    """
    return micro_batches % max(1, micro_batches // positions) == 0


def nearest_groups(micro_batches: int, positions: int) -> tuple[int, int]:
    """Return the nearest smaller and the nearest larger number of micro-batches that interleaved 1F1B can use.

    ``micro_batches`` itself is not considered."""
    below = next(n for n in range(micro_batches - 1, 0, -1) if makes_groups(n, positions))
    return below, next(n for n in range(micro_batches + 1, 2 * micro_batches + 2) if makes_groups(n, positions))


def forward_only(layout: Layout, micro_batches: int) -> Order:
    """Return an order of forward passes only, for any layout and number of micro-batches.

    All positions follow one order of all work items, in which each item comes after its dependencies. Micro-batches go
    in groups of as many as there are positions.

    >>> " ".join(map(str, forward_only(Layout.even(6, 2, 2), 3).compute[0]))
    'F0.0 F0.1 F2.0 F2.1 F0.2 F2.2'
    """
    works = [Work("F", stage, m) for stage in range(layout.stages) for m in range(micro_batches)]
    works.sort(key=lambda work: (work.micro_batch // layout.size, work.stage, work.micro_batch))
    places = range(layout.size)
    return Order(tuple(tuple(work for work in works if layout.places[work.stage] == p) for p in places))


def _one_by_one(forward: list[Work], backward: list[Work], warmup: int) -> Iterator[Work]:
    """Yield ``warmup`` forward passes, then one forward and one backward pass in turn, then the others."""
    warmup = min(warmup, len(forward))
    yield from forward[:warmup]
    for first, second in zip(forward[warmup:], backward, strict=False):
        yield first
        yield second
    yield from backward[len(forward) - warmup :]
