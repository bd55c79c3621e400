"""Documents dealt to pipelines: every one once, in bins of even times, and each bin where the step is short."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import replace
from itertools import accumulate, pairwise
from random import Random

import pytest

from schedules import laid_out, llama
from tawpipe.dealing.balance import LayerKind, LayerTime, Packs, PacksForm
from tawpipe.errors import UserError
from tawpipe.orders.arrange import arrange
from tawpipe.orders.slicing import listed
from tawpipe.schedule.actions import Op
from tawpipe.schedule.buffers import Kind, keys
from tawpipe.schedule.pipelines import dealing
from tawpipe.schedule.pipelines.dealing import LEAST_PACKS, LONG, slices_of
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.links import LaneLoad, played
from tawpipe.schedule.pipelines.memory import peak
from tawpipe.schedule.pipelines.orders import causal, one_f_one_b
from tawpipe.schedule.pipelines.strategy import check_order
from tawpipe.schedule.pipelines.work import BlockTimes, Order, PipelineCosts
from tawpipe.schedule.pipelines.work import play as play_stages
from tawpipe.schedule.proof.verify import ScheduleError, verify
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.sizes.footprint import BlockMemory, Widths, costs
from tawpipe.schedule.step import Schedule, Strategy
from tawpipe.schedule.strategies.build import build, step_of, step_of_packs
from tawpipe.schedule.transform import for_one_thread
from tawpipe.simulate import BlockCost, CostModel, LinkModel, Seconds, play
from tawpipe.topology import Topology

FREE = LinkModel(1e12)
LAYERS = 8
WORK = LayerTime((LayerKind(LAYERS, 0.04, 0.0004),))
NAMES = ("1f1b", "interleaved-1f1b", "zero-bubble", "generated")
BLOCKS = f"0/0/0,{LAYERS}x1/2/1,0/0/0"
LISTED = 8000
WAYS = pytest.mark.parametrize(
    ("name", "stages"),
    [(name, ("world", "nodes")[number % 2]) for number, name in enumerate(NAMES)],
)


def dealing_of(use: Strategy, topology: Topology, cap: int = 400, *, cuts: float | None = None):
    step = step_of(llama(LAYERS), topology, ScheduleSettings(), ((),) * topology.world_size, strategy=use)
    return step.strategy.dealing(step, cap=cap, work=WORK, cuts=cuts)


def schedule_of(use: Strategy, topology: Topology, bins: Packs, *, training: bool = True) -> Schedule:
    step = step_of_packs(llama(LAYERS), topology, ScheduleSettings(), bins.form, strategy=use)
    return for_one_thread(build(step, training=training))


def seconds_of(schedule: Schedule, bins: Packs) -> float:
    """By the clock of the house, which has the cost of every bin by itself."""
    layer = BlockCost(Seconds(0, 0.01, 0.0001), Seconds(0, 0.03, 0.0003))
    model = CostModel((BlockCost(), *[layer] * LAYERS, BlockCost()), FREE, FREE).with_packs(bins)
    return play(schedule, model, steps=1).makespan


def lengths_of(seed: int, count: int = 120) -> list[int]:
    draw = Random(seed)
    return [min(400, int(draw.lognormvariate(3.5, 1.4)) + 1) for _ in range(count)]


@WAYS
def test_every_document_is_in_one_pack_and_predicted_seconds_hold(name: str, stages: str) -> None:
    """Another process deals alike."""
    topology, lengths = Topology.grid(2, 2), lengths_of(1)
    use = laid_out(name, stages=stages, block_times=BLOCKS)
    by = dealing_of(use, topology)
    bins = by(lengths)
    assert pickle.loads(pickle.dumps(by))(lengths) == bins
    assert Counter(n for row in bins.single for bin in row for n in bin.documents) == Counter(range(len(lengths)))
    assert all(bins.tokens(bin) <= 400 for row in bins.single for bin in row)
    positions, pipelines = (4, 1) if stages == "world" else (2, 2)
    assert (bins.world_size, bins.positions) == (pipelines, positions) and len(bins.single) >= LEAST_PACKS * positions
    assert len(bins.single) % positions == 0
    schedule = schedule_of(use, topology, bins)
    verify(schedule, one_thread=True)
    assert seconds_of(schedule, bins) == pytest.approx(bins.seconds, rel=0.02)


def test_ordered_packs_stay_within_45_percent_of_even_packs() -> None:
    """Long documents leave bins uneven; a step is then shorter than by the worst of few orders, within 15 % of even."""
    use = laid_out("1f1b", block_times=BLOCKS)
    by = dealing_of(use, Topology.grid(4, 1), cap=500)
    for seed in range(4):
        bins = by([*lengths_of(seed), 480, 470])
        assert 1 < bins.stretch < 1.45
        assert bins.seconds == bins.stretch * bins.mean_seconds and bins.imbalance >= 1


def test_few_documents_leave_packs_empty_and_long_ones_are_refused() -> None:
    use = laid_out("1f1b", block_times=BLOCKS)
    by = dealing_of(use, Topology.grid(4, 1))
    bins = by([7, 300])
    assert sum(bool(bin.documents) for row in bins.single for bin in row) == 2 and len(bins.single) == 4 * LEAST_PACKS
    with pytest.raises(UserError, match="one of 401 tokens"):
        by([401])


def test_solved_order_of_equal_rows_refuses_packs() -> None:
    use = laid_out("solved", block_times=BLOCKS)
    with pytest.raises(UserError, match="generated where documents are dealt by time"):
        step_of_packs(llama(LAYERS), Topology.grid(2, 1), ScheduleSettings(), PacksForm(0, 8), strategy=use)


# slices


@pytest.mark.parametrize("cap", [4, 7, 100])
@pytest.mark.parametrize("mean", [0.0, 1.0, 30.0])
def test_slices_cover_a_document_in_order_within_the_cap(cap: int, mean: float) -> None:
    for length in range(4, 120, 5):
        spans = slices_of(length, cap, mean, WORK)
        assert spans[0][0] == 0 and spans[-1][1] == length and all(a[1] == b[0] for a, b in pairwise(spans))
        assert all(2 <= end - begin <= cap for begin, end in spans) and len(spans) > 1


@WAYS
def test_slices_verify_and_take_their_predicted_seconds(name: str, stages: str) -> None:
    """Training, and evaluation, which goes forward alone."""
    topology, lengths = Topology.grid(2, 2), [*lengths_of(2, 60), 1500, 700, 333]
    use = laid_out(name, stages=stages, block_times=BLOCKS)
    bins = dealing_of(use, topology, cuts=LONG)(lengths)
    assert sum(map(len, bins.slices)) >= 2 and all(bins.tokens(bin) <= 400 for row in bins.single for bin in row)
    tokens = Counter[int]()
    for row in bins.single:
        for bin in row:
            tokens.update({n: bins.tokens(bin) if bin.part else lengths[n] for n in bin.documents})
    assert tokens == Counter(dict(enumerate(lengths)))
    verify(schedule_of(use, topology, bins, training=False), one_thread=True)
    schedule = schedule_of(use, topology, bins)
    verify(schedule, one_thread=True)
    assert seconds_of(schedule, bins) == pytest.approx(bins.seconds, rel=0.02)
    assert bins.seconds >= bins.floor * (1 - 1e-9), "no deal is faster"


def test_documents_are_sliced_as_much_as_shortens_the_step_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where bins cost nothing besides their own."""
    monkeypatch.setattr(dealing, "OVERHEAD", 0)
    use, topology = laid_out("1f1b", block_times=BLOCKS), Topology.grid(4, 1)
    steps = [[*lengths_of(seed, 20), *[380] * count] for seed, count in enumerate((3, 6, 9, 12))]
    by = dealing_of(use, topology, cuts=LONG)
    chosen = [by(lengths).stretch for lengths in steps]
    alone = []
    for times in dealing.TRIED:
        monkeypatch.setattr(dealing, "TRIED", (times,))
        alone.append([by(lengths).stretch for lengths in steps])
    assert chosen == [min(tried) for tried in zip(*alone, strict=True)] and chosen != alone[0]


