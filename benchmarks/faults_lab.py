"""What happens when a cluster breaks: links cut for a second and for ever, a rate halved, a node's processes killed.

    python benchmarks/faults_lab.py --out benchmarks/results/DATE-faults-lab    # a few minutes; needs root

Two nodes of two processes, in namespaces with links of 100 Mbit/s, train a small model. In the middle of the run the
fault happens; if the run ends by it, the network is whole again and the run is started with ``--resume auto``. A case
**survived** if the losses of all steps and the newest checkpoint are then those of a run without a fault, bit by bit.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from faulty_runs import Bench, fingerprint
from tawpipe.errors import RunError
from tawpipe.train.saying.metrics import last_step
from tawpipe_lab.cluster.cluster import Cluster
from tawpipe_lab.cluster.network import INTERFACE, call, switch_of

NAME, RATE = "tawpipe-faults", "100mbit"
STEPS, EVERY, AT = 200, 20, 70
"""The fault happens when step ``AT`` is in the metrics."""
STEP_S = 6.0
"""``timeouts.step_s``: longer than the cut of a second, shorter than for ever."""


def cut(node: int) -> None:
    call("ip", "-n", switch_of(NAME), "link", "set", f"port{node}", "down")


def mend(node: int) -> None:
    call("ip", "-n", switch_of(NAME), "link", "set", f"port{node}", "up")


def cut_for_a_second() -> None:
    cut(1)
    time.sleep(1)
    mend(1)


def halve() -> None:
    half = f"{int(RATE.removesuffix('mbit')) // 2}mbit"
    for namespace, device in ((f"{NAME}1", INTERFACE), (switch_of(NAME), "port1")):
        shaper = ("tbf", "rate", half, "burst", "256kb", "latency", "200ms")
        call("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *shaper)


def kill_a_node() -> None:
    for pid in call("ip", "netns", "pids", f"{NAME}1").split():
        os.kill(int(pid), signal.SIGKILL)


CASES: dict[str, tuple[Callable[[], None] | None, bool]] = {
    "nothing": (None, False),
    "a node's link cut for 1 s": (cut_for_a_second, False),
    "a node's link cut for ever": (lambda: cut(1), True),
    "the rate of a node's link halved": (halve, False),
    "all processes of a node killed": (kill_a_node, True),
}
"""What happens, and whether the run must end by it."""


def train(cluster: Cluster, command: list[str], fault: Callable[[], None] | None, output: Path) -> tuple[str, float]:
    """One start; why it ended, if not well, and the seconds from the fault to its end."""
    over, struck = threading.Event(), [0.0]

    def strike() -> None:
        while not over.wait(0.02):
            if last_step(output) >= AT:
                struck[0] = time.monotonic()
                assert fault is not None
                fault()
                return

    thread = threading.Thread(target=strike)
    if fault is not None:
        thread.start()
    problem = ""
    try:
        cluster.launch(command, local=2, timeout_s=180)
    except RunError as error:
        problem = str(error)
    over.set()
    if fault is not None:
        thread.join()
    return problem, time.monotonic() - struck[0] if struck[0] else 0.0


def run_case(bench: Bench, name: str) -> dict[str, Any]:
    """One case, in a cluster of its own."""
    fault, must_end = CASES[name]
    output = bench.folder / "runs" / name.replace(" ", "-").replace("'", "")
    output.mkdir(parents=True)
    command = [sys.executable, "-m", "tawpipe", "train", *bench.words(output, steps=STEPS, every=EVERY)]
    command += ["--timeouts.first-step-s", "60", "--timeouts.step-s", str(STEP_S), "--resume", "auto"]
    with Cluster.create(2, rate=RATE, name=NAME) as cluster:
        problem, seconds = train(cluster, command, fault, output)
        starts, reached = 1, last_step(output)
        begin = time.monotonic()
        if problem:
            mend(1)
            again, _ = train(cluster, command, None, output)
            starts += 1
            assert not again, again
        rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {
        "case": name,
        "starts": starts,
        "ended_as_it_must": bool(problem) == must_end,
        "reached": reached,
        "ended_after_s": round(seconds, 1) if problem else None,
        "second_start_s": round(time.monotonic() - begin, 1) if problem else None,
        "step_s": [round(row["seconds"], 3) for row in rows],
        "losses": [row["loss"] for row in rows],
        "weights": fingerprint(output),
        "said": problem,
    }


def table(environment: dict[str, Any], found: list[dict[str, Any]]) -> list[str]:
    """Markdown."""
    lines = [
        f"{environment['date']}, `{environment['command']}`",
        "",
        f"{STEPS} steps on 2 x 2 at {RATE}, a checkpoint every {EVERY}; the fault after step {AT}; `timeouts.step_s` "
        f"is {STEP_S:g} s.",
        "",
        "| fault | survived | starts | the run ended after, s | longest step, s | losses and weights as without it |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for one in found:
        ended = "-" if one["ended_after_s"] is None else f"{one['ended_after_s']:.1f}"
        lines.append(
            f"| {one['case']} | {'yes' if one['survived'] else 'NO'} | {one['starts']} | {ended} "
            f"| {max(one['step_s'][1:]):.2f} | {'yes' if one['same'] else 'NO'} |"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("faults-lab"))
    args = parser.parse_args()
    environment = {
        "command": shlex.join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
    }
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tawpipe-faults-") as folder:
        bench = Bench(Path(folder))
        for name in CASES:
            one = run_case(bench, name)
            first = found[0] if found else one
            one["same"] = (one["losses"], one["weights"]) == (first["losses"], first["weights"])
            one["survived"] = one["same"] and one["ended_as_it_must"]
            found.append(one)
            print(f"{name}: {'survived' if one['survived'] else 'LOST'}, {one['starts']} starts", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    content = {"environment": environment, "cases": found}
    (args.out / "cases.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (args.out / "table.md").write_text("\n".join(table(environment, found)) + "\n", encoding="utf-8")
    return 0 if all(one["survived"] for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
