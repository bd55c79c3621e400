"""The clock of a dealt step: every micro-batch takes what its bin takes, alone or in a set."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest

from tawpipe.dealing.balance import LayerKind, LayerTime, Pack, Packs, deal
from tawpipe.schedule.blocks import offload
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.spec import BlockSpec, ModelSpec, UnitSpec, share_packs
from tawpipe.schedule.step import Schedule
from tawpipe.schedule.strategies.build import build, step_of
from tawpipe.simulate import BlockCost, CostModel, LinkModel, Seconds, play
from tawpipe.topology import Topology

FREE = LinkModel(math.inf)
LAYERS, WINDOW = 3, 4
TOKEN_S, PAIR_S = 0.01, 0.001


def costs(windowed: int = 0, **settings) -> CostModel:
    """Layers of which the first have a window; a backward pass takes as long as three forward passes."""
    seconds = Seconds(0.0, TOKEN_S, PAIR_S), Seconds(0.0, 3 * TOKEN_S, 3 * PAIR_S)
    layers = [BlockCost(*seconds, window=WINDOW if layer < windowed else None) for layer in range(LAYERS)]
    return CostModel((BlockCost(), *layers, BlockCost()), FREE, FREE, **settings)


def work(windowed: int = 0) -> LayerTime:
    kinds = ((windowed, WINDOW), (LAYERS - windowed, None))
    return LayerTime(tuple(LayerKind(n, 4 * TOKEN_S, 4 * PAIR_S, window) for n, window in kinds if n))


def schedule_of(bins: Packs, *, local: int = 2) -> Schedule:
    layers = [BlockSpec((i,), "layer") for i in range(LAYERS)]
    blocks = (BlockSpec((), "embedding", False, False), *layers, BlockSpec((), "head"))
    model = ModelSpec(blocks, tuple(UnitSpec(4800, True, (i + 1,)) for i in range(LAYERS)))
    world = bins.world_size
    settings = ScheduleSettings(micro_batches_per_visit=1, sequence_ranks=bins.ranks)
    shared = bins.shape[0] * world // bins.ranks if bins.ranks > 1 else None
    numbers = share_packs(*bins.shape, world, bins.ranks)
    return build(step_of(model, Topology.grid(world // local, local), settings, numbers, shared=shared))


def test_two_rounds_of_uneven_packs_take_the_longest_of_each() -> None:
    lengths = (10, 3, 3, 6, 4, 2)
    bins = Packs((), ((Pack((0,)), Pack((1, 2))), (Pack((3,)), Pack((4, 5)))), 1, lengths, work())
    first, second = TOKEN_S * 10 + PAIR_S * 100, TOKEN_S * 6 + PAIR_S * 36  # the other rank has fewer tokens or pairs
    taken = play(schedule_of(bins), costs().with_packs(bins), steps=1).makespan
    assert taken == pytest.approx(4 * LAYERS * (first + second)) == pytest.approx(bins.seconds)


def test_empty_pack_takes_no_time() -> None:
    bins = Packs((), ((Pack((0,)), Pack(())),), 1, (10,), work())
    one = Seconds(1.0, TOKEN_S, PAIR_S)
    model = replace(costs(), blocks=(BlockCost(), *[BlockCost(one, one)] * LAYERS, BlockCost())).with_packs(bins)
    assert model.forward_s(0, 1, 0) == model.backward_s(0, 1, 0) == pytest.approx(1.0 + TOKEN_S * 10 + PAIR_S * 100)
    assert model.forward_s(1, 1, 1) == model.backward_s(1, 1, 1) == 0
    taken = play(schedule_of(bins), costs().with_packs(bins), steps=1).makespan
    assert taken == pytest.approx(4 * LAYERS * (TOKEN_S * 10 + PAIR_S * 100))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("windowed", [0, 2, LAYERS])
def test_step_with_free_links_takes_the_time_of_its_longest_packs(ranks: int, windowed: int) -> None:
    draw = Random(ranks)
    lengths = [min(60, int(draw.lognormvariate(1.5, 1.2)) + 1) for _ in range(60)] + [75] * (ranks - 1)
    bins = deal(lengths, world_size=4, cap=60, work=work(windowed), ranks=ranks)
    assert bool(bins.shape[0]) == (ranks > 1) and sum(bins.shape) > 1
    taken = play(schedule_of(bins), costs(windowed).with_packs(bins), steps=1).makespan
    assert taken >= sum(bins.work.of(n) for n in lengths) / bins.world_size
    # Ranks run ahead of each other by a visit, so that it may be less; in sets keys are made twice.
    assert bins.seconds * 0.9 < taken < bins.seconds * (1.1 if ranks > 1 else 1.0001)


def test_transfers_of_a_micro_batch_scale_with_its_pack() -> None:
    bins = Packs(
        ((Pack((0,), 2), Pack((1,), 2)),), ((Pack((2,)), Pack((3,)), Pack(()), Pack(())),), 2, (8, 6, 5, 3), work()
    )
    model = costs(boundary_bytes=100, key_elements=7, host=LinkModel(1000.0)).with_packs(bins)
    step = schedule_of(bins).step
    assert step.shared == 2
    model = model.with_cp_groups(2, step.shared)
    assert [model.boundary(m) for m in range(6)] == [400, 300, 500, 300, 0, 0]
    assert [model.host_s(offload(1, m, 0)) for m in (0, 2)] == [0.4, 0.5]
    assert [model.keys_bytes(m, gradients=False) for m in (0, 1)] == [8 * 7 * 4, 6 * 7 * 4]
    assert model.forward_s(0, 1, 0) == pytest.approx((TOKEN_S * 8 + PAIR_S * 64) / 2)
    assert model.forward_s(0, 1, 2) == pytest.approx(TOKEN_S * 5 + PAIR_S * 25)
    keys = [a for a in schedule_of(bins).programs[0] if a.op.value.startswith("KEYS")]
    assert keys and {action.micro_batch for action in keys} == {0}
