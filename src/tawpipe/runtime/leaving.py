"""Shutdown of pipelines that a script has not closed, after its last line, ``sys.exit`` or an exception.

Lanes and background saves are threads inside C++ code. If the interpreter exits under such a thread, the process aborts
("terminate called"). So an exit handler first waits for all work under way. Work that can never end, because something
has failed here or peers are gone, is abandoned after a fixed time and ends with the process. The results of steps that
the script has not read are checked: a script of one step whose batch was wrong ends with an error.

An error that a call has raised, and that the script has caught, is not reported again if all ranks reach their end:
then no rank waits for another. Otherwise the process ends with an error, so that its peers end, too.
"""

from __future__ import annotations

import _thread
import atexit
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from tawpipe.runtime.executor import Executor
from tawpipe.runtime.threads import on_device, use_device
from tawpipe.runtime.world import World, joined_by_us

PATIENCE_S = 5.0
"""Seconds to wait for work under way after a failure, and for leaving groups.

Peers get twice as long to reach their end.
"""
LOOK_S = 0.25
"""Seconds between two checks of a pipeline that was garbage-collected while its steps were under way."""
EXIT_CODE = 1
"""Exit code of a process whose last steps failed or whose threads do not end, whatever code the script gave."""


class BackgroundSave(Protocol):
    """Interface of a save that runs in the background."""

    @property
    def done(self) -> bool: ...


class UnreadSteps(Protocol):
    """Interface of the step results that the script may not have read."""

    def end(self) -> None: ...


@dataclass(frozen=True)
class _Running:
    """A pipeline that the script has not closed, with its unread results, background saves and processes."""

    executor: Executor
    steps: UnreadSteps
    savings: Sequence[BackgroundSave]
    world: World

    def end(self, *, failing: bool) -> bool:
        """Wait until no work is under way, then check the last steps; return True if all ended and the steps were good.

        Ends the lanes, and the watchdog if all ended. Prints errors that the script was not given. After a failure it
        waits at most ``PATIENCE_S`` seconds.

        Args:
            failing: True if the script ends with an exception. Then errors are not printed, the last steps are not
                checked, and the result is True if all ended.
        """
        deadline: float | None = None
        closed, ended = [False], True
        while not all(closed) or any(not saving.done for saving in self.savings):
            if deadline is None and (failing or self.executor.failure is not None):
                deadline = time.monotonic() + PATIENCE_S
            if deadline is not None and time.monotonic() > deadline:
                ended = False
                break
            closed = self.executor.end_lanes(0.05)
        if ended:
            self.executor.watchdog.close()
        if failing:  # the script's own error is the more useful one
            return ended
        if (error := self.executor.untold) is not None:
            print(f"tawpipe: the last step was not finished: {error}", file=sys.stderr)
        if not ended or self.executor.failure is not None:
            return ended and error is None
        try:
            self.steps.end()
        except Exception as error:
            print(f"tawpipe: error: {error}", file=sys.stderr)
            return False
        return True


_numbers = itertools.count()
_running: dict[int, _Running] = {}


def leave_at_exit(
    pipeline: object, executor: Executor, steps: UnreadSteps, savings: Sequence[BackgroundSave], world: World
) -> Callable[[], object]:
    """Register a pipeline for shutdown at the end of the process; return a function that cancels this.

    If the pipeline is garbage-collected, its lanes run on, and it stays registered until they are idle.
    """
    number = next(_numbers)
    _running[number] = _Running(executor, steps, savings, world)
    closed = weakref.finalize(pipeline, _forget, number)
    closed.atexit = False
    return lambda: (closed.detach(), _running.pop(number, None))


def _forget(number: int) -> None:
    """End a pipeline that was garbage-collected, in a new thread if it is not idle yet.

    The garbage collector may call this in any thread at any time, also inside ``threading`` while its locks are held.
    So it starts the thread with ``_thread``.
    """
    if not _forgotten(number):
        _thread.start_new_thread(_forget_later, (number,))


