"""Collectives of this project for FSDP2's public hooks ``set_custom_all_gather`` and ``set_custom_reduce_scatter``.

The hooks need an object with ``allocate`` and ``__call__``. Further facts about them:

* An all-gather may return a handle, and FSDP2 waits for it before it copies the weights out. So a gather can run in the
  background.
* FSDP2 does not wait for the result of a reduce-scatter: it orders it by CUDA streams, which the CPU does not have.
  With the sum as reduction and 1 as divisor, nothing reads the result before the optimizer, if gradients are removed
  from the parameters after each backward pass. So a reduction can run in the background, too, if `finish` is called
  before the result is read. On a GPU, streams have this effect.
* The output is ordered by global rank. So the pieces that are gathered first in a rail and then in a node must be put
  in order, which takes one copy.

gloo's own reduce-scatter is an all-reduce and a cut, in every form that torch offers: each rank sends 2 (P-1)/P of the
bytes instead of (P-1)/P. The reductions here send only the bytes of a reduce-scatter, as NCCL does.
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
"""Largest number of reductions in flight; the next one waits for the oldest. FSDP2 on CUDA keeps one by default."""

# torch 2.13 renamed all_gather_into_tensor; 2.11 has only the old name.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Allocate:
    """Allocator of new memory for every collective, as in FSDP2 without hooks."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class EventWork(dist.Work):
    """Handle of a lane's action, on which FSDP2 can wait."""

    def __init__(self, event: CpuEvent) -> None:
        super().__init__()
        self._event = event

    def wait(self, timeout: object = None) -> bool:
        self._event.wait()
        return True


class TransferLanes:
    """Worker threads with one process group each, so that the operations of a group have one order on all ranks."""

    def __init__(self, busy: BusyTime) -> None:
        self._busy, self._failure = busy, Failure()
        self._lanes: dict[str, CpuLane] = {}
        self._groups: dict[str, dist.ProcessGroup] = {}

    def add(self, lane: str, every: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """Create a lane and its process group, and return the group. All ranks call this in the same order.

        Args:
            lane: name of the lane.
            every: members of all groups of this lane; this rank is in one of them.
        """
        own_group = None
        for members in every:
            group = dist.new_group(sorted(members), group_desc=f"lab {lane}")
            if dist.get_rank() in members:
                own_group = group
        assert isinstance(own_group, dist.ProcessGroup)
        self._lanes[lane], self._groups[lane] = CpuLane(lane, self._failure), own_group
        return own_group

    def submit(self, lane: str, run: Callable[[], object], after: Sequence[CpuEvent] = ()) -> CpuEvent:
        """Queue ``run`` in the thread of ``lane``, after the events ``after``; return at once the event of its end."""

        def timed() -> None:
            with self._busy(lane):
                run()

        return self._lanes[lane].submit(timed, after, lane)

    def close(self) -> None:
        """End all threads and destroy their process groups."""
        for lane in self._lanes.values():
            lane.close()
        for group in self._groups.values():
            dist.destroy_process_group(group)


def _reduce(target: Tensor, source: Tensor, group: dist.ProcessGroup) -> None:
    """Reduce-scatter ``source`` into ``target`` in one ring over all ranks of ``group``."""
    ring_reduce_scatter(target, source, dist.get_process_group_ranks(group), group)


def rail_major(topology: Topology, rank: int) -> list[int]:
    """Return all ranks, rail by rail in the order of this node's ranks.

    A gather over the rail and then over the node lays pieces out in this order.

    >>> rail_major(Topology.grid(3, 2), 0)
    [0, 2, 4, 1, 3, 5]
    """
    node = sorted(topology.group("node", rank))
    return [peer for member in node for peer in sorted(topology.group("rail", member))]


def rails(topology: Topology) -> list[tuple[int, ...]]:
    """Return the ranks of every rail."""
    return [topology.rail(i) for i in range(topology.local_size)]


class HierarchicalGather(Allocate):
    """All-gather over all ranks in two steps: first in the rail (lane INTER_W), then in the node (lane GATHER).

    Each piece enters a node once: (1-1/D) of the weights cross the link of each of D nodes, where gloo's ring over all
    P ranks carries (P-1)/P. A gather over fewer ranks than all is passed to gloo unchanged.
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
    """Reduce-scatter that returns at once; its results must not be read before `finish`."""

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
        """Start the reduction of ``source`` into ``output`` without waiting, and return the event of its end."""
        raise NotImplementedError

    def finish(self) -> None:
        """Wait until all reductions that were started are done."""
        while self._events:
            self._events.popleft().wait()


class RingReduction(BackgroundReduction):
    """Reduction in one ring over all ranks (lane REDUCE)."""

    def __init__(self, topology: Topology, lanes: TransferLanes) -> None:
        super().__init__(lanes)
        self._world = lanes.add("REDUCE", [range(topology.world_size)])

    def _submit(self, output: Tensor, source: Tensor) -> CpuEvent:
        return self._lanes.submit("REDUCE", lambda: _reduce(output, source, self._world))


class HierarchicalReduction(BackgroundReduction):
    """Reduction in a ring inside the node (lane REDUCE), then in a ring over the rail (lane INTER_G)."""

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
    """Reduce-scatter ``source`` into ``target`` in a ring: partial sums go round, and each member adds its own piece.

    This sends the least possible bytes, equally over every link between neighbours, and adds in a fixed order. gloo's
    own reduce_scatter is an all-reduce and a cut: twice the bytes.

    Args:
        target: result, of shape (n,).
        source: pieces in the order of the members, of shape (members x n,); it is not changed.
        members: ranks of the ring, in its order.
        group: process group of the messages.
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
