"""Reader of single parameters of a state, without a pipeline: for an export on one process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tawpipe.checkpoint.format import damage, read_manifest, saved_dtype
from tawpipe.checkpoint.frozen import digests_in, refuse_other_frozen
from tawpipe.checkpoint.load import check_same_model, open_file
from tawpipe.errors import UserError
from tawpipe.model.facts import value_digest
from tawpipe.model.files.pretrained import SafetensorsSource
from tawpipe.model.units import Unit


class SavedParameters:
    """Parameters of a saved state; a context manager whose files stay open inside of it.

    Args:
        folder: folder of the state. All of its files are read once to check them.
        units: units of the model, quantised as it was trained (``Chain.quantise``).
        dtype: dtype of the parameters that are returned.
        base: source of the frozen parameters that the state refers to.

    Raises:
        UserError: the state is damaged, or belongs to another model.
    """

    def __init__(
        self, folder: Path, units: Sequence[Unit], dtype: torch.dtype, base: SafetensorsSource | None = None
    ) -> None:
        self._folder, self._dtype, self._manifest = folder, dtype, read_manifest(folder)
        self._base, self._frozen = base, digests_in(self._manifest)
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
        """Read one whole parameter. Weights kept in 4 or 8 bits are dequantised, as blocks computed with them.

        Raises:
            UserError: ``base`` has other values than the run had.
        """
        unit = self._units[name]
        if name in self._frozen:
            value = self._of_base(name).to(self._dtype)
            return value if unit.packing is None else unit.packing.as_computed(name, value)
        slot = next(slot for slot in unit.slots if slot.name == name)
        if unit.packing is None:
            return self._flat(name).view(slot.shape).to(self._dtype)
        if self._unpacked is None or self._unpacked[0] != unit.index:  # parameters of a unit are read in sequence
            packing, values = unit.packing, torch.empty(unit.numel, dtype=self._dtype)
            packed = torch.zeros(packing.elements, dtype=packing.compute_dtype)
            for part, place in zip(packing.slots, packing.places, strict=True):
                if part.name not in self._frozen:
                    packed.view(torch.uint8)[place.begin : place.end] = self._flat(part.name)
            packing.unpack(packed, values)
            self._unpacked = unit.index, values
        return slot.view(self._unpacked[1]).clone()

    def _of_base(self, name: str) -> Tensor:
        """Return a frozen parameter from ``base``.

        Raises:
            UserError: the digest of the parameter is not the saved one, or there is no ``base``.
        """
        base = self._base
        value = torch.empty(0) if base is None else base.parameter(name)
        if (digest := value_digest(value)) != self._frozen[name]:
            digests = {} if base is None else {each: value_digest(base.parameter(each)) for each in self._frozen}
            folder = "" if base is None else str(base.folder)
            refuse_other_frozen(self._manifest, str(self._folder), digests | {name: digest}, folder)
        return value

    def _flat(self, name: str) -> Tensor:
        """Read all chunks of a saved tensor and return them joined, flat."""
        key = f"model.{name}"
        tensor = self._manifest["tensors"][key]
        flat = torch.empty(tensor["numel"], dtype=saved_dtype(self._manifest, key))
        for start, count, number in tensor["chunks"]:
            if number not in self._files:
                self._files[number] = self._stack.enter_context(open_file(self._folder, self._manifest, number))
            flat[start : start + count] = self._files[number].get_tensor(f"{key}@{start}")
        return flat
