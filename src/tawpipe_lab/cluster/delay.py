"""Program that adds latency to a cluster's links, run as a file inside the switch's namespace.

It replaces netem, which many kernels lack. With a latency, a node's link is a pair of tap devices instead of a veth
pair: ``lab0`` in the node and its port at the switch. This process takes each packet out of one device and puts it into
the other a fixed time later. A message between two nodes passes two links, so each link adds half of the latency.
Packets keep their size and order, and none is dropped. Packets have passed the token bucket of the device that they
leave. The devices, and with them the links, disappear when this process ends.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

TUN = "/dev/net/tun"
READY = b"ready\n"
_TAP, _NO_HEAD, _OFFLOADS_KNOWN = 0x0002, 0x1000, 0x4000  # IFF_TAP, IFF_NO_PI, IFF_VNET_HDR
_NAME_IT, _OFFLOAD = 0x400454CA, 0x400454D0  # TUNSETIFF, TUNSETOFFLOAD
_CHECKSUMS_AND_LARGE_PACKETS = 0x01 | 0x02  # TUN_F_CSUM, TUN_F_TSO4
_LARGEST = 1 << 17


def ends_of(node: int) -> tuple[str, str]:
    """Return the first names of a link's two devices: the node's end and the switch's port.

    The node's end is later moved into the node.
    """
    return f"end{node}", f"port{node}"


def carry(num_nodes: int, latency_s: float) -> None:
    """Create the devices of all links, write ``ready`` to standard output, and carry packets until killed.

    Args:
        num_nodes: number of nodes.
        latency_s: latency of a message between two nodes, in seconds.
    """
    other: dict[int, int] = {}
    for node in range(num_nodes):
        inside, port = map(_tap, ends_of(node))
        other |= {inside: port, port: inside}
    os.write(1, READY)
    on_the_way: deque[tuple[float, int, bytes]] = deque()
    while True:
        wait = max(0.0, on_the_way[0][0] - time.monotonic()) if on_the_way else None
        for device in select.select([*other], (), (), wait)[0]:
            due = time.monotonic() + latency_s / 2
            try:
                while True:
                    on_the_way.append((due, other[device], os.read(device, _LARGEST)))
            except BlockingIOError:
                pass
            except OSError:  # the device is down, before and after the links are used
                time.sleep(1e-3)
        now = time.monotonic()
        while on_the_way and on_the_way[0][0] <= now:
            _, device, packet = on_the_way.popleft()
            try:
                os.write(device, packet)
            except OSError:  # the device is down
                continue


def _tap(name: str) -> int:
    """Open the tap device ``name`` without blocking and return its descriptor.

    Packets keep the size in which the kernel made them.
    """
    device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _NAME_IT, struct.pack("16sH22x", name.encode(), _TAP | _NO_HEAD | _OFFLOADS_KNOWN))
    fcntl.ioctl(device, _OFFLOAD, _CHECKSUMS_AND_LARGE_PACKETS)
    return device


if __name__ == "__main__":
    carry(int(sys.argv[1]), float(sys.argv[2]))
