"""Rates and latencies of links as users write them: ``400mbit`` for all nodes, ``400mbit,none`` per node; ``5ms``."""

from __future__ import annotations

import re

from tawpipe.errors import UserError

UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
SLOWEST, FASTEST = 10**6, 10**11
"""Smallest and largest rate in bits per second. Below it, one packet of the kernel's largest size takes half a second;
above it, the size of a queue overflows in tc."""

TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
SHORTEST_S, LONGEST_S = 0.5e-3, 1.0
"""Smallest and largest latency in seconds. A shorter one would hardly differ from the machine's own: a tenth of a
millisecond, plus the time to carry packets."""

_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s)")
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]bit)(?:/s)?", re.IGNORECASE)
_EXPECTED = (
    "a number with kbit, mbit or gbit (per second), from 1mbit to 100gbit, or none for an unshaped link, "
    "for example 400mbit"
)


def _parse_rate(text: str) -> int | None:
    """Return the bits per second of a rate; None for ``none``, an unshaped link.

    Raises:
        UserError: the text is no rate, or a rate that cannot be shaped.
    """
    words = text.strip().lower()
    if words == "none":
        return None
    match = _RATE.fullmatch(words)
    rate = round(float(match[1]) * UNITS[match[2].lower()]) if match else 0
    if not SLOWEST <= rate <= FASTEST:
        raise UserError("--rate", text, _EXPECTED)
    return rate


def parse_rates(text: str | None, *, nodes: int) -> tuple[int | None, ...]:
    """Return the bits per second of every node's link; None for an unshaped link.

    Args:
        text: one rate for all nodes, or one per node with commas between; None for unshaped links.
        nodes: number of nodes.

    Raises:
        UserError: the text contains no valid rates, or another number of them.
    """
    parts = ["none"] if text is None else text.split(",")
    rates = tuple(_parse_rate(part) for part in parts)
    if len(rates) not in (1, nodes):
        raise UserError("--rate", text, f"one rate for all nodes, or {nodes} with commas between, one for each node")
    return rates * nodes if len(rates) == 1 else rates


def parse_latency(text: str | None) -> float:
    """Return the seconds that a message takes from one node to another; 0 for no added latency.

    Raises:
        UserError: the text is no time, or a time that cannot be made.

    >>> parse_latency("5ms"), parse_latency("none")
    (0.005, 0.0)
    """
    words = "none" if text is None else text.strip().lower()
    if words == "none":
        return 0.0
    match = _TIME.fullmatch(words)
    seconds = float(match[1]) * TIMES[match[2]] if match else 0.0
    if not SHORTEST_S <= seconds <= LONGEST_S:
        raise UserError("--latency", text, "a number with us, ms or s, from 0.5ms to 1s, or none, for example 5ms")
    return seconds


def format_rate(rate: int | None) -> str:
    """Return a rate in bits per second as text with a unit; ``unshaped`` for None.

    >>> format_rate(400_000_000), format_rate(2_500_000_000), format_rate(None)
    ('400 Mbit/s', '2.5 Gbit/s', 'unshaped')
    """
    if rate is None:
        return "unshaped"
    return f"{rate / 10**9:g} Gbit/s" if rate >= 10**9 else f"{rate / 10**6:g} Mbit/s"
