"""Where units live when units or links are uneven: what homes cost, the heuristic, what comes of it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan_requests import LAYERS, plan_request, step_of
from schedules import llama, make
from tawpipe.errors import UserError
from tawpipe.plan.cost.feasible import with_settings
from tawpipe.plan.cost.predict import predict
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.plan.machine.machine import Device, Machine, uniform
from tawpipe.plan.search.candidate import Candidate
from tawpipe.plan.search.place import IN_TURN, ONE_BY_ONE, PRECISION, _Task, find_homes, homes_by_memory
from tawpipe.plan.search.plan import Plan
from tawpipe.plan.search.plan_file import planned_settings, settings_of
from tawpipe.plan.search.refine import settle
from tawpipe.schedule.settings import DEFAULT, parse_homes, spell_homes
from tawpipe.schedule.sizes.footprint import Widths
from tawpipe.schedule.sizes.traffic import link_elements
from tawpipe.schedule.strategies.build import build
from tawpipe.simulate import LinkModel

SLOW = LinkModel(5e4, 1e-5)
FAST = LinkModel(2e5, 1e-5)


def uneven(nodes: int = 3, local: int = 1, **changes) -> PlanRequest:
    """The first node's link is slow: in turn the embedding lives there."""
    machine = Machine((local,) * nodes, FAST, LinkModel(1e8), {0: SLOW})
    return plan_request(machine, global_batch=4 * nodes * local, **changes)


@settings(deadline=None, max_examples=30)
@given(
    strategy=st.sampled_from(["tawpipe-striped", "tawpipe-whole"]),
    nodes=st.integers(2, 4),
    local=st.integers(1, 3),
    scopes=st.sampled_from([(0, "visit"), ("all", "visit"), (0, "step")]),
    kind=st.sampled_from([{}, {"tied": True}, {"lora": True}]),
    data=st.data(),
)
def test_placement_exchanges_equal_the_schedule_traffic(strategy, nodes, local, scopes, kind, data):
    """The sum over all exchanges, link by link and direction by direction."""
    machine = uniform(nodes, local, between=LinkModel(1.0), inside=LinkModel(1e8))
    asked = plan_request(machine, widths=Widths(1, 1, 4, 2), model=llama(6, **kind))
    step = step_of(asked, strategy, step_cache=scopes[0], gradients_scope=scopes[1])
    task = _Task(asked, step)
    units = len(asked.model.units)
    homes = tuple(data.draw(st.lists(st.integers(0, nodes - 1), min_size=units, max_size=units)))
    schedule = build(with_settings(step, homes=spell_homes(task.spelled(homes))))
    for node, traffic in enumerate(link_elements(schedule)):
        sent = received = 0.0
        for exchange in task.exchanges:
            for at, unit in exchange.arrivals:
                link = task.link_of(exchange, at, homes[unit])
                amount = exchange.times * task.sizes[exchange.weights][unit]
                sent += amount * (link is not None and link[0] == node)
                received += amount * (link is not None and link[1] == node)
        assert sent == traffic.weights_sent + traffic.gradients_sent
        assert received == traffic.weights_received + traffic.gradients_received


@pytest.mark.parametrize("strategy", ["tawpipe-striped", "tawpipe-whole"])
@pytest.mark.parametrize("full_duplex", [True, False])
def test_home_moves_are_as_good_as_exhaustive_search(strategy, full_duplex):
    machine = Machine((1, 1), FAST, LinkModel(1e8), {0: replace(SLOW, full_duplex=full_duplex)})
    asked = plan_request(machine, global_batch=6)
    step = step_of(asked, strategy)
    found, task = find_homes(asked, step), _Task(asked, step)
    assert found is not None
    all_homes = itertools.product(range(2), repeat=len(asked.model.units))
    best = min(task.seconds(homes) for homes in all_homes if task.fits(homes))
    assert best < found.seconds[IN_TURN]
    assert found.seconds[ONE_BY_ONE] <= best * (1 + 2 * PRECISION)


def test_even_nodes_keep_homes_in_turn():
    asked = plan_request(uniform(3, 2, between=FAST, inside=LinkModel(1e8)))
    found = find_homes(asked, step_of(asked, "tawpipe-striped"))
    assert found is not None and not found.of_unit and list(found.seconds) == [IN_TURN]
    assert "are equal" in str(found)
    assert find_homes(asked, step_of(asked, "tawpipe-spread")) is None
    alone = plan_request(uniform(1, 2, between=FAST, inside=LinkModel(1e8)))
    assert find_homes(alone, step_of(alone, "tawpipe-whole")) is None


def test_node_with_a_slow_link_keeps_fewer_homes():
    asked = uneven()
    steps = {name: step_of(asked, name) for name in ("tawpipe-spread", "tawpipe-striped")}
    spread, striped = (settle(asked, Candidate(name, step, predict(asked, step), True)) for name, step in steps.items())
    assert striped.step is not None and striped.step.settings.homes and striped.homes is not None
    assert striped.seconds < predict(asked, steps["tawpipe-striped"]).step_seconds
    assert planned_settings(settings_of(striped.step), DEFAULT).homes == striped.step.settings.homes
    plan = Plan.of(asked, [striped, spread])
    assert {IN_TURN, ONE_BY_ONE} == plan.row(striped)["exchange_seconds"].keys()
    assert plan.row(spread)["exchange_seconds"] is None
    assert "moved one by one" in str(striped.homes)


