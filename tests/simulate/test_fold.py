"""One rank that stands for all: the same times as playing all of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import llama, step_for
from tawpipe.plan.cost.predict import foldable, stand_ins
from tawpipe.schedule.pipelines.orders import makes_groups
from tawpipe.schedule.pipelines.positions import Positions
from tawpipe.schedule.strategies.build import build
from tawpipe.simulate import CostModel, LinkModel, play
from tawpipe.topology import Topology


def costs(layers: int, *, shared: bool = True, **settings) -> CostModel:
    return CostModel.timed(
        layers=layers,
        forward_s=1e-3,
        backward_s=3e-3,
        between=LinkModel(2e6, 2e-5, shared=shared),
        inside=LinkModel(5e7, 5e-6, shared=shared),
        update_s=1e-8,
        reduce_scatter="ring",
        **settings,
    )


@settings(max_examples=25, deadline=None)
@given(
    nodes=st.integers(1, 3),
    local=st.integers(1, 3),
    kind=st.sampled_from([("tawpipe-spread", "visit"), ("tawpipe-step", None), ("flat", None), ("hsdp", "visit")]),
    per_rank=st.integers(1, 4),
    per_visit=st.integers(1, 2),
    look_ahead=st.integers(1, 3),
    shared=st.booleans(),
    exact=st.booleans(),
)
def test_folded_simulation_of_one_rank_equals_all_ranks(
    nodes, local, kind, per_rank, per_visit, look_ahead, shared, exact
):
    strategy, scope = kind
    topology, prices = Topology.grid(nodes, local), costs(4, shared=shared)
    step = step_for(
        llama(4),
        topology,
        per_rank * topology.world_size,
        strategy=strategy,
        micro_batches_per_visit=per_visit,
        look_ahead=look_ahead,
        gradients_scope=scope,
        weights_compression="exact" if exact and strategy == "tawpipe-step" else "none",
    )
    assert foldable(step, prices)
    whole, folded = play(build(step), prices), play(build(step, ranks=stand_ins(step)), prices)
    assert folded.step_seconds == pytest.approx(whole.step_seconds, rel=1e-6)
    assert folded.exposed_communication_s == pytest.approx(whole.exposed_communication_s, rel=1e-6, abs=1e-9)
    assert folded.idle_s == pytest.approx(whole.idle_s, rel=1e-6, abs=1e-9)
    one, all_of_them = folded.node_bytes[2][0], whole.node_bytes[2][0]
    assert (one.sent, one.received) == pytest.approx((all_of_them.sent, all_of_them.received))


@settings(max_examples=25, deadline=None)
@given(
    nodes=st.integers(2, 3),
    local=st.integers(2, 3),
    kind=st.sampled_from(["1f1b", "interleaved-1f1b", "zero-bubble"]),
    axis=st.sampled_from(["nodes", "locals"]),
    each=st.integers(1, 7),
    shared=st.booleans(),
)
def test_folded_simulation_of_one_pipeline_equals_all_pipelines(nodes, local, kind, axis, each, shared):
    topology, prices = Topology.grid(nodes, local), costs(6, shared=shared)
    positions = Positions(topology, axis)
    each = each if makes_groups(each, positions.size) else positions.size
    step = step_for(llama(6), topology, each * positions.replicas, strategy=kind, stages=axis)
    assert foldable(step, prices)
    whole, folded = play(build(step), prices), play(build(step, ranks=stand_ins(step)), prices)
    assert len(folded.schedule.played) == positions.size
    assert folded.step_seconds == pytest.approx(whole.step_seconds, rel=1e-6)
    assert folded.exposed_communication_s == pytest.approx(whole.exposed_communication_s, rel=1e-6, abs=1e-9)
    assert folded.idle_s == pytest.approx(whole.idle_s, rel=1e-6, abs=1e-9)
    for one, real in zip(folded.node_bytes[2], whole.node_bytes[2], strict=True):
        assert axis == "locals" or (one.sent, one.received) == pytest.approx((real.sent, real.received))


@pytest.mark.parametrize(
    ("nodes", "local", "groups"), [(4, 2, "4/2/4"), (2, 4, "2/1/4"), (4, 1, "2/2/4"), (1, 4, "2/4/4")]
)
@pytest.mark.parametrize("shared", [True, False])
def test_folded_simulation_of_one_rank_equals_all_groups(nodes, local, groups, shared):
    topology, prices = Topology.grid(nodes, local), costs(4, shared=shared)
    step = step_for(llama(4), topology, 2 * topology.world_size, strategy="tawpipe-groups", groups=groups)
    assert foldable(step, prices)
    whole, folded = play(build(step), prices), play(build(step, ranks=stand_ins(step)), prices)
    assert folded.step_seconds == pytest.approx(whole.step_seconds, rel=1e-6)
    one, real = folded.node_bytes[2][0], whole.node_bytes[2][0]
    assert (one.sent, one.received, one.inside) == pytest.approx((real.sent, real.received, real.inside))


def test_uneven_steps_cannot_be_folded():
    def step(strategy, count=8):
        return step_for(llama(4), Topology.grid(2, 2), count, strategy=strategy)

    even = step("tawpipe-spread")
    assert foldable(even)
    assert not foldable(step("tawpipe-striped")) and not foldable(step("weipipe"))
    assert not foldable(step("tawpipe-spread", 7))
    assert not foldable(even, costs(4, compute_factor={1: 2.0}))
    assert not foldable(even, costs(4, between_of={0: LinkModel(1e6)}))


@pytest.mark.slow
def test_thousands_of_devices_are_simulated_by_one_rank():
    layers = 126
    step = step_for(llama(layers), Topology.grid(512, 8), 16 * 4096, strategy="tawpipe-spread")
    assert len(stand_ins(step)) == 1
    timeline = play(build(step, ranks=stand_ins(step)), costs(layers), steps=3)
    assert timeline.step_seconds >= 16 * layers * 4e-3
