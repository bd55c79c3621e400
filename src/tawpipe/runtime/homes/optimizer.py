"""Factories of optimizers: what they are given, what they may return, and the trial that each has to
pass.

A factory is given one-dimensional pieces, for which only optimizers that treat every element by itself are right, or,
where it asks for them, whole matrices, which only homes on one device have.
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
"""Makes an optimizer, or several that share them, for a list of parameters, each of which is a one-dimensional piece of
one of the model's: for example ``lambda parameters: torch.optim.SGD(parameters, lr=0.1)``. It is called for every unit
by itself. ``piece_of`` says of a parameter what it is a piece of, so that groups (no decay for vectors) can be chosen.
Under ``whole_matrices`` it is given whole parameters."""

WHOLE_ADVICE = 'tawpipe.whole_matrices(factory) with schedule="tawpipe-whole" is given whole matrices'
OF_A_UNIT = "those of one unit, which may have no matrix or no vector"
CONTRACT = (
    f"a factory: it is given a list of nn.Parameter ({OF_A_UNIT}), one-dimensional pieces of the model's; "
    f"{WHOLE_ADVICE}"
)
BY_SHAPE = "the name and shape of the whole parameter are tawpipe.piece_of(p).name and tawpipe.piece_of(p).shape"
ROLES, SHAPES = "roles", "shapes"
"""Rules for the groups of this package's factories: by roles (``model.roles``), or by the number of dimensions alone,
which made every checkpoint that does not name its rule."""
PROBE = (PlaceOfPiece("probe.weight", (4, 6), 0),)
_KNOWN_OF_TORCH: dict[str, int] = {}
"""See ``check_elementwise``."""


@dataclass(frozen=True)
class WholeMatrices:
    """A factory that is given whole parameters in their own shape; see ``whole_matrices``."""

    factory: OptimizerFactory

    @property
    def __name__(self) -> str:
        return name_of(self.factory)

    def __call__(self, parameters: list[nn.Parameter]) -> Optimizer | Sequence[Optimizer]:
        return self.factory(parameters)


def whole_matrices(factory: OptimizerFactory) -> WholeMatrices:
    """Wrap a factory of an optimizer that looks at whole matrices (Muon, Adafactor, Shampoo).

    Every parameter that it is given is whole and has its own shape; one of several matrices (``[experts, rows,
    columns]``) comes as these, one by one. So all of a unit has to be on one device: under ``tawpipe-whole``, or with
    one process under any strategy.
    """
    return WholeMatrices(factory)


@dataclass(frozen=True)
class GroupedFactory:
    """A factory of this package: it groups parameters by a rule.

    Args:
        make: makes the optimizers of some parameters by the rule that it is given.
        name: of the optimizer's class.
        groups: the rule, ``roles`` or ``shapes``.
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
    """Rule by which a factory groups parameters, or ``""`` for a factory of the user's own."""
    inside = factory.factory if isinstance(factory, WholeMatrices) else factory
    return inside.groups if isinstance(inside, GroupedFactory) else ""


def with_groups(factory: OptimizerFactory, groups: str) -> OptimizerFactory:
    """This factory by another rule for its groups; a factory of the user's own stays as it is."""
    if isinstance(factory, WholeMatrices):
        return WholeMatrices(with_groups(factory.factory, groups))
    return replace(factory, groups=groups) if isinstance(factory, GroupedFactory) else factory


def role_by(groups: str, parameter: Tensor) -> str:
    """Role of a parameter that a factory is given, by a rule for groups."""
    piece = piece_of(parameter)
    by_shape = MATRIX if len(piece.shape) > 1 else VECTOR
    return piece.role or by_shape if groups == ROLES else by_shape


def name_of(factory: OptimizerFactory) -> str:
    return getattr(factory, "__name__", type(factory).__name__)


def adamw(
    learning_rate: float = 3e-4,
    *,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    groups: str = ROLES,
) -> OptimizerFactory:
    """AdamW with decay for matrices and tables and none for vectors (norms, biases); fused where torch has it.

    Args:
        groups: ``roles``; or ``shapes``, by which every parameter of two or more dimensions decays, to resume from a
            checkpoint that was made so.
    """

    def make(parameters: list[nn.Parameter], groups: str) -> Optimizer:
        split = decayed(parameters, weight_decay, groups)
        return torch.optim.AdamW(split, lr=learning_rate, betas=betas, eps=eps, fused=True)

    return GroupedFactory(make, "AdamW", groups)


