"""Entry point of the data pipeline: data sets from settings, equal in every process, with a report of what was read."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tawpipe.data.chats.chat import today
from tawpipe.data.chats.render import Document, Renderer
from tawpipe.data.corpus import Corpus, held_out, in_shares, render_counted, split_documents
from tawpipe.data.mixture import Mixture, sample_shares
from tawpipe.data.prepared import PreparedData
from tawpipe.data.reading.cache import cache_root, content_hash, leader_first
from tawpipe.data.reading.hub import opened
from tawpipe.data.reading.sources import STDLIB, SourceFile, SourceSet, find_sets
from tawpipe.data.report import ENOUGH_DOCUMENTS, ENOUGH_TOKENS, DataReport, PartReport, ReadCounts, SetSize, too_small
from tawpipe.data.rows import WHOLE, PackedDataset, nothing_learned
from tawpipe.data.settings import DataSettings, Packed
from tawpipe.data.stream import StreamedDataset
from tawpipe.data.tokenised import TokenisedText, no_documents
from tawpipe.data.tokenizer import vocabulary_size
from tawpipe.dealing.lengths import DEVICES, MOST_STREAMED, Balance, Dealing, LengthLimits, padding_share
from tawpipe.errors import UserError
from tawpipe.report.lengths import Histogram

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


CHARACTERS_PER_TOKEN = 4
"""Typical number of characters per token."""
MOST_IN_STREAM = "longest in the stream"
LOOKED_AT = 64
"""Number of documents of a set among which a partly learned one is searched, to be shown."""
MOST_WINDOWS = 16
"""Number of windows of a stream that are searched for held-out documents."""

WORTH = 1.05
"""Modelled speedup above which ``auto`` chooses ``balanced`` for a pretrained model."""


def prepare_data(
    settings: DataSettings,
    *,
    sequence_length: int | LengthLimits,
    seed: int,
    max_document: int | None = None,
    dealing: Dealing | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    model: str | None = None,
    date: str = "",
    leader: bool = True,
    barrier: Callable[[], None] = lambda: None,
) -> PreparedData:
    """Load or make the tokenizer and the tokens, and build the data sets; call in every process.

    All arguments except ``leader`` must be equal in all processes.

    Args:
        settings: data settings.
        sequence_length: tokens of a row; or limits within which the length follows from the documents.
        seed: seed of the order of samples and of the choice of held-out documents.
        max_document: most tokens of a document under ``balanced``; ``sequence_length`` by default.
        dealing: steps of the run, by which ``auto`` chooses a packing and the report predicts the balance.
        tokenizer: tokenizer to use instead of the one in the settings.
        model: local folder whose tokenizer is used if the settings name none; a folder without a tokenizer counts as
            None.
        date: date that chat templates print, as 2026-11-28; today by default. It must be equal in all processes of a
            run.
        leader: True in the process that makes what the cache lacks; one process per cache folder.
        barrier: waits for the other processes; each process calls it once. It must allow for the time of tokenising.

    Returns:
        Data sets, tokenizer, report and fingerprints.

    Raises:
        UserError: in every process, if the settings cannot work or the files hold no document.
    """
    settings.check_data()
    if isinstance(sequence_length, int) and sequence_length < 2:
        raise UserError("--sequence-length", sequence_length, "at least 2: the first token of a row is never predicted")
    if seed < 0:
        raise UserError("--seed", seed, "a number >= 0")
    sets = find_sets(settings.data)
    held_out_sets = find_sets(settings.validation_data, "--validation-data")
    if weighted := [source.name for source in held_out_sets if source.weight is not None]:
        raise UserError("--validation-data", weighted[0], "no weights: all data is read")
    validation = held_out_sets[0] if held_out_sets else SourceSet("", None, ())
    root = cache_root(settings.cache_dir)
    preparation = _Preparation(
        settings, sets, validation, root, seed, tokenizer, model, date or today(), leader, dealing=dealing
    )
    if isinstance(sequence_length, LengthLimits):
        preparation.limits = sequence_length
        asked = [sequence_length.most, sequence_length.text]
    else:
        preparation.use(sequence_length, max_document)
        asked = [sequence_length, max_document or sequence_length]
    files = [file for source in sets for file in source.files]
    stats = [[file.path, file.size, file.mtime_ns] for file in (*files, *validation.files)]
    request = content_hash(asdict(settings), stats, model, *asked, seed)
    return leader_first(preparation.run, leader=leader, barrier=barrier, note=root / f"failed-{request}.json")


@dataclass
class _Preparation:
    """One call of ``prepare_data``.

    Only ``leader_first`` knows which process fills the cache. The other processes find the results there. A process
    whose cache is another folder than the leader's makes equal results of its own.
    """

    settings: DataSettings
    sets: Sequence[SourceSet]
    validation: SourceSet
    """Files of ``validation_data``; empty without that setting."""
    root: Path
    seed: int
    tokenizer: PreTrainedTokenizerBase | None
    model: str | None
    date: str
    leader: bool
    dealing: Dealing | None = None
    limits: LengthLimits | None = None
    """Limits of a length that follows from the documents; None if the length is given."""
    lengths: dict[Packed, int] = field(default_factory=dict)
    """Tokens of a row for every packing; under ``balanced`` the most tokens of a document."""
    max_document: int | None = None
    """Value of the setting; None if it is not set."""
    why_length: str = ""
    """Reason for a length that follows from the documents."""
    why: str = ""
    """Reason for the packing that ``auto`` chose."""
    notes: list[str] = field(default_factory=list)

    def use(self, length: int, max_document: int | None = None) -> None:
        """Set the tokens of a row to ``length``, and of a document to at most ``max_document`` or ``length``.

        With ``limits``, also sets ``dealing`` to the steps of the run for this length."""
        self.max_document = max_document
        self.lengths = {"split": length, "fit": length, "balanced": max_document or length, "none": length}
        if self.limits is not None and self.limits.dealing is not None:
            self.dealing = self.limits.dealing(length)

    def run(self) -> PreparedData:
        """Open the files, load or train the tokenizer, and return the prepared data, streamed or cached."""
        begin = time.perf_counter()
        streaming = self.settings.streaming
        self.sets = [
            replace(source, files=opened(source.files, streaming=streaming, setting="--data")) for source in self.sets
        ]
        held_out = opened(self.validation.files, streaming=streaming, setting="--validation-data")
        self.validation = replace(self.validation, files=held_out)
        files = [file for source in self.sets for file in source.files]
        self.text = TokenisedText(
            self.settings, files, self.root, tokenizer=self.tokenizer, model=self.model, date=self.date
        )
        if self.text.tokenizer.eos_token_id is None:
            self.notes.append("the tokenizer has no end-of-text token: documents end without one")
        return self._streamed() if streaming else self._cached(begin)

    @property
    def _weights(self) -> list[float]:
        """Weight of every training set; 1 if none is given."""
        return [source.weight or 1.0 for source in self.sets]

    def _cached(self, begin: float) -> PreparedData:
        """Tokenise all files (or find them in the cache), choose length and packing, and build the data sets."""
        tokenised = [self.text.corpus(source.files, "--data") for source in self.sets]
        corpora, reused = [corpus for corpus, _ in tokenised], all(was_cached for _, was_cached in tokenised)
        fraction = 0.0 if self.validation.files else self.settings.validation_fraction
        split = split_documents([corpus.identities for corpus in corpora], fraction, self.seed)
        if fraction > 0 and not any(len(out) for _, out in split):
            self.notes.append("no validation data: too few distinct documents to hold one out")
        read = ReadCounts.merged([corpus.counts for corpus in corpora])
        beside = self._validation_corpora()
        if self.limits is not None:
            self._follow([*corpora, *beside], self.limits)
        first = corpora[0], split[0][0]
        packing = self._packing(read, lambda: self._packed(*first, "balanced"))
        whole, limit, bound = [*corpora, *beside], self.lengths[packing], self._bound(packing)
        corpora = [
            self._cut(corpus, source.files, "--data", packing)
            for corpus, source in zip(corpora, self.sets, strict=True)
        ]
        beside = [self._cut(corpus, self.validation.files, "--validation-data", packing) for corpus in beside]
        if self.limits is not None and any(corpus not in whole for corpus in (*corpora, *beside)):
            longer = sum(int((corpus.lengths[self._is_chat(corpus)] > limit).sum()) for corpus in whole)
            many = "1 chat was" if longer == 1 else f"{longer:,} chats were"
            cut = f"{many} longer than {limit:,} tokens ({bound})"
            self._follow([*corpora, *beside], self.limits, cut)  # the remaining documents may be shorter
        read = ReadCounts.merged([corpus.counts for corpus in corpora])
        split = split_documents([corpus.identities for corpus in corpora], fraction, self.seed)
        train = [self._packed(corpus, kept, packing) for corpus, (kept, _) in zip(corpora, split, strict=True)]
        for dataset, source in zip(train, self.sets, strict=True):
            if dataset is None:
                raise nothing_learned("--data", source.files, self.lengths[packing], packing)
        known = [dataset for dataset in train if dataset is not None]
        validation, validation_read = self._validation_files(beside, packing)
        if not beside:
            validation = self._held_out([(c, out) for c, (_, out) in zip(corpora, split, strict=True)], packing)
        sizes = [_size(dataset, len(kept)) for dataset, (kept, _) in zip(known, split, strict=True)]
        content = content_hash(*(dataset.contents.tobytes().hex() for dataset in known))
        seconds = time.perf_counter() - begin
        return self._prepared(
            known,
            known,
            sizes,
            validation,
            content,
            packing,
            read,
            validation_read,
            by_set=[corpus.counts for corpus in corpora],
            seconds=seconds,
            reused=reused,
        )

    def _streamed(self) -> PreparedData:
        """Read the first documents, choose length and packing, and build streamed data sets."""
        fraction = 0.0 if self.validation.files else self.settings.validation_fraction
        limits = self.limits
        if self.settings.packing == "split":
            pass  # chats are cut at any token
        elif limits is not None:  # a first limit; chats follow the final length later
            most = limits.most if limits.looks else min(limits.most, MOST_STREAMED)
            self.text.renderer = self.text.rendering(most, limits.why if most == limits.most else MOST_IN_STREAM)
        else:
            packing = "balanced" if self.settings.packing == "auto" else self.settings.packing
            self.text.renderer = self._rendering(packing)
        looks = [self._first_look(source, fraction) for source in self.sets]
        read = ReadCounts.merged([counts for counts, _ in looks])
        if self.limits is not None:
            self._follow_stream(read, fraction, self.limits)
        first = self.sets[0].files
        packing = self._packing(read, lambda: self._stream(first, "balanced", fraction).first_window())
        self.text.renderer = self._rendering(packing)
        beside = self._validation_corpora()
        beside = [self._cut(corpus, self.validation.files, "--validation-data", packing) for corpus in beside]
        validation, validation_read = self._validation_files(beside, packing)
        if fraction > 0:
            corpora = [Corpus.from_tokens(self.text.encoder.encode_all(out), counts) for counts, out in looks]
            validation = self._held_out([(corpus, np.arange(len(corpus.identities))) for corpus in corpora], packing)
            first_ones = f"the first {read.documents:,} documents"
            if not any(out for _, out in looks):
                self.notes.append(f"streaming: no validation data; none of {first_ones} is held out")
            elif validation is not None:
                self.notes.append(f"streaming: validation data is held out of {first_ones}")
        train = [self._stream(source.files, packing, fraction, tell=self.leader) for source in self.sets]
        windows = [stream.first_window() for stream in train]
        seen = ReadCounts.merged([stream.counts for stream in train])
        read.longest, read.longest_where = seen.longest, seen.longest_where
        parts = [[[Path(file.path).name, file.size] for source in self.sets for file in source.files]]
        if read.masked:  # tokens of chats also depend on template and settings
            parts += [[window.contents.tobytes().hex()] for window in windows]
        content = content_hash(*parts)
        sizes = [
            _size(window, window.num_documents + stream.left_out) for window, stream in zip(windows, train, strict=True)
        ]
        by_set = [counts for counts, _ in looks]
        return self._prepared(train, windows, sizes, validation, content, packing, read, validation_read, by_set=by_set)

    def _rendering(self, packing: Packed) -> Renderer:
        """Return a renderer of chats that fit into a row; under ``split`` of any length."""
        limit = None if packing == "split" else self.lengths[packing]
        return self.text.rendering(limit, self._bound(packing))

    def _bound(self, packing: Packed) -> str:
        """Return the name of the setting or limit that determines the length of a document."""
        if self.limits is not None:
            return self.limits.bound(self.lengths[packing])
        return "--max-document" if self.lengths[packing] == self.max_document else "--sequence-length"

    def _cut(self, corpus: Corpus, files: Sequence[SourceFile], setting: str, packing: Packed) -> Corpus:
        """Return ``corpus``, or its files tokenised again with long chats cut if a chat or instruction exceeds a row.

        Under ``split`` or ``long_chats=anywhere`` the corpus is returned unchanged."""
        limit = self.lengths[packing]
        is_whole = packing == "split" or self.settings.long_chats == "anywhere"
        if is_whole or corpus.lengths[self._is_chat(corpus)].max(initial=0) <= limit:
            return corpus
        return self.text.corpus(files, setting, limit, self._bound(packing))[0]

    def _is_chat(self, corpus: Corpus) -> NDArray[np.bool_]:
        """Return a mask ``(documents,)`` of chats and instructions.

        A document is one of them if some token after the beginning of the text is not learned.
        """
        return corpus.counted(corpus.offsets[:-1], corpus.offsets[1:]) < corpus.lengths - len(self.text.encoder.begin)

    def _follow(self, corpora: Sequence[Corpus], limits: LengthLimits, cut: str = "") -> None:
        """Set the length of rows to the longest document of ``corpora``, within the limits; also sets ``why_length``.

        Args:
            corpora: training and validation documents.
            limits: limits of the length, which may also make it longer than all documents.
            cut: text about chats that were cut before, for the reason that is reported.
        """
        longest = 0
        for corpus in corpora:
            is_chat = self._is_chat(corpus)
            for masked, lengths in ((True, corpus.lengths[is_chat]), (False, corpus.lengths[~is_chat])):
                longest = max(longest, min(int(lengths.max(initial=0)), limits.within(masked=masked)))
        self.use(length := limits.at_least_usual(longest))
        self.why_length = limits.words(length, np.concatenate([corpus.lengths for corpus in corpora]), cut)

    def _follow_stream(self, read: ReadCounts, fraction: float, limits: LengthLimits) -> None:
        """Set the length of rows for a stream to its limit, or for a dry run to the longest of the first documents.

        Args:
            read: counts of the first documents.
            fraction: fraction of documents that is held out.
            limits: limits of the length.
        """
        within = limits.within(masked=bool(read.masked))
        if limits.looks:
            self.use(within)
            windows = [self._stream(source.files, "balanced", fraction).first_window() for source in self.sets]
            longest = max(window.longest for window in windows)
            self.use(length := limits.at_least_usual(longest))
            first, less = "the longest of the first documents", "the first documents are shorter"
            self.why_length = first if length == longest else f"{limits.least(length)}; {less}"
        else:
            self.use(length := min(within, MOST_STREAMED))
            self.why_length = MOST_IN_STREAM if length == MOST_STREAMED else limits.bound(length)

    def _first_look(self, source: SourceSet, fraction: float) -> tuple[ReadCounts, list[Document]]:
        """Read the first window of a stream, and more windows until enough documents are held out.

        With a ``fraction`` of 0 one window is read. At most ``MOST_WINDOWS`` windows are read. Only held-out documents
        are kept; training reads the others again.

        Args:
            source: data set of the stream.
            fraction: fraction of documents that is held out.

        Returns:
            Counts of the documents read, and the held-out documents among them.

        Raises:
            UserError: the stream holds no document.
        """
        counts, out, characters = ReadCounts(files=len(source.files)), list[Document](), 0
        rows = (row for file in source.files for row in self.text.reader.read(file))
        for document in render_counted(rows, self.text.renderer, counts):
            if fraction and held_out(np.array([document.identity], np.uint64), fraction, self.seed)[0]:
                out.append(document)
                characters += sum(len(piece.text) for piece in document.pieces if piece.counts)
            enough = len(out) >= ENOUGH_DOCUMENTS and characters >= ENOUGH_TOKENS * CHARACTERS_PER_TOKEN
            windows = counts.documents / self.settings.stream_window
            if windows >= MOST_WINDOWS or (windows >= 1 and (enough or not fraction)):
                break
        if not counts.documents:
            raise no_documents("--data", source.files, counts)
        return counts, out

    def _stream(
        self, files: Sequence[SourceFile], packing: Packed, held_out_fraction: float, *, tell: bool = False
    ) -> StreamedDataset:
        """Build the streamed data set of ``files``."""
        return StreamedDataset(
            files,
            self.text,
            sequence_length=self.lengths[packing],
            seed=self.seed,
            packing=packing,
            window=self.settings.stream_window,
            held_out_fraction=held_out_fraction,
            tell=tell,
        )

    def _packing(self, counts: ReadCounts, balanced: Callable[[], PackedDataset | None]) -> Packed:
        """Return the packing, and set ``why`` if ``auto`` chooses it.

        The choice does not depend on the number of processes.

        Args:
            counts: counts of the training documents.
            balanced: returns the data set that ``balanced`` would give, or None.
        """
        dealing = self.dealing
        if self.settings.packing != "auto":
            return self.settings.packing
        rows: Packed = "fit" if counts.masked else "split"
        chosen = rows
        if dealing is not None and dealing.against:
            self.why = dealing.against
        elif dealing is not None and dealing.asked:
            chosen, self.why = "balanced", f"of {dealing.asked}"
        elif counts.masked:
            chosen, self.why = "balanced", "chats and instructions are kept whole and have uneven lengths"
        elif dealing is not None and not dealing.pretrained:
            self.why = "the model has random weights, for which rows of one length are usual"
        elif dealing is not None and (dataset := balanced()) is not None:
            longest = self.lengths["balanced"]
            work = dealing.work(vocabulary_size(self.text.tokenizer))
            gain = Balance.of(dataset.step_lengths, dealing.on_devices(DEVICES, longest), longest, work).gain
            chosen = "balanced" if gain > WORTH else rows
            self.why = (
                f"steps are {gain - 1:.0%} faster with balanced than with documents packed by tokens "
                f"(predicted for {DEVICES} devices)"
            )
        return chosen

    def _packed(self, corpus: Corpus, documents: np.ndarray, packing: Packed) -> PackedDataset | None:
        """Return a data set of the documents with a token to learn; None if there is none."""
        dataset = PackedDataset.of_learnable(
            corpus, documents, self.lengths[packing], seed=self.seed, packing=packing, pad_id=self.text.pad_id
        )
        return dataset if dataset is not None and dataset.num_learned else None

    def _validation_corpora(self) -> list[Corpus]:
        """Tokenise ``validation_data``; return a list of one corpus, or an empty list without that setting."""
        files = self.validation.files
        return [self.text.corpus(files, "--validation-data")[0]] if files else []

    def _validation_files(
        self, corpora: Sequence[Corpus], packing: Packed
    ) -> tuple[PackedDataset | None, ReadCounts | None]:
        """Pack the corpus of ``validation_data``; return data set and counts, or (None, None) if there is none.

        Files that were left out are added to the counts.

        Raises:
            UserError: no token of the documents would be learned.
        """
        if not corpora:
            return None, None
        (corpus,) = corpora
        for skipped in self.validation.left_out:
            corpus.counts.add_skipped(skipped)
        dataset = self._packed(corpus, np.arange(len(corpus.identities)), packing)
        if dataset is None:
            raise nothing_learned("--validation-data", self.validation.files, self.lengths[packing], packing)
        return dataset, corpus.counts

    def _held_out(self, parts: Sequence[tuple[Corpus, np.ndarray]], packing: Packed) -> PackedDataset | None:
        """Pack the held-out documents, for a mixture in its shares; None, with a note, if no token would be learned."""
        weights = [weight for weight, (_, out) in zip(self._weights, parts, strict=True) if len(out)]
        parts = [(corpus, out) for corpus, out in parts if len(out)]
        if not parts:
            return None
        corpus, documents = parts[0]
        if len(parts) > 1:
            documents = in_shares([corpus.lengths[out] for corpus, out in parts], weights)
            corpus = Corpus.joined(parts)
        dataset = self._packed(corpus, documents, packing)
        if dataset is None:
            self.notes.append("no validation data: the held-out documents have no token to learn")
        return dataset

    def _tokenizer_with_template(self, counts: ReadCounts) -> PreTrainedTokenizerBase:
        """Return the tokenizer to export: with the chat template that was used if ``counts`` has chats, else unchanged.

        Adds a note to ``notes`` if this is not the tokenizer's own template."""
        if not counts.chat:
            return self.text.tokenizer
        note = ""
        if name := self.text.fallback:
            note = f"the tokenizer has no chat template: {name} is used and exported with it (--chat-template)"
        elif self.text.chats is not self.text.tokenizer:
            begin = self.text.tokenizer.decode(self.text.encoder.begin)
            note = f"chat template without {begin}: added to every chat and to the exported template, because this "
            note += "tokenizer begins every text with it"
        self.notes += [note] if note else []
        return self.text.chats

    def _prepared(
        self,
        train: Sequence[PackedDataset] | Sequence[StreamedDataset],
        known: Sequence[PackedDataset],
        sizes: Sequence[SetSize],
        validation: PackedDataset | None,
        content: str,
        packing: Packed,
        read: ReadCounts,
        validation_read: ReadCounts | None,
        *,
        by_set: Sequence[ReadCounts],
        seconds: float = 0.0,
        reused: bool = False,
    ) -> PreparedData:
        """Return the data sets with tokenizer, report and fingerprints.

        Args:
            train: training set, or sets of a mixture.
            known: training documents of every set; when streaming, of the first window.
            sizes: size of every training set.
            validation: validation set, or None.
            content: hash of the training documents.
            packing: packing of the rows.
            read: counts of all training sets together.
            validation_read: counts of ``validation_data``, or None.
            by_set: counts of every training set.
            seconds: time that tokenising took.
            reused: True if the tokens were in the cache.
        """
        settings, tokenizer = self.settings, self._tokenizer_with_template(read)
        length, histogram, padding, balance = self.lengths[packing], None, None, None
        mixed, parts, rows = train[0], (), [length, self.seed, packing]
        together: PackedDataset | Mixture = known[0]
        if len(train) > 1:
            shares = sample_shares(self._weights, [dataset.lengths.sum() / len(dataset) for dataset in known])
            mixed, together = (Mixture(sets, shares, seed=self.seed) for sets in (train, known))
            parts = self._parts(sizes, shares)
            rows.append(shares.tolist())
        lengths = np.concatenate([dataset.lengths for dataset in known])
        if packing in WHOLE:
            histogram = Histogram.of(lengths)
        if packing == "none" and self.dealing is not None:
            padding = padding_share(together.length, self.dealing)
        fits = self.dealing is not None and together.longest <= self.dealing.cap * self.dealing.ranks
        if packing == "balanced" and self.leader and self.dealing is not None and fits:
            work = self.dealing.work(vocabulary_size(self.text.tokenizer))
            balance = Balance.of(together.step_lengths, self.dealing, length, work)
        held_out_size = None if validation is None else _size(validation)
        if held_out_size is not None and settings.data != [STDLIB]:  # stdlib data is only a trial
            fixed = bool(self.validation.files) or settings.streaming
            if note := too_small(held_out_size, None if fixed else settings.validation_fraction):
                self.notes.append(note)
        for skipped in (skipped for source in self.sets for skipped in source.left_out):
            read.add_skipped(skipped)
        report = DataReport(
            tokenizer=f"{self.text.origin}, {len(self.text.tokenizer):,} tokens",
            packing=packing,
            sequence_length=length,
            seconds=seconds,
            reused=reused,
            train=sizes[0] if len(sizes) == 1 else SetSize.sum(sizes, _usual(lengths)),
            validation=held_out_size,
            read=read,
            validation_read=validation_read,
            warnings=tuple(filter(None, (counts.mostly_left_out for counts in (*by_set, validation_read) if counts))),
            notes=tuple(self.notes),
            streamed=settings.streaming,
            why=self.why,
            why_length=self.why_length,
            histogram=histogram,
            padding=padding,
            balance=balance,
            parts=parts,
            example=self._example(known) if read.masked else (),
        )
        window = settings.stream_window if settings.streaming else None
        held_out = ""
        if validation is not None:
            held_out = self._fingerprint(content_hash(validation.contents.tobytes().hex()), rows[:3])
        fingerprint = self._fingerprint(content, [*rows, window])
        return PreparedData(mixed, validation, tokenizer, report, fingerprint, held_out, self.date, self._ends(known))

    def _ends(self, sets: Sequence[PackedDataset]) -> tuple[int, ...]:
        """Return the special tokens that end a learned part in the first documents of every set, sorted."""
        added = self.text.tokenizer.added_tokens_decoder.items()
        special, ends = {number for number, token in added if token.special}, set[int]()
        for dataset in sets:
            for number in range(min(LOOKED_AT, dataset.num_documents)):
                tokens, learned = dataset.document(number)
                last = np.flatnonzero(learned & ~np.append(learned[1:], False))
                ends.update(special & set(tokens[last].tolist()))
        return tuple(sorted(ends))

    def _example(self, sets: Sequence[PackedDataset]) -> tuple[tuple[str, bool], ...]:
        """Return one of the first documents as pieces of text, each with True if it is learned; preferably a chat."""
        begin = max(1, len(self.text.encoder.begin))
        firsts = [dataset.document(n) for dataset in sets for n in range(min(LOOKED_AT, dataset.num_documents))]
        tokens, learned = next((first for first in firsts if not first[1][begin:].all()), firsts[0])
        edges = [0, *(np.flatnonzero(learned[1:] != learned[:-1]) + 1).tolist(), len(tokens)]
        decode = self.text.tokenizer.decode
        return tuple((str(decode(tokens[a:b].tolist())), bool(learned[a])) for a, b in pairwise(edges))

    def _fingerprint(self, content: str, rows: Sequence[object]) -> str:
        """Return the hashes of the documents (``content``), the tokenizer, and the making of rows."""
        return f"documents:{content[:16]} tokenizer:{self.text.hash[:16]} rows:{content_hash(*rows)[:16]}"

    def _parts(self, sizes: Sequence[SetSize], shares: np.ndarray) -> tuple[PartReport, ...]:
        """Return the reports of the sets of a mixture."""
        rows, total = sum(size.rows for size in sizes), sum(self._weights)
        return tuple(
            PartReport(
                source.name, weight / total, None if self.settings.streaming else float(share) * rows / size.rows, size
            )
            for source, weight, share, size in zip(self.sets, self._weights, shares, sizes, strict=True)
        )


def _size(dataset: PackedDataset, documents: int | None = None) -> SetSize:
    """Return the size of a data set; ``documents`` is the number of documents before some were left out."""
    kept, shown = len(np.unique(dataset.documents)), dataset.lengths
    return SetSize(
        documents=kept,
        tokens=dataset.num_tokens,
        rows=len(dataset),
        learned=dataset.num_learned,
        truncated=dataset.num_truncated,
        cut=dataset.num_cut,
        left_out=(documents or kept) - kept,
        padding=dataset.num_padding,
        torn=dataset.num_torn,
        usual=_usual(shown),
    )


def _usual(lengths: np.ndarray) -> tuple[int, int, int]:
    """Return the median, the 90 % quantile and the maximum of ``lengths``."""
    half, most, longest = np.quantile(lengths, (0.5, 0.9, 1.0), method="higher").tolist()
    return half, most, longest
