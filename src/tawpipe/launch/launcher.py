"""Start of the workers on one machine; if one dies, all others are ended. This module does not import torch.

Workers find torchrun's variables in their environment, so that virtual nodes on one machine look like nodes of
torchrun. ``TAWPIPE_LOCAL_LAUNCHER`` tells them who started them. Three rules keep processes from being left behind:

* Every worker leads a process group of its own, and signals go to the group.
* A worker that fails ends the run: the others get SIGTERM at once, and SIGKILL after a grace period.
* The kernel kills a worker whose launcher has ended, for any reason (Linux).

The port for the rendezvous of the workers is reserved by a socket that is bound but does not listen. So no other
program gets the port, and the store of rank 0, which sets SO_REUSEADDR as well, can listen on it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from tawpipe.console import above_bar
from tawpipe.environment import (
    ERROR_PREFIX,
    EVERYONE,
    LAUNCH,
    LOCAL_LAUNCHER,
    LOOPBACK,
    RESTARTS,
    SECOND_S,
    STUCK,
    USER_ERROR,
    missing_cuda_variables,
)
from tawpipe.errors import UserError
from tawpipe.job_limits import processors
from tawpipe.launch.forked import ForkedWorker, import_once
from tawpipe.launch.gpus import Gpu
from tawpipe.launch.workers import StderrKeeper, WorkerFailure, first_cause
from tawpipe.streams import lossy

THIS_LAUNCH = secrets.token_hex(8)
ENDED_BY = {signal.SIGINT: "interrupted", signal.SIGHUP: "ended because the terminal was closed"}
"""Words for signals that people send. Other signals, which a scheduler sends, are named."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Shape:
    """Processes on this machine, and the nodes that they are grouped into."""

    nodes: int
    nproc: int

    @property
    def local_size(self) -> int:
        return self.nproc // self.nodes

    def position(self, rank: int) -> str:
        return f"rank {rank} (node {rank // self.local_size}, local rank {rank % self.local_size})"


def local_shape(nodes: int | None, nproc: int | None, *, num_gpus: int, emulates: bool = True) -> Shape:
    """Return the numbers of processes and nodes on this machine, for the values of ``--nodes`` and ``--nproc``.

    Args:
        nodes: number of nodes; None for a default that suits ``nproc``.
        nproc: number of processes; None for a default that suits ``nodes``.
        num_gpus: GPUs to use; 0 computes on the CPU.
        emulates: True to default to two nodes of two processes without GPUs; False for one node of one process.

    Raises:
        UserError: the processes cannot be grouped in this way, or there are more processes than GPUs.
    """
    if nproc is None:
        played = 4 if nodes is None or 4 % nodes == 0 else 2 * nodes
        nproc = num_gpus or (played if emulates else nodes or 1)
    if nodes is None:
        nodes = 2 if emulates and not num_gpus and nproc % 2 == 0 else 1
    if nproc % nodes:
        raise UserError("--nodes", nodes, f"a divisor of --nproc, which is {nproc}")
    if num_gpus and nproc > num_gpus:
        raise UserError("--nproc", nproc, f"at most {num_gpus}, one process for each GPU; or --device cpu")
    return Shape(nodes, nproc)


def worker_environment(
    shape: Shape, rank: int, *, port: int, gpus: Sequence[Gpu] = (), restart: int = 0
) -> dict[str, str]:
    """Return the environment variables of the worker ``rank`` that are added to the launcher's own. Nothing is set.

    Args:
        shape: processes and nodes of the run.
        rank: rank of the worker.
        port: TCP port of the rendezvous.
        gpus: one GPU for each worker; empty on CPUs.
        restart: number of restarts before.
    """
    variables = {
        "RANK": rank,
        "WORLD_SIZE": shape.nproc,
        "LOCAL_RANK": rank % shape.local_size,
        "LOCAL_WORLD_SIZE": shape.local_size,
        "GROUP_RANK": rank // shape.local_size,
        "GROUP_WORLD_SIZE": shape.nodes,
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": _threads(shape),
        RESTARTS: restart,
        LOCAL_LAUNCHER: 1,
        LAUNCH: THIS_LAUNCH,
    }
    if sys.platform.startswith("linux"):  # listen on the loopback interface only
        variables |= {name: "lo" for name in INTERFACES if name not in os.environ}
    if gpus:
        variables["CUDA_VISIBLE_DEVICES"] = gpus[rank].id
        variables |= missing_cuda_variables()
    return {name: str(value) for name, value in variables.items()}


