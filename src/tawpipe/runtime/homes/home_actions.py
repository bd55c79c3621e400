"""What happens to gradients at home: they are added up and, at a step's end, counted, measured and used.

The end of a step is planned in ``tawpipe.schedule.step_end``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tawpipe.runtime.homes.slices import loads_of, squares_of
from tawpipe.runtime.homes.step_result import VALUES
from tawpipe.runtime.homes.storage import HomePiece, Storage
from tawpipe.runtime.homes.streaming import Streaming
from tawpipe.runtime.homes.unit_optimizers import UnitOptimizers
from tawpipe.runtime.lanes import Moment
from tawpipe.runtime.transport.transport import Transport
from tawpipe.schedule.actions import Action
from tawpipe.schedule.buffers import COUNT, NORM, Buffer, Kind, home_gradient


class Optimizers(Protocol):
    """``UnitOptimizers``, or something that stands for it in a measurement.

    ``pieces`` are what is updated of every unit.
    """

    pieces: dict[int, tuple[HomePiece, ...]]

    def step(
        self, unit: int, updates: Tensor | None, rate: float, chosen: Sequence[Mapping[str, Any]] | None
    ) -> None: ...


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
class StepValues:
    """The values that the actions of one step share.

    Args:
        given: of a lap, what its actions share.
        result: on the CPU; NORM leaves ``VALUES`` there: loss, gradient norm, tokens, whether all was finite, and
            whether the ranks were given the same.
        ended: of a step, the moment after NORM.
    """

    given: Any
    rule: UpdateRule
    result: Tensor
    ended: Moment | None = None


class HomeActions:
    """One rank's homes: ADD, COUNT, NORM and UPDATE, and what they leave for each other.

    Args:
        buffers: all of the rank's, by name.
        losses: those that a NORM sums here.
        optimizers: None where nothing is trained.
    """

    def __init__(
        self,
        storage: Storage,
        transport: Transport,
        optimizers: Optimizers | None,
        *,
        buffers: Mapping[Buffer, Tensor],
        losses: Callable[[Action], list[Tensor]],
    ) -> None:
        self.storage, self.transport, self.optimizers = storage, transport, optimizers
        self.device, self._buffers, self._losses = storage.device, buffers, losses
        self.streaming: Streaming | None = None
        """What passes between the device and homes in the host's memory; None where homes are on the device."""
        if storage.in_host:
            assert isinstance(optimizers, UnitOptimizers)
            self.streaming = Streaming(storage, optimizers)
        self._factor = torch.ones((), dtype=torch.float64, device=self.device)
        self._finite = torch.ones((), dtype=torch.float64, device=self.device)
        self._updates = torch.ones((), dtype=torch.float64, device=self.device)

    def forgive(self) -> None:
        """Updates happen again after a number that was not finite, because the weights have been replaced."""
        self._finite.fill_(1)

    @torch.no_grad()
    def add(self, action: Action) -> None:
        """Add up what an action reads; the first is copied unless the sum itself is among them."""
        sources = [buffer for buffer in action.reads if buffer != action.writes[0]]
        if self.streaming is not None and sources[0].is_home:
            self.streaming.fetch(action.unit, self._buffers[action.writes[0]])
            return
        if self.streaming is not None and action.writes[0].is_home:
            given = [self._buffers[buffer] for buffer in sources]
            self.streaming.add(action.unit, given, replaces=len(sources) == len(action.reads))
            return
        target = self._buffers[action.writes[0]]
        if len(sources) == len(action.reads):
            target.copy_(self._buffers[sources.pop(0)])
        for buffer in sources:
            target.add_(self._buffers[buffer])

    @torch.no_grad()
    def count(self, action: Action, step: StepValues) -> None:
        """Sum the tokens over the world; leave the factor for the updates that do not wait for the norm."""
        tokens = torch.zeros(1, dtype=torch.float64, device=self.device)
        tokens += step.given.tokens
        self.transport.all_reduce(action, tokens)
        self._factor.copy_(1 / (step.given.scale * tokens[0].clamp(min=1)))
        self._updates.copy_(tokens[0] > 0)

    @torch.no_grad()
    def norm(self, action: Action, step: StepValues) -> None:
        """Sum squares, losses and tokens over the world; leave the factor for UPDATE and the numbers for the caller."""
        scaled = COUNT in action.reads  # by the updates, which were early
        units = [buffer.at[0] for buffer in action.reads if buffer.kind is Kind.HOME_GRADIENT]
        sums = torch.zeros(5, dtype=torch.float64, device=self.device)
        squares, losses, tokens, digests, squared_digests = sums.unbind()
        if units:
            squares.copy_(self._squares(units).sum())
        if summed := self._losses(action):
            losses.copy_(torch.stack(summed).sum())
        tokens.fill_(step.given.tokens)
        digests.fill_(step.given.digest)
        squared_digests.fill_(step.given.digest**2)
        self.transport.all_reduce(action, sums)
        # Equal numbers, and no others, have as many times the sum of their squares as there are of them.
        alike = (squared_digests * self.transport.topology.world_size == digests.square()).to(torch.float64)
        counted = tokens.clamp(min=1)
        mean = 1 / (step.given.scale * counted)
        norm, loss = squares.sqrt() * (1 if scaled else mean), losses / counted
        clip = math.inf if step.rule.clip_norm is None else step.rule.clip_norm
        if not scaled:  # as torch.nn.utils.clip_grad_norm_ does it
            self._factor.copy_(mean * (clip / (norm + 1e-6)).clamp(max=1.0))
        finite = (norm + loss).isfinite().to(torch.float64) * alike
        if NORM in action.reads:  # once not finite, no later step may change the weights, unless that is forgotten
            finite = self._finite.pow_(step.rule.memory).mul_(finite)
            if not scaled:
                self._updates.copy_(finite * (tokens > 0))
        values = {"loss": losses / tokens, "norm": norm, "tokens": tokens, "finite": finite, "alike": alike}
        step.result.copy_(torch.stack([values[name] for name in VALUES]), non_blocking=True)
        assert step.ended is not None
        step.ended.note()

    def _squares(self, units: Sequence[int]) -> Tensor:
        """The sums of squares of the gradients of units at home, slice by slice."""
        if self.streaming is not None:
            return torch.cat([self.streaming.squares[unit] for unit in units])
        assert self.optimizers is not None
        owned = [self.optimizers.pieces[unit] for unit in units if unit in self.optimizers.pieces]
        parts = [part.of(pieces[part.place].gradient) for pieces in owned for load in loads_of(pieces) for part in load]
        if not parts:  # the stripes here are padding
            return torch.zeros(1, dtype=torch.float64, device=self.device)
        return squares_of(parts)

    @torch.no_grad()
    def update(self, action: Action, step: StepValues) -> None:
        """Update a unit at home, by its gradient times the factor."""
        assert self.optimizers is not None
        # Where updates are early, a rank that sees a label itself need not look: that may be a host sync.
        early = COUNT in action.reads
        updates = None if early and step.given.learns else self._updates
        if self.streaming is not None:
            rule, landed = step.rule, [self._buffers[read] for read in action.reads if read.kind is Kind.LANDING]
            self.streaming.update(
                action.unit,
                self._factor,
                updates,
                rule.rate,
                rule.chosen,
                early=early,
                gradient=landed[0] if landed else None,
            )
            return
        self._buffers[home_gradient(action.unit)].mul_(self._factor)
        self.optimizers.step(action.unit, updates, step.rule.rate, step.rule.chosen)
        self.storage.refresh(action.unit)
