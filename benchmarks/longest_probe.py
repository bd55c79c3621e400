"""Anonymous memory of a step: every side in fresh processes, which are watched from outside.

A process loads its side and trains on a short row, so that weights, gradients and the optimizer's states are there.
From then on the kernel's count of its anonymous pages is read every few milliseconds, and a step that takes more than
it may is ended there and then. What was too short to be seen is in the kernel's own record of the most resident pages,
which is cleared before the step, and of which pages of files are taken off. Open files in the side's folder are
counted by themselves; a folder in memory stands for the host's beside a device.
"""

from __future__ import annotations

import gc
import math
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

# Set before the processes start: freed blocks go back to the system at once, those of all sides alike.
os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ.setdefault("DS_ACCELERATOR", "cpu")

PAGE = os.sysconf("SC_PAGE_SIZE")
PRELOAD = ["torch", "transformers.models.llama.modeling_llama", "tawpipe", "longest_sides"]
EVERY_S, FILES_EVERY_S = 0.002, 0.25
LOADING_S = 300.0
THREADS = 1
"""Of a process: two that share a core wait for each other."""
HOST = Path("/dev/shm")
"""A file system in memory: the kernel counts what lies there with no process."""
MEMORY, SECONDS = "memory", "seconds"


class CannotMeasure(Exception):
    """A side that cannot run; its text says why."""


@dataclass(frozen=True)
class Job:
    """A side and the lengths that it trains on, one step each.

    Args:
        shape: the fields of ``longest_sides.Shape``.
        chunk: tokens of a layer's chunk, where ours has chunks.
        lengths: the last is measured.
        folder: where files may be made, except for those that stand for the host's memory.
    """

    side: str
    processes: int
    shape: dict[str, int]
    chunk: int
    lengths: tuple[int, ...]
    folder: Path


@dataclass(frozen=True)
class Reading:
    """The measured step.

    Args:
        peak_bytes: of anonymous memory above what was there before the step, of the process that took most.
        file_bytes: in open files, of all processes.
        seconds: of the step, or until it was ended.
        ended: what it took too much of, ``MEMORY`` or ``SECONDS``; empty if it took neither.
        losses, norms: of all steps.
    """

    tokens: int
    peak_bytes: int
    file_bytes: int
    seconds: float
    ended: str = ""
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()


def measure(job: Job, *, most_bytes: float = math.inf, most_seconds: float = math.inf) -> Reading:
    """Run a job, and end it where it takes more than it may.

    Raises:
        CannotMeasure: the side cannot run here.
        RuntimeError: it failed.
    """
    context = get_context("forkserver")  # torch is loaded once, and every process is fresh nevertheless
    context.set_forkserver_preload(PRELOAD)
    place = HOST if job.side.endswith("-host") else job.folder
    with tempfile.TemporaryDirectory(dir=place, prefix="inputs-") as folder:
        pipes, processes = [], []
        port = _free_port()
        try:
            for rank in range(job.processes):
                here, there = context.Pipe()
                process = context.Process(target=_work, args=(there, job, rank, port, folder), daemon=True)
                process.start()
                there.close()
                pipes.append(here)
                processes.append(process)
            for pipe in pipes:
                _receive(pipe, LOADING_S)
            return _watch(job, [process.pid or 0 for process in processes], pipes, folder, most_bytes, most_seconds)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _watch(
    job: Job,
    pids: Sequence[int],
    pipes: Sequence[connection.Connection],
    folder: str,
    most_bytes: float,
    most_seconds: float,
) -> Reading:
    before = [anonymous_bytes(pid) for pid in pids]
    peak, files, ended, results = 0, 0, "", [None] * len(pids)
    for pid in pids:
        clear_record(pid)
    for pipe in pipes:
        pipe.send("go")
    began = looked = time.monotonic()
    while None in results and not ended:
        time.sleep(EVERY_S)
        now = time.monotonic()
        peak = max(peak, *(anonymous_bytes(pid) - held for pid, held in zip(pids, before, strict=True)))
        if now - looked > FILES_EVERY_S:
            files, looked = max(files, sum(file_bytes(pid, folder) for pid in pids)), now
        for rank, pipe in enumerate(pipes):
            if results[rank] is None and pipe.poll():
                results[rank] = _receive(pipe, 0)
        ended = MEMORY if peak > most_bytes else SECONDS if now - began > most_seconds else ""
    if ended:
        return Reading(job.lengths[-1], peak, files, time.monotonic() - began, ended)
    peak = max(peak, *(most_anonymous_bytes(pid) - held for pid, held in zip(pids, before, strict=True)))
    files = max(files, sum(file_bytes(pid, folder) for pid in pids))
    seconds, steps = results[0] or (0.0, ())
    losses, norms = zip(*steps, strict=True)
    return Reading(job.lengths[-1], peak, files, seconds, MEMORY if peak > most_bytes else "", losses, norms)


def anonymous_bytes(pid: int) -> int:
    """Resident pages of a process that belong to no file and are not shared: RssAnon."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except (OSError, ValueError):  # it has ended, which its pipe will say
        return 0
    return (int(resident) - int(shared)) * PAGE


def clear_record(pid: int) -> None:
    """Have the kernel's record of the most resident pages begin anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def most_anonymous_bytes(pid: int) -> int:
    """The most that ``anonymous_bytes`` has been since ``clear_record``, or less by pages of files that came later."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    kilobytes = {words[0]: int(words[1]) for words in lines if words[-1] == "kB"}
    return (kilobytes["VmHWM:"] - kilobytes["RssFile:"] - kilobytes["RssShmem:"]) * 1024


def file_bytes(pid: int, folder: str) -> int:
    """Bytes on disk of the files in a folder that a process has open, those without a name included."""
    sizes: dict[int, int] = {}
    with suppress(OSError):
        for one in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if str(one.readlink()).startswith(folder):
                    there = one.stat()
                    sizes[there.st_ino] = there.st_blocks * 512
    return sum(sizes.values())


def _receive(pipe: connection.Connection, timeout_s: float) -> Any:
    if not pipe.poll(timeout_s):
        raise RuntimeError(f"nothing was heard of a process for {timeout_s:.0f} s")
    try:
        kind, said = pipe.recv()
    except EOFError:
        raise RuntimeError("a process ended without a word") from None
    if kind == "cannot":
        raise CannotMeasure(said)
    if kind == "failed":
        raise RuntimeError(said)
    return said


def _work(pipe: connection.Connection, job: Job, rank: int, port: int, folder: str) -> None:
    import torch

    from longest_sides import CannotRun, Shape, make_side, row
    from tawpipe.errors import UserError

    torch.set_num_threads(THREADS)
    here = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    here |= {"WORLD_SIZE": job.processes, "LOCAL_WORLD_SIZE": job.processes, "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {name: str(value) for name, value in here.items()}
    try:
        shape = Shape(**job.shape)
        side, rows = make_side(job.side, shape, job.chunk, folder), [row(shape, tokens) for tokens in job.lengths]
        results = [tuple(side.step(ids)) for ids in rows[:-1]]
        gc.collect()
        pipe.send(("loaded", None))
        pipe.recv()
        began = time.monotonic()
        results.append(tuple(side.step(rows[-1])))
        pipe.send(("done", (time.monotonic() - began, results)))
        pipe.recv()  # until it is killed: its files are looked at
    except (CannotRun, UserError) as error:
        pipe.send(("cannot", " ".join(str(error).split())))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
