"""Micro-batches: labels are shifted inside documents, and lengths describe the packing."""

from __future__ import annotations

import pytest
import torch

from tawpipe.errors import UserError
from tawpipe.model.batch import MicroBatch


def test_shifted_labels_never_cross_a_document_border():
    ids = torch.tensor([[10, 11, 12, 13, 14], [20, 21, 22, 23, 24]])
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
    batch = MicroBatch.from_rows(ids, ids, positions)
    assert batch.labels.tolist() == [[11, 12, -100, 14, -100], [-100, 22, 23, 24, -100]]
    assert batch.lengths == (3, 2, 1, 4)
    assert batch.position_ids.tolist() == positions.tolist()
    assert batch.tokens == 6


def test_masked_labels_are_not_counted():
    ids = torch.tensor([[1, 2, 3, 4]])
    batch = MicroBatch.from_rows(ids, torch.tensor([[-100, -100, 3, 4]]))
    assert batch.labels.tolist() == [[-100, 3, 4, -100]]
    assert batch.tokens == 2 and batch.lengths == (4,)


def test_padding_is_a_separate_document_without_labels():
    ids = torch.tensor([[1, 2, 3, 0, 0], [1, 2, 3, 4, 5], [0, 0, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    batch = MicroBatch.from_rows(ids, ids, attention_mask=mask)
    assert batch.lengths == (3, 2, 5, 5)
    assert batch.labels[0].tolist() == [2, 3, -100, -100, -100]
    assert batch.position_ids[0].tolist() == [0, 1, 2, 0, 0]
    assert batch.tokens == 6
    packed = MicroBatch.from_rows(ids[:1], ids[:1], torch.tensor([[0, 0, 1, 0, 0]]), mask[:1])
    assert packed.lengths == (1, 2, 2) and packed.tokens == 1


def test_left_padding_is_refused():
    ids = torch.tensor([[0, 1, 2]])
    with pytest.raises(UserError, match="right"):
        MicroBatch.from_rows(ids, ids, attention_mask=torch.tensor([[0, 1, 1]]))


def test_micro_batch_keeps_lengths_and_tokens_when_moved():
    ids = torch.tensor([[1, 2, 3]])
    batch = MicroBatch.from_rows(ids, ids)
    moved = batch.to("cpu")
    assert (moved.lengths, moved.tokens) == (batch.lengths, batch.tokens)
