"""Optimizer factories: their parameters, their results, and the trial that each factory must pass.

A factory receives one-dimensional pieces of parameters, which only suit optimizers that update every element alone. A
factory that asks for whole matrices receives those; this needs homes on one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tawpipe.errors import UserError
from tawpipe.model.roles import MATRIX, VECTOR
from tawpipe.runtime.homes.storage import HomePiece, PlaceOfPiece, piece_of

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer | Sequence[Optimizer]]
"""Function that makes an optimizer, or several that share the parameters, from a list of parameters.

Each parameter is a one-dimensional piece of a model parameter. Example: ``lambda parameters:
torch.optim.SGD(parameters, lr=0.1)``. The function is called once for every unit. ``piece_of`` returns which model
parameter a piece belongs to, so the function can choose groups (no decay for vectors). Under ``whole_matrices`` it
receives whole parameters.
"""

WHOLE_ADVICE = 'tawpipe.whole_matrices(factory) with schedule="tawpipe-whole" is given whole matrices'
OF_A_UNIT = "those of one unit, which may have no matrix or no vector"
CONTRACT = (
    f"a factory: it is given a list of nn.Parameter ({OF_A_UNIT}), one-dimensional pieces of the model's; "
    f"{WHOLE_ADVICE}"
)
BY_SHAPE = "the name and shape of the whole parameter are tawpipe.piece_of(p).name and tawpipe.piece_of(p).shape"
ROLES, SHAPES = "roles", "shapes"
"""Rules for the parameter groups of this package's factories.

``roles`` uses ``model.roles``. ``shapes`` uses only the number of dimensions; checkpoints that do not name their rule
used it.
"""
PROBE = (PlaceOfPiece("probe.weight", (4, 6), 0),)
_KNOWN_OF_TORCH: dict[str, int] = {}
"""Results of trials of torch's own optimizers in this process, see ``check_elementwise``."""


@dataclass(frozen=True)
class WholeMatrices:
    """A factory that receives whole parameters in their own shape; see ``whole_matrices``."""

    factory: OptimizerFactory

    @property
    def __name__(self) -> str:
        return name_of(self.factory)

    def __call__(self, parameters: list[nn.Parameter]) -> Optimizer | Sequence[Optimizer]:
        return self.factory(parameters)


def whole_matrices(factory: OptimizerFactory) -> WholeMatrices:
    """Wrap a factory of an optimizer that needs whole matrices (Muon, Adafactor, Shampoo).

    The factory then receives whole parameters in their own shape. A stack of matrices (``[experts, rows, columns]``) is
    passed as single matrices. So a unit must have one home: use ``tawpipe-whole``, or one process with any strategy.
    """
    return WholeMatrices(factory)


@dataclass(frozen=True)
class GroupedFactory:
    """A factory of this package that groups parameters by a rule.

    Args:
        make: Makes the optimizers for a list of parameters and the name of the rule.
        name: Name of the optimizer's class.
        groups: The rule, ``roles`` or ``shapes``.
    """

    make: Callable[[list[nn.Parameter], str], Optimizer | Sequence[Optimizer]]
    name: str
    groups: str = ROLES

    def __post_init__(self) -> None:
        if self.groups not in (ROLES, SHAPES):
            raise UserError("groups", self.groups, f"{ROLES} or {SHAPES}")

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, parameters: list[nn.Parameter]) -> Optimizer | Sequence[Optimizer]:
        return self.make(parameters, self.groups)


def rule_of(factory: OptimizerFactory) -> str:
    """Return the rule by which a factory groups parameters, or ``""`` for a factory of the user."""
    inside = factory.factory if isinstance(factory, WholeMatrices) else factory
    return inside.groups if isinstance(inside, GroupedFactory) else ""


def with_groups(factory: OptimizerFactory, groups: str) -> OptimizerFactory:
    """Return a copy of this factory with the rule ``groups``; return a factory of the user unchanged."""
    if isinstance(factory, WholeMatrices):
        return WholeMatrices(with_groups(factory.factory, groups))
    return replace(factory, groups=groups) if isinstance(factory, GroupedFactory) else factory


