"""Transport: moves buffers between ranks with torch.distributed.

Each pair of lane and group has its own process group, because a communicator runs its operations in the order in which
they were issued, and two lanes must not share that order. All groups are made at the start, and are warmed up with
every operation that a schedule will run on them (warm_up.py). The methods are called inside a lane: they block the
lane's thread on the CPU, and order the current stream on CUDA.

In strict mode every message follows a header with its sequence number in the group and a checksum of its action. The
receiver compares it with its own. So a schedule that runs on gloo only by luck, because tags or sizes match, fails with
a clear error.

An action may ask for 8-bit numbers (compression.py). A gathered unit is then equal on all ranks, also on the owner of a
shard. A reduction rounds every rank's contribution once, and adds them in the order of the group. Gradients may also be
coded without loss (exact_gradients.py). This needs gloo, which accepts a message shorter than its receive buffer, so
that the receiver need not know the length before.
"""

from __future__ import annotations

import inspect
import math
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tawpipe.runtime.memory import taken_outside_torch
from tawpipe.runtime.transport.compression import Scratch, Sent, decode, encode
from tawpipe.runtime.transport.early_transfers import EarlyTransfers, TransportError, compare_headers
from tawpipe.runtime.transport.exact import NOTHING, WHOLE, ChangeForm, decode_change, encode_change
from tawpipe.runtime.transport.exact_gradients import decode_gradient, encode_gradient
from tawpipe.runtime.transport.warm_up import few_numbers, first_uses
from tawpipe.runtime.world import set_group_timeout
from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.buffers import Buffer
from tawpipe.schedule.spec import CODED_PART, coded_part_bytes
from tawpipe.schedule.step import Schedule
from tawpipe.topology import Topology

__all__ = ["Transport", "TransportError", "needed_groups"]

# torch 2.13 renamed these; 2.11 has only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


FAR_BLOCKS, NEAR_BLOCKS = (2, 4), 16
"""Thread blocks of an NCCL kernel. Each occupies a multiprocessor, even while it waits for a peer.

``FAR_BLOCKS`` is the least and the most if the link between nodes is the limit; activations between stages use the
most. ``NEAR_BLOCKS`` is for other transfers inside a node.
"""
BLOCK_BYTES_PER_S = 10e9
"""Bytes per second with which one block fills a link between nodes."""
BLOCKS_VARIABLES = ("NCCL_MAX_CTAS", "NCCL_MIN_CTAS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS")

UNUSED_TAG = 1 << 28
"""Tag that no message has: tags of ``EarlyTransfers`` begin at twice this number."""


def needed_groups(schedules: Iterable[Schedule]) -> list[tuple[Lane, str]]:
    """Return the (lane, group) pairs that any rank of any schedule uses, sorted, so that all ranks use one order.

    Schedules for a single rank need no groups.
    """
    pairs = set()
    for schedule in schedules:
        if schedule.topology.world_size == 1:
            continue
        for program in schedule.programs:
            for action in program:
                if action.group:
                    pairs.add((action.lane, action.group))
    return sorted(pairs)


def uses_nccl(device: torch.device) -> bool:
    return device.type == "cuda"


def far_blocks(bytes_per_s: float) -> int:
    """Return the number of NCCL blocks that fill a device's share of a link between nodes.

    Returns the most blocks if the rate is unknown (0).

    >>> far_blocks(3e9), far_blocks(25e9), far_blocks(50e9), far_blocks(0)
    (2, 3, 4, 4)
    """
    least, most = FAR_BLOCKS
    return min(most, max(least, math.ceil(bytes_per_s / BLOCK_BYTES_PER_S))) if bytes_per_s else most


