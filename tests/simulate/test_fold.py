"""One rank that stands for all: the same times as playing all of them."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tawpipe.schedule.build import build_training

from schedules import llama
from tawpipe.schedule.spec import Knobs, share_micro_batches
from tawpipe.simulate import CostModel, LinkModel, play
from tawpipe.simulate.fold import build_folded, foldable
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
    strategy=st.sampled_from(["tawpipe-spread", "flat", "hsdp"]),
    per_rank=st.integers(1, 4),
    per_visit=st.integers(1, 2),
    look_ahead=st.integers(1, 3),
    shared=st.booleans(),
)
def test_one_rank_takes_as_long_as_all(nodes, local, strategy, per_rank, per_visit, look_ahead, shared):
    topology = Topology.grid(nodes, local)
    knobs = Knobs(
        strategy,
        share_micro_batches(per_rank * topology.world_size, topology.world_size),
        micro_batches_per_visit=per_visit,
        look_ahead=look_ahead,
    )
    model, prices = llama(4), costs(4, shared=shared)
    assert foldable(topology, knobs, prices)
    whole = play(build_training(model, topology, knobs), prices)
    folded = play(build_folded(model, topology, knobs), prices)
    assert folded.step_seconds == pytest.approx(whole.step_seconds, rel=1e-6)
    assert folded.exposed_communication_s == pytest.approx(whole.exposed_communication_s, rel=1e-6, abs=1e-9)
    assert folded.idle_s == pytest.approx(whole.idle_s, rel=1e-6, abs=1e-9)
    one, all_of_them = folded.node_bytes[2][0], whole.node_bytes[2][0]
    assert (one.sent, one.received) == pytest.approx((all_of_them.sent, all_of_them.received))


def test_what_cannot_be_folded():
    even = Knobs("tawpipe-spread", share_micro_batches(8, 4))
    assert not foldable(Topology.grid(2, 2), Knobs("tawpipe-striped", even.micro_batches))
    assert not foldable(Topology.grid(2, 2), Knobs("tawpipe-spread", share_micro_batches(7, 4)))
    assert not foldable(Topology.grid(2, 2), even, costs(4, compute_factor={1: 2.0}))
    assert not foldable(Topology.grid(2, 2), even, costs(4, between_of={0: LinkModel(1e6)}))


def test_thousands_of_devices_take_seconds():
    topology, layers = Topology.grid(512, 8), 126
    knobs = Knobs("tawpipe-spread", share_micro_batches(64 * 4096, 4096))
    begin = time.monotonic()
    timeline = play(build_folded(llama(layers), topology, knobs), costs(layers), steps=3)
    assert time.monotonic() - begin < 60
    assert timeline.step_seconds >= 64 * layers * 4e-3
