"""Models whose layers take unequal times, as costs of their blocks: cases where stages of equal layer counts are slow.

Times of two models are measurements that the authors of AdaPtis published (guojihu-hana/SimPipe, ``profiles/``): per
kind of layer, for a step without recomputation, here in hundredths of a millisecond. The times of the third model
follow from the sizes of its layers. Every block keeps one boundary activation until its backward pass, except the
embedding: its input is tokens, so it keeps nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

from tawpipe.schedule.pipelines.work import BlockTimes

Kinds = Mapping[str, tuple[int, int, int]]
"""Letter of a kind of block -> times of three passes: forward, gradient of inputs, gradient of weights."""

NEMOTRON_NANO_V2_9B: Kinds = {
    "E": (76, 287, 0),
    "M": (268, 430, 176),
    "-": (185, 191, 169),
    "*": (193, 245, 65),
    "L": (1422, 1571, 6),
}
"""E: embedding, M: state-space layer, -: MLP, *: attention, L: head with its loss, for a vocabulary of 131,072. Times
in hundredths of a millisecond."""
NEMOTRON_PATTERN = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"

JAMBA_52B: Kinds = {
    "E": (132, 0, 0),
    "M": (118, 244, 58),
    "-": (67, 4, 74),
    "#": (396, 401, 449),
    "*": (86, 29, 30),
    "L": (707, 738, 15),
}
"""E: embedding, M: state-space layer, -: MLP, #: mixture of experts, *: attention, L: head with its loss. Times in
hundredths of a millisecond."""
JAMBA_PATTERN = "M-M#M-M#*-M#M-M#" * 4

GEMMA_3_4B: Kinds = {"E": (30, 100, 0), "T": (100, 100, 100), "L": (710, 710, 710)}
"""E: embedding, T: layer of 94 million parameters, L: head of 671 million parameters (262,208 tokens). One pass of a
layer takes 100 units of time. The embedding is a lookup; its backward pass sets the gradients of all rows to zero and
adds to them."""


def nemotron(layers: int = 56) -> tuple[BlockTimes, ...]:
    """Return block costs in the pattern of Nemotron Nano v2 9B, whose head takes the time of four layers.

    Layers are state-space layers, MLPs and a few attention layers; ``layers`` of them stand between embedding and head.

    >>> len(nemotron()), nemotron(8)[1].forward
    (58, 268)
    """
    return _blocks(NEMOTRON_NANO_V2_9B, NEMOTRON_PATTERN, layers)


def gemma(layers: int = 34) -> tuple[BlockTimes, ...]:
    """Return block costs of ``layers`` equal layers and a large vocabulary, in the proportions of Gemma 3 4B."""
    return _blocks(GEMMA_3_4B, "T", layers)


def dense_and_experts(layers: int = 64) -> tuple[BlockTimes, ...]:
    """Return block costs in the pattern of Jamba 52B: state-space layers, with dense MLPs or experts between."""
    return _blocks(JAMBA_52B, JAMBA_PATTERN, layers)


MIXES: Mapping[str, Callable[..., tuple[BlockTimes, ...]]] = {
    "nemotron": nemotron,
    "gemma": gemma,
    "dense-and-experts": dense_and_experts,
}
"""Name -> function that returns block costs for a number of layers. The pattern of layers is cut at that number, or
repeated if it is shorter."""


def _blocks(kinds: Kinds, pattern: str, layers: int) -> tuple[BlockTimes, ...]:
    """Return the costs of the embedding, of ``layers`` layers that repeat ``pattern``, and of the head."""
    inner = (BlockTimes(*kinds[kind]) for kind in itertools.islice(itertools.cycle(pattern), layers))
    return BlockTimes(*kinds["E"], kept=0.0), *inner, BlockTimes(*kinds["L"])
