"""The sides of the longest row: one Llama with the same weights, loss and optimizer, trained by others and by us.

A side takes one row of tokens, trains on it and says the mean loss and the norm of the gradient. Everybody recomputes
layers in the backward pass; gradients of others stay allocated between steps, so that they count as part of the loaded
model, as our buffers do.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, fields
from math import ceil
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from tawpipe import Pipeline
from tawpipe.model.batch import IGNORE
from tawpipe.plan.machine import uniform
from tawpipe.plan.measure import request_of
from tawpipe.plan.predict import memory_of
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.strategies import build
from tawpipe.simulate import LinkModel

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


class WithLoss(nn.Module):
    """The model and its own loss, which has the logits of the whole row."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, labels=ids).loss


class WithChunkedLoss(WithLoss):
    """The model, and a loss that has the logits of ``LOSS_TOKENS`` positions, computed again in the backward pass."""

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.model.model(input_ids=ids).last_hidden_state
        labels = F.pad(ids[:, 1:], (0, 1), value=IGNORE)
        parts = zip(hidden.split(LOSS_TOKENS, dim=1), labels.split(LOSS_TOKENS, dim=1), strict=True)
        summed = [checkpoint(self._part, *part, use_reentrant=False) for part in parts]
        return torch.stack(summed).sum() / (ids.numel() - len(ids))

    def _part(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = self.model.lm_head(hidden)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class HuggingFace:
    """transformers' model with gradient checkpointing, and its own loss."""

    loss: type[WithLoss] = WithLoss

    def __init__(self, shape: Shape) -> None:
        model = shape.made()
        name = "activation_checkpointing_enable"  # older releases call it gradient_checkpointing_enable
        enable = getattr(model, name, None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        self.module: nn.Module = self.loss(model)
        self.prepare(model)
        self.parameters = list(self.module.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, **OPTIMIZER)

    def prepare(self, model: Any) -> None:
        """Change the model before the optimizer is made."""

    def step(self, ids: Tensor) -> Result:
        loss = self.module(ids)
        loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return Result(float(loss.detach()), float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))


class ChunkedLoss(HuggingFace):
    """The same with a chunked loss."""

    loss = WithChunkedLoss


class Fsdp2(ChunkedLoss):
    """The same under ``fully_shard``, every layer a unit; every process has a row of its own, of the same tokens."""

    def prepare(self, model: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo")
        for part in (*model.model.layers, self.module):
            fully_shard(part)


class DeepSpeed(ChunkedLoss):
    """The same with DeepSpeed's tiled MLP, in as many tiles as its own example makes."""

    def prepare(self, model: Any) -> None:
        try:
            from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise CannotRun(f"DeepSpeed is not there ({error}): pip install deepspeed") from error

        def compute(mlp: Any, hidden: Tensor) -> Tensor:
            return mlp.down_proj(mlp.act_fn(mlp.gate_proj(hidden)) * mlp.up_proj(hidden))

        def tiled(mlp: Any) -> Any:
            weights = [mlp.down_proj.weight, mlp.gate_proj.weight, mlp.up_proj.weight]
            return lambda hidden: TiledMLP.apply(compute, mlp, hidden, ceil(hidden.shape[1] / hidden.shape[2]), weights)

        for layer in model.model.layers:
            layer.mlp.forward = tiled(layer.mlp)


class Ours:
    """This project's runtime, one micro-batch of one row.

    Raises:
        CannotRun: this version has no such setting.
    """

    def __init__(self, shape: Shape, **settings: Any) -> None:
        known = {one.name for one in fields(ScheduleSettings)}
        if missing := [name for name in settings if name not in known]:
            raise CannotRun(f"this version has no schedule.{missing[0]}")
        self.pipeline = Pipeline(
            shape.made(),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, **OPTIMIZER),
            schedule=ScheduleSettings(micro_batches_per_visit=1, loss_chunk_tokens=LOSS_TOKENS, **settings),
            dtype=torch.float32,
            clip_norm=CLIP,
            check="never",
        )

    def step(self, ids: Tensor) -> Result:
        result = self.pipeline.step({"input_ids": ids, "labels": ids})
        self.pipeline.drain()
        return Result(result.loss, result.grad_norm)


OTHERS: dict[str, type[HuggingFace]] = {
    "huggingface": HuggingFace,
    "huggingface-chunked-loss": ChunkedLoss,
    "fsdp2": Fsdp2,
    "deepspeed": DeepSpeed,
}
TWO = ("fsdp2", "tawpipe-chunked-x2")
"""Sides of two processes."""
OURS = ("tawpipe", "tawpipe-chunked", "tawpipe-chunked-files", "tawpipe-chunked-x2")
SIDES = (*OTHERS, *OURS)


def settings_of(side: str, shape: Shape, chunk: int, folder: str) -> dict[str, Any]:
    """The settings of one of ``OURS``.

    Args:
        folder: for the files of layers' inputs.
    """
    settings: dict[str, Any] = {"recompute": "full"}
    if side != "tawpipe":
        settings["sequence_chunk"] = chunk
    if side == "tawpipe-chunked-files":
        settings |= {"offloaded_layers": shape.layers, "offload_dir": folder}
    if side == "tawpipe-chunked-x2":
        settings["sequence_ranks"] = 2
    return settings


def make_side(side: str, shape: Shape, chunk: int, folder: str) -> HuggingFace | Ours:
    """A side in this process, whose rank torchrun's variables say."""
    return OTHERS[side](shape) if side in OTHERS else Ours(shape, **settings_of(side, shape, chunk, folder))


def predicted_bytes(side: str, shape: Shape, chunk: int, tokens: int) -> int:
    """What our schedule counts that a step on a row takes besides what is there before it; on one process."""
    settings = settings_of(side, shape, chunk, "")
    asked = ScheduleSettings(micro_batches_per_visit=1, loss_chunk_tokens=LOSS_TOKENS, **settings)
    machine = uniform(1, 1, between=LinkModel(1e9), inside=LinkModel(1e9))
    with tempfile.TemporaryDirectory() as folder:
        shape.config.save_pretrained(folder)
        request = request_of(
            folder,
            machine,
            sequence_length=tokens,
            global_batch=1,
            dtype=torch.float32,
            settings=asked,
            timed=False,
            profile="measure",
        )
    parts = memory_of(request, build(request.step(asked))).parts
    return parts["activations"] + parts["working"]
