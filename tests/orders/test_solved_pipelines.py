"""Orders under a limit of memory: within it in every timing, and never longer than the start."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tawpipe.errors import UserError
from tawpipe.orders.bounds import bound
from tawpipe.orders.fitting import heuristics, one_by_one
from tawpipe.orders.solver.solve import solve
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.memory import fits, peak
from tawpipe.schedule.pipelines.work import BlockTimes, Order, PipelineCosts, Work, makespan, play

END = BlockTimes(0.0, 0.0, 0.0, 0.0)


def costs_of(layers: int, memory: float, host: float = 0.5, parts: float = 0.5, hop: float = 0.0) -> PipelineCosts:
    layer = BlockTimes(1.0, 1.0, 1.0, 1.0, parts)
    return PipelineCosts((END, *[layer] * layers, END), hop, memory=memory, host=host)


@st.composite
def problems(draw) -> tuple[Layout, PipelineCosts, int]:
    """A layout, costs that something meets, and a number of micro-batches."""
    size = draw(st.integers(1, 3))
    stages = draw(st.integers(size, 2 * size))
    places = draw(st.permutations([*range(size), *(draw(st.integers(0, size - 1)) for _ in range(stages - size))]))
    times = st.sampled_from([0.5, 1.0, 1.5, 0.37])
    blocks = tuple(
        BlockTimes(
            *(draw(times), draw(times), draw(times), draw(st.sampled_from([1.0, 2.0, 0.7])), draw(times)),
            resident=draw(st.sampled_from([0.0, 1.0, 2.5])),
        )
        for _ in range(stages)
    )
    layout = Layout(stages, tuple(range(stages)), tuple(places))
    hop, host = draw(st.sampled_from([0.0, 0.3])), draw(st.sampled_from([0.2, 1.0, 3.0]))
    each = draw(st.sampled_from([1.0, 1.3, 2.0, 3.5])) * max(block.kept for block in blocks)
    limit = each + max(PipelineCosts(blocks).stages(layout).resident)
    near = {"near_hop": 0.1, "nodes": (*range(size - 1), 0)} if draw(st.booleans()) else {}
    return layout, PipelineCosts(blocks, hop, memory=limit, host=host, **near), draw(st.integers(1, 4))


def check(layout: Layout, order: Order, costs: PipelineCosts, micro_batches: int, seed: int = 0) -> None:
    """Every work once, and memory within the limit: of all timings by ``peak``, and of some with random delays."""
    done = [work for _, works in order.lanes for work in works]
    assert len(set(done)) == len(done)
    keys = {(stage, number) for stage in range(layout.stages) for number in range(micro_batches)}
    by_kind = {kind: {(w.stage, w.micro_batch) for w in done if w.kind == kind} for kind in "FBIWOR"}
    assert by_kind["F"] == keys == by_kind["B"] | by_kind["I"]
    assert by_kind["I"] == by_kind["W"] and not by_kind["B"] & by_kind["I"] and by_kind["O"] == by_kind["R"]
    worst = peak(layout, order, costs)
    assert all(fits(costs, most) for most in worst)
    for delays in range(3):
        times = play(layout, order, costs, *([delayed(seed + delays)] if delays else []))
        assert set(times) == set(done)
        assert all(a <= b * (1 + 1e-9) for a, b in zip(held(layout, times, costs), worst, strict=True))


def delayed(seed: int) -> Callable[[Work], float]:
    """Every work takes up to three times as long, at random."""
    return lambda work: random.Random(f"{seed} {work}").uniform(1, 3)


def held(layout: Layout, times: dict[Work, tuple[float, float]], costs: PipelineCosts) -> list[float]:
    """The most memory of every position in one timing."""
    table = costs.stages(layout)
    most: list[float] = [*table.resident]
    for place in range(layout.size):
        own = [work for work in times if layout.places[work.stage] == place]
        events = [(times[work][0], 1, table.taken[work.kind, work.stage]) for work in own]
        events += [(times[work][1], 0, -table.frees[work.kind, work.stage]) for work in own]
        level = table.resident[place]
        for _, _, change in sorted(events):
            level += change
            most[place] = max(most[place], level)
    return most


@given(problems(), st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_heuristic_orders_stay_within_memory_in_every_timing(problem, seed):
    layout, costs, micro_batches = problem
    for order in heuristics(layout, costs, micro_batches).values():
        check(layout, order, costs, micro_batches, seed)
        least = bound(layout, costs, micro_batches, split=True)
        assert makespan(play(layout, order, costs)) >= least * (1 - 1e-9)


@given(problems(), st.integers(0, 99), st.booleans())
@settings(max_examples=5, deadline=None)
def test_solved_order_stays_within_memory_and_is_no_longer_than_its_start(problem, seed, split):
    layout, costs, micro_batches = problem
    fixed = [o for o in heuristics(layout, costs, micro_batches).values() if split or not parts(o)]
    if not fixed:
        return
    start = max(fixed, key=lambda one: makespan(play(layout, one, costs)))
    found = solve(layout, costs, micro_batches, start, seconds=60, deterministic=0.03, seed=seed, split=split)
    assert bound(layout, costs, micro_batches, split=split or parts(start)) <= found.makespan * (1 + 1e-9)
    check(layout, found.order, costs, micro_batches, seed)
    assert found.makespan == makespan(play(layout, found.order, costs)) <= makespan(play(layout, start, costs))
    assert found.bound <= found.makespan * (1 + 1e-9)
    assert split or not parts(found.order)


def parts(order: Order) -> bool:
    return any(work.kind == "W" for works in order.compute for work in works)


def test_solver_finds_the_optimum_of_a_small_step_deterministically():
    """As good as it gets, which no fixed way is; and the same again."""
    layout, costs = Layout.even(5, 3), costs_of(3, 2.0, host=1.0)
    found = solve(layout, costs, 4, seconds=60, deterministic=0.3)
    assert found.status == "optimal" and found.gap == 0
    assert found.makespan < min(makespan(play(layout, one, costs)) for one in heuristics(layout, costs, 4).values())
    assert found.order == solve(layout, costs, 4, seconds=60, deterministic=0.3).order


def test_solving_by_windows_shortens_a_long_step():
    layout, costs = Layout.even(5, 3), costs_of(3, 2.0, host=1.0)
    start = min(heuristics(layout, costs, 14).values(), key=lambda one: makespan(play(layout, one, costs)))
    found = solve(layout, costs, 14, start, seconds=60, deterministic=0.15)
    assert found.bound <= found.makespan < makespan(play(layout, start, costs))
    check(layout, found.order, costs, 14)


def test_solver_bound_stays_below_the_makespan_with_rounded_times():
    layout, costs = Layout.even(4, 2), costs_of(2, 2.5, host=0.2371)
    found = solve(layout, replace(costs, hop=0.01003), 3, seconds=60, deterministic=2)
    assert 0.98 * found.makespan < found.bound <= found.makespan


def test_unmeetable_memory_limit_is_refused_with_the_missing_amount():
    layout = Layout.even(10, 2, 2, folded=True)
    with pytest.raises(UserError, match=r"memory of a position: got 1.5; at least 2, 0.5 more"):
        heuristics(layout, costs_of(8, 1.5), 4)
    with pytest.raises(UserError, match=r"got 3.5; at least 4, 0.5 more: one micro-batch in flight"):
        solve(layout, costs_of(8, 3.5, host=math.inf), 4, seconds=1)
    assert set(heuristics(layout, costs_of(8, 4.0, host=math.inf), 4)) == {"1f1b"}


def test_start_order_above_the_memory_limit_is_refused():
    layout = Layout.even(4, 2)
    eager = heuristics(layout, costs_of(2, math.inf), 4)["1f1b"]
    with pytest.raises(UserError, match="at least 2, what the order given needs"):
        solve(layout, costs_of(2, 1.0), 4, eager, seconds=1)


def test_peak_is_the_maximum_over_all_timings():
    """O and F side by side: the second F may start before the first O has ended, unless it waits for it."""
    layout, costs = Layout.even(4, 2), costs_of(2, 1.0)
    compute = one_by_one(layout, 2)
    host = ((Work("O", 0, 0), Work("R", 0, 0)), ())
    order = Order(((Work("F", 0, 0), Work("F", 0, 1), Work("B", 0, 1), Work("B", 0, 0)), compute[1]), host)
    assert peak(layout, order, costs) == (2.0, 1.0)
    waiting = replace(order, after={Work("F", 0, 1): Work("O", 0, 0), Work("R", 0, 0): Work("B", 0, 1)})
    assert peak(layout, waiting, costs) == (1.0, 1.0)
