"""Actions: the words of a schedule, each with an exact text form that parses back."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tawpipe.schedule.buffers import Buffer


class Lane(StrEnum):
    """What runs in order: a CUDA stream, a CPU worker thread, a resource of the simulator, a row of the picture."""

    COMPUTE = "COMPUTE"
    """Forward, backward and update."""
    GATHER = "GATHER"
    """Weights inside a node. In pipelines, here and in the three that follow, activations as well: those of one
    direction between two positions share a lane."""
    REDUCE = "REDUCE"
    """Gradients inside a node."""
    INTER_W = "INTER_W"
    """Weights between nodes."""
    INTER_G = "INTER_G"
    """Gradients between nodes."""
    HOST = "HOST"
    """Activations between the device and its host's memory."""
    HOME = "HOME"
    """Between the device and homes in its host's memory: gradients that arrive, updates."""
    RAISE = "RAISE"
    """Weights from homes in the host's memory to the device."""
    SEQ = "SEQ"
    """Keys and values, and their gradients, between the ranks that compute a row together."""

    __hash__ = str.__hash__  # an enum's own is Python code


class Op(StrEnum):
    """What an action does."""

    FORWARD = "FORWARD"
    """One block on one micro-batch; without a graph, unless it writes one (the embedding may keep its own)."""
    BACKWARD = "BACKWARD"
    """Propagate through one block on one micro-batch, recomputing what it did not keep; for the head: the loss and its
    gradient at once.
    """
    KEYS = "KEYS"
    """A layer's keys and values of this rank's tokens, where several ranks compute a row together (sets.py)."""
    KEYS_BACKWARD = "KEYS_BACKWARD"
    """Propagate the gradients of these keys and values, to which all those ranks have added."""
    PREPARE = "PREPARE"
    """What the layers of a micro-batch are called with besides its activations, on a rank that does not embed it."""
    BACKWARD_INPUT = "BACKWARD_INPUT"
    """A layer's backward pass, recomputation included, but for the weights of its linear maps."""
    BACKWARD_WEIGHT = "BACKWARD_WEIGHT"
    """The gradients of these."""
    ZERO = "ZERO"
    """Clear a gradient buffer on a rank that has no micro-batch in this visit."""
    EXCHANGE = "EXCHANGE"
    """A batch of sends and receives that become ready together."""
    COLLECTIVE = "COLLECTIVE"
    """An operation of all members of a group."""
    ADD = "ADD"
    """Into a home gradient, in the schedule's order."""
    COUNT = "COUNT"
    """Tokens of the step over the world, for updates that do not wait for NORM."""
    SIZE = "SIZE"
    """How the weights of all members have changed since their copies came, the most of a group."""
    NORM = "NORM"
    """Gradient norm, loss and token count over the world."""
    RAISE = "RAISE"
    """A unit's weights at home in the host's memory to the device."""
    OFFLOAD = "OFFLOAD"
    """An activation from the device to its host's memory."""
    RELOAD = "RELOAD"
    """The same activation back."""
    UPDATE = "UPDATE"
    """The optimizer on the home stripe of one unit."""

    __hash__ = str.__hash__


COLLECTIVES = ("all_gather", "reduce_scatter", "broadcast", "reduce", "all_reduce")
"""What a COLLECTIVE may be. ``reduce`` and ``all_reduce`` work in place, the others from one buffer into another; on
keys and values all of them do.
"""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One send or receive of an exchange.

    Args:
        send: True for a send to ``peer``, False for a receive from it.
        peer: global rank of the other side.
        unit: what travels: a unit's weights or gradients, or with an activation the block at whose border it is.
        buffer: where it is read, or written.
    """

    send: bool
    peer: int
    unit: int
    buffer: Buffer

    def __str__(self) -> str:
        return f"{'SEND>' if self.send else 'RECV<'}{self.peer}:u{self.unit}:{self.buffer}"

    @classmethod
    def parse(cls, text: str) -> Transfer:
        peer, unit, buffer = text[5:].split(":")
        return cls(text.startswith("SEND>"), int(peer), int(unit[1:]), Buffer.parse(buffer))


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that one rank does.

    Args:
        op, lane: what, and on which lane.
        reads, writes: buffers. One that is both is updated in place.
        frees: those of ``reads`` that nobody reads afterwards (activations).
        block, micro_batch, unit: what it is about, -1 where that does not apply.
        collective: what a COLLECTIVE does.
        group: of a COLLECTIVE, of SIZE, of COUNT and NORM (``world``), and of an EXCHANGE: all its peers are in it, and
            it is the communicator whose order its transfers share.
        root: global rank, of a broadcast or reduce.
        transfers: of an EXCHANGE.
        compression: ``int8`` or ``fp8`` where an EXCHANGE or COLLECTIVE sends its numbers in 8 bits
            (runtime/transport/compression.py), ``exact`` where it sends how weights have changed
            (runtime/transport/exact.py) or gradients coded without loss (runtime/transport/exact_gradients.py).

    BACKWARD and ADD add to a gradient buffer that they read and write, and replace one that they only write. The
    weights that FORWARD and BACKWARD read come in the order of the block's units, the gradients that BACKWARD writes
    in the order of its trainable units. A broadcast reads on its root and writes on the others.

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
        """The weight buffers among ``reads``."""
        return tuple(buffer for buffer in self.reads if buffer.is_weight)

    @property
    def gradients(self) -> tuple[Buffer, ...]:
        """The gradient buffers among ``writes``."""
        return tuple(buffer for buffer in self.writes if buffer.is_gradient)

    @property
    def refreshes(self) -> bool:
        """True if it changes copies of weights that stay as their owners have changed."""
        return self.compression == "exact" and self.collective == "all_gather"

    @property
    def begins_ahead(self) -> bool:
        """True if some of it needs nothing but its buffers: receives that can be posted, and the first message of a
        ring sent, while its lane, on which nothing is computed, waits for what is before it.
        """
        apart = self.lane not in (Lane.COMPUTE, Lane.SEQ) and not self.compression
        ring = self.collective in ("all_gather", "reduce_scatter")
        return apart and (ring or (self.op is Op.EXCHANGE and bool(self.writes)))

    @property
    def needs_ahead(self) -> dict[str, tuple[Buffer, ...]]:
        """What it reads and writes from then on."""
        return {"reads": () if self.op is Op.EXCHANGE else self.reads, "writes": self.writes}

    def counter(self, *way: int) -> tuple:
        """Return the counter that numbers a message of this action, on gloo, which pairs messages by their numbers.

        The thread beside a lane numbers what begins ahead, the lane numbers the rest. How far one is before the other
        differs from rank to rank. So no counter serves both, and a number follows from the schedule alone.

        Args:
            way: sender and receiver of a transfer, whose two sides count apart.
        """
        return (self.lane, self.group, *(way or (self.begins_ahead,)))

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
        """The inverse of ``str``.

        Raises:
            ValueError: the text is not the text form of an action.
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
    """An EXCHANGE whose reads and writes are those of its transfers. An activation that is sent is free afterwards. The
    text form leaves out ``rail``.
    """
    reads = tuple(dict.fromkeys(t.buffer for t in transfers if t.send))
    writes = tuple(t.buffer for t in transfers if not t.send)
    frees = tuple(buffer for buffer in reads if buffer.is_activation)
    return Action(Op.EXCHANGE, lane, reads, writes, frees, group=group, transfers=transfers, compression=compression)
