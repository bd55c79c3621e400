"""Modules of the timed workload for rivals that train an ``nn.Module``: they sleep, and hold weights of real size.

The graph of a layer has three nodes, so that a pipeline schedule can run the two parts of its backward pass separately:

    x ──▶ input part ──▶ join ──▶ y        backward of the input part sleeps backward_input_s
    w ──▶ weight part ───┘                 backward of the weight part sleeps backward_weight_s

``torch.distributed.pipelining`` cuts a backward pass at the nodes where paths from weights meet paths from inputs (the
joins, which cost nothing). So the pass for the inputs never runs a weight part, and the later pass for the weights runs
only join and weight part. One node for both would sleep twice. In an undivided backward pass the weight part runs
first, because autograd takes the node that was made last. FSDP's reduction relies on this order: it starts when the
gradient of a layer's input exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, cast

import torch
from torch import Tensor, nn

from tawpipe.errors import UserError
from tawpipe_lab.sleeper import BusyTime, Sleeper
from tawpipe_lab.workload import TimedPart, TimedWorkload

INITIAL_WEIGHT = 0.01
LEARNING_RATE = 1e-4
LARGEST_NORM = 1.0


@dataclass
class _Linear:
    """Memory of a layer's linear modules between the backward pass for inputs and a later one for weights.

    Args:
        elements: number of elements that are held in between.
        held: tensor of these elements; None before and after.
        done: True once the backward pass for weights has run.
    """

    elements: int
    held: Tensor | None = None
    done: bool = False


class _InputPart(torch.autograd.Function):
    """Autograd node of a layer's input: passes it on; its backward sleeps ``seconds`` for the gradient of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sleeper: Sleeper, seconds: float, linear: _Linear) -> Tensor:
        ctx.save_for_backward(x)  # a real layer recomputes from this boundary activation, so it stays in memory
        ctx.sleeper, ctx.seconds, ctx.linear = sleeper, seconds, linear
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        with ctx.sleeper.computing(ctx.seconds):
            if ctx.linear.elements and not ctx.linear.done:
                ctx.linear.held = torch.ones(ctx.linear.elements)
            gradient = gradients[0].clone(memory_format=torch.contiguous_format)
        return gradient, None, None, None


class _WeightPart(torch.autograd.Function):
    """Autograd node of a layer's weight: returns one element; its backward sleeps for the gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, sleeper: Sleeper, seconds: float, linear: _Linear) -> Tensor:
        ctx.size, ctx.sleeper, ctx.seconds, ctx.linear = weight.numel(), sleeper, seconds, linear
        return weight[:1].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        with ctx.sleeper.computing(ctx.seconds):
            ctx.linear.held, ctx.linear.done = None, True
            gradient = gradients[0].expand(ctx.size).contiguous()  # dense, because it travels
        return gradient, None, None, None


class _Join(torch.autograd.Function):
    """Autograd node that adds the outputs of input part and weight part; its backward costs nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x + weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], gradients[0][:, :1].sum(0)  # one column stands for all


@dataclass
class CurrentSize:
    """Mean work and tokens of the micro-batches in the current forward pass, as multiples of the workload's."""

    work: float = 1.0
    tokens: float = 1.0


