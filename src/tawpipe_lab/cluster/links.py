"""Measurement of what the links of a cluster really carry: payload in both directions, and latency.

A shaped link carries less than its nominal rate: headers take a share, and so do late timers. So bounds and predictions
use measured values (``measure_links``), and large differences from the nominal values are reported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tawpipe.errors import RunError
from tawpipe_lab.cluster import network, probe

LOW = 0.8
"""Smallest share of its nominal rate that a link may carry without a warning. Latencies may differ by as much."""
MESSAGE_S, SHORT_S = 0.5, 0.02
"""Seconds of a link's nominal rate that bound message sizes: of the largest message, and of the short one."""


@dataclass(frozen=True)
class Links:
    """Measured properties of the links between the nodes of a cluster; rates are bytes of payload per second.

    Args:
        one_way: rate from one node to the next, while nothing else is in flight.
        both_ways: rates while all nodes send and receive at once, of the slowest node: (bytes of a message, rate),
            ascending in bytes.
        latency_s: half of the shortest round trip of one byte over an idle link, in seconds.
        idle: (bytes, least seconds) of a short message over an idle link. If the seconds are below bytes / rate, short
            messages pass for free, which no real link allows.
        named: nominal rate of the slowest link; None for an unshaped link.
        named_latency_s: nominal latency; 0 if none was asked for.
    """

    one_way: float
    both_ways: tuple[tuple[int, float], ...]
    latency_s: float
    idle: tuple[int, float]
    named: float | None = None
    named_latency_s: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """Highest rate in both directions at once, over all message sizes."""
        return max(rate for _, rate in self.both_ways)

    @property
    def of_name(self) -> float | None:
        """Share of the nominal rate that the links carry; None for unshaped links."""
        return None if self.named is None else self.bytes_per_s / self.named

    @property
    def trouble(self) -> str:
        """Sentence about links that differ too much from their nominal rate or latency; empty if they do not."""
        if self.of_name is not None and self.of_name < LOW:
            return f"links carry {self.of_name:.2f} of their name: {_megabits(self.bytes_per_s)}"
        if self.named_latency_s and not LOW <= self.named_latency_s / self.latency_s <= 1 / LOW:
            return f"links have a latency of {1e3 * self.latency_s:.2f} ms instead of {1e3 * self.named_latency_s:g} ms"
        return ""

    def __str__(self) -> str:
        both = ", ".join(f"{_megabits(rate)} in messages of {_size(size)}" for size, rate in self.both_ways)
        name = "" if self.of_name is None else f" ({self.of_name:.2f} of the name)"
        return f"{_megabits(self.one_way)} one way, both ways {both}{name}, latency {1e3 * self.latency_s:.2f} ms"

    def spelled_out(self) -> dict[str, Any]:
        """Return all fields as plain data, for results."""
        both = [list(pair) for pair in self.both_ways]
        return {**vars(self), "both_ways": both, "idle": list(self.idle), "of_name": self.of_name}

    @classmethod
    def from_spelled_out(cls, values: Mapping[str, Any]) -> Links:
        """Build the links whose fields ``spelled_out`` returned."""
        both = tuple((int(size), float(rate)) for size, rate in values["both_ways"])
        names = ("one_way", "latency_s", "named", "named_latency_s")
        return cls(both_ways=both, idle=tuple(values["idle"]), **{name: values[name] for name in names})

    @classmethod
    def of(cls, readings: Sequence[dict[str, Any]], sizes: Sequence[int], short: int, **named: Any) -> Links:
        """Combine the measurements of all nodes into one object: the slowest node's rates, and node 0's latency.

        Args:
            readings: measurements of every node, as ``probe.read`` returns them.
            sizes: bytes of the messages.
            short: bytes of the message that passed an idle link.
            named: nominal rate and latency.
        """
        both = [(size, min(reading["both"][i] for reading in readings)) for i, size in enumerate(sizes)]
        first, second = readings[:2]
        return cls(second["one_way"], tuple(both), first["latency_s"], (short, first["short_s"]), **named)


def _megabits(rate: float) -> str:
    return f"{8e-9 * rate:.3g} Gbit/s" if rate >= 1.25e8 else f"{8e-6 * rate:.3g} Mbit/s"


def _size(count: int) -> str:
    return f"{count / 1e6:.3g} MB" if count >= 10**6 else f"{count / 1e3:.3g} kB"


def measure_links(
    nodes: Sequence[str], rate: int | None, sizes: Sequence[int], *, latency_s: float = 0.0
) -> Links | None:
    """Measure rates and latency of the links between namespaces; return None if there is one node.

    This takes about a second, and one more second per size. The links must be idle.

    Args:
        nodes: names of the nodes' namespaces.
        rate: nominal rate of the slowest link in bits per second; None for unshaped links.
        sizes: bytes of the messages. Sizes above ``MESSAGE_S`` seconds of the nominal rate are reduced to that.
        latency_s: nominal latency of a message, in seconds.

    Raises:
        RunError: a node does not reach another one.
    """
    if len(nodes) < 2:
        return None
    named = None if rate is None else rate / 8
    sizes = sorted({min(size, int(MESSAGE_S * named)) if named else size for size in sizes})
    short = min(sizes[0], int(SHORT_S * named)) if named else sizes[0]
    addresses = [network.address(node) for node in range(len(nodes))]
    asked = json.dumps({"addresses": addresses, "sizes": sizes, "short": short})

    def read(node: int) -> dict[str, Any]:
        """Run the probe inside node ``node`` and return its measurements."""
        inside = ("ip", "netns", "exec", nodes[node], sys.executable, "-I", "-S", probe.__file__)
        try:
            return json.loads(network.call(*inside, asked, str(node)))
        except RunError as error:
            raise RunError(f"the links cannot be measured: node {node}: {error}") from error

    with ThreadPoolExecutor(len(nodes)) as pool:
        readings = list(pool.map(read, range(len(nodes))))
    return Links.of(readings, sizes, short, named=named, named_latency_s=latency_s)
