"""Where actions of ranks meet: nothing takes place before all are there, and what does not match is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tawpipe.schedule.actions import Action, Lane, Op, Transfer, exchange
from tawpipe.schedule.buffers import Buffer
from tawpipe.schedule.proof.rendezvous import Rendezvous
from tawpipe.schedule.proof.symbolic import ScheduleError

W = [Buffer.parse(f"W0.{number}") for number in range(4)]
GATHER = Action(Op.COLLECTIVE, Lane.GATHER, (W[0],), (W[1],), unit=3, collective="all_gather", group="node")


def meet() -> Rendezvous[str]:
    return Rendezvous(lambda part: f"<{part}>")


def test_collective_runs_when_its_last_member_arrives() -> None:
    found = meet()
    assert found.collective("b", GATHER, (0, 1, 2), 3) == found.collective("a", GATHER, (0, 1, 2), 3) == []
    assert found.present(GATHER, (0, 1, 2)) == ["b", "a"]
    assert found.collective("c", GATHER, (0, 1, 2), 3) == ["b", "a", "c"]
    assert found.present(GATHER, (0, 1, 2)) == []
    assert found.collective("next", GATHER, (0, 1, 2), 3) == []  # nobody of the one before counts again


def test_collectives_of_different_groups_or_lanes_do_not_match() -> None:
    found = meet()
    found.collective("a", GATHER, (0, 1), 2)
    assert found.collective("b", GATHER, (2, 3), 2) == []
    assert found.collective("c", replace(GATHER, lane=Lane.REDUCE), (0, 1), 2) == []
    assert found.collective("d", GATHER, (0, 1), 2) == ["a", "d"]


@pytest.mark.parametrize(
    "other", [{"unit": 4}, {"collective": "broadcast"}, {"root": 1}, {"compression": "int8"}, {"micro_batch": 2}]
)
def test_members_with_different_operations_are_named(other: dict) -> None:
    found = meet()
    found.collective("a", GATHER, (0, 1), 2)
    with pytest.raises(ScheduleError, match="<b> and <a>"):
        found.collective("b", replace(GATHER, **other), (0, 1), 2)


def sends(*transfers: tuple[bool, int, int], compression: str = "") -> Action:
    """An exchange of (send, peer, unit)."""
    made = tuple(Transfer(send, peer, unit, W[at]) for at, (send, peer, unit) in enumerate(transfers))
    return exchange(Lane.INTER_W, made, compression=compression)


def test_sends_and_receives_match_in_issue_order() -> None:
    found = meet()
    assert list(found.exchange("first", 0, sends((True, 1, 5), (False, 2, 8)))) == []
    assert list(found.exchange("second", 0, sends((True, 1, 5)))) == []
    (one,) = found.exchange("receive", 1, sends((False, 0, 5)))
    assert one[1] == "first" and one[0].send is False and one[2].send is True
    (two,) = found.exchange("again", 1, sends((False, 0, 5)))
    assert two[1] == "second"
    assert [(transfer.send, transfer.peer) for transfer in found.unmet("first")] == [(False, 2)]
    assert found.unmet("second") == []


def test_two_sends_or_different_rank_pairs_do_not_match() -> None:
    found = meet()
    for rank, action in ((0, sends((True, 1, 5))), (1, sends((True, 0, 5))), (2, sends((False, 1, 5)))):
        assert list(found.exchange(str(rank), rank, action)) == []


@pytest.mark.parametrize("receive", [sends((False, 0, 6)), sends((False, 0, 5), compression="fp8")])
def test_send_matched_with_a_receive_of_another_unit_is_named(receive: Action) -> None:
    found = meet()
    list(found.exchange("send", 0, sends((True, 1, 5))))
    with pytest.raises(ScheduleError, match="<receive> and <send>"):
        list(found.exchange("receive", 1, receive))
