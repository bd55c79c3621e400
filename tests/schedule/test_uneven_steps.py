"""Steps with fewer rows than processes, in mixed order: proved, and a wrong rule for numbers of messages refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from schedules import EVERY, llama, make, step_for
from tawpipe.errors import UserError
from tawpipe.schedule.actions import Action
from tawpipe.schedule.proof.verify import ScheduleError, verify
from tawpipe.schedule.step import Schedule
from tawpipe.schedule.strategies.build import build
from tawpipe.schedule.transform import for_one_thread
from tawpipe.topology import Topology
from uneven_rows import REFUSED, ROWS, SETTINGS, TOPOLOGIES, layers_of


def of_rows(strategy: str, topology: Topology, rows: int, **settings: Any) -> Schedule:
    """A schedule as a pipeline plays it."""
    return for_one_thread(build(step_for(llama(layers_of(strategy)), topology, rows, strategy=strategy, **settings)))


@cache
def proved(strategy: str, setting: str, topology: Topology) -> str:
    """Prove steps of mixed rows after each other; return why they are refused, or ``""``."""
    made: dict[int, Schedule] = {}
    for rows in ROWS:
        try:
            made[rows] = of_rows(strategy, topology, rows, **SETTINGS[setting])
        except UserError as error:
            if rows:
                return str(error)
            assert strategy == "weipipe" and "got '0 rows'; at least one" in str(error)
    verify(*(made[rows] for rows in ROWS if rows in made))
    return ""


@pytest.mark.parametrize("strategy", EVERY)
def test_consecutive_steps_of_few_rows_verify_or_are_refused_by_name(strategy: str) -> None:
    for nodes, topology in TOPOLOGIES.items():
        for setting in SETTINGS:
            expected = REFUSED.get((strategy, setting), "")
            said = proved(strategy, setting, topology.evened())
            assert bool(said) == bool(expected) and expected in said, (nodes, setting, said)


def test_evaluations_between_steps_of_few_rows_verify() -> None:
    made = [make(llama(2), 2, 2, rows, strategy="flat", training=rows != 2) for rows in (3, 2, 1)]
    verify(*made)


def one_counter(action: Action, *way: int) -> tuple:
    """The rule by which NORM and COUNT draw their numbers in their lane, and rings beside it, from one counter."""
    return (action.lane, action.group, *way)


WAITS_FOR_EVER: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "flat, all": (2, 2, 1, {"strategy": "flat", "host_homes": "all"}),
    "flat, all, 3 rows": (2, 2, 3, {"strategy": "flat", "host_homes": "all"}),
    "flat, state": (2, 2, 1, {"strategy": "flat", "host_homes": "state"}),
    "flat, early": (2, 2, 1, {"strategy": "flat", "early_updates": True}),
    "flat, early, 3 rows": (2, 2, 3, {"strategy": "flat", "early_updates": True}),
    "groups, all": (4, 1, 1, {"strategy": "tawpipe-groups", "host_homes": "all"}),
    "groups, early": (4, 1, 1, {"strategy": "tawpipe-groups", "early_updates": True}),
}
"""Steps that stood still by that rule."""
ENDS: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "flat": (2, 2, 1, {"strategy": "flat"}),
    "flat, all, a row for each": (2, 2, 4, {"strategy": "flat", "host_homes": "all"}),
    "spread, all": (2, 2, 1, {"strategy": "tawpipe-spread", "host_homes": "all"}),
}
"""Steps that did not."""


@pytest.mark.parametrize("name", WAITS_FOR_EVER)
def test_shared_message_counter_of_two_threads_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, local, rows, settings = WAITS_FOR_EVER[name]
    schedule = make(llama(3), nodes, local, rows, **settings)
    verify(schedule)
    monkeypatch.setattr(Action, "counter", one_counter)
    with pytest.raises(ScheduleError, match=r"is number \d+ of .*INTER_G.* in the order of the program"):
        verify(schedule)


@pytest.mark.parametrize("name", ENDS)
def test_shared_message_counter_verifies_if_buffers_order_its_numbers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, local, rows, settings = ENDS[name]
    monkeypatch.setattr(Action, "counter", one_counter)
    verify(make(llama(3), nodes, local, rows, **settings))


def test_shared_message_counter_is_refused_if_the_next_step_has_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    many, few = (make(llama(3), 2, 2, rows, strategy="flat", host_homes="all") for rows in (4, 1))
    monkeypatch.setattr(Action, "counter", one_counter)
    verify(many)
    verify(few, steps=1)
    with pytest.raises(ScheduleError, match="in the order of the program"):
        verify(many, few)


def test_shared_message_counter_of_both_directions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = make(llama(3), 3, 1, 3, strategy="weipipe")
    verify(schedule)
    monkeypatch.setattr(Action, "counter", lambda action, *_: (action.lane, action.group, action.begins_early))
    with pytest.raises(ScheduleError, match=r"in the order of the program|has numbers"):
        verify(schedule)
