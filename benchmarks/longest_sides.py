"""The sides of the longest row: one model with the same weights, loss and optimizer, trained by others and by us.

A side takes one row of tokens, trains on it and says the mean loss and the norm of the gradient. All but one recompute
layers in the backward pass; gradients of others stay allocated between steps, so that they count as part of the loaded
model, as our buffers do.

What waits for the backward pass stays on the device, or goes to files: in a folder in memory, which the kernel counts
apart from a process's own (``-host``), or on a disk (``-files``).

DeepSpeed is its ALST: tiled MLP and tiled logits and loss, in the tiles that its examples and ArcticTraining make, and
Ulysses where two processes share a row. Its engine is left out: on one process it would share nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, fields
from math import ceil
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3_5TextConfig

from tawpipe import CheckSettings, Pipeline, TrainingSettings
from tawpipe.model.batch import IGNORE
from tawpipe.plan.cost.measure import Asked, request_of
from tawpipe.plan.cost.predict import memory_of
from tawpipe.plan.machine.machine import uniform
from tawpipe.prove.models import on_meta
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.strategies.build import build
from tawpipe.simulate import LinkModel

OPTIMIZER: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.0, "fused": True}
CLIP = 1.0
LOSS_TOKENS = 1024
"""Positions whose logits exist at one time, where the loss is chunked."""


class CannotRun(Exception):
    """A side that does not exist here; its text says why."""


class Result(NamedTuple):
    """Loss and gradient norm of a step."""

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
        """Return the numbers that ``read`` reads."""
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

    def is_derived(self) -> Any:
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


class Elsewhere(saved_tensors_hooks):
    """Context in which autograd saves tensors in files of a folder, as under torch's ``save_on_cpu``.

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
    """Hugging Face's model on this process's part of the row, which is filled up until all parts are equal."""

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
        model = shape.is_derived()
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
    """The model with a chunked loss."""

    loss = WithChunkedLoss


class Fsdp2(ChunkedLoss):
    """The model under ``fully_shard``, each layer a unit. Each process has a row of its own, with equal tokens."""

    def prepare(self, model: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo")
        for part in (*model.model.layers, self.module):
            fully_shard(part)


class DeepSpeed(HuggingFace):
    """The model with DeepSpeed's tiled MLP and tiled loss."""

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
            shape.is_derived(),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, **OPTIMIZER),
            schedule=ScheduleSettings(micro_batches_per_visit=1, loss_chunk_tokens=LOSS_TOKENS, **settings),
            dtype=torch.float32,
            training=TrainingSettings(clip_norm=CLIP),
            checks=CheckSettings(check="never"),
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
    "deepspeed-kept": Kept,
    "deepspeed-x2": Ulysses,
}
OURS = ("tawpipe", "tawpipe-chunked", "tawpipe-chunked-x2")
TWO = ("fsdp2", "deepspeed-x2", "tawpipe-chunked-x2")
"""Systems of two processes."""
PLACES = ("", "host", "files")
"""Where that waits which the backward pass needs; on the device if this is empty."""
SIDES = tuple(
    f"{system}-{place}".removesuffix("-")
    for system in (*OTHERS, *OURS)
    for place in PLACES
    if (system == "deepspeed-kept") <= bool(place) and (system in ("tawpipe", *TWO[1:])) <= (not place)
)
"""Systems with places. Whole rows of ours wait in memory that is not counted apart, and a row on two processes takes
too long where it is longer still."""


def parts_of(side: str) -> tuple[str, str]:
    """A side's system and place."""
    system, _, place = side.rpartition("-")
    return (system, place) if place in PLACES[1:] else (side, "")


def settings_of(side: str, chunk: int, layers: int, folder: str) -> dict[str, Any]:
    """The settings of one of ``OURS``, in a place.

    Args:
        layers: of the model.
        folder: for the files of layers' inputs.
    """
    system, place = parts_of(side)
    settings: dict[str, Any] = {"recompute": "full"}
    if system != "tawpipe":
        settings["sequence_chunk"] = chunk
    if place:
        settings |= {"offloaded_layers": layers, "offload_dir": folder}
    if system in TWO:
        settings["sequence_ranks"] = 2
    return settings


def make_side(side: str, shape: Shape, chunk: int, folder: str) -> HuggingFace | Ours:
    """A side in this process, whose rank torchrun's variables say.

    Args:
        folder: where files may be made; for ``-host`` in memory.
    """
    system, place = parts_of(side)
    if system not in OTHERS:
        return Ours(shape, **settings_of(side, chunk, shape.layers, folder))
    return OTHERS[system](shape, (lambda: Elsewhere(folder)) if place else nullcontext)


def predicted_bytes(side: str, shape: Shape, chunk: int, tokens: int) -> int:
    """What our schedule counts that a step on a row takes besides what is there before it; on one process."""
    settings = settings_of(side, chunk, shape.layers, "")
    asked = ScheduleSettings(micro_batches_per_visit=1, loss_chunk_tokens=LOSS_TOKENS, **settings)
    machine = uniform(1, 1, between=LinkModel(1e9), inside=LinkModel(1e9))
    row = Asked(tokens, 1, dtype=torch.float32, settings=asked, timed=False, profile="measure")
    request = request_of(on_meta(shape.config), machine, row)
    parts = memory_of(request, build(request.step(asked))).parts
    return parts["activations"] + parts["working"]