def _threads(shape: Shape) -> str:
    """Return the launcher's OMP_NUM_THREADS, or an equal share of the processors for every worker."""
    return os.environ.get("OMP_NUM_THREADS") or str(max(1, processors() // shape.nproc))


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a free TCP port on the loopback address within the context, and yield its number.

    A bound socket that does not listen holds the port, so no other program gets it. A program that sets SO_REUSEADDR
    can listen on it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((LOOPBACK, 0))
        yield holder.getsockname()[1]


def launched_here() -> bool:
    """Return True if this process is its own launcher, so that no launcher watches it."""
    return os.environ.get(LAUNCH) == THIS_LAUNCH


@contextlib.contextmanager
def in_this_process(*, gpus: Sequence[Gpu] = ()) -> Iterator[None]:
    """Make this process the only worker of a run within the context, by setting a worker's environment variables.

    The earlier environment is restored at the end.

    Args:
        gpus: GPUs of this machine, of which the first is used; empty on a CPU.
    """
    before = dict(os.environ)
    with reserved_port() as port:
        os.environ.update(worker_environment(Shape(1, 1), 0, port=port, gpus=gpus))
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def launch(
    command: Sequence[str],
    shape: Shape,
    *,
    gpus: Sequence[Gpu] = (),
    grace_s: float = 5.0,
    patience_s: float = 0.0,
    max_restarts: int = 0,
    imports: Sequence[str] = (),
    errors: TextIO | None = None,
    last_words: Callable[[], str] | None = None,
) -> int:
    """Start ``command`` once for each process of ``shape``, wait until all have ended, and return the exit code.

    The standard output of rank 0 is shown, and that of other ranks is dropped. The standard error of rank 0 is shown as
    it arrives. The standard error of other ranks is kept for the report on a failure, which names the rank that failed
    first and its error.

    Args:
        command: program and arguments.
        shape: number of processes and nodes.
        gpus: one GPU for each process, or none.
        grace_s: seconds between SIGTERM and SIGKILL for workers that do not end.
        patience_s: seconds that workers have to end in good order after ctrl-C (passed on as SIGTERM), SIGTERM or
            SIGUSR1; 0 ends them at once. A second signal, one second later or more, ends them at once.
        max_restarts: number of times that all workers are started again after one has died.
        imports: modules that are slow to import. On CPUs, in a process that has not loaded torch, they are imported
            once and the workers are forked (forked.py); ``command`` must then be ``python -m ...``.
        errors: stream for reports; standard error by default.
        last_words: returns a line to print about a run that has failed or was ended early.

    Returns:
        0 if all workers succeeded. Otherwise the exit code of the worker that failed first (1 if a signal killed it),
        or 128 + n after signal n. After ctrl-C the code is 130 even if all workers have ended in good order, as the run
        is not complete.
    """
    errors = lossy(errors or above_bar(sys.stderr))
    forks = None
    for restart in range(max_restarts + 1):
        with reserved_port() as port:
            run = _Run(shape, grace_s=grace_s, patience_s=patience_s, errors=errors)
            with run.signals_noted():
                try:
                    if forks is None:
                        forks = not gpus and import_once(imports, {"OMP_NUM_THREADS": _threads(shape)})
                    run.start(command, port, gpus, restart, forks=forks)
                    code = run.wait()
                finally:
                    run.end_all()
        if code in (0, USER_ERROR) or run.signals or restart == max_restarts:
            if code not in (0, USER_ERROR) and last_words is not None:
                print(f"tawpipe: {last_words()}", file=errors, flush=True)
            return code or (128 + signal.SIGINT if signal.SIGINT in run.signals[:1] else 0)
        print(f"tawpipe: restart {restart + 1} of at most {max_restarts}", file=errors, flush=True)
    raise AssertionError


@dataclass
class _Run:
    """Workers of one start, watched by one thread."""

    shape: Shape
    grace_s: float
    patience_s: float
    errors: TextIO
    workers: list[subprocess.Popen[bytes] | ForkedWorker] = field(default_factory=list)
    keepers: list[StderrKeeper] = field(default_factory=list)
    failures: list[WorkerFailure] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    signals: list[int] = field(default_factory=list)
    again: bool = False
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    over: bool = False
    asked_at: float | None = None

    @contextlib.contextmanager
    def signals_noted(self) -> Iterator[None]:
        """Return a context in which signals to the launcher are recorded in ``signals`` instead of ending it.

        ``wait`` reads the list at places where workers can be ended.
        """
        caught = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        if self.patience_s:
            caught.append(signal.SIGUSR1)
        first_at = 0.0

        def note(number: int, _: object) -> None:
            nonlocal first_at
            self.again |= bool(self.signals) and (not self.patience_s or time.monotonic() - first_at >= SECOND_S)
            first_at = first_at or time.monotonic()
            self.signals.append(number)

        before = {number: signal.signal(number, note) for number in caught}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def start(self, command: Sequence[str], port: int, gpus: Sequence[Gpu], restart: int, *, forks: bool) -> None:
        """Start all workers, forked or as new processes, and begin to read their standard error."""
        die_with_launcher = _die_with(os.getpid())
        for rank in range(self.shape.nproc):
            variables = worker_environment(self.shape, rank, port=port, gpus=gpus, restart=restart)
            if forks:
                worker = ForkedWorker(command, variables, shown=rank == 0, first=die_with_launcher)
            else:
                worker = subprocess.Popen(
                    command,
                    env={**os.environ, **variables, "PYTHONUNBUFFERED": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=None if rank == 0 else subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    process_group=0,
                    preexec_fn=die_with_launcher,
                )
            assert worker.stderr is not None
            os.set_blocking(worker.stderr.fileno(), False)
            keeper = StderrKeeper(shown_on=self.errors if rank == 0 else None)
            self.workers.append(worker)
            self.keepers.append(keeper)
            self.selector.register(worker.stderr, selectors.EVENT_READ, keeper)

    def wait(self) -> int:
        """Wait until all workers have ended, and return the exit code. After a failure or a signal, end the rest.

        The cause is then printed."""
        while not self._all_ended():
            self._watch(0.05)
            if self.signals and self._in_good_order():
                continue
            if self.signals and not self._failed_by_itself():
                self._end_workers()
                number = signal.Signals(self.signals[0])
                words = ENDED_BY.get(number, f"received {number.name}")
                print(f"tawpipe: {words}", file=self.errors, flush=True)
                return 128 + self.signals[0]
            if self.failures:
                # Workers that lost a peer fail as well, and their output shows which was first. Wait for a worker that
                # has begun to fail, as it may be the cause.
                self._watch_until(self._all_ended, seconds=1.0)
                self._watch_until(lambda: not self._failing_workers(), seconds=self.grace_s)
                self._end_workers()
                return self._report()
        self._drain()
        for keeper in self.keepers:
            keeper.release()
        return 0

    def _in_good_order(self) -> bool:
        """Send a signal of the user to all workers, once; return True while they may still end in good order.

        Returns False without patience, after a second signal, after a failure, and for signals that are not passed on.
        """
        number = signal.Signals(self.signals[0])
        if not self.patience_s or self.again or number not in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            return False
        if self.asked_at is None:
            self.asked_at = time.monotonic()
            # SIGTERM, unlike SIGINT, ends workers that have no handler yet without a traceback.
            self._signal_groups(signal.SIGTERM if number == signal.SIGINT else number)
        return not self.failures and time.monotonic() - self.asked_at < self.patience_s

    def _failed_by_itself(self) -> bool:
        """Return True if a worker has failed after a signal, for another reason than the signal."""
        if self.asked_at is None or self.again:
            return False
        asked = [-number for number in (*self.signals, signal.SIGTERM)]
        return any(failure.returncode not in asked for failure in self.failures)

    def end_all(self) -> None:
        """End all workers, and close their pipes."""
        self._end_workers()
        for worker in self.workers:
            if worker.stderr is not None:
                worker.stderr.close()
        self.selector.close()

    def _all_ended(self) -> bool:
        return len(self.ended) == len(self.workers)

    def _failing_workers(self) -> list[int]:
        """Return the ranks that have begun to report a failure and have not ended."""
        return [r for r, keeper in enumerate(self.keepers) if r not in self.ended and keeper.failing_since is not None]

    def _watch(self, seconds: float) -> None:
        """Wait up to ``seconds`` for output of workers and read it; record which workers have ended or failed."""
        for key, _ in self.selector.select(seconds):
            self._read(key)
        for rank, worker in enumerate(self.workers):
            if rank not in self.ended and worker.poll() is not None:
                self.ended.add(rank)
                if worker.returncode:
                    self.failures.append(WorkerFailure(rank, worker.returncode, time.monotonic(), self.keepers[rank]))
        if not self.failures:
            for keeper in self.keepers:
                keeper.release(older_than_s=2.0)

    def _watch_until(self, done: Callable[[], bool], *, seconds: float) -> None:
        """Call ``_watch`` until ``done()`` is True, ``seconds`` are over, or a second signal has arrived."""
        end = time.monotonic() + seconds
        while not done() and time.monotonic() < end and not self.again:
            self._watch(0.05)

    def _read(self, key: selectors.SelectorKey) -> None:
        """Pass the output that is available in one pipe to its keeper; stop watching the pipe at its end."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(key.fd, 1 << 16):
                key.data.feed(chunk)
            self.selector.unregister(key.fileobj)

    def _drain(self) -> None:
        """Read the output that is left of ended workers. Does not wait for a pipe that a grandchild holds open."""
        for key in list(self.selector.get_map().values()):
            self._read(key)

    def _end_workers(self) -> None:
        """Send SIGTERM to all process groups twice, later SIGKILL; wait until the workers have ended.

        SIGKILL follows after the grace period; a second ctrl-C shortens it. Later calls do nothing. ``failures`` then
        does not include the ended workers."""
        if self.over:
            return
        self.over = True
        failed = list(self.failures)
        self._signal_groups(signal.SIGTERM)
        self._watch_until(self._all_ended, seconds=1.2)
        self._signal_groups(signal.SIGTERM)  # the first one asks for an orderly end; the second one ends at once
        self._watch_until(self._all_ended, seconds=self.grace_s)
        self._signal_groups(signal.SIGKILL)
        for worker in self.workers:
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may delay the end of a killed process
                worker.wait(timeout=self.grace_s)
        self._drain()
        self.ended = set(range(len(self.workers)))
        self.failures = failed

    def _signal_groups(self, number: signal.Signals) -> None:
        """Send a signal to the process group of every worker, as a worker that has ended may have left children."""
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.pid, number)

    def _report(self) -> int:
        """Print which worker failed first and why, and return the exit code of the run."""
        cause = first_cause(self.failures)
        if cause.returncode == USER_ERROR:
            print(cause.keeper.message(), file=self.errors, flush=True)
            return USER_ERROR
        stuck = [line for keeper in self.keepers[1:] for line in keeper.lines if line.startswith(STUCK)]
        for line in stuck:  # the line of rank 0 was shown already
            if not line.startswith(STUCK + EVERYONE):
                print(line, file=self.errors)
        if cause.ended_stuck:
            all_lines = [line for keeper in self.keepers for line in keeper.lines]
            verdicts = [line.removeprefix(STUCK + EVERYONE) for line in all_lines if line.startswith(STUCK + EVERYONE)]
            words = verdicts[-1] if verdicts else "no rank has failed; a step exceeded its time limit"
            print(f"{ERROR_PREFIX}{words}", file=self.errors, flush=True)
            return cause.returncode
        print(f"tawpipe: error: {self.shape.position(cause.rank)} {cause.reason()}", file=self.errors)
        for line in cause.keeper.tail(30):
            print(f"  | {line}", file=self.errors)
        self.errors.flush()
        return cause.returncode if cause.returncode > 0 else 1


def _die_with(launcher: int) -> Callable[[], None] | None:
    """Return a function that makes the kernel kill the process which calls it when ``launcher`` ends.

    A worker calls it between fork and exec. Returns None unless on Linux.

    Args:
        launcher: process id of the launcher.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def die_with_launcher() -> None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != launcher:
            os._exit(1)

    return die_with_launcher
