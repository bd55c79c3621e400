"""Early end of a run on request: ctrl-C, SIGTERM or SIGUSR1.

A signal to any process is enough, once training has begun. All processes then finish their step, save and end; rank 0
prints a line at once. The processes agree by an all-reduce of one number per step, whose result is read one step later,
so that no process waits for it. As a step is issued before the previous one has ended, up to two more steps are done. A
second signal, one second later or more, ends the process at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from tawpipe.console import ERASE_LINE
from tawpipe.environment import SECOND_S
from tawpipe.runtime.world import World

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
STOPPING = "stopping: the current step ends, then a checkpoint is written (press again to end at once)"
ENDING = "ending: samples and export are finished first (press again to end at once)"
AT_ONCE = "ended at once"


class StopRequest:
    """Signal handlers of a run, active inside a ``with`` block, and the agreement of all ranks to stop.

    Args:
        world: processes of the run.
        last_words: returns text to print when a second signal ends the process at once; None to print nothing.
    """

    def __init__(self, world: World, last_words: Callable[[], str] | None = None) -> None:
        self._world, self._last_words = world, last_words
        self._has_announced, self._words = False, STOPPING
        self.caught: signal.Signals | None = None
        self._caught_at = 0.0
        self._before: dict[signal.Signals, Any] = {}
        self._asked: tuple[dist.Work, torch.Tensor] | None = None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._catch) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def agreed(self) -> signal.Signals | None:
        """Return the signal that any process had caught when the previous step began; None if there is none.

        The answer is the same on all ranks. Waits for the all-reduce of the previous call and starts one for the next.
        Call on all ranks, once in every step. A single process returns its own signal at once."""
        if self._world.group is None:
            return self.caught
        number = 0
        if self._asked is not None:
            work, values = self._asked
            work.wait()
            number = int(values[0])
        values = torch.tensor([float(self.caught or 0)])
        work = dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._world.group, async_op=True)
        assert work is not None
        self._asked = (work, values)
        if number:
            self._say_stopping()
        return signal.Signals(number) if number else None

    def finish(self) -> None:
        """Wait for the last all-reduce; call on all ranks after the last step.

        From now on the message for a signal says that samples and export are still written.
        """
        if self._asked is not None:
            self._asked[0].wait()
            self._asked = None
        self._words = ENDING

    def _catch(self, number: int, _: FrameType | None) -> None:
        """Record the first signal; on a second one, ``SECOND_S`` later or more, end the process at once."""
        now = time.monotonic()
        if self.caught is not None and now - self._caught_at >= SECOND_S:
            if self._last_words is not None:
                _write(f"{AT_ONCE}; {self._last_words()}")
            os._exit(128 + number)
        if self.caught is None:
            self.caught, self._caught_at = signal.Signals(number), now
            self._say_stopping()

    def _say_stopping(self) -> None:
        """Print on rank 0 that the run is about to end, once."""
        if self._world.rank == 0 and not self._has_announced:
            self._has_announced = True
            _write(self._words)


def _write(words: str) -> None:
    """Write a line to standard error, bypassing Python's streams.

    A signal handler may run while one of these streams is being written to.
    """
    line = f"{ERASE_LINE if os.isatty(2) else ''}tawpipe: {words}\n"
    with suppress(OSError):
        os.write(2, line.encode(sys.getfilesystemencoding(), errors="replace"))
