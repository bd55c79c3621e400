"""Disk check before the first step: predict the size of checkpoints and exported model, and refuse a full disk."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tawpipe.checkpoint.names import complete_states
from tawpipe.errors import UserError
from tawpipe.model.chain import Chain
from tawpipe.model.files.build import BuiltModel
from tawpipe.model.files.pretrained import stored_dtype
from tawpipe.model.units import Unit
from tawpipe.model.weights import is_adapter
from tawpipe.plan.cost.updates import states_of
from tawpipe.runtime.dtype import master_dtype
from tawpipe.train.exporting import Form
from tawpipe.train.saying.words import gib
from tawpipe.train.settings.config import TrainConfig

if TYPE_CHECKING:
    from tawpipe.runtime.homes.optimizer import OptimizerFactory
    from tawpipe.runtime.world import World


@dataclass(frozen=True)
class DiskNeeds:
    """Bytes that a run will write into its output folder.

    Args:
        state: bytes of a checkpoint.
        states: largest number of new checkpoints that exist at one time.
        model: bytes of the exported model; 0 without an export.
        free: free bytes on the disk.
    """

    state: int
    states: int
    model: int
    free: int

    @property
    def most(self) -> int:
        """Largest number of bytes at any time. No checkpoint is being written while the model is exported."""
        return max(self.state * self.states, self.state * max(0, self.states - 1) + self.model)

    def __str__(self) -> str:
        plural = "s" if self.states > 1 else ""
        parts = [f"{self.states} checkpoint{plural} of {gib(self.state)}"] if self.states else []
        parts += [f"the model of {gib(self.model)}"] if self.model else []
        return f"{' and '.join(parts) or 'nothing large'} ({gib(self.free)} free)"


def disk_needs(config: TrainConfig, built: BuiltModel, chain: Chain, *, state: int, done: int) -> DiskNeeds:
    """Return the bytes that a run will write into its output folder, and the free bytes of the disk.

    Args:
        config: settings of the run.
        built: the model.
        chain: the model as a chain of blocks.
        state: bytes of a checkpoint.
        done: number of steps done before this start; a run with no step left exports no model.
    """
    folder, form = config.output_path.absolute(), Form.of(config, built)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    whole = form.merge or not built.adapter_settings
    slots = [slot for unit in chain.units for slot in unit.slots if whole or unit.trainable]
    model = sum(slot.numel for slot in slots if not (form.merge and ".lora_" in slot.name)) * form.dtype.itemsize
    return DiskNeeds(
        state=state,
        states=checkpoints_at_most(config, done=done, existing=len(complete_states(folder / "checkpoints"))),
        model=model if config.export.enabled and config.steps > done else 0,
        free=shutil.disk_usage(existing).free,
    )


def state_bytes(
    config: TrainConfig, built: BuiltModel, chain: Chain, computed: torch.dtype, optimizer: OptimizerFactory
) -> int:
    """Return the predicted bytes of a checkpoint.

    It contains master weights and optimizer states of trained parameters. It contains frozen parameters in the form in
    which they are held, unless it only refers to a model's folder.

    Args:
        computed: type in which the model computes.
        optimizer: makes the optimizer of every unit.
    """
    master, states = master_dtype(computed), states_of(optimizer, chain.units)
    stored = torch.float32 if built.folder is None else stored_dtype(built.folder)
    exact = master if torch.promote_types(stored, computed) != computed else computed

    def of(unit: Unit) -> float:
        """Return the bytes of ``unit`` in a checkpoint."""
        if unit.trainable:
            return unit.numel * master.itemsize * (1 + (states[unit.index] if isinstance(states, tuple) else states))
        if built.folder is not None and config.checkpoint.frozen == "reference":
            return sum(slot.numel for slot in unit.slots if is_adapter(chain.model, slot.name)) * exact.itemsize
        if unit.packing is not None:
            return unit.packing.elements * computed.itemsize
        return unit.numel * exact.itemsize

    return int(sum(map(of, chain.quantised(config.quantize, computed))))


def checkpoints_at_most(config: TrainConfig, *, done: int, existing: int) -> int:
    """Return the largest number of new checkpoints that exist at one time.

    An old checkpoint is deleted when the new one is complete.

    Args:
        done: number of steps done before this start.
        existing: number of checkpoints that exist already.
    """
    settings, left = config.checkpoint, config.steps - done
    every, evaluated = settings.every, config.evaluation.every if settings.best else 0
    saved = {
        step for n in (every, evaluated) if n for step in (*range(n, config.steps, n), config.steps) if step > done
    }
    come = len(saved)
    if left <= 0 or not come:
        return 0
    if not settings.keep:
        return come
    each = math.lcm(settings.keep_every, every) if settings.keep_every and every else 0
    lasting = config.steps // each - done // each if each else 0
    stay = settings.keep + lasting + bool(evaluated)
    return max(1, min(come, stay + 1 - min(existing, settings.keep)))


def check_disk(config: TrainConfig, needs: DiskNeeds, world: World) -> None:
    """Refuse a run whose disk is too full; call on all ranks, of which rank 0 looks at the disk.

    Raises:
        UserError: there is less space than the run needs; on all ranks.
    """

    def look() -> str:
        """Raise UserError if the disk is too full."""
        if needs.most > needs.free:
            raise UserError(
                "--output",
                config.output,
                (
                    f"a disk with {gib(needs.most)} free: the run writes {needs}. --checkpoint.keep 1, "
                    "--checkpoint.every 0 or --export.enabled false reduce it"
                ),
            )
        return ""

    _ = world.text_of_rank_0(look)
