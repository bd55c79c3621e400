"""The trainers that are compared, with equal initial values, rows, loss and optimizer.

``Sharded`` is written as a user of FSDP2 writes it: transformers' own model, ``fully_shard`` layer by layer, explicit
prefetch and fused AdamW. A file of ``--rival`` has a function ``build(task)`` that returns ``step(ids) -> loss``.
"""

from __future__ import annotations

import contextlib
import copy
import runpy
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tawpipe.model.chain import Chain
from tawpipe.model.kernels import flash_in_use
from tawpipe.model.units import Unit
from tawpipe.model.weights import flatten
from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.pipeline.setup import CheckSettings
from tawpipe.runtime.homes.optimizer import adamw
from tawpipe.runtime.world import World
from tawpipe.schedule.settings import ScheduleSettings

DEVIATION = 0.02
"""Standard deviation of the initial values of matrices."""
PREFETCHED = 2
"""Layers whose weights FSDP2 gathers early."""


@dataclass(frozen=True)
class Task:
    """Training that every side does.

    Args:
        config: configuration of the model.
        rows: rows of each process in a step.
        length: tokens of a row.
        loss_tokens: tokens whose logits exist at one time.
        dtype: dtype in which layers compute.
        world: the processes.
    """

    config: LlamaConfig
    rows: int
    length: int
    loss_tokens: int
    dtype: torch.dtype
    world: World

    def local_rows(self, ids: Tensor) -> Tensor:
        """Return the rows of this process out of all rows of a step, on its device."""
        return ids[self.world.rank * self.rows :][: self.rows].to(self.world.device)


def initial(name: str, first: int, count: int, device: torch.device) -> Tensor:
    """Return elements ``first`` to ``first + count`` of a parameter's initial value, fp32, equal on every device.

    Norms are 1. Other values are uniform, from a hash of the parameter's name and the element's number.
    """
    if "norm" in name:
        return torch.ones(count, device=device)
    parts, mask = list[Tensor](), 0xFFFFFFFF
    for begin in range(first, first + count, 1 << 24):
        bits = torch.arange(begin, min(begin + (1 << 24), first + count), device=device) + zlib.crc32(name.encode())
        for shift, factor in ((16, 0x45D9F3B), (15, 0x2C1B3C6D), (16, 1)):  # a common integer hash
            bits = ((bits ^ (bits >> shift)) & mask) * factor & mask
        parts.append((bits.double() / mask - 0.5).mul_(2 * 3**0.5 * DEVIATION).float())
    return torch.cat(parts)


class InitialValues:
    """Source of the initial values of our sides, see ``initial``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def unit(self, unit: Unit, *, dtype: torch.dtype = torch.float32) -> Tensor:
        values = (initial(slot.name, 0, slot.numel, self.device).view(slot.shape) for slot in unit.slots)
        return flatten(unit, values, dtype)

    def buffers(self) -> dict[str, Tensor]:
        return {}


class Ours:
    """``Pipeline`` as a user calls it."""

    def __init__(self, task: Task, micro_batch: int, settings: Mapping[str, Any]) -> None:
        with torch.device("meta"):
            model = LlamaForCausalLM(copy.deepcopy(task.config))
        self.pipeline = Pipeline(
            Chain(model),
            weights=lambda _: InitialValues(task.world.device),
            optimizer=adamw(),
            schedule=ScheduleSettings(**settings, loss_chunk_tokens=task.loss_tokens),
            dtype=task.dtype,
            checks=CheckSettings(check="never"),
            micro_batch=micro_batch,
            world=task.world,
        )

        self.on_compute = self.pipeline.executor.on_compute

    def step(self, ids: Tensor) -> float:
        """Train on all rows of a step, [rows of all processes, tokens], and return the loss."""
        result = self.pipeline.step({"input_ids": ids, "labels": ids})
        self.pipeline.drain()
        return result.loss


class WithLoss(nn.Module):
    """transformers' model, and its loss in chunks of positions, whose logits are recomputed in the backward pass."""

    def __init__(self, model: Any, loss_tokens: int) -> None:
        super().__init__()
        self.model, self.loss_tokens = model, loss_tokens

    def forward(self, ids: Tensor) -> Tensor:
        """Return the summed loss of rows of tokens, [rows, tokens]."""
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
        pairs = zip(hidden.split(self.loss_tokens), ids[:, 1:].flatten().split(self.loss_tokens), strict=True)
        losses = [checkpoint(self._loss, part, labels, use_reentrant=False) for part, labels in pairs]
        return torch.stack(losses).sum()

    def _loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model.lm_head(hidden).float(), labels, reduction="sum")


