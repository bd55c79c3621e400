"""The schedules of one pipeline: built for a number of micro-batches, proved once, and kept."""

from __future__ import annotations

import logging
import threading

import torch

from tawpipe.dealing.balance import BinsForm
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
from tawpipe.schedule.strategies.build import build, shares_of, step_of, step_of_bins
from tawpipe.schedule.strategies.table import strategy_of
from tawpipe.schedule.transform import for_one_thread

logger = logging.getLogger(__name__)
VERIFIED_ACTIONS = 200_000
"""Schedules up to this many actions over all ranks are proved before they run; larger ones are of the same shape."""
CUT_KEPT = 32
"""Schedules of steps whose documents are cut that are kept: these are of many forms."""


class Schedules:
    """What a pipeline was given as its schedule, for every batch.

    Args:
        given: settings, the name of a strategy, a strategy, or a ready schedule for batches of as many micro-batches.

    Raises:
        UserError: a setting that cannot work, or a schedule for something else.
    """

    def __init__(self, given: ScheduleSettings | Strategy | Schedule | str, model: ModelSpec, world: World) -> None:
        self._ready = given if isinstance(given, Schedule) else None
        self._strategy, self.settings = strategy_of(given)
        self._model, self._world = model, world
        self._lock = threading.Lock()
        self._kept: dict[tuple[int | BinsForm, bool], Schedule] = {}
        self._replaced: list[Schedule | None] = []
        """Schedules that are known by their identity as long as steps may use them."""
        count = world.size
        while not all(self.shares(count)):  # a slow one has none of so few
            count *= 2
        self.smallest = self.step(count)
        """A step in which every rank has a micro-batch: all schedules share its homes."""
        ready = self._ready
        if ready is not None and (ready.model, ready.topology) != (model, self.smallest.topology):
            raise UserError("schedule", f"one for {ready.topology}", f"one for this model on {world.nodes}")
        if ready is not None and not ready.training:
            raise UserError("schedule", "one that only goes forward", "one of a training step")

    def shares(self, count: int) -> tuple[tuple[int, ...], ...]:
        """The micro-batches of every rank, of so many."""
        return shares_of(count, self._world.topology, self.settings, self._strategy)

    def step(self, count: int) -> StepSpec:
        """A step of so many micro-batches."""
        shares = self.shares(count)
        return step_of(self._model, self._world.topology, self.settings, shares, strategy=self._strategy)

    def samples(self) -> list[Schedule]:
        """Schedules that use every group and operation that any will use: of training, and forward only."""
        return [self._ready or build(self.smallest), build(self.smallest, training=False)]

    def of_bins(self, form: BinsForm) -> StepSpec:
        """A step of documents that were dealt, by ``Bins.form``.

        Raises:
            UserError: a ready schedule was given, which is for batches of rows.
        """
        if self._ready is not None:
            expected = "settings or a strategy where documents are dealt: their steps are not all of one shape"
            raise UserError("schedule", "a ready one", expected)
        return step_of_bins(self._model, self._world.topology, self.settings, form, strategy=self._strategy)

    def of(self, count: int | BinsForm, *, training: bool) -> Schedule:
        """The schedule for so many micro-batches, or for the form of bins. Any thread may call it."""
        with self._lock:
            if (count, training) not in self._kept:
                schedule = for_one_thread(self._build(count, training=training))
                if sum(map(len, schedule.programs)) <= VERIFIED_ACTIONS:
                    verify(schedule, steps=2 if training else 1, one_thread=True)
                elif self._world.rank == 0:
                    logger.warning("a schedule of more than %d actions is not proved before it runs", VERIFIED_ACTIONS)
                cut = [kept for kept in self._kept if isinstance(kept[0], BinsForm) and kept[0].slices]
                if len(cut) >= CUT_KEPT:
                    del self._kept[cut[0]]
                self._kept[count, training] = schedule
            return self._kept[count, training]

    def reorder(self, count: int, order: Order) -> None:
        """Put a schedule of the same pipeline in another order in the place of that for so many micro-batches."""
        step = self.step(count)
        schedule = for_one_thread(step.strategy.build_in_order(step, order))
        if sum(map(len, schedule.programs)) <= VERIFIED_ACTIONS:
            verify(schedule, steps=2, one_thread=True)
        with self._lock:
            self._replaced.append(self._kept.get((count, True)))
            self._kept[count, True] = schedule

    def _build(self, count: int | BinsForm, *, training: bool) -> Schedule:
        if isinstance(count, tuple):
            return build(self.of_bins(count), training=training)
        if self._ready is None or not training:
            return build(self.step(count), training=training)
        if len(self._ready.micro_batches) != count:
            expected = f"{len(self._ready.micro_batches)} micro-batches, as the schedule that was given has"
            raise UserError("batch", f"{count} micro-batches", expected)
        return self._ready

    def kept_per_token(self, chain: Chain, dtype: torch.dtype) -> dict[str, int]:
        """Bytes that a layer keeps for every token, by kind; nothing where every layer recomputes everything.

        Raises:
            UserError: attention's results are to be kept, and no kernel computes them.
        """
        wanted = {self.smallest.recomputes(block) for block in range(len(self._model.blocks))} - {"full"}
        splits = Kind.LINEAR in self.smallest.kept
        linear: dict[str, int] = {Kind.LINEAR: kept_for_weights_per_token(chain)} if splits else {}
        if not wanted and not self.settings.keep_mib:
            return linear
        if chunk := self.settings.sequence_chunk:  # attention's output and a sum for every head, or states at borders
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
