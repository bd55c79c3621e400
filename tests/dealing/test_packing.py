"""Packing: rows are a pure function of the documents' lengths, and lose or repeat nothing."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tawpipe.data.corpus import Corpus
from tawpipe.data.report import ReadCounts
from tawpipe.data.rows import PackedDataset
from tawpipe.dealing.lengths import in_like_lengths
from tawpipe.dealing.packing import FitPlan, FitShape, SplitPlan, best_fit
from tawpipe.model.batch import MicroBatch

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)
ROW = st.integers(2, 40)
PAD = 0


def corpus_of(lengths: list[int], masked: bool = False) -> Corpus:
    """Documents whose tokens are all different, from 1 on; masked: every third token does not count."""
    total = sum(lengths)
    return Corpus(
        tokens=np.arange(1, total + 1, dtype=np.uint32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        identities=np.arange(len(lengths), dtype=np.uint64),
        contents=np.arange(len(lengths), dtype=np.uint64),
        mask=np.packbits(np.arange(total) % 3 != 0) if masked else None,
        counts=ReadCounts(),
    )


def dataset_of(lengths, sequence_length, packing, *, seed=0, masked=False) -> PackedDataset:
    return PackedDataset(
        corpus_of(lengths, masked),
        np.arange(len(lengths)),
        sequence_length=sequence_length,
        seed=seed,
        packing=packing,
        pad_id=PAD,
    )


def same(a, b) -> bool:
    fields = ("input_ids", "labels", "position_ids")
    return a.lengths == b.lengths and all(np.array_equal(getattr(a, f), getattr(b, f)) for f in fields)


@given(LENGTHS, ROW, st.integers(0, 5), st.integers(0, 3))
def test_split_packing_yields_every_token_once_and_pads_under_a_row(lengths, row_length, seed, epoch):
    data = dataset_of(lengths, row_length, "split", seed=seed)
    rows = [data.sample(epoch * len(data) + n) for n in range(len(data))]
    tokens = np.concatenate([row.input_ids[0] for row in rows])
    assert sorted(tokens[tokens != PAD]) == list(range(1, sum(lengths) + 1))
    assert (tokens == PAD).sum() < row_length


@given(LENGTHS, ROW, st.integers(0, 5), st.integers(0, 3))
def test_fit_packing_yields_every_document_once_cut_at_the_row_length(lengths, row_length, seed, epoch):
    shape = FitShape(np.array(lengths), row_length)
    plan = FitPlan(shape, seed=seed, epoch=epoch)
    segments = [segment for row in range(plan.rows) for segment in plan.segments(row)]
    assert sorted(segment.document for segment in segments) == list(range(len(lengths)))
    assert all(
        segment.start == 0 and segment.length == min(lengths[segment.document], row_length) for segment in segments
    )
    assert all(0 < sum(segment.length for segment in plan.segments(row)) <= row_length for row in range(plan.rows))


@given(LENGTHS, ROW, st.sampled_from(["split", "fit"]), st.booleans())
def test_every_packed_segment_is_a_separate_document(lengths, row_length, packing, masked):
    data = dataset_of(lengths, row_length, packing, masked=masked)
    for number in range(len(data)):
        row = data.sample(number)
        assert sum(row.lengths) == row_length
        assert row.input_ids.shape == row.labels.shape == (1, row_length)
        begin = 0
        for length in row.lengths:
            piece = slice(begin, begin + length)
            assert row.position_ids[0, piece].tolist() == list(range(length))
            tokens, labels = row.input_ids[0, piece].numpy(), row.labels[0, piece].tolist()
            assert labels[-1] == -100
            assert length <= min(max(lengths), row_length)  # padding too: it needs no position that documents do not
            if tokens[0] == PAD:
                assert set(labels) == {-100} and (row.input_ids[0, begin:] == PAD).all()
            else:
                assert (np.diff(tokens) == 1).all()
                counts = (tokens - 1) % 3 != 0 if masked else np.full(length, True)
                assert labels[:-1] == np.where(counts, tokens, -100)[1:].tolist()
            begin += length


@given(LENGTHS, ROW, st.sampled_from(["split", "fit"]), st.randoms(use_true_random=False))
def test_packed_sample_is_independent_of_earlier_samples(lengths, row_length, packing, random):
    data = dataset_of(lengths, row_length, packing, seed=3)
    numbers = list(range(3 * len(data)))
    random.shuffle(numbers)
    for number in numbers:
        assert same(data.sample(number), dataset_of(lengths, row_length, packing, seed=3).sample(number))


@pytest.mark.parametrize("packing", ["split", "fit"])
def test_row_order_differs_between_epochs_and_between_seeds(packing):
    lengths = list(range(1, 60))

    def order(seed: int, epoch: int) -> list[int]:
        data = dataset_of(lengths, 64, packing, seed=seed)
        return [int(data.sample(epoch * len(data) + n).input_ids[0, 0]) for n in range(len(data))]

    assert len({tuple(order(*which)) for which in [(0, 0), (0, 1), (1, 0), (1, 1)]}) == 4


@given(st.lists(st.integers(1, 30), max_size=60), st.integers(30, 50))
def test_best_fit_takes_the_fullest_row_with_enough_space(lengths, row_length):
    rows, count = best_fit(np.array(lengths, np.int64), row_length)
    free: list[int] = []
    for length, row in zip(lengths, rows, strict=True):
        fitting = [space for space in free if space >= length]
        if fitting:
            assert free[row] == min(fitting)
            free[row] -= length
        else:
            assert row == len(free)
            free.append(row_length - length)
    assert count == len(free)


@pytest.mark.parametrize("packing", ["split", "fit"])
def test_a_corpus_smaller_than_a_row_is_one_padded_row_per_epoch(packing):
    data = dataset_of([3, 2], 16, packing)
    assert len(data) == 1
    for number in range(4):
        row = data.sample(number)
        assert sorted(row.lengths[:2]) == [2, 3] and row.lengths[2:] == (3, 3, 3, 2)


@given(LENGTHS, ROW, st.sampled_from(["split", "fit"]), st.booleans(), st.integers(0, 3))
def test_num_learned_equals_the_labels_of_all_rows(lengths, row_length, packing, masked, seed):
    data = dataset_of(lengths, row_length, packing, seed=seed, masked=masked)
    assert data.num_learned == sum(int((data.sample(n).labels != -100).sum()) for n in range(len(data)))


def test_learned_tokens_are_counted_across_chunks_of_the_mask(monkeypatch):
    monkeypatch.setattr("tawpipe.data.corpus.CHUNK_TOKENS", 16)
    corpus = corpus_of([100, 29], masked=True)
    begins, ends = np.triu_indices(130)
    assert corpus.counted(begins, ends).tolist() == [
        sum(n % 3 != 0 for n in range(a, b)) for a, b in zip(begins, ends, strict=True)
    ]


def test_fit_packing_counts_truncated_documents():
    data = dataset_of([5, 8, 9, 100], 8, "fit")
    assert data.num_truncated == 2 and len(data) == 4


def test_split_packing_covers_a_very_long_document_among_short_documents():
    lengths = np.array([10_000_000] + [7] * 1000)
    plan = SplitPlan(lengths, 4096, seed=0, epoch=0)
    assert plan.rows == -(-int(lengths.sum()) // 4096)
    seen = Counter()
    for row in range(plan.rows):
        for segment in plan.segments(row):
            seen[segment.document] += segment.length
    assert seen == Counter({n: int(length) for n, length in enumerate(lengths)})


def test_pieces_of_a_long_document_are_spread_over_the_epoch():
    plan = SplitPlan(np.array([100 * 64, *[64] * 100]), 64, seed=0, epoch=0)
    first_half = sum(segment.document == 0 for row in range(100) for segment in plan.segments(row))
    assert 30 < first_half < 80


@settings(max_examples=30)
@given(LENGTHS, ROW, st.sampled_from(["split", "fit"]))
def test_micro_batch_of_several_rows_keeps_every_row_unchanged(lengths, row_length, packing):
    data = dataset_of(lengths, row_length, packing, masked=True)
    rows = [data.sample(number) for number in range(3)]
    batch = MicroBatch.cat(rows)
    assert batch.tokens == sum(row.tokens for row in rows)
    for number, row in enumerate(rows):
        assert same(batch.part(range(number, number + 1)), row)
    assert same(batch.part(range(1, 3)), MicroBatch.cat(rows[1:]))


@given(LENGTHS, st.integers(1, 5))
def test_micro_batch_groups_rows_of_similar_length_and_loses_none(lengths, micro_batch):
    order = in_like_lengths(lengths, micro_batch)
    assert sorted(order) == list(range(len(lengths)))
    groups = [order[at : at + micro_batch] for at in range(0, len(order), micro_batch)]
    assert sorted(groups[: len(lengths) // micro_batch]) == groups[: len(lengths) // micro_batch]
    ranges = sorted((max(lengths[row] for row in one), min(lengths[row] for row in one)) for one in groups)
    assert all(most <= least for (most, _), (_, least) in itertools.pairwise(ranges))


@given(LENGTHS, st.integers(2, 40), st.integers(0, 5))
def test_unpacked_documents_have_rows_of_their_own_length(lengths, longest, seed):
    pieces = [min(longest, length - at) for length in lengths for at in range(0, length, longest)]
    assume(max(pieces) > 1)
    data = dataset_of(lengths, longest, "none", seed=seed)
    for epoch in range(2):
        rows = [data.sample(epoch * len(data) + number) for number in range(len(data))]
        assert sorted(row.lengths[0] for row in rows) == sorted(length for length in pieces if length > 1)
        assert all(row.lengths == (row.input_ids.numel(),) for row in rows)
        assert [data.length(epoch * len(data) + number) for number in range(len(data))] == [r.lengths[0] for r in rows]


@given(LENGTHS, st.integers(2, 40), st.integers(0, 5), st.booleans(), st.integers(1, 200), st.data())
def test_balanced_steps_yield_every_document_once_and_start_anywhere(lengths, longest, seed, masked, tokens, draw):
    """Steps of any size, by whoever starts anywhere: no document twice and none left out, but those of which nothing
    is learned. A long one comes in pieces.
    """
    corpus = corpus_of(lengths, masked)
    every = np.arange(len(lengths))
    data = PackedDataset.of_learnable(corpus, every, longest, seed=seed, packing="balanced", pad_id=PAD)
    pieces = [(d, a, min(longest, n - a)) for d, n in enumerate(lengths) for a in range(0, n, longest)]
    counts = np.arange(sum(lengths)) % 3 != 0 if masked else np.full(sum(lengths), True)
    begin = np.cumsum([0, *lengths])
    learned = {p: int(counts[begin[p[0]] + p[1] + 1 : begin[p[0]] + p[1] + p[2]].sum()) for p in pieces}
    expected = sorted(int(begin[d] + a + 1) for (d, a, _), number in learned.items() if number)
    if data is None:
        assert not expected
        return
    assert data.num_learned == sum(learned.values()) and data.num_cut == sum(
        lengths[d] > longest for d in data.documents
    )
    shown: list[int] = []
    first = 0
    while first < 3 * len(data):
        step = data.step(first, tokens)
        read = [step.read(number) for number in range(len(step.lengths))]
        assert [document.lengths for document in read] == [(length,) for length in step.lengths]
        assert len(read) == 1 or sum(step.lengths) <= tokens < sum(step.lengths) + data.length(first + len(read))
        shown += [int(document.input_ids[0, 0]) for document in read]
        first += len(read)
    for epoch in range(3):
        assert sorted(shown[epoch * len(data) : (epoch + 1) * len(data)]) == expected
    other = PackedDataset.of_learnable(corpus, every, longest, seed=seed, packing="balanced", pad_id=PAD)
    assert other is not None
    middle = draw.draw(st.integers(0, 2 * len(data)))
    step = other.step(middle, 2 * tokens)
    again = [int(step.read(number).input_ids[0, 0]) for number in range(len(step.lengths))]
    assert again[: len(shown) - middle] == shown[middle : middle + len(again)]
