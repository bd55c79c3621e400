"""Orders for any layout: every work once, without waiting for itself, within the memory, and the same each time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tawpipe.errors import UserError
from tawpipe.orders.arrange import arrange, began, joined, justified
from tawpipe.orders.order_memory import whole_stages
from tawpipe.orders.passes import Passes
from tawpipe.orders.ticks import Ticks
from tawpipe.orders.zero_bubble import zero_bubble
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.memory import peak, worst
from tawpipe.schedule.pipelines.orders import interleaved, nearest_groups, one_f_one_b
from tawpipe.schedule.pipelines.work import BlockTimes, PipelineCosts, makespan, play

TIMES = st.one_of(st.integers(0, 9), st.floats(0.01, 3.0))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any stages of up to ten blocks on up to four positions."""
    size = draw(st.integers(1, 4))
    stages = draw(st.integers(size, 9))
    blocks = draw(st.integers(stages, 10))
    cuts = (
        sorted(draw(st.sets(st.integers(1, blocks - 1), min_size=stages - 1, max_size=stages - 1)))
        if stages > 1
        else []
    )
    rest = draw(st.lists(st.integers(0, size - 1), min_size=stages - size, max_size=stages - size))
    return Layout(blocks, (0, *cuts), tuple(draw(st.permutations([*range(size), *rest]))))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Layout, PipelineCosts, int, bool]:
    """A layout, costs with a limit of memory or without, a number of micro-batches, whether backward passes part."""
    layout = draw(layouts())
    blocks = tuple(BlockTimes(*(draw(TIMES) for _ in range(6))) for _ in range(layout.blocks))
    pace = tuple(draw(st.sampled_from([1.0, 0.7, 2.0])) for _ in range(layout.size)) if draw(st.booleans()) else ()
    nodes = tuple(draw(st.integers(0, 2)) for _ in range(layout.size)) if draw(st.booleans()) else ()
    costs = PipelineCosts(blocks, draw(TIMES), pace, near_hop=draw(TIMES), nodes=nodes)
    if draw(st.booleans()):
        costs = replace(costs, memory=least_memory(layout, costs) * draw(st.sampled_from([1.0, 1.1, 1.7, 3.0])))
    return layout, costs, draw(st.integers(1, 7)), draw(st.booleans())


def least_memory(layout: Layout, costs: PipelineCosts) -> float:
    """What the fullest position holds for good, and keeps of one micro-batch."""
    table = costs.stages(layout)
    return max(map(sum, zip(table.resident, table.micro_batch, strict=True)))


@given(problems())
@settings(max_examples=40, deadline=None)
def test_arranged_order_does_all_work_once_within_the_memory(problem):
    layout, costs, count, split = problem
    order = arrange(layout, costs, count, split=split)
    done = Counter(work for works in order.compute for work in works)
    assert set(done.values()) == {1}
    for stage in range(layout.stages):
        for m in range(count):
            kinds = "".join(sorted(w.kind for w in done if (w.stage, w.micro_batch) == (stage, m)))
            assert kinds == "BF" or (split and kinds == "FIW")
    times = play(layout, order, costs)
    assert len(times) == sum(done.values())
    assert max(peak(layout, order, costs)) <= costs.memory * (1 + 1e-9)
    assert arrange(layout, costs, count, split=split) == order


@given(problems(), st.integers(1, 7), st.integers(0, 7))
@settings(max_examples=40, deadline=None)
def test_passes_agree_with_the_simulated_clock(problem, group, flying):
    """A pass forward starts every work as soon as its order allows, one backward none sooner; memory counts alike."""
    layout, costs, count, split = problem
    ticks = Ticks.of(costs)
    stages = ticks.stages(layout)
    passes = Passes(stages, count, whole_stages(stages, split))
    timed = began(passes, flying, group)
    found = play(layout, passes.order(timed), costs)
    ends = {passes.named(work): timed.ends[work] / ticks.scale for work in passes.works}
    assert ends.keys() == found.keys()
    assert passes.fits(timed)
    if costs.memory == float("inf") and not 0 < flying < count:
        assert all(found[work][1] == pytest.approx(end, rel=1e-9, abs=1e-9) for work, end in ends.items())
    late = passes.backward(sorted(passes.works, key=lambda work: -timed.ends[work]), flying)
    found = play(layout, passes.order(late), costs)
    assert all(
        found[passes.named(work)][1] <= late.ends[work] / ticks.scale * (1 + 1e-9) + 1e-9 for work in passes.works
    )
    best = justified(passes, began(passes, flying, group), flying)
    order = joined(passes, best)
    assert makespan(play(layout, order, costs)) <= best.makespan / ticks.scale * (1 + 1e-9) + 1e-9
    assert max(worst(stages, order)) / ticks.memory_scale == pytest.approx(max(peak(layout, order, costs)))


