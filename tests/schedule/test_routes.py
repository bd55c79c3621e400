"""Routes by themselves: what they bring is whole, everything comes once, and every gradient reaches its home once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from schedules import llama, step_for
from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.buffers import Buffer, home_gradient, home_weight
from tawpipe.schedule.placement import Home
from tawpipe.schedule.routes.collective import CollectiveRoute
from tawpipe.schedule.routes.route import Pools, Route, Tour
from tawpipe.schedule.routes.staggered import ExchangeRoute, number_of_exchanges, visits_of_exchange
from tawpipe.schedule.routes.weipipe import build_weipipe
from tawpipe.schedule.strategies.weight_strategy import WeightStrategy
from tawpipe.topology import Topology

Contents = list[dict[Buffer, tuple]]
"""For every rank what its buffers hold, stripe by stripe."""


def tour_of(strategy: str, nodes: int, local: int, **settings) -> tuple[Tour, list[Route]]:
    """The tour of a small step of two rounds, and the routes of all ranks."""
    topology = Topology.grid(nodes, local)
    step = step_for(llama(4, tied=True), topology, 2 * topology.world_size, strategy=strategy, **settings)
    assert isinstance(step.strategy, WeightStrategy)
    tour = step.strategy.tour(step)
    return tour, [step.strategy.route(rank, tour) for rank in range(topology.world_size)]


def collectives_in_step(routes: Sequence[Route], actions: Sequence[Sequence[Action]], held: Contents) -> None:
    """Plays what all ranks issue: the n-th action of every rank at the same time.

    Gathered stripes are put one behind the other; reduced ones are counts of the gradients that were added up.
    """
    for together in zip(*actions, strict=True):
        before = [dict(one) for one in held]
        for rank, action in enumerate(together):
            (target,), topology = action.writes, routes[rank].topology
            if action.op is Op.ADD:
                parts = [before[rank][one] for one in action.reads]
                held[rank][target] = tuple(sum(same, Counter()) for same in zip(*parts, strict=True))
                continue
            group = topology.group(action.group, rank)
            parts = [before[other][together[other].reads[0]] for other in group]
            assert {(one.unit, one.collective) for one in (together[other] for other in group)} == {
                (action.unit, action.collective)
            }
            if action.collective == "all_gather":
                held[rank][target] = tuple(stripe for part in parts for stripe in part)
                continue
            sums = tuple(sum(same, Counter()) for same in zip(*parts, strict=True))
            if action.collective == "reduce_scatter":
                size = len(sums) // len(group)
                sums = sums[group.index(rank) * size :][:size]
            held[rank][target] = sums


@pytest.mark.parametrize("strategy", ["tawpipe-spread", "flat", "hsdp"])
@pytest.mark.parametrize("reuse", [True, False])
def test_collectives_bring_all_shards_to_every_device_in_order(strategy: str, reuse: bool) -> None:
    tour, routes = tour_of(strategy, 3, 2, reuse=reuse, look_ahead=0)
    homes = tour.step.homes
    held: Contents = [
        {home_weight(u): (home.index(rank),) for u, home in enumerate(homes)} for rank in range(len(routes))
    ]
    assert all(isinstance(route, CollectiveRoute) for route in routes)
    for visit in routes[0].with_weights:
        collectives_in_step(routes, [list(route.pull(visit)) for route in routes], held)
        assert visit.weight_index is not None
        for unit in tour.step.model.blocks[visit.block].units:
            whole = tuple(range(len(homes[unit].ranks)))
            for rank, route in enumerate(routes):
                assert held[rank][route.full[visit.weight_index, unit]] == whole


@pytest.mark.parametrize(
    ("strategy", "scope"),
    [("tawpipe-spread", "visit"), ("tawpipe-spread", "step"), ("flat", "visit"), ("hsdp", "visit"), ("hsdp", "step")],
)
def test_collectives_add_gradients_of_every_rank_once_to_their_shard(strategy: str, scope: str) -> None:
    tour, routes = tour_of(strategy, 3, 2, gradients_scope=scope)
    homes, model, made = tour.step.homes, tour.step.model, Counter()
    held: Contents = [{} for _ in routes]
    for visit in routes[0].with_gradients:
        for rank, route in enumerate(routes):
            for unit, (buffer, accumulate) in route.gradient_buffers(visit).items():
                assert not accumulate
                held[rank][buffer] = (Counter({rank: 1}),) * len(homes[unit].ranks)
        made.update(model.trainable_units(visit.block))
        collectives_in_step(routes, [list(route.push(visit)) for route in routes], held)
    for unit, home in enumerate(homes):
        for copy in home.copies:
            for rank in copy:
                assert held[rank][home_gradient(unit)] == (Counter(dict.fromkeys(range(6), made[unit])),)


@pytest.mark.parametrize(("nodes", "visits"), [(1, 4), (2, 5), (3, 1), (4, 7)])
def test_staggered_exchanges_contain_every_visit_of_every_node_once(nodes: int, visits: int) -> None:
    exchanges = [list(visits_of_exchange(n, nodes, visits)) for n in range(number_of_exchanges(nodes, visits))]
    found = [one for exchange in exchanges for one in exchange]
    assert sorted(found) == [(node, visit) for node in range(nodes) for visit in range(visits)]
    for exchange in exchanges:  # neighbouring nodes are at neighbouring visits, or a link would idle
        assert len({visit for _, visit in exchange}) == len(exchange) > 0


def transfers(actions: Sequence[Sequence[Action]], send: bool) -> Counter[tuple[int, int, int]]:
    """(sender, receiver, unit) of everything that ranks send, or receive."""
    return Counter(
        (rank, one.peer, one.unit) if send else (one.peer, rank, one.unit)
        for rank, own in enumerate(actions)
        for action in own
        for one in action.transfers
        if one.send is send
    )


@pytest.mark.parametrize("whole", [True, False])
def test_exchanges_bring_every_shard_to_every_other_node_once_per_visit(whole: bool) -> None:
    tour, made = tour_of("tawpipe-whole" if whole else "tawpipe-striped", 3, 2, reuse=False)
    routes = [ExchangeRoute(rank, tour, whole=whole) for rank in range(len(made))]
    topology, model = tour.step.topology, tour.step.model
    actions = [
        [a for visit in route.with_weights for a in route.pull(visit)] + list(route.finish()) for route in routes
    ]
    visits = Counter(unit for visit in routes[0].with_weights for unit in model.blocks[visit.block].units)
    wanted = Counter()
    for unit, home in enumerate(tour.step.homes):
        for node in set(range(3)) - {topology.node_of(home.ranks[0])}:
            for rank in home.ranks:
                wanted[rank, topology.nodes[node][topology.local_of(rank)], unit] = visits[unit]
    assert transfers(actions, send=True) == transfers(actions, send=False) == wanted
    for own in actions:  # one collective a visit hands on what came, or what is at home
        assert Counter(one.unit for one in own if one.lane is Lane.GATHER) == visits


@pytest.mark.parametrize("whole", [True, False])
def test_exchanges_bring_every_gradient_home_once_per_visit(whole: bool) -> None:
    tour, made = tour_of("tawpipe-whole" if whole else "tawpipe-striped", 3, 2, gradients_scope="visit")
    routes = [ExchangeRoute(rank, tour, whole=whole) for rank in range(len(made))]
    topology, model = tour.step.topology, tour.step.model
    actions: list[list[Action]] = [[] for _ in routes]
    for rank, route in enumerate(routes):
        for visit in route.with_gradients:
            route.gradient_buffers(visit)
            actions[rank] += route.push(visit)
    visits = Counter(unit for visit in routes[0].with_gradients for unit in model.trainable_units(visit.block))
    received, added = transfers(actions, send=False), Counter()
    assert transfers(actions, send=True) == received
    for rank, own in enumerate(actions):
        added.update((rank, one.unit) for one in own if one.op is Op.ADD and one.writes == (home_gradient(one.unit),))
    for unit, home in enumerate(tour.step.homes):
        for rank in home.ranks:
            others = [peers[topology.local_of(rank)] for peers in topology.nodes if rank not in peers]
            assert [received[other, rank, unit] for other in others] == [visits[unit]] * 2
            assert added.pop((rank, unit)) == 3 * visits[unit]
    assert not added


@pytest.mark.parametrize("training", [True, False])
def test_ring_ranks_compute_their_micro_batches_through_all_blocks(training: bool) -> None:
    step = step_for(llama(5), Topology.grid(2, 2), 8, strategy="weipipe", micro_batches_per_visit=2)
    schedule, blocks = build_weipipe(step, training=training), len(step.model.blocks)
    last = blocks - training  # in training the head goes forward within its backward pass
    for rank, program in enumerate(schedule.programs):
        for m in step.micro_batches[rank]:
            done = [(a.op, a.block) for a in program if a.micro_batch == m]
            forward, backward = ([b for op, b in done if op is which] for which in (Op.FORWARD, Op.BACKWARD))
            assert forward == list(range(last)) and backward == list(range(blocks))[::-1] * training
            assert len(done) == len(forward) + len(backward)
        lanes = {action.lane for action in program if action.transfers}
        assert lanes == ({Lane.INTER_W, Lane.INTER_G} if training else {Lane.INTER_W})


def test_ring_home_receives_one_gradient_summed_over_all_ranks() -> None:
    step = step_for(llama(4), Topology.grid(2, 2), 4, strategy="weipipe")
    schedule = build_weipipe(step, training=True)
    adds = [action for program in schedule.programs for action in program if action.op is Op.ADD]
    for unit in range(len(step.model.units)):
        (home,) = [one for one in adds if one.writes == (home_gradient(unit),)]
        on_the_way = [one for one in adds if one.unit == unit and one is not home]
        assert all(len(one.reads) == 2 for one in on_the_way) and len(on_the_way) + len(home.reads) == 4


# pools


def homes(*sizes: int) -> list[Home]:
    return [Home.over((0, 1), size) for size in sizes]


def test_buffer_pool_rotates_and_is_as_large_as_used() -> None:
    pools = Pools(homes(100, 100, 40), [(0,), (1,), (2,)])
    taken = [pools.take("G", unit, elements=112, limit=2) for unit in (0, 1, 0, 1)]
    assert taken[:2] == taken[2:] and taken[0] != taken[1]
    pools.take("G", 2, elements=48, limit=5)
    assert [(pool.count, pool.elements) for pool in pools.pools()] == [(1, 48), (2, 112)]
    assert pools.size_class(0) == pools.size_class(1) != pools.size_class(2)


def test_distant_units_share_buffers_only_if_visits_are_in_order() -> None:
    """The ends of a model are alike, and no window of two visits has both."""
    visited = [(0,), (1,), (2,), (3,)]
    sizes = homes(100, 40, 40, 100)
    ends = {}
    for in_order in (True, False):
        pools = Pools(sizes, visited, in_order=in_order)
        ends[in_order] = {pools.visiting("G", unit, elements=112, visits=2) for unit in (0, 3)}
    assert len(ends[True]) == 1 and len(ends[False]) == 2


def test_planned_pool_buffer_is_equal_at_every_request() -> None:
    pools = Pools(homes(100, 100), [(0, 1)])
    first, second = (pools.at("W", 0, number, elements=112) for number in (7, 3))
    assert first != second and pools.at("W", 1, 7, elements=112) == first
    assert [pool.count for pool in pools.pools()] == [2]
