"""The timed workload as modules, for rivals that train an ``nn.Module``: it sleeps, and holds weights of real size.

The graph of a layer has three nodes, so that what a pipeline schedule wants apart is apart:

    x ──▶ input part ──▶ join ──▶ y        backward of the input part sleeps backward_input_s
    w ──▶ weight part ───┘                 backward of the weight part sleeps backward_weight_s

``torch.distributed.pipelining`` cuts a backward pass at the nodes where the paths from weights meet the paths from
inputs (the joins, which cost nothing): the pass for the inputs then never runs a weight part, and the later one for the
weights runs join and weight part only. One node for both would sleep twice. In an undivided backward pass the weight
part runs first, because autograd takes the node that was made last; FSDP's reduction, which starts when the gradient of
a layer's input is there, relies on that.
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
    """What linear layers keep from the pass for inputs to that for weights, if that comes later.

    Args:
        elements: that it has then.
        held: None before and after.
        done: the weights have had their pass.
    """

    elements: int
    held: Tensor | None = None
    done: bool = False


class _InputPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sleeper: Sleeper, seconds: float, linear: _Linear) -> Tensor:
        ctx.save_for_backward(x)  # the boundary activation, from which a real layer recomputes: it stays in memory
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
    @staticmethod
    def forward(ctx: Any, weight: Tensor, sleeper: Sleeper, seconds: float, linear: _Linear) -> Tensor:
        ctx.size, ctx.sleeper, ctx.seconds, ctx.linear = weight.numel(), sleeper, seconds, linear
        return weight[:1].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        with ctx.sleeper.computing(ctx.seconds):
            ctx.linear.held, ctx.linear.done = None, True
            gradient = gradients[0].expand(ctx.size).contiguous()  # dense: it travels
        return gradient, None, None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x + weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], gradients[0][:, :1].sum(0)  # one column stands for all


@dataclass
class CurrentSize:
    """The mean work and tokens of the micro-batches that go forward now, as multiples of the workload's."""

    work: float = 1.0
    tokens: float = 1.0


class TimedLayer(nn.Module):
    """A part of the model, most of which are layers: a flat fp32 weight, perhaps a frozen one besides, and sleeps.

    An input of shape (k, elements) is k micro-batches at once; every sleep is k times as long.

    Args:
        size: of the micro-batches that go forward now.
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
            # In this order: the weight part must be the younger node.
            linear = _Linear(int(self.part.linear_bytes * x.shape[0] * self.size.tokens) // 4)
            hidden = _InputPart.apply(x, self.sleeper, self.part.backward_input_s * count, linear)
            weight = _WeightPart.apply(self.weight, self.sleeper, self.part.backward_weight_s * count, linear)
            return _Join.apply(hidden, weight)  # type: ignore[return-value]


class TimedChain(nn.Module):
    """Consecutive layers.

    Args:
        embeds: the input is tokens of shape (k, anything), and the chain begins with what an embedding would give:
            boundary activations, shape (k, activation_bytes / 4), whose gradient is wanted, so that the first layer
            costs what the others do.
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
    """The sum over micro-batches of the mean output."""
    return output.sum() / output.shape[1]


class TimedTask:
    """The timed workload for rivals. Its parts are layers, and ends that have weights or time.

    Attributes:
        num_parts: of the model, which are sharded one by one.
        largest_norm: to which the global gradient norm is clipped.
        has_loss: whether the loss means anything.
        sleeper: computes in the place of modules; None for those that compute.

    Raises:
        UserError: a workload that rivals cannot run.
    """

    largest_norm = LARGEST_NORM
    has_loss = False

    def __init__(self, workload: TimedWorkload, busy: BusyTime) -> None:
        if workload.tied:
            raise UserError("tied", True, "false, with rivals: a weight of two parts is not theirs to shard")
        self.workload, self.num_parts, self.sleeper = workload, len(workload.parts), Sleeper(busy)
        self._size = CurrentSize()

    def parts(self) -> Iterator[nn.Module]:
        """The parts of the whole model, in their order, each of them made when it is wanted where that can be."""
        return (TimedLayer(part, self.sleeper, self._size) for part in self.workload.parts)

    def whole(self, parts: Sequence[nn.Module]) -> nn.Module:
        """The model made of all ``parts``. It takes inputs and gives outputs, see ``batch`` and ``loss``."""
        return TimedChain(cast(list[TimedLayer], list(parts)), self.workload, self._size, embeds=True)

    def stage(self, blocks: range, *, parts_per_layer: int) -> nn.Module:
        """A pipeline's stage: a module from inputs, or the output of the stage before, to its own output.

        Args:
            blocks: of the model with its layers cut; 0 is the embedding and the last one the head.
        """
        cut = self.workload.split(parts_per_layer)
        parts = [cut.block_parts[block] for block in cut.blocks_with_parts if block in blocks]
        return TimedChain([TimedLayer(part, self.sleeper) for part in parts], self.workload, embeds=0 in blocks)

    def batch(self, step: int, micro_batches: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of some micro-batches of a step, [micro-batches, ...]; the same on whatever rank."""
        self._size.work = fmean(map(self.workload.work, micro_batches))
        self._size.tokens = fmean(map(self.workload.tokens, micro_batches))
        rows = torch.zeros(len(micro_batches), 1)
        return rows, rows

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The part that these micro-batches add to the loss of a step."""
        return timed_loss(output)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
        """None where weights are left as they are."""
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True) if self.workload.optimizer else None
