"""The watchdog: a step that takes too long is reported by every rank, and the process ends."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from given_time import given_time
from processes import wait_for
from tawpipe.environment import ENDS
from tawpipe.runtime import watchdog
from tawpipe.runtime.lanes import Doing
from tawpipe.runtime.watchdog import Watchdog, write_record
from tawpipe.schedule.actions import Lane


class Never:
    done = False

    def wait(self) -> None:
        raise AssertionError


class Now(Never):
    done = True


def test_a_step_that_takes_too_long_is_reported(monkeypatch):
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
    assert "waits for nobody" not in text


@pytest.mark.slow
def test_it_watches_where_errors_have_no_descriptor():
    """In a notebook ``sys.stderr`` is a stream of its own."""
    told = subprocess.run(
        [
            sys.executable,
            "-c",
            "import io, sys, time; sys.stderr = io.StringIO()\n"
            "from tawpipe.runtime import watchdog\n"
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


def test_a_hanging_rank_writes_what_nccl_was_given(tmp_path, monkeypatch):
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
def test_the_rank_that_others_wait_for_says_so(doing):
    standing = Watchdog(lambda: doing, "rank 0").standing("step 1", late=True)
    assert standing.text.startswith("waits for nobody") and not standing.waits


def test_without_an_order_to_end_it_reports_again_at_twice_the_time(monkeypatch):
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
def test_nothing_is_ended_in_a_debugger_or_a_notebook(monkeypatch, where):
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
        dog.others = SimpleNamespace(ask=False, gather=lambda own: {0: own, 1: other})  # type: ignore[assignment]
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


def test_the_verdict_is_left_for_a_launcher_before_the_process_ends(monkeypatch):
    """As torchrun would blame the rank that has ended first."""
    monkeypatch.setattr(watchdog, "LAST_WORDS_S", 0.5)
    said, ended = io.StringIO(), threading.Event()
    dog = Watchdog(dict, "rank 0", limit_s=0.1, stream=said, end=ended.set)
    dog.others = SimpleNamespace(ask=False, gather=lambda own: {0: own, 1: own})  # type: ignore[assignment]
    left: list[str] = []
    dog.leave_words = left.append
    dog.watch("step 7", Never())
    assert ended.wait(60) and left[0].startswith("no rank has failed; step 7 took longer than 0 s")
    assert f"all ranks: {left[0]}" in said.getvalue()


def test_a_rank_in_no_step_answers_and_says_where_its_script_is():
    """All others wait for it, and it is the only one that knows why."""
    said, asked = io.StringIO(), []
    gather = lambda own: asked.append(own) or {0: own, 1: None}  # noqa: E731
    dog = Watchdog(dict, "rank 0", limit_s=0.1, ends=False, stream=said)
    dog.others = SimpleNamespace(ask=True, gather=gather)  # type: ignore[assignment]
    dog.watch("step 7", Now())
    assert wait_for(lambda: "all ranks: " in said.getvalue())
    dog.close()
    assert "rank 0: no step, " in said.getvalue() and "processes.py" in said.getvalue()
    assert not asked[0].waits and not asked[0].late and "rank 1, which does not answer" in said.getvalue()


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
from tawpipe.runtime import watchdog

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
def test_a_process_whose_interpreter_stands_still_is_ended():
    """As by a call into NCCL or CUDA that keeps Python's lock and waits for a peer that is gone."""
    done = subprocess.run([sys.executable, "-c", DEAF], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stdout == "begin\n"
    assert "Timeout" in done.stderr
