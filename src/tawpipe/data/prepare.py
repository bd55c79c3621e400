"""The data's door: datasets from settings, the same in every process, with a report of what was read."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tawpipe.data.cache import cache_root, content_hash, leader_first
from tawpipe.data.corpus import Corpus, held_out, render_counted, split_documents
from tawpipe.data.lengths import DEVICES, Balance, Dealing
from tawpipe.data.render import BUILTIN_CHAT_TEMPLATE
from tawpipe.data.report import DataReport, ReadCounts, SetSize
from tawpipe.data.rows import PackedDataset, nothing_learned
from tawpipe.data.settings import DataSettings, Packed
from tawpipe.data.sources import SourceFile, find_files
from tawpipe.data.stream import StreamedDataset
from tawpipe.data.tokenised import TokenisedText, no_documents, stamps
from tawpipe.errors import UserError
from tawpipe.report.lengths import Histogram

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


WORTH = 1.05
"""Gain in time by the model, from which on ``auto`` takes ``balanced`` for a model with weights."""


@dataclass(frozen=True, eq=False)
class PreparedData:
    """Everything that training needs to know of its data."""

    train: PackedDataset | StreamedDataset
    validation: PackedDataset | None
    tokenizer: PreTrainedTokenizerBase
    report: DataReport
    fingerprint: str
    """Hashes of all that sample n depends on, in parts ``name:hash``; see ``changed_parts``."""

    @property
    def longest(self) -> int:
        """Tokens of the longest document, or piece of one, in a row; when streaming, of what has been read so far."""
        return max(self.train.longest, 0 if self.validation is None else self.validation.longest)

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples in one pass of the training data: rows, under ``balanced`` documents and pieces of them. None when
        streaming, as nobody has counted them.
        """
        return None if isinstance(self.train, StreamedDataset) else len(self.train)

    def steps_in(self, epochs: float, *, rows: int, tokens: int) -> int | None:
        """Steps from the beginning of the data after which it has been seen so many times; None when streaming.

        Args:
            rows: samples of a step; of no effect under ``balanced``.
            tokens: of a step under ``balanced``, which has as many documents as stay within them.
        """
        if isinstance(self.train, StreamedDataset):
            return None
        samples = math.ceil(epochs * len(self.train))
        if self.report.packing != "balanced":
            return -(-samples // rows)
        steps = first = 0
        while first < samples:
            first += len(self.train.step_lengths(first, tokens))
            steps += 1
        return steps


def changed_parts(before: str, now: str) -> list[str]:
    """The names of the parts in which two fingerprints differ: documents, tokenizer, rows."""
    old, new = (
        dict(part.split(":", 1) for part in fingerprint.split() if ":" in part) for fingerprint in (before, now)
    )
    return [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]


def prepare_data(
    settings: DataSettings,
    *,
    sequence_length: int,
    seed: int,
    max_document: int | None = None,
    dealing: Dealing | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    model: str | None = None,
    leader: bool = True,
    barrier: Callable[[], None] = lambda: None,
) -> PreparedData:
    """Find or make the tokenizer and the tokens, and put them into rows.

    Every process calls this, with the same arguments but for ``leader``.

    Args:
        sequence_length: tokens of a row, S.
        max_document: tokens of a document at most, under ``balanced``; S by default.
        dealing: the steps of the run, by which ``auto`` chooses and the report says how even they are.
        seed: decides the order of the samples and which documents are held out.
        tokenizer: one to use instead of what the settings say.
        model: a local folder whose tokenizer is used if the settings name none; a folder without one, or None, is as if
            there were none.
        leader: True for the process that makes what the cache lacks, one per cache folder.
        barrier: waits for the other processes; called once by each. It must bear as long as tokenising takes.

    Raises:
        UserError: in every process, if the settings cannot work or nothing in the files is a document.
    """
    settings.check_data()
    if sequence_length < 2:
        raise UserError("--sequence-length", sequence_length, "at least 2: the first token of a row is never predicted")
    if seed < 0:
        raise UserError("--seed", seed, "a number from 0 on")
    files = find_files(settings.data)
    validation_files = find_files(settings.validation_data, "--validation-data") if settings.validation_data else []
    root = cache_root(settings.cache_dir)
    lengths: dict[Packed, int] = {
        "split": sequence_length,
        "fit": sequence_length,
        "balanced": max_document or sequence_length,
    }
    preparation = _Preparation(
        settings, files, validation_files, root, lengths, seed, tokenizer, model, leader=leader, dealing=dealing
    )
    request = content_hash(asdict(settings), stamps([*files, *validation_files]), model, *lengths.values(), seed)
    return leader_first(preparation.run, leader=leader, barrier=barrier, note=root / f"failed-{request}.json")


@dataclass
class _Preparation:
    """One call of ``prepare_data``.

    Only ``leader_first`` knows who makes what the cache lacks: the others find it there, unless their cache is another
    folder than the leader's. Then they make their own, which is the same.
    """

    settings: DataSettings
    files: Sequence[SourceFile]
    validation_files: Sequence[SourceFile]
    root: Path
    lengths: dict[Packed, int]
    """Tokens of a row under every packing; under ``balanced`` of a document at most."""
    seed: int
    tokenizer: PreTrainedTokenizerBase | None
    model: str | None
    leader: bool
    dealing: Dealing | None = None
    why: str = ""
    """The reason for the packing that ``auto`` chose."""
    notes: list[str] = field(default_factory=list)

    def run(self) -> PreparedData:
        begin = time.perf_counter()
        self.text = TokenisedText(self.settings, self.files, self.root, tokenizer=self.tokenizer, model=self.model)
        if self.text.tokenizer.eos_token_id is None:
            self.notes.append("the tokenizer has no end-of-text token, so the documents end without one")
        return self._streamed() if self.settings.streaming else self._cached(begin)

    def _cached(self, begin: float) -> PreparedData:
        corpus, reused = self.text.corpus(self.files, "--data")
        validation_read: ReadCounts | None = None
        if self.validation_files:
            train_documents = np.arange(len(corpus.identities))
            validation_corpus, _ = self.text.corpus(self.validation_files, "--validation-data")
            validation_documents = np.arange(len(validation_corpus.identities))
            validation_read = validation_corpus.counts
        else:
            fraction = self.settings.validation_fraction
            train_documents, validation_documents = split_documents(corpus.identities, fraction, self.seed)
            validation_corpus = corpus
            if fraction > 0 and not len(validation_documents):
                self.notes.append("no validation: the training files hold only one distinct document")
        packing = self._packing(corpus.counts, lambda: self._packed(corpus, train_documents, "balanced"))
        train = self._packed(corpus, train_documents, packing)
        if train is None:
            raise nothing_learned("--data", self.files, self.lengths[packing], packing)
        validation = self._validation(validation_corpus, validation_documents, packing)
        content = content_hash(corpus.identities[train.documents].tobytes().hex())
        size, seconds = _size(train, len(train_documents)), time.perf_counter() - begin
        read = corpus.counts, validation_read
        return self._prepared(train, train, validation, content, packing, size, *read, seconds=seconds, reused=reused)

    def _streamed(self) -> PreparedData:
        fraction = 0.0 if self.validation_files else self.settings.validation_fraction
        counts = ReadCounts(files=len(self.files))
        rows = (row for file in self.files for row in self.text.reader.read(file))
        first = list(islice(render_counted(rows, self.text.renderer, counts), self.settings.stream_window))
        if not first:
            raise no_documents("--data", self.files, counts)
        packing = self._packing(counts, lambda: self._stream("balanced", fraction).first_window())
        validation: PackedDataset | None = None
        validation_read: ReadCounts | None = None
        if self.validation_files:
            corpus, _ = self.text.corpus(self.validation_files, "--validation-data")
            validation = self._validation(corpus, np.arange(len(corpus.identities)), packing)
            validation_read = corpus.counts
        elif fraction > 0:
            out = held_out(np.array([document.identity for document in first], np.uint64), fraction, self.seed)
            documents = [document for document, is_out in zip(first, out, strict=True) if is_out]
            if documents:
                corpus = Corpus.from_tokens(self.text.encoder.encode_all(documents), counts)
                validation = self._validation(corpus, np.arange(len(documents)), packing)
                if validation is not None:
                    self.notes.append(
                        f"streaming: validation has {validation.num_documents} held-out documents of the first "
                        f"{len(first):,}; give --validation-data for others"
                    )
            else:
                self.notes.append(f"streaming: none of the first {len(first):,} documents is held out; no validation")
        train = self._stream(packing, fraction, tell=self.leader)
        window = train.first_window()
        counts.longest, counts.longest_where = train.counts.longest, train.counts.longest_where
        content = content_hash([[Path(file.path).name, file.size] for file in self.files])
        size = _size(window, window.num_documents + train.left_out)
        return self._prepared(train, window, validation, content, packing, size, counts, validation_read)

    def _stream(self, packing: Packed, held_out_fraction: float, *, tell: bool = False) -> StreamedDataset:
        return StreamedDataset(
            self.files,
            self.text,
            sequence_length=self.lengths[packing],
            seed=self.seed,
            packing=packing,
            window=self.settings.stream_window,
            held_out_fraction=held_out_fraction,
            tell=tell,
        )

    def _packing(self, counts: ReadCounts, balanced: Callable[[], PackedDataset | None]) -> Packed:
        """The packing; what ``auto`` takes depends on data, model and settings, not on the processes.

        Args:
            balanced: makes the documents as ``balanced`` has them.
        """
        if self.settings.packing != "auto":
            return self.settings.packing
        rows: Packed = "fit" if counts.masked else "split"
        dealing, chosen = self.dealing, rows
        if dealing is not None and dealing.against:
            self.why = dealing.against
        elif dealing is not None and dealing.asked:
            chosen, self.why = "balanced", f"of {dealing.asked}"
        elif counts.masked:
            chosen, self.why = "balanced", "there are chat or instruction rows, which stay whole and are uneven"
        elif dealing is not None and not dealing.pretrained:
            self.why = "the model starts from random weights: rows of one length are usual then"
        elif dealing is not None and (dataset := balanced()) is not None:
            longest = self.lengths["balanced"]
            gain = Balance.of(dataset.step_lengths, dealing.on_devices(DEVICES, longest), longest).gain
            chosen = "balanced" if gain > WORTH else rows
            self.why = (
                f"the model has weights, and with documents of these lengths balanced steps are {gain - 1:.0%} faster "
                f"than documents packed by their tokens (modelled for {DEVICES} devices)"
            )
        return chosen

    def _packed(self, corpus: Corpus, documents: np.ndarray, packing: Packed) -> PackedDataset | None:
        """A dataset of those documents of which something is learned; None if there is none."""
        dataset = PackedDataset.of_learnable(
            corpus, documents, self.lengths[packing], seed=self.seed, packing=packing, pad_id=self.text.pad_id
        )
        return dataset if dataset is not None and dataset.num_learned else None

    def _validation(self, corpus: Corpus, documents: np.ndarray, packing: Packed) -> PackedDataset | None:
        """The held-out documents; None, with a note, if nothing of them would be learned."""
        if not len(documents):
            return None
        dataset = self._packed(corpus, documents, packing)
        if dataset is None and self.validation_files:
            raise nothing_learned("--validation-data", self.validation_files, self.lengths[packing], packing)
        if dataset is None:
            self.notes.append("no validation: of the held-out documents no token would be learned")
        return dataset

    def _tokenizer_with_template(self, counts: ReadCounts) -> PreTrainedTokenizerBase:
        """The tokenizer to export: with the chat template that the model has learned to chat in."""
        if not counts.chat or self.text.tokenizer.chat_template:
            return self.text.tokenizer
        self.notes.append("the tokenizer has no chat template; the built-in one was used and is exported with it")
        tokenizer = copy.deepcopy(self.text.tokenizer)
        tokenizer.chat_template = BUILTIN_CHAT_TEMPLATE
        return tokenizer

    def _prepared(
        self,
        train: PackedDataset | StreamedDataset,
        known: PackedDataset,
        validation: PackedDataset | None,
        content: str,
        packing: Packed,
        size: SetSize,
        read: ReadCounts,
        validation_read: ReadCounts | None,
        *,
        seconds: float = 0.0,
        reused: bool = False,
    ) -> PreparedData:
        """The datasets with tokenizer, report and fingerprint.

        Args:
            known: the training documents, or what is known of them.
            content: a hash of the training documents.
        """
        settings, tokenizer = self.settings, self._tokenizer_with_template(read)
        length, histogram, balance = self.lengths[packing], None, None
        if packing == "balanced":
            histogram = Histogram.of(known.lengths)
            if self.leader and self.dealing is not None and known.longest <= self.dealing.cap * self.dealing.ranks:
                balance = Balance.of(known.step_lengths, self.dealing, length)
        report = DataReport(
            tokenizer=f"{self.text.origin}, {len(self.text.tokenizer):,} tokens",
            packing=packing,
            sequence_length=length,
            seconds=seconds,
            reused=reused,
            train=size,
            validation=None if validation is None else _size(validation),
            read=read,
            validation_read=validation_read,
            notes=tuple(self.notes),
            streamed=settings.streaming,
            why=self.why,
            histogram=histogram,
            balance=balance,
        )
        window = settings.stream_window if settings.streaming else None
        rows = content_hash(length, self.seed, packing, window)
        fingerprint = f"documents:{content[:16]} tokenizer:{self.text.hash[:16]} rows:{rows[:16]}"
        return PreparedData(train, validation, tokenizer, report, fingerprint)


def _size(dataset: PackedDataset, documents: int | None = None) -> SetSize:
    """The dataset's size; ``documents`` is the number that there were to choose from."""
    kept = dataset.num_documents
    return SetSize(
        documents=kept,
        tokens=dataset.num_tokens,
        rows=len(dataset),
        learned=dataset.num_learned,
        truncated=dataset.num_truncated,
        cut=dataset.num_cut,
        left_out=(documents or kept) - kept,
    )
