"""Trackers of a run, each in a thread of its own, so that a tracker cannot delay or end the training.

A tracker that raises, or that is too many rows behind, is reported once and disabled.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from tawpipe.console import LONGEST_PROBLEM
from tawpipe.files import replace_text
from tawpipe.train.saying.metrics import Value, finite
from tawpipe.train.settings.trackers import NONE, TRACKERS, Outcome, Samples, TrackedRun, Tracker

IDS = "trackers.json"
"""File in a run's output folder with the ids that trackers gave the run, so that they resume it."""
ROWS_WAITING = 2000
"""Number of waiting calls at which a tracker is disabled."""
CLOSING_S = 60.0
"""Seconds that a tracker gets at the end to write its data."""
Call = Callable[[Tracker], None]


class Tracking:
    """Trackers of a run. On ranks without trackers, all methods do nothing.

    Args:
        names: names from :data:`TRACKERS`, or ``none``.
        run: facts about the run; its ``id`` is read from the output folder.
        tell: called with the name of a disabled tracker and a line about it, in the thread that calls the methods.
        closing_s: seconds that each tracker gets at the end to write its data.
    """

    def __init__(
        self, names: Sequence[str], run: TrackedRun, tell: Callable[[str, str], None], *, closing_s: float = CLOSING_S
    ) -> None:
        self.outcome: Outcome = "finished"
        self._tell, self._closing_s = tell, closing_s
        self._path, self._lock = run.output / IDS, threading.Lock()
        self._ids: dict[str, str] = {}
        with suppress(OSError, ValueError, AttributeError):  # a damaged file is ignored
            content = json.loads(self._path.read_text(encoding="utf-8")) if names else {}
            self._ids = {name: id for name, id in content.items() if isinstance(id, str)}
        named = {name: replace(run, id=self._ids.get(name, "")) for name in names if name != NONE}
        self._workers = [_TrackerThread(name, known, self._note) for name, known in named.items()]

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Send the metrics of a step to the trackers, under the names of metrics.jsonl.

        A value by position or length is sent as ``name/part``. Numbers that are not finite are left out.
        """
        flat: dict[str, float] = {}
        for name, value in values.items():
            for part, number in value.items() if isinstance(value, Mapping) else [("", value)]:
                if (usable := finite(number)) is not None:
                    flat[f"{name}/{part}".rstrip("/")] = usable
        self._pass_on(lambda tracker: tracker.log(step, flat))

    def samples(self, step: int, samples: Samples) -> None:
        """Send prompts and the texts that the model wrote after them to the trackers."""
        if samples:
            self._pass_on(lambda tracker: tracker.log(step, {}, samples))

    def _note(self, name: str, id: str) -> None:
        """Write the id that a tracker gave the run to a file in the output folder; called by the tracker's thread."""
        with self._lock:
            if id and self._ids.get(name) != id:
                self._ids[name] = id
                self._path.parent.mkdir(parents=True, exist_ok=True)
                replace_text(self._path, json.dumps(self._ids, indent=1) + "\n")

    def _pass_on(self, call: Call) -> None:
        """Queue ``call`` for every tracker, and report trackers that have failed."""
        for worker in self._workers:
            worker.give(call)
        self._say_problems()

    def _say_problems(self) -> None:
        """Remove trackers that have failed, and report each of them."""
        for worker in [failed for failed in self._workers if failed.problem]:
            self._workers.remove(worker)
            words = f"disabled tracker {worker.name}; training continues without it: {worker.problem}"
            self._tell(worker.name, words)

    def close(self) -> None:
        """Wait until all trackers have written their data, at most ``closing_s`` seconds for each."""
        for worker in self._workers:
            worker.give(self.outcome)
        for worker in self._workers:
            worker.join(self._closing_s)
            if worker.is_alive() and not worker.problem:
                worker.problem = f"not ready within {self._closing_s:g} s at the end"
        self._say_problems()
        self._workers = []

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.outcome = "failed"
        self.close()


class _TrackerThread(threading.Thread):
    """Thread of one tracker. ``problem`` is the reason why it is disabled, else ``""``."""

    def __init__(self, name: str, run: TrackedRun, note: Callable[[str, str], None]) -> None:
        super().__init__(name=name, daemon=True)
        self.problem = ""
        self._run, self._note = run, note
        self._calls: queue.Queue[Call | Outcome] = queue.Queue(ROWS_WAITING)
        self.start()

    def give(self, call: Call | Outcome) -> None:
        """Queue a call, or the outcome that ends the thread; set ``problem`` if the queue is full."""
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self.problem = self.problem or f"it is {ROWS_WAITING} rows behind"

    def run(self) -> None:
        """Make the tracker, and run queued calls until an outcome arrives; an error sets ``problem`` and ends it."""
        try:
            tracker = TRACKERS[self.name](self._run)
            self._note(self.name, tracker.id)
            while callable(call := self._calls.get()):
                call(tracker)
            tracker.close(call)
        except BaseException as error:  # a library may raise anything, even SystemExit
            words = " ".join(str(error).split())[:LONGEST_PROBLEM]
            self.problem = self.problem or f"{type(error).__name__}: {words}"
