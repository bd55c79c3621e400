"""Buffers: what actions read and write, as values with a kind. Two players that mean the same bytes say the same value.

A buffer's text is exact and parses back: ``home.w.3`` is unit 3 at home, ``W0.1`` buffer 1 of pool ``W0``, ``x.2.5``
the input of block 5 for micro-batch 2. Who needs to know what a buffer is asks for its kind and numbers; nobody takes
the text apart.

Schedules name the same few buffers again and again, so each is made once: the functions below remember what they made.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import NamedTuple


class Kind(StrEnum):
    """What a buffer holds; the value begins its text."""

    HOME_WEIGHT = "home.w"
    """The stripe of a unit that lives here (unit)."""
    HOME_GRADIENT = "home.g"
    """The gradient of that stripe (unit)."""
    WEIGHT = "weight"
    """A buffer of a pool, for a unit or a slice of one on its way (number in the pool)."""
    GRADIENT = "gradient"
    """A buffer of a pool, for a gradient or a slice of one (number in the pool)."""
    LANDING = "landing"
    """A buffer of a pool, for the gradient of a unit whose home is in the host's memory (number in the pool)."""
    COPY = "copy"
    """A slice of a unit's weights, or all of it, that stays here from step to step (0, in a pool of its own)."""
    INPUT = "x"
    """The input of a block (micro-batch, block)."""
    INPUT_GRADIENT = "dx"
    """The gradient of a block's input (micro-batch, block)."""
    CONTEXT = "ctx"
    """What every layer is called with besides its input (micro-batch)."""
    GRAPH = "graph"
    """A block's whole autograd graph, kept for its backward pass (micro-batch, block)."""
    ATTENTION = "kept"
    """A block's attention output, kept for its backward pass (micro-batch, block)."""
    LINEAR = "lin"
    """Inputs of a layer's matrix products and gradients of their outputs, between the two parts of its backward pass
    (micro-batch, block).
    """
    OFFLOADED = "host"
    """A block's input in the host's memory or a file (micro-batch's place in its round, block)."""
    OFFLOADED_ATTENTION = "hostkept"
    """A block's attention output outside of the device (micro-batch's place in its round, block)."""
    OFFLOADED_GRAPH = "hostgraph"
    """What a block's autograd graph saves, in the host's memory (place among those that wait, block)."""
    RELOADED = "reload"
    """Where such an input comes back (parity of the block, micro-batch's place in its round)."""
    RELOADED_ATTENTION = "reloadkept"
    """The same of attention's output, on whole rows."""
    RELOADED_GRAPH = "reloadgraph"
    """The same of a graph."""
    KEYS = "kv"
    """A layer's keys and values: of this rank's tokens until they are gathered, then of all (micro-batch, block)."""
    KEY_GRADIENTS = "dkv"
    """Gradients of keys and values: what this rank adds to those of all tokens until they are summed up, then the sums
    of its own (micro-batch, block).
    """
    TURN = "turn"
    """No bytes: what reads it comes after what wrote it (number in the program)."""
    IDS = "ids"
    """Tokens that were drawn for a group, in laps (group)."""
    CACHE = "cache"
    """Keys and values of a layer for all slots of all groups, in laps (block)."""
    LOSS = "loss"
    """The summed loss of a micro-batch (micro-batch)."""
    NORM = "norm"
    """The step's gradient norm, and whether all numbers were finite."""
    COUNT = "count"
    """The step's number of tokens."""
    SIZE = "size"
    """How the changes of weights since their copies came are coded in this step."""

    __hash__ = str.__hash__  # an enum's own is Python code, and buffers are keys of every dictionary


