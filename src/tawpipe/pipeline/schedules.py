"""Schedules of one pipeline: each is built for a number of micro-batches, proved once, and kept."""

from __future__ import annotations

import logging
import threading

import torch

from tawpipe.dealing.balance import PacksForm
from tawpipe.errors import UserError
from tawpipe.model.chain import Chain
from tawpipe.model.flops import attention_width
from tawpipe.model.shapes import num_heads
from tawpipe.runtime.compute.recompute import kept_for_weights_per_token, kept_per_token
from tawpipe.runtime.world import World
from tawpipe.schedule.buffers import Kind
from tawpipe.schedule.pipelines.work import Order
from tawpipe.schedule.proof.verify import verify
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.spec import ModelSpec
from tawpipe.schedule.step import Schedule, StepSpec, Strategy
from tawpipe.schedule.strategies.build import build, shares_of, step_of, step_of_packs
from tawpipe.schedule.strategies.table import strategy_of
from tawpipe.schedule.transform import for_one_thread

logger = logging.getLogger(__name__)
VERIFIED_ACTIONS = 200_000
"""Schedules with up to this many actions over all ranks are proved before they run. Larger ones have the same
structure."""
CUT_KEPT = 32
"""Number of schedules with document slices that are kept; their steps have many different forms."""


class Schedules:
    """Schedules of a pipeline for batches of any size.

    Args:
        schedule: schedule settings, the name of a strategy, a strategy, or a ready schedule. A ready schedule fits only
            batches with its number of micro-batches.
        model: the model's units and blocks.
        world: all processes.

    Raises:
        UserError: a setting is impossible, or the ready schedule is for another model, topology or purpose.
    """

    def __init__(self, schedule: ScheduleSettings | Strategy | Schedule | str, model: ModelSpec, world: World) -> None:
        self._ready = schedule if isinstance(schedule, Schedule) else None
        self._strategy, self.settings = strategy_of(schedule)
        self._model, self._world = model, world
        self._lock = threading.Lock()
        self._kept: dict[tuple[int | PacksForm, bool], Schedule] = {}
        self._replaced: list[Schedule | None] = []
        """Schedules replaced by ``reorder``, kept because running steps may still identify them by ``id``."""
        count = world.size
        while not all(self.shares(count)):  # a slow rank has no micro-batch if there are few
            count *= 2
        self.smallest = self.step(count)
        """A step in which every rank has a micro-batch. All schedules share its homes."""
        ready = self._ready
        if ready is not None and (ready.model, ready.topology) != (model, self.smallest.topology):
            raise UserError("schedule", f"one for {ready.topology}", f"one for this model on {world.nodes}")
        if ready is not None and not ready.training:
            raise UserError("schedule", "one that only goes forward", "one of a training step")

    def shares(self, count: int) -> tuple[tuple[int, ...], ...]:
        """Return the micro-batch indices of every rank for a step of ``count`` micro-batches."""
        return shares_of(count, self._world.topology, self.settings, self._strategy)

    def step(self, count: int) -> StepSpec:
        """Return the specification of a step of ``count`` micro-batches."""
        shares = self.shares(count)
        return step_of(self._model, self._world.topology, self.settings, shares, strategy=self._strategy)

    def samples(self) -> list[Schedule]:
        """Return a training and a forward-only schedule that use every process group and operation of all schedules."""
        return [self._ready or build(self.smallest), build(self.smallest, training=False)]

    def of_packs(self, form: PacksForm) -> StepSpec:
        """Return the specification of a step on packed micro-batches of the form ``form`` (``Bins.form``).

        Raises:
            UserError: the pipeline was given a ready schedule, which fits only rows.
        """
        if self._ready is not None:
            expected = "settings or a strategy where documents are dealt: their steps are not all of one shape"
            raise UserError("schedule", "a ready one", expected)
        return step_of_packs(self._model, self._world.topology, self.settings, form, strategy=self._strategy)

    def of(self, count: int | PacksForm, *, training: bool) -> Schedule:
        """Return the schedule for ``count`` micro-batches, or for a ``Bins.form``; thread-safe.

        The first call for a form builds the schedule, proves it (up to ``VERIFIED_ACTIONS`` actions) and keeps it.

        Args:
            count: number of micro-batches, or the form of packed micro-batches.
            training: False for a schedule of forward passes only.
        """
        with self._lock:
            if (count, training) not in self._kept:
                schedule = for_one_thread(self._build(count, training=training))
                if sum(map(len, schedule.programs)) <= VERIFIED_ACTIONS:
                    verify(schedule, steps=2 if training else 1, one_thread=True)
                elif self._world.rank == 0:
                    logger.warning("a schedule of more than %d actions is not proved before it runs", VERIFIED_ACTIONS)
                cut = [kept for kept in self._kept if isinstance(kept[0], PacksForm) and kept[0].slices]
                if len(cut) >= CUT_KEPT:
                    del self._kept[cut[0]]
                self._kept[count, training] = schedule
            return self._kept[count, training]

    def reorder(self, count: int, order: Order) -> None:
        """Replace the training schedule for ``count`` micro-batches by one in which the pipeline runs in ``order``.

        Homes stay where they are. The new schedule is proved first if it has up to ``VERIFIED_ACTIONS`` actions. The
        old one is kept in memory, because running steps may still use it.

        Raises:
            UserError: the strategy moves weights instead of activations, so it has no order.
            ScheduleError: ``order`` does not belong to this pipeline.
        """
        step = self.step(count)
        schedule = for_one_thread(step.strategy.build_in_order(step, order))
        if sum(map(len, schedule.programs)) <= VERIFIED_ACTIONS:
            verify(schedule, steps=2, one_thread=True)
        with self._lock:
            self._replaced.append(self._kept.get((count, True)))
            self._kept[count, True] = schedule

    def _build(self, count: int | PacksForm, *, training: bool) -> Schedule:
        """Build the schedule for ``count``; for training on rows, return the ready schedule if one was given.

        Raises:
            UserError: a ready schedule was given, and it is for another number of micro-batches.
        """
        if isinstance(count, tuple):
            return build(self.of_packs(count), training=training)
        if self._ready is None or not training:
            return build(self.step(count), training=training)
        if len(self._ready.micro_batches) != count:
            expected = f"{len(self._ready.micro_batches)} micro-batches, as the schedule that was given has"
            raise UserError("batch", f"{count} micro-batches", expected)
        return self._ready

    def kept_per_token(self, chain: Chain, dtype: torch.dtype) -> dict[str, int]:
        """Return the bytes per token that a layer keeps for its backward pass in addition to its input, by kind.

        Returns an empty mapping if every layer recomputes everything.

        Raises:
            UserError: settings ask to keep results of attention, but no kernel of this model computes one that can be
                kept.
        """
        wanted = {self.smallest.recomputes(block) for block in range(len(self._model.blocks))} - {"full"}
        splits = Kind.LINEAR in self.smallest.kept
        linear: dict[str, int] = {Kind.LINEAR: kept_for_weights_per_token(chain)} if splits else {}
        if not wanted and not self.settings.keep_mib:
            return linear
        if chunk := self.settings.sequence_chunk:  # attention output and one sum per head, or states
            config = chain.config.get_text_config()
            attention = attention_width(config) * dtype.itemsize + num_heads(config) * max(4, dtype.itemsize)
            return {"kept": max(attention, -(-chain.state_bytes // chunk))}
        try:
            per_token = kept_per_token(chain)
        except UserError as error:
            if wanted:
                raise
            logger.warning("schedule.keep_mib keeps nothing: %s", error.expected)
            return linear
        if "selective" in wanted and not per_token["attention"]:
            expected = f"full or none: {chain.name} computes attention by no kernel whose result could be kept"
            raise UserError("schedule.recompute", "selective", expected)
        return {**per_token, **linear}
