"""Activation pipelines: every task once, in an order that can be, and as long as theory says."""

from __future__ import annotations

from collections import Counter

import pytest

from schedules import llama, step_for
from tawpipe.errors import UserError
from tawpipe.schedule.actions import Op
from tawpipe.schedule.buffers import Kind
from tawpipe.schedule.routes.pipelines import AXES, PIPELINES, Stages, _orders
from tawpipe.schedule.strategies import ActivationPipeline, build
from tawpipe.simulate import BlockCost, CostModel, LinkModel, Seconds, play
from tawpipe.topology import Topology

FAST = LinkModel(1e12)


def pipeline(kind: str, nodes: int, local: int, count: int, *, layers: int = 8, axis: str = "world", **settings):
    topology = Topology.grid(nodes, local)
    return build(step_for(llama(layers), topology, count, use=ActivationPipeline(kind, axis, **settings)))


def costs(layers: int, forward: float = 1.0, backward: float = 3.0, between: LinkModel = FAST) -> CostModel:
    layer = BlockCost(Seconds(forward), Seconds(backward))
    return CostModel((BlockCost(), *[layer] * layers, BlockCost()), between, FAST, boundary_bytes=1)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("kind", PIPELINES)
def test_every_block_computes_every_micro_batch_once(kind, axis):
    schedule = pipeline(kind, 2, 2, 8, axis=axis)
    forward, backward = Counter(), Counter()
    for program in schedule.programs:
        for action in program:
            if action.op is Op.FORWARD:
                forward[action.block, action.micro_batch] += 1
            if action.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
                backward[action.block, action.micro_batch] += 1
    assert forward == {(b, m): 1 for b in range(9) for m in range(8)}
    assert backward == {(b, m): 1 for b in range(10) for m in range(8)}
    timeline = play(schedule, costs(8))
    assert timeline.step_seconds > 0
    held = {schedule.homes[unit].ranks for unit in range(len(schedule.homes))}
    assert all(len(ranks) == (1 if axis == "world" else 2) for ranks in held)


def test_the_bubble_of_1f1b():
    """(P - 1) / (M + P - 1) of a step that begins and ends with nothing under way."""
    ranks, count, layers = 4, 12, 8
    timeline = play(pipeline("1f1b", ranks, 1, count, layers=layers), costs(layers), steps=1)
    each = layers / ranks * 4.0
    assert timeline.makespan == pytest.approx((count + ranks - 1) * each, rel=1e-6)


def test_more_stages_mean_a_smaller_bubble():
    seconds = [play(pipeline(kind, 4, 1, 8), costs(8), steps=1).makespan for kind in PIPELINES]
    assert seconds[0] > seconds[1] > 8 * 2 * 4.0
    assert seconds[2] < seconds[1]


def test_activations_cross_the_links():
    schedule = pipeline("1f1b", 3, 1, 6, layers=6)
    moved = play(schedule, costs(6), steps=2).node_bytes[1]
    assert [(node.sent, node.received) for node in moved] == [(6, 6), (12, 12), (6, 6)]


def test_1f1b_holds_as_many_micro_batches_as_stages_follow():
    schedule = pipeline("1f1b", 4, 1, 12, layers=4)
    assert [schedule.peak_activations(rank, {Kind.INPUT: 1}) for rank in range(4)] == sorted(
        (schedule.peak_activations(rank, {Kind.INPUT: 1}) for rank in range(4)), reverse=True
    )


def test_orders_of_the_v():
    shape = Stages(Topology.grid(4, 1), "world", 2, True)
    assert [shape.place(stage) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    orders = _orders("zero-bubble", shape, 10)
    assert all(Counter(task.kind for task in order) == {"F": 20, "I": 20, "W": 20} for order in orders)


def test_what_cannot_be_built():
    with pytest.raises(UserError, match="at least 12, one per stage"):
        pipeline("interleaved-1f1b", 3, 2, 12, layers=8)
    with pytest.raises(UserError, match="a multiple of the 3"):
        pipeline("interleaved-1f1b", 3, 1, 4, layers=8)
