"""A cluster with fast links inside its nodes and slow ones between them, out of one Linux machine.

See ``network`` for what a cluster consists of."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from tawpipe.environment import ERROR_PREFIX, LOCAL_LAUNCHER
from tawpipe.errors import RunError, UserError
from tawpipe.launch.launcher import Shape, launch
from tawpipe_lab.cluster import enter, network
from tawpipe_lab.cluster.guard import claimed, signals_held, signals_raise
from tawpipe_lab.cluster.links import Links, measure_links
from tawpipe_lab.cluster.network import INTERFACE, MAX_NODES, Traffic, own_traffic
from tawpipe_lab.cluster.rates import parse_latency, parse_rates

__all__ = ["DEFAULT_NAME", "Cluster", "Traffic", "own_traffic"]

DEFAULT_NAME = "tawpipe"

# Nodes are the name with a number, so a name that ends in a digit could mean those of another cluster.
_NAME = re.compile(r"[a-z](?:[a-z0-9_-]{0,30}[a-z_-])?")


@dataclass(frozen=True)
class Cluster:
    """A cluster that is up.

    Its network is closed: nodes reach each other and nothing else, not even the machine that they run on. They share
    its files and processors.

    Args:
        name: the prefix of its namespaces.
        rates: of every node's link, in bits per second; None for one that is not shaped. Empty if not known.
        latency_s: of a message between two nodes, besides what the machine takes.
    """

    name: str
    num_nodes: int
    rates: tuple[int | None, ...] = field(default=(), compare=False)
    latency_s: float = field(default=0.0, compare=False)

    @classmethod
    @contextlib.contextmanager
    def create(
        cls, nodes: int, *, rate: str | None, latency: str | None = None, name: str = DEFAULT_NAME
    ) -> Iterator[Cluster]:
        """A cluster for as long as the ``with`` block lasts: removed at its end, after an error and after signals.

        After ``kill -9`` of this process the workers that it launched end by themselves, and the next cluster of this
        name, or :meth:`remove`, takes away the rest.

        Args:
            nodes: at least one.
            rate: of the link of every node in each direction (``400mbit``), or of each (``400mbit,200mbit``); None or
                ``none`` leaves a link unshaped.
            latency: of a message from one node to another (``5ms``); None or ``none`` leaves it at what the machine
                takes.
            name: clusters of different names exist side by side.

        Raises:
            UserError: a setting that cannot work, no root, no iproute2, a kernel without tbf, or a name in use.
        """
        cluster = cls._wanted(nodes, rate, latency, name)
        with claimed(name), signals_raise():
            try:
                cluster._build()
                yield cluster
            finally:
                with signals_held():
                    network.remove(name)

    @classmethod
    def up(cls, nodes: int, *, rate: str | None, latency: str | None = None, name: str = DEFAULT_NAME) -> Cluster:
        """A cluster that stays until :meth:`remove`; a cluster of this name that is there already is replaced.

        Arguments and errors are those of :meth:`create`.
        """
        cluster = cls._wanted(nodes, rate, latency, name)
        with claimed(name), signals_raise():
            try:
                cluster._build()
            except BaseException:
                with signals_held():
                    network.remove(name)
                raise
        return cluster

    @classmethod
    def _wanted(cls, nodes: int, rate: str | None, latency: str | None, name: str) -> Cluster:
        """A cluster that may be built: all that can be wrong with it is found before anything is touched."""
        _check_name(name)
        if not 1 <= nodes <= MAX_NODES:
            raise UserError("--nodes", nodes, f"from 1 to {MAX_NODES}")
        cluster = cls(name, nodes, parse_rates(rate, nodes=nodes), parse_latency(latency))
        network.require()
        return cluster

    def _build(self) -> None:
        network.remove(self.name)
        network.build(self.name, self.rates, latency_s=self.latency_s)

    @classmethod
    def find(cls, name: str = DEFAULT_NAME) -> Cluster:
        """The cluster of this name that is up.

        Raises:
            UserError: there is none, or only what an interrupted ``up`` left of it.
        """
        _check_name(name)
        network.require()
        if not network.is_whole(name):
            raise UserError("--name", name, "a cluster that is up; `tawpipe lab up` makes one")
        return cls(name, len(network.namespaces(name)) - 1)

    @staticmethod
    def remove(name: str = DEFAULT_NAME) -> bool:
        """Removes the cluster of this name with every process in it, or what is left of it. False if nothing was.

        Raises:
            UserError: no root or no iproute2.
            RunError: a process does not end.
        """
        _check_name(name)
        network.require()
        existed = bool(network.namespaces(name))
        with signals_held():
            network.remove(name)
        return existed

    @property
    def nodes(self) -> tuple[str, ...]:
        """The namespaces of the nodes."""
        return tuple(f"{self.name}{node}" for node in range(self.num_nodes))

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of the nodes' links."""
        return tuple(network.address(node) for node in range(self.num_nodes))

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which a program in a node finds its link, and node 0."""
        return {"GLOO_SOCKET_IFNAME": INTERFACE, "MASTER_ADDR": self.addresses[0]}

    def links(self, sizes: Sequence[int]) -> Links | None:
        """What its links carry while nothing else runs, in messages of ``sizes`` bytes; None if there is one node.

        Raises:
            RunError: a node does not reach another one.
        """
        slowest = min((rate for rate in self.rates if rate is not None), default=None)
        return measure_links(self.nodes, slowest, sizes, latency_s=self.latency_s)

    def become(self, node: int, command: Sequence[str]) -> NoReturn:
        """Replaces this process by ``command`` in a node, with :meth:`environment`.

        Raises:
            UserError: no such node or program.
        """
        if not 0 <= node < self.num_nodes:
            raise UserError("NODE", node, f"from 0 to {self.num_nodes - 1}")
        if shutil.which(command[0]) is None:
            raise UserError("COMMAND", command[0], "a program that this machine has: nodes share its files")
        sys.stdout.flush()
        sys.stderr.flush()
        # Python ignores broken pipes, and what is ignored stays so in the program that follows.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        words = ["ip", "netns", "exec", self.nodes[node], *command]
        os.execve(network.program("ip"), words, {**os.environ, **self.environment})

    def launch(
        self,
        command: Sequence[str],
        *,
        local: int,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        grace_s: float = 5.0,
    ) -> None:
        """Runs ``num_nodes x local`` processes inside the nodes, under torchrun's variables, until all have ended.

        Ranks are numbered node by node. When a process fails the others are ended within ``grace_s``; when this process
        dies the kernel ends them. Standard output and error are treated as in :func:`tawpipe.launch.launcher.launch`:
        those of rank 0 are passed on, and on a failure the end of what the failed rank wrote is shown.

        Args:
            local: processes in each node.
            env: added to the environment, and stronger than what is set here (``OMP_NUM_THREADS=1``, for example).
            timeout_s: processes that take longer are ended, and the launch has failed.

        Raises:
            RunError: a process failed; names the rank that failed first, and its reason.
            KeyboardInterrupt, SystemExit: a signal came; all processes have been ended.
        """
        shape = Shape(self.num_nodes, self.num_nodes * local)
        entry = enter.RankOrders(
            ip=network.program("ip"),
            nodes=list(self.nodes),
            command=list(command),
            # Workers are told of no local launcher: to them these are nodes of a cluster.
            variables={"OMP_NUM_THREADS": "1", LOCAL_LAUNCHER: None, **self.environment, **(env or {})},
            timeout_s=timeout_s or 0.0,
        )
        # Isolated and without site packages, because it starts for every rank and needs none of them.
        words = [sys.executable, "-I", "-S", enter.__file__, entry.to_word()]
        heard, began = _Heard(), time.monotonic()
        code = launch(words, shape, grace_s=grace_s, errors=heard)
        if code == 128 + signal.SIGINT:
            raise KeyboardInterrupt
        if code in (128 + signal.SIGTERM, 128 + signal.SIGHUP):
            raise SystemExit(code)
        if code:
            late = timeout_s is not None and time.monotonic() - began >= timeout_s
            raise RunError((f"not done after {timeout_s:g} s: " if late else "") + heard.reason())


class _Heard(io.StringIO):
    """Standard error of a launch: passed on as it comes, and kept for the reason of a failure."""

    def write(self, text: str, /) -> int:
        sys.stderr.write(text)
        return super().write(text)

    def flush(self) -> None:
        sys.stderr.flush()

    def reason(self) -> str:
        """The line of the launcher's report that names the rank."""
        lines = self.getvalue().splitlines()
        reports = [line.removeprefix(ERROR_PREFIX) for line in lines if line.startswith(ERROR_PREFIX)]
        return reports[-1] if reports else "a process failed"


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise UserError("--name", name, "1 to 32 lower-case letters, digits, - and _, a letter first, no digit last")
