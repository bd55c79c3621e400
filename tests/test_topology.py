"""Nodes of different sizes."""

from __future__ import annotations

import pytest

from schedules import llama, step_for
from tawpipe.schedule.sizes.footprint import Widths, costs
from tawpipe.schedule.strategies.build import build
from tawpipe.topology import Topology

ODD = Topology(((0, 1, 2, 3), (4, 5)))


def test_uneven_nodes_are_split_into_even_groups():
    assert ODD.evened() == Topology.grid(3, 2)
    assert Topology(((0, 1, 2), (3, 4))).evened() == Topology.grid(5, 1)
    assert Topology.grid(2, 4).evened() == Topology.grid(2, 4)
    assert str(ODD) == "6 processes = 2 nodes of 4, 2, scheduled as 3 groups of 2"
    assert ODD.world_size == 6 and not ODD.is_even and [ODD.node_of(rank) for rank in range(6)] == [0, 0, 0, 0, 1, 1]


def test_busiest_link_of_uneven_nodes_carries_only_missing_shards():
    """A node with a third of the devices has a third of every unit: the other two thirds must come in."""
    schedule = build(step_for(llama(4), ODD.evened(), 6, strategy="tawpipe-spread", reuse=False))
    said = costs(schedule, Widths(4, 4, 4, 2), activation_bytes={}, nodes=ODD)
    visits = [action for action in schedule.programs[0] if action.collective == "all_gather" and action.group == "rail"]
    gathered = sum(schedule.homes[action.unit].padded for action in visits) * 4
    reduced = sum(home.padded for home in schedule.homes) * 4
    assert len(said.link_sent_bytes) == 2
    assert said.link_received_bytes[1] == pytest.approx((gathered + reduced) * 2 / 3, rel=0.02)
    assert said.link_sent_bytes == said.link_received_bytes
    even = [sum(home.shard_size for home in schedule.homes if home.index(rank) is not None) for rank in range(6)]
    assert len(set(even)) == 1
