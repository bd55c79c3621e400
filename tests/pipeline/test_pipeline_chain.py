"""A pipeline of a chain that is there already."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from cases import llama
from states import BATCHES, make
from tawpipe import CheckSettings, Pipeline, UserError
from tawpipe.model.chain import Chain


def twice(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return 2 * torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def test_pipeline_of_a_chain_uses_the_loss_of_the_chain() -> None:
    chain = Chain(llama(torch.float32), loss=twice)
    with pytest.raises(UserError, match=r"loss: got .*unset beside a Chain"):
        Pipeline(chain, loss=twice)
    with closing(make()) as plain, closing(Pipeline(chain, checks=CheckSettings(check="never"))) as pipeline:
        once = plain.step(BATCHES[0]).loss
        assert once is not None and pipeline.step(BATCHES[0]).loss == pytest.approx(2 * once, rel=1e-5)
    with pytest.raises(UserError):
        Pipeline(chain)  # which is empty now


def test_chain_made_under_a_meta_device_supports_cut_rows() -> None:
    """Masks are looked at on a device that has numbers."""
    with torch.device("meta"):
        assert Chain(llama(torch.float32)).in_turn == ""
