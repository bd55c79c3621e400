"""What a transfer puts on the links: all that has to arrive does, once, on the ports that it passes."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from schedules import llama, make
from tawpipe.schedule.actions import Action, Lane, Op, Transfer
from tawpipe.schedule.buffers import Buffer
from tawpipe.schedule.proof.verify import ScheduleError
from tawpipe.simulate import CostModel, LinkModel
from tawpipe.simulate.transfers import Transfers, messages, ring, tree


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("root", [0, -1])
def test_broadcast_tree_reaches_every_member_once(size: int, root: int) -> None:
    members = tuple(range(10, 10 + size))
    have = {members[root]}
    for pairs in tree(members, members[root]):
        assert {sender for sender, _ in pairs} <= have
        have |= {receiver for _, receiver in pairs}
    receivers = Counter(receiver for pairs in tree(members, members[root]) for _, receiver in pairs)
    assert have == set(members) and receivers == Counter(set(members) - {members[root]})


@pytest.mark.parametrize(
    ("collective", "received"),
    [("all_gather", 3 / 4), ("reduce_scatter", 3 / 4), ("all_reduce", 6 / 4), ("broadcast", 1)],
)
def test_collective_members_receive_their_share_and_sends_match(collective: str, received: float) -> None:
    members = (3, 5, 6, 9)
    for how in ("pairwise", "ring"):
        moved = list(messages(collective, members, 800, root=5, reduce_scatter=how))
        arrived, left = defaultdict(float), defaultdict(float)
        for sender, receiver, elements in moved:
            left[sender] += elements
            arrived[receiver] += elements
        assert sum(arrived.values()) == sum(left.values())
        for member in members:
            assert arrived[member] == (0 if collective == "broadcast" and member == 5 else 800 * received)


def test_a_reduction_gathers_its_pieces_on_the_root() -> None:
    arrived = defaultdict(float)
    for _, receiver, elements in messages("reduce", (0, 1, 2), 300, root=2):
        arrived[receiver] += elements
    assert arrived == {0: 200, 1: 200, 2: 400}
    assert ring((4,)) == [] and ring((4, 2, 7)) == [(4, 2), (2, 7), (7, 4)]
    with pytest.raises(ScheduleError, match="unknown cost of a shuffle"):
        list(messages("shuffle", (0, 1), 1))


def transfers_of(**links) -> Transfers:
    schedule = make(llama(2), 2, 2, 4, strategy="tawpipe-striped")
    links = {"between": LinkModel(100.0, 0.5), "inside": LinkModel(1000.0, 0.25), **links}
    return Transfers(schedule, CostModel((), weight_bytes=2, gradient_bytes=4, **links), schedule.topology)


def test_message_between_nodes_uses_both_links_and_counts_once() -> None:
    found = transfers_of()
    stripe = found.elements(0, Buffer.parse("home.w.0"))
    load = found.part(0, 2, Transfer(True, 2, 0, Buffer.parse("home.w.0")))
    assert dict(load.ports) == {("between", 0, "out"): 2 * stripe, ("between", 1, "in"): 2 * stripe}
    assert load.sent == ((0, 2 * stripe),) and load.received == ((1, 2 * stripe),) and load.inside == ()
    assert (load.delay_s, load.landing_s) == (0, 0.5)
    half = transfers_of(between=LinkModel(100.0, full_duplex=False, shared=False))
    ports = dict(half.part(0, 2, Transfer(True, 2, 0, Buffer.parse("home.w.0"))).ports)
    assert set(ports) == {("between", 0, "both"), ("between", 2, "both")}


def test_collective_inside_a_node_uses_no_link_between_nodes() -> None:
    found = transfers_of()
    action = next(a for a in found_program() if a.op is Op.COLLECTIVE and a.lane is Lane.GATHER)
    load = found.collective(action, (0, 1), 0)
    assert {port[0] for port, _ in load.ports} == {"inside"} and not load.sent and not load.received
    whole = 2 * 2 * found.elements(0, action.reads[0])  # two stripes of two bytes an element
    assert sum(amount for _, amount in load.inside) == whole
    less = found.collective(replace(action, compression="int8"), (0, 1), 0)
    assert sum(amount for _, amount in less.inside) < 0.6 * whole


def found_program():
    return make(llama(2), 2, 2, 4, strategy="tawpipe-striped").programs[0]


@pytest.mark.parametrize(
    ("collective", "seconds"),
    [("all_gather", 1.25), ("all_reduce", 2.5), ("reduce", 1.75), ("broadcast", 0.75), ("reduce_scatter", 1.5)],
)
def test_collective_latency_is_that_of_the_longest_message_chain(collective: str, seconds: float) -> None:
    """Ranks 0 and 1 are in one node, 2 and 3 in the other: 0.25 s inside, 0.5 s between."""
    assert transfers_of().latency(collective, (0, 1, 2, 3), 0) == seconds
    assert transfers_of().latency(collective, (0,), 0) == 0


def test_norm_over_all_ranks_takes_two_latencies() -> None:
    norm, groups = Action(Op.NORM, Lane.COMPUTE, group="world"), ((0,), (0, 1), (0, 1, 2, 3))
    assert [transfers_of().norm(norm, members, 0).delay_s for members in groups] == [0, 0.5, 1.0]


def test_unlimited_link_is_no_port_and_a_missing_buffer_is_named() -> None:
    free = transfers_of(between=LinkModel(float("inf")))
    assert free.part(0, 2, Transfer(True, 2, 0, Buffer.parse("home.w.0"))).ports == ()
    with pytest.raises(ScheduleError, match=r"W0\.99 is in no pool and no home of rank 1"):
        free.elements(1, Buffer.parse("W0.99"))
