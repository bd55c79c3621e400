"""Bounds: below what the clock says, and equal to what is known about the rivals."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import NAMES, shapes, step_for
from tawpipe.errors import UserError
from tawpipe.schedule.proof.verify import verify
from tawpipe.schedule.strategies.build import build, step_of
from tawpipe.simulate import LinkModel, play
from tawpipe.topology import Topology
from tawpipe_lab.bounds import (
    PIPELINES,
    SHARDED,
    schedule_bounds,
    sharded_bounds,
    shipped_bounds,
    workload_costs,
    workload_model,
)
from tawpipe_lab.critical import dependency_bound
from tawpipe_lab.rivals.traffic import ShardedTraffic
from tawpipe_lab.workload import TimedWorkload

THREE_BY_TWO = Topology.grid(3, 2)
LINK = LinkModel(50e6)


def workload(micro_batches: int = 12, *, layers: int = 12, scale: float = 1.0) -> TimedWorkload:
    """Layers of 8 MB, 0.1 and 0.3 s, activations a third of a layer."""
    return TimedWorkload(layers, 8_000_000, 0.1 * scale, 0.2 * scale, 0.1 * scale, micro_batches, 2_666_666)


def schedule_of(work: TimedWorkload, topology: Topology, strategy: str = "tawpipe-spread", **settings):
    return build(step_for(workload_model(work), topology, work.micro_batches, strategy=strategy, **settings))


def scope_bounds(
    work: TimedWorkload, topology: Topology, between: LinkModel, weights="visit", gradients="visit", each=1
):
    """The least that any schedule needs whose nodes keep copies for a visit or a step, whatever its placement.

    A node is home to 1/D of the weights on average, so that (1 - 1/D) W enter it whenever its other weights are gone,
    and as many gradients leave it. Where every node is home to all weights (``replica``), gradients are all-reduced.

    Args:
        each: micro-batches of a visit.
    """
    share = 1 - 1 / topology.num_nodes
    kind = ShardedTraffic(
        rounds=max(1, -(-work.micro_batches // (topology.world_size * each))),
        forward=0.0 if weights == "replica" else share,
        backward=share if weights == "visit" else 0.0,
        gradients=2 * share if weights == "replica" else share,
        reduce_last=gradients == "step",
        once=weights == "step",
    )
    return sharded_bounds(work, topology, between, kind)


@pytest.mark.parametrize("strategy", NAMES)
def test_workload_of_every_strategy_is_scheduled_and_verified(strategy):
    verify(schedule_of(workload(), THREE_BY_TWO, strategy, micro_batches_per_visit=2))


@settings(max_examples=12, deadline=None)
@given(
    shape=shapes(),
    rate=st.sampled_from([5e6, 20e6, 100e6]),
    latency=st.sampled_from([0.0, 0.01]),
    duplex=st.booleans(),
    update_s=st.sampled_from([0.0, 1e-8]),
)
def test_physical_bound_is_below_dependency_bound_and_simulated_time(shape, rate, latency, duplex, update_s):
    work = workload(sum(map(len, shape.micro_batches)), layers=shape.model.num_layers)
    between = LinkModel(rate, latency, duplex)
    costs = workload_costs(work, between=between, inside=LinkModel(2e9), update_s=update_s)
    chosen = shape.settings
    schedule = build(step_of(workload_model(work), shape.topology, chosen, shape.micro_batches))
    bounds = schedule_bounds(schedule, costs)
    played = play(schedule, costs, steps=1).makespan
    assert bounds.physical_s <= bounds.dependency_s * (1 + 1e-9)
    assert bounds.dependency_s <= played * (1 + 1e-9)
    # The gradients of a ring add up on their way, so they leave less often than they are made; groups may keep all that
    # others bring.
    kept = chosen.step_cache == "all"
    if chosen.strategy not in ("weipipe", "tawpipe-groups") and (kept or not chosen.reuse):
        least = scope_bounds(
            work,
            shape.topology,
            between,
            weights="replica" if chosen.strategy == "hsdp" else "step" if kept else "visit",
            gradients=chosen.gradients_scope,
            each=chosen.micro_batches_per_visit,
        )
        assert least.physical_s <= bounds.physical_s * (1 + 1e-6)
        assert least.dependency_s <= played * (1 + 1e-6)
    steps = play(schedule, costs, steps=5)
    steady = dependency_bound(schedule, costs, steady=True)
    assert steady <= (steps.step_ends[3] - steps.step_ends[0]) / 3 * (1 + 1e-9)


def test_bounds_of_one_device_equal_its_computing_time():
    work = workload(4, layers=3)
    costs = workload_costs(work, between=LINK, inside=LINK)
    bounds = schedule_bounds(schedule_of(work, Topology.grid(1, 1)), costs)
    assert [bounds.physical_s, bounds.dependency_s] == [pytest.approx(work.compute_s)] * 2
    for name in ("fsdp2", "hsdp", "1f1b", "zbv"):
        assert shipped_bounds(name, work, Topology.grid(1, 1), LINK).dependency_s == pytest.approx(work.compute_s)


def test_dependency_bound_adds_first_gather_and_last_reduction():
    """Compute-bound: the first layer's weights (two thirds of 8 MB) come first, its gradients leave last; a layer's
    gather and reduction inside the node besides."""
    work = workload()
    costs = workload_costs(work, between=LINK, inside=LinkModel(2e9))
    bounds = schedule_bounds(schedule_of(work, THREE_BY_TWO, micro_batches_per_visit=2), costs)
    edge = 2 / 3 * 8e6 / 50e6
    assert bounds.compute_s == pytest.approx(9.6)
    assert bounds.dependency_s == pytest.approx(9.6 + 2 * edge, rel=1e-3)
    assert scope_bounds(work, THREE_BY_TWO, LINK, each=2).dependency_s == (pytest.approx(9.6 + 2 * edge))


def test_kept_weights_are_bounded_by_the_first_and_last_pass():
    """Link-bound, four rounds: all weights come during the first forward pass, all gradients leave during the last
    backward pass. 96 MB x 2/3 at 50 MB/s each way is 1.28 s, in which 11 layers' passes of 0.025 and 0.075 s hide."""
    work = workload(24, scale=0.25)
    bounds = scope_bounds(work, THREE_BY_TWO, LINK, weights="step", gradients="step")
    assert bounds.compute_s == pytest.approx(4.8)
    assert bounds.dependency_s == pytest.approx(1.28 + 4.8 + 1.28 - 11 * 0.1)
    visit = scope_bounds(work, THREE_BY_TWO, LINK)
    assert visit.physical_s == pytest.approx(4 * 3 * 1.28)


