"""Storage: the homes of parameters, gradients and optimizer state on one rank, on its device or in CPU memory.

For every unit with a shard on this rank it holds: the master weights (fp32 or fp64); the gradient in that dtype, if the
unit is trainable; and the compute copy, in the compute dtype, which is sent to other ranks. If both dtypes are equal,
master and compute copy are one tensor. Optimizer parameters are views of the master shard, one for each model parameter
that the shard overlaps. If all of a parameter is on this rank, they can have its shape.

The master of a frozen unit is its compute copy, too. If the compute dtype would round its values, the exact values are
kept in CPU memory for exports and checkpoints. The shards of a packed unit (`model.units.Packing`) are bytes, and so
are its pieces: master and compute copy are one tensor, which is never used in arithmetic.
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
    """Position of a piece in its model parameter.

    Args:
        name: Name of the model parameter.
        shape: Shape of the whole model parameter.
        start: First element of the piece in the flattened parameter.
        in_layer: True for a parameter of a layer; False for parameters of the embedding side and of the head.
        role: ``matrix`` for the weight of a linear layer; ``vector`` for norms, biases and similar parameters of any
            shape; ``table`` for all others; ``""`` if only the shape is known.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    in_layer: bool = True
    role: str = ""

    @classmethod
    def of(cls, slot: ParameterSlot, *, in_layer: bool, start: int = 0) -> PlaceOfPiece:
        """Return the position of the elements of ``slot`` from element ``start``."""
        return PlaceOfPiece(slot.name, slot.shape, start, in_layer, slot.role)

    @property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return torch.Size(self.shape).numel()

    def mark(self, value: Tensor) -> nn.Parameter:
        """Return an ``nn.Parameter`` with the data of ``value`` and this position attached, for ``piece_of``."""
        parameter: Any = nn.Parameter(value)
        parameter._tawpipe_piece = PlaceOfPiece(self.name, self.shape, self.start, self.in_layer, self.role)
        return parameter


def piece_of(parameter: Tensor) -> PlaceOfPiece:
    """Return the position in its model parameter of a parameter that an optimizer factory receives.

    The result has ``name``, ``start``, ``shape`` of the whole parameter, ``in_layer`` and ``role``.

    Raises:
        UserError: If ``parameter`` is not one that an optimizer factory receives.
    """
    piece = getattr(parameter, "_tawpipe_piece", None)
    if piece is None:
        value = f"a {type(parameter).__name__} of shape {tuple(parameter.shape)}"
        raise UserError("piece_of", value, "one of the parameters that a factory of optimizers is given")
    return piece


@dataclass(frozen=True)
class HomePiece(PlaceOfPiece):
    """Part of one model parameter whose home is on this rank.

    Args:
        value: View of the master shard, 1-D, or a whole matrix. For a trainable unit it is a Parameter; its ``grad`` is
            a view of the home gradient if the home is on the device. For a frozen unit it is a plain tensor.
    """

    value: Tensor = field(kw_only=True)

    @property
    def gradient(self) -> Tensor:
        """View of the home gradient, shaped like ``value``; only for trainable units with homes on the device."""
        assert self.value.grad is not None
        return self.value.grad

    def matrices(self) -> tuple[HomePiece, ...]:
        """Return this piece, which must be a whole trainable parameter, as views in the shape of matrices.

        A stack of matrices (such as stacked experts) is returned as one view for each matrix, any other parameter as
        one view in its own shape. The gradients are views, too, if the home gradient is on the device."""
        number, shape = matrices_in(self.shape)
        size = self.numel // number
        return tuple(self._shaped(shape, slice(at * size, (at + 1) * size)) for at in range(number))

    def _shaped(self, shape: tuple[int, ...], part: slice) -> HomePiece:
        """Return the elements ``part`` of this piece as a view of the given shape, with its gradient."""
        piece = PlaceOfPiece(self.name, self.shape, part.start or 0, self.in_layer, self.role)
        value = piece.mark(self.value.detach()[part].view(shape))
        if self.value.grad is not None:
            value.grad = self.gradient[part].view(shape)
        return HomePiece(**vars(piece), value=value)


