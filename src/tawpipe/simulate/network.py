"""Bandwidth sharing between transfers in flight, as a fluid model.

Every port gives equal bandwidth to the transfers that pass it. Bandwidth that a transfer cannot use, because another
port limits it, goes to the other transfers. This is max-min fairness, which long-lived TCP streams and switches
approach."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tawpipe.simulate.transfers import Port


@dataclass(eq=False, slots=True)
class Flow:
    """Transfer in flight.

    Args:
        ports: bytes that pass each port.
        what: object to which the transfer belongs; the network does not use it.
        left: share of the bytes that have still to pass.
        rate: share of the bytes that passes per second.
        since: time at which ``left`` was valid.
        version: number of changes of the rate. A predicted end with an older version is void.
    """

    ports: tuple[tuple[Port, float], ...]
    what: Any
    left: float = 1.0
    rate: float = 0.0
    since: float = 0.0
    version: int = 0
    heaviest: float = field(init=False)
    passed: tuple[Port, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.heaviest = max(amount for _, amount in self.ports)
        self.passed = tuple(port for port, _ in self.ports)


class Network:
    """Flows in flight and their rates.

    Args:
        capacity: returns the bytes per second of a port.
    """

    def __init__(self, capacity: Callable[[Port], float]) -> None:
        self._capacity = capacity
        self._known: dict[Port, float] = {}
        self._on: dict[Port, dict[Flow, None]] = {}
        self._changed: dict[Port, None] = {}

    def add(self, flow: Flow) -> None:
        """Add a flow. It has no rate until ``settle`` is called."""
        for port, _ in flow.ports:
            if port not in self._known:
                self._known[port] = self._capacity(port)
            self._on.setdefault(port, {})[flow] = None
            self._changed[port] = None

    def remove(self, flow: Flow) -> None:
        """Remove a flow. Others get its bandwidth when ``settle`` is called."""
        for port, _ in flow.ports:
            del self._on[port][flow]
            self._changed[port] = None

    def settle(self, now: float) -> list[tuple[float, Flow]]:
        """Recompute the rates of all flows that depend on flows added or removed since the last call.

        Returns:
            the flows whose rate changed, each with the time at which it will end.
        """
        if not self._changed:
            return []
        flows = self._reached()
        self._changed.clear()
        changed = []
        for flow, rate in share(flows, self._known):
            if rate != flow.rate:
                flow.left = max(0.0, flow.left - flow.rate * (now - flow.since))
                flow.rate, flow.since, flow.version = rate, now, flow.version + 1
                changed.append((now + flow.left / rate, flow))
        return changed

    def _reached(self) -> Iterable[Flow]:
        """Return all flows whose rates can depend on the changed ports."""
        ports, flows = list(self._changed), {}
        seen = set(ports)
        while ports:
            for flow in self._on.get(ports.pop(), ()):
                if flow not in flows:
                    flows[flow] = None
                    fresh = [port for port, _ in flow.ports if port not in seen]
                    seen.update(fresh)
                    ports.extend(fresh)
        return flows


def share(flows: Iterable[Flow], capacity: dict[Port, float]) -> list[tuple[Flow, float]]:
    """Return max-min fair rates (progressive filling; Bertsekas and Gallager, Data Networks, 6.5.2).

    The rates of all flows grow equally, measured in bytes per second on their most loaded port, until a port is full.
    Flows that pass a full port keep their rate, and the others continue to grow.

    Args:
        flows: the flows that share the ports.
        capacity: port -> bytes per second.

    Returns:
        every flow with the share of its bytes that passes per second.
    """
    growing = dict.fromkeys(flows)
    free: dict[Port, float] = {}
    pull: dict[Port, float] = {}
    count: dict[Port, int] = {}
    for flow in growing:
        for port, amount in flow.ports:
            free.setdefault(port, capacity[port])
            pull[port] = pull.get(port, 0.0) + amount / flow.heaviest
            count[port] = count.get(port, 0) + 1
    rates = []
    while growing:
        pace = min(free[port] / pull[port] for port, n in count.items() if n)
        full = {port for port, n in count.items() if n and free[port] / pull[port] <= pace * (1 + 1e-12)}
        for flow in [flow for flow in growing if not full.isdisjoint(flow.passed)]:
            del growing[flow]
            rates.append((flow, pace / flow.heaviest))
            for port, amount in flow.ports:
                part = amount / flow.heaviest
                free[port] = max(0.0, free[port] - pace * part)
                pull[port] -= part
                count[port] -= 1
    return rates
