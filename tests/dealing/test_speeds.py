"""Devices of several speeds: who computes how much of rows, documents and layers, and what the clock says of it."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import EVERY, NAMES, llama, make, step_for
from selected import quick_ones
from tawpipe.dealing.balance import LayerKind, LayerTime, Packs, deal
from tawpipe.dealing.speeds import by_speed, parse_speeds, spell_speeds
from tawpipe.errors import UserError
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.positions import Positions
from tawpipe.schedule.proof.verify import verify
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.sharing import share_in_cp_groups, speeds_of
from tawpipe.schedule.spec import share_micro_batches
from tawpipe.schedule.step import Schedule
from tawpipe.schedule.strategies.build import build
from tawpipe.simulate import CostModel, LinkModel, play
from tawpipe.topology import Topology

WORK = LayerTime((LayerKind(layers=32, per_token=53_248, per_pair=1),))
FREE = LinkModel(1e12)
SPEEDS = st.lists(st.sampled_from([1.0, 0.5, 0.7, 0.25]), min_size=1, max_size=4)


@given(count=st.integers(0, 12), speeds=SPEEDS, least=st.integers(0, 1))
def test_by_speed_minimizes_the_time_of_the_slowest_device(count: int, speeds: list[float], least: int) -> None:
    count += least * len(speeds)
    each = by_speed(count, speeds, least=least)
    assert sum(each) == count and min(each) >= least
    every = itertools.product(range(least, count + 1), repeat=len(speeds))
    best = min(max(n / s for n, s in zip(numbers, speeds, strict=True)) for numbers in every if sum(numbers) == count)
    assert max(n / s for n, s in zip(each, speeds, strict=True)) == pytest.approx(best)


def test_by_speed_deals_a_million_items_exactly() -> None:
    assert by_speed(1_000_000, (1.0, 0.5, 0.5)) == [500_000, 250_000, 250_000]


@given(count=st.integers(0, 40), world=st.integers(1, 4), ranks=st.integers(1, 2))
def test_equal_speeds_share_micro_batches_as_without_speeds(count: int, world: int, ranks: int) -> None:
    world *= ranks
    assert share_micro_batches(count, world, ranks, (0.5,) * world) == share_micro_batches(count, world, ranks)
    base, extra = divmod(count, world // ranks)
    assert [len(share) for share in share_micro_batches(count, world, ranks)[::ranks]] == [
        base + (place < extra) for place in range(world // ranks)
    ]


@given(
    name=st.sampled_from(NAMES),
    count=st.integers(1, 14),
    each=st.integers(1, 4),
    speeds=st.lists(st.sampled_from([1.0, 0.5, 0.3]), min_size=4, max_size=4),
    offloaded=st.booleans(),
)
@settings(deadline=None, max_examples=30)
def test_slow_devices_compute_fewer_micro_batches_in_every_round(
    name: str, count: int, each: int, speeds: list[float], offloaded: bool
) -> None:
    layers = 4 if offloaded and name != "weipipe" else 0
    given = {"strategy": name, "micro_batches_per_visit": each, "device_speeds": spell_speeds(speeds)}
    schedule = make(llama(4), 2, 2, count, offloaded_layers=layers, **given)
    verify(schedule, steps=2)
    step = schedule.step
    for rank, share in enumerate(step.micro_batches):
        rounds = [step.in_round(rank, number) for number in range(step.rounds)]
        assert tuple(itertools.chain(*rounds)) == share
        sizes = [len(some) for some in rounds]
        assert max(sizes) <= each and (not step.speeds or max(sizes) - min(sizes) <= 1)


@pytest.mark.parametrize("name", [name for name in EVERY if name not in NAMES])
@pytest.mark.parametrize("stages", quick_ones(("nodes", "locals"), ["locals"]))
def test_pipelines_with_device_speeds_are_verified(name: str, stages: str) -> None:
    even = name == "interleaved-1f1b"  # which wants groups of one size in every pipeline
    every = (("2x1,2x0.5", 7), ("1,0.5,1,0.5", 4), ("1,0.5,0.7,0.25", 9))
    for speeds, count in every[:2] if even else every:
        count = 12 if even else count
        schedule = make(llama(8), 2, 2, count, strategy=name, stages=stages, device_speeds=speeds)
        verify(schedule, steps=2)
        numbers = [m for share in set(schedule.step.micro_batches) for m in share]
        assert sorted(numbers) == list(range(count))


def test_stages_and_pipelines_are_sized_by_device_speed() -> None:
    def layers(schedule: Schedule, blocks: int) -> list[int]:
        step = schedule.step
        return [sum(0 < b <= blocks for b in mine) for mine in step.strategy.computes(step)]

    slow_node: dict[str, Any] = {"strategy": "1f1b", "device_speeds": "2x1,2x0.5"}
    assert layers(make(llama(12), 2, 2, 8, **slow_node), 12) == [4, 4, 2, 2]
    across = make(llama(12), 2, 2, 8, stages="nodes", **slow_node)
    assert layers(across, 12) == [8, 8, 4, 4] and [len(share) for share in across.step.micro_batches] == [4] * 4
    inside = make(llama(12), 2, 2, 9, stages="locals", **slow_node)  # every stage has a fast device and a slow one
    assert layers(inside, 12) == [6] * 4 and [len(share) for share in inside.step.micro_batches] == [6, 6, 3, 3]
    folded = Layout.even(14, 2, 2, folded=True).by_speed((1.0, 0.5))
    assert str(folded) == "0,5,7,9@0,1,1,0"
    positions = Positions(Topology.grid(2, 2), "nodes")
    assert positions.speeds((1.0, 1.0, 0.5, 0.5)) == (2.0, 1.0) and positions.speeds(()) == ()


def test_context_parallel_group_is_as_fast_as_its_slowest_rank() -> None:
    given = ScheduleSettings(sequence_ranks=2, device_speeds="1,0.5,1,1")
    shares = share_in_cp_groups(6, Topology.grid(2, 2), given)
    assert shares == ((0, 1), (0, 1), (2, 3, 4, 5), (2, 3, 4, 5))


@pytest.mark.parametrize("seed", range(10))
def test_documents_are_dealt_by_device_speed(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [min(98_304, max(32, int(draw.lognormvariate(6.35, 2.33)))) for _ in range(1500)]
    for speeds, ranks in (((1.0, 1.0, 0.5, 0.5), 1), ((1.0, 0.5, 1.0, 0.5, 0.25, 0.25), 1), ((1.0, 1.0, 0.5, 0.5), 2)):
        given = {"world_size": len(speeds), "cap": 147_456, "work": WORK, "ranks": ranks}
        bins, even = deal(lengths, speeds=speeds, **given), deal(lengths, **given)
        assert sorted(n for row in (*bins.shared, *bins.single) for b in row for n in b.documents) == [*range(1500)]
        assert all(bins.tokens(b) <= 147_456 * b.ranks for row in (*bins.shared, *bins.single) for b in row)
        assert bins.seconds >= bins.floor * (1 - 1e-9)
        assert bins.imbalance < 1.12
        evenly = Packs(even.shared, even.single, ranks, even.lengths, WORK, speeds)
        assert bins.seconds < 0.8 * evenly.seconds
        assert deal(lengths, speeds=(1.0,) * len(speeds), **given).single == even.single


@pytest.mark.parametrize("strategy", ["tawpipe-spread", "tawpipe-step", "hsdp", "flat", "1f1b", "generated"])
@pytest.mark.parametrize("speeds", [pytest.param("2x1,2x0.5", marks=pytest.mark.slow), "1,0.5,1,0.5"])
def test_simulated_step_reaches_nine_tenths_of_the_combined_speed(strategy: str, speeds: str) -> None:
    """And two thirds where all have as much to do."""
    layers, count = 12, 48
    each = 16 if strategy not in ("1f1b", "generated") else 1
    factor = {rank: 1 / speed for rank, speed in enumerate(parse_speeds(speeds))}
    costs = CostModel.timed(
        layers=layers, forward_s=0.01, backward_s=0.03, between=FREE, inside=FREE, compute_factor=factor
    )
    ideal = count * layers * 0.04 / 3  # 1 + 1 + 1/2 + 1/2

    def seconds(**given: Any) -> float:
        times = f"0/0/0,{layers}x10000/20000/10000,0/0/0"
        more: dict[str, Any] = {"block_times": times} if strategy == "generated" else {"micro_batches_per_visit": each}
        return play(make(llama(layers), 2, 2, count, strategy=strategy, **more, **given), costs).step_seconds

    assert seconds(device_speeds=speeds) <= ideal / 0.9
    assert seconds() >= ideal * 1.3


@pytest.mark.parametrize(
    ("speeds", "each", "count", "played"),
    [
        ("2x1,2x0.5", 2, 60, (3, 4, 7)),
        ("2x1,2x0.5", 1, 60, (4, 6, 8)),  # a slow device has a micro-batch in every other round
        ("1,0.7,0.35,0.35", 1, 72, (8, 16, 2.875)),  # which repeat only after thirty rounds
    ],
)
def test_long_step_time_is_extrapolated_from_two_short_steps(
    speeds: str, each: int, count: int, played: tuple[int, int, float]
) -> None:
    step = step_for(llama(4), Topology.grid(2, 2), count, micro_batches_per_visit=each, device_speeds=speeds)
    short, longer, more = step.strategy.extended(step, 3)
    assert (short.rounds, longer.rounds, more) == played
    for some in (short, longer):
        numbers = [m for share in some.micro_batches for m in share]
        assert numbers == [*range(len(numbers))]
    factor = {rank: 1 / speed for rank, speed in enumerate(parse_speeds(speeds))}
    costs = CostModel.timed(layers=4, forward_s=0.01, backward_s=0.03, between=FREE, inside=FREE, compute_factor=factor)
    first, second, whole = (play(build(some), costs).step_seconds for some in (short, longer, step))
    assert first + more * (second - first) == pytest.approx(whole, rel=0.03)


@pytest.mark.parametrize("text", ["0", "1,-1", "1,nan", "1,inf", "fast", "x", "0x1", "1x1x1", "9999999999x1"])
def test_invalid_device_speeds_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"schedule\.device_speeds: got .*; a number above 0 for every process"):
        parse_speeds(text)


@pytest.mark.parametrize("strategy", ["tawpipe-spread", "1f1b"])
@pytest.mark.parametrize("text", ["1,0.5", "5x1"])
def test_number_of_device_speeds_must_equal_the_processes(strategy: str, text: str) -> None:
    with pytest.raises(UserError, match=r"schedule\.device_speeds: got .*; 4 speeds, one for every process"):
        make(llama(4), 2, 2, 4, strategy=strategy, device_speeds=text)


def test_device_twenty_times_slower_is_refused() -> None:
    with pytest.raises(UserError, match=r"device_speeds: got '1,0.04'; none that is 20 times as slow"):
        make(llama(4), 1, 2, 4, device_speeds="1,0.04")


def test_speeds_are_relative_and_empty_if_equal() -> None:
    topology = Topology.grid(1, 2)
    assert speeds_of(ScheduleSettings(device_speeds="3,6"), topology) == (0.5, 1.0)
    assert speeds_of(ScheduleSettings(device_speeds="2x7"), topology) == ()
    assert parse_speeds(spell_speeds((1.0, 1.0, 0.3333))) == (1.0, 1.0, 0.3333)
