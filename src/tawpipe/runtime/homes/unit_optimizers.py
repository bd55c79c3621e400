"""Optimizers on home stripes: one, or several that share the parameters, for each unit, so that a unit can be updated
by itself.
"""

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
"""Unit to the optimizer's state of each of its pieces; empty where it has none."""


def try_factory(factory: OptimizerFactory, units: Sequence[Unit]) -> dict[int, Tried]:
    """The trial of a factory for every trainable unit, whoever has its home: all ranks refuse alike.

    Raises:
        UserError: see ``check_elementwise`` and ``check_whole``.
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
    """Class and options of the group of every trainable parameter, by its name."""
    return {name: said for trial in try_factory(factory, units).values() for name, said in trial.options.items()}


def in_other_groups(factory: OptimizerFactory, groups: str, units: Sequence[Unit]) -> list[str]:
    """Names of the parameters whose group is another one by the rule ``groups``; empty for a factory without a rule."""
    if rule_of(factory) in ("", groups) or groups not in (ROLES, SHAPES):
        return []
    here, there = options_of(factory, units), options_of(with_groups(factory, groups), units)
    return [name for name in here if here[name] != there[name]]


def refuse_cut_matrices(factory: OptimizerFactory, units: Sequence[Unit], homes: Sequence[Home], strategy: str) -> None:
    """Raise UserError where a factory wants whole matrices and a trainable unit is cut over several devices."""
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
    """torch's fused SGD makes its momentum in the first step with one, and leaves it unset if that one is left out."""
    first = ((group["momentum"], group["params"][0]) for group in optimizer.param_groups if group["params"])
    return isinstance(optimizer, torch.optim.SGD) and any(m and not optimizer.state.get(p) for m, p in first)


def is_elementwise(state: Any, value: Tensor) -> bool:
    """True for a state that has an element for every one of its parameter."""
    return isinstance(state, Tensor) and state.ndim > 0 and state.shape == value.shape


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _counts(value: Any) -> bool:
    """True for what an optimizer may count in: a number, or a tensor."""
    return isinstance(value, (int, float, Tensor))


class SlicedStep:
    """An optimizer's step on one unit that is made slice by slice.

    Args:
        before: the states of the unit's pieces as every slice finds them.
        after: as they are from ``end`` on.
    """

    def __init__(self, optimizers: UnitOptimizers, unit: int) -> None:
        self.unit, self._optimizers = unit, optimizers
        self.before = [dict(state) for state in optimizers.states_of(unit)]
        self.after = [dict(state) for state in self.before]
        self.options: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Groups, and the options that a step has left in them, for optimizers that count there."""
        self._numbers: dict[int, dict[str, Any]] = {}

    def memory(self, place: int, key: str, state: Tensor, make: Callable[..., Tensor], *, elementwise: bool) -> Tensor:
        """Where the state of a piece is kept of which ``state`` is a slice, or the whole; made if it is new."""
        shape = self._optimizers.pieces[self.unit][place].value.shape if elementwise else state.shape
        kept = self.after[place].get(key)
        if not isinstance(kept, Tensor) or kept.shape != shape:
            self.after[place][key] = make(tuple(shape), state.dtype)
        return self.after[place][key]

    def rewind(self, optimizer: Any) -> None:
        """Before a slice, make of an optimizer's own numbers what they were before the step: some count in them."""
        values = vars(optimizer)
        kept = self._numbers.setdefault(id(optimizer), {k: _copy(v) for k, v in values.items() if _counts(v)})
        values.update({key: _copy(value) for key, value in kept.items()})

    def end(self) -> None:
        """Every slice has had its step."""
        self._optimizers.hold(self.unit, self.after)
        for group, options in self.options:
            for key, value in options.items():
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value


