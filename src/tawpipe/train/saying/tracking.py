"""Trackers beside a run: each in a thread of its own, so that none can hold up or end the training.

A tracker that raises, or that has not taken the rows of many steps, is said once and left out.
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
"""The file in a run's output folder with what its trackers call it, so that it goes on there."""
ROWS_WAITING = 2000
"""Calls that a tracker may be behind before it is given up."""
CLOSING_S = 60.0
"""Seconds that a tracker is given at the end to write what it has."""
Call = Callable[[Tracker], None]


class Tracking:
    """The trackers of a run. On ranks that have none, all methods do nothing.

    Args:
        names: from :data:`TRACKERS`, or ``none``.
        run: its ``id`` is filled in from the output folder.
        tell: receives the name of a tracker that is left out, and the line about it; called by the thread that calls
            the methods.
        closing_s: seconds that each is given at the end to write what it has.
    """

    def __init__(
        self, names: Sequence[str], run: TrackedRun, tell: Callable[[str, str], None], *, closing_s: float = CLOSING_S
    ) -> None:
        self.outcome: Outcome = "finished"
        self._tell, self._closing_s = tell, closing_s
        self._path, self._lock = run.output / IDS, threading.Lock()
        self._ids: dict[str, str] = {}
        with suppress(OSError, ValueError, AttributeError):  # a damaged file is as good as none
            content = json.loads(self._path.read_text(encoding="utf-8")) if names else {}
            self._ids = {name: id for name, id in content.items() if isinstance(id, str)}
        named = {name: replace(run, id=self._ids.get(name, "")) for name in names if name != NONE}
        self._workers = [_TrackerThread(name, known, self._note) for name, known in named.items()]

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Pass on the numbers of a step, under the names of metrics.jsonl; what is no finite number is left out."""
        flat: dict[str, float] = {}
        for name, value in values.items():
            for part, number in value.items() if isinstance(value, Mapping) else [("", value)]:
                if (usable := finite(number)) is not None:
                    flat[f"{name}/{part}".rstrip("/")] = usable
        self._pass_on(lambda tracker: tracker.log(step, flat))

    def samples(self, step: int, samples: Samples) -> None:
        """Pass on prompts and what the model wrote."""
        if samples:
            self._pass_on(lambda tracker: tracker.log(step, {}, samples))

    def _note(self, name: str, id: str) -> None:
        """Keep what a tracker calls the run, in a file of its output folder; called by the tracker's thread."""
        with self._lock:
            if id and self._ids.get(name) != id:
                self._ids[name] = id
                self._path.parent.mkdir(parents=True, exist_ok=True)
                replace_text(self._path, json.dumps(self._ids, indent=1) + "\n")

    def _pass_on(self, call: Call) -> None:
        for worker in self._workers:
            worker.give(call)
        self._say_problems()

    def _say_problems(self) -> None:
        for worker in [failed for failed in self._workers if failed.problem]:
            self._workers.remove(worker)
            words = f"disabled tracker {worker.name}; training continues without it: {worker.problem}"
            self._tell(worker.name, words)

    def close(self) -> None:
        """Let all of them write what they have."""
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
    """The thread of one tracker. ``problem`` says why it takes nothing any more."""

    def __init__(self, name: str, run: TrackedRun, note: Callable[[str, str], None]) -> None:
        super().__init__(name=name, daemon=True)
        self.problem = ""
        self._run, self._note = run, note
        self._calls: queue.Queue[Call | Outcome] = queue.Queue(ROWS_WAITING)
        self.start()

    def give(self, call: Call | Outcome) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self.problem = self.problem or f"it is {ROWS_WAITING} rows behind"

    def run(self) -> None:
        try:
            tracker = TRACKERS[self.name](self._run)
            self._note(self.name, tracker.id)
            while callable(call := self._calls.get()):
                call(tracker)
            tracker.close(call)
        except BaseException as error:  # libraries raise what they like, SystemExit too
            words = " ".join(str(error).split())[:LONGEST_PROBLEM]
            self.problem = self.problem or f"{type(error).__name__}: {words}"