def decayed(parameters: Sequence[nn.Parameter], weight_decay: float, groups: str) -> list[dict[str, Any]]:
    """Groups of parameters: vectors, which do not decay, after all others, which do."""
    split: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in parameters:
        split[role_by(groups, parameter) != VECTOR].append(parameter)
    return [{"params": some, "weight_decay": weight_decay * decays} for decays, some in split.items() if some]


def make_optimizers(factory: OptimizerFactory, parameters: Sequence[Any]) -> tuple[Optimizer, ...]:
    """The optimizers that a factory makes for marked parameters.

    Raises:
        UserError: it cannot work on them, leaves some out, takes some twice or adds others.
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
    """What a trial of a factory has shown.

    Args:
        name: of the optimizers' classes.
        states: how many tensors of a parameter's size they keep for it; on the mean of all elements, where matrices are
            whole.
        options: of every parameter's group, by the parameter's name, with its class before them.
    """

    name: str
    states: float
    options: dict[str, list[Any]]


def check_whole(factory: OptimizerFactory, pieces: Sequence[PlaceOfPiece] = PROBE) -> Tried:
    """Let the optimizers make a step on small matrices with the names of real ones.

    Args:
        pieces: name whole parameters.

    Raises:
        UserError: they cannot, with their name.
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
    """Elements of the states of a real parameter, by those of a small matrix that stands for it."""
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


def state_of(made: Sequence[Optimizer], value: Tensor) -> Mapping[str, Any]:
    """What optimizers keep for a parameter; empty where nothing is."""
    return next((optimizer.state[value] for optimizer in made if value in optimizer.state), {})


def check_elementwise(
    factory: OptimizerFactory, pieces: Sequence[PlaceOfPiece] = PROBE, known: dict[str, int] | None = None
) -> Tried:
    """Try the optimizer on small parameters with the names and shapes of real ones, whole and cut in two, and compare.

    Args:
        pieces: name whole parameters.
        known: the states that earlier trials of the same factory found, by shapes and options; is added to. Layers that
            differ in nothing but their names are thereby tried once, torch's own optimizers once in a process.

    Raises:
        UserError: an element's update depends on other elements or on how a parameter is cut, with the optimizer's
            name.
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
                known = _KNOWN_OF_TORCH  # which no other pipeline's can differ from
            if trial in known:
                states = known[trial]
                break
        values, kept = _after_three_steps(optimizers, parts)
        results.append(values)
        states = max(states, kept)
    shaped = [piece.mark(start.clone()) for piece, start in zip(pieces, starts, strict=True)]
    try:
        options.append(_options(make_optimizers(factory, shaped)))
    except Exception:  # it counts on pieces that have one dimension, as they do
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
    """True for one that steps as its class of torch's does: nothing was hung on it or put in the place of its step."""
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return type(optimizer).__module__.startswith("torch.optim.") and not hooks and "step" not in vars(optimizer)


def _after_three_steps(
    optimizers: Sequence[Optimizer], parts: Sequence[tuple[nn.Parameter, Tensor]]
) -> tuple[Tensor, int]:
    """The values after three steps, and how many tensors of a parameter's size the optimizers keep for one.

    Args:
        parts: one-dimensional parameters, each with its gradients in the three steps.
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
    return "+".join(sorted({type(optimizer).__name__ for optimizer in optimizers}))


def _options(optimizers: Sequence[Optimizer]) -> dict[str, list[Any]]:
    """The options of every parameter's group, by the parameter's name, after its class; alike ones once."""
    options: dict[str, list[Any]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            said: Any = {key: _plain(value) for key, value in group.items() if key != "params"}
            for parameter in group["params"]:
                of_parameter = options.setdefault(piece_of(parameter).name, [type(optimizer)])
                if said not in of_parameter:
                    of_parameter.append(said)
    return options


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value
