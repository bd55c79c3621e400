"""Values that all actions of one step share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from tawpipe.runtime.lanes import Moment
from tawpipe.runtime.transport.transport import Transport
from tawpipe.schedule.buffers import Buffer

Inputs = TypeVar("Inputs")


@dataclass(frozen=True)
class UpdateRule:
    """Rules by which NORM and UPDATE use the gradients of one step.

    Args:
        clip_norm: Largest global gradient norm; None for no clipping, and if updates are early.
        rate: Factor that multiplies every learning rate.
        memory: 1.0 if a number that was not finite also blocks the updates of all later steps; 0.0 if each step is
            judged alone.
        chosen: Options of the optimizers' parameter groups, see ``UnitOptimizers.step``.
    """

    clip_norm: float | None = 1.0
    rate: float = 1.0
    memory: float = 1.0
    chosen: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class Frame(Generic[Inputs]):
    """Values that all actions of one training step, evaluation or decode step share.

    Args:
        buffers: Weight and gradient tensors of this rank.
        transport: Sends and receives messages.
        inputs: Micro-batches with their inputs (``StepInput``), or the decode step (``DecodeInput``).
        rule: Rules for updates.
        result: CPU tensor into which NORM writes ``VALUES``: loss, gradient norm, tokens, 1 if all is finite, 1 if all
            ranks were given equal batches. None in a decode step.
        ended: Moment that NORM records when its result is written. None in a decode step.
    """

    buffers: Mapping[Buffer, Tensor]
    transport: Transport
    inputs: Inputs
    rule: UpdateRule = UpdateRule()
    result: Tensor | None = None
    ended: Moment | None = None
