"""Namespaces, links and shapers of a lab cluster, created and removed with iproute2.

A cluster ``NAME`` of n nodes is the network namespaces ``NAME0`` .. ``NAMEn-1`` and ``NAME-switch``, and nothing else:

    NAME0 [ lab0 ]====[ port0 ]-+
    NAME1 [ lab0 ]====[ port1 ]-+ bridge     (NAME-switch)
    ...

The bridge has its own namespace, so that the machine's interfaces, routes and packet filters stay as they are and have
no effect: addresses cannot collide, interface names need no prefix, and a firewall for containers drops nothing. Each
end of a veth pair sends through a token bucket, which shapes a node's link in both directions. Links with a latency are
pairs of other devices, see ``delay``. Traffic to an address of the own node never reaches the link: the kernel routes
it over the node's loopback.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tawpipe.errors import RunError, UserError
from tawpipe_lab.cluster import delay
from tawpipe_lab.cluster.delay import ends_of

INTERFACE = "lab0"
"""Interface of a node's link, inside its namespace."""

MAX_NODES = 250
"""Largest number of nodes; the cluster's network has slightly more addresses."""

SLOW_START = "/proc/sys/net/ipv4/tcp_slow_start_after_idle"
"""File of a kernel setting, per network namespace: 1 if TCP connections start slowly again after a pause, else 0."""

_NETWORK = "10.77.0"
_NAMESPACES = Path("/var/run/netns")
_CONGESTION_CONTROLS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_SMALLEST, _LARGEST = 8 * 1024, 64 * 1024
"""Smallest and largest size of a packet in bytes. The kernel cuts packets into frames as they leave, and byte counters
include the headers of packets only."""
_FRAME, _HEADERS = 9000, 80
"""Bytes of a large Ethernet frame, as fast networks use them, and bytes of its headers. Headers take 1 % of this frame,
and 5 % of a frame of 1,500 bytes."""
_PACKET_S, _LATE_S = 3e-4, 1e-4
"""Seconds that a packet takes on the slowest link, within the packet sizes; and seconds by which a timer may be
late."""
_QUEUE_S = 0.2
_NOT_ALLOWED = re.compile(r"not permitted|permission denied", re.IGNORECASE)
_NOT_IN_KERNEL = re.compile(r"qdisc kind is unknown|unknown device type|not supported", re.IGNORECASE)


@dataclass(frozen=True)
class Traffic:
    """Bytes that an interface has carried since it was created, including the packets' headers.

    The kernel counts a run of segments that it handles together with the headers of one, so the bytes are close to the
    payload.
    """

    sent: int
    received: int

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(self.sent - earlier.sent, self.received - earlier.received)


def address(node: int) -> str:
    """Return the IP address of a node's link, which is valid only inside the cluster."""
    return f"{_NETWORK}.{node + 1}"


def switch_of(name: str) -> str:
    """Return the namespace of the switch of the cluster ``name``."""
    return f"{name}-switch"


def program(name: str) -> str:
    """Return the path of ``ip`` or ``tc``; folders for root's programs are searched even if they are not in PATH.

    Raises:
        UserError: the program is not installed.
    """
    folders = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    path = shutil.which(name, path=folders)
    if path is None:
        raise UserError(
            "tawpipe lab", f"no program {name}", "iproute2 installed (Debian, Ubuntu: apt-get install iproute2)"
        )
    return path


def require() -> None:
    """Raise an error if this machine cannot have a cluster, as far as that is known before one is built.

    Raises:
        UserError: the system is not Linux, the process is not root, or iproute2 is missing.
    """
    if not sys.platform.startswith("linux"):
        raise UserError("tawpipe lab", platform.system(), "Linux, because nodes are network namespaces")
    if os.geteuid() != 0:
        raise UserError("tawpipe lab", f"user id {os.geteuid()}", "root, who may make network namespaces (try sudo)")
    for name in ("ip", "tc"):
        program(name)


def call(*words: str) -> str:
    """Run ``ip`` or ``tc`` with arguments, wait for its end, and return its standard output.

    Args:
        *words: name of the program, then its arguments.

    Raises:
        UserError: this machine or its kernel does not allow the command.
        RunError: the command failed for another reason.
    """
    # A separate process group, so that Ctrl-C does not interrupt a clean-up.
    done = subprocess.run([program(words[0]), *words[1:]], capture_output=True, text=True, process_group=0)
    if done.returncode == 0:
        return done.stdout
    command, problem = f"`{' '.join(words)}`", " ".join(done.stderr.split()) or f"exit code {done.returncode}"
    if _NOT_ALLOWED.search(problem):
        raise UserError("tawpipe lab", problem, f"root with the right to make networks, which {command} needs")
    if _NOT_IN_KERNEL.search(problem):
        raise UserError("tawpipe lab", problem, f"a kernel with veth, bridge and tbf, which {command} needs")
    raise RunError(f"{command} failed: {problem}")


