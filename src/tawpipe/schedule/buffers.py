"""Buffers that actions read and write: values with a kind and index numbers.

Equal values mean the same memory. The text of a buffer is exact and parses back: ``home.w.3`` is the shard of unit 3 at
home, ``W0.1`` is buffer 1 of pool ``W0``, ``x.2.5`` is the input of block 5 for micro-batch 2. Code uses ``kind`` and
``at`` of a buffer and never takes its text apart.

Schedules name few distinct buffers, many times. So the functions below cache the buffers that they make.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import NamedTuple


class Kind(StrEnum):
    """Kind of content of a buffer.

    The value is the first part of the buffer's text. ``Buffer.at`` holds the numbers that are named in brackets below.
    """

    HOME_WEIGHT = "home.w"
    """This rank's shard of a unit's weights (unit)."""
    HOME_GRADIENT = "home.g"
    """Gradient of this rank's shard of a unit (unit)."""
    WEIGHT = "weight"
    """A pool buffer for the weights of a unit, or a shard of them, that travel (number in the pool)."""
    GRADIENT = "gradient"
    """A pool buffer for the gradient of a unit, or a shard of one (number in the pool)."""
    LANDING = "landing"
    """A pool buffer for the gradient of a unit whose home is in CPU memory (number in the pool)."""
    COPY = "copy"
    """A unit's weights, or a shard of them, that stay on the device from step to step (0, in a pool of its own)."""
    INPUT = "x"
    """Input of a block (micro-batch, block)."""
    INPUT_GRADIENT = "dx"
    """Gradient of a block's input (micro-batch, block)."""
    CONTEXT = "ctx"
    """Extra arguments of every layer, in addition to its input: masks, positions, rotary tables (micro-batch)."""
    GRAPH = "graph"
    """A block's whole autograd graph, kept for its backward pass (micro-batch, block)."""
    ATTENTION = "kept"
    """A block's attention output, kept for its backward pass (micro-batch, block)."""
    PRODUCTS = "products"
    """A block's autograd graph without results of norms and gates, kept for its backward pass (micro-batch, block)."""
    LINEAR = "lin"
    """Inputs of a layer's matrix products and gradients of their outputs, kept between the two parts of its backward
    pass (micro-batch, block)."""
    OFFLOADED = "host"
    """A block's input in CPU memory or in a file (micro-batch's position in its round, block)."""
    OFFLOADED_ATTENTION = "hostkept"
    """A block's attention output in CPU memory or in a file (micro-batch's position in its round, block)."""
    OFFLOADED_GRAPH = "hostgraph"
    """Tensors that a block's autograd graph saves, in CPU memory (slot among the offloaded ones, block)."""
    OFFLOADED_PRODUCTS = "hostproducts"
    """Tensors that a graph without results of norms and gates saves, in CPU memory (slot, block)."""
    RELOADED = "reload"
    """Device buffer for a reloaded block input (block number modulo 2, micro-batch's position in its round)."""
    RELOADED_ATTENTION = "reloadkept"
    """Device buffer for a reloaded attention output, on whole rows (block number modulo 2, position in the round)."""
    RELOADED_GRAPH = "reloadgraph"
    """Device buffer for the reloaded tensors of an autograd graph (block number modulo 2, position in the round)."""
    RELOADED_PRODUCTS = "reloadproducts"
    """Device buffer for the reloaded tensors of such a graph (block number modulo 2, position in the round)."""
    KEYS = "kv"
    """A layer's keys and values: of this rank's tokens until they are gathered, then of all tokens (micro-batch,
    block)."""
    KEY_GRADIENTS = "dkv"
    """Gradients of a layer's keys and values: this rank's contribution for all tokens until they are reduced, then the
    sums for its own tokens (micro-batch, block)."""
    TURN = "turn"
    """No data: an action that reads the buffer runs after the action that wrote it (number in the program)."""
    IDS = "ids"
    """Sampled tokens of a group of requests, in decode steps (group)."""
    CACHE = "cache"
    """KV cache of a layer, for all slots of all groups, in decode steps (block)."""
    LOSS = "loss"
    """Summed loss of a micro-batch (micro-batch)."""
    NORM = "norm"
    """Gradient norm of the step, and a flag that all numbers were finite."""
    COUNT = "count"
    """Number of tokens of the step."""
    BALANCE = "balance"
    """Sums over a step's layers of the loss that balances experts."""
    SIZE = "size"
    """Coding of this step's weight changes: how the changes since the copies were received are sent."""

    __hash__ = str.__hash__  # the __hash__ of StrEnum is slow, and buffers are dictionary keys


