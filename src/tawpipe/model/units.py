"""Units: parameters that travel together, and the position of each in the unit's flat layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tawpipe.errors import UserError
from tawpipe.model.bits.forms import AnyForm, FlatForm, PlainForm
from tawpipe.model.bits.quantized import quantise
from tawpipe.model.roles import roles_of
from tawpipe.schedule.spec import BlockSpec, UnitSpec

ALIGNED_ELEMENTS = 8
"""Number of elements: parameters whose size is a multiple of it come first in a unit. So one scalar of odd size does
not take the 16-byte alignment (in bf16), which grouped and vectorised kernels want, from the parameters behind it."""
Published = Callable[[str], tuple[Tensor, Tensor]]
"""Function from a parameter's name to its codes, one in each uint8, and its fp32 scales."""
ALIGNED_BYTES = 16
"""Alignment in bytes of every parameter in a packed unit, so that any dtype can be read there."""


def base_name(name: str) -> str:
    """Return the name that a parameter has without ``peft`` around its module.

    >>> base_name("mlp.experts.base_layer.base_layer.down_proj")  # one layer of peft for each adapted parameter
    'mlp.experts.down_proj'
    """
    return re.sub(r"(\.base_layer)+(?=\.)", "", name)


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
        return flat[self.offset : self.offset + self.numel].view(self.shape)  # ``part``, without a call


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
        form: value of the setting: ``nf4``, ``int8`` or ``published``.
        forms: form of every parameter, or None for a parameter that is not quantised.
        slots: parameters of the unit.
        places: byte positions of these parameters, in the same order.
        compute_dtype: dtype of the buffer as transport sees it, and dtype in which blocks compute.
        exact_dtype: dtype of the parameters that are not quantised.
    """

    form: str
    forms: tuple[AnyForm | None, ...]
    slots: tuple[ParameterSlot, ...]
    places: tuple[_Place, ...]
    compute_dtype: torch.dtype
    exact_dtype: torch.dtype

    @classmethod
    def of(
        cls,
        slots: Sequence[ParameterSlot],
        forms: Mapping[str, AnyForm],
        form: str,
        compute_dtype: torch.dtype,
    ) -> Packing:
        """Build the byte layout of a unit.

        Args:
            slots: parameters of the unit.
            forms: name -> form, for the parameters that are quantised. All others keep their numbers in fp32 (fp64 for
                fp64).
            form: ``nf4``, ``int8`` or ``published``.
            compute_dtype: dtype in which blocks compute.
        """
        exact, places, begin = torch.promote_types(compute_dtype, torch.float32), list[_Place](), 0
        of_slots = tuple(forms.get(slot.name) for slot in slots)
        for slot, each in zip(slots, of_slots, strict=True):
            place = _Place(begin, slot.numel * exact.itemsize, 0)
            if each is not None:
                place = _Place(begin, each.code_bytes(slot.shape), each.scale_bytes(slot.shape))
            places.append(place)
            begin += -(-(place.codes + place.scales) // ALIGNED_BYTES) * ALIGNED_BYTES
        return cls(form, of_slots, tuple(slots), tuple(places), compute_dtype, exact)

    @property
    def elements(self) -> int:
        """Number of elements of ``compute_dtype`` that the packed unit occupies."""
        last = self.places[-1]
        return -(-last.end // ALIGNED_BYTES) * ALIGNED_BYTES // self.compute_dtype.itemsize

    @property
    def passing_bytes(self) -> int:
        """Temporary bytes that ``unpack`` takes on CUDA, or 0 if no parameter is quantised."""
        of_slots = zip(self.slots, self.forms, strict=True)
        return max((form.passing_bytes(slot.shape) for slot, form in of_slots if form is not None), default=0)

    def _parts(self, packed: Tensor) -> Iterator[tuple[ParameterSlot, AnyForm | None, Tensor, Tensor]]:
        """Yield every slot with its form and views of its bytes in ``packed``: codes and scales.

        For a parameter that is not quantised they are its numbers and an empty tensor."""
        raw = packed.view(torch.uint8)
        for slot, form, place in zip(self.slots, self.forms, self.places, strict=True):
            stored, scales = raw[place.begin : place.begin + place.codes], raw[place.begin + place.codes : place.end]
            yield slot, form, stored if form else stored.view(self.exact_dtype), scales

    def pack(self, values: Tensor, out: Tensor, published: Published | None = None) -> None:
        """Quantise the numbers of a unit and write them as bytes into ``out``.

        Args:
            values: flat layout of the unit, ``[numel]``.
            out: the packed buffer, ``[elements]`` or longer, of the compute dtype.
            published: function that returns codes and scales of a parameter in blocks of rows and columns.
        """
        for slot, form, stored, scales in self._parts(out):
            slot_values = slot.part(values)
            if form is None:
                stored.copy_(slot_values)
            elif isinstance(form, FlatForm):
                quantise(form.kind, slot_values, stored, scales.view(torch.float32))
            elif isinstance(form, PlainForm):
                form.store(slot_values, stored)
            elif published is None:
                raise UserError("quantize", self.form, "none, nf4 or int8: these weights have no published codes")
            else:
                form.store(published(slot.name), stored, scales)

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        """Write the numbers of the packed unit ``packed`` into ``out``, the unit's flat layout.

        If ``out`` has a wider dtype than the compute dtype, quantised matrices are first rounded to the compute dtype,
        because blocks compute with the rounded values."""
        rounds = torch.promote_types(out.dtype, self.compute_dtype) != self.compute_dtype
        for slot, form, stored, scales in self._parts(packed):
            target = slot.view(out)
            if form is None:
                target.copy_(stored.view(slot.shape))
            elif rounds:
                computes = torch.empty(slot.shape, dtype=self.compute_dtype, device=out.device)
                form.dequantise(stored, scales, computes)
                target.copy_(computes)
            else:
                form.dequantise(stored, scales, target)

    def as_computed(self, name: str, values: Tensor) -> Tensor:
        """Return the values of one parameter after quantisation and back: the values that blocks compute with.

        Args:
            name: canonical name of the parameter. If it is not quantised, ``values`` is returned unchanged.
            values: exact values of the parameter, on the CPU. The result has their dtype. Values of a published form
                stand for its codes and scales already.
        """
        index = [slot.name for slot in self.slots].index(name)
        slot, form, place = self.slots[index], self.forms[index], self.places[index]
        if not isinstance(form, FlatForm):
            return values if form is None else values.to(self.compute_dtype).to(values.dtype)
        codes = torch.empty(place.codes, dtype=torch.uint8, device="cpu")
        scales = torch.empty(place.scales // 4, device="cpu")
        quantise(form.kind, values.flatten(), codes, scales)
        computes = torch.empty(slot.shape, dtype=self.compute_dtype, device="cpu")
        form.dequantise(codes, scales.view(torch.uint8), computes)
        return computes.to(values.dtype)


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

    def packed(self, forms: Mapping[str, AnyForm], form: str, compute_dtype: torch.dtype) -> Unit:
        """Return a copy of this unit that is stored and sent as bytes, with ``.{form}`` behind its name.

        Args:
            forms: name -> form, for the parameters that are quantised.
            form: ``nf4``, ``int8`` or ``published``.
            compute_dtype: dtype in which blocks compute.
        """
        packing = Packing.of(self.slots, forms, form, compute_dtype)
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
