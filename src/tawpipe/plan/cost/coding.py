"""Seconds that lossless coding takes on a core or device, measured on random numbers that resemble training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tawpipe.runtime.transport.exact import best_form, changes, decode_change, encode_change
from tawpipe.runtime.transport.exact_gradients import decode_gradient, encode_gradient
from tawpipe.schedule.spec import coded_bytes
from tawpipe.simulate import CodingTimes

ELEMENTS = 1 << 19
"""Elements that are coded for the measurement."""
CHANGED = 3e-4 / 0.02
"""Change of a weight in one step relative to the weights, as with a learning rate of 3e-4."""
COUNT_BYTES, CHANGE_BYTES = 60, 100
"""Bytes of device memory that are moved per weight: to compare it (``COUNT_BYTES``), and to write or read its change
(``CHANGE_BYTES``)."""


def estimated(bytes_per_s: float) -> CodingTimes:
    """Return estimated coding times for a GPU, from the rate of its memory; gradients are never coded on GPUs."""
    each = CHANGE_BYTES / bytes_per_s
    return CodingTimes(COUNT_BYTES / bytes_per_s, (each, each))


def measured(device: torch.device, seconds: Callable[[Callable[[], object]], float]) -> CodingTimes:
    """Measure how many seconds lossless coding takes for one element on ``device``.

    The coded numbers are random and resemble those in training. Gradients are only coded on CPUs; their times are 0 on
    GPUs.

    Args:
        device: device that codes.
        seconds: runs a function several times and returns the seconds of one run.
    """
    dice = torch.Generator().manual_seed(0)
    weights = torch.randn(ELEMENTS, generator=dice)
    copy = weights.bfloat16().to(device)
    home = (weights + CHANGED * torch.randn(ELEMENTS, generator=dice)).bfloat16().to(device)
    form = best_form(changes(home, copy).tolist(), ELEMENTS)
    message = torch.empty(form.message_bytes(ELEMENTS), dtype=torch.uint8, device=device)
    count = partial(changes, home, copy), partial(encode_change, home, copy, form, message)
    of_weights = [seconds(run) / ELEMENTS for run in (*count, partial(decode_change, message, form, copy))]
    of_gradients = [0.0, 0.0]
    if device.type == "cpu":  # gradients are coded on CPUs only
        each = torch.randn(4, ELEMENTS, generator=dice) * torch.randn(4, ELEMENTS, generator=dice)
        total, message = each.bfloat16().float().sum(0), torch.empty(coded_bytes(ELEMENTS, 4), dtype=torch.uint8)
        of_gradients = [
            seconds(run) / ELEMENTS
            for run in (partial(encode_gradient, total, message), partial(decode_gradient, message, total))
        ]
    return CodingTimes(of_weights[0], (of_weights[1], of_weights[2]), (of_gradients[0], of_gradients[1]))
