"""What the links of a cluster really carry: payload in both directions, and latency.

A shaped link carries less than its name says: headers take a share, and so do timers that are late. So bounds and
predictions take what is measured (``measure_links``), and what is far from its name is said.
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
"""Share of its name below which a link is not what it is called."""
MESSAGE_S, SHORT_S = 0.5, 0.02
"""Messages are no larger than what a link carries in this time, and the short one than what it carries in that."""


@dataclass(frozen=True)
class Links:
    """What the links between the nodes of a cluster carry; bytes of payload per second, of the slowest node.

    Args:
        one_way: of one node to the next, while nothing else is under way.
        both_ways: of all nodes at once, each sending and receiving: (bytes of a message, rate), ascending.
        latency_s: half of the shortest round trip of one byte over an idle link.
        idle: (bytes, least seconds) of a short message over an idle link. Seconds below those of its bytes at the rate
            of the link say that short messages pass for nothing, as on no real link.
        named: the rate that the slowest link was asked to have; None for an unshaped one.
        named_latency_s: the latency that was asked for, 0 for none.
    """

    one_way: float
    both_ways: tuple[tuple[int, float], ...]
    latency_s: float
    idle: tuple[int, float]
    named: float | None = None
    named_latency_s: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """The most that was carried both ways at once: messages of the size that suits the link best."""
        return max(rate for _, rate in self.both_ways)

    @property
    def of_name(self) -> float | None:
        """Share of its name that a link carries; None for an unshaped one."""
        return None if self.named is None else self.bytes_per_s / self.named

    @property
    def trouble(self) -> str:
        """What is wrong with the links, in words; empty if nothing is."""
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
        """Plain data, for results."""
        both = [list(pair) for pair in self.both_ways]
        return {**vars(self), "both_ways": both, "idle": list(self.idle), "of_name": self.of_name}

    @classmethod
    def from_spelled_out(cls, values: Mapping[str, Any]) -> Links:
        """The links that ``spelled_out`` has written."""
        both = tuple((int(size), float(rate)) for size, rate in values["both_ways"])
        names = ("one_way", "latency_s", "named", "named_latency_s")
        return cls(both_ways=both, idle=tuple(values["idle"]), **{name: values[name] for name in names})

    @classmethod
    def of(cls, readings: Sequence[dict[str, Any]], sizes: Sequence[int], short: int, **named: Any) -> Links:
        """The links of which the nodes have read this.

        Args:
            short: bytes of the message that passed an idle link.
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
    """Measures the links between the namespaces ``nodes``, which are idle; None if there is one node and no link.

    It takes about a second and one more for every size.

    Args:
        rate: of the slowest link by its name, in bits per second; None for unshaped ones.
        sizes: bytes of the messages.
        latency_s: that a message was to have.

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
        inside = ("ip", "netns", "exec", nodes[node], sys.executable, "-I", "-S", probe.__file__)
        try:
            return json.loads(network.call(*inside, asked, str(node)))
        except RunError as error:
            raise RunError(f"the links cannot be measured: node {node}: {error}") from error

    with ThreadPoolExecutor(len(nodes)) as pool:
        readings = list(pool.map(read, range(len(nodes))))
    return Links.of(readings, sizes, short, named=named, named_latency_s=latency_s)
