"""Optimizers on home stripes: one instance per unit, so that a unit can be updated by itself. Imports runtime.storage
and torch.

A stripe is a one-dimensional piece of some parameters, so only optimizers that treat every element by itself are right
here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tawpipe.errors import UserError
from tawpipe.runtime.storage import HomePiece

OptimizerFactory = Callable[[Sequence[HomePiece]], Optimizer]
"""Makes an optimizer for pieces of model parameters. ``piece.shape`` and ``piece.name`` are those of the whole
parameter, so that groups (no decay for vectors) can be chosen; ``piece.value`` is what to optimize."""


def adamw(
    learning_rate: float = 3e-4,
    *,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> OptimizerFactory:
    """AdamW with decay for matrices and none for vectors (norms, biases); fused where torch has it."""

    def make(pieces: Sequence[HomePiece]) -> Optimizer:
        decayed = [piece.value for piece in pieces if len(piece.shape) >= 2]
        others = [piece.value for piece in pieces if len(piece.shape) < 2]
        groups = [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW([g for g in groups if g["params"]], lr=learning_rate, betas=betas, eps=eps, fused=True)

    return make


def check_elementwise(factory: OptimizerFactory) -> int:
    """Try the optimizer on a small matrix, whole and cut in two pieces, and compare.

    Returns:
        how many tensors of a parameter's size the optimizer keeps for it.

    Raises:
        UserError: an element's update depends on other elements or on the parameter's shape, with the optimizer's name.
    """
    generator = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(4, 6, generator=generator), torch.randn(3, 24, generator=generator)
    name, states = "the optimizer", 0
    try:
        results = []
        for cuts in ([0, 24], [0, 7, 24]):
            values = [nn.Parameter(start.flatten()[a:b].clone()) for a, b in pairwise(cuts)]
            pieces = [HomePiece("probe.weight", (4, 6), a, v) for a, v in zip(cuts, values, strict=False)]
            optimizer = factory(pieces)
            name = type(optimizer).__name__
            for gradient in gradients:
                for value, (a, b) in zip(values, pairwise(cuts), strict=True):
                    value.grad = gradient[a:b].clone()
                optimizer.step()
            kept = optimizer.state[values[0]].values()
            states = sum(isinstance(one, torch.Tensor) and one.numel() == values[0].numel() for one in kept)
            results.append(torch.cat([value.detach() for value in values]))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise UserError("optimizer", name, f"it must work on one-dimensional pieces of parameters ({error})") from error
    if not torch.allclose(results[0], results[1], rtol=1e-5, atol=1e-7):
        expected = "an optimizer that treats every element by itself (AdamW, Adam, SGD, RMSprop, ...)"
        raise UserError("optimizer", name, f"{expected}; this one gives other numbers when a parameter is cut")
    return states


class UnitOptimizers:
    """The optimizers of one rank, one per unit with a home here.

    Args:
        pieces: unit to its pieces, trainable units only.
    """

    def __init__(self, pieces: dict[int, tuple[HomePiece, ...]], factory: OptimizerFactory) -> None:
        self.states_per_element = check_elementwise(factory)
        self.pieces = {unit: found for unit, found in pieces.items() if found}
        self.optimizers = {unit: factory(found) for unit, found in self.pieces.items()}
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])

    @torch.no_grad()
    def create_state(self) -> None:
        """Make every optimizer hold its state, as after a step, without a change to weights; for loading into it."""
        for unit, optimizer in self.optimizers.items():
            if all(optimizer.state.get(piece.value) for piece in self.pieces[unit]):
                continue
            values = [piece.value.clone() for piece in self.pieces[unit]]
            for piece in self.pieces[unit]:
                piece.gradient.zero_()
            optimizer.step()
            for piece, value in zip(self.pieces[unit], values, strict=True):
                piece.value.copy_(value)

    def step(self, unit: int, finite: torch.Tensor | None, rate: float) -> None:
        """Update the unit from its home gradients, unless ``finite`` is zero.

        Args:
            finite: a one-element tensor on the device of the gradients; None for no such condition.
            rate: multiplies every group's initial learning rate.
        """
        optimizer: Any = self.optimizers.get(unit)
        if optimizer is None:
            return
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * rate
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            # The fused step looks at this flag on the device: no host sync for the finite check.
            optimizer.grad_scale, optimizer.found_inf = (
                None,
                None if finite is None else (finite == 0).to(torch.float32),
            )
        elif finite is not None and not bool(finite):
            return
        optimizer.step()