WEIGHTS = frozenset({Kind.HOME_WEIGHT, Kind.WEIGHT, Kind.COPY})
GRADIENTS = frozenset({Kind.HOME_GRADIENT, Kind.GRADIENT, Kind.LANDING})
HOMES = frozenset({Kind.HOME_WEIGHT, Kind.HOME_GRADIENT})
ACTIVATIONS = frozenset(Kind) - WEIGHTS - GRADIENTS - {Kind.NORM, Kind.COUNT, Kind.BALANCE, Kind.SIZE, Kind.CACHE}
TRAVELLING = frozenset({Kind.INPUT, Kind.INPUT_GRADIENT, Kind.IDS})
"""Kinds of activations that may be sent to another rank."""
BOUNDARIES = (Kind.INPUT, Kind.INPUT_GRADIENT, Kind.OFFLOADED, Kind.RELOADED)
"""Kinds of activations of the size of a block's input: tokens x hidden size."""
AWAY = {Kind.INPUT: Kind.OFFLOADED, Kind.ATTENTION: Kind.OFFLOADED_ATTENTION, Kind.GRAPH: Kind.OFFLOADED_GRAPH}
AWAY[Kind.PRODUCTS] = Kind.OFFLOADED_PRODUCTS
"""Kind of an activation kept for a backward pass -> kind of its offloaded copy in CPU memory."""
BACK = {Kind.INPUT: Kind.RELOADED, Kind.ATTENTION: Kind.RELOADED_ATTENTION, Kind.GRAPH: Kind.RELOADED_GRAPH}
BACK[Kind.PRODUCTS] = Kind.RELOADED_PRODUCTS
"""Kind of an activation kept for a backward pass -> kind of its reloaded copy on the device. Used by strategies whose
blocks alternate between two reload buffers."""
OUTSIDE = frozenset(AWAY.values())
"""Kinds of activations that are in CPU memory or in files, not on the device."""
KEPT = frozenset({Kind.ATTENTION, Kind.OFFLOADED_ATTENTION})
"""Kinds of activations that selective recomputation keeps, on the device or offloaded."""
STAYING = OUTSIDE | {Kind.RELOADED}
"""Kinds of activations whose memory is allocated once for the whole run, see blocks.py."""
_POOLS = dict.fromkeys("WSB", Kind.WEIGHT) | dict.fromkeys("GHAR", Kind.GRADIENT)
_POOLS |= {"L": Kind.LANDING, "C": Kind.COPY}
"""First letter of a pool's name -> kind of its buffers.

Weights: ``W`` whole units, ``S`` shards, ``B`` copies from homes in CPU memory, ``C`` weights that stay from step to
step (``C3``: of unit 3). Gradients: ``G`` whole units, ``H`` shards, ``A`` sums inside the node, ``R`` received on the
way home, ``L`` buffers that a backward pass fills in place of a home in CPU memory.
"""


class Buffer(NamedTuple):
    """One buffer of one rank.

    Args:
        kind: content of the buffer.
        at: the numbers that ``kind`` documents in brackets.
        pool: name of its pool, for the kinds WEIGHT, GRADIENT, LANDING and COPY.

    >>> Buffer.parse("x.2.5")
    Buffer(kind=<Kind.INPUT: 'x'>, at=(2, 5), pool='')
    >>> str(home_weight(3)), str(pooled("W0", 1))
    ('home.w.3', 'W0.1')
    """

    kind: Kind
    at: tuple[int, ...] = ()
    pool: str = ""

    def __str__(self) -> str:
        return ".".join((self.pool or self.kind.value, *map(str, self.at)))

    @classmethod
    def parse(cls, text: str) -> Buffer:
        """Return the buffer whose text form (``str(buffer)``) is ``text``.

        Raises:
            ValueError: ``text`` is not the text of a buffer.
        """
        words = text.split(".")
        name = ".".join(words[:2]) if words[0] == "home" else words[0]
        at = tuple(map(int, words[1 + name.count(".") :]))
        if name[:1].isupper():
            return cls(pool_kind(name), at, name)
        return cls(Kind(name), at)

    @property
    def is_weight(self) -> bool:
        return self.kind in WEIGHTS

    @property
    def is_gradient(self) -> bool:
        return self.kind in GRADIENTS

    @property
    def is_home(self) -> bool:
        return self.kind in HOMES

    @property
    def is_activation(self) -> bool:
        return self.kind in ACTIVATIONS


NORM = Buffer(Kind.NORM)
COUNT = Buffer(Kind.COUNT)
BALANCE = Buffer(Kind.BALANCE)
SIZE = Buffer(Kind.SIZE)


