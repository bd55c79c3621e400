"""Rows that several ranks compute together, few tokens at a time: memory as counted and as allocated, and numbers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cases import exact
from model_requests import request_for
from pipelines import make_pipeline
from tawpipe.model.attention import chunked
from tawpipe.plan.cost import memory as memory_of_blocks
from tawpipe.plan.cost.predict import memory_of
from tawpipe.plan.machine.machine import uniform
from tawpipe.runtime.compute import cut_layer
from tawpipe.runtime.homes.optimizer import adamw
from tawpipe.runtime.peak import peak_of_step
from tawpipe.runtime.world import World
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.sizes import footprint
from tawpipe.schedule.strategies.build import build
from tawpipe.simulate import LinkModel

CONFIG = LlamaConfig(
    hidden_size=128,
    intermediate_size=448,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=1000,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
)


@contextmanager
def at_one_time(tokens: int) -> Iterator[None]:
    """Layers of shared rows compute so many tokens of a rank at one time, and look at few keys before them."""
    with ExitStack() as stack:
        for module in (cut_layer, footprint):
            stack.enter_context(patch.object(module, "AT_ONCE", tokens))
        for module in (chunked, memory_of_blocks):
            stack.enter_context(patch.object(module, "PAST_KEYS", 256))
        yield


def memory(world: World, *, tokens: int, at_once: int, **settings: Any) -> tuple[int, int]:
    """Activations and working memory of a step on one row of ``tokens`` tokens: bytes as counted, and as allocated."""
    given = {"micro_batches_per_visit": 1, "loss_chunk_tokens": 64, "sequence_ranks": world.size, **settings}
    schedule, link = ScheduleSettings(**given), LinkModel(1e9)
    asking: dict[str, Any] = {"sequence_length": tokens, "global_batch": 1, "dtype": torch.float32, "timed": False}
    ids = torch.randint(0, 1000, (1, tokens), generator=torch.Generator().manual_seed(1))
    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG)
    with tempfile.TemporaryDirectory() as folder, at_one_time(at_once):
        CONFIG.save_pretrained(folder)
        asked = request_for(folder, uniform(1, world.size, between=link, inside=link), settings=schedule, **asking)
        parts = memory_of(asked, build(asked.step(schedule))).parts
        pipeline = make_pipeline(model, optimizer=adamw(), world=world, check="never", **given)
        pipeline.step({"input_ids": ids, "labels": ids})
        pipeline.drain()
        measured = peak_of_step(pipeline.executor, lambda: pipeline.step({"input_ids": ids, "labels": ids}))
        pipeline.close()
    return parts["activations"] + parts["working"], measured


def exact_in_parts(world: World, *, at_once: int, **setting: Any) -> float:
    """As ``cases.exact``, of one setting, with so many tokens of a rank at one time."""
    with at_one_time(at_once):
        return exact(world, settings=[setting])[0]
