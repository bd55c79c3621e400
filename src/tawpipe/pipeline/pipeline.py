"""The library's front door: a model, its schedule and its homes as one object.

Usage:

    pipeline = tawpipe.Pipeline(model)  # on every process that torchrun started, or on one
    for batch in batches:  # the global batch, the same on all processes
        print(pipeline.step(batch).loss)
"""

from __future__ import annotations

import logging
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from math import ceil, isfinite, log2
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tawpipe.checkpoint.format import state_pieces
from tawpipe.checkpoint.load import Source, load_state
from tawpipe.checkpoint.names import step_name
from tawpipe.checkpoint.save import Saved, Saving, stage
from tawpipe.checkpoint.store import Disk, Store
from tawpipe.errors import RunError, UserError
from tawpipe.model.batch import MicroBatch
from tawpipe.model.chain import Chain
from tawpipe.model.export import export_hugging_face
from tawpipe.model.flops import chain_flops, windows, work_of
from tawpipe.model.loss import Loss, loss_chunk
from tawpipe.model.quantized import NONE
from tawpipe.model.refuse import settle_mtp
from tawpipe.model.weights import InitSource, ModuleSource, WeightSource
from tawpipe.pipeline.batches import Deal, LocalBatch, Share
from tawpipe.pipeline.bins import rows_of
from tawpipe.pipeline.check import CHOICES, check_on_rank_0, is_tested
from tawpipe.pipeline.costs import step_costs
from tawpipe.pipeline.parameters import Parameters
from tawpipe.pipeline.refuse import refuse_cut_rows, refuse_settings, refuse_strategy
from tawpipe.pipeline.schedules import Schedules
from tawpipe.runtime.compute import Compute, StepInput
from tawpipe.runtime.dtype import AUTO, DTYPES, chosen_dtype, master_dtype, reduce_dtype
from tawpipe.runtime.executor import Executor, StepResult, UpdateRule
from tawpipe.runtime.faults import Injector
from tawpipe.runtime.groups import PipelineOptimizer
from tawpipe.runtime.leaving import leave_at_exit
from tawpipe.runtime.limits import StepLimit, estimate_s
from tawpipe.runtime.measures import AnswersByRow, Measure
from tawpipe.runtime.optimizer import OptimizerFactory, adamw
from tawpipe.runtime.recording import Recording
from tawpipe.runtime.storage import Storage
from tawpipe.runtime.transport import Transport
from tawpipe.runtime.unit_optimizers import UnitOptimizers
from tawpipe.runtime.watchdog import write_record
from tawpipe.runtime.world import World, connect
from tawpipe.schedule.balance import Bins, Work, deal, layers_that_keep
from tawpipe.schedule.footprint import Costs
from tawpipe.schedule.pipelines.strategy import ActivationPipeline
from tawpipe.schedule.pipelines.work import Order
from tawpipe.schedule.pipelines.work import Work as StageWork
from tawpipe.schedule.settings import DEFAULT, ScheduleSettings
from tawpipe.schedule.sharing import share_in_sets
from tawpipe.schedule.step import Schedule, Strategy
from tawpipe.schedule.strategies import strategy_of

logger = logging.getLogger(__name__)


