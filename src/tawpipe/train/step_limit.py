"""The time limit of control messages during a run: it follows the limit of steps."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from tawpipe.console import duration
from tawpipe.runtime.watch.limits import FACTOR, StepLimit
from tawpipe.runtime.watch.watchdog import DEAF_S


class FollowedLimit:
    """Lets control messages wait as long as steps may take. Says once if that is longer than the setting.

    Args:
        limit: of the pipeline's steps.
        setting_s: ``timeouts.step_s``, the least that the limit may be.
        set_timeout: is given their limit whenever it has changed.
        notice: is given the line for the user.
    """

    def __init__(
        self,
        limit: StepLimit,
        setting_s: float,
        *,
        set_timeout: Callable[[timedelta], None],
        notice: Callable[[str], None],
    ) -> None:
        self._limit, self._setting_s, self._set_timeout, self._notice = limit, setting_s, set_timeout, notice
        self._told_s, self._said = 0.0, False

    def follow(self) -> None:
        """To be called where the limit may have changed."""
        if self._limit.seconds != self._told_s:
            self._told_s = self._limit.seconds
            self._set_timeout(timedelta(seconds=self._told_s + DEAF_S))  # the watchdog is first: it says more
        lasting_s = FACTOR * self._limit.lasting_s
        if not self._said and lasting_s > self._setting_s:
            self._said = True
            self._notice(
                f"a step may take {duration(lasting_s)} before the run is given up, {FACTOR:.0f} times what steps "
                f"take, as far as is known; --timeouts.step-s, which is {self._setting_s:g} s, is the least"
            )
