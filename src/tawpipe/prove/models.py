"""Models that the checks train: Llamas with random weights in sizes for the device, and rows of random tokens."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tawpipe.model.chain import Chain
from tawpipe.runtime.dtype import chosen_dtype
from tawpipe.runtime.world import World
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.topology import Topology


def small() -> LlamaConfig:
    """Return the configuration of the small model whose numbers are compared."""
    return llama(hidden=64, layers=4, heads=4, vocabulary=500)


def sized(device: torch.device) -> LlamaConfig:
    """Return a configuration for the device: on a GPU with layers as large as in an 8 B model, on a CPU a small one."""
    if device.type == "cuda":
        return llama(hidden=4096, layers=4, heads=32, vocabulary=32_000)
    return llama(hidden=256, layers=4, heads=2, vocabulary=4000)


def llama(*, hidden: int, layers: int, heads: int, vocabulary: int) -> LlamaConfig:
    """Return the configuration of a Llama that has a quarter of its heads for keys and values."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 7 // 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        max_position_embeddings=1 << 24,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def on_meta(config: LlamaConfig) -> Chain:
    """Build the model on the meta device, without values."""
    with torch.device("meta"):
        model = LlamaForCausalLM(deepcopy(config))  # a chain changes the attention setting in its model's config
    return Chain(model)


def seeded_model(config: LlamaConfig, *, seed: int = 0) -> LlamaForCausalLM:
    """Build the model with random weights that are equal on every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def rows(config: LlamaConfig, number: int, length: int, *, seed: int = 0) -> dict[str, Tensor]:
    """Return a batch of ``number`` rows of ``length`` random tokens, equal on every process."""
    ids = torch.randint(0, config.vocab_size, (number, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def packed(config: LlamaConfig, documents: Sequence[int]) -> dict[str, Tensor]:
    """Return a batch of one row of random tokens, with ``position_ids`` that pack documents of these lengths."""
    positions = torch.cat([torch.arange(length) for length in documents]).unsqueeze(0)
    return rows(config, 1, sum(documents)) | {"position_ids": positions}


def alone(device: torch.device) -> World:
    """Return a world that consists of this process only."""
    return World(Topology.grid(1, 1), 0, device, None)


def dtype_here(world: World) -> torch.dtype:
    """Return the number type that a run with ``dtype: auto`` computes in on these devices."""
    return getattr(torch, chosen_dtype("auto", world)[0])


def ways(layers: int, chunk: int, **settings: Any) -> dict[str, ScheduleSettings]:
    """Return schedule settings by name for five ways to train, which use different copies and pools of memory.

    They are whole rows, chunks, offloading, offloading in chunks, and a pipeline.

    Args:
        layers: number of layers to offload.
        chunk: tokens of a chunk.
        **settings: further settings, for all of them except the pipeline.
    """
    rows = ScheduleSettings(**settings)
    return {
        "whole rows": rows,
        "chunks": replace(rows, sequence_chunk=chunk),
        "offloading": replace(rows, offloaded_layers=layers),
        "offloading, chunks": replace(rows, offloaded_layers=layers, sequence_chunk=chunk),
        "a pipeline": ScheduleSettings(strategy="1f1b"),
    }