def role_by(groups: str, parameter: Tensor) -> str:
    """Return the role of a factory's parameter under the rule ``groups``: ``matrix``, ``vector`` or ``table``.

    By shape, a parameter of two or more dimensions is a matrix, any other a vector.
    """
    piece = piece_of(parameter)
    by_shape = MATRIX if len(piece.shape) > 1 else VECTOR
    return piece.role or by_shape if groups == ROLES else by_shape


def name_of(factory: OptimizerFactory) -> str:
    """Return the name of a factory, or of its class."""
    return getattr(factory, "__name__", type(factory).__name__)


def adamw(
    learning_rate: float = 3e-4,
    *,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    groups: str = ROLES,
) -> OptimizerFactory:
    """Return a factory of AdamW with decay for matrices and tables, and none for vectors (norms, biases).

    It uses torch's fused step.

    Args:
        learning_rate: Learning rate.
        weight_decay: Decay of matrices and tables.
        betas, eps: As in ``torch.optim.AdamW``.
        groups: ``roles``; or ``shapes``, with which every parameter of two or more dimensions decays. Use it to resume
            from a checkpoint made that way.
    """

    def make(parameters: list[nn.Parameter], groups: str) -> Optimizer:
        split = decayed(parameters, weight_decay, groups)
        return torch.optim.AdamW(split, lr=learning_rate, betas=betas, eps=eps, fused=True)

    return GroupedFactory(make, "AdamW", groups)


def decayed(parameters: Sequence[nn.Parameter], weight_decay: float, groups: str) -> list[dict[str, Any]]:
    """Split parameters into two groups: those with ``weight_decay``, then vectors, whose decay is 0.

    Args:
        parameters: Parameters that the factory received.
        weight_decay: Decay of matrices and tables.
        groups: Rule by which a parameter is a vector, ``roles`` or ``shapes``; see ``role_by``.

    Returns:
        Groups for a ``torch.optim`` optimizer, with the keys ``params`` and ``weight_decay``. An empty group is left
        out.
    """
    split: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in parameters:
        split[role_by(groups, parameter) != VECTOR].append(parameter)
    return [{"params": some, "weight_decay": weight_decay * decays} for decays, some in split.items() if some]


def make_optimizers(factory: OptimizerFactory, parameters: Sequence[Any]) -> tuple[Optimizer, ...]:
    """Call a factory, check its result, and return its optimizers as a tuple.

    Args:
        factory: The factory.
        parameters: Parameters marked with ``PlaceOfPiece.mark``.

    Raises:
        UserError: If the factory fails, returns something else than optimizers, leaves parameters out, uses one twice,
            or adds others.
    """
    name = name_of(factory)
    whole = isinstance(factory, WholeMatrices)
    try:
        got = factory(list(parameters))
    except Exception as error:  # a factory may raise anything
        contract = f"a factory: it is given a list of whole nn.Parameter ({OF_A_UNIT})" if whole else CONTRACT
        raise UserError("optimizer", name, f"{contract}; {BY_SHAPE} ({type(error).__name__}: {error})") from error
    listed = list(got) if isinstance(got, list | tuple) else [got]
    several = tuple(optimizer for optimizer in listed if isinstance(optimizer, Optimizer))
    if not several or len(several) < len(listed):
        raise UserError("optimizer", name, f"a factory that returns a torch.optim.Optimizer, or several, not {got!r}")
    name = "+".join(type(optimizer).__name__ for optimizer in several)
    taken = [id(p) for optimizer in several for group in optimizer.param_groups for p in group["params"]]
    if left := [piece_of(parameter).name for parameter in parameters if id(parameter) not in taken]:
        expected = f"an optimizer for all parameters that it is given: it leaves out {left[0]}"
        hint = "requires_grad_(False) before Pipeline is made freezes a parameter"
        raise UserError("optimizer", name, f"{expected} ({hint}; {BY_SHAPE})")
    if len(set(taken)) < len(taken):
        raise UserError("optimizer", name, "every parameter in one optimizer and in one group")
    if set(taken) - {id(parameter) for parameter in parameters}:
        raise UserError("optimizer", name, f"parameters that are given and no others; {CONTRACT}")
    return several


