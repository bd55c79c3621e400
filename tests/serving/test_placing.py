"""Placing: every rank gets the units that it wants, each stripe once, and nothing of it can be left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from schedules import NAMES, llama, step_for
from tawpipe.schedule.decode_steps import build_decode_steps
from tawpipe.schedule.proof.verify import ScheduleError, verify
from tawpipe.schedule.sizes.traffic import link_elements
from tawpipe.schedule.step import Schedule
from tawpipe.serving.placing import build_placing
from tawpipe.topology import Topology


def placing(strategy: str, nodes: int, local: int, *, tied: bool = False) -> Schedule:
    model, topology = llama(nodes * local, tied=tied), Topology.grid(nodes, local)
    homes = step_for(model, topology, nodes * local, strategy=strategy).homes
    stages = build_decode_steps(model, topology, 1).homes
    wanted = [[u for u, home in enumerate(stages) if home.index(rank) is not None] for rank in range(nodes * local)]
    return build_placing(model, topology, homes, wanted)


@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize(("nodes", "local"), [(1, 1), (3, 1), (2, 2)])
def test_weight_placing_schedules_verify_for_every_strategy(strategy, nodes, local):
    schedule = placing(strategy, nodes, local, tied=True)
    verify(schedule)
    verify(schedule, one_thread=True)


def test_weight_placing_sends_only_missing_shards():
    schedule = placing("tawpipe-spread", 4, 1)
    elements = sum(home.padded for home in schedule.homes)
    links = link_elements(schedule)
    assert sum(link.weights_received for link in links) == sum(link.weights_sent for link in links)
    assert sum(link.weights_received for link in links) == elements * 3 // 4


def test_weight_placing_takes_copies_inside_the_node():
    schedule = placing("hsdp", 2, 2)
    assert all(link.weights_sent == 0 for link in link_elements(schedule))


@pytest.mark.parametrize("strategy", ["tawpipe-spread", "tawpipe-whole", "flat"])
def test_weight_placing_with_a_missing_or_swapped_action_is_refused(strategy):
    schedule = placing(strategy, 2, 2)
    for rank, program in enumerate(schedule.programs):
        for index in range(len(program)):
            for changed in (program[:index] + program[index + 1 :], _two_swapped(program, index)):
                if changed != program:
                    programs = [changed if r == rank else p for r, p in enumerate(schedule.programs)]
                    with pytest.raises(ScheduleError):
                        verify(replace(schedule, programs=tuple(programs)), one_thread=True)


def _two_swapped(program, index):
    """The program with an action and the next one in each other's place, where both meet one rank."""
    pair = program[index : index + 2]
    if len(pair) < 2 or not {t.peer for t in pair[0].transfers} & {t.peer for t in pair[1].transfers}:
        return program
    return (*program[:index], pair[1], pair[0], *program[index + 2 :])
