"""What travels: the groups that schedules need, and operations that give what plain sums and concatenations give."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from schedules import llama, make
from tawpipe.runtime.transport.early_transfers import EarlyTransfers
from tawpipe.runtime.transport.transport import Transport, TransportError, needed_groups
from tawpipe.runtime.world import World
from tawpipe.schedule.actions import Action, Lane, Op, Transfer, exchange
from tawpipe.schedule.buffers import Buffer
from tawpipe.topology import Topology

A, B, C = (Buffer.parse(f"W0.{number}") for number in range(3))


def test_needed_groups_cover_all_schedules_in_one_sorted_order() -> None:
    schedules = [make(llama(3), 2, 2, 4), make(llama(3), 2, 2, 4, strategy="flat", training=False)]
    needed = needed_groups(schedules)
    assert needed == needed_groups(reversed(schedules)) == sorted(set(needed))
    assert {(a.lane, a.group) for s in schedules for program in s.programs for a in program if a.group} == set(needed)


def test_transport_of_one_rank_reduces_to_the_identity() -> None:
    alone = Transport(Topology.grid(1, 1), 0, [make(llama(2), 1, 1, 2)], device=torch.device("cpu"))
    values = torch.tensor([1.0, 2.0])
    alone.all_reduce(Action(Op.NORM, Lane.COMPUTE, group="world"), values)
    assert values.tolist() == [1.0, 2.0]
    alone.close()


def collective(which: str, lane: Lane, group: str, *, root: int = -1, source: Buffer = A, target: Buffer = B) -> Action:
    reads, writes = (source,), (target,)
    return Action(Op.COLLECTIVE, lane, reads, writes, unit=0, collective=which, group=group, root=root)


def test_compressed_or_sequence_messages_do_not_begin_ahead() -> None:
    lanes = {(lane, "node"): cast(Any, None) for lane in (Lane.GATHER, Lane.SEQ)}
    ahead = EarlyTransfers(Topology.grid(1, 2), 0, lanes, strict=False)
    gather = collective("all_gather", Lane.GATHER, "node")
    assert ahead.does(gather) and ahead.begins(gather)
    assert not ahead.does(replace(gather, compression="int8")) and not ahead.does(replace(gather, group="rail"))
    assert ahead.does(replace(gather, lane=Lane.SEQ)) and not ahead.begins(replace(gather, lane=Lane.SEQ))
    assert not ahead.does(collective("broadcast", Lane.GATHER, "node"))


def test_message_waits_with_the_last_set_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo's send and receive would wait for as long as was said when their group was made."""
    waited: list[Any] = []
    work = SimpleNamespace(wait=lambda *limit: waited.extend(limit))
    for move in ("isend", "irecv"):
        monkeypatch.setattr(f"torch.distributed.{move}", lambda *_, **__: work)
    alone = Transport(Topology.grid(1, 1), 0, [], device=torch.device("cpu"), strict=True)
    alone.topology = alone.early_transfers._topology = Topology.grid(2, 1)  # type: ignore[union-attr]
    alone._groups[Lane.INTER_W, "world"] = cast(Any, None)
    gather = collective("all_gather", Lane.INTER_W, "world")
    monkeypatch.setattr("tawpipe.runtime.transport.transport.set_group_timeout", lambda *_: None)
    monkeypatch.setattr("tawpipe.runtime.transport.early_transfers.compare_headers", lambda *_: None)
    alone.set_timeout(timedelta(hours=3))
    alone.collective(gather, {A: torch.zeros(2), B: torch.zeros(4)})
    alone._wait(cast(Any, work))
    assert len(waited) == 5 and {*waited} == {timedelta(hours=3)}


def moved(world: World) -> dict[str, Any]:
    """In a worker: what every operation has given on this rank, of 2 nodes with 2 ranks."""
    schedule = make(llama(2), 2, 2, 4, strategy="tawpipe-striped")
    transport = Transport(world.nodes, world.rank, [schedule], device=world.device, strict=True)
    rank, node = world.rank, world.nodes.group("node", world.rank)
    found: dict[str, Any] = {}
    held = {A: torch.full((2,), float(rank)), B: torch.full((4,), -1.0), C: torch.arange(4.0) * 10 ** (rank % 2)}
    transport.collective(collective("all_gather", Lane.GATHER, "node"), held)
    found["gathered"] = held[B].tolist()
    target = {C: held[C], A: torch.empty(2)}
    transport.collective(collective("reduce_scatter", Lane.REDUCE, "node", source=C, target=A), target)
    found["scattered"] = target[A].tolist()
    whole = {A: torch.full((3,), float(rank))}
    transport.collective(collective("broadcast", Lane.GATHER, "node", root=node[1], target=A), whole)
    found["broadcast"] = whole[A].tolist()
    peer = (rank + 2) % 4
    parts = {A: torch.full((2,), float(rank)), B: torch.empty(2)}
    transport.exchange(exchange(Lane.INTER_W, (Transfer(True, peer, 0, A), Transfer(False, peer, 0, B))), parts)
    found["exchanged"] = parts[B].tolist()
    values = torch.tensor([1.0, rank])
    norm = next(action for action in schedule.programs[rank] if action.op is Op.NORM)
    transport.all_reduce(norm, values)
    found["summed"] = values.tolist()
    table = torch.tensor([[rank, 7], [-rank, 3]])
    transport.largest(norm, table)
    found["largest"] = table.tolist()
    try:
        wrong = exchange(Lane.INTER_W, (Transfer(True, peer, rank, A), Transfer(False, peer, rank, B)))
        transport.exchange(wrong, parts)
    except TransportError as error:
        found["refused"] = str(error)
    transport.close()
    return found


def test_every_transport_operation_returns_its_defined_result(pool) -> None:
    for rank, found in enumerate(pool.run(f"{__name__}:moved", 2, 2)):
        node = (rank // 2 * 2, rank // 2 * 2 + 1)
        assert found["gathered"] == [float(one) for one in node for _ in range(2)]
        assert found["scattered"] == [[0.0, 11.0], [22.0, 33.0]][rank % 2]
        assert found["broadcast"] == [float(node[1])] * 3
        assert found["exchanged"] == [float((rank + 2) % 4)] * 2
        assert found["summed"] == [4.0, 6.0]
        assert found["largest"] == [[3, 7], [0, 3]]
        assert "this rank is at message" in found["refused"]  # both sides meant another unit
