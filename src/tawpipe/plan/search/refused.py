"""Why a strategy cannot run, in words of the machines and the model: a search tries settings that nobody has set."""

from __future__ import annotations

import re

from tawpipe.errors import UserError
from tawpipe.options.names import option_of
from tawpipe.schedule.settings import KEPT_BY_PLANS, UNPLANNED

NO_ROOM = "memory of a device"
"""What holds no micro-batch of a pipeline's stages."""
MEMORY_OF_A_POSITION = "memory of a position"
"""The same, as searches for orders call it, in their own units."""
_LEAST = re.compile(r"at least (\d+)")


def in_plain_words(error: UserError) -> str:
    """What a strategy would need that is not there, without the name of the strategy.

    >>> in_plain_words(UserError("layers of the model", 4, "at least 8, one for each of the 2 stages of 4 positions"))
    'at least 8 layers are needed'
    >>> in_plain_words(UserError("schedule.strategy", "1f1b", "another one: layers share a tensor"))
    'layers share a tensor'
    """
    setting, value, expected = error.setting, error.value, error.expected
    least = _LEAST.match(expected)
    if setting == "layers of the model" and least:
        return f"at least {least[1]} layers are needed"
    if setting in (NO_ROOM, MEMORY_OF_A_POSITION):
        there = value if setting == NO_ROOM else "a device"
        return f"no micro-batch has room in {there} beside weights, gradients and optimizer state"
    if setting == "micro-batches":
        return f"{expected.partition(',')[0]} micro-batches are needed, not {value}"
    if setting == "schedule.strategy":
        return expected.removeprefix("another one: ")
    if setting == "schedule.stages":
        return expected.partition(";")[0].removeprefix("nothing: ")
    if setting.removeprefix("schedule.") in (*UNPLANNED, *KEPT_BY_PLANS):
        return f"{option_of(setting)} {value} is not for it: {expected.partition(': ')[2] or expected}"
    return expected if setting.startswith("schedule.") else f"{setting}: {expected}"