def _forget_later(number: int) -> None:
    """Try every ``LOOK_S`` seconds to end a pipeline, until it is idle."""
    while not _forgotten(number):
        time.sleep(LOOK_S)


def _forgotten(number: int) -> bool:
    """End and unregister a pipeline if it has no work under way; return True if it is no longer registered."""
    pipeline = _running.get(number)
    if pipeline is None:
        return True
    with on_device(pipeline.world.device):
        if not pipeline.executor.idle or not all(saving.done for saving in pipeline.savings):
            return False
        pipeline.executor.end_lanes(0.0)
    pipeline.executor.watchdog.close()
    _running.pop(number, None)
    return True


def _at_exit() -> None:
    """Shut down all registered pipelines before the interpreter exits.

    Waits for their work, checks their last steps and leaves the process groups. If anything fails or does not end in
    time, it ends the process at once with ``EXIT_CODE``.
    """
    failing = getattr(sys, "last_type", None) is not None  # the script ends with an uncaught exception
    running, groups = list(_running.values()), False
    _running.clear()
    failed = [pipeline for pipeline in running if pipeline.executor.failure is not None]
    over, good = failing or _over(failed), list[bool]()
    for pipeline in running:
        use_device(pipeline.world.device)  # the pipeline may have been made in another thread
        good.append(pipeline.end(failing=failing))
    if running and joined_by_us():
        together = all(good) and not failing and all(pipeline.executor.failure is None for pipeline in running)
        on_gpu = any(pipeline.world.device.type == "cuda" for pipeline in running)
        groups = not _in_time(lambda: _leave(running[0].world, together=together, on_gpu=on_gpu))
    if groups or not all(good) or not over:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_CODE)


def _over(failed: Sequence[_Running]) -> bool:
    """Abort the transports of failed pipelines, so that actions waiting for messages end; return True if that was done.

    Returns False, without aborting, if the script was not given the error of a failure, or if not all ranks reach their
    end within twice ``PATIENCE_S`` seconds, so that a peer may still wait for this rank.
    """
    worlds = [pipeline.world for pipeline in failed if pipeline.world.size > 1]
    if any(pipeline.executor.untold for pipeline in failed):
        return False
    if worlds and not worlds[0].meet(timedelta(seconds=2 * PATIENCE_S)):
        print(
            f"tawpipe: a step failed, and other ranks may be waiting for it: {failed[0].executor.failure}",
            file=sys.stderr,
        )
        return False
    for pipeline in failed:
        pipeline.executor.transport.abort()
    return True


def _leave(world: World, *, together: bool, on_gpu: bool) -> None:
    """Leave all process groups.

    NCCL's destruction waits for the peers. If they do not all reach this point in time, or if ``together`` is False,
    GPU groups are aborted instead.

    Args:
        world: Processes of the run.
        together: True if nothing has failed on this rank.
        on_gpu: True if a pipeline used a GPU.
    """
    use_device(world.device)
    if on_gpu and not (together and world.meet(timedelta(seconds=PATIENCE_S))):
        from torch.distributed.distributed_c10d import _abort_process_group

        _abort_process_group()
    else:
        dist.destroy_process_group()


def _in_time(act: Callable[[], None]) -> bool:
    """Run ``act`` in a thread; return True if it ends, even with an error, within twice ``PATIENCE_S`` seconds."""
    thread = threading.Thread(target=_quietly, args=(act,), daemon=True)
    thread.start()
    thread.join(2 * PATIENCE_S)
    return not thread.is_alive()


def _quietly(act: Callable[[], None]) -> None:
    """Call ``act``. If it raises an Exception, print that to standard error and return normally."""
    try:
        act()
    except Exception as error:
        print(f"tawpipe: leaving the process groups: {error}", file=sys.stderr)


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_running.clear)  # a forked child does not own the parent's lanes and groups
