"""Units: parameters that travel together, and the position of each in the unit's flat layout."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tawpipe.model.bits.quantized import BLOCK, dequantise, passing_bytes, quantise
from tawpipe.model.roles import roles_of
from tawpipe.schedule.spec import BlockSpec, UnitSpec

ALIGNED_ELEMENTS = 8
"""Number of elements: parameters whose size is a multiple of it come first in a unit. So one scalar of odd size does
not take the 16-byte alignment (in bf16), which grouped and vectorised kernels want, from the parameters behind it."""
ALIGNED_BYTES = 16
"""Alignment in bytes of every parameter in a packed unit, so that any dtype can be read there."""


@dataclass(frozen=True)
class ParameterSlot:
    """Position of one parameter in the flat layout of its unit."""

    name: str
    """Canonical name: the first one in ``model.named_parameters()``."""
    shape: tuple[int, ...]
    offset: int
    """Index of the parameter's first element in the unit's flat layout."""
    numel: int
    role: str = ""
    """Role of the parameter (see ``model.roles``), or ``""`` if only its shape is known."""

    def part(self, flat: Tensor) -> Tensor:
        """Return the elements of this parameter in ``flat``, its unit's flat layout, as a view ``[numel]``."""
        return flat[self.offset : self.offset + self.numel]

    def view(self, flat: Tensor) -> Tensor:
        """Return this parameter in ``flat``, its unit's flat layout, as a view of the parameter's shape."""
        return self.part(flat).view(self.shape)


@dataclass(frozen=True)
class _Place:
    """Byte positions of one parameter in a packed unit.

    Args:
        begin: the first byte.
        codes: bytes of the codes, or of the parameter's numbers if it is not quantised.
        scales: bytes of the scales, which follow the codes; 0 if it is not quantised.
    """

    begin: int
    codes: int
    scales: int

    @property
    def end(self) -> int:
        """Byte after the scales."""
        return self.begin + self.codes + self.scales