@pytest.mark.slow
def test_homes_stay_within_the_memory_limits():
    """Nothing is kept beyond what homes in turn need, unless a limit leaves room for it."""
    asked = uneven(local=2)
    for strategy in ("tawpipe-striped", "tawpipe-whole"):
        step = step_of(asked, strategy)
        task = _Task(asked, step)
        found = find_homes(asked, step)
        assert found is not None and (found.of_unit or strategy == "tawpipe-whole")
        if found.of_unit:
            nodes = (
                found.of_unit if strategy == "tawpipe-striped" else [asked.topology.node_of(r) for r in found.of_unit]
            )
            assert task.device_bytes(nodes).max() <= task.device_bytes(task.in_turn).max()
        roomy = _Task(replace(asked, memory_bytes=10**9), step)
        assert roomy.limits.min() > task.limits.max()


@pytest.mark.slow
def test_groups_of_one_machine_send_nothing_over_its_link():
    machine = Machine((2, 4), FAST, LinkModel(1e8))
    asked = plan_request(machine, global_batch=12)
    assert asked.topology.num_nodes == 3
    step = step_of(asked, "tawpipe-striped")
    task = _Task(asked, step)
    assert task.machine_of == [0, 1, 1]
    found = find_homes(asked, step)
    assert found is not None and found.seconds[ONE_BY_ONE] <= found.seconds[IN_TURN]


def test_links_without_a_rate_keep_homes_in_turn():
    asked = plan_request(Machine((2, 4), LinkModel(float("inf"), 1e-5), LinkModel(1e8)), global_batch=12)
    found = find_homes(asked, step_of(asked, "tawpipe-striped"))
    assert found is not None and not found.of_unit and "takes time" in str(found)


def test_home_search_is_skipped_on_many_nodes():
    asked = plan_request(Machine((1,) * 64, FAST, LinkModel(1e8), {0: SLOW}), global_batch=64, model=llama(62))
    found = find_homes(asked, step_of(asked, "tawpipe-striped"))
    assert found is not None and "not tried on 64 nodes" in str(found)


@pytest.mark.parametrize("text", ["1;2", "one", "-1", "0,,1", "1.5", "²"])
def test_malformed_homes_text_is_refused(text):
    with pytest.raises(UserError, match="homes"):
        parse_homes(text)


@pytest.mark.parametrize(
    ("strategy", "homes", "reason"),
    [
        ("tawpipe-spread", (0,) * 6, "nothing under tawpipe-spread: all units lie alike"),
        ("weipipe", (0,) * 6, "nothing under weipipe"),
        ("tawpipe-striped", (0, 1), "6 nodes, one for every unit, from 0 to 1"),
        ("tawpipe-striped", (0, 1, 2, 0, 1, 0), "from 0 to 1"),
        ("tawpipe-whole", (0, 1, 2, 4, 1, 0), "6 processes, one for every unit, from 0 to 3"),
    ],
)
def test_impossible_homes_are_refused(strategy, homes, reason):
    model = llama(3)
    assert len(model.units) == 6
    with pytest.raises(UserError, match=reason):
        make(model, 2, 2, 4, strategy=strategy, homes=spell_homes(homes))


@pytest.mark.parametrize(
    ("strategy", "kind", "gpu", "smaller"),
    [
        ("tawpipe-striped", {}, "H100", 1),
        ("tawpipe-whole", {"lora": True}, "H100", 1),
        ("tawpipe-whole", {}, "H100", 0.5),
        ("tawpipe-striped", {"lora": True}, "H100", 0.5),
        ("tawpipe-striped", {}, "CPU", 0.5),
    ],
)
def test_host_homes_all_are_spread_over_the_hosts(strategy, kind, gpu, smaller):
    """Devices keep nothing of them, whichever has less memory: what has room is a host, or the CPU itself."""
    devices = [Device(gpu, 10**9)] * 2 + [Device(gpu, int(10**9 * smaller))] * 2
    machine = Machine((2, 2), FAST, LinkModel(1e8), {0: SLOW}, device=devices[0], host_bytes=10**6)
    machine = replace(machine, device_of=tuple(devices) if smaller < 1 else ())
    asked = plan_request(machine, memory=10**9, model=llama(LAYERS, **kind)).with_homes("all")
    step = step_of(asked, strategy)
    task, found = _Task(asked, step), find_homes(asked, step)
    assert found is not None
    for homes in (found.of_unit, homes_by_memory(asked, step)):
        nodes = [asked.topology.node_of(place) for place in homes] if strategy == "tawpipe-whole" else homes
        assert task.fits(nodes) if homes else smaller == 1
        assert gpu == "CPU" or not homes or set(nodes) == {0, 1}


def test_hosts_with_more_memory_may_keep_more_homes():
    steps = []
    for host_bytes in (0, 10**9):
        machine = Machine((2, 2), FAST, LinkModel(1e8), {0: SLOW}, device=Device("H100"), host_bytes=host_bytes)
        asked = plan_request(machine, memory=10**9, global_batch=16).with_homes("all")
        steps.append(_Task(asked, step_of(asked, "tawpipe-striped")))
    assert steps[0].limits.max() == steps[0].device_bytes(steps[0].in_turn).max() < steps[1].limits.min() < 10**9