def test_slices_run_forward_in_order_and_backward_in_reverse() -> None:
    use, topology = laid_out("1f1b", block_times=BLOCKS), Topology.grid(2, 1)
    bins = dealing_of(use, topology, cuts=LONG)([1200, 50, 60, 70])
    schedule = schedule_of(use, topology, bins)
    (document,) = schedule.step.slices
    for program in schedule.programs:
        for op, wanted in ((Op.FORWARD, document), (Op.BACKWARD, document[::-1])):
            for block in {action.block for action in program if action.op is op} - {0, LAYERS + 1}:
                of_block = [a.micro_batch for a in program if (a.op, a.block) == (op, block)]
                assert [m for m in of_block if m in document] == list(wanted)
    memory = BlockMemory(8, {}, keys=4, key_gradients=8)
    said = costs(schedule, Widths(2, 4, 4, 2), activation_bytes=memory.activations(400))
    plain = dealing_of(use, topology)([100, 50, 60, 70])
    without = costs(schedule_of(use, topology, plain), Widths(2, 4, 4, 2), activation_bytes=memory.activations(400))
    held = 4 * 400 * len(document) * LAYERS // 2
    assert said.activation_bytes >= without.activation_bytes + held * 0.9


def test_last_stage_runs_a_document_backward_once_all_slices_arrived() -> None:
    """Earlier stages are ahead by what the largest document to come needs; all orders end."""
    layout = Layout.even(LAYERS + 2, 4)
    order = causal(one_f_one_b(layout, 12), [2, 3, 6])
    assert " ".join(map(str, order.compute[3][:6])) == "F3.0 F3.1 B3.1 B3.0 F3.2 F3.3"
    play_stages(layout, order, PipelineCosts((BlockTimes(1, 1, 1),) * (LAYERS + 2)))
    ahead = [next(at for at, work in enumerate(works) if work.kind == "B") for works in order.compute]
    assert ahead == sorted(ahead, reverse=True) and ahead[0] >= 6


