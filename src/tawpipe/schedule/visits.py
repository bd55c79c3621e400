"""The order in which blocks are visited in a step, the same for all ranks. Imports schedule only."""

from __future__ import annotations

from dataclasses import dataclass

from tawpipe.schedule.spec import Knobs, ModelSpec


@dataclass(frozen=True)
class Visit:
    """One block on a device.

    Args:
        block, round: which block, in which round of the step.
        backward: False for a forward visit. The head of a training step has only a backward visit: loss and gradient at
            once.
        weights: the how-manieth visit with weights this is in the step, or None where none are needed.
        gradients: the how-manieth visit that makes gradients, or None.
    """

    block: int
    round: int
    backward: bool
    weights: int | None
    gradients: int | None


def training_visits(model: ModelSpec, knobs: Knobs) -> tuple[Visit, ...]:
    """Every round: embedding and layers forward, head, layers and embedding backward as far as gradients are needed."""
    blocks = range(len(model.blocks))
    order = [(block, False) for block in blocks[:-1]]
    order += [(block, True) for block in reversed(blocks) if block == blocks[-1] or model.blocks[block].needs_backward]
    return _numbered(model, [(block, number, backward) for number in range(knobs.rounds) for block, backward in order])


def forward_visits(model: ModelSpec, knobs: Knobs) -> tuple[Visit, ...]:
    """Every round: all blocks forward, the head with its loss included."""
    return _numbered(model, [(b, number, False) for number in range(knobs.rounds) for b in range(len(model.blocks))])


def _numbered(model: ModelSpec, order: list[tuple[int, int, bool]]) -> tuple[Visit, ...]:
    visits = []
    weights = gradients = 0
    for block, number, backward in order:
        spec = model.blocks[block]
        reads = bool(spec.units) and (not backward or spec.backward_reads_weights or spec.kind == "head")
        makes = backward and bool(model.trainable_units(block))
        visits.append(Visit(block, number, backward, weights if reads else None, gradients if makes else None))
        weights, gradients = weights + reads, gradients + makes
    return tuple(visits)
