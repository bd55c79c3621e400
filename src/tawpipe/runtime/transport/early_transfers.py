"""Early start of gloo messages: receives are posted, and rings begin, before their lane reaches the action.

A send of gloo waits until the receive has been posted, and the notice of that takes one latency of the link. So a
receive is posted as soon as its buffer is free, and the first message of a ring is sent then, too. Tags pair the
messages. A tag is made from the number of the action and from the content of the message.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from tawpipe.schedule.actions import Action, Lane, Op, Transfer
from tawpipe.schedule.buffers import Buffer
from tawpipe.topology import Topology


class TransportError(RuntimeError):
    """Error of a message that is not the one this rank expects."""


def compare_headers(local: Tensor, theirs: Tensor, what: str) -> None:
    """Compare the sequence number and the checksum of a message on its two sides.

    Args:
        local: Header of this rank: number and checksum.
        theirs: Header of the other rank.
        what: Description of the message for the error.

    Raises:
        TransportError: If the headers differ.
    """
    if not torch.equal(local, theirs):
        raise TransportError(
            f"{what}: this rank is at message {local.tolist()} (number, checksum), the other at {theirs.tolist()}"
        )


@dataclass
class Message:
    """Send or receive under way, with its header message in strict mode."""

    work: dist.Work
    tensor: Tensor
    header: tuple[dist.Work, Tensor, Tensor, str] | None
    timeout: timedelta

    def wait(self) -> None:
        """Wait for the header, compare it, and wait for the message."""
        if self.header is not None:
            work, local, theirs, what = self.header
            work.wait(self.timeout)
            compare_headers(local, theirs, what)
        self.work.wait(self.timeout)


@dataclass
class Begun:
    """Messages of one action that have been started; for an EXCHANGE also the tensors that it receives into."""

    number: int = 0
    leaving: list[Message] = field(default_factory=list)
    coming: list[Message] = field(default_factory=list)
    received: dict[Buffer, Tensor] = field(default_factory=dict)


class EarlyTransfers:
    """Exchanges, all-gathers and reduce-scatters of one rank over gloo, each in two parts: ``begin`` and the rest.

    All-gathers and reduce-scatters are rings. They send the fewest possible bytes, equally many over each link between
    neighbours, and they add in a fixed order. gloo's own operations send twice the bytes or copy: its all_gather
    receives into a second buffer of the target's size and copies from there, and its reduce_scatter is an all-reduce
    and a cut.

    Args:
        topology: Nodes and ranks.
        rank: This rank.
        groups: Process groups by lane and name.
        strict: Check the number and the action of every message.
    """

    def __init__(
        self, topology: Topology, rank: int, groups: Mapping[tuple[Lane, str], dist.ProcessGroup], *, strict: bool
    ) -> None:
        self.timeout = timedelta(minutes=10)
        """Time after which waiting for a message fails. Gloo itself keeps the timeout with which its group was made."""
        self._topology, self._rank, self._groups, self._strict = topology, rank, groups, strict
        self._begun: dict[Lane, deque[Begun]] = {lane: deque() for lane in Lane}
        self._numbers: dict[tuple, int] = {}

    def does(self, action: Action) -> bool:
        """Return True if this class runs the action: an uncompressed EXCHANGE or ring collective of a known group."""
        if action.compression or (action.lane, action.group) not in self._groups:
            return False
        return action.op is Op.EXCHANGE or action.collective in ("all_gather", "reduce_scatter")

    def begins(self, action: Action) -> bool:
        """Return True if ``begin`` may be called for this action before its lane reaches it."""
        return action.begins_early and self.does(action)

    def begin(self, action: Action, buffers: Mapping[Buffer, Tensor]) -> None:
        """Post the receives of an EXCHANGE, or start a ring.

        Call it in the order in which the lane reaches the actions that are begun. It may write into ``buffers`` from
        now on.
        """
        self._begun[action.lane].append(self._begin(action, buffers))

    def exchange(self, action: Action, buffers: Mapping[Buffer, Tensor]) -> Mapping[Buffer, Tensor]:
        """Run an EXCHANGE, or the rest of it if it was begun, wait for its messages, and return the received tensors.

        If it was begun, ``buffers`` need only hold the tensors to send.
        """
        begun = self._rest_of(action, buffers) if action.writes else Begun()
        for t in action.transfers:
            if t.send:
                number = self._number(action, self._rank, t.peer)
                begun.leaving.append(self._message(action, t.peer, buffers[t.buffer], number, _about(t), send=True))
        for message in (*begun.coming, *begun.leaving):
            message.wait()
        return begun.received

    def collective(self, action: Action, buffers: Mapping[Buffer, Tensor]) -> None:
        """Run an all_gather or a reduce_scatter, or the rest of it if it was begun, and wait for its end."""
        begun = self._rest_of(action, buffers)
        self._end_ring(action, begun, buffers[action.reads[0]], buffers[action.writes[0]])

    def ring(self, action: Action, source: Tensor, target: Tensor) -> None:
        """Run a whole all_gather or reduce_scatter from ``source`` to ``target``, and wait for its end."""
        self._end_ring(action, self._begin_ring(action, source, target), source, target)

    def every(self, action: Action, values: Tensor) -> Tensor:
        """Gather a few numbers of every member of the action's group; return them as ``[members, *values.shape]``.

        Each member sends straight to all others. This takes two latencies. gloo's all-reduce takes several latencies
        for each hop, and its number of hops grows with the group.
        """
        members = self._topology.group(action.group, self._rank)
        here, begun = members.index(self._rank), Begun(self._number(action))
        numbers = values.new_empty(len(members), *values.shape)
        numbers[here] = values
        for sends in (False, True):
            for place in (*range(here + 1, len(members)), *range(here)):
                self._hop(action, begun, members[place], numbers[here if sends else place], 0, send=sends)
        for message in (*begun.coming, *begun.leaving):
            message.wait()
        return numbers

    def _rest_of(self, action: Action, buffers: Mapping[Buffer, Tensor]) -> Begun:
        """Remove and return the earliest begun action of this lane, or begin the given action if there is none."""
        begun = self._begun[action.lane]
        return begun.popleft() if begun else self._begin(action, buffers)

    def _begin(self, action: Action, buffers: Mapping[Buffer, Tensor]) -> Begun:
        """Post the receives of an EXCHANGE, or start a ring; return the messages under way."""
        if action.op is not Op.EXCHANGE:
            return self._begin_ring(action, buffers[action.reads[0]], buffers[action.writes[0]])
        begun = Begun()
        for t in action.transfers:
            if not t.send:
                begun.received[t.buffer] = buffers[t.buffer]
                number = self._number(action, t.peer, self._rank)
                begun.coming.append(self._message(action, t.peer, buffers[t.buffer], number, _about(t), send=False))
        return begun

    def _begin_ring(self, action: Action, source: Tensor, target: Tensor) -> Begun:
        """Post the receives of a ring that need no other buffers, and send its first message to the right neighbour."""
        size, here, left, right = self._neighbours(action)
        begun = Begun(self._number(action))
        if size == 1:
            target.copy_(source)
        elif action.collective == "all_gather":
            pieces = target.view(size, -1)
            if pieces[here].data_ptr() != source.data_ptr():
                pieces[here].copy_(source)
            for hop in range(1, size):
                self._hop(action, begun, left, pieces[(here - hop) % size], hop, send=False)
            self._hop(action, begun, right, pieces[here], 1, send=True)
        else:  # partial sums travel around the ring
            self._hop(action, begun, left, target if size == 2 else torch.empty_like(target), 1, send=False)
            self._hop(action, begun, right, source.view(size, -1)[here - 1], 1, send=True)
        return begun

    def _end_ring(self, action: Action, begun: Begun, source: Tensor, target: Tensor) -> None:
        """Run the remaining hops of a ring: wait for each message, add to it in a reduce_scatter, and send it on."""
        size, here, left, right = self._neighbours(action)
        gathers = action.collective == "all_gather"
        for hop in range(1, size):
            last = hop == size - 1
            if not gathers and not last:
                into = target if hop == size - 2 else torch.empty_like(target)
                self._hop(action, begun, left, into, hop + 1, send=False)
            begun.coming[hop - 1].wait()
            arrived = begun.coming[hop - 1].tensor
            if not gathers:
                arrived.add_(source.view(size, -1)[(here - hop - 1) % size])
            if not last:
                self._hop(action, begun, right, arrived, hop + 1, send=True)
        for message in begun.leaving:
            message.wait()

    def _neighbours(self, action: Action) -> tuple[int, int, int, int]:
        """Return the group's size, this rank's index in it, and the ranks of its left and right neighbours."""
        members = self._topology.group(action.group, self._rank)
        here = members.index(self._rank)
        return len(members), here, members[here - 1], members[(here + 1) % len(members)]

    def _hop(self, action: Action, begun: Begun, peer: int, piece: Tensor, hop: int, *, send: bool) -> None:
        """Start the send or the receive of one hop of a collective, and add it to the messages in ``begun``."""
        about = f"{action.collective or action.op} b{action.block} m{action.micro_batch} u{action.unit} {hop}"
        message = self._message(action, peer, piece, begun.number, about, send=send)
        (begun.leaving if send else begun.coming).append(message)

    def _number(self, action: Action, *way: int) -> int:
        """Return the next number of the action's message counter, from 1, see ``Action.counter``."""
        key = action.counter(*way)
        self._numbers[key] = self._numbers.get(key, 0) + 1
        return self._numbers[key]

    def _message(self, action: Action, peer: int, tensor: Tensor, number: int, about: str, *, send: bool) -> Message:
        """Start one send or receive, in strict mode with its header before it, and return it."""
        checksum, group = zlib.crc32(about.encode()), self._groups[action.lane, action.group]
        # messages of different counters must never pair
        counted = 1 if action.op is Op.EXCHANGE else 2 + action.begins_early
        tag, move = counted << 29 | number % (1 << 8) << 21, dist.isend if send else dist.irecv
        header = None
        if self._strict:
            local = torch.tensor([number, checksum])
            theirs = local if send else torch.empty_like(local)
            first = move(theirs, peer, group=group, tag=tag)
            assert first is not None
            header = (
                first,
                local,
                theirs,
                f"{about} {'to' if send else 'from'} rank {peer} on {action.lane} {action.group}",
            )
        work = move(tensor, peer, group=group, tag=tag | checksum % (1 << 20) << 1 | 1)
        assert work is not None
        return Message(work, tensor, header, self.timeout)


def _about(transfer: Transfer) -> str:
    """Return the name that identifies a transfer on both ranks: its activation buffer, or its unit."""
    return str(transfer.buffer) if transfer.buffer.is_activation else f"u{transfer.unit}"
