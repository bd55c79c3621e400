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
import gc
import json
import platform
import shlex
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tawpipe import Pipeline
from tawpipe.plan.machine import uniform
from tawpipe.plan.measure import request_of
from tawpipe.plan.predict import memory_of
from tawpipe.plan.probe import resident_memory
from tawpipe.runtime.optimizer import adamw
from tawpipe.runtime.peak import peak_of_step
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.strategies import build
from tawpipe.simulate import LinkModel
from tawpipe.train.metrics import peak_memory_bytes

RECOMPUTE = ("full", "selective", "none", "none:1,selective:1,full")
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHORT = 64
"""Tokens of the row of the step before the one that is measured."""


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


def live_bytes() -> int:
    """Bytes of all tensors on the device, counted once for those that share them."""
    storages: dict[int, int] = {}
    for one in gc.get_objects():
        if issubclass(type(one), Tensor) and one.device.type == HERE.type:
            storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return sum(storages.values())


def rows_of(documents: list[int]) -> dict[str, Tensor]:
    """A row of packed documents."""
    ids = torch.randint(0, 1000, (1, sum(documents)))
    positions = torch.cat([torch.arange(length) for length in documents]).unsqueeze(0)
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


def compare(config: LlamaConfig, documents: list[int], recompute: str, dtype: torch.dtype) -> dict[str, Any]:
    """Predicted and measured bytes of one setting."""
    tokens, settings = sum(documents), ScheduleSettings(recompute=recompute, micro_batches_per_visit=1)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        asked = request_of(
            folder,
            uniform(1, 1, between=LinkModel(1e9), inside=LinkModel(1e9)),
            sequence_length=tokens,
            global_batch=1,
            dtype=dtype,
            lengths=documents,
            settings=settings,
            timed=False,
            here=HERE,
        )
    needs = memory_of(asked, build(asked.step(settings)))
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    pipeline = Pipeline(model, optimizer=adamw(), schedule=settings, dtype=dtype)
    pipeline.step(rows_of([SHORT]))
    pipeline.drain()
    batch, began = rows_of(documents), time.perf_counter()
    before = live_bytes()
    passing = peak_of_step(pipeline.executor, lambda: pipeline.step(batch))
    seconds = time.perf_counter() - began
    pipeline.close()
    parts = {name: size for name, size in needs.parts.items() if name != "system"}
    return {
        "tokens": tokens,
        "document": documents[0],
        "recompute": recompute,
        "dtype": str(dtype).removeprefix("torch."),
        "predicted": parts,
        "predicted_bytes": sum(parts.values()),
        "before_bytes": before,
        "passing_bytes": passing,
        "measured_bytes": before + passing,
        "error": sum(parts.values()) / (before + passing) - 1,
        "passing_error": (parts["activations"] + parts["working"]) / passing - 1,
        "system_bytes": needs.parts["system"],
        "process_peak_bytes": peak_memory_bytes(HERE.type),
        "process_bytes_after": resident_memory(),
        "seconds": seconds,
    }


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
            with get_context("spawn").Pool(1) as alone:
                rows.append(alone.apply(compare, (config, documents, recompute, getattr(torch, args.dtype))))
            print(table(rows[-1:]).splitlines()[-1], f"{rows[-1]['seconds']:.0f} s", flush=True)
            (args.out / "memory.json").write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")
            (args.out / "table.md").write_text(f"`{settings['command']}`\n\n{table(rows)}\n")


if __name__ == "__main__":
    main()