def loads(count: int, slices: tuple[int, ...]) -> LaneLoad:
    """Bins that take equally long, in which a document's slices get smaller and whole documents are largest."""
    sizes = [1 - at / (2 * size) for size in slices for at in range(size)]
    return LaneLoad([1.0] * count, [*sizes, *[1.5] * (count - len(sizes))])


@pytest.mark.parametrize("hop", [0, 4, 12])
@pytest.mark.parametrize(
    ("layout", "slices"), [("0,5@0,1", (2, 3, 8)), ("0,3,5,7@0,1,1,0", (6, 2)), ("0,4,7@0,1,2", (9,))]
)
def test_listed_orders_keep_slices_in_order_and_are_not_longer(layout: str, slices: tuple, hop: int) -> None:
    """Every work once, slices forward in turn and back in reverse, and none waits for ever; within memory."""
    stages, block, load = Layout.parse(layout, LAYERS + 2), BlockTimes(1, 2, 1), loads(20, slices)
    given = PipelineCosts((BlockTimes(0, 0, 0), *[block] * LAYERS, BlockTimes(0, 0, 0)), hop=hop)
    base = arrange(stages, given, 20)
    order, plain = listed(stages, given, base, slices, load, LISTED), causal(base, slices)
    long, longer = (played(stages, one, given, load) for one in (order, plain))
    assert long <= longer and (long < longer or layout != "0,5@0,1")
    check_order(stages, order)
    ends, in_turn = [*accumulate(slices)], 0
    for works in order.compute:
        for kind, stage in {("F" if work.kind == "F" else "IB", work.stage) for work in works if work.kind != "W"}:
            done = [work.micro_batch for work in works if work.kind in kind and work.stage == stage]
            for size, end in zip(slices, ends, strict=True):
                part = [*range(end - size, end)]
                assert [m for m in done if m in part] == (part if kind == "F" else part[::-1])
                in_turn += kind != "F"
    assert in_turn == stages.stages * len(slices)
    room = max(peak(stages, plain, given))
    less = listed(stages, replace(given, memory=room), base, slices, load, LISTED)
    assert max(peak(stages, less, given)) <= room


