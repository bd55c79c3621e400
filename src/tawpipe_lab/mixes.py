"""Models whose layers take unequal times, as costs of blocks: what even stages are bad at.

Times of two of them are measurements that the authors of AdaPtis published (guojihu-hana/SimPipe, ``profiles/``): per
kind of layer, of a step without recomputation, here in hundredths of a millisecond. The third one follows from sizes.
What a block keeps is one boundary activation, and the embedding, which keeps tokens, nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

from tawpipe.schedule.pipelines.work import BlockTimes

Kinds = Mapping[str, tuple[int, int, int]]
"""By letter forward, the gradient of inputs, that of weights."""

NEMOTRON_NANO_V2_9B: Kinds = {
    "E": (76, 287, 0),
    "M": (268, 430, 176),
    "-": (185, 191, 169),
    "*": (193, 245, 65),
    "L": (1422, 1571, 6),
}
"""Embedding, state-space layer, MLP, attention, head with its loss; a vocabulary of 131,072."""
NEMOTRON_PATTERN = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"

JAMBA_52B: Kinds = {
    "E": (132, 0, 0),
    "M": (118, 244, 58),
    "-": (67, 4, 74),
    "#": (396, 401, 449),
    "*": (86, 29, 30),
    "L": (707, 738, 15),
}
"""The same, and # for a mixture of experts."""
JAMBA_PATTERN = "M-M#M-M#*-M#M-M#" * 4

GEMMA_3_4B: Kinds = {"E": (30, 100, 0), "T": (100, 100, 100), "L": (710, 710, 710)}
"""A layer of 94 million parameters, a head of 671 million (262,208 tokens); the embedding is looked up, and the
gradients of all its rows are set to zero and added to."""


def nemotron(layers: int = 56) -> tuple[BlockTimes, ...]:
    """State-space layers, MLPs and a few of attention, in the pattern of Nemotron Nano v2 9B, whose head takes as long
    as four layers.

    >>> len(nemotron()), nemotron(8)[1].forward
    (58, 268)
    """
    return _blocks(NEMOTRON_NANO_V2_9B, NEMOTRON_PATTERN, layers)


def gemma(layers: int = 34) -> tuple[BlockTimes, ...]:
    """Equal layers between an embedding and a head of a large vocabulary, in the proportions of Gemma 3 4B."""
    return _blocks(GEMMA_3_4B, "T", layers)


def dense_and_experts(layers: int = 64) -> tuple[BlockTimes, ...]:
    """Dense MLPs and mixtures of experts in turn, between state-space layers, in the pattern of Jamba 52B."""
    return _blocks(JAMBA_52B, JAMBA_PATTERN, layers)


MIXES: Mapping[str, Callable[..., tuple[BlockTimes, ...]]] = {
    "nemotron": nemotron,
    "gemma": gemma,
    "dense-and-experts": dense_and_experts,
}
"""By name a function of the number of layers: the pattern is cut there, or goes on from its beginning."""


def _blocks(kinds: Kinds, pattern: str, layers: int) -> tuple[BlockTimes, ...]:
    inner = (BlockTimes(*kinds[kind]) for kind in itertools.islice(itertools.cycle(pattern), layers))
    return BlockTimes(*kinds["E"], kept=0.0), *inner, BlockTimes(*kinds["L"])
