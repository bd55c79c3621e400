"""Storage: the homes of parameters, gradients and optimizer state on one rank, on its device or in the host's memory.

For every unit that has a stripe here: the master weights (fp32, or fp64), the gradient of the same dtype if it is
trainable, and the compute copy, which has the compute dtype and travels (the master itself where the dtypes are the
same). Optimizer parameters are views of the master stripe, one per model parameter that the stripe touches; where all
of a parameter is here they can have its shape.

A frozen unit's master is what travels, too, unless that would round its values: the exact ones are then kept in the
host's memory, for exports and checkpoints. Of a packed unit (`model.units.Packing`) stripes are bytes, and so are its
pieces: master and compute copy are one tensor, with which nothing computes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tawpipe.errors import UserError
from tawpipe.model.bits.quantized import NONE
from tawpipe.model.units import Packing, ParameterSlot, Unit
from tawpipe.model.weights import WeightSource
from tawpipe.runtime.homes.host_memory import host_zeros
from tawpipe.runtime.threads import use_device
from tawpipe.schedule.placement import Home


@dataclass(frozen=True)
class PlaceOfPiece:
    """The place of a piece in its model parameter.

    Args:
        name: of the model parameter.
        shape: of the whole model parameter.
        start: first element of the piece in the flattened parameter.
        in_layer: the parameter is one of a layer; False for those of the embedding side and of the head.
        role: ``matrix`` for the weight of a linear layer, ``vector`` for norms, biases and the like whatever their
            shape, ``table`` for all else; empty if nothing is known but the shape.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    in_layer: bool = True
    role: str = ""

    @classmethod
    def of(cls, slot: ParameterSlot, *, in_layer: bool, start: int = 0) -> PlaceOfPiece:
        """Place of the elements of ``slot`` from ``start`` on."""
        return PlaceOfPiece(slot.name, slot.shape, start, in_layer, slot.role)

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return torch.Size(self.shape).numel()

    def mark(self, value: Tensor) -> nn.Parameter:
        """A Parameter of ``value``'s elements which ``piece_of`` knows."""
        parameter: Any = nn.Parameter(value)
        parameter._tawpipe_piece = PlaceOfPiece(self.name, self.shape, self.start, self.in_layer, self.role)
        return parameter


def piece_of(parameter: Tensor) -> PlaceOfPiece:
    """The place of a parameter that a factory of optimizers is given: ``name``, ``start``, ``shape`` of the whole,
    ``in_layer`` and ``role``.

    Raises:
        UserError: it is no such parameter.
    """
    piece = getattr(parameter, "_tawpipe_piece", None)
    if piece is None:
        given = f"a {type(parameter).__name__} of shape {tuple(parameter.shape)}"
        raise UserError("piece_of", given, "one of the parameters that a factory of optimizers is given")
    return piece


@dataclass(frozen=True)
class HomePiece(PlaceOfPiece):
    """The part of one model parameter that lives on this rank.

    Args:
        value: view of the master stripe, 1-D, or a whole matrix; a Parameter whose ``grad`` is a view of the home
            gradient where that is on the device, or, where the unit is frozen, a plain tensor.
    """

    value: Tensor = field(kw_only=True)

    @property
    def gradient(self) -> Tensor:
        """View of the home gradient, like ``value``; only of trainable units with homes on the device."""
        assert self.value.grad is not None
        return self.value.grad

    def matrices(self) -> tuple[HomePiece, ...]:
        """A whole trainable parameter in its own shape, in the same memory; several matrices (experts) one by one."""
        number, shape = matrices_in(self.shape)
        size = self.numel // number
        return tuple(self._shaped(shape, slice(at * size, (at + 1) * size)) for at in range(number))

    def _shaped(self, shape: tuple[int, ...], part: slice) -> HomePiece:
        piece = PlaceOfPiece(self.name, self.shape, part.start or 0, self.in_layer, self.role)
        value = piece.mark(self.value.detach()[part].view(shape))
        if self.value.grad is not None:
            value.grad = self.gradient[part].view(shape)
        return HomePiece(**vars(piece), value=value)