def matrices_in(shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return the number of matrices in a parameter, and the shape of one.

    A parameter with three or more dimensions is a stack of matrices of its last two, unless one of these is 1. Any
    other counts as one.

    >>> matrices_in((8, 512, 256)), matrices_in((512, 256)), matrices_in((512, 1, 4))
    ((8, (512, 256)), (1, (512, 256)), (1, (512, 1, 4)))
    """
    if len(shape) < 3 or min(shape[-2:]) < 2:
        return 1, shape
    return torch.Size(shape[:-2]).numel(), shape[-2:]


def is_of_layer(unit: Unit, units: Sequence[Unit]) -> bool:
    """Return True if only layers use the unit: neither the first block (embedding side) nor the last (head)."""
    return not {0, max(block for each in units for block in each.blocks)} & set(unit.blocks)


class Storage:
    """Homes on one rank: master weights, gradients and compute copies of its shards.

    Args:
        units, homes: Units of the whole model, and their homes in equal order.
        rank: This rank.
        device: Device of this rank.
        compute_dtype: Dtype in which weights are sent and used for computing.
        master_dtype: Dtype of master weights, gradients and optimizer state.
        host_homes: As in ``ScheduleSettings``. ``state``: these three are in CPU memory (streaming.py), and the compute
            copy is a separate tensor on the device. ``all``: everything is in CPU memory. ``none``: everything is on
            the device.
        keeps_gradients: If False, a gradient in CPU memory is allocated only when a schedule adds to it
            (``open_gradient``).
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
        """Unit -> factor by which its last update multiplied its gradient in CPU memory; on the device."""
        self.units, self.homes, self.rank, self.device = tuple(units), tuple(homes), rank, device
        self.compute_dtype, self.master_dtype = compute_dtype, master_dtype
        self.master: dict[int, Tensor] = {}
        self.gradient: dict[int, Tensor] = {}
        self.compute_copy: dict[int, Tensor] = {}
        self.pieces: dict[int, tuple[HomePiece, ...]] = {}
        self.folder = ""
        """Folder from which the parameters in ``digests`` were read."""
        self.digests: dict[str, str] = {}
        """Parameter name -> digest, for frozen parameters of all ranks that still have the values in ``folder``."""
        self.exact: frozenset[int] = frozenset()
        """Frozen units, of all ranks, whose exact values are kept in CPU memory."""
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
        """Allocate a zeroed shard, in CPU memory if ``outside`` is True, else on the device."""
        if outside:
            return self.host_zeros((home.shard_size,), dtype)
        return torch.zeros(home.shard_size, dtype=dtype, device=self.device)

    def host_zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate zeros in CPU memory for a home, page-locked if the device is a GPU."""
        return host_zeros(shape, dtype, self.device, self.level)

    def keeps_gradient(self, unit: int) -> bool:
        """Return False if the unit's home gradient has not been allocated."""
        return self._keeps_gradients or unit in self.gradient

    def open_gradient(self, unit: int) -> None:
        """Allocate the home gradient of a unit in CPU memory if it has none."""
        if unit not in self.gradient:
            self.gradient[unit] = self._zeros(self.homes[unit], self.master_dtype, outside=True)

    def _cut(self, unit: Unit) -> Iterator[HomePiece]:
        """Yield the pieces of a unit's parameters that lie in the shard on this rank."""
        home = self.homes[unit.index]
        index, length = home.index(self.rank), home.shard_size
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
    def _cut_bytes(packing: Packing, shard: Tensor, index: int) -> Iterator[HomePiece]:
        """Yield the pieces of a packed unit, each parameter being a vector of bytes."""
        begin = index * len(shard)
        for slot, place in zip(packing.slots, packing.places, strict=True):
            first, last = max(place.begin, begin), min(place.end, begin + len(shard))
            if first < last:
                shape, value = (place.end - place.begin,), shard[first - begin : last - begin]
                yield HomePiece(slot.name, shape, first - place.begin, value=value)

    @property
    def form(self) -> str:
        """Storage form of packed units (`model.quantized`), or ``none`` if no unit is packed."""
        return next((unit.packing.form for unit in self.units if unit.packing is not None), NONE)

    def _is_packed(self, unit: int) -> bool:
        return self.units[unit].packing is not None

    def widen(self, unit: int) -> None:
        """Replace the master of a frozen unit by a copy of its values in the master dtype in CPU memory.

        The compute copy stays as it is. Does nothing for a packed unit, for equal dtypes, and if there is such a copy
        already."""
        if self._is_packed(unit):
            return
        if self.compute_copy[unit] is self.master[unit] and self.compute_dtype != self.master_dtype:
            self.master[unit] = self.compute_copy[unit].to("cpu", self.master_dtype)
            self.pieces[unit] = tuple(self._cut(self.units[unit]))

    def settle(self, world: dist.ProcessGroup | None) -> None:
        """Find the frozen units that the compute dtype would round, and keep exact values in CPU memory for these only.

        The master of every other frozen unit is its compute copy again. Call on all ranks, after the values have been
        filled in. Sets ``exact``, equal on all ranks.

        Args:
            world: Group of all ranks; None in a single process.
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
        """CPU memory in bytes for exact values of frozen units, on the rank that holds the most."""
        held: dict[int, int] = {}
        for unit in self.exact:
            for rank in {rank for ranks in self.homes[unit].copies for rank in ranks}:
                held[rank] = held.get(rank, 0) + self.homes[unit].shard_size * self.master_dtype.itemsize
        return max(held.values(), default=0)

    def is_first_copy(self, unit: int) -> bool:
        """Return True if this rank's shard belongs to the first copy of the unit. Only the first copy is saved."""
        return self.rank in self.homes[unit].ranks

    def refresh(self, unit: int) -> None:
        """Copy the master weights of a unit into its compute copy, unless both are one tensor."""
        if self.compute_copy[unit] is not self.master[unit]:
            self.compute_copy[unit].copy_(self.master[unit])

    @torch.no_grad()
    def checksums(self) -> Iterator[tuple[int, str]]:
        """Yield each unit with a home here and a checksum of its master, or ``stale`` if the compute copy differs."""
        for unit, master in self.master.items():
            if self.compute_copy[unit] is not master and not torch.equal(
                self.compute_copy[unit], master.to(self.compute_copy[unit])
            ):
                yield unit, "stale"
            else:
                yield unit, f"{zlib.crc32(master.cpu().contiguous().view(torch.uint8).numpy().data):08x}"

    @torch.no_grad()
    def fill(self, source: WeightSource, world: dist.ProcessGroup | None, world_size: int) -> None:
        """Fill every home with its initial values. Call on all ranks.

        One rank reads or initialises a unit and sends the shards. The ranks take turns by block, which shares the work,
        and no process ever holds more than a few units. Meanwhile each rank reads its next unit in a thread, so all
        ranks read at one time.

        Args:
            source: Values of the units.
            world: Group of all ranks for CPU tensors; None in a single process.
            world_size: Number of ranks.
        """
        to_read = iter([unit for unit in self.units if unit.blocks[0] % world_size == self.rank])
        with ThreadPoolExecutor(1, "reading weights", use_device, (self.device,)) as reader:
            read_next = lambda: [reader.submit(self._read, source, unit) for unit in islice(to_read, 1)]  # noqa: E731
            pending = read_next()
            for unit, home in zip(self.units, self.homes, strict=True):
                root = unit.blocks[0] % world_size
                if self.rank == root:
                    flat = pending.pop().result()
                    pending = read_next()
                    works = []
                    for ranks in home.copies:
                        for shard, rank in zip(flat.view(-1, home.shard_size), ranks, strict=True):
                            if rank == self.rank:
                                self._put(unit.index, shard)
                            else:
                                works.append(dist.isend(shard, rank, group=world))
                    for work in works:
                        assert work is not None
                        work.wait()
                elif home.index(self.rank) is not None:
                    shard = torch.empty(home.shard_size, dtype=self._dtype_of(unit), device="cpu")
                    dist.recv(shard, root, group=world)
                    self._put(unit.index, shard)
        self.settle(world)

    def _dtype_of(self, unit: Unit) -> torch.dtype:
        """Return the dtype in which a unit is read and collected: the master dtype, or the dtype of packed bytes."""
        return self.master_dtype if unit.packing is None else self.compute_dtype

    @torch.no_grad()
    def _read(self, source: WeightSource, unit: Unit) -> Tensor:
        """Read a unit from ``source`` into a padded CPU tensor, packed if the unit is packed."""
        flat = torch.zeros(self.homes[unit.index].padded, dtype=self._dtype_of(unit), device="cpu")
        values = source.unit(unit, dtype=self.master_dtype)
        if unit.packing is None:
            flat[: unit.numel] = values
        else:
            unit.packing.pack(values, flat, getattr(source, "published", None))
        return flat

    def _put(self, unit: int, shard: Tensor) -> None:
        """Copy a shard into the master and the compute copy of a unit's home on this rank.

        If the master's dtype would round the values, ``widen`` first makes a master in CPU memory that holds them
        exactly."""
        if not self._is_packed(unit) and not torch.equal(shard.to(self.master[unit].dtype).to(shard.dtype), shard):
            self.widen(unit)
        self.master[unit].copy_(shard)
        self.refresh(unit)

    @torch.no_grad()
    def collect(
        self, unit: Unit, world: dist.ProcessGroup | None, *, to: int = 0, gradient: bool = False
    ) -> Tensor | None:
        """Gather the whole unit (``numel`` elements, master dtype, CPU) on rank ``to``; return None on other ranks.

        Call on all ranks. A packed unit is unpacked into the numbers that blocks compute with.

        Args:
            unit: Unit to gather.
            world: Group of all ranks for CPU tensors; None in a single process.
            to: Rank that receives the unit.
            gradient: Gather the home gradient instead of the weights.
        """
        home = self.homes[unit.index]
        index = home.ranks.index(self.rank) if self.rank in home.ranks else None
        held = self.gradient if gradient else self.master
        dtype = self._dtype_of(unit)
        local_shard = None if index is None else held[unit.index].to("cpu", dtype)
        if gradient and local_shard is not None and unit.index in self.scales:
            local_shard = local_shard * self.scales[unit.index].cpu()
        if self.rank != to:
            if local_shard is not None:
                dist.send(local_shard, to, group=world)
            return None
        flat = torch.empty(home.padded, dtype=dtype, device="cpu")
        for shard, rank in zip(flat.view(-1, home.shard_size), home.ranks, strict=True):
            if rank == self.rank:
                assert local_shard is not None
                shard.copy_(local_shard)
            else:
                dist.recv(shard, rank, group=world)
        if unit.packing is None:
            return flat[: unit.numel]
        values = torch.empty(unit.numel, dtype=self.master_dtype, device="cpu")
        unit.packing.unpack(flat, values)
        return values
