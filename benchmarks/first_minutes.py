"""How long are the first minutes? Setting up, the first step, a plan for a cluster; in a fresh clone.

    python benchmarks/first_minutes.py --out benchmarks/results/DATE-first-minutes

Clones the commit that is checked out into an empty folder, runs ``make train`` there with an empty cache for data,
starts a second run of a few steps, which finds the data prepared, and plans an 8 B model on 3 nodes of 8 devices.
Seconds are those of a clock, beside them those of the processors, of which other programs on the machine take nothing.
pip may use its own cache of downloads, as it would for anybody who has set up a project with torch before. Writes
``table.md`` and ``first_minutes.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
STEPS = 3
"""Of the second run."""
PLAN = (
    *("--model", "llama-8b", "--topology", "3x8@10gbit", "--device-name", "H100", "--memory", "75"),
    *("--sequence-length", "32768", "--global-batch", "96"),
)
STARTED, PLANS, PLANNED, STEPPED = r"\d+ processes = ", "planning: ", "plan: measured and chosen in ", r"step +1/"
"""How the lines of a run begin that say how far it is."""


@dataclass(frozen=True)
class Reading:
    """One row of the table; the goal is None where there is none."""

    what: str
    seconds: float
    cpu_s: float | None = None
    goal_s: float | None = None


@dataclass(frozen=True)
class Watched:
    """A command that has run.

    Args:
        cpu_s: of all its processes.
        lines: of its output, each with the seconds from the start after which it came.
    """

    seconds: float
    cpu_s: float
    lines: list[tuple[float, str]]

    def first(self, pattern: str) -> float:
        """Seconds until the first line that begins so."""
        return next(at for at, line in self.lines if re.match(pattern, line))


def watch(command: Sequence[str], folder: Path, cache: Path) -> Watched:
    """Run a command to its end, with what it prints passed on.

    Raises:
        SystemExit: it failed.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"TAWPIPE_CACHE": str(cache), "PYTHONUNBUFFERED": "1"}
    print("$", shlex.join(command), flush=True)
    before, begin, lines = _cpu_of_children(), time.monotonic(), list[tuple[float, str]]()
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append((time.monotonic() - begin, line.rstrip()))
            print(f"{lines[-1][0]:7.1f} s  {line}", end="", flush=True)
    if process.returncode:
        raise SystemExit(f"{shlex.join(command)} ended with {process.returncode}")
    return Watched(time.monotonic() - begin, _cpu_of_children() - before, lines)


def _cpu_of_children() -> float:
    times = os.times()
    return times.children_user + times.children_system


def readings(clone: Path, cache: Path) -> list[Reading]:
    """All rows of the table."""
    subprocess.run(["git", "clone", "--quiet", str(HERE), str(clone)], check=True)
    made = watch(["make", "train", f"PYTHON={sys.executable}"], clone, cache)
    command = str(clone / ".venv" / "bin" / "tawpipe")
    again = watch([command, "train", "--steps", str(STEPS), "--log.every", "1"], clone, cache)
    planned = watch([command, "plan", *PLAN], clone, cache)
    started = made.first(STARTED)
    return [
        Reading("make train, from a fresh clone to the end", made.seconds, made.cpu_s, 240.0),
        Reading("its set-up, until the processes have found each other", started),
        Reading("its data, until it plans", made.first(PLANS) - started),
        Reading("its plan", made.first(PLANNED) - made.first(PLANS)),
        Reading("its training, from the plan to the end", made.seconds - made.first(PLANNED)),
        Reading("a second run: from the start to the first step", again.first(STEPPED), goal_s=10.0),
        Reading("of that, until it plans", again.first(PLANS)),
        Reading("of that, its plan", again.first(PLANNED) - again.first(PLANS)),
        Reading(f"a second run of {STEPS} steps, all of it", again.seconds, again.cpu_s),
        Reading(f"tawpipe plan {shlex.join(PLAN)}", planned.seconds, planned.cpu_s, 8.0),
    ]


def table(rows: Sequence[Reading]) -> str:
    """The readings as a page."""

    def cell(value: float | None) -> str:
        return "" if value is None else f"{value:.1f}"

    lines = ["| what | seconds | of processors | goal |", "| --- | --: | --: | --: |"]
    lines += [f"| {row.what} | {row.seconds:.1f} | {cell(row.cpu_s)} | {cell(row.goal_s)} |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        rows = readings(Path(folder, "clone"), Path(folder, "cache"))
    args.out.mkdir(parents=True, exist_ok=True)
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, text=True).strip()
    command = shlex.join(["python", "benchmarks/first_minutes.py", *sys.argv[1:]])
    machine = f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}, load {load:.1f} before the start"
    head = f"# The first minutes\n\nSeconds on {machine}, at {commit}. `{command}`\n\n"
    (args.out / "table.md").write_text(head + table(rows) + "\n", encoding="utf-8")
    (args.out / "first_minutes.json").write_text(
        json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8"
    )
    print(table(rows))


if __name__ == "__main__":
    main()
