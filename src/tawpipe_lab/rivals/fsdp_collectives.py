"""Collectives of ours for FSDP2, for its public hooks ``set_custom_all_gather`` and ``set_custom_reduce_scatter``.

The hooks want an object with ``allocate`` and ``__call__``; what they need beyond
it:

* An all-gather may return a handle, and FSDP2 waits for it before it copies the weights out. So a gather can run in the
  background.
* The result of a reduce-scatter is not waited for: FSDP2 orders it by CUDA streams, which the CPU does not have. With
  the sum as reduction and 1 as divisor nothing reads it before the optimizer, if gradients are taken off the parameters
  after each backward pass; so a reduction can run in the background too, when somebody calls `finish` before reading.
  That is what streams do on a GPU.
* The output is laid out by global rank, so what a rail and a node gather one after the other has to be put in order:
  one copy.

gloo's own reduce-scatter is an all-reduce and a cut, in every form that torch offers: 2 (P-1)/P of the bytes leave each
rank instead of (P-1)/P. These send what a reduce-scatter must send, as NCCL does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tawpipe.runtime.lanes import CpuEvent, CpuLane, Failure
from tawpipe.topology import Topology
from tawpipe_lab.sleeper import BusyTime

IN_FLIGHT = 2
"""Reductions under way at most; the next one waits for the oldest. FSDP2 on CUDA keeps one unless told otherwise."""

# torch 2.13 renamed it; 2.11 has only the old name.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Allocate:
    """Fresh memory for every collective, as FSDP2 does without hooks."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class EventWork(dist.Work):
    """The end of a lane's action, as FSDP2 wants to wait for it."""

    def __init__(self, event: CpuEvent) -> None:
        super().__init__()
        self._event = event

    def wait(self, timeout: object = None) -> bool:
        self._event.wait()
        return True


