"""What a message takes over a link with a latency, with so many receives posted ahead.

    sudo python benchmarks/messages.py --latency 5ms

Two nodes of the lab, one sends to the other. With 0 ahead each receive is posted when the one before it is there.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tawpipe.runtime.ahead import Ahead
from tawpipe.runtime.world import connect
from tawpipe.schedule.actions import Lane, Transfer, exchange
from tawpipe.schedule.buffers import pooled
from tawpipe.topology import Topology
from tawpipe_lab.cluster.cluster import Cluster


def passed(ahead: int, count: int, size: int, rank: int) -> float:
    """In a node: seconds of a message on average, of ``count`` after one another."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    messages = Ahead(Topology.grid(2, 1), rank, {(Lane.INTER_W, "world"): group}, strict=False)
    buffer = pooled("W", 0)
    move = exchange(Lane.INTER_W, (Transfer(rank == 0, 1 - rank, 0, buffer),), "world")
    room = [{buffer: torch.zeros(size // 4)} for _ in range(ahead + 1)]
    dist.barrier(group)
    begin = time.perf_counter()
    for number in range(count):
        if rank and ahead:
            for posted in range(number and number + ahead, min(count, number + ahead + 1)):
                messages.begin(move, room[posted % len(room)])
        messages.exchange(move, room[number % len(room)])
    dist.barrier(group)
    return (time.perf_counter() - begin) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--latency", default="5ms")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--bytes", type=int, default=4096, help="of a message")
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--ahead", type=int, nargs="+", default=[0, 1, 4, 16])
    parser.add_argument("--result", type=Path, help="of a process in a node, which writes there")
    args = parser.parse_args()
    if args.result:
        world = connect(device="cpu")
        seconds = [passed(ahead, args.count, args.bytes, world.rank) for ahead in args.ahead]
        if world.rank:
            args.result.write_text(json.dumps(seconds))
        world.leave()
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster.create(2, rate=args.rate, latency=args.latency, name="tawpipe-messages") as cluster,
    ):
        result = Path(folder) / "seconds.json"
        cluster.launch([sys.executable, __file__, *sys.argv[1:], "--result", str(result)], local=1)
        seconds = json.loads(result.read_text())
    print(f"| receives ahead | ms a message of {args.bytes:,} bytes, {args.latency}, {args.rate} |\n| ---: | ---: |")
    for ahead, taken in zip(args.ahead, seconds, strict=True):
        print(f"| {ahead} | {1e3 * taken:.2f} |")


if __name__ == "__main__":
    main()
