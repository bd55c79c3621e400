"""Ending a run in good order when the system asks for it.

SIGTERM and SIGUSR1 to any process, once training has begun: all finish the step they are in, save and exit with 0. The
processes agree by a number that goes round with every step and is read one step later, so that nobody waits for it; as
a step is issued before the one before it has ended, up to two more are done. A second signal, a second later or more,
ends the process at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from tawpipe.environment import SECOND_S
from tawpipe.runtime.world import World

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Catches the signals while it is entered, and asks the others."""

    def __init__(self, world: World) -> None:
        self._world = world
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
        return signal.Signals(number) if number else None

    def finish(self) -> None:
        """Nothing is under way afterwards; call on all ranks when no further step comes."""
        if self._asked is not None:
            self._asked[0].wait()
            self._asked = None

    def _catch(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self.caught is not None and now - self._caught_at >= SECOND_S:
            os._exit(128 + number)
        if self.caught is None:
            self.caught, self._caught_at = signal.Signals(number), now
