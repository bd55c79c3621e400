"""A state's parameters read from its files one at a time, without a pipeline: for an export on one process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tawpipe.checkpoint.format import damage, read_manifest, saved_dtype
from tawpipe.checkpoint.load import check_same_model, open_file
from tawpipe.errors import UserError
from tawpipe.model.units import Unit


class SavedParameters:
    """The parameters in the folder of a state. A context: its files are open in it.

    Args:
        folder: of the state, all of whose files are read once, to see that they are sound.
        units: of the model, in the form in which it was trained (``Chain.quantise``).
        dtype: of parameters that are given.

    Raises:
        UserError: it is not sound, or of another model.
    """

    def __init__(self, folder: Path, units: Sequence[Unit], dtype: torch.dtype) -> None:
        self._folder, self._dtype, self._manifest = folder, dtype, read_manifest(folder)
        self._units = {slot.name: unit for unit in units for slot in unit.slots}
        shapes = {slot.name: list(slot.shape) for unit in units for slot in unit.slots}
        check_same_model(str(folder), self._manifest["parameters"], shapes)
        if problem := damage(folder, self._manifest, range(len(self._manifest["files"]))):
            raise UserError("where", str(folder), f"a sound checkpoint ({problem})")
        self._files: dict[int, Any] = {}
        self._stack = ExitStack()
        self._unpacked: tuple[int, Tensor] | None = None

    def __enter__(self) -> SavedParameters:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._stack.close()

    def parameter(self, name: str) -> Tensor:
        """A whole parameter; of one that was kept in 4 or 8 bits, the numbers that blocks computed with."""
        unit = self._units[name]
        slot = next(slot for slot in unit.slots if slot.name == name)
        if unit.packing is None:
            return self._flat(name).view(slot.shape).to(self._dtype)
        if self._unpacked is None or self._unpacked[0] != unit.index:  # its parameters are asked for one after another
            packing, values = unit.packing, torch.empty(unit.numel, dtype=self._dtype)
            packed = torch.zeros(packing.elements, dtype=packing.compute_dtype)
            for part, place in zip(packing.slots, packing.places, strict=True):
                packed.view(torch.uint8)[place.begin : place.end] = self._flat(part.name)
            packing.unpack(packed, values)
            self._unpacked = unit.index, values
        return slot.view(self._unpacked[1]).clone()

    def _flat(self, name: str) -> Tensor:
        """A tensor of the state, all chunks of it, end to end."""
        key = f"model.{name}"
        tensor = self._manifest["tensors"][key]
        flat = torch.empty(tensor["numel"], dtype=saved_dtype(self._manifest, key, self._dtype))
        for start, count, number in tensor["chunks"]:
            if number not in self._files:
                self._files[number] = self._stack.enter_context(open_file(self._folder, self._manifest, number))
            flat[start : start + count] = self._files[number].get_tensor(f"{key}@{start}")
        return flat
