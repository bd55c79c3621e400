"""What happens to gradients at home: they are added up and, at a step's end, counted, measured and used.

The end of a step is planned in ``tawpipe.schedule.step_end``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tawpipe.runtime.frame import Frame
from tawpipe.runtime.homes.slices import loads_of, squares_of
from tawpipe.runtime.homes.step_result import VALUES
from tawpipe.runtime.homes.storage import HomePiece, Storage
from tawpipe.runtime.homes.streaming import Streaming
from tawpipe.runtime.homes.unit_optimizers import UnitOptimizers
from tawpipe.schedule.actions import Action
from tawpipe.schedule.buffers import COUNT, NORM, Kind, home_gradient


class Optimizers(Protocol):
    """``UnitOptimizers``, or something that stands for it in a measurement.

    ``pieces`` are what is updated of every unit.
    """

    pieces: dict[int, tuple[HomePiece, ...]]

    def step(
        self, unit: int, updates: Tensor | None, rate: float, chosen: Sequence[Mapping[str, Any]] | None
    ) -> None: ...


class HomeActions:
    """One rank's homes: ADD, COUNT, NORM and UPDATE, and what they leave for each other.

    Args:
        optimizers: None where nothing is trained.
    """

    def __init__(self, storage: Storage, optimizers: Optimizers | None) -> None:
        self.storage, self.optimizers, self.device = storage, optimizers, storage.device
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
    def add(self, action: Action, frame: Frame) -> None:
        """Add up what an action reads; the first is copied unless the sum itself is among them."""
        sources = [buffer for buffer in action.reads if buffer != action.writes[0]]
        if self.streaming is not None and sources[0].is_home:
            self.streaming.fetch(action.unit, frame.buffers[action.writes[0]])
            return
        if self.streaming is not None and action.writes[0].is_home:
            given = [frame.buffers[buffer] for buffer in sources]
            self.streaming.add(action.unit, given, replaces=len(sources) == len(action.reads))
            return
        target = frame.buffers[action.writes[0]]
        if len(sources) == len(action.reads):
            target.copy_(frame.buffers[sources.pop(0)])
        for buffer in sources:
            target.add_(frame.buffers[buffer])

    @torch.no_grad()
    def count(self, action: Action, frame: Frame) -> None:
        """Sum the tokens over the world; leave the factor for the updates that do not wait for the norm."""
        tokens = torch.zeros(1, dtype=torch.float64, device=self.device)
        tokens += frame.given.tokens
        frame.transport.all_reduce(action, tokens)
        self._factor.copy_(1 / (frame.given.scale * tokens[0].clamp(min=1)))
        self._updates.copy_(tokens[0] > 0)

    @torch.no_grad()
    def norm(self, action: Action, frame: Frame, summed: list[Tensor]) -> None:
        """Sum squares, losses and tokens over the world; leave the factor for UPDATE and the numbers for the caller.

        Args:
            summed: losses of this rank.
        """
        scaled = COUNT in action.reads  # by the updates, which were early
        units = [buffer.at[0] for buffer in action.reads if buffer.kind is Kind.HOME_GRADIENT]
        sums = torch.zeros(5, dtype=torch.float64, device=self.device)
        squares, losses, tokens, digests, squared_digests = sums.unbind()
        if units:
            squares.copy_(self._squares(units).sum())
        if summed:
            losses.copy_(torch.stack(summed).sum())
        tokens.fill_(frame.given.tokens)
        digests.fill_(frame.given.digest)
        squared_digests.fill_(frame.given.digest**2)
        frame.transport.all_reduce(action, sums)
        # Equal numbers, and no others, have as many times the sum of their squares as there are of them.
        alike = (squared_digests * frame.transport.topology.world_size == digests.square()).to(torch.float64)
        counted = tokens.clamp(min=1)
        mean = 1 / (frame.given.scale * counted)
        norm, loss = squares.sqrt() * (1 if scaled else mean), losses / counted
        clip = math.inf if frame.rule.clip_norm is None else frame.rule.clip_norm
        if not scaled:  # as torch.nn.utils.clip_grad_norm_ does it
            self._factor.copy_(mean * (clip / (norm + 1e-6)).clamp(max=1.0))
        finite = (norm + loss).isfinite().to(torch.float64) * alike
        if NORM in action.reads:  # once not finite, no later step may change the weights, unless that is forgotten
            finite = self._finite.pow_(frame.rule.memory).mul_(finite)
            if not scaled:
                self._updates.copy_(finite * (tokens > 0))
        values = {"loss": losses / tokens, "norm": norm, "tokens": tokens, "finite": finite, "alike": alike}
        assert frame.result is not None and frame.ended is not None
        frame.result.copy_(torch.stack([values[name] for name in VALUES]), non_blocking=True)
        frame.ended.note()

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
    def update(self, action: Action, frame: Frame) -> None:
        """Update a unit at home, by its gradient times the factor."""
        assert self.optimizers is not None
        # Where updates are early, a rank that sees a label itself need not look: that may be a host sync.
        early = COUNT in action.reads
        updates = None if early and frame.given.learns else self._updates
        if self.streaming is not None:
            rule, landed = frame.rule, [frame.buffers[read] for read in action.reads if read.kind is Kind.LANDING]
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
        frame.buffers[home_gradient(action.unit)].mul_(self._factor)
        self.optimizers.step(action.unit, updates, frame.rule.rate, frame.rule.chosen)
        self.storage.refresh(action.unit)
