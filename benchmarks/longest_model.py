"""What all sides of the longest row share: a model with its weights, a row of tokens, the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3_5TextConfig

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
    """A model of one of ``FAMILIES``: Llama, or Qwen3.5, of which three of four layers are linear attention."""

    hidden: int = 512
    layers: int = 8
    heads: int = 8
    key_heads: int = 2
    intermediate: int = 1792
    vocabulary: int = 8192
    family: str = "llama"

    @classmethod
    def read(cls, text: str, family: str = "llama") -> Shape:
        """Numbers in the order of the fields, separated by commas."""
        return cls(*map(int, text.split(",")), family=family)

    @property
    def numbers(self) -> str:
        """What ``read`` reads."""
        return ",".join(map(str, astuple(self)[:-1]))

    @property
    def config(self) -> PreTrainedConfig:
        kind, own = FAMILIES[self.family]
        return kind(
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
            **own(self),
        )

    def made(self) -> Any:
        """The model with its initial weights, the same in every process."""
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(self.config).train()


def _hybrid(shape: Shape) -> dict[str, int]:
    """Heads of attention and of linear attention of one width, as many values as queries and half as many keys."""
    width = shape.hidden // shape.heads
    widths = dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim"), width)
    return {**widths, "linear_num_value_heads": shape.heads, "linear_num_key_heads": shape.heads // 2}


FAMILIES: dict[str, tuple[type[PreTrainedConfig], Callable[[Shape], dict[str, int]]]] = {
    "llama": (LlamaConfig, lambda _: {}),
    "qwen3_5": (Qwen3_5TextConfig, _hybrid),
}
"""By name, the config and its settings that no other has."""


def row(shape: Shape, tokens: int) -> Tensor:
    """Random tokens [1, tokens], the same in every process."""
    return torch.randint(0, shape.vocabulary, (1, tokens), generator=torch.Generator().manual_seed(tokens))