class TimedLayer(nn.Module):
    """Part of a timed model, usually a layer: a flat fp32 weight, perhaps a frozen one, and sleeps.

    An input of shape (k, elements) is k micro-batches at once, so that every sleep is k times as long.

    Args:
        part: sizes and seconds.
        size: size of the micro-batches in the current forward pass; None for the workload's.
    """

    def __init__(self, part: TimedPart, sleeper: Sleeper, size: CurrentSize | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((max(1, part.elements),), INITIAL_WEIGHT))
        if part.frozen:
            self.frozen = nn.Parameter(torch.full((part.frozen,), INITIAL_WEIGHT), requires_grad=False)
        self.part, self.sleeper, self.size = part, sleeper, size or CurrentSize()

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[0] * self.size.work
        with self.sleeper.computing(self.part.forward_s * count):
            # In this order: the weight part must be the node that was made last.
            linear = _Linear(int(self.part.linear_bytes * x.shape[0] * self.size.tokens) // 4)
            hidden = _InputPart.apply(x, self.sleeper, self.part.backward_input_s * count, linear)
            weight = _WeightPart.apply(self.weight, self.sleeper, self.part.backward_weight_s * count, linear)
            return _Join.apply(hidden, weight)  # type: ignore[return-value]


class TimedChain(nn.Module):
    """Consecutive timed layers as one module.

    Args:
        size: size of the micro-batches in the current forward pass; None for the workload's.
        embeds: if True, the input is tokens of shape (k, anything). The chain then begins with boundary activations of
            shape (k, activation_bytes / 4), as an embedding would return them. Their gradient is computed, so that the
            first layer costs as much as the others.
    """

    def __init__(
        self, layers: list[TimedLayer], workload: TimedWorkload, size: CurrentSize | None = None, *, embeds: bool
    ) -> None:
        super().__init__()
        self.size = size or CurrentSize()
        self.layers = nn.ModuleList(layers)
        self.embeds = embeds
        self.activation_bytes = workload.activation_bytes

    def forward(self, x: Tensor) -> Tensor:
        if self.embeds:
            elements = max(1, int(self.activation_bytes * self.size.tokens) // 4)
            x = torch.zeros(x.shape[0], elements, requires_grad=torch.is_grad_enabled())
        for layer in self.layers:
            x = layer(x)
        return x


def timed_loss(output: Tensor) -> Tensor:
    """Return the sum over micro-batches of the mean output."""
    return output.sum() / output.shape[1]


class TimedTask:
    """Timed workload for rivals; its parts are layers, and ends that have weights or take time.

    Attributes:
        num_parts: number of parts of the model, which are sharded one by one.
        largest_norm: largest global gradient norm; larger gradients are clipped.
        has_loss: True if the loss is meaningful.
        sleeper: stands for the device and sleeps instead of computing; None for a task that computes.

    Raises:
        UserError: rivals cannot run this workload.
    """

    largest_norm = LARGEST_NORM
    has_loss = False

    def __init__(self, workload: TimedWorkload, busy: BusyTime) -> None:
        if workload.tied:
            raise UserError("tied", True, "false, with rivals: a weight of two parts is not theirs to shard")
        self.workload, self.num_parts, self.sleeper = workload, len(workload.parts), Sleeper(busy)
        self._size = CurrentSize()

    def parts(self) -> Iterator[nn.Module]:
        """Return an iterator over the parts of the whole model in order; each part is built when it is requested."""
        return (TimedLayer(part, self.sleeper, self._size) for part in self.workload.parts)

    def whole(self, parts: Sequence[nn.Module]) -> nn.Module:
        """Return the model made of all ``parts``. For its inputs and outputs see ``batch`` and ``loss``."""
        return TimedChain(cast(list[TimedLayer], list(parts)), self.workload, self._size, embeds=True)

    def stage(self, blocks: range, *, parts_per_layer: int) -> nn.Module:
        """Return a pipeline stage as a module, from inputs or the output of the stage before to its own output.

        Args:
            blocks: blocks of the stage, in the model with its layers cut; 0 is the embedding and the last one the head.
            parts_per_layer: number of parts into which each layer is cut.
        """
        cut = self.workload.split(parts_per_layer)
        parts = [cut.block_parts[block] for block in cut.blocks_with_parts if block in blocks]
        return TimedChain([TimedLayer(part, self.sleeper) for part in parts], self.workload, embeds=0 in blocks)

    def batch(self, step: int, micro_batches: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return inputs and targets (micro-batches, ...) of some micro-batches of a step, equal on all ranks.

        It also sets the current size of the micro-batches, which determines how long layers sleep.
        """
        self._size.work = fmean(map(self.workload.work, micro_batches))
        self._size.tokens = fmean(map(self.workload.tokens, micro_batches))
        rows = torch.zeros(len(micro_batches), 1)
        return rows, rows

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the share of these micro-batches in the loss of a step."""
        return timed_loss(output)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
        """Return AdamW for ``parameters``; None if the workload leaves weights unchanged."""
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True) if self.workload.optimizer else None
