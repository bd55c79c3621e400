"""Distribution of the tokens of a row over the ranks of a context-parallel group.

A document is cut into twice as many sequence shards as there are ranks, of equally many tokens. A rank takes one shard
from the beginning and the one equally far from the end. So all ranks have equally many tokens, with equally many tokens
before them to attend to. A document that is short compared with a rank's share stays whole, so that a packed row is not
cut into many small parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

SHORT = 32
"""A document is not cut if at least this many documents of its length fit into a rank's share of the row."""
AT_ONCE = 16384
"""Most tokens of a rank that a layer computes at one time if ``sequence_chunk`` is 0. They fill any device, and a layer
of a longer part would only take more memory."""
Ranges = tuple[tuple[int, int], ...]
"""Ranges (begin, end) of tokens in a row, ascending; no two touch."""


def tokens_of_ranks(lengths: Sequence[int], ranks: int) -> tuple[Ranges, ...]:
    """Return for every rank of a context-parallel group the (begin, end) ranges of tokens that it computes.

    A long document is cut into ``2 * ranks`` parts. Each rank gets one part from its beginning and the matching part
    from its end, because later tokens attend to more tokens. A short document (see ``SHORT``) goes to one rank, which
    has the fewest tokens so far. Token counts of ranks may differ, and a rank may have none.

    >>> tokens_of_ranks([16], 2)
    (((0, 4), (12, 16)), ((4, 12),))
    >>> tokens_of_ranks([1, 3], 4)
    (((1, 3),), ((3, 4),), ((0, 1),), ())

    Args:
        lengths: tokens of the row's documents, in the order of the row.
        ranks: number of ranks.
    """
    most = sum(lengths) // (SHORT * ranks)
    load = [0] * ranks
    dealt: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    spans = list(zip(accumulate(lengths, initial=0), lengths, strict=False))
    for begin, length in sorted(spans, key=lambda span: -span[1]):  # longest first: short ones even out the load
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
    """Return ``ranges`` sorted, without empty ranges, and with touching ranges merged."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if joined and begin == joined[-1][1]:
            joined[-1] = joined[-1][0], end
        elif begin < end:
            joined.append((begin, end))
    return tuple(joined)
