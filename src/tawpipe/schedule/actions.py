"""Actions of a schedule: each is one operation of one rank, with an exact text form that parses back."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tawpipe.schedule.buffers import Buffer


class Lane(StrEnum):
    """Lane of an action: actions on one lane of a rank run one after another, in order.

    A lane is a CUDA stream, a CPU worker thread, a resource of the simulator, or a line of a picture.
    """

    COMPUTE = "COMPUTE"
    """Forward passes, backward passes and optimizer updates."""
    GATHER = "GATHER"
    """All-gathers of weights inside a node. In pipelines this lane and the next three also carry activations: all
    activations that one position sends to one other position share a lane."""
    REDUCE = "REDUCE"
    """Reductions of gradients inside a node."""
    INTER_W = "INTER_W"
    """Transfers of weights between nodes."""
    INTER_G = "INTER_G"
    """Transfers of gradients between nodes."""
    HOST = "HOST"
    """Copies of activations between the device and CPU memory."""
    HOME = "HOME"
    """Traffic between the device and homes in CPU memory: gradients that arrive there, and optimizer updates."""
    RAISE = "RAISE"
    """Copies of weights from homes in CPU memory to the device."""
    SEQ = "SEQ"
    """Transfers of keys, values and their gradients inside a context-parallel group."""

    __hash__ = str.__hash__  # the __hash__ of StrEnum is slower Python code


class Op(StrEnum):
    """Operation of an action."""

    FORWARD = "FORWARD"
    """Run the forward pass of one block on one micro-batch. Keeps no autograd graph, unless the action writes one (the
    embedding may keep its own)."""
    BACKWARD = "BACKWARD"
    """Run the backward pass of one block on one micro-batch. Activations that were not kept are recomputed first. For
    the head it computes the loss and its gradient together."""
    KEYS = "KEYS"
    """Compute a layer's keys and values for this rank's tokens, for a row of a context-parallel group (sets.py)."""
    KEYS_BACKWARD = "KEYS_BACKWARD"
    """Backpropagate the gradients of this rank's keys and values, which are already summed over the context-parallel
    group."""
    PREPARE = "PREPARE"
    """Make the extra arguments of a micro-batch's layers (masks, positions, rotary tables), on a rank without the
    embedding."""
    BACKWARD_INPUT = "BACKWARD_INPUT"
    """Run a layer's backward pass, recomputation included, except for the weight gradients of its linear maps."""
    BACKWARD_WEIGHT = "BACKWARD_WEIGHT"
    """Compute the weight gradients that ``BACKWARD_INPUT`` left out."""
    ZERO = "ZERO"
    """Set a gradient buffer to zero, on a rank that has no micro-batch in this visit."""
    EXCHANGE = "EXCHANGE"
    """Run a batch of point-to-point sends and receives. All its buffers become ready together."""
    COLLECTIVE = "COLLECTIVE"
    """Run one collective operation of all members of a group (see ``COLLECTIVES``)."""
    ADD = "ADD"
    """Add a gradient to another gradient buffer, usually the one at home, in the schedule's order."""
    COUNT = "COUNT"
    """Sum the number of tokens of the step over all ranks, for updates that do not wait for NORM."""
    SIZE = "SIZE"
    """Agree in a group on how to code the weight changes of this step: the maximum over the members is used."""
    NORM = "NORM"
    """Compute the gradient norm, the loss and the number of tokens over all ranks."""
    RAISE = "RAISE"
    """Copy a unit's weights from its home in CPU memory to the device."""
    OFFLOAD = "OFFLOAD"
    """Copy an activation from the device to CPU memory."""
    RELOAD = "RELOAD"
    """Copy an offloaded activation back to the device."""
    UPDATE = "UPDATE"
    """Run the optimizer on this rank's shard of one unit."""

    __hash__ = str.__hash__


