"""Small runs of ``tawpipe train`` in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from forked_commands import run_tawpipe

TIMEOUT_S = 300


def command(home: Path, output: str, *words: str) -> list[str]:
    return [
        *("-m", "tawpipe", "train", "--data", str(home / "corpus" / "*.txt"), "--model", str(home / "model")),
        *("--vocab-size", "400", "--sequence-length", "64", "--global-batch", "6", "--steps", "4", "--log.every", "1"),
        *("--checkpoint.every", "2", "--evaluation.every", "2", "--sample.tokens", "4", "--validation-fraction", "0.2"),
        *("--cache-dir", str(home / "cache"), "--output", str(home / output), "--plan", "none", *words),
    ]


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "1"}


def run(home: Path, output: str, *words: str):
    return subprocess.run(
        [sys.executable, *command(home, output, *words)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def run_forked(home: Path, output: str, *words: str, few_strategies: bool = False):
    """As ``run``, but what takes seconds has been imported."""
    return run_tawpipe(command(home, output, *words)[2:], environment(), TIMEOUT_S, few_strategies=few_strategies)


def rows(home: Path, output: str) -> list[dict]:
    return [json.loads(line) for line in (home / output / "metrics.jsonl").read_text().splitlines()]
