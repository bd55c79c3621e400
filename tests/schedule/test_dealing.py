"""Documents dealt to pipelines: every one once, in bins of even times, and each bin where the step is short."""

from __future__ import annotations

import pickle
from collections import Counter
from random import Random

import pytest

from schedules import laid_out, llama
from tawpipe.errors import UserError
from tawpipe.schedule.balance import LayerKind, LayerTime
from tawpipe.schedule.pipelines.dealing import BINS
from tawpipe.schedule.proof.verify import verify
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.step import Strategy
from tawpipe.schedule.strategies.build import build, step_of, step_of_bins
from tawpipe.schedule.transform import for_one_thread
from tawpipe.simulate import BlockCost, CostModel, LinkModel, Seconds, play
from tawpipe.topology import Topology

FREE = LinkModel(1e12)
LAYERS = 8
WORK = LayerTime((LayerKind(LAYERS, 0.04, 0.0004),))
NAMES = ("1f1b", "interleaved-1f1b", "zero-bubble", "generated")
BLOCKS = f"0/0/0,{LAYERS}x1/2/1,0/0/0"


def dealing_of(use: Strategy, topology: Topology, cap: int = 400):
    step = step_of(llama(LAYERS), topology, ScheduleSettings(), ((),) * topology.world_size, strategy=use)
    return step.strategy.dealing(step, cap=cap, work=WORK)


def lengths_of(seed: int, count: int = 120) -> list[int]:
    draw = Random(seed)
    return [min(400, int(draw.lognormvariate(3.5, 1.4)) + 1) for _ in range(count)]


@pytest.mark.parametrize("stages", ["world", "nodes"])
@pytest.mark.parametrize("name", NAMES)
def test_every_document_is_in_one_bin_and_a_step_takes_what_was_said(name: str, stages: str) -> None:
    """Another process deals alike. The clock of the house has the cost of every bin by itself."""
    topology, lengths = Topology.grid(2, 2), lengths_of(1)
    use = laid_out(name, stages=stages, block_times=BLOCKS)
    by = dealing_of(use, topology)
    bins = by(lengths)
    assert pickle.loads(pickle.dumps(by))(lengths) == bins
    assert Counter(n for row in bins.single for bin in row for n in bin.documents) == Counter(range(len(lengths)))
    assert all(bins.tokens(bin) <= 400 for row in bins.single for bin in row)
    positions, pipelines = (4, 1) if stages == "world" else (2, 2)
    assert (bins.world_size, bins.positions) == (pipelines, positions) and len(bins.single) >= BINS * positions
    assert len(bins.single) % positions == 0
    schedule = for_one_thread(
        build(step_of_bins(llama(LAYERS), topology, ScheduleSettings(), bins.shape, strategy=use))
    )
    verify(schedule, one_thread=True)
    layer = BlockCost(Seconds(0, 0.01, 0.0001), Seconds(0, 0.03, 0.0003))
    costs = CostModel((BlockCost(), *[layer] * LAYERS, BlockCost()), FREE, FREE).with_bins(bins)
    assert play(schedule, costs).step_seconds == pytest.approx(bins.seconds, rel=0.02)


def test_bins_in_their_places_take_less_than_as_they_come() -> None:
    """Long documents leave bins uneven; a step is then shorter than by the worst of few orders, within 15 % of even."""
    use = laid_out("1f1b", block_times=BLOCKS)
    by = dealing_of(use, Topology.grid(4, 1), cap=500)
    for seed in range(4):
        bins = by([*lengths_of(seed), 480, 470])
        assert 1 + 3 / len(bins.single) - 1e-9 < bins.stretch < 1.45
        assert bins.seconds == bins.stretch * bins.mean_seconds and bins.imbalance >= 1


def test_few_documents_leave_bins_empty_and_long_ones_are_refused() -> None:
    use = laid_out("1f1b", block_times=BLOCKS)
    by = dealing_of(use, Topology.grid(4, 1))
    bins = by([7, 300])
    assert sum(bool(bin.documents) for row in bins.single for bin in row) == 2 and len(bins.single) == 4 * BINS
    with pytest.raises(UserError, match="one of 401 tokens"):
        by([401])


def test_an_order_for_rows_of_one_length_refuses_bins() -> None:
    use = laid_out("solved", block_times=BLOCKS)
    with pytest.raises(UserError, match="generated where documents are dealt by time"):
        step_of_bins(llama(LAYERS), Topology.grid(2, 1), ScheduleSettings(), (0, 8), strategy=use)
