"""Layouts made for costs: as good as those published, never behind the fixed schedules, the same each time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tawpipe.errors import UserError
from tawpipe.orders.arrange import arrange
from tawpipe.orders.generate import fixed_layouts, generate
from tawpipe.orders.moves import Moves, StagePlan
from tawpipe.orders.ticks import Ticks
from tawpipe.orders.zero_bubble import zero_bubble
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.memory import peak
from tawpipe.schedule.pipelines.orders import interleaved, one_f_one_b
from tawpipe.schedule.pipelines.times import parse_times, spell_times
from tawpipe.schedule.pipelines.work import BlockTimes, Order, PipelineCosts, makespan, play
from tawpipe_lab.mixes import MIXES, nemotron

NANO = PipelineCosts(nemotron())
BUDGET = 100_000
"""A small part of the usual one."""


def span(layout: Layout, order: Order, costs: PipelineCosts) -> float:
    return makespan(play(layout, order, costs))


def test_generated_layout_beats_the_published_nemotron_example():
    """Nemotron Nano v2 9B on 4 positions with 8 micro-batches: their numbers by our clock, and ours against theirs."""
    even, best = Layout.even(58, 4), Layout(58, (0, 15, 31, 46), (0, 1, 2, 3))
    assert span(even, one_f_one_b(even, 8), NANO) == 133_121
    assert span(best, one_f_one_b(best, 8), NANO) == 118_325
    assert sum(one.forward + one.backward_input + one.backward_weight for one in NANO.blocks) * 8 / 4 == 85_194
    layout = generate(NANO, 4, 8, budget=BUDGET)
    assert span(layout, arrange(layout, NANO, 8), NANO) <= 89_870


def test_generated_layout_beats_interleaved_1f1b_for_unequal_layers():
    costs = PipelineCosts(nemotron(24))
    layout = generate(costs, 4, 8, budget=BUDGET // 2)
    ours = span(layout, arrange(layout, costs, 8), costs)
    even = Layout.even(26, 4, 2)
    balanced = Layout(26, *Moves(Ticks.of(costs), 4, 8, 8).balanced(StagePlan(even.cuts, even.places)))
    assert span(even, interleaved(even, 8), costs) >= 1.4 * ours
    assert span(balanced, interleaved(balanced, 8), costs) >= 1.15 * ours


@pytest.mark.parametrize("mix", MIXES)
def test_generated_layout_is_never_behind_the_fixed_schedules(mix):
    costs, positions, count = PipelineCosts(MIXES[mix](24), hop=10), 3, 6
    layout = generate(costs, positions, count, budget=BUDGET // 4)
    ours = span(layout, arrange(layout, costs, count), costs)
    moves = Moves(Ticks.of(costs), positions, count, 12)
    for fixed in fixed_layouts(moves, positions):
        orders = [zero_bubble(fixed, count, costs)] if fixed.places == (0, 1, 2, 2, 1, 0) else []
        if not orders:
            orders = [(one_f_one_b if fixed.stages == positions else interleaved)(fixed, count)]
        assert ours <= 1.01 * min(span(fixed, order, costs) for order in orders)


def test_generated_layout_stays_within_memory_and_is_deterministic():
    costs = PipelineCosts(NANO.blocks[:20], memory=24.0)
    layout = generate(costs, 3, 6, budget=BUDGET // 4)
    assert generate(costs, 3, 6, budget=BUDGET // 4) == layout
    order = arrange(layout, costs, 6)
    assert max(peak(layout, order, costs)) <= 24
    with pytest.raises(UserError, match="at least"):
        generate(PipelineCosts(NANO.blocks[:20], memory=3.0), 3, 6, budget=BUDGET // 4)
    with pytest.raises(UserError, match="at least 8, one for every position"):
        generate(PipelineCosts(NANO.blocks[:8]), 8, 6)


@pytest.mark.parametrize(
    ("memory", "most"),
    [(36.0, 240), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((32.0, 330), (45.0, 180)))],
)
def test_generated_layout_moves_layers_away_from_memory_heavy_ends(memory, most):
    """As of a large vocabulary: neither as many layers in each stage nor balanced times fit beside 20 at each end."""
    layers, ends = [BlockTimes(1, 2, 1, 1, 0, 4)] * 24, (BlockTimes(0, 0, 0, 0, 0, 20), BlockTimes(0, 2, 0, 1, 0, 20))
    costs = PipelineCosts((ends[0], *layers, ends[1]), memory=memory)
    for fixed in fixed_layouts(Moves(Ticks.of(costs), 6, 8, 24), 6):
        if memory < 40:
            with pytest.raises(UserError, match="memory of a position"):
                arrange(fixed, costs, 8)
    layout = generate(costs, 6, 8, budget=2 * BUDGET)
    order = arrange(layout, costs, 8)
    assert max(peak(layout, order, costs)) <= memory and span(layout, order, costs) <= most


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_simulated_order_is_never_shorter_than_its_bounds(data):
    blocks = data.draw(st.integers(6, 10))
    times = st.integers(0, 9)
    drawn = tuple(BlockTimes(*(data.draw(times) for _ in range(3))) for _ in range(blocks))
    costs = PipelineCosts(drawn, hop=2, near_hop=1, nodes=data.draw(st.sampled_from([(), (0, 0, 1)])))
    moves = Moves(ticks := Ticks.of(costs), 3, count := 3, 6)
    plan = StagePlan((0, 2, 4, 5), tuple(data.draw(st.permutations((0, 1, 2, data.draw(st.integers(0, 2)))))))
    limit = 10**18
    for changed in (
        plan,
        *(one for _, one in moves.shifts(plan, limit)),
        *(one for _, one in moves.placements(plan, limit)[::7]),
    ):
        layout = Layout(blocks, *changed)
        assert span(layout, arrange(layout, costs, count), costs) * ticks.scale >= max(moves.bounds(changed))
    for largest, changed in moves.shifts(plan, limit) + moves.placements(plan, limit):
        assert largest == max(moves.loads(changed))


@given(
    st.lists(st.tuples(*[st.floats(0, 1e6)] * 6).map(lambda six: BlockTimes(*six)), min_size=1, max_size=5),
    st.floats(0, 10),
    st.lists(st.floats(0.1, 3), max_size=3),
    st.one_of(st.just(math.inf), st.floats(0, 1e9)),
)
def test_block_times_read_back_exactly_from_text(blocks, hop, pace, memory):
    nodes = tuple(map(int, pace))
    costs = PipelineCosts((*blocks, *blocks[-1:] * 3), hop, tuple(pace), memory, hop / 3, hop / 7, nodes)
    assert parse_times(spell_times(costs)) == costs


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1/2",
        "1/2/x",
        "1/2/-3",
        "1/2/3;hops=3",
        "1/2/3;hop=1/2",
        "1/2/3;nodes=0/0.5",
        "1/2/3;nodes=inf",
        "ax1/2/3",
        "1/2/nan",
    ],
)
def test_invalid_block_times_are_refused(text):
    with pytest.raises(UserError, match="times of all blocks"):
        parse_times(text)
