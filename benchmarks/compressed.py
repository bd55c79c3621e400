"""What 8 bits between nodes cost in convergence: the same run with every kind of compression.

    python benchmarks/compressed.py --out benchmarks/results/DATE-compressed -- --steps 300

Trains on four processes as two virtual nodes, with the same data, seed and settings each time; what follows ``--`` goes
to ``tawpipe train``. Writes ``compressed.json`` with the losses of every run, and ``table.md`` with the validation
losses and how far the training loss is from that of the first run, in the mean over the last quarter of the steps.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

COMPRESSIONS = [
    ("none", "none"),
    ("int8", "none"),
    ("fp8", "none"),
    ("none", "int8"),
    ("none", "fp8"),
    ("int8", "int8"),
    ("fp8", "fp8"),
]
"""Of weights and of gradients."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("compressed"))
    parser.add_argument("--seeds", type=int, default=2, help="so many full-precision runs, to see what a seed changes")
    parser.add_argument("words", nargs="*", help="for tawpipe train")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    runs = [("none", "none", seed) for seed in range(args.seeds)]
    runs += [(weights, gradients, 0) for weights, gradients in COMPRESSIONS[1:]]
    rows: list[dict[str, Any]] = []
    environment = {
        "versions": {"torch": torch.__version__},
        "command": shlex.join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
    }
    for weights, gradients, seed in runs:
        rows.append(
            {"weights": weights, "gradients": gradients, "seed": seed, **train(weights, gradients, seed, args.words)}
        )
        print(json.dumps({key: value for key, value in rows[-1].items() if not isinstance(value, list)}), flush=True)
        content = {"environment": environment, "rows": rows}
        (args.out / "compressed.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        (args.out / "table.md").write_text(table(environment, rows), encoding="utf-8")


def train(weights: str, gradients: str, seed: int, words: list[str]) -> dict[str, Any]:
    """Losses of one run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tawpipe", "train", "--nproc", "4", "--nodes", "2", "--output", folder]
        command += ["--schedule.weights-compression", weights, "--schedule.gradients-compression", gradients]
        command += ["--seed", str(seed)]
        command += ["--checkpoint.every", "0", "--export.enabled", "false", "--log.trackers", "none", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line) for line in lines]
    validation = [row["validation_loss"] for row in metrics if row.get("validation_loss") is not None]
    return {
        "validation_loss": validation[-1] if validation else None,
        "losses": [row["loss"] for row in metrics],
        "validation_losses": validation,
        "gradient_norms": [row["grad_norm"] for row in metrics],
    }


def table(environment: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    first = rows[0]
    last = len(first["losses"]) // 4
    lines = [
        f"{environment['date']}, `{environment['command']}`, {len(first['losses'])} steps",
        "",
        "| weights | gradients | seed | validation loss | against the first | training loss, last quarter |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        if row["validation_loss"] is None:
            raise SystemExit("no validation loss: train with --evaluation.every above 0")
        off = statistics.mean(a - b for a, b in zip(row["losses"][-last:], first["losses"][-last:], strict=True))
        against = row["validation_loss"] - first["validation_loss"]
        lines.append(
            f"| {row['weights']} | {row['gradients']} | {row['seed']} | {row['validation_loss']:.4f} "
            f"| {against:+.4f} | {off:+.4f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