def test_flat_ring_sends_a_quarter_more_than_a_hierarchy():
    """(P-1)/P against 1 - 1/D at 3 x 2. Of what torch ships, two rounds keep the last layer twice, the first once."""
    work = workload()
    flat, spread = (
        schedule_bounds(
            schedule_of(work, THREE_BY_TWO, p, reuse=False),
            workload_costs(work, between=LINK, inside=LinkModel(2e9)),
        )
        for p in ("flat", "tawpipe-spread")
    )
    assert flat.sent_bytes[0] / spread.sent_bytes[0] == pytest.approx(1.25, rel=1e-3)
    assert shipped_bounds("fsdp2", work, THREE_BY_TWO, LINK).sent_bytes[0] == pytest.approx(
        flat.sent_bytes[0] * (1 - 3 / 72), rel=1e-3
    )


def test_knobs_of_sharding_rivals_change_the_bytes_sent_between_nodes():
    work = workload(24)

    def sent(name, **knobs):
        return shipped_bounds(name, work, THREE_BY_TWO, LINK, knobs).sent_bytes[0] / (12 * 8e6)

    ring = 5 / 6
    assert sent("fsdp2") == pytest.approx(ring * (4 * (3 - 1 / 12) - 3 / 12))
    assert sent("fsdp2", micro_batches_per_gather=2) == pytest.approx(ring * (2 * (3 - 1 / 12) - 1 / 12))
    assert sent("fsdp2", keep_weights=True, reduce_every_round=False) == pytest.approx(ring * 2)
    assert sent("fsdp2-node") == pytest.approx(ring * (4 * 2 - 3 / 12))
    assert sent("fsdp2-hierarchical") == pytest.approx(2 / 3 * (4 * (3 - 1 / 12) - 3 / 12))
    assert sent("hsdp") == pytest.approx(2 * 2 / 3)


def test_pipeline_bounds_include_their_bubbles():
    """(M + (P-1)/v) / M of the computing, and activations over the borders; ZBV fills the end with weight gradients."""
    work = TimedWorkload(12, 8_000_000, 0.1, 0.2, 0.1, 12, 0)
    bounds = {name: shipped_bounds(name, work, THREE_BY_TWO, LINK) for name in PIPELINES}
    assert bounds["1f1b"].dependency_s == pytest.approx(9.6 * 17 / 12)
    assert bounds["interleaved-1f1b"].dependency_s == pytest.approx(9.6 * 14.5 / 12)
    assert bounds["zbv"].dependency_s == pytest.approx(9.6 + 5 * 0.1)
    assert all(b.physical_s == pytest.approx(9.6) for b in bounds.values())


def test_pipelines_send_activations_over_the_borders_of_their_nodes():
    work = workload()
    one = 12 * work.activation_bytes
    assert shipped_bounds("1f1b", work, THREE_BY_TWO, LINK).sent_bytes == (one, 2 * one, one)
    # Twice down, and once from the last node to the first one; every gradient the other way.
    assert shipped_bounds("interleaved-1f1b", work, THREE_BY_TWO, LINK).sent_bytes == (3 * one, 4 * one, 3 * one)
    assert shipped_bounds("zbv", work, THREE_BY_TWO, LINK).sent_bytes == (2 * one, 4 * one, 2 * one)


def test_bounds_are_below_measured_step_times():
    """Seconds per step that were measured in such a cluster, with 400 Mbit/s between the nodes."""
    work = workload()
    readings = {"fsdp2": 25.65, "hsdp": 14.03, "1f1b": 14.43, "interleaved-1f1b": 12.57, "zbv": 12.05}
    for name, seconds in readings.items():
        assert 9.6 <= shipped_bounds(name, work, THREE_BY_TWO, LINK).dependency_s <= seconds


def test_unknown_strategy_name_is_named():
    with pytest.raises(UserError, match="strategy"):
        shipped_bounds("gpipe", workload(), THREE_BY_TWO, LINK)


def test_every_rival_has_bounds():
    for name in (*SHARDED, *PIPELINES):
        bounds = shipped_bounds(name, workload(48), THREE_BY_TWO, LINK)
        assert 0 < bounds.physical_s <= bounds.dependency_s
