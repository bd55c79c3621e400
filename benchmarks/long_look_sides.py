"""The sides of the long look: one model, trained by this project's runtime, by a plain loop and under FSDP2.

Every side takes the global batch of a step, and says the mean loss over its tokens and the norm of the gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from tawpipe import Pipeline
from tawpipe.model.batch import IGNORE
from tawpipe.runtime.optimizer import adamw
from tawpipe.runtime.world import World
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe_lab.real_modules import ATTENTION

SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
LENGTH, BATCH = 128, 8
"""Tokens of a row, rows of a step."""
PROCESSES = 2
RATE, DECAY, BETAS, EPS, CLIP = 2e-3, 0.1, (0.9, 0.95), 1e-8, 1.0
VALIDATED = 16
"""Rows that a rival validates at once."""
Batch = dict[str, Tensor]
"""input_ids, labels and position_ids [rows, S], in the Hugging Face convention."""


class Result(NamedTuple):
    """What a step of a rival says; see `tawpipe.runtime.executor.StepResult`."""

    loss: float
    grad_norm: float


def make_model() -> LlamaForCausalLM:
    """The model with its initial weights, the same in every process."""
    torch.manual_seed(0)
    none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **none, **ATTENTION, max_position_embeddings=LENGTH))


def cut(batch: Batch, part: int, parts: int) -> Batch:
    """One of equal parts of the rows."""
    rows = len(batch["labels"]) // parts
    return {name: tensor[part * rows : (part + 1) * rows] for name, tensor in batch.items()}


class Ours:
    """This project's runtime with its defaults, a process's rows in two micro-batches."""

    def __init__(self, dtype: torch.dtype, world: World) -> None:
        self.pipeline = Pipeline(
            make_model(),
            optimizer=adamw(RATE, weight_decay=DECAY, betas=BETAS, eps=EPS),
            micro_batch=BATCH // world.size // 2,
            schedule=ScheduleSettings(micro_batches_per_visit=2),
            dtype=dtype,
            clip_norm=CLIP,
            world=world,
        )

    def step(self, batch: Batch, factor: float) -> Any:
        return self.pipeline.step(batch, rate=factor)

    def evaluate(self, batch: Batch) -> float:
        return self.pipeline.evaluate(batch).loss

    def close(self) -> None:
        self.pipeline.close()


class Plain:
    """A loop as one writes it, on one process: weights in ``dtype``, their masters in fp32.

    A step's rows are computed in as many parts as FSDP2 has processes, and the parts' gradients summed in fp32.
    """

    def __init__(self, dtype: torch.dtype, world: World) -> None:
        self.dtype, self.world, self.model = dtype, world, make_model()
        self.masters = self.prepare()
        groups = [
            {"params": [p for p in self.masters if p.ndim > 1], "weight_decay": DECAY},
            {"params": [p for p in self.masters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPS, fused=True)

    def prepare(self) -> list[nn.Parameter]:
        """What the optimizer updates."""
        masters = [nn.Parameter(p.detach().clone()) for p in self.model.parameters()]
        self.model.to(self.dtype)  # pyright: ignore[reportArgumentType]
        return masters

    def step(self, batch: Batch, factor: float) -> Result:
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * factor
        loss = self.backward(batch, int((batch["labels"] != IGNORE).sum()))
        norm: Any = nn.utils.clip_grad_norm_(self.masters, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.refresh()
        return Result(loss, float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))

    def backward(self, batch: Batch, tokens: int) -> float:
        """Gradients of the mean loss into the masters; returns that loss."""
        total = 0.0
        for part in range(PROCESSES):
            loss = self.losses(cut(batch, part, PROCESSES)) / tokens
            loss.backward()
            total += float(loss.detach())
            for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
                assert parameter.grad is not None
                gradient, parameter.grad = parameter.grad.float(), None
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        return total

    @torch.no_grad()
    def refresh(self) -> None:
        """The updated masters become the weights that compute."""
        for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
            parameter.copy_(master)

    def losses(self, batch: Batch) -> Tensor:
        """The sum over all tokens, of logits in fp32; transformers keeps packed documents apart by their positions."""
        logits = self.model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        assert logits is not None
        labels = batch["labels"][:, 1:].flatten()
        return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels, ignore_index=IGNORE, reduction="sum")

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        mine = cut(batch, self.world.rank, self.world.size)
        parts = len(mine["labels"]) // VALIDATED
        total = torch.stack([self.losses(cut(mine, part, parts)).double() for part in range(parts)]).sum()
        return self.sum(total) / int((batch["labels"] != IGNORE).sum())

    def sum(self, value: Tensor) -> float:
        """Over all processes."""
        return float(value)

    def close(self) -> None:
        self.world.leave()


class Fsdp2(Plain):
    """FSDP2 as torch ships it: every layer and the rest fully sharded, in its mixed precision."""

    def prepare(self) -> list[nn.Parameter]:
        mesh = init_device_mesh("cpu", (self.world.size,))
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        for part in (*self.model.model.layers, self.model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        return list(self.model.parameters())

    def backward(self, batch: Batch, tokens: int) -> float:
        loss = self.losses(cut(batch, self.world.rank, self.world.size)) / tokens
        (loss * self.world.size).backward()  # FSDP2 takes the mean over the processes
        return self.sum(loss.detach().double())

    def refresh(self) -> None:
        pass  # the next gather casts them

    def sum(self, value: Tensor) -> float:
        dist.all_reduce(value)
        return float(value)


SIDES: dict[str, Any] = {"ours": Ours, "plain": Plain, "fsdp2": Fsdp2}
