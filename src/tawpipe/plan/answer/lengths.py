"""Lengths of documents of a corpus, from a file or a distribution; and steps that are drawn from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from tawpipe.errors import UserError
from tawpipe.report.lengths import Histogram

LOGNORMAL = "lognormal:"
SHORTEST = 32
"""Least tokens of a document that is drawn from a distribution."""
DRAWN = 200_000
"""Documents that are drawn to represent a distribution."""
SEED = 17


@dataclass(frozen=True, eq=False)
class Lengths:
    """Corpus, represented by the lengths of its documents.

    Args:
        values: distinct lengths, ascending.
        counts: number of documents of each length.
        source: description of the corpus.
    """

    values: np.ndarray
    counts: np.ndarray
    source: str

    @classmethod
    def of(cls, lengths: Sequence[int] | np.ndarray, source: str) -> Lengths:
        """Build a corpus from the lengths of its documents."""
        return cls(*np.unique(np.asarray(lengths, dtype=np.int64), return_counts=True), source)

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return int(self.values[-1])

    def cut(self, most: int) -> Lengths:
        """Return the corpus with longer documents cut into pieces of ``most`` tokens and a rest."""
        whole, rest = np.divmod(self.values, most)
        values = np.concatenate([rest, [most]])
        counts = np.concatenate([self.counts, [(whole * self.counts).sum()]])
        distinct, at = np.unique(values[(values > 0) & (counts > 0)], return_inverse=True)
        sums = np.bincount(at, counts[(values > 0) & (counts > 0)]).astype(np.int64)
        return Lengths(distinct, sums, self.source)

    def step(self, tokens: int, number: int) -> list[int]:
        """Draw documents at random, of ``tokens`` tokens together at most, and return their lengths.

        These are the documents of step ``number``. At least one document is drawn, even if it is longer. Equal
        arguments give equal documents."""
        draw, lengths, total = np.random.default_rng((SEED, number + 1)), list[int](), 0
        shares = np.cumsum(self.counts)
        while True:
            for at in np.searchsorted(shares, draw.integers(shares[-1], size=1024), side="right"):
                length = int(self.values[at])
                if lengths and total + length > tokens:
                    return lengths
                lengths.append(length)
                total += length

    @cached_property
    def histogram(self) -> Histogram:
        """Shares of documents and of tokens by length."""
        return Histogram.of(self.values, self.counts)


def lengths_of(words: str) -> Lengths:
    """Return the corpus for ``lognormal:MU,SIGMA`` or for a file.

    Each line of the file has a length, or a length and the number of documents of that length.

    Raises:
        UserError: ``words`` is neither a valid distribution nor a valid file.
    """
    return _drawn(words) if words.startswith(LOGNORMAL) else _read(Path(words))


def _drawn(words: str) -> Lengths:
    """Draw the lengths of ``DRAWN`` documents from ``lognormal:MU,SIGMA``, always with one seed.

    Raises:
        UserError: a parameter is missing or out of range.
    """
    try:
        mu, sigma = map(float, words.removeprefix(LOGNORMAL).split(","))
    except ValueError:
        mu = sigma = math.nan
    if not (0 <= mu <= 30 and 0 <= sigma <= 10):
        expected = "lognormal:MU,SIGMA of the logarithm of a length, 0 to 30 and 0 to 10, such as lognormal:6.35,2.33"
        raise UserError("--lengths", words, expected)
    drawn = np.random.default_rng(SEED).lognormal(mu, sigma, DRAWN)
    return Lengths.of(np.clip(drawn, SHORTEST, 2**40).astype(np.int64), f"drawn, {words}")


def _read(path: Path) -> Lengths:
    """Read a corpus from a text file: each line has a length, or a length and a number of documents.

    The number of documents defaults to 1. Empty lines are ignored.

    Raises:
        UserError: the file cannot be read, contains no length, or has an invalid line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        expected = f"corpus, lognormal:MU,SIGMA, lengths with commas between them, or a file of lengths ({why})"
        raise UserError("--lengths", str(path), expected) from error
    counts: dict[int, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            length, count = [*map(int, line.replace(",", " ").split()), 1][:2]
            if length < 1 or count < 0 or len(line.replace(",", " ").split()) > 2:
                raise ValueError
        except ValueError as error:
            expected = "a length from 1 on, or a length and a number of documents"
            raise UserError(f"--lengths {path}, line {number}", line.strip()[:40], expected) from error
        counts[length] = counts.get(length, 0) + count
    counts = {length: counts[length] for length in sorted(counts) if counts[length]}
    if not counts:
        raise UserError("--lengths", str(path), "a file with at least one length")
    return Lengths(np.array([*counts]), np.array([*counts.values()]), str(path))