class TransferLanes:
    """Worker threads with a process group each, so that every group's operations have one order on all ranks."""

    def __init__(self, busy: BusyTime) -> None:
        self._busy, self._failure = busy, Failure()
        self._lanes: dict[str, CpuLane] = {}
        self._groups: dict[str, dist.ProcessGroup] = {}

    def add(self, lane: str, every: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """A lane, and its group: the one of ``every`` that this rank is in. All ranks call this in one order."""
        mine = None
        for members in every:
            group = dist.new_group(sorted(members), group_desc=f"lab {lane}")
            if dist.get_rank() in members:
                mine = group
        assert isinstance(mine, dist.ProcessGroup)
        self._lanes[lane], self._groups[lane] = CpuLane(lane, self._failure), mine
        return mine

    def submit(self, lane: str, run: Callable[[], object], after: Sequence[CpuEvent] = ()) -> CpuEvent:
        def timed() -> None:
            with self._busy(lane):
                run()

        return self._lanes[lane].submit(timed, after, lane)

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()
        for group in self._groups.values():
            dist.destroy_process_group(group)


def _reduce(target: Tensor, source: Tensor, group: dist.ProcessGroup) -> None:
    ring_reduce_scatter(target, source, dist.get_process_group_ranks(group), group)


def rail_major(topology: Topology, rank: int) -> list[int]:
    """All ranks, rail by rail in the order of this node's ranks: how gathering a rail and then a node lays pieces out.

    >>> rail_major(Topology.grid(3, 2), 0)
    [0, 2, 4, 1, 3, 5]
    """
    node = sorted(topology.group("node", rank))
    return [peer for member in node for peer in sorted(topology.group("rail", member))]


def rails(topology: Topology) -> list[tuple[int, ...]]:
    return [topology.rail(i) for i in range(topology.local_size)]


class HierarchicalGather(Allocate):
    """All-gather of the world: among the ranks of equal local rank in all nodes (lane INTER_W), then inside the node
    (lane GATHER).

    Each piece enters a node once: (1-1/D) of the weights cross the link of each of D nodes, where gloo's ring over all
    P ranks carries (P-1)/P.
    A gather over fewer ranks than the world is handed to gloo as it is.
    """

    def __init__(self, topology: Topology, rank: int, lanes: TransferLanes) -> None:
        self._lanes, self._order = lanes, rail_major(topology, rank)
        self._nodes = topology.num_nodes
        self._rail = lanes.add("INTER_W", rails(topology))
        self._node = lanes.add("GATHER", topology.nodes)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if group.size() != len(self._order):
            return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        of_rail = input_tensor.new_empty(self._nodes * input_tensor.numel())

        def inside() -> None:
            of_all = torch.empty_like(output_tensor)
            all_gather(of_all, of_rail, group=self._node)
            output_tensor.view(len(self._order), -1)[self._order] = of_all.view(len(self._order), -1)

        arrived = self._lanes.submit("INTER_W", lambda: all_gather(of_rail, input_tensor, group=self._rail))
        done = self._lanes.submit("GATHER", inside, (arrived,))
        if async_op:
            return EventWork(done)
        done.wait()
        return None


class BackgroundReduction(Allocate):
    """A reduce-scatter that returns at once. Nobody may read its results before `finish`."""

    def __init__(self, lanes: TransferLanes) -> None:
        self._lanes = lanes
        self._events: deque[CpuEvent] = deque()

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> dist.Work | None:
        assert op == dist.ReduceOp.SUM, op
        while len(self._events) >= IN_FLIGHT:
            self._events.popleft().wait()
        self._events.append(self._submit(output_tensor, input_tensor))
        return None

    def _submit(self, output: Tensor, source: Tensor) -> CpuEvent:
        raise NotImplementedError

    def finish(self) -> None:
        """Wait for every reduction."""
        while self._events:
            self._events.popleft().wait()


class RingReduction(BackgroundReduction):
    """One ring over all ranks (lane REDUCE)."""

    def __init__(self, topology: Topology, lanes: TransferLanes) -> None:
        super().__init__(lanes)
        self._world = lanes.add("REDUCE", [range(topology.world_size)])

    def _submit(self, output: Tensor, source: Tensor) -> CpuEvent:
        return self._lanes.submit("REDUCE", lambda: _reduce(output, source, self._world))


class HierarchicalReduction(BackgroundReduction):
    """A ring inside the node (lane REDUCE), then one among the ranks of equal local rank in all nodes (INTER_G)."""

    def __init__(self, topology: Topology, rank: int, lanes: TransferLanes) -> None:
        super().__init__(lanes)
        self._order, self._nodes = rail_major(topology, rank), topology.num_nodes
        self._node = lanes.add("REDUCE", topology.nodes)
        self._rail = lanes.add("INTER_G", rails(topology))

    def _submit(self, output: Tensor, source: Tensor) -> CpuEvent:
        of_node = output.new_empty(self._nodes * output.numel())

        def inside() -> None:
            ordered = source.view(len(self._order), -1)[self._order]
            _reduce(of_node, ordered.view(-1), self._node)

        inner = self._lanes.submit("REDUCE", inside)
        return self._lanes.submit("INTER_G", lambda: _reduce(output, of_node, self._rail), (inner,))


def ring_reduce_scatter(
    target: Tensor, source: Tensor, members: Sequence[int], group: dist.ProcessGroup | None
) -> None:
    """Partial sums go round the members, each adding its own piece: the least bytes there are, alike over every link
    between neighbours, in one order of additions.

    gloo's own reduce_scatter is an all-reduce and a cut: twice the bytes.

    Args:
        target: (n,).
        source: (members x n,), piece by piece in their order; not changed.
    """
    size, here = len(members), members.index(dist.get_rank())
    right, left = members[(here + 1) % size], members[here - 1]
    pieces = source.view(size, -1)
    leaving: Tensor = pieces[here - 1]
    if size == 1:
        target.copy_(leaving)
    for hop in range(2, size + 1):
        arriving = target if hop == size else torch.empty_like(target)
        send, receive = dist.isend(leaving, right, group=group), dist.irecv(arriving, left, group=group)
        assert send is not None and receive is not None
        receive.wait()
        arriving.add_(pieces[(here - hop) % size])
        send.wait()
        leaving = arriving