COLLECTIVES = ("all_gather", "reduce_scatter", "broadcast", "reduce", "all_reduce")
"""Names of the collective operations that a COLLECTIVE action may run. ``reduce`` and ``all_reduce`` work in place, the
others read one buffer and write another. On keys and values all of them work in place."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One send or receive of an EXCHANGE action.

    Args:
        send: True for a send to ``peer``, False for a receive from it.
        peer: global rank of the other side.
        unit: index of the unit whose weights or gradient travel. For an activation: index of the block whose input it
            is.
        buffer: buffer that a send reads or a receive writes.
    """

    send: bool
    peer: int
    unit: int
    buffer: Buffer

    def __str__(self) -> str:
        return f"{'SEND>' if self.send else 'RECV<'}{self.peer}:u{self.unit}:{self.buffer}"

    @classmethod
    def parse(cls, text: str) -> Transfer:
        """Return the transfer whose text form (``str(transfer)``) is ``text``."""
        peer, unit, buffer = text[5:].split(":")
        return cls(text.startswith("SEND>"), int(peer), int(unit[1:]), Buffer.parse(buffer))


@dataclass(frozen=True, slots=True)
class Action:
    """One operation of one rank in a schedule.

    Args:
        op: the operation.
        lane: the lane on which the operation runs.
        reads: buffers that the operation reads.
        writes: buffers that the operation writes. A buffer in both ``reads`` and ``writes`` is updated in place.
        frees: buffers of ``reads`` that hold nothing afterwards (activations).
        block: index of the block, or -1 if there is none.
        micro_batch: index of the micro-batch, or -1 if there is none.
        unit: index of the unit, or -1 if there is none.
        collective: name of the collective operation of a COLLECTIVE, one of ``COLLECTIVES``.
        group: name of the process group of a COLLECTIVE, SIZE, COUNT or NORM (the last two: ``world``). For an
            EXCHANGE: the group that contains all its peers, and whose communicator orders its transfers.
        root: global rank of the root of a broadcast or reduce, else -1.
        transfers: sends and receives of an EXCHANGE.
        compression: ``int8`` or ``fp8`` if an EXCHANGE or COLLECTIVE sends its numbers in 8 bits
            (runtime/transport/compression.py). ``exact`` if it sends the changes of weights
            (runtime/transport/exact.py) or gradients coded without loss (runtime/transport/exact_gradients.py).

    BACKWARD and ADD add to a gradient buffer that they read and write, and overwrite one that they only write. The
    weights that FORWARD and BACKWARD read are in the order of the block's units. The gradients that BACKWARD writes are
    in the order of the block's trainable units. A broadcast reads its buffer on the root and writes it on the other
    ranks.

    >>> action = Action.parse("COMPUTE FORWARD b2 m3 | W0.1 x.3.2 -> x.3.3")
    >>> action.block, action.micro_batch, action.weights
    (2, 3, (Buffer(kind=<Kind.WEIGHT: 'weight'>, at=(1,), pool='W0'),))
    >>> str(action)
    'COMPUTE FORWARD b2 m3 | W0.1 x.3.2 -> x.3.3'
    """

    op: Op
    lane: Lane
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()
    frees: tuple[Buffer, ...] = ()
    block: int = -1
    micro_batch: int = -1
    unit: int = -1
    collective: str = ""
    group: str = ""
    root: int = -1
    transfers: tuple[Transfer, ...] = ()
    compression: str = ""

    @property
    def weights(self) -> tuple[Buffer, ...]:
        """Weight buffers among ``reads``, in order."""
        return tuple(buffer for buffer in self.reads if buffer.is_weight)

    @property
    def gradients(self) -> tuple[Buffer, ...]:
        """Gradient buffers among ``writes``, in order."""
        return tuple(buffer for buffer in self.writes if buffer.is_gradient)

    @property
    def refreshes(self) -> bool:
        """True if the action applies weight changes to copies that stay on the device from step to step."""
        return self.compression == "exact" and self.collective == "all_gather"

    @property
    def begins_early(self) -> bool:
        """True if a first part of the action may start while its lane is still busy with earlier actions.

        Receives of an EXCHANGE can be posted early, and the first message of a ring (all-gather or reduce-scatter) can
        be sent early. Both need only their buffers to be free. Not on lanes that compute, and not with compression.
        """
        apart = self.lane not in (Lane.COMPUTE, Lane.SEQ) and not self.compression
        ring = self.collective in ("all_gather", "reduce_scatter")
        return apart and (ring or (self.op is Op.EXCHANGE and bool(self.writes)))

    @property
    def early_needs(self) -> dict[str, tuple[Buffer, ...]]:
        """Buffers that the early part (see ``begins_early``) needs: keys ``reads`` and ``writes``.

        An EXCHANGE reads nothing early, because only its receives are posted.
        """
        return {"reads": () if self.op is Op.EXCHANGE else self.reads, "writes": self.writes}

    def counter(self, *way: int) -> tuple:
        """Return the key of the counter that numbers this action's messages on gloo.

        On gloo, equal numbers pair a send with a receive.

        A lane and the thread beside it (which sends the messages that begin ahead) use different counters. How far one
        is before the other differs from rank to rank, but each counts its own messages in the order of the schedule, so
        that numbers are equal on both sides.

        Args:
            way: sender and receiver (global ranks) of a transfer, which has a counter for each direction. Empty for a
                collective, whose counter depends on ``begins_early``.
        """
        return (self.lane, self.group, *(way or (self.begins_early,)))

    def __str__(self) -> str:
        words = [self.lane.value, self.op.value]
        if self.collective:
            words.append(self.collective)
        if self.group and not (self.op is Op.EXCHANGE and self.group == "rail"):
            words.append(f"@{self.group}")
        if self.compression:
            words.append(f"~{self.compression}")
        for letter, number in (("b", self.block), ("m", self.micro_batch), ("u", self.unit), ("r", self.root)):
            if number >= 0:
                words.append(f"{letter}{number}")
        words.append("|")
        if self.transfers:
            words.extend(str(transfer) for transfer in self.transfers)
        else:
            words.extend(map(str, self.reads))
            words.append("->")
            words.extend(map(str, self.writes))
            if self.frees:
                words.append("free")
                words.extend(map(str, self.frees))
        return " ".join(words)

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action whose text form (``str(action)``) is ``text``.

        Raises:
            ValueError: ``text`` is not the text form of an action.
        """
        try:
            head, tail = text.split(" | ", 1) if " | " in text else (text.removesuffix(" |"), "")
            lane, op, *words = head.split(" ")
            fields: dict = {"lane": Lane(lane), "op": Op(op)}
            names = {"b": "block", "m": "micro_batch", "u": "unit", "r": "root"}
            for word in words:
                if word in COLLECTIVES:
                    fields["collective"] = word
                elif word.startswith("@"):
                    fields["group"] = word[1:]
                elif word.startswith("~"):
                    fields["compression"] = word[1:]
                else:
                    fields[names[word[0]]] = int(word[1:])
            if fields["op"] is Op.EXCHANGE:
                transfers = tuple(Transfer.parse(word) for word in tail.split(" "))
                group, compression = fields.get("group", "rail"), fields.get("compression", "")
                return exchange(fields["lane"], transfers, group, compression=compression)
            used, _, freed = tail.partition(" free ")
            read, _, written = f" {used} ".partition(" -> ")
            reads, writes, frees = (tuple(map(Buffer.parse, part.split())) for part in (read, written, freed))
            return cls(reads=reads, writes=writes, frees=frees, **fields)
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(f"not an action: {text!r}") from error


def exchange(lane: Lane, transfers: tuple[Transfer, ...], group: str = "rail", *, compression: str = "") -> Action:
    """Return an EXCHANGE action of ``transfers``, with ``reads``, ``writes`` and ``frees`` derived from them.

    Every activation that is sent is freed afterwards. The text form omits the group if it is ``rail``.
    """
    reads = tuple(dict.fromkeys(t.buffer for t in transfers if t.send))
    writes = tuple(t.buffer for t in transfers if not t.send)
    frees = tuple(buffer for buffer in reads if buffer.is_activation)
    return Action(Op.EXCHANGE, lane, reads, writes, frees, group=group, transfers=transfers, compression=compression)
