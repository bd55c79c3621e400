"""What worker processes run for the tests: training beside a plain PyTorch loop, and comparisons."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tawpipe.model.batch import MicroBatch
from tawpipe.pipeline import Pipeline
from tawpipe.runtime.lanes import random_delays
from tawpipe.runtime.optimizer import adamw
from tawpipe.runtime.world import World

LAYERS, VOCABULARY, LENGTH = 5, 61, 20
STEPS = 5
EPS = 1e-6
"""Of AdamW, above the rounding noise of an fp32 gradient: below it the sign of an element that should be 0 decides its update."""


def _norm_in_own_dtype(self: Any, hidden: Tensor) -> Tensor:
    """transformers computes this in fp32 even for an fp64 model, which would hide anything below 1e-8."""
    return self.weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


LlamaRMSNorm.forward = _norm_in_own_dtype


def llama(dtype: torch.dtype, *, tied: bool = False, dropout: float = 0.0) -> LlamaForCausalLM:
    """Five layers, odd sizes, the same values in every process."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=36,
        num_hidden_layers=LAYERS,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=tied,
        attention_dropout=dropout,
        max_position_embeddings=64,
    )
    torch.manual_seed(7)
    return LlamaForCausalLM(config).to(dtype)


def batches(rows: int, steps: int = STEPS) -> list[dict[str, Tensor]]:
    """Rows with masked prompts of uneven lengths, so that ranks hold different numbers of tokens that count."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(steps):
        ids = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)
        labels = ids.clone()
        for row in range(rows):
            labels[row, : 3 * row % LENGTH] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


@functools.lru_cache(maxsize=4)
def plain_loop(dtype: torch.dtype, tied: bool, rows: int) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, the first step's clipped gradients, and the weights after all steps."""
    model = llama(dtype, tied=tied)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), eps=EPS)
    losses, gradients = [], {}
    for batch in batches(rows):
        logits = model(batch["input_ids"]).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not losses:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients, {name: p.detach().clone() for name, p in model.named_parameters()}


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def exact(world: World, *, settings: list[dict[str, Any]]) -> list[float]:
    """For every setting the largest relative difference to the plain loop, over losses, gradients and weights."""
    return [_exact(world, **setting) for setting in settings]


def _exact(
    world: World,
    *,
    dtype: str,
    tied: bool,
    rows: int,
    delays: float = 0.0,
    evaluate_first: bool = False,
    **knobs: Any,
) -> float:
    kind = getattr(torch, dtype)
    delay = (lambda lane: random_delays(hash((lane, world.rank)), delays)) if delays else None
    pipeline = Pipeline(
        llama(kind, tied=tied),
        optimizer=adamw(3e-4, eps=EPS),
        dtype=kind,
        world=world,
        strict=True,
        chunk_tokens=8,
        delay=delay,
        **knobs,
    )
    expected_losses, expected_gradients, expected_weights = plain_loop(kind, tied, rows)
    worst = 0.0
    for step, batch in enumerate(batches(rows)):
        if evaluate_first:
            pipeline.evaluate(batch)
        result = pipeline.step(batch)
        if step == 0:
            pipeline.drain()
            for name in pipeline.parameter_names:
                gradient = pipeline.gradient(name)
                if gradient is not None:
                    worst = max(worst, relative(gradient, expected_gradients[name]))
        worst = max(worst, abs(result.loss - expected_losses[step]) / expected_losses[step])
    pipeline.drain()
    for name in pipeline.parameter_names:
        value = pipeline.parameter(name)
        if value is not None:
            worst = max(worst, relative(value, expected_weights[name]))
    pipeline.close()
    return worst


def weights_after(world: World, *, dropout: float = 0.0, delays: float = 0.0, rows: int = 5, **knobs: Any) -> Any:
    """Losses and weights (rank 0) after some steps; with dropout, or with random delays in every lane."""
    delay: Callable | None = (lambda lane: random_delays(hash(lane) + world.rank, delays)) if delays else None
    pipeline = Pipeline(
        llama(torch.float64, dropout=dropout),
        optimizer=adamw(3e-4, eps=EPS),
        dtype=torch.float64,
        world=world,
        strict=True,
        delay=delay,
        **knobs,
    )
    losses = [result.loss for result in [pipeline.step(batch) for batch in batches(rows)]]
    pipeline.drain()
    weights = {name: pipeline.parameter(name) for name in pipeline.parameter_names}
    pipeline.close()
    return losses, weights


def rank_without_rows(world: World) -> float:
    """A batch smaller than the world."""
    return _exact(world, dtype="float64", tied=False, rows=1, placement="spread")


def packed_rows(world: World) -> list[int]:
    """What this rank's shares of a batch hold."""
    pipeline = Pipeline(llama(torch.float32), world=world, micro_batch=2)
    rows = [row for share in pipeline.shares(7) for row in share.rows]
    assert all(isinstance(batch, MicroBatch) for batch in pipeline._local(batches(7)[0]).micro_batches)
    pipeline.close()
    return rows