def pool_kind(pool: str) -> Kind:
    """Return the kind of the buffers of the pool named ``pool``, from the first letter of its name.

    Raises:
        ValueError: no kind has this letter.
    """
    if pool[:1] not in _POOLS:
        raise ValueError(
            f"{pool!r} is no pool's name: C.., W.. and S.. hold weights, G.., H.., A.., R.. and L.. gradients"
        )
    return _POOLS[pool[0]]


@cache
def pooled(pool: str, number: int) -> Buffer:
    """Return buffer ``number`` of the pool named ``pool``."""
    return Buffer(pool_kind(pool), (number,), pool)


@cache
def home_weight(unit: int) -> Buffer:
    """Return the buffer with this rank's shard of the weights of ``unit``."""
    return Buffer(Kind.HOME_WEIGHT, (unit,))


@cache
def home_gradient(unit: int) -> Buffer:
    """Return the buffer with the gradient of this rank's shard of ``unit``."""
    return Buffer(Kind.HOME_GRADIENT, (unit,))


@cache
def weight_copy(unit: int) -> Buffer:
    """Return the buffer that keeps weights of ``unit`` from step to step. Its name is the same in all schedules."""
    return pooled(f"C{unit}", 0)


@cache
def block_input(micro_batch: int, block: int) -> Buffer:
    """Return the buffer of the input of ``block`` for ``micro_batch``."""
    return Buffer(Kind.INPUT, (micro_batch, block))


@cache
def input_gradient(micro_batch: int, block: int) -> Buffer:
    """Return the buffer of the gradient of the input of ``block`` for ``micro_batch``."""
    return Buffer(Kind.INPUT_GRADIENT, (micro_batch, block))


@cache
def keys(micro_batch: int, block: int) -> Buffer:
    """Return the buffer of the keys and values of ``block`` for ``micro_batch``."""
    return Buffer(Kind.KEYS, (micro_batch, block))


@cache
def key_gradients(micro_batch: int, block: int) -> Buffer:
    """Return the buffer of the gradients of the keys and values of ``block`` for ``micro_batch``."""
    return Buffer(Kind.KEY_GRADIENTS, (micro_batch, block))


@cache
def ids(group: int) -> Buffer:
    """Return the buffer of the sampled tokens of ``group``."""
    return Buffer(Kind.IDS, (group,))


@cache
def layer_cache(block: int) -> Buffer:
    """Return the buffer of the KV cache of ``block``."""
    return Buffer(Kind.CACHE, (block,))


@cache
def turn(number: int) -> Buffer:
    """Return the buffer without data that orders two actions on different lanes."""
    return Buffer(Kind.TURN, (number,))


@cache
def context(micro_batch: int) -> Buffer:
    """Return the buffer of the extra arguments (masks, positions, rotary tables) of the layers for ``micro_batch``."""
    return Buffer(Kind.CONTEXT, (micro_batch,))


@cache
def linear(micro_batch: int, block: int) -> Buffer:
    """Return the buffer that passes data of ``block`` from BACKWARD_INPUT to BACKWARD_WEIGHT for ``micro_batch``."""
    return Buffer(Kind.LINEAR, (micro_batch, block))


@cache
def loss(micro_batch: int) -> Buffer:
    """Return the buffer of the summed loss of ``micro_batch``."""
    return Buffer(Kind.LOSS, (micro_batch,))


@cache
def offloaded(place: int, block: int, kind: Kind = Kind.INPUT) -> Buffer:
    """Return the buffer outside the device for an activation that ``block`` keeps.

    Args:
        place: position of the micro-batch in its round.
        kind: kind of the activation on the device, a key of ``AWAY``.
    """
    return Buffer(AWAY[kind], (place, block))


@cache
def reloaded(place: int, block: int, kind: Kind = Kind.INPUT) -> Buffer:
    """Return the device buffer into which an offloaded activation of ``block`` is reloaded.

    Blocks with even and with odd numbers use two different buffers for each micro-batch.

    Args:
        place: position of the micro-batch in its round.
        kind: kind of the activation on the device, a key of ``BACK``.
    """
    return Buffer(BACK[kind], (block % 2, place))


@dataclass(frozen=True)
class Pool:
    """Equally large buffers of one kind on one rank.

    Args:
        name: name of the pool, with which the text of its buffers begins, see ``pool_kind``.
        kind: WEIGHT or COPY (compute dtype), GRADIENT (reduce dtype) or LANDING (dtype of the master weights).
        count: number of buffers.
        elements: elements of each buffer.
    """

    name: str
    kind: Kind
    count: int
    elements: int

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """All buffers of the pool."""
        return tuple(pooled(self.name, number) for number in range(self.count))
