"""Ending a run in good order when somebody asks for it.

Ctrl-C, SIGTERM or SIGUSR1 to any process, once training has begun: all finish the step they are in, save and end, and
rank 0 says so at once. The processes agree by a number that goes round with every step and is read one step later, so
that nobody waits for it; as a step is issued before the one before it has ended, up to two more are done. A second
signal, a second later or more, ends the process at once.
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
    """Catches the signals while it is entered, and asks the others.

    Args:
        last_words: for a process that nobody watches: what is to be said when it ends at once.
    """

    def __init__(self, world: World, last_words: Callable[[], str] | None = None) -> None:
        self._world, self._last_words = world, last_words
        self._said, self._words = False, STOPPING
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
        """The signal that any process had caught when the step before this one began; the same on all. Call once for
        every step, on all ranks.
        """
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
        """Nothing is under way afterwards; call on all ranks when no further step comes."""
        if self._asked is not None:
            self._asked[0].wait()
            self._asked = None
        self._words = ENDING

    def _catch(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self.caught is not None and now - self._caught_at >= SECOND_S:
            if self._last_words is not None:
                _write(f"{AT_ONCE}; {self._last_words()}")
            os._exit(128 + number)
        if self.caught is None:
            self.caught, self._caught_at = signal.Signals(number), now
            self._say_stopping()

    def _say_stopping(self) -> None:
        if self._world.rank == 0 and not self._said:
            self._said = True
            _write(self._words)


def _write(words: str) -> None:
    """A line on standard error, past Python's streams: a handler may run while one of them is being written to."""
    line = f"{ERASE_LINE if os.isatty(2) else ''}tawpipe: {words}\n"
    with suppress(OSError):
        os.write(2, line.encode(sys.getfilesystemencoding(), errors="replace"))
