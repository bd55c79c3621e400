"""Samples from a corpus that is read and tokenised during training, because it is too large to process first.

The stream is cut into windows of documents. A window is tokenised, shuffled and packed like a separate corpus, so a
sample is (window, row of the window). A window is determined by the position in the files where it begins. This
position is the state; the content of a window is not stored.

Every rank reads the whole stream and computes equal rows without communication, whatever the number of ranks.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tawpipe.data.chats.columns import RawRow
from tawpipe.data.chats.render import Document
from tawpipe.data.corpus import Corpus, held_out
from tawpipe.data.reading.read import RowReader
from tawpipe.data.reading.sources import SourceFile
from tawpipe.data.report import ReadCounts, Skipped
from tawpipe.data.rows import PackedDataset, StepDocuments, nothing_learned, read_step
from tawpipe.data.settings import Packed
from tawpipe.data.tokenised import TokenisedText, no_documents
from tawpipe.errors import UserError
from tawpipe.model.batch import MicroBatch

if TYPE_CHECKING:
    from datasets import IterableDataset

log = logging.getLogger(__name__)

WINDOW_CHARACTERS = 1 << 28
"""Most characters of a window; it ends there even if it has fewer documents than allowed."""

STATES_KEPT = 64
"""Number of windows whose positions are remembered, for checkpoints of samples before the prefetched ones."""

BEGINNING: dict[str, Any] = {"epoch": 0, "window": 0, "first": 0, "stream": None}
"""Position of the first window: epoch, number of the window, number of its first sample, and state of the epoch's
stream."""


def read_files(files: Sequence[SourceFile], reader: RowReader) -> Iterator[dict[str, RawRow | Skipped]]:
    """Yield the rows of the files as examples with one column, ``row``; ``datasets`` treats each file as a shard."""
    for file in files:
        for row in reader.read(file):
            yield {"row": row}


def open_stream(files: Sequence[SourceFile], reader: RowReader, *, seed: int, epoch: int) -> IterableDataset:
    """Open a stream over one epoch: files in a shuffled order, rows of a file in their order.

    Args:
        files: files of the data set.
        reader: reads rows of a file.
        seed: seed of the run.
        epoch: number of the epoch; with ``seed`` it determines the order of files.
    """
    import datasets

    order = np.random.default_rng([seed, epoch]).permutation(len(files))
    shuffled = [files[number] for number in order]
    return datasets.IterableDataset.from_generator(read_files, gen_kwargs={"files": shuffled, "reader": reader})


class StreamedDataset:
    """Samples of a stream by their global number; going forward is cheap, going back reads again.

    Args:
        files: files of the data set.
        text: tokenises documents.
        sequence_length: tokens of a row, or most tokens of a document; see ``PackedDataset``.
        seed: seed of the order of files and documents.
        packing: placement of documents in the rows of each window; the last row of a window may have padding.
        window: number of documents in a window.
        held_out_fraction: fraction of documents that is left out here because it is used for validation.
        tell: log what is skipped; True on one rank, because all ranks skip equal rows.
    """

    def __init__(
        self,
        files: Sequence[SourceFile],
        text: TokenisedText,
        *,
        sequence_length: int,
        seed: int,
        packing: Packed,
        window: int,
        held_out_fraction: float,
        tell: bool,
    ) -> None:
        self.sequence_length, self.seed = sequence_length, seed
        self.packing: Packed = packing
        self.counts = ReadCounts(files=len(files))
        """Documents read so far and what was left out; counts again what is read again."""
        self._files, self._text = files, text
        self._window_size, self._held_out, self._tell = window, held_out_fraction, tell
        self.longest = self.left_out = 0
        """Tokens of the longest segment so far, and the number of documents so far without a token to learn."""
        self._lock = threading.Lock()
        self._states: deque[dict[str, Any]] = deque(maxlen=STATES_KEPT)
        self._start = BEGINNING
        self._go_to(BEGINNING)

    def sample(self, number: int) -> MicroBatch:
        """Return sample ``number``; reads on from the current window, or from a remembered one that is nearer.
        Thread-safe.

        Raises:
            UserError: the files hold no document, or no token of them is learned.
        """
        with self._lock:
            known = self._known(number)
            if number < self._first or known["first"] > self._first + self._rows:
                self._go_to(known)
            while number >= self._first + self._rows:
                self._next_window()
            assert self._dataset is not None
            # The window's number replaces the epoch, so that every window gets another order.
            return self._dataset.sample(self._window * self._rows + number - self._first)

    def length(self, number: int) -> int:
        """Return the tokens of sample ``number``; reads it."""
        return self.sample(number).input_ids.numel()

    def step(self, first: int, tokens: int) -> StepDocuments:
        """Return the documents of a step of up to ``tokens`` tokens, all read at once.

        Reading them later could mean to read an earlier window again.
        """
        return read_step(self.sample, first, tokens)

    def state_dict(self, number: int) -> dict[str, Any]:
        with self._lock:
            return copy.deepcopy({**self._known(number), "sample": number})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the sample of ``state``; the files must be unchanged."""
        with self._lock:
            self._states.clear()
            self._start = {key: state[key] for key in ("epoch", "window", "first", "stream")}
            self._go_to(self._start)

    def _known(self, number: int) -> dict[str, Any]:
        """Return the position of the last remembered window that begins at or before sample ``number``."""
        known = [state for state in (BEGINNING, self._start, *self._states) if state["first"] <= number]
        return max(known, key=lambda state: state["first"])

    def _go_to(self, state: dict[str, Any]) -> None:
        """Move to the position ``state``, the beginning of a window; reads nothing yet."""
        self._epoch, self._window, self._first = state["epoch"], state["window"] - 1, state["first"]
        self._rows = 0
        self._dataset: PackedDataset | None = None
        self._open(state["stream"])

    def _open(self, state: dict[str, Any] | None = None) -> None:
        """Open the stream of the current epoch at its beginning, or at ``state``."""
        self._stream = open_stream(self._files, self._text.reader, seed=self.seed, epoch=self._epoch)
        if state is not None:
            self._stream.load_state_dict(copy.deepcopy(state))
        self._examples = iter(self._stream)

    def _place(self) -> dict[str, Any]:
        """Return the position of the window that is read next."""
        stream = copy.deepcopy(self._stream.state_dict())
        return {"epoch": self._epoch, "window": self._window, "first": self._first, "stream": stream}

    def _next_window(self) -> None:
        """Read, tokenise and pack the next window that has a token to learn, in the next epoch if this one has ended.

        Raises:
            UserError: a whole epoch has no such window.
        """
        self._first += self._rows
        self._window += 1
        last_epoch = self._epoch + 1
        while True:
            place, documents = self._place(), self._read_window()
            if documents:
                corpus = Corpus.from_tokens(self._text.encoder.encode_all(documents), self.counts)
                dataset = PackedDataset.of_learnable(
                    corpus,
                    np.arange(len(documents)),
                    self.sequence_length,
                    seed=self.seed,
                    packing=self.packing,
                    pad_id=self._text.pad_id,
                )
                self.left_out += len(documents) - (0 if dataset is None else dataset.num_documents)
                if dataset is not None:
                    break
            elif self._epoch == last_epoch:
                raise self._nothing_left()
            else:  # the previous window was the last of its epoch
                self._epoch += 1
                self._open()
        self._dataset, self._rows = dataset, len(dataset)
        self.longest = max(self.longest, dataset.longest)
        self._states.append(place)

    def _nothing_left(self) -> UserError:
        """Return the error for files without documents, or without tokens to learn."""
        if self.left_out:
            return nothing_learned("--data", self._files, self.sequence_length, self.packing)
        return no_documents("--data", self._files, self.counts)

    def first_window(self) -> PackedDataset:
        """Read and return the first window of the first epoch.

        Raises:
            UserError: the files hold no document, or no token of them is learned.
        """
        self.sample(0)
        assert self._dataset is not None
        return self._dataset

    def _read_window(self) -> list[Document]:
        """Read the documents of the next window; returns none at the end of the epoch."""
        documents: list[Document] = []
        characters = 0
        while len(documents) < self._window_size and characters < WINDOW_CHARACTERS:
            example = next(self._examples, None)
            if example is None:
                break
            row = example["row"]
            self.counts.add_row(row)
            for document in [row] if isinstance(row, Skipped) else self._text.renderer.render(row):
                if isinstance(document, Skipped):
                    if self.counts.add_skipped(document) and self._tell:
                        log.warning("%s (further cases are counted only)", document.sentence)
                    continue
                self.counts.add_document(document.kind)
                if self._is_held_out(document):
                    continue
                documents.append(document)
                characters += sum(len(piece.text) for piece in document.pieces)
        return documents

    def _is_held_out(self, document: Document) -> bool:
        return bool(held_out(np.array([document.identity], np.uint64), self._held_out, self.seed)[0])
