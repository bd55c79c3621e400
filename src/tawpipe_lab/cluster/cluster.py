"""Cluster with fast links inside its nodes and slow links between them, made out of one Linux machine.

`tawpipe_lab.cluster.network` describes the parts of a cluster.
"""

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

# The namespace of a node is name + number, so a name that ends in a digit could collide with another cluster.
_NAME = re.compile(r"[a-z](?:[a-z0-9_-]{0,30}[a-z_-])?")


@dataclass(frozen=True)
class Cluster:
    """Cluster that is up.

    Its network is closed: nodes reach only each other, not even the machine that they run on. They share its files and
    processors.

    Args:
        name: prefix of its namespaces.
        num_nodes: number of nodes.
        rates: rate of every node's link in bits per second; None for a link that is not shaped. Empty if not known.
        latency_s: seconds added to the latency of a message between two nodes.
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
        """Build a cluster that exists within the context, and yield it. It is removed also after errors and signals.

        After ``kill -9`` of this process, the workers that it launched end by themselves. What is left of the cluster
        is removed by the next cluster of this name, or by :meth:`remove`.

        Args:
            nodes: number of nodes, at least 1.
            rate: rate of every node's link in each direction (``400mbit``), or one rate per node (``400mbit,200mbit``);
                None or ``none`` leaves a link unshaped.
            latency: latency of a message from one node to another (``5ms``); None or ``none`` adds no latency.
            name: name of the cluster; clusters of different names exist side by side.

        Raises:
            UserError: a setting is not possible, the process is not root, iproute2 is missing, the kernel has no tbf,
                or the name is in use.
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
        """Build a cluster that stays until :meth:`remove`; an existing cluster of this name is replaced.

        Arguments and errors: see :meth:`create`.
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
        """Check the settings and this machine, and return the cluster object; nothing is built yet.

        Raises:
            UserError: a setting or the machine does not allow the cluster.
        """
        _check_name(name)
        if not 1 <= nodes <= MAX_NODES:
            raise UserError("--nodes", nodes, f"from 1 to {MAX_NODES}")
        cluster = cls(name, nodes, parse_rates(rate, nodes=nodes), parse_latency(latency))
        network.require()
        return cluster

    def _build(self) -> None:
        """Remove an earlier cluster of this name, with its processes, and build the network."""
        network.remove(self.name)
        network.build(self.name, self.rates, latency_s=self.latency_s)

    @classmethod
    def find(cls, name: str = DEFAULT_NAME) -> Cluster:
        """Return the cluster ``name`` that ``up`` has built. Its rates are not known.

        Raises:
            UserError: there is no such cluster, or an interrupted ``up`` has left only a part of it.
        """
        _check_name(name)
        network.require()
        if not network.is_whole(name):
            raise UserError("--name", name, "a cluster that is up; `tawpipe lab up` makes one")
        return cls(name, len(network.namespaces(name)) - 1)

    @staticmethod
    def remove(name: str = DEFAULT_NAME) -> bool:
        """Remove the cluster ``name``, or what is left of it, and end every process in it.

        Returns:
            True if anything of the cluster existed.

        Raises:
            UserError: the process is not root, or iproute2 is missing.
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
        """Names of the nodes' namespaces."""
        return tuple(f"{self.name}{node}" for node in range(self.num_nodes))

    @property
    def addresses(self) -> tuple[str, ...]:
        """IP addresses of the nodes' links."""
        return tuple(network.address(node) for node in range(self.num_nodes))

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables by which a program in a node finds its link and node 0."""
        return {"GLOO_SOCKET_IFNAME": INTERFACE, "MASTER_ADDR": self.addresses[0]}

    def links(self, sizes: Sequence[int]) -> Links | None:
        """Measure the rates and the latency of the links, with messages of ``sizes`` bytes; return None for one node.

        Takes some seconds. Nothing else may run in the cluster meanwhile.

        Raises:
            RunError: a node does not reach another one.
        """
        slowest = min((rate for rate in self.rates if rate is not None), default=None)
        return measure_links(self.nodes, slowest, sizes, latency_s=self.latency_s)

    def become(self, node: int, command: Sequence[str]) -> NoReturn:
        """Replace this process by ``command`` inside a node, with the variables of :meth:`environment`. Never returns.

        Raises:
            UserError: there is no such node or program.
        """
        if not 0 <= node < self.num_nodes:
            raise UserError("NODE", node, f"from 0 to {self.num_nodes - 1}")
        if shutil.which(command[0]) is None:
            raise UserError("COMMAND", command[0], "a program that this machine has: nodes share its files")
        sys.stdout.flush()
        sys.stderr.flush()
        # Python ignores SIGPIPE, and the next program would inherit that.
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
        """Run ``num_nodes x local`` processes inside the nodes, and wait until all have ended.

        They get torchrun's variables. Ranks are numbered node by node. If a process fails, the others are ended within
        ``grace_s`` seconds. If this process dies, the kernel ends them. Standard output and error are treated as in
        :func:`tawpipe.launch.launcher.launch`: output of rank 0 is passed on, and after a failure the end of the failed
        rank's output is shown.

        Args:
            command: program and arguments of every rank.
            local: number of processes in each node.
            env: additional environment variables, which override the ones set here (for example ``OMP_NUM_THREADS=1``).
            timeout_s: seconds after which processes are ended and the launch has failed; None for no limit.
            grace_s: seconds that the other processes get to end after a failure.

        Raises:
            RunError: a process failed; the message names the first failed rank and its reason.
            KeyboardInterrupt, SystemExit: a signal arrived; all processes have been ended.
        """
        shape = Shape(self.num_nodes, self.num_nodes * local)
        entry = enter.RankOrders(
            ip=network.program("ip"),
            nodes=list(self.nodes),
            command=list(command),
            # Hide the local launcher from the workers: for them these are nodes of a cluster.
            variables={"OMP_NUM_THREADS": "1", LOCAL_LAUNCHER: None, **self.environment, **(env or {})},
            timeout_s=timeout_s or 0.0,
        )
        # -I -S: starts faster; it runs once per rank and needs no site packages.
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
    """Standard error of a launch, passed on at once and kept to find the reason of a failure."""

    def write(self, text: str, /) -> int:
        sys.stderr.write(text)
        return super().write(text)

    def flush(self) -> None:
        sys.stderr.flush()

    def reason(self) -> str:
        """Return the last error line of the launcher's report, which names the failed rank."""
        lines = self.getvalue().splitlines()
        reports = [line.removeprefix(ERROR_PREFIX) for line in lines if line.startswith(ERROR_PREFIX)]
        return reports[-1] if reports else "a process failed"


def _check_name(name: str) -> None:
    """Raise UserError if ``name`` is not allowed as the name of a cluster."""
    if not _NAME.fullmatch(name):
        raise UserError("--name", name, "1 to 32 lower-case letters, digits, - and _, a letter first, no digit last")
