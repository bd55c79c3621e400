"""How close is the predicted memory of a step? One process, one long row, every setting of recomputation.

    python benchmarks/memory.py --out benchmarks/results/DATE-predicted-memory

A Llama is measured by ``plan.memory`` on rows of at most 2,048 tokens, and a step of the plan's schedule is predicted
from that. Then the step runs, after one of a short row, and torch's allocator says what its tensors took at the
highest: those that were there before (homes, optimizer states, buffers), and those that came and went, the scratch of
kernels included. Every setting runs in a process of its own. The longest row is of packed documents, because attention
takes the square of their length. Writes ``table.md`` and ``memory.json``.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig

from tawpipe.prove.memory import RECOMPUTE, by_itself

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rows", default="1x4096,1x16384,8x8192", help="number and tokens of their documents")
    parser.add_argument("--recompute", nargs="*", default=RECOMPUTE)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def table(rows: list[dict[str, Any]]) -> str:
    """The readings as a page."""
    mib = lambda size: f"{size / 2**20:.0f}"  # noqa: E731
    lines = [
        "| tokens | documents of | recompute | predicted MiB | measured MiB | error | what comes and goes alone |",
        "| --: | --: | --- | --: | --: | --: | --: |",
    ]
    for row in rows:
        lines.append(
            f"| {row['tokens']} | {row['document']} | {row['recompute']} | {mib(row['predicted_bytes'])} | "
            f"{mib(row['measured_bytes'])} | {row['error']:+.1%} | {row['passing_error']:+.1%} |"
        )
    return "\n".join(lines)


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    rows_asked = [[int(length)] * int(count) for count, length in (row.split("x") for row in args.rows.split(","))]
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 7 // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=args.vocabulary,
        max_position_embeddings=max(map(sum, rows_asked)),
        tie_word_embeddings=False,
    )
    settings = {
        "command": shlex.join(["python", *sys.argv]),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": platform.platform(),
        "device": HERE.type,
        "model": {name: getattr(args, name) for name in ("hidden", "layers", "vocabulary", "dtype")},
    }
    rows: list[dict[str, Any]] = []
    for documents in rows_asked:
        for recompute in args.recompute:
            rows.append(by_itself(config, documents, recompute, getattr(torch, args.dtype), HERE))
            print(table(rows[-1:]).splitlines()[-1], f"{rows[-1]['seconds']:.0f} s", flush=True)
            (args.out / "memory.json").write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")
            (args.out / "table.md").write_text(f"`{settings['command']}`\n\n{table(rows)}\n")


if __name__ == "__main__":
    main()
