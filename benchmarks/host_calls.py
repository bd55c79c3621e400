"""Count what the host does for one layer and micro-batch of training: calls from Python, and operators launched.

    python benchmarks/host_calls.py [--layers 32,16] [--json FILE]

A Llama with small layers trains in one process, after a first step that is not counted. The numbers of two depths are
subtracted, so that embedding and head do not count. The end of a step does: an optimizer step per layer, for two
micro-batches. Calls are those that ``cProfile`` sees in the thread that computes, of functions in Python and in C.
Operators are the ``aten::`` events of torch's profiler there, nested ones included. Neither varies from run to run.
``plain`` is transformers' model in a loop of its own, without an optimizer.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch.autograd.profiler import profile
from transformers import LlamaConfig, LlamaForCausalLM

from tawpipe import CheckSettings, Pipeline, ScheduleSettings, TrainingSettings

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "none": {"recompute": "none"},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "chunks": {"sequence_chunk": 8},
    "lora": {},
    "nf4": {},
}
"""Name -> settings of the schedule. A row has two chunks; ``lora`` and ``nf4`` (its base in 4 bits) recompute all."""
_BEFORE = (158, 548), (1324, 878), (10249, 1275), (1010, 1079), (3414, 2585), (1895, 2000), (2067, 2264)
BEFORE: dict[str, tuple[int, int]] = dict(zip(WAYS, _BEFORE, strict=True))
"""Name -> calls and operators at commit c08d65dd, with torch 2.13.0 and transformers 5.23.0."""
MICRO_BATCHES, TOKENS = 2, 16


def counted(way: str, layers: int) -> tuple[int, int]:
    """Train; return the calls of the second step, and the operators of the fourth."""
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": layers}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    ids = torch.zeros(MICRO_BATCHES, TOKENS, dtype=torch.long)
    calls, operators = cProfile.Profile(), profile()
    acts: list[Any] = [calls.enable, calls.disable, operators.__enter__, partial(operators.__exit__, None, None, None)]
    if way == "plain":
        for act in (None, *acts):
            _ = act and act()
            for row in ids.split(1):
                model(input_ids=row, labels=row, use_cache=False).loss.backward()
    else:
        if way in ("lora", "nf4"):
            model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))
        schedule = ScheduleSettings(micro_batches_per_visit=MICRO_BATCHES, **WAYS[way])
        training = TrainingSettings(quantize="nf4" if way == "nf4" else "none")
        pipeline = Pipeline(model, checks=CheckSettings(check="never"), training=training, schedule=schedule)
        for act in (None, *acts):
            _ = act and pipeline.executor.on_compute(act)
            pipeline.step({"input_ids": ids, "labels": ids})
            pipeline.drain()
        pipeline.close()
    launched = sum(event.count for event in operators.key_averages() if event.key.startswith("aten::"))
    return pstats.Stats(calls).total_calls, launched  # type: ignore[attr-defined]


def of_layer(way: str, more: int, fewer: int) -> tuple[int, int]:
    """Return the calls and the operators of one layer and micro-batch, from two numbers of layers."""
    pairs = zip(counted(way, more), counted(way, fewer), strict=True)
    calls, operators = (round((high - low) / (more - fewer) / MICRO_BATCHES) for high, low in pairs)
    return calls, operators


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="32,16", help="two numbers of layers, the larger first")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    more, fewer = map(int, arguments.layers.split(","))
    print("| | calls | before | operators | before |\n| --- | ---: | ---: | ---: | ---: |")
    rows = {}
    for way in WAYS:
        (calls, operators), (calls_before, before) = of_layer(way, more, fewer), BEFORE.get(way, (0, 0))
        print(f"| {way} | {calls:,} | {calls_before:,} | {operators:,} | {before:,} |", flush=True)
        rows[way] = {"calls": calls, "calls_before": calls_before, "operators": operators, "operators_before": before}
    if arguments.json:
        about = {"torch": torch.__version__, "transformers": transformers.__version__, "layers": [more, fewer]}
        arguments.json.write_text(json.dumps({**about, "ways": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
