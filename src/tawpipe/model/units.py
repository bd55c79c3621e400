"""Units: parameters that travel as one, and their places in a unit's flat layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from tawpipe.schedule.spec import BlockSpec

ALIGNED_ELEMENTS = 8
"""Parameters whose size is a multiple of this come first in a unit, so that one odd scalar does not take the 16-byte
alignment (of bf16) that grouped and vectorised kernels want from all that follow."""


@dataclass(frozen=True)
class ParameterSlot:
    """One parameter's place in its unit."""

    name: str
    """Canonical name, the first one in ``model.named_parameters()``."""
    shape: tuple[int, ...]
    offset: int
    """First element in the unit's flat layout."""
    numel: int

    def view(self, flat: Tensor) -> Tensor:
        """The parameter in its unit's flat layout."""
        return flat[self.offset : self.offset + self.numel].view(self.shape)


@dataclass(frozen=True)
class Unit:
    """The parameters that the same blocks use and that are alike trainable or frozen, laid end to end without gaps."""

    index: int
    name: str
    trainable: bool
    slots: tuple[ParameterSlot, ...]
    blocks: tuple[int, ...]
    """The blocks that use it, ascending. A tied embedding is used by the first and the last."""
    numel: int
    """Elements of all slots, without any padding."""


def build_units(
    model: nn.Module, uses: Mapping[str, tuple[int, ...]], block_names: tuple[str, ...]
) -> tuple[Unit, ...]:
    """Group every parameter of ``model`` into units.

    Args:
        model: its ``named_parameters()`` give names, shapes, order and ``requires_grad``; a tied one counts once.
        uses: canonical parameter name to the ascending indices of the blocks that use it.
        block_names: one name per block, for the names of the units.
    """
    groups: dict[tuple[tuple[int, ...], bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault((uses[name], parameter.requires_grad), []).append((name, parameter))

    units = []
    for index, (blocks, trainable) in enumerate(sorted(groups)):
        slots, offset = [], 0
        for name, parameter in sorted(
            groups[blocks, trainable], key=lambda item: item[1].numel() % ALIGNED_ELEMENTS != 0
        ):
            slots.append(ParameterSlot(name, tuple(parameter.shape), offset, parameter.numel()))
            offset += parameter.numel()
        name = "+".join(block_names[block] for block in blocks) + ("" if trainable else ".frozen")
        units.append(Unit(index, name, trainable, tuple(slots), blocks, offset))
    return tuple(units)


def build_blocks(
    units: tuple[Unit, ...], count: int, *, embedding_backward_reads_weights: bool
) -> tuple[BlockSpec, ...]:
    """The ``count`` blocks of the chain in order, each with the units that it needs."""
    blocks: list[BlockSpec] = []
    for index in range(count):
        own = tuple(unit for unit in units if index in unit.blocks)
        blocks.append(
            BlockSpec(
                units=tuple(unit.index for unit in own),
                kind="embedding" if index == 0 else "head" if index == count - 1 else "layer",
                backward_reads_weights=embedding_backward_reads_weights if index == 0 else True,
                needs_backward=any(unit.trainable for unit in own) or any(block.needs_backward for block in blocks),
            )
        )
    return tuple(blocks)