def equal_blocks(layers: int, *, hop: float = 0.0, memory: float = float("inf")) -> PipelineCosts:
    end = BlockTimes(0, 0, 0, 0)
    return PipelineCosts((end, *[BlockTimes(1, 1, 1)] * layers, end), hop, memory=memory)


def test_arranged_order_is_never_longer_than_published_orders():
    costs = equal_blocks(16, hop=0.1)
    for layout, make in (
        (Layout.even(18, 4), one_f_one_b),
        (Layout.even(18, 4, 2), interleaved),
        (Layout.even(18, 4, 2, folded=True), lambda layout, count: zero_bubble(layout, count, costs)),
    ):
        for count in (3, 8):
            ours = makespan(play(layout, arrange(layout, costs, count), costs))
            assert ours <= 1.001 * makespan(play(layout, make(layout, count), costs))


def test_arranged_order_from_few_starting_points_is_hardly_longer(monkeypatch):
    costs, layout, spans = equal_blocks(16, hop=0.1), Layout.even(18, 4, 2, folded=True), []
    for many in (10**9, 0):
        monkeypatch.setattr("tawpipe.orders.arrange.MANY", many)
        order = arrange(layout, costs, 12)
        assert Counter(work.kind for lane in order.compute for work in lane)["F"] == 12 * layout.stages
        spans.append(makespan(play(layout, order, costs)))
    assert spans[0] <= spans[1] <= 1.02 * spans[0]


def test_less_memory_lengthens_an_order_until_nothing_fits():
    layout, spans = Layout.even(10, 4), []
    for memory in (2, 4, 6, 8):
        spans.append(makespan(play(layout, arrange(layout, costs := equal_blocks(8, memory=memory), 8), costs)))
    assert spans == sorted(spans, reverse=True) and spans[0] > spans[-1]
    with pytest.raises(UserError, match=r"'1.5'; at least 2: position 0 keeps .* 0.5 more than available"):
        arrange(layout, equal_blocks(8, memory=1.5), 8)


def test_position_with_more_resident_weights_holds_fewer_micro_batches():
    """The limit is one of each position: what is resident elsewhere takes nothing from it."""
    end, layer = BlockTimes(0, 0, 0, kept=0.0), BlockTimes(1, 1, 1)
    layout = Layout.even(6, 2)
    heavy = PipelineCosts((end, layer, layer, *[replace(layer, resident=3.0)] * 2, end), memory=10.0)
    light = replace(heavy, blocks=(end, *[layer] * 4, end), memory=10.0)
    whole = {costs: peak(layout, arrange(layout, costs, 8, split=False), costs) for costs in (heavy, light)}
    assert max(whole[heavy]) <= 10 and whole[heavy][0] == whole[light][0]
    with pytest.raises(UserError, match="at least 8: position 1"):
        arrange(layout, replace(heavy, memory=7.0), 8)


def test_impossible_counts_and_layouts_of_published_orders_are_refused():
    assert nearest_groups(32, 6) == (30, 35)
    with pytest.raises(UserError, match="30 or 35"):
        interleaved(Layout.even(14, 6, 2), 32)
    with pytest.raises(UserError, match="one stage on every position"):
        one_f_one_b(Layout.even(14, 6, 2), 6)
    with pytest.raises(UserError, match="in a V"):
        zero_bubble(Layout.even(14, 6, 2), 6, equal_blocks(12))
