"""Groups of three sizes: every size there is, what it takes over the links, and what is refused."""

from __future__ import annotations

import pytest

from schedules import group_sizes, llama, make, step_for
from tawpipe.errors import UserError
from tawpipe.schedule.proof.verify import verify
from tawpipe.schedule.sizes.traffic import link_elements
from tawpipe.schedule.step import Schedule
from tawpipe.schedule.strategies.groups import Grouped, GroupSizes
from tawpipe.topology import Topology


def grouped(nodes: int, local: int, groups: str, **settings) -> Schedule:
    return make(llama(3), nodes, local, 2 * nodes * local, strategy="tawpipe-groups", groups=groups, **settings)


@pytest.mark.parametrize(
    ("nodes", "local"), [(1, 4), (2, 2), (4, 1), pytest.param(4, 2, marks=pytest.mark.slow)], ids=str
)
def test_every_group_size_verifies_and_sends_the_predicted_bytes(nodes, local):
    for groups in group_sizes(Topology.grid(nodes, local)):
        schedule = grouped(nodes, local, groups, look_ahead=1)
        verify(schedule)
        assert link_elements(schedule) == schedule.step.strategy.traffic(schedule.step, training=True), groups


@pytest.mark.parametrize(
    ("groups", "other", "settings"),
    [
        ("2/2/8", "tawpipe-step", {}),
        ("2/2/2", "hsdp", {}),
        ("", "tawpipe-step", {}),
        ("8/8/8", "tawpipe-spread", {"gradients_scope": "visit"}),
    ],
)
def test_known_strategies_equal_special_group_sizes(groups, other, settings):
    mine, known = grouped(4, 2, groups, **settings), make(llama(3), 4, 2, 16, strategy=other)
    assert mine.programs == known.programs or _without_names(mine) == _without_names(known)
    assert mine.homes == known.homes
    assert [_memory(mine, rank) for rank in range(8)] == [_memory(known, rank) for rank in range(8)]


def _without_names(schedule: Schedule) -> list[list[tuple]]:
    """What ranks do, whatever their buffers are called."""
    return [
        [(action.op, action.lane, action.unit, action.block, action.collective, action.group) for action in program]
        for program in schedule.programs
    ]


def _memory(schedule: Schedule, rank: int) -> list[tuple]:
    return sorted((pool.kind, pool.count, pool.elements) for pool in schedule.pools[rank])


def test_groups_of_two_nodes_halve_the_link_traffic():
    """Of 4 nodes: weights from one other node once a step, gradients to it, and to the copy."""
    schedule = grouped(4, 1, "1n/1n/2n")
    padded = [home.padded for home in schedule.homes]
    [link, *_] = link_elements(schedule)
    assert link.weights_received == sum(padded) // 2
    assert link.gradients_sent == sum(padded) // 2 + sum(padded) // 2


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("2/2", "as in 4/8/16"),
        ("2/2/x", "as in 4/8/16"),
        ("2n/1n/", "as in 4/8/16"),
        ("1n/1n/2n", "numbers of 1, 2, 4, 12"),
        ("0/2/2", "as in 4/8/16"),
        ("3/2/12", "numbers of 1, 2, 4, 12"),
        ("4/4/2", "the last is the largest"),
        ("2/2/8", "numbers of 1, 2, 4, 12"),
    ],
)
def test_impossible_group_sizes_are_refused(groups, expected):
    with pytest.raises(UserError, match=f"schedule.groups: got '{groups}'.*{expected}"):
        step_for(llama(3), Topology.grid(3, 4), 12, strategy="tawpipe-groups", groups=groups)


@pytest.mark.parametrize("name", ["tawpipe-step", "1f1b"])
def test_groups_setting_is_refused_by_other_strategies(name):
    with pytest.raises(UserError, match=f"nothing under {name}"):
        step_for(llama(4), Topology.grid(2, 2), 4, strategy=name, groups="2/2/4")


def test_plan_tries_only_group_sizes_of_no_other_strategy():
    ways = {way.groups for way in Grouped().layouts(Topology.grid(4, 2)) if isinstance(way, Grouped)}
    assert ways == {"1n/1n/2n", "1n/2n/2n", "2n/2n/2n"}
    assert [*Grouped().layouts(Topology.grid(3, 2))] == [Grouped()]
    assert len(Grouped().layouts(Topology.grid(24, 8))) == 12
    assert GroupSizes(2, 2, 4).cuts(Topology.grid(4, 2)) == (1, 2, 4, 8)
