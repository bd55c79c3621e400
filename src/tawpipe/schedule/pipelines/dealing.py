"""Documents of uneven lengths dealt to pipelines: a bin is a micro-batch, which passes all stages of one pipeline.

What has to be equal is the time of all bins (balance.py): none makes others wait. There are several for every position,
so that positions wait little as a step begins and ends. A schedule is made and proved for a number of bins, as one of
rounds is for weights that travel, and its buffers are those of full bins; what each step has of its own is which bin
goes when. That is looked for by playing the pipeline's order with the times of the step's bins: long ones first, last
or in the middle, then pairs that change places, as many as a bound on the work allows and not as a clock does, so that
all ranks find the same. It runs where documents are dealt, in a worker beside the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

from tawpipe.schedule.balance import Bin, Bins, LayerTime, deal
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.work import Order, PipelineCosts, makespan, play

BINS = 4
"""Bins of a pipeline for each of its positions, at least, where a step has as many documents."""
MOST_PLAYED = 30_000
"""Works that are played to find a place for every bin of a pipeline: about 0.2 s."""


def bins_of_a_pipeline(needed: int, positions: int) -> int:
    """Bins of a pipeline in a step that needs so many at least: always the same few numbers.

    >>> bins_of_a_pipeline(3, 4), bins_of_a_pipeline(17, 4)
    (16, 20)
    """
    return -(-max(needed, BINS * positions) // positions) * positions


def deal_to_pipelines(
    lengths: Sequence[int],
    *,
    pipelines: int,
    layout: Layout,
    costs: PipelineCosts,
    order_of: Callable[[int], Order],
    cap: int,
    work: LayerTime,
) -> Bins:
    """Deal the documents of a step.

    Args:
        lengths: of the documents, in tokens.
        pipelines: side by side.
        costs: of the mean bin.
        order_of: the order of a pipeline with so many bins.
        cap: tokens of a bin at most.

    Raises:
        UserError: as of ``deal``.
    """
    least = bins_of_a_pipeline(0, layout.size)
    bins = deal(lengths, world_size=pipelines, cap=cap, work=work, rounds=min(least, -(-len(lengths) // pipelines)))
    count = bins_of_a_pipeline(len(bins.single), layout.size)
    rounds = [*bins.single, *[(Bin(()),) * pipelines] * (count - len(bins.single))]
    order, mean = order_of(count), sum(map(work.of, lengths)) / count / pipelines
    seconds = costs.stages(layout).seconds
    even = count * sum(seconds[kind, stage] for kind in "FB" for stage in range(layout.stages)) / layout.size
    lanes, longest = [], 0.0
    for of_pipeline in zip(*rounds, strict=True):
        times = [bins.time(row) / mean for row in of_pipeline]
        places, taken = _in_order(layout, order, costs, times)
        lanes.append([of_pipeline[number] for number in places])
        longest = max(longest, taken)
    single = tuple(zip(*lanes, strict=True))
    return replace(bins, single=single, positions=layout.size, stretch=longest / even)


def _in_order(layout: Layout, order: Order, costs: PipelineCosts, times: Sequence[float]) -> tuple[list[int], float]:
    """Which bin goes when, and the time of the step.

    Args:
        times: of the bins, in those of the mean one.
    """
    count = len(times)

    def taken(places: Sequence[int]) -> float:
        return makespan(play(layout, order, costs, lambda work: times[places[work.micro_batch]]))

    rising = sorted(range(count), key=lambda number: times[number])
    tried = [list(range(count)), rising, rising[::-1], [*rising[::2], *rising[1::2][::-1]]]
    best, places = min((taken(places), places) for places in tried)
    pairs = ((i, i + apart) for apart in range(1, count) for i in range(count - apart))
    for i, j in islice(pairs, max(0, MOST_PLAYED // sum(map(len, order.compute)) - len(tried))):
        other = [*places]
        other[i], other[j] = other[j], other[i]
        if (less := taken(other)) < best:
            best, places = less, other
    return places, best
