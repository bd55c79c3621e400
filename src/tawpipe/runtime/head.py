"""The head's loss, chunk by chunk of positions: the logits of a whole row never exist."""

from __future__ import annotations

import torch
from torch import Tensor

from tawpipe.model.batch import MicroBatch
from tawpipe.model.chain import Chain
from tawpipe.runtime.measures import Head


def loss_in_chunks(
    chain: Chain,
    hidden: Tensor,
    batch: MicroBatch,
    gradient: Tensor | None,
    scale: float,
    chunk_tokens: int,
    head: Head | None = None,
) -> Tensor:
    """The summed loss of one micro-batch, chunk by chunk of positions; where gradients are on also its gradient times
    ``scale``.

    Args:
        head: takes the place of the chain's.
    """
    rows, length = hidden.shape[:2]
    step = max(1, chunk_tokens // rows)
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    training = torch.is_grad_enabled()
    for begin in range(0, length, step):
        cut = slice(begin, min(begin + step, length))
        part = hidden[:, cut].detach()
        if training:
            part.requires_grad_(gradient is not None)
        labels = batch.labels[:, cut]
        summed = head(part, labels, cut) if head else chain.head(part, labels)
        if training:
            torch.autograd.backward(summed, torch.full_like(summed, scale))
            if gradient is not None:
                assert part.grad is not None
                gradient[:, cut] = part.grad
        total += summed.detach()
    return total
