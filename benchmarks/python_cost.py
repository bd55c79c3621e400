"""What Python costs for every action of a layer, beyond what the model's own modules cost.

    python benchmarks/python_cost.py

Evaluates a Llama whose layers have next to nothing to compute, in one process, and the plain model beside it; prints
seconds of CPU time, of which other processes on the machine take nothing.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tawpipe import CheckSettings, Pipeline

LAYERS, REPEATS, TIMES = 16, 5, 20


def cpu_ms(act: Callable[[], object]) -> float:
    """Milliseconds of CPU time of one call, the least of several means."""
    means = []
    act()
    for _ in range(REPEATS):
        begin = time.process_time()
        for _ in range(TIMES):
            act()
        means.append((time.process_time() - begin) / TIMES * 1e3)
    return min(means)


def main() -> None:
    torch.set_num_threads(1)
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": LAYERS}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    plain = copy.deepcopy(model).eval()
    pipeline = Pipeline(model, checks=CheckSettings(check="never"))
    ids = torch.zeros(1, 16, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    ours = cpu_ms(lambda: pipeline.evaluate(batch))
    with torch.no_grad():
        theirs = cpu_ms(lambda: plain(**batch))
    actions = len(pipeline.schedule(1, training=False).programs[0])
    pipeline.close()
    each = (ours - theirs) / actions
    print(f"{ours:.1f} ms, plain model {theirs:.1f} ms: {each:.2f} ms for each of {actions} actions")


if __name__ == "__main__":
    main()
