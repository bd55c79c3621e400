"""Faults on purpose: read as they are written, refused where they cannot be, and once each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schedules import llama as sizes
from schedules import make
from tawpipe.errors import UserError
from tawpipe.runtime.watch.faults import KINDS, ONLY, PLACES, Fault, Injector, parse_faults, place_of, spoil
from tawpipe.schedule.actions import Action
from tawpipe.schedule.buffers import home_weight


@given(
    rank=st.integers(0, 999),
    step=st.integers(1, 10**6),
    place=st.sampled_from(PLACES),
    kind=st.sampled_from(KINDS),
    number=st.none() | st.integers(0, 99),
)
def test_injected_fault_reads_back_from_its_text(rank, step, place, kind, number):
    text = f"rank={rank},step={step},at={place.upper()}{'' if number is None else f':{number}'},kind={kind}"
    if place not in ONLY.get(kind, PLACES):
        with pytest.raises(UserError, match="injector"):
            Fault.parse(text)
        return
    assert Fault.parse(text) == Fault(rank, step, place, kind, number)


@given(st.text() | st.text(alphabet="rankstepkind=,:;0123456789-"))
def test_arbitrary_fault_text_is_parsed_or_refused_by_setting(text):
    try:
        parse_faults(text)
    except UserError as error:
        assert error.setting == "injector"


@pytest.mark.parametrize(
    "text",
    [
        "nothing",
        "rank=1",
        "rank=1,rank=2",
        "rank=1,step=0,at=push,kind=kill",
        "rank=-1,step=2,at=push,kind=kill",
        "rank=1,step=2,at=moon,kind=kill",
        "rank=1,step=2,at=push:,kind=kill",
        "rank=1,step=2,at=push,kind=magic",
        "rank=1,step=2,at=load,kind=nan",
        "rank=1,step=2,at=push,kind=kill,seconds=-1",
        "rank=1,step=2,at=push,kind=slow,seconds=nan",
    ],
)
def test_impossible_faults_are_refused(text):
    with pytest.raises(UserError, match="injector"):
        parse_faults(text)


@pytest.fixture(scope="module")
def schedule():
    return make(sizes(3), 2, 2, 4)


def test_every_fault_place_occurs_in_a_schedule(schedule):
    found = {place_of(action) for action in schedule.programs[0]}
    assert found >= {"pull", "gather", "forward", "backward", "reduce", "push", "update"}


def test_fault_place_missing_in_the_schedule_is_named(schedule):
    Injector([Fault(0, 1, "push", "kill")], 0, restart=0).check(schedule, 0)
    Injector([Fault(1, 1, "push", "kill", number=77)], 0, restart=0).check(schedule, 0)  # another rank's
    with pytest.raises(UserError, match="push:77"):
        Injector([Fault(0, 1, "push", "kill", number=77)], 0, restart=0).check(schedule, 0)
    one_node = make(sizes(3), 1, 2, 4)
    with pytest.raises(UserError, match="pull"):
        Injector([Fault(0, 1, "pull", "kill")], 0, restart=0).check(one_node, 0)


def test_fault_is_injected_once_and_only_in_its_restart():
    action = Action.parse("COMPUTE UPDATE u3 | norm home.g.3 -> home.w.3")
    fault = Fault(0, 4, "update", "error", number=3)
    assert Injector([fault], 0, restart=1).around(action, 4, print, {}) is print
    injector = Injector([fault], 0, restart=0)
    ran: list[int] = []
    assert injector.around(action, 3, print, {}) is print
    faulty = injector.around(action, 4, lambda: ran.append(1), {})
    with pytest.raises(RuntimeError, match="injected at update in step 4"):
        faulty()
    assert not ran and injector.around(action, 4, print, {}) is print


def test_spoil_writes_flipped_bits_and_nans():
    action = Action.parse("COMPUTE UPDATE u3 | norm home.g.3 -> home.w.3")
    weights = torch.full((4,), 1.5)
    buffers = {home_weight(3): weights}
    spoil("bitflip", action, buffers)
    assert float(weights[0]) not in (1.5, 0) and bool((weights[1:] == 1.5).all())
    spoil("nan", action, buffers)
    assert bool(weights.isnan().all())


def test_replace_makes_a_changed_copy_of_a_fault():
    assert replace(Fault(0, 1, "push", "kill"), rank=2).rank == 2
