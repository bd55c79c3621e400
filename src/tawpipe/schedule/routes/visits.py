"""Order in which blocks are visited in a step, equal for all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from tawpipe.schedule.spec import ModelSpec
from tawpipe.schedule.step import StepSpec


@dataclass(frozen=True)
class Visit:
    """Visit of one block: the time during which its weights are on a device.

    Args:
        block: index of the block.
        round: number of the round in the step.
        backward: False for a forward visit. The head of a training step has only a backward visit, which computes loss
            and gradient together.
        weight_index: position among the visits of the step that need weights, or None.
        gradient_index: position among the visits of the step that make gradients, or None.
    """

    block: int
    round: int
    backward: bool
    weight_index: int | None
    gradient_index: int | None


def training_visits(step: StepSpec) -> tuple[Visit, ...]:
    """Return the visits of a training step.

    Every round goes forward through embedding and layers, then backward through head, layers and embedding, as far as
    gradients are needed.
    """
    model = step.model
    blocks = range(len(model.blocks))
    order = [(block, False) for block in blocks[:-1]]
    order += [(block, True) for block in reversed(blocks) if block == blocks[-1] or model.blocks[block].needs_backward]
    return _numbered(model, [(block, number, backward) for number in range(step.rounds) for block, backward in order])


def forward_visits(step: StepSpec) -> tuple[Visit, ...]:
    """Return the visits of an evaluation: every round goes forward through all blocks, the head included."""
    blocks = range(len(step.model.blocks))
    return _numbered(step.model, [(b, number, False) for number in range(step.rounds) for b in blocks])


def _numbered(model: ModelSpec, order: list[tuple[int, int, bool]]) -> tuple[Visit, ...]:
    """Return a ``Visit`` for each (block, round, backward) of ``order``, with its weight and gradient indices."""
    visits = []
    weights = gradients = 0
    for block, number, backward in order:
        spec = model.blocks[block]
        reads = bool(spec.units) and (not backward or spec.backward_reads_weights or spec.kind == "head")
        makes = backward and bool(model.trainable_units(block))
        visits.append(Visit(block, number, backward, weights if reads else None, gradients if makes else None))
        weights, gradients = weights + reads, gradients + makes
    return tuple(visits)
