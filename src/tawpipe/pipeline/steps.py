"""Steps issued to the executor: which schedule, and what goes with the micro-batches."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from math import ceil, log2

import torch

from tawpipe.dealing.balance import BinsForm
from tawpipe.errors import UserError
from tawpipe.pipeline.batches import LocalBatch
from tawpipe.pipeline.costs import StepCosts
from tawpipe.pipeline.limits import Limits
from tawpipe.pipeline.local_rows import LocalRows
from tawpipe.pipeline.wiring import Wiring
from tawpipe.runtime.compute.measures import Measure
from tawpipe.runtime.compute.moves import make_places
from tawpipe.runtime.compute.step_input import StepInput
from tawpipe.runtime.homes.home_actions import UpdateRule
from tawpipe.runtime.homes.step_result import StepResult
from tawpipe.runtime.watch.recording import Recording
from tawpipe.runtime.watch.stalls import BEGINNING
from tawpipe.runtime.watch.watchdog import LastEvents
from tawpipe.schedule.step import Schedule


class Steps:
    """Issues a pipeline's steps."""

    def __init__(self, wiring: Wiring, rows: LocalRows, costs: StepCosts, limits: Limits) -> None:
        self._wiring, self._rows, self._costs, self._limits = wiring, rows, costs, limits
        self._adopted: set[int] = set()
        """Schedules, which are all kept, whose buffers are there."""
        self._training: bool | None = None
        self._agreed: set[int] = set()
        """Numbers of micro-batches of which all ranks know that the others have them, too."""

    def schedule(self, count: int | BinsForm, *, training: bool = True) -> Schedule:
        """The schedule for so many micro-batches, or for the form of bins, with its buffers there."""
        schedule = self._wiring.schedules.of(count, training=training)
        if id(schedule) not in self._adopted or schedule.step.slices:  # those are not all kept
            self._adopted.add(id(schedule))
            executor = self._wiring.executor
            if executor.injector is not None and training:
                executor.injector.check(schedule, self._wiring.world.rank)
            executor.adopt(schedule)
        return schedule

    def play(
        self,
        local: LocalBatch,
        number: int,
        rule: UpdateRule,
        *,
        seed: int | None,
        recording: Recording | None = None,
        measure: Measure | None = None,
    ) -> StepResult:
        """Issue one step; it still runs when this returns.

        Args:
            number: of the step.
            rule: what all parameter groups have in common.
            seed: of random numbers; None for an evaluation.
        """
        training = seed is not None
        wiring, rank, topology = self._wiring, self._wiring.world.rank, self._wiring.world.topology
        self._set_training(training)
        wiring.chain.check_frozen()
        if torch.is_autocast_enabled(device := wiring.world.device.type):
            raise UserError("torch.autocast", f"enabled for {device}", "Pipeline(dtype=...): blocks compute in that")
        form = self._rows.form(local)
        if isinstance(form, int):
            self._agree(form)
        schedule = self.schedule(form, training=training)
        if training and not self._limits.step.known_s:
            self._limits.estimate(local, self._costs.of(schedule, self._rows.tokens(local)))
        chosen = wiring.optimizers.groups.chosen()  # as they are now: the step itself runs later
        micro_batches = self._rows.deal.numbered(local, schedule.step.micro_batches[rank])
        slices = self._rows.slices(local, schedule.step.micro_batches[rank])
        counted = schedule.step.losses_of(rank) if schedule.step.losses else None
        if counted is not None:  # of a document that is cut, what its first slice is given
            counted = [m for m in counted if m not in slices or not slices[m].begin]
        given = StepInput(
            micro_batches,
            scale=2.0 ** -ceil(log2(local.rows * local.sequence_length)),
            seed=seed,
            step=number,
            digest=zlib.crc32(struct.pack("d", rule.rate) + repr(chosen).encode(), local.digest or 0) % 2**20,
            measure=measure,
            place=topology.local_of(rank) % wiring.sequence_ranks,
            shared=schedule.step.shared,
            counted=counted,
            slices=slices,
            kept=self._costs.layers_kept(schedule, micro_batches) if training else {},
        )
        if schedule.step.settings.offloaded_layers:
            tokens = self._rows.bin_tokens if local.bins else 0
            make_places(wiring.compute, schedule.programs[rank], given, wiring.dtype, tokens)
        return wiring.executor.play(schedule, given, replace(rule, chosen=chosen), recording=recording)

    def _agree(self, count: int) -> None:
        """Ask whether all ranks have so many micro-batches, the first time: others would wait for what never comes.

        Raises:
            UserError: they have not.
        """
        if count in self._agreed:
            return
        self._wiring.executor.watchdog.watch(BEGINNING, come := LastEvents({}))
        try:
            self._wiring.world.wait_patiently()  # for ranks that come later: how long they may take, the watchdog knows
            everyone = self._wiring.world.gather_numbers(float(count))
        finally:
            come.issued = True
        if len({*everyone}) > 1:
            numbers = ", ".join(f"{each:.0f}" for each in everyone)
            given = f"global batches of different sizes on different ranks: {numbers} micro-batches"
            raise UserError("batch", given, "the same global batch on all ranks, each of which computes its own part")
        self._agreed.add(count)

    def _set_training(self, mode: bool) -> None:
        # It walks over all modules; but the model may have been switched by the caller's model.eval().
        if mode != self._training or mode != self._wiring.chain.model.training:
            self._wiring.chain.set_training(mode)
            self._training = mode
