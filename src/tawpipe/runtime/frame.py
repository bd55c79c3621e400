"""The values that all actions of a step share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from tawpipe.runtime.lanes import Moment
from tawpipe.runtime.transport.transport import Transport
from tawpipe.schedule.buffers import Buffer

Given = TypeVar("Given")


@dataclass(frozen=True)
class UpdateRule:
    """The treatment of one step's gradients by NORM and UPDATE.

    Args:
        clip_norm: largest global norm, None for no clipping; None where updates are early.
        rate: multiplies every learning rate.
        chosen: options of the optimizers' groups, see ``UnitOptimizers.step``.
        memory: of numbers that were not finite: 1, and no later step changes the weights either; 0, and each step is
            looked at by itself.
    """

    clip_norm: float | None = 1.0
    rate: float = 1.0
    memory: float = 1.0
    chosen: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class Frame(Generic[Given]):
    """The values that all actions of one training step, evaluation or lap share.

    Args:
        buffers: weights and gradients of this rank.
        given: micro-batches and their numbers (``StepInput``), or the lap (``LapInput``).
        result: on the CPU; NORM leaves ``VALUES`` there: loss, gradient norm, tokens, whether all was finite, and
            whether the ranks were given the same. None in a lap.
        ended: the moment after NORM; None in a lap.
    """

    buffers: Mapping[Buffer, Tensor]
    transport: Transport
    given: Given
    rule: UpdateRule = UpdateRule()
    result: Tensor | None = None
    ended: Moment | None = None
