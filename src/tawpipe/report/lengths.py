"""Histogram of document lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Histogram:
    """Shares of documents and of tokens by document length.

    Args:
        edges: powers of two. A document counts at the first edge that it does not exceed.
        documents: share of all documents, for every edge.
        tokens: share of all tokens, for every edge.
    """

    edges: tuple[int, ...]
    documents: tuple[float, ...]
    tokens: tuple[float, ...]

    @classmethod
    def of(cls, lengths: NDArray[np.int64], counts: NDArray[np.int64] | None = None) -> Histogram:
        """Build the histogram of documents that have at least one token each.

        >>> Histogram.of(np.array([3, 4, 5, 20]))
        Histogram(edges=(4, 8, 16, 32), documents=(0.5, 0.25, 0.0, 0.25), tokens=(0.21875, 0.15625, 0.0, 0.625))

        Args:
            lengths: document lengths in tokens.
            counts: number of documents of each length; 1 by default.
        """
        counts = np.ones(len(lengths), np.int64) if counts is None else counts
        powers = np.array([(int(length) - 1).bit_length() for length in np.unique(lengths)])
        first, last = int(powers.min()), int(powers.max())
        edges = 2 ** np.arange(first, last + 1)
        at = np.searchsorted(edges, lengths)
        documents = np.bincount(at, counts, len(edges)) / counts.sum()
        tokens = np.bincount(at, lengths * counts, len(edges)) / (lengths * counts).sum()
        return cls(tuple(map(int, edges)), tuple(map(float, documents)), tuple(map(float, tokens)))

    @property
    def rows(self) -> list[tuple[int, float, float]]:
        """(edge, share of documents, share of tokens) of every edge."""
        return list(zip(self.edges, self.documents, self.tokens, strict=True))

    def lines(self) -> list[str]:
        """Return a line of text for every edge, with the shares of documents and tokens in percent."""
        width = len(f"{self.edges[-1]:,}")
        return [
            f"  up to {edge:>{width},} tokens: {documents:6.1%} of documents, {tokens:6.1%} of tokens"
            for edge, documents, tokens in self.rows
        ]