class Sharded:
    """FSDP2: flat, as a 2-D mesh (HSDP), or with weights kept after the forward pass."""

    def __init__(self, task: Task, micro_batch: int, recompute: str, *, mesh: str = "flat", keep: bool = False) -> None:
        self.task, self.micro_batch, self.keep, device = task, micro_batch, keep, task.world.device
        with torch.device("meta"):
            model: Any = LlamaForCausalLM(copy.deepcopy(task.config)).train()
        if recompute == "full":
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        nodes = torch.tensor(task.world.topology.nodes)
        names = ("replicate", "shard") if mesh == "hsdp" else ("shard",)
        ranks = DeviceMesh(device.type, nodes if mesh == "hsdp" else nodes.flatten(), mesh_dim_names=names)
        policy = MixedPrecisionPolicy(param_dtype=task.dtype, reduce_dtype=torch.float32)
        settings: dict[str, Any] = {"mesh": ranks, "mp_policy": policy}
        layers: list[Any] = list(model.model.layers)
        for layer in layers:
            fully_shard(layer, reshard_after_forward=not keep, **settings)
        self.model: Any = fully_shard(WithLoss(model, task.loss_tokens), **settings)
        for number, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[number + 1 :][:PREFETCHED])
            layer.set_modules_to_backward_prefetch(layers[:number][: -PREFETCHED - 1 : -1])
        self.model.to_empty(device=device)
        with device:  # its frequencies are a buffer, which was on the meta device
            model.model.rotary_emb = LlamaRotaryEmbedding(task.config)
        self._fill(ranks["shard"])
        adamw_settings: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **adamw_settings)

    @torch.no_grad()
    def _fill(self, mesh: DeviceMesh) -> None:
        """Give every shard its initial values. FSDP2 divides parameters by their first dimension, rounded up."""
        for name, parameter in self.model.named_parameters():
            local: Any = parameter.to_local()
            per_rank = -(-parameter.shape[0] // mesh.size())
            first = min(mesh.get_local_rank() * per_rank, parameter.shape[0]) * parameter.shape[1:].numel()
            values = initial(name.removeprefix("model."), first, local.numel(), local.device)
            local.copy_(values.view(local.shape))

    def step(self, ids: Tensor) -> float:
        """Train on this rank's rows of all rows ``ids``, and return their loss; the mean over all ranks is the loss."""
        rows = self.task.local_rows(ids).split(self.micro_batch)
        loss, tokens = torch.zeros((), device=self.task.world.device), self.task.rows * (self.task.length - 1)
        order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        other = flash_in_use() != "FA2"  # torch would prefer cuDNN to the flash attention that ours takes
        with sdpa_kernel(order, set_priority=True) if other else contextlib.nullcontext():
            for number, part in enumerate(rows):
                last = number == len(rows) - 1
                self.model.set_requires_gradient_sync(last)
                self.model.set_reshard_after_backward(last or not self.keep)
                mean = self.model(part) / tokens
                mean.backward()
                loss += mean.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss)


Side = Any
"""Trainer with ``step(ids)``. ``Ours`` returns the loss, the others may return the loss of this rank's rows."""


def build(row: Mapping[str, Any], task: Task, file: str) -> Side:
    """Build the side of a row of the results. Call on all ranks."""
    if row["side"] == "ours":
        return Ours(task, row["micro_batch"], row["settings"])
    if row["side"] == "file":
        return SimpleNamespace(step=runpy.run_path(file)["build"](task))
    return Sharded(task, row["micro_batch"], row["recompute"], **row["settings"])