@dataclass(frozen=True)
class Packing:
    """Byte layout in which a frozen unit is stored and sent: matrices are quantised, other parameters stay exact.

    For schedules, homes and transport it is a buffer of ``elements`` elements of the compute dtype. Its content is
    bytes (codes and scales of each matrix, and the numbers of other parameters), so nothing may compute with it.

    Args:
        form: format of the quantised matrices, ``nf4`` or ``int8``.
        slots: parameters of the unit.
        places: byte positions of these parameters, in the same order.
        compute_dtype: dtype of the buffer as transport sees it, and dtype in which blocks compute.
        exact_dtype: dtype of the parameters that are not quantised.
    """

    form: str
    slots: tuple[ParameterSlot, ...]
    places: tuple[_Place, ...]
    compute_dtype: torch.dtype
    exact_dtype: torch.dtype

    @classmethod
    def of(
        cls, slots: Sequence[ParameterSlot], matrices: Collection[str], form: str, compute_dtype: torch.dtype
    ) -> Packing:
        """Build the byte layout of a unit.

        Args:
            slots: parameters of the unit.
            matrices: names of the parameters to quantise. All others keep their numbers in fp32 (fp64 for fp64).
            form: ``nf4`` or ``int8``.
            compute_dtype: dtype in which blocks compute.
        """
        exact, places, begin = torch.promote_types(compute_dtype, torch.float32), list[_Place](), 0
        for slot in slots:
            blocks = -(-slot.numel // BLOCK)
            codes = blocks * BLOCK // (2 if form == "nf4" else 1)
            place = _Place(begin, codes, 4 * blocks)
            if slot.name not in matrices:
                place = _Place(begin, slot.numel * exact.itemsize, 0)
            places.append(place)
            begin += -(-(place.codes + place.scales) // ALIGNED_BYTES) * ALIGNED_BYTES
        return cls(form, tuple(slots), tuple(places), compute_dtype, exact)

    @property
    def elements(self) -> int:
        """Number of elements of ``compute_dtype`` that the packed unit occupies."""
        last = self.places[-1]
        return -(-last.end // ALIGNED_BYTES) * ALIGNED_BYTES // self.compute_dtype.itemsize

    @property
    def passing_bytes(self) -> int:
        """Temporary bytes that ``unpack`` takes on CUDA, or 0 if no parameter is quantised."""
        of_matrices = zip(self.slots, self.places, strict=True)
        return max((passing_bytes(self.form, slot.numel) for slot, place in of_matrices if place.scales), default=0)

    def _parts(self, packed: Tensor) -> Iterator[tuple[ParameterSlot, Tensor, Tensor | None]]:
        """Yield every slot with views of its bytes in ``packed``.

        Each item is (slot, codes, scales), or (slot, numbers, None) for a parameter that is not quantised."""
        raw = packed.view(torch.uint8)
        for slot, place in zip(self.slots, self.places, strict=True):
            stored = raw[place.begin : place.begin + place.codes]
            if place.scales:
                yield slot, stored, raw[place.begin + place.codes : place.end].view(torch.float32)
            else:
                yield slot, stored.view(self.exact_dtype), None

    def pack(self, values: Tensor, out: Tensor) -> None:
        """Quantise the numbers of a unit and write them as bytes into ``out``.

        Args:
            values: flat layout of the unit, ``[numel]``.
            out: the packed buffer, ``[elements]`` or longer, of the compute dtype.
        """
        for slot, stored, scales in self._parts(out):
            slot_values = slot.part(values)
            if scales is None:
                stored.copy_(slot_values)
            else:
                quantise(self.form, slot_values, stored, scales)

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        """Write the numbers of the packed unit ``packed`` into ``out``, the unit's flat layout.

        If ``out`` has a wider dtype than the compute dtype, quantised matrices are first rounded to the compute dtype,
        because blocks compute with the rounded values."""
        rounds = torch.promote_types(out.dtype, self.compute_dtype) != self.compute_dtype
        for slot, stored, scales in self._parts(packed):
            target = slot.part(out)
            if scales is None:
                target.copy_(stored)
            elif rounds:
                computes = torch.empty(slot.numel, dtype=self.compute_dtype, device=out.device)
                dequantise(self.form, stored, scales, computes)
                target.copy_(computes)
            else:
                dequantise(self.form, stored, scales, target)

    def as_computed(self, name: str, values: Tensor) -> Tensor:
        """Return the values of one parameter after quantisation and back: the values that blocks compute with.

        Args:
            name: canonical name of the parameter. If it is not quantised, ``values`` is returned unchanged.
            values: exact values of the parameter, on the CPU. The result has their dtype.
        """
        slot, place = next(pair for pair in zip(self.slots, self.places, strict=True) if pair[0].name == name)
        if not place.scales:
            return values
        codes = torch.empty(place.codes, dtype=torch.uint8, device="cpu")
        scales = torch.empty(place.scales // 4, device="cpu")
        quantise(self.form, values.flatten(), codes, scales)
        computes = torch.empty(slot.numel, dtype=self.compute_dtype, device="cpu")
        dequantise(self.form, codes, scales, computes)
        return computes.view(slot.shape).to(values.dtype)


@dataclass(frozen=True)
class Unit:
    """Parameters used by the same blocks, all trainable or all frozen, laid end to end without gaps."""

    index: int
    name: str
    trainable: bool
    slots: tuple[ParameterSlot, ...]
    blocks: tuple[int, ...]
    """Indices of the blocks that use the unit, ascending. A tied embedding is used by the first and the last block."""
    numel: int
    """Elements of all slots, without any padding."""
    packing: Packing | None = None
    """Byte layout in which the unit is stored and sent, or None if it is sent as plain numbers."""

    @property
    def spec(self) -> UnitSpec:
        """Sizes of the unit as schedules see them, for a unit whose elements all take part in computing every token."""
        if self.packing is None:
            return UnitSpec(self.numel, self.trainable, self.blocks)
        return UnitSpec(self.packing.elements, self.trainable, self.blocks, packed=self.numel)

    def active_elements(self, share: float, *, least_dimensions: int = 0) -> float:
        """Return the number of elements that take part in computing one token.

        Args:
            share: part of a layer's experts that one token is sent to, from 0 to 1. Parameters of experts count by this
                share.
            least_dimensions: parameters with fewer dimensions do not count; 2 counts matrices only.
        """
        counted = [slot for slot in self.slots if len(slot.shape) >= least_dimensions]
        return sum(slot.numel * (share if ".experts." in slot.name else 1) for slot in counted)

    def packed(self, matrices: Collection[str], form: str, compute_dtype: torch.dtype) -> Unit:
        """Return a copy of this unit that is stored and sent as bytes, with ``.{form}`` behind its name.

        Args:
            matrices: names of the parameters to quantise.
            form: ``nf4`` or ``int8``.
            compute_dtype: dtype in which blocks compute.
        """
        packing = Packing.of(self.slots, matrices, form, compute_dtype)
        return replace(self, name=f"{self.name}.{form}", packing=packing)


def build_units(
    model: nn.Module, uses: Mapping[str, tuple[int, ...]], block_names: tuple[str, ...]
) -> tuple[Unit, ...]:
    """Group every parameter of ``model`` into units: one for each combination of blocks and of trainable or frozen.

    Args:
        model: its ``named_parameters()`` give names, shapes, order and ``requires_grad``. A tied parameter counts once.
        uses: canonical parameter name -> ascending indices of the blocks that use the parameter.
        block_names: one name per block. Units are named after their blocks.
    """
    roles = roles_of(model)
    groups: dict[tuple[tuple[int, ...], bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault((uses[name], parameter.requires_grad), []).append((name, parameter))

    units = []
    for index, (blocks, trainable) in enumerate(sorted(groups)):
        slots, offset = [], 0
        for name, parameter in sorted(
            groups[blocks, trainable], key=lambda item: item[1].numel() % ALIGNED_ELEMENTS != 0
        ):
            slots.append(ParameterSlot(name, tuple(parameter.shape), offset, parameter.numel(), roles[name]))
            offset += parameter.numel()
        name = "+".join(block_names[block] for block in blocks) + ("" if trainable else ".frozen")
        units.append(Unit(index, name, trainable, tuple(slots), blocks, offset))
    return tuple(units)


def build_blocks(
    units: tuple[Unit, ...], count: int, *, embedding_backward_reads_weights: bool
) -> tuple[BlockSpec, ...]:
    """Return the ``count`` blocks of the chain in order, each with the indices of the units that it needs.

    Args:
        units: all units of the model.
        count: number of blocks: embedding, layers and head.
        embedding_backward_reads_weights: True if the backward pass of the embedding block reads its weights.
    """
    blocks: list[BlockSpec] = []
    for index in range(count):
        needed = tuple(unit for unit in units if index in unit.blocks)
        blocks.append(
            BlockSpec(
                units=tuple(unit.index for unit in needed),
                kind="embedding" if index == 0 else "head" if index == count - 1 else "layer",
                backward_reads_weights=embedding_backward_reads_weights if index == 0 else True,
                needs_backward=any(unit.trainable for unit in needed) or any(block.needs_backward for block in blocks),
            )
        )
    return tuple(blocks)
