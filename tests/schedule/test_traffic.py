"""Elements over the slow links: what the actions move is what the formulas and the papers say."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings

from schedules import SCOPED, make, schedules
from tawpipe.errors import UserError
from tawpipe.schedule.buffers import Kind
from tawpipe.schedule.link_traffic import LinkTraffic
from tawpipe.schedule.sizes.traffic import link_elements
from tawpipe.schedule.spec import BlockSpec, ModelSpec, UnitSpec
from tawpipe.schedule.step import Schedule
from tawpipe.topology import Topology


def even(layers: int, elements: int = 5040) -> ModelSpec:
    """Layers of one size that every cluster here divides, between an embedding and a head of nothing."""
    units = [UnitSpec(elements, True, (layer,)) for layer in range(1, layers + 1)]
    blocks = [BlockSpec((layer,), "layer") for layer in range(layers)]
    ends = (BlockSpec((), "embedding", False, False), BlockSpec((), "head"))
    return ModelSpec((ends[0], *blocks, ends[1]), tuple(units))


def total(schedule: Schedule) -> Fraction:
    """Elements that a node sends in a step over elements of the model, averaged over the nodes."""
    links = link_elements(schedule)
    sent = sum(link.weights_sent + link.gradients_sent for link in links)
    return Fraction(sent, len(links) * sum(unit.numel for unit in schedule.model.units))


def formula(schedule: Schedule) -> tuple[LinkTraffic, ...] | None:
    return schedule.step.strategy.traffic(schedule.step, training=schedule.training)


@settings(max_examples=150, deadline=None)
@given(schedule=schedules())
def test_traffic_of_actions_equals_the_formula(schedule):
    links = link_elements(schedule)
    assert links == formula(schedule)
    assert sum(link.weights_sent for link in links) == sum(link.weights_received for link in links)
    assert sum(link.gradients_sent for link in links) == sum(link.gradients_received for link in links)


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("strategy", SCOPED)
def test_node_receives_each_unit_twice_and_its_gradient_once_per_round(strategy, rounds):
    assert total(make(even(6), 3, 2, 6 * rounds, strategy=strategy, reuse=False)) == 3 * rounds * Fraction(2, 3)


@pytest.mark.parametrize("strategy", ["tawpipe-spread", "tawpipe-striped"])
def test_buffered_weights_at_a_turning_point_are_not_moved_again(strategy):
    """Three buffers of units: at each of five turns the next three visits need no transfer, of slices one more each."""
    rounds, units = 3, 12
    schedule = make(even(units), 3, 2, 6 * rounds, strategy=strategy, look_ahead=2)
    moved = sum(link.weights_received for link in link_elements(schedule)) / 5040 / 3 / Fraction(2, 3)
    assert moved == 2 * rounds * units - (2 * rounds - 1) * 4


@pytest.mark.parametrize("local", [1, 2])
@pytest.mark.parametrize("strategy", ["tawpipe-spread", "tawpipe-striped"])
def test_weights_move_once_with_a_buffer_for_every_shard(strategy, local):
    most, least = (make(even(12), 3, local, 9 * local, strategy=strategy, step_cache=n) for n in (12, 0))
    assert total(most) == (1 + 3) * Fraction(2, 3)
    assert most.pool_elements(0, Kind.WEIGHT) > least.pool_elements(0, Kind.WEIGHT)


@pytest.mark.parametrize("knobs", [{"strategy": "tawpipe-whole"}, {"strategy": "flat"}, {"reuse": False}])
def test_step_cache_is_refused_where_nothing_can_be_kept(knobs):
    with pytest.raises(UserError, match="step_cache"):
        make(even(4), 2, 2, 4, step_cache=1, **knobs)


@pytest.mark.parametrize("strategy", ["flat", *SCOPED, "hsdp"])
def test_reuse_moves_fewer_bytes_without_more_buffers(strategy):
    with_it, without = (make(even(12), 3, 2, 12, strategy=strategy, reuse=reuse) for reuse in (True, False))
    assert total(with_it) <= total(without) if strategy == "hsdp" else total(with_it) < total(without)
    buffers = [pool for pools in with_it.pools for pool in pools if pool.kind == "weight"]
    assert max(pool.count for pool in buffers) <= with_it.step.settings.look_ahead + 1


@pytest.mark.parametrize("strategy", SCOPED)
def test_node_moves_each_unit_and_gradient_once_at_scope_step(strategy):
    schedule = make(even(6), 3, 2, 24, strategy=strategy, step_cache="all", gradients_scope="step")
    assert total(schedule) == 2 * Fraction(2, 3)


def test_hsdp_replicas_move_only_gradients():
    once, often = (make(even(6), 3, 2, 24, strategy="hsdp", gradients_scope=s) for s in ("step", "visit"))
    assert total(once) == 2 * Fraction(2, 3)
    assert total(often) == 4 * 2 * Fraction(2, 3)
    assert all(link.weights_sent == 0 for link in link_elements(once))


def test_flat_sharding_sends_1_25_times_the_weights_of_tawpipe_spread():
    """(1-1/D) of every visited unit enters a node; flat sharding passes (P-1)/P of it: at 3 x 2 a ratio of 1.25."""
    spread, flat = (total(make(even(6), 3, 2, 6, strategy=p, reuse=False)) for p in ("tawpipe-spread", "flat"))
    assert flat / spread == Fraction(5, 4)


def test_weipipe_moves_1_5_times_the_units_of_tawpipe_spread():
    """36 H^2 against 24 H^2 at D = 3, once filling and draining are outweighed by many rounds."""
    rounds = 40
    ring, spread = (
        total(make(even(6), 3, 2, 6 * rounds, strategy=p, reuse=False)) for p in ("weipipe", "tawpipe-spread")
    )
    assert float(ring / rounds) == pytest.approx(3, rel=0.03)
    assert float(ring / spread) == pytest.approx(1.5, rel=0.03)


def test_ungrouped_tawpipe_spread_moves_as_much_as_flat_sharding():
    grouped, alone = (make(even(6), nodes, local, 6, strategy="tawpipe-spread") for nodes, local in ((3, 2), (6, 1)))
    flat = make(even(6), 3, 2, 6, strategy="flat")
    assert link_elements(alone, physical=grouped.topology) == link_elements(flat)


def test_ungrouped_homes_send_to_every_rank_separately():
    alone = make(even(6), 4, 1, 4, strategy="tawpipe-whole", reuse=False)
    physical = Topology.grid(2, 2)
    for node, link in enumerate(link_elements(alone, physical=physical)):
        # From each of its homes to the two ranks elsewhere, and to each of its ranks from the homes elsewhere; twice.
        homes = sum(home.ranks[0] in physical.nodes[node] for home in alone.homes)
        assert link.weights_sent == 2 * 2 * homes * 5040
        assert link.weights_received == 2 * 2 * (6 - homes) * 5040


def test_single_node_has_no_link_traffic():
    for strategy in ("tawpipe-spread", "flat", "hsdp", "weipipe", "tawpipe-whole"):
        for training in (True, False):
            schedule = make(even(6), 1, 4, 8, training=training, strategy=strategy)
            assert link_elements(schedule) == formula(schedule) == (LinkTraffic(),)