@pytest.mark.parametrize(("size", "slices"), [(2, ()), (2, (3,)), (2, (4, 2, 2)), (3, ()), (3, (2, 3)), (4, ())])
def test_delayed_weight_gradients_use_little_memory_and_no_more_time(size: int, slices: tuple[int, ...]) -> None:
    """Beside orders made as if what W needs took no memory."""
    block, layout = BlockTimes(1000, 2000, 1000, 1, 16), Layout.even(LAYERS + 2, size)
    costs = PipelineCosts((BlockTimes(0, 0, 0), *[block] * LAYERS, BlockTimes(0, 1200, 0)), hop=500)
    blind = replace(costs, blocks=tuple(replace(block, kept_for_weights=0) for block in costs.blocks))
    load = LaneLoad([1.0] * 7 * size, [1.0] * 7 * size)
    orders = [
        listed(layout, each, arrange(layout, each, 7 * size), slices, load, LISTED)
        if slices
        else arrange(layout, each, 7 * size)
        for each in (blind, costs)
    ]
    free, lean = ((played(layout, order, costs, load), max(peak(layout, order, costs))) for order in orders)
    stages = costs.stages(layout)
    few = (2 * size + 1) * (max(stages.kept) + max(stages.kept_for_weights))
    assert lean[0] <= 1.002 * free[0] and lean[1] <= few and (slices or lean[1] < 0.7 * free[1])


def test_activation_hops_share_a_link_one_after_the_other() -> None:
    """Three that are there at once, the second twice as large. Then two that leave a node between two others; and one
    way within a node, which has its own.
    """
    layout, costs = Layout.even(4, 2), PipelineCosts((BlockTimes(0, 0, 0),) * 3 + (BlockTimes(1, 0, 0),), hop=10)
    order = Order.parse("F0.0 F0.1 F0.2|F1.0 F1.1 F1.2;;")
    ends = [played(layout, shortened(order, most), costs, LaneLoad([1] * 3, [1, 2, 1])) for most in (1, 2, 3)]
    assert ends == [11, 31, 41]
    blocks = (BlockTimes(0, 0, 0), BlockTimes(0, 3, 0), BlockTimes(0, 0, 0), BlockTimes(1, 0, 0))
    between = PipelineCosts((*blocks, BlockTimes(0, 0, 0)), hop=9, link=6)
    works = "B0.0|F1.1 B1.0|F2.1;;"
    assert [
        played(Layout.parse("0,1,3@0,1,2", 5), Order.parse(works), costs, LaneLoad([1, 1], [1, 1]))
        for costs in (between, replace(between, near_hop=1, nodes=(0, 1, 1)))
    ] == [12, 9]


