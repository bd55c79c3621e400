"""Actions on gradients at home: they are summed, counted, measured and used for updates.

The actions at the end of a step are planned in ``tawpipe.schedule.step_end``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tawpipe.runtime.frame import Frame
from tawpipe.runtime.homes.portions import loads_of, squares_of
from tawpipe.runtime.homes.step_result import VALUES
from tawpipe.runtime.homes.storage import HomePiece, Storage
from tawpipe.runtime.homes.streaming import Streaming
from tawpipe.runtime.homes.unit_optimizers import UnitOptimizers
from tawpipe.schedule.actions import Action
from tawpipe.schedule.buffers import COUNT, NORM, Kind, home_gradient


class Optimizers(Protocol):
    """Interface of ``UnitOptimizers``, or of a substitute in a measurement.

    ``pieces`` lists for every unit the parts of parameters that are updated.
    """

    pieces: dict[int, tuple[HomePiece, ...]]

    def step(
        self, unit: int, updates: Tensor | None, rate: float, chosen: Sequence[Mapping[str, Any]] | None
    ) -> None: ...


class HomeActions:
    """Runs ADD, COUNT, NORM and UPDATE for the homes of one rank, and keeps the values that they pass to each other.

    Args:
        storage: Homes of this rank.
        optimizers: Optimizers of the homes; None if nothing is trained.
    """

    def __init__(self, storage: Storage, optimizers: Optimizers | None) -> None:
        self.storage, self.optimizers, self.device = storage, optimizers, storage.device
        self.streaming: Streaming | None = None
        """Transfers between the device and homes in CPU memory; None if the homes are on the device."""
        if storage.in_host:
            assert isinstance(optimizers, UnitOptimizers)
            self.streaming = Streaming(storage, optimizers)
        self._factor = torch.ones((), dtype=torch.float64, device=self.device)
        self._finite = torch.ones((), dtype=torch.float64, device=self.device)
        self._updates = torch.ones((), dtype=torch.float64, device=self.device)

    def forgive(self) -> None:
        """Allow updates again after a number that was not finite; call after the weights have been replaced."""
        self._finite.fill_(1)

    @torch.no_grad()
    def add(self, action: Action, frame: Frame) -> None:
        """Run ADD: sum the buffers that the action reads into the one it writes.

        If the action does not read the sum itself, the first buffer is copied instead of added. For homes in CPU
        memory, ``streaming`` copies or adds.
        """
        sources = [buffer for buffer in action.reads if buffer != action.writes[0]]
        if self.streaming is not None and sources[0].is_home:
            self.streaming.fetch(action.unit, frame.buffers[action.writes[0]])
            return
        if self.streaming is not None and action.writes[0].is_home:
            gradients = [frame.buffers[buffer] for buffer in sources]
            self.streaming.add(action.unit, gradients, replaces=len(sources) == len(action.reads))
            return
        target = frame.buffers[action.writes[0]]
        if len(sources) == len(action.reads):
            target.copy_(frame.buffers[sources.pop(0)])
        for buffer in sources:
            target.add_(frame.buffers[buffer])

    @torch.no_grad()
    def count(self, action: Action, frame: Frame) -> None:
        """Run COUNT: sum the tokens over all ranks, and store what updates need that do not wait for the norm.

        That is the factor for gradients, and the flag that allows updates, which is 0 if no token counts."""
        tokens = torch.zeros(1, dtype=torch.float64, device=self.device)
        tokens += frame.inputs.tokens
        frame.transport.all_reduce(action, tokens)
        self._factor.copy_(1 / (frame.inputs.scale * tokens[0].clamp(min=1)))
        self._updates.copy_(tokens[0] > 0)

    @torch.no_grad()
    def norm(self, action: Action, frame: Frame, summed: list[Tensor]) -> None:
        """Run NORM: sum squares, losses and tokens over all ranks, and write the results of the step.

        Stores the factor for UPDATE and the flag that allows updates, unless COUNT has stored them. Writes ``VALUES``
        to ``frame.result``, and records ``frame.ended``.

        Args:
            action: NORM of this step.
            frame: Values shared by the actions of the step.
            summed: Summed losses of this rank's micro-batches.
        """
        scaled = COUNT in action.reads  # the early updates have scaled the gradients already
        units = [buffer.at[0] for buffer in action.reads if buffer.kind is Kind.HOME_GRADIENT]
        balance = frame.inputs.balance
        shape = (0, 0) if balance is None else balance.shape
        sums = torch.zeros(5 + math.prod(shape), dtype=torch.float64, device=self.device)
        squares, losses, tokens, digests, squared_digests = sums[:5].unbind()
        if units:
            squares.copy_(self._squares(units).sum())
        if summed:
            losses.copy_(torch.stack(summed).sum())
        tokens.fill_(frame.inputs.tokens)
        digests.fill_(frame.inputs.digest)
        squared_digests.fill_(frame.inputs.digest**2)
        if balance is not None and balance.sums is not None:
            sums[5:] = balance.sums.flatten()
            if balance.sums.is_cuda:  # as for losses: not reused before it is read here
                balance.sums.record_stream(torch.cuda.current_stream())
        frame.transport.all_reduce(action, sums)
        # n numbers are all equal exactly if n times the sum of their squares equals the square of their sum.
        alike = (squared_digests * frame.transport.topology.world_size == digests.square()).to(torch.float64)
        counted = tokens.clamp(min=1)
        mean = 1 / (frame.inputs.scale * counted)
        norm, loss = squares.sqrt() * (1 if scaled else mean), losses / counted
        clip = math.inf if frame.rule.clip_norm is None else frame.rule.clip_norm
        if not scaled:  # like torch.nn.utils.clip_grad_norm_
            self._factor.copy_(mean * (clip / (norm + 1e-6)).clamp(max=1.0))
        finite = (norm + loss).isfinite().to(torch.float64) * alike
        if NORM in action.reads:
            # after a number that is not finite, no later step changes the weights, unless the rule's memory is 0
            finite = self._finite.pow_(frame.rule.memory).mul_(finite)
            if not scaled:
                self._updates.copy_(finite * (tokens > 0))
        nothing = torch.full_like(norm, math.nan)
        of_experts = (nothing, nothing) if balance is None else balance.values(sums[5:].view(shape), tokens)
        values = {"loss": losses / tokens, "norm": norm, "tokens": tokens, "finite": finite, "alike": alike}
        values |= {"balance_loss": of_experts[0], "busiest_expert": of_experts[1]}
        assert frame.result is not None and frame.ended is not None
        frame.result.copy_(torch.stack([values[name] for name in VALUES]), non_blocking=True)
        frame.ended.note()

    def _squares(self, units: Sequence[int]) -> Tensor:
        """Return the sums of squares of the home gradients of ``units``, one number per portion."""
        if self.streaming is not None:
            return torch.cat([self.streaming.squares[unit] for unit in units])
        assert self.optimizers is not None
        owned = [self.optimizers.pieces[unit] for unit in units if unit in self.optimizers.pieces]
        parts = [part.of(pieces[part.place].gradient) for pieces in owned for load in loads_of(pieces) for part in load]
        if not parts:  # the shards on this rank are only padding
            return torch.zeros(1, dtype=torch.float64, device=self.device)
        return squares_of(parts)

    @torch.no_grad()
    def update(self, action: Action, frame: Frame) -> None:
        """Run UPDATE: multiply a unit's home gradient by the stored factor, in place, and step its optimizer.

        The optimizer changes nothing if the flag of COUNT or NORM forbids updates. Then the compute copy is refreshed.
        For homes in CPU memory, ``streaming`` does all of this."""
        assert self.optimizers is not None
        # With early updates, a rank that has a label itself knows that the step counts tokens. Reading the flag could
        # sync the host.
        early = COUNT in action.reads
        updates = None if early and frame.inputs.learns else self._updates
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
