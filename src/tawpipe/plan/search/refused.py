"""Reasons why a strategy cannot run, worded in terms of machines and model.

A search tries settings that the user has not set. Its messages therefore do not name these settings."""

from __future__ import annotations

from tawpipe.errors import UserError
from tawpipe.options.names import option_of
from tawpipe.schedule.refusal import LeastLayers, MemoryOfPosition, MicroBatchCount
from tawpipe.schedule.settings import KEPT_BY_PLANS, UNPLANNED


def in_plain_words(error: UserError) -> str:
    """Return the reason in ``error`` as a short phrase about machines or model, without the name of the strategy.

    >>> in_plain_words(UserError("layers of the model", 4, "at least 8, one for each stage", need=LeastLayers(8)))
    'at least 8 layers are needed'
    >>> why = "layers share a tensor"
    >>> in_plain_words(UserError("schedule.strategy", "1f1b", f"another one: {why}", need=why))
    'layers share a tensor'
    """
    setting, need, expected = error.setting, error.need, error.expected
    match need:
        case LeastLayers(number):
            return f"at least {number} layers are needed"
        case MemoryOfPosition(size):
            device = "a device" if size is None else f"{size / 2**30:.4g} GiB"
            return f"no micro-batch fits into {device} beside weights, gradients and optimizer state"
        case MicroBatchCount(fewer, more):
            return f"{fewer} or {more} micro-batches are needed, not {error.value}"
    if setting.removeprefix("schedule.") in (*UNPLANNED, *KEPT_BY_PLANS):
        return f"{option_of(setting)} {error.value} is not for it: {need or expected}"
    if setting in ("schedule.strategy", "schedule.stages"):
        return str(need or expected)
    return expected if setting.startswith("schedule.") else f"{setting}: {expected}"
