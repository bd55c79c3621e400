"""What the lab's links carry, from slow to fast, with a latency and without.

    sudo python benchmarks/links.py --out benchmarks/results/DATE-lab-links

For every rate and latency a cluster is made, its links are measured while nothing else runs, and it is removed again.
The columns: payload of one node to the next alone; of all nodes at once, both ways, in messages of two sizes; the time
of one byte; and the seconds of a message of 100 kB over an idle link, divided by those that its bytes take at the rate
of the link's name. The less that is, the more passes an idle link for nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from pathlib import Path

from tawpipe_lab.cluster.cluster import Cluster
from tawpipe_lab.cluster.links import Links

RATES = ("50mbit", "100mbit", "200mbit", "300mbit", "400mbit", "1gbit")
LATENCIES = ("none", "5ms", "25ms")
SIZES = (100_000, 2_000_000)
HEAD = (
    "| link | latency | one way | both ways, 100 kB | both ways, 2 MB | latency, ms | 100 kB over an idle link |",
    "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
)


def row(rate: str, latency: str, links: Links) -> str:
    """A line of the table; rates as shares of the link's name."""
    assert links.named
    both = " | ".join(f"{carried / links.named:.3f}" for _, carried in links.both_ways)
    idle = (links.idle[1] - links.latency_s) / (links.idle[0] / links.named)
    cells = (rate, latency, f"{links.one_way / links.named:.3f}", both, f"{1e3 * links.latency_s:.2f}", f"{idle:.2f}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, help="folder for README.md and links.json")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rates", nargs="+", default=RATES)
    parser.add_argument("--latencies", nargs="+", default=LATENCIES)
    args = parser.parse_args()
    lines, read = [*HEAD], []
    for latency in args.latencies:
        for rate in args.rates:
            with Cluster.create(args.nodes, rate=rate, latency=latency, name="tawpipe-links") as cluster:
                links = cluster.links(SIZES)
            assert links is not None
            lines.append(row(rate, latency, links))
            read.append({"rate": rate, "latency": latency, **links.spelled_out()})
            print(lines[-1], flush=True)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        command, machine = shlex.join(["python", *sys.argv]), f"Linux {platform.release().split('-')[0]}"
        title = (
            f"{time.strftime('%Y-%m-%d')}, `{command}`, {args.nodes} nodes, {machine}. Rates are shares of the name."
        )
        (args.out / "README.md").write_text("\n".join([title, "", *lines]) + "\n", encoding="utf-8")
        (args.out / "links.json").write_text(json.dumps(read, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
