"""The Python work of a layer does not grow with the number of layers, whatever is kept of its graph."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tawpipe
from tawpipe.schedule.settings import ScheduleSettings

SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}


def calls_of_a_step(layers: int, recompute: str) -> int:
    """Calls of Python and C functions in the pipeline's threads in one step of two micro-batches."""
    counts: dict[int, int] = {}

    def count(frame: object, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            thread = threading.get_ident()
            counts[thread] = counts.get(thread, 0) + 1

    threading.setprofile(count)  # for the threads that the pipeline starts
    try:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=layers, num_key_value_heads=2))
        pipeline = tawpipe.Pipeline(
            model,
            dtype=torch.float32,
            checks=tawpipe.CheckSettings(check="never"),
            schedule=ScheduleSettings(recompute=recompute),
        )
        ids = torch.ones(2, 8, dtype=torch.long)
        for _ in range(2):
            counts.clear()
            pipeline.step({"input_ids": ids, "labels": ids})
            pipeline.drain()
        pipeline.close()
    finally:
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]
    return max(counts.values())


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_python_calls_per_layer_are_constant_in_the_number_of_layers(recompute: str) -> None:
    few, some, many = (calls_of_a_step(layers, recompute) for layers in (4, 8, 16))
    assert (many - some) / 8 == pytest.approx((some - few) / 4, rel=0.02)
