"""Start ranks of a module on this machine, each a host of its own for NCCL, so that several share one GPU.

    python -m gpu.ranks NODES LOCAL SECONDS MODULE [WORDS...]

Output of rank 0 is shown; of another rank that fails the last lines. All ranks end after SECONDS, or 10 s after one of
them has failed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

AFTER_FAILURE_S = 10.0
SHOWN = 1500
"""Characters of a failed rank's output."""


def variables(rank: int, nodes: int, local: int, port: int) -> dict[str, str]:
    """Return the environment of a rank: torchrun's variables, and a host name of its own for NCCL."""
    own: dict[str, Any] = {
        "RANK": rank,
        "WORLD_SIZE": nodes * local,
        "LOCAL_RANK": rank % local,
        "LOCAL_WORLD_SIZE": local,
        "GROUP_RANK": rank // local,
        "GROUP_WORLD_SIZE": nodes,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "NCCL_HOSTID": f"host{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": 1,
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": 1,
    }
    usual = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0"}
    return usual | dict(os.environ) | {name: str(value) for name, value in own.items()}


def run(nodes: int, local: int, limit_s: float, words: list[str]) -> int:
    """Run the ranks to their end; 1 if one of them failed or time ran out, else 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    logs: list[Any] = [None, *(tempfile.TemporaryFile("w+b") for _ in range(nodes * local - 1))]  # noqa: SIM115
    begin, failed = time.monotonic(), 0.0
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", *words], env=variables(rank, nodes, local, port), stdout=log, stderr=log
        )
        for rank, log in enumerate(logs)
    ]
    while any(rank.poll() is None for rank in ranks):
        now = time.monotonic()
        if not failed and any(rank.poll() for rank in ranks):
            failed = now
        if now - begin > limit_s or (failed and now - failed > AFTER_FAILURE_S):
            left = [number for number, rank in enumerate(ranks) if rank.poll() is None]
            print(f"ranks: ended after {now - begin:.0f} s; still running: {left}", flush=True)
            for rank in ranks:
                rank.kill()
            break
        time.sleep(0.2)
    codes = [rank.wait() for rank in ranks]
    for number, (code, log) in enumerate(zip(codes, logs, strict=True)):
        if code and log is not None:
            log.seek(0)
            print(f"--- rank {number}: exit code {code}\n{log.read().decode(errors='replace')[-SHOWN:]}", flush=True)
    print(f"ranks: exit codes {codes} after {time.monotonic() - begin:.0f} s", flush=True)
    return int(any(codes))


def main() -> None:
    """Run what the command line says."""
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    sys.exit(run(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]))


if __name__ == "__main__":
    main()
