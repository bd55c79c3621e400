"""Optimizers of home shards: one or several for each unit, so that each unit can be updated alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tawpipe.errors import UserError
from tawpipe.model.units import Unit
from tawpipe.runtime.homes.groups import PipelineOptimizer
from tawpipe.runtime.homes.optimizer import (
    ROLES,
    SHAPES,
    OptimizerFactory,
    Tried,
    WholeMatrices,
    check_elementwise,
    check_whole,
    make_optimizers,
    name_of,
    rule_of,
    state_of,
    with_groups,
)
from tawpipe.runtime.homes.storage import HomePiece, PlaceOfPiece, Storage, is_of_layer, piece_of
from tawpipe.schedule.placement import Home

States = dict[int, list[Mapping[str, Any]]]
"""Unit -> the optimizer's state of each of its pieces; an empty mapping for a piece without state."""


def try_factory(factory: OptimizerFactory, units: Sequence[Unit]) -> dict[int, Tried]:
    """Try a factory on every trainable unit, wherever its home is, so that all ranks raise equal errors.

    Returns:
        Unit index -> result of the trial; index -1 if no unit is trainable.

    Raises:
        UserError: See ``check_elementwise`` and ``check_whole``.
    """
    known: dict[str, int] = {}
    check = check_whole if isinstance(factory, WholeMatrices) else partial(check_elementwise, known=known)
    tried = {}
    for unit in units:
        if unit.trainable:
            in_layer = is_of_layer(unit, units)
            tried[unit.index] = check(factory, [PlaceOfPiece.of(slot, in_layer=in_layer) for slot in unit.slots])
    return tried or {-1: check(factory)}


def options_of(factory: OptimizerFactory, units: Sequence[Unit]) -> dict[str, list[Any]]:
    """Return for every trainable parameter name the class of its optimizer and the options of its group."""
    return {
        name: group_options
        for trial in try_factory(factory, units).values()
        for name, group_options in trial.options.items()
    }


def in_other_groups(factory: OptimizerFactory, groups: str, units: Sequence[Unit]) -> list[str]:
    """Return the names of parameters whose group would change under the rule ``groups``.

    Returns an empty list for a factory without a rule, and for an unknown rule.
    """
    if rule_of(factory) in ("", groups) or groups not in (ROLES, SHAPES):
        return []
    here, other_options = options_of(factory, units), options_of(with_groups(factory, groups), units)
    return [name for name in here if here[name] != other_options[name]]


def refuse_cut_matrices(factory: OptimizerFactory, units: Sequence[Unit], homes: Sequence[Home], strategy: str) -> None:
    """Raise a UserError if a factory needs whole matrices and a trainable unit is split over several devices."""
    if not isinstance(factory, WholeMatrices):
        return
    for unit, home in zip(units, homes, strict=True):
        if unit.trainable and len(home.ranks) > 1:
            tried = "+".join(sorted({trial.name for trial in try_factory(factory, units).values()})) or name_of(factory)
            expected = (
                f"tawpipe-whole (--schedule.strategy tawpipe-whole) with {tried}, which looks at whole matrices: here "
                f"{unit.name} is in pieces on {len(home.ranks)} devices"
            )
            raise UserError("schedule.strategy", strategy, expected)


def _begins_unset(optimizer: Optimizer) -> bool:
    """Return True for an SGD with momentum that has no state yet.

    torch's fused SGD creates its momentum in the first step, and leaves it uninitialised if that step is skipped.
    """
    first = ((group["momentum"], group["params"][0]) for group in optimizer.param_groups if group["params"])
    return isinstance(optimizer, torch.optim.SGD) and any(m and not optimizer.state.get(p) for m, p in first)


def is_elementwise(state: Any, value: Tensor) -> bool:
    """Return True if a state is a tensor of its parameter's shape."""
    return isinstance(state, Tensor) and state.ndim > 0 and state.shape == value.shape


def _copy(value: Any) -> Any:
    """Return a clone of a tensor, or the value itself."""
    return value.clone() if isinstance(value, Tensor) else value


def _counts(value: Any) -> bool:
    """Return True for a value in which an optimizer may count steps: a number or a tensor."""
    return isinstance(value, (int, float, Tensor))