class UnitOptimizers:
    """The optimizers of one rank, for every trainable unit with a home here.

    ``name`` is that of their classes; ``states_per_element`` says for every unit how many tensors of a parameter's size
    they keep for it; ``groups`` are their options, which may be changed; ``pieces`` are what they update.
    """

    def __init__(self, storage: Storage, factory: OptimizerFactory) -> None:
        tried = try_factory(factory, storage.units)
        self.name = "+".join(sorted({part for trial in tried.values() for part in trial.name.split("+")}))
        self.states_per_element = tuple(tried[u.index].states if u.trainable else 0 for u in storage.units)
        options = {name: said for trial in tried.values() for name, said in trial.options.items()}
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
        """The flag that was read last, its version then, and its value."""
        self.optimizers = {unit: self._make([piece.value for piece in pieces]) for unit, pieces in self.pieces.items()}

    def _make(self, values: Sequence[Tensor]) -> tuple[Any, ...]:
        optimizers = make_optimizers(self.factory, values)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group.setdefault("initial_lr", group["lr"])
            if group["params"]:
                group["of"] = self.groups.group_of[piece_of(group["params"][0]).name]
        return optimizers

    def states(self) -> States:
        """The states that the optimizers hold now."""
        return {unit: self.states_of(unit) for unit in self.pieces}

    def states_of(self, unit: int) -> list[Mapping[str, Any]]:
        """``states`` of one unit."""
        return [state_of(self.optimizers[unit], piece.value) for piece in self.pieces[unit]]

    def full_states(self) -> States:
        """The states, and for a unit that has none those that its optimizer would hold after a step: something to load
        into, made by a stand-in.
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
        """The states of a piece in the host's memory, as a stand-in on the device has them after a step: a few elements
        for a vector.
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
        """Hold these states and no others; without those of a unit, its optimizer is as one that has made no step."""
        for unit, optimizers in self.optimizers.items():
            for optimizer in optimizers:
                optimizer.state.clear()
            self.hold(unit, states.get(unit, ()))

    def hold(self, unit: int, states: Sequence[Mapping[str, Any]]) -> None:
        """Put states in the place of those of a unit's pieces; empty ones change nothing."""
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
            updates: a one-element tensor on the device of the gradients; None for no such condition.
            rate: multiplies every group's learning rate.
            chosen: options of ``groups``, the learning rate among them; those from the beginning by default.
        """
        self._choose(unit, rate, chosen)
        self._step(self.optimizers.get(unit, ()), updates)

    def begin(self, unit: int, rate: float, chosen: Sequence[Mapping[str, Any]] | None = None) -> SlicedStep:
        """A step of a unit slice by slice, with the options of ``step``; ``step_on`` makes it."""
        self._choose(unit, rate, chosen)
        return SlicedStep(self, unit)

    def step_on(
        self, step: SlicedStep, slices: Sequence[tuple[int, nn.Parameter, Mapping[str, Any]]], updates: Tensor | None
    ) -> list[Mapping[str, Any]]:
        """Update some slices of a unit, unless ``updates`` is zero; returns the state of each.

        Args:
            slices: of every slice the number of its piece, a parameter that stands for it, and its state so far.
        """
        pieces, after = self.pieces[step.unit], dict[int, Mapping[str, Any]]()
        stands = [(pieces[place].value, value, state) for place, value, state in slices]
        for optimizer in self.optimizers[step.unit]:
            groups, used = optimizer.param_groups, list[dict[str, Any]]()
            for group in groups:
                mine = [stand for whole in group["params"] for stand in stands if stand[0] is whole]
                optimizer.state.update({value: dict(state) for _, value, state in mine if state})
                if mine:
                    values = [value for _, value, _ in mine]
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
        return [after[id(value)] for _, value, _ in slices]

    def _choose(self, unit: int, rate: float, chosen: Sequence[Mapping[str, Any]] | None) -> None:
        """Give the groups of a unit's optimizers the options of a step."""
        for optimizer in self.optimizers.get(unit, ()):
            for group in optimizer.param_groups:
                if "of" in group and chosen is not None:
                    group.update(chosen[group["of"]])
                    group["lr"] = group["lr"] * rate
                else:
                    group["lr"] = group["initial_lr"] * rate

    def _value_of(self, updates: Tensor) -> bool:
        """Read a flag of the device. The host waits for it once after every change, not once for every unit."""
        known, version, value = self._flag
        if known is not updates or version != updates._version:
            version, value = updates._version, bool(updates)
            self._flag = updates, version, value
        return value

    def _step(self, optimizers: Sequence[Any], updates: Tensor | None) -> None:
        for optimizer in optimizers:
            fused = getattr(optimizer, "_step_supports_amp_scaling", False)
            # The fused step looks at a flag on the device: no host sync for the finite check.
            on_device = fused and not _begins_unset(optimizer)
            if not on_device and updates is not None and not self._value_of(updates):
                continue
            if fused:  # always: what it was told of an earlier step holds until it is told anew
                left_out = (updates == 0).to(torch.float32) if on_device and updates is not None else None
                optimizer.grad_scale, optimizer.found_inf = None, left_out
            optimizer.step()
