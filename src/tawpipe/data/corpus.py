"""A tokenised corpus: flat arrays, in memory or mapped from files, so that a row costs a few slices.

All tokens are in one array of 16 or 32 bits, and document borders in another. A row is a few slices of one mapped file,
which all processes of a machine share through the page cache. Arrow lists were the alternative: they read equal bytes,
but need a Python object per access and end at 2**31 tokens per chunk.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tawpipe.data.chats.columns import RawRow
from tawpipe.data.chats.render import Document, Renderer
from tawpipe.data.encode import Encoder, Tokens
from tawpipe.data.report import ReadCounts, Skipped

TOKENS, OFFSETS, MASK, COUNTS = "tokens.bin", "offsets.npy", "mask.bin", "counts.json"
IDENTITIES, CONTENTS = "identities.npy", "contents.npy"

CHUNK_TOKENS = 1 << 23
"""Number of tokens whose mask is unpacked at one time."""


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """Return the smallest unsigned dtype for token ids below ``vocab_size``: 16 or 32 bits."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokenised documents in flat arrays."""

    tokens: NDArray[np.uint16 | np.uint32]
    """Token ids of all documents, end to end: ``(tokens,)``."""
    offsets: NDArray[np.int64]
    """Index of the first token of each document, and the number of all tokens: ``(documents + 1,)``."""
    identities: NDArray[np.uint64]
    """Hash of the source row of each document: ``(documents,)``."""
    contents: NDArray[np.uint64]
    """Hash of the pieces of each document: ``(documents,)``."""
    mask: NDArray[np.uint8] | None
    """One bit per token, set if it counts in the loss: ``(tokens / 8,)``; None if all count."""
    counts: ReadCounts
    """Counts of documents and of what was left out while reading."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document: ``(documents,)``."""
        return np.diff(self.offsets)

    def read(self, document: int, start: int, length: int) -> tuple[NDArray, NDArray[np.bool_] | None]:
        """Return the tokens of a part of a document, and a mask of tokens that count in the loss, or None if all count.

        Args:
            document: index of the document.
            start: first token of the part in the document.
            length: tokens of the part.
        """
        begin = int(self.offsets[document]) + start
        end = begin + length
        assert end <= self.offsets[document + 1], (document, start, length)
        tokens = self.tokens[begin:end]
        if self.mask is None:
            return tokens, None
        bits = np.unpackbits(self.mask[begin // 8 : -(-end // 8)])
        return tokens, bits[begin % 8 : begin % 8 + length].astype(np.bool_)

    def counted(self, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of tokens that count in the loss in each range of ``tokens``.

        Args:
            begins: first token of each range.
            ends: token after the last one of each range.
        """
        if self.mask is None:
            return ends - begins
        places = np.unique(np.concatenate([begins, ends]))
        before = np.zeros(len(places), np.int64)
        total = 0
        for start in range(0, 8 * len(self.mask), CHUNK_TOKENS):
            first, last = np.searchsorted(places, [start, start + CHUNK_TOKENS])
            if first == len(places):
                break
            bits = np.unpackbits(self.mask[start // 8 : (start + CHUNK_TOKENS) // 8])
            sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(bits, dtype=np.int64)])
            before[first:last] = total + sums[places[first:last] - start]
            total += int(sums[-1])
        before[places >= 8 * len(self.mask)] = total
        return before[np.searchsorted(places, ends)] - before[np.searchsorted(places, begins)]

    def learned(self, documents: NDArray[np.int64], limit: int | None = None) -> NDArray[np.int64]:
        """Return the number of learned tokens of each of ``documents`` if only its first ``limit`` tokens are in a row.

        The first token is not learned, because nothing predicts it. None for ``limit`` means whole documents.
        """
        begins, lengths = self.offsets[documents], self.lengths[documents]
        shown = lengths if limit is None else np.minimum(lengths, limit)
        return self.counted(begins + np.minimum(shown, 1), begins + shown)

    @classmethod
    def from_tokens(cls, documents: Iterable[tuple[Document, Tokens]], counts: ReadCounts) -> Corpus:
        """Build a corpus in memory; records the lengths of documents in ``counts``."""
        pairs = list(documents)
        for document, tokens in pairs:
            counts.add_length(len(tokens.ids), document.where)
        lengths = [len(tokens.ids) for _, tokens in pairs]
        return cls(
            tokens=np.concatenate([np.zeros(0, np.uint32), *(tokens.ids for _, tokens in pairs)]),
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]),
            identities=np.array([document.identity for document, _ in pairs], np.uint64),
            contents=np.array([document.content for document, _ in pairs], np.uint64),
            mask=np.packbits(np.concatenate([np.zeros(0, np.bool_), *(tokens.counts for _, tokens in pairs)])),
            counts=counts,
        )

    @classmethod
    def joined(cls, parts: Sequence[tuple[Corpus, NDArray[np.int64]]]) -> Corpus:
        """Build a corpus in memory from the given document indices of several corpora, in this order."""
        pairs = [
            corpus.read(document, 0, length)
            for corpus, some in parts
            for document, length in zip(some.tolist(), corpus.lengths[some].tolist(), strict=True)
        ]
        lengths = [len(tokens) for tokens, _ in pairs]
        return cls(
            tokens=np.concatenate([tokens for tokens, _ in pairs]),
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]),
            identities=np.concatenate([corpus.identities[some] for corpus, some in parts]),
            contents=np.concatenate([corpus.contents[some] for corpus, some in parts]),
            mask=np.packbits(np.concatenate([np.ones(len(t), np.bool_) if m is None else m for t, m in pairs])),
            counts=ReadCounts.merged([corpus.counts for corpus, _ in parts]),
        )

    @classmethod
    def open(cls, folder: Path, vocab_size: int) -> Corpus:
        """Open the corpus in ``folder``; its tokens are mapped from the file."""
        mask = folder / MASK
        return cls(
            tokens=np.memmap(folder / TOKENS, dtype=token_dtype(vocab_size), mode="r"),
            offsets=np.load(folder / OFFSETS),
            identities=np.load(folder / IDENTITIES),
            contents=np.load(folder / CONTENTS),
            mask=np.memmap(mask, dtype=np.uint8, mode="r") if mask.exists() else None,
            counts=ReadCounts.loaded(json.loads((folder / COUNTS).read_text())),
        )


def render_counted(rows: Iterable[RawRow | Skipped], renderer: Renderer, counts: ReadCounts) -> Iterable[Document]:
    """Yield the documents of the rows; adds rows, documents and what is left out to ``counts``."""
    for row in rows:
        counts.add_row(row)
        for document in [row] if isinstance(row, Skipped) else renderer.render(row):
            if isinstance(document, Skipped):
                counts.add_skipped(document)
            else:
                counts.add_document(document.kind)
                yield document


def write_corpus(
    folder: Path, rows: Iterable[RawRow | Skipped], renderer: Renderer, encoder: Encoder, *, files: int, vocab_size: int
) -> ReadCounts:
    """Tokenise all rows into files in ``folder``, which exists; keeps one batch in memory at a time.

    Args:
        folder: folder of the new files.
        rows: rows of the corpus.
        renderer: turns rows into documents.
        encoder: tokenises documents.
        files: number of files, for the counts.
        vocab_size: size of the vocabulary, which determines the dtype.

    Returns:
        Counts of documents and of what was left out. If there is no document, the folder holds no corpus.
    """
    counts = ReadCounts(files=files)
    dtype = token_dtype(vocab_size)
    # Arrays need 8 bytes per document; lists would hold objects.
    lengths, identities, contents = array("q"), array("Q"), array("Q")
    bits = np.zeros(0, np.bool_)
    with (folder / TOKENS).open("wb") as tokens_file, (folder / MASK).open("wb") as mask_file:
        for document, tokens in encoder.encode_all(render_counted(rows, renderer, counts)):
            lengths.append(len(tokens.ids))
            counts.add_length(len(tokens.ids), document.where)
            identities.append(document.identity)
            contents.append(document.content)
            tokens_file.write(tokens.ids.astype(dtype).tobytes())
            bits = np.concatenate([bits, tokens.counts])
            whole = len(bits) // 8 * 8
            mask_file.write(np.packbits(bits[:whole]).tobytes())
            bits = bits[whole:]
        mask_file.write(np.packbits(bits).tobytes())
    if not counts.masked:
        (folder / MASK).unlink()
    ends = np.cumsum(np.asarray(lengths, np.int64))
    np.save(folder / OFFSETS, np.concatenate([np.zeros(1, np.int64), ends]))
    np.save(folder / IDENTITIES, np.array(identities, np.uint64))
    np.save(folder / CONTENTS, np.array(contents, np.uint64))
    (folder / COUNTS).write_text(json.dumps(asdict(counts)))
    return counts


def held_out(identities: NDArray[np.uint64], fraction: float, seed: int) -> NDArray[np.bool_]:
    """Return a mask ``(documents,)`` of validation documents, chosen by identity and seed only."""
    return _mixed(identities, seed) < np.uint64(int(fraction * (1 << 64)))


def split_documents(
    sets: Sequence[NDArray[np.uint64]], fraction: float, seed: int
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Split the documents of every set into training and validation; return both as document indices per set.

    Equal documents of several sets are on one side. In a small set chance may leave one side empty. Training then keeps
    one of its documents, and validation gets one if every set still has another to train on. A set with one distinct
    document is used only for training.

    Args:
        sets: identities of the documents of every set.
        fraction: fraction of documents for validation.
        seed: seed of the choice.
    """
    out = [held_out(identities, fraction, seed) for identities in sets]
    if fraction > 0 and any(held.all() or not held.any() for held in out):
        distinct = [identities[np.argsort(_mixed(identities, seed))] for identities in map(np.unique, sets)]
        chosen = np.concatenate([identities[held_out(identities, fraction, seed)] for identities in distinct])
        for identities in distinct:
            if np.isin(identities, chosen).all():
                chosen = chosen[chosen != identities[-1]]
        for identities in distinct:
            if not np.isin(identities, chosen).any():
                more = (np.append(chosen, identity) for identity in identities)
                chosen = next((some for some in more if not any(np.isin(o, some).all() for o in distinct)), chosen)
        out = [np.isin(identities, chosen) for identities in sets]
    return [(np.flatnonzero(~held), np.flatnonzero(held)) for held in out]


def in_shares(lengths: Sequence[NDArray[np.int64]], weights: Sequence[float]) -> NDArray[np.int64]:
    """Return document indices, counted over all sets, whose tokens have the shares ``weights``.

    The chosen documents have about as many tokens as all sets together. Documents of a small set with a large weight
    are repeated.

    Args:
        lengths: tokens of the documents of every set.
        weights: weight of every set.
    """
    totals = np.array([int(set_lengths.sum()) for set_lengths in lengths])
    wanted = totals.sum() * np.array(weights) / sum(weights)
    chosen, first = [], 0
    for set_lengths, total, tokens in zip(lengths, totals, wanted, strict=True):
        times, rest = divmod(tokens, total)
        number = int(times) * len(set_lengths) + int(np.searchsorted(np.cumsum(set_lengths), rest))
        chosen.append(first + np.resize(np.arange(len(set_lengths)), max(1, number)))
        first += len(set_lengths)
    return np.concatenate(chosen)


def _mixed(identities: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Return ``identities`` under a bijection of 64-bit numbers that depends on ``seed``."""
    return _splitmix(identities ^ _splitmix(np.array([seed], np.int64).astype(np.uint64)))


def _splitmix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the finaliser of SplitMix64, which spreads every bit over all; unsigned arrays wrap around silently."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