WEIGHTS = frozenset({Kind.HOME_WEIGHT, Kind.WEIGHT, Kind.COPY})
GRADIENTS = frozenset({Kind.HOME_GRADIENT, Kind.GRADIENT, Kind.LANDING})
HOMES = frozenset({Kind.HOME_WEIGHT, Kind.HOME_GRADIENT})
ACTIVATIONS = frozenset(Kind) - WEIGHTS - GRADIENTS - {Kind.NORM, Kind.COUNT, Kind.SIZE, Kind.CACHE}
TRAVELLING = frozenset({Kind.INPUT, Kind.INPUT_GRADIENT, Kind.IDS})
"""Activations that may go to another rank."""
BOUNDARIES = (Kind.INPUT, Kind.INPUT_GRADIENT, Kind.OFFLOADED, Kind.RELOADED)
"""Activations of a boundary's size: tokens x hidden size."""
AWAY = {Kind.INPUT: Kind.OFFLOADED, Kind.ATTENTION: Kind.OFFLOADED_ATTENTION, Kind.GRAPH: Kind.OFFLOADED_GRAPH}
"""What a layer keeps for its backward pass -> the same in the host's memory."""
BACK = {Kind.INPUT: Kind.RELOADED, Kind.ATTENTION: Kind.RELOADED_ATTENTION, Kind.GRAPH: Kind.RELOADED_GRAPH}
"""The same -> what it is where it has come back, under strategies whose blocks take turns in two places."""
OUTSIDE = frozenset(AWAY.values())
"""Activations that are not on the device."""
KEPT = frozenset({Kind.ATTENTION, Kind.OFFLOADED_ATTENTION})
"""What selective recomputation keeps of a layer, wherever it is."""
STAYING = OUTSIDE | {Kind.RELOADED}
"""Activations whose places are there for the whole run, see blocks.py."""
_POOLS = dict.fromkeys("WSB", Kind.WEIGHT) | dict.fromkeys("GHAR", Kind.GRADIENT)
_POOLS |= {"L": Kind.LANDING, "C": Kind.COPY}
"""First letter of a pool's name -> kind: whole units ``W``, slices ``S``, what comes from homes in the host's memory
``B``; whole gradients ``G``, slices ``H``, sums in the node ``A``, what arrives on the way home ``R``, and what a
backward pass fills instead of a home ``L``; and ``C3`` is what stays of unit 3.
"""


class Buffer(NamedTuple):
    """One buffer of one rank.

    Args:
        at: the numbers that the kind says.
        pool: the name of its pool, for kinds WEIGHT, GRADIENT and LANDING.

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
        """The inverse of ``str``.

        Raises:
            ValueError: the text is not a buffer's.
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
SIZE = Buffer(Kind.SIZE)


def pool_kind(pool: str) -> Kind:
    """The kind of a pool's buffers, from the first letter of its name.

    Raises:
        ValueError: no such letter.
    """
    if pool[:1] not in _POOLS:
        raise ValueError(
            f"{pool!r} is no pool's name: C.., W.. and S.. hold weights, G.., H.., A.., R.. and L.. gradients"
        )
    return _POOLS[pool[0]]


@cache
def pooled(pool: str, number: int) -> Buffer:
    """Buffer ``number`` of a pool."""
    return Buffer(pool_kind(pool), (number,), pool)


@cache
def home_weight(unit: int) -> Buffer:
    return Buffer(Kind.HOME_WEIGHT, (unit,))


@cache
def home_gradient(unit: int) -> Buffer:
    return Buffer(Kind.HOME_GRADIENT, (unit,))


@cache
def weight_copy(unit: int) -> Buffer:
    """Named by its unit, so that it is the same in all schedules."""
    return pooled(f"C{unit}", 0)


@cache
def block_input(micro_batch: int, block: int) -> Buffer:
    return Buffer(Kind.INPUT, (micro_batch, block))


@cache
def input_gradient(micro_batch: int, block: int) -> Buffer:
    return Buffer(Kind.INPUT_GRADIENT, (micro_batch, block))


@cache
def keys(micro_batch: int, block: int) -> Buffer:
    return Buffer(Kind.KEYS, (micro_batch, block))


@cache
def key_gradients(micro_batch: int, block: int) -> Buffer:
    return Buffer(Kind.KEY_GRADIENTS, (micro_batch, block))


@cache
def ids(group: int) -> Buffer:
    return Buffer(Kind.IDS, (group,))


@cache
def layer_cache(block: int) -> Buffer:
    return Buffer(Kind.CACHE, (block,))


@cache
def turn(number: int) -> Buffer:
    return Buffer(Kind.TURN, (number,))


@cache
def context(micro_batch: int) -> Buffer:
    return Buffer(Kind.CONTEXT, (micro_batch,))


@cache
def linear(micro_batch: int, block: int) -> Buffer:
    return Buffer(Kind.LINEAR, (micro_batch, block))


@cache
def loss(micro_batch: int) -> Buffer:
    return Buffer(Kind.LOSS, (micro_batch,))


@cache
def offloaded(place: int, block: int, kind: Kind = Kind.INPUT) -> Buffer:
    """Where what a block keeps waits in the host's memory, for the micro-batch at this place of its round."""
    return Buffer(AWAY[kind], (place, block))


@cache
def reloaded(place: int, block: int, kind: Kind = Kind.INPUT) -> Buffer:
    """Where it comes back: blocks take turns in two buffers a micro-batch."""
    return Buffer(BACK[kind], (block % 2, place))


@dataclass(frozen=True)
class Pool:
    """Equally large buffers of one kind on one rank.

    Args:
        name: begins the text of its buffers, see ``buffers.pool_kind``.
        kind: WEIGHT or COPY (compute dtype), GRADIENT (reduce dtype) or LANDING (dtype of the masters).
        elements: of one buffer.
    """

    name: str
    kind: Kind
    count: int
    elements: int

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return tuple(pooled(self.name, number) for number in range(self.count))