def namespaces(name: str) -> list[str]:
    """Return the existing namespaces of the cluster ``name``: nodes in order, then the switch."""
    pattern = re.compile(rf"{re.escape(name)}(\d+|-switch)")
    existing = [entry for entry in _listed() if pattern.fullmatch(entry)]
    return sorted(existing, key=lambda entry: (entry == switch_of(name), len(entry), entry))


def _listed() -> list[str]:
    """Return the names of all network namespaces of this machine."""
    try:
        return [entry.name for entry in _NAMESPACES.iterdir()]
    except FileNotFoundError:
        return []


def build(name: str, rates: Sequence[int | None], *, latency_s: float = 0.0) -> None:
    """Create the namespaces, links and shapers of the cluster ``name``, of which nothing may exist yet.

    After an error, the parts that were created stay; :meth:`remove` removes them.

    Args:
        name: name of the cluster.
        rates: rate of each node's link in bits per second, in each direction; None for an unshaped link.
        latency_s: seconds added to the latency of a message between two nodes; 0 for links without delay.
    """
    switch = switch_of(name)
    slowest = min((rate for rate in rates if rate is not None), default=0)
    packet = min(_LARGEST, max(_SMALLEST, round(slowest / 8 * _PACKET_S))) if slowest else _LARGEST
    frame = str(min(packet, _FRAME))
    call("ip", "netns", "add", switch)
    # An idle link must carry no byte: no generated IPv6 addresses, no multicast snooping.
    call("ip", "-n", switch, "link", "add", "bridge", "type", "bridge", "mcast_snooping", "0")
    call("ip", "-n", switch, "link", "set", "bridge", "addrgenmode", "none")
    for node in range(len(rates)):
        call("ip", "netns", "add", f"{name}{node}")
    if latency_s:
        _delayed_links(name, len(rates), latency_s)
    for node, rate in enumerate(rates):
        inside, (_, port) = f"{name}{node}", ends_of(node)
        call("ip", "-n", inside, "link", "set", "lo", "up")
        if not latency_s:
            call("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", inside)
        call("ip", "-n", switch, "link", "set", port, "mtu", frame)
        call("ip", "-n", inside, "link", "set", INTERFACE, "mtu", frame, "gso_max_size", str(packet))
        if rate is not None:
            _shape(inside, INTERFACE, rate, packet)
            _shape(switch, port, rate, packet)
        call("ip", "-n", inside, "addr", "add", f"{address(node)}/24", "dev", INTERFACE)
        call("ip", "-n", inside, "link", "set", INTERFACE, "addrgenmode", "none", "up")
        call("ip", "-n", switch, "link", "set", port, "addrgenmode", "none", "master", "bridge", "up")
        if "cubic" in _CONGESTION_CONTROLS.read_text().split():
            # Most clusters use cubic. Algorithms that estimate the rate leave some of a shaped link unused.
            call("ip", "-n", inside, "route", "change", f"{_NETWORK}.0/24", "dev", INTERFACE, "congctl", "cubic")
    # Last: `is_whole` takes a bridge that is up as the sign of a complete cluster.
    call("ip", "-n", switch, "link", "set", "bridge", "up")