def nccl_options(timeout: timedelta, blocks: int) -> Any:
    """Return options of an NCCL group whose transfers run beside large kernels.

    Its stream has high priority, so that transfers need not wait for a kernel to end. It uses few blocks, as each keeps
    a multiprocessor from computing during a transfer. Block limits that the user has set for NCCL stay.

    Args:
        timeout: Time limit of operations.
        blocks: Largest number of blocks.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    if not any(name in os.environ for name in BLOCKS_VARIABLES):
        options.config.min_ctas, options.config.max_ctas = 1, blocks
    return options


def splits(device: torch.device) -> bool:
    """Return True if torch can make all groups of a lane with one split of the communicator of all ranks.

    ``new_group`` instead needs one split of all ranks for each group. Earlier releases of torch cannot name the backend
    of a two-backend group to split, and give the options of one backend to the other.
    """
    split, everyone = getattr(dist, "split_group", None), dist.group.WORLD
    if split is None or "backend" not in inspect.signature(split).parameters or everyone is None:
        return False
    return everyone.bound_device_id is not None and everyone._get_backend(device).supports_splitting


def make_group(
    every: Sequence[Sequence[int]], rank: int, device: torch.device, *, timeout: timedelta, blocks: int, name: str
) -> dist.ProcessGroup:
    """Make the process groups in ``every``, run a first all-reduce, and return the group of this rank.

    Call on all ranks.

    Args:
        every: Members of each group; every rank is in exactly one.
        rank: This rank.
        device: Device of this rank: NCCL for a GPU, else gloo.
        timeout: Time limit of operations.
        blocks: Largest number of NCCL blocks.
        name: Description of the groups.
    """
    joined, nccl = None, uses_nccl(device)
    if nccl and splits(device):
        split = [list(members) for members in every]
        options = nccl_options(timeout, blocks)
        joined = dist.split_group(
            split_ranks=split, timeout=timeout, pg_options=options, group_desc=name, backend="cuda:nccl"
        )
    else:
        for members in every:  # every rank makes every group, in one order
            group = dist.new_group(
                list(members),
                timeout=timeout,
                backend="nccl" if nccl else "gloo",
                pg_options=nccl_options(timeout, blocks) if nccl else None,
                group_desc=name,
                device_id=device if nccl else None,
            )
            if rank in members:
                joined = group
    assert isinstance(joined, dist.ProcessGroup)
    dist.all_reduce(torch.zeros(1, device=device), group=joined)
    return joined


class Transport:
    """Process groups of one rank, and the operations on them.

    Args:
        topology: Nodes and ranks.
        rank: This rank.
        schedules: All schedules that will run. Their groups are made now.
        device: Device of the buffers. CUDA uses NCCL, everything else gloo.
        strict: Check the sequence number and the action of every message.
        timeout: Time after which an operation fails.
        far_bytes_per_s: Rate of a device's share of the link between nodes, in bytes per second; 0 if not measured.
    """

    def __init__(
        self,
        topology: Topology,
        rank: int,
        schedules: Iterable[Schedule],
        *,
        device: torch.device,
        strict: bool = False,
        timeout: timedelta = timedelta(minutes=10),
        far_bytes_per_s: float = 0.0,
    ) -> None:
        self.topology, self.rank, self.device, self.strict = topology, rank, device, strict
        self._nccl, self._far_blocks = uses_nccl(device), far_blocks(far_bytes_per_s)
        self.group_bytes: dict[tuple[Lane, str], int] = {}
        """GPU bytes that NCCL has allocated for each group, including its first operations; empty without a GPU."""
        self._groups: dict[tuple[Lane, str], dist.ProcessGroup] = {}
        self._sequence: dict[tuple[Lane, str], int] = {}
        self._scratch = {lane: Scratch(device) for lane in Lane}
        self.early_transfers = None if self._nccl else EarlyTransfers(topology, rank, self._groups, strict=strict)
        """Runs operations in two parts, the first before the lane reaches the action; None with NCCL (no tags)."""
        self.gradients_sent = Sent()
        """Bytes of gradients sent with lossless coding."""
        if topology.world_size == 1:
            return
        self.set_timeout(timeout)
        schedules = list(schedules)
        before = self._taken()
        for key in needed_groups(schedules):
            self._groups[key] = self._make(key, schedules, timeout)
            self._sequence[key] = 0
            before = self._weigh(key, before)
        for key, actions in groupby(first_uses(schedules, rank), lambda action: (action.lane, action.group)):
            for action in actions:
                buffers = few_numbers(action, topology, rank, device)
                (self.exchange if action.op is Op.EXCHANGE else self.collective)(action, buffers)
            before = self._weigh(key, before)

    def _taken(self) -> int:
        """Return the GPU bytes in use outside torch's allocator; 0 without NCCL."""
        return taken_outside_torch(self.device) if self._nccl else 0

    def _weigh(self, key: tuple[Lane, str], before: int) -> int:
        """Add the GPU bytes in use now minus ``before`` to the group's bytes; return the bytes in use now."""
        now = self._taken()
        if self._nccl:
            self.group_bytes[key] = self.group_bytes.get(key, 0) + max(0, now - before)
        return now

    def _make(self, key: tuple[Lane, str], schedules: Sequence[Schedule], timeout: timedelta) -> dist.ProcessGroup:
        """Make the group ``key`` on all ranks, with NCCL blocks that suit its transfers; return this rank's group."""
        lane, name = key
        members = self.topology.group(name, self.rank)
        assert list(members) == sorted(members), "torch numbers the members of a group in the order of their ranks"
        if name == "world":
            every = [members]
        elif name == "node":
            every = list(self.topology.nodes)
        elif name == "rail":
            every = [self.topology.rail(i) for i in range(self.topology.local_size)]
        else:
            every = list(dict.fromkeys(self.topology.group(name, rank) for rank in range(self.topology.world_size)))
        stages = any(
            transfer.buffer.is_activation
            for schedule in schedules
            for program in schedule.programs
            for action in program
            if (action.lane, action.group) == key
            for transfer in action.transfers
        )
        blocks = FAR_BLOCKS[1] if stages else self._far_blocks if self._far(name) else NEAR_BLOCKS
        return make_group(every, self.rank, self.device, timeout=timeout, blocks=blocks, name=f"{lane} {name}")

    def _far(self, group: str) -> bool:
        """Return True if the group has members in several nodes."""
        return len({self.topology.node_of(member) for member in self.topology.group(group, self.rank)}) > 1

    def close(self) -> None:
        """Destroy every group. Call on all ranks, with no operation under way."""
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups.clear()

    def abort(self) -> None:
        """Break all connections. Operations that wait for a message, here or on a peer, end with an error."""
        for group in self._groups.values():
            if self._nccl:
                group.abort()
            elif (size := group.size()) > 1:
                # gloo closes a group's connections only when a wait has timed out.
                with suppress(RuntimeError):
                    group.recv([torch.empty(1)], (group.rank() + 1) % size, UNUSED_TAG).wait(timedelta(milliseconds=1))

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of every group's operations: long for the first step, short afterwards."""
        if self.early_transfers is not None:
            self.early_transfers.timeout = timeout
        for group in self._groups.values():
            set_group_timeout(timeout, group)

    # operations, in the lane of their action

    def collective(self, action: Action, buffers: Mapping[Buffer, Tensor]) -> None:
        """Run a COLLECTIVE on the tensors in ``buffers`` that the action names, and wait for it.

        With gloo the thread waits, with NCCL the current stream. The tensors have exactly the sizes to send and to
        receive."""
        if self.early_transfers is not None and self.early_transfers.does(action):
            self.early_transfers.collective(action, buffers)
            return
        key = (action.lane, action.group)
        group = self._groups[key]
        if self.strict:
            self._check_collective(key, action)
        if action.compression == "exact":
            self._coded_sum(action, buffers[action.reads[0]], buffers[action.writes[0]], group)
        elif action.compression:
            self._in_8_bits(action, buffers[action.reads[0]], buffers[action.writes[0]], group)
        elif action.collective in ("all_gather", "reduce_scatter"):
            self._apart(action, buffers[action.reads[0]], buffers[action.writes[0]], group)
        else:
            buffer = buffers[(action.writes or action.reads)[0]]
            if action.collective == "all_reduce":
                self._wait(dist.all_reduce(buffer, group=group, async_op=True))
            elif action.collective == "reduce":
                self._wait(dist.reduce(buffer, action.root, group=group, async_op=True))
            else:
                assert action.collective == "broadcast", action
                self._wait(dist.broadcast(buffer, action.root, group=group, async_op=True))

    def together(self, action: Action, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Run an all_gather or a reduce_scatter for each (source, target) pair of tensors, instead of on buffers."""
        key = (action.lane, action.group)
        if self.strict:
            self._check_collective(key, action)
        for source, target in pairs:
            self._whole(action, source, target)

    def _whole(self, action: Action, source: Tensor, target: Tensor) -> None:
        """Run an uncompressed all_gather or reduce_scatter of which no part has begun, and wait for it."""
        if self.early_transfers is not None:
            self.early_transfers.ring(action, source, target)
        else:
            self._apart(action, source, target, self._groups[action.lane, action.group])

    def _apart(self, action: Action, source: Tensor, target: Tensor, group: dist.ProcessGroup) -> None:
        """Run torch's all_gather or reduce_scatter of the group, and wait for it."""
        run = _all_gather if action.collective == "all_gather" else _reduce_scatter
        self._wait(run(target, source, group=group, async_op=True))

    def exchange(self, action: Action, buffers: Mapping[Buffer, Tensor]) -> Mapping[Buffer, Tensor]:
        """Run an EXCHANGE: start all its sends and receives together, wait for them, and return the received tensors.

        ``buffers`` need not hold the tensors to receive into if the receives were posted early.
        """
        if self.early_transfers is not None and self.early_transfers.does(action):
            return self.early_transfers.exchange(action, buffers)
        key = (action.lane, action.group)
        group = self._groups[key]
        if self.strict:
            self._check_exchange(key, action)
        messages = [buffers[t.buffer] for t in action.transfers]
        if action.compression:
            plain, messages = (
                messages,
                self._scratch[action.lane].take([message.numel() for message in messages], action.compression),
            )
            for t, values, message in zip(action.transfers, plain, messages, strict=True):
                if t.send:
                    encode(values, action.compression, message)
        # Receives come first: gloo moves the two directions in turn, not together, if the sends are posted first.
        operations = [
            dist.P2POp(dist.isend if t.send else dist.irecv, message, t.peer, group)
            for t, message in sorted(zip(action.transfers, messages, strict=True), key=lambda pair: pair[0].send)
        ]
        for work in dist.batch_isend_irecv(operations):
            self._wait(work)
        if action.compression:
            for t, message in zip(action.transfers, messages, strict=True):
                if not t.send:
                    decode(message, action.compression, buffers[t.buffer])
        return {t.buffer: buffers[t.buffer] for t in action.transfers if not t.send}

    def all_reduce(self, action: Action, values: Tensor) -> None:
        """Sum a few ``values`` over the action's group, in place."""
        if self.topology.world_size > 1:
            self._of_all(action, values, dist.ReduceOp.SUM)

    def largest(self, action: Action, values: Tensor) -> None:
        """Replace each of a few ``values`` by its maximum over the action's group, in place."""
        self._of_all(action, values, dist.ReduceOp.MAX)

    def _of_all(self, action: Action, values: Tensor, reduction: Any) -> None:
        """Reduce a few ``values`` over the action's group, in place, with a sum or a maximum."""
        if self.early_transfers is not None:
            every = self.early_transfers.every(action, values)
            torch.sum(every, 0, out=values) if reduction == dist.ReduceOp.SUM else torch.amax(every, 0, out=values)
            return
        key = (action.lane, action.group)
        if self.strict:
            self._check_collective(key, action)
        self._wait(dist.all_reduce(values, reduction, group=self._groups[key], async_op=True))

    def refresh(self, action: Action, home: Tensor, copy: Tensor, form: ChangeForm) -> None:
        """Run an all_gather of changes: every member's part of ``copy`` becomes equal to that member's ``home``.

        Args:
            action: COLLECTIVE of the lane.
            home: This rank's weights, bf16.
            copy: Copy of the weights of all members.
            form: Form of the messages, equal on all members. With ``NOTHING`` no message is sent.
        """
        key = (action.lane, action.group)
        if self.strict:
            self._check_collective(key, action)
        if form.bits == NOTHING:
            return
        if form.bits == WHOLE:
            self._whole(action, home, copy)
            return
        members = self.topology.group(action.group, self.rank)
        size, here, each = len(members), members.index(self.rank), form.message_bytes(home.numel())
        pieces = copy.view(size, -1)
        local_message, *theirs = self._scratch[action.lane].buffers([each] * (1 + size))
        encode_change(home, pieces[here], form, local_message)
        self._gather_messages(local_message, size, self._groups[key])
        for at, (piece, message) in enumerate(zip(pieces, theirs, strict=True)):
            if at == here:
                piece.copy_(home)
            else:
                decode_change(message, form, piece)

    def _gather_messages(self, message: Tensor, size: int, group: dist.ProcessGroup) -> None:
        """Gather the messages ``message`` of all members into the memory directly behind ``message``."""
        together = message.as_strided((size * message.numel(),), (1,), message.storage_offset() + message.numel())
        self._wait(_all_gather(together, message, group=group, async_op=True))

    def _in_8_bits(self, action: Action, source: Tensor, target: Tensor, group: dist.ProcessGroup) -> None:
        """Run an all_gather or a reduce_scatter with numbers in 8 bits.

        In a reduce_scatter, every member sends each other member its part, and adds the parts that it receives.
        """
        members = self.topology.group(action.group, self.rank)
        size, here, scratch = len(members), members.index(self.rank), self._scratch[action.lane]
        shard_size = min(source.numel(), target.numel())
        if action.collective == "all_gather":
            local_message, *all_of_them = scratch.take([shard_size] * (1 + size), action.compression)
            encode(source, action.compression, local_message)
            self._gather_messages(local_message, size, group)
            for piece, message in zip(target.view(size, -1), all_of_them, strict=True):
                decode(message, action.compression, piece)
            return
        pieces = source.view(size, -1)
        messages = scratch.take([shard_size] * (2 * size), action.compression)
        leaving, arriving = messages[:size], messages[size:]
        for piece, message in zip(pieces, leaving, strict=True):
            encode(piece, action.compression, message)
        others = [(i, member) for i, member in enumerate(members) if i != here]
        operations = [dist.P2POp(dist.irecv, arriving[i], member, group) for i, member in others]
        operations += [dist.P2POp(dist.isend, leaving[i], member, group) for i, member in others]  # as in ``exchange``
        for work in dist.batch_isend_irecv(operations):
            self._wait(work)
        target.zero_()
        for i, message in enumerate(arriving):
            if i == here:
                target.add_(pieces[here])
            else:
                decode(message, action.compression, target, add=True)

    def _coded_sum(self, action: Action, source: Tensor, target: Tensor, group: dist.ProcessGroup) -> None:
        """Run a reduce_scatter of losslessly coded gradients around a ring.

        The order of additions is the order that ``EarlyTransfers`` uses. Messages are coded part by part: while some
        are sent, the next are made.
        """
        members = self.topology.group(action.group, self.rank)
        size, here = len(members), members.index(self.rank)
        left, right = members[here - 1], members[(here + 1) % size]
        parts, pieces = target.split(CODED_PART), [piece.split(CODED_PART) for piece in source.view(size, -1)]
        messages = self._scratch[action.lane].buffers(2 * coded_part_bytes(target.numel(), target.itemsize))
        arriving, leaving = messages[: len(parts)], messages[len(parts) :]
        coming = [dist.irecv(message, left, group=group) for message in arriving]
        going: list[dist.Work | None] = [None] * len(parts)
        for hop in range(size):
            for place, part in enumerate(parts):
                values = pieces[here - hop - 1][place]
                if hop:
                    self._wait(coming[place])
                    decode_gradient(arriving[place], part)
                    values = part.add_(values)
                if hop == size - 1:
                    continue
                if hop:
                    coming[place] = dist.irecv(arriving[place], left, group=group)
                    self._wait(going[place])
                used = encode_gradient(values, leaving[place])
                going[place] = dist.isend(leaving[place][:used], right, group=group)
                self.gradients_sent.add(used, values.nbytes)
        for work in going:
            self._wait(work)

    def _wait(self, work: dist.Work | None) -> None:
        """Wait for an operation: on gloo at most the timeout, on NCCL in the current stream."""
        assert work is not None
        if self.early_transfers is None:
            work.wait()  # with a time limit this would block the issuing thread
        else:
            work.wait(self.early_transfers.timeout)

    # strict mode

    def _header(self, key: tuple[Lane, str], text: str) -> Tensor:
        """Increase the sequence number of ``key``; return it with the checksum of ``text``, as int64 [2]."""
        self._sequence[key] += 1
        return torch.tensor([self._sequence[key], zlib.crc32(text.encode())], device=self.device)

    def _check_collective(self, key: tuple[Lane, str], action: Action) -> None:
        """Exchange headers with all members of the action's group, and compare them.

        Raises:
            TransportError: If a header differs from this rank's.
        """
        about = f"b{action.block} m{action.micro_batch} u{action.unit} r{action.root}"
        text = f"{action.op} {action.collective} {about} {action.compression}"
        header = self._header(key, text)
        members = self.topology.group(action.group, self.rank)
        all_headers = torch.empty(len(members) * 2, dtype=header.dtype, device=self.device)
        self._wait(_all_gather(all_headers, header, group=self._groups[key], async_op=True))
        for member, theirs in zip(members, all_headers.view(-1, 2), strict=True):
            compare_headers(header, theirs, f"{text} with rank {member} on {key[0]} {key[1]}")

    def _check_exchange(self, key: tuple[Lane, str], action: Action) -> None:
        """Exchange headers with the peers of all transfers of the action, and compare them.

        ``key`` is the lane and the name of the group.
        """
        group = self._groups[key]
        checks, works = [], []
        for t in action.transfers:
            pair = (self.rank, t.peer) if t.send else (t.peer, self.rank)
            counter = (key[0], f"{pair[0]}>{pair[1]}")
            self._sequence.setdefault(counter, 0)
            about = str(t.buffer) if t.buffer.is_activation else f"u{t.unit}"
            header = self._header(counter, f"{about} {action.compression}")
            if t.send:
                works.append(dist.isend(header, t.peer, group=group))
            else:
                theirs = torch.empty_like(header)
                works.append(dist.irecv(theirs, t.peer, group=group))
                checks.append((header, theirs, f"{t} on {key[0]}"))
        for work in works:
            self._wait(work)
        for check in checks:
            compare_headers(*check)
