"""The sizes of a model: all that builders of schedules see of it. Imports model and schedule.spec."""

from __future__ import annotations

from tawpipe.model.chain import Chain
from tawpipe.schedule.spec import BlockSpec, ModelSpec, UnitSpec


def model_spec(chain: Chain) -> ModelSpec:
    """A chain as the sizes that builders see."""
    return ModelSpec(
        tuple(
            BlockSpec(
                units=block.units,
                kind=block.kind,
                backward_reads_weights=block.backward_reads_weights,
                needs_backward=block.needs_backward,
            )
            for block in chain.blocks
        ),
        tuple(UnitSpec(unit.numel, unit.trainable, unit.blocks) for unit in chain.units),
    )
