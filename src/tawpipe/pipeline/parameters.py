"""Whole parameters of a model whose homes are spread: collected by name, and compared between copies."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from torch import Tensor

from tawpipe.errors import RunError, UserError
from tawpipe.model.units import ParameterSlot, Unit
from tawpipe.runtime.storage import Storage
from tawpipe.runtime.world import World


class Parameters:
    """The parameters by name. Call every method on all ranks, with nothing under way."""

    def __init__(self, storage: Storage, world: World) -> None:
        self._storage, self._world = storage, world
        self._collected: tuple[tuple[int, bool, int], Tensor | None] | None = None
        """(unit, gradient or not, generation) and the whole unit that was collected last."""

    @cached_property
    def _slots(self) -> dict[str, tuple[Unit, ParameterSlot]]:
        return {slot.name: (unit, slot) for unit in self._storage.units for slot in unit.slots}

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order of their units."""
        return tuple(self._slots)

    def check(self, name: str, *, gradient: bool) -> None:
        """Refuse what cannot be collected.

        Raises:
            UserError: no such parameter, or the gradient of one that is frozen.
        """
        if name not in self._slots:
            raise UserError("parameter", name, "one of Pipeline.parameter_names")
        if gradient and not self._slots[name][0].trainable:
            raise UserError("gradient", name, "the name of a parameter that is trained; this one is frozen")
        if gradient and not self._storage.keeps_gradient(self._slots[name][0].index):
            expected = "homes on the device, or no early_updates: a gradient that is used where it is made is not kept"
            raise UserError("gradient", name, expected)

    def collect(self, name: str, generation: int, *, gradient: bool = False) -> Tensor | None:
        """A whole parameter, or its gradient, on rank 0, None elsewhere.

        Args:
            generation: a number that changes whenever weights may have.
        """
        unit, slot = self._slots[name]
        key = (unit.index, gradient, generation)
        if self._collected is None or self._collected[0] != key:  # parameters of a unit are asked for one after another
            self._collected = None
            self._collected = (key, self._storage.collect(unit, self._world.group, gradient=gradient))
        flat = self._collected[1]
        # A copy: the caller may change it, and the unit is kept for the next name.
        return None if flat is None else slot.view(flat).clone()

    def check_copies(self, kept: Iterable[tuple[int, int, str]] = ()) -> None:
        """Compare the copies of every home, and what travels of it with its master; and copies that nodes keep.

        Args:
            kept: of those the first rank of a group, the unit and a checksum, see ``Refresh.checksums``.

        Raises:
            RunError: something is not alike; on all ranks.
        """
        texts = self._world.gather_texts("\n".join(f"{first} {unit} {value}" for first, unit, value in kept))
        alike: dict[str, tuple[int, str]] = {}
        for rank, text in enumerate(texts):
            for name, value in (line.rsplit(" ", 1) for line in filter(None, text.split("\n"))):
                first, expected = alike.setdefault(name, (rank, value))
                if value != expected:
                    unit = name.split()[1]
                    raise RunError(f"unit {unit}: what rank {first} and rank {rank} keep of its weights differs")
        sums = self._world.gather_texts("\n".join(f"{unit} {value}" for unit, value in self._storage.checksums()))
        known: dict[tuple[str, int], tuple[int, str]] = {}
        for rank, text in enumerate(sums):
            for line in filter(None, text.split("\n")):
                unit, value = line.split()
                index = self._storage.homes[int(unit)].index(rank)
                assert index is not None
                first, expected = known.setdefault((unit, index), (rank, value))
                if value == "stale":
                    raise RunError(f"rank {rank}: what travels of unit {unit} is not what its home holds")
                if value != expected:
                    raise RunError(f"unit {unit}: the copies on rank {first} and rank {rank} differ")
