"""Who waits for whom in a step: by round and rank, in even steps and in dealt ones."""

from __future__ import annotations

import math

import pytest

from schedules import llama, make
from tawpipe.report.bars import predicted_bars
from tawpipe.report.rounds import rounds, waiting
from tawpipe.simulate import CostModel, LinkModel, MicroBatchSize, play

FREE = LinkModel(math.inf)
LAYERS = 3


@pytest.mark.parametrize("per_visit", [1, 2])
@pytest.mark.parametrize("strategy", ["tawpipe-spread", "flat"])
def test_the_rank_with_the_most_work_is_the_longest_of_its_round(strategy: str, per_visit: int) -> None:
    schedule = make(llama(LAYERS), 1, 2, 8, strategy=strategy, micro_batches_per_visit=per_visit)
    # Rank 0 computes 0..3 and rank 1 computes 4..7; the second micro-batch of rank 1 is four times as long.
    costs = CostModel.timed(layers=LAYERS, forward_s=1.0, backward_s=3.0, between=FREE, inside=FREE)
    costs = CostModel(costs.blocks, FREE, FREE, sizes={5: MicroBatchSize(1, 4)})
    bars = predicted_bars(play(schedule, costs, steps=1), step=0)
    found = rounds(bars)
    assert len(found) == 4 // per_visit
    long = 1 if per_visit == 1 else 0
    each = 4.0 * LAYERS
    for one in found:
        expected = each * (per_visit + 3) if one.number == long else each * per_visit
        assert one.shares[0].computed == pytest.approx(each * per_visit)
        assert one.shares[1].computed == pytest.approx(expected)
    assert found[long].longest == 1 and found[long].imbalance > 1.4
    end = max(bar.end for bar in bars)
    for rank in (0, 1):  # nothing else takes time here
        assert sum(one.shares[rank].computed + one.shares[rank].waited for one in found) == pytest.approx(end, rel=0.01)
    text = list(waiting(bars))
    assert text[0].startswith("waiting by rank: rank 1 computes longest") and len(text) == 1 + 2 * len(found)


def test_single_rank_waits_for_no_other_rank() -> None:
    costs = CostModel.timed(layers=LAYERS, forward_s=1.0, backward_s=3.0, between=FREE, inside=FREE)
    assert not list(waiting(predicted_bars(play(make(llama(LAYERS), 1, 1, 2), costs, steps=1), step=0)))
