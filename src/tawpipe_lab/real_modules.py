"""Modules of the real workload: parts of a Llama of transformers, its batches, loss and optimizer.

The modules are transformers' own and are called as its model calls them, so that the parts together compute what the
whole model computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tawpipe.model.batch import IGNORE
from tawpipe.model.chain import Chain
from tawpipe.schedule.spec import ModelSpec
from tawpipe_lab.workload import RealWorkload

ATTENTION: dict[str, Any] = {"attn_implementation": "sdpa"}
"""Attention implementation that is causal if it gets no mask."""
ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8}
WEIGHT_DECAY = 0.1
"""Weight decay of matrices; vectors have none."""


def make_model(workload: RealWorkload) -> LlamaForCausalLM:
    """Build the whole model with random weights that depend only on the workload's seed, equal in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(workload.seed)
        return LlamaForCausalLM(_config(workload))


@lru_cache(maxsize=4)
def real_model_spec(workload: RealWorkload) -> ModelSpec:
    """Return the sizes of a real workload's blocks and units, for schedule builders. Results are cached.

    The model is built on the meta device, without memory for weights."""
    with torch.device("meta"):
        model = LlamaForCausalLM(_config(workload))
    return Chain(model).spec


def _config(workload: RealWorkload) -> LlamaConfig:
    """Return the transformers configuration of a real workload."""
    return LlamaConfig(
        vocab_size=workload.vocabulary,
        hidden_size=workload.hidden_size,
        intermediate_size=workload.intermediate_size,
        num_hidden_layers=workload.layers,
        num_attention_heads=workload.heads,
        num_key_value_heads=workload.heads,
        max_position_embeddings=workload.sequence_length,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **ATTENTION,
    )


def random_tokens(workload: RealWorkload, step: int, micro_batches: Iterable[int]) -> Tensor:
    """Return random tokens (micro-batches, sequence length) as int64, a function of seed, step and micro-batch number.

    Small token numbers are more frequent: the density falls with the power -2/3. So there is something to learn, and
    the loss of a step shows whether the steps before it changed the weights correctly.
    """
    rows = [np.random.default_rng([workload.seed, step, m]).random(workload.sequence_length) for m in micro_batches]
    return torch.from_numpy((np.stack(rows) ** 3 * workload.vocabulary).astype(np.int64))


class RealTask:
    """Real workload for rivals, see ``TimedTask``; its parts are embedding, layers and head."""

    sleeper = None
    has_loss = True

    def __init__(self, workload: RealWorkload) -> None:
        self.workload, self.num_parts, self.largest_norm = workload, workload.layers + 2, workload.clip_norm

    def parts(self) -> Iterator[nn.Module]:
        model = make_model(self.workload)
        return chain([model.model.embed_tokens], model.model.layers, [_Head(model)])

    def whole(self, parts: Sequence[nn.Module]) -> nn.Module:
        return RealChain(parts[0], parts[1:-1], parts[-1], _config(self.workload))

    def stage(self, blocks: range, *, parts_per_layer: int) -> nn.Module:
        embedding, *layers, head = self.parts()
        return RealChain(
            embedding if 0 in blocks else None,
            [layer for block, layer in enumerate(layers, start=1) if block in blocks],
            head if len(layers) + 1 in blocks else None,
            _config(self.workload),
        )

    def batch(self, step: int, micro_batches: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return inputs (micro-batches, sequence length) and targets, the next tokens.

        The last token of a row has the target ``IGNORE``.
        """
        tokens = random_tokens(self.workload, step, micro_batches)
        return tokens, F.pad(tokens[:, 1:], (0, 1), value=IGNORE)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        total = F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORE, reduction="sum")
        return total / self.workload.tokens

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        tensors = list(parameters)
        groups = [
            {"params": [p for p in tensors if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in tensors if p.ndim < 2], "weight_decay": 0.0},
        ]
        kept = [group for group in groups if group["params"]]
        return torch.optim.AdamW(kept, lr=self.workload.learning_rate, fused=True, **ADAMW)


class _Head(nn.Module):
    """Final norm and projection to the vocabulary: (batch, sequence, hidden) -> (batch, sequence, vocabulary)."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.norm, self.projection = model.model.norm, model.lm_head

    def forward(self, hidden: Tensor) -> Tensor:
        return self.projection(self.norm(hidden))


class RealChain(nn.Module):
    """Consecutive parts of the model as one module.

    Args:
        embedding: embedding; None if the input is hidden states (batch, sequence, hidden) instead of tokens (batch,
            sequence).
        layers: decoder layers.
        head: head; None if the output is hidden states instead of logits (batch, sequence, vocabulary).
    """

    def __init__(
        self, embedding: nn.Module | None, layers: Sequence[nn.Module], head: nn.Module | None, config: LlamaConfig
    ) -> None:
        super().__init__()
        self.embedding, self.layers, self.head = embedding, nn.ModuleList(layers), head
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1]).unsqueeze(0)
        if self.embedding is not None:
            x = self.embedding(x)
        rotations = self.rotary(x, position_ids=positions)
        for layer in self.layers:
            x = layer(x, position_embeddings=rotations, position_ids=positions)
        return x if self.head is None else self.head(x)