class Tried(NamedTuple):
    """Result of a trial of a factory.

    Args:
        name: Names of the optimizers' classes, joined by ``+``.
        states: Number of tensors of a parameter's size that are kept for it. With whole matrices, state elements per
            parameter element on average.
        options: Parameter name -> the class of its optimizer, followed by the options of its group.
    """

    name: str
    states: float
    options: dict[str, list[Any]]


def check_whole(factory: OptimizerFactory, pieces: Sequence[PlaceOfPiece] = PROBE) -> Tried:
    """Let a factory's optimizers make a step on small matrices that carry the names of real parameters.

    Args:
        factory: Factory to test.
        pieces: Whole parameters of the model, by name and shape.

    Returns:
        Name, state size and options of the optimizers.

    Raises:
        UserError: If the optimizers fail.
    """
    generator = torch.Generator().manual_seed(0)
    matrices: list[HomePiece] = []
    for piece in pieces:
        shape = tuple(min(size, 4 + 2 * at) for at, size in enumerate(piece.shape))
        small = replace(piece, shape=shape)
        value = small.mark(torch.randn(math.prod(shape), generator=generator, device="cpu"))
        value.grad = torch.randn(value.shape, generator=generator, device="cpu")
        whole = HomePiece(**vars(small), value=value)
        for matrix in whole.matrices():
            gradient, at = matrix.gradient, replace(piece, start=matrix.start)
            value = at.mark(matrix.value.detach())
            value.grad = gradient
            matrices.append(HomePiece(**vars(at), value=value))
    optimizers = make_optimizers(factory, [matrix.value for matrix in matrices])
    name = _names(optimizers)
    try:
        for optimizer in optimizers:
            optimizer.step()
    except Exception as error:  # an optimizer may raise anything
        raise UserError("optimizer", name, f"it must work on whole parameters ({error})") from error
    first = {matrix.name: matrix for matrix in reversed(matrices)}
    states = sum(_elements_kept(optimizers, matrix) for matrix in first.values())
    return Tried(name, states / max(1, sum(piece.numel for piece in pieces)), _options(optimizers))


def _elements_kept(optimizers: Sequence[Optimizer], small: HomePiece) -> int:
    """Return the number of state elements for a real parameter, derived from the states of its small stand-in."""
    value = small.value
    shape = small.shape[-value.ndim :] if value.ndim else ()
    number, kept = small.numel // max(1, math.prod(shape)), 0
    for state in state_of(optimizers, value).values():
        if isinstance(state, Tensor) and state.ndim:
            sizes = [
                size if state.ndim == value.ndim and of_state == tried else of_state
                for of_state, tried, size in zip(state.shape, value.shape, shape, strict=False)
            ]
            kept += math.prod(sizes)
    return kept * number


def state_of(optimizers: Sequence[Optimizer], value: Tensor) -> Mapping[str, Any]:
    """Return the state that one of the optimizers ``optimizers`` keeps for a parameter, or an empty mapping."""
    return next((optimizer.state[value] for optimizer in optimizers if value in optimizer.state), {})


