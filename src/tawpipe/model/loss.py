"""The loss of some positions: cross-entropy, or the user's own function, which must be a sum over positions because the
head runs in chunks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tawpipe.errors import UserError
from tawpipe.model.batch import IGNORE

logger = logging.getLogger(__name__)

Loss = Callable[[Tensor, Tensor], Tensor]
"""(logits [b, c, V], labels [b, c], already shifted) -> the sum, not the mean, over the labels that count."""


CHUNK = 1024, 8192
"""Positions in a chunk, at least and at most, that ``loss_chunk`` chooses: each chunk writes a gradient of the whole
head, which costs more than the chunk's own products where it is short."""
LOGITS_BYTES = {"cpu": 2**30, "cuda": 2**32}
"""Bytes for logits that ``loss_chunk`` does not exceed; processes on a CPU share its memory."""


def logits_bytes(vocabulary: int, dtype: torch.dtype) -> int:
    """Bytes that the loss of one position takes: log-probabilities, their gradient and that of the logits, in fp32 or
    wider.
    """
    return 3 * vocabulary * torch.promote_types(dtype, torch.float32).itemsize


def loss_chunk(setting: int, vocabulary: int, dtype: torch.dtype, device: str) -> int:
    """Positions whose logits exist at one time: what ``ScheduleSettings.loss_chunk_tokens`` says, or for 0 what fits.

    >>> loss_chunk(0, 128256, torch.bfloat16, "cuda"), loss_chunk(0, 32000, torch.bfloat16, "cuda")
    (2688, 8192)

    Args:
        device: its type, cpu or cuda.
    """
    least, most = CHUNK
    fitting = LOGITS_BYTES[device] // logits_bytes(vocabulary, dtype) // 128 * 128
    return setting or max(least, min(fitting, most))


def token_loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of cross-entropies over the labels that count, in fp32, or in fp64 for fp64 logits."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def sum_of_loss(loss: Loss, logits: Tensor, labels: Tensor) -> Tensor:
    """Value of a loss function, if that can be a sum over positions.

    Raises:
        UserError: it is no single number, or one in a dtype that cannot hold a sum over thousands of tokens.
    """
    value = loss(logits, labels.clone())  # many a loss replaces -100 in place
    if not isinstance(value, Tensor):
        raise UserError("loss", f"a {type(value).__name__}", "it must return the sum as a tensor of one number")
    if logits.requires_grad and not value.requires_grad:
        raise UserError("loss", "a tensor without a gradient", "it must be computed from the logits, attached")
    if value.ndim != 0:
        raise UserError("loss", f"a tensor of shape {tuple(value.shape)}", "it must return the sum as one number")
    if value.dtype not in (torch.float32, torch.float64):
        raise UserError(
            "loss", value.dtype, "it must be computed and returned in float32, for example of logits.float()"
        )
    return value


def check_loss(loss: Loss, vocabulary: int, device: torch.device) -> None:
    """Try a loss function on a few random logits: it must be a sum over the labels that count.

    Raises:
        UserError: it is a mean, or no number where no label counts.
    """
    if isinstance(loss, torch.nn.Module) and any(parameter.requires_grad for parameter in loss.parameters()):
        raise UserError(
            "loss", type(loss).__name__, "its parameters would not be trained; freeze them or move them into the model"
        )
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 6, vocabulary, generator=generator, device="cpu").to(device).requires_grad_()
    labels = torch.randint(vocabulary, (2, 6), generator=generator, device="cpu").to(device)
    labels[0, 4] = IGNORE
    try:
        whole, first, second, third = (float(sum_of_loss(loss, logits[cut], labels[cut]).detach()) for cut in _PARTS)
        nothing = float(sum_of_loss(loss, logits, torch.full_like(labels, IGNORE)).detach())
    except UserError:
        raise
    except Exception as error:
        logger.warning("the loss could not be tried on random logits (%s): it must return a sum over the labels", error)
        return
    if not math.isclose(whole, first + second + third, rel_tol=1e-3, abs_tol=1e-6):
        raise UserError(
            "loss",
            f"{whole:.4g} for two rows of six positions, {first:.4g}, {second:.4g} and {third:.4g} for parts of them",
            "it must return the sum over the labels that count, not their mean: it is called for some positions at a "
            'time, and the sum is divided by the tokens of the whole step (reduction="sum")',
        )
    if nothing != 0:
        raise UserError("loss", nothing, f"it must be 0 where every label is {IGNORE}")


_PARTS = (slice(0, 2), slice(0, 6)), (slice(0, 1), slice(0, 2)), (slice(0, 1), slice(2, 6)), (slice(1, 2), slice(0, 6))
"""Rows and positions: all, and three parts of them."""
