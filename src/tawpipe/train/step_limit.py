"""Time limit of control messages during a run: it follows the limit of steps."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from tawpipe.console import duration
from tawpipe.runtime.watch.limits import FACTOR, StepLimit
from tawpipe.runtime.watch.watchdog import DEAF_S


class FollowedLimit:
    """Time limit of control messages that is kept as long as the limit of a step.

    It tells the user once if that is longer than the setting.

    Args:
        limit: limit of the pipeline's steps.
        setting_s: ``timeouts.step_s``, the least limit in seconds; infinite to tell the user nothing.
        set_timeout: sets the time limit of control messages; called when the limit has changed.
    """

    def __init__(self, limit: StepLimit, setting_s: float, *, set_timeout: Callable[[timedelta], None]) -> None:
        self._limit, self._setting_s, self._set_timeout = limit, setting_s, set_timeout
        self._told_s, self._has_warned = 0.0, False

    def follow(self) -> str:
        """Set the time limit of control messages if the limit of steps has changed.

        Returns:
            a line for the user, the first time that steps may take longer than ``setting_s``; else ``""``.
        """
        if self._limit.seconds != self._told_s:
            self._told_s = self._limit.seconds
            self._set_timeout(timedelta(seconds=self._told_s + DEAF_S))  # longer than the watchdog's: it reports more
        lasting_s = FACTOR * self._limit.lasting_s
        if self._has_warned or lasting_s <= self._setting_s:
            return ""
        self._has_warned = True
        return (
            f"step time limit: {duration(lasting_s)}, {FACTOR:.0f} times the usual step; --timeouts.step-s, "
            f"{self._setting_s:g} s, is the minimum"
        )
