"""What all sides of the longest row share: a Llama with its weights, a row of tokens, the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

OPTIMIZER: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.0, "fused": True}
CLIP = 1.0
LOSS_TOKENS = 1024
"""Positions whose logits exist at one time, where the loss is chunked."""


class CannotRun(Exception):
    """A side that does not exist here; its text says why."""


class Result(NamedTuple):
    """What a step says."""

    loss: float
    norm: float


@dataclass(frozen=True)
class Shape:
    """A Llama."""

    hidden: int = 512
    layers: int = 8
    heads: int = 8
    key_heads: int = 2
    intermediate: int = 1792
    vocabulary: int = 8192

    @classmethod
    def read(cls, text: str) -> Shape:
        """Numbers in the order of the fields, separated by commas."""
        return cls(*map(int, text.split(",")))

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            max_position_embeddings=1 << 24,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
            use_cache=False,
        )

    def made(self) -> Any:
        """The model with its initial weights, the same in every process."""
        torch.manual_seed(0)
        return LlamaForCausalLM(self.config).train()


def row(shape: Shape, tokens: int) -> Tensor:
    """Random tokens [1, tokens], the same in every process."""
    return torch.randint(0, shape.vocabulary, (1, tokens), generator=torch.Generator().manual_seed(tokens))
