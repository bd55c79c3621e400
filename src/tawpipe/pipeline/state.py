"""The state that training leads to: weights, optimizer state and step number; saved, loaded, exported, read by name."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tawpipe.checkpoint.format import state_pieces
from tawpipe.checkpoint.load import Source, load_state
from tawpipe.checkpoint.names import step_name
from tawpipe.checkpoint.save import Saving, stage
from tawpipe.checkpoint.store import Disk, Store
from tawpipe.errors import RunError, UserError
from tawpipe.model.quantized import NONE
from tawpipe.pipeline.parameters import Parameters
from tawpipe.pipeline.results import Results
from tawpipe.pipeline.wiring import Wiring
from tawpipe.runtime.faults import Injector
from tawpipe.runtime.world import World


class State:
    """A pipeline's state. Call every method on all ranks; what reads or replaces it drains first.

    Args:
        world_of_saves: the processes, with a group that only saves use.
    """

    def __init__(self, wiring: Wiring, results: Results, world_of_saves: World) -> None:
        self._wiring, self._results = wiring, results
        self.step_number = 0
        self.savings: list[Saving] = []
        """Those that may be under way."""
        self.parameters = Parameters(wiring.storage, wiring.world)
        self._world_of_saves = world_of_saves
        self._whole = True
        self._generation = 0  # changes whenever weights may have

    def stepped(self) -> None:
        """A training step has been issued."""
        self.step_number += 1
        self._generation += 1

    def require_whole(self) -> None:
        """Raises RunError where a load broke off in the middle."""
        if not self._whole:
            raise RunError("a load broke off: this pipeline holds half of a state until one succeeds")

    def start_saving(
        self,
        where: str | Path | Store,
        run: Mapping[str, Any],
        injector: Injector | None,
        limit_s: float | None,
        *,
        copy_frozen: bool,
    ) -> Saving:
        """See ``Pipeline.start_saving``."""
        begin = time.perf_counter()
        self.require_whole()
        self._results.drain()
        storage, optimizers = self._wiring.storage, self._wiring.optimizers
        if isinstance(where, str | Path):
            store, name = Disk(Path(where).parent, self._wiring.world, injector=injector), Path(where).name
        else:
            store, name = where, step_name(self.step_number)
        world = store.group or self._world_of_saves
        for saving in self.savings:
            if saving.world is world:
                saving.join(limit_s)
        self.savings[:] = [saving for saving in self.savings if not saving.done]
        live, frozen = storage.in_host, {} if copy_frozen else dict(storage.digests)
        pieces = stage(list(state_pieces(storage, optimizers, saving=True, without=frozen)), live=live)
        content = {
            "parameters": {slot.name: list(slot.shape) for unit in storage.units for slot in unit.slots},
            "step": self.step_number,
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

    def load(self, where: str | Path | Source) -> dict[str, Any]:
        """See ``Pipeline.load``."""
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
        self._results.forget()
        self.step_number = manifest["step"]
        wiring.executor.forgive()
        return manifest["run"]

    def parameter(self, name: str, *, gradient: bool = False) -> Tensor | None:
        """A whole parameter, or its gradient, on rank 0."""
        self.parameters.check(name, gradient=gradient)
        self._results.drain()
        return self.parameters.collect(name, self._generation, gradient=gradient)

    def join_saves(self) -> None:
        """Wait for what is still being written."""
        for saving in self.savings:
            saving.join()

    def leave(self) -> None:
        """Drop the group of saves."""
        self._world_of_saves.drop_group(self._wiring.world)
