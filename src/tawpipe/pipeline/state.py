"""State of training: weights and optimizer state are saved, loaded and read by parameter name."""

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
    """State of a pipeline. Call every method on all ranks.

    Methods that read or replace the state first wait for all issued steps.

    Args:
        wiring: objects of this rank.
        steps: steps of the pipeline.
        world_of_saves: the processes, with a process group that only saves use.
    """

    def __init__(self, wiring: Wiring, steps: Steps, world_of_saves: World) -> None:
        self._wiring, self._steps = wiring, steps
        self.savings: list[Saving] = []
        """Saves that may still be running."""
        self.parameters = Parameters(wiring.storage, wiring.world)
        self._world_of_saves = world_of_saves
        self._whole = True
        self._generation = 0  # increased whenever weights may have changed

    def stepped(self) -> None:
        """Record that a training step was issued, so that collected parameters are read again."""
        self._generation += 1

    def require_whole(self) -> None:
        """Raise RunError if the last load failed midway and left a partial state."""
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
        """Wait for all steps, copy the state to host memory and start writing it; see ``Pipeline.start_saving``.

        Also waits for a running save that uses the same process group. Homes in host memory are not copied: this method
        then waits until they are written. ``limit_s`` limits both waits, in seconds."""
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
        self.savings.append(saving)  # before `join`, which may be interrupted: the thread continues
        if live:
            saving.join(limit_s)
        return saving

    def load(self, where: str | Path | Source) -> Manifest:
        """Wait for all steps, load a state and return its manifest; see ``Pipeline.load``.

        The results of steps that were issued before are dropped without a check."""
        wiring = self._wiring
        wiring.executor.drain()
        whole, self._whole = self._whole, False
        try:
            source = where if isinstance(where, Source) else Path(where)
            manifest = load_state(source, wiring.storage, wiring.optimizers, wiring.world)
        except UserError:
            self._whole = whole  # a refused load changes nothing
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
        """Return a whole parameter, or its gradient, on rank 0 and None on other ranks; waits for all steps."""
        self.parameters.check(name, gradient=gradient)
        self._steps.drain()
        return self.parameters.collect(name, self._generation, gradient=gradient)

    def join_saves(self) -> None:
        """Wait until all saves have ended; does not report their outcome."""
        for saving in self.savings:
            saving.join()

    def leave(self) -> None:
        """Destroy the process group of saves."""
        self._world_of_saves.drop_group(self._wiring.world)


class Parameters:
    """Access to whole parameters by name. Call every method on all ranks while no step runs."""

    def __init__(self, storage: Storage, world: World) -> None:
        self._storage, self._world = storage, world
        self._collected: tuple[tuple[int, bool, int], Tensor | None] | None = None
        """Key (unit, gradient or not, generation) and value of the unit that was collected last; the value is None
        except on rank 0."""

    @cached_property
    def _slots(self) -> dict[str, tuple[Unit, ParameterSlot]]:
        """Unit and slot of every parameter, by name."""
        return {slot.name: (unit, slot) for unit in self._storage.units for slot in unit.slots}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all parameters, in the order of their units."""
        return tuple(self._slots)

    def check(self, name: str, *, gradient: bool) -> None:
        """Raise UserError if the parameter ``name``, or its gradient, cannot be collected.

        Raises:
            UserError: there is no such parameter; or, with ``gradient``, the parameter is frozen or its gradient is not
                kept.
        """
        if name not in self._slots:
            raise UserError("parameter", name, "one of Pipeline.parameter_names")
        if gradient and not self._slots[name][0].trainable:
            raise UserError("gradient", name, "the name of a parameter that is trained; this one is frozen")
        if gradient and not self._storage.keeps_gradient(self._slots[name][0].index):
            expected = "homes on the device, or no early_updates: a gradient that is used where it is made is not kept"
            raise UserError("gradient", name, expected)

    def collect(self, name: str, generation: int, *, gradient: bool = False) -> Tensor | None:
        """Gather a whole parameter, or its gradient, and return a copy on rank 0 and None on other ranks.

        The unit of the last call is kept, so that its other parameters need no communication.

        Args:
            name: name of the parameter.
            generation: number that changes whenever weights may have changed.
            gradient: return the gradient instead of the parameter.
        """
        unit, slot = self._slots[name]
        key = (unit.index, gradient, generation)
        if self._collected is None or self._collected[0] != key:  # callers read a unit's parameters in sequence
            self._collected = None
            self._collected = (key, self._storage.collect(unit, self._world.group, gradient=gradient))
        flat = self._collected[1]
        # A copy: the caller may change it, and the unit is kept for the next name.
        return None if flat is None else slot.view(flat).clone()

    def check_copies(self, kept: Iterable[tuple[int, int, str]] = ()) -> None:
        """Compare weights that should be equal on several ranks, by their checksums.

        Compares the copies of every home, the weights that a home sends with its masters, and the weights that nodes
        keep from step to step.

        Args:
            kept: (first rank of a group, unit, checksum) for weights that nodes keep; see ``Refresh.checksums``.

        Raises:
            RunError: two copies differ; on all ranks.
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
