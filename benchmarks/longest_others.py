"""The other sides of the longest row: Hugging Face, FSDP2 and DeepSpeed, each with all that it has against long rows.

DeepSpeed is its ALST: tiled MLP and tiled logits and loss, in the tiles that its examples and ArcticTraining make, and
Ulysses where two processes share a row. Its engine is left out: on one process it would share nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from math import ceil
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from longest_model import CLIP, LOSS_TOKENS, OPTIMIZER, CannotRun, Result, Shape
from tawpipe.model.batch import IGNORE


class Elsewhere(saved_tensors_hooks):
    """What autograd saves within it, in files of a folder, as under torch's ``save_on_cpu``.

    That keeps everything where it is if the device is the CPU, and so does DeepSpeed's own context manager. This one
    takes less of the device than either would: it leaves nothing there for a while, and copies at once. A folder in
    memory stands for the host's.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> Tensor | tuple[IO[bytes], torch.Size, torch.dtype, list[int]]:
        """Write a tensor; parameters stay."""
        if isinstance(tensor, nn.Parameter) or not tensor.numel():
            return tensor
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        dense = tensor.detach().permute(order).contiguous()  # a copy only where there are gaps
        file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115 - open until the graph is gone
        left = _bytes_of(dense)
        while left:
            left = left[file.write(left) :]
        return file, dense.shape, tensor.dtype, order

    def unpack(self, packed: Any) -> Tensor:
        """The tensor again, with its strides."""
        if isinstance(packed, Tensor):
            return packed
        file, shape, dtype, order = packed
        dense = torch.empty(shape, dtype=dtype)
        left = _bytes_of(dense)
        file.seek(0)
        while left:
            left = left[file.readinto(left) :]
        return dense.permute([order.index(axis) for axis in range(len(order))])


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]


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


class WithTiledLoss(WithLoss):
    """The model, and DeepSpeed's tiled logits and loss, which makes the gradient of the last hidden states at once.

    The mean is taken within: what comes back from outside would reach those, but not the head's weights.
    """

    def forward(self, ids: Tensor) -> Tensor:
        labels = F.pad(ids[:, 1:], (0, 1), value=IGNORE)
        return self.tiled(self.model.model(input_ids=ids).last_hidden_state, labels, ids.numel() - len(ids))

    def tiled(self, hidden: Tensor, labels: Tensor, counted: int) -> Tensor:
        """The loss of all labels, divided by ``counted``."""
        from deepspeed.runtime.sequence_parallel.ulysses_sp import (  # pyright: ignore[reportMissingImports]
            TiledFusedLogitsLoss,
        )

        def part(model: Any, hidden: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(model.lm_head(hidden), labels, reduction="sum") / counted

        tiles, weights = ceil(hidden.shape[1] / LOSS_TOKENS), [self.model.lm_head.weight]
        return TiledFusedLogitsLoss.apply(part, self.model, hidden, labels, None, tiles, weights, "sum")


class WithSharedRow(WithTiledLoss):
    """The same on this process's part of the row, which is filled up until all parts are equal."""

    def forward(self, ids: Tensor) -> Tensor:
        ranks, counted = dist.get_world_size(), ids.numel() - len(ids)
        labels = F.pad(ids[:, 1:], (0, 1), value=IGNORE)
        more = (0, -ids.shape[1] % ranks)
        ids, labels = F.pad(ids, more), F.pad(labels, more, value=IGNORE)
        length = ids.shape[1] // ranks
        part = slice(dist.get_rank() * length, (dist.get_rank() + 1) * length)
        places = torch.arange(ids.shape[1])[None, part]
        hidden = self.model.model(input_ids=ids[:, part], position_ids=places).last_hidden_state
        return self.tiled(hidden, labels[:, part], counted)


class HuggingFace:
    """transformers' model with gradient checkpointing, and its own loss.

    Args:
        saving: the context of the forward pass; what it saves may wait elsewhere.
    """

    loss: type[WithLoss] = WithLoss
    recompute = True

    def __init__(self, shape: Shape, saving: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self.saving = saving
        model = shape.made()
        if self.recompute:
            name = "activation_checkpointing_enable"  # older releases call it gradient_checkpointing_enable
            enable = getattr(model, name, None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        self.module: nn.Module = self.loss(model)
        self.prepare(model)
        self.parameters = list(self.module.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, **OPTIMIZER)

    def prepare(self, model: Any) -> None:
        """Change the model before the optimizer is made."""

    def reduce(self, loss: Tensor) -> Tensor:
        """Add up what other processes have; the row's loss."""
        return loss

    def step(self, ids: Tensor) -> Result:
        with self.saving():
            loss = self.module(ids)
        loss.backward()
        loss = self.reduce(loss.detach())
        norm: Any = nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return Result(float(loss), float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))


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


class DeepSpeed(HuggingFace):
    """The same with DeepSpeed's tiled MLP and tiled loss."""

    loss = WithTiledLoss

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


class Kept(DeepSpeed):
    """The same with nothing recomputed but tiles: whatever layers save waits elsewhere, too."""

    recompute = False


class Ulysses(DeepSpeed):
    """The same with one row on all processes, by DeepSpeed's Ulysses."""

    loss = WithSharedRow

    def prepare(self, model: Any) -> None:
        super().prepare(model)
        import deepspeed.comm  # pyright: ignore[reportMissingImports]
        from deepspeed.runtime.sequence_parallel.ulysses_sp import (  # pyright: ignore[reportMissingImports]
            UlyssesSPAttentionHF,
        )

        dist.init_process_group("gloo")
        deepspeed.comm.init_distributed("gloo", verbose=False)
        UlyssesSPAttentionHF.register_with_transformers(
            model, "sdpa", sequence_parallel_size=dist.get_world_size(), micro_batch_size=1
        )

    def reduce(self, loss: Tensor) -> Tensor:
        for parameter in self.parameters:
            dist.all_reduce(parameter.grad)
        dist.all_reduce(loss)
        return loss
