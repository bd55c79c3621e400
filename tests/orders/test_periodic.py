"""Orders that go on: every work once, within the memory, as fast as they say, and of what is searched no more."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_arrange import problems

from schedules import llama, step_for
from tawpipe.orders import arrange as arranging
from tawpipe.orders import fitting, passes
from tawpipe.orders.arrange import arrange, continuing
from tawpipe.orders.fitting import heuristics
from tawpipe.orders.generate import generate
from tawpipe.schedule.actions import Op
from tawpipe.schedule.pipelines.cost_based import SolvedPipeline
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.limits import filling, searched
from tawpipe.schedule.pipelines.memory import peak as worst_peak
from tawpipe.schedule.pipelines.orders import interleaved, one_f_one_b
from tawpipe.schedule.pipelines.periodic import periodic
from tawpipe.schedule.pipelines.times import spell_times
from tawpipe.schedule.pipelines.work import BlockTimes, PipelineCosts, makespan, play
from tawpipe.schedule.proof.verify import verify
from tawpipe.schedule.strategies.build import build
from tawpipe.schedule.transform import for_one_thread
from tawpipe.topology import Topology

NOTHING = BlockTimes(0, 0, 0, 0)
COSTS = PipelineCosts((NOTHING, *[BlockTimes(100, 200, 97, 1, 0.5)] * 8, BlockTimes(0, 300, 0)), 20)


@given(problems(), st.integers(0, 40))
@settings(max_examples=4, deadline=None)
def test_long_order_does_all_work_once_within_the_memory(problem, more):
    layout, costs, _, split = problem
    count = searched(layout.size) + 1 + more
    order = arrange(layout, costs, count, split=split)
    done = Counter(work for works in order.compute for work in works)
    assert set(done.values()) == {1}
    for stage in range(layout.stages):
        for m in range(count):
            kinds = "".join(kind for kind in "BFIW" if (kind, stage, m) in done)
            assert kinds == "BF" or (split and kinds == "FIW")
    assert sum(done.values()) == len(play(layout, order, costs))
    assert max(worst_peak(layout, order, costs)) <= costs.memory * (1 + 1e-9)


def test_extended_published_orders_equal_published_orders():
    for layout, make, period in (
        (Layout.even(10, 4), one_f_one_b, 1),
        (Layout.even(10, 4, 2), interleaved, 4),
    ):
        made = periodic(layout, make(layout, 16), COSTS, 16)
        assert made.period == period
        assert made.of(32) == make(layout, 32)


@pytest.mark.parametrize("memory", [float("inf"), 8.0, 4.0])
def test_periodic_order_takes_its_predicted_length_and_stays_busy(memory):
    costs, layout = replace(COSTS, memory=memory), Layout.even(10, 4, 2, folded=True)
    made = continuing(layout, costs)
    ends = [makespan(play(layout, made.of(made.few + many * made.period), costs)) for many in (4, 5)]
    assert ends[1] - ends[0] == pytest.approx(made.length, rel=0.02)
    if memory == float("inf"):
        assert made.length <= 1.01 * made.period * (2 * 397 + 300)  # the position of the head


@st.composite
def offloaded(draw: st.DrawFn) -> tuple[int, PipelineCosts]:
    """(positions, costs) of pipelines with too little memory, beside that of a host."""
    size = draw(st.integers(2, 3))
    forward, backward, weights, *head = (draw(st.integers(0, 9)) for _ in range(5))
    layer = BlockTimes(forward, backward, weights, 1, draw(st.sampled_from([0.0, 0.5])))
    blocks = (NOTHING, *[layer] * 2 * size, BlockTimes(head[0], head[1], 0))
    memory, host = draw(st.sampled_from([3.0, 4.0, 6.0, 9.0])), draw(st.sampled_from([0.0, 0.1, 1.0, 7.0]))
    return size, PipelineCosts(blocks, draw(st.integers(0, 9)), memory=memory, host=host)


@given(offloaded(), st.integers(0, 9))
@example(
    (2, PipelineCosts((NOTHING, *[BlockTimes(7, 9, 0, 1, 0.5)] * 4, BlockTimes(8, 8, 0)), 9, memory=6.0, host=1)), 0
)
@example((3, replace(COSTS, memory=4.0, host=0.0)), 0)
@settings(max_examples=4, deadline=None)
def test_extended_offloading_order_stays_within_the_memory(problem, more):
    """In every timing, however many micro-batches: what waits because of memory waits for as many works as before."""
    size, costs = problem
    layout, few = Layout.even(len(costs.blocks), size), filling(2)
    for order in heuristics(layout, costs, few).values():
        made = periodic(layout, order, costs, few)
        for count in (few, few + 1, few + 2 * made.period + more):
            longer = made.of(count)
            done = Counter(work for lane in (*longer.compute, *longer.host) for work in lane)
            assert set(done.values()) == {1} and max(work.micro_batch for work in done) == count - 1
            assert {(one.stage, one.micro_batch) for one in done if one.kind == "O"} == {
                (one.stage, one.micro_batch) for one in done if one.kind == "R"
            }
            assert len(play(layout, longer, costs)) == len(done)
            assert max(worst_peak(layout, longer, costs)) <= costs.memory * (1 + 1e-9)


def test_extended_offloading_order_is_verified_as_a_schedule():
    use = SolvedPipeline(block_times=spell_times(replace(COSTS, memory=8.0, host=10.0)))
    step = step_for(llama(8), Topology.grid(2, 1), searched(2) + 2, use=use)
    made = for_one_thread(build(step))
    assert any(action.op is Op.OFFLOAD for action in made.programs[0])
    verify(made, steps=1, one_thread=True)


def test_search_uses_no_more_micro_batches_than_fill_a_pipeline(monkeypatch):
    """Whatever a step has: neither an order nor stages are looked for with more, and no more variants are played."""
    seen, variants = set(), []
    forward, listed = passes.Passes.forward, fitting.listed

    def watched(self, works, flying=0):
        seen.add(self.micro_batches)
        return forward(self, works, flying)

    def counted(layout, costs, micro_batches, *others):
        variants.append(micro_batches * layout.stages)
        return listed(layout, costs, micro_batches, *others)

    monkeypatch.setattr(passes.Passes, "forward", watched)
    monkeypatch.setattr(fitting, "listed", counted)
    monkeypatch.setattr(fitting, "MOST", 1000)
    layout = Layout.even(10, 4)
    arranging.continuing.cache_clear()
    assert len(arrange(layout, COSTS, 1537).compute[0]) >= 2 * 1537
    generate(COSTS, 4, 100_000, budget=20_000)
    assert seen and max(seen) <= searched(4) == 64
    heuristics(layout, replace(COSTS, memory=3.0, host=7.0), filling(4))
    assert 3 * sum(variants) <= 8 * fitting.MOST
