"""Program, run as a file inside a node, that measures one side of a cluster's links with plain sockets.

It needs only the standard library. Every node sends to the next node and receives from the one before, as in rings and
pairwise exchanges.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

PORT = 29_400
ROUND_TRIPS, PAUSE_S = 20, 0.01
SECONDS, MESSAGES = 0.8, 4
"""Seconds for which messages of one size are sent, and least number of messages of one size."""
_BLOCK = 1 << 18
_PATIENCE_S = 60.0


def read(node: int, addresses: Sequence[str], sizes: Sequence[int], short: int) -> dict[str, Any]:
    """Measure the links of one node while all other nodes do so, too; return rates and seconds by name.

    All nodes must run this at one time, and wait for each other. ``Links.of`` explains the keys.

    Args:
        node: number of this node.
        addresses: IP addresses of all nodes.
        sizes: bytes of the messages.
        short: bytes of the short message over an idle link.
    """
    next_node, behind = _ring(node, addresses)
    reading: dict[str, Any] = {}
    for name, size in (("latency_s", 1), ("short_s", short)):
        if node == 0:
            reading[name] = min(_round_trip(next_node, size) for _ in range(ROUND_TRIPS))
        elif node == 1:
            for _ in range(ROUND_TRIPS):
                _receive(behind, size)
                behind.sendall(b"!")
    if node == 0:
        reading["latency_s"] /= 2
        reading["short_s"] -= reading["latency_s"]
    _together(node, next_node, behind)
    if node == 0:
        _send(next_node, max(sizes))
    elif node == 1:
        reading["one_way"] = _rate(behind, max(sizes))
    reading["both"] = []
    for size in sizes:
        _together(node, next_node, behind)
        sender = threading.Thread(target=_send, args=(next_node, size))
        sender.start()
        reading["both"].append(_rate(behind, size))
        sender.join()
    _together(node, next_node, behind)
    return reading


def _ring(node: int, addresses: Sequence[str]) -> tuple[socket.socket, socket.socket]:
    """Connect to the next node of the ring, accept the node before, and return both connections: (next, before).

    Waits until both nodes are ready, with a time limit of ``_PATIENCE_S`` seconds for each.

    Raises:
        OSError: a node was not ready in time.
    """
    server = socket.create_server((addresses[node], PORT))
    give_up = time.monotonic() + _PATIENCE_S
    while True:
        try:
            next_node = socket.create_connection((addresses[(node + 1) % len(addresses)], PORT), timeout=_PATIENCE_S)
            break
        except OSError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.02)
    server.settimeout(_PATIENCE_S)
    behind, _ = server.accept()
    for connection in (next_node, behind):
        connection.settimeout(_PATIENCE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return next_node, behind


def _together(node: int, next_node: socket.socket, behind: socket.socket) -> None:
    """Wait until all nodes have reached this call: a byte passes round the ring twice."""
    for _ in range(2):
        if node == 0:
            next_node.sendall(b"?")
        _receive(behind, 1)
        if node:
            next_node.sendall(b"?")


def _round_trip(connection: socket.socket, size: int) -> float:
    """Return the seconds from sending ``size`` bytes over an idle link to receiving the byte that answers."""
    time.sleep(PAUSE_S)
    begin = time.perf_counter()
    connection.sendall(bytes(size))
    _receive(connection, 1)
    return time.perf_counter() - begin


def _send(connection: socket.socket, size: int) -> None:
    """Send messages of ``size`` bytes for ``SECONDS`` seconds, and at least ``MESSAGES`` of them.

    Each message begins with the byte ``+``; after the last one follows the byte ``.``.
    """
    message, until, sent = b"+" + bytes(size), time.monotonic() + SECONDS, 0
    while sent < MESSAGES or time.monotonic() < until:
        connection.sendall(message)
        sent += 1
    connection.sendall(b".")


def _rate(connection: socket.socket, size: int) -> float:
    """Receive all messages of ``_send`` and return their rate in bytes per second.

    The rate counts from the end of the first message to the end of the last one.
    """
    ends = []
    while _receive(connection, 1) == b"+":
        _receive(connection, size)
        ends.append(time.perf_counter())
    return size * (len(ends) - 1) / (ends[-1] - ends[0])


def _receive(connection: socket.socket, count: int) -> bytes:
    """Receive ``count`` bytes and return them; of many bytes return only the last block.

    Raises:
        ConnectionError: the other side has closed the connection.
    """
    left, last = count, b""
    while left:
        last = connection.recv(min(left, _BLOCK))
        if not last:
            raise ConnectionError("the node before has gone")
        left -= len(last)
    return last


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    sys.stdout.write(json.dumps(read(int(sys.argv[2]), **asked)))
