"""Optimizers on home stripes: one per unit, so that a unit can be updated by itself; and the norm of gradients.

A stripe is a one-dimensional piece of some parameters, so only optimizers that treat every element by itself are right
here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tawpipe.errors import UserError
from tawpipe.runtime.storage import Piece, Storage, piece_of

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]
"""Makes an optimizer for a list of parameters, each of which is a one-dimensional piece of one of the model's: for
example ``lambda parameters: torch.optim.SGD(parameters, lr=0.1)``. It is called for every unit by itself. ``piece_of``
says of a parameter what it is a piece of, so that groups (no decay for vectors) can be chosen."""

States = dict[int, list[Mapping[str, Any]]]
"""Unit to the optimizer's state of each of its pieces; empty where it has none."""

CONTRACT = "a factory: it is given a list of nn.Parameter, one-dimensional pieces of the model's parameters"
BY_SHAPE = "the name and shape of the whole parameter are tawpipe.piece_of(p).name and tawpipe.piece_of(p).shape"
PROBE = (Piece("probe.weight", (4, 6), 0),)
AT_ONCE = 2**16
"""Elements that are converted at once on a CPU; twice as many bytes as in fp32 stay in its cache."""


def adamw(
    learning_rate: float = 3e-4,
    *,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> OptimizerFactory:
    """AdamW with decay for matrices and none for vectors (norms, biases); fused where torch has it."""

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        groups = [
            {"params": [p for p in parameters if len(piece_of(p).shape) >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters if len(piece_of(p).shape) < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW([g for g in groups if g["params"]], lr=learning_rate, betas=betas, eps=eps, fused=True)

    return make


def make_optimizer(factory: OptimizerFactory, parameters: Sequence[Any]) -> Optimizer:
    """The optimizer that a factory makes for marked parameters.

    Raises:
        UserError: it cannot work on them, leaves some out or adds others.
    """
    name = getattr(factory, "__name__", type(factory).__name__)
    try:
        made = factory(list(parameters))
    except Exception as error:  # a factory may raise anything
        raise UserError("optimizer", name, f"{CONTRACT}; {BY_SHAPE} ({type(error).__name__}: {error})") from error
    if not isinstance(made, Optimizer):
        raise UserError("optimizer", name, f"a factory that returns a torch.optim.Optimizer, not {made!r}")
    taken = {id(parameter) for group in made.param_groups for parameter in group["params"]}
    if left := [piece_of(parameter).name for parameter in parameters if id(parameter) not in taken]:
        expected = f"an optimizer for all parameters that it is given: it leaves out {left[0]}"
        hint = "requires_grad_(False) before Pipeline is made freezes a parameter"
        raise UserError("optimizer", type(made).__name__, f"{expected} ({hint}; {BY_SHAPE})")
    if taken - {id(parameter) for parameter in parameters}:
        raise UserError("optimizer", type(made).__name__, f"parameters that are given and no others; {CONTRACT}")
    return made


def check_elementwise(factory: OptimizerFactory, pieces: Sequence[Piece] = PROBE) -> tuple[str, int]:
    """Try the optimizer on small parameters with the names and shapes of real ones, whole and cut in two, and compare.

    Args:
        pieces: name whole parameters.

    Returns:
        the name of the optimizer's class, and how many tensors of a parameter's size it keeps for it.

    Raises:
        UserError: an element's update depends on other elements or on how a parameter is cut, with the optimizer's
            name.
    """
    generator = torch.Generator().manual_seed(0)
    small = [tuple(min(size, 5) for size in piece.shape) for piece in pieces]
    starts = [torch.randn(shape, generator=generator) for shape in small]
    gradients = [torch.randn(3, start.numel(), generator=generator) for start in starts]
    results, options, states, name = [], [], 0, "the optimizer"
    for cut in (False, True):
        parts: list[tuple[nn.Parameter, Tensor]] = []
        for piece, start, gradient in zip(pieces, starts, gradients, strict=True):
            middle = [start.numel() // 3] if cut and start.numel() > 2 else []
            for a, b in pairwise([0, *middle, start.numel()]):
                part = piece if not a else Piece(piece.name, piece.shape, a)
                parts.append((part.mark(start.flatten()[a:b].clone()), gradient[:, a:b]))
        optimizer = make_optimizer(factory, [value for value, _ in parts])
        name = type(optimizer).__name__
        options.append(_options(optimizer))
        try:
            for step in range(3):
                for value, gradient in parts:
                    value.grad = gradient[step].clone()
                optimizer.step()
        except Exception as error:  # an optimizer may raise anything
            expected = f"it must work on one-dimensional pieces of parameters ({error})"
            raise UserError("optimizer", name, expected) from error
        for value, _ in parts:
            kept = [one for one in optimizer.state.get(value, {}).values() if isinstance(one, Tensor) and one.ndim == 1]
            states = max(states, sum(one.numel() == value.numel() for one in kept))
        results.append(torch.cat([value.detach() for value, _ in parts]))
    shaped = [piece.mark(start.clone()) for piece, start in zip(pieces, starts, strict=True)]
    try:
        options.append(_options(factory(shaped)))
    except Exception:  # it counts on pieces that have one dimension, as they do
        options.append(options[0])
    for piece in pieces:
        if any(other.get(piece.name) != options[0].get(piece.name) for other in options[1:]):
            expected = f"groups that do not depend on p.ndim or p.shape of a piece p, as that of {piece.name} does"
            raise UserError("optimizer", name, f"{expected}: p has one dimension; use tawpipe.piece_of(p).shape")
    if not torch.allclose(results[0], results[1], rtol=1e-5, atol=1e-7):
        expected = "an optimizer that treats every element by itself (AdamW, Adam, SGD, RMSprop, ...)"
        raise UserError("optimizer", name, f"{expected}; this one gives other numbers when a parameter is cut")
    return name, states


def _options(optimizer: Optimizer) -> dict[str, list[Any]]:
    """The options of every parameter's group, by the parameter's name; alike ones once."""
    options: dict[str, list[Any]] = {}
    for group in optimizer.param_groups:
        said: Any = {key: _plain(value) for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            own = options.setdefault(piece_of(parameter).name, [type(optimizer)])
            if said not in own:
                own.append(said)
    return options


def _begins_unset(optimizer: Optimizer) -> bool:
    """torch's fused SGD makes its momentum in the first step, and leaves it unset if that one is left out."""
    return isinstance(optimizer, torch.optim.SGD) and not optimizer.state


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


class UnitOptimizers:
    """The optimizers of one rank, one per trainable unit with a home here.

    ``name`` is that of their class, ``states_per_element`` how many tensors of a parameter's size they keep for it.
    """

    def __init__(self, storage: Storage, factory: OptimizerFactory) -> None:
        trainable = [unit for unit in storage.units if unit.trainable]
        # Every unit on every rank, whoever has its home: all refuse alike.
        tried = [
            check_elementwise(factory, [Piece(slot.name, slot.shape, 0) for slot in unit.slots]) for unit in trainable
        ] or [check_elementwise(factory)]
        self.name = "+".join(sorted({name for name, _ in tried}))
        self.states_per_element = max(states for _, states in tried)
        self.pieces = {u.index: pieces for u in trainable if (pieces := storage.pieces.get(u.index))}
        self._factory = factory
        self.optimizers = {unit: self._make([piece.value for piece in pieces]) for unit, pieces in self.pieces.items()}

    def _make(self, values: Sequence[Tensor]) -> Any:
        optimizer = make_optimizer(self._factory, values)
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        return optimizer

    def states(self) -> States:
        """The states that the optimizers hold now."""
        return {
            unit: [self.optimizers[unit].state.get(piece.value, {}) for piece in pieces]
            for unit, pieces in self.pieces.items()
        }

    def full_states(self) -> States:
        """The states, and for a unit that has none those that its optimizer would hold after a step: something to load
        into, made by a stand-in.
        """
        states = self.states()
        for unit, pieces in self.pieces.items():
            if all(states[unit]):
                continue
            values = [piece.mark(torch.zeros_like(piece.value)) for piece in pieces]
            for value in values:
                value.grad = torch.zeros_like(value)
            stand_in = self._make(values)
            stand_in.step()
            states[unit] = [stand_in.state.get(value, {}) for value in values]
        return states

    def adopt(self, states: Mapping[int, Sequence[Mapping[str, Any]]]) -> None:
        """Hold these states and no others; without those of a unit, its optimizer is as one that has made no step."""
        for unit, optimizer in self.optimizers.items():
            optimizer.state.clear()
            for piece, state in zip(self.pieces[unit], states.get(unit, ()), strict=False):
                if state:
                    optimizer.state[piece.value] = state

    def step(self, unit: int, finite: Tensor | None, rate: float) -> None:
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
        on_device = getattr(optimizer, "_step_supports_amp_scaling", False)
        if on_device and not (self.states_per_element and _begins_unset(optimizer)):
            # The fused step looks at this flag on the device: no host sync for the finite check.
            optimizer.grad_scale, optimizer.found_inf = (
                None,
                None if finite is None else (finite == 0).to(torch.float32),
            )
        elif finite is not None and not bool(finite):
            return
        optimizer.step()


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of all squares of one-dimensional tensors on one device: a scalar in fp64, summed in it.

    torch's own norm of an fp32 tensor adds in fp32 on a CPU: off by 1e-3 for 16 M elements, and otherwise for each cut.
    """
    if tensors[0].is_cuda:  # the kernel converts as it reads
        norms = torch._foreach_norm(list(tensors), 2, torch.float64)  # pyright: ignore[reportPrivateImportUsage]
        return torch.stack(norms).square().sum()
    room = torch.empty(min(AT_ONCE, max(tensor.numel() for tensor in tensors)), dtype=torch.float64)
    sums = []
    for part in (part for tensor in tensors for part in tensor.split(AT_ONCE)):
        wide = room[: part.numel()].copy_(part)
        sums.append(torch.dot(wide, wide))
    return torch.stack(sums).sum()
