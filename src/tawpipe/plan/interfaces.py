"""The network interface that a machine's traffic to others takes, by what the system has counted, and what its card
claims to carry.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

INTERFACES = Path("/sys/class/net")
LEAST = 10_000_000
"""Bytes sent while links were measured, below which that was not the traffic."""
FAR_BELOW = 0.6
"""Share of what a card claims, below which what was measured is odd."""


def sent_bytes(root: Path = INTERFACES) -> dict[str, int]:
    """Bytes that every interface has sent, but for the loopback; none where no Linux counts them."""
    counts = {}
    for path in sorted(root.glob("*/statistics/tx_bytes")):
        with suppress(OSError, ValueError):
            counts[path.parent.parent.name] = int(path.read_text())
    return {name: count for name, count in counts.items() if name != "lo"}


def claimed(name: str, root: Path = INTERFACES) -> float:
    """Bytes per second that an interface's card claims to carry, 0 where it does not say."""
    with suppress(OSError, ValueError):
        return max(0, int((root / name / "speed").read_text())) * 1e6 / 8
    return 0.0


def used_between(before: Mapping[str, int], after: Mapping[str, int], reached: float, root: Path = INTERFACES) -> str:
    """The interface that sent most meanwhile, in words; empty if nothing is known.

    Args:
        reached: bytes per second that were measured.
    """
    grown = {name: count - before.get(name, count) for name, count in after.items()}
    if not grown:
        return ""
    name = max(grown, key=grown.__getitem__)
    if grown[name] < LEAST:
        return "no interface that the system counts: RDMA, as over InfiniBand, passes it by"
    rate = claimed(name, root)
    if not rate:
        return f"{name}, whose card does not say what it carries"
    words = f"{name}, whose card claims {rate * 8 / 1e9:.3g} Gbit/s"
    if reached < FAR_BELOW * rate:
        words += f": {reached * 8 / 1e9:.3g} are reached"
    fastest = max(after, key=lambda other: claimed(other, root))
    if claimed(fastest, root) > rate:
        words += f"; {fastest} claims more (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)"
    return words
