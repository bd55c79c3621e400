"""Workers forked from a launcher that has imported what they need: they are like those that are started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from processes import is_alive, wait_for
from tawpipe.launch import forked
from tawpipe.launch.forked import import_once

WORKER = """
import atexit, json, os, signal, sys, time
from pathlib import Path

here, act = Path(sys.argv[1]), sys.argv[2]
rank = os.environ["RANK"]
atexit.register(lambda: (here / f"{rank}.end").touch())
print(f"output of {rank}")
print(f"errors of {rank}", file=sys.stderr)
seen = {
    "name": __name__, "words": sys.argv[1:], "size": os.environ["WORLD_SIZE"], "threads": os.environ["OMP_NUM_THREADS"],
    "group": os.getpgid(0) == os.getpid(), "term": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
    "pid": os.getpid(), "parent": os.getppid(), "input": sys.stdin.read(),
    "counted": getattr(sys.modules.get("count"), "imports", 0),
    "restart": os.environ["TORCHELASTIC_RESTART_COUNT"],
}
(here / f"{rank}.part").write_text(json.dumps(seen))
(here / f"{rank}.part").rename(here / f"{rank}.json")
if act == "wait":
    time.sleep(60)
if act == "fail" and rank == "1":
    raise RuntimeError("not today")
if act == "again" and rank == "1" and seen["restart"] == "0":
    sys.exit(5)
"""
LAUNCHER = """
import sys
from tawpipe.launch.launcher import Shape, launch

assert "torch" not in sys.modules
command = [sys.executable, "-m", "worker", *sys.argv[1:]]
sys.exit(launch(command, Shape(1, 2), imports=["count"], grace_s=2.0, max_restarts=int(sys.argv[2] == "again")))
"""
COUNT = "import sys; imports = getattr(sys, 'imports', 0) + 1; sys.imports = imports"


def start(folder: Path, act: str, launcher: str = LAUNCHER) -> subprocess.Popen[str]:
    (folder / "worker.py").write_text(WORKER)
    (folder / "count.py").write_text(COUNT)
    path = os.pathsep.join([str(folder), *sys.path])
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"PYTHONPATH": path}
    return subprocess.Popen(
        [sys.executable, "-c", launcher, str(folder), act],
        env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def seen(folder: Path) -> list[dict]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_forked_workers_behave_as_started_workers(tmp_path: Path) -> None:
    launcher = start(tmp_path, "end")
    output, errors = launcher.communicate(timeout=60)
    assert (launcher.returncode, output, errors) == (0, "output of 0\n", "errors of 0\n")
    for rank, one in enumerate(seen(tmp_path)):
        assert one["parent"] == launcher.pid and one["counted"] == 1, "forked from what was imported once"
        assert (one["name"], one["words"], one["input"]) == ("__main__", [str(tmp_path), "end"], "")
        assert one["size"] == "2" and int(one["threads"]) >= 1 and one["group"] and one["term"]
        assert (tmp_path / f"{rank}.end").exists(), "what is to happen at the end does"


def test_failure_of_a_forked_worker_ends_the_others_and_is_reported_once(tmp_path: Path) -> None:
    launcher = start(tmp_path, "fail")
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert "rank 1 (node 0, local rank 1) ended with exit code 1: RuntimeError: not today" in errors
    assert not any(is_alive(one["pid"]) for one in seen(tmp_path))


def test_all_forked_workers_restart_after_one_has_died(tmp_path: Path) -> None:
    launcher = start(tmp_path, "again")
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 0 and "restart 1 of at most 1" in errors
    assert [(one["restart"], one["counted"]) for one in seen(tmp_path)] == [("1", 1)] * 2


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_forked_workers_end_with_their_launcher(tmp_path: Path, number: signal.Signals, code: int) -> None:
    launcher = start(tmp_path, "wait")
    assert wait_for(lambda: all((tmp_path / f"{rank}.json").exists() for rank in range(2)), 60)
    os.kill(launcher.pid, number)
    launcher.communicate(timeout=60)
    assert launcher.returncode == code
    assert wait_for(lambda: not any(is_alive(one["pid"]) for one in seen(tmp_path)))


def test_launcher_with_torch_imported_starts_workers_instead_of_forking(tmp_path: Path) -> None:
    """Its threads would not come along; torch stands for all that may have started some."""
    (tmp_path / "torch.py").write_text("")
    launcher = start(tmp_path, "end", LAUNCHER.replace('assert "torch" not in sys.modules', "import torch"))
    launcher.communicate(timeout=60)
    assert launcher.returncode == 0
    assert [one["counted"] for one in seen(tmp_path)] == [0, 0]


def test_import_once_does_nothing_if_workers_cannot_be_forked(monkeypatch) -> None:
    """torch may have computed here, in threads that do not come along."""
    before = dict(os.environ)
    monkeypatch.setitem(sys.modules, forked.NEVER_BEFORE, sys)
    assert not import_once(["json"], {"NEW": "1"}) and dict(os.environ) == before
    monkeypatch.delitem(sys.modules, forked.NEVER_BEFORE)
    assert not import_once([], {"NEW": "1"}) and dict(os.environ) == before
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not import_once(["json"], {"NEW": "1"}) and dict(os.environ) == before


def test_failed_import_is_left_to_the_workers_to_report(monkeypatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(forked.threading, "active_count", lambda: 1)
    monkeypatch.setattr(forked.gc, "freeze", lambda: None)
    monkeypatch.delitem(sys.modules, forked.NEVER_BEFORE, raising=False)
    assert not import_once(["json", "no_such_module_here"], {})
    assert import_once(["json"], {"NEW": "1"}) and os.environ["NEW"] == "1"
