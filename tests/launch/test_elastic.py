"""Two agents of torchrun on one machine, each for a node; one of them dies with all of its processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from runs import TIMEOUT_S, command, environment, rows
from small import make_small
from tawpipe.checkpoint.names import is_complete
from tawpipe.cli import main

STEPS = 30
QUIET = ("--export.enabled", "false", "--sample.tokens", "0", "--evaluation.every", "0", "--log.trackers", "none")
WORDS = ("--steps", str(STEPS), "--checkpoint.every", "10", "--resume", "auto", *QUIET)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("elastic")
    make_small(folder, files=60, layers=3, positions=256)
    return folder


def agent(home: Path, port: int, *, host: bool) -> subprocess.Popen[str]:
    """Of one node with two processes, of one or two nodes. It finds a lost one within three seconds.

    Args:
        host: whether it holds what the agents meet by, which must survive.
    """
    torchrun = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "2"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "elastic"),
        *("--rdzv-conf", f"is_host={host},last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=3"),
        *("--local-addr", "127.0.0.1", "--max-restarts", "3"),
    ]
    words = [*torchrun, *command(home, "run", *WORDS)]
    return subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def kill_all(pid: int) -> None:
    """A process and what it has started, as when a machine loses its power."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(pid, signal.SIGKILL)
        for child in children:
            kill_all(int(child))


@pytest.mark.slow
def test_torchrun_restarts_dead_processes(home):
    """Twice in a row, with the agent's one store: each start finds the processes of its own."""
    deaths = [f"rank={n % 2},step={3 + 2 * n},at=update,kind=kill,restart={n}" for n in range(2)]
    words = ["--steps", "10", "--checkpoint.every", "2", "--resume", "auto", *QUIET, "--inject", ";".join(deaths)]
    torchrun = [*(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3")]
    command_line = [*torchrun, *command(home, "again", *words)]
    done = subprocess.run(command_line, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"restart {n}:" in done.stdout for n in (1, 2))
    assert [row["step"] for row in rows(home, "again")] == list(range(1, 11))


@pytest.mark.slow
def test_run_continues_without_a_lost_node(home):
    """On the one that is left, from the newest checkpoint, with the losses of a run that lost nothing."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents = [agent(home, port, host=True)]
    said: list[str] = []
    moving = threading.Event()

    def listen() -> None:
        assert agents[0].stdout is not None
        for line in agents[0].stdout:
            said.append(line)
            if re.match(r"step ", line) and any(map(is_complete, home.glob("run/checkpoints/*"))):
                moving.set()

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    agents.append(agent(home, port, host=False))
    try:
        assert moving.wait(TIMEOUT_S), "".join(said)
        kill_all(agents[1].pid)
        assert agents[0].wait(TIMEOUT_S) == 0, "".join(said)
    finally:
        for one in agents:
            if one.poll() is None:
                kill_all(one.pid)
                one.wait()
    listener.join()
    text = "".join(said)
    assert text.index("4 processes = 2 nodes x 2") < text.index("2 processes = 1 node x 2")
    assert "resumed from" in text

    assert main(command(home, "alone", *WORDS, "--nproc", "1", "--device", "cpu")[2:]) == 0
    losses = [{row["step"]: row["loss"] for row in rows(home, name)} for name in ("run", "alone")]
    assert losses[0].keys() == losses[1].keys() == set(range(1, STEPS + 1))
    assert list(losses[0].values()) == pytest.approx(list(losses[1].values()), rel=1e-3)
