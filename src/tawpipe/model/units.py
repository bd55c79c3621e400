"""Units: parameters that travel as one, and their places in a unit's flat layout."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tawpipe.model.bits.quantized import BLOCK, dequantise, passing_bytes, quantise
from tawpipe.model.roles import roles_of
from tawpipe.schedule.spec import BlockSpec, UnitSpec

ALIGNED_ELEMENTS = 8
"""Parameters whose size is a multiple of this come first in a unit, so that one odd scalar does not take the 16-byte
alignment (of bf16) that grouped and vectorised kernels want from all that follow."""
ALIGNED_BYTES = 16
"""Of the places of parameters in a packed unit: any dtype can be read there."""


@dataclass(frozen=True)
class ParameterSlot:
    """One parameter's place in its unit."""

    name: str
    """Canonical name, the first one in ``model.named_parameters()``."""
    shape: tuple[int, ...]
    offset: int
    """First element in the unit's flat layout."""
    numel: int
    role: str = ""
    """``model.roles`` has it; empty if nothing is known but the shape."""

    def part(self, flat: Tensor) -> Tensor:
        """Its elements in its unit's flat layout."""
        return flat[self.offset : self.offset + self.numel]

    def view(self, flat: Tensor) -> Tensor:
        """The parameter in its unit's flat layout."""
        return self.part(flat).view(self.shape)


@dataclass(frozen=True)
class _Place:
    """A parameter's place in its packed unit: first byte, bytes of its codes or of itself, and of its scales."""

    begin: int
    codes: int
    scales: int

    @property
    def end(self) -> int:
        return self.begin + self.codes + self.scales


@dataclass(frozen=True)
class Packing:
    """The bytes in which a frozen unit lives and travels: of every matrix its codes and its scales, of the rest, which
    is small, its numbers.

    To schedules, homes and transport they are a buffer of so many elements of the compute dtype, which are no numbers:
    nothing may compute with them.

    Args:
        form: of the matrices.
        slots: the unit's.
        places: of the same.
        compute_dtype: in which the unit travels, as far as transport knows, and in which blocks compute.
        exact_dtype: of the numbers that are kept as they are.
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
        """The packing of a unit with these slots, of which ``matrices`` are quantised."""
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
        """Elements of the compute dtype in as many bytes."""
        last = self.places[-1]
        return -(-last.end // ALIGNED_BYTES) * ALIGNED_BYTES // self.compute_dtype.itemsize

    @property
    def passing_bytes(self) -> int:
        """Bytes that ``unpack`` takes on CUDA for a while."""
        of_matrices = zip(self.slots, self.places, strict=True)
        return max((passing_bytes(self.form, slot.numel) for slot, place in of_matrices if place.scales), default=0)

    def _parts(self, packed: Tensor) -> Iterator[tuple[ParameterSlot, Tensor, Tensor | None]]:
        """Every slot with its codes and its scales, or with its numbers and None, as views."""
        raw = packed.view(torch.uint8)
        for slot, place in zip(self.slots, self.places, strict=True):
            stored = raw[place.begin : place.begin + place.codes]
            if place.scales:
                yield slot, stored, raw[place.begin + place.codes : place.end].view(torch.float32)
            else:
                yield slot, stored.view(self.exact_dtype), None

    def pack(self, values: Tensor, out: Tensor) -> None:
        """Write the flat layout of a unit [numel] as bytes.

        Args:
            out: [elements] or longer, of the compute dtype.
        """
        for slot, stored, scales in self._parts(out):
            given = slot.part(values)
            if scales is None:
                stored.copy_(given)
            else:
                quantise(self.form, given, stored, scales)

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        """The opposite of ``pack``; where ``out`` has another dtype than blocks compute in, matrices are rounded to
        that first: they are what computes.
        """
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
        """A parameter of the unit as blocks compute with it, in the dtype of ``values``."""
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
    """The parameters that the same blocks use and that are alike trainable or frozen, laid end to end without gaps."""

    index: int
    name: str
    trainable: bool
    slots: tuple[ParameterSlot, ...]
    blocks: tuple[int, ...]
    """The blocks that use it, ascending. A tied embedding is used by the first and the last."""
    numel: int
    """Elements of all slots, without any padding."""
    packing: Packing | None = None
    """The form in which it lives and travels, if not in that of its numbers."""

    @property
    def spec(self) -> UnitSpec:
        """All that schedules see of it, if a token meets all of it."""
        if self.packing is None:
            return UnitSpec(self.numel, self.trainable, self.blocks)
        return UnitSpec(self.packing.elements, self.trainable, self.blocks, packed=self.numel)

    def met(self, share: float, *, least_dimensions: int = 0) -> float:
        """Elements that a token meets.

        Args:
            share: of a layer's experts, those that it is sent to.
            least_dimensions: of the parameters that count; 2 for matrices.
        """
        counted = [slot for slot in self.slots if len(slot.shape) >= least_dimensions]
        return sum(slot.numel * (share if ".experts." in slot.name else 1) for slot in counted)

    def packed(self, matrices: Collection[str], form: str, compute_dtype: torch.dtype) -> Unit:
        """The same in bytes, of which those of ``matrices`` are quantised."""
        packing = Packing.of(self.slots, matrices, form, compute_dtype)
        return replace(self, name=f"{self.name}.{form}", packing=packing)


def build_units(
    model: nn.Module, uses: Mapping[str, tuple[int, ...]], block_names: tuple[str, ...]
) -> tuple[Unit, ...]:
    """Group every parameter of ``model`` into units.

    Args:
        model: its ``named_parameters()`` give names, shapes, order and ``requires_grad``; a tied one counts once.
        uses: canonical parameter name to the ascending indices of the blocks that use it.
        block_names: one name per block, for the names of the units.
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
    """The ``count`` blocks of the chain in order, each with the units that it needs."""
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
