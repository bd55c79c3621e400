"""What does a run gain by dealing its documents? The same model and documents under every packing, in turn.

    python benchmarks/packing.py --out benchmarks/results/DATE-packing
    python benchmarks/packing.py --data 'texts/*.jsonl' --max-document 8192 --steps 8 --out DIR

Every packing is a `tawpipe train` of its own, one after the other, over and over, so that drift of the machine hits
all of them. Tokens are those that are learned: padding is none, and what a packing cuts off is not learned. The first
step of every run, which checks the model and allocates, does not count. The documents are by default the files of
Python's standard library, whose lengths are skewed. Writes ``packing.json`` and ``table.md``.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

KEPT = "balanced, layers keep"
"""Balanced, with memory for layers that keep what they would compute again."""
PACKINGS = ("fit", "split", "balanced", KEPT)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--model", default="tiny")
    parser.add_argument(
        "--max-document", type=int, default=4096, help="tokens of a document, and of a row of one length"
    )
    parser.add_argument("--rows", type=int, default=8, help="rows of one length whose tokens a step has")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2, help="runs under every packing")
    parser.add_argument("--keep-mib", type=int, default=1024)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def train(args: argparse.Namespace, packing: str) -> list[dict[str, Any]]:
    """The steps of a run, but for the first."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "tawpipe", "train", "--data", args.data, "--model", args.model, "--plan", "none"]
        words += ["--nodes", "1", "--nproc", str(args.processes), "--steps", str(args.steps), "--log.every", "1"]
        words += ["--packing", packing.split(",")[0], "--sequence-length", str(args.max_document)]
        words += ["--global-batch", str(args.rows), "--evaluation.every", "0", "--checkpoint.every", "0"]
        words += ["--sample.tokens", "0", "--export.enabled", "false", "--log.trackers", "none"]
        words += ["--schedule.keep-mib", str(args.keep_mib)] if packing == KEPT else []
        subprocess.run([*words, "--output", folder], check=True, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines][1:]


def main() -> None:
    """Run and write."""
    args = arguments()
    steps: dict[str, list[dict[str, Any]]] = {packing: [] for packing in PACKINGS}
    for _ in range(args.rounds):
        for packing in PACKINGS:
            steps[packing] += train(args, packing)
            print(packing, [round(one["tokens"] / one["seconds"]) for one in steps[packing]], flush=True)
    rows = []
    for packing, ran in steps.items():
        speeds = [one["tokens"] / one["seconds"] for one in ran]
        measured = [one["compute_imbalance"] for one in ran if one.get("compute_imbalance")]
        modelled = [one["imbalance"] for one in ran if one.get("imbalance")]
        rows.append(
            {
                "packing": packing,
                "tokens_per_second": sum(one["tokens"] for one in ran) / sum(one["seconds"] for one in ran),
                "slowest": min(speeds),
                "fastest": max(speeds),
                "imbalance": statistics.median(measured) if measured else None,
                "modelled": statistics.median(modelled) if modelled else None,
            }
        )
    command = f"python benchmarks/packing.py {shlex.join(sys.argv[1:])}"
    about = {"command": command, "python": platform.python_version(), "torch": torch.__version__}
    args.out.mkdir(parents=True, exist_ok=True)
    content = {"settings": about, "rows": rows, "steps": steps}
    (args.out / "packing.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    lines = [
        f"`{command}`",
        "",
        "| packing | learned tokens/s | of single steps | x fit | busiest process | modelled |",
    ]
    lines.append("| --- | --: | --: | --: | --: | --: |")
    for row in rows:
        cells = [row["packing"], f"{row['tokens_per_second']:,.0f}", f"{row['slowest']:,.0f} to {row['fastest']:,.0f}"]
        cells.append(f"{row['tokens_per_second'] / rows[0]['tokens_per_second']:.2f}")
        cells += ["" if row[name] is None else f"{row[name]:.2f}" for name in ("imbalance", "modelled")]
        lines.append(f"| {' | '.join(cells)} |")
    text = "\n".join(
        [*lines, "", "Busiest process: its seconds of computing over the mean of all, measured and modelled."]
    )
    (args.out / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