class PortionStep:
    """One step of a unit's optimizers, made portion by portion.

    ``before`` holds the states of the unit's pieces that every portion starts from; ``after`` those that are valid
    after ``end``.
    """

    def __init__(self, optimizers: UnitOptimizers, unit: int) -> None:
        self.unit, self._optimizers = unit, optimizers
        self.before = [dict(state) for state in optimizers.states_of(unit)]
        self.after = [dict(state) for state in self.before]
        self.options: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Groups, and the options that a step has left in them, for optimizers that count steps there."""
        self._numbers: dict[int, dict[str, Any]] = {}

    def memory(self, place: int, key: str, state: Tensor, make: Callable[..., Tensor], *, elementwise: bool) -> Tensor:
        """Return the tensor that keeps the state ``key`` of a piece; allocate it with ``make`` if it is new.

        Args:
            place: Index of the piece.
            key: Name of the state.
            state: The state of a portion, or the whole state.
            make: Allocates a tensor from a shape and a dtype.
            elementwise: The state has the shape of the piece, and ``state`` is a portion of it.
        """
        shape = self._optimizers.pieces[self.unit][place].value.shape if elementwise else state.shape
        kept = self.after[place].get(key)
        if not isinstance(kept, Tensor) or kept.shape != shape:
            self.after[place][key] = make(tuple(shape), state.dtype)
        return self.after[place][key]

    def rewind(self, optimizer: Any) -> None:
        """Reset an optimizer's own number and tensor attributes to their values before the step, as some count in them.

        Call it before every portion.
        """
        values = vars(optimizer)
        kept = self._numbers.setdefault(id(optimizer), {k: _copy(v) for k, v in values.items() if _counts(v)})
        values.update({key: _copy(value) for key, value in kept.items()})

    def end(self) -> None:
        """Put the new states into the unit's optimizers, and the new options into their groups.

        Call it after every portion has been updated."""
        self._optimizers.hold(self.unit, self.after)
        for group, options in self.options:
            for key, value in options.items():
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value


class UnitOptimizers:
    """Optimizers of one rank, for every trainable unit with a home here.

    Attributes:
        name: Names of the optimizers' classes.
        states_per_element: For every unit, the number of tensors of a parameter's size that are kept for a parameter.
        groups: Options of the optimizers, which may be changed.
        pieces: Parts of parameters that are updated, by unit.
    """

    def __init__(self, storage: Storage, factory: OptimizerFactory) -> None:
        tried = try_factory(factory, storage.units)
        self.name = "+".join(sorted({part for trial in tried.values() for part in trial.name.split("+")}))
        self.states_per_element = tuple(tried[u.index].states if u.trainable else 0 for u in storage.units)
        options = {name: group_options for trial in tried.values() for name, group_options in trial.options.items()}
        self.groups = PipelineOptimizer(options)
        self.rule = rule_of(factory)
        self.whole = isinstance(factory, WholeMatrices)
        self.pieces: dict[int, tuple[HomePiece, ...]] = {}
        for unit, pieces in storage.pieces.items():
            if storage.units[unit].trainable and pieces:
                if self.whole:
                    pieces = tuple(matrix for piece in pieces for matrix in piece.matrices())
                self.pieces[unit] = pieces
        self.factory, self._in_host, self._device = factory, storage.in_host, storage.device
        self._host_zeros = storage.host_zeros
        self._flag: tuple[Tensor | None, int, bool] = None, 0, True
        """The flag tensor that was read last, its version then, and its value."""
        self.optimizers = {unit: self._make([piece.value for piece in pieces]) for unit, pieces in self.pieces.items()}

    def _make(self, values: Sequence[Tensor]) -> tuple[Any, ...]:
        """Call the factory for some parameters, and return the optimizers.

        Each of their groups gets two more entries: ``initial_lr``, and ``of``, its index in ``groups``."""
        optimizers = make_optimizers(self.factory, values)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group.setdefault("initial_lr", group["lr"])
            if group["params"]:
                group["of"] = self.groups.group_of[piece_of(group["params"][0]).name]
        return optimizers

    def states(self) -> States:
        """Return the states that the optimizers hold now, by unit."""
        return {unit: self.states_of(unit) for unit in self.pieces}

    def states_of(self, unit: int) -> list[Mapping[str, Any]]:
        """Return the states of the pieces of one unit."""
        return [state_of(self.optimizers[unit], piece.value) for piece in self.pieces[unit]]

    def full_states(self) -> States:
        """Return the states of all units, to load into; for units without state, states as after a step.

        Those are made by stand-in optimizers and zero gradients.
        """
        states = self.states()
        for unit, pieces in self.pieces.items():
            if all(states[unit]):
                continue
            if self._in_host:
                states[unit] = [self._blank(piece) for piece in pieces]
                continue
            values = [piece.mark(torch.zeros_like(piece.value)) for piece in pieces]
            for value in values:
                value.grad = torch.zeros_like(value)
            stand_in = self._make(values)
            for optimizer in stand_in:
                optimizer.step()
            states[unit] = [state_of(stand_in, value) for value in values]
        return states

    def _blank(self, piece: HomePiece) -> Mapping[str, Any]:
        """Return zeroed states in CPU memory for a piece, in the form that its optimizer makes in a step.

        A stand-in on the device, with a few elements for a vector, shows the form.
        """
        shape = tuple(piece.value.shape) if piece.value.ndim > 1 else (min(piece.value.numel(), 2),)
        value = piece.mark(torch.zeros(shape, dtype=piece.value.dtype, device=self._device))
        value.grad = torch.zeros_like(value)
        optimizers = self._make([value])
        for optimizer in optimizers:
            optimizer.step()
        kept = dict(state_of(optimizers, value))
        for key, state in kept.items():
            if isinstance(state, Tensor) and state.ndim:
                shape = piece.value.shape if is_elementwise(state, value) else state.shape
                kept[key] = self._host_zeros(tuple(shape), state.dtype)
        return kept

    def adopt(self, states: Mapping[int, Sequence[Mapping[str, Any]]]) -> None:
        """Replace all states. The optimizer of a unit without given states starts as new."""
        for unit, optimizers in self.optimizers.items():
            for optimizer in optimizers:
                optimizer.state.clear()
            self.hold(unit, states.get(unit, ()))

    def hold(self, unit: int, states: Sequence[Mapping[str, Any]]) -> None:
        """Replace the states of a unit's pieces; empty ones change nothing."""
        optimizers = self.optimizers[unit]
        whose = {
            id(p): optimizer for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
        }
        for piece, state in zip(self.pieces[unit], states, strict=False):
            if state:
                whose[id(piece.value)].state[piece.value] = state

    def step(
        self, unit: int, updates: Tensor | None, rate: float, chosen: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Update the unit from its home gradients, unless ``updates`` is zero.

        Args:
            unit: The unit.
            updates: One-element tensor on the device of the gradients; None to update without a condition.
            rate: Factor that multiplies every group's learning rate.
            chosen: Options of ``groups``, including the learning rate; None for the initial options.
        """
        self._choose(unit, rate, chosen)
        self._step(self.optimizers.get(unit, ()), updates)

    def begin(self, unit: int, rate: float, chosen: Sequence[Mapping[str, Any]] | None = None) -> PortionStep:
        """Start a step of a unit that ``step_on`` makes portion by portion, with the options of ``step``."""
        self._choose(unit, rate, chosen)
        return PortionStep(self, unit)

    def step_on(
        self, step: PortionStep, portions: Sequence[tuple[int, nn.Parameter, Mapping[str, Any]]], updates: Tensor | None
    ) -> list[Mapping[str, Any]]:
        """Update some portions of a unit, unless ``updates`` is zero; return the new state of each.

        Args:
            step: The step that ``begin`` started.
            portions: For every portion the index of its piece, a parameter that stands for it, and its state so far.
            updates: As for ``step``.
        """
        pieces, after = self.pieces[step.unit], dict[int, Mapping[str, Any]]()
        stands = [(pieces[place].value, value, state) for place, value, state in portions]
        for optimizer in self.optimizers[step.unit]:
            groups, used = optimizer.param_groups, list[dict[str, Any]]()
            for group in groups:
                group_stands = [stand for whole in group["params"] for stand in stands if stand[0] is whole]
                optimizer.state.update({value: dict(state) for _, value, state in group_stands if state})
                if group_stands:
                    values = [value for _, value, _ in group_stands]
                    used.append({**{key: _copy(value) for key, value in group.items()}, "params": values})
                    step.options.append((group, used[-1]))
            optimizer.param_groups = used
            try:
                if used:
                    step.rewind(optimizer)
                    self._step((optimizer,), updates)
            finally:
                optimizer.param_groups = groups
                for value in [value for group in used for value in group.pop("params")]:
                    after[id(value)] = optimizer.state.pop(value, {})
        return [after[id(value)] for _, value, _ in portions]

    def _choose(self, unit: int, rate: float, chosen: Sequence[Mapping[str, Any]] | None) -> None:
        """Set the options of this step in the groups of a unit's optimizers, and multiply learning rates by ``rate``.

        Without ``chosen``, the learning rate is the initial one times ``rate``, and other options stay."""
        for optimizer in self.optimizers.get(unit, ()):
            for group in optimizer.param_groups:
                if "of" in group and chosen is not None:
                    group.update(chosen[group["of"]])
                    group["lr"] = group["lr"] * rate
                else:
                    group["lr"] = group["initial_lr"] * rate

    def _value_of(self, updates: Tensor) -> bool:
        """Return the value of a flag on the device. The host waits for it once per change, not once per unit."""
        known, version, value = self._flag
        if known is not updates or version != updates._version:
            version, value = updates._version, bool(updates)
            self._flag = updates, version, value
        return value

    def _step(self, optimizers: Sequence[Any], updates: Tensor | None) -> None:
        """Step each optimizer, unless ``updates`` is zero.

        Fused optimizers read this flag on the device, without a host sync.
        """
        for optimizer in optimizers:
            fused = getattr(optimizer, "_step_supports_amp_scaling", False)
            # The fused step reads a flag on the device, so the finite check needs no host sync.
            on_device = fused and not _begins_unset(optimizer)
            if not on_device and updates is not None and not self._value_of(updates):
                continue
            if fused:  # set always, as values of an earlier step stay until replaced
                left_out = (updates == 0).to(torch.float32) if on_device and updates is not None else None
                optimizer.grad_scale, optimizer.found_inf = None, left_out
            optimizer.step()
