"""The watchdog: a step that takes too long is reported by every rank, and the process ends."""

from __future__ import annotations

import io
import subprocess
import sys
import threading

import pytest

from given_time import given_time
from processes import wait_for
from tawpipe.runtime import watchdog
from tawpipe.runtime.lanes import Doing
from tawpipe.runtime.watchdog import Watchdog, write_record
from tawpipe.schedule.actions import Lane


class Never:
    done = False

    def wait(self) -> None:
        raise AssertionError


def test_a_step_that_takes_too_long_is_reported(monkeypatch):
    monkeypatch.setattr(watchdog, "LAST_WORDS_S", 0.01)
    said, ended = io.StringIO(), threading.Event()
    doing = {Lane.COMPUTE: Doing("FORWARD b3", 4.0, True), Lane.INTER_W: Doing("EXCHANGE <1:u7", 31.0, False)}
    dog = Watchdog(lambda: doing, "rank 3 (node 1)", limit_s=0.1, stream=said, end=ended.set)
    dog.watch("step 7", Never())
    assert ended.wait(60)
    text = said.getvalue()
    assert "tawpipe: stuck: rank 3 (node 1): step 7 has taken" in text
    assert "INTER_W is in EXCHANGE <1:u7, 31 s" in text and "COMPUTE waits to begin FORWARD b3" in text
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
    assert told.returncode == 1 and "step 7 has taken" in told.stdout, told


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
    dog = Watchdog(lambda: doing, "rank 0")
    assert any("waits for nobody" in line for line in dog.report("step 1", 9))


def test_a_step_that_ends_in_time_is_not_reported(monkeypatch):
    class Now(Never):
        done = True

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
