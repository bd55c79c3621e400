"""Stages of the rivals' pipelines: equal in number of layers, or as equal in time as whole layers allow."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from tawpipe.errors import UserError
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe_lab.rivals.traffic import ranks_of_stages
from tawpipe_lab.workload import Known, RealWorkload

BALANCES = ("layers", "cost")


def stages_of(name: str, workload: Known, ranks: int, each: int, balance: str = "layers") -> Layout:
    """Return the stages of one of torch's pipelines: the blocks of each stage, and its rank.

    Args:
        name: rival, which determines the rank of every stage.
        workload: workload whose layers are already cut into parts.
        ranks: number of pipeline ranks.
        each: number of stages of a rank.
        balance: ``layers`` for equal numbers of layers, as far as possible. ``cost`` for the shortest possible longest
            stage, counting the times of embedding and head.

    Raises:
        UserError: there is no such balance, or there are fewer layers than stages.
    """
    places = ranks_of_stages(name, ranks, each)
    stages = len(places)
    if balance not in BALANCES or (balance == "cost" and isinstance(workload, RealWorkload)):
        raise UserError("balance", balance, "layers, or cost for a timed workload")
    if workload.layers < stages:
        needed = -(-stages // workload.layers)
        raise UserError(
            "layers", workload.layers, f"at least {name}'s {stages} stages, or {needed} parts_per_layer and more"
        )
    if balance == "layers" or isinstance(workload, RealWorkload):
        return Layout(workload.layers + 2, Layout.even(workload.layers + 2, ranks, each).cuts, tuple(places))
    embedding, *others = (part.seconds for part in workload.block_parts)
    others[0] += embedding
    if len(workload.blocks_with_parts) and workload.blocks_with_parts[-1] == workload.layers:
        others.pop()  # a head without weights and time can be no stage
    cuts = [1 + first for first in balanced_cuts(others, stages)]
    return Layout(workload.layers + 2, (0, *cuts[1:]), tuple(places))


def balanced_cuts(costs: Sequence[float], parts: int) -> list[int]:
    """Cut a list into parts so that the most expensive part is as cheap as possible; return the first item of each.

    >>> balanced_cuts([1, 1, 1, 1, 4], 3)
    [0, 2, 4]
    """
    sums = [0.0, *accumulate(costs)]
    # best[n][end] = (largest part, sum of squares to make the others equal too, begin of the last part)
    best = [[(sums[end], sums[end] ** 2, 0) for end in range(len(sums))]]
    for number in range(1, parts):
        row = [(float("inf"), float("inf"), 0)] * (number + 1)
        for end in range(number + 1, len(sums)):
            ways = ((best[-1][begin], sums[end] - sums[begin], begin) for begin in range(number, end))
            row.append(min((max(before[0], cost), before[1] + cost**2, begin) for before, cost, begin in ways))
        best.append(row)
    cuts, end = [], len(costs)
    for row in reversed(best):
        end = row[end][2]
        cuts.append(end)
    return cuts[::-1]
