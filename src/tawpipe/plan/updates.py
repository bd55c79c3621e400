"""What an optimizer costs in a plan: the states that it keeps, and the seconds of an update, unit by unit.

One that treats every element by itself takes as long for each. Muon multiplies every matrix with itself, again and
again, so that an element of a larger one takes longer: one matrix of each shape is updated, or a smaller one from which
the larger follows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tawpipe.model.units import Unit
from tawpipe.runtime.optimizer import OptimizerFactory, WholeMatrices, make_optimizers
from tawpipe.runtime.storage import PlaceOfPiece, is_of_layer, matrices_in
from tawpipe.runtime.unit_optimizers import try_factory

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


def flops_of(factory: OptimizerFactory, shape: Sequence[int], *, in_layer: bool) -> float:
    """Of matrix products in the update of one matrix: Muon's, which has two of its short side by both, and one of its
    short side alone, in every iteration.
    """
    optimizers = make_optimizers(factory, [_stand_in(shape, 2, in_layer)])
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

    def of(shape: tuple[int, ...], in_layer: bool) -> float:
        value = _stand_in(shape, LARGEST[device.type] if len(shape) == 2 else max(shape, default=1), in_layer, device)
        small = tuple(value.shape)
        work, small_work = (flops_of(factory, size, in_layer=in_layer) or math.prod(size) for size in (shape, small))
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
    of = lambda shape, in_layer: (  # noqa: E731
        flops_of(factory, shape, in_layer=in_layer) / rate + BYTES / bytes_per_s * math.prod(shape)
    )
    return _by_unit(units, of)


def _by_unit(units: Sequence[Unit], of: Callable[[tuple[int, ...], bool], float]) -> Updates:
    known: dict[tuple[tuple[int, ...], bool], float] = {}
    each = []
    for unit in units:
        in_layer, total = is_of_layer(unit, units), 0.0
        for shape, count in Counter(slot.shape for slot in unit.slots if unit.trainable).items():
            number, matrix = matrices_in(shape)
            if (matrix, in_layer) not in known:
                known[matrix, in_layer] = of(matrix, in_layer)
            total += count * number * known[matrix, in_layer]
        each.append(total / unit.numel)
    trained = [unit for unit in units if unit.trainable]
    mean = sum(each[unit.index] * unit.numel for unit in trained) / max(1, sum(unit.numel for unit in trained))
    return mean, tuple(each)


def _stand_in(
    shape: Sequence[int], most: int, in_layer: bool, device: torch.device | None = None
) -> torch.nn.Parameter:
    small = tuple(min(size, most) for size in shape)
    value = PlaceOfPiece("", tuple(shape), 0, in_layer).mark(torch.zeros(small, device=device))
    value.grad = torch.ones_like(value)
    return value


def _update(factory: OptimizerFactory, value: Tensor) -> Callable[[], object]:
    value.grad = torch.ones_like(value)
    optimizers = make_optimizers(factory, [value])
    return lambda: [optimizer.step() for optimizer in optimizers]