def shortened(order: Order, most: int) -> Order:
    """The same with so many micro-batches."""
    return Order(tuple(tuple(work for work in works if work.micro_batch < most) for works in order.compute))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_link_clock_of_the_dealing_agrees_with_the_simulator(size: int) -> None:
    """Of uneven bins over slow links, in the order that is made for them; nearly, where what a port leaves goes on."""
    topology = Topology.grid(size, 1)
    use = laid_out("generated", stages="nodes", block_times=f"{BLOCKS};hop=12;link=8")
    bins = dealing_of(use, topology, cuts=LONG)([*lengths_of(2, 60), 1500, 700, 333])
    assert bins.orders and bins.form.orders == bins.orders and all(bins.slices)
    schedule, mean = schedule_of(use, topology, bins), sum(bins.lengths) / len(bins.single)
    verify(schedule, one_thread=True)
    layer = BlockCost(Seconds(0, 0.01, 0.0001), Seconds(0, 0.03, 0.0003))
    model = CostModel((BlockCost(), *[layer] * LAYERS, BlockCost()), LinkModel(1.0), FREE, boundary_bytes=8)
    model = model.with_packs(bins)
    unit = sum(model.forward_s(0, 1, m) for m in range(len(bins.single))) / len(bins.single)
    model = replace(model, between=LinkModel(model.boundary(0) / bins.tokens(bins.single[0][0]) * mean / (8 * unit)))
    shape = use.shape(schedule.step.model, topology)
    lane = [row[0] for row in bins.single]
    load = LaneLoad([bins.time(b) for b in lane], [bins.tokens(b) / mean for b in lane])
    times = sum(load.times) / len(lane)
    load = LaneLoad([time / times for time in load.times], load.sizes)
    said = played(shape.layout, Order.parse(bins.orders[0]), shape.costs, load) * unit
    assert play(schedule, model, steps=1).makespan == pytest.approx(said, rel=0.01 if size < 4 else 0.03)


def test_slow_links_run_short_documents_first() -> None:
    """The first stage would have to send all of the long one before anything comes back. Bins of whole documents are
    no longer than slices.
    """
    topology, use = Topology.grid(2, 1), laid_out("1f1b", block_times=f"{BLOCKS};hop=8")
    bins = dealing_of(use, topology, cuts=LONG)([1500, 600, 400, *lengths_of(3, 40)])
    verify(schedule_of(use, topology, bins), one_thread=True)
    (slices,), times = bins.slices, [bins.time(row[0]) for row in bins.single]
    assert slices == tuple(sorted(slices)) and len(slices) > 1
    assert max(times[sum(slices) :]) < 1.25 * max(times[: sum(slices)])


def test_schedule_that_loses_keys_or_key_gradients_is_refused() -> None:
    use, topology = laid_out("zero-bubble", block_times=BLOCKS), Topology.grid(2, 1)
    schedule = schedule_of(use, topology, dealing_of(use, topology, cuts=LONG)([1200, 50, 60, 70]))
    verify(schedule, one_thread=True)
    first, second, *_ = schedule.step.slices[0]

    def mutant(change) -> Schedule:
        return replace(schedule, programs=tuple(tuple(map(change, program)) for program in schedule.programs))

    def unread(action):
        if action.op is Op.FORWARD and action.micro_batch == second:
            return replace(action, reads=tuple(b for b in action.reads if b != keys(first, action.block)))
        return action

    def early(action):
        if action.op is Op.BACKWARD and action.micro_batch == second:
            return replace(action, frees=(*action.frees, keys(first, action.block)))
        return action

    def unadded(action):
        lost = action.op is Op.BACKWARD and action.micro_batch == second
        return replace(action, writes=tuple(b for b in action.writes if not (lost and b.kind is Kind.KEY_GRADIENTS)))

    for change in (unread, early, unadded):
        with pytest.raises(ScheduleError):
            verify(mutant(change), one_thread=True)

    def swapped(program):
        backward = [at for at, a in enumerate(program) if a.op is Op.BACKWARD and a.micro_batch in (first, second)]
        order = dict(zip(backward, backward[::-1], strict=True))
        return tuple(program[order.get(at, at)] for at in range(len(program)))

    with pytest.raises(ScheduleError):
        verify(replace(schedule, programs=tuple(map(swapped, schedule.programs))), one_thread=True)


def test_stages_without_memory_for_all_slices_are_refused_with_a_way_out() -> None:
    use = laid_out("1f1b", block_times=f"{BLOCKS};memory=24")
    by = dealing_of(use, Topology.grid(2, 1), cuts=LONG)
    assert by([400, 300, 200, 100]).slices
    with pytest.raises(UserError, match=r"slices, which stages.*tawpipe-spread"):
        by([4000, 50])