class Pipeline:
    """Trains a Hugging Face causal LM with its weights spread over all processes.

    Args:
        model: a decoder-only ``AutoModelForCausalLM`` (a ``peft`` model around one is fine), with values or on the meta
            device; or the ``Chain`` that was made of one, with its loss. Its parameters are emptied: the values live
            here from now on, and the model refuses to be used.
        weights: makes what gives the initial values, for example ``lambda chain: SafetensorsSource(chain, folder)``; by
            default the model's own values, or for a model on meta a fresh initialisation.
        optimizer: makes an optimizer for a list of parameters, ``lambda parameters: SGD(parameters, lr=1)``. They are
            one-dimensional pieces of the model's parameters; ``tawpipe.piece_of(parameter)`` has name and shape of the
            whole one. ``adamw`` by default. For one that looks at whole matrices (Muon, Adafactor)
            ``tawpipe.whole_matrices(factory)``, under ``tawpipe-whole``.
        loss: instead of cross-entropy: ``(logits [b, c, V], shifted labels [b, c]) -> summed loss`` for some positions.
        micro_batch: rows computed at once.
        bin_tokens: of documents of uneven lengths, the most that a process computes at once (``part_of_documents``).
        work: the time of documents, by which they are dealt; by default their FLOPs.
        schedule: how weights travel: settings; the name of a strategy; a strategy of your own; or a ready ``Schedule``,
            for batches of as many micro-batches as it has.
        dtype: in which weights travel and blocks compute; ``auto`` is bf16 where every device computes in it (GPUs
            from compute capability 8 on), else fp32. Masters, gradients at home and optimizer state are fp32 (fp64 for
            fp64).
        clip_norm: largest global gradient norm; None switches clipping off, but not the check for finite numbers, which
            ``ScheduleSettings.early_updates`` does: what is not finite has then reached the weights when ``step``,
            ``drain`` or ``save`` says so.
        compile_layers: whether layers are compiled by ``torch.compile``, those of one kind once.
        quantize: form in which frozen matrices of layers live and travel, ``nf4`` or ``int8``; they are dequantised
            where a block computes. ``none`` for that of all others.
        seed: of initial weights and of dropout and the like, whose numbers depend on (seed, step, micro-batch, block)
            alone. torch's default generators are left to the caller.
        check: whether a few layers of the model are compared with its own forward pass first: ``always``, ``never``, or
            ``auto``, for models that the tests do not cover (docs/models.md), and where rows run in chunks.
        without_mtp: train and export a model without its multi-token-prediction heads, which are not trained here.
        world: the processes; found from torchrun's variables by default.
        strict: check the sequence number and action of every message.
        timeout: after which a communication fails, or later where steps are known to take long (``limit``).
        delay: makes, for a lane's name, a function that returns seconds to wait before each of its actions; for tests.
        skip_limit: of steps in a row whose loss or gradient norm is not finite and whose update is left out, before
            that is an error; 0 for an error at once.
        injector: makes faults happen; for tests.

    Raises:
        UserError: a model, an optimizer or a setting that cannot work.
    """

    def __init__(
        self,
        model: nn.Module | Chain,
        *,
        weights: Callable[[Chain], WeightSource] | None = None,
        optimizer: OptimizerFactory | None = None,
        loss: Loss | None = None,
        micro_batch: int = 1,
        bin_tokens: int = 0,
        work: Work | None = None,
        schedule: ScheduleSettings | Strategy | Schedule | str = DEFAULT,
        dtype: torch.dtype | str = AUTO,
        clip_norm: float | None = 1.0,
        compile_layers: bool = False,
        quantize: str = NONE,
        seed: int = 0,
        check: str = "auto",
        without_mtp: bool = False,
        world: World | None = None,
        strict: bool = False,
        timeout: timedelta = timedelta(minutes=10),
        delay: Callable[[str], Callable[[], float]] | None = None,
        skip_limit: int = 0,
        injector: Injector | None = None,
    ) -> None:
        if check not in CHOICES:
            raise UserError("check", check, ", ".join(CHOICES))
        _check_settings(micro_batch=micro_batch, dtype=dtype, clip_norm=clip_norm, seed=seed)
        self.world = world or connect(timeout=timeout)
        self.micro_batch, self.clip_norm, self.seed = micro_batch, clip_norm, seed
        self.bin_tokens = bin_tokens
        self.skip_limit, self.skipped, self.injector = skip_limit, 0, injector
        self.without_labels = 0
        """Steps of this pipeline whose labels were all -100 and which were left out, of those whose numbers were looked
        at.
        """
        dtype = dtype if isinstance(dtype, torch.dtype) else DTYPES[chosen_dtype(dtype, self.world)[0]]
        self.limit = StepLimit(timeout.total_seconds())
        """Of the time of a step; until ``set_timeout`` only communication is limited by it."""
        self._watched = False
        self.dtype = dtype
        self.settings = strategy_of(schedule)[1]
        self.sequence_ranks = self.settings.sequence_ranks or 1
        self.reduce_dtype = reduce_dtype(dtype, self.settings)
        refuse_settings(self.settings, clip_norm=clip_norm, compile_layers=compile_layers, quantize=quantize)
        _ = share_in_sets(0, self.world.topology, self.settings)
        self.chain = model if isinstance(model, Chain) else Chain(model, loss=loss)
        model = self.chain.given
        settle_mtp(self.chain.model, without=without_mtp)
        refuse_cut_rows(self.chain, self.settings)
        self.work = work or work_of(self.chain)
        on_meta = all(parameter.is_meta for parameter in model.parameters())
        if weights is not None:
            source = weights(self.chain)
        else:
            source = InitSource(self.chain, seed) if on_meta else ModuleSource(self.chain)
        self.checked = ""
        """The outcome of the model's check, in a sentence; empty where it was left out."""
        # Which the tests of all families do not know.
        in_chunks = bool(self.settings.sequence_chunk) or self.sequence_ranks > 1
        if check == "always" or (check == "auto" and (in_chunks or not is_tested(model, loss))):
            self.checked = check_on_rank_0(Pipeline, self.chain, source, self.world, loss=loss, in_chunks=in_chunks)
        self.chain.quantise(quantize, dtype)
        self.spec = self.chain.spec
        optimizer = optimizer or adamw()
        self._schedules = Schedules(schedule, self.spec, self.world)  # refuses before anything is allocated
        refuse_strategy(self.chain, self._schedules.smallest, optimizer=optimizer, compile_layers=compile_layers)
        self._deal = Deal(
            micro_batch,
            self.world.rank,
            self.world.size,
            self.chain.positions,
            self.chain.config.get_text_config().vocab_size,
            own_loss=loss is not None,
            ranks=self.sequence_ranks,
            alone=self.chain.alone,
            share=self._schedules.shares,
            pinned=self.world.device.type == "cuda",
        )
        self._world_of_saves = self.world.with_group("saves", timedelta(days=7))
        self._adopted: set[int] = set()
        """Schedules, which are all kept, whose buffers are there."""
        self._savings: list[Saving] = []
        self.step_number = 0
        self._training: bool | None = None
        self._whole = True
        self._generation = 0  # changes whenever weights may have
        self._recent: deque[StepResult] = deque()

        self.storage = Storage(
            self.chain.units,
            self._schedules.smallest.homes,
            self.world.rank,
            device=self.world.device,
            compute_dtype=dtype,
            master_dtype=master_dtype(dtype),
        )
        self.storage.fill(source, self.world.group, self.world.size)
        self._parameters = Parameters(self.storage, self.world)
        self.chain.prepare(self.world.device, dtype)
        self.chain.load_buffers(source.buffers())
        # Before anything is compiled: what runs under a probe first is never compiled afterwards.
        self._kept_per_token = self._schedules.kept_per_token(self.chain, dtype)
        if compile_layers:
            self.chain.compile_layers()
        del source
        self.optimizers = UnitOptimizers(self.storage, optimizer)
        self.transport = Transport(
            self._schedules.smallest.topology,
            self.world.rank,
            self._schedules.samples(),
            device=self.world.device,
            strict=strict,
            timeout=timeout,
            far_bytes_per_s=self.world.far_bytes_per_s,
        )
        vocabulary, kind = self.chain.config.get_text_config().vocab_size, self.world.device.type
        chunk_tokens = loss_chunk(self.settings.loss_chunk_tokens, vocabulary, dtype, kind)
        self._compute = Compute(
            self.chain,
            self.spec,
            chunk_tokens=chunk_tokens,
            sequence_chunk=self.settings.sequence_chunk or 0,
            sequence_ranks=self.sequence_ranks,
            compiled=compile_layers,
            split_backward=self._schedules.smallest.strategy.splits,
            offload_dir=self.settings.offload_dir,
        )
        self.executor = Executor(
            self.world.rank,
            compute=self._compute,
            storage=self.storage,
            transport=self.transport,
            optimizers=self.optimizers,
            reduce_dtype=self.reduce_dtype,
            delay=delay,
            injector=injector,
            where=f"rank {self.world.rank} (node {self.world.nodes.node_of(self.world.rank)})",
        )
        self._compute.stream = self.executor.compute_stream
        self._closed = leave_at_exit(self, self.executor, self._savings, self.world)
        self.chain.hand_over()

    def __repr__(self) -> str:
        """The model, the strategy, the processes, and how far training has come."""
        count, trained = self.spec.identity["parameters"], self.spec.identity["trained"]
        some = f", of them {trained:,} trained" if trained < count else ""
        rows = f"micro-batches of {self.micro_batch} row{'s' * (self.micro_batch > 1)}"
        return (
            f"Pipeline({self.chain.name}: {count:,} parameters{some}\n"
            f"  {self._schedules.smallest.strategy.name}, {rows}, {str(self.dtype).removeprefix('torch.')}\n"
            f"  {self.world.nodes} on {self.world.device.type}\n"
            f"  {self.step_number:,} step{'s' * (self.step_number != 1)} done)"
        )

    @property
    def optimizer(self) -> PipelineOptimizer:
        """The optimizer's parameter groups, for ``torch.optim.lr_scheduler``: ``scheduler.step()`` after ``step``."""
        return self.optimizers.groups

    @property
    def ranks_of_a_row(self) -> int:
        """How many processes compute a row: a set, or the positions of a pipeline."""
        step = self._schedules.smallest
        return self.world.size // len(set(step.strategy.share(self.world.size, step.topology, step.settings)))

    @property
    def share_of_a_row(self) -> float:
        """The share of a row's work that is this process's, relative to the others': its stages' in a pipeline."""
        strategy, step = self._schedules.smallest.strategy, self._schedules.smallest
        if not isinstance(strategy, ActivationPipeline):
            return 1.0
        shape = strategy.shape(step.model, step.topology)
        mine = shape.layout.stages_of(shape.positions.position(self.world.rank))
        return sum(shape.costs.seconds(shape.layout, StageWork(kind, stage, 0)) for kind in "FB" for stage in mine)

    # what a step does

    def schedule(self, rows: int, *, training: bool = True) -> Schedule:
        """The schedule for a global batch of ``rows`` rows, proved once and kept."""
        if rows < 1:
            raise UserError("batch", f"{rows} rows", "at least one row")
        return self._schedule(self._deal.count(rows), training=training)

    def _schedule(self, count: int | tuple[int, int], *, training: bool = True) -> Schedule:
        schedule = self._schedules.of(count, training=training)
        if id(schedule) not in self._adopted:
            self._adopted.add(id(schedule))
            if self.injector is not None and training:
                self.injector.check(schedule, self.world.rank)
            self.executor.adopt(schedule)
        return schedule

    def reorder(self, rows: int, order: Order) -> None:
        """Train on batches of ``rows`` rows in another order of the same pipeline from the next step on; between the
        same two steps on all ranks. Weights stay where they are, and the numbers what they are.

        Raises:
            UserError: weights travel under the strategy.
            ScheduleError: the order is none of this pipeline.
        """
        self._schedules.reorder(self._deal.count(rows), order)

    def shares(self, rows: int) -> tuple[Share, ...]:
        """This rank's micro-batches of a global batch of ``rows`` rows, and the rows that each of them holds.

        A micro-batch holds the same rows for every number of processes; only who computes it changes.
        """
        return self._deal.shares(rows)

    def part_of(self, rows: int, sequence_length: int, row: Callable[[int], MicroBatch]) -> LocalBatch:
        """This rank's part of a global batch of ``rows`` rows, each of which ``row`` makes by its number. Shorter rows
        of a micro-batch are padded.

        Args:
            sequence_length: the most tokens that a row has.
        """
        parts = [MicroBatch.padded([row(number) for number in share.rows]) for share in self.shares(rows)]
        if self.world.device.type == "cuda":
            parts = [part.pin_memory() for part in parts]
        return LocalBatch(rows, sequence_length, parts)

    def deal(self, lengths: Sequence[int]) -> Bins:
        """Deal documents of so many tokens to all processes, so that they compute for equally long.

        Raises:
            UserError: a document is longer than a bin can be, or no ``bin_tokens`` were given.
        """
        if self.bin_tokens < 1:
            raise UserError("bin_tokens", self.bin_tokens, "the most tokens that a process computes at once")
        return deal(
            lengths,
            world_size=self.world.size,
            cap=self.bin_tokens,
            work=self.work,
            ranks=self.sequence_ranks,
        )

    def part_of_documents(
        self,
        lengths: Sequence[int],
        document: Callable[[int], MicroBatch],
        bins: Bins | None = None,
        *,
        training: bool = True,
    ) -> LocalBatch:
        """This rank's part of a step on documents of uneven lengths. Where a step of this shape is the first, its
        schedule is made and proved: a thread that is ahead of the steps can call it.

        Args:
            lengths: of all documents of the step, alike on all processes.
            document: makes one by its number, as a micro-batch of one row.
            bins: what ``deal`` made of the lengths, if it was asked before.
            training: False for an evaluation.

        Raises:
            UserError: see ``deal``; or a document has another length than was said.
        """
        bins = bins or self.deal(lengths)
        _ = self._schedules.of(bins.shape, training=training)
        parts = rows_of(bins, self.world.rank, document)
        if self.world.device.type == "cuda":
            parts = [part.pin_memory() for part in parts]
        digest = zlib.crc32(repr((bins.lengths, bins.shared, bins.single)).encode())
        count = sum(map(len, (*bins.shared, *bins.single)))
        return LocalBatch(count, self.bin_tokens * bins.ranks, parts, digest, bins)

    def step(
        self, batch: Mapping[str, Tensor] | LocalBatch, *, rate: float = 1.0, recording: Recording | None = None
    ) -> StepResult:
        """Forward, backward and update on one global batch. Returns while the step still runs. One without a label to
        learn updates nothing (``without_labels``).

        Args:
            batch: the global batch, alike on all processes: ``input_ids`` and ``labels`` [rows, S] in the Hugging Face
                convention, optionally ``position_ids`` (restarting at each packed document) or ``attention_mask``; or
                only this rank's part of it.
            rate: multiplies the learning rates of ``optimizer``'s groups, for this step alone.
            recording: takes down when the step's actions run; complete after ``drain``.

        Raises:
            RunError: an earlier step had a loss or gradient norm that was not finite. Neither it nor any step after it
                has changed the weights (unless updates are early); ``load`` goes on from a good state.
        """
        while len(self._recent) > 1:  # at most one step ahead of the results
            self._check(self._recent.popleft())
        local = self._deal.local(batch)
        self._set_training(True)
        result = self._play(local, training=True, rate=rate, recording=recording)
        self._recent.append(result)
        self.optimizer.step()  # schedulers want to have seen it
        self.step_number += 1
        self._generation += 1
        return result

    def evaluate(self, batch: Mapping[str, Tensor] | LocalBatch, *, measure: Measure | None = None) -> StepResult:
        """The loss on a global batch without an update. Waits for what is under way first.

        Args:
            measure: looks at the head of this rank's micro-batches, and says what their loss is.
        """
        if isinstance(measure, AnswersByRow) and self.micro_batch > 1 and self.sequence_ranks > 1:
            expected = "1 with schedule.sequence_ranks, where answers are told apart by row"
            raise UserError("micro_batch", self.micro_batch, expected)
        self.drain()
        local = self._deal.local(batch)
        self._set_training(False)
        result = self._play(local, training=False, rate=0.0, measure=measure)
        self.executor.drain()
        self._check_batch(result)
        return result

    def drain(self) -> None:
        """Wait for everything under way: the state in which weights may be read, saved or replaced.

        Raises:
            RunError: a step had a loss or gradient norm that was not finite.
        """
        for result in self._recent:  # so that it is seen how long they take
            result.wait()
        self.executor.drain()
        results = list(self._recent)
        self._recent.clear()
        for result in results:
            self._check(result)

    def close(self) -> None:
        """Drain, end the lanes and leave the process groups. The pipeline cannot be used afterwards.

        A script that ends without it, however, is waited for in the same way (runtime/leaving.py).
        """
        try:
            self.drain()
        finally:
            for saving in self._savings:
                saving.join()
            self.executor.close()
            self._compute.places.close()
        self._closed()
        self.transport.close()
        self._world_of_saves.drop_group(self.world)

    def _set_training(self, mode: bool) -> None:
        # It walks over all modules; but the model may have been switched by the caller's model.eval().
        if mode != self._training or mode != self.chain.model.training:
            self.chain.set_training(mode)
            self._training = mode

    def set_timeout(self, limit: timedelta) -> None:
        """Limit the time of a step from now on; beyond it every rank says what it waits for, and its process ends.

        Args:
            limit: the least; a multiple of what steps are known to take if that is more (``self.limit``).
        """
        self.limit.least_s, self._watched = limit.total_seconds(), True
        self._apply_limit()

    def _apply_limit(self) -> None:
        if self._watched:
            self.executor.watchdog.limit_s = self.limit.seconds
        # The transport would end it without a word; it is there for what no watchdog sees. Two steps may be issued.
        self.transport.set_timeout(timedelta(seconds=2 * self.limit.seconds + 30))

    def _estimate(self, local: LocalBatch) -> None:
        """Expect of the first step what its FLOPs and bytes say, where no plan has said it."""
        device, shares, ranks = self.world.device, self._deal.count(local.rows), self.sequence_ranks
        if (bins := local.bins) is None:
            rows = min(local.rows, self.micro_batch * ceil(shares * ranks / self.world.size))
            said = self.costs(local.rows, local.sequence_length)
            flops = (chain_flops(self.chain, [local.sequence_length] * rows, at_most=True) or 0.0) / ranks
        else:
            said = self._costs(self._schedule(bins.shape), local.sequence_length)
            busiest = bins.seconds / bins.mean_seconds / self.world.size
            flops = (chain_flops(self.chain, bins.lengths, at_most=True) or 0.0) * busiest
        self.limit.estimated_s = estimate_s(
            flops,
            max(*said.link_sent_bytes, *said.link_received_bytes, 0),
            device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            dtype=str(self.dtype).removeprefix("torch."),
        )
        self._apply_limit()

    def record_hangs(self, folder: Path) -> None:
        """Name the folder for what NCCL was given, which a rank that hangs writes under the step's name; on GPUs."""
        if self.world.device.type == "cuda":
            named = lambda step: folder / step.replace(" ", "-")  # noqa: E731
            self.executor.watchdog.last_words = lambda step: write_record(named(step), self.world.rank)

    def _check_batch(self, result: StepResult) -> None:
        if not result.alike:
            raise UserError(
                "batch",
                "different ones on different ranks",
                "the same global batch (and learning rates) on all ranks, each of which computes its own part of it; a "
                "rank that knows only its own rows gives a LocalBatch of what Pipeline.shares says",
            )

    def _check(self, result: StepResult) -> None:
        self._check_batch(result)
        before = self.limit.seconds
        if took_s := result.took_s:
            self.limit.took(took_s)
        if self.limit.seconds != before:
            self._apply_limit()
        if result.finite and result.tokens:
            self.skipped = 0
            return
        if result.finite:
            self.without_labels += 1
            if self.without_labels == 1 and self.world.rank == 0:
                logger.warning("a global batch has no label to learn: its step, like all such, is left out")
            return
        if self.skipped < self.skip_limit:
            self.skipped += 1
            return
        if isfinite(result.loss) and isfinite(result.grad_norm):
            raise RunError("an earlier step was not finite; nothing is updated until a good state is loaded")
        early = self.settings.early_updates
        outcome = "they have reached the weights: updates are early" if early else "the update was left out"
        raise RunError(f"loss {result.loss} and gradient norm {result.grad_norm} are not finite; {outcome}")

    def _play(
        self,
        local: LocalBatch,
        *,
        training: bool,
        rate: float,
        recording: Recording | None = None,
        measure: Measure | None = None,
    ) -> StepResult:
        self._require_whole()
        self.chain.check_frozen()
        device = self.world.device.type
        if torch.is_autocast_enabled(device):
            raise UserError("torch.autocast", f"enabled for {device}", "Pipeline(dtype=...): blocks compute in that")
        bins = local.bins
        schedule = self._schedule(bins.shape if bins else self._deal.count(local.rows), training=training)
        if training and not self.limit.known_s:
            self._estimate(local)
        chosen = self.optimizer.chosen()  # as they are now: the step itself runs later
        micro_batches = self._deal.numbered(local, schedule.step.micro_batches[self.world.rank])
        given = StepInput(
            micro_batches,
            scale=2.0 ** -ceil(log2(local.rows * local.sequence_length)),
            seed=self.seed if training else None,
            step=self.step_number,
            digest=zlib.crc32(struct.pack("d", rate) + repr(chosen).encode(), local.digest or 0) % 2**20,
            measure=measure,
            place=self.world.topology.local_of(self.world.rank) % self.sequence_ranks,
            shared=schedule.step.shared,
            counted=schedule.step.losses_of(self.world.rank) if schedule.step.losses else None,
            kept={m: self._layers_kept(schedule, m, batch) for m, batch in micro_batches.items()} if training else {},
        )
        if schedule.step.settings.offloaded_layers:
            tokens = self.bin_tokens if bins else 0
            self._compute.make_places(schedule.programs[self.world.rank], given, self.dtype, tokens)
        rule = UpdateRule(self.clip_norm, rate, memory=0.0 if self.skip_limit else 1.0, chosen=chosen)
        return self.executor.play(schedule, given, rule, recording=recording)

    def _layers_kept(self, schedule: Schedule, m: int, batch: MicroBatch) -> frozenset[int]:
        """The layers of which ``keep_mib`` holds what a micro-batch would compute again."""
        settings = schedule.step.settings
        if not settings.keep_mib or schedule.step.ranks_of(m) > 1:
            return frozenset()
        config = self.chain.config.get_text_config()
        if "graph" not in self._kept_per_token:
            return frozenset()
        each = max(1, self._kept_per_token["graph"] - self.chain.width * self.dtype.itemsize)
        tokens = batch.input_ids.numel() * settings.micro_batches_per_visit
        first = max(settings.offloaded_layers + 1, self.spec.first_backward)
        return layers_that_keep(batch.lengths, windows(config), settings.keep_mib * 2**20 // (each * tokens), first)

    # state

    def save(self, where: str | Path | Store, *, run: Mapping[str, Any] | None = None) -> Saved:
        """Write weights, optimizer state and step number; call on all ranks.

        Args:
            where: a folder, which all ranks must see, and which is replaced when the new one is complete; or a store,
                in which the folder is named after the step.
            run: JSON values of the caller, which ``load`` returns.

        Raises:
            RunError: it could not be written; what was there before is untouched.
        """
        saved = self.start_saving(where, run=run).wait()
        if saved.problem:
            raise RunError(f"{saved.folder} could not be written: {saved.problem}")
        return saved

    def start_saving(self, where: str | Path | Store, *, run: Mapping[str, Any] | None = None) -> Saving:
        """Copy what ``save`` writes, and write it while training goes on; one at a time in every store.

        Returns when the copy is there: weights may change then. What came of it, ``Saving.wait`` says.
        """
        begin = time.perf_counter()
        self._require_whole()
        self.drain()
        if isinstance(where, str | Path):
            store, name = Disk(Path(where).parent, self.world, injector=self.injector), Path(where).name
        else:
            store, name = where, step_name(self.step_number)
        world = store.group or self._world_of_saves
        self._savings[:] = [saving for saving in self._savings if not saving.done]
        assert all(saving.world is not world for saving in self._savings), "one save at a time"
        pieces = stage(list(state_pieces(self.storage, self.optimizers, saving=True)))
        content = {
            "parameters": {slot.name: list(slot.shape) for unit in self.storage.units for slot in unit.slots},
            "step": self.step_number,
            "run": dict(run or {}),
            "optimizer": self.optimizers.name,
            "history": store.history,
            **({"quantize": self.storage.form} if self.storage.form != NONE else {}),
        }
        staged_s = time.perf_counter() - begin
        self._savings.append(Saving(store, name, pieces, content=content, world=world, staged_s=staged_s))
        return self._savings[-1]

    def load(self, where: str | Path | Source) -> dict[str, Any]:
        """Go on from what ``save`` has written, on any number of processes and with any strategy; returns its ``run``.

        Args:
            where: the folder, or the source that ``checkpoint.resume`` has chosen.

        Raises:
            UserError: no complete state, or one of another model or optimizer; nothing here has changed.
            RunError: reading broke off in the middle. What is here is half of a state: steps, evaluations, saves and
                exports raise until a load succeeds.
        """
        self.executor.drain()
        whole, self._whole = self._whole, False
        try:
            source = where if isinstance(where, Source) else Path(where)
            manifest = load_state(source, self.storage, self.optimizers, self.world)
        except UserError:
            self._whole = whole  # it has changed nothing
            raise
        finally:
            self._generation += 1
            self.chain.forget()
        self._whole = True
        self._recent.clear()  # of the state that is replaced
        self.skipped = 0
        self.step_number = manifest["step"]
        self.executor.forgive()
        return manifest["run"]

    def _require_whole(self) -> None:
        """Raises RunError where a load broke off in the middle."""
        if not self._whole:
            raise RunError("a load broke off: this pipeline holds half of a state until one succeeds")

    def export(
        self,
        folder: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        merge: bool = False,
        max_shard_bytes: int = 4 * 2**30,
        tokenizer: Any = None,
    ) -> Path:
        """Write a folder for ``AutoModelForCausalLM.from_pretrained``, or for a ``peft`` model its adapter, which
        ``merge`` puts into the weights of the whole model instead; on all ranks.
        """
        self._require_whole()
        self.drain()
        return export_hugging_face(
            self.chain,
            folder,
            self.parameter,
            dtype=dtype,
            merge=merge,
            max_shard_bytes=max_shard_bytes,
            is_writer=self.world.rank == 0,
            tokenizer=tokenizer,
        )

    def costs(self, rows: int, sequence_length: int) -> Costs:
        """Bytes over the links and memory of one step, from the schedule alone."""
        return self._costs(self.schedule(rows), min(self.micro_batch, rows) * sequence_length)

    def costs_of_bins(self, bins: Bins) -> Costs:
        """The same of a step on documents of uneven lengths, for bins that are full."""
        return self._costs(self._schedule(bins.shape), self.bin_tokens * bins.ranks)

    def _costs(self, schedule: Schedule, tokens: int) -> Costs:
        said = step_costs(
            self.chain,
            schedule,
            self.dtype,
            self.optimizers.states_per_element,
            tokens=tokens,
            kept_per_token=self._kept_per_token,
            nodes=self.world.nodes,
        )
        return replace(said, host_bytes=said.host_bytes + self.storage.exact_bytes)

    def check_copies(self) -> None:
        """Compare what should be alike on several processes: the copies of every home, and what travels of it with its
        master. Waits for what is under way; call on all ranks.

        Raises:
            RunError: something is not alike; on all ranks.
        """
        self.drain()
        self._parameters.check_copies()

    # weights

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of all parameters, in the order of their units."""
        return self._parameters.names

    def parameter(self, name: str) -> Tensor | None:
        """One whole parameter in the master dtype on rank 0, None elsewhere; call on all ranks. Drains first."""
        self._parameters.check(name, gradient=False)
        self.drain()
        return self._parameters.collect(name, self._generation)

    def gradient(self, name: str) -> Tensor | None:
        """The clipped gradient that the last update used, like ``parameter``; the parameter must be trainable."""
        self._parameters.check(name, gradient=True)
        self.drain()
        return self._parameters.collect(name, self._generation, gradient=True)


def _check_settings(*, micro_batch: int, dtype: torch.dtype | str, clip_norm: float | None, seed: int) -> None:
    if micro_batch < 1:
        raise UserError("micro_batch", micro_batch, "at least 1")
    # fp16 would need loss scaling: gradients of single tokens are below its range.
    if dtype not in (AUTO, *DTYPES.values()):
        raise UserError("dtype", dtype, "torch.float32, torch.bfloat16, torch.float64 or 'auto'")
    if clip_norm is not None and not clip_norm > 0:
        raise UserError("clip_norm", clip_norm, "above 0, or None for no clipping")
    if seed < 0:
        raise UserError("seed", seed, "0 or more")