def check_elementwise(
    factory: OptimizerFactory, pieces: Sequence[PlaceOfPiece] = PROBE, known: dict[str, int] | None = None
) -> Tried:
    """Try a factory's optimizers on small parameters, whole and cut in two, and compare the results after three steps.

    The small parameters carry the names of real ones and are flattened. Groups are also made for parameters with their
    full number of dimensions, and compared.

    Args:
        factory: factory to test.
        pieces: whole parameters of the model, by name and shape.
        known: results of earlier trials of this factory, by shapes and options; extended by this call. With it, layers
            that differ only in names are tried once. torch's own optimizers are tried once per process.

    Returns:
        Name, state size and options of the optimizers.

    Raises:
        UserError: an element's update depends on other elements, or groups or results depend on how a parameter is cut.
    """
    generator = torch.Generator().manual_seed(0)
    small = [tuple(min(size, 5) for size in piece.shape) for piece in pieces]
    starts = [torch.randn(shape, generator=generator, device="cpu") for shape in small]
    gradients = [torch.randn(3, start.numel(), generator=generator, device="cpu") for start in starts]
    results, options, states, known = [], [], 0, {} if known is None else known
    trial = ""
    for cut in (False, True):
        parts: list[tuple[nn.Parameter, Tensor]] = []
        for piece, start, gradient in zip(pieces, starts, gradients, strict=True):
            middle = [start.numel() // 3] if cut and start.numel() > 2 else []
            for a, b in pairwise([0, *middle, start.numel()]):
                parts.append((replace(piece, start=a).mark(start.flatten()[a:b].clone()), gradient[:, a:b]))
        optimizers = make_optimizers(factory, [value for value, _ in parts])
        name = _names(optimizers)
        options.append(_options(optimizers))
        if not cut:
            trial = str((small, [options[0].get(piece.name) for piece in pieces]))
            if all(map(_is_torchs_own, optimizers)):
                known = _KNOWN_OF_TORCH  # their results are valid for all pipelines
            if trial in known:
                states = known[trial]
                break
        values, kept = _after_three_steps(optimizers, parts)
        results.append(values)
        states = max(states, kept)
    shaped = [piece.mark(start.clone()) for piece, start in zip(pieces, starts, strict=True)]
    try:
        options.append(_options(make_optimizers(factory, shaped)))
    except Exception:  # the factory may rely on one-dimensional pieces
        options.append(options[0])
    for piece in pieces:
        if any(other.get(piece.name) != options[0].get(piece.name) for other in options[1:]):
            expected = f"groups that do not depend on p.ndim or p.shape of a piece p, as that of {piece.name} does"
            raise UserError(
                "optimizer", name, f"{expected}: p has one dimension; use tawpipe.piece_of(p).shape; {WHOLE_ADVICE}"
            )
    if results and not torch.allclose(results[0], results[1], rtol=1e-5, atol=1e-7):
        expected = "an optimizer that treats every element by itself (AdamW, Adam, SGD, RMSprop, ...)"
        words = f"{expected}; this one gives other numbers when a parameter is cut; {WHOLE_ADVICE}"
        raise UserError("optimizer", name, words)
    known[trial] = states
    return Tried(name, states, options[0])


def _is_torchs_own(optimizer: Optimizer) -> bool:
    """Return True if an optimizer steps exactly as its class in torch: no hooks, and ``step`` not replaced."""
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return type(optimizer).__module__.startswith("torch.optim.") and not hooks and "step" not in vars(optimizer)


def _after_three_steps(
    optimizers: Sequence[Optimizer], parts: Sequence[tuple[nn.Parameter, Tensor]]
) -> tuple[Tensor, int]:
    """Make three steps; return the values, and the number of tensors of a parameter's size kept for one parameter.

    Args:
        optimizers: Optimizers of the parameters.
        parts: One-dimensional parameters, each with its gradients in the three steps, [3, n].

    Raises:
        UserError: If a step fails.
    """
    try:
        for step in range(3):
            for value, gradient in parts:
                value.grad = gradient[step].clone()
            for optimizer in optimizers:
                optimizer.step()
    except Exception as error:  # an optimizer may raise anything
        expected = f"it must work on one-dimensional pieces of parameters ({error}); {WHOLE_ADVICE}"
        raise UserError("optimizer", _names(optimizers), expected) from error
    states = 0
    for value, _ in parts:
        kept = [s for s in state_of(optimizers, value).values() if isinstance(s, Tensor) and s.ndim == 1]
        states = max(states, sum(s.numel() == value.numel() for s in kept))
    return torch.cat([value.detach() for value, _ in parts]), states


def _names(optimizers: Sequence[Optimizer]) -> str:
    """Return the class names of the optimizers, sorted and joined by ``+``."""
    return "+".join(sorted({type(optimizer).__name__ for optimizer in optimizers}))


def _options(optimizers: Sequence[Optimizer]) -> dict[str, list[Any]]:
    """Return for every parameter name the class of its optimizer and the options of its group; equal options once."""
    options: dict[str, list[Any]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group_options: Any = {key: _plain(value) for key, value in group.items() if key != "params"}
            for parameter in group["params"]:
                of_parameter = options.setdefault(piece_of(parameter).name, [type(optimizer)])
                if group_options not in of_parameter:
                    of_parameter.append(group_options)
    return options


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value
