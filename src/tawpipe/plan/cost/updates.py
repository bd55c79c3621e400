"""Cost of an optimizer in a plan: the states that it keeps, and the seconds of an update of each unit.

Most optimizers treat every element alone and take equally long for each. Muon multiplies each matrix with itself
several times, so an element of a larger matrix takes longer. For Muon one matrix of each shape is updated, or a smaller
one from which the time is extrapolated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tawpipe.model.units import Unit
from tawpipe.runtime.homes.optimizer import OptimizerFactory, WholeMatrices, make_optimizers
from tawpipe.runtime.homes.storage import PlaceOfPiece, is_of_layer, matrices_in
from tawpipe.runtime.homes.unit_optimizers import try_factory

ELEMENTS = 4_000_000
"""Elements that are updated to measure an optimizer that takes equally long for each."""
LARGEST = {"cpu": 512, "cuda": 4096}
"""Most rows or columns of a matrix that is updated for a measurement, by type of device."""
ITERATIONS = 5
"""Newton-Schulz iterations in one update of ``torch.optim.Muon``."""
BYTES = 28
"""Bytes that AdamW moves for an fp32 element: it reads gradient, weight and two states, and writes three of them and a
copy."""

Updates = tuple[float, tuple[float, ...]]
"""Mean seconds to update one element; and the seconds for one element of every unit, empty if all are equal."""


def states_of(factory: OptimizerFactory, units: Sequence[Unit]) -> float | tuple[float, ...]:
    """Return the number of parameter-sized tensors that the optimizer keeps, per unit if it differs.

    A single number if all trained units have equally many, else one for every unit. Frozen units have 0."""
    tried = try_factory(factory, units)
    states = tuple(tried[unit.index].states if unit.trainable else 0.0 for unit in units)
    kept = {states[unit.index] for unit in units if unit.trainable} or {0.0}
    return kept.pop() if len(kept) == 1 else states


def flops_of(factory: OptimizerFactory, place: PlaceOfPiece) -> float:
    """Return the operations of matrix products in the update of one matrix by Muon; 0 for other optimizers.

    With sides ``short`` and ``long``, each iteration makes two products of ``2 * short**2 * long`` operations and one
    of ``2 * short**3``."""
    shape = place.shape
    optimizers = make_optimizers(factory, [_stand_in(place, 2)])
    if len(shape) != 2 or not any(isinstance(optimizer, torch.optim.Muon) for optimizer in optimizers):
        return 0.0
    short, long = sorted(shape)
    return ITERATIONS * (4 * short**2 * long + 2 * short**3)


def measured(
    factory: OptimizerFactory,
    units: Sequence[Unit],
    device: torch.device,
    seconds: Callable[[Callable[[], object]], float],
) -> Updates:
    """Measure the seconds of updates on a device: return the mean for one element, and the seconds for every unit.

    Seconds for every unit are empty unless the optimizer needs whole matrices.

    Args:
        factory: makes the optimizer.
        units: units of the model.
        device: device that updates.
        seconds: runs a function several times and returns the seconds of one run.
    """
    if not isinstance(factory, WholeMatrices):
        value = PlaceOfPiece("", (ELEMENTS // 2000, 2000), 0).mark(torch.zeros(ELEMENTS, device=device))
        return seconds(_update(factory, value)) / ELEMENTS, ()

    def of(place: PlaceOfPiece) -> float:
        """Measure and return the seconds to update one matrix; a large one is extrapolated from a smaller one."""
        shape = place.shape
        value = _stand_in(place, LARGEST[device.type] if len(shape) == 2 else max(shape, default=1), device)
        sizes = (place, replace(place, shape=tuple(value.shape)))
        work, small_work = (flops_of(factory, size) or size.numel for size in sizes)
        return seconds(_update(factory, value)) * work / max(1, small_work)

    return _by_unit(units, of)


def estimated(factory: OptimizerFactory, units: Sequence[Unit], rate: float, bytes_per_s: float) -> Updates:
    """Estimate the seconds of updates for one element, as mean and for every unit.

    Seconds for every unit are empty unless the optimizer needs whole matrices.

    Args:
        factory: makes the optimizer.
        units: units of the model.
        rate: operations per second of matrix products.
        bytes_per_s: rate of the device's memory.
    """
    if not isinstance(factory, WholeMatrices):
        return BYTES / bytes_per_s, ()
    of = lambda place: flops_of(factory, place) / rate + BYTES / bytes_per_s * place.numel  # noqa: E731
    return _by_unit(units, of)


def _by_unit(units: Sequence[Unit], of: Callable[[PlaceOfPiece], float]) -> Updates:
    """Return (mean seconds per element of all trained units, seconds per element of every unit).

    Equal matrices are asked for once.

    Args:
        units: units of the model.
        of: returns the seconds to update one matrix.
    """
    known: dict[PlaceOfPiece, float] = {}
    each = []
    for unit in units:
        in_layer, total = is_of_layer(unit, units), 0.0
        for (shape, role), count in Counter((slot.shape, slot.role) for slot in unit.slots if unit.trainable).items():
            number, matrix = matrices_in(shape)
            place = PlaceOfPiece("", matrix, 0, in_layer, role)
            if place not in known:
                known[place] = of(place)
            total += count * number * known[place]
        each.append(total / unit.numel)
    trained = [unit for unit in units if unit.trainable]
    mean = sum(each[unit.index] * unit.numel for unit in trained) / max(1, sum(unit.numel for unit in trained))
    return mean, tuple(each)


def _stand_in(place: PlaceOfPiece, most: int, device: torch.device | None = None) -> torch.nn.Parameter:
    """Make a parameter with the shape of ``place``, limited to ``most`` in each dimension, and a gradient of ones."""
    value = place.mark(torch.zeros([min(size, most) for size in place.shape], device=device))
    value.grad = torch.ones_like(value)
    return value


def _update(factory: OptimizerFactory, value: Tensor) -> Callable[[], object]:
    """Return a function that updates ``value`` with the optimizer, given a gradient of ones."""
    value.grad = torch.ones_like(value)
    optimizers = make_optimizers(factory, [value])
    return lambda: [optimizer.step() for optimizer in optimizers]
