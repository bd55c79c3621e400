"""The head with its loss, chunk by chunk of positions: the logits of a whole row never exist at one time."""

from __future__ import annotations

import torch
from torch import Tensor

from tawpipe.model.batch import MicroBatch
from tawpipe.model.chain import Chain
from tawpipe.runtime.compute.activations import DeviceBatch
from tawpipe.runtime.compute.blocks import Blocks
from tawpipe.runtime.compute.measures import Head
from tawpipe.runtime.compute.repeated import check_head
from tawpipe.runtime.compute.step_input import StepInput
from tawpipe.schedule.actions import Action
from tawpipe.schedule.buffers import loss


def forward(blocks: Blocks, action: Action, held: DeviceBatch, step_input: StepInput) -> None:
    """Compute the loss of a micro-batch in an evaluation, without gradients, and keep it for NORM."""
    hidden, m = blocks.input(action), action.micro_batch
    check_head(blocks, action, step_input, hidden)
    whole, dealt = blocks.dealt(step_input, m)
    on_host = whole.tokens_at(dealt.own) if dealt else whole
    head = step_input.measure.head(blocks.chain, on_host, m) if step_input.measure else None
    with torch.no_grad(), blocks.random.seeded(blocks.seed(action, step_input)):
        blocks.held.losses[loss(m)] = loss_in_chunks(
            blocks.chain, hidden, held.local, None, step_input.scale, blocks.chunk_tokens, head
        )


def backward(
    blocks: Blocks, action: Action, held: DeviceBatch, step_input: StepInput, *, wanted: bool
) -> Tensor | None:
    """Compute the loss of a micro-batch in training and run its backward pass; return the gradient of the head's input.

    Keeps the loss for NORM, and adds to the weight gradients. Returns None if the input's gradient is not ``wanted``.
    """
    hidden = blocks.input(action)
    gradient = torch.empty_like(hidden) if wanted else None
    check_head(blocks, action, step_input, hidden)
    with torch.enable_grad(), blocks.random.seeded(blocks.seed(action, step_input)):
        blocks.held.losses[loss(action.micro_batch)] = loss_in_chunks(
            blocks.chain, hidden, held.local, gradient, step_input.scale, blocks.chunk_tokens
        )
    return gradient


def loss_in_chunks(
    chain: Chain,
    hidden: Tensor,
    batch: MicroBatch,
    gradient: Tensor | None,
    scale: float,
    chunk_tokens: int,
    head: Head | None = None,
) -> Tensor:
    """Return the summed loss of one micro-batch, computed chunk by chunk of positions, and run its backward pass.

    The backward pass runs only if gradients are enabled. It adds to the weight gradients.

    Args:
        chain: The model.
        hidden: Input of the head, [rows, tokens, H].
        batch: The tokens of ``hidden``, with their labels.
        gradient: Tensor like ``hidden`` that is overwritten with its gradient times ``scale``; None if it is not
            needed.
        scale: Factor of the loss in the backward pass only.
        chunk_tokens: Tokens of all rows for which logits exist at one time.
        head: Replaces the chain's head.

    Returns:
        Sum of the losses of all labels that count, without ``scale``: an fp64 scalar on the device.
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
