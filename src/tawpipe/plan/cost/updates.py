"""What an optimizer costs in a plan: the states that it keeps, and the seconds of an update, unit by unit.

One that treats every element by itself takes as long for each. Muon multiplies every matrix with itself, again and
again, so that an element of a larger one takes longer: one matrix of each shape is updated, or a smaller one from which
the larger follows.
"""

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
"""That are updated where every element takes as long."""
LARGEST = {"cpu": 512, "cuda": 4096}
"""Rows or columns of a matrix that is updated."""
ITERATIONS = 5
"""Of Newton and Schulz, as many as torch's Muon makes."""
BYTES = 28
"""Bytes that AdamW moves for an fp32 element: gradient, weight and two states read, three and a copy written."""

Updates = tuple[float, tuple[float, ...]]
"""Seconds for an element, on the mean; and for an element of every unit, empty where all are alike."""


def states_of(factory: OptimizerFactory, units: Sequence[Unit]) -> float | tuple[float, ...]:
    """Tensors of a parameter's size that the optimizer keeps; for every unit, where they differ."""
    tried = try_factory(factory, units)
    states = tuple(tried[unit.index].states if unit.trainable else 0.0 for unit in units)
    kept = {states[unit.index] for unit in units if unit.trainable} or {0.0}
    return kept.pop() if len(kept) == 1 else states


def flops_of(factory: OptimizerFactory, place: PlaceOfPiece) -> float:
    """Of matrix products in the update of one matrix: Muon's, which has two of its short side by both, and one of its
    short side alone, in every iteration.
    """
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
    """The updates as they run on a device.

    Args:
        seconds: runs something a few times, and says how long it takes.
    """
    if not isinstance(factory, WholeMatrices):
        value = PlaceOfPiece("", (ELEMENTS // 2000, 2000), 0).mark(torch.zeros(ELEMENTS, device=device))
        return seconds(_update(factory, value)) / ELEMENTS, ()

    def of(place: PlaceOfPiece) -> float:
        shape = place.shape
        value = _stand_in(place, LARGEST[device.type] if len(shape) == 2 else max(shape, default=1), device)
        sizes = (place, replace(place, shape=tuple(value.shape)))
        work, small_work = (flops_of(factory, size) or size.numel for size in sizes)
        return seconds(_update(factory, value)) * work / max(1, small_work)

    return _by_unit(units, of)


def estimated(factory: OptimizerFactory, units: Sequence[Unit], rate: float, bytes_per_s: float) -> Updates:
    """The same from the rates of a device that is not here.

    Args:
        rate: operations per second of matrix products.
        bytes_per_s: of its memory.
    """
    if not isinstance(factory, WholeMatrices):
        return BYTES / bytes_per_s, ()
    of = lambda place: flops_of(factory, place) / rate + BYTES / bytes_per_s * place.numel  # noqa: E731
    return _by_unit(units, of)


def _by_unit(units: Sequence[Unit], of: Callable[[PlaceOfPiece], float]) -> Updates:
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
    value = place.mark(torch.zeros([min(size, most) for size in place.shape], device=device))
    value.grad = torch.ones_like(value)
    return value


def _update(factory: OptimizerFactory, value: Tensor) -> Callable[[], object]:
    value.grad = torch.ones_like(value)
    optimizers = make_optimizers(factory, [value])
    return lambda: [optimizer.step() for optimizer in optimizers]
