"""What searches for orders of a pipeline are made of: lists, whole ticks, and the program for a solver."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tawpipe.errors import UserError
from tawpipe.orders.fitting import one_by_one
from tawpipe.orders.listing import listed, with_host
from tawpipe.orders.solver.constraints import Model
from tawpipe.orders.solver.rounded import FINEST, Rounded, unit_of, up
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.memory import fits, peak
from tawpipe.schedule.pipelines.orders import one_f_one_b
from tawpipe.schedule.pipelines.strategy import ActivationPipeline, check_axis
from tawpipe.schedule.pipelines.work import BlockTimes, Order, PipelineCosts, Work, makespan, play
from tawpipe.schedule.strategies.table import strategies

END = BlockTimes(0.0, 0.0, 0.0, 0.0)


def costs_of(layers: int, memory: float = math.inf, host: float = 0.5, hop: float = 0.0) -> PipelineCosts:
    return PipelineCosts((END, *[BlockTimes(1.0, 1.0, 1.0, 1.0, 0.5)] * layers, END), hop, memory=memory, host=host)


# lists


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("cap", [1, 2, 4])
def test_listed_lanes_hold_every_work_once_within_the_in_flight_cap(split: bool, cap: int) -> None:
    layout, costs = Layout.even(8, 3, 2), costs_of(6, hop=0.3)
    lanes = listed(layout, costs, 5, [cap] * 6, split, math.inf)
    assert lanes is not None
    assert Counter(work for works in lanes for work in works) == Counter(
        Work(kind, stage, number) for kind in ("FIW" if split else "FB") for stage in range(6) for number in range(5)
    )
    for works in lanes:
        flying = Counter()
        for work in works:
            flying[work.stage] += {"F": 1, "B": -1, "I": -1, "W": 0}[work.kind]
            assert 0 <= flying[work.stage] <= cap
    play(layout, Order(lanes), costs)  # waits for nothing that comes later


def test_listed_lanes_stay_within_memory_or_are_none() -> None:
    layout, costs = Layout.even(6, 2, 2), costs_of(4)
    for split, least in ((False, 2.0), (True, 3.0)):  # of a micro-batch on two stages, with what passes leave for W
        for room in (least, least + 1.5):
            lanes = listed(layout, costs, 4, [4] * 4, split, room)
            assert lanes is not None and max(peak(layout, Order(lanes), costs)) <= room
        assert listed(layout, costs, 4, [4] * 4, split, 1.9) is None


def test_weight_gradients_that_may_not_wait_follow_input_gradients() -> None:
    layout, costs = Layout.even(4, 2), costs_of(2)
    lanes = listed(layout, costs, 4, [4, 4], True, math.inf, late=1)
    assert lanes is not None
    for works in lanes:
        after_inputs = [works[at + 1] for at, work in enumerate(works) if work.kind == "I"]
        assert after_inputs == [Work("W", work.stage, work.micro_batch) for work in works if work.kind == "I"]


def test_offloading_makes_an_eager_order_fit_the_memory() -> None:
    layout, costs, compute = Layout.even(4, 2), costs_of(2, memory=2.0), one_f_one_b(Layout.even(4, 2), 4).compute
    eager = tuple(tuple(sorted(works, key=lambda work: (work.kind != "F", work.micro_batch))) for works in compute)
    assert with_host(layout, eager, (), costs) is None  # four micro-batches, and room for two
    order = with_host(layout, eager, {(stage, m) for stage in range(2) for m in range(4)}, costs)
    assert order is not None and order.compute == eager
    assert all(fits(costs, most) for most in peak(layout, order, costs))
    for works in order.host:
        assert sorted(work.kind for work in works) == ["O"] * 4 + ["R"] * 4
    taken = makespan(play(layout, order, costs))
    assert with_host(layout, eager, {(s, m) for s in range(2) for m in range(4)}, costs, most=taken / 2) is None


# whole ticks


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=6), st.sampled_from([1.0, 0.1, 1 / 3, 7.25e-5]))
def test_tick_unit_divides_all_times_or_is_the_finest(numbers: list[int], scale: float) -> None:
    times = [number * scale for number in numbers]
    unit = unit_of(times, -1.0)
    common = math.gcd(*numbers)
    if min(numbers) // common <= FINEST:
        assert unit == pytest.approx(common * scale)
    else:
        assert unit == -1.0


def test_up_rounds_to_the_next_integer_but_ignores_float_error() -> None:
    assert [up(number) for number in (2.0, 2.0 + 1e-9, 2.001, 0.0)] == [2, 2, 3, 0]


@given(st.lists(st.floats(0.01, 9.0), min_size=4, max_size=4), st.sampled_from([0.0, 0.01, 0.3, 1.7]), st.booleans())
def test_ticks_round_up_by_at_most_the_stretch(times, hop: float, host: bool) -> None:
    blocks = tuple(BlockTimes(a, b, 0.7, 1.0) for a, b in zip(times[:2], times[2:], strict=True))
    layout, costs = Layout(2, (0, 1), (0, 1)), PipelineCosts(blocks, hop, host=0.3 if host else math.inf)
    ticks = Rounded.of(layout, costs, 100.0)
    for kind in "FBIW" + "OR" * host:
        for stage in range(2):
            true, whole = (one.stages(layout).seconds[kind, stage] for one in (costs, ticks))
            assert isinstance(whole, int)
            assert true * (1 - 1e-6) <= whole * ticks.unit + 1e-5 * ticks.unit
            assert whole * ticks.unit <= true * ticks.stretch * (1 + 1e-6)
    whole, first, rest = (ticks.stages(layout).seconds[kind, 0] for kind in "BIW")
    assert whole == first + rest


def test_times_with_a_common_divisor_are_exact_in_ticks() -> None:
    layout = Layout(2, (0, 1), (0, 1))
    costs = PipelineCosts((BlockTimes(0.3, 0.6, 0.9), BlockTimes(1.2, 0.3, 0.6)), 0.15, host=math.inf)
    ticks = Rounded.of(layout, costs, 10.0)
    assert ticks.unit == pytest.approx(0.15) and ticks.stretch == pytest.approx(1.0) and ticks.hop == 1


# the program for a solver


def solved(model: Model) -> Order:
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers, solver.parameters.max_deterministic_time = 1, 2.0
    assert solver.solve(model.model) == cp_model.OPTIMAL
    return model.order(solver)


def test_solver_finds_the_shortest_order_from_a_sequential_start() -> None:
    layout, costs = Layout.even(4, 2), costs_of(2, host=math.inf)
    start = Order(one_by_one(layout, 2))
    whole = solved(Model(layout, costs, 2, False, start))
    assert makespan(play(layout, start, costs)) > makespan(play(layout, whole, costs)) == 9.0  # (2 + 1) * 3
    parts = solved(Model(layout, costs, 2, True, start))
    assert makespan(play(layout, parts, costs)) == 7.0  # passes for weights fill the holes


def test_solver_keeps_the_memory_limit_by_offloading() -> None:
    layout, start = Layout.even(4, 2), Order(one_by_one(Layout.even(4, 2), 3))
    costs = costs_of(2, memory=1.0, host=0.25)
    order = solved(Model(layout, costs, 3, False, start))
    assert all(fits(costs, most) for most in peak(layout, order, costs))
    assert makespan(play(layout, order, costs)) <= makespan(play(layout, start, costs))


def test_solving_a_window_keeps_earlier_work_unchanged() -> None:
    layout, costs = Layout.even(4, 2), costs_of(2, host=math.inf)
    start = Order(one_by_one(layout, 4))
    before = play(layout, start, costs)
    after = play(layout, solved(Model(layout, costs, 4, False, start, (6, 14))), costs)
    assert {work: times for work, times in before.items() if times[0] < 6}.items() <= after.items()
    assert set(after) == set(before) and makespan(after) < makespan(before)


def test_stages_setting_with_an_unknown_axis_is_refused() -> None:
    for stages in ("", "nodes", "world:0,5,9@0,1,0"):
        check_axis(stages)
    with pytest.raises(UserError, match=r"schedule\.stages: got 'rows'; world, nodes, locals"):
        check_axis("rows")


def test_pipelines_in_the_strategy_table_share_one_class() -> None:
    pipelines = {name for name, strategy in strategies().items() if isinstance(strategy, ActivationPipeline)}
    assert {"1f1b", "zero-bubble"} <= pipelines and not pipelines & {"tawpipe-spread", "flat", "hsdp", "weipipe"}
