"""The stages of rivals' pipelines: as many layers in each, or as equal in time as whole layers can be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from tawpipe.errors import UserError
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe_lab.rivals.traffic import ranks_of_stages
from tawpipe_lab.workload import Known, RealWorkload

BALANCES = ("layers", "cost")


def stages_of(name: str, workload: Known, ranks: int, each: int, balance: str = "layers") -> Layout:
    """The layout of one of torch's pipelines.

    Args:
        workload: its layers are not cut any more.
        each: stages of a rank.
        balance: ``layers``, as equal in number as can be; or ``cost``: the longest stage, embedding and head included,
            as short as can be.

    Raises:
        UserError: no such balance, or fewer layers than stages.
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
        others.pop()  # a head that is nothing is no stage
    cuts = [1 + first for first in balanced_cuts(others, stages)]
    return Layout(workload.layers + 2, (0, *cuts[1:]), tuple(places))


def balanced_cuts(costs: Sequence[float], parts: int) -> list[int]:
    """The first item of every part, if a list is cut so that its most expensive part is as cheap as can be.

    >>> balanced_cuts([1, 1, 1, 1, 4], 3)
    [0, 2, 4]
    """
    sums = [0.0, *accumulate(costs)]
    # By the end of the last part (largest part, sum of squares, so that the others are alike too; where it begins).
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