def matrices_in(shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """A parameter's number of matrices, and the shape of one of them; anything but a stack of matrices is one.

    >>> matrices_in((8, 512, 256)), matrices_in((512, 256)), matrices_in((512, 1, 4))
    ((8, (512, 256)), (1, (512, 256)), (1, (512, 1, 4)))
    """
    if len(shape) < 3 or min(shape[-2:]) < 2:
        return 1, shape
    return torch.Size(shape[:-2]).numel(), shape[-2:]


def is_of_layer(unit: Unit, units: Sequence[Unit]) -> bool:
    """True if only layers use a unit: neither the first block, the embedding side, nor the last, the head."""
    return not {0, max(block for each in units for block in each.blocks)} & set(unit.blocks)


class Storage:
    """The homes on one rank.

    Args:
        units, homes: of the whole model, in the same order.
        compute_dtype: in which weights travel and compute.
        master_dtype: of master weights, gradients and optimizer state at home.
        host_homes: where these three are, as ``ScheduleSettings`` has it: in the host's memory (streaming.py) under
            ``state``, with a compute copy on the device that is one of its own; under ``all`` everything is.
        keeps_gradients: False where a gradient at home gets memory when a schedule has one arrive there
            (``open_gradient``), of homes in the host's memory.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        homes: Sequence[Home],
        rank: int,
        *,
        device: torch.device,
        compute_dtype: torch.dtype,
        master_dtype: torch.dtype,
        host_homes: str = "none",
        keeps_gradients: bool = True,
    ) -> None:
        self._keeps_gradients = keeps_gradients
        self.level, self.in_host, self.copies_in_host = host_homes, host_homes != "none", host_homes == "all"
        self.scales: dict[int, Tensor] = {}
        """Of gradients in the host's memory, what the last update multiplied them by; on the device."""
        self.units, self.homes, self.rank, self.device = tuple(units), tuple(homes), rank, device
        self.compute_dtype, self.master_dtype = compute_dtype, master_dtype
        self.master: dict[int, Tensor] = {}
        self.gradient: dict[int, Tensor] = {}
        self.compute_copy: dict[int, Tensor] = {}
        self.pieces: dict[int, tuple[HomePiece, ...]] = {}
        self.folder = ""
        """Folder that the parameters of ``digests`` came from."""
        self.digests: dict[str, str] = {}
        """Digests of frozen parameters, of all ranks, whose values are still those of a folder; by name."""
        self.exact: frozenset[int] = frozenset()
        """Frozen units, of all ranks, whose exact values are in the host's memory."""
        for unit, home in zip(units, homes, strict=True):
            index = home.index(rank)
            if index is None:
                continue
            dtype = master_dtype if unit.trainable else compute_dtype
            outside = (self.in_host and unit.trainable) or self.copies_in_host
            self.master[unit.index] = self._zeros(home, dtype, outside=outside)
            if unit.trainable and (keeps_gradients or not outside):
                self.gradient[unit.index] = self._zeros(home, dtype, outside=outside)
            if outside and unit.trainable:
                self.scales[unit.index] = torch.ones((), dtype=torch.float64, device=device)
            same = dtype == compute_dtype and (self.copies_in_host or not outside)
            self.compute_copy[unit.index] = (
                self.master[unit.index]
                if same
                else self._zeros(home, compute_dtype, outside=outside and self.copies_in_host)
            )
            self.pieces[unit.index] = tuple(self._cut(unit))

    def _zeros(self, home: Home, dtype: torch.dtype, *, outside: bool) -> Tensor:
        """Memory of a stripe, in the host's or on the device."""
        if outside:
            return self.host_zeros((home.stripe,), dtype)
        return torch.zeros(home.stripe, dtype=dtype, device=self.device)

    def host_zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for something at home in the host's memory."""
        return host_zeros(shape, dtype, self.device, self.level)

    def keeps_gradient(self, unit: int) -> bool:
        """False for a unit whose gradient has no place at home so far."""
        return self._keeps_gradients or unit in self.gradient

    def open_gradient(self, unit: int) -> None:
        """Give a unit's gradient in the host's memory a place at home, if it has none."""
        if unit not in self.gradient:
            self.gradient[unit] = self._zeros(self.homes[unit], self.master_dtype, outside=True)

    def _cut(self, unit: Unit) -> Iterator[HomePiece]:
        """The pieces of a unit's parameters in the stripe here."""
        home = self.homes[unit.index]
        index, length = home.index(self.rank), home.stripe
        assert index is not None
        if unit.packing is not None:
            yield from self._cut_bytes(unit.packing, self.master[unit.index].view(torch.uint8), index)
            return
        in_layer = is_of_layer(unit, self.units)
        begin = index * length
        for slot in unit.slots:
            first, last = max(slot.offset, begin), min(slot.offset + slot.numel, begin + length)
            if first >= last:
                continue
            cut = slice(first - begin, last - begin)
            value = self.master[unit.index][cut]
            piece = PlaceOfPiece.of(slot, in_layer=in_layer, start=first - slot.offset)
            if unit.trainable:
                value = piece.mark(value)
                if not self.in_host:
                    value.grad = self.gradient[unit.index][cut]
            yield HomePiece(**vars(piece), value=value)

    @staticmethod
    def _cut_bytes(packing: Packing, stripe: Tensor, index: int) -> Iterator[HomePiece]:
        """The pieces of a packed unit: bytes, as if every parameter were a vector of them."""
        begin = index * len(stripe)
        for slot, place in zip(packing.slots, packing.places, strict=True):
            first, last = max(place.begin, begin), min(place.end, begin + len(stripe))
            if first < last:
                shape, value = (place.end - place.begin,), stripe[first - begin : last - begin]
                yield HomePiece(slot.name, shape, first - place.begin, value=value)

    @property
    def form(self) -> str:
        """The form of packed units (`model.quantized`)."""
        return next((unit.packing.form for unit in self.units if unit.packing is not None), NONE)

    def _is_packed(self, unit: int) -> bool:
        return self.units[unit].packing is not None

    def widen(self, unit: int) -> None:
        """Keep a frozen unit's values in the host's memory in the master dtype, if they are not."""
        if self._is_packed(unit):
            return
        if self.compute_copy[unit] is self.master[unit] and self.compute_dtype != self.master_dtype:
            self.master[unit] = self.compute_copy[unit].to("cpu", self.master_dtype)
            self.pieces[unit] = tuple(self._cut(self.units[unit]))

    def settle(self, world: dist.ProcessGroup | None) -> None:
        """Agree on which frozen units the compute dtype would round, and keep the exact values of those and no others;
        call on all ranks, when values have been filled in.
        """
        rounded = torch.zeros(len(self.units), dtype=torch.int32, device="cpu")
        for unit, master in self.master.items():
            if not self.units[unit].trainable and self.compute_copy[unit] is not master:
                rounded[unit] = not torch.equal(master.to(self.compute_dtype).to(master.dtype), master)
        if world is not None:
            dist.all_reduce(rounded, dist.ReduceOp.MAX, group=world)
        self.exact = frozenset(rounded.nonzero().flatten().tolist())
        for unit in self.master:
            if unit in self.exact:
                self.widen(unit)
            elif not self.units[unit].trainable:
                self.master[unit] = self.compute_copy[unit]
                self.pieces[unit] = tuple(self._cut(self.units[unit]))

    @property
    def exact_bytes(self) -> int:
        """Host memory for exact values of frozen units, on the rank that has most of them."""
        held: dict[int, int] = {}
        for unit in self.exact:
            for rank in {rank for ranks in self.homes[unit].copies for rank in ranks}:
                held[rank] = held.get(rank, 0) + self.homes[unit].stripe * self.master_dtype.itemsize
        return max(held.values(), default=0)

    def is_first_copy(self, unit: int) -> bool:
        """True if the stripe here is saved: of several copies only the first is."""
        return self.rank in self.homes[unit].ranks

    def refresh(self, unit: int) -> None:
        """Bring the compute copy up to date with the master."""
        if self.compute_copy[unit] is not self.master[unit]:
            self.compute_copy[unit].copy_(self.master[unit])

    @torch.no_grad()
    def checksums(self) -> Iterator[tuple[int, str]]:
        """The units with a home here, each with a checksum of its master, or ``stale`` if the compute copy differs."""
        for unit, master in self.master.items():
            if self.compute_copy[unit] is not master and not torch.equal(
                self.compute_copy[unit], master.to(self.compute_copy[unit])
            ):
                yield unit, "stale"
            else:
                yield unit, f"{zlib.crc32(master.cpu().contiguous().view(torch.uint8).numpy().data):08x}"

    @torch.no_grad()
    def fill(self, source: WeightSource, world: dist.ProcessGroup | None, world_size: int) -> None:
        """Give every home its initial values; call on all ranks.

        One rank reads or initialises a unit and sends the stripes; the ranks take turns by block, so that the work is
        shared and no process ever holds more than a few units. In a thread every rank reads the next one of its own
        meanwhile: all of them read at the same time.

        Args:
            world: a group of all ranks that moves CPU tensors, None in a single process.
        """
        to_read = iter([unit for unit in self.units if unit.blocks[0] % world_size == self.rank])
        with ThreadPoolExecutor(1, "reading weights", use_device, (self.device,)) as reader:
            read_next = lambda: [reader.submit(self._read, source, unit) for unit in islice(to_read, 1)]  # noqa: E731
            ahead = read_next()
            for unit, home in zip(self.units, self.homes, strict=True):
                root = unit.blocks[0] % world_size
                if self.rank == root:
                    flat = ahead.pop().result()
                    ahead = read_next()
                    works = []
                    for ranks in home.copies:
                        for stripe, rank in zip(flat.view(-1, home.stripe), ranks, strict=True):
                            if rank == self.rank:
                                self._put(unit.index, stripe)
                            else:
                                works.append(dist.isend(stripe, rank, group=world))
                    for work in works:
                        assert work is not None
                        work.wait()
                elif home.index(self.rank) is not None:
                    stripe = torch.empty(home.stripe, dtype=self._dtype_of(unit), device="cpu")
                    dist.recv(stripe, root, group=world)
                    self._put(unit.index, stripe)
        self.settle(world)

    def _dtype_of(self, unit: Unit) -> torch.dtype:
        """The dtype in which a unit is read and collected: the master's, or that of packed bytes."""
        return self.master_dtype if unit.packing is None else self.compute_dtype

    @torch.no_grad()
    def _read(self, source: WeightSource, unit: Unit) -> Tensor:
        """A unit with its padding on the CPU."""
        flat = torch.zeros(self.homes[unit.index].padded, dtype=self._dtype_of(unit), device="cpu")
        values = source.unit(unit, dtype=self.master_dtype)
        if unit.packing is None:
            flat[: unit.numel] = values
        else:
            unit.packing.pack(values, flat)
        return flat

    def _put(self, unit: int, stripe: Tensor) -> None:
        """Fill a home from its stripe, as it was read."""
        if not self._is_packed(unit) and not torch.equal(stripe.to(self.master[unit].dtype).to(stripe.dtype), stripe):
            self.widen(unit)
        self.master[unit].copy_(stripe)
        self.refresh(unit)

    @torch.no_grad()
    def collect(
        self, unit: Unit, world: dist.ProcessGroup | None, *, to: int = 0, gradient: bool = False
    ) -> Tensor | None:
        """The whole unit (``numel`` elements, master dtype, CPU) on rank ``to``, None elsewhere; call on all ranks. A
        packed one's numbers are those that blocks compute with.

        Args:
            gradient: its home gradient instead of its weights.
        """
        home = self.homes[unit.index]
        index = home.ranks.index(self.rank) if self.rank in home.ranks else None
        held = self.gradient if gradient else self.master
        dtype = self._dtype_of(unit)
        mine = None if index is None else held[unit.index].to("cpu", dtype)
        if gradient and mine is not None and unit.index in self.scales:
            mine = mine * self.scales[unit.index].cpu()
        if self.rank != to:
            if mine is not None:
                dist.send(mine, to, group=world)
            return None
        flat = torch.empty(home.padded, dtype=dtype, device="cpu")
        for stripe, rank in zip(flat.view(-1, home.stripe), home.ranks, strict=True):
            if rank == self.rank:
                assert mine is not None
                stripe.copy_(mine)
            else:
                dist.recv(stripe, rank, group=world)
        if unit.packing is None:
            return flat[: unit.numel]
        values = torch.empty(unit.numel, dtype=self.master_dtype, device="cpu")
        unit.packing.unpack(flat, values)
        return values
