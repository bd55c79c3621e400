"""The head's loss in chunks is that of the whole row, and so are its gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tawpipe.model.batch import IGNORE, MicroBatch
from tawpipe.runtime.compute.head import loss_in_chunks


class Head(nn.Module):
    """As much of a chain as the loss needs: a projection and the summed loss; notes the largest number of positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.most = nn.Linear(6, 11, dtype=torch.float64), 0

    def head(self, hidden: Tensor, labels: Tensor) -> Tensor:
        self.most = max(self.most, labels.numel())
        return F.cross_entropy(
            self.project(hidden).flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
        )


def given() -> tuple[Tensor, MicroBatch]:
    torch.manual_seed(1)
    ids = torch.randint(0, 11, (2, 9))
    labels = ids.clone()
    labels[0, :3] = IGNORE
    return torch.randn(2, 9, 6, dtype=torch.float64), MicroBatch(ids, labels, torch.arange(9).expand(2, 9), (9, 9))


@pytest.mark.parametrize("chunk_tokens", [1, 2, 5, 8, 1000])
def test_chunked_loss_equals_the_loss_and_gradients_of_the_whole_row(chunk_tokens: int) -> None:
    hidden, batch = given()
    whole: Any = Head()
    leaf = hidden.clone().requires_grad_()
    expected = whole.head(leaf, batch.labels)
    (expected * 4.0).backward()
    head: Any = Head()
    gradient = torch.full_like(hidden, float("nan"))
    loss = loss_in_chunks(head, hidden, batch, gradient, 4.0, chunk_tokens)
    assert torch.allclose(loss, expected) and not loss.requires_grad and not hidden.requires_grad
    assert leaf.grad is not None and torch.allclose(gradient, leaf.grad)
    assert torch.allclose(head.project.weight.grad, whole.project.weight.grad)
    assert head.most <= max(2, chunk_tokens)  # a chunk has one position of every row at least


def test_chunked_loss_propagates_no_gradients_without_grad_mode() -> None:
    hidden, batch = given()
    head: Any = Head()
    loss_in_chunks(head, hidden, batch, None, 4.0, 4)  # of what is before the head, nothing is trained
    assert head.project.weight.grad is not None
    head = Head()
    with torch.no_grad():
        loss_in_chunks(head, hidden, batch, None, 4.0, 4)
    assert head.project.weight.grad is None


def test_custom_head_receives_every_position_once_with_its_labels() -> None:
    hidden, batch = given()
    seen: list[int] = []

    def other(part: Tensor, labels: Tensor, cut: slice) -> Tensor:
        assert torch.equal(part, hidden[:, cut]) and torch.equal(labels, batch.labels[:, cut])
        seen.extend(range(9)[cut])
        return part.sum()

    with torch.no_grad():
        chain: Any = SimpleNamespace()
        assert torch.allclose(loss_in_chunks(chain, hidden, batch, None, 1.0, 4, other), hidden.sum())
    assert seen == list(range(9))
