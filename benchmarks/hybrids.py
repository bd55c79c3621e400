"""What do uneven documents cost a model that carries a state along a row? A step of Qwen3-Next by both packings.

    python benchmarks/hybrids.py --out benchmarks/results/DATE-hybrids

Steps of one process on some documents: dealt as ``--packing balanced`` deals them (one bin, in which mixers run on
rectangles of documents of similar lengths), and as ``--packing none`` has them, a row for each: all of them in one
micro-batch too, padded to the longest, and each a micro-batch of its own (``--micro-batch 1``). Lengths are drawn anew
for every step, log-normal with a spread of 1, as conversations have it. Seconds are those of the processor in one
thread, which other processes disturb less; all ways run in turn, and of every step the median of some rounds after one
that does not count is taken. Random weights, fp32. Writes ``hybrids.json`` and ``table.md``.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from tawpipe import Pipeline
from tawpipe.model.batch import MicroBatch

CASES = (32, 52), (4, 480)
"""(documents, their mean length)"""
VOCABULARY = 2048


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--layers", type=int, default=4, help="of which each fourth is attention")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4, help="with other lengths")
    parser.add_argument("--rounds", type=int, default=3, help="readings of both ways, after one that does not count")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def model_of(layers: int, hidden: int) -> Qwen3NextForCausalLM:
    """A small Qwen3-Next with random weights."""
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=hidden // 4,
        linear_value_head_dim=hidden // 4,
        num_experts=0,
        mlp_only_layers=list(range(layers)),
    )
    return Qwen3NextForCausalLM(config)


def lengths_of(documents: int, mean: int, step: int) -> list[int]:
    """Lengths of one step's documents, the same everywhere."""
    drawn = torch.randn(documents, generator=torch.Generator().manual_seed(step)).exp()
    return [max(2, round(float(one))) for one in drawn / drawn.mean() * mean]


def document(number: int, length: int) -> MicroBatch:
    """Random tokens."""
    ids: Tensor = torch.randint(0, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(number))
    return MicroBatch.of_documents(ids, ids, [length])


def seconds_of(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Processor seconds of each way, the median of its rounds."""
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds + 1):
        for way, run in ways.items():
            begin = time.process_time()
            run()
            taken[way].append(time.process_time() - begin)
    return {way: statistics.median(seconds[1:]) for way, seconds in taken.items()}


def measured(case: tuple[int, int], given: argparse.Namespace) -> dict[str, object]:
    """Processor seconds of a step by every way, the mean of some steps."""
    usual = {"dtype": torch.float32, "check": "never", "bin_tokens": 2 * math.prod(case)}
    pipelines = {
        way: Pipeline(model_of(given.layers, given.hidden), micro_batch=together, **usual)
        for way, together in (("balanced", 1), ("together", case[0]), ("one by one", 1))
    }
    losses: dict[str, float] = {}

    def step(way: str, lengths: list[int]) -> None:
        pipeline = pipelines[way]
        rows = [document(number, length) for number, length in enumerate(lengths)]
        if way == "balanced":
            batch = pipeline.part_of_documents(lengths, rows.__getitem__)
        else:
            batch = pipeline.part_of(len(rows), max(lengths), rows.__getitem__)
        losses.setdefault(way, pipeline.step(batch).loss)
        pipeline.drain()

    drawn = [lengths_of(*case, number) for number in range(given.steps)]
    seconds = dict.fromkeys(pipelines, 0.0)
    for lengths in drawn:
        ways = {way: partial(step, way, lengths) for way in pipelines}
        for way, taken in seconds_of(ways, given.rounds).items():
            seconds[way] += taken / given.steps
    for pipeline in pipelines.values():
        pipeline.close()
    expected = losses["one by one"]
    assert all(abs(loss - expected) < 1e-4 * expected for loss in losses.values()), losses
    return {"documents": case[0], "mean": case[1], "lengths": drawn, "seconds": seconds}


def table(results: list[dict], given: argparse.Namespace) -> str:
    """The table of what was measured."""
    command = shlex.join(["python", *sys.argv])
    lines = [
        f"`{command}` on {platform.processor() or platform.machine()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}: Qwen3-Next of {given.layers} layers, {given.hidden} wide, without the packages "
        "of its kernels, fp32, one thread. Processor seconds of a step.\n",
        "| documents | mean length | balanced | none | balanced / none | none, --micro-batch 1 | balanced / that |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        seconds = result["seconds"]
        cells = [str(result["documents"]), str(result["mean"]), f"{seconds['balanced']:.2f}"]
        for way in ("together", "one by one"):
            cells += [f"{seconds[way]:.2f}", f"{seconds['balanced'] / seconds[way]:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    given = arguments()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    results = [measured(case, given) for case in CASES]
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "hybrids.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (given.out / "table.md").write_text(table(results, given), encoding="utf-8")
    print(table(results, given))


if __name__ == "__main__":
    main()
