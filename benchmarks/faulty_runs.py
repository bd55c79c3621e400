"""Small runs that break: started by forking, ended as a launcher ends them, looked at for what they leave behind."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from small import make_small
from tawpipe.checkpoint.format import read_manifest
from tawpipe.checkpoint.names import complete_states
from tawpipe.train.settings.config import TrainConfig, load_config

TOPOLOGIES = {
    "1 x 2": (1, 2, ()),
    "2 x 1": (2, 1, ()),
    "2 x 2": (2, 2, ()),
    "2 x 2 striped": (2, 2, ("--schedule.strategy", "tawpipe-striped")),
    "2 x 2 hsdp": (2, 2, ("--schedule.strategy", "hsdp")),
    "2 x 2 memory": (2, 2, ("--checkpoint.memory-every", "1")),
}
STEPS, EVERY = 6, 2
LIMIT_S = 90.0
"""Of a start; then everything is ended by force, and the case has failed."""
SETTLE_S = 10.0
"""For what a run has left: a killed process takes a moment to go, and so do its children."""
PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Start:
    """One start of all processes.

    Args:
        codes: exit codes, -n for signal n.
        first_step_s: from the start to the first line that says a step is done; None if there was none.
    """

    codes: list[int]
    seconds: float
    forced: bool
    output: str
    first_step_s: float | None = None
    peaks: dict[str, list[float]] = field(default_factory=dict)


class Bench:
    """A corpus, a model, and runs with them.

    Args:
        folder: for everything.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.memory = folder / "memory"
        self.memory.mkdir()
        make_small(folder, files=40, layers=2, positions=64)

    def words(self, output: Path, *, steps: int, every: int) -> list[str]:
        """For ``tawpipe train``: a run that does nothing but steps and checkpoints."""
        return [
            *("--data", str(self.folder / "corpus" / "*.txt"), "--model", str(self.folder / "model")),
            *("--vocab-size", "400", "--sequence-length", "32", "--global-batch", "4", "--steps", str(steps)),
            *("--checkpoint.every", str(every), "--checkpoint.keep", "0", "--checkpoint.memory-dir", str(self.memory)),
            *("--evaluation.every", "0", "--sample.tokens", "0", "--plan", "none", "--export.enabled", "false"),
            *("--log.trackers", "none", "--log.every", "1", "--device", "cpu"),
            *("--cache-dir", str(self.folder / "cache"), "--output", str(output)),
        ]

    def config(self, output: Path, topology: str, *words: str) -> TrainConfig:
        nodes, local, more = TOPOLOGIES[topology]
        limits = ("--timeouts.first-step-s", "20", "--timeouts.step-s", "8", "--timeouts.save-s", "12")
        shape = ("--nodes", str(nodes), "--nproc", str(nodes * local), "--max-restarts", "4")  # of which faults speak
        return load_config([*self.words(output, steps=STEPS, every=EVERY), *limits, *shape, *more, *words])

    def start(self, config: TrainConfig, restart: int, *, watch: bool = False) -> Start:
        """Fork the processes, and end all when one has failed, as the launcher does."""
        assert config.nodes is not None and config.nproc is not None
        local = config.nproc // config.nodes
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log = Path(config.output).parent / f"{Path(config.output).name}-{restart}.log"
        begin = time.perf_counter()
        pids = []
        gc.freeze()
        for rank in range(config.nproc):
            variables = {
                "RANK": rank,
                "WORLD_SIZE": config.nproc,
                "LOCAL_RANK": rank % local,
                "LOCAL_WORLD_SIZE": local,
                "GROUP_RANK": rank // local,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "TORCHELASTIC_RESTART_COUNT": restart,
                "TAWPIPE_LOCAL_LAUNCHER": 1,
            }
            pid = os.fork()
            if pid == 0:
                _child(config, variables, log)
            pids.append(pid)
        return _wait(pids, begin, log, watch=watch)


def _child(config: TrainConfig, variables: dict[str, Any], log: Path) -> None:
    """One process of a run; never returns."""
    code = 70
    try:
        os.setsid()
        os.environ.update({name: str(value) for name, value in variables.items()})
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        from tawpipe.errors import RunError, UserError
        from tawpipe.train.run import run

        torch.set_num_threads(1)
        try:
            code = run(config)
        except UserError as error:
            print(f"tawpipe: error: {error}", flush=True)
            code = 2
        except RunError as error:
            print(f"tawpipe: error: {error}", flush=True)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pids: Sequence[int], begin: float, log: Path, *, watch: bool) -> Start:
    codes: dict[int, int] = {}
    failed_at: float | None = None
    first_step: float | None = None
    forced, told, peaks = False, 0, {"rss_mb": [], "files": []}
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        now = time.perf_counter()
        if first_step is None and log.exists() and "\nstep" in log.read_text(errors="replace"):
            first_step = now - begin
        if watch and pids[0] not in codes:
            _sample(pids[0], peaks)
        if any(codes.values()) and failed_at is None:
            failed_at = now
        if failed_at is not None and told < 3 and now - failed_at > (1.0, 2.2, 7.0)[told]:
            for pid in pids:
                if pid not in codes:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL if told == 2 else signal.SIGTERM)
            told += 1
        if now - begin > (3600 if watch else LIMIT_S):
            forced = True
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.5 if watch else 0.02)
    text = log.read_text(errors="replace") if log.exists() else ""
    return Start([codes[pid] for pid in pids], time.perf_counter() - begin, forced, text, first_step, peaks)


def _sample(pid: int, peaks: dict[str, list[float]]) -> None:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        resident = next(line for line in lines if line.startswith("VmRSS:"))
        peaks["files"].append(float(sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())))
        peaks["rss_mb"].append(int(resident.split()[1]) / 1024)


def fingerprint(output: Path) -> list[str]:
    """Of the newest checkpoint: the checksums of its files."""
    found = complete_states(output / "checkpoints")
    return [found[-1].name, *(entry["sha256"] for entry in read_manifest(found[-1])["files"])] if found else []


def shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def adopt_strays() -> None:
    """Processes whose parent has ended become children of this one from now on."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def left_behind(output: Path, bench: Bench, memory_before: set[str]) -> list[str]:
    """Whatever should not be there when a run has ended well, looked at until it is gone, for ``SETTLE_S`` at most."""
    end = time.perf_counter() + SETTLE_S
    while True:
        left = _shared_memory_nobody_uses(memory_before) + [path.name for path in bench.memory.iterdir()]
        whole = {path.name for path in complete_states(output / "checkpoints")}
        left += [path.name for path in (output / "checkpoints").iterdir() if path.name not in whole]
        left += [path.name for path in output.glob("*.new")]
        left += [f"process {pid}" for pid in _strays()]
        if not left or time.perf_counter() > end:
            return left
        time.sleep(0.1)


def _shared_memory_nobody_uses(before: set[str]) -> list[str]:
    """Return new files of shared memory that no living process has: other programs of this machine have some, too."""
    new = shared_memory() - before
    for process in Path("/proc").glob("[0-9]*") if new else ():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            mapped = (process / "maps").read_text()
            new = {name for name in new if f"/dev/shm/{name}\n" not in mapped}
            for handle in (process / "fd").iterdir():
                with contextlib.suppress(OSError):  # closed meanwhile
                    new.discard(str(handle.readlink()).removeprefix("/dev/shm/"))
    return sorted(new)


def _strays() -> list[int]:
    """Return the living processes that any start has left: they come to this one, see ``adopt_strays``."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:  # those that have ended by themselves
            pass
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in children]
