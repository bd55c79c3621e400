"""How close is the memory that a run says before its first step to what its largest process then holds? Thirteen runs.

    python benchmarks/said_memory.py --out benchmarks/results/DATE-said-memory

Every run is ``tawpipe train`` on processors, on a text that is made here, and ends with both numbers: what was said,
and the most that every process has held, by the system's count (VmHWM). The exit code is 1 if one is off by more than
``OFF``, or holds more than was said by more than ``BELOW``. Writes ``table.md`` and ``said.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tawpipe.train.saying.words import PARTS

OFF, BELOW = 0.05, 0.03
COMMON = "--model tiny --vocab-size 2000 --dtype float32 --device cpu --sample.tokens 0"
BINS = "--packing balanced --max-document 2048 --bin-tokens 512 --tokens-per-step 8192 --steps 2 --schedule.keep-mib 0"
"""Documents of uneven lengths, the longest of which pass the stages in slices; nothing is kept that could be computed
again, of which only the most is said."""
RUNS = {
    "one process": "--nproc 1 --sequence-length 256 --global-batch 4 --steps 4",
    "two processes": "--nproc 2 --nodes 1 --sequence-length 256 --global-batch 8 --steps 4",
    "two nodes, flat": "--nproc 2 --nodes 2 --schedule.strategy flat --sequence-length 512 --global-batch 4 --steps 4",
    "four processes, planned": "--nproc 4 --nodes 2 --sequence-length 512 --global-batch 8 --steps 6",
    "hsdp": "--nproc 4 --nodes 2 --schedule.strategy hsdp --sequence-length 256 --global-batch 8 --steps 6",
    "a pipeline": "--nproc 2 --nodes 2 --schedule.strategy 1f1b --sequence-length 512 --global-batch 8 --steps 6",
    "graphs are kept": "--nproc 2 --nodes 1 --schedule.recompute none --sequence-length 512 --global-batch 4 --steps 6",
    "rows in chunks": "--nproc 1 --schedule.sequence-chunk 512 --sequence-length 4096 --global-batch 2 --steps 3",
    "checkpoints often": "--nproc 2 --nodes 1 --checkpoint.every 2 --sequence-length 256 --global-batch 4 --steps 8",
    "gradients coded": "--nproc 2 --nodes 2 --schedule.strategy tawpipe-step --schedule.gradients-compression exact "
    "--sequence-length 256 --global-batch 8 --steps 6",
    "bins and slices, 1f1b": f"--nproc 2 --nodes 2 --schedule.strategy 1f1b {BINS}",
    "bins and slices, generated": f"--nproc 2 --nodes 2 --schedule.strategy generated {BINS}",
    "no checkpoints": "--nproc 2 --nodes 1 --checkpoint.every 0 --sequence-length 256 --global-batch 4 --steps 8",
}
"""Name of a run -> its words besides ``COMMON``."""
MIB = 2**20
_SAID = re.compile(r"peak memory per process +(.+?) \(predicted (\S+ \S+);")
_UNITS = {"MiB": MIB, "GiB": 2**30}


def text(path: Path, words: int = 60_000, *, uneven: bool = False) -> Path:
    """A file of made-up documents, always the same."""
    source = random.Random(7)
    known = ["".join(source.choices("abcdefghijklmnop", k=source.randint(2, 9))) for _ in range(3000)]
    lengths = [200] * (words // 200)
    if uneven:
        lengths = [max(2, min(1200, round(source.lognormvariate(4.5, 1.2)))) for _ in lengths]
    lines = (" ".join(source.choices(known, k=length)) for length in lengths)
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")
    return path


def read(said: str) -> tuple[list[int], int]:
    """Bytes that every process has held, and those that were said, from what a run prints.

    >>> read("  peak memory per process  1.50 GiB, 2.0 MiB (predicted 1.00 GiB; the largest used 50.0% more)")
    ([1610612736, 2097152], 1073741824)
    """
    found = _SAID.search(said)
    assert found, said
    size = lambda words: round(float(words.split()[0]) * _UNITS[words.split()[1]])  # noqa: E731
    return [size(words) for words in found[1].split(", ")], size(found[2])


def measured(name: str, folder: Path) -> dict[str, Any]:
    """One of ``RUNS``, in a folder of its own."""
    source = "uneven.jsonl" if BINS in RUNS[name] else "text.jsonl"
    command = ["train", "--data", str(folder / source), *shlex.split(COMMON), *shlex.split(RUNS[name])]
    page = folder / "page.html"
    command += ["--output", str(folder / name.replace(" ", "-")), "--cache-dir", str(folder / "cache")]
    command += ["--report", str(page)]  # which says the parts
    done = subprocess.run([sys.executable, "-m", "tawpipe", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    peaks, said = read(done.stdout)
    words = page.read_text(encoding="utf-8")
    parts = {part: size.group() for part in PARTS if (size := re.search(rf"[\d.]+ [MG]iB(?= {PARTS[part]})", words))}
    return {"name": name, "words": RUNS[name], "said": said, "peaks": peaks, "more": max(peaks) / said - 1} | {
        "parts": parts
    }


def is_right(row: dict[str, Any]) -> bool:
    """True if what was said is within its bounds."""
    return -OFF <= row["more"] <= BELOW


def table(rows: list[dict[str, Any]]) -> str:
    """The runs as a page."""
    lines = [
        "| run | said MiB | the largest process has held MiB | off | system said MiB | all processes MiB |",
        "| --- | --: | --: | --: | --: | --- |",
    ]
    for row in rows:
        peaks = ", ".join(f"{peak / MIB:.0f}" for peak in row["peaks"])
        numbers = f"{row['said'] / MIB:.0f} | {max(row['peaks']) / MIB:.0f} | {row['more']:+.1%}"
        lines.append(f"| {row['name']}: `{row['words']}` | {numbers} | {row['parts'].get('system', '')} | {peaks} |")
    return "\n".join(lines)


def write(rows: list[dict[str, Any]], out: Path) -> None:
    """The runs so far, as a page and as numbers."""
    out.mkdir(parents=True, exist_ok=True)
    settings = {
        "command": shlex.join(["python", "benchmarks/said_memory.py", *sys.argv[1:]]),
        "common": COMMON,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{os.cpu_count()} cores, {platform.platform()}",
    }
    (out / "said.json").write_text(json.dumps({"settings": settings, "runs": rows}, indent=1) + "\n", encoding="utf-8")
    worst = max(rows, key=lambda row: abs(row["more"]))
    words = f"The worst is {worst['more']:+.1%}; bounds are {-OFF:+.0%} and {BELOW:+.0%}. All have `{COMMON}`."
    page = f"# Memory as said and as held\n\n`{settings['command']}`\n\n{words}\n\n{table(rows)}\n"
    (out / "table.md").write_text(page, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", nargs="*", default=list(RUNS), choices=list(RUNS), metavar="RUN")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        text(Path(folder, "text.jsonl"))
        text(Path(folder, "uneven.jsonl"), uneven=True)
        for name in args.only:
            rows.append(measured(name, Path(folder)))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
            if args.out:
                write(rows, args.out)
    return int(not all(map(is_right, rows)))


if __name__ == "__main__":
    sys.exit(main())
