"""The state of training: weights and optimizer state, saved, loaded and read by name."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from tawpipe.checkpoint.format import Manifest, state_pieces
from tawpipe.checkpoint.load import Source, load_state
from tawpipe.checkpoint.names import step_name
from tawpipe.checkpoint.save import Saving, stage
from tawpipe.checkpoint.store import Disk, Store
from tawpipe.errors import RunError, UserError
from tawpipe.model.bits.quantized import NONE
from tawpipe.model.units import ParameterSlot, Unit
from tawpipe.pipeline.setup import Wiring
from tawpipe.pipeline.steps import Steps
from tawpipe.runtime.homes.storage import Storage
from tawpipe.runtime.watch.faults import Injector
from tawpipe.runtime.world import World


class State:
    """A pipeline's state. Call every method on all ranks; what reads or replaces it drains first.

    Args:
        world_of_saves: the processes, with a group that only saves use.
    """

    def __init__(self, wiring: Wiring, steps: Steps, world_of_saves: World) -> None:
        self._wiring, self._steps = wiring, steps
        self.savings: list[Saving] = []
        """Those that may be under way."""
        self.parameters = Parameters(wiring.storage, wiring.world)
        self._world_of_saves = world_of_saves
        self._whole = True
        self._generation = 0  # changes whenever weights may have

    def stepped(self) -> None:
        """Record that a training step was issued."""
        self._generation += 1

    def require_whole(self) -> None:
        """Raise RunError if a load broke off in the middle."""
        if not self._whole:
            raise RunError("a load broke off: this pipeline holds half of a state until one succeeds")

    def start_saving(
        self,
        where: str | Path | Store,
        step: int,
        run: Mapping[str, Any],
        injector: Injector | None,
        limit_s: float | None,
        *,
        copy_frozen: bool,
    ) -> Saving:
        """See ``Pipeline.start_saving``."""
        begin = time.perf_counter()
        self.require_whole()
        self._steps.drain()
        storage, optimizers = self._wiring.storage, self._wiring.optimizers
        if isinstance(where, str | Path):
            store, name = Disk(Path(where).parent, self._wiring.world, injector=injector), Path(where).name
        else:
            store, name = where, step_name(step)
        world = store.group or self._world_of_saves
        for saving in self.savings:
            if saving.world is world:
                saving.join(limit_s)
        self.savings[:] = [saving for saving in self.savings if not saving.done]
        live, frozen = storage.in_host, {} if copy_frozen else dict(storage.digests)
        pieces = stage(list(state_pieces(storage, optimizers, saving=True, without=frozen)), live=live)
        content = {
            "parameters": {slot.name: list(slot.shape) for unit in storage.units for slot in unit.slots},
            "step": step,
            "run": dict(run),
            "optimizer": optimizers.name,
            "groups": optimizers.rule or "own",
            "history": store.history,
            **({"quantize": storage.form} if storage.form != NONE else {}),
            **({"frozen": {"folder": storage.folder, "parameters": frozen}} if frozen else {}),
        }
        staged_s = time.perf_counter() - begin
        saving = Saving(store, name, pieces, content=content, world=world, staged_s=staged_s, live=live)
        self.savings.append(saving)  # also if what follows is interrupted: the thread goes on
        if live:
            saving.join(limit_s)
        return saving

    def load(self, where: str | Path | Source) -> Manifest:
        """Return the manifest of the state that was loaded, see ``Pipeline.load``."""
        wiring = self._wiring
        wiring.executor.drain()
        whole, self._whole = self._whole, False
        try:
            source = where if isinstance(where, Source) else Path(where)
            manifest = load_state(source, wiring.storage, wiring.optimizers, wiring.world)
        except UserError:
            self._whole = whole  # it has changed nothing
            raise
        finally:
            self._generation += 1
            wiring.chain.forget()
            wiring.executor.refresh.forget()
        self._whole = True
        self._steps.forget()
        wiring.executor.forgive()
        return manifest

    def parameter(self, name: str, *, gradient: bool = False) -> Tensor | None:
        """A whole parameter, or its gradient, on rank 0."""
        self.parameters.check(name, gradient=gradient)
        self._steps.drain()
        return self.parameters.collect(name, self._generation, gradient=gradient)

    def join_saves(self) -> None:
        """Wait for what is still being written."""
        for saving in self.savings:
            saving.join()

    def leave(self) -> None:
        """Drop the group of saves."""
        self._world_of_saves.drop_group(self._wiring.world)


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
