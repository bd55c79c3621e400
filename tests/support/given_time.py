"""Time that passes only when a test says so."""

from __future__ import annotations

import threading

import pytest

from tawpipe.runtime.watch import watchdog


class GivenTime:
    """Stands for ``time`` in a module; knows how often a watchdog has looked at it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._looks = 0
        self._others = threading.enumerate()
        """Threads of before, among them watchdogs of pipelines that other tests have left open."""
        self._looked = threading.Condition()

    def monotonic(self) -> float:
        thread = threading.current_thread()
        if thread.name == "watchdog" and thread not in self._others:
            with self._looked:
                self._looks += 1
                self._looked.notify_all()
        return self.now

    def looked(self) -> None:
        """Return when a look that began after the call has ended: the next one has begun then."""
        with self._looked:
            looks = self._looks + 2
            assert self._looked.wait_for(lambda: self._looks >= looks, 60), "the watchdog looks no more"


def given_time(monkeypatch: pytest.MonkeyPatch) -> GivenTime:
    """Of watchdogs, which look at it all the time and do not wait for last words."""
    time = GivenTime()
    monkeypatch.setattr(watchdog, "time", time)
    monkeypatch.setattr(watchdog, "LOOK_S", 0.01)
    monkeypatch.setattr(watchdog, "LAST_WORDS_S", 0.01)
    return time