def _delayed_links(name: str, num_nodes: int, latency_s: float) -> None:
    """Create the links of all nodes as pairs of devices, and start a process that carries packets between them.

    The process stays in the switch's namespace until the cluster is removed. See ``delay``.

    Raises:
        UserError: the machine has no tun device.
        RunError: the devices cannot be created.
    """
    if not os.access(delay.TUN, os.R_OK | os.W_OK):
        raise UserError(
            "--latency", f"{1e3 * latency_s:g}ms", f"none, or a machine with {delay.TUN}, which makes links"
        )
    switch = switch_of(name)
    words = [program("ip"), "netns", "exec", switch, sys.executable, "-I", "-S", delay.__file__]
    # A new session: the links of `tawpipe lab up` outlive the command and its terminal.
    process = subprocess.Popen(
        [*words, str(num_nodes), repr(latency_s)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stderr is not None
    with process.stdout, process.stderr:
        if process.stdout.readline() != delay.READY:
            process.kill()
            errors = process.stderr.read().decode(errors="replace").strip().splitlines()
            raise RunError(f"links with a latency cannot be made: {errors[-1] if errors else 'no reason was given'}")
    for node in range(num_nodes):
        inside, (end, _) = f"{name}{node}", ends_of(node)
        call("ip", "-n", switch, "link", "set", end, "netns", inside, "name", INTERFACE)
        # Else the first message after a pause waits for extra round trips, see docs/cluster.md.
        call("ip", "netns", "exec", inside, "sh", "-c", f"echo 0 > {SLOW_START}")


def _shape(namespace: str, interface: str, rate: int, packet: int) -> None:
    """Limit what ``interface`` sends to ``rate`` bits per second, with a token bucket of ``tc``.

    The burst is as large as one packet plus what passes while a timer is late, and no larger: bytes within the burst
    pass an idle link in no time, as on no real link. So packets are small if links are slow. Queues hold 200 ms of
    traffic, like a switch with large buffers; further packets are dropped.

    Args:
        namespace: namespace of the interface.
        interface: name of the interface.
        rate: bits per second.
        packet: bytes of the largest packet.
    """
    burst = packet + (packet // _FRAME + 1) * _HEADERS + round(rate / 8 * _LATE_S)
    limit = burst + round(rate / 8 * _QUEUE_S)
    shaper = ["tbf", "rate", f"{rate}bit", "burst", f"{burst}b", "limit", f"{limit}b"]
    call("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *shaper)


def is_whole(name: str) -> bool:
    """Return True if all namespaces of the cluster exist and its bridge is up, which is the last step of ``build``."""
    existing = namespaces(name)
    if existing != [*(f"{name}{node}" for node in range(len(existing) - 1)), switch_of(name)]:
        return False
    with contextlib.suppress(RunError, IndexError):
        return "UP" in json.loads(call("ip", "-j", "-n", switch_of(name), "link", "show", "dev", "bridge"))[0]["flags"]
    return False


def remove(name: str) -> None:
    """End every process in the namespaces of the cluster ``name``, and remove the namespaces that exist.

    Links and shapers disappear with their namespaces.

    Raises:
        RunError: a process does not end.
    """
    existing = namespaces(name)
    try:
        end_processes(existing)
    finally:
        for namespace in existing:
            # Another `down` may have removed it meanwhile.
            if namespace in _listed():
                call("ip", "netns", "delete", namespace)


def traffic(namespace: str) -> Traffic:
    """Return the bytes that the link of a node has carried, from the counters of its namespace."""
    stats = json.loads(call("ip", "-j", "-s", "-n", namespace, "link", "show", "dev", INTERFACE))[0]["stats64"]
    return Traffic(sent=stats["tx"]["bytes"], received=stats["rx"]["bytes"])


def own_traffic() -> Traffic:
    """Return the bytes that the link of this process's node has carried; cheap enough to call around every step.

    Raises:
        RunError: this process does not run in a node.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        interface, _, numbers = line.partition(":")
        if interface.strip() == INTERFACE:
            values = numbers.split()
            return Traffic(sent=int(values[8]), received=int(values[0]))
    raise RunError(f"there is no interface {INTERFACE}: this process runs in no node of a lab cluster")


def end_processes(inside: Sequence[str], *, grace_s: float = 2.0, patience_s: float = 10.0) -> None:
    """End all processes in the namespaces ``inside`` except this one: first with SIGTERM, then with SIGKILL.

    Signals go through process descriptors, so that they cannot hit a new process that got an old process id.

    Args:
        grace_s: seconds between SIGTERM and SIGKILL.
        patience_s: further seconds to wait after SIGKILL.

    Raises:
        RunError: processes are left after ``grace_s + patience_s`` seconds.
    """
    kill_at = time.monotonic() + grace_s
    while members := _processes(inside):
        now = time.monotonic()
        if now > kill_at + patience_s:
            raise RunError(f"processes {', '.join(map(str, sorted(members)))} do not end")
        number, until = (signal.SIGTERM, kill_at) if now < kill_at else (signal.SIGKILL, now + 0.5)
        opened: dict[int, int] = {}
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                opened[pid] = os.pidfd_open(pid)
        try:
            # List again: a descriptor now protects every process id from being reused.
            waiting = {opened[pid] for pid in _processes(inside) & set(opened)}
            for descriptor in waiting:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, number)
            while waiting and (left := until - time.monotonic()) > 0:
                waiting -= set(select.select(waiting, (), (), left)[0])
        finally:
            for descriptor in opened.values():
                os.close(descriptor)


def _processes(inside: Sequence[str]) -> set[int]:
    """Return the ids of all processes in the namespaces ``inside``, except this one."""
    numbers = set[int]()
    for namespace in inside:
        with contextlib.suppress(RunError):  # another `down` may have removed it
            numbers |= set(map(int, call("ip", "netns", "pids", namespace).split()))
    return numbers - {os.getpid()}
