"""Groups under NCCL, with a stand-in for torch.distributed that takes down what it is asked for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from schedules import NAMES, llama, make
from tawpipe.runtime.transport import transport
from tawpipe.runtime.transport.transport import FAR_BLOCKS, NEAR_BLOCKS, Transport
from tawpipe.runtime.transport.warm_up import first_uses
from tawpipe.schedule.actions import Op
from tawpipe.schedule.strategies.table import find
from tawpipe.topology import Topology


class Group:
    def __init__(self, members: list[int], name: str, options: Any) -> None:
        self.members, self.name, self.options = members, name, options


class Options:
    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream, self.config = is_high_priority_stream, SimpleNamespace()
        self._timeout = timedelta()


@dataclass
class FakeDist:
    """Takes down (group, operation, root or peer); compares nothing and moves nothing."""

    seen: set[tuple[str, str, int]] = field(default_factory=set)
    groups: list[Group] = field(default_factory=list)
    splits: list[list[list[int]]] = field(default_factory=list)
    taken: int = 0
    group: Any = field(default_factory=lambda: SimpleNamespace(WORLD=None))
    ProcessGroup = Group
    ProcessGroupNCCL = SimpleNamespace(Options=Options)
    P2POp = staticmethod(lambda *of: of)
    ReduceOp = SimpleNamespace(SUM=0, MAX=1)

    def new_group(self, members: list[int], *, group_desc: str, pg_options: Any, **_: Any) -> Group:
        self.groups.append(Group(members, group_desc, pg_options))
        self.taken += 100
        return self.groups[-1]

    def note(self, group: Group, what: str, who: int = -1) -> Any:
        assert who in (-1, *group.members)
        self.taken += (group.name, what, who) not in self.seen
        self.seen.add((group.name, what, who))
        return SimpleNamespace(wait=lambda: None)

    def all_reduce(self, *_: Any, group: Group, **__: Any) -> Any:
        return self.note(group, "all_reduce")

    def reduce(self, _: Any, root: int, *, group: Group, **__: Any) -> Any:
        return self.note(group, "reduce", root)

    def broadcast(self, _: Any, root: int, *, group: Group, **__: Any) -> Any:
        return self.note(group, "broadcast", root)

    isend, irecv = "send", "recv"

    def batch_isend_irecv(self, operations: list[Any]) -> list[Any]:
        return [self.note(group, str(what), peer) for what, _, peer, group in operations]


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> FakeDist:
    fake = FakeDist()
    monkeypatch.setattr(transport, "dist", fake)
    monkeypatch.setattr(transport, "uses_nccl", lambda _: True)
    monkeypatch.setattr(transport, "taken_outside_torch", lambda _: fake.taken)
    for name in ("all_gather", "reduce_scatter"):
        monkeypatch.setattr(transport, f"_{name}", lambda *_, group, name=name, async_op: fake.note(group, name))
    for name in transport.BLOCKS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return fake


def connections(seen: set[tuple[str, str, int]]) -> set[tuple[str, str, int]]:
    """What was taken down, with a send and a receive as one."""
    return {(group, "pair" if what in ("send", "recv") else what, who) for group, what, who in seen}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("nodes", "local"), [(2, 2), (3, 1), (1, 3)])
@pytest.mark.parametrize("compression", ["none", "int8"])
def test_warm_up_covers_every_operation_of_later_schedules(nccl, name, nodes, local, compression):
    """For any number of micro-batches and for evaluations, though groups are made when only few are known."""
    knobs: dict[str, Any] = {"strategy": name}
    if compression != "none":
        if "weights_compression" in find(name).refusals or nodes == 1:
            pytest.skip("nothing travels in 8 bits there")
        knobs |= {"weights_compression": compression}
        knobs |= {"gradients_compression": compression} if name != "flat" or local == 1 else {}
    world, model = nodes * local, llama(nodes * local + 1)
    at_first = [make(model, nodes, local, world, training=training, **knobs) for training in (True, False)]
    later = [make(model, nodes, local, 2 * world + 1, training=training, **knobs) for training in (True, False)]
    for rank in range(world):
        nccl.seen.clear()
        made = Transport(Topology.grid(nodes, local), rank, at_first, device=torch.device("cpu"))
        warmed = set(nccl.seen)
        for group, what, peer in warmed:
            assert what not in ("send", "recv") or {(group, "send", peer), (group, "recv", peer)} <= warmed
        nccl.seen.clear()
        for schedule in later:
            sizes = schedule.buffer_elements(rank)
            for action in schedule.programs[rank]:
                if action.op in (Op.COUNT, Op.NORM):
                    made.all_reduce(action, torch.zeros(1))
                elif action.op in (Op.EXCHANGE, Op.COLLECTIVE):
                    buffers = {one: torch.zeros(sizes[one]) for one in (*action.reads, *action.writes)}
                    (made.exchange if action.op is Op.EXCHANGE else made.collective)(action, buffers)
        used = connections(nccl.seen)
        first_sum = {(f"{lane} {group}", "all_reduce", -1) for lane, group in made._groups}
        assert used <= connections(warmed)
        assert connections(warmed) <= used | first_sum  # nothing that nobody needs


@pytest.mark.parametrize("name", NAMES)
def test_first_uses_of_all_ranks_complete_without_deadlock(name):
    """Every rank waits in each until all who take part in it have come to it, as under NCCL."""
    topology = Topology.grid(2, 3)
    schedules = [make(llama(7), 2, 3, 6, strategy=name), make(llama(7), 2, 3, 6, strategy=name, training=False)]
    left = {rank: deque(first_uses(schedules, rank)) for rank in range(6)}

    def who(rank: int) -> tuple[int, ...]:
        action = left[rank][0]
        if action.op is Op.EXCHANGE:
            return tuple(sorted((rank, action.transfers[0].peer)))
        return topology.group(action.group, rank)

    while any(left.values()):
        ready = [rank for rank in left if left[rank]]
        together = next(
            members
            for members in map(who, ready)
            if all(left[one] and who(one) == members for one in members)
            and len({(left[one][0].lane, left[one][0].group, left[one][0].collective) for one in members}) == 1
        )
        for one in together:
            left[one].popleft()


def test_nccl_groups_have_high_priority_and_few_blocks(nccl, monkeypatch):
    schedules = [make(llama(3), 2, 2, 4)]
    Transport(Topology.grid(2, 2), 0, schedules, device=torch.device("cpu"), timeout=timedelta(seconds=7))
    assert {group.name.split()[0] for group in nccl.groups} >= {"GATHER", "REDUCE", "INTER_W", "INTER_G"}
    for group in nccl.groups:
        assert group.options.is_high_priority_stream and group.options._timeout == timedelta(seconds=7)
        most = NEAR_BLOCKS if group.name.endswith("node") else FAR_BLOCKS[1]
        assert group.options.config.max_ctas == most and group.options.config.min_ctas == 1
    nccl.groups.clear()
    monkeypatch.setenv("NCCL_MAX_CTAS", "4")
    Transport(Topology.grid(2, 2), 0, schedules, device=torch.device("cpu"))
    assert nccl.groups and not any(vars(group.options.config) for group in nccl.groups)


def far_blocks_of(nccl: FakeDist, rate: float, **knobs: Any) -> set[int]:
    nccl.groups.clear()
    schedules = [make(llama(4), 2, 2, 4, **knobs)]
    Transport(Topology.grid(2, 2), 0, schedules, device=torch.device("cpu"), far_bytes_per_s=rate)
    return {group.options.config.max_ctas for group in nccl.groups if not group.name.endswith("node")}


def test_blocks_between_nodes_follow_the_link_rate(nccl):
    assert far_blocks_of(nccl, 1e9) == {2} and far_blocks_of(nccl, 25e9) == {3} and far_blocks_of(nccl, 1e12) == {4}
    assert far_blocks_of(nccl, 0.0) == {4}, "of a link that nobody has measured"
    assert far_blocks_of(nccl, 1e9, strategy="1f1b") >= {4}, "where activations travel"


def test_driver_memory_of_every_group_is_recorded(nccl):
    """The stand-in takes 100 for a communicator, and 1 for every first use."""
    made = Transport(Topology.grid(2, 2), 0, [make(llama(3), 2, 2, 4)], device=torch.device("cpu"))
    assert made.group_bytes.keys() == made._groups.keys()
    assert sum(made.group_bytes.values()) == nccl.taken == 100 * len(nccl.groups) + len(nccl.seen)
    assert min(made.group_bytes.values()) > 100


def test_groups_of_a_lane_are_one_split_if_torch_supports_it(nccl, monkeypatch):
    topology, schedules = Topology.grid(3, 8), [make(llama(3), 3, 8, 24)]
    before = Transport(topology, 5, schedules, device=torch.device("cpu"))
    one_by_one = len(nccl.groups)

    def split_group(*, split_ranks: Any, group_desc: str, pg_options: Any, backend: str, **_: Any) -> Group:
        assert backend == "cuda:nccl" and sorted(one for members in split_ranks for one in members) == list(range(24))
        nccl.splits.append(split_ranks)
        mine = next(members for members in split_ranks if 5 in members)
        return Group(mine, group_desc, pg_options)

    monkeypatch.setattr(nccl, "split_group", split_group, raising=False)
    backend = SimpleNamespace(supports_splitting=True)
    nccl.group.WORLD = SimpleNamespace(bound_device_id=0, _get_backend=lambda _: backend)
    nccl.groups.clear()
    made = Transport(topology, 5, schedules, device=torch.device("cpu"))
    assert len(nccl.splits) == len(made._groups) < one_by_one and not nccl.groups
    members = lambda one: {key: group.members for key, group in one._groups.items()}  # noqa: E731
    assert members(made) == members(before)
    backend.supports_splitting = False  # or no device is bound, or an older torch
    Transport(topology, 5, schedules, device=torch.device("cpu"))
    assert len(nccl.groups) == one_by_one
