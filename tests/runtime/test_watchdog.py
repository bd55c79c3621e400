"""The watchdog: a step that takes too long is reported by every rank, and the process ends."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from given_time import given_time
from processes import wait_for
from tawpipe.environment import ENDS
from tawpipe.runtime.lanes import Doing
from tawpipe.runtime.watch import watchdog
from tawpipe.runtime.watch.stalls import BEGINNING, Others, Standing
from tawpipe.runtime.watch.watchdog import Watchdog, write_record
from tawpipe.schedule.actions import Lane


class Never:
    done = False

    def wait(self) -> None:
        raise AssertionError


class Now(Never):
    done = True


class Answers(Others):
    """Other ranks, made up."""

    ask: Any = False

    def __init__(self, ask: bool, gather: Callable[[Standing], dict[int, Standing | None]]) -> None:
        self.ask, self._gathered = ask, gather

    def gather(self, look: Callable[[], Standing], *, ask: bool) -> dict[int, Standing | None]:
        return self._gathered(look())


def test_overdue_step_is_reported_and_ends_the_process(monkeypatch):
    monkeypatch.setattr(watchdog, "LAST_WORDS_S", 0.01)
    said, ended = io.StringIO(), threading.Event()
    doing = {Lane.COMPUTE: Doing("FORWARD b3", 4.0, True), Lane.INTER_W: Doing("EXCHANGE <1:u7", 31.0, False)}
    messages = lambda label: {label: [1]}  # noqa: E731
    dog = Watchdog(lambda: doing, "rank 3 (node 1)", limit_s=0.1, messages=messages, stream=said, end=ended.set)
    dog.watch("step 7", Never())
    assert ended.wait(60)
    text = said.getvalue()
    assert "tawpipe: stuck: rank 3 (node 1): step 7, " in text and ENDS in text
    assert "INTER_W is in EXCHANGE <1:u7 with rank 1, 31 s" in text and "COMPUTE waits to begin FORWARD b3" in text
    assert "waits for no other rank" not in text


@pytest.mark.slow
def test_watchdog_works_without_a_stderr_descriptor():
    """In a notebook ``sys.stderr`` is a stream of its own."""
    told = subprocess.run(
        [
            sys.executable,
            "-c",
            "import io, sys, time; sys.stderr = io.StringIO()\n"
            "from tawpipe.runtime.watch import watchdog\n"
            "class Never: done = False\n"
            "watchdog.LAST_WORDS_S = 0.1\n"
            "watchdog.Watchdog(dict, 'rank 0', limit_s=0.2, stream=sys.stdout).watch('step 7', Never())\n"
            "time.sleep(60)",
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert told.returncode == 1 and "rank 0: step 7, " in told.stdout, told


def test_hanging_rank_writes_the_nccl_flight_record(tmp_path, monkeypatch):
    """That may hang as well, which must not keep the process. There is no NCCL here: what torch gives is made up."""
    c10d, asked = sys.modules["torch._C._distributed_c10d"], []
    dump = lambda **how: asked.append(how) or b"record"  # noqa: E731
    monkeypatch.setattr(c10d, "_dump_nccl_trace", dump, raising=False)
    monkeypatch.setattr(watchdog, "LAST_WORDS_S", 0.1)
    said, ended = io.StringIO(), threading.Event()
    dog = Watchdog(dict, "rank 3", limit_s=0.1, stream=said, end=ended.set)
    dog.last_words = lambda step: write_record(tmp_path / "flight", 3)
    dog.watch("step 7", Never())
    assert ended.wait(60)
    assert wait_for(lambda: f"rank 3: the flight record is in {tmp_path}" in said.getvalue())
    assert (tmp_path / "flight" / "rank_3").read_bytes() == b"record" and asked[0]["includeStackTraces"] is False
    (tmp_path / "file").touch()
    assert "could not be written" in write_record(tmp_path / "file", 3)
    monkeypatch.delattr(c10d, "_dump_nccl_trace")
    assert write_record(tmp_path / "other", 3) == "" and not (tmp_path / "other").exists()

    ended.clear()
    dog = Watchdog(dict, "rank 3", limit_s=0.1, stream=said, end=ended.set)
    dog.last_words = lambda step: str(threading.Event().wait(60))
    dog.watch("step 7", Never())
    assert ended.wait(60)


@pytest.mark.parametrize("doing", [{}, {Lane.COMPUTE: Doing("FORWARD b3", 4.0, False)}])
def test_rank_that_waits_for_no_other_reports_so(doing):
    standing = Watchdog(lambda: doing, "rank 0").standing("step 1", late=True)
    assert standing.text.startswith("waits for no other rank") and not standing.waits


def test_watchdog_that_may_not_end_reports_again_at_doubled_times(monkeypatch):
    clock, said = given_time(monkeypatch), io.StringIO()
    dog = Watchdog(dict, "rank 0", limit_s=10.0, ends=False, stream=said, end=lambda: pytest.fail("it ended"))
    dog.watch("step 7", Never())
    counts = []
    for clock.now in (9.0, 11.0, 19.0, 21.0, 39.0, 41.0):
        clock.looked()
        counts.append(said.getvalue().count("rank 0: step 7, "))
    assert counts == [0, 1, 1, 2, 2, 3] and ENDS not in said.getvalue()
    dog.close()


@pytest.mark.parametrize("where", ["a debugger", "an interactive session", "a debugger on another rank"])
def test_watchdog_ends_nothing_in_a_debugger_or_notebook(monkeypatch, where):
    clock, said, ended = given_time(monkeypatch), io.StringIO(), threading.Event()
    monkeypatch.setattr(watchdog, "LAST_WORDS_S", 0.2)
    dog = Watchdog(dict, "rank 0", limit_s=10.0, stream=said, end=ended.set)
    trace = sys.gettrace()
    if where == "an interactive session":
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    elif where == "a debugger":
        frame = sys._getframe()
        frame.f_trace = lambda *_: None  # as pdb leaves it at its prompt
        sys.settrace(lambda *_: None)
    else:
        other = replace(dog.standing("step 7", late=True), held="a debugger")
        dog.hear(Answers(False, lambda own: {0: own, 1: other}))
    try:
        dog.watch("step 7", Never())
        clock.now = 11.0
        assert wait_for(lambda: "rank 0: step 7, " in said.getvalue())
        for _ in range(3):
            clock.looked()
    finally:
        sys.settrace(trace)
        sys._getframe().f_trace = None
    assert not ended.is_set()
    assert (ENDS in said.getvalue()) == (where == "a debugger on another rank")
    dog.close()


def test_watchdog_leaves_its_verdict_for_the_launcher_before_the_end(monkeypatch):
    """As torchrun would blame the rank that has ended first."""
    monkeypatch.setattr(watchdog, "LAST_WORDS_S", 0.5)
    said, ended = io.StringIO(), threading.Event()
    dog = Watchdog(dict, "rank 0", limit_s=0.1, stream=said, end=ended.set)
    dog.hear(Answers(False, lambda own: {0: own, 1: own}))
    left: list[str] = []
    dog.leave_words = left.append
    dog.watch("step 7", Never())
    assert ended.wait(60) and left[0].startswith("no rank has failed; step 7 took longer than 0 s")
    assert f"all ranks: {left[0]}" in said.getvalue()


@pytest.mark.parametrize("watches", [True, False])
def test_rank_outside_a_step_answers_with_the_line_of_its_script(watches):
    """All others wait for it, and it is the only one that knows why; also if no step has begun here yet."""
    said, asked = io.StringIO(), []
    dog = Watchdog(dict, "rank 0", limit_s=3600.0, ends=False, stream=said)
    dog.hear(Answers(True, lambda own: asked.append(own) or {0: own, 1: None}))
    if watches:
        dog.watch("step 7", Now())
    assert wait_for(lambda: "all ranks: " in said.getvalue())
    dog.close()
    assert "rank 0: no step, " in said.getvalue() and "processes.py" in said.getvalue()
    assert not asked[0].waits and not asked[0].late and "rank 1, which does not answer" in said.getvalue()


def test_answer_to_other_ranks_does_not_delay_the_own_report(monkeypatch):
    """A rank answers in a step that has just begun, and its own report of that step comes no later for it."""
    clock, said = given_time(monkeypatch), io.StringIO()
    others = Answers(True, lambda own: {0: own, 1: own})
    dog = Watchdog(dict, "rank 0", limit_s=1000.0, ends=False, stream=said)
    dog.watch("step 7", Never())
    dog.hear(others)
    assert wait_for(lambda: "step 7, 0 s; " in said.getvalue())
    others.ask, clock.now = False, 1001.0
    assert wait_for(lambda: "step 7, 1001 s, the limit is 1000 s" in said.getvalue())
    dog.close()


class DeafStore:
    """Store whose process has stopped: no call returns."""

    def __init__(self) -> None:
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        threading.Event().wait()


@pytest.mark.parametrize("ends", [True, False])
def test_unresponsive_store_prevents_neither_report_nor_end(monkeypatch, ends):
    monkeypatch.setattr(watchdog, "LOOK_S", 0.01)
    monkeypatch.setattr(watchdog, "LAST_WORDS_S", 0.01)
    said, ended, store = io.StringIO(), threading.Event(), DeafStore()
    dog = Watchdog(dict, "rank 1", limit_s=0.1, ends=ends, stream=said, end=ended.set)
    dog.hear(Others(lambda: store, 1, 2))
    assert wait_for(lambda: store.calls > 0)
    dog.watch("step 7", Never())
    assert wait_for(lambda: said.getvalue().count("rank 1: step 7, ") == (1 if ends else 3), 20)
    assert ended.wait(20) if ends else not ended.is_set()
    dog.close()


def test_closed_store_is_asked_only_once(monkeypatch):
    """Torch prints each time that it has gone; and that other ranks have ended is no news to a healthy one."""
    clock, said, store = given_time(monkeypatch), io.StringIO(), Mock()
    store.add.side_effect = RuntimeError("gone")
    dog = Watchdog(dict, "rank 1", limit_s=10.0, ends=False, stream=said)
    dog.hear(Others(lambda: store, 1, 2))
    dog._listener.join(20)
    dog.watch("step 7", Never())
    clock.now = 11.0
    assert wait_for(lambda: "rank 1: step 7, " in said.getvalue())
    dog.close()
    assert store.add.call_count == 1 and "could not be asked" not in said.getvalue()


def test_lane_that_moved_between_two_looks_is_reported_as_moving():
    doing = {Lane.COMPUTE: Doing("FORWARD b3", 4.0, False), Lane.INTER_W: None}
    dog = Watchdog(lambda: doing, "rank 0", limit_s=10.0)
    before = dog._at()
    doing[Lane.COMPUTE] = Doing("FORWARD b3", 5.0, False)
    assert not dog.standing("step 1", late=True, before=before).moves
    doing[Lane.INTER_W] = Doing("EXCHANGE", 0.0, True)
    assert dog.standing("step 1", late=True, before=before).moves


def test_rank_at_the_beginning_of_a_step_waits_for_missing_ranks():
    dog = Watchdog(dict, "rank 0", limit_s=10.0)
    dog._others = Others(Mock, 0, 3)
    standing = dog.standing(BEGINNING, late=True)
    assert standing.waits and standing.messages == {BEGINNING: [1, 2]}
    assert standing.text == "waits: not all ranks have reached the beginning of a step"


def test_a_step_that_ends_in_time_is_not_reported(monkeypatch):
    said, clock = io.StringIO(), given_time(monkeypatch)
    dog = Watchdog(dict, "rank 0", limit_s=0.3, stream=said, end=lambda: None)
    for _ in range(4):
        dog.watch("step", Now())
        clock.looked()
        clock.now += 0.2
    dog.close()
    assert not said.getvalue()


DEAF = """
import ctypes, sys
from tawpipe.runtime.watch import watchdog

watchdog.DEAF_S = 1.0
class Never:
    done = False
dog = watchdog.Watchdog(dict, "rank 0", limit_s=2.0)
dog.watch("step 7", Never())
watchdog.time.sleep(1)
print("begin", flush=True)
ctypes.PyDLL(None).sleep(60)
print("end", flush=True)
"""


@pytest.mark.slow
def test_process_with_a_blocked_interpreter_is_ended():
    """As by a call into NCCL or CUDA that keeps Python's lock and waits for a peer that is gone."""
    done = subprocess.run([sys.executable, "-c", DEAF], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stdout == "begin\n"
    assert "Timeout" in done.stderr
