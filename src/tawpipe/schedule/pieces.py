"""Who computes which tokens of a row that several ranks compute together.

A document is cut to twice as many pieces as there are ranks, of equally many tokens, and a rank takes one from its
beginning and the one as far from its end: so all have as many tokens, and as many tokens before them to attend to. A
document that is short beside a rank's share stays whole: a packed row is not taken to crumbs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

SHORT = 32
"""A document is not cut if so many of it fit into a rank's share."""
Ranges = tuple[tuple[int, int], ...]
"""(begin, end) of tokens in a row, ascending; no two touch."""


def tokens_of_ranks(lengths: Sequence[int], ranks: int) -> tuple[Ranges, ...]:
    """For every rank the tokens that it computes. Counts may differ; a rank may have none.

    >>> tokens_of_ranks([16], 2)
    (((0, 4), (12, 16)), ((4, 12),))
    >>> tokens_of_ranks([1, 3], 4)
    (((1, 3),), ((3, 4),), ((0, 1),), ())

    Args:
        lengths: of the documents of the row, one after the other.
    """
    most = sum(lengths) // (SHORT * ranks)
    load = [0] * ranks
    dealt: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    spans = list(zip(accumulate(lengths, initial=0), lengths, strict=False))
    for begin, length in sorted(spans, key=lambda span: -span[1]):  # the longest first: short ones fill up
        pieces = [[(begin, begin + length)]]
        if length > most:
            at = [begin + length * i // (2 * ranks) for i in range(2 * ranks + 1)]
            cut = list(pairwise(at))
            pieces = [[cut[i], cut[-1 - i]] for i in range(ranks)]
        pieces.sort(key=lambda piece: sum(a - b for a, b in piece))
        takers = sorted(range(ranks), key=lambda rank: load[rank])
        for rank, piece in zip(takers, pieces, strict=False):
            dealt[rank] += piece
            load[rank] += sum(b - a for a, b in piece)
    return tuple(_joined(ranges) for ranges in dealt)


def _joined(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """In order, without empty ones, those that touch in one."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if joined and begin == joined[-1][1]:
            joined[-1] = joined[-1][0], end
        elif begin < end:
            joined.append((begin, end))
    return tuple(joined)
