"""The end of a script that has not closed its pipelines: after its last line, ``sys.exit`` or an exception.

Lanes and background saves are threads inside C++ code, and an interpreter that goes down under such a thread aborts the
process ("terminate called"). So what is under way is waited for before that. What can never end, because something here
has failed or peers are gone, is given up after a stated time, and ends with the process. Steps that nobody has looked
at are judged: a script of one step, whose batch was wrong, ends with an error.

An error that a call has raised, and that the script has caught, is not judged again if all ranks come to their ends:
then none of them waits for another. Else the process ends with an error, so that its peers do so, too.
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
"""Seconds for what is under way after a failure, and for leaving groups; twice that for peers to come to their end."""
LOOK_S = 0.25
"""Seconds between two looks at a pipeline that has gone with its steps under way."""
EXIT_CODE = 1
"""Of a process whose last steps were no good or some of whose threads do not end, whatever code the script gave."""


class BackgroundSave(Protocol):
    """A background save."""

    @property
    def done(self) -> bool: ...


class UnreadSteps(Protocol):
    """Results of steps that nobody may have read."""

    def end(self) -> None: ...


@dataclass(frozen=True)
class _Running:
    executor: Executor
    steps: UnreadSteps
    savings: Sequence[BackgroundSave]
    world: World

    def end(self, *, failing: bool) -> bool:
        """Wait until nothing is under way, and judge the last steps; True if that is so and they were good."""
        given_up_at: float | None = None
        closed, ended = [False], True
        while not all(closed) or any(not saving.done for saving in self.savings):
            if given_up_at is None and (failing or self.executor.failure is not None):
                given_up_at = time.monotonic() + PATIENCE_S
            if given_up_at is not None and time.monotonic() > given_up_at:
                ended = False
                break
            closed = self.executor.end_lanes(0.05)
        if ended:
            self.executor.watchdog.close()
        if failing:  # the script's error says more
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
    """Look after a pipeline at the end of the process, unless what is returned has been called.

    Its lanes go on when nobody holds it any more: it is remembered until they are idle.
    """
    number = next(_numbers)
    _running[number] = _Running(executor, steps, savings, world)
    closed = weakref.finalize(pipeline, _forget, number)
    closed.atexit = False
    return lambda: (closed.detach(), _running.pop(number, None))


def _forget(number: int) -> None:
    """A pipeline has gone; from any thread, at any time: the garbage collector may call it within ``threading``, whose
    locks a thread of that module would wait for.
    """
    if not _forgotten(number):
        _thread.start_new_thread(_forget_later, (number,))


def _forget_later(number: int) -> None:
    while not _forgotten(number):
        time.sleep(LOOK_S)


def _forgotten(number: int) -> bool:
    """Let a pipeline go that has nothing under way; True if it is no longer remembered."""
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
    """Before the interpreter goes down."""
    failing = getattr(sys, "last_type", None) is not None  # an exception that nobody has caught
    running, groups = list(_running.values()), False
    _running.clear()
    failed = [pipeline for pipeline in running if pipeline.executor.failure is not None]
    over, good = failing or _over(failed), list[bool]()
    for pipeline in running:
        use_device(pipeline.world.device)  # it may have been made in another thread
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
    """End what still waits for messages of pipelines that have failed; False if the script does not know of a failure,
    or peers may wait for this rank.
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
    """Leave all groups. NCCL's destruction waits for the peers; where they do not come, its groups are aborted."""
    use_device(world.device)
    if on_gpu and not (together and world.meet(timedelta(seconds=PATIENCE_S))):
        from torch.distributed.distributed_c10d import _abort_process_group

        _abort_process_group()
    else:
        dist.destroy_process_group()


def _in_time(act: Callable[[], None]) -> bool:
    """True if ``act`` has ended, well or with an error, within twice ``PATIENCE_S``."""
    thread = threading.Thread(target=_quietly, args=(act,), daemon=True)
    thread.start()
    thread.join(2 * PATIENCE_S)
    return not thread.is_alive()


def _quietly(act: Callable[[], None]) -> None:
    try:
        act()
    except Exception as error:
        print(f"tawpipe: leaving the process groups: {error}", file=sys.stderr)


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_running.clear)  # lanes and groups are the parent's
