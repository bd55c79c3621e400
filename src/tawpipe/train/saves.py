"""Checkpoints of a run: when one begins, how it ended, and how long training stalled for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict

from tawpipe.checkpoint.resume import RunState
from tawpipe.checkpoint.save import Saving
from tawpipe.checkpoint.store import Disk, Memory, Store
from tawpipe.console import Console
from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.train.settings.config import TrainConfig

LOOK_EVERY = 10
"""Steps between checks of whether the current save has ended."""


class Saves:
    """Saves of a run's state to the disk and to the memory of the nodes; methods are called alike on all ranks.

    Args:
        memory: store for copies in the memory of the nodes; None without.
        state: returns the run's part of the state after a given step.

    ``step`` is the last step for which a checkpoint was begun. ``unsaved`` is the reason why this checkpoint could not
    be written, else ``""``.
    """

    def __init__(
        self,
        config: TrainConfig,
        console: Console,
        pipeline: Pipeline,
        disk: Disk,
        memory: Memory | None,
        state: Callable[[int], RunState],
    ) -> None:
        self.config, self.console, self.pipeline, self.disk, self.memory = config, console, pipeline, disk, memory
        self.step, self.unsaved = 0, ""
        self._state = state
        self._saving: Saving | None = None
        self._copying: Saving | None = None
        self._stalls: list[float] = []

    @property
    def stall_s(self) -> float | None:
        """Longest time in seconds for which training stalled for a checkpoint; None if there was no checkpoint."""
        return max(self._stalls, default=None)

    def after(self, step: int, *, save: bool) -> float:
        """Begin the saves that are due after ``step``, and return the seconds that this took.

        Args:
            step: number of steps done.
            save: True to save a checkpoint to disk; copies in memory follow ``checkpoint.memory_every``.
        """
        begin = time.perf_counter()
        if save:
            self.save(step)
        elif self._saving is not None and step % LOOK_EVERY == 0:
            self._end(only_if_ended=True)
        if self.memory is not None and step % self.config.checkpoint.memory_every == 0:
            self._copy(self.memory, step)
        return time.perf_counter() - begin

    def save(self, step: int) -> None:
        """Wait for the previous save, and begin a checkpoint on disk after ``step``.

        Without ``checkpoint.background``, also wait until it is written.
        """
        self._end(now=step)
        self.step = step
        self._saving = self._begin(self.disk, step)
        if not self.config.checkpoint.background:
            self._end()

    def finish(self) -> None:
        """Wait for the saves that are in progress, on disk and in memory, and report the outcome of the one on disk.

        Raises:
            RunError: a save has taken longer than ``timeouts.save_s``.
        """
        self._end()
        if self._copying is not None:
            self._copying.wait(self.config.timeouts.save_s)

    def _copy(self, memory: Memory, step: int) -> None:
        """Wait for the previous copy, and begin to copy the state into the memory of the nodes."""
        if self._copying is not None and (problem := self._copying.wait(self.config.timeouts.save_s).problem):
            self.console.notice(f"no copy in memory before step {step}; training continues without: {problem}")
        self._copying = self._begin(memory, step)

    def _begin(self, store: Store, step: int) -> Saving:
        """Copy the state after ``step``, and begin to write it into ``store`` in the background.

        Waits for all issued steps and for an earlier save into this store."""
        limit_s = self.config.timeouts.save_s
        copies = self.config.checkpoint.frozen == "copy"
        return self.pipeline.start_saving(store, run=asdict(self._state(step)), limit_s=limit_s, copy_frozen=copies)

    def _end(self, *, only_if_ended: bool = False, now: int = 0) -> None:
        """Wait for the current save and report its outcome, if a save is in progress.

        Args:
            only_if_ended: return at once unless the save has ended on all ranks.
            now: step whose save waits for the current one; 0 for none.
        """
        if self._saving is None:
            return
        if only_if_ended and not all(self.pipeline.world.gather_numbers(float(self._saving.done))):
            return
        begin = time.perf_counter()
        saved, self._saving = self._saving.wait(self.config.timeouts.save_s), None
        waited = time.perf_counter() - begin
        if now and waited > 1:
            self.console.notice(
                f"checkpoint of step {self.step}: writing took {saved.written_s:.1f} s; the next one, after "
                f"step {now}, waited {waited:.1f} s for it"
            )
        self.unsaved = saved.problem
        if saved.problem:
            self.console.notice(f"{saved.folder} could not be written; training continues without it: {saved.problem}")
            return
        if saved.left:
            self.console.notice(f"an old checkpoint was not removed: {saved.left}")
        self._stalls.append(saved.staged_s)
