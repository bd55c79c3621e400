"""Losses of some positions: cross-entropy, or the user's own function.

A loss function must be a sum over positions, because the head runs in chunks."""

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
"""Function of logits [b, c, V] and labels [b, c], already shifted, that returns the sum (not the mean) of the loss over
the labels that count."""


CHUNK = 1024, 8192
"""Smallest and largest number of positions that ``loss_chunk`` chooses. Each chunk writes a gradient of the whole head,
and for short chunks this costs more than the chunk's own matrix products."""
LOGITS_BYTES = {"cpu": 2**30, "cuda": 2**32}
"""Device type -> largest number of bytes for logits that ``loss_chunk`` allows. Processes on a CPU share its memory."""


def logits_bytes(vocabulary: int, dtype: torch.dtype) -> int:
    """Return the bytes that the loss of one position takes.

    They hold log-probabilities, their gradient and the gradient of the logits, in fp32 or wider."""
    return 3 * vocabulary * torch.promote_types(dtype, torch.float32).itemsize


def loss_chunk(setting: int, vocabulary: int, dtype: torch.dtype, device: str) -> int:
    """Return the number of positions whose logits exist at one time.

    >>> loss_chunk(0, 128256, torch.bfloat16, "cuda"), loss_chunk(0, 32000, torch.bfloat16, "cuda")
    (2688, 8192)

    Args:
        setting: ``ScheduleSettings.loss_chunk_tokens``, which is returned unless it is 0; 0 chooses a number that fits.
        vocabulary: tokens in the vocabulary.
        dtype: dtype of the logits.
        device: device type, cpu or cuda.
    """
    least, most = CHUNK
    fitting = LOGITS_BYTES[device] // logits_bytes(vocabulary, dtype) // 128 * 128
    return setting or max(least, min(fitting, most))


def token_loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of cross-entropies over the labels that count, in fp32 (fp64 for fp64 logits)."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def sum_of_loss(loss: Loss, logits: Tensor, labels: Tensor) -> Tensor:
    """Call a loss function, and check that its value can be a sum over positions.

    Returns:
        The value of ``loss``.

    Raises:
        UserError: the value is not a single number, has no gradient, or has a dtype too narrow for a sum over thousands
            of tokens.
    """
    value = loss(logits, labels.clone())  # some loss functions replace -100 in place
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
    """Check, on a few random logits, that a loss function is a sum over the labels that count.

    If the function raises an exception, a warning is logged instead.

    Raises:
        UserError: the function is a mean, is not 0 if no label counts, or has parameters that would not be trained.
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
"""Slices (rows, positions) of the random logits: all of them, and three parts that cover all."""
